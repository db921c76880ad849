"""An error is expected by its code, and by the names and values in its message: never by its prose."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import pytest

from shardengine.errors import ShardEngineError


class raises:
    """Inside the ``with``, the error with ``code`` is raised; its message has each of ``parts``: names and values.

    A class and no generator, whose frame the traceback would keep alive, with all that the error's frames hold.
    """

    def __init__(self, code: str, *parts: str) -> None:
        self._code, self._parts = code, parts
        self._inner: Any = pytest.raises(ShardEngineError)

    def __enter__(self) -> pytest.ExceptionInfo[ShardEngineError]:
        caught: pytest.ExceptionInfo[ShardEngineError] = self._inner.__enter__()
        return caught

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not self._inner.__exit__(kind, error, trace):
            return False
        code, text = getattr(error, "code", ""), str(error)
        assert code == self._code, f"expected the error {self._code!r}, got {code!r}: {text}"
        missing = [part for part in self._parts if part not in text]
        assert not missing, f"expected {missing} in the message of {code!r}: {text}"
        return True
