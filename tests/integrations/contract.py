"""What a class of a framework must have for one that is derived from it. Imports no framework."""

from __future__ import annotations

import inspect
import re
from types import FunctionType


def gone(ours: type, theirs: type, own: set[str], attributes: tuple[str, ...] = ()) -> list[str]:
    """What class ``theirs`` has no more of what ``ours``, derived from it, changes or reads, a sentence each.

    own: names that ``ours`` adds · attributes: what ``theirs`` sets on itself.
    """
    found = []
    for name, value in vars(ours).items():
        if name in own or name.startswith("__") or not isinstance(value, property | FunctionType):
            continue
        if name not in dir(theirs):
            found.append(f"{theirs.__name__}.{name} is gone")
        elif isinstance(value, FunctionType):
            mine, other = (list(inspect.signature(each).parameters.values()) for each in (value, getattr(theirs, name)))
            takes_all = {each.kind for each in mine} >= {
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            }
            names = [each.name for each in mine]
            if not takes_all and [each.name for each in other] != names[: len(other)]:
                found.append(f"{theirs.__name__}.{name} takes {[each.name for each in other]}, ours {names}")
    text = inspect.getsource(theirs)
    return found + [
        f"{theirs.__name__} sets no {name}" for name in attributes if not re.search(rf"\bself\.{name}\b", text)
    ]
