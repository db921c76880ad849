"""What peft saves is saved: kinds of adapters, by Trainer and as accelerate's users do, at every stage; resuming."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.program_runs import MISSING, Runs, assert_equal

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed")
EVERY = {"default": "", "frozen": "frozen"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("runs"), "tests.compat.adapter_programs", "adapters")
    yield runs
    runs.end()


def files(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of all adapters in ``folder``."""
    found: dict[str, torch.Tensor] = {}
    for place in EVERY.values():
        file = folder / place / "adapter_model.safetensors"
        found |= {f"{place}/{name}": value for name, value in load_file(file).items()} if file.exists() else {}
    return found


def check(runs: Runs, stage: int, kinds: list[str], config: dict[str, bool], ranks: int = 2) -> None:
    theirs, ours = {"ranks": ranks, "options": {"kinds": kinds}}, {"ranks": ranks, "options": {"kinds": kinds}}
    runs.log(None, **theirs)
    said = runs.said("adapters", stage, **ours, config=config)
    place, expected_place = runs.output(stage, **ours, config=config), runs.output(None, **theirs)
    for number, kind in enumerate(kinds):
        expected, found = files(expected_place / kind / "final"), files(place / kind / "final")
        assert found.keys() == expected.keys() and found, kind
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-5), (kind, name)
        for way in ("every", "alone", "checkpoint-3", "resumed"):
            assert_equal(files(place / kind / way), found)
        losses, resumed = said[0][2 * number : 2 * number + 2]
        assert losses == resumed and len(losses) == 3, kind


KINDS = [
    "a classifier",
    "modules to save",
    "prompt tuning",
    "prefix tuning",
    "a resized vocabulary",
    "tokens of a resized vocabulary",
    "a second adapter and frozen halves",
]


@pytest.mark.parametrize("config", [{}, {"deepspeed": True}])
def test_what_peft_saves_of_sharded_weights_is_saved(config: dict[str, bool], runs: Runs) -> None:
    check(runs, 3, KINDS, config)


@pytest.mark.parametrize(("stage", "config"), [(0, {}), (1, {"deepspeed": True}), (2, {"deepspeed": True})])
def test_what_peft_saves_of_whole_weights_is_saved(stage: int, config: dict[str, bool], runs: Runs) -> None:
    check(runs, stage, KINDS[-3:], config)


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks(ranks: int, runs: Runs) -> None:
    check(runs, 3, ["prompt tuning", "a resized vocabulary"], {}, ranks)
