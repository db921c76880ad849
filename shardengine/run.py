"""``python -m shardengine.run``: the command `shardengine run`, as launchers start modules."""

from __future__ import annotations

import sys

from shardengine.app.cli import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
