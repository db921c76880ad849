"""Engines whose checkpoints are compared over topologies: a model that has something of everything, and snapshots.

Must not know: what a checkpoint looks like on disk.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import shardengine
from shardengine.optim.lion import Lion
from tests.support import cases
from tests.support.special_models import VOCAB, WIDTH

CLASSES: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "Lion": Lion}
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "betas": (0.9, 0.95)},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "SGD without momentum": {"lr": 0.05},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.95)},
}


class Adapted(nn.Module):
    """A frozen bf16 matrix with adapters in the model's own dtype beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return x + torch.tanh(base + self.b(self.a(x)))


class Everything(nn.Module):
    """Tied, frozen inside and outside of units, two dtypes, channels_last, 0-dim, empty, integers, no group, buffers.

    ``never`` is not used; the second block only where ``whole``, so that step counts differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.conv = nn.Conv2d(3, 5, 3)
        self.still = nn.Conv2d(3, 5, (3, 3)).requires_grad_(False)
        self.norm = nn.BatchNorm2d(5, affine=False)
        self.lift = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.loose = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.table = nn.Parameter(torch.arange(7, 18), requires_grad=False)
        self.never = nn.Linear(3, 2)
        self.count: Tensor
        self.mask: Tensor
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        for convolution in (self.conv, self.still):
            convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, image: Tensor, ids: Tensor, whole: bool) -> Tensor:
        image = image.to(self.conv.weight.dtype)
        seen = self.norm((self.conv(image) + self.still(image)).float()).mean((2, 3))
        x = self.embed(self.table[ids] - 7) + self.lift(seen.to(self.lift.weight.dtype))
        for block in self.blocks if whole else self.blocks[:1]:
            x = block(x)
        self.count += 1
        self.mask.logical_not_()
        return self.head(x).float() * self.scale + self.empty.sum() + self.loose.sum()


def make_model(seed: int = 31) -> Any:
    torch.manual_seed(seed)
    return Everything()


def groups_of(model: nn.Module, kind: str, order: tuple[int, ...] = (0, 1, 2)) -> list[dict[str, Any]]:
    """Matrices, vectors, scalars; each with options of its own. ``loose`` is in none."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and name != "loose"]
    chosen = [[p for _, p in named if min(p.dim(), 2) == dims] for dims in (2, 1, 0)]
    groups = [
        {"params": params, **OPTIONS[kind], "weight_decay": decay, "lr": OPTIONS[kind]["lr"] * factor}
        for params, decay, factor in zip(chosen, (0.1, 0.0, 0.0), (1.0, 0.5, 0.25), strict=True)
    ]
    return [groups[number] for number in order if groups[number]["params"]]


def make_schedule(optimizer: Any) -> Any:
    """It keeps a rate per group, and a schedule inside."""
    rates = torch.optim.lr_scheduler
    parts = [rates.LinearLR(optimizer, total_iters=2), rates.CosineAnnealingLR(optimizer, 9)]
    return rates.SequentialLR(optimizer, parts, [2])


def make_engine(
    model: nn.Module, groups: list[dict[str, Any]] | None, kind: str, config: dict[str, Any], schedule: Any = None
) -> Any:
    """groups: None for an engine without optimizer."""
    mesh = cases.mesh_of_this_process() if dist.is_initialized() else None
    optimizer = None if groups is None else CLASSES[kind.split()[0]](groups)
    return shardengine.initialize(model, config, optimizer=optimizer, lr_scheduler=schedule, mesh=mesh)


def make(stage: str, low: bool = False, kind: str = "AdamW", seed: int = 31, **options: Any) -> Any:
    """An engine of ``Everything``. low: bf16 with master weights."""
    order = options.pop("order", (0, 1, 2))
    schedule = options.pop("schedule", make_schedule)
    model = options.pop("model", None) or make_model(seed)
    precision: dict[str, Any] = {"bf16": {"enabled": True}} if low else {}
    config = cases.config_of(stage, **options, **precision)
    return make_engine(model, groups_of(model, kind, order), kind, config, schedule)


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    torch.manual_seed(cases.seed_of(step, rank, micro))
    ids = torch.randint(0, VOCAB, (2,))
    return functional.cross_entropy(model(torch.randn(2, 3, 4, 4), ids, step % 2 == 0), ids)


def train(engine: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(loss_of(engine, step, engine.rank, micro))
            engine.step()


def raw(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor as what may leave the process and can be compared: dtype, shape, bits."""
    flat = tensor.detach().clone().reshape(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()


def snapshot(engine: Any) -> dict[str, Any]:
    """Everything that a checkpoint keeps, as this rank sees it; whole: every tensor of the model's state dict."""
    with engine.full_params():
        whole = {name: raw(value) for name, value in engine.module.state_dict().items()}
    found: dict[str, Any] = {
        "whole": whole,
        "counters": (engine.global_steps, engine.global_samples, engine.micro_steps),
    }
    if engine.optimizer is not None:
        names = engine._core.partition.first_names()
        specs = zip(engine._core.layout.parameters, engine.optimizer.steps, strict=True)
        pieces = engine.optimizer.parameter_state()
        found["state"] = [(part.name, part.key, part.first, part.values.float().clone().numpy()) for part in pieces]
        found["steps"] = {spec.name: steps for spec, steps in specs if spec.trainable}
        found["groups"] = {
            tuple(names[id(p)] for p in group["params"]): {k: v for k, v in group.items() if k != "params"}
            for group in engine.optimizer.param_groups
        }
    if engine.lr_scheduler is not None:
        found["schedule"] = engine.lr_scheduler.state_dict()
    return found


def assert_same(after: list[dict[str, Any]], before: list[dict[str, Any]], where: object = "") -> None:
    """Snapshots of all ranks, of any two topologies."""
    for result in after:
        for key in before[0].keys() - {"state"}:
            assert result[key] == before[0][key], f"{where} {key}: {differing(result[key], before[0][key])}"
        assert result.keys() == before[0].keys()
    if "state" not in before[0]:
        return
    there, here = (cases.assemble([result["state"] for result in results]) for results in (before, after))
    assert there.keys() == here.keys(), f"{where}: {there.keys() ^ here.keys()}"
    for at, flat in there.items():
        assert here[at].dtype == flat.dtype and here[at].tobytes() == flat.tobytes(), f"{where} {at}"


def differing(one: Any, other: Any) -> str:
    """The keys at which two dicts differ, for a message."""
    if not isinstance(one, dict):
        return f"{one}, expected {other}"
    return str([key for key in itertools.chain(one, other) if one.get(key) != other.get(key)][:5])
