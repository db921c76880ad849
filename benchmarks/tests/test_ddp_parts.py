"""``benchmarks.ddp_parts``: a tiny run, and how rounds become medians."""

from __future__ import annotations

import pytest

from benchmarks import ddp_parts


@pytest.mark.usefixtures("forked_ranks")
def test_a_tiny_run_times_every_config_and_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert ddp_parts.main("--ranks 2 --rounds 2 --warmup 1 --hidden 64 --no-write".split()) == 0
    said = capsys.readouterr()
    assert all(name in said.out for name in ddp_parts.POINTS) and "2 ranks, ms" in said.out
    assert all(name in said.out for name in ddp_parts.operations(7600, 1)) and "as asked" in said.err


def test_medians_are_of_rounds() -> None:
    rounds = [[0.001, 0.002, 0.003, 0.006], [0.003, 0.004, 0.005, 0.012], [0.002, 0.003, 0.004, 0.009]]
    seconds = dict.fromkeys(ddp_parts.POINTS, rounds) | {"all-to-all": [[0.5], [0.1], [0.2]]}
    found = ddp_parts.summarise(seconds)
    row = found["steps"]["ours auto"]
    assert [round(row[phase], 6) for phase in ddp_parts.PHASES] == [2, 3, 4, 9] and row["of_base"]["median"] == 1
    assert found["alone"] == {"all-to-all": 200}


def test_what_is_mistyped_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ddp_parts.main(["--hidden", "65"])
    assert "a multiple of 64" in capsys.readouterr().err
