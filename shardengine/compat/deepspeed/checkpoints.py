"""DeepSpeed's checkpoint functions: resume from DeepSpeed's own checkpoints, read whole fp32 weights from ours.

Owns: the files beside a checkpoint, the import of DeepSpeed's. Must not know: how an engine saves and loads.

[Note: In place] Rank 0 imports a checkpoint of DeepSpeed into a folder beside it, all ranks load it from there, and the
folder is removed. The engine's scheduler takes over the scheduler's state.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.checkpoint import directory, index
from shardengine.compat.deepspeed import processes, schedules
from shardengine.engine import Engine
from shardengine.errors import CheckpointError
from shardengine.interchange import deepspeed, weight_files, writing
from shardengine.interchange.stored import StoredCheckpoint, choose, find
from shardengine.sharding import WEIGHT

_IMPORTED = "imported-by-shardengine"
SCHEDULER = "lr_scheduler"
"""The key of a scheduler's state in an imported client state."""
_SCRIPT = '''"""Write the whole fp32 weights of this checkpoint: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR."""
import sys; from shardengine.app.cli import main; sys.exit(main(["export", "--format", "safetensors", "--dtype", "fp32", *sys.argv[1:]]))
'''  # noqa: E501


def write_script(save_dir: str | Path) -> None:
    """Write ``zero_to_fp32.py`` to ``save_dir``, as DeepSpeed does; called by rank 0."""
    Path(save_dir, "zero_to_fp32.py").write_text(_SCRIPT, encoding="utf-8")


@contextmanager
def readable(load_dir: str | Path, tag: str | None) -> Iterator[tuple[Path, str | None, bool]]:
    """Yield (directory, tag, whether DeepSpeed wrote it) of a checkpoint that an engine can load. Collective.

    CheckpointError on every rank if a checkpoint of DeepSpeed cannot be imported.
    """
    folder = Path(load_dir)
    place = _theirs(folder, tag)
    if place is None:
        yield folder, tag, False
        return
    work, name = folder / _IMPORTED, "checkpoint"
    problem: Exception | None = None
    if processes.get_rank() == 0:
        try:
            shutil.rmtree(work, ignore_errors=True)
            os.mkdir(work)
            writing.write(deepspeed.read(place), work, name)
        except Exception as error:
            problem = error
    try:
        processes.barrier()
        if problem is not None:
            raise CheckpointError(
                f"{place}, which DeepSpeed has written, could not be imported into {work}: {problem}. `shardengine "
                "import SOURCE OUT` writes to another place",
                code="deepspeed-checkpoint-not-imported",
            ) from problem
        if not (work / name).is_dir():
            raise CheckpointError(
                f"{place}, which DeepSpeed has written, could not be imported: rank 0 says why",
                code="deepspeed-checkpoint-not-imported",
            )
        yield work, name, True
        processes.barrier()
    finally:
        if processes.get_rank() == 0:
            with suppress(OSError):
                shutil.rmtree(work)


def _theirs(folder: Path, tag: str | None) -> Path | None:
    """Return the path of the checkpoint if DeepSpeed has written it, else None; the folder may also hold ours."""
    place = place_of(folder, tag)
    return place if next(place.glob("*_model_states.pt"), None) is not None else None


def place_of(load_dir: str | Path, tag: str | int | None) -> Path:
    """Return the path of checkpoint ``tag`` in ``load_dir``; without a tag, of the one that ``latest`` names."""
    name = directory.latest(Path(load_dir)) if tag is None else str(tag)
    return Path(load_dir) if name is None else Path(load_dir, name)


def leaves_out(load_dir: str | Path, tag: str | None) -> bool:
    """Return whether it is one of our checkpoints without frozen parameters; False if it cannot be read."""
    with suppress(CheckpointError):
        return bool(index.read(place_of(load_dir, tag)).get("left_out"))
    return False


def resume_schedule(engine: Engine, saved: Any) -> None:
    """Load a scheduler state that DeepSpeed has written into the scheduler of ``engine``."""
    scheduler = engine.lr_scheduler
    if scheduler is None or not isinstance(saved, dict):
        return
    steps = saved.get("last_batch_iteration")
    if isinstance(scheduler, schedules.Schedule):
        scheduler.load_state_dict(saved)
        return
    if steps is not None:  # of DeepSpeed's own schedules
        saved = {"last_epoch": steps, "_step_count": steps + 1}  # current rates are in the saved optimizer groups
    scheduler.load_state_dict({**scheduler.state_dict(), **saved})


# Whole weights, in fp32


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return all whole weights (in fp32) and buffers of a checkpoint, ours or DeepSpeed's. Needs no engine, no ranks.

    tag: None: the newest · exclude_frozen_parameters: leave them out · lazy_mode: no effect. CheckpointError if the
    checkpoint is damaged.
    """
    folder = Path(checkpoint_dir)
    theirs = _theirs(folder, tag)
    if theirs is not None:
        foreign = deepspeed.read(theirs)
        kept = [each for each in foreign.parameters if each.trainable or not exclude_frozen_parameters]
        return dict(foreign.buffers) | {name: each.read(WEIGHT).float() for each in kept for name in each.names}
    place = choose(find(folder if tag is None else folder / tag))[0]
    with StoredCheckpoint(place) as stored:
        rows = {row["names"][0]: row for row in stored.parameters}
        state: dict[str, Tensor] = {}
        for output in weight_files.weights(stored, torch.float32):
            row = rows.get(output.name)
            if row is None or row["trainable"] or not exclude_frozen_parameters:
                values = weight_files.rounded(stored.whole(output.origin, output.state), output.dtype, output.name)
                state |= dict.fromkeys([output.name] if row is None else row["names"], values)
    return state


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Move ``model`` to the CPU, load the weights of a checkpoint into it and return it. Needs no engine."""
    model.cpu().load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model
