"""The library in this process: loaded once, checked before it is used, with one instruction set.

Owns: SHARDENGINE_NATIVE and SHARDENGINE_ISA, the C functions and structures. Must not know: tensors, how it is built.
The structures have the fields of source/arguments.h in the same order.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
from typing import Any, NamedTuple

from shardengine.errors import UsageError
from shardengine.kernels.native import build

MODES = ("auto", "off", "require")
INSTRUCTION_SETS = ("scalar", "avx2", "avx512", "neon")
_log = logging.getLogger(__name__)


class UpdateArguments(ctypes.Structure):
    """One call of ``shardengine_update``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "gradient", "average", "square")),
        *((name, ctypes.c_void_p) for name in ("average_scale", "square_scale", "remainder", "low")),
        *((name, ctypes.c_void_p) for name in ("factor", "skip", "spans")),
        ("span_count", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("rate", "decay", "l2", "keep", "take")),
        *((name, ctypes.c_float) for name in ("keep_square", "take_square", "epsilon")),
        *((name, ctypes.c_int32) for name in ("kind", "maximize", "nesterov", "first_step")),
        *((name, ctypes.c_int32) for name in ("weight_type", "gradient_type", "low_type", "state_type")),
        *((name, ctypes.c_int32) for name in ("stochastic", "state_stochastic")),
        *((name, ctypes.c_uint32) for name in ("key_0", "key_1", "state_key_0", "state_key_1")),
    )


class SumArguments(ctypes.Structure):
    """One call of ``shardengine_ordered_sum``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("terms", "types")),
        *((name, ctypes.c_int64) for name in ("count", "length")),
        *((name, ctypes.c_void_p) for name in ("total", "out", "nonfinite")),
        *((name, ctypes.c_int32) for name in ("total_type", "out_type", "rounded_type", "reduce_type")),
        ("divisor", ctypes.c_float),
    )


class RowArguments(ctypes.Structure):
    """A slice, for ``shardengine_squares`` and ``shardengine_direction``."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "offset", "rows", "columns", "all_rows")),
        *((name, ctypes.c_void_p) for name in ("sums", "lacks")),
    )


class Direction(ctypes.Structure):
    """The scales and the output of ``shardengine_direction``."""

    _fields_ = (
        ("scales", ctypes.c_void_p),
        ("most", ctypes.c_double),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("keep", "rate")),
        ("moves", ctypes.c_int32),
    )


class CopyArguments(ctypes.Structure):
    """One call of ``shardengine_flatten``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("addresses", "starts", "lengths")),
        *((name, ctypes.c_int64) for name in ("count", "length")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("type", "out_type")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("adds", "streams")),
    )


class CodingArguments(ctypes.Structure):
    """One call of ``shardengine_compress`` or ``shardengine_decompress``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("wide", "codes", "scales", "whole", "saturated")),
        *((name, ctypes.c_int64) for name in ("count", "block", "first")),
        *((name, ctypes.c_int32) for name in ("wide_type", "code_type", "levels")),
        ("divisor", ctypes.c_float),
        ("noisy", ctypes.c_int32),
        *((name, ctypes.c_uint32) for name in ("key_0", "key_1")),
    )


class Library(NamedTuple):
    """The C functions.

    number_of: the name of an instruction set → its number, negative if it cannot be used. The other functions take such
    a number first, as a rule ``instruction_set``, and then the number of threads; crc32 takes none. fast_crc32: whether
    it is faster than Python's.
    """

    instruction_set: int
    number_of: Any
    update: Any
    ordered_sum: Any
    sum_of_squares: Any
    crc32: Any
    squares: Any
    exact_squares: Any
    direction: Any
    flatten: Any
    compress: Any
    decompress: Any
    fast_crc32: bool


class _Unusable(Exception):
    """The library is not available here; the message gives the reason. Never leaves this file."""


@functools.cache
def load() -> Library | None:
    """Return the library, or None if torch has to do the work; the reason is logged once, on rank 0.

    Raises UsageError if SHARDENGINE_NATIVE is "require" and there is no library, and for unknown values.
    """
    mode = os.environ.get("SHARDENGINE_NATIVE", "auto")
    if mode not in MODES:
        raise UsageError(
            f"SHARDENGINE_NATIVE: expected one of {', '.join(MODES)}, got {mode!r}", code="kernels-native-mode-unknown"
        )
    if mode == "off":
        return None
    try:
        return _bound(_opened())
    except _Unusable as error:
        if mode == "require":
            raise UsageError(
                f"SHARDENGINE_NATIVE=require: the native CPU kernels cannot be had: {error}. Install g++ or clang++ "
                "(or name one in CXX), or set SHARDENGINE_NATIVE=auto to use torch, with the same bits",
                code="kernels-native-unavailable",
            ) from error
        if os.environ.get("RANK", "0") == "0":
            _log.warning("CPU kernels: torch does their work, slower and with the same bits: %s", error)
        return None


def _opened() -> ctypes.CDLL:
    """Return the loaded library."""
    built = build.library()
    try:
        return _checked(built)
    except _Unusable:
        if built.path is None or built.path.parent != build.PREBUILT:
            raise
    return _checked(build.library(shipped=False))  # the shipped one needs a newer C library


def _checked(built: build.Built) -> ctypes.CDLL:
    """Load the library and check that it was made from the source beside this file."""
    if built.path is None:
        raise _Unusable(built.problem)
    try:
        opened = ctypes.CDLL(str(built.path))
        opened.shardengine_key.restype = ctypes.c_char_p
        opened.shardengine_sizes.restype = ctypes.c_int64
        key, sizes = opened.shardengine_key().decode(), opened.shardengine_sizes()
    except (OSError, AttributeError) as error:
        raise _Unusable(f"{built.path} does not load: {error}") from error
    finally:
        if built.temporary:  # a loaded library needs its file no more
            shutil.rmtree(built.path.parent, ignore_errors=True)
    structures = (UpdateArguments, SumArguments, RowArguments, Direction, CopyArguments, CodingArguments)
    expected = functools.reduce(lambda sizes, each: sizes << 8 | ctypes.sizeof(each) // 8, structures, 0)
    if (key, sizes) != (build.source_key(), expected):
        raise _Unusable(f"{built.path} says that it is {key} with structures {sizes:x}, expected {expected:x}")
    return opened


def _bound(opened: ctypes.CDLL) -> Library:
    number_of, update = opened.shardengine_instruction_set, opened.shardengine_update
    ordered_sum, squares = opened.shardengine_ordered_sum, opened.shardengine_sum_of_squares
    crc32 = opened.shardengine_crc32
    number_of.argtypes = (ctypes.c_char_p,)
    update.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(UpdateArguments))
    ordered_sum.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(SumArguments))
    squares.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64)
    crc32.argtypes = (ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64)
    update.restype, ordered_sum.restype, squares.restype = None, None, ctypes.c_double
    crc32.restype = ctypes.c_uint32
    of_rows, exactly, direction = (
        opened.shardengine_squares, opened.shardengine_exact_squares, opened.shardengine_direction,
    )  # fmt: skip
    counts, pointer = (ctypes.c_int, ctypes.c_int), ctypes.c_void_p
    of_rows.argtypes = (*counts, ctypes.POINTER(RowArguments))
    exactly.argtypes = (*counts, pointer, ctypes.c_int64, pointer)
    direction.argtypes = (*counts, ctypes.POINTER(RowArguments), ctypes.POINTER(Direction), pointer)
    of_rows.restype, exactly.restype, direction.restype = None, None, None
    flatten, compress = opened.shardengine_flatten, opened.shardengine_compress
    decompress = opened.shardengine_decompress
    flatten.argtypes = (*counts, ctypes.POINTER(CopyArguments))
    compress.argtypes = decompress.argtypes = (*counts, ctypes.POINTER(CodingArguments))
    flatten.restype, compress.restype, decompress.restype = None, None, None
    name = os.environ.get("SHARDENGINE_ISA", "")
    if name and name not in INSTRUCTION_SETS:
        raise UsageError(
            f"SHARDENGINE_ISA: expected one of {', '.join(INSTRUCTION_SETS)}, got {name!r}", code="kernels-isa-unknown"
        )
    chosen = number_of(name.encode())
    if chosen < 0:
        why = "this processor lacks it" if chosen == -2 else "the library for this processor family has no such body"
        raise UsageError(
            f"SHARDENGINE_ISA={name}: {why}; leave it out to have the best one that is there",
            code="kernels-isa-unavailable",
        )
    fast_crc32 = bool(opened.shardengine_fast_crc32(chosen))
    return Library(
        chosen, number_of, update, ordered_sum, squares, crc32, of_rows, exactly, direction, flatten, compress,
        decompress, fast_crc32,
    )  # fmt: skip
