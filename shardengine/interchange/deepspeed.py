"""Read checkpoints of DeepSpeed: ZeRO stages 0 to 3, fp32, bf16 and fp16, of any number of ranks.

Owns: the roles of files and of the model's tensors. Must not know: the layout of shards in the files of optimizer
states (``shards``), the parameters of an optimizer without names (``unsharded``).

A checkpoint is a directory named by its tag, beside a file ``latest``:
    mp_rank_00_model_states.pt                        stages 0 to 2: the model, and at stage 0 the optimizer
    zero_pp_rank_R_mp_rank_00_model_states.pt         stage 3: names and dtypes, shards of frozen parameters
    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt  stages 1 to 3: rank R's shard of master weights and states
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.errors import CheckpointError, ShardEngineError, UsageError
from shardengine.interchange import options, unsharded
from shardengine.interchange.foreign import Foreign, ForeignParameter, named, whole_number
from shardengine.interchange.shards import (
    Shapes,
    ShardPart,
    ShardRow,
    base_state,
    need,
    rows_by_group,
    rows_by_parameter,
    whole_of_shards,
)
from shardengine.interchange.unpickling import Inert, load_torch
from shardengine.kernels import STATE_NAMES
from shardengine.sharding import WEIGHT

_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt")
_OTHER_FILE = re.compile(r"(layer_|expp_rank_|expert_).*_states\.pt")
_UNEXPECTED = (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError)
"""Exceptions that values of unexpected types cause."""
_KNOWN = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config "
    "ds_version checkpoint_parallel_dimensions num_experts ds_autoep_layers sparse_tensor_module_names "
    "csr_tensor_module_names".split()
)


def recognises(directory: Path) -> bool:
    """Return whether ``directory`` looks like a checkpoint of DeepSpeed, or a directory of them."""
    places = [directory, *(path for path in directory.iterdir() if path.is_dir())] if directory.is_dir() else []
    return any(next(place.glob("*_model_states.pt"), None) is not None for place in places)


def read(directory: str | Path, tag: str | None = None) -> Foreign:
    """Return the contents of checkpoint ``tag`` of ``directory`` (default: ``directory`` itself, or its ``latest``).

    Its pickles run no code (``unpickling``). Tensors are memory-mapped and read on demand. ``CheckpointError``: a file
    is missing or damaged. ``UsageError``: this kind of checkpoint cannot be imported.
    """
    place = _place(Path(directory), tag)
    try:
        return _read(_Files.find(place))
    except ShardEngineError:
        raise
    except _UNEXPECTED as error:
        raise CheckpointError(
            f"{place}: its files are damaged, or not of DeepSpeed's form ({type(error).__name__}: {str(error)[:200]})",
            code="import-damaged",
        ) from error


def _read(files: _Files) -> Foreign:
    models = [load_torch(path) for path in files.models]
    for path, model in zip(files.models, models, strict=True):
        need(model, "module", Mapping, path)
    _refuse_other_forms(files, models[0])
    parts = []
    for path in files.optimizers:
        content = need(load_torch(path), "optimizer_state_dict", Mapping, path)
        parts.append(ShardPart(path, content))
    level = _level(parts)
    _require_all_ranks(files, models[0], parts, level)
    return _DeepSpeedReader(files, models, parts, level).foreign()


@dataclass(frozen=True)
class _Files:
    """Files of a checkpoint. models: one, or one per rank at stage 3 · optimizers: one per rank, none at stage 0."""

    models: list[Path]
    optimizers: list[Path]

    @staticmethod
    def find(place: Path) -> _Files:
        """Return the files of ``place`` in the order of ranks."""
        found: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
        for path in sorted(place.glob("*_states.pt")):
            match = _FILE.fullmatch(path.name)
            if _OTHER_FILE.fullmatch(path.name) or (match is not None and int(match[2])):
                raise UsageError(
                    f"{path}: a part of a model that is cut over ranks itself (tensor, pipeline or expert "
                    "parallelism); only data-parallel checkpoints can be imported",
                    code="import-model-parallel",
                )
            if match is not None:
                found[match[3]][int(match[1] or 0)] = path
        if not found["model"]:
            raise CheckpointError(
                f"{place}: expected a file *_model_states.pt of DeepSpeed, there is none",
                code="import-not-of-deepspeed",
            )
        for paths in found.values():
            for rank in range(max(paths, default=-1)):
                if rank not in paths:
                    raise CheckpointError(
                        f"{_of_rank(rank, paths[max(paths)])} is missing", code="import-rank-file-missing"
                    )
        return _Files(*([paths[rank] for rank in sorted(paths)] for paths in found.values()))


def _of_rank(rank: int, path: Path) -> Path:
    """Return the path of the file of ``rank`` that corresponds to ``path``, the file of another rank."""
    return path.with_name(re.sub(r"zero_pp_rank_\d+_", f"zero_pp_rank_{rank}_", path.name))


def _place(directory: Path, tag: str | None) -> Path:
    if tag is None and next(directory.glob("*_model_states.pt"), None) is not None:
        return directory
    if tag is None:
        try:
            tag = (directory / "latest").read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            raise CheckpointError(
                f"{directory}: expected a checkpoint of DeepSpeed: a file 'latest' that names a directory in it, or "
                "files *_model_states.pt; give the directory's name as the tag",
                code="import-not-of-deepspeed",
            ) from None
    if not tag or tag in (".", "..") or "/" in tag or "\\" in tag or "\0" in tag:
        raise UsageError(
            f"{directory}: expected the name of a directory in it as the tag, got {tag[:200]!r}",
            code="import-tag-invalid",
        )
    if not (directory / tag).is_dir():
        raise CheckpointError(f"{directory} has no checkpoint {tag!r}", code="import-tag-unknown")
    return directory / tag


def _refuse_other_forms(files: _Files, model: Mapping[str, Any]) -> None:
    dimensions = model.get("checkpoint_parallel_dimensions") or {}
    degrees = [model.get("mp_world_size", 1), *(dimensions.values() if isinstance(dimensions, Mapping) else [])]
    if any(degree not in (None, 1) for degree in degrees) or model.get("num_experts") or model.get("ds_autoep_layers"):
        raise UsageError(
            f"{files.models[0]}: a model with tensor, pipeline or expert parallelism; only data-parallel checkpoints "
            "can be imported",
            code="import-model-parallel",
        )


def _level(parts: list[ShardPart]) -> int:
    """Return the ZeRO stage of the files: 0 to 3."""
    if not parts:
        return 0
    level = parts[0].content.get("zero_stage", 1)  # DeepSpeed's BF16_Optimizer (stage 1) omits it
    if isinstance(level, Inert):
        level = level.args[0] if level.args else None
    if level not in (1, 2, 3) or any("ds_zero_partition_groups" in part.content for part in parts):
        raise UsageError(
            f"{parts[0].path}: expected ZeRO stage 1, 2 or 3 over all ranks, got {str(level)[:80]!r}",
            code="import-zero-stage-unknown",
        )
    return int(level)


def _require_all_ranks(files: _Files, model: Mapping[str, Any], parts: list[ShardPart], level: int) -> None:
    if not parts:
        if model.get("param_shapes") is not None or len(files.models) > 1:
            raise CheckpointError(
                f"{files.models[0].parent}: the files *_optim_states.pt of all ranks are missing",
                code="import-rank-file-missing",
            )
        return
    for part in parts:
        counts = part.content.get("partition_count")
        for count in counts if isinstance(counts, list) else [counts]:
            if isinstance(count, int) and count > len(parts):
                raise CheckpointError(
                    f"{_of_rank(len(parts), part.path)} is missing, there were {count} ranks",
                    code="import-rank-file-missing",
                )
            if count != len(parts):
                raise CheckpointError(
                    f"{part.path}: the optimizer is cut into {count!r} parts, there are {len(parts)} files "
                    "*_optim_states.pt; some are left from another save, or it is cut over groups of ranks",
                    code="import-files-of-different-saves",
                )
    if level == 3 and len(files.models) != len(parts):
        raise CheckpointError(
            f"{_of_rank(len(files.models), files.models[0])} is missing, or files *_optim_states.pt are left from "
            "another save",
            code="import-files-of-different-saves",
        )


class _DeepSpeedReader:
    """Assembles a ``Foreign`` from the files."""

    def __init__(self, files: _Files, models: list[Mapping[str, Any]], parts: list[ShardPart], level: int) -> None:
        self._path, self._models, self._parts, self._level = files.models[0], models, parts, level
        self._model = models[0]
        self._notes: list[str] = []
        buffers = set(need(self._model, "buffer_names", list, self._path))
        tensors = {str(k): v for k, v in self._model["module"].items() if isinstance(v, Tensor)}
        self._notes += [f"{name} of the model: no tensor" for name in self._model["module"] if name not in tensors]
        self._buffers = {name: value for name, value in tensors.items() if name in buffers}
        self._weights = {name: value.detach() for name, value in tensors.items() if name not in buffers}
        self._names = self._tied()
        frozen = self._model.get("frozen_param_shapes")
        self._frozen_shapes = {} if frozen is None else _shapes([frozen], self._path)[0]

    def foreign(self) -> Foreign:
        """Return the contents of the checkpoint."""
        rows, groups = self._optimizer()
        self._require_weights([*rows, *self._frozen_shapes])
        config = self._model.get("ds_config")
        kind = options.kind_of(groups, config.get("optimizer") if isinstance(config, Mapping) else None, self._notes) \
            if groups else None  # fmt: skip
        taken = options.options_of(groups, kind, self._notes) if kind is not None else []
        steps, samples = self._count("global_steps"), self._count("global_samples")
        parameters = [self._parameter(names, rows, kind) for names in self._names.values()]
        self._note_the_rest()
        low = any(parameter.dtype is torch.float16 for parameter in parameters)
        ranks = len(self._parts) or self._model.get("dp_world_size", 1)
        version = str(self._model.get("ds_version", "of unknown version"))[:40]
        return Foreign(
            source=f"DeepSpeed {version}, ZeRO stage {self._level}, {ranks} rank{'s' if ranks != 1 else ''}",
            parameters=parameters,
            buffers=self._buffers,
            kind=kind,
            groups=taken,
            global_steps=steps,
            global_samples=samples,
            micro_steps=steps * self._micro_batches(steps, samples),
            loss_scale=self._loss_scale() if low else None,
            notes=self._notes,
            client_state=self._client_state(),
        )

    def _count(self, key: str) -> int:
        return whole_number(need(self._model, key, int, self._path), f"{self._path}: {key!r}")

    def _require_weights(self, names: list[str]) -> None:
        """Raise CheckpointError unless the model has all ``names``; a missing one would be lost silently.

        names: parameters with master weights, or with shapes of frozen parameters.
        """
        lost = [name for name in names if name not in self._weights]
        if lost:
            more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
            raise CheckpointError(
                f"{self._path}: its model has no {', '.join(lost[:8])}{more}, which it says was trained or frozen; the "
                "file is damaged, or was changed",
                code="import-weights-missing",
            )

    def _tied(self) -> dict[str, tuple[str, ...]]:
        """Return the first name of each parameter → all its names."""
        shared = self._model.get("shared_params") or {}
        firsts: dict[Any, str] = {}
        names: dict[str, list[str]] = {}
        for name, value in self._weights.items():
            place = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name
            first = firsts.setdefault(place, name)
            told = shared.get(name, first)
            if told in names and self._weights[told].shape == value.shape:
                first = told
            names.setdefault(first, []).append(name)
        return {first: tuple(all_names) for first, all_names in names.items()}

    def _optimizer(self) -> tuple[dict[str, ShardRow], list[dict[str, Any]]]:
        """Return the rows of the optimizer by parameter name, and the options of its groups."""
        skipped = self._model.get("skipped_steps", 0)
        steps = self._count("global_steps") - (skipped if isinstance(skipped, int) else 0)
        if self._parts:
            shapes = _shapes(need(self._model, "param_shapes", list, self._path), self._path)
            rows = (rows_by_parameter if self._level == 3 else rows_by_group)(self._parts, shapes, steps)
            return rows, [dict(group) for group in base_state(self._parts[0])["param_groups"]]
        optimizer = self._model.get("optimizer")
        if not isinstance(optimizer, Mapping):
            return {}, []
        weights = {first: self._weights[first] for first in self._names}
        found = unsharded.rows_of(optimizer, weights, steps, self._notes)
        if found is None:
            self._notes.append(
                "optimizer state: at stage 0 it does not say which parameters it steps, and their shapes allow several "
                "ways (or none); the weights alone are taken. Save from stage 1 to keep it"
            )
            return {}, []
        return found, [dict(group) for group in optimizer.get("optimizer_state_dict", optimizer)["param_groups"]]

    def _parameter(self, names: tuple[str, ...], rows: Mapping[str, ShardRow], kind: str | None) -> ForeignParameter:
        row = next((rows[name] for name in names if name in rows), None)
        low = self._weights[names[0]]
        if row is None:
            shape, read = self._frozen(names)
            return ForeignParameter(names, shape, low.dtype, not rows, -1, 0, (WEIGHT,), read)
        states = tuple(state for state in STATE_NAMES.get(kind or "", ()) if state in row.states)
        read, shape = row.read, row.shape
        if self._level != 3:
            read, shape = self._checked(names[0], row), tuple(low.shape)
        extra = sorted(set(row.states) - set(STATE_NAMES.get(kind or "", row.states)))
        if extra and (text := f"optimizer states {', '.join(extra)}") not in self._notes:
            self._notes.append(text)
        return ForeignParameter(
            names, shape, low.dtype, True, row.group if kind else -1, row.steps, (WEIGHT, *states), read
        )

    def _checked(self, name: str, row: ShardRow) -> Callable[[str], Tensor]:
        """Return ``row.read``, with a check that the master weight rounds to the model's weight.

        If it does not, the files are from different saves, and the reader raises CheckpointError.
        """
        low = self._weights[name]

        def read(state: str) -> Tensor:
            value = row.read(state)
            if state == WEIGHT and not torch.equal(value.to(low.dtype).nan_to_num(), low.nan_to_num()):
                raise CheckpointError(
                    f"{self._path.parent}: the master weight of {name} in *_optim_states.pt is not its weight in "
                    f"{self._path.name}; the files are of different saves, or damaged",
                    code="import-files-of-different-saves",
                )
            return value

        return read

    def _frozen(self, names: tuple[str, ...]) -> tuple[tuple[int, ...], Callable[[str], Tensor]]:
        """Return shape and reader of a parameter that the optimizer does not step."""
        low = self._weights[names[0]]
        if self._level != 3:
            return tuple(low.shape), lambda state: low.clone()
        shapes = self._frozen_shapes
        name = next((name for name in names if name in shapes), None)
        if name is None:
            raise CheckpointError(
                f"{self._path}: it names {names[0]}, but has neither its shape nor its elements",
                code="import-frozen-weights-missing",
            )
        shards = [need(model, "frozen_param_fragments", Mapping, self._path).get(name) for model in self._models]
        if not all(isinstance(shard, Tensor) for shard in shards):
            raise CheckpointError(
                f"{self._path} and those beside it: a shard of frozen parameter {name} is missing",
                code="import-frozen-weights-missing",
            )
        return shapes[name], lambda state: whole_of_shards(shards, shapes[name])

    def _micro_batches(self, steps: int, samples: int) -> int:
        """Return the gradient accumulation steps from the config, or computed from samples, steps and batch size."""
        config = self._model.get("ds_config")
        config = config if isinstance(config, Mapping) else {}
        told, size = config.get("gradient_accumulation_steps"), config.get("train_micro_batch_size_per_gpu")
        if isinstance(told, int) and told > 0:
            return told
        ranks = self._model.get("dp_world_size")
        if isinstance(size, int) and isinstance(ranks, int) and steps > 0 and size * ranks > 0:
            return max(1, samples // (steps * size * ranks))
        return 1

    def _loss_scale(self) -> float | None:
        optimizer = self._model.get("optimizer")
        scale = optimizer.get("cur_scale") if isinstance(optimizer, Mapping) else None
        if self._parts:
            scaler = self._parts[0].content.get("loss_scaler")
            scale = scaler.get("cur_scale") if isinstance(scaler, Inert) else None
        return float(scale) if isinstance(scale, int | float) else None

    def _note_the_rest(self) -> None:
        scheduler = self._model.get("lr_scheduler")
        if scheduler:
            text = ", ".join(f"{key} {value}" for key, value in scheduler.items() if isinstance(value, int | float)) \
                if isinstance(scheduler, Mapping) else ""  # fmt: skip
            self._notes.append(
                f"learning-rate scheduler{f' ({text[:200]})' if text else ''}: its class is not named; its state is in "
                'the client state, as "lr_scheduler"'
            )
        for key in ("data_sampler", "random_ltd"):
            if self._model.get(key):
                self._notes.append(key)
        extra = sorted(str(key)[:80] for key in self._model.keys() - _KNOWN if not _is_json(self._model[key]))
        if extra:
            self._notes.append(f"client state that is no JSON: {', '.join(extra)}")

    def _client_state(self) -> dict[str, Any]:
        kept = {str(key): self._model[key] for key in self._model.keys() - _KNOWN if _is_json(self._model[key])}
        scheduler = self._model.get("lr_scheduler")
        return kept | ({"lr_scheduler": scheduler} if scheduler and _is_json(scheduler) else {})


def _is_json(value: Any) -> bool:
    """Return whether ``value`` comes back the same from JSON, except that tuples become lists."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value))


def _shapes(groups: list[Any], path: Path) -> Shapes:
    """Return the names and shapes of parameters per group, each checked."""
    found: Shapes = []
    for group in groups:
        if not isinstance(group, Mapping):
            raise CheckpointError(
                f"{path}: expected names with shapes, got {named(group)}", code="import-entry-wrong-type"
            )
        for name, shape in group.items():
            fine = isinstance(name, str) and isinstance(shape, tuple | list)
            if not fine or any(not isinstance(n, int) or n < 0 for n in shape) or prod(shape) > 1 << 60:
                raise CheckpointError(
                    f"{path}: expected a shape for {str(name)[:200]!r}, got {str(shape)[:200]!r}",
                    code="import-entry-wrong-type",
                )
        found.append({name: tuple(shape) for name, shape in group.items()})
    return found
