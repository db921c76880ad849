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
        self._counts = dict.fromkeys(groups, 0)
        self._digests = dict.fromkeys(groups, 0)

    def note(self, group: str, text: str) -> None:
        """``text`` says what is issued now; other groups than those of the start are left out."""
        if group in self._texts:
            self._texts[group].append(text)
            self._counts[group] += 1
            self._digests[group] = zlib.crc32(text.encode(), self._digests[group])

    def digest(self) -> Tensor:
        """Of everything noted: uint8, 4 bytes per group."""
        return torch.tensor([*self._digests.values()], dtype=torch.int64).to(torch.uint32).view(torch.uint8)

    def texts(self) -> dict[str, tuple[int, list[str]]]:
        """Per group how many are forgotten, and the last ``MAX_TEXTS``, which came after them."""
        return {group: (self._counts[group] - len(texts), list(texts)) for group, texts in self._texts.items()}


def first_difference(ranks: Sequence[Mapping[str, tuple[int, Sequence[str]]]]) -> tuple[int, str, str] | None:
    """From each rank's ``texts``: (rank, what rank 0 issued, what it issued) where it first differs from rank 0.

    Both are numbered from 1, among all that were noted for their group.

    Compared is from the first place on that neither has forgotten. None: the difference is older.
    """
    for group, rank in itertools.product(ranks[0], range(1, len(ranks))):
        (ours_from, ours), (theirs_from, theirs) = ranks[0][group], ranks[rank][group]
        start = max(ours_from, theirs_from)
        pairs = itertools.zip_longest(ours[start - ours_from :], theirs[start - theirs_from :], fillvalue="")
        for number, (mine, other) in enumerate(pairs, start + 1):
            if mine != other:
                return rank, _numbered(number, mine), _numbered(number, other)
    return None


def _numbered(number: int, text: str) -> str:
    return f"number {number}: {text}" if text else "nothing"
