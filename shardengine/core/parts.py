"""The parts of one engine, connected, and their joint operations. The formulas are in ``core/formulas.py``.

Owns: adopting written weights, publishing stepped weights, waiting for them. Must not know: how the parts are made
(``core/assembly.py``) and taken down (``core/closing.py``), steps, the user's loop.
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
    """Everything below the engine's public methods, connected.

    is_recut: the layout does not change any more with the order of gradients.
    """

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
        """The ranks and the current process groups; ``reset()`` replaces it."""
        return self.collectives.mesh

    @property
    def window(self) -> Window:
        """The micro-batches of the current step."""
        return self.step_state.window

    def verify_parameters(self) -> None:
        """Raise ``UsageError`` for the first parameter that user code moved, cast or replaced."""
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
        """The parameters that were frozen when the layout was made and are trainable now, by name."""
        pairs = zip(self.partition.specs, self.partition.inside, strict=True)
        found = {spec.name: p for spec, p in pairs if not spec.trainable and p.requires_grad}
        found |= {name: p for name, p in self.partition.around.items() if p.requires_grad}
        if any(p.requires_grad and p.numel() for p in self.partition.outside):
            found |= {name: p for name, p in self.partition.named_outside() if p.requires_grad and p.numel()}
        return found

    def note_stepped(self) -> None:
        """Record that the weights are new.

        A graph from before the step rejects backward from now on, as after a step of any torch optimizer.
        """
        torch.autograd.graph.increment_version(self.partition.inside)
        self.written.note_seen()

    def adopt_written_weights(self, *, masters: bool = True) -> None:
        """Take over the values that user code has written into weights.

        masters: master weights are used next. They follow if low-precision weights were written
        (``module.load_state_dict``).
        """
        self.written.adopt(masters=masters)

    def weight_bytes(self) -> Counter[str]:
        """Bytes that hold weights at this moment, by tier; frozen ones outside of flat buffers are included."""
        return weight_bytes(self.units) + Counter(device=sum(p.nbytes for p in self.partition.outside))

    def kept(self) -> Iterator[tuple[str, str, Tensor]]:
        """The tensors in memory that hold model state, as ("weights" or "states", tier, tensor).

        State in files is not included.
        """
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
        """Mark the storages of weights and buffers outside of flat buffers; flat buffers mark their own."""
        for tensor in (*self.partition.outside, *self.buffers.named(persistent_only=False).values()):
            mark_weights(tensor)

    def sent(self) -> Counter[Purpose]:
        """Bytes sent so far, by purpose."""
        return Counter(self.collectives.sent)

    def publish(self, stepped: Iterable[Bucket]) -> None:
        """Gather each bucket as soon as it is stepped, if weights are kept replicated and masters are not.

        Returns when all are complete. With ``overlap_param_gather`` it returns at once (``deferred_gather``).
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
        """Wait until no gather is in flight that could conflict with a step or a read of whole buckets."""
        if self.deferred_gather is not None:
            self.deferred_gather.await_all()

    @contextmanager
    def adopting_masters(self) -> Iterator[None]:
        """After a checkpoint has written the tensors that optimizers step: update the weights from them; collective.

        The gathers are in flight while the body runs, which must not use the weights.
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
        """Move stepped weights from the placement of the optimizer state to that of weights."""
        stage = self.stage
        return self.collectives.move(
            bucket.full, stage.state, stage.weights_after_backward, bucket.layout, Purpose.WEIGHTS
        )
