"""The buckets of one module, gathered and resharded together. Owns the state machine of a unit's weights.

Must not know: hooks, the optimizer, the order in which units run.

    SHARDED ──gather()──▶ GATHERING ──await_full()──▶ FULL ──reshard()──▶ SHARDED
       ▲─recover(), an error──┘

A unit whose weights rest replicated is FULL from start to end. While a unit is not FULL its parameters are poison
(bucket.poison): right shape, NaN; so are those of a FULL unit that are in flight after a step (deferred_gather). While
it is pinned (``full_params``) they are views of a storage that only the pin owns, whatever the state of the flat
buffers.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from shardengine.comm import Collectives, Purpose, Work
from shardengine.errors import InternalError
from shardengine.offload import Shelf
from shardengine.sharding import Bucket, FlatBuffer, Layout, mark_weights
from shardengine.stages import Placement

_SHARDED, _FULL = Placement.SHARDED, Placement.REPLICATED


class Weights(enum.Enum):
    """Where a unit's weights are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


_LEGAL = {(Weights.SHARDED, Weights.GATHERING), (Weights.GATHERING, Weights.FULL), (Weights.FULL, Weights.SHARDED)}


@dataclass(frozen=True)
class Member:
    """A parameter of a unit: the user's object, its index in the layout, its flat buffer and slot."""

    index: int
    parameter: nn.Parameter
    flat_buffer: FlatBuffer
    slot: int

    def show(self, tensor: Tensor) -> None:
        """Let the user's parameter show ``tensor``."""
        self.parameter.data = tensor

    @property
    def view(self) -> Tensor:
        """Its view of the flat buffer."""
        return self.flat_buffer.views[self.slot]


class Unit:
    """One module's flat buffers. ``index`` 0 is the root: everything that is in no block."""

    def __init__(
        self, index: int, name: str, flat_buffers: list[FlatBuffer], members: list[Member], layout: Layout
    ) -> None:
        self.index = index
        self.name = name
        self.flat_buffers = flat_buffers
        self.members = members
        self.trainable = frozenset(m.index for m in members if layout.parameters[m.index].trainable)
        self.elements = sum(flat_buffer.layout.length for flat_buffer in flat_buffers)
        """Of all flat buffers, padding included."""
        self._by_slot = [(flat_buffer, _in_slots(flat_buffer, members)) for flat_buffer in flat_buffers]
        self._names = {m.index: layout.parameters[m.index].name for m in members}
        self.state = Weights.FULL
        self._in_flight: list[Work] = []
        self._pins: list[Tensor] | None = None

    def name_of(self, parameter: int) -> str:
        """The name of a parameter of it, given by its index in the layout."""
        return self._names[parameter]

    @property
    def has_frozen(self) -> bool:
        """Whether some parameter gets no gradient."""
        return len(self.trainable) < len(self.members)

    @property
    def pins(self) -> list[Tensor]:
        """What ``full_params`` holds of this unit."""
        return self._pins or []

    @property
    def pinned(self) -> bool:
        """Whether ``full_params`` holds this unit."""
        return self._pins is not None

    def detach_shards(self) -> None:
        """Once, at start: from FULL, give shards their own memory and rest sharded.

        At one rank the shard is all of it and stays where it is: then only what the parameters show changes.
        """
        for flat_buffer in self.flat_buffers:
            for bucket in flat_buffer.buckets:
                if bucket.layout.slice_length < bucket.layout.length or flat_buffer.homes.weights is not None:
                    bucket.detach_shard(flat_buffer.homes.weights)
        self.reshard()

    def buckets(self) -> Iterator[Bucket]:
        """Every bucket, in layout order."""
        for flat_buffer in self.flat_buffers:
            yield from flat_buffer.buckets

    def shelves(self) -> Iterator[Shelf]:
        """Everything of it that rests on a shelf."""
        for bucket in self.buckets():
            yield bucket.shelf
            if bucket.rest is not None:
                yield bucket.rest

    def gather(self, collectives: Collectives, purpose: Purpose = Purpose.WEIGHTS) -> None:
        """SHARDED → GATHERING: start the all-gather of every bucket. After an error the unit is SHARDED."""
        try:
            for flat_buffer in self.flat_buffers:
                flat_buffer.allocate()
        except BaseException:
            for flat_buffer in self.flat_buffers:
                flat_buffer.release()
            raise
        self._move(Weights.GATHERING)
        try:
            for bucket in self.buckets():
                bucket.load_shard()
                self._in_flight.append(collectives.move(bucket.full, _SHARDED, _FULL, bucket.layout, purpose))
        except BaseException:
            self._abandon_gather()
            raise

    def fetch(self) -> None:
        """The unit is gathered soon: bring its shards from where they rest, as far as there is room."""
        for bucket in self.buckets():
            bucket.fetch_shard()

    def await_full(self) -> None:
        """GATHERING → FULL: wait, and show the weights to the user's parameters."""
        for work in self._in_flight:
            work.wait()
        self._in_flight.clear()
        self._move(Weights.FULL)
        if not self.pinned:
            self.show()

    def reshard(self, *, abandon: bool = False) -> None:
        """FULL → SHARDED: free the full weights. abandon: views of them live on outside (``FlatBuffer.release``)."""
        self._move(Weights.SHARDED)
        if not self.pinned:
            self.show()
        for flat_buffer in self.flat_buffers:
            flat_buffer.release(abandon=abandon)

    def recover(self) -> None:
        """After a failure: unpinned, and not GATHERING. What is in flight keeps the storage that it writes into."""
        self._pins = None
        if self.state is Weights.GATHERING:
            self._abandon_gather()
        self.show()

    def _abandon_gather(self) -> None:
        """The only way back from GATHERING."""
        self._in_flight.clear()
        self.state = Weights.SHARDED
        for flat_buffer in self.flat_buffers:
            flat_buffer.release(abandon=True)

    def relocate(self) -> None:
        """From FULL: the same weights in other memory, because something in flight may write into the old one."""
        for flat_buffer in self.flat_buffers:
            flat_buffer.relocate()
        self.show()

    def show(self) -> None:
        """Show the user's parameters what they are without a pin: weights or poison."""
        full = self.state is Weights.FULL
        for flat_buffer, members in self._by_slot:
            for member, tensor in zip(members, flat_buffer.views if full else flat_buffer.poisons, strict=True):
                member.parameter.data = tensor

    def misplaced(self, hidden: Collection[int] = ()) -> Iterator[Member]:
        """Whose parameter does not show what ``show`` gave it last. hidden: parameters that are poison in any case."""
        full = self.state is Weights.FULL
        for flat_buffer, members in self._by_slot:
            for member, view, poison in zip(members, flat_buffer.views, flat_buffer.poisons, strict=True):
                expected, shown = view if full and member.index not in hidden else poison, member.parameter
                if shown.data_ptr() != expected.data_ptr() or shown.dtype is not expected.dtype:
                    yield member

    def pin(self, collectives: Collectives) -> None:
        """Show full weights in a storage of their own; what happens in ``full_params`` cannot harm the flat buffers."""
        pins = []
        for flat_buffer in self.flat_buffers:
            fresh = flat_buffer.flat.new_empty(flat_buffer.layout.length)
            mark_weights(fresh)
            for bucket in flat_buffer.buckets:
                part = fresh[bucket.layout.start : bucket.layout.end]
                bucket.own_slice(part).copy_(bucket.shard)
                collectives.move(part, _SHARDED, _FULL, bucket.layout, Purpose.WHOLE_WEIGHTS).wait()
            pins.append(fresh)
        self._pins = pins
        views = {
            flat_buffer: flat_buffer.views_of(fresh) for flat_buffer, fresh in zip(self.flat_buffers, pins, strict=True)
        }
        for member in self.members:
            member.show(views[member.flat_buffer][member.slot])

    def unpin(self, collectives: Collectives, *, writable: bool) -> None:
        """End ``pin``; with ``writable`` rank 0's contents become everybody's weights."""
        pins, self._pins = self._pins or [], None
        for flat_buffer, fresh in zip(self.flat_buffers, pins, strict=True) if writable else ():
            for bucket in flat_buffer.buckets:
                part = fresh[bucket.layout.start : bucket.layout.end]
                collectives.broadcast(part, bucket.layout, Purpose.WHOLE_WEIGHTS)
                bucket.edit_shard().copy_(bucket.own_slice(part))
                if self.state is Weights.FULL:
                    bucket.full.copy_(part)
                bucket.adopt_weights()
        self.show()

    def owns_storage(self, keys: Collection[int]) -> bool:
        """Whether one of the storages with identity ``keys`` is a flat buffer of this unit."""
        return any(flat_buffer.storage_key in keys for flat_buffer in self.flat_buffers)

    def _move(self, target: Weights) -> None:
        if (self.state, target) not in _LEGAL:
            raise InternalError(f"unit {self.name!r}: illegal move from {self.state.name} to {target.name}")
        self.state = target


def _in_slots(flat_buffer: FlatBuffer, members: Sequence[Member]) -> list[Member]:
    """Those in ``flat_buffer``, in the order of its slots."""
    return sorted((member for member in members if member.flat_buffer is flat_buffer), key=lambda member: member.slot)


def weight_bytes(units: Sequence[Unit]) -> Counter[str]:
    """Bytes that hold weights at this moment, by tier: flat buffers, separate shards and pins."""
    flat_buffers = [flat_buffer for unit in units for flat_buffer in unit.flat_buffers]
    found = Counter(device=sum(pin.nbytes for unit in units for pin in unit.pins))
    for flat_buffer in flat_buffers:
        found["device"] += flat_buffer.storage_bytes
        found["cpu"] += 0 if flat_buffer.parked is None else flat_buffer.parked.nbytes
        for bucket in flat_buffer.buckets:
            if bucket.placement is Placement.SHARDED:
                found[bucket.place] += bucket.layout.slice_length * flat_buffer.layout.itemsize
    return found
