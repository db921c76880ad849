"""The command `shardengine run`: runs a user's script in this process, with shardengine in place of deepspeed."""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from shardengine.compat.deepspeed import stand_in
from shardengine.compat.deepspeed.table import VERSION
from shardengine.errors import UsageError

_FOR_CHILDREN = Path(stand_in.__file__).parents[1] / "for_children"


def prepare(*, children: bool) -> None:
    """Replace deepspeed by shardengine in this process. children: also in Python processes that it starts.

    UsageError if another deepspeed was imported before.
    """
    stand_in.install()
    if os.environ.get("RANK", "0") == "0":
        print(f"deepspeed {VERSION}: provided by shardengine in this process", file=sys.stderr, flush=True)
    if children:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(_FOR_CHILDREN), *([before] if before else [])])


def find(name: str) -> str:
    """Return the file ``name``, or the Python script that a shell would run for it. UsageError if there is neither."""
    if Path(name).is_file():
        return name
    found = shutil.which(name)
    if found is None:
        raise UsageError(
            f"{name}: expected a Python file, or a command on the path that is one; there is neither",
            code="run-script-not-found",
        )
    with open(found, "rb") as file:
        first = file.readline()
    if not (first.startswith(b"#!") and b"python" in first):
        raise UsageError(
            f"{found}: expected a Python script (its first line #!... python), as accelerate and torchrun are",
            code="run-script-not-python",
        )
    return found


def run(command: Sequence[str], file: str | None) -> None:
    """Run ``file``, or the module ``command[0]``, as ``python`` does, with the rest of ``command`` as its arguments."""
    sys.argv = list(command)
    if file is None:
        sys.path[0] = os.getcwd()
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = file
        sys.path[0] = str(Path(file).resolve().parent)
        runpy.run_path(file, run_name="__main__")
