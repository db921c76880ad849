"""``engine.join``: what ranks hear when one runs out of data, what is refused inside, failures, bytes on the wire.

That the training is the oracle's is ``tests/parity/test_join.py``'s.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from shardengine.errors import CommunicationError, EarlyTerminationError, MismatchError
from tests import oracle
from tests.comm.test_uneven_data import listening_closely, make_engine, said_by, train
from tests.parity.test_join import Run, assert_true, facts_of, truth_of
from tests.parity.test_join import train_through as train_counted
from tests.stages.test_traffic import Case, Sizes, counted, make_model
from tests.support import cases
from tests.support import special_models as models
from tests.support.comparing import assert_same, expected_state
from tests.support.ranks import RankFailure, RankPool
from tests.support.special_losses import net, regression

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)
TIMEOUT_S = 110.0
"""A rank that waits for so long has not been told."""


def small(stage: str, micros: int = 1, **options: Any) -> Any:
    zero = {"reduce_bucket_size": 600, **options.pop("zero", {})}
    return cases.make_engine(cases.make_mlp(), cases.config_of(stage, micros, zero=zero, **options), "AdamW")


# Early termination


def terminate(counts: list[int], micros: int, stages: list[str]) -> list[dict[str, Any]]:
    """Until a rank runs dry, and a step more afterwards."""
    found = []
    for stage in stages:
        engine = small(stage, micros)
        losses: list[float] = []

        def body(engine: Any = engine, losses: list[float] = losses) -> None:
            with engine.join(throw_on_early_termination=True):
                for number in range(counts[engine.rank]):
                    losses += train(engine, number, number + 1)

        said = said_by(body)
        done = engine.global_steps
        later = train(engine, 10 * micros, 11 * micros)
        found.append({"said": said, "losses": losses, "later": later, "done": done, **facts_of(engine)})
        engine.close()
    return found


@pytest.mark.parametrize(
    ("counts", "micros", "done", "fewer", "had"),
    [
        ([2, 4], 1, 2, [0], "rank 0 had 0"),
        ([3, 0], 1, 0, [1], "rank 1 had 0"),
        ([4, 9], 3, 1, [0], "rank 0 had 1"),
        ([7, 8], 3, 2, [0], "rank 0 had 1"),
        ([5, 3, 3], 1, 3, [1, 2], "rank 1 had 0, rank 2 had 0"),
        ([3, 4, 6], 2, 1, [0], "rank 0 had 1"),
    ],
)
def test_all_ranks_raise_when_the_first_runs_dry(
    pools: Pools, counts: list[int], micros: int, done: int, fewer: list[int], had: str
) -> None:
    by_rank = pools(len(counts)).run(terminate, counts, micros, STAGES)
    others = [rank for rank in range(len(counts)) if rank not in fewer]
    for number, stage in enumerate(STAGES):
        network = cases.make_mlp()
        truth = oracle.train(
            network, lambda model, step, rank, micro: cases.loss_of(model, step if step < done else 10, rank, micro),
            ranks=len(counts), micros=micros, steps=done + 1, groups=cases.groups_of(network, "AdamW"),
            order=cases.LETTER[stage] if micros > 1 else "full", clip=cases.CLIP,
        )  # fmt: skip
        for rank, found in enumerate(row[number] for row in by_rank):
            where = f"stage {stage}, rank {rank}"
            assert found["said"].startswith("EarlyTerminationError: engine.join(throw_on_early_termination=True)"), (
                where
            )
            expected = f"ranks {fewer} have run out of data before ranks {others} (micro-batches of this step: {had})"
            assert expected in found["said"], f"{where}: {found['said']}"
            assert found["done"] == done, where
            assert found["later"] == truth.losses[-1][rank], where
        assert_same(by_rank[0][number]["weights"], truth.shown, stage)
        assert_same(cases.assemble([row[number]["state"] for row in by_rank]), expected_state(truth), stage)


@pytest.mark.parametrize(("counts", "micros"), [([2, 2], 1), ([4, 4, 4], 3)])
def test_nothing_is_raised_where_all_run_dry_together(pools: Pools, counts: list[int], micros: int) -> None:
    for row in pools(len(counts)).run(terminate, counts, micros, STAGES):
        assert [found["said"] for found in row] == ["nothing"] * len(STAGES)
        assert {found["done"] for found in row} == {-(-counts[0] // micros)}


def test_the_error_is_a_runtime_error() -> None:
    assert issubclass(EarlyTerminationError, RuntimeError) and issubclass(EarlyTerminationError, MismatchError)


# Bytes on the wire


def count(stage: str, micros: int, counts: list[int]) -> list[tuple[list[int], list[list[int]], int]]:
    """Data of each window, as this rank sends it, payloads of control messages, and what the engine says."""
    engine = cases.make_engine(make_model("mlp"), Case(stage, micros, None).config())
    train(engine, 0, micros)
    data, control = [], []
    with counted() as counter:

        def next_window() -> None:
            sent, messages = counter.take()
            data.append(sent)
            control.append(messages)

        plain = engine._close_window

        def close_window(*args: Any) -> int:
            done = plain(*args)
            next_window()
            return done

        engine.__dict__["_close_window"] = close_window
        with engine.join():
            train(engine, micros, micros + counts[engine.rank])
        next_window()
    del engine.__dict__["_close_window"]
    train(engine, 9 * micros, 10 * micros)
    said = engine.traffic()["measured_bytes_last_step"]
    engine.close()
    return [(data, control, said)]


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_byte_more_in_the_message_and_one_window_more(pools: Pools, stage: str, ranks: int, micros: int) -> None:
    counts = [4 * micros, micros, 2 * micros][:ranks]
    case = Case(stage, micros, None)
    whole, sizes = case.expected(ranks), Sizes.of(make_model("mlp"), ranks, case)
    published = {"1": sizes.trained, "2": sizes.trained}.get(stage, 0) * (ranks - 1) // ranks
    parameters = len(list(make_model("mlp").parameters()))
    message = 8 + 8 * parameters + 8 + 4 + parameters // 8 + 1 + 1
    for ((data, control, said),) in pools(ranks).run(count, stage, micros, counts):
        assert data == [whole] * 4 + [whole - published]
        assert control == [[message]] * 5
        assert said == whole, "what the last window sent is of no step"


# Misuse: one sentence, and nothing lost


def evaluate(engine: Any) -> None:
    with torch.no_grad():
        cases.loss_of(engine, 9, engine.rank, 0)


def evaluate_module(engine: Any) -> None:
    with torch.no_grad():
        engine.module(torch.randn(2, 7))


def clip_as_torch_does(engine: Any) -> None:
    engine.backward(cases.loss_of(engine, 1, engine.rank, 0))
    try:
        nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    finally:
        engine.step()


def clip(engine: Any) -> None:
    engine.backward(cases.loss_of(engine, 1, engine.rank, 0))
    try:
        engine.clip_grad_norm_(0.1)
    finally:
        engine.step()


def backward_twice(engine: Any) -> None:
    engine.backward(cases.loss_of(engine, 1, engine.rank, 0))
    try:
        engine.backward(cases.loss_of(engine, 2, engine.rank, 0))
    finally:
        engine.step()


def forget(engine: Any) -> None:
    engine.backward(cases.loss_of(engine, 1, engine.rank, 0))
    try:
        engine.zero_grad()
    finally:
        engine.step()


CALLS: dict[str, Callable[[Any], Any]] = {
    "engine.join()": lambda engine: engine.join().__enter__(),
    "full_params()": lambda engine: engine.full_params().__enter__(),
    "full_params(writable=True)": lambda engine: engine.full_params(writable=True).__enter__(),
    "full_grads": lambda engine: engine.full_grads().__enter__(),
    "full_optimizer_state": lambda engine: engine.full_optimizer_state().__enter__(),
    "state_dict": lambda engine: engine.state_dict(),
    "save_pretrained": lambda engine: engine.save_pretrained("nowhere"),
    "load_state_dict": lambda engine: engine.load_state_dict({}),
    "load_checkpoint": lambda engine: engine.load_checkpoint("nowhere"),
    "optimizer.state_dict()": lambda engine: engine.optimizer.state_dict(),
    "reset()": lambda engine: engine.reset(),
    "step(flush=True)": lambda engine: (engine.backward(cases.loss_of(engine, 1, engine.rank, 0)),
                                        engine.step(flush=True)),
    "add_param_group()": lambda engine: engine.optimizer.add_param_group({"params": []}),
    "trace": lambda engine: engine.trace("nowhere").__enter__(),
    "set_gradient_accumulation_boundary()": lambda engine: engine.set_gradient_accumulation_boundary(True),
    "close(restore=False)": lambda engine: engine.close(restore=False),
}  # fmt: skip
INSIDE = "inside engine.join() (rank {}), where ranks that have run out of data would not make that call: expected it"
OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "clip": (clip, 'would not clip; expected "gradient_clipping" in the config'),
    "clip_grad_norm_ of torch": (clip_as_torch_does, "inside engine.join() ranks that have run out of data would not"),
    "backward twice": (backward_twice, "a second backward in the last micro-batch of a step inside engine.join()"),
    "zero_grad in a window": (forget, "zero_grad() inside engine.join()"),
}


def misuse(stage: str) -> dict[str, str]:
    engine = small(stage)
    said = {}
    with engine.join():
        train(engine, 0, 1)
        for name, call in CALLS.items():
            said[name] = said_by(lambda call=call: call(engine))  # type: ignore[misc]
            if name == "step(flush=True)":
                engine.step()
        for name, (call, _) in OTHERS.items():
            said[name] = said_by(lambda call=call: call(engine))  # type: ignore[misc]
        for name, look in (("evaluation", evaluate), ("evaluation of the module", evaluate_module)):
            said[name] = said_by(lambda look=look: look(engine))  # type: ignore[misc]
        engine.zero_grad()
        train(engine, 2, 3)
    said["steps"] = str(engine.global_steps)
    engine.close()
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_what_needs_every_rank_is_refused_inside(pools: Pools, stage: str) -> None:
    for rank, said in enumerate(pools(2).run(misuse, stage)):
        for name in CALLS:
            expected = f"UsageError: {name} {INSIDE.format(rank)}"
            assert said[name].startswith(expected), f"{name}: {said[name]}"
        for name, (_, expected) in OTHERS.items():
            assert said[name].startswith("UsageError: ") and expected in said[name], f"{name}: {said[name]}"
        for name in ("evaluation", "evaluation of the module"):
            if stage in ("3", "3k"):
                assert said[name].startswith(f"UsageError: a forward without grad {INSIDE.format(rank)}"), said[name]
            else:
                assert said[name] == "nothing", "nothing is gathered there"
        assert said["steps"] == str(2 + 1 + len(OTHERS))


def misplaced() -> list[str]:
    engine, other = small("2"), small("3")
    said = []

    def inside(outer: Callable[[], Any], inner: Callable[[], Any]) -> None:
        with outer(), inner():
            pass

    said.append(said_by(lambda: inside(engine.no_sync, engine.join)))
    said.append(said_by(lambda: inside(engine.full_params, engine.join)))
    said.append(said_by(lambda: inside(engine.join, other.join)))
    said.append(said_by(lambda: engine.join(divide_by_initial_world_size=2)))
    said.append(said_by(lambda: engine.join(enable=None)))
    for each in (engine, other):
        train(each, 0, 1)
        each.close()
    halfway = small("1", 2)
    halfway.backward(cases.loss_of(halfway, 0, halfway.rank, 0))
    said.append(said_by(lambda: inside(halfway.join, halfway.no_sync)))
    halfway.step(flush=True)
    halfway.close()
    bare = cases.make_engine(cases.make_mlp(), cases.config_of("2"), None)
    said.append(said_by(lambda: bare.join()))
    bare.close()
    return said


def test_where_a_join_cannot_begin(pools: Pools) -> None:
    expected = [
        "engine.join() inside no_sync()",
        "engine.join() inside full_params()",
        "engine.join() inside another engine's join()",
        "engine.join: expected divide_by_initial_world_size= as True or False, got 2",
        "engine.join: expected enable= as True or False, got None",
        "engine.join() in the middle of a step",
        "join() needs an optimizer",
    ]
    for said in pools(2).run(misplaced):
        for sentence, begin in zip(said, expected, strict=True):
            assert sentence.startswith(f"UsageError: {begin}"), sentence


def refuse_with_steps_in_backward() -> list[str]:
    zero = {"offload_optimizer": {"device": "cpu", "step_in_backward": True}}
    engine = small("2", zero=zero, gradient_clipping=0.0, bf16={"enabled": True})
    said = []
    for options in ({"divide_by_initial_world_size": False}, {"throw_on_early_termination": True}):
        said.append(said_by(lambda options=options: engine.join(**options).__enter__()))  # type: ignore[misc]
    engine.close()
    return said


def test_what_is_known_too_late_for_steps_in_backward(pools: Pools) -> None:
    for said in pools(2).run(refuse_with_steps_in_backward):
        for sentence in said:
            assert sentence.startswith("UsageError: engine.join: with offload_optimizer.step_in_backward"), sentence


def not_on_every_rank(stage: str, how: str) -> tuple[str, str]:
    """Rank 0 has one batch and is in a join; the other one has two and is not, or in another one."""
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S)

        def body() -> None:
            options = {} if engine.rank == 0 else {"enable": False} if how == "enable" else {how: how.startswith("t")}
            with engine.join(**options):
                train(engine, 0, 1 + engine.rank)

        said = said_by(body)
        engine.zero_grad()
        return said, said_by(lambda: train(engine, 5, 6)) + said_by(engine.close)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["enable", "divide_by_initial_world_size", "throw_on_early_termination"])
def test_joins_that_differ_are_named_in_the_first_step(pools: Pools, stage: str, how: str) -> None:
    for said, later in pools(2).run(not_on_every_rank, stage, how):
        assert said.startswith("MismatchError: engine.join()"), said
        if how == "enable":
            assert "is open on ranks [0] and not on ranks [1]" in said, said
        else:
            assert "rank 0: divide_by_initial_world_size=True" in said and f"{how}={how.startswith('t')}" in said, said
        assert later == "nothingnothing"


def closes_while_others_join(stage: str) -> str:
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S)
        train(engine, 0, 1)
        if engine.rank == 1:
            return said_by(engine.close)

        def body() -> None:
            with engine.join():
                pass

        said = said_by(body)
        said_by(engine.close)
        return said


@pytest.mark.parametrize("stage", STAGES)
def test_a_join_of_one_rank_while_the_other_closes(pools: Pools, stage: str) -> None:
    said, _ = pools(2).run(closes_while_others_join, stage)
    assert "rank 1 has closed its engine after step 1; this rank (0) is in leaving join of step 2" in said, said


# Checkpoints


def save_inside(stage: str, folder: str, wait: bool) -> tuple[list[str], str]:
    """Saves while all have data, and once rank 0 has none, which rank 1 knows (wait) or does not."""
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S)
        said = []

        def body() -> None:
            with engine.join():
                train(engine, 0, 1)
                engine.save_checkpoint(folder, "all")
                if engine.rank == 1 and wait:
                    train(engine, 1, 2)
                    said.append(said_by(lambda: engine.save_checkpoint(folder, "one")))
                    train(engine, 2, 3)
                elif engine.rank == 1:
                    engine.save_checkpoint(folder, "one")

        said.append(said_by(body))
        time.sleep(2 * (not wait))  # both have heard
        engine.reset()
        train(engine, 3, 4)
        engine.close()
        return said, str(engine.global_steps)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("wait", [True, False], ids=["known", "not known"])
def test_saving_a_checkpoint(pools: Pools, tmp_path: Path, stage: str, wait: bool) -> None:
    (zero, steps), (one, others) = pools(2).run(save_inside, stage, str(tmp_path), wait)
    assert (tmp_path / "all").is_dir() and not (tmp_path / "one").exists()
    if wait:
        expected = "UsageError: save_checkpoint inside engine.join() (rank 1) after ranks [0] have run out of data"
        assert one[0].startswith(expected), one
        assert [*zero, *one[1:]] == ["nothing"] * 2 and steps == others == "4"
    else:
        said = [*zero, *one]
        assert any(each.startswith("MismatchError: ranks wait for each other") for each in said), said
        for each in said:
            assert "rank 1 stands in save_checkpoint" in each and "rank 0 stands in leaving join" in each, each
        assert steps == others == "2"


# Failures


def raise_in_body(stage: str, recover: bool) -> tuple[str, str, int]:
    """Rank 0 has run dry when rank 1's own code raises."""
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S)

        def body() -> None:
            with engine.join():
                train(engine, 0, 1)
                if engine.rank == 1:
                    train(engine, 1, 2)
                    raise LookupError("no such file")

        said = said_by(body)
        engine.reset()
        later = said_by(lambda: train(engine, 2, 3))
        steps = engine.global_steps
        return said, later + said_by(engine.close), steps


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_of_the_body_is_heard_and_all_go_on(pools: Pools, stage: str) -> None:
    (zero, after_zero, steps), (one, after_one, steps_one) = pools(2).run(raise_in_body, stage, True)
    assert one == "LookupError: no such file"
    assert "rank 1 raised: LookupError: no such file (in engine.join(), in its body)" in zero, zero
    assert after_zero == after_one == "nothingnothing" and steps == steps_one == 3


def raise_in_forward(stage: str) -> tuple[str, str]:
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S)

        def fail(*_: Any) -> None:
            raise models.Boom("on purpose")

        def body() -> None:
            with engine.join():
                train(engine, 0, 1)
                if engine.rank == 1:
                    engine.module.blocks[1].register_forward_pre_hook(fail)
                    train(engine, 1, 2)

        said = said_by(body)
        said_by(engine.reset)
        return said, said_by(engine.close)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_a_call_of_the_engine_that_raises_is_heard_with_its_place(pools: Pools, stage: str) -> None:
    (zero, _), (one, _) = pools(2).run(raise_in_forward, stage)
    assert one == "Boom: on purpose"
    assert "rank 1 raised: Boom: on purpose (in forward of step 2, micro-batch 1, unit" in zero, zero


def die_in_join(stage: str, dead_is_dry: bool, folder: str) -> None:
    """The last rank dies: while it has no data, or while rank 0 has none. What the others said goes into files."""
    engine = make_engine(stage, 4.0)
    lost = engine.world_size - 1
    dry = lost if dead_is_dry else 0

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        with engine.join():
            train(engine, 0, 1)
            if engine.rank != dry:
                train(engine, 1, 2)
            if engine.rank == lost and dead_is_dry:
                engine._core.reducer.finalize_backward = die
            elif engine.rank == lost:
                die()
            elif engine.rank != dry:
                train(engine, 2, 5)
    except CommunicationError as error:
        Path(folder, str(engine.rank)).write_text(str(error))
        raise


@pytest.mark.parametrize("dead_is_dry", [False, True], ids=["one with data", "one without"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_rank_is_named(tmp_path: Path, stage: str, dead_is_dry: bool) -> None:
    with pytest.raises(RankFailure):
        RankPool(3).run(die_in_join, stage, dead_is_dry, str(tmp_path))
    for rank in (0, 1):
        said = (tmp_path / str(rank)).read_text()
        assert "rank 2 says nothing (busy elsewhere, hung or gone)" in said, said
        assert f" on rank {rank} for " in said, said


class Reversed(cases.Mlp):
    """Runs its blocks in another order than it lists them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in reversed(self.blocks):
            x = x + block(x) * self.scale
        return self.out(x)


def run_reversed(stage: str, counts: list[int]) -> tuple[str, int]:
    with listening_closely():
        torch.manual_seed(11)
        model = Reversed()
        config = cases.config_of(stage, zero={"reduce_bucket_size": 600}, timeout_s=TIMEOUT_S)
        engine = shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"))

        def body() -> None:
            with engine.join():
                train(engine, 0, counts[engine.rank])

        said = said_by(body)
        steps = engine.global_steps
        said_by(engine.close)
        return said, steps


def test_another_order_than_that_of_the_modules(pools: Pools) -> None:
    """A rank that ran it once knows the order. One that never did serves another one, and no rank steps with that."""
    for stage in STAGES:
        assert pools(2).run(run_reversed, stage, [1, 3]) == [("nothing", 3)] * 2, stage
    for stage in ("0", "1", "2"):
        assert pools(2).run(run_reversed, stage, [0, 2]) == [("nothing", 2)] * 2, stage
    for stage in ("3k", "3"):
        (zero, steps), (one, others) = pools(2).run(run_reversed, stage, [0, 2])
        assert zero.startswith("MismatchError: rank") and steps == others == 0, zero
        assert "Rank 0 had no data for a whole step inside engine.join() so far, so it gathered units in the" in zero
        assert (
            "ranks run different modules" in one
            or "ranks took part in different collectives" in one
            or "ranks wait for each other" in one
        ), one


# What belongs to steps: the scheduler, hooks, monitors, counters


class Recorder:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None: ...


def train_observed(stage: str, counts: list[int], micros: int) -> dict[str, Any]:
    recorder, called = Recorder(), []
    engine = cases.make_engine(
        cases.make_mlp(),
        cases.config_of(stage, micros),
        "AdamW",
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        monitors=[recorder],
    )
    assert engine.optimizer is not None
    engine.optimizer.register_step_pre_hook(lambda *_: called.append(engine.get_lr()[0]))
    with engine.join():
        losses = train(engine, 0, counts[engine.rank])
    found = {"lr": engine.get_lr(), "called": called, "losses": losses}
    engine.close()
    return {**found, "rows": recorder.rows}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("counts", "micros"), [([1, 4], 1), ([3, 8], 2)])
def test_schedulers_hooks_and_monitors(pools: Pools, stage: str, counts: list[int], micros: int) -> None:
    zero, one = pools(2).run(train_observed, stage, counts, micros)
    rates = [1e-2 * 0.5**step for step in range(5)]
    assert zero["lr"][0] == one["lr"][0] == rates[4]
    assert zero["called"] == one["called"] == rates[:4]
    assert [step for step, _ in zero["rows"]] == [1, 2, 3, 4] and not one["rows"]
    seen = [values.get("loss") for _, values in zero["rows"]]
    means = [sum(zero["losses"][at : at + micros]) / len(zero["losses"][at : at + micros])
             for at in range(0, counts[0], micros)]  # fmt: skip
    assert seen[: len(means)] == pytest.approx(means) and seen[len(means) :] == [None] * (4 - len(means))
    assert all("grad_norm" in values for _, values in zero["rows"])
    samples = [sum(min(count, step * micros) for count in counts) for step in range(1, 5)]
    assert [values["samples"] for _, values in zero["rows"]] == samples


def schedule_by_hand(stage: str) -> str:
    with listening_closely():
        engine = make_engine(stage, TIMEOUT_S)
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)

        def body() -> None:
            with engine.join():
                for step in range(1 + 2 * engine.rank):
                    train(engine, step, step + 1)
                    scheduler.step()

        said = said_by(body)
        said_by(engine.close)
        return said


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_scheduler_that_the_loop_steps_is_named(pools: Pools, stage: str) -> None:
    for said in pools(2).run(schedule_by_hand, stage):
        assert said.startswith("MismatchError: ranks disagree about this step: lr of optimizer group 0 is"), said
        assert "Ranks [0] have run out of data inside engine.join()" in said and "lr_scheduler" in said, said


def halve_in_a_hook(stage: str, counts: list[int]) -> dict[str, Any]:
    """A hook before the step changes gradients, on every rank."""
    engine = small(stage, gradient_clipping=0.0)

    def halve(*_: Any) -> None:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    engine.optimizer.register_step_pre_hook(halve)
    with engine.join():
        train(engine, 0, counts[engine.rank])
    found = facts_of(engine)
    engine.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_before_the_step_may_change_gradients(pools: Pools, stage: str) -> None:
    """Halved after all ranks were added: as a loss that is half of it, where no operation rounds."""
    counts = [1, 3]
    network = cases.make_mlp()
    truth = oracle.train(
        network, lambda *at: cases.loss_of(*at) * 0.5, ranks=2, steps=3, groups=cases.groups_of(network, "AdamW"),
        has=lambda step, rank, micro: step < counts[rank],
    )  # fmt: skip
    results = pools(2).run(halve_in_a_hook, stage, counts)
    assert_same(results[0]["weights"], truth.shown, stage)
    assert_same(cases.assemble([found["state"] for found in results]), expected_state(truth), stage)


def norms_in_body(stage: str) -> list[list[float]]:
    """Norms of single parameters as ``grad`` shows them, where half of the ranks have data."""
    engine = small(stage, gradient_clipping=0.0)
    found = []
    with engine.join(divide_by_initial_world_size=False):
        for step in range(1 + engine.rank):
            engine.backward(cases.loss_of(engine, step, engine.rank, 0))
            norms = [float(p.grad.norm()) for p in engine.module.parameters()]
            found.append([*norms, engine.get_global_grad_norm()])
            engine.step()
    engine.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_shown_gradients_are_divided_by_the_ranks_that_have_data(pools: Pools, stage: str) -> None:
    zero, one = pools(2).run(norms_in_body, stage)
    assert zero[0] == one[0]
    network = cases.make_mlp()
    groups = cases.groups_of(network, "AdamW")
    oracle.train(network, cases.loss_of, ranks=2, steps=1, groups=groups)
    network.zero_grad()
    cases.loss_of(network, 1, 1, 0).backward()
    norms = [float(p.grad.norm()) for p in network.parameters() if p.grad is not None]
    assert one[1] == pytest.approx([*norms, sum(norm**2 for norm in norms) ** 0.5], rel=1e-5)


# How a body ends


def end_oddly(stage: str, how: str) -> dict[str, Any]:
    engine = small(stage, 1)
    run = Run((2, 3))

    def body() -> dict[str, Any]:
        with engine.join():
            if how == "return":
                return train_counted(engine, run)
            found: dict[str, Any] = {"losses": [], "norms": []}
            for step in range(run.counts[engine.rank]):
                loss = cases.loss_of(engine, step, engine.rank, 0)
                engine.backward(loss)
                found["losses"].append(float(loss.item()))
                found["norms"].append(engine.get_global_grad_norm())
                if how == "before step" and step + 1 == run.counts[engine.rank]:
                    break
                engine.step()
            if how == "after forward" and engine.rank == 0:
                torch.manual_seed(0)
                engine(torch.randn(5, 7))
        return found

    found = body() | facts_of(engine)
    engine.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["return", "before step", "after forward"])
def test_a_body_may_end_anywhere(pools: Pools, stage: str, how: str) -> None:
    """After a forward whose backward does not come its gathers are not repeated."""
    run = Run((2, 3))
    assert_true(pools(2).run(end_oddly, stage, how), run, truth_of(run, "full"), f"stage {stage}, {how}")


def buffers_sent(counts: list[int]) -> list[tuple[int, float]]:
    """Whose buffers all ranks have before each window: the last running mean of a rank with data."""
    engine: Any = cases.make_engine(net(models.BatchNormBlock), cases.config_of("2"), "SGD")
    with engine.join():
        for step in range(counts[engine.rank]):
            cases.run_micro_batch(engine, regression, step, 0)
    count = int(engine.module.blocks[0].norm.num_batches_tracked)
    found = [(count, float(engine.module.blocks[0].norm.running_mean.sum()))]
    engine.close()
    return found


@pytest.mark.parametrize("counts", [[1, 4], [0, 3], [3, 1], [1, 2, 5]])
def test_buffers_are_those_of_a_rank_that_has_data(pools: Pools, counts: list[int]) -> None:
    """A rank 0 that has run dry would give everybody old statistics."""
    found = pools(len(counts)).run(buffers_sent, counts)
    assert all(each == found[0] for each in found)
    assert found[0][0][0] == max(counts)


def not_entered() -> str:
    engine = small("0")
    with engine.join(enable=False):
        train(engine, 0, 1)
        engine.state_dict()
    engine.close()
    return "fine"


def test_enable_false_is_no_join(pools: Pools) -> None:
    assert pools(2).run(not_entered) == ["fine"] * 2
