"""What can happen to the files of a checkpoint, and the small engine that is to notice."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from shardengine.checkpoint import contents, index, tensor_file
from tests.support import cases

SMALL_CHUNK = 4096


def make(stage: str = "3", **options: Any) -> Any:
    """Parameters of two optimizer groups, buffers, momentum, schedules in a schedule."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    rates = torch.optim.lr_scheduler

    def schedule(optimizer: Any) -> Any:
        parts = [rates.ConstantLR(optimizer, 0.5, total_iters=2), rates.MultiStepLR(optimizer, [2, 4])]
        return rates.SequentialLR(optimizer, parts, [2])

    return cases.make_engine(model, cases.config_of(stage, **options), "AdamW", lr_scheduler=schedule)


def train(engine: Any, count: int = 1) -> None:
    for _ in range(count):
        torch.manual_seed(engine.global_steps)
        engine.backward(engine(torch.randn(4, 3)).square().mean())
        engine.step()


def tensors(engine: Any) -> list[Any]:
    """Everything that this rank holds, as bytes."""
    return [
        (part.name, part.key, part.first, cases.copy_out(part.values).numpy().tobytes())
        for part in contents.held(engine._core, engine.optimizer)
    ]


def rest(engine: Any) -> str:
    """Everything that is no tensor, and the random states."""
    options = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    scheduler = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    numbers = (engine.global_steps, engine.global_samples, engine.micro_steps, engine.optimizer.steps)
    of_numpy: Any = numpy.random.get_state()
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate(), of_numpy[1].tobytes(), of_numpy[2:]]
    return repr((options, scheduler, numbers, hashlib.sha256(repr(states).encode()).hexdigest()))


def sign(place: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the index as somebody would who knows its form: its checksum is right again."""
    path = place / "index.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    whole["index"] = change(whole["index"]) or whole["index"]
    whole["sha256"] = hashlib.sha256(json.dumps(whole["index"], sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(whole), encoding="utf-8")


def small_chunks() -> Callable[[], None]:
    """Write chunks of 4 KiB from now on; the function that ends it."""
    before = tensor_file.CHUNK_BYTES
    for module in (tensor_file, index):
        module.CHUNK_BYTES = SMALL_CHUNK  # type: ignore[attr-defined]

    def back() -> None:
        for module in (tensor_file, index):
            module.CHUNK_BYTES = before  # type: ignore[attr-defined]

    return back


def _flip(place: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place % len(data)] ^= 4
        path.write_bytes(data)

    return change


def _becomes(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


def _swap(path: Path) -> None:
    other = path.with_name("rank-00001.safetensors" if "00000" in path.name else "rank-00000.safetensors")
    data = path.read_bytes()
    if path.name == "index.json":
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)


class Unpickled(Exception):
    """Somebody has run code of a checkpoint."""


def _raise() -> None:
    raise Unpickled


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return _raise, ()


WAYS: dict[str, Callable[[Path], Any]] = {
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte less": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "appended": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8),
    "first byte": _flip(0),
    "head": _flip(40),
    "middle": _flip(-600),
    "last byte": _flip(-1),
    "gone": Path.unlink,
    "directory": _becomes(Path.mkdir),
    "dangling link": _becomes(lambda path: path.symlink_to("nowhere")),
    "link to itself": _becomes(lambda path: path.symlink_to(path.name)),
    "endless device": _becomes(lambda path: path.symlink_to("/dev/zero")),
    "pipe": _becomes(os.mkfifo),
    "pickle": lambda path: torch.save(_Bomb(), path),
    "other file": _swap,
}


def copy(source: Path, target: Path) -> Path:
    """A copy of a directory of checkpoints, in place of what is there."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))
