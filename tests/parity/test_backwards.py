"""Every way to run backward, at every stage: re-entrant checkpointing, several losses, without the engine, retained.

Also what changes between steps (freezing) and what parameters may be (strides, several dtypes). Bit-equal to the
oracle, with tiny buckets and AdamW and with large ones and SGD (which of them where: ``test_special_cases.chosen``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import oracle
from tests.parity.test_special_cases import RUNS, chosen
from tests.support import cases
from tests.support import special_models as models
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool
from tests.support.special_losses import (
    bare,
    frozen_block,
    gpt2,
    language,
    language_model,
    net,
    regression,
    start,
    two_dtypes,
)
from tests.support.special_models import WIDTH, At, Block

Losses = Tensor | Iterable[Tensor]


@dataclass(frozen=True)
class Case:
    """``loss(model, step, rank, micro)`` gives a loss, or losses with a backward each. raw: ``loss.backward()``.

    retained: the engine runs the one loss backward twice; the oracle computes it twice · each: without the engine,
    ``step()`` follows each micro-batch and not the last one alone.
    """

    make: Callable[[], Any]
    loss: Callable[[Any, int, int, int], Losses] = regression
    micros: int = 1
    ranks: tuple[int, ...] = (2,)
    raw: bool = False
    retained: bool = False
    each: bool = False


# Routes and losses


def reentrant(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def reentrant_twice(blocks: Any, x: Tensor, at: At) -> Tensor:
    """The first block three times; every block calls a part of itself twice on rank 1."""
    x = checkpoint(blocks[0], checkpoint(blocks[0], x, False, use_reentrant=True), False, use_reentrant=True)
    x = blocks[1](x, at.rank == 1)
    return checkpoint(blocks[0], blocks[2](x, at.rank == 1), False, use_reentrant=True)


def on_the_bare_module(model: Any, step: int, rank: int, micro: int) -> Tensor:
    return regression(bare(model), step, rank, micro)


def two_losses(model: Any, step: int, rank: int, micro: int) -> list[Tensor]:
    """Two graphs, both built before the first backward."""
    x, y, at = start(step, rank, micro)
    first = model(x, at=at)
    second = model(x.flip(0), at=at)
    return [(first - y).square().mean(), 0.5 * second.square().mean()]


def different_parts(model: Any, step: int, rank: int, micro: int) -> list[Tensor]:
    """After the whole: other parameters of the root on every rank; then one parameter."""
    x, y, at = start(step, rank, micro)
    module = bare(model)
    whole = (model(x, at=at) - y).square().mean()
    part = module.out(torch.ones(WIDTH)) if rank else module.inp(x)
    return [whole, part.square().mean(), module.out.bias.square().sum()]


def three_times(model: Any, step: int, rank: int, micro: int) -> list[Tensor]:
    return [regression(model, step, rank, micro + number) for number in range(3)]


def same_loss_twice(model: Any, step: int, rank: int, micro: int) -> list[Tensor]:
    return [regression(model, step, rank, micro) for _ in range(2)]


def in_chunks(model: Any, step: int, rank: int, micro: int) -> Iterator[Tensor]:
    """A loss in chunks, whose backwards come before that of what they are made of."""
    x, y, at = start(step, rank, micro)
    yield from chunks(bare(model), model(x, at=at).repeat(1, WIDTH // 3), y)


def in_chunks_of_parts(model: Any, step: int, rank: int, micro: int) -> Iterator[Tensor]:
    """The same, and nobody runs the whole model."""
    x, y, _ = start(step, rank, micro)
    module = bare(model)
    yield from chunks(module, module.blocks[0](module.inp(x)), y)


def chunks(module: Any, hidden: Tensor, y: Tensor) -> Iterator[Tensor]:
    cut = hidden.detach().requires_grad_()
    for some, wanted in zip(cut.split(2), y.split(2), strict=True):
        yield (module.out(module.blocks[2](some)) - wanted).square().sum() / y.numel()
    gradient: Any = cut.grad
    yield (hidden * gradient).sum()


def freezing(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """A block is frozen in step 1; a bias of the root from step 2 on."""
    module = bare(model)
    module.blocks[1].requires_grad_(step != 1)
    module.out.bias.requires_grad_(step < 2)
    return regression(model, step, rank, micro)


# Models


class TwiceBlock(Block):
    """Its first layer runs under re-entrant checkpointing, twice where ``choice`` says so."""

    def forward(self, x: Tensor, choice: Any = None) -> Any:
        wide = checkpoint(self.up, x, use_reentrant=True)
        if choice:
            wide = wide + checkpoint(self.up, torch.tanh(x), use_reentrant=True)
        return x + self.down(torch.tanh(wide))


def shared_and_reentrant() -> nn.Module:
    model = net(route=reentrant)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def tied_and_reentrant() -> nn.Module:
    """Embedding and head tied, and every block of the body checkpointed."""
    model: Any = language_model()
    blocks = model.body.blocks
    model.body.forward = lambda ids: reentrant(blocks, model.body.embed(ids), At())
    return model


def reentrant_gpt2() -> nn.Module:
    model: Any = gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def frozen_and_reentrant() -> nn.Module:
    model: Any = frozen_block()
    model.route = reentrant
    return model


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.conv(x))


class ConvNet(nn.Module):
    """Convolutions whose weights are channels_last, and a matrix whose weight is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3)
        self.blocks = nn.ModuleList(ConvBlock() for _ in range(2))
        self.out = nn.Linear(3, 3)

    def forward(self, x: Tensor, at: At) -> Tensor:
        x = self.stem(x.repeat(1, 8)[:, :50].reshape(-1, 2, 5, 5).contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean((2, 3)))


def channels_last() -> nn.Module:
    torch.manual_seed(24)
    model: Any = ConvNet()
    model.to(memory_format=torch.channels_last)
    model.out.weight = nn.Parameter(model.out.weight.detach().t().contiguous().t())
    return model


CASES: dict[str, Case] = {
    "re-entrant: each block": Case(lambda: net(lambda: Block(dropout=0.2), reentrant), micros=2, ranks=(2, 3)),
    "re-entrant: blocks called several times": Case(lambda: net(TwiceBlock, reentrant_twice), ranks=(1, 2, 3)),
    "re-entrant: blocks called several times, three micro-batches": Case(
        lambda: net(TwiceBlock, reentrant_twice), micros=3
    ),
    "re-entrant: one weight in two blocks": Case(shared_and_reentrant, micros=2),
    "re-entrant: tied embedding and head": Case(tied_and_reentrant, language),
    "re-entrant: Hugging Face": Case(reentrant_gpt2, cases.loss_of),
    "re-entrant: a frozen block": Case(frozen_and_reentrant),
    "two losses": Case(net, two_losses, ranks=(1, 2, 3)),
    "two losses, outputs None": Case(lambda: net(models.NoneBlock, models.on_self), two_losses),
    "losses that reach different parameters": Case(net, different_parts, ranks=(2, 3)),
    "three backwards, blocks called several times": Case(lambda: net(TwiceBlock, reentrant_twice), three_times),
    "retain_graph": Case(net, same_loss_twice, retained=True),
    "without the engine": Case(net, micros=2, ranks=(1, 2, 3), raw=True),
    "without the engine: the bare module": Case(net, on_the_bare_module, micros=3, raw=True),
    "without the engine: two losses": Case(net, two_losses, raw=True),
    "without the engine: re-entrant, several times": Case(lambda: net(TwiceBlock, reentrant_twice), raw=True),
    "without the engine: in chunks": Case(net, in_chunks, micros=3, ranks=(1, 2, 3), raw=True),
    "without the engine: in chunks of parts": Case(
        net, in_chunks_of_parts, micros=2, ranks=(1, 2, 3), raw=True, each=True
    ),
    "frozen and unfrozen between steps": Case(net, freezing, ranks=(2, 3)),
    "strides: channels_last and transposed": Case(channels_last, ranks=(1, 2, 3)),
    "dtypes: bf16 and fp32, both trained": Case(two_dtypes, micros=3, ranks=(2, 3)),
    "dtypes: bf16 and fp32, one micro-batch": Case(two_dtypes),
}


def backward(engine: Any, case: Case, losses: Iterable[Tensor]) -> float:
    """The sum of the losses."""
    total = 0.0
    for number, loss in enumerate(losses):
        total += loss.item()
        if case.raw:
            (loss / case.micros).backward()
        else:
            engine.backward(loss, retain_graph=case.retained and number == 0)
    return total


ALL_RUNS = {**RUNS, "SGD, bf16 on the wire": ("SGD", 2, 600, {"communication_data_type": "bf16"})}


def train_case(name: str, stage: str, run: str) -> dict[str, Any]:
    """One rank's training: losses, norms, whole weights, this rank's optimizer state, strides."""
    case = CASES[name]
    kind, steps, elements, options = ALL_RUNS[run]
    zero = {"reduce_bucket_size": elements, **options.get("zero", {})}
    model = case.make()
    engine = cases.make_engine(model, cases.config_of(stage, case.micros, **{**options, "zero": zero}), kind)

    def run_micro_batch(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        found = loss_of(engine, step, engine.rank, micro)
        parts = [found] if isinstance(found, Tensor) else found
        total = backward(engine, case, [next(iter(parts))] * 2 if case.retained else parts)
        if not case.raw or case.each or micro + 1 == case.micros:
            engine.step()
        return total

    result = cases.run_steps(engine, steps, case.loss, run_micro_batch)
    engine.close()
    return {**result, "strides": {key: parameter.stride() for key, parameter in model.named_parameters()}}


@functools.lru_cache(maxsize=1000)
def truth(name: str, kind: str, ranks: int, order: str, steps: int, low_wire: bool) -> oracle.Trace:
    case = CASES[name]
    model = case.make()
    return oracle.train(
        model, case.loss, ranks=ranks, micros=case.micros, steps=steps, kind=kind,
        groups=cases.groups_of(model, kind), order=order, clip=cases.CLIP, wire=torch.bfloat16 if low_wire else None,
        **cases.groups_told(order),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("case", "stage", "run"),
    chosen([(name, ranks) for name, case in CASES.items() for ranks in case.ranks], list(ALL_RUNS)),
)
def test_equals_oracle(pools: Callable[[int], RankPool], case: tuple[str, int], stage: str, run: str) -> None:
    name, ranks = case
    kind, steps, _, options = ALL_RUNS[run]
    results = pools(ranks).run(train_case, name, stage, run)
    order = cases.LETTER[stage] if CASES[name].micros > 1 else "full"
    expected = truth(name, kind, ranks, order, steps, "communication_data_type" in options)
    assert_equal_to_truth(results, expected, run)
    assert results[0]["strides"] == {key: p.stride() for key, p in CASES[name].make().named_parameters()}
