"""Communication hooks: the bits of the oracle at every stage, whatever the buckets; bytes on the wire; convergence of
what is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import shardengine
from shardengine.ddp.comm_hooks import HookMessages, by_name, error_feedback
from shardengine.ddp.comm_hooks import hook as hook_module
from shardengine.errors import MismatchError, UsageError
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 4
HOOKS: dict[str, tuple[str, bool]] = {
    "fp16": ("fp16", False),
    "bf16 with error feedback": ("bf16", True),
    "int8": ("int8", True),
    "int8 without error feedback": ("int8", False),
    "int4": ("int4", True),
}


def train(
    stages: list[str], hook: tuple[str, bool], micros: int, kind: str, zero: dict[str, Any], options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Per stage what ``cases.run_steps`` gives."""
    said = {"comm_hook": {"name": hook[0], "params": {"error_feedback": hook[1]}}}
    found = {}
    for stage in stages:
        config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 600, **zero}, **said, **options)
        engine = cases.make_engine(cases.make_mlp(), config, kind)
        found[stage] = {**cases.run_steps(engine, STEPS), "traffic": engine.traffic()}
        engine.close()
    return found


def check(results: list[dict[str, Any]], hook: tuple[str, bool], micros: int, kind: str, **told: Any) -> None:
    for stage in results[0]:
        truth = cases.truth("mlp", kind, len(results), micros, cases.LETTER[stage], STEPS, coding=hook, **told)
        for result in results:
            traffic = result[stage].pop("traffic")
            assert traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"], stage
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", HOOKS)
def test_bits(pools: Pools, name: str, ranks: int, kind: str, micros: int) -> None:
    check(pools(ranks).run(train, list(cases.STAGES), HOOKS[name], micros, kind, {}, {}), HOOKS[name], micros, kind)


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("name", HOOKS)
def test_hybrid_meshes(pools: Pools, name: str, micros: int) -> None:
    """What travels across is coded once more."""
    results = pools(4).run(train, list(cases.HYBRID), HOOKS[name], micros, "AdamW", {}, {})
    check(results, HOOKS[name], micros, "AdamW", inside=2)


@pytest.mark.parametrize("zero", [{"reduce_bucket_size": 100_000}, {"reduce_bucket_size": 1}])
@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_and_overlap_change_no_bit(pools: Pools, zero: dict[str, Any], overlap: bool) -> None:
    hook = ("int4", True)
    results = pools(3).run(train, ["0", "2", "3"], hook, 3, "AdamW", zero, {"overlap_comm": overlap})
    check(results, hook, 3, "AdamW")


def noop() -> int:
    """Bytes of gradients that a step at stage 2 sends."""
    config = cases.config_of("2", comm_hook={"name": "noop"})
    engine = cases.make_engine(cases.make_mlp(), config, "SGD")
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    traffic = engine.traffic()
    assert traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"]
    sent = traffic["by_purpose_last_step"].get("gradients: reduce-scatter", 0)
    engine.close()
    return int(sent)


def test_noop_sends_no_gradients(pools: Pools) -> None:
    assert pools(2).run(noop) == [0, 0]


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_errors_follow_the_loss_scale(pools: Pools, stage: str) -> None:
    """It is halved for two overflows, and doubled later; an error is of the scaled gradients."""
    fp16 = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 1}
    results = pools(2).run(train, [stage], ("int8", True), 1, "AdamW", {}, {"fp16": fp16})
    told = {"low": torch.float16, "scaling": (2.0**16, 2, 1, 1.0)}
    check(results, ("int8", True), 1, "AdamW", **told)
    scales = results[0][stage]["scales"]
    assert len(set(scales)) > 1, scales


# Weights


def train_on_coded_weights(stages: list[str], micros: int, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for stage in stages:
        zero = {"reduce_bucket_size": 600, "zero_quantized_weights": True}
        engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, micros, zero=zero, **options))
        found[stage] = {**cases.run_steps(engine, STEPS), "traffic": engine.traffic()}
        engine.close()
    return found


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_weights_in_integers(pools: Pools, ranks: int, low: bool, micros: int) -> None:
    """They are coded once, also where they are gathered across and then inside, or inside again for backward."""
    options: dict[str, Any] = {"bf16": {"enabled": True}} if low else {}
    stages = ["3", "3k"] if ranks < 4 else ["3k hybrid", "3 hybrid", "3 hpZ"]
    results = pools(ranks).run(train_on_coded_weights, stages, micros, options)
    told = ({"low": torch.bfloat16} if low else {}) | ({"inside": 2} if ranks == 4 else {})
    for stage in stages:
        letter = cases.LETTER[stage]
        truth = cases.truth("mlp", "AdamW", ranks, micros, letter, STEPS, coded_weights="int8", **told)
        for result in results:
            traffic = result[stage].pop("traffic")
            assert traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"], stage
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


# Functions of the user's


def mean_in_tree(state: Any, bucket: Any) -> torch.Tensor:
    """The declared sum: gathered, added in the order of a tree, divided."""
    ranks = dist.get_world_size()
    rows = [torch.empty_like(bucket.buffer()) for _ in range(ranks)]
    dist.all_gather(rows, bucket.buffer())
    while len(rows) > 1:
        pairs = [a + b for a, b in zip(rows[0::2], rows[1::2], strict=False)]
        rows = pairs + rows[2 * len(pairs) :]
    state.append((bucket.index(), bucket.is_last(), [g.shape == p.shape for g, p in
                  zip(bucket.gradients(), bucket.parameters(), strict=True)]))  # fmt: skip
    return rows[0] / ranks


def train_by_function(
    stage: str, micros: int, options: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[Any]]:
    calls: list[Any] = []
    config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 600}, **(options or {}))
    engine = cases.make_engine(cases.make_mlp(), config)
    engine.register_comm_hook(calls, mean_in_tree)
    found = cases.run_steps(engine, STEPS)
    engine.close()
    return found, calls


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_a_function_that_adds_in_the_declared_order_changes_no_bit(pools: Pools, stage: str, micros: int) -> None:
    """With two ranks a mean of each micro-batch is a mean of the window: halves are exact."""
    results = pools(2).run(train_by_function, stage, micros)
    truth = cases.truth("mlp", "AdamW", 2, micros, cases.LETTER[stage], STEPS)
    assert_equal_to_truth([found for found, _ in results], truth, stage)
    for _, calls in results:
        reductions = STEPS * (micros if cases.LETTER[stage] == "sharded" else 1)
        count = len(calls) // reductions
        assert count > 1 and len(calls) == count * reductions
        assert [number for number, _, _ in calls[:count]] == list(range(count))
        assert [last for _, last, _ in calls[:count]] == [False] * (count - 1) + [True]
        assert any(any(same) for _, _, same in calls), "a whole matrix has its shape"


def test_ranks_first_then_micro_batches_at_stage_0(pools: Pools) -> None:
    """A function of the user's, too: what an owner has summed before is on no other rank."""
    one, other = pools(2).run(train_by_function, "0", 3, {"gradient_accumulation": "sharded"})
    truth = cases.truth("mlp", "AdamW", 2, 3, "sharded", STEPS)
    assert_equal_to_truth([one[0], other[0]], truth, "0")


def square(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    loss: torch.Tensor = model(torch.randn(4, 7, generator=generator)).square().mean()
    return loss


def train_by_torch(hook: str) -> tuple[list[list[float]], list[list[float]]]:
    """Losses of an engine at stage 0 and of DDP."""
    found = []
    functions: dict[str, tuple[Any, Any]] = {
        "allreduce": (None, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "powerSGD": (None, powerSGD_hook.powerSGD_hook),
    }
    for ours in (True, False):
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3))
        state, function = functions[hook]
        if hook == "powerSGD":
            state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
        if ours:
            engine: Any = cases.make_engine(model, cases.config_of("0", gradient_clipping=0.0), "SGD")
            engine.register_comm_hook(state, function)
            found.append([[cases.run_micro_batch(engine, square, step, 0)] for step in range(STEPS)])
            engine.close()
            continue
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(state, function)
        optimizer = cases.make_optimizer(model, "SGD")
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = square(wrapped, step, dist.get_rank(), 0)
            loss.backward()
            optimizer.step()
            losses.append([loss.item()])
        found.append(losses)
    return found[0], found[1]


def train_in_small_buckets() -> list[Any]:
    """Of the weights after some steps with PowerSGD, several buckets of which are ready at once."""
    model = torch.nn.Sequential(*(torch.nn.Linear(33, 33) for _ in range(6)))
    for number, parameter in enumerate(model.parameters()):
        torch.nn.init.constant_(parameter, 0.01 * (number + 1))
    engine: Any = cases.make_engine(model, cases.config_of("2", zero={"reduce_bucket_size": 500}), "SGD")
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)
    engine.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    generator = torch.Generator().manual_seed(engine.rank)
    for _ in range(4):
        engine.backward(engine(torch.randn(4, 33, generator=generator)).square().mean())
        engine.step()
    weights = [cases.copy_out(value).numpy() for value in engine.state_dict().values()]
    engine.close()
    return weights


def test_a_hook_that_waits_inside_of_a_future_ends(pools: Pools) -> None:
    one, other = pools(2).run(train_in_small_buckets)
    assert all((a == b).all() for a, b in zip(one, other, strict=False)) and len(one) == 12


@pytest.mark.parametrize("hook", ["allreduce", "fp16", "powerSGD"])
def test_hooks_of_torch_run_as_they_are(pools: Pools, hook: str) -> None:
    """Their sums are the backend's, in its order; of PowerSGD, matrices that DDP's one bucket holds as ours does."""
    for ours, theirs in pools(2).run(train_by_torch, hook):
        assert ours == [[pytest.approx(value, rel=1e-5) for value in row] for row in theirs]


def refused(what: str) -> str:
    options: dict[str, Any] = {"comm_hook": {"name": "fp16"}} if what == "two" else {}
    divisors: dict[str, dict[str, Any]] = {
        "divisor": {"gradient_divide_factor": 3.0}, "sum": {"gradient_allreduce_op": "sum"}}  # fmt: skip
    options |= divisors.get(what, {})
    stage = "2 hybrid" if what == "hybrid" else "2"
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, **options))
    functions: dict[str, Any] = {
        "no function": "mean",
        "nothing": lambda state, bucket: None,
        "too short": lambda state, bucket: bucket.buffer()[:-1],
    }
    try:
        if what == "late":
            engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
        engine.register_comm_hook(None, functions.get(what, mean_in_tree))
        cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    except UsageError as error:
        return str(error)
    finally:
        engine.close()
    return ""


REFUSED = {
    "no function": "expected hook as a function of (state, bucket), got str",
    "nothing": "returned NoneType: expected a tensor, or a future of one",
    "too short": "expected a tensor of the bucket's",
    "two": "expected no other hook, got one beside fp16",
    "late": "register_comm_hook() in the middle of a step",
    "hybrid": "expected one shard group, got 2",
    "divisor": "divided by the number of ranks, 2, got a divisor of 3: the hook brings a mean",
    "sum": "got a divisor of 1: the hook brings a mean",
}


class Calls:
    def mean_in_tree(self, state: Any, bucket: Any) -> Any:
        return bucket.buffer()

    def __call__(self, state: Any, bucket: Any) -> Any:
        return bucket.buffer()


GIVEN: dict[str, tuple[Any, Any]] = {
    "function": (None, mean_in_tree),
    "method": (None, Calls().mean_in_tree),
    "object": (None, Calls()),
    "another": (None, default_hooks.allreduce_hook),
    "state": ([], mean_in_tree),
    "another state": ({}, mean_in_tree),
    "partial": (None, functools.partial(mean_in_tree)),
}
HERE = "tests.parity.test_comm_hooks"
DIFFER = {
    ("function", "method"): f"{HERE}.mean_in_tree with no state on ranks [0, 2], {HERE}.Calls.mean_in_tree with",
    (
        "function",
        "object",
    ): f"{HERE}.Calls with no state on ranks [1]",
    (
        "function",
        "another",
    ): "ddp_comm_hooks.default_hooks.allreduce_hook with no state on ranks [1]",
    ("function", "state"): f"{HERE}.mean_in_tree with a state of type list on ranks [1]",
    ("state", "another state"): "with a state of type list on ranks [0, 2], ",
    ("function", "partial"): "",
}


def registered(most: str, one: str) -> str:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("1"))
    try:
        engine.register_comm_hook(*GIVEN[one if engine.rank == 1 else most])
    except MismatchError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize(("most", "one"), DIFFER)
def test_ranks_that_are_given_different_hooks_are_told_which_is_where(pools: Pools, most: str, one: str) -> None:
    for rank, said in enumerate(pools(3).run(registered, most, one)):
        assert DIFFER[most, one] in said, said
        assert bool(said) == bool(DIFFER[most, one])
        assert not said or said.endswith(f"(this is rank {rank})")


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(pools: Pools, what: str) -> None:
    for text in pools(4 if what == "hybrid" else 2).run(refused, what):
        assert REFUSED[what] in text, text


# What errors become


def resumed(stage: str, folder: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Half of the steps, saved; the other half by another engine that loads them."""
    config = cases.config_of(stage, 2, comm_hook={"name": "int4"}, **(options or {}))
    first = cases.make_engine(cases.make_mlp(), config)
    before = cases.run_steps(first, STEPS)
    first.save_checkpoint(folder)
    first.close()
    second = cases.make_engine(cases.make_mlp(), config)
    second.load_checkpoint(folder)

    def loss_of(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
        return cases.loss_of(model, step + STEPS, rank, micro)

    after = cases.run_steps(second, STEPS, loss_of)
    second.close()
    after["skipped"] = [step + STEPS for step in after["skipped"]]
    return {**after, **{key: before[key] + after[key] for key in ("losses", "norms", "scales", "skipped")}}


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_errors_are_saved(pools: Pools, stage: str, tmp_path: Path) -> None:
    truth = cases.truth("mlp", "AdamW", 3, 2, cases.LETTER[stage], 2 * STEPS, coding=("int4", True))
    assert_equal_to_truth(pools(3).run(resumed, stage, str(tmp_path)), truth, stage)


def test_errors_are_saved_without_the_loss_scale(pools: Pools, tmp_path: Path) -> None:
    """It changes before the save and after it."""
    fp16 = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 1}
    results = pools(2).run(resumed, "2", str(tmp_path), {"fp16": fp16})
    told = {"low": torch.float16, "scaling": (2.0**16, 2, 1, 1.0)}
    truth = cases.truth("mlp", "AdamW", 2, 2, "sharded", 2 * STEPS, coding=("int4", True), **told)
    assert_equal_to_truth(results, truth, "2")
    assert len(set(results[0]["scales"])) > 1


def whole_errors(engine: Any) -> dict[str, torch.Tensor]:
    """By parameter, flat."""
    core, found = engine._core, dict[str, torch.Tensor]()
    sizes = {spec.name: spec.numel for spec in core.layout.parameters}
    for part in core.reducer.hook_states(core.layout):
        found.setdefault(part.name, torch.full((sizes[part.name],), torch.nan))[part.first : part.end] = part.values
    return found


def unfrozen() -> None:
    """A matrix joins after two steps, which makes a new layout: the errors of the others go along."""
    model = cases.make_mlp()
    late = model.get_parameter("out.weight").requires_grad_(False)
    config = cases.config_of("2", comm_hook={"name": "int4"}, zero={"reduce_bucket_size": 600})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = shardengine.initialize(model, config, optimizer=optimizer, mesh=cases.mesh_of_this_process())
    for step in range(STEPS):
        before = whole_errors(engine)
        if step == 2:
            late.requires_grad_(True)
        loss = cases.loss_of(engine, step, engine.rank, 0)
        after = whole_errors(engine)
        assert after.keys() - before.keys() == ({"out.weight"} if step == 2 else set())
        assert all(torch.equal(after[name], values) for name, values in before.items())
        assert step == 0 or sum(values.abs().sum() for values in before.values()) > 0
        engine.backward(loss)
        engine.step()
    engine.close()


def test_errors_move_to_a_new_layout(pools: Pools) -> None:
    pools(2).run(unfrozen)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("name", ["fp16", "int8", "int4"])
def test_messages_to_many_receivers_are_those_to_each(name: str, scale: float) -> None:
    """All at once, or one by one; and what both have not said."""
    found = []
    for most in (0, 100):
        with mock.patch.object(hook_module, "MANY", most), mock.patch.object(error_feedback, "MANY", most):
            hook = by_name(name, {"error_feedback": True})
            assert hook is not None
            hook.allocate(0, 12 * 512, [], 12, torch.device("cpu"))
            hook.note_scale(scale)
            full = torch.randn(12 * 512, generator=torch.Generator().manual_seed(0)) * scale
            full[700], full[5000] = float("nan"), 1e30
            out = torch.zeros(12 * hook.bytes_of(512), dtype=torch.uint8)
            HookMessages(hook, 0, [(0, 12 * 512)]).encode(full, 12, out)
            found.append((out, hook.errors[0]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][1].isfinite().all() and found[0][1].any()
