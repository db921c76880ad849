"""Gradients added node by node: the bits of the oracle, and the bytes of docs/limits.md inside of nodes and between.

Four ranks of this machine are told that they are two nodes of two. What travels over which group is counted where the
engine calls torch.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardengine
from shardengine.comm import Collectives, Named, Purpose, Wire, mesh
from shardengine.kernels import ordered_sum
from shardengine.offload import BufferPool
from tests.parity.late_cases import Case, run
from tests.support import cases, special_losses
from tests.support.comparing import assert_equal_to_truth
from tests.support.late_streams import DEFAULT, adversary
from tests.support.parts import PARTIAL, SHARDED
from tests.support.ranks import RankPool
from tests.support.sizes import padded

Pools = Callable[[int], RankPool]
RANKS, NODES, STEPS = 4, 2, 3
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "fp32": ({}, {}, 4, 4),
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}, 2, 4),
    "bf16, added in bf16": (
        {"bf16": {"enabled": True}, "data_types": {"reduce_dtype": "bf16"}},
        {"low": torch.bfloat16, "reduce": torch.bfloat16},
        2,
        2,
    ),
}
"""What the config says, what the oracle is told; bytes of a gradient on the wire, and of a node's sum."""


@contextmanager
def on_nodes(count: int) -> Iterator[None]:
    """Meshes that are built inside are of ranks that share ``count`` nodes."""
    size = dist.get_world_size() // count
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(size))
        patch.setenv("LOCAL_RANK", str(dist.get_rank() % size))
        yield


@functools.lru_cache(maxsize=1)
def mesh_of_two_nodes() -> mesh.Mesh:
    with on_nodes(NODES):
        made = mesh.build(torch.device("cpu"), 60)
    made.make_node_groups()
    return made


class Logged(logging.Handler):
    """What shardengine logs inside."""

    def __enter__(self) -> Logged:
        self.texts: list[str] = []
        logging.getLogger("shardengine").addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("shardengine").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def two_nodes() -> Iterator[None]:
    """Engines of ``cases`` are on two nodes inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "mesh_of_this_process", mesh_of_two_nodes)
        yield


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Bytes that this rank sends to the members of each group."""
    found: Counter[str] = Counter()
    made = mesh_of_two_nodes()
    names = {id(group): str(name) for name, group in made._groups().items()}
    begin = Wire.all_to_all

    def counting(wire: Wire, out: Any, full: Any, group: Any) -> Any:
        members = dist.get_world_size(group)
        found[names[id(group)]] += full.nbytes * (members - 1) // members
        return begin(wire, out, full, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "all_to_all", counting)
        yield found


def train(micros: int, options: dict[str, Any]) -> dict[str, tuple[dict[str, Any], Counter[str], dict[str, Any]]]:
    """Per stage: what ``cases.run_steps`` gives, the bytes by group, and what the engine says of both."""
    found = {}
    for stage in cases.STAGES:
        options = {"hierarchical_reduce": True, **options}
        config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 600}, **options)
        with two_nodes(), counted() as sent:
            engine = cases.make_engine(cases.make_mlp(), config)
            result = cases.run_steps(engine, STEPS)
            said = {**engine.traffic(), **engine.memory(), "pool": engine._core.pool.device_bytes}
            found[stage] = (result, sent, said)
            engine.close()
    return found


def elements(stage: str, itemsize: int) -> int:
    """Of the MLP's gradients, with padding: at stage 3 a block has a storage of its own."""
    lengths: dict[str, list[int]] = {}
    for name, parameter in cases.make_mlp().named_parameters():
        unit = name[:8] if name.startswith("blocks.") and stage.startswith("3") else ""
        lengths.setdefault(unit, []).append(parameter.numel())
    return sum(padded(counts, RANKS, itemsize) for counts in lengths.values())


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_and_bytes(pools: Pools, precision: str, micros: int) -> None:
    said, told, gradient, partial = PRECISIONS[precision]
    results = pools(RANKS).run(train, micros, said)
    for stage in cases.STAGES:
        letter = cases.LETTER[stage]
        truth = cases.truth("mlp", "AdamW", RANKS, micros, letter, STEPS, **told)
        assert_equal_to_truth([result[stage][0] for result in results], truth, f"stage {stage}")
        reduced = elements(stage, gradient) * (micros if letter == "sharded" else 1)
        for rank, result in enumerate(results):
            _, sent, told_by_engine = result[stage]
            where = f"stage {stage}, rank {rank}"
            assert sent.pop("inside") == STEPS * gradient * reduced * (RANKS - NODES) // RANKS, where
            assert sent.pop("across") == STEPS * partial * reduced * (NODES - 1) // RANKS, where
            assert not sent, where
            assert told_by_engine["measured_bytes_last_step"] == told_by_engine["formula_bytes_per_step"], where
            if stage == "2" and micros == 1:  # three buckets under way, of which one slice each is at rest
                assert told_by_engine["pool"] <= told_by_engine["predicted_buffer_bytes"], where


@pytest.mark.parametrize("option", [{"overlap_comm": False}, {"debug": True}, {"hierarchical_reduce": False}])
def test_switches(pools: Pools, option: dict[str, Any]) -> None:
    results = pools(RANKS).run(train, 1, option)
    for stage in cases.STAGES:
        truth = cases.truth("mlp", "AdamW", RANKS, 1, "full", STEPS)
        assert_equal_to_truth([result[stage][0] for result in results], truth, f"stage {stage}")
        for result in results:
            assert result[stage][1].keys() == ({"reduce"} if "hierarchical_reduce" in option else {"inside", "across"})


@pytest.mark.parametrize("name", ["int8", "bf16"])
def test_what_a_hook_codes_goes_in_one_step(pools: Pools, name: str) -> None:
    """Its errors are those of a bucket as it lies, and no sum is coded again."""
    results = pools(RANKS).run(train, 1, {"comm_hook": {"name": name}})
    for stage in cases.STAGES:
        truth = cases.truth("mlp", "AdamW", RANKS, 1, "full", STEPS, coding=(name, name == "int8"))
        assert_equal_to_truth([result[stage][0] for result in results], truth, f"stage {stage}")
        for _, sent, said in (result[stage] for result in results):
            assert sent.keys() == {"reduce"}
            assert said["measured_bytes_last_step"] == said["formula_bytes_per_step"], stage


def initialized(nodes: int, options: dict[str, Any]) -> tuple[list[str], float, list[str]]:
    """Of a stage 2 engine on ``nodes`` nodes: its groups of nodes, the bytes of its buffers, what is told of sums."""
    with on_nodes(nodes), Logged() as log:
        model = cases.make_mlp()
        config = cases.config_of("2", zero={"reduce_bucket_size": 600}, **options)
        engine = shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"))
    found = [name.value for name in engine._core.mesh.node_groups], engine.memory()["predicted_buffer_bytes"]
    engine.close()
    return *found, [text for text in log.texts if "hierarchical_reduce" in text or "reproducible" in text]


def test_groups_and_buffers_are_those_of_the_sums_that_are_made(pools: Pools) -> None:
    """What the backend adds up itself takes no groups of nodes and no buffers, and the user hears of it once."""
    asked = {"hierarchical_reduce": True}
    of_backend: dict[str, Any] = {"reproducible": False}
    pool = pools(RANKS)
    (_, plain, _), *_ = pool.run(initialized, NODES, {})
    (made, two_steps, told), *_ = pool.run(initialized, NODES, asked)
    assert (made, told) == (["inside", "across"], []) and two_steps > plain
    first, *others = pool.run(initialized, NODES, asked | of_backend)
    assert first[:2] == ([], plain)
    assert first[2] == [
        "hierarchical_reduce: gloo adds fp32 gradients up by itself, in one step, so true changes nothing for them; "
        'set "reproducible": true beside it, or leave it out'
    ]
    assert others == [([], plain, [])] * (RANKS - 1)
    assert pool.run(initialized, NODES, of_backend) == [([], plain, [])] * RANKS


def unfreeze(model: Any) -> list[tuple[int, bool]]:
    """A step without the bf16 parameters, one with them: groups of nodes; whether bytes are those of the formula."""
    low = [parameter for parameter in model.parameters() if parameter.dtype is torch.bfloat16]
    with on_nodes(NODES):
        for parameter in low:
            parameter.requires_grad_(False)
        config = cases.config_of("2", hierarchical_reduce=True, reproducible=False)
        engine = shardengine.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    found = []
    for step in range(2):
        engine.backward(special_losses.regression(engine, step, engine.rank, 0))
        engine.step()
        told = engine.traffic()
        same = told["measured_bytes_last_step"] == told["formula_bytes_per_step"]
        found.append((len(engine._core.mesh.node_groups), same))
        for parameter in low:
            parameter.requires_grad_(True)
    engine.close()
    return found


def test_groups_come_with_the_first_gradients_that_are_added_in_two_steps(pools: Pools) -> None:
    """The backend adds fp32 up; bf16 comes when it is unfrozen."""
    assert pools(RANKS).run(unfreeze, special_losses.two_dtypes()) == [[(0, True), (2, True)]] * RANKS


def test_where_the_ranks_are_no_such_nodes_rank_0_says_why(pools: Pools) -> None:
    first, *others = pools(RANKS).run(initialized, 1, {"hierarchical_reduce": True})
    assert first[0] == [] and [(made, told) for made, _, told in others] == [([], [])] * (RANKS - 1)
    assert first[2] == [
        "hierarchical_reduce: expected several nodes with 2, 4, 8, ... consecutive ranks each, but all ranks are on "
        "one node; gradients are reduced in one step"
    ]


def test_a_backend_that_may_add_what_is_not_sent_in_fp32_is_told_how(pools: Pools) -> None:
    bf16: dict[str, Any] = {"bf16": {"enabled": True}, "reproducible": False}
    rounded: dict[str, Any] = {"data_types": {"reduce_dtype": "bf16"}, "reproducible": False}
    pool = pools(2)
    (_, _, [of_wire]), (*_, of_rank_1) = pool.run(initialized, 1, bf16)
    assert of_rank_1 == []
    assert of_wire == (
        '"reproducible": false changes nothing for gradients that are sent in bfloat16: they are added here, in the '
        'declared order; "communication_data_type": "fp32" lets gloo add them'
    )
    (_, _, [of_sums]), _ = pool.run(initialized, 1, rounded)
    assert '"data_types": {"reduce_dtype": "fp32"} lets gloo add them' in of_sums
    for options in (bf16 | {"communication_data_type": "fp32"}, {**bf16, "reproducible": None}):
        assert [told for _, _, told in pool.run(initialized, 1, options)] == [[], []], options


def run_late(chosen: list[Case], folder: str) -> list[dict[str, Any]]:
    with two_nodes(), counted() as sent:
        found = run(chosen, STEPS, folder)
    assert sent.keys() == {"inside", "across"}
    return found


LATE = [
    Case("0", 3, "bf16"),
    Case("2", 1, "fp32", "states on the host"),
    Case("3", 3, "bf16", "all on the host", "no overlap"),
    Case("3", 1, "bf16", stream="the user's stream"),
]


def test_late_streams_change_no_bit(pools: Pools, tmp_path: Any) -> None:
    """Between the two steps is a sum on a stream of its own."""
    by_rank = pools(RANKS).run(run_late, LATE, str(tmp_path))
    for number, case in enumerate(LATE):
        found = [results[number] for results in by_rank]
        orders = [result.pop("issued") for result in found]
        assert all(order == orders[0] for order in orders), f"{case}: ranks issue collectives in different orders"
        assert all(result.pop("counts")["collectives"] > 0 for result in found), case
        assert_equal_to_truth(found, case.truth(RANKS, STEPS), str(case))


def gives_up() -> tuple[list[float], int]:
    """Rank 3 raises in backward; all reset, and train on over new groups. The losses; how many groups are of nodes."""
    with on_nodes(NODES):
        model = cases.make_mlp()
        config = cases.config_of("2", hierarchical_reduce=True, zero={"reduce_bucket_size": 600})
        engine = shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"))
    losses = [cases.run_micro_batch(engine, cases.loss_of, 0, 0)]
    try:
        loss = cases.loss_of(engine, 1, engine.rank, 0)
        if engine.rank == 3:
            loss.register_hook(_raise)
        engine.backward(loss)
        engine.step()
    except (ValueError, shardengine.errors.CommunicationError):
        engine.reset()
    losses += [cases.run_micro_batch(engine, cases.loss_of, step, 0) for step in (1, 2)]
    count = len(engine._core.mesh.node_groups)
    engine.close()
    return losses, count


def _raise(_gradient: Any) -> None:
    raise ValueError("on purpose")


def test_a_rank_that_raises_is_met_again_over_new_groups(pools: Pools) -> None:
    found = pools(RANKS).run(gives_up)
    truth = cases.truth("mlp", "AdamW", RANKS, 1, "full", STEPS)
    assert [count for _, count in found] == [2] * RANKS  # groups
    for rank, (losses, _) in enumerate(found):
        assert losses == [row[0] for row in (each[rank] for each in truth.losses)]


def knows_of(stream: str, foe: Any) -> set[str]:
    return {agent for agent in foe.judge.clock(stream) if agent.startswith("communicator")}


def reduce_one() -> tuple[set[str], set[str]]:
    """Of what the computation knows before and after it waits for a reduction."""
    with adversary(mesh_of_two_nodes()) as foe:
        link = Collectives(foe.mesh, BufferPool(foe.mesh.platform), hierarchical=True)
        full, out = torch.ones(RANKS * 16), torch.empty(16)
        work = link.move(full, PARTIAL, SHARDED, Named(["a"]), Purpose.GRADIENTS, lambda terms: ordered_sum(terms, out))
        before = knows_of(DEFAULT, foe)
        work.wait()
        after = knows_of(DEFAULT, foe)
        assert out.tolist() == [4.0] * 16
    return before, after


def test_the_computation_waits_for_the_second_step_alone_and_late(pools: Pools) -> None:
    """On NCCL both steps are issued at once, and nothing but their end holds the computation up."""
    assert pools(RANKS).run(reduce_one) == [(set(), {"communicator 1", "communicator 2"})] * RANKS
