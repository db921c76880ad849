"""Summarize the contents of a checkpoint as plain values. Owns: the choice of facts, the grouping of parameters.

Must not know: how they are printed. All facts come from an index that was checked.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardengine.checkpoint import directory, index
from shardengine.errors import CheckpointError
from shardengine.interchange.stored import damages, model_of


def examine(place: Path) -> dict[str, Any] | None:
    """Return all facts about one checkpoint; "whole" and "damaged" follow from its checksums.

    Raises no CheckpointError. None if the checkpoint was removed or replaced while it was read, as a run in progress
    may do.
    """
    before = _identity(place)
    facts: dict[str, Any] = {"checkpoint": str(place), "whole": False, "damaged": [], "bytes": 0}
    try:
        sizes = {path.name: path.lstat().st_size for path in sorted(place.iterdir())}
        facts["bytes"] = sum(sizes.values())
        facts |= _described(place, sizes)
    except CheckpointError as error:
        facts["damaged"] = [{"file": directory.INDEX, "what": str(error), "holds": ["all of it"]}]
    except OSError as error:
        facts["damaged"] = [{"file": "", "what": f"cannot be read: {error.strerror}", "holds": ["all of it"]}]
    return facts if facts["whole"] or (before is not None and _identity(place) == before) else None


def _identity(place: Path) -> tuple[int, ...] | None:
    """Return device, inode and modification time of the directory ``place``; None if there is none."""
    with suppress(OSError):
        found = place.stat()
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return None


def _described(place: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the facts in the index of ``place``, and its damage. sizes: of all files in the directory."""
    saved = index.read(place)
    found = [asdict(damage) for damage in damages(place, saved)]
    model = model_of(saved)
    trained = [row["names"][0] for row in saved["parameters"] if row["trainable"]]
    return {
        "whole": not found,
        "damaged": found,
        "step": saved["counters"]["global_steps"],
        "samples": saved["counters"]["global_samples"],
        "micro_steps": saved["counters"]["micro_steps"],
        "ranks": saved["world_size"],
        "stage": saved["stage"],
        "batch": saved["batch"],
        "model": {"class": model.get("class"), "huggingface": model.get("config") is not None,
                  "adapters": sorted(model.get("peft") or {})},
        "dtypes": _dtypes(saved),
        "optimizer": saved["optimizer"] and {
            "kind": saved["optimizer"]["kind"],
            "steps": sorted({saved["optimizer"]["steps"].get(name, 0) for name in trained}),
            "groups": [
                {"parameters": len(group["params"]), "options": group["options"]}
                for group in saved["optimizer"]["groups"]
            ],
        },
        "lr_scheduler": saved["lr_scheduler"],
        "parameters": saved["parameters"],
        "buffers": saved["buffers"],
        "own_buffers": saved["own_buffers"],
        "random_states": sorted(saved["random"]),
        "files": {file: facts["bytes"] for file, facts in saved["files"].items()}
        | {directory.INDEX: sizes.get(directory.INDEX, 0)},
        "unknown_files": sorted(sizes.keys() - {directory.INDEX, *saved["files"]}),
        "client_state": saved["client_state"],
        "versions": saved.get("versions") or {},
        "format": saved["format"],
    }  # fmt: skip


def _dtypes(saved: dict[str, Any]) -> dict[str, list[str]]:
    """Return the dtypes of each state ("weight", "exp_avg", …, "buffer"), and as "model" those of the parameters."""
    kept: dict[str, set[str]] = {"model": {row["dtype"] for row in saved["parameters"]}}
    for kinds in saved["tensors"].values():
        for kind, row in kinds.items():
            kept.setdefault(kind, set()).add(row["dtype"])
    return {kind: sorted(dtypes) for kind, dtypes in kept.items()}


def grouped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group parameters or buffers whose names differ only in a number into one row: ``blocks.*.0.weight`` × 3."""
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        names = row.get("names") or [row["name"]]
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", names[0], count=1)
        same = (pattern, str(row["shape"]), row["dtype"], str(row.get("trainable")), str(row.get("group")))
        group = groups.setdefault(same, {**row, "pattern": pattern, "count": 0, "tied": names[1:]})
        group["count"] += 1
        if group["count"] == 1:
            group["first"] = names[0]
    for group in groups.values():
        if group["count"] == 1:
            group["pattern"] = group["first"]
    return list(groups.values())
