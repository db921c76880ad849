"""Ranks with unequal numbers of batches: the byte that each adds to the step's message, and how the others use it.

Owns: that byte, which ranks have run dry, the divisor of gradients then. Must not know: how a rank without data takes
part.

[Note: Uneven inputs] Inside ``engine.join()`` a rank whose body has ended takes part in the accumulation windows of the
others with zeros. The others learn this from the message that agrees on a window's gradients. In it each rank has a
byte: if it has no more data, the number of micro-batches that it had in that window. So all ranks know the same, and
act on it in the same window. A window after which every rank has run dry is the last one; it is dropped if no rank had
a micro-batch in it. A rank whose data ends exactly with a window does not know this yet. So one window without data
follows the last one with data, unless all ranks run dry in the middle of a window.

The byte is in every step's message, even if no join is open: a rank that alone has called ``engine.join`` would
otherwise send a longer message than the others, and the mismatch could not be reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardengine.errors import EarlyTerminationError, MismatchError

_NONE, _HAS_DATA, _MOST = 63, 62, 61
_BY_ACTIVE, _THROWS = 128, 64
"""The byte. Its lower six bits are a rank's micro-batches of this accumulation window, at most ``_MOST``, if the rank
has run dry; otherwise ``_HAS_DATA``, or ``_NONE`` if no join is open. The upper two bits are the options."""


@dataclass(frozen=True)
class Attendance:
    """The reports of all ranks about an accumulation window.

    own: each rank's micro-batches in it, None if the rank still has data.
    """

    own: tuple[int | None, ...]

    @property
    def dry(self) -> list[int]:
        """The ranks that have no more data."""
        return [rank for rank, count in enumerate(self.own) if count is not None]

    @property
    def active(self) -> list[int]:
        """The ranks that had a micro-batch."""
        return [rank for rank, count in enumerate(self.own) if count != 0]

    @property
    def is_over(self) -> bool:
        """Whether every rank has run dry."""
        return len(self.dry) == len(self.own)

    def micro_batches_of(self, rank: int, whole: int) -> int:
        """Return the micro-batches of ``rank``. whole: those of a rank that has data."""
        count = self.own[rank]
        return whole if count is None else count

    def micro_batches(self, whole: int) -> int:
        """Return the micro-batches of all ranks together. whole: as in ``micro_batches_of``."""
        return sum(self.micro_batches_of(rank, whole) for rank in range(len(self.own)))


class Join:
    """The state of ``engine.join`` on this rank, and the other ranks' reports.

    is_open: a join is open · serves: and this rank has run dry · source: the rank whose buffers all ranks use: the
    first that had a micro-batch in the last accumulation window · heard: the reports of the running window, None: none
    yet · gone: the ranks that are known to have run dry.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self._rank = rank
        self._ranks = ranks
        self.is_open = False
        self.serves = False
        self.source = 0
        self._by_active = self._throws = False
        self._own: int | None = None
        self.heard: Attendance | None = None
        self.gone: list[int] = []

    def open(self, *, by_active: bool, throws: bool) -> None:
        """Begin ``engine.join``.

        by_active: the mean is over ranks with a micro-batch · throws: raise if one runs dry.
        """
        self.is_open, self._by_active, self._throws = True, by_active, throws

    def run_dry(self, own: int) -> None:
        """This rank has no more data; it had ``own`` micro-batches of the running accumulation window."""
        self._own, self.serves = own, True

    def close(self) -> None:
        """End ``engine.join``, in whichever way."""
        self.is_open = self.serves = self._by_active = self._throws = False
        self._own, self.heard, self.source, self.gone = None, None, 0, []

    def end_window(self) -> None:
        """The accumulation window was stepped or dropped: the reports about it are no longer valid."""
        if self.heard is not None and self.heard.active:
            self.source = self.heard.active[0]
        self.heard = None
        self._own = None if self._own is None else 0

    @property
    def is_idle(self) -> bool:
        """Whether this rank has no micro-batch in the running accumulation window."""
        return self._own == 0

    @property
    def share(self) -> float:
        """The ratio of the window's gradient to the right mean.

        If the mean is over ranks with a micro-batch, it is the share of these ranks; else 1.
        """
        if not self._by_active or self.heard is None or not self.heard.active:
            return 1.0
        return len(self.heard.active) / self._ranks

    @property
    def byte(self) -> int:
        """The byte of this rank."""
        if not self.is_open:
            return _NONE
        own = _HAS_DATA if self._own is None else min(self._own, _MOST)
        return own | _BY_ACTIVE * self._by_active | _THROWS * self._throws

    def hear(self, said: Sequence[int]) -> None:
        """Read every rank's byte.

        ``MismatchError`` if ranks differ in whether a join is open, or in its options; ``EarlyTerminationError`` if
        that was requested and a rank has run dry before others. Both are raised on every rank.
        """
        if not self.is_open and set(said) == {_NONE}:  # of thousands of ranks, in every step
            return
        options = [None if each & 63 == _NONE else each & ~63 for each in said]
        if any(option != options[0] for option in options):
            raise MismatchError(_differ(options), code="join-differs-between-ranks")
        if not self.is_open:
            return
        counts = tuple(None if each & 63 == _HAS_DATA else each & 63 for each in said)
        self.heard = Attendance(counts)
        self.gone = self.heard.dry
        if self._throws and self.heard.dry and len(set(counts)) > 1:
            raise EarlyTerminationError(_early(counts), code="join-ended-early")


def _differ(options: Sequence[int | None]) -> str:
    without = [rank for rank, option in enumerate(options) if option is None]
    if without:
        inside = [rank for rank, option in enumerate(options) if option is not None]
        return (
            f"engine.join() is open on ranks {inside} and not on ranks {without}: expected `with engine.join():` with "
            "the same enable= around the loop of every rank; then engine.zero_grad() on every rank"
        )
    shown = [
        f"rank {rank}: divide_by_initial_world_size={not option & _BY_ACTIVE}, throw_on_early_termination="
        f"{bool(option & _THROWS)}"
        for rank, option in enumerate(options)
        if option is not None
    ]
    return f"engine.join(): expected the same arguments on every rank, got {'; '.join(shown)}"


def _early(counts: Sequence[int | None]) -> str:
    most = max((count for count in counts if count is not None), default=0)
    fewer = {rank: count for rank, count in enumerate(counts) if count is not None and (None in counts or count < most)}
    had = ", ".join(f"rank {rank} had {count}" for rank, count in fewer.items())
    others = [rank for rank in range(len(counts)) if rank not in fewer]
    return (
        f"engine.join(throw_on_early_termination=True): ranks {list(fewer)} have run out of data before ranks {others} "
        f"(micro-batches of this step: {had}); the step is dropped on every rank. Expected the same number of batches "
        "on every rank, or throw_on_early_termination=False, with which the others go on"
    )
