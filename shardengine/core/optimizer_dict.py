"""The optimizer's state in torch's form: ``engine.optimizer.state_dict()`` and ``load_state_dict()``.

Owns: the entries of torch's dict, and moving whole tensors to rank 0 and back to every rank's slices. Must not know:
whether a dict fits (``optimizer_fit``), files, the arithmetic of a step.

[Note: Beside torch's] Some entries are not in the dict of torch's class, and plain torch ignores them:

- "master" of a parameter: its fp32 master weight.
- "loss_scaler" beside "param_groups", if the loss is scaled.
- "step" for every optimizer, if weights are rounded stochastically, because the rounding depends on it.

A parameter with a master has an entry even before its first step, with a step of 0, because bf16 weights do not hold
the bits of their masters.

Memory on the device: one bucket's states; while a dict is loaded, one of its states.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardengine.comm import Named, Purpose, compare, run_on_all_ranks
from shardengine.core import optimizer_fit
from shardengine.core.gathering import gathered
from shardengine.core.optimizer_fit import MASTER_ENTRY, SCALER, STEP, Fit
from shardengine.core.parts import Core
from shardengine.errors import MismatchError
from shardengine.offload import HOST
from shardengine.optim import AVERAGE, ShardedOptimizer
from shardengine.sharding import WEIGHT, Bucket, FullTensors, in_memory_order, join, shaped

_log = logging.getLogger(__name__)


def state_dict(core: Core, optimizer: ShardedOptimizer, *, begun: bool) -> dict[str, Any]:
    """Return torch's dict on rank 0 (CPU), {} elsewhere; collective.

    begun: return it on every rank, with an entry for each stepped parameter, which is zeros before its first step.
    ``torch.distributed.checkpoint.state_dict`` fills such a dict or takes parts of it.
    """
    core.schedule.finish_open_backward()
    core.step_state.require("optimizer.state_dict()")
    compare(core.collectives, {"call": [f"optimizer.state_dict(){' of every state' if begun else ''}"]})
    core.await_weights()
    core.adopt_written_weights()
    optimizer.await_reader()
    steps, wanted = optimizer.steps, _entries(core, optimizer, begun=begun)
    here = begun or core.mesh.rank == 0
    full = _gather(core, optimizer, {core.layout.parameters[number].name for number in wanted} if here else set())
    if not here:
        return {}
    index_of, states = optimizer_fit.numbered(optimizer.param_groups), dict[int, dict[str, Any]]()
    for number, keys in wanted.items():
        spec, entry = core.layout.parameters[number], dict[str, Any]()
        facts = optimizer.arithmetic.facts_of(spec.name)
        facts = optimizer.arithmetic.example_facts() if facts is None else facts
        facts = {**facts, **optimizer.arithmetic.whole_states(spec)}
        for key in keys:
            if key in facts:
                entry[key] = _copied(facts[key])
            elif key == STEP:
                entry[key] = torch.tensor(float(steps[number]), dtype=_step_dtype())
            else:
                entry[key] = shaped(full[spec.name][WEIGHT if key == MASTER_ENTRY else key], spec)
        states[index_of[id(core.partition.inside[number])]] = entry
    found: dict[str, Any] = {"state": dict(sorted(states.items())), "param_groups": []}
    for group in optimizer.param_groups:
        options = {key: _copied(value) for key, value in group.items() if key != "params"}
        found["param_groups"].append({**options, "params": [index_of[id(p)] for p in group["params"]]})
    if core.precision.scales_loss:
        found[SCALER] = optimizer.scaling
    return found


def _step_dtype() -> torch.dtype:
    """The dtype of step counts in torch's optimizers."""
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    return list(value) if isinstance(value, list) else value


def _entries(core: Core, optimizer: ShardedOptimizer, *, begun: bool) -> dict[int, list[str]]:
    """Number of each parameter that has an entry → its keys, in torch's order ([Note: Beside torch's])."""
    found: dict[int, list[str]] = {}
    arithmetic = optimizer.arithmetic
    numbered = optimizer.rounds_at_random and STEP not in arithmetic.fact_names
    for number, spec in enumerate(core.layout.parameters):
        if not spec.is_stepped:
            continue
        has_master = core.precision.master_dtype(getattr(torch, spec.dtype)) is not None
        stepped = begun or optimizer.steps[number] > 0
        group, keys = optimizer.param_groups[spec.group], []
        counts = arithmetic.counts_steps(group)
        if stepped or (has_master and counts):
            whole = arithmetic.whole_shapes(spec.shape) if stepped else ()
            keys += [*([STEP] if counts or numbered else []), *arithmetic.fact_names, *whole]
            names = optimizer.names_for(group)
            keys += names if stepped else [name for name in names if name != AVERAGE]
        if has_master:
            keys.append(MASTER_ENTRY)
        if keys:
            found[number] = keys
    return found


def _gather(core: Core, optimizer: ShardedOptimizer, names: set[str]) -> FullTensors:
    """Whole tensors of the parameters ``names`` on this rank's CPU, one bucket after another; collective."""
    full: FullTensors = {}
    specs = {spec.name: spec for spec in core.layout.parameters if spec.name in names}
    for bucket in (bucket_grad.bucket for bucket_grad in core.reducer.buckets):
        held = optimizer.held(bucket)
        if core.precision.master_dtype(bucket.full.dtype) is None:
            del held[WEIGHT]
        if held:
            with gathered(core, bucket, held, bucket.state_placement, Purpose.WHOLE_STATE, torch.float32) as slices:
                join((part for part in slices if part.name in specs), full, specs, HOST)
    return full


# Loading


def load(core: Core, optimizer: ShardedOptimizer, given: Mapping[str, Any]) -> None:
    """Continue from ``given``, the dict of torch's optimizer or of ``state_dict``; collective.

    given: the whole dict on rank 0; the same or {} on other ranks. If the dict does not fit, an error says so and
    nothing has changed. After that check only a lost rank or a failing disk can leave the engine partly loaded. It
    rejects training in that state.
    """
    core.schedule.finish_open_backward()
    core.step_state.require("optimizer.load_state_dict()")
    compare(core.collectives, {"call": ["optimizer.load_state_dict()"]})
    fit = run_on_all_ranks(
        core.collectives, "optimizer.load_state_dict()", lambda: optimizer_fit.fit(core, optimizer, given)
    )
    rows = core.collectives.exchange_objects(None if fit is None else fit.facts, "optimizer.load_state_dict()")
    for rank, row in enumerate(rows):
        if row is not None and row != rows[0]:
            error = MismatchError(
                f"optimizer.load_state_dict: rank {rank} has another dict than rank 0 (options, step counts, or which "
                "states it has): expected the same on every rank, or {} on all but rank 0; nothing was loaded",
                code="optimizer-state-differs-between-ranks",
            )
            core.collectives.failures.mark_known(error)  # every rank raises
            raise error
    agreed = Fit.of(rows[0], {} if fit is None else fit.values)
    core.await_weights()
    core.adopt_written_weights()
    core.schedule.reshard_all()
    core.reducer.discard()
    optimizer.await_reader()
    optimizer.end_window()
    core.step_state.lose()
    with torch.no_grad():
        _write(core, optimizer, agreed)
    if agreed.masters:
        with core.adopting_masters():
            pass
    optimizer_fit.take_options(optimizer, agreed)
    optimizer.begin_averages(number for number, names in agreed.states.items() if AVERAGE not in names)
    core.step_state.restart()
    if core.mesh.rank == 0 and agreed.notes:
        _log.warning("optimizer.load_state_dict: %s", "; ".join(agreed.notes))


def _write(core: Core, optimizer: ShardedOptimizer, fit: Fit) -> None:
    """Copy this rank's part of rank 0's ``fit`` into its states, with one broadcast per bucket and state."""
    for bucket in (bucket_grad.bucket for bucket_grad in core.reducer.buckets):
        held, numbers = optimizer.held(bucket, writable=True), {p.parameter for p in core.layout.pieces(bucket.layout)}
        for key, own in held.items():
            masters = fit.masters & numbers if key == WEIGHT else set()
            if key == WEIGHT and not masters:
                continue
            full = torch.zeros(bucket.layout.length, dtype=torch.float32, device=bucket.full.device)
            if core.mesh.rank == 0:
                _fill(core, bucket, key, full, fit)
            core.collectives.broadcast(full, bucket.layout, Purpose.WHOLE_STATE)
            for first, end in _places(core, bucket, masters if key == WEIGHT else numbers):
                before = bucket.state_interval[0]
                start = bucket.layout.start
                own[first - before : end - before].copy_(full[first - start : end - start])
        optimizer.keep(bucket, held)
    number_of = {spec.name: number for number, spec in enumerate(core.layout.parameters)}
    for spec, tensors in optimizer.whole_states():
        for key, own in tensors.items():
            value = fit.values.get(number_of[spec.name], {}).get(key)
            own.zero_() if value is None else own.copy_(value)
            core.collectives.broadcast(own, Named([spec.name], key), Purpose.WHOLE_STATE)


def _places(core: Core, bucket: Bucket, numbers: set[int]) -> Iterator[tuple[int, int]]:
    """The elements of the parameters ``numbers`` that this rank steps, in coordinates of the flat buffer."""
    for piece in core.layout.pieces_within(bucket.layout, bucket.state_interval):
        if piece.parameter in numbers:
            yield piece.start, piece.end


def _fill(core: Core, bucket: Bucket, key: str, full: Tensor, fit: Fit) -> None:
    """Copy rank 0's values of one state into ``full``; parameters without a value stay zero."""
    for piece in core.layout.pieces(bucket.layout):
        value = fit.values.get(piece.parameter, {}).get(MASTER_ENTRY if key == WEIGHT else key)
        if value is not None:
            flat = in_memory_order(value, core.layout.parameters[piece.parameter]).reshape(-1)
            start = piece.start - bucket.layout.start
            full[start : start + piece.end - piece.start].copy_(flat[piece.offset : piece.offset_end])
