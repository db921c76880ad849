"""int8 and int4 in blocks of 256 elements with a scale each (kernels, compression: [Note: Blocks of integers]).

A block begins at a multiple of 256 elements of its parameter, and holds elements of that parameter only. Source:
ZeRO++, arXiv 2306.10209, section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardengine.ddp.comm_hooks.hook import CompressedHook
from shardengine.kernels import Compressed

BLOCK = 256
_SCALE = 4
"""Bytes of a scale."""


class BlockHook(CompressedHook):
    """Gradients in 8 or 4 bits, and 4 bytes per block; complete gradients are as without a hook."""

    block = BLOCK

    def __init__(self, name: str) -> None:
        self.name = name
        self._per_byte = {"int8": 1, "int4": 2}[name]

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of the integers and of the scales."""
        return elements // self._per_byte + elements // BLOCK * _SCALE

    def compressed(self, message: Tensor, elements: int) -> Compressed:
        """Integers, then scales, which are aligned to four bytes if the message is."""
        integers = elements // self._per_byte
        values = message[:integers] if self._per_byte == 2 else message[:integers].view(torch.int8)
        return Compressed(self.name, elements, BLOCK, values, message[integers:].view(torch.float32))
