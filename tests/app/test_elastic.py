"""A run goes on with other ranks than before: the same rows, the same global batch, the same directory.

Runs happen in the rank pools; a launcher's variables are set where its ranks would have them. `test_torchrun.py` has
real launchers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardengine.app import command, data, global_mean, job, resume, settings, stopping
from shardengine.app.cli import main
from shardengine.app.restarts import Decision, Restarts, death
from shardengine.comm import RankFailure
from shardengine.config.load import load_config
from shardengine.errors import CommunicationError, ConfigError
from tests.app.test_resume import config, curve, made, on_rank, tag, tags, tiny  # noqa: F401
from tests.app.test_train import numbered
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
# losses of about 5 in fp32, sums over ranks and micro-batches in another order, for a few steps: some 100 roundings
CLOSE = 1e-4


# The order of the data


def rows_of_steps(rows: int, batch: int, ranks: int, first: int, steps: int) -> list[list[int]]:
    """The numbers of the rows that each step reads, sorted, in micro-batches of one."""
    blocks, each = numbered(rows, 2), batch // ranks
    streams = [data.training_batches(blocks, 1, rank, ranks, 5, first * batch) for rank in range(ranks)]
    found = []
    for _ in range(steps):
        found.append(sorted(int(next(stream)["labels"][0, 0]) for stream in streams for _ in range(each)))
    return found


@pytest.mark.parametrize("rows", [29, 24, 5])
def test_every_step_reads_the_same_rows_at_any_number_of_ranks(rows: int):
    epochs = [torch.randperm(rows, generator=torch.Generator().manual_seed(5 + epoch)).tolist() for epoch in range(20)]
    sequence = [row for epoch in epochs for row in epoch]
    expected = [sorted(sequence[12 * step : 12 * step + 12]) for step in range(7)]
    for ranks in (1, 2, 3, 4, 6, 12):
        assert rows_of_steps(rows, 12, ranks, 0, 7) == expected, ranks
        assert rows_of_steps(rows, 12, ranks, 4, 3) == expected[4:], ranks


# The batch


def test_the_accumulation_follows_the_ranks(tmp_path: Path):
    source = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 6}
    (tmp_path / "config.json").write_text(json.dumps(source), encoding="utf-8")
    before = settings.read_config(tmp_path / "config.json", 2)
    for ranks in (1, 2, 3, 4, 6, 12):
        now = settings.keep_batch(before, ranks)
        assert (now.train_batch_size, now.train_micro_batch_size_per_gpu) == (24, 2)
        assert now.gradient_accumulation_steps == 12 // ranks
    for ranks in (5, 8, 24):
        with raises("resume-ranks-do-not-divide", "24", "of 2", "1, 2, 3, 4, 6, 12"):
            settings.keep_batch(before, ranks)


def test_a_config_that_does_not_divide_names_the_ranks_for_which_it_does():
    whole = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}
    with pytest.raises(ConfigError, match=r"Numbers of ranks that fit: 1, 2, 3, 4, 6, 12$"):
        load_config(whole).resolve_batch(5)


# Runs


@pytest.fixture(scope="module")
def calm(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The tiny model without dropout, whose masks would depend on the ranks, its text, and a config of 12 samples."""
    folder = tmp_path_factory.mktemp("calm")
    shutil.copytree(tiny / "model", folder / "model")
    shutil.copy(tiny / "text.txt", folder)
    recipe = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    recipe |= dict.fromkeys([name for name in recipe if name.endswith("_pdrop")], 0.0)
    (folder / "model" / "config.json").write_text(json.dumps(recipe), encoding="utf-8")
    config(folder / "config.json", 2, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=6)
    return folder


def reading(
    arguments: list[str], environment: dict[str, str], stop_after: int, where: Path
) -> tuple[int, str, str, list[list[str]]]:
    """As on_rank, with some variables set; at last the rows that this rank read in each step."""
    fetch, read = global_mean.fetch, []

    def noted(batches: Iterator[data.Batch], count: int, rank_sums: Any) -> global_mean.GlobalBatch:
        window = fetch(batches, count, rank_sums)
        rows = [row.numpy().tobytes() for batch in window.batches for row in batch["input_ids"]]
        read.append([hashlib.sha256(row).hexdigest()[:12] for row in rows])
        return window

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_mean, "fetch", noted)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.chdir(where)
        return *on_rank(arguments, stop_after), read


def run(
    pool: RankPool, *arguments: object, job: str | None = None, stop_after: int = 0, where: Path | str = "."
) -> tuple[str, list[list[str]], str]:
    """(what rank 0 printed, the rows of all ranks in each step, sorted, the exit code and what it complained of)."""
    environment = {} if job is None else {"TORCHELASTIC_RUN_ID": job}
    results = pool.run(reading, ["train", *map(str, arguments)], environment, stop_after, where)
    assert len({code for code, *_ in results}) == 1, results
    steps = [sorted(row for rows in step for row in rows) for step in zip(*(each[3] for each in results), strict=True)]
    return results[0][1], steps, f"{results[0][0]} {results[0][2]}"


def test_a_run_goes_on_with_more_and_with_fewer_ranks(pools: Pools, calm: Path, tmp_path: Path):
    common = ["--config", calm / "config.json", "--model", calm / "model", "--data", calm / "text.txt"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    _, expected, _ = run(pools(2), *common, "--output", whole, "--steps", 5, "--save-every", 5)
    _, first, _ = run(pools(2), *common, "--output", broken, "--steps", 5, "--save-every", 2, stop_after=2)
    assert all(len(step) == 12 for step in expected) and first == expected[:2]
    for ranks in (1, 2, 3):
        copy = shutil.copytree(broken, tmp_path / f"on-{ranks}")
        out, rows, _ = run(pools(ranks), "--resume", copy, "--config", calm / "config.json")
        assert rows == expected[2:]
        assert f"batch:       12 = 1 per rank x {12 // ranks} micro-batch(es) x {ranks} rank(s)" in out
        assert [row[0] for row in curve(copy)] == [1, 2, 3, 4, 5]
        assert curve(copy)[:2] == curve(whole)[:2]
        for now, before in zip(curve(copy), curve(whole), strict=True):
            assert now == pytest.approx(before, abs=CLOSE)
        again = resume.read(str(copy))
        assert (again.ranks, again.first_ranks) == (ranks, 2)
        values = json.loads((copy / "shardengine.json").read_text(encoding="utf-8"))
        assert [values[name] for name in ("train_batch_size", "gradient_accumulation_steps")] == [12, 12 // ranks]
    assert curve(tmp_path / "on-2") == curve(whole)


def test_ranks_that_do_not_divide_are_refused_before_they_start(pools: Pools, calm: Path, tmp_path: Path, capsys):
    output = tmp_path / "run"
    common = ["--config", calm / "config.json", "--model", calm / "model", "--data", calm / "text.txt"]
    run(pools(2), *common, "--output", output, "--steps", 1, "--save-every", 1)
    assert main(["train", "--resume", str(output), "--ranks", "5"]) == 2
    assert "12 is no multiple of 1 * 5. Expected one of these numbers of ranks: 1, 2, 3, 4, 6, 12" in (
        capsys.readouterr().err
    )


# The same job


def test_ranks_of_the_same_launch_go_on_and_others_are_refused(pools: Pools, calm: Path, tmp_path: Path):
    output = tmp_path / "run"
    asked = ["--config", calm / "config.json", "--model", calm / "model", "--data", calm / "text.txt"]
    asked += ["--steps", 5, "--save-every", 2, "--output", output]
    run(pools(2), *asked, job="first", stop_after=3)
    assert tags(output) == [tag(2), tag(3)]
    _, _, complaint = run(pools(1), *asked, job="second")
    assert complaint.startswith("2 ") and "never overwrites" in complaint
    _, _, complaint = run(pools(1), *asked)
    assert complaint.startswith("2 ") and "never overwrites" in complaint
    out, rows, _ = run(pools(1), *asked, job="first", stop_after=1)
    assert "resumed:     from step 3" in out and len(rows) == 1
    again = ["--resume", output / "checkpoints" / tag(3)]
    out, rows, _ = run(pools(2), *again, "--steps", 8, job="second", stop_after=2)
    assert "resumed:     from step 3" in out and len(rows) == 2  # it has not been here before
    out, rows, _ = run(pools(2), *again, "--steps", 8, job="second")
    assert "resumed:     from step 5" in out and len(rows) == 3
    assert [row[0] for row in curve(output)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_launch_without_an_id_is_known_by_its_agents(pools: Pools, calm: Path, tmp_path: Path, monkeypatch):
    output = tmp_path / "run"
    asked = ["--config", calm / "config.json", "--model", calm / "model", "--data", calm / "text.txt"]
    asked += ["--steps", 3, "--save-every", 2, "--output", output]
    run(pools(2), *asked, job="none", stop_after=2)
    facts = json.loads((output / "run.json").read_text(encoding="utf-8"))
    out, _, _ = run(pools(1), *asked, job="none")  # this process started both pools
    assert "resumed:     from step 2" in out
    (output / "run.json").write_text(json.dumps({**facts, "job": ["other"]}), encoding="utf-8")
    _, _, complaint = run(pools(1), *asked, job="none")
    assert "never overwrites" in complaint


def test_before_the_first_checkpoint_the_run_begins_again_with_the_same_batch(pools: Pools, calm: Path, tmp_path: Path):
    output = tmp_path / "run"
    asked = ["--config", calm / "config.json", "--model", calm / "model", "--data", calm / "text.txt"]
    asked += ["--steps", 2, "--output", output]
    _, expected, _ = run(pools(2), *asked, job="first", stop_after=1)
    shutil.rmtree(output / "model")
    out, rows, _ = run(pools(1), *asked, job="first")
    assert "resumed" not in out
    assert "batch:       12 = 1 per rank x 12 micro-batch(es) x 1 rank(s)" in out
    assert len(rows) == 2 and rows[:1] == expected
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in lines] == [0, 1, 1, 2, 2]  # 0 is validation alone


def test_without_a_name_the_output_is_found_again(pools: Pools, calm: Path, tmp_path: Path):
    asked = ["--config", calm / "config.json", "--model", calm / "model", "--data", calm / "text.txt", "--steps", 2]
    asked += ["--save-every", 1]
    run(pools(1), *asked, where=tmp_path)
    run(pools(1), *asked, where=tmp_path, job="first", stop_after=1)
    out, _, _ = run(pools(1), *asked, where=tmp_path, job="first")
    assert "output:      runs/config-2" in out and "resumed:     from step 1" in out
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["config", "config-2"]


def test_new_ranks_wait_until_the_old_ones_have_ended(pools: Pools, calm: Path, tmp_path: Path):
    output = tmp_path / "run"
    asked = ["--config", calm / "config.json", "--model", calm / "model", "--data", calm / "text.txt"]
    asked += ["--steps", 2, "--save-every", 1, "--output", output]
    run(pools(1), *asked, job="first", stop_after=1)
    released: list[float] = []
    with (output / "checkpoints" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        def release() -> None:
            released.append(time.monotonic())
            fcntl.flock(file, fcntl.LOCK_UN)

        timer = threading.Timer(2.0, release)
        timer.start()
        out, _, _ = run(pools(1), *asked, job="first")
        timer.cancel()
    assert "resumed:     from step 1" in out
    assert released


def test_a_rank_whose_node_shall_go_on_does_not_say_that_it_is_done(monkeypatch: pytest.MonkeyPatch):
    assert not job.others_go_on(True)  # no torchrun
    for name, value in (("RUN_ID", "a"), ("RESTART_COUNT", "1"), ("MAX_RESTARTS", "2")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    assert not job.others_go_on(True)  # one node
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert job.others_go_on(True)
    assert not job.others_go_on(False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert not job.others_go_on(True)


# --max-restarts


def test_a_death_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert death(tmp_path, {2: -15, 1: -9}).line == "rank 1 was killed by SIGKILL (often the system, out of memory)"
    assert death(tmp_path, {2: 2}).is_usage
    monkeypatch.setenv(stopping.CONTROL, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    stopping.report_failure(ValueError("first line\nof two"))
    assert death(tmp_path, {3: 1, 0: -15}).line == "rank 3 failed: ValueError: first line"
    assert death(tmp_path, {3: 1, 0: -15}).text.endswith("\nValueError: first line\nof two")
    assert not death(tmp_path, {3: 1}).is_usage
    assert death(tmp_path, {3: 1, 0: -6}).rank == 3  # rank 0 may have ended because rank 3 failed
    stopping.report_failure(CommunicationError("all_gather: rank 0 is gone"))
    assert death(tmp_path, {3: 1, 0: -9}).rank == 0
    stopping.forget_failures(tmp_path)
    stopping.report_failure(ConfigError("wrong"))
    assert death(tmp_path, {3: 1, 0: -9}).is_usage


def test_a_death_is_not_repeated_without_a_new_checkpoint(tmp_path: Path):
    dead = RankFailure(1, -9)
    restarts = Restarts(4, tmp_path)
    assert restarts.again(dead).line.endswith("restart 1 of 4: begins again, there is no checkpoint yet")
    made(tmp_path, tag(4))
    assert restarts.again(dead).line.endswith("restart 2 of 4: resumes from step 4")
    made(tmp_path, tag(8))
    assert restarts.again(dead) == Decision(True, f"{dead.line}; restart 3 of 4: resumes from step 8")
    why = "not started again, ranks died twice without a new checkpoint in between; restarts: 3 of 4 used"
    assert restarts.again(dead) == Decision(False, why)
    wrong_input = RankFailure(0, 2, is_usage=True)  # its message is enough
    assert restarts.again(wrong_input) == Decision(False)
    made(tmp_path, tag(99_999_999))
    assert restarts.again(dead).line.endswith("restart 4 of 4: resumes from step 99999999")
    made(tmp_path, tag(100_000_000))
    assert restarts.again(dead) == Decision(False, "not started again, restarts: 4 of 4 used")
    assert resume.newest(tmp_path) is not None and Restarts(0, tmp_path).again(dead) == Decision(False)
    assert Restarts(1, tmp_path).again(dead).line.endswith("resumes from step 100000000")


@pytest.mark.parametrize(("deaths", "code", "starts"), [([-9, -9, -9], 1, 2), ([-9], 0, 2), ([2, -9], 1, 1)])
def test_the_parent_starts_ranks_again(
    tiny: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    deaths: list[int],
    code: int,
    starts: int,
):
    names = []

    def torchrun(settings: Any, ranks: int, control: Path, name: str) -> RankFailure | None:
        names.append(name)
        return death(control, {1: deaths.pop(0)}) if deaths else None

    monkeypatch.setattr(command, "_torchrun", torchrun)
    asked = ["train", "--config", tiny / "config.json", "--model", tiny / "model", "--data", tiny / "text.txt"]
    asked += ["--output", tmp_path / "run", "--max-restarts", 3]
    assert main([*map(str, asked)]) == 2
    assert "expected --save-every as well" in capsys.readouterr().err
    assert main([*map(str, asked), "--save-every", "2"]) == code
    assert len(names) == starts and len(set(names)) == 1
    text = capsys.readouterr().err
    assert text.count("restart 1 of 3: begins again") == starts - 1
    assert text.count("not started again") == (starts == 2 and code == 1)
    assert text.count("rank 1") == (starts if code else 1)
