"""The index of a checkpoint: one JSON file that says what is where. Owns: its form, reading it, comparing it.

Must not know: how tensors are written or filled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from shardengine.checkpoint import contents, state
from shardengine.core import Core
from shardengine.errors import CheckpointError, UsageError
from shardengine.inspection import Inspection
from shardengine.version import __version__

INDEX = "index.json"
FORMAT = 1
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
_KEYS = "format world_size stage parameters buffers optimizer lr_scheduler counters client_state files tensors".split()


def file_of(rank: int) -> str:
    """The file that ``rank`` writes."""
    return f"rank-{rank:05}.safetensors"


def check_tag(tag: str) -> str:
    """``tag``; ``UsageError`` unless it is a plain name."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == "latest":
        raise UsageError(
            f"checkpoint tag {tag!r}: expected a plain name of letters, digits and . _ + = - (and not 'latest')"
        )
    return tag


def describe(engine: Inspection) -> dict[str, Any]:
    """What a checkpoint of ``engine`` says, without files and client state."""
    core: Core = engine._core
    letters = (
        core.stage.weights_after_forward, core.stage.weights_after_backward, core.stage.gradients, core.stage.state,
    )  # fmt: skip
    names = [spec.name for spec in core.layout.parameters]
    return {
        "format": FORMAT,
        "versions": {"shardengine": __version__, "torch": str(torch.__version__)},
        "world_size": core.mesh.ranks,
        "stage": {"name": core.stage.name, "letters": "".join(letter.value for letter in letters)},
        "parameters": contents.parameter_table(core),
        "buffers": contents.buffer_table(core),
        "optimizer": state.optimizer_state(engine.optimizer, names),
        "lr_scheduler": state.scheduler_state(engine.lr_scheduler),
        "counters": {
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "micro_steps": engine.micro_steps,
        },
    }


def to_text(index: dict[str, Any]) -> str:
    """The index as a file: with a checksum of its own."""
    return json.dumps({"sha256": _digest(index), "index": index})


def read(directory: Path) -> dict[str, Any]:
    """The index of the checkpoint in ``directory``; ``CheckpointError`` if it is missing, damaged or not ours."""
    path = directory / INDEX
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        index = whole["index"]
        fine = whole["sha256"] == _digest(index) and all(key in index for key in _KEYS)
        fine = fine and all(_FILE.fullmatch(name) for name in index["files"])
    except OSError as error:
        raise CheckpointError(f"checkpoint {directory}: cannot read {INDEX}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        fine, index = False, {}
    if not fine:
        raise CheckpointError(
            f"checkpoint {directory}: {INDEX} is damaged or not of shardengine; load another checkpoint"
        )
    if index["format"] != FORMAT:
        raise CheckpointError(f"checkpoint {directory}: format {index['format']}, this version reads {FORMAT}")
    return dict(index)


def differences(saved: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Every reason why a checkpoint does not fit the engine, one sentence each."""
    later = "; that is not available yet in this version"
    found = []
    if saved["world_size"] != ours["world_size"]:
        found.append(f"it was saved by {saved['world_size']} rank(s), there are {ours['world_size']}{later}")
    if saved["stage"]["letters"] != ours["stage"]["letters"]:
        texts = [f"{side['stage']['name']} ({side['stage']['letters']})" for side in (saved, ours)]
        found.append(f"it was saved at stage {texts[0]}, the engine has stage {texts[1]}{later}")
    for kind in ("parameter", "buffer"):
        found += _table_differences(kind, saved[f"{kind}s"], ours[f"{kind}s"])
    texts = [_optimizer_text(side["optimizer"]) for side in (saved, ours)]
    if texts[0] != texts[1]:
        found.append(f"optimizer: the checkpoint has {texts[0]}, the engine {texts[1]}")
    texts = [side["lr_scheduler"]["type"] if side["lr_scheduler"] else "none" for side in (saved, ours)]
    if texts[0] != texts[1]:
        found.append(f"lr_scheduler: the checkpoint has {texts[0]}, the engine {texts[1]}")
    return found


def missing(index: dict[str, Any], parts: Iterable[contents.Part]) -> list[str]:
    """Parts that the files do not cover, or cover in another dtype."""
    found = []
    for part in parts:
        entry = index["tensors"].get(part.name, {}).get(part.state)
        dtype = str(part.values.dtype).removeprefix("torch.")
        if entry is None or entry["dtype"] != dtype:
            there = "nothing" if entry is None else entry["dtype"]
            found.append(f"{part.name} ({part.state}): expected {dtype}, the checkpoint has {there}")
            continue
        reached = part.first
        for _, first, end in sorted(entry["pieces"], key=lambda piece: int(piece[1])):
            reached = max(reached, end) if first <= reached else reached
        if reached < part.end:
            found.append(f"{part.name} ({part.state}): elements from {reached} on are in no file")
    return found


def _table_differences(kind: str, saved: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {row["names"][0] if "names" in row else row["name"]: row for row in rows}

    there, here = by_name(saved), by_name(ours)
    found = [f"{kind} {name}: only in the checkpoint" for name in there if name not in here]
    found += [f"{kind} {name}: not in the checkpoint" for name in here if name not in there]
    for name in here.keys() & there.keys():
        for key, value in here[name].items():
            if there[name].get(key) != value:
                found.append(f"{kind} {name}: {key} is {there[name].get(key)} in the checkpoint, {value} here")
    return sorted(found)


def _optimizer_text(optimizer: dict[str, Any] | None) -> str:
    return "none" if optimizer is None else f"{optimizer['kind']} with {len(optimizer['groups'])} group(s)"


def _digest(index: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
