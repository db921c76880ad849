"""Which tests are quick and which thorough, decided at collection by what they cost, so that nobody has to think of it.

`make test` runs the quick ones, `make test ALL=1` the thorough ones: every test function, and of long lists of cases a
spread. `make test EVERY=1` runs every case. What a test costs was recorded: `tests/data/durations.json` holds, for each
test function, how many cases it had and the seconds of all of them (``--record-durations`` writes it).

- Of each function as many cases are in a tier as fit into its budget, spread evenly over the list of its cases.
- Where not even one fits, one is thorough, and quick if it takes no more than ``LONGEST_S``.
- Of a file without any quick test the cheapest is quick if it takes no more than ``OF_A_FILE_S``.
- ``@pytest.mark.core``: then the first case is quick whatever it costs. For promises of which every test is long.
- ``@pytest.mark.whole``: all its cases are thorough. For cases that are promises of their own.
- ``@pytest.mark.full``: never quick. For costs that the record does not show. Nor is what needs a GPU.
- A function that was not recorded is quick: whoever writes a test runs it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[1] / "data" / "durations.json"
BUDGET_S, LONGEST_S = 0.2, 0.7
THOROUGH_S = 0.6
OF_A_FILE_S = 4.0

Record = Mapping[str, tuple[int, float]]
"""Test function ("file::function") → its cases, their seconds."""


def function_of(nodeid: str) -> str:
    """``"tests/a.py::test_b[1-x]"`` → ``"tests/a.py::test_b"``."""
    return nodeid.split("[", 1)[0]


def read(path: Path = RECORD) -> Record:
    """The record; empty where there is none."""
    if not path.exists():
        return {}
    return {name: (cases, seconds) for name, (cases, seconds) in json.loads(path.read_text(encoding="utf-8")).items()}


def write(
    seconds: Mapping[str, float], cases: Mapping[str, int], path: Path = RECORD, *, keep: Record | None = None
) -> None:
    """Record what a run of whole files took; cases that a tier left out are taken to cost the mean of those that ran.

    seconds: of each case that ran · cases: how many each function has · keep: a record whose other files stay.
    """
    ran: dict[str, list[float]] = defaultdict(list)
    for nodeid, each in seconds.items():
        ran[function_of(nodeid)].append(each)
    files = {name.split("::", 1)[0] for name in ran}
    found = {name: row for name, row in (keep or {}).items() if name.split("::", 1)[0] not in files}
    found |= {name: (cases[name], cases[name] * sum(each) / len(each)) for name, each in ran.items()}
    lines = [f"{json.dumps(name)}: [{count}, {total:.2f}]" for name, (count, total) in sorted(found.items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def cost(nodeid: str, record: Record) -> float:
    """Seconds of one case; 0 where its function was not recorded."""
    cases, seconds = record.get(function_of(nodeid), (1, 0.0))
    return seconds / cases


def chosen(count: int, each_s: float, budget_s: float = BUDGET_S, longest_s: float = LONGEST_S) -> set[int]:
    """Which of ``count`` cases that take ``each_s`` fit into ``budget_s``; one at least, up to ``longest_s``."""
    fit = count if count * each_s <= budget_s else int(budget_s / each_s + 1e-9)
    if fit == 0 and each_s <= longest_s:
        fit = 1
    return {round(number * (count - 1) / max(fit - 1, 1)) for number in range(fit)}


def quick(items: Sequence[pytest.Item], record: Record) -> Iterator[pytest.Item]:
    """Those of ``items`` that are quick."""
    left: dict[str, list[pytest.Item]] = defaultdict(list)
    files: set[str] = set()
    for function, cases in _by_function(items).items():
        numbers = chosen(len(cases), cost(function, record))
        if not numbers and cases[0].get_closest_marker("core") is not None:
            numbers = {0}
        if not any(cases[0].get_closest_marker(name) for name in ("full", "gpu")):
            files |= {_file_of(cases[0])} if numbers else set()
            left[_file_of(cases[0])].append(cases[0])
            yield from (cases[number] for number in sorted(numbers))
    for file in left.keys() - files:
        cheapest = min(left[file], key=lambda item: cost(item.nodeid, record))
        if cost(cheapest.nodeid, record) <= OF_A_FILE_S:
            yield cheapest


def thorough(items: Sequence[pytest.Item], record: Record) -> Iterator[pytest.Item]:
    """Those of ``items`` that are thorough."""
    for function, cases in _by_function(items).items():
        whole = cases[0].get_closest_marker("whole") is not None
        numbers = set(range(len(cases))) if whole else chosen(len(cases), cost(function, record), THOROUGH_S, math.inf)
        yield from (cases[number] for number in sorted(numbers))


def _by_function(items: Sequence[pytest.Item]) -> dict[str, list[pytest.Item]]:
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[function_of(item.nodeid)].append(item)
    return functions


def longest_files_first(items: list[pytest.Item], record: Record) -> None:
    """Sort by what a file's tests cost together, so that no worker begins a long file when the others are done."""
    files: dict[str, float] = defaultdict(float)
    for item in items:
        files[_file_of(item)] += cost(item.nodeid, record)
    items.sort(key=lambda item: -files[_file_of(item)])


def total(nodeids: Iterable[str], record: Record) -> float:
    """Seconds of those cases one after the other."""
    return sum(cost(nodeid, record) for nodeid in nodeids)


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.split("::", 1)[0]
