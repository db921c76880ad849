"""Activation checkpointing of the model's blocks. Owns: when a block is recomputed, and the inputs of the
recomputation.

Must not know: units and their weights, schedule, where saved tensors of a block are kept
(``runtime/activation_offload.py``).

[Note: A block's own forward] A block is checkpointed inside its call: its ``forward`` becomes an attribute of the
instance that runs the block's forward through ``torch.utils.checkpoint``. So the block's hooks stay outside. They see
one forward. They gather the weights before it and, once a gradient reaches the block's outputs, before its backward.
The recomputation happens while the unit is held, and calls no hook of the block.

[Note: The same bits again] A recomputation repeats the forward: torch restores the random state and autocast. In
addition, tensors in tuples, lists and dicts become arguments of the checkpoint, so that torch knows them and in-place
writes to them raise an error. A tensor that is passed twice stays one object. Containers that the block writes to are
new ones. The recomputation sees buffers as they were before the forward; afterwards they are as the forward left them
(running statistics count once). Weights that were written in between raise an error, as in autograd. State that a block
keeps in other Python objects is not restored.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardengine.errors import UsageError

Offloading = Callable[[], AbstractContextManager[None]]
"""Makes a context that moves tensors saved by autograd to host memory (``activation_offload``)."""


def check(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise ``UsageError`` if ``model`` has no ``blocks`` to checkpoint, or checkpoints them itself."""
    if not blocks:
        raise UsageError(
            "activation_checkpointing: expected a model with repeated blocks (zero_optimization.units names their "
            f"classes, otherwise those in an nn.ModuleList), got {type(model).__name__}, which has none; name the "
            "class of its blocks, or switch activation_checkpointing off",
            code="activation-checkpointing-without-blocks",
        )
    own = [name or "the model" for name, module in model.named_modules() if _checkpoints_itself(module)]
    if own:
        raise _twice(own[0])


def attach(blocks: Iterable[tuple[str, nn.Module]], offloading: Offloading = nullcontext) -> list[Checkpointed]:
    """Checkpoint the forwards of ``blocks`` that autograd records, until ``remove`` is called on each result."""
    _keep_out_of_graphs()
    return [Checkpointed(name, block, offloading) for name, block in blocks]


class Checkpointed:
    """The ``forward`` of one block ([Note: A block's own forward]). In a copy of the block it does not checkpoint."""

    def __init__(self, name: str, block: nn.Module, offloading: Offloading) -> None:
        self._name = name
        self._block = block
        self._offloading = offloading
        self._given = vars(block).get("forward")
        self.__wrapped__ = block.forward
        self._parameters = tuple(block.parameters())
        self._holders = [module._buffers for module in block.modules() if module._buffers]
        self._active = True
        vars(block)["forward"] = self

    def remove(self) -> None:
        """Restore the block's own forward. Graphs of earlier forwards can still run their backward."""
        self._active = False
        if vars(self._block).get("forward") is not self:
            return  # somebody has wrapped it since; that wrapper now calls the block's own forward
        if self._given is None:
            del vars(self._block)["forward"]
        else:
            vars(self._block)["forward"] = self._given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's forward; its intermediate results are recomputed in backward."""
        if not self._active or not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        if _checkpoints_itself(self._block):
            raise _twice(self._name)
        tensors: list[Tensor] = []
        template = _take_apart((args, kwargs), tensors, self._name)
        if not any(tensor.requires_grad for tensor in (*tensors, *self._parameters)):
            return self.__wrapped__(*args, **kwargs)
        versions = [parameter._version for parameter in self._parameters]
        buffers = _Buffers(self._holders)
        first = [(args, kwargs)]  # of the first run, and dropped in it

        def run(*saved: Tensor) -> Any:
            if first:
                own_args, own_kwargs = first.pop()
                output = self.__wrapped__(*own_args, **own_kwargs)
                if versions != [parameter._version for parameter in self._parameters]:
                    raise UsageError(
                        f"block {self._name!r} writes its weights in its forward, which backward would compute again, "
                        "and so write twice: write after the step, keep what is written in a buffer, or switch "
                        "activation_checkpointing off and checkpoint the other blocks with torch.utils.checkpoint",
                        code="activation-checkpointing-writes-weights",
                    )
                return output
            if versions != [parameter._version for parameter in self._parameters]:
                raise UsageError(
                    f"the weights of block {self._name!r} have been modified by an inplace operation since its "
                    "forward, which cannot be computed again: expected backward before the weights are stepped or "
                    "written; run the forward again",
                    code="activation-checkpointing-weights-changed",
                )
            own_args, own_kwargs = _put_together(template, saved)
            with buffers.as_before():
                return self.__wrapped__(*own_args, **own_kwargs)

        with self._offloading():
            output = checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=True)
        buffers.forget_unwritten()
        return output

    def __getstate__(self) -> dict[str, Any]:
        return {"block": self._block, "given": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy of the block, whose forward runs without checkpointing."""
        self._block, self._given, self._active = state["block"], state["given"], False
        self.__wrapped__ = self._given or types.MethodType(type(self._block).forward, self._block)


def _checkpoints_itself(module: nn.Module) -> bool:
    """Whether Hugging Face's ``gradient_checkpointing_enable`` has switched on this module's own checkpointing."""
    return vars(module).get("gradient_checkpointing") is True


def _twice(name: str) -> UsageError:
    return UsageError(
        f"{name!r} checkpoints its activations itself, and would do it twice with activation_checkpointing.enabled: "
        "expected one of them; call model.gradient_checkpointing_disable(), or leave it out of the config",
        code="activation-checkpointing-twice",
    )


@functools.cache
def _keep_out_of_graphs() -> None:
    """Keep dynamo out of checkpointed forwards.

    This is done once, and not at import, which would import all of dynamo (``runtime/hooks.py``, [Note: Compiled
    modules]).
    """
    reason = (
        "shardengine checkpoints the activations of this block, which cannot be part of a graph. Compile the block, "
        "not what is around it, by wrapping it before initialize: model.blocks[i] = torch.compile(model.blocks[i])"
    )
    call = torch.compiler.disable(Checkpointed.__call__, reason=reason)
    Checkpointed.__call__ = call  # type: ignore[method-assign]


# Arguments


@dataclass(frozen=True)
class _SavedPlace:
    """The place of the tensor with this number."""

    number: int


def _take_apart(value: Any, tensors: list[Tensor], name: str) -> Any:
    """Return ``value`` with a place instead of each tensor. New tensors are appended to ``tensors``."""
    if isinstance(value, Tensor):
        number = next((n for n, known in enumerate(tensors) if known is value), len(tensors))
        if number == len(tensors):
            tensors.append(value)
        return _SavedPlace(number)
    if type(value) in (tuple, list):
        return type(value)(_take_apart(item, tensors, name) for item in value)
    if type(value) is dict:
        return {key: _take_apart(item, tensors, name) for key, item in value.items()}
    if callable(getattr(value, "get_seq_length", None)):
        raise UsageError(
            f"block {name!r} was given a cache of keys and values ({type(value).__name__}), which the recomputation "
            "would fill a second time: expected none with activation_checkpointing.enabled; pass use_cache=False, or "
            "set model.config.use_cache = False",
            code="activation-checkpointing-with-cache",
        )
    return value


def _put_together(template: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the reverse of ``_take_apart``, in new containers."""
    if isinstance(template, _SavedPlace):
        return tensors[template.number]
    if type(template) in (tuple, list):
        return type(template)(_put_together(item, tensors) for item in template)
    if type(template) is dict:
        return {key: _put_together(item, tensors) for key, item in template.items()}
    return template


# Buffers


class _Buffers:
    """The buffers in ``holders`` before one forward ([Note: The same bits again])."""

    def __init__(self, holders: Sequence[dict[str, Tensor | None]]) -> None:
        self._holders = holders
        self._now = [(holder, key, buffer, _version_of(buffer)) for holder, key, buffer in self._present()]
        self._before = {(id(holder), key): buffer.detach().clone() for holder, key, buffer, _ in self._now}

    def _present(self) -> Iterator[tuple[dict[str, Tensor | None], str, Tensor]]:
        for holder in self._holders:
            for key, buffer in list(holder.items()):
                if buffer is not None:
                    yield holder, key, buffer

    def forget_unwritten(self) -> None:
        """Drop the copies of buffers that the forward has not written."""
        for holder, key, buffer, version in self._now:
            if holder.get(key) is buffer and _version_of(buffer) == version:
                del self._before[id(holder), key]
        self._now.clear()

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Inside, the block has copies of its buffers as they were before the forward."""
        found = list(self._present())
        for holder, key, buffer in found:
            holder[key] = self._before.get((id(holder), key), buffer).detach().clone()
        try:
            yield
        finally:
            for holder, key, buffer in found:
                holder[key] = buffer


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
