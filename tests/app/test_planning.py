"""`shardengine plan` on the command line: what is printed, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardengine.app.cli import main

pytest.importorskip("transformers")

GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2,
    "vocab_size": 500, "n_positions": 64,
}  # fmt: skip
VIT: dict[str, Any] = {
    "architectures": ["ViTForImageClassification"], "model_type": "vit", "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 2, "intermediate_size": 128, "image_size": 32, "patch_size": 8,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "zero3.json"
    path.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }))  # fmt: skip
    return str(path)


def folder_of(tmp_path: Path, model: dict[str, Any]) -> str:
    folder = tmp_path / str(model["model_type"])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model))
    return str(folder)


def test_it_prints_what_each_tier_needs(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder_of(tmp_path, GPT2)
    assert main(["plan", "--model", model, "--gpus", "4x24GB", "--config", config, "--length", "32"]) == 0
    said = capsys.readouterr().out
    assert "stage 3, micro-batches of 2 × 32, 2 micro-batches a step\n4 GPUs of 24.0 GB" in said
    assert "GPU: fits, " in said and "host: " in said
    file = f"{model}/config.json"
    command = ["plan", "--model", file, "--gpus", "2x1.08GB", "--config", config, "--json", "--micro-batch", "400"]
    assert main(command) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["batch"] == [400, 64] and found["ranks"] == 2
    assert found["tiers"]["host"]["at_peak"].keys() >= {"states"}


def test_images_and_adapters(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", folder_of(tmp_path, VIT), "--gpus", "24GB", "--config", config, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"] == [2, 3, 32, 32]
    pytest.importorskip("peft")
    command = ["plan", "--model", folder_of(tmp_path, GPT2), "--gpus", "24GB", "--config", config, "--json"]
    assert main(command) == 0
    whole = json.loads(capsys.readouterr().out)
    assert main([*command, "--lora", "r=2"]) == 0
    adapters = json.loads(capsys.readouterr().out)
    assert adapters["parameters"] > whole["parameters"]
    assert adapters["tiers"]["host"]["at_peak"].get("states", 0) < whole["tiers"]["host"]["at_peak"]["states"] / 10


def test_it_draws(tmp_path: Path, config: str) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plan.svg"
    command = ["plan", "--model", folder_of(tmp_path, GPT2), "--gpus", "24GB", "--config", config, "--plot", str(plot)]
    assert main(command) == 0
    assert "backward" in plot.read_text() or plot.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "four"], "gpus: expected a size, as 24GB or 80GiB, got 'four'"),
        (["--gpus", "4x24GB", "--host-memory", "much"], "host memory: expected a size"),
        (["--gpus", "4x24GB", "--node", "3"], "in whole nodes, got 4 ranks and 3 in a node"),
        (["--gpus", "4x24GB", "--model", "/nowhere/at/all"], "--model /nowhere/at/all: expected a Hugging Face model"),
        (["--gpus", "4x24GB", "--lora", "q=2"], "--lora q=2"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, config: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = [] if "--model" in options else ["--model", folder_of(tmp_path, GPT2)]
    assert main(["plan", *model, "--config", config, *options]) == 2
    assert said in capsys.readouterr().err
