"""The position in the accumulation window. Owns counting and the boundary; integers only.

An accumulation window is the micro-batches of one optimizer step. A micro-batch counts when ``step()`` is called after
its backward, or, for loops that call ``step()`` only at the end of a window, when the next backward starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardengine.errors import UsageError


class Forward:
    """One forward of the outermost module. ``micro_batch``: the number of the micro-batch of its backward, or None."""

    def __init__(self) -> None:
        self.micro_batch: int | None = None


class Window:
    """Counts micro-batches.

    ``size``: how many make a step · managed: False if the caller's ``step()`` ends the window.
    """

    def __init__(self, size: int, *, managed: bool = True) -> None:
        self.size = size
        self.managed = managed
        self.total = 0
        self.done = 0
        self._open = False
        self._ends = False
        self._override: bool | None = None
        self._no_sync = 0

    @property
    def is_first(self) -> bool:
        """Whether no backward of this window has run yet."""
        return self.done == 0 and not self._open

    @property
    def is_boundary(self) -> bool:
        """Whether the current micro-batch (the one to run, or the one whose backward just ran) ends the window."""
        return self.managed and (self.done + 1 >= self.size if self._override is None else self._override)

    @property
    def is_overridden(self) -> bool:
        """Whether ``set_boundary`` was called since the last step."""
        return self._override is not None

    @property
    def ends(self) -> bool:
        """Whether the backward that was begun last ends the window."""
        return self._open and self._ends

    @property
    def only_counted(self) -> bool:
        """Whether nothing but a ``step()`` off the boundary followed the last backward."""
        return self.done > 0 and not self._open

    @property
    def completed(self) -> int:
        """Micro-batches so far, without those of this window."""
        return self.total - self.done

    @property
    def synchronises(self) -> bool:
        """Whether no ``no_sync`` is open."""
        return self._no_sync == 0

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this window that had their backward."""
        return self.done + self._open

    def set_boundary(self, boundary: bool) -> None:
        """Set whether the current micro-batch ends the window, until the next step is applied.

        UsageError if only the caller's ``step()`` ends it.
        """
        if not self.managed:
            raise UsageError(
                "set_gradient_accumulation_boundary: expected no call where managed_gradient_accumulation is false; "
                "every step() ends the window there",
                code="accumulation-boundary-not-managed",
            )
        self._override = boundary

    def begin_backward(self) -> None:
        """Begin a backward. A previous one without a ``step()`` after it counts now.

        In the window's last micro-batch it is another backward of the same micro-batch.
        """
        if self._open and not self._ends:
            self.count()
        self._open, self._ends = True, self.is_boundary and self.synchronises

    def claim(self, forward: Forward) -> None:
        """Note that the running backward is that of ``forward``.

        ``UsageError`` if an earlier micro-batch of this window was a backward of the same forward: each of several
        losses of one forward would be counted as a micro-batch, and the window would end too early.
        """
        if forward.micro_batch is None:
            forward.micro_batch = self.total
        place = forward.micro_batch - (self.total - self.done)
        if self.managed and self.size > 1 and 0 <= place < self.done:
            raise UsageError(
                f"backward of micro-batch {self.done + 1} of {self.size}: expected a loss of a new forward, got one "
                f"of the forward whose backward was micro-batch {place + 1}; add the losses of one forward and call "
                "engine.backward once, or set gradient_accumulation_steps to 1",
                code="backward-of-same-forward",
            )

    def backward_failed(self) -> None:
        """Note that the backward raised; its micro-batch does not count."""
        self._open = False

    def count(self) -> None:
        """End the micro-batch, but not the window."""
        self.done += self._open
        self.total += self._open
        self._open = False

    def close(self) -> int:
        """Begin a new window after an applied step; return the micro-batches of the old one."""
        self.count()
        count, self.done, self._override = self.done, 0, None
        return count

    def resize(self, size: int) -> None:
        """From now on ``size`` micro-batches make a step; between two windows."""
        self.size = size

    def restart(self, total: int | None = None) -> None:
        """Drop the window's micro-batches (``zero_grad``). total: micro-batches so far, if the caller knows better."""
        self.close()
        self.total = self.total if total is None else total

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches inside neither communicate nor end the window."""
        self._no_sync += 1
        try:
            yield
        finally:
            self._no_sync -= 1
