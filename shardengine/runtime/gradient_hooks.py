"""Hooks of parameters: autograd passes each gradient to the engine; the user's hooks wait for the complete one.

Owns: the contents of ``parameter._post_accumulate_grad_hooks`` while an engine is attached, when the user's hooks run,
and the limits on them. Must not know: buckets, how gradients come to be complete, the optimizer.

[Note: Hooks of the user's] In plain torch ``parameter.register_post_accumulate_grad_hook(hook)`` runs
``hook(parameter)`` as soon as a backward has added its gradient to ``parameter.grad``. With an engine that would be
this rank's gradient of this micro-batch, which the engine takes away for its buckets. So such a hook, registered before
or after ``initialize``, runs once per step, at the end of the window's last backward. ``parameter.grad`` then shows the
mean over ranks and micro-batches (``ddp/gradient_views.py``). Hooks run on every rank in the same order, for the
parameters that some rank has used, also on a rank that has run out of data. The step uses the gradient as the hook
leaves it. A hook may not step the parameter: an optimizer in a hook (to free each gradient at once) would step before
the gradients are clipped, and ``step()`` would step once more after it. ``step_in_backward`` is the engine's
replacement for such optimizers.

torch keeps the hooks in a dict, and a handle removes its hook from the dict that it was registered in. So the
parameter's dict is replaced by one that contains only the engine's hook, which is all that autograd sees; the user's
hooks are kept beside it. The earlier dict is kept unchanged, so its handles work. At the end it is put back if no hook
was added; otherwise the parameter keeps both.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardengine.ddp import taken
from shardengine.errors import UsageError
from shardengine.runtime.schedule import Schedule

Hook = Callable[[Tensor], None]
_INSTEAD = (
    "an optimizer that steps in it is given to initialize instead, and steps in step(), or, where its states are "
    'offloaded, with "zero_optimization": {"offload_optimizer": {"device": "cpu", "step_in_backward": true}} while '
    "backward runs"
)


class _Hooks(OrderedDict[Any, Hook]):
    """Contains the hook that autograd calls. Waiting hooks are kept beside it; for torch's handles they are in it as
    well."""

    def __init__(self, before: Mapping[Any, Hook] | None) -> None:
        super().__init__()
        self.before = before
        self.waiting: dict[Any, Hook] = {}
        self.asked: Callable[[], None] = lambda: None
        self._listens = False
        self._passing_on: RemovableHandle | None = None

    def __setitem__(self, key: Any, hook: Hook) -> None:
        if self._listens:
            super().__setitem__(key, hook)
        else:
            self.waiting[key] = hook
            self.asked()

    def __delitem__(self, key: Any) -> None:
        if key in self.waiting:
            del self.waiting[key]
        else:
            super().__delitem__(key)

    def __contains__(self, key: Any) -> bool:
        return key in self.waiting or super().__contains__(key)

    def call(self, parameter: Tensor) -> None:
        """Call the user's hooks in the order of their registration."""
        for hook in self.of_user():
            hook(parameter)

    def of_user(self) -> list[Hook]:
        """Return the user's hooks, which wait."""
        return [*(self.before or {}).values(), *self.waiting.values()]

    def begin(self, asked: Callable[[], None]) -> None:
        """Let the user's hooks wait from now on. asked: called when there is one."""
        if self._passing_on is not None:
            self._passing_on.remove()
            self._passing_on = None
        self.asked = asked
        if self.of_user():
            asked()

    def end(self, parameter: nn.Parameter) -> None:
        """Let autograd call the user's hooks, as without an engine."""
        self.asked = lambda: None
        if self.waiting:
            self._passing_on = self.listen(parameter, self.call)
        else:
            parameter._post_accumulate_grad_hooks = self.before  # type: ignore[assignment]

    def listen(self, parameter: nn.Parameter, hook: Hook) -> RemovableHandle:
        """Register ``hook`` as the one that autograd calls."""
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter accepts no hook
        self._listens = True
        try:
            parameter._post_accumulate_grad_hooks = self
            return parameter.register_post_accumulate_grad_hook(hook)
        finally:
            self._listens = False
            parameter.requires_grad_(trainable)


class GradientHooks:
    """The hooks of the trainable ``parameters`` (number → parameter), which pass their gradients to ``schedule``.

    names: number → name · rank: this one's. The last argument reports an exception of a user's hook to the other ranks.

    torch holds hooks in a place that the garbage collector does not see, so objects that they refer to would never be
    freed. So they have a weak reference to the schedule, which the module's hooks keep alive. A parameter that outlives
    its module and its engine is an ordinary one.
    """

    def __init__(
        self,
        schedule: Schedule,
        parameters: Mapping[int, nn.Parameter],
        names: Sequence[str],
        rank: int,
        tell: Callable[[BaseException, str], None],
    ) -> None:
        self._parameters, self._names, self._rank, self._tell = parameters, names, rank, tell
        self._asked: set[int] = set()
        self._hooks: dict[int, _Hooks] = {}
        self._handles = []
        listener = weakref.ref(schedule)
        for index, parameter in parameters.items():
            known: Any = parameter._post_accumulate_grad_hooks
            hooks = self._hooks[index] = known if isinstance(known, _Hooks) else _Hooks(known)
            hooks.begin(functools.partial(self._asked.add, index))
            self._handles.append(hooks.listen(parameter, _taking(listener, index, hooks)))

    def run(self, touched: Collection[int]) -> None:
        """Call the user's hooks of the parameters ``touched``, whose gradients are complete.

        See [Note: Hooks of the user's].
        """
        for index in sorted(self._asked.intersection(touched)):
            for hook in self._hooks[index].of_user():
                try:
                    self._run(hook, index)
                except Exception as error:
                    self._tell(error, f"a hook of {self._names[index]!r}")
                    raise

    def _run(self, hook: Hook, index: int) -> None:
        parameter, problem, cause = self._parameters[index], "", None
        version = parameter._version
        try:
            hook(parameter)
        except UsageError as error:
            problem, cause = str(error), error
        else:
            if parameter._version != version:
                problem = "it has changed the weight, which step() changes"
            elif parameter.grad is None:
                problem = "it has set parameter.grad to None, before step()"
        if problem:
            raise UsageError(
                f"a hook of register_post_accumulate_grad_hook on parameter {self._names[index]!r} (rank {self._rank}) "
                "did more than to read or change the mean gradient, which parameter.grad shows at the end of backward: "
                f"{_INSTEAD}. What it did: {problem}",
                code="grad-hook-does-too-much",
            ) from cause

    def remove(self) -> None:
        """Make the user's hooks ordinary ones again."""
        for handle in self._handles:
            handle.remove()
        for index, hooks in self._hooks.items():
            hooks.end(self._parameters[index])
        self._handles.clear()


def check(model: nn.Module) -> None:
    """Raise ``UsageError`` for an optimizer that steps in hooks that cannot be observed."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_in_backward_optimizers", None):
            raise UsageError(
                f"parameter {name!r} has an optimizer of torch.distributed.optim._apply_optimizer_in_backward, which "
                f"would step it with this rank's gradient alone: expected none; {_INSTEAD}",
                code="optimizer-applied-in-backward",
            )


def _taking(listener: weakref.ref[Schedule], index: int, hooks: _Hooks) -> Hook:
    """Return the hook that passes the gradient of parameter ``index`` to the schedule, as long as that exists."""

    def ready(parameter: Tensor) -> None:
        if (alive := listener()) is None:
            hooks.call(parameter)
            return
        shown, gradient = taken(parameter)
        try:
            if gradient is not None:
                alive.post_accumulate_grad(index, gradient)
        except BaseException:
            parameter.grad = shown  # a backward that raises changes nothing
            raise

    return ready
