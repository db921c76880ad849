"""Muon's forms and refusals, its owners, bytes and memory, and dicts that plain torch and an engine exchange.

The arithmetic at every stage is compared in ``tests/parity/test_muon.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from shardengine.app.cli import main
from shardengine.errors import ConfigError, UsageError
from shardengine.muon import MuonWithAdamW, hidden_matrices
from shardengine.optim import MatrixPlan
from shardengine.optim.muon import adjusted_rate, orthogonalized
from shardengine.sharding import layout
from shardengine.stages import Placement
from tests.interchange import test_export_elsewhere as elsewhere
from tests.stages.test_traffic import counted
from tests.support import cases, muon_cases, parts
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


def plain(network: nn.Module, optimizers: list[Any], first: int, last: int) -> None:
    for step in range(first, last):
        network.zero_grad()
        cases.loss_of(network, step, 0, 0).backward()
        for optimizer in optimizers:
            optimizer.step()


def config(stage: str = "2", **options: Any) -> dict[str, Any]:
    return {**cases.config_of(stage, **options), "gradient_clipping": 0.0}


# The arithmetic


@pytest.mark.parametrize("shape", [(7, 130), (130, 7), (33, 33), (1, 9), (9, 1)])
@pytest.mark.parametrize("how", [None, "original", "match_rms_adamw"])
def test_it_is_torchs(shape: tuple[int, int], how: str | None) -> None:
    torch.manual_seed(3)
    weight, gradient = torch.randn(shape), torch.randn(shape)
    ours, theirs = weight.clone(), nn.Parameter(weight.clone())
    theirs.grad = gradient
    torch.optim.Muon([theirs], lr=0.5, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=how).step()
    update = orthogonalized(gradient.bfloat16(), (3.4445, -4.775, 2.0315), 5, 1e-7)
    assert torch.equal(ours.add_(update, alpha=-adjusted_rate(0.5, how, shape)), theirs)


OPTIONS: list[dict[str, Any]] = [
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    {"lr": torch.tensor(0.03)},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_options_do_what_they_do_in_torch(options: dict[str, Any]) -> None:
    network, other = muon_cases.alone(cases.make_mlp()), muon_cases.alone(cases.make_mlp())
    optimizer = torch.optim.Muon(muon_cases.split(network)[0], **options)
    engine = shardengine.initialize(network, config(), optimizer=optimizer)
    theirs = torch.optim.Muon(muon_cases.split(other)[0], **options)
    cases.run_steps(engine, 3)
    plain(other, [theirs], 0, 3)
    assert all(torch.equal(engine.state_dict()[name], value) for name, value in other.state_dict().items())
    engine.close()


def test_both_in_one_is_both_apart_in_plain_torch() -> None:
    network, other = cases.make_mlp(), cases.make_mlp()
    matrices, rest = muon_cases.split(other)
    plain(network, [muon_cases.make_both(network)], 0, 4)
    apart = [torch.optim.Muon(matrices, **muon_cases.MUON), torch.optim.AdamW(rest, **muon_cases.ADAMW)]
    plain(other, apart, 0, 4)
    for name, value in other.state_dict().items():
        assert torch.equal(network.state_dict()[name], value), name


# Owners


def plan_of(shapes: list[tuple[int, int]], ranks: int, bucket: int, state: Placement) -> MatrixPlan:
    specs = [parts.spec(f"m{number}", *shape) for number, shape in enumerate(shapes)]
    return MatrixPlan(layout.build(specs, ranks, bucket), (True,), state)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_owners_have_the_same_work(ranks: int) -> None:
    shapes = [(64, 64), (64, 256), (256, 64), (64, 64), (192, 64)] * 8
    plan = plan_of(shapes, ranks, 4096, Placement.SHARDED)
    load = [0] * ranks
    for number, owner in plan.owners.items():
        short, long = sorted(plan.specs[number].shape)
        load[owner] += short * short * long
    assert sorted(number for batch in plan.batches for number in batch) == list(range(len(shapes)))
    assert max(load) - min(load) <= 64 * 64 * 256
    largest = 64 * 256
    for batch in plan.batches[:-1]:
        elements = [plan.specs[number].numel for number in batch]
        assert sum(elements[:-1]) < max(4096, ranks * max(elements)) <= max(sum(elements), ranks * largest)


def test_every_element_travels_once_to_its_owner() -> None:
    plan = plan_of([(40, 23), (67, 40), (8, 8), (100, 30)], 3, 512, Placement.SHARDED)
    for number, spec in plan.specs.items():
        cuts = sorted((cut.offset, cut.length) for rank in range(3) for cut in plan.cuts(number, rank))
        ends = [0, *(offset + length for offset, length in cuts)]
        assert [offset for offset, _ in cuts] == ends[:-1] and ends[-1] == spec.numel
    for batch in plan.batches:
        for rank in range(3):
            for other in range(3):
                there = plan.messages(batch, rank, owned=False)[other]
                assert there == plan.messages(batch, other, owned=True)[rank]


# Bytes


def count(stage: str, model: str, steps: int) -> list[tuple[int, int, float, int]]:
    """Per step: bytes of data that were counted outside, those that the engine counted, its formula; those of matrices
    alone, by the layout."""
    network = nn.Sequential(nn.Linear(64, 64, bias=False)) if model == "one" else cases.make_mlp()
    optimizer = torch.optim.Muon(network.parameters()) if model == "one" else muon_cases.make_both(network)
    engine = shardengine.initialize(
        network, cases.config_of(stage, zero={"reduce_bucket_size": 4096}), optimizer=optimizer,
        mesh=cases.mesh_of_this_process(),
    )  # fmt: skip
    found = []
    with counted() as counter:
        for step in range(steps):
            inputs = torch.ones(2, 64)
            engine.backward(engine(inputs).square().mean() if model == "one" else cases.loss_of(engine, step, 0, 0))
            engine.step()
            said, outside = engine.traffic(), counter.take()[0]
            matrices = said["by_purpose_last_step"].get("whole matrices of an update: all-to-all", 0)
            found.append((outside, said["measured_bytes_last_step"], said["formula_bytes_per_step"], matrices))
    engine.close()
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_one_matrix_are_the_formula(pools: Pools, ranks: int) -> None:
    """2 bytes to its owner and 2 back of what others step, over all ranks: 2 · 2 · (N - 1) / N of its elements; where
    all step everything, 2 bytes to each other rank."""
    for stage in ("0", "2"):
        results = pools(ranks).run(count, stage, "one", 2)
        elements = 64 * 64 * (ranks - 1)
        expected = 2 * elements if stage == "0" else 2 * 2 * elements // ranks
        for step in range(2):
            assert sum(result[step][3] for result in results) == expected, stage
    for result in results:
        for outside, inside, formula, _ in result:
            assert outside == inside == formula


@pytest.mark.parametrize("stage", cases.STAGES)
def test_bytes_of_many_matrices_are_counted(pools: Pools, stage: str) -> None:
    for result in pools(3).run(count, stage, "mlp", 2):
        for outside, inside, formula, matrices in result:
            assert outside == inside == formula and matrices > 0


def memory(stage: str) -> dict[str, float]:
    engine = muon_cases.engine_of("both", cases.config_of(stage))
    cases.run_steps(engine, 2)
    found = {**engine.memory(), "matrices": 0.0}
    engine.close()
    return found


@pytest.mark.parametrize("stage", ["0", "1", "3"])
def test_states_are_those_of_each_kind(pools: Pools, stage: str) -> None:
    """4 bytes per element of matrices, 8 of the rest, and what is predicted is what is measured."""
    matrices, rest = (sum(p.numel() for p in each) for each in muon_cases.split(cases.make_mlp()))
    for found in (results := pools(2).run(memory, stage)):
        assert found["measured_model_state_bytes"] == found["predicted_model_state_bytes"]
    whole = sum(found["live_state_bytes"] for found in results) / (2 if stage == "0" else 1)
    exact = 4 * matrices + 8 * rest
    padding = 8 * 32 * len(list(cases.make_mlp().parameters()))
    assert exact <= whole <= exact + padding


# Forms


class Tied(nn.Module):
    """An embedding, its output layer (tied, or of the same shape), hidden matrices, a convolution, vectors."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.hidden = nn.Linear(8, 12)
        self.back = nn.Linear(12, 8, bias=False)
        self.conv = nn.Conv1d(8, 8, 1)
        self.head = nn.Linear(8, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.back(self.hidden(self.embed(ids)).tanh())
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("tied", [True, False])
def test_hidden_matrices_are_neither_embeddings_nor_the_output_layer(tied: bool) -> None:
    model = Tied(tied=tied)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(each)] for each in hidden_matrices(model)] == ["hidden.weight", "back.weight"]
    model.back.weight.use_muon = False  # type: ignore[attr-defined]
    model.embed.weight.use_muon = True  # type: ignore[attr-defined]
    assert {names[id(each)] for each in hidden_matrices(model)} == {"hidden.weight", "embed.weight"}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hidden_matrices_of_transformers_are_those_of_its_layers(name: str) -> None:
    model = cases.MODELS[name]()
    hidden = {id(parameter) for parameter in hidden_matrices(model)}
    for parameter_name, parameter in model.named_parameters():
        in_layers = ".h." in parameter_name or ".layers." in parameter_name
        assert (id(parameter) in hidden) is (in_layers and parameter.dim() == 2), parameter_name


def by_name(params: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {**config(**options), "optimizer": {"type": "muon", "params": params}}


def test_by_name_it_is_the_pair() -> None:
    ids, results = torch.arange(34).view(2, 17) % 17, []
    for form in ("name", "pair", "one"):
        torch.manual_seed(5)
        model = Tied(tied=True)
        hidden = {id(parameter) for parameter in hidden_matrices(model)}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in hidden]
        muon: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
        adamw: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.9, 0.95)}
        settings = config()
        optimizer: Any = None
        loop: list[Any] = []
        if form == "name":
            settings = by_name({"muon_lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.1, "adam_weight_decay": 0.0,
                                "betas": [0.9, 0.95]})  # fmt: skip
        elif form == "pair":
            loop = [torch.optim.Muon(hidden_matrices(model), **muon), torch.optim.AdamW(rest, **adamw)]
            optimizer = loop
        else:
            optimizer = MuonWithAdamW(
                [{"params": hidden_matrices(model), "use_muon": True, **muon},
                 {"params": rest, "use_muon": False, **adamw}]
            )  # fmt: skip
        engine = shardengine.initialize(model, settings, optimizer=optimizer)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in loop]
        for step in range(3):
            for each in loop:
                each.zero_grad()
            engine.backward(engine(ids).square().mean())
            for stepping in (*loop, *([] if loop else [engine])):
                stepping.step()
            for schedule in schedules:
                schedule.step()
            assert engine.optimizer is not None
            for group in engine.optimizer.param_groups if not loop else ():
                group["lr"] *= 0.5
            assert engine.global_steps == step + 1
        assert engine.optimizer is not None and engine.optimizer.kind == "Muon"
        results.append({name: value.clone() for name, value in engine.state_dict().items()})
        if loop:
            with raises("optimizer-pair-called-singly", "state_dict"):
                loop[0].state_dict()
        engine.close()
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name


def test_the_pair_takes_groups_of_its_own_kind() -> None:
    network: Any = cases.make_mlp()
    network.blocks[1][0].requires_grad_(False)
    matrices, rest = muon_cases.split(network)
    pair = [torch.optim.AdamW(rest, **muon_cases.ADAMW), torch.optim.Muon(matrices, **muon_cases.MUON)]
    engine = shardengine.initialize(network, config("1"), optimizer=pair)
    network.blocks[1][0].requires_grad_(True)
    pair[1].add_param_group({"params": [network.blocks[1][0].weight]})
    pair[0].add_param_group({"params": [network.blocks[1][0].bias]})
    cases.run_steps(engine, 1)
    kinds = {(name, key) for name, key, *_ in cases.local_state(engine) if name.startswith("blocks.1.0")}
    assert kinds == {
        ("blocks.1.0.weight", "weight"), ("blocks.1.0.weight", "momentum_buffer"), ("blocks.1.0.bias", "weight"),
        ("blocks.1.0.bias", "exp_avg"), ("blocks.1.0.bias", "exp_avg_sq"),
    }  # fmt: skip
    assert [len(each.param_groups) for each in pair] == [2, 2]
    assert engine.optimizer is not None and engine.optimizer.param_groups[2]["momentum"] == 0.9
    engine.close()
    assert pair[0].state_dict()["state"] == {}  # its own again


# Dicts


def test_plain_torch_and_an_engine_take_each_others_dicts() -> None:
    """torch's class: bit for bit, in both directions, and dicts that are equal."""
    network = muon_cases.alone(cases.make_mlp())
    optimizer = muon_cases.make_muon(muon_cases.split(network)[0])
    plain(network, [optimizer], 0, 3)
    engine = muon_cases.engine_of("alone", config("2"))
    assert engine.optimizer is not None
    engine.load_state_dict(network.state_dict())
    engine.optimizer.load_state_dict(optimizer.state_dict())
    for step in (3, 4):
        cases.run_micro_batch(engine, cases.loss_of, step, 0)
    plain(network, [optimizer], 3, 5)
    found, expected = engine.optimizer.state_dict(), optimizer.state_dict()
    for number, entry in expected["state"].items():
        assert list(found["state"][number]) == list(entry)
        assert torch.equal(found["state"][number]["momentum_buffer"], entry["momentum_buffer"])
    assert found["param_groups"] == expected["param_groups"]
    assert all(torch.equal(engine.state_dict()[key], value) for key, value in network.state_dict().items())
    engine.close()


def test_the_dict_of_both_has_what_each_class_keeps() -> None:
    engine = muon_cases.engine_of("both", config("1"))
    assert engine.optimizer is not None
    for step in range(2):
        cases.run_micro_batch(engine, cases.loss_of, step, 0)
    network = cases.make_mlp()
    optimizer = muon_cases.make_both(network)
    plain(network, [optimizer], 0, 2)
    found, expected = engine.optimizer.state_dict(), optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert {n: list(entry) for n, entry in found["state"].items()} == {
        n: list(entry) for n, entry in expected["state"].items()
    }
    optimizer.load_state_dict(found)
    engine.optimizer.load_state_dict(expected)
    state = {key for _, key, *_ in cases.local_state(engine)}
    assert state == {"weight", "momentum_buffer", "exp_avg", "exp_avg_sq"}
    with engine.full_optimizer_state() as whole:
        kept = {name: set(entry or {}) for name, entry in (whole or {}).items()}
    assert kept["out.weight"] == {"weight", "momentum_buffer", "step"}
    assert kept["out.bias"] == {"weight", "exp_avg", "exp_avg_sq", "step"}
    engine.close()


def test_plain_torch_goes_on_from_an_export(tmp_path: Path) -> None:
    """In the form of torch.distributed.checkpoint."""
    engine = muon_cases.engine_of("both", config("2"))
    for step in range(2):
        cases.run_micro_batch(engine, cases.loss_of, step, 0)
    engine.save_checkpoint(str(tmp_path / "saved"))
    kept = {(name, key): values for name, key, _, values in cases.local_state(engine)}
    weights, optimizer = engine.state_dict(), muon_cases.make_both(network := cases.make_mlp())
    engine.close()
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--format", "dcp"]) == 0
    elsewhere.loaded(str(tmp_path / "out"), network, optimizer, False)
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, weights[name])
        for key, value in optimizer.state[parameter].items():
            if key != "step":
                assert torch.equal(value.reshape(-1), torch.from_numpy(kept[name, key])), (name, key)
    plain(network, [optimizer], 2, 3)


# Refusals


def test_who_steps_a_group_stays(tmp_path: Path) -> None:
    def made(*, muon: bool) -> shardengine.Engine:
        network = muon_cases.alone(cases.make_mlp())
        options = muon_cases.MUON if muon else muon_cases.ADAMW
        groups = [{"params": muon_cases.split(network)[0], "use_muon": muon, **options}]
        return shardengine.initialize(network, config(), optimizer=MuonWithAdamW(groups))

    first = made(muon=True)
    assert first.optimizer is not None
    cases.run_steps(first, 1)
    first.save_checkpoint(str(tmp_path))
    states = first.optimizer.state_dict()
    second = made(muon=False)
    assert second.optimizer is not None
    for strict in (True, False):
        with pytest.raises(UsageError, match=r"group 0: its parameters are stepped by another optimizer.*use_muon"):
            second.load_checkpoint(str(tmp_path), strict=strict)
    with raises("optimizer-state-does-not-fit", "use_muon"):
        second.optimizer.load_state_dict(states)
    second.optimizer.param_groups[0]["use_muon"] = True
    with raises("optimizer-use-muon-changed"):
        cases.run_steps(second, 1)
    first.close()
    second.close()


def test_what_cannot_be_is_said_in_a_sentence() -> None:
    network = cases.make_mlp()
    matrices, rest = muon_cases.split(network)
    muon, adamw = torch.optim.Muon(matrices), torch.optim.AdamW(rest)
    vectors = nn.Sequential(nn.LayerNorm(4))
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (network, {"optimizer": [muon]}, r"or \[torch.optim.Muon.*got \[Muon\]"),
        (network, {"optimizer": [adamw, torch.optim.AdamW(matrices)]}, r"got \[AdamW, AdamW\]"),
        (network, {"optimizer": [muon, torch.optim.AdamW(rest, amsgrad=True)]}, "without amsgrad"),
        (network, {"optimizer": [muon, torch.optim.AdamW(network.parameters())]}, "one that is in both"),
        (network, {"optimizer": [muon, torch.optim.SGD(rest)]}, r"got \[Muon, SGD\]"),
    ]
    for model, arguments, words in refused:
        with pytest.raises(UsageError, match=words):
            shardengine.initialize(model, config(), **arguments)
    with raises("optimizer-muon-no-matrices"):
        shardengine.initialize(vectors, by_name({"lr": 0.1}))
    split = config(bf16={"enabled": True, "split_masters": True})
    for form in (muon, [muon, adamw]):
        with raises("optimizer-without-split-masters", "torch.optim.M"):
            shardengine.initialize(network, split, optimizer=form)
    narrow = config(data_types={"optimizer_state_dtype": "8bit"})
    with raises("optimizer-states-only-fp32"):
        shardengine.initialize(network, narrow, optimizer=muon)
    groups: list[dict[str, Any]] = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
    with raises("optimizer-groups-differ", "amsgrad", "group 1"):
        options = [groups[0], {**groups[1], "amsgrad": True}]
        shardengine.initialize(network, config(), optimizer=MuonWithAdamW(options))
    zero = {"offload_optimizer": {"device": "cpu", "step_in_backward": True}}
    with raises("optimizer-not-in-backward", "Muon"):
        shardengine.initialize(network, config("2", zero=zero), optimizer=muon)
    with pytest.raises(ConfigError, match="ns_coefficients: expected a list of three numbers"):
        shardengine.initialize(network, by_name({"ns_coefficients": [1, 2]}))
    with raises("optimizer-muon-group-unmarked", "'use_muon'"):
        MuonWithAdamW([{"params": matrices}])
    with raises("optimizer-muon-not-a-matrix"):
        MuonWithAdamW([{"params": rest, "use_muon": True}])
    plain(network, [muon, adamw], 0, 1)
    with raises("optimizer-already-stepped"):
        shardengine.initialize(network, config(), optimizer=[muon, adamw])
