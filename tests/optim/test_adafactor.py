"""Adafactor's forms and refusals, bytes and memory, and dicts that plain torch and an engine exchange.

The arithmetic at every stage is compared in ``tests/parity/test_adafactor.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as Transformers

import shardengine
from shardengine.app.cli import main
from shardengine.errors import ConfigError, MismatchError, UsageError
from shardengine.kernels import Factored
from tests.interchange import test_export_elsewhere as elsewhere
from tests.stages.test_traffic import counted
from tests.support import adafactor_cases as adafactor
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
FORMS = ("torch", "transformers")
NEAR: dict[str, Any] = {"rtol": 2e-5, "atol": 1e-6}
"""Their classes add squares up in fp32, in an order of their own; five steps carry that on."""


def plain(network: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        network.zero_grad()
        cases.loss_of(network, step, 0, 0).backward()
        optimizer.step()


def config(stage: str = "2", **options: Any) -> dict[str, Any]:
    return {**cases.config_of(stage, **options), "gradient_clipping": 0.0}


def made(form: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    network = cases.make_mlp()
    return network, adafactor.make(form, list(network.parameters()))


# Beside the users' own classes


@pytest.mark.parametrize(
    ("form", "options"), [*((form, adafactor.OPTIONS[form]) for form in FORMS),
                          *((form, each) for form in FORMS for each in adafactor.MORE[form])],
)  # fmt: skip
def test_it_is_what_the_class_computes_but_for_last_bits(form: str, options: dict[str, Any]) -> None:
    network = cases.make_mlp()
    optimizer = adafactor.make(form, list(network.parameters()), **options)
    plain(network, optimizer, 0, 5)
    engine = adafactor.engine_of(form, config(), **options)
    cases.run_steps(engine, 5)
    start = cases.make_mlp().state_dict()
    for name, value in engine.state_dict().items():
        expected = network.state_dict()[name]
        torch.testing.assert_close(value, expected, **NEAR)
        assert not torch.equal(value, start[name])
    assert engine.optimizer is not None
    found, wanted = engine.optimizer.state_dict(), optimizer.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    for number, entry in wanted["state"].items():
        assert found["state"][number].keys() == entry.keys() - {"RMS"}
        for key in entry.keys() - {"RMS"}:
            torch.testing.assert_close(
                torch.as_tensor(found["state"][number][key], dtype=torch.float32),
                torch.as_tensor(entry[key], dtype=torch.float32), **NEAR,
            )  # fmt: skip
    engine.close()


@pytest.mark.parametrize("form", FORMS)
def test_plain_torch_and_an_engine_take_each_others_dicts(form: str) -> None:
    network, optimizer = made(form)
    plain(network, optimizer, 0, 3)
    engine = adafactor.engine_of(form, config())
    assert engine.optimizer is not None
    engine.load_state_dict(network.state_dict())
    engine.optimizer.load_state_dict(optimizer.state_dict())
    found, expected = engine.optimizer.state_dict(), optimizer.state_dict()
    for number, entry in expected["state"].items():
        for key in entry.keys() - {"RMS", "step"}:
            assert torch.equal(found["state"][number][key], entry[key]), key
        assert int(found["state"][number]["step"]) == 3
    for step in (3, 4):
        cases.run_micro_batch(engine, cases.loss_of, step, 0)
    plain(network, optimizer, 3, 5)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, network.state_dict()[name], **NEAR)
    optimizer.load_state_dict(engine.optimizer.state_dict())
    network.load_state_dict(engine.state_dict())
    plain(network, optimizer, 5, 6)
    with engine.full_optimizer_state() as whole:
        kept = {name: entry for name, entry in (whole or {}).items() if entry}
    rows, columns, single = adafactor.NAMES[form]
    assert set(kept["out.weight"]) == {"weight", rows, columns, "step"}
    assert set(kept["out.bias"]) == {"weight", single, "step"}
    engine.close()


def write(form: str, stage: str) -> list[str]:
    engine = adafactor.engine_of(form, cases.config_of(stage))
    cases.run_steps(engine, 1)
    said = []
    for key, change in (("weight", 1.0), (adafactor.NAMES[form][0], 1.0), ("step", 5)):
        try:
            with engine.full_optimizer_state(writable=True) as whole:
                if engine.rank == 0:
                    entry: Any = whole["out.weight"]
                    if key == "step":
                        entry[key] = change
                    else:
                        entry[key].add_(change)
            said.append("")
        except (UsageError, MismatchError) as error:
            said.append(str(error))
    with engine.full_optimizer_state() as whole:
        said.append(str((whole["out.weight"] or {}).get("step")))
    engine.close()
    return said


@pytest.mark.parametrize("form", FORMS)
def test_weights_can_be_written_and_what_is_kept_of_rows_only_read(pools: Pools, form: str) -> None:
    for weight, rows, step, count in pools(2).run(write, form, "3"):
        assert (weight, step) == ("", "")
        assert "can only be read" in rows
        assert count == "5"


def test_plain_torch_goes_on_from_an_export(tmp_path: Path) -> None:
    """In the form of torch.distributed.checkpoint."""
    engine = adafactor.engine_of("torch", config())
    for step in range(2):
        cases.run_micro_batch(engine, cases.loss_of, step, 0)
    engine.save_checkpoint(str(tmp_path / "saved"))
    kept = {(name, key): values for name, key, _, values in cases.local_state(engine)}
    weights, (network, optimizer) = engine.state_dict(), made("torch")
    engine.close()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--format", "dcp"]) == 0
    elsewhere.loaded(str(tmp_path / "out"), network, optimizer, False)
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, weights[name])
        for key, value in optimizer.state[parameter].items():
            if key != "step":
                assert torch.equal(value.reshape(-1), torch.from_numpy(kept[name, key])), (name, key)
    plain(network, optimizer, 2, 3)


def test_dcp_asks_for_all_of_it() -> None:
    """``get_optimizer_state_dict`` and ``set_optimizer_state_dict`` of torch, by name."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    first, second = adafactor.engine_of("torch", config()), adafactor.engine_of("torch", config())
    assert first.optimizer is not None and second.optimizer is not None
    cases.run_steps(first, 2)
    saved: Any = copy.deepcopy(get_optimizer_state_dict(first.module, first.optimizer))
    assert saved["state"]["out.weight"]["row_var"].shape == (3, 1)
    set_optimizer_state_dict(second.module, second.optimizer, saved)
    found, expected = second.optimizer.state_dict(), first.optimizer.state_dict()
    for number, entry in expected["state"].items():
        assert all(torch.equal(found["state"][number][key], value) for key, value in entry.items())
    first.close()
    second.close()


# Bytes


def count(stage: str, steps: int) -> tuple[list[tuple[int, int, float, int]], dict[str, float]]:
    """Per step: bytes of data that were counted outside, those that the engine counted, its formula; those of sums
    alone. And what is in memory."""
    engine = adafactor.engine_of("torch", cases.config_of(stage, zero={"reduce_bucket_size": 1024}))
    found = []
    with counted() as counter:
        for step in range(steps):
            engine.backward(cases.loss_of(engine, step, 0, 0))
            engine.step()
            said, outside = engine.traffic(), counter.take()[0]
            sums = said["by_purpose_last_step"].get("sums over parameters of an update: all-to-all", 0)
            found.append((outside, said["measured_bytes_last_step"], said["formula_bytes_per_step"], sums))
    memory = engine.memory()
    engine.close()
    return found, memory


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", cases.STAGES)
def test_bytes_are_counted(pools: Pools, stage: str, ranks: int) -> None:
    results = pools(ranks).run(count, stage, 2)
    for steps, memory in results:
        for outside, inside, formula, sums in steps:
            assert outside == inside == formula
            assert (sums > 0) is (stage != "0")
        assert memory["measured_model_state_bytes"] == memory["predicted_model_state_bytes"]


def count_one(stage: str) -> int:
    network = nn.Sequential(nn.Linear(64, 96, bias=False))
    optimizer = torch.optim.Adafactor(network.parameters())
    engine = shardengine.initialize(
        network, cases.config_of(stage, zero={"reduce_bucket_size": 8192}), optimizer=optimizer,
        mesh=cases.mesh_of_this_process(),
    )  # fmt: skip
    engine.backward(engine(torch.ones(2, 64)).square().mean())
    engine.step()
    found: int = engine.traffic()["by_purpose_last_step"]["sums over parameters of an update: all-to-all"]
    assert engine.memory()["live_state_bytes"] == 4 * (64 + 96)
    engine.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_one_matrix_are_the_formula(pools: Pools, ranks: int) -> None:
    """Over all ranks 16 bytes to its owner and 8 back, of each other rank, for each row, each column, the weights, and
    the direction."""
    for stage in ("1", "3"):
        assert sum(pools(ranks).run(count_one, stage)) == (16 + 8) * (ranks - 1) * (64 + 96 + 1 + 1)


@pytest.mark.parametrize("form", FORMS)
def test_every_rank_keeps_rows_and_columns_alone(pools: Pools, form: str) -> None:
    expected = sum(p.shape[0] + p.shape[1] if p.dim() > 1 else p.numel() for p in cases.make_mlp().parameters())
    for stage in ("0", "3"):
        for found in pools(2).run(live, form, stage):
            assert found["live_state_bytes"] == 4 * expected
            assert found["measured_model_state_bytes"] == found["predicted_model_state_bytes"]


def live(form: str, stage: str) -> dict[str, float]:
    engine = adafactor.engine_of(form, cases.config_of(stage))
    cases.run_steps(engine, 1)
    found = engine.memory()
    engine.close()
    return found


# Forms


def test_by_name_it_is_torchs() -> None:
    params = {"lr": 0.05, "weight_decay": 0.1, "eps": [None, 1e-3], "beta2_decay": -0.8, "d": 1.0}
    named = shardengine.initialize(
        cases.make_mlp(), config(optimizer={"type": "Adafactor", "params": params}), mesh=cases.mesh_of_this_process()
    )
    given = adafactor.engine_of("torch", config())
    rows = [cases.run_steps(engine, 3) for engine in (named, given)]
    assert rows[0]["losses"] == rows[1]["losses"]
    assert all((rows[0]["weights"][key] == value).all() for key, value in rows[1]["weights"].items())
    named.close()
    given.close()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"eps": 1e-3}, r"eps.*a list of two numbers >= 0, of which the first may be null"),
        ({"eps": [1e-30, None]}, r"eps.*a list of two numbers >= 0, of which the first may be null"),
        ({"beta2_decay": 0.8}, r"beta2_decay.*a number <= 0"),
        ({"d": 0.5}, r"params\.d.*a number >= 1"),
        ({"relative_step": True}, r"relative_step"),
    ],
)
def test_params_that_do_not_exist_are_named(params: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shardengine.initialize(cases.make_mlp(), config(optimizer={"type": "Adafactor", "params": params}))


def test_what_cannot_be_is_said_in_a_sentence() -> None:
    def start(optimizer: Any, **options: Any) -> None:
        shardengine.initialize(network, config(**options), optimizer=optimizer).close()

    network, optimizer = made("torch")
    eight = {"data_types": {"optimizer_state_dtype": "8bit"}}
    with pytest.raises(UsageError, match=r'optimizer_state_dtype: expected "fp32" for torch.optim.Adafactor'):
        start(optimizer, **eight)
    with pytest.raises(UsageError, match=r"split_masters: expected AdamW, Adam, SGD or Lion, got torch.optim.Adafac"):
        start(optimizer, bf16={"enabled": True, "split_masters": True})
    with pytest.raises(UsageError, match=r"step_in_backward: expected AdamW, Adam, SGD or Lion, got Adafactor"):
        start(optimizer, zero={"offload_optimizer": {"device": "cpu", "step_in_backward": True}}, gradient_clipping=0.0)
    plain(network, optimizer, 0, 1)
    with pytest.raises(UsageError, match="has already taken steps"):
        start(optimizer)
    network = cases.make_mlp()
    with pytest.raises(
        UsageError, match=r"option 'lr' of optimizer group 0, is None: expected a finite"
    ):
        start(Transformers(network.parameters(), relative_step=False))
    parameters = list(network.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "beta1": 0.9}]
    with pytest.raises(UsageError, match=r"beta1 to be None in all groups, or in none, got 0.9 in group 1"):
        start(Transformers(groups))


def test_a_checkpoint_of_one_form_is_none_of_the_other(tmp_path: Path) -> None:
    first = adafactor.engine_of("torch", config())
    cases.run_steps(first, 1)
    first.save_checkpoint(str(tmp_path))
    states = first.optimizer.state_dict() if first.optimizer is not None else {}
    second = adafactor.engine_of("transformers", config())
    with pytest.raises(UsageError, match=r"the checkpoint has Adafactor, the engine transformers.Adafactor"):
        second.load_checkpoint(str(tmp_path))
    assert second.optimizer is not None
    with pytest.raises(UsageError, match="option"):
        second.optimizer.load_state_dict(states)
    second.load_checkpoint(str(tmp_path), weights_only=True)
    states["state"][1]["row_var"] = states["state"][1]["row_var"].reshape(-1)
    with pytest.raises(UsageError, match=r"'row_var' of '.*': expected a tensor of shape \(\d+, 1\) got \(\d+,\)"):
        assert first.optimizer is not None
        first.optimizer.load_state_dict(states)
    first.close()
    second.close()


def test_sums_know_where_columns_lie_together() -> None:
    assert Factored((3, 5), (1, 0)).turned and not Factored((3, 5)).turned
    assert Factored((2, 3, 5), (0, 2, 1)).turned and Factored((2, 3, 5), (1, 0, 2)).scattered
    assert not Factored((3, 1), (1, 0)).turned
