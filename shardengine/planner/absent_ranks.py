"""Stands in for the other ranks: an engine in one process runs as one rank of many.

Owns: the answers of collectives and of the store. Must not know: the content of messages, how plans use the answers.

Nothing is sent. On the host, the engine gets answers as if every other rank had sent the same as this one. On the
device it needs no data, because tensors have no values there (``without_values``).
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
from shardengine.planner.tape import TapeBegin, TapeRecorder, Wait


class Silent(dist.Work):
    """A collective that moves nothing, and is complete once ``wait`` was called. waited: called at each wait."""

    def __init__(self, waited: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._over, self._waited = False, waited

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        self._waited()
        self._over = True
        return True

    def is_completed(self) -> bool:
        """Whether ``wait`` was called."""
        return self._over


class Issued(NamedTuple):
    """A collective. group: its group's name · bytes: the size of the larger tensor, input or output."""

    operation: str
    group: str
    bytes: int


class SilentWire(Wire):
    """Carries nothing. Real tensors are gathered as if every rank had sent the same values.

    issued: each collective, in order · recorder: writes it to the tape as well · host_waits: if True, a wait for any
    collective blocks the host; if False, only a wait on the control group does.
    """

    def __init__(self, ranks: int, recorder: TapeRecorder | None = None, *, host_waits: bool = True) -> None:
        self.issued: list[Issued] = []
        self._ranks, self._recorder, self._host_waits = ranks, recorder, host_waits

    def broadcast(self, tensor: Tensor, source: int, group: Any) -> dist.Work:
        """See ``Wire``."""
        return self._begin("broadcast", group, tensor)

    def all_gather(self, out: Tensor, own: Tensor, group: Any) -> dist.Work:
        """See ``Wire``."""
        from torch._subclasses.fake_tensor import FakeTensor

        if not isinstance(own, FakeTensor):  # real: a few numbers (sums of squares), undefined without a copy
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
        recorder.note(TapeBegin(number, *found))
        return Silent(lambda: recorder.note(Wait(number, on_host)))


class EchoStore:
    """A store that answers as if every rank had written this rank's texts.

    A key that ends in a rank's number is mapped to this rank's key.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._texts: dict[str, str] = {}
        self._numbers: Counter[str] = Counter()

    def _own(self, key: str) -> str:
        return re.sub(r"/\d+$", f"/{self._rank}", key)

    def set(self, key: str, value: str) -> None:
        """Write a text."""
        self._texts[key] = value

    def get(self, key: str) -> bytes:
        """Return the text; "" if none was written."""
        return self._texts.get(self._own(key), "").encode()

    def check(self, keys: list[str]) -> bool:
        """True: every rank counts as having written, if only an empty text."""
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0; return the sum."""
        self._numbers[key] += amount
        return self._numbers[key]

    def delete_key(self, key: str) -> bool:
        """Keep the text, and return True."""
        return True


class NamedGroups(GroupKind):
    """Process groups that are only names."""

    def make_parts(self, timeout_s: float, device: torch.device, members: Any, *, alone: bool) -> dict[GroupName, Any]:
        """See ``GroupKind``."""
        return {name: str(name) for name in members}

    def end(self, groups: Any) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class AbsentMesh(Mesh):
    """The mesh of one rank whose peers do not exist. Its groups are names."""

    echo: EchoStore = field(default_factory=lambda: EchoStore(0), compare=False, repr=False)

    def store(self) -> Any:
        """The store that echoes this rank."""
        return self.echo

    def store_host(self) -> int | None:
        """None: no rank hosts the store."""
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
    """Return the mesh of ``rank`` among ``ranks`` on ``device``, as with ``backend`` "gloo" or "nccl".

    platform: makes the platform of a device · node_ranks: ranks of each node; 0: all ranks are in one node.
    """
    names: dict[str, Any] = {str(name): str(name) for name in (GroupName.GATHER, GroupName.REDUCE, GroupName.CONTROL)}
    if backend == "gloo":
        names[str(GroupName.EVALUATE)] = str(GroupName.EVALUATE)
    if ranks == 1:
        names, backend = {}, "none"
    more: dict[str, Any] = {"wire": wire, "platform_of": platform, "kind": NamedGroups(), "echo": EchoStore(rank)}
    more["nodes"] = nodes.alike(ranks, node_ranks or ranks)
    return AbsentMesh(rank, ranks, device, **names, backend=backend, **more)
