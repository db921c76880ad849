"""Nothing has changed that was not meant to: the collectives and the bits of 3 steps (see replay)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.project import replay
from tests.support.ranks import RankPool

EXPECTED: dict[str, Any] = json.loads(replay.FILE.read_text(encoding="utf-8"))


def test_every_case_is_recorded() -> None:
    assert list(EXPECTED) == list(replay.cases_by_name()), "python -m tests.project.replay"


@pytest.mark.parametrize("case", list(EXPECTED))
def test_collectives_and_bits_are_those_of_the_recording(pools: Callable[[int], RankPool], case: str) -> None:
    found = pools(replay.RANKS).run(replay.both, case)[0]
    for group, texts in EXPECTED[case]["issued"].items():
        assert found["issued"][group] == texts, group
    assert found["state"] == EXPECTED[case]["state"]


@pytest.mark.parametrize("way", list(replay.WAYS))
@pytest.mark.parametrize("stages", [("0", "1"), ("2", "3k", "3")], ids="-".join)
def test_stages_that_add_in_the_same_order_have_the_same_bits(way: str, stages: tuple[str, ...]) -> None:
    states = [EXPECTED[f"{stage} {way}"]["state"] for stage in stages]
    assert states[0] and all(state == states[0] for state in states)
