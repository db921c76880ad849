"""Ranks meet before an engine's process groups are made, over the default process group's store.

Must not know: what the groups are for, engines.

torch waits in the store until every rank makes a group, without a word, and then raises an error about a key. So the
ranks count their meetings first. A rank that waits says so to those that still use an older engine, as a wait of any
collective does (failures: [Note: Failure reports]); that it waits for them and they for it is then found as any other
ring.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from shardengine.comm import failures
from shardengine.comm.positions import Waiting
from shardengine.errors import CommunicationError, MismatchError


def meet(timeout_s: float) -> None:
    """Wait until every rank calls this as often as this one; collective.

    ``CommunicationError`` names the ranks that have not come within ``timeout_s``, ``MismatchError`` says where ranks
    wait in an older engine for this one.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("shardengine/meetings", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    with _reachable():
        number, came = store.add(f"of/{rank}", 1), store.add("all", 1)
    try:
        if came < number * ranks:
            with _watching(number) as watches:
                _wait(store, number, timeout_s, watches)
    except BaseException:
        with suppress(RuntimeError):
            store.add(f"of/{rank}", -1)
            store.add("all", -1)
        raise
    if failures.voices():
        gc.collect()  # engines that nobody has any more, on every rank, before there are more groups


def _wait(store: Any, number: int, timeout_s: float, watches: list[failures.Watch]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    started, pause = time.monotonic(), 0.001
    while True:
        with _reachable():
            if store.add("all", 0) >= number * ranks:
                return
            lasted = time.monotonic() - started
            missing = {other for other in range(ranks) if lasted > timeout_s and store.add(f"of/{other}", 0) < number}
        if missing:
            said = [voice.describe(missing) for voice in failures.voices()[-1:]]
            raise CommunicationError(
                f"initialize on rank {rank}: expected every rank to call it within {timeout_s:g} s. "
                f"{said[0] if said else f'Missing: ranks {sorted(missing)}'}. Call it on every rank"
            )
        if lasted > failures.POST_AFTER_S:
            for watch in watches:
                watch.look_before_groups()
        time.sleep(pause)
        pause = min(0.25, 1.5 * pause)


@contextmanager
def _watching(number: int) -> Iterator[list[failures.Watch]]:
    """Watches of older engines, one each. Their ranks hear of an error inside; these engines may go on all the same."""
    what = "the meeting of all ranks before new process groups"
    come = {failures.MEETING: number}
    waiting = Waiting(what, failures.MEETING, failures.MEETING, number, issued=come, where="initialize")
    voices = failures.voices()
    watches = [voice.watch(waiting) for voice in voices]
    try:
        yield watches
    except (CommunicationError, MismatchError) as error:
        for voice in voices:
            voice.report(failures.FailureReport(str(error), gave_up=True))
        raise
    finally:
        for watch in watches:
            watch.end()


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"initialize on rank {dist.get_rank()}: the store of the process group cannot be reached, its "
            f"process may be gone: {str(error).splitlines()[0]}. Start the ranks again"
        ) from error
