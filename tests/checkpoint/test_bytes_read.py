"""What loading costs, counted from outside: bytes read per rank, and host memory on top of the engine's own."""

from __future__ import annotations

import builtins
import fcntl
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.disk import takes_direct
from shardengine.checkpoint import index, loading, tensor_file
from shardengine.offload import direct_io
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
Read = tuple[str, int, int]
"""(file, first byte, one past the last)."""
CHUNK, SIDE = 4096, 160


class Tower(nn.Module):
    """Linear layers in a ModuleList, which are units; a few small tensors beside them, frozen ones and buffers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.still = nn.Parameter(torch.randn(width, 3), requires_grad=False)
        self.register_buffer("mean", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def make(stage: str, bucket: int) -> Any:
    torch.manual_seed(3)
    return cases.make_engine(Tower(SIDE, 5), cases.config_of(stage, zero={"reduce_bucket_size": bucket}))


def saves(folder: str, stage: str) -> None:
    """With small chunks, so that the bytes that are verified say something."""
    engine = make(stage, 60_000)
    engine.backward(engine(torch.randn(4, SIDE)).square().mean())
    engine.step()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tensor_file, "CHUNK_BYTES", CHUNK)
        patched.setattr(index, "CHUNK_BYTES", CHUNK)
        engine.save_checkpoint(folder)
    engine.close()


@contextmanager
def listening(reads: dict[str, list[Read]]) -> Iterator[None]:
    """Notes what ``preadv`` reads of tensor files, as "verify" and "fill"; every other way to read them raises.

    "direct": what of it was read past the page cache.
    """
    phase = ["verify"]
    fill, preadv, opens = loading._fill, direct_io.preadv, (builtins.open, io.open)
    others = {name: getattr(os, name) for name in ("read", "pread", "preadv", "sendfile")}

    def note(number: int, buffers: Any, offset: int, *flags: int) -> int:
        count = preadv(number, buffers, offset, *flags)
        file = Path(os.readlink(f"/proc/self/fd/{number}")).name
        reads.setdefault(phase[0], []).append((file, offset, offset + count))
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT:
            reads.setdefault("direct", []).append((file, offset, offset + count))
        return count

    def filling(*args: Any, **options: Any) -> None:
        phase[0] = "fill"
        fill(*args, **options)
        phase[0] = "verify"

    def refuse_path(file: Any, *args: Any, **options: Any) -> Any:
        assert not str(file).endswith(".safetensors"), f"{file} was opened by another way"
        return opens[0](file, *args, **options)

    def refuse_number(name: str) -> Callable[..., Any]:
        def read(number: int, *args: Any) -> Any:
            assert not os.readlink(f"/proc/self/fd/{number}").endswith(".safetensors"), f"os.{name} of a tensor file"
            return others[name](number, *args)

        return read

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(direct_io, "preadv", note)
        patched.setattr(loading, "_fill", filling)
        patched.setattr(builtins, "open", refuse_path)
        patched.setattr(io, "open", refuse_path)
        for name in others:
            patched.setattr(os, name, refuse_number(name))
        yield


def loads(folder: str, stage: str, trained: bool) -> dict[str, Any]:
    engine = make(stage, 25_000)
    if trained:
        engine.backward(engine(torch.randn(4, SIDE)).square().mean())
        engine.step()
    reads: dict[str, list[Read]] = {}
    with listening(reads):
        engine.load_checkpoint(folder)
    held = [part.values for part in engine.optimizer.parameter_state()]
    found = {"reads": reads, "stepped": sum(values.nbytes for values in held)}
    engine.close()
    return found


def joined(reads: list[Read]) -> list[Read]:
    """Contiguous runs."""
    runs: list[Read] = []
    for file, start, end in sorted(reads):
        if runs and runs[-1][0] == file and runs[-1][2] >= start:
            runs[-1] = (file, runs[-1][1], max(runs[-1][2], end))
        else:
            runs.append((file, start, end))
    return runs


def size(reads: list[Read]) -> int:
    return sum(end - start for _, start, end in reads)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [((4, "3"), (1, "0")), ((1, "2"), (4, "3")), ((2, "1"), (3, "2")), ((3, "3"), (2, "3k")), ((2, "2"), (2, "0"))],
)
def test_every_rank_reads_its_own_bytes(
    pools: Pools, tmp_path: Path, before: tuple[int, str], after: tuple[int, str], trained: bool
) -> None:
    """Its bytes, and at most two chunks more per contiguous run: once, or twice where the engine has trained.

    Weights and buffers come before states, so that a chunk in which both lie is read for both.
    """
    pools(before[0]).run(saves, str(tmp_path), before[1])
    saved = json.loads((tmp_path / "step-00000001" / "index.json").read_text(encoding="utf-8"))["index"]
    results = pools(after[0]).run(loads, str(tmp_path), after[1], trained)
    elements = 5 * (SIDE * SIDE + SIDE)
    copies = after[0] if after[1] == "0" else 1
    assert sum(result["stepped"] for result in results) == copies * 3 * 4 * elements
    for rank, result in enumerate(results):
        random = sum(rows[rank % before[0]][2] for rows in saved["random"].values())
        frozen = 4 * (SIDE * 3 // (after[0] if after[1].startswith("3") else 1))
        needed = result["stepped"] + frozen + 4 * SIDE
        slack = 4 * SIDE * 3 if after[1].startswith("3") else 0  # slices of the small frozen matrix end at 64 bytes
        heads = -(-before[0] // after[0])
        reads = result["reads"]
        alone = after != (2, "0") and takes_direct(tmp_path)
        assert reads.keys() == {"verify", "fill", "direct"} if alone and not trained else {"verify", "fill"}
        filled, verified = joined(reads["fill"]), joined(reads["verify"])
        # random states are read with the chunk around each
        least = needed - slack
        assert least <= size(filled) <= size(reads["fill"]) <= needed + slack + CHUNK * 2 * (len(filled) + before[0])
        assert size(reads["fill"]) < 1.4 * needed, "chunks are too large to say anything"
        small = random + CHUNK * (heads + 2 * before[0])
        if trained:
            assert size(reads["verify"]) <= size(reads["fill"]) + 2 * small
            assert all(
                any(f == file and s <= start and end <= e for f, s, e in verified) for file, start, end in filled
            )
        else:
            assert size(reads["verify"]) <= 2 * small
            assert not alone or sorted(reads["direct"]) == sorted(reads["fill"])


# Host memory

WIDTH, LAYERS = 3000, 1
STATE_BYTES = 3 * 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
"""108 MB."""
BOUND = 28 << 20
"""Six blocks of 4 MiB to write, five to read, and what else a save or load makes."""


def growth(work: Callable[[], Any]) -> int:
    """By how many bytes the process grew at most while ``work`` ran."""

    def resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def costs(folder: str, stage: str, what: str) -> int:
    """what: "save" (in one bucket), "load" into small ones, or "convert": the weights alone, in bf16, in one bucket."""
    low: dict[str, Any] = {"bf16": {"enabled": True}} if what == "convert" else {}
    bucket = 500_000 if what == "load" else 2 * WIDTH * WIDTH
    config = cases.config_of(stage, zero={"reduce_bucket_size": bucket}, **low)
    engine = cases.make_engine(Tower(WIDTH, LAYERS), config, None if what == "convert" else "AdamW")
    with torch.no_grad():
        for part in () if engine.optimizer is None else engine.optimizer.parameter_state():
            part.values.fill_(0.5)  # so that their memory is there
    if what == "save":
        found = growth(lambda: engine.save_checkpoint(folder))
    else:
        found = growth(lambda: engine.load_checkpoint(folder, weights_only=what == "convert"))
    engine.close()
    return found


def test_host_memory_is_bounded(pools: Pools, tmp_path: Path) -> None:
    grown = pools(1).run(costs, str(tmp_path), "0", "save")
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) > STATE_BYTES
    grown += pools(2).run(costs, str(tmp_path), "1", "load") + pools(1).run(costs, str(tmp_path), "3", "load")
    grown += pools(1).run(costs, str(tmp_path), "0", "convert")
    assert max(grown) < BOUND < 4 * WIDTH * WIDTH, grown
