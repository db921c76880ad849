"""``benchmarks.optimizers``: a tiny run, whose classes have the bits of plain torch, and its arithmetic."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import optimizers

SMALL = ["--rounds", "2", "--width", "8", "--layers", "2", "--no-write"]


def test_a_tiny_run_has_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert optimizers.main([*SMALL, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert tuple(result["rows"]) == tuple(optimizers.CLASSES)
    assert all(row["same_bits"] for row in result["rows"].values() if row["by"] == "its class")


def test_the_ratio_is_of_plain_torch() -> None:
    row: dict[str, Any] = {"seconds": {"ours": [2.0] * 3, "plain": [4.0] * 3}, "trial_s": 0.05, "same_bits": True}
    rows = optimizers.summarise({"NAdam": {**row, "by": "its class"}})
    assert optimizers.cells(rows) == [["NAdam", "its class", "50", "2000.0", "0.500 [0.500, 0.500]", ""]]


def test_beside_deepspeed() -> None:
    whole = {"ours": [1.0] * 3, "deepspeed": [4.0] * 3}
    seconds = {"ours": [1.0] * 3, "plain": [1.0] * 3}
    row: dict[str, Any] = {"seconds": seconds, "whole": whole, "trial_s": 0.0, "same_bits": True, "by": "owners"}
    assert optimizers.cells(optimizers.summarise({"Muon": row}))[0][-1] == "0.250 [0.250, 0.250]"


def test_other_weights_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = optimizers.measure
    monkeypatch.setattr(optimizers, "measure", lambda *given: {**plain(*given), "same_bits": False})
    with pytest.raises(SystemExit, match="other weights than plain torch: AMSGrad"):
        optimizers.main(SMALL)
