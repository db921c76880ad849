"""Stepping in backward changes no bit, and is seen to happen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.parity.test_offload import PRECISIONS
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 5
SMALL = 600


def places(folder: Path) -> dict[str, dict[str, Any]]:
    on_host: dict[str, Any] = {"device": "cpu", "step_in_backward": True}
    on_disk = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 2}
    return {
        "cpu": {"offload_optimizer": on_host},
        "part": {"offload_optimizer": {**on_host, "ratio": 0.5}},
        "disk": {"offload_optimizer": {**on_disk, "step_in_backward": True}},
        "all on disk": {"offload_optimizer": {**on_disk, "step_in_backward": True}, "offload_param": on_disk},
        "weights on the host": {"offload_optimizer": on_host, "offload_param": {"device": "cpu"}},
    }


def config_of(stage: str, zero: dict[str, Any], micros: int = 1, **options: Any) -> dict[str, Any]:
    zero = {"reduce_bucket_size": SMALL, **zero}
    return {**cases.config_of(stage, micros, zero=zero, **options), "gradient_clipping": 0.0}


def count_early(engine: Any) -> int:
    """Buckets that have taken the window's step, or are about to."""
    return len(engine.optimizer.stepped_early)


def train(model: str, kind: str, configs: dict[str, dict[str, Any]], steps: int) -> dict[str, dict[str, Any]]:
    """As ``cases.train_engine``, and "early": how many buckets had begun before each ``step()``, and of how many."""
    results: dict[str, dict[str, Any]] = {}
    for name, config in configs.items():
        engine = cases.make_engine(cases.MODELS[model](), config, kind)
        early: list[int] = []

        def run(engine: Any, loss_of: cases.LossOf, step: int, micro: int, early: list[int] = early) -> float:
            loss = loss_of(engine, step, engine.rank, micro)
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                early.append(count_early(engine))
            engine.step()
            return float(loss.item())

        results[name] = {**cases.run_steps(engine, steps, run=run), "early": early}
        results[name]["away"] = sum(
            s.bucket.state_store.away and s.bucket.has_master for s in engine._core.reducer.buckets
        )
        engine.close()
    return results


@pytest.mark.core
@pytest.mark.parametrize(
    ("ranks", "model", "kind", "micros", "precision"),
    [
        (1, "mlp", "AdamW", 3, "bf16"),
        (2, "mlp", "AdamW", 1, "fp32"),
        (2, "gpt2", "SGD", 3, "fp32"),
        (3, "mlp", "Lion", 1, "bf16"),
        (4, "mlp", "SGD", 1, "bf16 stepped itself"),
    ],
)
def test_the_bits_are_those_of_the_oracle(
    pools: Pools, tmp_path: Path, ranks: int, model: str, kind: str, micros: int, precision: str
) -> None:
    said, told = PRECISIONS[precision]
    configs = {
        f"{stage}, {name}": config_of(stage, place, micros, **said)
        for stage in ("1", "2", "3k", "3")
        for name, place in places(tmp_path).items()
        if "offload_param" not in place or stage == "3"
    }
    results = pools(ranks).run(train, model, kind, configs, STEPS)
    for name in configs:
        stage, place = name.split(", ")
        found = [result[name] for result in results]
        for each in found:
            early, away = each.pop("early"), each.pop("away")
            first = 0  # the first window shows whether gradients come late
            assert early == [first] + [away] * (STEPS - 1), name
            copies = place != "weights on the host" or precision in ("bf16",)
            assert (away > 0) is copies, name
        truth = cases.truth(model, kind, ranks, micros, cases.LETTER[stage], STEPS, clip=0.0, **told)
        assert_equal_to_truth(found, truth, name)


class Used(nn.Module):
    """Weights whose gradient is complete while backward still reads them: as constants, further down."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.idle = nn.Linear(16, 16)
        self.idle_on: tuple[int, ...] = ()

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(x @ self.second.weight.detach().T)
        x = self.second(x)
        return self.idle(x) if rank in self.idle_on else x


def train_used(config: dict[str, Any], use_on: list[tuple[int, ...]]) -> tuple[dict[str, Any], list[int]]:
    """use_on: per step, the ranks that use the last layer."""
    engine = cases.make_engine(Used(), config, "AdamW")
    early = []
    for step, ranks in enumerate(use_on):
        cast(Used, engine.module).idle_on = ranks
        torch.manual_seed(step * 10 + engine.rank)
        engine.backward(engine(torch.randn(4, 16), engine.rank).square().mean())
        early.append(count_early(engine))
        engine.step()
    weights = {name: cases.copy_out(value).numpy() for name, value in engine.state_dict().items()}
    engine.close()
    return weights, early


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_weights_that_backward_still_reads_and_unused_ones(pools: Pools, stage: str) -> None:
    """A bucket waits for ``step()`` where this rank has not used all of it: another one may have."""
    use_on = [(), (0, 1), (0,), (), (1,), (0, 1)]
    plain = pools(2).run(train_used, config_of(stage, {"reduce_bucket_size": 200}), use_on)
    host = {"offload_optimizer": {"device": "cpu", "step_in_backward": True}, "reduce_bucket_size": 200}
    found = pools(2).run(train_used, config_of(stage, host), use_on)
    for rank in (0, 1):
        early = found[rank][1]
        used = [rank in ranks for ranks in use_on]
        assert early[0] == 0 and min(early[1:]) > 0
        assert all((count == max(early)) is here for count, here in zip(early[1:], used[1:], strict=True))
        for name, value in plain[rank][0].items():
            assert value.tobytes() == found[rank][0][name].tobytes(), name
