"""Flat storage and the views into it. Owns every tensor that holds weights between steps.

Must not know: callers, process groups, stages, hooks.

A flat buffer's storage is resized (to 0 or full size), not replaced, because autograd keeps views of it from forward to
backward. It is replaced if somebody else must keep it: a view outside (``release(abandon=True)``, ``offload``,
``forsake``), or a collective that may still write into it (``relocate``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardengine.kernels import StateForm
from shardengine.offload import NOW, Done, Homes, MemoryStore, Platform, ShardStore, Tier, host_copy
from shardengine.sharding.layout import BucketLayout, FlatBufferLayout, ParameterSpec
from shardengine.sharding.poison import Elsewhere, hide, poison
from shardengine.stages import Placement

SHARD = "shard"
"""The name of sharded weights in their store."""
MASTER = "master"
"""The name of master weights in a bucket's state store, if the optimizer does not step the weights themselves."""
Span = tuple[int, int]
"""Elements [first, end) of a flat buffer."""
_AT_ONCE = 2**22
"""Elements of weights that are compared with their masters at once."""


def shaped(flat: Tensor, spec: ParameterSpec) -> Tensor:
    """A parameter's elements in memory order (1-D) → a view with the parameter's shape and strides."""
    view = flat.view(spec.shape_in_memory)
    return view.permute(spec.order_back) if spec.order else view


def in_memory_order(tensor: Tensor, spec: ParameterSpec) -> Tensor:
    """A tensor of the parameter's shape → a view whose own order of elements is the parameter's order in memory."""
    return tensor.permute(spec.order) if spec.order else tensor


_MARK = "shardengine_weights"


def mark_weights(tensor: Tensor) -> None:
    """Mark the storage of ``tensor`` as one that holds weights or buffers of a module."""
    setattr(tensor.untyped_storage(), _MARK, True)


def holds_weights(storage: torch.UntypedStorage) -> bool:
    """Whether ``storage`` was marked so. The cost is the same for any model; the mark lives as long as the storage."""
    return getattr(storage, _MARK, False)


class LoadedShard(NamedTuple):
    """A rank's part of a bucket that is being copied to its place in ``full``.

    placement: of the part, to gather from · on_loads: it comes from another tier, so it must be gathered on the same
    stream (``Platform.loads``) · end: the end of the copy.
    """

    placement: Placement
    on_loads: bool
    end: Done


class Bucket:
    """A range of a flat buffer: its ``full`` view (valid while the flat buffer is allocated) and this rank's ``shard``.

    - state_placement: the placement of master weights and optimizer state, and so of the elements that this rank steps.
    - weight_placement: the placement of weights between steps, after ``detach_shard``.
    - state_store: holds optimizer states, and master weights if these are not the weights themselves (low-precision
      weights, or weights in another tier).
    - weight_store: holds the shard after ``detach_shard``. Before that it is None, weights are REPLICATED, and the
      shard is a view of ``full``.
    - kept_inside: the shard group's slice of the weights from a forward to its backward, or None.

    They are made in this order: master weights (``begin_master``) while ``full`` is whole, then ``detach_shard``, then
    the states.
    """

    def __init__(
        self,
        layout: BucketLayout,
        flat_buffer: FlatBuffer,
        rank: int,
        state_store: ShardStore,
        state_placement: Placement,
        weight_placement: Placement = Placement.SHARDED,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.flat_buffer = flat_buffer
        self.full = flat_buffer.flat[layout.start : layout.end]
        self.state_placement = state_placement
        self.state_store = state_store
        self.weight_placement = weight_placement
        self.weight_store: ShardStore | None = None
        self.kept_inside: Tensor | None = None
        self.own = {each: layout.interval_of_rank(each, rank) for each in Placement}
        """This rank's elements at each placement: [first, end) in the flat buffer."""

    @property
    def placement(self) -> Placement:
        """The current placement of weights between steps."""
        return Placement.REPLICATED if self.weight_store is None else self.weight_placement

    @property
    def has_master(self) -> bool:
        """Whether there are master weights beside the weights."""
        return MASTER in self.state_store.sizes

    def begin_master(self, full: Tensor, dtype: torch.dtype) -> None:
        """Add master weights for the elements that this rank steps. full: their values, of the bucket's full length."""
        stepped = self.own_slice(full, self.state_placement)
        self.state_store.add({MASTER: stepped.to(dtype)})

    def adopt_slice(self, own: Tensor, master: torch.dtype | None, tier: Tier | None) -> None:
        """Begin with a shard in memory of its own, or in ``tier``.

        own: the values of this rank's slice, which nobody else has, in the weights' dtype or unrounded · master: the
        dtype of master weights, which are added from ``own``; None for none.
        """
        shard = own.to(self.full.dtype)
        if master is not None:
            kept = own.to(master)
            self.state_store.adopt({MASTER: kept.clone() if kept is shard else kept})
        self.weight_store = self._new_weight_store(tier)
        self.weight_store.adopt({SHARD: shard})

    def _new_weight_store(self, tier: Tier | None) -> ShardStore:
        return MemoryStore(self.flat_buffer.platform) if tier is None else tier.store()

    def begin_states(self, forms: Mapping[str, StateForm]) -> None:
        """Add zeros for each optimizer state of the elements that this rank steps."""
        count = self.layout.sizes[self.state_placement]
        self.state_store.add_zeros({name: (form.length(count), form.dtype) for name, form in forms.items()})

    def own_slice(self, full: Tensor, placement: Placement, of: Placement = Placement.REPLICATED) -> Tensor:
        """The elements that this rank holds at ``placement``, as a view of ``full``.

        of: the placement of ``full``; by default it has the bucket's full length.
        """
        first, end = self.own[placement]
        start, _ = self.own[of]
        return full[first - start : end - start]

    @property
    def interval(self) -> tuple[int, int]:
        """The elements of ``weights``, in coordinates of the flat buffer."""
        return self.own[self.placement]

    @property
    def state_interval(self) -> tuple[int, int]:
        """The elements that this rank steps, in coordinates of the flat buffer."""
        return self.own[self.state_placement]

    def weights(self, *, writable: bool = False) -> Tensor:
        """The weights that this rank keeps: the whole bucket if replicated, else the shard.

        writable: writes to them will be kept.
        """
        return self.full if self.weight_store is None else self.shard(writable=writable)

    def shard(self, *, writable: bool = False) -> Tensor:
        """This rank's slice of the weights, in the tier that keeps it. writable: writes to it will be kept."""
        if writable:
            self.kept_inside = None
        if self.weight_store is None:
            return self.own_slice(self.full, self.weight_placement)
        return self.weight_store.tensors(writable=writable)[SHARD]

    @property
    def has_own_shard(self) -> bool:
        """Whether the shard needs memory of its own.

        It does not with one rank and weights on the device: then ``full`` is the shard.
        """
        return (
            self.layout.sizes[self.weight_placement] < self.layout.length or self.flat_buffer.homes.weights is not None
        )

    def detach_shard(self, tier: Tier | None = None) -> None:
        """Copy the shard to memory of its own, or to ``tier``, so that ``full`` can be released."""
        store = self._new_weight_store(tier)
        store.add({SHARD: self.own_slice(self.full, self.weight_placement)})
        self.weight_store = store

    def stepped_weights(self, *, writable: bool = True) -> Tensor:
        """The weights of the elements that this rank steps. writable: writes will be kept."""
        return (
            self.own_slice(self.full, self.state_placement)
            if self.weight_store is None
            else self.shard(writable=writable)
        )

    def adopt_master(self) -> None:
        """After master weights were written, round them to the weights."""
        if self.has_master:
            self.stepped_weights().copy_(self.state_store.tensors()[MASTER])

    def adopt_weights(self, spans: Sequence[Span] | None = None) -> None:
        """After weights were written, update their master weights.

        A master keeps its bits if it still rounds to its weight. spans: the written elements, in coordinates of the
        flat buffer; None: all.
        """
        if not self.has_master or not (spans := self.unlike_masters(spans)):
            return
        for weight, master, differs in self._beside_masters(spans, writable=True):
            master.copy_(torch.where(differs, weight.to(master.dtype), master))

    def unlike_masters(self, spans: Sequence[Span] | None = None) -> list[Span]:
        """The parts of ``spans`` that this rank steps and whose weights are not their rounded masters.

        spans: None for everything.
        """
        own = self._meet(spans, self.state_interval) if self.has_master else []
        return [span for span in own if any(bool(differs.any()) for *_, differs in self._beside_masters([span]))]

    def _beside_masters(
        self, spans: Sequence[Span] | None, *, writable: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield weights, their masters, and a mask of the weights that are not their rounded masters.

        It yields part by part, to bound the memory.
        """
        weights = self.stepped_weights(writable=False)
        masters = self.state_store.tensors(writable=writable)[MASTER]
        for span in self._meet(spans, self.state_interval):
            own = self._at(span, self.state_interval, weights), self._at(span, self.state_interval, masters)
            for given, master in zip(own[0].split(_AT_ONCE), own[1].split(_AT_ONCE), strict=True):
                weight = given.to(master.device)
                yield weight, master, weight != master.to(weight.dtype)

    def keep(self, spans: Sequence[Span], whole: Tensor) -> None:
        """Store this rank's part of ``spans`` of ``whole`` in its shard, between two steps or during a pass.

        whole: all weights of the bucket, which somebody has written at ``spans`` (coordinates of the flat buffer).
        """
        self.kept_inside = None
        own, store = self._meet(spans, self.interval), self.weight_store
        if not own or (store is None and whole is self.full):
            return
        shard = self.full if store is None else store.check_out()[SHARD]
        for span in own:
            self._at(span, self.interval, shard).copy_(self._at(span, (self.layout.start, self.layout.end), whole))
        if store is not None:
            store.check_in()

    def kept(self, spans: Sequence[Span]) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's parts of ``spans``: the start of each part in the flat buffer, and its weights."""
        weights = self.weights()
        for span in self._meet(spans, self.interval):
            yield span[0], self._at(span, self.interval, weights)

    def unlike_shard(self, whole: Tensor, spans: Sequence[Span] | None = None) -> bool:
        """Whether ``whole``, all of the bucket's weights, differs in bits from this rank's weights at ``spans``.

        spans: None for everything. The host waits for the device.
        """
        if self.weight_store is None and whole is self.full:
            return False
        shard = self.weights()
        for span in self._meet(spans, self.interval):
            kept = self._at(span, self.interval, shard)
            shown = self._at(span, (self.layout.start, self.layout.end), whole)
            if bool((_bits(shown) != _bits(kept.to(shown.device))).any()):
                return True
        return False

    def _meet(self, spans: Sequence[Span] | None, interval: Span) -> list[Span]:
        """The parts of ``spans`` (None: of everything) in ``interval``."""
        given = [interval] if spans is None else spans
        cut = [(max(first, interval[0]), min(end, interval[1])) for first, end in given]
        return [(first, end) for first, end in cut if first < end]

    @staticmethod
    def _at(span: Span, interval: Span, values: Tensor) -> Tensor:
        """The elements ``span`` of ``values``, which hold ``interval`` of the flat buffer."""
        return values[span[0] - interval[0] : span[1] - interval[0]]

    @property
    def writes_file(self) -> bool:
        """Whether stepped weights are written to a file, which costs the same if they did not change."""
        return self.weight_store is not None and self.weight_store.in_file

    def begin_weights(self, *, blank: bool = False) -> Tensor:
        """The weights of the elements that this rank steps, for reads and writes until ``end_weights``.

        With ``steps_elsewhere`` they are read and written by copies behind the current stream. blank: the contents may
        be undefined, because all of them will be written.
        """
        self.kept_inside = None
        store, apart = self.weight_store, self.steps_elsewhere
        if store is None:
            return self.stepped_weights()
        if apart:
            store.pending.wait()
        return store.check_out(blank=blank, to_copy=apart)[SHARD]

    def end_weights(self, *, changed: bool, after: Done) -> None:
        """End ``begin_weights``. changed: they are written, when ``after`` is done."""
        if (store := self.weight_store) is not None:
            store.check_in(changed=changed, after=after)

    @property
    def weights_away(self) -> bool:
        """Whether the shard is offloaded: kept in a tier other than the device."""
        return self.weight_store is not None and self.weight_store.away

    @property
    def steps_elsewhere(self) -> bool:
        """Whether one of host and device computes the update and the other one keeps the weights."""
        return self.state_store.away != self.weights_away and self.flat_buffer.platform.has_own_memory

    def load_shard(self) -> LoadedShard:
        """Begin to copy this rank's part to its place in ``full``, ready to be gathered."""
        store, platform, end = self.weight_store, self.flat_buffer.platform, NOW
        if self.kept_inside is not None:
            self.own_slice(self.full, Placement.SHARDED_INSIDE).copy_(self.kept_inside)
            return LoadedShard(Placement.SHARDED_INSIDE, False, end)
        if store is not None:
            shard, place = store.check_out(to_copy=True)[SHARD], self.own_slice(self.full, self.weight_placement)
            try:
                if store.away:
                    end = platform.loads.copy(shard, place, platform.mark(), store.pending)
                else:
                    place.copy_(shard)
            finally:
                store.check_in(changed=False, after=end)
        return LoadedShard(self.weight_placement, store is not None and store.away, end)

    def leave(self, *, weights: bool) -> tuple[Placement, ShardStore] | None:
        """Give away the tensor that outlives the engine, with its placement.

        It is the master weights if they hold bits that the weights do not, else the weights. Returns None if there is
        nothing to keep. The bucket does not keep that tensor; ``drop`` frees the states. weights: the weights must
        outlive the engine as well.
        """
        if self.has_master and (weights or self.state_store.tensors()[MASTER].dtype is not self.full.dtype):
            store = self.flat_buffer.new_state_store(self.layout.index)
            store.add({MASTER: self.state_store.tensors()[MASTER]})
            return self.state_placement, store
        if not weights:
            return None
        if self.weight_store is None:  # with one rank the shard is the whole bucket
            self.detach_shard()
        kept, self.weight_store = self.weight_store, None
        return None if kept is None else (self.weight_placement, kept)

    def keep_inside(self, keep: bool) -> None:
        """Before ``full`` is released: keep the shard group's slice of it, or with ``keep`` False drop a kept slice."""
        if not keep:
            self.kept_inside = None
        elif self.kept_inside is None:
            self.kept_inside = self.own_slice(self.full, Placement.SHARDED_INSIDE).clone()

    def drop(self) -> None:
        """Free all memory of the bucket."""
        self.state_store.drop()
        self.kept_inside = None
        if self.weight_store is not None:
            self.weight_store.drop()
            self.weight_store = None

    def prefetch_shard(self) -> None:
        """Prepare the shard in its store, because it will be loaded soon."""
        if self.weight_store is not None and self.kept_inside is None:
            self.weight_store.prefetch()


def _bits(values: Tensor) -> Tensor:
    """``values`` viewed as integers, which are equal if the bits are."""
    return values.view(_INTEGERS.get(values.element_size(), torch.uint8))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FlatBuffer:
    """One flat storage with a view per parameter (``views[i]`` belongs to ``layout.slots[i]``).

    platform: of its device · at_rest: the placement of its buckets' weights once they are detached, and the placement
    of master weights and optimizer state · homes: the tiers of state that is kept elsewhere than on the device.
    """

    def __init__(
        self,
        layout: FlatBufferLayout,
        specs: list[ParameterSpec],
        dtype: torch.dtype,
        platform: Platform,
        rank: int,
        at_rest: tuple[Placement, Placement] = (Placement.SHARDED, Placement.SHARDED),
        homes: Homes = Homes(),  # noqa: B008  (frozen)
    ) -> None:
        rests, state = at_rest
        self.layout = layout
        self.specs = specs
        self.dtype = dtype
        self.platform = platform
        self.device = platform.device
        self.homes = homes
        self.offloaded: Tensor | None = None
        self._allocate_views()
        self.buckets = [Bucket(b, self, rank, self.new_state_store(b.index), state, rests) for b in layout.buckets]
        self.poisons = [poison(dtype, spec.shape, self.device) for spec in specs]
        self._hidden_names = [f"parameter {spec.name!r} (rank {rank})" for spec in specs]

    def hide(self, parameter: nn.Parameter, number: int, elsewhere: Elsewhere) -> None:
        """Let the parameter of slot ``number`` show that its weights are elsewhere (``poison.hide``)."""
        hide(parameter, self.poisons[number], self._hidden_names[number], elsewhere)

    def new_state_store(self, index: int) -> ShardStore:
        """An empty store in the tier where bucket ``index`` keeps master weights and optimizer state."""
        return self.homes.state[index].store() if index in self.homes.state else MemoryStore(self.platform)

    def _allocate_views(self) -> None:
        self._home = self.platform.here()
        with torch.inference_mode(False):
            self.flat = torch.empty(self.layout.length, dtype=self.dtype, device=self.device)
            for start, end in self.layout.gaps:  # all else is written before it is read; zeros would take memory
                self.flat[start:end].zero_()
            self.views = self.views_of(self.flat)
        mark_weights(self.flat)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """The view of each slot, with its parameter's shape, of a tensor as long as the flat buffer."""
        return [self.view_of(flat, number) for number in range(len(self.specs))]

    def view_of(self, flat: Tensor, number: int, first: int = 0) -> Tensor:
        """The view of slot ``number``, with its parameter's shape, of ``flat``.

        first: the element of the flat buffer that ``flat`` begins with.
        """
        slot = self.layout.slots[number]
        return shaped(flat[slot.start - first : slot.end - first], self.specs[number])

    @property
    def is_stepped(self) -> bool:
        """Whether an optimizer steps some parameter in it."""
        return any(spec.is_stepped for spec in self.specs)

    @property
    def storage_bytes(self) -> int:
        """Bytes allocated now."""
        return self.flat.untyped_storage().nbytes()

    @property
    def storage_key(self) -> int:
        """The identity of the storage, to recognise views of it."""
        return self.flat.untyped_storage()._cdata

    def allocate(self) -> None:
        """Grow the storage to full size; the contents are undefined."""
        if self.storage_bytes == 0:
            self.flat.untyped_storage().resize_(self.layout.length * self.layout.itemsize)

    def release(self, *, abandon: bool = False) -> None:
        """Free the storage, unless it holds shards.

        abandon: somebody holds a view, so leave this storage to it and take a new one.
        """
        if all(bucket.weight_store is not None for bucket in self.buckets):
            self._free(abandon=abandon)

    def _free(self, *, abandon: bool = False) -> None:
        if not abandon:
            try:
                self.flat.untyped_storage().resize_(0)
                return
            except RuntimeError:
                pass  # Tensor.numpy() on any view makes a storage non-resizable for good
        self._allocate_views()
        self._cut()
        self.flat.untyped_storage().resize_(0)

    def let_go(self) -> None:
        """Drop the weights; nobody may use them through the flat buffer any more.

        A view that somebody holds keeps their memory allocated.
        """
        self.platform.come_home(self._home)
        self.flat = self.flat.new_empty(0)
        self.views = []
        self._cut()

    def relocate(self) -> None:
        """Copy the contents to a new storage; the old one belongs to whoever still holds it."""
        before, home = self.flat, self._home
        self._allocate_views()
        self.flat.copy_(before)
        self._cut()
        self.platform.come_home(home)

    def _cut(self) -> None:
        """Make the buckets views of a newly built storage."""
        for bucket in self.buckets:
            bucket.full = self.flat[bucket.layout.start : bucket.layout.end]

    def offload(self, *, pinned: bool) -> None:
        """Move the weights on the device to host memory until ``reload``. Nobody may use them in between.

        An outside view of the old memory stays valid, and keeps that memory allocated.
        """
        for bucket in self.buckets:
            if bucket.weight_store is not None:
                bucket.weight_store.offload(pinned=pinned)
        if self.storage_bytes and self.offloaded is None:
            self.offloaded = host_copy(self.flat, self.platform, pinned=pinned)
            self.let_go()

    def reload(self) -> None:
        """Move the weights back to the device.

        If there is no room it raises, and weights that are not moved yet stay in host memory.
        """
        for bucket in self.buckets:
            if bucket.weight_store is not None:
                bucket.weight_store.reload()
        if self.offloaded is not None:
            self._allocate_views()
            self.flat.copy_(self.offloaded)
            self._cut()
            self.offloaded = None

    def views_now(self) -> list[Tensor]:
        """Each slot's whole weights: views of the storage, or of the host memory that ``offload`` moved them to."""
        return self.views if self.offloaded is None else self.views_of(self.offloaded)

    def forsake(self) -> None:
        """Free all memory, because another flat buffer has taken over. Outside views keep theirs."""
        self.let_go()
        self.offloaded = None
        for bucket in self.buckets:
            bucket.drop()
