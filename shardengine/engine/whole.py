"""Whole gradients and optimizer state for the user: ``full_grads``, ``full_optimizer_state``.

Owns: putting every rank's slices together to tensors of the parameters' shapes, and taking them apart again.
Must not know: how gradients come to be complete, the arithmetic of a step.

Reading costs one all-gather per bucket that holds a wanted parameter (none where this rank has all of it), writing one
broadcast per such bucket, of the wanted parameters alone. Memory, on the device: the wanted tensors, and one bucket on
the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardengine.comm import Purpose, run_on_all_ranks
from shardengine.engine.core import Core
from shardengine.engine.gathered import agree_on_names
from shardengine.errors import UsageError
from shardengine.optim import ShardedOptimizer
from shardengine.sharding import Bucket, Piece, shaped
from shardengine.stages import Placement

Flats = dict[int, dict[str, Tensor]]
"""parameter → what it is ("gradient", "weight", a state's name) → all of its elements in memory order."""


@dataclass(frozen=True)
class _Source:
    """A bucket with wanted ``pieces`` in it. held: what this rank has of it, placed as optimizer state is."""

    bucket: Bucket
    pieces: list[Piece]
    held: dict[str, Tensor]

    def parts(self, flats: Flats) -> list[Tensor]:
        """The bucket's elements of what is wanted, as views."""
        return [
            flat[piece.offset : piece.offset + piece.end - piece.start]
            for piece in self.pieces
            for flat in flats[piece.parameter].values()
        ]


# Gradients


@contextmanager
def full_grads(
    core: Core, names: Iterable[str] | None, *, writable: bool, scale: float = 1.0
) -> Iterator[dict[str, Tensor | None]]:
    """Whole complete gradients inside the ``with``; collective. See ``Engine.full_grads``. scale: the loss scale."""
    core.schedule.settle()
    reducer = core.reducer
    state_of_it = "complete" if reducer.window_complete else "not complete"
    chosen = agree_on_names(core, "full_grads", names, writable, {"state of the gradients": [state_of_it]})
    if not reducer.window_complete:
        raise UsageError(
            f"full_grads: the window's gradients are not complete (rank {core.mesh.rank}; {core.window.micro_batches} "
            f"of {core.window.size} micro-batches had their backward): call it between the backward on the boundary "
            "and step()"
        )
    if writable and reducer.early.user is not None:
        raise UsageError(
            "full_grads(writable=True): expected offload_optimizer.step_in_backward to be false: with it gradients are "
            "stepped with before they can be written"
        )
    index_of = {name: index for name, index in _indices(core).items() if index in reducer.touched}
    held = {s.bucket.layout.index: {"gradient": s.gradient} for s in reducer.buckets if s.gradient is not None}
    wires = {state.bucket.layout.index: state.wire for state in reducer.buckets}
    sources = _sources(core, {index_of[name] for name in chosen if name in index_of}, held)
    flats: Flats = {}
    for source in sources:
        _read(core, source, wires[source.bucket.layout.index], flats)
    sent = dict(flats)
    if scale != 1:
        flats = {index: {"gradient": flat["gradient"].float() / scale} for index, flat in flats.items()}
    views = {index: shaped(flat["gradient"], core.layout.parameters[index]) for index, flat in flats.items()}
    given = {name: views[index_of[name]] if name in index_of else None for name in chosen}
    shown = dict(given)
    before = [state.complete for state in reducer.buckets]

    def check() -> None:
        if any(state.complete is not old for state, old in zip(reducer.buckets, before, strict=True)):
            raise UsageError(
                "full_grads(writable=True): expected step(), zero_grad() and backward after the `with` block, one of "
                "them ran inside and its gradients are gone; nothing was written"
            )
        for name, tensor in given.items() if core.mesh.rank == 0 else ():
            _take_over(f"full_grads, gradient of {name!r}", shown.get(name, tensor), tensor)

    with _agreed_end(core, "full_grads(writable=True)", check if writable else None):
        yield shown
    if writable:
        with torch.no_grad():
            if scale != 1:
                flats = {index: _scaled(flat, sent[index], scale) for index, flat in flats.items()}
            _send(core, sources, flats)
            for source in sources:
                _store(source, flats, source.held, source.bucket.state_interval[0])
        core.schedule.on_complete()


def _scaled(shown: dict[str, Tensor], sent: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Gradients shown without the scale, with it and in the wire's dtype again. What is unchanged keeps its bits."""
    after, before = shown["gradient"], sent["gradient"]
    return {"gradient": torch.where(after == before.float() / scale, before, (after * scale).to(before.dtype))}


# Optimizer state


@contextmanager
def full_optimizer_state(
    core: Core, optimizer: ShardedOptimizer, names: Iterable[str] | None, *, writable: bool
) -> Iterator[dict[str, dict[str, Any] | None]]:
    """Whole master weights and states inside the ``with``; collective. See ``Engine.full_optimizer_state``."""
    core.schedule.settle()
    optimizer.require_whole()
    chosen = agree_on_names(core, "full_optimizer_state", names, writable)
    if core.pinned:
        raise UsageError(
            "full_optimizer_state inside full_params: expected one after the other; close full_params first"
        )
    core.await_weights()
    core.adopt_written_weights()
    specs = core.layout.parameters
    index_of = {name: index for name, index in _indices(core).items() if specs[index].group >= 0}
    wanted = {index_of[name] for name in chosen if name in index_of}
    sources = _sources(core, wanted, optimizer.held())
    flats: Flats = {}
    for source in sources:
        _read(core, source, torch.float32, flats)
    given = {
        index: {**{key: shaped(flat, specs[index]) for key, flat in flat_of.items()}, "step": optimizer.steps[index]}
        for index, flat_of in flats.items()
    }
    entries = {index: dict(entry) for index, entry in given.items()}
    shown = {name: entries[index_of[name]] if name in index_of else None for name in chosen}
    steps = list(optimizer.steps)

    def check() -> None:
        if steps != optimizer.steps:
            raise UsageError(
                "full_optimizer_state(writable=True): expected step() after the `with` block, it ran inside and the "
                "block's end would undo it; nothing was written"
            )
        for name, entry in shown.items() if core.mesh.rank == 0 else ():
            if entry is not (entries[index_of[name]] if name in index_of else None):
                raise UsageError(f"full_optimizer_state: the entry of {name!r} was replaced; write into its tensors")
        for index, entry in entries.items() if core.mesh.rank == 0 else ():
            _check_entry(specs[index].name, entry, given[index])

    early = core.reducer.early.suspended() if writable else nullcontext()  # what is stepped inside would be lost
    with early, _agreed_end(core, "full_optimizer_state(writable=True)", check if writable else None):
        yield shown
    if writable:
        with torch.no_grad():
            core.schedule.rest()
            optimizer.await_reader()
            sources = _sources(core, wanted, optimizer.held(writable=True))  # a backward inside may have fetched some
            _send(core, sources, flats)
            for source in sources:
                _store(source, flats, source.held, source.bucket.state_interval[0])
                _store_weights(source, flats)
        chosen_steps = torch.tensor([entry["step"] for entry in entries.values()], dtype=torch.int64)
        rank0 = core.collectives.exchange(chosen_steps.view(torch.uint8), "step counts")[0].contiguous()
        for index, step in zip(entries, rank0.view(torch.int64).tolist(), strict=True):
            optimizer.steps[index] = step
        core.note_stepped()


def _check_entry(name: str, entry: dict[str, Any], given: dict[str, Any]) -> None:
    step = entry.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UsageError(f"full_optimizer_state: expected the step count of {name!r} to be 0 or more, came {step!r}")
    if unknown := entry.keys() - given.keys():
        raise UsageError(
            f"full_optimizer_state: {name!r} has no {sorted(unknown)[0]!r}; it has {', '.join(map(repr, given))}"
        )
    for key, tensor in given.items():
        if key != "step":
            _take_over(f"full_optimizer_state, {key!r} of {name!r}", entry.get(key, tensor), tensor)


def _store_weights(source: _Source, flats: Flats) -> None:
    """The weights follow what was written, rounded to their dtype: every copy of them that rests on this rank."""
    bucket = source.bucket
    _store(source, flats, {"weight": bucket.weights(writable=True)}, bucket.interval[0])


# Both


def _indices(core: Core) -> dict[str, int]:
    """Every name of a parameter that lives in a flat buffer → its number in the layout."""
    return {name: index for index, spec in enumerate(core.layout.parameters) for name in spec.names}


def _sources(core: Core, wanted: set[int], held: dict[int, dict[str, Tensor]]) -> list[_Source]:
    """The buckets that hold a piece of a ``wanted`` parameter. held: per bucket index, what this rank has."""
    found = []
    for state in core.reducer.buckets:
        pieces = [piece for index, piece in state.pieces.items() if index in wanted]
        if pieces:
            found.append(_Source(state.bucket, pieces, held[state.bucket.layout.index]))
    return found


def _read(core: Core, source: _Source, dtype: torch.dtype, flats: Flats) -> None:
    """Put the source's pieces into ``flats``, which it makes where they are missing; collective."""
    bucket, layout, held = source.bucket, source.bucket.layout, source.held
    rows, length = [held], layout.elements(bucket.state)
    if length < layout.length:
        packed = source.bucket.full.new_empty(layout.ranks, len(held), length, dtype=dtype)
        for own, tensor in zip(packed[core.mesh.rank], held.values(), strict=True):
            own.copy_(tensor)
        move = core.collectives.move
        move(packed.view(-1), bucket.state, Placement.REPLICATED, layout, Purpose.WHOLE_STATE).wait()
        rows = [dict(zip(held, row, strict=True)) for row in packed]
    for piece in source.pieces:
        numel = core.layout.parameters[piece.parameter].numel
        mine = flats.setdefault(piece.parameter, {})
        for key in held:
            if key not in mine:
                mine[key] = source.bucket.full.new_empty(numel, dtype=dtype)
            for number, row in enumerate(rows):
                for part, slice_part in _overlap(piece, mine[key], row[key], layout.start + number * length):
                    part.copy_(slice_part)


def _store(source: _Source, flats: Flats, targets: dict[str, Tensor], first: int) -> None:
    """Copy the source's pieces from ``flats`` to ``targets``, which start at ``first`` of the flat buffer."""
    for piece in source.pieces:
        for key, target in targets.items():
            for part, target_part in _overlap(piece, flats[piece.parameter][key], target, first):
                target_part.copy_(part)


def _overlap(piece: Piece, flat: Tensor, other: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The elements of ``piece`` in ``flat``, and in ``other``, which begins at ``first`` of the flat buffer."""
    start, end = max(piece.start, first), min(piece.end, first + other.numel())
    if start < end:
        offset = piece.offset + start - piece.start
        yield flat[offset : offset + end - start], other[start - first : end - first]


def _send(core: Core, sources: list[_Source], flats: Flats) -> None:
    """Rank 0's ``flats`` become every rank's: one broadcast per bucket."""
    for source in sources:
        parts = source.parts(flats)
        message = torch.cat(parts)
        core.collectives.broadcast(message, source.bucket.layout, Purpose.WHOLE_STATE)
        for part, sent in zip(parts, message.split([part.numel() for part in parts]), strict=True):
            part.copy_(sent)


@contextmanager
def _agreed_end(core: Core, what: str, check: Callable[[], None] | None) -> Iterator[None]:
    """With a ``check``: what raises inside the block, or in it, on one rank, raises on all of them at the end."""
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
    """``now`` stands where ``tensor`` was handed out: the same one, written in place, or one to copy from."""
    if now is tensor:
        return
    if tensor is None:
        raise UsageError(f"{what}: no rank has one, so that the step leaves the parameter alone; expected None to stay")
    if not isinstance(now, Tensor) or now.shape != tensor.shape:
        came = tuple(now.shape) if isinstance(now, Tensor) else type(now).__name__
        raise UsageError(f"{what}: expected a tensor of shape {tuple(tensor.shape)}, came {came}; nothing was written")
    with torch.no_grad():
        tensor.copy_(now)
