"""Every hook registration of the library on modules. A hook's body is one call into the schedule or the deferred
gather.

Must not know: buckets, collectives, the optimizer.

[Note: Backward hooks] Backward is observed on autograd nodes (``Node.register_prehook``), not on tensors or modules:
module full-backward hooks miss dict outputs and forbid in-place operations on outputs; tensor hooks miss an in-place
operation on a view of an output. The node that produced an output runs before any other node of its unit. A node that
produced an input runs after all of them, because autograd runs ready nodes latest-created first, and inputs were
created first. So the unit's backward is over when the first of the input nodes runs. An in-place operation on an output
that is a view takes the view's own node out of the graph, so the node of its base is observed as well. If one unit's
input is another's output, "over" is announced before "reached", so that one is freed before the other is gathered.

[Note: Compiled modules] A hook moves weights, so it must not become part of a compiled graph: dynamo is configured to
leave hooks alone. ``torch.compile(block)`` is a module around the block, whose hooks run outside of the graph. A module
compiled in place (``block.compile()``) or around units (a compiled root) has hooks inside: the graph breaks there, and
the code between the hooks is compiled piece by piece.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardengine.ddp import Forward
from shardengine.errors import CommunicationError, MismatchError, UsageError
from shardengine.runtime import transforms
from shardengine.runtime.calls import UnitCall
from shardengine.runtime.casting import cast_inputs
from shardengine.runtime.deferred_gather import DeferredGather
from shardengine.runtime.saved_weights import SavedWeights
from shardengine.runtime.schedule import Schedule


class _Hook:
    """A hook's body. A copy of the module would drive the engine of the original, so copying it raises an error.

    refuse: raises that error instead of the default one.
    """

    def __init__(self, call: Callable[..., None], refuse: Callable[[], None] = lambda: None) -> None:
        _keep_out_of_graphs()
        self._call = call
        self._refuse = refuse

    def __call__(self, *args: Any) -> None:
        if transforms.innermost() is None:
            self._call(*args)
            return
        with transforms.outside():
            self._call(*args)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        self._refuse()
        raise UsageError(
            "a model whose weights are sharded cannot be copied or pickled: use "
            "engine.state_dict() or engine.save_pretrained(dir), read parameters inside `with engine.full_params():`, "
            "or call engine.close() first",
            code="model-copied-while-sharded",
        )


@functools.cache
def _keep_out_of_graphs() -> None:
    """Keep dynamo out of hooks.

    This is done once, and not at import, which would import all of dynamo ([Note: Compiled modules]).
    """
    reason = (
        "shardengine listens to this module's forward in a hook, which cannot be part of a graph. With fullgraph=True "
        "compile the block, not what is around it, by wrapping it before initialize: "
        "model.blocks[i] = torch.compile(model.blocks[i], fullgraph=True)"
    )
    for kind in (_Hook, _Listener, _InputCast):
        kind.__call__ = torch.compiler.disable(kind.__call__, reason=reason)  # type: ignore[method-assign]


def _hookable(root: nn.Module) -> list[nn.Module]:
    """Return the modules of ``root`` except TorchScript, which takes no hooks and holds no weights of the engine's."""
    return [module for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]


class _Listener:
    """A hook's body for weights that rest whole. In a copy of the module it does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        _keep_out_of_graphs()
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Listener, ()


def attach_root_events(schedule: Schedule, module: nn.Module) -> list[RemovableHandle]:
    """Announce forwards of ``module`` to the schedule, and gradients that reach the tensors that it returned.

    It is used if weights rest whole: nothing else listens to forwards then.
    """

    def pre_forward(_module: nn.Module, _args: Any) -> None:
        if torch.is_grad_enabled() and not schedule.in_backward:
            schedule.finish_open_backward()

    def watch(_module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not schedule.in_backward:
            reached = functools.partial(schedule.pre_backward_root, Forward())
            for node in _nodes_of(list(tensors_in(output))):
                _NodeEvents.of(node).reached.append(reached)

    return [
        module.register_forward_pre_hook(_Listener(pre_forward), prepend=True),
        module.register_forward_hook(_Listener(watch)),
    ]


def attach_scale(schedule: Schedule, loss: Tensor) -> None:
    """Announce to ``schedule`` that a backward of ``loss``, which has the loss scale, begins."""
    if loss.grad_fn is not None:
        loss.grad_fn.register_prehook(lambda _gradients: schedule.begin_scaled())


class _InputCast:
    """The hook that casts a module's inputs. In a copy of the module it does nothing."""

    def __init__(self, dtype: torch.dtype | None = None, device: str = "cpu", holders: Sequence[Any] = ()) -> None:
        _keep_out_of_graphs()
        self._dtype = dtype
        self._device = device
        self._holders = holders

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._dtype is None or torch.is_autocast_enabled(self._device):
            return None
        given = args, kwargs
        cast = cast_inputs(given, self._dtype, self._buffers)
        return None if cast is given else cast

    def _buffers(self) -> Iterator[Tensor]:
        return (buffer for holder in self._holders for buffer in holder.values() if buffer is not None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _InputCast, ()


def attach_input_cast(module: nn.Module, dtype: torch.dtype, device: str) -> list[RemovableHandle]:
    """Cast the floating-point inputs of every call of ``module`` to ``dtype``, before its other hooks see them.

    device: the type of the device; inside its autocast regions inputs are left to autocast.
    """
    cast = _InputCast(dtype, device, [part._buffers for part in module.modules()])
    return [module.register_forward_pre_hook(cast, with_kwargs=True, prepend=True)]


def attach_deferred_gather(
    deferred_gather: DeferredGather, root: nn.Module, blocks: Mapping[nn.Module, int]
) -> list[RemovableHandle]:
    """Let forwards wait for stepped weights.

    ``blocks`` (module → its group) wait for group 0 and their own group, other modules for group 0.
    """
    handles: list[RemovableHandle] = []
    inside = {id(child) for block in blocks for child in block.modules() if child is not block}

    def wait(number: int) -> _Listener:
        def before(_module: nn.Module, _args: Any) -> None:
            deferred_gather.await_group(0)
            deferred_gather.await_group(number)

        return _Listener(before)

    for module in _hookable(root):
        if id(module) not in inside:
            handles.append(module.register_forward_pre_hook(wait(blocks.get(module, 0)), prepend=True))
        read = _Listener(lambda _module, _prefix, _keep: deferred_gather.await_all())
        handles.append(module.register_state_dict_pre_hook(read))
        handles.append(module.register_load_state_dict_pre_hook(_Listener(lambda *_: deferred_gather.await_all())))
    return handles


def attach_state_dict_guard(module: nn.Module, refuse: Callable[[], None]) -> list[RemovableHandle]:
    """Call ``refuse`` when a state dict of ``module`` or a part of it is requested."""
    refusal = _Hook(lambda _module, _prefix, _keep: refuse())
    return [part.register_state_dict_pre_hook(refusal) for part in _hookable(module)]


def attach_state_dict_names(
    module: nn.Module, value_of: Callable[[nn.Parameter], Tensor | None]
) -> list[RemovableHandle]:
    """Replace each parameter in state dicts of ``module`` and its parts by ``value_of`` it, unless that is None.

    With ``keep_vars`` they hold the parameters themselves.
    """

    def put(part: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name, parameter in part._parameters.items():
            key = prefix + name
            if parameter is not None and key in state and state[key] is not parameter:
                value = value_of(parameter)
                state[key] = state[key] if value is None else value

    hook = _Hook(put)
    return [part.register_state_dict_post_hook(hook) for part in _hookable(module)]


def attach_load_guard(module: nn.Module, refuse: Callable[[nn.Module], None]) -> list[RemovableHandle]:
    """Call ``refuse`` with each part of ``module`` that is about to load its own parameters from a state dict."""
    guard = _Hook(lambda part, *_: refuse(part))
    return [part.register_load_state_dict_pre_hook(guard) for part in _hookable(module)]


def attach_barrier(module: nn.Module, refuse: Callable[[], None]) -> list[RemovableHandle]:
    """Call ``refuse`` when ``module`` or a part of it is run or copied, or its state dict is read or loaded."""
    barrier = _Hook(lambda *_: refuse(), refuse)
    handles = attach_state_dict_guard(module, refuse)
    for part in _hookable(module):
        handles.append(part.register_forward_pre_hook(barrier, prepend=True))
        handles.append(part.register_load_state_dict_pre_hook(barrier))
    return handles


def attach_unit_events(schedule: Schedule, root: nn.Module, units: Mapping[nn.Module, int]) -> list[RemovableHandle]:
    """Announce the forwards and backwards of ``units`` (module → index) and of every module around them."""
    handles: list[RemovableHandle] = []
    inside = {id(child) for unit in units for child in unit.modules() if child is not unit}
    for module in _hookable(root):
        if id(module) in inside:
            continue
        if module in units:
            announce = _UnitHooks(schedule, units[module])
            handles.append(module.register_forward_pre_hook(_Hook(announce.before), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(_Hook(announce.after)))
        ended = announce.ended if module in units else None
        handles.append(module.register_forward_pre_hook(_enter(schedule, root), prepend=True))  # so before ``before``
        leave = _leave(schedule, root, ended)
        handles.append(module.register_forward_hook(leave, always_call=True))  # even if it raises
    return handles


def _enter(schedule: Schedule, root: nn.Module) -> Callable[..., None]:
    whole = weakref.ref(root)

    def enter(module: nn.Module, _args: Any) -> None:
        schedule.pre_forward_root(module, torch.is_grad_enabled(), part=module is not whole())

    return _Hook(enter)


def _leave(schedule: Schedule, root: nn.Module, ended: Callable[[], None] | None) -> Callable[..., None]:
    whole = weakref.ref(root)

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        if ended is not None:
            ended()
        tensors = list(tensors_in(output))
        try:
            outermost = schedule.post_forward_root(module, tensors)
        except (CommunicationError, MismatchError) as error:
            if output is None and isinstance(error.__context__, (CommunicationError, MismatchError)):
                return  # the forward has raised the error of the same wait already
            raise
        if outermost and torch.is_grad_enabled():
            forward = Forward() if module is whole() else None
            reached = functools.partial(schedule.pre_backward_root, forward, schedule.line)
            for node in _nodes_of(tensors):
                _NodeEvents.of(node).reached.append(reached)

    return _Hook(leave)


class WatchedParameters:
    """The parameters of one module whose weights rest sharded; it announces look-ups of a parameter by name.

    ``nn.Module`` looks a parameter up in this dict (``module.weight``), also for another module's forward. Iteration
    over parameters does not, and neither does compiled code: its look-ups become inputs of the graph.
    """

    class _Parameters(dict[str, nn.Parameter | None]):
        __slots__ = ("announce",)
        announce: Callable[[str], None]

        def __getitem__(self, name: str) -> nn.Parameter | None:
            if not torch.compiler.is_compiling():
                self.announce(name)
            return dict.__getitem__(self, name)

        def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
            return dict, (dict(self),)

    def __init__(self, module: nn.Module, announce: Callable[[str], None]) -> None:
        self._module = module
        watched = self._Parameters(module._parameters)
        watched.announce = announce
        vars(module)["_parameters"] = watched

    def remove(self) -> None:
        """Give the module an ordinary dict again."""
        vars(self._module)["_parameters"] = dict(self._module._parameters)


def attach_reads(
    schedule: Schedule, units: Mapping[nn.Module, int], unit_of: Mapping[int, int], tell: Callable[[str, int], None]
) -> list[WatchedParameters]:
    """Unshard weights that are read outside of their unit's forward.

    unit_of: id(parameter) → its unit. The last argument is called with (name in the module, id(parameter)) at each such
    read.
    """

    def announcer(module: nn.Module) -> Callable[[str], None]:
        def announce(name: str) -> None:
            parameter = module._parameters.get(name)
            if number := unit_of.get(id(parameter), 0):
                with transforms.outside():
                    if schedule.weight_read(number):
                        tell(name, id(parameter))

        return announce

    parts = {part for unit in units for part in unit.modules() if any(p is not None for p in part._parameters.values())}
    return [WatchedParameters(part, announcer(part)) for part in parts]


class _NodeEvents:
    """The one pre-hook of an autograd node; it lives as long as the node does (in ``Node.metadata``)."""

    _KEY = "shardengine"

    def __init__(self) -> None:
        self.over: list[Callable[[], None]] = []
        self.reached: list[Callable[[], None]] = []

    def __call__(self, _gradients: Any) -> None:
        with nullcontext() if transforms.innermost() is None else transforms.outside():
            for announce in (*self.over, *self.reached):
                announce()

    @classmethod
    def of(cls, node: Any) -> _NodeEvents:
        """Return the events of ``node``, which are registered at the first call."""
        events: _NodeEvents | None = node.metadata.get(cls._KEY)
        if events is None:
            events = node.metadata[cls._KEY] = cls()
            node.register_prehook(events)
        return events


class _UnitHooks:
    """The hooks of one unit.

    ``_open`` holds the calls between pre-forward and post-forward, innermost last, each with whether an input has a
    graph. ``_recorded`` holds whether autograd has records of those forwards.
    """

    def __init__(self, schedule: Schedule, index: int) -> None:
        self._schedule = schedule
        self._index = index
        self._open: list[tuple[UnitCall, bool]] = []
        self._recorded: list[bool] = []
        self._saved = SavedWeights(schedule.units[index].spans, functools.partial(schedule.saved_weight_read, index))

    def before(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        grad = torch.is_grad_enabled()
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        call = self._schedule.pre_forward(self._index, grad=grad, differentiable=bool(inputs))
        if call is None or self._schedule.depth_of(self._index) <= 1:
            self._open.clear()
        if call is None or not grad:
            self._recorded.append(False)
            return
        nodes = {t.grad_fn for t in inputs if t.grad_fn is not None}
        self._open.append((call, bool(inputs)))
        for node in nodes:
            call.expect_end()
            _NodeEvents.of(node).over.append(lambda: self._schedule.post_backward(self._index, call))
        self._recorded.append(not self._schedule.in_backward and self._saved.begin())

    def after(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if not self._schedule.observes(self._index):
            return
        grad = torch.is_grad_enabled()
        outputs = list(tensors_in(output))
        keep = False
        if grad:
            call, differentiable = self._open.pop() if self._open else (UnitCall(self._index), True)
            for node in _nodes_of(outputs):
                _NodeEvents.of(node).reached.append(
                    lambda: self._schedule.pre_backward(self._index, call, announced=call.announced)
                )
            recorded = bool(self._recorded) and self._recorded[-1]
            keep = not (outputs or recorded) and (differentiable or self._schedule.trains(self._index))
        self._schedule.post_forward(self._index, grad, keep, outputs)

    def ended(self) -> None:
        """End a forward, which has returned or raised."""
        if self._recorded and self._recorded.pop():
            self._saved.end()


def _nodes_of(outputs: Sequence[Tensor]) -> set[Any]:
    """Return the autograd nodes that a gradient of ``outputs`` reaches first, those of views' bases included."""
    bases = [t._base for t in outputs if t._base is not None]
    return {t.grad_fn for t in (*outputs, *bases) if t.grad_fn is not None}


def watch_gradients(outputs: Any, change: Callable[[Tensor], Tensor | None]) -> None:
    """Call ``change`` with each gradient that reaches a tensor of ``outputs``; its result, unless None, replaces it."""
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            tensor.register_hook(change)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses; other objects are not searched."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
