"""Likely mistakes of a first hour: each is told in a sentence that names what came and what to do.

A list for people who look for a sentence. That a mistake is told at every stage and on several ranks is tested where
its check is: this list has one rank, and stage 2 where nothing else is said.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.app.cli import main
from shardengine.comm import devices
from shardengine.errors import ShardEngineError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}
ROWS = torch.zeros(8, 4)


ENGINES: list[shardengine.Engine] = []


def make(model: nn.Module | None = None, steps_with: Any = None, **config: Any) -> shardengine.Engine:
    ENGINES.append(shardengine.initialize(model or nn.Linear(4, 2), CONFIG | config, optimizer=steps_with))
    return ENGINES[-1]


def train(engine: shardengine.Engine, rows: Tensor = ROWS) -> None:
    engine.backward(engine(rows).square().mean())
    engine.step()


def mistyped_key() -> None:
    make(zero_optimisation={"stage": 3})


def a_number_as_a_text() -> None:
    make(optimizer={"type": "AdamW", "params": {"lr": "1e-3"}})


def an_optimizer_twice() -> None:
    model = nn.Linear(4, 2)
    make(model, torch.optim.SGD(model.parameters(), lr=0.1))


def an_optimizer_of_its_own() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = make(model)
    engine(ROWS).square().mean().backward()
    optimizer.step()


def steps_twice() -> None:
    engine = make()
    engine.backward(engine(ROWS).square().mean())
    assert engine.optimizer is not None
    engine.optimizer.step()
    engine.step()


def batches_of_another_size() -> None:
    train(make(), ROWS[:3])


def an_input_on_another_device() -> None:
    train(make(), ROWS.to("meta"))


def a_loss_of_each_sample() -> None:
    engine = make()
    engine.backward(engine(ROWS))


def a_loss_that_is_no_number() -> None:
    train(make(), ROWS * float("nan"))


def weights_read_where_they_are_sharded() -> None:
    model = nn.Linear(4, 2)
    make(model, zero_optimization={"stage": 3})
    model.weight.sum()


def a_model_in_half() -> None:
    make(nn.Linear(4, 2).half())


def an_engine_in_an_engine() -> None:
    make(make())  # type: ignore[arg-type]


def no_checkpoint() -> None:
    make().load_checkpoint("nowhere")


SCRIPTS: dict[Callable[[], None], str] = {
    mistyped_key: 'zero_optimisation: unknown key; the nearest valid key is "zero_optimization"',
    a_number_as_a_text: 'optimizer.params.lr: expected a number >= 0, got the string "1e-3"',
    an_optimizer_twice: '"optimizer" (AdamW) as well: the argument counts, with its own options; leave one of them out',
    an_optimizer_of_its_own: "engine.optimizer",
    steps_twice: "A loop that calls optimizer.step() calls no engine.step(), because either makes the whole step",
    batches_of_another_size: "train_micro_batch_size_per_gpu is 8, and no tensor of the first batch has a dimension of",
    an_input_on_another_device: "engine.device",
    a_loss_of_each_sample: "expected a scalar loss with a graph, or gradient= for one that is no scalar, got (8, 2)",
    a_loss_that_is_no_number: "step 1 was skipped on all ranks: expected finite gradients, got Inf or NaN in 'weight'",
    weights_read_where_they_are_sharded: "with engine.full_params():",
    a_model_in_half: 'expected "fp16": {"enabled": true} in the config, or model.float(), model.bfloat16()',
    an_engine_in_an_engine: "it is an engine already; call it in the place of the model",
    no_checkpoint: "nowhere: expected a directory of checkpoints",
}
"""A script → a part of the sentence that it is told, as an error or as a warning."""


@pytest.fixture(autouse=True)
def no_engine_stays() -> Iterator[None]:
    yield
    while ENGINES:
        ENGINES.pop().close(restore=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_is_told(script: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    error = ""
    with caplog.at_level(logging.WARNING, "shardengine"):
        try:
            script()
        except (ShardEngineError, RuntimeError) as caught:
            error = "\n".join([str(caught), *getattr(caught, "__notes__", ())])
    assert SCRIPTS[script] in error + caplog.text


def config_in(folder: Path, **more: Any) -> str:
    (folder / "run.json").write_text(json.dumps(CONFIG | more))
    return str(folder / "run.json")


COMMANDS: dict[str, tuple[list[str], str]] = {
    "a model that is not there": (["--model", "./nowhere"], "config.json"),
    "a text that is not there": (["--data", "nowhere.txt"], "nothing there"),
    "a mistyped recipe": (["--config", "lora-4x42"], "lora-4x24"),
}


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_command_is_told(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, said = COMMANDS[mistake]
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", config_in(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err


def test_a_forgotten_launcher_is_told() -> None:
    assert "start it with torchrun --standalone --nproc-per-node 4" in devices.only_one(4)
