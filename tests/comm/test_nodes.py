"""nodes.py: which ranks share a node; and reductions in two steps over a played network, with many ranks."""

from __future__ import annotations

import functools
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
from shardengine.comm.group_kind import GroupName
from shardengine.kernels import ordered_sum
from shardengine.offload import BufferPool
from tests import oracle
from tests.support.parts import CPU, PARTIAL, SHARDED
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
ASKED = "expected several nodes with 2, 4, 8, ... consecutive ranks each, but "


def told(*sizes: int, numbered: bool = True) -> list[RankFacts]:
    """Ranks of nodes of these sizes, one node after another, as torchrun tells them; on one host."""
    return [
        RankFacts("a", local_rank=place if numbered else None, local_ranks=size)
        for size in sizes
        for place in range(size)
    ]


def hosts(*names: str) -> list[RankFacts]:
    """Ranks of which no launcher says anything."""
    return [RankFacts(name) for name in names]


CASES: dict[str, tuple[list[RankFacts], int, str]] = {
    "two nodes of two": (told(2, 2), 2, ""),
    "three nodes of eight": (told(8, 8, 8), 3, ""),
    "no number on the node": (told(4, 4, numbered=False), 2, ""),
    "by hosts": (hosts("a", "a", "b", "b"), 2, ""),
    "three ranks": (told(3, 3), 1, "a node has 3 rank(s)"),
    "one rank": (told(1, 1), 1, "a node has 1 rank(s)"),
    "one node": (told(4), 1, "all ranks are on one node"),
    "one host": (hosts("a", "a"), 1, "all ranks are on one node"),
    "uneven": (told(4, 2), 1, "the nodes have 2, 4 ranks"),
    "uneven hosts": (hosts("a", "a", "b", "b", "b"), 1, "the nodes have 2, 3 ranks"),
    "in turn, by hosts": (hosts("a", "b", "a", "b"), 1, "ranks of one host are not consecutive"),
    "in turn": (
        [RankFacts("a", local_rank=place, local_ranks=2) for place in (0, 0, 1, 1)],
        1,
        "ranks 0 to 1 are not, by LOCAL_RANK and LOCAL_WORLD_SIZE, one node",
    ),
    "too few": (told(2, 2)[:3], 1, "ranks 2 to 2 are not, by LOCAL_RANK and LOCAL_WORLD_SIZE, one node"),
}


@pytest.mark.parametrize("name", CASES)
def test_which_ranks_share_a_node(name: str) -> None:
    ranks, number, reason = CASES[name]
    found = nodes.find(ranks)
    assert (found.number, found.problem) == (number, f"{ASKED}{reason}" if reason else "")
    alike = {"a node has 3 rank(s)": 3, "a node has 1 rank(s)": 1, "all ranks are on one node": len(ranks), "": 0}
    if number > 1:
        assert (found.size, found.unlike) == (len(ranks) // number, "")
    else:
        assert (found.size, found.unlike) == ((alike[reason], "") if reason in alike else (0, reason))
    if found.size:
        assert nodes.alike(len(ranks), found.size) == found


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
            rank, ranks, CPU, backend="gloo", wire=PlayedWire(network, rank), nodes=nodes.Nodes(count),
            node_groups={GroupName.INSIDE: groups[0], GroupName.ACROSS: groups[1]},
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


def build_as(sizes: Sequence[int]) -> tuple[nodes.Nodes, list[list[int]]]:
    """``mesh.build`` on nodes of these sizes: which are found, the members of both groups."""
    places = [(str(size), str(place)) for size in sizes for place in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip((LOCAL_SIZE, LOCAL_RANKS[0]), places[dist.get_rank()], strict=True):
            patch.setitem(os.environ, name, value)
        made = mesh.build(CPU, 60, owned=True)
    assert not made.node_groups  # before an engine reduces over them
    before = made.renew()
    assert not before.node_groups
    if made.nodes.number > 1:
        before.make_node_groups()
    members = [dist.get_process_group_ranks(group) for group in before.node_groups.values()]
    after = before.renew()  # ends the groups, and makes others
    assert [dist.get_process_group_ranks(group) for group in after.node_groups.values()] == members
    held = after._groups()
    if members:
        after.make_node_groups()  # they are there
    assert held == after._groups() and len(held) == 4 + len(members)
    after.destroy()
    for group in [*before.node_groups.values(), *held.values()]:
        with pytest.raises(ValueError, match=r"[Ii]nvalid process group"):
            dist.destroy_process_group(group)
    return made.nodes, members


def test_each_node_has_a_group_and_each_place(pools: Pools) -> None:
    two = nodes.Nodes(2, size=2)
    assert pools(4).run(build_as, (2, 2)) == [
        (two, [[0, 1], [0, 2]]), (two, [[0, 1], [1, 3]]), (two, [[2, 3], [0, 2]]), (two, [[2, 3], [1, 3]]),
    ]  # fmt: skip
    one = nodes.Nodes(1, f"{ASKED}all ranks are on one node", size=3)
    assert pools(3).run(build_as, (3,)) == [(one, [])] * 3
