"""What one GPU does in a step of the engine, out of a trace of torch's profiler: launches, waits, gaps, overlap.

``python -m benchmarks.gpu_profile`` trains GPT-2 with 1.5B parameters for three steps under the profiler, at stage 2 on
the GPU and at stage 3 with weights and optimizer in host memory, each in a process of its own, and prints JSON; the
traces, which https://ui.perfetto.dev shows, are written beside (``--traces``), without the calls of torch itself.

    launches         kernels per step
    waits            calls per step after which the host has waited for the GPU, by name, and their milliseconds
    pageable copies  copies per step from or to memory that is not page-locked, for which the host waits as well
    gaps             how long the compute stream, the one with the most kernel time, stands still in a step, and its
                     longest gaps with what ran before and after
    overlap          seconds of a step in which copies between host and GPU run, and of these, in which kernels of the
                     compute stream run as well

Owns: the traced run and the reading of traces (``read``).
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.device import SYNCHRONISES, VERSION, synchronise
from benchmarks.variants import Ours
from benchmarks.workload import Setting, batch_of, make_model

SETTING = Setting(1, 48, 1600, 50257, 2, 1024)
TINY = Setting(1, 2, 64, 96, 2, 16)
STEPS, WARMUP = 3, 2
STEP = "shardengine-bench-step"
HOST = {"device": "cpu"}
VARIANTS: dict[str, dict[str, Any]] = {
    "stage-2": {"stage": 2},
    "stage-3-away": {"stage": 3, "offload_param": HOST, "offload_optimizer": HOST},
}
KEPT = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver", "user_annotation")
"""Categories of a trace's events that are read, and kept."""
LONGEST = 8
"""Gaps that are named."""

Event = dict[str, Any]
Span = tuple[float, float]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def common(a: Sequence[Span], b: Sequence[Span]) -> float:
    """The time that is in both; each a ``union``."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def length(spans: Iterable[Span]) -> float:
    """Of all together."""
    return sum(end - begin for begin, end in spans)


def span(event: Event) -> Span:
    """In microseconds."""
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def gaps_of(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The time between the events of one stream, longest first."""
    found = []
    ordered = sorted(events, key=lambda event: span(event)[0])
    reached, before = span(ordered[0])[1], ordered[0]["name"]
    for event in ordered[1:]:
        begin, end = span(event)
        if begin > reached:
            found.append({"ms": (begin - reached) / 1e3, "after": before[:80], "before": event["name"][:80]})
        if end > reached:
            reached, before = end, event["name"]
    return sorted(found, key=lambda gap: -gap["ms"])


def read(events: Iterable[Event]) -> dict[str, Any]:
    """What the module's docstring lists, per step, out of the events of a Chrome trace with steps labelled ``STEP``.

    Only the steps' host time is ``step_ms`` where no kernel was seen (on a CPU, or where the profiler may not look).
    """
    by_category: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in KEPT:
            by_category[event["cat"]].append(event)
    steps = [event for event in by_category["user_annotation"] if event["name"] == STEP]
    if not steps:
        raise ValueError(f"expected steps labelled {STEP} in the trace, found none")
    count = len(steps)
    found: dict[str, Any] = {"steps": count, "step_ms": length(map(span, steps)) / count / 1e3}
    kernels = by_category["kernel"]
    if not kernels:
        return found | {"not_seen": "the profiler saw no kernel"}
    first, last = span(steps[0])[0], max(span(step)[1] for step in steps)
    calls = [
        (VERSION.sub("", call["name"], count=1), span(call))
        for call in by_category["cuda_runtime"] + by_category["cuda_driver"]
    ]
    waits = [(name, when) for name, when in calls if SYNCHRONISES.fullmatch(name) and first <= when[0] < last]
    names = {name for name, _ in waits}
    copies = by_category["gpu_memcpy"]
    apart = [copy for copy in copies if "HtoD" in copy["name"] or "DtoH" in copy["name"]]
    streams: dict[Any, list[Event]] = defaultdict(list)
    for kernel in kernels:
        streams[kernel["args"]["stream"]].append(kernel)
    compute = max(streams, key=lambda stream: length(map(span, streams[stream])))
    busy = union(map(span, streams[compute]))
    gaps = gaps_of([e for e in kernels + copies + by_category["gpu_memset"] if e["args"]["stream"] == compute])
    per_step = 1e6 * count
    return found | {
        "launches": len(kernels) / count,
        "waits": {name: sum(each == name for each, _ in waits) / count for name in sorted(names)},
        "waited_ms": length(when for _, when in waits) / count / 1e3,
        "pageable_copies": sum("Pageable" in copy["name"] for copy in copies) / count,
        "streams": len(streams),
        "compute_busy_s": length(busy) / per_step,
        "gaps_s": sum(gap["ms"] for gap in gaps) / count / 1e3,
        "longest_gaps": gaps[:LONGEST],
        "copies_s": length(union(map(span, apart))) / per_step,
        "copies_under_compute_s": common(union(map(span, apart)), busy) / per_step,
        "copied_bytes": sum(int(copy["args"].get("bytes", 0)) for copy in apart) / count,
    }


def traced(name: str, setting: Setting, device: str, target: Path) -> dict[str, Any]:
    """Train one variant in this process, write the trace to ``target`` (.json.gz), and read it."""
    where = torch.device(device)
    with where:
        model = make_model(setting, own=True)
    more = {"bf16": {"enabled": True}, "activation_checkpointing": {"enabled": True}}
    variant = Ours(model, setting, zero=VARIANTS[name], more=more)
    batch = {key: tokens.to(where) for key, tokens in batch_of(setting, 0, 0).items()}

    def step() -> None:
        variant.backward(variant.forward(batch))
        variant.update()

    for _ in range(WARMUP):
        step()
    synchronise(where)
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    synchronise(where)
    untraced = (time.perf_counter() - start) / STEPS
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if where.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            with record_function(STEP):
                step()
        synchronise(where)
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-") as folder:
        whole = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(whole))
        events = json.loads(whole.read_text(encoding="utf-8"))["traceEvents"]
    kept = [event for event in events if event.get("cat") in KEPT or event.get("ph") == "M"]
    with gzip.open(target, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": kept}, file)
    variant.close()
    return {"untraced_step_ms": untraced * 1e3, **read(kept), "trace": target.name}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_profile", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: with --tiny, to try it")
    parser.add_argument("--tiny", action="store_true", help="a model of some thousand parameters")
    parser.add_argument("--traces", type=Path, default=Path("build/gpu"), metavar="FOLDER", help="where traces go")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="which")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; --device cpu --tiny tries the program on a CPU")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 1 if a variant failed."""
    options = parse(argv)
    options.traces.mkdir(parents=True, exist_ok=True)
    if len(options.variants) == 1:
        (name,) = options.variants
        setting = TINY if options.tiny else SETTING
        print(json.dumps({name: traced(name, setting, options.device, options.traces / f"trace-{name}.json.gz")}))
        return 0
    failed = 0
    for name in options.variants:
        command = [sys.executable, "-m", "benchmarks.gpu_profile", "--device", options.device, "--variants", name]
        command += ["--traces", str(options.traces), *(["--tiny"] if options.tiny else [])]
        failed |= subprocess.run(command, check=False).returncode
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
