"""Which data collectives a rank has issued, and where two ranks differ. Must not know: how anything is sent.

Ranks that gather different blocks of one size at the same time would train on each other's weights, and nothing else
would tell: gloo and NCCL match collectives by their order alone.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MAX_TEXTS = 2000


class History:
    """What was issued, in order within each group of processes; the order between groups may differ by rank."""

    def __init__(self, groups: Sequence[str]) -> None:
        self._texts = {group: deque[str](maxlen=MAX_TEXTS) for group in groups}
        self._digests = dict.fromkeys(groups, 0)

    def note(self, group: str, text: str) -> None:
        """``text`` says what is issued now; other groups than those of the start are left out."""
        if group in self._texts:
            self._texts[group].append(text)
            self._digests[group] = zlib.crc32(text.encode(), self._digests[group])

    def digest(self) -> Tensor:
        """Of everything noted: uint8, 4 bytes per group."""
        return torch.tensor([*self._digests.values()], dtype=torch.int64).to(torch.uint32).view(torch.uint8)

    def texts(self) -> dict[str, list[str]]:
        """The last ``MAX_TEXTS`` per group."""
        return {group: list(texts) for group, texts in self._texts.items()}


def first_difference(ranks: Sequence[Mapping[str, Sequence[str]]]) -> tuple[int, str, str] | None:
    """(rank, what rank 0 issued, what it issued) of the first difference from rank 0; None: it is too long ago."""
    for group, rank in itertools.product(ranks[0], range(1, len(ranks))):
        for ours, theirs in itertools.zip_longest(ranks[0][group], ranks[rank][group], fillvalue="nothing"):
            if ours != theirs:
                return rank, ours, theirs
    return None
