"""AdamW's step with states in fewer bytes (bf16, 8 bits) beside fp32 states, on a CPU: all in turn in one process.

``python -m benchmarks.states`` prints tables and writes ``benchmarks/results/states-<machine>.json`` (with at least 20
rounds), for 1 thread and for as many as there are cores, each in a fresh process. It takes a minute, with the other
libraries four: the 8-bit AdamW of torchao, which is compiled first, and of bitsandbytes take part with 1 thread where
they can be imported and step. Parts, the first row of each being what others are compared with:

    fp32 weights   fp32 gradients, weights of 4 bytes
    bf16 weights   bf16 gradients, weights of 2 bytes that are rounded stochastically, no masters
    in the cache   fp32 weights, the same 16 384 elements over and over, one thread: what computing alone takes. As many
                   calls with next to nothing to do are measured beside it, and taken off

*bytes* are what any program must move per parameter: the weight and both states read and written, scales included, and
the gradient read. *ns*, per parameter, and GB/s are those of the shortest round. *at most* is how much faster than with
fp32 states a step could be if it took nothing but the time of its bytes. The target is twice the speed of fp32 states.
The memory's own speed is interleaved, as in ``adam.py``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from benchmarks.adam import MEMORY, OPTIONS, STEP, Parts, Run, in_fresh_process, memory
from benchmarks.adam import measure as measure_parts
from benchmarks.reporting import MIN_ROUNDS, machine, paired_ratio, table, verdict, write_result
from shardengine import kernels
from shardengine.kernels import Noise, Spans

STATES = kernels.STATE_NAMES["AdamW"]
SPEED = 2.0
"""Times the speed of fp32 states, at least."""
CACHED = 1 << 14
"""Elements that stay in the cache of a core with everything that is kept of them: 256 KiB."""
TIMES = 16
"""Their steps in a round."""
PEERS = {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}
"""Libraries with an 8-bit AdamW, and where."""
FP32_WEIGHTS, BF16_WEIGHTS, IN_CACHE = "fp32 weights", "bf16 weights", "in the cache"
HEADER = ["part", "states", "ms", "ns each", "× speed of fp32 [95%]", "at most", "bytes", "GB/s", "of copy", "target"]


def bytes_of(part: str, name: str) -> float:
    """What a row's step must move per parameter."""
    weight = 2 if part == BF16_WEIGHTS else 4
    kept_in = "8bit" if name in PEERS else name.partition(",")[0]
    return 3 * weight + 2 * kernels.bytes_per_element(kernels.state_forms(STATES, kept_in))


def kept(flats: dict[str, Tensor], kept_in: str) -> dict[str, Tensor]:
    """AdamW's states as they are kept: tensors of their own."""
    count = flats["weight"].numel()
    forms = kernels.state_forms(STATES, kept_in)
    found = {name: torch.zeros(form.length(count), dtype=form.dtype) for name, form in forms.items()}
    for name in STATES:
        kernels.narrow_state(flats[name], found, name)
        if kept_in == "fp32":
            found[name].copy_(flats[name])
    return found


def stepper(given: dict[str, Tensor], *, times: int = 1, elements: int = 0, nearest: bool = False) -> Run:
    """A step of ours, ``times`` over. elements: of the first ones, 0 for all · nearest: how states are rounded."""
    spans, rule = Spans([(0, elements or given["weight"].numel())]), kernels.rule_for("AdamW", OPTIONS, STEP)
    drawn = None if nearest else Noise(0, STEP)
    noise = Noise(1, STEP) if given["weight"].dtype is torch.bfloat16 else None

    def run() -> None:
        for _ in range(times):
            kernels.update(given, spans, rule, noise=noise, state_noise=drawn)

    return run


def peers(flats: dict[str, Tensor]) -> dict[str, Run]:
    """The 8-bit AdamW of other libraries, with weights of their own; those that are not there or do not step: not."""
    found: dict[str, Run] = {}
    for name, where in PEERS.items():
        parameter = torch.nn.Parameter(flats["weight"].clone())
        parameter.grad = flats["gradient"]
        try:
            step: Run = importlib.import_module(where).AdamW8bit([parameter], **OPTIONS).step
            step()
        except Exception as error:
            print(f"{name} takes no part: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        else:
            found[name] = step
    return found


def with_fp32_weights(flats: dict[str, Tensor]) -> dict[str, Run]:
    """Part "fp32 weights"."""
    given = {name: flats[name] for name in ("weight", "gradient")}
    runs = {kept_in: stepper(given | kept(flats, kept_in)) for kept_in in kernels.KEPT_IN}
    return runs | (peers(flats) if torch.get_num_threads() == 1 else {}) | memory(flats)


def with_bf16_weights(flats: dict[str, Tensor]) -> dict[str, Run]:
    """Part "bf16 weights"."""
    given = {"weight": flats["low"], "gradient": flats["half"]}
    runs = {kept_in: stepper(given | kept(flats, kept_in)) for kept_in in kernels.KEPT_IN}
    return runs | memory(flats)


def in_cache(flats: dict[str, Tensor]) -> dict[str, Run]:
    """Part "in the cache"."""
    first = {name: flat[:CACHED].clone() for name, flat in flats.items()}
    given, times = {name: first[name] for name in ("weight", "gradient")}, TIMES
    runs = {kept_in: stepper(given | kept(first, kept_in), times=times) for kept_in in kernels.KEPT_IN}
    codes = given | kept(first, "8bit")
    return runs | {
        "8bit, to nearest": stepper(codes, times=times, nearest=True),
        "calls": stepper(given | kept(first, "fp32"), times=times, elements=16),
    }


def measure(count: int, rounds: int, threads: int) -> dict[str, dict[str, list[float]]]:
    """As ``adam.measure``, of these parts."""
    parts: Parts = {FP32_WEIGHTS: with_fp32_weights, BF16_WEIGHTS: with_bf16_weights}
    return measure_parts(count, rounds, threads, parts | ({IN_CACHE: in_cache} if threads == 1 else {}))


def rows_of(samples: dict[str, dict[str, list[float]]], count: int) -> list[dict[str, Any]]:
    """A row per competitor: its times, beside those of fp32 states, of its bytes and of a copy, paired by round."""
    rows: list[dict[str, Any]] = []
    for part, competitors in samples.items():
        elements = min(CACHED, count) * TIMES if part == IN_CACHE else count
        off = competitors.pop("calls", [0.0] * len(competitors["fp32"]))
        alone = {name: [a - b for a, b in zip(timed, off, strict=True)] for name, timed in competitors.items()}
        for name, taken in alone.items():
            median = statistics.median(taken)
            least = (min(competitors[name]) - min(off)) * 1e6 / elements
            row: dict[str, Any] = {"part": part, "name": name, "median_ms": median, "ns": least}
            rows.append(row)
            row["bytes"] = moved = MEMORY.get(name) or bytes_of(part, name)
            row["gb_per_s"] = moved / least
            if "copy" in competitors:
                row["of_copy"] = moved / MEMORY["copy"] * paired_ratio(competitors["copy"], taken).median
            if name not in MEMORY:
                ratio = paired_ratio(alone["fp32"], taken)
                row |= {"speed": asdict(ratio), "at_most": bytes_of(part, "fp32") / moved}
                if name == "8bit" and part != IN_CACHE:
                    row |= {"target": SPEED, "verdict": verdict(ratio, SPEED, at_least=True)}
    return rows


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table under ``HEADER``."""
    lines = []
    for row in rows:
        speed = "{median:.3f} [{low:.3f}, {high:.3f}]".format(**row["speed"]) if "speed" in row else ""
        lines.append([
            row["part"], row["name"], f"{row['median_ms']:.1f}", f"{row['ns']:.2f}", speed,
            f"{row['at_most']:.2f}" if "at_most" in row else "",
            f"{row['bytes']:.4g}" if "bytes" in row else "", f"{row['gb_per_s']:.1f}" if "bytes" in row else "",
            f"{row['of_copy']:.0%}" if "of_copy" in row else "",
            f"{row['target']}: {row['verdict']}" if "target" in row else "",
        ])  # fmt: skip
    return lines


def versions() -> dict[str, str]:
    """Of the peers that are there."""
    found = {}
    for name in PEERS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdict: a benchmark reports, a test decides."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.states", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--parameters", type=int, default=1 << 20, help="how many, a multiple of 256 (default 2^20)")
    parser.add_argument("--rounds", type=int, default=41, help="interleaved rounds (default 41)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.parameters < 256 or options.parameters % 256:
        parser.error("expected at least 1 round, and a multiple of 256 parameters")
    result: dict[str, Any] = {
        "benchmark": "states", "machine": machine(), "rounds": options.rounds, "parameters": options.parameters,
        "peers": versions(), "load_before": os.getloadavg()[0], "threads": {},
    }  # fmt: skip
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        rows = rows_of(in_fresh_process(options.parameters, options.rounds, threads, measure), options.parameters)
        result["threads"][str(threads)] = rows
        if not options.json:
            print(f"\n{threads} thread(s)\n{table(HEADER, cells(rows))}")
    if options.json:
        print(json.dumps(result, indent=1))
    few = options.no_write or options.rounds < MIN_ROUNDS
    said = (
        f"not written: asked so, or below {MIN_ROUNDS} rounds"
        if few
        else f"written to {write_result('states', result)}"
    )
    print(said, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
