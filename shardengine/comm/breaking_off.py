"""After a fault, the collectives in flight between ranks are broken off, once.

Owns: who does it on this rank, and the order between ranks.

Must not know: why (watcher, the engine's reset and close), how groups do it (group_kind).

[Note: All ranks at once] NCCL's watchdog, which torch runs in every rank, may notice that a peer's communicator is
gone. Then it waits for a minute and ends the process, whatever the process does meanwhile, unless the process aborted
its own communicators before the watchdog looked (ten times per second). So ranks meet first, over the store: each one
reports that it has come, the last one gives the signal, and all abort at that moment. A rank that comes also notifies
the watchers of the others, whose main threads may be waiting for their GPUs. Ranks that do not come within
``TOGETHER_S`` are dead or stopped, and the others continue without them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardengine.errors import CommunicationError

TOGETHER_S = 5.0
ASKS = "breaks off"
"""The kind of the texts (store_board) that ask the other ranks to come."""


class BreakingOff:
    """Whether the collectives in flight over one set of groups were broken off."""

    def __init__(self) -> None:
        self._doing = threading.Lock()
        self.reason = ""
        """Why it was broken off, or is at this moment; "" if it was not."""
        self._problem = ""

    def check(self, what: str) -> None:
        """Raise ``CommunicationError`` if they were broken off, because then ``what`` cannot begin."""
        if self.reason:
            raise CommunicationError(
                f"{what} cannot begin, since what was in flight between the ranks was broken off: {self.reason}",
                code="ranks-connection-broken-off",
            )

    @contextmanager
    def once(self, reason: str) -> Iterator[bool]:
        """A block for one thread at a time: it gets True if it has to break off, False if that was done.

        A ``CommunicationError`` inside is kept, and every later attempt raises it again.
        """
        with self._doing:
            if self._problem:
                raise CommunicationError(self._problem, code="nccl-abort-failed")
            first, self.reason = not self.reason, self.reason or reason
            try:
                yield first
            except CommunicationError as error:
                self._problem = str(error)
                raise


def come_together(store: Any, rank: int, ranks: int, reason: str) -> None:
    """Return at the same moment on all ranks, or after ``TOGETHER_S`` ([Note: All ranks at once])."""
    store.set(f"{ASKS}/{rank}", reason)
    store.add("news", 1)
    if store.add(f"{ASKS}/here", 1) < ranks:
        with suppress(dist.DistStoreError):
            store.wait([f"{ASKS}/go"], timedelta(seconds=TOGETHER_S))
    store.set(f"{ASKS}/go", "")
