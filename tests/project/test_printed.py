"""Commands of README and docs print what the pages show of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project import printed

pytest.importorskip("transformers")
SHOWN = list(printed.found())


@pytest.mark.full
@pytest.mark.parametrize("shown", SHOWN, ids=[f"{each.page} {number}" for number, each in enumerate(SHOWN)])
def test_a_command_prints_what_the_page_shows(shown: printed.Printed, tmp_path: Path) -> None:
    said = printed.run(shown.command, tmp_path)
    part = printed.differs(shown.output, said)
    assert not part, (
        f"{shown.command}\nshown:\n{part}\nprinted:\n{said}\npython -m tests.project.printed writes it anew"
    )


def test_there_are_some_and_a_difference_is_found() -> None:
    assert len([each for each in SHOWN if each.page == "docs/planning.md"]) >= 2
    assert printed.differs("a\nb\n", "x\na\nb\nc\n") == "" == printed.differs("a\n...\nc\n", "a\nb\nc\n")
    assert printed.differs("in 1.2 s\n", "in 33.4 s\n") == ""
    assert printed.differs("a\n...\nb\n", "b\na\n").strip() == "b"
    assert printed.differs("13.0 GB\n", "14.0 GB\n").strip() == "13.0 GB"
