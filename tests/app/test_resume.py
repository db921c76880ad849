"""`--save-every` and `--resume`: a run that was stopped or killed and goes on equals the unbroken one, bit for bit.

Runs happen in the rank pools, as under a launcher; one is killed for good, as a user's own command.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardengine.app import cli, command, corpus, loop, resume
from shardengine.app.cli import main
from shardengine.errors import UsageError
from tests.app.test_train import CORPUS, start
from tests.support import HANG_S
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "data" / "capitals.jsonl"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model that drops out, a tiny corpus, and config.json for `start`."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text(CORPUS, encoding="utf-8")
    recipe = {"vocab_size": 300, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_RECIPE", recipe)
        patch.setattr(corpus, "_DROPOUT", 0.1)
        patch.setattr(corpus, "read_text", lambda name: CORPUS)
        corpus.default_model(folder).rename(folder / "model")
    config(folder / "config.json", 2)
    return folder


def config(path: Path, stage: int, **more: Any) -> Path:
    values = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 2,
    }
    path.write_text(json.dumps({**values, **more}), encoding="utf-8")
    return path


class _StopAfter:
    """In the place of StopRequest: asks to stop after some steps."""

    signalled = True

    def __init__(self, steps: int) -> None:
        self._left = steps

    def __bool__(self) -> bool:
        self._left -= 1
        return self._left == 0


def on_rank(arguments: list[str], stop_after: int) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command on this rank; an error is raised, it does not end the process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(command, "_run_rank", loop.train)
        patch.setattr(loop, "StopRequest", lambda: _StopAfter(stop_after))
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


def run(pool: RankPool, *arguments: object, stop_after: int = 0) -> str:
    """What rank 0 printed."""
    results = pool.run(on_rank, ["train", *map(str, arguments)], stop_after)
    assert [code for code, _, _ in results] == [0] * pool.ranks, results
    return str(results[0][1])


def refused(pool: RankPool, *arguments: object) -> str:
    """The message of wrong usage, on one rank."""
    ((code, _, err),) = pool.run(on_rank, ["train", *map(str, arguments)], 0)
    assert code == 2
    return str(err)


def curve(output: Path) -> list[tuple[float, ...]]:
    """Every step's loss, rate and norm."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in rows if "loss" in row]


def weights(output: Path) -> str:
    return hashlib.sha256((output / "model" / "model.safetensors").read_bytes()).hexdigest()


def tags(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir() if path.is_dir())


def tag(step: int) -> str:
    return f"step-{step:08}"


def made(output: Path, name: str) -> Path:
    """A checkpoint, as far as names go."""
    place = output / "checkpoints" / name
    place.mkdir(parents=True)
    (place / "index.json").write_text("{}", encoding="utf-8")
    return place


# Equal to the unbroken run


@pytest.mark.core
@pytest.mark.parametrize(
    ("ranks", "stage", "more", "jsonl"),
    [
        (1, 0, {}, False),
        (1, 3, {"checkpoint": {"async_save": True}}, True),
        (2, 0, {}, True),
        (2, 3, {}, False),
        (2, 2, {"bf16": {"enabled": True}, "optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}, False),
    ],
)
def test_a_resumed_run_equals_the_unbroken_one(
    pools: Pools, tiny: Path, tmp_path: Path, ranks: int, stage: int, more: dict[str, Any], jsonl: bool
):
    pool, whole, broken = pools(ranks), tmp_path / "whole", tmp_path / "broken"
    path = config(tmp_path / "config.json", stage, **more)
    common = ["--config", path, "--model", tiny / "model", "--steps", 7]
    common += ["--data", EXAMPLES if jsonl else tiny / "text.txt"]
    out = run(pool, *common, "--output", whole)
    assert not (whole / "run.json").exists() and not (whole / "checkpoints").exists()
    assert ("weights bf16, fp32 master, gradients sent as bf16" in out) == ("bf16" in more)
    assert ("optimizer:   Lion (" in out) == ("bf16" in more)

    out = run(pool, *common, "--output", broken, "--save-every", 2, stop_after=3)
    assert "stopped at:  step 3 of 7" in out and f"(continue with --resume {broken})" in out
    assert tags(broken) == [tag(2), tag(3)]
    assert len(curve(broken)) == 3
    with (broken / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "loss": 9.0, "lr": 1.0, "grad_norm": 1.0}\n{"step": 3, "lo')  # a kill's remains
    out = run(pool, "--resume", broken)
    assert "resumed:     from step 3" in out
    assert out.count("validation loss") == 4  # not the initial one
    assert "finished at: step 7 of 7" in out and f"(continue with --resume {broken} --steps N)" in out

    assert curve(broken) == curve(whole)
    assert weights(broken) == weights(whole)
    assert tags(broken) == [tag(6), tag(7)]


@pytest.fixture(scope="module")
def finished(pools: Pools, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run of four steps on one rank, with checkpoints 3 and 4."""
    output = tmp_path_factory.mktemp("finished") / "run"
    common = ["--config", tiny / "config.json", "--model", tiny / "model", "--data", tiny / "text.txt"]
    run(pools(1), *common, "--output", output, "--steps", 4, "--save-every", 1)
    assert tags(output) == [tag(3), tag(4)]
    return output


@pytest.fixture
def earlier(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return shutil.copytree(finished, tmp_path / "run")


def test_more_steps_and_none_at_all(pools: Pools, earlier: Path, finished: Path):
    out = run(pools(1), "--resume", earlier, "--save-every", 10)
    assert "no step was made" in out
    assert (weights(earlier), curve(earlier)) == (weights(finished), curve(finished))
    run(pools(1), "--resume", earlier, "--steps", 6)
    assert curve(earlier)[:4] == curve(finished)
    assert [row[0] for row in curve(earlier)] == [1, 2, 3, 4, 5, 6]
    assert [row[2] for row in curve(earlier)[4:]] == pytest.approx([5e-4, 5e-4])  # the schedule's end: a tenth
    assert tags(earlier) == [tag(4), tag(6)]
    assert resume.read(str(earlier)).steps == 6


def test_a_damaged_checkpoint_and_the_one_before_it(pools: Pools, earlier: Path, finished: Path):
    path = earlier / "checkpoints" / tag(4) / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    text = refused(pools(1), "--resume", earlier / "checkpoints" / tag(4))
    assert "checksum" in text
    assert str(earlier / "checkpoints" / tag(3)) in text
    assert curve(earlier) == curve(finished)  # nothing was dropped
    run(pools(1), "--resume", earlier)  # by itself from the one before
    assert (weights(earlier), curve(earlier)) == (weights(finished), curve(finished))
    assert tags(earlier) == [tag(3), tag(4)]


def test_going_back_drops_what_came_later(pools: Pools, earlier: Path):
    run(pools(1), "--resume", earlier / "checkpoints" / tag(3), "--steps", 3)
    assert tags(earlier) == [tag(3)]
    assert (earlier / "checkpoints" / "latest").read_text(encoding="utf-8").strip() == tag(3)
    assert len(curve(earlier)) == 3


@pytest.mark.parametrize("own", ["best", "zbest", "step-00000010-good"])
def test_only_later_checkpoints_of_the_command_are_dropped(tmp_path: Path, own: str):
    """By their steps: a checkpoint under a name of the user's own says nothing of its place in the order."""
    for name in (tag(10), own, tag(20), tag(99_999_999), tag(100_000_000), ".old-" + tag(30)):
        made(tmp_path, name)
    resume.drop_later(tmp_path, own, 10)
    assert tags(tmp_path) == sorted([tag(10), own])
    assert (tmp_path / "checkpoints" / "latest").read_text(encoding="utf-8") == f"{own}\n"
    made(tmp_path, tag(100_000_000)), made(tmp_path, tag(20))
    resume.drop_later(tmp_path, tag(20), 20)
    assert tags(tmp_path) == sorted([tag(10), tag(20), own])


def test_a_checkpoint_of_an_own_name_is_gone_back_to(pools: Pools, earlier: Path):
    shutil.copytree(earlier / "checkpoints" / tag(3), earlier / "checkpoints" / "best")
    run(pools(1), "--resume", earlier / "checkpoints" / "best", "--steps", 3)
    assert tags(earlier) == ["best", tag(3)]


# Refused


def test_other_data_and_an_edited_config_are_refused(pools: Pools, tiny: Path, earlier: Path, finished: Path):
    same, other = earlier.parent / "same.txt", earlier.parent / "other.txt"
    same.write_text(CORPUS, encoding="utf-8")
    other.write_text(CORPUS.replace("fox", "cat"), encoding="utf-8")
    text = refused(pools(1), "--resume", earlier, "--data", other)
    assert f"{tag(4)} was made with something else" in text
    assert "SHA-256 of the rows of tokens: " in text
    assert weights(earlier) == weights(finished)
    values = json.loads((earlier / "shardengine.json").read_text(encoding="utf-8"))
    changed = {**values, "train_batch_size": 16, "gradient_accumulation_steps": 4, "seed": 7}
    (earlier / "shardengine.json").write_text(json.dumps(changed), encoding="utf-8")
    text = refused(pools(1), "--resume", earlier)
    assert "samples per step: 8 in the checkpoint, 16 now" in text
    assert "seed: 42 in the checkpoint, 7 now" in text
    (earlier / "shardengine.json").write_text(json.dumps(values), encoding="utf-8")
    assert "has made 4 steps already" in refused(pools(1), "--resume", earlier, "--steps", 3)
    run(pools(1), "--resume", earlier, "--data", same)


def test_two_runs_do_not_write_into_one_directory(pools: Pools, earlier: Path):
    with (earlier / "checkpoints" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # even a shared lock is in the way of a run's own
        assert "another run is writing into it" in refused(pools(1), "--resume", earlier)
    run(pools(1), "--resume", earlier)


def test_contradictions_are_found_by_name_before_ranks_start(tiny: Path, finished: Path, tmp_path: Path, capsys):
    other = config(tmp_path / "other.json", 2, gradient_clipping=0.5, seed=3)
    options = ["train", "--resume", str(finished), "--ranks"]
    assert main([*options, "2", "--length", "16", "--model", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert "--ranks" not in text
    assert "--length: it was started with 128, got 16" in text
    assert f"--model: it was started with {tiny / 'model'}, got {tmp_path}" in text
    assert main([*options, "1", "--config", str(other)]) == 2
    text = capsys.readouterr().err
    assert "gradient_clipping: it was started with 1.0, got 0.5" in text
    assert "seed: it was started with 42, got 3" in text
    assert text.count("it was started") == 2
    with pytest.raises(SystemExit):
        main(["train", "--resume", str(finished), "--output", str(tmp_path / "new")])
    assert "not allowed with" in capsys.readouterr().err
    assert main(["train"]) == 2
    assert "expected --config FILE" in capsys.readouterr().err


def test_what_cannot_be_resumed(finished: Path, tmp_path: Path, capsys):
    with raises("resume-not-a-run"):
        resume.read(str(tmp_path))
    assert main(["train", "--resume", str(finished / "checkpoints" / tag(2))]) == 2
    text = capsys.readouterr().err
    assert "which is not there" in text and f"there are: {tag(3)}, {tag(4)}" in text
    for name in ("run.json", "shardengine.json"):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "before its first checkpoint" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"model": null}', encoding="utf-8")
    with raises("resume-run-damaged"):
        resume.read(str(tmp_path))
    good = json.loads((finished / "run.json").read_text(encoding="utf-8"))
    wrong = [
        ("ranks", "two"),
        ("ranks", 0),
        ("ranks", True),
        ("data", 5),
        ("data", None),
        ("model", 7),
        ("length", None),
    ]
    for name, value in [*wrong, ("steps", -3), ("job", 5), ("job", "a"), ("job", [5])]:
        (tmp_path / "run.json").write_text(json.dumps({**good, name: value}), encoding="utf-8")
        with pytest.raises(UsageError, match=f"damaged or of another version: {name}: expected "):
            resume.read(str(tmp_path))


def test_what_load_checkpoint_finds_is_resumed_whatever_latest_says(tmp_path: Path):
    """A kill between the first save's rename and its ``latest``; one between the two renames of a replacing save."""
    docs = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^if (any.*\)):.*\n    engine.load_checkpoint\(", docs, re.MULTILINE)
    example = (ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8")
    (there,) = re.findall(r"^    if (any.*\)):.*\n        engine.load_checkpoint\(", example, re.MULTILINE)

    def found(output: Path) -> set[bool]:
        place = output / "checkpoints"
        answers = eval(recipe.replace('"checkpoints"', "place")), eval(there, {"CHECKPOINTS": place})
        with contextlib.suppress(UsageError):
            resume.require(output, "latest")
            return {*answers, resume.can_go_on(output), True}
        return {*answers, resume.can_go_on(output), False}

    assert found(tmp_path / "nothing") == {False}
    (tmp_path / "unborn" / "checkpoints" / ".tmp-step-00000001").mkdir(parents=True)
    (tmp_path / "unborn" / "checkpoints" / ".lock").touch()
    assert found(tmp_path / "unborn") == {False}
    made(tmp_path / "first", tag(1))
    assert found(tmp_path / "first") == {True}
    made(tmp_path / "second", ".old-" + tag(1))
    (tmp_path / "second" / "checkpoints" / "latest").write_text(tag(1), encoding="utf-8")
    assert found(tmp_path / "second") == {True}
    resume.require(tmp_path / "second", tag(1))
    with pytest.raises(UsageError, match=f"which is not there; there are: {tag(1)}$"):
        resume.require(tmp_path / "second", tag(2))


# Killed


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="utf-8").split():
            found += tree(int(child))
    return found


def test_a_killed_run_goes_on(pools: Pools, tiny: Path, tmp_path: Path):
    output, whole = tmp_path / "killed", tmp_path / "whole"
    options = ["--data", tiny / "text.txt", "--steps", 60]
    process = start(tiny, *options, "--ranks", 1, "--output", output, "--save-every", 4)
    deadline = time.monotonic() + HANG_S
    while not (output / "checkpoints" / "latest").exists():
        assert process.poll() is None and time.monotonic() < deadline, "no checkpoint was made"
        time.sleep(0.01)
    for pid in reversed(tree(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=HANG_S)
    assert not (output / "model").exists()
    assert 4 <= len(curve(output)) < 60

    again = subprocess.run(
        [sys.executable, "-m", "shardengine", "train", "--resume", output],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert again.returncode == 0, again.stderr
    assert "1 on" in again.stdout
    run(pools(1), "--config", tiny / "config.json", "--model", tiny / "model", *options, "--output", whole)
    assert curve(output) == curve(whole)
    assert weights(output) == weights(whole)


# A recipe by name, with a key of it changed


def test_a_recipe_by_name_trains_with_what_the_command_line_changes(pools: Pools, tiny: Path, tmp_path: Path):
    common = ["--model", tiny / "model", "--data", tiny / "text.txt", "--length", 16, "--steps", 6]
    changes = ["--set", "bf16.enabled=true", "--set", 'zero_optimization={"stage": 3}', "--lr", "0.002"]
    out = run(pools(2), "--config", "demo", *changes, *common, "--output", tmp_path / "run")
    assert "weights bf16, fp32 master, gradients sent as bf16" in out
    assert "stage:       3" in out and "AdamW (lr 0.002, " in out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    assert losses[-1] < losses[0] - 0.1


def test_the_parent_tells_its_ranks_of_monitors(finished: Path) -> None:
    """Also of a run that goes on."""
    given = ["--log", "csv", "--set", "monitor.wandb.project=p"]
    options = cli._parser().parse_args(["train", "--resume", str(finished), *given])
    settings = resume.read(str(finished)).settings(options)
    told = ["--set", "monitor.wandb.project=p", "--set", "monitor.csv.enabled=true"]
    assert resume.arguments(settings) == ["--resume", finished, *told]


def test_monitors_go_on_and_another_may_be_added(pools: Pools, tiny: Path, tmp_path: Path):
    """Into the run's own folder."""
    output = tmp_path / "run"
    given = ("--config", tiny / "config.json", "--model", tiny / "model", "--data", tiny / "text.txt", "--length", 16)
    run(pools(1), *given, "--steps", 2, "--save-every", 2, "--output", output, "--log", "csv")
    stored = json.loads((output / "shardengine.json").read_text(encoding="utf-8"))
    assert stored["monitor"]["csv"]["output_path"] is None  # a run may be moved
    moved = output.rename(tmp_path / "moved")
    output = moved
    run(pools(1), "--resume", output, "--steps", 3, "--log", "jsonl", "--set", "monitor.csv.job_name=shardengine")
    lines = (output / "shardengine" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert [line.partition(",")[0] for line in lines] == ["step", "1", "2", "3"]
    rows = (output / "shardengine" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [(row := json.loads(line))["step"] for line in rows] == [3] and row["loss"] == curve(output)[-1][1]
