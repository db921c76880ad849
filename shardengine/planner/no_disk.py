"""A file of the tiers that keeps nothing: room is taken and given back, and a transfer is over when it is waited for.

Must not know: what is kept, how the real file is laid out (``offload.nvme``), whose interface it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from shardengine.offload import Extent, IORequest
from shardengine.planner.tape import Recorder, Transfer, Wait


class _Late(IORequest):
    """A disk is behind who asks it: a transfer is over, and gives its buffer back, when somebody has waited for it."""

    def __init__(self, recorder: Recorder, count: int, *, write: bool) -> None:
        super().__init__(0)
        self._over = False
        self._number, self._recorder = recorder.number(), recorder
        recorder.note(Transfer(self._number, count, write))

    def done(self) -> bool:
        """See ``IORequest``."""
        return self._over

    def wait_quietly(self) -> None:
        """See ``IORequest``."""
        if not self._over:
            self._recorder.note(Wait(self._number, True))
        self._over = True


class NoDisk:
    """As ``ExtentFile``. bytes: that it would have · map_bytes: makes the memory that shows an extent · recorder:
    writes transfers down."""

    def __init__(self, folder: Path, map_bytes: Callable[[int], Tensor], recorder: Recorder) -> None:
        self.path = folder / "planned"
        self.bytes = 0
        self._map_bytes, self._recorder = map_bytes, recorder
        self._reserved: Counter[int] = Counter()

    def reserve(self, count: int) -> None:
        """See ``ExtentFile``."""
        self._reserved[count] += 1

    def allocate(self, count: int) -> Extent:
        """See ``ExtentFile``."""
        self._reserved[count] -= self._reserved[count] > 0
        self.bytes += count
        return Extent(self.bytes - count, count)

    def free_reserved(self) -> None:
        """See ``ExtentFile``."""
        self._reserved.clear()

    def free(self, extent: Extent) -> None:
        """See ``ExtentFile``."""
        self.bytes -= extent.count

    def read(self, extent: Extent, into: Tensor) -> IORequest:
        """See ``ExtentFile``; nothing is filled."""
        return _Late(self._recorder, extent.count, write=False)

    def write(self, extent: Extent, source: Tensor) -> IORequest:
        """See ``ExtentFile``; nothing is kept."""
        return _Late(self._recorder, extent.count, write=True)

    def look(self, extent: Extent) -> Tensor:
        """See ``ExtentFile``."""
        return self._map_bytes(extent.count)

    def edit(self, extent: Extent) -> Tensor:
        """See ``ExtentFile``."""
        return self._map_bytes(extent.count)

    def close(self) -> None:
        """See ``ExtentFile``."""
