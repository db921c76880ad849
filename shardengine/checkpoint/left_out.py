"""Frozen weights that a checkpoint leaves out, and the fingerprints that identify them.

Owns: the choice of these weights, and their fingerprints. Must not know: files, how a checkpoint is written or loaded.

[Note: Fingerprints] Adapters fit only the base model that they were trained with. So the index has a fingerprint for
each parameter that is left out: the sum, modulo 2^32, of the CRC-32 of each of 64 elements (its bytes and its number)
that are spread evenly over the parameter. Each rank sums over the elements that it owns, so the layout does not matter.
A fingerprint detects another model. It detects a flipped bit only in one of the 64 elements.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from shardengine.checkpoint import contents
from shardengine.core import Core, adapters
from shardengine.sharding import WEIGHT, FlatSlice

SAMPLES = 64
_MODULUS = 1 << 32


def names(core: Core, module: nn.Module) -> set[str]:
    """Return the first names of the parameters that are neither trained nor saved by peft.

    Collective if ``module`` has adapters.
    """
    kept = adapters.saved(core, module)
    rows = [row for row in contents.parameter_table(core) if not row["trainable"]]
    return {row["names"][0] for row in rows if kept.isdisjoint(row["names"])}


def parts_of(parts: Iterable[FlatSlice], chosen: set[str]) -> tuple[list[FlatSlice], list[FlatSlice]]:
    """Split ``parts`` into (all others, the weights of the parameters ``chosen``)."""
    rows = [(part.name in chosen and part.key == WEIGHT, part) for part in parts]
    return [part for inside, part in rows if not inside], [part for inside, part in rows if inside]


def sums(parts: Iterable[FlatSlice], sizes: Mapping[str, int]) -> Counter[str]:
    """Return this rank's share of each fingerprint, by name. parts: those it owns · sizes: elements per parameter."""
    found: Counter[str] = Counter()
    for part in parts:
        size = sizes[part.name]
        count = min(SAMPLES, size)
        places = (number * size // count for number in range(count))
        inside = [place for place in places if part.first <= place < part.end]
        chosen = torch.tensor([place - part.first for place in inside], dtype=torch.int64)
        flat = part.values.detach().reshape(-1)
        data = flat[chosen.to(flat.device)].cpu().contiguous().view(torch.uint8).numpy().tobytes()
        width = flat.element_size()
        for row, place in enumerate(inside):
            found[part.name] += zlib.crc32(data[row * width : (row + 1) * width], zlib.crc32(b"%d" % place))
        found[part.name] %= _MODULUS
    return found


def together(shares: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the fingerprints. shares: the ``sums`` of every rank."""
    total: Counter[str] = Counter()
    for share in shares:
        total.update(share)
    return {name: value % _MODULUS for name, value in total.items()}
