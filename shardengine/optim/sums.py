"""Sums over whole parameters, computed from the slices of all ranks, for the optimizers whose step needs them.

Owns: who adds up what, how many sums a parameter has, and the messages. Must not know: the use of the sums.

[Note: Owners of sums] Each rank adds up its slices of a parameter, exactly (``kernels.factored``), and sends the result
to the parameter's owner, 16 bytes for a sum. The owner adds the received parts and sends the sums to all, 8 bytes each.
Both are one message for all parameters, each time that sums are computed. If every rank steps everything, nothing is
sent: all ranks compute the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from shardengine.comm import Chunks, Collectives, Named, Purpose
from shardengine.kernels import Factored, Span, join_sums
from shardengine.optim.arithmetic import Stepped
from shardengine.optim.matrices import Cut, MatrixPlan
from shardengine.sharding import Layout, ParameterSpec
from shardengine.stages import Placement

_SUM, _PARTIAL = 8, 16
"""Bytes of a sum, and of a rank's part of one."""
_MADE, _OF_CUT, _OF_SCATTERED = 64, 12, 48
"""Peak bytes: per sum while new states are computed from it; per element of a cut; per element of a parameter whose
rows are scattered (fp64 copies)."""
Read = Callable[[int, bool], AbstractContextManager[tuple[Mapping[str, Tensor], Tensor | None]]]
"""Lends this rank's tensors of a bucket, by its number, gradient included, and the gradient's factor. The flag:
weights included."""


def plan_of(layout: Layout, groups: int, state: Placement) -> MatrixPlan:
    """Return who steps and who owns each parameter. groups: number of the optimizer's groups."""
    return MatrixPlan(layout, [True] * groups, state, work=sums_of)


def sums_of(spec: ParameterSpec) -> int:
    """Return the number of sums of a parameter: those of its rows, of its columns, and one more."""
    form = Factored(spec.shape, spec.order)
    return form.all_rows + form.all_columns + 1


def bytes_sent(plan: MatrixPlan, rank: int) -> int:
    """Return the bytes that ``rank`` sends in a step if every parameter has a gradient: for its sums, and one more."""
    if plan.replicated:
        return 0

    def length_of(number: int) -> int:
        return sums_of(plan.specs[number]) + 1

    to_owners = [n for n in plan.specs if plan.owners[n] != rank and plan.cuts(n, rank)]
    owned = [n for n in plan.specs if plan.owners[n] == rank]
    return _PARTIAL * sum(map(length_of, to_owners)) + _SUM * (plan.ranks - 1) * sum(map(length_of, owned))


def bytes_on_way(plan: MatrixPlan, rank: int) -> int:
    """Return the peak bytes of both messages on ``rank``."""

    def length_of(number: int) -> int:
        return sums_of(plan.specs[number])

    here = sum(length_of(n) for n in plan.specs if plan.cuts(n, rank))
    owned = sum(
        length_of(n) for n in plan.specs for r in range(plan.ranks) if plan.owners[n] == rank and plan.cuts(n, r)
    )
    return _PARTIAL * (2 * here + owned) + _SUM * sum(map(length_of, plan.specs))


def bytes_of_largest(plan: MatrixPlan, rank: int) -> int:
    """Return the peak bytes that ``rank`` needs for a single parameter.

    These are the new states computed from its sums, and copies of its gradient: of a cut, times the factor and as a
    direction, and of the whole gradient if the parameter's rows are scattered.
    """
    sums = max((_MADE * sums_of(spec) for spec in plan.specs.values()), default=0)
    cuts = max((cut.length for number in plan.specs for cut in plan.cuts(number, rank)), default=0)
    scattered = [spec.numel for spec in plan.specs.values() if Factored(spec.shape, spec.order).scattered]
    return sums + _OF_CUT * cuts + _OF_SCATTERED * max(scattered, default=0)


class Sums:
    """The sums of one step, see ``WholeSums``. numbers: of the parameters that it steps, the same on every rank."""

    def __init__(self, plan: MatrixPlan, collectives: Collectives, numbers: Sequence[int], read: Read) -> None:
        self._plan = plan
        self._collectives = collectives
        self._rank, self._ranks = collectives.mesh.place_on(plan.axis)
        self.device = collectives.mesh.device
        self.numbers: Sequence[int] = list(numbers)
        self._read = read

    def spec(self, number: int) -> ParameterSpec:
        """See ``WholeSums``."""
        return self._plan.specs[number]

    def slices(self, *, weights: bool) -> Iterator[Stepped]:
        """See ``WholeSums``."""
        by_bucket: dict[int, list[tuple[int, Cut]]] = {}
        for number in self.numbers:
            for cut in self._plan.cuts(number, self._rank):
                by_bucket.setdefault(cut.bucket, []).append((number, cut))
        for bucket, parts in sorted(by_bucket.items()):
            with self._read(bucket, weights) as (flats, factor):
                for number, cut in parts:
                    yield Stepped(number, flats, Span(cut.start, cut.end, cut.offset), factor)

    def add(self, parts: Mapping[int, Tensor], length_of: Callable[[ParameterSpec], int]) -> dict[int, Tensor]:
        """See ``WholeSums``."""
        if self._plan.replicated or self._ranks == 1:
            return {number: parts[number][0] for number in self.numbers}
        lengths = {number: length_of(self.spec(number)) for number in self.numbers}
        owned = self._collect(parts, lengths)
        by_owner = [[n for n in self.numbers if self._plan.owners[n] == rank] for rank in range(self._ranks)]
        to_each = [sum(lengths[n] for n in numbers) for numbers in by_owner]
        full = torch.empty(sum(to_each), dtype=torch.float64, device=self.device)
        if to_each[self._rank]:
            torch.cat([owned[n] for n in by_owner[self._rank]], out=full.split(to_each)[self._rank])
        self._collectives.share(full, to_each, self._named, Purpose.SUMS, self._plan.axis).wait()
        numbers = [number for row in by_owner for number in row]
        return dict(zip(numbers, full.split([lengths[number] for number in numbers]), strict=True))

    def _collect(self, parts: Mapping[int, Tensor], lengths: Mapping[int, int]) -> dict[int, Tensor]:
        """Return the sums of the parameters that this rank owns."""
        plan, ranks = self._plan, range(self._ranks)
        mine = [n for n in self.numbers if plan.owners[n] == self._rank]
        sent = [[n for n in self.numbers if plan.owners[n] == rank and n in parts] for rank in ranks]
        come = [[n for n in mine if plan.cuts(n, rank)] for rank in ranks]
        to_each, from_each = ([2 * sum(lengths[n] for n in numbers) for numbers in rows] for rows in (sent, come))
        flat = [parts[n].reshape(-1) for numbers in sent for n in numbers]
        full = torch.cat(flat) if flat else torch.empty(0, dtype=torch.float64, device=self.device)
        received = torch.empty(sum(from_each), dtype=torch.float64, device=self.device)
        of_all = _PARTIAL * sum(lengths[n] for n in self.numbers for rank in ranks if plan.cuts(n, rank))
        message = Chunks(full, to_each, received, from_each, of_all)
        self._collectives.deliver(message, self._named, Purpose.SUMS, self._plan.axis).wait()
        found: dict[int, Tensor] = {}
        numbers = [n for row in come for n in row]
        for n, values in zip(numbers, received.split([2 * lengths[n] for n in numbers]), strict=True):
            pair = values.view(2, -1)
            found[n] = join_sums(found[n], pair) if n in found else pair
        return {n: pair[0] for n, pair in found.items()}

    @property
    def _named(self) -> Named:
        return Named([self._plan.specs[n].name for n in self.numbers], "sums")
