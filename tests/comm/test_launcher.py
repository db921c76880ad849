"""shardengine.launch: values, environment, failures, and what cannot be sent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardengine.comm import launcher
from shardengine.comm.launcher import _SPREAD_S, cores, default_ranks, launch, rank_environment
from shardengine.comm.rank_failure import RankFailure, describe_exit
from shardengine.errors import CommunicationError, ShardEngineError
from shardengine.kernels import native
from tests.comm.test_rendezvous import clean
from tests.support import HANG_S
from tests.support.forks import Forks
from tests.support.raising import raises
from tests.support.scripts import printed


def summed(offset: int):
    mine = torch.ones(3) * (dist.get_rank() + offset)
    dist.all_reduce(mine)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    return mine, {name: os.environ[name] for name in names}, torch.get_num_threads()


class Unhappy(Exception):
    """Cannot be unpickled: its constructor wants two arguments."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} {why}")


def one_raises(kind: str):
    if dist.get_rank() == 1:
        if "killed" in kind:
            os.kill(os.getpid(), 9)
        raise Unhappy("very", "much") if kind == "unpicklable" else ValueError("rank one says no")
    try:
        dist.all_reduce(torch.ones(1))  # never completes: the peer is gone
    except RuntimeError as error:
        if kind == "killed, wrapped":
            raise ValueError("the step has failed") from error
        if kind == "aborts":
            os.abort()  # as a communication library does that finds its peer gone
        raise


def one_reports_late():
    if dist.get_rank() == 1:
        try:
            raise ValueError("rank one says no")
        finally:
            dist.destroy_process_group()  # so that rank 0 is the first to report
            time.sleep(2 * _SPREAD_S)
    dist.all_reduce(torch.ones(1))


@pytest.mark.core
def test_values_come_back_in_rank_order_and_the_group_works():
    before = dict(os.environ)
    results = launch(summed, 3, (10,))
    assert dict(os.environ) == before
    for rank, (value, environment, threads) in enumerate(results):
        assert torch.equal(value, torch.full((3,), 33.0))
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert threads == int(environment["OMP_NUM_THREADS"])


def test_one_rank_is_the_same_path():
    [(value, environment, _)] = launch(summed, 1, (5,))
    assert torch.equal(value, torch.full((3,), 5.0))
    assert environment["WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("plain", ValueError, "rank one says no"),
        ("unpicklable", ShardEngineError, "Unhappy: very much"),
        ("aborts", ValueError, "rank one says no"),
        ("killed", ShardEngineError, "rank 1 was killed by SIGKILL"),
        ("killed, wrapped", ShardEngineError, "rank 1 was killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_raised_and_ends_the_others(kind: str, error: type[Exception], text: str):
    started = time.monotonic()
    with pytest.raises(error, match=text) as caught:
        launch(one_raises, 2, (kind,))
    assert time.monotonic() - started < HANG_S
    if "killed" not in kind:
        cause = str(caught.value.__cause__)
        assert "Traceback of rank 1" in cause
        assert "in one_raises" in cause


def test_the_failure_that_others_suffer_from_is_waited_for():
    with pytest.raises(ValueError, match="rank one says no"):
        launch(one_reports_late, 2)


def failure(rank: int, error: BaseException) -> RankFailure:
    try:
        raise error
    except BaseException as raised:
        return RankFailure.of(rank, raised)


def test_which_of_several_failures_is_reported():
    lost, silent = failure(0, CommunicationError("all_gather: rank 3 is gone")), RankFailure(3, -9)
    backend, own = failure(1, dist.DistBackendError("NCCL: remote process exited")), failure(2, ValueError("no data"))
    assert RankFailure.first([lost, backend]) is lost  # the earliest
    assert RankFailure.first([lost, silent, backend]) is silent
    assert RankFailure.first([lost, silent, own, failure(4, KeyError("later"))]) is own
    assert RankFailure.first([]) is None


@pytest.mark.parametrize("ranks", [0, -1, True, 2.0])
def test_ranks_must_be_a_positive_integer(ranks):
    with raises("launch-ranks-invalid"):
        launch(summed, ranks)


def test_what_cannot_be_pickled_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardengine.comm.launcher.find_spec", lambda name: None)  # as without cloudpickle
    with raises("launch-function-not-sendable"):
        launch(lambda: None)


def test_a_script_without_the_main_guard_is_told(tmp_path: Path):
    script = tmp_path / "careless.py"
    program = "from shardengine import launch\ndef f():\n    return 1\nlaunch(f, 1)\n"
    script.write_text(program, encoding="utf-8")
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    environment = os.environ | path
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=HANG_S)
    assert done.returncode != 0
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr


def test_rank_environment_keeps_what_is_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("shardengine.comm.launcher.cores", lambda: 8)
    assert rank_environment(3)["OMP_NUM_THREADS"] == "2"
    assert rank_environment(100)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in rank_environment(3)


@pytest.mark.parametrize(
    ("values", "torchs", "threads"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 1, 8),  # torchrun's own default
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "32"}, 1, 1),
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "4", "LOCAL_WORLD_SIZE": "2"}, 4, None),  # the user's
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 3, None),  # set_num_threads
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "1"}, 16, None),  # torchrun sets nothing for one rank
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, 1, None),
        ({"SHARDENGINE_THREADS": "3"}, 1, 3),
        (
            {"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2", "SHARDENGINE_THREADS": "1"},
            1,
            1,
        ),
    ],
)
def test_threads_of_the_host(values: dict[str, str], torchs: int, threads: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", clean(**values))
    monkeypatch.setattr(launcher, "cores", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    assert launcher.host_threads(offloads=True) == threads
    said = int(values["SHARDENGINE_THREADS"]) if "SHARDENGINE_THREADS" in values else None
    assert launcher.host_threads(offloads=False) == said


def test_threads_that_are_no_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHARDENGINE_THREADS", "all")
    with raises("launch-threads-invalid", "SHARDENGINE_THREADS", "'all'"):
        launcher.host_threads(offloads=False)


THREADS_UNDER_TORCHRUN = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout, force=True)
from shardengine.comm import launcher
from shardengine.kernels.native import calls
import shardengine
launcher.cores = lambda: 6
used, loaded = [], calls.load()

def noted(instruction_set, threads, arguments):
    used.append(threads)
    loaded.update(instruction_set, threads, arguments)

calls._library = lambda: loaded._replace(update=noted)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 1.0}}}
for device in ("none", "cpu"):
    zero = {"stage": 1, "offload_optimizer": {"device": device}}
    engine = shardengine.initialize(torch.nn.Linear(4, 1), {**config, "zero_optimization": zero})
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.close()
print(f"rank {engine.rank}: {used} {torch.get_num_threads()}")
"""
TORCHRUN_SAYS = ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID")


@pytest.mark.skipif(native.load() is None, reason="no compiler, so torch does the work of the native kernels")
def test_the_step_on_the_host_under_torchrun(forks: Forks, tmp_path: Path):
    """What torchrun says to its ranks, and what ranks do that are told so."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    environment = clean()
    environment.pop("OMP_NUM_THREADS", None)
    command += ["sh", "-c", " ".join(["echo", *(f"${name}" for name in TORCHRUN_SAYS)])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    said = {tuple(line.split()) for line in done.stdout.splitlines()}
    ((size, threads, job),) = said
    assert (size, threads) == ("2", "1") and job
    script = tmp_path / "script.py"
    script.write_text(THREADS_UNDER_TORCHRUN, encoding="utf-8")
    told = dict(zip(TORCHRUN_SAYS, (size, threads, job), strict=True))
    lines = printed(forks, 2, script, where=tmp_path, environment=told).splitlines()
    assert {"rank 0: [1, 3] 1", "rank 1: [1, 3] 1"} <= set(lines)
    assert sum("native kernels take 3 thread(s) of the host" in line for line in lines) == 1


def test_defaults(monkeypatch: pytest.MonkeyPatch):
    assert 1 <= cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert default_ranks() == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert default_ranks() == 3
    monkeypatch.setenv("SHARDENGINE_DEVICE", "cpu")
    assert default_ranks() == 2
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-15) == "was killed by SIGTERM"


def backend_and_wish():
    return dist.get_backend(), os.environ["SHARDENGINE_DEVICE"]


@pytest.mark.parametrize(
    ("gpus", "wish", "warning"),
    [
        (1, "", "launch: 1 GPU(s) are visible for 2 ranks: the ranks compute on the CPU. Start at most 1"),
        (0, "", ""),
        (2, "cpu", ""),
    ],
)
def test_gpus_that_are_not_used_are_told_once(gpus: int, wish: str, warning: str, monkeypatch, caplog):
    monkeypatch.setenv("SHARDENGINE_DEVICE", wish)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert launch(backend_and_wish, 2) == [("gloo", "cpu")] * 2  # so nobody says it again
    assert bool(caplog.text) == bool(warning)
    assert warning in caplog.text


def test_too_few_gpus_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHARDENGINE_DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with raises("launch-too-few-gpus", "1 GPU(s) are visible for 2 ranks"):
        launch(backend_and_wish, 2)
