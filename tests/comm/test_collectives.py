"""collectives.py: what arrives, what is counted, and what an error says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardengine.comm.collectives import Collectives, Named
from shardengine.comm.flight_recorder import Purpose
from shardengine.comm.frames import ROOM
from shardengine.comm.mesh import Mesh
from shardengine.errors import CommunicationError, MismatchError
from shardengine.kernels import ordered_sum
from tests import oracle
from tests.support.parts import CPU, PARTIAL, REPLICATED, SHARDED, collectives
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
WIDTH = 48


def of_rank(rank: int, ranks: int, *, whole: bool = False) -> torch.Tensor:
    """A tensor of the bucket's full length, other values on every rank; whole: numbers whose sums are exact."""
    values = torch.randn(ranks * WIDTH, generator=torch.Generator().manual_seed(rank))
    return (values * 1000).round() if whole else values


def gathers(broadcasts: bool) -> list[Any]:
    """All-gather of slices, by broadcasts or by the backend's own; and the bytes counted."""
    link = collectives()
    if not broadcasts:
        mesh = link.mesh
        link = collectives(Mesh(mesh.rank, mesh.ranks, CPU, mesh.gather, mesh.reduce, mesh.control, "other"))
    rank, ranks = link.mesh.rank, link.mesh.ranks
    full = torch.full((ranks * WIDTH,), -1.0)
    full[rank * WIDTH : (rank + 1) * WIDTH] = rank
    link.move(full, SHARDED, REPLICATED, Named(["a"]), Purpose.WEIGHTS).wait()
    expected = torch.arange(ranks).repeat_interleave(WIDTH).float()
    return [torch.equal(full, expected), dict(link.sent)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("broadcasts", [True, False])
def test_an_all_gather_brings_every_slice_to_every_rank(pools: Pools, ranks: int, broadcasts: bool) -> None:
    sent = {Purpose.WEIGHTS: (ranks - 1) * WIDTH * 4}
    assert pools(ranks).run(gathers, broadcasts) == [[True, sent]] * ranks


def into(out: Tensor) -> Callable[[Sequence[Tensor]], None]:
    """The local half of a reduce-scatter: the sum goes to ``out``."""
    return lambda terms: ordered_sum(terms, out)


def reduces(direct: bool, in_place: bool) -> list[Any]:
    """Whether this rank's slice is the tree sum in bits, of any numbers (direct) or whole ones; the bytes counted."""
    link = collectives(direct=direct)
    rank, ranks = link.mesh.rank, link.mesh.ranks
    mine = slice(rank * WIDTH, (rank + 1) * WIDTH)
    expected = oracle.tree_sum([of_rank(r, ranks, whole=not direct)[mine] for r in range(ranks)])
    right = True
    for _ in range(2):  # the second time in buffers of the pool
        full = of_rank(rank, ranks, whole=not direct)
        out = full[mine] if in_place else torch.empty(WIDTH)
        link.move(full, PARTIAL, SHARDED, Named(["a"]), Purpose.GRADIENTS, into(out)).wait()
        right &= torch.equal(out, expected)
    return [right, dict(link.sent), link._pool.allocated_bytes]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_direct_reduce_scatter_gives_the_tree_sum_in_bits(pools: Pools, ranks: int, in_place: bool) -> None:
    sent = {Purpose.GRADIENTS: 2 * (ranks - 1) * WIDTH * 4}
    assert pools(ranks).run(reduces, True, in_place) == [[True, sent, ranks * WIDTH * 4]] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_native_reduce_scatter_gives_the_sum_and_sends_the_same_bytes(pools: Pools, ranks: int) -> None:
    sent = {Purpose.GRADIENTS: 2 * (ranks - 1) * WIDTH * 4}
    assert pools(ranks).run(reduces, False, True) == [[True, sent, WIDTH * 4]] * ranks


def smaller_operations() -> list[Any]:
    """Broadcast, exchange and exchange_objects with texts of other lengths on every rank."""
    link = collectives()
    rank = link.mesh.rank
    matrix = torch.full((3, 2), float(rank + 7))
    link.broadcast(matrix, Named(["a"]), Purpose.START)
    rows = link.exchange(torch.tensor([rank, 10 * rank], dtype=torch.uint8))
    link.barrier()
    objects = link.exchange_objects({"name": "é" * 3**rank, "rank": rank} if rank != 1 else None)
    return [matrix.eq(7).all().item(), rows.tolist(), objects, link.sent[Purpose.START]]


def test_control_data_arrives_in_rank_order_whatever_its_length(pools: Pools) -> None:
    objects = [{"name": "é", "rank": 0}, None, {"name": "é" * 9, "rank": 2}]
    expected = [True, [[0, 0], [1, 10], [2, 20]], objects, 16]
    assert pools(3).run(smaller_operations) == [expected] * 3


def different_orders(difference: str) -> str:
    """What debug mode says when ranks issue different collectives."""
    link = collectives(debug=True)
    rank, full = link.mesh.rank, torch.zeros(2 * WIDTH)
    link.move(full, SHARDED, REPLICATED, Named(["same"]), Purpose.WEIGHTS).wait()
    try:
        if difference == "names":
            link.move(full, SHARDED, REPLICATED, Named([f"block {rank}"]), Purpose.WEIGHTS).wait()
        elif rank == 0:
            link.move(full, SHARDED, REPLICATED, Named(["a"], "bucket 3"), Purpose.WEIGHTS).wait()
        else:
            link.move(full, PARTIAL, SHARDED, Named(["a"], "bucket 4"), Purpose.GRADIENTS, into(full[:WIDTH])).wait()
    except MismatchError as error:
        return str(error)
    return "nothing"


def test_debug_mode_says_which_collectives_differ(pools: Pools) -> None:
    for text in pools(2).run(different_orders, "names"):
        assert "rank 0 issues [2 all-gather 192 bytes block 0], rank 1 issues [2 all-gather 192 bytes block 1]" in text
    for text in pools(2).run(different_orders, "operation"):
        assert "rank 0 issues [2 all-gather 192 bytes bucket 3 (a)], rank 1" in text
        assert "rank 1 issues [2 reduce-scatter 192 bytes bucket 4 (a)]" in text


def test_at_one_rank_every_operation_is_the_identity_and_sends_nothing() -> None:
    link = collectives()
    full = of_rank(0, 1)
    link.move(full, SHARDED, REPLICATED, Named(["a"]), Purpose.WEIGHTS).wait()
    link.broadcast(full, Named(["a"]), Purpose.START)
    out = torch.empty(WIDTH)
    link.move(full, PARTIAL, SHARDED, Named(["a"]), Purpose.GRADIENTS, into(out)).wait()
    assert torch.equal(out, of_rank(0, 1)) and torch.equal(full, of_rank(0, 1))
    assert link.exchange(torch.tensor([3], dtype=torch.uint8)).tolist() == [[3]]
    assert link.exchange_objects({"a": [1]}) == [{"a": [1]}]
    link.barrier()
    assert not link.sent


class FakeWork:
    """A collective in flight that fails, or not, when it is waited for."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.waited = 0

    def is_completed(self) -> bool:
        return self.waited > 0

    def wait(self, _timeout: Any = None) -> None:
        self.waited += 1
        if self.fails:
            raise RuntimeError("connection reset")


def second_of_two(**options: Any) -> Collectives:
    return collectives(Mesh(1, 2, CPU, backend="gloo"), **options)


def test_an_error_when_waiting_names_operation_parameters_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda *_args, **_options: FakeWork(fails=True))
    names = [f"block.{i}.weight" for i in range(6)]
    work = second_of_two().move(torch.zeros(2 * WIDTH), SHARDED, REPLICATED, Named(names), Purpose.WEIGHTS)
    with pytest.raises(CommunicationError) as caught:
        work.wait()
    assert str(caught.value).startswith(
        "all-gather number 1 on rank 1 for block.0.weight, block.1.weight, block.2.weight, block.3.weight and 2 more "
        "failed: connection reset. "
    )


def test_an_error_when_starting_names_operation_parameters_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(dist, "all_to_all_single", refuse)
    full = torch.zeros(2 * WIDTH)
    with raises("collective-failed", "reduce-scatter number 1 on rank 1 for a, b", "no route to host"):
        second_of_two().move(full, PARTIAL, SHARDED, Named(["a", "b"]), Purpose.GRADIENTS, into(full[WIDTH:]))


@pytest.mark.parametrize("options", [{"overlap": False}, {"debug": True}])
def test_without_overlap_a_collective_is_over_when_it_is_issued(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    works: list[FakeWork] = []

    def start(*_args: Any, **_options: Any) -> FakeWork:
        works.append(FakeWork())
        return works[-1]

    monkeypatch.setattr(dist, "broadcast", start)
    monkeypatch.setattr(Collectives, "_compare", lambda *_args: None)
    work = second_of_two(**options).move(torch.zeros(2 * WIDTH), SHARDED, REPLICATED, Named(["a"]), Purpose.WEIGHTS)
    assert len(works) == 2 and work.done()


def test_with_overlap_a_collective_is_over_when_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda *_args, **_options: FakeWork())
    work = second_of_two().move(torch.zeros(2 * WIDTH), SHARDED, REPLICATED, Named(["a"]), Purpose.WEIGHTS)
    assert not work.done()
    work.wait()
    assert work.done()


def wait_for_a_slow_rank(late_s: float) -> list[Any]:
    """What arrives from a rank that comes late, and what rank 0 says to the others meanwhile and afterwards."""
    link = collectives()
    full = torch.full((2 * WIDTH,), float(link.mesh.rank))
    said: list[int] = []
    if link.mesh.rank == 1:
        time.sleep(late_s)
        said.append(len(link.failures.waits()))
    link.move(full, SHARDED, REPLICATED, Named(["a"]), Purpose.WEIGHTS).wait()
    link.barrier()
    said.append(len(link.failures.waits()))
    return [full.tolist() == [0.0] * WIDTH + [1.0] * WIDTH, said]


def test_a_wait_of_many_slices_ends_well_and_is_announced_only_while_it_lasts(pools: Pools) -> None:
    assert pools(2).run(wait_for_a_slow_rank, 2.2) == [[True, [0]], [True, [1, 0]]]
    assert pools(2).run(wait_for_a_slow_rank, 0.6) == [[True, [0]], [True, [0, 0]]]


def test_waiting_twice_sums_once() -> None:
    link = collectives()
    full, out = torch.ones(WIDTH), torch.zeros(WIDTH)
    work = link.move(full, PARTIAL, SHARDED, Named(["a"]), Purpose.GRADIENTS, into(out))
    assert not out.any(), "the local part belongs to wait()"
    work.wait()
    full.fill_(5)
    work.wait()
    assert torch.equal(out, torch.ones(WIDTH))


LENGTHS = (0, 1, ROOM - 1, ROOM, ROOM + 1, 3 * ROOM)


def messages_of_any_length() -> list[Any]:
    """Whether each arrives as it was sent: of one length, rank 0's, of lengths that differ between ranks."""
    link = collectives()
    rank, ranks, right = link.mesh.rank, link.mesh.ranks, list[bool]()

    def bytes_of(rank: int, length: int) -> Tensor:
        return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))

    for number, length in enumerate(LENGTHS):
        expected = torch.stack([bytes_of(r, length) for r in range(ranks)])
        right.append(torch.equal(link.exchange(bytes_of(rank, length)), expected))
        right.append(torch.equal(link.hear(bytes_of(rank, length), "a message"), expected[0]))
        texts = ["x" * LENGTHS[(number + r) % len(LENGTHS)] for r in range(ranks)]
        right.append(link.exchange_objects(texts[rank]) == texts)
    return right


def test_messages_arrive_whole_whatever_their_length(pools: Pools) -> None:
    assert pools(3).run(messages_of_any_length) == [[True] * (3 * len(LENGTHS))] * 3


def different_messages(difference: str) -> list[str]:
    """What a rank is told where the last one sends something else, and what it then exchanges with the others."""
    link, said = collectives(), ""
    rank, ranks = link.mesh.rank, link.mesh.ranks
    try:
        if rank < ranks - 1:
            link.exchange(torch.zeros(7, dtype=torch.uint8), "the step")
        elif difference == "kind":
            link.exchange(torch.zeros(7, dtype=torch.uint8), "saving")
        elif difference == "length":
            link.exchange(torch.zeros(9 * ROOM, dtype=torch.uint8), "saving " + "é" * 80)
        else:
            link.exchange_objects([7], "saving")
    except MismatchError as error:
        said = str(error)
    return [said, *link.exchange_objects(rank)]


@pytest.mark.parametrize("difference", ["length", "kind", "objects"])
def test_ranks_that_exchange_different_things_are_told_and_go_on(pools: Pools, difference: str) -> None:
    for rank, (said, *numbers) in enumerate(pools(3).run(different_messages, difference)):
        assert said.startswith("rank 0 is in [the step] where rank 2 is in [saving"), said
        assert "expected every rank to make the same calls of the engine" in said and f"(this is rank {rank})" in said
        assert numbers == [0, 1, 2]
