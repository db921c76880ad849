"""How far a step is: the moves between phases, and what each call needs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from shardengine.ddp import Phase, StepState, Window
from shardengine.ddp.step_state import NEEDS, Call
from shardengine.errors import InternalError, UsageError

TO_AGREED = (Phase.BACKWARD, Phase.REDUCED, Phase.AGREED)
WAYS: dict[Phase, tuple[Phase, ...]] = {
    Phase.EMPTY: (),
    Phase.BACKWARD: TO_AGREED[:1],
    Phase.BROKEN: (Phase.BACKWARD, Phase.BROKEN),
    Phase.ACCUMULATED: (Phase.BACKWARD, Phase.ACCUMULATED),
    Phase.REDUCED: TO_AGREED[:2],
    Phase.AGREED: TO_AGREED,
    Phase.SPOILED: (*TO_AGREED, Phase.SPOILED),
    Phase.UPDATING: (*TO_AGREED, Phase.UPDATING),
    Phase.TORN: (*TO_AGREED, Phase.UPDATING, Phase.TORN),
}


def state_at(phase: Phase, *, size: int = 1, early: bool = False) -> StepState:
    """A state that has come to ``phase`` as a step does. early: its backward may step."""
    state = StepState(Window(size), rank=3)
    for each in WAYS.get(phase, WAYS[Phase.TORN]):
        if each is Phase.BACKWARD:
            state.window.begin_backward()
            state.begin_backward(steps_early=early)
        state.move(each)
    if phase is Phase.LOST:
        state.lose()
    return state


def test_a_step_goes_through_its_phases_and_begins_anew() -> None:
    state = state_at(Phase.TORN)
    state.move(Phase.UPDATING)
    assert state.close() == 1
    assert (state.phase, state.window.total) == (Phase.EMPTY, 1)


@pytest.mark.parametrize("phase", list(Phase))
def test_only_what_can_follow_follows(phase: Phase) -> None:
    """Written beside the table: each phase, and where a step can go from there."""
    can = {
        "EMPTY": "BACKWARD",
        "BACKWARD": "BROKEN ACCUMULATED REDUCED",
        "BROKEN": "",
        "ACCUMULATED": "BACKWARD",
        "REDUCED": "BROKEN AGREED",
        "AGREED": "BACKWARD REDUCED SPOILED UPDATING",
        "SPOILED": "",
        "UPDATING": "TORN",
        "TORN": "UPDATING",
        "LOST": "",
    }[phase.name].split()
    for target in Phase:
        state = state_at(phase)
        if target is phase or target.name in can:
            state.move(target)
            assert state.phase is target
        else:
            with pytest.raises(InternalError, match=rf"from {phase.name} to {target.name} \(rank 3\)"):
                state.move(target)


def refusals(state: StepState) -> dict[Call, str]:
    """What is refused in ``state``, and with which sentence."""
    said: dict[Call, str] = {}
    for call in NEEDS:
        try:
            state.require(call)
        except UsageError as error:
            said[call] = str(error)
    return said


GRADIENTS: set[Call] = {"full_grads", "full_grads(writable=True)", "clip_grad_norm_"}
BETWEEN: set[Call] = {
    "load_checkpoint", "optimizer.load_state_dict()", "add_param_group()", "unfreezing", "offload_states",
    "optimizer.train() or eval()", "engine.ema()", "another setting", "engine.join()", "average_replicas()",
}  # fmt: skip
NOTHING_STEPPED: set[Call] = {
    "backward", "another backward", "zero_grad()", "full_optimizer_state", "full_params(writable=True)",
    "save_checkpoint", "close(restore=False)", "load_state_dict", "optimizer.state_dict()",
    "optimizer.load_state_dict()",
}  # fmt: skip
ENDS_BLOCKS: set[Call] = BETWEEN | {
    "full_optimizer_state", "full_params(writable=True)", "load_checkpoint after an interrupted step", "reset()",
    "close(restore=False)", "load_state_dict", "optimizer.state_dict()", "optimizer.load_state_dict()",
}  # fmt: skip
UPDATED = BETWEEN | NOTHING_STEPPED | {
    "agreement", "clip_grad_norm_", "full_grads(writable=True)", "state_dict", "save_pretrained",
}  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "refused"),
    [
        (Phase.EMPTY, GRADIENTS | {"step()"}),
        (Phase.BACKWARD, GRADIENTS | BETWEEN | {"another backward", "step()"}),
        (Phase.BROKEN, GRADIENTS | BETWEEN | {"another backward", "step()"}),
        (Phase.ACCUMULATED, GRADIENTS | BETWEEN),
        (Phase.REDUCED, GRADIENTS | BETWEEN | {"another backward"}),
        (Phase.AGREED, BETWEEN),
        (Phase.SPOILED, BETWEEN),
        (Phase.UPDATING, UPDATED),
        (Phase.TORN, UPDATED | {"update"}),
        (Phase.LOST, UPDATED | GRADIENTS | {"update", "step()"}),
    ],
)
def test_what_each_phase_refuses(phase: Phase, refused: set[Call]) -> None:
    assert refusals(state_at(phase)).keys() == refused


@pytest.mark.parametrize("phase", [Phase.UPDATING, Phase.TORN])
def test_with_several_ranks_an_interrupted_step_needs_a_reset(phase: Phase) -> None:
    """Which buckets were gathered is not known."""
    state = state_at(phase)
    state.ranks = 2
    assert "engine.reset() on every rank" in refusals(state)["step()"]


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.AGREED])
def test_after_a_backward_that_may_step_the_window_can_only_be_stepped(phase: Phase) -> None:
    state = state_at(phase, early=True)
    said = refusals(state)
    for call in NOTHING_STEPPED:
        assert said[call].startswith(f"{call} after the window's last backward, in which buckets are stepped")
    assert "update" not in said
    assert ("step()" in said) is (phase is Phase.BACKWARD), "which may have raised"
    assert "engine.reset()" in said.get("step()", "engine.reset()")
    state.note_early(torn=True)
    state.note_early()  # another bucket, noted by another thread
    assert "inside of the update of a bucket" in refusals(state)["update"] and not state.can_be_finished
    state.restart()
    assert refusals(state).keys() == refusals(state_at(Phase.EMPTY)).keys()


@pytest.mark.parametrize(
    ("prepare", "refused"),
    [
        ("summoned", {"step()", "save_checkpoint", "close()", *ENDS_BLOCKS}),
        ("edited", ENDS_BLOCKS),
        ("averaged", {"backward", "another backward", "step()", "save_checkpoint", "close()", *ENDS_BLOCKS}),
        (
            "no_sync",
            {
                *("step()", "add_param_group()", "unfreezing", "optimizer.train() or eval()", "engine.ema()"),
                *("engine.join()", "average_replicas()"),
            },
        ),
        ("offloaded", {"any", "another backward"}),
    ],
)
def test_what_is_open_around_a_step(prepare: str, refused: set[Call]) -> None:
    state = state_at(Phase.EMPTY)
    before = refusals(state)
    blocks = {
        "summoned": state.summoning,
        "edited": state.editing,
        "averaged": state.averaging,
        "no_sync": state.window.no_sync,
    }
    words = {
        "summoned": "inside full_params()",
        "edited": "inside full_optimizer_state()",
        "averaged": "inside engine.ema()",
        "no_sync": "inside no_sync()",
    }
    with blocks.get(prepare, nullcontext)():
        if prepare == "offloaded":
            state.note_offloaded({"weights"})
        said = [*refusals(state).items()]
        state.window.begin_backward()  # without one a step is refused for that
        said += refusals(state).items()
        word = words.get(prepare, "reload_states()")
        assert {call for call, text in said if word in text} == refused
    state.note_reloaded()
    state.restart()
    assert refusals(state) == before


@pytest.mark.parametrize("has_stepped", [False, True])
def test_what_is_left_when_gradients_are_forgotten(has_stepped: bool) -> None:
    state = state_at(Phase.AGREED, early=True)
    if has_stepped:
        state.note_early()
    state.drop_gradients()
    assert state.phase is Phase.EMPTY and state.has_begun is has_stepped and state.must_be_stepped is has_stepped
    torn = state_at(Phase.TORN)
    torn.drop_gradients()
    assert torn.phase is Phase.TORN and torn.has_begun


def test_a_failure_while_ranks_agree_breaks_the_backward_that_asked_for_it() -> None:
    for phase, after in ((Phase.BACKWARD, Phase.BROKEN), (Phase.REDUCED, Phase.BROKEN), (Phase.EMPTY, Phase.EMPTY)):
        state = state_at(phase)
        state.backward_failed()
        assert state.phase is after


def test_who_can_finish_an_update() -> None:
    able = {phase for phase in Phase if state_at(phase).can_be_finished}
    begun = {phase for phase in Phase if state_at(phase).has_begun}
    assert able == {Phase.AGREED, Phase.UPDATING}
    assert begun == {Phase.UPDATING, Phase.TORN, Phase.LOST}


def test_the_way_on_says_what_is_left_to_do() -> None:
    said = [refusals(state_at(phase))["zero_grad()"] for phase in (Phase.UPDATING, Phase.LOST)]
    assert "engine.reset() on every rank" in said[0] and "engine.load_checkpoint() on every rank" in said[1]
    shown = StepState(Window(2))
    shown.window.begin_backward()
    with pytest.raises(UsageError, match=r"^unfreezing parameter 'w' in the middle of a step \(rank 0; 1 of 2"):
        shown.require("unfreezing", "unfreezing parameter 'w'")
