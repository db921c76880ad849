"""transformers' Trainer, as it is, with a DeepSpeed config: the same log as under DDP, at every stage; resuming."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forks import Forks

_MISSING = [name for name in ("transformers", "accelerate", "peft") if find_spec(name) is None]  # not imported here
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are not installed")
Log = list[dict[str, float]]


def _import() -> None:
    import tests.compat.trainers  # noqa: F401


def _make(*args: Any) -> None:
    from tests.compat import trainers

    trainers.make_model(*args)


def _train(say: Any, rank: int, folder: str, port: int, stage: int | None, output: str, options: Any) -> None:
    from tests.compat import trainers

    trainers.train(say, rank, folder, port, trainers.Run(stage, output, **options))


class Runs:
    """A model on the disk, and runs of Trainer over it, each once."""

    def __init__(self, folder: Path) -> None:
        self._forks = Forks(_import)  # nothing has looked for a deepspeed there
        self.folder = folder
        self._forks.live(_make, str(folder / "model"))
        self._logs: dict[str, Log] = {}

    def output(self, stage: int | None, **options: Any) -> Path:
        """Where this run writes."""
        name = f"{stage}-{sorted(options.items())}"
        return self.folder / "".join(
            letter if letter.isalnum() else "-" for letter in name.replace(str(self.folder), "")
        )

    def log(self, stage: int | None, **options: Any) -> Log:
        """Of a run at ``stage``; options: of ``trainers.Run``. That of all ranks, which is the same."""
        output = str(self.output(stage, **options))
        if output not in self._logs:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            ranks = options.get("ranks", 2)
            said = self._forks.live(_train, str(self.folder / "model"), port, stage, output, options, ranks=ranks)
            assert len(said) == ranks and all(words == said[0] for words in said)
            self._logs[output] = said[0][0]
        return self._logs[output]

    def final(self, stage: int | None, file: str = "model.safetensors", **options: Any) -> dict[str, torch.Tensor]:
        """The weights that the run saved last."""
        self.log(stage, **options)
        return load_file(self.output(stage, **options) / "final" / file)

    def end(self) -> None:
        """No more runs."""
        self._forks.end()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    yield runs
    runs.end()


def assert_same(log: Log, expected: Log, skipped: int = 0) -> None:
    """Losses and norms within fp32's rounding, everything else exactly. skipped: rows that were logged before."""
    assert len(log) == len(expected)
    for row, other in zip(log, expected, strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            if key in ("loss", "eval_loss"):
                assert value == pytest.approx(other[key], abs=1e-6), (row, other)
            elif key == "grad_norm":
                assert value == pytest.approx(other[key], rel=1e-4), (row, other)
            else:
                assert value == other[key], (key, row, other)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]) and not value.isnan().any(), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "k"), [(2, 1), (2, 2), (2, 3), (3, 3)])
def test_a_trainer_logs_what_it_logs_under_ddp(ranks: int, k: int, stage: int, runs: Runs) -> None:
    """Five micro-batches an epoch, or four: the last window is shorter."""
    expected = runs.log(None, ranks=ranks, k=k)
    assert_same(runs.log(stage, ranks=ranks, k=k), expected)
    assert len(expected) >= 7 and expected[-2]["eval_loss"] < expected[0]["loss"]


@pytest.mark.parametrize("k", [1, 3])
def test_stages_with_one_third_letter_have_the_same_bits(k: int, runs: Runs) -> None:
    for one, other in ((0, 1), (2, 3)):
        assert runs.log(one, ranks=2, k=k) == runs.log(other, ranks=2, k=k)
        assert_equal(runs.final(one, ranks=2, k=k), runs.final(other, ranks=2, k=k))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"bf16": {"enabled": "auto"}}, {"bf16": True, "use_cpu": True}),
        (
            {"bf16": {"enabled": "auto"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            {"bf16": True, "use_cpu": True},
        ),
        ({"fp16": {"enabled": True, "initial_scale_power": 8}}, {"fp16": True, "use_cpu": True}),
    ],
    ids=["bf16", "bf16 offloaded", "fp16"],
)
def test_low_precision_has_the_same_bits_at_stages_2_and_3(
    config: dict[str, Any], options: dict[str, Any], runs: Runs
) -> None:
    logs = [runs.log(stage, k=3, config=config, options=options) for stage in (2, 3)]
    assert logs[0] == logs[1] and logs[0][-2]["eval_loss"] < logs[0][0]["loss"]


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 3), (2, 2), (3, 2)])
def test_a_trainer_resumes_at_this_and_another_stage(stage: int, ranks: int, runs: Runs) -> None:
    whole = runs.log(3, ranks=2, k=2)
    checkpoint = runs.output(3, ranks=2, k=2) / "checkpoint-2"
    assert (checkpoint / "latest").read_text(encoding="utf-8").strip() == "global_step2"
    resumed = runs.log(stage, ranks=ranks, k=2, resume=str(checkpoint))
    if ranks == 2:
        assert_same(resumed, whole)
    else:
        assert len(resumed) >= 5


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_train_and_are_saved_without_the_base(stage: int, runs: Runs) -> None:
    assert_same(runs.log(stage, lora=True), runs.log(None, lora=True))
    adapters = runs.final(stage, "adapter_model.safetensors", lora=True)
    folder = runs.output(stage, lora=True) / "checkpoint-2" / "global_step2"
    saved = {
        f"{file.name}: {name}": value
        for file in folder.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    weights = {name: value for name, value in saved.items() if ": random/" not in name}
    assert all(".lora_" in name for name in weights)
    assert sum(value.nbytes for value in weights.values()) == 3 * sum(value.nbytes for value in adapters.values())


@pytest.mark.parametrize("stage", [2, 3])
def test_habits_that_frameworks_have_special_cases_for(stage: int, runs: Runs) -> None:
    options = {
        "gradient_checkpointing": True,
        "load_best_model_at_end": True,
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "max_grad_norm": 0.0,
    }
    assert_same(runs.log(stage, options=options), runs.log(None, options=options))
    assert_equal(runs.final(2, options=options), runs.final(3, options=options))
