"""Cases, as in special_losses, in which backward reaches a block by a way that its outputs do not tell of.

Must not know: stages, buckets, optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.special_losses import Case, bare, net, start
from tests.support.special_models import At, Block, in_order

grad = torch.autograd.grad


class Slots:
    """An output of a class of the user's own."""

    __slots__ = ("hidden", "mask")

    def __init__(self, hidden: Tensor, mask: Tensor) -> None:
        self.hidden, self.mask = hidden, mask


class ObjectBlock(Block):
    """No tensor goes in or comes out as it is."""

    def forward(self, x: Any, choice: Any = None) -> Any:
        return SimpleNamespace(hidden=super().forward(x.hidden))


class BesideBlock(Block):
    """A tensor without a graph comes out beside the object that holds the result."""

    def forward(self, x: Any, choice: Any = None) -> Any:
        return torch.ones(2), Slots(super().forward(x.hidden), torch.ones(1))


class AuxiliaryBlock(Block):
    """Is trained by its own loss, which it leaves on itself; the output is detached if ``cut``."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.predict = nn.Linear(12, 12)
        self.cut = cut
        self.loss: Any = None

    def forward(self, x: Tensor, choice: Any = None) -> Any:
        y = super().forward(x)
        self.loss = (self.predict(y.detach()) - x).square().mean() + (y.square().mean() if self.cut else 0)
        return y.detach() if self.cut else y


class OwnCheckpointBlock(AuxiliaryBlock):
    """Checkpoints parts of itself."""

    def forward(self, x: Tensor, choice: Any = None) -> Any:
        y = checkpoint(lambda value: self.down(torch.tanh(self.up(value))), x, use_reentrant=False)
        self.loss = checkpoint(lambda value: self.predict(value), y.detach(), use_reentrant=False).square().mean()
        return x + y


class InnerGradientBlock(Block):
    """Differentiates a part of itself with torch.func."""

    def forward(self, x: Tensor, choice: Any = None) -> Any:
        y = super().forward(x)
        inner = torch.func.grad(lambda value: torch.tanh(self.up(value)).sum())(x.detach())
        return y + 0.1 * inner


def in_objects(blocks: Any, x: Tensor, at: At) -> Tensor:
    held: Any = SimpleNamespace(hidden=x)
    for block in blocks:
        given = block(held)
        held = given[1] if isinstance(given, tuple) else given
    hidden: Tensor = held.hidden
    return hidden


def each_checkpointed(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def with_forces(blocks: Any, x: Tensor, at: At) -> Tensor:
    """A gradient is taken inside of the forward, and differentiated once more by the loss."""
    y = in_order(blocks, x, at)
    (force,) = grad(y.square().sum(), x, create_graph=True)
    return y + 0.1 * force


def two_losses(model: Any, step: int, rank: int, micro: int) -> tuple[Any, Tensor, Tensor]:
    x, y, at = start(step, rank, micro)
    out = model(x, at=at)
    return bare(model), (out - y).square().mean(), out.abs().mean()


def weighted_by(layers: Callable[[Any], list[Tensor]]) -> Callable[..., Tensor]:
    """Two losses, weighted by the norms of their gradients in some layers."""

    def loss(model: Any, step: int, rank: int, micro: int) -> Tensor:
        module, first, second = two_losses(model, step, rank, micro)
        one, other = (
            sum(each.norm() for each in grad(of, layers(module), retain_graph=True)) for of in (first, second)
        )
        return first + (one / (other + 1e-4)).clamp(0, 10).detach() * second

    return loss


def against_an_attack(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """The gradient of the input, then a forward of another input."""
    x, y, at = start(step, rank, micro)
    attacked = x.requires_grad_(True)
    (gradient,) = grad((model(attacked, at=at) - y).square().mean(), attacked)
    return (model((x + 0.1 * gradient.sign()).detach(), at=at) - y).square().mean()


def penalised(model: Any, step: int, rank: int, micro: int) -> Tensor:
    x, y, at = start(step, rank, micro)
    x.requires_grad_(True)
    out = model(x, at=at)
    (gradient,) = grad(out.sum(), x, create_graph=True)
    return (out - y).square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def caught(model: Any, x: Tensor, at: At) -> tuple[Tensor, list[Tensor]]:
    """The output, and what hooks on layers inside of blocks have caught."""
    features: list[Tensor] = []
    handles = [
        block.up.register_forward_hook(lambda _module, _args, output: features.append(output))
        for block in list(bare(model).blocks)[:2]
    ]
    out = model(x, at=at)
    for handle in handles:
        handle.remove()
    return out, features


def on_features(model: Any, step: int, rank: int, micro: int) -> Tensor:
    x, _, at = start(step, rank, micro)
    return sum((each.square().mean() for each in caught(model, x, at)[1]), torch.zeros(()))


def with_a_gradient_of_features(model: Any, step: int, rank: int, micro: int) -> Tensor:
    x, y, at = start(step, rank, micro)
    out, features = caught(model, x, at)
    (gradient,) = grad(features[1].square().sum(), features[0], retain_graph=True)
    (map_of_it,) = grad(out.sum(), features[0], retain_graph=True)
    return (out - y).square().mean() * (1 + gradient.norm() + map_of_it.norm()).detach()


def with_auxiliary_losses(model: Any, step: int, rank: int, micro: int) -> Tensor:
    x, y, at = start(step, rank, micro)
    out = model(x, at=at)
    return sum((block.loss for block in bare(model).blocks), (out - y).square().mean())


def through_torch_func(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """A gradient of the input by torch.func, and a loss that comes out of vmap."""
    x, y, at = start(step, rank, micro)
    gradient = torch.func.grad(lambda value: model(value, at=at).square().mean())(x)
    _, tangent = torch.func.jvp(lambda value: model(value, at=at), (x,), (torch.ones_like(x),))  # type: ignore[misc]
    rows = torch.func.vmap(lambda value: model(value, at=at))((x + 0.1 * gradient)[:, None])
    return (rows[:, 0] - y).square().mean() + tangent.square().mean()


def after_an_evaluation_under_autocast(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """One region: a forward without grad, then one with."""
    x, y, at = start(step, rank, micro)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            target = model(x.flip(0), at=at)
        return (model(x, at=at) - target - y).float().square().mean()


def middle_frozen(block: Callable[[], nn.Module] = Block) -> nn.Module:
    model = net(block)
    model.blocks[1].requires_grad_(False)
    return model


RANKS = (1, 2, 3)

CASES: dict[str, Case] = {
    "gradient of the last layer, then backward": Case(net, weighted_by(lambda model: [model.out.weight])),
    "gradient of layers of blocks, then backward": Case(
        net, weighted_by(lambda model: [model.blocks[0].up.weight, *model.blocks[2].parameters()]), ranks=RANKS
    ),
    "the same, checkpointed": Case(
        lambda: net(route=each_checkpointed), weighted_by(lambda model: [model.blocks[1].up.weight]), micros=2
    ),
    "gradient of the input, then another forward": Case(net, against_an_attack, micros=2, ranks=RANKS),
    "gradient of the input through frozen blocks": Case(middle_frozen, against_an_attack),
    "gradient penalty": Case(net, penalised, ranks=RANKS),
    "gradient inside of the forward": Case(lambda: net(route=with_forces), ranks=RANKS),
    "features from a hook inside of a block, alone": Case(net, on_features, micros=2, ranks=RANKS),
    "features from a hook inside of a frozen block": Case(middle_frozen, on_features),
    "gradients of features": Case(net, with_a_gradient_of_features, ranks=RANKS),
    "output: an object": Case(lambda: net(ObjectBlock, in_objects), micros=2, ranks=RANKS),
    "output: an object beside a tensor": Case(lambda: net(BesideBlock, in_objects), micros=2, ranks=RANKS),
    "auxiliary loss on self": Case(lambda: net(AuxiliaryBlock), with_auxiliary_losses, ranks=RANKS),
    "auxiliary loss on self, output detached": Case(
        lambda: net(lambda: AuxiliaryBlock(cut=True)), with_auxiliary_losses, micros=2, ranks=RANKS
    ),
    "auxiliary loss on self of a frozen block": Case(lambda: middle_frozen(AuxiliaryBlock), with_auxiliary_losses),
    "auxiliary loss on self, checkpointed": Case(lambda: net(AuxiliaryBlock, each_checkpointed), with_auxiliary_losses),
    "auxiliary loss in a checkpoint of the block's own": Case(
        lambda: net(OwnCheckpointBlock), with_auxiliary_losses, ranks=RANKS
    ),
    "torch.func around the model": Case(net, through_torch_func, ranks=RANKS),
    "torch.func inside of a block": Case(lambda: net(InnerGradientBlock), ranks=RANKS),
    "autocast: evaluation, then training": Case(net, after_an_evaluation_under_autocast, micros=2, ranks=RANKS),
}
