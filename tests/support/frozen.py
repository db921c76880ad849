"""Imported last by the process that forks: a collection of a rank looks at what it made itself, not at every import."""

from __future__ import annotations

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # libraries count what is left at the end of the process
