"""Optimizer states in bf16 and in 8 bits: the oracle's bits at every stage, number of ranks and tier; their bytes."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardengine
from shardengine.errors import MismatchError, ShardEngineError, UsageError
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS, SEED = 6, 77
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "all of it on cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme": {"offload_optimizer": {"device": "nvme"}},
    "in backward": {"offload_optimizer": {"device": "cpu", "step_in_backward": True}},
}
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}),
    "pure bf16": (
        {"bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True}},
        {"low": torch.bfloat16, "keeps_masters": False, "seed": SEED},
    ),
    "split": (
        {"bf16": {"enabled": True, "split_masters": True}},
        {"low": torch.bfloat16, "keeps_masters": False},
    ),
}


def config_of(stage: str, kept_in: str, micros: int = 1, **options: Any) -> dict[str, Any]:
    return cases.config_of(stage, micros, seed=SEED, data_types={"optimizer_state_dtype": kept_in}, **options)


def train(model: str, kind: str, config: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    engine = cases.make_engine(cases.MODELS[model](), config, kind)
    result = cases.run_steps(engine, steps)
    engine.close()
    return result


def truth(model: str, kind: str, ranks: int, micros: int, order: str, clip: float, **options: Any) -> oracle.Trace:
    return cases.truth(model, kind, ranks, micros, order, STEPS, clip, **options)


def runs() -> list[tuple[Any, ...]]:
    """Each pair of settings at least once, without what the engine refuses."""
    kinds, models = ("AdamW", "SGD", "Lion", "Adam"), ("gpt2", "mlp")
    parts = (("8bit", "bf16", "fp32"), kinds, (1, 2, 3, 4), cases.STAGES, (1, 3), PRECISIONS, PLACES, models)
    found = covering(row for row in itertools.product(*parts) if is_tried(row[0], row[3], row[5], row[6]))
    least = [("8bit", "AdamW", 2, stage, 1, "split", "device", "gpt2") for stage in cases.STAGES]
    return list(dict.fromkeys((*found, *least)))


def is_tried(kept_in: str, stage: str, precision: str, place: str) -> bool:
    """fp32 states without remainders are in other files; the rest is refused."""
    if place == "all of it on cpu" and stage != "3":
        return False
    return not (place == "in backward" and stage == "0") and (kept_in != "fp32" or precision == "split")


@pytest.mark.parametrize(("kept_in", "kind", "ranks", "stage", "micros", "precision", "place", "model"), runs())
def test_states_have_the_bits_of_the_oracle(
    pools: Pools, tmp_path: Any, kept_in: str, kind: str, ranks: int, stage: str, micros: int, precision: str,
    place: str, model: str,
) -> None:  # fmt: skip
    zero = {
        key: {**value, "nvme_path": str(tmp_path)} if place == "nvme" else value for key, value in PLACES[place].items()
    }
    ours, theirs = PRECISIONS[precision]
    clip = cases.CLIP
    config = config_of(stage, kept_in, micros, zero=zero, **ours)
    if place == "in backward":
        clip = config["gradient_clipping"] = 0.0
    results = pools(ranks).run(train, model, kind, config)
    expected = truth(
        model,
        kind,
        ranks,
        micros,
        cases.LETTER[stage],
        clip,
        kept_in=(kept_in + " split" * (precision == "split"), SEED),
        **theirs,
    )
    assert_equal_to_truth(results, expected, (kept_in, kind, stage))


# From one run to the next


def config_with(stage: str, kept_in: str) -> dict[str, Any]:
    """kept_in: "… split" for bf16 weights with remainders."""
    options = PRECISIONS["split"][0] if "split" in kept_in else {}
    return config_of(stage, kept_in.removesuffix(" split"), **options)


def truth_with(kept_in: str) -> oracle.Trace:
    options = PRECISIONS["split"][1] if "split" in kept_in else {}
    return truth("gpt2", "AdamW", 2, 1, "full", cases.CLIP, kept_in=(kept_in, SEED), **options)


def train_in_two(kept_in: str, stages: tuple[str, str], folder: str, part: int) -> dict[str, Any]:
    """Steps 0 to 2 and a checkpoint, or from there on to the end."""
    engine = cases.make_engine(cases.make_gpt2(), config_with(stages[part], kept_in))
    if part:
        engine.load_checkpoint(folder)
    before = cases.local_state(engine)
    losses = [[cases.run_micro_batch(engine, cases.loss_of, step, 0)] for step in range(3 * part, 3 * part + 3)]
    if not part:
        engine.save_checkpoint(folder)
    found = {"losses": losses, "loaded": before, "state": cases.local_state(engine)}
    engine.close()
    return found


@pytest.mark.parametrize(
    ("kept_in", "stages"), [("8bit", ("0", "3")), ("8bit split", ("3", "1")), ("bf16", ("2", "3k"))]
)
def test_training_goes_on_at_another_stage_and_number_of_ranks(
    pools: Pools, tmp_path: Any, kept_in: str, stages: tuple[str, str]
) -> None:
    expected = truth_with(kept_in)
    before = pools(2).run(train_in_two, kept_in, stages, str(tmp_path), 0)
    for ranks in (3, 2):
        results = pools(ranks).run(train_in_two, kept_in, stages, str(tmp_path), 1)
        there, here = (cases.digest([each[key] for each in of]) for of, key in ((before, "state"), (results, "loaded")))
        assert there == here, ranks
    for rank, result in enumerate(results):
        assert result["losses"] == [row[rank] for row in expected.losses[3:]]


def through_dicts(kept_in: str, stages: tuple[str, str]) -> dict[str, Any]:
    """A run whose optimizer is handed over in torch's form, to plain torch, and to an engine at another stage."""
    engine = cases.make_engine(cases.make_gpt2(), config_with(stages[0], kept_in))
    assert engine.optimizer is not None
    losses = [[cases.run_micro_batch(engine, cases.loss_of, step, 0)] for step in range(3)]
    weights, states = engine.state_dict(), engine.optimizer.state_dict()
    engine.close()
    model = cases.make_gpt2()
    if weights:
        model.load_state_dict(weights)
        plain = cases.make_optimizer(model, "AdamW")
        plain.load_state_dict(states)
        assert all(state["exp_avg"].dtype is torch.float32 for state in plain.state.values())
    engine = cases.make_engine(cases.make_gpt2(), config_with(stages[1], kept_in))
    assert engine.optimizer is not None
    engine.load_state_dict(weights)
    engine.optimizer.load_state_dict(states)
    with engine.full_optimizer_state(writable=True) as full:  # what is written as it was changes nothing
        for entry in full.values():
            if entry is not None and "exp_avg" in entry:
                entry["exp_avg"].mul_(1.0)
    losses += [[cases.run_micro_batch(engine, cases.loss_of, step, 0)] for step in range(3, STEPS)]
    found = {"losses": losses, "state": cases.local_state(engine)}
    engine.close()
    return found


@pytest.mark.parametrize(
    ("kept_in", "stages"), [("8bit", ("1", "3")), ("bf16", ("3", "0")), ("8bit split", ("2", "1"))]
)
def test_states_go_through_torchs_dicts_and_full_tensors(pools: Pools, kept_in: str, stages: tuple[str, str]) -> None:
    expected = truth_with(kept_in)
    results = pools(2).run(through_dicts, kept_in, stages)
    for rank, result in enumerate(results):
        assert result["losses"] == [row[rank] for row in expected.losses]
    states = cases.assemble([result["state"] for result in results])
    for (name, key), value in states.items():
        if key != "weight":
            assert torch.equal(torch.from_numpy(value), expected.states[name][key].reshape(-1)), (name, key)


def unfreezing(kept_in: str, stage: str, folder: str) -> dict[str, Any]:
    """Half of the matrices join after two steps: all states move to another layout."""
    model = cases.make_gpt2()
    late = [p for name, p in model.named_parameters() if "h.1" in name]
    for parameter in late:
        parameter.requires_grad_(False)
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}} if folder else {}
    config = config_of(stage, kept_in, zero=zero)
    early = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": early}], lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    engine = shardengine.initialize(model, config, optimizer=optimizer, mesh=cases.mesh_of_this_process())
    assert engine.optimizer is not None
    for step in range(2):
        cases.run_micro_batch(engine, cases.loss_of, step, 0)
    before = cases.local_state(engine)
    for parameter in late:
        parameter.requires_grad_(True)
    engine.optimizer.add_param_group({"params": late, "lr": 1e-3})
    after = cases.local_state(engine)
    losses = [cases.run_micro_batch(engine, cases.loss_of, step, 0) for step in range(2, 5)]
    found = {"before": before, "after": after, "losses": losses, "state": cases.local_state(engine)}
    engine.close()
    return found


@pytest.mark.parametrize("kept_in", ["8bit", "bf16"])
def test_states_move_to_a_new_layout(pools: Pools, tmp_path: Any, kept_in: str) -> None:
    found = {
        stage: pools(2).run(unfreezing, kept_in, stage, folder)
        for stage, folder in (("0", ""), ("3", ""), ("2", str(tmp_path)))
    }
    for stage, results in found.items():
        before, after = (cases.assemble([each[key] for each in results]) for key in ("before", "after"))
        for name, value in before.items():
            assert (value == after[name]).all(), (stage, name)
        assert [each["losses"] for each in results] == [each["losses"] for each in found["0"]], stage
    digests = {cases.digest([each["state"] for each in results]) for results in found.values()}
    assert len(digests) == 1


# Bytes


PER_ELEMENT = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 + 8 / 256}


def bytes_of(stage: str, kept_in: str, tier: dict[str, Any]) -> dict[str, Any]:
    engine = cases.make_engine(cases.make_gpt2(), config_of(stage, kept_in, zero=tier))
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    optimizer, core = engine.optimizer, engine._core
    assert optimizer is not None
    held = [flat for state in core.reducer.buckets for flat in state.bucket.state_store.tensors().values()]
    found = {
        "elements": sum(bucket.sizes[core.stage.state] for bucket in core.layout.buckets),
        "bytes": sum(flat.untyped_storage().nbytes() for flat in held) if "nvme" not in repr(tier) else None,
        "memory": engine.memory(),
        "starts": {slot.start % 256 for flat in core.layout.flat_buffers for slot in flat.slots},
        "disk": sum(file.stat().st_blocks * 512 for file in core.tiers.files),
    }
    engine.close()
    return found


@pytest.mark.parametrize("kept_in", PER_ELEMENT)
@pytest.mark.parametrize(("stage", "place"), [("0", "device"), ("2", "cpu"), ("3", "nvme"), ("3", "device")])
def test_bytes_are_the_formula(pools: Pools, tmp_path: Any, stage: str, place: str, kept_in: str) -> None:
    tier = {key: {**value, "nvme_path": str(tmp_path)} if place == "nvme" else value
            for key, value in PLACES[place].items()}  # fmt: skip
    for row in pools(2).run(bytes_of, stage, kept_in, tier):
        expected = PER_ELEMENT[kept_in] * row["elements"]
        copies = 4 * row["elements"] if place != "device" else 0  # of the fp32 weights
        if row["bytes"] is not None:
            assert row["bytes"] == expected + copies
        memory = row["memory"]
        for key in ("model_state", "host", "disk"):
            assert memory[f"predicted_{key}_bytes"] == memory[f"measured_{key}_bytes"], key
        if place == "nvme":
            assert memory["measured_disk_bytes"] == expected + copies
            assert expected + copies <= row["disk"] <= expected + copies + 40 * 2 * 4096
        assert (row["starts"] == {0}) is (kept_in == "8bit")


def five_bytes(stage: str) -> dict[str, Any]:
    """What is alive of weights and states: not the engine's own count."""
    config = config_of(stage, "8bit", bf16={"enabled": True, "split_masters": True})
    engine = cases.make_engine(cases.make_gpt2(), config)
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    buckets, count = [state.bucket for state in engine._core.reducer.buckets], 0
    elements = sum(bucket.layout.sizes[bucket.state_placement] for bucket in buckets)
    for bucket in buckets:
        count += sum(flat.untyped_storage().nbytes() for flat in bucket.state_store.tensors().values())
        count += bucket.stepped_weights(writable=False).nbytes
    # what somebody writes into a weight is the weight; a zero is a zero
    shown = engine.state_dict()
    engine.load_state_dict({name: value * 0 for name, value in shown.items()} if shown else {})
    zeros = engine.state_dict()
    with engine.full_optimizer_state() as full:
        names = {tuple(entry) for entry in full.values() if entry is not None}
    engine.close()
    return {"each": count / elements, "zeros": all(not value.any() for value in zeros.values()), "names": names}


@pytest.mark.parametrize("stage", ["0", "3"])
def test_five_bytes_per_parameter(pools: Pools, stage: str) -> None:
    for found in pools(2).run(five_bytes, stage):
        assert found["each"] == 2 + 1 + PER_ELEMENT["8bit"]
        assert found["zeros"] and found["names"] == {("weight", "exp_avg", "exp_avg_sq", "remainder", "step")}


# What does not fit


def writing_misfits(stage: str) -> list[str]:
    """What a dict or ``full_optimizer_state`` would write that 8 bits do not hold; nothing is written then."""
    config = config_of(stage, "8bit", bf16={"enabled": True, "split_masters": True})
    engine = cases.make_engine(cases.make_mlp(), config)
    cases.run_steps(engine, 2)
    optimizer, said = engine.optimizer, list[str]()
    assert optimizer is not None
    before, given = cases.digest([cases.local_state(engine)]), optimizer.state_dict()
    misfits = (("remainder", 128.0), ("remainder", 0.5), ("remainder", math.nan), ("exp_avg_sq", -1e-9))
    for key, value in misfits:
        other = copy.deepcopy(given)
        for entry in list(other["state"].values())[-1:] if other else ():
            entry[key].view(-1)[0] = value
        with pytest.raises((UsageError, MismatchError)) as caught:
            optimizer.load_state_dict(other)
        said.append(str(caught.value))
        with (
            pytest.raises((UsageError, MismatchError)) as caught,
            engine.full_optimizer_state(["scale"], writable=True) as full,
        ):
            full["scale"][key].fill_(value)  # type: ignore[index]
        said.append(str(caught.value))
    assert cases.digest([cases.local_state(engine)]) == before
    with engine.full_optimizer_state(["scale"], writable=True) as full:
        full["scale"]["remainder"].fill_(-128)  # type: ignore[index]
        full["scale"]["exp_avg_sq"].fill_(math.nan)  # type: ignore[index]
    with engine.full_optimizer_state(["scale"]) as full:
        entry = full["scale"]
        assert entry is not None and float(entry["remainder"]) == -128 and math.isnan(entry["exp_avg_sq"])
    engine.close()
    return said


@pytest.mark.parametrize("stage", ["0", "3"])
def test_values_that_8_bits_do_not_hold_are_refused(pools: Pools, stage: str) -> None:
    said, other = pools(2).run(writing_misfits, stage)
    whole, positive = "expected whole numbers from -128 to 127", "expected numbers that are not negative"
    parts = [(whole, "128"), (whole, "0.5"), (whole, "nan"), (positive, "-1e-09")]
    for text, (expected, came) in zip(said, [part for part in parts for _ in range(2)], strict=True):
        assert f"{expected}, as 8 bits hold them, got {came}" in text and "nothing was" in text
    assert all("rank 0" in text for text in other)


# What cannot be


@pytest.mark.parametrize(
    ("optimizer", "config", "says"),
    [
        (torch.optim.RMSprop, {"data_types": {"optimizer_state_dtype": "8bit"}}, 'expected "fp32" for torch.optim.RMS'),
        (None, {"data_types": {"optimizer_state_dtype": "int4"}}, "optimizer_state_dtype"),
        (None, {"optimizer": {"type": "AdamW8bit", "params": {"amsgrad": True}}}, "amsgrad"),
        (None, {"bf16": {"enabled": True, "split_masters": True, "master_weights": False}}, "split_masters"),
        (None, {"optimizer": {"type": "AdamW8bit"}, "data_types": {"optimizer_state_dtype": "bf16"}}, "8 bits; leave"),
        (torch.optim.NAdam, {"bf16": {"enabled": True, "split_masters": True}}, "split_masters: expected AdamW"),
        (torch.optim.AdamW, {"bf16": {"enabled": True, "split_masters": True}, "ema": {"decay": 0.9}}, "averages are"),
        (None, {"optimizer": {"type": "AdamW8bits"}}, 'nearest known one is "AdamW8bit"'),
    ],
)  # fmt: skip
def test_refusals(optimizer: Any, config: dict[str, Any], says: str) -> None:
    model = cases.make_mlp()
    with pytest.raises(ShardEngineError, match=says):
        shardengine.initialize(
            model, {"train_micro_batch_size_per_gpu": 1, **config},
            optimizer=None if optimizer is None else optimizer(model.parameters(), lr=0.01),
        )  # fmt: skip


def test_a_checkpoint_with_other_states_is_refused_in_one_sentence(tmp_path: Any) -> None:
    first = cases.make_engine(cases.make_mlp(), config_of("2", "fp32"))
    cases.run_micro_batch(first, cases.loss_of, 0, 0)
    first.save_checkpoint(tmp_path)
    first.close()
    for kept_in in ("8bit", "bf16"):
        engine = cases.make_engine(cases.make_mlp(), config_of("2", kept_in))
        with pytest.raises(UsageError, match=f"in fp32 in the checkpoint, in {kept_in} here"):
            engine.load_checkpoint(tmp_path)
        engine.close()


def test_dicts_go_between_masters_and_remainders(caplog: pytest.LogCaptureFixture) -> None:
    """What one of them does not have is told, or begins at zero."""
    dicts = []
    for options in (PRECISIONS["bf16"][0], PRECISIONS["split"][0]):
        engine = cases.make_engine(cases.make_gpt2(), config_of("2", "fp32", **options))
        cases.run_micro_batch(engine, cases.loss_of, 0, 0)
        assert engine.optimizer is not None
        dicts.append((engine.state_dict(), engine.optimizer.state_dict()))
        engine.close()
    for (weights, states), options in zip(dicts, (PRECISIONS["split"][0], PRECISIONS["bf16"][0]), strict=True):
        caplog.clear()
        engine = cases.make_engine(cases.make_gpt2(), config_of("1", "fp32", **options))
        assert engine.optimizer is not None
        engine.load_state_dict(weights)
        engine.optimizer.load_state_dict(states)
        assert "are left out of parameters that have none here" in caplog.text
        with engine.full_optimizer_state() as full:
            entries = [entry for entry in full.values() if entry is not None]
            assert all(bool(entry["exp_avg"].any()) for entry in entries)
            assert not any(bool(entry.get("remainder", torch.zeros(1)).any()) for entry in entries)
        engine.close()


def test_names_in_a_config_keep_states_in_8_bits() -> None:
    for name, kind in (("AdamW8bit", "AdamW"), ("Lion8bit", "Lion")):
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": name, "params": {"lr": 1e-3}}}
        engine = shardengine.initialize(cases.make_mlp(), config)
        assert engine.optimizer is not None and engine.optimizer.kind == kind
        assert engine.optimizer.forms["exp_avg"].dtype is torch.uint8
        engine.close()


@pytest.mark.parametrize("kept_in", ["8bit", "bf16"])
def test_what_is_not_finite_shows(kept_in: str) -> None:
    """With steps that are not skipped a NaN is in the weights, as with fp32 states; it does not vanish in a code."""
    config = config_of("0", kept_in, nonfinite_gradients="step")
    config["gradient_clipping"] = 0.0
    engine = cases.make_engine(cases.make_mlp(), config)
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    loss = cases.loss_of(engine, 1, 0, 0) * float("nan")
    engine.backward(loss)
    engine.step()
    assert all(bool(value.isnan().all()) for value in engine.state_dict().values())
    engine.close()
