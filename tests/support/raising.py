"""An error is expected by its code, and by the names and values in its message: never by its prose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardengine.errors import ShardEngineError


@contextmanager
def raises(code: str, *parts: str) -> Iterator[pytest.ExceptionInfo[ShardEngineError]]:
    """Inside, the error with ``code`` is raised, and its message contains each of ``parts``: names, numbers, values."""
    with pytest.raises(ShardEngineError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"expected the error {code!r}, got {error.code!r}: {error}"
    missing = [part for part in parts if part not in str(error)]
    assert not missing, f"expected {missing} in the message of {code!r}: {error}"
