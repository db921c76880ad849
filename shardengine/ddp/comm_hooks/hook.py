"""What a communication hook is.

Must not know: buckets of the engine, groups, stages by name.

[Note: What a hook changes] Gradients of a bucket go to the ranks that own its slices (a reduce-scatter: on a hybrid
mesh inside of the shard group, then across). A hook says what travels: ``encode`` makes of a full-size fp32 tensor as
many equal messages as there are receivers, ``decode`` makes of a message the term that its receiver adds, in the
declared order (kernels: [Note: One arithmetic]). What a message holds of an element depends on its parameter and its
place in that alone, so the bits do not depend on buckets, ranks' slices or overlap. What is complete is divided,
rounded and, where more ranks step it, gathered as without a hook, in ``wire``.

[Note: Rounds] Some hooks bring every rank all of a bucket's sum, in rounds: ``rounds`` yields a flat tensor, goes on
when the ranks' sum has taken its place, and in the end has changed the gradient of this rank to the sum of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from shardengine.kernels import Compressed, compress, decompress


class HookPiece(NamedTuple):
    """A parameter's place in a bucket. parameter: its index · start, numel: its elements in the full-size gradient ·
    shape: in memory order · number: of its first element among all elements of the model's parameters."""

    parameter: int
    start: int
    numel: int
    shape: tuple[int, ...]
    number: int


Used = Sequence[tuple[int, int]]
"""Intervals of a bucket, in order."""


class CommHook:
    """Sends gradients as they are; the base of all others.

    name: in the config · wire: the dtype that complete gradients are rounded to; None: as without a hook · block: cuts
    between buckets and slices lie at multiples of so many elements · sends: whether anything is reduced at all ·
    whole_parameters: no bucket ends inside of a parameter · keeps_errors: whether there are any · errors: of each
    bucket, by number, what this rank's messages have not said yet (fp32, full size) · factors: of parameters, by index,
    what the next step goes on with, the same on all ranks.
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
        """Whether the present step's gradients are brought by ``rounds`` ([Note: Rounds])."""
        return False

    @property
    def makes_messages(self) -> bool:
        """Whether ``encode`` says what travels in the present step."""
        return True

    def allocate(self, bucket: int, length: int, parts: Sequence[HookPiece], ranks: int, device: torch.device) -> None:
        """There is a bucket with this number, of so many elements."""

    def begin_step(self, number: int) -> None:
        """So many updates were made before the window that begins."""

    def note_scale(self, scale: float) -> None:
        """Gradients are multiplied with ``scale`` from now on."""

    def rounds(self, bucket: int, full: Tensor, used: Used) -> Iterator[Tensor]:
        """See [Note: Rounds]; ``full`` is fp32, and what is yielded has a multiple of ranks · 16 elements. What has
        begun may never be ended: until then nothing is kept. used: as in ``before``."""
        raise NotImplementedError

    def start_again(self) -> None:
        """After a failure, on every rank: some may have ended a step that others have not."""

    def bytes_of(self, elements: int) -> int:
        """Bytes of the message for a slice of ``elements``."""
        raise NotImplementedError

    def bytes_of_bucket(self, bucket: int) -> int:
        """Bytes of what ``rounds`` yields of it."""
        raise NotImplementedError

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """``full`` (fp32, flat) as equal messages (uint8) for ``receivers``, one after the other, into ``out``."""
        raise NotImplementedError

    def decode(self, message: Tensor, out: Tensor) -> None:
        """The term that a message holds, into ``out`` (fp32)."""
        raise NotImplementedError

    def before(self, bucket: int, full: Tensor, used: Used) -> None:
        """Before ``full`` (fp32), all of the bucket with this number, is encoded. used: the intervals of parameters
        that have a gradient here: what was not said of the others waits, for nobody may take their sum."""

    def after(self, bucket: int, full: Tensor, messages: Tensor, used: Used) -> None:
        """``full`` was encoded as ``messages``; it is used no more."""


MANY = 8
"""Messages of a bucket from which on a launch for each of them takes longer than a copy of all."""


class CompressedHook(CommHook):
    """A message is what ``kernels.compress`` makes of a slice: values, then scales if there are any. ``name`` is its
    kind."""

    def compressed(self, message: Tensor, elements: int) -> Compressed:
        """A message for so many elements, as parts of its own memory."""
        raise NotImplementedError

    def encode(self, full: Tensor, receivers: int, out: Tensor) -> None:
        """Slice by slice, into the messages; of many, which are short, all at once and then into the messages."""
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
        """Rounded once to the dtype of ``out``."""
        decompress(self.compressed(message, out.numel()), out)


class HookMessages:
    """The messages of one reduction of a bucket. bucket: its number; None: of sums that others have begun, or of what
    is no part of a step's first reduction · used: as in ``CommHook.before``."""

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
        """Of the sums of the ranks of a shard group."""
        return HookMessages(self._hook, None)
