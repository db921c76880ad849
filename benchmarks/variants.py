"""The competitors of ``step.py``. Owns: the model and data of the benchmark, and how each competitor makes one step.

A competitor is one small class, built from a fresh model; ``step(batch)`` is one optimizer step with clipping at 1.0.
To add one, write the class and enter it in ``VARIANTS``; nothing else changes. Knows nothing of timing and reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

CLIP = 1.0
LEARNING_RATE = 3e-4
HEAD_SIZE = 64

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """The work of one step: a GPT-2, and ``batch`` sequences of ``sequence`` tokens on each of ``ranks`` ranks."""

    ranks: int
    layers: int
    hidden: int
    vocabulary: int
    batch: int
    sequence: int

    def parameters(self) -> int:
        """Number of parameters Ψ of the model (the head is tied to the embedding)."""
        h = self.hidden
        return self.layers * (12 * h * h + 13 * h) + (self.vocabulary + self.sequence) * h + 2 * h


def make_model(setting: Setting) -> nn.Module:
    """A GPT-2 of ``setting``, the same weights on every rank and for every variant, no dropout, in training mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=setting.layers,
        n_embd=setting.hidden,
        n_head=setting.hidden // HEAD_SIZE,
        vocab_size=setting.vocabulary,
        n_positions=setting.sequence,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    built = GPT2LMHeadModel(config)
    built.loss_type = "ForCausalLM"  # what transformers falls back to, but without its warning
    model: nn.Module = built.train()
    return model


def batch_of(setting: Setting, rank: int, number: int) -> Batch:
    """The random batch of step ``number`` on ``rank``, equal for every variant."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + number)
    tokens = torch.randint(0, setting.vocabulary, (setting.batch, setting.sequence), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


REFERENCE = Setting(ranks=2, layers=8, hidden=768, vocabulary=8192, batch=4, sequence=128)
"""The setting that results are kept for: 63M parameters."""


class Variant(Protocol):
    """One competitor, holding its own copy of the model."""

    def step(self, batch: Batch) -> float:
        """Forward, backward, clip, optimizer step, gradients dropped. Returns this rank's loss before the step."""

    def traffic(self) -> dict[str, float | None]:
        """Bytes sent per rank and step: ``sent_bytes_per_step`` (counted; None: unknown), ``limit_bytes_per_step``."""

    def close(self) -> None:
        """Release what must not outlive the process group."""


class PlainLoop:
    """The ordinary torch loop on a module. Without communication it is the compute limit."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        self.model = model
        self.optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)

    def step(self, batch: Batch) -> float:
        """One local step."""
        loss: Tensor = self.model(**batch).loss
        loss.backward()
        clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def traffic(self) -> dict[str, float | None]:
        """Nothing is sent."""
        return {"sent_bytes_per_step": 0.0, "limit_bytes_per_step": 0.0}

    def close(self) -> None:
        """Nothing to release."""


class TorchDDP(PlainLoop):
    """``DistributedDataParallel`` as its manual recommends it: gradients as bucket views, fused AdamW."""

    def __init__(self, model: nn.Module, setting: Setting) -> None:
        super().__init__(DistributedDataParallel(model, gradient_as_bucket_view=True), setting)
        self.limit = 2 * (setting.ranks - 1) / setting.ranks * 4 * setting.parameters()

    def traffic(self) -> dict[str, float | None]:
        """DDP counts nothing itself; the limit is an all-reduce of the fp32 gradients."""
        return {"sent_bytes_per_step": None, "limit_bytes_per_step": self.limit}


class Ours:
    """shardengine at one stage."""

    def __init__(self, model: nn.Module, setting: Setting, *, zero: dict[str, Any]) -> None:
        import shardengine

        config = {
            "train_micro_batch_size_per_gpu": setting.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": CLIP,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
            "zero_optimization": zero,
        }
        self.engine = shardengine.initialize(model, config)

    def step(self, batch: Batch) -> float:
        """One step through the engine, which clips and drops the gradients itself."""
        loss: Tensor = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def traffic(self) -> dict[str, float | None]:
        """The engine's own counter beside the stage's formula."""
        found = self.engine.traffic()
        return {
            "sent_bytes_per_step": float(found["measured_bytes_last_step"]),
            "limit_bytes_per_step": float(found["formula_bytes_per_step"]),
        }

    def close(self) -> None:
        """Close the engine; the process group stays."""
        self.engine.close()


VARIANTS: dict[str, Callable[[nn.Module, Setting], Variant]] = {
    "compute": PlainLoop,
    "ddp": TorchDDP,
    "ours-0": partial(Ours, zero={"stage": 0}),
    "ours-1": partial(Ours, zero={"stage": 1}),
    "ours-2": partial(Ours, zero={"stage": 2}),
    "ours-3k": partial(Ours, zero={"stage": 3, "stage3_reshard_after_forward": False}),
    "ours-3": partial(Ours, zero={"stage": 3}),
}
