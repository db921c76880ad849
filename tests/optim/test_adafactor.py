"""Adafactor's forms and refusals, bytes and memory, and dicts that plain torch and an engine exchange.

The arithmetic at every stage is compared in ``tests/parity/test_adafactor.py``.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as Transformers

import shardengine
from shardengine.app.cli import main
from shardengine.checkpoint import directory, index
from shardengine.errors import CheckpointError, ConfigError, MismatchError, UsageError
from shardengine.interchange.stored import StoredCheckpoint
from shardengine.kernels import Factored, Span
from shardengine.optim.adafactor import add_slice
from shardengine.optim.arithmetic import Stepped
from tests.interchange import test_export_elsewhere as elsewhere
from tests.stages.test_traffic import counted
from tests.support import adafactor_cases as adafactor
from tests.support import cases
from tests.support.raising import raises
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


def go_on_from(form: str, stage: str) -> tuple[bool, list[Any]]:
    """Rank 0 alone has plain torch's dict; what this rank has then, whether all of it is that, and its pieces."""
    network, optimizer = made(form)
    plain(network, optimizer, 0, 3)
    engine = adafactor.engine_of(form, config(stage))
    assert engine.optimizer is not None
    engine.optimizer.load_state_dict(optimizer.state_dict() if engine.rank == 0 else {})
    same = True
    with engine.full_optimizer_state() as whole:
        for name, parameter in network.named_parameters():
            for key, value in (whole[name] or {}).items():
                if key in adafactor.NAMES[form]:
                    same &= torch.equal(value, optimizer.state[parameter][key])
    state = cases.local_state(engine)
    engine.close()
    return same, state


@pytest.mark.parametrize("form", FORMS)
def test_every_rank_has_what_rank_0_is_given(pools: Pools, form: str) -> None:
    results = pools(3).run(go_on_from, form, "2")
    assert all(same for same, _ in results)
    whole = cases.assemble([state for _, state in results])
    rows = adafactor.NAMES[form][0]
    assert (whole["out.weight", rows] > 0).all()


def save(folder: str) -> None:
    engine = adafactor.engine_of("torch", config("3"), "odd")
    cases.run_steps(engine, 2, adafactor.odd_loss)
    engine.save_checkpoint(folder, tag="a")
    engine.close()


def test_a_checkpoint_has_each_of_them_once(pools: Pools, tmp_path: Path) -> None:
    """Also those of weights that lie by channels, which are read and exported in their own order."""
    pools(3).run(save, str(tmp_path))
    files: set[str] = set()
    with StoredCheckpoint(tmp_path / "a") as stored:
        for name, kinds in stored.index["tensors"].items():
            for key, row in kinds.items():
                if key in adafactor.NAMES["torch"]:
                    assert len(row["pieces"]) == 1, (name, key)
                    files.add(row["pieces"][0][0])
                    assert list(stored.whole(name, key).shape) == stored.index["optimizer"]["whole"][name][key]
        assert len(files) == 3
        network = adafactor.make_odd()
        optimizer = adafactor.make("torch", [p for p in network.parameters() if p.requires_grad])
        engine = adafactor.engine_of("torch", config("1"), "odd")
        with pytest.warns(UserWarning, match="the global batch was 3 samples"):
            engine.load_checkpoint(str(tmp_path), tag="a")
        assert engine.optimizer is not None
        optimizer.load_state_dict(engine.optimizer.state_dict())
        state = {name: optimizer.state[p] for name, p in network.named_parameters() if p.requires_grad}
        for name in ("conv.weight", "turned", "experts"):
            for key in ("row_var", "col_var"):
                assert torch.equal(stored.whole(name, key), state[name][key]), (name, key)
        engine.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda whole: whole["out.weight"].update(row_var=[1, 3]),
            r"of shape \[3, 1\], the checkpoint has .* \[1, 3\]",
        ),
        (lambda whole: whole["out.weight"].pop("row_var"), r"the checkpoint has float32 of shape None"),
        (lambda whole: whole["out.weight"].update(row_var=[-3]), r"damaged or not of shardengine \(optimizer whole"),
        (lambda whole: whole["out.weight"].update(row_var="3"), r"damaged or not of shardengine \(optimizer whole"),
    ],
)
def test_an_index_that_says_something_else_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    engine = adafactor.engine_of("torch", config())
    cases.run_steps(engine, 1)
    engine.save_checkpoint(str(tmp_path), tag="a")
    path = tmp_path / "a" / directory.INDEX
    found = json.loads(path.read_text(encoding="utf-8"))["index"]
    change(found["optimizer"]["whole"])
    path.write_text(index.to_text(found), encoding="utf-8")
    with pytest.raises((CheckpointError, UsageError), match=said):
        engine.load_checkpoint(str(tmp_path), tag="a")
    engine.close()


def test_rates_that_are_found_in_each_step(tmp_path: Path) -> None:
    """No learning rate: shown as NaN, saved, in dicts, and no schedule."""
    first, second = (adafactor.engine_of("transformers", config(), warmup_init=True) for _ in range(2))
    assert first.optimizer is not None and second.optimizer is not None
    cases.run_steps(first, 2)
    assert math.isnan(first.get_lr()[0])
    second.load_state_dict(first.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    rows = [[cases.run_micro_batch(each, cases.loss_of, step, 0) for step in (2, 3)] for each in (first, second)]
    assert rows[0] == rows[1]
    second.optimizer.param_groups[0]["relative_step"] = False
    with raises("optimizer-lr-invalid", "group 0", "None"):
        cases.run_micro_batch(second, cases.loss_of, 4, 0)
    first.close()
    second.close()
    network = cases.make_mlp()
    scheduled = config(scheduler={"type": "WarmupLR", "params": {}})
    with raises("scheduler-with-relative-step"):
        shardengine.initialize(network, scheduled, optimizer=Transformers(network.parameters()))


def test_a_rate_may_be_a_tensor() -> None:
    number, tensor = (adafactor.engine_of("torch", config(), lr=rate) for rate in (0.25, torch.tensor(0.25)))
    assert cases.run_steps(number, 2)["losses"] == cases.run_steps(tensor, 2)["losses"]
    number.close()
    tensor.close()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("eps", 1e-3, r"step: optimizer group 0 has other options than transformers.Adafactor takes"),
        ("beta1", 0.9, r"transformers.Adafactor: with an option that was changed after initialize it keeps more"),
        ("decay_rate", None, r"step: optimizer group 0 has other options"),
    ],
)
def test_options_that_are_changed_to_what_they_cannot_be(option: str, value: Any, said: str) -> None:
    engine = adafactor.engine_of("transformers", config())
    assert engine.optimizer is not None
    cases.run_steps(engine, 1)
    before = {name: each.clone() for name, each in engine.state_dict().items()}
    engine.optimizer.param_groups[0][option] = value
    with pytest.raises(UsageError, match=said):
        cases.run_micro_batch(engine, cases.loss_of, 1, 0)
    assert all(torch.equal(before[name], each) for name, each in engine.state_dict().items())
    engine.close()


def test_a_group_of_another_kind_does_not_join() -> None:
    network: Any = cases.make_mlp()
    network.out.requires_grad_(False)
    optimizer = adafactor.make("transformers", [p for p in network.parameters() if p.requires_grad])
    engine = shardengine.initialize(network, config(), optimizer=optimizer, mesh=cases.mesh_of_this_process())
    network.out.requires_grad_(True)
    assert engine.optimizer is not None
    options = {key: value for key, value in engine.optimizer.param_groups[0].items() if key != "params"}
    with raises("optimizer-groups-differ", "add_param_group"):
        engine.optimizer.add_param_group({**options, "beta1": 0.9, "params": list(network.out.parameters())})
    engine.close()


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
    with raises("optimizer-states-only-fp32", "torch.optim.Adafactor"):
        start(optimizer, **eight)
    with raises("optimizer-without-split-masters", "torch.optim.Adafac"):
        start(optimizer, bf16={"enabled": True, "split_masters": True})
    with raises("optimizer-not-in-backward", "Adafactor"):
        start(optimizer, zero={"offload_optimizer": {"device": "cpu", "step_in_backward": True}}, gradient_clipping=0.0)
    plain(network, optimizer, 0, 1)
    with raises("optimizer-already-stepped"):
        start(optimizer)
    network = cases.make_mlp()
    with raises("optimizer-lr-invalid", "group 0", "None"):
        start(Transformers(network.parameters(), relative_step=False))
    parameters = list(network.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "beta1": 0.9}]
    with raises("optimizer-groups-differ", "0.9", "group 1"):
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
    with raises("optimizer-state-does-not-fit", "option"):
        second.optimizer.load_state_dict(states)
    second.load_checkpoint(str(tmp_path), weights_only=True)
    states["state"][1]["row_var"] = states["state"][1]["row_var"].reshape(-1)
    with raises("optimizer-state-does-not-fit", "'row_var' of '"):
        assert first.optimizer is not None
        first.optimizer.load_state_dict(states)
    first.close()
    second.close()


def peak(shape: tuple[int, ...], form: str, options: dict[str, Any], *, channels_last: bool) -> tuple[int, float]:
    """Bytes that a step allocates at one moment, counted outside, and the bound that is said."""
    weight = torch.randn(shape) / 30
    network: Any = nn.Module()
    network.weight = nn.Parameter(weight.to(memory_format=torch.channels_last) if channels_last else weight)
    network.forward = lambda x: (network.weight * x).sum()
    optimizer = adafactor.make(form, [network.weight], **options)
    engine = shardengine.initialize(network, config("2", zero={"reduce_bucket_size": 1 << 20}), optimizer=optimizer)
    for _ in range(2):
        engine.backward(engine(torch.ones(())))
        engine.step()
    engine.backward(engine(torch.ones(())))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        engine.step()
    total = most = 0
    results: Any = profile.profiler
    for event in sorted(results.kineto_results.events(), key=lambda each: each.start_ns()):
        total += event.nbytes() if event.name() == "[memory]" else 0
        most = max(most, total)
    said = engine.memory()["predicted_buffer_bytes"]
    engine.close()
    return most, said


@pytest.mark.parametrize(
    ("shape", "form", "options", "channels_last"),
    [((256, 1024), "torch", {}, False), ((64, 32, 3, 3), "torch", {}, False), ((64, 32, 3, 3), "torch", {}, True),
     ((256, 1024), "transformers", {"lr": 0.1, "relative_step": False, "beta1": 0.9}, False),
     ((65536,), "torch", {}, False)],
)  # fmt: skip
def test_a_step_takes_no_more_memory_than_is_said(
    shape: tuple[int, ...], form: str, options: dict[str, Any], *, channels_last: bool
) -> None:
    most, said = peak(shape, form, options, channels_last=channels_last)
    assert 0 < most <= said


def frozen(stage: str) -> dict[str, float]:
    engine = adafactor.engine_of("torch", config(stage), "odd")
    cases.run_steps(engine, 1, adafactor.odd_loss)
    found = engine.memory()
    engine.close()
    return found


def test_what_is_frozen_has_no_rows_and_columns(pools: Pools) -> None:
    for found in pools(2).run(frozen, "2"):
        assert found["measured_model_state_bytes"] == found["predicted_model_state_bytes"]


def test_parts_of_a_parameter_are_added_exactly() -> None:
    """Several buckets of one rank: what a sum lacks is not lost."""
    parts: dict[int, torch.Tensor] = {}
    whole = SimpleNamespace(device=torch.device("cpu"))
    each = Stepped(7, {}, Span(0, 1, 0), None)
    for pair in ([1.0, 0.0], [2.0**-60, 0.0], [-1.0, 0.0]):
        add_slice(parts, each, torch.tensor(pair, dtype=torch.float64).view(2, 1), whole)
    assert parts[7][0].item() == 2.0**-60


def test_sums_know_where_columns_lie_together() -> None:
    assert Factored((3, 5), (1, 0)).turned and not Factored((3, 5)).turned
    assert Factored((2, 3, 5), (0, 2, 1)).turned and Factored((2, 3, 5), (1, 0, 2)).scattered
    assert not Factored((3, 1), (1, 0)).turned
