"""Activation checkpointing of blocks by the engine: what it changes, what it refuses, what it costs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from tests.runtime import test_compile
from tests.stages.test_traffic import Wide, counted
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)
WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"enabled": True},
    "offloaded": {"enabled": True, "cpu_offload": True},
}
ON = ["recomputed", "offloaded"]
LossOf = Callable[[Any, int, int, int], Tensor]


def engine_of(way: str, stage: str, model: nn.Module | None = None, micros: int = 1, **options: Any) -> Any:
    config = cases.config_of(stage, micros, activation_checkpointing=WAYS[way], **options)
    return cases.make_engine(model or cases.make_mlp(), config, "AdamW")


def train(engine: Any, loss_of: LossOf = cases.loss_of, steps: int = 3) -> tuple[Any, str]:
    """Losses, and a hash of weights and optimizer states. Closes the engine."""
    result = cases.run_steps(engine, steps, loss_of)
    engine.close()
    return result["losses"], cases.digest([result["state"]])


def pool_of(engine: Any) -> Any:
    """The host buffers of an engine that offloads activations."""
    return engine.module.blocks[0].forward._offloading.__self__.buffers


class Counting(nn.Module):
    """Counts its forwards, and how often its own ``__call__`` was used (by a hook)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.forwards = self.calls = 0
        self.register_forward_pre_hook(Counting.count)

    def count(self, _args: Any) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return torch.tanh(self.linear(x))


def chain(block: Callable[[], nn.Module] = lambda: nn.Linear(8, 8), count: int = 2) -> Any:
    """``count`` blocks one after the other between two matrices."""
    torch.manual_seed(3)
    model: Any = nn.Module()
    model.blocks = nn.ModuleList(block() for _ in range(count))
    model.inp, model.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(x: Tensor) -> Tensor:
        x = model.inp(x)
        for block in model.blocks:
            x = block(x)
        result: Tensor = model.out(x)
        return result

    model.forward = forward
    return model


def squares(model: Any, step: int, rank: int, micro: int) -> Tensor:
    torch.manual_seed(cases.seed_of(step, rank, micro))
    loss: Tensor = model(torch.randn(4, 8)).square().mean()
    return loss


# What it does


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("way", ON)
def test_only_what_autograd_records_is_computed_again(way: str, stage: str) -> None:
    model = chain(Counting)
    blocks = list(model.blocks)
    engine = engine_of(way, stage, model)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            engine(torch.ones(2, 8))
    assert [block.forwards for block in blocks] == [2, 2]
    engine.backward(squares(engine, 0, 0, 0))
    assert [(block.forwards, block.calls) for block in blocks] == [(4, 3), (4, 3)], "no hook runs in a recomputation"
    engine.step()
    engine.close()
    assert all("forward" not in vars(block) for block in blocks)
    squares(engine.module, 1, 0, 0).backward()
    assert [block.forwards for block in blocks] == [5, 5]


def test_frozen_blocks_that_no_gradient_passes_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain(Counting)
    for part in (model.inp, model.blocks[0]):
        part.requires_grad_(False)
    engine = engine_of("offloaded", "3", model)
    pool, taken = pool_of(engine), []
    take = pool.acquire

    def noting(count: int) -> Tensor:
        taken.append(count)
        return take(count)

    monkeypatch.setattr(pool, "acquire", noting)
    engine.backward(squares(engine, 0, 0, 0))
    assert [block.forwards for block in model.blocks] == [1, 2]
    assert taken == [4 * 8 * 4], "the input of the second block"


def test_a_forward_of_the_block_itself_comes_back_after_close() -> None:
    model = chain()
    block = model.blocks[0]
    own = block.forward = lambda x: torch.sin(nn.Linear.forward(block, x))
    plain = train(engine_of("kept", "3", copy.deepcopy(model)), squares)
    assert train(engine_of("recomputed", "3", model), squares) != plain, "the copy's forward is bound to the original"
    assert vars(block)["forward"] is own and "forward" not in vars(model.blocks[1])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_an_ordinary_one(copied: Callable[[Any], Any]) -> None:
    engine = engine_of("offloaded", "2")
    model = copied(engine.module)
    train(engine)
    twin = cases.make_mlp()
    for each in (model, twin):
        cases.loss_of(each, 0, 0, 0).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours, theirs) and torch.equal(ours.grad, theirs.grad)


def count_traffic(way: str, stage: str, micros: int, depth: int) -> list[Any]:
    torch.manual_seed(4)
    engine = engine_of(way, stage, Wide(13, depth), micros)
    found = []
    for step in range(3):
        with counted() as counter:
            for micro in range(micros):
                torch.manual_seed(10 * step + micro)
                engine.backward(engine(torch.randn(4, 7)).square().mean())
                engine.step()
        found.append(counter.take())
    engine.close()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_a_recomputation_sends_nothing(pools: Pools, stage: str) -> None:
    """The bytes on the wire, and the number of messages, are those without it; test_traffic holds them to the limit."""
    wanted = pools(2).run(count_traffic, "kept", stage, 2, 4)
    assert wanted[0][-1][0] > 0
    for way in ON:
        assert pools(2).run(count_traffic, way, stage, 2, 4) == wanted


@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_new_layout_keeps_it(stage: str) -> None:
    model = chain(Counting)
    model.blocks[1].requires_grad_(False)
    engine = engine_of("recomputed", stage, model)
    engine.optimizer.add_param_group({"params": list(model.blocks[1].parameters())})
    model.blocks[1].requires_grad_(True)
    train_one(engine)
    assert [block.forwards for block in model.blocks] == [2, 2]
    engine.close()
    assert all("forward" not in vars(block) for block in model.blocks)


class Borrowing(nn.Module):
    """Adds what it is given to the result of its own matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *lent: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * sum(tensor.sum() for tensor in lent)


class Lender(nn.Module):
    """Lends a weight, a view of it, a frozen weight and a buffer to its blocks."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Borrowing() for _ in range(2))
        self.weight = nn.Parameter(torch.rand(9, 8))
        self.frozen = nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("table", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.weight, self.weight[2:], self.frozen, self.table)
        return x


@pytest.mark.parametrize("stage", STAGES)
def test_weights_and_buffers_that_blocks_are_given_stay_where_they_are(stage: str) -> None:
    engine = engine_of("offloaded", stage, Lender())
    pool = pool_of(engine)
    losses = [cases.run_micro_batch(engine, squares, step, 0) for step in range(3)]
    assert pool.allocated_bytes == 2 * 4 * 8 * 4, "the inputs of two blocks"
    expected = engine_of("kept", stage, Lender())
    assert losses == [cases.run_micro_batch(expected, squares, step, 0) for step in range(3)]


# Which models


class Attention(nn.Module):
    """Takes keywords, nested containers and the same tensor twice; writes to a list; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, *, pair: tuple[Tensor, Any], options: dict[str, Any]) -> dict[str, Any]:
        query, (key, *_) = x, pair
        y, _ = self.attention(query, key, key if key is query else pair[1], key_padding_mask=options["mask"])
        options["seen"].append(y.shape)
        return {"hidden": x + y * options["scale"], "nothing": None}


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x[None])
        options = {"mask": torch.tensor([[False, False, False, True]]), "scale": 0.5, "seen": self.seen}
        for block in self.blocks:
            x = block(x, pair=(x, "name"), options=options)["hidden"]
        return x


@pytest.mark.parametrize("way", ON)
def test_arguments_of_every_form(way: str) -> None:
    model = Transformer()
    expected = train(engine_of("kept", "3", Transformer()), squares)
    assert train(engine_of(way, "3", model), squares) == expected
    assert len(model.seen) == 6, "the caller's list is written to by forwards, not by recomputations"


class Wandering(nn.Module):
    """Has a buffer that its forward writes to, and that its result depends on; and running statistics."""

    wander: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("wander", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.wander.mul_(1.5)
        return torch.tanh(self.norm(self.linear(x)) * self.wander)


@pytest.mark.parametrize("way", ON)
def test_buffers_are_written_once_and_recomputations_see_what_the_forward_saw(way: str) -> None:
    runs = {each: (model := chain(Wandering), engine_of(each, "2", model)) for each in ("kept", way)}
    hashes = {each: train(engine, squares) for each, (_, engine) in runs.items()}
    assert hashes[way] == hashes["kept"]
    for ours, theirs in zip(runs[way][0].buffers(), runs["kept"][0].buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert runs[way][0].blocks[0].norm.num_batches_tracked == 3


def user_autocast(model: Any, step: int, rank: int, micro: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cases.loss_of(model, step, rank, micro)


@pytest.mark.parametrize("stage", ["1", "3"])
@pytest.mark.parametrize("who", ["engine", "loss", "loop"])
def test_autocast(stage: str, who: str) -> None:
    options: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}} if who == "engine" else {}
    found = {}
    for way in WAYS:
        region: AbstractContextManager[Any] = torch.autocast("cpu", torch.bfloat16) if who == "loop" else nullcontext()
        with region:
            engine = engine_of(way, stage, micros=2, **options)
            found[way] = train(engine, user_autocast if who == "loss" else cases.loss_of)
    assert found["recomputed"] == found["offloaded"] == found["kept"]
    assert found["kept"] != train(engine_of("kept", stage, micros=2))


@pytest.mark.parametrize(
    "compiled", ["wrapped blocks", "wrapped blocks, whole graphs", "blocks in place", "root in place"]
)
@pytest.mark.parametrize("way", ON)
def test_compiled_models(way: str, compiled: str) -> None:
    """Blocks that were wrapped stay compiled, in forward and in recomputation; others run as they are."""
    found = {}
    for each in ("kept", way):
        torch._dynamo.reset()
        counters.clear()
        model = test_compile.WAYS[compiled](test_compile.make_chain(), backend="aot_eager")
        found[each] = train(engine_of(each, "3", model), test_compile.loss_of), counters["stats"]["unique_graphs"]
    assert found[way][0] == found["kept"][0]
    if "wrapped" in compiled:
        assert found[way][1] == found["kept"][1] > 0


# What is refused


def test_a_model_without_blocks_is_refused() -> None:
    with raises("activation-checkpointing-without-blocks", "Sequential"):
        engine_of("recomputed", "0", nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    named = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    train(engine_of("recomputed", "0", named, zero={"units": ["Linear"]}), squares)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_.*is deprecated")
def test_a_model_that_checkpoints_itself_is_refused() -> None:
    model: Any = cases.make_gpt2()
    model.gradient_checkpointing_enable()
    with raises("activation-checkpointing-twice"):
        engine_of("recomputed", "3", model)
    model.gradient_checkpointing_disable()
    engine = engine_of("recomputed", "3", model)
    model.gradient_checkpointing_enable()
    with raises("activation-checkpointing-twice"):
        cases.loss_of(engine, 0, 0, 0)
    model.gradient_checkpointing_disable()
    assert train(engine) == train(engine_of("kept", "3", cases.make_gpt2()))


def test_a_cache_of_keys_and_values_is_refused() -> None:
    engine = engine_of("recomputed", "3", cases.make_llama())
    ids = torch.zeros(1, 4, dtype=torch.long)
    with raises("activation-checkpointing-with-cache", "'model.layers.0'", "DynamicCache"):
        engine(input_ids=ids, use_cache=True)
    with torch.no_grad():
        assert engine(input_ids=ids, use_cache=True).past_key_values is not None
    train(engine)


def test_a_model_whose_config_asks_for_a_cache_trains_and_has_its_config_back_afterwards() -> None:
    model: Any = cases.make_llama()
    model.config.use_cache = True
    engine = engine_of("recomputed", "3", model)
    ids = torch.zeros(1, 4, dtype=torch.long)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > 4
    engine.close()
    assert model.config.use_cache is True


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_that_is_older_than_the_weights_is_refused(stage: str) -> None:
    """The graph of blocks alone: nothing outside of them would notice."""
    engine = engine_of("offloaded", stage, chain())
    inner = engine.module.blocks[0]
    with engine.full_params():
        old = torch.tanh(inner(torch.ones(2, 8))).sum()
    train_one(engine)
    with raises("activation-checkpointing-weights-changed", "'blocks.0'"):
        engine.backward(old)
    engine.zero_grad()
    train_one(engine)


def train_one(engine: Any) -> None:
    engine.backward(squares(engine, 0, 0, 0))
    engine.step()
