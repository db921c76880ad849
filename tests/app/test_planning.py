"""`shardengine plan` on the command line: what is printed, and its exit code."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardengine
from shardengine import Choice, Hardware
from shardengine.app import dry_run, planning, what_fits
from shardengine.app.cli import main
from shardengine.config import load_config
from shardengine.planner import machine
from tests.app import tiny_chat

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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--gpus", "2x1.1GB", "--micro-batch", "400"], "--set gradient_accumulation_steps=800"),
        (["--gpus", "2x1.1GB", "--set", "train_micro_batch_size_per_gpu=256"], "--set gradient_accumulation_steps=512"),
        (["--gpus", "1.0739GB"], "nothing that was tried fits"),
    ],
)
def test_what_does_not_fit_ends_with_what_does_and_its_command(
    given: list[str], words: str, tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the host's memory there is enough, and a GPU of 1.0739 GB has 0.2 MB beside what is left to CUDA."""
    command = ["plan", "--model", folder_of(tmp_path, GPT2), "--config", config, *given]
    assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("looking for the smallest change with which it fits …")
    if words.startswith("nothing"):
        assert lines[place + 1].startswith(words) and len(lines) == place + 2
        return
    only = f"it fits with --set train_micro_batch_size_per_gpu=1 {words}: GPU: fits, "
    assert lines[place + 1].startswith(only), "the global batch stays"
    assert main(shlex.split(lines[place + 2])[1:]) == 0


def test_only_the_changes_that_are_needed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def planned(options: Any) -> Any:
        asked.append(list(options.set or ()))
        fits = "activation_checkpointing.enabled=true" in asked[-1] and options.gpus == "8x24GB"
        return SimpleNamespace(fits=fits, sentences=lambda: ["GPU: fits"])

    options = argparse.Namespace(
        model="m", gpus="4x24GB", host_memory=None, nvme=None, node=None, config="c", length=None, micro_batch=None,
        lr=None, lora=None, set=["bf16.enabled=true"], script=False,
    )  # fmt: skip
    config_ = load_config({"train_micro_batch_size_per_gpu": 4})
    hardware = Hardware.parse("4x24GB")
    found: Any = SimpleNamespace(config=config_, hardware=hardware, shape=(4, 2048))
    lines = list(what_fits.sentences(options, found, planned))
    assert lines[1] == "it fits with --set activation_checkpointing.enabled=true --gpus 8x24GB: GPU: fits"
    assert lines[2] == (
        "  shardengine plan --model m --gpus 8x24GB --config c --set bf16.enabled=true "
        "--set activation_checkpointing.enabled=true"
    ), "rows are as long as they were"
    assert all(each[0] == "bf16.enabled=true" for each in asked)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("lora", [None, "r=4,targets=all-linear"])
def test_plan_and_dry_run_print_the_same_plan(
    stage: int, lora: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model whose files are bf16, whatever the config trains in."""
    if lora:
        pytest.importorskip("peft")
    folder = tmp_path / "model"
    tiny_chat.make_tokenizer(None).save_pretrained(folder)
    tiny_chat.make_model().to(torch.bfloat16).save_pretrained(folder)
    monkeypatch.setattr(dry_run, "this_machine", lambda *_: Hardware.parse("2x4GB"))
    (tmp_path / "text.txt").write_text("some words and more of them. " * 400, encoding="utf-8")
    (tmp_path / "c.json").write_text('{"train_micro_batch_size_per_gpu": 2}', encoding="utf-8")
    common = ["--config", str(tmp_path / "c.json"), "--model", str(folder), "--length", "32"]
    common += ["--set", f"zero_optimization.stage={stage}", *(["--lora", lora] if lora else [])]
    for precision in ([], ["--set", "bf16.enabled=true"]):
        assert main(["plan", *common, *precision, "--gpus", "2x4GB"]) == 0
        planned = capsys.readouterr().out
        data = ["--data", str(tmp_path / "text.txt"), "--ranks", "2", "--dry-run"]
        assert main(["train", *common, *precision, *data]) == 0
        told = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("note: ")]
        assert told[:-1] == planned.splitlines()[:-1], planned  # the last line has the seconds that it took


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


# plan --choose


@pytest.fixture
def choosing(tmp_path: Path) -> list[str]:
    base = tmp_path / "base.json"
    base.write_text(
        json.dumps(
            {
                "//": "of another model",
                "train_batch_size": 2,
                "bf16": {"enabled": True, "_": ""},
                "gradient_clipping": 1.0,
            }
        )
    )
    return ["plan", "--model", folder_of(tmp_path, GPT2), "--config", str(base), "--length", "16"]


def test_the_fastest_that_fits_is_printed_written_and_trains(
    tmp_path: Path, choosing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "best.json"
    assert main([*choosing, "--gpus", "24GB", "--write", str(target)]) == 0
    said = capsys.readouterr()
    table, _, text = said.out.partition("\n\n")
    head, first = table.splitlines()[:2]
    assert head.split() == ["config", "micro-batch", "GPU", "step", "samples/s"]
    assert first.split()[:4] == ["1", "stage", "0", "2"]
    assert text.startswith("1: stage 0\n") and "1 GPU of 24.0 GB" in text and "GPU: fits, " in text
    assert table.splitlines()[-3].startswith("micro-batch: samples of a rank in one forward · GPU: what a rank needs")
    told = [line for line in said.err.splitlines() if "micro-batches of" in line]
    now = [line.rpartition("; now ")[2] for line in told]
    assert told[1].startswith("1 of about ") and "; best so far: " in told[1] and " samples/s; now " in told[1]
    assert now[1] == "stage 0, micro-batches of 1" and now[-1] == "a check of stage 0, micro-batches of 2"
    assert "stage 0, activations again, micro-batches of 2" in now, "of a model with dropout, too"
    written = json.loads(target.read_text())
    assert written["train_batch_size"] == 2 and written["bf16"] == {"enabled": True}
    assert target.read_text().startswith('{\n  "train_batch_size": 2,')

    assert main([*choosing[:4], str(target), *choosing[5:], "--gpus", "24GB", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["batch"] == [2, 16] and f"{again['tiers']['GPU']['peak_bytes'] / 1e6:.1f} MB" in first

    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{k: v for k, v in GPT2.items() if k[0] in "nv"}))
    engine = shardengine.initialize(model, target)
    ids = torch.arange(32).view(2, 16)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    assert engine.global_steps == 1 and engine.config.gradient_clipping == 1.0
    engine.close()


def test_what_is_needed_is_printed_where_nothing_fits(
    tmp_path: Path, choosing: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "best.json"
    command = [*choosing, "--gpus", "1.0738GB", "--length", "2", "--json", "--write", str(target)]
    assert main(command) == 1 and not target.exists()
    found = json.loads(capsys.readouterr().out)
    assert found["config"] is None and found["rows"] == []
    assert found["needed"][0].startswith("nothing fits; the closest is stage ")
    shown = planning.text_of_choice(Choice(Hardware.parse("2GB"), [], found["needed"], None, 3, 1.0))
    assert shown.splitlines() == [*found["needed"], "(3 plans in 1.0 s)"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--choose", "--micro-batch", "2"], "--micro-batch 2 with --choose: expected one of the two"),
        (["--write", "/not/there/best.json"], "--write /not/there/best.json: expected a file in a directory that is"),
        (["--write", "."], "--write .: expected a file in a directory that is there"),
    ],
)
def test_what_does_not_go_with_choosing_is_said_at_once(
    choosing: list[str], options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*choosing, "--gpus", "2x24GB", *options]) == 2
    assert said in (error := capsys.readouterr().err) and "micro-batches of" not in error


# train --dry-run


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """``trained(*options)``: the exit code of train --dry-run; of a tiny model with its tokenizer, on chats."""
    tiny_chat.save(tmp_path / "llama")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDENGINE_DEVICE", "cpu")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*options: str, config: str) -> int:
        given = {"--model": str(tmp_path / "llama"), "--data": str(tmp_path / "text.txt"), "--length": "48"}
        given |= dict(zip(options[::2], options[1::2], strict=True))
        return main(["train", "--dry-run", "--config", config, *(word for pair in given.items() for word in pair)])

    return run


def test_a_dry_run_plans_the_run_that_train_would_make(
    trained: Callable[..., int], config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert trained("--ranks", "2", config=config) == 0
    said = capsys.readouterr().out
    assert "stage 3, micro-batches of 2 × 48, 2 micro-batches a step\n2 CPU ranks of " in said
    assert "memory: fits, " in said and "left to CUDA" not in said
    assert sorted(tmp_path.rglob("*")) == before and not torch.distributed.is_initialized()
    (tmp_path / "llama" / "model.safetensors").unlink()  # no weight is read
    assert trained("--ranks", "4", "--length", "24", config=config) == 0
    assert "micro-batches of 2 × 24, 2 micro-batches a step\n4 CPU ranks of " in capsys.readouterr().out
    pytest.importorskip("peft")
    assert trained("--ranks", "2", "--lora", "r=2", config=config) == 0
    adapters = capsys.readouterr().out
    states = [re.search(r"^memory.*", text, re.MULTILINE) for text in (said, adapters)]
    assert states[0] is not None and states[1] is not None and states[0][0] != states[1][0]


def test_what_is_auto_is_decided_for_the_ranks_that_there_would_be(
    trained: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "auto.json"
    tree = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 8, "zero_optimization": {"stage": "auto"}}
    config.write_text(json.dumps(tree))
    assert trained("--ranks", "2", config=str(config)) == 0
    found = re.search(r'"auto": zero_optimization.stage is (\d), train_micro_batch_size_per_gpu is (\d); by',
                      said := capsys.readouterr().out)  # fmt: skip
    assert found is not None and f"stage {found[1]}, micro-batches of {found[2]} × 48, " in said
    assert int(found[2]) * int(re.search(r"× 48, (\d) micro", said)[1]) * 2 == 8  # type: ignore[index]
    monkeypatch.setattr(machine, "host_bytes", lambda: 400_000)
    assert trained("--ranks", "2", config=str(config)) == 1
    assert '"auto", but nothing fits; the closest is stage ' in capsys.readouterr().out


def test_a_dry_run_of_what_does_not_fit_ends_with_1(
    trained: Callable[..., int], config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "host_bytes", lambda: 400_000)
    assert trained("--ranks", "2", config=config) == 1
    assert "memory: does not fit, " in (said := capsys.readouterr().out) and "2 CPU ranks of 200.0 kB" in said


def test_a_dry_run_under_a_launcher_is_that_of_all_its_ranks_and_printed_once(
    trained: Callable[..., int], config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "6"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    assert trained(config=config) == 0
    assert "6 CPU ranks of " in capsys.readouterr().out
    monkeypatch.setenv("RANK", "4")
    assert trained(config=config) == 0
    assert capsys.readouterr().out == ""


def test_a_dry_run_of_a_model_that_asks_for_values_is_refused(
    trained: Callable[..., int], config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = json.loads((tmp_path / "llama" / "config.json").read_text())
    facts |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    facts |= {"num_key_value_heads": 2, "num_experts_per_tok": 2}
    facts.pop("head_dim", None)
    (tmp_path / "llama" / "config.json").write_text(json.dumps(facts | {"experts_implementation": "eager"}))
    assert trained("--ranks", "2", config=config) == 2
    assert "train: plan: the model's shapes depend on data" in capsys.readouterr().err


def test_a_dry_run_and_no_plan_are_one_too_many(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--config", config, "--dry-run", "--no-plan"])
    assert "not allowed with" in capsys.readouterr().err
