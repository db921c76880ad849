"""Inf and NaN in gradients: the step is skipped on all ranks, is an error, or is taken, as the config says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.checkpoint import index as index_module
from shardengine.errors import ConfigError, NonfiniteGradientError, UsageError
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
BAD = {1: float("nan"), 3: float("inf")}
"""Step → what the loss of one rank is multiplied with."""
STEPS = 5
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}),
    "bf16, no masters": (
        {"bf16": {"enabled": True, "master_weights": False}}, {"low": torch.bfloat16, "keeps_masters": False},
    ),
}  # fmt: skip


class Sum(nn.Module):
    """Gradients are its inputs, so that a test decides them. ``unused`` never has one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(20))
        self.second = nn.Parameter(torch.ones(3, 7))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: float, y: float) -> Tensor:
        return ((self.first * x).sum() + (self.second * y).sum()).float()


def engine_of(stage: str, **options: Any) -> Any:
    return cases.make_engine(Sum(), cases.config_of(stage, **options), "AdamW")


def step(engine: Any, x: float, y: float = 1.0) -> bool:
    engine.backward(engine(x, y))
    engine.step()
    return bool(engine.was_step_applied())


def bad_loss(culprit: int) -> cases.LossOf:
    def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
        loss = cases.loss_of(model, step, rank, micro)
        return loss * BAD[step] if step in BAD and rank == culprit and micro == 0 else loss

    return loss_of


def train(stage: str, kind: str, micros: int, culprit: int, options: dict[str, Any]) -> dict[str, Any]:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, micros, **options), kind)
    result = cases.run_steps(engine, STEPS, bad_loss(culprit))
    result["counted"] = (engine.skipped_steps, engine.global_steps, max(cases.steps_of(engine)))
    engine.close()
    return result


@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize(
    ("ranks", "culprit", "kind", "micros", "precision"),
    [
        (1, 0, "AdamW", 1, "fp32"), (2, 1, "SGD", 3, "fp32"), (3, 0, "AdamW", 1, "bf16"), (2, 0, "AdamW", 3, "bf16"),
        (2, 1, "SGD", 1, "bf16, no masters"),
    ],
)  # fmt: skip
def test_such_a_step_is_left_out_on_all_ranks(
    pools: Pools, stage: str, ranks: int, culprit: int, kind: str, micros: int, precision: str
) -> None:
    said, told = PRECISIONS[precision]
    results = pools(ranks).run(train, stage, kind, micros, culprit, said)
    model = cases.make_mlp()
    order = cases.LETTER[stage] if micros > 1 else "full"
    truth = oracle.train(
        model, bad_loss(culprit), ranks=ranks, micros=micros, steps=STEPS, kind=kind,
        groups=cases.groups_of(model, kind), order=order, clip=cases.CLIP, **told,
    )  # fmt: skip
    assert truth.skipped == sorted(BAD)
    assert_equal_to_truth(results, truth, stage)
    assert all(result["counted"] == (2, STEPS, STEPS - 2) for result in results)


def autocast(stage: str) -> list[Any]:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, torch_autocast={"enabled": True}), "AdamW")
    seen = []
    for number in range(3):
        before = [values for *_, values in cases.local_state(engine)]
        loss = cases.loss_of(engine, number, engine.rank, 0)
        engine.backward(loss * (float("inf") if number == 1 and engine.rank == 0 else 1))
        engine.step()
        same = all((a == b[3]).all() for a, b in zip(before, cases.local_state(engine), strict=True))
        seen.append((engine.was_step_applied(), same))
    finite = all(torch.isfinite(value).all() for value in engine.state_dict().values())
    engine.close()
    return [seen[1], [applied for applied, _ in seen], finite]


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_under_autocast(pools: Pools, stage: str) -> None:
    assert pools(2).run(autocast, stage) == [[(False, True), [True, False, True], True]] * 2


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def said_once(stage: str) -> list[Any]:
    heard = Lines()
    logging.getLogger("shardengine").addHandler(heard)
    engine = engine_of(stage)
    schedule = []
    for x, y in ((1.0, 1.0), (1.0, float("nan")), (float("inf"), 1.0), (1.0, 1.0)):
        culprit = engine.rank == engine.world_size - 1
        step(engine, x if culprit else 1.0, y if culprit else 1.0)
        schedule.append((engine.was_step_applied(), engine.skipped_steps))
    engine.close()
    logging.getLogger("shardengine").removeHandler(heard)
    return [schedule, [line for line in heard.lines if "skipped" in line]]


@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_is_said_once_with_the_parameters(pools: Pools, stage: str, ranks: int) -> None:
    results = pools(ranks).run(said_once, stage)
    for rank, (schedule, lines) in enumerate(results):
        assert schedule == [(True, 0), (False, 1), (False, 2), (True, 2)]
        assert len(lines) == (rank == 0)
    (line,) = results[0][1]
    assert line.startswith("step 2 was skipped on all ranks: expected finite gradients, got Inf or NaN in 'second'.")
    assert "20 in a row are an error (max_nonfinite_steps)" in line


def raised(stage: str, options: dict[str, Any], rounds: int) -> list[Any]:
    """Good steps, then bad ones until an error comes: its text, when it came, and whether training goes on."""
    engine = engine_of(stage, **options)
    step(engine, 1.0)
    before, text, came = [values for *_, values in cases.local_state(engine)], "", 0
    for number in range(rounds):
        try:
            step(engine, float("nan") if engine.rank == 0 else 1.0)
        except NonfiniteGradientError as error:
            text, came = str(error).replace(f"rank {engine.rank}:", "rank R:"), number + 1
            break
    same = all((a == b[3]).all() for a, b in zip(before, cases.local_state(engine), strict=True))
    went_on = step(engine, 1.0)
    found = [text, came, same, went_on, engine.skipped_steps]
    engine.close()
    return found


@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize(
    ("options", "came"),
    [({"nonfinite_gradients": "raise"}, 1), ({"max_nonfinite_steps": 3}, 3), ({"max_nonfinite_steps": 0}, 0)],
)
def test_an_error_names_the_parameters_on_every_rank(
    pools: Pools, stage: str, options: dict[str, Any], came: int
) -> None:
    results = pools(2).run(raised, stage, options, 5)
    assert results[0] == results[1]
    text, when, same, went_on, skipped = results[0]
    assert (when, same, went_on) == (came, True, True) and skipped == (came or 5)
    if came:
        often = " in 3 steps in a row (max_nonfinite_steps)" if came == 3 else ""
        assert text.startswith(
            f"gradients are not finite{often}, rank R: expected finite ones, got Inf or NaN in 'first'."
        )
        assert "The step was skipped, the weights are those of the last one" in text


def test_a_good_step_ends_a_row() -> None:
    engine = engine_of("2", max_nonfinite_steps=2)
    for _ in range(3):
        assert not step(engine, float("nan")) and step(engine, 1.0)
    assert not step(engine, float("nan"))
    with raises("grad-nonfinite", "in 2 steps in a row"):
        step(engine, float("nan"))
    assert engine.skipped_steps == 5
    engine.close()


def test_gradients_whose_norm_is_too_large_are_left_out_and_said_to_be_finite() -> None:
    engine = engine_of("2", nonfinite_gradients="raise")
    with raises("grad-nonfinite", "got finite ones whose norm is larger than fp32 holds"):
        step(engine, 3e38)
    engine.close()


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_the_step_can_be_taken_anyway(stage: str) -> None:
    unchecked = {"bf16": {"enabled": True, "check_grad_overflow": False}}
    for options in ({"nonfinite_gradients": "step"}, unchecked):
        engine = engine_of(stage, gradient_clipping=0.0, **options)
        assert step(engine, float("nan")) and engine.skipped_steps == 0
        assert engine.state_dict()["first"].isnan().all() and not engine.state_dict()["second"].isnan().any()
        engine.close()


def test_a_fixed_loss_scale_knows_a_row_too() -> None:
    config = cases.config_of("2", fp16={"enabled": True, "loss_scale": 8.0}, max_nonfinite_steps=2)
    engine = cases.make_engine(Sum(), config, "AdamW")
    assert not step(engine, float("nan"))
    with raises("grad-nonfinite", "in 2 steps"):
        step(engine, float("nan"))
    engine.close()


def test_the_keys() -> None:
    def load(**keys: Any) -> Any:
        return shardengine.load_config({"train_micro_batch_size_per_gpu": 1, **keys})

    assert load(bf16={"enabled": True, "check_grad_overflow": True}).nonfinite_gradients == "skip"
    unused = load(bf16={"enabled": False, "check_grad_overflow": False})
    assert unused.nonfinite_gradients is None and "bf16.enabled is not true" in " ".join(unused.notices)
    with pytest.raises(ConfigError, match='expected "skip" with a dynamic loss scale'):
        load(fp16={"enabled": True}, nonfinite_gradients="raise")
    with pytest.raises(ConfigError, match="nonfinite_gradients"):
        load(nonfinite_gradients="ignore")
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu", "step_in_backward": True}}
    with pytest.raises(ConfigError, match=r'nonfinite_gradients "raise" .its default here. or "step", got "skip"'):
        load(zero_optimization=offload, nonfinite_gradients="skip")
    assert load(zero_optimization=offload).nonfinite_gradients is None


# Stepping in backward


def in_backward(stage: str, **options: Any) -> Any:
    away = {"offload_optimizer": {"device": "cpu", "step_in_backward": True}, "reduce_bucket_size": 32}
    return engine_of(stage, gradient_clipping=0.0, zero=away, **options)


def spoiled(stage: str, x: float, y: float) -> list[Any]:
    """Two good steps, so that buckets are stepped early, then a bad one on the last rank; what reset() says."""
    engine = in_backward(stage)
    for _ in range(2):
        step(engine, 1.0)
    weights = engine.state_dict()
    culprit = engine.rank == engine.world_size - 1
    try:
        step(engine, x if culprit else 1.0, y if culprit else 1.0)
        text = "no error"
    except NonfiniteGradientError as error:
        text = str(error)
    same = all(torch.equal(weights[name], value) for name, value in engine.state_dict().items())
    try:
        engine.reset()
        reset = "fine"
    except UsageError as error:
        reset = str(error)
    engine.close()
    return [text, same, reset]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_steps_in_backward_says_that_it_cannot_take_back(pools: Pools, stage: str, ranks: int) -> None:
    results = pools(ranks).run(spoiled, stage, float("nan"), 1.0)
    for text, same, reset in results:
        assert "got Inf or NaN in 'first'" in text and "engine.reset() on every rank" in text
        assert same, "no weight is written"
        assert reset == "fine" or "engine.load_checkpoint() on every rank" in reset
    assert len({reset for *_, reset in results}) == 1


def test_where_nothing_was_stepped_yet_the_window_is_dropped(pools: Pools) -> None:
    """All gradients are bad, so no bucket goes early (but where a rank's slice is nothing but padding)."""
    results = pools(1).run(spoiled, "2", float("nan"), float("nan"))
    assert all(same and reset == "fine" for _, same, reset in results)


def test_stepping_in_backward_takes_the_step_where_told() -> None:
    engine = in_backward("2", nonfinite_gradients="step")
    for x in (1.0, 1.0, float("nan")):
        step(engine, x)
    assert engine.state_dict()["first"].isnan().all()
    engine.close()


# Elsewhere


def counted_on(folder: str, options: dict[str, Any]) -> list[int]:
    engine = engine_of("2", max_nonfinite_steps=3)
    for x in (1.0, float("nan"), float("nan")):
        step(engine, x)
    engine.save_checkpoint(folder)
    engine.close()
    engine = engine_of("3", max_nonfinite_steps=3, **options)
    engine.load_checkpoint(folder)
    found = [engine.skipped_steps, int(engine.get_loss_scale())]
    if not options:
        with pytest.raises(NonfiniteGradientError, match="in 3 steps in a row"):
            step(engine, float("nan"))
    engine.close()
    return found


def test_a_checkpoint_counts_on(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(counted_on, str(tmp_path), {}) == [[2, 1]] * 2


def test_a_loss_scale_does_not_begin_with_that_of_a_run_without(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(counted_on, str(tmp_path), {"fp16": {"enabled": True}}) == [[2, 2**16]] * 2


def test_what_an_index_may_say_of_it() -> None:
    """One of before has no loss scaler for fp32, and no count of a row for fp16."""
    is_valid, known = index_module._is_loss_scaler, {"scale": 8.0, "good": 1, "tolerated": 2, "skipped": 3}
    assert is_valid(None) and is_valid(known) and is_valid({**known, "in_a_row": 2, "dynamic": False})
    assert not is_valid({**known, "in_a_row": -1}) and not is_valid({**known, "dynamic": "no"})


@pytest.mark.parametrize("zero", [{"offload_optimizer": {"device": "cpu"}}, {"offload_optimizer": {"device": "nvme"}}])
def test_where_states_rest_elsewhere(tmp_path: Path, zero: dict[str, Any]) -> None:
    if zero["offload_optimizer"]["device"] == "nvme":
        zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    engine, plain = engine_of("3", zero=zero), engine_of("3")
    for x in (1.0, float("nan"), 0.5, float("inf"), 0.25):
        assert step(engine, x) == step(plain, x)
    ours, theirs = engine.state_dict(), plain.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    engine.close()
    plain.close()
