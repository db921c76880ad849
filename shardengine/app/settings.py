"""The options of `shardengine train`, checked. Owns: defaults, paths that must or must not exist, optional packages.

Must not know: models, the work of ranks. Nothing here is slow, so a wrong path is reported at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardengine.app import adapters, hub_data, jsonl, sources
from shardengine.config import (
    MICRO,
    TRIPLE,
    Config,
    Source,
    fitting_ranks,
    load_config,
    provisional,
    read_tree,
    undecided,
)
from shardengine.errors import UsageError
from shardengine.optim import lr_schedules
from shardengine.planner import global_batch

BUILTIN = "builtin:pydoc"
DEFAULT_LENGTH, DEFAULT_STEPS = 128, 200
FROM_WEIGHTS, FROM_CONFIG = "from-weights", "from-config"
JOINED, APART, NONE = PACKINGS = ("joined", "apart", "none")
TRUNCATE, DROP = TOO_LONG = ("truncate", "drop")
_KEEP_LAST = 2
_OUTPUT_ROOT = Path("runs")


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    ``model`` None: the small default model · ``data``: a file or ``builtin:pydoc`` · ``output`` exists · length: tokens
    per row of data, at most the model's positions · save_every: steps between checkpoints; 0: none · planned_steps: the
    length of the built-in learning-rate schedule; a resumed run keeps the earlier one's · resume: the checkpoint to
    resume from, "latest" or a tag; None: a new run · trace: the file for the Chrome trace · first_ranks: the number of
    ranks that the run began with; 0 in a new one · job: the names of the launch that makes the run · again: whether
    earlier ranks of the same launch used ``output`` · init: the source of the first weights · seed: replaces the
    config's · lora: adapters, see adapters.parse · held_out: a file for validation; None: the last part of the data ·
    validate_every: steps between validations; 0: a tenth of all · packing, too_long: see reading · plan: whether the
    run is planned before it begins · changes: to the config, see sources · epochs: how often all rows are read;
    ``steps`` is then derived once the data is read; None: ``steps`` is the length of the run.
    """

    config: Path
    model: str | None
    data: str
    steps: int
    output: Path
    model_cache: Path
    length: int = DEFAULT_LENGTH
    save_every: int = 0
    planned_steps: int = 0
    resume: str | None = None
    trace: Path | None = None
    first_ranks: int = 0
    job: tuple[str, ...] = ()
    again: bool = False
    init: str = FROM_WEIGHTS
    seed: int | None = None
    lora: str | None = None
    held_out: str | None = None
    validate_every: int = 0
    packing: str | None = None
    too_long: str = TRUNCATE
    plan: bool = True
    changes: tuple[str, ...] = ()
    epochs: float | None = None

    def read_config(self, ranks: int, auto: Mapping[str, int] | None = None) -> Config:
        """Return the config for ``ranks`` ranks. A run that resumes or restarts keeps its global batch.

        Exception: a restarted run that leaves the micro-batch to a plan uses the plan's values for these ranks.

        auto: the values decided for "auto"; None: not decided yet, provisional values are used.
        """
        source = self.source
        if self.resume is not None:
            return keep_batch(load_config(source), ranks)
        auto = provisional(source) if auto is None else auto
        if self.first_ranks and MICRO not in undecided(source):
            return keep_batch(read_config(source, self.first_ranks, self.seed, auto=auto), ranks)
        return read_config(source, ranks, self.seed, auto=auto)

    @property
    def duration(self) -> tuple[str, float]:
        """The option that sets the length of the run, and its value."""
        return ("--steps", self.steps) if self.epochs is None else ("--epochs", self.epochs)

    @property
    def source(self) -> sources.Source:
        """The config of the file with the command line's changes; the file alone if there are none."""
        return sources.changed(self.config, self.changes)

    def with_steps(self, rows: int, samples: int) -> Settings:
        """Derive the steps, of ``samples`` each, from ``epochs`` of ``rows`` rows; the last step is filled up."""
        if self.epochs is None:
            return self
        steps = max(1, math.ceil(self.epochs * rows / samples))
        return dataclasses.replace(self, steps=steps, planned_steps=self.planned_steps if self.resume else steps)


def default_model_cache() -> Path:
    """Return the directory of the default model: $XDG_CACHE_HOME/shardengine, otherwise ~/.cache/shardengine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardengine"


def read_config(
    source: sources.Source,
    ranks: int,
    seed: int | None = None,
    *,
    micro_batch: int | None = None,
    auto: Mapping[str, int] | None = None,
) -> Config:
    """Return the config of a run on ``ranks`` ranks, complete: with all batch sizes and an optimizer.

    seed, micro_batch (samples of a rank, with as many micro-batches as the config says): None: the config's own · auto:
    as for ``load_config``.
    """
    config = load_config(source, auto)
    if micro_batch is not None:
        config = dataclasses.replace(config, train_micro_batch_size_per_gpu=micro_batch, train_batch_size=None)
    config = _complete(config.resolve_batch(ranks))
    return config if seed is None else dataclasses.replace(config, seed=seed)


def read_base(source: sources.Source) -> dict[str, Any]:
    """Return a config, checked, to derive others from.

    It has a run's optimizer if it names none, and needs no batch size.
    """
    tree = read_tree(source) if isinstance(source, Path) else dict(source)
    load_config({**tree, MICRO: 1} if global_batch(tree, 1) is None else source, provisional(source))
    return sources.with_optimizer(tree)


def keep_batch(config: Config, ranks: int) -> Config:
    """Adapt a config that was resolved for some number of ranks to another one.

    Global batch and micro-batch stay; the accumulation follows. If that is impossible, UsageError lists the numbers of
    ranks that are possible.
    """
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if total and micro:
        if total % (micro * ranks):
            fitting = ", ".join(map(str, fitting_ranks(total, micro)))
            raise UsageError(
                f"{ranks} ranks: the run steps on {total} samples, {micro} per rank and micro-batch, and keeps both; "
                f"{total} is no multiple of {micro} * {ranks}. Expected one of these numbers of ranks: {fitting}",
                code="resume-ranks-do-not-divide",
            )
        given: dict[str, Source] = dict.fromkeys(TRIPLE, "file")
        accumulation = total // (micro * ranks)
        config = dataclasses.replace(
            config, gradient_accumulation_steps=accumulation, sources={**config.sources, **given}
        )
    return _complete(config.resolve_batch(ranks))


def _complete(config: Config) -> Config:
    if config.checkpoint.keep_last is None:
        checkpoint = dataclasses.replace(config.checkpoint, keep_last=_KEEP_LAST)
        config = dataclasses.replace(config, checkpoint=checkpoint)
    if config.scheduler is not None:
        lr_schedules.check(config.scheduler)
    return dataclasses.replace(config, optimizer=config.optimizer or sources.DEFAULT_OPTIMIZER)


def check_trace(path: Path) -> Path:
    """Return ``path`` as absolute; UsageError unless a file can be written there."""
    if path.is_dir() or not path.resolve().parent.is_dir() or not os.access(path.resolve().parent, os.W_OK):
        raise UsageError(
            f"--trace {path}: expected the name of a file in a directory that is there and can be written",
            code="trace-file-invalid",
        )
    return path.resolve()


def require(*packages: str, extra: str, what: str = "this") -> None:
    """UsageError, naming the extra to install, if one of ``packages`` is missing.

    what: the option or command that needs them.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UsageError(
            f"{what} needs {' and '.join(missing)}, which is not installed: pip install 'shardengine[{extra}]'",
            code="package-not-installed",
        )


def require_lora(text: str, option: str = "--lora") -> None:
    """UsageError if ``--lora text`` cannot be parsed, or if a package that it needs is missing."""
    packed = adapters.packs_base(text)
    require("peft", extra="lora", what=option)
    if packed:
        require("bitsandbytes", extra="qlora", what="--lora bits=4" if option == "--lora" else option)


def check_data(data: str, option: str = "--data") -> None:
    """UsageError unless ``data`` is the built-in corpus, a Hub dataset, UTF-8 text or JSON lines, without errors."""
    if data == BUILTIN:
        return
    if data.startswith("builtin:"):
        raise UsageError(f"{option} {data}: expected a text file or {BUILTIN}", code="data-builtin-unknown")
    path = Path(data)
    if hub_data.is_name(data):
        hub_data.read(data, option)
        return
    if not path.is_file():
        raise UsageError(
            f"{option} {data}: expected a text file, JSON lines, {BUILTIN} or a dataset of the Hub "
            f"(ORGANISATION/NAME), found {_kind(path)}",
            code="data-not-found",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{option} {data}: expected UTF-8 text, byte {error.start} is not; convert it, for example with iconv",
            code="data-not-utf8",
        ) from None
    except OSError as error:
        raise UsageError(f"{option} {data}: cannot be read: {error.strerror}", code="data-unreadable") from None
    if jsonl.is_jsonl(data):
        jsonl.read(data, option)
    elif not text.strip():
        raise UsageError(f"{option} {data}: is empty; expected UTF-8 text", code="data-empty")


def check_model(model: str | None) -> None:
    """UsageError if ``model`` looks like a path and no Hugging Face model is there."""
    if model is None:
        return
    path = Path(model)
    is_path = path.is_absolute() or model.startswith((".", "~")) or path.exists() or model.count("/") > 1
    if is_path and not (path / "config.json").is_file():
        raise UsageError(
            f"--model {model}: expected a Hugging Face model (a directory with config.json, weights and tokenizer, or "
            f"the name of a model on the Hub), found {_kind(path)}",
            code="model-not-found",
        )


def reserve_output(wanted: str | None, config: Path) -> Path:
    """Make the output directory, so that no other run can take it.

    A directory that the user names must be new or empty. Otherwise the first free one of ``outputs`` is taken: a run
    never writes into an earlier one's output.
    """
    try:
        if wanted is not None:
            path = Path(wanted)
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise UsageError(
                    f"--output {wanted} is not empty, and a run never overwrites another one: name a new directory, or "
                    f"leave --output out (the next free directory under {_OUTPUT_ROOT}/ is taken)",
                    code="output-not-empty",
                )
            return path
        _OUTPUT_ROOT.mkdir(exist_ok=True)
        for path in outputs(None, config):
            with suppress(FileExistsError):
                path.mkdir()
                break
        return path
    except OSError as error:
        place = wanted or f"{_OUTPUT_ROOT}/"
        raise UsageError(
            f"cannot make the output directory {place}: {error.strerror}; choose one with --output",
            code="output-not-made",
        ) from None


def outputs(wanted: str | None, config: Path) -> Iterator[Path]:
    """Yield the directories that a run may use.

    ``wanted`` alone; by default runs/<name of the config>, then runs/<name>-2, -3, …, without end.
    """
    if wanted is not None:
        yield Path(wanted)
        return
    yield _OUTPUT_ROOT / config.stem
    for number in itertools.count(2):
        yield _OUTPUT_ROOT / f"{config.stem}-{number}"


def _kind(path: Path) -> str:
    if path.is_dir():
        return "a directory without config.json" if not (path / "config.json").exists() else "a directory"
    return "a file" if path.exists() else "nothing there"
