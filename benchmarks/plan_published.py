"""What plans say of runs that were published, beside what was published: memory and time of ZeRO, overlap of DDP.

``python -m benchmarks.plan_published`` runs the engine dry as one rank of each run, with what the papers say of models
and hardware; it prints tables and writes ``benchmarks/results/plan_published-<machine>.json``.

    table 1   ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054), table 1: bytes of model state of 7.5B, 128B and 1T
              parameters on 1 to 1,024 ranks, beside ``budget.Footprint`` of stages 1, 2 and 3, fp16 with fp32 masters
    table 2   its first row (the others are that times the degree of model parallelism, which is not built here): the
              largest model in 32 GB by model state alone, and as measured; beside it the largest that fits by its plan
    runs      the eleven runs with data parallelism alone of its artifact description (SC20's table 6, for a figure that
              shows throughput): planned peak and TFLOP/s; the text says over 40 on average for ZeRO, less than 20 for
              the baseline, and that all of them fit
    overlap   DDP (Li et al. 2020, arXiv 2006.15704): what overlap brings ResNet-50 on 32 GPUs, 256 GPUs beside 8, and
              how much sizes of buckets matter

Only numbers in text and tables that could be looked up are here. The papers' other figures are plots.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.plan import loss_of
from benchmarks.plan_cases import Text
from benchmarks.plan_scaling import BUCKET, replayed
from benchmarks.reporting import machine, table, write_result
from shardengine.planner import (
    DryRun,
    Hardware,
    Link,
    ModelPlace,
    Rates,
    Tape,
    Times,
    dry_run,
    highest,
    simulate,
    without_weights,
)
from shardengine.planner.layers import Layers, carried_on, line
from shardengine.planner.rates import COMPUTE, NETWORK, NODE
from shardengine.planner.replay import carried_times

# What was published

DEGREES = (1, 4, 16, 64, 256, 1024)
TABLE_1: Mapping[str, Mapping[str, Sequence[float]]] = {
    "7.5B": {"1": (120, 52.5, 35.6, 31.4, 30.4, 30.1), "2": (120, 41.3, 21.6, 16.6, 15.4, 15.1),
             "3": (120, 30, 7.5, 1.88, 0.47, 0.12)},
    "128B": {"1": (2048, 896, 608, 536, 518, 513), "2": (2048, 704, 368, 284, 263, 257),
             "3": (2048, 512, 128, 32, 8, 2)},
    "1T": {"1": (16000, 7000, 4750, 4187, 4046, 4011), "2": (16000, 5500, 2875, 2218, 2054, 2013),
           "3": (16000, 4000, 1000, 250, 62.5, 15.6)},
}  # fmt: skip
"""GB by size and stage (P_os, P_os+g, P_os+g+p), at ``DEGREES``."""
SIZES: Mapping[str, tuple[int, int, int]] = {
    "7.5B": (10, 25_000, 30_000), "128B": (16, 80_000, 100_000), "1T": (20, 200_000, 250_000),
}  # fmt: skip
"""Matrices of a model with exactly so many parameters: how many, rows, columns."""
CARD, TABLE_2_RANKS = 32e9, 64
TABLE_2: Mapping[str, float] = {"0": 2e9, "1": 7.6e9, "2": 14.4e9, "3": 128e9}
"""The largest model by model state: baseline, P_os, P_os+g, P_os+g+p."""
MEASURED: Mapping[str, float] = {"0": 1.3e9, "1": 6.2e9}
"""The largest model that was trained."""
FLOPS_ZERO, FLOPS_BASELINE = 40.0, 20.0
"""TFLOP/s of a GPU: on average over, and less than."""
OVERLAP = 0.38
"""By which overlap makes a step of ResNet-50 faster, with NCCL on 32 GPUs."""
BUCKETS = 2.0
"""× by which a good size of buckets may be faster."""


@dataclass(frozen=True)
class Published:
    """A run on 128 GPUs. stage: 2 for ZeRO (P_os+g), 0 for the baseline."""

    name: str
    layers: int
    hidden: int
    heads: int
    batch: int
    stage: str = "2"


RUNS = (
    Published("1.5B", 34, 1920, 16, 24),
    Published("2.5B", 54, 1920, 16, 24),
    Published("4B", 64, 2304, 24, 16),
    Published("6B", 52, 3072, 24, 12),
    Published("8B", 72, 3072, 24, 8),
    Published("10B", 50, 4096, 32, 6),
    Published("11B", 54, 4096, 32, 4),
    Published("12B", 58, 4096, 32, 4),
    Published("13B", 62, 4096, 32, 2),
    Published("1.16B", 24, 1920, 16, 8, "0"),
    Published("1.38B", 40, 1536, 16, 1, "0"),
)
RUN_RANKS = 128
TOKENS, WORDS = 1024, 50_257
"""Assumed: a sequence and a vocabulary of GPT-2."""

# What the papers say of hardware, and data sheets of a V100

DGX2: dict[str, Any] = {"node_ranks": 16, "link": Link(8 * 12.5e9 / 16, 20e-6), "node_link": Link(150e9, 10e-6)}
"""16 GPUs behind a switch with 150 GB/s each, and 8 cards of 100 Gb/s for a node."""
EIGHT: dict[str, Any] = {"node_ranks": 8, "link": Link(12.5e9 / 8, 20e-6), "node_link": Link(150e9, 10e-6)}
"""8 GPUs and one card of 100 Gb/s for a node."""
V100: dict[str, Any] = {"flops": {"fp16": 125e12, "fp32": 15.7e12, "bf16": 15.7e12}, "memory_speed": 900e9}


# Table 1 and table 2: model state


@functools.cache
def state_bytes(size: str, stage: str, ranks: int) -> float:
    """Of a rank, by ``budget.Footprint``."""
    count, rows, columns = SIZES[size]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(columns, rows, bias=False) for _ in range(count)))
    config = _config(stage, bucket=rows * columns)
    make = functools.partial(without_weights, model)
    found = dry_run(make, dict, config, ModelPlace(ranks, ranks // 2), loss_of, steps=0)
    return found.memory["predicted_model_state_bytes"]


def _config(stage: str, batch: int = 1, bucket: int = BUCKET, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch, "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": int(stage), "reduce_bucket_size": bucket}, **more,
    }  # fmt: skip


def table_1(sizes: Sequence[str], degrees: Sequence[int] = DEGREES) -> list[dict[str, Any]]:
    """A row for each cell."""
    rows = []
    for size in sizes:
        count, height, width = SIZES[size]
        elements = count * height * width
        for stage, published in TABLE_1[size].items():
            for ranks, said in zip(DEGREES, published, strict=True):
                if ranks in degrees:
                    ours, exact = state_bytes(size, stage, ranks) / 1e9, by_paper(stage, ranks) * elements / 1e9
                    rows.append({
                        "size": size, "stage": stage, "ranks": ranks, "published_gb": said, "ours_gb": ours,
                        "error": ours / said - 1, "over_formula": ours / exact - 1,
                    })  # fmt: skip
    return rows


def by_paper(stage: str, ranks: int) -> float:
    """Bytes of a parameter, by the formula of the paper's section 5."""
    return {"0": 16.0, "1": 4 + 12 / ranks, "2": 2 + 14 / ranks, "3": 16 / ranks}[stage]


def table_2_states() -> list[dict[str, Any]]:
    """The largest model by model state alone."""
    rows = []
    count, height, width = SIZES["7.5B"]
    for stage, said in TABLE_2.items():
        each = state_bytes("7.5B", stage, TABLE_2_RANKS) / (count * height * width)
        ours = CARD / each
        rows.append({"stage": stage, "published": said, "ours": ours, "error": ours / said - 1})
    return rows


# Whole runs of a GPT-2


@functools.cache
def _gpt2(depth: int, hidden: int, heads: int) -> nn.Module:
    """Attention is as it was at the time: scores are stored."""
    values = {
        "vocab_size": WORDS, "n_positions": TOKENS, "n_embd": hidden, "n_layer": depth, "n_head": heads,
        "use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager",
    }  # fmt: skip
    with torch.device("meta"):
        return Text("GPT2LMHeadModel", "GPT2Config", values)()


DEPTHS, CHECK = (2, 4), 6
"""Layers of the models that run."""


@dataclass(frozen=True)
class Deep:
    """Dry runs of shallow models, from which follows any deeper one."""

    stage: str
    hidden: int
    heads: int
    batch: int
    ranks: int
    node_ranks: int

    def run(self, depth: int) -> DryRun:
        """With so many layers, each once."""
        return _dry(self, depth)

    def peak(self, layers: int) -> int:
        """Bytes, of all of them."""
        runs = (self.run(DEPTHS[0]).device, self.run(DEPTHS[1]).device)
        moments = carried_on(runs, DEPTHS, Layers(("transformer.h",), 0, layers, 1), layers)
        return highest(moments, ("forward", "backward", "step")).bytes

    def off(self) -> float:
        """By which part a dry run of ``CHECK`` layers differs from what is said of it."""
        return self.peak(CHECK) / self.run(CHECK).peak.bytes - 1

    def parameters(self, layers: int) -> int:
        """Of the model."""
        return round(line(DEPTHS, (self.run(DEPTHS[0]).parameters, self.run(DEPTHS[1]).parameters), layers))


@functools.cache
def _dry(deep: Deep, depth: int) -> DryRun:
    ids = torch.zeros(deep.batch, TOKENS, dtype=torch.int64)
    make = functools.partial(without_weights, _gpt2(depth, deep.hidden, deep.heads))
    bucket = 3 * deep.hidden**2  # four for each layer, 50M elements of the widest
    more = {"activation_checkpointing": {"enabled": True}, "gradient_clipping": 1.0}
    config = _config(deep.stage, deep.batch, bucket, **more)
    place = ModelPlace(deep.ranks, deep.ranks // 2, node_ranks=deep.node_ranks)
    return dry_run(make, lambda: {"input_ids": ids, "labels": ids}, config, place, loss_of)


def largest(deep: Deep, limit: float) -> tuple[int, int]:
    """Layers of the largest model whose planned peak is within ``limit``, and its parameters."""
    layers = 0
    while deep.peak(layers + 1) <= limit:
        layers += 1
    return layers, deep.parameters(layers)


def table_2_measured() -> list[dict[str, Any]]:
    """The largest model with activations and buffers. Widths: of the paper's runs of that size."""
    rows = []
    usable = Hardware(TABLE_2_RANKS, round(CARD)).usable_bytes
    for stage, hidden, heads in (("0", 1536, 16), ("1", 3072, 24)):
        deep = Deep(stage, hidden, heads, 1, TABLE_2_RANKS, 16)
        layers, count = largest(deep, usable)
        said = MEASURED[stage]
        rows.append({
            "stage": stage, "hidden": hidden, "layers": layers, "published": said, "ours": count,
            "error": count / said - 1, "peak_bytes": deep.peak(layers), "off_the_line": deep.off(),
        })  # fmt: skip
    return rows


def run_row(run: Published) -> dict[str, Any]:
    """Peak and speed."""
    deep = Deep(run.stage, run.hidden, run.heads, run.batch, RUN_RANKS, 16)
    hardware = Hardware(RUN_RANKS, round(CARD), **DGX2, **V100)
    rates, peak = Rates.given(hardware), deep.peak(run.layers)
    tapes = [deep.run(depth).tape for depth in DEPTHS]
    times = carried_times([simulate(tape, rates, RUN_RANKS) for tape in tapes], DEPTHS, run.layers)
    few, more = (float(sum(tape.flops().values())) for tape in tapes)
    flops = line(DEPTHS, (few, more), run.layers)
    count = deep.parameters(run.layers)
    model = run.batch * TOKENS * (6 * count + 12 * run.layers * run.hidden * TOKENS)
    return {
        "run": run.name, "stage": run.stage, "parameters": count, "batch": run.batch,
        "peak_bytes": peak, "fits": peak <= hardware.usable_bytes,
        "seconds": times.seconds, "compute": times.part(COMPUTE).busy,
        "tflops": flops / times.seconds / 1e12, "model_tflops": model / times.seconds / 1e12,
        "if_nothing_were_sent": flops / times.part(COMPUTE).busy / 1e12,
    }  # fmt: skip


# DDP


MIB_25 = 25 * 2**20 // 4
"""Elements of fp32."""


@functools.cache
def resnet(batch: int, bucket: int = MIB_25) -> Tape:
    """A step of ResNet-50 in fp32 at stage 0 on 32 ranks. bucket: elements."""
    with torch.device("meta"):
        model = Text("ResNetForImageClassification", "ResNetConfig", {"num_labels": 1000})()
    pictures = {"pixel_values": torch.zeros(batch, 3, 224, 224), "labels": torch.zeros(batch, dtype=torch.int64)}
    config = {
        "train_micro_batch_size_per_gpu": batch, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": bucket},
    }  # fmt: skip
    make = functools.partial(without_weights, model)
    return dry_run(make, lambda: pictures, config, ModelPlace(32, 16, node_ranks=8), loss_of).tape


def resnet_times(tape: Tape, ranks: int) -> Times:
    """On V100s, 8 in a node."""
    return replayed(tape, ranks, Rates.given(Hardware(ranks, 32 * 10**9, **EIGHT, **V100)))


def ddp() -> dict[str, Any]:
    """Batches of the paper could not be looked up: some are tried. Without overlap all that is sent is exposed."""
    overlaps, scaling = [], []
    for batch in (4, 16, 64):
        times = {ranks: resnet_times(resnet(batch), ranks) for ranks in (8, 32, 256)}
        found = times[32]
        compute = found.part(COMPUTE).busy
        sent = sum(found.part(name).busy for name in (NODE, NETWORK))
        gain = (compute + sent) / found.seconds - 1
        overlaps.append({
            "batch": batch, "seconds": found.seconds, "compute": compute, "sent": sent, "speedup": gain,
            "most": sent / compute, "error": gain - OVERLAP,
        })  # fmt: skip
        scaling.append({
            "batch": batch, "of_8": times[8].seconds / times[256].seconds,
            "of_1": times[256].part(COMPUTE).busy / times[256].seconds,
        })  # fmt: skip
    sizes = {bucket: resnet_times(resnet(16, bucket), 32).seconds for bucket in (100_000, MIB_25, 26_000_000)}
    ratio = max(sizes.values()) / min(sizes.values())
    return {"overlap": overlaps, "scaling": scaling, "buckets": sizes, "buckets_ratio": ratio,
            "buckets_error": ratio / BUCKETS - 1}  # fmt: skip


# The report


def summary(result: Mapping[str, Any]) -> dict[str, float]:
    """What pages quote."""
    cells, zero = result["table_1"], [row for row in result["runs"] if row["stage"] != "0"]
    return {
        "cells": len(cells),
        "largest_error": max((row["error"] for row in cells), key=abs),
        "median_error": statistics.median(abs(row["error"]) for row in cells),
        "largest_over_formula": max(row["over_formula"] for row in cells),
        "fit": sum(row["fits"] for row in result["runs"]),
        "tflops": statistics.mean(row["tflops"] for row in zero),
        "model_tflops": statistics.mean(row["model_tflops"] for row in zero),
        "baseline_tflops": result["runs"][-1]["tflops"],
    }


def markdown(result: Mapping[str, Any]) -> list[str]:
    """The tables of docs/benchmarks.md: the largest models, the runs on 128 GPUs."""
    lines = ["| stage | by model state: published | ours | measured | ours, planned |", "|" + "---|" * 5]
    measured = {row["stage"]: row for row in result["table_2_measured"]}
    for row in result["table_2"]:
        said = [f"{row['published'] / 1e9:g}B", f"{row['ours'] / 1e9:.2f}B ({100 * row['error']:+.1f}%)", "", ""]
        if (found := measured.get(row["stage"])) is not None:
            said[2:] = [f"{found['published'] / 1e9:g}B", f"{found['ours'] / 1e9:.2f}B ({100 * found['error']:+.0f}%)"]
        lines.append(f"| {row['stage']} | {' | '.join(said)} |")
    runs = ["| run | stage | batch | peak, GB | ms | TFLOP/s | of the model | if nothing were sent |", "|" + "---|" * 8]
    for row in result["runs"]:
        speeds = [f"{row[name]:.1f}" for name in ("tflops", "model_tflops", "if_nothing_were_sent")]
        cells = [row["run"], row["stage"], str(row["batch"]), f"{row['peak_bytes'] / 1e9:.1f}"]
        duration = f"{1e3 * row['seconds']:.0f}"
        runs.append(f"| {' | '.join([*cells, duration, *speeds])} |")
    return ["\n".join(lines), "\n".join(runs)]


def tables(result: Mapping[str, Any]) -> str:
    """For people."""
    cells = [
        [row["size"], row["stage"], str(row["ranks"]), f"{row['published_gb']:g}", f"{row['ours_gb']:.3f}",
         f"{100 * row['error']:+.2f}%", f"{100 * row['over_formula']:.4f}%"]
        for row in result["table_1"]
    ]  # fmt: skip
    lines = [table(["size", "stage", "ranks", "published GB", "ours", "error", "over its formula"], cells), ""]
    for name in ("table_2", "table_2_measured"):
        rows = [
            [row["stage"], f"{row['published'] / 1e9:.1f}B", f"{row['ours'] / 1e9:.2f}B", f"{100 * row['error']:+.1f}%"]
            for row in result[name]
        ]
        lines += [table(["stage", f"{name}: published", "ours", "error"], rows), ""]
    runs = [
        [row["run"], row["stage"], f"{row['parameters'] / 1e9:.2f}B", str(row["batch"]),
         f"{row['peak_bytes'] / 1e9:.1f}", "yes" if row["fits"] else "no", f"{1e3 * row['seconds']:.0f}",
         f"{row['tflops']:.1f}", f"{row['model_tflops']:.1f}", f"{row['if_nothing_were_sent']:.1f}"]
        for row in result["runs"]
    ]  # fmt: skip
    head = ["run", "stage", "parameters", "batch", "peak GB", "fits", "ms", "TFLOP/s", "of the model", "alone"]
    lines += [table(head, runs), ""]
    found = result["ddp"]
    lines += [
        f"overlap, batch {row['batch']}: {100 * row['speedup']:+.1f}% (published {100 * OVERLAP:+.0f}%, at most "
        f"{100 * row['most']:+.1f}%)"
        for row in found["overlap"]
    ]
    lines += [
        f"256 ranks, batch {row['batch']}: {100 * row['of_8']:.1f}% of 8, {100 * row['of_1']:.1f}% of one"
        for row in found["scaling"]
    ]
    lines += [f"sizes of buckets: × {found['buckets_ratio']:.2f} (published: over {BUCKETS:.0f})"]
    return "\n".join([*lines, str(result["summary"])])


PARTS: Mapping[str, Callable[[], Any]] = {
    "table_1": lambda: table_1(list(SIZES)),
    "table_2": table_2_states,
    "table_2_measured": table_2_measured,
    "runs": lambda: [run_row(run) for run in RUNS],
    "ddp": ddp,
}


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_published", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    began = time.perf_counter()
    result: dict[str, Any] = {"machine": machine()}
    for name, make in PARTS.items():
        result[name] = make()
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    result |= {"summary": summary(result), "seconds": time.perf_counter() - began}
    print(tables(result))
    print(f"{result['seconds']:.0f} s", file=sys.stderr)
    if options.no_write:
        print("not written, as asked", file=sys.stderr)
        return 0
    print(f"written to {os.path.relpath(write_result('plan_published', result))}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
