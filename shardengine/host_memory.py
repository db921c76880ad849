"""Host memory for data on its way to or from a disk. Must not know: files, who uses it.

[Note: Huge pages] A disk is handed memory page by page, and memory that lies scattered in pages of 4 KiB can halve its
speed (``benchmarks/checkpoint.py`` measures both). So the memory is asked for in huge pages, which the system gives
where it has them.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20


def staging(count: int) -> Tensor:
    """New zeros, uint8 [count], that begin at a page, in huge pages where the system gives them."""
    if count == 0:
        return torch.empty(0, dtype=torch.uint8)
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    area = mmap.mmap(-1, -(-count // HUGE_PAGE) * HUGE_PAGE, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)[:count]
