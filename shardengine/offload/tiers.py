"""Tiers: where a resting shard lives, and which of them each bucket's optimizer state rests in.

Owns: the choice of a bucket's tier. Must not know: buckets' contents, the step.

[Note: Tiers] There are three: ``device`` (the memory that the model is computed in),
``cpu`` (the host's) and ``nvme`` (a file). What rests on the host or in a file is stepped by the CPU. A tier changes
where bytes are and who computes, never what is computed: every tier gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from shardengine.config_sections import AioConfig, OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from shardengine.offload.extents import Aio, ExtentFile
from shardengine.offload.file_tier import FileTier
from shardengine.offload.shelf import HOST, MemoryShelf, Shelf


class Tier(Protocol):
    """A place for resting shards away from the weights."""

    name: str

    def shelf(self) -> Shelf:
        """A new, empty shelf."""
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

    def __init__(self, zero: ZeroConfig, aio: AioConfig, rank: int) -> None:
        self._ratio = zero.offload_optimizer.ratio
        self._label, self._aio = f"rank {rank}", Aio(**vars(aio))
        self._files: dict[Path, ExtentFile] = {}
        try:
            self._state, self._weights = self._tier(zero.offload_optimizer), self._tier(zero.offload_param)
        except BaseException:
            self.close()
            raise

    def _tier(self, wanted: OffloadOptimizerConfig | OffloadParamConfig) -> Tier | None:
        if wanted.device == "cpu":
            return HostTier(pinned=wanted.pin_memory)
        if wanted.device != "nvme" or wanted.nvme_path is None:
            return None
        folder = Path(wanted.nvme_path).absolute()
        if folder not in self._files:
            self._files[folder] = ExtentFile(folder, self._label, self._aio)
        return FileTier(self._files[folder], wanted.buffer_count)

    @property
    def weights_place(self) -> str:
        """The tier of weights that rest sharded."""
        return "device" if self._weights is None else self._weights.name

    @property
    def files(self) -> list[Path]:
        """The files that something rests in."""
        return [file.path for file in self._files.values()]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory that the buffers of all tiers take, once each was needed."""
        return sum(tier.buffer_bytes for tier in (self._state, self._weights) if isinstance(tier, FileTier))

    def close(self) -> None:
        """Remove the files."""
        for file in self._files.values():
            file.close()

    def homes(self, lengths: Sequence[int]) -> Homes:
        """What rests away. lengths: elements of all buckets.

        Those are away whose gradients complete first, so that most of the way is behind backward: the first ones, up
        to the bucket with which they come nearest to ``ratio`` of all elements.
        """
        found: dict[int, Tier] = {}
        wanted, reached = self._ratio * sum(lengths), 0
        for index, length in enumerate(lengths):
            if self._state is None or reached + length / 2 > wanted:
                break
            found[index] = self._state
            reached += length
        return Homes(found, self._weights)


class HostTier:
    """The host's memory. pinned: page-locked, where there is a GPU to copy from and to."""

    name = "cpu"

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned and torch.cuda.is_available()

    def shelf(self) -> Shelf:
        """See ``Tier``."""
        return MemoryShelf(HOST, self.name, pinned=self._pinned)
