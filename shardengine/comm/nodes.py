"""Which ranks share a node, and whether gradients can be added there first. Owns: the rules, and [Note: Two steps].

Must not know: process groups, buckets, whether gradients are added there first (collectives). As for the device, each
rank computes the same result from the facts of all ranks.

[Note: Two steps] The declared tree ((0+1)+(2+3))+… (kernels: [Note: One arithmetic]) adds L = 2^k consecutive ranks
that begin at a multiple of L before their sum meets another rank's. So if every node has the same 2^k consecutive
ranks, a reduce-scatter may be cut in two with the same bits: inside each node, then between the nodes for each place in
them. A rank sends

    in one step     over the network  g·Ψ·(N−L)/N
    in two steps    inside of a node  g·Ψ·(N−M)/N,   over the network  s·Ψ·(M−1)/N

of Ψ elements, with N ranks on M = N/L nodes, g bytes per gradient and s bytes per sum: 4, or those of ``reduce_dtype``,
which every sum is rounded to anyway. Over the network that is s/(g·L) of the bytes of one step: with L = 8 an eighth in
fp32, a quarter in bf16 with sums in fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shardengine.comm.devices import RankFacts


@dataclass(frozen=True)
class Nodes:
    """The nodes of a mesh.

    number: how many there are; 1: a reduction in two steps is not possible · problem: why not; "" otherwise · size:
    ranks of each node, which are consecutive; 0: the nodes differ · unlike: how they differ.
    """

    number: int = 1
    problem: str = ""
    size: int = 0
    unlike: str = ""


def find(ranks: Sequence[RankFacts]) -> Nodes:
    """Return the nodes from the facts of all ranks."""
    return _of(*_sizes(ranks))


def alike(ranks: int, size: int) -> Nodes:
    """Return the nodes if each has ``size`` consecutive ranks of ``ranks``."""
    return _of([size] * (ranks // size))


def _of(sizes: Sequence[int], unlike: str = "") -> Nodes:
    size = sizes[0]
    if not unlike and len(set(sizes)) > 1:
        unlike = f"the nodes have {', '.join(map(str, sorted(set(sizes))))} ranks"
    reason = unlike
    if not reason and len(sizes) == 1:
        reason = "all ranks are on one node"
    elif not reason and (size == 1 or size & (size - 1)):
        reason = f"a node has {size} rank(s)"
    if not reason:
        return Nodes(len(sizes), size=size)
    problem = f"expected several nodes with 2, 4, 8, ... consecutive ranks each, but {reason}"
    return Nodes(problem=problem, size=0 if unlike else size, unlike=unlike)


def _sizes(ranks: Sequence[RankFacts]) -> tuple[list[int], str]:
    """Return the sizes of the nodes, in the order of their ranks, and why ranks of one node are not consecutive, or "".

    The launcher's LOCAL_WORLD_SIZE counts if all ranks have it, else the names of the hosts.
    """
    if any(each.local_ranks is None for each in ranks):
        runs = [(host, len([*run])) for host, run in itertools.groupby(each.host for each in ranks)]
        apart = len({host for host, _ in runs}) < len(runs)
        return [count for _, count in runs], "ranks of one host are not consecutive" if apart else ""
    sizes, first = list[int](), 0
    while first < len(ranks):
        size = max(1, ranks[first].local_ranks or 0)
        node = ranks[first : first + size]
        places = [
            (each.local_ranks, place if each.local_rank is None else each.local_rank) for place, each in enumerate(node)
        ]
        if places != [(size, place) for place in range(size)]:
            return [
                size
            ], f"ranks {first} to {first + len(node) - 1} are not, by LOCAL_RANK and LOCAL_WORLD_SIZE, one node"
        sizes.append(size)
        first += size
    return sizes, ""


def members(ranks: int, nodes: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of each node, and those that have the same place in theirs; the same for shard groups."""
    size = ranks // nodes
    inside = [[*range(first, first + size)] for first in range(0, ranks, size)]
    return inside, [[*range(place, ranks, size)] for place in range(size)]
