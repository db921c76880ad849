"""The index of a checkpoint: one JSON file that locates every tensor. Owns: its format; writing, reading, checking it.

Must not know: how tensors are written, whether they fit an engine.

A checkpoint may come from an untrusted source. So ``read`` checks every type, range and name that other modules rely
on. The format is described in docs/checkpoints.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardengine.checkpoint.directory import INDEX
from shardengine.checkpoint.tensor_file import CHUNK_BYTES, DTYPES
from shardengine.errors import CheckpointError
from shardengine.version import __version__

FORMAT = 2
MAX_BYTES = 1 << 28
MAX_CHUNK_BYTES = 1 << 24
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_LARGEST = 1 << 60
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
COUNTERS = ("global_steps", "global_samples", "micro_steps")


def file_of(rank: int) -> str:
    """Return the name of the file that ``rank`` writes."""
    return f"rank-{rank:05}.safetensors"


def to_text(facts: dict[str, Any]) -> str:
    """Return the text of an index file: ``facts`` with the format number, versions and a checksum of the index."""
    versions = {"shardengine": __version__, "torch": str(torch.__version__)}
    index = {"format": FORMAT, "versions": versions, "chunk_bytes": CHUNK_BYTES, **facts}
    return json.dumps({"sha256": _digest(index), "index": index})


def read(directory: Path) -> dict[str, Any]:
    """Return the index of the checkpoint ``directory``; raise ``CheckpointError`` if it is missing or invalid."""
    path = directory / INDEX
    try:
        facts = path.stat()
        _expect(stat.S_ISREG(facts.st_mode), "expected a regular file")
        _expect(facts.st_size <= MAX_BYTES, f"more than {MAX_BYTES} bytes")
        whole = json.loads(path.read_text(encoding="utf-8"))
        _expect(isinstance(whole, dict) and isinstance(whole.get("index"), dict), "index: expected an object")
        index: dict[str, Any] = whole["index"]
        _expect(whole.get("sha256") == _digest(index), "its checksum differs")
        if index.get("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {directory}: format {index.get('format')!r}, this version reads {FORMAT}",
                code="checkpoint-format-unknown",
            )
        _check(index)
    except OSError as error:
        theirs = next(directory.glob("*_model_states.pt"), None) is not None
        cure = "; DeepSpeed has written it, `shardengine import` makes one of ours of it" if theirs else ""
        raise CheckpointError(
            f"checkpoint {directory}: cannot read {INDEX}: {error.strerror}{cure}", code="checkpoint-index-unreadable"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {directory}: {INDEX} is damaged or not of shardengine ({str(error)[:200]}); load another "
            "checkpoint",
            code="checkpoint-damaged",
        ) from None
    return index


@dataclass(frozen=True)
class StoredRange:
    """Elements [first, end) of a tensor lie in ``file`` from byte ``offset`` on."""

    file: str
    first: int
    end: int
    offset: int


def entries(index: dict[str, Any]) -> Iterator[tuple[str, str, torch.dtype, list[StoredRange]]]:
    """Yield every tensor of the model and the optimizer: (name, state, dtype, places of its elements)."""
    for name, kinds in index["tensors"].items():
        for kind, row in kinds.items():
            yield name, kind, DTYPES[row["dtype"]], [StoredRange(*piece) for piece in row["pieces"]]


def names_at(index: dict[str, Any], file: str, start: int, end: int) -> list[str]:
    """Return the tensors ("name (state)") with bytes in [start, end) of ``file``, in the order of the index."""
    found = [
        f"{name} ({kind})"
        for name, kind, dtype, pieces in entries(index)
        if any(
            p.file == file and p.offset < end and start < p.offset + (p.end - p.first) * dtype.itemsize for p in pieces
        )
    ]
    return found + [
        f"random state {name!r}" for name, rows in index["random"].items()
        if any(f == file and at < end and start < at + count for f, at, count in rows)
    ]  # fmt: skip


def _digest(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


# Checks of an index


def _expect(fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(what)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _check(index: dict[str, Any]) -> None:
    _expect(_is_count(index["world_size"]) and index["world_size"] >= 1, "world_size")
    chunk = index["chunk_bytes"]
    _expect(_is_count(chunk) and 512 <= chunk <= MAX_CHUNK_BYTES and chunk % 512 == 0, "chunk_bytes")
    _expect(all(_is_count(index["counters"][name]) for name in COUNTERS), "counters")
    _expect(isinstance(index["own_buffers"], bool), "own_buffers")
    _expect(all(isinstance(index["stage"][key], str) for key in ("name", "letters")), "stage")
    _expect(all(name in _BATCH and _is_count(value) for name, value in index["batch"].items()), "batch")
    _expect(isinstance(index["client_state"], dict), "client_state")
    versions = index.get("versions", {})
    _expect(isinstance(versions, dict) and all(isinstance(each, str) for each in versions.values()), "versions")
    for file, facts in index["files"].items():
        _expect(_FILE.fullmatch(file) is not None, f"file name {file[:80]!r}")
        _expect(_is_count(facts["bytes"]), f"size of {file}")
        count = -(-facts["bytes"] // index["chunk_bytes"])
        _expect(isinstance(facts["chunks"], list) and len(facts["chunks"]) == count, f"chunks of {file}")
        _expect(all(_is_count(value) for value in facts["chunks"]), f"chunks of {file}")
    sizes = _check_tables(index)
    for name, kinds in index["tensors"].items():
        for kind, row in kinds.items():
            _expect(name in sizes and row["dtype"] in DTYPES, f"tensor {name} ({kind})")
            for piece in row["pieces"]:
                _check_piece(index, piece, DTYPES[row["dtype"]].itemsize, sizes[name], f"pieces of {name} ({kind})")
    for name, fingerprint in index.get("left_out", {}).items():
        _expect(name in sizes and name not in index["tensors"] and _is_count(fingerprint), f"left_out: {name[:200]}")
    for name, rows in index["random"].items():
        _expect(len(rows) == index["world_size"], f"random state {name}")
        for file, offset, count in rows:
            _check_piece(index, [file, 0, count, offset], 1, 1 << 24, f"random state {name}")
    _check_optimizer(index["optimizer"])
    scheduler = index["lr_scheduler"]
    _expect(
        scheduler is None or (isinstance(scheduler["type"], str) and isinstance(scheduler["state"], dict)),
        "lr_scheduler",
    )
    _expect(_is_loss_scaler(index["loss_scaler"]), "loss_scaler")


def _is_loss_scaler(value: Any) -> bool:
    """Return whether ``value`` is None or a valid ``LossScaler.state_dict``."""
    if value is None:
        return True
    scale = value["scale"]
    is_scale = isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < 2**128
    counts = [value[key] for key in ("good", "tolerated", "skipped")] + [value.get("in_a_row", 0)]
    return is_scale and all(map(_is_count, counts)) and isinstance(value.get("dynamic", True), bool)


def _check_piece(index: dict[str, Any], piece: Sequence[Any], itemsize: int, size: int, what: str) -> None:
    file, first, end, offset = piece
    _expect(file in index["files"] and all(map(_is_count, (first, end, offset))), what)
    _expect(first <= end <= size and offset + (end - first) * itemsize <= index["files"][file]["bytes"], what)
    _expect(offset % itemsize == 0, what)


def _check_tables(index: dict[str, Any]) -> dict[str, int]:
    """Check the tables; return the number of elements of each parameter (by first name) and buffer."""
    sizes: dict[str, int] = {}
    for table in ("parameters", "buffers"):
        for row in index[table]:
            names = row["names"] if table == "parameters" else [row["name"]]
            _expect(_are_names(names) and bool(names) and names[0] not in sizes, f"names in {table}")
            shape, what = row["shape"], f"{table[:-1]} {names[0][:200]}"
            _expect(isinstance(shape, list) and len(shape) <= 64 and all(map(_is_count, shape)), f"shape of {what}")
            _expect(math.prod(shape) <= _LARGEST and row["dtype"] in DTYPES, f"shape or dtype of {what}")
            if table == "parameters":
                order = row["order"]
                _expect(order == [] or sorted(order) == list(range(len(shape))), f"order of {what}")
                _expect(isinstance(row["trainable"], bool) and isinstance(row["group"], int), what)
            sizes[names[0]] = math.prod(shape)
    return sizes


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is None:
        return
    _expect(isinstance(optimizer["kind"], str) and isinstance(optimizer["groups"], list), "optimizer")
    for group in optimizer["groups"]:
        _expect(_are_names(group["params"]) and isinstance(group["options"], dict), "optimizer groups")
    _expect(all(_is_count(count) for count in optimizer["steps"].values()), "optimizer steps")
    _expect(isinstance(optimizer.get("facts", {}), dict), "optimizer facts")
    for shapes in optimizer.get("whole", {}).values():
        fine = all(
            isinstance(shape, list) and len(shape) <= 64 and all(map(_is_count, shape)) for shape in shapes.values()
        )
        _expect(fine and all(math.prod(shape) <= _LARGEST for shape in shapes.values()), "optimizer whole")
