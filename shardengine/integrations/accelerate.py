"""ShardAccelerator: accelerate's Accelerator with one of our engines in place of DDP.

Owns: the translation of accelerate's calls to an engine. Must not know: Trainer; engine internals.

[Note: Who says what] accelerate knows the end of an accumulation window (``sync_gradients``) and divides losses by its
accumulation steps. It passes the end of the window to the engine, which does not divide losses itself. The engine clips
when it steps, to the norm that ``clip_grad_norm_`` was called with.

[Note: Precision] ``mixed_precision`` has accelerate's meaning: autocast, over weights in the model's dtype. accelerate
wraps the model's forward for it, so that evaluation of the bare model is under autocast as well. The engine's config
gets ``torch_autocast``, because the engine scales the loss for fp16, as torch's GradScaler would. If the config enables
``bf16`` or ``fp16``, weights are in that dtype and there is no autocast.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import DistributedType
from accelerate.utils import MODEL_NAME, is_compiled_module
from torch import Tensor, nn

from shardengine.comm import Mesh
from shardengine.config import STAGE, STAGES, TRIPLE, Config, load_config, read_tree, undecided
from shardengine.core import adapters, mesh_of
from shardengine.engine import Engine, holding
from shardengine.errors import ConfigError, UsageError
from shardengine.planner import automatic
from shardengine.start import initialize

_log = logging.getLogger(__name__)
_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_AUTOCAST = {"no": None, "bf16": "bfloat16", "fp16": "float16"}
"""accelerate's ``mixed_precision`` → dtype of autocast."""
_TOTAL, _MICRO, _STEPS = TRIPLE
_TOGETHER = "expected the model and its optimizer in one call, as in accelerator.prepare(model, optimizer, ...)"


class Surroundings(NamedTuple):
    """Callbacks of a trainer.

    before_engine: called before a training engine is created, with the whole model (None if an earlier engine has left
    it sharded), the config and the optimizer · first_batch: makes a micro-batch to decide the stage if it is "auto" in
    the config; called on rank 0.
    """

    before_engine: Callable[[nn.Module | None, Config, torch.optim.Optimizer | None], None]
    first_batch: Callable[[], Mapping[str, Any]]


class ConfigOptimizer(torch.optim.Optimizer):
    """A placeholder for the optimizer of the engine's config until ``prepare``.

    params: as for any torch optimizer; options of a group, for example ``weight_decay``, override the config's.
    """

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})


class ShardOptimizer(AcceleratedOptimizer):
    """The optimizer of an engine, as ``prepare`` returns it; it steps only at the end of an accumulation window."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine
        self._has_stepped = False

    def step(self, closure: Any = None) -> None:
        """Clip and step if accelerate's ``sync_gradients`` is true; else do nothing."""
        if self.gradient_state.sync_gradients:
            if closure is not None:
                with torch.enable_grad():
                    closure()
            self.engine.step(flush=True)
            self._has_stepped = True

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were not finite."""
        return self._has_stepped and not self.engine.was_step_applied()


class ShardAccelerator(Accelerator):
    """accelerate's Accelerator, which shards models with our engine instead of replicating them with DDP.

    ``prepare`` returns the engine in place of a model; everything else works as in accelerate. Prepare the model and
    its optimizer in one call. A model alone is sharded for inference, or trained with the config's "optimizer" if there
    is one. If an engine of an earlier ``prepare`` holds the model, the new engine takes it over.
    """

    engine_config: dict[str, Any]
    gradient_accumulation_steps: int
    _models: list[Any]
    _optimizers: list[Any]
    _auto: dict[str, Any]
    _unsynchronised: list[Engine]
    _saving: dict[str, Any] | None = None
    _handed: list[dict[str, Any]]
    """State dicts of engines that accelerate has requested during the current ``save_state``."""
    _told_of_clipping = False
    _surroundings: Surroundings | None = None
    _stage: int | None = None
    """If the config's stage is "auto": a provisional stage to read the config with, until a plan has decided."""

    def __init__(self, *args: Any, engine_config: Mapping[str, Any] | str | Path | None = None, **kwargs: Any) -> None:
        """Arguments as for ``accelerate.Accelerator``, plus ``engine_config``.

        engine_config: the engine's config, a dict or the path of a JSON file. Batch sizes and precision that are
        missing or "auto" in it are accelerate's. ConfigError with every problem of the config; UsageError if accelerate
        was started for another engine.
        """
        super().__init__(*args, **kwargs)
        self._begin(engine_config, {})

    @classmethod
    def adopt(
        cls,
        accelerator: Accelerator,
        engine_config: Mapping[str, Any] | str | Path | None,
        auto: Mapping[str, Any],
        surroundings: Surroundings | None = None,
    ) -> ShardAccelerator:
        """Turn ``accelerator``, which has prepared nothing yet, into a ShardAccelerator and return it.

        auto: dotted name → value for settings that are "auto" in the config.
        """
        accelerator.__class__ = cls
        assert isinstance(accelerator, ShardAccelerator)
        accelerator._surroundings = surroundings
        accelerator._begin(engine_config, auto)
        return accelerator

    def _begin(self, engine_config: Mapping[str, Any] | str | Path | None, auto: Mapping[str, Any]) -> None:
        if self.distributed_type not in _KINDS:
            raise UsageError(
                f"ShardAccelerator: accelerate was started for {self.distributed_type.value}; expected no DeepSpeed, "
                "FSDP or other plugin, for example by `torchrun` or `accelerate launch --multi_gpu`",
                code="accelerate-with-another-plugin",
            )
        ranks = dist.get_world_size() if dist.is_initialized() else self.num_processes
        if ranks != self.num_processes:
            raise UsageError(
                f"ShardAccelerator: accelerate knows of {self.num_processes} processes, torch.distributed of {ranks}; "
                "expected a launcher that sets LOCAL_RANK, for example torchrun, or no process group made before",
                code="accelerate-process-count-differs",
            )
        self.engine_config = written(engine_config)
        self._auto = dict(auto)
        self._unsynchronised, self._handed = [], []
        self.scaler = None  # the engine scales
        checkpoint = self.engine_config.get("checkpoint")
        if isinstance(checkpoint, dict) and checkpoint.pop("async_save", False) and self.is_main_process:
            _log.warning("checkpoint.async_save is left off: checkpoints are moved as soon as they are saved")
        if STAGE in undecided(self.engine_config):
            self._stage = next(filter(self._goes_with_the_rest, reversed(STAGES)), STAGES[-1])
        config = self._config(1).resolve_batch(self.num_processes)
        steps = config.gradient_accumulation_steps or 1
        if not self._auto and self.gradient_accumulation_steps == 1:
            self.gradient_accumulation_steps = steps
        sizes = {_STEPS: self.gradient_accumulation_steps, **{name: auto[name] for name in TRIPLE if name in auto}}
        for name, size in sizes.items():
            if getattr(config, name) != size:
                raise UsageError(
                    f'engine_config: expected {name} to be {size}, as the program\'s arguments say, or "auto", got '
                    f"{getattr(config, name)}",
                    code="accelerate-batch-size-differs",
                )
        self._settle_precision(config)

    def _config(self, micro_batch: int, *, optimizer: bool = True, trains: bool = True) -> Config:
        """Return the engine's config with accelerate's batch sizes and precision.

        micro_batch: samples per rank in a micro-batch · optimizer: whether to keep the config's optimizer · trains:
        whether there is any optimizer.
        """
        tree = copy.deepcopy(self.engine_config)
        mixed = str(self.state.mixed_precision)
        if mixed not in _AUTOCAST:
            raise UsageError(
                f"ShardAccelerator: mixed_precision {mixed!r} is not available; expected no, bf16 or fp16",
                code="accelerate-precision-unavailable",
            )
        auto = {_MICRO: micro_batch, _STEPS: self.gradient_accumulation_steps, **self._auto}
        auto |= {} if self._stage is None else {STAGE: self._stage}
        auto |= {"bf16.enabled": mixed == "bf16", "fp16.enabled": mixed == "fp16"}
        given = [name for name in TRIPLE if tree.get(name, "auto") != "auto"]
        for name in TRIPLE:
            if name not in given:
                tree.pop(name, None)  # the other two determine it
        if _TOTAL not in given or _MICRO not in given:
            tree.setdefault(_STEPS, "auto")
        if _TOTAL not in given:
            tree.setdefault(_MICRO, "auto")
        if not {"bf16", "fp16", "torch_autocast"} & tree.keys() and _AUTOCAST[mixed] is not None:
            tree["torch_autocast"] = {"enabled": True, "dtype": _AUTOCAST[mixed]}
            if mixed == "fp16":
                tree["fp16"] = _loss_scale(self.scaler_handler)
        if not optimizer:
            tree.pop("optimizer", None)
        if not trains:
            tree.pop("scheduler", None)
        return load_config(tree, auto)

    def _goes_with_the_rest(self, stage: int) -> bool:
        self._stage = stage
        with suppress(ConfigError):
            self._config(1)
            return True
        return False

    def _decide_stage(
        self, model: nn.Module, config: Config, optimizer: torch.optim.Optimizer | None
    ) -> tuple[Config, Mesh]:
        """Return ``config`` with the stage that a plan chose, and the mesh on which ranks agreed, for the engine."""
        mesh = mesh_of(None, config.timeout_s)
        tree = config.to_dict()
        tree["zero_optimization"]["stage"] = "auto"
        batch = None if self._surroundings is None else self._surroundings.first_batch
        options = {} if optimizer is None else {"optimizer": optimizer}
        asked = automatic.question_of(tree, model, batch=batch, options=options)
        assert asked is not None
        try:
            values = automatic.decide(asked, mesh)
        except BaseException:
            mesh.abandon()
            raise
        return _at_stage(config, values[STAGE]), mesh

    def _settle_precision(self, config: Config) -> None:
        """Check that autocast in ``config`` matches ``mixed_precision``, and set ``native_amp`` ([Note: Precision])."""
        autocast = config.torch_autocast.dtype if config.torch_autocast.enabled else None
        expected = _AUTOCAST[str(self.state.mixed_precision)]
        if autocast is not None and autocast != expected:
            raise UsageError(
                f"engine_config: torch_autocast in {autocast} needs the same mixed_precision, so that evaluation is "
                f"under autocast, too; got {self.state.mixed_precision!r}",
                code="accelerate-autocast-differs",
            )
        self.native_amp = autocast is not None

    # Preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As in accelerate, but return an engine for a model, and a ShardOptimizer for its optimizer. Collective.

        UsageError if a model and its optimizer come in two calls, or if several optimizers step one model. Other errors
        as ``shardengine.initialize``.
        """
        models = [each for each in args if isinstance(each, nn.Module)]
        held = {each.engine.module: each.engine for each in args if isinstance(each, ShardOptimizer)}
        if not all(engine.is_open for engine in held.values()):
            raise UsageError(
                "prepare: expected a new torch optimizer, got one whose engine was closed",
                code="accelerate-optimizer-of-closed-engine",
            )
        batch = next((size for size in map(self._batch_size, args) if size), None)
        optimizers = self._pair(models, args)
        made: dict[int, Any] = {}
        for model in models:
            if model in held:
                made[id(model)] = held[model]
                continue
            optimizer = optimizers.get(model)
            engine = made[id(model)] = self._shard(model, optimizer, batch)
            if optimizer is not None:
                made[id(optimizer)] = ShardOptimizer(engine)
                made[id(optimizer)]._is_accelerate_prepared = True
        result = [made.get(id(each), each) for each in args]
        for each in result:
            engine = each.engine if isinstance(each, ShardOptimizer) else each
            if isinstance(engine, Engine) and engine not in self._models:
                self._models.append(engine)
        return super().prepare(*result, device_placement=device_placement)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Return an engine for ``model``, prepared without an optimizer.

        evaluation_mode: return the model itself, whole on every rank, as accelerate does.
        """
        if evaluation_mode or isinstance(model, Engine):
            return super().prepare_model(model, device_placement, evaluation_mode) if evaluation_mode else model
        return self.prepare(model)

    def _pair(self, models: list[nn.Module], args: Iterable[Any]) -> dict[nn.Module, torch.optim.Optimizer]:
        """Return the optimizer in ``args`` that steps each of ``models``, if there is one."""
        pairs: dict[nn.Module, torch.optim.Optimizer] = {}
        parameters = {model: set(map(id, model.parameters())) for model in models}
        prepared = {id(p) for engine in self._engines() for p in engine.module.parameters()}
        for each in args:
            if not isinstance(each, torch.optim.Optimizer) or isinstance(each, AcceleratedOptimizer):
                continue
            stepped = _parameters_of(each)
            owners = [model for model, own in parameters.items() if own & stepped]
            if len(owners) > 1 or any(owner in pairs for owner in owners):
                raise UsageError(
                    "prepare: expected one optimizer for each model, all of whose parameters are in it",
                    code="accelerate-not-one-optimizer-each",
                )
            if not owners and stepped & prepared:
                raise UsageError(
                    f"prepare: the optimizer is over a model that was prepared before it; {_TOGETHER}",
                    code="accelerate-prepared-apart",
                )
            pairs |= dict.fromkeys(owners, each)
        for own in parameters.values():
            for other in self._optimizers:
                if not isinstance(other, ShardOptimizer) and own & _parameters_of(other):
                    raise UsageError(
                        f"prepare: the optimizer of the model was prepared before it; {_TOGETHER}",
                        code="accelerate-prepared-apart",
                    )
        return pairs

    def _shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: int | None) -> Engine:
        earlier = holding.engine_of(model)
        if earlier is not None:
            earlier.close(restore=False)
        given = None if isinstance(optimizer, ConfigOptimizer) else optimizer
        own = given is None and "optimizer" in self.engine_config
        own &= optimizer is not None or any(parameter.requires_grad for parameter in model.parameters())
        config = self._config(batch or 1, optimizer=own, trains=own or given is not None)
        if isinstance(optimizer, ConfigOptimizer) and config.optimizer is None:
            raise UsageError(
                'ConfigOptimizer: expected "optimizer" in engine_config, it stands for that one',
                code="accelerate-config-without-optimizer",
            )
        mesh, trains = None, own or given is not None
        if self._stage is not None and earlier is not None:
            config = _at_stage(config, earlier.config.zero_optimization.stage)
        elif self._stage is not None and trains:
            config, mesh = self._decide_stage(model, config, given)
        if self._surroundings is not None and trains:
            self._surroundings.before_engine(model if earlier is None else None, config, given)
        prepared = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        self._models = [each for each in self._models if each is not model and each is not prepared]
        parameters = optimizer.param_groups if isinstance(optimizer, ConfigOptimizer) else None
        engine = initialize(model, config, optimizer=given, model_parameters=parameters, mesh=mesh)
        if is_compiled_module(prepared):
            model.compile(**self.state.dynamo_plugin.to_kwargs())
        holding.hold(engine)
        return engine

    def _batch_size(self, loader: Any) -> int | None:
        """Return the samples per rank in a batch of ``loader``; None if it is no DataLoader with a batch size."""
        size = getattr(loader, "batch_size", None) if isinstance(loader, torch.utils.data.DataLoader) else None
        if size is None or not self.split_batches:
            return size
        return max(1, size // self.num_processes)

    def _engines(self) -> list[Engine]:
        return [each for each in self._models if isinstance(each, Engine) and each.is_open]

    def _engine_of(self, model: Any) -> Engine | None:
        """Return ``model`` if it is an engine, the engine that holds it, or None."""
        return next((each for each in self._engines() if model is each or model is each.module), None)

    # Forward to step

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward of ``loss``, divided by the accumulation steps."""
        engines = self._say_boundary()
        if not engines:
            super().backward(loss, **kwargs)
        elif len(engines) == 1:
            engines[0].backward(loss / self.gradient_accumulation_steps, divide=False, **kwargs)
        else:  # it is not known which of them it goes through
            (loss / self.gradient_accumulation_steps).backward(**kwargs)

    def _say_boundary(self) -> list[Engine]:
        """Set on each training engine whether the micro-batch ends the accumulation window; return these engines."""
        engines = [engine for engine in self._engines() if engine.optimizer is not None]
        for engine in engines:
            engine.set_gradient_accumulation_boundary(self.sync_gradients and engine not in self._unsynchronised)
        return engines

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """As in accelerate. Inside, ``loss.backward()`` acts as ``accelerator.backward(loss)``, but does not divide."""
        with super().accumulate(*models):
            self._say_boundary()
            yield

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Inside, micro-batches of ``model`` do not end an accumulation window.

        Stages that shard gradients still reduce them.
        """
        engine = self._engine_of(model)
        if engine is None:
            with super().no_sync(model):
                yield
            return
        self._unsynchronised.append(engine)
        try:
            self._say_boundary()
            yield
        finally:
            self._unsynchronised.remove(engine)
            self._say_boundary()

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """As in accelerate, but UsageError for an engine if ``even_batches`` is False."""
        if even_batches is False and any(isinstance(each, Engine) for each in joinables):
            raise UsageError(
                "join_uneven_inputs: an engine needs the same number of micro-batches on every rank; expected "
                "even_batches to be true, which repeats samples at the end",
                code="accelerate-uneven-batches",
            )
        if any(isinstance(each, Engine) for each in joinables):
            yield
        else:
            with super().join_uneven_inputs(joinables, even_batches):
                yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the next step to ``max_norm`` (inf: only measure) and return the norm of the whole gradient before it.

        parameters: all that the engine steps. Before the end of an accumulation window gradients are not complete: a
        warning is logged, nothing is clipped, and the norm is NaN. UsageError if parameters are missing, or if
        ``norm_type`` is not 2.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = self._stepping(given)
        if engine is None:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        if not _parameters_of(engine.optimizer) <= set(map(id, given)):
            raise UsageError(
                "clip_grad_norm_: expected all parameters that the optimizer steps, as in model.parameters(); a "
                "part of them cannot be clipped alone",
                code="clip-part-of-parameters",
            )
        if float(norm_type) != 2:
            raise UsageError(
                f"clip_grad_norm_: expected norm_type 2, got {norm_type}", code="accelerate-clip-norm-not-2"
            )
        if not self._ends_window(engine, "clip_grad_norm_"):
            return torch.tensor(float("nan"), device=self.device)
        measured = engine.get_global_grad_norm() if max_norm == float("inf") else engine.clip_grad_norm_(max_norm)
        return torch.tensor(measured, device=self.device)

    def _ends_window(self, engine: Engine, call: str) -> bool:
        """Return whether gradients are complete; if not, warn once that ``call`` does nothing."""
        if engine.is_gradient_accumulation_boundary():
            return True
        if not self._told_of_clipping and self.is_main_process:
            _log.warning(
                "%s: nothing is clipped in the middle of a window, where gradients are not complete; call it where "
                "accelerator.sync_gradients is true",
                call,
            )
        self._told_of_clipping = True
        return False

    def _stepping(self, parameters: list[Tensor]) -> Engine | None:
        """Return the engine that steps some of ``parameters``; None if there is none."""
        given, training = set(map(id, parameters)), (each for each in self._engines() if each.optimizer is not None)
        return next((engine for engine in training if _parameters_of(engine.optimizer) & given), None)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each gradient element of the next step.

        Before the end of an accumulation window it does nothing, as ``clip_grad_norm_``.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = self._stepping(given)
        if engine is None or self._ends_window(engine, "clip_grad_value_"):
            super().clip_grad_value_(given, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: visible gradients, and their norm, are without the loss scale."""

    # Prepared models

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Return the model that was passed to ``prepare``; at stage 3 its weights are sharded."""
        inner = model.module if isinstance(model, Engine) else model
        return super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the whole state dict on the CPU of rank 0, {} on other ranks. Collective.

        For a model with adapters, the other ranks get names and shapes, which peft needs.
        """
        engine = self._engine_of(model)
        if engine is None:
            return super().get_state_dict(model, unwrap)
        heard = self._saving is None or unwrap or len(self._save_model_state_pre_hook) > 1  # one of them is ours
        state: dict[str, Any] = {}
        if heard:
            engine.average_replicas()
            state = adapters.for_every_rank(engine.module, engine.state_dict())
        if self._saving is not None and not unwrap:
            self._handed.append(state)
        return state

    def free_memory(self, *objects: Any) -> Any:
        """Release all prepared objects.

        Engines among ``objects`` are closed without gathering weights, which is collective. Their models keep sharded
        weights; the next ``prepare`` of such a model takes them over.
        """
        for each in objects:
            if isinstance(each, Engine):
                each.close(restore=False)
        return super().free_memory(*objects)

    # Checkpoints

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> Any:
        """As in accelerate, with a checkpoint of each engine in a folder ``pytorch_model``. Collective.

        If the user has registered save hooks, whole state dicts are gathered: hooks get them on rank 0, {} on other
        ranks. save_model_func_kwargs: of ``engine.save_checkpoint``, for example ``frozen=False`` for adapters.
        """
        with self._other_optimizers():
            handle = self.register_save_state_pre_hook(self._save_engines)
            self._saving = save_model_func_kwargs
            try:
                return super().save_state(output_dir, safe_serialization)
            finally:
                self._saving, self._handed = None, []
                handle.remove()

    def _save_engines(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        """Save the engines, as the last of accelerate's hooks, and remove their state dicts from ``weights``."""
        for number, engine in enumerate(self._engines()):
            engine.average_replicas()
            engine.save_checkpoint(output_dir, _tag(number), **(self._saving or {}))
        weights[:] = [each for each in weights if not any(each is state for state in self._handed)]

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **load_model_func_kwargs: Any) -> None:
        """As in accelerate, from a folder that ``save_state`` wrote at any stage and number of ranks. Collective.

        load_model_func_kwargs: of ``engine.load_checkpoint``, for example ``strict=False``.
        """

        def load(models: list[Any], folder: str) -> None:
            for number, engine in enumerate(self._engines()):
                engine.load_checkpoint(folder, _tag(number), **load_model_func_kwargs)
            models[:] = [each for each in models if not isinstance(each, Engine)]

        with self._other_optimizers():
            handle = self.register_load_state_pre_hook(load)
            try:
                super().load_state(input_dir, load_kwargs)
            finally:
                handle.remove()

    @contextmanager
    def _other_optimizers(self) -> Iterator[None]:
        """Inside, hide the engines' optimizers from accelerate: their states are in the engines' checkpoints."""
        every = self._optimizers
        self._optimizers = [each for each in every if not isinstance(each, ShardOptimizer)]
        try:
            yield
        finally:
            self._optimizers = every


def _at_stage(config: Config, stage: int) -> Config:
    return dataclasses.replace(config, zero_optimization=dataclasses.replace(config.zero_optimization, stage=stage))


def written(engine_config: Any) -> dict[str, Any]:
    """Return a config as a new dict. UsageError unless it is a dict, a path or None; ConfigError as `load_config`."""
    if isinstance(engine_config, str | Path):
        return read_tree(Path(engine_config))
    if engine_config is not None and not isinstance(engine_config, Mapping):
        kind = type(engine_config).__name__
        raise UsageError(
            f"engine_config: expected a dict or the path of a JSON file, got {kind}", code="config-wrong-type"
        )
    return copy.deepcopy(dict(engine_config or {}))


def _loss_scale(given: Any) -> dict[str, Any]:
    """Return the config section for torch's GradScaler with accelerate's GradScalerKwargs ``given``."""
    options = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    options |= {} if given is None else {name: getattr(given, name) for name in options}
    fraction, power = math.frexp(options["init_scale"])
    if (options["growth_factor"], options["backoff_factor"], fraction) != (2, 0.5, 0.5) or power < 1:
        raise UsageError(
            "GradScalerKwargs: expected init_scale to be a power of 2, growth_factor 2 and backoff_factor 0.5, got "
            f"{options['init_scale']}, {options['growth_factor']} and {options['backoff_factor']}",
            code="accelerate-grad-scaler-unsupported",
        )
    window = int(options["growth_interval"])
    return {"enabled": False, "initial_scale_power": power - 1, "loss_scale_window": window, "hysteresis": 1}


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _tag(number: int) -> str:
    return MODEL_NAME if number == 0 else f"{MODEL_NAME}_{number}"
