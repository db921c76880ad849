"""Ranks meet before an engine's process groups are made, over the default process group's store.

Must not know: what the groups are for, engines.

torch waits in the store until every rank makes a group, without a word, and then raises an error about a key. So the
ranks count their meetings first. A rank that waits says so to those that still use an older engine, as a wait of any
collective does (faults: [Note: Notices]); that it waits for them and they for it is then found as any other ring.
"""

from __future__ import annotations

import gc
import time

import torch.distributed as dist

from shardengine import faults
from shardengine.errors import CommunicationError, MismatchError
from shardengine.mesh import Store
from shardengine.positions import Waiting

_WHERE = "initialize"


def meet(timeout_s: float) -> None:
    """Wait until every rank calls this as often as this one; collective.

    ``CommunicationError`` names the ranks that have not come within ``timeout_s``, ``MismatchError`` says where ranks
    wait in an older engine for this one.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store: Store = dist.PrefixStore("shardengine/meetings", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    number, came = store.add(f"of/{rank}", 1), store.add("all", 1)
    try:
        if came < number * ranks:
            _wait(store, number, rank, ranks, timeout_s)
        if faults.voices():
            gc.collect()  # engines that nobody has any more, on every rank, before there are more groups
    except BaseException:
        store.add(f"of/{rank}", -1)
        store.add("all", -1)
        raise


def _wait(store: Store, number: int, rank: int, ranks: int, timeout_s: float) -> None:
    started, pause = time.monotonic(), 0.001
    waiting = Waiting("the meeting of all ranks before new process groups", _WHERE, _WHERE, number, where=_WHERE)
    voices: list[faults.Faults] = []
    watches: list[faults.Watch] = []
    try:
        while store.add("all", 0) < number * ranks:
            lasted = time.monotonic() - started
            if lasted > timeout_s:
                missing = {other for other in range(ranks) if store.add(f"of/{other}", 0) < number}
                said = [voice.describe(missing) for voice in voices[-1:]]
                raise CommunicationError(
                    f"initialize on rank {rank}: expected every rank to call it within {timeout_s:g} s. "
                    + (said[0] if said else f"Missing: ranks {sorted(missing)}")
                    + ". Start the ranks again"
                )
            if lasted > faults.POST_AFTER_S:
                voices = voices or faults.voices()
                watches = watches or [voice.watch(waiting) for voice in voices]
                for watch in watches:
                    watch.look_before_groups()
            time.sleep(pause)
            pause = min(0.25, 1.5 * pause)
    except (CommunicationError, MismatchError) as error:
        for voice in voices:
            voice.give_up(str(error))
        raise
    finally:
        for watch in watches:
            watch.end()
