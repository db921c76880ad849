"""Imported last by the process that forks: a collection of a rank looks at what it made itself, not at every import."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
