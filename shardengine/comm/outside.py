"""The collective of the program that a rank is in, outside of the engine, and how many of those it has issued.

Must not know: the conclusions from that (positions, watchdog), how it is reported.

[Note: Outside of the engine] If rank 0 alone evaluates while the others are in a barrier of the training loop, rank 0
waits for them in a gather, and they wait for rank 0. A rank in a collective of the program cannot report this itself.
So another thread finds the function of torch.distributed that it is in. torch counts the collectives of each group. The
counts show which ranks have not issued a collective that another rank waits for.

A deadlock is concluded only from collectives that end on no rank before all ranks have come. For a broadcast, a send or
a receive the errors only report where the rank is.

Three waits are not seen: for a collective that was begun with ``async_op=True``, of the host for its GPU, and for a
collective of gloo in a group that counts by another backend.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardengine.comm.mesh import Mesh, Store
from shardengine.comm.positions import Departure, Presence, Waiting

_log = logging.getLogger(__name__)
_PREFIX = "torch's group "
_OF_ALL = frozenset(
    {
        *("barrier", "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object"),
        *("all_gather_coalesced", "all_to_all", "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor"),
    }
)
"""They end on no rank before all ranks of the group have come."""
_Place = tuple[int, int, int]


class Outside:
    """The collective of the program that the thread which calls the engine is in.

    The board's thread writes it to the store (``store_board.Later``). key: its key in the store · channel, issued: of
    the engine, as in ``Waiting``.
    """

    def __init__(self, key: str, mesh: Mesh, channel: int, issued: Mapping[str, int]) -> None:
        self._thread = threading.get_ident()
        self._key = key
        self._rank = mesh.rank
        self._numbers = dict(zip(mesh.global_ranks or range(mesh.ranks), range(mesh.ranks), strict=True))
        self._channel = channel
        self._issued = issued
        self._seen: _Place | None = None
        self._put = ""
        self._news = -1
        self._logged: set[tuple[int, str]] = set()

    def look_at_this_thread(self) -> None:
        """From now on this thread is the one that calls the engine."""
        self._thread = threading.get_ident()

    def put(self, store: Store) -> None:
        """Write the collective that the thread has been in since the last call. Called by the board's thread."""
        waiting = self.look()
        said = "" if waiting is None else waiting.key
        if said != self._put:
            store.set(f"{self._key}/{self._rank}", "" if waiting is None else json.dumps(asdict(waiting)))
            store.add("news", 1)
            self._put = said
        if waiting is not None and (news := store.add("news", 0)) != self._news:
            self._warn(store, waiting)
            self._news = news

    def look(self) -> Waiting | None:
        """Return the collective that the thread was in at the last call and still is; else None."""
        frame = sys._current_frames().get(self._thread)
        call = None if frame is None else _call_of(frame)
        if frame is None or call is None:
            self._seen = None
            return None
        name, group, caller = call
        place = (id(frame), frame.f_lasti, _count_of(group))
        before, self._seen = self._seen, place
        members = [self._numbers[each] for each in dist.get_process_group_ranks(group) if each in self._numbers]
        if place != before or members == [self._rank]:
            return None
        label, number = _PREFIX + group.group_name, place[2]
        return Waiting(
            f"a collective of the program, begun at {caller}",
            f"{label} {number} {name}",
            label,
            number if name in _OF_ALL else 0,
            channel=self._channel,
            issued={**counts(), **self._issued},
            where=f"torch.distributed.{name}()",
            members=sorted(members),
        )

    def _warn(self, store: Store, waiting: Waiting) -> None:
        """Log once that a rank this one waits for has failed or left: nothing else explains the wait."""
        for rank in sorted(set(waiting.members) - {self._rank}):
            said = _failure_of(store, rank, self._channel)
            if said and (rank, said) not in self._logged:
                self._logged.add((rank, said))
                _log.error(
                    "rank %d stands in %s (%s), which may never end: rank %d %s",
                    *(self._rank, waiting.where, waiting.text, rank, said),
                )


def counts() -> dict[str, int]:
    """Return how many collectives this rank has issued in each group of torch's, the engine's groups included."""
    with suppress(AttributeError, RuntimeError, ValueError):  # a group that ends, a backend that does not count
        if dist.is_available() and dist.is_initialized():
            return {_PREFIX + group.group_name: _count_of(group) for group in list(distributed_c10d._world.pg_map)}
    return {}


def stands_outside(waiting: Waiting) -> bool:
    """Return whether ``waiting`` is for a collective of the program."""
    return waiting.group.startswith(_PREFIX)


def _count_of(group: Any) -> int:
    return int(group._get_sequence_number_for_group())


def _call_of(frame: FrameType) -> tuple[str, Any, str] | None:
    """Return the function of torch.distributed that the thread is in, its group, and the file and line that called it.

    None: it is in no such function, or the engine called it.
    """
    inside: FrameType | None = None
    at: FrameType | None = frame
    while at is not None and _module(at).startswith("torch.distributed"):
        if _module(at) == distributed_c10d.__name__:
            inside = at
        at = at.f_back
    if inside is None or at is None or _module(at).startswith("shardengine.comm"):
        return None  # the engine reports its own waits
    name, group = inside.f_code.co_name, inside.f_locals.get("group")
    if not dist.is_initialized():
        return None
    if not isinstance(group, dist.ProcessGroup):
        group = distributed_c10d._get_default_group()
    return name, group, f"{'/'.join(Path(at.f_code.co_filename).parts[-2:])}:{at.f_lineno}"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _failure_of(store: Store, rank: int, channel: int) -> str:
    """Return the failure that ``rank`` has reported, or its departure; "": neither."""
    if store.check([key := f"failure/{rank}"]):
        report = json.loads(store.get(key) or b"{}")
        if report and not report["over"]:
            return f"{'gave up' if report['gave_up'] else 'raised'}: {report['text']}"
    if store.check([key := f"left/{channel}/{rank}"]) and (text := store.get(key).decode()):
        left = Departure.from_json(text)
        return left.text if left.presence is not Presence.LEFT else ""  # it may still come
    return ""
