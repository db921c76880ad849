"""What is printed while a run lasts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardengine.app import report
from shardengine.app.report import Progress, RunReport


def test_the_time_that_is_left_follows_from_steps_and_not_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of a run that goes on: 100 s of start, a first step of 10 s, then 2 s each, and 1 s between steps."""
    now = [0.0]
    monkeypatch.setattr("shardengine.app.report.time.monotonic", lambda: now[0])
    monkeypatch.setattr(report, "peak_bytes", lambda engine: 1)
    settings: Any = SimpleNamespace(output=tmp_path)
    engine: Any = SimpleNamespace(get_global_grad_norm=lambda: 1.0, get_loss_scale=lambda: 1, skipped_steps=0)
    engine.device = torch.device("cpu")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 2.0}\n', encoding="utf-8")
    out = RunReport(settings, steps=11, every=1, enabled=True)
    out._continue(0)
    now[0] = 100.0
    for step in range(1, 11):
        seconds = 10.0 if step == 1 else 2.0
        now[0] += seconds
        out.step(engine, Progress(step=step, loss=1.0, seconds=seconds, tokens=8))
        now[0] += 1.0
    left = [line.split("eta ")[1] for line in capsys.readouterr().out.splitlines() if re.match("step +[0-9]+/", line)]
    assert left[0] == report.duration(100.0)
    assert left[1:] == [report.duration(3.0 * (11 - step)) for step in range(2, 11)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("supported", [True, False])
def test_that_a_cpu_has_no_instructions_for_16_bits_is_noted(
    dtype: torch.dtype, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    for each in ("bf16", "fp16"):
        has = supported if each == name else not supported
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{each}_supported", lambda has=has: has, raising=False)
    for device in ("cpu", "cuda"):
        engine: Any = SimpleNamespace(module=torch.nn.Linear(2, 2).to(dtype), device=torch.device(device))
        said = report.slow_on_a_cpu(engine)
        assert len(said) == int(device == "cpu" and not supported and dtype != torch.float32)
        assert all(f"no instructions for {name}" in each and f"--set {name}.enabled=false" in each for each in said)
