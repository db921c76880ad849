"""``load_pretrained`` gives, to the bit, what ``from_pretrained`` and ``initialize`` give, and reads slices alone.

Owns: transformers' conversions, ties, missing and resized weights, casts, on ranks, stages and tiers; what is refused.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardengine
from shardengine.errors import MismatchError, UsageError
from shardengine.offload import direct_io
from tests.support import cases
from tests.support.program_runs import MISSING
from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed")
Pools = Callable[[int], RankPool]
FP32, BF16 = torch.float32, torch.bfloat16
ROOT = Path(__file__).parents[2]
CPU = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


def make_models(folder: str) -> None:
    """All that the tests load."""
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    gpt2: Any = cases.make_gpt2()
    gpt2.save_pretrained(f"{folder}/gpt2")
    sizes = {"vocab_size": 51, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(4)
    llama: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    llama.save_pretrained(f"{folder}/llama", max_shard_size="10KB")
    assert len(list(Path(folder, "llama").glob("*.safetensors"))) > 3
    llama.model.save_pretrained(f"{folder}/headless")
    llama.bfloat16().save_pretrained(f"{folder}/llama16")
    mixtral: Any = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))
    mixtral.save_pretrained(f"{folder}/mixtral")
    stored = load_file(f"{folder}/mixtral/model.safetensors")
    assert any("experts.3.w1" in name for name in stored)  # one by one in the file, fused in the model
    stored = load_file(f"{folder}/gpt2/model.safetensors")
    (words,) = (name for name in stored if name.endswith("wte.weight"))
    shutil.copytree(f"{folder}/gpt2", f"{folder}/twice")  # what is tied is there twice: equal
    save_file({**stored, "lm_head.weight": stored[words].clone()}, f"{folder}/twice/model.safetensors")


RUNS: list[tuple[str, str, dict[str, Any], str, dict[str, Any]]] = [
    ("GPT2LMHeadModel", "gpt2", {}, "0", {}),
    ("GPT2LMHeadModel", "gpt2", {"dtype": BF16}, "2", {}),
    ("GPT2LMHeadModel", "twice", {}, "3", {}),
    ("GPT2LMHeadModel", "gpt2", {"vocab_size": 60, "ignore_mismatched_sizes": True}, "3", {}),
    ("LlamaForCausalLM", "llama", {}, "1", {}),
    ("AutoModelForCausalLM", "llama", {"dtype": BF16}, "3", {"bf16": {"enabled": True}}),
    ("LlamaForCausalLM", "headless", {}, "3", {}),
    ("LlamaForCausalLM", "headless", {"dtype": BF16}, "1", {}),
    ("LlamaForCausalLM", "llama16", {"dtype": FP32}, "3k", {}),
    ("LlamaForCausalLM", "llama16", {}, "3", {"zero": CPU}),
    ("MixtralForCausalLM", "mixtral", {}, "3", {}),
    ("MixtralForCausalLM", "mixtral", {"dtype": BF16}, "2", {}),
]


def train(engine: Any, rank: int) -> dict[str, Any]:
    """What it begins with and becomes in one step with dropout, if the model has some; the random state in between."""
    said: dict[str, Any] = {"random": torch.get_rng_state(), "config": json.dumps(engine.module.config.to_dict())}
    said["tied"] = [len(spec.names) for spec in engine._core.layout.parameters]
    said |= {f"begins {name}": value.clone() for name, value in engine.state_dict().items()}
    said |= {f"buffer {name}": value.clone() for name, value in engine.module.named_buffers()}
    engine.train()
    words = torch.arange(rank, rank + 8)[None]
    loss = engine(input_ids=words, labels=words).loss
    engine.backward(loss)
    engine.step()
    said |= {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return {**said, "loss": loss.detach()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def both(folder: str, runs: list[Any]) -> list[list[str]]:
    """Of each run what differs."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    mesh, differing = cases.mesh_of_this_process(), []
    for kind, name, options, stage, more in runs:
        config, model_class = cases.config_of(stage, **more), getattr(transformers, kind)
        torch.manual_seed(7 + mesh.rank)
        model = model_class.from_pretrained(f"{folder}/{name}", **options)
        expected = train(shardengine.initialize(model, config, optimizer=adamw, mesh=mesh), mesh.rank)
        torch.manual_seed(7 + mesh.rank)
        got = train(
            shardengine.load_pretrained(
                f"{folder}/{name}", config, model_class=model_class, optimizer=adamw, mesh=mesh, **options
            ),
            mesh.rank,
        )
        assert expected.keys() == got.keys()
        differing.append([
            key
            for key, want in expected.items()
            if not (torch.equal(got[key], want) if isinstance(want, Tensor) else got[key] == want)
        ])  # fmt: skip
    return differing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("models"))
    make_models(made)
    return made


@pytest.mark.core
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_and_a_step_are_those_of_from_pretrained(pools: Pools, folder: str, ranks: int) -> None:
    nvme = {key: {"device": "nvme", "nvme_path": f"{folder}/disk"} for key in ("offload_param", "offload_optimizer")}
    runs = [*RUNS, ("LlamaForCausalLM", "llama", {}, "3", {"zero": nvme})]
    for rank, differing in enumerate(pools(ranks).run(both, folder, runs)):
        for run, names in zip(runs, differing, strict=True):
            assert not names, (rank, run, names)


def counted(folder: str, name: str) -> tuple[int, int]:
    """Bytes of the files that were read, and of all of them."""
    mesh, read, ordinary = cases.mesh_of_this_process(), 0, direct_io.preadv

    def preadv(*args: Any) -> int:
        nonlocal read
        count = ordinary(*args)
        read += count
        return count

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "preadv", preadv)
        engine = shardengine.load_pretrained(f"{folder}/{name}", cases.config_of("3"), mesh=mesh, optimizer=adamw)
    assert type(engine.module).__name__ == "MixtralForCausalLM"
    engine.close(restore=False)
    return read, sum(path.stat().st_size for path in Path(folder, name).glob("*.safetensors"))


def test_fused_experts_are_read_once_by_all_ranks_together(pools: Pools, folder: str) -> None:
    said = pools(2).run(counted, folder, "mixtral")
    total = said[0][1]
    for read, _ in said:
        assert 0.3 * total < read < 0.7 * total, (read, total)
    assert sum(read for read, _ in said) <= 1.2 * total


def refused(folder: str, where: str, **options: Any) -> str:
    mesh = cases.mesh_of_this_process()
    with pytest.raises((UsageError, MismatchError, OSError)) as raised:
        shardengine.load_pretrained(f"{folder}/{where}", cases.config_of("3"), mesh=mesh, **options)
    return str(raised.value)


def all_refused(folder: str) -> dict[str, str]:
    """What is said of everything that is wrong."""
    import transformers

    transformers.logging.set_verbosity_error()
    mesh = cases.mesh_of_this_process()
    return {
        "nothing": refused(folder, "nothing"),
        "alone": refused(folder, "llama" if mesh.rank == 0 else "nothing"),
        "shape": refused(folder, "gpt2", vocab_size=60),
        "cut": refused(folder, "cut"),
        "pickle": refused(folder, "pickle"),
        "device_map": refused(folder, "llama", device_map="auto"),
        "class": refused(folder, "llama", model_class=int),
    }


def test_each_refusal_is_a_sentence_on_every_rank(pools: Pools, folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "models")
    made = tmp_path / "models"
    shutil.copytree(made / "gpt2", made / "cut")
    path = made / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    shutil.copytree(made / "gpt2", made / "pickle")
    (made / "pickle" / "model.safetensors").unlink()
    model: Any = cases.make_gpt2()
    torch.save(model.state_dict(), made / "pickle" / "pytorch_model.bin")
    first, second = pools(2).run(all_refused, str(made))
    for said in (first, second):
        assert "nothing" in said["nothing"]
        assert "(51, 20) in the weights and (60, 20) in the model" in said["shape"]
        assert "was cut off" in said["cut"]
        assert "pytorch_model.bin" in said["pickle"] and "in slices" in said["pickle"]
        assert "expected no device_map=" in said["device_map"]
        assert "with from_pretrained, got <class 'int'>" in said["class"]
    assert "failed on rank 1" in first["alone"]


FRESH = """
import sys, warnings
import shardengine
{before}
with shardengine.meta_init():
    {inside}
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(sum(not p.is_meta for p in model.parameters()))
"""


def test_a_script_that_has_imported_transformers_alone_reads_nothing(tmp_path: Path) -> None:
    """transformers is a lazy package: its loader may be imported first by ``from_pretrained``."""
    model: Any = cases.make_llama()
    model.save_pretrained(tmp_path)

    def run(before: str, inside: str) -> subprocess.CompletedProcess[str]:
        code = FRESH.format(before=before, inside=inside)
        return subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, cwd=ROOT
        )

    early = run("from transformers import AutoModelForCausalLM", "pass")
    assert early.stdout.strip() == "0", early.stderr
    late = run("", "from transformers import AutoModelForCausalLM")
    assert late.returncode != 0 and "expected `import transformers` before it" in late.stderr
