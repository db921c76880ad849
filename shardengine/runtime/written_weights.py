"""Weights that the user's code writes: a codebook kept by averages, a momentum teacher, a clamped temperature.

Owns: the detection of such writes, and that they are kept as they would be without an engine.

Must not know: hooks, the order of units, the optimizer.

[Note: Written weights] If weights rest sharded, they are gathered for a forward and released after it, and writes in
between would be lost. If masters are stepped, they would overwrite the writes. So writes are detected before weights
are released, and before masters are used:

- torch counts in-place operations (``parameter._version``), and ``parameter.data = …`` shows other memory. The host
  checks both without the device.
- ``parameter.data.mul_(…)`` changes only the values. In windows 1, 2, 4, 8, … and every 1,024 this rank's slice of the
  gathered weights is compared with the shard, and weights with their masters, but not if each shard group steps on its
  own. A parameter that was found changed counts as written from then on, on every rank (``ddp/writes.py``).
- Weights that travel coded differ from the shards, so a write into them raises an error.

This rank's slice of a written parameter goes to its shard, and from there to CPU or NVMe if it is offloaded. Masters
follow, but a master that still rounds to the weight is kept. All other parameters keep every bit.

A weight that changes inside of backward is an error, because ranks are at different places then and a block may be
recomputed. Writing the same values again is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from shardengine.ddp import StepState, Writes, digest
from shardengine.errors import OffloadError, UsageError
from shardengine.runtime.deferred_gather import DeferredGather
from shardengine.runtime.unit import Member, Summoned, Unit, UnshardState
from shardengine.sharding import Bucket, Layout, Partition, Span, holds_weights


class WrittenWeights:
    """The written weights of one engine. coded: weights travel coded."""

    def __init__(
        self,
        units: Sequence[Unit],
        layout: Layout,
        found: Partition,
        step_state: StepState,
        deferred_gather: DeferredGather | None = None,
        *,
        coded: bool = False,
    ) -> None:
        self._units = units
        self._layout = layout
        self._parameters = found.inside
        self._outside = found.named_outside()
        self._step_state = step_state
        self._deferred_gather = deferred_gather
        self._coded = coded
        self._spans = _spans_of(units, layout)
        self._due: dict[Bucket, list[Span]] = {}
        self._has_values = not any(flat.flat.is_meta for unit in units for flat in unit.flat_buffers)
        self._open, self._task = False, -1
        self._changed: list[str] = []
        self.note_seen()
        for unit in units:
            unit.ask(self)
        step_state.writes.ask(self._kept)

    def note_seen(self, *, inside: bool = True) -> None:
        """Treat all writes so far as known. inside: also those to the units' parameters."""
        if inside:
            with torch._C.DisableTorchFunctionSubclass():  # poison is asked as fast as any other tensor
                self._versions = [parameter._version for parameter in self._parameters]
        self._versions_outside = [_mark_of(parameter) for _, parameter in self._outside]

    # Keeping writes

    @torch.no_grad()
    def take(self, unit: Unit) -> None:
        """See ``Keeper``: save writes to ``unit``, which is UNSHARDED."""
        found = self._found_in(unit)
        compared = self._unlike(unit, None) if self._compares and not self._coded else []
        if self._in_backward:
            self._refuse_later(name for name, view in self._shown(found) if not self._writes.knows(name, view))
            self._refuse_later(self._name(member) for member in compared if member not in found)
            return
        if found and self._coded:
            raise _coded(self._name(found[0]), self._step_state.rank)
        self._watch(member for member in compared if member not in found)
        known = self._writes.watched  # mostly empty, and this runs at every release of weights
        watched = [member for member in unit.members if self._name(member) in known] if known else []
        for name, view in self._shown([*found, *watched]):
            self._note(name, view)
        for member in {*found, *watched, *compared}:
            self._keep(member)

    @torch.no_grad()
    def take_summoned(self, unit: Unit, held: Summoned, *, writable: bool) -> None:
        """See ``Keeper``."""
        found = [
            member
            for member, view in held.shown.items()
            if member.parameter._version != self._versions[member.index]
            or member.parameter.data_ptr() != view.data_ptr()
        ]
        for member in found:
            self._place(member, held.shown[member])
        if writable:
            return
        compared = self._unlike(unit, held.parts) if self._has_values else []
        if found or compared:
            unit.forget_gathered()
        self._watch(member for member in compared if member not in found)
        for member in found:
            self._note(self._name(member), held.shown[member])
        for member in {*found, *compared}:
            if unit.state is UnshardState.UNSHARDED:
                member.view.copy_(held.shown[member])
            self._keep(member, held.parts)

    @torch.no_grad()
    def place(self) -> None:
        """Copy written weights of whole units into their flat buffers."""
        for unit in self._whole():
            self._found_in(unit)

    def _whole(self) -> Iterator[Unit]:
        away = "weights" in self._step_state.offloaded
        return (unit for unit in self._units if unit.state is UnshardState.UNSHARDED and not away)

    @torch.no_grad()
    def adopt(self, *, masters: bool = True) -> None:
        """Keep all writes, and update masters. Call it between two passes, before a backward, and before a step.

        masters: they are used next. Raises UsageError if they may have been stepped in this backward already.
        """
        for unit in self._whole():
            self.take(unit)
        self._take_outside()
        if self._step_state.must_be_stepped:
            if self._due:
                self._due.clear()
                raise _too_late(self._step_state.rank)
            return
        for bucket, spans in self._due.items():
            bucket.adopt_weights(spans)
        self._due.clear()
        if masters and self._compares:
            self._compare_with_masters()

    def _compare_with_masters(self) -> None:
        """Update masters that do not fit their weights in flat buffers, whoever wrote them.

        Masters that cannot be read are left to the update, which raises.
        """
        for unit in () if "weights" in self._step_state.offloaded else self._units:
            for bucket in unit.buckets():
                unlike = False
                with suppress(OffloadError):
                    unlike = bucket.weight_store is None and bool(bucket.unlike_masters())
                if unlike:
                    spans = {m: self._spans[m.index][bucket] for m in unit.members if bucket in self._spans[m.index]}
                    self._watch(member for member, span in spans.items() if bucket.unlike_masters([span]))
                    bucket.adopt_weights()

    def _keep(self, member: Member, whole: Mapping[Bucket, Tensor] | None = None) -> None:
        """Keep the writes to ``member`` in ``whole``; None: in its flat buffer."""
        for bucket, span in self._spans[member.index].items():
            bucket.keep([span], bucket.full if whole is None else whole[bucket])
            if bucket.has_master:
                self._due.setdefault(bucket, []).append(span)

    def _kept(self, name: str) -> list[tuple[int, int, int]]:
        """Return this rank's part of the parameter ``name``, in the form for ``ddp/writes.py``."""
        for outside, parameter in self._outside:
            if outside == name:
                return [(0, parameter.numel(), int(digest(parameter)))]
        spans = self._spans[next(n for n, spec in enumerate(self._layout.parameters) if spec.name == name)]
        begin = min(first for first, _ in spans.values())
        return [
            (first - begin, first - begin + len(values), int(digest(values, first - begin)))
            for bucket, span in spans.items()
            for first, values in bucket.kept([span])
        ]

    # Finding writes

    def _found_in(self, unit: Unit) -> list[Member]:
        """Return the members that torch counts as written; they show their place in the flat buffer afterwards."""
        hidden = () if self._deferred_gather is None else self._deferred_gather.hidden
        found = [member for member in unit.written(self._versions) if member.index not in hidden]
        for member in found:
            self._place(member, member.view)
        return found

    def _place(self, member: Member, view: Tensor) -> None:
        """Copy the tensor that ``member`` shows to ``view``, its place, and treat the write as known."""
        parameter = member.parameter
        if parameter.data_ptr() != view.data_ptr():
            shown = parameter.data
            fits = shown.shape == view.shape and shown.dtype is view.dtype and shown.device == view.device
            taken, own = holds_weights(shown.untyped_storage()), self._owns(shown)
            if taken and not own:  # memory of another engine
                raise self._moved(member, shown)
            if fits and not taken:
                view.copy_(shown)
            member.show(view)
            if not fits:
                raise self._moved(member, shown)
            if taken:
                raise _aliased(self._name(member), self._step_state.rank)
        self._versions[member.index] = parameter._version

    def refuse_moved(self) -> None:
        """Raise ``UsageError`` for the first parameter with sharded weights that does not show them."""
        for unit in self._units:
            for member in unit.misplaced() if unit.state is not UnshardState.UNSHARDED else ():
                raise self._moved(member, member.parameter)

    def _owns(self, shown: Tensor) -> bool:
        key = shown.untyped_storage()._cdata
        return any(unit.owns_storage({key}) or unit.summons_storage(key) for unit in self._units)

    def _moved(self, member: Member, shown: Tensor) -> UsageError:
        return _moved(self._name(member), self._step_state.rank, shown)

    def _unlike(self, unit: Unit, whole: Mapping[Bucket, Tensor] | None) -> list[Member]:
        """Return the members of ``unit`` whose part on this rank differs from ``whole``; None: from the flat buffer."""
        found: list[Member] = []
        for bucket in unit.buckets():
            if whole is not None and bucket not in whole:
                continue
            values = bucket.full if whole is None else whole[bucket]
            if bucket.unlike_shard(values):
                spans = {m: self._spans[m.index][bucket] for m in unit.members if bucket in self._spans[m.index]}
                found += [m for m, span in spans.items() if m not in found and bucket.unlike_shard(values, [span])]
        return found if whole is not None else [member for member in found if not unit.is_summoned(member.index)]

    def _take_outside(self) -> None:
        for number, (name, parameter) in enumerate(self._outside):
            if self._versions_outside[number] != (mark := _mark_of(parameter)):
                self._versions_outside[number] = mark
                self._note(name, parameter)

    def _watch(self, members: Iterable[Member]) -> None:
        if names := [self._name(member) for member in members]:
            self._writes.note_found(names)

    def _note(self, name: str, values: Tensor) -> None:
        if self._has_values and values.numel() and not self._step_state.replicas.name:
            self._writes.note(name, values)

    @property
    def _compares(self) -> bool:
        return self._writes.compares and self._has_values and not self._step_state.replicas.name

    @property
    def _writes(self) -> Writes:
        return self._step_state.writes

    def _name(self, member: Member) -> str:
        return self._layout.parameters[member.index].name

    def _shown(self, members: Iterable[Member]) -> Iterator[tuple[str, Tensor]]:
        return ((self._name(member), member.view) for member in dict.fromkeys(members))

    # Backward

    @property
    def _in_backward(self) -> bool:
        return self._open or 0 <= torch._C._current_graph_task_id() == self._task

    def before_backward(self, *, masters: bool) -> None:
        """Keep all writes before a backward: it begins, or a gradient has reached a tensor that a forward returned.

        masters: they may be stepped in it.
        """
        task = torch._C._current_graph_task_id()
        if not self._open and (task < 0 or task != self._task):
            self.adopt(masters=masters)
        self._task = task

    def begin_backward(self, *, masters: bool) -> None:
        """Begin a backward that ``end_backward`` ends. masters: as in ``before_backward``."""
        self.before_backward(masters=masters)
        self._open = True

    def end_backward(self, *, failed: bool = False) -> None:
        """End the backward. Raise UsageError if a weight has changed in it, unless it has ``failed`` anyway."""
        if self._open and not failed:
            for unit in self._whole():
                self._end_of(unit)
            marks = [_mark_of(parameter) for _, parameter in self._outside]
            written = zip(self._outside, self._versions_outside, marks, strict=True)
            self._refuse_later(n for (n, p), old, new in written if old != new and not self._writes.knows(n, p))
            self._versions_outside = marks
        changed, self._open, self._changed = self._changed, False, []
        if changed and not failed:
            raise _in_backward(changed[0], self._step_state.rank)

    @torch.no_grad()
    def _end_of(self, unit: Unit) -> None:
        found = self._found_in(unit)
        self._refuse_later(name for name, view in self._shown(found) if not self._writes.knows(name, view))

    def _refuse_later(self, names: Iterable[str]) -> None:
        """Record names for an error at the end of backward: other ranks wait for collectives of this backward."""
        self._changed += names


def _mark_of(parameter: Tensor) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def _spans_of(units: Sequence[Unit], layout: Layout) -> list[dict[Bucket, Span]]:
    """Return the place of each parameter in each bucket that holds a part of it."""
    found: list[dict[Bucket, Span]] = [{} for _ in layout.parameters]
    for bucket in (bucket for unit in units for bucket in unit.buckets()):
        for piece in layout.pieces(bucket.layout):
            found[piece.parameter][bucket] = piece.start, piece.end
    return found


def _moved(name: str, rank: int, shown: Tensor) -> UsageError:
    return UsageError(
        f"parameter {name!r} was moved or cast after initialize (rank {rank}): it is now {shown.dtype} on "
        f"{shown.device}, in memory that the engine does not own; call .to(), .half() and the like before initialize, "
        "and do not unfreeze what several engines share",
        code="weights-moved-after-initialize",
    )


def _aliased(name: str, rank: int) -> UsageError:
    return UsageError(
        f"parameter {name!r} shows the memory of other weights since an assignment to its .data "
        f"(rank {rank}), so that both would be one from now on: expected a copy, "
        "`parameter.data = other.data.clone()`, or one parameter in both modules before initialize",
        code="weights-alias-after-assignment",
    )


def _coded(name: str, rank: int) -> UsageError:
    return UsageError(
        f"parameter {name!r} was written in a forward with zero_quantized_weights (rank {rank}), where it is shown in "
        "8 bits, which would be kept as its weights: expected no such writes, the parameter in ignored_parameters, or "
        "that key false",
        code="weights-written-while-quantised",
    )


def _too_late(rank: int) -> UsageError:
    return UsageError(
        f"a parameter was written after the last step (rank {rank}), which was noticed when backward had stepped "
        "master weights (offload_optimizer.step_in_backward): expected writes before engine(...) or "
        "engine.backward(...). engine.reset() on every rank finishes the step; the write is lost",
        code="weights-written-too-late",
    )


def _in_backward(name: str, rank: int) -> UsageError:
    return UsageError(
        f"parameter {name!r} was written inside of backward (rank {rank}), where ranks are at different places and "
        "gradients are not complete: expected weights to change in engine.step(), in a forward or between two passes. "
        "An optimizer in a hook of a gradient is such a write; so is a forward that writes weights and is computed "
        "again in backward (activation checkpointing), which would write twice: leave that block out of it, or keep "
        "what is written in a buffer. Call engine.zero_grad() on every rank before another backward",
        code="weights-written-in-backward",
    )
