"""Small numbers over all ranks, for the training loop. Owns: exchanging a few floats, and the last barrier.

Must not know: the engine, the model. The engine moves weights and gradients itself. A loop only needs to average a loss
and to agree with the other ranks on when to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardengine.comm import Collectives, Mesh, agreement, await_the_others
from shardengine.offload import BufferPool


class RankSums:
    """Collective: every rank makes the same calls in the same order."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._collectives = Collectives(mesh, BufferPool(mesh.platform))

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.mesh.rank

    def from_first(self, text: str) -> str:
        """Return rank 0's ``text``."""
        return self.from_all(text)[0]

    def from_all(self, text: str) -> list[str]:
        """Return every rank's ``text``, in rank order."""
        return [str(each) for each in self._collectives.exchange_objects(text, "texts")]

    def on_first(self, what: str, action: Callable[[], object]) -> None:
        """Run ``action`` on rank 0. If it fails, all ranks raise."""
        agreement.run_on_all_ranks(self._collectives, what, lambda: action() if self.rank == 0 else None)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum over the ranks, in float64, in rank order: the same bits everywhere."""
        total: list[float] = self._rows(values).sum(dim=0).tolist()
        return total

    def each(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's ``values``, in rank order. All ranks must pass equally many."""
        rows: list[list[float]] = self._rows(values).tolist()
        return rows

    def _rows(self, values: Sequence[float]) -> torch.Tensor:
        mine = torch.tensor(values, dtype=torch.float64)
        return self._collectives.exchange(mine.view(torch.uint8), "sums").contiguous().view(torch.float64)

    def finish(self, *, destroy: bool) -> None:
        """Run the last barrier. If ``destroy``, also destroy the process group: without this gloo may abort at exit."""
        self._collectives.barrier()
        if destroy and dist.is_initialized():
            await_the_others(self.mesh)
            dist.destroy_process_group()
