"""What a config leaves to "auto" and only a plan can say: the stage, and the micro-batch.

Owns: which keys these are, on what facts they are chosen, what is said of it. Must not know: how candidates are planned
(choice), what an engine is made of.

[Note: One choice] Rank 0 plans, and the others hear what it has found, so that all have the same. What it plans for is
the least that any rank has of each tier, and links as fast as the ranks' own group was a moment before; on a CPU also
its own speed, measured. Of a GPU's calculations nobody has measured anything: ``rates`` declares them, which is as
wrong for one candidate as for the other.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.comm import (
    Collectives,
    GroupName,
    GroupSpeed,
    Mesh,
    measure_gathers,
    measure_reduction,
    run_on_all_ranks,
)
from shardengine.comm import cores as count_cores
from shardengine.config import (
    STAGES,
    TRIPLE,
    Config,
    automatic_keys,
    load_config,
    load_or_default,
    plain,
    read_tree,
)  # fmt: skip
from shardengine.engine import check_free
from shardengine.errors import ConfigError, UsageError
from shardengine.offload import BufferPool
from shardengine.planner import batches
from shardengine.planner.amid import TooLong, in_time, reason_of, undisturbed
from shardengine.planner.calibration import measured
from shardengine.planner.choice import Choice, Open, Question, search
from shardengine.planner.hardware import Hardware
from shardengine.planner.machine import this_machine
from shardengine.planner.memory_plan import options_of
from shardengine.planner.rates import Rates

STAGE, MICRO = "zero_optimization.stage", "train_micro_batch_size_per_gpu"
_WHAT = 'deciding what is "auto" in the config'
_PATIENCE = 0.8
"""The part of ``timeout_s`` for which the other ranks may wait."""
_INSTEAD = "write a value, or have one written: shardengine plan --choose --write FILE"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """What is decided for. batch: a micro-batch of any size, or what makes one on rank 0; None: one for models of
    transformers · loss: of what forward returns · optimizer: as ``initialize`` has it · auto: what is known of other
    keys that are "auto"."""

    model: nn.Module
    tree: Mapping[str, Any]
    open_: Open
    batch: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None
    loss: Callable[[Any], Tensor] = batches.loss_of
    optimizer: Any = None
    auto: Mapping[str, Any] = field(default_factory=dict)


def read_open(config: Mapping[str, Any] | str | Path | Config) -> tuple[Mapping[str, Any], Open | None]:
    """What ``config`` says, and what of it is to be decided; None: nothing, also where it cannot be read.

    A micro-batch that follows from the other two sizes is not.
    """
    if isinstance(config, Config):
        return {}, None
    try:
        tree = plain(config) if isinstance(config, Mapping) else read_tree(Path(config))
    except ConfigError:
        return {}, None
    names = automatic_keys(tree)
    follows = all(isinstance(tree.get(size), int) for size in TRIPLE if size != MICRO)
    found = Open(STAGE in names, MICRO in names and not follows, rest=False)
    return tree, found if found.stages or found.micro_batches else None


def provisional(
    config: Mapping[str, Any] | str | Path | Config, auto: Mapping[str, Any] | None = None
) -> dict[str, int]:
    """Values with which ``config`` can be read before it is decided: the first stage that the rest goes with, and one
    sample of a rank where no other size says more. auto: what is known of other keys."""
    tree, open_ = read_open(config)
    if open_ is None:
        return {}
    sizes = {MICRO: 1} if _says_no_batch(tree) else {}
    for stage in STAGES:
        found = {STAGE: stage, **sizes}
        with suppress(ConfigError):
            load_config(tree, {**(auto or {}), **found})
            return found
    return {STAGE: STAGES[-1], **sizes}  # what is wrong is something else


def _says_no_batch(tree: Mapping[str, Any]) -> bool:
    return not isinstance(tree.get(TRIPLE[0]), int)


def decide(task: Task, mesh: Mesh) -> dict[str, int]:
    """Values by dotted name, the same on every rank; collective. Rank 0 logs why.

    ``UsageError`` where nothing fits, and where no plan can be made; for a micro-batch alone, which the other sizes say
    too, that is a notice.
    """
    task = replace(task, tree=_on(mesh, task.tree))
    mesh = replace(mesh, replicas=1)  # all ranks, whose shard groups are not made yet
    collectives = Collectives(mesh, BufferPool(mesh.platform), direct=mesh.backend != "nccl")

    def look() -> Hardware:
        check_free(task.model)
        config = load_config(task.tree, {**task.auto, **provisional(task.tree, task.auto)})
        return this_machine(mesh.device, mesh.ranks, config)

    own = run_on_all_ranks(collectives, _WHAT, look)
    where = _least(own, collectives)
    groups: dict[str, GroupSpeed] = {}
    if mesh.ranks > 1:
        groups[GroupName.REDUCE] = measure_reduction(collectives, torch.float32)
        groups[GroupName.GATHER] = measure_gathers(collectives, torch.float32)

    def choose() -> dict[str, int]:
        if mesh.rank:
            return {}
        values, said = decide_for(where, task, groups)
        _log.warning('"auto" in the config: %s', said)
        return values

    found = run_on_all_ranks(collectives, _WHAT, choose)
    values: dict[str, int] = collectives.exchange_objects(found, _WHAT)[0]
    return values


def _on(mesh: Mesh, tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """``tree`` with the shard groups that ``mesh`` has, where it is hybrid and ``tree`` says none."""
    zero = dict(tree.get("zero_optimization") or {})
    if mesh.replicas == 1 or "zero_hpz_partition_size" in zero:
        return tree
    return {**tree, "zero_optimization": {"shard_group_size": mesh.ranks // mesh.replicas, **zero}}


def _least(own: Hardware, collectives: Collectives) -> Hardware:
    """Of each tier what the rank with the least has."""
    names = ("device_bytes", "host_bytes", "disk_bytes", "node_ranks")
    rows = collectives.exchange_objects([getattr(own, name) for name in names], _WHAT)
    least: dict[str, Any] = {
        name: min((each for each in column if each is not None), default=None)
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }
    if own.ranks % (least["node_ranks"] or 1):
        least["node_ranks"] = own.node_ranks
    return replace(own, **least)


def decide_for(
    where: Hardware, task: Task, groups: Mapping[str, GroupSpeed] | None = None
) -> tuple[dict[str, int], str]:
    """Values, and a sentence on why; by this process alone. groups: how fast collectives are; ``UsageError`` as
    ``decide``."""
    names = [name for name, asked in ((STAGE, task.open_.stages), (MICRO, task.open_.micro_batches)) if asked]
    why = None
    try:
        with undisturbed(task.model):
            found = _search(task, where, groups or {})
    except (TooLong, Exception) as error:
        why = _reason(error)
    if why is not None:
        gc.collect()  # what the exception held
        if names == [MICRO] and not _says_no_batch(task.tree):
            return {}, f"{MICRO} is worked out from the other batch sizes, since no plan was made: {why}"
        raise UsageError(f'initialize: {" and ".join(names)} cannot be decided ("auto"): {why}; or {_INSTEAD}')
    if not found.rows or found.plan is None:
        raise UsageError(f'initialize: {" and ".join(names)} "auto": {"; ".join(found.needed)}; or {_INSTEAD}')
    chosen = found.plan.config
    values = {STAGE: chosen.zero_optimization.stage, MICRO: chosen.train_micro_batch_size_per_gpu or 1}
    return {name: values[name] for name in names}, _sentence(found, {name: values[name] for name in names})


def _reason(error: BaseException) -> str:
    """Why there is no plan, whole."""
    if not isinstance(error, UsageError | ConfigError):
        return reason_of(error)
    return str(error).removeprefix("choose: ").removeprefix("no config can be planned: ").removeprefix("plan: ")


def _search(task: Task, where: Hardware, groups: Mapping[str, GroupSpeed]) -> Choice:
    rates = Rates.given(where) if where.is_gpu else measured(cores=count_cores() if where.ranks > 1 else 0)
    exchange = groups[GroupName.GATHER].latency_s if groups else rates.exchange_s
    rates = replace(rates, groups=groups, exchange_s=exchange)
    given = task.batch() if callable(task.batch) else task.batch
    batch = batches.example(task.model, 1, None) if given is None else batches.on_host(given)
    options = options_of({} if task.optimizer is None else {"optimizer": task.optimizer}, "initialize")
    loss = in_time(task.loss, _PATIENCE * load_or_default(task.tree, task.auto).timeout_s)
    return search(Question(task.model, task.tree, batch, task.open_, loss, options, task.auto), where, rates)


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
