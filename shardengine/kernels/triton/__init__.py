"""Every declared operation as Triton kernels, with the bits of the torch reference.

[Note: Bits of a kernel] A kernel has the declared bits, on every GPU and under Triton's interpreter, because:
- it is launched with ``enable_fp_fusion=False``, so that a product and a sum are rounded one after the other
- divisions and roots are ``tl.div_rn`` and ``tl.sqrt_rn``; denormals are kept
- floats never go to a reduction whose order Triton is free to choose: sums are written out (a tree over ranks,
  rows for squares), or are of two terms (neighbours). Maxima, flags and integer counts are reduced: no order
  changes them
- a negation is a product with -1: 0 - x, as older versions compile it, has no -0.0

Sums over rows and columns, and directions (``factored``), stay torch's.

Nothing here waits for the device: tables go there from pinned memory, and results stay there. An operation is one
launch (``unflatten`` one per dtype of its outs, ``sum_of_squares`` two).
"""

from shardengine.kernels.factored import (
    direction_of_slice,
    exact_sum_of_squares,
    squares_of_direction,
    squares_of_slice,
    step_along,
)
from shardengine.kernels.triton.compressing import compress, decompress, residual
from shardengine.kernels.triton.copies import flatten, unflatten
from shardengine.kernels.triton.sums import ordered_sum, sum_of_squares
from shardengine.kernels.triton.updating import update

__all__ = [
    "compress",
    "decompress",
    "direction_of_slice",
    "exact_sum_of_squares",
    "flatten",
    "ordered_sum",
    "residual",
    "squares_of_direction",
    "squares_of_slice",
    "step_along",
    "sum_of_squares",
    "unflatten",
    "update",
]
