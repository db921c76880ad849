"""Ranks that are started again find the run that they were making. Owns: what a launch is called, where its run is.

Must not know: the loop, what a checkpoint holds.

[Note: The same job] torchrun starts all ranks again, with the same arguments, when one of them died or when a node
joined or left (which it does not count as a restart). They go on in the output directory of the ranks before them; any
other launch that names this directory is refused. So the directory's run.json says by which launch it is written: the
launcher's run id, or, where it has none (a static rendezvous, c10d without --rdzv-id), the processes that started the
ranks, its agents: as long as one of them is still there, it is the same launch. TORCHELASTIC_RESTART_COUNT would not
do: ranks that were refused are started again too, and would then take what is not theirs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardengine.app import resume
from shardengine.app.rank_sums import RankSums
from shardengine.app.settings import Settings, outputs, reserve_output
from shardengine.errors import UsageError

RUN_ID = "TORCHELASTIC_RUN_ID"
GO_ON = 75
"""The exit code of a rank that stopped although its own node shall go on: EX_TEMPFAIL of sysexits.h."""


def names(rank_sums: RankSums) -> tuple[str, ...]:
    """What this launch is called ([Note: The same job]); () where the launcher starts no rank again. Collective."""
    run_id = os.environ.get(RUN_ID)
    if run_id is None:
        return ()
    everyone = rank_sums.from_all(_agent() if run_id == "none" else run_id)
    return tuple(sorted(set(everyone)))


def settle(options: argparse.Namespace, settings: Settings, rank_sums: RankSums, *, reserved: bool) -> Settings:
    """The settings with the output directory and the checkpoint to go on from, equal on all ranks; collective.

    reserved: the directory of a new run is this launch's own, made by its parent. UsageError if it is another's.
    """
    settings = dataclasses.replace(settings, job=names(rank_sums))
    found: dict[str, Any] = {}
    if rank_sums.rank == 0:
        try:
            found = _find(settings, settings.output if reserved else None, options.output, rank_sums.mesh.ranks)
        except UsageError as error:
            found = {"error": str(error)}
    found = json.loads(rank_sums.from_first(json.dumps(found)))
    if "error" in found:
        if rank_sums.rank:
            raise SystemExit(2)  # rank 0 says why
        raise UsageError(found["error"])
    place = {**found, "output": Path(found["output"])}
    if found["again"] and settings.resume is None:
        if found["resume"] is None:
            place["first_ranks"] = resume.first_ranks(place["output"])
        else:  # the config may have been edited meanwhile: the run keeps its own
            earlier = resume.read(found["output"]).settings(
                argparse.Namespace(**{**vars(options), "config": None, "set": None, "lr": None})
            )
            settings = dataclasses.replace(earlier, trace=settings.trace, job=settings.job, plan=settings.plan)
    return dataclasses.replace(settings, **place)


def _find(settings: Settings, reserved: Path | None, wanted: str | None, ranks: int) -> dict[str, Any]:
    """``output``, ``resume`` and ``again`` of the settings. On rank 0 alone, which makes the directory of a new run."""
    ours = settings.job
    if settings.resume is not None:
        again = resume.written_by(settings.output, ours)
        if not again:
            resume.require(settings.output, settings.resume)
        return _place(settings.output, resume.LATEST if again else settings.resume, again=again)
    candidates = iter([reserved]) if reserved else outputs(wanted, settings.config)
    for output in itertools.takewhile(Path.exists, candidates):
        if resume.written_by(output, ours):
            return _place(output, resume.LATEST if resume.can_go_on(output) else None, again=True)
    if reserved:
        return _place(reserved, None, again=False)
    output = reserve_output(wanted, settings.config)
    if ours:
        resume.write_run(dataclasses.replace(settings, output=output), ranks)
    return _place(output, None, again=False)


def _place(output: Path, checkpoint: str | None, *, again: bool) -> dict[str, Any]:
    return {"output": str(output), "resume": checkpoint, "again": again}


def others_go_on(stopped_by_another: bool) -> bool:
    """Whether this rank, which stopped because another one was asked to, shall be started again by its launcher.

    That is: torchrun spans several nodes, the other node is leaving, and this one may restart its ranks. An exit code
    of 0 would tell its agent that the training is done.
    """
    if not stopped_by_another or RUN_ID not in os.environ or int(os.environ.get("GROUP_WORLD_SIZE", "1")) < 2:
        return False
    made, allowed = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return made < allowed


def _agent() -> str:
    """The process that started this one, and will start the next ones; no name of a machine can be read from it."""
    started = ""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8", errors="replace")
        started = status.rpartition(")")[2].split()[19]  # in ticks since the machine was started
    return hashlib.sha256(f"{platform.node()} {os.getppid()} {started}".encode()).hexdigest()[:16]
