"""The command `shardengine run`: a script of somebody else's, in this process, in which deepspeed is shardengine."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from shardengine.compat.deepspeed import stand_in
from shardengine.compat.deepspeed.table import VERSION


def run(command: Sequence[str], *, is_module: bool) -> None:
    """Run the file or the module ``command[0]`` as ``python`` does, with the rest as its arguments."""
    stand_in.install()
    if os.environ.get("RANK", "0") == "0":
        print(f"deepspeed {VERSION}: provided by shardengine in this process", file=sys.stderr, flush=True)
    sys.argv = list(command)
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")
