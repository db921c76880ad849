"""PowerSGD: the oracle's bits at every stage, whatever the buckets; bytes on the wire; what goes on."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardengine
from shardengine.comm import Wire
from shardengine.config import CommHookConfig
from shardengine.ddp.comm_hooks import CommHook, HookPiece, PowerSGD, by_name
from shardengine.errors import CommunicationError, ConfigError
from tests import oracle
from tests.parity.test_delays import delayed
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankFailure, RankPool

Pools = Callable[[int], RankPool]
STEPS = 5
DEFAULTS: dict[str, Any] = {
    "rank": 2, "start_step": 1, "warm_start": True, "error_feedback": True, "min_compression_rate": 1.5,
    "square": False,
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rank 1 from the start": {"rank": 1, "start_step": 0},
    "drawn anew": {"warm_start": False},
    "without error feedback": {"error_feedback": False},
    "square": {"square": True},
}


def told_of(params: dict[str, Any]) -> tuple[Any, ...]:
    """For the oracle: the config's params, and its seed."""
    return (*(DEFAULTS | params).values(), 42)


def train(
    stages: list[str], params: dict[str, Any], micros: int, kind: str, zero: dict[str, Any], options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Per stage what ``cases.run_steps`` gives."""
    said = {"comm_hook": {"name": "power_sgd", "params": DEFAULTS | params}}
    found = {}
    for stage in stages:
        config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 600, **zero}, **said, **options)
        engine = cases.make_engine(cases.make_mlp(), config, kind)
        found[stage] = {**cases.run_steps(engine, STEPS), "traffic": engine.traffic()}
        engine.close()
    return found


def check(results: list[dict[str, Any]], params: dict[str, Any], micros: int, kind: str = "AdamW", **told: Any) -> None:
    for stage in results[0]:
        letter = cases.LETTER[stage]
        truth = cases.truth("mlp", kind, len(results), micros, letter, STEPS, low_rank=told_of(params), **told)
        for result in results:
            traffic = result[stage].pop("traffic")
            assert traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"], stage
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bits(pools: Pools, ranks: int, kind: str, micros: int) -> None:
    check(pools(ranks).run(train, list(cases.STAGES), {}, micros, kind, {}, {}), {}, micros, kind)


@pytest.mark.parametrize("form", FORMS)
def test_forms(pools: Pools, form: str) -> None:
    check(pools(2).run(train, ["0", "2", "3"], FORMS[form], 2, "AdamW", {}, {}), FORMS[form], 2)


@pytest.mark.parametrize("zero", [{"reduce_bucket_size": 100_000}, {"reduce_bucket_size": 1}])
@pytest.mark.parametrize("overlap", [True, False])
def test_buckets_and_overlap_change_no_bit(pools: Pools, zero: dict[str, Any], overlap: bool) -> None:
    check(pools(3).run(train, ["0", "2", "3"], {}, 2, "AdamW", zero, {"overlap_comm": overlap}), {}, 2)


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_low_precision(pools: Pools, low: str) -> None:
    """With loss scaling errors are kept without the scale."""
    fp16 = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 1}
    options: dict[str, Any] = {"fp16": fp16} if low == "fp16" else {"bf16": {"enabled": True}}
    told: dict[str, Any] = {"low": torch.bfloat16} if low == "bf16" else {
        "low": torch.float16, "scaling": (2.0**16, 2, 1, 1.0)}  # fmt: skip
    check(pools(2).run(train, ["0", "1", "2", "3"], {}, 1, "AdamW", {}, options), {}, 1, **told)


def test_ranks_first_then_micro_batches_at_stage_0(pools: Pools) -> None:
    """What the owner of a slice has summed before is on no other rank: complete gradients are gathered."""
    sharded = {"gradient_accumulation": "sharded"}
    results = pools(3).run(train, ["0", "1"], {}, 3, "AdamW", {}, sharded)
    for stage in ("0", "1"):
        truth = cases.truth("mlp", "AdamW", 3, 3, "sharded", STEPS, low_rank=told_of({}))
        for result in results:
            traffic = result[stage].pop("traffic")
            assert traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"], stage
        assert_equal_to_truth([result[stage] for result in results], truth, stage)


def of_some_blocks(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
    """A loss that uses block number ``rank`` alone, from step 2 on no block on rank 1."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    bare: Any = getattr(model, "module", model)
    x, y = bare.inp(torch.randn(5, 7)), torch.randn(5, 3)
    for block in [] if rank == 1 and step >= 2 else [bare.blocks[rank]]:
        x = x + block(x)
    return (bare.out(x) - y).square().mean()


def train_in_part(stage: str, hook: dict[str, Any]) -> dict[str, Any]:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, 2, comm_hook=hook))
    found = cases.run_steps(engine, STEPS, lambda model, *place: OnForward(of_some_blocks)(model, *place))
    engine.close()
    return found


class OnForward:
    """Calls the loss inside of the engine's forward."""

    def __init__(self, loss_of: Any) -> None:
        self._loss_of = loss_of

    def __call__(self, engine: Any, *place: int) -> torch.Tensor:
        engine.module.forward = lambda x: self._loss_of(engine.module, *place)
        try:
            loss: torch.Tensor = engine(torch.zeros(()))
            return loss
        finally:
            del engine.module.forward


@pytest.mark.parametrize("stage", ["0", "2"])
@pytest.mark.parametrize("hook", [
    {"name": "power_sgd", "params": DEFAULTS}, {"name": "int4", "params": {"error_feedback": True}},
], ids=["power_sgd", "int4"])  # fmt: skip
def test_errors_of_what_a_rank_does_not_use_wait(pools: Pools, hook: dict[str, Any], stage: str) -> None:
    """Another rank, or nobody, uses it."""
    power = hook["name"] == "power_sgd"
    told: dict[str, Any] = {"low_rank": told_of({})} if power else {"coding": ("int4", True)}
    model = cases.make_mlp()
    truth = oracle.train(
        model, of_some_blocks, ranks=2, micros=2, steps=STEPS, groups=cases.groups_of(model, "AdamW"),
        order=cases.LETTER[stage], clip=cases.CLIP, **told,
    )  # fmt: skip
    assert_equal_to_truth(pools(2).run(train_in_part, stage, hook), truth, stage)


@pytest.mark.parametrize("stage", ["0", "3"])
def test_errors_of_ranks_without_data_wait(pools: Pools, stage: str) -> None:
    has = {0: 3, 1: 5, 2: 4}
    results = pools(3).run(train_unevenly, stage, has)
    truth = cases.truth("mlp", "AdamW", 3, 1, "full", STEPS, low_rank=told_of({}), has=by_counts(3, 5, 4))
    for name, value in truth.parameters.items():
        assert torch.equal(results[0][name], value), name


@functools.lru_cache
def by_counts(*counts: int) -> Callable[[int, int, int], bool]:
    return lambda step, rank, micro: step < counts[rank]


def train_unevenly(stage: str, has: dict[int, int]) -> dict[str, torch.Tensor]:
    config = cases.config_of(stage, comm_hook={"name": "power_sgd", "params": DEFAULTS})
    engine = cases.make_engine(cases.make_mlp(), config)
    with engine.join():
        for step in range(has[engine.rank]):
            cases.run_micro_batch(engine, cases.loss_of, step, 0)
    found = {name: cases.copy_out(value) for name, value in engine.state_dict().items()}
    engine.close()
    return found


def train_delayed(stages: list[str]) -> list[dict[str, Any]]:
    found = []
    for number, stage in enumerate(stages):
        config = cases.config_of(stage, 2, zero={"reduce_bucket_size": 600},
                                 comm_hook={"name": "power_sgd", "params": DEFAULTS})  # fmt: skip
        engine = cases.make_engine(cases.make_mlp(), config)
        with delayed(1000 * number + engine.rank):
            found.append(cases.run_steps(engine, STEPS))
        engine.close()
    return found


def test_delays_change_no_bit(pools: Pools) -> None:
    """Rounds of several buckets are under way at once, and the ranks are in the middle of others."""
    stages = ["0", "2", "3"]
    by_rank = pools(3).run(train_delayed, stages)
    for number, stage in enumerate(stages):
        truth = cases.truth("mlp", "AdamW", 3, 2, cases.LETTER[stage], STEPS, low_rank=told_of({}))
        assert_equal_to_truth([found[number] for found in by_rank], truth, stage)


# What travels


def count_bytes(stage: str, params: dict[str, Any]) -> tuple[int, int, list[list[int]]]:
    """Of one step: bytes that this rank sends of gradients, counted at the wire; the engine's formula; and of each
    bucket's parameters the sizes."""
    config = cases.config_of(stage, zero={"reduce_bucket_size": 600},
                             comm_hook={"name": "power_sgd", "params": DEFAULTS | params})  # fmt: skip
    engine = cases.make_engine(cases.make_mlp(), config)
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    sent = 0
    reduce_group = engine._core.mesh.reduce

    def all_to_all(wire: Wire, out: torch.Tensor, full: torch.Tensor, group: Any) -> Any:
        nonlocal sent
        sent += full.nbytes * (engine.world_size - 1) // engine.world_size
        return original[0](wire, out, full, group)

    def broadcast(wire: Wire, tensor: torch.Tensor, source: int, group: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes * (engine.world_size - 1) if group is reduce_group and source == engine.rank else 0
        return original[1](wire, tensor, source, group)

    original = Wire.all_to_all, Wire.broadcast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "all_to_all", all_to_all)
        patch.setattr(Wire, "broadcast", broadcast)
        cases.run_micro_batch(engine, cases.loss_of, 1, 0)
    formula = engine.traffic()["by_purpose_last_step"]
    layout = engine._core.layout
    shapes = [[piece.parameter for piece in layout.pieces(bucket)] for bucket in layout.buckets]
    everything = [piece for bucket in layout.buckets for piece in layout.pieces(bucket)]
    assert all(piece.end - piece.start == layout.parameters[piece.parameter].numel for piece in everything)
    engine.close()
    return sent, sum(size for name, size in formula.items() if name.startswith("gradients")), shapes


@pytest.mark.parametrize("stage", ["0", "3"])
def test_bytes(pools: Pools, stage: str) -> None:
    """(n + m) · r numbers of a matrix, all of the rest, each padded to 16, both ways; counted from the shapes."""
    shapes = [tuple(p.shape) for p in cases.make_mlp().parameters()]
    results = pools(3).run(count_bytes, stage, {})

    def padded(count: int, quantum: int = 16) -> int:
        return -(-count // quantum) * quantum

    def thin(shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and sum(shape) * 2 * 1.5 < shape[0] * shape[1]

    for sent, told, buckets in results:
        assert sorted(number for bucket in buckets for number in bucket) == list(range(len(shapes)))
        expected = 0
        for bucket in ([shapes[number] for number in bucket] for bucket in buckets):
            rows = sum(padded(s[0] * 2) if thin(s) else padded(torch.Size(s).numel()) for s in bucket)
            columns = sum(padded(s[1] * 2) for s in bucket if thin(s))
            expected += 4 * (padded(rows, 48) + padded(columns, 48))
        assert sent == told == 2 * expected * 2 // 3
        assert any(thin(shape) for shape in shapes) and len(buckets) > 2


# What goes on


def resumed(stage: str, params: dict[str, Any], folder: str, start: int, count: int) -> dict[str, Any]:
    """``count`` steps from ``start`` on, of what is in ``folder``, which is saved then."""
    config = cases.config_of(stage, 2, comm_hook={"name": "power_sgd", "params": DEFAULTS | params})
    engine = cases.make_engine(cases.make_mlp(), config)
    if start:
        engine.load_checkpoint(folder)

    def loss_of(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
        return cases.loss_of(model, step + start, rank, micro)

    found = cases.run_steps(engine, count, loss_of)
    engine.save_checkpoint(folder)
    found["factors"] = {n: f.clone() for n, f in engine._core.reducer.hook.factors.items()}  # type: ignore[union-attr]
    engine.close()
    return found


@pytest.mark.parametrize("form", ["as it is", "drawn anew", "square"])
def test_a_resumed_run_has_the_same_bits(pools: Pools, form: str, tmp_path: Path) -> None:
    """At another stage, too: factors, errors and the number of the step go on."""
    params = FORMS[form]
    before = pools(3).run(resumed, "2", params, str(tmp_path), 0, 3)
    after = pools(3).run(resumed, "3", params, str(tmp_path), 3, 3)
    truth = cases.truth("mlp", "AdamW", 3, 2, "sharded", 6, low_rank=told_of(params))
    for first, second in zip(before, after, strict=True):
        second.pop("factors")
        second |= {key: first[key] + second[key] for key in ("losses", "norms")}
    assert_equal_to_truth(after, truth, form)


def test_another_number_of_ranks_goes_on_with_the_factors(pools: Pools, tmp_path: Path) -> None:
    before = pools(3).run(resumed, "2", {}, str(tmp_path), 0, 3)[0]["factors"]
    after = pools(2).run(resumed, "2", {}, str(tmp_path), 3, 0)
    assert before and all(torch.equal(found["factors"][name], before[name]) for found in after for name in before)
    wider = pools(2).run(resumed, "2", {"rank": 3, "min_compression_rate": 1}, str(tmp_path), 3, 1)
    assert all(loss == loss for loss in wider[0]["losses"][0])


def unfrozen() -> None:
    """A matrix joins after two steps, which makes a new layout: the factors of the others go along."""
    model = cases.make_mlp()
    late = model.get_parameter("blocks.0.0.weight").requires_grad_(False)
    config = cases.config_of("2", comm_hook={"name": "power_sgd", "params": DEFAULTS}, zero={"reduce_bucket_size": 600})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = shardengine.initialize(model, config, optimizer=optimizer, mesh=cases.mesh_of_this_process())
    for step in range(4):
        before = kept(engine)
        if step == 2:
            late.requires_grad_(True)
        loss = cases.loss_of(engine, step, engine.rank, 0)
        after = kept(engine)
        assert after.keys() - before.keys() == ({"blocks.0.0.weight"} if step == 2 else set())
        assert all(torch.equal(after[name], values) for name, values in before.items())
        engine.backward(loss)
        engine.step()
    assert kept(engine)["blocks.0.0.weight"].abs().sum() > 0
    engine.close()


def kept(engine: Any) -> dict[str, torch.Tensor]:
    core = engine._core
    return {part.name: part.values.clone() for part in core.reducer.hook_states(core.layout) if part.per == 0}


def test_factors_move_to_a_new_layout(pools: Pools) -> None:
    pools(2).run(unfrozen)


class Scaled(torch.nn.Module):
    """Of whose backward autocast changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 32 * 32).view(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).square().mean()


def under_autocast() -> bool:
    """A region around the whole step: sums of gradients are fp32 all the same."""
    found = []
    for inside in (False, True):
        config = cases.config_of("2", comm_hook={"name": "power_sgd", "params": DEFAULTS})
        engine = cases.make_engine(Scaled(), config, "SGD")
        generator = torch.Generator().manual_seed(engine.rank)
        for _ in range(3):
            loss: Any = engine(torch.randn(32, 32, generator=generator))
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                engine.backward(loss)
                engine.step()
        found.append(engine.module.get_parameter("weight").detach().clone())
        engine.close()
    return torch.equal(*found)


def test_autocast_around_a_step_changes_no_bit(pools: Pools) -> None:
    assert pools(2).run(under_autocast) == [True, True]


def interrupted() -> list[float]:
    """The second round of step 2 raises on rank 1; all ranks go on after ``reset``."""
    said = {"name": "power_sgd", "params": DEFAULTS}
    config, model = cases.config_of("2", zero={"reduce_bucket_size": 1}, comm_hook=said), cases.make_mlp()
    engine = shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"))  # groups of its own
    hook = engine._core.reducer.hook
    assert isinstance(hook, PowerSGD)
    for step in range(2):
        cases.run_micro_batch(engine, cases.loss_of, step, 0)
    before = {index: error.clone() for index, error in hook.errors.items()}
    take, calls = hook._take, 0

    def fail(*given: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3 and engine.rank == 1:
            raise RuntimeError("on purpose")
        take(*given, **options)

    hook._take = fail  # type: ignore[method-assign]
    with pytest.raises((RuntimeError, CommunicationError)):
        cases.run_micro_batch(engine, cases.loss_of, 2, 0)
    hook._take = take  # type: ignore[method-assign]
    engine.reset()
    ended = sum(not torch.equal(error, before[index]) for index, error in hook.errors.items())
    assert ended < len(before), "buckets that had not ended have their errors as they were"
    factors = torch.cat([factor.flatten() for factor in hook.factors.values()])
    for step in range(2, 5):
        cases.run_micro_batch(engine, cases.loss_of, step, 0)
    engine.close()
    return factors.tolist()


def test_after_a_failure_in_a_round_factors_are_the_same_on_all_ranks(pools: Pools) -> None:
    one, other = pools(2).run(interrupted)
    assert one == other


def low_rank(**params: Any) -> CommHook:
    """PowerSGD from the first step on, of every matrix."""
    given = {"start_step": 0, "min_compression_rate": 1.0, **params}
    made = by_name("power_sgd", CommHookConfig("power_sgd", given).filled)
    assert made is not None
    return made


def test_the_same_matrix_leads_to_its_best_approximation() -> None:
    """Of one rank's matrix, without feedback: iterations of the power method find the largest singular values."""
    torch.manual_seed(0)
    matrix = torch.randn(40, 30) @ torch.diag(torch.linspace(3, 0.1, 30)) @ torch.randn(30, 30)
    hook = low_rank(rank=3, error_feedback=False)
    hook.allocate(0, 1200, [HookPiece(0, 0, 1200, (40, 30), 0)], 1, matrix.device)
    u, s, v = torch.linalg.svd(matrix)
    best = u[:, :3] @ torch.diag(s[:3]) @ v[:3]
    missing = []
    for _ in range(60):
        full = matrix.reshape(-1).clone()
        assert [said.numel() for said in hook.rounds(0, full, [(0, 1200)])] == [128, 96]
        missing.append(((full.view(40, 30) - best).norm() / best.norm()).item())
    assert missing[-1] < 1e-3 < missing[0]


def test_errors_and_what_was_said_are_all_of_the_gradients() -> None:
    """What two ranks' results lack together is what the sum of their gradients lacks."""
    torch.manual_seed(1)
    hooks = [low_rank(rank=1) for _ in range(2)]
    for hook in hooks:
        hook.allocate(0, 1200, [HookPiece(0, 0, 1200, (40, 30), 0)], 2, torch.device("cpu"))
    given, said = torch.zeros(1200), torch.zeros(1200)
    for _ in range(5):
        fulls = [torch.randn(1200) for _ in hooks]
        given += fulls[0] + fulls[1]
        both = [hook.rounds(0, full, [(0, 1200)]) for hook, full in zip(hooks, fulls, strict=True)]
        for one, other in zip(*both, strict=True):
            one += other
            other.copy_(one)
        assert torch.equal(*fulls)
        said += fulls[0]
        left = sum(hook.errors[0] for hook in hooks)
        torch.testing.assert_close(given, said + left, rtol=1e-4, atol=1e-4)


# What is refused, and what fails


def refused(stage: str, params: dict[str, Any]) -> str:
    said = params if "name" in params else {"name": "power_sgd", "params": params}
    try:
        cases.make_engine(cases.make_mlp(), cases.config_of(stage, comm_hook=said))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("stage", "params", "text"), [
    ("2 hybrid", {}, "comm_hook.name: expected one shard group of all ranks beside power_sgd, got groups of 2"),
    ("3 hpZ", {}, "comm_hook.name: expected one shard group of all ranks beside power_sgd, got groups of 2"),
    ("3 hybrid", {"name": "noop"}, "expected one shard group of all ranks beside noop, got groups of 2"),
])  # fmt: skip
def test_shard_groups_are_refused(pools: Pools, stage: str, params: dict[str, Any], text: str) -> None:
    assert all(text in said for said in pools(4).run(refused, stage, params))


@pytest.mark.parametrize(("params", "text"), [
    ({"rank": 0}, "comm_hook.params.rank"),
    ({"start": 3}, "did you mean 'start_step'?"),
    ({"matrix_approximation_rank": 2}, "did you mean 'rank'?"),
    ({"min_compression_rate": 0.5}, "comm_hook.params.min_compression_rate"),
])  # fmt: skip
def test_params_are_checked(params: dict[str, Any], text: str) -> None:
    assert text in refused("2", params)


def die_in_a_round(folder: str) -> None:
    config = cases.config_of("2", timeout_s=20.0, comm_hook={"name": "power_sgd", "params": DEFAULTS})
    engine = cases.make_engine(cases.make_mlp(), config)
    hook = engine._core.reducer.hook
    assert isinstance(hook, PowerSGD)
    rounds = hook.rounds

    def die(*given: Any) -> Iterator[torch.Tensor]:
        yield next(rounds(*given))
        os.kill(os.getpid(), signal.SIGKILL)

    if engine.rank == 1:
        hook.rounds = die  # type: ignore[assignment, method-assign]
    try:
        for step in range(3):
            cases.run_micro_batch(engine, cases.loss_of, step, 0)
    except CommunicationError as error:
        Path(folder, str(engine.rank)).write_text(str(error))
        raise


def test_a_rank_that_is_killed_between_two_rounds_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        RankPool(2).run(die_in_a_round, str(tmp_path))
    said = (tmp_path / "0").read_text()
    assert "bucket" in said and "rank 1" in said, said


def not_finite() -> list[Any]:
    """A gradient that is not finite in one step: the step is skipped, factors and errors stay finite."""
    config = cases.config_of("2", comm_hook={"name": "power_sgd", "params": DEFAULTS})
    engine = cases.make_engine(cases.make_mlp(), config)
    losses = []
    for step in range(4):
        loss = cases.loss_of(engine, step, engine.rank, 0)
        engine.backward(loss * (float("inf") if step == 2 and engine.rank == 1 else 1.0))
        engine.step()
        losses.append(loss.item())
    hook = engine._core.reducer.hook
    assert hook is not None
    fine = all(bool(t.isfinite().all()) for t in (*hook.errors.values(), *hook.factors.values()))
    found = [engine.skipped_steps, fine, all(loss == loss for loss in losses)]
    engine.close()
    return found


def test_a_step_that_is_not_finite_leaves_no_trace(pools: Pools) -> None:
    assert pools(2).run(not_finite) == [[1, True, True]] * 2
