"""docs/api.md: what its table and its directives name is there, and the page has all of the package and the engine."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

from tests.project import public_names

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
NAMES: dict[str, list[str]] = json.loads(public_names.FILE.read_text(encoding="utf-8"))
SHOWN = re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE)
ELSEWHERE = {"__version__", "Mesh", "ShardEngineError", "ConfigError"}
"""In the package, and not on the page: a text, the result of a call; the exceptions stand under errors."""


def test_what_is_shown_is_there() -> None:
    for path in SHOWN:
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name), path
    assert {f"shardengine.{name}" for name in NAMES["package"]} - {f"shardengine.{name}" for name in ELSEWHERE} <= {
        *SHOWN
    }
    assert {*public_names.USED_IN_PROGRAMS, "shardengine.errors"} <= {*SHOWN}


def test_the_table_names_what_the_engine_has() -> None:
    known = {name.partition("(")[0] for name in NAMES["engine"]}
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert len(named) > 25 and named <= known
