"""Pure functions of tensors: the arithmetic of the library, each operation declared once.

Knows no process group, no stage, no bucket. ``operations`` declares them and chooses who carries them out;
``reference``, ``reference_update``, ``moments``, ``compression``, ``random_bits``, ``checksums`` are the readable
implementations, ``native`` those in C++ for CPUs and ``triton`` the GPU's, with the same bits; ``meta`` is for tensors
without data. ``rules`` are the options of an update, ``spans`` the ranges of a flat tensor that share them. ``threads``
says how many the native kernels start.
"""

from shardengine.kernels.compression import Compressed
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
    compress,
    crc32,
    decompress,
    flatten,
    offer,
    ordered_sum,
    sum_of_squares,
    unflatten,
    update,
    wanted,
    withdraw,
)
from shardengine.kernels.random_bits import Noise, random_bits
from shardengine.kernels.reference import gradient_factor, norm_from_squares
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
    "Noise",
    "Offer",
    "Offers",
    "Rule",
    "Span",
    "Spans",
    "StateForm",
    "block_of",
    "bytes_per_element",
    "compress",
    "crc32",
    "decompress",
    "flatten",
    "gradient_factor",
    "misfit",
    "narrow_state",
    "norm_from_squares",
    "offer",
    "ordered_sum",
    "random_bits",
    "round_stochastically",
    "rule_for",
    "state_forms",
    "sum_of_squares",
    "unflatten",
    "update",
    "use_threads",
    "wanted",
    "widened_state",
    "withdraw",
]
