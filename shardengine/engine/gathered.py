"""Whole parameters for the user: ``full_params``, the full state dict, Hugging Face directories on disk.

Must not know: steps, gradients, the optimizer.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardengine import trace
from shardengine.comm import Named, Purpose, compare, run_on_all_ranks
from shardengine.config import nearest
from shardengine.engine.core import Core
from shardengine.errors import UsageError
from shardengine.runtime import Unit
from shardengine.sharding import shaped
from shardengine.stages import Placement


@contextmanager
def full_params(core: Core, names: Iterable[str] | None, *, writable: bool) -> Iterator[None]:
    """Whole parameters inside the ``with``; collective. See ``Engine.full_params``."""
    core.await_weights()
    every = names is None
    chosen = agree_on_names(core, "full_params", names, writable)
    units = core.units if every else _units_of(core, chosen)
    if writable and any(unit.pinned for unit in units):
        raise UsageError("full_params(writable=True) inside another full_params would lose its writes; open one only")
    if writable:
        core.reducer.early.require_none("full_params(writable=True)")
    with core.reducer.early.suspended() if writable else nullcontext():  # what is written is what is stepped
        yield from _shown(core, units, chosen, writable=writable)


def _shown(core: Core, units: list[Unit], chosen: list[str], *, writable: bool) -> Iterator[None]:
    pinned: list[Unit] = []
    core.attachments.shown += 1
    try:
        for unit in units if core.stage.moves_weights else ():
            if not unit.pinned:
                unit.pin(core.collectives)
                pinned.append(unit)
    except BaseException:
        core.attachments.shown -= 1
        for unit in pinned:
            unit.unpin(core.collectives, writable=False)
        raise
    try:
        yield
    finally:
        core.attachments.shown -= 1
        with torch.no_grad():
            if writable:
                _broadcast_outside(core, chosen)
            for unit in pinned:
                unit.unpin(core.collectives, writable=writable)
            for unit in units if writable and not core.stage.moves_weights else ():
                for bucket in unit.buckets():
                    core.collectives.broadcast(bucket.full, bucket.layout, Purpose.WHOLE_WEIGHTS)
                    bucket.adopt_weights()


@contextmanager
def traced(core: Core, path: str | Path) -> Iterator[None]:
    """Write down what happens inside the ``with`` on all ranks, as one file; collective. See ``Engine.trace``."""
    compare(core.collectives, {"call": ["trace"]})
    core.collectives.trace.begin()
    try:
        yield
    finally:
        mine = core.collectives.trace.end()
    ranks = core.collectives.exchange_objects(mine)

    def write() -> None:
        trace.write(Path(path), ranks)

    run_on_all_ranks(core.collectives, f"writing {path}", write if core.mesh.rank == 0 else lambda: None)


def full_state_dict(core: Core, module: nn.Module) -> dict[str, Any]:
    """The whole state dict on rank 0 (CPU), bucket by bucket; {} elsewhere; collective."""
    compare(core.collectives, {"call": ["state_dict"]})
    values = _whole_values(core)
    return run_on_all_ranks(core.collectives, "state_dict()", lambda: _assemble(core, module, values))


def _whole_values(core: Core) -> dict[int, Tensor]:
    """id(parameter) → whole values on rank 0's CPU, {} elsewhere; collective."""
    core.await_weights()
    values: dict[int, Tensor] = {}
    for unit in core.units:
        values.update(_stream(core, unit))
    return values


def _assemble(core: Core, module: nn.Module, values: dict[int, Tensor]) -> dict[str, Any]:
    """The module's state dict with ``values`` in the place of its parameters; rank 0 alone."""
    if core.mesh.rank != 0:
        return {}
    core.attachments.open = True
    try:
        shown = module.state_dict(keep_vars=True)
    finally:
        core.attachments.open = False
    copies: dict[int, Any] = {}
    for value in shown.values():
        if isinstance(value, Tensor) and id(value) not in copies:
            copies[id(value)] = values[id(value)] if id(value) in values else value.detach().cpu().clone()
    return {name: copies.get(id(value), value) for name, value in shown.items()}


def save_pretrained(core: Core, module: nn.Module, directory: str | Path) -> None:
    """Write ``module`` with whole weights into ``directory`` (safetensors) on rank 0; collective.

    Written beside it first, and moved in file by file when all of it is written: a full disk leaves an existing
    directory as it was. A failure raises on every rank.
    """
    compare(core.collectives, {"call": ["save_pretrained"]})
    values = _whole_values(core)
    target = Path(directory)

    def write() -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _write(module, _assemble(core, module, values), work)
            target.mkdir(exist_ok=True)
            for path in work.iterdir():
                os.replace(path, target / path.name)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    run_on_all_ranks(core.collectives, f"saving to {target}", write if core.mesh.rank == 0 else lambda: None)


def _write(module: nn.Module, state: dict[str, Any], directory: Path) -> None:
    save = getattr(module, "save_pretrained", None)  # Hugging Face models have it, plain modules do not
    if save is not None:
        save(directory, state_dict=state)
        return
    from safetensors.torch import save_file

    first_name: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and first_name.setdefault(value.data_ptr(), name) != name and value.numel():
            tied[name] = first_name[value.data_ptr()]
    tensors = {n: v.contiguous() for n, v in state.items() if isinstance(v, Tensor) and n not in tied}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt", "tied": json.dumps(tied)})


def agree_on_names(
    core: Core, call: str, names: Iterable[str] | None, writable: bool, facts: dict[str, list[str]] | None = None
) -> list[str]:
    """The names that ``call`` is asked for, None: all. Ranks must ask for the same and have the same ``facts``."""
    chosen = None if names is None else [names] if isinstance(names, str) else list(names)
    asked = {f"list of names given to {call}": ["every name"] if chosen is None else chosen}
    compare(core.collectives, {**asked, f"writable flag of {call}": [str(writable)], **(facts or {})})
    known = core.partition.names
    for name in chosen or ():
        if name not in known:
            raise UsageError(f"{call}: the model has no parameter {name!r}; the nearest is {nearest(name, known)!r}")
    return list(known) if chosen is None else chosen


def _units_of(core: Core, names: list[str]) -> list[Unit]:
    known = core.partition.names
    wanted = {id(known[name]) for name in names}
    return [unit for unit in core.units if any(id(member.parameter) in wanted for member in unit.members)]


def _broadcast_outside(core: Core, names: list[str]) -> None:
    wanted = {id(core.partition.names[name]) for name in names}
    for name, parameter in core.partition.named_outside():
        if id(parameter) in wanted:
            values = parameter.data.contiguous()
            core.collectives.broadcast(values, Named([name]), Purpose.WHOLE_WEIGHTS)
            if not parameter.is_contiguous():
                parameter.data.copy_(values)


def _stream(core: Core, unit: Unit) -> dict[int, Tensor]:
    """Whole parameters of ``unit`` on rank 0's CPU, id(parameter) → tensor, gathered one bucket at a time."""
    keep = core.mesh.rank == 0
    parameters = {member.index: member.parameter for member in unit.members}
    whole: dict[int, Tensor] = {}
    for bucket in unit.buckets():
        full, gathers = bucket.full, bucket.placement is Placement.SHARDED
        if gathers:
            full = core.pool.take(bucket.layout.length, full.dtype, full.device)
            bucket.own_slice(full).copy_(bucket.shard)
            move = core.collectives.move
            move(full, Placement.SHARDED, Placement.REPLICATED, bucket.layout, Purpose.WHOLE_WEIGHTS).wait()
        for piece in core.layout.pieces(bucket.layout) if keep else ():
            numel = core.layout.parameters[piece.parameter].numel
            flat = whole.setdefault(piece.parameter, torch.empty(numel, dtype=full.dtype))
            start, count = piece.start - bucket.layout.start, piece.end - piece.start
            flat[piece.offset : piece.offset + count].copy_(full[start : start + count])
        if gathers:
            core.pool.give(full)
    return {id(parameters[index]): shaped(flat, core.layout.parameters[index]) for index, flat in whole.items()}
