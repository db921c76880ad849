"""Hooks and ``optimizer.state``: the interface that torch's functions and users expect of an optimizer.

Owns: when hooks are called, and the optimizer passed to them; the entries of ``state``. Must not know: how a step is
done, the contents of a state dict.

[Note: Once per step] Torch calls a step's hooks around ``optimizer.step()``. Here a step has several calls (one
``engine.step()`` or ``optimizer.step()`` per micro-batch) and one update. So the engine calls the hooks around the
update. Pre hooks run when the gradients are complete, even if the step is then skipped, because they may change the
gradients that decide it. Post hooks run after an update that was applied, before a scheduler is stepped; the host waits
for the verdict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardengine.errors import UsageError

_Hooked = Sequence[torch.optim.Optimizer]
"""The optimizers whose hooks are called; torch's global hooks are called with the last of them."""


def pre_hooks(optimizers: _Hooked) -> Iterator[tuple[torch.optim.Optimizer, Any]]:
    """Yield the hooks to call before an update, each with its optimizer."""
    yield from ((optimizers[-1], hook) for hook in list(_global_optimizer_pre_hooks.values()))
    for each in optimizers:
        yield from ((each, hook) for hook in list(each._optimizer_step_pre_hooks.values()))


def post_hooks(optimizers: _Hooked) -> Iterator[tuple[torch.optim.Optimizer, Any]]:
    """Yield the hooks to call after an update, each with its optimizer."""
    for each in optimizers:
        yield from ((each, hook) for hook in list(each._optimizer_step_post_hooks.values()))
    yield from ((optimizers[-1], hook) for hook in list(_global_optimizer_post_hooks.values()))


def before_update(optimizers: _Hooked) -> None:
    """Call the pre hooks. Raise UsageError if one returns other arguments for the step, which takes none."""
    for optimizer, hook in pre_hooks(optimizers):
        given: tuple[Any, dict[str, Any]] = ((optimizer,), {})
        result = hook(optimizer, *given)
        if result is not None and result != given:
            raise UsageError(
                f"the pre hook {name_of(hook)} of the optimizer's step returned {result!r}: expected None, or the "
                "arguments that it was given; the update takes none that could be changed",
                code="optimizer-hook-returned-value",
            )


def after_update(optimizers: _Hooked) -> None:
    """Call the post hooks."""
    for optimizer, hook in post_hooks(optimizers):
        hook(optimizer, (optimizer,), {})


def name_of(hook: Any) -> str:
    """Return the name of a hook for messages."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def refuse_pre_hooks(optimizers: _Hooked) -> None:
    """Raise ``UsageError`` if there is a pre hook: buckets are stepped before it could be called."""
    for _, hook in pre_hooks(optimizers):
        raise UsageError(
            f"the pre hook {name_of(hook)} of the optimizer's step cannot be called before the update, because buckets "
            "are stepped in backward (offload_optimizer.step_in_backward): remove the hook, or set that key to false",
            code="optimizer-hook-step-in-backward",
        )


def around_state_dict(optimizers: _Hooked, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the dict that ``make`` returns; call torch's hooks before it and, if this rank has the dict, after it."""
    for each in optimizers:
        for before in list(each._optimizer_state_dict_pre_hooks.values()):
            before(each)
    found = make()
    for each in optimizers if found else ():
        for after in list(each._optimizer_state_dict_post_hooks.values()):
            found = _or(after(each, found), found)
    return found


def around_load(optimizers: _Hooked, given: Any, load: Callable[[Mapping[str, Any]], None]) -> None:
    """Call ``load`` with ``given`` as changed by torch's pre hooks, if this rank has it; then call the post hooks."""
    if isinstance(given, dict) and given:
        given = given.copy()
        for each in optimizers:
            for before in list(each._optimizer_load_state_dict_pre_hooks.values()):
                given = _or(before(each, given), given)
    load(given)
    for each in optimizers:
        for after in list(each._optimizer_load_state_dict_post_hooks.values()):
            after(each)


def _or(result: Any, given: Any) -> Any:
    return given if result is None else result


class StatesElsewhere(defaultdict[Tensor, Any]):
    """``optimizer.state`` of sharded states: it has no entries.

    The entry of a parameter gives only the names of its states. ``torch.distributed.checkpoint.state_dict`` checks that
    there is a state before it requests all of it (and takes a step if there is none). So this dict is always true, and
    records the check for the next ``state_dict()``.
    """

    def __init__(self, names_of: Callable[[Tensor], Sequence[str]]) -> None:
        super().__init__()
        self._names_of_parameter = names_of
        self._asked = False

    def __bool__(self) -> bool:
        self._asked = True
        return True

    def take_request(self) -> bool:
        """Whether the state was checked since the last call."""
        asked, self._asked = self._asked, False
        return asked

    def __missing__(self, parameter: Tensor) -> Any:
        return _Names(self._names_of_parameter(parameter))

    def __reduce__(self) -> Any:
        return dict, ()


class _Names(dict[str, Any]):
    """The names of a parameter's states, whose values are sharded."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(dict.fromkeys(names))

    def _refuse(self, name: Any, *_default: Any) -> Any:
        raise UsageError(
            f"engine.optimizer.state[parameter] has no {name!r} on this rank, optimizer state is sharded over the "
            "ranks: read whole states on every rank inside of `with engine.full_optimizer_state() as states:`, or "
            "call engine.optimizer.state_dict() on every rank",
            code="optimizer-state-read-sharded",
        )

    __getitem__ = get = pop = setdefault = __setitem__ = _refuse
