"""Tiers on CUDA, where host and device have memories of their own: these tests need a GPU.

The bits of every place are those of the device's, although copies are under way while both sides compute; a user's
stream that is held up shows whatever does not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardengine
from tests.gpu import test_gpu
from tests.support import cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PRECISIONS: dict[str, dict[str, Any]] = {
    **test_gpu.DTYPES,
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}},
}
UNCLIPPED: dict[str, Any] = {"gradient_clipping": 0.0}


def places(stage: str, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where it rests, and what the config says; "device" comes first."""
    host: dict[str, Any] = {"device": "cpu"}
    disk = {"device": "nvme", "nvme_path": folder, "buffer_count": 2}
    early = {"step_in_backward": True}
    yield "device", {}
    yield "host", {"zero": {"offload_optimizer": host}}
    yield "half on the host", {"zero": {"offload_optimizer": {**host, "ratio": 0.5}}}
    yield "not page-locked", {"zero": {"offload_optimizer": {**host, "pin_memory": False}}}
    yield "disk", {"zero": {"offload_optimizer": disk}}
    yield "checkpointed", {"activation_checkpointing": {"enabled": True, "cpu_offload": True}}
    yield "unclipped device", UNCLIPPED
    if stage != "0":  # where every rank steps everything, after backward
        yield "unclipped host, in backward", {"zero": {"offload_optimizer": {**host, **early}}, **UNCLIPPED}
        yield "unclipped disk, in backward", {"zero": {"offload_optimizer": {**disk, **early}}, **UNCLIPPED}
    if stage.startswith("3"):
        yield "weights on the host", {"zero": {"offload_param": host}}
        yield "weights on disk", {"zero": {"offload_param": disk}}
        yield "all on the host", {"zero": {"offload_param": host, "offload_optimizer": host}}
        yield "all on disk", {"zero": {"offload_param": disk, "offload_optimizer": disk}}


def train(model: str, config: dict[str, Any], *, held_up: bool, offloaded: bool) -> str:
    """A hash of the weights and states after six steps. offloaded: off the device, and back, after every step."""
    network = test_gpu.make_model(model)
    optimizer = cases.make_optimizer(network, "AdamW")
    engine = shardengine.initialize(network, config, optimizer=optimizer, mesh=test_gpu.the_mesh())
    cuda = engine._core.mesh.device.type == "cuda"
    if held_up and cuda:
        network.register_forward_pre_hook(lambda *_: torch.cuda._sleep(test_gpu.HELD_UP_CYCLES))

    def between(step: int) -> None:
        if offloaded and step:
            engine.offload_states()
            engine.reload_states()

    stream = test_gpu.stream_of_its_own() if held_up and cuda else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = cases.run_steps(engine, 6, test_gpu.loss_of, before=between)
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
    engine.close()
    return cases.digest([result["state"]])


def train_all(model: str, precision: str, folder: str) -> dict[tuple[str, int, str], str]:
    """By stage, micro-batches and place."""
    found = {}
    for stage in cases.STAGES:
        for micros in (1, 3):
            for place, said in places(stage, folder):
                if precision == "fp16" and "in backward" in place:
                    continue
                options = {"reproducible": True, **PRECISIONS[precision], **said}
                zero = {"reduce_bucket_size": 600, **options.pop("zero", {})}
                config = {**cases.config_of(stage, micros, zero=zero), **options}
                held_up = micros == 3
                offloaded = place in ("half on the host", "weights on disk") and micros == 1
                found[stage, micros, place] = train(model, config, held_up=held_up, offloaded=offloaded)
    return found


def check(found: dict[tuple[str, int, str], str]) -> None:
    """One hash for each of clipped and unclipped, per number of micro-batches (one rank: orders of sums are one)."""
    for micros in (1, 3):
        for unclipped in (False, True):
            hashes = {
                at: h for at, h in found.items() if at[1] == micros and at[2].startswith("unclipped") is unclipped
            }
            assert len(hashes) >= 5 and len(set(hashes.values())) == 1, hashes


@pytest.mark.parametrize(("model", "precision"), [("mlp", "fp32"), ("mlp", "bf16"), ("mlp", "fp16"), ("gpt2", "bf16")])
def test_every_place_has_the_bits_of_the_device(tmp_path: Path, model: str, precision: str) -> None:
    (found,) = shardengine.launch(train_all, 1, (model, precision, str(tmp_path)))
    check(found)


def device_bytes_while_away() -> tuple[int, int]:
    """Bytes of CUDA tensors of an engine whose optimizer rests on the host, and of its weights."""
    before = test_gpu.requested_bytes()
    network = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    optimizer = torch.optim.AdamW(network.parameters())
    engine = shardengine.initialize(network, config, optimizer=optimizer, mesh=test_gpu.the_mesh())
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 512, device="cuda", dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    memory = engine.memory()
    engine._core.pool.clear()
    found = test_gpu.requested_bytes() - before, int(memory["live_weight_bytes"])
    engine.close()
    return found


def test_the_device_keeps_the_weights_alone() -> None:
    ((held, weights),) = shardengine.launch(device_bytes_while_away, 1, ())
    assert weights <= held <= weights + 32 * test_gpu.SMALL_TENSORS_BYTES
