"""The interface of a communication hook.

Must not know: buckets of the engine, groups, stages by name.

[Note: Changes by a hook] Gradients of a bucket go to the ranks that own its slices (a reduce-scatter: on a hybrid
mesh inside the shard group, then across). A hook determines the messages. ``encode`` makes as many equal messages from
a full-size fp32 tensor as there are receivers. ``decode`` makes from a message the term that its receiver adds, in the
declared order (kernels: [Note: One arithmetic]). The encoding of an element depends only on its parameter and its place
in it, so the bits do not depend on buckets, ranks' slices or overlap. Complete gradients are divided, rounded and, if
more ranks step them, gathered as without a hook, in ``wire``.

[Note: Rounds] Some hooks bring all of a bucket's sum to every rank, in rounds. ``rounds`` yields a flat tensor and
continues when the ranks' sum has replaced its values. At its end it has changed the gradient of this rank to the sum of
all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from shardengine.kernels import Compressed, compress, decompress


class HookPiece(NamedTuple):
    """A parameter's place in a bucket.

    parameter: its index · start, numel: its elements in the full-size gradient · shape: in memory order · number: of
    its first element among all elements of the model's parameters.
    """

    parameter: int
    start: int
    numel: int
    shape: tuple[int, ...]
    number: int


Used = Sequence[tuple[int, int]]
"""Intervals of a bucket, in order."""


class CommHook:
    """Sends gradients unchanged; the base of all others.

    name: in the config · wire: the dtype that complete gradients are rounded to; None: as without a hook · block: cuts
    between buckets and slices are at multiples of so many elements · sends: whether anything is reduced ·
    whole_parameters: no bucket ends inside of a parameter · keeps_errors: whether it has errors · errors: of each
    bucket, by number: the difference between this rank's gradients and its messages so far (fp32, full size) · factors:
    of parameters, by index, for the next step; the same on all ranks.
    """

    name = "none"
    wire: torch.dtype | None = None
    block = 1
    sends = True
    whole_parameters = False
    keeps_errors = False
    errors: Mapping[int, Tensor] = MappingProxyType({})
    factors: Mapping[int, Tensor] = MappingProxyType({})

    @property
    def in_rounds(self) -> bool:
        """Whether ``rounds`` brings the gradients of the current step ([Note: Rounds])."""
        return False

    @property
    def makes_messages(self) -> bool:
        """Whether ``encode`` makes the messages of the current step."""
        return True

    def allocate(self, bucket: int, length: int, parts: Sequence[HookPiece], ranks: int, device: torch.device) -> None:
        """Allocate memory for the bucket with this number, which has ``length`` elements."""

    def begin_step(self, number: int) -> None:
        """Note the number of updates that were made before the accumulation window that begins."""

    def note_scale(self, scale: float) -> None:
        """From now on gradients are multiplied with ``scale``."""

    def rounds(self, bucket: int, full: Tensor, used: Used) -> Iterator[Tensor]:
        """See [Note: Rounds]; ``full`` is fp32, and a yielded tensor has a multiple of ranks · 16 elements.

        The iteration may never be finished: until its end nothing is kept. used: as in ``before``.
        """
        raise NotImplementedError

    def start_again(self) -> None:
        """Restart after a failure, on every rank: some may have ended a step that others have not."""

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of the message for a slice of ``elements``."""
        raise NotImplementedError

    def bytes_of_bucket(self, bucket: int) -> int:
        """Return the bytes of the tensors that ``rounds`` yields for the bucket."""
        raise NotImplementedError

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """Write ``full`` (fp32, flat) to ``out`` as equal messages (uint8) for ``receivers``, one after the other."""
        raise NotImplementedError

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Write the term that a message holds to ``out`` (fp32)."""
        raise NotImplementedError

    def before(self, bucket: int, full: Tensor, used: Used) -> None:
        """Called before ``full`` (fp32), all of the bucket with this number, is encoded.

        used: the intervals of parameters that have a gradient here. The errors of other parameters wait, because their
        sum may not be used by anybody.
        """

    def after(self, bucket: int, full: Tensor, messages: Tensor, used: Used) -> None:
        """Called after ``full`` was encoded as ``messages``; ``full`` is not used any more."""


MANY = 8
"""For more messages of a bucket than this, a launch for each of them takes longer than a copy of all."""


class CompressedHook(CommHook):
    """Messages are slices compressed by ``kernels.compress``: values, then scales if there are any.

    ``name`` is the kind.
    """

    def compressed(self, message: Tensor, elements: int) -> Compressed:
        """Return a message for so many elements, as parts of its own memory."""
        raise NotImplementedError

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """Encode slice by slice into the messages; many messages, which are short, at once and then copied."""
        if receivers > MANY:
            rows = out.view(receivers, -1)
            whole = compress(full, self.name, block=self.compressed(rows[0], full.numel() // receivers).block)
            values = whole.values.view(torch.uint8).view(receivers, -1)
            rows[:, : values.shape[1]].copy_(values)
            if whole.scales is not None:
                rows[:, values.shape[1] :].copy_(whole.scales.view(torch.uint8).view(receivers, -1))
            return
        for part, message in zip(full.chunk(receivers), out.chunk(receivers), strict=True):
            into = self.compressed(message, part.numel())
            compress(part, self.name, block=into.block, out=into)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Decode, rounded once to the dtype of ``out``."""
        decompress(self.compressed(message, out.numel()), out)


class HookMessages:
    """The messages of one reduction of a bucket.

    bucket: its number; None: for sums of messages, or tensors that are not part of a step's first reduction · used: as
    in ``CommHook.before``.
    """

    def __init__(self, hook: CommHook, bucket: int | None, used: Used = ()) -> None:
        self._hook, self._bucket, self._used = hook, bucket, used

    def bytes_of(self, elements: int) -> int:
        """See ``CommHook``."""
        return self._hook.bytes_of(elements)

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """See ``CommHook``."""
        if self._bucket is None:
            self._hook.encode(full, receivers, out)
            return
        self._hook.before(self._bucket, full, self._used)
        self._hook.encode(full, receivers, out)
        self._hook.after(self._bucket, full, out.view(receivers, -1), self._used)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """See ``CommHook``."""
        self._hook.decode(message, out)

    @property
    def again(self) -> HookMessages:
        """The messages for the sums of a shard group's ranks."""
        return HookMessages(self._hook, None)
