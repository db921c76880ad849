"""What Python does at the start and in a step does not grow with the number of ranks: counted in executed lines."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import shardengine
from benchmarks.host_layouts import LAYOUTS, Model, Shape
from tests.runtime.test_host_time import executed
from tests.support.cases import STAGES
from tests.support.dry_run import META, Border, DryPlatform, Log, dry_mesh

FEW, MANY = 16, 1024
PER_RANK = {
    "kernels/operations.py", "kernels/meta.py",  # a term for each rank
    "comm/agreement.py",  # at the start each rank says what kernels it has
    "kernels/rules.py",
}  # fmt: skip
SHAPE = Shape(2, LAYOUTS["Llama 8B"].block, {"embedding": (4096, 4096)}, {"head": (4096, 4096)})


def lines(ranks: int, stage: str, direct: bool) -> tuple[Counter[str], Counter[str]]:
    """Of ``initialize``, and of the third step."""
    log = Log()
    mesh = dry_mesh(ranks, ranks // 2, platform=lambda device: DryPlatform(device, log))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "reproducible": direct,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {**STAGES[stage], "recut_buckets": False},
    }
    made: list[Any] = []

    def step() -> None:
        made[0].backward(made[0](torch.zeros((), device=META, requires_grad=True)))
        made[0].step()

    with Border(log):
        model = Model(SHAPE)
        start = executed(lambda: made.append(shardengine.initialize(model, config, mesh=mesh)))
        for _ in range(2):
            step()
        found = executed(step)
        made[0].close()
    return start, found


@pytest.mark.parametrize(("stage", "direct"), [("0", False), ("2", True), ("3", False)])
def test_lines_do_not_grow_with_the_ranks(stage: str, direct: bool) -> None:
    lines(FEW, stage, direct)  # imports, and what is found once in a process
    few, many = lines(FEW, stage, direct), lines(MANY, stage, direct)
    for what, before, after in zip(("initialize", "step"), few, many, strict=True):
        grown = {name: (before[name], count) for name, count in after.items() if count > 1.25 * before[name] + 20}
        assert grown.keys() <= PER_RANK, f"{what}: {grown}"
        assert sum(before.values()) > 1000
