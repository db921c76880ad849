"""``benchmarks.gpu``: time, processes and the report with made-up blocks; commands and readers of the real ones."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.expression import Expression

from benchmarks import finetune, gpu, gpu_blocks, gpu_profile, ratio_auto
from benchmarks import kernels as kernels_benchmark
from benchmarks.gpu import DONE, FAILED, NOT_POSSIBLE, TIMED_OUT, Output, Report, run_part
from benchmarks.gpu_blocks import BLOCKS, GPU, PARTS, Block
from benchmarks.gpu_step import TINY, summarise
from benchmarks.offload_bound import Rates
from benchmarks.offload_gpu import assemble
from benchmarks.offload_turns import Found
from benchmarks.peers import deepspeed_zero
from benchmarks.tests.test_gpu_step import found_of
from tests.gpu import test_same_bits
from tests.support import HANG_S, cases

FACTS = {"machine": {"name": "x"}, "device": "cpu", "sources": "s", "commit": None}


def block(name: str, *, seconds: float = 10, tiny: bool = True, package: str | None = None) -> Block:
    """One that nothing is started for."""
    return Block(
        name, 1, seconds, ("-c", name), gpu_blocks.lines, ("-c", name, "FOLDER") if tiny else None, package=package
    )


def report(folder: Path, **facts: Any) -> Report:
    """An earlier one's rows are taken over where ``facts`` are equal."""
    return Report(1, folder, None, {**FACTS, **facts})


class Player:
    """Answers instead of processes, by the name of the block, and what was asked for."""

    def __init__(self, **answers: Output) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.limits: list[float] = []

    def __call__(self, command: list[str], seconds: float, environment: dict[str, str]) -> Output:
        name = command[command.index("-c") + 1]
        self.asked.append(name)
        self.limits.append(seconds)
        return self.answers.get(name, Output(0, '{"n": 1}', "", 1.0))


def play(folder: Path, blocks: list[Block], player: Player, *, fresh: bool = False, left: float = 100, **facts: Any):
    """The rows that are in the file afterwards."""
    run_part(report(folder, **facts), blocks, time.monotonic() + left, fresh=fresh, run=player)
    return {row["name"]: row for row in json.loads((folder / "part-1.json").read_text(encoding="utf-8"))["blocks"]}


def test_every_block_is_a_row_whatever_becomes_of_it(tmp_path: Path) -> None:
    player = Player(
        broken=Output(3, '{"n": 2}\n', "noise\nValueError: no such thing\nmore", 2.0), late=Output(None, "", "", 9.0),
        mute=Output(0, "{not JSON", "", 1.0), skipped=Output(0, '{"passed": 0, "skipped": 2}', "", 1.0),
    )  # fmt: skip
    names = ["fine", "broken", "late", "mute", "skipped", "last"]
    more = [block("gpu alone", tiny=False), block("no package", package="no_such_package")]
    rows = play(tmp_path, [*map(block, names), *more], player)
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "fine": DONE, "broken": FAILED, "late": TIMED_OUT, "mute": FAILED, "skipped": NOT_POSSIBLE,
        "last": DONE, "gpu alone": NOT_POSSIBLE,
        "no package": NOT_POSSIBLE,
    }  # fmt: skip
    assert player.asked == names and rows["broken"]["found"] == {"n": 2}
    assert (
        rows["broken"]["why"] == "exit code 3: ValueError: no such thing" and "could not be read" in rows["mute"]["why"]
    )
    assert rows["gpu alone"]["why"] == "needs a GPU" and "no_such_package" in rows["no package"]["why"]
    text = (tmp_path / "part-1.md").read_text(encoding="utf-8")
    assert "| broken | failed | 2.0 | exit code 3: ValueError: no such thing |" in text and "noise" in text
    kept = json.loads((tmp_path / "gpu-x.json").read_text(encoding="utf-8"))["parts"]["1"]["blocks"]
    assert [row["found"] for row in kept][:2] == [{"n": 1}, {"n": 2}] and not any("stdout" in row for row in kept)


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    blocks = [block("first"), block("second")]
    assert play(tmp_path, blocks, Player(second=Output(1, "", "broken", 1.0)))["second"]["state"] == FAILED
    again = Player()
    rows = play(tmp_path, blocks, again)
    assert again.asked == ["second"] and rows["first"]["found"] == {"n": 1} and rows["second"]["state"] == DONE
    for change in ({"sources": "t"}, {"machine": {"name": "y"}}):
        other = Player()
        play(tmp_path, blocks, other, **change)
        assert other.asked == ["first", "second"]
    play(tmp_path, blocks, Player())
    changed = Player()
    play(tmp_path, [replace(blocks[0], tiny=("-c", "first", "more")), blocks[1]], changed)
    assert changed.asked == ["first"]
    fresh = Player()
    play(tmp_path, blocks, fresh, fresh=True)
    assert fresh.asked == ["first", "second"]


def test_rows_of_blocks_that_wait_stay_in_the_report(tmp_path: Path) -> None:
    blocks = [block("first"), block("second")]
    play(tmp_path, blocks, Player())
    assert list(play(tmp_path, blocks[:1], Player())) == ["first", "second"]


def test_time_that_is_left_is_passed_on_and_no_block_outlasts_the_part(tmp_path: Path) -> None:
    player = Player()
    play(tmp_path, [block("first"), block("second", seconds=20)], player, left=100)
    assert 70 < player.limits[0] <= 80 and 90 < player.limits[1] <= 98
    rows = play(tmp_path, [block("third")], late := Player(), left=1)
    assert late.asked == [] and rows["third"]["state"] == TIMED_OUT and "not begun" in rows["third"]["why"]


def test_files_are_copied_and_parts_stand_together(tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    for part in (1, 2):
        each = Report(part, tmp_path / "own", copies, FACTS)
        run_part(each, [replace(block("b"), part=part)], time.monotonic() + 50, fresh=False, run=Player())
        assert (copies / f"part-{part}.md").exists() and (copies / "trace.json.gz").exists() is (part == 2)
        (tmp_path / "own" / "trace.json.gz").touch()
    assert list(json.loads((copies / "gpu-x.json").read_text(encoding="utf-8"))["parts"]) == ["1", "2"]


def test_results_name_no_path_of_a_machine(tmp_path: Path) -> None:
    place = "/" + "home/someone/python"
    play(tmp_path, [block("b")], Player(b=Output(1, "", f"OSError: {place}: not there", 1.0)))
    assert place in (tmp_path / "part-1.md").read_text(encoding="utf-8")
    assert "OSError: PATH not there" in (tmp_path / "gpu-x.json").read_text(encoding="utf-8")


def is_alive(process: int) -> bool:
    """Whether it runs; who has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_block_that_hangs_is_ended_with_all_its_processes() -> None:
    seconds = 0.3
    while True:  # until the machine was fast enough for it to begin
        output = gpu.run(["sh", "-c", "trap '' TERM; sleep 1000 & echo $!; wait; wait"], seconds, {})
        assert output.code is None
        if output.stdout:
            break
        seconds *= 4
    end = time.monotonic() + HANG_S
    while is_alive(int(output.stdout)):
        assert time.monotonic() < end, "the process that it started lives on"
        time.sleep(0.01)


def test_a_command_sees_the_sources_and_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code = "import os, benchmarks.gpu_blocks, sys; print(os.environ['A'], os.getcwd()); print('b', file=sys.stderr)"
    output = gpu.run([sys.executable, "-c", code], HANG_S, {"A": "1"})
    assert (output.code, output.stdout, output.stderr) == (0, f"1 {gpu.ROOT}\n", "b\n")


def test_another_source_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    source = tmp_path / "tests" / "a.py"
    source.parent.mkdir()
    digests = []
    for text in ("1", "2"):
        source.write_text(text, encoding="utf-8")
        digests.append(gpu.sources())
    (tmp_path / "tests" / "a.txt").touch()
    assert digests[0] != digests[1] == gpu.sources()


# The real blocks


def test_names_are_unique_and_the_time_of_a_part_is_enough() -> None:
    assert len({each.name for each in BLOCKS}) == len(BLOCKS) and {each.part for each in BLOCKS} == set(PARTS)
    for part in PARTS:
        assert sum(each.seconds for each in BLOCKS if each.part == part) < 600
    assert gpu.PART_S < 600 - gpu.GRACE_S


def parser_of(words: list[str]) -> Callable[[list[str]], Any]:
    """The ``parse`` of ``python -m module``."""
    parse: Callable[[list[str]], Any] = importlib.import_module(words[1]).parse
    return parse


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_benchmarks_understand_their_commands(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    checked = 0
    for each in BLOCKS:
        words = list(each.command if device == GPU else each.tiny or ())
        if words[1:2] and words[1].startswith("benchmarks."):
            options = parser_of(words)(words[2:])
            assert options.device == device
            checked += 1
    assert checked == 8


def is_in(test: str, word: str, /, **_: object) -> bool:
    """As pytest's -k."""
    return word.lower() in test.lower()


def test_expressions_choose_tests_on_a_gpu() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    found = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=True)
    tests = [line for line in found.stdout.splitlines() if "::" in line]
    chosen: dict[str, list[str]] = {}
    for each in BLOCKS:
        if "pytest" not in each.command:
            continue
        words = each.arguments(GPU, "")
        expression = Expression.compile(words[words.index("-k") + 1]) if "-k" in words else None
        names = [test.split("::", 1)[1] for test in tests if test.startswith(words[-1])]
        chosen[each.name] = [name for name in names if not expression or expression.evaluate(partial(is_in, name))]
    assert all(chosen.values()) and len(chosen) == 9
    every = [test.split("::", 1)[1] for test in tests]
    whole = ("bits of kernels", "every stage", "ranks that share a GPU", "tiers", "bits of CPU and GPU")
    assert sorted(name for block in whole for name in chosen[block]) == sorted(every)  # none is forgotten, or run twice
    for few in ("memcheck", "racecheck", "stream races: stages", "stream races: tiers"):
        assert len(chosen[few]) < 10


def test_a_sanitizer_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    (memcheck,) = [each for each in BLOCKS if each.name == "memcheck"]
    assert memcheck.why_not(GPU) == "needs compute-sanitizer, which is not on the path"
    assert memcheck.arguments(GPU, "")[0] == "compute-sanitizer" and memcheck.shown("cpu").startswith("PYTORCH_NO_CUDA")
    assert sys.executable not in memcheck.shown(GPU)


PYTEST = """tests/gpu/test_gpu.py::test_a[1-x] PASSED                [ 10%]
tests/gpu/test_gpu.py::test_b[Rule(kind='Adam', rate=0.01)] FAILED    [ 20%]
tests/gpu/test_gpu.py::test_c SKIPPED (needs two GPUs)    [ 30%]
[gw1] [ 40%] PASSED tests/gpu/test_gpu.py::test_e[Rule(kind='SGD', rate=0.1)]
[gw0] [ 50%] FAILED tests/gpu/test_gpu.py::test_f
tests/gpu/test_gpu.py::test_d"""


def test_results_of_tests_are_read_line_by_line() -> None:
    found = gpu_blocks.sanitized(PYTEST + "\n========= ERROR SUMMARY: 2 errors\n")
    assert (found["passed"], found["skipped"], found["failed"]) == (2, 1, 2)
    names = ["tests/gpu/test_gpu.py::test_b[Rule(kind='Adam', rate=0.01)]", "tests/gpu/test_gpu.py::test_f"]
    assert found["failed_tests"] == names
    assert found["summaries"] == ["ERROR 2 errors"]


def test_results_of_steps_and_offload_are_read() -> None:
    setting = TINY["tiny"].setting
    rows = summarise(found_of({"compute": 1.0, "ours-2": 1.25}), setting, targets=True)
    model = {"variants": rows, "references": [{"peak_flops": 5.0}], "setting": {}, "failed": {}}
    left = {"left_out": "too large"}
    found = gpu_blocks.steps("library says\n" + json.dumps({"models": {"124M": model, "1.5B": left}}, indent=1))
    row = found["124M"]["variants"]["ours-2"]
    assert row["ratio"]["median"] == 1.25 and row["verdict"] == "missed" and "seconds" not in row
    assert found["1.5B"]["left_out"] == "too large" and found["124M"]["peak_flops"] == [5.0]
    memory = {"peak_host": 7, "build_s": 1.0}
    taken = Found({"ours-2": [2.0]}, {"ours-2": [9.0, 8.0]}, {"ours-2": memory}, {})
    part = assemble([["ours-2"]], [taken], setting, Rates(1e9, 2.0, 4.0, 8.0))
    part_found = gpu_blocks.offload(json.dumps({"parts": {"1.5B": part}}))["1.5B"]
    assert part_found["variants"]["ours-2"]["median_s"] == 2.0 and part_found["variants"]["ours-2"]["peak_host"] == 7
    assert part_found["bounds_s"]["ours-2"]["total"] > 0


def test_results_of_kernels_are_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_benchmark, "machine", lambda device: {"name": device})
    (each,) = [each for each in BLOCKS if each.name == "kernels"]
    assert kernels_benchmark.main(list((each.tiny or ())[2:])) == 0
    found = each.read(capsys.readouterr().out)
    assert found["failed"] == [] and len(found["rows"]) > 8
    assert all(row["gb_per_s"] > 0 for row in found["rows"].values())


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    """Of a Chrome trace, in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_a_trace_is_read() -> None:
    step = gpu_profile.STEP
    events = [
        event("user_annotation", step, 0, 1000), event("user_annotation", step, 1000, 1000), {"ph": "M", "name": "x"},
        *(event("kernel", "gemm", start, 100, stream=7) for start in (100, 200, 600, 1200)),
        event("kernel", "other", 250, 20, stream=9), event("gpu_memset", "Memset", 500, 50, stream=7),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 150, 300, stream=8, bytes=4000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 160, 10, stream=8),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1250, 100, stream=8, bytes=2000),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 1210, 10, stream=8, bytes=9),
        event("cuda_runtime", "cudaStreamSynchronize", 900, 50), event("cuda_runtime", "cudaLaunchKernel", 10, 5),
        event("cuda_driver", "cuStreamSynchronize_ptsz", 1900, 30),
        event("cuda_runtime", "cudaDeviceSynchronize", 2100, 9),
    ]  # fmt: skip
    found = gpu_profile.read(events)
    assert found["steps"] == 2 and found["step_ms"] == 1.0 and found["launches"] == 2.5 and found["streams"] == 2
    assert found["waits"] == {"cuStreamSynchronize": 0.5, "cudaStreamSynchronize": 0.5} and found["waited_ms"] == 0.04
    assert found["pageable_copies"] == 0.5 and found["copied_bytes"] == 3000
    assert found["compute_busy_s"] == pytest.approx(200e-6) and found["copies_s"] == pytest.approx(200e-6)
    assert found["copies_under_compute_s"] == pytest.approx((150 + 50) * 1e-6 / 2)
    assert [(gap["ms"], gap["after"]) for gap in found["longest_gaps"]] == [
        (0.5, "gemm"), (0.2, "gemm"), (0.05, "Memset")
    ]  # fmt: skip
    assert found["gaps_s"] == pytest.approx(750e-6 / 2)


def test_a_trace_without_kernels_says_so_and_one_without_steps_is_refused() -> None:
    annotation = event("user_annotation", gpu_profile.STEP, 0, 1000)
    assert gpu_profile.read([annotation])["not_seen"] == "the profiler saw no kernel"
    with pytest.raises(ValueError, match="expected steps labelled"):
        gpu_profile.read([])


def test_a_step_is_traced_and_a_llama_learns(tmp_path: Path) -> None:
    for name in gpu_profile.VARIANTS:
        found = gpu_profile.traced(name, gpu_profile.TINY, "cpu", tmp_path / f"{name}.json.gz")
        assert found["steps"] == 3 and found["step_ms"] > 0 and (tmp_path / found["trace"]).stat().st_size > 0
    learnt = finetune.finetune("cpu", finetune.TINY, finetune.TINY_LENGTH, 4, time.monotonic())
    assert learnt["loss_fell"] and len(learnt["losses"]) == 4 and learnt["peak_allocated_bytes"] is None


def test_a_ratio_is_found_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    (each,) = [each for each in BLOCKS if each.name == "ratio auto"]
    assert ratio_auto.main(list((each.tiny or ())[2:])) == 0
    small, large = each.read(capsys.readouterr().out).values()
    assert 0 < small["ratio"] < 1 and large["ratio"] == 0
    for row in (small, large):
        assert row["need_bytes"] <= row["share_bytes"] < row["free_bytes"] and "left_bytes" not in row
        assert row["losses"][-1] < row["losses"][0] and row["median_s"] > 0


def test_a_part_is_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--tiny", "--part", "1", "--out", str(tmp_path)]
    names = ["environment", "NCCL with one rank", "every stage"]
    assert gpu.main([*options, "--blocks", *names]) == 0
    rows = json.loads((tmp_path / "part-1.json").read_text(encoding="utf-8"))["blocks"]
    assert {row["name"]: row["state"] for row in rows} == dict(zip(names, (DONE, DONE, NOT_POSSIBLE), strict=True))
    found = {row["name"]: row["found"] for row in rows}
    assert found["environment"]["torch"] == version("torch") and "end" not in found["NCCL with one rank"]
    assert found["NCCL with one rank"]["asynchrony"]["right_although_given_back"]
    assert found["NCCL with one rank"]["ends"]["new_group_after_destroy"]
    assert "environment: done" in capfd.readouterr().out


def test_without_a_gpu_it_says_how_to_try_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "FACTS", "import sys; sys.exit('torch sees no GPU here')")
    with pytest.raises(SystemExit, match="torch sees no GPU here"):
        gpu.main(["--part", "1"])


@pytest.mark.parametrize("bad", [["--device", "cpu"], ["--tiny"], ["--part", "4"], ["--blocks", "none"]])
def test_bad_usage_is_refused(bad: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        gpu.parse(bad)
    assert stopped.value.code == 2


def test_make_starts_it_with_the_interpreter_that_is_there() -> None:
    command = ["make", "-n", "gpu", "VENV=", "PYTHON=python9", "PART=2", "FRESH=1", "ARGS=--copy-to there"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    found = subprocess.run(command, cwd=gpu.ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "python9 -m benchmarks.gpu --part 2 --fresh --copy-to there" in found.stdout and "pip" not in found.stdout


# What the blocks run


def test_bits_of_two_devices_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {stage: cases.STAGES[stage] for stage in ("2", "3")}
    monkeypatch.setattr(cases, "STAGES", stages)
    near = ("device", "all on the host", "unclipped device")
    here = [test_same_bits.train_all("cpu", "fp16", str(tmp_path), near) for _ in range(2)]
    assert len(here[1]) == 10 and not test_same_bits.differences([here])
    outcome = here[1]["3", 3, "all on the host", "AdamW"]
    assert outcome["skipped"] and outcome["norms"][-1] > cases.CLIP  # what is compared has happened
    name, key, first, values = outcome["state"][0]
    values = values.copy()
    values.reshape(-1)[-1:].view("int32")[0] ^= 1
    outcome["state"][0] = (name, key, first, values)
    outcome["norms"] = [*outcome["norms"][:-1], 0.0]
    told = test_same_bits.differences([here])
    assert len(told) == 2 and "norms" in told[0] and f"the first ('{name}', '{key}')" in told[1]


def test_deepspeed_has_its_defaults_on_a_gpu() -> None:
    assert deepspeed_zero(3, "cuda") == {"stage": 3, "overlap_comm": True}
    assert deepspeed_zero(3, "cpu")["reduce_bucket_size"] == 8_000_000
    assert deepspeed_zero(0, "cpu") == {"stage": 0}
