"""A training step on one GPU: every stage beside the plain torch loop, DDP, FSDP2 and DeepSpeed, all in bf16.

``python -m benchmarks.gpu_step`` trains GPT-2 with 124M and with 1.5B parameters on random tokens, each competitor with
bf16 weights, fp32 masters and AdamW, world size 1, and asks what the machinery costs where nothing can be gained by it.
A round is some steps of each competitor between two synchronisations, in an order that rotates; ``overhead`` is the
median over paired rounds of its time over the plain loop's, less 1, with the 95% bootstrap interval. Competitors run in
groups of one library, as many as fit into memory, each group a fresh process with its own plain loop. Where nobody fits
beside it, the plain loop has a process of its own, and ratios are of medians at two times, without an interval and a
verdict; ``--batch`` makes steps smaller that would not fit. Before, each is trained alone for its peak memory and for
the calls after which the host waits (``device.py``, [Note: Counting CUDA calls]); of these, those beyond the plain
loop's own count, as the others belong to the model. Whoever ends more than 2% from the plain loop's loss is marked.

MFU = F / (t · P), with t the median time of a step, P the FLOP/s of a large bf16 matrix product measured in the same
process, and F = T · (6·N + 12·L·h·s): T tokens per step, N parameters (the tied embedding once: it is the head), L
layers, h hidden size, s tokens of a sequence; forward and backward, attention counted whole although it is causal, and
nothing for what is recomputed (Chowdhery et al., 2022, appendix B).

Owns: the command line, the ratios and the report. ``gpu_ranks.py`` measures, ``gpu_variants.py`` knows the competitors.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException

from benchmarks.gpu_ranks import GpuPlan, run_group
from benchmarks.gpu_variants import COMPETITORS, USUAL, installed
from benchmarks.ranks import available_bytes, groups_of
from benchmarks.reporting import MIN_ROUNDS, Verdict, machine, paired_ratio, result_path, table, verdict, write_result
from benchmarks.variants import LIMIT
from benchmarks.workload import Setting

TARGET = 1.01
"""× the plain loop at most, for every stage of ours."""
LOSS_TOLERANCE = 0.02
"""bf16 runs that add in another order drift apart by some of this; a wrong program by more."""
BUDGET_S = 450.0
ACTIVATION_BYTES, LOGIT_BYTES = 64, 16
"""An estimate for the grouping: per token, layer and hidden unit; per token and word of the vocabulary."""
MEMORY_SHARE = 0.93
FLOPS_SIZE = {"cuda": 8192, "cpu": 64}


@dataclass(frozen=True)
class Model:
    """One model of the benchmark. steps: in a round, so that a round is long beside a synchronisation."""

    setting: Setting
    steps: int


MODELS = {"124M": Model(Setting(1, 12, 768, 50257, 8, 1024), 6), "1.5B": Model(Setting(1, 48, 1600, 50257, 8, 1024), 2)}
TINY = {"tiny": Model(Setting(1, 2, 64, 96, 2, 16), 2)}


def flops_per_step(setting: Setting) -> float:
    """F of the module's docstring."""
    tokens = setting.ranks * setting.batch * setting.sequence
    attention = 12 * setting.layers * setting.hidden * setting.sequence
    return float(tokens * (6 * setting.parameters() + attention))


def room_bytes(setting: Setting) -> float:
    """An estimate of what a process takes beside model state: activations, logits, libraries."""
    tokens = setting.batch * setting.sequence
    hidden = setting.layers * setting.hidden * ACTIVATION_BYTES
    return float(2**30 + tokens * (hidden + setting.vocabulary * LOGIT_BYTES))


def waits_verdict(waits: Mapping[str, int] | None, plain: Mapping[str, int] | None) -> Verdict:
    """No wait beyond the plain loop's is the target; a count has no interval."""
    if waits is None or plain is None:
        return "not decided"
    return "reached" if sum(waits.values()) <= sum(plain.values()) else "missed"


def summarise(found: Mapping[str, Any], setting: Setting, *, targets: bool) -> dict[str, Any]:
    """A row for each competitor of a group that ran. found: of ``gpu_ranks.measure``; targets: for ours, on a GPU."""
    tokens = setting.ranks * setting.batch * setting.sequence
    plain = found["seconds"].get(LIMIT)
    rows: dict[str, Any] = {}
    for name, seconds in found["seconds"].items():
        median = statistics.median(seconds)
        row: dict[str, Any] = {
            "median_ms": median * 1e3,
            "tokens_per_s": tokens / median,
            "mfu": flops_per_step(setting) / (median * found["peak_flops"]),
            "state_formula_bytes": COMPETITORS[name].state_bytes(setting),
            **found["alone"][name],
            "loss": found["losses"][name][-1],
        }
        judged = targets and name.startswith("ours-")
        if plain is not None:
            ratio = paired_ratio(seconds, plain)
            row["ratio"] = asdict(ratio)
            base = found["losses"][LIMIT][-1]
            row["loss_differs"] = differs(row["loss"], base)
            if judged:
                row |= {"target": TARGET, "verdict": verdict(ratio, TARGET)}
                row["waits_verdict"] = waits_verdict(row["waits"], found["alone"][LIMIT]["waits"])
        rows[name] = row | {"seconds": list(seconds), "losses": found["losses"][name]}
    return rows


def compare_apart(rows: Mapping[str, dict[str, Any]]) -> None:
    """Into rows of groups without the plain loop: × its median of another time, and whether the losses agree."""
    plain = rows.get(LIMIT)
    for name, row in rows.items():
        if plain is not None and name != LIMIT and "ratio" not in row:
            row["ratio_apart"] = row["median_ms"] / plain["median_ms"]
            row["loss_differs"] = differs(row["loss"], plain["loss"])


def differs(loss: float, base: float) -> bool:
    """Whether two runs of one training ended too far apart; NaN differs."""
    return not abs(loss - base) <= LOSS_TOLERANCE * abs(base)


def plan_groups(setting: Setting, names: Sequence[str], free: int) -> list[list[str]]:
    """Groups that fit into ``free`` bytes: with the plain loop in each or, where two do not fit, in one of its own.

    Raises SystemExit where one alone does not fit.
    """
    for references in ((LIMIT,), ()):
        try:
            return groups_of(
                setting, names, int(free * MEMORY_SHARE),
                entries=COMPETITORS, references=references, rank_bytes=room_bytes(setting),
            )  # fmt: skip
        except SystemExit:
            if not references:
                raise
    return []


def run_or_fail(plan: GpuPlan) -> dict[str, Any]:
    """What the group's process found; only "failed", with the reason for all of them, where the process died."""
    try:
        return run_group(plan)
    except ProcessException as error:
        reason = str(error).strip().splitlines()[-1][:300]
        print(f"the group failed: {reason}", file=sys.stderr)
        return {"failed": dict.fromkeys(plan.variants, reason)}


def again(group: Sequence[str], failed: Mapping[str, str]) -> list[list[str]]:
    """Groups for those that did not fit beside the others: each with the plain loop alone."""
    if len(group) <= 2:
        return []
    return [[LIMIT, name] for name in group if name != LIMIT and "OutOfMemory" in failed.get(name, "")]


def measure_model(
    model: Model, groups: Sequence[Sequence[str]], options: argparse.Namespace, end: float
) -> dict[str, Any]:
    """Run the groups one after the other; each may take its share of the time that is left until ``end``."""
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    references: list[dict[str, Any]] = []
    why_not_counted = None
    waiting, done = [list(group) for group in groups], []
    while waiting:
        group = waiting.pop(0)
        done.append(group)
        now = time.monotonic()
        until = now + max(0.0, end - now) / (1 + len(waiting))
        print(f"group {len(done)} of {len(done) + len(waiting)}: {', '.join(group)}", file=sys.stderr)
        plan = GpuPlan(
            model.setting, tuple(group), options.device, options.own_model, options.rounds, model.steps,
            FLOPS_SIZE[options.device], until, "",
        )  # fmt: skip
        found = run_or_fail(plan)
        failed |= found["failed"]
        waiting += again(group, found["failed"])
        if "seconds" not in found:
            continue
        why_not_counted = found["why_not_counted"]
        summary = summarise(found, model.setting, targets=options.device == "cuda")
        references.append({"peak_flops": found["peak_flops"], LIMIT: summary.get(LIMIT)})
        for name, row in summary.items():
            rows.setdefault(name, row | {"group": len(done) - 1})
    compare_apart(rows)
    return {
        "setting": asdict(model.setting) | {"parameters": model.setting.parameters(), "steps_per_round": model.steps},
        "flops_per_step": flops_per_step(model.setting),
        "groups": done,
        "variants": {name: rows[name] for name in COMPETITORS if name in rows},
        "references": references,
        "failed": {name: reason for name, reason in failed.items() if name not in rows},
        "why_not_counted": why_not_counted,
    }


def print_report(result: Mapping[str, Any]) -> None:
    """A table for each model."""
    header = (
        "variant|overhead % [95%]|target|ms|tokens/s|MFU %|GiB allocated|reserved|state (formula)|waits|target 0 more|"
        "kernels|loss|rounds"
    ).split("|")
    for name, found in result["models"].items():
        print(f"\n{name}: {found['left_out']}" if "left_out" in found else f"\n{name}")
        rows = [[variant, *_cells(row)] for variant, row in found.get("variants", {}).items()]
        if rows:
            peaks = ", ".join(f"{group['peak_flops'] / 1e12:.1f}" for group in found["references"])
            print(table(header, rows))
            print(f"bf16 product, TFLOP/s by group: {peaks}")
        for variant, reason in found.get("failed", {}).items():
            print(f"{variant} failed: {reason}")
        if found.get("why_not_counted"):
            print(f"waits, kernels and bytes were not counted: {found['why_not_counted']}")


def _cells(row: Mapping[str, Any]) -> list[str]:
    ratio, waits = row.get("ratio"), row["waits"]
    over = [f"{(ratio[key] - 1) * 100:.1f}" for key in ("median", "low", "high")] if ratio else []
    apart = f"{(row['ratio_apart'] - 1) * 100:.1f} apart" if "ratio_apart" in row else "-"
    return [
        f"{over[0]} [{over[1]}, {over[2]}]" if over else apart,
        f"{(row['target'] - 1) * 100:.0f}: {row['verdict']}" if "target" in row else "-",
        f"{row['median_ms']:.1f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['mfu'] * 100:.1f}",
        _gib(row["peak_allocated_bytes"]),
        _gib(row["peak_reserved_bytes"]),
        _gib(row["state_formula_bytes"]),
        "-" if waits is None else str(sum(waits.values())),
        row.get("waits_verdict", "-"),
        "-" if row["kernels"] is None else str(row["kernels"]),
        f"{row['loss']:.4f}" + (" differs" if row.get("loss_differs") else ""),
        str(len(row["seconds"])),
    ]


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_step", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: with --tiny, to try the program"
    )
    parser.add_argument("--tiny", action="store_true", help="a model of some thousand parameters instead")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), metavar="NAME", help=" or ".join(MODELS))
    parser.add_argument("--batch", type=int, metavar="SEQUENCES", help="instead of a model's own, for less memory")
    parser.add_argument(
        "--variants", nargs="+", choices=list(COMPETITORS), metavar="NAME",
        help="any of: " + ", ".join(COMPETITORS) + f" (default: all that are installed); {LIMIT} always runs",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=MIN_ROUNDS + 4, help="paired rounds (fewer than 20 decide nothing)"
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="rounds are cut to stay about within it"
    )
    parser.add_argument("--own-model", action="store_true", help="the model of benchmarks/gpt2.py, not transformers'")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu --tiny tries the program on a CPU")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.batch is not None and options.batch < 1:
        parser.error(f"--batch must be at least 1, got {options.batch}")
    if options.tiny and options.models:
        parser.error("--models and --tiny: choose one of them")
    options.own_model = options.own_model or importlib.util.find_spec("transformers") is None
    return options


def chosen(named: Sequence[str] | None) -> list[str]:
    """The competitors to run, the plain loop among them. What is not installed is left out, or refused by name."""
    for name in named or USUAL:
        if not installed(name):
            if named:
                raise SystemExit(f"{name} needs {COMPETITORS[name].package}, which is not installed")
            print(f"left out: {name} ({COMPETITORS[name].package} is not installed)", file=sys.stderr)
    return [name for name in COMPETITORS if installed(name) and (name == LIMIT or name in (named or USUAL))]


def write(result: dict[str, Any], options: argparse.Namespace) -> str:
    """Keep a GPU's result if that loses nothing: one with fewer models or competitors does not replace another."""
    if options.tiny or options.device != "cuda":
        return "not written: results are kept for the models on a GPU only"
    if options.batch:
        return "not written: results are kept for the models' own batch only"
    path = result_path("gpu_step", result)
    held = json.loads(path.read_text(encoding="utf-8"))["models"] if path.exists() else {}
    lost = [
        f"{model} {name}"
        for model, found in held.items()
        for name in found.get("variants", {})
        if name not in result["models"].get(model, {}).get("variants", {})
    ]
    if lost:
        return f"not written: {os.path.relpath(path)} also holds {', '.join(lost)}; run these too, or delete the file"
    return f"written to {os.path.relpath(write_result('gpu_step', result))}"


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdicts: a benchmark reports, a test decides."""
    options = parse(argv)
    end = time.monotonic() + options.budget
    models = TINY if options.tiny else {name: MODELS[name] for name in options.models or MODELS}
    if options.batch:
        models = {name: replace(m, setting=replace(m.setting, batch=options.batch)) for name, m in models.items()}
    names = chosen(options.variants)
    free = torch.cuda.mem_get_info()[0] if options.device == "cuda" else available_bytes()
    packages = {"deepspeed" for name in names if COMPETITORS[name].package}
    packages |= set() if options.own_model else {"transformers"}
    result: dict[str, Any] = {
        "benchmark": "gpu_step",
        "machine": machine(options.device),
        "device": options.device,
        "packages": {package: metadata.version(package) for package in sorted(packages)},
        "model_of": "benchmarks/gpt2.py" if options.own_model else "transformers",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "models": {},
    }
    planned: dict[str, list[list[str]]] = {}
    for name, model in models.items():
        try:
            planned[name] = plan_groups(model.setting, names, free)
        except SystemExit as error:  # this model needs more memory than is free
            result["models"][name] = {"left_out": str(error)}
    left = sum(len(groups) for groups in planned.values())
    for name, groups in planned.items():
        now = time.monotonic()
        until = now + max(0.0, end - now) * len(groups) / left
        left -= len(groups)
        result["models"][name] = measure_model(models[name], groups, options, until)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print_report(result)
    print("not written, as asked" if options.no_write else write(result, options), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
