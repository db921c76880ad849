"""A deep model's plan by three with fewer layers is the plan of all of its layers."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from benchmarks.plan_cases import Text, words
from shardengine import Hardware, Plan, plan
from shardengine.planner import Rates, memory_plan
from shardengine.planner.layers import Layers, carried_on, layers_of
from shardengine.planner.ledger import MemoryMoment
from shardengine.planner.memory_plan import Task

DEEP, VOCABULARY, TOKENS = 14, 512, 256
_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": DEEP,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TOKENS, "use_cache": False,
}  # fmt: skip
MODELS: dict[str, Text] = {
    "Llama": Text("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "GPT-2": Text("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": VOCABULARY, "n_positions": TOKENS, "n_embd": 64, "n_layer": DEEP, "n_head": 4,
        "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}),
    "T5": Text("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": DEEP + 1,
        "num_decoder_layers": DEEP + 1, "num_heads": 4, "use_cache": False, "decoder_start_token_id": 0,
        "pad_token_id": 0}),
    "Gemma 2": Text("Gemma2ForCausalLM", "Gemma2Config", {**_LLAMA, "head_dim": 16, "sliding_window": 16}),
}  # fmt: skip


def made(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("Llama", Layers(("model.layers",), 0, DEEP, 1)),
        ("GPT-2", Layers(("transformer.h",), 0, DEEP, 1)),
        ("T5", Layers(("encoder.block", "decoder.block"), 1, DEEP, 1)),
        ("Gemma 2", Layers(("model.layers",), 0, DEEP, 2)),
    ],
)
def test_the_layers_of_a_model_are_found(name: str, layers: Layers) -> None:
    assert layers_of(made(name)) == layers


class Block(nn.Module):
    def __init__(self, width: int, place: int, kind: str = "") -> None:
        super().__init__()
        self.layer, self.place, self.kind = nn.Linear(width, width, device="meta"), place, kind

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layer(x).relu()
        return y


class Experts(nn.Module):
    """Two layers of many experts: not a deep model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"experts": nn.ModuleList(Block(8, 0) for _ in range(16))}) for _ in range(2)
        )


def test_what_is_no_list_of_layers_is_none() -> None:
    assert layers_of(nn.Linear(4, 4)) is None
    assert layers_of(nn.Sequential(*(nn.Linear(4 + i, 5 + i) for i in range(20)))) == Layers(("",), 0, 1, 1)
    found = layers_of(Experts())
    assert found is None or found.depths() is None
    kinds = [Block(8, place, "local" if place % 6 else "global") for place in range(24)]
    assert layers_of(nn.Sequential(*kinds)) == Layers(("",), 0, 24, 6)
    assert Layers(("",), 0, 24, 6).depths() is None, "more layers than the whole model has"


def planned(name: str, zero: dict[str, Any], *, exact: bool, **config: Any) -> Plan:
    whole = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"reduce_bucket_size": 5_000, "stage3_prefetch_bucket_size": 5_000, **zero}, **config,
    }  # fmt: skip
    return plan(made(name), whole, "4x24GB", batch=partial(words, 4, TOKENS, VOCABULARY)(), exact=exact)


BF16 = {"bf16": {"enabled": True}}
AGAIN = {"activation_checkpointing": {"enabled": True}}
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "stage 0": ("Llama", {"stage": 0}, {}),
    "stage 2, computed again": ("Llama", {"stage": 2}, BF16 | AGAIN),
    "stage 2, states on the host": ("GPT-2", {"stage": 2, "offload_optimizer": {"device": "cpu"}}, BF16),
    "two lists, stage 3": ("T5", {"stage": 3}, BF16),
}  # fmt: skip


@pytest.mark.parametrize("name", list(RUNS))
def test_three_shorter_models_say_what_the_whole_one_does(name: str) -> None:
    model, zero, config = RUNS[name]
    short, whole = (planned(model, zero, exact=exact, **config) for exact in (False, True))
    assert short.depths == (2, 4, 6)
    assert whole.depths == ()
    assert short.parameters == whole.parameters == sum(each.numel() for each in made(model).parameters())
    for mine, real in zip(short.tiers, whole.tiers, strict=True):
        assert mine.peak == pytest.approx(real.peak, rel=0.005), (mine, real)
        assert mine.rests == pytest.approx(real.rests, rel=0.005)
        assert mine.initialize <= mine.peak or mine.initialize == pytest.approx(real.initialize, rel=0.005)


def test_the_moment_of_the_peak_may_be_another_one_in_a_deep_model() -> None:
    """Each moment is a line of its own: what is 50 + 10 a layer overtakes what is 200 + 1 a layer."""
    layers = Layers(("h",), 0, 100, 1)

    def run(depth: int) -> list[MemoryMoment]:
        ends = [MemoryMoment("forward", {"kept": 10 * (place + 1)}, f"h.{place}") for place in range(depth)]
        return [*ends, MemoryMoment("backward", {"kept": 200 + depth}), MemoryMoment("step", {"kept": 50 + 10 * depth})]

    found = carried_on((run(4), run(8)), (4, 8), layers, 100)
    bytes_ = {(each.phase, each.unit): each.bytes for each in found}
    assert bytes_["backward", ""] == 300 and bytes_["step", ""] == 1050
    assert bytes_["forward", "h.0"] == 10 and bytes_["forward", "h.99"] == 1000
    assert max(found, key=lambda each: each.bytes).phase == "step"


def test_layers_that_differ_run_all() -> None:
    """So do those of a model whose optimizer exists: it knows the parameters of all layers."""
    model: Any = made("Llama")
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"reduce_bucket_size": 5_000},
    }  # fmt: skip

    def of(**more: Any) -> Plan:
        return plan(model, config, "2x24GB", batch=words(4, TOKENS, VOCABULARY), **more)

    assert of().depths == (2, 4, 6)
    assert of(exact=True).depths == ()
    assert of(optimizer=torch.optim.AdamW(model.parameters(), 0.1)).depths == ()
    model.model.layers[3].mlp.down_proj = nn.Sequential(model.model.layers[3].mlp.down_proj)
    assert of().depths == ()


def test_a_list_that_is_the_model_itself_has_names_as_torch_gives_them() -> None:
    layers = Layers(("",), 0, 10, 1)
    runs = [[MemoryMoment("forward", {}, "0"), MemoryMoment("forward", {}, f"after {depth - 1}")] for depth in (2, 4)]
    found = carried_on((runs[0], runs[1]), (2, 4), layers, 10)
    assert [each.unit for each in found] == ["0", "after 9"]


@pytest.mark.parametrize("stage", [2, 3])
def test_of_many_micro_batches_two_are_run(stage: int) -> None:
    """Peaks are theirs, and the time grows by what a further one takes."""
    seen: list[int] = []

    def loss(returned: Any) -> Tensor:
        seen.append(0)
        value: Tensor = returned.loss
        return value

    rates = Rates.given(Hardware(4, 1 << 34))
    model = Text("LlamaForCausalLM", "LlamaConfig", _LLAMA | {"num_hidden_layers": 2})()
    plans = {}
    for steps in (2, 3, 7):
        config = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": steps,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000},
        }  # fmt: skip
        found = plan(model, config, "4x24GB", batch=words(2, TOKENS, VOCABULARY), loss=loss, rates=rates)
        assert (found.config.gradient_accumulation_steps, found.config.train_batch_size) == (steps, 8 * steps)
        assert len(seen) % 2 == 0 and len(seen) <= 8
        seen.clear()
        plans[steps] = found
    assert plans[2].device.peak == plans[3].device.peak == plans[7].device.peak
    seconds = [each.time.seconds for each in plans.values() if each.time is not None]
    assert seconds[2] - seconds[1] == pytest.approx(4 * (seconds[1] - seconds[0]))
    assert 0 < seconds[1] - seconds[0] < seconds[0]
    task = Task(model, words(2, TOKENS, VOCABULARY), plans[3].config, Hardware(4, 1 << 34), loss, {})
    with patch.object(memory_plan, "_RUN", 3):
        whole = task.plan(task.run_all(exact=False), rates)
    assert whole.device.peak == plans[3].device.peak
    assert whole.time is not None and whole.time.seconds == pytest.approx(seconds[1], rel=0.02)


class Deep(nn.Module):
    """Layers that it counts itself."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, place) for place in range(DEEP))
        self.count = DEEP

    def forward(self, x: Tensor) -> Tensor:
        for place in range(self.count):
            x = self.layers[place](x)
        return x.square().mean()


def test_a_model_that_counts_its_layers_runs_all() -> None:
    assert of_deep(Deep()).depths == ()


def of_deep(model: nn.Module, **more: Any) -> Plan:
    config = {
        "train_micro_batch_size_per_gpu": 64, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"reduce_bucket_size": 8_000},
    }  # fmt: skip
    return plan(model, config, "2x24GB", batch={"x": torch.zeros(64, 256)}, loss=lambda loss: loss, **more)


@pytest.mark.parametrize("frozen", [range(8), range(6, DEEP)])
def test_layers_that_are_not_trained_are_others(frozen: range) -> None:
    model = Deep()
    for place in frozen:
        model.layers[place].requires_grad_(requires_grad=False)
    assert layers_of(model) != layers_of(Deep())
    assert of_deep(model).device.peak == of_deep(model, exact=True).device.peak


class Half(Deep):
    """In the second half of all layers something else is kept, which no layer says."""

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place >= self.count // 2:
                x = x.exp().sin()
        return x.square().mean()


def test_a_model_whose_forward_knows_its_depth_runs_all() -> None:
    assert layers_of(Half()) == layers_of(Deep())
    assert of_deep(Half()).depths == ()


def test_functions_tell_layers_apart() -> None:
    model: Any = Deep()
    for place, layer in enumerate(model.layers):
        layer.act = torch.relu if place < DEEP // 2 else torch.sin
    assert layers_of(model) != layers_of(Deep())
