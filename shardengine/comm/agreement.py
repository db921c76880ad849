"""Ranks agree before the first data collective, which a mismatch would abort or hang.

Owns: comparing facts, turning one rank's failure into an error on all ranks, and who carries out the kernels of a CPU.
Must not know: what is done afterwards.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shardengine.comm.collectives import Collectives
from shardengine.errors import CheckpointError, InternalError, MismatchError, UsageError
from shardengine.kernels import Offer, withdraw_native

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def run_on_all_ranks(collectives: Collectives, what: str, action: Callable[[], _T]) -> _T:
    """Run ``action`` on every rank; where it raises on some, it raises there and ``MismatchError`` on the others.

    A ``CheckpointError`` is one on every rank, so that all can do the same about it.
    """
    failure: BaseException | None = None
    result: list[_T] = []
    try:
        result.append(action())
    except Exception as error:
        failure = error
    flags = collectives.exchange(torch.tensor([failure is not None], dtype=torch.uint8), what).view(-1).tolist()
    if any(flags):
        texts = collectives.exchange_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            collectives.failures.mark_known(failure)
            raise failure
        rank = flags.index(1)
        text = f"{what} failed on rank {rank}: {texts[rank]} (this is rank {collectives.mesh.rank})"
        raised = (CheckpointError if texts[rank].startswith("CheckpointError: ") else MismatchError)(text)
        collectives.failures.mark_known(raised)  # every rank raises
        raise raised
    return result[0]


def compare(collectives: Collectives, facts: dict[str, list[str]], own: int = 0) -> list[int]:
    """``facts`` (topic → lines) must be equal on all ranks; ``MismatchError`` names the first difference and ranks.

    own: a byte that may differ and travels with them. Returns every rank's.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    rows = collectives.exchange(torch.frombuffer(bytearray([*digest, own]), dtype=torch.uint8), _subject(facts))
    if all(torch.equal(row[:-1], rows[0][:-1]) for row in rows):
        return [int(byte) for byte in rows[:, -1].tolist()]
    everyone = collectives.exchange_objects(facts)
    everyone = [{topic: other.get(topic, []) for row in everyone for topic in row} for other in everyone]
    for topic in everyone[0]:
        different = [rank for rank, other in enumerate(everyone) if other[topic] != everyone[0][topic]]
        if different:
            ours, theirs = _first_difference(everyone[0][topic], everyone[different[0]][topic])
            raise MismatchError(
                f"the {topic} differs between ranks: rank 0 has {ours}, rank {different[0]} has {theirs} "
                f"(ranks that differ from rank 0: {different}); expected the same on every rank. "
                "Build the model and read the config the same way everywhere"
            )
    raise InternalError("facts that are equal have different digests")


def settle_kernels(offers: Sequence[int], rank: int) -> None:
    """All ranks use native kernels on their CPUs where all ``offers`` have them, else all use torch; rank 0 says so.

    So no rank waits for one whose steps are slower. UsageError on every rank where some rank requires native ones.
    """
    without = [number for number, offer in enumerate(offers) if offer == Offer.TORCH]
    requiring = [number for number, offer in enumerate(offers) if offer == Offer.REQUIRED]
    cure = "install g++ or clang++ there (SHARDENGINE_NATIVE=require on such a rank says what it lacks)"
    if without and requiring:
        raise UsageError(
            f"ranks {requiring} require native CPU kernels (SHARDENGINE_NATIVE or SHARDENGINE_KERNELS) and ranks "
            f"{without} have none, but all ranks use the same (this is rank {rank}): {cure}, or require nothing"
        )
    withdraw_native(bool(without))
    if rank == 0 and 0 < len(without) < len(offers):
        _say(f"CPU kernels: torch does their work on all ranks, slower and with the same bits, because ranks {without} "
             f"have no native ones; {cure}")  # fmt: skip


@functools.cache
def _say(text: str) -> None:
    """Once in a process."""
    _log.warning("%s", text)


def _subject(facts: dict[str, list[str]]) -> str:
    return ", ".join(f"{topic} {lines[0]}" if len(lines) == 1 else topic for topic, lines in facts.items())


def _first_difference(ours: list[str], theirs: list[str]) -> tuple[str, str]:
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f"[{mine}]", f"[{other}]"
    shorter = min(len(ours), len(theirs))
    mine, other = (f"[{lines[shorter]}]" if len(lines) > shorter else "nothing more" for lines in (ours, theirs))
    return mine, other


def describe(value: Any) -> str:
    """A stable text of a JSON-like value, for ``compare``."""
    return json.dumps(value, sort_keys=True, default=str)
