"""Lets ranks that a launcher restarted find their run. Owns: the names of a launch, the place of its run.

Must not know: the loop, the content of a checkpoint.

[Note: The same job] torchrun restarts all ranks with the same arguments when one of them died, or when a node joined or
left (which does not count as a restart). The new ranks continue in the output directory of the old ones. Any other
launch that names this directory is rejected. So the directory's run.json names the launch that writes it: by the
launcher's run id, or, if there is none (a static rendezvous, c10d without --rdzv-id), by the processes that started the
ranks, its agents. As long as one of these still exists, it is the same launch. TORCHELASTIC_RESTART_COUNT would not do:
ranks that were rejected are restarted as well, and would then take another run's directory.
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
"""The exit code of a rank that stopped although its own node shall continue: EX_TEMPFAIL of sysexits.h."""


def names(rank_sums: RankSums) -> tuple[str, ...]:
    """Return the names of this launch ([Note: The same job]); () if the launcher restarts no ranks. Collective."""
    run_id = os.environ.get(RUN_ID)
    if run_id is None:
        return ()
    everyone = rank_sums.from_all(_agent() if run_id == "none" else run_id)
    return tuple(sorted(set(everyone)))


def settle(options: argparse.Namespace, settings: Settings, rank_sums: RankSums, *, reserved: bool) -> Settings:
    """Return the settings with the output directory and the checkpoint to resume from, equal on all ranks; collective.

    reserved: the directory of a new run was made for this launch by its parent. UsageError if it is another launch's.
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
        raise UsageError(found["error"], code="train-output-not-settled")
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
    """Return ``output``, ``resume`` and ``again`` of the settings.

    Called on rank 0 alone, which makes a new run's directory.
    """
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
    """Whether the launcher shall restart this rank, which stopped because another one was asked to.

    This is so if torchrun spans several nodes, the other node is leaving, and this one may restart its ranks. With an
    exit code of 0, torchrun's agent would take the training as done.
    """
    if not stopped_by_another or RUN_ID not in os.environ or int(os.environ.get("GROUP_WORLD_SIZE", "1")) < 2:
        return False
    made, allowed = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return made < allowed


def _agent() -> str:
    """Return a digest of the process that started this one and will start the next ones.

    It reveals no machine's name.
    """
    started = ""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8", errors="replace")
        started = status.rpartition(")")[2].split()[19]  # in ticks since the machine was started
    return hashlib.sha256(f"{platform.node()} {os.getppid()} {started}".encode()).hexdigest()[:16]
