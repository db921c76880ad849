"""The other ranks, where they are not there: an engine that believes to be one of many, in one process.

Owns: what collectives and the store answer. Must not know: what is sent, what a plan makes of it.

Nothing is sent. What an engine asks of the other ranks on the host is answered as if each had said what this one says;
of the device's data nothing is needed, because tensors have no values there (``without_values``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardengine.comm import GroupKind, GroupName, Mesh, Wire, nodes
from shardengine.offload import Platform
from shardengine.planner.tape import Begin, Recorder, Wait


class Silent(dist.Work):
    """A collective that moves nothing. It is over when somebody has waited for it. waited: is told of each wait."""

    def __init__(self, waited: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._over, self._waited = False, waited

    def wait(self, timeout: Any = None) -> bool:
        """At once."""
        self._waited()
        self._over = True
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited."""
        return self._over


class Issued(NamedTuple):
    """A collective. group: the name of its group · bytes: of the larger of what is given and what is received."""

    operation: str
    group: str
    bytes: int


class SilentWire(Wire):
    """Carries nothing. What is on the control group, and what has values, is received as if every rank had sent the
    same.

    issued: each collective, in order · recorder: writes it down, too · host_waits: the host stands still for all
    collectives, not for those of the control group alone.
    """

    def __init__(self, ranks: int, recorder: Recorder | None = None, *, host_waits: bool = True) -> None:
        self.issued: list[Issued] = []
        self._ranks, self._recorder, self._host_waits = ranks, recorder, host_waits

    def broadcast(self, tensor: Tensor, source: int, group: Any) -> dist.Work:
        """See ``Wire``."""
        return self._begin("broadcast", group, tensor)

    def all_gather(self, out: Tensor, own: Tensor, group: Any) -> dist.Work:
        """See ``Wire``."""
        from torch._subclasses.fake_tensor import FakeTensor

        if not isinstance(own, FakeTensor):  # sums of squares are a few numbers, which would be what lies in memory
            out.view(self._ranks, -1).copy_(own.clone())
        return self._begin("all_gather", group, out, own)

    def reduce_scatter(self, out: Tensor, full: Tensor, group: Any) -> dist.Work:
        """See ``Wire``."""
        return self._begin("reduce_scatter", group, out, full)

    def all_to_all(self, out: Tensor, full: Tensor, group: Any) -> dist.Work:
        """See ``Wire``."""
        return self._begin("all_to_all", group, out, full)

    def all_to_all_of(
        self, out: Tensor, received: Sequence[int], full: Tensor, sent: Sequence[int], group: Any
    ) -> dist.Work:
        """See ``Wire``."""
        return self._begin("all_to_all", group, out, full)

    def _begin(self, name: str, group: Any, *tensors: Tensor) -> dist.Work:
        found = Issued(name, str(group), max(tensor.nbytes for tensor in tensors))
        self.issued.append(found)
        if (recorder := self._recorder) is None:
            return Silent()
        number, on_host = recorder.number(), self._host_waits or group == GroupName.CONTROL
        recorder.note(Begin(number, *found))
        return Silent(lambda: recorder.note(Wait(number, on_host)))


class EchoStore:
    """A store in which every rank has written what this one has: a key that ends in a rank's number is this rank's."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._texts: dict[str, str] = {}
        self._numbers: Counter[str] = Counter()

    def _own(self, key: str) -> str:
        return re.sub(r"/\d+$", f"/{self._rank}", key)

    def set(self, key: str, value: str) -> None:
        """Put a text."""
        self._texts[key] = value

    def get(self, key: str) -> bytes:
        """The text; "" where none was put."""
        return self._texts.get(self._own(key), "").encode()

    def check(self, keys: list[str]) -> bool:
        """Always: the other ranks have put what this one has, if only nothing."""
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0; the new one."""
        self._numbers[key] += amount
        return self._numbers[key]

    def delete_key(self, key: str) -> bool:
        """Nothing is forgotten."""
        return True


class NamedGroups(GroupKind):
    """Groups that are their names."""

    def make_parts(self, timeout_s: float, device: torch.device, members: Any, *, alone: bool) -> dict[GroupName, Any]:
        """See ``GroupKind``."""
        return {name: str(name) for name in members}

    def end(self, groups: Any) -> None:
        """There is nothing to end."""


@dataclass(frozen=True)
class AbsentMesh(Mesh):
    """One rank among others that are not there. Groups are known by their names."""

    echo: EchoStore = field(default_factory=lambda: EchoStore(0), compare=False, repr=False)

    def store(self) -> Any:
        """What echoes this rank."""
        return self.echo

    def store_host(self) -> int | None:
        """No rank hosts it."""
        return None


def absent_mesh(
    ranks: int,
    rank: int,
    device: torch.device,
    *,
    backend: str,
    platform: Callable[[torch.device], Platform],
    wire: Wire,
    node_ranks: int = 0,
) -> AbsentMesh:
    """``rank`` of ``ranks`` on ``device``, used as ``backend`` ("gloo" or "nccl") is. platform: what makes the
    device's platform · node_ranks: of each node, 0: all."""
    names: dict[str, Any] = {str(name): str(name) for name in (GroupName.GATHER, GroupName.REDUCE, GroupName.CONTROL)}
    if backend == "gloo":
        names[str(GroupName.EVALUATE)] = str(GroupName.EVALUATE)
    if ranks == 1:
        names, backend = {}, "none"
    more: dict[str, Any] = {"wire": wire, "platform_of": platform, "kind": NamedGroups(), "echo": EchoStore(rank)}
    more["nodes"] = nodes.alike(ranks, node_ranks or ranks)
    return AbsentMesh(rank, ranks, device, **names, backend=backend, **more)
