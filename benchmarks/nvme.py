"""Optimizer states on a disk: transfers of extents and a pipelined step beside the disk's own bandwidth, in one run.

``python -m benchmarks.nvme --directory <on the disk to measure>`` prints a table and writes
``benchmarks/results/nvme-<machine>.json``. It wants an idle machine, 9 GiB of that disk and about 10 minutes.

What is compared. A round moves the same bytes, ``--mib`` of fp32 weights and moments (12 bytes per parameter), in turn

    raw read, raw write       each alone: O_DIRECT in plain ways (``WAYS``: threads and blocks), files that are there
    raw both                  read and write of two files at the same time, in each of these ways
    extents read, write, both the same through ``ExtentFile``, with its checksums, and ``Aio`` as the options say
    step                      the update of all states in memory: the kernels of AdamW, nothing from the disk
    pipeline                  the step from the disk: while extent i is updated, i + 1 is read and i - 1 is written
    pipeline, step, …         the same of as many parameters, kept in other dtypes (``KEPT``)

*raw* is the way with the best median of the run. GB/s are the bytes of state per second, of a read and a write at the
same time those of one direction. × raw is the time of raw over that of the line. The fair bound of the pipeline is
``raw both``; its time over that of ``raw read`` and of ``raw write`` is there, too. The pipeline has ``--buffers``
buffers of one extent each. After the last round an extent is compared with the same steps in memory, bit for bit.

Of the other dtypes *bytes* are those that the system says the process has read and written in one pipeline, per
parameter, *at most* is how much faster a pipeline could be that takes nothing but the time of its bytes, and *speed*
how much faster it is, paired by round: both beside fp32 states with the same weights. The target is a third of the
states' bytes at most.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.disk import takes_direct
from benchmarks.reporting import MIN_ROUNDS, machine, paired_ratio, table, verdict, write_result
from shardengine import kernels
from shardengine.errors import UsageError
from shardengine.offload.direct_io import ALIGNMENT
from shardengine.offload.host_memory import staging
from shardengine.offload.nvme.extent_file import Aio, Extent, ExtentFile, IORequest

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
WAYS = ((1 << 20, 8), (4 << 20, 8), (8 << 20, 4))
"""Bytes of a request and requests in flight."""
TARGET = 0.85
"""× raw at least."""
FEWER = 3.0
"""Times fewer bytes of states that are moved, at least."""


class Kept(NamedTuple):
    """In what weights and AdamW's states are kept on the disk. base: the key of ``KEPT`` that it is compared with."""

    weight: torch.dtype = torch.float32
    states: str = "fp32"
    base: str = ""

    def forms(self) -> dict[str, kernels.StateForm]:
        """By name of what is kept: the weights first."""
        return {"weight": kernels.StateForm(self.weight)} | kernels.state_forms(
            kernels.STATE_NAMES["AdamW"], self.states
        )


KEPT = {
    "fp32": Kept(),
    "bf16 states": Kept(states="bf16", base="fp32"),
    "8-bit states": Kept(states="8bit", base="fp32"),
    "bf16 weights": Kept(torch.bfloat16),
    "bf16 weights, 8-bit states": Kept(torch.bfloat16, "8bit", "bf16 weights"),
}
"""fp32 weights are the masters of others, or the weights; bf16 weights have none."""
BASES = {
    "extents read": ("raw read",), "extents write": ("raw write",), "extents both": ("raw both",),
    "pipeline": ("raw both", "raw read", "raw write"),
}  # fmt: skip
"""What a line is compared with; the first is its target's."""
HEADER = ["", "GB/s", "cores busy", "× raw [95%]", "raw", "target"]
KEPT_HEADER = ["", "bytes", "pipeline s", "step s", "beside", "speed [95%]", "at most", "states' bytes", "target"]
Run = Callable[[], object]


class Raw:
    """Two files of ``size`` bytes each: one to read, one to write over, with O_DIRECT and nothing else."""

    def __init__(self, folder: Path, memory: Tensor) -> None:
        self.size, self.memory = memory.numel(), memoryview(memory.numpy())  # type: ignore[arg-type]
        self.files = [
            os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
            for name in ("read", "write")
        ]
        for file in self.files:
            os.posix_fallocate(file, 0, self.size)
            self.move(file, WAYS[0], reading=False)

    def read(self, way: tuple[int, int]) -> None:
        """The whole first file."""
        self.move(self.files[0], way, reading=True)

    def write(self, way: tuple[int, int]) -> None:
        """The whole second file."""
        self.move(self.files[1], way, reading=False)

    def both(self, way: tuple[int, int]) -> None:
        """The two at the same time."""
        other = threading.Thread(target=self.write, args=(way,))
        other.start()
        self.read(way)
        other.join()

    def move(self, file: int, way: tuple[int, int], *, reading: bool) -> None:
        """All bytes of a file, in blocks, from as many threads as there are requests in flight."""
        size, depth = way

        def one(start: int) -> None:
            block = self.memory[start : start + size]
            moved = os.preadv(file, [block], start) if reading else os.pwritev(file, [block], start)
            if moved != len(block):
                raise OSError(f"{moved} of {len(block)} bytes moved at {start}")

        with ThreadPoolExecutor(depth) as pool:
            list(pool.map(one, range(0, self.size, size)))


class States:
    """Weights and two moments of AdamW in extents of one file, and their step. count: parameters of an extent · kept: a
    key of ``KEPT`` · spare: whether there are extents to write over."""

    def __init__(
        self, folder: Path, count: int, extents: int, buffers: int, aio: Aio, kept: str = "fp32", *, spare: bool = True
    ) -> None:
        self.file, self.kept = ExtentFile(folder, f"benchmark, {kept}", aio), KEPT[kept]
        self.sizes = {name: form.length(count) * form.dtype.itemsize for name, form in self.kept.forms().items()}
        self.bytes = -(-sum(self.sizes.values()) // ALIGNMENT) * ALIGNMENT
        self.extents = [self.file.allocate(self.bytes) for _ in range(extents)]
        self.spare = [self.file.allocate(self.bytes) for _ in range(extents if spare else 0)]
        self.buffers = [staging(self.bytes) for _ in range(buffers)]
        generator = torch.Generator().manual_seed(0)
        self.gradient = torch.randn(count, generator=generator)
        self.twin = staging(self.bytes)
        self.flats_of(self.twin)["weight"].copy_(torch.randn(count, generator=generator))
        for extent in [*self.extents, *self.spare]:
            self.file.write(extent, self.twin).wait()
        self.steps = 0

    def flats_of(self, buffer: Tensor) -> dict[str, Tensor]:
        """What is kept in a buffer, one behind the other."""
        parts = buffer[: sum(self.sizes.values())].split(list(self.sizes.values()))
        named = zip(self.kept.forms().items(), parts, strict=True)
        return {name: part.view(form.dtype) for (name, form), part in named}

    def step(self, buffer: Tensor) -> None:
        """One update of the states in a buffer."""
        flats = self.flats_of(buffer) | {"gradient": self.gradient}
        rule, spans = kernels.rule_for("AdamW", OPTIONS, self.steps), kernels.Spans([(0, self.gradient.numel())])
        noise = kernels.Noise(1, self.steps) if self.kept.weight is torch.bfloat16 else None
        kernels.update(flats, spans, rule, noise=noise, state_noise=kernels.Noise(0, self.steps))

    def moved(self) -> float:
        """Bytes that the process reads and writes in a pipeline, per parameter, as the system counts them."""
        before = _transferred()
        self.pipeline()
        return (_transferred() - before) / (len(self.extents) * self.gradient.numel())

    def in_memory(self) -> None:
        """As many updates as there are extents; the states are thrown away."""
        for index in range(len(self.extents)):
            self.step(self.buffers[index % len(self.buffers)])

    def move(self, *, reading: bool = False, writing: bool = False) -> None:
        """Read all extents, write over all spare ones, or both at once; each buffer is used again when it is free."""
        half = len(self.buffers) // 2 if reading and writing else len(self.buffers)
        others: list[threading.Thread] = []
        if writing:
            others.append(threading.Thread(target=_all, args=(self.file.write, self.spare, self.buffers[-half:])))
            others[0].start()
        if reading:
            _all(self.file.read, self.extents, self.buffers[:half])
        for other in others:
            other.join()

    def pipeline(self) -> None:
        """One step of all states: read, updated and written, three extents at a time."""
        self.steps += 1
        buffers, count = self.buffers, len(self.buffers)
        writes: list[IORequest | None] = [None] * count
        reads = [self.file.read(self.extents[0], buffers[0])]
        for index, extent in enumerate(self.extents):
            following = index + 1
            if following < len(self.extents):
                if write := writes[following % count]:
                    write.wait()
                reads.append(self.file.read(self.extents[following], buffers[following % count]))
            reads[index].wait()
            self.step(buffers[index % count])
            writes[index % count] = self.file.write(extent, buffers[index % count])
        for write in writes:
            if write:
                write.wait()

    def proved(self) -> bool:
        """Whether the last extent is what the same steps make of the same states in memory."""
        done = self.steps
        for self.steps in range(1, done + 1):
            self.step(self.twin)
        self.file.read(self.extents[-1], self.buffers[0]).wait()
        return torch.equal(self.buffers[0], self.twin)


def _transferred() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("read_bytes", "write_bytes")))


def _all(call: Callable[[Extent, Tensor], IORequest], extents: Sequence[Extent], buffers: Sequence[Tensor]) -> None:
    under_way: list[IORequest] = []
    for index, extent in enumerate(extents):
        if index >= len(buffers):
            under_way[index - len(buffers)].wait()
        under_way.append(call(extent, buffers[index % len(buffers)]))
    for transfer in under_way:
        transfer.wait()


def competitors(raw: Raw, all_states: dict[str, States]) -> dict[str, Run]:
    """Name to what it runs. Raw ones are named by their way, too, and what is kept otherwise by its key of ``KEPT``."""
    states = all_states["fp32"]
    runs: dict[str, Run] = {}
    for way in WAYS:
        text = f"{way[1]} × {way[0] >> 20} MiB"
        for kind, call in (("read", raw.read), ("write", raw.write), ("both", raw.both)):
            runs[f"raw {kind}, {text}"] = partial(call, way)
    return runs | {
        "extents read": lambda: states.move(reading=True),
        "extents write": lambda: states.move(writing=True),
        "extents both": lambda: states.move(reading=True, writing=True),
        "step": states.in_memory,
        "pipeline": states.pipeline,
        **{f"step, {name}": other.in_memory for name, other in all_states.items() if other is not states},
        **{f"pipeline, {name}": other.pipeline for name, other in all_states.items() if other is not states},
    }


def measure(runs: dict[str, Run], rounds: int, warmup: int) -> dict[str, dict[str, list[float]]]:
    """Seconds, and seconds of processors, of each round; each begins one competitor later."""
    names = list(runs)
    found: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in ("seconds", "busy")}
    for number in range(warmup + rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            busy, start = time.process_time(), time.perf_counter()
            runs[name]()
            if number >= warmup:
                found["seconds"][name].append(time.perf_counter() - start)
                found["busy"][name].append(time.process_time() - busy)
    return found


def summarise(found: dict[str, dict[str, list[float]]], size: int) -> dict[str, dict[str, Any]]:
    """A row per competitor; of the raw ways the best. size: bytes of state."""
    seconds = found["seconds"]
    best = {
        kind: min(
            (name for name in seconds if name.startswith(kind)), key=lambda name: statistics.median(seconds[name])
        )
        for kind in ("raw read", "raw write", "raw both")
    }
    rows: dict[str, dict[str, Any]] = {}
    for name in (*best.values(), *(name for name in seconds if not name.startswith("raw"))):
        median = statistics.median(seconds[name])
        cores = statistics.median(found["busy"][name]) / median
        rows[name] = {"median_s": median, "gb_per_s": size / median / 1e9, "cores_busy": cores, "of": {}}
        for number, kind in enumerate(BASES.get(name, ())):
            ratio = paired_ratio(seconds[best[kind]], seconds[name])
            rows[name]["of"][best[kind]] = asdict(ratio)
            if number == 0:
                rows[name] |= {"target": TARGET, "verdict": verdict(ratio, TARGET, at_least=True)}
    return rows


def kept_rows(seconds: dict[str, list[float]], moved: dict[str, float]) -> dict[str, dict[str, Any]]:
    """A row per key of ``KEPT``. moved: the bytes of each, per parameter, both directions."""
    rows: dict[str, dict[str, Any]] = {}
    for name, kept in KEPT.items():
        suffix = "" if name == "fp32" else f", {name}"
        medians = {kind: statistics.median(seconds[f"{kind}{suffix}"]) for kind in ("pipeline", "step")}
        rows[name] = {"bytes": moved[name], **{f"{kind}_s": median for kind, median in medians.items()}}
        if not kept.base:
            continue
        base = "pipeline" if kept.base == "fp32" else f"pipeline, {kept.base}"
        weights = 2 * kept.weight.itemsize  # read and written
        fewer = (moved[kept.base] - weights) / (moved[name] - weights)
        rows[name] |= {
            "base": kept.base, "speed": asdict(paired_ratio(seconds[base], seconds[f"pipeline, {name}"])),
            "at_most": moved[kept.base] / moved[name], "states_fewer": fewer,
        }  # fmt: skip
        if kept.states == "8bit":
            rows[name] |= {"target": FEWER, "verdict": "reached" if fewer >= FEWER else "missed"}
    return rows


def kept_cells(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The table under ``KEPT_HEADER``."""
    lines = []
    for name, row in rows.items():
        line = [name, f"{row['bytes']:.2f}", f"{row['pipeline_s']:.3f}", f"{row['step_s']:.3f}"]
        if "base" in row:
            speed = "{median:.2f} [{low:.2f}, {high:.2f}]".format(**row["speed"])
            line += [row["base"], speed, f"{row['at_most']:.2f}", f"{row['states_fewer']:.2f}"]
        target = f"{row['target']:.0f}: {row['verdict']}" if "target" in row else ""
        lines.append([*line, *[""] * (8 - len(line)), target])
    return lines


def cells(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The table under ``HEADER``: a line per competitor and raw way that it is compared with."""
    lines = []
    for name, row in rows.items():
        head = [name, f"{row['gb_per_s']:.2f}", f"{row['cores_busy']:.2f}"]
        said = f"{row['target']:.2f}: {row['verdict']}" if "target" in row else ""
        for base, ratio in row["of"].items() or [("", None)]:
            cell = f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else ""
            lines.append([*head, cell, base, said])
            head, said = [name, "", ""], ""
    return lines


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nvme", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before the first measured one")
    parser.add_argument(
        "--mib", type=int, default=1536, help="states of a step (default 1536); six times as much is taken"
    )
    parser.add_argument("--extents", type=int, default=48, help="of as many parts (default 48)")
    parser.add_argument("--buffers", type=int, default=4, help="of one extent each (at least 3, default 4)")
    for name, value in asdict(Aio()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"of Aio (default {value})")
    parser.add_argument(
        "--directory", type=Path, default=Path(), help="on the disk to measure (default: the current one)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if min(options.rounds, options.mib, options.extents) < 1 or options.warmup < 0 or options.buffers < 3:
        parser.error("expected at least 1 round, MiB and extent, no negative warm-up, and 3 buffers")
    if not options.directory.is_dir() or not takes_direct(options.directory):
        parser.error(f"--directory {options.directory}: expected a directory whose file system takes O_DIRECT")
    try:
        options.aio = Aio(options.block_size, options.queue_depth, options.thread_count)
    except UsageError as error:
        parser.error(str(error))
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdicts: a benchmark reports, a test decides."""
    options = parse(argv)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    count = (options.mib << 20) // options.extents // (12 * 1024) * 1024  # parameters of an extent
    result: dict[str, Any] = {
        "benchmark": "nvme", "machine": machine(), "rounds": options.rounds, "load_before": os.getloadavg()[0],
        "setting": asdict(options.aio) | {"extents": options.extents, "parameters": count * options.extents,
                                          "buffers": options.buffers, "threads": torch.get_num_threads()},
    }  # fmt: skip
    size = 12 * count * options.extents
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-", dir=options.directory) as name:
        folder = Path(name).resolve()
        given = (count, options.extents, options.buffers, options.aio)
        all_states = {kept: States(folder, *given, kept, spare=kept == "fp32") for kept in KEPT}
        states = all_states["fp32"]
        memory = staging(size)
        for start in range(0, size, states.bytes):
            memory[start : start + states.bytes].copy_(states.twin)
        found = measure(competitors(Raw(folder, memory), all_states), options.rounds, options.warmup)
        rows = {name: row for name, row in summarise(found, size).items() if ", " not in name or name.startswith("raw")}
        moved = {kept: other.moved() for kept, other in all_states.items()}
        result |= {"state_bytes": size, "rows": rows, "kept": kept_rows(found["seconds"], moved)}
        result |= {"seconds": found["seconds"], "same_bits_as_in_memory": all(s.proved() for s in all_states.values())}
        for other in all_states.values():
            other.file.close()
    if not result["same_bits_as_in_memory"]:
        raise SystemExit("a pipeline's states are not those of the same steps in memory")
    tables = table(HEADER, cells(result["rows"])), table(KEPT_HEADER, kept_cells(result["kept"]))
    print(json.dumps(result, indent=1) if options.json else "\n\n".join(tables))
    where = "not written, as asked" if options.no_write else f"written to {write_result('nvme', result)}"
    print(where, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
