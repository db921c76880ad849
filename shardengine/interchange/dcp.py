"""Read checkpoints of torch.distributed.checkpoint: a model's state dict, with or without its optimizer's.

Owns: the meaning of keys. Must not know: DeepSpeed, how files hold a key (``dcp_files``).

Expected are state dicts of ``torch.distributed.checkpoint.state_dict.get_state_dict``: fully qualified names,
``{"model": …, "optim": …}`` (also one level deeper), flattened or not, or a model's alone. A state dict does not
distinguish parameters from buffers, nor show which tensors are tied. The optimizer's names and the values decide
(``_sort``). Our own exports have the counters as well, under ``COUNTERS``.

[Note: Steps that nobody counted] torch's SGD keeps no number of steps. A parameter with states but no number is assumed
to have taken one step: the next step must not count as the first, which would overwrite the momentum. Adam's bias
correction needs the exact number, so its absence is an error there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.checkpoint import index
from shardengine.errors import CheckpointError, ShardEngineError, UsageError
from shardengine.interchange import options
from shardengine.interchange.dcp_files import METADATA, DcpStore
from shardengine.interchange.foreign import Foreign, ForeignParameter, digest, named, whole_number
from shardengine.kernels import STATE_NAMES
from shardengine.sharding import WEIGHT

COUNTERS = "shardengine"
"""The key of the counters in our own exports, beside "model" and "optim"."""
_MODELS, _OPTIMIZERS = ("model", "module"), ("optim", "optimizer")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_BIAS_CORRECTED = ("AdamW", "Adam")
_UNEXPECTED = (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError)
"""Exceptions that values of unexpected types cause."""


def recognises(directory: Path) -> bool:
    """Return whether ``directory`` looks like a checkpoint of torch.distributed.checkpoint."""
    return (directory / METADATA).is_file()


def read(directory: str | Path, buffers: Collection[str] = ()) -> Foreign:
    """Return the contents of the checkpoint in ``directory``; its pickles run no code. Errors as ``deepspeed.read``.

    buffers: names of floating-point buffers, which a state dict does not distinguish from frozen parameters.
    """
    try:
        return _read(DcpStore(Path(directory)), buffers)
    except ShardEngineError:
        raise
    except _UNEXPECTED as error:
        raise CheckpointError(
            f"{directory}: it is damaged, or not of the form that get_state_dict makes ({type(error).__name__}: "
            f"{str(error)[:200]})",
            code="import-damaged",
        ) from error


def _read(store: DcpStore, buffers: Collection[str]) -> Foreign:
    keys = _Keys.of(store)
    if unknown := sorted(set(buffers) - keys.model.keys()):
        raise UsageError(
            f"{store.place}: expected names of the model's tensors as buffers, got {', '.join(unknown)}",
            code="import-buffer-unknown",
        )
    notes = [f"{'.'.join(path)}: part of neither a model nor an optimizer" for path in keys.other]
    optimizer = _DcpOptimizer.of(store, keys, notes)
    names, held_buffers = _sort(store, keys, optimizer.group_of, buffers, notes)
    lost = sorted(optimizer.group_of.keys() - {name for row in names for name in row})
    if lost:
        raise CheckpointError(
            f"{store.place}: the optimizer steps {_some(lost)}, which the model's state does not have",
            code="import-optimizer-without-weight",
        )
    steps, samples, micro_steps = _counters(store, keys, optimizer)
    return Foreign(
        source=f"torch.distributed.checkpoint ({len(store.files)} file{'s' if len(store.files) != 1 else ''})",
        parameters=[_parameter(store, keys, row, optimizer) for row in names],
        buffers=held_buffers,
        kind=optimizer.kind,
        groups=optimizer.groups,
        global_steps=steps,
        global_samples=samples,
        micro_steps=micro_steps,
        loss_scale=None,
        notes=notes,
    )


def _parameter(store: DcpStore, keys: _Keys, names: tuple[str, ...], optimizer: _DcpOptimizer) -> ForeignParameter:
    group_of = optimizer.group_of
    first = next((name for name in names if name in group_of), names[0])
    meta, states = store.tensors[keys.model[first]], optimizer.states.get(first, {})
    stepped = optimizer.kind is not None and first in group_of
    return ForeignParameter(
        names=names,
        shape=tuple(meta.size),
        dtype=meta.properties.dtype,
        trainable=first in group_of or not group_of,
        group=group_of[first] if stepped else -1,
        steps=optimizer.steps(store, first) if stepped else 0,
        states=(WEIGHT, *optimizer.held(first)),
        read=_reader(store, {WEIGHT: keys.model[first], **states}),
    )


def _reader(store: DcpStore, keys: Mapping[str, str]) -> Callable[[str], Tensor]:
    return lambda state: store.tensor(keys[state])


def _counters(store: DcpStore, keys: _Keys, optimizer: _DcpOptimizer) -> tuple[int, int, int]:
    """Return (global steps, samples, micro-steps): those of our own export, else the optimizer's number of steps."""
    if keys.counters:
        ours = (keys.counters.get(name) for name in index.COUNTERS)
        steps, samples, micro_steps = (
            whole_number(None if key is None else store.any(key), f"{store.place}: counters of {COUNTERS!r}")
            for key in ours
        )
        return steps, samples, micro_steps
    steps = max((count for count in optimizer.counts.values() if count is not None), default=0)
    return steps, 0, steps


def _some(names: Iterable[str]) -> str:
    """Return the first few of ``names`` as text for a message."""
    rows = list(names)
    return ", ".join(rows[:8]) + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")


# The meaning of keys


@dataclass(frozen=True)
class _Keys:
    """The keys of a checkpoint by their meaning.

    model: name → key · optimizer: path below the optimizer → key · counters: name → key, in our own exports · other:
    paths of the rest.
    """

    model: dict[str, str]
    optimizer: dict[tuple[str, ...], str]
    counters: dict[str, str]
    other: list[tuple[str, ...]]

    @staticmethod
    def of(store: DcpStore) -> _Keys:
        """Sort the keys of a checkpoint by their paths; ``UsageError`` if there is no model among them."""
        paths, found = store.paths(), _Keys({}, {}, {}, [])
        depth = next((d for d in (0, 1) for path in paths.values() if len(path) > d + 1 and path[d] in _MODELS), None)
        if depth is not None:
            found._sort_below(depth, store, paths)
        else:
            if any(part.split(".")[0] == "param_groups" for path in paths.values() for part in path[:3]):
                raise UsageError(
                    f"{store.place}: an optimizer without a model; expected {{'model': …, 'optim': …}} as of "
                    "torch.distributed.checkpoint.state_dict.get_state_dict, or a model alone",
                    code="import-optimizer-without-model",
                )
            found.model.update((".".join(path), key) for key, path in paths.items() if key in store.tensors)
            found.other.extend(paths[key] for key in store.values)
        if not found.model:
            raise UsageError(
                f"{store.place}: expected the tensors of a model, there are none", code="import-without-model"
            )
        return found

    def _sort_below(self, depth: int, store: DcpStore, paths: Mapping[str, tuple[str, ...]]) -> None:
        for key, path in paths.items():
            head, rest = (path[depth], path[depth + 1 :]) if len(path) > depth + 1 else ("", ())
            if head in _MODELS and key in store.tensors:
                self.model[".".join(rest)] = key
            elif head in _OPTIMIZERS:
                self.optimizer[rest] = key
            elif head == COUNTERS and len(rest) == 1 and rest[0] in index.COUNTERS:
                self.counters[rest[0]] = key
            else:
                self.other.append(path)


@dataclass(frozen=True)
class _DcpOptimizer:
    """The optimizer of a checkpoint.

    kind: our name for it, None if we have no such optimizer or there is none · groups: their options, if ``kind`` is
    not None · group_of: name → its group · states: name → state → key of a tensor · counts: name → steps, None if not
    in the checkpoint
    """

    kind: str | None
    groups: list[dict[str, Any]]
    group_of: dict[str, int]
    states: dict[str, dict[str, str]]
    counts: dict[str, int | None]

    @staticmethod
    def of(store: DcpStore, keys: _Keys, notes: list[str]) -> _DcpOptimizer:
        """Read the optimizer from its keys; add everything that is not imported to ``notes``."""
        states, rows = _optimizer_rows(store, keys, notes)
        groups = [group for _, group in rows]
        kind = options.kind_of(groups, None, notes) if groups else None
        group_of = {name: number for number, (names, _) in enumerate(rows) for name in names}
        counts = {name: _count(store, states.get(name, {}), groups[number]) for name, number in group_of.items()}
        tensors = {
            name: {state: key for state, key in row.items() if key in store.tensors and state != "step"}
            for name, row in states.items()
        }
        taken = options.options_of(groups, kind, notes) if kind is not None else []
        found = _DcpOptimizer(kind, taken, group_of, tensors, counts)
        found._note_the_rest(notes)
        return found

    def held(self, name: str) -> tuple[str, ...]:
        """Return the states of a parameter that our optimizer has as well."""
        there = self.states.get(name, {})
        return tuple(state for state in STATE_NAMES.get(self.kind or "", ()) if state in there)

    def steps(self, store: DcpStore, name: str) -> int:
        """Return the steps of a parameter ([Note: Steps that nobody counted]); CheckpointError if it lacks a state."""
        count, held = self.counts[name], self.held(name)
        missing = set(options.states_of(self.kind, [self.groups[self.group_of[name]]])) - set(held)
        if missing and (count or held):
            raise CheckpointError(
                f"{store.place}: the optimizer has stepped {name}, but its state there has no {_some(sorted(missing))}",
                code="import-optimizer-state-incomplete",
            )
        if count is None and held and self.kind in _BIAS_CORRECTED:
            raise CheckpointError(
                f"{store.place}: the state of {name} has {_some(held)} and no number of steps ('step'), which "
                f"{self.kind}'s bias correction needs; save the optimizer's whole state, or the model alone",
                code="import-step-count-missing",
            )
        return int(bool(held)) if count is None else count

    def _note_the_rest(self, notes: list[str]) -> None:
        apart = sorted(name for name, row in self.states.items() if row and name not in self.group_of)
        if apart:
            notes.append(f"optimizer state of {_some(apart)}: no group of the optimizer has these names")
        if self.kind is None:
            return
        extra = {state for name in self.group_of for state in self.states.get(name, {})}
        if extra := extra.difference(STATE_NAMES[self.kind]):
            notes.append(f"optimizer states {_some(sorted(extra))}")
        uncounted = [name for name, count in self.counts.items() if count is None]
        if uncounted and (len(uncounted) == len(self.counts) or any(map(self.held, uncounted))):
            known = max((count for count in self.counts.values() if count is not None), default=0)
            notes.append(
                f"number of steps: the state of {_some(uncounted)} does not say it; global_steps is {known}, and "
                "states that are there go on as they are"
            )


def _optimizer_rows(
    store: DcpStore, keys: _Keys, notes: list[str]
) -> tuple[dict[str, dict[str, str]], list[tuple[list[str], dict[str, Any]]]]:
    """Return (name → state → key, per group (names, options)), from flattened or nested optimizer keys."""
    states: dict[str, dict[str, str]] = {}
    groups: dict[int, Any] = {}
    flat: dict[str, dict[str, str]] = {}
    unknown = []
    for path, key in keys.optimizer.items():
        if path[0] == "state" and len(path) >= 3:
            states.setdefault(".".join(path[1:-1]), {})[path[-1]] = key
        elif path[0].startswith("state.") and len(path) == 1:
            name, _, state = path[0].removeprefix("state.").rpartition(".")
            states.setdefault(name, {})[state] = key
        elif path[0] == "param_groups" and len(path) == 3 and path[1].isdecimal():
            groups.setdefault(int(path[1]), {})[path[2]] = store.any(key)
        elif path[0].startswith("param_groups.") and len(path) == 1:
            name, _, option = path[0].removeprefix("param_groups.").rpartition(".")
            flat.setdefault(name, {})[option] = key
        elif path == ("param_groups",):
            whole = store.any(key)
            groups |= dict(enumerate(whole if isinstance(whole, list) else [whole]))
        else:
            unknown.append(key)
    if unknown:
        notes.append(f"{_some(unknown)}: neither a state nor a group of an optimizer")
    for group in groups.values():
        if not isinstance(group, dict):
            raise CheckpointError(
                f"{store.place}: expected dicts as the optimizer's groups (param_groups), got {named(group)}",
                code="import-entry-wrong-type",
            )
    rows = [(group.pop("params", []), group) for _, group in sorted(groups.items())]
    if any(not isinstance(names, list) or not all(isinstance(n, str) for n in names) for names, _ in rows):
        raise UsageError(
            f"{store.place}: the optimizer's parameters are numbers, not names; save it with "
            "torch.distributed.checkpoint.state_dict.get_state_dict",
            code="import-optimizer-parameters-numbered",
        )
    listed = {name for names, _ in rows for name in names}
    for name, row in flat.items():  # flattened: parameters with the same options form a group
        if name not in listed:
            values = {option: store.any(key) for option, key in row.items()}
            same = next((names for names, other in rows if other == values), None)
            if same is None:
                rows.append(([name], values))
            else:
                same.append(name)
    return states, rows


def _count(store: DcpStore, states: Mapping[str, str], group: Mapping[str, Any]) -> int | None:
    """Return the number of steps in a parameter's state or its group; None if it is in neither."""
    key = states.get("step")
    if key is None and "step" not in group:
        return None
    value = group["step"] if key is None else store.any(key)
    return whole_number(value, f"{store.place}: {key or 'step of an optimizer group'}")


def _sort(
    store: DcpStore, keys: _Keys, group_of: Mapping[str, int], told: Collection[str], notes: list[str]
) -> tuple[list[tuple[str, ...]], dict[str, Tensor]]:
    """Sort the tensors of a model into (names of each parameter, buffers).

    A tensor that the optimizer steps is a parameter. Of the rest, integer tensors, the statistics of norms and the
    names that the caller gave are buffers. A tensor that equals a parameter in shape and value is another name of it.
    Every other tensor is assumed to be a frozen parameter, which is noted.
    """
    names: dict[str, list[str]] = {name: [name] for name in keys.model if name in group_of}
    buffers: dict[str, Tensor] = {}
    rest: list[str] = []
    for name, key in keys.model.items():
        if name in group_of:
            continue
        floating = store.tensors[key].properties.dtype.is_floating_point
        if not floating or name.rpartition(".")[2] in _STATISTICS or name in told:
            buffers[name] = store.tensor(key)
        else:
            rest.append(name)
    assumed = []
    for name, other in _ties(store, keys, list(names), rest).items():
        if other is None:
            names[name] = [name]
            assumed.append(name)
        else:
            names[other].append(name)
    if group_of and assumed:
        notes.append(
            f"not stepped by the optimizer, taken for frozen parameters (the format does not tell them from buffers): "
            f"{_some(assumed)}"
        )
    order = {name: number for number, name in enumerate(keys.model)}
    rows = [tuple(sorted(all_names, key=order.__getitem__)) for all_names in names.values()]
    return sorted(rows, key=lambda row: order[row[0]]), buffers


def _ties(store: DcpStore, keys: _Keys, stepped: list[str], rest: list[str]) -> dict[str, str | None]:
    """Return for each of ``rest`` the parameter that it is another name of, None if there is none.

    Such a parameter is in ``stepped`` or earlier in ``rest``, and has the same shape, dtype and values. Only tensors
    that may equal another one are read, each once.
    """

    def form(name: str) -> tuple[Any, ...]:
        meta = store.tensors[keys.model[name]]
        return meta.size, meta.properties.dtype

    count, open_forms = Counter(map(form, [*stepped, *rest])), set(map(form, rest))
    known: dict[tuple[Any, ...], str] = {}
    found: dict[str, str | None] = dict.fromkeys(rest)
    for name in [*stepped, *rest]:
        shape, dtype = form(name)
        if count[shape, dtype] == 1 or (shape, dtype) not in open_forms or shape.numel() < 2:
            continue
        value = store.tensor(keys.model[name])
        first = name if _is_one_value(value) else known.setdefault((shape, dtype, digest(value)), name)
        if first != name and name in found:
            found[name] = first
    return found


def _is_one_value(value: Tensor) -> bool:
    """Return whether all elements are equal, as in new norms and biases, which may be equal without being tied."""
    words = value.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.itemsize])
    return bool(words.min() == words.max())
