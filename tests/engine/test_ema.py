"""Moving averages of the weights: the oracle's at every stage and tier, shown, saved, exported."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardengine
from shardengine.app.cli import main
from shardengine.errors import ConfigError, UsageError
from tests import oracle
from tests.parity.test_any_optimizer import PLACES
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
EMA: dict[str, Any] = {"ema": {"decay": 0.9}}
STEPS = 5


def averages_in(engine: shardengine.Engine) -> dict[str, Any]:
    with engine.ema():
        return {name: cases.copy_out(value).float().numpy() for name, value in engine.state_dict().items()}


def train(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = cases.make_engine(cases.make_mlp(), config, kind)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append([cases.run_micro_batch(engine, cases.loss_of, step, micro)
                       for micro in range(engine.gradient_accumulation_steps())])  # fmt: skip
        norms.append(engine.get_global_grad_norm())
        with engine.ema():  # nothing of training changes
            engine.eval()
            with torch.no_grad():
                cases.loss_of(engine, 0, 0, 0)
            engine.train()
    weights = {name: cases.copy_out(value).float().numpy() for name, value in engine.state_dict().items()}
    result = {"losses": losses, "norms": norms, "weights": weights, "state": cases.local_state(engine), "skipped": []}
    result["averages"] = averages_in(engine)
    engine.close()
    return result


@functools.lru_cache(maxsize=32)
def truth(kind: str, ranks: int, micros: int, order: str, low: torch.dtype | None) -> oracle.Trace:
    network = cases.make_mlp()
    return oracle.train(
        network, cases.loss_of, ranks=ranks, micros=micros, steps=STEPS, kind=kind, ema=0.9,
        groups=cases.groups_of(network, kind), order=order if micros > 1 else "full", clip=cases.CLIP, low=low,
        **cases.groups_told(order),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "ranks", "micros", "low", "place", "kind"),
    covering(itertools.product(cases.STAGES, (1, 2, 3), (1, 3), (None, torch.bfloat16), PLACES, ("AdamW", "SGD"))),
)
def test_averages_are_the_oracles(
    pools: Pools, tmp_path: Path, stage: str, ranks: int, micros: int, low: torch.dtype | None, place: str, kind: str
) -> None:
    zero = {key: {**value, "nvme_path": str(tmp_path)} if place == "nvme" else value
            for key, value in PLACES[place].items()}  # fmt: skip
    config = cases.config_of(stage, micros, zero=zero, **EMA, **({"bf16": {"enabled": True}} if low else {}))
    results = pools(ranks).run(train, kind, config)
    expected = truth(kind, ranks, micros, cases.LETTER[stage], low)
    assert_equal_to_truth(results, expected)
    for name, states in expected.states.items():
        average = states["ema"].to(low or torch.float32).float()
        assert torch.equal(torch.from_numpy(results[0]["averages"][name]), average), name


def test_what_is_not_used_is_averaged_from_its_first_step_on() -> None:
    """A parameter that no loss uses has no average; one that stops being used converges to what it is."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in "abc"})
    before = {name: model[name].weight.detach().clone() for name in "abc"}  # type: ignore[operator]
    config = {**cases.config_of("2"), **EMA, "gradient_clipping": 0.0}
    engine = shardengine.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    used = ("a", "ab", "a", "b")
    expected: dict[str, Any] = {}
    for names in used:
        old = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.backward(sum(engine.module[name](torch.ones(1, 2)).square().sum() for name in names))  # type: ignore
        engine.step()
        new = engine.state_dict()
        for name in names:
            expected.setdefault(name, old[f"{name}.weight"])
        for name in expected:
            weight = new[f"{name}.weight"]
            expected[name] = expected[name] + (weight - expected[name]) * torch.tensor(1 - 0.9)
    with engine.ema():
        shown = engine.state_dict()
    for name in "ab":
        assert torch.equal(shown[f"{name}.weight"], expected[name])
    assert torch.equal(shown["c.weight"], before["c"])
    engine.close()


def test_a_step_that_is_skipped_averages_nothing() -> None:
    engine = cases.make_engine(cases.make_mlp(), {**cases.config_of("1"), **EMA})
    cases.run_steps(engine, 2)
    before = averages_in(engine)
    engine.backward(cases.loss_of(engine, 2, 0, 0) * float("nan"))
    engine.step()
    assert not engine.was_step_applied()
    after = averages_in(engine)
    assert all((after[name] == value).all() for name, value in before.items())
    engine.close()


def save_and_show(config: dict[str, Any], folder: str, steps: int) -> dict[str, Any]:
    engine = cases.make_engine(cases.make_mlp(), config, "AdamW")
    if steps == 0:
        engine.load_checkpoint(folder, strict="ema" in config)
    cases.run_steps(engine, steps)
    if steps:
        engine.save_checkpoint(folder)
    found = averages_in(engine) if "ema" in config else {}
    found["weights"] = {name: value.numpy() for name, value in engine.state_dict().items()}
    engine.close()
    return found


def test_averages_are_saved_and_exported(pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "saved")
    first = pools(2).run(save_and_show, {**cases.config_of("3"), **EMA}, folder, 3)[0]
    weights = first.pop("weights")
    again = pools(3).run(save_and_show, {**cases.config_of("1"), **EMA}, folder, 0)[0]
    assert all((again[name] == value).all() for name, value in first.items())
    from safetensors.torch import load_file

    out = tmp_path / "out"
    assert main(["export", folder, str(out), "--format", "safetensors", "--ema"]) == 0
    exported = load_file(out / "model.safetensors")
    for name, value in exported.items():
        assert torch.equal(value, torch.from_numpy(first[name])), name
    assert any((first[name] != weights[name]).any() for name in weights)
    plain = str(tmp_path / "plain")
    pools(2).run(save_and_show, cases.config_of("2"), plain, 2)
    assert main(["export", plain, str(tmp_path / "no"), "--format", "safetensors", "--ema"]) == 2
    assert "has no averages" in capsys.readouterr().err


def begin_late(folder: str) -> tuple[dict[str, Any], str]:
    engine = cases.make_engine(cases.make_mlp(), {**cases.config_of("2"), **EMA}, "AdamW")
    said = ""
    try:
        engine.load_checkpoint(folder)
    except UsageError as error:
        said = str(error)
    engine.load_checkpoint(folder, strict=False)
    found = {"ema": averages_in(engine), "weights": {n: v.numpy() for n, v in engine.state_dict().items()}}
    engine.close()
    return found, said


def test_a_checkpoint_without_averages_begins_them_with_its_weights(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(save_and_show, cases.config_of("1"), str(tmp_path), 3)
    found, said = pools(2).run(begin_late, str(tmp_path))[0]
    assert "AdamW has exp_avg and exp_avg_sq in the checkpoint, ema and exp_avg and exp_avg_sq here" in said
    assert all((found["ema"][name] == value).all() for name, value in found["weights"].items())


def take_dict() -> dict[str, Any]:
    """Of an optimizer without averages, into an engine that has them, of other weights."""
    config = cases.config_of("2")
    without = cases.make_engine(cases.make_mlp(), config, "AdamW")
    cases.run_steps(without, 2)
    assert without.optimizer is not None
    weights, states = without.state_dict(), without.optimizer.state_dict()
    without.close()
    engine = cases.make_engine(cases.make_mlp(), {**config, **EMA, "zero_optimization": cases.STAGES["3"]}, "AdamW")
    cases.run_steps(engine, 3)
    engine.load_state_dict(weights)
    assert engine.optimizer is not None
    engine.optimizer.load_state_dict(states)
    found = {"ema": averages_in(engine), "weights": {n: v.numpy() for n, v in engine.state_dict().items()}}
    engine.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_dict_without_averages_begins_them_with_the_weights(pools: Pools, ranks: int) -> None:
    found = pools(ranks).run(take_dict)[0]
    assert found["weights"]
    assert all((found["ema"][name] == value).all() for name, value in found["weights"].items())


def test_what_cannot_be_done_says_so() -> None:
    engine = cases.make_engine(cases.make_mlp(), {**cases.config_of("2"), **EMA})
    with engine.ema():
        loss = cases.loss_of(engine, 0, 0, 0)
        for call in (lambda: engine.backward(loss), engine.step, lambda: engine.save_checkpoint("x"), engine.close):
            with pytest.raises(UsageError, match=r"inside engine.ema\(\)"):
                call()
        with pytest.raises(UsageError, match=r"engine.ema\(\) inside engine.ema"), engine.ema():
            pass
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    with pytest.raises(UsageError, match=r"engine.ema\(\) in the middle of a step"), engine.ema():
        pass
    engine.close()
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("2"))
    with raises("ema-not-in-config"), engine.ema():
        pass
    engine.close()
    for options, said in (
        ({"bf16": {"enabled": True, "master_weights": False}}, "expected bf16.master_weights true"),
        ({"ema": {"decay": 1.0}}, "expected a number >= 0 and < 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            cases.make_engine(cases.make_mlp(), {**cases.config_of("2"), **EMA, **options})
