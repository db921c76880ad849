"""The tiers: they stay as quick as they say, they touch everything, and their rule does what it says."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import HANG_S, tiers

ROOT = Path(__file__).resolve().parents[2]
QUICK_S, THOROUGH_S = 400.0, 7000.0
"""Of the recorded seconds of all tests of a tier together. Three workers recorded them on two cores, where a tier takes
two fifths of its sum: 6,500 s took 42 minutes."""


class Item:
    """What the rule looks at."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid, self.markers = nodeid, markers

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def ids(items: list[Any], record: tiers.Record) -> list[str]:
    return [item.nodeid for item in tiers.quick(items, record)]


@pytest.mark.parametrize(
    ("count", "each_s", "expected"),
    [(1, 0.0, {0}), (5, 0.0, {0, 1, 2, 3, 4}), (5, 0.1, {0, 1, 2, 3, 4}), (9, 0.2, {0, 4, 8}), (7, 0.5, {0}),
     (7, 1.9, {0}), (7, 2.1, set()), (1, 60.0, set())],
)  # fmt: skip
def test_as_many_cases_as_fit(count: int, each_s: float, expected: set[int]) -> None:
    assert tiers.chosen(count, each_s, budget_s=0.6, longest_s=2.0) == expected


def test_the_rule() -> None:
    cases = [Item(f"a.py::long[{number}]") for number in range(3)]
    record = {"a.py::long": (3, 30.0), "a.py::core": (2, 30.0), "a.py::full": (1, 0.01)}
    assert ids(cases, record) == []
    assert ids(cases, {}) == [case.nodeid for case in cases], "what was not recorded is quick"
    assert ids([Item("a.py::core[0]", "core"), Item("a.py::core[1]", "core")], record) == ["a.py::core[0]"]
    assert ids([Item("a.py::full", "full")], record) == []


def test_every_function_is_thorough_with_a_spread_of_its_cases() -> None:
    cases: list[Any] = [Item(f"a.py::many[{number}]") for number in range(9)]
    others: list[Any] = [Item("a.py::long", "full"), Item("a.py::new")]
    others += [Item(f"a.py::all[{number}]", "whole") for number in range(3)]
    record = {"a.py::many": (9, 1.8), "a.py::long": (1, 100.0), "a.py::all": (3, 90.0)}
    found = tiers.thorough([*cases, *others], record)
    assert [item.nodeid for item in found] == [
        *(f"a.py::many[{n}]" for n in (0, 4, 8)),
        "a.py::long",
        "a.py::new",
        *(f"a.py::all[{n}]" for n in range(3)),
    ]


def test_the_longest_file_comes_first() -> None:
    items: list[Any] = [Item("a.py::one"), Item("b.py::one"), Item("a.py::two")]
    tiers.longest_files_first(items, {"a.py::one": (1, 1.0), "a.py::two": (1, 1.0), "b.py::one": (1, 3.0)})
    assert [item.nodeid for item in items] == ["b.py::one", "a.py::one", "a.py::two"]


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    tiers.write({"a.py::b[1]": 1.0, "a.py::b[2]": 0.5, "a.py::c": 2.0}, {"a.py::b": 2, "a.py::c": 1}, path)
    assert tiers.read(path) == {"a.py::b": (2, 1.5), "a.py::c": (1, 2.0)}
    assert tiers.cost("a.py::b[7]", {"a.py::b": (2, 1.5)}) == 0.75 and tiers.cost("new.py::d", {}) == 0


def test_cases_that_a_tier_left_out_cost_the_mean_of_those_that_ran(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    tiers.write({"a.py::b[1]": 1.0, "a.py::b[9]": 2.0}, {"a.py::b": 9}, path)
    assert tiers.read(path) == {"a.py::b": (9, 13.5)}


def test_files_that_were_not_run_stay_in_the_record(tmp_path: Path) -> None:
    path, cases = tmp_path / "record.json", {"a.py::b": 1, "a.py::gone": 1, "c.py::d": 1, "e.py::f": 1}
    tiers.write({"a.py::b[1]": 1.0, "a.py::gone": 0.5, "c.py::d": 2.0}, cases, path)
    tiers.write({"a.py::b[1]": 3.0, "e.py::f": 1.0}, cases, path, keep=tiers.read(path))
    assert tiers.read(path) == {"a.py::b": (1, 3.0), "c.py::d": (1, 2.0), "e.py::f": (1, 1.0)}


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """The quick tests of this checkout."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", "quick", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [line.rsplit(": ", 1) for line in done.stdout.splitlines() if ".py: " in line]
    return [file for file, count in counts for _ in range(int(count))]


@pytest.mark.full  # it collects everything once more
def test_the_quick_tier_touches_every_folder_and_nearly_every_file(collected: list[str]) -> None:
    files = {path for folder in ("tests", "benchmarks/tests") for path in (ROOT / folder).rglob("test_*.py")}
    files = {path for path in files if path.parent.name != "gpu"}
    missing = {str(path.relative_to(ROOT)) for path in files} - set(collected)
    assert len(missing) <= len(files) // 20, f"files without a quick test: {sorted(missing)}"
    folders = Counter(str(Path(file).parent) for file in collected)
    assert folders.keys() == {str(path.parent.relative_to(ROOT)) for path in files}


@pytest.mark.full
@pytest.mark.parametrize(
    ("most", "rule"), [(QUICK_S, ()), (THOROUGH_S, (tiers.THOROUGH_S, math.inf))], ids=["quick", "thorough"]
)
def test_a_tier_is_as_quick_as_it_says(most: float, rule: tuple[float, ...]) -> None:
    record, spent = tiers.read(), 0.0
    for cases, seconds in record.values():
        spent += len(tiers.chosen(cases, seconds / cases, *rule)) * seconds / cases
    assert spent < most, f"{spent:.0f} s: lower the tier's budget in tests/support/tiers.py"
