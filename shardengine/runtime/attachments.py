"""What an engine has changed on the user's module while it is attached. Owns: the record of it, to take it back.

Must not know: why something was changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Handle(Protocol):
    """Something that was put on the module."""

    def remove(self) -> None:
        """Take it off."""


@dataclass
class Attachments:
    """What the engine changes on the module while it is attached.

    reads: whether the engine itself has modules read a state dict, which then writes nothing into sharded weights.
    marked: the Hugging Face module that was told to keep ``generate()`` in step on all ranks.
    caching: the Hugging Face configs whose ``use_cache`` was switched off.
    handles: of the hooks.
    whole: id(parameter) → its values, which somebody has been given and still has · passing: the handles of what holds,
    as ``whole`` does, until the engine is called the next time.
    barriers: the handles of hooks that refuse the use of the module while weights are in host memory.
    """

    reads: bool = False
    marked: Any = None
    caching: list[Any] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    whole: WeakValueDictionary[int, Tensor] = field(default_factory=WeakValueDictionary)
    passing: list[Handle] = field(default_factory=list)
    barriers: list[RemovableHandle] = field(default_factory=list)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The engine has modules read a state dict inside."""
        self.reads = True
        try:
            yield
        finally:
            self.reads = False

    def mark(self, module: Any) -> None:
        """Tell ``module``, a Hugging Face one, that its weights are sharded."""
        self.marked = module
        module._is_fsdp_managed_module = True

    def end_passing(self) -> None:
        """The engine is called."""
        self.whole.clear()
        while self.passing:
            self.passing.pop().remove()

    def unhook(self) -> None:
        """Take the hooks off."""
        self.unbar()
        self.end_passing()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def unmark(self) -> None:
        """The module is told no longer that its weights are sharded, or its blocks checkpointed."""
        if self.marked is not None:
            self.marked._is_fsdp_managed_module = False
        for config in self.caching:
            config.use_cache = True
        self.caching.clear()

    def unbar(self) -> None:
        """The module may be used again."""
        for barrier in self.barriers:
            barrier.remove()
        self.barriers.clear()
