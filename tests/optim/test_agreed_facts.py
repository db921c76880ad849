"""agreed_facts.py: each fact that differs is named, with the rank."""

from __future__ import annotations

from typing import Any

import pytest

from shardengine.optim import agreed_facts


def facts(**other: Any) -> agreed_facts.Facts:
    given: dict[str, Any] = {"changes": 0, "divisors": [1], "scale": "1", **other}
    options = given.pop("options", {"lr of optimizer group 0": "0.1", "eps of optimizer group 0": "1e-08"})
    return agreed_facts.facts_of(options, given.pop("frozen", ["base"]), **given)


@pytest.mark.parametrize(
    ("other", "clause"),
    [
        ({"frozen": ["A", "base"]}, "'A' is frozen on rank 1 and not on rank 0"),
        ({"frozen": ["A", "B", "base"]}, "'A' and 1 more are frozen on rank 1 and not on rank 0"),
        ({"frozen": []}, "'base' is frozen on rank 0 and not on rank 1"),
        ({"changes": 7}, "parameter.grad was changed on rank 1 and not on rank 0 (also by clip_grad_norm_)"),
        ({"divisors": [2]}, "losses were divided by [1] on rank 0 and by [2] on rank 1"),
        ({"scale": "1024"}, "the loss scale is 1 on rank 0 and 1024 on rank 1"),
        ({"options": {"lr of optimizer group 0": "0.2"}}, "lr of optimizer group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
    ],
)
def test_a_fact_that_differs_is_named(other: dict[str, Any], clause: str) -> None:
    found = [facts(), facts(**other)]
    assert clause in agreed_facts.difference(found)
    assert bool(agreed_facts.advice(found)) is ("options" in other)


def test_all_that_differ_are_named_and_nothing_else() -> None:
    found = [facts(changes=3), facts(changes=3), facts(changes=0, frozen=[])]
    text = agreed_facts.difference(found)
    assert "changed on rank 0 and not on rank 2" in text and "'base' is frozen on rank 0 and not on rank 2" in text
    assert "rank 1" not in text
    assert not agreed_facts.difference([facts(), facts(), facts()])
    assert "not in the same way" in agreed_facts.difference([facts(changes=3), facts(changes=4)])
