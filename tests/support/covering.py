"""Fewer cases than a full product that see the same faults: those that some values of a few parameters cause together.

Must not know: what the parameters mean.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import Any

Row = tuple[Any, ...]


def covering(product: Iterable[Row], strength: int = 2) -> list[Row]:
    """Rows of ``product`` in which every combination of ``strength`` values occurs that occurs in ``product``.

    Greedy, the earlier row where two are equally good; in the order of ``product``. Values are told apart by ``repr``.
    """
    rows = list(product)
    parts = [_combinations(row, strength) for row in rows]
    left, chosen = set[Row]().union(*parts), list[int]()
    queue = [(-len(part), number) for number, part in enumerate(parts)]  # what a row brings only becomes less
    heapq.heapify(queue)
    while left:
        brings, number = heapq.heappop(queue)
        now = -len(parts[number] & left)
        if now == brings:
            chosen.append(number)
            left -= parts[number]
        elif now:
            heapq.heappush(queue, (now, number))
    return [rows[number] for number in sorted(chosen)]


def _combinations(row: Row, strength: int) -> set[Row]:
    return set(itertools.combinations([(place, repr(value)) for place, value in enumerate(row)], strength))
