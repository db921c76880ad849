"""The loss scale: the sequences that it goes through, and what an overflow does to a training."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.checkpoint import index as index_module
from shardengine.errors import LossScaleError, UsageError
from shardengine.optim import LossScaler
from shardengine.sharding import ScalePolicy
from tests import oracle
from tests.engine.test_recovery import fail_once, stop_after_buckets
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool
from tests.support.special_models import Boom

Pools = Callable[[int], RankPool]


def scales(policy: ScalePolicy, overflows: str) -> list[float]:
    """The scale after each step of ``overflows``: "x" one with an overflow, "." one without."""
    scaler, found = LossScaler(policy), []
    for step in overflows:
        scaler.update(step == "x")
        found.append(scaler.scale)
    assert scaler.skipped == overflows.count("x")
    return found


# The sequences that ZeRO engines publish for their dynamic scale: power 8 or 4, window 2


def test_without_overflow_the_scale_doubles_once_per_window() -> None:
    found = scales(ScalePolicy(initial=2.0**8, window=2), ".." * 5)
    assert found == [256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096, 8192]


def test_with_nothing_but_overflows_the_scale_halves_down_to_its_minimum() -> None:
    policy = ScalePolicy(initial=2.0**4, window=2, hysteresis=1)
    assert scales(policy, "xxxxxxx") == [8, 4, 2, 1, 1, 1, 1]
    assert scales(ScalePolicy(initial=2.0**4, window=2, hysteresis=1, minimum=4.0), "xxxx") == [8, 4, 4, 4]


def test_some_overflows_halve_and_later_windows_double() -> None:
    """Two overflows, window + 1 good steps, an overflow, window - 1 and window good steps."""
    policy = ScalePolicy(initial=2.0**4, window=2, hysteresis=1)
    assert scales(policy, "xx" + "..." + "x" + "." + "..") == [8, 4, 4, 8, 8, 4, 4, 8, 8]


def test_hysteresis_tolerates_overflows_until_the_scale_has_doubled() -> None:
    policy = ScalePolicy(initial=2.0**4, window=2, hysteresis=3)
    assert scales(policy, "xxxx") == [16, 16, 8, 4]
    assert scales(policy, "xx.xx..x") == [16, 16, 16, 8, 4, 4, 8, 8], "doubling makes the tolerance whole again"


def test_consecutive_hysteresis_is_whole_again_after_every_good_step() -> None:
    policy = ScalePolicy(initial=2.0**4, window=100, hysteresis=2, consecutive=True)
    assert scales(policy, "x.x.xx.x") == [16, 16, 16, 16, 16, 8, 8, 8]
    assert scales(ScalePolicy(initial=2.0**4, window=100, hysteresis=2), "x.x.xx.x") == [16, 16, 8, 8, 4, 2, 2, 1]


def test_a_fixed_scale_stays_and_is_never_exhausted() -> None:
    policy = ScalePolicy(initial=100.0, window=1, dynamic=False)
    assert scales(policy, "xx..x") == [100.0] * 5
    assert not LossScaler(policy).is_exhausted


def test_the_scale_stays_a_number_of_fp32() -> None:
    assert scales(ScalePolicy(initial=2.0**126, window=1), "...") == [2.0**127] * 3


@pytest.mark.parametrize("overflows", ["x..x.xx...", "....xxxx.."])
@pytest.mark.parametrize("cut", [1, 4, 7])
def test_a_scaler_goes_on_from_its_state(overflows: str, cut: int) -> None:
    policy = ScalePolicy(initial=2.0**8, window=2, hysteresis=2)
    first, second = LossScaler(policy), LossScaler(policy)
    for step in overflows[:cut]:
        first.update(step == "x")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in overflows[cut:]:
        first.update(step == "x")
        second.update(step == "x")
    assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize("overflows", ["x.x..x", "xxxxxxxx", "....xx.x....", "x" * 5 + "." * 9])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_oracles_scaler_is_the_same(overflows: str, hysteresis: int) -> None:
    theirs = oracle.Scaler(2.0**6, 3, hysteresis, 2.0)
    found = []
    for step in overflows:
        theirs.update(step == "x")
        found.append(theirs.scale)
    assert found == scales(ScalePolicy(2.0**6, 3, hysteresis, 2.0), overflows)


# In a training


class Sum(nn.Module):
    """Gradients are its inputs, so that a test decides them. ``unused`` never has one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(20))
        self.second = nn.Parameter(torch.ones(3, 7))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ((self.first * x).sum() + (self.second * y).sum()).float()


def engine_of(stage: str, scale: dict[str, Any], **options: Any) -> Any:
    schedule = options.pop("schedule", None)
    config = cases.config_of(stage, options.pop("micros", 1), fp16={"enabled": True, **scale}, **options)
    return cases.make_engine(Sum(), config, "AdamW", lr_scheduler=schedule)


def step(engine: Any, x: float, y: float = 1.0) -> bool:
    inputs = torch.full((20,), x, dtype=torch.float16), torch.full((3, 7), y, dtype=torch.float16)
    engine.backward(engine(*inputs))
    engine.step()
    return bool(engine.was_step_applied())


def overflow_on_one_rank(stage: str, culprit: int) -> list[Any]:
    """Two good steps, one in which ``culprit`` alone overflows, two good ones: what this rank sees after each."""

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch))

    engine = engine_of(stage, {"initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 100}, schedule=schedule)
    seen = []
    for number in range(5):
        before = cases.local_state(engine)
        applied = step(engine, 65504.0 if number == 2 and engine.rank == culprit else 0.5)
        after = cases.local_state(engine)
        moved = any((a[3] != b[3]).any() for a, b in zip(before, after, strict=True))
        steps = max(engine.optimizer.steps)
        assert engine.get_global_grad_norm() == float("inf") or applied
        seen.append((applied, moved, engine.get_loss_scale(), engine.skipped_steps, engine.global_steps, steps,
                     round(engine.get_lr()[0] / 1e-2, 6)))  # fmt: skip
    weights = {name: value.float().tolist() for name, value in engine.state_dict().items()}
    engine.close()
    return [seen, weights if engine.rank == 0 else None]


@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize(("ranks", "culprit"), [(1, 0), (2, 1), (3, 0)])
def test_an_overflow_on_one_rank_is_left_out_by_all(pools: Pools, stage: str, ranks: int, culprit: int) -> None:
    results = pools(ranks).run(overflow_on_one_rank, stage, culprit)
    expected = [
        (True, True, 16.0, 0, 1, 1, 0.5),
        (True, True, 16.0, 0, 2, 2, 0.333333),
        (False, False, 8.0, 1, 3, 2, 0.333333),  # neither the step counts nor the scheduler move
        (True, True, 8.0, 1, 4, 3, 0.25),
        (True, True, 8.0, 1, 5, 4, 0.2),
    ]
    for seen, _ in results:
        # each rank sees its own slices move, and at three ranks one may own nothing but padding
        assert [row[:1] + row[2:] for row in seen] == [row[:1] + row[2:] for row in expected]
        assert not seen[2][1]
    assert any(all(row[1] for number, row in enumerate(seen) if number != 2) for seen, _ in results)


def at_the_minimum(stage: str) -> list[Any]:
    engine = engine_of(stage, {"initial_scale_power": 1, "hysteresis": 1, "min_loss_scale": 1})
    assert not step(engine, 1.0, float("inf")) and engine.get_loss_scale() == 1.0
    before = cases.local_state(engine)
    try:
        step(engine, 1.0, float("nan"))
    except LossScaleError as error:
        text = str(error)
    same = all((a[3] == b[3]).all() for a, b in zip(before, cases.local_state(engine), strict=True))
    went_on, skipped = step(engine, 1.0), engine.skipped_steps
    engine.close()
    return [text.replace(f"rank {engine.rank}", "rank R"), same, went_on, skipped]


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_at_the_minimum_an_error_names_the_parameters_on_every_rank(pools: Pools, stage: str) -> None:
    results = pools(2).run(at_the_minimum, stage)
    assert results[0] == results[1]
    text, same, went_on, skipped = results[0]
    assert "gradients are not finite although the loss scale is at its minimum (1), rank R" in text
    assert "got Inf or NaN in 'second'. The step was skipped" in text
    assert same and went_on and skipped == 2


def test_a_norm_of_nans_is_an_overflow() -> None:
    engine = engine_of("2", {"loss_scale": 8.0})
    assert not step(engine, float("nan")) and engine.get_global_grad_norm() == float("inf")
    engine.close()


def test_with_a_fixed_scale_overflows_are_left_out_and_counted() -> None:
    engine = engine_of("2", {"loss_scale": 8.0})
    assert [step(engine, 1.0), step(engine, 60000.0), step(engine, 1.0)] == [True, False, True]
    assert engine.skipped_steps == 1 and engine.get_loss_scale() == 8.0
    engine.close()


@pytest.mark.parametrize("micros", [1, 2])
def test_norm_and_gradients_are_shown_without_the_scale(micros: int) -> None:
    engine = engine_of("2", {"loss_scale": 1024.0}, micros=micros)
    inputs = torch.full((20,), 0.25, dtype=torch.float16), torch.full((3, 7), 0.5, dtype=torch.float16)
    for _ in range(micros):
        returned = engine.backward(engine(*inputs))
        assert returned.item() == (20 * 0.25 + 21 * 0.5) / micros, "what backward returns is not scaled"
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    assert engine.get_global_grad_norm() == pytest.approx((20 / 16 + 21 / 4) ** 0.5, rel=1e-6)
    with engine.full_grads(writable=True) as grads:
        first, second = grads["first"], grads["second"]
        assert first is not None and second is not None and first.dtype is torch.float32
        assert set(first.tolist()) == {0.25} and set(second.view(-1).tolist()) == {0.5}
        first.zero_()
    assert engine.get_global_grad_norm() == pytest.approx((21 / 4) ** 0.5, rel=1e-6)
    engine.step()
    weights = engine.state_dict()
    assert set(weights["second"].view(-1).tolist()) != {1.0}
    engine.close()


def written_gradients(stage: str) -> list[Any]:
    """k = 2: what a write of rank 0 leaves in the engine, and what a block that writes nothing changes."""
    engine = engine_of(stage, {"loss_scale": 100.0}, micros=2)
    inputs = torch.full((20,), 0.3, dtype=torch.float16), torch.full((3, 7), 0.7, dtype=torch.float16)
    for _ in range(2):
        engine.backward(engine(*inputs))
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    held = [state.gradient.clone() for state in engine._core.reducer.buckets]
    with engine.full_grads(writable=True):
        pass
    kept = all(torch.equal(a, s.gradient) for a, s in zip(held, engine._core.reducer.buckets, strict=True))
    with engine.full_grads(["first"], writable=True) as grads:
        assert grads["first"] is not None
        grads["first"].fill_(0.1)
    with engine.full_grads() as grads:
        shown = None if grads["first"] is None else grads["first"].tolist()
    engine.close()
    return [kept, shown]


def test_what_is_written_into_scaled_gradients_is_rounded_alike_at_every_stage(pools: Pools) -> None:
    found = [result for stage in cases.STAGES for result in pools(2).run(written_gradients, stage)]
    assert all(kept for kept, _ in found)
    # 0.1 times 100 in fp16, over 100
    assert {str(shown) for _, shown in found} == {str([(torch.tensor(10.0).half().float() / 100).item()] * 20)}


def faulty_overflow(stage: str, power: int) -> list[Any]:
    """Rank 1 fails in the step that overflows; reset() brings all ranks to one step and one loss scale."""
    engine = engine_of(stage, {"initial_scale_power": power, "hysteresis": 1, "loss_scale_window": 2})
    step(engine, 0.5)
    if engine.rank == engine.world_size - 1:
        fail_once(engine._core.reducer, "discard", 0)
    with contextlib.suppress(Boom, LossScaleError):
        step(engine, float("inf"))
    engine.reset()
    seen = [engine.get_loss_scale(), engine.skipped_steps, list(engine.optimizer.steps), engine.global_steps]
    seen += [step(engine, 0.5), engine.get_loss_scale()]
    engine.close()
    return seen


@pytest.mark.parametrize("stage", ["0", "2", "3"])
@pytest.mark.parametrize(("power", "after"), [(4, 8.0), (0, 1.0)])
def test_a_fault_after_an_overflow_leaves_one_scale_on_all_ranks(
    pools: Pools, stage: str, power: int, after: float
) -> None:
    results = pools(2).run(faulty_overflow, stage, power)
    assert results[0] == results[1]
    assert results[0] == [after, 1, [1, 1, 0], 2, True, after]


def test_an_update_that_is_left_out_and_interrupted_counts_no_step() -> None:
    scale = {"initial_scale_power": 4, "hysteresis": 1}
    engine = engine_of("2", scale, zero={"reduce_bucket_size": 16})
    step(engine, 0.5)
    stop_after_buckets(engine.optimizer, 1)
    with pytest.raises(Boom):
        step(engine, float("inf"))
    engine.reset()
    assert (engine.get_loss_scale(), engine.skipped_steps, engine.global_steps) == (8.0, 1, 2)
    assert engine.optimizer.steps == [1, 1, 0] and not engine.was_step_applied()
    assert step(engine, 0.5) and engine.optimizer.steps == [2, 2, 0]
    engine.close()


@pytest.mark.parametrize("key", ["communication_data_type", "reduce_dtype", "grad_accum_dtype"])
def test_gradients_that_do_not_fit_an_fp16_wire_are_left_out(key: str) -> None:
    types = {"communication_data_type": "fp16"} if key.startswith("comm") else {"data_types": {key: "fp16"}}
    engine = cases.make_engine(Sum(), cases.config_of("2", 2, **types), "AdamW")

    def train(x: float) -> bool:
        for _ in range(2):
            loss = engine(torch.full((20,), x), torch.ones(3, 7))
            loss.backward() if x < 1 else engine.backward(loss)  # the loss is not scaled: both are right
            engine.step()
        return bool(engine.was_step_applied())

    fits = key == "reduce_dtype"  # at one rank nothing is added
    assert [train(0.5), train(1e6), train(0.5)] == [True, fits, True]
    assert engine.skipped_steps == (not fits) and engine.get_loss_scale() == 1.0
    assert all(torch.isfinite(value).all() for value in engine.state_dict().values())
    engine.close()


def test_a_backward_without_the_engine_is_refused() -> None:
    engine = engine_of("2", {"loss_scale": 8.0})
    inputs = torch.ones(20, dtype=torch.float16), torch.ones(3, 7, dtype=torch.float16)
    with raises("backward-without-loss-scale"):
        engine(*inputs).backward()
    engine.zero_grad()
    assert step(engine, 1.0)
    engine.close()


class Again(nn.Module):
    """A block that is computed again in backward, inside of a run of autograd of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        again = torch.utils.checkpoint.checkpoint(lambda y: self.inside(y).tanh(), x, use_reentrant=True)
        assert isinstance(again, Tensor)
        return again


def chunks(stage: str) -> None:
    torch.manual_seed(2)
    scale = {"enabled": True, "initial_scale_power": 8}
    model = nn.Sequential(nn.Linear(7, 7), Again(), Again(), nn.Linear(7, 3))
    engine = cases.make_engine(model, cases.config_of(stage, 2, zero={"units": ["Again"]}, fp16=scale), "SGD")
    for _ in range(2):
        for boundary in (False, True):
            out = engine(torch.ones(4, 7, dtype=torch.half)).float()
            first, second = engine.scale(out[:2].mean()), engine.scale(out[2:].mean())
            first.backward(retain_graph=True)
            with pytest.raises(UsageError, match=r"Loss scaling is required: .* for each loss"):
                out[2:].mean().backward(retain_graph=True)
            engine.zero_grad()
            out = engine(torch.ones(4, 7, dtype=torch.half)).float()
            if boundary:
                engine.backward(out.mean())
                out = engine(torch.ones(4, 7, dtype=torch.half)).float()
            first, second = engine.scale(out[:2].mean()), engine.scale(out[2:].mean())
            first.backward(retain_graph=True)
            second.backward()
            engine.zero_grad()
    engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_each_part_of_a_loss_in_chunks_needs_the_scale(pools: Pools, stage: str, ranks: int) -> None:
    pools(ranks).run(chunks, stage)


def test_fp16_parameters_need_a_loss_scale() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    with raises("model-fp16-without-loss-scale", "'first'", "torch.float16"):
        shardengine.initialize(Sum().half(), config)


def autocast_step(stage: str) -> list[Any]:
    config = cases.config_of(stage, torch_autocast={"enabled": True, "dtype": "float16"})
    engine = cases.make_engine(cases.make_mlp(), config, "SGD")
    seen = []
    for number in range(4):
        engine.backward(cases.loss_of(engine, number, engine.rank, 0))
        engine.step()
        seen.append((engine.was_step_applied(), engine.get_loss_scale()))
    dtypes = {str(p.dtype) for p in engine.module.parameters()}
    norm = engine.get_global_grad_norm()
    engine.close()
    return [seen, dtypes, norm]


def test_autocast_in_fp16_scales_the_loss_and_keeps_fp32_weights(pools: Pools) -> None:
    for seen, dtypes, norm in pools(2).run(autocast_step, "2"):
        assert dtypes == {"torch.float32"} and all(scale <= 2.0**16 for _, scale in seen)
        assert seen[-1][0] and 0 < norm < 100


def save_and_go_on(stage: str, directory: str) -> list[Any]:
    """Overflows before and after the save; a second engine goes on from the checkpoint."""
    values = [0.5, 60000.0, 0.5, 0.25, 60000.0, 0.5]
    scale = {"initial_scale_power": 5, "loss_scale_window": 2, "hysteresis": 2}

    def rest(engine: Any) -> list[Any]:
        seen = [(step(engine, value), engine.get_loss_scale(), engine.skipped_steps) for value in values[3:]]
        return [seen, [(name, key, first, part.tobytes()) for name, key, first, part in cases.local_state(engine)]]

    one = engine_of(stage, scale)
    for value in values[:3]:
        step(one, value)
    one.save_checkpoint(directory)
    expected = rest(one)
    one.close()
    two = engine_of(stage, scale)
    two.load_checkpoint(directory)
    found = rest(two)
    two.close()
    return [found == expected, found[0]]


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_a_checkpoint_keeps_the_loss_scale(pools: Pools, stage: str, tmp_path: Path) -> None:
    for same, seen in pools(2).run(save_and_go_on, stage, str(tmp_path / stage)):
        assert same, seen
        # 60000 times 32 overflows; tolerated once, doubled after two good steps, tolerated again
        assert seen == [(True, 64.0, 1), (False, 64.0, 2), (True, 64.0, 2)]


@pytest.mark.parametrize("value", [1, {"scale": -1.0, "good": 0, "tolerated": 1, "skipped": 0}, {"scale": 1.0}])
def test_a_hostile_loss_scale_in_a_checkpoint_is_refused(tmp_path: Path, value: Any) -> None:
    engine = engine_of("2", {})
    step(engine, 0.5)
    engine.save_checkpoint(tmp_path, tag="one")
    (path,) = (tmp_path / "one").glob("*.json")
    index = json.loads(path.read_text())["index"]
    assert index["loss_scaler"]["scale"] == 2.0**16
    index["loss_scaler"] = value
    path.write_text(json.dumps({"sha256": index_module._digest(index), "index": index}))
    with raises("checkpoint-damaged", "index.json is damaged"):
        engine.load_checkpoint(tmp_path, tag="one")
    engine.close()
