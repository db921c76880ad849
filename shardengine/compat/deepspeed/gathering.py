"""deepspeed.zero: what a framework says around sharded parameters, in our engine's words.

Owns: which engine holds a parameter, what its parameters carry for scripts that ask. Must not know: how it gathers.

At stage 3 parameters carry ``ds_id`` and the like from ``initialize`` to ``destroy``; scripts take them as the sign
that a parameter must be gathered before it is read.
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
"""Parameter → (its engine, weakly, and its name there)."""
_CARRIED = ("ds_id", "ds_numel", "ds_shape", "ds_status", "ds_tensor", "ds_persist")
_numbers = itertools.count()
_PART = Elsewhere(
    "the engine cuts weights otherwise",
    "expected deepspeed.utils.safe_get_local_fp32_param(parameter), which every rank calls",
    "expected deepspeed.utils.safe_set_local_fp32_param(parameter, value), which every rank calls",
)


class ZeroParamStatus(enum.Enum):
    """Whether a sharded parameter is whole at this moment."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init:
    """``with`` this, a model is made as usual: ``initialize`` shards it one flat buffer at a time.

    Where a launcher has started the process it joins the default group: scripts ask for their rank inside.
    """

    def __init__(self, module: nn.Module | None = None, *, enabled: bool = True, **_: Any) -> None:
        """module: nothing happens to it · enabled: False: no group is joined."""
        if enabled and processes.is_launched():
            processes.init_distributed()

    def __enter__(self) -> Init:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class GatheredParameters:
    """``with`` this, the sharded parameters among ``params`` are whole; collective.

    params: a parameter or several, also of several engines · modifier_rank: None: what is written to those is lost; 0:
    every rank has afterwards what rank 0 wrote, at every stage. Otherwise nothing happens to parameters that are not
    sharded, nor to those of no engine, nor where ``enabled`` is False.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor | None],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """UsageError where another rank than 0 shall write."""
        if enabled and modifier_rank not in (None, 0):
            raise UsageError(
                f"zero.GatheredParameters: expected modifier_rank None or 0, got {modifier_rank}; write on rank 0"
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
        for parameter in self._gathered:  # not those that an outer one shows
            vars(parameter)["ds_status"] = status


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Inside of ``with`` this the model of an engine is whole, for many forwards without gathers; collective."""
    module = model.module if isinstance(getattr(model, "module", None), nn.Module) else model
    with GatheredParameters(list(module.parameters())):
        yield module


class NoHooks:
    """What hosts take gathering hooks off from, and put them on again: none of ours has to be."""

    class _Module:
        ds_external_parameters = staticmethod(tuple)

        @staticmethod
        def named_parameters(*, recurse: bool = False) -> tuple[()]:
            """None."""
            return ()

    def __init__(self) -> None:
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.module = self._Module()

    def _register_deepspeed_module(self, _module: nn.Module) -> None:
        return None


def register_external_parameter(_module: nn.Module, _parameter: Tensor) -> None:
    """Nothing: a parameter that another module uses is gathered for it anyhow."""


def mark(engine: Engine, *, sharded: bool) -> None:
    """The parameters of ``engine`` are found by it from now on; where they are sharded, they say so."""
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
    """How many elements what DeepSpeed calls a rank's part has."""
    return math.ceil(elements / ranks)


def unmark(engine: Engine) -> None:
    """They carry nothing any more, and are no engine's."""
    for parameter in engine.module.parameters():
        if _held.pop(parameter, None) is not None:
            for name in _CARRIED:
                vars(parameter).pop(name, None)


def holder(param: Tensor, call: str) -> tuple[Engine, str]:
    """The engine that holds ``param``, and its name there. UsageError, which names the ``call``, where none does."""
    holder = _holder_of(param)
    if holder is None:
        raise UsageError(
            f"deepspeed.{call}: expected a parameter of an engine that was not destroyed, got a tensor of shape "
            f"{tuple(param.shape)} that no engine has"
        )
    return holder


def _holder_of(param: Tensor) -> tuple[Engine, str] | None:
    held = _held.get(param)
    engine = None if held is None else held[0]()
    return None if engine is None else (engine, held[1])
