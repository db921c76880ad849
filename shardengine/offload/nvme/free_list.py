"""Which bytes of a file are free. Owns: intervals. Must not know: files, what lies in the others."""

from __future__ import annotations


class FreeList:
    """Free bytes, as intervals that touch no other."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    @property
    def count(self) -> int:
        """Free bytes."""
        return sum(end - start for start, end in self._ends.items())

    def give(self, start: int, count: int) -> None:
        """``count`` bytes from ``start`` on are free. They were not."""
        end = start + count
        if not count:
            return
        before = next((first for first, last in self._ends.items() if last == start), start)
        self._ends[before] = self._ends.pop(end, end)

    def take(self, count: int) -> int | None:
        """Where ``count`` bytes begin that were free: in the smallest interval that holds them. None: nowhere."""
        fitting = [(end - start, start) for start, end in self._ends.items() if end - start >= count]
        if not fitting or not count:
            return None
        size, start = min(fitting)
        del self._ends[start]
        self.give(start + count, size - count)
        return start
