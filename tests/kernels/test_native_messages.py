"""kernels/native: flatten, compress, decompress and residual have the reference's bits and write nothing else."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shardengine import kernels
from shardengine.kernels import Compressed, compression, native, reference
from shardengine.kernels.compression import LEVELS
from shardengine.kernels.native import build, calls
from shardengine.kernels.random_bits import Noise
from tests.kernels.native_cases import FLOATS, drawn, same

pytestmark = pytest.mark.skipif(isinstance(build.find_compiler(), str), reason="no C++ compiler (g++ or clang++)")

KINDS = ("fp16", "bf16", "int8", "int4")
LONG = 1_200_007
"""More elements than three threads begin to share, and no multiple of anything."""
FAR = (1 << 33) - 300
"""A first number whose low half overflows within a block."""
SIZES = [*range(20), 31, 32, 33, 255, 256, 257, 300, 511, 512, 513, 1025]


class Guarded:
    """Memory with bytes around it that nobody may write, ``offset`` bytes off an aligned address."""

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        self._all = torch.full((nbytes + 256,), 0xA5, dtype=torch.uint8)
        self._begin, self._end = 64 + offset, 64 + offset + nbytes
        self.bytes = self._all[self._begin : self._end]

    def check(self) -> None:
        assert (self._all[: self._begin] == 0xA5).all() and (self._all[self._end :] == 0xA5).all()


class Joined(NamedTuple):
    """A call of flatten. lengths, and the gaps before each and after the last."""

    lengths: list[int]
    gaps: list[int]
    dtype: torch.dtype = torch.float32
    out: torch.dtype = torch.float32
    options: dict[str, Any] = {}  # noqa: RUF012
    special: bool = False


def check_flatten(case: Joined, seed: int = 0) -> None:
    tensors = [
        drawn(length, case.dtype, seed + i, special=case.special, offset=i % 5) for i, length in enumerate(case.lengths)
    ]
    starts, at = [], 0
    for length, gap in zip(case.lengths, case.gaps, strict=False):
        starts.append(at + gap)
        at += gap + length
    expected = drawn(at + case.gaps[-1], case.out, seed + 999, special=case.special)
    guarded = Guarded(expected.nbytes, case.out.itemsize * (seed % 9))
    found = guarded.bytes.view(case.out)
    found.copy_(expected)
    reference.flatten(tensors, starts, expected, **case.options)
    native.flatten(tensors, starts, found, **case.options)
    assert same(found, expected), (seed, case)
    guarded.check()


def some_join(seed: int, scale: int = 1) -> Joined:
    chance = random.Random(seed)
    lengths = [scale * chance.choice([0, 1, 3, 16, 64, 65, 300, 700]) for _ in range(chance.choice([0, 1, 2, 5, 76]))]
    gaps = [scale * chance.choice([0, 0, 1, 5, 63, 300]) for _ in range(len(lengths) + 1)]
    options: dict[str, Any] = {"add": chance.random() < 0.4}
    if chance.random() < 0.4:
        options["scale"] = chance.choice([0.5, 1 / 3, -2.0, 65536.0])
    return Joined(lengths, gaps, chance.choice(FLOATS), chance.choice(FLOATS), options, chance.random() < 0.5)


@pytest.mark.parametrize("streamed", [0, 1 << 40])
def test_flatten_has_the_bits_of_the_reference(forced: str, monkeypatch: pytest.MonkeyPatch, streamed: int) -> None:
    monkeypatch.setattr(calls, "_STREAMED", streamed)
    for seed in range(300):
        check_flatten(some_join(seed), seed)


def test_the_joins_reach_every_option() -> None:
    cases = [some_join(seed) for seed in range(300)]
    assert {(case.dtype, case.out, case.options["add"]) for case in cases} == {
        (dtype, out, add) for dtype in FLOATS for out in FLOATS for add in (False, True)
    }
    plain = [case for case in cases if case.dtype is case.out and case.options == {"add": False}]
    assert any(len(case.lengths) == 76 and case.gaps[0] and case.gaps[-1] for case in plain)
    assert any(sum(case.lengths) + sum(case.gaps) == 0 for case in cases)
    assert {case.special for case in plain} == {False, True}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset", [0, 1, 7, 15])
def test_flatten_copies_every_length_past_the_caches(
    forced: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, offset: int
) -> None:
    monkeypatch.setattr(calls, "_STREAMED", 0)
    for length in range(0, 400, 3):
        check_flatten(Joined([length, length + 1], [length % 7, length % 5, 130], dtype, dtype), offset)


def test_threads_change_no_bit_of_flatten(forced: str, threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 3):
        threads(count)
        for streamed in (0, 1 << 40):
            monkeypatch.setattr(calls, "_STREAMED", streamed)
            check_flatten(Joined([LONG, 5], [7, 3, 600_000]))
            check_flatten(Joined([400_003, 0, 700_001], [300_000, 9, 1], *FLOATS[1:2] * 2))
            check_flatten(Joined([LONG], [0, 0], FLOATS[0], FLOATS[1], {"add": True, "scale": 0.25}))


def laid_out(kind: str, length: int, block: int, offset: int) -> tuple[Compressed, Guarded]:
    """In a message: values, then scales from the next multiple of four bytes on. offset: of the values, in bytes."""
    like = compression.allocated(kind, length, block, torch.device("cpu"))
    offset *= like.values.element_size()
    before = -(offset + like.values.nbytes) % 4
    scales = 0 if like.scales is None else like.scales.nbytes
    guarded = Guarded(like.values.nbytes + before + scales, offset)
    values = guarded.bytes[: like.values.nbytes].view(like.values.dtype)
    if like.scales is None:
        return Compressed(kind, length, block, values), guarded
    return like._replace(
        values=values, scales=guarded.bytes[like.values.nbytes + before :].view(torch.float32)
    ), guarded


def check_coding(values: Tensor, kind: str, block: int = 256, offset: int = 0, **options: Any) -> None:
    """There in memory of its own and in a message, back to every dtype, and what is missing."""
    what = (kind, values.numel(), values.dtype, block, options)
    counts = [torch.tensor(5), torch.tensor(5), torch.tensor(5)]
    expected = compression.compress(values, kind, block=block, saturated=counts[0], **options)
    found = native.compress(values, kind, block=block, saturated=counts[1], **options)
    into, guarded = laid_out(kind, values.numel(), block, offset)
    assert native.compress(values, kind, block=block, saturated=counts[2], out=into, **options) is into
    guarded.check()
    assert counts[0] == counts[1] == counts[2], what
    for each in (found, into):
        assert each[:3] == expected[:3]
        assert same(each.values, expected.values), what
        assert (each.scales is None) == (expected.scales is None)
        assert each.scales is None or expected.scales is None or same(each.scales, expected.scales), what
    for dtype in FLOATS:
        back = Guarded(values.numel() * dtype.itemsize, offset * dtype.itemsize)
        out = torch.empty(values.numel(), dtype=dtype)
        native.decompress(into, back.bytes.view(dtype))
        compression.decompress(expected, out)
        assert same(back.bytes.view(dtype), out), (dtype, *what)
        back.check()
    wide = values.float() + 1e-3
    for divisor in (1.0, 3.0, 2.0**16, 1e-30):
        back, out = Guarded(4 * len(wide), 4 * offset), torch.empty(len(wide))
        native.residual(wide, into, back.bytes.view(torch.float32), divisor=divisor)
        compression.residual(wide, expected, out, divisor=divisor)
        assert same(back.bytes.view(torch.float32), out), (divisor, *what)
        back.check()


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_numbers_of_any_length_have_the_bits_of_the_reference(forced: str, kind: str) -> None:
    for number, length in enumerate(SIZES):
        dtype = FLOATS[number % 3]
        check_coding(drawn(length, dtype, length, offset=number % 7), kind, offset=number % 5)
        check_coding(drawn(length, dtype, length, special=True), kind)
        check_coding(drawn(length, FLOATS[0], length), kind, noise=Noise(2**40 + 7, 3), first=FAR)


@pytest.mark.parametrize("kind", list(LEVELS))
@pytest.mark.parametrize("block", [2, 6, 16, 250, 256, 4096])
def test_every_block_has_the_bits_of_the_reference(forced: str, kind: str, block: int) -> None:
    sparse = drawn(4500, FLOATS[0], block)
    sparse[torch.arange(4500) % 50 > 2] = 0.0
    sparse[1::97] = float("inf")
    sparse[3::89] = float("nan")
    for noise in (None, Noise(5, 6)):
        for length in (777, 4500):
            check_coding(sparse[:length], kind, block, noise=noise, first=FAR)
            check_coding(drawn(length, FLOATS[1], block), kind, block, noise=noise, first=11)


@pytest.mark.parametrize("kind", list(LEVELS))
def test_ties_denormal_scales_and_blocks_whose_scale_is_zero(forced: str, kind: str) -> None:
    level = LEVELS[kind]
    check_coding(torch.arange(-2 * level, 2 * level + 1) / 2, kind, 4 * level + 2)  # the scale is 1
    sizes = (1e-45, 4e-45, 1.4e-44, 2.66e-43, 1e-40, 1e-38, 2e-36, 3.4e38)
    values = torch.tensor([[size, -size / 2, size / 3, 0.0] for size in sizes]).view(-1)
    for noise in (None, Noise(5, 6)):
        check_coding(values, kind, 4, noise=noise)
        check_coding(-values, kind, 4, noise=noise)  # beyond the least integer where a scale was rounded down


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit_of_compressed_numbers(forced: str, threads: Any, kind: str) -> None:
    values = drawn(LONG, FLOATS[0], 1)
    values[::1001], values[7], values[-1] = 3.4e38, float("nan"), -3.4e38
    for count in (1, 3):
        threads(count)
        check_coding(values, kind)
        check_coding(values, kind, 6)
        if kind in LEVELS:
            check_coding(values, kind, 600_000)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_does_not_fit_is_refused(kind: str) -> None:
    values = torch.ones(40)
    fitting = kernels.compress(values, kind, block=16)
    wrong = [
        kernels.compress(torch.ones(38), kind, block=16),
        kernels.compress(values, "int8" if kind == "int4" else "int4", block=16),
        fitting._replace(values=fitting.values.repeat(2)[::2]),
        fitting._replace(values=fitting.values.view(-1, 2)),
        fitting._replace(scales=torch.ones(2) if kind in LEVELS else torch.ones(3)),
        fitting._replace(block=8),
    ]
    for out in wrong:
        with pytest.raises(ValueError, match="expected out as it would come back"):
            kernels.compress(values, kind, block=16, out=out)
