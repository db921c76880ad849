"""Fewer cases than a full product that see the same faults: those that some values of a few parameters cause together.

Must not know: what the parameters mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

Row = tuple[Any, ...]


def covering(product: Iterable[Row], strength: int = 2) -> list[Row]:
    """Rows of ``product`` in which every combination of ``strength`` values occurs that occurs in ``product``.

    Greedy, the earlier row where two are equally good; in the order of ``product``. Values are told apart by ``repr``.
    """
    rows = list(product)
    parts = {number: _combinations(row, strength) for number, row in enumerate(rows)}
    left, chosen = set[Row]().union(*parts.values()), list[int]()
    while left:
        best = max(parts, key=lambda number: len(parts[number] & left))
        chosen.append(best)
        left -= parts.pop(best)
    return [rows[number] for number in sorted(chosen)]


def _combinations(row: Row, strength: int) -> set[Row]:
    return set(itertools.combinations([(place, repr(value)) for place, value in enumerate(row)], strength))
