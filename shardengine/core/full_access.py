"""Full tensors for the user inside a ``with``: parameters, complete gradients, master weights and optimizer state.

Owns: the names that ranks ask for, the tensors that are shown, and that every rank continues with rank 0's writes. Must
not know: the computation of complete gradients, the arithmetic of a step, files.

Reading costs one all-gather per bucket that holds a requested parameter (none if this rank has all of it). Writing
costs one broadcast per such bucket; for gradients and states it contains the requested parameters alone. Memory on the
device: the requested tensors and one bucket in flight. For parameters, which their units summon: those buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardengine.comm import Named, Purpose, compare, run_on_all_ranks
from shardengine.config import nearest
from shardengine.core.gathering import gathered
from shardengine.core.parts import Core
from shardengine.errors import UsageError
from shardengine.optim import AVERAGE, ShardedOptimizer
from shardengine.runtime import Summoned, Unit
from shardengine.sharding import WEIGHT, Bucket, FullTensors, ParameterSpec, join, shaped, slices_of


@dataclass(frozen=True)
class _FullSource:
    """A bucket with requested parameters.

    held: this rank's tensors of it, placed as optimizer state is · dtype: they are shown in it.
    """

    bucket: Bucket
    held: dict[str, Tensor]
    dtype: torch.dtype


# Parameters


@contextmanager
def full_params(core: Core, names: Iterable[str] | None, *, writable: bool) -> Iterator[None]:
    """Show whole parameters inside the ``with``; collective. See ``Engine.full_params``."""
    core.step_state.require("a call of every rank", f"full_params({'writable=True' if writable else ''})")
    core.await_weights()
    core.adopt_written_weights()
    chosen = _agree_on_names(core, "full_params", names, writable)
    wanted = _members_of(core, None if names is None else chosen)
    if writable:
        core.step_state.require("full_params(writable=True)")
    with core.reducer.early_use.suspended() if writable else nullcontext():  # the next step uses the written weights
        yield from _shown(core, wanted, chosen, writable=writable)


def _shown(core: Core, wanted: dict[Unit, set[int]], chosen: list[str], *, writable: bool) -> Iterator[None]:
    with core.step_state.summoning():
        summoned = _summon(core, wanted) if core.stage.moves_weights else []
        try:
            yield
        finally:
            try:
                _end(core, summoned, wanted, chosen, writable=writable)
            except BaseException:
                for unit, held in summoned:
                    unit.let_go(held)
                raise


_Held = list[tuple[Unit, Summoned]]


@torch.no_grad()
def _end(core: Core, summoned: _Held, wanted: dict[Unit, set[int]], chosen: list[str], *, writable: bool) -> None:
    if writable:
        core.written.place()
        _broadcast_outside(core, chosen)
    for unit, held in summoned:
        unit.release_summoned(core.collectives, held, writable=writable)
    if writable and not core.stage.moves_weights:
        _broadcast(core, wanted)
    if writable:
        core.written.note_seen(inside=not core.stage.moves_weights)
        core.step_state.writes.forget({*chosen, *_names_in(core, wanted)})


def _names_in(core: Core, wanted: dict[Unit, set[int]]) -> Iterator[str]:
    return (core.layout.parameters[index].name for members in wanted.values() for index in members)


def _summon(core: Core, wanted: dict[Unit, set[int]]) -> list[tuple[Unit, Summoned]]:
    """Summon those of the parameters ``wanted`` that are not summoned yet; after an error none of them is."""
    summoned: list[tuple[Unit, Summoned]] = []
    try:
        for unit, members in wanted.items():
            summoned.append((unit, unit.summon(core.collectives, members)))
    except BaseException:
        for unit, held in summoned:
            unit.release_summoned(core.collectives, held, writable=False)
        raise
    return summoned


def _broadcast(core: Core, wanted: dict[Unit, set[int]]) -> None:
    """Broadcast rank 0's buckets that hold some of the parameters ``wanted``, if weights are kept whole."""
    for unit, members in wanted.items():
        for bucket in unit.buckets():
            if any(piece.parameter in members for piece in core.layout.pieces(bucket.layout)):
                core.collectives.broadcast(bucket.full, bucket.layout, Purpose.WHOLE_WEIGHTS)
                bucket.adopt_weights()


def _members_of(core: Core, names: list[str] | None) -> dict[Unit, set[int]]:
    """The units that hold parameters ``names``, with their indices. None: all units with all parameters."""
    if names is None:
        return {unit: {member.index for member in unit.members} for unit in core.units}
    ids = {id(core.partition.names[name]) for name in names}
    found = {unit: {m.index for m in unit.members if id(m.parameter) in ids} for unit in core.units}
    return {unit: members for unit, members in found.items() if members}


def _broadcast_outside(core: Core, names: list[str]) -> None:
    wanted = {id(core.partition.names[name]) for name in names}
    for name, parameter in core.partition.named_outside():
        if id(parameter) in wanted:
            values = parameter.data.contiguous()
            core.collectives.broadcast(values, Named([name]), Purpose.WHOLE_WEIGHTS)
            if not parameter.is_contiguous():
                parameter.data.copy_(values)


# Gradients


@contextmanager
def full_grads(
    core: Core, names: Iterable[str] | None, *, writable: bool, scale: float = 1.0
) -> Iterator[dict[str, Tensor | None]]:
    """Show whole complete gradients inside the ``with``; collective. See ``Engine.full_grads``.

    scale: the loss scale.
    """
    core.schedule.finish_open_backward()
    reducer, step_state = core.reducer, core.step_state
    step_state.require("a call of every rank", "full_grads")
    state_of_it = "complete" if step_state.is_agreed else "not complete"
    chosen = _agree_on_names(core, "full_grads", names, writable, {"state of the gradients": [state_of_it]})
    step_state.require("full_grads(writable=True)" if writable else "full_grads")
    if writable and reducer.early_use.enabled:
        raise UsageError(
            "full_grads(writable=True): expected offload_optimizer.step_in_backward to be false: with it gradients are "
            "stepped with before they can be written",
            code="full-grads-step-in-backward",
        )
    specs = _specs(core, chosen, reducer.touched)
    wanted = {spec.name: spec for spec in specs.values()}
    sources = [
        _FullSource(bucket_grad.bucket, {"gradient": bucket_grad.gradient}, bucket_grad.wire)
        for bucket_grad in reducer.buckets
        if bucket_grad.gradient is not None and not wanted.keys().isdisjoint(bucket_grad.names)
    ]
    full = sent = _read(core, sources, wanted)
    if scale != 1:
        full = {name: {"gradient": of["gradient"].float() / scale} for name, of in sent.items()}
    views = {name: shaped(of["gradient"], wanted[name]) for name, of in full.items()}
    given = {name: views[specs[name].name] if name in specs else None for name in chosen}
    shown = dict(given)
    before = [bucket_grad.complete for bucket_grad in reducer.buckets]

    def check() -> None:
        if any(bucket_grad.complete is not old for bucket_grad, old in zip(reducer.buckets, before, strict=True)):
            raise UsageError(
                "full_grads(writable=True): expected step(), zero_grad() and backward after the `with` block, one of "
                "them ran inside and its gradients are gone; nothing was written",
                code="full-grads-stepped-inside",
            )
        for name, tensor in given.items() if core.mesh.rank == 0 else ():
            _take_over(f"full_grads, gradient of {name!r}", shown.get(name, tensor), tensor)

    with _agreed_end(core, "full_grads(writable=True)", check if writable else None):
        yield shown
    if writable:
        with torch.no_grad():
            if scale != 1:
                full = {name: _scaled(shown_of, sent[name], scale) for name, shown_of in full.items()}
            _write(core, sources, full)
        core.reducer.finish_gradients()


def _scaled(shown: dict[str, Tensor], sent: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Multiply gradients that were shown without the loss scale with it, in the wire's dtype.

    Unchanged gradients keep their bits.
    """
    after, before = shown["gradient"], sent["gradient"]
    return {"gradient": torch.where(after == before.float() / scale, before, (after * scale).to(before.dtype))}


# Optimizer state


@contextmanager
def full_optimizer_state(
    core: Core, optimizer: ShardedOptimizer, names: Iterable[str] | None, *, writable: bool
) -> Iterator[dict[str, dict[str, Any] | None]]:
    """Show whole master weights and states inside the ``with``; collective. See ``Engine.full_optimizer_state``."""
    core.schedule.finish_open_backward()
    core.step_state.require("full_optimizer_state")
    chosen = _agree_on_names(core, "full_optimizer_state", names, writable)
    core.await_weights()
    core.adopt_written_weights()
    number_of = {spec.name: number for number, spec in enumerate(core.layout.parameters) if spec.is_stepped}
    specs = _specs(core, chosen, number_of.values())
    wanted = {spec.name: spec for spec in specs.values()}

    def sources(*, writable: bool) -> list[_FullSource]:
        buckets = [s.bucket for s in core.reducer.buckets if not wanted.keys().isdisjoint(s.names)]
        return [_FullSource(bucket, optimizer.held(bucket, writable=writable), torch.float32) for bucket in buckets]

    full = _read(core, sources(writable=False), wanted)
    given: dict[str, dict[str, Any]] = {
        name: {key: shaped(flat, wanted[name]) for key, flat in of.items()} for name, of in full.items()
    }
    fixed = {name: _complete_entry(entry, wanted[name], optimizer, number_of[name]) for name, entry in given.items()}
    entries = {name: dict(entry) for name, entry in given.items()}
    shown = {name: entries[specs[name].name] if name in specs else None for name in chosen}
    steps = list(optimizer.steps)

    def check() -> None:
        if steps != optimizer.steps:
            raise UsageError(
                "full_optimizer_state(writable=True): expected step() after the `with` block, it ran inside and the "
                "block's end would undo it; nothing was written",
                code="full-state-stepped-inside",
            )
        if core.mesh.rank == 0:
            expected = {name: entries[specs[name].name] if name in specs else None for name in chosen}
            _check_shown(shown, expected)
            for name, entry in entries.items():
                _check_entry(name, entry, given[name], fixed.get(name, {}))
                _check_fit(name, optimizer.misfit(given[name]))

    early = core.reducer.early_use.suspended() if writable else nullcontext()  # a step inside would be lost
    edited = core.step_state.editing() if writable else nullcontext()
    with early, edited, _agreed_end(core, "full_optimizer_state(writable=True)", check if writable else None):
        yield shown
    if writable:
        with torch.no_grad():
            core.schedule.reshard_all()
            optimizer.await_reader()
            written = sources(writable=True)
            _write(core, written, full)  # a backward inside may have fetched some
            for source in written:
                optimizer.keep(source.bucket, source.held)
        chosen_steps = torch.tensor([entry["step"] for entry in entries.values()], dtype=torch.int64)
        rank0 = core.collectives.exchange(chosen_steps.view(torch.uint8), "step counts")[0].contiguous()
        for name, step in zip(entries, rank0.view(torch.int64).tolist(), strict=True):
            optimizer.steps[number_of[name]] = step
        core.note_stepped()


def _complete_entry(
    entry: dict[str, Any], spec: ParameterSpec, optimizer: ShardedOptimizer, number: int
) -> dict[str, Any]:
    """Add to an entry the values that are kept per parameter rather than per element.

    Returns those that can only be read.
    """
    facts = optimizer.arithmetic.facts_of(spec.name)
    if facts is None:  # the optimizer's class has begun nothing
        for key in entry.keys() - {WEIGHT}:
            del entry[key]
    entry["step"] = optimizer.steps[number]
    if not entry["step"]:
        entry.pop(AVERAGE, None)  # it is the weight
    entry.update({key: value for key, value in (facts or {}).items() if key not in entry})
    whole = {key: tensor.clone() for key, tensor in optimizer.arithmetic.whole_states(spec).items()}
    entry.update({key: tensor.clone() for key, tensor in whole.items()})
    reads = optimizer.arithmetic.keeps_facts
    fixed = {key: value for key, value in entry.items() if key == "step" or key in (facts or {})} if reads else {}
    return {**fixed, **whole}


def _check_fit(name: str, problem: str) -> None:
    if problem:
        raise UsageError(
            f"full_optimizer_state, {name!r}: {problem}; nothing was written", code="full-state-value-refused"
        )


def _check_shown(shown: Mapping[str, dict[str, Any] | None], expected: Mapping[str, dict[str, Any] | None]) -> None:
    """Raise UsageError if an entry of the shown dict is another object than was given."""
    for name, entry in shown.items():
        if entry is not expected.get(name):
            raise UsageError(
                f"full_optimizer_state: the entry of {name!r} was replaced; write into its tensors",
                code="full-state-entry-replaced",
            )


def _check_entry(name: str, entry: dict[str, Any], given: dict[str, Any], fixed: dict[str, Any]) -> None:
    """Raise ``UsageError`` if the user changed an entry in a way that cannot be written back; copy replaced tensors.

    fixed: values that belong to the optimizer's class and can only be read.
    """
    step = entry.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UsageError(
            f"full_optimizer_state: expected the step count of {name!r} to be 0 or more, got {step!r}",
            code="full-state-step-invalid",
        )
    if unknown := entry.keys() - given.keys():
        raise UsageError(
            f"full_optimizer_state: {name!r} has no {sorted(unknown)[0]!r}; it has {', '.join(map(repr, given))}",
            code="full-state-unknown-key",
        )
    for key, value in fixed.items():
        if not _are_equal(entry.get(key, value), value):
            raise UsageError(
                f"full_optimizer_state: {key!r} of {name!r} belongs to the optimizer's class and can only be read, got "
                f"{str(entry[key])[:80]} instead of {str(value)[:80]}; nothing was written",
                code="full-state-read-only",
            )
    for key, tensor in given.items():
        if key != "step" and key not in fixed:
            _take_over(f"full_optimizer_state, {key!r} of {name!r}", entry.get(key, tensor), tensor)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(torch.eq(one, other).logical_or(one.isnan() & other.isnan()).all())
    return repr(one) == repr(other)


# All of them


def _agree_on_names(
    core: Core, call: str, names: Iterable[str] | None, writable: bool, facts: dict[str, list[str]] | None = None
) -> list[str]:
    """The names that ``call`` requests; None: all.

    Raises ``MismatchError`` if ranks request different names or differ in ``facts``.
    """
    given = [names] if isinstance(names, str) else names
    chosen = None if given is None else core.partition.expanded(given)
    asked = {f"list of names given to {call}": ["every name"] if chosen is None else chosen}
    compare(core.collectives, {**asked, f"writable flag of {call}": [str(writable)], **(facts or {})})
    known = core.partition.names
    for name in chosen or ():
        if name not in known:
            raise UsageError(
                f"{call}: the model has no parameter {name!r}; the nearest is {nearest(name, known)!r}",
                code="weights-unknown-name",
            )
    return list(known) if chosen is None else chosen


def _specs(core: Core, chosen: list[str], numbers: Iterable[int]) -> dict[str, ParameterSpec]:
    """The ``chosen`` names of the parameters ``numbers`` of the layout."""
    known = {name: spec for spec in (core.layout.parameters[number] for number in numbers) for name in spec.names}
    return {name: known[name] for name in chosen if name in known}


def _read(core: Core, sources: list[_FullSource], wanted: Mapping[str, ParameterSpec]) -> FullTensors:
    """The tensors of ``wanted`` parameters, by first name; collective."""
    full: FullTensors = {}
    for source in sources:
        bucket, held = source.bucket, source.held
        with gathered(core, bucket, held, bucket.state_placement, Purpose.WHOLE_STATE, source.dtype) as slices:
            join(slices, full, wanted, bucket.full.device)
    return full


def _write(core: Core, sources: list[_FullSource], full: FullTensors) -> None:
    """Make rank 0's ``full`` every rank's, with one broadcast per bucket, and copy it into this rank's slices.

    The weights follow their master weights, rounded to their dtype, in any tier.
    """
    for layout in (source.bucket.layout for source in sources):
        parts = [
            flat[piece.offset : piece.offset_end]
            for piece in core.layout.pieces(layout)
            for flat in full.get(core.layout.parameters[piece.parameter].name, {}).values()
        ]
        message = torch.cat(parts)
        core.collectives.broadcast(message, layout, Purpose.WHOLE_STATE)
        for part, sent in zip(parts, message.split([part.numel() for part in parts]), strict=True):
            part.copy_(sent)
    for bucket, held in ((source.bucket, source.held) for source in sources):
        own = list(slices_of(core.layout, bucket.layout, bucket.state_interval, held))
        if WEIGHT in held:
            own += slices_of(core.layout, bucket.layout, bucket.interval, {WEIGHT: bucket.weights(writable=True)})
        for target in (target for target in own if target.name in full):
            target.values.copy_(full[target.name][target.key][target.first : target.end])


@contextmanager
def _agreed_end(core: Core, what: str, check: Callable[[], None] | None) -> Iterator[None]:
    """With a ``check``: an exception on one rank, in the block or from ``check``, raises on all ranks at the end."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if check is None:
            raise
        failure = error

    def end() -> None:
        if failure is not None:
            raise failure
        if check is not None:
            check()

    if check is not None:
        run_on_all_ranks(core.collectives, what, end)


def _take_over(what: str, now: Any, tensor: Tensor | None) -> None:
    """Accept ``now`` instead of ``tensor``, which was handed out.

    now: the same tensor, written in place, or another of its shape, which is copied into it.
    """
    if now is tensor:
        return
    if tensor is None:
        raise UsageError(
            f"{what}: this parameter has no gradient on any rank and is not stepped; leave it None",
            code="full-grads-none-replaced",
        )
    if not isinstance(now, Tensor) or now.shape != tensor.shape:
        came = tuple(now.shape) if isinstance(now, Tensor) else type(now).__name__
        raise UsageError(
            f"{what}: expected a tensor of shape {tuple(tensor.shape)}, got {came}; nothing was written",
            code="full-values-wrong-shape",
        )
    with torch.no_grad():
        tensor.copy_(now)
