"""The numbers that pages quote in sentences and small tables are those of benchmarks/results, rounded as written there.

The large tables are compared whole where their benchmarks are tested (`charts`). An interval that neither they nor this
file make from results fails the last test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.charts import TABLES, label
from benchmarks.variants import BASE, VARIANTS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@cache
def result(name: str) -> Any:
    """One file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@cache
def page(name: str) -> str:
    """A page in one line."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def interval(ratio: Any, digits: int) -> str:
    """As pages write it."""
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def step_of(name: str) -> Any:
    """A row of the fp32 step with 2 threads, on a machine with AVX2."""
    rows = result("adam-epyc-2core")["threads"]["2"]
    return next(row for row in rows if (row["part"], row["name"]) == ("step", name))


def adam(part: str, name: str) -> Any:
    """A row of one thread."""
    rows = result("adam-xeon-2core")["threads"]["1"]
    return next(row for row in rows if (row["part"], row["name"]) == (part, name))


def other_runs() -> str:
    """The table of one rank, and of a second machine."""
    lines = []
    one, two = result("step-n1-epyc-2core")["variants"], result("step-xeon-2core")["variants"]
    for name in two:
        if name == BASE:
            continue
        cells = [f"**{label(name)}**" if VARIANTS[name].family == "shardengine" else label(name)]
        for row in (one.get(name) if name != "compute" else None, two[name]):
            cells.append(interval(row["ratio"], 3) if row else "")
            cells.append(f"{row['target']:.2f}: {row['verdict']}" if row and "target" in row else "")
        lines.append(f"| {' | '.join(cells)} |")
    return " ".join(" ".join(lines).split())


def versions(variant: str) -> str:
    """The ratio of two versions."""
    return interval(result("versions-epyc-2core")["variants"][variant]["ratio"], 3)


def buckets() -> str:
    """The table of "auto" beside the best sizes of buckets."""
    lines = []
    for run in result("ddp-xeon-2core")["runs"]:
        for whose, of in run.get("targets", {}).items():
            lines.append(
                f"| {run['ranks']} | {whose}, {of['point']} | {interval(of['ratio'], 3)} | {of['target']:.2f}: "
                f"{of['verdict']} |"
            )
    return " ".join(lines)


def parts() -> str:
    """The table of a short step's phases."""
    (run,) = [run for run in result("ddp_parts-xeon-2core")["runs"] if run["ranks"] == 2]
    return " ".join(
        f"| {name} | {' | '.join(f'{row[phase]:.1f}' for phase in ('forward', 'backward', 'update'))} | "
        f"{interval(row['of_base'], 3)} |"
        for name, row in run["steps"].items()
        if name in ("no communication", "torch 25 MB", "ours auto", "ours noop")
    )


def parts_alone() -> str:
    """What operations take alone."""
    (run,) = [run for run in result("ddp_parts-xeon-2core")["runs"] if run["ranks"] == 2]
    return "Alone, on as many elements: " + ", ".join(f"{name} {ms:.1f}" for name, ms in run["alone"].items())


CODED = {
    "ours auto": "no hook",
    "ours fp16": "fp16",
    "ours int8": "int8",
    "ours int4": "int4",
    "ours power_sgd": "power_sgd, rank 4",
    "ours noop": "noop",
    "torch fp16": "torch DDP, fp16",
    "torch power_sgd": "torch DDP, PowerSGD of rank 4",
}


def coded() -> str:
    """The table of steps with hooks."""
    runs = [run["rows"] for run in result("ddp-xeon-2core")["runs"] if run["sweep"] == "hooks"]
    return " ".join(
        f"| {label} | {' | '.join(interval(rows[name]['of_base'], 2) for rows in runs)} |"
        for name, label in CODED.items()
    )


HOOKS = {
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "int8-alone": "int8 without error feedback",
    "int4": "int4",
    "power_sgd-16": "power_sgd, rank 16, from step 20 on",
    "power_sgd": "power_sgd, rank 4, from step 20 on",
    "power_sgd-torch": "torch's PowerSGD, rank 4, from step 20 on",
    "noop": "noop (each slice is stepped with one rank's gradient)",
}


def hooks() -> str:
    """The table of communication hooks."""
    of = "convergence_hooks-xeon-2core"
    return " ".join(convergence(f"hook-{name}", label, of) + " |" * (name != "noop") for name, label in HOOKS.items())


def convergence(precision: str, label: str, name: str = "convergence-epyc-2core") -> str:
    """A row of the table of losses."""
    row = result(name)["precisions"][precision]
    difference = f"{row['difference']['validation']:+.3f}".replace("-", "−")
    return f"| {label} | {difference} | {row['bound']:.2f}: {row['verdict']}"


def loading() -> str:
    """The table of loading."""
    lines = []
    found = result("load-xeon-2core")
    names = {found["disk"]: "*the disk*", "shardengine": "**shardengine**"}
    for name, row in found["rows"].items():
        if name.startswith("plainly") and name != found["disk"]:
            continue
        ratio = "1" if name == found["disk"] else interval(row["ratio"], 2)
        target = f"{row['target']:.2f}: {row['verdict']}" if "target" in row else ""
        peak = f"{row['peak_bytes'] / 2**20:.0f}"
        lines.append(f"| {names.get(name, name)} | {row['median_s']:.2f} | {ratio} | {target} | {peak} |")
    return " ".join(" ".join(lines).split())


def optimizers() -> str:
    """The table of classes of optimizers."""
    lines = []
    for name, row in result("optimizers-xeon-2core")["rows"].items():
        by = "the kernels" if row["by"] == "kernels" else row["by"]
        trial = f"{row['trial_s'] * 1e3:.0f}" if row["trial_s"] else ""
        other = interval(row["of_deepspeed"], 3) if "of_deepspeed" in row else ""
        lines.append(f"| {name} | {by} | {interval(row['of_plain'], 3)} | {other} | {trial} |")
    return " ".join(" ".join(lines).split())


def states(part: str, name: str) -> Any:
    """A row of one thread."""
    rows = result("states-xeon-2core")["threads"]["1"]
    return next((row for row in rows if (row["part"], row["name"]) == (part, name)), None)


def states_table() -> str:
    """The table of a step with states in fewer bytes."""
    peers = {f"8 bits, {name} {version}": name for name, version in result("states-xeon-2core")["peers"].items()}
    lines = []
    for shown, name in ({"fp32": "fp32", "bf16": "bf16", "8 bits": "8bit"} | peers).items():
        cells = [shown]
        for row in (states(part, name) for part in ("fp32 weights", "bf16 weights")):
            base = name == "fp32"
            speed = "" if row is None else "1" if base else interval(row["speed"], 3)
            cells += ["" if row is None else f"{row['bytes']:.4g}", speed]
            cells += ["" if row is None or base else f"{row['at_most']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return " ".join(" ".join(lines).split())


def states_limit() -> str:
    """What computing takes, in the cache."""
    ns = {name: states("in the cache", name)["ns"] for name in ("fp32", "bf16", "8bit", "8bit, to nearest")}
    return (
        f"takes {ns['fp32']:.1f} ns with fp32 states, {ns['bf16']:.1f} with bf16, {ns['8bit, to nearest']:.1f} with "
        f"codes that are rounded to nearest and {ns['8bit']:.1f} with random bits as well; all of an fp32 step, memory "
        f"included, takes {states('fp32 weights', 'fp32')['ns']:.1f}"
    )


def long_runs() -> str:
    """What 1,000 steps make of 8 bits."""
    rows = result("convergence_long-epyc-2core")["precisions"]
    own, slow = (
        f"{rows[name]['difference']['validation']:+.3f}".replace("-", "−")
        for name in ("states-8bit", "slow-states-8bit")
    )
    return f"states of 8 bits make a difference of {own}, with betas 0.9 and 0.999 of {slow}"


def kept_on_disk() -> str:
    """The table of states in fewer bytes on a disk."""
    lines = []
    for name, row in result("nvme-xeon-2core")["kept"].items():
        if row.get("base"):
            numbers = [f"{row['bytes']:.2f}", f"{row['states_fewer']:.2f}", interval(row["speed"], 2)]
            lines.append(f"| {' | '.join([name, *numbers])} | {row['at_most']:.2f} |")
    return " ".join(" ".join(lines).split())


def signed(value: float) -> str:
    """To two places, with a minus."""
    return f"{0.0 if abs(value) < 5e-3 else value:.2f}".replace("-", "−")


def thin(variant: str, layers: int, phase: str) -> float:
    """Milliseconds per block of a thin model."""
    rows = result("host_time-epyc-2core")["thin"]
    row = next(row for row in rows if (row["variant"], row["layers"]) == (variant, layers))
    return float(row["ms_per_block"][phase]["median"])


def host_per_block() -> str:
    """The table of the host's time per block."""
    phases = ("forward", "backward", "step")
    several = [[thin(f"stage {stage}", 32, phase) for stage in "012"] for phase in phases]
    cells = [f"{signed(min(values))} to {signed(max(values))}" for values in several]
    lines = [f"| stages 0, 1, 2 (32 layers) | {' | '.join(cells)} |"]
    for shown, name in (("stage 3", "stage 3"), ("torch FSDP2", "FSDP2")):
        cells = [f"{signed(thin(name, 32, phase))} ({signed(thin(name, 80, phase))})" for phase in phases]
        lines.append(f"| {shown} (80 layers) | {' | '.join(cells)} |")
    return " ".join(lines)


def layout(name: str, elements: float, stage: str) -> Any:
    """A row of the host's time of a large model."""
    rows = result("host_time-epyc-2core")["layouts"]
    return next(r for r in rows if (r["layout"], r["bucket_elements"], r["stage"]) == (name, elements, stage))


def host_per_step() -> str:
    """The table of the host's time per step."""
    lines = []
    for name in ("GPT-2 1.5B", "Llama 8B", "Llama 70B"):
        for elements, size in ((12.5e6, "12.5e6"), (1e8, "100e6")):
            first = (name, elements) == ("GPT-2 1.5B", 12.5e6)
            shown = f"{name}, {'`reduce_bucket_size` ' if first else ''}{size}" if elements < 1e8 else f"…, {size}"
            rows = [layout(name, elements, stage) for stage in "0123"]
            buckets = f"{rows[0]['buckets']} ({'stage 3: ' if first else ''}{rows[3]['buckets']})"
            cells = [shown, buckets, *(f"{row['ms_per_step']['sum']['median']:.0f}" for row in rows)]
            lines.append(f"| {' | '.join(cells)} |")
    return " ".join(lines)


def host_per_bucket() -> str:
    """What a bucket of Llama 8B costs."""
    costs = []
    for stage in "0123":
        few, many = layout("Llama 8B", 1e8, stage), layout("Llama 8B", 12.5e6, stage)
        more = [row["ms_per_step"]["sum"]["median"] for row in (many, few)]
        costs.append((more[0] - more[1]) / (many["buckets"] - few["buckets"]) * 1e3)
    return f"a bucket costs {min(costs):.0f} to {max(costs):.0f} µs per step"


def registers() -> str:
    """Of which GPUs' kernels none spills."""
    kernels = result("registers")["kernels"]
    assert not [row for row in kernels if row["spills"]]
    amd, *nvidia = sorted({row["target"] for row in kernels})
    return f"compiled for {', '.join(nvidia)} and {amd} without register spills"


def size(name: str, key: str = "parameters") -> float:
    """Millions of a benchmark's setting."""
    return float(result(name)["setting"][key]) / 1e6


BENCHMARKS, PRECISION, OFFLOAD = "docs/benchmarks.md", "docs/precision.md", "docs/offload.md"
README, LIMITS = "README.md", "docs/limits.md"
QUOTES: list[tuple[str, Callable[[], str]]] = [
    (BENCHMARKS, other_runs),
    (BENCHMARKS, loading),
    (BENCHMARKS, lambda: f"A Llama of {result('load-xeon-2core')['file_bytes'] / 1e9:.2f} GB"),
    (BENCHMARKS, lambda: f"{size('step-epyc-2core'):.0f}M parameters, fp32, AdamW, clip 1.0, 4 × 128 tokens"),
    (BENCHMARKS, lambda: f"In each of {result('step-epyc-2core')['rounds']} rounds the variants of one library"),
    (BENCHMARKS, lambda: f"class in plain torch, {size('optimizers-xeon-2core'):.0f}M parameters"),
    (BENCHMARKS, lambda: f"2 cores, {size('nvme-xeon-2core'):.0f}M parameters)"),
    (BENCHMARKS, lambda: f"{result('states-xeon-2core')['parameters'] / 1e6:.1f}M parameters, 1 thread with"),
    (BENCHMARKS, lambda: f"{result('adam-xeon-2core')['parameters'] / 1e6:.0f}M parameters, 1 thread with AVX-512"),
    (README, lambda: f"GPT-2 with {size('step-epyc-2core'):.0f}M parameters, fp32, AdamW, 2 ranks with 1 CPU thread"),
    (README, lambda: f"DeepSpeed {result('step-epyc-2core')['packages']['deepspeed']}; medians"),
    (README, registers),
    (LIMITS, host_per_block),
    (LIMITS, host_per_step),
    (LIMITS, host_per_bucket),
    (BENCHMARKS, optimizers),
    (BENCHMARKS, states_table),
    (BENCHMARKS, states_limit),
    (BENCHMARKS, kept_on_disk),
    (BENCHMARKS, lambda: f"takes {versions('ours-3')} of the earlier one's time at stage 3"),
    (
        BENCHMARKS,
        lambda: f"{versions('ours-2')} ({result('versions-epyc-2core')['variants']['ours-2']['verdict']}) at stage 2",
    ),
    (BENCHMARKS, lambda: f"AVX2 takes {interval(as_ratio(step_of('CPUAdam')), 3)} of torch's fused step"),
    (BENCHMARKS, lambda: f"| **shardengine** | {interval(as_ratio(adam('step', 'shardengine')), 3)} |"),
    (BENCHMARKS, lambda: f"| DeepSpeedCPUAdam | {interval(as_ratio(adam('step', 'DeepSpeedCPUAdam')), 3)} |"),
    (BENCHMARKS, lambda: f"| torch.optim.Adam | {interval(as_ratio(adam('step', 'torch.optim.Adam')), 3)} |"),
    (
        BENCHMARKS,
        lambda: (
            f"takes torch {adam('update', 'torch')['ratio']:.2f} and DeepSpeedCPUAdam "
            f"{adam('update', 'DeepSpeedCPUAdam')['ratio']:.2f} times as long"
        ),
    ),
    (BENCHMARKS, lambda: f"in {first_use('shardengine'):.1f} s (DeepSpeed's: {first_use('DeepSpeedCPUAdam'):.0f} s)"),
    (
        BENCHMARKS,
        lambda: f"runs at {interval(result('nvme-xeon-2core')['rows']['pipeline']['of']['raw both, 8 × 4 MiB'], 2)} of",
    ),
    (BENCHMARKS, lambda: f"takes {import_time()}"),
    (BENCHMARKS, lambda: f"{result('checkpoint-epyc-2core')['state_bytes'] / 1e6:.0f} MB of weights"),
    (OFFLOAD, lambda: f"× {interval(result('in_backward-xeon-2core')['rows']['beside']['of_after'], 2)} of the time"),
    (PRECISION, lambda: convergence("bf16", "bf16 with master weights")),
    (PRECISION, lambda: convergence("bf16-autocast", "autocast to bf16")),
    (PRECISION, lambda: convergence("fp16", fp16_label())),
    (PRECISION, lambda: convergence("bf16-pure-stochastic", "bf16 without master weights, stochastic rounding")),
    (PRECISION, lambda: convergence("bf16-pure", "bf16 without master weights, rounded to nearest")),
    (PRECISION, hooks),
    (BENCHMARKS, buckets),
    (BENCHMARKS, parts),
    (BENCHMARKS, parts_alone),
    (BENCHMARKS, coded),
    (PRECISION, lambda: convergence("states-bf16", "bf16", "convergence_states-epyc-2core")),
    (PRECISION, lambda: convergence("states-8bit", "8 bits", "convergence_states-epyc-2core")),
    (
        PRECISION,
        lambda: convergence("slow-states-8bit", "8 bits, betas 0.9 and 0.999", "convergence_states-epyc-2core"),
    ),
    (
        PRECISION,
        lambda: convergence(
            "slow-states-8bit-nearest",
            "8 bits, betas 0.9 and 0.999, rounded to nearest",
            "convergence_states-epyc-2core",
        ),
    ),
    (
        PRECISION,
        lambda: convergence(
            "states-8bit-zero", "8 bits, small second moments become zero", "convergence_states-epyc-2core"
        ),
    ),
    (
        PRECISION,
        lambda: convergence(
            "bf16-states-bf16", "bf16, beside bf16 weights and masters", "convergence_states_bf16-epyc-2core"
        ),
    ),
    (
        PRECISION,
        lambda: convergence(
            "bf16-states-8bit", "8 bits, beside bf16 weights and masters", "convergence_states_bf16-epyc-2core"
        ),
    ),
    (
        PRECISION,
        lambda: convergence(
            "bf16-split-states-8bit",
            "8 bits, beside bf16 weights and split masters",
            "convergence_states_bf16-epyc-2core",
        ),
    ),
    (PRECISION, long_runs),
    (
        PRECISION,
        lambda: (
            "Another seed of fp32 makes a difference of "
            f"{result('convergence-epyc-2core')['spread']['between_two']:.2f}."
        ),
    ),
    ("docs/planning.md", lambda: planned_times()),
]


def planned_times() -> str:
    """Of steps on real ranks, and how well plans order them."""
    found = result("plan_time-xeon-2core")["summary"]
    errors, ranked = found["errors"], found["ranked"]["all"]
    stages = ", ".join(f"{100 * errors[f'stage {stage}']['median']:.1f}%" for stage in range(4))
    return (
        f"the median error is {stages} at stages 0 to 3, the largest {100 * errors['all']['largest']:.1f}%, and "
        f"{100 * ranked['right']:.1f}% of {ranked['pairs']} pairs that differ by over 5% are in the right order"
    )


def as_ratio(row: Any) -> dict[str, float]:
    """Of a row of ``adam.py``."""
    return {"median": row["ratio"], "low": row["low"], "high": row["high"]}


def first_use(name: str) -> float:
    """Seconds that a library takes to be built."""
    return float(result("adam-xeon-2core")["first_use_seconds"][name]["built"])


def fp16_label() -> str:
    """With the steps that were left out."""
    skipped = result("convergence-epyc-2core")["precisions"]["fp16"]["skipped_steps"]
    return f"fp16 ({min(skipped)} to {max(skipped)} steps skipped by the dynamic scale)"


def import_time() -> str:
    """Beside torch's, with its verdict."""
    found = result("import_time-epyc-2core")
    over = found["over_torch_ms"]
    return (
        f"{over['median']:.0f} ms [{over['low']:.0f}, {over['high']:.0f}] on top of `import torch` "
        f"(target {found['target_ms']:.0f}: {found['verdict']};"
    )


@pytest.mark.parametrize("index", range(len(QUOTES)))
def test_what_is_quoted_is_what_was_measured(index: int) -> None:
    where, text = QUOTES[index]
    assert text() in page(where)


PAGES = [README, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", PAGES)
def test_no_interval_is_quoted_that_no_result_has(name: str) -> None:
    """An interval that no test above, and no table of ``charts``, makes from results."""
    known = " ".join([*(text() for _, text in QUOTES), *(make(RESULTS, "epyc-2core") for make in TABLES)])
    found = re.findall(r"\d+(?:\.\d+)?(?: ms)? \[\d+(?:\.\d+)?, \d+(?:\.\d+)?\]", page(name))
    assert not [interval for interval in found if interval not in known]
    assert found or name not in (README, BENCHMARKS, OFFLOAD)


def test_memory_of_stages_is_what_the_formulas_say() -> None:
    """README's table, of 8 billion parameters on 4 ranks, beside the formulas of docs/limits.md."""
    _, _, text = (ROOT / LIMITS).read_text(encoding="utf-8").partition("## Memory of model state per rank\n")
    rows = re.findall(r"^\| ([0-3]) \| ([^|]*Ψ[^|]*) \| ([^|]*Ψ[^|]*) \|$", text, re.MULTILINE)
    assert [stage for stage, *_ in rows] == list("0123")
    lines = [line for line in (ROOT / README).read_text(encoding="utf-8").splitlines() if " GB |" in line]
    for column, line in enumerate(lines, 1):
        shown = [int(number) for number in re.findall(r"(\d+) GB", line)]
        assert shown == [sum(_bytes(term) for term in row[column].split("+")) / 1e9 for row in rows]
    assert len(lines) == 2


def _bytes(term: str) -> float:
    """``12Ψ/N`` or ``4Ψ``."""
    found = re.fullmatch(r"(\d+)Ψ(/N)?", term.strip())
    assert found, term
    return int(found[1]) * 8e9 / (4 if found[2] else 1)
