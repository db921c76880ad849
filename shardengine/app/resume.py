"""Checkpoints of a run. Owns: what `--resume` takes from an earlier run and what it refuses, when one is saved, which
are kept, and that only one run writes into a directory.

Must not know: the loop's inside, what the library writes into a checkpoint. A directory that can be continued holds
``run.json`` (what the run was started with), ``shardengine.json`` (its whole config) and ``checkpoints/``.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardengine.app.data import Blocks
from shardengine.app.report import Progress
from shardengine.app.settings import BUILTIN, Settings, default_model_cache, read_config
from shardengine.app.together import Together
from shardengine.engine import Engine
from shardengine.errors import CheckpointError, UsageError

RUN, FOLDER, LATEST, CONFIG = "run.json", "checkpoints", "latest", "shardengine.json"
_TAG = re.compile(r"step-\d{8,}")


@dataclass(frozen=True)
class Earlier:
    """What a run was started with, from its ``run.json``. ``checkpoint``: a tag, or "latest". Paths are absolute."""

    output: Path
    checkpoint: str
    model: str | None
    data: str
    length: int
    steps: int
    planned_steps: int
    save_every: int
    ranks: int

    def settings(self, options: argparse.Namespace, ranks: int) -> Settings:
        """The settings of the run that goes on; UsageError that names every option that contradicts the earlier one."""
        problems = []
        if ranks != self.ranks:
            problems.append(f"--ranks: it was started with {self.ranks}, there are {ranks}; that is not available yet")
        if options.length not in (None, self.length):
            problems.append(f"--length: it was started with {self.length}, came {options.length}")
        if options.model is not None and _absolute(options.model) != self.model:
            problems.append(f"--model: it was started with {self.model or 'the default model'}, came {options.model}")
        if options.config is not None and not problems:
            problems += self._other_config(Path(options.config))
        if problems:
            text = "\n  - ".join(problems)
            raise UsageError(
                f"--resume {self.output}: these options contradict what the run was started with; leave them out:"
                f"\n  - {text}"
            )
        return Settings(
            config=self.output / CONFIG,
            model=self.model,
            data=options.data or self.data,
            steps=options.steps or self.steps,
            output=self.output,
            model_cache=Path(options.model_cache) if options.model_cache else default_model_cache(),
            length=self.length,
            save_every=options.save_every or self.save_every,
            planned_steps=self.planned_steps,
            resume=self.checkpoint,
        )

    def _other_config(self, path: Path) -> list[str]:
        """Every key of another config whose value is not the run's."""
        before, now = (
            {key: value for key, value, _ in read_config(each, self.ranks).resolved()}
            for each in (self.output / CONFIG, path)
        )
        return [
            f"--config {path}, {key}: it was started with {json.dumps(before.get(key))}, came "
            f"{json.dumps(now.get(key))}"
            for key in dict.fromkeys([*before, *now])
            if before.get(key) != now.get(key)
        ]


def read(place: str) -> Earlier:
    """The run in the directory ``place``, or the one that the checkpoint ``place`` (DIR/checkpoints/TAG) belongs to."""
    output, checkpoint = Path(place), LATEST
    if output.absolute().parent.name == FOLDER and not (output / RUN).exists():
        output, checkpoint = Path(place).parent.parent, output.name
    try:
        earlier = Earlier(output, checkpoint, **json.loads((output / RUN).read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(
            f"--resume {place}: expected the output directory of a run with --save-every: {RUN}: {error.strerror}"
        ) from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"--resume {place}: {RUN} is damaged or of another version: {error}") from None
    if not (output / FOLDER / checkpoint).exists():
        raise UsageError(
            f"--resume {place}: expected {Path(FOLDER) / checkpoint} in it, which is not there (a run that ended "
            f"before its first checkpoint is started anew); there are: {', '.join(_saved(output)) or 'none'}"
        )
    return earlier


def arguments(settings: Settings) -> list[object]:
    """The options that tell a rank where the run is written to and whether it goes on."""
    if settings.resume is None:
        return ["--config", settings.config, "--output", settings.output]
    chosen = [] if settings.resume == LATEST else [FOLDER, settings.resume]
    return ["--resume", settings.output.joinpath(*chosen)]


def hint(output: Path) -> str:
    """The end of a sentence about a run that ended too early: how to go on, where that is possible."""
    return f"; go on from its last checkpoint with --resume {output}" if (output / FOLDER / LATEST).is_file() else ""


class Checkpoints:
    """Saves and restores one run; every call is collective. Without ``--save-every`` nothing is done."""

    def __init__(self, engine: Engine, settings: Settings, blocks: Blocks, together: Together) -> None:
        """Nothing is read or written yet."""
        self._engine, self._settings, self._together = engine, settings, together
        self._folder = settings.output / FOLDER
        self._last: str | None = None  # the tag that was loaded or saved last: kept until two newer ones are there
        self._lock: int | None = None  # rank 0's open file, locked until close() or the process's end
        self._facts = _facts(engine, settings, blocks) if settings.save_every else {}

    def begin(self) -> None:
        """Take the directory; for a resumed run, bring the engine to the state of the checkpoint.

        UsageError if another run writes there, if the checkpoint cannot be read or was made with other data.
        """
        if not self._settings.save_every:
            return
        self._together.on_first("taking the output directory", self._take)
        try:
            if self._settings.resume is not None:
                self._load(None if self._settings.resume == LATEST else self._settings.resume)
                self._together.on_first("dropping what came after the checkpoint", self._drop_later)
            self._together.on_first(f"writing {RUN}", self._write_run)
        except BaseException:
            self.close()
            raise

    def after(self, progress: Progress) -> None:
        """Save if a checkpoint is due after this step, then remove all but the last two."""
        every, last = self._settings.save_every, progress.step == self._settings.steps
        if not every or not (progress.step % every == 0 or progress.stopped or last):
            return
        saved = self._engine.save_checkpoint(self._folder, client_state=self._facts)
        kept, self._last = {saved.name, self._last}, saved.name
        if self._together.rank == 0:
            self._remove(set(_saved(self._settings.output)) - kept)

    def close(self) -> None:
        """Other runs may write into the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _load(self, tag: str | None) -> None:
        where = f"--resume {self._settings.output}"
        try:
            checkpoint = self._engine.load_checkpoint(self._folder, tag)
        except CheckpointError as error:
            places = ", ".join(str(self._folder / other) for other in _saved(self._settings.output))
            raise UsageError(f"{where}: {error}. --resume takes one of {places or 'no other'}") from error
        saved = checkpoint.client_state
        different = [
            f"{name}: {saved.get(name)} in the checkpoint, {value} now"
            for name, value in self._facts.items()
            if saved.get(name) != value
        ]
        if different:
            text = "\n  - ".join(different)
            raise UsageError(f"{where}: {checkpoint.tag} was made with something else:\n  - {text}")
        if checkpoint.global_steps > self._settings.steps:
            raise UsageError(
                f"--steps {self._settings.steps}: {checkpoint.tag} has made {checkpoint.global_steps} steps already; "
                "expected at least as many"
            )
        self._last = checkpoint.tag

    def _drop_later(self) -> None:
        """The checkpoint that was loaded is the last one; those after it belong to metrics that are dropped too."""
        _write(self._folder / LATEST, f"{self._last}\n")
        self._remove({tag for tag in _saved(self._settings.output) if tag > str(self._last)})

    def _remove(self, tags: set[str]) -> None:
        for tag in tags:
            shutil.rmtree(self._folder / tag, ignore_errors=True)

    def _take(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UsageError(
                f"{self._settings.output}: another run is writing into it, or its ranks are about to end; wait for them"
            ) from None
        except OSError:
            pass  # a file system without locks

    def _write_run(self) -> None:
        """What ``read`` reads."""
        settings = self._settings
        facts: dict[str, Any] = {
            "model": None if settings.model is None else _absolute(settings.model),
            "data": settings.data if settings.data == BUILTIN else _absolute(settings.data),
            "length": settings.length,
            "steps": settings.steps,
            "planned_steps": settings.planned_steps,
            "save_every": settings.save_every,
            "ranks": self._engine.world_size,
        }
        _write(settings.output / RUN, json.dumps(facts, indent=2) + "\n")


def _facts(engine: Engine, settings: Settings, blocks: Blocks) -> dict[str, Any]:
    """What decides which rows are read when, and the learning rates; part of every checkpoint."""
    digest = hashlib.sha256()
    for rows in (blocks.training, blocks.validation):
        for tensor in (rows.input_ids, rows.labels, rows.attention_mask):
            if tensor is not None:
                digest.update(str(tuple(tensor.shape)).encode())
                digest.update(tensor.numpy().tobytes())
    return {
        "SHA-256 of the rows of tokens": digest.hexdigest()[:16],
        "seed": engine.config.seed,
        "samples per rank and micro-batch": engine.train_micro_batch_size_per_gpu(),
        "micro-batches per step": engine.gradient_accumulation_steps(),
        "steps of the learning-rate schedule": settings.planned_steps,
    }


def _absolute(path: str) -> str:
    """An existing path, wherever the next run is started; a name on the Hub as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def _saved(output: Path) -> list[str]:
    """The tags of complete checkpoints, oldest first."""
    folder = output / FOLDER
    return sorted(path.name for path in folder.iterdir() if _TAG.fullmatch(path.name)) if folder.is_dir() else []


def _write(path: Path, text: str) -> None:
    """Write aside and rename: a run may be killed at any moment."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
