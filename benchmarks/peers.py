"""The competitors of others: torch's DDP, ZeroRedundancyOptimizer and FSDP2, and DeepSpeed.

Each runs as its manual recommends, with the fastest optimizer that works with it on CPU; what was chosen and why is in
its docstring. Knows nothing of timing and reports.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from benchmarks.workload import CLIP, LEARNING_RATE, WEIGHT_DECAY, EngineLoop, PlainLoop, Setting, fused_adamw

DEEPSPEED_INSTALL = (
    "pip install ninja setuptools wheel && "
    "DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed (after torch; needs g++)"
)


class TorchDDP(PlainLoop):
    """``DistributedDataParallel`` as its manual recommends it: gradients as bucket views, fused AdamW."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        super().__init__(DistributedDataParallel(model, gradient_as_bucket_view=True), setting)


class TorchZero1(PlainLoop):
    """``ZeroRedundancyOptimizer`` over DDP: parameters as bucket views (faster broadcasts), fused AdamW inside.

    ``overlap_with_ddp`` is not possible: it steps inside of backward, before the norm to clip by is known.
    """

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            wrapped.parameters(),
            optimizer_class=AdamW,
            parameters_as_bucket_view=True,
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        super().__init__(wrapped, setting, optimizer)


class TorchFSDP2(PlainLoop):
    """``fully_shard`` on every block and then on the root, with its defaults; fused AdamW on the sharded parameters.

    policy: the dtypes that it computes and reduces in, None for the parameters' own · offload: what rests on the CPU,
    None for nothing. It runs where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        setting: Setting,
        *,
        policy: MixedPrecisionPolicy | None = None,
        offload: OffloadPolicy | None = None,
    ) -> None:
        mesh = init_device_mesh(next(model.parameters()).device.type, (setting.ranks,))
        policy, offload = policy or MixedPrecisionPolicy(), offload or OffloadPolicy()
        for block in model.get_submodule("transformer.h").children():
            fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
        fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
        super().__init__(model, setting)


class DeepSpeed(EngineLoop):
    """DeepSpeed at one ZeRO stage, given torch's fused AdamW (a supported client optimizer at every stage).

    Its config is the documented default with torch's AdamW (DeepSpeed's own CPU Adam was no faster), ``overlap_comm``
    on and, on a CPU, what was measured faster there: reduce buckets of 8 million elements (with the default of 500
    million this model is one bucket, and nothing overlaps) and at stage 3 no parameters kept whole for being small
    (instead of those below 100,000 elements).
    more: further keys of the config · offload: states and step on the CPU, by DeepSpeed's own CPU Adam, as its
    manual wants it. It runs where the model is.
    """

    def __init__(
        self,
        model: nn.Module,
        setting: Setting,
        *,
        stage: int,
        more: Mapping[str, Any] | None = None,
        offload: bool = False,
    ) -> None:
        device = next(model.parameters()).device.type
        zero = deepspeed_zero(stage, device)
        if offload:
            zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
        config = {
            "train_micro_batch_size_per_gpu": setting.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "zero_optimization": zero,
            **(more or {}),
        }
        deepspeed = import_deepspeed(device)
        optimizer = _cpu_adam(model) if offload else fused_adamw(model)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )

    def traffic(self) -> dict[str, float] | None:
        """Not counted."""
        return None

    def close(self) -> None:
        """Drop its hooks; the process group stays."""
        self.engine.destroy()


def deepspeed_zero(stage: int, device: str) -> dict[str, Any]:
    """Its section "zero_optimization": what was tuned on a CPU is for a CPU, a GPU has the defaults."""
    zero: dict[str, Any] = {"stage": stage}
    if stage > 0:
        zero |= {"overlap_comm": True}
    if stage > 0 and device == "cpu":
        zero |= {"reduce_bucket_size": 8_000_000}
    if stage == 3 and device == "cpu":
        zero |= {"stage3_param_persistence_threshold": 0}
    return zero


def _cpu_adam(model: nn.Module) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

    return DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adamw_mode=True)


def import_deepspeed(accelerator: str = "cpu") -> Any:
    """DeepSpeed, told what its launcher would tell it: the ranks, the device, where ninja is. Quiet below warnings."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    os.environ |= {"DS_ACCELERATOR": accelerator, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")  # asked for, never opened: the process group is there already
    tools = str(Path(sys.executable).parent)
    if tools not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = tools + os.pathsep + os.environ["PATH"]
    threads = torch.get_num_threads()
    deepspeed = importlib.import_module("deepspeed")
    torch.set_num_threads(threads)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed
