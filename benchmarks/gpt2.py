"""A GPT-2 in plain torch, for machines without transformers: the same parameters under the same names, and its loss.

It calls as a Hugging Face model does (``model(input_ids=..., labels=...).loss``), and keeps its blocks in
``transformer.h``. Linear weights are stored transposed to Hugging Face's ``Conv1D``. Must not know what trains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITIAL_STD = 0.02


@dataclass
class Output:
    """What a forward gives."""

    loss: Tensor


class Attention(nn.Module):
    """Causal self-attention with one projection for query, key and value."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] → the same."""
        batch, length, hidden = x.shape
        parts = self.c_attn(x).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.c_proj(found.transpose(1, 2).reshape(batch, length, hidden))
        return out


class FeedForward(nn.Module):
    """Two linear layers with GELU (its tanh form) between."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] → the same."""
        out: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """One layer, normalised before each of its halves."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(hidden), Attention(hidden, heads)
        self.ln_2, self.mlp = nn.LayerNorm(hidden), FeedForward(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] → the same."""
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT2(nn.Module):
    """The language model; the head is tied to the embedding."""

    def __init__(self, layers: int, hidden: int, heads: int, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocabulary, hidden),
            "wpe": nn.Embedding(positions, hidden),
            "h": nn.ModuleList(Block(hidden, heads) for _ in range(layers)),
            "ln_f": nn.LayerNorm(hidden),
        })  # fmt: skip
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        embedding: Any = self.transformer["wte"]
        self.lm_head.weight = embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        """Both int64 [batch, sequence]. The mean cross-entropy of each next token, in fp32."""
        part: Any = self.transformer
        x: Tensor = part["wte"](input_ids) + part["wpe"](torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in part["h"]:
            x = block(x)
        logits = self.lm_head(part["ln_f"](x))[:, :-1].float()
        return Output(F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))
