"""fp16 and bf16: half the bytes. What would overflow becomes the largest finite number; what is not finite stays so."""

from __future__ import annotations

import torch
from torch import Tensor

from shardengine.ddp.comm_hooks.hook import CompressedHook
from shardengine.kernels import Compressed

_BLOCK = 2
"""Floats have none; the smallest that there is."""
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class FloatHook(CompressedHook):
    """Gradients in ``name``'s dtype, complete ones, too."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wire = self._dtype = _DTYPES[name]

    def bytes_of(self, elements: int) -> int:
        """Two for each."""
        return 2 * elements

    def compressed(self, message: Tensor, elements: int) -> Compressed:
        """Element by element."""
        return Compressed(self.name, elements, _BLOCK, message.view(self._dtype))

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """All at once: messages lie together as elements do."""
        super().encode(full, 1, out)
