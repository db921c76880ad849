"""DeepSpeedEngine: an nn.Module around one of our engines, with the names that frameworks call. Computes nothing.

Owns: the mapping of those names to the engine. Must not know: engine internals.

[Note: Who divides] A framework divides the loss by the accumulation steps itself and passes ``scale_wrt_gas=False``. A
user's own loop leaves the division to the engine. If that loop calls ``loss.backward()``, the gradients that reach the
outputs of the forward are divided; a term of the loss that does not depend on these outputs is not.

[Note: Adapters onto their base] Trainer passes ``load_module_strict=False`` for every PEFT model, because DeepSpeed's
checkpoints lack the frozen weights. That is no request to resume over another base model, or with other adapters. Our
checkpoints list the weights that they leave out, so a checkpoint that leaves weights out is loaded strictly anyway.

[Note: Groups without parameters] When Trainer trains adapters, its group without weight decay is empty. DeepSpeed
removes that group from the optimizer. A scheduler that is made later then has one rate less, and so has its state in
Trainer's checkpoints. To load such a state, the group is removed here as well. A group that a scheduler knows already
stays, because torch's schedulers expect as many groups as they began with.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardengine.checkpoint import Checkpoint, directory, index
from shardengine.compat.deepspeed import (
    checkpoints,
    errors,
    foreign,
    gathering,
    helpers,
    leaves,
    monitors,
    optimizers,
    processes,
    schedules,
)
from shardengine.compat.deepspeed import client_state as client_states
from shardengine.compat.deepspeed.config_classes import DeepSpeedConfig
from shardengine.compat.deepspeed.getters import Getters
from shardengine.compat.deepspeed.phases import Phases
from shardengine.core import adapters
from shardengine.engine import Engine, holding
from shardengine.errors import ConfigError, MismatchError, UsageError, call_by
from shardengine.optim import ShardedOptimizer
from shardengine.runtime import hooks, transforms
from shardengine.start import initialize as make_engine

_log = logging.getLogger(__name__)
_NAMES = {
    "engine.full_params()": "deepspeed.zero.GatheredParameters(parameters)",
    "engine.full_params(writable=True)": "deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)",
}
"""Names for error messages: a user of Trainer or accelerate has no engine to call."""
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
    """Shard ``model`` according to ``config``; return (engine, optimizer, data loader, scheduler). Collective.

    config: a dict or the path of a JSON file (also ``config_params=``, or ``args.deepspeed_config``) · optimizer: a
    torch optimizer or a function from parameters to one; it overrides the config's, and so does ``lr_scheduler`` ·
    training_data: a map-style data set; the data loader yields this rank's part of it in micro-batches made by
    ``collate_fn``; without it the data loader is None. An engine that holds the model already is destroyed. UsageError
    for arguments that are not available (``mpu``, ``mesh_param``); other errors as ``shardengine.initialize``.
    """
    config = others.pop("config_params", None) if config is None else config
    collate_fn = others.pop("collate_fn", None)
    _check(model, more, others)
    assert model is not None
    given = foreign.given(config, args)
    try:
        tree = foreign.written(given)
    except ConfigError:
        make_engine(model, given)  # raises the same error, also on the ranks that could read the file
        raise
    before = holding.engine_of(model)
    if before is not None:  # maybe one that the script no longer refers to
        _end(before)
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
        raise errors.AssertedError(
            f"deepspeed.initialize: expected model=, a torch module, got {type(model).__name__}",
            code="initialize-wrong-type",
        )
    if more:
        raise UsageError(
            "deepspeed.initialize: expected what comes after model_parameters by name, got positions",
            code="deepspeed-arguments-by-position",
        )
    for name, value in others.items():
        if name not in _WITHOUT_EFFECT and name not in _REFUSED:
            raise UsageError(
                f"deepspeed.initialize: {name}= is unknown; expected config=, optimizer=, lr_scheduler=",
                code="deepspeed-argument-unknown",
            )
        if name in _REFUSED and value is not None:
            raise UsageError(
                f"deepspeed.initialize: {name}= is not available: all ranks are data-parallel; tensor, sequence and "
                "pipeline parallelism are not available",
                code="deepspeed-parallelism-unavailable",
            )


def _without_empty_groups(optimizer: Any) -> Any:
    """Remove empty groups that no scheduler knows from ``optimizer``; return it ([Note: Groups without parameters])."""
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = optimizer.param_groups
        groups[:] = [group for group in groups if group["params"] or "initial_lr" in group]
    return optimizer


class LossScalerView:
    """The loss scale, by the names that scripts read."""

    def __init__(self, scaler: Any, windows: Callable[[], int]) -> None:
        self._scaler, self._windows = scaler, windows

    @property
    def cur_iter(self) -> int:
        """The number of accumulation windows so far, including those whose step was skipped."""
        return self._windows()

    @property
    def cur_scale(self) -> float:
        """The factor of the next loss."""
        return float(self._scaler.scale)

    loss_scale = cur_scale

    @property
    def scale_window(self) -> int:
        """The number of steps without overflow after which the scale grows."""
        return int(self._scaler.policy.window)

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale is adjusted automatically."""
        return bool(self._scaler.policy.dynamic)

    dynamic = dynamic_loss_scale


class DeepSpeedOptimizer(ShardedOptimizer):
    """The engine's optimizer, with DeepSpeed's attributes beside torch's API.

    It shares all attributes with the engine's own optimizer object, so that a scheduler over either one drives both.
    """

    __slots__ = ("_given", "_scales", "_skipped", "_windows")

    def __init__(self, engine: Engine, skipped: Callable[[], bool], given: Any = None) -> None:
        """Make a view of the optimizer of ``engine``.

        skipped: returns whether the last step was skipped · given: the user's own optimizer.
        """
        optimizer, (fp16, autocast) = engine.optimizer, (engine.config.fp16, engine.config.torch_autocast)
        self._scales = fp16.enabled is True or (autocast.enabled is True and autocast.dtype == "float16")
        object.__setattr__(self, "__dict__", optimizer.__dict__)
        self._skipped = skipped
        self._windows = lambda: engine.global_steps
        self._given = given

    @property
    def optimizer(self) -> Any:
        """The optimizer that was passed to ``initialize``, which has the same groups and methods; else this one."""
        return self if self._given is None else self._given

    @property
    def loss_scale(self) -> float:
        """The factor of a loss before its backward; 1 without fp16."""
        return super().loss_scale

    cur_scale = loss_scale

    def __eq__(self, other: object) -> bool:
        return self is other or (other is not None and other is self._given)

    __hash__ = object.__hash__

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is adjusted automatically."""
        return self.settings.scaler is not None and self.settings.scaler.policy.dynamic

    @property
    def loss_scaler(self) -> LossScalerView:
        """The state of the loss scale; AttributeError if the config does not train in fp16."""
        if not self._scales:
            raise AttributeError("the optimizer has no loss_scaler: the config does not train in fp16")
        return LossScalerView(self.settings.scaler, self._windows)

    loss_scale_config = loss_scaler

    def needs_scaler(self) -> bool:
        """Return whether losses have to be scaled."""
        return self._scales

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped, because gradients were not finite."""
        return self._skipped()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state dict on rank 0, only the groups on other ranks. Collective."""
        found = super().state_dict()
        if not found:
            groups = [{name: value for name, value in each.items() if name != "params"} for each in self.param_groups]
            found = {"state": {}, "param_groups": groups}
        return found

    @property
    def parameter_offload(self) -> gathering.NoHooks:
        """An object without hooks; trl removes its hooks while it generates."""
        return gathering.NoHooks()


class ZeROOptimizer(DeepSpeedOptimizer):
    """The optimizer of an engine that shards optimizer states."""

    __slots__ = ()


def _end(engine: Engine) -> None:
    """Close ``engine`` as ``DeepSpeedEngine.destroy`` does."""
    was_open = engine.is_open
    try:
        engine.close(restore=False)
    finally:
        if was_open and not engine.is_open:
            gathering.unmark(engine)


class DeepSpeedEngine(Getters, Phases, nn.Module):
    """One of our engines as a module: ``module`` is the model; attributes that are missing here are the engine's."""

    def __init__(
        self, model: nn.Module, config: dict[str, Any], optimizer: Any, model_parameters: Any, lr_scheduler: Any
    ) -> None:
        """Create the engine; arguments as for ``initialize``."""
        super().__init__()
        call_by(_NAMES)
        helpers.set_log_level(config.get("log_level"))
        tree, told = foreign.translate(
            config, optimizer=optimizer is not None, scheduler=lr_scheduler is not None, model=model
        )
        trained = optimizer is not None or "optimizer" in tree
        foreign.check_given(config, optimizer, optimizers.name_of(optimizer))
        foreign.cast_buffers(model, tree)
        named = schedules.of_config(tree)
        lr_scheduler = named if lr_scheduler is None else lr_scheduler
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
            given = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
            kind_of_view = ZeROOptimizer if foreign.shards(tree, "states") else DeepSpeedOptimizer
            self._optimizer = kind_of_view(self._engine, self._was_skipped, given)
            kind = optimizers.name_of(given) or (
                None
                if optimizer is not None
                else optimizers.of_config(tree.get("optimizer"), on_host=foreign.steps_on_host(tree))
            )
            if kind is not None:
                optimizers.name_as(self._optimizer, kind)
        leaves.mark_as_configured(model, foreign.leaf_modules(config))
        self._last_skipped: bool | None = False
        self._divides_itself = False
        holding.hold(self._engine)
        gathering.mark(self._engine, sharded=foreign.shards(tree, "weights"))

    @property
    def _live(self) -> Engine:
        if not self._engine.is_open:
            raise UsageError(
                "this DeepSpeedEngine was destroyed, by destroy() or because deepspeed.initialize was called again for "
                "its model: expected the newest one. Where a framework evaluates before it trains, or trains twice, "
                "make a new Trainer or Accelerator for that",
                code="deepspeed-engine-destroyed",
            )
        return self._engine

    def _was_skipped(self) -> bool:
        """Return whether the last update was skipped, not counting calls of ``step`` off the boundary."""
        return not self._engine.was_step_applied() if self._last_skipped is None else self._last_skipped

    # Forward, backward, step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        output = self._live(*args, **kwargs)
        shares = self._engine.gradient_accumulation_steps() > 1 and torch.is_grad_enabled()
        if shares and not transforms.inside():  # torch.func computes a derivative, which must not be divided
            hooks.watch_gradients(output, self._share)
        return output

    def _share(self, gradient: Tensor) -> Tensor | None:
        """Divide the gradient of an output by the accumulation steps, unless ``backward`` divides the loss itself."""
        return None if self._divides_itself else gradient / self._engine.gradient_accumulation_steps()

    def backward(
        self, loss: Tensor, *, retain_graph: bool = False, scale_wrt_gas: bool = True, **others: Any
    ) -> Tensor:
        """Run the backward of ``loss``, divided by the accumulation steps unless ``scale_wrt_gas`` is False.

        UsageError for other arguments.
        """
        if others:
            raise UsageError(
                f"backward: expected loss, retain_graph= and scale_wrt_gas=, got {', '.join(others)}=",
                code="deepspeed-backward-argument-unknown",
            )
        self._divides_itself = True
        try:
            return self._live.backward(loss, retain_graph=retain_graph, divide=scale_wrt_gas)
        finally:
            self._divides_itself = False

    def step(self, lr_kwargs: Any = None) -> None:
        """On the accumulation boundary clip, step, and step the scheduler; otherwise only count the micro-batch.

        UsageError with ``lr_kwargs``: set learning rates in ``optimizer.param_groups``, or use a scheduler.
        """
        if lr_kwargs:
            raise UsageError(
                "step: lr_kwargs is not available; set learning rates in engine.optimizer.param_groups",
                code="deepspeed-step-lr-kwargs",
            )
        steps, skipped = self._live.global_steps, self._was_skipped()
        self._step_phase()
        self._last_skipped = skipped if self._engine.global_steps == steps else None

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next ``step()`` ends the accumulation window. AssertedError if every ``step()`` does."""
        if not self.managed_gradient_accumulation():
            raise errors.AssertedError(
                "set_gradient_accumulation_boundary: expected no call where managed_gradient_accumulation is false; "
                "every step() ends the window there",
                code="accumulation-boundary-not-managed",
            )
        self._live.set_gradient_accumulation_boundary(is_boundary)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients between two steps; inside an accumulation window they stay, as under DeepSpeed."""
        if self._optimizer is not None:
            self._live  # noqa: B018  (raises if the engine was destroyed)
            self._optimizer.zero_grad(set_to_none)

    def compile(self, backend: str = "inductor", compile_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Apply torch.compile to the model in place; the all-gathers are not compiled."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    # Attributes

    @property
    def optimizer(self) -> DeepSpeedOptimizer | None:
        """The optimizer that steps the shards, with the user's groups. None in an engine that does not train."""
        return self._optimizer if self._engine.is_open else None

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that is stepped with the optimizer; it may be set."""
        return self._engine.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        """Set the scheduler, as in ``shardengine.Engine``."""
        self._engine.lr_scheduler = scheduler

    @property
    def config(self) -> dict[str, Any]:
        """The config that was passed to ``initialize``, unchanged."""
        return self._written

    @functools.cached_property
    def _config(self) -> DeepSpeedConfig:  # type: ignore[override]
        return DeepSpeedConfig(self._written)

    @functools.cached_property
    def monitor(self) -> monitors.MonitorMaster:
        """The monitors that the config enables, for a script's own metrics."""
        return monitors.MonitorMaster(self._config.monitor_config)

    @property
    def local_rank(self) -> int:
        """This process's rank on its machine, as set by the launcher."""
        return processes.get_local_rank()

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return self._engine.rank

    @property
    def tput_timer(self) -> helpers.NoTimer:
        """A timer that does nothing; scripts notify it of the end of an epoch."""
        return helpers.NoTimer()

    def fp16_enabled(self) -> bool:
        """Return whether the config trains in fp16; scripts cast their batches by it."""
        return self._engine.config.fp16.enabled is True

    def bfloat16_enabled(self) -> bool:
        """Return whether the config trains in bf16."""
        return self._engine.config.bf16.enabled is True

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return this setting of the config; frameworks check it before they save whole weights."""
        return foreign.gathers_on_save(self._written)

    # Saving and loading

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the model's state dict with the prefix "module.".

        At stage 3 it has names and shapes, and values only for parameters that are gathered at this moment.
        """
        return super().state_dict(*args, **kwargs)

    def module_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the model's own state dict, as ``state_dict`` but without the prefix."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        self._live.average_replicas()
        state = self._live.state_dict(trainable_only=exclude_frozen_parameters)
        return adapters.for_every_rank(self.module, state)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Let rank 0 write the whole state dict with torch.save; return True. Collective."""
        self._live.average_replicas()
        state = self._live.state_dict(trainable_only=exclude_frozen_parameters)
        if self._engine.rank == 0:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(state, Path(save_dir) / save_filename)
        return True

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write one of our checkpoints to ``save_dir/tag``, by default ``global_step<N>``; return True. Collective.

        client_state: a dict; if it is not JSON, rank 0 writes it with torch.save · save_latest: whether ``latest`` is
        changed to name this checkpoint.
        """
        save_dir = errors.folder("save_checkpoint", save_dir)
        name = f"global_step{self._live.global_steps}" if tag is None else str(tag)
        with client_states.kept(save_dir, name, client_state) as kept:
            self._live.average_replicas()
            frozen, latest = not exclude_frozen_parameters, bool(save_latest)
            try:
                self._live.save_checkpoint(save_dir, name, kept, frozen=frozen, latest=latest)
            except MismatchError as error:
                if not str(error).startswith("the place given to save_checkpoint"):
                    raise
                raise errors.AssertedMismatchError(
                    *error.args, code="checkpoint-place-differs-between-ranks"
                ) from error
        if self._engine.rank == 0:
            checkpoints.write_script(save_dir)
        return True

    def _get_optimizer_ckpt_name(self, checkpoints_path: str, tag: str, expp_rank: int = 0) -> str:
        """Return the path of the file with this rank's shards of optimizer states and weights."""
        return str(Path(checkpoints_path, str(tag), index.file_of(self._engine.rank)))

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        **others: Any,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint; return (its directory, the client state), or (None, None) if there is no ``latest`` file.

        It may be written by ``save_checkpoint``, at any stage and number of ranks, or by DeepSpeed.
        load_optimizer_states, load_lr_scheduler_states: if False, everything else is loaded, including counters ·
        load_module_only: load only the weights.
        """
        load_dir = errors.folder("load_checkpoint", load_dir)
        if tag is None and not Path(load_dir, directory.LATEST).exists():
            _log.warning("load_checkpoint: %s has no file %r, nothing is loaded", load_dir, directory.LATEST)
            return None, None
        if given := [name for name, value in others.items() if value is not None]:
            raise UsageError(
                f"load_checkpoint: expected None for {', '.join(given)}, which cannot be chosen here",
                code="deepspeed-load-option-unavailable",
            )
        loads = {"optimizer": load_optimizer_states, "scheduler": load_lr_scheduler_states}
        how = {"weights_only": load_module_only, "without": [name for name, wanted in loads.items() if not wanted]}
        with checkpoints.readable(load_dir, None if tag is None else str(tag)) as (folder, name, theirs):
            strict = load_module_strict and not (theirs and self._engine.lr_scheduler is not None)
            found = self._load(folder, name, strict=strict, **how)
        self._last_skipped = False
        if not theirs:
            return str(found.directory), client_states.found(found.client_state, found.directory)
        client_state = dict(found.client_state)
        saved = client_state.pop(checkpoints.SCHEDULER, None)
        if load_lr_scheduler_states and not load_module_only:
            checkpoints.resume_schedule(self._engine, saved)
        return str(checkpoints.place_of(load_dir, tag)), client_state

    def _load(self, folder: Path, tag: str | None, *, strict: bool, **how: Any) -> Checkpoint:
        """Load a checkpoint; strictly if it leaves weights out ([Note: Adapters onto their base])."""
        made_strict = not (strict or how["weights_only"]) and checkpoints.leaves_out(folder, tag)
        try:
            return self._live.load_checkpoint(folder, tag, strict=strict or made_strict, **how)
        except UsageError as error:
            if not made_strict:
                raise
            raise UsageError(
                f"{error}. Under the name deepspeed a training of adapters goes on with all that it was saved with. A "
                "new one takes their weights alone: load_checkpoint(dir, load_module_strict=False, "
                "load_module_only=True), or with Trainer PeftModel.from_pretrained(model, dir, is_trainable=True)",
                code="deepspeed-checkpoint-does-not-fit",
            ) from error

    # End

    def destroy(self) -> None:
        """Close the engine; a second call does nothing. Collective.

        At stage 3 the weights stay sharded, for the next ``initialize`` of the model. Below stage 3 the model is an
        ordinary one again. UsageError if the engine cannot be closed now, for example inside of
        ``zero.GatheredParameters``; it then stays open.
        """
        _end(self._engine)

    def to(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error: the engine owns device and dtype of the weights."""
        self._engine.to(*args, **kwargs)

    half = float = double = bfloat16 = cuda = cpu = to

    def __getattr__(self, name: str) -> Any:
        if "module" in self.__dict__.get("_modules", {}) and name in self._modules:
            return self._modules[name]
        if name.startswith("__") or "_engine" not in self.__dict__:
            raise AttributeError(f"DeepSpeedEngine has no attribute {name!r}")
        return getattr(self._engine, name)
