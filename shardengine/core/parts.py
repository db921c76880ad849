"""The parts of one engine, wired, and what they do together. The formulas are ``core/formulas.py``'s.

Owns: weights that were written, published, awaited. Must not know: how the parts are made (``core/assembly.py``) and
taken down (``core/closing.py``), steps, the user's loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardengine import stages
from shardengine.budget import BucketSizes
from shardengine.comm import Collectives, Mesh, Purpose, Work
from shardengine.ddp import BufferSync, Reducer, StepState, Window
from shardengine.errors import UsageError
from shardengine.offload import BufferPool, Tiers
from shardengine.runtime import Attachments, DeferredGather, Schedule, Unit, WrittenWeights, weight_bytes
from shardengine.sharding import Bucket, Layout, Partition, Precision, mark_weights, restore_poison


@dataclass(frozen=True)
class Core:
    """Everything below the engine's surface, wired. is_recut: no other layout follows from the order of gradients."""

    stage: stages.Stage
    collectives: Collectives
    pool: BufferPool
    partition: Partition
    layout: Layout
    units: list[Unit]
    reducer: Reducer
    schedule: Schedule
    step_state: StepState
    written: WrittenWeights
    buffers: BufferSync
    deferred_gather: DeferredGather | None
    attachments: Attachments
    precision: Precision
    tiers: Tiers
    sizes: BucketSizes = field(default_factory=BucketSizes)
    is_recut: bool = False

    @property
    def mesh(self) -> Mesh:
        """The ranks and today's groups; ``reset()`` replaces them."""
        return self.collectives.mesh

    @property
    def window(self) -> Window:
        """The micro-batches of today's step."""
        return self.step_state.window

    def verify_parameters(self) -> None:
        """``UsageError`` for the first parameter that was moved, cast or replaced behind the engine's back."""
        for name, holder, key, value in self.partition.places:
            if holder.get(key) is not value:
                kind = "module" if isinstance(value, nn.Module) else "parameter"
                raise UsageError(
                    f"{kind} {name!r} was replaced after initialize (rank {self.mesh.rank}): expected the one that "
                    "initialize saw; change the model first, then call initialize",
                    code="model-changed-after-initialize",
                )
        if sum(len(m._parameters) + len(m._modules) for m in self.partition.modules) != len(self.partition.places):
            raise UsageError(
                f"a parameter or module was added or removed after initialize (rank {self.mesh.rank}): expected the "
                "ones that initialize saw; change the model first, then call initialize",
                code="model-changed-after-initialize",
            )
        hides = self.stage.moves_weights or self.deferred_gather is not None
        dtypes = {flat_buffer.dtype for unit in self.units for flat_buffer in unit.flat_buffers} if hides else ()
        for dtype in dtypes:
            if restore_poison(dtype, self.mesh.platform):
                raise UsageError(
                    f"a parameter was written while its weights were elsewhere (rank {self.mesh.rank}); the write is "
                    "lost. Write inside `with engine.full_params(writable=True):`",
                    code="weights-written-while-sharded",
                )
        self.adopt_written_weights(masters=False)
        self.written.refuse_moved()

    def unfrozen(self) -> dict[str, nn.Parameter]:
        """The parameters that were frozen when the layout was made and are not now, by name."""
        pairs = zip(self.partition.specs, self.partition.inside, strict=True)
        found = {spec.name: p for spec, p in pairs if not spec.trainable and p.requires_grad}
        found |= {name: p for name, p in self.partition.around.items() if p.requires_grad}
        if any(p.requires_grad and p.numel() for p in self.partition.outside):
            found |= {name: p for name, p in self.partition.named_outside() if p.requires_grad and p.numel()}
        return found

    def note_stepped(self) -> None:
        """The weights are new: a graph from before the step refuses backward, as after any torch optimizer's step."""
        torch.autograd.graph.increment_version(self.partition.inside)
        self.written.note_seen()

    def adopt_written_weights(self, *, masters: bool = True) -> None:
        """What the user's code has written into weights counts; master weights, which are used next (masters), follow
        where it was low-precision ones (``module.load_state_dict``)."""
        self.written.adopt(masters=masters)

    def weight_bytes(self) -> Counter[str]:
        """Bytes that hold weights at this moment, by tier; frozen ones outside of flat buffers are included."""
        return weight_bytes(self.units) + Counter(device=sum(p.nbytes for p in self.partition.outside))

    def kept(self) -> Iterator[tuple[str, str, Tensor]]:
        """The tensors in memory that hold model state: ("weights" or "states", tier, tensor); not what is in files."""
        for unit in self.units:
            for flat_buffer in unit.flat_buffers:
                yield "weights", "device", flat_buffer.flat
                for bucket in flat_buffer.buckets:
                    for what, store in (("weights", bucket.weight_store), ("states", bucket.state_store)):
                        if store is not None and not store.in_file:
                            yield from ((what, store.tier_now, tensor) for tensor in store.tensors().values())
        for tensor in (*self.partition.outside, *self.buffers.named(persistent_only=False).values()):
            yield "weights", "device", tensor.detach()

    def mark_weights(self) -> None:
        """Write down where weights and buffers lie that are in no flat buffer; flat buffers do so themselves."""
        for tensor in (*self.partition.outside, *self.buffers.named(persistent_only=False).values()):
            mark_weights(tensor)

    def sent(self) -> Counter[Purpose]:
        """Bytes sent so far, by purpose."""
        return Counter(self.collectives.sent)

    def publish(self, stepped: Iterable[Bucket]) -> None:
        """Each bucket, as soon as it is stepped, is gathered where weights rest replicated and masters do not.

        Returns when all are complete, or with ``overlap_param_gather`` at once (``deferred_gather``).
        """
        in_flight: list[Work] = []
        for bucket in stepped:
            in_flight.append(self._publish(bucket))
            if self.deferred_gather is not None:
                self.deferred_gather.add_in_flight(bucket, in_flight.pop())
        for work in in_flight:
            work.wait()
        if self.deferred_gather is not None:
            self.deferred_gather.hide()

    def await_weights(self) -> None:
        """Nothing is in flight afterwards that a step or a read of whole buckets could meet."""
        if self.deferred_gather is not None:
            self.deferred_gather.await_all()

    @contextmanager
    def adopting_masters(self) -> Iterator[None]:
        """What optimizers step was written (a checkpoint was loaded): the weights follow everywhere; collective.

        They are on their way while the body runs, which must not touch them.
        """
        in_flight: list[Work] = []
        with torch.no_grad():
            for bucket_grad in self.reducer.buckets:
                bucket_grad.bucket.adopt_master()
                in_flight.append(self._publish(bucket_grad.bucket))
        try:
            yield
        finally:
            for work in in_flight:
                work.wait()
        self.note_stepped()

    def _publish(self, bucket: Bucket) -> Work:
        """From where weights are stepped to where they rest."""
        stage = self.stage
        return self.collectives.move(
            bucket.full, stage.state, stage.weights_after_backward, bucket.layout, Purpose.WEIGHTS
        )
