"""Weights that the user's code has written since the ranks agreed last, and whether all ranks have written the same.

Must not know: where weights are kept, who finds the writes.

[Note: The same writes] Each rank keeps its own writes: of sharded weights only its own slice. So ranks must write the
same, or their weights drift, and at stage 3 one parameter is assembled from different ones. A digest of each write is
kept, by name. It is part of the data that ranks compare in the step's message anyway: nothing more is sent if nothing
was written, or if all have written the same.

Some ranks may not have written a parameter, such as an expert that they did not run. Then ranks compare the weights
that they keep: a clamp that changes nothing is no difference. The digest of a tensor is the sum of those of its slices.

Writes that nothing announces (``parameter.data.mul_(…)``) are found by comparing the weights that a rank keeps, so only
that rank finds them. It reports them to the others in the same way, and from then on every rank treats the parameter as
written. The comparison reads all weights, and on a GPU the host waits. So it runs in accumulation windows 1, 2, 4, 8
and so on, and in every 1,024th.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardengine.errors import MismatchError

_log = logging.getLogger(__name__)
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x5851F42D4C957F2D
"""Spreads the number of a place over 64 bits."""
_AT_ONCE = 1 << 20
"""The most elements that a digest has 64-bit copies of at the same time."""
_AT_LEAST_EVERY = 1024
"""Accumulation windows after which everything is compared again."""
Kept = list[tuple[int, int, int]]
"""Of one parameter, for each part that a rank keeps: its first element, its end and its digest."""


class Writes:
    """The writes of one rank.

    watched: names of parameters that are written in ways that nothing announces, the same on all ranks · found: more
    such names, which only this rank knows so far · windows: the number of accumulation windows that have begun.
    """

    def __init__(self) -> None:
        self.watched: set[str] = set()
        self.found: set[str] = set()
        self.windows = 1
        self._looks = True
        self._digests: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}
        self._kept: Callable[[str], Kept] = lambda name: []

    def ask(self, kept: Callable[[str], Kept]) -> None:
        """From now on ``kept`` returns the parts that this rank keeps of a parameter, by its name."""
        self._kept = kept

    @property
    def compares(self) -> bool:
        """Whether everything is compared in this accumulation window."""
        rare = self.windows & (self.windows - 1) == 0 or self.windows % _AT_LEAST_EVERY == 0
        return rare and self._looks

    def compare_nothing(self) -> None:
        """Compare in no window. For a dry run, which has no values and studies a typical window."""
        self._looks = False

    def note(self, name: str, values: Tensor) -> None:
        """Note a write of the parameter, which now has ``values``."""
        self._digests[name] = self._last[name] = digest(values)

    def note_found(self, names: Iterable[str]) -> None:
        """Note parameters that were written in ways that nothing announces."""
        new = set(names) - self.watched - self.found
        self.found |= new
        if new and self.windows > 2:
            _log.warning(_FOUND_LATE, self.windows, ", ".join(sorted(new)[:4]), len(new))

    def knows(self, name: str, values: Tensor) -> bool:
        """Return whether the last noted write had these ``values``; the host waits for the device."""
        return name in self._last and torch.equal(self._last[name], digest(values))

    @property
    def text(self) -> str:
        """The text that must be the same on every rank."""
        return repr((self._told(), sorted(self.found))) if self._digests or self.found else ""

    def _told(self) -> dict[str, list[int]]:
        names = sorted(self._digests)
        rows = torch.stack([self._digests[name] for name in names]).tolist() if names else []
        return dict(zip(names, rows, strict=True))

    def forget(self, names: Iterable[str]) -> None:
        """Drop writes of these parameters: all ranks have rank 0's values now."""
        for name in names:
            self._digests.pop(name, None)

    def end_window(self) -> None:
        """Begin the next accumulation window."""
        self.windows += 1

    def agreed(self) -> None:
        """Note that all ranks have written the same."""
        self._digests.clear()
        self.watched |= self.found
        self.found.clear()

    def settle(self, rank: int, exchange: Callable[[Any, str], list[Any]]) -> None:
        """Exchange the writes after texts differed; ``MismatchError`` names a parameter that ranks wrote differently.

        Collective. Afterwards every rank knows the found parameters of all.
        """
        rows = exchange([self._told(), sorted(self.found)], "which weights were written")
        for _, found in rows:
            self.found |= set(found)
        self.agreed()
        uneven: dict[str, list[list[int] | None]] = {}
        for name in sorted({name for told, _ in rows for name in told}):
            digests = [told.get(name) for told, _ in rows]
            written = [each for each in digests if each is not None]
            if any(each != written[0] for each in written):
                raise MismatchError(_told_of(name, rank, digests), code="weights-written-differently-between-ranks")
            if len(written) < len(digests):
                uneven[name] = digests
        kept = exchange([self._kept(name) for name in uneven], "what is kept of written weights") if uneven else []
        for (name, digests), parts in zip(uneven.items(), zip(*kept, strict=True), strict=True):
            if [_joined(parts)] not in digests:
                raise MismatchError(_told_of(name, rank, digests), code="weights-written-differently-between-ranks")


def _joined(parts: Sequence[Kept]) -> int | None:
    """Return the digest of the whole tensor that ranks keep ``parts`` of.

    None if two ranks keep different values of one part.
    """
    found: dict[tuple[int, int], int] = {}
    for part in parts:
        for first, end, number in part:
            if found.setdefault((first, end), number) != number:
                return None
    return (sum(found.values()) + 2**63) % 2**64 - 2**63


def digest(values: Tensor, first: int = 0) -> Tensor:
    """Return a number from the bits of ``values``, int64 [1], on their device.

    It is their sum, each times an odd number that depends on its place in memory, modulo 2^64. So the same values in
    another order have another digest, and every change of a single value changes it. first: the place of the first
    value, in a part of a tensor.
    """
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    flat = values.detach().permute(order).reshape(-1).contiguous()
    size = flat.element_size()
    flat = flat.view(_OF_SIZE.get(size, torch.int64))
    before = first * max(1, size // 8)
    total = torch.zeros(1, dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), _AT_ONCE):
        bits = flat[start : start + _AT_ONCE]
        places = torch.arange(before + start, before + start + len(bits), device=bits.device)
        total += (places.mul_(_ODD).bitwise_or_(1) * bits).sum()
    return total


_FOUND_LATE = (
    "step %d since initialize: %s (%d in all) were written through parameter.data, which torch does not count. They "
    "are kept from now on. Weights are looked at in steps 1, 2, 4, 8 and so on, so what was written like this since "
    "the last of them may be lost: write under torch.no_grad(), without .data"
)


def _told_of(name: str, rank: int, digests: list[list[int] | None]) -> str:
    wrote = [number for number, each in enumerate(digests) if each is not None]
    if len(wrote) < len(digests):
        how = f"ranks {wrote} of {len(digests)} have written it, the others have not, and have other values"
    else:
        how = f"ranks {[n for n in wrote if digests[n] != digests[0]]} have written other values than rank 0"
    return (
        f"parameter {name!r} was written by the model or the loop, not the same on every rank (this is rank {rank}): "
        f"{how}, so weights would drift apart. Expected the same write on every rank: average what it is computed from "
        "over the ranks first (torch.distributed.all_reduce), or keep it in a buffer; what only some ranks run (an "
        "expert) is written between two passes, on every rank. The weights of the ranks differ already: write them "
        "anew on every rank, or load a checkpoint"
    )
