"""Failures in training: what ranks say when one raises, hangs, dies or goes another way; and ``engine.reset()``."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardengine
from shardengine import kernels
from shardengine.comm import mesh as mesh_module
from shardengine.comm import watchdog, work
from shardengine.errors import CommunicationError, MismatchError, UsageError
from tests.support import HANG_S, cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool
from tests.support.special_models import Boom, Explode

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)
STEPS = 4
FAILING = 1
"""The step in which something goes wrong."""


def make_engine(stage: str, timeout_s: float, micros: int = 1, **options: Any) -> Any:
    """An engine with process groups of its own, which may be ruined, in small buckets."""
    model = cases.make_mlp()
    config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 600}, timeout_s=timeout_s, **options)
    return shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"))


def fail_once(owner: Any, name: str, good_calls: int) -> None:
    """Let ``owner.name`` raise once, after some calls that pass."""
    plain, calls = getattr(owner, name), 0

    def instead(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > good_calls:
            restore()
            raise Boom("on purpose")
        return plain(*args, **kwargs)

    own = name in owner.__dict__

    def restore() -> None:
        if own:
            owner.__dict__[name] = plain
        else:
            del owner.__dict__[name]

    owner.__dict__[name] = instead


def stop_after_buckets(optimizer: Any, count: int) -> None:
    """Let the coming update raise when some buckets are stepped, once."""
    plain = optimizer.step_buckets

    def interrupted() -> Iterator[Any]:
        del optimizer.__dict__["step_buckets"]
        for number, bucket in enumerate(plain()):
            if number == count:
                raise Boom("on purpose")
            yield bucket

    optimizer.__dict__["step_buckets"] = interrupted


def raise_in(engine: Any, place: str) -> None:
    """Let the engine's current step raise in ``place`` on this rank, once."""
    core, block = engine._core, engine.module.blocks[1]

    def in_forward(*_: Any) -> None:
        handle.remove()
        raise Boom("on purpose")

    def in_backward(_module: Any, _args: Any, output: Tensor) -> Any:
        handle.remove()
        return Explode.apply(output)

    if place == "forward":
        handle = block.register_forward_pre_hook(in_forward)
    elif place == "backward":
        handle = block[1].register_forward_hook(in_backward)
    elif place == "before the update":
        fail_once(core.schedule, "reshard_all", 0)
    elif place == "between two buckets":
        stop_after_buckets(engine.optimizer, 2)
    elif place == "inside of a bucket":
        fail_once(kernels, "update", 2)
    elif place == "after the update":
        fail_once(core.reducer, "discard", 0)


@contextmanager
def listening_closely() -> Iterator[None]:
    """Shorter times, so that many cases can be tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "STANDS_S", 0.3)
        patch.setattr(work, "_SLICE", timedelta(seconds=0.1))
        yield


def train_through(
    engine: Any, go_wrong: Callable[[Any], None], recover: Callable[[Any, Exception], None]
) -> dict[str, Any]:
    """As ``cases.train_engine``; go_wrong: called once, before step FAILING; recover: with what was raised."""
    losses: dict[int, list[float]] = {}
    norms: dict[int, float] = {}
    was_applied: dict[int, bool] = {}
    fresh = True
    while (step := engine.global_steps) < STEPS:
        if step == FAILING and fresh:
            fresh = False
            go_wrong(engine)
        try:
            losses[step] = []
            for micro in range(engine.gradient_accumulation_steps()):
                loss = cases.loss_of(engine, step, engine.rank, micro)
                losses[step].append(loss.item())
                engine.backward(loss)
                engine.step()
        except (Boom, CommunicationError) as error:
            recover(engine, error)
        if engine.global_steps > step:
            norms[step] = engine.get_global_grad_norm()
            was_applied[step] = engine.was_step_applied()
    weights = {name: cases.copy_out(value).float().numpy() for name, value in engine.state_dict().items()}
    result: dict[str, Any] = {"losses": list(losses.values()), "norms": list(norms.values()), "weights": weights}
    result["skipped"] = [step for step, applied in was_applied.items() if not applied]
    result["state"] = cases.local_state(engine)
    engine.close()
    return result


def check(results: list[dict[str, Any]], stage: str, micros: int = 1, **dtypes: Any) -> None:
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, cases.truth("mlp", "AdamW", len(results), micros, order, STEPS, **dtypes))


def raise_on_one_rank(stage: str, place: str, failing: int, micros: int, **options: Any) -> dict[str, Any]:
    with listening_closely():
        return raise_at_shipped_times(stage, place, failing, micros, **options)


def raise_at_shipped_times(stage: str, place: str, failing: int, micros: int, **options: Any) -> dict[str, Any]:
    engine = make_engine(stage, 20, micros, **options)
    said: list[str] = []

    def go_wrong(engine: Any) -> None:
        said.append(str(time.monotonic()))
        if engine.rank == failing:
            raise_in(engine, place)

    def recover(engine: Any, error: Exception) -> None:
        said[:] = [f"{type(error).__name__}: {error}", str(time.monotonic() - float(said[0]))]
        engine.reset()

    return {**train_through(engine, go_wrong, recover), "said": said}


PLACES = ["forward", "backward", "before the update", "between two buckets", "after the update"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("stage", "ranks", "micros"),
    [
        *((stage, 2, 1) for stage in ("0", "1", "2", "3")),
        ("1", 3, 2),
        ("3k", 3, 2),
        ("3 hybrid", 4, 2),
        ("3 hpZ", 4, 1),
    ],
)
def test_an_exception_on_one_rank_ends_the_others_soon_and_reset_trains_on(
    pools: Pools, stage: str, ranks: int, micros: int, place: str
) -> None:
    failing = ([*STAGES, *cases.HYBRID].index(stage) + PLACES.index(place)) % 2  # every stage and every place sees both
    results = pools(ranks).run(raise_on_one_rank, stage, place, failing, micros)
    check(results, stage, micros)
    check_what_was_said(results, stage, place, failing, within_s=5)


def check_what_was_said(
    results: list[dict[str, Any]], stage: str, place: str, failing: int, *, within_s: float
) -> None:
    assert results[failing]["said"][0] == "Boom: on purpose"
    call = place if place in ("forward", "backward") else "step"
    module = ", module 'blocks.1'" if call == "forward" else ""
    for rank, result in enumerate(results):
        text, seconds = result["said"]
        assert float(seconds) < within_s
        if rank == failing:
            continue
        said = f"CommunicationError: rank {failing} raised: Boom: on purpose (in {call} of step {FAILING + 1}, micro"
        assert said in text and f"on rank {rank} for" in text and "engine.reset()" in text, text
        unit = "the root" if not stage.startswith("3") else r"blocks\.1" if call != "step" else r"blocks\.\d"
        assert re.search(rf"-batch \d, unit '{unit}'{module}\)", text), text


def test_the_shipped_times_end_a_wait_within_seconds(pools: Pools) -> None:
    """Whatever ran before in the rank processes; ``timeout_s`` is 20 here."""
    results = pools(2).run(raise_at_shipped_times, "2", "backward", 0, 1)
    check_what_was_said(results, "2", "backward", 0, within_s=15)


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_update_of_bf16_weights_is_finished(pools: Pools, stage: str) -> None:
    results = pools(2).run(raise_on_one_rank, stage, "between two buckets", 0, 1, bf16={"enabled": True})
    check(results, stage, low=torch.bfloat16)


@pytest.mark.parametrize("place", ["forward", "between two buckets"])
def test_weights_that_had_not_arrived_are_gathered_again(pools: Pools, place: str) -> None:
    results = pools(2).run(raise_on_one_rank, "1", place, 1, 1, overlap_param_gather=True)
    check(results, "1")


def tear(stage: str) -> str:
    engine = make_engine(stage, 20)
    with pytest.raises((Boom, CommunicationError)), listening_closely():
        if engine.rank == 1:
            raise_in(engine, "inside of a bucket")
        for step in range(2):
            engine.backward(cases.loss_of(engine, step, engine.rank, 0))
            engine.step()
    if engine.rank == 1:
        with pytest.raises(UsageError, match=r"engine\.reset\(\) on every rank, which finishes it"):
            engine.zero_grad()
    try:
        engine.reset()
    except UsageError as error:
        engine.close()
        return str(error)
    return "nothing"


@pytest.mark.parametrize("stage", ["0", "2"])
def test_an_update_torn_inside_of_a_bucket_cannot_be_finished(pools: Pools, stage: str) -> None:
    for text in pools(2).run(tear, stage):
        assert "step 1 was applied to some weights, and ranks [1] cannot finish it" in text and "checkpoint" in text


def raise_everywhere(stage: str) -> dict[str, Any]:
    """On every rank at the same place, caught there; one rank takes longer than reports must stand to go on."""
    engine = make_engine(stage, 20)

    def recover(engine: Any, error: Exception) -> None:
        if not isinstance(error, Boom):
            raise error
        time.sleep(1.5 * (engine.rank == 1))
        engine.zero_grad()

    with listening_closely():
        return train_through(engine, lambda engine: raise_in(engine, "backward"), recover)


def test_an_exception_on_every_rank_is_no_alarm(pools: Pools) -> None:
    check(pools(2).run(raise_everywhere, "3"), "3")


def hang(stage: str, how: str, folder: str) -> dict[str, Any]:
    """Rank 1 hangs until the others have given up, and comes while their reset() waits for it."""
    engine = make_engine(stage, 5)
    said: list[str] = []
    others = [str(Path(folder, str(rank))) for rank in (0, 2)]

    def go_wrong(engine: Any) -> None:
        if engine.rank != 1:
            return
        if how == "sleeps":
            while not all(Path(other).exists() for other in others):
                time.sleep(0.05)
            return
        waits = " || ".join(f"! test -e {shlex.quote(other)}" for other in others)
        subprocess.Popen(["sh", "-c", f"while {waits}; do sleep 0.05; done; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def recover(engine: Any, error: Exception) -> None:
        said.append(str(error))
        Path(folder, str(engine.rank)).touch()
        engine.reset()

    with listening_closely():
        return {**train_through(engine, go_wrong, recover), "said": said}


@pytest.mark.parametrize(("stage", "how"), [("1", "sleeps"), ("3", "is stopped")])
def test_a_rank_that_hangs_is_named_and_reset_trains_on(pools: Pools, tmp_path: Path, stage: str, how: str) -> None:
    results = pools(3).run(hang, stage, how, str(tmp_path))
    check(results, stage)
    for rank in (0, 2):
        (text,) = results[rank]["said"]
        assert "Missing: rank 1 says nothing" in text, text
        assert re.search(rf"(all-gather|reduce-scatter) number \d+ on rank {rank} for bucket \d+ \(\w+", text), text


def save_on_rank_0(stage: str, folder: str) -> str:
    engine = make_engine(stage, 3)
    try:
        if engine.rank == 0:
            engine.save_pretrained(folder)
        engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
    except CommunicationError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("stage", ["2"])
def test_a_collective_call_on_one_rank_names_what_both_wait_for(pools: Pools, stage: str, tmp_path: Path) -> None:
    zero, one = pools(2).run(save_on_rank_0, stage, str(tmp_path / "model"))
    reduction = "reduce-scatter number 1 on rank 1 for bucket"
    exchange = r"exchange number \d+ on rank 0 for call save_pretrained"
    assert re.match(exchange, zero) and f"Missing: rank 1 waits for {reduction}" in zero, zero
    assert one.startswith(reduction) and re.search(f"Missing: rank 0 waits for {exchange}", one), one


def differ_in_options() -> str:
    engine = make_engine("1", 20, micros=2)
    engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
    engine.step()
    engine.optimizer.param_groups[0]["lr"] = 0.25 + engine.rank
    with pytest.raises(MismatchError) as caught:
        engine.reset()
    assert not engine.is_gradient_accumulation_boundary(), "the window is dropped all the same"
    return str(caught.value)


def test_reset_finds_optimizer_options_that_differ(pools: Pools) -> None:
    for text in pools(2).run(differ_in_options):
        assert "optimizer options after reset() differs" in text and "1.25" in text


def reset_or_close(stage: str) -> str:
    engine = make_engine(stage, HANG_S)
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    with pytest.raises(CommunicationError) as raised:
        if engine.rank:
            engine.close()
            raise CommunicationError("closed")
        engine.reset()
    return str(raised.value)


@pytest.mark.parametrize("stage", ["1", "3"])
def test_reset_ends_at_once_where_another_rank_has_closed_its_engine(stage: str) -> None:
    pool = RankPool(2)
    began = time.monotonic()
    said, _ = pool.run(reset_or_close, stage)
    pool.stop(force=True)
    assert said.startswith(
        "engine.reset() on rank 0: expected every rank to call it, but rank 1 has closed its engine after step 1"
    )
    assert time.monotonic() - began < HANG_S / 4


def reset_twice(stage: str) -> dict[str, Any]:
    """For no reason, before the first step, and in the middle of a window; over a mesh of the caller's."""
    network = cases.make_mlp()
    mesh = mesh_module.build(torch.device("cpu"), 20) if torch.distributed.is_initialized() else None
    engine = shardengine.initialize(
        network, cases.config_of(stage, 2), optimizer=cases.make_optimizer(network, "AdamW"), mesh=mesh
    )
    engine.reset()

    def go_wrong(engine: Any) -> None:
        engine.backward(cases.loss_of(engine, 66, engine.rank, 0))
        engine.step()
        engine.reset()

    return train_through(engine, go_wrong, lambda _engine, error: None)


@pytest.mark.parametrize("stage", STAGES)
def test_reset_without_a_failure_drops_the_window(pools: Pools, stage: str) -> None:
    check(pools(2).run(reset_twice, stage), stage, 2)
    check([reset_twice(stage)], stage, 2)
