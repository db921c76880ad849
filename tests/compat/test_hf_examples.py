"""The examples for Hugging Face's libraries train at stage 3, and print what they print under DDP."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks

LIBRARIES = ("transformers", "accelerate", "peft", "trl", "datasets")
_MISSING = [name for name in LIBRARIES if find_spec(name) is None]  # not imported here
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are not installed")
EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS, STEPS = 2, 6
LAUNCH = ["--use_deepspeed", "--zero_stage", "3", "--num_processes", str(RANKS), "example.py"]
Losses = list[dict[str, float]]


def _import() -> None:
    from shardengine.compat.deepspeed import stand_in

    stand_in.install()
    from transformers import Seq2SeqTrainer, Trainer  # noqa: F401
    from trl import DPOTrainer, SFTTrainer  # noqa: F401

    sys.path.insert(0, str(EXAMPLES))
    import hf_tiny  # type: ignore[import-not-found]  # noqa: F401


def _run(
    say: Callable[[Any], None], rank: int, folder: str, port: int, name: str, given: list[str], launched: bool, hidden: str
) -> None:  # fmt: skip
    """What the example printed, and its exit status. launched: by accelerate for stage 3 · hidden: a missing module."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    if launched:
        os.environ |= environment()
    if hidden:
        vars(sys)["modules"][hidden] = None
    os.chdir(folder)
    sys.argv = [name, *given]
    printed, status = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as end:
        status = int(end.code or 0)
    say((printed.getvalue(), status))


def environment() -> dict[str, str]:
    """What ``accelerate launch`` tells the ranks."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    options, _, _ = _validate_launch_command(launch_command_parser().parse_args(LAUNCH))
    _, told = prepare_deepspeed_cmd_env(options)
    return {key: value for key, value in told.items() if key.startswith("ACCELERATE_")}


class Examples:
    """Processes that have imported the libraries."""

    def __init__(self) -> None:
        self.forks = Forks(_import)

    def run(self, folder: Path, name: str, *given: object, launched: bool = False, hidden: str = "") -> tuple[str, int]:
        """What rank 0 printed, and the exit status, which is that of all ranks."""
        folder.mkdir(exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = [str(each) for each in given]
        said = self.forks.live(_run, str(folder), port, name, arguments, launched, hidden, ranks=RANKS)
        ((printed, status),), *others = said
        assert all(other == status for ((_, other),) in others)
        return printed, status

    def losses(self, folder: Path, name: str, *given: object, launched: bool = False) -> Losses:
        """By name, of each line that begins with "step"."""
        printed, status = self.run(folder, name, *given, launched=launched)
        assert status == 0, printed
        lines = [line.split(":") for line in printed.splitlines() if line.startswith("step ")]
        return [
            {"step": float(step.split()[1]), **{k: float(v) for k, v in (each.split() for each in values.split(","))}}
            for step, values in lines
        ]


@pytest.fixture(scope="module")
def examples() -> Iterator[Examples]:
    examples = Examples()
    yield examples
    examples.forks.end()


def assert_same(found: Losses, expected: Losses) -> None:
    """Within fp32's rounding; and that training has lowered the loss."""
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, abs=1e-6), (row, other)
    trained = [row["loss"] for row in found if "loss" in row]
    assert len(trained) == STEPS and trained[-1] < trained[0]


@pytest.mark.parametrize("name", ["trainer", "sft_lora", "dpo", "classification", "seq2seq"])
def test_an_example_prints_at_stage_3_what_it_prints_under_ddp(name: str, examples: Examples, tmp_path: Path) -> None:
    script = f"hf_{name}.py"
    sharded = examples.losses(tmp_path / "sharded", script, "--stage", 3, "--steps", STEPS)
    assert_same(sharded, examples.losses(tmp_path / "ddp", script, "--steps", STEPS))


def test_a_loop_with_accelerate_goes_on_from_its_checkpoint(examples: Examples, tmp_path: Path) -> None:
    kinds: list[Losses] = []
    for launched in (True, False):
        folder = tmp_path / f"launched-{launched}"
        losses = [examples.losses(folder, "accelerate_loop.py", "--steps", n, launched=launched) for n in (4, STEPS)]
        assert [row["step"] for row in losses[1]] == [5, 6]
        kinds.append(losses[0] + losses[1])
    assert_same(*kinds)


def test_qlora_names_what_is_missing(examples: Examples, tmp_path: Path) -> None:
    printed, status = examples.run(tmp_path, "hf_qlora.py", hidden="bitsandbytes")
    assert status == 2 and printed.splitlines()[-1].endswith("pip install bitsandbytes")


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_qlora_trains_on_a_base_of_4_bits(examples: Examples, tmp_path: Path) -> None:
    sharded = examples.losses(tmp_path / "sharded", "hf_qlora.py", "--stage", 3, "--steps", STEPS)
    assert_same(sharded, examples.losses(tmp_path / "ddp", "hf_qlora.py", "--steps", STEPS))
