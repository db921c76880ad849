"""Read tensors and values of torch.distributed.checkpoint files by key, on demand, without a process group.

Owns: the contents of ``.metadata``. Torch's own reader reads the tensors. It would unpickle ``.metadata``, so that file
is read here without running code, and passed to it. Must not know: models, optimizers, the meaning of a key.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)  # fmt: skip

from shardengine.errors import CheckpointError, UsageError
from shardengine.interchange.unpickling import Inert, load_plain, refusal

METADATA = ".metadata"


class DcpStore(FileSystemReader):
    """Torch's reader for one checkpoint, with metadata that was read safely; gives tensors and values by key."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.place = place
        self.metadata_path = place / METADATA
        try:
            self._metadata = _metadata_of(load_plain(self.metadata_path), self.metadata_path)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{self.metadata_path} is damaged, or not of torch.distributed.checkpoint ({error})",
                code="import-damaged",
            ) from None
        rows = self._metadata.state_dict_metadata.items()
        self.tensors = {key: row for key, row in rows if isinstance(row, TensorStorageMetadata)}
        self.values = [key for key, row in rows if not isinstance(row, TensorStorageMetadata)]
        self.files = sorted({info.relative_path for info in self._metadata.storage_data.values()})
        for file in self.files:
            if not (place / file).is_file():
                raise CheckpointError(f"{place / file} is missing; {METADATA} names it", code="import-file-missing")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata; torch's reader calls this before it reads."""
        return self._metadata

    def paths(self) -> dict[str, tuple[str, ...]]:
        """Return key → its path in the nested state dict that was saved."""
        data = self._metadata.planner_data
        told = data if isinstance(data, Mapping) else {}
        return {
            key: tuple(map(str, told[key])) if isinstance(told.get(key), tuple) else tuple(key.split(".", 1))
            for key in self._metadata.state_dict_metadata
        }

    def tensor(self, key: str) -> Tensor:
        """Return the whole tensor, assembled from its pieces."""
        meta = self.tensors[key]
        try:
            target = torch.empty(meta.size, dtype=meta.properties.dtype)
        except RuntimeError as error:
            raise CheckpointError(
                f"{self.metadata_path}: {key} cannot have the size {list(meta.size)}", code="import-damaged"
            ) from error
        self._load({key: target}, key)
        return target

    def value(self, key: str) -> Any:
        """Return a value that is no tensor: numbers, strings, lists and dicts of them."""
        return self._load({key: io.BytesIO()}, key)[key]

    def any(self, key: str) -> Any:
        """Return the tensor or the value of ``key``."""
        return self.tensor(key) if key in self.tensors else self.value(key)

    def _load(self, wanted: dict[str, Any], key: str) -> dict[str, Any]:
        """Fill ``wanted``, as ``torch.distributed.checkpoint.load`` does on one rank."""
        planner = _Planner(self.metadata_path, key)
        try:
            planner.set_up_planner(wanted, self._metadata, is_coordinator=True)
            self.set_up_storage_reader(self._metadata, is_coordinator=True)
            plans = planner.create_global_plan([self.prepare_local_plan(planner.create_local_plan())])
            self.read_data(planner.finish_plan(self.prepare_global_plan(plans)[0]), planner).wait()
        except UsageError:
            raise
        except Exception as error:  # a damaged file may cause any error in torch
            files = sorted({info.relative_path for at, info in self._metadata.storage_data.items() if at.fqn == key})
            text = (str(error).strip().splitlines() or [""])[0][:200]
            raise CheckpointError(
                f"{self.place / ' and '.join(files)}: {key} cannot be read, the file is cut off or damaged "
                f"({type(error).__name__}: {text})",
                code="import-damaged",
            ) from None
        return wanted


class _Planner(DefaultLoadPlanner):
    """Torch's planner, restricted to values that ``torch.load(weights_only=True)`` allows; torch's unpickles any."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._at = f"{path.parent} ({key})"

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Load one value into the state dict; UsageError if its pickle names a class that is not allowed."""
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(value)
        if unknown:
            raise refusal(self._at, sorted(unknown))
        value.seek(0)
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def _metadata_of(raw: Any, path: Path) -> Metadata:
    """Build torch's metadata objects from the stand-ins, and check each value."""
    rows: dict[str, Any] = {}
    for key, row in raw.get("state_dict_metadata").items():
        rows[str(key)] = BytesStorageMetadata() if row.stands_for.endswith("BytesStorageMetadata") else _tensor(row)
    storage = {}
    for at, info in raw.get("storage_data").items():
        offset = at.get("offset")
        file = info.get("relative_path")
        if not isinstance(file, str) or file != Path(file).name or file in ("", ".", "..") or "\0" in file:
            raise CheckpointError(
                f"{path}: it names the file {str(file)[:200]!r}, expected one beside it",
                code="import-file-outside-folder",
            )
        storage[MetadataIndex(str(at.get("fqn")), None if offset is None else _size(offset), at.get("index"))] = (
            _StorageInfo(
                file, _count(info.get("offset")), _count(info.get("length")), info.get("transform_descriptors")
            )
        )
    return Metadata(
        state_dict_metadata=rows, planner_data=raw.get("planner_data"), storage_data=storage, storage_meta=StorageMeta()
    )


def _tensor(row: Inert) -> TensorStorageMetadata:
    properties = row.get("properties").state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"expected a dtype, got {str(dtype)[:80]}")
    size, chunks = _size(row.get("size")), []
    for chunk in row.get("chunks"):
        offsets, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if len(offsets) != len(size) or any(o + n > s for o, n, s in zip(offsets, sizes, size, strict=True)):
            raise ValueError("a chunk lies outside of its tensor")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    if sum(chunk.sizes.numel() for chunk in chunks) < size.numel():
        raise ValueError("the chunks of a tensor do not cover it")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _size(value: Any) -> torch.Size:
    return torch.Size([_count(item) for item in value])


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 60:
        raise ValueError(f"expected a number of elements or bytes, got {str(value)[:80]}")
    return value
