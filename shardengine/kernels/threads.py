"""How many threads the native kernels take. Owns: that number. Must not know: why it is what it is."""

from __future__ import annotations

import torch

_said: int | None = None


def use_threads(count: int | None) -> None:
    """From now on the native kernels of this process take ``count`` threads; None: as many as torch. The bits stay."""
    global _said
    _said = count


def threads() -> int:
    """Threads of one native kernel."""
    return _said or torch.get_num_threads()
