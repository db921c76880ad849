"""Small models that do what users' models do: outputs of every kind, branches, buffers, shared and frozen weights.

``Net`` calls its blocks as its route says. Must not know: the engine, losses, stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, INNER, VOCAB = 12, 20, 11


@dataclass(frozen=True)
class At:
    """Which micro-batch of which rank runs; ``fail``: the second block raises."""

    step: int = 0
    rank: int = 0
    micro: int = 0
    fail: bool = False


Route = Callable[[Any, Tensor, At], Tensor]


class Boom(ArithmeticError):
    """The exception that is raised on purpose."""


class Explode(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Boom("on purpose")


class Block(nn.Module):
    """Two linear layers with a residual. At stage 3 a unit, as it is repeated in a ModuleList."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, choice: Any = None) -> Any:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


@dataclass
class Packed:
    """An output that is a dataclass."""

    hidden: Tensor
    note: str = "text"
    extra: dict[str, Tensor] = field(default_factory=dict)


class DictBlock(Block):
    def forward(self, x: Tensor, choice: Any = None) -> Any:
        return {"hidden": super().forward(x), "nothing": None, "deep": {"list": [x.mean()]}}


class TupleBlock(Block):
    def forward(self, x: Tensor, choice: Any = None) -> Any:
        y = super().forward(x)
        return y, y.square().mean(), 3


class DataclassBlock(Block):
    def forward(self, x: Tensor, choice: Any = None) -> Any:
        y = super().forward(x)
        return Packed(y, extra={"mean": self.down.bias.mean()})


class ViewBlock(Block):
    def forward(self, x: Tensor, choice: Any = None) -> Any:
        return super().forward(x).t()


class NoneBlock(Block):
    """Returns None and leaves its result on itself."""

    def forward(self, x: Tensor, choice: Any = None) -> Any:
        self.result = super().forward(x)


class FailingBlock(Block):
    def forward(self, x: Tensor, choice: Any = None) -> Any:
        if choice:
            raise ArithmeticError("on purpose")
        return super().forward(x)


class BranchBlock(Block):
    """One of two matrices, as the micro-batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, choice: Any = None) -> Any:
        return torch.tanh(self.other(x)) if choice else super().forward(x)


class SharingBlock(Block):
    """Uses one layer of ``shared``, which all blocks have; the other one only where ``choice`` says so."""

    def __init__(self, shared: nn.ModuleDict) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor, choice: Any = None) -> Any:
        x = super().forward(torch.tanh(self.shared["used"](x)))
        return self.shared["rare"](x) if choice else x


class BatchNormBlock(Block):
    """The buffers reach the loss: without the broadcast ranks would differ from the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: Any = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, choice: Any = None) -> Any:
        return super().forward(self.norm(x)) + self.norm.running_mean.clone() / self.norm.num_batches_tracked


class LoraBlock(nn.Module):
    """Frozen matrices in ``dtype`` with fp32 adapters beside them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).to(dtype).requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x.to(self.base.weight.dtype)).float() + self.b(self.a(x)))


class OwnDtypeBlock(Block):
    """Computes in the dtype of its first layer."""

    def forward(self, x: Tensor, choice: Any = None) -> Any:
        return super().forward(x.to(self.up.weight.dtype)).float()


class MixedBlock(Block):
    """Its second layer is bf16: a unit with parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.down.bfloat16()

    def forward(self, x: Tensor, choice: Any = None) -> Any:
        return x + self.down(torch.tanh(self.up(x)).bfloat16()).float()


class TableBlock(nn.Module):
    """Returns a view of its weight; the product happens outside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH + 1, WIDTH) / WIDTH)

    def forward(self) -> Tensor:
        return self.weight[:WIDTH].t()


class Net(nn.Module):
    """inp → blocks as ``route`` calls them → out."""

    def __init__(self, blocks: Iterable[nn.Module], route: Route) -> None:
        super().__init__()
        self.inp = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(WIDTH, 3)
        self.route = route
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, at: At) -> Tensor:
        return self.out(self.route(self.blocks, self.inp(x), at))


class Odd(nn.Module):
    """A 0-dim parameter, one of a single element, one without elements, and layers smaller than the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.single = nn.Parameter(torch.tensor([0.5]))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))

    def forward(self, x: Tensor, at: At) -> Tensor:
        x = self.inp(x) * self.scale + self.empty.sum()
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.single
        return x


class OneScalar(nn.Module):
    """One element in all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor, at: At) -> Tensor:
        return x * self.scale


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Lm(nn.Module):
    """Embedding and head tied; the vocabulary divides by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.body.embed.weight

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.body(ids)), "table": self.head.weight}


# Routes


def in_order(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def repeated(blocks: Any, x: Tensor, at: At) -> Tensor:
    x = blocks[0](blocks[0](x))
    return blocks[0](blocks[2](blocks[1](x)))


def skipping(where: Callable[[int, At], bool]) -> Route:
    """In order, without the blocks for which ``where(number, at)`` holds."""

    def route(blocks: Any, x: Tensor, at: At) -> Tensor:
        for number, block in enumerate(blocks):
            x = x if where(number, at) else block(x)
        return x

    return route


def branching(other: Callable[[At], bool]) -> Route:
    def route(blocks: Any, x: Tensor, at: At) -> Tensor:
        for block in blocks:
            x = block(x, other(at))
        return x

    return route


def in_dicts(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        x = block(x)["hidden"]
    return x


def in_tuples(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        x, extra, _ = block(x)
        x = x * extra
    return x


def in_dataclasses(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        packed = block(x)
        x = packed.hidden + packed.extra["mean"]
    return x


def views_in_place(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        x = block(x).mul_(1.25).t()
    return x


def on_self(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        assert block(x) is None
        x = block.result
    return x


def in_place(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        x = block(x)
        x.add_(1.0).mul_(0.5)
    return x


def in_place_on_view(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        x = block(x)
        x[:, :5].mul_(0.5)
    return x


def failing(blocks: Any, x: Tensor, at: At) -> Tensor:
    for number, block in enumerate(blocks):
        x = block(x, at.fail and number == 1)
    return x


def checkpointed(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def checkpointed_pair(blocks: Any, x: Tensor, at: At) -> Tensor:
    x = checkpoint(lambda value: blocks[1](blocks[0](value)), x, use_reentrant=False)
    return blocks[2](x)


def through_tables(blocks: Any, x: Tensor, at: At) -> Tensor:
    for block in blocks:
        x = torch.tanh(x @ block())
    return x
