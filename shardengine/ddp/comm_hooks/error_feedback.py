"""The error of a message is added to the next one: the total of a rank's messages follows the total of its gradients.

Source: 1-bit SGD (Seide et al., 2014); Karimireddy et al., arXiv 1901.09847.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardengine.ddp.comm_hooks.hook import MANY, CommHook, CompressedHook, HookPiece, Used
from shardengine.kernels import residual


class ErrorFeedback(CommHook):
    """``inner``, with the error of each bucket's messages kept: 4 bytes per element of the full size, on each rank.

    An error that is not finite is dropped: the step that it comes from is skipped.
    """

    keeps_errors = True

    def __init__(self, inner: CompressedHook) -> None:
        self._inner = inner
        self.name = f"{inner.name} with error feedback"
        self.wire, self.block, self.sends = inner.wire, inner.block, inner.sends
        self.errors: dict[int, Tensor] = {}
        self._scale = 1.0

    def allocate(self, bucket: int, length: int, parts: Sequence[HookPiece], ranks: int, device: torch.device) -> None:
        """Begin without an error for the bucket."""
        self.errors[bucket] = torch.zeros(length, dtype=torch.float32, device=device)

    def bytes_of(self, elements: int) -> int:
        """Those of ``inner``."""
        return self._inner.bytes_of(elements)

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """As ``inner``."""
        self._inner.encode(full, receivers, out)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """As ``inner``."""
        self._inner.decode(message, out)

    def note_scale(self, scale: float) -> None:
        """From now on gradients are multiplied with ``scale``.

        Errors are kept without it, so they are valid at any scale.
        """
        self._scale = scale

    def before(self, bucket: int, full: Tensor, used: Used) -> None:
        """Add the error of the bucket's last message."""
        for start, end in used:
            full[start:end].add_(self.errors[bucket][start:end], alpha=self._scale)

    def after(self, bucket: int, full: Tensor, messages: Tensor, used: Used) -> None:
        """Keep the error of this message."""
        error = self.errors[bucket]
        waiting = [(start, end, error[start:end].clone()) for start, end in between(used, len(error))]
        count = len(messages)
        for said, part, message in zip(full.chunk(count), error.chunk(count), messages, strict=True):
            if count <= MANY:
                residual(said, self._inner.compressed(message, part.numel()), part, divisor=self._scale)
            else:
                self._inner.decode(message, part)
        if count > MANY:  # all at once, like their encoding
            torch.sub(full, error, out=error)
            keep(error, self._scale)
        for start, end, values in waiting:
            error[start:end] = values


def keep(error: Tensor, scale: float) -> None:
    """Divide ``error`` by the ``scale`` that its gradients have, and set values that are not finite to 0."""
    error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    if scale != 1:
        error.div_(torch.full((), scale, device=error.device))  # CUDA would multiply with a host scalar's reciprocal


def between(used: Used, end: int) -> Used:
    """Return the parts of [0, end) that are in none of the intervals."""
    edges = [0, *(edge for interval in used for edge in interval), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
