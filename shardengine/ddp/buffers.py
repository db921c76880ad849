"""Keeps module buffers (BatchNorm statistics, …) equal to rank 0's. Must not know stages, hooks or parameters.

All buffers are broadcast once at start. Persistent ones are broadcast again before the first micro-batch of every step:
non-persistent buffers are tables that every rank computes for itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardengine.comm import Collectives, Named, Purpose


class BufferSync:
    """Broadcasts the buffers of ``module``, one flat message per dtype."""

    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        self._named = list(module.named_modules())  # the engine refuses a module that was added or replaced since
        self._collectives = collectives

    def broadcast(self, *, persistent_only: bool, source: int = 0) -> None:
        """Copy every buffer from rank ``source`` to all ranks; blocks."""
        if self._collectives.mesh.ranks == 1:
            return
        by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for name, buffer in self.named(persistent_only=persistent_only).items():
            by_dtype.setdefault(buffer.dtype, []).append((name, buffer))
        for named in by_dtype.values():
            flat = torch.cat([buffer.detach().reshape(-1) for _, buffer in named])
            self._collectives.broadcast(flat, Named([name for name, _ in named]), Purpose.BUFFERS, source)
            with torch.no_grad():
                for (_, buffer), part in zip(named, flat.split([b.numel() for _, b in named]), strict=True):
                    buffer.copy_(part.view_as(buffer))

    def named(self, *, persistent_only: bool) -> dict[str, Tensor]:
        """Return buffers by name; if ``persistent_only``, without those that are not in the state dict."""
        found: dict[str, Tensor] = {}
        for prefix, module in self._named:
            if not module._buffers:
                continue
            for name, buffer in module.named_buffers(recurse=False):
                if not (persistent_only and name in module._non_persistent_buffers_set):
                    found[f"{prefix}.{name}" if prefix else name] = buffer
        return found
