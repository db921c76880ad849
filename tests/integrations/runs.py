"""Runs of the programs beside, each once, in processes that are forked when everything is imported."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.forks import Forks

MISSING = [name for name in ("transformers", "accelerate", "peft") if find_spec(name) is None]  # not imported here
Log = list[dict[str, float]]


def _import() -> None:
    import tests.integrations.programs  # noqa: F401


def _live(say: Any, rank: int, program: str, *args: Any) -> None:
    from tests.integrations import programs

    getattr(programs, program)(say, rank, *args)


def _run(
    say: Any, rank: int, program: str, folder: str, port: int, stage: int | None, output: str, options: Any
) -> None:
    from tests.integrations import programs

    getattr(programs, program)(say, rank, folder, port, programs.Run(stage, output, **options))


class Runs:
    """A model on the disk, and runs of programs over it, each once."""

    def __init__(self, folder: Path, program: str) -> None:
        """program: the one of ``programs`` that ``log`` is of."""
        self._forks = Forks(_import)
        self.folder = folder
        self._program = program
        self._forks.live(_live, "make_model", str(folder / "model"))
        self._logs: dict[str, Log] = {}

    def output(self, stage: int | None, **options: Any) -> Path:
        """Where this run writes."""
        name = f"{stage}-{sorted(options.items())}".replace(str(self.folder), "")
        return self.folder / "".join(letter if letter.isalnum() else "-" for letter in name)

    def said(self, program: str, stage: int | None = None, *, ranks: int = 2, **options: Any) -> list[list[Any]]:
        """What each rank of ``program`` said; options: of ``programs.Run``."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        output = str(self.output(stage, ranks=ranks, **options))
        given = {**options, "ranks": ranks}
        return self._forks.live(_run, program, str(self.folder / "model"), port, stage, output, given, ranks=ranks)

    def log(self, stage: int | None, *, ranks: int = 2, **options: Any) -> Log:
        """Of a run at ``stage``, that of all ranks, which is the same."""
        output = str(self.output(stage, ranks=ranks, **options))
        if output not in self._logs:
            said = self.said(self._program, stage, ranks=ranks, **options)
            assert len(said) == ranks and all(words == said[0] for words in said)
            self._logs[output] = said[0][0]
        return self._logs[output]

    def final(self, stage: int | None, file: str = "model.safetensors", **options: Any) -> dict[str, torch.Tensor]:
        """The weights that the run saved last."""
        self.log(stage, **options)
        return load_file(self.output(stage, **{"ranks": 2, **options}) / "final" / file)

    def end(self) -> None:
        """No more runs."""
        self._forks.end()
