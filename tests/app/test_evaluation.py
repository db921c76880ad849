"""`--eval`: the same number at any number of ranks, of all rows; training does not see it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import shardengine
from shardengine.app import data, evaluation
from shardengine.app.data import IGNORED, Rows
from shardengine.app.rank_sums import RankSums
from tests.app import tiny_chat
from tests.app.test_global_mean import unequal_rows
from tests.app.test_resume import Pools, config, curve, run, tiny, weights
from tests.support.cases import STAGES, make_llama, mesh_of_this_process

__all__ = ["tiny"]  # a fixture
MICRO = 2


def without_valid_tokens() -> Rows:
    """Rows of which the last batch has nothing to predict."""
    rows = unequal_rows(7)
    labels = rows.labels.clone()
    labels[6] = IGNORED
    return Rows(rows.input_ids, labels, rows.attention_mask)


def draw(*_: object) -> None:
    """As models do in forward that add noise, also in evaluation."""
    torch.rand(3)


def losses_case(stage: str) -> list[float]:
    """Of files with many rows, with fewer than ranks, and with a batch that has nothing to predict."""
    rank_sums = RankSums(mesh_of_this_process())
    settings = {"train_micro_batch_size_per_gpu": MICRO, "zero_optimization": STAGES[stage]}
    engine = shardengine.initialize(make_llama(), {**settings, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
                                    mesh=rank_sums.mesh)  # fmt: skip
    drawing = engine.module.register_forward_pre_hook(draw)
    before = torch.get_rng_state()
    found = [evaluation.validate(engine, rows, rank_sums) for rows in (unequal_rows(23), unequal_rows(1))]
    assert engine.module.training and torch.equal(torch.get_rng_state(), before)
    drawing.remove()
    engine.eval()
    found.append(evaluation.validate(engine, without_valid_tokens(), rank_sums))
    assert not engine.module.training
    engine.close()
    return found


@torch.no_grad()
def plain(rows: Rows) -> float:
    """By transformers alone."""
    total, count = [], 0
    for start in range(0, len(rows), MICRO):
        batch = rows.batch(slice(start, start + MICRO))
        if valid := data.valid_tokens(batch):
            total.append(float(make_llama().eval()(**batch, use_cache=False).loss) * valid)
            count += valid
    return math.fsum(total) / count


def test_the_loss_has_the_same_bits_at_any_stage_and_number_of_ranks(pools: Pools):
    expected = [plain(rows) for rows in (unequal_rows(23), unequal_rows(1), without_valid_tokens())]
    for ranks, stage in ((1, "0"), (2, "0"), (2, "3"), (3, "3")):
        assert pools(ranks).run(losses_case, stage) == [expected] * ranks


def test_the_order_of_batches_and_ranks_does_not_count():
    class Sums:
        def each(self, values: list[float]) -> list[list[float]]:
            return [values, *parts]

    class Engine(torch.nn.Module):
        module = property(lambda self: self)
        device, rank, world_size = torch.device("cpu"), 0, 1
        train_micro_batch_size_per_gpu = staticmethod(lambda: 2)

        def forward(self, use_cache: bool, **batch: torch.Tensor):
            return type("Output", (), {"loss": torch.tensor(1e-8)})

    one = Rows(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64))
    parts = [[1e16, 1.0], [1.0, 1.0], [-1e16, 1.0]]
    assert evaluation.validate(Engine(), one, Sums()) == pytest.approx((1 + 4e-8) / 7, rel=1e-9)  # type: ignore[arg-type]


def validations(output: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def test_validating_changes_no_bit_of_training(pools: Pools, tiny: Path, tmp_path: Path):
    """With a model that drops out. One held-out file of fewer rows than ranks, one that trains as well."""
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("The dog sleeps.", encoding="utf-8")
    common = ["--config", config(tmp_path / "c.json", 2), "--model", tiny / "model", "--data", tiny / "text.txt"]
    common += ["--steps", 5]
    every, seldom, other = (tmp_path / name for name in ("every", "seldom", "other"))
    out = run(pools(2), *common, "--output", every, "--eval", held_out, "--eval-every", 1)
    assert f"to validate of {held_out}, blocks of 32" in out
    run(pools(2), *common, "--output", seldom, "--eval", held_out, "--eval-every", 4, "--save-every", 2, stop_after=3)
    run(pools(2), "--resume", seldom, "--eval", held_out.rename(tmp_path / "moved.txt"), "--eval-every", 4)
    run(pools(2), *common, "--output", other, "--eval", tiny / "text.txt", "--eval-every", 3)
    assert curve(every) == curve(seldom) == curve(other)
    assert weights(every) == weights(seldom) == weights(other)
    assert list(validations(every)) == [0, 1, 2, 3, 4, 5]
    assert validations(seldom) == {step: validations(every)[step] for step in (0, 3, 4, 5)}  # 3: stopped
    assert list(validations(other)) == [0, 3, 5]


def test_from_config_is_the_same_on_every_rank_and_as_the_seed_says(pools: Pools, tmp_path: Path):
    folder = tiny_chat.save(tmp_path / "model")
    (folder / "model.safetensors").unlink()  # only the config is read
    path = tiny_chat.write(tmp_path / "chat.jsonl", *tiny_chat.many(12))
    common = ["--config", config(tmp_path / "c.json", 0), "--model", folder, "--data", path, "--steps", 1]
    common += ["--init", "from-config", "--eval", path]
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    out = run(pools(2), *common, "--seed", 3, "--output", first, "--save-every", 1)
    assert f"model:       {folder}, random weights of seed 3" in out
    run(pools(1), *common, "--seed", 3, "--output", again)
    run(pools(2), *common, "--seed", 4, "--output", other)
    assert validations(first)[0] == validations(again)[0] != validations(other)[0]
    assert json.loads((first / "shardengine.json").read_text(encoding="utf-8"))["seed"] == 3
    assert "step     2/2" in run(pools(2), "--resume", first, "--steps", 2, "--seed", 3)
