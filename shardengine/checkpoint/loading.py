"""Load an engine from a checkpoint of any world size, stage and precision. Owns: the order of a load.

Must not know: the format of files and index, how names and intervals are matched.

1. choose   rank 0 lists the checkpoints; the first one that every rank finds undamaged is loaded
2. verify   every rank verifies the chunks that it needs, unless the engine is new, and reads its random states
3. fill     every rank reads and verifies its intervals into its own memory, plus a few blocks of 4 MiB

[Note: Nothing to lose] An engine that has not trained is filled while its checkpoint is verified, so the bytes are read
once. If some are damaged, the engine takes the next checkpoint; if all are damaged, its optimizer refuses to train. In
three cases the checkpoint is verified first and then read again, so that damage changes nothing: the engine has
trained, the load fills only part of it (``strict=False``, ``weights_only``), or it has no optimizer that could refuse.
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
from shardengine.checkpoint.reader import BlockReader, DamageError, FileDamage, Wanted
from shardengine.comm import Collectives, compare, run_on_all_ranks
from shardengine.core import Core, Inspection
from shardengine.ddp import Phase
from shardengine.errors import CheckpointError, ShardEngineError, UsageError
from shardengine.optim import AVERAGE
from shardengine.sharding import BUFFER, WEIGHT

_PARTLY = ". The engine is partly loaded and refuses to train: load another checkpoint or build it anew"
OPTIMIZER, SCHEDULER = "optimizer", "scheduler"
_PARTS = {OPTIMIZER, SCHEDULER}
"""The parts that ``without=`` may exclude from a load."""
_MOSTLY_ALONE = 1.5
"""Ranks bypass the page cache if together they read at most this many times the size of the checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """The result of a load. missing, unexpected: tensors that only the model, or only the checkpoint has."""

    tag: str
    directory: Path
    global_steps: int
    global_samples: int
    micro_steps: int
    client_state: dict[str, Any]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass
class _FoundCheckpoint:
    """A checkpoint as one rank sees it.

    kept: this rank's share of the fingerprints of the weights that are left out · unfit, damaged: why it is not loaded.
    """

    place: Path
    saved: dict[str, Any] = field(default_factory=dict)
    plan: fit.FitPlan = field(default_factory=fit.FitPlan)
    random: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    unfit: str = ""
    damaged: str = ""


@dataclass(frozen=True)
class _LoadOptions:
    """The mode of a load.

    strict: see ``Engine.load_checkpoint`` · weights_only: load no other tensors than the model's · at_once: fill while
    verifying ([Note: Nothing to lose]) · schedule: load the scheduler's state · counts: load the counters.
    """

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
    """Fill the engine from the first checkpoint that every rank finds undamaged. See ``Engine.load_checkpoint``.

    A load also recovers an engine whose update cannot be finished (recovery: [Note: Back to one step]).
    """
    core = engine._core
    collectives, rank = core.collectives, core.mesh.rank
    core.step_state.require("a call of every rank", "load_checkpoint")
    if isinstance(without, str) or not set(without) <= _PARTS:
        raise UsageError(
            f"load_checkpoint: expected without= a tuple of some of {sorted(_PARTS)}, got {without!r}",
            code="load-without-unknown-part",
        )
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
        core.step_state.lose()  # discards its gradients
    _come_to_rest(engine)
    if engine.optimizer is not None and strict and not weights_only and _replace_unreadable(core):
        engine.optimizer.end_window()
        core.step_state.lose()
        interrupted = True
    if not interrupted:
        core.adopt_written_weights()
    way = _LoadOptions(strict, weights_only, new and strict and not weights_only, schedule, counts)
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
    """Wait until nothing in flight reads or writes weights or states."""
    core = engine._core
    core.await_weights()
    core.schedule.reshard_all()
    core.reducer.discard()
    if engine.optimizer is not None:
        engine.optimizer.await_reader()
    for store in (store for unit in core.units for store in unit.stores()):
        store.abandon()


def _interrupted(engine: Inspection, *, whole: bool) -> bool:
    """Return whether an update was interrupted for good, so that an open accumulation window may be discarded.

    whole: the load replaces everything that the update has left half done. UsageError if it does not, or if
    collectives of the update may still be in flight.
    """
    state = engine._core.step_state
    if engine.optimizer is None or not state.has_begun:
        return False
    if not (state.phase is Phase.LOST or state.quiet) and engine.world_size > 1:
        raise UsageError(
            "load_checkpoint after a step() that was interrupted in the middle of its update: call engine.reset() on "
            f"every rank first, because collectives of rank {engine.rank} may still be under way",
            code="load-before-reset",
        )
    if not whole:
        raise UsageError(
            "load_checkpoint after a step() or a load that was interrupted in the middle of its update: expected "
            "strict=True and weights_only=False, because optimizer states and steps are half done, too",
            code="load-partial-after-interruption",
        )
    return True


def _replace_unreadable(core: Core) -> bool:
    """Replace weights and states that a file has lost by zeros, before a load writes all of them; return if any."""
    return sum(store.replace_unreadable() for unit in core.units for store in unit.stores()) > 0


def _beside(folder: Path) -> str:
    """Return a hint for a ``folder`` without another checkpoint: a Trainer makes one folder per checkpoint."""
    beside = directory.beside(folder)
    return f"the newest beside it is in {beside}" if beside is not None else "there is no other checkpoint"


# 1. choose


def _candidates(folder: Path, tag: str | None) -> tuple[list[str], str]:
    """Return (the checkpoints to try, in order; the text of ``directory.astray``).

    With ``tag``, that checkpoint alone; else the one that ``latest`` names, then all others from the newest. Saves that
    were interrupted are recovered first. CheckpointError if there is no such checkpoint.
    """
    if tag is not None:
        directory.check_tag(tag)
        with suppress(OSError):
            directory.recover(folder, tag)
        if not (folder / tag).is_dir():
            there = ", ".join(directory.saved(folder)[:8])
            raise CheckpointError(
                f"{folder} has no checkpoint {tag!r}; there are: {there or 'none'}", code="checkpoint-tag-unknown"
            )
        return [tag], ""
    found, astray, newest = directory.saved(folder), directory.astray(folder), directory.latest(folder)
    names = found if newest is None or astray else [newest, *found]
    if not names:
        raise CheckpointError(
            f"{folder}: expected a directory of checkpoints, it has none ({astray or 'no latest'}); {_beside(folder)}",
            code="checkpoint-not-found",
        )
    return list(dict.fromkeys(names)), astray


def _take_first(engine: Inspection, folder: Path, names: list[str], way: _LoadOptions, astray: str) -> _FoundCheckpoint:
    """Load the first candidate that all ranks find undamaged; return it.

    Raises on all ranks if the first candidate does not fit, or if every one is rejected. astray: the text of
    ``directory.astray``.
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
            _raise_everywhere(collectives, UsageError(unfit, code="checkpoint-does-not-fit"))
        damaged = damaged or unfit  # after a damaged candidate, one that does not fit (of another run) is skipped
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
    _raise_everywhere(
        collectives,
        CheckpointError(f"{'; '.join(rejected)}; {offer}{_PARTLY if touched else ''}", code="checkpoint-damaged"),
    )


def _other_base(core: Core, candidate: _FoundCheckpoint, here: dict[str, int], way: _LoadOptions) -> str:
    """Return why frozen parameters that the checkpoint leaves out differ from those it was saved with; "" if equal.

    Without ``strict`` a difference is only a warning. Parameters of another dtype are not compared; ``_say`` warns of
    them.
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
    """Raise ``error``, which every rank raises now, so that it is not propagated to the other ranks."""
    collectives.failures.mark_known(error)
    raise error


def _examine(engine: Inspection, place: Path, way: _LoadOptions) -> _FoundCheckpoint:
    """Read the index, compare it, verify this rank's part of the files; problems are recorded, not raised."""
    candidate = _FoundCheckpoint(place)
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
        with BlockReader(place, candidate.saved["files"], candidate.saved["chunk_bytes"]) as reader:
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


def _told(candidate: _FoundCheckpoint, damage: FileDamage) -> str:
    names = index.names_at(candidate.saved, damage.file, damage.start, damage.end)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    inside = f"it holds {', '.join(names[:4])}{more}" if names else "nothing that is needed is in that part"
    return f"{candidate.place / damage.file} {damage.what}; {inside}"


def _verified_first(candidate: _FoundCheckpoint, core: Core, way: _LoadOptions) -> dict[str, list[tuple[int, int]]]:
    """Return file → byte ranges to verify before the load.

    These are the heads of this rank's share of the files and, unless ``at_once``, the bytes that it will read.
    """
    files: dict[str, list[tuple[int, int]]] = {}
    for number, file in enumerate(sorted(candidate.saved["files"])):
        if number % core.mesh.ranks == core.mesh.rank:
            files[file] = [(0, 8)]
    if not way.at_once:
        for file, ranges in _ranges(candidate.plan.read).items():
            files.setdefault(file, []).extend(ranges)
    return dict(sorted(files.items()))


def _random_places(saved: dict[str, Any], rank: int) -> dict[str, tuple[str, int, int]]:
    """Return name → (file, byte offset, bytes) of the random states for ``rank``.

    A rank that the checkpoint does not have gets those of rank modulo the saved world size.
    """
    return {name: tuple(rows[rank % saved["world_size"]]) for name, rows in saved["random"].items()}


def _read_random_states(reader: BlockReader, saved: dict[str, Any], core: Core) -> dict[str, Tensor]:
    """Read this rank's random states and check that they can be restored."""
    states, wanted = {}, dict[str, list[Wanted]]()
    for name, (file, offset, count) in _random_places(saved, core.mesh.rank).items():
        states[name] = torch.empty(count, dtype=torch.uint8)
        wanted.setdefault(file, []).append(Wanted(offset, states[name], torch.uint8))
    reader.fill(wanted)
    state.require_random_states(states, core.mesh.device)
    return states


# 3. fill


def _take(engine: Inspection, chosen: _FoundCheckpoint, way: _LoadOptions) -> str:
    """Fill the engine; return "", or on all ranks the damage, which leaves the engine partly loaded. Collective."""
    core, optimizer = engine._core, engine.optimizer
    collectives = core.collectives
    parts = partial(contents.held, core, optimizer, writable=True)
    chosen.plan = run_on_all_ranks(collectives, f"loading checkpoint {chosen.place}", lambda: chosen.plan.onto(parts()))
    if optimizer is not None:
        optimizer.end_window()
        core.step_state.lose()  # until load() has finished
    fillings, alone = chosen.plan.fillings, _reads_alone(chosen, core)
    weights = [filling for filling in fillings if filling.part.key in (WEIGHT, BUFFER)]
    states = [filling for filling in fillings if filling.part.key not in (WEIGHT, BUFFER)]
    what = f"loading checkpoint {chosen.place} (the engine is partly loaded)"
    files, direct = chosen.saved["files"], way.at_once and alone
    with BlockReader(chosen.place, files, chosen.saved["chunk_bytes"], direct=direct) as reader:

        def fill(part: list[fit.FitTarget], added: Sequence[fit.FitTarget] = ()) -> str:
            """Fill these parts; return the first damage that any rank found, "" if there is none."""
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
    if damaged and not way.at_once:  # it was verified before, and an older one may not overwrite all of the engine
        _raise_everywhere(
            collectives, CheckpointError(f"{what} failed: {damaged}", code="checkpoint-damaged-while-loading")
        )
    return damaged


def _filled(
    reader: BlockReader, chosen: _FoundCheckpoint, fillings: list[fit.FitTarget], added: Sequence[fit.FitTarget]
) -> str:
    """Read this rank's parts; return "", or a text about the damage."""
    try:
        _fill(reader, fillings)
        for each in added:
            _add(reader, each)
        for each in (each for each in fillings if contents.is_error(each.part.key) and chosen.plan.share != 1):
            each.part.values.mul_(chosen.plan.share)
    except DamageError as error:
        return _told(chosen, error.damage)
    return ""


def _reads_alone(chosen: _FoundCheckpoint, core: Core) -> bool:
    """Return whether the ranks read mostly different bytes, so that the page cache of a machine does not help."""
    needed = sum(end - start for ranges in _ranges(chosen.plan.read).values() for start, end in ranges)
    whole: int = sum(facts["bytes"] for facts in chosen.saved["files"].values())
    return needed * core.mesh.ranks <= _MOSTLY_ALONE * whole


def _ranges(fillings: Iterable[fit.FitTarget]) -> dict[str, list[tuple[int, int]]]:
    """Return file → the byte ranges that ``fillings`` read from it."""
    files: dict[str, list[tuple[int, int]]] = {}
    for filling in fillings:
        for file, offset, start, stop in filling.sources:
            files.setdefault(file, []).append((offset, offset + (stop - start) * filling.dtype.itemsize))
    return files


@torch.no_grad()
def _fill(reader: BlockReader, fillings: Iterable[fit.FitTarget]) -> None:
    """Fill the part of each of ``fillings``, reading file by file."""
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
def _add(reader: BlockReader, filling: fit.FitTarget) -> None:
    """Add the elements that are read to the part of ``filling``."""
    read = torch.empty_like(filling.part.values)
    _fill(reader, [fit.FitTarget(filling.part._replace(values=read), filling.dtype, filling.sources)])
    filling.part.values.add_(read)


def _restore(engine: Inspection, chosen: _FoundCheckpoint, way: _LoadOptions) -> None:
    """Restore everything but the tensors that were read: scheduler, random states, options, steps, loss scale.

    Fresh parts are set to zero. With ``weights_only`` only the scheduler and the count of skipped steps are restored.
    """
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


def _begin_averages(plan: fit.FitPlan) -> None:
    """Set averages that the checkpoint does not have to its weights."""
    fresh = [part for part in plan.fresh if part.key == AVERAGE]
    weights = {(f.part.name, f.part.first): f.part for f in plan.fillings if f.part.key == WEIGHT} if fresh else {}
    for part in fresh:
        if (weight := weights.get((part.name, part.first))) is not None:
            part.values.copy_(weight.values)


def _restore_random_states(core: Core, chosen: _FoundCheckpoint) -> None:
    if core.mesh.rank < chosen.saved["world_size"]:
        state.restore_random_states(chosen.random, core.mesh.device)
    else:
        state.seed_anew(chosen.random, core.mesh.rank)


def _say(engine: Inspection, chosen: _FoundCheckpoint, way: _LoadOptions, begun: list[dict[str, Any]]) -> None:
    """Warn of differences that the user may not intend. begun: the optimizer groups of a new engine before the load."""
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
