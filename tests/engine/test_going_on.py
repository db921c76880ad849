"""After something went wrong or out of order: training goes on with the right bits, or a sentence says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.errors import UsageError
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.raising import raises
from tests.support.ranks import RankPool
from tests.support.special_models import Explode

Pools = Callable[[int], RankPool]
STAGES = list(cases.STAGES)


def failing_loss(engine: Any) -> Tensor:
    """A loss whose backward raises after some buckets of the last layers were filled."""
    torch.manual_seed(5)
    network = engine.module
    handle = network.blocks[0].register_forward_hook(lambda _m, _a, output: Explode.apply(output))
    try:
        return engine(torch.randn(5, 7)).square().mean()
    finally:
        handle.remove()


def train_through_failures(stage: str, micros: int) -> dict[str, Any]:
    """As ``cases.train_engine``, but a backward raises before the first step and in the middle of a later window."""
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, micros, zero={"reduce_bucket_size": 600}))

    def fail(step: int) -> None:
        if step in (0, 4):
            for micro in range(micros - 1):
                engine.backward(cases.loss_of(engine, 77, engine.rank, micro))
                engine.step()
            with pytest.raises(ArithmeticError):
                engine.backward(failing_loss(engine))
            if micros > 1:
                with pytest.raises(UsageError, match="zero_grad"):
                    engine.step()
            with pytest.raises(UsageError, match="zero_grad"):
                engine.backward(cases.loss_of(engine, 78, engine.rank, 0))
            engine.zero_grad()

    result = cases.run_steps(engine, 10, before=fail)
    engine.close()
    return result


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_raised_leaves_no_trace(pools: Pools, stage: str, micros: int) -> None:
    results = pools(2).run(train_through_failures, stage, micros)
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, cases.truth("mlp", "AdamW", 2, micros, order))


def one_rank_engine(stage: str, model: nn.Module | None = None, micros: int = 1, **options: Any) -> Any:
    return cases.make_engine(model or cases.make_mlp(), cases.config_of(stage, micros, **options))


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_of_the_optimizer_drops_the_window(stage: str) -> None:
    engine = one_rank_engine(stage)
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    engine.optimizer.zero_grad()
    with pytest.raises(UsageError, match="without a backward"):
        engine.step()
    assert engine.global_steps == 0
    engine.close()


ZEROS: tuple[Callable[[Any, Any], None], ...] = (
    lambda engine, given: given.zero_grad(),
    lambda engine, given: given.zero_grad(set_to_none=False),
    lambda engine, given: engine.optimizer.zero_grad(),
    lambda engine, given: engine.zero_grad(),
    lambda engine, given: engine.module.zero_grad(),
)
"""Ways to forget gradients. given: the optimizer that was handed to ``initialize``."""


def train_zeroing_before_backward(stage: str, micros: int) -> dict[str, Any]:
    """Gradients are forgotten after the forward of each window's first micro-batch, in each step in another way."""
    config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 600})
    module = cases.make_mlp()
    given = cases.make_optimizer(module, "AdamW")
    mesh = cases.mesh_of_this_process() if torch.distributed.is_initialized() else None
    engine = shardengine.initialize(module, config, optimizer=given, mesh=mesh)

    def run(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        loss = loss_of(engine, step, engine.rank, micro)
        if micro == 0:
            ZEROS[step](engine, given)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    result = cases.run_steps(engine, len(ZEROS), run=run)
    engine.close()
    return result


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_between_forward_and_backward_leaves_no_trace(
    pools: Pools, stage: str, ranks: int, micros: int
) -> None:
    results = pools(ranks).run(train_zeroing_before_backward, stage, micros)
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, cases.truth("mlp", "AdamW", ranks, micros, order, len(ZEROS)))


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), float("inf")])
def test_clipping_to_nonsense_is_refused(max_norm: float) -> None:
    engine = one_rank_engine("2")
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    with raises("clip-max-norm-invalid"):
        engine.clip_grad_norm_(max_norm)
    engine.close()


def test_clipping_once_is_forgotten_with_its_window() -> None:
    twice, once = one_rank_engine("2"), one_rank_engine("2")
    twice.backward(cases.loss_of(twice, 9, 0, 0))
    twice.clip_grad_norm_(1e-6)
    twice.zero_grad()
    for engine in (twice, once):
        engine.backward(cases.loss_of(engine, 0, 0, 0))
        engine.step()
    assert all(torch.equal(a, b) for a, b in zip(twice.parameters(), once.parameters(), strict=True))


SCHEDULERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no scheduler": (lambda optimizer: optimizer, "expected a torch LRScheduler"),
    "nothing": (lambda optimizer: None, "got NoneType"),
    "another optimizer": (
        lambda _: torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))])),
        "another optimizer",
    ),
}


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_schedulers_that_cannot_be_stepped_are_refused_at_start(name: str) -> None:
    make, sentence = SCHEDULERS[name]
    model = cases.make_mlp()
    with pytest.raises(UsageError, match=sentence):
        cases.make_engine(model, cases.config_of("1"), lr_scheduler=make)
    cases.make_engine(model, cases.config_of("1")).close()


@pytest.mark.parametrize("stage", STAGES)
def test_full_params_nested_for_writing_and_stepping_inside_are_refused(stage: str) -> None:
    engine = one_rank_engine(stage)
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    with engine.full_params():
        with pytest.raises(UsageError, match="inside full_params"), engine.full_params(writable=True):
            pass
        with pytest.raises(UsageError, match="inside full_params"):
            engine.step()
    engine.step()
    engine.close()


class StopGradientFirst(nn.Module):
    """Uses its weight detached, then with a gradient: the gradient is known before the detached use runs backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.detach()) @ self.weight


def blocks_net(block: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return nn.ModuleDict({"blocks": nn.ModuleList(block() for _ in range(3)), "first": nn.Linear(7, 7)})


def run_blocks(model: Any, x: Tensor) -> Tensor:
    module: Any = model.module if hasattr(model, "module") else model
    x = module["first"](x)
    for block in module["blocks"]:
        x = x + block(x)
    return x.square().mean()


@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_used_detached_before_it_is_used_with_gradient(stage: str) -> None:
    engine = one_rank_engine(stage, blocks_net(StopGradientFirst))
    plain = blocks_net(StopGradientFirst)
    optimizer = cases.make_optimizer(plain, "AdamW")
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 7)
        engine.backward(run_blocks(engine, x))
        engine.step()
        run_blocks(plain, x).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), cases.CLIP)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in engine.state_dict().items():  # torch.optim rounds in another order than the fused kernels
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_unfreezing_what_was_frozen_at_the_start_is_found(stage: str) -> None:
    model: Any = cases.make_mlp()
    model.out.bias.requires_grad_(False)
    engine = one_rank_engine(stage, model)
    model.out.bias.requires_grad_(True)
    with raises("weights-unfrozen-without-group"):
        cases.loss_of(engine, 0, 0, 0)


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_in_the_module_itself_does_not_disturb_the_next_step(stage: str) -> None:
    engine, calm = one_rank_engine(stage), one_rank_engine(stage)
    for step in range(2):
        with pytest.raises(RuntimeError), torch.no_grad():
            engine.module(torch.randn(5, 9))
        for each in (engine, calm):
            each.backward(cases.loss_of(each, step, 0, 0))
            each.step()
    assert cases.digest([cases.local_state(engine)]) == cases.digest([cases.local_state(calm)])


@pytest.mark.parametrize("stage", ["3k", "3"])
def test_a_state_dict_of_a_part_has_no_values_while_it_is_sharded(stage: str) -> None:
    engine = one_rank_engine(stage)
    given = engine.module.blocks[0].state_dict()
    assert {name: value.shape for name, value in given.items()} == {
        name: parameter.shape for name, parameter in engine.module.blocks[0].named_parameters()
    }
    with raises("weights-used-while-sharded", "full_params"):
        next(iter(given.values())).sum().item()
    with engine.full_params():
        assert not any(value.isnan().any() for value in engine.module.blocks[0].state_dict().values())
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_hooks_of_the_user_on_a_unit_see_its_weights(stage: str) -> None:
    model: Any = cases.make_mlp()
    seen: list[float] = []
    model.blocks[1].register_forward_pre_hook(lambda module, _args: seen.append(module[0].weight.sum().item()))
    engine = one_rank_engine(stage, model)
    cases.loss_of(engine, 0, 0, 0)
    fresh: Any = cases.make_mlp()
    assert seen == [fresh.blocks[1][0].weight.sum().item()]
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_closed_engine_says_so_and_leaves_an_ordinary_model(stage: str) -> None:
    engine = one_rank_engine(stage)
    engine.close()
    engine.close()
    for call in (engine, lambda x: engine.backward(x.mean().requires_grad_()), lambda _: engine.state_dict()):
        with raises("engine-closed"):
            call(torch.zeros(5, 7))
    cases.loss_of(engine.module, 0, 0, 0).backward()
    assert all(parameter.grad is not None for parameter in engine.module.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_closing_an_engine_again_leaves_the_next_one_of_its_model_alone(stage: str) -> None:
    engine = one_rank_engine(stage)
    engine.close()
    later = cases.make_engine(engine.module, cases.config_of(stage))
    engine.close()
    assert later.is_open and not engine.is_open
    with raises("engine-closed"):
        engine(torch.zeros(5, 7))
    later.backward(cases.loss_of(later, 0, 0, 0))
    later.step()
    later.close()


def forward_in_backward_out(engine: Any, step: int) -> None:
    with engine.full_params():
        loss = cases.loss_of(engine, step, 0, 0)
    engine.backward(loss)


@pytest.mark.parametrize("stage", STAGES)
def test_a_forward_inside_full_params_may_have_its_backward_outside(stage: str) -> None:
    engine, calm = one_rank_engine(stage), one_rank_engine(stage)
    for step in range(3):
        forward_in_backward_out(engine, step)
        calm.backward(cases.loss_of(calm, step, 0, 0))
        engine.step()
        calm.step()
    assert cases.digest([cases.local_state(engine)]) == cases.digest([cases.local_state(calm)])


@pytest.mark.parametrize("stage", STAGES)
def test_a_penalty_on_parameters_inside_full_params(stage: str) -> None:
    """Backward inside is right; outside, where the weights are hidden again, it is refused."""
    engine, plain = one_rank_engine(stage), one_rank_engine("0")

    def penalty(each: Any) -> Tensor:
        return torch.stack([parameter.square().sum() for parameter in each.module.parameters()]).sum()

    for each in (engine, plain):
        with each.full_params():
            each.backward(penalty(each))
        each.step()
    assert cases.digest([cases.local_state(engine)]) == cases.digest([cases.local_state(plain)])
    if engine._core.stage.moves_weights:
        with engine.full_params():
            loss = penalty(engine)
        with raises("grad-of-sharded-weights"):
            engine.backward(loss)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("change", ["replaced", "added"])
def test_modules_that_change_after_initialize_are_found(stage: str, change: str) -> None:
    model: Any = cases.make_mlp()
    engine = one_rank_engine(stage, model)
    if change == "replaced":
        model.out = nn.Linear(13, 3)
    else:
        model.blocks.append(nn.Linear(13, 13))
    with pytest.raises(UsageError, match=change):
        cases.loss_of(engine, 0, 0, 0)


def start_with_rare_dtypes(stage: str) -> list[bool]:
    """Buffers and frozen parameters that backends cannot reduce, and may not know, still become rank 0's."""
    model: Any = cases.make_mlp()
    rank = cases.mesh_of_this_process().rank
    model.register_buffer("angles", torch.full((3,), rank + 1j, dtype=torch.complex64))
    model.register_buffer("small", torch.full((3,), rank, dtype=torch.int16))
    engine = one_rank_engine(stage, model)
    engine.backward(cases.loss_of(engine, 0, rank, 0))
    engine.step()
    found = [bool((model.angles == 1j).all()), bool((model.small == 0).all())]
    engine.close()
    return found


@pytest.mark.parametrize("stage", ["0", "3"])
def test_buffers_of_rare_dtypes_become_those_of_rank_0(pools: Pools, stage: str) -> None:
    assert pools(2).run(start_with_rare_dtypes, stage) == [[True, True]] * 2


def generate_unequal_lengths(stage: str) -> list[list[int]]:
    """Greedy texts of the engine's and of the plain model; rank 1 may write many more tokens than rank 0."""
    rank = cases.mesh_of_this_process().rank
    engine = cases.make_engine(cases.make_gpt2(), cases.config_of(stage))
    plain: Any = cases.make_gpt2()
    prompt = torch.tensor([[3, 7 + rank]])
    texts = []
    modules: list[Any] = [engine.eval().module, plain.eval()]
    for model in modules:
        made = model.generate(prompt, max_new_tokens=2 + 6 * rank, do_sample=False, pad_token_id=0)
        texts.append(made[0].tolist())
    engine.close()
    return texts


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_generate_texts_of_different_lengths(pools: Pools, stage: str) -> None:
    texts = pools(2).run(generate_unequal_lengths, stage, timeout=60)
    assert all(ours == plain for ours, plain in texts)
    assert len(texts[0][0]) < len(texts[1][0])


def evaluate_between_steps(stage: str) -> list[int]:
    engine = one_rank_engine(stage)
    counted = []
    for step in range(3):
        with torch.no_grad():
            cases.loss_of(engine.eval(), 50, engine.rank, 0)
        cases.loss_of(engine.train(), step, engine.rank, 0)
        engine.backward(cases.loss_of(engine, step, engine.rank, 0))
        engine.zero_grad()
        engine.backward(cases.loss_of(engine, step, engine.rank, 0))
        engine.step()
        engine.backward(cases.loss_of(engine, step, engine.rank, 0))
        with torch.no_grad():
            cases.loss_of(engine.eval(), 50, engine.rank, 0)
        engine.train().step()
        counted.append(engine.traffic()["measured_bytes_last_step"] - engine.traffic()["formula_bytes_per_step"])
    engine.close()
    return counted


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_is_not_booked_to_the_step(pools: Pools, stage: str) -> None:
    assert pools(2).run(evaluate_between_steps, stage) == [[0, 0, 0]] * 2
