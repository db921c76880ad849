"""A base of 4 bits (``--lora bits=4``): trained alike at every stage, resumed, planned, refused in words."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardengine.app import adapters, four_bits
from shardengine.app.cli import main
from shardengine.sharding import inner
from tests.app.test_resume import EXAMPLES, curve, run
from tests.support.raising import raises
from tests.support.ranks import RankPool

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
Pools = Callable[[int], RankPool]
LORA = "r=4,targets=all-linear,bits=4"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama and its tokenizer of bytes."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).save_pretrained(folder)
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    words = {"<s>": 0, "</s>": 1, **{letter: 2 + number for number, letter in enumerate(sorted(letters))}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    return folder


def config(path: Path, stage: int) -> Path:
    tree = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def test_every_stage_trains_alike_goes_on_as_planned_and_is_merged(
    pools: Pools, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = []
    for stage in (0, 2, 3):
        file = config(tmp_path / f"{stage}.json", stage)
        given = ("--config", file, "--model", base, "--lora", LORA, "--data", EXAMPLES, "--steps", 3)
        output = tmp_path / f"run-{stage}"
        said = run(pools(2), *given, "--output", output, "--save-every", 2, stop_after=2)
        assert re.search(r"v_proj; \d\d% of all weights have 4 bits:", said)
        said += run(pools(2), "--resume", output)
        curves.append(curve(output))
        found = re.findall(r"planned, .* measured at most \((.*)%\)", said)
        assert found and all(abs(float(each.replace("−", "-"))) < 6 for each in found), said  # of 2 MB a buffer is much
        tree = json.loads((output / "model" / "adapter_config.json").read_text(encoding="utf-8"))
        assert tree["base_model_name_or_path"] == str(base)
    assert len(curves[0]) == 3 and curves[0] == curves[1] == curves[2]
    assert main(["export", str(output), str(tmp_path / "merged"), "--merge"]) == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    given_base = load_file(base / "model.safetensors")
    assert merged.keys() == given_base.keys()
    changed = {name.split(".")[-2] for name in merged if not torch.equal(merged[name], given_base[name].bfloat16())}
    assert changed <= {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} and len(changed) > 3
    other = shutil.copytree(base, tmp_path / "other")
    save_file({**given_base, "model.norm.weight": 2 * given_base["model.norm.weight"]}, other / "model.safetensors")
    assert main(["export", str(output), str(tmp_path / "no"), "--merge", "--base", str(other)]) == 2
    assert "model.norm.weight are other weights" in capsys.readouterr().err


def test_a_dry_run_says_what_the_run_does(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(config(tmp_path / "c.json", 3))
    given = ["--config", file, "--model", str(base), "--lora", LORA]
    assert main(["train", *given, "--data", str(EXAMPLES), "--ranks", "2", "--dry-run"]) == 0
    assert "memory: fits" in capsys.readouterr().out
    assert main(["plan", *given, "--gpus", "2x4GB", "--length", "64"]) == 0
    assert "2 GPUs of 4.0 GB" in capsys.readouterr().out


def described(model: Any) -> dict[str, Any]:
    """Each parameter: class, shape, dtype, weights, and the shapes and dtypes of what bitsandbytes keeps beside it."""
    found = {}
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        beside = (
            [] if state is None else [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        )
        scales = [(tuple(each.shape), each.dtype) for each in beside]
        kept = None if state is None else (state.blocksize, state.quant_type, state.dtype, state.state2.blocksize)
        own = type(parameter).__name__, tuple(parameter.shape), parameter.dtype, inner.weights_in(parameter)
        found[name] = (*own, parameter.requires_grad or kept is None, scales, kept)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_values_it_has_the_shapes_that_it_has_with_them(base: Path, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    real = four_bits.load(str(base), dtype, torch.device("cpu"))
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(real.config, dtype=dtype)
        four_bits.pack_without_values(empty, dtype)
    with_values, without = described(real), described(empty)
    assert with_values == without
    assert sum("Params4bit" in row for row in without.values()) == 4 * 7
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert sum(map(inner.weights_in, real.parameters())) == plain.num_parameters()


def test_what_cannot_be_packed_is_said(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with raises("lora-value-invalid", "bits", "8", "4, or no bits= for a base as its files have it"):
        adapters.parse("bits=8")
    packed = tmp_path / "packed"
    four_bits.load(str(base), torch.float32, torch.device("cpu")).save_pretrained(packed)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (packed / name).write_bytes((base / name).read_bytes())
    file = config(tmp_path / "c.json", 0)
    given = ["train", "--config", str(file), "--data", str(EXAMPLES), "--lora", LORA, "--ranks", "1", "--dry-run"]
    assert main([*given, "--model", str(packed)]) == 2
    assert "are quantised already; leave bits=4 out" in capsys.readouterr().err
    monkeypatch.setattr("shardengine.app.settings.find_spec", lambda name: None if name == "bitsandbytes" else True)
    assert main([*given, "--model", str(base)]) == 2
    assert "--lora bits=4 needs bitsandbytes, which is not installed" in capsys.readouterr().err
    assert main(["plan", "--config", str(file), "--model", str(base), "--lora", LORA, "--gpus", "2x4GB"]) == 2
    assert "--lora bits=4 needs bitsandbytes, which is not installed" in capsys.readouterr().err
