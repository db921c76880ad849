"""The changes that an attached engine has made to the user's module. Owns: the record of them, to undo them.

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
    """A change to the module that can be removed."""

    def remove(self) -> None:
        """Remove it."""


@dataclass
class Attachments:
    """The engine's changes to the module while it is attached.

    reads: whether the engine itself has modules read a state dict, which then writes nothing into sharded weights.
    marked: the Hugging Face module whose ``generate()`` was set to stay in step on all ranks. caching: the Hugging Face
    configs whose ``use_cache`` was switched off. handles: of the hooks. whole: id(parameter) → its values, while
    somebody still holds them · passing: handles that last, like ``whole``, until the next call of the engine. barriers:
    the handles of hooks that reject any use of the module while weights are in host memory.
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
        """Inside, the engine has modules read a state dict."""
        self.reads = True
        try:
            yield
        finally:
            self.reads = False

    def mark(self, module: Any) -> None:
        """Mark ``module``, a Hugging Face one, as having sharded weights."""
        self.marked = module
        module._is_fsdp_managed_module = True

    def end_passing(self) -> None:
        """Drop ``whole`` and ``passing``, because the engine is called."""
        self.whole.clear()
        while self.passing:
            self.passing.pop().remove()

    def unhook(self) -> None:
        """Remove the hooks."""
        self.unbar()
        self.end_passing()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def unmark(self) -> None:
        """Remove the marks that weights are sharded, and switch caches of checkpointed models on again."""
        if self.marked is not None:
            self.marked._is_fsdp_managed_module = False
        for config in self.caching:
            config.use_cache = True
        self.caching.clear()

    def unbar(self) -> None:
        """Allow the use of the module again."""
        for barrier in self.barriers:
            barrier.remove()
        self.barriers.clear()
