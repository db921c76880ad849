"""``convert_zero_checkpoint_to_*``: the whole weights of a checkpoint as files that torch or safetensors load.

Owns: the files' names, the distribution of weights over files. Must not know: engines, how a checkpoint is read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.compat.deepspeed import checkpoints
from shardengine.errors import UsageError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write ``pytorch_model.bin``, or ``model.safetensors``, with the weights in fp32. Needs no engine, no ranks.

    max_shard_size: above it, several files and an index are written; None: always one file.
    """
    state = checkpoints.get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    _write(state, Path(output_dir), max_shard_size, safe=safe_serialization)


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path, output_dir: str | Path, dtype: torch.dtype | str = torch.float32, **options: Any
) -> None:
    """Do the same as ``convert_zero_checkpoint_to_fp32_state_dict``, with its other options, but in ``dtype``."""
    kind = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    size, safe = options.pop("max_shard_size", "5GB"), options.pop("safe_serialization", False)
    state = checkpoints.get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, **options)
    once: dict[int, Tensor] = {}
    for name, value in state.items():
        state[name] = once.setdefault(id(value), value.to(kind) if value.is_floating_point() else value)
    _write(state, Path(output_dir), size, safe=safe)


def _write(state: dict[str, Tensor], folder: Path, largest: str | int | None, *, safe: bool) -> None:
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    shards = _shards(state, None if largest is None else _bytes_of(largest))
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{stem}.{ending}"]
    if len(shards) > 1:
        names = [f"{stem}-{number:05}-of-{len(shards):05}.{ending}" for number in range(1, len(shards) + 1)]
        where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        size = sum(value.nbytes for shard in shards for value in {id(each): each for each in shard.values()}.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        Path(folder, f"{stem}.{ending}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for name, shard in zip(names, shards, strict=True):
        if safe:
            from safetensors.torch import save_file

            first = {id(value): name for name, value in reversed(shard.items())}  # no tensor twice
            save_file({name: shard[name].contiguous() for name in first.values()}, folder / name, {"format": "pt"})
        else:
            torch.save(shard, folder / name)


def _shards(state: dict[str, Tensor], largest: int | None) -> list[dict[str, Tensor]]:
    """Split ``state`` in its order into files of at most ``largest`` bytes; tied weights stay in one file."""
    shards: list[dict[str, Tensor]] = [{}]
    place: dict[int, int] = {}
    size = 0
    for name, value in state.items():
        if id(value) not in place:
            if largest is not None and shards[-1] and size + value.nbytes > largest:
                shards.append({})
                size = 0
            size += value.nbytes
            place[id(value)] = len(shards) - 1
        shards[place[id(value)]][name] = value
    return shards


def _bytes_of(size: str | int) -> int:
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]+)\s*", size) if isinstance(size, str) else None
    if found and found[2].upper() in _UNITS:
        return int(float(found[1]) * _UNITS[found[2].upper()])
    if not isinstance(size, int):
        raise UsageError(
            f'max_shard_size: expected a number of bytes or a size as "5GB", got {size!r}',
            code="deepspeed-shard-size-invalid",
        )
    return size


NAMES: dict[str, Any] = {
    "utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict": convert_zero_checkpoint_to_fp32_state_dict,
    "utils.zero_to_fp32.convert_zero_checkpoint_to_state_dict": convert_zero_checkpoint_to_state_dict,
}
"""Dotted name → the object."""
