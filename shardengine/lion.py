"""``shardengine.lion.Lion``, the class of `optim/lion.py`."""

from shardengine.optim import Lion

__all__ = ["Lion"]
