"""A recording of what engines do: which collectives they issue, in order, and the bits that come out.

It is there for changes that must change nothing: `test_replay.py` beside it compares `tests/data/replay.json`. After a
change that is meant to change what is sent or computed, `python -m tests.project.replay` writes it anew, and the
difference belongs in the review.

The model consists of elementwise operations on numbers with few digits, so that its gradients are the same bits on
every processor and with every library of matrix products; nothing is clipped, since sums depend on their order.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardengine
from tests.support import cases

FILE = Path(__file__).parents[1] / "data" / "replay.json"
RANKS, STEPS, MICROS = 2, 3, 2
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("AdamW", {}),
    "bf16": ("SGD", {"bf16": {"enabled": True}}),
    "cpu": ("AdamW", {"zero": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}),
    "late gathers": ("AdamW", {"overlap_param_gather": True}),
}

MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp16 hook": ("2", "AdamW", {"comm_hook": {"name": "fp16"}}),
    "int8 hook": ("2", "SGD", {"comm_hook": {"name": "int8", "params": {"error_feedback": True}}}),
    "quantised": ("3", "AdamW", {"zero": {"zero_quantized_weights": True, "zero_quantized_gradients": True}}),
    "secondary shards": ("3", "AdamW", {"zero": {"zero_hpz_partition_size": 1}}),
    "shard groups, stage 2": ("2", "AdamW", {"zero": {"shard_group_size": 1}}),
    "shard groups, stage 3": ("3", "AdamW", {"zero": {"shard_group_size": 1}}),
    "local SGD": (
        "2",
        "SGD",
        {
            "zero": {"shard_group_size": 1},
            "comm_hook": {"name": "post_local_sgd", "params": {"start_step": 1, "period": 2}},
        },
    ),
    "EMA": ("2", "AdamW", {"ema": {"decay": 0.5}}),
    "weights in host memory": ("3", "AdamW", {"zero": {"offload_param": {"device": "cpu"}}}),
    "fp32 sums of bf16": ("3", "AdamW", {"bf16": {"enabled": True}, "data_types": {"reduce_dtype": "fp32"}}),
    "sums": ("2", "SGD", {"gradient_allreduce_op": "sum", "gradient_clipping_value": 0.5}),
}
"""Name → stage, optimizer, options: features that only some users need, each at one stage."""


class Scale(nn.Module):
    """y = x · weight + bias, element by element."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-64, 64, (size,)) / 32)
        self.bias = nn.Parameter(torch.randint(-64, 64, (size,)) / 64)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class Model(nn.Module):
    """Two blocks of unequal parts, with something before and after them; one parameter is tied, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scale(37)
        self.blocks = nn.ModuleList(nn.Sequential(Scale(37), Scale(37)) for _ in range(2))
        self.last = Scale(37)
        self.last.bias = self.first.bias
        self.frozen = nn.Parameter(torch.randint(-64, 64, (37,)) / 16, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.frozen
        for block in self.blocks:
            x = block(x) / 4
        return self.last(x)


def loss_of(engine: Any, step: int, rank: int, micro: int) -> Tensor:
    """A sum, whose gradient is one at every element."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    dtype = engine.module.frozen.dtype
    return engine((torch.randint(-8, 8, (37,)) / 8).to(dtype)).sum()


def recorded(stage: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """On one rank: the collectives of the weights' and the gradients' groups, and digests of all that was trained."""
    torch.manual_seed(5)
    config = cases.config_of(
        stage, MICROS, **{**options, "zero": {"reduce_bucket_size": 120, **options.get("zero", {})}}
    )
    config["gradient_clipping"] = 0.0
    engine: Any = cases.make_engine(Model(), config, kind)
    for number in range(STEPS * MICROS):
        cases.run_micro_batch(engine, loss_of, *divmod(number, MICROS))
    issued = {group: texts for group, (_, texts) in engine._core.collectives.flight_recorder.texts().items()}
    state = {name: digest(value) for name, value in engine.state_dict().items()}
    with engine.full_optimizer_state() as states:
        for name, of in states.items():
            state |= {f"{name} {key}": digest(value) for key, value in (of or {}).items()}
    engine.close()
    return {"issued": issued, "state": state}


def digest(value: Any) -> str:
    """Of the bytes of a tensor, or of what a number is called."""
    raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if isinstance(value, Tensor) else b""
    return hashlib.sha256(raw or repr(value).encode()).hexdigest()[:16]


def cases_by_name() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Every stage in every way, and ``MORE``."""
    return {f"{stage} {way}": (stage, *of) for stage in cases.STAGES for way, of in WAYS.items()} | MORE


def both(name: str) -> dict[str, Any]:
    """The collectives that all ranks issued, and digests of rank 0. AssertionError if ranks issued different ones."""
    found = recorded(*cases_by_name()[name])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found["issued"])
    assert all(other == everyone[0] for other in everyone)
    return found


def record(rank_of: Any = both) -> dict[str, Any]:
    """Every case, on the ranks of this launch."""
    return {name: rank_of(name) for name in cases_by_name()}


def main() -> None:
    """Write the file."""
    found = shardengine.launch(record, RANKS)[0]
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written to {FILE}")


if __name__ == "__main__":
    from tests.project.replay import main as as_a_module  # so that the ranks find the function by its name

    as_a_module()
