"""The command `shardengine import`: writes another program's checkpoint as one of shardengine.

Owns: recognising the source, the text that is printed. Must not know: the formats themselves.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardengine.checkpoint import directory
from shardengine.errors import CheckpointError, UsageError
from shardengine.interchange import dcp, dcp_files, deepspeed, writing
from shardengine.interchange.foreign import Foreign
from shardengine.sharding import WEIGHT


def run_import(options: argparse.Namespace) -> int:
    """Import as the options ask; return the exit code."""
    try:
        foreign = read(Path(options.source), options.form, options.tag, options.buffer)
        tag = directory.tag_of(foreign.global_steps)
        if (Path(options.out) / tag).exists():
            raise UsageError(
                f"{Path(options.out) / tag} is there already: expected a directory without it",
                code="import-target-exists",
            )
        place = writing.write(foreign, options.out, tag)
    except CheckpointError as error:
        print(f"shardengine import: {error}", file=sys.stderr)
        return 1
    print(describe(foreign, place))
    return 0


def read(source: Path, form: str | None, tag: str | None, buffers: list[str]) -> Foreign:
    """Read the checkpoint ``tag`` of ``source``. form: "deepspeed" or "dcp"; None: recognised by its files."""
    if not source.is_dir():
        raise UsageError(f"{source}: expected a directory with a checkpoint", code="import-not-a-folder")
    place = source if tag is None else source / tag
    if form is None:
        form = "dcp" if dcp.recognises(place) else "deepspeed" if deepspeed.recognises(source) else None
    if form is None:
        raise UsageError(
            f"{place}: expected a checkpoint of DeepSpeed (files *_model_states.pt) or of torch.distributed.checkpoint "
            f"({dcp_files.METADATA}), there are neither",
            code="import-format-unknown",
        )
    if form == "dcp":
        return dcp.read(place, buffers)
    if buffers:
        raise UsageError(
            "--buffer is for checkpoints of torch.distributed.checkpoint; DeepSpeed's name their buffers",
            code="import-buffer-not-used",
        )
    return deepspeed.read(source, tag)


def describe(foreign: Foreign, place: Path) -> str:
    """List the parts that were imported, and those that were not."""
    parameters = foreign.parameters
    frozen = sum(not parameter.trainable for parameter in parameters)
    tied = sum(len(parameter.names) > 1 for parameter in parameters)
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
    extra = [f"{count} {what}" for count, what in ((frozen, "frozen"), (tied, "with several names")) if count]
    lines = [
        f"imported {foreign.source}: {place}",
        f"  {len(parameters)} parameters ({', '.join([*dtypes, *extra])}), {len(foreign.buffers)} buffers",
    ]
    if foreign.kind is None:
        lines.append("  no optimizer state: load it with load_checkpoint(…, weights_only=True)")
    else:
        states = sorted({state for parameter in parameters for state in parameter.states if state != WEIGHT})
        lines.append(f"  {foreign.kind}, groups: {len(foreign.groups)}, states: {', '.join(states) or 'none yet'}")
    lines.append(f"  steps: {foreign.global_steps}, samples: {foreign.global_samples or 'not known'}")
    notes = list(foreign.notes)
    if foreign.loss_scale is not None:
        notes.append(f"how long the loss scale ({foreign.loss_scale:g}, imported) has held")
    notes.append("random states and data position: other programs keep them elsewhere, or not at all")
    notes.append("configuration and tokenizer of the model (`shardengine export` of it: --format safetensors or dcp)")
    lines += ["not imported, or assumed:", *(f"  - {note}" for note in notes)]
    if foreign.kind is not None:
        lines.append("an engine with a learning-rate scheduler of its own loads it with strict=False")
    return "\n".join(lines)
