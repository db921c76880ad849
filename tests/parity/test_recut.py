"""Buckets that are cut anew after the first step: the bits of the oracle, once, and only where something is gained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardengine.comm import Purpose
from shardengine.core import rebuild
from shardengine.sharding import readiness
from tests.parity.test_changed_models import group, set_trainable
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)
SMALL = {"reduce_bucket_size": 384}
MOVES = {"0": 1, "1": 1, "2": 1, "3k": 0, "3": 0}
LAYERS = 8
"""Of a block, two of which fill a bucket."""


class Block(nn.Module):
    """Layers that are registered as 0, 4, 1, 5, 2, 6, 3, 7: each bucket waits for one of the first half."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(13, 13) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(layers[number // 2 + LAYERS // 2 * (number % 2)] for number in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(LAYERS):
            x = self.layers[2 * (number % (LAYERS // 2)) + number // (LAYERS // 2)](x).tanh()
        return x


class Shuffled(cases.Mlp):
    """As ``Mlp``, with other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))


def make_shuffled() -> nn.Module:
    torch.manual_seed(11)
    return Shuffled()


cases.MODELS["shuffled"] = make_shuffled


@contextlib.contextmanager
def small_models() -> Iterator[list[tuple[int, ...]]]:
    """What is gained in a small model counts, too. The first numbers of all layouts that were moved to."""
    moved: list[tuple[int, ...]] = []
    carry_out = rebuild._carry_out

    def watched(core: Any, model: Any, config: Any, planned: Any, optimizer: Any) -> Any:
        moved.append(tuple(slot.parameter for flat in planned.layout.flat_buffers for slot in flat.slots))
        return carry_out(core, model, config, planned, optimizer)

    with (
        mock.patch.object(readiness, "FIRST_BUCKET_ELEMENTS", 0),
        mock.patch.object(rebuild, "_carry_out", watched),
    ):
        yield moved


def train(model: str, kind: str, stage: str, micros: int = 1, **options: Any) -> dict[str, Any]:
    with small_models() as moved:
        zero = {**SMALL, **options.pop("zero", {})}
        result = cases.train_engine(model, kind, cases.config_of(stage, micros, zero=zero, **options))
    return {**result, "moved": moved}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("ranks", "kind", "micros"), [(2, "AdamW", 1), (3, "SGD", 3), (3, "AdamW", 1), (2, "SGD", 1)])
def test_bits_are_those_of_the_oracle(pools: Pools, ranks: int, kind: str, micros: int, stage: str) -> None:
    results = pools(ranks).run(train, "shuffled", kind, stage, micros)
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, cases.truth("shuffled", kind, ranks, micros, order))
    assert all(len(r["moved"]) == MOVES[stage] and r["moved"] == results[0]["moved"] for r in results)


@pytest.mark.parametrize("stage", STAGES)
def test_what_comes_as_expected_stays(pools: Pools, stage: str) -> None:
    assert not pools(2).run(train, "mlp", "AdamW", stage)[0]["moved"]


def test_large_models_alone_move_by_default(pools: Pools) -> None:
    assert not pools(2).run(count_by_default)[0]


def count_by_default() -> int:
    with mock.patch.object(rebuild, "_carry_out", side_effect=AssertionError("moved")) as moved:
        cases.train_engine("shuffled", "AdamW", cases.config_of("0", zero=SMALL), 3)
    return moved.call_count


CHOICES: dict[str, dict[str, Any]] = {
    "offloaded": {"zero": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    "stepped in backward": {"zero": {"offload_optimizer": {"device": "cpu", "step_in_backward": True}}},
    "bf16": {"bf16": {"enabled": True}},
    "late gathers": {"overlap_param_gather": True},
    "8 bits": {"data_types": {"optimizer_state_dtype": "8bit"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 40}},
    "averages": {"ema": {"decay": 0.9}},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
    "Adafactor": {"optimizer": {"type": "Adafactor", "params": {"lr": 0.01}}},
}


def train_both(stage: str, choice: str) -> tuple[list[Any], list[Any]]:
    """With and without, whatever is gained. What steps in backward does not clip."""
    options, kind = dict(CHOICES[choice]), None if "optimizer" in CHOICES[choice] else "AdamW"
    options = {"gradient_clipping": 0.0, **options} if choice == "stepped in backward" else options
    zero, found, counts = {**SMALL, **options.pop("zero", {})}, [], []
    for wanted in (True, False):
        with small_models() as moved, mock.patch.object(rebuild, "is_worth_moving", lambda *_: True):
            config = cases.config_of(stage, zero={**zero, "recut_buckets": wanted}, **options)
            found.append(cases.train_engine("shuffled", kind, config, 5))  # type: ignore[arg-type]
        counts.append(len(moved))
    return found, counts


@pytest.mark.parametrize(
    ("stage", "choice"),
    [(stage, choice) for stage in "012" for choice in CHOICES if (stage, choice) != ("0", "stepped in backward")],
)
def test_whatever_moves_keeps_its_bits(pools: Pools, stage: str, choice: str) -> None:
    results = pools(2).run(train_both, stage, choice)
    runs = [[result[0][number] for result in results] for number in (0, 1)]
    assert all(result[1] == [1, 0] for result in results)
    for moved, calm in zip(*runs, strict=True):
        for key in ("losses", "norms", "scales", "skipped"):
            assert moved[key] == calm[key]
    assert cases.digest([run["state"] for run in runs[0]]) == cases.digest([run["state"] for run in runs[1]])


def train_hybrid_with_a_hook(wanted: bool) -> tuple[dict[str, Any], int]:
    """On shard groups, with errors that are fed back, and a rank that runs out of data."""
    with small_models() as moved, mock.patch.object(rebuild, "is_worth_moving", lambda *_: True):
        zero = {**SMALL, "recut_buckets": wanted}
        config = cases.config_of("2 hybrid", zero=zero, comm_hook={"name": "int4"})
        engine = cases.make_engine(make_shuffled(), config)
        losses = []
        with engine.join():
            for step in range(5 if engine.rank else 3):
                losses.append(cases.run_micro_batch(engine, cases.loss_of, step, 0))
        weights = {name: cases.copy_out(value).numpy() for name, value in engine.state_dict().items()}
        engine.close()
    return {"losses": losses, "weights": weights}, len(moved)


def test_shard_groups_hooks_and_joins_go_along(pools: Pools) -> None:
    moved, calm = (pools(4).run(train_hybrid_with_a_hook, wanted) for wanted in (True, False))
    assert [count for _, count in moved] == [1] * 4 and [count for _, count in calm] == [0] * 4
    for (one, _), (other, _) in zip(moved, calm, strict=True):
        assert one["losses"] == other["losses"]
        assert all((one["weights"][name] == value).all() for name, value in other["weights"].items())


def save_and_go_on(stage: str, folder: str, ahead: bool) -> list[Any]:
    """A checkpoint that is written behind the move, and loaded into an engine that has moved, or has not."""
    checkpoint = {"async_save": True}
    with small_models() as moved:
        engine = cases.make_engine(make_shuffled(), cases.config_of(stage, zero=SMALL, checkpoint=checkpoint))
        micro = cases.run_micro_batch
        engine.save_checkpoint(folder, "start")
        losses = [micro(engine, cases.loss_of, 0, 0)]
        engine.save_checkpoint(folder, "moved")
        losses += [micro(engine, cases.loss_of, step, 0) for step in (1, 2)]
        engine.load_checkpoint(folder, "start")
        again = [micro(engine, cases.loss_of, step, 0) for step in (0, 1, 2)]
        other = cases.make_engine(make_shuffled(), cases.config_of(stage, zero=SMALL))
        if ahead:
            micro(other, cases.loss_of, 5, 0)
        other.load_checkpoint(folder, "moved")
        rest = [micro(other, cases.loss_of, step, 0) for step in (1, 2)]
        for each in (engine, other):
            each.close()
    return [losses, again, rest, len(moved)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_checkpoints_know_no_layout(pools: Pools, tmp_path: Path, stage: str, ahead: bool) -> None:
    losses, again, rest, moves = pools(2).run(save_and_go_on, stage, str(tmp_path), ahead)[0]
    assert losses == again and losses[1:] == rest and moves == 2


def unfreeze(stage: str) -> list[Any]:
    with small_models() as moved:
        model: Any = make_shuffled()
        set_trainable(model.blocks[0], False)
        engine = cases.make_engine(model, cases.config_of(stage, zero=SMALL))
        cases.run_micro_batch(engine, cases.loss_of, 0, 0)
        assert engine.optimizer is not None
        engine.optimizer.add_param_group(group("AdamW", set_trainable(model.blocks[0], True)))
        for step in (1, 2, 3):
            cases.run_micro_batch(engine, cases.loss_of, step, 0)
        engine.close()
    return moved


def test_a_layout_for_new_parameters_is_cut_anew_once_more(pools: Pools) -> None:
    """The first order, what registration says with the new ones, their order."""
    first, second, third = pools(2).run(unfreeze, "1")[0]
    assert len(first) < len(second) == len(third) and sorted(second) == sorted(third) and second != third


def sent_by_a_move(stage: str) -> tuple[int, int]:
    with small_models() as moved:
        engine = cases.make_engine(make_shuffled(), cases.config_of(stage, zero=SMALL))
        for step in range(3):
            cases.run_micro_batch(engine, cases.loss_of, step, 0)
        sent = engine._core.collectives.sent[Purpose.REBUILD]
        engine.close()
    return len(moved), sent


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_are_those_of_what_is_sharded_once(pools: Pools, stage: str) -> None:
    """At stage 0 every rank has everything."""
    moves, sent = pools(2).run(sent_by_a_move, stage)[0]
    engine = cases.make_engine(make_shuffled(), cases.config_of(stage, zero=SMALL))
    elements = engine._core.layout.elements(trainable=True)
    engine.close()
    kept = {"0": 0, "1": 2, "2": 2, "3k": 0, "3": 0}[stage]
    assert moves == MOVES[stage] and sent == 4 * kept * elements // 2


def in_files(folder: str) -> int:
    with small_models() as moved:
        offload = {"device": "nvme", "nvme_path": folder}
        config = cases.config_of("1", zero={**SMALL, "offload_optimizer": offload})
        cases.train_engine("shuffled", "AdamW", config, 3)
    return len(moved)


def test_states_in_files_stay(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(in_files, str(tmp_path)) == [0, 0]


def disagree(stage: str) -> tuple[list[float], list[tuple[int, ...]]]:
    """Rank 1 has seen its gradients come the other way round."""
    with small_models() as moved:
        engine = cases.make_engine(make_shuffled(), cases.config_of(stage, zero=SMALL))
        adopt = type(engine._core.reducer._order).adopt

        def turned(order: Any, collectives: Any, came: list[int]) -> list[int]:
            return adopt(order, collectives, came[::-1] if engine.rank else came)

        with mock.patch.object(type(engine._core.reducer._order), "adopt", turned):
            losses = [cases.run_micro_batch(engine, cases.loss_of, step, 0) for step in range(4)]
        engine.close()
    return losses, moved


@pytest.mark.parametrize("stage", ["0", "2"])
def test_the_order_is_that_of_rank_0(pools: Pools, stage: str) -> None:
    found = pools(2).run(disagree, stage)
    truth = cases.truth("shuffled", "AdamW", 2, 1, "full")
    for rank, (losses, moved) in enumerate(found):
        assert moved == found[0][1] and len(moved) == 1
        assert [[loss] for loss in losses] == [row[rank] for row in truth.losses[:4]]
