"""torch.compile: compiled blocks and compiled roots have the bits of the oracle on the model that is not compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from shardengine.sharding.partition import find_units
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.raising import raises
from tests.support.ranks import RankPool

STEPS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 29)
        self.down = nn.Linear(29, 13)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """A tied matrix at both ends, one block called twice, one checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        x = self.blocks[0](self.blocks[2](x))
        return F.linear(x, self.inp.weight.t())


def make_chain() -> Chain:
    torch.manual_seed(3)
    return Chain()


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    torch.manual_seed(cases.seed_of(step, rank, micro))
    x, y = torch.randn(5, 7), torch.randn(5, 7)
    return (model(x) - y).square().mean()


def wrap_blocks(model: Any, **options: Any) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **options)
    return model


def compile_blocks(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        block.compile(**options)
    return model


def compile_root(model: Any, **options: Any) -> Any:
    model.compile(**options)
    return model


WAYS: dict[str, Callable[..., Any]] = {
    "plain": lambda model, **_: model,
    "wrapped blocks": wrap_blocks,
    "wrapped blocks, whole graphs": functools.partial(wrap_blocks, fullgraph=True),
    "blocks in place": compile_blocks,
    "wrapped root": torch.compile,
    "root in place": compile_root,
}


def train(way: str, stage: str, backend: str, *, micros: int = 1, after: bool = False) -> tuple[dict[str, Any], Any]:
    """One rank's run, names as in the model that is not compiled; and the number of graphs after each step."""
    torch._dynamo.reset()
    counters.clear()
    model: Any = make_chain()
    if not after:
        model = WAYS[way](model, backend=backend)
    engine = cases.make_engine(model, cases.config_of(stage, micros), "AdamW")
    if after:
        WAYS[way](model, backend=backend)
    graphs: list[int] = []
    result = cases.run_steps(
        engine, STEPS, loss_of, before=lambda step: graphs.append(counters["stats"]["unique_graphs"])
    )
    graphs.append(counters["stats"]["unique_graphs"])
    engine.close()
    weights = {plain_name(name): value for name, value in result["weights"].items()}
    state = [(plain_name(name), *rest) for name, *rest in result["state"]]
    return {**result, "weights": weights, "state": state}, graphs[1:]


def plain_name(name: str) -> str:
    """As in the model that is not compiled."""
    return name.replace("_orig_mod.", "")


def train_all(runs: list[tuple[str, str, str, int, bool]]) -> list[Any]:
    return [train(way, stage, backend, micros=k, after=after) for way, stage, backend, k, after in runs]


@functools.cache
def truth(ranks: int, micros: int, order: str) -> oracle.Trace:
    model = make_chain()
    return oracle.train(
        model, loss_of, ranks=ranks, micros=micros, steps=STEPS, kind="AdamW", groups=cases.groups_of(model, "AdamW"),
        order=order, clip=cases.CLIP,
    )  # fmt: skip


def check(pools: Callable[[int], RankPool], ranks: int, runs: list[tuple[str, str, str, int, bool]]) -> None:
    answers = pools(ranks).run(train_all, runs)
    for number, run in enumerate(runs):
        way, stage, _, micros, _ = run
        expected = truth(ranks, micros, cases.LETTER[stage] if micros > 1 else "full")
        for _, graphs in (answer[number] for answer in answers):
            assert graphs[1:] == [graphs[1]] * (STEPS - 1), f"{run}: graphs compiled until each step: {graphs}"
            assert (graphs[0] > 0) is (way != "plain"), f"{run}: {graphs[0]} graphs"
        assert_equal_to_truth([answer[number][0] for answer in answers], expected, run)


@pytest.mark.core
@pytest.mark.parametrize(
    ("way", "backend", "ranks"),
    [(way, "eager", 2) for way in WAYS] + [(way, "aot_eager", 1) for way in WAYS if way != "plain"],
)
def test_every_way_to_compile_equals_the_oracle_at_every_stage(
    pools: Callable[[int], RankPool], way: str, backend: str, ranks: int
) -> None:
    check(pools, ranks, [(way, stage, backend, 1, False) for stage in cases.STAGES])


@pytest.mark.parametrize("ranks", [2, 3])
def test_compiled_models_on_several_ranks_with_accumulation(pools: Callable[[int], RankPool], ranks: int) -> None:
    runs = [
        ("wrapped blocks", "3"), ("wrapped blocks, whole graphs", "2"), ("blocks in place", "3k"),
        ("wrapped root", "1"), ("root in place", "3"),
    ]  # fmt: skip
    check(pools, ranks, [(way, stage, "aot_eager", 3, False) for way, stage in runs])


def test_compiling_in_place_after_initialize_equals_the_oracle(pools: Callable[[int], RankPool]) -> None:
    ways = ("blocks in place", "root in place")
    check(pools, 1, [(way, stage, "eager", 1, True) for way in ways for stage in ("0", "3k", "3")])


def around(stage: str, what: str) -> Any:
    """Losses of a run where the user compiles the module after initialize, or the loss function around the engine."""
    torch._dynamo.reset()
    engine = cases.make_engine(make_chain(), cases.config_of(stage), "AdamW")
    called: Any = torch.compile(engine.module, backend="eager") if what == "module" else engine

    def loss_function(x: Tensor, y: Tensor) -> Tensor:
        return (called(x) - y).square().mean()

    losses = []
    for step in range(STEPS):
        torch.manual_seed(cases.seed_of(step, engine.rank, 0))
        x, y = torch.randn(5, 7), torch.randn(5, 7)
        loss = (torch.compile(loss_function, backend="eager") if what == "loss" else loss_function)(x, y)
        engine.backward(loss)
        engine.step()
        losses.append([loss.item()])
    engine.close()
    return losses


@pytest.mark.parametrize("what", ["module", "loss"])
@pytest.mark.parametrize("stage", ["0", "3"])
def test_a_compiled_module_or_loss_function_around_the_engine(
    pools: Callable[[int], RankPool], stage: str, what: str
) -> None:
    for rank, losses in enumerate(pools(2).run(around, stage, what)):
        assert losses == [row[rank] for row in truth(2, 1, "full").losses]


def test_a_wrapped_block_is_the_unit_whatever_says_so() -> None:
    model = wrap_blocks(make_chain(), backend="eager")
    blocks = [("blocks.0", model.blocks[0]), ("blocks.1", model.blocks[1]), ("blocks.2", model.blocks[2])]
    assert find_units(model, "auto") == blocks
    assert find_units(model, ("Block",)) == blocks
    model._no_split_modules = ["Block"]
    assert find_units(model, "auto") == blocks
    mixed: Any = make_chain()
    mixed.blocks[0] = torch.compile(mixed.blocks[0], backend="eager")
    assert [name for name, _ in find_units(mixed, "auto")] == ["blocks.0", "blocks.1", "blocks.2"]
    whole: Any = torch.compile(make_chain(), backend="eager")
    assert [name for name, _ in find_units(whole, "auto")] == [f"_orig_mod.blocks.{i}" for i in range(3)]


def test_a_root_without_graph_breaks_is_refused_with_the_way_out() -> None:
    torch._dynamo.reset()
    model: Any = torch.compile(make_chain(), backend="eager", fullgraph=True)
    engine = cases.make_engine(model, cases.config_of("3"), "AdamW")
    with pytest.raises(Exception, match=r"model\.blocks\[i\] = torch\.compile\(model\.blocks\[i\], fullgraph=True\)"):
        engine(torch.randn(5, 7))
    engine.close()


def test_wrapping_a_block_after_initialize_is_refused() -> None:
    engine = cases.make_engine(make_chain(), cases.config_of("3"), "AdamW")
    blocks: Any = engine.module.blocks
    blocks[1] = torch.compile(blocks[1], backend="eager")
    with raises("model-changed-after-initialize", "'blocks.1'"):
        engine(torch.randn(5, 7))
