"""Filling an engine from a checkpoint of any number of ranks, stage and precision. Owns: the order of a load.

Must not know: the form of files and index, how names and intervals are matched.

1. choose   rank 0 lists what is there; the first checkpoint that every rank finds whole is taken
2. verify   every rank verifies the chunks that it needs, unless the engine is new, and reads its random states
3. fill     every rank reads and verifies its intervals into its own memory; a few blocks of 4 MiB come on top

[Note: Nothing to lose] An engine that has not trained is filled while its checkpoint is verified: the bytes are read
once. Where some are damaged it takes the next checkpoint, and if none is whole its optimizer refuses to train. What has
trained, what a load only fills in part (``strict=False``, ``weights_only``) and what has no optimizer to refuse is
verified first, so that damage changes nothing, and then read again.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardengine.checkpoint import contents, directory, fit, index, left_out, saving, state
from shardengine.checkpoint.reader import Damage, DamageError, Reader, Wanted
from shardengine.comm import Collectives, compare, run_on_all_ranks
from shardengine.core import Core, Inspection
from shardengine.ddp import Phase
from shardengine.errors import CheckpointError, ShardEngineError, UsageError
from shardengine.optim import AVERAGE
from shardengine.sharding import BUFFER, WEIGHT

_PARTLY = ". The engine is partly loaded and refuses to train: load another checkpoint or build it anew"
OPTIMIZER, SCHEDULER = "optimizer", "scheduler"
_PARTS = {OPTIMIZER, SCHEDULER}
"""What a load may be without."""
_MOSTLY_ALONE = 1.5
"""× a checkpoint's size is what all ranks read together at most, where each reads past the page cache."""


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded, from where. missing, unexpected: tensors that only the model, or only the checkpoint has."""

    tag: str
    directory: Path
    global_steps: int
    global_samples: int
    micro_steps: int
    client_state: dict[str, Any]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass
class _Candidate:
    """A checkpoint as one rank sees it. kept: its share of the fingerprints of what the checkpoint leaves out · unfit,
    damaged: why it is not loaded."""

    place: Path
    saved: dict[str, Any] = field(default_factory=dict)
    plan: fit.Plan = field(default_factory=fit.Plan)
    random: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    unfit: str = ""
    damaged: str = ""


@dataclass(frozen=True)
class _Way:
    """How a load goes. strict: see ``Engine.load_checkpoint`` · weights_only: of tensors, those of the model · at_once:
    [Note: Nothing to lose] · schedule: whether the scheduler goes on · counts: whether the counters do."""

    strict: bool
    weights_only: bool
    at_once: bool
    schedule: bool
    counts: bool


def load(
    engine: Inspection,
    folder: str | Path,
    tag: str | None,
    *,
    strict: bool,
    weights_only: bool,
    without: Collection[str] = (),
) -> Checkpoint:
    """Fill the engine from the first checkpoint that every rank finds whole. See ``Engine.load_checkpoint``.

    Also the way on after an update that nothing can finish (recovery: [Note: Back to one step]).
    """
    core = engine._core
    collectives, rank = core.collectives, core.mesh.rank
    core.step_state.require("a call of every rank", "load_checkpoint")
    if isinstance(without, str) or not set(without) <= _PARTS:
        raise UsageError(f"load_checkpoint: expected without= a tuple of some of {sorted(_PARTS)}, got {without!r}")
    counts, schedule = not weights_only, not weights_only and SCHEDULER not in without
    weights_only |= OPTIMIZER in without
    interrupted = _interrupted(engine, whole=strict and not weights_only)
    saving.finish(engine)
    how = [str(folder), str(tag), f"{strict} {weights_only}", *sorted(without)]
    compare(collectives, {"place given to load_checkpoint": how})

    def listed() -> tuple[list[str], str]:
        core.step_state.require("load_checkpoint after an interrupted step" if interrupted else "load_checkpoint")
        place = directory.check_folder(folder)
        return _candidates(place, tag) if rank == 0 else ([], "")

    new = engine.optimizer is not None and engine.global_steps == engine._window.total == 0
    what = "finding the checkpoint"
    told = collectives.exchange_objects([run_on_all_ranks(collectives, what, listed), new], what)
    (names, astray), new = told[0][0], all(row[1] for row in told)  # after a reset() only some ranks may be new
    if interrupted:
        core.step_state.lose()  # its gradients go now
    _come_to_rest(engine)
    if engine.optimizer is not None and strict and not weights_only and _replace_unreadable(core):
        engine.optimizer.end_window()
        core.step_state.lose()
        interrupted = True
    if not interrupted:
        core.adopt_written_weights()
    way = _Way(strict, weights_only, new and strict and not weights_only, schedule, counts)
    begun = [] if engine.optimizer is None or not new else [dict(group) for group in engine.optimizer.param_groups]
    chosen = _take_first(engine, Path(folder), names, way, astray)
    if engine.optimizer is not None:
        engine.optimizer.end_window()
    counters = {name: chosen.saved["counters"][name] for name in index.COUNTERS}
    engine._go_on_from(counters if counts else None)
    if strict and not weights_only:
        core.step_state.replicas.note_alike()
    if rank == 0:
        _say(engine, chosen, way, begun)
    plan = chosen.plan
    apart: dict[str, Any] = {"missing": tuple(plan.missing), "unexpected": tuple(plan.unexpected)}
    return Checkpoint(chosen.place.name, chosen.place, client_state=chosen.saved["client_state"], **apart, **counters)


def _come_to_rest(engine: Inspection) -> None:
    """Nothing is on its way to weights or states any more."""
    core = engine._core
    core.await_weights()
    core.schedule.reshard_all()
    core.reducer.release()
    if engine.optimizer is not None:
        engine.optimizer.await_reader()
    for store in (store for unit in core.units for store in unit.stores()):
        store.abandon()


def _interrupted(engine: Inspection, *, whole: bool) -> bool:
    """Whether an update was interrupted for good, so that an open window is no obstacle to loading.

    whole: everything that the update has left half done will be loaded.
    """
    state = engine._core.step_state
    if engine.optimizer is None or not state.has_begun:
        return False
    if not (state.phase is Phase.LOST or state.quiet) and engine.world_size > 1:
        raise UsageError(
            "load_checkpoint after a step() that was interrupted in the middle of its update: call engine.reset() on "
            f"every rank first, because collectives of rank {engine.rank} may still be under way"
        )
    if not whole:
        raise UsageError(
            "load_checkpoint after a step() or a load that was interrupted in the middle of its update: expected "
            "strict=True and weights_only=False, because optimizer states and steps are half done, too"
        )
    return True


def _replace_unreadable(core: Core) -> bool:
    """Before all weights and states are written: have zeros where a file has lost them. Whether it had."""
    return sum(store.replace_unreadable() for unit in core.units for store in unit.stores()) > 0


def _beside(folder: Path) -> str:
    """What is said where ``folder`` has no other checkpoint: a Trainer makes a folder for each."""
    beside = directory.beside(folder)
    return f"the newest beside it is in {beside}" if beside is not None else "there is no other checkpoint"


# 1. choose


def _candidates(folder: Path, tag: str | None) -> tuple[list[str], str]:
    """The checkpoints to try, in order: the given one alone, or what ``latest`` names, then all others from the newest;
    and what ``directory.astray`` says. Also ends what a killed run began.
    """
    if tag is not None:
        directory.check_tag(tag)
        with suppress(OSError):
            directory.recover(folder, tag)
        if not (folder / tag).is_dir():
            there = ", ".join(directory.saved(folder)[:8])
            raise CheckpointError(f"{folder} has no checkpoint {tag!r}; there are: {there or 'none'}")
        return [tag], ""
    found, astray, newest = directory.saved(folder), directory.astray(folder), directory.latest(folder)
    names = found if newest is None or astray else [newest, *found]
    if not names:
        raise CheckpointError(
            f"{folder}: expected a directory of checkpoints, it has none ({astray or 'no latest'}); {_beside(folder)}"
        )
    return list(dict.fromkeys(names)), astray


def _take_first(engine: Inspection, folder: Path, names: list[str], way: _Way, astray: str) -> _Candidate:
    """Load the first candidate that all ranks find whole; raises, on all ranks, where it does not fit or none is.

    astray: as ``directory.astray``.
    """
    collectives, rank = engine._core.collectives, engine.rank
    rejected: list[str] = []
    touched = False
    for name in names:
        what = "verifying a checkpoint"
        candidate = run_on_all_ranks(collectives, what, partial(_examine, engine, folder / name, way))
        views = collectives.exchange_objects([candidate.unfit, candidate.damaged, candidate.kept], what)
        unfit, damaged = (next((view[kind] for view in views if view[kind]), "") for kind in (0, 1))
        if not (unfit or damaged):
            unfit = _other_base(engine._core, candidate, left_out.together([view[2] for view in views]), way)
        if unfit and not rejected:
            _raise_everywhere(collectives, UsageError(unfit))
        damaged = damaged or unfit  # somebody else's beside a damaged one of ours is no reason to stop looking
        if not damaged:
            damaged, touched = _take(engine, candidate, way), True
        if not damaged:
            if (astray or rejected) and rank == 0:
                text = "; ".join([astray, *rejected] if astray else rejected)
                warnings.warn(f"load_checkpoint goes back to {folder / name}, because {text}", stacklevel=5)
            return candidate
        rejected.append(damaged)
    what = "listing checkpoints"
    others = run_on_all_ranks(collectives, what, lambda: directory.saved(folder) if rank == 0 else [])
    others = [name for name in collectives.exchange_objects(others, what)[0] if name not in names]
    offer = f"load another checkpoint, there are: {', '.join(others[:8])}" if others else _beside(folder)
    _raise_everywhere(collectives, CheckpointError(f"{'; '.join(rejected)}; {offer}{_PARTLY if touched else ''}"))


def _other_base(core: Core, candidate: _Candidate, here: dict[str, int], way: _Way) -> str:
    """Why frozen parameters that the checkpoint leaves out are not those that it was saved with; "" if they are.

    Where the dtype is another one nothing is known of them, which ``_say`` tells.
    """
    there = {name: row["dtype"] for row in candidate.saved["parameters"] for name in row["names"]}
    rows = {row["names"][0]: row for row in contents.parameter_table(core)}
    kept = candidate.plan.kept
    alike = [name for name, row in rows.items() if name in kept and there.get(name) == row["dtype"]]
    other = [name for name in alike if here.get(name, 0) != kept[name]]
    if not other:
        return ""
    more = f" and {len(other) - 4} more" if len(other) > 4 else ""
    text = (
        f"checkpoint {candidate.place} leaves out frozen parameters, and this engine's are other ones than it was "
        f"saved with: {', '.join(other[:4])}{more}"
    )
    if way.strict:
        return f"{text}. Expected the same base model; strict=False loads the rest onto this one"
    if core.mesh.rank == 0:
        warnings.warn(f"load_checkpoint: {text}", stacklevel=6)
    return ""


def _raise_everywhere(collectives: Collectives, error: ShardEngineError) -> NoReturn:
    """Raise what every rank raises now, so that nobody needs to be told."""
    collectives.failures.mark_known(error)
    raise error


def _examine(engine: Inspection, place: Path, way: _Way) -> _Candidate:
    """Read the index, compare it, verify this rank's part of the files; never raises for what may be wrong with it."""
    candidate = _Candidate(place)
    core = engine._core
    try:
        candidate.saved = index.read(place)
        candidate.plan = fit.plan(
            candidate.saved, engine, strict=way.strict, weights_only=way.weights_only, schedule=way.schedule
        )
    except CheckpointError as error:
        candidate.damaged = str(error)
        return candidate
    if candidate.plan.problems:
        text = "\n  - ".join(dict.fromkeys(candidate.plan.problems))
        hint = (
            "\nstrict=False leaves out what only one side has (names, groups, options, a scheduler), weights_only=True "
            "takes the weights and buffers alone"
        )
        candidate.unfit = f"checkpoint {place} does not fit this engine:\n  - {text}{hint if way.strict else ''}"
        return candidate
    try:
        with Reader(place, candidate.saved["files"], candidate.saved["chunk_bytes"]) as reader:
            for _ in reader.verified(_verified_first(candidate, core, way)):
                pass
            if not way.weights_only:
                candidate.random = _read_random_states(reader, candidate.saved, core)
        _, kept = left_out.parts_of(contents.owned(core, engine.optimizer, own_buffers=False), {*candidate.plan.kept})
        candidate.kept = left_out.sums(kept, contents.sizes(core))
    except DamageError as error:
        candidate.damaged = _told(candidate, error.damage)
    except ValueError as error:
        candidate.damaged = f"{place}: {error}"
    return candidate


def _told(candidate: _Candidate, damage: Damage) -> str:
    names = index.names_at(candidate.saved, damage.file, damage.start, damage.end)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    inside = f"it holds {', '.join(names[:4])}{more}" if names else "nothing that is needed is in that part"
    return f"{candidate.place / damage.file} {damage.what}; {inside}"


def _verified_first(candidate: _Candidate, core: Core, way: _Way) -> dict[str, list[tuple[int, int]]]:
    """File → byte ranges: the heads of this rank's share of the files, and what it will read, unless it is new."""
    files: dict[str, list[tuple[int, int]]] = {}
    for number, file in enumerate(sorted(candidate.saved["files"])):
        if number % core.mesh.ranks == core.mesh.rank:
            files[file] = [(0, 8)]
    if not way.at_once:
        for file, ranges in _ranges(candidate.plan.read).items():
            files.setdefault(file, []).extend(ranges)
    return dict(sorted(files.items()))


def _random_places(saved: dict[str, Any], rank: int) -> dict[str, tuple[str, int, int]]:
    """Name → (file, byte offset, bytes) of the random states of ``rank``, or of the one that it begins from."""
    return {name: tuple(rows[rank % saved["world_size"]]) for name, rows in saved["random"].items()}


def _read_random_states(reader: Reader, saved: dict[str, Any], core: Core) -> dict[str, Tensor]:
    """Read, and found to be usable."""
    states, wanted = {}, dict[str, list[Wanted]]()
    for name, (file, offset, count) in _random_places(saved, core.mesh.rank).items():
        states[name] = torch.empty(count, dtype=torch.uint8)
        wanted.setdefault(file, []).append(Wanted(offset, states[name], torch.uint8))
    reader.fill(wanted)
    state.require_random_states(states, core.mesh.device)
    return states


# 3. fill


def _take(engine: Inspection, chosen: _Candidate, way: _Way) -> str:
    """Fill the engine; "", or, on all ranks, what was damaged: the engine is partly loaded then. Collective."""
    core, optimizer = engine._core, engine.optimizer
    collectives = core.collectives
    parts = partial(contents.held, core, optimizer, writable=True)
    chosen.plan = run_on_all_ranks(collectives, f"loading checkpoint {chosen.place}", lambda: chosen.plan.onto(parts()))
    if optimizer is not None:
        optimizer.end_window()
        core.step_state.lose()  # until load() knows better
    fillings, alone = chosen.plan.fillings, _reads_alone(chosen, core)
    weights = [filling for filling in fillings if filling.part.key in (WEIGHT, BUFFER)]
    states = [filling for filling in fillings if filling.part.key not in (WEIGHT, BUFFER)]
    what = f"loading checkpoint {chosen.place} (the engine is partly loaded)"
    files, direct = chosen.saved["files"], way.at_once and alone
    with Reader(chosen.place, files, chosen.saved["chunk_bytes"], direct=direct) as reader:

        def fill(part: list[fit.Filling], added: Sequence[fit.Filling] = ()) -> str:
            """What was damaged on any rank; "" if nothing was."""
            texts = collectives.exchange_objects(
                run_on_all_ranks(collectives, what, lambda: _filled(reader, chosen, part, added)), what
            )
            return next((text for text in texts if text), "")

        damaged = fill(weights)
        if not damaged:
            with core.adopting_masters():
                damaged = fill(states, chosen.plan.added)
    if not damaged:
        run_on_all_ranks(collectives, what, lambda: _restore(engine, chosen, way))
    if damaged and not way.at_once:  # it was whole a moment ago, and an older one need not write all of the engine
        _raise_everywhere(collectives, CheckpointError(f"{what} failed: {damaged}"))
    return damaged


def _filled(reader: Reader, chosen: _Candidate, fillings: list[fit.Filling], added: Sequence[fit.Filling]) -> str:
    """Fill; "", or what is damaged."""
    try:
        _fill(reader, fillings)
        for each in added:
            _add(reader, each)
        for each in (each for each in fillings if contents.is_error(each.part.key) and chosen.plan.share != 1):
            each.part.values.mul_(chosen.plan.share)
    except DamageError as error:
        return _told(chosen, error.damage)
    return ""


def _reads_alone(chosen: _Candidate, core: Core) -> bool:
    """Whether ranks have little in common of what they read: then the page cache of a machine is of no use."""
    needed = sum(end - start for ranges in _ranges(chosen.plan.read).values() for start, end in ranges)
    whole: int = sum(facts["bytes"] for facts in chosen.saved["files"].values())
    return needed * core.mesh.ranks <= _MOSTLY_ALONE * whole


def _ranges(fillings: Iterable[fit.Filling]) -> dict[str, list[tuple[int, int]]]:
    """File → the bytes that are read of it."""
    files: dict[str, list[tuple[int, int]]] = {}
    for filling in fillings:
        for file, offset, start, stop in filling.sources:
            files.setdefault(file, []).append((offset, offset + (stop - start) * filling.dtype.itemsize))
    return files


@torch.no_grad()
def _fill(reader: Reader, fillings: Iterable[fit.Filling]) -> None:
    """Write every view of ``fillings``; in the order of the files, whatever theirs is."""
    wanted: dict[str, list[Wanted]] = {}
    apart: list[tuple[Tensor, Tensor]] = []
    for filling in fillings:
        values = filling.part.values
        flat = values.view(-1) if values.is_contiguous() else values.new_empty(values.numel())
        if not values.is_contiguous():
            apart.append((values, flat))
        for file, offset, start, stop in filling.sources:
            wanted.setdefault(file, []).append(Wanted(offset, flat[start:stop], filling.dtype))
    reader.fill(dict(sorted(wanted.items())))
    for values, flat in apart:
        values.copy_(flat.view(values.shape))


@torch.no_grad()
def _add(reader: Reader, filling: fit.Filling) -> None:
    """Onto what is there."""
    read = torch.empty_like(filling.part.values)
    _fill(reader, [fit.Filling(filling.part._replace(values=read), filling.dtype, filling.sources)])
    filling.part.values.add_(read)


def _restore(engine: Inspection, chosen: _Candidate, way: _Way) -> None:
    """Everything but weights, buffers and the optimizer's tensors."""
    plan = chosen.plan
    if plan.scheduler:
        state.restore_scheduler(engine.lr_scheduler, chosen.saved["lr_scheduler"], plan.origins)
    if way.weights_only:
        if way.counts:
            state.restore_skipped(engine.optimizer, chosen.saved["loss_scaler"])
        return
    _restore_random_states(engine._core, chosen)
    for part in plan.fresh:
        part.values.zero_()
    if engine.optimizer is not None:
        _begin_averages(plan)
        state.restore_optimizer(engine.optimizer, plan.groups, plan.steps, plan.facts)
    state.restore_scaler(engine.optimizer, chosen.saved["loss_scaler"])


def _begin_averages(plan: fit.Plan) -> None:
    """Those that the checkpoint does not have begin with the weights that it has."""
    fresh = [part for part in plan.fresh if part.key == AVERAGE]
    weights = {(f.part.name, f.part.first): f.part for f in plan.fillings if f.part.key == WEIGHT} if fresh else {}
    for part in fresh:
        if (weight := weights.get((part.name, part.first))) is not None:
            part.values.copy_(weight.values)


def _restore_random_states(core: Core, chosen: _Candidate) -> None:
    if core.mesh.rank < chosen.saved["world_size"]:
        state.restore_random_states(chosen.random, core.mesh.device)
    else:
        state.seed_anew(chosen.random, core.mesh.rank)


def _say(engine: Inspection, chosen: _Candidate, way: _Way, begun: list[dict[str, Any]]) -> None:
    """Warn of what a user may not have meant. begun: the groups of an engine that has not trained, as they were."""
    plan, notes = chosen.plan, []
    before, now = chosen.saved["batch"].get("train_batch_size"), engine.train_batch_size()
    if before and before != now and way.counts:
        notes.append(
            f"the global batch was {before} samples, now it is {now}: set train_batch_size to {before} (with "
            "train_micro_batch_size_per_gpu) to keep it at any number of ranks"
        )
    other_dtype = (
        "frozen parameters that it leaves out have another dtype here, so that nobody has compared them: expected "
        "those of the same base model"
    )
    for names, what in ((plan.converted, "dtypes were converted"), (plan.missing, "are not in the checkpoint"),
                        (plan.unexpected, "are only in the checkpoint"),
                        (plan.unknown, other_dtype)):  # fmt: skip
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            notes.append(f"{what}: {', '.join(names[:4])}{more}")
    kept = [str(number) for number, options in enumerate(plan.groups) if options is None]
    if kept:
        notes.append(f"optimizer group(s) {', '.join(kept)} keep their own options, the checkpoint has no such group")
    if begun and engine.optimizer is not None:
        goes_on = engine.lr_scheduler is not None and bool(plan.scheduler) and way.schedule
        if note := state.changed_rates(begun, engine.optimizer.param_groups, goes_on):
            notes.append(note)
    if engine.lr_scheduler is not None and not plan.scheduler and way.schedule:
        notes.append("the scheduler is another one than in the checkpoint and keeps its own state")
    for note in notes:
        warnings.warn(f"load_checkpoint of {chosen.place}: {note}", stacklevel=6)
