"""``shardengine.choose``: which config is the fastest that fits, and what would be needed where none does.

Owns: which configs are tried, in what order they are shown. Must not know: how bytes and seconds are found (plans).

[Note: Search] Every candidate is a stage, a place for what does not have to be on the device, and whether activations
are computed again. Two quick plans, of one and of two samples, say how its need grows with a micro-batch, and so which
is the largest; that one is planned quickly itself, because a larger one may have its peak elsewhere. Only what is
chosen is planned with all that ``plan`` checks: where that says it does not fit, the next one is chosen. Host memory is
tried only where no micro-batch of ``_ENOUGH`` samples fits without it, to plan less.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardengine.config import load_config, read_tree
from shardengine.errors import ConfigError, UsageError
from shardengine.planner import batches
from shardengine.planner.hardware import Hardware, show_bytes
from shardengine.planner.memory_plan import Plan, Task, Tier, hardware_of, made, options_of
from shardengine.planner.no_values import without_values
from shardengine.planner.rates import Rates

SHOWN = 10
_CHECKED = 3
"""Of the best so many are checked; where none fits after all, it is for a reason that all have (the host's memory)."""
_LARGEST = 64
"""Samples of a micro-batch, where the config has no batch of its own that says less."""
_ENOUGH = 4
"""Samples of a micro-batch beyond which no place beside the device is tried."""
_GPU, _STATES, _ALL = "device", "states on the host", "all on the host"
_HOST = {"device": "cpu"}
_PLACES: Mapping[str, Mapping[str, Any]] = {
    _GPU: {},
    _STATES: {"offload_optimizer": _HOST},
    _ALL: {"offload_optimizer": _HOST, "offload_param": _HOST},
}
_OURS = ("stage", "offload_optimizer", "offload_param", "zero_hpz_partition_size")


@dataclass(frozen=True)
class Candidate:
    """stage · place: of states and weights · again: activations are computed again · kept: ranks of a node over which
    weights stay sharded after forward (hpZ), 0: none · samples: of a micro-batch."""

    stage: int
    place: str = _GPU
    again: bool = False
    kept: int = 0
    samples: int = 1

    def __str__(self) -> str:
        words = [f"stage {self.stage}", *([self.place] if self.place != _GPU else [])]
        words += ["activations again"] if self.again else []
        words += [f"weights kept in nodes of {self.kept}"] if self.kept else []
        return ", ".join(words)

    def config(self, base: Mapping[str, Any], ranks: int) -> dict[str, Any]:
        """``base`` with this in it. A global batch that it names, or that follows from it, stays."""
        found = copy.deepcopy(dict(base))
        zero = {key: value for key, value in dict(found.get("zero_optimization") or {}).items() if key not in _OURS}
        zero |= {"stage": self.stage, **_PLACES[self.place]}
        zero |= {"zero_hpz_partition_size": self.kept} if self.kept else {}
        found["zero_optimization"] = zero
        if self.again:
            found["activation_checkpointing"] = {**(found.get("activation_checkpointing") or {}), "enabled": True}
        elif "activation_checkpointing" in found:
            found["activation_checkpointing"] = {**(found["activation_checkpointing"] or {}), "enabled": False}
        whole = global_batch(base, ranks)
        found.pop("gradient_accumulation_steps", None)
        found |= {"train_micro_batch_size_per_gpu": self.samples}
        found |= {"gradient_accumulation_steps": 1} if whole is None else {"train_batch_size": whole}
        return found


@dataclass(frozen=True)
class Row:
    """A candidate that fits. samples_per_s: of all ranks together."""

    candidate: Candidate
    plan: Plan
    samples_per_s: float


@dataclass(frozen=True)
class Choice:
    """rows: the best that fit, best first, the first of them checked · needed: sentences, where none fits · config: the
    first one's, as a file has it; None where none fits · tried: how many were planned · seconds: that it took · plan:
    the first one's with all that ``plan`` checks; those of the rows are quick ones."""

    hardware: Hardware
    rows: Sequence[Row]
    needed: Sequence[str]
    config: Mapping[str, Any] | None
    tried: int
    seconds: float
    plan: Plan | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            {"candidate": str(row.candidate), "micro_batch": row.candidate.samples,
             "samples_per_second": row.samples_per_s, "plan": row.plan.as_dict()}
            for row in self.rows
        ]  # fmt: skip
        return {"config": self.config, "rows": rows, "needed": list(self.needed), "tried": self.tried,
                "seconds": self.seconds}  # fmt: skip


def choose(
    model: nn.Module | Callable[[], nn.Module],
    config: Mapping[str, Any] | str | Path,
    hardware: Hardware | str,
    *,
    batch: Mapping[str, Any] | None = None,
    length: int | None = None,
    loss: Callable[[Any], Tensor] = batches.loss_of,
    rates: Rates | None = None,
    told: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Choice:
    """The fastest of many configs that fit ``hardware``: stages, tiers, activations computed again, micro-batches, and
    weights that are kept in a node.

    config: what stays: optimizer, precision, clipping, and the global batch, where it says one · batch: a micro-batch
    of any number of samples, the first size of its tensors · told: hears what is planned at the moment · the rest as
    for ``plan``. Where nothing fits, ``Choice.needed`` says what would.
    """
    began = time.perf_counter()
    where, options = hardware_of(hardware, "choose"), options_of(options, "choose")
    if not isinstance(config, (str, Path, Mapping)):
        raise UsageError(f"choose: expected config to be a mapping, or a file of one, got {type(config).__name__}")
    base = read_tree(Path(config)) if isinstance(config, (str, Path)) else copy.deepcopy(dict(config))
    with without_values():
        whole = made(model)
        given = None if batch is None else batches.on_host(batch)
        one = given or batches.example(whole, 1, length)
    search = _Search(whole, base, where, one, loss, rates or Rates.given(where), options, told)
    rows, whole_plan = search.checked(search.rows())
    needed = [] if rows else search.needed()
    found = rows[0].candidate.config(base, where.ranks) if rows else None
    return Choice(where, rows, needed, found, search.tried, time.perf_counter() - began, whole_plan)


_Change = tuple[str, Hardware, dict[str, Any]]
"""What is other, in words · the hardware · "batch" or "config" in the place of the asked one."""


class _Search:
    """See [Note: Search]."""

    def __init__(
        self, model: nn.Module, base: Mapping[str, Any], where: Hardware, batch: Mapping[str, Any], *more: Any
    ) -> None:
        self._model, self._base, self._where, self._batch = model, base, where, batch
        self._loss, self._rates, self._options, self._told = more
        self._samples = next((each.shape[0] for each in batch.values() if isinstance(each, Tensor) and each.dim()), 1)
        if not self._grows():
            raise UsageError(
                "choose: expected batch= of tensors [samples, ...] by name, got one of which nothing would be larger "
                "with more samples"
            )
        self._known: dict[Candidate, Plan | None] = {}
        self._problems: list[str] = []
        self.tried = 0

    def _grows(self) -> bool:
        twice = batches.resized(self._batch, self._samples, 2 * self._samples)
        return any(each is not self._batch[name] for name, each in twice.items())

    def rows(self) -> list[Row]:
        """Of all that fit, best first."""
        found: list[Row] = []
        for place in _PLACES if self._where.is_gpu else (_GPU,):
            if place != _GPU and any(row.candidate.samples >= min(_ENOUGH, self._most) for row in found):
                break
            for again in (False, True):
                for kind in self._kinds(place, again):
                    found += self._largest(kind)
        return sorted(found, key=lambda row: -row.samples_per_s)

    def _kinds(self, place: str, again: bool) -> Iterator[Candidate]:
        steps = global_batch(self._base, self._where.ranks) is not None  # else stage 2 sends what stage 1 does
        numbers = {_GPU: (0, 1, 2, 3) if steps else (0, 2, 3), _STATES: (1, 2, 3) if steps else (2, 3), _ALL: (3,)}
        for stage in numbers[place] if self._where.ranks > 1 else numbers[place][:1]:
            yield Candidate(stage, place, again)
        node = self._where.node_ranks or self._where.ranks
        if place == _GPU and 1 < node < self._where.ranks:
            yield Candidate(3, place, again, kept=node)

    @property
    def _most(self) -> int:
        """Samples of the largest micro-batch."""
        whole = global_batch(self._base, self._where.ranks)
        return _LARGEST if whole is None else max(1, whole // self._where.ranks)

    def _sizes(self) -> list[int]:
        whole = global_batch(self._base, self._where.ranks)
        if whole is None:
            return [1 << power for power in range(_LARGEST.bit_length()) if 1 << power <= _LARGEST]
        of_rank = max(1, whole // self._where.ranks)
        return [size for size in range(1, of_rank + 1) if of_rank % size == 0]

    def _largest(self, kind: Candidate) -> list[Row]:
        """With the smallest two micro-batches, and with the largest that fits."""
        one = self._quick(kind)
        if one is None or not one.fits:
            return []
        sizes, found = self._sizes(), [self._row(kind, one)]
        two = self._quick(replace(kind, samples=sizes[1])) if len(sizes) > 1 else None
        if two is None or not two.fits:
            return found
        found.append(self._row(replace(kind, samples=sizes[1]), two))
        limit = min(_limit(*pair, sizes[1]) for pair in zip(one.tiers, two.tiers, strict=True))
        for size in reversed([size for size in sizes if sizes[1] < size <= limit]):
            chosen = replace(kind, samples=size)
            there = self._quick(chosen)
            if there is not None and there.fits:
                return [*found, self._row(chosen, there)]
        return found

    def _row(self, candidate: Candidate, plan: Plan) -> Row:
        assert plan.time is not None
        samples = candidate.samples * (plan.config.gradient_accumulation_steps or 1) * self._where.ranks
        return Row(candidate, plan, samples / plan.time.seconds)

    def _quick(self, candidate: Candidate) -> Plan | None:
        """None: the engine, or the model, does not take it."""
        if candidate not in self._known:
            self._told(f"{candidate}, micro-batches of {candidate.samples}")
            self._known[candidate] = self._plan(candidate, self._where, quick=True)
        return self._known[candidate]

    def _plan(self, candidate: Candidate, where: Hardware, *, quick: bool, **changed: Any) -> Plan | None:
        self.tried += 1
        base = {**self._base, **changed.get("config", {})}
        batch = batches.resized(changed.get("batch", self._batch), self._samples, candidate.samples)
        try:
            config = load_config(candidate.config(base, where.ranks)).resolve_batch(where.ranks)
            task = Task(self._model, batch, config, where, self._loss, self._options)
            return task.plan(task.run_quickly() if quick else task.run_all(exact=False), self._rates)
        except (ConfigError, UsageError, ValueError) as error:
            self._problems.append(str(error))
            return None

    def checked(self, rows: Sequence[Row]) -> tuple[Sequence[Row], Plan | None]:
        """The best of them, and the first one's plan with all that ``plan`` checks. ``UsageError`` where no candidate
        could be planned at all."""
        if not any(self._known.values()):
            raise UsageError(f"choose: no config can be planned: {self._problems[0]}")
        for place, row in enumerate(rows[:_CHECKED]):
            self._told(f"check: {row.candidate}, micro-batches of {row.candidate.samples}")
            whole = self._known[row.candidate] = self._plan(row.candidate, self._where, quick=False)
            if whole is not None and whole.fits:
                return rows[place : place + SHOWN], whole
        return [], None

    def needed(self) -> list[str]:
        """The smallest change of each kind with which the candidate fits that lacks least."""
        known = [(candidate, plan) for candidate, plan in self._known.items() if plan is not None]
        closest, plan = min(known, key=lambda each: max(_lacks(tier) for tier in each[1].tiers))
        told = [f"nothing fits; the closest is {closest} with micro-batches of {closest.samples}: "
                + "; ".join(plan.sentences())]  # fmt: skip
        for kind in (self._more_ranks(), self._shorter(), self._smaller_states()):
            for what, where, changed in kind:
                self._told(f"would it fit with {what}?")
                found = self._plan(closest, where, quick=False, **changed)
                if found is not None and found.fits:
                    told.append(f"it would fit with {what}: {'; '.join(found.sentences())}")
                    break
        return told

    def _more_ranks(self) -> Iterator[_Change]:
        where = self._where
        for times in (2, 4, 8, 16):
            more = replace(where, ranks=times * where.ranks, node_ranks=where.node_ranks or where.ranks)
            yield f"{more.ranks} ranks", more, {}

    def _shorter(self) -> Iterator[_Change]:
        half = batches.shorter(self._batch)
        for parts in (2, 4, 8):
            if half is None:
                break
            yield f"sequences of 1/{parts} of the length", self._where, {"batch": half}
            half = batches.shorter(half)

    def _smaller_states(self) -> Iterator[_Change]:
        if (self._base.get("optimizer") or {}).get("type") in ("Adam", "AdamW"):
            eight = {"data_types": {**(self._base.get("data_types") or {}), "optimizer_state_dtype": "8bit"}}
            yield "states of 8 bits (data_types.optimizer_state_dtype)", self._where, {"config": eight}


def _limit(one: Tier, two: Tier, second: int) -> float:
    """Samples at which a tier is full, by its needs with one and with ``second``."""
    if one.has is None or two.peak <= one.peak:
        return float("inf")
    return 1 + (one.has - one.peak) * (second - 1) / (two.peak - one.peak)


def _lacks(tier: Tier) -> float:
    return 0.0 if tier.has is None else max(0.0, tier.need - tier.has) / max(1, tier.has)


def global_batch(config: Mapping[str, Any], ranks: int) -> int | None:
    """Samples of a step that ``config`` says, itself or by the other two sizes; None: it does not."""
    whole, micro, steps = (
        config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if isinstance(whole, int):
        return whole
    return micro * (steps if isinstance(steps, int) else 1) * ranks if isinstance(micro, int) else None


def table_of(found: Choice) -> str:
    """The rows, for people."""
    head = ["", "config", "micro-batch", *(tier for tier in ("GPU", "memory", "host", "disk") if _uses(found, tier)),
            "step", "samples/s"]  # fmt: skip
    rows = [head]
    for place, row in enumerate(found.rows, 1):
        tiers = {tier.name: show_bytes(tier.peak) for tier in row.plan.tiers}
        assert row.plan.time is not None
        needs = [tiers.get(name, "") for name in head[3:-2]]
        rows.append([str(place), str(row.candidate), str(row.candidate.samples), *needs,
                     f"{row.plan.time.seconds:.3g} s", f"{row.samples_per_s:.4g}"])  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _uses(found: Choice, name: str) -> bool:
    return any(tier.name == name for row in found.rows for tier in row.plan.tiers)
