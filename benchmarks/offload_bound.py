"""What a step with its optimizer on the CPU takes at best on this machine: rates measured here, and the formula.

Owns: the rates (bf16 product, both directions between device and host, the host's triad) and the bound of
docs/limits.md, "Time of a step". Knows nothing of competitors and reports.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from benchmarks.device import peak_flops, seconds_per_call, take_turns
from benchmarks.workload import Setting

LOW = 2
"""Bytes of a gradient and of a weight that cross between device and host: bf16."""
ADAM = 28
"""Bytes that host memory moves per parameter: bf16 gradient, fp32 master and two moments read, all but the gradient
written, the weight in bf16."""
TRIAD = 12
"""Bytes per element of a = b + s·c."""
BUCKET = 12_500_000
"""Elements of the last bucket, whose way nothing can hide."""
ROUNDS = 10


@dataclass(frozen=True)
class Rates:
    """Of one machine. product: FLOP/s of a bf16 product · the others: bytes per second; memory: the host's triad."""

    product: float
    to_host: float
    to_device: float
    memory: float


@dataclass(frozen=True)
class Sizes:
    """Of what is measured. product: rows of the matrices · link: bytes of a copy · triad: elements of an array."""

    product: int
    link: int
    triad: int


SIZES = {"cuda": Sizes(8192, 1 << 29, 1 << 28), "cpu": Sizes(64, 1 << 16, 1 << 14)}


@dataclass(frozen=True)
class Bound:
    """Seconds of a step at best. The first four may hide behind each other, ``tail`` cannot."""

    compute: float
    to_host: float
    to_device: float
    memory: float
    tail: float

    @property
    def total(self) -> float:
        """The longest of the four, and the tail."""
        return max(self.compute, self.to_host, self.to_device, self.memory) + self.tail


def bound(setting: Setting, rates: Rates, compute: float, *, weights_away: bool = False) -> Bound:
    """The bound of one step of ``setting``, of which the computation alone takes ``compute`` seconds.

    weights_away: they rest in host memory and are fetched for forward and again for backward, some once (the root, what
    forward ends with, embeddings); stepped weights are then where they rest. Otherwise each of them crosses once.
    """
    volume = setting.volume()
    count = volume.trainable
    fetched = 2 * volume.twice + volume.once if weights_away else count
    bucket = min(BUCKET, count)
    back = 0.0 if weights_away else LOW * bucket / rates.to_device
    return Bound(
        compute=compute,
        to_host=LOW * count / rates.to_host,
        to_device=LOW * fetched / rates.to_device,
        memory=((LOW + ADAM) * count + LOW * fetched) / rates.memory,
        tail=LOW * bucket / rates.to_host + ADAM * bucket / rates.memory + back,
    )


def measure_rates(device: torch.device, sizes: Sizes) -> Rates:
    """What this machine does now, medians of some rounds; the host with as many threads as torch has here."""
    product = peak_flops(device, sizes.product)
    host = torch.ones(sizes.link, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.ones(sizes.link, dtype=torch.uint8, device=device)
    a, b, c = (torch.ones(sizes.triad) for _ in range(3))
    cpu = torch.device("cpu")
    calls = {
        "to_host": lambda _: seconds_per_call(lambda: host.copy_(there, non_blocking=True), device),
        "to_device": lambda _: seconds_per_call(lambda: there.copy_(host, non_blocking=True), device),
        "memory": lambda _: seconds_per_call(lambda: torch.add(b, c, alpha=0.5, out=a), cpu),
    }
    take_turns(calls, 1, float("inf"))
    seconds = take_turns(calls, ROUNDS, float("inf"))
    moved = {"to_host": sizes.link, "to_device": sizes.link, "memory": TRIAD * sizes.triad}
    return Rates(product, **{name: moved[name] / statistics.median(taken) for name, taken in seconds.items()})
