"""Tiers: where a resting shard lives, and which of them each bucket's optimizer state rests in.

Owns: the choice of a bucket's tier. Must not know: buckets' contents, the step.

[Note: Tiers] There are three: ``device`` (the memory that the model is computed in),
``cpu`` (the host's) and ``nvme`` (a file). What rests on the host or in a file is stepped by the CPU. A tier changes
where bytes are and who computes, never what is computed: every tier gives the same bits.
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
"""Of what a device has free: as much is the engine's where the config names no ``device_memory``. The rest is for
activations, for buffers of NCCL and cuBLAS, and for what lies between the blocks of torch's allocator."""


class Tier(Protocol):
    """A place for resting shards away from the weights."""

    name: str

    def store(self) -> ShardStore:
        """A new, empty store."""
        ...

    def reserve(self, forms: Forms) -> None:
        """Take room now for what will be added to one of its stores; OffloadError where there is none."""
        ...


@dataclass(frozen=True)
class Homes:
    """What rests away from the device. state: each such bucket's tier, by index · weights: that of sharded weights."""

    state: Mapping[int, Tier] = field(default_factory=dict)
    weights: Tier | None = None

    def needs_copy(self, index: int) -> bool:
        """Whether bucket ``index`` is stepped where its weights are not."""
        place = self.state[index].name if index in self.state else "device"
        return place != "device" and (self.weights is None or {place, self.weights.name} != {"cpu"})


class Tiers:
    """The tiers of one engine: which of its buckets rest where. One file for each directory, whatever rests in it."""

    def __init__(self, zero: ZeroConfig, aio: AioConfig, rank: int, platform: Platform) -> None:
        self._platform = platform
        self._ratio = zero.offload_optimizer.ratio
        self.device_memory = self._most = zero.offload_optimizer.device_memory or 0
        """Bytes of the device that ``"ratio": "auto"`` may fill, the same on every rank; where the config names none,
        whoever opens the tiers says how many are free (``share``)."""
        self.source = "device_memory"
        """Where ``device_memory`` comes from, for people."""
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
        # masters and states are stepped where they are: nothing of them crosses
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
        """The files that something rests in."""
        return [file.path for file in self._files.values()]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory that the buffers of all tiers take, once each was needed."""
        return sum(tier.buffer_bytes for tier in (self._state, self._weights) if isinstance(tier, FileTier))

    def free_reserved(self) -> None:
        """What was reserved in the files, and nothing was added for, is not needed."""
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
        """Whether the ratio is found here (``"auto"``)."""
        return self._ratio == "auto"

    def share(self, free: int) -> None:
        """For a ratio "auto" without ``device_memory``: every rank has ``free`` bytes of its device. The engine fills
        ``SHARE`` of them, and more only where it does not fit into that with everything away."""
        self.device_memory, self._most = int(SHARE * free), free
        self.source = f"{SHARE:.0%} of the {free} that the rank with the least has free; device_memory says otherwise"

    def homes(self, lengths: Sequence[int], device_bytes: Callable[[Homes], int]) -> Homes:
        """What rests away. lengths: elements of all buckets · device_bytes: what the device holds with some homes.

        Those are away whose gradients complete first, so that most of the way is behind backward: the first ones, up
        to the bucket with which they come nearest to ``ratio`` of all elements. "auto": the fewest with which the
        device's bytes fit into ``device_memory``; UsageError where they do not even with all of them (``share``).
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
                "stage3_prefetch_bucket_size, whose buffers are counted"
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
