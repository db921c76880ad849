"""The record that *is* a stage: four placements and their consequences.

Owns the ``Stage`` record and its formulas (memory, bytes on the wire). Knows no torch, no bucket, no stage by number:
everything here is derived from the letters, so that a new row of the table is a new record and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from shardengine.errors import InternalError
from shardengine.stages.placement import Axis, Operation, Placement, axes, operation, wire_fraction

_SIZES = (Placement.SHARDED, Placement.SHARDED_INSIDE, Placement.REPLICATED)
"""The possible placements of resting weights and states, the smallest part first."""


@dataclass(frozen=True)
class Volume:
    """Elements that are sent in one step. Padding is counted: it is part of every bucket.

    trainable: elements with a gradient · twice: elements of units that are needed in forward and, after others, in
    backward again · once: elements of the root, of the unit that ends forward and begins backward, and of those whose
    backward does not read them (embeddings). Both include frozen ones · message: bytes per element that a communication
    hook sends in a reduction, coded: bytes per element of weights that are gathered from rest; None: they are sent in
    their own dtype · brought: a reduction ends with a gather of such messages, so that all ranks have the whole sum of
    a micro-batch · exchanges: each group steps with the mean of its own gradient and another group's · averaged: bytes
    per trainable element that groups average after the step.
    """

    trainable: int
    twice: int = 0
    once: int = 0
    message: float | Fraction | None = None
    coded: float | None = None
    brought: bool = False
    apart: bool = False
    """Whether each shard group steps with its own gradient."""
    exchanges: bool = False
    averaged: float = 0


@dataclass(frozen=True)
class Stage:
    """One row of the stage table: the placements of weights, gradients and optimizer state at rest.

    ``state`` stands for master weights and optimizer state together. ``gradients`` is the placement of a gradient
    between two micro-batches; it is also the order of summation (PARTIAL: micro-batches, then ranks; SHARDED: the
    reverse; PARTIAL_ACROSS: the ranks of a shard group, micro-batches, groups).

    Allowed letters: weights and state are S, SR or R, gradients P, SP or S. Weights that are sharded after backward are
    stepped as the slices that rest, and after backward no more of them rests than after forward. Others raise
    InternalError.
    """

    name: str
    weights_after_forward: Placement
    weights_after_backward: Placement
    gradients: Placement
    state: Placement

    def __post_init__(self) -> None:
        kept = (self.state, self.weights_after_backward, self.weights_after_forward)
        problem = (
            "weights or state are P or SP, expected S, SR or R"
            if not set(kept) <= set(_SIZES)
            else f"gradients are {self.gradients.value}, expected P, SP or S"
            if self.gradients in (Placement.REPLICATED, Placement.SHARDED_INSIDE)
            else f"weights are {kept[2].value} after forward and {kept[1].value} after backward, expected no less"
            if _SIZES.index(kept[1]) > _SIZES.index(kept[2])
            else f"state is {kept[0].value} and weights are {kept[1].value} after backward, expected R or the same"
            if kept[1] not in (kept[0], Placement.REPLICATED)
            else ""
        )
        if problem:
            raise InternalError(f"stage {self.name!r}: {problem}")

    @cached_property
    def is_hybrid(self) -> bool:
        """Whether the two axes of the mesh have different letters, so that there have to be shard groups."""
        found = (self.weights_after_forward, self.weights_after_backward, self.gradients, self.state)
        return any(each.inside != each.across for each in found)

    @cached_property
    def moves_weights(self) -> bool:
        """Whether weights rest sharded, so that units are gathered for compute."""
        return self.weights_after_backward.sharded_over is not None

    @cached_property
    def reshards_after_forward(self) -> bool:
        """Whether a unit frees its whole weights between its forward and its backward."""
        return self.weights_after_forward.sharded_over is not None

    @cached_property
    def keeps_inside_after_forward(self) -> bool:
        """Whether a rank keeps its group's slice of a unit from forward to backward, which is more than rests with it.

        So the gather for backward stays inside of the group.
        """
        return self.reshards_after_forward and self.weights_after_forward is not self.weights_after_backward

    @cached_property
    def reduces_every_micro_batch(self) -> bool:
        """Whether each micro-batch's gradients are reduced at once (S, or SP) or kept full-size (P)."""
        return self.gradients.sharded_over is not None

    @cached_property
    def gathers_gradients(self) -> bool:
        """Whether the complete gradient is gathered, because a rank steps more than its slice of all ranks."""
        return operation(Placement.SHARDED, self.state) is Operation.ALL_GATHER

    @cached_property
    def steps_everything(self) -> bool:
        """Whether every rank steps all weights, with whole gradients."""
        return self.state is Placement.REPLICATED

    @cached_property
    def publishes_after_step(self) -> bool:
        """Whether stepped shards are gathered into resting full weights after the step."""
        return operation(self.state, self.weights_after_backward) is Operation.ALL_GATHER

    def model_state_bytes(
        self,
        trainable: float,
        ranks: int,
        *,
        weight: float = 4,
        gradient: float = 4,
        state: float = 8,
        frozen: float = 0,
        replicas: int = 1,
    ) -> float:
        """Return the bytes of model state per rank at rest.

        trainable, frozen: elements · weight, gradient, state: bytes per element · replicas: shard groups. In fp32
        training the master weight *is* the weight (4 + 4 + 8 for Adam); in mixed precision 2 + 2 + 12. Source: ZeRO,
        arXiv 1910.02054, section 5.
        """
        weights = (trainable + frozen) * weight * self.weights_after_backward.fraction(ranks, replicas)
        gradients = trainable * gradient * self.gradients.fraction(ranks, replicas)
        return weights + gradients + trainable * state * self.state.fraction(ranks, replicas)

    def bytes_sent(
        self,
        volume: Volume,
        ranks: int,
        *,
        micro_batches: int = 1,
        weight: float = 4,
        gradient: float = 4,
        nodes: int = 1,
        partial: float = 4,
    ) -> float:
        """Return the bytes that one rank sends per optimizer step: the lower bound for this stage's placements.

        It is the sum of ``bytes_by_axis``, which describes the arguments.
        """
        sizes = {"weight": weight, "gradient": gradient, "partial": partial}
        by_axis = self.bytes_by_axis(volume, ranks, micro_batches=micro_batches, nodes=nodes, **sizes)
        return sum(by_axis.values())

    def bytes_by_axis(
        self,
        volume: Volume,
        ranks: int,
        *,
        micro_batches: int = 1,
        weight: float = 4,
        gradient: float = 4,
        nodes: int = 1,
        partial: float = 4,
    ) -> dict[Axis, float]:
        """Return the bytes that one rank sends per optimizer step inside of its shard group and across the groups.

        nodes: the number of shard groups; for a stage that is not hybrid, the number of nodes, if gradients are added
        inside of nodes first, and "across" then means between nodes · partial: bytes per element of a sum that is sent
        across. Control traffic (norm, used-flags), buffers and ``no_sync`` are not included. Source: ZeRO, section 7.
        """
        message, coded = volume.message, volume.coded
        replicas = nodes if self.is_hybrid else 1
        sent = {Axis.INSIDE: 0.0, Axis.ACROSS: 0.0}

        def move(source: Placement, target: Placement, elements: float, itemsize: float | Fraction) -> None:
            op = operation(source, target)
            reduces = op is Operation.REDUCE_SCATTER
            groups = nodes if reduces else replicas
            group = ranks // groups
            for axis in axes(source, target):
                if axis is Axis.INSIDE:
                    size = message if reduces and message is not None else itemsize
                    sent[axis] += size * elements * wire_fraction(op, group)
                else:
                    size = itemsize if not reduces else partial if message is None else message
                    sent[axis] += size * elements / group * wire_fraction(op, groups)

        reductions = micro_batches if self.reduces_every_micro_batch else 1
        whole = Placement.PARTIAL_ACROSS if volume.apart else Placement.SHARDED
        each = self.gradients if self.reduces_every_micro_batch else whole
        if volume.brought and message is not None:
            move(Placement.PARTIAL, Placement.SHARDED, volume.trainable * reductions, message)
            move(Placement.SHARDED, Placement.REPLICATED, volume.trainable * reductions, message)
            if self.reduces_every_micro_batch:
                move(Placement.SHARDED, self.state, volume.trainable, gradient)
        else:
            move(Placement.PARTIAL, each, volume.trainable * reductions, gradient)
            if not volume.apart:
                move(each, Placement.SHARDED, volume.trainable, gradient)
                move(Placement.SHARDED, self.state, volume.trainable, gradient)
        sent[Axis.ACROSS] += partial * volume.trainable * replicas / ranks * volume.exchanges
        for op in (Operation.REDUCE_SCATTER, Operation.ALL_GATHER):
            sent[Axis.ACROSS] += volume.averaged * volume.trainable * replicas / ranks * wire_fraction(op, replicas)
        if self.publishes_after_step:
            move(self.state, self.weights_after_backward, volume.trainable, weight)
        for resting, elements in (
            (self.weights_after_backward, volume.twice + volume.once),
            (self.weights_after_forward, volume.twice),
        ):
            rests = resting is self.weights_after_backward
            size = coded if coded is not None and rests else weight
            move(resting, Placement.REPLICATED, elements * micro_batches, size)
        return sent
