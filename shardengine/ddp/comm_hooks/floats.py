"""fp16 and bf16: half the bytes. A finite overflow becomes the largest finite number; infinities and NaN stay."""

from __future__ import annotations

import torch
from torch import Tensor

from shardengine.ddp.comm_hooks.hook import CompressedHook
from shardengine.kernels import Compressed

_BLOCK = 2
"""Floats have no blocks; this is the smallest size that exists."""
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class FloatHook(CompressedHook):
    """Gradients in ``name``'s dtype, including complete ones."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wire = self._dtype = _DTYPES[name]

    def bytes_of(self, elements: int) -> int:
        """Return two bytes per element."""
        return 2 * elements

    def compressed(self, message: Tensor, elements: int) -> Compressed:
        """Element by element."""
        return Compressed(self.name, elements, _BLOCK, message.view(self._dtype))

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """Encode all at once: messages follow each other as elements do."""
        super().encode(full, 1, out)
