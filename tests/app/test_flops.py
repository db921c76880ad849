"""The FLOPs of which MFU is made, beside those that torch counts of the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardengine.app import flops

transformers = pytest.importorskip("transformers")

LENGTH = 64


def llama(*, tied: bool = False) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").train()


def counted(model: Any) -> float:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.parametrize("tied", [False, True])
def test_they_are_those_of_a_step(tied: bool) -> None:
    model = llama(tied=tied)
    assert flops.per_token(model, LENGTH) == pytest.approx(counted(model), rel=0.01)  # norms multiply no matrices


def test_frozen_weights_have_no_gradient() -> None:
    model = llama()
    for parameter in model.model.layers.parameters():
        parameter.requires_grad_(False)
    model.model.embed_tokens.weight.requires_grad_(True)  # so that backward goes through all layers
    assert flops.per_token(model, LENGTH) == pytest.approx(counted(model), rel=0.02)


def test_a_gpu_is_known_by_its_name() -> None:
    assert flops.peak_of("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert flops.peak_of("NVIDIA H100 PCIe", torch.float16) == 756e12
    assert (
        flops.peak_of("NVIDIA L40S", torch.bfloat16) == 362e12 and flops.peak_of("NVIDIA L4", torch.bfloat16) == 121e12
    )
    for other in (
        "NVIDIA RTX A4000",
        "NVIDIA RTX A1000 Laptop GPU",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA L400",
    ):
        assert flops.peak_of(other, torch.bfloat16) == 0
    assert flops.peak_of("NVIDIA H100 80GB HBM3", torch.float32) == flops.peak_of("CPU", torch.bfloat16) == 0
