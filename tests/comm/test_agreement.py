"""agreement.py: ranks that differ are told so, all of them, and by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardengine.comm.agreement import compare, describe, run_on_all_ranks
from shardengine.errors import MismatchError
from tests.support.parts import collectives
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


def work_that_fails_on(failing: list[int]) -> str:
    """The result, or the kind and text of the error."""
    link = collectives()

    def work() -> str:
        if link.mesh.rank in failing:
            raise ValueError(f"no file on rank {link.mesh.rank}")
        return "fine"

    try:
        return run_on_all_ranks(link, "reading the file", work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_work_that_succeeds_everywhere_returns_its_result(pools: Pools) -> None:
    assert pools(3).run(work_that_fails_on, []) == ["fine"] * 3


def test_a_failure_on_one_rank_is_its_own_error_there_and_names_it_on_the_others(pools: Pools) -> None:
    zero, one, two = pools(3).run(work_that_fails_on, [1])
    assert one == "ValueError: no file on rank 1"
    for rank, text in ((0, zero), (2, two)):
        assert text == (
            f"MismatchError: reading the file failed on rank 1: ValueError: no file on rank 1 (this is rank {rank})"
        )


def test_a_failure_on_every_rank_is_every_ranks_own_error(pools: Pools) -> None:
    assert pools(2).run(work_that_fails_on, [0, 1]) == [f"ValueError: no file on rank {rank}" for rank in (0, 1)]


def test_a_failure_at_one_rank_is_the_error_itself() -> None:
    assert work_that_fails_on([0]) == "ValueError: no file on rank 0"


def facts_that_differ(changes: dict[int, dict[str, list[str]]]) -> str:
    """What ``compare`` says where rank r's facts are changed by ``changes[r]``."""
    link = collectives()
    facts = {"config": ["seed = 1"], "model": ["a: shape (2,)", "b: shape (3,)"]}
    try:
        compare(link, {**facts, **changes.get(link.mesh.rank, {})})
    except MismatchError as error:
        return str(error)
    return "equal"


CASES: list[tuple[dict[int, dict[str, list[str]]], str]] = [
    ({}, "equal"),
    (
        {1: {"model": ["a: shape (2,)", "b: shape (4,)"]}},
        "the model differs between ranks: rank 0 has [b: shape (3,)], rank 1 has [b: shape (4,)] "
        "(ranks that differ from rank 0: [1])",
    ),
    (
        {0: {"config": ["seed = 2"]}},
        "the config differs between ranks: rank 0 has [seed = 2], rank 1 has [seed = 1] "
        "(ranks that differ from rank 0: [1, 2])",
    ),
    (
        {2: {"model": ["a: shape (2,)", "b: shape (3,)", "c: shape (9,)"]}},
        "the model differs between ranks: rank 0 has nothing more, rank 2 has [c: shape (9,)] "
        "(ranks that differ from rank 0: [2])",
    ),
    ({1: {"model": []}}, "the model differs between ranks: rank 0 has [a: shape (2,)], rank 1 has nothing more"),
]


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_the_first_difference_is_named_on_every_rank(
    pools: Pools, changes: dict[int, dict[str, list[str]]], expected: str
) -> None:
    answers = pools(3).run(facts_that_differ, changes)
    assert all(answer.startswith(expected) for answer in answers)


@pytest.mark.parametrize(("left", "right"), [({"a": 1, "b": [2]}, {"b": [2], "a": 1}), ((1, 2), [1, 2])])
def test_equal_values_have_one_description(left: Any, right: Any) -> None:
    assert describe(left) == describe(right)
    assert describe(left) != describe({"a": 2})
