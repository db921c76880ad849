"""`shardengine train`: the parent process. Owns: checking before ranks start, starting them, the exit code.

Must not know: the training loop's inside. Under a launcher (torchrun, or this command's own) the process is one rank and
goes straight to the loop; otherwise it checks everything, builds the default model once and runs torchrun in this very
process, so that a failure comes back as an object and only the failing rank's own traceback is printed.

Exit codes: 0 done, or stopped as asked · 1 a rank failed · 2 wrong usage, config or paths (raised, see cli).
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from shardengine import launch, lr_schedules
from shardengine.app import corpus, stopping
from shardengine.app.settings import Settings, check_data, check_model, default_model_cache, require, reserve_output
from shardengine.config import Config, load_config
from shardengine.errors import UsageError

_SAVE_S = "600"
"""Seconds that ranks may take to end by themselves before torchrun kills them (saving a large model takes a while)."""


def run(options: argparse.Namespace) -> int:
    """Train with the command line's ``options``; returns the exit code. Raises ConfigError or UsageError before any rank
    starts, and nothing else that is the user's to repair."""
    require("transformers", "tokenizers", extra="hf")
    inside = dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= set(os.environ)
    ranks = _ranks(options.ranks, inside)
    config = load_config(options.config).resolve_batch(ranks)
    if config.scheduler is not None:
        lr_schedules.check(config.scheduler)
    started_by_us = stopping.CONTROL in os.environ
    if not started_by_us:
        check_data(options.data)
        check_model(options.model)
    settings = Settings(
        config=Path(options.config),
        model=options.model,
        data=options.data,
        steps=options.steps,
        output=Path(options.output) if started_by_us else _output(options, inside),
        model_cache=Path(options.model_cache) if options.model_cache else default_model_cache(),
    )
    return _run_rank(settings, config, ranks) if inside else _run_parent(settings, ranks)


def _ranks(wanted: int | None, inside: bool) -> int:
    """How many ranks there are, or will be."""
    if not inside:
        return wanted or launch.default_ranks()
    there = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if wanted is not None and wanted != there:
        raise UsageError(f"--ranks {wanted}: the launcher has started {there}; leave --ranks out under a launcher")
    return there


def _output(options: argparse.Namespace, inside: bool) -> Path:
    """The run's own directory. Under somebody else's launcher the ranks cannot agree on a free name: it must be given."""
    if not inside:
        return reserve_output(options.output, Path(options.config))
    if options.output is None:
        raise UsageError("--output is missing: under a launcher every rank must be told the same new directory")
    first = (dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])) == 0
    return reserve_output(options.output, Path(options.config)) if first else Path(options.output)


def _run_rank(settings: Settings, config: Config, ranks: int) -> int:
    from shardengine.app import loop

    try:
        loop.train(settings, config, ranks)
    except BaseException as error:
        stopping.report_failure(error)
        sys.stdout.flush()
        os._exit(1)  # a process group in the middle of a collective may never come back from its destructor
    return 0


def _run_parent(settings: Settings, ranks: int) -> int:
    try:
        if settings.model is None:
            corpus.default_model(settings.model_cache)
        else:
            _check_loads(settings.model)
        control = Path(tempfile.mkdtemp(prefix="shardengine-"))
    except BaseException:
        settings.output.rmdir()  # still empty: the next run may have the name
        raise
    try:
        os.environ.update(launch.rank_environment(ranks))
        os.environ[stopping.CONTROL] = str(control)
        with _requests_to_stop(control / "stop"):
            return _torchrun(settings, ranks, control)
    finally:
        del os.environ[stopping.CONTROL]
        shutil.rmtree(control, ignore_errors=True)


def _check_loads(model: str) -> None:
    """UsageError unless the model's config and tokenizer can be loaded; a model on the Hub is fetched for all ranks."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(model)
        AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"--model {model}: expected a Hugging Face causal LM with its tokenizer: {error}") from None


def _torchrun(settings: Settings, ranks: int, control: Path) -> int:
    """Start the ranks, wait for them, print the cause of a failure."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it would print every failure again
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = _SAVE_S
    command = ["--config", settings.config, "--data", settings.data, "--steps", settings.steps]
    command += ["--output", settings.output, "--model-cache", settings.model_cache]
    if settings.model is not None:
        command += ["--model", settings.model]
    try:
        torchrun.main(
            ["--standalone", "--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1"]
            + ["--signals-to-handle", "SIGHUP", "-m", "shardengine", "train", *map(str, command)]
        )
    except ChildFailedError as error:
        _explain(control, {rank: failure.exitcode for rank, failure in error.failures.items()}, settings)
        return 1
    except KeyboardInterrupt:
        print("ended at once, nothing was saved", file=sys.stderr)
        return 1
    return 0


def _explain(control: Path, codes: dict[int, int], settings: Settings) -> None:
    """The failing rank's own traceback, or how a rank died that could not say anything."""
    ended_by_torchrun = {-signal.SIGTERM}
    killed = [(rank, code) for rank, code in codes.items() if code < 0 and code not in ended_by_torchrun]
    failure = stopping.first_failure(control)
    if killed or failure is None:
        rank, code = killed[0] if killed else next(iter(codes.items()))
        print(f"rank {rank} {launch.describe_exit(code)}", file=sys.stderr)
    else:
        print(f"rank {failure[0]} failed:\n{failure[1]}", file=sys.stderr, end="")
    print(f"what was written so far is in {settings.output}", file=sys.stderr)


@contextmanager
def _requests_to_stop(file: Path) -> Iterator[None]:
    """While ranks run, Ctrl-C and SIGTERM ask them to stop after their step; the second one ends everything at once."""

    def note(number: int, frame: FrameType | None) -> None:
        if file.exists():
            raise KeyboardInterrupt
        file.touch()
        print("\nstopping after this step and saving the model; once more to end at once", file=sys.stderr)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
