"""Flat storage and views into it. Owns every tensor that weights rest in.

Must not know: who calls it, process groups, stages, hooks.

A flat buffer's storage is resized (0 or full), not replaced, because autograd keeps views of it from forward to
backward. It is replaced where it must be left to somebody else: to a view outside (``release(abandon=True)``, ``park``,
``forsake``), to a collective that may still write into it (``relocate``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardengine.offload import HOST, Done, Homes, MemoryShelf, Shelf, Tier, host_copy, is_apart, mark
from shardengine.sharding.layout import BucketLayout, FlatBufferLayout, ParameterSpec
from shardengine.stages import Placement

SHARD = "shard"
"""The name on the shelf of weights that rest in another tier."""
MASTER = "master"
"""The name on a bucket's shelf of what its optimizer steps, where that is not the weights themselves."""
_AT_ONCE = 2**22
"""Elements of weights that are compared with their masters at once."""


@functools.cache
def _poison_element(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((), _poison_value(dtype), dtype=dtype, device=device)


def _poison_value(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def restore_poison(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether somebody wrote into the poison of ``dtype`` (torch lets fills through); mends it. CPU only."""
    element = _poison_element(dtype, device)
    if device.type != "cpu" or element.isnan() or element == _poison_value(dtype):
        return False
    with torch.no_grad():
        element.fill_(_poison_value(dtype))
    return True


def poison(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """What a parameter shows while its weights are elsewhere: right shape and dtype, NaN, one element of memory.

    Reading gives NaN (integers: their smallest value), most writes raise, fills are found later (``restore_poison``),
    and nothing can crash the process, which reading a view of freed storage does. All poison of a dtype is one element.
    """
    with torch.inference_mode(False):
        return _poison_element(dtype, device).expand(shape)


def shaped(flat: Tensor, spec: ParameterSpec) -> Tensor:
    """A parameter's elements in memory order (1-D) → a view with the parameter's shape and strides."""
    view = flat.view(spec.shape_in_memory)
    return view.permute(spec.order_back) if spec.order else view


def in_memory_order(tensor: Tensor, spec: ParameterSpec) -> Tensor:
    """A tensor of the parameter's shape → a view whose own order of elements is the parameter's order in memory."""
    return tensor.permute(spec.order) if spec.order else tensor


_MARK = "shardengine_weights"


def mark_weights(tensor: Tensor) -> None:
    """Write down, on the storage of ``tensor`` itself, that weights or buffers of a module lie in it."""
    setattr(tensor.untyped_storage(), _MARK, True)


def holds_weights(storage: torch.UntypedStorage) -> bool:
    """Whether that was written down. Costs the same for any model, and is true for as long as the storage lives."""
    return getattr(storage, _MARK, False)


class Bucket:
    """A range of a flat buffer: its ``full`` view (valid while the flat buffer is allocated) and this rank's ``shard``.

    placement: where weights rest. REPLICATED, the shard is a view of ``full``; SHARDED (``detach_shard``) it is a
    tensor of its own · state: where master weights and optimizer state rest, and so what this rank steps. ``shelf``
    holds those: states, and the master weights where these are not the weights themselves: those of low-precision
    weights, and those that rest in another tier. They come in this order: the master weights (``begin_master``) while
    ``full`` is whole, ``detach_shard``, the states.
    """

    def __init__(
        self, layout: BucketLayout, flat_buffer: FlatBuffer, rank: int, shelf: Shelf, state: Placement
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.flat_buffer = flat_buffer
        self.full = flat_buffer.flat[layout.start : layout.end]
        self._shard = self.own_slice(self.full)
        self.placement = Placement.REPLICATED
        self.state = state
        self.rest: Shelf | None = None
        self._parked = False
        self._loaded = Done()
        self.shelf = shelf

    @property
    def has_master(self) -> bool:
        """Whether master weights are on the shelf."""
        return MASTER in self.shelf.sizes

    def begin_master(self, full: Tensor, dtype: torch.dtype | None = None) -> None:
        """Master weights with the values of ``full``, of the bucket's full length: of what this rank steps.

        dtype: of the masters, if it is another one than ``full`` has.
        """
        stepped = full if self.state is Placement.REPLICATED else self.own_slice(full)
        self.shelf.add({MASTER: stepped if dtype is None else stepped.to(dtype)})

    def begin_states(self, names: Sequence[str]) -> None:
        """Zeros for each optimizer state, of what this rank steps."""
        self.shelf.add_zeros(names, self.layout.elements(self.state))

    def own_slice(self, full: Tensor) -> Tensor:
        """This rank's slice of a tensor of the bucket's full length."""
        first = self.rank * self.layout.slice_length
        return full[first : first + self.layout.slice_length]

    @property
    def interval(self) -> tuple[int, int]:
        """Where ``weights`` lie in the flat buffer."""
        return self.layout.interval(self.placement, self.rank)

    @property
    def state_interval(self) -> tuple[int, int]:
        """Where what this rank steps lies in the flat buffer."""
        return self.layout.interval(self.state, self.rank)

    def weights(self, *, writable: bool = False) -> Tensor:
        """What rests on this rank: all of it where it is replicated, else the shard. writable: to be written to."""
        if self.placement is Placement.REPLICATED:
            return self.full
        return self.edit_shard() if writable else self.shard

    @property
    def shard(self) -> Tensor:
        """This rank's slice of the weights, where it rests. To be read: ``edit_shard`` is to be written to."""
        return self._shard if self.rest is None else self.rest.look()[SHARD]

    @shard.setter
    def shard(self, tensor: Tensor) -> None:
        """Where it has memory of its own."""
        self._shard = tensor

    def edit_shard(self) -> Tensor:
        """``shard``, to be written to."""
        self._loaded.wait_on_host()
        return self._shard if self.rest is None else self.rest.edit()[SHARD]

    @property
    def place(self) -> str:
        """The tier in which the shard rests, or is parked."""
        here = HOST.type if self._parked else "device"
        return here if self.rest is None else self.rest.place

    def park_shard(self, *, pinned: bool) -> None:
        """A shard with memory of its own on the device leaves it until ``unpark_shard``."""
        if self.placement is Placement.SHARDED and self.rest is None and not self._parked:
            self._parked, self.shard = True, host_copy(self.shard, pinned=pinned)

    def unpark_shard(self, device: torch.device) -> None:
        """Back to ``device``."""
        if self._parked:
            self._parked, self.shard = False, self.shard.to(device, copy=True)

    def detach_shard(self, tier: Tier | None = None) -> None:
        """Give the shard its own memory, or a place in ``tier``, so that ``full`` can be released."""
        self.placement = Placement.SHARDED
        if tier is None:
            self.shard = self.shard.clone()
        else:
            shelf = tier.shelf()
            shelf.add({SHARD: self.shard})
            self.rest, self.shard = shelf, self.full.new_empty(0)

    def stepped_weights(self, *, writable: bool = True) -> Tensor:
        """The weights of what this rank steps, to be written to unless it is said otherwise."""
        if self.state is Placement.REPLICATED:
            return self.full
        return self.edit_shard() if writable else self.shard

    def adopt_master(self) -> None:
        """The master weights were written: round them to the weights."""
        if self.has_master:
            self.stepped_weights().copy_(self.shelf.look()[MASTER])

    def adopt_weights(self) -> None:
        """The weights were written by somebody: masters follow, but keep their bits where the weights still fit."""
        if self.has_master:
            weights = self.stepped_weights(writable=False)
            if any(bool(changed.any()) for *_, changed in _written(weights, self.shelf.look()[MASTER])):
                for weight, master, changed in _written(weights, self.shelf.edit()[MASTER]):
                    master.copy_(torch.where(changed, weight.to(master.dtype), master))

    def begin_weights(self) -> Tensor:
        """The weights of the master weights, where they rest, to be written until ``end_weights``."""
        self._loaded.wait_on_host()
        if self.rest is not None and self.rest.place == "nvme":
            low = self.rest.overwrite()[SHARD]
            return low.copy_(self.shelf.take()[MASTER])  # what no group steps stays as it was
        return self.stepped_weights()

    @property
    def is_stepped_apart(self) -> bool:
        """Whether one of host and device computes the update, and the weights rest with the other."""
        return is_apart(self.flat_buffer.device) and self.shelf.away != (self.rest is not None)

    def end_weights(self, *, changed: bool) -> None:
        """They are written, if they ``changed`` at all."""
        if self.rest is not None and self.rest.place == "nvme":
            (self.rest.put if changed else self.rest.leave)()

    def take_weights(self) -> Tensor:
        """What is stepped where there are no master weights, until ``put_weights``."""
        self._loaded.wait_on_host()
        return self.stepped_weights() if self.rest is None else self.rest.take()[SHARD]

    def put_weights(self, stepped: Tensor) -> None:
        """``stepped``, which may be on another device than the weights rest on, become the weights."""
        if self.rest is not None:
            if (taken := self.rest.take()[SHARD]).device != stepped.device:
                taken.copy_(stepped)
            self.rest.put()

    def load_shard(self) -> None:
        """Copy the shard to its place in ``full``, ready to be gathered."""
        if self.rest is not None:
            self.own_slice(self.full).copy_(self.rest.take()[SHARD], non_blocking=True)
            self._loaded = mark(self.flat_buffer.device)
            self.rest.leave()
        elif self.placement is Placement.SHARDED:
            self.own_slice(self.full).copy_(self.shard)

    def fetch_shard(self) -> None:
        """The shard will be loaded soon."""
        if self.rest is not None:
            self.rest.fetch()


def _written(weights: Tensor, masters: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Weights, their masters, and where they are not those masters rounded, part by part, which bounds the memory."""
    for given, master in zip(weights.split(_AT_ONCE), masters.split(_AT_ONCE), strict=True):
        weight = given.to(master.device)
        yield weight, master, weight != master.to(weight.dtype)


class FlatBuffer:
    """One flat storage with a view per parameter (``views[i]`` belongs to ``layout.slots[i]``).

    state: where master weights and optimizer state of its buckets are placed · homes: what rests elsewhere than on
    ``device``.
    """

    def __init__(
        self,
        layout: FlatBufferLayout,
        specs: list[ParameterSpec],
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        state: Placement = Placement.SHARDED,
        homes: Homes = Homes(),  # noqa: B008  (frozen)
    ) -> None:
        self.layout = layout
        self.specs = specs
        self.dtype = dtype
        self.device = device
        self.homes = homes
        self.parked: Tensor | None = None
        self._build()
        tiers = homes.state
        self.buckets = [
            Bucket(b, self, rank, tiers[b.index].shelf() if b.index in tiers else MemoryShelf(device), state)
            for b in layout.buckets
        ]
        self.poisons = [poison(dtype, spec.shape, device) for spec in specs]

    def _build(self) -> None:
        with torch.inference_mode(False):
            self.flat = torch.zeros(self.layout.length, dtype=self.dtype, device=self.device)
            self.views = self.views_of(self.flat)
        mark_weights(self.flat)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Per slot, the view with the parameter's shape of a tensor as long as the flat buffer."""
        return [
            shaped(flat[slot.start : slot.end], spec) for slot, spec in zip(self.layout.slots, self.specs, strict=True)
        ]

    @property
    def is_stepped(self) -> bool:
        """Whether an optimizer steps some of it."""
        return any(spec.group >= 0 for spec in self.specs)

    @property
    def storage_bytes(self) -> int:
        """Bytes allocated at this moment."""
        return self.flat.untyped_storage().nbytes()

    @property
    def storage_key(self) -> int:
        """Identity of the storage, to find out whether some tensor is a view of it."""
        return self.flat.untyped_storage()._cdata

    def allocate(self) -> None:
        """Grow the storage to full size; the contents are undefined."""
        if self.storage_bytes == 0:
            self.flat.untyped_storage().resize_(self.layout.length * self.layout.itemsize)

    def release(self, *, abandon: bool = False) -> None:
        """Free the storage, unless shards lie in it. ``abandon``: someone holds a view; leave it, take a new one."""
        if all(bucket.placement is Placement.SHARDED for bucket in self.buckets):
            self._free(abandon=abandon)

    def _free(self, *, abandon: bool = False) -> None:
        if not abandon:
            try:
                self.flat.untyped_storage().resize_(0)
                return
            except RuntimeError:
                pass  # Tensor.numpy() on any view makes a storage non-resizable for good
        self._build()
        self._cut()
        self.flat.untyped_storage().resize_(0)

    def _let_go(self) -> None:
        self.flat = self.flat.new_empty(0)
        self.views = []
        self._cut()

    def relocate(self) -> None:
        """The same contents in a new storage; the old one belongs to whoever still holds it."""
        before = self.flat
        self._build()
        self.flat.copy_(before)
        self._cut()

    def _cut(self) -> None:
        """Buckets are views of the storage that was built anew."""
        for bucket in self.buckets:
            bucket.full = self.flat[bucket.layout.start : bucket.layout.end]
            if bucket.placement is Placement.REPLICATED:
                bucket.shard = bucket.own_slice(bucket.full)

    def park(self, *, pinned: bool) -> None:
        """Copy what is at rest here to host memory and let go of this, until ``unpark``; nobody may use it meanwhile.

        Who still holds a view of it keeps it, and its memory.
        """
        for bucket in self.buckets:
            bucket.park_shard(pinned=pinned)
        if self.storage_bytes and self.parked is None:
            self.parked = host_copy(self.flat, pinned=pinned)
            self._let_go()

    def unpark(self) -> None:
        """Everything is at rest on the device again. What there is no room for stays parked."""
        for bucket in self.buckets:
            bucket.unpark_shard(self.device)
        if self.parked is not None:
            self._build()
            self.flat.copy_(self.parked)
            self._cut()
            self.parked = None

    def resting_views(self) -> list[Tensor]:
        """Per slot its whole weights: of the storage, or where they are parked."""
        return self.views if self.parked is None else self.views_of(self.parked)

    def forsake(self) -> None:
        """Another flat buffer has taken over: let go of all memory. Who still holds a view of it keeps it."""
        self._let_go()
        self.parked = None
        for bucket in self.buckets:
            bucket.shard = self.flat
            bucket.shelf.drop()
            if bucket.rest is not None:
                bucket.rest.drop()
                bucket.rest = None
