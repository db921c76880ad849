"""Weights that are written: where ranks write different ones, where backward changes them, where memory is shared."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine.errors import ShardEngineError
from tests.support import cases
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.second = nn.Linear(13, 13), nn.Linear(13, 13)
        self.book = nn.Parameter(torch.ones(7, 13), requires_grad=False)
        self.write: Callable[[Block, int], None] = lambda block, rank: None
        self.write_last = self.write
        self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self, self.rank)
        x = x + self.second(self.inside(x).tanh()) + self.book.mean(0)
        with torch.no_grad():
            self.write_last(self, self.rank)
        return x


def net() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), Block(), Block(), nn.Linear(13, 3))


def engine_of(stage: str, **options: Any) -> Any:
    model = net()
    engine = cases.make_engine(model, cases.config_of(stage, zero={"units": ["Block"]}, **options), "AdamW")
    for block in (model[1], model[2]):
        block.rank = engine.rank
    return engine


def step_of(engine: Any, step: int = 0) -> None:
    torch.manual_seed(cases.seed_of(step, engine.rank, 0))
    engine.backward(engine(torch.randn(4, 7)).square().mean())
    engine.step()


def steps_of(engine: Any, steps: int) -> None:
    for step in range(steps):
        step_of(engine, 1 + step)


def said_by(engine: Any, call: Callable[[], object]) -> str:
    try:
        call()
    except ShardEngineError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def book_by_rank(block: Block, rank: int) -> None:
    block.book.mul_(0.5 + rank)


def weight_data_by_rank(block: Block, rank: int) -> None:
    block.inside.weight.data.mul_(0.5 + rank)


def bias_on_rank_0(block: Block, rank: int) -> None:
    if rank == 0:
        block.inside.bias.add_(1)


def differently(stage: str) -> list[str]:
    said = []
    for write in (book_by_rank, bias_on_rank_0, weight_data_by_rank):
        engine = engine_of(stage)
        step_of(engine)
        engine.module[2].write = write
        # what nothing announces is found in the second window, and told in the third
        said.append(said_by(engine, functools.partial(steps_of, engine, 1 + (write is weight_data_by_rank))))
        engine.module[2].write = lambda block, rank: None
        engine.zero_grad()
        step_of(engine)
        engine.close()
    return said


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_ranks_that_write_other_values_are_told_whose(pools: Pools, stage: str, ranks: int) -> None:
    for rank, (book, bias, data) in enumerate(pools(ranks).run(differently, stage)):
        told = f"was written by the model or the loop, not the same on every rank (this is rank {rank}): ranks "
        others = f"{list(range(1, ranks))} have written other values than rank 0"
        assert book.startswith(f"MismatchError: parameter '2.book' {told}{others}")
        assert bias.startswith(f"MismatchError: parameter '2.inside.bias' {told}[0] of {ranks} have written it")
        if stage.startswith("3"):
            assert data.startswith(f"MismatchError: parameter '2.inside.weight' {told}{others}")


def clamp_by_rank(block: Block, rank: int, most: float) -> None:
    if rank == 0:
        block.inside.weight.clamp_(max=most)
        block.book.clamp_(max=most)


def on_one_rank(stage: str) -> str:
    engine = engine_of(stage, **({"bf16": {"enabled": True}} if stage in ("1", "3k") else {}))
    engine.module[2].write = functools.partial(clamp_by_rank, most=100.0)
    steps_of(engine, 2)  # nothing has changed on any rank
    engine.module[2].write = functools.partial(clamp_by_rank, most=0.01)
    said = said_by(engine, functools.partial(steps_of, engine, 1))
    engine.zero_grad()
    engine.close()
    return said


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_write_on_one_rank_that_changes_nothing_is_no_difference(pools: Pools, stage: str, ranks: int) -> None:
    for said in pools(ranks).run(on_one_rank, stage):
        assert said.startswith("MismatchError: parameter '2.book' was written by the model or the loop, not the same")
        assert f"ranks [0] of {ranks} have written it, the others have not, and have other values" in said


def halve(block: Block, rank: int) -> None:
    block.book.data.mul_(0.5)


def begun_late(stage: str) -> tuple[float, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardengine.ddp.writes").addHandler(handler)
    try:
        engine = engine_of(stage)
        steps_of(engine, 2)
        engine.module[1].write_last = halve
        steps_of(engine, 3)
        engine.module[1].write_last = engine.module[1].write
        with engine.full_params():
            book = engine.module[1].book.mean().item()
        engine.close()
    finally:
        logging.getLogger("shardengine.ddp.writes").removeHandler(handler)
    return book, said


@pytest.mark.parametrize("stage", STAGES)
def test_writes_that_nothing_announces_and_that_begin_late_are_found_and_told(pools: Pools, stage: str) -> None:
    results = pools(2).run(begun_late, stage)
    sharded = stage.startswith("3")
    assert {book for book, _ in results} == {0.25 if sharded else 0.125}  # what step 3 has written is lost
    told = [each for _, said in results for each in said]
    assert all(
        "step 4 since initialize: 1.book (1 in all) were written through parameter.data" in each for each in told
    )
    assert bool(told) == sharded


def step_in_backward(module: Any, *_: object) -> None:
    with torch.no_grad():
        module.weight.sub_(0.1)


def in_backward(stage: str, bare: bool) -> list[str]:
    said = []
    for checkpointed in (False, True):
        engine = engine_of(stage)
        block, x = engine.module[1], torch.ones(4, 7)
        step_of(engine)
        if checkpointed:
            block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
            block.write = lambda block, rank: block.book.mul_(0.5)
            hook = None
        else:
            hook = block.second.register_full_backward_hook(step_in_backward)
        loss = engine(x).square().mean()
        said.append(said_by(engine, loss.backward if bare else functools.partial(engine.backward, loss)))
        if hook is not None:
            hook.remove()
        block.write = lambda block, rank: block.book.clamp_(max=0.25)  # the same again in a recomputation: no change
        engine.zero_grad()
        step_of(engine)
        engine.close()
    return said


@pytest.mark.parametrize("bare", [False, True], ids=["engine.backward", "loss.backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_changes_inside_of_backward_is_an_error(pools: Pools, stage: str, bare: bool) -> None:
    for rank, (hook, again) in enumerate(pools(2).run(in_backward, stage, bare)):
        assert f"'1.second.weight' was written inside of backward (rank {rank})" in hook
        assert f"'1.book' was written inside of backward (rank {rank})" in again


def alias(block: Block, rank: int) -> None:
    block.inside.weight.data = block.second.weight.data


def cast(block: Block, rank: int) -> None:
    block.inside.weight.data = block.inside.weight.data.double()


def given_memory(stage: str) -> list[str]:
    said = []
    for write in (alias, cast):
        engine = engine_of(stage)
        if engine._core.stage.moves_weights:
            engine.module[1].write_last = write
        else:
            write(engine.module[1], 0)
        said.append(said_by(engine, functools.partial(step_of, engine)))
        engine.module[1].write_last = engine.module[1].write
        engine.zero_grad()
        step_of(engine)  # what was refused is undone
        engine.close()
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_memory_that_cannot_be_taken_over_is_refused_by_name(pools: Pools, stage: str) -> None:
    for rank, (aliased, moved) in enumerate(pools(2).run(given_memory, stage)):
        start = "UsageError: parameter '1.inside.weight' "
        aliases = "shows the memory of other weights since an assignment to its .data"
        assert aliased.startswith(f"{start}{aliases} (rank {rank})")
        assert moved.startswith(f"{start}was moved or cast after initialize (rank {rank}): it is now torch.float64")


def tied_by_data(stage: str) -> list[str]:
    said = []
    for place in ("between", "between, without the engine", "full_params", "full_params(writable)"):
        engine = engine_of(stage)
        step_of(engine)

        def tie(engine: Any = engine, place: str = place) -> None:
            block, other = engine.module[1], engine.module[2]
            with engine.full_params(writable="writable" in place) if "full" in place else contextlib.nullcontext():
                block.inside.weight.data = other.inside.weight.data
            (engine.module if "without" in place else engine)(torch.ones(4, 7)).sum().backward()
            engine.step()

        said.append(said_by(engine, tie))
        engine.zero_grad()
        step_of(engine)
        with engine.full_params():
            assert not torch.equal(engine.module[1].inside.weight, engine.module[2].inside.weight)
        engine.close()
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_weights_tied_by_data_after_the_start_are_refused_wherever_that_is(pools: Pools, stage: str) -> None:
    for rank, said in enumerate(pools(2).run(tied_by_data, stage)):
        for place, each in enumerate(said):
            told = "shows the memory of other weights since an assignment to its .data"
            if stage.startswith("3") and place < 2:
                told = f"(rank {rank}) was written by an assignment to .data while its weights are sharded"
            assert each.startswith(f"UsageError: parameter '1.inside.weight' {told}"), each


# Computed twice, used too late


def written_and_computed_again(stage: str) -> str:
    engine = engine_of(stage, activation_checkpointing={"enabled": True})
    engine.module[1].write = lambda block, rank: block.inside.weight.mul_(0.9)
    said = said_by(engine, lambda: step_of(engine))
    engine.close()
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpointed_block_that_writes_its_weights_is_refused_where_it_does(pools: Pools, stage: str) -> None:
    for said in pools(2).run(written_and_computed_again, stage):
        assert "block '1' writes its weights in its forward, which backward would compute again" in said


def used_by_another_module(stage: str) -> tuple[float, str]:
    """The loss, or what torch and the engine say."""
    kept: list[Tensor] = []
    engine = engine_of(stage)
    first, second = engine.module[1], engine.module[2]
    first.write = lambda block, rank: kept.append(block.inside.weight.detach())
    second.register_forward_hook(lambda module, inputs, output: output + 0.1 * inputs[0] @ kept[-1])
    loss, said = 0.0, ""
    try:
        loss = engine(torch.ones(4, 7)).square().mean().item()
    except RuntimeError as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
    engine.close()
    return loss, said


@pytest.mark.parametrize("stage", STAGES)
def test_memory_of_weights_that_is_used_when_it_was_let_go_of_is_explained(pools: Pools, stage: str) -> None:
    for loss, said in pools(2).run(used_by_another_module, stage):
        assert loss > 0 if stage != "3" else said.count("expected a copy, `weight.detach().clone()`") == 1, said
