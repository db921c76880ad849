"""`shardengine train`: the parent process. Owns: checking before ranks start, starting them, the exit code.

Must not know: the training loop's inside. Under a launcher (see rendezvous; this command's own is torchrun) the process
is one rank and goes straight to the loop; otherwise it checks everything, builds the default model and runs torchrun
in this very process, so that a failure comes back as an object and only the failing rank's own traceback is printed.

Exit codes: 0 done, or stopped as asked · 1 a rank failed · 2 wrong usage, config or paths (raised, see cli).
"""

from __future__ import annotations

import argparse
import dataclasses
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

from shardengine import mesh, rendezvous
from shardengine.app import corpus, resume, stopping
from shardengine.app.settings import (
    BUILTIN,
    DEFAULT_LENGTH,
    DEFAULT_STEPS,
    Settings,
    check_data,
    check_model,
    check_trace,
    default_model_cache,
    read_config,
    require,
    reserve_output,
)
from shardengine.app.together import Together
from shardengine.config import Config
from shardengine.errors import UsageError
from shardengine.launcher import default_ranks, describe_exit, rank_environment

MAX_RANKS = 1024


def run(options: argparse.Namespace) -> int:
    """Train with the command line's ``options``; returns the exit code.

    Raises ConfigError or UsageError, before any rank starts, for everything that is the user's to repair.
    """
    require("transformers", "tokenizers", extra="hf")
    inside = dist.is_initialized() or rendezvous.join()
    earlier = resume.read(options.resume) if options.resume else None
    ranks = _ranks(options.ranks, inside, earlier.ranks if earlier else None)
    settings = earlier.settings(options, ranks) if earlier else _settings(options)
    if options.trace is not None:
        settings = dataclasses.replace(settings, trace=check_trace(Path(options.trace)))
    config = read_config(settings.config, ranks)
    started_by_us = stopping.CONTROL in os.environ
    if not started_by_us:
        check_data(settings.data)
        check_model(settings.model)
    owns_group = not dist.is_initialized()
    together = Together(mesh.build(timeout_s=config.timeout_s)) if inside else None
    if not started_by_us and earlier is None and (together is None or together.rank == 0):
        settings = dataclasses.replace(settings, output=reserve_output(options.output, settings.config))
    if together is not None:
        settings = dataclasses.replace(settings, output=Path(together.from_first(str(settings.output))))
    if together is None:
        return _run_parent(settings, ranks)
    _run_rank(settings, config, together)
    together.finish(destroy=owns_group)
    if started_by_us:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # all is said and written; gloo's threads sometimes abort a process that ends in the ordinary way
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    """What a new run is asked to do. ``output`` is only the wish: it is not made yet."""
    if options.config is None:
        raise UsageError("expected --config FILE (for example configs/zero2.json), or --resume DIR")
    steps = options.steps or DEFAULT_STEPS
    return Settings(
        config=Path(options.config),
        model=options.model,
        data=options.data or BUILTIN,
        steps=steps,
        output=Path(options.output or ""),
        model_cache=Path(options.model_cache) if options.model_cache else default_model_cache(),
        length=options.length or DEFAULT_LENGTH,
        save_every=options.save_every or 0,
        planned_steps=steps,
    )


def _ranks(wanted: int | None, inside: bool, before: int | None) -> int:
    """How many ranks there are, or will be. before: what a resumed run had."""
    if not inside:
        if wanted is not None and wanted > MAX_RANKS:
            raise UsageError(f"--ranks {wanted}: expected at most {MAX_RANKS} ranks on one machine")
        return wanted or before or default_ranks()
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
    launched = ["train", "--data", settings.data, "--steps", settings.steps, "--length", settings.length]
    launched += ["--model-cache", settings.model_cache]
    launched += ["--model", settings.model] if settings.model is not None else []
    launched += ["--save-every", settings.save_every] if settings.save_every else []
    launched += ["--trace", settings.trace] if settings.trace is not None else []
    launched += resume.arguments(settings)
    launcher = ["--standalone", "--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1"]
    launcher += ["--signals-to-handle", "SIGHUP", "-m", "shardengine"]
    try:
        torchrun.main([*launcher, *map(str, launched)])
    except ChildFailedError as error:
        return _explain(control, {rank: failure.exitcode for rank, failure in error.failures.items()}, settings)
    except KeyboardInterrupt:
        print(f"ended at once, the model was not saved{resume.hint(settings.output)}", file=sys.stderr)
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
    print(f"what was written so far is in {settings.output}{resume.hint(settings.output)}", file=sys.stderr)
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
