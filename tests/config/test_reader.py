"""Reading a config: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardengine.config.load import Config, load_config
from shardengine.config.reader import read_tree
from shardengine.config.schema import OptimizerConfig
from shardengine.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 2}


def load(**keys: Any) -> Config:
    return load_config({**BATCH, **keys})


def problems(source: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return caught.value.problems


def problem(**keys: Any) -> str:
    found = problems({**BATCH, **keys})
    assert len(found) == 1, found
    return found[0]


def adamw(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


# --- keys


@pytest.mark.parametrize(
    ("written", "place", "close"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping", "gradient_clipping"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation", "zero_optimization"),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge", "zero_optimization.stage"),
        ({"fp16": {"enable": True}}, "fp16.enable", "fp16.enabled"),
        ({"stage": 2}, "stage", "zero_optimization.stage"),
        ({"ZERO_OPTIMIZATION": {}}, "ZERO_OPTIMIZATION", "zero_optimization"),
        ({"optimizer": adamw(weight_decy=0.1)}, "optimizer.params.weight_decy", "optimizer.params.weight_decay"),
    ],
)
def test_an_unknown_key_is_refused_with_its_place_and_the_nearest_key(written: Any, place: str, close: str) -> None:
    message = problem(**written)
    assert message.startswith(f"{place}: unknown ")
    assert f'nearest valid key is "{close}"' in message


def test_a_key_on_the_wrong_level_is_told_where_it_belongs() -> None:
    message = problem(zero_optimization={"overlap_param_gather": True})
    assert message.startswith("zero_optimization.overlap_param_gather: unknown ")
    assert 'the nearest valid key is "overlap_param_gather", on the top level' in message


def test_a_known_key_without_meaning_is_accepted_and_said_once() -> None:
    config = load(zero_optimization={"contiguous_gradients": True, "sub_group_size": 1e9})
    for name in ("contiguous_gradients", "sub_group_size"):
        said = [line for line in config.notices if line.startswith(f"zero_optimization.{name} has no effect, because ")]
        assert len(said) == 1


@pytest.mark.parametrize(
    "off",
    [
        {"fp16": None, "optimizer": None, "scheduler": None},
        {"bf16": {"enabled": False, "master_weights": True}},
        {"bf16": None, "communication_data_type": None},
        {"torch_autocast": False},
        {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True}}},
        {"zero_optimization": {"offload_optimizer": False}},
        {"zero_optimization": {"offload_param": None, "shard_group_size": "all", "zero_hpz_partition_size": 1}},
        {"zero_optimization": {"cpu_offload": False, "mics_shard_size": -1, "zero_quantized_weights": False}},
        {"data_types": {"grad_accum_dtype": "fp32", "reduce_dtype": None}},
        {"communication_data_type": None, "static_graph": False},
        {"tensorboard": {"enabled": False}, "wandb": {"enabled": False}, "comet": None, "csv_monitor": False},
        {"activation_checkpointing": {"cpu_checkpointing": False}},
        {"aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1}},
        {"comm_hook": {"name": "none"}, "comms_logger": {"enabled": False, "verbose": True}},
        {"flops_profiler": {"enabled": False, "profile_step": 1}, "amp": {"enabled": False}, "elasticity": None},
        {"checkpoint": {"async_save": False, "keep_last": None}, "wall_clock_breakdown": False},
    ],
)
def test_a_feature_that_is_switched_off_is_accepted(off: dict[str, Any]) -> None:
    assert load(**off) == load()


@pytest.mark.parametrize(
    ("on", "place"),
    [
        (
            {"torch_autocast": {"lower_precision_safe_modules": ["Linear"]}},
            "torch_autocast.lower_precision_safe_modules",
        ),
    ],
)
def test_a_later_feature_that_is_switched_on_is_not_available_yet(on: dict[str, Any], place: str) -> None:
    message = problem(**on)
    assert message.startswith(f"{place}: not available yet")
    assert "switch it off" in message


def test_a_feature_of_other_engines_that_is_switched_on_is_refused_with_the_reason() -> None:
    message = problem(quantize_training=True)
    assert message == (
        "quantize_training: cannot be switched on, because weights are trained in fp32, bf16 or fp16; quantize them "
        "after training"
    )


def test_old_names_map_to_the_current_ones() -> None:
    config = load(zero_optimization={"prefetch_bucket_size": 7, "overlap_comm": False, "max_live_parameters": 1})
    assert config.zero_optimization.stage3_prefetch_bucket_size == 7
    assert config.overlap_comm is False
    assert "zero_optimization.overlap_comm is read as overlap_comm" in config.notices
    assert [line for line in config.notices if line.startswith("zero_optimization.max_live_parameters has no effect")]


def test_a_key_under_its_old_and_its_new_name_is_refused() -> None:
    message = problem(overlap_comm=True, zero_optimization={"overlap_comm": True})
    assert message == "overlap_comm: the key is written twice, also as zero_optimization.overlap_comm; keep one"


# --- values


@pytest.mark.parametrize(
    ("written", "expected", "came"),
    [
        ({"seed": 1.5}, "an integer from 0", "the number 1.5"),
        ({"seed": True}, "an integer", "true"),
        ({"seed": -1}, "an integer from 0", "the number -1"),
        ({"steps_per_print": "10"}, "an integer >= 0", 'the string "10"'),
        ({"gradient_clipping": -0.5}, "a number >= 0", "the number -0.5"),
        ({"gradient_clipping": False}, "a number >= 0", "false"),
        ({"timeout_s": 0}, "a number > 0", "the number 0"),
        ({"overlap_comm": 1}, "true or false", "the number 1"),
        ({"gradient_allreduce_op": "max"}, 'one of "mean", "sum"', 'the string "max"'),
        ({"gradient_accumulation": 2}, 'one of "full", "sharded", or null', "the number 2"),
        ({"zero_optimization": {"stage": 4}}, "an integer from 0 to 3", "the number 4"),
        ({"zero_optimization": {"stage": None}}, "an integer from 0 to 3", "null"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "an integer >= 1", "the number 0"),
        ({"zero_optimization": {"units": []}}, '"auto" or a list', "a list of 0"),
        ({"zero_optimization": {"units": ["Block", "Block"]}}, '"auto" or a list', "a list of 2"),
        ({"zero_optimization": {"units": "Block"}}, '"auto" or a list', 'the string "Block"'),
        ({"zero_optimization": True}, "an object", "true"),
        ({"zero_optimization": None}, "an object", "null"),
        ({"optimizer": False}, "an object", "false"),
        ({"fp16": 0}, "an object", "the number 0"),
        ({"optimizer": "AdamW"}, "an object", 'the string "AdamW"'),
        ({"scheduler": {"type": "", "params": {}}}, "a string that is not empty", 'the string ""'),
        ({"fp16": {"enabled": "yes"}}, "true or false", 'the string "yes"'),
        ({"seed": 10**400}, "an integer from 0", "a huge number"),
        ({"gradient_clipping": 10**400}, "a number >= 0", "a huge number"),
        ({"seed": {1, 2}}, "a JSON value", "a Python set"),
    ],
)
def test_a_wrong_value_says_what_was_expected_and_what_came(written: Any, expected: str, came: str) -> None:
    message = problem(**written)
    assert f": expected {expected}" in message
    assert message.endswith(f", got {came}")


def test_1e9_is_an_integer() -> None:
    value = load(zero_optimization={"reduce_bucket_size": 1e9}).zero_optimization.reduce_bucket_size
    assert value == 10**9
    assert isinstance(value, int)


def test_what_others_call_the_learning_rate_is_known(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    optimizer = {"type": "AdamW", "params": {"learning_rate": 1e-3}}
    path.write_text(json.dumps({"train_batch_size": 8, "optimizer": optimizer}))
    assert 'the nearest valid key is "optimizer.params.lr"' in problems(path)[0]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"train_batch_size": 8, "gradient_clipping": {value}}}')
    assert "gradient_clipping: expected a finite number" in problems(path)[0]


@pytest.mark.parametrize(
    ("written", "place", "argument"),
    [
        ({"optimizer": adamw(lr="auto")}, "optimizer.params.lr", "learning_rate"),
        ({"optimizer": {"type": "auto"}}, "optimizer.type", ""),
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage", "a plan"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
            "scheduler.params.warmup_num_steps",
            "warmup_steps",
        ),
    ],
)
def test_auto_that_only_the_caller_knows_says_what_to_give(written: dict[str, Any], place: str, argument: str) -> None:
    filled = f", which Hugging Face's Trainer fills from its argument {argument}" if argument else ""
    filled = ", which a plan decides at initialize and in train" if argument == "a plan" else filled
    end = f'write a value, or give one: load_config(file, auto={{"{place}": …}})'
    filled = f"{filled}," if filled else ""
    assert problem(**written) == f'{place}: "auto"{filled} cannot be known here; {end}'


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"gradient_clipping": "auto"}, 'gradient_clipping is "auto", which Hugging Face\'s Trainer fills from its '),
        (
            {"fp16": {"enabled": "auto"}},
            'fp16.enabled is "auto", which Hugging Face\'s Trainer fills from its argument',
        ),
        (
            {"optimizer": adamw(betas="auto")},
            ": here the default [0.9, 0.999] counts; for another one: load_config(file",
        ),
        (
            {"optimizer": adamw("SGD", momentum="auto")},
            'optimizer.params.momentum is "auto": here the default 0.0 counts',
        ),
        (
            {"aio": {"block_size": "auto"}},
            'aio.block_size is "auto": here the default 1048576 counts',
        ),
        ({"zero_optimization": {"overlap_comm": "auto"}}, 'overlap_comm is "auto": here the default true counts'),
        (
            {"zero_optimization": {"zero_quantized_weights": "auto"}},
            'zero_optimization.zero_quantized_weights is "auto": here the default false counts',
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}},
            'scheduler.params.warmup_max_lr is "auto", which Hugging Face\'s Trainer fills from its argument',
        ),
        (
            {"zero_optimization": {"stage3_param_persistence_threshold": "auto"}},
            "stage3_param_persistence_threshold has no effect, because",
        ),
        ({"autotuning": "auto", "data_types": {"param_dtype": "auto"}}, ""),
    ],
)
def test_auto_takes_the_default_and_says_so(written: dict[str, Any], said: str) -> None:
    config = load(**written)
    assert [notice for notice in config.notices if said in notice]
    without = {key: value for key, value in written.items() if key in ("optimizer", "scheduler")}
    for section in without.values():
        section["params"] = {}
    assert config == load(**without)


def test_the_caller_gives_values_for_auto_and_for_nothing_else() -> None:
    """The batch sizes, the learning rate and precision of a file that Hugging Face's Trainer would fill."""
    file = {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        "optimizer": adamw(lr="auto", eps=1e-6),
        "bf16": {"enabled": "auto"},
    }
    given = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer.params.lr": 2,
        "optimizer.params.eps": 1,
        "bf16.enabled": True,
    }
    config = load_config(file, given)
    assert config.optimizer is not None and config.bf16.enabled
    assert (config.optimizer.params["lr"], config.optimizer.params["eps"]) == (2.0, 1e-6)
    assert config.sources["optimizer.params.lr"] == "auto" and config.sources["optimizer.params.eps"] == "file"
    assert config.resolve_batch(4).train_batch_size == 12
    assert file["train_batch_size"] == "auto"
    assert problems(file)[-1].endswith('load_config(file, auto={"train_micro_batch_size_per_gpu": …})')
    with pytest.raises(
        ConfigError, match=r'auto names the unknown key "lr"; the nearest valid key is "optimizer\.params'
    ):
        load_config(file, {"train_batch_size": 2, "optimizer.params.lr": 1, "lr": 1})
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr: expected a number >= 0, got the string"):
        load_config(file, {"train_batch_size": 2, "optimizer.params.lr": "fast"})


def test_batch_sizes_that_are_auto_follow_from_the_others() -> None:
    config = load(train_batch_size="auto", gradient_accumulation_steps="auto").resolve_batch(3)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (6, 1)
    assert 'train_batch_size is "auto" and is worked out from the other batch sizes' in config.notices


def test_auto_is_a_value_of_units() -> None:
    assert load(zero_optimization={"units": "auto"}).zero_optimization.units == "auto"


def test_remarks_are_no_keys_at_any_level(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        """{"_": 1, "//": "a", "//": "b", "comment": {"x": "auto"}, "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 2, "_why": NaN, "offload_param": {"//": 1}},
        "optimizer": {"type": "SGD", "comments": 2, "params": {"_lr": 5, "lr": 0.5}}}"""
    )
    config = load_config(path)
    assert config == load(zero_optimization={"stage": 2}, optimizer=adamw("SGD", lr=0.5))
    assert config.notices == load(zero_optimization={"stage": 2}, optimizer=adamw("SGD", lr=0.5)).notices


@pytest.mark.parametrize("value", ["Infinity", "null", '"inf"', '"Infinity"', "0"])
def test_never_to_print_has_several_spellings(tmp_path: Path, value: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{{"train_batch_size": 8, "steps_per_print": {value}}}')
    assert load_config(path).steps_per_print == 0
    assert load(steps_per_print=float("inf")).steps_per_print == 0


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("bf16", "bf16 bfloat16 torch.bfloat16 BF16"),
        ("fp16", "fp16 float16 half torch.float16 torch.half"),
        ("fp32", "fp32 float32 float torch.float32"),
    ],
)
def test_dtypes_have_several_spellings(name: str, spellings: str) -> None:
    for spelling in spellings.split():
        config = load(
            communication_data_type=spelling, data_types=dict.fromkeys(("grad_accum_dtype", "reduce_dtype"), spelling)
        )
        found = {config.communication_data_type, config.data_types.grad_accum_dtype, config.data_types.reduce_dtype}
        assert found == {name}
        if name == "fp32":
            assert "torch_autocast.dtype: expected" in problem(torch_autocast={"dtype": spelling})
        else:
            full = {"bf16": "bfloat16", "fp16": "float16"}[name]
            assert load(torch_autocast={"dtype": spelling}).torch_autocast.dtype == full


def test_dotted_names_on_the_top_level_go_to_their_sections() -> None:
    """As one library's programs write them."""
    name = "zero_optimization.reduce_bucket_size"
    assert load(**{name: 7}).zero_optimization.reduce_bucket_size == 7
    both = load(**{name: 7, "zero_optimization": {"reduce_bucket_size": 9}})
    assert both.zero_optimization.reduce_bucket_size == 9
    assert [notice for notice in both.notices if notice.startswith(f'"{name}" on the top level has no effect')]
    assert 'unknown key; the nearest valid key is "zero_optimization.stage"' in problem(**{"zero_optimization.stge": 1})


def test_diagnosis_never_stops_a_training() -> None:
    asked = {
        **dict.fromkeys(
            ("wall_clock_breakdown", "memory_breakdown", "dump_state", "zero_allow_untested_optimizer"), True
        ),
        **{name: {"enabled": True} for name in ("comms_logger", "flops_profiler", "timers")},
    }
    config = load(**asked)
    for name in asked:
        assert [line for line in config.notices if line.startswith(f"{name} has no effect, because ")]
    off = {name: {"enabled": False} if isinstance(value, dict) else False for name, value in asked.items()}
    assert load(**off).notices == load().notices


def test_master_weights_have_another_name() -> None:
    config = load(bf16={"enabled": True, "bf16_master_weights_and_grads": True})
    assert config.bf16.master_weights is False
    said = "bf16.bf16_master_weights_and_grads is read as bf16.master_weights: false"
    assert said in config.notices


def test_units_are_class_names() -> None:
    assert load(zero_optimization={"units": ["Block", "Head"]}).zero_optimization.units == ("Block", "Head")


def test_all_problems_are_reported_together() -> None:
    found = problems({"gradient_cliping": 1, "seed": 1.5, "fp16": {"enabled": 2}, "zero_optimization": {"stage": 9}})
    assert [line.partition(":")[0] for line in found[:4]] == [
        "gradient_cliping",
        "seed",
        "fp16.enabled",
        "zero_optimization.stage",
    ]
    assert "batch size is missing" in found[4]
    assert len(found) == 5


# --- files and mappings


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_read_by_its_path(tmp_path: Path, kind: type) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**BATCH, "zero_optimization": {"stage": 3}}))
    assert load_config(kind(path)).zero_optimization.stage == 3


def test_duplicate_json_keys_are_refused_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1, "stage": 2}}')
    assert problems(path) == ["zero_optimization.stage: the key is written more than once; keep one"]


def test_who_changes_a_file_first_is_told_of_them_too(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    bf16 = '{"enabled": true, "enabled": false}'
    path.write_text(f'{{"_": 1, "_": 2, "list": [{{"a": 1, "a": 1}}], "bf16": {bf16}, "x": 1, "x": 2}}')
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        read_tree(path)
    assert caught.value.problems == [
        f"{name}: the key is written more than once; keep one" for name in ("x", "list[0].a", "bf16.enabled")
    ]
    path.write_text('{"bf16": {"enabled": true}}')
    assert type(read_tree(path)["bf16"]) is dict


def test_a_file_that_is_not_json_names_path_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n  "train_batch_size": 8,\n}')
    with pytest.raises(ConfigError, match=r"config\.json.*\n.*not JSON: .* at line 3, column 1"):
        load_config(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[1]", "expected a JSON object at the top level, got a list of 1"),
        (b"\xff\xfe{", "not JSON that can be read"),
        (b"[" * 200_000, "not JSON that can be read"),
        (b"", "not JSON"),
    ],
)
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert problems(path)[0].startswith(expected)


def test_a_missing_file_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json: 1 problem\n  - the file cannot be read: No such file"):
        load_config(tmp_path / "nothing.json")


def test_a_mapping_is_not_changed() -> None:
    source = {**BATCH, "zero_optimization": {"cpu_offload": False}, "optimizer": adamw("Adam", adam_w_mode=True)}
    before = copy.deepcopy(source)
    load_config(source)
    assert source == before


def test_another_type_of_source_is_refused() -> None:
    assert problems(3) == ["expected a path to a JSON file, a mapping or a Config, got the number 3"]


# --- optimizer and scheduler


def optimizer_of(**written: Any) -> OptimizerConfig:
    found = load(optimizer=written).optimizer
    assert found is not None
    return found


def test_optimizer_parameters_are_complete_and_typed() -> None:
    found = optimizer_of(type="adamw", params={"lr": 1, "betas": [0.8, 0.95]})
    assert found.type == "AdamW"
    assert found.params == {"lr": 1.0, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.01,
                            "maximize": False, "amsgrad": False}  # fmt: skip


def test_adam_means_adamw_and_says_so() -> None:
    config = load(optimizer=adamw("Adam"))
    assert config.optimizer is not None
    assert (config.optimizer.type, config.optimizer.params["weight_decay"]) == ("AdamW", 0.0)
    assert [line for line in config.notices if line.startswith('optimizer "Adam" is AdamW')]


def test_adam_without_adam_w_mode_is_adam_and_stays_so() -> None:
    config = load(optimizer=adamw("adam", adam_w_mode=False))
    assert config.optimizer is not None
    assert config.optimizer.type == "Adam"
    assert "adam_w_mode" not in config.optimizer.params
    assert [line for line in config.notices if "is Adam, with weight decay as an L2 term" in line]
    assert load_config(config.to_dict()).optimizer == config.optimizer


def test_adamw_with_adam_w_mode_false_is_refused() -> None:
    assert problem(optimizer=adamw(adam_w_mode=False)).startswith("optimizer.params.adam_w_mode: expected true")


@pytest.mark.parametrize("name", ["torch_adam", "foreach", "fused", "capturable"])
def test_implementation_choices_of_optimizers_have_no_effect(name: str) -> None:
    config = load(optimizer={"type": "AdamW", "params": {name: True}})
    assert config.optimizer is not None
    assert name not in config.optimizer.params
    assert [line for line in config.notices if line.startswith(f"optimizer.params.{name} has no effect, because")]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"lr": -1}, "lr: expected a number >= 0, got the number -1"),
        ({"betas": [0.9, 1.0]}, "betas: expected a list of two numbers, each >= 0 and < 1, got a list of 2"),
        ({"betas": 0.9}, "betas: expected a list of two numbers, each >= 0 and < 1, got the number 0.9"),
        ({"eps": "1e-8"}, 'eps: expected a number >= 0, got the string "1e-8"'),
        ({"amsgrad": 1}, "amsgrad: expected true or false, got the number 1"),
        ({"bias_correction": False}, "bias_correction: expected true, got false; nothing else is supported"),
        ({"momentum": 0.9}, "momentum: unknown parameter of AdamW"),
        ({"adam_w_mode": 1}, "adam_w_mode: expected true or false, got the number 1"),
    ],
)
def test_wrong_optimizer_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    assert problem(optimizer=adamw(**params)).startswith(f"optimizer.params.{message}")


def test_supported_values_of_fixed_parameters_are_dropped() -> None:
    plain = optimizer_of(type="AdamW")
    assert optimizer_of(type="AdamW", params={"amsgrad": False, "bias_correction": True}) == plain


def test_nesterov_needs_momentum() -> None:
    assert "nesterov needs momentum > 0" in problem(optimizer=adamw("SGD", nesterov=True))
    assert optimizer_of(type="SGD", params={"nesterov": True, "momentum": 0.9}).params["nesterov"] is True


@pytest.mark.parametrize("name", ["Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "rmsprop", "Rprop"])
def test_elementwise_classes_of_torch_have_their_own_defaults(name: str) -> None:
    found = optimizer_of(type=name)
    made_by = getattr(torch.optim, found.type)
    expected = made_by([torch.nn.Parameter(torch.zeros(2))]).defaults
    assert {key: expected[key] for key in found.params} == dict(found.params)
    assert expected.keys() - found.params.keys() <= {"foreach", "fused", "capturable", "differentiable"} | (
        {"initial_accumulator_value"} if name == "Adagrad" else set()
    )


@pytest.mark.parametrize(
    ("params", "said"),
    [({"rho": 2}, "expected a number >= 0 and < 1"), ({"roh": 0.5}, 'the nearest valid key is "optimizer.params.rho"')],
)
def test_options_of_a_class_are_checked(params: dict[str, Any], said: str) -> None:
    assert said in problem(optimizer=adamw("Adadelta", **params))


@pytest.mark.parametrize("name", ["lbfgs", "Shampoo", "SOAP", "Lamb"])
def test_non_elementwise_optimizers_are_refused(name: str) -> None:
    assert "is not elementwise and cannot be stepped on shards" in problem(optimizer=adamw(name))


def test_an_unknown_optimizer_gets_the_nearest_name() -> None:
    assert 'unknown optimizer "AdmW"; the nearest known one is "AdamW"' in problem(optimizer=adamw("AdmW"))


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_missing_type_is_refused(section: str) -> None:
    assert problem(**{section: {"params": {}}}).startswith(f"{section}.type: the key is missing")


def test_a_bucket_size_may_be_left_to_the_engine_or_filled_by_the_caller() -> None:
    sizes = {"zero_optimization": {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}}
    config = load(**sizes)
    zero = config.zero_optimization
    assert (zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == ("auto", "auto")
    assert not any("bucket_size" in notice for notice in config.notices)
    filled = load_config({**BATCH, **sizes}, auto={"zero_optimization.reduce_bucket_size": 77}).zero_optimization
    assert (filled.reduce_bucket_size, filled.stage3_prefetch_bucket_size) == (77, "auto")
