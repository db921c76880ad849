"""Loading a pretrained model: time beside the disk's own bandwidth, and memory, beside what others do, in one run.

``python -m benchmarks.load`` makes a Llama of random weights on the spot (1.3 GB in fp32), starts two ranks of one
thread each, and lets every loader load it in every round, in rotating order; it writes ``load-<machine>.json``. It
wants an idle machine and about 6 minutes. DeepSpeed takes part where it is installed, else it is named as left out.

    the disk             each rank reads its half of the bytes plainly, in two ways; *the disk* is the better one
    shardengine          ``load_pretrained`` at stage 3
    DDP                  ``from_pretrained`` on every rank and DistributedDataParallel: every rank has all of it
    FSDP2                a model on the meta device, ``fully_shard``, ``to_empty``, and rank 0's state dict that is sent
    DeepSpeed            ``from_pretrained`` inside of zero.Init, then ``initialize`` at stage 3

All loads are cold: the pages of the files are dropped before (``disk.py``, [Note: Cold reads]). A load ends when the
weights are in memory on all ranks. GB/s are bytes of the files per second; × disk is the disk's time over the loader's.
Memory is the most that a rank had of its own (anonymous pages) above what it had before, looked at every few ms. In the
first round, which does not count, each load is proved: the weights are those of the files.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardengine
from benchmarks.checkpoint_ranks import give_back_freed
from benchmarks.disk import bytes_in, drop_cache, make_durable, resident
from benchmarks.peers import import_deepspeed
from benchmarks.ranks import collected, joined, leave
from benchmarks.reporting import MIN_ROUNDS, machine, paired_ratio, table, verdict, write_result
from benchmarks.variants import INSTALL
from shardengine.offload import direct_io

RANKS = 2
DISK = ("plainly, buffered", "plainly, O_DIRECT, 4 threads")
OURS = "shardengine"
TARGET_DISK = 0.80
"""× the disk's bandwidth at least."""
BLOCK = 8 << 20
SAMPLE_S = 0.004
HEADER = ["", "median s", "GB/s", "× disk [95%]", "target", "peak MiB of a rank", "× a half"]
CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
Loader = Callable[[str], Any]
"""What it returns holds the weights, and has ``weights()`` and ``close()``."""


@dataclass(frozen=True)
class Plan:
    """folder: where the ranks meet · model: where the files are."""

    folder: str
    model: str
    loaders: tuple[str, ...]
    rounds: int


@dataclass
class Loaded:
    """weights: all of them by name, on rank 0 at least; collective · close: let go of it."""

    weights: Callable[[], Mapping[str, Any]]
    close: Callable[[], None]


def make_model(folder: str, hidden: int, layers: int) -> None:
    """A Llama of random weights in ``folder``, durable."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": hidden // 64}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=32 * hidden, num_hidden_layers=layers, **sizes))
    model.save_pretrained(folder, max_shard_size="400MB")
    make_durable(Path(folder), 0, 1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """No states: what is measured is loading."""
    return torch.optim.SGD(parameters, lr=0.1)


def load_ours(folder: str) -> Loaded:
    """Every rank its slices."""
    engine = shardengine.load_pretrained(folder, CONFIG, optimizer=sgd)
    return Loaded(engine.state_dict, lambda: engine.close(restore=False))


def load_ddp(folder: str) -> Loaded:
    """Every rank everything."""
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaForCausalLM

    model = DistributedDataParallel(LlamaForCausalLM.from_pretrained(folder))
    return Loaded(model.module.state_dict, lambda: None)


def load_fsdp2(folder: str) -> Loaded:
    """Rank 0 reads and sends."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    state: dict[str, Any] = {}
    if dist.get_rank() == 0:
        for path in sorted(Path(folder).glob("*.safetensors")):
            state |= load_file(path)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, state, options=options)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return Loaded(lambda: get_model_state_dict(model, options=whole), lambda: None)


def load_deepspeed(folder: str) -> Loaded:
    """transformers' own way into zero.Init."""
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed = import_deepspeed()
    kept = HfDeepSpeedConfig(CONFIG)
    model = LlamaForCausalLM.from_pretrained(folder)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model.parameters()), config=CONFIG)

    def weights() -> dict[str, Any]:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            return {name: value.detach().clone() for name, value in engine.module.named_parameters()}

    def close() -> None:
        nonlocal kept
        engine.destroy()
        kept = None

    return Loaded(weights, close)


LOADERS: dict[str, tuple[Loader, str | None]] = {
    OURS: (load_ours, None),
    "DDP": (load_ddp, None),
    "FSDP2": (load_fsdp2, None),
    "DeepSpeed": (load_deepspeed, "deepspeed"),
}
"""Name → how it loads, and the package that it needs."""


def read_plainly(folder: str, rank: int, *, direct: bool) -> None:
    """This rank's share of every file, into memory that is used again and again."""
    threads = 4 if direct else 1
    memory = [direct_io.bytes_of(shardengine.offload.staging(BLOCK)) for _ in range(threads)]
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        blocks = range(-(-size // BLOCK))[rank::RANKS]
        number = direct_io.open_direct(path, os.O_RDONLY) if direct else os.open(path, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(threads) as pool:

                def run(first: int, number: int = number, size: int = size, blocks: range = blocks) -> None:
                    for block in blocks[first::threads]:
                        least = min(BLOCK, size - block * BLOCK)
                        direct_io.read(number, [memory[first]], block * BLOCK, least)

                list(pool.map(run, range(threads)))
        finally:
            os.close(number)


def anonymous() -> int:
    """Bytes of this process's own memory."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel reports no RssAnon in /proc/self/status; memory cannot be measured here")


@contextmanager
def peak() -> Iterator[list[int]]:
    """Inside, the most memory above what was there before; complete at the end."""
    before, found, stop = anonymous(), [0], threading.Event()

    def look() -> None:
        while not stop.wait(SAMPLE_S):
            found[0] = max(found[0], anonymous() - before)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
        found[0] = max(found[0], anonymous() - before)


def proved(loaded: Loaded, folder: str) -> None:
    """The weights are those of the files. Collective."""
    from safetensors import safe_open

    weights = loaded.weights()
    if dist.get_rank() == 0:
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    if not torch.equal(file.get_tensor(name), torch.as_tensor(weights[name])):
                        raise RuntimeError(f"{name} is not what is in the files")


def one_load(name: str, plan: Plan, *, prove: bool) -> tuple[float, int]:
    """Seconds and peak memory of this rank."""
    gc.collect()
    give_back_freed()
    dist.barrier()
    if dist.get_rank() == 0:
        drop_cache(Path(plan.model))
    dist.barrier()
    loaded = None
    with peak() as found:
        start = time.perf_counter()
        if name in DISK:
            read_plainly(plan.model, dist.get_rank(), direct=name == DISK[1])
        else:
            loaded = LOADERS[name][0](plan.model)
        dist.barrier()
        seconds = time.perf_counter() - start
    if loaded is not None:
        if prove:
            proved(loaded, plan.model)
        loaded.close()
    return seconds, found[0]


def measure(plan: Plan) -> dict[str, Any]:
    """One rank's seconds and peaks by loader, a row per round; whether the cache could be dropped."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = [*DISK, *plan.loaders]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[int]] = {name: [] for name in names}
    drop_cache(Path(plan.model))
    warm = resident(Path(plan.model))
    for number in range(plan.rounds + 1):
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            spent, most = one_load(name, plan, prove=number == 0)
            if number:
                seconds[name].append(spent)
                peaks[name].append(most)
        if dist.get_rank() == 0:
            print(f"\rround {number} of {plan.rounds}", end="", file=sys.stderr, flush=True)
    return {"seconds": seconds, "peaks": peaks, "warm": warm}


def rank_main(rank: int, plan: Plan) -> None:
    """One rank from start to end."""
    with joined(rank, RANKS, plan.folder):
        leave(rank, plan.folder, measure(plan))


def summarise(found: Sequence[Mapping[str, Any]], size: int) -> dict[str, Any]:
    """Rows by loader. found: what each rank found; a load lasts as long as its slowest rank. size: of the files."""
    names = list(found[0]["seconds"])
    seconds = {name: [max(row) for row in zip(*(r["seconds"][name] for r in found), strict=True)] for name in names}
    peaks = {name: max(max(rank["peaks"][name]) for rank in found) for name in names}
    best = min(DISK, key=lambda name: statistics.median(seconds[name]))
    rows: dict[str, Any] = {}
    for name in names:
        ratio, median = paired_ratio(seconds[best], seconds[name]), statistics.median(seconds[name])
        rows[name] = {"median_s": median, "gb_per_s": size / median / 1e9, "ratio": asdict(ratio)}
        rows[name] |= {"peak_bytes": peaks[name], "of_a_half": peaks[name] / (size / RANKS)}
        if name == OURS:
            rows[name] |= {"target": TARGET_DISK, "verdict": verdict(ratio, TARGET_DISK, at_least=True)}
    return {"disk": best, "rows": rows, "seconds": seconds, "cached_before_loads": max(r["warm"] for r in found)}


def cells(result: Mapping[str, Any]) -> list[list[str]]:
    """The table under ``HEADER``."""
    return [
        [
            name,
            f"{row['median_s']:.2f}",
            f"{row['gb_per_s']:.2f}",
            "{median:.2f} [{low:.2f}, {high:.2f}]".format(**row["ratio"]),
            f"{row['target']:.2f}: {row['verdict']}" if "target" in row else "",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['of_a_half']:.2f}",
        ]
        for name, row in result["rows"].items()
    ]


def chosen(named: Sequence[str] | None) -> tuple[str, ...]:
    """The loaders to run: those that are installed; refused where one was named that is not."""
    kept = []
    for name, (_, package) in LOADERS.items():
        if named and name not in named:
            continue
        if package is None or find_spec(package) is not None:
            kept.append(name)
        elif named:
            raise SystemExit(f"{name} needs {package}, which is not installed. To install it: {INSTALL[package]}")
        else:
            print(f"left out: {name} ({package} is not installed; to install it: {INSTALL[package]})", file=sys.stderr)
    return tuple(kept)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help="paired rounds (fewer than 20 decide nothing)")
    parser.add_argument("--loaders", nargs="+", choices=list(LOADERS), metavar="NAME", help=", ".join(LOADERS))
    parser.add_argument("--hidden", type=int, default=1024, help="of the model: a multiple of 64")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--directory", type=Path, default=Path(),
        help="on the disk to measure; a temporary directory in it is removed at the end (default: the current one)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args(argv)
    if min(options.rounds, options.layers) < 1 or options.hidden % 64 or options.hidden < 64:
        parser.error("--rounds and --layers must be at least 1, --hidden a multiple of 64")
    if not options.directory.is_dir():
        parser.error(f"--directory {options.directory}: expected a directory that is there")
    return options


def main(argv: list[str] | None = None) -> int:
    """Command line. Returns 0 whatever the verdict: a benchmark reports, a test decides."""
    options = parse(argv)
    loaders = chosen(options.loaders)
    packages = ["transformers", "safetensors", *(p for name in loaders if (p := LOADERS[name][1]))]
    result: dict[str, Any] = {
        "benchmark": "load",
        "machine": machine(),
        "packages": {package: metadata.version(package) for package in packages},
        "setting": {"ranks": RANKS, "hidden": options.hidden, "layers": options.layers, "threads_per_rank": 1},
        "rounds": options.rounds,
        "load_before": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory(prefix="shardengine-bench-", dir=options.directory.resolve()) as place:
        make_model(f"{place}/model", options.hidden, options.layers)
        size = result["file_bytes"] = bytes_in(Path(place, "model"))
        print(f"Llama, {size / 1e9:.2f} GB of files in fp32, {RANKS} ranks × 1 thread", file=sys.stderr)
        Path(place, "meet").mkdir()
        plan = Plan(f"{place}/meet", str(Path(place, "model").resolve()), loaders, options.rounds)
        found = collected(rank_main, plan, RANKS, plan.folder)
    result |= summarise(found, size)
    if result["cached_before_loads"] > 0:
        print("the page cache could not be dropped here: loads are warm in part", file=sys.stderr)
    print(
        json.dumps(result, indent=1) if options.json else f"{table(HEADER, cells(result))}\nthe disk: {result['disk']}"
    )
    full = vars(parse([])) | {"directory": options.directory, "json": options.json, "rounds": options.rounds}
    kept = not options.no_write and vars(options) == full
    where = f"written to {os.path.relpath(write_result('load', result))}" if kept else "not written"
    print(where, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
