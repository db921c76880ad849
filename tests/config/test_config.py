"""The config object: frozen, its sources and notices, the batch triple, the way back to JSON, the JSON Schema."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardengine.config.foreign import ALIASES
from shardengine.config.json_schema import json_schema
from shardengine.config.kinds import FrozenMapping
from shardengine.config.load import Config, load_config
from shardengine.config.schema import KEYS, SECTION_TYPES, TRIPLE, ActivationsConfig, join
from shardengine.errors import ConfigError
from tests.support.raising import raises

BATCH = {"train_micro_batch_size_per_gpu": 2}


def load(**keys: Any) -> Config:
    return load_config({**BATCH, **keys})


def problems(source: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    return caught.value.problems


def adamw(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


# --- the object


def test_a_config_is_returned_as_it_is() -> None:
    config = load()
    assert load_config(config) is config


def test_a_config_is_frozen_all_the_way_down() -> None:
    config = load(scheduler={"type": "MultiStepLR", "params": {"milestones": [1, 2], "deep": {"er": [3]}}})
    assert config.scheduler is not None
    assert config.scheduler.params == {"milestones": (1, 2), "deep": {"er": (3,)}}
    with pytest.raises(TypeError):
        config.scheduler.params["milestones"] = ()  # type: ignore[index]
    with pytest.raises(AttributeError):
        config.seed = 1  # type: ignore[misc]
    assert isinstance(hash(config), int)


def test_a_config_survives_pickle_and_deepcopy() -> None:
    config = load(optimizer=adamw(lr=0.1))
    for again in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert again == config
        assert again.sources == config.sources
        assert again.notices == config.notices


def test_every_field_is_a_key_or_a_section() -> None:
    for section, section_type in SECTION_TYPES.items():
        for each in fields(section_type):
            name = join(section, each.name)
            assert (name in KEYS) is not (name in SECTION_TYPES), name
            if name in SECTION_TYPES and each.default is not None:
                assert type(each.default) is SECTION_TYPES[name], name


def test_what_is_not_written_has_its_default() -> None:
    assert load() == Config(train_micro_batch_size_per_gpu=2)


def test_every_value_names_its_source() -> None:
    config = load(optimizer=adamw(lr=1), zero_optimization={"stage": 1})
    rows = {name: (value, source) for name, value, source in config.resolved()}
    assert rows["train_micro_batch_size_per_gpu"] == (2, "file")
    assert rows["zero_optimization.stage"] == (1, "file")
    assert rows["zero_optimization.units"] == ("auto", "default")
    assert rows["optimizer.params.lr"] == (1.0, "file")
    assert rows["optimizer.params.eps"] == (1e-8, "default")
    assert rows["timeout_s"] == (600.0, "default")


def test_only_values_that_are_kept_have_a_source() -> None:
    config = load(optimizer=adamw("Adam", adam_w_mode=True, amsgrad=False, fused=True), scheduler={"type": "StepLR"})
    assert config.sources.keys() <= {name for name, _, _ in config.resolved()}


def test_clipping_that_is_off_is_said_when_the_key_is_absent() -> None:
    line = "gradients are not clipped, because gradient_clipping is not in the config"
    assert line in load().notices
    assert line not in load(gradient_clipping=0).notices


# --- the batch triple


@pytest.mark.parametrize("source", [{}, {"gradient_accumulation_steps": 4}, {"train_batch_size": None}])
def test_a_missing_batch_size_shows_the_equation(source: dict[str, Any]) -> None:
    assert "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps" in problems(source)[0]


def test_a_triple_that_fits_no_world_size_is_refused_before_it_is_known() -> None:
    found = problems({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5})
    assert "32 = 5 * ? * ? holds for no world size" in found[0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            "24 != 4 * 3 * 4 = 48",
        ),
        ({"train_batch_size": 30}, "30 != ? * 1 * 4 = 4 * ?, and 30 / 4 is not an integer"),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 5}, "30 != 5 * ? * 4 = 20 * ?"),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 5}, "Numbers of ranks that fit: 1, 2, 3, 6"),
    ],
)
def test_a_triple_that_does_not_fit_shows_the_numbers(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="world size must hold") as caught:
        load_config(source).resolve_batch(4)
    assert message in str(caught.value)


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0])
def test_a_wrong_world_size_is_a_usage_error(world_size: Any) -> None:
    with raises("resolve-batch-world-size-invalid"):
        load().resolve_batch(world_size)


def test_derived_batch_sizes_name_their_source_and_follow_the_world_size() -> None:
    config = load().resolve_batch(2)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (4, 1)
    assert config.sources["train_batch_size"] == config.sources["gradient_accumulation_steps"] == "derived"
    assert config.sources["train_micro_batch_size_per_gpu"] == "file"
    assert config.resolve_batch(3).train_batch_size == 6


SIZES = st.integers(1, 64)


@given(SIZES, SIZES, SIZES, st.sampled_from([(0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,)]))
def test_any_sufficient_part_of_a_triple_gives_one_that_holds(
    micro: int, steps: int, ranks: int, kept: tuple[int, ...]
) -> None:
    steps = 1 if len(kept) == 1 else steps
    whole = dict(zip(TRIPLE, (micro * steps * ranks, micro, steps), strict=True))
    names = [TRIPLE[index] for index in kept]
    config = load_config({name: whole[name] for name in names}).resolve_batch(ranks)
    assert {name: vars(config)[name] for name in whole} == whole
    assert config.resolve_batch(ranks) == config


@given(SIZES, st.none() | SIZES, st.none() | SIZES, st.integers(1, 8))
def test_a_triple_is_either_exact_or_refused(total: int, micro: int | None, steps: int | None, ranks: int) -> None:
    source = dict(zip(TRIPLE, (total, micro, steps), strict=True))
    solvable = [
        m
        for m in ([micro] if micro else range(1, total + 1))
        for k in ([steps] if steps else range(1, total + 1) if micro else [1])
        if m * k * ranks == total
    ]
    try:
        config = load_config(source).resolve_batch(ranks)
    except ConfigError:
        assert not solvable
        return
    assert solvable
    sizes = [vars(config)[name] for name in TRIPLE]
    assert sizes[0] == total == sizes[1] * sizes[2] * ranks


# --- the way back


NUMBERS = st.floats(0, 1e6, allow_nan=False)
OPTIMIZER = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["AdamW", "Adam"])},
        optional={"params": st.fixed_dictionaries({}, optional={"lr": NUMBERS, "betas": st.just([0.5, 0.75])})},
    ),
    st.fixed_dictionaries(
        {"type": st.just("Adam"), "params": st.fixed_dictionaries({"adam_w_mode": st.booleans(), "lr": NUMBERS})}
    ),
    st.fixed_dictionaries(
        {"type": st.just("sgd"), "params": st.fixed_dictionaries({}, optional={"momentum": NUMBERS, "lr": NUMBERS})}
    ),
)
FILES = st.fixed_dictionaries(
    {"train_micro_batch_size_per_gpu": SIZES},
    optional={
        "gradient_accumulation_steps": SIZES,
        "gradient_clipping": NUMBERS,
        "gradient_allreduce_op": st.sampled_from(["mean", "sum"]),
        "gradient_accumulation": st.sampled_from(["full", "sharded", None]),
        "optimizer": OPTIMIZER,
        "scheduler": st.fixed_dictionaries({"type": st.just("StepLR"), "params": st.just({"a": [1, {"b": [2]}]})}),
        "zero_optimization": st.fixed_dictionaries(
            {},
            optional={
                "stage": st.integers(0, 3),
                "reduce_bucket_size": st.integers(1) | st.sampled_from([1e9, "auto"]),
                "sub_group_size": st.just("auto"),
                "//": st.just({"stage": 9}),
                "units": st.just("auto") | st.lists(st.sampled_from("ABC"), min_size=1, unique=True),
            },
        ),
        "reproducible": st.sampled_from([None, True, False, "auto"]),
        "hierarchical_reduce": st.sampled_from([None, True, False]),
        "steps_per_print": st.sampled_from([None, 0, 5, "inf", "auto"]),
        "torch_autocast": st.fixed_dictionaries({"dtype": st.sampled_from(["half", "torch.bfloat16", "auto"])}),
        "monitor": st.fixed_dictionaries({}, optional={"csv": st.fixed_dictionaries({"enabled": st.booleans()})}),
        "tensorboard": st.just({"output_path": "", "job_name": "a"}),
        "wandb": st.just({"enabled": True}),
        "_remark": st.just({"any": "auto"}),
        "$schema": st.just("a file"),
        "# what": st.just(1),
        "timeout_s": st.floats(1e-3, 1e6),
        "debug": st.booleans(),
        "seed": st.integers(0, 2**63 - 1),
    },
)


@settings(deadline=None)  # other programs may have the machine
@given(FILES, st.none() | st.integers(1, 8))
def test_a_config_written_as_json_loads_as_an_equal_config(source: dict[str, Any], ranks: int | None) -> None:
    config = load_config(source)
    if ranks is not None:
        config = config.resolve_batch(ranks)
    again = load_config(json.loads(json.dumps(config.to_dict(), allow_nan=False)))
    assert again == config
    assert again.to_dict() == config.to_dict()


# --- the schema


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """The part of JSON Schema that json_schema() uses."""
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    if "anyOf" in schema and not any(accepts(each, value) for each in schema["anyOf"]):
        return False
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        return False
    names = schema.get("type", [])
    for name in [names] if isinstance(names, str) else names:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if (numeric and (name == "number" or (name == "integer" and value == int(value)))) or (
            name in kinds and isinstance(value, kinds[name])
        ):
            break
    else:
        if names:
            return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        if not set(schema.get("required", ())) <= value.keys():
            return False
        patterns = schema.get("patternProperties", {})
        remarks = {name for name in value for pattern in patterns if re.search(pattern, name)}
        if schema.get("additionalProperties") is False and not value.keys() - remarks <= properties.keys():
            return False
        return all(accepts(properties.get(name, {}), item) for name, item in value.items())
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(accepts(schema.get("items", {}), v) for v in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf) and schema.get(
            "exclusiveMinimum", -math.inf
        ) < value < schema.get("exclusiveMaximum", math.inf)
    return True


@settings(deadline=None)  # other programs may have the machine
@given(FILES)
def test_the_schema_accepts_what_loads(source: dict[str, Any]) -> None:
    assert accepts(json_schema(), source)
    assert accepts(json_schema(), load_config(source).to_dict())


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"train_batch_size": 0},
        {"train_batch_size": 8, "gradient_cliping": 1},
        {"train_batch_size": 8, "zero_optimization": {"stage": 4}},
        {"train_batch_size": 8, "zero_optimization": {"offload_optimizer": {"device": "disk"}}},
        {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"weight_decy": 1}}},
        {"train_batch_size": 8, "timeout_s": 0},
    ],
)
def test_the_schema_refuses_what_does_not_load(wrong: dict[str, Any]) -> None:
    assert not accepts(json_schema(), wrong)
    assert problems(wrong)


def test_the_schema_has_every_key_and_closes_every_section() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    json.dumps(schema, allow_nan=False)
    for name in (*KEYS, *ALIASES):
        node = schema
        for part in name.split("."):
            assert node["additionalProperties"] is False, name
            node = node["properties"][part]


def test_a_frozen_mapping_equals_a_dict_with_the_same_items() -> None:
    frozen = FrozenMapping({"a": [1], "b": {"c": 2}})
    assert frozen == {"a": (1,), "b": {"c": 2}}
    assert frozen != {"a": (1,)}
    assert len(frozen) == 2


@pytest.mark.parametrize("old", ["cpu_checkpointing", "cpu_offload"])
def test_activations_are_moved_only_where_they_are_checkpointed(old: str) -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.\w+: .*no block is checkpointed; set"):
        load(activation_checkpointing={old: True})
    both = load(activation_checkpointing={"enabled": True, old: True}).activation_checkpointing
    assert both == ActivationsConfig(enabled=True, cpu_offload=True)
    assert load().activation_checkpointing == ActivationsConfig()


def test_stepping_in_backward_names_what_it_cannot_be_combined_with() -> None:
    base: dict[str, Any] = {"train_batch_size": 8}

    def said(device: str, stage: int = 1, **others: Any) -> str:
        offload = {"device": device, "step_in_backward": True}
        with pytest.raises(ConfigError) as error:
            load_config({**base, "zero_optimization": {"stage": stage, "offload_optimizer": offload}, **others})
        return str(error.value)

    assert "step_in_backward: expected a device that is not none" in said("none")
    assert "step_in_backward: expected stage 1, 2 or 3" in said("cpu", stage=0)
    assert "step_in_backward: expected gradient_clipping 0" in said("cpu", gradient_clipping=1.0)
    assert "step_in_backward: expected no fp16" in said("cpu", fp16={"enabled": True})
    assert "step_in_backward: expected no fp16" in said("cpu", torch_autocast={"enabled": True, "dtype": "float16"})
    fine = load_config(
        {**base, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "step_in_backward": True}}}
    )
    assert fine.zero_optimization.offload_optimizer.step_in_backward
