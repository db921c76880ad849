"""In which steps shard groups step apart, when they are averaged, who exchanges with whom, what is refused then."""

from __future__ import annotations

from typing import Any

import pytest

from shardengine.config import CommHookConfig
from shardengine.ddp import Replicas, StepState, Window
from shardengine.ddp.step_state import NEEDS, Call
from shardengine.errors import UsageError


def replicas(name: str, rank: int = 0, ranks: int = 4, groups: int = 2, **params: Any) -> Replicas:
    return Replicas(CommHookConfig(name=name, params=params), rank, ranks, groups)  # type: ignore[arg-type]


def test_when_groups_are_averaged() -> None:
    groups, steps = replicas("post_local_sgd", start_step=2, period=3), []
    for step in range(1, 10):
        apart, averaged = groups.apart, groups.step.averaged
        groups.note_step(step)
        steps.append((apart, averaged, groups.since))
    assert steps == [
        (False, False, 0), (False, False, 0),
        (True, False, 1), (True, False, 2), (True, True, 0), (True, False, 1), (True, False, 2), (True, True, 0),
        (True, False, 1),
    ]  # fmt: skip


def test_without_a_period_nothing_is_averaged() -> None:
    groups = replicas("gossip", period=0)
    for step in range(1, 6):
        assert not groups.step.averaged
        groups.note_step(step)
    assert groups.since == 5
    groups.note_alike()
    assert groups.since == 0


@pytest.mark.parametrize("groups", [2, 3, 4, 5, 8])
def test_partners_are_another_one_in_each_step_and_each_of_somebody(groups: int) -> None:
    everyone = [replicas("gossip", rank, groups, groups) for rank in range(groups)]
    turns = (groups - 1).bit_length()
    for step in range(2 * turns):
        for each in everyone:
            each.foresee(step)
        pairs = [each.partners for each in everyone]
        assert all(pairs[to][1] == group and pairs[source][0] == group and to != group
                   for group, (to, source) in enumerate(pairs))  # fmt: skip
        assert pairs[0][0] == 2 ** (step % turns)


def test_whose_gradient_a_rank_shares() -> None:
    groups = replicas("post_local_sgd", rank=5, ranks=6, groups=3, start_step=1)
    assert list(range(6))[groups.rows] == [0, 1, 2, 3, 4, 5]
    groups.note_step(1)
    assert list(range(6))[groups.rows] == [4, 5]
    assert groups.part == (1, 3) and replicas("gossip", groups=4).part == (2, 4)


def test_other_hooks_and_one_group_step_together() -> None:
    for groups in (replicas("int8"), replicas("post_local_sgd", groups=1), Replicas()):
        assert not groups.name and not groups.apart


def test_what_is_refused_while_groups_differ() -> None:
    groups = replicas("post_local_sgd")
    state = StepState(Window(1), 1, 4, groups)

    def refused() -> set[Call]:
        found: set[Call] = set()
        for call in NEEDS:
            try:
                state.require(call)
            except UsageError as error:
                found |= {call} if "average_replicas" in str(error) else set()
        return found

    assert not refused()
    groups.note_step(1)
    assert refused() == {
        "full_params(writable=True)", "full_optimizer_state", "state_dict", "save_pretrained", "optimizer.state_dict()",
        "optimizer.load_state_dict()", "load_state_dict", "save_checkpoint", "engine.ema()", "close(restore=False)",
    }  # fmt: skip
    groups.note_alike()
    assert not refused()
