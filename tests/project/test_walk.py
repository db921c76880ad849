"""How many calls into another file a bucket costs in a step: counts that may only fall.

Counted by a profiler, from outside, on two ranks: calls whose nearest frame of the package is in another file, for one
more bucket of a model (the difference between eight and four equal blocks, each with one bucket). Resumed generators
do not count, and kernels neither, because machines have other ones.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import cases
from tests.support.ranks import RankPool

_PACKAGE = "/shardengine/"
_IS_GENERATOR, _FIRST = 0x20, 8
"""Flag of code that is resumed, and up to which instruction it has begun only."""
ENTRIES = {2: 61, 3: 189}
"""Stage → calls into another file per bucket, at most: backward and step; at stage 3 forward as well."""
WARMUP, STEPS = 3, 5
SLACK = 8
"""So many fewer, and the number above is lowered."""


class Block(nn.Module):
    """One weight of 4,096 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Entries:
    """A profile function that counts."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or _PACKAGE not in code.co_filename:
            return
        if code.co_flags & _IS_GENERATOR and frame.f_lasti > _FIRST:
            return
        caller = frame.f_back
        while caller is not None and _PACKAGE not in caller.f_code.co_filename:
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != code.co_filename:
            self.found[code.co_filename.rpartition(_PACKAGE)[2]] += 1


def entries(stage: int, blocks: int) -> Counter[str]:
    """Of backward and step, at stage 3 also of forward, by file: the fewest of ``STEPS`` steps, because who waits for
    another rank may look more often."""
    torch.manual_seed(0)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 4096, "recut_buckets": False}
    if stage == 3:
        zero["units"] = ["Block"]
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": zero}
    engine = cases.make_engine(nn.Sequential(*(Block() for _ in range(blocks))), config)
    rows, found = torch.randn(4, 64), []
    for step in range(WARMUP + STEPS):
        counted = Entries()
        profile = counted if step >= WARMUP else None
        sys.setprofile(profile if stage == 3 else None)
        loss = engine(rows).square().mean()
        sys.setprofile(profile)
        engine.backward(loss)
        engine.step()
        sys.setprofile(None)
        found.append(counted.found)
    engine.close()
    return min(found[WARMUP:], key=lambda each: each.total())


@pytest.mark.parametrize("stage", ENTRIES)
def test_a_bucket_makes_fewer_and_fewer_calls_into_other_files(stage: int, pools: Callable[[int], RankPool]) -> None:
    more, less = (pools(2).run(entries, stage, blocks)[0] for blocks in (8, 4))
    files = [file for file in more if more[file] != less[file] and not file.startswith("kernels/")]
    per_bucket = {file: (more[file] - less[file]) / 4 for file in files}
    total = sum(per_bucket.values())
    assert total <= ENTRIES[stage], f"{total} calls into other files per bucket: {sorted(per_bucket.items())}"
    assert total > ENTRIES[stage] - SLACK, f"{total} are left: lower ENTRIES to it"
