"""Stands in for a file of the tier nvme: it accounts for space, keeps no bytes, and completes a transfer at its wait.

Must not know: the bytes, the layout of the real file (``offload.nvme``), whose interface it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from shardengine.offload import Extent, IORequest
from shardengine.planner.tape import TapedCopy, TapeRecorder, Wait


class _Late(IORequest):
    """A request to a disk, which runs behind the host: only a wait completes it and returns its buffer."""

    def __init__(self, recorder: TapeRecorder, count: int, *, write: bool) -> None:
        super().__init__(0)
        self._over = False
        self._number, self._recorder = recorder.number(), recorder
        recorder.note(TapedCopy(self._number, count, write))

    def done(self) -> bool:
        """See ``IORequest``."""
        return self._over

    def wait_quietly(self) -> None:
        """See ``IORequest``."""
        if not self._over:
            self._recorder.note(Wait(self._number, True))
        self._over = True


class NoDisk:
    """The interface of ``ExtentFile``.

    bytes: the size that the file would have · map_bytes: makes the memory that maps an extent · recorder: writes
    transfers to the tape.
    """

    def __init__(self, folder: Path, map_bytes: Callable[[int], Tensor], recorder: TapeRecorder) -> None:
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
