"""The special cases by name: a model, the loss of a micro-batch, and how many micro-batches and ranks.

A loss depends on everything that its case wants to compare with the oracle: generated tokens become the batch, results
of an evaluation become a factor. Must not know: stages, buckets, optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardengine
from tests.support import cases
from tests.support import special_models as models
from tests.support.special_models import VOCAB, At, Block, Lm, Net, Odd, OneScalar


def bare(model: Any) -> Any:
    """The module, of an engine or as it is."""
    return model.module if isinstance(model, shardengine.Engine) else model


def start(step: int, rank: int, micro: int) -> tuple[Tensor, Tensor, At]:
    torch.manual_seed(cases.seed_of(step, rank, micro))
    return torch.randn(5, 7), torch.randn(5, 3), At(step, rank, micro)


def regression(model: Any, step: int, rank: int, micro: int) -> Tensor:
    x, y, at = start(step, rank, micro)
    return (model(x, at=at) - y[:, :1]).square().mean()


def two_forwards(model: Any, step: int, rank: int, micro: int) -> Tensor:
    x, y, at = start(step, rank, micro)
    first = model(x, at=at)
    return (first - y).square().mean() + 0.5 * model(x.flip(0), at=at).square().mean()


def after_exceptions(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """In step 1 two forwards fail on every rank, one of them without grad; the normal one follows."""
    x, _, _ = start(step, rank, micro)
    for grad in (True, False) if step == 1 else ():
        try:
            with torch.set_grad_enabled(grad):
                model(x, at=At(fail=True))
        except ArithmeticError:
            continue
        raise AssertionError("the second block was to raise")
    return regression(model, step, rank, micro)


def after_unused_forward(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """A forward with grad whose result nobody wants."""
    x, _, at = start(step, rank, micro)
    model(x.flip(0), at=at)
    return regression(model, step, rank, micro)


def evaluating(context: Callable[[], Any]) -> Callable[..., Tensor]:
    """Before every micro-batch, and between its forward and its backward, the bare module and parts of it are run."""

    def loss(model: Any, step: int, rank: int, micro: int) -> Tensor:
        x, y, at = start(step, rank, micro)
        module = bare(model)

        def look() -> float:
            module.eval()
            with context():
                hidden = module.inp(x)
                parts = (module(x, at), module.blocks[1](hidden), module.out(module.blocks[2](hidden)))
                total = sum(part.mean().item() for part in parts)
            module.train()
            return total

        before = look()
        out = model(x, at=at)
        return (out - y).square().mean() * (2.0 + before - look())

    return loss


def language(model: Any, step: int, rank: int, micro: int) -> Tensor:
    start(step, rank, micro)
    ids = torch.randint(0, VOCAB, (3, 6))
    out = model(ids)
    return functional.cross_entropy(out["logits"].flatten(0, 1), ids.flatten()) + out["table"].square().mean()


def head_not_called(model: Any, step: int, rank: int, micro: int) -> Tensor:
    start(step, rank, micro)
    ids = torch.randint(0, VOCAB, (3, 6))
    logits = functional.linear(bare(model).body(ids), bare(model).head.weight)
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def view_kept(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """A view of a weight outlives backward and step; looking at it may give anything, but no crash."""
    module = bare(model)
    if module.kept is not None:
        float(module.kept.detach().clone().sum())
    module.kept = module.blocks[1]()
    return regression(model, step, rank, micro) + module.kept.square().mean()


def generating(context: Callable[[], Any]) -> Callable[..., Tensor]:
    """The batch is what the model generated after the last step: other tokens would give another loss."""

    def loss(model: Any, step: int, rank: int, micro: int) -> Tensor:
        torch.manual_seed(cases.seed_of(step, rank, micro))
        prompt = torch.randint(1, cases.VOCAB, (2, 4))
        module = bare(model)
        module.eval()
        with context():
            made = module.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False, pad_token_id=0
            )
        module.train()
        ids = made.clone()
        torch.manual_seed(cases.seed_of(step, rank, micro))
        return model(input_ids=ids, labels=ids).loss

    return loss


# Models


def net(block: Callable[[], nn.Module] = Block, route: models.Route = models.in_order, count: int = 3) -> Any:
    torch.manual_seed(21)
    return Net([block() for _ in range(count)], route)


def shared_by_blocks() -> nn.Module:
    model = net()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def frozen_block() -> nn.Module:
    model = net()
    model.blocks[1].requires_grad_(False)
    return model


def frozen_but_one_bias() -> nn.Module:
    model = net().requires_grad_(False)
    model.blocks[1].down.bias.requires_grad_(True)
    return model


def language_model(frozen: bool = False) -> nn.Module:
    torch.manual_seed(22)
    model: Any = Lm()
    if frozen:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        model.body.embed.requires_grad_(False)
    return model


def lora(dtype: torch.dtype) -> nn.Module:
    model = net(lambda: models.LoraBlock(dtype))
    model.inp.requires_grad_(False)
    return model


def two_dtypes() -> nn.Module:
    """Two blocks in bf16 and one of both dtypes, between parts in fp32, all trained."""
    torch.manual_seed(21)
    low = [models.OwnDtypeBlock().bfloat16() for _ in range(2)]
    return Net([*low, models.MixedBlock()], models.in_order)


def unused() -> nn.Module:
    """A whole block and a layer of the root that no rank ever uses."""
    model = net(route=models.skipping(lambda number, at: number == 1))
    model.dangling = nn.Linear(5, 5)
    return model


def sharing(rare: Callable[[At], bool]) -> nn.Module:
    """Blocks that share a sub-module of three layers; the third one is never used."""
    torch.manual_seed(21)
    shared = nn.ModuleDict({name: nn.Linear(models.WIDTH, models.WIDTH) for name in ("used", "rare", "never")})
    return Net([models.SharingBlock(shared) for _ in range(3)], models.branching(rare))


def gpt2(checkpointing: bool = False) -> nn.Module:
    model: Any = cases.make_gpt2()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(23)
    return make()


@dataclass(frozen=True)
class Case:
    """``loss(model, step, rank, micro)`` takes an engine or the plain model; zero: keys of zero_optimization."""

    make: Callable[[], Any]
    loss: Callable[[Any, int, int, int], Tensor] = regression
    micros: int = 1
    ranks: tuple[int, ...] = (2,)
    zero: dict[str, Any] = field(default_factory=dict)


def dropping() -> nn.Module:
    return Block(dropout=0.2)


CASES: dict[str, Case] = {
    "tied: embedding and head": Case(language_model, language, ranks=(2, 3)),
    "tied: embedding and head are units": Case(language_model, language, zero={"units": ["Embedding", "Linear"]}),
    "tied: one weight in two blocks": Case(shared_by_blocks),
    "frozen: a block in the middle": Case(frozen_block, micros=2),
    "frozen: embedding": Case(lambda: language_model(frozen=True), language),
    "frozen: all but one bias": Case(frozen_but_one_bias),
    "frozen: adapters over fp32": Case(lambda: lora(torch.float32)),
    "frozen: adapters over bf16": Case(lambda: lora(torch.bfloat16), ranks=(2, 3)),
    "unused: on all ranks": Case(unused),
    "unused: in blocks of one rank": Case(
        lambda: net(models.BranchBlock, models.branching(lambda at: at.rank == 1)), ranks=(2, 3)
    ),
    "unused: in the root of one rank": Case(
        lambda: net(models.BranchBlock, models.branching(lambda at: at.rank == 0), count=1), micros=2
    ),
    "unused: in some micro-batches of some ranks": Case(
        lambda: net(models.BranchBlock, models.branching(lambda at: at.rank == at.micro)), micros=2
    ),
    "unused: a block in the first micro-batch": Case(
        lambda: net(route=models.skipping(lambda number, at: number == 1 and at.micro == 0)), micros=2
    ),
    "unused: a block in the last micro-batch": Case(
        lambda: net(route=models.skipping(lambda number, at: number == 1 and at.micro == 1)), micros=2
    ),
    "unused: a block in some steps": Case(lambda: net(route=models.skipping(lambda number, at: number == at.step % 2))),
    "unused: in a sub-module that blocks share": Case(lambda: sharing(lambda at: False), ranks=(2, 3)),
    "unused: in a sub-module that blocks share, on one rank in some steps": Case(
        lambda: sharing(lambda at: at.rank == 1 and at.step % 2 == 0), micros=2
    ),
    "called twice": Case(lambda: net(route=models.repeated), micros=2),
    "output: dict": Case(lambda: net(models.DictBlock, models.in_dicts)),
    "output: tuple": Case(lambda: net(models.TupleBlock, models.in_tuples)),
    "output: dataclass": Case(lambda: net(models.DataclassBlock, models.in_dataclasses)),
    "output: view, changed in place": Case(lambda: net(models.ViewBlock, models.views_in_place)),
    "output: None": Case(lambda: net(models.NoneBlock, models.on_self)),
    "in place: output": Case(lambda: net(route=models.in_place)),
    "in place: view of an output": Case(lambda: net(route=models.in_place_on_view)),
    "buffers": Case(lambda: net(models.BatchNormBlock), micros=2, ranks=(2, 3)),
    "checkpointing: each block": Case(lambda: net(dropping, models.checkpointed), micros=2),
    "checkpointing: two blocks together": Case(lambda: net(dropping, models.checkpointed_pair)),
    "checkpointing: Hugging Face": Case(lambda: gpt2(checkpointing=True), cases.loss_of),
    "two forwards, one backward": Case(net, two_forwards),
    "a forward without backward": Case(net, after_unused_forward),
    "generate under no_grad": Case(gpt2, generating(torch.no_grad)),
    "generate under inference_mode": Case(gpt2, generating(torch.inference_mode)),
    "evaluation under no_grad": Case(net, evaluating(torch.no_grad)),
    "evaluation under inference_mode": Case(net, evaluating(torch.inference_mode)),
    "odd sizes": Case(lambda: seeded(Odd), ranks=(1, 3)),
    "one element in all": Case(lambda: seeded(OneScalar), ranks=(2, 3)),
    "a view of a weight is returned": Case(lambda: net(models.TableBlock, models.through_tables), view_kept),
    "the head's weight is read, the head not called": Case(language_model, head_not_called),
    "exceptions in forward": Case(lambda: net(models.FailingBlock, models.failing), after_exceptions),
}
