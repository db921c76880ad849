"""How a benchmark reports. Owns: the machine's short name, paired ratios with their interval, verdicts, result files.

Knows nothing of what is measured. The rules: competitors are interleaved in one run, so a ratio is the median over
*paired* rounds, with a bootstrap interval; a target counts as reached or missed only if the whole interval says so.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"
TARGET_SLACK = 0.02
"""A target is reached if the worse end of the interval misses it by at most this (docs/limits.md)."""
MIN_ROUNDS = 20
"""Fewer paired rounds than this are reported, but decide nothing."""

Verdict = Literal["reached", "missed", "not decided"]


@dataclass(frozen=True)
class Ratio:
    """A median over paired rounds with its 95% bootstrap interval."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(ours: Sequence[float], base: Sequence[float], *, resamples: int = 4000, seed: int = 0) -> Ratio:
    """The median of ``ours[i] / base[i]`` and the 95% percentile interval of that median (``resamples`` bootstraps).

    Round i of both was measured back to back, so that slow phases of the machine cancel. The interval is a pure
    function of the samples and ``seed``. Raises ValueError if the two do not pair up.
    """
    if len(ours) != len(base) or not ours:
        raise ValueError(f"paired rounds expected: {len(ours)} rounds of one and {len(base)} of the other were given")
    ratios = np.asarray(ours, dtype=np.float64) / np.asarray(base, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(ratios), size=(resamples, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))


def verdict(ratio: Ratio, target: float, *, at_least: bool = False) -> Verdict:
    """Say "reached" if the upper end is at most ``target`` + 0.02, "missed" if the lower end is above that.

    at_least: the target is a lower bound: reached if the lower end is at least ``target`` − 0.02, missed if the upper
    end is below that. Else, and with fewer than 20 rounds, "not decided".
    """
    if ratio.rounds < MIN_ROUNDS:
        return "not decided"
    best, worst, bound = ratio.low, ratio.high, target + TARGET_SLACK
    if at_least:
        best, worst, bound = -ratio.high, -ratio.low, TARGET_SLACK - target
    if worst <= bound:
        return "reached"
    if best > bound:
        return "missed"
    return "not decided"


def short_cpu_name(brand: str, cores: int) -> str:
    """``"AMD EPYC 7763 64-Core Processor"`` with 2 usable cores becomes ``"epyc-7763-2core"``."""
    text = re.sub(r"\((r|tm)\)|@.*$|\d+-core|with .*$", " ", brand.lower())
    skip = {"amd", "intel", "arm", "apple", "cpu", "processor", "genuine", "virtual"}
    words = [word for word in re.findall(r"[a-z0-9]+", text) if word not in skip]
    return "-".join([*(words or ["cpu"]), f"{cores}core"])


def short_gpu_name(name: str) -> str:
    """``"NVIDIA H200"`` becomes ``"h200"``, ``"NVIDIA A100-SXM4-80GB"`` becomes ``"a100-sxm4-80gb"``."""
    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in {"nvidia", "amd", "tesla"}]
    return "-".join(words or ["gpu"])


def machine(device: str = "cpu") -> dict[str, Any]:
    """What a reader needs to place a number: ``name`` (never a host name), processor, cores, memory, versions.

    device: "cuda" where the numbers are the GPU's, which then gives the name.
    """
    import cpuinfo
    import torch

    brand = str(cpuinfo.get_cpu_info().get("brand_raw") or platform.machine())
    cores = len(os.sched_getaffinity(0))
    found = {
        "name": short_cpu_name(brand, cores),
        "processor": brand,
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
    }
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        memory = round(gpu.total_memory / 2**30, 1)
        found |= {"name": short_gpu_name(gpu.name), "gpu": gpu.name, "gpu_memory_gib": memory}
        found |= {"cuda": torch.version.cuda}
    return found


def result_path(benchmark: str, result: Mapping[str, Any], directory: Path = RESULTS) -> Path:
    """Where ``write_result`` writes."""
    return directory / f"{benchmark}-{result['machine']['name']}.json"


def write_result(benchmark: str, result: Mapping[str, Any], directory: Path = RESULTS) -> Path:
    """Write ``result`` as ``<benchmark>-<machine name>.json`` and return the path. ``result`` has a key "machine"."""
    directory.mkdir(parents=True, exist_ok=True)
    path = result_path(benchmark, result, directory)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table: the first column left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
