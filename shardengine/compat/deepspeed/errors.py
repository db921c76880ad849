"""Errors that scripts catch by DeepSpeed's exception types, and checks of paths and arguments that raise them.

Must not know: engines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardengine.config import nearest
from shardengine.errors import MismatchError, UsageError


class AssertedError(UsageError, AssertionError):
    """An invalid call; also an AssertionError, as in DeepSpeed."""


class AssertedMismatchError(MismatchError, AssertionError):
    """A difference between ranks; also an AssertionError, as in DeepSpeed."""


class ValueRefusedError(UsageError, ValueError):
    """An invalid value; also a ValueError, as in DeepSpeed."""


def folder(call: str, given: str | os.PathLike[str]) -> str:
    """Return the argument ``given`` of ``call`` as a directory path; ValueRefusedError if it is no path, or empty."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ValueRefusedError(
            f"{call}: expected the path of a directory, got {given!r}", code="checkpoint-folder-not-a-path"
        )
    return os.fspath(given)


NEEDED: Any = object()
"""Marks an argument without a default."""


def bound(called: str, known: Mapping[str, Any], values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every argument. known: name → default, in order.

    TypeError: too many arguments, or one that is unknown, given twice or missing.
    """
    given = dict(zip(known, values, strict=False))
    problems = [f"at most {len(known)} arguments, got {len(values)}"] if len(values) > len(known) else []
    for name in named:
        if name not in known:
            problems.append(f"{name!r} is unknown, the nearest is {nearest(name, known)!r}")
        elif name in given:
            problems.append(f"{name!r} was given twice")
    found = {**known, **given, **named}
    problems += [f"{name!r} is missing" for name, value in found.items() if value is NEEDED]
    if problems:
        raise TypeError(f"{called}: {'; '.join(problems)}")
    return found
