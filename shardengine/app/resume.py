"""Checkpoints of a run.

Owns: the settings that `--resume` takes over and those that it rejects, when a checkpoint is saved, and the lock that
lets only one run write into a directory. Must not know: the inside of the loop, the content of the library's
checkpoints. A directory that can be resumed holds ``run.json`` (the settings that the run was started with),
``shardengine.json`` (its whole config, resolved for the ranks that wrote it last) and ``checkpoints/``.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardengine.app import sources
from shardengine.app.data import TokenBlocks
from shardengine.app.rank_sums import RankSums
from shardengine.app.report import Progress
from shardengine.app.settings import (
    BUILTIN,
    FROM_CONFIG,
    FROM_WEIGHTS,
    PACKINGS,
    TOO_LONG,
    TRUNCATE,
    Settings,
    default_model_cache,
    keep_batch,
    read_config,
)
from shardengine.checkpoint import Checkpoint, directory, write_text
from shardengine.config import MICRO, STAGE, load_config, undecided
from shardengine.engine import Engine
from shardengine.errors import CheckpointError, UsageError
from shardengine.interchange.stored import FOLDER, RUN

LATEST, CONFIG = directory.LATEST, "shardengine.json"
_PATIENCE_S = 60.0
"""Restarted ranks wait so long for the ranks that they replace, which may still be ending."""


@dataclass(frozen=True)
class Earlier:
    """The settings that a run was started with, from its ``run.json``.

    ``checkpoint``: a tag, or "latest". Paths are absolute. ranks: at the last start; first_ranks: at the first one (0:
    the same) · job and later fields: see Settings.
    """

    output: Path
    checkpoint: str
    model: str | None
    data: str
    length: int
    steps: int
    planned_steps: int
    save_every: int
    ranks: int
    first_ranks: int = 0
    job: tuple[str, ...] = ()
    init: str = FROM_WEIGHTS
    lora: str | None = None
    held_out: str | None = None
    validate_every: int = 0
    packing: str | None = None
    too_long: str = TRUNCATE

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for values that no run has written."""
        for name in ("model", "data", "lora", "held_out"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name == "data" or value is not None):
                raise TypeError(f"{name}: expected a text, got {value!r:.80}")
        choices = {"init": (FROM_WEIGHTS, FROM_CONFIG), "packing": (*PACKINGS, None), "too_long": TOO_LONG}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {known}, got {getattr(self, name)!r:.80}")
        for name in ("length", "steps", "planned_steps", "save_every", "ranks", "first_ranks", "validate_every"):
            value, least = getattr(self, name), 0 if name in ("save_every", "first_ranks", "validate_every") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {value!r:.80}")
        if not isinstance(self.job, list | tuple) or not all(isinstance(name, str) for name in self.job):
            raise TypeError(f"job: expected texts, got {self.job!r:.80}")
        object.__setattr__(self, "job", tuple(self.job))  # JSON has lists

    def settings(self, options: argparse.Namespace) -> Settings:
        """Return the settings of the resumed run. UsageError names every option that contradicts the earlier run."""
        problems = []
        for name in ("length", "init", "lora", "packing", "too_long"):
            before, now = getattr(self, name), getattr(options, name)
            if now not in (None, before):
                option = f"--{name.replace('_', '-')}"
                problems.append(f"{option}: it was started {f'with {before}' if before else 'without'}, got {now}")
        if options.eval is not None and self.held_out is None:
            problems.append(f"--eval: it was started without, got {options.eval}")
        if options.model is not None and _absolute(options.model) != self.model:
            problems.append(f"--model: it was started with {self.model or 'the default model'}, got {options.model}")
        if options.seed is not None and (seed := load_config(self.output / CONFIG).seed) != options.seed:
            problems.append(f"--seed: it was started with {seed}, got {options.seed}")
        own = [change for change in options.set or () if change.startswith(sources.MONITOR)]
        changes = sources.changes_of([change for change in options.set or () if change not in own], options.lr)
        if (options.config is not None or changes) and not problems:
            path = self.output / CONFIG if options.config is None else sources.find(options.config)
            problems += self._other_config(sources.changed(path, changes), options)
        if problems:
            text = "\n  - ".join(problems)
            raise UsageError(
                f"--resume {self.output}: these options contradict what the run was started with; leave them out:"
                f"\n  - {text}",
                code="resume-options-contradict",
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
            first_ranks=self.first_ranks or self.ranks,
            init=self.init,
            lora=self.lora,
            held_out=options.eval or self.held_out,
            validate_every=options.eval_every or self.validate_every,
            packing=self.packing,
            too_long=self.too_long,
            epochs=options.epochs,
            changes=(*own, *sources.monitors(options.log)),
        )

    def _other_config(self, source: sources.Source, options: argparse.Namespace) -> list[str]:
        """Return every key of another config whose value is not the run's, both for the ranks that the run began with.

        Values that the run left to a plan count as decided when it began.
        """
        ranks, own = self.first_ranks or self.ranks, load_config(self.output / CONFIG)
        decided = {STAGE: own.zero_optimization.stage, MICRO: own.train_micro_batch_size_per_gpu or 1}
        auto = {name: decided[name] for name in undecided(source)}
        changed = {change.partition("=")[0].strip(): "--set" for change in options.set or ()}
        changed |= {} if options.lr is None else {sources.LR: "--lr"}

        def given(key: str) -> str:
            own = (option for name, option in changed.items() if f"{key}.".startswith(f"{name}."))
            return next(own, f"--config {options.config}")

        configs = keep_batch(own, ranks), read_config(source, ranks, options.seed, auto=auto)
        before, now = ({key: value for key, value, _ in config.resolved()} for config in configs)
        return [
            f"{given(key)}, {key}: it was started with {json.dumps(before.get(key))}, got {json.dumps(now.get(key))}"
            for key in dict.fromkeys([*before, *now])
            if before.get(key) != now.get(key)
        ]


def read(place: str) -> Earlier:
    """Read the run in the directory ``place``, or the run of the checkpoint ``place`` (DIR/checkpoints/TAG).

    It does not check that the checkpoint exists (``require`` does), because restarted ranks resume from a later one.
    """
    output, checkpoint = Path(place), LATEST
    if output.absolute().parent.name == FOLDER and not (output / RUN).exists():
        output, checkpoint = Path(place).parent.parent, output.name
    try:
        earlier = Earlier(output, checkpoint, **_read_run(output))
    except OSError as error:
        raise UsageError(
            f"--resume {place}: expected the output directory of a run with --save-every: {RUN}: {error.strerror}",
            code="resume-not-a-run",
        ) from None
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"--resume {place}: {RUN} is damaged or of another version: {error}", code="resume-run-damaged"
        ) from None
    return earlier


def require(output: Path, checkpoint: str) -> None:
    """UsageError unless the checkpoint of ``read`` exists; for "latest", unless ``load_checkpoint`` finds any."""
    if checkpoint == LATEST:
        if not can_go_on(output):
            raise UsageError(
                f"--resume {output}: expected a checkpoint in {FOLDER}, there is none; a run that ended before its "
                "first checkpoint is started anew",
                code="resume-without-checkpoint",
            )
    elif not directory.place_of(output / FOLDER, checkpoint).is_dir():
        raise UsageError(
            f"--resume {output}: expected {Path(FOLDER) / checkpoint} in it, which is not there; there are: "
            f"{', '.join(_saved(output)) or 'none'}",
            code="resume-checkpoint-not-found",
        )


def written_by(output: Path, job: Sequence[str]) -> bool:
    """Whether a launch with one of these names writes, or wrote last, into ``output`` (job: [Note: The same job])."""
    try:
        return not set(job).isdisjoint(_read_run(output).get("job", ()))
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def first_ranks(output: Path) -> int:
    """Return the number of ranks that the run in ``output`` began with."""
    earlier = read(str(output))
    return earlier.first_ranks or earlier.ranks


def newest(output: Path) -> tuple[str, int] | None:
    """Return (tag, mtime of its directory) of the checkpoint with the most steps; None if this command made none."""
    with suppress(OSError, ValueError):
        tag = max((tag for tag in _saved(output) if directory.step_of(tag) is not None), key=step_of)
        return tag, directory.place_of(output / FOLDER, tag).stat().st_mtime_ns
    return None


def step_of(tag: str) -> int:
    """Return the number of steps in a tag of this command; 0 for any other tag."""
    return directory.step_of(tag) or 0


def can_go_on(output: Path) -> bool:
    """Whether a run's directory has a checkpoint, whatever ``latest`` says: ``load_checkpoint`` finds it."""
    return bool(_saved(output))


def drop_later(output: Path, loaded: str, steps: int) -> None:
    """Make ``loaded``, after ``steps`` steps, the last checkpoint: remove this command's later ones.

    A checkpoint with a name given by a user stays.
    """
    write_text(output / FOLDER / LATEST, f"{loaded}\n")
    for tag in _saved(output):
        if step_of(tag) > steps:
            shutil.rmtree(directory.place_of(output / FOLDER, tag), ignore_errors=True)


def _read_run(output: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((output / RUN).read_text(encoding="utf-8"))
    return facts


def arguments(settings: Settings) -> list[object]:
    """Return the options that give a rank the run's directory, and whether to resume."""
    changes = [part for change in settings.changes for part in ("--set", change)]
    if settings.resume is None:
        return ["--config", settings.config, "--output", settings.output, *changes]
    chosen = [] if settings.resume == LATEST else [FOLDER, settings.resume]
    return ["--resume", settings.output.joinpath(*chosen), *changes]


def hint(output: Path) -> str:
    """Return the end of a sentence about a run that ended too early: how to resume it; "" if that is not possible."""
    return f"; continue from its last checkpoint with --resume {output}" if can_go_on(output) else ""


class Checkpoints:
    """Saves and restores one run; every call is collective. Without ``--save-every`` they do nothing."""

    def __init__(self, engine: Engine, settings: Settings, blocks: TokenBlocks, rank_sums: RankSums) -> None:
        """Read and write nothing yet."""
        self._engine, self._settings, self._rank_sums = engine, settings, rank_sums
        self._folder = settings.output / FOLDER
        self._lock: int | None = None  # rank 0's open file, locked until close() or the process's end
        self._facts = _facts(engine, settings, blocks) if settings.save_every else {}

    def begin(self) -> None:
        """Lock the directory; for a resumed run, load the checkpoint into the engine.

        UsageError if another run writes there, or if the checkpoint cannot be read or was made with other data.
        """
        if not self._settings.save_every:
            return
        self._rank_sums.on_first("taking the output directory", self._take)
        try:
            if self._settings.resume is not None:
                loaded = self._load(None if self._settings.resume == LATEST else self._settings.resume)
                self._rank_sums.on_first(
                    "dropping what came after the checkpoint",
                    lambda: drop_later(self._settings.output, loaded.tag, loaded.global_steps),
                )
            self._rank_sums.on_first(f"writing {RUN}", lambda: write_run(self._settings, self._engine.world_size))
        except BaseException:
            self.close()
            raise

    def after(self, progress: Progress) -> None:
        """Save if a checkpoint is due after this step. The engine removes old ones, as the config says."""
        every, last = self._settings.save_every, progress.step == self._settings.steps
        if not every or not (progress.step % every == 0 or progress.stopped or last):
            return
        adapters_alone = self._settings.lora is not None
        self._engine.average_replicas()
        self._engine.save_checkpoint(self._folder, client_state=self._facts, frozen=not adapters_alone)
        if progress.stopped:
            self._engine.wait_for_checkpoint()  # the process may be killed before the model is saved

    def close(self) -> None:
        """Release the directory for other runs."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _load(self, tag: str | None) -> Checkpoint:
        """Load a checkpoint into the engine and return it. If the newest is damaged, this is an older one."""
        where = f"--resume {self._settings.output}"
        try:
            checkpoint = self._engine.load_checkpoint(self._folder, tag)
        except CheckpointError as error:
            places = ", ".join(str(self._folder / other) for other in _saved(self._settings.output))
            raise UsageError(
                f"{where}: {error}. --resume takes one of {places or 'no other'}", code="resume-checkpoint-not-loadable"
            ) from error
        saved = checkpoint.client_state
        different = [
            f"{name}: {saved.get(name)} in the checkpoint, {value} now"
            for name, value in self._facts.items()
            if saved.get(name) != value
        ]
        if different:
            text = "\n  - ".join(different)
            raise UsageError(
                f"{where}: {checkpoint.tag} was made with something else:\n  - {text}", code="resume-training-differs"
            )
        if checkpoint.global_steps > self._settings.steps:
            option, asked = self._settings.duration
            raise UsageError(
                f"{option} {asked}: {checkpoint.tag} has made {checkpoint.global_steps} steps already; expected at "
                "least as many",
                code="resume-steps-already-made",
            )
        return checkpoint

    def _take(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        patience = min(_PATIENCE_S, self._engine.config.timeout_s / 2) if self._settings.again else 0.0
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                self.close()
                raise UsageError(
                    f"{self._settings.output}: another run is writing into it, or its ranks are about to end; wait for "
                    "them" + (f" (this one did, for {patience:g} s)" if patience else ""),
                    code="output-written-by-another",
                ) from None
            except OSError:
                pass  # a file system without locks
            return


def write_run(settings: Settings, ranks: int) -> None:
    """Write the file that ``read`` reads."""
    facts: dict[str, Any] = {
        "model": None if settings.model is None else _absolute(settings.model),
        "data": settings.data if settings.data == BUILTIN else _absolute(settings.data),
        "length": settings.length,
        "steps": settings.steps,
        "planned_steps": settings.planned_steps,
        "save_every": settings.save_every,
        "ranks": ranks,
        "first_ranks": settings.first_ranks or ranks,
        "job": settings.job,
        "init": settings.init,
        "lora": settings.lora,
        "held_out": settings.held_out if settings.held_out in (None, BUILTIN) else _absolute(settings.held_out),
        "validate_every": settings.validate_every,
        "packing": settings.packing,
        "too_long": settings.too_long,
    }
    write_text(settings.output / RUN, json.dumps(facts, indent=2) + "\n")


def _facts(engine: Engine, settings: Settings, blocks: TokenBlocks) -> dict[str, Any]:
    """Return the facts that decide which rows are read when, and the learning rates; part of every checkpoint."""
    digest = hashlib.sha256()
    for rows in (blocks.training, blocks.validation):
        for tensor in rows.tensors.values():
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.numpy().tobytes())
    return {
        "SHA-256 of the rows of tokens": digest.hexdigest()[:16],
        "seed": engine.config.seed,
        "samples per step": engine.train_batch_size(),
        "steps of the learning-rate schedule": settings.planned_steps,
    }


def _absolute(path: str) -> str:
    """Return an existing path as absolute, so that it holds wherever the next run starts; any other text as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def _saved(output: Path) -> list[str]:
    """Return the tags of complete checkpoints, the earliest first."""
    return directory.present(output / FOLDER)[::-1]
