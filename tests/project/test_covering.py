"""covering.py: nothing that occurs is left out, and little occurs twice."""

from __future__ import annotations

import itertools

import pytest

from tests.support.covering import Row, covering

FACTORS: Row = ((1, 2, 3, 4), ("a", "b"), ("0", "1", "2", "3k", "3"), (1, 3), ({"x": 1}, {}))


@pytest.mark.parametrize(("strength", "most"), [(1, 5), (2, 24), (3, 60)])
def test_every_combination_occurs(strength: int, most: int) -> None:
    product = list(itertools.product(*FACTORS))
    chosen = covering(product, strength)
    assert len(chosen) <= most < len(product) and all(row in product for row in chosen)
    for places in itertools.combinations(range(len(FACTORS)), strength):
        for values in itertools.product(*(FACTORS[place] for place in places)):
            assert any([row[place] for place in places] == list(values) for row in chosen), (places, values)


def test_what_does_not_occur_is_not_asked_for() -> None:
    product = [(1, "a", True), (1, "b", False), (2, "a", False)]
    assert covering(product) == product
    assert covering([(1, 2), (1, 2)]) == [(1, 2)]
