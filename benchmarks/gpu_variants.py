"""The competitors of ``gpu_step.py``: everyone trains in bf16 with fp32 master weights, on the device of its model.

Owns: the plain bf16 loop that the others are compared with, and the facts about each competitor. The libraries are the
ones of ``variants.py`` and ``peers.py``, told to train in bf16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from benchmarks.peers import DeepSpeed, TorchFSDP2
from benchmarks.variants import BASE, LIMIT, Entry, Ours
from benchmarks.workload import CLIP, LEARNING_RATE, WEIGHT_DECAY, PlainLoop, Setting

BF16 = {"bf16": {"enabled": True}}


class MasterLoop(PlainLoop):
    """The usual loop in bf16: the module in bf16, an fp32 copy of each weight, which torch's fused AdamW steps.

    Gradients are cast to fp32 for the step, and the stepped masters copied back, all tensors in one call. wrap: what
    is to be put around the module.
    """

    def __init__(
        self, model: nn.Module, setting: Setting, *, wrap: Callable[[nn.Module], nn.Module] | None = None
    ) -> None:
        masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        optimizer = AdamW(masters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
        model.bfloat16()
        super().__init__(wrap(model) if wrap else model, setting, optimizer)
        self.weights: list[Tensor] = list(model.parameters())
        self.masters = masters

    @torch.no_grad()
    def update(self) -> None:
        """Cast the gradients, clip, step the masters, copy them into the weights, drop the gradients."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        stepped: list[Tensor] = [*self.masters]
        torch._foreach_copy_(self.weights, stepped)
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)


def _ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _fsdp2(model: nn.Module, setting: Setting) -> TorchFSDP2:
    """fp32 weights in shards, gathered in bf16, gradients reduced in fp32: what its manual calls mixed precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return TorchFSDP2(model, setting, policy=policy)


def _deepspeed(stage: int) -> Entry:
    return Entry(partial(DeepSpeed, stage=stage, more=BF16), "deepspeed", str(stage), package="deepspeed")


def _ours(stage: int, **more: Any) -> Entry:
    """more: keys of the section zero_optimization."""
    zero = {"stage": stage, **more}
    return Entry(partial(Ours, zero=zero, more=BF16), "shardengine", str(stage))


USUAL: dict[str, Entry] = {
    LIMIT: Entry(MasterLoop, "reference", None),
    BASE: Entry(partial(MasterLoop, wrap=_ddp), "torch", "0"),
    "fsdp2": Entry(_fsdp2, "torch", "3"),
    **{f"deepspeed-{stage}": _deepspeed(stage) for stage in (1, 2, 3)},
    **{f"ours-{stage}": _ours(stage) for stage in (0, 1, 2, 3)},
}
LARGER_BUCKETS: dict[str, Entry] = {
    f"ours-2-{millions}M": _ours(2, reduce_bucket_size=millions * 1_000_000) for millions in (50, 200)
}
"""Only where they are named: whether the default size of buckets, which was measured on a CPU, suits a GPU."""
COMPETITORS = USUAL | LARGER_BUCKETS


def installed(name: str) -> bool:
    """Whether the package that a competitor needs is there."""
    package = COMPETITORS[name].package
    return package is None or importlib.util.find_spec(package) is not None
