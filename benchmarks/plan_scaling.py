"""A planned run of up to 1,024 ranks: its memory, its start, and weak and strong scaling curves.

``python -m benchmarks.plan_scaling`` runs the engine dry (docs/planning.md) with a Llama of the width of the one with 8
billion parameters, in one process; nothing is computed and nothing is sent. It prints tables, and writes
``benchmarks/results/plan_scaling-<machine>.json`` and ``.svg``.

    memory   of rank 0, one in the middle and the last one, of 8, 64 and 1,024, at each stage: 2 layers, since bytes are
             a line in the number of layers. Beside it what ``engine.memory()`` predicts by formula; and the seconds
             that ``initialize`` and a step of the dry run take
    weak     a micro-batch for each rank: efficiency is the time of a step on 8 ranks by that on N
    strong   ``GLOBAL_BATCH`` sequences for all of them, in as many micro-batches as that takes
    formula  computation, and what docs/limits.md ("Time of a step") says is exposed, from α and β

Time is that of hardware which nobody has measured (``hardware_of``): what a schedule makes of declared numbers. A tape
of a dry run depends on the number of ranks in the sizes of slices, and in one step or two for sums (one node, or
several). So two tapes of several nodes, of 16 and 1,024 ranks, are replayed with the links of N ranks, and a line in
1/N between them has the slices; ``reuse`` says how far that, and the line in micro-batches, is from dry runs.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.charts import finish
from benchmarks.plan import loss_of
from benchmarks.plan_cases import Text
from benchmarks.reporting import machine, table, write_result
from shardengine.comm import GroupName, nodes
from shardengine.planner import (
    DryRun,
    Hardware,
    Link,
    ModelPlace,
    Rates,
    Tape,
    Times,
    dry_run,
    simulate,
    without_weights,
)
from shardengine.planner.rates import COMPUTE, NETWORK, NODE
from shardengine.planner.replay import carried_times

LLAMA: Mapping[str, Any] = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 2048, "use_cache": False,
}  # fmt: skip
LAYERS, DEPTHS = 30, (2, 4)
TOKENS, BUCKET, OF_NODE = 2048, 50_000_000, 8
MEMORY_RANKS, RANKS = (8, 64, 1024), (8, 16, 32, 64, 128, 256, 512, 1024)
ENDS = (16, 1024)
"""Numbers of ranks whose tapes are replayed for those between."""
GLOBAL_BATCH = 1024
HYBRID = "3 hybrid"
WAYS: Mapping[str, Mapping[str, Any]] = {
    **{stage: {"stage": int(stage)} for stage in "0123"},
    HYBRID: {"stage": 3, "shard_group_size": OF_NODE},
}
CURVES = ("0", "2", "3", HYBRID)
LATENCIES = (10e-6, 100e-6, 1e-3)
GRADIENT, SUM, WEIGHT = 2, 4, 2
"""Bytes of an element that is sent."""


def hardware_of(ranks: int, latency_s: float = LATENCIES[0]) -> Hardware:
    """Nodes of eight GPUs with 312 TFLOP/s in bf16 and 80 GB, 200 GB/s inside of a node, 50 GB/s between nodes."""
    link, near = Link(50e9, latency_s), Link(200e9, LATENCIES[0])
    return Hardware(
        ranks, 80 * 10**9, node_ranks=OF_NODE, link=link, node_link=near, flops={"bf16": 312e12, "fp16": 312e12},
        memory_speed=2e12,
    )  # fmt: skip


# Dry runs


@dataclass(frozen=True)
class Run:
    """found: of the dry run · steps: forwards that it took, those before the layout has settled included."""

    found: DryRun
    steps: int


@functools.cache
def model_of(depth: int) -> nn.Module:
    """Without weights."""
    with torch.device("meta"):
        return Text("LlamaForCausalLM", "LlamaConfig", dict(LLAMA) | {"num_hidden_layers": depth})()


def config_of(way: str, micros: int) -> dict[str, Any]:
    """As a user writes it."""
    zero = {"reduce_bucket_size": BUCKET, "stage3_prefetch_bucket_size": BUCKET} | dict(WAYS[way])
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micros, "gradient_clipping": 1.0,
        "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero, "activation_checkpointing": {"enabled": True},
    }  # fmt: skip


@functools.cache
def run(way: str, ranks: int, rank: int = -1, depth: int = DEPTHS[0], micros: int = 1, steps: int = 2) -> Run:
    """rank: -1 for the one in the middle."""
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    calls = 0

    def batch() -> Mapping[str, Any]:
        nonlocal calls
        calls += 1
        return {"input_ids": ids, "labels": ids}

    place = ModelPlace(ranks, ranks // 2 if rank < 0 else rank, node_ranks=OF_NODE)
    make = functools.partial(without_weights, model_of(depth))
    found = dry_run(make, batch, config_of(way, micros), place, loss_of, steps=steps)
    return Run(found, calls)


# Memory and start


def memory_rows(ways: Sequence[str], numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Of each stage and number of ranks: what three ranks need, the formula, seconds."""
    for way in ways:
        for ranks in numbers:
            begun = run(way, ranks, steps=0).found.seconds
            runs = {rank: run(way, ranks, -1 if rank == ranks // 2 else rank) for rank in (0, ranks // 2, ranks - 1)}
            yield _memory_row(way, ranks, runs, begun)


def _memory_row(way: str, ranks: int, runs: Mapping[int, Run], begun: float) -> dict[str, Any]:
    peaks = {rank: each.found.peak.bytes for rank, each in runs.items()}
    middle = runs[ranks // 2]
    said, found = middle.found.memory, middle.found
    needs = {
        (each.found.peak.bytes, each.found.at_rest.bytes, each.found.memory["measured_model_state_bytes"])
        for each in runs.values()
    }
    return {
        "stage": way, "ranks": ranks, "parameters": found.parameters, "peak_bytes": peaks,
        "alike": len(needs) == 1, "spread_bytes": max(peaks.values()) - min(peaks.values()),
        "phase": found.peak.phase, "state_bytes": said["measured_model_state_bytes"],
        "formula_state_bytes": said["predicted_model_state_bytes"],
        "formula_buffer_bytes": said["predicted_buffer_bytes"],
        "by_kind": dict(found.peak.alive), "initialize_s": begun,
        "step_s": (found.seconds - begun) / middle.steps,
    }  # fmt: skip


# Time


def replayed(tape: Tape, ranks: int, rates: Rates) -> Times:
    """The tape of a run of several nodes, or of one, as that of ``ranks``."""
    inside, across = nodes.members(ranks, max(1, ranks // OF_NODE))
    parts = {True: across[0], False: inside[0]}
    members = {
        name: range(ranks) if name in ("gather", "reduce", "control") else parts[GroupName(name).is_across]
        for name in tape.members
    }
    return simulate(replace(tape, members=members), rates, ranks)


def whole(way: str, of: int, ranks: int, rates: Rates, micros: int = 1) -> Times:
    """Of all layers, by the tapes of ``of`` ranks, replayed as ``ranks``."""
    known = [replayed(run(way, of, depth=depth, micros=micros).found.tape, ranks, rates) for depth in DEPTHS]
    return carried_times(known, DEPTHS, LAYERS)


def facts(times: Times) -> dict[str, float]:
    """Seconds of a step, of its computation and of what is exposed, by link; ``computed`` phases are without waits."""
    return {
        "seconds": times.seconds, "compute": times.part(COMPUTE).busy, "bound": times.bound,
        **{f"{name} busy": times.part(name).busy for name in (NODE, NETWORK)},
        **{f"{name} exposed": times.part(name).exposed for name in (NODE, NETWORK)},
        **{f"phase {name}": seconds for name, seconds in times.phases.items()},
    }  # fmt: skip


def between(way: str, ranks: int, rates: Rates) -> dict[str, float]:
    """A step with one micro-batch: of one node by its own tape, else by those of ``ENDS`` and a line in 1/N."""
    if ranks == OF_NODE:
        return facts(whole(way, ranks, ranks, rates))
    few, many = (facts(whole(way, of, ranks, rates)) for of in ENDS)
    part = (1 / ENDS[0] - 1 / ranks) / (1 / ENDS[0] - 1 / ENDS[1])
    return {name: value + part * (many.get(name, 0.0) - value) for name, value in few.items()}


def another_micro_batch(way: str, ranks: int, rates: Rates) -> float:
    """Seconds by which one more makes a step longer."""
    of = OF_NODE if ranks == OF_NODE else ENDS[0]
    one, two = (whole(way, of, ranks, rates, micros).seconds for micros in (1, 2))
    return two - one


def curves(ways: Sequence[str], numbers: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each way and number of ranks, weak and strong, with the formula."""
    rows: list[dict[str, Any]] = []
    for way in ways:
        for ranks in numbers:
            if WAYS[way].get("shard_group_size") == ranks:  # one group
                continue
            rates = Rates.given(hardware_of(ranks))
            weak, more = between(way, ranks, rates), another_micro_batch(way, ranks, rates)
            micros = max(1, GLOBAL_BATCH // ranks)
            alone = between(way, ranks, without_links(rates))
            rows.append({
                "way": way, "ranks": ranks, "weak": weak, "micros": micros, "micro_s": more,
                "strong_s": weak["seconds"] + (micros - 1) * more,
                "formula_s": formula(way, ranks, alone, parameters()),
                "tokens_per_s_and_gpu": TOKENS / weak["seconds"],
            })  # fmt: skip
        of = [row for row in rows if row["way"] == way]
        for row in of:
            row["weak_efficiency"] = of[0]["weak"]["seconds"] / row["weak"]["seconds"]
            row["strong_efficiency"] = of[0]["strong_s"] * of[0]["ranks"] / (row["strong_s"] * row["ranks"])
            row["formula_error"] = row["formula_s"] / row["weak"]["seconds"] - 1
    return rows


def without_links(rates: Rates) -> Rates:
    """Where sending takes no time."""
    endless = Link(1e30, 0.0)
    return replace(rates, link=endless, node_link=endless, exchange_s=0.0)


@functools.cache
def parameters() -> int:
    """Of the whole model."""
    few, more = (sum(each.numel() for each in model_of(depth).parameters()) for depth in DEPTHS)
    return more + (more - few) * (LAYERS - DEPTHS[1]) // (DEPTHS[1] - DEPTHS[0])


# The formula of docs/limits.md


@dataclass(frozen=True)
class Costs:
    """Seconds of a byte and of a message. inside, across: of a reduction's two steps, per byte of the bucket, which
    share no link · gather: of a gather over all ranks, or over those of a shard group · far_gather: of a gather across
    shard groups, which has an L-th of the bytes."""

    inside: float
    across: float
    gather: float
    far_gather: float
    near_s: float
    far_s: float

    @classmethod
    def of(cls, way: str, ranks: int) -> Costs:
        """On ``hardware_of`` these."""
        where = hardware_of(ranks)
        assert where.node_link is not None and where.link is not None
        near, far = 1 / where.node_link.bytes_per_s, 1 / where.link.bytes_per_s
        size, count = OF_NODE, ranks // OF_NODE
        hybrid = way == HYBRID
        inside = (size - 1) / size * near
        across = SUM / GRADIENT * (count - 1) / ranks * far
        gather = inside if hybrid else max((ranks - 1) / ranks * near, (ranks - size) / (ranks * size) * far)
        far_gather = (count - 1) / ranks * far if hybrid else 0.0
        links = (where.node_link.latency_s, where.link.latency_s if count > 1 else 0.0)
        return cls(inside, across, gather, far_gather, *links)


def formula(way: str, ranks: int, alone: Mapping[str, float], count: int) -> float:
    """Seconds of a step with one micro-batch: ``alone`` has the computation by phase."""
    costs, buckets = Costs.of(way, ranks), max(1, round(count / BUCKET))
    size = count / buckets
    reduction = GRADIENT * size * max(costs.inside, costs.across)  # two links, one after the other for each bucket
    last = GRADIENT * size * (costs.inside + costs.across) + costs.near_s + costs.far_s
    forward, backward, step = (alone[f"phase {name}"] for name in ("forward", "backward", "step"))
    late = max(costs.near_s, costs.far_s)
    if WAYS[way]["stage"] < 3:
        gathered = {0: GRADIENT, 2: WEIGHT}[WAYS[way]["stage"]]
        after = gathered * count * costs.gather + late
        return forward + max(backward, (buckets - 1) * reduction) + last + max(step, after)
    first_layer = model_of(1).get_submodule("model.layers.0")
    block = sum(each.numel() for each in first_layer.parameters())
    gather = WEIGHT * block * costs.gather + late
    first = WEIGHT * LLAMA["vocab_size"] * LLAMA["hidden_size"] * costs.gather + late
    excess = sum(max(0.0, gather - each / LAYERS) for each in (forward, backward)) * LAYERS
    behind = max(0.0, (buckets - 1) * reduction - backward)
    return forward + backward + step + first + excess + behind + last + GRADIENT * count * costs.far_gather


# What the reuse of tapes costs


def reuse(ways: Sequence[str]) -> list[dict[str, Any]]:
    """Of 2 layers: a step by tapes of other numbers of ranks, and of micro-batches, beside that of a dry run."""
    rows: list[dict[str, Any]] = []
    for way in ways:
        depth = DEPTHS[0]
        rates = Rates.given(hardware_of(64))
        real = replayed(run(way, 64, depth=depth).found.tape, 64, rates).seconds
        few, many = (replayed(run(way, of, depth=depth).found.tape, 64, rates).seconds for of in ENDS)
        part = (1 / ENDS[0] - 1 / 64) / (1 / ENDS[0] - 1 / ENDS[1])
        same = Rates.given(hardware_of(ENDS[0]))
        one, two, three = (
            replayed(run(way, ENDS[0], depth=depth, micros=micros).found.tape, ENDS[0], same).seconds
            for micros in (1, 2, 3)
        )
        rows.append({
            "way": way, "64 ranks": real, "by both ends": few + part * (many - few), "by 16": few, "by 1,024": many,
            "error": (few + part * (many - few)) / real - 1, "error by 16": few / real - 1,
            "error by 1,024": many / real - 1, "micro error": (2 * two - one) / three - 1,
        })  # fmt: skip
    return rows


def latencies(ways: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """The weak curve's last point where a collective between nodes has another latency: a ring's grows with the number
    of nodes, a tree's with its logarithm, and α here is one number."""
    rows: list[dict[str, Any]] = []
    for way in ways:
        for latency in LATENCIES:
            found = between(way, ranks, Rates.given(hardware_of(ranks, latency)))
            rows.append({"way": way, "ranks": ranks, "latency_s": latency, "seconds": found["seconds"]})
    return rows


# The report


def tables(result: Mapping[str, Any]) -> str:
    """For people."""
    memory = [
        [row["stage"], str(row["ranks"]), f"{row['peak_bytes'][row['ranks'] // 2] / 1e9:.3f}",
         str(row["spread_bytes"]), f"{row['state_bytes'] / 1e9:.3f}", f"{row['formula_state_bytes'] / 1e9:.3f}",
         f"{row['formula_buffer_bytes'] / 1e9:.2f}", f"{row['initialize_s']:.2f}", f"{row['step_s']:.2f}"]
        for row in result["memory"]
    ]  # fmt: skip
    head = ["stage", "ranks", "peak GB", "spread B", "state GB", "formula", "buffers at most", "initialize s", "step s"]
    lines = [table(head, memory), ""]
    rows = [
        [row["way"], str(row["ranks"]), f"{1e3 * row['weak']['seconds']:.0f}",
         f"{1e3 * (row['weak']['seconds'] - row['weak']['compute']):.0f}", f"{100 * row['weak_efficiency']:.1f}%",
         f"{1e3 * row['formula_s']:.0f}", f"{100 * row['formula_error']:+.1f}%",
         f"{row['tokens_per_s_and_gpu']:.0f}", str(row["micros"]), f"{row['strong_s']:.2f}",
         f"{100 * row['strong_efficiency']:.1f}%"]
        for row in result["curves"]
    ]  # fmt: skip
    head = ["stage", "ranks", "weak ms", "exposed", "efficiency", "formula ms", "error", "tokens/s, GPU", "micros",
            "strong s", "efficiency"]  # fmt: skip
    lines += [table(head, rows), ""]
    lines += [
        f"stage {row['way']}: a step of 64 ranks by tapes of 16 and 1,024 {100 * row['error']:+.2f}%, by that of 16 "
        f"alone {100 * row['error by 16']:+.2f}%; three micro-batches by one and two {100 * row['micro error']:+.2f}%"
        for row in result["reuse"]
    ]
    lines += [
        f"stage {row['way']}, {row['ranks']} ranks, α of {1e6 * row['latency_s']:.0f} µs: {1e3 * row['seconds']:.0f} ms"
        for row in result["latency"]
    ]
    return "\n".join(lines)


def markdown(result: Mapping[str, Any]) -> list[str]:
    """The tables of docs/benchmarks.md: memory, and curves."""
    lines = ["| stage | " + " | ".join(f"{ranks:,} ranks" for ranks in MEMORY_RANKS) + " | initialize, a step |"]
    lines.append("|" + "---|" * (len(MEMORY_RANKS) + 2))
    for stage in dict.fromkeys(row["stage"] for row in result["memory"]):
        of = [row for row in result["memory"] if row["stage"] == stage]
        cells = [
            f"{row['peak_bytes'][str(row['ranks'] // 2)] / 1e9:.2f} ({row['state_bytes'] / 1e9:.2f})" for row in of
        ]
        cells.append(f"{of[-1]['initialize_s']:.1f} s, {of[-1]['step_s']:.1f} s")
        lines.append(f"| {stage} | {' | '.join(cells)} |")
    curves = ["| stage | ranks | weak: ms | exposed | formula | efficiency | strong: s | efficiency |"]
    curves.append("|" + "---|" * 8)
    for row in result["curves"]:
        if row["ranks"] in (8, 16, 64, 256, 1024) and (row["ranks"] != 16 or row["way"] == HYBRID):
            weak = row["weak"]
            curves.append(
                f"| {row['way']} | {row['ranks']:,} | {1e3 * weak['seconds']:.0f} | "
                f"{1e3 * (weak['seconds'] - weak['compute']):.0f} | {1e3 * row['formula_s']:.0f} | "
                f"{100 * row['weak_efficiency']:.1f}% | {row['strong_s']:.2f} | {100 * row['strong_efficiency']:.1f}% |"
            )
    return ["\n".join(lines), "\n".join(curves)]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Efficiency over the number of ranks, weak and strong; the formula dashed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8.8, 3.2))
    for way in dict.fromkeys(row["way"] for row in result["curves"]):
        of = [row for row in result["curves"] if row["way"] == way]
        ranks = [row["ranks"] for row in of]
        for each, key in zip(axes, ("weak_efficiency", "strong_efficiency"), strict=True):
            each.plot(ranks, [100 * row[key] for row in of], marker="o", markersize=3, label=f"stage {way}")
        said = [100 * of[0]["weak"]["seconds"] / row["formula_s"] for row in of]
        axes[0].plot(ranks, said, linestyle="--", linewidth=0.8, color=axes[0].lines[-1].get_color())
    for each, what in zip(axes, ("weak: a micro-batch for each rank", "strong: one global batch"), strict=True):
        each.set_xscale("log", base=2)
        each.set_xlabel(f"ranks, {what}", fontsize=8)
        each.set_ylabel("efficiency, %", fontsize=8)
        each.set_ylim(0, 110)
    axes[0].legend(frameon=False, fontsize=7)
    title = f"planned: {result['setting']['parameters'] / 1e9:.1f}B parameters, {result['setting']['hardware']}"
    finish(figure, list(axes), title, path)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_scaling", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    began = time.perf_counter()
    result: dict[str, Any] = {
        "machine": machine(),
        "setting": {
            "parameters": parameters(), "layers": LAYERS, "depths": DEPTHS, "tokens": TOKENS, "bucket": BUCKET,
            "global_batch": GLOBAL_BATCH, "node_ranks": OF_NODE,
            "hardware": "nodes of 8 GPUs, 312 TFLOP/s, 200 GB/s in a node, 50 GB/s and 10 µs between nodes",
        },
        "memory": list(memory_rows("0123", MEMORY_RANKS)),
        "curves": curves(CURVES, RANKS),
        "reuse": reuse(CURVES),
        "latency": latencies(CURVES, RANKS[-1]),
    }  # fmt: skip
    result |= {"seconds": time.perf_counter() - began, "load_after": os.getloadavg()[0]}
    print(tables(result))
    print(f"{result['seconds']:.0f} s", file=sys.stderr)
    if options.no_write:
        print("not written, as asked", file=sys.stderr)
        return 0
    path = write_result("plan_scaling", result)
    draw(result, path.with_suffix(".svg"))
    print(f"written to {os.path.relpath(path)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
