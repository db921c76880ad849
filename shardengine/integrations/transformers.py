"""ShardTrainer: transformers' Trainer over our engine; ShardTrainerMixin makes one of any class derived from Trainer.

Owns: the translation of Trainer's arguments to an engine, saving and resuming, the log of a plan. Must not know: engine
internals.

[Note: One engine] The engine that the first ``train()`` creates is kept for evaluation and for the next ``train()``,
with the optimizer's states, as Trainer keeps a DDP model. Trainer evaluates the model itself, whose weights are
gathered when it runs.

[Note: Checkpoints] Trainer's ``checkpoint-<N>`` also holds a checkpoint of the engine, in the form that the stand-in
for DeepSpeed writes (compat/deepspeed). Trainer loads weights before it prepares the model. If there is a checkpoint of
the engine, the weights are loaded with it instead, afterwards. A folder without one gives weights; if a run under DDP
wrote it, also the optimizer's states.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from shardengine.checkpoint import directory
from shardengine.config import Config, load_config
from shardengine.core import on_all_ranks
from shardengine.engine import Engine
from shardengine.errors import UsageError
from shardengine.integrations.accelerate import (
    ConfigOptimizer,
    ShardAccelerator,
    ShardOptimizer,
    Surroundings,
    written,
)
from shardengine.optim import lr_schedules
from shardengine.planner import (
    SETTLED_STEPS,
    Plan,
    Taken,
    compare,
    line_of,
    plan_amid,
    taken_by,
    this_machine,
    watched,
)

_log = logging.getLogger(__name__)
_MANY = 10**9
"""A number of steps to check a schedule with, before the real number is known."""
_WITHOUT = "without this file training goes on with the weights and a new optimizer"


class ShardTrainerMixin:
    """A mixin for a class derived from Trainer, written before it: ``class ShardSFT(ShardTrainerMixin, SFTTrainer)``.

    engine_config: the engine's config, a dict or the path of a JSON file, as an argument or as an attribute of the
    class. TrainingArguments give the settings that are missing or "auto" in it: batch sizes, clipping, precision, the
    optimizer and its schedule. ``bf16=True`` means autocast, as without an engine; with ``"bf16": {"enabled": "auto"}``
    in the config it means weights in bf16 and master weights in fp32.
    """

    engine_config: Mapping[str, Any] | str | Path | None = None
    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    lr_scheduler: Any
    state: Any
    _save: Any
    push_to_hub: Any
    compute_loss: Any
    compute_loss_func: Any
    label_smoother: Any
    train_dataset: Any
    data_collator: Any
    _train_batch_size: int
    _get_collator_with_removed_columns: Any
    _planned: Plan | str | None = None
    _taken: Taken | None = None
    _first_step: int | None = None

    def __init__(self, *args: Any, engine_config: Mapping[str, Any] | str | Path | None = None, **kwargs: Any) -> None:
        """Other arguments are passed to the Trainer class.

        ConfigError with every problem of the config; UsageError for arguments that an engine does not support. Both are
        raised on every rank.
        """
        if engine_config is not None:
            self.engine_config = engine_config
        super().__init__(*args, **kwargs)

    # Making

    def create_accelerator_and_postprocess(self) -> None:
        """Turn Trainer's own accelerator into a ShardAccelerator."""
        _check(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        tree = written(self.engine_config)
        tree.setdefault("gradient_clipping", "auto")
        self._schedule = tree.pop("scheduler", None)  # Trainer steps it
        if self._schedule is not None:
            told = [each for each in self._read_schedule(_MANY).notices if "scheduler" in each]
            if told and self.accelerator.is_main_process:
                _log.warning("of the config: %s", "; ".join(told))
        surroundings = Surroundings(self._log_plan, self._first_rows)
        self.accelerator = ShardAccelerator.adopt(self.accelerator, tree, _auto(self.args), surroundings)

    @property
    def engine(self) -> Engine | None:
        """The engine that holds the model; None before the first ``train()``."""
        wrapped = vars(self).get("model_wrapped")
        return wrapped if isinstance(wrapped, Engine) and wrapped.is_open else None

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: ``prepare`` moves a rank's shards to the device."""

    def create_optimizer(self, model: Any = None) -> Any:
        """Create Trainer's optimizer, or the config's if it has one and the user passed none.

        The config's optimizer steps Trainer's parameter groups.
        """
        chosen = self.accelerator.engine_config.get("optimizer")
        ours: tuple[type[ConfigOptimizer], dict[str, Any]] = (ConfigOptimizer, {})
        if chosen is None or self.optimizer_cls_and_kwargs not in (None, ours):
            return super().create_optimizer(model)  # type: ignore[misc]
        self.optimizer_cls_and_kwargs = ours
        decay, args = (chosen.get("params") or {}).get("weight_decay", "auto"), self.args
        if decay != "auto":  # Trainer writes the value of its arguments into the groups, which override the config
            self.args = copy.copy(args)
            vars(self.args)["weight_decay"] = decay
        try:
            return super().create_optimizer(model)  # type: ignore[misc]
        finally:
            self.args = args

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create Trainer's scheduler, or the config's if it has one and the user passed none."""
        if self._schedule is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]
        schedule = self._read_schedule(num_training_steps).scheduler
        assert schedule is not None
        self.lr_scheduler = lr_schedules.build(schedule, self.optimizer if optimizer is None else optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _read_schedule(self, steps: int) -> Config:
        """Return the config's schedule; settings that are "auto" are filled in for ``steps`` optimizer steps."""
        auto = _auto(self.args) | {"scheduler.params.total_num_steps": steps}
        auto["scheduler.params.warmup_num_steps"] = self.args.get_warmup_steps(steps)
        read = load_config({"train_batch_size": 1, "scheduler": self._schedule}, auto)
        if read.scheduler is not None:
            lr_schedules.check(read.scheduler)
        return read

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.engine is None:
            self.model_wrapped = self.model
            if isinstance(self.optimizer, ShardOptimizer):
                _log.warning("the engine was closed since the last train(): the optimizer's states begin anew")
                self.optimizer = None
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def _clip_grad_norm(self, model: Any) -> Any:
        """Return the gradient norm; the engine itself clips, to the limit of the config or ``max_grad_norm``."""
        return self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))

    # Planning

    def _log_plan(self, model: nn.Module | None, config: Config, optimizer: torch.optim.Optimizer | None) -> None:
        """Plan and log the memory that training needs; only on rank 0, and if INFO is logged."""
        self._planned, self._taken, self._first_step = None, None, None
        if not self.accelerator.is_main_process or not _log.isEnabledFor(logging.INFO):
            return
        if model is None:
            self._planned = "the model is sharded by an earlier engine"
        elif type(self).compute_loss is not Trainer.compute_loss or "compute_loss" in vars(self) or self._smooths:
            self._planned = "the loss is not the one that the model returns"
        else:
            where = this_machine(self.accelerator.device, self.accelerator.num_processes, config)
            self._planned = plan_amid(model, config, where, self._first_rows, optimizer=optimizer)
        _log.info("plan: %s", line_of(self._planned))

    @property
    def _smooths(self) -> bool:
        return self.label_smoother is not None or self.compute_loss_func is not None

    def _first_rows(self) -> dict[str, Any]:
        """Return a micro-batch made without the data loader, because that would change the loader's order."""
        if isinstance(self.train_dataset, torch.utils.data.IterableDataset):
            raise UsageError("the training data has no rows by number: expected some", code="trainer-data-not-indexed")
        count = min(self._train_batch_size, len(self.train_dataset))
        rows = [self.train_dataset[index] for index in range(count)]
        return {**self._get_collator_with_removed_columns(self.data_collator, description="training")(rows)}

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's step; on a CPU with a memory plan, measure the memory of one settled step."""
        engine, step = self.engine, self.state.global_step
        if engine is None or not isinstance(self._planned, Plan) or engine.device.type != "cpu":
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self._first_step is None:
            self._first_step = step
        if step + 1 != min(self._first_step + SETTLED_STEPS, self.state.max_steps):
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        with watched(engine) as taken:
            loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self._taken is None or (taken.peak or 0) > (self._taken.peak or 0):
            self._taken = taken
        return loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Run Trainer's ``train``; with a memory plan, log the measured memory beside it."""
        found = super().train(*args, **kwargs)  # type: ignore[misc]
        if self.engine is not None and isinstance(self._planned, Plan):
            compared = compare(self._planned, taken_by(self.engine, self._taken))
            _log.info("plan: %s", compared.line())
            if compared.exceeds:
                _log.warning("%s", compared.sentence())
        return found

    # Saving

    @property
    def _has_adapters(self) -> bool:
        return bool(getattr(self.model, "peft_config", None))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model like Trainer, with whole weights. Collective.

        Of a model with adapters, only the weights that are trained or that peft saves.
        """
        engine = self.engine
        if engine is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        engine.average_replicas()
        state = engine.state_dict(trainable_only=self._has_adapters)
        folder = self.args.output_dir if output_dir is None else output_dir
        on_all_ranks(engine, "saving the model", lambda: engine.rank == 0 and self._save(folder, state_dict=state))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = self._need_engine()
        engine.average_replicas()
        engine.save_checkpoint(output_dir, f"global_step{engine.global_steps}", frozen=not self._has_adapters)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _need_engine(self) -> Engine:
        if self.engine is None:
            raise UsageError(
                "ShardTrainer: expected an open engine, as train() makes one; it was closed meanwhile",
                code="trainer-engine-closed",
            )
        return self.engine

    # Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not _is_ours(resume_from_checkpoint):
            with self._writing_weights():
                super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if _is_ours(checkpoint):
            self._need_engine().load_checkpoint(checkpoint)
        elif Path(checkpoint, OPTIMIZER_NAME).exists():
            _take_over(self._need_engine(), Path(checkpoint, OPTIMIZER_NAME))
        file = Path(checkpoint, SCHEDULER_NAME)
        if file.exists():
            self.lr_scheduler.load_state_dict(torch.load(file, weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if self.engine is not None and _is_ours(best):
            _log.info("the best model is loaded from %s (%s)", best, self.state.best_metric)
            self.engine.load_checkpoint(best, weights_only=True)
            return
        with self._writing_weights():
            super()._load_best_model()  # type: ignore[misc]

    def _writing_weights(self) -> AbstractContextManager[None]:
        return nullcontext() if self.engine is None else self.engine.full_params(writable=True)


class ShardTrainer(ShardTrainerMixin, Trainer):
    """transformers' Trainer with a model that is sharded according to ``engine_config``; see ShardTrainerMixin."""


def _is_ours(checkpoint: str) -> bool:
    return Path(checkpoint, directory.LATEST).exists()


def _take_over(engine: Engine, file: Path) -> None:
    """Load the states that a torch optimizer over the same groups has saved, as Trainer does under DDP."""
    assert engine.optimizer is not None
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # read on rank 0 alone
    try:
        engine.optimizer.load_state_dict(saved)
    except UsageError as error:
        raise UsageError(f"{file}: {error}; {_WITHOUT}", code="trainer-optimizer-file-refused") from error


def _check(args: TrainingArguments) -> None:
    """Raise UsageError for arguments that an engine does not support."""
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise UsageError(
                f"ShardTrainer: {name} is another engine; expected TrainingArguments without it",
                code="trainer-with-another-engine",
            )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise UsageError(
                f"ShardTrainer: {name} casts the model, whose weights the engine holds; expected it to be False. With "
                "bf16=True evaluation is under autocast, too",
                code="trainer-eval-casts-model",
            )
    if args.n_gpu > 1:
        raise UsageError(
            f"ShardTrainer: expected one process for each of the {args.n_gpu} GPUs; start the program with torchrun",
            code="trainer-several-gpus-per-process",
        )


def _auto(args: TrainingArguments) -> dict[str, Any]:
    """Return the values of settings that are "auto" in the config, by dotted name."""
    return {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_min_lr": 0.0,
        "scheduler.params.warmup_max_lr": args.learning_rate,
    }
