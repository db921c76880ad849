"""``"ratio": "auto"``: as few buckets are away as ``device_memory`` allows, and what is alive stays within it.

A device that is a CPU has its own memory and the host's in one place: ``Meter`` tells them apart by who took a tensor.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardengine
from shardengine import Engine
from shardengine.comm import mesh
from shardengine.ddp import GradientBucket
from shardengine.errors import ConfigError
from shardengine.offload import Platform
from shardengine.offload.pool import BufferPool
from shardengine.offload.tiers import SHARE
from shardengine.optim.arithmetic import Declared
from shardengine.sharding.bucket import FlatBuffer
from tests.parity.test_changed_models import engine_of, group, set_trainable
from tests.stages import test_memory_tiers
from tests.stages.test_memory import (
    ACTIVATION_BYTES,
    BLOCK_PARAMETERS,
    BLOCKS,
    FLOAT,
    ROOT_PARAMETERS,
    WIDTH,
    elements_of,
    live_storages,
    make_tower,
    only_new_tensors,
)
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.raising import raises
from tests.support.ranks import RankFailure, RankPool
from tests.support.sizes import padded

Pools = Callable[[int], RankPool]
BUCKET = 4800
"""Elements: a bucket has more bytes than a step's activations, so that one too many would be noticed."""
MATRICES = {WIDTH * WIDTH * 2, WIDTH * WIDTH * FLOAT}
"""Bytes of gradients that autograd has made and no bucket has taken; nothing of the engine's is as large."""
STAGES = list(cases.STAGES)


class Meter:
    """The most bytes that were alive on the device, sampled whenever the engine takes new memory."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.peak = 0
        self._engine, self.leaves = engine, False
        self._host: set[int] = set()
        take, take_slice, allocate = BufferPool.acquire, GradientBucket.take_slice, FlatBuffer.allocate

        def taking(pool: BufferPool, *args: Any, **options: Any) -> Tensor:
            before = pool.allocated_bytes
            buffer = take(pool, *args, **options)
            key = buffer.untyped_storage()._cdata
            (self._host.add if self.leaves else self._host.discard)(key)
            if pool.allocated_bytes > before:
                self.note()
            return buffer

        def taking_slice(state: GradientBucket, *args: Any) -> Tensor:
            self.leaves = state.leaves
            try:
                return take_slice(state, *args)
            finally:
                self.leaves = False

        def allocating(flat_buffer: FlatBuffer) -> None:
            allocate(flat_buffer)
            self.note()

        patch.setattr(BufferPool, "acquire", taking)
        patch.setattr(GradientBucket, "take_slice", taking_slice)
        patch.setattr(FlatBuffer, "allocate", allocating)

    def note(self) -> None:
        """Count what is alive now, without what is in host memory and what waits for its bucket."""
        buckets = [state.bucket for state in self._engine._core.reducer.buckets]
        away = [
            tensor for bucket in buckets if bucket.state_store.away for tensor in bucket.state_store.tensors().values()
        ]
        host = self._host | {tensor.untyped_storage()._cdata for tensor in away}
        alive = sum(size for key, size in live_storages().items() if key not in host and size not in MATRICES)
        self.peak = max(self.peak, alive)


def config_of(stage: str, place: dict[str, Any], micros: int = 1, **options: Any) -> dict[str, Any]:
    """``place``: of the optimizer. Options "zero" are merged into zero_optimization."""
    ahead = padded(BLOCK_PARAMETERS, 4)
    zero = {"reduce_bucket_size": BUCKET, "stage3_prefetch_bucket_size": ahead, **options.pop("zero", {})}
    return cases.config_of(stage, micros, zero={**zero, "offload_optimizer": {"device": "cpu", **place}}, **options)


def need(memory: dict[str, float]) -> float:
    """Bytes of the device that the engine said it needs."""
    return memory["predicted_model_state_bytes"] + memory["predicted_buffer_bytes"]


def measure(chosen: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Per config: what the engine says after two steps, the peak that was alive, what is away."""
    found = []
    for config in chosen:
        with only_new_tensors(), pytest.MonkeyPatch.context() as patch:
            engine = cases.make_engine(make_tower(), config)
            gc.collect()
            meter, dtype = Meter(engine, patch), next(engine.module.parameters()).dtype
            for _ in range(2 * engine.gradient_accumulation_steps()):
                engine.backward(engine(torch.randn(1, 7, dtype=dtype)).square().mean())
                meter.note()
                engine.step()
            found.append({**engine.memory(), "peak": meter.peak, **test_memory_tiers.away(engine)})
            engine.close()
            del engine, meter
            gc.collect()
    return found


def auto(memory: float) -> dict[str, Any]:
    return {"ratio": "auto", "device_memory": round(memory)}


def lengths_of(stage: str, ranks: int) -> list[int]:
    """Of all buckets, in layout order."""
    storages = [elements_of(stage, ranks)]
    if stage.startswith("3"):
        storages = [padded(BLOCK_PARAMETERS, ranks)] * BLOCKS + [padded(ROOT_PARAMETERS, ranks)]
    return [min(BUCKET, length - start) for length in storages for start in range(0, length, BUCKET)]


@pytest.mark.parametrize(("ranks", "stages"), [(1, ["0", "2"]), (2, ["0", "1", "2", "3"]), (3, ["3"])])
def test_one_bucket_fewer_would_not_fit(pools: Pools, ranks: int, stages: list[str]) -> None:
    ends = [config_of(stage, {"ratio": ratio}) for stage in stages for ratio in (0.0, 1.0)]
    (said, *_) = pools(ranks).run(measure, ends)
    budgets: list[tuple[str, int]] = []
    for stage, none, all_away in zip(stages, said[::2], said[1::2], strict=True):
        most, least = need(none), need(all_away)
        assert least < most
        budgets += [(stage, round(budget)) for budget in (least, least + (most - least) / 3, most)]
    results = pools(ranks).run(measure, [config_of(stage, auto(budget)) for stage, budget in budgets])
    for rows in results:
        for (stage, budget), row in zip(budgets, rows, strict=True):
            whole = elements_of(stage, ranks)
            assert row["measured_model_state_bytes"] == device_bytes(stage, row["away"], whole, ranks), stage
            assert row["measured_model_state_bytes"] + row["predicted_buffer_bytes"] <= budget, stage
            assert row["peak"] <= budget + ACTIVATION_BYTES, stage
            assert row["offload_ratio"] == row["away"] / whole
            reached = list(itertools.accumulate(lengths_of(stage, ranks), initial=0))
            count = reached.index(row["away"])
            if count:
                fewer = device_bytes(stage, reached[count - 1], whole, ranks)
                assert fewer + row["predicted_buffer_bytes"] > budget, (stage, count)
    assert all(row["away"] == 0 for row in results[0][2::3])


def device_bytes(stage: str, away: float, whole: int, ranks: int) -> float:
    """The formula of docs/limits.md once more, in fp32 with Adam."""
    stays, slices = whole - away, 1 if stage == "0" else ranks
    weights = whole / (ranks if stage.startswith("3") else 1)
    gradients = whole if stage == "0" else stays if stage == "1" else stays / ranks
    return FLOAT * (weights + gradients + 2 * stays / slices)


LETTERS = {
    "one": (1, {}),
    "full": (3, {"gradient_accumulation": "full"}),
    "sharded": (3, {"gradient_accumulation": "sharded"}),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "waiting in bf16": {"data_types": {"grad_accum_dtype": "bf16"}},
}


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize(("ranks", "stages"), [(1, STAGES), (2, STAGES), (4, list(cases.HYBRID))])
def test_the_device_never_holds_more_than_was_predicted(
    pools: Pools, ranks: int, stages: list[str], precision: str
) -> None:
    cells = [
        (stage, letter, ratio)
        for stage in stages
        for letter in LETTERS
        for ratio in (0.6, 0.0)[: 2 - bool(LETTERS[letter][1])]
    ]
    chosen = []
    for stage, letter, ratio in cells:
        micros, said = LETTERS[letter]
        chosen.append(config_of(stage, {"ratio": ratio}, micros, **said, **PRECISIONS[precision]))
    for rows in pools(ranks).run(measure, chosen):
        for cell, row in zip(cells, rows, strict=True):
            assert row["measured_model_state_bytes"] <= row["peak"] <= need(row) + ACTIVATION_BYTES, cell


def test_buffers_are_the_window_and_three_buckets(pools: Pools) -> None:
    """The bound of docs/limits.md once more, at two ranks in fp32."""
    ranks = 2
    (rows, _) = pools(ranks).run(measure, [config_of(stage, {"ratio": 1.0}) for stage in ("2", "3k", "3")])
    block = padded(BLOCK_PARAMETERS, ranks)
    root = elements_of("3", ranks) - BLOCKS * block
    assert len(set(lengths_of("2", ranks))) == 2 and len(set(lengths_of("3", ranks))) == 3

    def under_way(lengths: Counter[int]) -> float:
        return sum(min(count, 3) * length * (2 * FLOAT + 8 / ranks) for length, count in lengths.items())

    assert rows[0]["predicted_buffer_bytes"] == under_way(Counter(lengths_of("2", ranks)))
    units = under_way(Counter(lengths_of("3", ranks)))
    assert rows[1]["predicted_buffer_bytes"] == (root + BLOCKS * block) * FLOAT + units
    assert rows[2]["predicted_buffer_bytes"] == (root + 2 * block) * FLOAT + units


def test_buffers_of_shard_groups_are_larger_and_hpz_keeps_a_slice_of_each_block(pools: Pools) -> None:
    """Four ranks in groups of two: a group's slice is twice a rank's, and sums of groups are sent and received."""
    stages = ("2 hybrid", "3 hybrid", "3 hpZ")
    rows, *_ = pools(4).run(measure, [config_of(stage, {"ratio": 1.0}) for stage in stages])
    block = padded(BLOCK_PARAMETERS, 4)
    root = elements_of("3", 4) - BLOCKS * block

    def under_way(lengths: Counter[int]) -> float:
        return sum(min(count, 3) * length * (2 * FLOAT + 8 / 2 + 8 / 2) for length, count in lengths.items())

    assert rows[0]["predicted_buffer_bytes"] == under_way(Counter(lengths_of("2", 4)))
    window = (root + 2 * block) * FLOAT + under_way(Counter(lengths_of("3", 4)))
    assert rows[1]["predicted_buffer_bytes"] == window
    assert rows[2]["predicted_buffer_bytes"] == window + BLOCKS * block * FLOAT / 2
    assert [row["shard_group_ranks"] for row in rows] == [2, 2, 2]


# Bits


def train_within(configs: dict[str, dict[str, Any]], steps: int) -> dict[str, dict[str, Any]]:
    """Train with half of the memory that lies between everything and nothing away; configs: with a ratio of 0.5."""
    found = {}
    for name, config in configs.items():
        engine = cases.make_engine(cases.make_mlp(), config)
        zero = config["zero_optimization"]
        place = {**zero["offload_optimizer"], **auto(need(engine.memory()))}
        engine.close()
        engine = cases.make_engine(
            cases.make_mlp(), {**config, "zero_optimization": {**zero, "offload_optimizer": place}}
        )
        assert 0.3 < engine.memory()["offload_ratio"] < 0.7
        found[name] = cases.run_steps(engine, steps)
        engine.close()
    return found


@pytest.mark.parametrize("micros", [1, 3])
def test_the_bits_are_the_oracles(pools: Pools, tmp_path: Path, micros: int) -> None:
    configs = {}
    for stage in STAGES:
        place = {"device": "nvme", "nvme_path": str(tmp_path)} if stage in ("1", "3") else {}
        zero = {"reduce_bucket_size": 600}
        configs[stage] = config_of(stage, {"ratio": 0.5, **place}, micros, zero=zero)
    results = pools(2).run(train_within, configs, 5)
    for stage in STAGES:
        truth = cases.truth("mlp", "AdamW", 2, micros, cases.LETTER[stage], 5)
        assert_equal_to_truth([result[stage] for result in results], truth, stage)


# What cannot be


def test_too_little_memory_is_told_before_anything_is_moved(tmp_path: Path) -> None:
    model = make_tower()
    before = [(parameter.data_ptr(), parameter.device) for parameter in model.parameters()]
    place = {"device": "nvme", "nvme_path": str(tmp_path), **auto(1000)}
    with raises("offload-ratio-nothing-fits", "1,000") as error:
        cases.make_engine(model, config_of("2", place))
    assert [(parameter.data_ptr(), parameter.device) for parameter in model.parameters()] == before
    assert error.tb is not None and not [path for path in tmp_path.rglob("*") if path.is_file()]
    engine = cases.make_engine(model, config_of("2", auto(1e9)))
    assert engine.memory()["offload_ratio"] == 0
    engine.close()


def ask_a_cpu() -> str:
    with pytest.raises(ConfigError) as error:
        cases.make_engine(make_tower(), config_of("2", {"ratio": "auto"}))
    return str(error.value)


def test_a_cpu_does_not_say_what_is_free(pools: Pools) -> None:
    for text in pools(2).run(ask_a_cpu):
        assert "device_memory: expected a number of bytes" in text and "the device is a CPU" in text


class Apart(Platform):
    """The host's memory as that of a device, of which so many bytes are free, and more once torch caches none."""

    alignment = 64
    has_own_memory = True

    def __init__(self, free: int, cached: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self._free, self._cached = free, cached

    def free_bytes(self) -> int:
        return self._free

    def free_cached(self) -> None:
        self._free, self._cached = self._free + self._cached, 0


def choose(free: list[int] | None, config: dict[str, Any]) -> list[float]:
    """What the engine chooses where rank i has ``free[i]`` bytes: which part is away, and after one step as well.

    Of these, torch caches a third, and the model has its weights there.
    """
    model, ranks = make_tower(), cases.mesh_of_this_process()
    if free is not None:
        left = free[ranks.rank] - FLOAT * sum(p.numel() for p in model.parameters())
        ranks = replace(ranks, platform_of=lambda _: Apart(left - left // 3, left // 3))
    optimizer = cases.make_optimizer(model, "AdamW")
    engine = shardengine.initialize(model, config, optimizer=optimizer, mesh=ranks)
    engine.backward(engine(torch.randn(2, 7)).square().mean())
    engine.step()
    memory = engine.memory()
    engine.close()
    return [memory["offload_ratio"], need(memory)]


def test_ranks_take_the_least_that_one_of_them_has(pools: Pools) -> None:
    ((_, budget), _) = pools(2).run(choose, None, config_of("2", {"ratio": 0.5}))
    least = int(budget)
    expected = pools(2).run(choose, None, config_of("2", auto(least)))
    assert 0.3 < expected[0][0] < 0.7
    enough = round((least + 1) / SHARE)
    for free in ([enough, 10**9], [10**9, enough]):
        assert pools(2).run(choose, free, config_of("2", {"ratio": "auto"})) == expected


def test_what_needs_more_than_the_share_takes_more_with_everything_away(pools: Pools) -> None:
    ((_, needed), _) = pools(2).run(choose, None, config_of("2", {"ratio": 1.0}))
    all_free = int(needed)
    assert [ratio for ratio, _ in pools(2).run(choose, [all_free] * 2, config_of("2", {"ratio": "auto"}))] == [1.0] * 2
    with pytest.raises(RankFailure, match=rf"at most {all_free - 1:,} bytes .* got {all_free:,} with all"):
        pools(2).run(choose, [all_free, all_free - 1], config_of("2", {"ratio": "auto"}))


# What is told, and new layouts


def test_the_choice_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO, logger="shardengine")
    engine = cases.make_engine(make_tower(), config_of("2", auto(1.5e6)))
    told = [record.getMessage() for record in caplog.records if "ratio" in record.getMessage()]
    ratio = engine.memory()["offload_ratio"]
    assert 0 < ratio < 1
    assert len(told) == 1 and f'"auto" is {ratio:.4f}' in told[0] and "1500000" in told[0]
    assert told[0].endswith("(device_memory)")
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(mesh.Mesh, "platform", Apart(2_500_000))
        cases.make_engine(make_tower(), config_of("2", {"ratio": "auto"})).close()
    whole = 2_500_000 + FLOAT * sum(p.numel() for p in make_tower().parameters())
    (text,) = [record.getMessage() for record in caplog.records if "ratio" in record.getMessage()]
    assert f"of {int(SHARE * whole)} for model state and buffers (60% of the {whole} that the rank" in text
    caplog.clear()
    cases.make_engine(make_tower(), config_of("2", {"ratio": 0.5})).close()
    assert not [record for record in caplog.records if "ratio" in record.getMessage()]
    engine.close()


def partly_frozen(budget: float, stage: str = "2") -> Any:
    """Three of five blocks are frozen."""
    model = make_tower()
    for block in model.blocks[:3]:
        set_trainable(block, False)
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return engine_of(model, torch.optim.AdamW([group("AdamW", chosen)]), config_of(stage, auto(budget)))


def test_a_new_layout_chooses_anew() -> None:
    engine = partly_frozen(1e9)
    budget = need(engine.memory())
    engine.close()
    engine = partly_frozen(budget)
    assert engine.memory()["offload_ratio"] == 0
    engine.optimizer.add_param_group(group("AdamW", set_trainable(engine.module.blocks[0], True)))
    memory = engine.memory()
    assert 0 < memory["offload_ratio"] < 1 and need(memory) <= budget
    engine.backward(engine(torch.randn(2, 7)).square().mean())
    engine.step()
    assert engine.memory()["measured_model_state_bytes"] == memory["predicted_model_state_bytes"]
    engine.close()


def test_what_would_not_fit_does_not_join() -> None:
    """Stage 0 gathers gradients, which stay on the device whatever is away."""
    engine = partly_frozen(1e9, "0")
    budget = need(engine.memory()) - 250_000
    engine.close()
    engine = partly_frozen(budget, "0")
    before = engine.memory()
    new = group("AdamW", [p for block in engine.module.blocks[:3] for p in set_trainable(block, True)])
    with raises("offload-ratio-nothing-fits"):
        engine.optimizer.add_param_group(new)
    assert len(engine.optimizer.param_groups) == 1
    for block in engine.module.blocks[:3]:
        set_trainable(block, False)
    engine.backward(engine(torch.randn(2, 7)).square().mean())
    engine.step()
    assert engine.memory()["predicted_model_state_bytes"] == before["predicted_model_state_bytes"]
    engine.close()


def test_states_that_a_scheduler_may_bring_are_counted() -> None:
    still = [{"momentum": 0.0}]
    sgd = Declared("SGD")
    assert sgd.state_names(still) == () and sgd.state_names(still, scheduled=True) == ("momentum_buffer",)
    assert sgd.state_names([*still, {"momentum": 0.9}]) == ("momentum_buffer",)
    assert len(Declared("AdamW").state_names([{}])) == 2 and len(Declared("Lion").state_names([{}])) == 1
