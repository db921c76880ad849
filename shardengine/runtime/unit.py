"""The buckets of one module, unsharded and resharded together. Owns the state machine of a unit's weights.

Must not know: hooks, the optimizer, the order of units.

    SHARDED ──unshard()──▶ UNSHARDING ──wait_for_unshard()──▶ UNSHARDED ──reshard()──▶ SHARDED
       ▲───recover(), an error───┘

A unit whose weights rest replicated is always UNSHARDED. While a unit is in another state, its parameters are poison
(sharding/poison.py): the right shape, no values. Parameters of an UNSHARDED unit that are in flight after a step are
poison as well (deferred_gather). Summoned parameters (``full_params``) are views of a separate storage, whatever the
state of the flat buffers.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor, nn

from shardengine.comm import Coding, Collectives, Purpose, TransferOptions, Work
from shardengine.errors import InternalError
from shardengine.offload import NOW, Done, ShardStore
from shardengine.sharding import SHARDED, Bucket, Elsewhere, FlatBuffer, Layout, mark_weights, reveal
from shardengine.stages import Placement


class UnshardState(enum.Enum):
    """The state of a unit's weights."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


_LEGAL = {
    (UnshardState.SHARDED, UnshardState.UNSHARDING),
    (UnshardState.UNSHARDING, UnshardState.UNSHARDED),
    (UnshardState.UNSHARDED, UnshardState.SHARDED),
}


@dataclass(frozen=True)
class Member:
    """A parameter of a unit: the user's object, its index in the layout, its flat buffer and slot."""

    index: int
    parameter: nn.Parameter
    flat_buffer: FlatBuffer
    slot: int

    def show(self, tensor: Tensor) -> None:
        """Let the user's parameter show ``tensor``."""
        reveal(self.parameter, tensor)

    def hide(self, elsewhere: Elsewhere = SHARDED) -> None:
        """Turn the user's parameter into poison."""
        self.flat_buffer.hide(self.parameter, self.slot, elsewhere)

    @property
    def view(self) -> Tensor:
        """The parameter's view of the flat buffer."""
        return self.flat_buffer.views[self.slot]


@dataclass(frozen=True, eq=False)
class Summoned:
    """The full weights of a unit for one ``full_params``.

    shown: the tensors that the parameters of these members show · parts: whole buckets; neighbours share a storage, so
    that a parameter in several of them is one view.
    """

    shown: dict[Member, Tensor]
    parts: dict[Bucket, Tensor]

    @property
    def members(self) -> frozenset[int]:
        """The indices of its members."""
        return frozenset(member.index for member in self.shown)


class Keeper(Protocol):
    """Saves writes of the user's code to weights that are about to be released."""

    def take(self, unit: Unit) -> None:
        """Save writes to ``unit``: its flat buffers are released next."""

    def take_summoned(self, unit: Unit, held: Summoned, *, writable: bool) -> None:
        """Save writes to ``held``, summoned weights of ``unit`` that are released next.

        writable: rank 0's weights are kept, and known.
        """


class Unit:
    """One module's flat buffers. ``index`` 0 is the root: all parameters that are in no block."""

    def __init__(
        self, index: int, name: str, flat_buffers: list[FlatBuffer], members: list[Member], layout: Layout
    ) -> None:
        self.index = index
        self.name = name
        self.flat_buffers = flat_buffers
        self.members = members
        self.trainable = frozenset(m.index for m in members if layout.parameters[m.index].trainable)
        self.elements = sum(flat_buffer.layout.length for flat_buffer in flat_buffers)
        """The elements of all flat buffers, padding included."""
        self._by_slot = [(flat_buffer, _in_slots(flat_buffer, members)) for flat_buffer in flat_buffers]
        self._names = {m.index: layout.parameters[m.index].name for m in members}
        self.state = UnshardState.UNSHARDED
        self._loading: list[Done] = []
        self._in_flight: list[Work] = []
        self._summoned: list[Summoned] = []
        self._held: frozenset[int] = frozenset()
        self.was_summoned = False
        """Whether a graph may exist, since ``forget_summoned``, that uses weights in a storage that was released."""
        self._keeper: Keeper | None = None
        self._keeps_inside = False
        """Whether some bucket may keep its shard group's slice of the weights."""

    def ask(self, keeper: Keeper) -> None:
        """Let ``keeper`` look at weights before they are released, from now on."""
        self._keeper = keeper

    def name_of(self, parameter: int) -> str:
        """Return the name of a parameter of the unit, given by its index in the layout."""
        return self._names[parameter]

    @property
    def has_frozen(self) -> bool:
        """Whether some parameter gets no gradient."""
        return len(self.trainable) < len(self.members)

    @property
    def summoned_bytes(self) -> int:
        """Bytes of the summoned weights of every ``full_params``."""
        return sum(part.nbytes for held in self._summoned for part in held.parts.values())

    @property
    def summoned(self) -> bool:
        """Whether all of its parameters are summoned (``full_params``)."""
        return bool(self._summoned) and len(self._held) == len(self.members)

    @property
    def is_whole(self) -> bool:
        """Whether weights that a forward saved can be read."""
        return self.state is UnshardState.UNSHARDED

    def is_summoned(self, parameter: int) -> bool:
        """Whether a parameter of the unit, given by its index in the layout, is summoned (``full_params``)."""
        return parameter in self._held

    def detach_shards(self) -> None:
        """Give shards their own memory, and reshard. Called once, at start, from UNSHARDED.

        On one rank without offload the shard is the whole flat buffer, and no memory moves: the parameters become
        poison.
        """
        for flat_buffer in self.flat_buffers:
            for bucket in flat_buffer.buckets:
                if bucket.weight_store is None and bucket.has_own_shard:
                    bucket.detach_shard(flat_buffer.homes.weights)
        self.reshard()

    def buckets(self) -> Iterator[Bucket]:
        """Yield every bucket, in layout order."""
        for flat_buffer in self.flat_buffers:
            yield from flat_buffer.buckets

    def stores(self) -> Iterator[ShardStore]:
        """Yield every store of its buckets."""
        for bucket in self.buckets():
            yield bucket.state_store
            if bucket.weight_store is not None:
                yield bucket.weight_store

    def unshard(
        self, collectives: Collectives, purpose: Purpose = Purpose.WEIGHTS, coding: Coding | None = None
    ) -> None:
        """SHARDED → UNSHARDING: start the all-gather of every bucket. After an error the unit is SHARDED.

        coding: encodes floating-point weights that rest sharded for the transfer.
        """
        try:
            for flat_buffer in self.flat_buffers:
                flat_buffer.allocate()
        except BaseException:
            for flat_buffer in self.flat_buffers:
                flat_buffer.release()
            raise
        self._move(UnshardState.UNSHARDING)
        try:
            for bucket in self.buckets():
                loaded = bucket.load_shard()
                if loaded.end is not NOW:
                    self._loading.append(loaded.end)
                with collectives.mesh.platform.loads.is_current() if loaded.on_loads else nullcontext():
                    coded = loaded.placement is bucket.weight_placement and bucket.full.is_floating_point()
                    options = TransferOptions(coding if coded else None)
                    whole = bucket.full, loaded.placement, Placement.REPLICATED
                    self._in_flight.append(collectives.move(*whole, bucket.layout, purpose, None, options))
        except BaseException:
            self._abort_unshard()
            raise

    def load_ahead(self) -> None:
        """Load the shards of offloaded weights, as far as there is room, because the unit is unsharded soon."""
        for bucket in self.buckets():
            bucket.prefetch_shard()

    def wait_for_unshard(self) -> None:
        """UNSHARDING → UNSHARDED: wait, and show the weights to the user's parameters."""
        for loaded in self._loading:
            loaded.wait()
        for whole in self._in_flight:
            whole.wait()
        self._loading.clear()
        self._in_flight.clear()
        self._move(UnshardState.UNSHARDED)
        self.show()

    def reshard(self, *, abandon: bool = False, keep_inside: bool = False) -> None:
        """UNSHARDED → SHARDED: free the full weights.

        abandon: as in ``FlatBuffer.release``, views live on · keep_inside: keep the shard group's slice of the weights
        for the next ``unshard``.
        """
        if self._keeper is not None and self.state is UnshardState.UNSHARDED:
            self._keeper.take(self)
        self._move(UnshardState.SHARDED)
        if keep_inside or self._keeps_inside:
            for bucket in self.buckets():
                bucket.keep_inside(keep_inside)
            self._keeps_inside = keep_inside
        self.show()
        for flat_buffer in self.flat_buffers:
            flat_buffer.release(abandon=abandon)

    def recover(self) -> None:
        """End summons and UNSHARDING after a failure. Collectives in flight keep the storage that they write into."""
        self._hold([])
        if self.state is UnshardState.UNSHARDING:
            self._abort_unshard()
        self.show()

    def _abort_unshard(self) -> None:
        """UNSHARDING → SHARDED; the only way back."""
        for loaded in self._loading:
            loaded.wait()  # the released memory is reused after the copy
        self._loading.clear()
        self._in_flight.clear()
        self.state = UnshardState.SHARDED
        for flat_buffer in self.flat_buffers:
            flat_buffer.release(abandon=True)

    def forget_gathered(self) -> None:
        """Drop weights that were gathered ahead, because they are stale."""
        if self.state is UnshardState.UNSHARDING:
            self.wait_for_unshard()
            self.reshard()

    def relocate(self) -> None:
        """Move the weights of an UNSHARDED unit to other memory: a collective in flight may write into the old one."""
        for flat_buffer in self.flat_buffers:
            flat_buffer.relocate()
        self.show()

    def show(self) -> None:
        """Show weights or poison, depending on the state, to the user's parameters that are not summoned."""
        full = self.state is UnshardState.UNSHARDED
        for member in self.members:
            if member.index in self._held:
                continue
            if full:
                member.show(member.view)
            else:
                member.hide()

    def misplaced(self, hidden: Collection[int] = ()) -> list[Member]:
        """Return the members whose parameter does not show the tensor of the last ``show``.

        hidden: parameters that are poison in any case.
        """
        full = self.state is UnshardState.UNSHARDED
        found: list[Member] = []
        with torch._C.DisableTorchFunctionSubclass():  # poison is asked as fast as any other tensor
            for member in self.members:
                if member.index in self._held:
                    continue
                view, shown = member.view, member.parameter
                if not full or member.index in hidden:
                    view = member.flat_buffer.poisons[member.slot]
                if shown.data_ptr() != view.data_ptr() or shown.dtype is not view.dtype:
                    found.append(member)
        return found

    def written(self, versions: Sequence[int]) -> list[Member]:
        """Return the members whose parameter was written or shows another tensor; the unit must be UNSHARDED.

        Writes that torch does not count are not found. versions: of each parameter of the layout, before.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return [
                member
                for member in self.members
                if (
                    member.parameter._version != versions[member.index]
                    or member.parameter.data_ptr() != member.view.data_ptr()
                )
                and member.index not in self._held
            ]

    def summon(self, collectives: Collectives, wanted: Collection[int]) -> Summoned:
        """Show full weights of the parameters ``wanted`` that are not summoned yet, in separate storages.

        So code in ``full_params`` cannot harm the flat buffers. Only buckets that hold some of these parameters are
        gathered.
        """
        members = frozenset(wanted) - self._held
        names = {self._names[index] for index in members}
        parts: dict[Bucket, Tensor] = {}
        shown: dict[Member, Tensor] = {}
        for flat_buffer, in_slots in self._by_slot:
            for run in _runs(flat_buffer, names):
                first, end = run[0].layout.start, run[-1].layout.end
                fresh = flat_buffer.flat.new_empty(end - first)
                mark_weights(fresh)
                for bucket in run:
                    part = parts[bucket] = fresh[bucket.layout.start - first : bucket.layout.end - first]
                    bucket.own_slice(part, bucket.weight_placement).copy_(bucket.shard())
                    collectives.move(
                        part, bucket.weight_placement, Placement.REPLICATED, bucket.layout, Purpose.WHOLE_WEIGHTS
                    ).wait()
                for member, slot in zip(in_slots, flat_buffer.layout.slots, strict=True):
                    if member.index in members and first <= slot.start < end:
                        shown[member] = flat_buffer.view_of(fresh, member.slot, first)
        for member, view in shown.items():
            member.show(view)
        self.was_summoned |= torch.is_grad_enabled()
        held = Summoned(shown, parts)
        self._hold([*self._summoned, held])
        return held

    def release_summoned(self, collectives: Collectives, held: Summoned, *, writable: bool) -> None:
        """End ``summon``; with ``writable`` rank 0's contents become the weights of all ranks.

        Does nothing if ``recover`` has ended it.
        """
        if held not in self._summoned:
            return
        if self._keeper is not None:
            self._keeper.take_summoned(self, held, writable=writable)
        self._hold([other for other in self._summoned if other is not held])
        if writable:
            self.forget_gathered()
        for bucket, part in held.parts.items() if writable else ():
            collectives.broadcast(part, bucket.layout, Purpose.WHOLE_WEIGHTS)
            bucket.shard(writable=True).copy_(bucket.own_slice(part, bucket.weight_placement))
            if self.state is UnshardState.UNSHARDED:
                bucket.full.copy_(part)
            bucket.adopt_weights()
        self.show()

    def let_go(self, held: Summoned) -> None:
        """End ``summon`` after an error, without looking for writes. Local."""
        if held in self._summoned:
            self._hold([other for other in self._summoned if other is not held])
            self.show()

    def forget_summoned(self) -> None:
        """End a window, and with it its graphs."""
        self.was_summoned = bool(self._summoned)

    def _hold(self, summoned: list[Summoned]) -> None:
        self._summoned = summoned
        self._held = frozenset().union(*(held.members for held in summoned))

    @property
    def keeps_inside(self) -> bool:
        """Whether its shard group's slice is kept for the next ``unshard``."""
        return any(bucket.kept_inside is not None for bucket in self.buckets())

    def forget_kept(self) -> None:
        """Drop the shard group's slice that is kept for the next ``unshard``."""
        if self._keeps_inside:
            for bucket in self.buckets():
                bucket.keep_inside(False)
            self._keeps_inside = False

    def owns_storage(self, keys: Collection[int]) -> bool:
        """Whether one of the storages with identity ``keys`` is a flat buffer of this unit."""
        return any(flat_buffer.storage_key in keys for flat_buffer in self.flat_buffers)

    def summons_storage(self, key: int) -> bool:
        """Whether the storage with identity ``key`` holds summoned weights of this unit."""
        return any(part.untyped_storage()._cdata == key for held in self._summoned for part in held.parts.values())

    def spans(self) -> list[tuple[int, int]]:
        """Return the first and last address of each part of its weights in memory now, without summoned ones."""
        flats = [flat_buffer.flat for flat_buffer in self.flat_buffers if flat_buffer.storage_bytes]
        return [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in flats]

    def _move(self, target: UnshardState) -> None:
        if (self.state, target) not in _LEGAL:
            raise InternalError(f"unit {self.name!r}: illegal move from {self.state.name} to {target.name}")
        self.state = target


def _in_slots(flat_buffer: FlatBuffer, members: Sequence[Member]) -> list[Member]:
    """Return the members in ``flat_buffer``, in the order of its slots."""
    return sorted((member for member in members if member.flat_buffer is flat_buffer), key=lambda member: member.slot)


def _runs(flat_buffer: FlatBuffer, names: Collection[str]) -> Iterator[list[Bucket]]:
    """Yield the buckets that hold some of the parameters ``names``, neighbours together."""
    for wanted, run in groupby(flat_buffer.buckets, lambda bucket: any(name in names for name in bucket.layout.names)):
        if wanted:
            yield list(run)


def weight_bytes(units: Sequence[Unit]) -> Counter[str]:
    """Return the bytes that hold weights now, by tier: flat buffers, separate shards, and summoned weights."""
    flat_buffers = [flat_buffer for unit in units for flat_buffer in unit.flat_buffers]
    found = Counter(device=sum(unit.summoned_bytes for unit in units))
    for flat_buffer in flat_buffers:
        found["device"] += flat_buffer.storage_bytes
        found["cpu"] += 0 if flat_buffer.offloaded is None else flat_buffer.offloaded.nbytes
        for bucket in flat_buffer.buckets:
            if (store := bucket.weight_store) is not None:
                found[store.tier_now] += sum(store.sizes.values())
    return found
