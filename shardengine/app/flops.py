"""FLOPs of a model's training and of a GPU, for MFU, the ratio of the two. Must not know: engines.

The count is that of Chowdhery et al., PaLM, appendix B: two FLOPs for each weight and token in forward, twice as many
in backward, and 12 · layers · width of attention · tokens of the row for attention. Frozen weights have no gradient,
which saves a third of theirs. Recomputation in backward does not count, because the model itself does not need it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from shardengine.sharding import inner

_BF16_TFLOPS: Mapping[str, float] = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "A100": 312, "A800": 312,
    "L40S": 362, "L40": 181, "L4": 121, "A40": 150, "A10G": 70, "A10": 125, "RTX 4090": 165, "RTX 3090": 71,
    "MI300X": 1307, "MI250X": 191.5,
}  # fmt: skip
"""Words of a GPU's name → its dense TFLOP/s in bf16 and fp16, by its data sheet (for an MI250X, of one of its two dies,
each of them a device). The first match counts."""
_SLOWER = re.compile("Laptop|Max-Q|MIG")


def per_token(model: nn.Module, length: int) -> float:
    """Return the FLOPs per token of a step on rows of ``length`` tokens."""
    config = getattr(model, "config", None)
    looked_up = _rows_looked_up(model)
    flops = 0.0
    for parameter in model.parameters():  # a tied weight once: it is multiplied where it is the output layer
        if id(parameter) not in looked_up:
            flops += inner.weights_in(parameter) * (6 if parameter.requires_grad else 4)
    heads, layers = getattr(config, "num_attention_heads", 0) or 0, getattr(config, "num_hidden_layers", 0) or 0
    width = getattr(config, "hidden_size", 0) or 0
    size = getattr(config, "head_dim", None) or (width // heads if heads else 0)
    return flops + 12.0 * layers * heads * size * length


def peak_of(name: str, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the GPU of that name in ``dtype``; 0 if they are not known."""
    if dtype not in (torch.bfloat16, torch.float16) or _SLOWER.search(name):
        return 0.0
    known = (peak for part, peak in _BF16_TFLOPS.items() if re.search(rf"\b{part}\b", name))
    return 1e12 * next(known, 0.0)


def _rows_looked_up(model: nn.Module) -> set[int]:
    """Return the ids of weights that only provide rows, without a multiplication."""
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    multiplied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return {id(table) for table in tables} - multiplied
