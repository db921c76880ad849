"""The competitors of ``offload_gpu.py``: computed in bf16, blocks computed again in backward, stepped on the CPU.

Owns: the loops that only this benchmark needs, and the facts about each competitor. Everyone steps fp32 master weights
with AdamW, clipped at ``CLIP``, but for torchao, whose optimizer cannot clip (Adam hardly feels a factor) and whose
masters are the weights themselves: fp32 on the device under autocast, 4 bytes each way instead of 2. Its manual
recommends bf16 throughout, states included, which is another training with half as much to move: ``torchao-bf16``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from benchmarks.peers import DeepSpeed, TorchFSDP2
from benchmarks.variants import Ours
from benchmarks.workload import LEARNING_RATE, WEIGHT_DECAY, Batch, PlainLoop, Setting, Variant

BF16 = {"bf16": {"enabled": True}}
HOST = {"device": "cpu"}
LIMIT = "compute"
BASES = {False: "ours-2", True: "ours-3"}
"""What a ratio is taken to: ours with weights on the device, and ours with weights in host memory."""


def checkpointed(model: nn.Module) -> nn.Module:
    """``model`` with each block's own forward run through torch's non-re-entrant checkpoint, hooks outside of it."""
    for block in model.get_submodule("transformer.h").children():
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
    return model


class NoOptimizer(PlainLoop):
    """Forward and backward of the bf16 module and nothing else: C of docs/limits.md. It does not train."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        super().__init__(checkpointed(model.bfloat16()), setting)

    def update(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad(set_to_none=True)


class TorchAO(PlainLoop):
    """torchao's ``CPUOffloadOptimizer`` around torch's fused AdamW; gradients leave the device as they come.

    masters: fp32 weights under autocast, or weights, gradients and states in bf16.
    """

    def __init__(self, model: nn.Module, setting: Setting, *, masters: bool = True) -> None:
        self.device = next(model.parameters()).device.type
        self.autocast = masters
        model = checkpointed(model if masters else model.bfloat16())
        optimizer = importlib.import_module("torchao.optim").CPUOffloadOptimizer(
            model.parameters(), torch.optim.AdamW, offload_gradients=True, fused=True, lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
        )  # fmt: skip
        super().__init__(model, setting, optimizer)

    def forward(self, batch: Batch) -> Tensor:
        """The loss, computed in bf16."""
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast):
            return super().forward(batch)

    def update(self) -> None:
        """Step and drop the gradients; no clipping, which its manual rules out."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def _ours(stage: int, **zero: Any) -> Callable[[nn.Module, Setting], Variant]:
    zero |= {"stage": stage, "offload_optimizer": HOST}
    return partial(Ours, zero=zero, more={**BF16, "activation_checkpointing": {"enabled": True}})


def _deepspeed(model: nn.Module, setting: Setting) -> DeepSpeed:
    """ZeRO-Offload: stage 2, states in page-locked host memory, DeepSpeedCPUAdam."""
    return DeepSpeed(checkpointed(model), setting, stage=2, offload=True, more=BF16)


def _fsdp2(model: nn.Module, setting: Setting) -> TorchFSDP2:
    """Masters, gradients and states on the CPU, the former two page-locked; weights travel in fp32."""
    pins = next(model.parameters()).device.type == "cuda"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return TorchFSDP2(checkpointed(model), setting, policy=policy, offload=CPUOffloadPolicy(pin_memory=pins))


@dataclass(frozen=True)
class Competitor:
    """What is known of a competitor before it runs.

    host_bytes: an upper estimate of host memory per parameter, with what page-locked blocks are rounded up by ·
    package: what must be installed · weights_away: weights rest in host memory, too · trains: its loss is compared
    beyond the first step · cuda_backend: of the process group (a norm of gradients on the CPU needs gloo).
    """

    build: Callable[[nn.Module, Setting], Variant]
    host_bytes: int = 20
    package: str | None = None
    weights_away: bool = False
    trains: bool = True
    cuda_backend: str = "nccl"


COMPETITORS: dict[str, Competitor] = {
    LIMIT: Competitor(NoOptimizer, host_bytes=0, trains=False),
    "ours-2": Competitor(_ours(2)),
    "deepspeed-2": Competitor(_deepspeed, package="deepspeed"),
    "torchao": Competitor(TorchAO, package="torchao"),
    "torchao-bf16": Competitor(partial(TorchAO, masters=False), host_bytes=12, package="torchao"),
    "ours-3": Competitor(_ours(3, offload_param=HOST), host_bytes=23, weights_away=True),
    "fsdp2": Competitor(_fsdp2, host_bytes=24, weights_away=True, cuda_backend="cpu:gloo,cuda:nccl"),
}


def installed(name: str) -> bool:
    """Whether the package that a competitor needs is there."""
    package = COMPETITORS[name].package
    return package is None or importlib.util.find_spec(package) is not None
