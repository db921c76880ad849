"""Decides the values that a config leaves to "auto" and that need a plan: the stage and the micro-batch.

Owns: the facts that the choice rests on, the sentence that is logged. Must not know: how candidates are planned
(choice), the parts of an engine.

[Note: One choice] Rank 0 plans and sends the result to the others, so all ranks use the same values. It plans for the
least memory that any rank has of each tier, and for links as fast as the ranks' own group, measured just before. On a
CPU it also measures the CPU's speed. On a GPU the speed of calculations is not measured but declared by ``rates``. So
if two stages differ by the bytes that they send, the slower one may be chosen on a GPU that is not as declared.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardengine.comm import (
    Collectives,
    GroupName,
    GroupSpeed,
    Mesh,
    compare,
    measure_gathers,
    measure_reduction,
    run_on_all_ranks,
)
from shardengine.comm import cores as count_cores
from shardengine.config import MICRO, STAGE, Config, load_config, load_or_default, plain, provisional, read_tree
from shardengine.config import undecided as undecided_in
from shardengine.core import check_free
from shardengine.errors import ConfigError, UsageError
from shardengine.offload import BufferPool
from shardengine.planner.amid import TooLong, in_time, reason_of, undisturbed
from shardengine.planner.calibration import measured
from shardengine.planner.choice import Choice, Question, Undecided, global_batch, search
from shardengine.planner.hardware import Hardware
from shardengine.planner.machine import this_machine
from shardengine.planner.rates import Rates

_WHAT = 'deciding what is "auto" in the config'
_PATIENCE = 0.8
"""The other ranks may wait for this part of ``timeout_s``."""
_log = logging.getLogger(__name__)


class NothingFits(UsageError):
    """No choice fits. The message lists changes that would fit."""


def question_of(config: Mapping[str, Any] | str | Path | Config, model: nn.Module, **more: Any) -> Question | None:
    """Return the question that ``config`` leaves open; None if there is none, or if the config cannot be read.

    more: further fields of the ``Question``.
    """
    names = undecided_in(config)
    if not names or isinstance(config, Config):
        return None
    try:
        base = plain(config) if isinstance(config, Mapping) else read_tree(Path(config))
    except ConfigError:  # the engine raises it on every rank
        return None
    return Question(model, base, undecided=Undecided(STAGE in names, MICRO in names, rest=False), **more)


def decide(asked: Question, mesh: Mesh) -> dict[str, int]:
    """Return the values by dotted name, the same on every rank; collective. Rank 0 logs the reason.

    Raises ``NothingFits``, or ``UsageError`` if no plan can be made. Exception: if only the micro-batch is open and the
    config gives the global batch, the call logs a notice and returns no value. The micro-batch then follows from the
    global batch.
    """
    group = replace(mesh, replicas=1)  # all ranks: there are no shard groups yet
    collectives = Collectives(group, BufferPool(mesh.platform), direct=mesh.backend != "nccl")

    def look() -> tuple[Hardware, Config]:
        check_free(asked.model)
        config = load_config(asked.base, provisional(asked.base, asked.auto))
        if config.optimizer is None and not asked.options:
            raise UsageError(
                'expected an optimizer, whose states a plan has, where the config says "auto": in the config, or '
                "optimizer=",
                code="auto-without-optimizer",
            )
        return this_machine(mesh.device, mesh.ranks, config), config

    own, config = run_on_all_ranks(collectives, _WHAT, look)
    settings = {name: value for name, value in config.to_dict().items() if name != "monitor"}  # rank 0's alone
    compare(collectives, {"config": [json.dumps(settings, sort_keys=True, default=str)]})
    asked = replace(asked, base=_on(mesh, config, asked.base))
    where = _least(own, collectives)
    speeds: dict[str, GroupSpeed] = {}
    if mesh.ranks > 1:
        speeds[GroupName.REDUCE] = measure_reduction(collectives, torch.float32)
        speeds[GroupName.GATHER] = measure_gathers(collectives, torch.float32)

    def on_first() -> dict[str, int]:
        if mesh.rank:
            return {}
        values, said = decide_alone(asked, where, speeds)
        _log.warning('"auto" in the config: %s', said)
        return values

    found = run_on_all_ranks(collectives, _WHAT, on_first)
    values: dict[str, int] = collectives.exchange_objects(found, _WHAT)[0]
    return values


def _on(mesh: Mesh, config: Config, base: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``base`` with the shard groups of ``mesh``, if the mesh is hybrid and ``config`` names no groups."""
    zero = config.zero_optimization
    if mesh.replicas == 1 or zero.zero_hpz_partition_size != 1 or zero.shard_group_size != "all":
        return base
    said = {**(base.get("zero_optimization") or {}), "shard_group_size": mesh.ranks // mesh.replicas}
    return {**base, "zero_optimization": said}


def _least(own: Hardware, collectives: Collectives) -> Hardware:
    """Return ``own`` with each tier reduced to the least that any rank has."""
    tiers = [own.device_bytes, own.per_rank(own.host_bytes), own.per_rank(own.disk_bytes)]
    rows = collectives.exchange_objects([*tiers, own.node_ranks], _WHAT)
    node_ranks = rows[0][-1]
    columns = zip(*(row[:-1] for row in rows), strict=True)
    device, host, disk = (min((each for each in column if each is not None), default=0) for column in columns)
    of_node = node_ranks or own.ranks
    return replace(
        own, device_bytes=device, host_bytes=None if own.host_bytes is None else host * of_node,
        disk_bytes=None if own.disk_bytes is None else disk * of_node, node_ranks=node_ranks,
    )  # fmt: skip


def decide_alone(
    asked: Question, where: Hardware, speeds: Mapping[str, GroupSpeed] | None = None
) -> tuple[dict[str, int], str]:
    """Decide as ``decide`` does, in this process alone, for ranks that need not exist.

    Returns the values and a sentence with the reason. speeds: measured speeds of collectives, by group.
    """
    asked_for = zip((STAGE, MICRO), asked.undecided, strict=False)
    names = [name for name, is_undecided in asked_for if is_undecided]
    why = None
    try:
        with undisturbed():
            loss = in_time(asked.loss, load_or_default(asked.base, asked.auto).timeout_s, _PATIENCE)
            found = search(replace(asked, loss=loss, trains=True), where, _rates(where, speeds or {}))
    except (TooLong, Exception) as error:
        why = reason_of(error)
    if why is not None:
        gc.collect()  # objects that the exception held
        if names == [MICRO] and global_batch(asked.base, where.ranks) is not None:
            return {}, f"{MICRO} is worked out from the other batch sizes, since no plan was made: {why}"
        made = "" if asked.batch is not None else ", and batch= of your own where the one that was made is no batch"
        raise UsageError(
            f'{" and ".join(names)}: "auto" cannot be decided: {why}; write a value{made}', code="auto-not-decided"
        )
    if found.plan is None:
        raise NothingFits(f'{" and ".join(names)}: "auto", but {"; ".join(found.needed)}', code="auto-nothing-fits")
    config = found.plan.config
    values = {STAGE: config.zero_optimization.stage, MICRO: config.train_micro_batch_size_per_gpu or 1}
    values = {name: values[name] for name in names}
    return values, _sentence(found, values)


def _rates(where: Hardware, speeds: Mapping[str, GroupSpeed]) -> Rates:
    rates = Rates.given(where) if where.is_gpu else measured(cores=count_cores() if where.ranks > 1 else 0)
    exchange = speeds[GroupName.GATHER].latency_s if speeds else rates.exchange_s
    return replace(rates, groups=speeds, exchange_s=exchange)


def _sentence(found: Choice, values: Mapping[str, int]) -> str:
    assert found.plan is not None
    plan, time = found.plan, found.plan.time
    said = ", ".join(f"{name} is {value}" for name, value in values.items())
    shape = " × ".join(map(str, plan.shape))
    about = "" if time is None else f", about {time.seconds:.3g} s a step"
    return (
        f"{said}; by {found.tried} plans in {found.seconds:.1f} s, of micro-batches of {shape} "
        f"({'; '.join(plan.sentences())}{about})"
    )
