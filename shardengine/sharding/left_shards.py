"""The state that an engine closed without gathering leaves on its module, for the next engine to take over.

Owns: the values that are left, the stores that hold them, and whether they are taken over. Must not know: who gathers
them.

[Note: Left shards] Of each bucket the one tensor that was stepped is left, in its tier: the master weights if there
are any, else the weights. So the next engine begins as it would from the weights of a checkpoint. If weights are kept
whole on every rank, the module keeps them. Then only masters are left, because the weights do not have their bits. A
master is used only if the weights are still its rounded values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from shardengine.errors import UsageError
from shardengine.offload import Platform, ShardStore
from shardengine.sharding.bucket import Bucket
from shardengine.sharding.flat_slices import FlatSlice
from shardengine.sharding.inner import parts_of
from shardengine.sharding.layout import BucketLayout, Layout
from shardengine.sharding.poison import restore_poison
from shardengine.stages import Placement

_ATTRIBUTE = "_shardengine_left_shards"


class _Removable(Protocol):
    def remove(self) -> None: ...


class _Closable(Protocol):
    def close(self) -> None: ...


@dataclass
class LeftBucket:
    """One tensor of a bucket. untaken: elements that nobody has asked for yet."""

    layout: BucketLayout
    placement: Placement
    store: ShardStore
    untaken: int

    @property
    def values(self) -> Tensor:
        """This rank's part of the tensor."""
        (tensor,) = self.store.tensors().values()
        return tensor


class LeftShards:
    """The state that an engine left on one rank.

    hides: the module has no values of its own (sharded weights) · tiers: closed when everything is taken over.
    """

    def __init__(
        self, layout: Layout, parameters: Sequence[nn.Parameter], rank: int, tiers: _Closable, *, hides: bool
    ) -> None:
        self.layout = layout
        self.ranks = layout.ranks
        self.rank = rank
        self._hides = hides
        self._tiers = tiers
        self._parameters = list(parameters)
        self._number = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._shown: list[tuple[int, torch.dtype]] = []
        self._buckets: dict[str, list[LeftBucket]] = {}
        self._barriers: list[_Removable] = []
        self._begun = False

    @staticmethod
    def on(model: nn.Module) -> LeftShards | None:
        """Return the state that is left on ``model`` or on one of its modules, or None."""
        found = [left for module in model.modules() if (left := vars(module).get(_ATTRIBUTE)) is not None]
        if len(found) > 1:
            raise UsageError(
                f"{len(found)} modules of this model are from engines that were closed with restore=False: expected "
                "one such module; call initialize for each of them alone, or close() without restore=False",
                code="close-unrestored-several-modules",
            )
        return found[0] if found else None

    def keep(self, bucket: Bucket) -> None:
        """Take the tensor of ``bucket`` that is left."""
        kept = bucket.leave(weights=self._hides)
        if kept is not None:
            untaken = sum(piece.end - piece.start for piece in self.layout.pieces(bucket.layout))
            left = LeftBucket(bucket.layout, *kept, untaken)
            for name in dict.fromkeys(bucket.layout.names):
                self._buckets.setdefault(name, []).append(left)

    def attach(self, model: nn.Module, barriers: Sequence[_Removable]) -> None:
        """Store this on ``model``. Its parameters must not change until it is taken over."""
        self._shown = [(parameter.data_ptr(), parameter.dtype) for parameter in self._parameters]
        self._barriers = list(barriers)
        vars(model)[_ATTRIBUTE] = self

    def end(self, model: nn.Module) -> None:
        """Remove this from ``model``, after everything was taken over."""
        for barrier in self._barriers:
            barrier.remove()
        for module in model.modules():
            vars(module).pop(_ATTRIBUTE, None)
        self._tiers.close()

    def refusal(self) -> str:
        """The reason why the module cannot be used."""
        return (
            f"this model's engine was closed with restore=False, its weights are spread over {self.ranks} ranks (this "
            f"is rank {self.rank}): expected shardengine.initialize(model, ...) on the same ranks, which goes on with "
            "them"
        )

    def check(self, model: nn.Module, rank: int, ranks: int, platform: Platform) -> None:
        """Raise ``UsageError`` if an engine of ``model`` cannot take this over."""
        anew = "build a new model, and load a checkpoint with engine.load_checkpoint(dir)"
        same = (rank, ranks) == (self.rank, self.ranks)
        if not self._hides and (self._begun or not same):
            self.end(model)  # the weights are there
        elif not same:
            raise UsageError(
                f"{self.refusal()}; got rank {rank} of {ranks}. For other ranks {anew}",
                code="close-unrestored-other-ranks",
            )
        if self._hides and self._begun:
            raise UsageError(
                "an earlier initialize() failed after it took over part of the shards that close(restore=False) "
                f"left: {anew}",
                code="close-unrestored-partly-taken",
            )
        if not self._hides:
            return
        present = {id(part) for parameter in model.parameters() for _, part in parts_of(parameter)}
        for parameter, spec, shown in zip(self._parameters, self.layout.parameters, self._shown, strict=True):
            if id(parameter) not in present:
                raise UsageError(
                    f"parameter {spec.name!r} is gone; {self.refusal()}; for another model {anew}",
                    code="close-unrestored-parameter-gone",
                )
            if (parameter.data_ptr(), parameter.dtype) != shown:
                raise UsageError(
                    f"parameter {spec.name!r} was moved, cast or written; {self.refusal()}; otherwise {anew}",
                    code="close-unrestored-weights-changed",
                )
        if any(restore_poison(dtype, platform) for dtype in {dtype for _, dtype in self._shown}):
            raise UsageError(
                f"a parameter was written after close(restore=False), the write is lost; {self.refusal()}",
                code="close-unrestored-weights-changed",
            )

    @property
    def names(self) -> list[str]:
        """The names of the parameters, to compare between ranks."""
        return [spec.name for spec in self.layout.parameters if spec.name in self._buckets]

    def hides(self, parameter: nn.Parameter) -> bool:
        """Whether ``parameter`` itself shows no values."""
        return self._hides and id(parameter) in self._number

    def order_of(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The order of dimensions that ``parameter`` had in memory (``ParameterSpec.order``)."""
        return self.layout.parameters[self._number[id(parameter)]].order

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype that the weights of ``parameter`` had."""
        return getattr(torch, self.layout.parameters[self._number[id(parameter)]].dtype)

    def slice_of(self, parameter: nn.Parameter, first: int, values: Tensor) -> FlatSlice | None:
        """``values``, flat, as the elements of ``parameter`` from ``first`` on; None if nothing of it is left."""
        number = self._number.get(id(parameter))
        name = "" if number is None else self.layout.parameters[number].name
        return FlatSlice(name, LEFT, first, values) if name in self._buckets else None

    def holding(self, slices: Sequence[FlatSlice]) -> Iterator[LeftBucket]:
        """Yield the buckets that hold elements of ``slices``. A bucket is freed when all of it was asked for."""
        self._begun = True
        asked: dict[int, tuple[LeftBucket, int]] = {}
        for wanted in slices:
            for left in self._buckets[wanted.name]:
                for piece in self.layout.pieces(left.layout):
                    if self.layout.parameters[piece.parameter].name == wanted.name:
                        common = min(piece.offset_end, wanted.end) - max(piece.offset, wanted.first)
                        if common > 0:
                            asked[id(left)] = left, asked.get(id(left), (left, 0))[1] + common
        for left, elements in asked.values():
            yield left
            left.untaken -= elements
            if not left.untaken:
                left.store.drop()


LEFT = "left"
"""The key of flat slices of left shards."""
