"""The engine on CUDA with NCCL: these tests need a GPU, and without one nothing here is run.

One GPU is one rank: the path is the same, but nothing is sent. With two GPUs everything is done on two ranks as well.

- bits: one hash of weights and optimizer states over all stages, also for a user who trains on a stream of his own,
  whose kernels are held up so that whatever does not wait for them reads too early
- losses: close to the oracle, which is one process on the CPU. ``CLOSE`` says how close, and why not equal
- memory: the model state by the formula, and what CUDA's allocator was asked for beside it
"""

from __future__ import annotations

import functools
import gc
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine import mesh as mesh_module
from tests import cases, oracle
from tests.sizes import padded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 3
DTYPES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
# Relative, for losses. Matrix products are added in another order than on the CPU: some 5e-7 of each result in fp32; in
# bf16 every activation may be rounded to its neighbour, 4e-3. The oracle, with every module's output and every gradient
# disturbed by that much, has losses that differ by up to 5e-7 and 6e-3. What a GPU adds to that is not known.
CLOSE = {"fp32": 1e-5, "bf16": 3e-2}
BLOCK = re.compile(r"(?:transformer\.h|blocks)\.\d+(?=\.)")
HELD_UP_CYCLES = 10_000_000
"""Some 5 ms."""
SMALL_TENSORS_BYTES = 4096
"""The norm, what gradients are divided by, and the like."""

Run = tuple[str, int, bool]
"""Stage, micro-batches, whether on a stream of its own."""
RUNS: list[Run] = [(stage, k, own) for stage in cases.STAGES for k, own in ((1, False), (3, False), (3, True))]


def make_model(name: str) -> nn.Module:
    """Without dropout, for which devices draw other numbers."""
    model = cases.MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """As ``cases.loss_of``, on the model's device: the same numbers on each."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    weight = next(iter(model.parameters()))
    if isinstance(getattr(model, "module", model), cases.Mlp):
        x, y = torch.randn(5, 7), torch.randn(5, 3)
        return (model(x.to(weight.device, weight.dtype)) - y.to(weight.device)).square().mean()
    ids = torch.randint(0, cases.VOCAB, (2, cases.LENGTH)).to(weight.device)
    return model(input_ids=ids, labels=ids).loss


def requested_bytes() -> int:
    """What all living CUDA tensors of this process asked for."""
    gc.collect()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@functools.cache
def the_mesh() -> mesh_module.Mesh:
    """One for all engines of a rank."""
    return mesh_module.build()


@functools.cache
def stream_of_its_own() -> torch.cuda.Stream:
    """One for all runs of a rank: cuBLAS takes a workspace per stream."""
    return torch.cuda.Stream()


def train(model: str, dtype: str, run: Run) -> dict[str, Any]:
    """One rank's run, with what the engine and the allocator say about memory after it."""
    stage, micros, own_stream = run
    before = requested_bytes()
    network = make_model(model)
    config = cases.config_of(stage, micros, reproducible=True, **DTYPES[dtype])
    optimizer = cases.make_optimizer(network, "AdamW")
    engine = shardengine.initialize(network, config, optimizer=optimizer, mesh=the_mesh())
    if own_stream:
        network.register_forward_pre_hook(lambda *_: torch.cuda._sleep(HELD_UP_CYCLES))
    outer = torch.cuda.current_stream()
    stream = stream_of_its_own() if own_stream else outer
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        result = cases.run_steps(engine, STEPS, loss_of)
    outer.wait_stream(stream)
    buffers = sum(buffer.nbytes for buffer in network.buffers())
    result |= {"memory": engine.memory(), "requested": requested_bytes() - before - buffers}
    engine.close()
    return result


def train_all(model: str, dtype: str) -> dict[Run, dict[str, Any]]:
    """All runs of one rank, after one that is thrown away: it loads kernels and takes workspaces."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # so that products and sums have one order, on any stream
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)  # whose backward adds with atomics
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    for warm_up in RUNS[:3]:
        train(model, dtype, warm_up)
    return {run: train(model, dtype, run) for run in RUNS}


def assert_memory(found: dict[str, Any], model: str, dtype: str, run: Run, ranks: int) -> None:
    """The formula from the model's own sizes: weights, gradients, and fp32 states with masters for bf16."""
    stage, micros, _ = run
    shards_weights, size = stage.startswith("3"), 2 if dtype == "bf16" else 4
    storages: dict[str, list[int]] = {}
    for name, parameter in make_model(model).named_parameters():
        block = BLOCK.match(name) if shards_weights else None
        storages.setdefault(block.group() if block else "", []).append(parameter.numel())
    elements = sum(padded(counts, ranks, size) for counts in storages.values())
    weights = elements * size // (ranks if shards_weights else 1)
    states = elements * (8 if size == 4 else 12) // (1 if stage == "0" else ranks)
    resting = elements * (size if micros == 1 else 4) // (ranks if cases.LETTER[stage] == "sharded" else 1)
    complete = elements * size if stage == "0" else resting  # there it is gathered in the wire's dtype
    memory = found["memory"]
    assert memory["predicted_model_state_bytes"] == weights + resting + states, run
    assert memory["measured_model_state_bytes"] == weights + complete + states, run
    assert (memory["live_weight_bytes"], memory["live_state_bytes"]) == (weights, states), run
    kept = weights + states + memory["buffer_bytes"]
    assert kept <= found["requested"] <= kept + SMALL_TENSORS_BYTES, run


@functools.cache
def truth_of(model: str, dtype: str, ranks: int, micros: int, order: str) -> oracle.Trace:
    network = make_model(model)
    return oracle.train(
        network, loss_of, ranks=ranks, micros=micros, steps=STEPS, kind="AdamW",
        groups=cases.groups_of(network, "AdamW"), order=order, clip=cases.CLIP,
        low=torch.bfloat16 if dtype == "bf16" else None,
    )  # fmt: skip


@pytest.mark.parametrize("model", ["mlp", "gpt2"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))]
)
def test_every_stage_on_cuda(ranks: int, dtype: str, model: str) -> None:
    by_rank = shardengine.launch(train_all, ranks, (model, dtype))
    hashes: dict[tuple[int, str], set[str]] = {}
    for run in RUNS:
        stage, micros, _ = run
        order = cases.LETTER[stage] if micros > 1 and ranks > 1 else "full"
        found = [results[run] for results in by_rank]
        hashes.setdefault((micros, order), set()).add(cases.digest([result["state"] for result in found]))
        truth = truth_of(model, dtype, ranks, micros, order)
        for rank, result in enumerate(found):
            expected = [row[rank] for row in truth.losses]
            for ours, theirs in zip(result["losses"], expected, strict=True):
                assert ours == pytest.approx(theirs, rel=CLOSE[dtype]), f"{run}, rank {rank}"
            assert_memory(result, model, dtype, run, ranks)
    assert all(len(found) == 1 for found in hashes.values()), hashes
