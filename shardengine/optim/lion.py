"""Lion as a torch optimizer, which torch does not have. ``"type": "Lion"`` makes it; ``initialize`` takes it as well.

Must not know: shards, the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardengine.errors import UsageError
from shardengine.kernels import Spans, rule_for, update


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (Chen et al., 2023, arXiv 2302.06675) with decoupled weight decay.

    lr is usually 3 to 10 times smaller than AdamW's, weight_decay larger by the same factor. Without the engine it
    steps only dense fp32 parameters; it raises UsageError for others.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient once; return the value of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.dtype is not torch.float32 or parameter.grad.layout is not torch.strided:
                    raise UsageError(
                        f"Lion: expected dense fp32 parameters, got {parameter.dtype} with a gradient of layout "
                        f"{parameter.grad.layout}; shardengine.initialize keeps fp32 master weights for bf16 ones",
                        code="optimizer-lion-parameter-unsupported",
                    )
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                tensors = {"weight": parameter, "gradient": parameter.grad, "exp_avg": state["exp_avg"]}
                flats = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
                update(flats, Spans.whole(parameter.numel()), rule_for("Lion", group, 1))
                for name in ("weight", "exp_avg"):  # reshape copies tensors that are not contiguous
                    if flats[name].data_ptr() != tensors[name].data_ptr():
                        tensors[name].copy_(flats[name].view(parameter.shape))
        return loss
