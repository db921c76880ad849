"""What every implementation of the kernels is compared with: the torch reference on the CPU, bit for bit.

A check computes an operation twice, by the reference on the CPU and by the Triton kernels on ``device`` (the CPU under
Triton's interpreter, or a GPU), from the same numbers, and compares everything that is written, and what must not be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardengine.kernels import Compressed, Noise, Rule, Spans, compression, moments, reference, reference_update
from shardengine.kernels import triton as kernels

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ONE = Noise(seed=2**40 + 7, step=3)
FIRST = (1 << 33) - 5
"""A first number whose low half overflows within a span."""

SPECIAL = torch.tensor(
    [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 1.1e-38, 9e-41, 3.4028235e38, -3.4e38,
     65504.0, 65520.0, -65519.996, 6e-8, 2.9e-8, 1.00390625, 1.01171875, 1.0, -1.0, 3.3895314e38, 3.396e38]
)  # fmt: skip
"""Zeros, infinities, NaN, denormals of all three dtypes, what rounds to infinity in fp16 or bf16 and what just
does not, ties between neighbours in bf16."""


def numbers(length: int, seed: int, dtype: torch.dtype = FP32, special: bool = True) -> Tensor:
    """Of sizes from 2^-20 to 2^20; every fourth one a special one, at random."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(length, generator=generator)
    drawn *= torch.pow(2.0, torch.randint(-20, 20, (length,), generator=generator))
    if special:
        chosen = SPECIAL[torch.randint(0, len(SPECIAL), (length,), generator=generator)]
        drawn = torch.where(torch.rand(length, generator=generator) < 0.25, chosen, drawn)
    return drawn.to(dtype)


def placed(values: Tensor, device: torch.device, offset: int = 0) -> Tensor:
    """The same numbers in the middle of a buffer on ``device``, ``offset`` elements behind an aligned address."""
    buffer = torch.full((values.numel() + 32,), 7, dtype=values.dtype, device=device)
    middle = buffer[16 + offset : 16 + offset + values.numel()]
    middle.copy_(values)
    return middle


def around(middle: Tensor, offset: int = 0) -> Tensor:
    """What of the buffer of ``placed`` lies around."""
    buffer = torch.as_strided(middle, (middle.numel() + 32,), (1,), middle.storage_offset() - 16 - offset)
    return torch.cat([buffer[: 16 + offset], buffer[16 + offset + middle.numel() :]])


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; any NaN equals any NaN."""
    a, b = a.detach().cpu(), b.detach().cpu()
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = a.contiguous().view(words) == b.contiguous().view(words)
    return bool((equal | (a.isnan() & b.isnan())).all())


def assert_same(found: Tensor, expected: Tensor, what: object = "") -> None:
    """Fails with the first few elements that differ."""
    if not same(found, expected):
        a, b = found.detach().cpu().reshape(-1), expected.detach().reshape(-1)
        different = [i for i in range(min(a.numel(), b.numel())) if not same(a[i], b[i])]
        rows = [(i, a[i].item(), b[i].item()) for i in different[:5]]
        raise AssertionError(f"{what}: {len(different)} of {b.numel()} differ; (index, found, expected): {rows}")


def check_flatten(
    device: torch.device, lengths: Sequence[int], gaps: Sequence[int], source: torch.dtype = FP32,
    out: torch.dtype = FP32, offset: int = 0, **options: Any,
) -> None:  # fmt: skip
    """gaps: zeros before each tensor, and after the last one."""
    tensors = [numbers(length, seed, source) for seed, length in enumerate(lengths)]
    starts, at = [], 0
    for length, gap in zip(lengths, gaps, strict=False):
        starts.append(at + gap)
        at += gap + length
    expected = numbers(at + gaps[-1], 99, out)
    found = placed(expected, device, offset)
    reference.flatten(tensors, starts, expected, **options)
    kernels.flatten([placed(tensor, device, offset) for tensor in tensors], starts, found, **options)
    assert_same(found, expected, (lengths, gaps, source, out, offset, options))
    assert (around(found, offset) == 7).all()


def check_unflatten(
    device: torch.device, lengths: Sequence[int], gaps: Sequence[int], dtypes: Sequence[torch.dtype],
    flat: torch.dtype = FP32, offset: int = 0,
) -> None:  # fmt: skip
    """gaps: what is skipped before each; dtypes: of the outs, in turn."""
    starts, at = [], 0
    for length, gap in zip(lengths, gaps, strict=False):
        starts.append(at + gap)
        at += gap + length
    values = numbers(at + gaps[-1], 5, flat)
    outs = [torch.zeros(length, dtype=dtypes[i % len(dtypes)]) for i, length in enumerate(lengths)]
    found = [placed(out, device, offset) for out in outs]
    reference.unflatten(values, starts, outs)
    kernels.unflatten(placed(values, device, offset), starts, found)
    for one, expected in zip(found, outs, strict=True):
        assert_same(one, expected, (lengths, gaps, dtypes, flat, offset))
        assert (around(one, offset) == 7).all()


@dataclasses.dataclass(frozen=True)
class Sum:
    """A call of ordered_sum. buffer: the terms are slices of one; alias: out is the "total" or this term."""

    count: int
    length: int
    dtype: torch.dtype = FP32
    out: torch.dtype = FP32
    total: torch.dtype | None = None
    divisor: int = 1
    rounded: torch.dtype = FP32
    reduce_dtype: torch.dtype = FP32
    nonfinite: bool = False
    buffer: bool = True
    alias: str | int | None = None
    offset: int = 0
    special: bool = True


def check_ordered_sum(device: torch.device, case: Sum) -> None:
    """The sum, the flag, and that nothing else is written."""
    terms = [numbers(case.length, seed, case.dtype, case.special) for seed in range(case.count)]
    total = None if case.total is None else numbers(case.length, 77, case.total, case.special)
    if case.buffer:
        whole = placed(torch.cat(terms), device, case.offset)
        there = list(whole.view(case.count, case.length))
    else:
        there = [placed(term, device, case.offset) for term in terms]
    total_there = None if total is None else placed(total, device, case.offset)
    out = torch.zeros(case.length, dtype=case.out)
    out_there = placed(out, device, case.offset)
    if case.alias == "total":
        assert total is not None and total_there is not None
        out, out_there = total, total_there
    elif isinstance(case.alias, int):
        out, out_there = terms[case.alias], there[case.alias]
    expected_rest = [term.clone() for term in terms]
    flag, flag_there = (torch.zeros((), dtype=torch.bool, device=where) for where in ("cpu", device))
    options = {"divisor": case.divisor, "rounded": case.rounded, "reduce_dtype": case.reduce_dtype}
    reference.ordered_sum(terms, out, total=total, nonfinite=flag if case.nonfinite else None, **options)  # type: ignore[arg-type]
    kernels.ordered_sum(
        there, out_there, total=total_there, nonfinite=flag_there if case.nonfinite else None, **options  # type: ignore[arg-type]
    )  # fmt: skip
    assert_same(out_there, out, case)
    assert_same(flag_there, flag, case)
    for number, (term, expected) in enumerate(zip(there, expected_rest, strict=True)):
        assert number == case.alias or same(term, expected), f"{case}: term {number} was written"


def check_sum_of_squares(device: torch.device, values: Tensor, offset: int = 0) -> None:
    """Against the reference; fp64, 0-dim."""
    found = kernels.sum_of_squares(placed(values, device, offset))
    assert found.shape == () and found.dtype is torch.float64 and found.device.type == device.type
    assert_same(found, reference.sum_of_squares(values), (values.numel(), values.dtype, offset))


@dataclasses.dataclass(frozen=True)
class Step:
    """A call of update. low: the dtype of the copy-out; skip: None, or what the flag holds."""

    rule: Rule
    spans: Spans
    weight: torch.dtype = FP32
    gradient: torch.dtype = FP32
    low: torch.dtype | None = None
    factor: float | None = None
    skip: bool | None = None
    noise: Noise | None = None
    special: bool = True
    offset: int = 0
    states: torch.dtype = FP32
    remainder: bool = False
    state_noise: Noise | None = None


def check_update(device: torch.device, case: Step) -> None:
    """All flat tensors, within the spans and between them."""
    length = max((span.end for span in case.spans), default=0) + 21
    flats = {
        "weight": numbers(length, 1, case.weight, case.special),
        "gradient": numbers(length, 2, case.gradient, case.special),
    }
    flats |= {name: numbers(length, 3 + i, special=case.special) for i, name in enumerate(case.rule.states)}
    if "exp_avg_sq" in flats:
        flats["exp_avg_sq"].abs_()
    for name in case.rule.states if case.states is not FP32 else ():
        values, flats[name] = flats[name], torch.zeros(length, dtype=case.states)
        if case.states is torch.uint8:
            flats[name + moments.SCALE] = torch.zeros(-(-length // moments.BLOCK))
        moments.narrow_state(values, flats, name)
    if case.remainder:
        flats[moments.REMAINDER] = (numbers(length, 9, special=False) * 40).clamp(-128, 127).to(torch.int8)
    if case.low is not None:
        flats["low"] = numbers(length, 8, case.low)
    before = {name: flat.clone() for name, flat in flats.items()}
    there = {name: placed(flat, device, case.offset) for name, flat in flats.items()}
    factor = None if case.factor is None else torch.tensor(case.factor)
    skip = None if case.skip is None else torch.tensor(case.skip)
    reference_update.update(
        flats, case.spans, case.rule, factor=factor, skip=skip, noise=case.noise, state_noise=case.state_noise
    )
    kernels.update(
        there, case.spans, case.rule, factor=None if factor is None else factor.to(device),
        skip=None if skip is None else skip.to(device), noise=case.noise, state_noise=case.state_noise,
    )  # fmt: skip
    outside = torch.ones(length, dtype=torch.bool)
    for span in case.spans:
        outside[span.start : span.end] = False
    for name, expected in flats.items():
        assert_same(there[name], expected, (name, case))
        if not name.endswith(moments.SCALE):
            assert_same(there[name].cpu()[outside], before[name][outside], (f"{name} outside of the spans", case))
        assert (around(there[name], case.offset) == 7).all()


def check_compress(
    device: torch.device, values: Tensor, kind: str, block: int = 256, noise: Noise | None = None, first: int = 0,
    backs: Sequence[torch.dtype] = (FP32,),
) -> None:  # fmt: skip
    """There, the count of what was saturated, and back to each of ``backs``."""
    counter, counter_there = (torch.full((), 5, dtype=torch.int64, device=where) for where in ("cpu", device))
    expected = compression.compress(values, kind, block=block, noise=noise, first=first, saturated=counter)
    found = kernels.compress(
        placed(values, device), kind, block=block, noise=noise, first=first, saturated=counter_there
    )
    what = (kind, values.numel(), values.dtype, block, noise)
    assert found[:3] == expected[:3] and (found.scales is None) == (expected.scales is None)
    assert_same(found.values, expected.values, what)
    if found.scales is not None and expected.scales is not None:
        assert_same(found.scales, expected.scales, ("scales", *what))
    assert_same(counter_there, counter, ("saturated", *what))
    into = found._replace(values=placed(torch.zeros_like(found.values), device))
    if found.scales is not None:
        into = into._replace(scales=placed(torch.zeros_like(found.scales), device))
    again = kernels.compress(placed(values, device), kind, block=block, noise=noise, first=first, out=into)
    assert again is into
    for given, made in zip(into[3:], found[3:], strict=True):
        if given is not None and made is not None:
            assert_same(given, made.cpu(), ("into given memory", *what))
            assert (around(given) == 7).all()
    check_residual(device, values.float() + 1, found, expected)
    for dtype in backs:
        out = torch.zeros(values.numel(), dtype=dtype)
        out_there = placed(out, device)
        compression.decompress(expected, out)
        kernels.decompress(found, out_there)
        assert_same(out_there, out, ("back", dtype, *what))
        assert (around(out_there) == 7).all()


def check_residual(device: torch.device, values: Tensor, found: Compressed, expected: Compressed) -> None:
    """What either lacks of ``values``."""
    for divisor in (1.0, 2.0**16):
        out = torch.zeros_like(values)
        out_there = placed(out, device)
        compression.residual(values, expected, out, divisor=divisor)
        kernels.residual(placed(values, device), found, out_there, divisor=divisor)
        assert_same(out_there, out, ("residual", divisor, found[:3]))
        assert (around(out_there) == 7).all()
