"""The number of threads of the native kernels. Owns: that number. Must not know: why it was chosen."""

from __future__ import annotations

import torch

_said: int | None = None


def use_threads(count: int | None) -> None:
    """Set the threads of this process's native kernels; None: as many as torch uses. The results have the same bits."""
    global _said
    _said = count


def threads() -> int:
    """Return the number of threads of one native kernel."""
    return _said or torch.get_num_threads()
