"""The facts of a collective, the collectives that a rank has issued, and the first difference between ranks.

Ranks that gather different blocks of one size at the same time would train on each other's weights without any error,
because gloo and NCCL match collectives only by their order. Must not know: how anything is sent.
"""

from __future__ import annotations

import enum
import functools
import itertools
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardengine.comm.advice import asks
from shardengine.comm.group_kind import GroupName
from shardengine.comm.positions import Waiting

HOOK = "communication hook"
"""The operation of a collective that a user's hook has begun."""


class Purpose(enum.Enum):
    """The purpose of sent bytes. ``STEP`` are those of a step; its traffic formula counts all of them but ``ROWS``."""

    GRADIENTS = "gradients: reduce-scatter"
    WHOLE_GRADIENTS = "gradients: all-gather"
    ROWS = "gradients: rows that are not zero"
    WEIGHTS = "weights: all-gather"
    MATRICES = "whole matrices of an update: all-to-all"
    SUMS = "sums over parameters of an update: all-to-all"
    REPLICAS = "averages of shard groups: reduce-scatter, all-gather"
    EVALUATION = "weights without grad: all-gather"
    WHOLE_WEIGHTS = "full_params and state_dict"
    WHOLE_STATE = "full_grads and full_optimizer_state"
    BUFFERS = "buffers"
    REBUILD = "new layout"
    START = "start"
    CONTROL = "control"


STEP = (
    Purpose.GRADIENTS,
    Purpose.WHOLE_GRADIENTS,
    Purpose.ROWS,
    Purpose.WEIGHTS,
    Purpose.MATRICES,
    Purpose.SUMS,
    Purpose.REPLICAS,
)


@dataclass(frozen=True)
class Collective:
    """The facts of a collective that stay the same whenever it is issued.

    what: the bucket, or the exchange · names: the parameters in it · sent: bytes that this rank sends · agreed: bytes
    that all ranks know, if ranks send different numbers; None: ``sent`` is the same on all of them · members: the ranks
    that take part, () for all · begun_here: False if a user's hook has begun it.
    """

    group: GroupName
    operation: str
    what: str
    names: tuple[str, ...]
    sent: int
    purpose: Purpose
    agreed: int | None = None
    members: tuple[int, ...] = ()
    begun_here: bool = True

    @functools.cached_property
    def subject(self) -> str:
        """The bucket with its parameters, or the exchange."""
        return _subject(self.what, self.names)

    @functools.cached_property
    def title(self) -> str:
        """Its name in a trace."""
        return f"{self.operation} {self.what}" if self.what else self.operation

    @functools.cached_property
    def summary(self) -> str:
        """The text that ranks must agree on: the same at every step."""
        return f"{self.operation} of {self.subject}, {self.alike} bytes"

    @functools.cached_property
    def alike(self) -> int:
        """The number of bytes that all ranks know and compare."""
        return self.sent if self.agreed is None else self.agreed

    @functools.cached_property
    def counts_as(self) -> GroupName:
        """The group whose collectives its order is compared with, see ``GroupName``."""
        return self.group.counts_as


class CollectiveRecord(NamedTuple):
    """A collective that was issued. sequence: among all that this rank issued; place: among those of its group."""

    sequence: int
    place: int
    of: Collective

    @property
    def debug_text(self) -> str:
        """The text that debug mode compares."""
        return f"{self.sequence} {self.of.operation} {self.of.alike} bytes {self.of.subject}"

    def describe(self, rank: int) -> str:
        """For errors."""
        return f"{self.of.operation} number {self.place} on rank {rank} for {self.of.subject}"

    def waiting(self, rank: int) -> Waiting:
        """For the other ranks, while this one waits."""
        of = self.of
        key = f"{of.group} {self.place} {of.operation} {of.subject}"
        shape = f"{of.operation} {of.alike}"
        alone = of.purpose is Purpose.EVALUATION or asks(of.what, grad=False)
        where = "a forward without grad" if alone else ""
        members = list(of.members)
        return Waiting(self.describe(rank), key, of.group, self.place, shape, where=where, members=members)


@functools.lru_cache(maxsize=65536)
def _subject(what: str, names: tuple[str, ...]) -> str:
    """Made once: every step moves the same buckets."""
    shown = _shorten(names)
    return f"{what} ({shown})" if what and shown else what or shown


def _shorten(names: Sequence[str], limit: int = 4) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


MAX_TEXTS = 2000


class FlightRecorder:
    """The issued collectives, in order within each process group; the order between groups may differ by rank."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._texts = {group: deque[str](maxlen=MAX_TEXTS) for group in groups}
        self._counts = dict.fromkeys(groups, 0)
        self._digests = dict.fromkeys(groups, 0)

    def add(self, issued: Collective) -> None:
        """Record ``issued``, which is issued now; groups that were not passed at the start are ignored."""
        group = issued.counts_as
        if group in self._texts:
            self._texts[group].append(issued.summary)
            self._counts[group] += 1
            self._digests[group] = zlib.crc32(issued.summary.encode(), self._digests[group])

    def digest(self) -> Tensor:
        """Return the digest of everything recorded: uint8, 4 bytes per group."""
        return torch.tensor([*self._digests.values()], dtype=torch.int64).to(torch.uint32).view(torch.uint8)

    def texts(self) -> dict[str, tuple[int, list[str]]]:
        """Return, per group, how many records are forgotten, and the last ``MAX_TEXTS``, which came after them."""
        return {group: (self._counts[group] - len(texts), list(texts)) for group, texts in self._texts.items()}


def first_difference(ranks: Sequence[Mapping[str, tuple[int, Sequence[str]]]]) -> tuple[int, str, str] | None:
    """Return the first place at which a rank differs from rank 0: (rank, rank 0's collective, the rank's collective).

    ranks: each rank's ``texts``. Both collectives are numbered from 1, among all records of their group. The comparison
    starts at the first place that neither rank has forgotten. None: the difference is older.
    """
    for group, rank in itertools.product(ranks[0], range(1, len(ranks))):
        (ours_from, ours), (theirs_from, theirs) = ranks[0][group], ranks[rank][group]
        start = max(ours_from, theirs_from)
        pairs = itertools.zip_longest(ours[start - ours_from :], theirs[start - theirs_from :], fillvalue="")
        for number, (mine, other) in enumerate(pairs, start + 1):
            if mine != other:
                return rank, _numbered(number, mine), _numbered(number, other)
    return None


def _numbered(number: int, text: str) -> str:
    return f"number {number}: {text}" if text else "nothing"
