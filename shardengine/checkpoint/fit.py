"""Check that a checkpoint fits an engine, and plan the load. Owns: names, groups and dtypes on both sides.

Must not know: files, ranks. All problems are found before anything is changed: a plan either has problems or can be
carried out. Two layouts are matched by names and flat intervals alone; it does not matter which rank held them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardengine.checkpoint import contents, index, state
from shardengine.core import Core, Inspection
from shardengine.ddp import FACTOR
from shardengine.kernels import KEPT_IN
from shardengine.optim import ShardedOptimizer
from shardengine.sharding import BUFFER, WEIGHT, FlatSlice

Source = tuple[str, int, int, int]
"""(file, byte offset, first element, one past the last element); elements are counted in the part that is filled."""


@dataclass(frozen=True)
class FitTarget:
    """A part of the engine's tensors, with the sources of its elements and their dtype in the checkpoint."""

    part: FlatSlice
    dtype: torch.dtype
    sources: list[Source]


@dataclass
class FitPlan:
    """The plan of a load. problems: the reasons why the checkpoint cannot be loaded.

    missing, unexpected: names that only the engine, or only the checkpoint has (``strict=False``) · kept: frozen
    parameters that the checkpoint leaves out, with their fingerprints in it · fresh: parts that are set to zero ·
    added: parts that are added to the results of ``fillings``, in order · share: factor for the summed errors
    (contents: [Note: Errors of other ranks]) · groups: per optimizer group the options to load, None to keep its own ·
    origins: each group's number in the checkpoint · steps: per parameter · converted: tensors whose dtype differs, as
    texts · unknown: the tensors in ``kept`` whose dtype differs, so that their fingerprints cannot be compared
    """

    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    fillings: list[FitTarget] = field(default_factory=list)
    added: list[FitTarget] = field(default_factory=list)
    share: float = 1.0
    fresh: list[FlatSlice] = field(default_factory=list)
    groups: list[dict[str, Any] | None] = field(default_factory=list)
    origins: list[int | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    scheduler: bool = False

    def onto(self, parts: Iterable[FlatSlice]) -> FitPlan:
        """Return the same plan for ``parts``, which are writable views; it was made from read-only views."""
        found = {(part.name, part.key, part.first): part for part in parts}
        fillings, added = ([replace(each, part=found[each.part[:3]]) for each in those]
                           for those in (self.fillings, self.added))  # fmt: skip
        return replace(self, fillings=fillings, added=added, fresh=[found[part[:3]] for part in self.fresh])

    @property
    def read(self) -> list[FitTarget]:
        """All parts that are read from files."""
        return [*self.fillings, *self.added]


_WORDS = {dtype: word for word, dtype in KEPT_IN.items()}


class _Saved:
    """A checkpoint's tables by name. Tied weights are found under each of their names."""

    def __init__(self, saved: dict[str, Any]) -> None:
        self.rows = {row["names"][0]: row for row in saved["parameters"]}
        self.rows |= {row["name"]: row for row in saved["buffers"]}
        self.alias = {name: row["names"][0] for row in saved["parameters"] for name in row["names"]}
        self.alias |= {row["name"]: row["name"] for row in saved["buffers"]}
        self.tensors: dict[tuple[str, str], tuple[torch.dtype, list[index.StoredRange]]] = {
            (name, kind): (dtype, pieces) for name, kind, dtype, pieces in index.entries(saved)
        }
        self.states = {kind for _, kind in self.tensors if not contents.is_of_hook(kind)} - {WEIGHT, BUFFER}
        optimizer = saved["optimizer"] or {"kind": None, "groups": [], "steps": {}}
        self.kind: str | None = optimizer["kind"]
        self.groups: list[dict[str, Any]] = optimizer["groups"]
        self.steps: dict[str, int] = optimizer["steps"]
        self.facts: dict[str, Any] = optimizer.get("facts", {})
        self.whole: dict[str, Any] = optimizer.get("whole", {})
        self.ranks: int = saved["world_size"]
        self.own_buffers: bool = saved["own_buffers"]
        self.scheduler = saved["lr_scheduler"]
        self.left_out: dict[str, int] = saved.get("left_out", {})


def plan(
    saved: dict[str, Any], engine: Inspection, *, strict: bool, weights_only: bool, schedule: bool = True
) -> FitPlan:
    """Plan how ``engine`` loads the checkpoint with the index ``saved``; local, changes nothing.

    weights_only: load no other tensors than weights and buffers · schedule: whether the scheduler's state is loaded.
    """
    there, core, found = _Saved(saved), engine._core, FitPlan()
    sources = _match(there, core, found, strict=strict)
    found.kept = {name: there.left_out[origin] for name, origin in sources.items() if origin in there.left_out}
    if not weights_only:
        found.problems += _ties(there, core) if strict else []
        _compare_optimizers(there, engine, found, sources, strict=strict, schedule=schedule)
    elif schedule and engine.optimizer is not None:
        found.origins = list(range(len(engine.optimizer.param_groups)))
        _compare_schedulers(there, engine, found, strict=strict)
    if not schedule:
        found.scheduler = False
    for part in contents.held(core, engine.optimizer):
        if part.name not in sources or (weights_only and part.key not in (WEIGHT, BUFFER)):
            continue
        if contents.is_error(part.key) and there.ranks != core.mesh.ranks:
            _take_errors(part, sources[part.name], there, core, found)
            continue
        entry = there.tensors.get((sources[part.name], part.key))
        if part.key == WEIGHT and part.name in found.kept:
            continue
        if part.key == FACTOR and (entry is None or sum(p.end - p.first for p in entry[1]) != part.values.numel()):
            continue  # no factor in the checkpoint, or one with more or fewer columns: any factor is a valid start
        if entry is None:
            _without_source(part, sources[part.name], there, found)
            continue
        dtype, pieces = entry
        if part.key == BUFFER and there.own_buffers:
            pieces = [piece for piece in pieces if piece.file == index.file_of(core.mesh.rank % there.ranks)]
        filling = FitTarget(part, dtype, list(_overlaps(part, pieces, dtype)))
        if _covers(filling):
            found.fillings.append(filling)
        else:
            found.problems.append(f"{part.name} ({part.key}): some of its elements are in no file of the checkpoint")
    return found


def _take_errors(part: FlatSlice, origin: str, there: _Saved, core: Core, found: FitPlan) -> None:
    """Plan the error feedback of a rank for another world size (contents: [Note: Errors of other ranks])."""
    mesh = core.mesh
    found.share = mesh.ranks / there.ranks if core.reducer.rules.divisor == mesh.ranks else 1.0
    keys = [contents.error_key(rank) for rank in range(mesh.rank, there.ranks, mesh.ranks)]
    entries = [there.tensors[origin, key] for key in keys if (origin, key) in there.tensors]
    fillings = [FitTarget(part, dtype, list(_overlaps(part, pieces, dtype))) for dtype, pieces in entries]
    if not all(_covers(filling) for filling in fillings):
        found.problems.append(f"{part.name} ({part.key}): some of its elements are in no file of the checkpoint")
    if not fillings:
        found.fresh.append(part)
    found.fillings += fillings[:1]
    found.added += fillings[1:]


def _match(there: _Saved, core: Core, found: FitPlan, *, strict: bool) -> dict[str, str]:
    """Return each tensor's first name here → its first name in the checkpoint, for those that are in both and fit."""
    sources: dict[str, str] = {}
    rows = [(row["names"], row) for row in contents.parameter_table(core)]
    rows += [([row["name"]], row) for row in contents.buffer_table(core)]
    for names, row in rows:
        origins = list(dict.fromkeys(there.alias[name] for name in names if name in there.alias))
        if not origins:
            found.missing.append(names[0])
        elif len(origins) > 1:
            found.problems.append(f"{names[0]}: one tensor here, several in the checkpoint: {', '.join(origins)}")
        elif problem := _difference(there.rows[origins[0]], row):
            found.problems.append(f"{names[0]}: {problem}")
        else:
            sources[names[0]] = origins[0]
            dtypes = there.rows[origins[0]]["dtype"], row["dtype"]
            if dtypes[0] != dtypes[1]:
                told = found.unknown if origins[0] in there.left_out else found.converted
                told.append(f"{names[0]} ({dtypes[0]} to {dtypes[1]})")
    here = {name for names, _ in rows for name in names}
    found.unexpected += [first for first, row in there.rows.items() if not here & set(row.get("names", [first]))]
    if strict:
        found.problems += [f"{name}: not in the checkpoint" for name in found.missing]
        found.problems += [f"{name}: only in the checkpoint" for name in found.unexpected]
    return sources


def _ties(there: _Saved, core: Core) -> list[str]:
    """Return a problem for each tensor of the checkpoint that is tied there and not here: training would differ."""
    here = {name: row["names"][0] for row in contents.parameter_table(core) for name in row["names"]}
    shared = [list(dict.fromkeys(here[n] for n in row.get("names", ()) if n in here)) for row in there.rows.values()]
    return [f"{', '.join(names)}: one tensor in the checkpoint, {len(names)} here" for names in shared if names[1:]]


def _difference(saved: dict[str, Any], ours: dict[str, Any]) -> str:
    """Return why a tensor cannot be loaded; "" if it can. Any floating-point dtype can be converted to any other."""
    if ("names" in saved) != ("names" in ours):
        kinds = ["parameter" if "names" in row else "buffer" for row in (saved, ours)]
        return f"a {kinds[0]} in the checkpoint, a {kinds[1]} here"
    if saved["shape"] != ours["shape"]:
        return f"its shape is {saved['shape']} in the checkpoint, {ours['shape']} here"
    if _order(saved) != _order(ours):
        return f"its order in memory is {saved['order']} in the checkpoint, {ours['order']} here ([]: the shape's own)"
    floating = [getattr(torch, row["dtype"]).is_floating_point for row in (saved, ours)]
    if saved["dtype"] != ours["dtype"] and not all(floating):
        return f"its dtype is {saved['dtype']} in the checkpoint, {ours['dtype']} here"
    return ""


def _order(row: dict[str, Any]) -> list[int]:
    """Return a tensor's order in memory, without the dimensions of size one."""
    dimensions = row.get("order") or range(len(row["shape"]))
    return [dimension for dimension in dimensions if row["shape"][dimension] != 1]


def _without_source(part: FlatSlice, origin: str, there: _Saved, found: FitPlan) -> None:
    """Handle a part that the checkpoint lacks although it has the parameter: it was frozen, or had no momentum.

    Such a part is set to zero. A missing weight, buffer or state that the checkpoint should have is a problem.
    """
    if part.key in (BUFFER, WEIGHT) or (there.rows[origin]["trainable"] and part.key in there.states):
        found.problems.append(f"{part.name} ({part.key}): the checkpoint names {origin}, but has nothing of it")
    else:
        found.fresh.append(part)


def _overlaps(
    part: FlatSlice, pieces: list[index.StoredRange], dtype: torch.dtype
) -> Iterator[tuple[str, int, int, int]]:
    for piece in pieces:
        start, stop = max(piece.first, part.first), min(piece.end, part.end)
        if start < stop:
            offset = piece.offset + (start - piece.first) * dtype.itemsize
            yield piece.file, offset, start - part.first, stop - part.first


def _covers(filling: FitTarget) -> bool:
    reached = 0
    for _, _, start, stop in sorted(filling.sources, key=lambda source: source[2]):
        if start > reached:
            return False
        reached = max(reached, stop)
    return reached >= filling.part.values.numel()


def _compare_optimizers(
    there: _Saved, engine: Inspection, found: FitPlan, sources: dict[str, str], *, strict: bool, schedule: bool
) -> None:
    optimizer, core = engine.optimizer, engine._core
    kinds = [there.kind or "none", "none" if optimizer is None else optimizer.kind]
    if kinds[0] != kinds[1]:
        found.problems.append(
            f"optimizer: the checkpoint has {kinds[0]}, the engine {kinds[1]} (weights_only=True takes the weights)"
        )
    if optimizer is None or kinds[0] != kinds[1]:
        return
    _match_groups(there, optimizer, core, found, sources, strict=strict)
    states = set(optimizer.forms) | {key for _, tensors in optimizer.whole_states() for key in tensors}
    saved = {kind: dtype for (_, kind), (dtype, _) in there.tensors.items()}
    forms = optimizer.forms
    other = sorted(name for name in forms.keys() & saved.keys() if saved[name] is not forms[name].dtype)
    if other:
        words = [_WORDS.get(dtype, str(dtype)) for dtype in (saved[other[0]], forms[other[0]].dtype)]
        found.problems.append(
            f"optimizer: its states are in {words[0]} in the checkpoint, in {words[1]} here: set "
            f'data_types.optimizer_state_dtype to "{words[0]}", or take the weights alone (weights_only=True); '
            "engine.optimizer.state_dict() and load_state_dict() go from one to the other"
        )
    elif wrong := _misshapen(there, optimizer, sources):
        found.problems.append(wrong)
    elif states != there.states and strict:
        texts = [" and ".join(sorted(names)) or "no state" for names in (there.states, states)]
        found.problems.append(f"optimizer: {kinds[0]} has {texts[0]} in the checkpoint, {texts[1]} here")
    schedulers = _compare_schedulers(there, engine, found, strict=strict and schedule)
    for number, (options, group) in enumerate(zip(found.groups, optimizer.param_groups, strict=True)):
        if options is not None:
            fitting, problems = _fitting_options(number, options, group, schedulers=schedulers)
            if states != there.states:
                fitting.pop("momentum", None)
            found.groups[number] = fitting
            found.problems += problems if strict else []
            family = optimizer.arithmetic.family
            if family({**group, **fitting}) != family(group):
                found.problems.append(
                    f"optimizer group {number}: its parameters are stepped by another optimizer in the checkpoint "
                    "(use_muon), expected the same one"
                )
    for row in contents.parameter_table(core):
        before = there.rows.get(sources.get(row["names"][0], ""), row)["trainable"]
        if strict and before != row["trainable"]:
            texts = [("frozen", "trained")[trained] for trained in (before, row["trainable"])]
            found.problems.append(f"{row['names'][0]}: {texts[0]} in the checkpoint, {texts[1]} here")
    stepped = {name for name, kind in there.tensors if kind in there.states}
    found.problems += [f"{name}: no number of steps in the checkpoint" for name in sorted(stepped - there.steps.keys())]
    found.steps = [
        there.steps.get(sources[spec.name], 0) if spec.name in sources else now
        for spec, now in zip(core.layout.parameters, optimizer.steps, strict=True)
    ]
    origins = {spec.name: sources.get(spec.name, "") for spec in core.layout.parameters}
    found.facts = {name: there.facts[origin] for name, origin in origins.items() if origin in there.facts}
    if problem := optimizer.arithmetic.problem(found.facts, {n for n, o in origins.items() if there.steps.get(o)}):
        found.problems.append(f"optimizer: {problem}")


def _misshapen(there: _Saved, optimizer: ShardedOptimizer, sources: dict[str, str]) -> str:
    """Return the first state kept per whole parameter whose dtype or shape differs, as a problem; "" if none does."""
    for spec, tensors in optimizer.whole_states():
        origin = sources.get(spec.name, "")
        for key, tensor in tensors.items():
            saved = there.tensors.get((origin, key))
            if saved is None:
                continue
            shape = there.whole.get(origin, {}).get(key)
            if saved[0] is not tensor.dtype or shape != list(tensor.shape):
                return (
                    f"{spec.name} ({key}): expected {str(tensor.dtype).removeprefix('torch.')} of shape "
                    f"{list(tensor.shape)}, the checkpoint has {str(saved[0]).removeprefix('torch.')} of shape {shape}"
                )
    return ""


def _match_groups(
    there: _Saved, optimizer: ShardedOptimizer, core: Core, found: FitPlan, sources: dict[str, str], *, strict: bool
) -> None:
    """Match each optimizer group with the group of the checkpoint that holds the same parameters, in any order.

    Without ``strict``, only the parameters that are in a group on both sides are compared.
    """
    first = core.partition.first_names()
    here = [[sources.get(first[id(p)], first[id(p)]) for p in group["params"]] for group in optimizer.param_groups]
    known = [{name for names in side for name in names} for side in (here, [group["params"] for group in there.groups])]
    kept = known[0] | known[1] if strict else known[0] & known[1]
    open_groups: dict[frozenset[str], list[int]] = {}
    for number, group in enumerate(there.groups):
        open_groups.setdefault(frozenset(group["params"]) & kept, []).append(number)
    for number, names in enumerate(here):
        chosen = kept.intersection(names)
        matches = open_groups.get(frozenset(chosen), []) if chosen or not names else []
        found.origins.append(matches.pop(0) if matches else None)
        origin = found.origins[-1]
        found.groups.append(None if origin is None else there.groups[origin]["options"])
        if strict and origin is None:
            found.problems.append(f"optimizer group {number}: no group of the checkpoint holds just {_some(names)}")
    left = [number for matches in open_groups.values() for number in matches] if strict else []
    found.problems += [
        f"optimizer: the engine has no group that holds just {_some(there.groups[number]['params'])}"
        for number in sorted(left)
    ]


def _some(names: list[str]) -> str:
    """Return the first few of ``names`` as text for a message."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more if names else "no parameter"


def _fitting_options(
    number: int, saved: dict[str, Any], group: dict[str, Any], *, schedulers: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the options that can be loaded, and the problems of the others: unknown here, or of another type.

    schedulers: whether both sides have the same scheduler. If not, options unknown here belong to the checkpoint's
    scheduler and are no problem.
    """
    ours = state.options_of(group)
    numbers = state.numbered(saved, ours)
    fitting = {
        key: numbers[key]
        for key, value in saved.items()
        if key in ours and (state.is_like(value, ours[key]) or numbers[key] is not value)
    }
    problems = [
        f"optimizer group {number}: {key} is {str(value)[:80]!r} in the checkpoint, {ours[key]!r} here"
        if key in ours
        else f"optimizer group {number}: {key!r} is no option of the engine's"
        for key, value in saved.items()
        if key not in fitting and (key in ours or schedulers)
    ]
    return fitting, problems


def _compare_schedulers(there: _Saved, engine: Inspection, found: FitPlan, *, strict: bool) -> bool:
    """Return whether both sides have the same class of scheduler, or none; plan to load its state if it fits."""
    scheduler = engine.lr_scheduler
    kinds = [
        there.scheduler["type"] if there.scheduler else "none",
        type(scheduler).__name__ if scheduler is not None else "none",
    ]
    problems = [f"lr_scheduler: the checkpoint has {kinds[0]}, the engine {kinds[1]}"]
    if kinds[0] == kinds[1]:
        problems = [] if scheduler is None else state.scheduler_problems(scheduler, there.scheduler, found.origins)
        found.scheduler = scheduler is not None and not problems
    found.problems += problems if strict else []
    return kinds[0] == kinds[1]
