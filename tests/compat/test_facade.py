"""What frameworks and scripts call on a DeepSpeedEngine beside the loop, compared with torch and with our engine."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardengine.compat.deepspeed as deepspeed
from shardengine.errors import UsageError
from shardengine.optim import Lion
from tests.compat.test_own_loops import RANKS, batch_of, config_of, make_model, whole
from tests.support.forks import Forks
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def loss_of(engine: Any, number: int, rank: int | None = None) -> torch.Tensor:
    x, y = batch_of(deepspeed.comm.get_rank() if rank is None else rank, number)
    return nn.functional.mse_loss(engine(x), y)


def make(stage: int, steps: int = 1, **more: Any) -> Any:
    model = make_model()
    config = {**config_of(stage), "gradient_accumulation_steps": steps, **more}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def true_gradients(numbers: range) -> dict[str, torch.Tensor]:
    """Mean over all ranks and micro-batches, by plain torch."""
    model = make_model()
    for rank in range(RANKS):
        for number in numbers:
            (loss_of(model, number, rank) / RANKS / len(numbers)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def read_one_by_one(stage: int) -> None:
    engine = make(stage, gradient_clipping=0.0)
    truth = true_gradients(range(1))
    engine.backward(loss_of(engine, 0))
    for name, parameter in engine.module.named_parameters():
        assert torch.allclose(deepspeed.utils.safe_get_full_grad(parameter), truth[name], atol=1e-7), name
    engine.step()
    weights = whole(engine)
    for name, parameter in engine.module.named_parameters():
        moment = deepspeed.utils.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert torch.allclose(moment, 0.1 * truth[name], atol=1e-7), name
        assert deepspeed.utils.safe_get_full_optimizer_state(parameter, "nothing") is None
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(parameter), weights[name])
    engine.destroy()
    with pytest.raises(UsageError, match="a parameter of an engine"):
        deepspeed.utils.safe_get_full_grad(nn.Parameter(torch.zeros(1)))


@STAGES
def test_gradients_and_states_are_read_parameter_by_parameter(stage: int, pools: Pools) -> None:
    pools(RANKS).run(read_one_by_one, stage)


def forgetting_in_the_middle(stage: int) -> None:
    """zero_grad() between forward and backward, as Lightning does, also inside of a window."""
    runs = []
    for forgets in (False, True):
        engine = make(stage, 2)
        for number in range(4):
            loss = loss_of(engine, number)
            if forgets:
                engine.zero_grad()
                engine.optimizer.zero_grad()
            engine.backward(loss)
            engine.step()
        assert engine.global_steps == 2
        runs.append(whole(engine))
        engine.destroy()
    for name, value in runs[0].items():
        assert torch.equal(value, runs[1][name]), name


@STAGES
def test_forgetting_gradients_in_the_middle_is_harmless(stage: int, pools: Pools) -> None:
    pools(RANKS).run(forgetting_in_the_middle, stage)


def without_synchronising(stage: int) -> None:
    runs = []
    for alone in (False, True):
        engine = make(stage, 2, gradient_clipping=0.0)
        for number in range(2):
            if alone and number == 0:
                with engine.no_sync():
                    engine.backward(loss_of(engine, number))
            else:
                engine.backward(loss_of(engine, number))
            engine.step()
        assert engine.global_steps == 1
        runs.append(whole(engine))
        engine.destroy()
    for name, value in runs[0].items():
        assert torch.allclose(value, runs[1][name], atol=1e-6), name


@pytest.mark.parametrize("stage", [0, 1])
def test_micro_batches_may_stay_on_their_rank(stage: int, pools: Pools) -> None:
    pools(RANKS).run(without_synchronising, stage)


def asked(stage: int) -> None:
    for section in ("fp16", "bf16", "fp32"):
        more: dict[str, Any] = {} if section == "fp32" else {section: {"enabled": True}}
        engine = make(stage, **more)
        assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (section == "fp16", section == "bf16")
        assert engine.global_rank == deepspeed.comm.get_rank()
        assert engine.local_rank == deepspeed.comm.get_local_rank()
        engine.tput_timer.update_epoch_count()
        engine.destroy()


def test_what_scripts_ask_of_ranks_and_precision(pools: Pools) -> None:
    pools(RANKS).run(asked, 2)


def test_modules_are_read_and_replaced_by_their_path() -> None:
    inner = nn.Sequential(nn.Linear(1, 1))
    model = nn.Sequential(inner)
    helper, new = deepspeed.compression.helper, nn.Linear(1, 2)
    assert helper.recursive_getattr(model, "0.0") is inner[0]
    helper.recursive_setattr(model, "0.0", new)
    assert inner[0] is new
    helper.recursive_setattr(model, "0", new)
    assert model[0] is new


def test_copies_for_torch_hold_no_larger_buffer_and_keep_ties() -> None:
    large = torch.arange(12.0)
    given: dict[str, Any] = {
        "a": large[:4],
        "b": [large[:4], large[4:8], 3],
        "c": large[:4].view(2, 2),
        "d": torch.empty(0),
    }
    copy = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(given)
    assert copy["b"][0] is copy["a"] and torch.equal(copy["a"], large[:4]) and copy["b"][2] == 3
    assert torch.equal(copy["b"][1], large[4:8]) and torch.equal(copy["c"], given["c"]) and copy["d"].numel() == 0
    places = {each.untyped_storage().data_ptr() for each in (large, copy["a"], copy["b"][1], copy["c"])}
    assert len(places) == 4 and copy["a"].untyped_storage().nbytes() == 16


def test_what_a_script_logs_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed.utils.logger.info("step %d", 3)
    deepspeed.utils.log_dist("here", ranks=[0])
    deepspeed.utils.log_dist("not here", ranks=[1])
    deepspeed.utils.log_dist("everywhere", ranks=[-1])
    deepspeed.runtime.utils.see_memory_usage("not asked for")
    deepspeed.runtime.utils.see_memory_usage("after loading", force=True)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == ["[INFO] step 3", "[INFO] [rank 0] here", "[INFO] [rank 0] everywhere"]
    assert len(printed) == 4 and "after loading: at most" in printed[3] and "GiB of host memory" in printed[3]


def test_a_loader_repeats_itself() -> None:
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert next(iter(loader)) == 2


def test_random_numbers_are_seeded_by_the_accelerator() -> None:
    deepspeed.get_accelerator().manual_seed_all(7)
    first = torch.rand(3, device=deepspeed.get_accelerator().current_device_name())
    deepspeed.get_accelerator().manual_seed_all(7)
    assert torch.equal(torch.rand(3, device=deepspeed.get_accelerator().current_device_name()), first)


def compiled(stage: int) -> None:
    losses = []
    for compiles in (False, True):
        engine = make(stage)
        if compiles:
            engine.compile(backend="eager", compile_kwargs={"dynamic": False})
            assert engine.module._compiled_call_impl is not None
        for number in range(2):
            loss = loss_of(engine, number)
            engine.backward(loss)
            engine.step()
        losses.append((loss.item(), whole(engine)))
        engine.destroy()
    assert losses[0][0] == losses[1][0]
    for name, value in losses[0][1].items():
        assert torch.equal(value, losses[1][1][name]), name


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_is_compiled_afterwards_trains_the_same(stage: int, pools: Pools) -> None:
    pools(RANKS).run(compiled, stage)


def save_whole(stage: int, folder: str) -> dict[str, torch.Tensor]:
    engine = make(stage)
    engine.backward(loss_of(engine, 0))
    engine.step()
    assert engine.save_16bit_model(folder, "weights.bin")
    weights = whole(engine)
    engine.destroy()
    return {name: value.clone() for name, value in weights.items()}


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights_are_saved_for_torch(stage: int, pools: Pools, tmp_path: Path) -> None:
    expected = pools(RANKS).run(save_whole, stage, str(tmp_path / "new"))[0]
    saved = torch.load(tmp_path / "new" / "weights.bin", weights_only=True)
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(saved[name], value), name


def test_an_end_that_is_refused_leaves_the_engine_as_it_was() -> None:
    engine = make(3)
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters), pytest.raises(UsageError, match="after the `with` block"):
        engine.destroy()
    assert loss_of(engine, 0).isfinite() and hasattr(parameters[0], "ds_id")
    engine.destroy()
    assert not hasattr(parameters[0], "ds_id")
    deepspeed.initialize(model=engine.module, config=config_of(3))[0].destroy()


def test_optimizers_of_its_names_are_torchs() -> None:
    parameters = list(make_model().parameters())
    for name, options, kind in (
        ("adam.DeepSpeedCPUAdam", {}, torch.optim.AdamW),
        ("adam.DeepSpeedCPUAdam", {"adamw_mode": False, "fp32_optimizer_states": True}, torch.optim.Adam),
        ("adam.FusedAdam", {"adam_w_mode": False}, torch.optim.Adam),
        ("lion.DeepSpeedCPULion", {}, Lion),
    ):
        module, _, leaf = name.partition(".")
        named = getattr(getattr(deepspeed.ops, module), leaf)
        made = named(**{named.parameters: parameters}, lr=0.25, **options)
        assert type(made) is kind and made.defaults["lr"] == 0.25 and made.defaults["weight_decay"] == 0.0
        assert isinstance(made, named) and not isinstance(kind(parameters, lr=0.25), named)
    with pytest.raises(TypeError, match="FusedAdam: 'weight_decays' is unknown, the nearest is 'weight_decay'"):
        deepspeed.ops.adam.FusedAdam(parameters, weight_decays=1.0)
    with pytest.raises(ValueError, match="bias_correction"):
        deepspeed.ops.adam.FusedAdam(parameters, bias_correction=False)


def named_by_it(stage: int) -> None:
    """Also the engine's own optimizer, of a config's name and of one that was given."""
    model = make_model()
    given = deepspeed.ops.adam.FusedAdam(model.parameters())
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=given, config=config_of(stage))
    assert isinstance(optimizer, deepspeed.ops.adam.FusedAdam) and optimizer.optimizer is given
    engine.destroy()
    engine = make(stage)
    named = [isinstance(engine.optimizer, getattr(deepspeed.ops.adam, n)) for n in ("FusedAdam", "DeepSpeedCPUAdam")]
    assert named == [True, False] and engine.optimizer.optimizer.param_groups is engine.optimizer.param_groups
    assert engine.optimizer_name() == "adamw" and engine.zero_optimization() == (stage > 0)
    assert engine.steps_per_print() is None and not engine.wall_clock_breakdown() and engine.postscale_gradients()
    engine.empty_partition_cache()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engines_optimizer_has_the_name_that_it_was_made_by(stage: int) -> None:
    named_by_it(stage)


def scaled_by_hand(stage: int) -> None:
    """engine.scale(loss).backward() is engine.backward(loss)."""
    runs = []
    for by_hand in (False, True):
        engine = make(stage, fp16={"enabled": True, "initial_scale_power": 8})
        for number in range(2):
            x, y = batch_of(deepspeed.comm.get_rank(), number)
            loss = nn.functional.mse_loss(engine(x.half()).float(), y)
            engine.scale(loss).backward() if by_hand else engine.backward(loss)
            engine.step()
        runs.append(whole(engine))
        with pytest.raises(UsageError, match="Loss scaling is required"):
            engine(batch_of(0, 0)[0].half()).sum().backward()
        with pytest.raises(UsageError, match=r"scale: expected loss to be a scalar tensor with a graph, got \(4, 3\)"):
            engine.scale(engine(batch_of(0, 0)[0].half()))
        engine.destroy()
    for name, value in runs[0].items():
        assert torch.equal(value, runs[1][name]), name


@STAGES
def test_a_loss_is_scaled_for_a_backward_of_its_own(stage: int, pools: Pools) -> None:
    pools(RANKS).run(scaled_by_hand, stage)


def reduced_once(stage: int) -> None:
    """Two backwards are one step, with the gradients of both; a step inside is refused."""
    runs = []
    for coalesced in (False, True):
        engine = make(stage, gradient_clipping=0.0)
        with engine.coalesce_grad_reduction() if coalesced else contextlib.nullcontext():
            losses = [loss_of(engine, number) for number in range(2)] if not coalesced else []
            if losses:
                engine.backward(losses[0] + losses[1])
            for number in range(2) if coalesced else ():
                engine.backward(loss_of(engine, number))
            if coalesced:
                with pytest.raises(UsageError, match=r"expected after the `with engine.coalesce_grad_reduction"):
                    engine.step()
        engine.step()
        assert engine.global_steps == 1
        runs.append(whole(engine))
        engine.destroy()
    for name, value in runs[0].items():
        assert torch.allclose(value, runs[1][name], atol=1e-6), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_backwards_may_be_reduced_once(stage: int, pools: Pools) -> None:
    pools(RANKS).run(reduced_once, stage)


def test_leaf_modules_are_marked_by_class_name_and_path() -> None:
    class Wide(nn.Linear):
        pass

    utils: Any = deepspeed.utils
    model: Any = nn.Sequential(nn.Sequential(Wide(2, 2)), nn.ReLU())
    assert utils.set_z3_leaf_modules(model, [nn.Linear]) == [model[0][0]] == utils.get_z3_leaf_modules(model)
    assert utils.unset_z3_leaf_modules(model, [f"{Wide.__module__}.{Wide.__qualname__}"]) == [model[0][0]]
    assert utils.get_z3_leaf_modules(model) == [] and not utils.z3_leaf_module(model)
    assert utils.set_z3_leaf_modules_by_name(model, ["0.0"]) == ([model[0][0]], [])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["0", "x"], raise_if_not_found=False)[1] == ["x"]
    with pytest.raises(ValueError, match="expected a class of which Sequential has modules, got Conv2d, Nothing"):
        utils.set_z3_leaf_modules(model, [nn.Conv2d, "Nothing"])
    with pytest.raises(ValueError, match="expected paths of modules of Sequential, got 'x'"):
        utils.set_z3_leaf_modules_by_name(model, ["x"])


def test_the_accelerator_answers_on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = deepspeed.get_accelerator()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert accelerator.device_count() == (torch.cuda.device_count() if torch.cuda.is_available() else 3)
    assert torch.bfloat16 in accelerator.supported_dtypes() and accelerator.memory_allocated() > 0
    accelerator.synchronize()
    with accelerator.stream(accelerator.current_stream()):
        accelerator.empty_cache()
    state = accelerator.get_rng_state()
    first = torch.rand(1)
    accelerator.set_rng_state(state)
    assert torch.cuda.is_available() or torch.equal(torch.rand(1), first)
    assert accelerator.total_memory() >= accelerator.available_memory() > 0
    with pytest.raises(AttributeError, match="accelerator has no 'create_op_builder' here"):
        accelerator.create_op_builder("FusedAdam")


def growing(window: int) -> None:
    """DeepSpeed doubles a scale after ``window`` good steps beside the first; scripts read it where it has it."""
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": window, "hysteresis": 1}
    engine = make(2, fp16=fp16)
    scaler = engine.optimizer.loss_scaler
    assert (scaler.cur_scale, scaler.scale_window, scaler.cur_iter, scaler.dynamic_loss_scale) == (256, window, 0, True)
    assert engine.optimizer.dynamic_loss_scale and engine.dynamic_loss_scale() and engine.optimizer.needs_scaler()
    seen = []
    for number in range(8):
        x, y = batch_of(engine.global_rank, 0)
        engine.backward(nn.functional.mse_loss(engine(x.half()).float(), y) * (float("inf") if number == 4 else 1.0))
        engine.step()
        seen.append(engine.optimizer.cur_scale)
    assert seen == [256, 256, 512, 512, 256, 256, 256, 512] and scaler.cur_iter == 8
    engine.destroy()


def test_a_loss_scale_grows_when_deepspeeds_does(pools: Pools) -> None:
    pools(RANKS).run(growing, 2)


def in_no_sync() -> None:
    engine = make(0)
    with (
        engine.no_sync(),
        pytest.raises(AssertionError, match=r"no_sync: expected to be outside of engine.no_sync\(\)"),
        engine.no_sync(),
    ):
        pass
    with engine.no_sync(), pytest.raises(AssertionError, match=r"step: expected after the `with engine.no_sync\(\)"):
        engine.step()
    with pytest.raises(AssertionError, match="expected model=, a torch module, got NoneType"):
        deepspeed.initialize(config=config_of(0))
    for wrong in ("", None):
        with pytest.raises(ValueError, match="save_checkpoint: expected the path of a directory"):
            engine.save_checkpoint(wrong)
    engine.allreduce_gradients()
    assert engine.gradient_clipping() == 0.5 and engine.managed_gradient_accumulation() and engine.log_level() is None
    engine.destroy()
    config = {**config_of(0), "checkpoint": {"tag_validation": "foo"}}
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="tag_validation: expected one of ignore, warn, fail"):
        deepspeed.initialize(model=make_model(), config=config)


def test_errors_are_of_the_kind_that_scripts_catch() -> None:
    in_no_sync()


def test_modules_are_made_on_a_device_and_in_a_dtype() -> None:
    with deepspeed.OnDevice(dtype=torch.half, device="meta"):
        layer = nn.Linear(2, 2)
    assert layer.weight.device.type == "meta" and layer.weight.dtype == torch.half
    assert nn.Linear(2, 2).weight.dtype == torch.float and nn.Linear(2, 2).weight.device.type == "cpu"
    with deepspeed.OnDevice(dtype=torch.half, enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float
    at_least = deepspeed.utils.torch.required_torch_version
    assert at_least(min_version=2.1) and not at_least(min_version=99) and not at_least(max_version="1.13")
    groups = deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer({"params": [layer.weight]})
    assert groups == [{"params": [layer.weight]}]
    layer.weight.allreduce = False  # type: ignore[attr-defined]
    with raises("deepspeed-moe-parameters"):
        deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer(groups)


def save_tied(folder: str) -> None:
    model: Any = make_model()
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    model.add_module("tied", nn.Linear(16, 16))
    model.tied.weight = model[2].weight
    engine = deepspeed.initialize(model=model.half(), config={**config_of(3), "fp16": {"enabled": True}})[0]
    engine.save_checkpoint(PurePath(folder), tag="here")
    engine.destroy()


def test_whole_weights_are_written_as_files(pools: Pools, tmp_path: Path) -> None:
    pools(RANKS).run(save_tied, str(tmp_path))
    convert = deepspeed.utils.zero_to_fp32
    convert.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "one", tag="here")
    whole_of = torch.load(tmp_path / "one" / "pytorch_model.bin")
    assert whole_of["2.weight"] is whole_of["tied.weight"] and whole_of["0.weight"].dtype == torch.float
    convert.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "many", max_shard_size="1KB")
    index = json.loads((tmp_path / "many" / "pytorch_model.bin.index.json").read_text())
    assert index["weight_map"].keys() == whole_of.keys() and len(set(index["weight_map"].values())) > 1
    assert index["weight_map"]["2.weight"] == index["weight_map"]["tied.weight"]
    for name, file in index["weight_map"].items():
        assert torch.equal(torch.load(tmp_path / "many" / file)[name], whole_of[name]), name
    convert.convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "safe", "bfloat16", safe_serialization=True)
    stored = load_file(tmp_path / "safe" / "model.safetensors")
    assert torch.equal(stored["0.bias"], whole_of["0.bias"].bfloat16()) and "tied.weight" not in stored
    with pytest.raises(UsageError, match="max_shard_size: expected a number of bytes or a size as \"5GB\", got 'big'"):
        convert.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "x", "big")


def whole_for_a_while(stage: int) -> None:
    """unwrap_model_for_generation; a config's leaf modules are marked."""
    zero = {"stage": stage, "leaf_module": {"classes": ["ReLU"], "names": "0", "name_suffixes": ["x"]}}
    model = make_model()
    engine = deepspeed.initialize(model=model, config={**config_of(stage), "zero_optimization": zero})[0]
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model[0], model[1], model[3]]
    expected = whole(engine)
    with deepspeed.runtime.zero.unwrap_model_for_generation(engine) as inside:
        assert inside is model and all(torch.equal(each, expected[name]) for name, each in inside.named_parameters())
        assert inside(batch_of(0, 0)[0]).shape == (4, 3)
    assert getattr(model[0].weight, "ds_persist", None) == (False if stage == 3 else None)
    assert engine.sparse_tensor_module_names == set()
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_is_whole_while_it_generates(stage: int, pools: Pools) -> None:
    pools(RANKS).run(whole_for_a_while, stage)


def alone(say: Any, _rank: int) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    assert deepspeed.comm.get_world_size() == 1 and not deepspeed.comm.is_initialized()
    engine = make(3)
    engine.backward(loss_of(engine, 0))
    engine.step()
    say(engine.global_steps)
    engine.destroy()


def launched(say: Any, rank: int, store: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    deepspeed.init_distributed(init_method=f"file://{store}", dist_backend="gloo")
    deepspeed.init_distributed()
    assert deepspeed.comm.get_world_size() == 2 and deepspeed.comm.get_local_rank() == rank
    deepspeed.comm.barrier()
    total, first = torch.tensor(rank + 1), torch.tensor(rank)
    deepspeed.comm.all_reduce(total, op=deepspeed.comm.ReduceOp.SUM)
    deepspeed.comm.broadcast(first, src=0)
    assert (int(total), int(first)) == (3, 0)
    say(deepspeed.comm.get_rank())


def test_a_group_is_made_where_a_script_asks_for_it_and_none_is_needed_for_one_process(
    forks: Forks, tmp_path: Path
) -> None:
    assert forks.live(alone) == [[1]]
    assert forks.live(launched, str(tmp_path / "store"), ranks=2) == [[0], [1]]


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_group_without_parameters_goes_unless_a_scheduler_knows_it(scheduled: bool) -> None:
    model = nn.Linear(4, 1)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": list(model.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    before = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step) if scheduled else None
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    engine, sharded, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    schedule = before or torch.optim.lr_scheduler.LambdaLR(sharded, lambda step: 0.5**step)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    schedule.step()
    assert [group["lr"] for group in sharded.param_groups] == [5e-3] * (1 + scheduled)
    engine.destroy()
