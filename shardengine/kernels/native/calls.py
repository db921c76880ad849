"""Tensors → arguments: one C call per operation. Calls that the library has no body for go to the reference.

Owns: the choice of tensors for the library: on the CPU, contiguous, fp32, bf16 or fp16, and of the length that they
claim, so that no call can touch other memory. Must not know: arithmetic.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardengine.errors import InternalError
from shardengine.kernels import checksums, compression, factored, reference, reference_update
from shardengine.kernels.compression import LEVELS, Compressed, allocated, is_as_allocated
from shardengine.kernels.factored import Factored
from shardengine.kernels.moments import BLOCK, REMAINDER, SCALE
from shardengine.kernels.native.library import (
    CodingArguments,
    CopyArguments,
    Direction,
    Library,
    RowArguments,
    SumArguments,
    UpdateArguments,
    load,
)
from shardengine.kernels.random_bits import Noise
from shardengine.kernels.rules import Rule
from shardengine.kernels.spans import Spans
from shardengine.kernels.threads import threads

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STATE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 3}
_KINDS = {"Adam": 0, "AdamW": 0, "SGD": 1, "Lion": 2}
_CPU = torch.device("cpu")
_WHOLE = 1 << 62
"""Elements per block of the table of spans: large enough for one block each."""
_STREAMED = 16 << 20
"""If ``out`` has at least as many bytes, flatten writes past the caches. Measured with 2 MB of cache per core, 260 MB
shared: with 54 MB the copy takes 0.6 to 0.7 of the time. With 16 MB the two are equal if the next operation reads the
result; below, the next operation finds it in the caches."""


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
    """See ``operations.update``."""
    library = _library()
    weight, gradient, low = flats["weight"], flats["gradient"], flats.get("low")
    states = [flats[name] for name in rule.states]
    scales = [flats[name + SCALE] for name in rule.states if flats[name].dtype is torch.uint8]
    length, remainder = weight.numel(), flats.get(REMAINDER)
    if not (
        all(_plain(tensor, length) for tensor in ([weight, gradient] if low is None else [weight, gradient, low]))
        and all(_is_flat(state, length) and state.dtype in _STATE_TYPES for state in states)
        and len({state.dtype for state in states}) < 2
        and all(_plain(scale, -(-length // BLOCK)) and scale.dtype is torch.float32 for scale in scales)
        and (remainder is None or (_is_flat(remainder, length) and weight.dtype is torch.bfloat16 and low is None))
        and not (scales and any(span.start % BLOCK for span in spans))
        and _inside(spans, length)
        and (factor is None or (factor.dtype is torch.float32 and factor.is_cpu))
        and (skip is None or (skip.dtype is torch.bool and skip.is_cpu))
        and not (noise is not None and weight.dtype is torch.float16)
    ):
        reference_update.update(flats, spans, rule, factor=factor, skip=skip, noise=noise, state_noise=state_noise)
        return
    table = spans.table(_CPU, _WHOLE)[0]
    keys = [(0, 0) if each is None else each.key for each in (noise, state_noise)]
    arguments = UpdateArguments(
        weight.data_ptr(),
        gradient.data_ptr(),
        states[0].data_ptr() if states else None,
        states[1].data_ptr() if len(states) > 1 else None,
        scales[0].data_ptr() if scales else None,
        scales[1].data_ptr() if len(scales) > 1 else None,
        None if remainder is None else remainder.data_ptr(),
        None if low is None else low.data_ptr(),
        None if factor is None else factor.data_ptr(),
        None if skip is None else skip.data_ptr(),
        table.data_ptr(),
        len(spans),
        *rule[1:9],
        _KINDS[rule.kind],
        rule.maximize,
        rule.nesterov,
        rule.first,
        _TYPES[weight.dtype],
        _TYPES[gradient.dtype],
        0 if low is None else _TYPES[low.dtype],
        _STATE_TYPES[states[0].dtype] if states else 0,
        noise is not None,
        state_noise is not None,
        *keys[0],
        *keys[1],
    )
    library.update(library.instruction_set, threads(), arguments)


def flatten(
    tensors: Sequence[Tensor], starts: Sequence[int], out: Tensor, *, scale: float = 1.0, add: bool = False
) -> None:
    """See ``operations.flatten``, which checks starts and strides."""
    dtype, length = tensors[0].dtype if tensors else out.dtype, out.numel()
    if not (_plain(out, length) and dtype in _TYPES and all(each.dtype is dtype and each.is_cpu for each in tensors)):
        reference.flatten(tensors, starts, out, scale=scale, add=add)
        return
    library, count = _library(), len(tensors)
    table = array("q", [each.data_ptr() for each in tensors])
    table.extend(starts)
    table.extend([each.numel() for each in tensors])
    address, column = table.buffer_info()[0], count * table.itemsize
    arguments = CopyArguments(
        address,
        address + column,
        address + 2 * column,
        count,
        length,
        out.data_ptr(),
        _TYPES[dtype],
        _TYPES[out.dtype],
        scale,
        add,
        out.nbytes >= _STREAMED,
    )
    library.flatten(library.instruction_set, threads(), arguments)


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
    library = _library()
    length = out.numel()
    tensors = [*terms, out] if total is None else [*terms, out, total]
    if not (
        terms
        and all(_plain(tensor, length) for tensor in tensors)
        and rounded in _TYPES
        and reduce_dtype in _TYPES
        and (nonfinite is None or (nonfinite.dtype is torch.bool and nonfinite.is_cpu))
    ):
        reference.ordered_sum(
            terms, out, total=total, divisor=divisor, rounded=rounded, reduce_dtype=reduce_dtype, nonfinite=nonfinite
        )
        return
    count = len(terms)
    addresses = (ctypes.c_void_p * count)(*[term.data_ptr() for term in terms])
    types = (ctypes.c_int32 * count)(*[_TYPES[term.dtype] for term in terms])
    arguments = SumArguments(
        ctypes.addressof(addresses),
        ctypes.addressof(types),
        count,
        length,
        None if total is None else total.data_ptr(),
        out.data_ptr(),
        None if nonfinite is None else nonfinite.data_ptr(),
        0 if total is None else _TYPES[total.dtype],
        _TYPES[out.dtype],
        _TYPES[rounded],
        _TYPES[reduce_dtype],
        divisor,
    )
    library.ordered_sum(library.instruction_set, threads(), arguments)


def sum_of_squares(tensor: Tensor) -> Tensor:
    """See ``operations.sum_of_squares``."""
    library = _library()
    if not _plain(tensor, tensor.numel()):
        return reference.sum_of_squares(tensor)
    found = library.sum_of_squares(
        library.instruction_set, threads(), tensor.data_ptr(), _TYPES[tensor.dtype], tensor.numel()
    )
    if found < 0:
        raise MemoryError("sum_of_squares: no memory for the sums of its blocks")
    return torch.full((), found, dtype=torch.float64)


def squares_of_slice(form: Factored, values: Tensor, offset: int) -> Tensor:
    """See ``operations.squares_of_slice``."""
    if not _are_rows(form, values, offset):
        return factored.squares_of_slice(form, values, offset)
    library = _library()
    found = torch.zeros(2, form.all_rows + form.all_columns, dtype=torch.float64)
    library.squares(library.instruction_set, threads(), _rows(form, values, offset, found))
    return found


def exact_sum_of_squares(values: Tensor) -> Tensor:
    """See ``operations.exact_sum_of_squares``."""
    if not (values.dtype is torch.float32 and _plain(values, values.numel())):
        return factored.exact_sum_of_squares(values)
    library, found = _library(), torch.zeros(2, dtype=torch.float64)
    library.exact_squares(library.instruction_set, threads(), values.data_ptr(), values.numel(), found.data_ptr())
    return found


def direction_of_slice(form: Factored, gradient: Tensor, offset: int, scales: Tensor, most: float) -> Tensor:
    """See ``operations.direction_of_slice``."""
    if not _are_rows(form, gradient, offset, scales):
        return factored.direction_of_slice(form, gradient, offset, scales, most)
    found = torch.empty_like(gradient)
    _direct(_rows(form, gradient, offset), Direction(scales.data_ptr(), most, found.data_ptr()))
    return found


def squares_of_direction(form: Factored, gradient: Tensor, offset: int, scales: Tensor, most: float) -> Tensor:
    """See ``operations.squares_of_direction``."""
    if not _are_rows(form, gradient, offset, scales):
        return factored.squares_of_direction(form, gradient, offset, scales, most)
    found = torch.zeros(2, dtype=torch.float64)
    _direct(_rows(form, gradient, offset), Direction(scales.data_ptr(), most), found)
    return found


def step_along(
    weight: Tensor,
    form: Factored,
    gradient: Tensor,
    offset: int,
    scales: Tensor,
    most: float,
    factors: tuple[float, float],
) -> None:
    """See ``operations.step_along``."""
    fits = weight.dtype is torch.float32 and _is_flat(weight, gradient.numel())
    if not (fits and _are_rows(form, gradient, offset, scales)):
        factored.step_along(weight, form, gradient, offset, scales, most, factors)
        return
    _direct(_rows(form, gradient, offset), Direction(scales.data_ptr(), most, weight.data_ptr(), *factors, moves=1))


def _direct(rows: RowArguments, direction: Direction, total: Tensor | None = None) -> None:
    library = _library()
    pointer = None if total is None else total.data_ptr()
    library.direction(library.instruction_set, threads(), rows, direction, pointer)


def _are_rows(form: Factored, values: Tensor, offset: int, scales: Tensor | None = None) -> bool:
    """Return whether ``values`` and ``scales`` have the form that the library reads."""
    fits = not form.scattered and 0 < values.numel() <= form.numel - offset and offset >= 0
    fits = fits and values.dtype is torch.float32 and _plain(values, values.numel())
    count = form.all_rows + form.all_columns
    return fits and (scales is None or (scales.dtype is torch.float64 and _is_flat(scales, count)))


def _rows(form: Factored, values: Tensor, offset: int, sums: Tensor | None = None) -> RowArguments:
    places = (None, None) if sums is None else (sums[0].data_ptr(), sums[1].data_ptr())
    return RowArguments(values.data_ptr(), values.numel(), offset, *form.sizes[1:], form.all_rows, *places)


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
    """See ``operations.compress``."""
    length = values.numel()
    if not (
        _plain(values, length)
        and first >= 0
        and (out is None or is_as_allocated(out, kind, length, block))
        and (saturated is None or (saturated.dtype is torch.int64 and saturated.is_cpu))
    ):
        return compression.compress(values, kind, block=block, noise=noise, first=first, saturated=saturated, out=out)
    library, made = _library(), allocated(kind, length, block, _CPU) if out is None else out
    count = {} if saturated is None else {"saturated": saturated.data_ptr()}
    drawn = {} if noise is None else {"noisy": 1, "key_0": noise.key[0], "key_1": noise.key[1]}
    library.compress(library.instruction_set, threads(), _coding(made, values, first=first, **count, **drawn))
    return made


def decompress(compressed: Compressed, out: Tensor) -> None:
    """See ``operations.decompress``."""
    if not (_plain(out, compressed.length) and _whole(compressed)):
        compression.decompress(compressed, out)
        return
    library = _library()
    library.decompress(library.instruction_set, threads(), _coding(compressed, out))


def residual(values: Tensor, compressed: Compressed, out: Tensor, *, divisor: float = 1.0) -> None:
    """See ``operations.residual``."""
    fits = all(_plain(each, compressed.length) and each.dtype is torch.float32 for each in (values, out))
    if not (fits and _whole(compressed)):
        compression.residual(values, compressed, out, divisor=divisor)
        return
    library = _library()
    arguments = _coding(compressed, out, whole=values.data_ptr(), divisor=divisor)
    library.decompress(library.instruction_set, threads(), arguments)


def _whole(compressed: Compressed) -> bool:
    """Return whether the library may read it."""
    there = all(each is None or each.is_cpu for each in compressed[3:])
    return there and is_as_allocated(compressed, *compressed[:3])


def _coding(compressed: Compressed, wide: Tensor, **options: float) -> CodingArguments:
    """Return the arguments of a call. options: further fields; fields that are left out are zero."""
    kind, length, block, values, scales = compressed
    levels = LEVELS.get(kind, 0)
    return CodingArguments(
        wide=wide.data_ptr(),
        codes=values.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        count=length,
        block=block,
        wide_type=_TYPES[wide.dtype],
        code_type=0 if levels else _TYPES[values.dtype],
        levels=levels,
        **options,
    )


def crc32(data: memoryview, value: int = 0) -> int:
    """See ``operations.crc32``."""
    library = _library()
    if not library.fast_crc32 or data.readonly or not data.nbytes:  # ctypes gives no address of read-only memory
        return checksums.crc32(data, value)
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    found: int = library.crc32(library.instruction_set, value, address, data.nbytes)
    return found


def _library() -> Library:
    library = load()
    if library is None:
        raise InternalError("native kernels were called where there is no library")
    return library


def _plain(tensor: Tensor, length: int) -> bool:
    """Return whether the library may use the tensor's address."""
    return tensor.dtype in _TYPES and _is_flat(tensor, length)


def _is_flat(tensor: Tensor, length: int) -> bool:
    return tensor.numel() == length and tensor.is_cpu and tensor.is_contiguous()


def _inside(spans: Spans, length: int) -> bool:
    """Return whether all spans lie in ``length`` elements. They ascend, so the outer edges suffice."""
    return not spans or (spans[0].start >= 0 and spans[-1].end <= length)
