"""``shardengine.choose``: the first row is the fastest that fits, what stays, and what is needed where nothing fits."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine import Choice, Hardware, Plan, choose, load_config, plan
from shardengine.errors import ConfigError, UsageError
from shardengine.planner import Rates, columns_of, memory_plan, show_bytes, table_of
from shardengine.planner.choice import ChoiceRow, ConfigCandidate, _Search, _settled, global_batch
from shardengine.planner.hardware import RESERVED

WIDTH = 64


class Net(nn.Module):
    """Two blocks whose activations are larger than what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


BASE: dict[str, Any] = {
    "train_batch_size": 4,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.9]}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 100_000, "offload_optimizer": {"device": "cpu"}},
    "activation_checkpointing": {"enabled": True},
}
BATCH = {"x": torch.zeros(1, 32, WIDTH)}


def gpus(more_bytes: int, ranks: int = 2, **more: Any) -> Hardware:
    """Of so many bytes beyond those that are left to CUDA."""
    return Hardware(ranks, RESERVED + more_bytes, **more)


def chosen(where: Hardware, **more: Any) -> Choice:
    return choose(Net(), more.pop("config", BASE), where, batch=BATCH, **more)


def planned(config: Any, where: Hardware) -> Plan:
    micro = load_config(config).resolve_batch(where.ranks).train_micro_batch_size_per_gpu
    assert micro is not None
    batch = {"x": torch.zeros(micro, 32, WIDTH)}
    return plan(Net(), config, where, batch=batch, rates=Rates.given(where))


def speed(found: Plan) -> float:
    """Samples per second, of all ranks."""
    assert found.time is not None and found.config.train_batch_size is not None
    return found.config.train_batch_size / found.time.seconds


LARGE, SMALL = gpus(10**9), gpus(1_690_000, ranks=1)


@pytest.fixture(scope="module")
def large() -> Choice:
    return chosen(LARGE)


@pytest.fixture(scope="module")
def small() -> Choice:
    return chosen(SMALL)


def test_the_first_is_the_fastest_by_plans_of_their_own(large: Choice) -> None:
    assert large.config is not None and large.plan is not None
    every = [ConfigCandidate(stage, again=again, samples=2)
             for stage in range(4) for again in (False, True)]  # fmt: skip
    speeds = {each: speed(planned(each.config(BASE, 2), LARGE)) for each in every}
    first = large.rows[0]
    assert speeds[first.candidate] == pytest.approx(max(speeds.values()), rel=1e-3)
    assert speed(planned(large.config, LARGE)) == pytest.approx(first.samples_per_s)
    rates = [row.samples_per_s for row in large.rows]
    assert rates == sorted(rates, reverse=True) and 1 < len(rates) <= 10
    for row in large.rows:
        assert row.samples_per_s == pytest.approx(speeds.get(row.candidate, row.samples_per_s), rel=1e-3)


def test_no_row_does_not_fit(small: Choice) -> None:
    assert not planned(ConfigCandidate(0).config(BASE, 1), SMALL).fits
    on_host = ConfigCandidate(0, "states on the host", samples=2)
    assert not planned(on_host.config(BASE, 1), SMALL).fits and on_host not in {row.candidate for row in small.rows}
    assert replace(on_host, samples=1) in {row.candidate for row in small.rows}
    for row in small.rows[:4]:
        assert planned(row.candidate.config(BASE, 1), SMALL).fits, row.candidate


def test_places_beside_the_device_are_for_what_is_too_small(large: Choice, small: Choice) -> None:
    assert not any("host" in str(row.candidate) for row in large.rows)
    assert all("host" in str(row.candidate) for row in small.rows)
    assert "host" in table_of(small) and not large.needed and not small.needed


def test_no_more_of_the_states_is_on_the_host_than_has_to_be() -> None:
    base, where = {**BASE, "zero_optimization": {"reduce_bucket_size": 5_000}}, gpus(2_400_000, 1)
    found = chosen(where, config=base)
    parts = [row for row in found.rows if row.candidate.part < 1]
    assert parts and all(row.candidate.place == "states on the host" for row in parts)
    assert found.rows[0] is parts[0] and f"{parts[0].candidate.part:.0%} of the states on the host" in table_of(found)
    wholes = {row.candidate: row for row in found.rows}
    for row in parts:
        whole = wholes.get(replace(row.candidate, part=1.0))
        assert whole is None or row.samples_per_s > whole.samples_per_s, "the device steps its part faster"
        ratio = load_config(row.candidate.config(base, 1)).zero_optimization.offload_optimizer.ratio
        assert ratio == row.candidate.part and planned(row.candidate.config(base, 1), where).fits
        less = replace(row.candidate, part=row.candidate.part - 0.1)
        assert not planned(less.config(base, 1), where).fits


def test_no_part_that_is_left_out_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each part of the states were tried, with an order of sizes in which a part is best and one in which not."""
    base = {**BASE, "train_batch_size": 16, "zero_optimization": {"reduce_bucket_size": 5_000}}
    found = {size: chosen(gpus(size, 1), config=base) for size in (1_200_000, 2_400_000)}
    assert {first.rows[0].candidate.part < 1 for first in found.values()} == {True, False}
    monkeypatch.setattr(_Search, "_may_win", lambda search, row, on_device: True)
    for size, pruned in found.items():
        every = chosen(gpus(size, 1), config=base)
        assert every.tried >= pruned.tried and every.rows[0].candidate == pruned.rows[0].candidate


@pytest.mark.parametrize("place", ["device", "states on the host", "all on the host", "all on the disk"])
def test_what_is_kept_alone_is_what_a_plan_finds_at_rest_and_no_more_than_a_step_needs(place: str) -> None:
    base = {**BASE, "zero_optimization": {"offload_optimizer": {"device": "none", "nvme_path": "here"}}}
    config, where = ConfigCandidate(3, place).config(base, 2), gpus(10**9, host_bytes=10**10, disk_bytes=10**10)
    batch = {"x": torch.zeros(1, 32, WIDTH)}
    task = memory_plan.Task(Net(), batch, load_config(config).resolve_batch(2), where, lambda loss: loss, {})
    kept, whole = task.plan_of_kept(), planned(config, where)
    assert [tier.name for tier in kept.tiers] == [tier.name for tier in whole.tiers]
    for alone, step in zip(kept.tiers, whole.tiers, strict=True):
        assert alone.need == sum(step.at_rest.get(kind, 0) for kind in ("weights", "states")) <= step.need
    shard = sum(parameter.numel() for parameter in Net().parameters()) / 2
    assert sum(tier.need for tier in kept.tiers) == pytest.approx((2 + 12) * shard, rel=0.01)


@pytest.mark.parametrize("ratio", [0.3, 0.5])
def test_a_part_of_the_states_is_planned_with_all_layers(ratio: float) -> None:
    """Whole buckets leave the device, so that no line goes through depths."""

    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(copy.deepcopy(self.blocks[0]) for _ in range(24))

    where, batch = gpus(10**9, 1, host_bytes=10**10), {"x": torch.zeros(1, 32, WIDTH)}
    config = ConfigCandidate(0, "states on the host", part=ratio).config(BASE, 1)
    task = memory_plan.Task(Deep(), batch, load_config(config).resolve_batch(1), where, lambda loss: loss, {})
    quick, whole = task.plan(task.run_quickly(), None), plan(Deep(), config, where, batch=batch, exact=True)
    assert (quick.device.peak, quick.host and quick.host.peak) == (whole.device.peak, whole.host and whole.host.peak)


def test_what_is_needed_is_found_for_a_model_that_takes_two_samples() -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x[:, 0]))

    found = choose(Normed(), BASE, gpus(100_000, 1, host_bytes=100_000), batch=BATCH)
    assert not found.rows and found.needed[0].startswith("nothing fits; the closest is ")
    assert "micro-batches of 2" in found.needed[0]


def test_the_disk_is_for_what_no_memory_holds() -> None:
    """It is tried where there is one, and the config says in which folder."""
    zero = {"offload_optimizer": {"device": "none", "nvme_path": "here"}}
    named, where = {**BASE, "zero_optimization": zero}, gpus(500_000, 1, host_bytes=2_000_000, disk_bytes=10**9)
    on_disk = {"stage 0, states on the disk", "stage 3, states on the disk", "stage 3, all on the disk"}
    for config, hardware, is_tried in (
        (named, where, True), (BASE, where, False), (named, replace(where, disk_bytes=None), False)
    ):  # fmt: skip
        found = chosen(hardware, config=config)
        tried = {name.removesuffix(", activations again") for name in found.refused if "on the disk" in name[1:]}
        said = found.refused.get("on the disk", "")
        assert bool(said) == (hardware.disk_bytes is not None and not is_tried)
        tried.discard("on the disk")
        assert tried == (on_disk if is_tried else set())
    config = ConfigCandidate(3, "all on the disk").config(named, 1)
    assert config["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "here"}
    fitting = planned(config, gpus(10**8, 1, disk_bytes=10**9))
    assert fitting.fits and fitting.disk is not None


def test_what_is_not_among_the_rows_is_refused_for_a_reason(small: Choice, large: Choice) -> None:
    assert not large.refused
    assert {"stage 0", "stage 0, activations again"} <= small.refused.keys()
    for name, why in small.refused.items():
        assert "does not fit, " in why, name
    assert not {str(row.candidate) for row in small.rows} & small.refused.keys()


def test_the_first_row_is_checked_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the best do not fit after all, the one that needs least does, and what was found is said."""
    every, run_all, tried = chosen(LARGE), memory_plan.Task.run_all, []
    least = min(every.rows[3:], key=lambda row: row.plan.device.need).candidate
    good = {least.stage}

    def fails(task: memory_plan.Task, exact: bool) -> Any:
        tried.append(task.config.zero_optimization.stage)
        if tried[-1] in good and len(tried) > 3:
            return run_all(task, exact)
        raise UsageError("plan: it is larger than it looks")

    monkeypatch.setattr(memory_plan.Task, "run_all", fails)
    found = chosen(LARGE)
    assert tried == [*(row.candidate.stage for row in every.rows[:3]), least.stage]
    assert found.plan is not None and found.rows[0].candidate == least
    assert len(found.refused) == 3 and set(found.refused.values()) == {"plan: it is larger than it looks"}
    good.clear()
    none = chosen(LARGE)
    assert not none.rows and none.needed == [
        "no config that might fit can be planned: plan: it is larger than it looks"
    ]


def test_what_the_engine_refuses_is_refused_in_its_words() -> None:
    found = chosen(LARGE, config={**BASE, "zero_optimization": {"shard_group_size": 1}})
    assert found.rows and "expected" in found.refused["stage 0"]


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        ({"train_batch_size": 24}, 24),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}, 24),
        ({"train_micro_batch_size_per_gpu": 4}, 8),
        ({"train_micro_batch_size_per_gpu": 4.0, "gradient_accumulation_steps": 3.0}, 24),
        ({}, None),
    ],
)
def test_a_global_batch_stays(said: dict[str, int], whole: int | None) -> None:
    base = {**{key: value for key, value in BASE.items() if key != "train_batch_size"}, **said}
    assert global_batch(base, 2) == whole
    found = load_config(ConfigCandidate(2, samples=4).config(base, 2)).resolve_batch(2)
    assert found.train_batch_size == (whole or 2 * 4)
    assert found.train_micro_batch_size_per_gpu == 4


def test_accumulation_without_a_batch_stays() -> None:
    base = {key: value for key, value in BASE.items() if key != "train_batch_size"}
    found = ConfigCandidate(2, samples=4).config({**base, "gradient_accumulation_steps": 2.0}, 2)
    assert load_config(found).resolve_batch(2).train_batch_size == 2 * 2 * 4


@pytest.mark.parametrize("zero", ["auto", True, 2])
def test_what_is_wrong_with_a_config_is_told_as_always(zero: Any) -> None:
    with pytest.raises(ConfigError, match="zero_optimization: expected an object"):
        chosen(LARGE, config={**BASE, "zero_optimization": zero})


def test_nearly_as_fast_is_as_fast_where_a_run_decides() -> None:
    def row(stage: int, samples: int, speed: float) -> ChoiceRow:
        config = SimpleNamespace(zero_optimization=SimpleNamespace(stage=stage), train_micro_batch_size_per_gpu=samples)
        return ChoiceRow(ConfigCandidate(stage, samples=samples), SimpleNamespace(config=config), speed)  # type: ignore[arg-type]

    rows = [row(3, 8, 100.0), row(2, 8, 99.0), row(2, 4, 96.0), row(0, 8, 94.0), row(1, 1, 50.0)]
    found = [(each.candidate.stage, each.samples) for each in _settled(rows)]
    assert found == [(2, 4), (2, 8), (3, 8), (0, 8), (1, 1)] and _settled([]) == []


def test_micro_batches_divide_the_global_batch(large: Choice) -> None:
    assert large.config is not None and large.config["train_batch_size"] == 4
    assert {row.candidate.samples for row in large.rows} <= {1, 2}
    assert all(row.plan.config.train_batch_size == 4 for row in large.rows)


@pytest.mark.parametrize("place", ["device", "states on the host", "all on the host"])
@pytest.mark.parametrize("again", [False, True])
def test_what_the_user_said_stays(place: str, again: bool) -> None:
    before = copy.deepcopy(BASE)
    found = ConfigCandidate(3, place, again, samples=2).config(BASE, 2)
    assert before == BASE, "the caller's own"
    read, base = load_config(found), load_config(BASE)
    for name in ("optimizer", "gradient_clipping", "bf16", "train_batch_size", "seed"):
        assert getattr(read, name) == getattr(base, name)
    zero = read.zero_optimization
    assert zero.reduce_bucket_size == 100_000
    assert (zero.offload_optimizer.device == "cpu") == (place != "device")
    assert (zero.offload_param.device == "cpu") == (place == "all on the host")
    assert read.activation_checkpointing.enabled == again


def test_it_is_told_how_far_the_search_is_and_what_is_best_so_far() -> None:
    """What needs least of its place is planned first, so that there is an answer soon; the best so far only improves,
    and what is chosen was the best at the end."""
    told: list[str] = []
    found = chosen(LARGE, told=told.append)
    parts = [re.fullmatch(r"(\d+) of about (\d+)(?:; (.*?))?; now (.*)", each) for each in told]
    assert [int(part[1]) for part in parts if part] == list(range(found.tried)) and len(told) == found.tried
    assert all(part and int(part[1]) < int(part[2]) for part in parts)
    assert parts[0] and parts[0][4] == "stage 3, activations again, micro-batches of 1" and parts[0][3] is None
    best = [part[3].removeprefix("best so far: ") for part in parts[1:] if part]
    speeds = [float(re.sub(r".*, (\S+) samples/s", r"\1", each)) for each in best]
    assert speeds == sorted(speeds)
    first = found.rows[0]
    assert best[-1] == f"{first.candidate}, micro-batches of {first.samples}, {first.samples_per_s:.3g} samples/s"
    nothing: list[str] = []
    chosen(gpus(1_200_000, 1, host_bytes=2_400_000), told=nothing.append)
    assert nothing and all("nothing fits so far" in each for each in nothing[1:])


def test_what_is_chosen_leaves_what_no_tensor_gets() -> None:
    found = chosen(LARGE)
    assert found.plan is not None and LARGE.reserved_bytes > 0
    assert found.plan.device.need + LARGE.reserved_bytes <= LARGE.device_bytes
    assert found.plan.as_dict()["tiers"]["GPU"]["reserved_bytes"] == LARGE.reserved_bytes
    assert f"({show_bytes(LARGE.reserved_bytes)} of each GPU are left to CUDA and NCCL" in columns_of(found)


def test_what_is_needed_where_nothing_fits_is_true() -> None:
    """The host is too small for one rank; of two, with one each, gradients of another are on the device, too."""
    told: list[str] = []

    def of(ranks: int) -> Hardware:
        return gpus(1_200_000, ranks, host_bytes=2_400_000, node_ranks=1)

    found = chosen(of(1), told=told.append)
    assert (found.rows, found.config, found.plan) == ([], None, None)
    closest, *needed = found.needed
    assert closest.startswith("nothing fits; the closest is stage 3, states on the host, micro-batches of 1: GPU: fits")
    assert "host: does not fit" in closest
    assert [each.partition("; nothing fits so far; now whether it would fit with ")[2] for each in told[-3:]] == [
        "2 ranks", "4 ranks", "states of 8 bits (data_types.optimizer_state_dtype)"
    ]  # fmt: skip
    assert [sentence.partition(":")[0] for sentence in needed] == [
        "it would fit with 4 ranks", "it would fit with states of 8 bits (data_types.optimizer_state_dtype)"
    ]  # fmt: skip
    candidate = ConfigCandidate(3, "states on the host")
    assert not planned(candidate.config(BASE, 1), of(1)).fits
    assert not planned(candidate.config(BASE, 2), of(2)).fits
    assert planned(candidate.config(BASE, 4), of(4)).fits
    assert planned({**candidate.config(BASE, 1), "data_types": {"optimizer_state_dtype": "8bit"}}, of(1)).fits


class Asks(Net):
    """For which elements are positive."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        return y[y > 0].sum()


def test_a_model_that_cannot_be_planned_and_is_too_large_says_the_former() -> None:
    found = choose(Asks(), BASE, gpus(100_000, 1, host_bytes=100_000), batch=BATCH)
    assert not found.rows and "depend on data" in found.needed[0]


def test_a_model_that_asks_for_values_cannot_be_planned() -> None:
    with pytest.raises(UsageError, match=r"^choose: no config can be planned: plan: the model.s shapes depend on data"):
        choose(Asks(), BASE, "2x24GB", batch=BATCH)
    with pytest.raises(UsageError, match=r"^choose: expected hardware to be a text"):
        choose(Net(), BASE, 24, batch=BATCH)  # type: ignore[arg-type]
