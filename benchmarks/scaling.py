"""One rank of many that are not there: what ``initialize`` and a step take as the number of ranks grows.

``python -m benchmarks.scaling`` starts a process for each number of ranks and stage, in which torch's fake process
group (of its own tests; it carries nothing) has 8, 64 or 1,024 ranks, this one in the middle. The model has the layout
of Llama 8B, 32 layers, on the meta device: nothing is computed and nothing is sent. It prints a table, and writes
``benchmarks/results/scaling-<machine>.json`` and ``.svg``. Beside what was measured stands what docs/limits.md says:

    bytes       of data that a step sends, by the stage's formula
    messages    of data, by group and so by axis of the mesh, and the MB that come with them: every bucket is reduced,
                its weights are gathered as often as the formula says
    Python      of a step outside of kernels and of what torch's group does: it must not grow with the ranks, but for
                the exchange of the step, of which a rank receives 21 + 8·P + P/8 bytes from each other one, and, where
                sums are direct, for the term that each rank sends of every bucket
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardengine
from benchmarks.charts import finish
from benchmarks.host_layouts import LAYOUTS, STAGES, Model, Stopwatch, kernels_counted
from benchmarks.reporting import machine, table, write_result
from shardengine.comm import Wire, nodes
from shardengine.comm.group_kind import GroupName
from shardengine.comm.mesh import Mesh
from tests.support.dry_run import META, DryPlatform

NUMBERS = (8, 64, 1024)
LAYOUT = "Llama 8B"
DIRECT, HYBRID = "direct", "hybrid"
"""A stage with sums in the declared order: a reduction then has a term for each rank; or in shard groups."""
INSIDE = 4
"""Ranks of a shard group."""
WAYS = (*STAGES, f"2 {DIRECT}", f"3 {HYBRID}")
STEPS = 3
GROWTH = 1.2
"""× the Python time of a step on the smallest number of ranks is still called the same."""


class CountingWire(Wire):
    """Counts messages and their bytes by (operation, group), and the time that torch takes for them."""

    def __init__(self, names: Mapping[int, str], watch: Stopwatch) -> None:
        self._names = names
        self.messages: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        for name in ("broadcast", "all_gather", "reduce_scatter", "all_to_all"):
            setattr(self, name, self._counted(name, watch.around(getattr(super(), name))))

    def _counted(self, name: str, call: Any) -> Any:
        def counted(out: Tensor, *rest: Any) -> dist.Work:
            key = f"{name}, {self._names[id(rest[-1])]}"
            self.messages[key] += 1
            self.received[key] += out.nbytes
            work: dist.Work = call(out, *rest)
            return work

        return counted


def fake_mesh(ranks: int, watch: Stopwatch) -> Mesh:
    """This process as the rank in the middle of so many, used as with NCCL."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("fake", store=store, rank=ranks // 2, world_size=ranks)
    groups = {name: dist.new_group(backend="fake") for name in ("gather", "reduce", "control")}
    rank, number = ranks // 2, ranks // INSIDE
    inside, across = nodes.members(ranks, number)
    parts = {
        name: dist.new_group(next(of for of in (across if name.is_across else inside) if rank in of), backend="fake")
        for name in (GroupName.GATHER_INSIDE, GroupName.GATHER_ACROSS, GroupName.INSIDE, GroupName.ACROSS)
    }
    named = {id(group): str(name) for of in (groups, parts) for name, group in of.items()}
    more: dict[str, Any] = {"backend": "nccl", "wire": CountingWire(named, watch), "platform_of": DryPlatform}
    return Mesh(rank, ranks, META, **groups, shard_groups={number: parts}, **more)


def measure(ranks: int, stage: str, layout: str) -> dict[str, Any]:
    """In a process of its own."""
    torch.set_num_threads(1)
    watch = Stopwatch()
    mesh = fake_mesh(ranks, watch)
    wire = mesh.wire
    assert isinstance(wire, CountingWire)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": STAGES[stage.split()[0]] | ({"shard_group_size": INSIDE} if HYBRID in stage else {}),
        "reproducible": stage.endswith(DIRECT),
    }  # fmt: skip
    model = Model(LAYOUTS[layout])
    before = _peak_bytes()
    start = time.perf_counter()
    engine = shardengine.initialize(model, config, mesh=mesh)
    found: dict[str, Any] = {"ranks": ranks, "stage": stage, "initialize_s": time.perf_counter() - start}
    found["initialize_bytes"] = _peak_bytes() - before
    found["initialize_messages"] = dict(wire.messages)
    steps = []
    with kernels_counted(watch):
        for _ in range(STEPS):
            wire.messages.clear()
            wire.received.clear()
            begun, inside = time.process_time(), watch.seconds
            engine.backward(engine(torch.zeros((), device=META, requires_grad=True)))
            engine.step()
            steps.append(time.process_time() - begun - (watch.seconds - inside))
    data = sum(count for name, count in wire.messages.items() if not name.endswith("control"))
    traffic = engine.traffic()
    return found | {
        "step_s": steps, "buckets": len(engine._core.layout.buckets), "messages": dict(wire.messages),
        "received_bytes": dict(wire.received), "python_s_per_message": min(steps[1:]) / data,
        "sent_bytes": traffic["measured_bytes_last_step"], "formula_bytes": traffic["formula_bytes_per_step"],
        "step_bytes": _peak_bytes() - before - found["initialize_bytes"],
        "parameters": len(engine._core.layout.parameters),
    }  # fmt: skip


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_a_process(ranks: int, stage: str, layout: str) -> dict[str, Any]:
    """``measure``, where no other group is."""
    command = [sys.executable, "-m", "benchmarks.scaling", "--measure", str(ranks), stage, layout]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(f"{ranks} ranks, stage {stage}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def growth(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Stage → how much longer the Python of a step is on the most ranks than on the fewest, and whether that is the
    same."""
    found = {}
    for stage in dict.fromkeys(row["stage"] for row in rows):
        of = sorted((row for row in rows if row["stage"] == stage), key=lambda row: row["ranks"])
        ratio = min(of[-1]["step_s"][1:]) / min(of[0]["step_s"][1:])
        found[stage] = {"step": ratio, "verdict": "the same" if ratio <= GROWTH else "grows"}
    return found


def tables(result: Mapping[str, Any]) -> str:
    """For people."""
    header = "stage|ranks|initialize s|MiB|step ms|ms per message|messages of data|GB sent|by the formula|control KiB"
    rows = []
    for row in result["rows"]:
        data = {name: count for name, count in row["messages"].items() if not name.endswith("control")}
        control = sum(size for name, size in row["received_bytes"].items() if name.endswith("control"))
        rows.append([
            row["stage"], str(row["ranks"]), f"{row['initialize_s']:.2f}", f"{row['initialize_bytes'] / 2**20:.0f}",
            f"{min(row['step_s'][1:]) * 1e3:.1f}", f"{row['python_s_per_message'] * 1e3:.3f}",
            " + ".join(f"{count} {name} ({row['received_bytes'][name] / 1e6:.0f} MB)" for name, count in data.items()),
            f"{row['sent_bytes'] / 1e9:.2f}",
            f"{row['formula_bytes'] / 1e9:.2f}", f"{control / 1024:.0f}",
        ])  # fmt: skip
    lines = [f"stage {stage}: a step × {of['step']:.2f}: {of['verdict']}" for stage, of in result["growth"].items()]
    return "\n".join([table(header.split("|"), rows), *lines])


def draw(result: Mapping[str, Any], path: Path) -> None:
    """What initialize and a step take over the number of ranks, a line for each stage."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8.8, 3.2))
    for stage in dict.fromkeys(row["stage"] for row in result["rows"]):
        of = sorted((row for row in result["rows"] if row["stage"] == stage), key=lambda row: row["ranks"])
        ranks = [row["ranks"] for row in of]
        axes[0].plot(ranks, [row["initialize_s"] for row in of], marker="o", markersize=3, label=f"stage {stage}")
        axes[1].plot(ranks, [min(row["step_s"][1:]) * 1e3 for row in of], marker="o", markersize=3)
    for each, what in zip(axes, ("s of initialize", "ms of a step in Python"), strict=True):
        each.set_xscale("log", base=2)
        each.set_xlabel("ranks", fontsize=8)
        each.set_ylabel(what, fontsize=8)
        each.set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=7)
    title = f"{result['layout']}, one rank of a fake group, {result['machine']['processor']}"
    finish(figure, list(axes), title, path)


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever is found: a benchmark reports, a test decides."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(NUMBERS))
    parser.add_argument("--stages", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--layout", choices=list(LAYOUTS), default=LAYOUT)
    parser.add_argument("--measure", nargs=3, metavar=("RANKS", "STAGE", "LAYOUT"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if options.measure:
        ranks, stage, layout = options.measure
        print(json.dumps(measure(int(ranks), stage, layout)))
        return 0
    if min(options.ranks) < 2:
        parser.error("--ranks must be at least 2")
    rows = [in_a_process(ranks, stage, options.layout) for stage in options.stages for ranks in options.ranks]
    result = {"benchmark": "scaling", "machine": machine(), "layout": options.layout, "rows": rows,
              "growth": growth(rows), "load_after": os.getloadavg()[0]}  # fmt: skip
    print(json.dumps(result, indent=1) if options.json else tables(result))
    if options.no_write:
        print("not written, as asked", file=sys.stderr)
        return 0
    path = write_result("scaling", result)
    draw(result, path.with_suffix(".svg"))
    print(f"written to {os.path.relpath(path)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
