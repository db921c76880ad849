"""Host memory for data on its way to or from a disk. Must not know: files, who uses it.

[Note: Huge pages] A disk transfers memory page by page, and moves scattered pages of 4 KiB more slowly than contiguous
memory (``benchmarks/checkpoint.py`` measures both). So the memory is requested in huge pages, which the system provides
if it has them. It is private, and a child of ``fork`` does not get it: a fork while O_DIRECT reads or writes private
memory would take pages away from the transfer.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
"""Bytes; ``staging`` allocates a multiple of it."""


class _Area(mmap.mmap):
    """Private memory. ``unlock`` is called before the memory goes back to the system."""

    unlock: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def staging(count: int, lock: Callable[[int, int], Callable[[], None] | None] | None = None) -> Tensor:
    """Return zeros, uint8 [count], that begin at a page, in huge pages if the system has them.

    Raises OSError if no memory is left. lock: called with the address and the bytes, returns the function that undoes
    it, if any.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    area = _Area(-1, -(-count // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):  # a kernel, or a system, that has no such thing
            area.madvise(getattr(mmap, advice))
    memory = torch.frombuffer(area, dtype=torch.uint8)
    if lock is not None:
        area.unlock = lock(memory.data_ptr(), memory.numel())
    return memory[:count]
