"""Runs of whole engines on the meta device: what a case is, what its config says, and what its steps cross."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardengine
from tests.support.cases import STAGES
from tests.support.dry_run import META, Border, Crossing, DryPlatform, Log, SilentWire, dry_mesh

WIDTH, BUCKET = 128, 150_000  # with 1024 ranks a bucket has at least 131,072 elements
HOST_MEMORY: dict[str, Any] = {"device": "cpu"}
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "states": {"offload_optimizer": HOST_MEMORY},
    "half": {"offload_optimizer": {**HOST_MEMORY, "ratio": 0.5}},
    "weights": {"offload_param": HOST_MEMORY},
    "both": {"offload_optimizer": HOST_MEMORY, "offload_param": HOST_MEMORY},
    "disk": {"offload_optimizer": {"device": "nvme"}},
    "both on disk": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "rounded": {"bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True}},
    "autocast": {"torch_autocast": {"enabled": True}},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "clipped": {"gradient_clipping": 1.0},
    "no_sync": {},
    "in backward": {},
    "late weights": {"overlap_param_gather": True},
    "recomputed": {"activation_checkpointing": {"enabled": True}},
    "activations away": {"activation_checkpointing": {"enabled": True, "cpu_offload": True}},
    "raise": {"nonfinite_gradients": "raise"},
    "any gradient": {"nonfinite_gradients": "step"},
    "skipped": {},
    "monitored": {},
    "norm read": {},
    "evaluation": {},
    "full_params": {},
    "state_dict": {},
    "saved": {},
    "saved behind": {"checkpoint": {"async_save": True}},
}


class Net(nn.Module):
    """Three blocks between two layers; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(3)
        )
        self.out = nn.Linear(WIDTH, 4)
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 8] → [n, 4]"""
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x) + self.offset


@dataclass(frozen=True)
class Case:
    """One engine. micros: per step · rank: in the midst where it is not said otherwise."""

    stage: str
    tier: str = "device"
    precision: str = "fp32"
    option: str = ""
    ranks: int = 4
    backend: str = "nccl"
    micros: int = 1

    @property
    def states_on_host(self) -> bool:
        """Whether the CPU steps, or some of it."""
        return "offload_optimizer" in TIERS[self.tier]

    @property
    def weights_on_host(self) -> bool:
        """Whether shards of weights rest there, or in a file."""
        return "offload_param" in TIERS[self.tier]

    @property
    def in_files(self) -> bool:
        """Whether what is not on the device is on disk."""
        return "disk" in self.tier

    @property
    def is_possible(self) -> bool:
        """Whether the engine takes such a config."""
        if self.weights_on_host and not self.stage.startswith("3"):
            return False
        if self.option == "in backward":  # fp32 weights beside their states have no masters
            masters = self.precision == "bf16" or self.tier != "both"
            return self.states_on_host and self.stage != "0" and self.precision not in ("fp16", "rounded") and masters
        if self.option == "late weights":
            return self.stage in ("1", "2")
        if self.option == "skipped" and self.precision == "fp16":
            return False
        if self.option in ("saved", "saved behind") and self.ranks > 1:
            return False  # who finishes a save looks at every rank's files
        return self.option not in ("raise", "any gradient") or self.precision != "fp16"

    @property
    def rank(self) -> int:
        """Rank 0, where that one does more than the others, else the last one."""
        return 0 if self.option in ("monitored", "state_dict", "saved", "saved behind", "skipped") else self.ranks - 1

    def config(self, folder: Path) -> dict[str, Any]:
        """folder: for what is on disk."""
        zero: dict[str, Any] = {"reduce_bucket_size": BUCKET, **STAGES[self.stage]}
        for name, section in TIERS[self.tier].items():
            path = {"nvme_path": str(folder)} if section["device"] == "nvme" else {}
            zero[name] = {**section, **path}
        if self.option == "in backward":
            zero["offload_optimizer"] |= {"step_in_backward": True}
        options = {**PRECISIONS[self.precision], **OPTIONS[self.option]}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.micros,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": zero,
            **options,
        }


class Numbers:
    """A monitor."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, step: int, values: Any) -> None:
        """Keep them."""
        self.rows.append(dict(values))

    def close(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Facts:
    """What is counted once for each of them. buckets: all of them · away: those whose states are not on the device ·
    spans: what the optimizer steps of those as one · pieces: what this rank has of single parameters in those · near:
    in the others · loads: of shards from where they rest, in forwards and backwards."""

    buckets: int
    away: int
    spans: int
    pieces: int
    near: int
    loads: int

    @classmethod
    def of(cls, engine: shardengine.Engine, case: Case) -> Facts:
        """Of an open engine."""
        core = engine._core
        states = [state for state in core.reducer.buckets if state.bucket.state_store.away]
        stepped = [core.layout.pieces_within(each.bucket.layout, each.bucket.state_interval) for each in states]
        together = case.precision != "rounded"
        units = [(unit.index, len(list(unit.buckets()))) for unit in core.units]
        last = units[-1][0]
        again = case.stage == "3"
        passes = [count * (2 if again and index not in (0, last) else 1) for index, count in units]
        return cls(
            buckets=len(core.layout.buckets),
            away=len(states),
            spans=sum(bool(pieces) if together else len(list(pieces)) for pieces in map(list, stepped)),
            pieces=sum(len(each.own) for each in states),
            near=sum(len(each.own) for each in core.reducer.buckets if each not in states),
            loads=sum(passes) * case.micros,
        )


@dataclass
class Run:
    """What a case crossed: at the start, in each step, in the call after it, at the end."""

    case: Case
    facts: Facts
    wire: SilentWire
    log: Log
    start: Counter[Crossing]
    steps: list[Counter[Crossing]] = field(default_factory=list)
    calls: list[Counter[Crossing]] = field(default_factory=list)
    end: Counter[Crossing] = field(default_factory=Counter)


def _backward(engine: shardengine.Engine) -> None:
    x = torch.empty(5, 8, device=META)
    engine.backward(engine(x).float().square().mean())


def _step(engine: shardengine.Engine, case: Case) -> None:
    for micro in range(case.micros):
        quiet = case.option == "no_sync" and micro + 1 < case.micros
        with engine.no_sync() if quiet else nullcontext():
            _backward(engine)
        if not quiet:
            engine.step()


def _evaluate(engine: shardengine.Engine, _folder: Path) -> None:
    with torch.no_grad():
        engine(torch.empty(5, 8, device=META))


def _summon(engine: shardengine.Engine, _folder: Path) -> None:
    with engine.full_params():
        engine(torch.empty(5, 8, device=META))


def _save_behind(engine: shardengine.Engine, folder: Path) -> None:
    engine.save_checkpoint(folder / "saved")
    engine.wait_for_checkpoint()


CALLS: dict[str, Callable[[shardengine.Engine, Path], Any]] = {
    "evaluation": _evaluate,
    "full_params": _summon,
    "state_dict": lambda engine, _: engine.state_dict(),
    "norm read": lambda engine, _: engine.get_global_grad_norm(),
    "saved": lambda engine, folder: engine.save_checkpoint(folder / "saved"),
    "saved behind": _save_behind,
}
"""What an option calls after each step."""


def run(case: Case, folder: Path, steps: int = 3, model: Callable[[], nn.Module] = Net) -> Run:
    """``steps`` steps of ``case``, and the end."""
    log = Log()
    mesh = dry_mesh(
        case.ranks, case.rank, backend=case.backend,
        platform=lambda device: DryPlatform(device, log, flag=case.option == "skipped"),
    )  # fmt: skip
    with Border(log, flag=case.option == "in backward"):
        with META:
            net = model()
        monitors = [Numbers()] if case.option == "monitored" else []
        engine = shardengine.initialize(net, case.config(folder), mesh=mesh, monitors=monitors)
        wire = mesh.wire
        assert isinstance(wire, SilentWire)
        found = Run(case, Facts.of(engine, case), wire, log, log.take())
        for _ in range(steps):
            _step(engine, case)
            found.steps.append(log.take())
            if case.option in CALLS:
                CALLS[case.option](engine, folder)
                found.calls.append(log.take())
        engine.close()
        found.end = log.take()
    return found
