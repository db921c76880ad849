"""The examples for Hugging Face's libraries train at stage 3, and log what they log under DDP."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forks import Forks
from tests.support.program_runs import Log, free_port, join

LIBRARIES = ("transformers", "accelerate", "peft", "trl", "datasets")
_MISSING = [name for name in LIBRARIES if find_spec(name) is None]  # not imported here
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are not installed")
EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS, STEPS = 2, 6
LAUNCH = ["--use_deepspeed", "--zero_stage", "3", "--num_processes", str(RANKS), "example.py"]
TIMES = ("runtime", "per_second", "preparation_time")


def _import() -> None:
    from shardengine.compat.deepspeed import stand_in

    stand_in.install()
    from transformers import Seq2SeqTrainer, Trainer  # noqa: F401
    from trl import DPOTrainer, SFTTrainer  # noqa: F401

    sys.path.insert(0, str(EXAMPLES))
    import hf_tiny  # type: ignore[import-not-found]  # noqa: F401


def _run(say: Callable[[Any], None], rank: int, folder: str, port: int, given: list[str], how: dict[str, Any]) -> None:
    """What the example printed, and its exit status. how: launched, by accelerate for stage 3 · hidden, a module."""
    join(rank, RANKS, port)
    if how.get("launched"):
        os.environ |= environment()
    if how.get("hidden"):
        vars(sys)["modules"][how["hidden"]] = None
    os.chdir(folder)
    sys.argv = given
    printed, status = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            runpy.run_path(str(EXAMPLES / given[0]), run_name="__main__")
    except SystemExit as end:
        status = int(end.code or 0)
    say((printed.getvalue(), status))


def environment() -> dict[str, str]:
    """What ``accelerate launch`` tells the ranks."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    options, _, _ = _validate_launch_command(launch_command_parser().parse_args(LAUNCH))
    options.deepspeed_fields_from_accelerate_config = ""  # launch_command sets it
    _, told = prepare_deepspeed_cmd_env(options)
    return {key: value for key, value in told.items() if key.startswith("ACCELERATE_")}


class Examples:
    """Processes that have imported the libraries."""

    def __init__(self) -> None:
        self.forks = Forks(_import)

    def run(self, folder: Path, *given: object, **how: Any) -> tuple[str, int]:
        """What rank 0 printed, and the exit status, which is that of all ranks. given: the program, its options."""
        folder.mkdir(exist_ok=True)
        said = self.forks.live(_run, str(folder), free_port(), [str(each) for each in given], how, ranks=RANKS)
        ((printed, status),), *others = said
        assert all(other == status for ((_, other),) in others)
        return printed, status

    def train(self, folder: Path, *given: object, **how: Any) -> str:
        """What rank 0 printed until the example ended well."""
        printed, status = self.run(folder, *given, **how)
        assert status == 0, printed
        return printed

    def log(self, folder: Path, name: str, *given: object) -> Log:
        """Of a Trainer, from its last checkpoint."""
        self.train(folder, f"{name}.py", "--steps", STEPS, *given)
        state = json.loads((folder / f"runs/{name}/checkpoint-{STEPS}/trainer_state.json").read_text())
        rows: Log = state["log_history"]
        return [{key: value for key, value in row.items() if not key.endswith(TIMES)} for row in rows]


@pytest.fixture(scope="module")
def examples() -> Iterator[Examples]:
    examples = Examples()
    yield examples
    examples.forks.end()


def assert_same(found: Log, expected: Log) -> None:
    """Within fp32's rounding; and that training has lowered the loss."""
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=2e-6), (row, other)
    trained = [row["loss"] for row in found if "loss" in row]
    assert len(trained) == STEPS and trained[-1] < trained[0]


DEEPSPEED = ("--deepspeed", EXAMPLES / "ds_zero3.json")


@pytest.mark.parametrize(
    ("name", "sharded"),
    [
        ("hf_trainer", DEEPSPEED),
        ("hf_sft_lora", DEEPSPEED),
        ("hf_dpo", DEEPSPEED),
        ("hf_classification", ("--stage", 3)),
        ("hf_seq2seq", ("--stage", 3)),
    ],
)
def test_an_example_logs_at_stage_3_what_it_logs_under_ddp(
    name: str, sharded: tuple[object, ...], examples: Examples, tmp_path: Path
) -> None:
    log = examples.log(tmp_path / "sharded", name, *sharded)
    assert_same(log, examples.log(tmp_path / "ddp", name))
    folders = [tmp_path / kind / f"runs/{name}" for kind in ("sharded", "ddp")]
    weights, expected = (load_file(next(folder.glob("*model.safetensors"))) for folder in folders)
    assert weights.keys() == expected.keys()
    for key, value in weights.items():
        assert torch.allclose(value, expected[key], atol=1e-4), key


def test_a_loop_with_accelerate_goes_on_from_its_checkpoint(examples: Examples, tmp_path: Path) -> None:
    kinds: list[Log] = []
    ways: list[tuple[tuple[object, ...], bool]] = [((), False), (("--stage", 3), False), ((), True)]
    for number, (given, launched) in enumerate(ways):
        lines: list[str] = []
        for steps in (4, STEPS):  # the second goes on
            printed = examples.train(
                tmp_path / str(number), "accelerate_loop.py", "--steps", steps, *given, launched=launched
            )
            lines += [line for line in printed.splitlines() if line.startswith("step ")]
        found = [re.fullmatch(r"step (\d+): loss (\S+)", line) for line in lines]
        kinds.append([{"step": float(each[1]), "loss": float(each[2])} for each in found if each])
    for kind in kinds:
        assert [row["step"] for row in kind] == list(range(1, STEPS + 1))
        assert_same(kind, kinds[0])


def test_qlora_names_what_is_missing(examples: Examples, tmp_path: Path) -> None:
    printed, status = examples.run(tmp_path, "hf_qlora.py", hidden="bitsandbytes")
    assert status == 2 and printed.splitlines()[-1].endswith("pip install bitsandbytes")


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_qlora_trains_on_a_base_of_4_bits(examples: Examples, tmp_path: Path) -> None:
    log = examples.log(tmp_path / "sharded", "hf_qlora", "--stage", 3)
    assert_same(log, examples.log(tmp_path / "ddp", "hf_qlora"))
