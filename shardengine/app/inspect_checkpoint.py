"""`shardengine inspect`: shows the contents of a checkpoint, and whether it is whole. Owns: the printed form.

Must not know: the format of a checkpoint. Exit codes: 0 whole · 1 damaged · 2 there is no checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from shardengine.checkpoint import directory
from shardengine.errors import UsageError
from shardengine.interchange.stored import find, listed
from shardengine.interchange.summary import examine, grouped
from shardengine.planner import show_bytes, table

_HELD = 8


def run(options: argparse.Namespace) -> int:
    """Print the checkpoint; return the exit code. Raises UsageError if there is none."""
    found = find(Path(options.checkpoint))
    if found.checkpoint is not None:
        facts = examine(found.checkpoint)
        if facts is None:
            raise UsageError(
                f"{found.checkpoint}: it was removed or replaced while it was read",
                code="checkpoint-changed-while-read",
            )
        print(json.dumps(facts, indent=2) if options.json else _text(facts))
        return 0 if facts["whole"] else 1
    assert found.folder is not None
    return _folder(found.folder, as_json=options.json)


def _folder(folder: Path, *, as_json: bool) -> int:
    """Print a line for each checkpoint, newest first, and which of them `load_checkpoint` takes."""
    examined = {tag: examine(directory.place_of(folder, tag)) for tag in listed(folder)}
    all_facts = {tag: facts for tag, facts in examined.items() if facts is not None}
    removed = sorted(examined.keys() - all_facts.keys())
    latest = directory.latest(folder)
    order = [tag for tag in [latest, *all_facts] if tag in all_facts]
    loaded = next((tag for tag in order if tag is not None and all_facts[tag]["whole"]), None)
    if as_json:
        rows = list(all_facts.values())
        found = {"directory": str(folder), "latest": latest, "loaded": loaded, "checkpoints": rows, "removed": removed}
        print(json.dumps(found, indent=2))
        return 0 if all(facts["whole"] for facts in rows) else 1
    rows_of_text = [["checkpoint", "state", "step", "ranks", "stage", "size"]]
    for tag, facts in all_facts.items():
        known = [str(facts["step"]), str(facts["ranks"]), facts["stage"]["name"]] if "step" in facts else ["?"] * 3
        rows_of_text.append([tag, "whole" if facts["whole"] else "DAMAGED", *known, show_bytes(facts["bytes"])])
    print(_table(rows_of_text))
    print()
    for facts in all_facts.values():
        for line in _damage(facts):
            print(line)
    lost = "" if latest is None or latest in all_facts else ", which is not there"
    print(f"latest names:           {latest or 'none'}{lost}")
    print(f"load_checkpoint takes:  {loaded or 'none: no checkpoint is whole'}")
    for left in sorted(folder.glob(".old-*")):
        print(f"note: a save that was replacing {left.name.removeprefix('.old-')} has not ended, or was killed")
    for tag in removed:
        print(f"note: {tag} was removed or replaced while it was read")
    return 0 if all(facts["whole"] for facts in all_facts.values()) else 1


def _damage(facts: dict[str, Any]) -> list[str]:
    lines = []
    for damage in facts["damaged"]:
        held = damage["holds"]
        more = f" and {len(held) - _HELD} more" if len(held) > _HELD else ""
        inside = f"; in it: {', '.join(held[:_HELD])}{more}" if held else "; no tensor lies in that part"
        place = f"{facts['checkpoint']}/{damage['file']} "
        text = f"{'' if damage['what'].startswith('checkpoint ') else place}{damage['what']}{inside}"
        lines.append("DAMAGED: " + _printable(text))
    return lines


def _text(facts: dict[str, Any]) -> str:
    if "step" not in facts:
        return "\n".join(_damage(facts))
    optimizer = facts["optimizer"]
    rows = [
        ["checkpoint", facts["checkpoint"]],
        ["state", "whole: every checksum is right" if facts["whole"] else "DAMAGED"],
        ["step", f"{facts['step']}  ({facts['samples']} samples, {facts['micro_steps']} micro-batches)"],
        ["made by", _maker(facts)],
        ["model", _model(facts)],
        ["dtypes", ", ".join(f"{kind} {'/'.join(dtypes)}" for kind, dtypes in facts["dtypes"].items())],
    ]  # fmt: skip
    if optimizer is None:
        rows.append(["optimizer", "none"])
    else:
        counts = optimizer["steps"]
        steps = f"step {counts[-1]}" if len(counts) == 1 else f"steps {counts[0]} to {counts[-1]}" if counts else ""
        rows.append(["optimizer", f"{optimizer['kind']}, {steps}"])
    for number, group in enumerate(optimizer["groups"] if optimizer else []):
        options = ", ".join(
            f"{key} {json.dumps(value)}" for key, value in group["options"].items() if value is not None
        )
        rows.append([f"  group {number}", f"{group['parameters']} parameter(s): {options}"])
    scheduler = facts["lr_scheduler"]
    rows.append(["scheduler", "none" if scheduler is None else f"{scheduler['type']} {json.dumps(scheduler['state'])}"])
    rows.append(["random", f"{', '.join(facts['random_states'])}, of every rank" if facts["random_states"] else "none"])
    rows.append(["client state", json.dumps(facts["client_state"])])
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    rows.append(["versions", f"{versions}, format {facts['format']}"])
    rows += [[f"  {file}", show_bytes(count)] for file, count in facts["files"].items()]
    if facts["unknown_files"]:
        rows.append(["not ours", ", ".join(facts["unknown_files"])])
    parts = [_table([[name + ":" if not name.startswith(" ") else name, value] for name, value in rows])]
    parts.append(_table([["parameter", "", "shape", "dtype", "group"], *map(_row, grouped(facts["parameters"]))]))
    if facts["buffers"]:
        parts.append(_table([["buffer", "", "shape", "dtype"], *[_row(row)[:4] for row in grouped(facts["buffers"])]]))
    return "\n\n".join(["\n".join(part for part in _damage(facts)), *parts] if facts["damaged"] else parts)


def _maker(facts: dict[str, Any]) -> str:
    """Return ranks, stage and batch. For an imported checkpoint: its source, and the batch if it is known."""
    name, batch = facts["stage"]["name"], facts["batch"]
    imported = name.startswith("imported from ")
    ranks = name if imported else f"{facts['ranks']} rank(s), stage {name} ({facts['stage']['letters']})"
    per_rank = [batch.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    product = "" if None in per_rank else f" = {per_rank[0]} x {per_rank[1]} x {facts['ranks']}"
    whole = f", batch {batch['train_batch_size']}{product}" if "train_batch_size" in batch else ""
    return ranks + whole


def _model(facts: dict[str, Any]) -> str:
    elements = sum(_elements(row) for row in facts["parameters"])
    trained = sum(_elements(row) for row in facts["parameters"] if row["trainable"])
    name = [str(facts["model"]["class"])] if facts["model"]["class"] is not None else []
    adapters = [f"adapters {', '.join(facts['model']['adapters'])}"] if facts["model"]["adapters"] else []
    return ", ".join([*name, *adapters, f"{elements:,} parameters, {trained:,} of them trained"])


def _row(group: dict[str, Any]) -> list[str]:
    tied = f" = {', '.join(group['tied'])}" if group["tied"] else ""
    count = f"x {group['count']}" if group["count"] > 1 else ""
    place = str(group.get("group")) if group.get("trainable") else "frozen"
    return [group["pattern"] + tied, count, str(group["shape"]), group["dtype"], place]


def _elements(row: dict[str, Any]) -> int:
    total = 1
    for length in row["shape"]:
        total *= length
    return total


def _printable(text: str) -> str:
    """Escape ``text`` if it could move a terminal's cursor: names may come from anybody."""
    return text if text.isprintable() else ascii(text)


def _table(rows: list[list[str]]) -> str:
    return table([[_printable(cell) for cell in row] for row in rows])
