"""``benchmarks.gpu_step``: its formulas and verdicts on made-up times, its model, every competitor, and a tiny run."""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException

from benchmarks import gpu_ranks, gpu_step
from benchmarks.gpu_ranks import GpuPlan, measure
from benchmarks.gpu_step import MODELS, TINY, Model, flops_per_step, main, parse, summarise, waits_verdict, write
from benchmarks.gpu_variants import COMPETITORS, MasterLoop, installed
from benchmarks.ranks import groups_of
from benchmarks.workload import CLIP, LEARNING_RATE, WEIGHT_DECAY, Setting, batch_of, make_model
from tests.support.ranks import RankPool

SETTING = TINY["tiny"].setting


def plan_of(*variants: str, own: bool = True) -> GpuPlan:
    """A tiny run on a CPU."""
    return GpuPlan(SETTING, variants, "cpu", own, 2, 2, 16, time.monotonic() + 60, "")


def test_flops_are_those_counted_by_hand() -> None:
    assert flops_per_step(Setting(1, 2, 64, 96, 2, 16)) == 32 * (6 * 107_264 + 12 * 2 * 64 * 16)
    assert SETTING.parameters() == 107_264
    large = MODELS["1.5B"].setting
    assert round(large.parameters() / 1e6) == 1558 and round(MODELS["124M"].setting.parameters() / 1e6) == 124
    assert flops_per_step(large) == pytest.approx(8192 * (6 * 1.5576e9 + 12 * 48 * 1600 * 1024), rel=1e-4)


def found_of(
    seconds: dict[str, float], *, rounds: int = 20, waits: int | None = 0, loss: float = 5.0, flops: float = 1e9
) -> dict[str, Any]:
    """What ``measure`` gives: ``waits`` and ``loss`` are those of everyone but the plain loop."""
    alone = {
        name: {
            "peak_allocated_bytes": 100, "peak_reserved_bytes": 200, "kernels": 7, "loss_alone": 6.0,
            "waits": None if waits is None else {"cudaStreamSynchronize": 1 if name == "compute" else waits},
        }
        for name in seconds
    }  # fmt: skip
    return {
        "peak_flops": flops,
        "alone": alone,
        "seconds": {name: [value] * rounds for name, value in seconds.items()},
        "losses": {name: [9.0, 5.0 if name == "compute" else loss] for name in seconds},
        "failed": {},
        "why_not_counted": None,
    }


@pytest.mark.parametrize(
    ("ours", "rounds", "outcome"),
    [(1.005, 20, "reached"), (1.03, 20, "reached"), (1.04, 20, "missed"), (1.0, 19, "not decided")],
)
def test_overhead_is_judged_by_the_ratio_to_the_plain_loop(ours: float, rounds: int, outcome: str) -> None:
    rows = summarise(found_of({"compute": 1.0, "ours-2": ours}, rounds=rounds), SETTING, targets=True)
    assert rows["ours-2"]["ratio"]["median"] == ours and rows["ours-2"]["verdict"] == outcome
    assert "verdict" not in rows["compute"]


def test_mfu_and_tokens_are_of_the_measured_product() -> None:
    flops = flops_per_step(SETTING)
    row = summarise(found_of({"compute": 0.5}, flops=4 * flops), SETTING, targets=True)["compute"]
    assert row["mfu"] == 0.5 and row["tokens_per_s"] == 64 and row["state_formula_bytes"] == 16 * 107_264


def test_peers_and_a_cpu_have_no_targets() -> None:
    found = found_of({"compute": 1.0, "fsdp2": 2.0, "ours-0": 2.0})
    assert "verdict" not in summarise(found, SETTING, targets=True)["fsdp2"]
    assert "verdict" not in summarise(found, SETTING, targets=False)["ours-0"]


def test_waits_beyond_the_plain_loops_are_missed() -> None:
    assert waits_verdict({"a": 1}, {"b": 1}) == waits_verdict({}, {}) == "reached"
    assert waits_verdict({"a": 1, "b": 1}, {"b": 1}) == "missed"
    assert waits_verdict(None, {}) == waits_verdict({}, None) == "not decided"
    for waits, outcome in ((1, "reached"), (2, "missed"), (None, "not decided")):
        rows = summarise(found_of({"compute": 1.0, "ours-1": 1.0}, waits=waits), SETTING, targets=True)
        assert rows["ours-1"]["waits_verdict"] == outcome


@pytest.mark.parametrize(("loss", "differs"), [(5.0, False), (5.09, False), (5.11, True), (math.nan, True)])
def test_another_loss_than_the_plain_loops_is_marked(loss: float, differs: bool) -> None:
    rows = summarise(found_of({"compute": 1.0, "ours-1": 1.0}, loss=loss), SETTING, targets=True)
    assert rows["ours-1"]["loss_differs"] is differs and not rows["compute"]["loss_differs"]


def test_a_group_without_its_plain_loop_has_no_ratio() -> None:
    row = summarise(found_of({"ours-1": 1.0}), SETTING, targets=True)["ours-1"]
    assert "ratio" not in row and "verdict" not in row and row["median_ms"] == 1000


def test_groups_carry_the_plain_loop_and_fit() -> None:
    large = MODELS["1.5B"].setting

    def groups(free: int) -> list[list[str]]:
        room = gpu_step.room_bytes(large)
        return groups_of(large, list(COMPETITORS), free, entries=COMPETITORS, references=("compute",), rank_bytes=room)

    assert [group[1] for group in groups(2**45)] == ["ddp", "deepspeed-1", "ours-0"]
    assert all(group[0] == "compute" and len(group) == 2 for group in groups(115 * 10**9))
    with pytest.raises(SystemExit, match="GiB are free"):
        groups(80 * 10**9)


def test_where_two_do_not_fit_the_plain_loop_is_apart() -> None:
    large = MODELS["1.5B"].setting
    names = ["compute", "ours-2", "ours-3"]
    assert gpu_step.plan_groups(large, names, 120 * 10**9) == [["compute", "ours-2"], ["compute", "ours-3"]]
    assert gpu_step.plan_groups(large, names, 85 * 10**9) == [["compute"], ["ours-2"], ["ours-3"]]
    assert gpu_step.plan_groups(replace(large, batch=2), names, 85 * 10**9)[0] == ["compute", "ours-2"]
    with pytest.raises(SystemExit, match="GiB are free"):
        gpu_step.plan_groups(large, names, 60 * 10**9)


def test_apart_a_ratio_is_one_of_medians(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(plan: GpuPlan) -> dict:
        return found_of(dict.fromkeys(plan.variants, 1.0 if plan.variants == ("compute",) else 1.5), loss=5.2)

    result = run_plans(monkeypatch, run, [["compute"], ["ours-2"]])
    row = result["variants"]["ours-2"]
    assert row["ratio_apart"] == 1.5 and row["loss_differs"] and "ratio" not in row and "verdict" not in row
    assert "ratio_apart" not in result["variants"]["compute"]
    gpu_step.print_report({"models": {"tiny": result}})
    assert "50.0 apart" in capsys.readouterr().out


def run_plans(monkeypatch: pytest.MonkeyPatch, run: Callable[[GpuPlan], dict], groups: list[list[str]]) -> dict:
    """``measure_model`` with made-up processes."""
    monkeypatch.setattr(gpu_step, "run_group", run)
    options = Namespace(device="cuda", own_model=True, rounds=20)
    return gpu_step.measure_model(Model(SETTING, 1), groups, options, time.monotonic() + 100)


def test_who_does_not_fit_beside_others_gets_a_process_with_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[GpuPlan] = []

    def run(plan: GpuPlan) -> dict:
        plans.append(plan)
        if len(plan.variants) < 3:
            return found_of(dict.fromkeys(plan.variants, 1.0))
        failed = {"ours-1": "OutOfMemoryError: CUDA out of memory", "ours-2": "RuntimeError: broken"}
        return found_of({"compute": 1.0, "ours-0": 1.0}) | {"failed": failed}

    result = run_plans(monkeypatch, run, [["compute", "ours-0", "ours-1", "ours-2"], ["compute", "ours-3"]])
    assert [plan.variants for plan in plans[1:]] == [("compute", "ours-3"), ("compute", "ours-1")]
    assert plans[0].until < plans[1].until and plans[0].product == 8192
    assert list(result["variants"]) == ["compute", "ours-0", "ours-1", "ours-3"]
    assert result["failed"] == {"ours-2": "RuntimeError: broken"} and len(result["references"]) == 3
    assert [result["variants"][name]["group"] for name in ("compute", "ours-1", "ours-3")] == [0, 2, 1]


def test_a_process_that_dies_ends_no_other_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(plan: GpuPlan) -> dict:
        if "fsdp2" in plan.variants:
            raise ProcessExitedException("process 0 died", 0, 1, -9)
        return found_of(dict.fromkeys(plan.variants, 1.0))

    result = run_plans(monkeypatch, run, [["compute", "fsdp2"], ["compute", "ours-3"]])
    assert list(result["variants"]) == ["compute", "ours-3"] and result["failed"] == {"fsdp2": "process 0 died"}
    gpu_step.print_report({"models": {"tiny": result, "1.5B": {"left_out": "too large"}}})
    out = capsys.readouterr().out
    assert "fsdp2 failed: process 0 died" in out and "1.5B: too large" in out and "1: reached" in out


def test_own_model_has_the_parameters_of_hugging_faces_and_learns_the_same() -> None:
    own, theirs = make_model(SETTING, own=True), make_model(SETTING)
    shapes = {name: tuple(p.shape) for name, p in own.named_parameters()}
    assert list(shapes) == [name for name, _ in theirs.named_parameters()]
    weights = theirs.state_dict()
    for name, value in weights.items():
        weights[name] = value.T if shapes.get(name, tuple(value.shape)) != tuple(value.shape) else value
    square = [name for name in weights if name.endswith("attn.c_proj.weight")]
    weights |= {name: weights[name].T for name in square}
    own.load_state_dict(weights)
    batch = batch_of(SETTING, 0, 0)
    losses = [model(**batch).loss for model in (own, theirs)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    gradients = [model.get_submodule("transformer.ln_f").weight.grad for model in (own, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_the_plain_loop_steps_fp32_masters() -> None:
    model = make_model(SETTING, own=True)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    loop = MasterLoop(model, SETTING)
    loop.backward(loop.forward(batch_of(SETTING, 0, 0)))
    gradients = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
    loop.update()
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    scale = min(1.0, CLIP / (norm + 1e-6))
    for old, gradient, master, weight in zip(start, gradients, loop.masters, loop.weights, strict=True):
        gradient = gradient * scale
        expected = old * (1 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(master.detach(), expected, rtol=1e-4, atol=1e-6)
        assert weight.dtype is torch.bfloat16 and torch.equal(weight, master.bfloat16()) and weight.grad is None


def test_every_competitor_trains_and_reports(pools: Callable[[int], RankPool]) -> None:
    names = [name for name in COMPETITORS if installed(name) and not name.startswith("deepspeed")]
    (found,) = pools(1).run(measure, plan_of(*names))
    assert found["failed"] == {} and found["why_not_counted"] == "not on CPU" and found["peak_flops"] > 0
    assert list(found["seconds"]) == list(found["alone"]) == names
    for name in names:
        row = found["alone"][name]
        assert row["peak_allocated_bytes"] is row["peak_reserved_bytes"] is row["waits"] is row["kernels"] is None
        assert len(found["seconds"][name]) == 2 and len(found["losses"][name]) == 2 + gpu_ranks.WARMUP
    rows = summarise(json.loads(json.dumps(found)), SETTING, targets=False)
    assert not any(row["loss_differs"] for row in rows.values())
    lasts = {name: row["losses"] for name, row in rows.items()}
    assert lasts["ours-0"] == lasts["ours-1"] == lasts["ours-2"] == lasts["ours-3"] and lasts["ddp"] == lasts["compute"]


def refuse(model: Any, setting: Setting) -> Any:
    """A competitor that cannot be built."""
    raise ZeroDivisionError("no such library\nand more")


def broken(plan: GpuPlan) -> dict[str, Any]:
    """A group in which ``ours-0`` cannot be built."""
    entry = COMPETITORS["ours-0"]
    COMPETITORS["ours-0"] = replace(entry, build=refuse)
    try:
        return measure(plan)
    finally:
        COMPETITORS["ours-0"] = entry


def test_a_competitor_that_fails_is_named_and_the_others_go_on(pools: Callable[[int], RankPool]) -> None:
    (found,) = pools(1).run(broken, plan_of("compute", "ours-0"))
    assert found["failed"] == {"ours-0": "ZeroDivisionError: no such library"}
    assert list(found["seconds"]) == ["compute"]


def test_a_tiny_run_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_step, "machine", lambda device: {"name": device})
    options = [
        "--device",
        "cpu",
        "--tiny",
        "--own-model",
        "--rounds",
        "2",
        "--variants",
        "ours-2",
        "--json",
        "--batch",
        "1",
    ]
    assert main(options) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert "not written" in captured.err and result["device"] == "cpu" and result["packages"] == {}
    model = result["models"]["tiny"]
    assert list(model["variants"]) == ["compute", "ours-2"] and model["failed"] == {}
    assert model["setting"]["batch"] == 1
    row = model["variants"]["ours-2"]
    assert len(row["seconds"]) == 2 and row["ratio"]["rounds"] == 2 and row["mfu"] > 0 and "verdict" not in row
    assert row["waits"] is None and model["why_not_counted"] == "not on CPU"
    gpu_step.print_report(result)
    assert "were not counted: not on CPU" in capsys.readouterr().out


def test_a_smaller_run_does_not_replace_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpu_step-x.json"
    monkeypatch.setattr(gpu_step, "result_path", lambda name, result: path)
    monkeypatch.setattr(gpu_step, "write_result", lambda name, result: path)
    options = Namespace(tiny=False, device="cuda", batch=None)
    result: dict[str, Any] = {
        "models": {"124M": {"variants": {"compute": {}, "fsdp2": {}}}, "1.5B": {"variants": {"compute": {}}}}
    }
    assert write(result, options).startswith("written to")
    path.write_text(json.dumps(result), encoding="utf-8")
    assert write(result, options).startswith("written to")
    fewer: dict[str, Any] = {"models": {"124M": {"variants": {"compute": {}}}}}
    assert "also holds 124M fsdp2, 1.5B compute" in write(fewer, options)
    assert "on a GPU only" in write(result, Namespace(tiny=True, device="cuda", batch=None))
    assert "own batch only" in write(result, Namespace(tiny=False, device="cuda", batch=2))


@pytest.mark.parametrize(
    "bad",
    [
        ["--rounds", "0", "--device", "cpu"],
        ["--batch", "0", "--device", "cpu"],
        ["--models", "7B"],
        ["--variants", "none"],
    ],
)
def test_bad_usage_is_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(bad)
    assert stopped.value.code == 2 and bad[0] in capsys.readouterr().err


def test_what_is_not_installed_is_left_out_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu_step.chosen(None) == ["compute", "ddp", "fsdp2", "ours-0", "ours-1", "ours-2", "ours-3"]
    assert "left out: deepspeed-3" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="deepspeed-1 needs deepspeed"):
        gpu_step.chosen(["deepspeed-1"])
    assert parse(["--device", "cpu"]).own_model
