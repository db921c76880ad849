"""``shardengine.choose``: the fastest config that fits, or the smallest changes that would make one fit.

Owns: the configs that are tried, the order of the result. Must not know: how bytes and seconds are found (plans), who
leaves values open (automatic).

[Note: Search] A candidate is a stage, a place for everything that need not be on the device, and whether activations
are recomputed. Two quick plans, with one and with two samples, show how the need grows with the micro-batch, and so the
largest micro-batch that fits. That one gets a quick plan of its own, because its peak may be at another moment. Only
the candidate that is chosen is planned with all checks of ``plan``; if it does not fit after all, the next one is
chosen.

To save time, the weights and states alone are counted before the quick plans. This excludes most configs that do not
fit. Host memory, and then the disk, are tried only if no micro-batch of ``_ENOUGH`` samples fits without them. If a
candidate fits with all states on the host, a part of them may be enough. The device's need falls about evenly with the
states that leave it, so two plans give that part, or one that is a little larger. A part is tried only if it may be
faster than the best config.

[Note: Undecided values] ``choose`` searches over all of this. If a config gives most of the values, they stay, and the
search covers only those marked in ``Undecided``. If nothing fits, other changes are planned as well, only to be listed
in the result.
"""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardengine.config import MICRO, STAGES, TRIPLE, load_config, provisional, read_tree, whole_number
from shardengine.errors import ConfigError, UsageError
from shardengine.planner import batches
from shardengine.planner.dry_engine import STATES
from shardengine.planner.hardware import Hardware, show_bytes, table
from shardengine.planner.memory_plan import Plan, PlannedTier, Task, hardware_of, made, options_of
from shardengine.planner.no_values import without_values
from shardengine.planner.rates import HOST_STEP, NETWORK, NODE, TO_DEVICE, TO_HOST, Rates

SHOWN = 10
_CHECKED = 3
"""So many of the best candidates are checked, and then the one that needs least."""
_LARGEST = 64
"""The largest micro-batch in samples, if the config gives no global batch."""
_ENOUGH = 4
"""If a micro-batch of so many samples fits, no further place for states and weights is tried."""
_GPU, _STATES, _ALL = "device", "states on the host", "all on the host"
_STATES_ON_DISK, _ALL_ON_DISK = "states on the disk", "all on the disk"
_OPTIMIZER, _PARAM = "offload_optimizer", "offload_param"
_PLACES: Mapping[str, Mapping[str, str]] = {
    _GPU: {},
    _STATES: {_OPTIMIZER: "cpu"},
    _ALL: {_OPTIMIZER: "cpu", _PARAM: "cpu"},
    _STATES_ON_DISK: {_OPTIMIZER: "nvme"},
    _ALL_ON_DISK: {_OPTIMIZER: "nvme", _PARAM: "nvme"},
}
"""Place → the keys of the config that set it, each with its device."""
_WHERE_WEIGHTS_REST = {_ALL: STAGES[-1:], _ALL_ON_DISK: STAGES[-1:]}
"""Place → the stages that can keep weights there. Other places go with every stage."""
_STAGES_OF_ONE = (*STAGES[:1], *STAGES[2:])
"""The stages that are tried with one micro-batch per step."""
_ALIKE = 0.05
"""Speeds that differ by less than this part count as equal: two measurements differ by as much."""
_PARTS = 20
"""The part of the states on the host is a multiple of 1 / ``_PARTS``."""
_WHOLE, _, _STEPS = TRIPLE
_PLANS_OF_A_KIND = 2
"""Plans per kind, for the estimate of progress: one if it does not fit, up to five if it does."""
_OURS = (_OPTIMIZER, _PARAM, "zero_hpz_partition_size")


def _check(base: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for errors in the keys that ``choose`` does not choose."""
    zero = base.get("zero_optimization")
    if zero is None or isinstance(zero, Mapping):
        rest = {key: value for key, value in (zero or {}).items() if key not in _OURS}
        base = {**base, "zero_optimization": {**rest, "stage": "auto"}}
    load_config({**base, MICRO: 1} if global_batch(base, 1) is None else base, provisional(base))


class Undecided(NamedTuple):
    """The parts of a config that are searched; see the note on undecided values at the top of the file."""

    stages: bool = True
    micro_batches: bool = True
    rest: bool = True


@dataclass(frozen=True)
class ConfigCandidate:
    """A combination of values that is planned. None means: as in the config.

    stage · place: of states and weights · again: activations are recomputed · kept: hpZ, the ranks of a node that keep
    weights sharded among them after forward; 0: off · samples: of a micro-batch · part: the part of the states on the
    host, if ``place`` puts them there.
    """

    stage: int | None
    place: str | None = _GPU
    again: bool | None = False
    kept: int = 0
    samples: int | None = 1
    part: float = 1.0

    def __str__(self) -> str:
        words = ["the stage of the config" if self.stage is None else f"stage {self.stage}"]
        part = f"{self.part:.0%} of the " if self.part < 1 else ""
        words += [f"{part}{self.place}"] if self.place not in (None, _GPU) else []
        words += ["activations again"] if self.again else []
        words += [f"weights kept in nodes of {self.kept}"] if self.kept else []
        return ", ".join(words)

    def config(self, base: Mapping[str, Any], ranks: int) -> dict[str, Any]:
        """Return ``base`` with these values.

        A global batch that ``base`` gives, directly or by its other sizes, stays.
        """
        found = copy.deepcopy(dict(base))
        zero = dict(found.get("zero_optimization") or {})
        if self.place is not None:
            zero = {key: value for key, value in zero.items() if key not in _OURS}
            zero |= {key: self._kept_in(device, base) for key, device in _PLACES[self.place].items()}
            zero |= {"zero_hpz_partition_size": self.kept} if self.kept else {}
        found["zero_optimization"] = zero | ({} if self.stage is None else {"stage": self.stage})
        if self.again or (self.again is not None and "activation_checkpointing" in found):
            said = found.get("activation_checkpointing") or {}
            found["activation_checkpointing"] = {**said, "enabled": self.again}
        if self.samples is not None:
            whole, steps = global_batch(base, ranks), _number(base, _STEPS) or 1
            found.pop(_STEPS, None)
            found |= {MICRO: self.samples, **({_STEPS: steps} if whole is None else {_WHOLE: whole})}
        return found

    def _kept_in(self, device: str, base: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"device": device}
        if device == "nvme":
            found["nvme_path"] = disk_of(base)
        return found if self.part == 1 else {**found, "ratio": self.part}


def disk_of(config: Mapping[str, Any]) -> str | None:
    """Return the folder for the tier nvme that ``config`` names, whether or not the tier is used."""
    zero = config.get("zero_optimization") or {}
    sections = (zero.get(key) for key in (_OPTIMIZER, _PARAM))
    return next((each["nvme_path"] for each in sections if isinstance(each, Mapping) and each.get("nvme_path")), None)


@dataclass(frozen=True)
class ChoiceRow:
    """A candidate that fits. samples_per_s: of all ranks together · samples: of its micro-batch."""

    candidate: ConfigCandidate
    plan: Plan
    samples_per_s: float

    @property
    def samples(self) -> int:
        """See ``ChoiceRow``."""
        return self.plan.config.train_micro_batch_size_per_gpu or 1


@dataclass(frozen=True)
class Choice:
    """The result of ``choose``.

    rows: the best candidates that fit, best first; the first one is checked · needed: sentences on changes that would
    fit, if no candidate does · config: the first row's, as a config file has it; None if nothing fits · tried: the
    number of plans · seconds: the time of the search · plan: the first row's, with all checks of ``plan``; those in the
    rows are quick ones · refused: candidates that are in no row with any micro-batch, each with the reason.
    """

    hardware: Hardware
    rows: Sequence[ChoiceRow]
    needed: Sequence[str]
    config: Mapping[str, Any] | None
    tried: int
    seconds: float
    plan: Plan | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the choice for JSON."""
        rows = [
            {"candidate": str(row.candidate), "micro_batch": row.samples,
             "samples_per_second": row.samples_per_s, "plan": row.plan.as_dict()}
            for row in self.rows
        ]  # fmt: skip
        plan = None if self.plan is None else self.plan.as_dict()
        return {"config": self.config, "plan": plan, "rows": rows, "refused": dict(self.refused),
                "needed": list(self.needed), "tried": self.tried, "seconds": self.seconds}  # fmt: skip


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
    in_slices: bool = False,
    **options: Any,
) -> Choice:
    """Return the fastest configs that fit ``hardware``.

    The search covers stages, tiers, recomputed activations, micro-batches, and weights kept in a node (hpZ).

    config: the values that stay: optimizer, precision, clipping, and the global batch if it gives one · batch: a
    micro-batch of any number of samples (the first size of most of its tensors); larger ones repeat its samples in turn
    · told: called before each plan with a text: the number of plans so far, the best candidate, and the one planned now
    · other arguments: as for ``plan``. If nothing fits, ``Choice.needed`` lists changes that would.
    """
    where, options = hardware_of(hardware, "choose"), options_of(options, "choose")
    if not isinstance(config, (str, Path, Mapping)):
        raise UsageError(
            f"choose: expected config to be a mapping, or a file of one, got {type(config).__name__}",
            code="config-wrong-type",
        )
    base = read_tree(Path(config)) if isinstance(config, (str, Path)) else copy.deepcopy(dict(config))
    _check(base)
    with without_values():
        found = made(model)
    given = batches.example(found, 1, length) if batch is None else batch
    asked = Question(found, base, given, loss=loss, options=options, in_slices=in_slices)
    return search(asked, where, rates or Rates.given(where), told)


@dataclass(frozen=True)
class Question:
    """The input of a search.

    base: the config to start from · batch: a micro-batch of any size, or a function that makes one; by default one for
    models of transformers · undecided: the values to search; others are as in ``base`` · loss, options: as for ``plan``
    · auto: as for ``load_config`` · trains: plan in training mode, whatever mode the model is in · in_slices: as for
    ``plan``.
    """

    model: nn.Module
    base: Mapping[str, Any]
    batch: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None
    undecided: Undecided = field(default_factory=Undecided)
    loss: Callable[[Any], Tensor] = batches.loss_of
    options: Mapping[str, Any] = field(default_factory=dict)
    auto: Mapping[str, Any] = field(default_factory=dict)
    trains: bool = False
    in_slices: bool = False


def search(asked: Question, where: Hardware, rates: Rates, told: Callable[[str], None] = lambda text: None) -> Choice:
    """Answer a ``Question``, as ``choose`` does."""
    began = time.perf_counter()
    found = _Search(asked, where, rates, told)
    rows, whole_plan = found.checked(found.rows())
    needed = [] if rows else found.needed()
    config = rows[0].candidate.config(asked.base, where.ranks) if rows else None
    return Choice(where, rows, needed, config, found.tried, time.perf_counter() - began, whole_plan, found.refused)


class _Change(NamedTuple):
    """A change that may make a candidate fit.

    words: its description · where, base, batch: replace those of the question; None: keep them.
    """

    words: str
    candidate: ConfigCandidate
    where: Hardware | None = None
    base: Mapping[str, Any] | None = None
    batch: Mapping[str, Any] | None = None


class _Search:
    """See [Note: Search]."""

    def __init__(self, asked: Question, where: Hardware, rates: Rates, told: Callable[[str], None]) -> None:
        self._asked, self._where, self._rates, self._told = asked, where, rates, told
        self._base, self._undecided = asked.base, asked.undecided
        given = asked.batch() if callable(asked.batch) else asked.batch
        self._batch = batches.example(asked.model, 1, None) if given is None else batches.on_host(given)
        self._samples = batches.samples_of(self._batch)
        if not self._grows():
            raise UsageError(
                "choose: expected batch= of tensors [samples, ...] by name, got one of which nothing would be larger "
                "with more samples",
                code="plan-batch-without-samples",
            )
        self._known: dict[ConfigCandidate, Plan | None] = {}
        self._problems: dict[ConfigCandidate, str] = {}
        self.refused: dict[str, str] = {}
        self.tried = 0
        self._kept_of: dict[ConfigCandidate, Plan | None] = {}
        self._unplanned = ""  # the first candidate that could not be planned in ``_closest``, and why
        self._ahead = 0
        self._best: tuple[float, ConfigCandidate] | None = None

    def _grows(self) -> bool:
        twice = batches.resized(self._batch, self._samples, 2 * self._samples)
        return any(each is not self._batch[name] for name, each in twice.items())

    def rows(self) -> list[ChoiceRow]:
        """Return all candidates that fit, best first.

        The disk is tried only if the hardware has one and the config names a folder on it.
        """
        if not self._undecided.rest:
            return _settled([row for kind in self._counted(list(self._as_said())) for row in self._largest(kind)])
        self._answer_soon()
        found: list[ChoiceRow] = []
        for place in self._places():
            if place == _STATES_ON_DISK and disk_of(self._base) is None:
                self.refused["on the disk"] = "expected zero_optimization.offload_optimizer.nvme_path, a folder of it"
                break
            if place != _GPU and any(row.samples >= min(_ENOUGH, self._sizes[-1]) for row in found):
                break
            rows = [row for kind in self._counted(self._all_kinds(place), place) for row in self._largest(kind)]
            rows += [part for row in _fastest_first(rows) for part in self._least_part(row)]
            found += rows
        return _fastest_first(found)

    def _counted(self, kinds: Sequence[ConfigCandidate], place: str | None = None) -> Iterator[ConfigCandidate]:
        """Yield ``kinds``, and update the number of kinds ahead for ``_say``.

        If nothing fits in ``place`` so far, the kinds of the next place count as well.
        """
        behind = next((each for before, each in pairwise(self._places()) if before == place), None)
        for number, kind in enumerate(kinds):
            fits = any(plan is not None and plan.fits for each, plan in self._known.items() if each.place == place)
            self._ahead = len(kinds) - number + (0 if fits or behind is None else len(self._all_kinds(behind)))
            yield kind
        self._ahead = 0

    def _answer_soon(self) -> None:
        """Plan the candidate of each place that needs least, until one fits, so that an early answer can be shown.

        The plans are kept for the candidate's turn in the search.
        """
        places = list(self._places())
        self._ahead = sum(len(self._all_kinds(place)) for place in places[:2])
        for place in places:
            if place == _STATES_ON_DISK and disk_of(self._base) is None:
                break
            least = [kind for kind in self._kinds(place, True) if not kind.kept][-1]
            found = self._quick(least)
            if found is None:
                del self._problems[least], self._known[least]  # reported when its turn comes
                break
            if found.fits:
                break

    def _all_kinds(self, place: str) -> list[ConfigCandidate]:
        return [kind for again in (False, True) for kind in self._kinds(place, again)]

    def _places(self) -> Iterator[str]:
        has_disk = self._where.disk_bytes is not None
        for place in _PLACES if self._where.is_gpu else (_GPU,):
            if has_disk or place not in (_STATES_ON_DISK, _ALL_ON_DISK):
                yield place

    def _as_said(self) -> Iterator[ConfigCandidate]:
        """Yield the candidates that keep the config's values except for the undecided ones."""
        smallest = self._sizes[0] if self._undecided.micro_batches else None
        for stage in self._stages(STAGES) if self._undecided.stages else (None,):
            yield ConfigCandidate(stage, None, None, samples=smallest)

    def _stages(self, all_: Sequence[int]) -> Sequence[int]:
        """Return the stages in ``all_`` that can differ.

        With one micro-batch per step, stage 2 sends as much as stage 1 and keeps less, so stage 1 is left out. A single
        rank shards nothing; only the first and the last stage differ there, because the last one drops gathered
        weights.
        """
        if self._where.ranks == 1:
            return list(dict.fromkeys((all_[0], all_[-1])))
        several = global_batch(self._base, self._where.ranks) is not None or (_number(self._base, _STEPS) or 1) > 1
        return [each for each in all_ if several or each in _STAGES_OF_ONE]

    def _kinds(self, place: str, again: bool) -> Iterator[ConfigCandidate]:
        for stage in self._stages(_WHERE_WEIGHTS_REST.get(place, STAGES)):
            yield ConfigCandidate(stage, place, again)
        node = self._where.node_ranks or self._where.ranks
        if place == _GPU and 1 < node < self._where.ranks:
            yield ConfigCandidate(3, place, again, kept=node)

    @functools.cached_property
    def _sizes(self) -> list[int]:
        """The micro-batches to try, in samples; at least one."""
        whole = global_batch(self._base, self._where.ranks)
        if whole is None:
            return [1 << power for power in range(_LARGEST.bit_length())]
        of_rank = max(1, whole // self._where.ranks)
        return [size for size in range(1, of_rank + 1) if of_rank % size == 0]

    def _largest(self, kind: ConfigCandidate) -> list[ChoiceRow]:
        """Return rows for the two smallest micro-batches and the largest that fits.

        If the config fixes the micro-batch, only that one is planned.
        """
        found = self._of_sizes(kind)
        if not found:
            plan = self._known[kind]
            self.refused[str(kind)] = self._problems[kind] if plan is None else _short(plan)
        return found

    def _least_part(self, row: ChoiceRow) -> list[ChoiceRow]:
        """Return ``row`` with about the smallest part of its states on the host that fits.

        Empty unless ``row`` has all states on the host and a part of them may be faster.
        """
        on_device = replace(row.candidate, place=_GPU)
        if row.candidate.place != _STATES or not self._may_win(row, self._kept(on_device)):
            return []
        without = self._whole(on_device)
        if without is None or without.device.fits or without.device.has is None:
            return []
        all_, less = without.device.need, without.device.need - row.plan.device.need
        least = math.ceil(_PARTS * (all_ - without.device.has) / less) if less > 0 else _PARTS
        for parts in range(least, min(least + 2, _PARTS)):
            chosen = replace(row.candidate, part=parts / _PARTS)
            found = self._quick(chosen)
            if found is not None and found.fits:  # if there are few buckets, two parts may be equal
                return [self._row(chosen, found)] if found.device.need > row.plan.device.need else []
        return []

    def _may_win(self, row: ChoiceRow, on_device: Plan | None) -> bool:
        """Whether ``row`` might be the fastest with a part of its states on the device, by an estimate of saved time.

        on_device: ``_kept`` of the same candidate with all states on the device.
        """
        here, time_, best = row.plan.device, row.plan.time, self._best
        if on_device is None or here.has is None or time_ is None or best is None:
            return False
        moves = on_device.device.at_rest.get(STATES, 0) - here.at_rest.get(STATES, 0)
        part = max(0.0, (here.need + moves - here.has) / moves) if moves > 0 else 1.0  # on the host, at least
        saved = sum(time_.part(name).exposed for name in (NODE, NETWORK))  # gathers may wait behind the copies
        for each in map(time_.part, (HOST_STEP, TO_HOST, TO_DEVICE)):
            saved += min(each.exposed, (1 - part) * each.busy)
        return row.samples_per_s * time_.seconds > best[0] * (time_.seconds - saved)

    def _of_sizes(self, kind: ConfigCandidate) -> list[ChoiceRow]:
        sizes = self._sizes if self._undecided.micro_batches else []
        one = self._quick(kind)
        if one is None and len(sizes) > 1:  # normalisation over a batch needs two samples
            sizes, kind = sizes[1:], replace(kind, samples=sizes[1])
            one = self._quick(kind)
        if one is None or not one.fits:
            return []
        found = [self._row(kind, one)]
        two = self._larger(replace(kind, samples=sizes[1])) if len(sizes) > 1 else None
        if two is None or not two.fits:
            return found
        found.append(self._row(replace(kind, samples=sizes[1]), two))
        limit = min(_limit(*pair, sizes[0], sizes[1]) for pair in zip(one.tiers, two.tiers, strict=True))
        for size in reversed([size for size in sizes if sizes[1] < size <= limit]):
            chosen = replace(kind, samples=size)
            there = self._larger(chosen)
            if there is not None and there.fits:
                return [*found, self._row(chosen, there)]
        return found

    def _larger(self, candidate: ConfigCandidate) -> Plan | None:
        """Plan a larger micro-batch than one that fits.

        If it cannot be planned, memory is not the reason, and it is recorded in ``refused``.
        """
        found = self._quick(candidate)
        if found is None:
            self.refused[_words(candidate)] = self._problems[candidate]
        return found

    def _row(self, candidate: ConfigCandidate, plan: Plan) -> ChoiceRow:
        assert plan.time is not None and plan.config.train_batch_size is not None
        return ChoiceRow(candidate, plan, plan.config.train_batch_size / plan.time.seconds)

    def _quick(self, candidate: ConfigCandidate) -> Plan | None:
        """Return a quick plan, or None if it cannot be planned.

        If ``_kept`` does not fit already, return that, which has no time.
        """
        if candidate not in self._known:
            self._say(_words(candidate))
            kept = self._kept(candidate) if candidate.part == 1 else None
            if kept is None or kept.fits:
                self._known[candidate] = self._new_quick(candidate)
            else:
                self.tried += 1
                self._known[candidate] = kept
        return self._known[candidate]

    def _whole(self, candidate: ConfigCandidate) -> Plan | None:
        """Return a quick plan of a step, even if the weights and states alone do not fit; None as for ``_quick``."""
        known = self._known.get(candidate)
        if candidate not in self._known or (known is not None and known.time is None):
            self._say(_words(candidate))
            self._known[candidate] = self._new_quick(candidate)
        return self._known[candidate]

    def _kept(self, candidate: ConfigCandidate) -> Plan | None:
        """Return ``plan_of_kept``, which is the same for all micro-batches.

        None on an error, which a later plan reports.
        """
        samples = self._sizes[0] if self._undecided.micro_batches else candidate.samples
        of_all = replace(candidate, samples=samples, again=None if candidate.again is None else False)
        if of_all not in self._kept_of:
            try:
                self._kept_of[of_all] = self._task(_Change("", of_all)).plan_of_kept()
            except (ConfigError, UsageError, ValueError):
                self._kept_of[of_all] = None
        return self._kept_of[of_all]

    def _new_quick(self, candidate: ConfigCandidate) -> Plan | None:
        found = self._plan(_Change("", candidate), quick=True)
        if found is not None and found.fits:
            speed = self._row(candidate, found).samples_per_s
            self._best = max(self._best or (speed, candidate), (speed, candidate), key=lambda each: each[0])
        return found

    def _say(self, what: str) -> None:
        """Report the progress, the best candidate so far, and ``what``, which is planned now."""
        about = self.tried + max(1, _PLANS_OF_A_KIND * self._ahead)
        best = "nothing fits so far" if self.tried else ""
        if self._best is not None:
            best = f"best so far: {_words(self._best[1])}, {self._best[0]:.3g} samples/s"
        self._told("; ".join(filter(None, (f"{self.tried} of about {about}", best, f"now {what}"))))

    def _plan(self, change: _Change, *, quick: bool) -> Plan | None:
        self.tried += 1
        try:
            task = self._task(change)
            return task.plan(task.run_quickly() if quick else task.run_all(exact=False), self._rates)
        except (ConfigError, UsageError, ValueError) as error:
            said = "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)
            self._problems.setdefault(change.candidate, said)
            return None

    def _task(self, change: _Change) -> Task:
        where, asked = change.where or self._where, self._asked
        tree = change.candidate.config(change.base or self._base, where.ranks)
        config = load_config(tree, asked.auto).resolve_batch(where.ranks)
        samples = config.train_micro_batch_size_per_gpu or 1
        batch = batches.resized(change.batch or self._batch, self._samples, samples)
        return Task(asked.model, batch, config, where, asked.loss, asked.options, asked.trains, asked.in_slices)

    def checked(self, rows: Sequence[ChoiceRow]) -> tuple[Sequence[ChoiceRow], Plan | None]:
        """Return the best rows, and the first one's plan with all checks of ``plan``.

        ``UsageError`` if no candidate could be planned at all.
        """
        if not any(self._known.values()):
            raise UsageError(
                f"choose: no config can be planned: {next(iter(self._problems.values()))}",
                code="plan-choose-nothing-planned",
            )
        order = [*rows[:_CHECKED], *sorted(rows[_CHECKED:], key=lambda row: max(map(_part, row.plan.tiers)))[:1]]
        for row in order:
            self._say(f"a check of {_words(row.candidate)}")
            exact = self._known[row.candidate] = self._plan(_Change("", row.candidate), quick=False)
            if exact is not None and exact.fits:
                place = rows.index(row)
                return rows[place : place + SHOWN], exact
            self.refused[_words(row.candidate)] = self._problems[row.candidate] if exact is None else _short(exact)
        return [], None

    def needed(self) -> list[str]:
        """Return sentences: the candidate that lacks least, and the smallest change of each kind that makes it fit."""
        lacking = self._closest()
        if lacking is None:  # each one failed its check, or no step can be planned
            why = self._unplanned or next(iter([*self._problems.values(), *self.refused.values()]))
            return [f"no config that might fit can be planned: {why}"]
        closest, plan = lacking
        told = [f"nothing fits; the closest is {_words(closest)}: {'; '.join(plan.sentences())}"]
        for kind in (self._other_places, self._more_ranks, self._shorter, self._smaller_states):
            for change in kind(closest):
                self._say(f"whether it would fit with {change.words}")
                found = self._plan(change, quick=False)
                if found is not None and found.fits:
                    told.append(f"it would fit with {change.words}: {'; '.join(found.sentences())}")
                    break
        return told

    def _closest(self) -> tuple[ConfigCandidate, Plan] | None:
        """Return the candidate that exceeds the hardware least, with the plan of a step.

        Of two equal ones, the one without recomputation is returned.
        """
        known = {candidate: plan for candidate, plan in self._known.items() if plan is not None and not plan.fits}
        while known:
            closest = min(known, key=lambda each: (max(map(_lacks, known[each].tiers)), bool(each.again)))
            if (plan := known.pop(closest)).time is not None:
                return closest, plan
            whole = self._whole(closest)  # it may exceed more than another one: compare again
            if whole is None and len(self._sizes) > 1 and self._undecided.micro_batches:  # as in ``_of_sizes``
                self._unplanned = self._unplanned or f"{_words(closest)}: {self._problems[closest]}"
                closest = replace(closest, samples=self._sizes[1])
                whole = self._whole(closest)
            if whole is not None and not whole.fits:
                known[closest] = whole
        return None

    def _other_places(self, closest: ConfigCandidate) -> Iterator[_Change]:
        """Yield the changes that ``choose`` would try by itself."""
        if self._undecided.rest:
            return
        yield _Change("activation_checkpointing.enabled", replace(closest, again=True))
        if self._where.is_gpu:
            of_states, of_all = (
                " and ".join(f"zero_optimization.{key}" for key in _PLACES[place]) for place in (_STATES, _ALL)
            )
            yield _Change(f'{of_states} on "cpu"', replace(closest, place=_STATES))
            last = STAGES[-1]
            yield _Change(f'stage {last} and {of_all} on "cpu"', replace(closest, stage=last, place=_ALL))

    def _more_ranks(self, closest: ConfigCandidate) -> Iterator[_Change]:
        where = self._where
        for times in (2, 4, 8, 16):
            more = replace(where, ranks=times * where.ranks, node_ranks=where.node_ranks or where.ranks)
            yield _Change(f"{more.ranks} ranks", closest, more)

    def _shorter(self, closest: ConfigCandidate) -> Iterator[_Change]:
        half = batches.shorter(self._batch)
        for parts in (2, 4, 8):
            if half is None:
                break
            yield _Change(f"sequences of 1/{parts} of the length", closest, batch=half)
            half = batches.shorter(half)

    def _smaller_states(self, closest: ConfigCandidate) -> Iterator[_Change]:
        if (self._base.get("optimizer") or {}).get("type") in ("Adam", "AdamW"):
            eight = {"data_types": {**(self._base.get("data_types") or {}), "optimizer_state_dtype": "8bit"}}
            words = "states of 8 bits (data_types.optimizer_state_dtype)"
            yield _Change(words, closest, base={**self._base, **eight})


def _words(candidate: ConfigCandidate) -> str:
    size = "the config's micro-batches" if candidate.samples is None else f"micro-batches of {candidate.samples}"
    return f"{candidate}, {size}"


def _limit(one: PlannedTier, two: PlannedTier, first: int, second: int) -> float:
    """Return the samples that fill a tier, from its needs with ``first`` and with ``second`` samples."""
    if one.has is None or two.need <= one.need:
        return float("inf")
    return first + (one.has - one.need) * (second - first) / (two.need - one.need)


def _fastest_first(rows: Sequence[ChoiceRow]) -> list[ChoiceRow]:
    return sorted(rows, key=lambda row: -row.samples_per_s)


def _settled(rows: Sequence[ChoiceRow]) -> list[ChoiceRow]:
    """Sort rows, best first, so that a machine gives the same answer each time.

    Rows that are nearly as fast as the fastest count as equally good. Of these, the lowest stage and the smallest
    micro-batch come first.
    """
    fast = max((row.samples_per_s for row in rows), default=0.0) * (1 - _ALIKE)
    simplest = lambda row: (row.plan.config.zero_optimization.stage, row.samples)  # noqa: E731
    best = sorted((row for row in rows if row.samples_per_s >= fast), key=simplest)
    return best + _fastest_first([row for row in rows if row.samples_per_s < fast])


def _lacks(tier: PlannedTier) -> float:
    return max(0.0, _part(tier) - 1)


def _part(tier: PlannedTier) -> float:
    """The part of a tier that is needed."""
    return 0.0 if tier.has is None else tier.need / max(1, tier.has)


def _short(plan: Plan) -> str:
    """Return the sentences about the tiers that are too small.

    A plan without a time covers weights and states alone.
    """
    alone = " (weights and states alone)" if plan.time is None else ""
    return "; ".join(said + alone for said, tier in zip(plan.sentences(), plan.tiers, strict=True) if not tier.fits)


def global_batch(config: Mapping[str, Any], ranks: int) -> int | None:
    """Return the samples per step, given directly or by the other two sizes; None if ``config`` gives neither."""
    micro, steps = _number(config, MICRO), _number(config, _STEPS)
    return _number(config, _WHOLE) or (None if micro is None else micro * (steps or 1) * ranks)


def _number(config: Mapping[str, Any], key: str) -> int | None:
    """Return the number at ``key``; None if it is absent or "auto"."""
    return whole_number(config.get(key))


def table_of(found: Choice) -> str:
    """Return the rows as a table for people."""
    head = ["", "config", "micro-batch", *(tier for tier in ("GPU", "memory", "host", "disk") if _uses(found, tier)),
            "step", "samples/s"]  # fmt: skip
    rows = [head]
    for place, row in enumerate(found.rows, 1):
        tiers = {tier.name: show_bytes(tier.peak) for tier in row.plan.tiers}
        assert row.plan.time is not None
        needs = [tiers.get(name, "") for name in head[3:-2]]
        rows.append([str(place), str(row.candidate), str(row.samples), *needs,
                     f"{row.plan.time.seconds:.3g} s", f"{row.samples_per_s:.4g}"])  # fmt: skip
    return table(rows)


def columns_of(found: Choice) -> str:
    """Explain the columns of ``table_of``, for people."""
    left = found.hardware.reserved_bytes
    beside = f" ({show_bytes(left)} of each GPU are left to CUDA and NCCL beside that)" if left else ""
    tiers = [name for name in ("GPU", "memory", "host", "disk") if _uses(found, name)]
    return (
        "micro-batch: samples of a rank in one forward · "
        f"{', '.join(tiers)}: what a rank needs of it at most in a step{beside}\n"
        "step: planned time of a step · samples/s: of all ranks together, by which the rows are in order"
    )


def _uses(found: Choice, name: str) -> bool:
    return any(tier.name == name for row in found.rows for tier in row.plan.tiers)
