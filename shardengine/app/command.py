"""`shardengine train`: the parent process. Owns: checks before ranks start, starting them, the exit code.

Must not know: the inside of the training loop. Under a launcher (see rendezvous; this command's own is torchrun) the
process is one rank and goes straight to the loop. Otherwise it checks everything, builds the default model and runs
torchrun in this process. So a failure comes back as an object, and only the failing rank's own traceback is printed.
With --max-restarts, ranks that died are started again (see restarts); a user's launcher does that by itself.

Exit codes: 0 done, or stopped on request · 1 a rank failed · 2 wrong usage, config or paths (raised, see cli).
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
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from shardengine.app import adapters, corpus, job, resume, sources, stopping
from shardengine.app.rank_sums import RankSums
from shardengine.app.restarts import Decision, Restarts, death
from shardengine.app.settings import (
    BUILTIN,
    DEFAULT_LENGTH,
    DEFAULT_STEPS,
    FROM_CONFIG,
    FROM_WEIGHTS,
    TRUNCATE,
    Settings,
    check_data,
    check_model,
    check_trace,
    default_model_cache,
    require,
    require_lora,
    reserve_output,
)
from shardengine.comm import RankFailure, default_ranks, devices, mesh, rank_environment, rendezvous
from shardengine.config import Config, load_or_default
from shardengine.errors import ConfigError, UsageError

MAX_RANKS = 1024


def run(options: argparse.Namespace) -> int:
    """Train with the command line's ``options``; return the exit code.

    Raises ConfigError or UsageError, before any rank starts, for every error that the user can repair.
    """
    require("transformers", "tokenizers", extra="hf")
    inside = dist.is_initialized() or rendezvous.join()
    earlier = resume.read(options.resume) if options.resume else None
    ranks = _ranks(options.ranks, inside, earlier.ranks if earlier else None)
    settings = earlier.settings(options) if earlier else _settings(options)
    if options.trace is not None:
        settings = dataclasses.replace(settings, trace=check_trace(Path(options.trace)))
    settings = dataclasses.replace(settings, plan=not options.no_plan)
    if stopping.CONTROL not in os.environ:
        _check_restarts(options, settings, inside)
        _check_lora(settings)
        check_model(settings.model)
        check_data(settings.data)
        if settings.held_out is not None:
            check_data(settings.held_out, "--eval")
    if options.dry_run:
        return _dry_run(settings, ranks)
    if inside:
        return _run_inside(options, settings)
    settings.read_config(ranks)
    if settings.resume is not None:
        resume.require(settings.output, settings.resume)
    else:
        settings = dataclasses.replace(settings, output=reserve_output(options.output, settings.config))
    return _run_parent(settings, ranks, options.max_restarts or 0)


def _dry_run(settings: Settings, ranks: int) -> int:
    """Plan the run and print its needs. If a launcher has started several ranks, only the first one does so."""
    from shardengine.app import dry_run

    if os.environ.get("RANK", "0") != "0":
        return 0
    if settings.model is not None:
        _check_loads(settings.model)
    return dry_run.run(settings, ranks)


def _run_inside(options: argparse.Namespace, settings: Settings) -> int:
    """Run as one rank. The ranks first agree on the output directory and on whether the run resumes."""
    started_by_us = stopping.CONTROL in os.environ
    owns_group = not dist.is_initialized()
    said = load_or_default(settings.source)  # the batch sizes are worked out later: see job, [Note: The same job]
    rank_sums = RankSums(mesh.build(timeout_s=said.timeout_s))
    try:
        settings = job.settle(options, settings, rank_sums, reserved=started_by_us)
        config = settings.read_config(rank_sums.mesh.ranks)
    except (ConfigError, UsageError, SystemExit):
        if owns_group and dist.is_initialized():
            dist.destroy_process_group()  # with nothing in flight: it fails on every rank
        raise
    stopped_by_another = _run_rank(settings, config, rank_sums)
    rank_sums.finish(destroy=owns_group)
    code = job.GO_ON if not started_by_us and job.others_go_on(stopped_by_another) else 0
    if started_by_us or code:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # all output is written; gloo's threads sometimes abort a process that ends the ordinary way
    return 0


def _check_lora(settings: Settings) -> None:
    if settings.lora is None:
        return
    require_lora(settings.lora)
    if settings.init == FROM_CONFIG:
        raise UsageError(
            f"--lora with --init {FROM_CONFIG}: expected a base model that is kept, because adapters alone are trained "
            "and written; leave one of them out",
            code="lora-without-base-weights",
        )


def _check_restarts(options: argparse.Namespace, settings: Settings, inside: bool) -> None:
    if not options.max_restarts:
        return
    if inside:
        raise UsageError(
            f"--max-restarts {options.max_restarts}: a launcher starts the ranks; give it to torchrun",
            code="train-restarts-under-launcher",
        )
    if not settings.save_every:
        raise UsageError(
            f"--max-restarts {options.max_restarts}: expected --save-every as well, because ranks that died resume "
            "from the last checkpoint",
            code="train-restarts-without-saving",
        )


def _settings(options: argparse.Namespace) -> Settings:
    """Return the settings of a new run. ``output`` is only the requested name: the directory is not made yet."""
    if options.config is None:
        raise UsageError(
            "expected --config FILE, or the name of a recipe (for example --config demo), or --resume DIR",
            code="config-missing",
        )
    steps = options.steps or DEFAULT_STEPS
    return Settings(
        config=sources.find(options.config),
        model=options.model,
        data=options.data or BUILTIN,
        steps=steps,
        output=Path(options.output or ""),
        model_cache=Path(options.model_cache) if options.model_cache else default_model_cache(),
        length=options.length or DEFAULT_LENGTH,
        save_every=options.save_every or 0,
        planned_steps=steps,
        init=options.init or FROM_WEIGHTS,
        seed=options.seed,
        lora=options.lora,
        held_out=options.eval,
        validate_every=options.eval_every or 0,
        packing=options.packing,
        too_long=options.too_long or TRUNCATE,
        changes=(*sources.changes_of(options.set, options.lr), *sources.monitors(options.log)),
        epochs=options.epochs,
    )


def _ranks(wanted: int | None, inside: bool, before: int | None) -> int:
    """Return the number of ranks. before: that of the run to resume."""
    if not inside:
        if wanted is not None and wanted > MAX_RANKS:
            raise UsageError(
                f"--ranks {wanted}: expected at most {MAX_RANKS} ranks on one machine", code="train-ranks-too-many"
            )
        ranks = wanted or before or default_ranks()
        if devices.count() and (few := devices.too_few(ranks)):
            raise UsageError(
                f"--ranks {ranks}: expected a GPU for each, but {few}; {devices.WISH}=cpu trains on the CPU",
                code="launch-too-few-gpus",
            )
        return ranks
    there = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if wanted is not None and wanted != there:
        raise UsageError(
            f"--ranks {wanted}: the launcher has started {there}; leave --ranks out under a launcher",
            code="train-ranks-under-launcher",
        )
    return there


def _run_rank(settings: Settings, config: Config, rank_sums: RankSums) -> bool:
    """Run the loop on this rank, see loop.train. An exception is reported to the parent and ends the process."""
    from shardengine.app import loop

    try:
        return loop.train(settings, config, rank_sums)
    except BaseException as error:
        stopping.report_failure(error)
        sys.stdout.flush()
        os._exit(1)  # a process group in the middle of a collective may never come back from its destructor


def _run_parent(settings: Settings, ranks: int, max_restarts: int) -> int:
    """Build the default model if it is needed, start the ranks, and restart them if they die and may restart.

    Returns the exit code.
    """
    control = Path(tempfile.mkdtemp(prefix="shardengine-"))
    os.environ.update(rank_environment(ranks))
    os.environ[stopping.CONTROL] = str(control)
    try:
        if settings.model is not None:
            _check_loads(settings.model)
        base = settings.model or str(corpus.default_model(settings.model_cache))
        if settings.lora is not None:
            adapters.check(base, adapters.parse(settings.lora))
        restarts, name = Restarts(max_restarts, settings.output), uuid.uuid4().hex
        with _requests_to_stop(control / "stop"):
            while dead := _torchrun(settings, ranks, control, name):
                decision = Decision(False) if (control / "stop").exists() else restarts.again(dead)
                if not decision.again:
                    return _explain(dead, settings, decision.line)
                print(decision.line, file=sys.stderr, flush=True)
                stopping.forget_failures(control)
            return 0
    except KeyboardInterrupt:
        print(f"ended at once, the model was not saved{resume.hint(settings.output)}", file=sys.stderr)
        return 1
    finally:
        del os.environ[stopping.CONTROL]
        shutil.rmtree(control, ignore_errors=True)
        with suppress(OSError):
            settings.output.rmdir()  # only if nothing was written: the next run may have the name


def _check_loads(model: str) -> None:
    """UsageError unless the model's config and tokenizer can be loaded.

    A model on the Hub is downloaded for all ranks.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(model)
        AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"--model {model}: expected a Hugging Face causal LM with its tokenizer: {error}", code="model-not-loadable"
        ) from None


def _torchrun(settings: Settings, ranks: int, control: Path, name: str) -> RankFailure | None:
    """Start all ranks with torchrun in this process and wait for them; return None, or how one died.

    name: of the launch, the same at every restart.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it would print every failure again
    launched = ["train", "--data", settings.data, *settings.duration, "--length", settings.length]
    launched += ["--model-cache", settings.model_cache]
    launched += ["--model", settings.model] if settings.model is not None else []
    launched += ["--save-every", settings.save_every] if settings.save_every else []
    launched += ["--init", settings.init, "--too-long", settings.too_long]
    launched += ["--seed", settings.seed] if settings.seed is not None else []
    launched += ["--lora", settings.lora] if settings.lora is not None else []
    launched += ["--eval", settings.held_out] if settings.held_out is not None else []
    launched += ["--eval-every", settings.validate_every] if settings.validate_every else []
    launched += ["--packing", settings.packing] if settings.packing is not None else []
    launched += ["--trace", settings.trace] if settings.trace is not None else []
    launched += [] if settings.plan else ["--no-plan"]
    launched += resume.arguments(settings)
    launcher = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", name]  # on this machine alone
    launcher += ["--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1", "--max-restarts", "0"]
    launcher += ["--signals-to-handle", "SIGHUP", "-m", "shardengine"]
    try:
        torchrun.main([*launcher, *map(str, launched)])
    except ChildFailedError as error:
        return death(control, {rank: failure.exitcode for rank, failure in error.failures.items()})
    return None


def _explain(dead: RankFailure, settings: Settings, note: str) -> int:
    """Print the failing rank's traceback, or how a rank died that could not report an error; return the exit code."""
    if dead.is_usage and dead.trace:
        raise UsageError(dead.message, code="train-error-on-rank")
    print(dead.text, *([note] if note else []), sep="\n", file=sys.stderr)
    print(f"what was written so far is in {settings.output}{resume.hint(settings.output)}", file=sys.stderr)
    return 1


@contextmanager
def _requests_to_stop(file: Path) -> Iterator[None]:
    """While ranks run, Ctrl-C and SIGTERM ask them to stop after their step. A second one ends everything at once."""

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
