"""Loops that are written for DeepSpeed train bit for bit as the engine's own; checkpoints, gathering, refusals."""

from __future__ import annotations

import argparse
import copy
import gc
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
import shardengine.compat.deepspeed as deepspeed
from shardengine.compat.deepspeed import client_state
from shardengine.compat.deepspeed.schedules import WarmupLR
from shardengine.config import ZeroConfig
from shardengine.errors import CheckpointError, ConfigError, MismatchError, UsageError
from tests.support import cases
from tests.support.parts import is_hidden
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
RANKS, STEPS = 2, 3
CONFIG = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}}
SCHEDULE: dict[str, Any] = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}}


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    return {**CONFIG, **ADAM, **more, "zero_optimization": {"stage": stage}}


def batch_of(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 3, generator=generator)


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def train_ours(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = shardengine.initialize(
        make_model(),
        config_of(stage),
        lr_scheduler=lambda optimizer: WarmupLR(optimizer, **SCHEDULE["scheduler"]["params"]),
    )
    losses = []
    for number in range(2 * STEPS):
        x, y = batch_of(engine.rank, number)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses, {name: value.clone() for name, value in engine.module.state_dict().items()}


def whole(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of all weights, as scripts for DeepSpeed read them."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: value.detach().clone() for name, value in engine.module.named_parameters()}


def train_theirs(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """As a script for DeepSpeed does: the scheduler is the config's, the framework's boundary, gradients forgotten."""
    model = make_model()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(stage, **SCHEDULE)
    )
    assert loader is None and nn.Module in type(engine).__mro__ and engine.module is model and scheduler is not None
    assert isinstance(optimizer, torch.optim.Optimizer) and engine.optimizer is optimizer
    losses = []
    for number in range(2 * STEPS):
        x, y = batch_of(deepspeed.comm.get_rank(), number)
        engine.zero_grad()
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.global_steps == STEPS and engine.get_lr() == [group["lr"] for group in optimizer.param_groups]
    weights = whole(engine)
    engine.destroy()
    engine.destroy()
    return losses, weights


def both(stage: int) -> None:
    ours, weights = train_ours(stage)
    theirs, same = train_theirs(stage)
    assert ours == theirs
    for name, value in weights.items():
        assert torch.equal(value, same[name]), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loop_for_deepspeed_is_the_engines_own_bit_for_bit(stage: int, pools: Pools) -> None:
    pools(RANKS).run(both, stage)


def host_divides(stage: int) -> None:
    """A framework that says the boundary and divides itself: losses of three micro-batches, of which the last ends."""
    results = []
    for divides in (True, False):
        model = make_model()
        given = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine, *_ = deepspeed.initialize(model=model, optimizer=given, config_params=config_of(stage))
        for number in range(4):
            x, y = batch_of(deepspeed.comm.get_rank(), number)
            engine.set_gradient_accumulation_boundary(is_boundary=number % 2 == 1)
            loss = nn.functional.mse_loss(engine(x), y)
            engine.backward(loss / 2, scale_wrt_gas=False) if divides else engine.backward(loss)
            if number % 2 == 1:
                engine.step()
        assert engine.global_steps == 2 and engine.get_global_grad_norm() > 0
        results.append(whole(engine))
        engine.destroy()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.parametrize("stage", [1, 3])
def test_a_framework_may_say_the_boundary_and_divide_by_itself(stage: int, pools: Pools) -> None:
    pools(RANKS).run(host_divides, stage)


def save_and_resume(stage: int, folder: str) -> None:
    def step(engine: Any, number: int) -> float:
        x, y = batch_of(deepspeed.comm.get_rank(), number)
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        return loss.item()

    config = {**config_of(stage), "gradient_accumulation_steps": 1}
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    assert engine.load_checkpoint(folder) == (None, None)
    step(engine, 0)
    assert engine.save_checkpoint(folder, client_state={"epoch": 4})
    with pytest.raises(UsageError, match="expected None for custom_load_fn, which cannot"):
        engine.load_checkpoint(folder, load_universal=None, custom_load_fn=print)
    with pytest.raises(UsageError, match="expected loss, retain_graph= and scale_wrt_gas=, got create_graph="):
        engine.backward(torch.zeros(()), create_graph=True)
    after = [step(engine, number) for number in (1, 2)]
    engine.destroy()
    assert Path(folder, "latest").read_text(encoding="utf-8").strip() == "global_step1"
    engine, *_ = deepspeed.initialize(model=make_model(), config={**config, "zero_optimization": {"stage": 3 - stage}})
    path, client = engine.load_checkpoint(folder)
    assert path is not None and client == {"epoch": 4} and engine.global_steps == 1
    assert [step(engine, number) for number in (1, 2)] == pytest.approx(after, abs=1e-6)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_is_resumed_at_another_stage(stage: int, pools: Pools, tmp_path: Path) -> None:
    pools(RANKS).run(save_and_resume, stage, str(tmp_path))


def gather() -> None:
    model, other = make_model(), make_model()
    weight: Any = model[0].weight
    bias: Any = other[4].bias
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    with deepspeed.zero.Init(config_dict_or_path=config_of(3)):
        assert not hasattr(weight, "ds_id")
    engines = [deepspeed.initialize(model=each, config=config_of(3))[0] for each in (model, other)]
    status = deepspeed.runtime.zero.partition_parameters.ZeroParamStatus
    assert weight.ds_shape == (16, 8) and weight.ds_numel == 128 and weight.ds_status is status.NOT_AVAILABLE
    assert is_hidden(weight)
    with deepspeed.zero.GatheredParameters([*model.parameters(), *other.parameters()]):
        assert weight.ds_status is status.AVAILABLE
        assert torch.equal(weight.detach(), whole["0.weight"]) and torch.equal(bias, whole["4.bias"])
        with deepspeed.zero.GatheredParameters(weight):
            assert weight.ds_status is status.AVAILABLE
        assert weight.ds_status is status.AVAILABLE and torch.equal(weight.detach(), whole["0.weight"])
    assert weight.ds_status is status.NOT_AVAILABLE
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            weight.data.fill_(2.0)
    with deepspeed.zero.GatheredParameters(weight, enabled=True):
        assert torch.equal(weight.detach(), torch.full((16, 8), 2.0))
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(weight), torch.full((16, 8), 2.0))
    with pytest.raises(UsageError, match="modifier_rank None or 0"):
        deepspeed.zero.GatheredParameters(weight, modifier_rank=1)
    state = engines[0]._zero3_consolidated_16bit_state_dict()
    assert (set(state) == set(whole)) if deepspeed.comm.get_rank() == 0 else state == {}
    for engine in engines:
        engine.destroy()
    assert not hasattr(weight, "ds_id")
    again = deepspeed.initialize(model=model, config=config_of(3))[0]  # takes the shards over
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(weight.detach(), torch.full((16, 8), 2.0))
    again.destroy()


def test_sharded_parameters_are_gathered_by_the_engine_that_holds_them(pools: Pools) -> None:
    pools(RANKS).run(gather)


def written_by_rank_0(stage: int, low: bool) -> list[torch.Tensor]:
    """A weight that rank 0 alone has written, before and after a step with a rate of 0."""
    model = make_model()
    config = {**config_of(stage), "gradient_accumulation_steps": 1, "bf16": {"enabled": low}}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.0}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    weight: Any = model[2].weight
    with deepspeed.zero.GatheredParameters([weight, torch.ones(1)], modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            weight.data.fill_(2.0)
    found = [whole(engine)["2.weight"]]
    x, y = batch_of(0, 0)
    engine.backward(nn.functional.mse_loss(engine(x).float(), y))
    engine.step()
    found.append(whole(engine)["2.weight"])
    assert hasattr(weight, "ds_status") == hasattr(weight, "ds_id") == (stage == 3)
    engine.destroy()
    return [value.float() for value in found]


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_rank_0_has_written_every_rank_has_at_every_stage(stage: int, low: bool, pools: Pools) -> None:
    for values in pools(RANKS).run(written_by_rank_0, stage, low):
        assert all(torch.equal(value, torch.full((16, 16), 2.0)) for value in values)


def whole_state_dicts() -> None:
    model = make_model()
    given = {name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()}
    engine = deepspeed.initialize(model=model, config=config_of(3))[0]
    for call, prefix in (("state_dict", "module."), ("module_state_dict", "")):
        found = getattr(engine, call)()
        assert {name: value.shape for name, value in found.items()} == {prefix + n: v.shape for n, v in given.items()}
        with pytest.raises(UsageError, match=r"names and shapes alone: .* under the name deepspeed engine\.save_16bit"):
            torch.save(found, io.BytesIO())
    for load in (model.load_state_dict, model[0].load_state_dict):
        with pytest.raises(UsageError, match=r"would be lost: call engine\.load_state_dict"):
            load(given if load == model.load_state_dict else {"weight": given["0.weight"], "bias": given["0.bias"]})
    with deepspeed.zero.GatheredParameters(list(model[0].parameters()), modifier_rank=0):  # a part, as frameworks do
        model[0].load_state_dict({"weight": given["0.weight"], "bias": given["0.bias"]})
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        assert torch.equal(engine.state_dict()["module.0.weight"], given["0.weight"])
        assert torch.equal(engine.module_state_dict()["0.weight"], given["0.weight"])
        model.load_state_dict(given)
    assert all(torch.equal(value, given[name]) for name, value in whole(engine).items())
    engine.destroy()


def test_state_dicts_of_sharded_weights_have_names_and_shapes_and_say_what_to_do(pools: Pools) -> None:
    pools(RANKS).run(whole_state_dicts)


def overflow(steps: int, folder: str) -> None:
    """Also after micro-batches that end no window."""
    model = make_model()
    config = {**config_of(2), "gradient_accumulation_steps": steps, "fp16": {"enabled": True, "initial_scale_power": 4}}
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=given, config=config)
    seen = []
    for factor in (1.0, float("inf"), 1.0):
        for _ in range(steps):
            x, y = batch_of(deepspeed.comm.get_rank(), 0)
            engine.backward(nn.functional.mse_loss(engine(x.half()).float(), y) * factor)
            engine.step()
            seen.append(optimizer.overflow)
        engine.save_checkpoint(folder)
    assert seen == ([False, True, False] if steps == 1 else [False, False, False, True, True, False])
    engine.load_checkpoint(folder)
    assert not optimizer.overflow
    engine.destroy()


@pytest.mark.parametrize("steps", [1, 2])
def test_an_optimizer_says_that_its_step_was_skipped(steps: int, pools: Pools, tmp_path: Path) -> None:
    pools(RANKS).run(overflow, steps, str(tmp_path))


def one_engine_after_another(stage: int, dropped: bool) -> list[float]:
    """Losses of three over one model. dropped: the first two are let go of, and not destroyed."""
    model, losses = make_model(), []
    for number in range(3):
        engine = deepspeed.initialize(model=model, config=config_of(stage))[0]
        for step in range(2):
            x, y = batch_of(deepspeed.comm.get_rank(), step)
            losses.append(engine.backward(nn.functional.mse_loss(engine(x).float(), y)).item())
            engine.step()
        if number == 2 or not dropped:
            engine.destroy()
        elif stage < 3:  # a copy of the model has no engine
            twin = copy.deepcopy(model)
            assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
        del engine
        gc.collect()
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_dropped_engine_is_no_dead_end_for_its_model(stage: int, pools: Pools) -> None:
    for ranks in (1, 2):
        found = pools(ranks).run(one_engine_after_another, stage, True)
        assert found == pools(ranks).run(one_engine_after_another, stage, False)
        assert all(losses[4:] < losses[2:4] < losses[:2] for losses in found)


def again_on_the_same_model() -> None:
    model = make_model()
    first, *_ = deepspeed.initialize(model=model, config=config_of(3))
    second, optimizer, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 4})
    assert optimizer is None and second.optimizer is None and first.optimizer is None
    with torch.no_grad():
        assert second(batch_of(0, 0)[0]).shape == (4, 3)
    with pytest.raises(UsageError, match="was destroyed"):
        first.step()
    with pytest.raises(UsageError, match="make a new Trainer"):
        first.zero_grad()
    second.destroy()


def test_a_model_that_an_engine_holds_is_taken_over(pools: Pools) -> None:
    pools(RANKS).run(again_on_the_same_model)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "net"}, "expected model=, a torch module, got str"),
        ({"mpu": object()}, "mpu= is not available"),
        ({"training_data": iter([1])}, "training_data: expected a data set with a length"),
        ({"config": None}, "expected config="),
        ({"colour": 1}, "colour= is unknown"),
    ],
)
def test_arguments_of_initialize_that_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        deepspeed.initialize(**{"model": cases.make_mlp(), "config": config_of(0), **given})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "the file cannot be read"),
        ("{,}", "not JSON: .* at line 1, column 2"),
        ('{"train_batch_size": 4, "train_batch_size": 8}', "train_batch_size: the key is written more than once"),
    ],
)
def test_a_config_file_that_is_wrong_is_named(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    for given in ({"config": str(path)}, {"args": SimpleNamespace(deepspeed_config=path)}):
        with pytest.raises(ConfigError, match=said):
            deepspeed.initialize(model=cases.make_mlp(), **given)


def with_a_file_of_rank_0_alone(folder: str) -> str:
    path = Path(folder, f"of-{deepspeed.comm.get_rank()}.json")
    if deepspeed.comm.get_rank() == 0:
        path.write_text(json.dumps(config_of(0)), encoding="utf-8")
    with pytest.raises((ConfigError, MismatchError)) as raised:
        deepspeed.initialize(model=make_model(), config=path)
    return str(raised.value)


def test_a_config_file_that_one_rank_does_not_have_is_an_error_of_all(pools: Pools, tmp_path: Path) -> None:
    said = pools(RANKS).run(with_a_file_of_rank_0_alone, str(tmp_path))
    assert "failed on rank 1: ConfigError" in said[0] and "of-1.json" in said[1]
    assert all("the file cannot be read" in each for each in said)


class Numbers(torch.utils.data.Dataset[int]):
    """0 to 10."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> int:
        return index


def shares(drop_last: bool) -> list[list[list[int]]]:
    """The micro-batches of two epochs on this rank."""
    config = {**config_of(1), "train_micro_batch_size_per_gpu": 4, "dataloader_drop_last": drop_last}
    engine, _, loader, _ = deepspeed.initialize(
        model=make_model(), config=config, training_data=Numbers(), collate_fn=list
    )
    epochs = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        epochs.append(list(loader))
    engine.destroy()
    return epochs


@pytest.mark.parametrize("drop_last", [False, True])
def test_training_data_becomes_a_loader_of_each_ranks_part(drop_last: bool, pools: Pools) -> None:
    first, second = pools(RANKS).run(shares, drop_last)
    for epoch in range(2):
        seen = [first[epoch], second[epoch]]
        assert [len(batch) for batch in seen[0]] == [len(batch) for batch in seen[1]] == ([4] if drop_last else [4, 2])
        if not drop_last:
            assert {row for batches in seen for batch in batches for row in batch} == set(range(11))
    assert first[0] != first[1], "another epoch, another order"


def keep(client: Any, folder: str) -> Any:
    """Save with ``client`` and load in another engine; what came back."""
    config = {**config_of(2), "gradient_accumulation_steps": 1}
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    assert engine.save_checkpoint(folder, tag="here", client_state=client)
    assert engine.save_checkpoint(folder, tag="here", client_state=client)  # replaces it
    engine.destroy()
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    try:
        return engine.load_checkpoint(folder)[1]
    finally:
        engine.destroy()


ODD: dict[Any, Any] = {"epoch": 4, "best": torch.arange(3.0), "shape": (2, 3), 5: float("inf")}


def test_a_client_state_that_is_not_json_comes_back(pools: Pools, tmp_path: Path) -> None:
    for found in pools(RANKS).run(keep, ODD, str(tmp_path)):
        assert torch.equal(found.pop("best"), ODD["best"])
        assert found == {key: value for key, value in ODD.items() if key != "best"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "latest", "zero_to_fp32.py"]
    assert (tmp_path / "here" / client_state.FILE).is_file()


def test_json_stays_in_the_index(tmp_path: Path) -> None:
    assert keep({"epoch": 4, "best": [0.5, None]}, str(tmp_path)) == {"epoch": 4, "best": [0.5, None]}
    assert not (tmp_path / "here" / client_state.FILE).exists()


def test_a_checkpoint_that_latest_shall_not_name_is_not_named(tmp_path: Path) -> None:
    engine, *_ = deepspeed.initialize(model=make_model(), config=config_of(1))
    for save_latest in (True, False):
        engine.save_checkpoint(str(tmp_path), tag=f"{save_latest}", save_latest=save_latest)
    assert (tmp_path / "latest").read_text(encoding="utf-8").strip() == "True"
    assert engine.load_checkpoint(str(tmp_path))[0] == str(tmp_path / "True")
    engine.destroy()


def test_classes_in_a_client_state_are_loaded_once_they_are_trusted(tmp_path: Path) -> None:
    client = {"args": argparse.Namespace(lr=0.5)}
    with raises("deepspeed-client-state-unsafe"):
        keep(client, str(tmp_path))
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert keep(client, str(tmp_path)) == client


def test_a_client_state_file_that_is_lost_or_damaged_is_named(tmp_path: Path) -> None:
    keep(ODD, str(tmp_path))
    file = tmp_path / "here" / client_state.FILE
    index = (tmp_path / "here" / "index.json").read_text(encoding="utf-8")
    ((key, checksum),) = re.findall(r'"(sha256 of [^"]+)": *"(\w{64})"', index)
    stored = {key: checksum}
    assert client_state.found(stored, tmp_path / "here")["epoch"] == 4
    file.rename(tmp_path / f".{checksum[:16]}-{client_state.FILE}")  # a program that was killed before it was moved
    assert client_state.found(stored, tmp_path / "here")["epoch"] == 4
    file.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="damaged"):
        client_state.found(stored, tmp_path / "here")
    for each in (file, *tmp_path.glob(".*.pt")):
        each.unlink()
    with pytest.raises(CheckpointError, match="the file is missing"):
        client_state.found(stored, tmp_path / "here")


def cannot_be_kept(folder: str) -> str:
    engine, *_ = deepspeed.initialize(model=make_model(), config=config_of(1))
    with pytest.raises((UsageError, MismatchError)) as raised:
        engine.save_checkpoint(folder, client_state={"hook": lambda: None})
    engine.destroy()
    return str(raised.value)


def test_what_cannot_be_pickled_is_refused_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    said = pools(RANKS).run(cannot_be_kept, str(tmp_path))
    assert "torch.save could not write it" in said[0] and "rank 0: UsageError: client_state.hook is function" in said[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("gradient_clipping", "auto"), ("bf16", {"enabled": "auto"}), ("bfloat16", {"enabled": "auto"})],
)
def test_what_nobody_has_written_for_auto_is_an_error_where_results_depend_on_it(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match='"auto", which no framework has replaced'):
        deepspeed.initialize(model=make_model(), config={**config_of(1), key: value})


def test_of_a_model_that_is_not_trained_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = {**CONFIG, "gradient_clipping": "auto", "zero_optimization": {"stage": 3}, "steps_per_print": float("inf")}
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    assert not caplog.records
    engine.destroy()


def test_diagnostics_and_sizes_never_stop_a_training(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(3)
    config |= {"steps_per_print": None, "_comment": 1, "wall_clock_breakdown": True, "zero_allow_untested_optimizer": 1}
    config |= {"comment": "two", "flops_profiler": {"enabled": True}, "compile": {"deepcompile": False, "backend": "x"}}
    config["zero_optimization"] |= {
        "reduce_bucket_size": "auto",
        "overlap_comm": "auto",
        "stage3_gather_fp16_weights_on_model_save": True,
        "stage3_max_live_parameters": "auto",
        "cpu_offload_param": False,
    }
    engine, *_ = deepspeed.initialize(model=make_model(), config=config)
    assert engine.zero_gather_16bit_weights_on_model_save()
    for said in (
        "- compile.backend has no effect: nothing is",
        "- wall_clock_breakdown has no effect",
        "- flops_profiler has no effect",
        "overlap_comm is",
    ):
        assert said in caplog.text, caplog.text
    for key in ("_comment", "comment", "untested", "gather_fp16", "steps_per_print", "is read as"):
        assert key not in caplog.text, key
    assert caplog.text.count("DeepSpeed config") == len(caplog.records) == 1
    engine.destroy()


@pytest.mark.parametrize(
    ("shape", "written", "counts"),
    [
        ({"hidden_size": 64}, 64 * 64, ZeroConfig.reduce_bucket_size),
        ({"hidden_sizes": [8, 64]}, 64 * 64, ZeroConfig.reduce_bucket_size),
        ({"text_config": SimpleNamespace(hidden_size=64)}, 64 * 64, ZeroConfig.reduce_bucket_size),
        ({"hidden_size": 64}, 4000, 4000),
        ({"hidden_size": 8192}, 8192 * 8192, 8192 * 8192),
        ({}, 64 * 64, 64 * 64),
    ],
)
def test_the_square_of_the_hidden_size_is_nobodys_wish(shape: Any, written: int, counts: int) -> None:
    model: Any = make_model()
    model.config = SimpleNamespace(**shape)
    config = config_of(3)
    config["zero_optimization"] |= {"reduce_bucket_size": written}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert engine._engine.config.zero_optimization.reduce_bucket_size == counts
    engine.destroy()


def test_keys_with_dots_are_read_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    dotted = {"zero_optimization.stage3_prefetch_bucket_size": 921.6, "optimizer.params.lr": 7.0}
    engine, *_ = deepspeed.initialize(model=make_model(), config={**config_of(3), **dotted})
    assert engine.get_lr() == [1e-2]
    assert "optimizer.params.lr has no effect" in caplog.text and "prefetch_bucket_size has" not in caplog.text
    engine.destroy()


def test_a_config_that_means_something_else_here(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(2)
    config["zero_optimization"] |= {"offload_param": {"device": "cpu"}}
    model = make_model()
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.5), config={**config, **SCHEDULE}
    )
    assert "offload_param has no effect below stage 3" in caplog.text and "optimizer has no effect" in caplog.text
    assert engine.get_lr() != [0.5] and scheduler is engine.lr_scheduler
    assert engine.config["zero_optimization"]["offload_param"] == {"device": "cpu"}
    engine.destroy()
