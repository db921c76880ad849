"""Step time of every stage against torch DDP and the compute limit, interleaved in one run in the same processes.

``python -m benchmarks.step`` starts the ranks itself, one thread each, pinned to its own core. Every rank holds one
copy of the model per variant; a round runs one step of each variant, in an order that rotates from round to round, and
lasts as long as its slowest rank. A ratio is the median over paired rounds with its 95% bootstrap interval. ``--rss``
measures peak memory instead, with a fresh group of processes per variant, because a peak belongs to a process.

Owns: the setting, the measuring loop and the report. ``variants.py`` knows how one step of each competitor is made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.reporting import MIN_ROUNDS, machine, paired_ratio, table, verdict, write_result
from benchmarks.variants import REFERENCE, VARIANTS, Setting, Variant, batch_of, make_model

BASE, LIMIT = "ddp", "compute"
LOSS_TOLERANCE = 0.01
"""Synchronised variants see the same data from the same start: a loss further apart than this means a wrong program."""


@dataclass(frozen=True)
class Plan:
    """What one group of ranks does: ``variants`` in turn, ``warmup`` steps each and then ``rounds`` measured rounds."""

    setting: Setting
    variants: tuple[str, ...]
    rounds: int
    warmup: int
    folder: str


def pin(rank: int) -> None:
    """One thread on one core of its own (ranks wrap around where there are fewer cores)."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def peak_rss_bytes() -> int:
    """The peak resident size of this process so far (``ru_maxrss`` inherits the parent's peak across exec)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel reports no VmHWM in /proc/self/status; peak memory cannot be measured here")


def timed_step(variant: Variant, setting: Setting, rank: int, number: int) -> tuple[float, float]:
    """One step of ``variant`` on all ranks at once: (seconds on this rank, loss). The clock starts after the batch."""
    batch = batch_of(setting, rank, number)
    dist.barrier()
    start = time.perf_counter()
    loss = variant.step(batch)
    return time.perf_counter() - start, loss


def measure(plan: Plan, rank: int) -> dict[str, Any]:
    """Build all variants, warm up, run the rounds. Seconds per variant and round, last losses, wire bytes, peak."""
    built: dict[str, Variant] = {}
    for name in plan.variants:
        built[name] = VARIANTS[name](make_model(plan.setting), plan.setting)
    seconds: dict[str, list[float]] = {name: [] for name in built}
    losses: dict[str, float] = {}
    names = list(built)
    for number in range(plan.warmup + plan.rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            taken, losses[name] = timed_step(built[name], plan.setting, rank, number)
            if number >= plan.warmup:
                seconds[name].append(taken)
        if rank == 0:
            print(f"\rround {number + 1} of {plan.warmup + plan.rounds}", end="", file=sys.stderr, flush=True)
    if rank == 0:
        print(file=sys.stderr)
    outcome = {
        "seconds": seconds,
        "losses": losses,
        "traffic": {name: variant.traffic() for name, variant in built.items()},
        "peak_rss_bytes": peak_rss_bytes(),
    }
    for variant in built.values():
        variant.close()
    return outcome


def rank_main(rank: int, plan: Plan) -> None:
    """One rank from start to end: join the group, measure, leave what it found in ``plan.folder``."""
    pin(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{plan.folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=plan.setting.ranks)
    before = peak_rss_bytes()
    outcome = measure(plan, rank) | {"rss_before_bytes": before}
    Path(plan.folder, f"rank{rank}.json").write_text(json.dumps(outcome), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run_group(setting: Setting, variants: Sequence[str], rounds: int, warmup: int) -> list[dict[str, Any]]:
    """Start a group of ranks for ``variants`` and return what each rank found, in rank order."""
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-") as folder:
        plan = Plan(setting, tuple(variants), rounds, warmup, folder)
        spawn(rank_main, args=(plan,), nprocs=setting.ranks)
        files = [Path(folder, f"rank{rank}.json") for rank in range(setting.ranks)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def check_memory(setting: Setting, variants: Sequence[str]) -> None:
    """Refuse a run that would not fit: 16 bytes per parameter, variant and rank (weights, gradients, two moments)."""
    need = 16 * setting.parameters() * len(variants) * setting.ranks
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if need > free:
        raise SystemExit(
            f"{len(variants)} variants on {setting.ranks} ranks need about {need / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free: choose fewer with --variants (keep '{BASE}' and '{LIMIT}')"
        )


def check_losses(losses: dict[str, float]) -> None:
    """Raise if a synchronised variant ends at another loss than DDP: then its time is not worth reporting."""
    for name, loss in losses.items():
        if name != LIMIT and BASE in losses and not abs(loss - losses[BASE]) <= LOSS_TOLERANCE * losses[BASE]:
            raise SystemExit(f"{name} ended at loss {loss:.4f} and {BASE} at {losses[BASE]:.4f}: not the same training")


def summarise(found: list[dict[str, Any]], setting: Setting, targets: dict[str, float]) -> dict[str, Any]:
    """Per variant: median step, ratio to DDP, fraction of the limit, exposed time, bytes, verdict on a target."""
    rounds: dict[str, list[float]] = {}
    for name in found[0]["seconds"]:
        per_rank = [rank["seconds"][name] for rank in found]
        rounds[name] = [max(ranks) for ranks in zip(*per_rank, strict=True)]
    check_losses(found[0]["losses"])
    summary: dict[str, Any] = {}
    for name, seconds in rounds.items():
        median = statistics.median(seconds)
        tokens = setting.ranks * setting.batch * setting.sequence
        row: dict[str, Any] = {"median_ms": median * 1e3, "tokens_per_s": tokens / median}
        row |= {"loss": found[0]["losses"][name], **found[0]["traffic"][name]}
        if BASE in rounds:
            ratio = paired_ratio(seconds, rounds[BASE])
            row["ratio_to_ddp"] = asdict(ratio)
            if name in targets:
                row |= {"target": targets[name], "verdict": verdict(ratio, targets[name])}
        if LIMIT in rounds:
            row["fraction_of_limit"] = paired_ratio(rounds[LIMIT], seconds).median
            exposed = [mine - limit for mine, limit in zip(seconds, rounds[LIMIT], strict=True)]
            row["exposed_ms"] = statistics.median(exposed) * 1e3
        summary[name] = row | {"seconds": seconds}
    return summary


def print_times(summary: dict[str, Any]) -> None:
    """The table of a timing run."""
    header = [
        "variant",
        "× DDP [95%]",
        "target",
        "verdict",
        "limit/measured",
        "exposed ms",
        "ms",
        "tokens/s",
        "MB sent",
    ]
    rows = []
    for name, row in summary.items():
        ratio = row.get("ratio_to_ddp")
        rows.append([
            name,
            f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else "-",
            f"{row['target']:.2f}" if "target" in row else "-",
            row.get("verdict", "-"),
            f"{row['fraction_of_limit']:.2f}" if "fraction_of_limit" in row else "-",
            f"{row['exposed_ms']:.0f}" if "exposed_ms" in row else "-",
            f"{row['median_ms']:.0f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['sent_bytes_per_step'] / 1e6:.1f} (limit {row['limit_bytes_per_step'] / 1e6:.1f})"
            if row.get("sent_bytes_per_step") is not None else "-",
        ])  # fmt: skip
    print(table(header, rows))


def measure_rss(setting: Setting, variants: Sequence[str], steps: int) -> dict[str, Any]:
    """Peak resident bytes per variant (largest rank), above what the process held before the model was built."""
    summary = {}
    for name in variants:
        found = run_group(setting, [name], rounds=steps, warmup=0)
        peak = max(rank["peak_rss_bytes"] for rank in found)
        base = max(rank["rss_before_bytes"] for rank in found)
        summary[name] = {"peak_rss_bytes": peak, "before_bytes": base, "own_peak_bytes": peak - base}
    return summary


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=REFERENCE.ranks)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each variant before the first measured round")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        default=list(VARIANTS),
        metavar="NAME",
        help="any of: " + ", ".join(VARIANTS),
    )
    parser.add_argument("--target", nargs="+", default=[], metavar="NAME=RATIO", help="e.g. ours-3=1.06 (× DDP)")
    parser.add_argument("--layers", type=int, default=REFERENCE.layers)
    parser.add_argument("--hidden", type=int, default=REFERENCE.hidden)
    parser.add_argument("--vocabulary", type=int, default=REFERENCE.vocabulary)
    parser.add_argument("--batch", type=int, default=REFERENCE.batch, help="sequences per rank and step")
    parser.add_argument("--sequence", type=int, default=REFERENCE.sequence, help="tokens per sequence")
    parser.add_argument("--rss", action="store_true", help="measure peak memory, one fresh process group per variant")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if min(options.ranks, options.rounds, options.layers) < 1 or options.warmup < 0:
        parser.error("--ranks, --rounds and --layers must be at least 1, --warmup at least 0")
    if options.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64 (one attention head has 64), got {options.hidden}")
    try:
        options.target = {name: float(value) for name, value in (item.split("=") for item in options.target)}
    except ValueError:
        parser.error(f"--target wants NAME=RATIO such as ours-3=1.06, got {' '.join(options.target)}")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdicts: a benchmark reports, a test decides."""
    options = parse(argv)
    setting = Setting(
        options.ranks, options.layers, options.hidden, options.vocabulary, options.batch, options.sequence
    )
    cores = len(os.sched_getaffinity(0))
    result: dict[str, Any] = {
        "benchmark": "step_rss" if options.rss else "step",
        "machine": machine(),
        "setting": asdict(setting) | {"parameters": setting.parameters(), "threads_per_rank": 1},
        "rounds": options.rounds,
    }
    shared = " (ranks share cores)" if setting.ranks > cores else ""
    print(
        f"GPT-2, {setting.parameters() / 1e6:.1f}M parameters, fp32, AdamW, clip 1.0, {setting.batch} × "
        f"{setting.sequence} tokens per rank, {setting.ranks} ranks × 1 thread on {cores} cores{shared}, "
        f"{result['machine']['processor']}",
        file=sys.stderr,
    )
    if options.rss:
        check_memory(setting, options.variants[:1])
        result["variants"] = measure_rss(setting, options.variants, steps=3)
    else:
        check_memory(setting, options.variants)
        found = run_group(setting, options.variants, options.rounds, options.warmup)
        result["variants"] = summarise(found, setting, options.target)
    if options.json:
        print(json.dumps(result, indent=1))
    elif options.rss:
        rows = [
            [name, f"{row['peak_rss_bytes'] / 2**20:.0f}", f"{row['own_peak_bytes'] / 2**20:.0f}"]
            for name, row in result["variants"].items()
        ]
        print(table(["variant", "peak RSS MiB", "above the imports"], rows))
    else:
        print_times(result["variants"])
    if replace(setting, ranks=REFERENCE.ranks) != REFERENCE:
        print("not written: results are kept for the reference setting only", file=sys.stderr)
    elif not options.no_write:
        name = result["benchmark"] + (f"-n{setting.ranks}" if setting.ranks != 2 else "")
        print(f"written to {os.path.relpath(write_result(name, result))}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
