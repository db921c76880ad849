"""The memory that an engine takes on the device, in host memory and on disk, from its layout; also before placement.

Owns: the formula of model state by tier, the bound of the device's other bytes, the messages about a chosen ratio and
about the live window. Must not know: measurements, the choice of tiers.

[Note: Buffers] The pool keeps a buffer for its next use, so the bound adds up the most buffers of each length that are
needed at one moment. These are the gradients that an accumulation window holds beyond ``at_rest``, which counts
complete ones, and for each length of bucket the three that may be in flight (``ddp/reducer.py``), with the received
data and two slices in fp32. If shard groups are averaged, the data that one bucket of each length receives for that is
added, and for stages whose weights move, the live window. Bytes that depend on the model's code are not included:
gradients that wait for their bucket, ``no_sync()``, several backwards in one window, units that are kept because an
output is a view.
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
"""Bytes of weights below which ``tell_window`` logs nothing."""


@dataclass(frozen=True)
class Footprint:
    """One layout and the other facts that decide its bytes per rank; padding is included.

    state: bytes of optimizer state per element of a flat buffer's family, without master weights · micro_batches: of a
    window · prefetch: elements that may be gathered ahead · outside: bytes of weights that are in no flat buffer ·
    nodes: as ``Collectives.nodes`` · message: bytes per element that a communication hook sends, if there is one ·
    coded: bytes per element of weights in messages, if they are coded · beside: the most bytes that whole matrices or
    sums take in the step, and the errors of a communication hook · kept_whole: bytes of optimizer state that every rank
    keeps for whole parameters · averages: shard groups are averaged now and then.
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
        """Return the stage's formula for model state, by tier, at the end of a window of micro-batches.

        Weights that rest sharded in another tier are counted there. For an offloaded bucket, the state that this rank
        steps is counted in its tier, and the complete gradient in host memory; if the stage gathers gradients, it stays
        on the device.
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
        """Return a bound of the bytes on the device beside ``at_rest`` ([Note: Buffers])."""
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
            if (nodes := self.nodes(wire)) > 1:  # messages between them, sent and received
                whole += 2 * self.rules.reduce.itemsize * length * nodes // ranks
            found += min(count, MAX_IN_FLIGHT) * (whole + 2 * 4 * length * self.layout.replicas // ranks)
        return found + self.beside

    def _taken_by_averages(self, homes: Homes, lengths: Collection[int]) -> float:
        """Return the bytes of averages: received slices of weights and states, and copies of offloaded ones."""
        if not self.averages:
            return 0.0
        kept = 4 + max((self.state(each.family) for each in self.layout.flat_buffers if each.trainable), default=0)
        return sum(lengths) * self.layout.replicas / self.layout.ranks * kept * (2 if homes.state else 1)

    def on_device(self, homes: Homes) -> int:
        """Return a bound of the bytes that the engine needs on the device."""
        return round(self.at_rest(homes)["device"] + self.buffers(homes))

    def part_away(self, homes: Homes) -> float:
        """Return the part of the optimizer's elements that is offloaded."""
        total = sum(bucket.length for bucket in self.layout.buckets)
        return sum(self.layout.buckets[index].length for index in homes.state) / max(total, 1)

    def _master_bytes(self, flat_buffer: FlatBufferLayout, bucket: BucketLayout, homes: Homes) -> int:
        """Return the bytes per element of master weights: fp32, or a copy of weights that are stepped elsewhere."""
        weights = getattr(torch, flat_buffer.dtype)
        master = self.precision.master_dtype(weights, copied=homes.needs_copy(bucket.index))
        return 0 if master is None else master.itemsize

    def _resting_bytes(self, flat_buffer: FlatBufferLayout, *, away: bool) -> int:
        """Return the bytes per element of a gradient that is complete, or waits for more micro-batches."""
        wire, accumulate = wire_of(self.rules, flat_buffer), self.rules.accumulate
        waits_there = not away or self.rules.sharded
        keeps = self.micro_batches > 1 and self._fits(flat_buffer) and waits_there
        return accumulate.itemsize if keeps else wire.itemsize

    def _fits(self, flat_buffer: FlatBufferLayout) -> bool:
        """Return whether the complete gradient may stay in the memory of the sum."""
        return self.rules.accumulate in (torch.float32, wire_of(self.rules, flat_buffer))

    def _held_beyond_rest(self, flat_buffer: FlatBufferLayout, bucket: BucketLayout, *, away: bool) -> float:
        """Return the bytes of the bucket's gradients that a window holds on the device beyond those of ``at_rest``."""
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
        if rules.ends_across:  # the group's sum is freed before the complete gradient is gathered
            held = max(held, sliced * bucket.sizes[summed])
        else:
            held += 0 if leaves else sliced * bucket.sizes[summed]
        fraction = self.stage.gradients.fraction(self.layout.ranks, self.layout.replicas)
        rests = 0 if leaves else self._resting_bytes(flat_buffer, away=away) * bucket.length * fraction
        return max(0.0, held - rests)

    def live_window(self) -> LiveWindow:
        """Return the bytes of whole weights, for weights that rest sharded ([Note: Live window])."""
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
        """Return the bytes of whole weights beside those at rest.

        With one rank, weights at rest are whole, unless offloaded.
        """
        if not self.stage.moves_weights or (self.layout.ranks == 1 and homes.weights is None):
            return 0.0
        window = self.live_window()
        kept = window.blocks * self.layout.replicas / self.layout.ranks if self.stage.keeps_inside_after_forward else 0
        narrowest = 2  # bytes of a weight in a message that is not coded
        messages = 0.0 if self.coded is None else window.bytes * self.coded / narrowest
        return window.bytes + kept + messages


@dataclass(frozen=True)
class LiveWindow:
    """The most bytes of weights that are whole at one moment of a pass, and the units that decide it.

    [Note: Live window] The root, the unit at work, and the units gathered ahead of it: up to the prefetch's elements,
    at least one unit. Units that are kept until their backward (``stage3_reshard_after_forward: false``) are all at
    work.

    root, blocks: bytes of the root and of all units together · count: of units · number: of the largest unit, 0 if
    there is none · largest, smallest: bytes of such a unit · work: bytes of the units at work · ahead: bytes that are
    gathered ahead
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
        """The bytes of the live window."""
        return self.root + min(self.blocks, self.work + self.ahead)

    @property
    def whole(self) -> int:
        """The bytes of all weights."""
        return self.root + self.blocks


def wire_of(rules: Rules, flat_buffer: FlatBufferLayout) -> torch.dtype:
    """Return the dtype that gradients of ``flat_buffer`` are sent as."""
    own: torch.dtype = getattr(torch, flat_buffer.dtype)
    return rules.wire or own


def outside_bytes(partition: Partition, which: Precision) -> int:
    """Return the bytes of the weights outside of flat buffers, in the dtype that they have once they are placed."""
    return sum(p.numel() * dtype_of(p, which).itemsize for p in partition.outside)


def tell_choice(tiers: Tiers, footprint: Footprint, homes: Homes) -> None:
    """Log the result of ``"ratio": "auto"``; nothing if the config has a number."""
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
    """Warn if stage 3 has more than half of the weights whole at one moment. classes: parameter name → module class.

    Does not warn if weights are kept on purpose, if one rank holds all of them anyway, or if the model is so small that
    the bytes do not matter.
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
