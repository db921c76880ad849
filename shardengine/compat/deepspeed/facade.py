"""DeepSpeedEngine: an nn.Module around one of our engines, with the names that frameworks call. Computes nothing.

Owns: what those names mean here. Must not know: the engine behind its public surface.

[Note: Who divides] A framework divides the loss by the accumulation steps itself and says ``scale_wrt_gas=False``; a
loop of its own leaves that to the engine.

[Note: Adapters onto their base] Trainer says ``load_module_strict=False`` for every model of PEFT, because DeepSpeed's
checkpoints lack the frozen weights. It does not ask to resume over another base model, or with other adapters. Our
checkpoints list what they leave out, so one that leaves something out is loaded strictly all the same.

[Note: Groups without parameters] In a training of adapters Trainer's group without weight decay is empty. DeepSpeed
removes it from the optimizer, so a scheduler that is made later has one rate less, and so has its state in Trainer's
checkpoints: to load that, the group is removed here, too. A group that a scheduler knows already stays, because torch's
schedulers expect as many groups as they began with.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardengine.checkpoint import Checkpoint, directory
from shardengine.compat.deepspeed import checkpoints, foreign, gathering, helpers, processes
from shardengine.compat.deepspeed import client_state as client_states
from shardengine.engine import Engine
from shardengine.errors import ConfigError, UsageError
from shardengine.optim import ShardedOptimizer
from shardengine.start import initialize as make_engine

_log = logging.getLogger(__name__)
_open: weakref.WeakSet[DeepSpeedEngine] = weakref.WeakSet()
_REFUSED = {"mpu", "mesh_param"}
"""Arguments of ``initialize`` that must be None."""
_WITHOUT_EFFECT = {"dist_init_required", "distributed_port"}


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    *more: Any,
    training_data: Any = None,
    lr_scheduler: Any = None,
    config: Any = None,
    **others: Any,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Shard ``model`` as ``config`` says → (engine, its optimizer, a data loader, its scheduler); collective.

    config: a dict or the path of a JSON file (also ``config_params=``, or ``args.deepspeed_config``) · optimizer: a
    torch optimizer or a function from parameters to one; it counts before the config's, and so does ``lr_scheduler`` ·
    training_data: a map-style data set, of which the data loader gives this rank's part in micro-batches of
    ``collate_fn``; without one it is None. An engine that holds the model already is destroyed. UsageError for
    arguments that are not available (``mpu``, ``mesh_param``), and as ``shardengine.initialize``.
    """
    config = others.pop("config_params", None) if config is None else config
    collate_fn = others.pop("collate_fn", None)
    _check(model, more, others)
    assert model is not None
    given = foreign.given(config, args)
    try:
        tree = foreign.written(given)
    except ConfigError:
        make_engine(model, given)  # fails with the same error, which ranks that could read the file get from here
        raise
    for before in [each for each in _open if each.module is model]:
        before.destroy()
    engine = DeepSpeedEngine(model, tree, optimizer, model_parameters, lr_scheduler)
    batches = None
    if training_data is not None:
        batches = helpers.data_loader(
            training_data,
            rank=engine.rank,
            ranks=engine.world_size,
            rows=engine.train_micro_batch_size_per_gpu(),
            collate_fn=collate_fn,
            drop_last=bool(tree.get("dataloader_drop_last", False)),
        )
    return engine, engine.optimizer, batches, engine.lr_scheduler


def _check(model: Any, more: tuple[Any, ...], others: Mapping[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"deepspeed.initialize: expected model=, a torch module, got {type(model).__name__}")
    if more:
        raise UsageError("deepspeed.initialize: expected what comes after model_parameters by name, got positions")
    for name, value in others.items():
        if name not in _WITHOUT_EFFECT and name not in _REFUSED:
            raise UsageError(f"deepspeed.initialize: {name}= is unknown; expected config=, optimizer=, lr_scheduler=")
        if name in _REFUSED and value is not None:
            raise UsageError(
                f"deepspeed.initialize: {name}= is not available: all ranks are data-parallel; tensor, sequence and "
                "pipeline parallelism are not available"
            )


def _without_empty_groups(optimizer: Any) -> Any:
    """``optimizer`` itself, less its empty groups that no scheduler knows ([Note: Groups without parameters])."""
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = optimizer.param_groups
        groups[:] = [group for group in groups if group["params"] or "initial_lr" in group]
    return optimizer


class DeepSpeedOptimizer(ShardedOptimizer):
    """The engine's optimizer, with what frameworks ask of it beside torch's surface.

    It is the same one under another class: they share all attributes, so that a scheduler over either drives both.
    """

    __slots__ = ("_skipped",)

    def __init__(self, optimizer: ShardedOptimizer, skipped: Callable[[], bool]) -> None:
        """skipped: whether the last step was."""
        object.__setattr__(self, "__dict__", optimizer.__dict__)
        self._skipped = skipped

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because gradients were not finite."""
        return self._skipped()

    @property
    def parameter_offload(self) -> gathering.NoHooks:
        """What trl takes hooks off from while it generates: there is nothing to take off."""
        return gathering.NoHooks()


class DeepSpeedEngine(nn.Module):
    """One of our engines as a module: ``module`` is the model, and what is not here is read from the engine."""

    def __init__(
        self, model: nn.Module, config: dict[str, Any], optimizer: Any, model_parameters: Any, lr_scheduler: Any
    ) -> None:
        """As ``initialize``."""
        super().__init__()
        tree, told = foreign.translate(
            config, optimizer=optimizer is not None, scheduler=lr_scheduler is not None, model=model
        )
        trained = optimizer is not None or "optimizer" in tree
        if model_parameters is not None and not isinstance(model_parameters, list):
            model_parameters = list(model_parameters)
        self._engine = make_engine(
            model,
            foreign.tell(tree, told, trained=trained),
            optimizer=_without_empty_groups(optimizer),
            model_parameters=model_parameters if trained and optimizer is None else None,
            lr_scheduler=lr_scheduler if trained else None,
        )
        self.module = model
        self._written = config
        self._optimizer: DeepSpeedOptimizer | None = None
        if self._engine.optimizer is not None:
            self._optimizer = DeepSpeedOptimizer(self._engine.optimizer, self._was_skipped)
        self._last_skipped: bool | None = False
        self._is_open = True
        _open.add(self)
        gathering.mark(self._engine, sharded=foreign.shards_weights(tree))

    @property
    def _live(self) -> Engine:
        if not self._is_open:
            raise UsageError(
                "this DeepSpeedEngine was destroyed, by destroy() or because deepspeed.initialize was called again for "
                "its model: expected the newest one. Where a framework evaluates before it trains, or trains twice, "
                "make a new Trainer or Accelerator for that"
            )
        return self._engine

    def _was_skipped(self) -> bool:
        """Whether the last update was; of a step that only counted the engine would say so, too."""
        return not self._engine.was_step_applied() if self._last_skipped is None else self._last_skipped

    # Forward, backward, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self._live(*args, **kwargs)

    def backward(
        self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True, **others: Any
    ) -> Tensor:
        """Backward of ``loss``, divided by the accumulation steps unless ``scale_wrt_gas`` is False.

        UsageError for other arguments.
        """
        if others:
            raise UsageError(f"backward: expected loss, retain_graph= and scale_wrt_gas=, got {', '.join(others)}=")
        return self._live.backward(loss, retain_graph=retain_graph, divide=scale_wrt_gas)

    def step(self, lr_kwargs: Any = None) -> None:
        """On the boundary: clip, step, the scheduler's step. Off the boundary it only counts. UsageError with
        ``lr_kwargs``: learning rates are set in ``optimizer.param_groups``, or by a scheduler."""
        if lr_kwargs:
            raise UsageError("step: lr_kwargs is not available; set learning rates in engine.optimizer.param_groups")
        steps, skipped = self._live.global_steps, self._was_skipped()
        self._live.step()
        self._last_skipped = skipped if self._engine.global_steps == steps else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients between two steps; inside of a window they stay, as under DeepSpeed."""
        if self._optimizer is not None:
            self._live  # noqa: B018  (refuses)
            self._optimizer.zero_grad(set_to_none)

    def compile(self, backend: str = "inductor", compile_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """torch.compile of the model, in place; the schedule of gathers is not compiled."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    # What it is

    @property
    def optimizer(self) -> DeepSpeedOptimizer | None:
        """The optimizer that steps the shards; its groups are the given ones. None in an engine that does not train."""
        return self._optimizer if self._is_open else None

    @property
    def lr_scheduler(self) -> Any:
        """What is stepped with the optimizer; it may be set."""
        return self._engine.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        """As ``shardengine.Engine``'s."""
        self._engine.lr_scheduler = scheduler

    @property
    def config(self) -> dict[str, Any]:
        """The config as it was written."""
        return self._written

    @property
    def local_rank(self) -> int:
        """This process's number on its machine, as the launcher says."""
        return processes.get_local_rank()

    @property
    def global_rank(self) -> int:
        """This process's number."""
        return self._engine.rank

    @property
    def tput_timer(self) -> helpers.NoTimer:
        """What scripts tell where an epoch ends: nothing is timed."""
        return helpers.NoTimer()

    def fp16_enabled(self) -> bool:
        """Whether the config trains in fp16; scripts cast their batches by it."""
        return self._engine.config.fp16.enabled is True

    def bfloat16_enabled(self) -> bool:
        """Whether the config trains in bf16."""
        return self._engine.config.bf16.enabled is True

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are sharded."""
        return foreign.shards_weights(self._written)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """What the config says; frameworks ask before they save whole weights."""
        return foreign.gathers_on_save(self._written)

    # Saving and loading

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's, under "module.". UsageError at stage 3, unless all of it is gathered."""
        with _saying_how_to_gather("state_dict"):
            return super().state_dict(*args, **kwargs)

    def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's own. UsageError as ``state_dict``."""
        with _saying_how_to_gather("module_state_dict"):
            return self.module.state_dict(*args, **kwargs)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        self._live.average_replicas()
        return self._live.state_dict(trainable_only=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Rank 0 writes the whole state dict with torch.save; collective. True."""
        self._live.average_replicas()
        state = self._live.state_dict(trainable_only=exclude_frozen_parameters)
        if self._engine.rank == 0:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, Path(save_dir) / save_filename)
        return True

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write one of our checkpoints to ``save_dir/tag``, by default ``global_step<N>``; collective. True.

        client_state: a dict; what is not JSON is written by torch.save, by rank 0 · save_latest: no effect, ``latest``
        names the checkpoint in any case, which is told where that is not wanted.
        """
        name = f"global_step{self._live.global_steps}" if tag is None else str(tag)
        with client_states.kept(save_dir, name, client_state) as kept:
            self._live.average_replicas()
            self._live.save_checkpoint(save_dir, name, kept, frozen=not exclude_frozen_parameters)
        if self._engine.rank == 0:
            checkpoints.write_script(save_dir)
            if not save_latest:
                _log.warning("save_checkpoint: save_latest=False has no effect, %s names %s", directory.LATEST, name)
        return True

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        **others: Any,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint → (its directory, the client state); (None, None) where there is none at all.

        Those of ``save_checkpoint``, at any stage and number of ranks, and DeepSpeed's own.
        """
        if tag is None and not Path(load_dir, directory.LATEST).exists():
            _log.warning("load_checkpoint: %s has no file %r, nothing is loaded", load_dir, directory.LATEST)
            return None, None
        if given := [name for name, value in others.items() if value is not None]:
            raise UsageError(f"load_checkpoint: expected None for {', '.join(given)}, which cannot be chosen here")
        weights_only = load_module_only or not load_optimizer_states
        if not load_lr_scheduler_states and not weights_only and self._engine.lr_scheduler is not None:
            raise UsageError(
                "load_checkpoint: load_lr_scheduler_states=False is not available in an engine with a scheduler; set "
                "engine.lr_scheduler = None and step your own"
            )
        with checkpoints.readable(load_dir, None if tag is None else str(tag)) as (folder, name, theirs):
            strict = load_module_strict and not (theirs and self._engine.lr_scheduler is not None)
            found = self._load(folder, name, strict=strict, weights_only=weights_only)
        self._last_skipped = False
        if not theirs:
            return str(found.directory), client_states.found(found.client_state, found.directory)
        client_state = dict(found.client_state)
        saved = client_state.pop(checkpoints.SCHEDULER, None)
        if load_lr_scheduler_states and not weights_only:
            checkpoints.resume_schedule(self._engine, saved)
        return str(checkpoints.place_of(load_dir, tag)), client_state

    def _load(self, folder: Path, tag: str | None, *, strict: bool, weights_only: bool) -> Checkpoint:
        """Strictly also where the checkpoint leaves weights out ([Note: Adapters onto their base])."""
        made_strict = not (strict or weights_only) and checkpoints.leaves_out(folder, tag)
        try:
            return self._live.load_checkpoint(folder, tag, strict=strict or made_strict, weights_only=weights_only)
        except UsageError as error:
            if not made_strict:
                raise
            raise UsageError(
                f"{error}. Under the name deepspeed a training of adapters goes on with all that it was saved with. A "
                "new one takes their weights alone: load_checkpoint(dir, load_module_strict=False, "
                "load_module_only=True), or with Trainer PeftModel.from_pretrained(model, dir, is_trainable=True)"
            ) from error

    # End

    def destroy(self) -> None:
        """End the engine; collective. Weights that are sharded stay so, for the next ``initialize`` of the model; below
        stage 3 it is an ordinary one again. Nothing happens the second time. UsageError where it must not end now, as
        inside of ``zero.GatheredParameters``: it goes on."""
        if not self._is_open:
            return
        try:
            self._engine.close(restore=False)
        finally:
            if not self._engine.is_open:
                self._is_open = False
                _open.discard(self)
                gathering.unmark(self._engine)

    def to(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the engine owns where and in which dtype the weights live."""
        self._engine.to(*args, **kwargs)

    half = float = double = bfloat16 = cuda = cpu = to

    def __getattr__(self, name: str) -> Any:
        if "module" in self.__dict__.get("_modules", {}) and name in self._modules:
            return self._modules[name]
        if name.startswith("__") or "_engine" not in self.__dict__:
            raise AttributeError(f"DeepSpeedEngine has no attribute {name!r}")
        return getattr(self._engine, name)


@contextmanager
def _saying_how_to_gather(call: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(
            f"DeepSpeedEngine.{call}() while the weights are sharded would hold NaN: call it on every rank inside of "
            "`with deepspeed.zero.GatheredParameters(list(engine.parameters())):`, or save the weights with "
            "engine.save_16bit_model(dir), on every rank, too"
        ) from error
