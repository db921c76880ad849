"""Charts and tables of the results of ``step.py``, for docs/benchmarks.md and the README.

``python -m benchmarks.charts`` draws ``step-<machine>.json`` (and ``step_rss-<machine>.json``, if it is there) as
``step-<machine>.svg`` (time × DDP, peak memory) and ``parts-<machine>.svg`` (where the time of a step goes), beside
them. ``--ranks 4`` draws the run of four ranks. ``--markdown`` prints the tables instead, which hold nothing else (a
test compares): those of docs/benchmarks.md, of ``step.py`` and of ``checkpoint.py``, if that has run, and below them
the README's. Measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import DISK, HEADER, best_ways, cells
from benchmarks.phases import PARTS
from benchmarks.reporting import RESULTS, machine, result_path
from benchmarks.variants import BASE, VARIANTS
from benchmarks.workload import REFERENCE

LABELS = {
    "compute": "compute limit",
    "ddp": "torch DDP",
    "zero1-torch": "torch ZeRO-1",
    "fsdp2": "torch FSDP2",
    "ours-3k": "shardengine 3, kept",
}
COLORS = {"shardengine": "#1f6feb", "reference": "#57606a"}
PEER_COLOR = "#b6bec9"
PART_COLORS = ("#9ecae1", "#1f6feb", "#d1495b", "#f2b134")


def label(name: str) -> str:
    """How a variant is called in a chart."""
    return LABELS.get(name) or name.replace("ours-", "shardengine ").replace("deepspeed-", "DeepSpeed ")


def color(name: str) -> str:
    """Ours stands out, the references are dark, the peers light."""
    return COLORS.get(VARIANTS[name].family, PEER_COLOR)


def subtitle(result: Mapping[str, Any]) -> str:
    """The setting and the machine in one line."""
    setting = result["setting"]
    shared = f" on {setting['cores']} cores" if setting["ranks"] > setting["cores"] else ""
    return (
        f"GPT-2, {setting['parameters'] / 1e6:.0f}M parameters, fp32, {setting['ranks']} ranks × 1 thread{shared}, "
        f"{result['machine']['processor']}, torch {result['machine']['torch']}, {result['rounds']} rounds"
    )


def markdown(folder: Path, name: str) -> str:
    """The table of step times: on two and four ranks, waiting, bytes, peak memory; "" where nothing was measured."""

    def variants(kind: str) -> dict[str, Any]:
        path = folder / f"{kind}-{name}.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["variants"] if path.exists() else {}
        return found

    memory, four = variants("step_rss"), variants("step-n4")
    header = (
        "| | step time × DDP, 2 ranks | target | over the limit, ms | "
        "blocked in waits, ms | MB sent | peak MiB | 4 ranks |"
    )
    lines = [header, "|" + "---|" * 8]
    for variant, row in variants("step").items():
        ratio, sent = row["ratio"], row["sent_bytes_per_step"]
        exact = variant == BASE
        cells = [
            f"**{label(variant)}**" if VARIANTS[variant].family == "shardengine" else label(variant),
            "1" if exact else f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
            f"{row['target']:.2f}: {row['verdict']}" if "target" in row else "",
            f"{row['over_limit_ms']:.0f}",
            "" if VARIANTS[variant].waits_in_cpp else f"{row['parts_ms']['exposed communication']:.0f}",
            "" if sent is None else f"{sent / 1e6:.1f}",
            f"{memory[variant]['own_peak_bytes'] / 2**20:.0f}" if variant in memory else "",
            ("1" if exact else f"{four[variant]['ratio']['median']:.2f}") if variant in four else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


CHECKPOINT_LABELS = {
    "torch.save": "torch.save (DDP)",
    "dcp": "torch DCP (FSDP2)",
    "dcp async": "torch DCP async (FSDP2)",
    DISK: "*the disk*",
}


def checkpoint_markdown(folder: Path, name: str) -> str:
    """The table of ``checkpoint.py`` and what the disk is in it; "" where nothing was measured."""
    path = folder / f"checkpoint-{name}.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    for first, *rest in cells(result):
        called = CHECKPOINT_LABELS.get(first) or label(first)
        lines.append(f"| {' | '.join([f'**{called}**' if first.startswith('ours') else called, *rest])} |")
    return "\n".join([*lines, "", f"{best_ways(result)}."])


HEADLINE = ("ddp", "fsdp2", "deepspeed-2", "deepspeed-3", "ours-2", "ours-3")
HEADLINE_SAVERS = {"ddp": "torch.save", "fsdp2": "dcp"}


def headline(folder: Path, name: str) -> str:
    """The README's table: of a few variants the time, the peak memory and the speed of saving; "" without results."""
    files = {kind: folder / f"{kind}-{name}.json" for kind in ("step", "step_rss", "checkpoint")}
    if not all(path.exists() for path in files.values()):
        return ""
    results = {kind: json.loads(path.read_text(encoding="utf-8")) for kind, path in files.items()}
    saves = {saver: row for group in results["checkpoint"]["groups"] for saver, row in group["saves"].items()}
    lines = ["| | step time × DDP | peak MiB of a rank | checkpoint, × speed of the disk |", "|---|---|---|---|"]
    for variant in HEADLINE:
        ratio = results["step"]["variants"][variant]["ratio"]
        cells = [
            f"**{label(variant)}**" if VARIANTS[variant].family == "shardengine" else label(variant),
            "1" if variant == BASE else _with_interval(ratio, 3),
            f"{results['step_rss']['variants'][variant]['own_peak_bytes'] / 2**20:.0f}",
            _with_interval(saves[HEADLINE_SAVERS.get(variant, variant)]["ratio"], 2),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_interval(ratio: Mapping[str, float], digits: int) -> str:
    """The median with its 95% interval."""
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def draw(times: Mapping[str, Any], rss: Mapping[str, Any] | None, folder: Path) -> list[Path]:
    """Draw both charts into ``folder`` and return their paths. times, rss: results of ``step.py``."""
    suffix = f"-n{times['setting']['ranks']}" if times["setting"]["ranks"] != REFERENCE.ranks else ""
    paths = [folder / f"{name}{suffix}-{times['machine']['name']}.svg" for name in ("step", "parts")]
    draw_step(times, rss, paths[0])
    draw_parts(times, paths[1])
    return paths


def draw_step(times: Mapping[str, Any], rss: Mapping[str, Any] | None, path: Path) -> None:
    """Horizontal bars: the ratio with its interval, and beside it the peak memory of the steps."""
    import matplotlib.pyplot as plt

    rows = {name: row for name, row in times["variants"].items() if "ratio" in row}
    names = list(reversed(rows))
    count = 1 if rss is None else 2
    figure, grid = plt.subplots(
        1, count, figsize=(5.2 * count + 1.2, 0.34 * len(names) + 1.3), sharey=True, squeeze=False
    )
    axes = list(grid[0])
    ratios = [rows[name]["ratio"] for name in names]
    middle = [ratio["median"] for ratio in ratios]
    ends = [
        [ratio["median"] - ratio["low"] for ratio in ratios],
        [ratio["high"] - ratio["median"] for ratio in ratios],
    ]
    labels = [label(name) for name in names]
    axes[0].barh(labels, middle, xerr=ends, color=[color(name) for name in names], ecolor="#24292f", capsize=2)
    axes[0].axvline(1.0, color="#24292f", linewidth=0.8, linestyle="--")
    for place, ratio in enumerate(ratios):
        axes[0].text(ratio["high"] + 0.02, place, f"{ratio['median']:.2f}", va="center", fontsize=8)
    axes[0].set_xlim(0, max(ratio["high"] for ratio in ratios) * 1.12)
    axes[0].set_xlabel("step time × DDP (less is better)" if times["base"] == BASE else "step time × plain loop")
    if rss is not None:
        peaks = [rss["variants"].get(name, {}).get("own_peak_bytes", 0) / 2**20 for name in names]
        axes[1].barh(labels, peaks, color=[color(name) for name in names])
        for place, peak in enumerate(peaks):
            axes[1].text(peak, place, f" {peak:.0f}" if peak else " not measured", va="center", fontsize=8)
        axes[1].set_xlim(0, max(peaks) * 1.12)
        axes[1].set_xlabel("peak memory of a rank in training, MiB above the imports")
    finish(figure, axes, subtitle(times), path)


def draw_parts(times: Mapping[str, Any], path: Path) -> None:
    """Stacked horizontal bars: forward, backward, exposed communication, optimizer."""
    import matplotlib.pyplot as plt

    rows = {name: row for name, row in times["variants"].items() if "parts_ms" in row}
    names = list(reversed(rows))
    figure, axes = plt.subplots(figsize=(8.4, 0.34 * len(names) + 1.6))
    left = [0.0] * len(names)
    for part, shade in zip(PARTS, PART_COLORS, strict=True):
        widths = [rows[name]["parts_ms"][part] for name in names]
        axes.barh([label(name) for name in names], widths, left=left, color=shade, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel(
        "ms of a step, medians (DDP and torch ZeRO-1: communication by difference to the limit)", fontsize=8
    )
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
    finish(figure, [axes], subtitle(times), path)


def finish(figure: Any, axes: list[Any], title: str, path: Path) -> None:
    """Plain axes, the setting above, a file that depends on the numbers alone."""
    import matplotlib
    import matplotlib.pyplot as plt

    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=8, color="#57606a")
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "shardengine", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


TABLES = (markdown, checkpoint_markdown, headline)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.charts", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=REFERENCE.ranks, help="of which run (default 2)")
    parser.add_argument("--machine", default=None, help="short name in the file's name (default: this machine)")
    parser.add_argument("--markdown", action="store_true", help="print the tables of docs instead of drawing")
    options = parser.parse_args(argv)
    place = {"machine": {"name": options.machine or machine()["name"]}}
    if options.markdown:
        for text in (printer(RESULTS, place["machine"]["name"]) for printer in TABLES):
            print(text, end="\n\n" if text else "")
        return 0
    suffix = f"-n{options.ranks}" if options.ranks != REFERENCE.ranks else ""
    files = [result_path(f"{name}{suffix}", place) for name in ("step", "step_rss")]
    if not files[0].exists():
        raise SystemExit(f"{os.path.relpath(files[0])} is not there: run python -m benchmarks.step first")
    times = json.loads(files[0].read_text(encoding="utf-8"))
    rss = json.loads(files[1].read_text(encoding="utf-8")) if files[1].exists() else None
    for path in draw(times, rss, RESULTS):
        print(f"drawn: {os.path.relpath(path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
