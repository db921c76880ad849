"""Ranks with unequal numbers of batches, or that leave in other ways: who hears what; and who must hear nothing."""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardengine
from shardengine.comm import failures, meeting, store_board, watchdog, work
from shardengine.comm.flight_recorder import Collective, CollectiveRecord, Purpose
from shardengine.comm.group_kind import GroupName
from shardengine.comm.positions import Presence, Waiting, deadlock
from shardengine.comm.store_board import StoreBoard
from shardengine.comm.watchdog import Watchdog
from shardengine.errors import MismatchError
from tests.comm.test_failures import failures_of_ranks, look_twice
from tests.support import HANG_S, cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.raising import raises
from tests.support.ranks import RankPool, fork_context

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)
STEPS = 2
TIMEOUT_S = 110.0
"""A rank that waits for so long has not been told."""
SAME = (
    "Give every rank the same number of batches, or train inside `with engine.join():`, and make the same calls on "
    "every rank"
)


BATCHES = "Where ranks come there after different numbers of batches, give every rank the same number, or train inside"


@contextmanager
def listening_closely() -> Iterator[None]:
    """Shorter times, so that many cases can be tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "STANDS_S", 0.3)
        patch.setattr(watchdog, "POST_AFTER_S", 0.2)
        patch.setattr(failures, "LINGER_S", 0.5)
        patch.setattr(work, "_SLICE", timedelta(seconds=0.1))
        yield


def make_engine(stage: str, timeout_s: float, micros: int = 1, tier: str = "", **options: Any) -> Any:
    """An engine with process groups of its own, which may be ruined, in small buckets. tier: for the optimizer."""
    model = cases.make_mlp()
    away = {"offload_optimizer": {"device": tier, "step_in_backward": True}} if tier else {}
    zero = {"reduce_bucket_size": 600, **away}
    config = cases.config_of(stage, micros, zero=zero, timeout_s=timeout_s, **options)
    if tier:
        del config["gradient_clipping"]
    return shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"))


def train(engine: Any, first: int, last: int) -> list[float]:
    """Micro-batches ``first`` to ``last - 1``; their losses."""
    micros = engine.gradient_accumulation_steps()
    return [cases.run_micro_batch(engine, cases.loss_of, *divmod(number, micros)) for number in range(first, last)]


def said_by(call: Callable[[], Any]) -> str:
    """What ``call`` raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# One rank has more batches, the others do something else


def evaluate(engine: Any, called: Any = None) -> None:
    engine.eval()
    with torch.no_grad():
        cases.loss_of(called or engine, 9, engine.rank, 0)
    engine.train()


AFTER: dict[str, Callable[[Any, str], Any]] = {
    "close": lambda engine, _: engine.close(),
    "save": lambda engine, folder: engine.save_checkpoint(folder),
    "state_dict": lambda engine, _: engine.state_dict(),
    "full_params": lambda engine, _: engine.full_params().__enter__(),
}


def one_more(stage: str, after: str, micros: int, folder: str, options: dict[str, Any]) -> tuple[str, str]:
    """The last rank has one micro-batch more. What its extra one said, or the others' ``after``; and every close."""
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S, micros, **options)
        train(engine, 0, STEPS * micros)
        if engine.rank == engine.world_size - 1:
            said = said_by(lambda: train(engine, STEPS * micros, STEPS * micros + 1))
        else:
            said = said_by(lambda: AFTER[after](engine, folder))
        return said, said_by(engine.close)


def waits_in(stage: str, micros: int) -> str:
    call = "forward" if stage in ("3", "3k") else "backward"
    return f"this rank ({{}}) is in {call} of step {STEPS + 1}, micro-batch 1, and "


@pytest.mark.parametrize(
    ("stage", "ranks", "micros", "options"),
    [
        *((stage, 2, 1, {}) for stage in STAGES),
        ("1", 3, 1, {"overlap_param_gather": True}),
        ("2", 3, 2, {}),
        ("3k", 3, 2, {}),
        ("3", 3, 2, {}),
        ("2", 2, 1, {"tier": "cpu"}),
    ],
)
def test_the_rank_with_a_batch_more_hears_that_the_others_have_closed(
    pools: Pools, stage: str, ranks: int, micros: int, options: dict[str, Any]
) -> None:
    results = pools(ranks).run(one_more, stage, "close", micros, "", options)
    said, closed = results[-1]
    gone = f"rank 0 has closed its engine after step {STEPS}"
    others = "" if ranks == 2 else " (and so ranks [1])"
    assert said.startswith("CommunicationError: "), said
    assert gone in said and (others in said or f"rank 1 gave up: {gone}" in said), said
    assert waits_in(stage, micros).format(ranks - 1) in said and said.endswith(SAME), said
    for other, _ in results[:-1]:
        if stage in ("3", "3k"):
            assert other.startswith("CommunicationError: engine.close() on rank "), other
            assert f"rank {ranks - 1} " in other and "gave up" in other and "weights stay spread" in other, other
        else:
            assert other == "nothing"
    if stage in ("3", "3k"):
        assert "this one gave up" in closed
    else:
        assert closed == "nothing"


def one_fails_and_all_close(stage: str, way: str) -> tuple[str, str]:
    """Rank 0 raises in its loop, whose ``finally`` or ``except`` closes the engine. What left that, and its context."""
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S)

        def loop() -> None:
            train(engine, 0, 1)
            if engine.rank == 0:
                raise ValueError("a file is missing")
            train(engine, 1, 2)

        def until_closed() -> None:
            if way == "finally":
                try:
                    loop()
                finally:
                    engine.close()
            try:
                loop()
            except Exception as error:
                engine.close()
                raise RuntimeError("the run has ended") from error

        try:
            until_closed()
        except Exception as error:
            return f"{type(error).__name__}: {error}", f"{type(error.__context__).__name__}: {error.__context__}"
        return "nothing", ""


@pytest.mark.parametrize(
    ("stage", "ranks", "way"),
    [*((stage, 2, "finally") for stage in STAGES), ("2", 3, "finally"), ("3", 3, "finally"), ("3", 2, "except")],
)
def test_a_close_behind_an_error_lets_that_one_be_seen(pools: Pools, stage: str, ranks: int, way: str) -> None:
    results = pools(ranks).run(one_fails_and_all_close, stage, way)
    raised = [said[0] if way == "finally" else said[1] for said in results]
    assert raised[0] == "ValueError: a file is missing"
    for said in raised[1:]:
        assert said.startswith("CommunicationError: ") and "engine.close()" not in said, said
        assert "rank 0 has closed its engine after step 1 (ValueError: a file is missing)" in said, said
    if way == "finally":
        own = [context for _, context in results if "Connection closed" not in context]  # gloo's may come first
        assert set(own) == {"NoneType: None"}, "nothing was raised once more"


@pytest.mark.parametrize("after", ["save", "state_dict", "full_params"])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_in_different_calls_hear_of_both(pools: Pools, stage: str, after: str, tmp_path: Path) -> None:
    results = [said for said, _ in pools(2).run(one_more, stage, after, 1, str(tmp_path / "out"), {})]
    call = {"save": "save_checkpoint"}.get(after, after)
    where = "forward" if stage in ("3", "3k") else "backward"
    for said in results:
        assert "timed out" not in said.lower() and "did not end within" not in said, said
        assert "ranks wait for each other: " in said and SAME not in said, said
        assert f"the same calls on every rank, in the same order: {call} on all of them, or on none. {BATCHES}" in said
        assert f"rank 0 stands in {call} of step {STEPS + 1}" in said, said
        assert f"rank 1 stands in {where} of step {STEPS + 1}, micro-batch 1" in said, said
    assert any(said.startswith("MismatchError: ") for said in results), results


def save_on_rank_0(stage: str, other: str, folder: str) -> str:
    """Rank 1 goes on to ``other``."""
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S)
        train(engine, 0, 1)
        calls = {**AFTER, "evaluation": lambda engine, _: evaluate(engine)}
        said = said_by(lambda: calls["save" if engine.rank == 0 else other](engine, folder))
        said_by(engine.close)
        return said


@pytest.mark.parametrize(("stage", "other"), [("1", "close"), ("3", "evaluation")])
def test_where_no_rank_trains_nothing_is_said_of_batches(pools: Pools, stage: str, other: str, tmp_path: Path) -> None:
    zero, one = pools(2).run(save_on_rank_0, stage, other, str(tmp_path / "out"))
    assert "batches on every rank, or train inside" not in zero and BATCHES not in zero, zero
    if other == "close":
        assert one == "nothing"
        assert zero.endswith("Call save_checkpoint on every rank, before one of them leaves, or on none"), zero
        return
    for said in (zero, one):
        assert "rank 0 is in [preparing a checkpoint] where rank 1 is in [gathering without grad of " in said, said
        assert "At stage 3 a forward gathers weights from every rank" in said, said


def one_evaluation_more(stage: str) -> str:
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S)
        train(engine, 0, 1)
        for _ in range(1 + (engine.rank == 1)):
            said = said_by(lambda: evaluate(engine))
            if said != "nothing":
                break
        said_by(engine.close)
        return said


@pytest.mark.parametrize("stage", ["2", "3"])
def test_an_evaluation_loop_of_unequal_length(pools: Pools, stage: str) -> None:
    zero, one = pools(2).run(one_evaluation_more, stage)
    assert zero == "nothing"
    if stage == "3":
        assert "rank 0 has closed its engine after step 1; this rank (1) is in forward without grad of step 2" in one
    else:
        assert one == "nothing", "nothing is gathered there: no rank needs another"


def closes_before_the_other() -> tuple[str, str]:
    """Rank 0 closes its engine without gathering, rank 1 evaluates once more and closes its own as it can."""
    with listening_closely():
        engine = make_engine("3", TIMEOUT_S)
        train(engine, 0, 1)
        said = said_by(lambda: evaluate(engine)) if engine.rank == 1 else ""
        return said, said_by(lambda: engine.close(restore=False))


def test_closing_without_gathering_alone_is_told(pools: Pools) -> None:
    (_, zero), (evaluated, one) = pools(2).run(closes_before_the_other)
    assert "rank 0 has closed its engine after step 1; this rank (1) is in forward without grad of step 2" in evaluated
    for said in (zero, one):
        assert said.startswith("CommunicationError") and "weights stay spread over the ranks" in said, said


def evaluate_on_rank_0(stage: str, model: str, through: str) -> str:
    with listening_closely():
        module = cases.MODELS[model]()
        config = cases.config_of(stage, zero={"reduce_bucket_size": 600}, timeout_s=TIMEOUT_S)
        engine = shardengine.initialize(module, config, optimizer=cases.make_optimizer(module, "AdamW"))
        train(engine, 0, 1)
        with warnings.catch_warnings(action="error"):
            called = engine if through == "engine" else engine.module
            said = said_by(lambda: evaluate(engine, called)) if engine.rank == 0 else "nothing"
        said = said_by(lambda: train(engine, 1, 2)) if said == "nothing" else said
        said_by(engine.close)
        return said


@pytest.mark.parametrize(("model", "through"), [("mlp", "engine"), ("gpt2", "engine"), ("mlp", "module")])
@pytest.mark.parametrize("stage", STAGES)
def test_an_evaluation_on_rank_0_alone(pools: Pools, stage: str, model: str, through: str) -> None:
    results = pools(2).run(evaluate_on_rank_0, stage, model, through)
    if stage not in ("3", "3k"):
        assert results == ["nothing", "nothing"], "nothing is gathered there: no rank needs another"
        return
    for said in results:
        assert "rank 0 stands in" in said and "for gathering without grad of unit" in said and SAME not in said, said
        assert "rank 1 stands in forward of step 2" in said and "evaluate the same number of batches" in said, said
        assert "or inside of `with engine.full_params():` that" in said, said


def begin_anew(stage: str, holds: bool) -> str:
    """Rank 0 makes another engine while rank 1 goes on with the first. holds: rank 0 has not lost it."""
    with listening_closely():
        engine: Any = make_engine(stage, 4.0 if not holds else TIMEOUT_S)
        train(engine, 0, 1)
        if engine.rank == 1:
            return said_by(lambda: train(engine, 1, 2))
        if not holds:
            del engine
            gc.collect()
        return said_by(lambda: make_engine(stage, 4.0 if not holds else TIMEOUT_S))


@pytest.mark.parametrize("stage", ["0", "3"])
def test_initialize_on_one_rank_while_another_trains(pools: Pools, stage: str) -> None:
    call = "forward" if stage == "3" else "backward"
    zero, one = pools(2).run(begin_anew, stage, True)
    assert zero.startswith("MismatchError: ranks wait for each other: rank 0 stands in initialize (the meeting of"), (
        zero
    )
    assert f"rank 1 stands in {call} of step 2, micro-batch 1 " in zero, zero
    assert f"in the same order: initialize on all of them, or on none. {BATCHES}" in zero, zero
    assert "rank 0 stands in initialize" in one or "rank 0 gave up: ranks wait for each other" in one, one
    zero, one = pools(2).run(begin_anew, stage, False)
    assert zero == (
        "CommunicationError: initialize on rank 0: expected every rank to call it within 4 s. Missing: ranks [1]. "
        "Call it on every rank"
    )
    assert "rank 0 has let go of its engine after step 1" in one, one
    zero, one = pools(2).run(begin_together, stage)  # what had failed is counted nowhere
    assert (zero, one) == ("nothing", "nothing")


def begin_together(stage: str) -> str:
    return said_by(lambda: make_engine(stage, TIMEOUT_S).close())


def begin_late() -> list[str]:
    """With an engine that stays, all ranks make another, one of them long after the others."""
    with listening_closely():
        first = make_engine("3", TIMEOUT_S)
        train(first, 0, 1)
        if first.rank == 2:
            time.sleep(3)
        said = [said_by(lambda: make_engine("2", TIMEOUT_S).close()), said_by(lambda: train(first, 1, 2))]
        return [*said, said_by(first.close)]


def test_ranks_that_wait_in_initialize_for_a_late_one_do_not_wait_for_each_other(pools: Pools) -> None:
    assert pools(3).run(begin_late) == [["nothing"] * 3] * 3


def begin_too_soon() -> list[str]:
    """Rank 0 calls initialize alone, is told, and all train on with the first engine."""
    told: list[str] = []
    with listening_closely(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "_WARN_AFTER_S", 0.1)
        first = make_engine("3", TIMEOUT_S)
        train(first, 0, 1)
        patch.setattr(meeting._log, "warning", lambda text, *args: told.append(text % args))
        said = [said_by(lambda: make_engine("2", 2.0) if first.rank == 0 else time.sleep(3))]
        patch.undo()
        return [*said, said_by(lambda: train(first, 1, 3)), said_by(first.close), *told]


def test_an_initialize_that_failed_leaves_the_other_engine_whole(pools: Pools) -> None:
    zero, one = pools(2).run(begin_too_soon)
    assert (
        "CommunicationError: initialize on rank 0: expected every rank to call it within 2 s. Missing: rank 1"
        in zero[0]
    )
    assert zero[1:3] == one[1:] == ["nothing", "nothing"]
    (told,) = zero[3:]
    assert told.startswith("initialize on rank 0 waits for ranks [1], which have not called it within 0.1 s; gives up")


def close_and_begin() -> str:
    with listening_closely():
        first = make_engine("3", TIMEOUT_S)
        train(first, 0, 1)
        if first.rank == 0:
            return said_by(lambda: make_engine("2", TIMEOUT_S))
        return said_by(first.close)


def test_close_on_one_rank_and_initialize_on_another(pools: Pools) -> None:
    for said in pools(2).run(close_and_begin):
        assert "rank 0 stands in initialize (the meeting of all ranks before new process groups)" in said, said
        assert "rank 1 stands in close (every rank's engine.close())" in said, said


def keep_the_module(stage: str) -> bool:
    """Nobody has the engine, but its module is used: the groups of the next one do not take the place of its own."""
    module: Any = make_engine(stage, TIMEOUT_S).module
    gc.collect()
    student = make_engine("2", TIMEOUT_S)
    for number in range(2):
        with torch.no_grad():
            taught = module(torch.ones(3, 7)).isfinite().all()
        train(student, number, number + 1)
    student.close()
    return bool(taught)


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_module_without_its_engine_may_be_used_beside_another_engine(pools: Pools, stage: str) -> None:
    assert pools(2).run(keep_the_module, stage) == [True, True]


@pytest.mark.parametrize("stage", ["0", "1"])
def test_left_over_micro_batches_that_send_nothing_are_no_failure(pools: Pools, stage: str) -> None:
    assert pools(2).run(one_more, stage, "close", 2, "", {}) == [("nothing", "nothing")] * 2


# Ranks that end otherwise


def live(rank: int, ranks: int, store: str, how: str, stage: str, answers: Any) -> None:
    """The life of a process: ``STEPS`` batches; the last rank has one more, rank 0 leaves as ``how`` says."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    engine = make_engine(stage, TIMEOUT_S)
    train(engine, 0, STEPS)
    if rank == ranks - 1:
        answers.put(said_by(lambda: train(engine, STEPS, STEPS + 1)))
    elif how == "raises":
        raise ValueError("of my own")
    elif how == "exits":
        sys.exit(0)


@pytest.mark.parametrize(("how", "stage"), [("returns", "0"), ("raises", "1"), ("exits", "2"), ("raises", "3")])
def test_a_process_that_ends_without_closing_says_so(how: str, stage: str) -> None:
    context = fork_context()
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (2, str(Path(folder, "store")), how, stage, answers)
        processes = [context.Process(target=live, args=(rank, *arguments)) for rank in range(2)]
        for process in processes:
            process.start()
        said = answers.get()
        for process in processes:
            process.join(20)
            process.kill()
    left = f"rank 0 has ended its process after step {STEPS}, without engine.close()"
    cause = " (ValueError: of my own); " if how == "raises" else "; "
    assert left + cause in said, said
    assert said.endswith("Handle the cause, and start the ranks again" if how == "raises" else SAME), said


SCRIPT = """
import sys
from tests.comm.test_uneven_data import STEPS, make_engine, said_by, train

engine = make_engine("3", 110.0)
train(engine, 0, STEPS)
if engine.rank == 1:
    print(said_by(lambda: train(engine, STEPS, STEPS + 1)), flush=True)
    sys.exit(1)
if sys.argv[1] == "raises":
    raise ValueError("of my own")
engine.close()
"""


@pytest.mark.parametrize("how", ["raises", "closes"])
def test_a_rank_that_hosts_the_store_stays_until_the_others_have_heard(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), how], env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said, _ = ranks[1].communicate(timeout=HANG_S)
        _, errors = ranks[0].communicate(timeout=HANG_S)
    finally:
        for process in ranks:
            process.kill()
    left = {"raises": "has ended its process after step 2, without engine.close() (ValueError: of my own)"}
    assert f"rank 0 {left.get(how, 'has closed its engine after step 2')}; this rank (1) is in forward" in said, said
    assert ("ValueError: of my own" if how == "raises" else "rank 1 has ended its process") in errors, errors


def launched(stage: str) -> str:
    engine = make_engine(stage, TIMEOUT_S)
    said = said_by(lambda: train(engine, 0, STEPS + engine.rank))
    if said != "nothing":
        raise RuntimeError(said)
    return said


def test_a_launched_function_that_returns_before_the_others_says_so() -> None:
    with pytest.raises(RuntimeError) as caught:
        shardengine.launch(launched, 2, ("2",))
    expected = f"rank 0 has returned from the launched function after step {STEPS}, without engine.close(); this rank"
    assert expected in str(caught.value), caught.value


def drop_or_train(stage: str) -> str:
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S)
        train(engine, 0, STEPS)
        if engine.rank == 0:
            del engine
            gc.collect()
            return ""
        said = said_by(lambda: train(engine, STEPS, STEPS + 1))
        said_by(engine.close)
        return said


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_rank_that_drops_its_engine_says_so(pools: Pools, stage: str) -> None:
    _, said = pools(2).run(drop_or_train, stage)
    assert f"rank 0 has let go of its engine after step {STEPS}, without engine.close(); this rank (1) is in" in said


def logged(patch: pytest.MonkeyPatch, log: logging.Logger, level: str, heard: Path) -> list[str]:
    """What ``log`` is told at ``level`` from now on; the file ``heard`` is there when it was told something."""
    told: list[str] = []

    def tell(text: str, *args: Any) -> None:
        told.append(text % args)
        heard.touch()

    patch.setattr(log, level, tell)
    return told


def call_alone(folder: str) -> list[str]:
    """Rank 0 asks for all weights, the other one comes when rank 0 has told of it; what rank 0 told."""
    heard = Path(folder, "heard")
    with listening_closely(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "_WARN_AFTER_S", 0.5)
        told = logged(patch, watchdog._log, "warning", heard)
        engine = make_engine("2", TIMEOUT_S)
        train(engine, 0, 1)
        deadline = time.monotonic() + HANG_S
        while engine.rank == 1 and not heard.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        engine.state_dict()
        train(engine, 1, 2)
        engine.close()
    return told


def test_a_rank_that_makes_a_call_alone_tells_for_whom_it_waits(pools: Pools, tmp_path: Path) -> None:
    (told,), none = pools(2).run(call_alone, str(tmp_path))
    assert none == []
    assert told.startswith("rank 0 has waited for ") and " in state_dict" in told
    assert f"gives up after {TIMEOUT_S:g} s. Missing: rank 1 says nothing (busy elsewhere, hung or gone)" in told
    assert told.endswith("Every rank has to make the call")


# No false alarms


def slow_by_turns(stage: str, folder: str) -> dict[str, Any]:
    """Ranks take turns at being slow, for much longer than waits must last to be looked into."""
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S)

        def before(step: int) -> None:
            time.sleep(1.2 * (step % engine.world_size == engine.rank))
            if step == 2:
                engine.save_checkpoint(folder)
                evaluate(engine)

        result = cases.run_steps(engine, 4, before=before)
        time.sleep(1.2 * (engine.rank == 0))
        engine.close()
    return result


@pytest.mark.parametrize(("stage", "ranks"), [("0", 2), ("1", 3), ("2", 2), ("3k", 2), ("3", 3)])
def test_a_slow_rank_is_never_accused(pools: Pools, stage: str, ranks: int, tmp_path: Path) -> None:
    results = pools(ranks).run(slow_by_turns, stage, str(tmp_path))
    assert_equal_to_truth(results, cases.truth("mlp", "AdamW", ranks, 1, "full", 4))


def engine_after_engine(stage: str) -> list[dict[str, Any]]:
    """Engines beside and after each other over one mesh; each rank waits for the other while the first is closed."""
    results = []
    with listening_closely():
        first, second = (cases.make_engine(cases.make_mlp(), cases.config_of(stage)) for _ in range(2))
        results.append(cases.run_steps(first, 2))
        first.close()
        for engine in (second, cases.make_engine(cases.make_mlp(), cases.config_of(stage))):
            results.append(cases.run_steps(engine, 2, before=lambda step: time.sleep(step == dist.get_rank())))
            engine.close()
    return results


@pytest.mark.parametrize("stage", STAGES)
def test_another_engine_does_not_hear_a_departure(pools: Pools, stage: str) -> None:
    for results in zip(*pools(2).run(engine_after_engine, stage), strict=True):
        assert_equal_to_truth(list(results), cases.truth("mlp", "AdamW", 2, 1, "full", 2))


def closed_in_any_order() -> list[str]:
    """Where the end of an engine has no collectives, ranks may end theirs when they like."""
    with listening_closely():
        one, two = (cases.make_engine(cases.make_mlp(), cases.config_of("2")) for _ in range(2))
        train(one, 0, 1)
        if one.rank == 0:
            one.close()
        said = [said_by(lambda: train(two, 0, 2))]
        for engine in (two, one):
            said.append(said_by(engine.close))
    return said


def test_engines_may_be_closed_in_another_order_on_each_rank(pools: Pools) -> None:
    assert pools(2).run(closed_in_any_order) == [["nothing"] * 3] * 2


def train_and_count() -> int:
    """What is asked of the store while nothing is wrong."""
    asked: list[object] = []
    gc.collect()  # an engine of an earlier test says that nobody has it any more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreBoard, "_submit", lambda *_: asked.append(0))
        patch.setattr(work, "_SLICE", timedelta(seconds=50))  # a busy machine is not what this is about
        engine = make_engine("3", TIMEOUT_S)
        train(engine, 0, 3)
    engine.close()
    return len(asked)


def test_training_asks_nothing_of_the_store(pools: Pools) -> None:
    assert pools(2).run(train_and_count) == [0, 0]


# What is said


def stand_elsewhere(timeout_s: float) -> str:
    """Rank 0 stands in something of its own until the other has given up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_board, "WRITE_LATER_S", 0.05)
        engine = make_engine("2", timeout_s)
        train(engine, 0, STEPS)
        if engine.rank == 0:
            time.sleep(timeout_s + 3)
            return ""
        return said_by(lambda: train(engine, STEPS, STEPS + 1))


@pytest.mark.core
def test_a_rank_that_stands_elsewhere_is_named_with_its_last_step(pools: Pools) -> None:
    _, said = pools(2).run(stand_elsewhere, 3.0)
    assert f"Missing: rank 0 says nothing (busy elsewhere, hung or gone), last seen after step {STEPS}" in said, said


def close_amid_a_window(stage: str) -> str:
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S, 3)
        said = said_by(lambda: train(engine, 0, 4 if engine.rank == 0 else 5))
        said_by(engine.close)
        return said


def test_micro_batches_are_counted_in_what_is_said(pools: Pools) -> None:
    zero, one = pools(2).run(close_amid_a_window, "2")
    assert zero == "nothing"
    assert "rank 0 has closed its engine after micro-batch 1 of step 2; this rank (1) is in backward of step 2" in one


def test_a_departure_is_heard_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    one.issued["gather"], two.issued["gather"] = 3, 3
    two.set_progress(7, 0)
    two.leave("has closed its engine", Presence.CLOSING)
    Watchdog(one, Waiting("the third gather", "gather 3", "gather", 3)).raise_if_in_vain()
    Watchdog(one, Waiting("a gather of others", "gather 1")).raise_if_in_vain()
    with raises("another-rank-left", "rank 1 has closed its engine after step 7", "rank 0 goes on", "the"):
        Watchdog(one, Waiting("the fourth gather", "gather 4", "gather", 4)).raise_if_in_vain()
    one.leave("has closed its engine", Presence.CLOSING)
    assert meeting.meet_to_close(one) == "", "all close"
    Watchdog(one, Waiting("the fourth gather", "gather 4", "gather", 4)).raise_if_in_vain()
    two.leave("has ended its process", error=KeyError("x"))
    with raises("another-rank-left", "ended its process after step 7, without", "(KeyError: 'x')"):
        Watchdog(one, Waiting("the fourth gather", "gather 4", "gather", 4)).raise_if_in_vain()
    assert meeting.meet_to_close(one).startswith("rank 1 has ended its process")


def test_who_closes_waits_for_all_and_says_who_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (one, two, three), _ = failures_of_ranks(monkeypatch, 3)
    monkeypatch.setattr(meeting, "_WARN_AFTER_S", 0.0)
    for each in (one, two, three):
        each.issued["reduce"] = 4
    one.leave("has closed its engine", Presence.CLOSING)
    two.leave("has closed its engine", Presence.CLOSING)
    assert meeting.meet_to_close(one).startswith("rank 2 says nothing")
    (told,) = caplog.messages  # once, long before it gives up
    assert told.startswith("engine.close() on rank 0 waits for every rank to close its engine; it gives up after")
    assert "Missing: rank 2 says nothing" in told
    three.issued["reduce"] = 5
    three.leave("has closed its engine", Presence.CLOSING)
    assert "rank 2 has closed its engine, in the midst of other collectives" in meeting.meet_to_close(one)


def test_who_gave_up_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    one.issued["reduce"], two.issued["reduce"] = 4, 4
    two.give_up("no answer")
    two.leave("has closed its engine", Presence.CLOSING)
    one.leave("has closed its engine", Presence.CLOSING)
    assert meeting.meet_to_close(one) == "rank 1 has closed its engine (gave up: no answer)"


def test_a_cause_is_told_before_its_consequence(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two, three), _ = failures_of_ranks(monkeypatch, 3)
    for each in (one, two, three):
        each.issued["gather"] = 1
    waiting = Waiting("a gather", "gather 2", "gather", 2)
    two.give_up("because of rank 2")
    two.leave("has ended its process")
    with raises("another-rank-failed", "rank 1", "gave up", "because of rank 2"):
        Watchdog(one, waiting).raise_if_in_vain()
    three.leave("has closed its engine", Presence.CLOSING)
    with raises("another-rank-left", "rank 2 has closed its engine"):
        Watchdog(one, waiting).raise_if_in_vain()


def test_the_process_that_a_rank_forks_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    two.issued["gather"] = 1
    monkeypatch.setattr(os, "getpid", lambda: -1)
    two.leave("has ended its process")
    assert one.departures() == {}


def standing(group: str, place: int, issued: dict[str, int], channel: int = 0, shape: str = "") -> Waiting:
    return Waiting(f"{group} {place}", f"{group} {place}", group, place, shape, channel, issued)


def test_only_ranks_that_cannot_go_on_are_in_a_deadlock() -> None:
    reduces = standing("reduce", 4, {"reduce": 4, "control": 2})
    saves = standing("control", 3, {"reduce": 3, "control": 3})
    assert list(deadlock(0, {0: reduces, 1: saves})) == [0, 1]
    assert list(deadlock(1, {0: reduces, 1: saves})) == [1, 0]
    assert not deadlock(0, {0: reduces, 1: standing("reduce", 4, {"reduce": 4})}), "both wait for a third"
    assert not deadlock(0, {0: reduces, 1: standing("control", 2, {"reduce": 3, "control": 2})}), "rank 0 issued that"
    assert not deadlock(0, {0: reduces, 1: standing("control", 3, {"reduce": 4, "control": 3})}), "it needs rank 0"
    assert not deadlock(0, {0: reduces, 1: standing("control", 3, {"reduce": 3}, channel=1)}), "another engine"
    one, two = (standing("gather", 5, {"gather": 5}, shape=shape) for shape in ("all-gather 8", "broadcast 8"))
    assert list(deadlock(0, {0: one, 1: two})) == [0, 1] and not deadlock(0, {0: one, 1: one})


def test_ranks_that_send_unequal_parts_of_one_collective_do_meet() -> None:
    waits = {}
    for rank, sent in enumerate((8, 24)):
        of = Collective(GroupName.REDUCE, "all-to-all", "b", ("w",), sent, Purpose.ROWS, agreed=32)
        record = CollectiveRecord(3, 2, of)
        waits[rank] = replace(record.waiting(rank), issued={"reduce": 2})
    assert not deadlock(0, waits)


def test_a_deadlock_of_three_is_found_and_a_tail_is_not_in_it() -> None:
    waits = {
        0: standing("a", 1, {"a": 1, "b": 1}),
        1: standing("b", 1, {"b": 1, "c": 1}),
        2: standing("c", 1, {"c": 1, "a": 1}),
        3: standing("a", 1, {"a": 1, "b": 1, "c": 1}),
    }
    assert [list(deadlock(rank, waits)) for rank in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], []]


def test_a_deadlock_that_has_not_stood_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, two), _ = failures_of_ranks(monkeypatch)
    monkeypatch.setattr(watchdog, "POST_AFTER_S", 0.0)
    one.issued.update(reduce=4, control=2)
    two.issued.update(reduce=3, control=3)
    mine = Waiting("a reduce", "reduce 4", "reduce", 4)
    two.post(Waiting("a save", "control 3", "control", 3))
    watching = Watchdog(one, mine)
    watching.raise_if_in_vain()
    two.post(None)
    time.sleep(0.15)
    watching.raise_if_in_vain()
    two.post(Waiting("a save", "control 3", "control", 3))
    with pytest.raises(MismatchError, match=r"rank 0 stands in a call \(a reduce\), rank 1 stands in a call \(a save"):
        look_twice_at(watching)


def look_twice_at(watching: Any) -> None:
    watching.raise_if_in_vain()
    time.sleep(0.15)
    watching.raise_if_in_vain()


def test_what_is_said_of_a_place_is_no_older_than_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its call a wait is no longer posted, also where it failed."""
    (one, two), _ = failures_of_ranks(monkeypatch)
    two.post(Waiting("a gather", "gather 1"))
    with two.reports_failure("step 1", lambda error: "block"):
        assert one.waits() == {}
    look_twice(one)
