"""`shardengine plan`: the needs of a run, before there is a GPU or a weight. Must not know: how bytes are counted.

Owns: the model of the command line, the printed, drawn and written forms of a plan and a choice, the plan that a
training makes of itself.

Exit codes: 0 it fits · 1 it does not · 2 wrong usage or config.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from shardengine.app import adapters, four_bits, sources, what_fits
from shardengine.app.data import TokenBlocks, training_batches
from shardengine.app.rank_sums import RankSums
from shardengine.app.settings import Settings, check_model, read_base, read_config, require, require_lora
from shardengine.comm import Mesh
from shardengine.config import MICRO, TRIPLE, Config, is_comment, load_config, provisional
from shardengine.engine import Engine
from shardengine.errors import UsageError
from shardengine.planner import (
    SETTLED_STEPS,
    Choice,
    Hardware,
    MemoryMoment,
    Plan,
    Question,
    Taken,
    automatic,
    choose,
    columns_of,
    compare,
    line_of,
    plan,
    plan_amid,
    show_bytes,
    summary_of,
    table,
    table_of,
    taken_by,
    this_machine,
    watched,
)


def run(options: argparse.Namespace) -> int:
    """Print the plan, or with --choose the configs that fit; return the exit code."""
    require("transformers", extra="hf", what="plan --model")
    if options.lora is not None:
        require_lora(options.lora)
    if options.plot is not None:
        _check_plot(Path(options.plot))
    hardware = _hardware(options)
    if Path(options.model).name != "config.json":
        check_model(options.model)
    base = read_base(_source(options))
    model = lambda: model_of(options.model, options.lora, base, script=options.script)  # noqa: E731
    if options.choose or options.write is not None:
        return _choose(options, hardware, model)
    logging.getLogger("shardengine").setLevel(logging.ERROR)  # no run starts: drop its messages
    found = _planned(options, model)
    if options.plot is not None:
        draw(found, Path(options.plot), options.model)
    print(json.dumps(found.as_dict(), indent=2) if options.json else text_of(found), flush=True)
    if not found.fits and not options.json:
        for line in what_fits.sentences(options, found, lambda changed: _planned(changed, model)):
            print(line, flush=True)
    return 0 if found.fits else 1


def _planned(options: argparse.Namespace, model: Callable[[], Any]) -> Plan:
    hardware = _hardware(options)
    config = read_config(_source(options), hardware.ranks, micro_batch=options.micro_batch)
    return plan(model, config, hardware, length=options.length, in_slices=_in_slices(options))


def _hardware(options: argparse.Namespace) -> Hardware:
    return Hardware.parse(
        options.gpus, host_memory=options.host_memory, nvme=options.nvme, node_ranks=options.node, link=options.link,
        node_link=options.node_link, tflops=options.tflops, memory=options.gpu_memory_speed,
    )  # fmt: skip


def _in_slices(options: argparse.Namespace) -> bool:
    """Whether each rank reads only its part of the weights. A base of 4 bits is packed whole."""
    return not (options.script or adapters.packs_base(options.lora))


def _source(options: argparse.Namespace) -> sources.Source:
    return sources.changed(sources.find(options.config), sources.changes_of(options.set, options.lr))


def _check_plot(path: Path) -> None:
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--plot: expected matplotlib to be installed: pip install 'shardengine[plot]'", code="package-not-installed"
        )
    if not path.absolute().parent.is_dir() or path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(
            f"--plot {path}: expected a .png, .svg or .pdf file in a directory that is there",
            code="plan-plot-file-invalid",
        )


def _choose(options: argparse.Namespace, hardware: Hardware, model: Callable[[], Any]) -> int:
    """Print the configs that fit and write the best one; return the exit code."""
    if options.micro_batch is not None:
        raise UsageError(
            f"--micro-batch {options.micro_batch} with --choose: expected one of the two, because --choose tries "
            "micro-batches itself; train_batch_size in the config says how many samples a step has",
            code="plan-choose-with-micro-batch",
        )
    target = None if options.write is None else Path(options.write)
    if target is not None and (target.is_dir() or not target.absolute().parent.is_dir()):
        raise UsageError(
            f"--write {target}: expected a file in a directory that is there", code="plan-write-file-invalid"
        )
    base = read_base(_source(options))
    logging.getLogger("shardengine").setLevel(logging.ERROR)
    told = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    found = choose(model, base, hardware, length=options.length, told=told, in_slices=_in_slices(options))
    if options.plot is not None and found.plan is not None:
        draw(found.plan, Path(options.plot), options.model)
    if target is not None and found.config is not None:
        plain = _without_remarks(found.config)
        target.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(found.as_dict(), indent=2) if options.json else text_of_choice(found))
    return 0 if found.rows else 1


def _without_remarks(tree: Any) -> Any:
    """Remove the remarks of the file that the config began with, because they may be about another model."""
    if not isinstance(tree, Mapping):
        return tree
    return {key: _without_remarks(value) for key, value in tree.items() if not is_comment(key)}


def text_of_choice(found: Choice) -> str:
    """Return, for people, the best rows and the first one's plan, or the changes that would fit."""
    tried = f"({found.tried} plans in {found.seconds:.1f} s)"
    if found.plan is None:
        return "\n".join([*found.needed, tried])
    refused = [f"not {candidate}: {why}" for candidate, why in found.refused.items()]
    return "\n".join(
        [table_of(found), columns_of(found), *refused, tried, "", f"1: {found.rows[0].candidate}", text_of(found.plan)]
    )


def model_of(place: str, lora: str | None, base: Mapping[str, Any], *, script: bool = False) -> Any:
    """Return the model of a folder, a config.json or a name on the Hub, without weights, as ``train`` loads it.

    It is in fp32, and the engine converts it to bf16 or fp16 if its config says so. If ``lora`` asks for 4 bits, it is
    packed for the precision of the config ``base``. script: as ``from_pretrained`` loads it, in its files' dtype.
    """
    import transformers

    path = Path(place)
    try:
        config = transformers.AutoConfig.from_pretrained(path.parent if path.name == "config.json" else place)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--model {place}: expected a folder with a config.json, that file, or the name of a model on the Hub "
            f"({str(error).splitlines()[0]})",
            code="model-not-found",
        ) from error
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    config.use_cache = False
    dtype = getattr(config, "dtype", None)
    saved = dtype if script and isinstance(dtype, torch.dtype) else torch.float32
    packed = adapters.packs_base(lora)
    if packed:
        four_bits.refuse_quantised(config, place)
        read = {**base, **dict.fromkeys(TRIPLE), MICRO: 1}
        saved = four_bits.dtype_of(load_config(read, provisional(read)))
    with torch.device("meta"), _default_dtype(saved):
        try:
            model = kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"--model {place}: the model refuses its config ({error})", code="plan-model-config-refused"
            ) from error
        model.train()
        if packed:
            four_bits.pack_without_values(model, saved)
        return model if lora is None else adapters.attach(model, adapters.parse(lora))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def text_of(found: Plan) -> str:
    """Return the plan for people."""
    config, zero = found.config, found.config.zero_optimization
    what, left = " × ".join(map(str, found.shape)), found.hardware.reserved_bytes
    reserved = f"; {show_bytes(left)} of each GPU are left to CUDA and NCCL" if left else ""
    short = f" of models with {', '.join(map(str, found.depths))} layers" if found.depths else ""
    steps = f", {config.gradient_accumulation_steps} micro-batches a step" if config.gradient_accumulation_steps else ""
    return "\n".join([
        f"{_count(found.parameters)} parameters, stage {zero.stage}, micro-batches of {what}{steps}",
        f"{found.hardware}",
        "",
        summary_of(found),
        "",
        *found.sentences(),
        *time_of(found),
        f"(some steps of the engine as rank {found.rank}{short}, without values, in {found.seconds:.1f} s{reserved})",
    ])  # fmt: skip


def _count(number: int) -> str:
    return (
        f"{number / 1e9:.2f} billion"
        if number >= 1e9
        else f"{number / 1e6:.1f} million"
        if number >= 1e7
        else f"{number:,}"
    )


class RunPlan:
    """The plan of a training and the memory that one of its steps took, on rank 0; empty on other ranks.

    found: a text is the reason that there is no plan; None: no plan was asked for, or this is another rank.
    """

    def __init__(self, found: Plan | str | None) -> None:
        self._found, self._step, self._taken = found, 0, Taken()

    @property
    def line(self) -> str:
        """The line for the header; "" if no plan was asked for."""
        return "" if self._found is None else line_of(self._found)

    def watching(self, engine: Engine, last: int) -> Callable[[int], AbstractContextManager[object]]:
        """Return a function from a step's number to its context manager: on a CPU, one step is counted.

        That is the first step with settled buffers, or the last one if it comes earlier. last: number of the last step.
        """
        self._step = min(engine.global_steps + SETTLED_STEPS, last)
        counts = isinstance(self._found, Plan) and engine.device.type == "cpu"
        return lambda number: self._watch(engine) if counts and number == self._step else nullcontext()

    @contextmanager
    def _watch(self, engine: Engine) -> Iterator[None]:
        with watched(engine) as self._taken:
            yield

    def measured(self, engine: Engine) -> tuple[str, str]:
        """Return a sentence with planned and measured bytes, and one on an excess; "" for each that does not apply."""
        if not isinstance(self._found, Plan):
            return "", ""
        compared = compare(self._found, taken_by(engine, self._taken))
        where = "rank 0" if self._taken.peak is None else f"rank 0, in step {self._step}"
        return f"{compared.line()} on {where}", compared.sentence()


def of_run(settings: Settings, config: Config, model: Any, blocks: TokenBlocks, rank_sums: RankSums) -> RunPlan:
    """Plan the run that is about to begin: its model, its first micro-batch, this machine. Rank 0 makes the plan."""
    if not settings.plan or rank_sums.rank:
        return RunPlan(None)
    mesh = rank_sums.mesh
    where = this_machine(mesh.device, mesh.ranks, config)
    return RunPlan(plan_amid(model, config, where, lambda: first_batch(config, blocks, mesh.ranks)))


def decided(settings: Settings, config: Config, model: Any, blocks: TokenBlocks, mesh: Mesh) -> Config:
    """Return ``config`` with planned values in place of "auto"; collective."""
    asked = _question(settings, config, model, blocks)
    return config if asked is None else settings.read_config(mesh.ranks, automatic.decide(asked, mesh))


def decided_alone(
    where: Hardware, settings: Settings, config: Config, model: Any, blocks: TokenBlocks
) -> tuple[Config, Sequence[str]]:
    """Decide as ``decided`` in this process alone, for ranks that do not exist; return the reasons as well."""
    asked = _question(settings, config, model, blocks)
    if asked is None:
        return config, []
    values, said = automatic.decide_alone(asked, where)
    return settings.read_config(where.ranks, values), [f'"auto": {said}']


def _question(settings: Settings, config: Config, model: Any, blocks: TokenBlocks) -> Question | None:
    """Return the open question of the run's config; None if nothing is to be decided."""
    if settings.resume is not None:
        return None
    batch = lambda: first_batch(config, blocks, 1)  # noqa: E731
    asked = automatic.question_of(
        settings.source, model, batch=batch, in_slices=not four_bits.is_quantised(model.config)
    )
    return None if asked is None else dataclasses.replace(asked, base=sources.with_optimizer(asked.base))


def first_batch(config: Config, blocks: TokenBlocks, ranks: int) -> dict[str, Any]:
    """Return the first micro-batch as the loop passes it to the engine."""
    micro_batch = config.train_micro_batch_size_per_gpu or 1
    return {**next(training_batches(blocks.training, micro_batch, 0, ranks, config.seed)), "use_cache": False}


def time_of(found: Plan) -> list[str]:
    """Return lines for people: the time of a step and of its parts.

    Of each part: the busy time, the time that the computation waits for it, and its limit.
    """
    if (times := found.time) is None:
        return []
    micros = found.config.gradient_accumulation_steps or 1
    shape = found.shape[:2] if len(found.shape) == 2 else found.shape[:1]
    items = math.prod(shape) * micros * found.hardware.ranks
    what = "tokens" if len(shape) == 2 else "samples"
    head = ["step", "busy", "exposed", "limit"]
    rows = [[part.name, *(_show_seconds(each) for each in part[1:])] for part in times.parts if part.busy]
    told = [
        f"step: about {_show_seconds(times.seconds)}, no less than {_show_seconds(times.bound)}: "
        f"{items / times.seconds:,.0f} {what}/s in all"
    ]
    if times.unknown:
        named = ", ".join(f"{count} × {name}" for name, count in sorted(times.unknown.items()))
        told.append(f"not counted, nobody knows their FLOPs: {named}")
    if times.assumed:
        told.append(f"assumed (an A100's data sheet): {', '.join(times.assumed)}")
    return ["", table([head, *rows]), "", *told]


def _show_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def draw(found: Plan, path: Path, title: str) -> None:
    """Draw the bytes on the device over initialize and a step, by kind, with the phases and the block of the peak."""
    from matplotlib.figure import Figure

    moments = found.timeline
    kinds = list(dict.fromkeys(kind for moment in moments for kind in moment.alive))
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    places = _places(moments)
    rows = [[moment.alive.get(kind, 0) / 1e9 for moment in moments] for kind in kinds]
    axes.stackplot(places, rows, labels=kinds)
    begins = [0, *(i for i in range(1, len(moments)) if moments[i].phase != moments[i - 1].phase)]
    for index in begins:
        axes.axvline(places[index], color="black", linewidth=0.4)
        axes.text(places[index], axes.get_ylim()[1], f" {moments[index].phase} ", fontsize=6, va="top", rotation=90)
    most = max(range(len(moments)), key=lambda index: moments[index].bytes)
    where = f"{moments[most].phase} {moments[most].unit}".strip()
    axes.plot(places[most], moments[most].bytes / 1e9, "kv", markersize=5)
    axes.annotate(f"{show_bytes(moments[most].bytes)}: {where}", (places[most], moments[most].bytes / 1e9), fontsize=7)
    axes.axhline(found.hardware.usable_bytes / 1e9, color="red", linewidth=0.8)
    axes.set(xlabel="blocks of the model, in the order of a step", ylabel="GB on the device", title=title)
    axes.set_xticks([])
    axes.legend(fontsize=7, loc="upper right")
    figure.savefig(path, dpi=120)


def _places(moments: Sequence[MemoryMoment]) -> list[int]:
    """Return the position of each moment on the axis.

    Blocks without a moment, which lie between others, take up space.
    """
    found = [0]
    for before, after in pairwise(moments):
        numbers = [each.unit.rpartition(".")[2].rpartition(" ")[2] for each in (before, after)]
        first, last = (int(number) if number.isdecimal() else None for number in numbers)
        far = 1 if first is None or last is None else max(1, abs(last - first))
        found.append(found[-1] + far)
    return found
