"""``benchmarks.offload_gpu``: its competitors on a CPU, the bound by hand, turns, failures and budget, a tiny run."""

from __future__ import annotations

import json
import math
import sys
import time
import types
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import offload_gpu, offload_turns, offload_workers
from benchmarks.gpu_step import flops_per_step
from benchmarks.offload_bound import SIZES, Bound, Rates, bound, measure_rates
from benchmarks.offload_gpu import MODELS, TINY, assemble, main, parse, write
from benchmarks.offload_turns import WARMUP, Conditions, Found, attempt, groups_of, largest, run_group
from benchmarks.offload_variants import COMPETITORS, TorchAO, checkpointed, installed
from benchmarks.offload_workers import Failed, Job, OutOfTime, Trained, Worker
from benchmarks.workload import Setting, batch_of, make_model
from tests.support.ranks import RankPool

RATES = Rates(product=1e9, to_host=2.0, to_device=4.0, memory=8.0)
FALLING = [9.0, 8.0, 7.0, 6.0, 5.0]


def job(name: str, setting: Setting = TINY, floor: float = 0.0) -> Job:
    """A tiny one on a CPU."""
    return Job(name, setting, "cpu", 1, floor)


def conditions(seconds: float = 300.0) -> Conditions:
    """Of a CPU."""
    return Conditions("cpu", 1, 0.0, time.monotonic() + seconds)


def steps_of(names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Five steps of each, one after the other."""
    found = {}
    for name in names:
        trained = Trained(job(name))
        first = trained.build()
        found[name] = [first | trained.step() for _ in range(5)]
        trained.variant.close()  # type: ignore[union-attr]
    return found


def test_every_competitor_trains_the_same(pools: Callable[[int], RankPool]) -> None:
    names = [name for name in COMPETITORS if COMPETITORS[name].package is None]
    (answers,) = pools(1).run(steps_of, names)
    losses = {name: [answer["loss"] for answer in found] for name, found in answers.items()}
    assert losses["ours-2"] == losses["ours-3"] and len(set(losses["compute"])) == 1
    for found in answers.values():
        assert all(answer["seconds"] > 0 and answer["build_s"] > 0 for answer in found)
        peaks = found[-1]["memory"]
        assert peaks["peak_host"] == peaks["peak_rss"] >= peaks["rss_before"] > 0 and peaks["peak_allocated"] is None
    seconds = {name: [1.0] * 5 for name in names}
    last = {name: {"build_s": 1.0, **found[-1]["memory"]} for name, found in answers.items()}
    part = assemble([names], [Found(seconds, losses, last, {})], TINY, RATES)
    apart = {name: (row["loss_differs"], row["loss_apart"]) for name, row in part["variants"].items()}
    assert not any(differs for differs, _ in apart.values()), apart
    assert all("ratio" in row for row in part["variants"].values())


@pytest.mark.skipif(not installed("deepspeed-2"), reason="DeepSpeed is not installed")
def test_deepspeed_trains_the_same() -> None:
    found = run_group(["ours-2", "deepspeed-2"], TINY, conditions(), 3, time.monotonic())
    part = assemble([["ours-2", "deepspeed-2"]], [found], TINY, RATES)
    assert part["failed"] == {} and not part["variants"]["deepspeed-2"]["loss_differs"]


def test_torchao_is_asked_as_its_manual_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def offloading(parameters: Any, kind: type, *, offload_gradients: bool, **options: Any) -> Any:
        given.append(options | {"offload_gradients": offload_gradients})
        return kind(parameters, **options)

    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", types.SimpleNamespace(CPUOffloadOptimizer=offloading))
    for masters, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        loop = TorchAO(make_model(TINY, own=True), TINY, masters=masters)
        losses = []
        for _ in range(3):
            loss = loop.forward(batch_of(TINY, 0, 0))
            loop.backward(loss)
            loop.update()
            losses.append(loss.item())
        assert losses[-1] < losses[0] and given[-1]["offload_gradients"] and given[-1]["fused"]
        assert {parameter.dtype for parameter in loop.model.parameters()} == {dtype}
        assert all(parameter.grad is None for parameter in loop.model.parameters())


def test_checkpointed_blocks_run_twice_and_give_the_same_gradients() -> None:
    plain, twice, runs = make_model(TINY, own=True), checkpointed(make_model(TINY, own=True)), []
    for block in twice.get_submodule("transformer.h").children():
        block.get_submodule("attn").register_forward_hook(lambda *_: runs.append(1))
    for model in (plain, twice):
        model(**batch_of(TINY, 0, 0)).loss.backward()
    assert len(runs) == 2 * TINY.layers
    for one, other in zip(plain.parameters(), twice.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_the_bound_is_the_one_by_hand() -> None:
    count, blocks = 107_264, 2 * (12 * 64 * 64 + 13 * 64)
    found = bound(TINY, RATES, 5.0)
    assert found.to_host == 2 * count / 2 and found.to_device == 2 * count / 4 and found.compute == 5.0
    assert found.memory == 32 * count / 8 and found.tail == count + 28 * count / 8 + 2 * count / 4
    assert found.total == found.memory + found.tail
    away = bound(TINY, RATES, 5.0, weights_away=True)
    again = blocks // 2  # of two blocks; forward ends with the last one, so that backward finds it there
    assert away.to_device == 2 * (count + again) / 4 and away.tail == count + 28 * count / 8
    assert away.memory == (30 * count + 2 * (count + again)) / 8
    assert Bound(9, 1, 2, 3, 0.5).total == 9.5
    large = bound(MODELS["4B"], Rates(1e15, 50e9, 50e9, 200e9), 1.0)
    assert large.memory == pytest.approx(32 * 4.0e9 / 200e9, rel=0.01)
    assert large.tail == pytest.approx(2 * 0.0005 + 28 * 12.5e6 / 200e9)


def test_models_have_the_size_of_their_names_and_rates_are_measured() -> None:
    assert [round(setting.parameters() / 1e9, 1) for setting in MODELS.values()] == [1.6, 4.0]
    assert all(setting.batch * setting.sequence == 4096 for setting in MODELS.values())
    rates = measure_rates(torch.device("cpu"), SIZES["cpu"])
    assert min(rates.product, rates.to_host, rates.to_device, rates.memory) > 1e6


def test_groups_are_as_large_as_the_memory() -> None:
    names, setting = list(COMPETITORS), MODELS["1.5B"]
    plenty = groups_of(names, setting, 2**50)
    assert plenty == [["ours-2", "compute", "deepspeed-2", "torchao", "torchao-bf16"], ["ours-3", "fsdp2"]]
    pairs = groups_of(names, setting, 85e9)
    assert pairs[0] == ["ours-2", "compute", "deepspeed-2"] and pairs[1] == ["ours-2", "torchao"]
    large = groups_of(["compute", "ours-2", "ours-3", "fsdp2"], MODELS["4B"], 115 * 2**30)
    assert large == [["ours-2", "compute"], ["ours-3"], ["fsdp2"]]
    assert groups_of(["fsdp2"], setting, 0) == [["fsdp2"]]


class Scripted:
    """A process that answers by a script: ``broken`` (what, at which step) → the error that it gives."""

    def __init__(self, name: str, log: list[str], broken: dict[tuple[str, str, int], Failed], seconds: float) -> None:
        self.name, self.log, self.broken, self.seconds, self.steps = name, log, broken, seconds, 0

    def ask(self, what: str, end: float) -> dict[str, Any]:
        self.log.append(f"{self.name} {what}")
        self.steps += what == "step"
        if error := self.broken.get((self.name, what, self.steps)):
            raise error
        if what == "build":
            return {"build_s": 1.0}
        loss = FALLING[min(self.steps, len(FALLING)) - 1]
        memory = dict.fromkeys(("peak_allocated", "peak_host", "peak_pinned"), self.steps)
        return {"seconds": self.seconds, "loss": loss, "memory": memory}

    def close(self) -> None:
        self.log.append(f"{self.name} close")


def scripted(
    monkeypatch: pytest.MonkeyPatch, broken: dict[tuple[str, str, int], Failed] | None = None, **seconds: float
) -> list[str]:
    """Let every process be a scripted one; what they were asked."""
    log: list[str] = []

    def start(self: Conditions, name: str, setting: Setting) -> Scripted:
        return Scripted(name, log, broken or {}, seconds.get(name.replace("-", "_"), 1.0))

    monkeypatch.setattr(Conditions, "start", start)
    return log


def test_turns_rotate_and_everyone_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    log = scripted(monkeypatch)
    found = run_group(["ours-2", "compute"], TINY, conditions(), 4, math.inf)
    assert log[:6] == ["ours-2 build", "compute build", "ours-2 step", "compute step", "compute step", "ours-2 step"]
    assert log[-2:] == ["ours-2 close", "compute close"] and found.failed == {}
    assert {name: len(taken) for name, taken in found.seconds.items()} == {"ours-2": 4, "compute": 4}
    assert found.answers["ours-2"] == {"build_s": 1.0, "peak_allocated": 6, "peak_host": 6, "peak_pinned": 6}


def test_rounds_end_in_time_with_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch)
    assert len(run_group(["ours-2"], TINY, conditions(), 9, time.monotonic()).seconds["ours-2"]) == 3
    log = scripted(monkeypatch, {("compute", "step", WARMUP + 2): OutOfTime("late")})
    found = run_group(["ours-2", "compute"], TINY, conditions(), 9, math.inf)
    assert [len(taken) for taken in found.seconds.values()] == [1, 1] and log.count("ours-2 close") == 1
    scripted(monkeypatch, {("compute", "step", 1): OutOfTime("the time was over")})
    found = run_group(["ours-2", "compute"], TINY, conditions(), 9, math.inf)
    assert found.seconds == {} and set(found.failed.values()) == {"the time was over"}


def test_out_of_memory_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = {
        ("fsdp2", "build", 0): Failed("OutOfMemoryError: CUDA out of memory"),
        ("ours-3", "step", 4): Failed("out of host memory"),
    }
    log = scripted(monkeypatch, broken, ours_2=2.0, compute=1.0)
    monkeypatch.setattr(Conditions, "rates", lambda *_: RATES.__dict__)
    monkeypatch.setattr(offload_gpu, "free_host_bytes", lambda: 2.0**50)
    names = ["compute", "ours-2", "ours-3", "fsdp2"]
    part = offload_gpu.measure_model(TINY, names, conditions(), 5, math.inf)
    assert list(part["variants"]) == ["compute", "ours-2"]
    assert part["failed"] == {"fsdp2": "OutOfMemoryError: CUDA out of memory", "ours-3": "out of host memory"}
    assert log.count("ours-2 step") == WARMUP + 5 and "fsdp2 step" not in log and "compute close" in log
    best = part["bounds_s"]["ours-2"]["total"]
    assert part["variants"]["ours-2"]["fraction_of_bound"] == best / 2.0 and part["compute_from"] == "measured"
    assert part["variants"]["compute"]["ratio"] == 0.5 and "fraction_of_bound" not in part["variants"]["compute"]
    offload_gpu.print_report({"parts": {"1.5B": json.loads(json.dumps(part)), "4B": {"left_out": "no time"}}})
    out = capsys.readouterr().out
    assert "fsdp2 failed: OutOfMemoryError" in out and "4B: no time" in out and "9.000 → 6.000" in out


def found_of(losses: dict[str, list[float]], seconds: float = 1.0) -> Found:
    """Three rounds of each."""
    return Found({name: [seconds] * 3 for name in losses}, losses, {name: {"build_s": 1.0} for name in losses}, {})


@pytest.mark.parametrize(
    ("losses", "differs"),
    [(FALLING, False), ([9, 8.1, 7.1, 6.1], False), ([9, 8, 7, 6.2], True), ([9, math.nan, 7, 6], True)],
)
def test_another_training_has_no_ratio(losses: list[float], differs: bool) -> None:
    part = assemble([["ours-2", "torchao"]], [found_of({"ours-2": FALLING, "torchao": losses})], TINY, RATES)
    row = part["variants"]["torchao"]
    assert row["loss_differs"] is differs and ("ratio" in row) is not differs


def test_who_stays_where_it_was_does_not_train() -> None:
    slowly = [9.0, 8.99, 8.98, 8.97]
    part = assemble([[]], [found_of({"ours-2": slowly, "torchao": [9.0] * 4, "compute": [9.0] * 4})], TINY, RATES)
    assert [name for name, row in part["variants"].items() if row["loss_differs"]] == ["torchao"]
    alone = assemble([["torchao"]], [found_of({"torchao": slowly})], TINY, RATES)["variants"]["torchao"]
    assert alone["loss_differs"] is None and "ratio" not in alone


def test_those_that_were_never_alive_together_have_a_ratio_of_medians() -> None:
    groups = [found_of({"ours-3": FALLING}, 2.0), found_of({"fsdp2": FALLING}, 3.0)]
    part = assemble([["ours-3"], ["fsdp2"]], groups, TINY, RATES)
    row = part["variants"]["fsdp2"]
    assert row["ratio"] == 1.5 and row["paired"] is None and part["compute_from"].startswith("the bf16 product")
    assert part["bounds_s"]["ours-3"]["compute"] == pytest.approx(flops_per_step(TINY) * 4 / 3 / 1e9)


def search(limit: int, *, most: int = 1024, late: int = 1 << 30) -> dict[str, Any]:
    """Models of up to ``limit`` layers train; from ``late`` layers on nobody knows."""

    def one(layers: int) -> dict[str, Any]:
        if layers >= late:
            raise OutOfTime("the time was over")
        return {"layers": layers, "trains": layers <= limit}

    return largest(one, 16, most, math.inf)


def test_layers_are_doubled_until_it_fails() -> None:
    found = search(40)
    assert [row["layers"] for row in found["tried"]] == [16, 32, 64, 48, 40]
    assert found["largest"]["layers"] == 40 and found["limit"] == 48 and found["ended"] == "the limit was found"
    assert [row["layers"] for row in search(0)["tried"]] == [16, 8, 4, 2, 1] and search(0)["largest"] is None
    late = search(1000, late=64)
    assert late["largest"]["layers"] == 32 and late["limit"] is None and "64 layers: the time was" in late["ended"]
    assert search(1000, most=64)["ended"] == "more than 64 layers were not tried"
    assert largest(lambda _: {}, 16, 64, 0.0)["ended"] == "the time was over"


def test_an_attempt_fails_alone_and_runs_out_of_time_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    log = scripted(monkeypatch, {("ours-2", "build", 0): Failed("ended by signal 9")})
    assert attempt("ours-2", TINY, conditions())["failed"] == "ended by signal 9" and log[-1] == "ours-2 close"
    scripted(monkeypatch)
    row = attempt("ours-2", TINY, conditions())
    assert row["trains"] and row["losses"] == [9.0, 8.0] and row["peak_host"] == row["layers"] == 2
    monkeypatch.setattr(offload_turns, "ATTEMPT_STEPS", 1)
    assert "expected finite losses that change" in attempt("ours-2", TINY, conditions())["failed"]
    log = scripted(monkeypatch, {("ours-2", "step", 1): OutOfTime("the time was over")})
    with pytest.raises(OutOfTime):
        attempt("ours-2", TINY, conditions())
    assert log[-1] == "ours-2 close"


def test_processes_answer_and_say_why_they_cannot() -> None:
    small, late = Worker(job("ours-2", floor=2.0**60)), Worker(job("ours-2"))
    with pytest.raises(Failed, match="out of host memory: it was ended when"):
        small.ask("build", math.inf)
    with pytest.raises(OutOfTime):
        late.ask("build", time.monotonic() - 1)
    with pytest.raises(Failed, match="ended by signal 9"):
        late.ask("step", math.inf)
    rates, end = Worker(job(offload_workers.RATES)), time.monotonic() + 300
    found = run_group(["ours-2"], TINY, conditions(), 3, math.inf)
    assert found.failed == {} and len(found.seconds["ours-2"]) == 3 and len(found.losses["ours-2"]) == 3 + WARMUP
    assert rates.ask(offload_workers.RATES, end)["memory"] > 0
    with pytest.raises(Failed, match="rates was told to step, expected to be built first"):
        rates.ask("step", end)
    assert not any(worker.process.is_alive() for worker in (small, late, rates))


def test_host_memory_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = offload_workers
    assert workers.free_host_bytes(tmp_path) > 0
    for name, text in {"stat": "anon 5\ninactive_file 30", "current": "130\n", "max": "1100\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text, encoding="ascii")
    assert workers.free_host_bytes(tmp_path) == 1000
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert workers.free_host_bytes(tmp_path) > 1 << 20
    assert "out of host memory" in workers.how_it_ended(-9) and workers.how_it_ended(1).endswith("with code 1")
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.peak": 3, "reserved_bytes.peak": 4})
    assert workers.peak_pinned() == 4 and workers.host_peak(5, 4, False) == 9 and workers.host_peak(5, 4, True) == 5
    monkeypatch.delattr(torch.cuda, "host_memory_stats")
    assert workers.peak_pinned() is None and workers.host_peak(5, None, False) is None


class Here:
    """A process that is this one."""

    def __init__(self, started: Job) -> None:
        self.trained = Trained(started)

    def ask(self, what: str, end: float) -> dict[str, Any]:
        return self.trained.build() if what == "build" else self.trained.step()

    def close(self) -> None:
        if self.trained.variant is not None:
            self.trained.variant.close()


def test_a_tiny_run_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_gpu, "machine", lambda device: {"name": device})
    monkeypatch.setattr(Conditions, "start", lambda self, name, setting: Here(job(name, setting)))
    monkeypatch.setattr(Conditions, "rates", lambda *_: RATES.__dict__)
    options = "--device cpu --tiny --rounds 2 --variants ours-2 compute --json --parts 1.5B largest"
    assert main(options.split()) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert "not written" in captured.err and list(result["parts"]) == ["1.5B", "largest"]
    part = result["parts"]["1.5B"]
    assert list(part["variants"]) == ["compute", "ours-2"] and part["failed"] == {}
    assert part["variants"]["ours-2"]["ratio"] == 1.0 and not part["variants"]["ours-2"]["loss_differs"]
    found = result["parts"]["largest"]["variants"]["ours-2"]
    assert [row["layers"] for row in found["tried"]] == [2, 4] and found["largest"]["layers"] == 4, found
    offload_gpu.print_report(result)
    assert "more than 4 layers were not tried" in capsys.readouterr().out


def test_without_time_nothing_is_begun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_gpu, "machine", lambda device: {"name": device})
    log = scripted(monkeypatch)
    assert main("--device cpu --tiny --minutes 1e-9".split()) == 0
    assert capsys.readouterr().out.count("the time was over") == 3 and log == []
    monkeypatch.setattr(Conditions, "rates", lambda *_: RATES.__dict__)
    part = offload_gpu.measure_model(TINY, ["ours-2", "ours-3"], conditions(5), 1, 0.0)
    assert list(part["variants"]) == ["ours-2"] and part["failed"] == {"ours-3": "not begun: the time was over"}


def test_parts_of_an_earlier_run_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "offload_gpu-x.json"
    monkeypatch.setattr(offload_gpu, "result_path", lambda name, result: path)

    def save(name: str, result: dict[str, Any]) -> Path:
        path.write_text(json.dumps(result), encoding="utf-8")
        return path

    monkeypatch.setattr(offload_gpu, "write_result", save)
    options = Namespace(no_write=False, tiny=False, device="cuda")

    def after(number: int, parts: dict[str, list[str]], packages: str = "") -> dict[str, Any]:
        made: dict[str, Any] = {key: {"variants": dict.fromkeys(names, number)} for key, names in parts.items()}
        result = {"machine": {"name": "x"}, "packages": packages, "parts": made | {"4B": {"left_out": "late"}}}
        write(result, options)
        return json.loads(path.read_text(encoding="utf-8"))["parts"]

    assert after(1, {"largest": ["ours-2", "ours-3"]}) == {"largest": {"variants": {"ours-2": 1, "ours-3": 1}}}
    assert list(after(2, {"1.5B": ["ours-2"]})) == ["1.5B", "largest"]
    assert after(3, {"largest": ["ours-2"]})["largest"]["variants"] == {"ours-2": 1, "ours-3": 1}, "a smaller one"
    assert after(4, {"largest": ["ours-2", "ours-3"]})["largest"]["variants"] == {"ours-2": 4, "ours-3": 4}
    assert list(after(5, {"largest": ["ours-2"]}, "others")) == ["largest"], "other versions"
    assert "on a GPU only" in write({}, Namespace(no_write=False, tiny=True, device="cuda"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([], "torch sees no GPU here"),
        (["--device", "cpu"], "expected --tiny"),
        (["--device", "cpu", "--tiny", "--rounds", "0"], "at least 1 round"),
        (["--device", "cpu", "--tiny", "--variants", "torchao"], "torchao needs torchao, which is not installed"),
    ],
)
def test_a_bad_command_line(
    wrong: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        parse(wrong)
    assert stopped.value.code == 2 and said in capsys.readouterr().err
