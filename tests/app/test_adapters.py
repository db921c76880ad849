"""`--lora`: what is refused, that adapters train alone and alike at every stage, what is written, resuming, merging."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardengine.app import adapters, settings
from shardengine.app.adapters import Lora, parse
from shardengine.app.cli import main
from shardengine.errors import UsageError
from tests.app import tiny_chat
from tests.app.test_resume import Pools, config, curve, refused, run, tags
from tests.app.test_train import start
from tests.support import HANG_S
from tests.support.raising import raises

LORA = "r=4,alpha=8,dropout=0.1,targets=q_proj+v_proj"


# What may be said


def test_what_is_read():
    assert parse("r=8,alpha=16,targets=q_proj+v_proj") == Lora(8, 16.0, 0.0, ("q_proj", "v_proj"))
    assert parse("dropout=0.5, targets=all-linear") == Lora(8, 16.0, 0.5, ("all-linear",))
    assert parse("r=3") == Lora(3, 6.0)
    assert parse("alpha=0.5") == Lora(8, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank=8", "'rank=8' between the commas; expected r, alpha, dropout, targets"),
        ("", "'nothing' between the commas"),
        ("r=8,", "'nothing' between the commas"),
        ("8", "'8' between the commas"),
        ("r=8,r=9", "r is there twice"),
        ("r=0", "r=0: expected an integer >= 1"),
        ("r=²", "r=²: expected an integer >= 1"),
        ("r=2.5", "expected an integer >= 1"),
        ("alpha=-1", "expected a number > 0"),
        ("alpha=nan", "expected a number > 0"),
        ("dropout=1", "expected a number >= 0 and < 1"),
        ("dropout=much", "expected a number >= 0 and < 1"),
        ("targets=", "expected names of modules with + between them"),
        ("targets=q_proj+", "expected names of modules with + between them"),
        ("targets=all-linear+q_proj", "or all-linear"),
    ],
)
def test_what_is_not(text: str, message: str):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_peft_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any):
    kept = importlib.util.find_spec
    monkeypatch.setattr(settings, "find_spec", lambda name: None if name == "peft" else kept(name))
    path = config(tmp_path / "c.json", 0)
    assert main(["train", "--config", str(path), "--lora", "r=8"]) == 2
    assert "--lora needs peft, which is not installed: pip install 'shardengine[lora]'" in capsys.readouterr().err


peft = pytest.importorskip("peft")


def test_targets_that_are_not_there(tmp_path: Path):
    model = tiny_chat.make_model()
    with raises("lora-target-unknown", "LlamaForCausalLM", "q_porj", "all-linear"):
        adapters.attach(model, parse("targets=v_proj+q_porj"))  # peft itself is content with one that matches
    with raises("lora-targets-refused", "norm", "Target module LlamaRMSNorm"):
        adapters.attach(model, parse("targets=norm"))
    with raises("lora-target-unknown", "proj", "down_proj, gate_proj, k_proj, lm_head"):
        adapters.check(str(tiny_chat.save(tmp_path)), parse("targets=proj"))
    fresh = tiny_chat.make_model()
    fresh.config = type("NewConfig", (type(model.config),), {"model_type": "new"})(**model.config.to_dict())
    message = "peft knows no targets for LlamaForCausalLM; expected targets=all-linear, or names out of down_proj"
    with pytest.raises(UsageError, match=message):
        adapters.attach(fresh, parse("r=2"))
    assert "on down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in adapters.describe(
        adapters.attach(fresh, parse("targets=all-linear"))
    )


def test_random_weights_have_no_adapters(tmp_path: Path, capsys: Any):
    options = ["--config", str(config(tmp_path / "c.json", 0)), "--lora", "r=8", "--init", "from-config"]
    assert main(["train", *options]) == 2
    assert "expected a base model that is kept" in capsys.readouterr().err


# Training


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny model."""
    return tiny_chat.save(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.write(tmp_path_factory.mktemp("chats") / "chat.jsonl", *tiny_chat.many(24))


def adapter(output: Path) -> str:
    return hashlib.sha256((output / "model" / "adapter_model.safetensors").read_bytes()).hexdigest()


def options(base: Path, chats: Path, path: Path, stage: int) -> list[object]:
    """With one micro-batch a step: several are added in another order where gradients are not sharded."""
    values = config(path, stage, gradient_accumulation_steps=1)
    where = ["--config", values, "--model", base, "--data", chats, "--length", 64]
    return [*where, "--lora", LORA, "--packing", "apart", "--steps", 5]


@pytest.fixture(scope="module")
def trained(pools: Pools, base: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks at stage 3, with checkpoints 4 and 5."""
    folder = tmp_path_factory.mktemp("trained")
    out = run(pools(2), *options(base, chats, folder / "c.json", 3), "--output", folder / "run", "--save-every", 2)
    assert "adapters:    LoRA, r 4, alpha 8, dropout 0.1 on q_proj, v_proj: 1,024 parameters are trained" in out
    assert re.search(r"\d+ documents apart in \d+ rows of 64, \d\d% full", out)
    assert "AutoPeftModelForCausalLM.from_pretrained loads it" in out
    return folder / "run"


def test_adapters_have_the_same_bits_at_both_ends_of_the_stages(
    pools: Pools, trained: Path, base: Path, chats: Path, tmp_path: Path
):
    output = tmp_path / "run"
    run(pools(2), *options(base, chats, tmp_path / "c.json", 0), "--output", output)
    assert curve(output) == curve(trained)
    assert adapter(output) == adapter(trained)
    assert curve(output)[-1][1] < curve(output)[0][1] - 0.1
    files = {path.name for path in (output / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    assert "model.safetensors" not in files


def test_a_stopped_run_goes_on_over_its_base_and_no_other(
    pools: Pools, trained: Path, base: Path, chats: Path, tmp_path: Path
):
    copy, output = shutil.copytree(base, tmp_path / "base"), tmp_path / "run"
    asked = options(copy, chats, tmp_path / "c.json", 3)
    out = run(pools(2), *asked, "--output", output, "--save-every", 3, stop_after=2)
    assert "stopped at:  step 2 of 5" in out
    (file,) = (output / "checkpoints").glob("step-*/rank-00000.safetensors")
    assert b"base_layer" not in file.read_bytes()[:20_000]
    assert file.stat().st_size < (base / "model.safetensors").stat().st_size / 4
    run(pools(2), "--resume", output, "--lora", LORA)
    assert curve(output) == curve(trained)
    assert adapter(output) == adapter(trained)

    other = ["train", "--resume", str(output), "--lora", "r=5", "--packing", "none", "--seed", "1"]
    assert main(other) == 2
    model = tiny_chat.make_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1.0)
    model.save_pretrained(copy)
    text = refused(pools(1), "--resume", output, "--steps", 6)
    assert "leaves out frozen parameters, and this engine's are other ones" in text
    assert tags(output) == ["step-00000003", "step-00000005"]


def test_what_contradicts_is_named(trained: Path, capsys: Any):
    other = ["--lora", "r=5", "--packing", "none", "--seed", "1", "--too-long", "drop", "--eval", str(trained)]
    assert main(["train", "--resume", str(trained), *other]) == 2
    text = capsys.readouterr().err
    assert f"--lora: it was started with {LORA}, got r=5" in text
    assert "--packing: it was started with apart, got none" in text
    assert "--seed: it was started with 42, got 1" in text
    assert "--too-long: it was started with truncate, got drop" in text
    assert f"--eval: it was started without, got {trained}" in text


def test_ctrl_c_saves_the_adapters(base: Path, chats: Path, tmp_path: Path):
    output = tmp_path / "run"
    (tmp_path / "config.json").write_text(
        (config(tmp_path / "c.json", 3)).read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / "model").symlink_to(base)
    asked = ["--data", chats, "--lora", "r=2", "--ranks", 1, "--steps", 100_000, "--output", output]
    process = start(tmp_path, *asked, "--save-every", 100_000)
    deadline = time.monotonic() + HANG_S
    while not (output / "metrics.jsonl").exists() or '"loss"' not in (output / "metrics.jsonl").read_text("utf-8"):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    assert "on q_proj, v_proj" in out  # peft's own targets for Llama
    assert (output / "model" / "adapter_model.safetensors").exists() and len(tags(output)) == 1


# Export


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=torch.arange(5, 25).view(1, -1)).logits
    return result


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_export_writes_adapters_or_the_merged_model(trained: Path, base: Path, tmp_path: Path, capsys: Any):
    transformers = pytest.importorskip("transformers")
    assert main(["export", str(trained), str(tmp_path / "adapters")]) == 0
    exported, saved = (
        load_file(place / "adapter_model.safetensors") for place in (tmp_path / "adapters", trained / "model")
    )
    assert exported.keys() == saved.keys() and all(torch.equal(value, saved[name]) for name, value in exported.items())
    wrapped = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters"
    )
    named = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text(encoding="utf-8"))
    assert named["base_model_name_or_path"] == str(base)
    assert main(["export", str(trained), str(tmp_path / "merged"), "--merge"]) == 0
    assert f"the adapters are merged into {base}" in capsys.readouterr().out
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (tmp_path / "merged" / "tokenizer.json").exists()
    plain = logits(transformers.AutoModelForCausalLM.from_pretrained(base))
    assert (logits(wrapped) - plain).abs().max() > 1e-2
    # (W + s·B·A)·x beside W·x + s·B·(A·x), in fp32 over two layers
    torch.testing.assert_close(logits(merged), logits(wrapped), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, merged.state_dict()[name]) for name, value in
               wrapped.merge_and_unload().state_dict().items())  # fmt: skip
    assert main(["export", str(trained), str(tmp_path / "half"), "--merge", "--dtype", "bf16"]) == 0
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(half.state_dict()[name], merged.state_dict()[name].bfloat16())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_run_without_checkpoints_is_merged(pools: Pools, base: Path, chats: Path, tmp_path: Path, capsys: Any):
    transformers = pytest.importorskip("transformers")
    output = tmp_path / "run"
    run(pools(2), *options(base, chats, tmp_path / "c.json", 3), "--output", output)
    wrapped = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), output / "model")
    expected = wrapped.merge_and_unload().state_dict()
    assert not torch.equal(
        expected[name := "model.layers.0.self_attn.q_proj.weight"], tiny_chat.make_model().state_dict()[name]
    )
    for source, target in ((output, tmp_path / "of run"), (output / "model", tmp_path / "of model")):
        assert main(["export", str(source), str(target), "--merge"]) == 0
        assert f"the adapter of {output / 'model'} is merged into {base}" in capsys.readouterr().out
        merged = transformers.AutoModelForCausalLM.from_pretrained(target).state_dict()
        assert merged.keys() == expected.keys()
        assert all(torch.equal(value, merged[name]) for name, value in expected.items())
        assert (target / "tokenizer.json").exists()
    saved = output / "model" / "adapter_config.json"
    saved.write_text(saved.read_text("utf-8").replace(str(base), str(tmp_path / "gone")), "utf-8")
    shallow = tiny_chat.make_model()
    del shallow.model.layers[1:]
    shallow.config.num_hidden_layers = 1
    shallow.save_pretrained(tmp_path / "shallow")
    shape = {**shallow.config.to_dict(), "hidden_size": 16, "num_hidden_layers": 2, "head_dim": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).save_pretrained(tmp_path / "narrow")
    for more, message in (
        ([], f"the base model {tmp_path / 'gone'} cannot be loaded"),
        (["--base", str(tmp_path / "shallow")], "the adapters do not fit the base model"),
        (["--base", str(tmp_path / "narrow")], "the adapters do not fit the base model"),
        (["--base", str(base), "--ema"], "an adapter's directory"),
        (["--adapter", "other"], "neither other/adapter_config.json nor model/other/adapter_config.json is in it"),
    ):
        assert main(["export", str(output), str(tmp_path / "out"), "--merge", *more]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("kept", "tied"),
    [(None, True), (None, False), (["embed_tokens"], True), (["embed_tokens", "lm_head"], False), (["norm"], False)],
)
def test_new_words_and_whole_modules_are_merged(kept: list[str] | None, tied: bool, tmp_path: Path, capsys: Any):
    transformers = pytest.importorskip("transformers")
    first = tiny_chat.make_model()
    first.config.tie_word_embeddings = tied
    first.tie_weights()
    first.save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    resized = kept != ["embed_tokens"]
    if resized:
        model.resize_token_embeddings(268)
    wanted = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=kept, task_type="CAUSAL_LM", init_lora_weights=False
    )
    wrapped = peft.get_peft_model(model, wanted)
    with torch.no_grad():
        for value in wrapped.parameters():
            value.add_(0.01 if value.requires_grad else 0.0)
    wrapped.save_pretrained(tmp_path / "adapter")
    assert main(["export", str(tmp_path / "adapter"), str(tmp_path / "out"), "--merge"]) == 0, capsys.readouterr().err
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.get_input_embeddings().weight.shape[0] == merged.config.vocab_size == (268 if resized else 260)
    expected = wrapped.merge_and_unload()
    assert all(torch.equal(value, merged.state_dict()[name]) for name, value in expected.state_dict().items())


def test_merging_into_another_model_is_refused(trained: Path, base: Path, tmp_path: Path, capsys: Any):
    model = tiny_chat.make_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.0001)
    model.save_pretrained(tmp_path / "other")
    tiny_chat.make_model(words=300).save_pretrained(tmp_path / "wider")
    capsys.readouterr()
    for place, message in (
        ("other", "is not the base model that the adapters were"),
        ("wider", "is not the base model"),
    ):
        options = ["export", str(trained), str(tmp_path / "out"), "--merge", "--base", str(tmp_path / place)]
        assert main(options) == 2
        text = capsys.readouterr().err
        assert message in text and "name the right one with --base DIR" in text
        assert not (tmp_path / "out").exists()
    assert "layers.1.mlp.up_proj" in text or "embed_tokens" in text
    for wrong, message in (
        (["--base", str(base)], "--base goes with --merge"),
        (["--merge", "--format", "dcp"], "--merge goes with --format hf, got --format dcp"),
        (["--merge", "--config", str(base)], "--config: with --merge the config is the base model's own"),
        (["--merge", "--base", str(tmp_path)], "cannot be loaded"),
    ):
        assert main(["export", str(trained), str(tmp_path / "out"), *wrong]) == 2
        assert message in capsys.readouterr().err
