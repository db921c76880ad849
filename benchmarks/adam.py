"""The optimizer step on a CPU, ours against torch's and DeepSpeed's: all competitors interleaved in one process.

``python -m benchmarks.adam`` prints tables and writes ``benchmarks/results/adam-<machine>.json`` (with at least 20
rounds), for 1 thread and for as many as there are cores, each in a fresh process that has OMP_NUM_THREADS from its
start: DeepSpeed's library brings its own OpenMP, which torch cannot tell how many to use. DeepSpeed takes part where it
can be imported: where it is installed in another environment, run this with the Python of that one, from the
repository's root. Its library takes minutes to build, which is measured, too. Three parts, each with its own baseline:

    step     fp32 AdamW step; base: torch's fused kernel
    update   bf16 gradient → unscaled, measured, clipped, stepped → fp32 master and bf16 weight; base: the same from
             torch's passes and its fused step
    sums     squares of fp32 and of bf16 (base: one pass of ``sum``), sum of two ranks divided (base: add, then divide)

Into step and update the memory's own speed is interleaved: a copy (8 bytes per element) and a triad a = b + s·c (12).
The bandwidth of a row counts what any program must move, BYTES per parameter, not what this one does move.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import import_deepspeed
from benchmarks.reporting import MIN_ROUNDS, machine, paired_ratio, table, verdict, write_result
from shardengine import kernels
from shardengine.kernels import operations
from shardengine.offload import CPUAdam

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP, MAX_NORM, LOSS_SCALE = 10, 1.0, 1024.0
BYTES = {"step": 28, "update": 30}
"""Per parameter. step: weight, gradient and moments read, weight and moments written. update: the same with a gradient
of 2 bytes that is read twice (the norm comes first), and a weight of 2 bytes written beside the master."""
MEMORY = {"copy": 8, "triad": 12}
"""Bytes per element of what is measured for comparison; none of it is an optimizer."""
TARGETS = {("step", "shardengine"): 1.03, ("update", "torch"): 1.5, ("update", "DeepSpeedCPUAdam"): 1.5}
"""Time of ours over torch's fused step, at most; for the update, time of the others over ours, at least."""
Run = Callable[[], object]


def tensors(count: int) -> dict[str, Tensor]:
    """What a step of ``count`` parameters reads and writes: 24 bytes per parameter."""
    generator = torch.Generator().manual_seed(0)
    flats = {name: torch.randn(count, generator=generator) for name in ("weight", "gradient", "exp_avg", "exp_avg_sq")}
    flats["exp_avg_sq"].square_()
    flats["half"] = flats["gradient"].bfloat16()
    flats["low"] = flats["weight"].bfloat16()
    return flats


def steps(flats: dict[str, Tensor]) -> dict[str, Run]:
    """The fp32 step: competitor to what it runs; torch's fused one first."""
    weight, gradient, average, square = (flats[name] for name in ("weight", "gradient", "exp_avg", "exp_avg_sq"))
    spans, rule = kernels.Spans([(0, weight.numel())]), kernels.rule_for("AdamW", OPTIONS, STEP)
    ours = {name: flats[name] for name in ("weight", "gradient", "exp_avg", "exp_avg_sq")}
    parameter = torch.nn.Parameter(weight)
    parameter.grad = gradient
    plain = torch.optim.Adam([parameter], foreach=False, fused=False, **OPTIONS)
    runs: dict[str, Run] = {
        "torch fused": lambda: fused_step(weight, gradient, average, square),
        "shardengine": lambda: operations.update(ours, spans, rule),
        "CPUAdam": CPUAdam([parameter], **OPTIONS).step,
        "torch.optim.Adam": plain.step,
    }
    deepspeed = deepspeed_adam(weight, gradient)
    return runs | ({"DeepSpeedCPUAdam": deepspeed} if deepspeed else {}) | memory(flats)


def memory(flats: dict[str, Tensor]) -> dict[str, Run]:
    """What the memory can do, by torch, whose threads are as many."""
    out, a, b = flats["weight"], flats["gradient"], flats["exp_avg"]
    return {"copy": lambda: out.copy_(a), "triad": lambda: torch.add(a, b, alpha=0.5, out=out)}


def fused_step(weight: Tensor, gradient: Tensor, average: Tensor, square: Tensor) -> None:
    """torch's fused AdamW kernel."""
    beta1, beta2 = OPTIONS["betas"]
    torch._fused_adamw_(
        [weight], [gradient], [average], [square], [], [torch.tensor(float(STEP))], lr=OPTIONS["lr"], beta1=beta1,
        beta2=beta2, weight_decay=OPTIONS["weight_decay"], eps=OPTIONS["eps"], amsgrad=False, maximize=False,
    )  # fmt: skip


def deepspeed_adam(weight: Tensor, gradient: Tensor) -> Run | None:
    """A step of DeepSpeedCPUAdam, None where it is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    import_deepspeed()
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

    parameter = torch.nn.Parameter(weight)
    parameter.grad = gradient
    step: Run = DeepSpeedCPUAdam([parameter], adamw_mode=True, **OPTIONS).step
    return step


def updates(flats: dict[str, Tensor]) -> dict[str, Run]:
    """The whole update: ours first."""
    ours = {name: flats[name] for name in ("weight", "exp_avg", "exp_avg_sq", "low")} | {"gradient": flats["half"]}
    spans, rule = kernels.Spans([(0, flats["weight"].numel())]), kernels.rule_for("AdamW", OPTIONS, STEP)

    def fused() -> None:
        norm = kernels.norm_from_squares(operations.sum_of_squares(flats["half"]).view(1)) / LOSS_SCALE
        operations.update(ours, spans, rule, factor=kernels.gradient_factor(norm, MAX_NORM, LOSS_SCALE))

    def passes(step: Run) -> Run:
        def run() -> None:
            gradient = flats["gradient"]
            gradient.copy_(flats["half"]).div_(LOSS_SCALE)
            norm = torch.linalg.vector_norm(gradient)
            gradient.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
            step()
            flats["low"].copy_(flats["weight"])

        return run

    arguments = [flats[name] for name in ("weight", "gradient", "exp_avg", "exp_avg_sq")]
    runs: dict[str, Run] = {"shardengine": fused, "torch": passes(lambda: fused_step(*arguments))}
    deepspeed = deepspeed_adam(flats["weight"], flats["gradient"])
    return runs | ({"DeepSpeedCPUAdam": passes(deepspeed)} if deepspeed else {}) | memory(flats)


def squares_of(name: str, flats: dict[str, Tensor]) -> dict[str, Run]:
    """Reading one tensor."""
    values = flats[name]
    return {"torch sum": values.sum, "shardengine squares": lambda: operations.sum_of_squares(values)}


def two_ranks(flats: dict[str, Tensor]) -> dict[str, Run]:
    """The sum of two ranks' gradients, divided, all finite?"""
    a, b, out, flag = flats["gradient"], flats["exp_avg"], torch.empty_like(flats["weight"]), torch.tensor(False)
    return {
        "torch passes": lambda: torch.isfinite(torch.add(a, b, out=out).div_(2)).all(),
        "shardengine": lambda: operations.ordered_sum([a, b], out, divisor=2, nonfinite=flag),
    }


Parts = dict[str, Callable[[dict[str, Tensor]], dict[str, Run]]]
PARTS: Parts = {
    "step": steps,
    "update": updates,
    "squares of fp32": lambda flats: squares_of("gradient", flats),
    "squares of bf16": lambda flats: squares_of("half", flats),
    "sum of two ranks": two_ranks,
}


def measure(count: int, rounds: int, threads: int, parts: Parts | None = None) -> dict[str, dict[str, list[float]]]:
    """Part → competitor → milliseconds of each round, after one round that is thrown away."""
    torch.set_num_threads(threads)
    flats = tensors(count)
    samples: dict[str, dict[str, list[float]]] = {}
    for part, make in (parts or PARTS).items():
        runs = make(flats)
        samples[part] = {name: [] for name in runs}
        for number in range(rounds + 1):
            for name in list(runs) if number % 2 else reversed(runs):
                start = time.perf_counter()
                with torch.no_grad():
                    runs[name]()
                if number:
                    samples[part][name].append((time.perf_counter() - start) * 1e3)
    return samples


def rows_of(samples: dict[str, dict[str, list[float]]], count: int) -> list[dict[str, Any]]:
    """A row per competitor: its times, and the ratio to its part's first one, paired by round."""
    rows = []
    for part, competitors in samples.items():
        base = next(iter(competitors.values()))
        for name, taken in competitors.items():
            ratio, target = paired_ratio(taken, base), TARGETS.get((part, name))
            row = {
                "part": part, "name": name, "min_ms": min(taken), "median_ms": statistics.median(taken),
                "million_per_second": count / min(taken) / 1e3, "ratio": ratio.median, "low": ratio.low,
                "high": ratio.high,
            }  # fmt: skip
            if part in BYTES:
                moved = BYTES[part] if name not in MEMORY else MEMORY[name]
                row["gb_per_s"] = moved * count / min(taken) / 1e6
                for other, its in MEMORY.items():  # bandwidth over bandwidth, paired by round
                    row[f"of_{other}"] = moved / its * paired_ratio(competitors[other], taken).median
            if target is not None:
                row |= {"target": target, "verdict": verdict(ratio, target, at_least=part == "update")}
            rows.append(row)
    return rows


FIRST_USE = {
    "shardengine": "from shardengine.kernels.native import library as l; start = now(); assert l.load()",
    "DeepSpeedCPUAdam": "from benchmarks.peers import import_deepspeed; import_deepspeed(); start = now(); "
    "from deepspeed.ops.adam import DeepSpeedCPUAdam as A; A([torch.nn.Parameter(torch.zeros(8))])",
}
"""What has the library built, if need be, after everything was imported that needs no library."""


def first_use() -> dict[str, dict[str, float]]:
    """Competitor → seconds until its library is there: "built" with an empty cache, "cached" in the next process."""
    found: dict[str, dict[str, float]] = {}
    for name, program in FIRST_USE.items():
        if name == "DeepSpeedCPUAdam" and importlib.util.find_spec("deepspeed") is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "SHARDENGINE_CACHE": folder, "TORCH_EXTENSIONS_DIR": folder}
            code = f"import time, torch; now = time.perf_counter; {program}; print(); print(now() - start)"
            command, root = [sys.executable, "-c", code], Path(__file__).resolve().parent.parent
            for state in ("built", "cached"):
                done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
                if done.returncode:
                    print(f"{name}: its library cannot be built: {done.stderr.strip()[-300:]}", file=sys.stderr)
                    break
                found.setdefault(name, {})[state] = float(done.stdout.split()[-1])
    return found


def in_fresh_process(
    count: int, rounds: int, threads: int, how: Callable[..., dict[str, dict[str, list[float]]]] = measure
) -> dict[str, dict[str, list[float]]]:
    """``how``, in a process that has known from its start how many threads there are."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(how, count, rounds, threads).result()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def print_rows(rows: list[dict[str, Any]], threads: int, count: int) -> None:
    """A table."""
    print(f"\n{threads} thread(s), {count / 1e6:g} million parameters; ratio to the first of each part")
    cells = []
    for row in rows:
        times = [f"{row['min_ms']:.1f}", f"{row['median_ms']:.1f}", f"{row['million_per_second']:.0f}"]
        ratio = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        speeds = (
            [f"{row['gb_per_s']:.1f}", f"{row['of_copy']:.0%}", f"{row['of_triad']:.0%}"] if "of_copy" in row else []
        )
        target = f"{row['target']}: {row['verdict']}" if "target" in row else ""
        cells.append([row["part"], row["name"], *times, ratio, *(speeds or [""] * 3), target])
    names = ["part", "who", "min ms", "median ms", "M/s", "ratio", "GB/s", "of copy", "of triad", "target"]
    print(table(names, cells))


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdict: a benchmark reports, a test decides."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adam", description=__doc__)
    parser.add_argument("--parameters", type=float, default=100e6, help="how many (default 100e6: 6 GiB)")
    parser.add_argument("--rounds", type=int, default=21, help="interleaved rounds (default 21)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.parameters < 1:
        parser.error("--rounds and --parameters must be at least 1")
    count, result = int(options.parameters), {"benchmark": "adam", "machine": machine(), "rounds": options.rounds}
    result |= {"parameters": count, "kernels": "native" if operations.implementation(torch.device("cpu")) else "torch"}
    there = importlib.util.find_spec("deepspeed") is not None
    result |= {"deepspeed": metadata.version("deepspeed") if there else None, "load_before": os.getloadavg()[0]}
    result |= {"first_use_seconds": first_use(), "threads": {}}
    for threads in sorted({1, len(os.sched_getaffinity(0))}, reverse=True):
        rows = rows_of(in_fresh_process(count, options.rounds, threads), count)
        result["threads"][str(threads)] = rows
        if not options.json:
            print_rows(rows, threads, count)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"\nseconds until the library is there: {result['first_use_seconds']}")
    few = options.rounds < MIN_ROUNDS
    said = f"not written: {MIN_ROUNDS} rounds or more" if few else f"written to {write_result('adam', result).name}"
    print(said, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
