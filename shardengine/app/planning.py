"""`shardengine plan`: what a run will need, before there is a GPU or a weight. Must not know: how bytes are counted.

Owns: the model of the command line, how a plan is printed and drawn.

Exit codes: 0 it fits · 1 it does not · 2 wrong usage or config.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardengine.app import adapters
from shardengine.app.settings import check_model, read_config, require
from shardengine.errors import UsageError
from shardengine.planner import Hardware, Plan, plan, show_bytes, summary_of


def run(options: argparse.Namespace) -> int:
    """Print the plan; the exit code."""
    require("transformers", extra="hf", what="plan --model")
    if options.plot is not None and find_spec("matplotlib") is None:
        raise UsageError("--plot: expected matplotlib to be installed: pip install 'shardengine[plot]'")
    hardware = Hardware.parse(
        options.gpus, host_memory=options.host_memory, nvme=options.nvme, node_ranks=options.node, link=options.link,
        node_link=options.node_link, tflops=options.tflops, memory=options.gpu_memory_speed,
    )  # fmt: skip
    if Path(options.model).name != "config.json":
        check_model(options.model)
    config = read_config(Path(options.config), hardware.ranks, micro_batch=options.micro_batch)
    logging.getLogger("shardengine").setLevel(logging.ERROR)  # of a run that is none
    found = plan(lambda: _model(options.model, options.lora), config, hardware, length=options.length)
    if options.plot is not None:
        draw(found, Path(options.plot), options.model)
    print(json.dumps(found.as_dict(), indent=2) if options.json else text_of(found))
    return 0 if found.fits else 1


def _model(place: str, lora: str | None) -> Any:
    """Of a folder, a config.json or a name on the Hub: without weights."""
    import torch
    import transformers

    path = Path(place)
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent if path.name == "config.json" else place)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--model {place}: expected a folder with a config.json, that file, or the name of a model on the Hub "
            f"({str(error).splitlines()[0]})"
        ) from error
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    config.use_cache = False
    with torch.device("meta"), _default_dtype(getattr(config, "dtype", None)):  # as from_pretrained loads it
        model = kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
        model.train()
        return model if lora is None else adapters.attach(model, adapters.parse(lora))


@contextmanager
def _default_dtype(dtype: Any) -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if isinstance(dtype, torch.dtype) else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def text_of(found: Plan) -> str:
    """For people."""
    config, zero = found.config, found.config.zero_optimization
    what = " × ".join(map(str, found.shape))
    steps = f", {config.gradient_accumulation_steps} micro-batches a step" if config.gradient_accumulation_steps else ""
    return "\n".join([
        f"{found.parameters / 1e9:.2f} billion parameters, stage {zero.stage}, micro-batches of {what}{steps}",
        f"{found.hardware}",
        "",
        summary_of(found),
        "",
        *found.sentences(),
        *time_of(found),
        f"(some steps of the engine as rank {found.rank}, without values, in {found.seconds:.1f} s; "
        f"{show_bytes(found.hardware.reserved_bytes)} of each GPU are left to CUDA and NCCL)",
    ])  # fmt: skip


def time_of(found: Plan) -> list[str]:
    """Lines: a step, and of each part how long it goes on, how much of that the computation waits, and its limit."""
    if (times := found.time) is None:
        return []
    micros = found.config.gradient_accumulation_steps or 1
    shape = found.shape[:2] if len(found.shape) == 2 else found.shape[:1]
    items = math.prod(shape) * micros * found.hardware.ranks
    what = "tokens" if len(shape) == 2 else "samples"
    head = ["step", "busy", "exposed", "limit"]
    rows = [[part.name, *(_show_seconds(each) for each in part[1:])] for part in times.parts if part.busy]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    told = [
        f"step: about {_show_seconds(times.seconds)}, no less than {_show_seconds(times.bound)}: "
        f"{items / times.seconds:,.0f} {what}/s in all"
    ]
    if times.unknown:
        named = ", ".join(f"{count} × {name}" for name, count in sorted(times.unknown.items()))
        told.append(f"not counted, nobody knows their FLOPs: {named}")
    if times.assumed:
        told.append(f"declared, since nothing was said of it: {', '.join(times.assumed)}")
    return ["", *(line.rstrip() for line in table), "", *told]


def _show_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def draw(found: Plan, path: Path, title: str) -> None:
    """What is alive on the device over the events of a step, by kind; the phases below."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(kind for moment in found.timeline for kind in moment.alive))
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(found.timeline))
    rows = [[moment.alive.get(kind, 0) / 1e9 for moment in found.timeline] for kind in kinds]
    axes.stackplot(places, rows, labels=kinds)
    begins = [0, *(i for i in places if i and found.timeline[i].phase != found.timeline[i - 1].phase)]
    for place in begins:
        axes.axvline(place, color="black", linewidth=0.4)
        axes.text(place, axes.get_ylim()[1], f" {found.timeline[place].phase}", fontsize=6, va="top")
    axes.axhline(found.hardware.usable_bytes / 1e9, color="red", linewidth=0.8)
    axes.set(xlabel="allocations and ends of tensors", ylabel="GB on the device", title=title)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)
