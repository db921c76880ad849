"""What is said once of a run that works, and may not be the one that was meant."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from shardengine.errors import UsageError
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = pytest.mark.parametrize("stage", ["0", "3"])
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3}}
WARMUP: dict[str, Any] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4}}


def config_of(stage: str, **options: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 8, "zero_optimization": cases.STAGES[stage], **options}


def step_of(engine: Any, rows: int = 8) -> None:
    engine.backward(engine(torch.ones(rows, 7)).sum())
    engine.step()


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


# Given twice


@STAGES
def test_an_optimizer_and_a_schedule_beside_those_of_the_config(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    model = cases.make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = config_of(stage, optimizer=ADAMW, scheduler=WARMUP)
    engine = shardengine.initialize(model, config, optimizer=optimizer, lr_scheduler=scheduler)
    assert engine.optimizer is not None and (engine.optimizer.kind, engine.get_lr()) == ("SGD", [0.5])
    engine.close()
    of_optimizer, of_schedule = said(caplog, "the argument counts")
    assert 'was given optimizer=, and the config has "optimizer" (AdamW) as well' in of_optimizer
    assert 'was given lr_scheduler=, and the config has "scheduler" (WarmupLR) as well' in of_schedule


@STAGES
def test_one_of_them_is_no_news(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = shardengine.initialize(cases.make_mlp(), config_of(stage, optimizer=ADAMW, scheduler=WARMUP))
    engine.close()
    assert not said(caplog, "the argument counts")


# Sizes of batches


@STAGES
def test_a_batch_of_another_size_is_told_once(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = shardengine.initialize(cases.make_mlp(), config_of(stage, optimizer=ADAMW))
    with torch.no_grad():
        engine(torch.ones(3, 7))  # an evaluation may have any size
    step_of(engine, rows=5)
    step_of(engine, rows=5)
    engine.close()
    (told,) = said(caplog, "train_micro_batch_size_per_gpu is 8")
    assert "(shapes: (5, 7))" in told


class Nested(nn.Module):
    """Takes a batch of dicts and lists, sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = cases.make_mlp()

    def forward(self, batch: dict[str, Any], scale: torch.Tensor) -> torch.Tensor:
        return self.inner(batch["x"][0]).sum() * scale


@pytest.mark.parametrize("shape", [(8, 7), (3, 8, 7)])
def test_a_batch_of_that_size_in_any_form_is_no_news(shape: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    engine = shardengine.initialize(Nested(), config_of("2", optimizer=ADAMW))
    engine.backward(engine({"x": [torch.ones(shape)], "name": "a"}, scale=torch.tensor(1.0)))
    engine.step()
    engine.close()
    assert not said(caplog, "train_micro_batch_size_per_gpu is")


# Another learning rate than the checkpoint's


def save(stage: str, folder: Path, **options: Any) -> None:
    engine = shardengine.initialize(cases.make_mlp(), config_of(stage, **options))
    step_of(engine)
    engine.save_checkpoint(folder)
    engine.close()


def load(stage: str, folder: Path, **options: Any) -> tuple[str, list[float]]:
    """What loading warns of, and the rates afterwards."""
    engine = shardengine.initialize(cases.make_mlp(), config_of(stage, **options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load_checkpoint(folder)
    rates = engine.get_lr()
    engine.close()
    return "; ".join(str(each.message) for each in caught), rates


def adamw(**params: float) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": 1e-3, **params}}


@STAGES
def test_another_rate_at_resume_is_told(stage: str, tmp_path: Path) -> None:
    save(stage, tmp_path, optimizer=adamw())
    told, rates = load(stage, tmp_path, optimizer=adamw(lr=0.05, weight_decay=0.5))
    assert "options of the optimizer are the checkpoint's: lr of group 0 is 0.001, and this run began with 0.05" in told
    assert "weight_decay of group 0 is 0.01, and this run began with 0.5" in told
    assert rates == [1e-3]
    assert load(stage, tmp_path, optimizer=adamw())[0] == ""


def test_a_schedule_moves_rates_and_that_is_no_news(tmp_path: Path) -> None:
    save("2", tmp_path, optimizer=ADAMW, scheduler=WARMUP)
    assert load("2", tmp_path, optimizer=ADAMW, scheduler=WARMUP)[0] == ""
    other = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5, "warmup_num_steps": 4}}
    assert (
        "initial_lr of group 0 is 0.001, and this run began with 0.5"
        in load("2", tmp_path, optimizer=ADAMW, scheduler=other)[0]
    )


def logged_on(rows: int) -> list[str]:
    """What this rank's engine says, with everything that could be told."""
    found: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logging.getLogger("shardengine").addHandler(keeper := Keeper())
    model = cases.make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = shardengine.initialize(
        model, config_of("2", optimizer=ADAMW), optimizer=optimizer, mesh=cases.mesh_of_this_process()
    )
    step_of(engine, rows)
    engine.close()
    logging.getLogger("shardengine").removeHandler(keeper)
    return [text for text in found if "the argument counts" in text or "train_micro_batch_size_per_gpu" in text]


@pytest.mark.parametrize("ranks", [2, 3])
def test_rank_0_says_it_for_all(pools: Pools, ranks: int) -> None:
    assert [len(each) for each in pools(ranks).run(logged_on, 5)] == [2, *[0] * (ranks - 1)]


# What forward was given, where the model raises


class Words(nn.Module):
    """An embedding of 16 words and 8 positions, with a configuration as transformers' models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=16, max_position_embeddings=8)
        self.words, self.places = nn.Embedding(16, 4), nn.Embedding(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return (self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))).sum()


def notes_of(stage: str, model: nn.Module | None = None, **inputs: torch.Tensor) -> str:
    engine = shardengine.initialize(model or Words(), config_of(stage, optimizer=ADAMW))
    with pytest.raises((IndexError, RuntimeError)) as caught:
        engine(**inputs)
    engine.close()
    return "\n".join(getattr(caught.value, "__notes__", ()))


@STAGES
def test_more_tokens_than_positions_are_named(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    told = "input_ids has 9 tokens in a row, and Words has 8 positions (config.max_position_embeddings)"
    assert told in notes_of(stage, input_ids=torch.zeros(8, 9, dtype=torch.int64))
    assert said(caplog, told), "also where nothing raises, as with rotary positions"


@STAGES
def test_tokens_that_the_model_does_not_know_are_named(stage: str) -> None:
    ids = torch.full((8, 4), 16)
    assert "on rank 0 input_ids has the token 16, and Words knows 16 (config.vocab_size)" in notes_of(
        stage, input_ids=ids
    )


@STAGES
def test_inputs_on_another_device_are_named(stage: str) -> None:
    text = notes_of(stage, nn.Linear(4, 1), input=torch.zeros(8, 4, device="meta"))
    assert "input is on meta, and rank 0 computes on cpu: expected inputs on engine.device" in text


@STAGES
def test_what_is_right_has_no_notes(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = shardengine.initialize(Words(), config_of(stage, optimizer=ADAMW))
    engine.backward(engine(input_ids=torch.zeros(8, 8, dtype=torch.int64)))
    engine.step()
    with pytest.raises(UsageError, match=r"since the last step \(rank 0\).*A loop that calls optimizer\.step\(\)"):
        engine.step()
    engine.close()
    assert not said(caplog, "positions")
