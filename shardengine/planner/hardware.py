"""The hardware of a run: ranks and the memory of each tier, parsed from and shown as people write it (``4x24GB``).

Must not know: engines.

Sizes are decimal, as on a card's box: 24GB is 24e9 bytes, and a card of that name has at least as many. GiB are binary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardengine.errors import UsageError

LATENCY_S = 10e-6
"""Latency of a link, if none is given."""
RESERVED = 1 << 30
"""Bytes of a GPU that no tensor gets: CUDA's context, and buffers of NCCL and cuBLAS. Declared, not measured."""
_MOST_FLOPS = 1e17
"""FLOP/s. A larger number was given in another unit."""
_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]I?)?(B?)", re.IGNORECASE)
_LINK = re.compile(r"(.+?)/s(?:\s*@\s*([0-9]+(?:\.[0-9]+)?)\s*(us|µs|ms|s))?", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_GPUS = re.compile(r"(?:([0-9]+)\s*[x×*])?\s*(.+)", re.IGNORECASE)


class Link(NamedTuple):
    """The link from a rank to others. bytes_per_s: in each direction at once · latency_s: of a collective."""

    bytes_per_s: float
    latency_s: float

    @classmethod
    def parse(cls, text: str, what: str) -> Link:
        """Parse "50GB/s" or "50GB/s@10us". ``UsageError``, naming ``what``, for anything else."""
        match = _LINK.fullmatch(text.strip())
        if match is None:
            raise UsageError(
                f"{what}: expected a speed and maybe a latency, as 50GB/s@10us, got {text!r}",
                code="hardware-speed-unreadable",
            )
        latency = float(match[2]) * _SECONDS[match[3].lower()] if match[2] else LATENCY_S
        return cls(parse_bytes(match[1], what), latency)


@dataclass(frozen=True)
class Hardware:
    """The ranks of a run, one per device, and their memory.

    device_bytes: memory of one device · host_bytes, disk_bytes: host memory, and disk for the tier nvme, of a node, for
    all of its ranks; None: not checked · node_ranks: ranks of a node; None: all · is_gpu: if False, the device is the
    CPU, whose memory the ranks share.

    For the time of a step (rates): link: from a rank to ranks of other nodes, or to all ranks if there is one node ·
    node_link: to ranks of its own node · flops: FLOP/s of a device by dtype ("bf16", …) · memory_speed: bytes/s of a
    device's memory · disk_speed: bytes/s of a node's disk · None, {}: not given.
    """

    ranks: int
    device_bytes: int
    host_bytes: int | None = None
    disk_bytes: int | None = None
    node_ranks: int | None = None
    is_gpu: bool = True
    link: Link | None = None
    node_link: Link | None = None
    flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    memory_speed: float | None = None
    disk_speed: float | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or (self.node_ranks is not None and (self.node_ranks < 1 or self.ranks % self.node_ranks)):
            raise UsageError(
                f"hardware: expected one rank or more, in whole nodes, got {self.ranks} ranks and "
                f"{self.node_ranks} in a node",
                code="hardware-ranks-not-whole-nodes",
            )
        if self.usable_bytes <= 0:
            raise UsageError(
                f"hardware: expected devices of more than {show_bytes(self.reserved_bytes)}, which CUDA and NCCL take, "
                f"got {show_bytes(self.device_bytes)}",
                code="hardware-device-too-small",
            )

    @classmethod
    def parse(
        cls,
        gpus: str,
        *,
        host_memory: str | None = None,
        nvme: str | None = None,
        node_ranks: int | None = None,
        **speeds: str | None,
    ) -> Hardware:
        """Parse texts: "4x24GB" or "24GB" (one GPU), "128GB", "1TB" or "1TB@6GB/s". ``UsageError`` for others.

        speeds: link, node_link: "50GB/s@10us" · tflops: "312", of bf16 and fp16, or "312,fp32=19.5" · memory: "2TB/s".
        """
        if unknown := sorted(speeds.keys() - {"link", "node_link", "tflops", "memory"}):
            raise TypeError(f"Hardware.parse takes link, node_link, tflops and memory, not {', '.join(unknown)}")
        match = _GPUS.fullmatch(gpus.strip())
        if match is None:
            raise UsageError(
                f"gpus: expected a number and a size, as 4x24GB, got {gpus!r}", code="hardware-gpus-unreadable"
            )
        host = None if host_memory is None else parse_bytes(host_memory, "host memory")
        size, _, speed = (nvme or "").partition("@")
        disk = None if nvme is None else parse_bytes(size, "nvme")
        found = {name: Link.parse(text, name) for name, text in speeds.items() if text and name != "tflops"}
        on_disk = Link.parse(speed, "nvme") if speed else None
        return cls(
            int(match[1] or 1), parse_bytes(match[2], "gpus"), host, disk, node_ranks, link=found.get("link"),
            node_link=found.get("node_link"), flops=_parse_flops(speeds.get("tflops")),
            memory_speed=found["memory"].bytes_per_s if "memory" in found else None,
            disk_speed=None if on_disk is None else on_disk.bytes_per_s,
        )  # fmt: skip

    @property
    def has_speeds(self) -> bool:
        """Whether any speed is given."""
        said = (self.link, self.node_link, self.memory_speed, self.disk_speed)
        return bool(self.flops) or any(each is not None for each in said)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of one device that no tensor gets."""
        return RESERVED if self.is_gpu else 0

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device for tensors."""
        return self.device_bytes - self.reserved_bytes

    def per_rank(self, of_node: int | None) -> int | None:
        """Return a rank's part of its node's bytes; None: not checked."""
        return None if of_node is None else of_node // (self.node_ranks or self.ranks)

    def __str__(self) -> str:
        what = "GPU" if self.is_gpu else "CPU rank"
        host = "" if self.host_bytes is None else f", {show_bytes(self.host_bytes)} of host memory per node"
        disk = "" if self.disk_bytes is None else f", {show_bytes(self.disk_bytes)} of disk"
        return f"{self.ranks} {what}{'s' * (self.ranks > 1)} of {show_bytes(self.device_bytes)}{host}{disk}"


def _parse_flops(text: str | None) -> dict[str, float]:
    """Parse "312" or "312,fp32=19.5", in TFLOP/s. ``UsageError`` for anything else."""
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, is_named, number = part.strip().rpartition("=")
        names = (name.strip(),) if is_named else ("bf16", "fp16")
        try:
            value = float(number) * 1e12
        except ValueError:
            value = 0.0
        if not 0 < value < _MOST_FLOPS or not {*names} <= {"bf16", "fp16", "fp32", "fp64"}:
            raise UsageError(
                f"tflops: expected numbers, as 312 or 312,fp32=19.5, got {text!r}", code="hardware-flops-unreadable"
            )
        found |= dict.fromkeys(names, value)
    return found


def parse_bytes(text: str, what: str) -> int:
    """Parse "24GB", "80 GiB" or "1.5TB". ``UsageError``, naming ``what``, for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]) or not (match[2] or match[3]):
        raise UsageError(f"{what}: expected a size, as 24GB or 80GiB, got {text!r}", code="size-unreadable")
    if match[3] == "b" and (match[2] or "").isupper():
        raise UsageError(
            f"{what}: expected bytes, as 25GB, got {text!r}, which are bits: 8 of them are a byte", code="size-in-bits"
        )
    return round(float(match[1]) * _UNITS[(match[2] or "").upper()])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of equally many cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def show_bytes(count: float) -> str:
    """Format bytes for people: ``16.8 MB`` (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
