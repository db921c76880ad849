"""What an engine has changed on the user's module while it is attached. Owns: the record of it, to take it back.

Must not know: why something was changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.utils.hooks import RemovableHandle


class Handle(Protocol):
    """Something that was put on the module."""

    def remove(self) -> None:
        """Take it off."""


@dataclass
class Attachments:
    """What the engine changes on the module while it is attached.

    open: whether ``module.state_dict()`` may be called; only from inside the engine where weights are sharded.
    marked: the Hugging Face module that was told to keep ``generate()`` in step on all ranks.
    caching: the Hugging Face configs whose ``use_cache`` was switched off.
    versions: of the parameters, as the engine left them: torch counts every in-place write · compared: whether weights
    were compared with their masters once · handles: of the hooks.
    barriers: the handles of hooks that refuse the use of the module while weights are in host memory.
    """

    open: bool = False
    marked: Any = None
    caching: list[Any] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    compared: bool = False
    handles: list[Handle] = field(default_factory=list)
    barriers: list[RemovableHandle] = field(default_factory=list)

    @contextmanager
    def state_dict_allowed(self) -> Iterator[None]:
        """``module.state_dict()`` may be called inside."""
        self.open = True
        try:
            yield
        finally:
            self.open = False

    def note_compared(self) -> None:
        """All weights were compared with their masters."""
        self.compared = True

    def mark(self, module: Any) -> None:
        """Tell ``module``, a Hugging Face one, that its weights are sharded."""
        self.marked = module
        module._is_fsdp_managed_module = True

    def unhook(self) -> None:
        """Take the hooks off."""
        self.unbar()
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
