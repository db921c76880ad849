"""Full parameters for the user: full_params, state_dict, save_pretrained, and the model that close() gives back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine.errors import ShardEngineError
from tests import oracle
from tests.support import cases
from tests.support.ranks import RankPool
from tests.support.special_losses import CASES, Case, bare
from tests.support.special_models import Lm

Pools = Callable[[int], RankPool]
TIED = CASES["tied: embedding and head"]
PLAIN = CASES["two forwards, one backward"]


def trained(case: Case, stage: str, steps: int = 1) -> Any:
    """An engine after ``steps`` steps, with buckets of 600 elements."""
    engine = cases.make_engine(case.make(), cases.config_of(stage, zero={"reduce_bucket_size": 600}))
    for step in range(steps):
        train_step(engine, case, step)
    return engine


def train_step(engine: Any, case: Case, step: int) -> float:
    loss = case.loss(engine, step, engine.rank, 0)
    engine.backward(loss)
    engine.step()
    return loss.item()


def expected(case: Case, ranks: int, steps: int, model: nn.Module | None = None) -> oracle.Trace:
    model = model or case.make()
    return oracle.train(
        model,
        case.loss,
        ranks=ranks,
        steps=steps,
        kind="AdamW",
        groups=cases.groups_of(model, "AdamW"),
        clip=cases.CLIP,
    )


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


# full_params


def shows_full(stage: str) -> dict[str, Any]:
    engine = trained(PLAIN, stage)
    module = engine.module
    with engine.full_params():
        everything = {name: cases.copy_out(p) for name, p in module.named_parameters()}
        state = {name: cases.copy_out(p) for name, p in module.state_dict().items()}
    with engine.full_params(["out.weight", "blocks.1.up.bias"]):
        chosen = {n: cases.copy_out(module.get_parameter(n)) for n in ("out.weight", "blocks.1.up.bias")}
        with engine.full_params("blocks.2.up.bias"), torch.no_grad():
            inside = PLAIN.loss(engine, 1, engine.rank, 0).item()
            inner = cases.copy_out(module.blocks[2].up.bias)
        again = cases.copy_out(module.blocks[1].up.bias)
    outside = PLAIN.loss(engine, 1, engine.rank, 0)
    engine.backward(outside)
    engine.step()
    weights = {name: cases.copy_out(value) for name, value in engine.state_dict().items()}
    engine.close()
    return {
        "all": everything, "state": state, "chosen": {**chosen, "blocks.2.up.bias": inner}, "again": again,
        "losses": (inside, outside.item()), "after": weights,
    }  # fmt: skip


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_full_params_shows_full_weights_on_every_rank(pools: Pools, stage: str) -> None:
    first, second = expected(PLAIN, 2, 1).parameters, expected(PLAIN, 2, 2)
    results = pools(2).run(shows_full, stage)
    for rank, result in enumerate(results):
        same(result["all"], first)
        same(result["state"], first)
        for name, value in result["chosen"].items():
            assert torch.equal(value, first[name]), name
        assert torch.equal(result["again"], first["blocks.1.up.bias"])
        assert result["losses"] == (second.losses[1][rank][0],) * 2, "a forward inside sees the same weights"
    same(results[0]["after"], second.parameters)


def writes(stage: str) -> dict[str, Any]:
    engine = trained(TIED, stage, steps=0)
    with engine.full_params(writable=True), torch.no_grad():
        for number, parameter in enumerate(engine.module.parameters()):
            parameter.mul_(0.5 if engine.rank == 0 else 77.0).add_(number * 0.01)
    with engine.full_params(["head.weight"], writable=True), torch.no_grad():
        engine.module.head.weight.sub_(0.25 * (1 + engine.rank))
    with engine.full_params():
        seen = {name: cases.copy_out(p) for name, p in engine.module.named_parameters()}
    losses = [train_step(engine, TIED, step) for step in range(2)]
    weights = {name: cases.copy_out(value) for name, value in engine.state_dict().items()}
    engine.close()
    return {"seen": seen, "losses": losses, "weights": weights}


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_what_rank_0_writes_is_what_every_rank_trains_with(pools: Pools, stage: str) -> None:
    model = TIED.make()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(0.5).add_(number * 0.01)
        model.get_parameter("head.weight").sub_(0.25)
    written = {name: p.detach().clone() for name, p in model.named_parameters()}
    truth = expected(TIED, 2, 2, model)
    results = pools(2).run(writes, stage)
    for rank, result in enumerate(results):
        same(result["seen"], written)
        assert result["losses"] == [row[rank][0] for row in truth.losses]
    same({name: results[0]["weights"][name] for name in truth.parameters}, truth.parameters)


def asks_for_unknown_names() -> list[str]:
    engine = trained(PLAIN, "3", steps=0)
    texts = []
    for names in (["blocks.1.up.wieght"], ["out.weight"] if engine.rank == 0 else ["out.bias"]):
        try:
            with engine.full_params(names):
                texts.append("no error")
        except ShardEngineError as error:
            texts.append(str(error))
    train_step(engine, PLAIN, 0)
    engine.close()
    return texts


def test_full_params_refuses_unknown_and_different_names(pools: Pools) -> None:
    for unknown, different in pools(2).run(asks_for_unknown_names):
        assert "'blocks.1.up.wieght'" in unknown and "'blocks.1.up.weight'" in unknown
        assert "out.weight" in different and "out.bias" in different and "rank 1" in different


# state_dict and directories


def takes_state(stage: str, name: str) -> dict[str, Any]:
    engine = trained(CASES[name], stage, steps=2)
    state = engine.state_dict()
    shared = sorted({n for n, v in state.items() for m, w in state.items() if n != m and v.data_ptr() == w.data_ptr()})
    engine.close()
    return {"state": {key: cases.copy_out(value) for key, value in state.items()}, "shared": shared}


@pytest.mark.parametrize("name", ["tied: embedding and head", "buffers", "frozen: adapters over bf16", "odd sizes"])
@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_state_dict_equals_plain(pools: Pools, stage: str, name: str) -> None:
    """Names, order, dtypes, frozen ones, buffers, and tied entries that share memory; {} on the other ranks."""
    case = CASES[name]
    model = case.make()
    oracle.train(
        model,
        case.loss,
        ranks=2,
        steps=2,
        kind="AdamW",
        groups=cases.groups_of(model, "AdamW"),
        clip=cases.CLIP,
    )
    results = pools(2).run(takes_state, stage, name)
    same(results[0]["state"], model.state_dict())
    assert all(results[0]["state"][key].dtype is value.dtype for key, value in model.state_dict().items())
    assert results[0]["shared"] == (["body.embed.weight", "head.weight"] if case is TIED else [])
    assert results[1]["state"] == {}


def saves(stage: str, directory: str, name: str) -> None:
    engine = trained(CASES[name], stage, steps=1)
    engine.save_pretrained(directory)
    engine.close()


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_saved_gpt2_loads_with_transformers(pools: Pools, stage: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    case = CASES["checkpointing: Hugging Face"]
    pools(2).run(saves, stage, str(tmp_path / "model"), "checkpointing: Hugging Face")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    same({name: p.detach() for name, p in loaded.named_parameters()}, expected(case, 2, 1).parameters)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing is left beside it"


def test_saved_plain_module_loads_with_safetensors(pools: Pools, tmp_path: Path) -> None:
    from safetensors.torch import load_file, load_model

    pools(2).run(saves, "3", str(tmp_path / "model"), "tied: embedding and head")
    truth = expected(TIED, 2, 1).parameters
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    same(dict(sorted(tensors.items())), dict(sorted(truth.items())))
    fresh = Lm()
    assert load_model(fresh, tmp_path / "model" / "model.safetensors") == (set(), [])
    same({name: p.detach() for name, p in fresh.named_parameters()}, truth)


def saves_to_a_file(path: str) -> str:
    engine = trained(PLAIN, "3")
    try:
        engine.save_pretrained(path)
    except (ShardEngineError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
    train_step(engine, PLAIN, 1)
    engine.close()
    return text


def test_saving_that_fails_raises_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.write_text("a file")
    first, second = pools(2).run(saves_to_a_file, str(path))
    assert str(path) in first and "rank 0" in second and str(path) in second


# close


def closes(stage: str) -> dict[str, Any]:
    engine = trained(TIED, stage)
    module = engine.module
    loss = TIED.loss(engine, 1, engine.rank, 0)
    engine.backward(loss)
    engine.close()
    engine.close()
    weights = {name: cases.copy_out(p) for name, p in module.state_dict().items()}
    storages = [p.untyped_storage().nbytes() == p.nbytes for p in module.parameters()]
    hooks = sum(
        len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._state_dict_pre_hooks) for m in module.modules()
    )
    plain = TIED.loss(bare(module), 1, 0, 0)
    plain.backward()
    grads = all(p.grad is not None for p in module.parameters())
    module.double().zero_grad()
    module.float()
    again = cases.make_engine(module, cases.config_of(stage))
    value = train_step(again, TIED, 1)
    again.close()
    return {
        "weights": weights, "own": all(storages), "hooks": hooks, "plain": plain.item(), "grads": grads, "again": value,
        "tied": module.head.weight is module.body.embed.weight,
    }  # fmt: skip


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_close_gives_back_an_ordinary_model(pools: Pools, stage: str) -> None:
    model = TIED.make()
    truth = expected(TIED, 2, 2, TIED.make())
    oracle.train(
        model,
        TIED.loss,
        ranks=2,
        steps=1,
        kind="AdamW",
        groups=cases.groups_of(model, "AdamW"),
        clip=cases.CLIP,
    )
    for rank, result in enumerate(pools(2).run(closes, stage)):
        same(result["weights"], model.state_dict())
        assert result["own"] and result["grads"] and result["tied"] and result["hooks"] == 0
        assert result["plain"] == truth.losses[1][0][0]
        assert result["again"] == truth.losses[1][rank][0]


def test_the_same_weights_are_saved_as_the_same_bytes(tmp_path: Path) -> None:
    """Of a plain module without ties. The names of tied weights are a second entry, and two have no order."""
    engine = cases.make_engine(nn.Linear(3, 3), {"train_micro_batch_size_per_gpu": 1})
    found = set()
    for number in range(8):
        engine.save_pretrained(tmp_path / str(number))
        found.add((tmp_path / str(number) / "model.safetensors").read_bytes())
    engine.close()
    assert len(found) == 1 and b'"format":"pt"' in found.pop()
