"""Import of DeepSpeed's checkpoints: the values that DeepSpeed itself says, at every stage and precision; what follows.

``tests/data/make_deepspeed.py`` made the checkpoints with DeepSpeed, and tells what they hold.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import shardengine
from shardengine.app.cli import main
from shardengine.errors import CheckpointError, UsageError
from shardengine.interchange import deepspeed, unsharded, writing
from shardengine.interchange.foreign import Foreign, ForeignParameter
from shardengine.interchange.shards import ShardPart, rows_by_group, rows_by_parameter
from tests.data import make_deepspeed as made
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
DATA = Path(made.__file__).parent


def expected_of(name: str) -> dict[str, Tensor]:
    return load_file(DATA / f"deepspeed-{name}" / "expected.safetensors")


@pytest.mark.parametrize("name", made.CASES)
def test_every_value_is_what_deepspeed_says(name: str):
    foreign, expected = deepspeed.read(DATA / f"deepspeed-{name}"), expected_of(name)
    options = made.CASES[name]
    found = {f"buffer/{key}": value for key, value in foreign.buffers.items()}
    for parameter in foreign.parameters:
        found |= {f"{state}/{parameter.names[0]}": parameter.read(state) for state in parameter.states}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key

    ranks, kind = options.get("ranks", made.RANKS), options.get("kind", "AdamW")
    assert foreign.source == f"DeepSpeed 0.19.8, ZeRO stage {options['stage']}, {ranks} ranks"
    counters = (foreign.global_steps, foreign.global_samples, foreign.micro_steps)
    assert counters == (made.STEPS, made.STEPS * ranks, made.STEPS)
    assert foreign.kind == kind and [group["weight_decay"] for group in foreign.groups] == [0.1, 0.0]
    assert foreign.loss_scale == (256 if options.get("low") == "fp16" else None)
    texts = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert {parameter.dtype for parameter in foreign.parameters} == {texts[options.get("low")]}
    table = {p.names: (p.trainable, p.group) for p in foreign.parameters}
    assert table == {
        ("gain",): (True, 1), ("embed.weight", "head.weight"): (True, 0), ("norm.weight",): (True, 1),
        ("norm.bias",): (True, 1), ("fixed.weight",): (False, -1), ("fixed.bias",): (False, -1),
        ("inner.weight",): (True, 0), ("inner.bias",): (True, 1), ("back.weight",): (True, 0),
        ("back.bias",): (True, 1),
    }  # fmt: skip
    first = made.STEPS + (name == "stage0-bf16")  # there DeepSpeed makes the states by a step with zeros
    assert {p.steps for p in foreign.parameters if p.trainable} == {first}
    order = [note for note in foreign.notes if "nothing else tells apart" in note]
    assert len(order) == (name == "stage0-fp32")
    assert foreign.notes == [
        *order,
        "learning-rate scheduler (last_batch_iteration 2): its class is not named; its state is in the client state, "
        'as "lr_scheduler"',
    ]
    assert foreign.client_state == {"epoch": 2, "lr_scheduler": {"last_batch_iteration": 2}}


def engine_of(name: str, stage: str, ranks: int) -> shardengine.Engine:
    options = made.CASES[name]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options.get("ranks", made.RANKS) // ranks,
        "zero_optimization": {**cases.STAGES[stage], "reduce_bucket_size": 64},
    }
    if "low" in options:
        config["bf16"] = {"enabled": True}
    model, kind = made.make_model(), options.get("kind", "AdamW")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    classes: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
    optimizer = classes[kind](made.groups_of(model, kind), lr=1e-3)
    mesh = cases.mesh_of_this_process() if torch.distributed.is_initialized() else None
    return shardengine.initialize(model, config, optimizer=optimizer, mesh=mesh)


STAGES_OF = {"stage0-fp32": "023", "stage1-mixed": "1", "stage2-sgd": "03", "stage3-bf16": "23"}
"""Checkpoint → the stages of ours that go on from it."""


def go_on(folder: str, ranks: int) -> dict[tuple[str, str], Any]:
    """Per (checkpoint, stage): what this rank holds after loading, options, counters; the weights two steps later."""
    found = {}
    for name, stages in STAGES_OF.items():
        for stage in stages:
            engine = engine_of(name, stage, ranks)
            engine.load_checkpoint(f"{folder}/{name}")
            pieces, low = cases.local_state(engine), "low" in made.CASES[name]
            buffers = {key: cases.copy_out(value) for key, value in engine.module.named_buffers()}
            assert engine.optimizer is not None
            rates = [group["lr"] for group in engine.optimizer.param_groups]
            counters = (engine.global_steps, engine.global_samples, engine.micro_steps, rates)
            for step in (made.STEPS, made.STEPS + 1) if not low else ():
                engine.backward(engine(made.batch(step, engine.rank)))
                engine.step()
            weights = {key: cases.copy_out(value).float().numpy() for key, value in engine.state_dict().items()}
            found[name, stage] = (pieces, buffers, counters, weights)
            engine.close()
    return found


def plainly(name: str, ranks: int) -> dict[str, Tensor]:
    """The weights after two more steps of one process of plain torch that begins with DeepSpeed's own values."""
    expected, foreign = expected_of(name), deepspeed.read(DATA / f"deepspeed-{name}")
    model, kind = made.make_model(), made.CASES[name].get("kind", "AdamW")
    groups = made.groups_of(model, kind)
    for group, saved in zip(groups, foreign.groups, strict=True):
        group["lr"] = saved["lr"]
    classes: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
    optimizer = classes[kind](groups, lr=1e-3)
    for key, parameter in model.named_parameters():
        parameter.data.copy_(expected[f"weight/{key}"])
        if parameter.requires_grad:
            states = {state: expected[f"{state}/{key}"] for state in made.states_of(kind)}
            optimizer.state[parameter] = {"step": torch.tensor(float(made.STEPS)), **states}
    for step in (made.STEPS, made.STEPS + 1):
        torch.stack([model(made.batch(step, rank)) for rank in range(ranks)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach() for key, value in model.state_dict().items()}


RATES = "ignore:.*options of the optimizer are the checkpoint's:UserWarning"
"""Rates that a schedule of DeepSpeed has moved."""


@pytest.mark.filterwarnings(RATES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_at_any_stage_takes_it_over_and_trains_on(ranks: int, tmp_path: Path, pools: Pools):
    for name in STAGES_OF:
        place = writing.write(deepspeed.read(DATA / f"deepspeed-{name}"), tmp_path / name)
        assert place == tmp_path / name / "step-00000003"
    rows = [go_on(str(tmp_path), 1)] if ranks == 1 else pools(2).run(go_on, str(tmp_path), 2)
    for name, stages in STAGES_OF.items():
        expected, groups = expected_of(name), deepspeed.read(DATA / f"deepspeed-{name}").groups
        after = []
        for stage in stages:
            pieces = cases.assemble([row[name, stage][0] for row in rows])
            states = ("weight", *made.states_of(made.CASES[name].get("kind", "AdamW")))
            assert len(pieces) == 8 * len(states)
            for (parameter, state), flat in pieces.items():
                whole = expected[f"{state}/{parameter}"].reshape(-1)
                assert torch.equal(torch.from_numpy(flat), whole), (name, stage, parameter, state)
            _, buffers, counters, weights = rows[0][name, stage]
            assert all(torch.equal(value, expected[f"buffer/{key}"]) for key, value in buffers.items())
            assert counters == (3, 6, 3, [group["lr"] for group in groups])
            after.append(weights)
        if "low" in made.CASES[name]:
            continue
        for key, value in plainly(name, ranks).items():
            assert all(weights[key].tobytes() == after[0][key].tobytes() for weights in after), (name, key)
            # the engine's declared arithmetic rounds in another order than torch.optim: a few units in the last place
            torch.testing.assert_close(torch.from_numpy(after[0][key]), value.float(), rtol=2e-5, atol=2e-6)


def copied(name: str, folder: Path) -> Path:
    """A copy of a checkpoint, to be harmed."""
    shutil.copytree(DATA / f"deepspeed-{name}", folder / name)
    return folder / name


@pytest.mark.parametrize("name", ["stage0-fp32", "stage1-mixed", "stage3-bf16"])
def test_a_file_that_is_missing_or_cut_off_is_named(name: str, tmp_path: Path):
    paths = sorted((DATA / f"deepspeed-{name}" / "global_step3").iterdir())
    for number, path in enumerate(paths):
        victim = copied(name, tmp_path / str(number)) / "global_step3" / path.name
        data = victim.read_bytes()
        for count in (len(data) - 30, 200, 0):
            victim.write_bytes(data[:count])
            with pytest.raises(CheckpointError, match=f"{path.name} is cut off.*expected a zip archive"):
                deepspeed.read(victim.parents[1])
        victim.unlink()
        only = sum(other.name.endswith(path.name[-15:]) for other in paths) == 1
        with pytest.raises(CheckpointError, match="expected a file .*_model_states" if only else path.name):
            deepspeed.read(victim.parents[1])


def test_files_of_different_saves_are_refused(tmp_path: Path):
    place = copied("stage1-fp32", tmp_path) / "global_step3"
    for path in (DATA / "deepspeed-stage2-sgd" / "global_step3").glob("*_optim_states.pt"):
        shutil.copy(path, place)
    foreign = deepspeed.read(place.parent)
    with raises("import-files-of-different-saves", "gain", "mp_rank_00_model"):
        writing.write(foreign, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())  # nothing is left of it
    extra = place / "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    shutil.copy(place / "zero_pp_rank_1_mp_rank_00_optim_states.pt", extra)
    with raises("import-files-of-different-saves", "into 2", "are 3"):
        deepspeed.read(place.parent)
    extra.rename(place / "zero_pp_rank_0_mp_rank_01_optim_states.pt")
    with raises("import-model-parallel"):
        deepspeed.read(place.parent)


def test_tags_and_what_is_not_there(tmp_path: Path):
    source = DATA / "deepspeed-stage1-fp32"
    assert deepspeed.read(source, "global_step3").global_steps == 3
    assert deepspeed.read(source / "global_step3").global_steps == 3
    for tag, error in (("../deepspeed-stage1-fp32", UsageError), ("..", UsageError), ("no", CheckpointError)):
        with pytest.raises(error, match=r"tag|no checkpoint"):
            deepspeed.read(source, tag)
    with raises("import-not-of-deepspeed"):
        deepspeed.read(tmp_path)


def test_the_command_says_what_it_takes_over_and_what_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out"
    assert main(["import", str(DATA / "deepspeed-stage3-fp16"), str(out)]) == 0
    text = capsys.readouterr().out
    for part in (
        f"imported DeepSpeed 0.19.8, ZeRO stage 3, 3 ranks: {out / 'step-00000003'}", "AdamW, groups: 2",
        "10 parameters (float16, 2 frozen, 1 with several names), 2 buffers", '"lr_scheduler"',
        "how long the loss scale (256, imported) has held", "steps: 3, samples: 9",
    ):  # fmt: skip
        assert part in text
    assert main(["import", str(DATA / "deepspeed-stage3-fp16"), str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["import", str(tmp_path), str(out)]) == 2
    assert "there are neither" in capsys.readouterr().err
    assert main(["import", str(tmp_path), str(out), "--from", "deepspeed"]) == 1
    assert "a file 'latest'" in capsys.readouterr().err


# Stage 0: an optimizer that does not say which parameters it steps


def adam(*shapes: tuple[int, ...]) -> dict[str, Any]:
    state = {i: {"exp_avg": torch.rand(shape), "step": torch.tensor(2.0)} for i, shape in enumerate(shapes)}
    return {"state": state, "param_groups": [{"params": list(state), "lr": 0.1}]}


def test_what_a_whole_optimizer_steps_is_found_by_shapes():
    weights = {"a": torch.rand(2, 3), "b": torch.rand(3), "c": torch.rand(2, 3), "d": torch.rand(3)}
    rows = unsharded.rows_of(adam((2, 3), (3,), (2, 3), (3,)), weights, 0, [])
    assert rows is not None and list(rows) == list("abcd") and rows["c"].steps == 2
    assert torch.equal(rows["c"].read("weight"), weights["c"])
    assert unsharded.rows_of(adam((2, 3), (3,), (2, 3)), weights, 0, []) is not None  # "d" is frozen, "b" before "c"
    assert unsharded.rows_of(adam((2, 3), (3,)), weights, 0, []) is None  # "a" or "c"?
    assert unsharded.rows_of(adam((3,), (2, 4)), weights, 0, []) is None
    named = adam((2, 3), (3,))
    named["param_groups"][0]["param_names"] = ["c", "d"]
    rows = unsharded.rows_of(named, weights, 0, [])
    assert rows is not None and list(rows) == ["c", "d"]


def test_what_a_whole_optimizer_steps_is_found_by_flat_master_weights():
    """The form of DeepSpeed's FusedAdam at stage 0 in half precision: one vector per group, the step in the group."""
    shapes = {"a": (4, 3), "b": (3,), "c": (4, 3), "d": (3, 4)}
    weights = {name: torch.rand(shape).half() for name, shape in shapes.items()}
    masters = [torch.cat([weights["a"].reshape(-1), weights["c"].reshape(-1)]).float() * (1 + 1e-5)]
    inner = {"state": {0: {"exp_avg": torch.rand(24)}}, "param_groups": [{"params": [0], "lr": 0.1, "step": 7}]}
    rows = unsharded.rows_of({"optimizer_state_dict": inner, "fp32_groups_flat": masters}, weights, 0, [])
    assert rows is not None and list(rows) == ["a", "c"] and rows["c"].steps == 7
    assert torch.equal(rows["c"].read("weight"), masters[0][12:].reshape(4, 3))
    assert torch.equal(rows["c"].read("exp_avg"), inner["state"][0]["exp_avg"][12:].reshape(4, 3))  # type: ignore[index]


# Shards


def part(tensors: list[Tensor], states: list[dict[str, Any]]) -> ShardPart:
    groups = [{"params": [number]} for number in range(len(states))]
    base = {"state": dict(enumerate(states)), "param_groups": groups}
    return ShardPart(Path("file.pt"), {"single_partition_of_fp32_groups": tensors, "fp32_flat_groups": tensors,
                                  "base_optimizer_state": base})  # fmt: skip


@pytest.mark.parametrize("rows_of", [rows_by_group, rows_by_parameter])
def test_vectors_of_another_length_are_refused(rows_of: Any):
    shapes: Any = [{"a": (3, 3), "b": (2,)}]
    for weights, states, text in (
        ([6, 6], [6, 6], ""),
        ([6, 4], [6, 6], r"weight of .* elements, expected"),
        ([6, 6], [6, 4], r"exp_avg of .* elements, expected"),
        ([8, 8], [8, 8], r"weight of .* elements, expected"),
    ):
        parts = [part([torch.rand(n)], [{"exp_avg": torch.rand(m)}]) for n, m in zip(weights, states, strict=True)]
        if not text:
            assert rows_of(parts, shapes, 5)["b"].steps == 5
            continue
        with pytest.raises(CheckpointError, match=text):
            rows_of(parts, shapes, 5)
    short = [part([torch.rand(6)], [{}]), part([], [{}])]
    with raises("import-sizes-do-not-match"):
        rows_of(short, shapes, 0)
    apart = [part([torch.rand(6)], [{"step": torch.tensor(float(step))}]) for step in (3, 4)]
    with raises("import-files-of-different-saves", "[3, 4]"):
        rows_of(apart, shapes, 0)


# Writing


def parameter(name: str, value: Tensor, steps: int = 0) -> ForeignParameter:
    shape = tuple(value.shape)
    return ForeignParameter((name,), shape, value.dtype, True, 0, steps, ("weight",), lambda state: value)


def foreign_of(model: torch.nn.Module, steps: int = 0) -> Foreign:
    rows = [parameter(name, value.detach(), steps) for name, value in model.named_parameters()]
    return Foreign("nowhere", rows, {}, "AdamW", [{"lr": 0.5}], 4, 8, 4, None, [])


def test_states_that_torch_makes_at_the_first_step_begin_at_zero(tmp_path: Path):
    torch.manual_seed(1)
    source, model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    writing.write(foreign_of(source), tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = shardengine.initialize(model, {"train_micro_batch_size_per_gpu": 2}, optimizer=optimizer)
    with pytest.warns(UserWarning, match="lr of group 0 is 0.5, and this run began with 0.001"):
        assert engine.load_checkpoint(tmp_path).global_steps == 4
    assert torch.equal(engine.state_dict()["weight"], source.weight) and optimizer.param_groups[0]["lr"] == 0.5
    assert all(not values.any() for _, state, _, values in cases.local_state(engine) if state != "weight")
    engine.close()
    writing.write(foreign_of(source, steps=2), tmp_path, "torn")
    model = torch.nn.Linear(3, 2)
    engine = shardengine.initialize(
        model, {"train_micro_batch_size_per_gpu": 2}, optimizer=torch.optim.AdamW(model.parameters())
    )
    with pytest.raises(UsageError, match="AdamW has no state in the checkpoint, exp_avg and exp_avg_sq here"):
        engine.load_checkpoint(tmp_path, "torn")
    engine.close()


def test_what_cannot_be_read_is_named_and_leaves_nothing(tmp_path: Path):
    def broken(state: str) -> Tensor:
        return torch.rand(5).reshape(2, 3)

    good = parameter("bias", torch.rand(2))
    for read, text in ((broken, "its files are damaged"), (lambda state: torch.rand(3, 2), r"got float32 \(3, 2\)")):
        bad = ForeignParameter(("weight",), (2, 3), torch.float32, True, 0, 0, ("weight",), read)
        foreign = Foreign("nowhere", [good, bad], {}, "AdamW", [{"lr": 0.5}], 4, 8, 4, None, [])
        with pytest.raises(
            CheckpointError, match=rf"weight \(weight\): expected float32 \(2, 3\) from nowhere, {text}"
        ):
            writing.write(foreign, tmp_path)
        assert not list(tmp_path.iterdir())
