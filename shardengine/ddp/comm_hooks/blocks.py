"""int8 and int4 in blocks of 256 elements with a scale each (kernels, compression: [Note: Blocks of integers]).

A block begins at a multiple of 256 elements of its parameter, of which alone it holds elements. Source: ZeRO++, arXiv
2306.10209, section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardengine.ddp.comm_hooks.hook import CommHook
from shardengine.kernels import Compressed, compress, decompress

BLOCK = 256
_SCALE = 4
"""Bytes of a scale."""


class BlockHook(CommHook):
    """Gradients in 8 or 4 bits, and 4 bytes per block; complete ones are as without a hook."""

    block = BLOCK

    def __init__(self, name: str) -> None:
        self.name = name
        self._per_byte = {"int8": 1, "int4": 2}[name]

    def bytes_of(self, elements: int) -> int:
        """Integers, then scales."""
        return elements // self._per_byte + elements // BLOCK * _SCALE

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """Each message has its integers, then its scales."""
        coded = compress(full, self.name, block=BLOCK)
        if coded.scales is None:
            raise TypeError(f"{self.name} has no scales")
        integers = full.numel() // receivers // self._per_byte
        rows = out.view(receivers, -1)
        rows[:, :integers].copy_(coded.values.view(torch.uint8).view(receivers, -1))
        rows[:, integers:].copy_(coded.scales.view(torch.uint8).view(receivers, -1))

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Integers times scales, each rounded once."""
        integers = out.numel() // self._per_byte
        values = message[:integers] if self._per_byte == 2 else message[:integers].view(torch.int8)
        scales = message[integers:].clone().view(torch.float32)
        decompress(Compressed(self.name, out.numel(), BLOCK, values, scales), out)
