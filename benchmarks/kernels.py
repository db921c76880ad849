"""Every declared operation of ``shardengine.kernels``: bytes per second beside a device copy and beside its peers.

``python -m benchmarks.kernels`` runs on the GPU if there is one, else on the CPU with one thread, and takes under four
minutes. An operation's GB/s are the least bytes that it must move (docs/limits.md) over its time. A round measures the
copy, ours and every peer in turn, in an order that rotates; ``fraction`` is the copy's time for as many bytes over
ours, ``speedup`` a peer's time over ours: medians over paired rounds with their 95% bootstrap intervals. Two works: few
large tensors (1 billion elements in 300, fewer on a CPU or where memory is short, as the result then says) and many
small ones, whose times are mostly the host's and whose data stay in a GPU's cache. On a GPU the kernels that one call
launches are counted by torch's profiler. Targets hold on a GPU only; CPU figures say what torch's reference costs.

Owns: the command line, the ratios and the report. ``kernel_cases.py`` knows the operations, ``device.py`` measures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.device import counted, repeats_for, seconds_per_call, take_turns, why_not_counted
from benchmarks.kernel_cases import BYTES_PER_ELEMENT, COPY, OURS, Call, Case, Work, cases, copy_call, large, small
from benchmarks.ranks import available_bytes
from benchmarks.reporting import (
    MIN_ROUNDS,
    Verdict,
    machine,
    paired_ratio,
    table,
    verdict,
    write_result,
)
from shardengine.kernels.operations import implementation

ELEMENTS = {"cuda": 1_000_000_000, "cpu": 32_000_000}
TENSORS, SMALL_TENSORS = 300, 2000
ROUNDS = {"cuda": MIN_ROUNDS + 5, "cpu": 7}
BUDGET_S = {"cuda": 200.0, "cpu": 140.0}
LEAST_S = {"cuda": 0.01, "cpu": 0.005}
"""What one measurement of one call lasts at least, by repeating it."""
MOST_REPEATS = 100
MEMORY_SHARE = 0.8
"""Of what is free: the most that is taken."""

Samples = Mapping[str, Sequence[float]]


def elements_for(device: torch.device, wanted: int) -> tuple[int, str | None]:
    """As many elements as fit, at most ``wanted``; and why they are fewer than the GPU's, in words."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    fit = int(free * MEMORY_SHARE) // BYTES_PER_ELEMENT
    if fit < wanted:
        return fit, f"{fit} elements instead of {wanted}: {free / 2**30:.1f} GiB are free"
    if wanted < ELEMENTS["cuda"]:
        why = "a CPU takes too long for more" if wanted == ELEMENTS[device.type] else "as asked"
        return wanted, f"{wanted} elements instead of {ELEMENTS['cuda']}: {why}"
    return wanted, None


def launch_verdict(launches: int | None) -> Verdict:
    """One kernel per bucket is the target; a count has no interval."""
    if launches is None:
        return "not decided"
    return "reached" if launches == 1 else "missed"


def summarise(case: Case, seconds: Samples, copy_bytes: int, *, targets: bool) -> dict[str, Any]:
    """The row of one case: GB/s, share of the copy's bandwidth, its peers. seconds: per call, by round."""
    ours = seconds[OURS]
    scale = case.minimum_bytes / copy_bytes
    fraction = paired_ratio([scale * copy for copy in seconds[COPY]], ours)
    row: dict[str, Any] = {
        "work": case.work,
        "operation": case.operation,
        "minimum_bytes": case.minimum_bytes,
        **_speed(ours, case.minimum_bytes),
        "copy_gb_per_s": _speed(seconds[COPY], copy_bytes)["gb_per_s"],
        "fraction": asdict(fraction),
    }
    if targets and case.fraction is not None:
        row |= {"target": case.fraction, "verdict": verdict(fraction, case.fraction, at_least=True)}
    row["peers"] = {}
    for name in (name for name in seconds if name not in (OURS, COPY)):
        speedup = paired_ratio(seconds[name], ours)
        peer = {**_speed(seconds[name], case.minimum_bytes), "speedup": asdict(speedup)}
        if targets and name in case.speedups:
            least = case.speedups[name]
            peer |= {"target": least, "verdict": verdict(speedup, least, at_least=True)}
        row["peers"][name] = peer
    return row | {"rounds": len(ours), "seconds": {name: list(values) for name, values in seconds.items()}}


def _speed(seconds: Sequence[float], size: int) -> dict[str, float]:
    median = statistics.median(seconds)
    return {"median_s": median, "gb_per_s": size / median / 1e9}


def measure_case(case: Case, copy: tuple[Call, int], device: torch.device, rounds: int, until: float) -> dict[str, Any]:
    """Warm up, count what ours launches, and take the rounds."""
    calls = {COPY: copy[0], **case.calls}
    for call in calls.values():
        call()  # compiles, allocates, builds optimizer states
        call()
    row_calls = counted(case.calls[OURS], device)
    least = LEAST_S[device.type]
    repeats = {name: repeats_for(call, device, least, MOST_REPEATS) for name, call in calls.items()}

    def timed(name: str, _: int) -> float:
        return seconds_per_call(calls[name], device, repeats[name])

    seconds = take_turns({name: partial(timed, name) for name in calls}, rounds, until)
    row = summarise(case, seconds, copy[1], targets=device.type == "cuda")
    row["launches"] = None if row_calls is None else row_calls.kernels
    row["synchronisations"] = None if row_calls is None else row_calls.synchronisations
    if case.one_launch and device.type == "cuda":
        row["launch_verdict"] = launch_verdict(row["launches"])
    return row


def measure(works: tuple[Work, Work], rounds: int, budget_s: float) -> dict[str, Any]:
    """``rows``: of every case; ``failed``: those that raised, and how: one kernel's error ends no other's measurement.

    Each case may take its share of what is left of ``budget_s``, then it ends with fewer rounds.
    """
    device = works[0].device
    copies = {work.name: copy_call(work) for work in works}
    makers = list(cases(*works))
    end = time.monotonic() + budget_s
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for number, make in enumerate(makers):
        now = time.monotonic()
        share = max(0.0, end - now) / (len(makers) - number)
        case = None
        try:
            case = make()
            rows.append(measure_case(case, copies[case.work], device, rounds, now + share))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            failed.append(f"{f'{case.work}: {case.operation}' if case else f'case {number + 1}'}: {reason}")
        print(f"\r{number + 1} of {len(makers)}", end="", file=sys.stderr, flush=True)
        del case
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(file=sys.stderr)
    return {"rows": rows, "failed": failed}


def print_report(result: Mapping[str, Any]) -> None:
    """The two tables: operations beside the copy, and beside their peers."""
    operations, peers = [], []
    for row in result["rows"]:
        name = f"{row['work']}: {row['operation']}"
        operations.append([
            name,
            f"{row['gb_per_s']:.1f}",
            f"{row['copy_gb_per_s']:.1f}",
            _interval(row["fraction"]),
            _judged(row),
            "-" if row["launches"] is None else str(row["launches"]),
            row.get("launch_verdict", "-"),
            "-" if row["synchronisations"] is None else str(row["synchronisations"]),
            f"{row['median_s'] * 1e3:.3f}",
            str(row["rounds"]),
        ])  # fmt: skip
        for peer, found in row["peers"].items():
            cells = [name, peer, f"{row['gb_per_s']:.1f}", f"{found['gb_per_s']:.1f}"]
            peers.append([*cells, _interval(found["speedup"]), _judged(found)])
    header = "operation|GB/s|copy GB/s|× copy [95%]|at least|kernels|1 kernel|waits|ms|rounds".split("|")
    print(table(header, operations))
    print("\n" + table("operation|beside|GB/s|its GB/s|ours × as fast [95%]|at least".split("|"), peers))
    if result["why_not_counted"]:
        print(f"\nkernels and waits were not counted: {result['why_not_counted']}")
    if result["why_smaller"]:
        print(result["why_smaller"])
    for reason in result["failed"]:
        print(f"failed: {reason}")


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _judged(row: Mapping[str, Any]) -> str:
    return f"{row['target']:.2f}: {row['verdict']}" if "target" in row else "-"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked; what was not given as the device has it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: the GPU if there is one")
    parser.add_argument("--elements", type=int, help="of the large tensors together (default: 1e9, on a CPU 3.2e7)")
    parser.add_argument("--tensors", type=int, default=TENSORS, help="how many large ones")
    parser.add_argument("--small-tensors", type=int, default=SMALL_TENSORS, help="how many of 1000 to 5000 elements")
    parser.add_argument("--rounds", type=int, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="measured rounds are cut to stay within it")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    there = torch.cuda.is_available()
    if options.device == "cuda" and not there:
        parser.error("--device cuda: torch sees no GPU here")
    options.device = options.device or ("cuda" if there else "cpu")
    options.elements = ELEMENTS[options.device] if options.elements is None else options.elements
    options.rounds = ROUNDS[options.device] if options.rounds is None else options.rounds
    options.budget = BUDGET_S[options.device] if options.budget is None else options.budget
    if min(options.elements, options.tensors, options.small_tensors, options.rounds) < 1:
        parser.error("--elements, --tensors, --small-tensors and --rounds must be at least 1")
    return options


def write(result: dict[str, Any], options: argparse.Namespace) -> str:
    """Keep the result if its works are the default ones, and whole."""
    if result["failed"]:
        return f"not written: {len(result['failed'])} operations failed"
    asked = (options.elements, options.tensors, options.small_tensors)
    if asked != (ELEMENTS[options.device], TENSORS, SMALL_TENSORS):
        return "not written: results are kept for the default sizes only"
    return f"written to {os.path.relpath(write_result('kernels', result))}"


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdicts: a benchmark reports, a test decides."""
    options = parse(argv)
    device = torch.device(options.device)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    elements, why_smaller = elements_for(device, options.elements)
    works = large(elements, options.tensors, device), small(options.small_tensors, device)
    result: dict[str, Any] = {
        "benchmark": "kernels",
        "machine": machine(options.device),
        "device": options.device,
        "implementation": "Triton" if implementation(device) else "torch's reference",
        "works": {work.name: {"elements": sum(work.sizes), "tensors": len(work.sizes)} for work in works},
        "why_smaller": why_smaller,
        "why_not_counted": why_not_counted(device),
    }
    print(f"{result['implementation']} on {result['machine']['name']}", file=sys.stderr)
    result |= measure(works, options.rounds, options.budget)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print_report(result)
    print("not written, as asked" if options.no_write else write(result, options), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
