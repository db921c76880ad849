"""Names that users see stay what they are (see public_names)."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.project import public_names
from tests.support.ranks import RankPool

EXPECTED: dict[str, list[str]] = json.loads(public_names.FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def found(pools: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder: Path = tmp_path_factory.mktemp("names")
    ranks = pools(public_names.RANKS).run(public_names.collected, str(folder))
    assert ranks[0]["engine"] == ranks[1]["engine"]
    names: dict[str, list[str]] = ranks[0]
    return names


@pytest.mark.whole
@pytest.mark.parametrize("kind", list(EXPECTED))
def test_no_name_that_users_see_has_changed(found: dict[str, list[str]], kind: str) -> None:
    assert found.keys() == EXPECTED.keys()
    gone, new = set(EXPECTED[kind]) - set(found[kind]), set(found[kind]) - set(EXPECTED[kind])
    assert not gone, "users have these in their programs and files: give each an alias, and say so in the changelog"
    assert not new, "write them down: python -m tests.project.public_names"


def test_what_programs_import_is_there() -> None:
    for path in EXPECTED["used in programs"]:
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name), path
