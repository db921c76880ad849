"""Ranks agree before the first data collective, which a mismatch would abort or hang.

Owns: comparing facts, turning one rank's failure into an error on all ranks, and choosing who runs the kernels. Must
not know: what happens afterwards.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardengine.comm.collectives import Collectives
from shardengine.errors import CheckpointError, InternalError, MismatchError, UsageError
from shardengine.kernels import Offer, Offers, withdraw

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def run_on_all_ranks(collectives: Collectives, what: str, action: Callable[[], _T]) -> _T:
    """Run ``action`` on every rank; if it raises on some, the other ranks raise ``MismatchError``.

    A ``CheckpointError`` is one on every rank, so that all can react to it in the same way.
    """
    failure: BaseException | None = None
    result: list[_T] = []
    try:
        result.append(action())
    except Exception as error:
        failure = error
    flags = collectives.exchange(torch.tensor([failure is not None], dtype=torch.uint8), what).view(-1).tolist()
    if any(flags):
        texts = collectives.exchange_objects(None if failure is None else f"{type(failure).__name__}: {failure}", what)
        if failure is not None:
            collectives.failures.mark_known(failure)
            raise failure
        rank = flags.index(1)
        text = f"{what} failed on rank {rank}: {texts[rank]} (this is rank {collectives.mesh.rank})"
        kind = CheckpointError if texts[rank].startswith("CheckpointError: ") else MismatchError
        raised = kind(text, code="failed-on-another-rank")
        collectives.failures.mark_known(raised)  # every rank raises
        raise raised
    return result[0]


def compare(collectives: Collectives, facts: dict[str, list[str]], own: int = 0) -> list[int]:
    """Raise ``MismatchError`` unless ``facts`` (topic → lines) are equal on all ranks; return every rank's ``own``.

    The error names the first difference and the ranks. own: a byte that may differ and travels with the facts.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    rows = collectives.exchange(torch.frombuffer(bytearray([*digest, own]), dtype=torch.uint8), _subject(facts))
    if bool((rows[:, :-1] == rows[0, :-1]).all()):
        return [int(byte) for byte in rows[:, -1].tolist()]
    everyone = collectives.exchange_objects(facts, _subject(facts))
    everyone = [{topic: other.get(topic, []) for row in everyone for topic in row} for other in everyone]
    for topic in everyone[0]:
        different = [rank for rank, other in enumerate(everyone) if other[topic] != everyone[0][topic]]
        if different:
            ours, theirs = _first_difference(everyone[0][topic], everyone[different[0]][topic])
            raise MismatchError(
                f"the {topic} differs between ranks: rank 0 has {ours}, rank {different[0]} has {theirs} "
                f"(ranks that differ from rank 0: {different}); expected the same on every rank. "
                "Build the model and read the config the same way everywhere",
                code="ranks-disagree",
            )
    raise InternalError("facts that are equal have different digests")


_TRITON_NEEDS = "Triton's kernels need a C compiler and Python's headers"
_CURES = {"cpu": "install g++ or clang++ there (SHARDENGINE_NATIVE=require on such a rank says what it lacks)"}
_CURE = "set SHARDENGINE_KERNELS to the same everywhere"


def settle_kernels(collectives: Collectives, packed: Sequence[int], problem: str) -> None:
    """Use this package's kernels on a type of device if all ranks can run them there, else torch on all of them.

    So no rank waits for one whose steps are slower. Rank 0 logs it if only some ranks have the kernels. packed:
    ``Offers.packed`` of every rank · problem: this rank's. UsageError on every rank if some rank requires kernels that
    another one does not have.
    """
    mesh, offers = collectives.mesh, [Offers.unpacked(each) for each in packed]
    failed = any(Offer.FAILED in each[:2] for each in offers)
    problems = collectives.exchange_objects(problem, "problems with kernels") if failed else []
    settle_type("cpu", [each.cpu for each in offers], problems, mesh.rank)
    if mesh.device.type != "cpu":
        settle_type(mesh.device.type, [each.device for each in offers], problems, mesh.rank)


def settle_type(device_type: str, offers: Sequence[Offer], problems: Sequence[str], rank: int) -> None:
    """``settle_kernels`` for one type of device. problems: every rank's, if any first launch has failed."""
    lacking = (Offer.TORCH, Offer.FAILED)
    without = [number for number, offer in enumerate(offers) if offer in lacking]
    requiring = [number for number, offer in enumerate(offers) if offer == Offer.REQUIRED]
    failed = [f"a first launch failed on rank {number} ({problems[number]})"
              for number, offer in enumerate(offers) if offer == Offer.FAILED]  # fmt: skip
    name, cure = "CPU" if device_type == "cpu" else "GPU", _CURES.get(device_type, _CURE)
    if without and requiring:
        raise UsageError(
            f"ranks {requiring} require {name} kernels (SHARDENGINE_NATIVE or SHARDENGINE_KERNELS) and ranks "
            f"{without} have none, but all ranks use the same (this is rank {rank}): {cure}, or require nothing",
            code="kernels-required-on-some-ranks",
        )
    withdraw(device_type, bool(without))
    if rank == 0 and (failed or 0 < len(without) < len(offers)):
        why = f"{failed[0]}; {_TRITON_NEEDS}" if failed else f"ranks {without} have none of ours; {cure}"
        _say(f"{name} kernels: torch does their work on all ranks, slower and with the same bits, because {why}")


@functools.cache
def _say(text: str) -> None:
    """Log it once per process."""
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
    """Return a stable text of a JSON-like value, for ``compare``; functions and classes by name."""
    return json.dumps(value, sort_keys=True, default=_text)


def _text(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return [value.func, list(value.args), value.keywords]
    if isinstance(value, Tensor):
        return value.tolist()
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if isinstance(name, str) else str(value)
