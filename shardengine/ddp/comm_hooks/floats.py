"""fp16 and bf16: half the bytes. What would overflow becomes the largest finite number; what is not finite stays so."""

from __future__ import annotations

import torch
from torch import Tensor

from shardengine.ddp.comm_hooks.hook import CommHook
from shardengine.kernels import compress

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class FloatHook(CommHook):
    """Gradients in ``name``'s dtype, complete ones, too."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wire = self._dtype = _DTYPES[name]

    def bytes_of(self, elements: int) -> int:
        """Two for each."""
        return 2 * elements

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """Element by element."""
        out.view(self._dtype).copy_(compress(full, self.name).values)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Exact."""
        out.copy_(message.view(self._dtype))
