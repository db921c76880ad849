"""What a communication hook is, and the table of those that the config names.

Must not know: buckets of the engine, groups, stages by name.

[Note: What a hook changes] Gradients of a bucket go to the ranks that own its slices (a reduce-scatter: on a hybrid
mesh inside of the shard group, then across). A hook says what travels: ``encode`` makes of a full-size fp32 tensor as
many equal messages as there are receivers, ``decode`` makes of a message the term that its receiver adds, in the
declared order (kernels: [Note: One arithmetic]). What a message holds of an element depends on its parameter and its
place in that alone, so the bits do not depend on buckets, ranks' slices or overlap. What is complete is divided,
rounded and, where more ranks step it, gathered as without a hook, in ``wire``.
"""

from __future__ import annotations

import torch
from torch import Tensor


class CommHook:
    """Sends gradients as they are; the base of all others.

    name: in the config · wire: the dtype that complete gradients are rounded to; None: as without a hook · block: cuts
    between buckets and slices lie at multiples of so many elements · sends: whether anything is reduced at all.
    """

    name = "none"
    wire: torch.dtype | None = None
    block = 1
    sends = True

    def bytes_of(self, elements: int) -> int:
        """Bytes of the message for a slice of ``elements``."""
        raise NotImplementedError

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """``full`` (fp32, flat) as equal messages (uint8) for ``receivers``, one after the other, into ``out``."""
        raise NotImplementedError

    def decode(self, message: Tensor, out: Tensor) -> None:
        """The term that a message holds, into ``out`` (fp32)."""
        raise NotImplementedError

    def before(self, bucket: int, full: Tensor) -> None:
        """Before ``full`` (fp32), all of the bucket with this number, is encoded."""

    def after(self, bucket: int, full: Tensor, messages: Tensor, receivers: int) -> None:
        """``full`` was encoded as ``messages``; it is used no more."""


class Messages:
    """The messages of one reduction of a bucket. bucket: its number; None: of sums that others have begun."""

    def __init__(self, hook: CommHook, bucket: int | None) -> None:
        self._hook, self._bucket = hook, bucket

    def bytes_of(self, elements: int) -> int:
        """See ``CommHook``."""
        return self._hook.bytes_of(elements)

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """See ``CommHook``."""
        if self._bucket is None:
            self._hook.encode(full, receivers, out)
            return
        self._hook.before(self._bucket, full)
        self._hook.encode(full, receivers, out)
        self._hook.after(self._bucket, full, out, receivers)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """See ``CommHook``."""
        self._hook.decode(message, out)

    @property
    def again(self) -> Messages:
        """Of the sums of the ranks of a shard group."""
        return Messages(self._hook, None)
