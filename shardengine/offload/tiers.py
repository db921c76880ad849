"""Tiers: the places of resting shards, and the tier of each bucket's optimizer state.

Owns: the choice of a bucket's tier. Must not know: buckets' contents, the step.

[Note: Tiers] There are three: ``device`` (the memory that the model is computed in), ``cpu`` (the host's) and ``nvme``
(a file). The CPU steps the state that rests on the host or in a file. A tier changes the place of bytes and the
processor that computes, never the result: every tier gives the same bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shardengine.config import AioConfig, OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from shardengine.errors import UsageError
from shardengine.offload.nvme import Aio, ExtentFile, FileTier
from shardengine.offload.platform import Platform
from shardengine.offload.shard_store import Forms, MemoryStore, ShardStore

SHARE = 0.6
"""The part of a device's free memory that the engine fills if the config names no ``device_memory``. The rest is for
activations, for buffers of NCCL and cuBLAS, and for gaps between the blocks of torch's allocator."""


class Tier(Protocol):
    """A place for offloaded shards."""

    name: str

    def store(self) -> ShardStore:
        """Return a new, empty store."""
        ...

    def reserve(self, forms: Forms) -> None:
        """Take room now for tensors that will be added to one of its stores. Raises OffloadError if there is none."""
        ...


@dataclass(frozen=True)
class Homes:
    """The offloaded shards.

    state: the tier of each offloaded bucket, by index · weights: the tier of sharded weights.
    """

    state: Mapping[int, Tier] = field(default_factory=dict)
    weights: Tier | None = None

    def needs_copy(self, index: int) -> bool:
        """Return whether bucket ``index`` is stepped in another place than its weights are."""
        place = self.state[index].name if index in self.state else "device"
        return place != "device" and (self.weights is None or {place, self.weights.name} != {"cpu"})


class Tiers:
    """The tiers of one engine and the choice of the offloaded buckets. All shards in one directory share one file."""

    def __init__(self, zero: ZeroConfig, aio: AioConfig, rank: int, platform: Platform) -> None:
        self._platform = platform
        self._ratio = zero.offload_optimizer.ratio
        self.device_memory = self._most = zero.offload_optimizer.device_memory or 0
        """Bytes of the device that ``"ratio": "auto"`` may fill, the same on every rank. If the config names none, the
        caller derives it from the free bytes (``share``)."""
        self.source = "device_memory"
        """The origin of ``device_memory``, as text for people."""
        self._label, self._aio = f"rank {rank}", Aio(**vars(aio))
        self._files: dict[Path, ExtentFile] = {}
        self._state: Tier | None = None
        self._weights: Tier | None = None
        try:
            self._state, self._weights = self._tier(zero.offload_optimizer), self._tier(zero.offload_param)
        except BaseException:
            self.close()
            raise

    def _tier(self, wanted: OffloadOptimizerConfig | OffloadParamConfig) -> Tier | None:
        # masters and states are stepped in place: the device never copies them
        pinned = isinstance(wanted, OffloadParamConfig) and wanted.pin_memory
        if wanted.device == "cpu":
            return HostTier(self._platform, pinned=pinned)
        if wanted.device != "nvme" or wanted.nvme_path is None:
            return None
        folder = Path(wanted.nvme_path).absolute()
        if folder not in self._files:
            instead = self._platform.file_in_place_of(folder)
            self._files[folder] = ExtentFile(folder, self._label, self._aio) if instead is None else instead
        return FileTier(self._files[folder], wanted.buffer_count, self._platform, pinned=pinned)

    @property
    def files(self) -> list[Path]:
        """The files in use."""
        return [file.path for file in self._files.values()]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory that the buffers of all tiers take, once each was needed."""
        return sum(tier.buffer_bytes for tier in (self._state, self._weights) if isinstance(tier, FileTier))

    def free_reserved(self) -> None:
        """Free the room that was reserved in the files and not used since."""
        for file in self._files.values():
            file.free_reserved()

    def close(self) -> None:
        """Remove the files, once no copy reads the buffers of their tiers."""
        try:
            for tier in (self._state, self._weights):
                if isinstance(tier, FileTier):
                    tier.take_back_lent()
        finally:
            for file in self._files.values():
                file.close()

    @property
    def chooses(self) -> bool:
        """Whether the ratio is ``"auto"``, so that it is computed here."""
        return self._ratio == "auto"

    def share(self, free: int) -> None:
        """Set ``device_memory`` for a ratio "auto", if the config names none: every rank has ``free`` bytes.

        The engine fills ``SHARE`` of them, and more only if it does not fit into that with everything offloaded.
        """
        self.device_memory, self._most = int(SHARE * free), free
        self.source = f"{SHARE:.0%} of the {free} that the rank with the least has free; device_memory says otherwise"

    def homes(self, lengths: Sequence[int], device_bytes: Callable[[Homes], int]) -> Homes:
        """Return the offloaded shards.

        lengths: elements of all buckets · device_bytes: the bytes on the device with some homes.

        The buckets whose gradients complete first are offloaded, so that most of their transfers overlap with backward:
        the first ones, up to the bucket that brings their elements nearest to ``ratio`` of all. For "auto" as few as
        possible, so that the device's bytes fit into ``device_memory``. Raises UsageError if they do not fit even with
        all of them offloaded (``share``).
        """
        if isinstance(self._ratio, str):
            return self._fitting(len(lengths), device_bytes)
        wanted, reached, count = self._ratio * sum(lengths), 0, 0
        for length in lengths:
            if reached + length / 2 > wanted:
                break
            reached, count = reached + length, count + 1
        return self._first(count)

    def _first(self, count: int) -> Homes:
        state = self._state
        return Homes({} if state is None else dict.fromkeys(range(count), state), self._weights)

    def _fitting(self, count: int, device_bytes: Callable[[Homes], int]) -> Homes:
        memory = self.device_memory
        # one bucket more never makes the device's part larger
        fewest = bisect_left(range(count + 1), True, key=lambda away: device_bytes(self._first(away)) <= memory)
        if fewest > count and (least := device_bytes(self._first(count))) > self._most:
            raise UsageError(
                f'"ratio": "auto" of offload_optimizer: expected that the device needs at most {self._most:,} bytes '
                f"(device_memory, or what the rank with the least memory had free), got "
                f"{least:,} with all of the optimizer's state away. Give it more memory, "
                "shard more (a higher stage, more ranks, offload_param), or take a smaller reduce_bucket_size or "
                "stage3_prefetch_bucket_size, whose buffers are counted",
                code="offload-ratio-nothing-fits",
            )
        return self._first(min(fewest, count))


class HostTier:
    """The host's memory. pinned: page-locked, so that the device of ``platform`` copies it fast."""

    name = "cpu"

    def __init__(self, platform: Platform, *, pinned: bool = False) -> None:
        self._platform = platform
        self._pinned = pinned

    def store(self) -> ShardStore:
        """See ``Tier``."""
        return MemoryStore(self._platform, self.name, pinned=self._pinned)

    def reserve(self, forms: Forms) -> None:
        """See ``Tier``: memory is taken when it is needed."""
