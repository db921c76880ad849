"""Stepped weights in flight (``overlap_param_gather``): who waits for them, and when.

After a step the gathers of stages 1 and 2 are left in flight. A block waits for its own parameters when its forward
begins, everything else when the outermost forward begins. Until then the parameters in flight are poison
(sharding/poison.py). Must not know: the optimizer, how hooks are registered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from shardengine.comm import Work
from shardengine.runtime.unit import Member
from shardengine.sharding import IN_FLIGHT, Bucket


class DeferredGather:
    """Waits for gathers after a step.

    members: all parameters in flat buffers. groups: their indices per block; group 0 has those that are in no block.
    """

    def __init__(self, members: Sequence[Member], groups: Sequence[Iterable[int]]) -> None:
        self._flights: dict[int, Work] = {}
        self._hidden: set[int] = set()
        self._members = {member.index: member for member in members}
        self._buckets = {member.index: frozenset(_buckets_of(member)) for member in members}
        self._in: dict[int, list[int]] = {}
        for index, buckets in self._buckets.items():
            for bucket in buckets:
                self._in.setdefault(bucket, []).append(index)
        self._groups = [tuple(group) for group in groups]

    def add_in_flight(self, bucket: Bucket, work: Work) -> None:
        """Add ``bucket``, whose gather is ``work``."""
        self._flights[bucket.layout.index] = work

    def hide(self) -> None:
        """End the step: parameters that are not gathered yet become poison."""
        for index, buckets in self._buckets.items():
            if not buckets.isdisjoint(self._flights):
                member = self._members[index]
                member.hide(IN_FLIGHT)
                self._hidden.add(index)

    def await_group(self, number: int) -> None:
        """Wait for the parameters of a group, if any gather is in flight."""
        if self._flights:
            self._await(self._groups[number])

    def await_all(self) -> None:
        """Wait for all gathers."""
        if self._flights:
            self._await(self._members)

    def drop(self) -> None:
        """Forget gathers in flight, after a failure."""
        self._flights.clear()
        self._hidden.clear()

    @property
    def hidden(self) -> Collection[int]:
        """The parameters that are poison now."""
        return self._hidden

    def _await(self, parameters: Iterable[int]) -> None:
        complete: set[int] = set()
        for index in parameters:
            for bucket in sorted(self._buckets[index] & self._flights.keys()):
                self._flights.pop(bucket).wait()
                complete.update(self._in[bucket])
        for index in complete & self._hidden:
            if self._buckets[index].isdisjoint(self._flights):
                self._members[index].show(self._members[index].view)
                self._hidden.discard(index)


def _buckets_of(member: Member) -> Iterable[int]:
    slot = member.flat_buffer.layout.slots[member.slot]
    return (bucket.index for bucket in member.flat_buffer.layout.buckets_within(slot.start, slot.end))
