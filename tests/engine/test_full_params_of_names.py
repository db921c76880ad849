"""full_params(names): the buckets that hold the names move, and no others; contexts inside of others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from shardengine.engine.engine import Engine
from shardengine.errors import UsageError
from tests.support import cases
from tests.support.parts import is_hidden
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
WHOLE = "full_params and state_dict"
ONE_UNIT = ("blocks.1.0.weight", "blocks.1.0.bias", "blocks.1.2.weight", "blocks.1.2.bias")
BUCKET = 256
"""Elements: a matrix of a block lies in several buckets, a bucket holds parts of several parameters."""


def holding(engine: Engine, names: set[str]) -> int:
    """Bytes of the buckets, padding included, that hold some of ``names``."""
    return sum(
        bucket.length * flat_buffer.itemsize
        for flat_buffer in engine._core.layout.flat_buffers
        for bucket in flat_buffer.buckets
        if names & set(bucket.names)
    )


def sent(engine: Engine) -> int:
    return int(engine.traffic()["by_purpose_total"].get(WHOLE, 0))


def live(engine: Engine) -> float:
    return engine.memory()["live_weight_bytes"]


def shown(engine: Engine) -> set[str]:
    return {name for name, parameter in engine.module.named_parameters() if not is_hidden(parameter)}


def engine_of(stage: str, options: dict[str, Any]) -> Engine:
    zero = {"reduce_bucket_size": BUCKET, **options.get("zero", {})}
    rest = {key: value for key, value in options.items() if key != "zero"}
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, zero=zero, **rest))
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    return engine


def counts(stage: str, options: dict[str, Any]) -> list[str]:
    """What was wrong with bytes on the wire, memory, and which parameters are shown."""
    engine = engine_of(stage, options)
    module, moves, ranks = engine.module, engine._core.stage.moves_weights, engine.world_size
    names = [name for name, _ in module.named_parameters()]
    truth = {}
    with engine.full_params():
        truth = {name: cases.copy_out(p) for name, p in module.named_parameters()}
    wrong = []

    def check(what: str, *, holds: set[str], writes: bool = False) -> None:
        """``what`` has just been left, in which ``inside`` was found."""
        bytes_held = holding(engine, holds)
        expected = bytes_held * (ranks - 1) // ranks * (moves + writes)
        if sent(engine) - before != expected:
            wrong.append(f"{what}: sent {sent(engine) - before}, expected {expected}")
        if inside != (at_rest + bytes_held * moves, set(names) if not moves else holds):
            wrong.append(f"{what}: {inside} of {bytes_held} beside {at_rest}")
        if live(engine) != at_rest:
            wrong.append(f"{what}: {live(engine)} bytes stay")

    at_rest = live(engine)
    wanted = [{name} for name in names] + [set(ONE_UNIT[:2]), {ONE_UNIT[0], ONE_UNIT[3], "out.bias"}, set(names)]
    for group in wanted:
        for writable in (False, True):
            before = sent(engine)
            with engine.full_params(sorted(group), writable=writable):
                inside = live(engine), shown(engine)
                values = {name: cases.copy_out(module.get_parameter(name)) for name in group}
            check(f"{sorted(group)}, {writable=}", holds=group, writes=writable)
            wrong += [f"value of {name}" for name in group if not torch.equal(values[name], truth[name])]
    engine.close()
    return wrong


MIXED = {"bf16": {"enabled": True}}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_only_the_buckets_of_the_names_are_moved(pools: Pools, stage: str, ranks: int) -> None:
    assert pools(ranks).run(counts, stage, {}) == [[]] * ranks


def test_buckets_of_low_precision_are_counted_in_it(pools: Pools) -> None:
    assert pools(2).run(counts, "3", MIXED) == [[]] * 2


def nest(stage: str, options: dict[str, Any]) -> dict[str, Any]:
    """Different names of one unit, one inside of the other, with forwards and writes there; then a step."""
    engine = engine_of(stage, options)
    module, moves = engine.module, engine._core.stage.moves_weights
    first, second, third, fourth = ONE_UNIT
    found: dict[str, Any] = {}

    def loss() -> float:
        with torch.no_grad():
            return float(cases.loss_of(engine, 1, engine.rank, 0))

    def add(name: str, value: float) -> None:
        with torch.no_grad():
            module.get_parameter(name).add_(value if engine.rank == 0 else 77.0)

    found["loss before"] = loss()
    with engine.full_params([first]):
        found["loss within one"] = loss()
        with engine.full_params([second, first]):
            found["shown within two"] = shown(engine) & set(ONE_UNIT)
            found["loss within two"] = loss()
        found["shown after two"] = shown(engine) & set(ONE_UNIT)
        with engine.full_params(list(ONE_UNIT)):
            found["loss within all of a unit"] = loss()
    with engine.full_params([first, third], writable=True):
        add(first, 0.5)
        with engine.full_params([second, first]):
            add(first, 0.125)
            add(third, 0.03125)
            found["written loss"] = loss()
        found["still written"] = engine.rank == 0 or bool((module.get_parameter(third) > 50).any())
    with engine.full_params([second], writable=True):
        add(second, 0.25)
    with engine.full_params([fourth], writable=True):
        pass
    with ExitStack() as every:
        for name in ONE_UNIT:
            every.enter_context(engine.full_params([name]))
        found["all shown"] = shown(engine) >= set(ONE_UNIT)
    found["rest hidden"] = not moves or not shown(engine)
    found["losses"] = [cases.run_micro_batch(engine, cases.loss_of, step, 0) for step in (1, 2)]
    found["weights"] = {name: cases.copy_out(value) for name, value in engine.state_dict().items()}
    engine.close()
    return found


def write_at_once() -> dict[str, Any]:
    """As ``nest``'s writes, in one context over everything below stage 3: what all stages must come to."""
    engine = engine_of("0", {})
    first, second, third, _ = (engine.module.get_parameter(name) for name in ONE_UNIT)
    with engine.full_params(writable=True), torch.no_grad():
        for parameter, value in ((first, 0.5), (first, 0.125), (third, 0.03125)):
            parameter.add_(value if engine.rank == 0 else 77.0)
        written_loss = float(cases.loss_of(engine, 1, engine.rank, 0))
        second.add_(0.25)
    losses = [cases.run_micro_batch(engine, cases.loss_of, step, 0) for step in (1, 2)]
    weights = {name: cases.copy_out(value) for name, value in engine.state_dict().items()}
    engine.close()
    return {"losses": losses, "weights": weights, "written loss": written_loss}


def check_nested(results: list[dict[str, Any]], plain: list[dict[str, Any]], *, moves: bool) -> None:
    for result, same in zip(results, plain, strict=True):
        assert {result[key] for key in result if key.startswith("loss within")} == {result["loss before"]}
        assert result["shown within two"] == set(ONE_UNIT[:2] if moves else ONE_UNIT)
        assert result["shown after two"] == set(ONE_UNIT[:1] if moves else ONE_UNIT)
        assert result["still written"] and result["all shown"] and result["rest hidden"]
        assert result["losses"] == same["losses"] and result["written loss"] == same["written loss"]
        assert list(result["weights"]) == list(same["weights"])
        assert all(torch.equal(result["weights"][name], value) for name, value in same["weights"].items())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", ["0", "2", "3k", "3"])
def test_names_of_one_unit_nest(pools: Pools, stage: str, ranks: int) -> None:
    plain = pools(ranks).run(write_at_once)
    check_nested(pools(ranks).run(nest, stage, {}), plain, moves=stage.startswith("3"))


def penalise(stage: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """A loss on parameters, with its backward inside; then one on a parameter that is not asked for."""
    engine = engine_of(stage, {})
    module, texts = engine.module, []
    with engine.full_params(ONE_UNIT[:2]):
        weight, bias = (module.get_parameter(name).square().sum() for name in ONE_UNIT[:2])
        engine.backward(weight + bias)
    engine.step()
    with engine.full_params(ONE_UNIT[:1]):
        try:
            engine.backward(module.get_parameter(ONE_UNIT[2]).square().sum())
        except UsageError as error:
            texts.append(str(error))
    engine.zero_grad()
    weights = {name: cases.copy_out(value) for name, value in engine.state_dict().items()}
    engine.close()
    return texts, weights


@pytest.mark.parametrize("ranks", [1, 2])
def test_backward_inside_reaches_what_is_shown_and_nothing_else(pools: Pools, ranks: int) -> None:
    _, whole = pools(ranks).run(penalise, "0")[0]
    for rank, (texts, weights) in enumerate(pools(ranks).run(penalise, "3")):
        assert [
            ONE_UNIT[2] in text and "was read by square while its weights are sharded" in text for text in texts
        ] == [True]
        assert rank or (set(weights) == set(whole) and all(torch.equal(weights[n], whole[n]) for n in whole))


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_names_of_one_unit_nest_in_other_tiers(pools: Pools, place: str, tmp_path: Path) -> None:
    tier = {"device": place} | ({"nvme_path": str(tmp_path), "buffer_count": 3} if place == "nvme" else {})
    options = {"zero": {"offload_param": tier, "offload_optimizer": tier}}
    check_nested(pools(2).run(nest, "3", options), pools(2).run(write_at_once), moves=True)
