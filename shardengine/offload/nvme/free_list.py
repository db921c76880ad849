"""The free bytes of a file. Owns: intervals. Must not know: files, the contents of the other bytes."""

from __future__ import annotations


class FreeList:
    """Free bytes, as intervals that do not touch each other."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}

    @property
    def count(self) -> int:
        """The number of free bytes."""
        return sum(end - start for start, end in self._ends.items())

    def give(self, start: int, count: int) -> None:
        """Mark ``count`` bytes from ``start`` on as free. They were not free before."""
        end = start + count
        if not count:
            return
        before = next((first for first, last in self._ends.items() if last == start), start)
        self._ends[before] = self._ends.pop(end, end)

    def take(self, count: int) -> int | None:
        """Take ``count`` bytes from the smallest free interval that holds them.

        Returns their start, or None if there is none.
        """
        fitting = [(end - start, start) for start, end in self._ends.items() if end - start >= count]
        if not fitting or not count:
            return None
        size, start = min(fitting)
        del self._ends[start]
        self.give(start + count, size - count)
        return start
