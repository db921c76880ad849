"""Weights that a unit's forward saved for backward are available whenever autograd requests them.

Owns: autograd's records of the tensors that a unit's forward saves. Must not know: gathers, modules, who runs a
backward.

[Note: On demand] Hooks on a unit's outputs announce its backward early (hooks: [Note: Backward hooks]). They do not see
every way into it: an output in an object of the user's class or on an attribute, a tensor that a hook inside the unit
has kept, a tensor wrapped by ``vmap``. So autograd gets a record for each tensor that a unit's forward saves, and
requests the tensor when a node needs it. If that is a weight, and its unit is not gathered, the unit is gathered then.
The order is that of autograd's nodes, which is the same on all ranks with the same forwards.

A record holds a view of the flat buffer, whose storage is freed and filled again, not a copy. It also holds the version
of the tensor, because autograd compares versions only of tensors that it holds itself. Hooks that other code has pushed
around the unit (``save_on_cpu``, a checkpoint) see every tensor as without these records. Hooks that are pushed inside
the unit hide tensors from the records: a recomputation looks its weights up again (``Schedule.weight_read``).

[Note: Switched off] torch.func raises an error if hooks for saved tensors are on when it differentiates, and switches
them off while it does. A model may do that inside a unit. So the function that switches hooks off first removes these
hooks, and the function that switches hooks on brings them back. Hooks of other code still make torch.func raise.
Tensors saved in between are announced by outputs alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardengine.sharding import inner

_top = torch._C._autograd._top_saved_tensors_default_hooks
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_refusal = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message

_Record = tuple[Any, int, Callable[[], None] | None]
"""The tensor; its version; the function that gathers the unit, if the tensor is a weight."""
_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


_OWN = "shardengine_saved_weights"


class SavedWeights:
    """The records of one unit.

    spans: returns the first and last address of each part of its weights in memory now · gather: makes sure that the
    weights are there.
    """

    def __init__(self, spans: Callable[[], list[tuple[int, int]]], gather: Callable[[], None]) -> None:
        _yield_to_torch_func()
        self._spans = spans
        self._gather = gather
        self._open = 0

    def begin(self) -> bool:
        """Begin a forward of the unit, which is gathered. Return whether autograd holds records until ``end``."""
        if not self._open and _refusal() is not None:
            return False
        if not self._open:
            _push(*_hooks(self._spans(), self._gather, _top(True)))
        self._open += 1
        return True

    def end(self) -> None:
        """End the forward that was begun."""
        if self._open:
            self._open -= 1
            if not self._open:
                _pop()


def _hooks(spans: list[tuple[int, int]], gather: Callable[[], None], around: _Hooks | None) -> _Hooks:
    """Return the hooks, which do as little as possible per tensor. around: the hooks below these on torch's stack."""

    def gathered_by(tensor: Tensor) -> Callable[[], None] | None:
        try:
            for part in (tensor,) if type(tensor) is Tensor else _parts_of(tensor):
                place = part.data_ptr()
                for first, end in spans:
                    if first <= place < end:
                        return gather
        except (NotImplementedError, RuntimeError):  # it has no memory
            pass
        return None

    def pack(tensor: Tensor) -> _Record:
        return tensor, tensor._version, gathered_by(tensor)

    setattr(pack, _OWN, True)
    if around is None:
        return pack, _unpack
    pack_around, unpack_around = around

    def pack_twice(tensor: Tensor) -> Any:
        found = gathered_by(tensor)
        return pack_around(tensor), found

    def unpack_twice(record: Any) -> Tensor:
        packed, found = record
        tensor = unpack_around(packed)
        if found is not None:
            found()
        return tensor

    setattr(pack_twice, _OWN, True)
    return pack_twice, unpack_twice


def _unpack(record: _Record) -> Tensor:
    tensor, version, gather = record
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(tensor.shape)} that a forward saved is at version {tensor._version}; expected version "
            f"{version} instead"
        )
    if gather is not None:
        gather()
    return tensor


def _parts_of(tensor: Tensor) -> list[Tensor]:
    return inner.leaves_of(tensor) if inner.is_outer(tensor) else [tensor]


class _Suspended(threading.local):
    """The hooks of this thread that are pushed again when torch switches hooks on, the outermost last."""

    def __init__(self) -> None:
        self.hooks: list[_Hooks] = []


_suspended = _Suspended()


@functools.cache
def _yield_to_torch_func() -> None:
    """Patch torch's two functions that switch hooks on and off, once ([Note: Switched off])."""
    functions: Any = torch._C._autograd
    disable, enable = functions._saved_tensors_hooks_disable, functions._saved_tensors_hooks_enable

    def resume() -> None:
        while _suspended.hooks:
            _push(*_suspended.hooks.pop())

    def disable_all(*args: Any) -> None:
        while (found := _top(False)) is not None and getattr(found[0], _OWN, False):
            _suspended.hooks.append(found)
            _pop()
        try:
            disable(*args)
        except BaseException:
            enable()
            resume()
            raise

    def enable_all() -> None:
        enable()
        resume()

    functions._saved_tensors_hooks_disable = disable_all
    functions._saved_tensors_hooks_enable = enable_all
