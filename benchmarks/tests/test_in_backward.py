"""``benchmarks.in_backward``: a tiny run, whose engines have the same bits, and its arithmetic."""

from __future__ import annotations

import json

import pytest

from benchmarks import in_backward


@pytest.mark.usefixtures("forked_ranks")
def test_a_tiny_run(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--rounds", "2", "--width", "8", "--layers", "3", "--rows", "2", "--json", "--no-write"]
    assert in_backward.main(asked) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["setting"]["parameters"] == 3 * 72
    assert all(len(seconds) == 2 for seconds in result["seconds"].values())
    assert tuple(result["rows"]) == in_backward.ROWS


def test_rows_are_compared_with_one_after_the_other() -> None:
    rows = in_backward.summarise({"backward": [2.0] * 3, "step": [2.0] * 3, "after": [4.0] * 3, "beside": [3.0] * 3})
    assert [cell[1:] for cell in in_backward.cells(rows)][-1] == ["3000.0", "0.750 [0.750, 0.750]"]


def test_other_bits_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_backward, "same_bits", lambda engines: False)
    with pytest.raises(SystemExit, match="different weights"):
        in_backward.main(["--rounds", "1", "--width", "4", "--layers", "1", "--rows", "1", "--no-write"])
