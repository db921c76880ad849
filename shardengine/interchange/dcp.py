"""Reads checkpoints of torch.distributed.checkpoint: a model's state dict, with or without its optimizer's.

Owns: what ``.metadata`` says, which key is what. Torch's own reader reads the tensors, one when asked for, without a
process group; ``.metadata``, which it would unpickle, is read here and handed to it. Must not know: DeepSpeed.

Expected are state dicts as of ``torch.distributed.checkpoint.state_dict.get_state_dict``: fully qualified names,
``{"model": …, "optim": …}`` (also one level deeper), flattened or not, or a model's alone. State dicts do not tell
parameters from buffers, nor which of them are tied; the optimizer's names and the values decide (``_sort``).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
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
from shardengine.interchange import options
from shardengine.interchange.foreign import WEIGHT, Foreign, ForeignParameter
from shardengine.interchange.unpickling import Inert, load_plain, refusal
from shardengine.optimizer import STATE_NAMES

METADATA = ".metadata"
_MODELS, _OPTIMIZERS = ("model", "module"), ("optim", "optimizer")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def recognises(directory: Path) -> bool:
    """Whether ``directory`` looks like a checkpoint of torch.distributed.checkpoint."""
    return (directory / METADATA).is_file()


def read(directory: str | Path, buffers: Collection[str] = ()) -> Foreign:
    """What the checkpoint in ``directory`` holds; no pickle in it runs anything. Errors as ``deepspeed.read``.

    buffers: names of floating-point buffers, which a state dict does not tell from frozen parameters.
    """
    store = _Store(Path(directory))
    keys = _Keys.of(store)
    if unknown := sorted(set(buffers) - keys.model.keys()):
        raise UsageError(f"{directory}: expected names of the model's tensors as buffers, came {', '.join(unknown)}")
    notes = [f"{'.'.join(path)}: part of neither a model nor an optimizer" for path in keys.other]
    states, groups = _optimizer(store, keys)
    kind = options.kind_of([options_ for _, options_ in groups], None, notes) if groups else None
    taken = options.options_of([options_ for _, options_ in groups], kind, notes) if kind is not None else []
    group_of = {name: number for number, (names, _) in enumerate(groups) for name in names}
    parameters, held_buffers = _sort(store, keys, group_of, buffers, notes)
    found = []
    steps = {name: _steps(store, states.get(name, {})) for name in group_of}
    for names in parameters:
        first = next((name for name in names if name in group_of), names[0])
        meta = store.tensors[keys.model[first]]
        own = {state: key for state, key in states.get(first, {}).items() if key in store.tensors}
        held = tuple(state for state in STATE_NAMES.get(kind or "", ()) if state in own)
        found.append(
            ForeignParameter(
                names=names,
                shape=tuple(meta.size),
                dtype=meta.properties.dtype,
                trainable=first in group_of or not groups,
                group=group_of.get(first, -1) if kind else -1,
                steps=steps.get(first, 0),
                states=(WEIGHT, *held),
                read=_reader(store, {WEIGHT: keys.model[first], **own}),
            )
        )
    _require_known(set(group_of) - {name for names in parameters for name in names}, store)
    taken_steps = max(steps.values(), default=0)
    return Foreign(
        source=f"torch.distributed.checkpoint ({len(store.files)} file{'s' if len(store.files) != 1 else ''})",
        parameters=found,
        buffers=held_buffers,
        kind=kind,
        groups=taken,
        global_steps=taken_steps,
        global_samples=0,
        micro_steps=taken_steps,
        loss_scale=None,
        notes=notes,
    )


def _reader(store: _Store, keys: Mapping[str, str]) -> Callable[[str], Tensor]:
    return lambda state: store.tensor(keys[state])


def _require_known(names: set[str], store: _Store) -> None:
    if names:
        raise CheckpointError(
            f"{store.path}: the optimizer steps {', '.join(sorted(names)[:4])}, which the model's state does not have"
        )


# What is in it


class _Store(FileSystemReader):
    """Tensors and values of one checkpoint by key; the rest of torch's reader with metadata that was read safely."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.place = place
        self.metadata_path = place / METADATA
        try:
            self._metadata = _metadata_of(load_plain(self.metadata_path), self.metadata_path)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{self.metadata_path} is damaged, or not of torch.distributed.checkpoint ({error})"
            ) from None
        rows = self._metadata.state_dict_metadata.items()
        self.tensors = {key: row for key, row in rows if isinstance(row, TensorStorageMetadata)}
        self.values = [key for key, row in rows if not isinstance(row, TensorStorageMetadata)]
        self.files = sorted({info.relative_path for info in self._metadata.storage_data.values()})
        for file in self.files:
            if not (place / file).is_file():
                raise CheckpointError(f"{place / file} is missing; {METADATA} names it")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What torch's reader asks for before it reads."""
        return self._metadata

    def paths(self) -> dict[str, tuple[str, ...]]:
        """Key → the path in the nested state dict that was saved."""
        data = self._metadata.planner_data
        told = data if isinstance(data, Mapping) else {}
        return {
            key: tuple(map(str, told[key])) if isinstance(told.get(key), tuple) else tuple(key.split(".", 1))
            for key in self._metadata.state_dict_metadata
        }

    def tensor(self, key: str) -> Tensor:
        """The whole tensor, put together from its pieces."""
        meta = self.tensors[key]
        try:
            target = torch.empty(meta.size, dtype=meta.properties.dtype)
        except RuntimeError as error:
            raise CheckpointError(f"{self.metadata_path}: {key} cannot have the size {list(meta.size)}") from error
        self._load({key: target}, key)
        return target

    def value(self, key: str) -> Any:
        """A value that is no tensor: numbers, strings, lists and dicts of them."""
        return self._load({key: io.BytesIO()}, key)[key]

    def _load(self, wanted: dict[str, Any], key: str) -> dict[str, Any]:
        """Fill ``wanted``, as ``torch.distributed.checkpoint.load`` does it on one rank."""
        planner = _Planner(self.metadata_path, key)
        try:
            planner.set_up_planner(wanted, self._metadata, is_coordinator=True)
            self.set_up_storage_reader(self._metadata, is_coordinator=True)
            plans = planner.create_global_plan([self.prepare_local_plan(planner.create_local_plan())])
            self.read_data(planner.finish_plan(self.prepare_global_plan(plans)[0]), planner).wait()
        except UsageError:
            raise
        except Exception as error:  # whatever torch comes across in a damaged file
            files = sorted({info.relative_path for at, info in self._metadata.storage_data.items() if at.fqn == key})
            text = (str(error).strip().splitlines() or [""])[0][:200]
            raise CheckpointError(
                f"{self.place / ' and '.join(files)}: {key} cannot be read, the file is cut off or damaged "
                f"({type(error).__name__}: {text})"
            ) from None
        return wanted


class _Planner(DefaultLoadPlanner):
    """Torch's, which unpickles values freely; this one only what ``torch.load`` allows."""

    def __init__(self, path: Path, key: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._at = f"{path.parent} ({key})"

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """Take over one value."""
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(value)
        if unknown:
            raise refusal(self._at, sorted(unknown))
        value.seek(0)
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def _metadata_of(raw: Any, path: Path) -> Metadata:
    """Torch's own objects from the stand-ins, each value checked."""
    rows: dict[str, Any] = {}
    for key, row in raw.get("state_dict_metadata").items():
        rows[str(key)] = BytesStorageMetadata() if row.stands_for.endswith("BytesStorageMetadata") else _tensor(row)
    storage = {}
    for at, info in raw.get("storage_data").items():
        offset = at.get("offset")
        file = info.get("relative_path")
        if not isinstance(file, str) or file != Path(file).name or file in ("", ".", "..") or "\0" in file:
            raise CheckpointError(f"{path}: it names the file {str(file)[:200]!r}, expected one beside it")
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
        raise TypeError(f"expected a dtype, came {str(dtype)[:80]}")
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
        raise ValueError(f"expected a number of elements or bytes, came {str(value)[:80]}")
    return value


# What is what


@dataclass(frozen=True)
class _Keys:
    """model: name → key · optimizer: path below the optimizer → key · other: paths of what is neither."""

    model: dict[str, str]
    optimizer: dict[tuple[str, ...], str]
    other: list[tuple[str, ...]]

    @staticmethod
    def of(store: _Store) -> _Keys:
        """Sort the keys of a checkpoint by their paths."""
        paths = store.paths()
        depth = next((d for d in (0, 1) for path in paths.values() if len(path) > d + 1 and path[d] in _MODELS), None)
        if depth is None:  # a model's state dict, saved as it is
            names = {".".join(path): key for key, path in paths.items() if key in store.tensors}
            return _Keys(names, {}, [paths[key] for key in store.values])
        found = _Keys({}, {}, [])
        for key, path in paths.items():
            head, rest = (path[depth], path[depth + 1 :]) if len(path) > depth + 1 else ("", ())
            if head in _MODELS and key in store.tensors:
                found.model[".".join(rest)] = key
            elif head in _OPTIMIZERS:
                found.optimizer[rest] = key
            else:
                found.other.append(path)
        return found


def _optimizer(store: _Store, keys: _Keys) -> tuple[dict[str, dict[str, str]], list[tuple[list[str], dict[str, Any]]]]:
    """(name → state → key, per group (names, options))."""
    states: dict[str, dict[str, str]] = {}
    groups: dict[int, dict[str, Any]] = {}
    flat: dict[str, dict[str, Any]] = {}
    for path, key in keys.optimizer.items():
        if path[0] == "state" and len(path) >= 3:
            states.setdefault(".".join(path[1:-1]), {})[path[-1]] = key
        elif path[0].startswith("state.") and len(path) == 1:
            name, _, state = path[0].removeprefix("state.").rpartition(".")
            states.setdefault(name, {})[state] = key
        elif path[0] == "param_groups" and len(path) == 3 and path[1].isdecimal():
            groups.setdefault(int(path[1]), {})[path[2]] = _option(store, key)
        elif path[0].startswith("param_groups.") and len(path) == 1:
            name, _, option = path[0].removeprefix("param_groups.").rpartition(".")
            flat.setdefault(name, {})[option] = _option(store, key)
        elif path == ("param_groups",):
            groups |= dict(enumerate(store.value(key)))
    rows = [(group.pop("params", []), group) for _, group in sorted(groups.items())]
    for name, values in flat.items():  # flattened: a group is what has the same options
        same = next((names for names, other in rows if other == values), None)
        if same is None:
            rows.append(([name], values))
        else:
            same.append(name)
    if any(not isinstance(names, list) or not all(isinstance(n, str) for n in names) for names, _ in rows):
        raise UsageError(
            f"{store.path}: the optimizer's parameters are numbers, not names; save it with "
            "torch.distributed.checkpoint.state_dict.get_state_dict"
        )
    return states, rows


def _option(store: _Store, key: str) -> Any:
    return store.tensor(key) if key in store.tensors else store.value(key)


def _steps(store: _Store, states: Mapping[str, str]) -> int:
    if "step" not in states:
        return 0
    step = _option(store, states["step"])
    return int(step.item() if isinstance(step, Tensor) else step)


def _sort(
    store: _Store, keys: _Keys, group_of: Mapping[str, int], told: Collection[str], notes: list[str]
) -> tuple[list[tuple[str, ...]], dict[str, Tensor]]:
    """(names of each parameter, buffers).

    What the optimizer steps is a parameter. Of the rest, integers, the statistics of norms and what was ``told`` are
    buffers; what equals a parameter in shape and value is another name of it; what is left is a frozen parameter, and
    noted.
    """
    names: dict[str, list[str]] = {name: [name] for name in keys.model if name in group_of}
    buffers: dict[str, Tensor] = {}
    assumed = []
    for name, key in keys.model.items():
        meta = store.tensors[key]
        if name in group_of:
            continue
        if not meta.properties.dtype.is_floating_point or name.rpartition(".")[2] in _STATISTICS or name in told:
            buffers[name] = store.tensor(key)
            continue
        same = _equal_to(store, keys, name, names)
        if same is None:
            names[name] = [name]
            assumed.append(name)
        else:
            names[same].append(name)
    if group_of and assumed:
        more = f" and {len(assumed) - 8} more" if len(assumed) > 8 else ""
        notes.append(
            f"not stepped by the optimizer, taken for frozen parameters (the format does not tell them from buffers): "
            f"{', '.join(assumed[:8])}{more}"
        )
    order = {name: number for number, name in enumerate(keys.model)}
    rows = [tuple(sorted(all_names, key=order.__getitem__)) for all_names in names.values()]
    return sorted(rows, key=lambda row: order[row[0]]), buffers


def _equal_to(store: _Store, keys: _Keys, name: str, names: Mapping[str, list[str]]) -> str | None:
    """The parameter that ``name`` is tied to: of its shape and dtype, and equal."""
    meta = store.tensors[keys.model[name]]
    value = None
    for other in names:
        beside = store.tensors[keys.model[other]]
        if beside.size == meta.size and beside.properties.dtype == meta.properties.dtype and meta.size.numel() > 1:
            value = store.tensor(keys.model[name]) if value is None else value
            if bool(value.min() == value.max()):  # as a norm's first weight or a bias is, tied or not
                return None
            if torch.equal(value, store.tensor(keys.model[other])):
                return other
    return None
