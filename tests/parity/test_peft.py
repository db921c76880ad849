"""LoRA as peft builds it, over GPT-2 in fp32 and in bf16, at every stage: equal to the oracle bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

peft = pytest.importorskip("peft")

Pools = Callable[[int], RankPool]
STEPS = 4
BASES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_lora(base: str) -> Any:
    """fp32 adapters on every attention over a frozen base."""
    model = cases.make_gpt2().to(BASES[base])
    torch.manual_seed(25)
    chosen = peft.LoraConfig(
        r=3, lora_alpha=6, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, chosen).train()
    trained = {p.dtype for p in adapted.parameters() if p.requires_grad}
    assert trained == {torch.float32} and any(p.dtype is BASES[base] for p in adapted.parameters())
    return adapted


def train(base: str, kind: str, stage: str, micros: int, directory: str | None) -> dict[str, Any]:
    config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 600})
    engine = cases.make_engine(make_lora(base), config, kind)
    result = cases.run_steps(engine, STEPS)
    if directory is not None:
        engine.save_pretrained(directory)
    engine.close()
    return result


@functools.lru_cache(maxsize=100)
def truth(base: str, kind: str, ranks: int, micros: int, order: str) -> oracle.Trace:
    model = make_lora(base)
    return oracle.train(
        model, cases.loss_of, ranks=ranks, micros=micros, steps=STEPS, kind=kind,
        groups=cases.groups_of(model, kind), order=order, clip=cases.CLIP,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "micros", "ranks"), [("AdamW", 1, 2), ("SGD", 2, 3)])
@pytest.mark.parametrize("base", list(BASES))
@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_lora_equals_oracle(pools: Pools, stage: str, base: str, kind: str, micros: int, ranks: int) -> None:
    results = pools(ranks).run(train, base, kind, stage, micros, None)
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, truth(base, kind, ranks, micros, order))


@pytest.mark.core
@pytest.mark.parametrize("stage", ["3", "0"])  # the first one is quick: frozen weights that are sharded
def test_adapters_are_saved_and_load_again(pools: Pools, stage: str, tmp_path: Path) -> None:
    """peft's own directory: the adapters alone, which peft puts on a fresh base."""
    pools(2).run(train, "bf16", "AdamW", stage, 1, str(tmp_path / "adapters"))
    assert {path.name for path in (tmp_path / "adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    fresh = cases.make_gpt2().bfloat16()
    loaded = dict(peft.PeftModel.from_pretrained(fresh, tmp_path / "adapters").named_parameters())
    expected = truth("bf16", "AdamW", 2, 1, "full")
    for name in expected.states:
        assert torch.equal(loaded[name].detach(), expected.parameters[name]), name


def saved_with_a_head(stage: str, directory: str) -> list[str]:
    """One more module is trained whole, as peft's ``modules_to_save`` has it."""
    model = cases.make_gpt2()
    chosen = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["wpe"])
    engine = cases.make_engine(peft.get_peft_model(model, chosen).train(), cases.config_of(stage))
    cases.run_steps(engine, 1)
    engine.save_pretrained(directory)
    trained = engine.state_dict(trainable_only=True)
    engine.close()
    return sorted(trained)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_a_module_that_is_trained_whole_is_saved_too(pools: Pools, stage: str, tmp_path: Path) -> None:
    names, _ = pools(2).run(saved_with_a_head, stage, str(tmp_path / "adapters"))
    from safetensors.torch import load_file

    found = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert any("wpe" in name for name in found) and any("modules_to_save" in name for name in names)


def saved_with_prompts_of_tasks(stage: str, directory: str) -> list[float]:
    """Two steps with a save after each; what the encoder holds before and after the call that follows a save."""
    torch.manual_seed(25)
    chosen = peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_tasks=2, num_ranks=2)
    model = peft.get_peft_model(cases.make_gpt2(), chosen)
    engine = cases.make_engine(model, cases.config_of(stage), "AdamW")
    for step in range(2):
        tokens = torch.arange(12).view(2, 6) + step
        output = engine(input_ids=tokens, labels=tokens, task_ids=torch.tensor([0, 1]))
        engine.backward(output.loss)
        engine.step()
        engine.save_pretrained(f"{directory}/{step}")
    state = engine.state_dict()
    engine.close()
    rows = "prompt_encoder.default.prefix_task_rows"
    return [value.double().sum().item() for name, value in state.items() if name.endswith(rows)]


@pytest.mark.parametrize("stage", ["2", "3"])
def test_parameters_that_peft_saves_whatever_it_is_given_are_whole(pools: Pools, stage: str, tmp_path: Path) -> None:
    """Multitask prompts: their method ignores the state dict that ``save_pretrained`` gets."""
    from safetensors.torch import load_file

    ((last,), *_) = pools(2).run(saved_with_prompts_of_tasks, stage, str(tmp_path))
    saved = [load_file(tmp_path / str(step) / "adapter_model.safetensors")["prefix_task_rows"] for step in range(2)]
    assert saved[1].double().sum().item() == last and not torch.equal(saved[0], saved[1]), "not those of the first save"
