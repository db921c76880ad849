"""`shardengine train`: the parent process. Owns: checking before ranks start, starting them, the exit code.

Must not know: the training loop's inside. Under a launcher (see rendezvous; this command's own is torchrun) the process
is one rank and goes straight to the loop; otherwise it checks everything, builds the default model and runs torchrun
in this very process, so that a failure comes back as an object and only the failing rank's own traceback is printed.

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
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from shardengine import lr_schedules, mesh, rendezvous
from shardengine.app import corpus, stopping
from shardengine.app.settings import Settings, check_data, check_model, default_model_cache, require, reserve_output
from shardengine.app.together import Together
from shardengine.config import Config, load_config
from shardengine.errors import UsageError
from shardengine.launcher import default_ranks, describe_exit, rank_environment

MAX_RANKS = 1024


def run(options: argparse.Namespace) -> int:
    """Train with the command line's ``options``; returns the exit code.

    Raises ConfigError or UsageError, before any rank starts, for everything that is the user's to repair.
    """
    require("transformers", "tokenizers", extra="hf")
    inside = dist.is_initialized() or rendezvous.join()
    ranks = _ranks(options.ranks, inside)
    config = load_config(options.config).resolve_batch(ranks)
    if config.scheduler is not None:
        lr_schedules.check(config.scheduler)
    started_by_us = stopping.CONTROL in os.environ
    if not started_by_us:
        check_data(options.data)
        check_model(options.model)
    owns_group = not dist.is_initialized()
    together = Together(mesh.build(timeout_s=config.timeout_s)) if inside else None
    if started_by_us:
        output = Path(options.output)
    elif together is None or together.rank == 0:
        output = reserve_output(options.output, Path(options.config))
    else:
        output = Path()
    settings = Settings(
        config=Path(options.config),
        model=options.model,
        data=options.data,
        steps=options.steps,
        output=output if together is None else Path(together.from_first(str(output))),
        model_cache=Path(options.model_cache) if options.model_cache else default_model_cache(),
        length=options.length,
    )
    if together is None:
        return _run_parent(settings, ranks)
    _run_rank(settings, config, together)
    together.finish(destroy=owns_group)
    if started_by_us:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # all is said and written; gloo's threads sometimes abort a process that ends in the ordinary way
    return 0


def _ranks(wanted: int | None, inside: bool) -> int:
    """How many ranks there are, or will be."""
    if not inside:
        if wanted is not None and wanted > MAX_RANKS:
            raise UsageError(f"--ranks {wanted}: expected at most {MAX_RANKS} ranks on one machine")
        return wanted or default_ranks()
    there = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if wanted is not None and wanted != there:
        raise UsageError(f"--ranks {wanted}: the launcher has started {there}; leave --ranks out under a launcher")
    return there


def _run_rank(settings: Settings, config: Config, together: Together) -> None:
    """The loop on this rank. An exception is told to the parent and ends the process."""
    from shardengine.app import loop

    try:
        loop.train(settings, config, together)
    except BaseException as error:
        stopping.report_failure(error)
        sys.stdout.flush()
        os._exit(1)  # a process group in the middle of a collective may never come back from its destructor


def _run_parent(settings: Settings, ranks: int) -> int:
    """Build what the ranks need, start them, return the exit code."""
    control = Path(tempfile.mkdtemp(prefix="shardengine-"))
    os.environ.update(rank_environment(ranks))
    os.environ[stopping.CONTROL] = str(control)
    try:
        if settings.model is None:
            corpus.default_model(settings.model_cache)
        else:
            _check_loads(settings.model)
        with _requests_to_stop(control / "stop"):
            return _torchrun(settings, ranks, control)
    finally:
        del os.environ[stopping.CONTROL]
        shutil.rmtree(control, ignore_errors=True)
        with suppress(OSError):
            settings.output.rmdir()  # only if nothing was written: the next run may have the name


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
    command = ["--config", settings.config, "--data", settings.data, "--steps", settings.steps]
    command += ["--output", settings.output, "--model-cache", settings.model_cache, "--length", settings.length]
    if settings.model is not None:
        command += ["--model", settings.model]
    launcher = ["--standalone", "--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1"]
    launcher += ["--signals-to-handle", "SIGHUP", "-m", "shardengine", "train"]
    try:
        torchrun.main([*launcher, *map(str, command)])
    except ChildFailedError as error:
        return _explain(control, {rank: failure.exitcode for rank, failure in error.failures.items()}, settings)
    except KeyboardInterrupt:
        print("ended at once, nothing was saved", file=sys.stderr)
        return 1
    return 0


def _explain(control: Path, codes: dict[int, int], settings: Settings) -> int:
    """Print the failing rank's own traceback, or how a rank died that could not say anything; returns the exit code."""
    killed = [(rank, code) for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]  # that is torchrun
    failure = stopping.first_failure(control)
    if failure is not None and failure.is_usage:
        raise UsageError(failure.text)
    if killed or failure is None:
        rank, code = killed[0] if killed else next(iter(codes.items()))
        print(f"rank {rank} {describe_exit(code)}", file=sys.stderr)
    else:
        print(f"rank {failure.rank} failed:\n{failure.text}", file=sys.stderr, end="")
    print(f"what was written so far is in {settings.output}", file=sys.stderr)
    return 1


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
