"""Training with the optimizer on the CPU, on one GPU: shardengine beside DeepSpeed ZeRO-Offload, FSDP2 and torchao.

``python -m benchmarks.offload_gpu`` prints tables and writes ``benchmarks/results/offload_gpu-<machine>.json``. It
takes ``--minutes`` at most and keeps, after each part, what was measured until then; ``--parts`` measures some of them
and leaves the others in the file, if that is of the same machine and versions. The parts:

    1.5B, 4B   a step of 4 × 1024 tokens in bf16, blocks computed again in backward (``benchmarks/gpt2.py``)
    largest    the layers of a wide model doubled until it does not train, each attempt in a fresh process

Processes. Everyone has a fresh process, so that peaks of memory are its own and one library's changes to torch reach no
other. A competitor holds 16 bytes per parameter of host memory and more (page-locked blocks are rounded up to powers of
two), so only as many are alive at the same time as fit: of 1.5B several, which then take turns, a step each, in an
order that rotates; of 4B one, and its ratio is one of medians at two times, without an interval. Whoever runs out of
memory is a row that says so.

``× ours`` is time over that of shardengine with the same placement: stage 2 for those with weights on the device, stage
3 with ``offload_param`` for those with weights in host memory, too (FSDP2). ``bound`` is that of docs/limits.md, from
rates and from ``compute`` (forward and backward alone) measured in this run, over the median step. All begin with the
same weights and see one batch again and again: first losses further apart than LOSS_TOLERANCE, or less than LEAST_WAY
of the way that ours go, mean another training, and take the ratio away. MFU is that of ``gpu_step.py``; what is
computed again does not count.

Owns: the command line, the ratios and the report. ``offload_variants.py`` knows the competitors, ``offload_workers.py``
their processes, ``offload_turns.py`` who runs when, ``offload_bound.py`` the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu_step import flops_per_step
from benchmarks.offload_bound import Rates, bound
from benchmarks.offload_turns import Conditions, Found, attempt, groups_of, largest, run_group
from benchmarks.offload_variants import BASES, COMPETITORS, LIMIT, installed
from benchmarks.offload_workers import Failed, free_host_bytes
from benchmarks.reporting import machine, paired_ratio, result_path, table, write_result
from benchmarks.workload import Setting

MODELS = {"1.5B": Setting(1, 48, 1600, 50257, 4, 1024), "4B": Setting(1, 34, 3072, 50257, 4, 1024)}
LARGEST = "largest"
WIDE, MOST_LAYERS = Setting(1, 16, 4096, 50257, 4, 1024), 1024
"""Of the largest model: the first attempt, 3.4B parameters, and the last that would be made."""
TINY, TINY_MOST = Setting(1, 2, 64, 96, 2, 16), 4
SEARCHED = ("ours-2", "ours-3")
WEIGHTS = {"1.5B": 2.0, "4B": 3.0, LARGEST: 3.0}
"""How the parts share the time that is left."""
CLOSING_S = 20.0
"""Of the time, for ending processes and writing."""
LEAST_PART_S = 15.0
"""A part is not begun with less."""
HOST_SHARE = 0.9
FLOOR = {"cuda": 2.0 * 2**30, "cpu": 0.0}
LOSS_TOLERANCE, FIRST_LOSSES = 0.02, 4
"""Relative, of the losses before the first steps: libraries round in different places, which makes less than this."""
LEAST_WAY = 0.5
"""Of the way that the reference's loss goes in these steps: who does not train stays where it was."""


def assemble(groups: Sequence[Sequence[str]], found: Sequence[Found], setting: Setting, rates: Rates) -> dict[str, Any]:
    """The part of one model: a row for everyone that was measured, the bounds, and who failed why."""
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for number, group in enumerate(found):
        failed |= group.failed
        for name, seconds in group.seconds.items():
            row = {"group": number, **described(name, seconds, setting, rates), **group.answers[name]}
            base = group.seconds.get(BASES[COMPETITORS[name].weights_away])
            row["paired"] = asdict(paired_ratio(seconds, base)) if base else None
            rows.setdefault(name, row | {"seconds": seconds, "losses": group.losses[name]})
    computed = LIMIT in rows
    compute = rows[LIMIT]["median_s"] if computed else flops_per_step(setting) * 4 / 3 / rates.product
    bounds = {away: bound(setting, rates, compute, weights_away=away) for away in BASES}
    reference: list[float] = next((rows[base]["losses"] for base in BASES.values() if base in rows), [])
    for name, row in rows.items():
        away = COMPETITORS[name].weights_away
        if COMPETITORS[name].trains:
            row["fraction_of_bound"] = bounds[away].total / row["median_s"]
        judge(row, rows.get(BASES[away]), reference, trains=COMPETITORS[name].trains)
    return {
        "setting": asdict(setting) | {"parameters": setting.parameters()},
        "groups": [list(group) for group in groups],
        "rates": asdict(rates),
        "compute_from": "measured" if computed else "the bf16 product, with what is computed again",
        "bounds_s": {BASES[away]: asdict(each) | {"total": each.total} for away, each in bounds.items()},
        "variants": {name: rows[name] for name in COMPETITORS if name in rows},
        "failed": {name: reason for name, reason in failed.items() if name not in rows},
    }


def described(name: str, seconds: Sequence[float], setting: Setting, rates: Rates) -> dict[str, Any]:
    """What the seconds of one competitor say without the others."""
    median = statistics.median(seconds)
    mfu = flops_per_step(setting) / (median * rates.product)
    return {"median_s": median, "tokens_per_s": setting.batch * setting.sequence / median, "mfu": mfu}


def judge(row: dict[str, Any], base: Mapping[str, Any] | None, reference: Sequence[float], *, trains: bool) -> None:
    """Into ``row``: how far its first losses are from the ``reference``'s, and its ratio if they agree.

    trains: else only the loss before the first step is compared · reference: empty where ours were not measured.
    """
    count = min(FIRST_LOSSES if trains else 1, len(row["losses"]), len(reference))
    pairs = list(zip(row["losses"][:count], reference[:count], strict=True))
    apart = [abs(loss - other) / abs(other) for loss, other in pairs]
    agrees = all(each <= LOSS_TOLERANCE for each in apart)
    way = [abs(losses[count - 1] - losses[0]) if count else 0.0 for losses in (row["losses"], reference)]
    moves = not trains or way[0] >= LEAST_WAY * way[1] > 0
    row["loss_apart"] = apart
    row["loss_differs"] = not (agrees and moves) if count else None
    if base is not None and not row["loss_differs"] and not base.get("loss_differs"):
        paired = row["paired"]
        row["ratio"] = paired["median"] if paired else row["median_s"] / base["median_s"]


def measure_model(
    setting: Setting, names: Sequence[str], conditions: Conditions, rounds: int, until: float
) -> dict[str, Any]:
    """The part of one model. Every group may take its share of the time until ``until``."""
    rates = Rates(**conditions.rates(setting))
    groups = groups_of(names, setting, free_host_bytes() * HOST_SHARE)
    found: list[Found] = []
    for number, group in enumerate(groups):
        now = time.monotonic()
        share = now + max(0.0, until - now) / (len(groups) - number)
        if number and now + LEAST_PART_S > conditions.end:
            found.append(Found({}, {}, {}, dict.fromkeys(group, "not begun: the time was over")))
            continue
        print(f"group {number + 1} of {len(groups)}: {', '.join(group)}", file=sys.stderr)
        found.append(run_group(group, setting, conditions, rounds, share))
    return assemble(groups, found, setting, rates)


def measure_largest(
    first: Setting, most: int, names: Sequence[str], conditions: Conditions, until: float
) -> dict[str, Any]:
    """The part of the largest model, competitor by competitor, each with its share of the time."""
    searched = [name for name in SEARCHED if name in names]
    found = {}
    for number, name in enumerate(searched):
        now = time.monotonic()
        share = now + max(0.0, until - now) / (len(searched) - number)

        def one(layers: int, name: str = name, share: float = share) -> dict[str, Any]:
            print(f"{name}, {layers} layers", file=sys.stderr)
            within = replace(conditions, end=max(share, min(conditions.end, time.monotonic() + LEAST_PART_S)))
            return attempt(name, replace(first, layers=layers), within)

        found[name] = largest(one, first.layers, most, share)
    return {"setting": asdict(first), "variants": found}


def print_report(result: Mapping[str, Any]) -> None:
    """A table for each part."""
    header = "variant|s/step|× ours [95%]|bound|tokens/s|MFU %|GiB device|GiB host|page-locked|built s|losses|rounds"
    for name, part in result["parts"].items():
        print(f"\n{name}" + (f": {part['left_out']}" if "left_out" in part else ""))
        if name == LARGEST and "variants" in part:
            print(table(*_largest_cells(part["variants"])))
            continue
        if part.get("variants"):
            print(table(header.split("|"), [[key, *_cells(row)] for key, row in part["variants"].items()]))
        for away, each in part.get("bounds_s", {}).items():
            print(f"bound of {away}: " + ", ".join(f"{key} {value:.3f} s" for key, value in each.items()))
        for variant, reason in part.get("failed", {}).items():
            print(f"{variant} failed: {reason}")


def _cells(row: Mapping[str, Any]) -> list[str]:
    ratio, paired = row.get("ratio"), row["paired"]
    interval = f" [{paired['low']:.2f}, {paired['high']:.2f}]" if paired else ""
    losses = row["losses"][:FIRST_LOSSES]
    return [
        f"{row['median_s']:.3f}",
        "-" if ratio is None else f"{ratio:.2f}{interval}",
        f"{row['fraction_of_bound']:.2f}" if "fraction_of_bound" in row else "-",
        f"{row['tokens_per_s']:.0f}",
        f"{row['mfu'] * 100:.1f}",
        *(_gib(row[key]) for key in ("peak_allocated", "peak_host", "peak_pinned")),
        f"{row['build_s']:.0f}",
        f"{losses[0]:.3f} → {losses[-1]:.3f}"
        + {True: " differs", False: "", None: " not compared"}[row["loss_differs"]],
        str(len(row["seconds"])),
    ]


def _largest_cells(variants: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = "variant|layers|parameters|trains|s, second step|GiB device|GiB host|page-locked|why not".split("|")
    rows = []
    for name, found in variants.items():
        for row in found["tried"]:
            seconds = f"{row['last_step_s']:.2f}" if "last_step_s" in row else "-"
            sizes = [_gib(row.get(key)) for key in ("peak_allocated", "peak_host", "peak_pinned")]
            count = f"{row['parameters'] / 1e9:.2f}B"
            yes = "yes" if row["trains"] else "no"
            rows.append([name, str(row["layers"]), count, yes, seconds, *sizes, row.get("failed", "")])
        best = found["largest"]
        said = f"{best['parameters'] / 1e9:.2f}B" if best else "none"
        rows.append([name, "", said, "largest", "", "", "", "", found["ended"]])
    return header, rows


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offload_gpu", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="of everything, at most (default 8)")
    parser.add_argument("--parts", nargs="+", choices=[*MODELS, LARGEST], metavar="NAME", help="of: 1.5B, 4B, largest")
    parser.add_argument(
        "--variants", nargs="+", choices=list(COMPETITORS), metavar="NAME",
        help="any of: " + ", ".join(COMPETITORS) + " (default: all that are installed)",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=10, help="of those that take turns, if there is time")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: with --tiny, to try it")
    parser.add_argument("--tiny", action="store_true", help="a model of some thousand parameters in all parts")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu --tiny tries the program on a CPU")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: expected --tiny with it; the models of the parts are for a GPU")
    if options.rounds < 1 or options.minutes <= 0:
        parser.error(f"expected at least 1 round and some minutes, got {options.rounds} and {options.minutes:g}")
    for name in options.variants or ():
        if not installed(name):
            parser.error(f"{name} needs {COMPETITORS[name].package}, which is not installed")
    options.variants = [name for name in COMPETITORS if name in (options.variants or COMPETITORS) and installed(name)]
    options.parts = [name for name in (*MODELS, LARGEST) if name in (options.parts or (*MODELS, LARGEST))]
    return options


def measure(name: str, options: argparse.Namespace, conditions: Conditions, until: float) -> dict[str, Any]:
    """One part, or why there is none."""
    if time.monotonic() + (0.0 if options.tiny else LEAST_PART_S) > conditions.end:
        return {"left_out": "the time was over"}
    print(name, file=sys.stderr)
    try:
        if name == LARGEST:
            first, most = (TINY, TINY_MOST) if options.tiny else (WIDE, MOST_LAYERS)
            return measure_largest(first, most, options.variants, conditions, until)
        setting = TINY if options.tiny else MODELS[name]
        return measure_model(setting, options.variants, conditions, options.rounds, until)
    except Failed as error:
        return {"left_out": f"the machine's rates could not be measured: {error}"}


def kept(result: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of the file that ``result`` would replace which it does not have as complete, name to part.

    None if that file is of another machine or other versions. A part with fewer variants replaces no other.
    """
    path = result_path("offload_gpu", result)
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if any(held.get(key) != result[key] for key in ("machine", "packages")):
        return {}
    new = {key: set(part.get("variants", {})) for key, part in result["parts"].items()}
    return {key: part for key, part in held["parts"].items() if not set(part["variants"]) <= new.get(key, set())}


def write(result: dict[str, Any], options: argparse.Namespace) -> str:
    """Keep a GPU's result, with what only an earlier run of the same machine and versions has."""
    if options.no_write:
        return "not written, as asked"
    if options.tiny or options.device != "cuda":
        return "not written: results are kept for the models on a GPU only"
    parts = {key: part for key, part in result["parts"].items() if "left_out" not in part} | (old := kept(result))
    if not parts:
        return "not written: nothing was measured"
    ordered = {name: parts[name] for name in (*MODELS, LARGEST) if name in parts}
    path = os.path.relpath(write_result("offload_gpu", result | {"parts": ordered}))
    return f"written to {path}" + (f"; kept from before, as more complete: {', '.join(old)}" if old else "")


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever was found: a benchmark reports, a test decides."""
    start = time.monotonic()
    options = parse(argv)
    seconds = 60 * options.minutes
    end = start + seconds - min(CLOSING_S, seconds / 4)
    threads = len(os.sched_getaffinity(0)) if options.device == "cuda" else 1
    conditions = Conditions(options.device, threads, FLOOR[options.device], end)
    packages = {COMPETITORS[name].package or "" for name in options.variants} - {""}
    result: dict[str, Any] = {
        "benchmark": "offload_gpu",
        "machine": machine(options.device),
        "packages": {package: metadata.version(package) for package in sorted(packages)},
        "threads": threads,
        "free_host_bytes": free_host_bytes(),
        "loss_tolerance": LOSS_TOLERANCE,
        "parts": {},
    }
    for number, name in enumerate(options.parts):
        now = time.monotonic()
        share = WEIGHTS[name] / sum(WEIGHTS[other] for other in options.parts[number:])
        result["parts"][name] = measure(name, options, conditions, now + max(0.0, end - now) * share)
        said = write(result, options)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print_report(result)
    print(said, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
