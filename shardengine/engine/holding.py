"""Stores an engine on its model, so that code which makes another engine of the model finds it. Owns: the attribute.

Must not know: who asks. Frameworks drop engines that they have made and keep the model, whose hooks need the engine
until it is closed.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardengine.engine.engine import Engine

_HELD = "_shardengine_held"


class _Held:
    """A reference that copies and files of a model do not include."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, _memo: Any) -> _Held:
        return _Held()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Held, ()


def hold(engine: Engine) -> None:
    """Store ``engine`` on its model, until the model is gone or holds another one."""
    vars(engine.module)[_HELD] = _Held(engine)


def engine_of(model: nn.Module) -> Engine | None:
    """Return the open engine that ``model`` holds, or None."""
    held = vars(model).get(_HELD)
    engine = held.engine if isinstance(held, _Held) else None
    return engine if engine is not None and engine.module is model and engine.is_open else None
