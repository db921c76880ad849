"""The time of a planned step: tapes by hand with times computed by hand, and the tape of real dry runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.plan import loss_of
from benchmarks.plan_cases import Case, Text, words
from shardengine import Hardware, kernels, plan
from shardengine.budget import HIDDEN_BY_CPU
from shardengine.comm import GroupSpeed
from shardengine.errors import UsageError
from shardengine.kernels import Spans
from shardengine.planner import DryRun, Link, ModelPlace, Rates, ReplayPart, Tape, Times, dry_run, measured, simulate
from shardengine.planner.calibration import timed
from shardengine.planner.rates import (
    A_GPU,
    BESIDE,
    COMPUTE,
    CONTROL,
    DISK,
    HOST_STEP,
    NETWORK,
    NODE,
    PYTHON,
    TO_DEVICE,
    TO_HOST,
)
from shardengine.planner.tape import Compute, Copy, Current, Mark, TapeBegin, TapedCall, TapedCopy, TapePhase, Wait

# Tapes by hand: an operation of n FLOPs takes n seconds, a byte over the links of a node 1 s (4 ranks: of 4 bytes an
# all-gather sends 3), between nodes 10 s, a copied byte 2 s, one of the disk 5 s and of the host's memory 1 s.

LATENCY = 0.5
RATES = Rates(
    {"fp32": 1.0}, memory=1e30, node_link=Link(1.0, LATENCY), link=Link(0.1, LATENCY), exchange_s=0.25, copies=0.5,
    disk=0.2, host_memory=1.0,
)  # fmt: skip


def op(tape: Tape, seconds: int, *, on_host: bool = False) -> Compute:
    """An operation that takes so long."""
    tape.calls.append(TapedCall("mm", (len(tape.calls),), "fp32", seconds, seconds))
    return Compute(len(tape.calls) - 1, on_host)


def replayed(*events: Any, apart: bool = True, rates: Rates = RATES, members: Mapping[str, Any] | None = None) -> Times:
    """Of events; a number is an operation that takes so long, a negative one an operation of the host."""
    tape = Tape(apart, members=members or {"gather": range(4), "reduce": range(4)})
    tape.events = [op(tape, abs(each), on_host=each < 0) if isinstance(each, int) else each for each in events]
    found = simulate(tape, rates, 4)
    assert found.bound <= found.seconds + 1e-9
    assert sum(part.exposed for part in found.parts) == pytest.approx(found.seconds), "each second has one reason"
    return found


def gather(number: int, sent: int, group: str = "gather") -> TapeBegin:
    """Of which a rank sends so many bytes to three others."""
    return TapeBegin(number, "all_gather", group, sent * 4 // 3)


def test_a_collective_is_hidden_by_what_is_computed_meanwhile() -> None:
    found = replayed(2, gather(1, 3), 5, Wait(1, False), 1)
    assert found.seconds == 2 + 5 + 1
    assert found.part(NODE) == ReplayPart(NODE, 3 + LATENCY, 0.0, 3.0) and found.bound == 8


def test_what_is_not_hidden_is_exposed() -> None:
    found = replayed(2, gather(1, 6), 4, Wait(1, False), 1)
    assert found.seconds == 2 + 6 + LATENCY + 1
    assert found.part(NODE).exposed == 6 + LATENCY - 4
    assert found.part(COMPUTE) == ReplayPart(COMPUTE, 7.0, 7.0, 7.0)


def test_a_collective_begins_behind_the_computation_and_not_where_it_is_waited_for() -> None:
    early, late = replayed(gather(1, 3), 5, Wait(1, False)), replayed(5, gather(1, 3), Wait(1, False))
    assert early.seconds == 5 and late.seconds == 5 + 3 + LATENCY


def test_a_late_wait_costs_nothing_and_nobody_waits_twice() -> None:
    twice = replayed(gather(1, 3), Wait(1, False), Wait(1, False), 9, Wait(1, False))
    assert twice.seconds == 3 + LATENCY + 9
    assert replayed(gather(1, 3), 1).seconds == 3 + LATENCY, "its end is the step's, too"
    assert replayed(Wait(7, False), 1, Wait(8, True)).seconds == 1, "of an earlier step"


def test_collectives_of_a_group_follow_each_other_and_groups_share_links() -> None:
    one = replayed(gather(1, 3), gather(2, 3), Wait(2, False))
    assert one.seconds == 2 * (3 + LATENCY)
    two = replayed(gather(1, 3), gather(2, 3, "reduce"), Wait(2, False))
    assert two.seconds == LATENCY + 3 + 3, "latencies overlap, bytes do not"
    apart = replayed(
        gather(1, 3), TapeBegin(2, "all_to_all", "across", 2), Wait(1, False), Wait(2, False),
        rates=dataclasses.replace(RATES, node_ranks=4), members={"gather": range(4), "across": (0, 4)},
    )  # fmt: skip
    assert apart.seconds == LATENCY + 10 and apart.part(NETWORK).limit == 10, "half of two bytes, beside the others"


def test_copies_come_after_events() -> None:
    behind = replayed(5, Copy(1, 7, True, 2, None), 1, Wait(1, True), -3)
    assert behind.seconds == 5 + 4 + 3
    assert behind.part(TO_HOST).exposed == 3 and behind.part(HOST_STEP).exposed == 3
    marked = replayed(2, Mark(9), 5, Copy(1, 7, True, 2, (9,)), Wait(1, True), -3)
    assert marked.seconds == 2 + 4 + 3, "behind the mark alone, beside the operation"
    assert marked.part(TO_HOST).exposed == 0 and marked.part(HOST_STEP).exposed == 2
    queued = replayed(Copy(1, 7, True, 1, None), Copy(2, 7, True, 1, ()), Copy(3, 8, False, 1, (1,)), Wait(3, False), 1)
    assert queued.seconds == 2 + 2 + 1, "one stream in order, the other direction beside it"
    two = replayed(Copy(1, 7, True, 1, ()), Copy(2, 8, True, 1, ()), Wait(1, True), Wait(2, True), 1)
    assert two.seconds == 2 + 2 + 1, "in one direction after each other"


def test_the_computation_stands_still_while_the_host_computes() -> None:
    found = replayed(2, Copy(1, 7, True, 1, None), Wait(1, True), -4, Copy(2, 8, False, 1, None), Wait(2, False), 1)
    assert found.seconds == 2 + 2 + 4 + 2 + 1
    exposed = {part.name: part.exposed for part in found.parts}
    assert exposed == {COMPUTE: 3, TO_HOST: 2, HOST_STEP: 4, TO_DEVICE: 2}


def test_a_gather_behind_loads_waits_for_these_and_not_for_the_computation() -> None:
    load = (9, Copy(1, 7, False, 1, ()), Current(7), gather(2, 3), Current(None), Wait(2, False), 1)
    assert replayed(*load).seconds == 9 + 1
    within = replayed(1, Current(7), 3, Current(None), 2)
    assert within.seconds == 3 and within.part(BESIDE).busy == 3 and within.part(COMPUTE).busy == 3


def test_the_host_waits_for_the_disk_and_for_messages() -> None:
    found = replayed(TapedCopy(1, 1, False), 2, Wait(1, True), -1, TapedCopy(2, 1, True))
    assert found.seconds == 5 * 4 + 1 + 5 * 4, "4 ranks share it"
    assert found.part(DISK) == ReplayPart(DISK, 40, 40 - 2, 40)
    said = replayed(3, Mark(1), Wait(1, True), TapeBegin(2, "all_gather", "control", 8), Wait(2, True), 1)
    assert said.seconds == 3 + 0.25 + 1 and said.part(CONTROL).exposed == 0.25


def test_phases_are_those_of_the_computation() -> None:
    found = replayed(
        TapePhase("forward"), 2, TapePhase("backward"), 4, gather(1, 3), TapePhase("step"), Wait(1, False), 1
    )
    assert found.phases == {"forward": 2, "backward": 4, "step": 3 + LATENCY + 1}


def test_on_a_cpu_collectives_take_what_they_need_of_shared_cores() -> None:
    speeds = {"gather": GroupSpeed(LATENCY, 1.0)}
    events = (2, TapeBegin(1, "all_gather", "gather", 3), 5, Wait(1, True), 1)
    enough, shared = (dataclasses.replace(RATES, groups=speeds, cores=cores) for cores in (8, 7))
    assert replayed(*events, apart=False, rates=enough).seconds == 2 + 5 + 1
    found = replayed(*events, apart=False, rates=shared)
    assert found.seconds == 2 + 5 + 1 + (1 - HIDDEN_BY_CPU) * (3 + LATENCY)
    broadcasts = [TapeBegin(number, "broadcast", "gather", 3) for number in range(4)]
    waits = [Wait(number, True) for number in range(4)]
    assert replayed(*broadcasts, *waits, apart=False, rates=enough).seconds == LATENCY + 4 * 3
    python = dataclasses.replace(enough, dispatch_s=0.25)
    tape = Tape(False)
    tape.events = [op(tape, 1)._replace(before=3), op(tape, 1)]
    found = simulate(tape, python)
    assert found.seconds == 2 + 0.25 * 5 and found.part(PYTHON).exposed == 0.25 * 5


# What is said of hardware


def test_speeds_are_read_as_people_write_them() -> None:
    where = Hardware.parse(
        "16x80GB", nvme="1TB@6GB/s", node_ranks=8, link="50GB/s @ 20us", node_link="300GB/s", tflops="990, fp32=67",
        memory="3.35TB/s",
    )  # fmt: skip
    assert where.link == pytest.approx((50e9, 20e-6)) and where.node_link == Link(300e9, 10e-6)
    assert where.flops == {"bf16": 990e12, "fp16": 990e12, "fp32": 67e12}
    assert (where.disk_bytes, where.disk_speed, where.memory_speed) == (10**12, 6e9, 3.35e12)
    rates = Rates.given(where)
    assert set(rates.assumed) == {"FLOP/s in fp64", "copies to host", "copies to device", "host step"}
    assert rates.per_rank_disk(16) == 6e9 / 8 and rates.flops["fp64"] == A_GPU["fp64"]
    assert not Hardware.parse("4x24GB", nvme="1TB").has_speeds and where.has_speeds
    one = Rates.given(Hardware.parse("4x24GB", link="10GB/s"))
    assert one.node_link.bytes_per_s == 10e9, "in one node it is that between all"
    assert {"FLOP/s in bf16", "memory", "disk"} <= set(one.assumed) and "links in a node" not in one.assumed


@pytest.mark.parametrize(
    "speeds",
    [{"link": "50GB"}, {"link": "50GB/s@10"}, {"node_link": "fast"}, {"tflops": "many"}, {"tflops": "tf8=3"},
     {"tflops": "-1"}, {"tflops": "nan"}, {"tflops": "312e12"}, {"link": "400Gb/s"},
     {"nvme": "1TB@6GB"}, {"memory": "0GB/s"}],
)  # fmt: skip
def test_what_is_no_speed_is_told(speeds: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"expected .*, got"):
        Hardware.parse("4x24GB", **speeds)


def test_collectives_send_what_an_optimal_algorithm_sends() -> None:
    """16 ranks in two nodes of 8: by hand."""
    rates = dataclasses.replace(RATES, node_ranks=8)
    ranks = range(16)
    send = lambda operation, count: rates.collective(TapeBegin(1, operation, "gather", count), ranks)  # noqa: E731
    assert send("all_to_all", 16).limit_s == pytest.approx(8 * 10), "a sixteenth for each of 8 ranks in another node"
    assert send("all_gather", 16).limit_s == pytest.approx(15), "one node's links have more to do"
    assert send("all_gather", 16)[:1] == (NODE,) and send("all_to_all", 16)[:1] == (NETWORK,)
    slow = dataclasses.replace(rates, link=Link(0.01, 0.0))
    assert slow.collective(TapeBegin(1, "reduce_scatter", "reduce", 16), ranks).limit_s == pytest.approx(100)


# Dry runs

WORDS, TOKENS, WIDTH, INNER, LAYERS, BUCKET = 256, 128, 64, 176, 2, 20_000
_LLAMA = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TOKENS, "use_cache": False,
}  # fmt: skip
_llama = Text("LlamaForCausalLM", "LlamaConfig", _LLAMA)
_words = partial(words, 2, TOKENS, WORDS)


def run(case: Case, *, apart: bool = False, config: Mapping[str, Any] | None = None) -> DryRun:
    """Of a small Llama."""
    made = config or case.config()
    return dry_run(lambda _: _llama(), _words, made, ModelPlace(case.ranks, case.ranks // 2, apart=apart), loss_of)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_flops_of_a_llama_are_those_by_hand(precision: str) -> None:
    """Forward 2 and backward 4 for each weight of a product and token, attention as torch counts it: scores and values
    of all pairs forward, and five products of that size backward. Recomputation is a forward of the layers more, but
    for the last product of each, of which backward needs no result."""
    tokens, head = 2 * TOKENS, WIDTH // 4
    layer = WIDTH * WIDTH * 2 + WIDTH * 2 * head * 2 + 3 * WIDTH * INNER
    products = LAYERS * layer + WIDTH * WORDS
    pairs = 2 * 4 * TOKENS * TOKENS * head
    expected = 6 * products * tokens + LAYERS * (2 + 5) * 2 * pairs
    found = run(Case("", 2, "2", precision)).tape
    assert found.flops() == {precision: expected} and not found.unknown
    again = run(Case("", 2, "2", precision, checkpointed=True)).tape
    assert again.flops()[precision] == expected + LAYERS * (2 * (layer - WIDTH * INNER) * tokens + 2 * 2 * pairs)


CASES = {
    "stage 0": Case("", 2, "0", bucket=BUCKET),
    "stage 1, bf16": Case("", 4, "1", "bf16", micros=2, bucket=BUCKET),
    "stage 2": Case("", 2, "2", bucket=BUCKET),
    "stage 3": Case("", 4, "3", "bf16", checkpointed=True, bucket=BUCKET),
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_the_tape_has_the_collectives_that_are_issued_and_its_limits_hold(name: str, apart: bool) -> None:
    found = run(CASES[name], apart=apart)
    tape = found.tape
    assert [(each.operation, each.group, each.bytes) for each in tape.begun()] == [tuple(each) for each in found.issued]
    begun, waited = [each.number for each in tape.begun()], {e.number for e in tape.events if isinstance(e, Wait)}
    assert len(begun) > 4 and set(begun) <= waited, "each is waited for"
    assert all(tape.members[each.group] == range(CASES[name].ranks) for each in tape.begun())
    rates = Rates.given(Hardware(CASES[name].ranks, 10**10, link=Link(1e9, 1e-5)))
    times = simulate(tape, rates, CASES[name].ranks)
    for part in times.parts:
        assert part.limit <= part.busy * (1 + 1e-9) <= times.seconds * (1 + 1e-9), part
    endless = dataclasses.replace(rates, node_link=Link(1e30, 0.0), exchange_s=0.0)
    alone = simulate(tape, endless, CASES[name].ranks)
    assert alone.seconds == pytest.approx(alone.part(COMPUTE).busy) and alone.seconds < times.seconds
    assert list(times.phases) == ["forward", "backward", "step"]
    assert times.part(COMPUTE).limit == pytest.approx(sum(n / rates.flops[d] for d, n in tape.flops().items()))


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_ranks_of_several_nodes_add_gradients_inside_of_each_first(stage: str) -> None:
    """As they do on NCCL without being asked: a quarter of the sums, in fp32, goes to other nodes."""
    case = Case("", 8, stage, "bf16", bucket=BUCKET)
    place = ModelPlace(8, 6, node_ranks=4)
    found = dry_run(lambda _: _llama(), _words, case.config(), place, loss_of)
    sent = {name: sum(each.bytes for each in found.tape.begun() if each.group == name) for name in found.tape.members}
    assert not sent.get("reduce") and 0 < sent["across"] == 2 * sent["inside"] / 4
    assert [list(found.tape.members[name]) for name in ("inside", "across")] == [[4, 5, 6, 7], [2, 6]]
    times = {}
    for node in (4, 0):
        hardware = Hardware(8, 80 << 30, node_ranks=4, link=Link(1e9, 0.0), node_link=Link(1e12, 0.0))
        tape = (
            found.tape if node else dry_run(lambda _: _llama(), _words, case.config(), ModelPlace(8, 6), loss_of).tape
        )
        times[node] = simulate(tape, Rates.given(hardware), 8).part(NETWORK).busy
    assert times[4] < 0.7 * times[0]


def test_a_plan_knows_its_nodes() -> None:
    hardware = Hardware(8, 80 << 30, node_ranks=4, link=Link(1e9, 0.0), node_link=Link(1e12, 0.0))
    one = dataclasses.replace(hardware, node_ranks=None)
    config = Case("", 8, "2", "bf16", bucket=BUCKET).config() | {"activation_checkpointing": {"enabled": True}}
    config["zero_optimization"] = config["zero_optimization"] | {"shard_group_size": "node"}
    found = plan(_llama(), config, hardware, batch=_words(), loss=loss_of)
    assert found.time is not None and found.time.part(NETWORK).busy > 0
    whole = config | {"zero_optimization": config["zero_optimization"] | {"shard_group_size": 8}}
    alone = plan(_llama(), whole, one, batch=_words(), loss=loss_of)
    assert found.device.at_rest["states"] > 1.9 * alone.device.at_rest["states"], "half of them in each node"


def test_overlap_is_that_of_the_engine() -> None:
    """What is prefetched is hidden; without overlap, and with nothing ahead, more is exposed."""
    config = Case("", 4, "3").config()
    zero = config["zero_optimization"]
    with_more = {
        "overlapped": {},
        "nothing ahead": {"stage3_prefetch_bucket_size": 0},
        "alone": {"overlap_comm": False},
    }
    link = Rates.given(Hardware(4, 10**10, link=Link(2e9, 1e-6), flops={"fp32": 2e12}))
    found = {}
    for name, more in with_more.items():
        chosen = config | {"zero_optimization": zero | more}
        found[name] = simulate(run(CASES["stage 3"], apart=True, config=chosen).tape, link, 4)
    assert found["overlapped"].seconds < found["alone"].seconds
    assert found["overlapped"].part(NODE).exposed < 0.8 * found["alone"].part(NODE).exposed
    assert found["alone"].part(NODE).exposed == pytest.approx(found["alone"].part(NODE).busy)


def test_states_elsewhere_are_copied_stepped_on_the_host_and_read_from_the_disk(tmp_path: Path) -> None:
    elements = sum(each.numel() for each in _llama().parameters())
    base = Case("", 2, "2", "bf16").config()
    zero = base["zero_optimization"]
    on_host = run(CASES["stage 2"], apart=True, config=base | {
        "zero_optimization": zero | {"offload_optimizer": {"device": "cpu"}}})  # fmt: skip
    updates = [call for call in on_host.tape.computed(on_host=True) if call.name == "update"]
    read = sum(call.bytes for call in updates)
    assert updates and read == pytest.approx(14 * 2 * elements / 2, rel=0.1), "28 bytes an element of this rank's"
    assert not any(call.name == "update" for call in on_host.tape.computed(on_host=False))
    copies = [each for each in on_host.tape.events if isinstance(each, Copy)]
    awaited = {each.number for each in on_host.tape.events if isinstance(each, Wait) and each.on_host}
    assert awaited >= {each.number for each in copies if each.to_host}
    for to_host in (True, False):
        assert sum(c.bytes for c in copies if c.to_host is to_host) == pytest.approx(2 * elements / 2, rel=0.1)
    on_disk = run(CASES["stage 2"], apart=True, config=base | {
        "zero_optimization": zero | {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}})  # fmt: skip
    moved = [each for each in on_disk.tape.events if isinstance(each, TapedCopy)]
    for write in (True, False):
        assert sum(m.bytes for m in moved if m.write is write) == pytest.approx(12 * elements / 2, rel=0.1)
    rates = Rates.given(Hardware(2, 10**10, link=Link(1e12, 0.0)))
    times = {name: simulate(each.tape, rates, 2) for name, each in (("host", on_host), ("disk", on_disk))}
    assert times["host"].part(HOST_STEP).busy > 0 < times["disk"].part(DISK).exposed
    assert times["disk"].seconds > times["host"].seconds


class Foreign(nn.Module):
    """Calls an operation of a library."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return doubled(self.layer(x).detach()).sum() + torch.cdist(self.layer(x), x).sum()


@torch.library.custom_op("shardengine_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Twice ``x``."""
    return x * 2


doubled.register_fake(torch.empty_like)


def test_operations_whose_flops_nobody_knows_are_named() -> None:
    batch = {"x": torch.ones(2, 4)}
    found = dry_run(lambda _: Foreign(), lambda: batch, Case("", 2, "2").config(), ModelPlace(2, 1), lambda loss: loss)
    assert found.tape.unknown["shardengine_tests::doubled"] == 1
    assert any("cdist" in name for name in found.tape.unknown)
    assert simulate(found.tape, Rates.given(Hardware(2, 10**10))).unknown == dict(found.tape.unknown)


_SGD = kernels.Rule("SGD", 0.1)


def test_kernels_without_values_report_themselves() -> None:
    told: list[tuple[str, Any]] = []
    with kernels.without_values(lambda name, given, result: told.append((name, given))):
        weight, gradient = torch.ones(64), torch.ones(64, dtype=torch.bfloat16)
        kernels.flatten([torch.ones(8, 2)], [0], torch.empty(32))
        norm = kernels.sum_of_squares(weight)
        kernels.update({"weight": weight, "gradient": gradient}, Spans([(0, 32)]), _SGD)
    assert [name for name, _ in told] == ["flatten", "sum_of_squares", "update"]
    assert norm.item() == 0, "what happens to lie in memory is no norm: a step would be skipped now and then"


# plan()


def test_a_plan_has_a_time_where_something_is_known_of_speeds() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, device="meta") for _ in range(4)))
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    planned = partial(plan, model, config, batch={"input": torch.zeros(4, 256)}, loss=lambda y: y.sum())
    silent, slow = planned(Hardware.parse("2x24GB")), planned(Hardware.parse("2x24GB", link="1MB/s"))
    assert silent.time is None and silent.as_dict()["time"] is None
    assert slow.time is not None and slow.time.part(NODE).limit > 0.1
    said = slow.as_dict()["time"]
    assert said["seconds"] == slow.time.seconds >= said["bound_seconds"] == slow.time.bound
    given = planned("2x24GB", rates=dataclasses.replace(RATES, flops={"fp32": 1e3}))
    assert given.time is not None and given.time.part(COMPUTE).limit > 100


# This machine


def test_what_is_measured_is_used() -> None:
    found = run(Case("", 1, "0")).tape
    rates = measured(found)
    assert all(0 < rates.seconds(call) == rates.calls[call] < 1 for call in found.calls)
    assert rates.flops["fp32"] > 1e9 and rates.memory > 1e8
    times = simulate(found, rates)
    assert 0 < times.bound <= times.seconds < 10
    large, small = (
        TapedCall("mm", (), "fp32", 0, 0, example=(torch.ops.aten.mm.default, _squares(n))) for n in (512, 16)
    )
    assert timed(large) > 10 * timed(small)


def _squares(size: int) -> Any:
    from shardengine.planner.tape import Shape

    each = Shape((size, size), (size, 1), torch.float32)
    return (each, each), {}
