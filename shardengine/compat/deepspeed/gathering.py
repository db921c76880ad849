"""deepspeed.zero: calls of frameworks around sharded parameters, mapped to our engine.

Owns: the engine of each parameter, DeepSpeed's attributes of parameters. Must not know: how an engine gathers.

At stage 3 parameters have ``ds_id`` and similar attributes from ``initialize`` to ``destroy``. Scripts read from them
that a parameter must be gathered before it is used.
"""

from __future__ import annotations

import enum
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardengine.compat.deepspeed import processes
from shardengine.engine import Engine
from shardengine.errors import UsageError
from shardengine.sharding import Elsewhere, stand_in

_held: Any = WeakIdKeyDictionary()
"""Parameter → (weak reference to its engine, its name there)."""
_CARRIED = ("ds_id", "ds_numel", "ds_shape", "ds_status", "ds_tensor", "ds_persist")
_numbers = itertools.count()
_PART = Elsewhere(
    "the engine cuts weights otherwise",
    "expected deepspeed.utils.safe_get_local_fp32_param(parameter), which every rank calls",
    "expected deepspeed.utils.safe_set_local_fp32_param(parameter, value), which every rank calls",
)


class ZeroParamStatus(enum.Enum):
    """Whether a sharded parameter is currently gathered."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init:
    """A context manager that does not change how a model is made: ``initialize`` shards it, one flat buffer at a time.

    If a launcher has started the process, it joins the default process group, because scripts use their rank inside.
    """

    def __init__(self, module: nn.Module | None = None, *, enabled: bool = True, **_: Any) -> None:
        """module: not used · enabled: if False, no process group is joined."""
        if enabled and processes.is_launched():
            processes.init_distributed()

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class GatheredParameters:
    """A context manager that gathers the sharded parameters among ``params``. Collective.

    params: one or several parameters, also of several engines · modifier_rank: None: values written inside to sharded
    parameters are lost; 0: afterwards every rank has the values that rank 0 wrote, at every stage · enabled: if False,
    nothing happens. Parameters without an engine are ignored; so are parameters that are not sharded, unless
    ``modifier_rank`` is 0.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor | None],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """UsageError if ``modifier_rank`` is neither None nor 0."""
        if enabled and modifier_rank not in (None, 0):
            raise UsageError(
                f"zero.GatheredParameters: expected modifier_rank None or 0, got {modifier_rank}; write on rank 0",
                code="deepspeed-modifier-rank-not-0",
            )
        given = [params] if isinstance(params, Tensor) else [each for each in params if each is not None]
        self._writable = modifier_rank is not None
        held = [each for each in given if _holder_of(each) is not None] if enabled else []
        self._wanted = [each for each in held if self._writable or hasattr(each, _CARRIED[0])]
        self._inside = ExitStack()
        self._gathered: list[Tensor] = []

    def __enter__(self) -> None:
        by_engine: dict[int, tuple[Engine, list[str]]] = {}
        for parameter in self._wanted:
            engine, name = holder(parameter, "zero.GatheredParameters")
            by_engine.setdefault(id(engine), (engine, []))[1].append(name)
        with ExitStack() as opened:
            for engine, names in by_engine.values():
                opened.enter_context(engine.full_params(sorted(set(names)), writable=self._writable))
            self._inside = opened.pop_all()
        hidden = ZeroParamStatus.NOT_AVAILABLE
        self._gathered = [each for each in self._wanted if vars(each).get("ds_status") is hidden]
        self._say(ZeroParamStatus.AVAILABLE)

    def __exit__(self, *exception: Any) -> bool | None:
        self._say(ZeroParamStatus.NOT_AVAILABLE)
        return self._inside.__exit__(*exception)

    def _say(self, status: ZeroParamStatus) -> None:
        for parameter in self._gathered:  # not those that an outer context has gathered
            vars(parameter)["ds_status"] = status


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Gather the whole model of an engine inside the context, for many forwards without all-gathers. Collective."""
    module = model.module if isinstance(getattr(model, "module", None), nn.Module) else model
    with GatheredParameters(list(module.parameters())):
        yield module


class NoHooks:
    """An object without gathering hooks, for frameworks that remove and restore them; ours can stay."""

    class _Module:
        ds_external_parameters = staticmethod(tuple)

        @staticmethod
        def named_parameters(*, recurse: bool = False) -> tuple[()]:
            """Return no parameters."""
            return ()

    def __init__(self) -> None:
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.module = self._Module()

    def _register_deepspeed_module(self, _module: nn.Module) -> None:
        return None


def register_external_parameter(_module: nn.Module, _parameter: Tensor) -> None:
    """Do nothing: a parameter that another module uses is gathered anyway."""


def mark(engine: Engine, *, sharded: bool) -> None:
    """Register the parameters of ``engine``; if ``sharded``, set DeepSpeed's attributes on them."""
    for name, parameter in engine.module.named_parameters():
        _held[parameter] = (weakref.ref(engine), name)
        if sharded:
            part = stand_in(
                parameter.new_empty(part_size(parameter.numel(), engine.world_size)), f"ds_tensor of {name!r}", _PART
            )
            status = ZeroParamStatus.NOT_AVAILABLE
            values = (next(_numbers), parameter.numel(), parameter.shape, status, part, False)
            vars(parameter).update(zip(_CARRIED, values, strict=True))


def part_size(elements: int, ranks: int) -> int:
    """Return the number of elements in a rank's part of a parameter, in DeepSpeed's sense."""
    return math.ceil(elements / ranks)


def unmark(engine: Engine) -> None:
    """Undo ``mark`` for the parameters of ``engine``."""
    for parameter in engine.module.parameters():
        if _held.pop(parameter, None) is not None:
            for name in _CARRIED:
                vars(parameter).pop(name, None)


def holder(param: Tensor, call: str) -> tuple[Engine, str]:
    """Return the engine that holds ``param`` and its name there; UsageError, which names ``call``, if none does."""
    holder = _holder_of(param)
    if holder is None:
        raise UsageError(
            f"deepspeed.{call}: expected a parameter of an engine that was not destroyed, got a tensor of shape "
            f"{tuple(param.shape)} that no engine has",
            code="deepspeed-parameter-without-engine",
        )
    return holder


def _holder_of(param: Tensor) -> tuple[Engine, str] | None:
    held = _held.get(param)
    engine = None if held is None else held[0]()
    return None if engine is None else (engine, held[1])
