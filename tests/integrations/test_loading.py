"""What loading a pretrained model takes of each rank's own memory, before an engine holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.program_runs import MISSING, Runs

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed")
MOST_MIB, FILES_MIB = 16, 48


def test_files_are_mapped_and_casts_are_rank_0s_alone(tmp_path: Path) -> None:
    runs = Runs(tmp_path, "tests.integrations.programs", "load_large", fresh=False)
    try:
        said = runs.said("load_large", 3)
    finally:
        runs.end()
    (mapped, cast, alone), losses = said[1]
    assert mapped <= MOST_MIB and cast >= FILES_MIB / 2 - 8 and alone <= 1
    assert said[0][0][0] <= MOST_MIB
    assert losses[:2] == losses[2:] and losses[0] != losses[1]
