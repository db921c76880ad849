"""Flat storage and views into it. Owns every tensor that weights rest in, and the pool of transient buffers.

Must not know: who calls it, process groups, stages, hooks.

An arena's storage is resized (0 or full), not replaced, because autograd keeps views of it from forward to backward. It
is replaced where it must be left to somebody else: to a view outside (``release(abandon=True)``, ``forsake``), to a
collective that may still write into it (``relocate``).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from shardengine.layout import ArenaLayout, BucketLayout, ParameterSpec


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


class Bucket:
    """A range of an arena: its ``full`` view (valid while the arena is allocated) and this rank's ``shard``.

    Resting replicated, the shard is a view of ``full``; resting sharded it is a tensor of its own. In fp32 training it
    is the master weight; otherwise ``master`` is: fp32, as long as what this rank steps (its slice, or all of it).
    """

    def __init__(self, layout: BucketLayout, arena: Arena, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.arena = arena
        self.full = arena.flat[layout.start : layout.end]
        self.shard = self.own_slice(self.full)
        self.separate = False
        self.master: Tensor | None = None

    def own_slice(self, full: Tensor) -> Tensor:
        """This rank's slice of a tensor of the bucket's full length."""
        first = self.rank * self.layout.slice_length
        return full[first : first + self.layout.slice_length]

    def detach_shard(self) -> None:
        """Give the shard its own memory, so that ``full`` can be released."""
        self.shard = self.shard.clone()
        self.separate = True

    def stepped(self, *, whole: bool) -> Tensor:
        """What an optimizer updates here: the master weights; ``whole``: every rank updates all of them."""
        if self.master is not None:
            return self.master
        return self.full if whole else self.shard

    def adopt_master(self) -> None:
        """The master weights were written: round them to the weights."""
        if self.master is not None:
            self.weights_of_master.copy_(self.master)

    def adopt_weights(self) -> None:
        """The weights were written by somebody: masters follow, but keep their bits where the weights still fit."""
        if self.master is not None:
            weights = self.weights_of_master
            changed = weights != self.master.to(weights.dtype)
            self.master.copy_(torch.where(changed, weights.float(), self.master))

    @property
    def weights_of_master(self) -> Tensor:
        """The weights that ``master`` is the master of. At one rank the slice is everything."""
        return self.full if self.master is not None and self.master.numel() > self.shard.numel() else self.shard

    def load_shard(self) -> None:
        """Copy the shard to its place in ``full``, ready to be gathered."""
        if self.separate:
            self.own_slice(self.full).copy_(self.shard)


class Arena:
    """One flat storage with a view per parameter (``views[i]`` belongs to ``layout.slots[i]``)."""

    def __init__(
        self, layout: ArenaLayout, specs: list[ParameterSpec], dtype: torch.dtype, device: torch.device, rank: int
    ) -> None:
        self.layout = layout
        self.specs = specs
        self.dtype = dtype
        self.device = device
        self._build()
        self.buckets = [Bucket(bucket, self, rank) for bucket in layout.buckets]
        self.poisons = [poison(dtype, spec.shape, device) for spec in specs]

    def _build(self) -> None:
        with torch.inference_mode(False):
            self.flat = torch.zeros(self.layout.length, dtype=self.dtype, device=self.device)
            self.views = self.views_of(self.flat)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Per slot, the view with the parameter's shape of a tensor as long as the arena."""
        return [
            shaped(flat[slot.start : slot.end], spec) for slot, spec in zip(self.layout.slots, self.specs, strict=True)
        ]

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
        if not all(bucket.separate for bucket in self.buckets):
            return
        if not abandon:
            try:
                self.flat.untyped_storage().resize_(0)
                return
            except RuntimeError:
                pass  # Tensor.numpy() on any view makes a storage non-resizable for good
        self._build()
        for bucket in self.buckets:
            bucket.full = self.flat[bucket.layout.start : bucket.layout.end]
        self.flat.untyped_storage().resize_(0)

    def relocate(self) -> None:
        """The same contents in a new storage; the old one belongs to whoever still holds it."""
        before = self.flat
        self._build()
        self.flat.copy_(before)
        for bucket in self.buckets:
            bucket.full = self.flat[bucket.layout.start : bucket.layout.end]
            if not bucket.separate:
                bucket.shard = bucket.own_slice(bucket.full)

    def forsake(self) -> None:
        """Another arena has taken over: let go of all memory. Who still holds a view of it keeps it."""
        self.flat = self.flat.new_empty(0)
        self.views = []
        for bucket in self.buckets:
            bucket.full = bucket.shard = self.flat
            bucket.master = None


class BufferPool:
    """Transient flat buffers, reused instead of freed: touching fresh pages costs more than the copies into them."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int, torch.device], list[Tensor]] = {}
        self.allocated_bytes = 0

    def take(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor with undefined contents."""
        free = self._free.get((dtype, length, device))
        if free:
            return free.pop()
        with torch.inference_mode(False):  # it is used again outside of the caller's
            buffer = torch.empty(length, dtype=dtype, device=device)
        self.allocated_bytes += buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Hand a buffer of ``take`` back. On CUDA its users are ordered by the stream that both calls run on."""
        self._free.setdefault((buffer.dtype, buffer.numel(), buffer.device), []).append(buffer)

    def forget(self) -> None:
        """Free every buffer, and count no longer those that were taken: their takers are gone."""
        self._free.clear()
        self.allocated_bytes = 0

    def clear(self) -> None:
        """Free every buffer that nobody has taken."""
        for (dtype, length, _), free in self._free.items():
            self.allocated_bytes -= len(free) * length * dtype.itemsize
        self._free.clear()
