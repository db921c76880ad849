"""What the engine computes itself has the same bits on a GPU as on a CPU: at every stage, precision and place.

Models cannot show that, because devices add up their products in other orders. Here every element of a gradient depends
on its own weight alone, by products and sums that IEEE 754 rounds in one way, so that both devices begin with equal
gradients and, after ten steps, must have equal weights, states, norms and loss scales.

- reductions, clipping, loss scales, stochastic rounding, every optimizer, all by kernels of the two devices
- every place of ``test_gpu_tiers`` (on a CPU only "device", with which these are compared), also in backward
- one rank, and two that share the GPU over gloo
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.comm import mesh as mesh_module
from tests.gpu import test_gpu_tiers
from tests.support import cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 10
BUCKET = 600
"""Elements: several buckets in every flat buffer."""
SMALLER = 2.0**-4
"""Of the loss: norms that are clipped, and fp16 gradients that overflow in some steps only."""
PRECISIONS: dict[str, dict[str, Any]] = {
    **test_gpu_tiers.PRECISIONS,
    "bf16 stepped itself": {"bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True}, "seed": 5},
}
KINDS = ("Adam", "Lion", "SGD")
"""Optimizers beside AdamW, which is in all runs."""
NEAR = ("device", "host", "all on the host")
"""The places of runs on several ranks."""

Outcome = dict[str, Any]
Run = tuple[str, int, str, str]
"""Stage, micro-batches, place, optimizer."""


class Part(nn.Module):
    """A matrix and a vector, each element for itself."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(rows, columns))
        self.vector = nn.Parameter(torch.randn(columns))

    def forward(self, seed: int) -> Tensor:
        """Σ (p · a + b) · p over all elements, with random a and b that are drawn on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros((), device=self.vector.device)
        for weight in (self.matrix, self.vector):
            a, b = (torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype) for _ in range(2))
            total = total + ((weight * a + b) * weight).sum().float()
        return total


class Elementwise(nn.Module):
    """Parts, of which the engine makes units, and parameters beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(17)
        self.blocks = nn.ModuleList(Part(13 + 8 * number, 29) for number in range(3))
        self.ends = Part(5, 7)

    def forward(self, seed: int) -> Tensor:
        """The loss."""
        total: Tensor = self.ends(seed)
        for number, block in enumerate(self.blocks, start=1):
            total = total + block(seed + number)
        return total * SMALLER


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """That of one micro-batch."""
    loss: Tensor = model(10 * cases.seed_of(step, rank, micro))
    return loss


def runs(place: str, clipped: str, stage: str) -> Iterator[Run]:
    """Those at one place: with three micro-batches; with one, and other optimizers, where it is the device."""
    yield stage, 3, place, "AdamW"
    if place == clipped:
        yield stage, 1, place, "AdamW"
        yield from ((stage, 1, place, kind) for kind in (KINDS if stage == "2" else ()))


@functools.cache
def mesh_on(device: str) -> mesh_module.Mesh:
    """One for all engines of a rank."""
    return mesh_module.build(torch.device(device))


def train(device: str, config: dict[str, Any], kind: str) -> Outcome:
    """One rank's run: what must be equal, and its part of weights and states."""
    network = Elementwise()
    optimizer = cases.make_optimizer(network, kind)
    engine = shardengine.initialize(network, config, optimizer=optimizer, mesh=mesh_on(device))
    result = cases.run_steps(engine, STEPS, loss_of)
    engine.close()
    return {key: result[key] for key in ("norms", "scales", "skipped", "state")}


def train_all(device: str, precision: str, folder: str, only: tuple[str, ...]) -> dict[Run, Outcome]:
    """All runs of one rank on ``device``. only: at these places; none named: at all of them."""
    found = {}
    for stage in cases.STAGES:
        for place, said in test_gpu_tiers.places(stage, folder):
            if (only and place not in only) or (precision == "fp16" and "in backward" in place):
                continue
            options = {"reproducible": True, **PRECISIONS[precision], **said}
            zero = {"reduce_bucket_size": BUCKET, **options.pop("zero", {})}
            for run in runs(place, "device", stage):
                found[run] = train(device, {**cases.config_of(stage, run[1], zero=zero), **options}, run[3])
    return found


def both(precision: str, folder: str, only: tuple[str, ...], gpu: str = "cuda:0") -> list[dict[Run, Outcome]]:
    """One rank: on the CPU with everything on the device, and on the GPU."""
    near = ("device", "unclipped device")
    return [train_all("cpu", precision, folder, near), train_all(gpu, precision, folder, only)]


def differences(by_rank: list[list[dict[Run, Outcome]]]) -> list[str]:
    """What of the runs on the GPU is not as on the CPU, a sentence each. by_rank: of ``both``."""
    found = []
    for run in by_rank[0][1]:
        stage, micros, place, kind = run
        there = (stage, micros, "unclipped device" if place.startswith("unclipped") else "device", kind)
        cpu, gpu = ([each[at][key] for each in by_rank] for at, key in ((0, there), (1, run)))
        for key in ("norms", "scales", "skipped"):
            if repr(cpu[0][key]) != repr(gpu[0][key]):  # NaN equals NaN
                found.append(f"{run}: {key} {gpu[0][key]}, on the CPU {cpu[0][key]}")
        wholes = [cases.assemble([each["state"] for each in outcome]) for outcome in (cpu, gpu)]
        assert wholes[0].keys() == wholes[1].keys(), run
        wrong = [at for at in wholes[0] if wholes[0][at].tobytes() != wholes[1][at].tobytes()]
        if wrong:
            found.append(f"{run}: {len(wrong)} of {len(wholes[0])} tensors differ, the first {wrong[0]}")
    return found


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpu_has_the_bits_of_the_cpu(
    ranks: int, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDENGINE_DEVICE", "cpu")  # so the process group is gloo's, on which both devices' meshes are
    by_rank = shardengine.launch(both, ranks, (precision, str(tmp_path), () if ranks == 1 else NEAR))
    assert len(by_rank[0][1]) >= 20
    assert not (found := differences(by_rank)), "\n".join(found)
