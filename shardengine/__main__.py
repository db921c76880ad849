"""``python -m shardengine``: the same as the console script."""

from __future__ import annotations

import sys

from shardengine.app.cli import main

sys.exit(main())
