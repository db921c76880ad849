"""`shardengine export` as a Hugging Face directory: what from_pretrained loads is the engine's state, bit for bit.

Without an engine, in bounded memory, whole or not at all. DCP and peft: tests/interchange/test_export_elsewhere.py.
"""

from __future__ import annotations

import ctypes
import gc
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine.app.cli import main
from shardengine.checkpoint import index, model_facts
from shardengine.interchange import hugging_face
from shardengine.interchange.weight_files import Output
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


def tied_llama() -> nn.Module:
    from transformers import LlamaForCausalLM

    model = cases.make_llama()
    model.config.tie_word_embeddings = True  # type: ignore[union-attr]
    torch.manual_seed(13)
    return LlamaForCausalLM(model.config).train()


MAKERS: dict[str, Callable[[], nn.Module]] = {"gpt2": cases.make_gpt2, "llama": tied_llama}


def evaluation_loss(model: Any) -> float:
    ids = torch.arange(2 * cases.LENGTH).view(2, cases.LENGTH) % cases.VOCAB
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss.item())


def trained(folder: str, model: str, stage: str, low: bool) -> dict[str, Any]:
    """Two steps, a checkpoint, what ``save_pretrained`` writes; the evaluation loss and the masters."""
    options: dict[str, Any] = {"bf16": {"enabled": True}} if low else {}
    engine = cases.make_engine(MAKERS[model](), cases.config_of(stage, **options))
    cases.run_steps(engine, 2)
    engine.save_checkpoint(f"{folder}/saved")
    engine.save_pretrained(f"{folder}/reference")
    engine.eval()
    loss = evaluation_loss(engine)
    with engine.full_optimizer_state() as states:
        masters = {name: cases.copy_out(entry["weight"]).numpy() for name, entry in states.items() if entry}
    engine.close()
    return {"loss": loss, "masters": masters}


def tensors(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(
        value.dtype == two[name].dtype and torch.equal(value, two[name]) for name, value in one.items()
    )


@pytest.mark.parametrize(("model", "stage"), [("gpt2", "2"), ("gpt2", "3"), ("llama", "2"), ("llama", "3")])
def test_what_from_pretrained_loads_has_the_same_loss(pools: Pools, tmp_path: Path, model: str, stage: str) -> None:
    from transformers import AutoModelForCausalLM

    results = pools(2).run(trained, str(tmp_path), model, stage, False)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--max-shard-size", "6KB"]) == 0
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert evaluation_loss(loaded.eval()) == results[0]["loss"] == results[1]["loss"]
    table = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8"))
    files = {path.name for path in (tmp_path / "out").glob("model-*")}
    assert set(table["weight_map"].values()) == files and len(files) > 5
    written = tensors(tmp_path / "out")
    assert table["metadata"]["total_size"] == sum(value.nbytes for value in written.values())
    assert same(written, tensors(tmp_path / "reference")) and "lm_head.weight" not in written
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "reference" / name).read_bytes(), name


def test_weights_are_the_masters_rounded_once(pools: Pools, tmp_path: Path) -> None:
    masters = pools(2).run(trained, str(tmp_path), "gpt2", "3", True)[0]["masters"]
    assert any(value.tobytes() != torch.from_numpy(value).bfloat16().float().numpy().tobytes()
               for value in masters.values())  # fmt: skip
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("as-trained", 0)):
        out = tmp_path / name
        assert main(["export", str(tmp_path / "saved"), str(out), "--dtype", name]) == 0
        expected = tensors(tmp_path / "reference")
        if isinstance(dtype, torch.dtype):
            expected = {key: torch.from_numpy(masters[key]).to(dtype) for key in expected}
        assert same(tensors(out), expected), name
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
        assert config["dtype"] == {"fp32": "float32", "fp16": "float16"}.get(name, "bfloat16")
        assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]


class Pictures(nn.Module):
    """Convolutions in channels_last (one frozen), running statistics, a tied matrix, a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 2)
        self.norm = nn.BatchNorm2d(6)
        self.head, self.tied = nn.Linear(5, 5), nn.Linear(5, 5)
        self.tied.weight = self.head.weight
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.first.weight.requires_grad_(False)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.head(self.second(self.norm(self.first(x))).mean((2, 3))))


def pictures(folder: str, stage: str) -> dict[str, Any]:
    torch.manual_seed(4)
    engine = cases.make_engine(Pictures(), cases.config_of(stage, broadcast_buffers=False))
    torch.manual_seed(engine.rank)
    engine.backward(engine(torch.randn(2, 3, 8, 8)).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    state = {name: value.clone().numpy() for name, value in engine.state_dict().items()}
    engine.close()
    return state


def test_channels_last_buffers_of_rank_0_and_ties_of_a_plain_module(pools: Pools, tmp_path: Path, capsys: Any) -> None:
    from safetensors import safe_open

    expected = pools(2).run(pictures, str(tmp_path / "saved"), "3")[0]
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 2
    assert "--format safetensors" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--format", "safetensors"]) == 0
    written = tensors(tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "tied": '{"tied.weight": "head.weight"}'}
    assert set(expected) == {*written, "tied.weight"} and "norm.running_mean" in written
    for name, value in written.items():
        assert value.shape == expected[name].shape and value.numpy().tobytes() == expected[name].tobytes(), name


def peak_bytes(work: Callable[[], Any]) -> int:
    """How much resident memory ``work`` takes at most, beyond what was there."""

    def read(key: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is no hiding place
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    before = read("VmRSS")
    work()
    return read("VmHWM") - before


def test_memory_is_bounded_and_nothing_heavy_is_imported(tmp_path: Path, monkeypatch: Any) -> None:
    """120 MiB in matrices of 20 MiB: in blocks (24 MiB to write) for safetensors; up to three matrices for DCP.

    How many of them torch's writer holds at once depends on when it is done with the last one: one to three were seen.
    """
    for name, width in (("little", 8), ("large", 2290)):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(6)])
        engine = cases.make_engine(model, cases.config_of("3", zero={"reduce_bucket_size": 1 << 26}), None)
        engine.save_checkpoint(tmp_path / name)
        engine.close()
    for package in ("transformers", "peft"):
        monkeypatch.setitem(sys.modules, package, None)  # an import of it would raise
    for form, most in (("safetensors", 40), ("dcp", 76)):
        taken = []
        for name in ("little", "large"):
            command = ["export", str(tmp_path / name), str(tmp_path / f"{name}-{form}"), "--format", form]
            taken.append(peak_bytes(lambda command=command: main(command)))  # type: ignore[misc]
        assert taken[1] - taken[0] < most << 20, form


@pytest.fixture(scope="module", name="saved")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run: run.json, a model with a tokenizer elsewhere, two checkpoints of one rank."""
    folder = tmp_path_factory.mktemp("run")
    engine = cases.make_engine(cases.make_gpt2(), cases.config_of("0"), None)
    for step in (1, 2):
        engine.global_steps = step
        engine.save_checkpoint(folder / "checkpoints")
    engine.close()
    (folder / "start").mkdir()
    (folder / "start" / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({"model": str(folder / "start")}), encoding="utf-8")
    return folder


def test_a_run_gives_its_latest_checkpoint_and_its_tokenizer(saved: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "ordinary").mkdir()
    for place in (saved, saved / "checkpoints", saved / "checkpoints" / "step-00000002"):
        out = tmp_path / place.name
        assert main(["export", str(place), str(out)]) == 0
        assert "step-00000002 →" in capsys.readouterr().out
        assert (out / "tokenizer.json").read_text(encoding="utf-8") == "{}"
        assert out.stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    own = tmp_path / "own"
    own.mkdir()
    (own / "vocab.json").write_text("[]", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    assert main(["export", str(saved), str(tmp_path / "empty"), "--tokenizer", str(own)]) == 0
    assert {path.name for path in (tmp_path / "empty").iterdir()} >= {"vocab.json", "model.safetensors"}
    assert not (tmp_path / "empty" / "tokenizer.json").exists()


class Wrapped(nn.Module):
    """A module that carries the config of the model inside of it, as many trainers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = cases.make_gpt2()
        self.config = self.inner.config


def test_what_carries_a_config_is_no_hugging_face_model() -> None:
    facts = model_facts.describe(Wrapped())
    assert facts["class"] == "Wrapped" and facts["config"] is None
    facts = model_facts.describe(cases.make_gpt2())
    assert facts["config"]["model_type"] == "gpt2" and facts["generation_config"] is not None


def test_weights_that_were_tied_by_hand_are_not_lost(tmp_path: Path, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = cases.make_llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    expected = evaluation_loss(model.eval())
    engine = cases.make_engine(model, cases.config_of("0"), None)
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    assert "note: model.embed_tokens.weight is written under lm_head.weight too" in capsys.readouterr().out
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert evaluation_loss(loaded.eval()) == expected


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"tie_word_embeddings": True, "vocab_size": 5}, ["a"]),
        ({"tie_word_embeddings": True, "text_config": {"vocab_size": 5}}, ["a"]),
        ({"tie_word_embeddings": True, "vocab_size": 6}, ["a", "b", "c"]),
        ({"vocab_size": 5, "transformers_version": "4.57.0"}, ["a"]),
        ({"vocab_size": 5, "transformers_version": "5.0.0"}, ["a", "b", "c"]),
    ],
)
def test_what_from_pretrained_ties(config: dict[str, Any], names: list[str]) -> None:
    class Named:
        parameters = ({"names": ["a", "b", "c"]},)

    output = Output("a", "a", "weight", torch.float32, torch.Size([5, 3]))
    written, notes = hugging_face._with_aliases(Named(), [output], config)  # type: ignore[arg-type]
    assert [each.name for each in written] == names and len(notes) == (len(names) > 1)
    assert {each.origin for each in written} == {"a"}


def test_a_checkpoint_without_a_config_takes_one_of_a_directory(saved: Path, tmp_path: Path, capsys: Any) -> None:
    """As after an import."""
    assert main(["export", str(saved), str(tmp_path / "whole")]) == 0
    place = Path(shutil.copytree(saved / "checkpoints" / "step-00000002", tmp_path / "imported"))
    facts = {key: value for key, value in index.read(place).items() if key not in ("format", "versions")}
    facts["model"] = {"class": None, "config": None, "generation_config": None, "peft": None}
    (place / "index.json").write_text(index.to_text(facts), encoding="utf-8")
    arguments = ["export", str(place), str(tmp_path / "out")]
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert "(imported checkpoints have none)" in said and "--config DIR" in said
    assert main([*arguments, "--config", str(tmp_path / "whole")]) == 0
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
