"""What a precision costs in loss: the same small GPT-2 trained on real text in fp32, fp16 and bf16, in one run.

``python -m benchmarks.convergence`` trains on the text of ``shardengine train``, with its loop, schedule and learning
rate, 200 steps on two ranks at stage 2, once per precision and seed. A seed decides the first weights and the order of
the data, and runs of one seed are compared with each other: *difference* is a precision's loss less fp32's, of the last
ten training steps (the same tokens for both) and of the validation rows. Took 19 minutes on two busy cores without
instructions for bf16 and fp16; how fast a step is says nothing here. ``--group states`` trains with optimizer states in
bf16 and in 8 bits, ``states_bf16`` the same beside bf16 weights, ``long`` with five times the steps, ``hooks`` with
communication hooks; each group has a result of its own. *slow* are AdamW's default betas, whose second moment moves by
a thousandth per step; they are compared with fp32 states with these betas.

[Note: Bounds of a difference] The bounds are declared, so that machines compare. They stand beside what another seed
does to fp32 itself, measured in the same run: two seeds' validation losses are √2·σ apart (root mean square, σ over ten
seeds), about 0.05 nats where the bounds were chosen. bf16 weights without masters may cost 0.05, as much as another
seed; where fp32 weights are kept and only the computation is rounded, 0.02, less than half of it. Optimizer states in
fewer bytes may cost 0.02, too, with fp32 weights, fp32 masters and split ones: nothing that a step adds to a weight is
lost, and what rounding does to a state has mean zero and is forgotten at the rate of the betas, as the noise of a batch
is. So may hooks that round each element, whose errors wait or are small beside a batch's noise; PowerSGD, of whose
matrices 4 and 16 columns of 128 travel, may cost as much as another seed; torch's own is beside it. Both sides count: a
loss further below fp32's is another training, too. Reached: every seed, training and validation, within the bound.
Missed: a mean over the seeds is not. Else not decided. Each run has a control: pure bf16 rounded to nearest, held to
the bound of stochastic rounding, and states of 8 bits whose small second moments become zero, which the engine never
does (``convergence_ranks.ALTERED``), and gradients of one rank alone (hook noop). A control must miss its bound, else
the setting is too easy to tell whether small updates are lost, or whether states are kept well enough, and the other
verdicts are worth nothing. States of 8 bits rounded to nearest are for comparison.

Owns: the command line, the verdicts, the report and its picture. ``convergence_ranks.py`` trains.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.charts import COLORS, PEER_COLOR, finish
from benchmarks.convergence_ranks import (
    BASE,
    BASES,
    PRECISIONS,
    Run,
    Training,
    base_of,
    read_blocks,
    run_ranks,
    unigram_loss,
)
from benchmarks.reporting import Verdict, machine, result_path, table, write_result
from benchmarks.workload import Setting

LAST = 10
"""Steps at the end that a run's training loss is the mean of; also the window of the curves."""
WITH_MASTERS, WITHOUT_MASTERS = 0.02, 0.05
BOUNDS = {
    "fp16": WITH_MASTERS,
    "bf16": WITH_MASTERS,
    "bf16-pure-stochastic": WITHOUT_MASTERS,
    "bf16-pure": WITHOUT_MASTERS,
    "bf16-autocast": WITH_MASTERS,
    "states-bf16": WITH_MASTERS,
    "states-8bit": WITH_MASTERS,
    "states-8bit-nearest": WITH_MASTERS,
    "states-8bit-zero": WITH_MASTERS,
    "bf16-states-bf16": WITH_MASTERS,
    "bf16-states-8bit": WITH_MASTERS,
    "bf16-split-states-8bit": WITH_MASTERS,
    "slow-states-8bit": WITH_MASTERS,
    "slow-states-8bit-nearest": WITH_MASTERS,
    "hook-fp16": WITH_MASTERS,
    "hook-bf16": WITH_MASTERS,
    "hook-int8": WITH_MASTERS,
    "hook-int8-alone": WITH_MASTERS,
    "hook-int4": WITH_MASTERS,
    "hook-power_sgd": WITHOUT_MASTERS,
    "hook-power_sgd-16": WITHOUT_MASTERS,
    "hook-power_sgd-torch": WITHOUT_MASTERS,
    "hook-noop": WITH_MASTERS,
}
"""Nats ([Note: Bounds of a difference])."""
CONTROLS = {
    "bf16-pure": "lost updates",
    "states-8bit-zero": "states kept badly",
    "hook-noop": "gradients that do not travel",
}
"""What must miss its bound, and what it shows."""
GROUPS = {
    "precisions": (BASE, "fp16", "bf16", "bf16-pure-stochastic", "bf16-pure", "bf16-autocast"),
    "states": (
        BASE,
        "states-bf16",
        "states-8bit",
        "states-8bit-nearest",
        "states-8bit-zero",
        "fp32-slow",
        "slow-states-8bit",
        "slow-states-8bit-nearest",
    ),
    "states_bf16": (BASE, "bf16-states-bf16", "bf16-states-8bit", "bf16-split-states-8bit"),
    "long": (BASE, "states-8bit", "fp32-slow", "slow-states-8bit"),
    "hooks": (
        BASE,
        "hook-fp16",
        "hook-bf16",
        "hook-int8",
        "hook-int8-alone",
        "hook-int4",
        "hook-power_sgd",
        "hook-power_sgd-16",
        "hook-power_sgd-torch",
        "hook-noop",
    ),
}
"""What is trained in one run."""
RESULTS_OF = {name: f"convergence_{name}" for name in GROUPS} | {"precisions": "convergence"}
"""The name of its result."""
DRAWN = "precisions"
"""Of which there is a picture."""
EXPECTED = {
    BASE: ("float32", "float32", 8),
    "fp16": ("float16", "float16", 12),
    "bf16": ("bfloat16", "bfloat16", 12),
    "bf16-pure-stochastic": ("bfloat16", "bfloat16", 8),
    "bf16-pure": ("bfloat16", "bfloat16", 8),
    "bf16-autocast": ("float32", "bfloat16", 8),
    "states-bf16": ("float32", "float32", 4),
    "states-8bit": ("float32", "float32", 2.03125),
    "states-8bit-nearest": ("float32", "float32", 2.03125),
    "states-8bit-zero": ("float32", "float32", 8),
    "bf16-states-bf16": ("bfloat16", "bfloat16", 8),
    "bf16-states-8bit": ("bfloat16", "bfloat16", 6.03125),
    "bf16-split-states-8bit": ("bfloat16", "bfloat16", 3.03125),
    "fp32-slow": ("float32", "float32", 8),
    "slow-states-8bit": ("float32", "float32", 2.03125),
    "slow-states-8bit-nearest": ("float32", "float32", 2.03125),
    **dict.fromkeys(GROUPS["hooks"][1:], ("float32", "float32", 8)),
}
"""Of a run: dtype of the weights, of what a layer computes, bytes of Adam's states and masters per parameter."""
SAME_START = 0.01
"""Weights rounded to bf16 move the first validation loss by less than this, other weights by more."""
REFERENCE = Training(Setting(ranks=2, layers=2, hidden=128, vocabulary=512, batch=4, sequence=64), 200, 1e-3)
"""What results are kept for."""
SEEDS = {"precisions": (3, 10), "states": (3, 3), "states_bf16": (3, 3), "long": (1, 1), "hooks": (3, 3)}
"""Of every precision, and of fp32."""
LONG = 1000
"""Steps of group "long"."""
LABELS = {
    "fp16": "fp16, fp32 masters",
    "bf16": "bf16, fp32 masters",
    "bf16-pure-stochastic": "bf16, stochastic rounding",
    "bf16-pure": "bf16, rounded to nearest",
    "bf16-autocast": "fp32 under bf16 autocast",
}
SHADES = {"fp16": "#d1495b", "bf16": COLORS["shardengine"], "bf16-pure-stochastic": "#2e8b57", "bf16-pure": "#f2b134"}


def jobs_of(precisions: Sequence[str], seeds: int, base_seeds: int) -> list[tuple[str, int]]:
    """(precision, seed) in the order of the runs: seeds from 1 on, each with fp32 first."""
    missing = {base_of(name) for name in precisions} - set(precisions)
    others = [name for name in PRECISIONS if name != BASE and name in missing.union(precisions)]
    return [
        (name, seed)
        for seed in range(1, max(seeds, base_seeds) + 1)
        for name in (BASE, *(others if seed <= seeds else ()))
    ]


def check(runs: Sequence[Run]) -> None:
    """Raise SystemExit if a run did not train in what was asked for, or from other weights than fp32 of its seed."""
    starts = {run.seed: run.validation[0][1] for run in runs if run.precision == BASE}
    for run in runs:
        weights, computed, state = EXPECTED[run.precision]
        if (run.parameter_dtypes, run.computed_in) != ([weights], computed) or not 0 <= run.state_bytes - state < 0.5:
            raise SystemExit(
                f"{run.precision}: expected weights in {weights}, layers in {computed} and {state} bytes of states and "
                f"masters per parameter, got {', '.join(run.parameter_dtypes)}, {run.computed_in} and "
                f"{run.state_bytes:.2f}: not what was asked of the engine"
            )
        start = run.validation[0][1]
        if not abs(start - starts[run.seed]) <= SAME_START:
            raise SystemExit(
                f"{run.precision}, seed {run.seed}: began at a validation loss of {start:.4f}, {BASE} at "
                f"{starts[run.seed]:.4f}: not the same weights"
            )


def last_losses(run: Run) -> dict[str, float]:
    """Of the last training steps, and of the validation rows after them."""
    return {"training": statistics.fmean(run.losses[-LAST:]), "validation": run.validation[-1][1]}


def within(differences: Mapping[str, Sequence[float]], bound: float) -> Verdict:
    """The verdict on differences to fp32 by kind of loss, one per seed ([Note: Bounds of a difference])."""
    if all(abs(value) <= bound for values in differences.values() for value in values):
        return "reached"
    if all(abs(statistics.fmean(values)) <= bound for values in differences.values()):
        return "not decided"
    return "missed"


def summarise(runs: Sequence[Run]) -> dict[str, Any]:
    """``spread`` of fp32 over its seeds, ``precisions``: a row for each, ``control_misses``: None where none ran.

    Raises SystemExit where ``check`` does.
    """
    check(runs)
    bases = {(run.precision, run.seed): last_losses(run) for run in runs if run.precision in BASES}
    base = {seed: losses for (name, seed), losses in bases.items() if name == BASE}
    shared = {run.seed for run in runs if run.precision != BASE} or set(base)
    rows = {
        name: row_of([run for run in runs if run.precision == name], bases, shared)
        for name in PRECISIONS
        if any(run.precision == name for run in runs)
    }
    finals = [losses["validation"] for losses in base.values()]
    misses = [rows[name]["verdict"] == "missed" for name in CONTROLS if name in rows]
    return {"spread": spread_of(finals), "precisions": rows, "control_misses": all(misses) if misses else None}


def spread_of(finals: Sequence[float]) -> dict[str, float]:
    """What the choice of a seed does: σ, √2·σ as ``between_two`` and the range of one loss per seed; 0 for one seed."""
    deviation = statistics.stdev(finals) if len(finals) > 1 else 0.0
    return {
        "seeds": len(finals),
        "deviation": deviation,
        "between_two": math.sqrt(2) * deviation,
        "range": max(finals) - min(finals),
    }


def row_of(
    runs: Sequence[Run], bases: Mapping[tuple[str, int], Mapping[str, float]], shared: set[int]
) -> dict[str, Any]:
    """One precision over its seeds: means of the losses, differences seed by seed, verdict, what the engine said.

    Means are over the seeds ``shared`` by all, so that they compare.
    """
    name = runs[0].precision
    losses = [last_losses(run) for run in runs if run.seed in shared]
    row: dict[str, Any] = {f"{kind}_loss": statistics.fmean(each[kind] for each in losses) for kind in losses[0]}
    if name in BOUNDS:
        base = base_of(name)
        differences = {
            kind: [mine[kind] - bases[base, run.seed][kind] for mine, run in zip(losses, runs, strict=True)]
            for kind in losses[0]
        }
        row |= {"difference": {kind: statistics.fmean(values) for kind, values in differences.items()}}
        row |= {"differences": differences, "bound": BOUNDS[name], "verdict": within(differences, BOUNDS[name])}
    weights, computed, _ = EXPECTED[name]
    return row | {
        "weights": weights,
        "computed_in": computed,
        "state_bytes_per_parameter": runs[0].state_bytes,
        "skipped_steps": [run.skipped for run in runs],
        "loss_scale": [run.loss_scales[-1][1] for run in runs],
        "runs": [asdict(run) for run in runs],
    }


def print_report(result: Mapping[str, Any]) -> None:
    """The table, and what to read it by."""
    header = "precision|weights|layers|state B|training|− fp32 [seeds]|validation|− fp32 [seeds]|bound|verdict|skipped"
    rows = []
    for name, row in result["precisions"].items():
        cells = [name, row["weights"], row["computed_in"], f"{row['state_bytes_per_parameter']:.3g}"]
        for kind in ("training", "validation"):
            cells += [f"{row[f'{kind}_loss']:.4f}", over_seeds(row["differences"][kind]) if name in BOUNDS else "-"]
        cells += [f"{row['bound']:.2f}", row["verdict"]] if name in BOUNDS else ["-", "-"]
        scaled = max(row["loss_scale"]) > 1
        skipped, scales = (", ".join(f"{each:g}" for each in row[key]) for key in ("skipped_steps", "loss_scale"))
        rows.append([*cells, f"{skipped} (scale {scales})" if scaled else "-"])
    print(table(header.split("|"), rows))
    data, spread = result["data"], result["spread"]
    print(
        f"\nnats per token; fp32 begins at {data['first_loss']:.3f}, token frequencies alone give "
        f"{data['unigram_loss']:.3f}; two of {spread['seeds']} seeds of fp32 end {spread['between_two']:.3f} apart "
        f"(√2·σ; range {spread['range']:.3f})"
    )
    if result["control_misses"] is False:
        shown = " or ".join(what for name, what in CONTROLS.items() if name in result["precisions"])
        print(f"the control stays within its bound: this setting does not show {shown}, the verdicts are worth little")


def over_seeds(values: Sequence[float]) -> str:
    """Mean and range."""
    return f"{statistics.fmean(values):+.4f} [{min(values):+.4f}, {max(values):+.4f}]"


def smooth(values: Sequence[float]) -> list[float]:
    """Means over windows of ``LAST`` steps, the first of which ends at step ``LAST``."""
    return [statistics.fmean(values[end - LAST : end]) for end in range(LAST, len(values) + 1)]


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Training loss over steps, beside it each precision's difference to fp32: means over seeds thick, seeds thin."""
    import matplotlib.pyplot as plt

    rows, control = result["precisions"], "bf16-pure"
    curves = {name: {run["seed"]: run["losses"] for run in row["runs"]} for name, row in rows.items()}
    steps = range(LAST, result["training"]["steps"] + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.6, 4.4), width_ratios=[1, 1.7])
    for name, seeds in curves.items():
        shade = "#24292f" if name == BASE else SHADES.get(name, PEER_COLOR)
        shared = [seeds[seed] for seed in curves[control if control in curves else BASE]]
        means = [statistics.fmean(at) for at in zip(*shared, strict=True)]
        if name in (BASE, control):
            left.plot(steps, smooth(means), color=shade, linewidth=1.2, label=LABELS.get(name, name))
        if name != BASE:
            gaps = [[a - b for a, b in zip(losses, curves[BASE][seed], strict=True)] for seed, losses in seeds.items()]
            for gap in gaps:
                right.plot(steps, smooth(gap), color=shade, linewidth=0.4, alpha=0.5)
            mean = smooth([statistics.fmean(at) for at in zip(*gaps, strict=True)])
            right.plot(steps, mean, color=shade, linewidth=1.6, label=LABELS[name])
    left.axhline(result["data"]["unigram_loss"], color="#57606a", linewidth=0.8, linestyle=":")
    left.text(steps[-1], result["data"]["unigram_loss"], "token frequencies alone", ha="right", va="bottom", fontsize=7)
    left.set_ylabel(f"training loss, nats (mean of {LAST} steps)", fontsize=8)
    for bound, style in ((WITH_MASTERS, "--"), (WITHOUT_MASTERS, ":")):
        for side in (-bound, bound):
            right.axhline(side, color="#57606a", linewidth=0.8, linestyle=style)
        right.text(steps[0], -bound, f"bound {bound:g}", ha="left", va="bottom", fontsize=7, color="#57606a")
    right.axhline(0.0, color="#24292f", linewidth=0.8)
    right.set_yscale("symlog", linthresh=WITH_MASTERS / 2)
    ticks = (-0.1, -0.05, -0.02, -0.01, -0.005, 0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
    right.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    right.minorticks_off()
    right.set_ylabel("training loss less fp32's, nats", fontsize=8)
    for axes in (left, right):
        axes.set_xlabel("step", fontsize=8)
        axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    finish(figure, [left, right], subtitle(result), path)


def subtitle(result: Mapping[str, Any]) -> str:
    """The setting and the machine in one line."""
    work = result["training"]["work"]
    return (
        f"GPT-2, {work['parameters'] / 1e6:.1f}M parameters, {work['ranks']} ranks × {work['batch']} × "
        f"{work['sequence']} tokens per step, stage {result['training']['stage']}, {max(result['seeds'].values())} "
        f"seeds of fp32, {min(result['seeds'].values())} of the others, {result['machine']['processor']}, torch "
        f"{result['machine']['torch']}"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence", description=(__doc__ or "").split("\n\n")[0]
    )
    work = REFERENCE.work
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), metavar="NAME")
    parser.add_argument(
        "--group", choices=list(GROUPS), default="precisions", help="what is trained, and kept as one result"
    )
    parser.add_argument("--seeds", type=int, help="of every precision (default 3, of long 1)")
    parser.add_argument(
        "--base-seeds", type=int, help="of fp32, at least --seeds (default 10 of precisions, else as --seeds)"
    )
    parser.add_argument("--steps", type=int, help=f"default {REFERENCE.steps}, of long {LONG}")
    parser.add_argument("--learning-rate", type=float, default=REFERENCE.rate, help="the highest, after the warm-up")
    parser.add_argument("--stage", type=int, default=REFERENCE.stage, choices=[0, 1, 2, 3])
    parser.add_argument("--ranks", type=int, default=work.ranks)
    parser.add_argument("--layers", type=int, default=work.layers)
    parser.add_argument("--hidden", type=int, default=work.hidden)
    parser.add_argument("--vocabulary", type=int, default=work.vocabulary)
    parser.add_argument("--batch", type=int, default=work.batch, help="rows per rank and step")
    parser.add_argument("--sequence", type=int, default=work.sequence, help="tokens per row")
    parser.add_argument("--draw", action="store_true", help="draw the result that is there, train nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    seeds, base_seeds = SEEDS[options.group]
    options.precisions = options.precisions or GROUPS[options.group]
    options.seeds = seeds if options.seeds is None else options.seeds
    options.base_seeds = max(base_seeds if options.base_seeds is None else options.base_seeds, options.seeds)
    options.steps = options.steps or (LONG if options.group == "long" else REFERENCE.steps)
    if min(options.ranks, options.layers, options.seeds, options.batch) < 1:
        parser.error("--ranks, --layers, --seeds and --batch must be at least 1")
    if options.steps < LAST:
        parser.error(f"--steps must be at least {LAST}, over which the last loss is a mean, got {options.steps}")
    if options.hidden % 64:
        parser.error(f"--hidden must be a multiple of 64 (one attention head has 64), got {options.hidden}")
    if options.vocabulary < 257:
        parser.error(f"--vocabulary must be at least 257 (every byte and the end of a text), got {options.vocabulary}")
    if not 0 < options.learning_rate < math.inf:
        parser.error(f"--learning-rate must be above 0, got {options.learning_rate}")
    return options


def report(training: Training, runs: Sequence[Run], data: Mapping[str, Any]) -> dict[str, Any]:
    """The whole result. data: what ``data_of`` says."""
    seeds = {name: sum(run.precision == name for run in runs) for name in PRECISIONS}
    first = statistics.fmean(run.validation[0][1] for run in runs if run.precision == BASE)
    return {
        "benchmark": "convergence",
        "machine": machine(),
        "training": asdict(training) | {"work": asdict(training.work) | {"parameters": training.work.parameters()}},
        "seeds": {name: count for name, count in seeds.items() if count},
        "data": {**data, "first_loss": first},
        **summarise(runs),
    }


def write(result: Mapping[str, Any], training: Training) -> str:
    """Keep the result, and draw that of ``DRAWN``, if it is whole and of the reference setting."""
    settings = {name: replace(REFERENCE, steps=LONG) if name == "long" else REFERENCE for name in GROUPS}
    names = [
        name
        for name, (many, base) in SEEDS.items()
        if training == settings[name] and result["seeds"] == dict.fromkeys(GROUPS[name], many) | {BASE: base}
    ]
    if not names:
        return "not written: results are kept for the reference setting, all precisions and the default seeds only"
    (name,) = names
    path = write_result(RESULTS_OF[name], result)
    if name != DRAWN:
        return f"written to {os.path.relpath(path)}"
    draw(result, path.with_suffix(".svg"))
    return f"written to {os.path.relpath(path)} and {path.with_suffix('.svg').name}"


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdicts: a benchmark reports, a test decides."""
    options = parse(argv)
    if options.draw:
        path = result_path("convergence", {"machine": machine()})
        if not path.exists():
            raise SystemExit(f"{os.path.relpath(path)} is not there: run python -m benchmarks.convergence first")
        draw(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".svg"))
        print(f"drawn: {os.path.relpath(path.with_suffix('.svg'))}")
        return 0
    work = Setting(options.ranks, options.layers, options.hidden, options.vocabulary, options.batch, options.sequence)
    training = Training(work, options.steps, options.learning_rate, options.stage)
    blocks = read_blocks(work.vocabulary, work.sequence)
    runs = run_ranks(training, jobs_of(options.precisions, options.seeds, options.base_seeds), blocks)
    data = {
        "training_tokens": blocks.training.tokens,
        "validation_tokens": blocks.validation.tokens,
        "unigram_loss": unigram_loss(blocks, work.vocabulary),
    }
    result = report(training, runs, data)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print_report(result)
    print("not written, as asked" if options.no_write else write(result, training), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
