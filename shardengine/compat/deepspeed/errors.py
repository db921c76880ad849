"""Errors that scripts catch by the kind that DeepSpeed raises: of paths, of arguments. Must not know: engines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardengine.config import nearest
from shardengine.errors import MismatchError, UsageError


class AssertedError(UsageError, AssertionError):
    """A call where it must not be; DeepSpeed asserts that."""


class AssertedMismatchError(MismatchError, AssertionError):
    """What differs between ranks, where DeepSpeed asserts that it does not."""


class ValueRefusedError(UsageError, ValueError):
    """A value that cannot be; DeepSpeed raises ValueError."""


def folder(call: str, given: str | os.PathLike[str]) -> str:
    """The directory ``given`` to ``call``. ValueRefusedError where it is none."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ValueRefusedError(f"{call}: expected the path of a directory, got {given!r}")
    return os.fspath(given)


NEEDED: Any = object()
"""The default of an argument that has none."""


def bound(called: str, known: Mapping[str, Any], values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument's value. known: name → default, in order. TypeError: too many, unknown, twice, missing."""
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
