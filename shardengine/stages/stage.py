"""The record that *is* a stage: four placements, and what follows from them.

Owns the ``Stage`` record and its formulas (memory, bytes on the wire). Knows no torch, no bucket, no stage by number:
everything here is derived from the letters, so that a new row of the table is a new record and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardengine.errors import InternalError
from shardengine.stages.placement import Operation, Placement, operation, wire_fraction


@dataclass(frozen=True)
class Volume:
    """Elements that travel in one step. Padding is counted: it is part of every bucket.

    trainable: elements with a gradient · twice: elements of units that are needed in forward and, after others, in
    backward again · once: of the root, of the unit with which forward ends and backward begins, and of those whose
    backward does not read them (embeddings). Both with frozen ones.
    """

    trainable: int
    twice: int = 0
    once: int = 0


@dataclass(frozen=True)
class Stage:
    """One row of the stage table: where weights, gradients and optimizer state rest.

    ``state`` stands for master weights and optimizer state together. ``gradients`` is where a gradient rests between
    two micro-batches; it is also the order of summation (PARTIAL: micro-batches, then ranks; SHARDED: the reverse).

    Letters that go together: weights and state are R or S, gradients P or S. Weights that are S after backward need S
    in state, since what steps full weights would write to memory that sharded ones have given back; weights that are S
    after forward are S after backward. Others raise InternalError.
    """

    name: str
    weights_after_forward: Placement
    weights_after_backward: Placement
    gradients: Placement
    state: Placement

    def __post_init__(self) -> None:
        replicated, sharded, partial = Placement.REPLICATED, Placement.SHARDED, Placement.PARTIAL
        weights = (self.weights_after_forward, self.weights_after_backward)
        problem = (
            "weights or state are P, expected R or S"
            if partial in (*weights, self.state)
            else "gradients are R, expected P or S"
            if self.gradients is replicated
            else "weights are S after forward and R after backward, expected S or R R"
            if weights == (sharded, replicated)
            else "weights are S after backward and state is R, expected S"
            if (weights[1], self.state) == (sharded, replicated)
            else ""
        )
        if problem:
            raise InternalError(f"stage {self.name!r}: {problem}")

    @property
    def moves_weights(self) -> bool:
        """Whether weights rest sharded, so that units are gathered for compute."""
        return self.weights_after_backward is Placement.SHARDED

    @property
    def reshards_after_forward(self) -> bool:
        """Whether a unit gives its weights back between its forward and its backward."""
        return self.weights_after_forward is Placement.SHARDED

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Whether each micro-batch's gradients are reduced at once (the letter S) or kept full-size (P)."""
        return self.gradients is Placement.SHARDED

    @property
    def gathers_gradients(self) -> bool:
        """Whether the complete gradient is gathered, because every rank steps all of the weights."""
        return self.state is Placement.REPLICATED

    @property
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
    ) -> float:
        """Bytes of model state per rank at rest.

        trainable, frozen: elements · weight, gradient, state: bytes per element. In fp32 training the master weight
        *is* the weight (4 + 4 + 8 for Adam); in mixed precision 2 + 2 + 12. Source: ZeRO, arXiv 1910.02054, section 5.
        """
        weights = (trainable + frozen) * weight * self.weights_after_backward.fraction(ranks)
        gradients = trainable * gradient * self.gradients.fraction(ranks)
        return weights + gradients + trainable * state * self.state.fraction(ranks)

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
        """Bytes that one rank sends per optimizer step; the lower bound for this stage's placements.

        nodes: where gradients are added inside of so many nodes first, then partial: bytes per element of such a sum.
        Control traffic (norm, used-flags), buffers and ``no_sync`` are not in it. Source: ZeRO, section 7.
        """
        reductions = micro_batches if self.reduces_every_micro_batch else 1
        reduced = volume.trainable * reductions
        sent = gradient * reduced * wire_fraction(Operation.REDUCE_SCATTER, ranks // nodes)
        sent += (partial * nodes / ranks) * reduced * wire_fraction(Operation.REDUCE_SCATTER, nodes)
        gather = wire_fraction(Operation.ALL_GATHER, ranks)
        if self.gathers_gradients:
            sent += gradient * volume.trainable * gather
        if self.publishes_after_step:
            sent += weight * volume.trainable * gather
        if self.moves_weights:
            passes = 2 if self.reshards_after_forward else 1
            sent += weight * (passes * volume.twice + volume.once) * micro_batches * gather
        return sent
