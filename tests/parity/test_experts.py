"""Ranks that use different parts of a model, at every stage, equal to the oracle bit for bit: nobody waits for ever.

Experts: every block of a model has several, and a rank uses some of them. Skipping: in backward a rank leaves out whole
blocks that others come through. At stage 3 the ranks gather in backward, and none may wait there for one that waits for
a reduction.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool
from tests.support.special_losses import bare, start
from tests.support.special_models import At

Pools = Callable[[int], RankPool]
BLOCKS, EXPERTS, WIDTH, INNER = 4, 8, 16, 24
TINY, DEFAULT = 600, 500_000_000
STEPS = 3


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class MixtureBlock(nn.Module):
    """``used`` of its experts, added up; none: the input as it is."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(EXPERTS))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        normed = self.norm(x)
        for number in used:
            x = x + self.experts[number](normed)
        return x


Used = Callable[[At, int], tuple[int, ...]]
"""``used(at, block)``: the experts of a block that a micro-batch uses."""
Route = Callable[[Any, Tensor, At, Used], Tensor]


class Mixture(nn.Module):
    def __init__(self, used: Used, route: Route, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.inp = nn.Linear(7, width)
        self.blocks = nn.ModuleList(MixtureBlock(width, inner) for _ in range(BLOCKS))
        self.out = nn.Linear(width, 3)
        self.used, self.route = used, route

    def forward(self, x: Tensor, at: At) -> Tensor:
        return self.out(self.route(self.blocks, self.inp(x), at, self.used))


# Which experts


def disjoint(at: At, block: int) -> tuple[int, ...]:
    """No expert is used on two ranks (of four at most)."""
    return tuple(number for number in range(EXPERTS) if number % 4 == at.rank)


def one_on_rank_1(at: At, block: int) -> tuple[int, ...]:
    return (3,) if at.rank else tuple(range(EXPERTS))


def changing(at: At, block: int) -> tuple[int, ...]:
    """Others in every step, micro-batch, block and rank, on some no expert at all."""
    first = at.step + at.micro + 3 * at.rank + block
    return tuple(number for number in range(EXPERTS) if (first * 5 + number) % (at.rank + 3) == 0)[: first % 3]


# How blocks are called


def in_order(blocks: Any, x: Tensor, at: At, used: Used) -> Tensor:
    for number, block in enumerate(blocks):
        x = block(x, used(at, number))
    return x


def checkpointed(reentrant: bool) -> Route:
    def route(blocks: Any, x: Tensor, at: At, used: Used) -> Tensor:
        for number, block in enumerate(blocks):
            x = checkpoint(block, x, used(at, number), use_reentrant=reentrant)
        return x

    return route


def in_pairs(reentrant: bool) -> Route:
    """Two blocks in one checkpoint."""

    def route(blocks: Any, x: Tensor, at: At, used: Used) -> Tensor:
        def pair(x: Tensor, first: int) -> Tensor:
            return blocks[first + 1](blocks[first](x, used(at, first)), used(at, first + 1))

        for first in range(0, BLOCKS, 2):
            x = checkpoint(pair, x, first, use_reentrant=reentrant)
        return x

    return route


def without(cut: Callable[[At, int], bool], call: Callable[..., Tensor] = lambda block, *args: block(*args)) -> Route:
    """The gradient ends before block ``number`` where ``cut(at, number)`` holds."""

    def route(blocks: Any, x: Tensor, at: At, used: Used) -> Tensor:
        for number, block in enumerate(blocks):
            x = call(block, x.detach().requires_grad_() if cut(at, number) else x, used(at, number))
        return x

    return route


def early_part_frozen(at: At, number: int) -> bool:
    return number == 2 and (at.rank + at.step) % 2 == 0


def early_part_without_grad(blocks: Any, x: Tensor, at: At, used: Used) -> Tensor:
    for number, block in enumerate(blocks):
        with torch.set_grad_enabled(not (number < 2 and at.rank == 1)):
            x = block(x, used(at, number))
    return x


def late_part_unused(blocks: Any, x: Tensor, at: At, used: Used) -> Tensor:
    """The last two blocks run, but on rank 0 their result is only looked at."""
    for number, block in enumerate(blocks):
        y = block(x, used(at, number))
        x = x + y.detach() if number >= 2 and at.rank == 0 else y
    return x


def branches(blocks: Any, x: Tensor, at: At, used: Used) -> Tensor:
    """Side by side; a branch is detached, another one on every rank."""
    found = [block(x, used(at, number)) for number, block in enumerate(blocks)]
    return sum((y.detach() if number == (at.rank + at.step) % BLOCKS else y for number, y in enumerate(found)), x)


def nothing(blocks: Any, x: Tensor, at: At, used: Used) -> Tensor:
    """On rank 1 no gradient reaches any block."""
    y = in_order(blocks, x, at, used)
    return y.detach() if at.rank == 1 else y


def again(blocks: Any, x: Tensor, at: At, used: Used) -> Tensor:
    """A block three times, twice in a row, with other experts each time; rank 1 detaches the last, 2 the second."""
    x = blocks[0](x, used(at, 0))
    x = blocks[1](x, used(at, 1))
    y = blocks[0](x, used(At(at.step + 1, at.rank, at.micro), 2))
    x = blocks[2](x + y.detach() if at.rank == 2 else y, used(at, 2))
    y = blocks[0](blocks[0](x, used(at, 1)), used(at, 3))
    x = x + y.detach() if at.rank == 1 else y
    return blocks[3](x, used(at, 3))


def reentrant(block: nn.Module, *args: Any) -> Tensor:
    return checkpoint(block, *args, use_reentrant=True)


def not_reentrant(block: nn.Module, *args: Any) -> Tensor:
    return checkpoint(block, *args, use_reentrant=False)


# Losses


def regression(model: Any, step: int, rank: int, micro: int) -> Tensor:
    x, y, at = start(step, rank, micro)
    return (model(x, at=at) - y).square().mean()


def two_forwards(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """One backward through two forwards that use other experts."""
    x, y, at = start(step, rank, micro)
    first = model(x, at=at)
    return (first - y).square().mean() + 0.5 * model(x.flip(0), at=At(step + 1, rank, micro)).square().mean()


def after_an_unused_forward(model: Any, step: int, rank: int, micro: int) -> Tensor:
    x, _, at = start(step, rank, micro)
    unused = model(x.flip(0), at=at)
    return regression(model, step, rank, micro) + unused.mean().item()


def two_losses(model: Any, step: int, rank: int, micro: int) -> list[Tensor]:
    """Two graphs, both built before the first backward."""
    x, y, at = start(step, rank, micro)
    first = model(x, at=at)
    second = model(x.flip(0), at=At(step + 1, rank, micro))
    return [(first - y).square().mean(), 0.5 * second.square().mean()]


def part_by_part(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """The model's parts are called one by one."""
    x, y, at = start(step, rank, micro)
    module = bare(model)
    return (module.out(module.route(module.blocks, module.inp(x), at, module.used)) - y).square().mean()


@dataclass(frozen=True)
class Case:
    used: Used
    route: Route = in_order
    loss: Callable[[Any, int, int, int], Any] = regression
    options: tuple[tuple[str, Any], ...] = ()
    raw: bool = False
    sizes: tuple[int, int] = (WIDTH, INNER)
    ranks: tuple[int, ...] = (2, 3)
    tiny: int = TINY
    frozen: tuple[int, ...] = ()

    def make(self) -> nn.Module:
        torch.manual_seed(5)
        model = Mixture(self.used, self.route, *self.sizes)
        for number in self.frozen:
            model.blocks[number].requires_grad_(False)
        return model


RECOMPUTED = (("activation_checkpointing", {"enabled": True}),)
CASES: dict[str, Case] = {
    "disjoint": Case(disjoint, ranks=(2, 3, 4)),
    "all on rank 0, one on rank 1": Case(one_on_rank_1, sizes=(64, 256), ranks=(2,), tiny=20_000),
    "changing": Case(changing, ranks=(2, 3, 4)),
    "re-entrant": Case(disjoint, checkpointed(True), ranks=(2, 3, 4)),
    "re-entrant, changing": Case(changing, checkpointed(True)),
    "re-entrant, in pairs": Case(changing, in_pairs(True)),
    "not re-entrant": Case(changing, checkpointed(False)),
    "not re-entrant, in pairs": Case(changing, in_pairs(False)),
    "activation_checkpointing": Case(changing, options=RECOMPUTED),
    "early part detached": Case(changing, without(early_part_frozen)),
    "early part detached, re-entrant": Case(changing, without(early_part_frozen, reentrant)),
    "early part detached, not re-entrant": Case(changing, without(early_part_frozen, not_reentrant)),
    "early part detached, activation_checkpointing": Case(changing, without(early_part_frozen), options=RECOMPUTED),
    "a frozen block behind a cut": Case(changing, without(lambda at, number: number == at.rank == 1), frozen=(1,)),
    "early part without grad": Case(changing, early_part_without_grad),
    "late part not in the loss": Case(changing, late_part_unused),
    "branches, one of them detached": Case(changing, branches),
    "no block in backward": Case(changing, nothing),
    "a block called several times": Case(changing, again),
    "two forwards, one backward": Case(changing, loss=two_forwards),
    "a forward without backward": Case(changing, loss=after_an_unused_forward),
    "two losses": Case(changing, loss=two_losses),
    "part by part": Case(changing, without(early_part_frozen), part_by_part),
    "without the engine": Case(changing, raw=True),
    "without the engine, early part detached": Case(changing, without(early_part_frozen), raw=True),
}


def train(name: str, kind: str, micros: int, config: dict[str, Any]) -> dict[str, Any]:
    case = CASES[name]
    engine = cases.make_engine(case.make(), config, kind)

    def run(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        losses = loss_of(engine, step, engine.rank, micro)
        losses = losses if isinstance(losses, list) else [losses]
        for loss in losses:
            if case.raw:
                (loss / micros).backward()
            else:
                engine.backward(loss)
        engine.step()
        return float(sum(loss.item() for loss in losses))

    result = cases.run_steps(engine, STEPS, case.loss, run)
    engine.close()
    return result


@functools.lru_cache(maxsize=200)
def truth(name: str, kind: str, ranks: int, micros: int, order: str, clip: float = cases.CLIP) -> oracle.Trace:
    case = CASES[name]
    model = case.make()
    return oracle.train(
        model, case.loss, ranks=ranks, micros=micros, steps=STEPS, kind=kind, groups=cases.groups_of(model, kind),
        order=order, clip=clip,
    )  # fmt: skip


def assert_case(pools: Pools, name: str, ranks: int, kind: str, micros: int, config: dict[str, Any]) -> None:
    results = pools(ranks).run(train, name, kind, micros, config)
    stage = next(key for key, zero in cases.STAGES.items() if zero.items() <= config["zero_optimization"].items())
    order = cases.LETTER[stage] if micros > 1 else "full"
    assert_equal_to_truth(results, truth(name, kind, ranks, micros, order, config["gradient_clipping"]), name)


PRODUCT = [
    (name, ranks, stage, elements, kind, micros, overlap)
    for name, case in CASES.items()
    for ranks, stage, elements, kind, micros, overlap in itertools.product(
        case.ranks, cases.STAGES, (case.tiny, DEFAULT), ("AdamW", "SGD"), (1, 2), (True, False)
    )
    if micros == 1 or case.loss is not two_losses
]


@pytest.mark.parametrize(("name", "ranks", "stage", "elements", "kind", "micros", "overlap"), covering(PRODUCT))
def test_equals_oracle(
    pools: Pools, name: str, ranks: int, stage: str, elements: int, kind: str, micros: int, overlap: bool
) -> None:
    options = {**dict(CASES[name].options), "overlap_comm": overlap}
    config = cases.config_of(stage, micros, zero={"reduce_bucket_size": elements}, **options)
    assert_case(pools, name, ranks, kind, micros, config)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ["disjoint", "re-entrant"])
@pytest.mark.parametrize("stage", cases.STAGES)
def test_32_experts_with_disjoint_routing(pools: Pools, name: str, ranks: int, stage: str) -> None:
    config = cases.config_of(stage, zero={"reduce_bucket_size": TINY})
    assert_case(pools, name, ranks, "AdamW", 1, config)
