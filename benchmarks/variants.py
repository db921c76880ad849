"""The competitors of ``step.py`` by name. Owns: shardengine as a competitor, and the facts about each of them.

A competitor is one small class, built from a fresh model (``workload.Variant``). To add one, write the class and enter
it in ``VARIANTS``; nothing else changes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

import shardengine
from benchmarks.peers import DEEPSPEED_INSTALL, DeepSpeed, TorchDDP, TorchFSDP2, TorchZero1
from benchmarks.workload import CLIP, LEARNING_RATE, WEIGHT_DECAY, EngineLoop, PlainLoop, Setting, Variant
from shardengine.comm.mesh import Mesh
from shardengine.stages import STAGES

LIMIT, BASE = "compute", "ddp"
"""The compute limit (no communication), and what the others are compared with."""


class Ours(EngineLoop):
    """shardengine at one stage. more: further keys of the config · mesh: other ranks than all · initialize: of another
    version of it."""

    def __init__(
        self,
        model: nn.Module,
        setting: Setting,
        *,
        zero: dict[str, Any],
        more: Mapping[str, Any] | None = None,
        mesh: Mesh | None = None,
        initialize: Callable[..., Any] = shardengine.initialize,
    ) -> None:
        config = {
            "train_micro_batch_size_per_gpu": setting.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": zero,
            **(more or {}),
        }
        self.engine = initialize(model, config, mesh=mesh)

    def traffic(self) -> dict[str, float] | None:
        """The engine's own counter beside the stage's formula."""
        found = self.engine.traffic()
        return {
            "sent_bytes_per_step": float(found["measured_bytes_last_step"]),
            "limit_bytes_per_step": float(found["formula_bytes_per_step"]),
        }

    def close(self) -> None:
        """Close the engine; the process group stays."""
        self.engine.close()


@dataclass(frozen=True)
class Entry:
    """What the benchmark knows of a competitor before it runs.

    family: those of one family share processes, so that one library's changes to torch reach no other ·
    stage: the stage of ours with the same placements, whose formulas give memory and bytes on the wire (None: no
    communication) · package: what must be installed · waits_in_cpp: its backward waits for collectives in C++, where
    Python cannot see it (``phases.py``).
    """

    build: Callable[[nn.Module, Setting], Variant]
    family: str
    stage: str | None
    package: str | None = None
    waits_in_cpp: bool = False

    def state_bytes(self, setting: Setting) -> float:
        """Bytes of model state per rank at rest, by the formula of its stage."""
        return STAGES[self.stage or "0"].model_state_bytes(setting.parameters(), setting.ranks)

    def limit_bytes(self, setting: Setting) -> float:
        """Bytes that a rank must send per step, by the formula of its stage."""
        return STAGES[self.stage].bytes_sent(setting.volume(), setting.ranks) if self.stage else 0.0


def _ours(name: str, **zero: Any) -> Entry:
    return Entry(partial(Ours, zero=zero), "shardengine", name)


def _deepspeed(stage: int) -> Entry:
    return Entry(partial(DeepSpeed, stage=stage), "deepspeed", str(stage), package="deepspeed")


VARIANTS: dict[str, Entry] = {
    LIMIT: Entry(PlainLoop, "reference", None),
    BASE: Entry(TorchDDP, "reference", "0", waits_in_cpp=True),
    "zero1-torch": Entry(TorchZero1, "torch", "1", waits_in_cpp=True),
    "fsdp2": Entry(TorchFSDP2, "torch", "3"),
    "deepspeed-0": _deepspeed(0),
    "deepspeed-1": _deepspeed(1),
    "deepspeed-2": _deepspeed(2),
    "deepspeed-3": _deepspeed(3),
    "ours-0": _ours("0", stage=0),
    "ours-1": _ours("1", stage=1),
    "ours-2": _ours("2", stage=2),
    "ours-3k": _ours("3k", stage=3, stage3_reshard_after_forward=False),
    "ours-3": _ours("3", stage=3),
}
INSTALL = {"deepspeed": DEEPSPEED_INSTALL}


def missing(names: Sequence[str]) -> dict[str, str]:
    """Those of ``names`` whose package is not installed, with the package."""
    packages = {name: VARIANTS[name].package for name in names}
    return {name: package for name, package in packages.items() if package and not importlib.util.find_spec(package)}
