"""``shardengine.lion.Lion``, which is `optim/lion.py`'s."""

from shardengine.optim import Lion

__all__ = ["Lion"]
