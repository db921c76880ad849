"""Writes ``deepspeed_numbers.json``: what DeepSpeed computes in ``tests/compat/deepspeed_programs.py``, by ranks.

Run from the repository with an interpreter that has DeepSpeed (and torch; no GPU is needed):

    DS_ACCELERATOR=cpu python -m tests.data.make_deepspeed_numbers [FILE]
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import spawn

from tests.compat import deepspeed_programs as programs

FILE = Path(__file__).resolve().parent / "deepspeed_numbers.json"
RANKS = (1, 2)


def worker(rank: int, ranks: int, port: int, folder: str) -> None:
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})  # fmt: skip
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    found = {}
    for name, stage in programs.ALL:
        place = Path(folder, f"{name}-{stage}")
        found[f"{name} {stage}"] = programs.PROGRAMS[name](deepspeed, stage, place)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")


def main(file: Path = FILE) -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    rows: dict[str, Any] = {}
    for ranks in RANKS:
        with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            spawn(worker, (ranks, port, folder), nprocs=ranks)
            rows |= {
                f"{name} {ranks}": value for name, value in json.loads(Path(folder, "found.json").read_text()).items()
            }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in rows.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
