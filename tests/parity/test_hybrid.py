"""Hybrid meshes (HSDP and hpZ): the bits of the oracle, and of stage 3 on all ranks where the tree allows that.

The ranks of this machine are in shard groups of consecutive ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardengine.comm import Collectives, Named, Purpose, Wire
from shardengine.offload import BufferPool
from tests.parity.test_hierarchical_reduce import knows_of
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.late_streams import DEFAULT, adversary
from tests.support.parts import REPLICATED, SHARDED
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 4
STAGES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3k": {"stage": 3, "stage3_reshard_after_forward": False},
    "3": {"stage": 3},
}
LETTER = {"1": "full", "2": "inside", "3k": "inside", "3": "inside"}
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}),
    "bf16, added in bf16": (
        {"bf16": {"enabled": True}, "data_types": {"reduce_dtype": "bf16", "grad_accum_dtype": "bf16"}},
        {"low": torch.bfloat16, "reduce": torch.bfloat16, "accumulate": torch.bfloat16},
    ),
}


def config_of(stage: str, size: int, micros: int, zero: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Of ``stage`` in shard groups of ``size``; "hpZ": stage 3 that keeps weights in them."""
    chosen: dict[str, Any]
    if stage == "hpZ":
        chosen = {"stage": 3, "zero_hpz_partition_size": size}
    else:
        chosen = {**STAGES[stage], "shard_group_size": size}
    return cases.config_of("3", micros, zero={"reduce_bucket_size": 600, **chosen, **zero}, **options)


def train(
    stages: list[str], size: int, micros: int, kind: str, zero: dict[str, Any], options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Per stage what ``cases.run_steps`` gives."""
    found = {}
    for stage in stages:
        engine = cases.make_engine(cases.make_mlp(), config_of(stage, size, micros, zero, options), kind)
        found[stage] = cases.run_steps(engine, STEPS)
        engine.close()
    return found


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (2, 2), (3, 1), (4, 2)])
def test_bits(pools: Pools, ranks: int, size: int, kind: str, micros: int) -> None:
    results = pools(ranks).run(train, [*STAGES, "hpZ"], size, micros, kind, {}, {})
    for stage, letter in [*LETTER.items(), ("hpZ", "sharded")]:
        truth = cases.truth("mlp", kind, ranks, micros, letter, STEPS, inside=size)
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_six_ranks(pools: Pools, size: int, micros: int) -> None:
    """Three groups of two have the tree of six ranks; two groups of three have their own."""
    results = pools(6).run(train, ["2", "3", "hpZ"], size, micros, "AdamW", {}, {"gradient_accumulation": "full"})
    flat = cases.truth("mlp", "AdamW", 6, micros, "full", STEPS)
    hybrid = cases.truth("mlp", "AdamW", 6, micros, "full", STEPS, inside=size)
    same = all(torch.equal(flat.parameters[name], hybrid.parameters[name]) for name in flat.parameters)
    assert same is (size == 2)
    for stage in ("2", "3", "hpZ"):
        assert_equal_to_truth([result[stage] for result in results], hybrid, f"stage {stage}")


@pytest.mark.parametrize("order", ["full", "sharded"])
def test_the_order_of_sums_may_be_that_of_stage_3_on_all_ranks(pools: Pools, order: str) -> None:
    results = pools(4).run(train, [*STAGES, "hpZ"], 2, 3, "AdamW", {}, {"gradient_accumulation": order})
    truth = cases.truth("mlp", "AdamW", 4, 3, order, STEPS)
    for stage in (*STAGES, "hpZ"):
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions(pools: Pools, precision: str, micros: int) -> None:
    said, told = PRECISIONS[precision]
    results = pools(4).run(train, [*STAGES, "hpZ"], 2, micros, "AdamW", {}, said)
    for stage, letter in [*LETTER.items(), ("hpZ", "sharded")]:
        truth = cases.truth("mlp", "AdamW", 4, micros, letter, STEPS, inside=2, **told)
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no overlap": ({}, {"overlap_comm": False}),
    "debug": ({}, {"debug": True}),
    "one bucket": ({"reduce_bucket_size": 100_000, "stage3_prefetch_bucket_size": 0}, {}),
    "states on the host": ({"offload_optimizer": {"device": "cpu"}}, {}),
    "half of the states on the host": ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, {}),
}


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("switch", SWITCHES)
def test_switches(pools: Pools, switch: str, micros: int) -> None:
    zero, options = SWITCHES[switch]
    results = pools(4).run(train, [*STAGES, "hpZ"], 2, micros, "AdamW", zero, options)
    for stage, letter in [*LETTER.items(), ("hpZ", "sharded")]:
        truth = cases.truth("mlp", "AdamW", 4, micros, letter, STEPS, inside=2)
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_tiers_of_weights(pools: Pools, device: str, tmp_path: Path) -> None:
    tier = {"device": device, "nvme_path": str(tmp_path)} if device == "nvme" else {"device": device}
    zero = {"offload_optimizer": tier, "offload_param": tier}
    results = pools(4).run(train, ["3", "hpZ"], 2, 2, "AdamW", zero, {})
    for stage, letter in [("3", "inside"), ("hpZ", "sharded")]:
        truth = cases.truth("mlp", "AdamW", 4, 2, letter, STEPS, inside=2)
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


# Bytes, by axis


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes of data that this rank sends inside of its shard group of two, across, and to all, counted at the wire."""
    found: Counter[str] = Counter()
    rank = dist.get_rank()

    def note(group: Any, count: int) -> None:
        members = dist.get_process_group_ranks(group)
        axis = "inside" if members == [rank // 2 * 2, rank // 2 * 2 + 1] else "across" if len(members) == 2 else "all"
        found[axis] += count

    def wrapped(name: str, size: Callable[..., int]) -> Any:
        begin = getattr(Wire, name)

        def counting(wire: Wire, *args: Any) -> Any:
            note(args[-1], size(*args))
            return begin(wire, *args)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        sizes: dict[str, Callable[..., int]] = {
            "broadcast": lambda tensor, source, group: tensor.nbytes if dist.get_rank(group) == source else 0,
            "all_gather": lambda out, own, group: own.nbytes * (dist.get_world_size(group) - 1),
            "all_to_all": lambda out, full, group: full.nbytes // 2,
            "all_to_all_of": lambda out, come, full, go, group: full.nbytes,  # nothing stays here
        }
        for name, size in sizes.items():
            patch.setattr(Wire, name, wrapped(name, size))
        yield found


def traffic(stage: str, micros: int, options: dict[str, Any]) -> tuple[Counter[str], dict[str, Any], dict[str, int]]:
    """Of the third step: bytes by axis, what the engine says; elements of the layout by what is trained of them."""
    engine = cases.make_engine(cases.make_mlp(), config_of(stage, 2, micros, {}, options))
    cases.run_steps(engine, 2)
    with counted() as sent:
        for micro in range(micros):
            cases.run_micro_batch(engine, cases.loss_of, 2, micro)
    lengths = {
        name: sum(each.length for each in engine._core.layout.flat_buffers if (each.unit == 0) is root)
        for name, root in (("root", True), ("blocks", False))
    }
    said = engine.traffic()
    last = engine._core.layout.flat_buffers_of
    lengths["last"] = sum(each.length for each in last[max(last)])
    engine.close()
    return sent, said, lengths


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("stage", [*STAGES, "hpZ"])
def test_bytes_by_axis(pools: Pools, stage: str, micros: int, low: bool) -> None:
    """Written down once more from the sizes: g bytes per gradient, 4 per sum across, p per weight; L = 2, M = 2."""
    options: dict[str, Any] = {"bf16": {"enabled": True}} if low else {}
    found = pools(4).run(traffic, stage, micros, options)
    g = p = 2 if low else 4
    for sent, said, lengths in found:
        every = lengths["root"] + lengths["blocks"]
        once = lengths["root"] + lengths["last"]
        inside, across = g * every / 2, 4 * every / 4  # one reduction
        reductions = (micros, micros if stage == "hpZ" else 1) if stage != "1" else (1, 1)
        expected = {"inside": inside * reductions[0], "across": across * reductions[1]}
        if stage != "hpZ":
            expected["across"] += g * every / 4  # the complete gradient
        if stage in ("1", "2"):
            expected["inside"] += p * every / 2  # stepped weights
        forward = p * every * micros
        backward = p * (every - once) * micros if stage in ("3", "hpZ") else 0
        if stage.startswith("3"):
            expected["inside"] += (forward + backward) / 2
        if stage == "hpZ":
            expected["inside"] += (forward + backward) / 2
            expected["across"] += forward / 4
        assert {axis: sent[axis] for axis in expected} == expected, stage
        assert said["measured_bytes_last_step"] == said["formula_bytes_per_step"] == sum(expected.values())
        assert {axis: said["formula_bytes_by_axis"][axis] for axis in expected} == expected


# Streams


def gather_one() -> tuple[set[str], set[str]]:
    """Of what the computation knows before and after it waits for a gather along both axes."""
    with adversary(cases.mesh_of_this_process()) as foe:
        mesh = foe.mesh.in_shard_groups_of(2)
        link = Collectives(mesh, BufferPool(mesh.platform))
        full = torch.zeros(64)
        group, place = divmod(mesh.rank, 2)
        full.split(16)[2 * place + group].fill_(1.0 + 2 * place + group)
        work = link.move(full, SHARDED, REPLICATED, Named(["a"]), Purpose.WEIGHTS)
        before = knows_of(DEFAULT, foe)
        work.wait()
        after = knows_of(DEFAULT, foe)
        assert [part.tolist() for part in full.split(16)] == [[float(number)] * 16 for number in (1, 2, 3, 4)]
        foe.check()
    return before, after


def test_the_computation_waits_for_the_second_axis_alone_and_late(pools: Pools) -> None:
    """On NCCL both are issued at once, and nothing but their end holds the computation up."""
    assert pools(4).run(gather_one) == [(set(), {"communicator 1", "communicator 2"})] * 4
