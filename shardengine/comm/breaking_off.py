"""What is in flight between ranks is broken off, once, after a fault. Owns: who does it on this rank, and the order
between ranks.

Must not know: why (watcher, the engine's reset and close), how groups do it (group_kind).

[Note: All ranks at once] NCCL's watchdog, which torch runs in every rank, may see that a peer's communicator is gone;
then it waits for a minute and ends the process, whatever the process does meanwhile, unless its own communicators were
aborted before it looked (ten times per second). So ranks come together first, over the store: each says that it is
here, the last one says go, and all abort in that moment. Who comes says so to the watchers of the others, whose main
threads may be waiting for their GPUs. Ranks that do not come within ``TOGETHER_S`` are dead or stopped, and the others
go without them.
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
"""The kind of the texts (store_board) by which ranks ask the others to come."""


class BreakingOff:
    """Whether what is in flight over one set of groups was broken off."""

    def __init__(self) -> None:
        self._doing = threading.Lock()
        self.reason = ""
        """Why it was broken off, or is at this moment; "" if it was not."""
        self._problem = ""

    def check(self, what: str) -> None:
        """``CommunicationError`` where it was broken off, so that ``what`` cannot begin."""
        if self.reason:
            raise CommunicationError(
                f"{what} cannot begin, since what was in flight between the ranks was broken off: {self.reason}"
            )

    @contextmanager
    def once(self, reason: str) -> Iterator[bool]:
        """Inside, one thread breaks off at a time. True: it has to do so; False: it was done.

        ``CommunicationError``, now and whenever it is tried again, where that fails.
        """
        with self._doing:
            if self._problem:
                raise CommunicationError(self._problem)
            first, self.reason = not self.reason, self.reason or reason
            try:
                yield first
            except CommunicationError as error:
                self._problem = str(error)
                raise


def come_together(store: Any, rank: int, ranks: int, reason: str) -> None:
    """Return on all ranks in the same moment, or when ``TOGETHER_S`` are over on one ([Note: All ranks at once])."""
    store.set(f"{ASKS}/{rank}", reason)
    store.add("news", 1)
    if store.add(f"{ASKS}/here", 1) < ranks:
        with suppress(dist.DistStoreError):
            store.wait([f"{ASKS}/go"], timedelta(seconds=TOGETHER_S))
    store.set(f"{ASKS}/go", "")
