"""Speeds of a run's hardware: calculations, memory, links between ranks, copies and disks.

Owns: the speeds declared for a GPU, the time of a single event, and its physical limit. Must not know: what overlaps
(replay), how a machine is measured (calibration).

[Note: Given rates] For a GPU that was not measured, the data sheet gives limits. An operation takes the longer of the
times for its FLOPs and for its bytes, each at a declared share of the limit, and no less than ``operation_s``. A
collective of B bytes over N ranks lasts α + β·B. β is the traffic of an optimal algorithm over the slowest link between
the ranks: (N-1)/N of the bytes if all links have one speed. With n ranks in a node and faster links inside it, a gather
sends (N-n)/(N·n) of the bytes between nodes for each rank, and an all-to-all (N-n)/N.

[Note: Measured rates] For a machine that was measured (calibration), shares are 1, a collective is the fit of its group
(``GroupSpeed``), and each operation of a tape may have a time of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardengine.comm import GroupName, GroupSpeed
from shardengine.planner.hardware import Hardware, Link
from shardengine.planner.tape import Copy, TapeBegin, TapedCall, TapedCopy

A_GPU: Mapping[str, float] = {
    "bf16": 312e12, "fp16": 312e12, "fp32": 19.5e12, "fp64": 9.7e12, "memory": 2.0e12,
    "copies": 25e9, "disk": 3e9, "host memory": 20e9,
    "matrix share": 0.55, "memory share": 0.75, "operation": 4e-6, "exchange": 100e-6,
}  # fmt: skip
"""Declared for a GPU if no other numbers are given, by the data sheet of an A100 of 80 GB. FLOP/s by dtype (without
TF32); bytes/s of its memory, of copies to and from the host each (PCIe 4), of a disk, and of the host's memory per
rank; the shares of the limits that products and other operations reach; the least seconds of an operation; the seconds
of an exchange of the host's messages."""
NODE_LINK, LINK = Link(200e9, 10e-6), Link(25e9, 20e-6)
"""Declared links of a rank inside a node, and between nodes, if no others are given."""
COMPUTE, HOST_STEP, TO_HOST, TO_DEVICE, DISK, BESIDE, PYTHON = (
    "compute", "host step", "copies to host", "copies to device", "disk", "other streams", "Python"
)  # fmt: skip
FLOPS_IN = "FLOP/s in"
"""Prefix of the name of an assumed FLOP/s of a dtype."""
NODE, NETWORK, CONTROL = "links in a node", "links between nodes", "control"


class Speed(NamedTuple):
    """The speed of a collective. link: that it occupies · limit_s: seconds for its bytes alone, without latency."""

    link: str
    seconds: float
    limit_s: float


@dataclass(frozen=True)
class Rates:
    """Speeds of hardware, given or measured.

    flops: limits in FLOP/s by dtype · memory: limit in bytes/s · matrix_share, memory_share: the shares of these that
    operations reach · operation_s: the least seconds of one operation · calls: measured seconds of single operations ·
    groups: fits of collectives, by group · node_link, link: for groups without a fit · node_ranks: ranks of a node; 0:
    all · exchange_s: seconds of an exchange of the host's messages · copies: bytes/s to the host, and as many to the
    device · disk: bytes/s of a node's disk · host_memory: bytes/s of a rank's step on the host.

    If the device is the CPU: cores: of a node, for its ranks; 0: enough · dispatch_s: seconds of Python for each
    operation that torch dispatches · bucket_s: the same for each collective and each kernel of the engine.

    assumed: names of the speeds that are declared, because none were given.
    """

    flops: Mapping[str, float]
    memory: float
    matrix_share: float = 1.0
    memory_share: float = 1.0
    operation_s: float = 0.0
    calls: Mapping[TapedCall, float] = field(default_factory=dict, repr=False)
    groups: Mapping[str, GroupSpeed] = field(default_factory=dict)
    node_link: Link = NODE_LINK
    link: Link = LINK
    node_ranks: int = 0
    exchange_s: float = 0.0
    copies: float = A_GPU["copies"]
    disk: float = A_GPU["disk"]
    host_memory: float = A_GPU["host memory"]
    cores: int = 0
    dispatch_s: float = 0.0
    bucket_s: float = 0.0
    assumed: Sequence[str] = ()

    @classmethod
    def given(cls, hardware: Hardware) -> Rates:
        """Return the rates of GPUs from ``hardware``, and from ``A_GPU`` if it gives none ([Note: Given rates])."""
        names = ("bf16", "fp16", "fp32", "fp64")
        known = {name: hardware.flops.get(name, A_GPU[name]) for name in names}
        one_node = hardware.node_ranks in (None, hardware.ranks)
        asked = {
            **{f"{FLOPS_IN} {name}": name in hardware.flops for name in names}, "memory": bool(hardware.memory_speed),
            TO_HOST: False, TO_DEVICE: False, HOST_STEP: False,
            "links in a node": hardware.node_link is not None or (one_node and hardware.link is not None),
            "links between nodes": one_node or hardware.link is not None, "disk": bool(hardware.disk_speed),
        }  # fmt: skip
        link = hardware.link or LINK
        near = hardware.node_link or (hardware.link if one_node and hardware.link is not None else NODE_LINK)
        return cls(
            known, hardware.memory_speed or A_GPU["memory"], A_GPU["matrix share"], A_GPU["memory share"],
            A_GPU["operation"], node_link=near, link=link, node_ranks=hardware.node_ranks or 0,
            exchange_s=A_GPU["exchange"], disk=(hardware.disk_speed or A_GPU["disk"]),
            assumed=tuple(name for name, said in asked.items() if not said),
        )  # fmt: skip

    def per_rank_disk(self, ranks: int) -> float:
        """Return the bytes/s of a node's disk that each of its ranks gets."""
        return self.disk / (self.node_ranks or ranks)

    def limit_of(self, call: TapedCall) -> float:
        """Return the least seconds for the call's FLOPs."""
        return call.flops / self.flops[call.dtype] if call.flops and call.dtype in self.flops else 0.0

    def seconds(self, call: TapedCall, *, on_host: bool = False) -> float:
        """Return the seconds of an operation. on_host: it runs in host memory, and the device is a GPU."""
        if (measured := self.calls.get(call)) is not None:
            return measured
        if on_host:
            return call.bytes / self.host_memory
        products = self.limit_of(call) / self.matrix_share
        return max(products, call.bytes / (self.memory * self.memory_share), self.operation_s)

    def collective(self, begun: TapeBegin, members: Sequence[int]) -> Speed:
        """Return the time of a collective by itself, and the link that it occupies."""
        if begun.group == GroupName.CONTROL:
            return Speed(CONTROL, self.exchange_s, 0.0)
        count = len(members)
        fit = self.groups.get(begun.group) or self.groups.get("")
        if fit is not None:  # the fit is for whole buckets; a broadcast sends a part of one
            latency = fit.latency_s / count if begun.operation == "broadcast" else fit.latency_s
            return Speed(NODE, latency + fit.s_per_byte * begun.bytes, fit.s_per_byte * begun.bytes)
        size = self.node_ranks or 1 << 30
        nodes = len({rank // size for rank in members})
        inside, between = _shares(begun.operation, count, count // nodes)
        near, far = inside * begun.bytes / self.node_link.bytes_per_s, between * begun.bytes / self.link.bytes_per_s
        chosen = (NETWORK, far, self.link) if nodes > 1 and far >= near else (NODE, near, self.node_link)
        latency = self.link.latency_s if nodes > 1 else self.node_link.latency_s
        return Speed(chosen[0], latency + chosen[1], chosen[1])

    def copy(self, copied: Copy) -> float:
        """Return the seconds of a copy."""
        return copied.bytes / self.copies

    def transfer(self, moved: TapedCopy, ranks: int) -> float:
        """Return the seconds of a disk transfer, while all ranks of the node transfer."""
        return moved.bytes / self.per_rank_disk(ranks)


def _shares(operation: str, count: int, near: int) -> tuple[float, float]:
    """Return the parts of a collective's bytes that one of ``count`` ranks sends: inside its node, and to other nodes.

    near: ranks of its node, itself included ([Note: Given rates]).
    """
    if operation == "broadcast":
        return 1.0, 1.0 / near
    if operation == "all_to_all":
        return (near - 1) / count, (count - near) / count
    return (count - 1) / count if near > 1 else 0.0, (count - near) / (count * near)
