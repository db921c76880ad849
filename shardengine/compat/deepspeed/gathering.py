"""deepspeed.zero: what a framework says around sharded parameters, in our engine's words.

Owns: which engine holds a parameter, what its parameters carry for scripts that ask. Must not know: how it gathers.

At stage 3 parameters carry ``ds_id`` and the like from ``initialize`` to ``destroy``; scripts take them as the sign
that a parameter must be gathered before it is read.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from shardengine.engine import Engine
from shardengine.errors import UsageError

_held: Any = WeakIdKeyDictionary()
"""Parameter → (its engine, weakly, and its name there)."""
_CARRIED = ("ds_id", "ds_numel", "ds_shape", "ds_status")
_numbers = itertools.count()


class ZeroParamStatus(enum.Enum):
    """Whether a sharded parameter is whole at this moment."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Init:
    """``with`` this, a model is made as usual: ``initialize`` shards it one flat buffer at a time."""

    def __init__(self, module: nn.Module | None = None, **_: Any) -> None:
        pass

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
            engine, name = _holder(parameter, "zero.GatheredParameters")
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
            values = (next(_numbers), parameter.numel(), parameter.shape, ZeroParamStatus.NOT_AVAILABLE)
            vars(parameter).update(zip(_CARRIED, values, strict=True))


def unmark(engine: Engine) -> None:
    """They carry nothing any more, and are no engine's."""
    for parameter in engine.module.parameters():
        if _held.pop(parameter, None) is not None:
            for name in _CARRIED:
                vars(parameter).pop(name, None)


# One parameter at a time; collective, as under DeepSpeed


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """What is stepped for ``param``, whole, in fp32; None where the optimizer does not step it."""
    return safe_get_full_optimizer_state(param, "weight")


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A state of the optimizer for ``param``, whole; None where it has none of this name."""
    engine, name = _holder(param, "utils.safe_get_full_optimizer_state")
    with engine.full_optimizer_state([name]) as states:
        found = None if states[name] is None else states[name].get(optim_state_key)  # type: ignore[union-attr]
        return found.clone() if isinstance(found, Tensor) else found


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The gradient of the step, whole, between the backward on the boundary and the step; None where there is none."""
    engine, name = _holder(param, "utils.safe_get_full_grad")
    with engine.full_grads([name]) as grads:
        return None if grads[name] is None else torch.clone(grads[name])  # type: ignore[arg-type]


def _holder(param: Tensor, call: str) -> tuple[Engine, str]:
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
