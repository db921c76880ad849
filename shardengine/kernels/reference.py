"""The declared arithmetic of copies and sums, in torch. With ``reference_update.py`` this file *is* invariant 1.

Owns: the order over ranks, where sums are divided and rounded, the norm, the factor of gradients. Must not know:
process groups, stages, buckets. The contract of each operation is in ``operations.py``.

[Note: One arithmetic]
- ranks are added in a balanced tree over rank numbers, ((0+1)+(2+3)), an odd one out moving up unchanged; in fp32,
  whatever the dtype of the message (or in ``reduce_dtype``: each addition is then rounded to it)
- micro-batches are added first to last; the first contribution is a copy (0 + -0.0 would be +0.0)
- a gradient is rounded to the wire's dtype when it is sent, sums are fp32, the complete sum is divided once and rounded
  once more to the wire's dtype; optimizers step fp32 weights (masters if the parameter has another dtype) with it
- squares are added in fp64, exactly as in [Note: Sum of squares]; the root is rounded once to fp32. The partial sums do
  depend on the rank slices: two layouts agree unless the exact root lies within ~1e-15 (relative) of a rounding
  boundary of fp32: one step in ~1e8
- gradients are multiplied inside the update with ``gradient_factor``: one over the loss scale, times the clipping
  factor

[Note: Sum of squares] The square of an fp32 number is exact in fp64. Elements are taken in blocks of 65 536 = 16 rows
of 4096 lanes. Within a block each lane adds its rows first to last; then neighbouring lanes are added pair by pair,
((0+1)+(2+3))+…, down to one. The sums of the blocks are added in the same way, as rows of lanes of their own. Missing
elements are zeros, which change no sum of squares.

Passes over long tensors go chunk by chunk, so that the results of one operation are still in cache for the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LANES, ROWS = 4096, 16
_CHUNK = 2 * LANES * ROWS


def chunks(length: int, size: int = _CHUNK) -> Iterator[slice]:
    """Yield slices of at most ``size`` elements that cover ``length``."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def flatten(
    tensors: Sequence[Tensor], starts: Sequence[int], out: Tensor, *, scale: float = 1.0, add: bool = False
) -> None:
    """See ``operations.flatten``: one ``cat``, whose zeros are views of one short tensor."""
    if scale != 1.0 and tensors:
        tensors = torch._foreach_mul([tensor.float() for tensor in tensors], scale)
    if add:
        if tensors:
            torch._foreach_add_(_views(out, starts, tensors), list(tensors))
        return
    ends = [start + tensor.numel() for start, tensor in zip(starts, tensors, strict=True)]
    gaps = [begin - end for end, begin in zip([0, *ends], [*starts, out.numel()], strict=True)]
    zeros = torch.zeros(max(gaps), dtype=tensors[0].dtype if tensors else out.dtype, device=out.device)
    padding = {gap: zeros[:gap] for gap in {*gaps}}  # of few different lengths
    parts = [padding[gaps[0]]]
    for tensor, gap in zip(tensors, gaps[1:], strict=True):
        parts.append(tensor if tensor.dim() == 1 else tensor.view(-1))
        if gap:
            parts.append(padding[gap])
    torch.cat(parts, out=out)


def unflatten(flat: Tensor, starts: Sequence[int], outs: Sequence[Tensor]) -> None:
    """See ``operations.unflatten``."""
    if outs:
        torch._foreach_copy_(list(outs), _views(flat, starts, outs))


def _views(flat: Tensor, starts: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    return [flat[start : start + each.numel()].view(each.shape) for start, each in zip(starts, like, strict=True)]


def ordered_sum(
    terms: Sequence[Tensor],
    out: Tensor,
    *,
    total: Tensor | None = None,
    divisor: float = 1,
    rounded: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    nonfinite: Tensor | None = None,
) -> None:
    """See ``operations.ordered_sum``."""
    over = torch.full((), divisor, dtype=torch.float32, device=out.device)  # on CUDA a host scalar is a reciprocal
    for part in chunks(out.numel()):
        place = out[part]
        found = _tree([term[part] for term in terms], reduce_dtype, place if total is None else None)
        wide = place if place.dtype is torch.float32 else torch.empty_like(found)
        if total is not None:
            found = torch.add(total[part].float(), found, out=wide)
        if divisor != 1:
            found = torch.div(found, over, out=wide)
        if rounded is not torch.float32 and rounded is not place.dtype:
            found = found.to(rounded)
        if found.data_ptr() != place.data_ptr() or found.dtype is not place.dtype:
            place.copy_(found)
        if nonfinite is not None:
            nonfinite |= ~torch.isfinite(place).all()


def _tree(terms: list[Tensor], dtype: torch.dtype, place: Tensor | None) -> Tensor:
    """Return the terms added pair by pair, each sum rounded to ``dtype``; fp32. A single term is returned widened.

    place: memory for the last sum if it is fp32; it may be one of the terms.
    """
    level = [term.float() for term in terms]
    while len(level) > 1:
        last = place if len(level) == 2 and place is not None and place.dtype is torch.float32 else None
        sums = [torch.add(a, b, out=last) for a, b in zip(level[0::2], level[1::2], strict=False)]
        if dtype is not torch.float32:
            sums = [each.to(dtype).float() for each in sums]
        level = sums + level[2 * len(sums) :]
    return level[0]


def sum_of_squares(tensor: Tensor) -> Tensor:
    """See ``operations.sum_of_squares``."""
    blocks = [_squares(tensor[part]) for part in chunks(tensor.numel(), 4 * _CHUNK)]
    return _lanes(torch.cat(blocks)) if blocks else torch.zeros((), dtype=torch.float64, device=tensor.device)


def _squares(values: Tensor) -> Tensor:
    """Return the sums of the blocks of at most one chunk: fp64 [blocks]."""
    wide = values.double()
    wide = wide * wide
    block = LANES * ROWS
    whole = wide.numel() // block
    sums = [_pairs(_rows(wide[: whole * block].view(whole, ROWS, LANES)))] if whole else []
    if wide.numel() > whole * block:
        sums.append(_lanes(wide[whole * block :]).view(1))
    return torch.cat(sums)


def _lanes(values: Tensor) -> Tensor:
    """Return the sum of [Note: Sum of squares] over rows of lanes, for any number of rows: 0-dim."""
    lanes = min(LANES, 1 << (values.numel() - 1).bit_length())  # lanes that are all zeros add nothing
    padded = torch.cat([values, values.new_zeros(-values.numel() % lanes)])
    return _pairs(_rows(padded.view(1, -1, lanes)))[0]


def _rows(blocks: Tensor) -> Tensor:
    """Return [blocks, rows, lanes] → [blocks, lanes], rows added first to last."""
    total = blocks[:, 0].clone()
    for row in range(1, blocks.shape[1]):
        total += blocks[:, row]
    return total


def _pairs(lanes: Tensor) -> Tensor:
    """Return [blocks, lanes] → [blocks], neighbours added pair by pair; lanes: a power of two."""
    while lanes.shape[1] > 1:
        lanes = lanes[:, 0::2] + lanes[:, 1::2]
    return lanes[:, 0]


def norm_from_squares(partials: Tensor, loss_scale: float = 1.0) -> Tensor:
    """Return the norm from fp64 partial sums of squares, rounded once to fp32 (0-dim).

    partials: one per rank, added as lanes are · loss_scale: the factor that the gradients were multiplied with; the
    norm is that of the gradients without it.
    """
    total = _lanes(partials)
    return (total.sqrt() / torch.full_like(total, loss_scale)).float()


def power_sum(tensor: Tensor, order: float) -> Tensor:
    """Return the sum of the magnitudes to the power ``order``, added in fp64, or for inf the largest one.

    The result is 0-dim fp64, and NaN if an element is NaN. The largest magnitude is exact.
    """
    if not tensor.numel():
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    if order == math.inf:
        least, most = tensor.aminmax()
        return torch.maximum(-least, most).double()
    found = [tensor[part].double().abs_().pow_(order).sum() for part in chunks(tensor.numel(), 4 * _CHUNK)]
    return torch.stack(found).sum()


def join_powers(rows: Tensor, order: float) -> Tensor:
    """Return the ``power_sum`` of a whole from those of its parts: [parts, …] → […]."""
    return rows.amax(dim=0) if order == math.inf else rows.sum(dim=0)


def norm_from_powers(power: Tensor, order: float, loss_scale: float = 1.0) -> Tensor:
    """Return the norm of that order, without the loss scale, from a ``power_sum``; rounded once to fp32."""
    root = power if order == math.inf else power.pow(1 / order)
    return (root / torch.full_like(root, loss_scale)).float()


def gradient_factor(norm: Tensor, max_norm: float, loss_scale: float) -> Tensor:
    """Return the factor of gradients: min(1, max_norm / (norm + 1e-6)) / loss_scale; 0-dim fp32 beside ``norm``.

    norm: of the gradients without the loss scale · max_norm: 0 for no clipping.
    """
    factor = torch.ones_like(norm)
    if max_norm:
        factor = (torch.full_like(norm, max_norm) / (norm + 1e-6)).clamp(max=1.0)
    return factor / torch.full_like(norm, loss_scale)
