"""``Trainer(strategy="shardengine_stage_3")`` after ``import shardengine.integrations.lightning``.

Owns: the implementation of Lightning's strategy by an engine. Must not know: engine internals.

[Note: Steps through the engine] Lightning calls ``training_step``, not ``forward``. The strategy calls it inside the
engine's forward (Lightning's redirection for wrapped modules). So the weights of the LightningModule itself are
gathered, inputs are cast, buffers are rank 0's, and a failure is propagated to the other ranks. Before each backward,
Lightning's loop knows whether it ends the accumulation window, and it has divided the loss. While the engine is open,
it implements ``zero_grad``, clipping and ``step`` of the user's optimizer, so Lightning's own loop is unchanged.

[Note: Two parts] ``X.ckpt`` is the file that Lightning writes, without optimizer states. Any program can load it, also
with ``load_from_checkpoint``. ``X.ckpt.shards/TAG`` beside it is the engine's checkpoint. The file names the tag and is
written last, so that the two always match: a failed save leaves the previous pair.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

import shardengine
from shardengine import Config, Engine
from shardengine.config import read_tree
from shardengine.errors import CheckpointError, CommunicationError, UsageError

_PRECISIONS: dict[str, dict[str, Any]] = {
    "32-true": {},
    "bf16-true": {"bf16": {"enabled": True}},
    "16-true": {"fp16": {"enabled": True}},
    "bf16-mixed": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "16-mixed": {
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "fp16": {"enabled": False, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1},
    },
}
"""Lightning's ``precision`` → sections of the config; the loss scale is that of torch's GradScaler."""
_OF_LIGHTNING = (
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin",
    "process_group_backend", "timeout", "start_method",
)  # fmt: skip
_KEY, _SUFFIX = "shardengine", ".shards"
_WITHOUT_STATES = (
    "has no optimizer states, because the engine was closed at the end of fit: it cannot be resumed from; to go on "
    "with training, let ModelCheckpoint(save_last=True) save inside of fit"
)

_MAY_BE_LEFT_OUT = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
)  # fmt: skip
"""Keys of the config that may be missing: the Trainer knows them, or they are optional."""


class Unscaled(MixedPrecision):
    """Lightning's autocast plugin without its GradScaler: the engine scales the loss."""

    def __init__(self, plugin: MixedPrecision) -> None:
        super().__init__(plugin.precision, plugin.device)
        self.scaler = None


class ShardStrategy(DDPStrategy):
    """Trains a LightningModule with an engine, which shards it over the ranks according to ``stage``.

    config: as for ``shardengine.initialize`` (settings that the Trainer knows may be missing) · stage: 0 to 3; None:
    that of the config · full_weights: whether ``.ckpt`` files hold the whole weights. Rank 0 then needs them in host
    memory while it writes. If False, only the folder beside the file has the weights · others: Lightning's arguments of
    DDPStrategy, such as ``start_method`` and ``timeout``, which also sets the engine's ``timeout_s`` unless the config
    does.

    ConfigError for every problem of the config; UsageError for other arguments.
    """

    optimizers: list[Any]
    model: Any
    lr_scheduler_configs: list[Any]

    def __init__(
        self,
        config: Mapping[str, Any] | str | Path | Config | None = None,
        stage: int | None = None,
        *,
        full_weights: bool = True,
        **others: Any,
    ) -> None:
        if unknown := sorted(others.keys() - set(_OF_LIGHTNING)):
            raise UsageError(
                f"ShardStrategy: expected config, stage, full_weights and {', '.join(_OF_LIGHTNING)}, got "
                f"{', '.join(unknown)}; what the engine does is said in config",
                code="lightning-strategy-argument-unknown",
            )
        self._tree = _tree(config, stage)
        if others.get("timeout") is not None:
            self._tree.setdefault("timeout_s", others["timeout"].total_seconds())
        self._full_weights = full_weights
        self._left_out: Path | None = None  # a checkpoint whose weights the next engine has to load
        self._beside: Path | None = None  # the engine's part of the checkpoint that was loaded last
        self._engine: Engine | None = None
        self._fails = False
        self._has_loss = False  # of a micro-batch of the window
        super().__init__(**others)

    @property
    def engine(self) -> Engine:
        """The open engine, for ``full_grads``, ``full_params``, ``memory``, …; UsageError outside of a run."""
        if self._engine is None:
            raise UsageError(
                "strategy.engine: expected a running fit, validate, test or predict; no engine is open",
                code="lightning-no-open-engine",
            )
        return self._engine

    # Set-up and end

    @property
    def precision_plugin(self) -> Any:
        """Lightning's precision plugin; it casts batches and enters autocast, the engine does the rest."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        """Set the plugin; UsageError unless it is one of Lightning's floating-point plugins."""
        if plugin is not None and type(plugin) not in (Precision, HalfPrecision, MixedPrecision, Unscaled):
            raise UsageError(
                f"ShardStrategy: expected precision {', '.join(map(repr, _PRECISIONS))}, got "
                f"{type(plugin).__name__} with {plugin.precision!r}",
                code="lightning-precision-unavailable",
            )
        self._precision_plugin = Unscaled(plugin) if isinstance(plugin, MixedPrecision) else plugin

    def setup(self, trainer: Any) -> None:
        """Create the engine: with an optimizer for training, without one for evaluation."""
        self._end(restore=False)
        self.accelerator.setup(trainer)
        module, fits = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if self._layer_sync is not None:
            raise UsageError(
                "Trainer(sync_batchnorm=True) is not available here: use norms without batch statistics",
                code="lightning-sync-batch-norm",
            )
        _refuse_what_cannot_be(trainer, module)
        tree = _with_what_the_trainer_knows(self._tree, trainer, self.precision_plugin.precision)
        self.optimizers, self.lr_scheduler_configs = [], []
        if fits:
            self.setup_optimizers(trainer)
            optimizer = _only(self.optimizers, self.lr_scheduler_configs, tree)
        else:
            tree = {key: value for key, value in tree.items() if key not in ("optimizer", "scheduler")}
            optimizer = None
        self._engine = shardengine.initialize(module, tree, optimizer=optimizer)
        self._fails = self._has_loss = False
        if fits and optimizer is None:
            self.optimizers = [self._engine.optimizer]
        self.model = self._engine
        if self._left_out is not None:
            part, self._left_out = self._left_out, None
            self._load(part, weights_only=True)

    def on_exception(self, exception: BaseException) -> None:
        """Note that the run ends with ``exception``, so that teardown does not hide or delay it."""
        self._fails = True

    def teardown(self) -> None:
        """Turn the model into an ordinary one again, with whole weights, on the CPU.

        After an exception with several ranks, the engine stays open until the next run. The other ranks may wait in a
        collective of the model's own, so they would not take part in gathering the weights.
        """
        self.model = self.lightning_module
        if self._fails and self.world_size > 1:
            self.cluster_environment.teardown()
            self.precision_plugin.teardown()
            self.accelerator.teardown()
            return
        self._end(restore=True)
        super().teardown()

    def _end(self, *, restore: bool) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close(restore=restore)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create models on the CPU in their own dtype: the engine moves, casts and shards them.

        empty_init: create them on the meta device on all ranks but rank 0; the engine takes rank 0's values.
        """
        with torch.device("meta") if empty_init and self.global_rank else nullcontext():
            yield

    # A step

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward of a loss that Lightning has divided, with its hooks before and after."""
        trainer, self._has_loss = self.lightning_module.trainer, True
        self.engine.set_gradient_accumulation_boundary(not trainer.fit_loop._should_accumulate())
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        if is_overridden("backward", self.lightning_module):
            self.precision_plugin.backward(loss, self.lightning_module, optimizer, *args, **kwargs)
        else:
            self.engine.backward(loss, *args, divide=False, **kwargs)
        return self.precision_plugin.post_backward(loss, self.lightning_module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do nothing: the gradients of each micro-batch are reduced and accumulated in the form of the stage.

        Lightning's own version calls the model's ``no_sync``. With the engine's, whole gradients would stay on every
        rank.
        """
        yield

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Run Lightning's step: ``closure``, clipping, the engine's step.

        The step is taken even if the last batch of the accumulation window gave no loss, but not if no batch of the
        window gave one.
        """
        self.engine.set_gradient_accumulation_boundary(True)
        loss = closure()
        if not self._has_loss:
            return loss
        self._has_loss = False
        return super().optimizer_step(optimizer, lambda: loss, model, **kwargs)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole weights on rank 0, {} on other ranks; {} on all if ``full_weights`` is False. Collective."""
        if self._engine is None:
            return dict(super().lightning_module_state_dict())
        try:
            self._engine.average_replicas()
            return self._engine.state_dict() if self._full_weights else {}
        except CommunicationError as error:
            raise CommunicationError(
                f"trainer.save_checkpoint on rank {self.global_rank}: expected the call on every rank, also where rank "
                f"0 alone writes a file; {error}",
                code="lightning-save-without-ranks",
            ) from error

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return {}: the optimizer's state is in the engine's part of the checkpoint."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write Lightning's file and the engine's part, which a weights-only file with whole weights does not need.

        Collective. In the middle of an accumulation window both hold the state after the last completed step.
        UsageError for a remote path (a URL).
        """
        path = _local(self.broadcast(filepath))
        resumes = bool(checkpoint.pop("optimizer_states", None))
        tag = None
        if self._engine is None or self._engine.optimizer is None:
            if resumes:
                rank_zero_warn(f"{path} {_WITHOUT_STATES}")
                checkpoint[_KEY] = {"tag": None, "full_weights": True}
        elif resumes or not self._full_weights:
            tag = f"step-{self._engine.global_steps:08d}"
            self._engine.average_replicas()
            self._engine.save_checkpoint(_beside(path), tag)
            self._engine.wait_for_checkpoint()
            checkpoint[_KEY] = {"tag": tag, "full_weights": self._full_weights}
        super().save_checkpoint(checkpoint, path, storage_options)
        if self.is_global_zero and _beside(path).is_dir():
            _remove_others(_beside(path), tag)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load Lightning's file, and note the place of the engine's part. UsageError for the folder beside the file."""
        path = self.broadcast(checkpoint_path)
        for folder in (Path(path), Path(path).parent) if os.path.isdir(path) else ():
            if folder.name.endswith(_SUFFIX):
                raise UsageError(
                    f"ckpt_path: expected the file {folder.name.removesuffix(_SUFFIX)}, got the folder {path}, which "
                    "has the engine's part of it",
                    code="lightning-path-to-engine-part",
                )
        checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only)
        said, self._beside = checkpoint.get(_KEY), None
        if said is not None:
            if said["tag"] is not None:
                self._beside = _beside(Path(os.path.realpath(path))) / said["tag"]
            checkpoint["optimizer_states"] = []  # Lightning checks that the key exists
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into the open engine, or, before it is created, into the model. Collective.

        Without an engine only rank 0's values count. If only the engine's part has the weights, the next engine loads
        them.
        """
        here = self.global_rank == 0 or not any(each.is_meta for each in self.lightning_module.parameters())
        if self._beside is not None and not checkpoint[_KEY]["full_weights"]:
            if self._engine is None:
                self._left_out = self._beside
            else:
                self._load(self._beside, weights_only=True)
        elif self._engine is not None:
            with self._engine.full_params(writable=True):
                super().load_model_state_dict(checkpoint, strict)
        elif here:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the engine's part of the checkpoint, at any stage and number of ranks. Collective.

        A checkpoint of another strategy (DDP) has torch's own dict, which is loaded instead. CheckpointError if the
        engine's part is missing or damaged, UsageError if it does not fit.
        """
        if self._beside is None:
            if _KEY in checkpoint:
                raise UsageError(
                    f"fit(ckpt_path=...): the file {_WITHOUT_STATES}", code="lightning-checkpoint-without-states"
                )
            states = checkpoint.get("optimizer_states") or [{}]
            if len(states) != 1 or self.engine.optimizer is None:
                raise UsageError(
                    f"fit(ckpt_path=...): expected the states of one optimizer, got {len(states)}",
                    code="lightning-not-one-optimizer-state",
                )
            self.engine.optimizer.load_state_dict(states[0])
            return
        self._load(self._beside)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove both parts of a checkpoint."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(Path(filepath)), ignore_errors=True)

    def _load(self, part: Path, *, weights_only: bool = False) -> None:
        if not part.is_dir():
            raise CheckpointError(
                f"expected the folder {part.name} in {part.parent}, got none: a checkpoint of ShardStrategy is the "
                f"file and the folder {_SUFFIX} beside it; move both",
                code="lightning-engine-part-missing",
            )
        strict = self.lightning_module.strict_loading
        try:
            self.engine.load_checkpoint(part.parent, part.name, strict=strict, weights_only=weights_only)
        except UsageError as error:
            raise UsageError(
                f"{error}. In Lightning strict=False is strict_loading = False of the LightningModule; to begin anew "
                "with the weights, fit Model.load_from_checkpoint(path)",
                code="lightning-checkpoint-does-not-fit",
            ) from error


def _tree(config: Any, stage: int | None) -> dict[str, Any]:
    """Return ``config`` as plain JSON values including ``stage``, checked. Raises ConfigError, UsageError."""
    if isinstance(config, (str, Path)):
        tree = read_tree(Path(config))
    elif isinstance(config, Config):
        tree = config.to_dict()
    elif isinstance(config, Mapping | None):
        tree = dict(config or {})
    else:
        raise UsageError(
            f"ShardStrategy: expected config as a dict, a path or a Config, got {type(config).__name__}",
            code="config-wrong-type",
        )
    tree = {key: value for key, value in tree.items() if key not in _MAY_BE_LEFT_OUT or value != "auto"}
    if "train_batch_size" not in tree:
        tree.setdefault("train_micro_batch_size_per_gpu", 1)  # only counters of samples depend on it
    zero, wanted = dict(tree.get("zero_optimization") or {}), {} if stage is None else {"stage": stage}
    if wanted | zero != zero | wanted:
        raise UsageError(
            f"ShardStrategy: expected one stage, got stage={stage} and {zero['stage']} in config",
            code="lightning-stage-given-twice",
        )
    tree["zero_optimization"] = zero | wanted
    if "stage" not in tree["zero_optimization"]:
        raise UsageError(
            "ShardStrategy: expected a stage, 0 to 3, as stage= or in config, got none", code="lightning-stage-missing"
        )
    shardengine.load_config(tree)
    return tree


def _with_what_the_trainer_knows(tree: dict[str, Any], trainer: Any, precision: str) -> dict[str, Any]:
    """Return the config of an engine for ``trainer``; UsageError if config and Trainer disagree."""
    tree = dict(tree)
    steps = trainer.accumulate_grad_batches
    if tree.setdefault("gradient_accumulation_steps", steps) != steps:
        raise UsageError(
            f"Trainer(accumulate_grad_batches={steps}) and {tree['gradient_accumulation_steps']} "
            "gradient_accumulation_steps in config: expected it in the Trainer alone",
            code="lightning-accumulation-given-twice",
        )
    if trainer.gradient_clip_val and tree.get("gradient_clipping"):
        raise UsageError(
            "gradient_clipping in config and Trainer(gradient_clip_val=...): expected one of them",
            code="lightning-clipping-given-twice",
        )
    wanted = _PRECISIONS[precision]
    for section in ("bf16", "fp16", "torch_autocast") if wanted else ():
        ours = wanted.get(section, {"enabled": False})
        said = {key: value for key, value in dict(tree.get(section, {})).items() if value != "auto"}
        if any(said.get(key, ours.get(key)) != ours.get(key) for key in ("enabled", "dtype")):
            raise UsageError(
                f"Trainer(precision={precision!r}) and {section} {said} in config: expected one of them",
                code="lightning-precision-given-twice",
            )
        tree[section] = ours | said
    return tree


def _refuse_what_cannot_be(trainer: Any, module: Any) -> None:
    if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
        raise UsageError(
            "automatic_optimization=False is not available: expected Lightning's own optimization with one optimizer; "
            "a loop of your own is written with shardengine.initialize",
            code="lightning-manual-optimization",
        )
    for callback in trainer.callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise UsageError(
                f"{type(callback).__name__} is not available: it averages parameters, of which a rank has a shard; "
                "average in a callback of your own, which reads them inside of "
                "`with trainer.strategy.engine.full_params():`",
                code="lightning-weight-averaging",
            )


def _only(optimizers: list[Any], schedulers: list[Any], tree: dict[str, Any]) -> Any:
    """Return the optimizer of ``configure_optimizers``; None if the config's is used. UsageError if there are several.

    UsageError also if neither has an optimizer, or both have a scheduler.
    """
    if len(optimizers) != 1:
        raise UsageError(
            f"configure_optimizers: expected one optimizer, with several groups where that is wanted, got "
            f"{len(optimizers)}",
            code="lightning-not-one-optimizer",
        )
    if schedulers and "scheduler" in tree:
        raise UsageError(
            "configure_optimizers returned a scheduler and config has one: expected one of them",
            code="lightning-scheduler-given-twice",
        )
    if not isinstance(optimizers[0], _MockOptimizer):
        return optimizers[0]
    if "optimizer" not in tree:
        raise UsageError(
            "configure_optimizers returned None: expected an optimizer, or one in config",
            code="lightning-optimizer-missing",
        )
    return None


def _local(path: Any) -> Path:
    if "://" in str(path):
        raise UsageError(
            f"expected a folder that all ranks can write to for checkpoints, got {path}",
            code="lightning-checkpoint-path-remote",
        )
    return Path(path)


def _beside(path: Path) -> Path:
    """Return the folder of the engine's part."""
    return path.with_name(path.name + _SUFFIX)


def _remove_others(folder: Path, tag: str | None) -> None:
    """Remove the engine's checkpoints that belong to an earlier file of the same name."""
    if tag is None:
        shutil.rmtree(folder)
        return
    for other in folder.iterdir():
        if other.is_dir() and other.name != tag:
            shutil.rmtree(other)


for _stage in range(4):
    StrategyRegistry.register(
        f"shardengine_stage_{_stage}", ShardStrategy, f"shardengine, ZeRO stage {_stage}", override=True, stage=_stage
    )
