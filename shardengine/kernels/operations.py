"""Every operation of the library, declared once: its contract, whatever the implementation.

An operation checks its tensors only as far as is needed not to corrupt memory: they are the engine's own. All are flat
and contiguous unless stated otherwise, and lie on one device: ValueError if one of the first few does not.
``implementation`` chooses: ``reference`` and its neighbours in torch, ``native``'s C++ on a CPU, Triton kernels on a
GPU. All give the same bits. For tensors without values ``meta`` checks more and computes nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardengine.errors import UsageError
from shardengine.kernels import checksums, compression, factored, meta, reference, reference_update
from shardengine.kernels.compression import Compressed
from shardengine.kernels.factored import Factored
from shardengine.kernels.random_bits import Noise
from shardengine.kernels.rules import Rule
from shardengine.kernels.spans import Spans

_CHOICES = ("auto", "reference", "native", "triton")
_ASKED = 8
"""The number of tensors of a call whose device is checked, which takes 0.1 µs each."""


class _Without(threading.local):
    """Per thread: the implementations of the ``without_values`` blocks that are open, the innermost last."""

    def __init__(self) -> None:
        self.open: list[Any] = []


_without = _Without()
"""The open ``without_values`` blocks of the current thread."""
_withdrawn: set[str] = set()
"""Types of device on which some other rank lacks our kernels, so that this rank does not use its own."""


class Offer(IntEnum):
    """The capability of a rank on one type of device, before all ranks agree on an implementation for it.

    TORCH: torch alone · OWN: our kernels, or torch · REQUIRED: our kernels only, as its environment demands · FAILED:
    torch alone, because a first launch has failed.
    """

    TORCH = 0
    OWN = 1
    REQUIRED = 2
    FAILED = 3


class Offers(NamedTuple):
    """A rank's offers, for its CPU and for its device, which may be the CPU.

    problem: the failure, "" if there is none.
    """

    cpu: Offer
    device: Offer
    problem: str = ""

    @property
    def packed(self) -> int:
        """Both offers in four bits."""
        return self.cpu | self.device << 2

    @staticmethod
    def unpacked(packed: int) -> Offers:
        """Return the offers that ``packed`` holds, without the problem."""
        return Offers(Offer(packed & 3), Offer(packed >> 2))


@functools.cache
def wanted() -> str:
    """Return the value of SHARDENGINE_KERNELS, "auto" if it is unset. Raises UsageError for an unknown value."""
    choice = os.environ.get("SHARDENGINE_KERNELS") or "auto"
    if choice not in _CHOICES:
        raise UsageError(
            f"SHARDENGINE_KERNELS: expected one of {', '.join(_CHOICES)}, got {choice!r}", code="kernels-choice-unknown"
        )
    return choice


@functools.cache
def _native() -> ModuleType | None:
    module = importlib.import_module("shardengine.kernels.native")
    if module.load() is not None:
        return module
    if wanted() == "native":
        raise UsageError(
            "SHARDENGINE_KERNELS=native, but the native kernels could not be built: run with "
            "SHARDENGINE_NATIVE=require to see "
            "the compiler's error",
            code="kernels-native-unavailable",
        )
    return None


def implementation(device: torch.device) -> ModuleType | None:
    """Return the module of native or Triton kernels that serves ``device``, or None if torch does.

    The environment variable SHARDENGINE_KERNELS is "reference" (torch on every device), "triton" (on every device; on a
    CPU it needs Triton's interpreter, TRITON_INTERPRET=1), "native" (on CPUs; an error if it is not available) or
    "auto": Triton on GPUs, native on CPUs if it is available. Each module is imported here, at its first use: on a CPU
    Triton never is. SHARDENGINE_NATIVE and SHARDENGINE_ISA are ``native.library``'s. Ranks of one engine agree
    (``offer``).
    """
    if _without.open:
        module: ModuleType = _without.open[-1]
        return module
    if device.type == "meta":
        return meta
    if _is_tritons(device.type):
        return importlib.import_module("shardengine.kernels.triton")
    if wanted() in ("native", "auto") and device.type == "cpu" and device.type not in _withdrawn:
        return _native()
    return None


Report = Callable[[str, Mapping[str, Any], Any], None]
"""Called for each operation, with its name, its arguments by name, and its result."""


class _Reporting:
    """The operations of ``meta``, each reported when it is over."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def __getattr__(self, name: str) -> Callable[..., Any]:
        carry_out = getattr(meta, name)
        names = list(inspect.signature(carry_out).parameters)

        def reporting(*args: Any, **kwargs: Any) -> Any:
            result = carry_out(*args, **kwargs)
            given = dict(zip(names, args, strict=False))
            given |= {each: kwargs[each] for each in names if each in kwargs}
            self._report(name, given, result)
            return result

        setattr(self, name, reporting)  # the next lookup finds it
        return reporting


@contextmanager
def without_values(report: Report | None = None) -> Iterator[None]:
    """Carry out operations with ``meta`` inside, in this thread: tensors on any device have shapes and no values.

    report: called for each operation, since none of them is an operation of torch inside.
    """
    _without.open.append(meta if report is None else _Reporting(report))
    try:
        yield
    finally:
        _without.open.pop()


def has_values() -> bool:
    """Return whether tensors have values, so that they have addresses and can be computed with."""
    return not _without.open


def _is_tritons(device_type: str) -> bool:
    chosen = wanted() == "triton" or (wanted() == "auto" and device_type == "cuda")
    return chosen and device_type not in _withdrawn


def _named() -> bool:
    """Return whether the environment asks for Triton's kernels by name."""
    return wanted() == "triton"


def offer(device: torch.device, trial: Callable[[], None]) -> Offers:
    """Return the capabilities of this process on its CPU and on ``device``.

    Builds and loads the native library if allowed. trial: calls operations on ``device`` as training will; if they are
    Triton's it is called here, which compiles them. Raises UsageError if the environment asks for kernels by name that
    are not available.
    """
    _withdrawn.clear()  # by ranks of an earlier engine
    if device.type == "cpu":
        own, problem = _offer_of(device, trial)
        return Offers(own, own, problem)
    own, problem = _offer_of(device, trial)
    return Offers(_offer_of(torch.device("cpu"), None)[0], own, problem)


def _offer_of(device: torch.device, trial: Callable[[], None] | None) -> tuple[Offer, str]:
    choice = wanted()
    if trial is not None and _is_tritons(device.type):
        try:
            trial()
        except Exception as error:
            if _named() and isinstance(error, UsageError):
                raise  # its message names the missing part
            problem = f"{type(error).__name__}: {error}"
            if _named():
                raise UsageError(
                    f"SHARDENGINE_KERNELS=triton: a first launch of Triton's kernels on {device} failed ({problem}). "
                    "They need a C compiler and Python's headers; unset it to use torch instead, with the same bits",
                    code="kernels-triton-launch-failed",
                ) from error
            return Offer.FAILED, problem
        return (Offer.REQUIRED if _named() else Offer.OWN), ""
    if device.type != "cpu" or choice not in ("native", "auto") or _native() is None:
        return Offer.TORCH, ""
    required = choice == "native" or os.environ.get("SHARDENGINE_NATIVE") == "require"
    return (Offer.REQUIRED if required else Offer.OWN), ""


def withdraw(device_type: str, withdrawn: bool) -> None:
    """Set whether torch does the work on devices of this type although our kernels are available.

    The bits are the same.
    """
    (_withdrawn.add if withdrawn else _withdrawn.discard)(device_type)


def _require_one_device(operation: str, device: torch.device, tensors: Iterable[Tensor | None]) -> None:
    """Check the first few tensors: an address of another device would be read as one of this device."""
    for tensor in itertools.islice(tensors, _ASKED):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{operation}: expected all tensors on one device, {device}, got one on {tensor.device}")


def flatten(
    tensors: Sequence[Tensor], starts: Sequence[int], out: Tensor, *, scale: float = 1.0, add: bool = False
) -> None:
    """Copy ``tensors[i]`` to ``out`` from ``starts[i]`` (ascending) on, times ``scale`` in fp32, rounded once.

    The tensors are contiguous, of any shape and one dtype. All elements of ``out`` between them become zero. One launch
    for all of them. add: add them to ``out``, each sum in fp32 and rounded once; the elements between them are left
    alone.
    """
    end = 0
    for tensor, start in zip(tensors, starts, strict=True):
        if not tensor.is_contiguous():
            raise ValueError(f"flatten: expected contiguous tensors, got strides {tensor.stride()}")
        if start < end:
            end = out.numel() + 1
            break
        end = start + tensor.numel()
    if end > out.numel():
        raise ValueError(f"flatten: expected ascending starts inside of {out.numel()} elements, got {list(starts)}")
    _require_one_device("flatten", out.device, tensors)
    (implementation(out.device) or reference).flatten(tensors, starts, out, scale=scale, add=add)


def unflatten(flat: Tensor, starts: Sequence[int], outs: Sequence[Tensor]) -> None:
    """Copy from ``flat`` to each of ``outs`` (contiguous, any shape and dtype) its elements, rounded once."""
    if any(not 0 <= start <= flat.numel() - out.numel() for start, out in zip(starts, outs, strict=True)):
        raise ValueError(f"unflatten: expected starts inside of {flat.numel()} elements, got {list(starts)}")
    _require_one_device("unflatten", flat.device, outs)
    (implementation(flat.device) or reference).unflatten(flat, starts, outs)


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
    """``out`` = (``total`` + the terms in tree order) / ``divisor``, rounded to ``rounded`` and to its own dtype.

    terms: one per rank, as long as ``out``, any floating dtype; the tree ((0+1)+(2+3))+… adds in fp32, each of its sums
    is rounded to ``reduce_dtype`` · total: the sum of earlier micro-batches, or None. ``out`` may be ``total`` or one
    of the terms. nonfinite: 0-dim bool, becomes True if a result is not finite, and is left alone otherwise.
    """
    _require_one_device("ordered_sum", out.device, (total, nonfinite, *terms))
    module = implementation(out.device) or reference
    module.ordered_sum(
        terms, out, total=total, divisor=divisor, rounded=rounded, reduce_dtype=reduce_dtype, nonfinite=nonfinite
    )


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares, fp64, 0-dim, on its device, in the order of reference: [Note: Sum of squares].

    It is finite exactly if every element is (the square of an fp32 number cannot overflow fp64), so this one pass is
    also the finite check.
    """
    return (implementation(tensor.device) or reference).sum_of_squares(tensor)


def squares_of_slice(form: Factored, values: Tensor, offset: int) -> Tensor:
    """Return the part of elements [offset, offset + n) in the sums of squares: fp64 [2, all_rows + all_columns].

    These are the sums and their errors, as in factored: [Note: Exact sums]. values: fp32 [n].
    """
    module = factored if form.scattered else implementation(values.device) or factored
    return module.squares_of_slice(form, values, offset)


def exact_sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of the squares and its error: fp32 [n] → fp64 [2]."""
    return (implementation(values.device) or factored).exact_sum_of_squares(values)


def direction_of_slice(form: Factored, gradient: Tensor, offset: int, scales: Tensor, most: float) -> Tensor:
    """Return elements [offset, offset + n) times min(``most``, their row's scale times their column's).

    Each product is rounded once to fp32. gradient: fp32 [n] · scales: fp64 [all_rows + all_columns].
    """
    module = factored if form.scattered else implementation(gradient.device) or factored
    return module.direction_of_slice(form, gradient, offset, scales, most)


def step_along(
    weight: Tensor,
    form: Factored,
    gradient: Tensor,
    offset: int,
    scales: Tensor,
    most: float,
    factors: tuple[float, float],
) -> None:
    """weight = weight · keep - ``direction_of_slice`` · rate, each of the three operations rounded to fp32.

    weight: fp32 [n] · factors: keep, rate.
    """
    module = factored if form.scattered else implementation(gradient.device) or factored
    module.step_along(weight, form, gradient, offset, scales, most, factors)


def squares_of_direction(form: Factored, gradient: Tensor, offset: int, scales: Tensor, most: float) -> Tensor:
    """Return the ``exact_sum_of_squares`` of ``direction_of_slice``."""
    module = factored if form.scattered else implementation(gradient.device) or factored
    return module.squares_of_direction(form, gradient, offset, scales, most)


def update(
    flats: Mapping[str, Tensor],
    spans: Spans,
    rule: Rule,
    *,
    factor: Tensor | None = None,
    skip: Tensor | None = None,
    noise: Noise | None = None,
    state_noise: Noise | None = None,
) -> None:
    """One optimizer step of the elements in ``spans``, as in reference_update: [Note: One update].

    flats: tensors of one length: "weight" (fp32, or bf16 if there is no master weight), "gradient" (fp32, bf16 or fp16;
    not changed), ``rule.states`` and, if wanted, "low", which takes the weight rounded to its dtype. A state is fp32,
    bf16, or uint8 with its scales (fp32, one for 256 elements) under its name + ``moments.SCALE``: then spans are of
    single parameters, begin at multiples of 256, and end at such a multiple or with their parameter. Beside a bf16
    "weight" may be its "remainder", int8 (moments: [Note: Remainders]); then there is no "low".

    factor: 0-dim fp32, multiplied with the gradient · skip: 0-dim bool; if True nothing is written, decided on the
    device · noise: rounds a bf16 weight stochastically · state_noise: the same for states that are not fp32 and for
    remainders. Elements are numbered by ``Span.first``.
    """
    device = flats["weight"].device
    _require_one_device("update", device, (factor, skip, *flats.values()))
    module = implementation(device) or reference_update
    module.update(flats, spans, rule, factor=factor, skip=skip, noise=noise, state_noise=state_noise)


def crc32(data: memoryview, value: int = 0) -> int:
    """Return the CRC-32, as in zlib, of contiguous bytes that follow others whose CRC-32 is ``value``.

    It detects every change of up to 32 neighbouring bits, and misses one in 2**32 of the others; it is no signature.
    """
    module = _native() if not checksums.FASTEST and wanted() in ("native", "auto") else None
    found: int = (module or checksums).crc32(data, value)
    return found


def compress(
    values: Tensor,
    kind: str,
    *,
    block: int = 256,
    noise: Noise | None = None,
    first: int = 0,
    saturated: Tensor | None = None,
    out: Compressed | None = None,
) -> Compressed:
    """Return ``values`` as "fp16", "bf16", "int8" or "int4".

    Integers are in blocks of ``block`` elements with a scale each, as in compression: [Note: Blocks of integers]. A
    float that would overflow becomes the largest finite one and is counted in ``saturated`` (0-dim int64); infinities
    and NaN are kept. noise: rounds integers stochastically, keyed by the number of the element, which is ``first`` for
    values[0]. Shards are compressed as the whole would be if they are cut at multiples of ``block``. out: memory for
    the result, which may be parts of a message; it is returned.
    """
    if kind not in compression.FLOATS and kind not in compression.LEVELS:
        raise ValueError(f"compress: expected fp16, bf16, int8 or int4, got {kind!r}")
    _require_block("compress", block)
    if out is not None and not compression.is_as_allocated(out, kind, values.numel(), block):
        raise ValueError(
            f"compress: expected out as it would come back, for {kind!r}, {values.numel()} elements and a block of "
            f"{block}, contiguous, got {_described(out)}"
        )
    _require_one_device("compress", values.device, (saturated, *(out or ())[3:]))
    module = implementation(values.device) or compression
    return module.compress(values, kind, block=block, noise=noise, first=first, saturated=saturated, out=out)


def decompress(compressed: Compressed, out: Tensor) -> None:
    """Write the decompressed values to ``out``, rounded to its dtype."""
    _require_block("decompress", compressed.block)
    _require_one_device("decompress", out.device, (compressed.values, compressed.scales))
    (implementation(out.device) or compression).decompress(compressed, out)


def residual(values: Tensor, compressed: Compressed, out: Tensor, *, divisor: float = 1.0) -> None:
    """``out`` = the error of ``compressed``: values - ``decompress``, 0 if that is not finite, / ``divisor``.

    Each operation is rounded to fp32. values, out: fp32, different memory.
    """
    _require_block("residual", compressed.block)
    _require_one_device("residual", out.device, (values, compressed.values, compressed.scales))
    (implementation(out.device) or compression).residual(values, compressed, out, divisor=divisor)


def _require_block(operation: str, block: int) -> None:
    if block < 2 or block % 2:
        raise ValueError(f"{operation}: expected an even block of at least 2 elements, got {block}")


def _described(compressed: Compressed) -> str:
    tensors = [None if each is None else (tuple(each.shape), each.dtype) for each in compressed[3:]]
    return f"{compressed.kind!r}, {compressed.length} elements and a block of {compressed.block} in {tensors}"
