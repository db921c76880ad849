"""Runs of whole programs of Hugging Face's libraries, each once, and what their logs have to have in common.

The programs are functions of a module that takes seconds to import: one process imports it and forks the ranks of every
run. No framework is imported here.
"""

from __future__ import annotations

import importlib
import os
import socket
import zlib
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forks import Forks

MISSING = [name for name in ("transformers", "accelerate", "peft") if find_spec(name) is None]  # not imported here
Log = list[dict[str, float]]
_DEFAULTS = {"ranks": 2, "k": 2}
HABITS = {
    "gradient_checkpointing": True,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # the best one is not the last one
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "max_grad_norm": 0.0,
}
"""Arguments of Trainer for which frameworks have special cases."""


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def join(rank: int, ranks: int, port: int) -> None:
    """As torchrun would start this rank.

    And as if it were no fork: of a pool of threads that a fork has left behind torch makes a new one for who asks
    first, and transformers, which casts in threads, asks from several at once.
    """
    torch.set_num_threads(torch.get_num_threads())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


def _import(module: str) -> None:
    importlib.import_module(module)


def _live(say: Any, rank: int, module: str, program: str, *args: Any) -> None:
    getattr(importlib.import_module(module), program)(say, rank, *args)


def _run(
    say: Any, rank: int, module: str, program: str, folder: str, port: int, stage: int | None, output: str, options: Any
) -> None:
    programs = importlib.import_module(module)
    join(rank, options["ranks"], port)
    getattr(programs, program)(say, rank, folder, programs.Run(stage, output, **options))


class Runs:
    """A model on the disk, and runs of programs over it."""

    def __init__(self, folder: Path, module: str, program: str, *, fresh: bool = True) -> None:
        """module: with ``make_model``, ``Run`` and the programs · program: that ``log`` is of · fresh: see Forks."""
        self._forks = Forks(partial(_import, module), fresh=fresh)
        self._module = module
        self._program = program
        self.folder = folder
        self._forks.live(_live, module, "make_model", str(folder / "model"))
        self._logs: dict[Path, Log] = {}

    def output(self, stage: int | None, **options: Any) -> Path:
        """Where this run writes."""
        text = repr(sorted({**_DEFAULTS, **options}.items())).replace(str(self.folder), "")
        return self.folder / f"stage-{stage}-{zlib.crc32(text.encode()):08x}"

    def said(self, program: str, stage: int | None = None, **options: Any) -> list[list[Any]]:
        """What each rank of ``program`` said; options: of ``Run``."""
        options = {**_DEFAULTS, **options}
        given = (str(self.folder / "model"), free_port(), stage, str(self.output(stage, **options)), options)
        return self._forks.live(_run, self._module, program, *given, ranks=options["ranks"])

    def log(self, stage: int | None, **options: Any) -> Log:
        """Of a run at ``stage``, made once; that of all ranks, which is the same."""
        output = self.output(stage, **options)
        if output not in self._logs:
            said = self.said(self._program, stage, **options)
            assert all(words == said[0] for words in said)
            self._logs[output] = said[0][0]
        return self._logs[output]

    def final(self, stage: int | None, file: str = "model.safetensors", **options: Any) -> dict[str, torch.Tensor]:
        """The weights that the run saved last."""
        self.log(stage, **options)
        return load_file(self.output(stage, **options) / "final" / file)

    def end(self) -> None:
        """No more runs."""
        self._forks.end()


def assert_same(log: Log, expected: Log, measured: tuple[str, ...] = ()) -> None:
    """Losses, norms and what begins with one of ``measured`` within fp32's rounding, everything else exactly."""
    assert len(log) == len(expected)
    for row, other in zip(log, expected, strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            if key in ("loss", "eval_loss", "train_loss"):
                assert value == pytest.approx(other[key], abs=1e-6), (row, other)
            elif key == "grad_norm":
                assert value == pytest.approx(other[key], rel=1e-4), (row, other)
            elif measured and key.startswith(measured):
                assert value == pytest.approx(other[key], rel=1e-6, abs=1e-5), (key, row, other)
            else:
                assert value == other[key], (key, row, other)


def assert_resumes(saved: tuple[int, int], resumed: tuple[int, int], k: int, runs: Runs) -> None:
    """Each a stage and its number of ranks: the log is that of DDP, which at another number of ranks, where batches are
    others, has resumed a checkpoint of its own."""
    (stage, ranks), (new_stage, new_ranks) = saved, resumed
    runs.log(stage, ranks=ranks, k=k)
    whole = runs.log(None, ranks=ranks, k=k)
    checkpoint, of_ddp = (str(runs.output(each, ranks=ranks, k=k) / "checkpoint-2") for each in (stage, None))
    expected = whole if ranks == new_ranks else runs.log(None, ranks=new_ranks, k=k, resume=of_ddp)
    assert len(expected) >= 5 and (ranks == new_ranks) == (expected == whole)
    assert_same(runs.log(new_stage, ranks=new_ranks, k=k, resume=checkpoint), expected)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Weights, bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]) and not value.isnan().any(), name
