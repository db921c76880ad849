"""The work of ``step.py``: the model, its batches, and what a competitor must be able to do with them.

Owns: the setting, the model and data of the benchmark, the protocol of a competitor, and the plain torch loop that the
others extend. Knows nothing of timing and reports. ``variants.py`` lists the competitors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from benchmarks.gpt2 import GPT2
from shardengine.stages import Volume

CLIP = 1.0
LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01
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
        return self.volume().trainable

    def volume(self) -> Volume:
        """The same number, split as the formulas want it: the last block is still there when backward begins."""
        h = self.hidden
        block = 12 * h * h + 13 * h
        root = (self.vocabulary + self.sequence) * h + 2 * h
        twice, once = (self.layers - 1) * block, block + root
        return Volume(trainable=twice + once, twice=twice, once=once)


def make_model(setting: Setting, *, own: bool = False, seed: int = 0) -> nn.Module:
    """A GPT-2 of ``setting``, the same weights on every rank and for every variant, no dropout, in training mode.

    own: the model of ``gpt2.py``, where transformers is not installed or its time is not wanted · seed: of the weights.
    """
    torch.manual_seed(seed)
    if own:
        return GPT2(setting.layers, setting.hidden, setting.hidden // HEAD_SIZE, setting.vocabulary, setting.sequence)
    from transformers import GPT2Config, GPT2LMHeadModel

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
    """One competitor, holding its own copy of the model. One training step is the three phases in this order."""

    def forward(self, batch: Batch) -> Tensor:
        """This rank's loss."""

    def backward(self, loss: Tensor) -> None:
        """Gradients, complete over all ranks or on their way."""

    def update(self) -> None:
        """Clip at ``CLIP``, step the optimizer, drop the gradients; weights are up to date afterwards."""

    def traffic(self) -> dict[str, float] | None:
        """What it counts itself: ``sent_bytes_per_step`` and ``limit_bytes_per_step``; None: it counts nothing."""

    def close(self) -> None:
        """Release what must not outlive the process group."""


def fused_adamw(model: nn.Module) -> AdamW:
    """The optimizer that every competitor without one of its own is given: torch's fastest on CPU."""
    return AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


class PlainLoop:
    """The ordinary torch loop on a module. Without communication it is the compute limit."""

    def __init__(self, model: nn.Module, setting: Setting, optimizer: Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = optimizer or fused_adamw(model)

    def forward(self, batch: Batch) -> Tensor:
        """The loss of the module's output."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def backward(self, loss: Tensor) -> None:
        """Plain autograd."""
        loss.backward()

    def update(self) -> None:
        """Clip all gradients by their global norm, step, drop them."""
        clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def traffic(self) -> dict[str, float] | None:
        """Not counted."""
        return None

    def close(self) -> None:
        """Nothing to release."""


class EngineLoop:
    """The loop of a library that has an engine: three calls, which ours and DeepSpeed's share."""

    engine: Any

    def forward(self, batch: Batch) -> Tensor:
        """The loss of the module's output."""
        loss: Tensor = self.engine(**batch).loss
        return loss

    def backward(self, loss: Tensor) -> None:
        """Backward through the engine, which also reduces."""
        self.engine.backward(loss)

    def update(self) -> None:
        """The engine clips, steps and drops the gradients itself."""
        self.engine.step()
