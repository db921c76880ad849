"""Pure functions of tensors: the arithmetic of the library, each operation declared once.

Knows no process group, no stage, no bucket. ``reference`` is the readable torch implementation; faster ones per device
join it under the same names and must give the same bits.
"""

from shardengine.kernels.reference import (
    adam_step,
    clip_divisor,
    divide,
    lion_step,
    norm_from_squares,
    round_to,
    sgd_step,
    store_gradient,
    sum_of_squares,
    tree_sum,
)

__all__ = [
    "adam_step",
    "clip_divisor",
    "divide",
    "lion_step",
    "norm_from_squares",
    "round_to",
    "sgd_step",
    "store_gradient",
    "sum_of_squares",
    "tree_sum",
]
