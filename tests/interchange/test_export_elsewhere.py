"""`shardengine export` for torch.distributed.checkpoint and peft: plain torch, FSDP2 and PeftModel go on from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states_of
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from shardengine.app.cli import main
from tests.interchange.test_export import same, tensors, tied_llama
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
LIGHT: dict[str, Any] = {"gradient_clipping": 0.0}


def model_of(model: str) -> nn.Module:
    network = {**cases.MODELS, "tied llama": tied_llama}[model]()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network


def saves(folder: str, model: str, kind: str, stage: str) -> dict[str, Any]:
    """Two steps and a checkpoint; then one more step: its loss, and the parameters after it."""
    engine = cases.make_engine(model_of(model), cases.config_of(stage, **LIGHT), kind)
    cases.run_steps(engine, 2)
    engine.save_checkpoint(folder)
    losses = [cases.run_micro_batch(engine, cases.loss_of, 2, 0)]
    after = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return {"losses": losses, "after": {name: value.numpy() for name, value in after.items()}}


def loaded(folder: str, network: nn.Module, optimizer: torch.optim.Optimizer, flat: bool) -> None:
    """What a user of plain torch or FSDP2 writes."""
    options = states_of.StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = states_of.get_state_dict(network, optimizer, options=options)
    state: dict[str, Any] = {"model": weights, "optim": states}
    load(state, checkpoint_id=folder)
    states_of.set_state_dict(
        network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
    )


def fused(network: nn.Module, kind: str) -> torch.optim.Optimizer:
    """The engine's arithmetic on a CPU is torch's fused one, where it has one."""
    optimizer = cases.make_optimizer(network, kind)
    for group in optimizer.param_groups if kind in ("AdamW", "Adam") else ():
        group["fused"] = True
    return optimizer


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("model", "kind", "stage"), [("tied llama", "AdamW", "3"), ("gpt2", "SGD", "2"), ("llama", "Adam", "1")]
)
def test_plain_torch_goes_on_from_a_dcp_export(tmp_path: Path, model: str, kind: str, stage: str, flat: bool) -> None:
    """Two parameter groups, tied weights; the next step is the engine's next step, bit for bit.

    For Adam sizes are multiples of 8: torch rounds the rest of a vector otherwise, and the engine pads its own.
    """
    expected = saves(str(tmp_path / "saved"), model, kind, stage)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--format", "dcp"]) == 0
    network = model_of(model)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(0.5)
    optimizer = fused(network, kind)
    for group in optimizer.param_groups:
        group["lr"] = 99.0
    loaded(str(tmp_path / "out"), network, optimizer, flat)
    for group in optimizer.param_groups if kind in ("AdamW", "Adam") else ():
        group["fused"] = True  # the engine's groups say None: torch chooses
    loss = cases.loss_of(network, 2, 0, 0)
    loss.backward()
    optimizer.step()
    assert loss.item() == expected["losses"][0]
    for name, value in network.state_dict().items():
        # torch's own kernels round in other places: a few units in the last place of what a step adds to a weight
        torch.testing.assert_close(value, torch.from_numpy(expected["after"][name]), rtol=1e-6, atol=2e-7, msg=name)


def sharded_twice(folder: str, out: str) -> dict[str, Any]:
    """FSDP2 on two ranks takes the export of two others."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    network = model_of("llama")
    for layer in network.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(network)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(0.5)
    optimizer = cases.make_optimizer(network, "AdamW")
    loaded(out, network, optimizer, False)

    def whole(value: Tensor) -> Any:
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone().numpy()

    found: dict[str, Any] = {name: whole(value) for name, value in network.state_dict().items()}
    for name, parameter in network.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = whole(value)
    dist.barrier()
    return found


def with_states(folder: str) -> dict[str, Any]:
    engine = cases.make_engine(model_of("llama"), cases.config_of("3"))
    cases.run_steps(engine, 2)
    engine.save_checkpoint(folder)
    found: dict[str, Any] = {name: value.clone().numpy() for name, value in engine.state_dict().items()}
    with engine.full_optimizer_state() as states:
        for name, entry in states.items():
            for key, value in (entry or {}).items():
                if key != "weight":
                    found[f"{name}/{key}"] = cases.copy_out(torch.as_tensor(value, dtype=torch.float32)).numpy()
    engine.close()
    return found


def test_fsdp2_goes_on_from_a_dcp_export(pools: Pools, tmp_path: Path) -> None:
    expected = pools(2).run(with_states, str(tmp_path / "saved"))[0]
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--format", "dcp"]) == 0
    for found in pools(2).run(sharded_twice, str(tmp_path / "saved"), str(tmp_path / "out")):
        assert found.keys() == expected.keys()
        assert all(value.tobytes() == expected[name].tobytes() for name, value in found.items())


def test_dcp_keeps_masters_unless_another_dtype_is_chosen(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_gpt2(), cases.config_of("2", bf16={"enabled": True}))
    cases.run_steps(engine, 1)
    engine.save_checkpoint(tmp_path / "saved")
    with engine.full_optimizer_state() as states:
        masters = {name: entry["weight"].clone() for name, entry in states.items() if entry}
    engine.close()
    for name, dtype in (("", torch.float32), ("as-trained", torch.bfloat16), ("fp16", torch.float16)):
        out = tmp_path / f"out{name}"
        chosen = ["--dtype", name] if name else []
        assert main(["export", str(tmp_path / "saved"), str(out), "--format", "dcp", *chosen]) == 0
        state = {"model": {key: torch.empty_like(value, dtype=dtype) for key, value in masters.items()}}
        found = FileSystemReader(out).read_metadata().state_dict_metadata
        load(state, checkpoint_id=out)
        for key, value in masters.items():
            assert found[f"model.{key}"].properties.dtype == dtype  # type: ignore[union-attr]
            assert torch.equal(state["model"][key], value.to(dtype)), key


# peft


def adapted(model: str, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(6)
    network = peft.get_peft_model(model_of(model), peft.LoraConfig(r=3, **options))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.normal_()
    return network


LORA: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}),
    "all linear": ("gpt2", {"target_modules": "all-linear", "bias": "all", "fan_in_fan_out": True}),
    "biases, magnitudes, a module": (
        "gpt2",
        {"target_modules": ["c_attn"], "bias": "lora_only", "use_dora": True, "modules_to_save": ["ln_f"]},
    ),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "o_proj"], "lora_bias": False}),
    "tokens": ("llama", {"target_modules": r"(.*\.)?(q_proj|lm_head)", "trainable_token_indices": [1, 5]}),
    "a pattern": ("llama", {"target_modules": r"(.*\.)?(q_proj|lm_head)"}),
}


def logits_of(network: Any) -> Tensor:
    ids = torch.arange(cases.LENGTH).view(1, -1)
    with torch.no_grad():
        result: Tensor = network.eval()(input_ids=ids).logits
    return result


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("case", list(LORA))
def test_adapters_alone_are_what_peft_writes_and_loads(tmp_path: Path, case: str) -> None:
    peft = pytest.importorskip("peft")
    model, options = LORA[case]
    stage = "2" if "modules_to_save" in options else "3"  # peft's own saving asks such modules for their state dict
    engine = cases.make_engine(adapted(model, **options), cases.config_of(stage))
    cases.run_steps(engine, 1)
    engine.save_checkpoint(tmp_path / "saved")
    engine.save_pretrained(tmp_path / "reference")
    expected = logits_of(engine)
    engine.close()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    assert same(tensors(tmp_path / "out"), tensors(tmp_path / "reference"))
    configs = []
    for place in ("out", "reference"):
        config = json.loads((tmp_path / place / "adapter_config.json").read_text(encoding="utf-8"))
        targets = config["target_modules"]
        config["target_modules"] = sorted(targets) if isinstance(targets, list) else targets
        configs.append(config | {"auto_mapping": None})  # it names the base's Python module, which no checkpoint has
    assert configs[0] == configs[1] and configs[0]["inference_mode"]
    base = model_of(model)
    assert torch.equal(logits_of(peft.PeftModel.from_pretrained(base, tmp_path / "out")), expected)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_several_adapters_and_one_of_them(tmp_path: Path, capsys: Any) -> None:
    peft = pytest.importorskip("peft")
    network = adapted("llama", target_modules=["q_proj"])
    network.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj", "q_proj"]))
    engine = cases.make_engine(network, cases.config_of("2"))
    engine.save_checkpoint(tmp_path / "saved")
    engine.save_pretrained(tmp_path / "reference")
    engine.close()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "one"), "--adapter", "second"]) == 0
    for out, place in (("out", "."), ("out", "second"), ("one", ".")):
        reference = tmp_path / "reference" / ("second" if out == "one" else place)
        assert same(tensors(tmp_path / out / place), tensors(reference)), (out, place)
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "no"), "--adapter", "third"]) == 2
    assert "it has 'default', 'second'" in capsys.readouterr().err
    for option, value in (("--max-shard-size", "1GB"), ("--config", str(tmp_path / "saved"))):
        (tmp_path / "saved" / "config.json").write_text('{"architectures": ["A"]}', encoding="utf-8")
        assert main(["export", str(tmp_path / "saved"), str(tmp_path / "no"), option, value]) == 2
        assert f"{option}: the output is one file of adapters" in capsys.readouterr().err


def test_adapters_that_transformers_attached(tmp_path: Path) -> None:
    """``model.add_adapter``: no PeftModel around the model, and names without its prefix."""
    peft = pytest.importorskip("peft")
    network: Any = model_of("llama")
    network.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    engine = cases.make_engine(network, cases.config_of("3"))
    engine.save_checkpoint(tmp_path / "saved")
    engine.save_pretrained(tmp_path / "reference")
    expected = logits_of(engine)
    engine.close()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    assert same(tensors(tmp_path / "out"), tensors(tmp_path / "reference"))
    assert torch.equal(logits_of(peft.PeftModel.from_pretrained(model_of("llama"), tmp_path / "out")), expected)


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("frozen", [True, False], ids=["whole checkpoint", "without frozen"])
@pytest.mark.parametrize("tokens", [None, [1, 3]], ids=["lora", "tokens"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_adapters_of_a_resized_vocabulary(
    tmp_path: Path, capsys: Any, model: str, tokens: list[int] | None, frozen: bool
) -> None:
    """peft keeps embeddings and output layer with them."""
    peft = pytest.importorskip("peft")
    base: Any = model_of(model)
    base.save_pretrained(tmp_path / "base")
    network: Any = type(base).from_pretrained(tmp_path / "base")
    network.resize_token_embeddings(base.config.vocab_size + 4, mean_resizing=False)
    targets = ["q_proj"] if model == "llama" else ["c_attn"]
    lora = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, trainable_token_indices=tokens)
    engine = cases.make_engine(peft.get_peft_model(network, lora), cases.config_of("2"))
    engine.save_checkpoint(tmp_path / "saved", frozen=frozen)
    engine.save_pretrained(tmp_path / "reference")
    engine.close()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    assert same(tensors(tmp_path / "out"), tensors(tmp_path / "reference"))
    assert "vocabulary" not in capsys.readouterr().out
    (tmp_path / "base").rename(tmp_path / "gone")
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "again")]) == 0
    assert "is not here, so it cannot be seen whether the vocabulary was resized" in capsys.readouterr().out


def test_other_kinds_of_peft_are_refused_by_name(tmp_path: Path, capsys: Any) -> None:
    peft = pytest.importorskip("peft")
    network = peft.get_peft_model(model_of("llama"), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    engine = cases.make_engine(network, cases.config_of("0"))
    engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 2
    assert "is of type IA3, expected LORA" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--format", "safetensors"]) == 0
