"""Adapters on a frozen base that stays quantised: equal to plain torch on one process, at every stage."""

from __future__ import annotations

import functools
import gc
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine.errors import ShardEngineError, UsageError
from shardengine.sharding import inner
from tests import oracle
from tests.stages.test_traffic import counted
from tests.support import cases, quantised
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool
from tests.support.sizes import padded

Pools = Callable[[int], RankPool]
STEPS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def train(dtype: str, stage: str, micros: int, tier: str, folder: str) -> dict[str, Any]:
    """A run as the oracle's, with the weights in ``tier``."""
    tiers = {"": {}, "cpu": {"device": "cpu"}, "nvme": {"device": "nvme", "nvme_path": folder}}
    zero = {"reduce_bucket_size": 100, **({"offload_param": tiers[tier]} if tier else {})}
    config = cases.config_of(stage, micros, zero=zero)
    engine = cases.make_engine(quantised.make(dtype=DTYPES[dtype]), config, "AdamW")
    result = cases.run_steps(engine, STEPS, quantised.loss_of)
    engine.close()
    return result


@functools.lru_cache(maxsize=100)
def truth(dtype: str, ranks: int, micros: int, order: str) -> oracle.Trace:
    model = quantised.make(dtype=DTYPES[dtype])
    return oracle.train(
        model, quantised.loss_of, ranks=ranks, micros=micros, steps=STEPS, kind="AdamW",
        groups=cases.groups_of(model, "AdamW"), order=order, clip=cases.CLIP,
    )  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize(("ranks", "stage", "dtype", "micros", "tier"), [
    (2, "3", "bf16", 1, ""), (2, "3k", "fp32", 2, ""), (2, "2", "bf16", 1, ""), (2, "1", "fp32", 1, ""),
    (2, "0", "fp32", 1, ""), (1, "3", "fp32", 1, ""), (3, "3", "fp32", 2, "cpu"), (2, "3", "bf16", 1, "nvme"),
])  # fmt: skip
def test_equal_to_oracle(
    pools: Pools, tmp_path: Path, ranks: int, stage: str, dtype: str, micros: int, tier: str
) -> None:
    results = pools(ranks).run(train, dtype, stage, micros, tier, str(tmp_path))
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, truth(dtype, ranks, micros, order))


def train_library(name: str, stage: str, again: bool) -> dict[str, Any]:
    """With a base of a library's. again: the model was used before."""
    model = quantised.make((name, name))
    if again:
        quantised.loss_of(model, 0, 0, 0)
    engine = cases.make_engine(model, cases.config_of(stage), "AdamW")
    losses = [[cases.run_micro_batch(engine, quantised.loss_of, step, 0)] for step in range(STEPS)]
    engine.close()
    return {"losses": losses}


@pytest.mark.parametrize("name", list(quantised.LIBRARIES))
def test_libraries_equal_the_oracle(pools: Pools, name: str) -> None:
    """Where they are installed."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    model = quantised.make((name, name))
    groups = cases.groups_of(model, "AdamW")
    expected = oracle.train(
        model, quantised.loss_of, ranks=2, steps=STEPS, kind="AdamW", groups=groups, clip=cases.CLIP
    )
    for stage, again in (("3", False), ("3", True), ("2", False)):
        for rank, found in enumerate(pools(2).run(train_library, name, stage, again)):
            assert found["losses"] == [row[rank] for row in expected.losses], (stage, again)


# What users do between steps


def is_refused(action: Callable[[], Any], *words: str) -> bool:
    """Whether it raises a sentence with all ``words``."""
    with pytest.raises(UsageError) as caught:
        action()
    text = str(caught.value)
    assert all(word in text for word in words), text
    return True


def values_of(model: Any) -> dict[str, Tensor]:
    """The values of every parameter, dequantised, and what is kept beside."""
    found = {}
    for name, value in model.named_parameters():
        found[name] = (
            value.dequantise() if isinstance(value, (quantised.Int8, quantised.Twice)) else value.detach().float()
        ).clone()
    found["absmax"] = model.blocks[1].base.weight.table.absmax.detach().clone()
    return found


def assert_same_values(found: dict[str, Tensor], expected: dict[str, Tensor], *, base: bool = True) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if base and (name == "absmax" or ".base." in name):
            assert torch.equal(found[name], value), name


def use(stage: str, folder: str) -> dict[str, Any]:
    """One life of a model: it begins with other values on other ranks, and ends as an ordinary one."""
    rank = cases.mesh_of_this_process().rank
    expected = values_of(quantised.make())
    model: Any = quantised.make(seed=31 + rank)  # rank 0's values are everybody's
    outer = model.blocks[0].base.weight
    engine = cases.make_engine(model, cases.config_of(stage), "AdamW")
    name, inner = "blocks.0.base.weight", "blocks.0.base.weight.scale"
    hidden = stage in ("3", "3k")
    if hidden:
        is_refused(lambda: outer.sum(), inner.removesuffix(".scale"), "sharded", f"rank {rank}")
        is_refused(lambda: model.blocks[2].base.weight.sum(), "blocks.2.base.weight", "read by sum")
        is_refused(lambda: outer.values_of_it + 1, "values_of_it", "sharded")
        is_refused(lambda: outer.detach() * 2, "sharded")
        is_refused(lambda: model.blocks[1].base.weight.float(), "blocks.1.base.weight", "sharded")
        assert "sharded" in repr(outer.values_of_it) and outer.shape == (quantised.WIDTH, quantised.WIDTH)
    assert model.blocks[0].base.weight is outer
    with engine.full_params([name]):
        assert type(outer) is quantised.Int8 and torch.equal(outer.dequantise(), expected[name])
    with engine.full_params():
        assert_same_values(values_of(model), expected)
    losses = []
    for step in range(3):
        losses.append(cases.run_micro_batch(engine, quantised.loss_of, step, 0))
        engine.eval()
        with torch.no_grad():
            losses.append(float(quantised.loss_of(engine, 100, 0, 0)))
        engine.train()
        if step == 1:
            engine.save_checkpoint(folder, tag="whole")
            engine.save_checkpoint(folder, tag="adapters", frozen=False)
            kept = engine.state_dict()
            again = engine.state_dict(trainable_only=True)
    for tag in ("whole", "adapters"):
        engine.load_checkpoint(folder, tag=tag)
        assert cases.run_micro_batch(engine, quantised.loss_of, 2, 0) == losses[4]
    if rank == 0:
        assert type(kept[name]) is quantised.Int8 and torch.equal(kept[name].dequantise(), expected[name])
        assert "blocks.0.up" in again and not any("base.weight" in each for each in again)
    engine.load_state_dict(kept)
    losses.append(quantised.loss_of(engine, 2, rank, 0).item())
    assert losses[-1] == losses[4]
    with engine.full_params([name], writable=True):
        if rank == 0:
            outer.scale.mul_(2)
    with engine.full_params([name]):
        doubled = outer.dequantise()
        assert torch.equal(doubled, expected[name] * 2)
    memory = engine.memory()
    assert memory["measured_model_state_bytes"] == memory["predicted_model_state_bytes"]
    engine.close(restore=False)
    if hidden:
        is_refused(lambda: outer.sum(), "restore=False")
    following = cases.make_engine(model, cases.config_of(stage), "AdamW")
    with following.full_params():
        assert_same_values(values_of(model), {**expected, name: doubled})
    losses.append(cases.run_micro_batch(following, quantised.loss_of, 5, 0))
    following.close()
    assert_same_values(values_of(model), {**expected, name: doubled})
    assert (
        type(outer) is quantised.Int8
        and type(outer.scale) is Tensor
        and type(model.blocks[1].base.weight) is (quantised.Codes)
    )
    assert type(model.blocks[1].base.weight.table.absmax) is Tensor
    quantised.loss_of(model, 0, 0, 0).backward()
    copied = pickle.loads(pickle.dumps(model.blocks[4]))
    assert torch.equal(copied.base.weight, model.blocks[4].base.weight)
    return {"losses": losses}


@pytest.mark.parametrize("ranks", [2])
def test_between_steps(pools: Pools, tmp_path: Path, ranks: int) -> None:
    """The same at every stage: losses of training, evaluation, resumed, of the next engine."""
    found = [pools(ranks).run(use, stage, str(tmp_path / stage)) for stage in ("3", "2")]
    assert found[0] == found[1]


# Sizes


WIDE, BLOCKS = 96, 5
BASE = WIDE * WIDE
"""Bytes of one block's int8 values."""


def whole_bytes() -> int:
    """Of memory that holds values of a base, at this moment; one byte is what hidden parameters show."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.dtype is torch.int8 and thing.untyped_storage().nbytes() > 1:
            found[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
    return sum(found.values())


def measure(stage: str) -> dict[str, Any]:
    model: Any = quantised.make(("int8",) * BLOCKS, width=WIDE)
    engine = cases.make_engine(model, cases.config_of(stage, zero={"stage3_prefetch_bucket_size": 0}))
    cases.run_micro_batch(engine, quantised.loss_of, 0, 0)
    gc.collect()
    before = whole_bytes()
    inside: list[int] = []
    handles = [block.base.register_forward_hook(lambda *_: inside.append(whole_bytes())) for block in model.blocks]
    with counted() as counter:
        cases.run_micro_batch(engine, quantised.loss_of, 1, 0)
    for handle in handles:
        handle.remove()
    found = {"rest": before, "inside": max(inside), "sent": counter.take()[0], **engine.traffic(), **engine.memory()}
    engine.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_are_those_of_the_base(pools: Pools, ranks: int) -> None:
    """Of memory at rest and in a forward, and of the wire: the values of int8 as bytes, their scales as fp32."""
    frozen = [padded([BASE], ranks, 1), 4 * padded([WIDE], ranks)]
    adapter, head = 4 * padded([3 * WIDE, 3 * WIDE], ranks), 4 * padded([3 * WIDE, 3], ranks)
    inp = 4 * padded([7 * WIDE, WIDE], ranks)
    once = sum(frozen) + adapter + inp + head  # the last block and the root
    sent = (BLOCKS - 1) * 2 * (sum(frozen) + adapter) + once + BLOCKS * adapter + head
    weights = (BLOCKS * (sum(frozen) + adapter) + inp + head) // ranks
    for found in pools(ranks).run(measure, "3"):
        assert found["rest"] == BLOCKS * frozen[0] // ranks
        assert found["rest"] < found["inside"] <= found["rest"] + 2 * frozen[0]
        assert found["sent"] == found["formula_bytes_per_step"] == sent * (ranks - 1) // ranks
        assert found["live_weight_bytes"] == weights


# Refusals


class Closed(Tensor):
    """No memory, and no word about what it consists of."""

    def __new__(cls, values: Tensor) -> Closed:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return args[0]


class Lost(quantised.Int8):
    """Cannot be made anew."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, _size: Any, _stride: Any) -> Any:
        return inner["values_of_it"]


def begin(kind: str) -> str:
    """The sentence with which ``initialize`` refuses a model."""
    rank = cases.mesh_of_this_process().rank
    model: Any = quantised.make()
    base, plain = model.blocks[0].base, torch.randn(quantised.WIDTH, quantised.WIDTH)
    if kind == "trainable":
        base.weight.requires_grad_(True)
    elif kind == "closed":
        base.weight = nn.Parameter(Closed(plain), requires_grad=False)
    elif kind == "lost":
        base.weight = nn.Parameter(Lost.of(plain), requires_grad=False)
    elif kind == "class" and rank == 1:
        base.weight = nn.Parameter(plain, requires_grad=False)
    elif kind == "context" and rank == 1:
        old = base.weight
        base.weight = nn.Parameter(quantised.Int8(old.values_of_it, old.scale, torch.float64), requires_grad=False)
    elif kind == "table" and rank == 1:
        model.blocks[1].base.weight.table.blocksize = 2
    with pytest.raises(ShardEngineError) as caught:
        cases.make_engine(model, cases.config_of("3"))
    return str(caught.value)


def refusals() -> dict[str, str]:
    return {kind: begin(kind) for kind in ("trainable", "closed", "lost", "class", "context", "table")}


def unfreeze(stage: str) -> tuple[str, str]:
    """The sentences that a quantised parameter gets which is unfrozen later, without and with an optimizer group."""
    model: Any = quantised.make()
    engine: Any = cases.make_engine(model, cases.config_of(stage))
    cases.run_micro_batch(engine, quantised.loss_of, 0, 0)
    model.blocks[0].base.weight.requires_grad_(True)
    with pytest.raises(ShardEngineError) as first:
        cases.run_micro_batch(engine, quantised.loss_of, 1, 0)
    with pytest.raises(ShardEngineError) as second:
        engine.optimizer.add_param_group({"params": [model.blocks[0].base.weight]})
    model.blocks[0].base.weight.requires_grad_(False)
    cases.run_micro_batch(engine, quantised.loss_of, 1, 0)
    engine.close()
    return str(first.value), str(second.value)


def cast() -> dict[str, torch.dtype]:
    """The dtypes of a model that the config casts to bf16."""
    model: Any = quantised.make()
    model.blocks[1].base.weight.data = torch.zeros(quantised.WIDTH, 5)  # packed in fp32, as quant_storage says
    model.blocks[1].base.weight.CB = None
    engine = cases.make_engine(model, cases.config_of("3", bf16={"enabled": True}))
    found = {name: parameter.dtype for name, parameter in model.named_parameters()}
    found |= {"scale": model.blocks[0].base.weight.scale.dtype}
    found |= {"absmax": model.blocks[1].base.weight.table.absmax.dtype}
    engine.close()
    return found


def test_only_what_is_not_quantised_is_cast(pools: Pools) -> None:
    (found,) = pools(1).run(cast)
    assert found["inp.weight"] is found["blocks.0.up"] is torch.bfloat16
    kept = {name: dtype for name, dtype in found.items() if ".base." in name or name in ("scale", "absmax")}
    assert kept["blocks.1.base.weight"] is kept["scale"] is kept["absmax"] is torch.float32
    assert kept["blocks.3.base.weight"] is torch.float8_e4m3fn and torch.bfloat16 not in kept.values()


def test_what_cannot_be_held_is_refused(pools: Pools) -> None:
    found = pools(2).run(refusals)
    for stage in ("3", "2"):
        for first, second in pools(2).run(unfreeze, stage):
            assert "0.base.weight" in first and "unfrozen after initialize" in first
            assert "0.base.weight" in second and "requires grad" in second
    name = "blocks.0.base.weight"
    for kind, words in {
        "trainable": (name, "Int8", "requires_grad_(False)"),
        "closed": (name, "Closed", "__tensor_flatten__"),
        "lost": (name, "Lost", "__tensor_unflatten__"),
        "class": (name, "differs between ranks"),
        "context": (name, "float64", "differs between ranks"),
        "table": ("blocks.1.base", "blocksize=2", "differs between ranks"),
    }.items():
        for said in found:
            assert all(word in said[kind] for word in words), said[kind]


def begin_on_meta(stage: str) -> dict[str, Any]:
    """Rank 1 has shapes alone."""
    rank = cases.mesh_of_this_process().rank
    model: Any = quantised.make(("int8", "twice"))
    if rank == 1:
        for block in model.blocks:
            outer = block.base.weight
            whole = {id(leaf): leaf.to("meta") for leaf in inner.leaves_of(outer)}
            block.base.weight = nn.Parameter(inner.made_of(outer, whole), requires_grad=False)
            assert block.base.weight.device.type == "meta"
    kept = model.blocks[0].base.weight
    engine = cases.make_engine(model, cases.config_of(stage))
    assert model.blocks[0].base.weight is kept and kept.device.type == "cpu"
    found = cases.run_steps(engine, 2, quantised.loss_of)
    engine.close()
    return {"losses": found["losses"], "sum": kept.dequantise().sum().item()}


def test_other_ranks_need_no_values(pools: Pools) -> None:
    found = [rows for stage in ("3", "1") for rows in pools(2).run(begin_on_meta, stage)]
    assert len({each["sum"] for each in found}) == 1
    assert found[:2] == found[2:]
