"""Write safetensors files from a checkpoint, piece by piece. Owns: rounding, splitting into files, the index of files.

Must not know: the meaning of names.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardengine.checkpoint import Stream, header_of, write_text
from shardengine.errors import UsageError
from shardengine.interchange.stored import StoredCheckpoint, weight_of


@dataclass(frozen=True)
class Output:
    """A tensor to write: under ``name``, as ``dtype``, from ``state`` of ``origin`` in the checkpoint."""

    name: str
    origin: str
    state: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def bytes(self) -> int:
        """The size in a file."""
        return self.shape.numel() * self.dtype.itemsize


def weights(stored: StoredCheckpoint, dtype: torch.dtype | None) -> list[Output]:
    """Return every parameter, tied ones once under the first name, then every buffer.

    dtype: of the parameters; None for the dtype that each was trained in. Buffers, and parameters of integer or 8-bit
    floating-point dtypes, keep their dtype.
    """
    rows = []
    for row in [*stored.parameters, *stored.buffers]:
        origin, state = weight_of(stored, row)
        own = stored.dtype(origin, state) if state == "buffer" else getattr(torch, row["dtype"])
        ordinary = own.is_floating_point and own.itemsize > 1
        chosen = dtype if dtype is not None and "names" in row and ordinary else own
        rows.append(Output(origin, origin, state, chosen, stored.shape(origin)))
    return rows


def write(
    stored: StoredCheckpoint,
    outputs: Sequence[Output],
    directory: Path,
    *,
    stem: str,
    largest: int,
    metadata: dict[str, str],
) -> None:
    """Write ``stem``.safetensors, or several files and their index if it would exceed ``largest`` bytes."""
    shards: list[list[Output]] = []
    size = 0
    for output in outputs:
        if not shards or size + output.bytes > largest:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.bytes
    shards = shards or [[]]
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        table = {
            "metadata": {
                "total_parameters": sum(output.shape.numel() for output in outputs),
                "total_size": sum(output.bytes for output in outputs),
            },
            "weight_map": {output.name: name for name, shard in zip(names, shards, strict=True) for output in shard},
        }
        write_text(directory / f"{stem}.safetensors.index.json", json.dumps(table, indent=2) + "\n")
    for name, shard in zip(names, shards, strict=True):
        _write_file(stored, directory / name, shard, metadata)


def _write_file(stored: StoredCheckpoint, path: Path, outputs: list[Output], metadata: dict[str, str]) -> None:
    ordered = sorted(outputs, key=lambda output: -output.dtype.itemsize)  # every tensor then starts aligned
    head, _, _ = header_of([(output.name, output.dtype, output.shape) for output in ordered], metadata)
    with Stream(path) as stream:
        stream.put(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for output in ordered:
            for piece in stored.pieces(output.origin, output.state):
                stream.put(rounded(piece, output.dtype, output.origin).view(torch.uint8))


def rounded(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return ``values`` as ``dtype``, rounded once; UsageError if a number is too large for it."""
    if values.dtype == dtype:
        return values
    result = values.to(dtype)
    if bool((result.isinf() & ~values.isinf()).any()):
        largest, kind = torch.finfo(dtype).max, str(dtype).removeprefix("torch.")
        raise UsageError(
            f"{name}: its largest value is {values.abs().max().item():.4g}, {kind} ends at {largest:.4g}; choose bf16 "
            "or fp32",
            code="export-value-too-large",
        )
    return result
