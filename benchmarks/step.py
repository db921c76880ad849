"""Step time and peak memory of every stage against its peers, torch DDP and the compute limit, interleaved in one run.

``python -m benchmarks.step`` starts the ranks itself, one thread each, pinned to its own core. Every rank holds one
copy of the model per variant; a round runs one step of each variant, in an order that rotates from round to round, and
lasts as long as its slowest rank. A ratio is the median over paired rounds with its 95% bootstrap interval. Variants
run in groups (one library each, as many as fit into memory), every group with its own DDP and compute limit, and a
ratio is always taken inside of a group. On one rank the plain torch loop (``compute``) takes DDP's place. ``--rss``
measures peak memory instead, with a fresh group of processes per variant, because a peak belongs to a process.

Owns: the command line, the ratios and the report. ``ranks.py`` measures, ``phases.py`` divides a step into its parts,
``variants.py`` knows the competitors, ``charts.py`` draws the results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

from benchmarks.phases import PARTS, breakdown, slowest
from benchmarks.ranks import available_bytes, groups_of, run_group
from benchmarks.reporting import MIN_ROUNDS, machine, paired_ratio, result_path, table, verdict, write_result
from benchmarks.variants import BASE, INSTALL, LIMIT, VARIANTS, missing
from benchmarks.workload import REFERENCE, Setting

LOSS_TOLERANCE = 0.01
"""Synchronised variants see the same data from the same start: a loss further apart than this means a wrong program."""
TARGETS = {"ours-0": 1.0, "ours-1": 1.0, "ours-2": 1.0, "ours-3": 1.06}
"""× DDP, on two ranks."""
TARGET_ALONE = 1.02
"""× the plain loop, on one rank, at every stage of ours."""
RSS_STEPS = 3


def base_of(setting: Setting) -> str:
    """What ratios are taken to: DDP, or the plain loop where there is one rank."""
    return BASE if setting.ranks > 1 else LIMIT


def default_targets(setting: Setting) -> dict[str, float]:
    """The targets of this number of ranks; none where ranks share cores or for another model."""
    if replace(setting, ranks=REFERENCE.ranks) != REFERENCE:
        return {}
    if setting.ranks == 1:
        return {name: TARGET_ALONE for name in VARIANTS if name.startswith("ours-")}
    return TARGETS if setting.ranks == REFERENCE.ranks else {}


def check_losses(losses: Mapping[str, float]) -> None:
    """Raise if a synchronised variant ends at another loss than DDP: then its time is not worth reporting."""
    for name, loss in losses.items():
        if name != LIMIT and BASE in losses and not abs(loss - losses[BASE]) <= LOSS_TOLERANCE * losses[BASE]:
            raise SystemExit(f"{name} ended at loss {loss:.4f} and {BASE} at {losses[BASE]:.4f}: not the same training")


def summarise(found: list[dict[str, Any]], setting: Setting, targets: Mapping[str, float]) -> dict[str, Any]:
    """Per variant of a group: median step, ratio, fraction of the limit, parts of the step, bytes, verdict."""
    steps = {name: slowest([rank["times"][name] for rank in found]) for name in found[0]["times"]}
    rounds = {name: [times.total for times in chosen] for name, chosen in steps.items()}
    for rank in found:
        check_losses({name: losses[-1] for name, losses in rank["losses"].items()})
    base = base_of(setting)
    summary: dict[str, Any] = {}
    for name, seconds in rounds.items():
        median = statistics.median(seconds)
        tokens = setting.ranks * setting.batch * setting.sequence
        row: dict[str, Any] = {"median_ms": median * 1e3, "tokens_per_s": tokens / median}
        row["loss"] = found[0]["losses"][name][-1]
        least = VARIANTS[name].limit_bytes(setting)
        unknown = {"sent_bytes_per_step": None if least else 0.0, "limit_bytes_per_step": least}
        row |= found[0]["traffic"][name] or unknown
        if base in rounds:
            ratio = paired_ratio(seconds, rounds[base])
            row["ratio"] = asdict(ratio)
            if name in targets:
                row |= {"target": targets[name], "verdict": verdict(ratio, targets[name])}
        if LIMIT in rounds:
            row["fraction_of_limit"] = paired_ratio(rounds[LIMIT], seconds).median
            over = [mine - limit for mine, limit in zip(seconds, rounds[LIMIT], strict=True)]
            row["over_limit_ms"] = statistics.median(over) * 1e3
        if LIMIT in rounds or not VARIANTS[name].waits_in_cpp:
            row["parts_ms"] = breakdown(steps[name], steps[LIMIT] if VARIANTS[name].waits_in_cpp else None)
        summary[name] = row | {"seconds": seconds}
    return summary


def measure_times(setting: Setting, groups: Sequence[Sequence[str]], options: argparse.Namespace) -> dict[str, Any]:
    """Run the groups. ``variants``: a row for each; ``references``: every group's own rows of DDP and compute limit.

    A row's ratio belongs to its own group; DDP and the compute limit stand in ``variants`` as the first group had them.
    """
    rows: dict[str, Any] = {}
    references = []
    for number, group in enumerate(groups):
        print(f"group {number + 1} of {len(groups)}: {', '.join(group)}", file=sys.stderr)
        summary = summarise(run_group(setting, group, options.rounds, options.warmup), setting, options.target)
        for name, row in summary.items():
            rows.setdefault(name, row | {"group": number})
        references.append({name: summary[name] for name in (LIMIT, BASE) if name in summary})
    ordered = {name: rows[name] for name in VARIANTS if name in rows}
    return {"base": base_of(setting), "groups": groups, "variants": ordered, "references": references}


def measure_rss(setting: Setting, variants: Sequence[str]) -> dict[str, Any]:
    """Peak resident bytes per variant, each the largest rank's: in a fresh process group, over a few steps.

    peak: from the start of the process · steps: the peak of the steps alone, after building · before: with all
    libraries imported and no model.
    """
    summary = {}
    for name in variants:
        print(f"{name}:", file=sys.stderr)
        ranks = [rank["rss"] for rank in run_group(setting, [name], RSS_STEPS, warmup=0)]
        summary[name] = {
            "peak_rss_bytes": max(max(rank["building"], rank["steps"]) for rank in ranks),
            "steps_peak_bytes": max(rank["steps"] for rank in ranks),
            "before_bytes": max(rank["before"] for rank in ranks),
            "own_peak_bytes": max(rank["steps"] - rank["before"] for rank in ranks),
            "state_formula_bytes": VARIANTS[name].state_bytes(setting),
        }
    return {"variants": summary}


def print_times(result: Mapping[str, Any]) -> None:
    """The two tables of a timing run: ratios, and where the time of a step goes."""
    base = "DDP" if result["base"] == BASE else "plain loop"
    header = f"variant|× {base} [95%]|target|verdict|limit/measured|over limit ms|ms|tokens/s|MB sent".split("|")
    rows, parts = [], []
    for name, row in result["variants"].items():
        ratio = row.get("ratio")
        sent, least = row["sent_bytes_per_step"], row["limit_bytes_per_step"]
        rows.append([
            name,
            f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]" if ratio else "-",
            f"{row['target']:.2f}" if "target" in row else "-",
            row.get("verdict", "-"),
            f"{row['fraction_of_limit']:.2f}" if "fraction_of_limit" in row else "-",
            f"{row['over_limit_ms']:.0f}" if "over_limit_ms" in row else "-",
            f"{row['median_ms']:.0f}",
            f"{row['tokens_per_s']:.0f}",
            f"{'-' if sent is None else f'{sent / 1e6:.1f}'} (limit {least / 1e6:.1f})",
        ])  # fmt: skip
        if "parts_ms" in row:
            parts.append([name, *(f"{row['parts_ms'][part]:.0f}" for part in PARTS)])
    print(table(header, rows))
    print("\nms of a step, medians (exposed communication of ddp and zero1-torch: by difference to the limit)")
    print(table(["variant", *PARTS], parts))


def print_rss(result: Mapping[str, Any]) -> None:
    """The table of a memory run."""
    columns = {
        "peak RSS": "peak_rss_bytes",
        "in steps": "steps_peak_bytes",
        "above the imports": "own_peak_bytes",
        "model state (formula)": "state_formula_bytes",
    }
    rows = [
        [name, *(f"{row[key] / 2**20:.0f}" for key in columns.values())] for name, row in result["variants"].items()
    ]
    print(table(["variant (MiB per rank)", *columns], rows))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=(__doc__ or "").split("\n\n")[0],
        epilog=" ".join(f"Variants of {package} need: {how}." for package, how in INSTALL.items()),
    )
    parser.add_argument("--ranks", type=int, default=REFERENCE.ranks)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each variant before the first measured round")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        metavar="NAME",
        help="any of: " + ", ".join(VARIANTS) + " (default: all that are installed; on one rank no peers)",
    )
    parser.add_argument(
        "--target", nargs="+", default=[], metavar="NAME=RATIO", help="e.g. ours-3=1.06; default: the project's"
    )
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


def chosen_variants(setting: Setting, named: Sequence[str] | None) -> list[str]:
    """The variants to run. Left out by default, with a sentence: what is not installed; refused where it was named."""
    absent = missing(named or list(VARIANTS))
    if named and absent:
        name, package = next(iter(absent.items()))
        raise SystemExit(f"{name} needs {package}, which is not installed. To install it: {INSTALL[package]}")
    if named:
        return [name for name in VARIANTS if name in named]
    if setting.ranks == 1:
        return [name for name in VARIANTS if name == LIMIT or name.startswith("ours-")]
    for package in sorted(set(absent.values())):
        left = ", ".join(name for name in absent if absent[name] == package)
        print(f"left out: {left} ({package} is not installed; to install it: {INSTALL[package]})", file=sys.stderr)
    return [name for name in VARIANTS if name not in absent]


def write(result: dict[str, Any], setting: Setting) -> str:
    """Keep the result if that loses nothing: a file holds one run, which one with fewer variants does not replace."""
    if replace(setting, ranks=REFERENCE.ranks) != REFERENCE:
        return "not written: results are kept for the reference setting only"
    name = result["benchmark"] + (f"-n{setting.ranks}" if setting.ranks != REFERENCE.ranks else "")
    path = result_path(name, result)
    held = json.loads(path.read_text(encoding="utf-8"))["variants"] if path.exists() else {}
    lost = [variant for variant in held if variant not in result["variants"]]
    if lost:
        return f"not written: {os.path.relpath(path)} also holds {', '.join(lost)}; run these too, or delete the file"
    return f"written to {os.path.relpath(write_result(name, result))}"


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdicts: a benchmark reports, a test decides."""
    options = parse(argv)
    setting = Setting(
        options.ranks, options.layers, options.hidden, options.vocabulary, options.batch, options.sequence
    )
    options.target = options.target or default_targets(setting)
    variants = chosen_variants(setting, options.variants)
    cores = len(os.sched_getaffinity(0))
    shared = f" ({setting.ranks} ranks share {cores} cores)" if setting.ranks > cores else ""
    result: dict[str, Any] = {
        "benchmark": "step_rss" if options.rss else "step",
        "machine": machine(),
        "packages": {
            package: metadata.version(package)
            for package in sorted({VARIANTS[name].package or "" for name in variants} - {""})
        },
        "setting": asdict(setting) | {"parameters": setting.parameters(), "threads_per_rank": 1, "cores": cores},
        "rounds": RSS_STEPS if options.rss else options.rounds,
    }
    print(
        f"GPT-2, {setting.parameters() / 1e6:.1f}M parameters, fp32, AdamW, clip 1.0, {setting.batch} × "
        f"{setting.sequence} tokens per rank, {setting.ranks} ranks × 1 thread{shared}, "
        f"{result['machine']['processor']}",
        file=sys.stderr,
    )
    groups = groups_of(setting, variants, available_bytes()) if not options.rss else []
    result |= measure_rss(setting, variants) if options.rss else measure_times(setting, groups, options)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        (print_rss if options.rss else print_times)(result)
    print("not written, as asked" if options.no_write else write(result, setting), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
