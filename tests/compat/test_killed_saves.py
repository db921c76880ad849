"""A rank of a Trainer is killed while it saves: the others end with its number, and training goes on as if it had not.

What is killed is not only the engine's save, but Trainer's own files around it as well.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.program_runs import MISSING, Runs, assert_same

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed")
STAGE = 3
ONE = {"save_total_limit": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("killed"), "tests.compat.trainers", "train")
    yield runs
    runs.end()


@pytest.fixture(scope="module")
def operations(runs: Runs) -> list[int]:
    """How many operations on files the second save is, of each rank."""
    return [len(words[0]) for words in runs.said("die_while_saving", STAGE, options=ONE)]


@pytest.mark.parametrize(("rank", "share"), [(0, 0.0), (0, 0.3), (0, 0.6), (0, 0.75), (0, 0.99), (1, 0.0), (1, 0.5)])
def test_training_goes_on_from_the_last_whole_checkpoint(
    rank: int, share: float, operations: list[int], runs: Runs
) -> None:
    dies = (rank, int(share * operations[rank]))
    said = runs.said("die_while_saving", STAGE, dies=dies, options=ONE)
    assert said[rank] == []
    for word in said[1 - rank]:  # once the engine has saved, the others wait in a barrier of torch's own
        assert f"rank {rank}" in word or (share > 0.9 and "RuntimeError" in word and "Connection" in word)
    output = runs.output(STAGE, dies=dies, options=ONE)
    ((newest,), same) = runs.said("resume_from_newest", STAGE, dies=dies, options=ONE)
    assert same == [newest]
    if newest != "nothing":  # transformers takes the highest number, whole or not
        assert "No such file" in newest and "checkpoint-4/trainer_state.json" in newest
        assert said[1 - rank] != []
        assert_same(runs.log(STAGE, resume=str(output / "checkpoint-2")), runs.log(STAGE))


def test_a_damaged_checkpoint_names_the_one_beside_it(runs: Runs) -> None:
    runs.log(STAGE)
    output = runs.output(STAGE, k=2, options={"seed": 5})
    shutil.copytree(runs.output(STAGE), output)
    shutil.rmtree(output / "checkpoint-6", ignore_errors=True)
    file = next(Path(output, "checkpoint-4", "global_step4").glob("*.safetensors"))
    damaged = bytearray(file.read_bytes())
    damaged[-9] ^= 1
    file.write_bytes(damaged)
    for (said,) in runs.said("resume_from_newest", STAGE, options={"seed": 5}):
        assert "CheckpointError" in said and f"the newest beside it is in {output / 'checkpoint-2'}" in said
