"""nodes.py: which ranks share a node; and reductions in two steps over a played network, with many ranks."""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardengine.comm import Collectives, Mesh, Named, Purpose, Wire, Work, mesh, nodes
from shardengine.comm.devices import LOCAL_RANKS, LOCAL_SIZE, RankFacts
from shardengine.kernels import ordered_sum
from shardengine.offload import BufferPool
from tests import oracle
from tests.support.parts import CPU, PARTIAL, SHARDED
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
ASKED = "hierarchical_reduce: expected several nodes with 2, 4, 8, ... consecutive ranks each, but "


def told(*sizes: int, wish: bool | None = True, numbered: bool = True) -> list[RankFacts]:
    """Ranks of nodes of these sizes, one node after another, as torchrun tells them; on one host."""
    return [
        RankFacts("a", local_rank=place if numbered else None, local_ranks=size, hierarchical=wish)
        for size in sizes
        for place in range(size)
    ]


def hosts(*names: str, wish: bool | None = True) -> list[RankFacts]:
    """Ranks of which no launcher says anything."""
    return [RankFacts(name, hierarchical=wish) for name in names]


CASES: dict[str, tuple[list[RankFacts], str, int, str]] = {
    "two nodes of two": (told(2, 2), "gloo", 2, ""),
    "three nodes of eight": (told(8, 8, 8), "gloo", 3, ""),
    "no number on the node": (told(4, 4, numbered=False), "gloo", 2, ""),
    "by hosts": (hosts("a", "a", "b", "b"), "gloo", 2, ""),
    "null on NCCL": (told(2, 2, wish=None), "nccl", 2, ""),
    "null on gloo": (told(2, 2, wish=None), "gloo", 1, ""),
    "false": (told(2, 2, wish=False), "nccl", 1, ""),
    "null on NCCL, where it does not apply": (told(3, 3, wish=None), "nccl", 1, ""),
    "configs that differ": ([*told(2, wish=None), *told(2)], "nccl", 1, ""),
    "three ranks": (told(3, 3), "gloo", 1, "a node has 3 rank(s)"),
    "one rank": (told(1, 1), "gloo", 1, "a node has 1 rank(s)"),
    "one node": (told(4), "gloo", 1, "all ranks are on one node"),
    "one host": (hosts("a", "a"), "gloo", 1, "all ranks are on one node"),
    "uneven": (told(4, 2), "gloo", 1, "the nodes have 2, 4 ranks"),
    "uneven hosts": (hosts("a", "a", "b", "b", "b"), "gloo", 1, "the nodes have 2, 3 ranks"),
    "in turn, by hosts": (hosts("a", "b", "a", "b"), "gloo", 1, "ranks of one host are not consecutive"),
    "in turn": (
        [RankFacts("a", local_rank=place, local_ranks=2, hierarchical=True) for place in (0, 0, 1, 1)],
        "gloo",
        1,
        "ranks 0 to 1 are not, by LOCAL_RANK and LOCAL_WORLD_SIZE, one node",
    ),
    "too few": (told(2, 2)[:3], "gloo", 1, "ranks 2 to 2 are not, by LOCAL_RANK and LOCAL_WORLD_SIZE, one node"),
}


@pytest.mark.parametrize("name", CASES)
def test_which_ranks_share_a_node(name: str) -> None:
    ranks, backend, number, reason = CASES[name]
    found = nodes.choose(ranks, backend)
    assert found.number == number
    assert found.unused == (f"{ASKED}{reason}; gradients are reduced in one step" if reason else "")


# Over a played network


@dataclass
class Network:
    """What all ranks of one process have sent over it: by group, how often each rank has."""

    waiting: dict[tuple[Any, int], dict[int, tuple[Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(dict))
    sent: Counter[tuple[str, int]] = field(default_factory=Counter)

    def settle(self) -> None:
        """Carry out what all ranks of a group have issued."""
        for (group, number), given in list(self.waiting.items()):
            _, members = group
            if given.keys() == set(members):
                del self.waiting[group, number]
                parts = {rank: full.clone().chunk(len(members)) for rank, (_, full) in given.items()}
                for place, rank in enumerate(members):
                    given[rank][0].copy_(torch.cat([parts[other][place] for other in members]))


@dataclass
class PlayedWire(Wire):
    """One rank's. A group here is its name and its members."""

    network: Network
    rank: int
    issued: Counter[Any] = field(default_factory=Counter)

    def all_to_all(self, out: Tensor, full: Tensor, group: Any) -> Any:
        name, members = group
        self.issued[group] += 1
        key = (group, self.issued[group])
        self.network.waiting[key][self.rank] = (out, full)
        self.network.sent[name, self.rank] += full.nbytes * (len(members) - 1) // len(members)
        out.fill_(torch.nan)  # nothing is there before everybody has sent
        return PlayedWork(self.network, key)


@dataclass
class PlayedWork:
    network: Network
    key: Any

    def is_completed(self) -> bool:
        self.network.settle()
        return self.key not in self.network.waiting

    def wait(self, timeout: Any = None) -> None:
        assert self.is_completed(), f"a wait for {self.key}, which not everybody has issued"


def play(ranks: int, count: int, wire: torch.dtype, reduce: torch.dtype, length: int) -> tuple[list[Tensor], Network]:
    """Two buckets, both issued before one is waited for: each rank's slices, and what was sent."""
    network, found = Network(), []
    inside, across = nodes.members(ranks, count)
    everyone: list[list[Work]] = []
    outs: list[list[Tensor]] = []
    for rank in range(ranks):
        groups = [
            ("inside", tuple(inside[rank // (ranks // count)])),
            ("across", tuple(across[rank % (ranks // count)])),
        ]
        made = Mesh(
            rank, ranks, CPU, backend="gloo", wire=PlayedWire(network, rank), nodes=count,
            inside=groups[0], across=groups[1],  # type: ignore[arg-type]
        )  # fmt: skip
        link = Collectives(made, BufferPool(made.platform), reduce_dtype=reduce, hierarchical=True)
        outs.append([torch.empty(length) for _ in range(2)])
        everyone.append([])
        for bucket, out in enumerate(outs[-1]):
            full = term(rank, bucket, ranks * length, wire)
            add = functools.partial(ordered_sum, out=out, divisor=ranks, rounded=wire, reduce_dtype=reduce)
            everyone[-1].append(link.move(full, PARTIAL, SHARDED, Named(["a"]), Purpose.GRADIENTS, add))
        found.append(link)
    for bucket in range(2):
        over = [works[bucket].done() for works in everyone]
        assert not over[0] and over[-1]  # the second step begins where the first is found done
        for works in everyone:
            works[bucket].wait()
    for link in found:
        assert link.sent[Purpose.GRADIENTS] == sum(size for (_, r), size in network.sent.items() if r == link.mesh.rank)
    return [torch.cat(each) for each in outs], network


def term(rank: int, bucket: int, length: int, dtype: torch.dtype) -> Tensor:
    values = torch.randn(length, generator=torch.Generator().manual_seed(1000 * bucket + rank))
    return (values * 3.0**values).to(dtype)  # of very different sizes: another order of summation shows


DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize(("wire", "reduce"), DTYPES)
@pytest.mark.parametrize(
    ("ranks", "count"), [(4, 2), (6, 3), (12, 3), (32, 4), (40, 5), (48, 3), (56, 7), (64, 2), (64, 8), (64, 32)]
)
def test_two_steps_give_the_bits_of_the_declared_tree(
    ranks: int, count: int, wire: torch.dtype, reduce: torch.dtype
) -> None:
    length, size = 5, ranks // count
    found, network = play(ranks, count, wire, reduce, length)
    for rank, values in enumerate(found):
        expected = []
        for bucket in range(2):
            mine = slice(rank * length, (rank + 1) * length)
            terms = [term(each, bucket, ranks * length, wire)[mine].float() for each in range(ranks)]
            expected.append((oracle.tree_sum(terms, reduce) / ranks).to(wire).float())
        assert torch.equal(values, torch.cat(expected)), f"rank {rank} of {ranks} on {count} nodes"
        elements = 2 * length * ranks
        assert network.sent["inside", rank] == wire.itemsize * elements * (ranks - count) // ranks
        assert network.sent["across", rank] == reduce.itemsize * elements * (count - 1) // ranks
        in_one_step = wire.itemsize * elements * (ranks - size) // ranks
        assert network.sent["across", rank] * wire.itemsize * size == in_one_step * reduce.itemsize


# Groups of processes


def build_as(sizes: Sequence[int], wish: bool | None) -> tuple[int, list[list[int]], list[str]]:
    """``mesh.build`` on nodes of these sizes: how many there are, the members of both groups, what was logged."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    places = [(str(size), str(place)) for size in sizes for place in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip((LOCAL_SIZE, LOCAL_RANKS[0]), places[dist.get_rank()], strict=True):
            patch.setitem(os.environ, name, value)
        logging.getLogger("shardengine").addHandler(handler)
        try:
            made = mesh.build(CPU, 60, owned=True, hierarchical_reduce=wish)
        finally:
            logging.getLogger("shardengine").removeHandler(handler)
    again = made.renew()  # ends the groups, and makes others
    found = [dist.get_process_group_ranks(group) for group in (again.inside, again.across) if group is not None]
    assert made.nodes == again.nodes and (made.inside is None) is (again.inside is None)
    assert again.inside is not made.inside or made.inside is None
    held = again._groups()
    again.destroy()
    for group in held.values():
        with pytest.raises(ValueError, match=r"[Ii]nvalid process group"):
            dist.destroy_process_group(group)
    return made.nodes, found, logged


def test_each_node_has_a_group_and_each_place(pools: Pools) -> None:
    found = pools(4).run(build_as, (2, 2), True)
    assert found == [
        (2, [[0, 1], [0, 2]], []), (2, [[0, 1], [1, 3]], []), (2, [[2, 3], [0, 2]], []), (2, [[2, 3], [1, 3]], []),
    ]  # fmt: skip
    assert pools(4).run(build_as, (2, 2), None) == [(1, [], [])] * 4


@pytest.mark.parametrize(
    ("sizes", "reason"), [((3,), "all ranks are on one node"), ((2, 1), "the nodes have 1, 2 ranks")]
)
def test_where_it_does_not_apply_rank_0_says_why(pools: Pools, sizes: tuple[int, ...], reason: str) -> None:
    first, *others = pools(3).run(build_as, sizes, True)
    assert first[:2] == (1, []) and others == [(1, [], [])] * 2
    assert first[2] == [f"{ASKED}{reason}; gradients are reduced in one step"]
