"""Kinds of config values.

Owns: how an integer, a number, a dtype name … is parsed, described, kept and put into JSON Schema, and the search for
the nearest valid name. It must not know any key, torch or files.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

JsonSchema = dict[str, Any]
REMARKS = ("_", "//", "#", "$", "comment")
"""The prefixes of a key that is only a remark."""


@dataclass(frozen=True)
class Kind:
    """A kind of value. ``words`` follow "expected"; ``convert`` returns the value to keep, or raises ValueError."""

    words: str
    schema: JsonSchema
    convert: Callable[[Any], Any]

    def parse(self, value: Any) -> Any:
        """Return the value to keep. Raises ValueError, which names the expected and the given value."""
        try:
            return self.convert(value)
        except ValueError:
            raise ValueError(f"expected {self.words}, got {describe(value)}") from None


Table = Mapping[str, tuple[Kind, Any]]
"""Parameter -> (kind, default)."""


def check_table(
    table: Table,
    given: Mapping[str, Any],
    problem: Callable[[str, str], None],
    other: Callable[[str, Any], None] = lambda name, value: None,
) -> dict[str, Any]:
    """Return every parameter of ``table``: its value in ``given``, or its default.

    ``problem(name, text)`` is called for a wrong value, ``other(name, value)`` for a name that is not in the table, in
    the order of ``given``.
    """
    values = {name: default for name, (_, default) in table.items()}
    for name, value in given.items():
        if name not in table:
            other(name, value)
            continue
        try:
            values[name] = table[name][0].parse(value)
        except ValueError as error:
            problem(name, str(error))
    return values


def describe(value: object) -> str:
    """Name a JSON value for "…, got X": its type and, if it is short, the value itself."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return f"the string {json.dumps(value if len(value) <= 60 else value[:60] + '…', ensure_ascii=False)}"
    if isinstance(value, (int, float)):
        return f"the number {value!r}" if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    return f"a Python {type(value).__name__}"


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return the candidate most similar to ``word``, case ignored. ``candidates`` must not be empty."""
    low = word.lower()
    return max(sorted(candidates), key=lambda known: difflib.SequenceMatcher(None, low, known.lower()).ratio())


def plain(value: Any) -> Any:
    """Copy mappings and sequences into dicts and lists, all the way down."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class FrozenMapping(Mapping[str, Any]):
    """A read-only mapping whose values are frozen as well: objects become FrozenMapping, lists become tuples."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items = {key: frozen(value) for key, value in (items or {}).items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def frozen(value: Any) -> Any:
    """Return a value from JSON, frozen all the way down: objects become FrozenMapping, lists tuples."""
    if isinstance(value, Mapping):
        return value if isinstance(value, FrozenMapping) else FrozenMapping(value)
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def integer(minimum: int, maximum: int | None = None) -> Kind:
    """An integer in a closed range. 1e9 is one; 1.5 and true are not."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError
        if isinstance(value, float) and not value.is_integer():
            raise ValueError
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError
        return int(value)

    schema: JsonSchema = {"type": "integer", "minimum": minimum}
    if maximum is None:
        return Kind(f"an integer >= {minimum}", schema, parse)
    return Kind(f"an integer from {minimum} to {maximum}", {**schema, "maximum": maximum}, parse)


def number(minimum: float, *, above: bool = False, below: float | None = None) -> Kind:
    """A finite number >= minimum (> minimum with ``above``) and, if given, < below."""

    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e300:
            raise ValueError
        if not (value > minimum if above else value >= minimum) or (below is not None and value >= below):
            raise ValueError
        return float(value)

    words = f"a number {'>' if above else '>='} {minimum:g}" + (f" and < {below:g}" if below is not None else "")
    schema: JsonSchema = {"type": "number", "exclusiveMinimum" if above else "minimum": minimum}
    return Kind(words, schema if below is None else {**schema, "exclusiveMaximum": below}, parse)


def choice(*values: str) -> Kind:
    """One of a few strings."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or value not in values:
            raise ValueError
        return value

    return Kind("one of " + ", ".join(f'"{value}"' for value in values), {"enum": list(values)}, parse)


def spelled(spellings: Mapping[str, tuple[str, ...]]) -> Kind:
    """One of a few names, each in several spellings, case ignored; ``parse`` returns the name."""
    names = {spelling.lower(): name for name, others in spellings.items() for spelling in others}

    def parse(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in names:
            raise ValueError
        return names[value.lower()]

    words = " or ".join(f'"{name}"' for name in spellings)
    return Kind(
        f'{words}, also spelled as torch does ("{next(iter(spellings.values()))[-1]}")', {"enum": list(names)}, parse
    )


def optional(kind: Kind, meaning: str) -> Kind:
    """``kind`` or null; ``meaning`` describes null."""
    return Kind(
        f"{kind.words}, or null ({meaning})",
        {"anyOf": [kind.schema, {"type": "null"}]},
        lambda value: None if value is None else kind.parse(value),
    )


def name(meaning: str) -> Kind:
    """A string, or null; an empty string becomes null. ``meaning`` describes null."""

    def parse(value: Any) -> str | None:
        if value is not None and not isinstance(value, str):
            raise ValueError
        return value or None

    return Kind(f"a string, or null ({meaning})", {"type": ["string", "null"]}, parse)


def _checked(words: str, schema: JsonSchema, accepts: Callable[[Any], bool]) -> Kind:
    def parse(value: Any) -> Any:
        if not accepts(value):
            raise ValueError
        return value

    return Kind(words, schema, parse)


def _units(value: Any) -> str | tuple[str, ...]:
    if value == "auto":
        return "auto"
    if not isinstance(value, (list, tuple)) or not value or len(set(map(str, value))) != len(value):
        raise ValueError
    return tuple(TEXT.parse(name) for name in value)


def _names(value: Any) -> tuple[str, ...]:
    found = _units(value)
    if isinstance(found, str):
        raise ValueError
    return found


_FINITE = number(-1e300)


def _three(value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise ValueError
    return tuple(_FINITE.parse(each) for each in value)


def _epsilons(value: Any) -> tuple[float | None, float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError
    return None if value[0] is None else NOT_NEGATIVE.parse(value[0]), NOT_NEGATIVE.parse(value[1])


def _two(kind: Kind, words: str) -> Kind:
    """A list of two values of a kind."""

    def parse(value: Any) -> tuple[Any, Any]:
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise ValueError
        return kind.parse(value[0]), kind.parse(value[1])

    return Kind(
        f"a list of two numbers, {words}", {"type": "array", "items": kind.schema, "minItems": 2, "maxItems": 2}, parse
    )


BOOL = _checked("true or false", {"type": "boolean"}, lambda value: isinstance(value, bool))
TEXT = _checked(
    "a string that is not empty",
    {"type": "string", "minLength": 1},
    lambda value: isinstance(value, str) and value != "",
)
PLACE = _checked(
    "a string, or null", {"type": ["string", "null"]}, lambda value: value is None or isinstance(value, str)
)
OBJECT = _checked("an object", {"type": "object"}, lambda value: isinstance(value, Mapping))
ANY = _checked("anything", {}, lambda value: True)
COUNT, SIZE = integer(1), integer(0)
_NEVER = ("inf", "Infinity")
EVERY = Kind(
    "an integer >= 0, or Infinity or null (never)",
    {"anyOf": [SIZE.schema, {"type": "null"}, {"enum": list(_NEVER)}]},
    lambda value: 0 if value is None or value in _NEVER or value == math.inf else SIZE.parse(value),
)
NORM_TYPE = Kind(
    'a number > 0, or "inf"',
    {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"enum": list(_NEVER)}]},
    lambda value: "inf" if value in _NEVER or value == math.inf else number(0, above=True).parse(value),
)
POSITIVE, NOT_NEGATIVE, FRACTION = number(0, above=True), number(0), number(0, below=1)
_SPELLINGS = {
    "fp32": ("fp32", "float32", "float", "torch.float32", "torch.float"),
    "fp16": ("fp16", "float16", "half", "torch.float16", "torch.half"),
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
}
DTYPE = spelled(_SPELLINGS)
STATE_DTYPE = spelled({"fp32": _SPELLINGS["fp32"], "bf16": _SPELLINGS["bf16"], "8bit": ("8bit",)})
AUTOCAST_DTYPE = spelled({"bfloat16": _SPELLINGS["bf16"], "float16": _SPELLINGS["fp16"]})
BETAS = _two(FRACTION, "each >= 0 and < 1")
THREE = Kind(
    "a list of three numbers",
    {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3},
    _three,
)
NOT_POSITIVE = _checked(
    "a number <= 0",
    {"type": "number", "maximum": 0},
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and -1e300 <= value <= 0,
)
EPSILONS = Kind(
    "a list of two numbers >= 0, of which the first may be null",
    {
        "type": "array",
        "prefixItems": [{"anyOf": [NOT_NEGATIVE.schema, {"type": "null"}]}, NOT_NEGATIVE.schema],
        "minItems": 2,
        "maxItems": 2,
    },
    _epsilons,
)
PAIR = _two(NOT_NEGATIVE, "each >= 0")
UNITS = Kind(
    '"auto" or a list of different module class names, at least one',
    {"anyOf": [{"const": "auto"}, {"type": "array", "items": TEXT.schema, "minItems": 1, "uniqueItems": True}]},
    _units,
)
NAMES = Kind(
    "a list of different names or patterns of parameters",
    {"type": "array", "items": TEXT.schema, "uniqueItems": True},
    lambda value: () if value in ((), []) else _names(value),
)
PART = _checked(
    'a number from 0 to 1, or "auto"',
    {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"const": "auto"}]},
    lambda value: (
        value == "auto" or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1)
    ),
)


def _or_auto(kind: Kind) -> Kind:
    """``kind``, or "auto", which the engine replaces."""
    return Kind(
        f'{kind.words}, or "auto"',
        {"anyOf": [kind.schema, {"const": "auto"}]},
        lambda value: value if value == "auto" else kind.parse(value),
    )


COUNT_OR_AUTO, SIZE_OR_AUTO = _or_auto(COUNT), _or_auto(SIZE)
GROUP_SIZE = Kind(
    'an integer >= 1, "node", or "all"',
    {"anyOf": [COUNT.schema, {"enum": ["all", "node"]}]},
    lambda value: value if value in ("all", "node") else COUNT.parse(value),
)
PARTITION_SIZE = Kind(
    'an integer >= 1, or "node"',
    {"anyOf": [COUNT.schema, {"const": "node"}]},
    lambda value: value if value == "node" else COUNT.parse(value),
)
