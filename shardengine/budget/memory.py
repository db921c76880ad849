"""What an engine takes of every tier's memory, from its layout: as well before anything is placed.

Owns: the formula of model state by tier, the bound of what the device holds beside it, and what is said of a ratio
that was chosen and of the live window. Must not know: what is measured, how a choice of tiers is made.

[Note: Buffers] The pool keeps a buffer for its next use, so the bound adds up what each length of buffer needs at
most at one moment: the gradients that a window holds beyond ``at_rest``, which counts complete ones, and of each
length of bucket the three that may be under way (``ddp/reducer.py``), with what is received and two slices in fp32;
where shard groups are averaged, what one bucket of each length receives for that. With it goes the live window of
stages whose weights move. What depends on the model's code is not in it: gradients that wait for their bucket,
``no_sync()``, several backwards in one window, units that are kept because an output is a view.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from shardengine.ddp import MAX_IN_FLIGHT, Rules
from shardengine.offload import Homes, Tiers
from shardengine.sharding import BucketLayout, FlatBufferLayout, Layout, Partition, Precision, dtype_of
from shardengine.stages import Placement, Stage

_log = logging.getLogger(__name__)
_WORTH_TELLING = 16 << 20
"""Bytes of weights below which nothing is said of how many are whole."""


@dataclass(frozen=True)
class Footprint:
    """One layout and what else decides its bytes per rank; padding is included.

    state: bytes of optimizer state per element of a flat buffer's family, without master weights · micro_batches: of a
    window · prefetch: elements that may be gathered ahead · outside: bytes of weights that are in no flat buffer ·
    nodes: as ``Collectives.nodes`` · message: bytes per element of what a communication hook sends · coded: of what
    weights travel as, if not as they are · beside: bytes that whole matrices, or sums, take in the step, at
    most, and errors of a communication hook · kept_whole: bytes of optimizer state that every rank keeps of parameters
    as a whole · averages: shard groups are averaged now and then.
    """

    stage: Stage
    layout: Layout
    precision: Precision
    rules: Rules
    state: Callable[[int], float]
    micro_batches: int
    prefetch: int
    outside: int
    nodes: Callable[[torch.dtype], int] = lambda dtype: 1
    message: float | None = None
    coded: float | None = None
    beside: int = 0
    kept_whole: int = 0
    averages: bool = False

    def at_rest(self, homes: Homes) -> defaultdict[str, float]:
        """The stage's formula for model state, by tier, at the end of a window of micro-batches.

        Weights that rest sharded in another tier are counted there. What of the optimizer is away: the state of what
        this rank steps, in its tier, and its complete gradient, in the host's memory (where every rank steps everything
        the gradient is gathered, and stays on the device).
        """
        predicted = defaultdict(float, device=float(self.outside + self.kept_whole))
        weights_place = "device" if homes.weights is None or not self.stage.moves_weights else homes.weights.name
        gathers = self.stage.gathers_gradients
        for flat_buffer in self.layout.flat_buffers:
            stepped = any(self.layout.parameters[slot.parameter].is_stepped for slot in flat_buffer.slots)
            for bucket in flat_buffer.buckets:
                tier = homes.state.get(bucket.index)
                state = self.state(flat_buffer.family)
                state += self._master_bytes(flat_buffer, bucket, homes) if stepped else 0
                gradient = self._resting_bytes(flat_buffer, away=tier is not None)
                predicted["device"] += self.stage.model_state_bytes(
                    bucket.length if flat_buffer.trainable else 0,
                    self.layout.ranks,
                    replicas=self.layout.replicas,
                    weight=flat_buffer.itemsize if weights_place == "device" else 0,
                    gradient=0 if tier is not None and not gathers else gradient,
                    state=0 if tier is not None else state,
                    frozen=0 if flat_buffer.trainable else bucket.length,
                )
                predicted[weights_place] += (
                    0
                    if weights_place == "device"
                    else bucket.sizes[self.stage.weights_after_backward] * flat_buffer.itemsize
                )
                if tier is not None:
                    count = bucket.sizes[self.stage.state]
                    predicted[tier.name] += count * state
                    predicted["cpu"] += 0 if gathers else count * gradient
        return predicted

    def buffers(self, homes: Homes) -> float:
        """Bytes on the device beside ``at_rest``, at most ([Note: Buffers])."""
        found, lengths = self._window_bytes(homes), Counter[tuple[int, torch.dtype]]()
        for flat_buffer in self.layout.flat_buffers:
            for bucket in flat_buffer.buckets if flat_buffer.trainable else ():
                found += self._held_beyond_rest(flat_buffer, bucket, away=bucket.index in homes.state)
                lengths[bucket.length, wire_of(self.rules, flat_buffer)] += 1
        ranks = self.layout.ranks
        found += self._taken_by_averages(homes, {length for length, _ in lengths})
        for (length, wire), count in lengths.items():
            whole = length * wire.itemsize * (1.0 if ranks == 1 else 2.0)
            if self.message is not None and ranks > 1:  # fp32 before and after, messages sent and received
                whole = 2 * length * (4 + self.message)
            if (nodes := self.nodes(wire)) > 1:  # what is sent and received between them
                whole += 2 * self.rules.reduce.itemsize * length * nodes // ranks
            found += min(count, MAX_IN_FLIGHT) * (whole + 2 * 4 * length * self.layout.replicas // ranks)
        return found + self.beside

    def _taken_by_averages(self, homes: Homes, lengths: Collection[int]) -> float:
        """Bytes of what is received of each bucket's weights and states, a slice of the group for each of them, and of
        copies of those that rest in another tier."""
        if not self.averages:
            return 0.0
        kept = 4 + max((self.state(each.family) for each in self.layout.flat_buffers if each.trainable), default=0)
        return sum(lengths) * self.layout.replicas / self.layout.ranks * kept * (2 if homes.state else 1)

    def on_device(self, homes: Homes) -> int:
        """Bytes of the device that the engine needs, at most."""
        return round(self.at_rest(homes)["device"] + self.buffers(homes))

    def part_away(self, homes: Homes) -> float:
        """Which part of the optimizer's elements rests away from the device."""
        total = sum(bucket.length for bucket in self.layout.buckets)
        return sum(self.layout.buckets[index].length for index in homes.state) / max(total, 1)

    def _master_bytes(self, flat_buffer: FlatBufferLayout, bucket: BucketLayout, homes: Homes) -> int:
        """Bytes per element of master weights: fp32, or a copy of weights that are stepped elsewhere."""
        weights = getattr(torch, flat_buffer.dtype)
        master = self.precision.master_dtype(weights, copied=homes.needs_copy(bucket.index))
        return 0 if master is None else master.itemsize

    def _resting_bytes(self, flat_buffer: FlatBufferLayout, *, away: bool) -> int:
        """Bytes per element of a gradient that is complete, or waits on the device for more micro-batches."""
        wire, accumulate = wire_of(self.rules, flat_buffer), self.rules.accumulate
        waits_there = not away or self.rules.sharded
        keeps = self.micro_batches > 1 and self._fits(flat_buffer) and waits_there
        return accumulate.itemsize if keeps else wire.itemsize

    def _fits(self, flat_buffer: FlatBufferLayout) -> bool:
        """Whether the complete gradient may lie where it was summed."""
        return self.rules.accumulate in (torch.float32, wire_of(self.rules, flat_buffer))

    def _held_beyond_rest(self, flat_buffer: FlatBufferLayout, bucket: BucketLayout, *, away: bool) -> float:
        """Bytes of the bucket's gradients that a window holds on the device beyond those of ``at_rest``."""
        rules, wire = self.rules, wire_of(self.rules, flat_buffer)
        leaves = away and not rules.gathers
        waits = self.micro_batches > 1 and not rules.sharded
        held = rules.accumulate.itemsize * bucket.length if waits else 0
        if (rules.gathers and not (waits and rules.accumulate is wire)) or not (waits or rules.sharded or away):
            gathered = rules.gathers and (waits or rules.sharded)
            held += wire.itemsize * (bucket.sizes[rules.state] if gathered else bucket.length)
        apart = self.micro_batches > 1 and not self._fits(flat_buffer)
        sliced = self._resting_bytes(flat_buffer, away=away) if rules.sharded else wire.itemsize if apart else 0
        sliced += rules.accumulate.itemsize if rules.sharded and apart else 0
        summed = rules.gradients if rules.sharded else Placement.SHARDED
        if rules.ends_across:  # what the group has summed is given up before the complete gradient is gathered
            held = max(held, sliced * bucket.sizes[summed])
        else:
            held += 0 if leaves else sliced * bucket.sizes[summed]
        fraction = self.stage.gradients.fraction(self.layout.ranks, self.layout.replicas)
        rests = 0 if leaves else self._resting_bytes(flat_buffer, away=away) * bucket.length * fraction
        return max(0.0, held - rests)

    def live_window(self) -> LiveWindow:
        """Bytes of whole weights where they rest sharded ([Note: Live window])."""
        units: Counter[int] = Counter()
        for flat_buffer in self.layout.flat_buffers:
            units[flat_buffer.unit] += flat_buffer.length * flat_buffer.itemsize
        root, blocks = units.pop(0, 0), sum(units.values())
        largest = max(units, key=lambda unit: units[unit], default=0)
        widest = max((flat_buffer.itemsize for flat_buffer in self.layout.flat_buffers), default=0)
        ahead = max(self.prefetch * widest, units[largest]) if self.prefetch else 0
        work = units[largest] if self.stage.reshards_after_forward else blocks
        smallest = min(units.values(), default=0)
        return LiveWindow(root, blocks, len(units), largest, units[largest], smallest, work, ahead)

    def _window_bytes(self, homes: Homes) -> float:
        """Bytes of whole weights beside those at rest; at one rank these are whole themselves, unless they are away."""
        if not self.stage.moves_weights or (self.layout.ranks == 1 and homes.weights is None):
            return 0.0
        window = self.live_window()
        kept = window.blocks * self.layout.replicas / self.layout.ranks if self.stage.keeps_inside_after_forward else 0
        narrowest = 2  # bytes of a weight that travels otherwise
        messages = 0.0 if self.coded is None else window.bytes * self.coded / narrowest
        return window.bytes + kept + messages


@dataclass(frozen=True)
class LiveWindow:
    """What is whole at one moment of a pass, at most, in bytes; and the units that decide it.

    [Note: Live window] The root, the unit at work, and what is gathered ahead of it: up to the prefetch's elements, at
    least one unit. Units that are kept until their backward (``stage3_reshard_after_forward: false``) are all at work.

    root, blocks: of the root and of all units together · count: of units · number: of the largest unit, 0 where
    there is none · largest, smallest: bytes of such a unit · work: of what is at work · ahead: of what is gathered
    ahead
    """

    root: int
    blocks: int
    count: int
    number: int
    largest: int
    smallest: int
    work: int
    ahead: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.root + min(self.blocks, self.work + self.ahead)

    @property
    def whole(self) -> int:
        """All weights."""
        return self.root + self.blocks


def wire_of(rules: Rules, flat_buffer: FlatBufferLayout) -> torch.dtype:
    """The dtype in which gradients of ``flat_buffer`` are sent."""
    own: torch.dtype = getattr(torch, flat_buffer.dtype)
    return rules.wire or own


def outside_bytes(partition: Partition, which: Precision) -> int:
    """Bytes of the weights that get no place in a flat buffer, in the dtype that they have once they are placed."""
    return sum(p.numel() * dtype_of(p, which).itemsize for p in partition.outside)


def tell_choice(tiers: Tiers, footprint: Footprint, homes: Homes) -> None:
    """Log what ``"ratio": "auto"`` came to; nothing where the ratio was given."""
    if tiers.chooses:
        _log.info(
            'offload_optimizer: "ratio": "auto" is %.4f, %d of %d buckets are away; the device needs at most %d bytes '
            "of %d for model state and buffers (%s)",
            footprint.part_away(homes),
            len(homes.state),
            len(footprint.layout.buckets),
            footprint.on_device(homes),
            tiers.device_memory,
            tiers.source,
        )


def tell_window(footprint: Footprint, partition: Partition, classes: Mapping[str, str]) -> None:
    """Warn where stage 3 has more than half of the weights whole at one moment. classes: parameter name → module class.

    Not where weights are kept on purpose, nor where one rank holds all of them anyway, nor of a model so small that
    nobody misses the bytes.
    """
    stage, window = footprint.stage, footprint.live_window()
    if not stage.reshards_after_forward or footprint.layout.ranks == 1 or 2 * window.bytes <= window.whole:
        return
    if window.whole < _WORTH_TELLING:
        return
    in_root = sorted((spec for spec in partition.specs if not spec.unit), key=lambda spec: -spec.numel)[:3]
    largest = f"unit {partition.units[window.number - 1][0]!r} of {window.largest}" if window.number else "no unit"
    if 2 * (window.root + window.largest) > window.whole:
        names = ", ".join(f"{spec.name} ({classes[spec.name]})" for spec in in_root)
        cure = "list the classes of smaller modules in zero_optimization.units" + (
            f"; what several modules share, and what belongs to no smaller module, stays in the root: {names}"
            if names
            else ""
        )
    elif 2 * (window.root + 2 * window.largest) > window.whole:
        cure = "set zero_optimization.stage3_prefetch_bucket_size to 0, so that nothing is gathered ahead"
    else:
        most = (window.whole // 2 - window.root - window.largest) // max(window.ahead // footprint.prefetch, 1)
        cure = f"set zero_optimization.stage3_prefetch_bucket_size to {most} elements or less"
    _log.warning(
        "stage 3 has %d of %d bytes of weights whole at one moment (the root with %d, %s, gathered ahead up to %d), "
        "which is more than half: %s",
        window.bytes,
        window.whole,
        window.root,
        largest,
        window.ahead,
        cure,
    )
