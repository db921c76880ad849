"""The only file that calls torch.distributed's data operations: each starts one, and waits for nothing.

Must not know: the meaning of the data, its order, the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None

# renamed in torch 2.13; the old names warn there, the new ones are missing before
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Wire:
    """Data operations over a group.

    Tensors are flat and contiguous. The caller keeps them until it has waited for the work, and changes neither the
    sent nor the received ones before.
    """

    def broadcast(self, tensor: Tensor, source: int, group: Group) -> dist.Work:
        """Bring ``tensor`` of rank ``source`` of the group to all of it."""
        return _begun(dist.broadcast(tensor, group_src=source, group=group, async_op=True))

    def all_gather(self, out: Tensor, own: Tensor, group: Group) -> dist.Work:
        """Write ``own`` of every rank, in rank order, to ``out``; ``own`` may be its place in ``out``."""
        return _begun(_all_gather(out, own, group=group, async_op=True))

    def reduce_scatter(self, out: Tensor, full: Tensor, group: Group) -> dist.Work:
        """Write the sum over ranks of this rank's slice of ``full`` to ``out``, added as the backend does."""
        return _begun(_reduce_scatter(out, full, group=group, async_op=True))

    def all_to_all(self, out: Tensor, full: Tensor, group: Group) -> dist.Work:
        """Write this rank's slice of every rank's ``full``, in rank order, to ``out``."""
        return _begun(dist.all_to_all_single(out, full, group=group, async_op=True))

    def all_to_all_of(
        self, out: Tensor, received: Sequence[int], full: Tensor, sent: Sequence[int], group: Group
    ) -> dist.Work:
        """As ``all_to_all``, with slices of any lengths: ``sent`` to each rank, ``received`` from each."""
        return _begun(dist.all_to_all_single(out, full, list(received), list(sent), group=group, async_op=True))


def _begun(work: Any) -> dist.Work:
    made: dist.Work = work
    return made
