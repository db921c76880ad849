"""``benchmarks.nvme``: its pipeline gives the right states, its arithmetic, and a tiny run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.disk import takes_direct
from benchmarks.nvme import HEADER, KEPT, KEPT_HEADER, States, cells, kept_cells, kept_rows, main, parse, summarise
from shardengine.offload.host_memory import staging
from shardengine.offload.nvme.extent_file import Aio


@pytest.mark.parametrize("buffers", [3, 4])
def test_the_pipeline_steps_every_extent_once(tmp_path: Path, buffers: int) -> None:
    states = States(tmp_path, 5000, 7, buffers, Aio(block_size=8192))
    first = states.twin.clone()
    for _ in range(3):
        states.pipeline()
    assert states.proved() and not torch.equal(states.twin, first)
    for extent in states.extents:
        found = staging(states.bytes)
        states.file.read(extent, found).wait()
        assert torch.equal(found, states.twin)
    states.steps += 1
    assert not states.proved(), "a step that was not made on the disk"
    states.file.close()


@pytest.mark.parametrize("kept", list(KEPT))
def test_the_pipeline_of_every_dtype_steps_every_extent_once(tmp_path: Path, kept: str) -> None:
    states = States(tmp_path, 5120, 4, 3, Aio(block_size=8192), kept, spare=False)
    first = states.twin.clone()
    for _ in range(3):
        states.pipeline()
    assert states.proved() and not torch.equal(states.twin, first)
    per_parameter = {"fp32": 12, "bf16 states": 8, "8-bit states": 4 + 2 * (1 + 4 / 256), "bf16 weights": 10}
    expected = per_parameter.get(kept, 2 + 2 * (1 + 4 / 256))
    assert 0 <= states.bytes - expected * 5120 < 4096 and not states.spare
    states.file.close()


def test_dtypes_are_compared_with_fp32_states_of_the_same_weights() -> None:
    seconds = {name: 20 * [4.0] for name in ("pipeline", "step", "pipeline, bf16 weights", "step, bf16 weights")}
    for name in ("bf16 states", "8-bit states", "bf16 weights, 8-bit states"):
        seconds |= {f"pipeline, {name}": 20 * [1.0 if "weights" in name else 2.0], f"step, {name}": 20 * [0.5]}
    moved = {"fp32": 24.0, "bf16 states": 16.0, "8-bit states": 12.0, "bf16 weights": 20.0}
    rows = kept_rows(seconds, moved | {"bf16 weights, 8-bit states": 12.0})
    assert rows["8-bit states"]["speed"]["median"] == 2.0 and rows["8-bit states"]["at_most"] == 2.0
    assert rows["8-bit states"]["states_fewer"] == 4.0 and rows["8-bit states"]["verdict"] == "reached"
    last = rows["bf16 weights, 8-bit states"]
    assert (last["speed"]["median"], last["states_fewer"], last["verdict"]) == (4.0, 2.0, "missed")
    assert "target" not in rows["bf16 states"] and "speed" not in rows["bf16 weights"]
    lines = kept_cells(rows)
    assert len(lines) == len(KEPT) and {len(line) for line in lines} == {len(KEPT_HEADER)}


def test_transfers_alone_change_no_state(tmp_path: Path) -> None:
    states = States(tmp_path, 5000, 7, 4, Aio(block_size=8192))
    states.move(reading=True)
    assert all(torch.equal(buffer, states.twin) for buffer in states.buffers)
    for buffer in states.buffers:
        buffer.fill_(3)
    states.move(writing=True)
    found = staging(states.bytes)
    for extent in states.spare:
        states.file.read(extent, found).wait()
        assert bool((found == 3).all())
    states.move(reading=True, writing=True)
    assert states.proved()
    states.file.close()


def test_a_line_is_compared_with_the_best_raw_way() -> None:
    times = {"read": (2.0, 1.0), "write": (1.0, 3.0), "both": (2.0, 4.0)}
    seconds = {f"raw {kind}, {way}": 24 * [times[kind][number]] for kind in times for number, way in enumerate("ab")}
    seconds |= {"extents read": 24 * [1.25], "extents write": 24 * [1.1], "step": 24 * [0.5], "pipeline": 24 * [4.0]}
    rows = summarise({"seconds": seconds, "busy": {name: 24 * [0.5] for name in seconds}}, 5_000_000_000)
    assert list(rows)[:3] == ["raw read, b", "raw write, a", "raw both, a"]
    assert rows["extents read"]["gb_per_s"] == 4.0 and rows["step"]["cores_busy"] == 1.0
    verdicts = {name: row["verdict"] for name, row in rows.items() if "verdict" in row}
    assert verdicts == {"extents read": "missed", "extents write": "reached", "pipeline": "missed"}
    assert {base: ratio["median"] for base, ratio in rows["pipeline"]["of"].items()} == {
        "raw both, a": 0.5, "raw read, b": 0.25, "raw write, a": 0.25,
    }  # fmt: skip
    lines = cells(rows)
    assert len(lines) == 3 + 2 + 1 + 3 and {len(line) for line in lines} == {len(HEADER)}


@pytest.mark.parametrize(
    "wrong", [["--buffers", "2"], ["--rounds", "0"], ["--block-size", "5"], ["--directory", "/proc"]]
)
def test_a_bad_command_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)
    assert "expected a" in capsys.readouterr().err


@pytest.fixture
def threads() -> Iterator[None]:
    """The run takes all cores."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not takes_direct(tmp_path):
        pytest.skip("the file system of the temporary directory refuses O_DIRECT")
    tiny = ["--rounds", "2", "--mib", "4", "--extents", "5", "--block-size", "65536", "--no-write", "--json"]
    assert main([*tiny, "--directory", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["same_bits_as_in_memory"] and result["rows"]["pipeline"]["verdict"] == "not decided"
    assert {len(values) for values in result["seconds"].values()} == {2}
    assert set(result["kept"]) == set(KEPT) and "pipeline, 8-bit states" not in result["rows"]
    assert result["setting"]["block_size"] == 65536 and list(tmp_path.iterdir()) == []
