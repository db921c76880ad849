"""A checkpoint of ours, opened without an engine. Owns: finding it from a path, reading its tensors, its damage.

Must not know: engines, process groups, the use of the tensors. Changes nothing on disk.

All bytes that are returned were verified by the checksum of their chunk. Memory: pieces of ``PIECE_BYTES``, or one
whole tensor if its elements are stored in another order than that of the shape (channels_last).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.checkpoint import DTYPES, BlockReader, directory, index
from shardengine.errors import CheckpointError, UsageError
from shardengine.optim import AVERAGE
from shardengine.sharding import BUFFER, WEIGHT

PIECE_BYTES = 8 << 20
RUN, FOLDER, MODEL = "run.json", "checkpoints", "model"
"""Names in the output directory of the train command."""


@dataclass(frozen=True)
class Found:
    """The result of ``find``: one ``checkpoint`` or a ``folder`` of them; ``run``: the output directory it is in."""

    checkpoint: Path | None
    folder: Path | None
    run: Path | None


def find(path: Path) -> Found:
    """Find a checkpoint, a directory of them or the train command's output at ``path``; UsageError if there is none."""
    wanted = "expected a checkpoint of shardengine, a directory of them or the output directory of `shardengine train`"
    try:
        if not path.is_dir():
            raise UsageError(
                f"{path}: {wanted}, found {'a file' if path.exists() else 'nothing there'}", code="checkpoint-not-found"
            )
        if (path / directory.INDEX).exists() or (path / index.file_of(0)).exists():
            folder = path.absolute().parent
            return Found(path, None, folder.parent if (folder.parent / RUN).is_file() else None)
        if directory.present(path):
            return Found(None, path, path.absolute().parent if (path.absolute().parent / RUN).is_file() else None)
        if directory.present(path / FOLDER):
            return Found(None, path / FOLDER, path if (path / RUN).is_file() else None)
    except OSError as error:
        raise UsageError(f"{str(path)[:200]}: {wanted}: {error.strerror}", code="checkpoint-path-unreadable") from None
    kind = describe_directory(path)
    raise UsageError(
        f"{path}: {wanted}, found {kind or 'a directory with nothing of the kind'}", code="checkpoint-not-found"
    )


def choose(found: Found) -> tuple[Path, str]:
    """Return (path of the checkpoint, warning): the one found, or that of ``latest`` in the folder, else the newest.

    The warning is "" unless ``latest`` names a checkpoint that does not exist.
    """
    if found.checkpoint is not None:
        return found.checkpoint, ""
    assert found.folder is not None
    tags, named = directory.present(found.folder), directory.latest(found.folder)
    tag = named if named in tags else tags[0]
    lost = f"'latest' names {named}, which is not there or has no {directory.INDEX}; taken is {tag}"
    return directory.place_of(found.folder, tag), lost if named not in (None, tag) else ""


def listed(folder: Path) -> list[str]:
    """Return the checkpoints in ``folder``, the newest first; at the end those that have lost their index."""
    found = directory.present(folder)
    broken = sorted(path.parent.name for path in folder.glob(f"[!.]*/{index.file_of(0)}"))
    return [*found, *(tag for tag in broken if tag not in found)]


class StoredCheckpoint:
    """One checkpoint, open for reading. Damage raises CheckpointError with file and parameter."""

    def __init__(self, place: Path, *, averages: bool = False) -> None:
        """Read and check the index.

        averages: read the averages (EMA) instead of the weights, for parameters that have them; UsageError if no
        parameter has any.
        """
        self.place = place
        self.index: dict[str, Any] = index.read(place)
        self.model = model_of(self.index)
        self.parameters: list[dict[str, Any]] = self.index["parameters"]
        self.buffers: list[dict[str, Any]] = self.index["buffers"]
        self._rows = {row["names"][0]: row for row in self.parameters} | {row["name"]: row for row in self.buffers}
        self._entries = {(name, state): (dtype, kept) for name, state, dtype, kept in index.entries(self.index)}
        self.averages = averages
        if averages and not any(state == AVERAGE for _, state in self._entries):
            raise UsageError(
                f'{place}: the checkpoint has no averages of the weights: expected one of a training with "ema": '
                '{"decay": …} in its config',
                code="export-without-averages",
            )
        self._reader = BlockReader(place, self.index["files"], self.index["chunk_bytes"])
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._verified: set[tuple[str, int]] = set()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.__exit__()

    def states(self, name: str) -> dict[str, torch.dtype]:
        """Return state ("weight", "exp_avg", … or "buffer") → stored dtype, of a parameter (first name) or buffer."""
        return {state: DTYPES[row["dtype"]] for state, row in self.index["tensors"].get(name, {}).items()}

    def dtype(self, name: str, state: str) -> torch.dtype:
        """Return the dtype in the checkpoint; weights that were trained with fp32 master weights are fp32."""
        if (name, state) not in self._entries:
            if name in self.index.get("left_out", {}):
                raise CheckpointError(
                    f"{self.place}: it leaves out frozen parameters, {name} among them (saved with frozen=False): "
                    "expected one that has them; load it into an engine over the same base model and save that",
                    code="export-frozen-left-out",
                )
            if not self.shape(name, state).numel():
                return DTYPES[self._rows[name]["dtype"]]
            raise CheckpointError(
                f"{self.place}: the index names {name}, but has nothing of its {state}", code="checkpoint-damaged"
            )
        return self._entries[name, state][0]

    def shape(self, name: str, state: str = WEIGHT) -> torch.Size:
        """Return the shape of a parameter (first name) or buffer, or of one of its states."""
        return torch.Size(self._shape_of_own(name, state) or self._rows[name]["shape"])

    def _shape_of_own(self, name: str, state: str) -> list[int] | None:
        """Return the shape of a state that is kept per whole parameter and has its own shape; None for other states."""
        found: list[int] | None = (self.index["optimizer"] or {}).get("whole", {}).get(name, {}).get(state)
        return found

    def pieces(self, name: str, state: str) -> Iterator[Tensor]:
        """Yield all elements in the order of the shape, as 1-D tensors; each is valid until the next read."""
        if self._rows[name].get("order", []):
            yield self.whole(name, state).reshape(-1)
        else:
            yield from self._in_order_of_memory(name, state)

    def whole(self, name: str, state: str) -> Tensor:
        """Return the tensor, contiguous."""
        shape, order = self.shape(name, state), self._rows[name].get("order", [])
        if self._shape_of_own(name, state) is not None:
            order = []
        self._runs(name, state)  # check that all elements exist before allocating the size that the index claims
        flat = torch.empty(math.prod(shape), dtype=self.dtype(name, state))
        at = 0
        for piece in self._in_order_of_memory(name, state):
            flat[at : at + piece.numel()].copy_(piece)
            at += piece.numel()
        if not order:
            return flat.view(shape)
        back = [order.index(dimension) for dimension in range(len(order))]
        return flat.view([shape[dimension] for dimension in order]).permute(back).contiguous()

    def _in_order_of_memory(self, name: str, state: str) -> Iterator[Tensor]:
        dtype = self.dtype(name, state)
        for run in self._runs(name, state):
            step = PIECE_BYTES // dtype.itemsize
            for first in range(run.first, run.end, step):
                count = min(step, run.end - first)
                offset, size = run.offset + (first - run.first) * dtype.itemsize, count * dtype.itemsize
                if self._buffer.numel() < size:
                    self._buffer = torch.empty(size, dtype=torch.uint8)
                self._verify(run.file, offset, offset + size, f"{name} ({state})")
                values = self._buffer[:size].view(dtype)
                self._reader.read(run.file, offset, values)
                yield values

    def _runs(self, name: str, state: str) -> list[index.StoredRange]:
        """Return stored intervals that hold every element once, in order; CheckpointError if elements are missing."""
        dtype, kept = self.dtype(name, state), self._entries.get((name, state), (None, []))[1]
        if state == BUFFER and self.index["own_buffers"]:
            kept = [piece for piece in kept if piece.file == index.file_of(0)]
        reached, runs = 0, []
        for piece in sorted(kept, key=lambda piece: piece.first):
            if piece.first > reached:
                break
            if piece.end > reached:
                offset = piece.offset + (reached - piece.first) * dtype.itemsize
                runs.append(index.StoredRange(piece.file, reached, piece.end, offset))
                reached = piece.end
        if reached != math.prod(self.shape(name, state)):
            raise CheckpointError(
                f"{self.place}: {name} ({state}): some of its elements are in no file", code="checkpoint-damaged"
            )
        return runs

    def _verify(self, file: str, start: int, end: int, what: str) -> None:
        chunk = self.index["chunk_bytes"]
        for number in range(start // chunk, -(-end // chunk)):
            if (file, number) in self._verified:
                continue
            damage = self._reader.damage(file, [(number * chunk, number * chunk + 1)])
            if damage is not None:
                raise CheckpointError(
                    f"{self.place / file} {damage.what}; it holds {what}; take another checkpoint",
                    code="checkpoint-damaged",
                )
            self._verified.add((file, number))


@dataclass(frozen=True)
class Damaged:
    """The damage of one file of a checkpoint, as text, and the tensors in the damaged parts."""

    file: str
    what: str
    holds: list[str]


def damages(place: Path, saved: dict[str, Any]) -> list[Damaged]:
    """Return all damage in the files of the checkpoint with the index ``saved``; reads every file completely."""
    found = []
    with BlockReader(place, saved["files"], saved["chunk_bytes"]) as reader:
        for file in sorted(saved["files"]):
            size, at, whats, holds = saved["files"][file]["bytes"], 0, [], []
            while (damage := reader.damage(file, [(at, size)] if at < size else [])) is not None:
                whats.append(damage.what)
                holds += index.names_at(saved, file, damage.start, damage.end)
                at = damage.end
                if at >= size:
                    break
            if whats:
                found.append(Damaged(file, "; ".join(dict.fromkeys(whats)), list(dict.fromkeys(holds))))
    return found


def model_of(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about the model in an index (checkpoint.model_facts); {} if they are not a valid object."""
    model = saved.get("model")
    return model if isinstance(model, dict) and isinstance(model.get("peft") or {}, dict) else {}


def weight_of(stored: StoredCheckpoint, row: dict[str, Any]) -> tuple[str, str]:
    """Return (first name, state) to read for a row of ``stored.parameters`` or ``stored.buffers``."""
    if "names" not in row:
        return row["name"], BUFFER
    name = row["names"][0]
    stepped = stored.averages and stored.index["optimizer"]["steps"].get(name, 0) > 0  # else it equals the weight
    return name, AVERAGE if stepped and AVERAGE in stored.states(name) else WEIGHT


_KINDS = (
    ("*.distcp", "a checkpoint of torch.distributed.checkpoint (`shardengine import` reads it)"),
    ("*model_states.pt", "a checkpoint of DeepSpeed (`shardengine import` reads it)"),
    ("*/*model_states.pt", "a directory of DeepSpeed checkpoints (`shardengine import` reads them)"),
    ("adapter_config.json", "adapters of peft (PeftModel.from_pretrained loads them)"),
    ("config.json", "a Hugging Face model (from_pretrained loads it)"),
    ("*.safetensors", "a directory with safetensors, but without index.json"),
    ("*.bin", "a directory with PyTorch files"),
    ("*.pt", "a directory with PyTorch files"),
)


def describe_directory(directory: Path) -> str:
    """Return a phrase that describes ``directory``; "" if it holds no known files."""
    try:
        if not any(directory.iterdir()):
            return "an empty directory"
    except OSError as error:
        return f"a directory that cannot be read ({error.strerror})"
    return next((phrase for pattern, phrase in _KINDS if next(directory.glob(pattern), None) is not None), "")
