"""An engine that its model holds, so that who makes another one over the model finds it. Owns: where it is held.

Must not know: who asks. Frameworks drop engines that they have made, and keep the model, whose hooks the engine needs
until it is closed.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardengine.engine.engine import Engine

_HELD = "_shardengine_held"


class _Held:
    """A reference that copies of a model, and files, do not have."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, _memo: Any) -> _Held:
        return _Held()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Held, ()


def hold(engine: Engine) -> None:
    """The model of ``engine`` keeps it for as long as it lives, or until it has another one."""
    vars(engine.module)[_HELD] = _Held(engine)


def engine_of(model: nn.Module) -> Engine | None:
    """The open engine that ``model`` holds."""
    held = vars(model).get(_HELD)
    engine = held.engine if isinstance(held, _Held) else None
    return engine if engine is not None and engine.module is model and engine.is_open else None
