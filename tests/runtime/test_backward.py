"""engine.backward beside loss.backward(): arguments, what is refused, graphs that are older than the weights."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from shardengine import kernels
from shardengine.errors import MismatchError, UsageError
from tests import oracle
from tests.engine.test_recovery import fail_once
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.raising import raises
from tests.support.ranks import RankPool
from tests.support.special_models import Boom

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)


def engine_of(stage: str, model: nn.Module | None = None, micros: int = 1, **options: Any) -> Any:
    return cases.make_engine(model or cases.make_mlp(), cases.config_of(stage, micros, **options), "SGD")


def digest(engine: shardengine.Engine) -> str:
    return cases.digest([cases.local_state(engine)])


def losses_and_weights(model: Any, step: int, rank: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(cases.seed_of(step, rank, micro))
    x, weights = torch.randn(5, 7), torch.randn(5, 3)
    return model(x).square(), weights


def weighted_sum(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
    losses, weights = losses_and_weights(model, step, rank, micro)
    return (losses * weights).sum()


def train_without_a_scalar(stage: str, kind: str) -> dict[str, Any]:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, 2), kind)

    def run_micro_batch(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        losses, weights = losses_and_weights(engine, step, engine.rank, micro)
        scaled = engine.backward(losses, weights)
        assert torch.equal(scaled, losses.detach() / 2)
        engine.step()
        return float((losses.detach() * weights).sum().item())

    result = cases.run_steps(engine, 3, run=run_micro_batch)
    engine.close()
    return result


def train_with_shares(stage: str, kind: str) -> dict[str, Any]:
    """The user divides the loss of each micro-batch himself."""
    micros = 3
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, micros), kind)

    def run_micro_batch(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        loss = loss_of(engine, step, engine.rank, micro)
        share = loss / micros
        assert torch.equal(engine.backward(share, divide=False), share.detach())
        engine.step()
        return float(loss.item())

    result = cases.run_steps(engine, 3, run=run_micro_batch)
    engine.close()
    return result


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_that_is_divided_already_is_not_divided_again(pools: Pools, stage: str, kind: str) -> None:
    results = pools(2).run(train_with_shares, stage, kind)
    assert_equal_to_truth(results, cases.truth("mlp", kind, 2, 3, cases.LETTER[stage], 3))


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_for_a_loss_that_is_no_scalar(pools: Pools, stage: str, kind: str) -> None:
    """Two micro-batches: half of the gradient, then the sum, has the bits of the sum's own half."""
    model = cases.make_mlp()
    expected = oracle.train(
        model, weighted_sum, ranks=2, micros=2, steps=3, kind=kind, groups=cases.groups_of(model, kind),
        order=cases.LETTER[stage], clip=cases.CLIP,
    )  # fmt: skip
    assert_equal_to_truth(pools(2).run(train_without_a_scalar, stage, kind), expected)


def test_a_loss_that_is_no_scalar_without_a_gradient_is_refused() -> None:
    engine = engine_of("2")
    with raises("loss-not-scalar-with-graph", "(5, 3)"):
        engine.backward(engine(torch.randn(5, 7)))
    with raises("loss-not-scalar-with-graph", "without requires_grad"):
        engine.backward(torch.zeros(()))
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_that_is_older_than_the_weights_is_refused_by_torch(stage: str) -> None:
    """As after any torch optimizer's step: its backward would mix old activations with new weights."""
    engine = engine_of(stage)
    old = cases.loss_of(engine, 0, 0, 0)
    engine.backward(cases.loss_of(engine, 1, 0, 0))
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(old)
    engine.zero_grad()
    engine.backward(cases.loss_of(engine, 2, 0, 0))
    engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_calls_that_end_a_backward_without_the_engine(stage: str) -> None:
    """The norm may be asked for, clipping be set, the window be dropped, before the step."""
    engine, plain = engine_of(stage), engine_of(stage)
    cases.loss_of(engine, 7, 0, 0).backward()
    engine.zero_grad()
    for each, raw in ((engine, True), (plain, False)):
        loss = cases.loss_of(each, 0, 0, 0)
        if raw:
            loss.backward()
        else:
            each.backward(loss)
        assert each.clip_grad_norm_(0.1) == each.get_global_grad_norm()
        each.step()
    assert digest(engine) == digest(plain)
    assert engine.micro_steps == plain.micro_steps + 1


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_are_counted_without_the_engine(stage: str) -> None:
    engine = engine_of(stage, micros=3)
    for micro in range(3):
        (cases.loss_of(engine.module, 0, 0, micro) / 3).backward()
        assert engine.is_gradient_accumulation_boundary() == (micro == 2)
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 3)


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_a_copy_of_the_model_does_not_drive_the_engine(stage: str) -> None:
    engine = engine_of(stage)
    copies = [copy.deepcopy(engine.module), pickle.loads(pickle.dumps(engine.module))]
    cases.loss_of(engine, 0, 0, 0).backward()
    for copied in copies:
        cases.loss_of(copied, 1, 0, 0).backward()
        assert all(p.grad is not None for p in copied.parameters())
    engine.step()
    assert engine.micro_steps == 1


def test_sparse_gradients_are_refused_by_name_at_the_start() -> None:
    model: Any = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 1))
    with raises("grad-sparse-beyond-stage-0", "'0'", "'0.weight'"):
        engine_of("2", model)
    model[0].weight.requires_grad_(False)
    engine_of("2", model).close()


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_master_weights_follow_what_is_loaded_into_the_module(stage: str) -> None:
    engine = engine_of(stage, bf16={"enabled": True})
    loaded = {name: torch.full_like(value, 0.5) for name, value in engine.module.state_dict().items()}
    loaded["out.bias"] = engine.module.state_dict()["out.bias"]
    before = {(name, key): values for name, key, _, values in cases.local_state(engine)}
    engine.module.load_state_dict(loaded)
    engine.backward(cases.loss_of(engine, 0, 0, 0) * 0.0)
    for name, key, _, values in cases.local_state(engine):
        if key == "weight":
            kept = before[name, key]
            assert (values == kept).all() if name == "out.bias" else (values == 0.5).all(), name


@pytest.mark.parametrize("stage", STAGES)
def test_master_weights_follow_what_is_written_in_full_params(stage: str) -> None:
    engine = engine_of(stage, bf16={"enabled": True})
    before = {(name, key): values for name, key, _, values in cases.local_state(engine)}
    module: Any = engine.module
    with engine.full_params(writable=True), torch.no_grad():
        module.inp.weight.fill_(0.25)
    after = {(name, key): values for name, key, _, values in cases.local_state(engine)}
    assert (after["inp.weight", "weight"] == 0.25).all()
    assert (after["out.weight", "weight"] == before["out.weight", "weight"]).all(), "unwritten masters keep their bits"


class Siamese(nn.Module):
    """Calls itself, and takes gradients of its input inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.inp = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.out = nn.Linear(13, 1)

    def forward(self, x: torch.Tensor, pair: torch.Tensor | None = None) -> Any:
        other = None if pair is None else self(pair)
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = self.out(x)
        return x if other is None else (x, other)


def penalised(engine: Any, step: int) -> torch.Tensor:
    """A loss with a gradient penalty (create_graph) and a saliency (retain_graph), over two calls of the model."""
    torch.manual_seed(step)
    x = torch.randn(5, 7, requires_grad=True)
    first, second = engine(x, torch.randn(5, 7))
    (slope,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (saliency,) = torch.autograd.grad(second.sum() + first.sum(), x, retain_graph=True)
    loss: torch.Tensor = first.square().mean() + second.mean() + slope.square().sum() + saliency.detach().mean()
    return loss


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_gradients_and_a_model_that_calls_itself(stage: str) -> None:
    engine, plain = engine_of(stage, Siamese()), Siamese()
    optimizer = cases.make_optimizer(plain, "SGD")
    for step in range(3):
        loss, expected = penalised(engine, step), penalised(plain, step)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)  # another order of rounding in the clipping
        engine.backward(loss)
        expected.backward()
        engine.step()
        nn.utils.clip_grad_norm_(plain.parameters(), cases.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            x = torch.ones(2, 7)
            for ours, theirs in zip(engine.module(x, x), plain(x, x), strict=True):  # as above, over three steps
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_an_update_that_was_torn_or_interrupted_is_not_gone_on_with(stage: str) -> None:
    for message in ("load a checkpoint", r"engine\.reset\(\) on every rank"):
        engine = engine_of(stage)
        engine.backward(cases.loss_of(engine, 0, 0, 0))
        if message == "load a checkpoint":
            fail_once(kernels, "update", 0)
        else:
            fail_once(engine.optimizer.arithmetic, "action", 0)
        with pytest.raises(Boom):
            engine.step()
        before = digest(engine)
        if message == "load a checkpoint":
            with pytest.raises(UsageError, match=message):
                engine.step()
        with pytest.raises(UsageError, match=r"engine\.reset\(\) on every rank"):
            engine.backward(cases.loss_of(engine, 1, 0, 0))
        assert digest(engine) == before and engine.global_steps == 0


@pytest.mark.parametrize("stage", STAGES)
def test_samples_under_no_sync_are_counted(stage: str) -> None:
    engine = engine_of(stage)
    with engine.no_sync():
        for micro in range(3):
            engine.backward(cases.loss_of(engine, 0, 0, micro))
    engine.backward(cases.loss_of(engine, 0, 0, 3))
    engine.step()
    assert (engine.micro_steps, engine.global_samples) == (4, 4)


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_master_weights_follow_what_is_written_between_backward_and_step(stage: str) -> None:
    engine = engine_of(stage, bf16={"enabled": True})
    module: Any = engine.module
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    with torch.no_grad():
        module.out.bias.fill_(5.0)
    engine.step()
    assert (module.out.bias.float() - 5.0).abs().max() < 0.5


def train_apart(stage: str, what: str) -> str:
    """What a rank is told whose blocks, or learning rate, differ; after ``reset`` training goes on."""
    model: Any = nn.Module()
    torch.manual_seed(1)
    model.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    skipped = {"number": -1}

    def forward(x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(model.blocks):
            x = x if number == skipped["number"] else torch.tanh(block(x))
        return x

    model.forward = forward
    engine = engine_of(stage, model)
    told = "nothing"
    if what == "blocks":
        skipped["number"] = 1 + engine.rank
    else:
        engine.optimizer.param_groups[0]["lr"] = 0.1 * (1 + engine.rank)
    try:
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    except MismatchError as error:
        told = str(error)
    skipped["number"] = -1
    engine.optimizer.param_groups[0]["lr"] = 0.1
    engine.reset()
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    engine.close()
    return told


@pytest.mark.parametrize("stage", ["0", "3k", "3"])
def test_ranks_that_run_different_blocks_are_told_before_the_step(pools: Pools, stage: str) -> None:
    """Where blocks are gathered: gathers of equal size would be matched with each other. Elsewhere it is allowed."""
    pools(2).stop()  # reset() makes new groups, which the other tests' mesh does not have
    for told in pools(2).run(train_apart, stage, "blocks"):
        if stage == "0":
            assert told == "nothing"
        else:
            assert "ranks run different modules: rank 0 needs" in told and "blocks.2" in told
    pools(2).stop()


@pytest.mark.parametrize("stage", ["0", "2"])
def test_learning_rates_that_differ_between_ranks_are_told_before_the_step(pools: Pools, stage: str) -> None:
    pools(2).stop()
    for told in pools(2).run(train_apart, stage, "rates"):
        assert "lr of optimizer group 0 is 0.1 on rank 0 and 0.2 on rank 1" in told and "ReduceLROnPlateau" in told
    pools(2).stop()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("micros", [1, 2])
def test_a_backward_that_is_differentiable_itself_gives_the_same_gradients(micros: int) -> None:
    norms = []
    for create_graph in (False, True):
        engine = engine_of("2", micros=micros)
        for micro in range(micros):
            loss = cases.loss_of(engine, 0, 0, micro)
            loss.backward(create_graph=create_graph)
            if micro < micros - 1:
                engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.step()
        engine.close()
    assert norms[0] == norms[1]


@pytest.mark.parametrize("stage", cases.STAGES)
def test_a_hook_that_changes_a_gradient_which_the_engine_has_taken_is_refused(stage: str) -> None:
    """It kept the gradient and did not copy it: the sum would be wrong in silence. Hooks of the user's wait; one that
    somebody puts before the engine's does not."""
    model, kept = cases.Mlp(), []
    engine = cases.make_engine(model, cases.config_of(stage, zero={"reduce_bucket_size": 10**6}))
    called: Any = model.out.bias._post_accumulate_grad_hooks
    for key, hook in (("first", lambda p: kept.append(p.grad)), called.popitem()):
        OrderedDict.__setitem__(called, key, hook)

    def change(_gradient: torch.Tensor) -> None:
        for gradient in kept:
            gradient.zero_()

    model.inp.weight.register_hook(change)
    with raises("grad-changed-after-taken", "'out.bias'", "rank 0"):
        engine.backward(cases.loss_of(engine, 0, 0, 0))
    engine.close()


@pytest.mark.parametrize("stage", cases.STAGES)
def test_two_losses_of_one_forward_are_no_two_micro_batches(stage: str) -> None:
    """They would be counted as two, and the window of two micro-batches end after one forward, in silence."""
    engine = cases.make_engine(cases.Mlp(), cases.config_of(stage, 2))
    output = engine(torch.ones(2, 7))
    engine.backward(output.square().mean(), retain_graph=True)
    with raises("backward-of-same-forward", "batch 2", "batch 1"):
        engine.backward(output.abs().mean())
    engine.zero_grad()
    for _ in range(2):  # each in the window's last micro-batch
        engine.backward(engine(torch.ones(2, 7)).square().mean())
    output = engine(torch.ones(2, 7))
    engine.step()
    assert engine.global_steps == 1
    engine.close()


@pytest.mark.parametrize("stage", cases.STAGES)
def test_several_losses_of_the_last_micro_batch_and_of_forwards_before_them_train(stage: str) -> None:
    engine = cases.make_engine(cases.Mlp(), cases.config_of(stage, 2))
    first, second = engine(torch.ones(2, 7)), engine(torch.zeros(2, 7))
    engine.backward(first.square().mean())
    engine.backward(second.square().mean(), retain_graph=True)
    engine.backward(second.abs().mean())
    engine.step()
    assert engine.global_steps == 1 and engine.was_step_applied()
    engine.close()


def test_arguments_of_another_kind_are_refused() -> None:
    engine = engine_of("2")
    loss = cases.loss_of(engine, 0, 0, 0)
    for wrong in ({"gradient": False}, {"divide": None}, {"divide": 2}):
        with raises("backward-wrong-argument"):
            engine.backward(loss, **wrong)
    with pytest.raises(TypeError, match=r"engine.backward\(loss, divide=False\)"):
        engine.backward(loss, scale_wrt_gas=False)
    engine.close()


def divides_alone(stage: str) -> str:
    engine = engine_of(stage, micros=2)
    with pytest.raises(MismatchError) as caught:
        for micro in range(2):
            engine.backward(cases.loss_of(engine, 0, engine.rank, micro), divide=engine.rank == 0)
            engine.step()
    engine.zero_grad()
    for micro in range(2):
        engine.backward(cases.loss_of(engine, 0, engine.rank, micro), divide=False)
        engine.step()
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize("stage", ["0", "3"])
def test_losses_that_are_divided_on_one_rank_alone_are_told(pools: Pools, stage: str) -> None:
    texts = pools(2).run(divides_alone, stage)
    assert all("losses were divided by [2] on rank 0 and by [1] on rank 1" in text for text in texts)


def backward_in_two_ways() -> list[float]:
    """One micro-batch per step: what divides by one may be called beside what does not divide."""
    engine = engine_of("2")
    loss = cases.loss_of(engine, 0, 0, 0)
    engine.backward(loss) if engine.rank == 0 else loss.backward()
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.close()
    assert norm is not None
    return [norm]


def test_one_rank_may_call_backward_of_the_loss(pools: Pools) -> None:
    first, second = pools(2).run(backward_in_two_ways)
    assert first == second
