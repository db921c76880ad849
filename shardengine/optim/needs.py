"""Requirements of an optimizer on a layout: which parameters share no bucket, which states an element has.

Must not know: how anything is stepped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardengine import kernels
from shardengine.kernels import StateForm
from shardengine.optim import matrices, sums
from shardengine.optim.arithmetic import Arithmetic
from shardengine.optim.averages import AVERAGE
from shardengine.sharding import Layout
from shardengine.stages import Placement

Forms = Mapping[str, StateForm]


@dataclass(frozen=True)
class Needs:
    """The requirements of one optimizer.

    families: per group, as ``Arithmetic.family`` · forms: per family, the stored form of each state of an element, by
    name · whole: per group, whether it is stepped by whole matrices · by_sums: whether the step needs sums over whole
    parameters · kept_whole: as ``Arithmetic.whole_shapes`` · kernel: the kind of the kernels' update that steps some
    groups; None: it steps none · by_kernel: the numbers of those groups.
    """

    families: tuple[int, ...] = ()
    forms: Mapping[int, Forms] = field(default_factory=dict)
    whole: tuple[bool, ...] = ()
    by_sums: bool = False
    kept_whole: Callable[[Sequence[int]], Mapping[str, Sequence[int]]] = lambda shape: {}
    kernel: str | None = None
    by_kernel: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, arithmetic: Arithmetic, groups: list[dict[str, Any]], *, averages: bool, scheduled: bool = False
    ) -> Needs:
        """averages: whether averages of the weights are kept · scheduled: as in ``Arithmetic.state_names``."""
        families = tuple(arithmetic.family(group) for group in groups)
        forms = {}
        for family in dict.fromkeys(families):
            alike = [group for group, its in zip(groups, families, strict=True) if its == family]
            names = arithmetic.state_names(alike, scheduled=scheduled)
            forms[family] = stored_forms(arithmetic, (*names, *([AVERAGE] if averages else [])))
        whole = tuple(arithmetic.on_matrix(group) is not None for group in groups)
        by_kernel = tuple(number for number, group in enumerate(groups) if arithmetic.kernel_of(group) is not None)
        kernel = arithmetic.kernel_of(groups[by_kernel[0]]) if by_kernel else None
        return cls(families, forms, whole, arithmetic.by_sums, arithmetic.whole_shapes, kernel, by_kernel)

    def bytes_of(self, family: int) -> float:
        """Return the bytes of state per element of ``family``, without master weights."""
        return kernels.bytes_per_element(self.forms.get(family, {}))

    def bytes_kept_whole(self, layout: Layout) -> int:
        """Return the bytes of the states that every rank keeps of parameters as a whole."""
        stepped = [spec for spec in layout.parameters if spec.is_stepped]
        return 4 * sum(math.prod(shape) for spec in stepped for shape in self.kept_whole(spec.shape).values())

    def bytes_beside(self, layout: Layout, state: Placement, rank: int) -> int:
        """Return the peak bytes that a step of ``rank`` needs for whole matrices or sums. state: the placement of
        states."""
        if not self.by_sums:
            chosen = matrices.MatrixPlan(layout, self.whole, state)
            return chosen.bytes_beside(chosen.place_of(rank))
        plan = sums.plan_of(layout, len(self.families), state)
        rank = plan.place_of(rank)
        return 3 * self.bytes_kept_whole(layout) + sums.bytes_on_way(plan, rank) + sums.bytes_of_largest(plan, rank)

    def bytes_sent(self, layout: Layout, state: Placement, rank: int) -> int:
        """Return the bytes that ``rank`` sends for matrices or sums in a step if every parameter has a gradient."""
        if not self.by_sums:
            chosen = matrices.MatrixPlan(layout, self.whole, state)
            return chosen.bytes_sent(chosen.place_of(rank))
        plan = sums.plan_of(layout, len(self.families), state)
        return sums.bytes_sent(plan, plan.place_of(rank))

    @property
    def block(self) -> int:
        """The number of elements between two places where buckets may be cut."""
        return max((kernels.block_of(forms) for forms in self.forms.values()), default=1)

    @property
    def of_kernel(self) -> Forms:
        """The stored states of the elements that the kernels step."""
        return self.forms[self.families[self.by_kernel[0]]] if self.by_kernel else {}


def stored_forms(arithmetic: Arithmetic, names: Iterable[str]) -> dict[str, StateForm]:
    """Return the stored form of each of the states ``names``, averages of weights among them."""
    names = list(names)
    stored = arithmetic.forms(name for name in names if name != AVERAGE)
    return stored | {name: StateForm() for name in names if name == AVERAGE}
