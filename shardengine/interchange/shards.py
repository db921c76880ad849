"""Locate the elements of each parameter in DeepSpeed's files of optimizer states.

Owns: the layout of stages 1 and 2 (a group is one flat vector, cut over the ranks) and of stage 3 (each parameter is
cut over the ranks, the shards of a sub-group follow each other). Must not know: model files, names of optimizers.

Stages 1 and 2: the parameters of a group follow each other, each with its alignment padding (newer versions). Then the
vector is padded to a multiple of twice the rank count and cut into equal parts, one per rank in rank order. Master
weights are saved without the padding at the end, states with it. Concatenating the ranks' parts gives the same offsets
for both.

Stage 3: a parameter of n elements has ceil(n / ranks) on each rank, padded at the end of the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.errors import CheckpointError, UsageError
from shardengine.interchange.foreign import KINDS, named, whole_number
from shardengine.sharding import WEIGHT

Shapes = list[dict[str, tuple[int, ...]]]
"""Per group (sub-group at stage 3): parameter name → shape, in the order of the flat vector."""


@dataclass(frozen=True)
class ShardRow:
    """A parameter that the optimizer steps. read: "weight" or a state → the whole tensor, fp32."""

    shape: tuple[int, ...]
    group: int
    steps: int
    states: tuple[str, ...]
    read: Callable[[str], Tensor]


@dataclass(frozen=True)
class ShardPart:
    """One rank's file: its path, and its contents under "optimizer_state_dict"."""

    path: Path
    content: Mapping[str, Any]

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return the value of ``key``; raise ``CheckpointError`` unless it is there and of type ``kind``."""
        return need(self.content, key, kind, self.path)


@dataclass(frozen=True)
class _Segment:
    """A flat vector of the optimizer: its group, its steps, and per state the parts of all ranks."""

    group: int
    steps: int
    flats: dict[str, list[Tensor]]


def need(source: Any, key: str, kind: type | tuple[type, ...], path: Path) -> Any:
    """Return ``source[key]``; raise ``CheckpointError`` with the path unless it is there and of type ``kind``."""
    value = source.get(key) if isinstance(source, Mapping) else None
    if value is None:
        raise CheckpointError(f"{path}: {key!r} is missing", code="import-entry-missing")
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = " or ".join(KINDS[k] for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise CheckpointError(
            f"{path}: expected {key!r} to be {kinds}, got {named(value)}", code="import-entry-wrong-type"
        )
    return value


def base_state(part: ShardPart) -> Mapping[str, Any]:
    """Return the state dict of the base optimizer: "state" and "param_groups"."""
    for key in ("base_optimizer_state", "optimizer_state_dict"):
        if isinstance(part.content.get(key), list):
            raise UsageError(
                f"{part.path}: an elastic checkpoint ('elastic_checkpoint': true of old versions) has no options of "
                "the optimizer's groups and cannot be imported; save it again without",
                code="import-elastic-checkpoint",
            )
        if key in part.content:
            state: Mapping[str, Any] = part.get(key, Mapping)
            need(state, "state", Mapping, part.path)
            need(state, "param_groups", list, part.path)
            return state
    raise CheckpointError(
        f"{part.path}: expected 'base_optimizer_state' or 'optimizer_state_dict', it has neither",
        code="import-entry-missing",
    )


def rows_by_group(parts: list[ShardPart], shapes: Shapes, default_steps: int) -> dict[str, ShardRow]:
    """Return parameter name → its row in the ranks' files, for stages 1 and 2."""
    segments = _segments(parts, "single_partition_of_fp32_groups", len(shapes), default_steps)
    paddings = parts[0].content.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    rows = {}
    for segment, group, after in zip(segments, shapes, paddings, strict=True):
        if len(after) != len(group):
            raise CheckpointError(
                f"{parts[0].path}: {len(after)} alignment paddings for {len(group)} parameters",
                code="import-sizes-do-not-match",
            )
        first = 0
        for (name, shape), padding in zip(group.items(), after, strict=True):
            rows[name] = _row(segment, shape, _from_vector(segment, first, shape))
            first += prod(shape) + int(padding)
        for state, flats in segment.flats.items():
            spare = sum(flat.numel() for flat in flats) - first
            if not 0 <= spare < 2 * len(parts):
                raise CheckpointError(
                    f"{parts[0].path} and those beside it: {state} of group {segment.group} has {spare + first} "
                    f"elements, expected {first} and at most {2 * len(parts) - 1} of padding",
                    code="import-sizes-do-not-match",
                )
    return rows


def rows_by_parameter(parts: list[ShardPart], shapes: Shapes, default_steps: int) -> dict[str, ShardRow]:
    """Return parameter name → its row in the ranks' files, for stage 3."""
    rows = {}
    ranks = len(parts)
    for segment, group in zip(_segments(parts, "fp32_flat_groups", len(shapes), default_steps), shapes, strict=True):
        first = 0
        for name, shape in group.items():
            rows[name] = _row(segment, shape, _from_shards(segment, first, shape))
            first += -(-prod(shape) // ranks)
        for state, flats in segment.flats.items():
            for part, flat in zip(parts, flats, strict=True):
                if flat.numel() != first:
                    raise CheckpointError(
                        f"{part.path}: {state} of {next(iter(group), 'a group')} and {len(group) - 1} more parameters "
                        f"has {flat.numel()} elements, expected {first} (was it offloaded to NVMe?)",
                        code="import-sizes-do-not-match",
                    )
    return rows


def whole_of_shards(shards: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """Assemble a parameter of stage 3 from every rank's shard."""
    flat = torch.cat([shard.reshape(-1) for shard in shards])
    if not 0 <= flat.numel() - prod(shape) < max(len(shards), 1):
        raise CheckpointError(
            f"expected shards of {prod(shape)} elements, got {flat.numel()}", code="import-sizes-do-not-match"
        )
    return flat[: prod(shape)].reshape(shape).clone()


def _segments(parts: list[ShardPart], key: str, count: int, default_steps: int) -> list[_Segment]:
    bases = [base_state(part) for part in parts]
    weights = [part.get(key, list) for part in parts]
    found: list[_Segment] = []
    for group, options in enumerate(bases[0]["param_groups"]):
        for number in need(options, "params", list, parts[0].path):
            index = len(found)
            if any(len(flats) <= index for flats in weights):
                raise CheckpointError(
                    f"{parts[0].path}: {key!r} has fewer flat vectors than the optimizer has",
                    code="import-sizes-do-not-match",
                )
            states = [base["state"].get(number, {}) for base in bases]
            flats = {WEIGHT: [_flat(flats[index], part) for flats, part in zip(weights, parts, strict=True)]}
            for name in [name for name, value in states[0].items() if isinstance(value, Tensor) and value.dim() > 0]:
                flats[name] = [_flat(state.get(name), part) for state, part in zip(states, parts, strict=True)]
            steps = [
                steps_of(state, options, default_steps, part.path) for state, part in zip(states, parts, strict=True)
            ]
            if len(set(steps)) > 1:
                raise CheckpointError(
                    f"{parts[0].path} and those beside it disagree about the steps taken: {steps}",
                    code="import-files-of-different-saves",
                )
            found.append(_Segment(group, steps[0], flats))
    if len(found) != count:
        raise CheckpointError(
            f"{parts[0].path}: the optimizer has {len(found)} flat vectors, the model file {count}",
            code="import-sizes-do-not-match",
        )
    return found


def steps_of(state: Mapping[str, Any], options: Mapping[str, Any], default: int, where: Path | str) -> int:
    """Return the number of steps: from the parameter's state, its group (DeepSpeed's FusedAdam), or ``default``."""
    return whole_number(state.get("step", options.get("step", default)), f"{where}: 'step' of the optimizer")


def _flat(value: Any, part: ShardPart) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() != 1 or not value.is_floating_point():
        form = f" {value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise CheckpointError(
            f"{part.path}: expected a flat tensor of floats for each group and state, got {named(value)}{form}",
            code="import-entry-wrong-type",
        )
    return value.detach()


def _row(segment: _Segment, shape: tuple[int, ...], read: Callable[[str], Tensor]) -> ShardRow:
    return ShardRow(shape, segment.group, segment.steps, tuple(name for name in segment.flats if name != WEIGHT), read)


def _from_vector(segment: _Segment, first: int, shape: tuple[int, ...]) -> Callable[[str], Tensor]:
    def read(state: str) -> Tensor:
        pieces, start, end = [], 0, first + prod(shape)
        for flat in segment.flats[state]:
            pieces.append(flat[max(first - start, 0) : max(end - start, 0)])
            start += flat.numel()
        return torch.cat(pieces).to(torch.float32).reshape(shape)

    return read


def _from_shards(segment: _Segment, first: int, shape: tuple[int, ...]) -> Callable[[str], Tensor]:
    def read(state: str) -> Tensor:
        flats = segment.flats[state]
        part = -(-prod(shape) // len(flats))
        return whole_of_shards([flat[first : first + part] for flat in flats], shape).to(torch.float32)

    return read
