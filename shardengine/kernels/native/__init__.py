"""The operations on a CPU, in a C++ library that any g++ or clang++ builds at its first use: the reference's bits.

``load`` returns the library, or None; without a library nothing in here but ``load`` may be called. Operations without
a native body (``unflatten``, fp64, tensors that are not contiguous) stay torch's. Must not know: who calls.

    source/      C++ with a C interface, no headers of torch or Python; compiled once per instruction set in one library
    build.py     source → library file, cached
    library.py   library file → functions; the instruction set; SHARDENGINE_NATIVE
    calls.py     tensors → arguments
    processor.py a second opinion on the processor, for `shardengine env`
"""

from shardengine.kernels.native.calls import (
    compress,
    crc32,
    decompress,
    direction_of_slice,
    exact_sum_of_squares,
    flatten,
    ordered_sum,
    residual,
    squares_of_direction,
    squares_of_slice,
    step_along,
    sum_of_squares,
    update,
)
from shardengine.kernels.native.library import load
from shardengine.kernels.reference import unflatten

__all__ = [
    "compress",
    "crc32",
    "decompress",
    "direction_of_slice",
    "exact_sum_of_squares",
    "flatten",
    "load",
    "ordered_sum",
    "residual",
    "squares_of_direction",
    "squares_of_slice",
    "step_along",
    "sum_of_squares",
    "unflatten",
    "update",
]
