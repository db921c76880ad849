"""Ranks meet over the process group's store, because collectives do not report who is missing.

Owns: the meetings before an engine's process groups are made, in ``engine.reset()`` and in ``engine.close()``. Must not
know: the purpose of the groups, engines.

[Note: The meeting before groups] torch waits silently in the store until every rank makes a group, and then raises an
error about a key. So the ranks count their meetings first. A rank that waits reports this to those that still use an
older engine, as a wait for any collective does (failures: [Note: Failure reports]). If they in turn wait for this rank,
that is found as any other deadlock.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from shardengine.comm import watchdog
from shardengine.comm.failures import FailureReport, Failures, open_failures
from shardengine.comm.positions import Presence, Waiting
from shardengine.comm.store_board import Unreachable
from shardengine.comm.watchdog import MEETING, Watchdog, one_sentence
from shardengine.errors import CommunicationError, MismatchError

_log = logging.getLogger(__name__)
_UNHEARD_S = 10.0
_WARN_AFTER_S = 10.0
"""A rank that waits longer logs whom it waits for: ``timeout_s`` is long, and a rank that was killed, or waits
elsewhere for this one, reports nothing here.
"""
_CLOSE = "close"
"""Stands for a group: the wait of ``meet_to_close``."""


def meet_before_groups(timeout_s: float) -> None:
    """Wait until every rank calls this as often as this one; collective ([Note: The meeting before groups]).

    ``CommunicationError`` names the ranks that have not come within ``timeout_s``. ``MismatchError`` says which ranks
    wait for this one in an older engine.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("shardengine/meetings", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    with _reachable():
        number, came = store.add(f"of/{rank}", 1), store.add("all", 1)
    try:
        if came < number * ranks:
            with _watching(number) as watchdogs:
                _wait_for_all(store, number, timeout_s, watchdogs)
    except BaseException:
        with suppress(RuntimeError):
            store.add(f"of/{rank}", -1)
            store.add("all", -1)
        raise
    if open_failures():
        gc.collect()  # engines that nobody has any more, on every rank, before there are more groups


def _wait_for_all(store: Any, number: int, timeout_s: float, watchdogs: list[Watchdog]) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    started, pause, warned = time.monotonic(), 0.001, False
    while True:
        with _reachable():
            if store.add("all", 0) >= number * ranks:
                return
            lasted = time.monotonic() - started
            gives_up, warns = lasted > timeout_s, lasted > _WARN_AFTER_S and not warned
            asked = range(ranks) if gives_up or warns else ()
            missing = {other for other in asked if store.add(f"of/{other}", 0) < number}
        if missing and not gives_up:
            warned = True
            _log.warning(
                "initialize on rank %d waits for ranks %s, which have not called it within %g s; gives up after %g s",
                *(rank, sorted(missing), _WARN_AFTER_S, timeout_s),
            )
        elif missing:
            said = [failures.describe(missing) for failures in open_failures()[-1:]]
            raise CommunicationError(
                f"initialize on rank {rank}: expected every rank to call it within {timeout_s:g} s. "
                f"{said[0] if said else f'Missing: ranks {sorted(missing)}'}. Call it on every rank",
                code="initialize-ranks-missing",
            )
        if lasted > watchdog.POST_AFTER_S:
            for each in watchdogs:
                each.look_before_groups()
        time.sleep(pause)
        pause = min(0.25, 1.5 * pause)


@contextmanager
def _watching(number: int) -> Iterator[list[Watchdog]]:
    """Yield one watchdog per older engine.

    Ranks of these engines, which may continue, get a report of an error inside.
    """
    what = "the meeting of all ranks before new process groups"
    come = {MEETING: number}
    waiting = Waiting(what, MEETING, MEETING, number, issued=come, where="initialize")
    older = open_failures()
    watchdogs = [Watchdog(failures, waiting) for failures in older]
    try:
        yield watchdogs
    except (CommunicationError, MismatchError) as error:
        for failures in older:
            failures.report(FailureReport(str(error), gave_up=True))
        raise
    finally:
        for each in watchdogs:
            each.end()


@contextmanager
def _reachable() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"initialize on rank {dist.get_rank()}: the store of the process group cannot be reached, its "
            f"process may be gone: {str(error).splitlines()[0]}. Start the ranks again",
            code="initialize-store-unreachable",
        ) from error


def meet(failures: Failures, what: str) -> None:
    """Wait until every rank calls this.

    ``CommunicationError`` names the ranks that do not within ``timeout_s``, or that have left, as soon as they report
    it.
    """
    mesh = failures.mesh
    if mesh.ranks == 1:
        return
    deadline = time.monotonic() + mesh.timeout_s
    pause, written = 0.02, False
    failures.repeat_report(what)
    others = set(range(mesh.ranks)) - {mesh.rank}
    came: set[int] = set()
    while True:
        try:
            if not written:
                failures.board.write("here", what)
            here, written = set(failures.board.read("here")), True
            gone = {rank: each.text for rank, each in failures.departures().items()}
        except Unreachable:
            here, written, gone = set(), False, {}
        if gone:
            end(failures)
            raise CommunicationError(
                f"{what} on rank {mesh.rank}: expected every rank to call it, but {one_sentence(gone)}. Start the "
                "ranks again",
                code="reset-ranks-left",
            )
        if here == others:
            return
        came |= here
        if time.monotonic() > deadline:
            end(failures)
            raise CommunicationError(
                f"{what} on rank {mesh.rank}: expected every rank to call it within {mesh.timeout_s:g} "
                f"s. {failures.describe(others - came or others - here)}. Start the ranks again",
                code="reset-ranks-missing",
            )
        time.sleep(pause)
        pause = min(0.5, 1.5 * pause)


def end(failures: Failures) -> None:
    """After ``meet``: remove this rank from the meeting, so the next one starts empty."""
    if failures.mesh.ranks > 1:
        with suppress(Unreachable):
            failures.board.write("here", "")


def meet_to_close(failures: Failures) -> str:
    """After ``Failures.leave``: wait until every rank closes; return "", or which ranks do not close, and why."""
    mesh, mine = failures.mesh, failures.departure
    others = set(range(mesh.ranks)) - {mesh.rank}
    if mine is None or not others:
        return ""
    began = heard = time.monotonic()
    deadline, pause, warned = heard + mesh.timeout_s, 0.001, False
    watching = Watchdog(
        failures, Waiting("every rank's engine.close()", _CLOSE, _CLOSE, 1, issued={_CLOSE: 1}, where="close")
    )
    while True:
        try:
            departed = failures.departures()
            gone = {rank: each.text for rank, each in departed.items() if each.presence is not Presence.CLOSING}
            here = f"in the midst of other collectives: {mine.issued} here"
            elsewhere = {
                rank: f"{each.text}, {here}, {each.issued} there"
                for rank, each in departed.items()
                if each.issued != mine.issued
            }
            if gone:
                return one_sentence(gone)
            if elsewhere:
                return one_sentence(elsewhere)
            if departed.keys() == others:
                return ""
            ripe = watching.ripe().items()
            if failed := {rank: f"{report.verb}: {report.text}" for rank, report in ripe if rank not in departed}:
                return one_sentence(failed)
            if met := watching.stuck_before_groups():
                return met
            heard = time.monotonic()
        except Unreachable:
            departed = {}
        if time.monotonic() > min(deadline, heard + _UNHEARD_S):
            return failures.describe(others - departed.keys()).removeprefix("Missing: ")
        if not warned and time.monotonic() > began + _WARN_AFTER_S:
            warned = True
            _log.warning(
                "engine.close() on rank %d waits for every rank to close its engine; it gives up after %g s. %s",
                *(mesh.rank, mesh.timeout_s, failures.describe(others - departed.keys())),
            )
        time.sleep(pause)
        pause = min(0.25, 1.5 * pause)
