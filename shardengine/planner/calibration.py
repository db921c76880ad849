"""Measures this machine's CPU in a few seconds: rates for the time of a step on its ranks.

Owns: the operations that are timed. Must not know: what overlaps, how the rates are used.

Matrix products, passes over memory and the engine's kernels are timed at a size that exceeds the caches. The operations
of a tape are timed with their own shapes, which is more exact. The median of several tries counts: if other programs
slow the machine down, they slow training down as well.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardengine import kernels
from shardengine.comm import GroupSpeed
from shardengine.planner.costs import DTYPES
from shardengine.planner.rates import Rates
from shardengine.planner.tape import Shape, Tape, TapedCall

TRIES, LEAST_TRIES, LEAST_S = 7, 3, 20e-3
"""Limits on the tries of one operation: at most ``TRIES``; after ``LEAST_TRIES``, only until ``LEAST_S`` have been
timed."""
BUCKET_S = 3e-5
"""Seconds of Python around a collective, or around a kernel of the engine."""
_SIZES = (256, 512, 1024)
_ELEMENTS, _OF_A_STEP = 1 << 22, 1 << 25
_EARLIER = ("update",)
"""Kernels whose tensors were last used one step ago."""


def measured(
    tape: Tape | None = None,
    *,
    groups: Mapping[str, GroupSpeed] | None = None,
    known: Mapping[TapedCall, float] | None = None,
    **more: Any,
) -> Rates:
    """Return the rates of this process's CPU, with torch's present number of threads.

    tape: its operations are timed as well · groups: fits of its collectives (``comm.group_speed``) · known: operations
    that were timed before · more: further fields of ``Rates``.
    """
    flops = {name: _products(dtype) for dtype, name in DTYPES.items()}
    memory = _passes()
    calls = measured_calls(tape, known) if tape is not None else dict(known or {})
    said = {"operation_s": _smallest(), "dispatch_s": _python(), "bucket_s": BUCKET_S, "host_memory": memory}
    return Rates(flops, memory, calls=calls, groups=groups or {}, **{**said, **more})


def measured_calls(tape: Tape, known: Mapping[TapedCall, float] | None = None) -> dict[TapedCall, float]:
    """Return the seconds of each operation of ``tape``; those in ``known`` are not timed again."""
    found = dict(known or {})
    for call in tape.calls:
        if call not in found:
            found[call] = timed(call)
    return found


def timed(call: TapedCall) -> float:
    """Return the seconds of an operation on tensors of its shapes. Their values do not matter."""
    what, shapes = call.example
    given = pytree.tree_map(_made, shapes, is_leaf=lambda each: isinstance(each, Shape))
    before = functools.partial(_other_memory(_OF_A_STEP if what in _EARLIER else _ELEMENTS).add_, 1)
    if call.kernel:
        return _seconds(lambda: getattr(kernels, what)(**given), before=before)
    args, kwargs = given
    return _seconds(lambda: what(*args, **kwargs), before=before)


def _made(each: Any) -> Any:
    if not isinstance(each, Shape):
        return each
    made = torch.empty_strided(each.size, each.stride, dtype=each.dtype)
    return made.zero_() if not each.dtype.is_floating_point else made.fill_(0.5)


@functools.cache
def _other_memory(elements: int) -> Tensor:
    """Return a tensor that exceeds a core's own cache.

    It is used between two tries, as other operations are in a step.
    """
    return torch.zeros(elements)


def _seconds(run: Callable[[], Any], *, grad: bool = False, before: Callable[[], Any] = lambda: None) -> float:
    """Return the median time of ``run``. before: called before each try, not timed."""
    with torch.set_grad_enabled(grad):
        run()
        times: list[float] = []
        while len(times) < TRIES and (len(times) < LEAST_TRIES or sum(times) < LEAST_S):
            before()
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _products(dtype: torch.dtype) -> float:
    """Return the FLOP/s of matrix products at the fastest size."""
    found = 0.0
    for size in _SIZES:
        left = torch.ones(size, size, dtype=dtype)
        seconds = _seconds(lambda left=left: left @ left)  # type: ignore[misc]
        found = max(found, 2 * size**3 / seconds)
        if seconds > 0.2:  # the CPU is slow in this dtype
            break
    return found


def _passes() -> float:
    """Return the bytes/s of an addition."""
    left, out = torch.ones(_ELEMENTS), torch.empty(_ELEMENTS)
    return 3 * out.nbytes / _seconds(lambda: torch.add(left, left, out=out))


def _smallest() -> float:
    left: Tensor = torch.ones(1)
    return _seconds(lambda: left + left)


class _Counted(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _python() -> float:
    """Return the seconds of Python and autograd per operation, without the operation itself.

    It times a forward and backward of modules that compute next to nothing.
    """
    layers = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU()) for _ in range(16))
    model, given = nn.Sequential(*layers), torch.ones(2, 8)

    def train() -> None:
        model(given).sum().backward()

    with torch.enable_grad(), _Counted() as counted:
        train()
    return max(_seconds(train, grad=True) / counted.count - _smallest(), 0.0)
