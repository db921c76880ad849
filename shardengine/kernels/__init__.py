"""Pure functions of tensors: the arithmetic of the library, each operation declared once.

Knows no process group, no stage, no bucket. ``operations`` declares the operations and chooses an implementation.
``reference``, ``reference_update``, ``moments``, ``factored``, ``compression``, ``random_bits`` and ``checksums`` are
the readable implementations. ``native`` is C++ for CPUs and ``triton`` is for GPUs, with the same bits; ``meta`` is for
tensors without data. ``rules`` has the numbers of an update, ``spans`` the ranges of a flat tensor that share them.
``threads`` has the number of threads of the native kernels.
"""

from shardengine.kernels.compression import Compressed
from shardengine.kernels.factored import Factored, join_sums, sum_over
from shardengine.kernels.moments import (
    KEPT_IN,
    REMAINDER,
    REMAINDER_FORM,
    StateForm,
    block_of,
    bytes_per_element,
    misfit,
    narrow_state,
    state_forms,
    widened_state,
)
from shardengine.kernels.operations import (
    Offer,
    Offers,
    Report,
    compress,
    crc32,
    decompress,
    direction_of_slice,
    exact_sum_of_squares,
    flatten,
    has_values,
    offer,
    ordered_sum,
    residual,
    squares_of_direction,
    squares_of_slice,
    step_along,
    sum_of_squares,
    unflatten,
    update,
    wanted,
    withdraw,
    without_values,
)
from shardengine.kernels.random_bits import Noise, random_bits
from shardengine.kernels.reference import (
    gradient_factor,
    join_powers,
    norm_from_powers,
    norm_from_squares,
    power_sum,
)
from shardengine.kernels.reference_update import round_stochastically
from shardengine.kernels.rules import STATE_NAMES, Rule, rule_for
from shardengine.kernels.spans import Span, Spans
from shardengine.kernels.threads import use_threads

__all__ = [
    "KEPT_IN",
    "REMAINDER",
    "REMAINDER_FORM",
    "STATE_NAMES",
    "Compressed",
    "Factored",
    "Noise",
    "Offer",
    "Offers",
    "Report",
    "Rule",
    "Span",
    "Spans",
    "StateForm",
    "block_of",
    "bytes_per_element",
    "compress",
    "crc32",
    "decompress",
    "direction_of_slice",
    "exact_sum_of_squares",
    "flatten",
    "gradient_factor",
    "has_values",
    "join_powers",
    "join_sums",
    "misfit",
    "narrow_state",
    "norm_from_powers",
    "norm_from_squares",
    "offer",
    "ordered_sum",
    "power_sum",
    "random_bits",
    "residual",
    "round_stochastically",
    "rule_for",
    "squares_of_direction",
    "squares_of_slice",
    "state_forms",
    "step_along",
    "sum_of_squares",
    "sum_over",
    "unflatten",
    "update",
    "use_threads",
    "wanted",
    "widened_state",
    "withdraw",
    "without_values",
]
