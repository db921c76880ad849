"""kernels/native: the C++ bodies of every instruction set give the reference's bits, and say so about float64."""

from __future__ import annotations

import ctypes
import random
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from shardengine.kernels import Span, Spans, checksums, native, operations, reference
from shardengine.kernels.native import build, calls
from shardengine.kernels.random_bits import Noise
from shardengine.kernels.rules import rule_for
from tests.kernels.native_cases import (
    FLOATS,
    OPTIONS,
    SPECIAL_BITS,
    Case,
    drawn,
    narrowed,
    plain_case,
    referred,
    same,
    some_case,
)

pytestmark = pytest.mark.skipif(isinstance(build.find_compiler(), str), reason="no C++ compiler (g++ or clang++)")

SIZES = [*range(70), *range(70, 4097, 67), 511, 512, 513, 1023, 1024, 1025, 2047, 2049, 4095, 4096, 4097]
LONG = 1_200_007
"""More elements than two threads begin to share, and no multiple of anything."""


def check_update(case: Case) -> None:
    expected = referred(case)
    native.update(case.flats, case.spans, case.rule, **case.options)
    for name, flat in case.flats.items():
        assert same(flat, expected[name]), (name, case.rule, {n: f.dtype for n, f in case.flats.items()}, case.options)


def test_the_native_kernels_serve_cpu_tensors() -> None:
    assert operations.implementation(torch.device("cpu")) is native
    assert operations.implementation(torch.device("cuda", 0)) is not native


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_update_of_any_length_has_the_bits_of_the_reference(forced: str, kind: str) -> None:
    for length in SIZES:
        case = some_case(length, length, kind)
        check_update(case._replace(spans=Spans([(0, length)])))


def test_an_update_of_each_length_to_4097_is_that_of_so_many_elements(forced: str) -> None:
    case = plain_case("AdamW", 4097)
    expected, moved = referred(case), {name: torch.empty_like(flat) for name, flat in case.flats.items()}
    for length in range(4098):
        for name, flat in moved.items():
            flat.copy_(case.flats[name])
        native.update(moved, Spans([(0, length)]), case.rule)
        for name, flat in moved.items():
            assert torch.equal(flat[:length], expected[name][:length]), (name, length)
            assert torch.equal(flat[length:], case.flats[name][length:]), (name, length)


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_an_update_with_any_options_dtypes_values_and_spans_has_the_bits_of_the_reference(
    forced: str, start: int
) -> None:
    for seed in range(start, start + 100):
        check_update(some_case(seed, 1300 + seed % 37))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("start", range(0, 120, 40))
def test_states_in_fewer_bytes_have_the_bits_of_the_reference(forced: str, dtype: torch.dtype, start: int) -> None:
    for seed in range(start, start + 40):
        check_update(narrowed(some_case(seed, 1300 + seed % 37), dtype, at_random=seed % 4 != 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_states_in_fewer_bytes_of_any_length_have_the_bits_of_the_reference(forced: str, dtype: torch.dtype) -> None:
    """What lies behind the last element stays, and so do the bits where a parameter ends within a tile."""
    for length in (1, 3, 31, 32, 33, 255, 256, 257, 300, 511, 512, 515):
        for number, kind in enumerate(OPTIONS):
            case = narrowed(some_case(4 * length + number, 600, kind), dtype, at_random=length % 2 == 1)
            check_update(case._replace(spans=Spans([(0, length, 256 * number)])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_nan_of_any_bits_stays_one_where_bits_are_drawn(forced: str, dtype: torch.dtype) -> None:
    """Random bits added to one with all bits set would make it a zero."""
    gradient = torch.zeros(600)
    gradient[256:400:7] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    rule = rule_for("AdamW", OPTIONS["AdamW"], 2)
    flats = {"weight": torch.ones(600, dtype=torch.bfloat16), "gradient": gradient}
    flats |= {name: torch.zeros(600) for name in rule.states}
    case = narrowed(Case(flats, Spans([(0, 600)]), rule, {}), dtype, at_random=False)
    case = case._replace(options={"noise": Noise(1, 2), "state_noise": Noise(3, 4)})
    check_update(case)
    assert torch.equal(case.flats["weight"].isnan(), gradient.isnan())


@pytest.mark.parametrize("kind", OPTIONS)
def test_threads_change_no_bit_of_states_in_blocks(forced: str, threads: Any, kind: str) -> None:
    """Where the work of a thread ends within a block, the block is the other one's."""
    case = narrowed(plain_case(kind, LONG), torch.uint8, at_random=True)
    case = case._replace(spans=Spans([(0, 256 * 7 + 5, 9), (256 * 8, LONG - 3, 2**32 - 77)]))
    results = []
    for count in (1, 2, 4):
        threads(count)
        flats = {name: flat.clone() for name, flat in case.flats.items()}
        native.update(flats, case.spans, case.rule, **case.options)
        results.append(flats)
    for flats in results[1:]:
        assert all(same(flats[name], results[0][name]) for name in flats)


def test_the_cases_reach_every_option() -> None:
    cases = [some_case(seed, 40) for seed in range(400)]
    assert {case.rule.kind for case in cases} == set(OPTIONS)
    for name in ("maximize", "nesterov", "first", "l2"):
        assert {bool(getattr(case.rule, name)) for case in cases} == {False, True}
    assert {name for case in cases for name in case.options} == {"factor", "skip", "noise"}
    assert {case.flats["low"].dtype for case in cases if "low" in case.flats} == set(FLOATS)
    assert {case.flats["weight"].dtype for case in cases} == set(FLOATS)


@pytest.mark.parametrize("kind", ["SGD plain", "AdamW"])
def test_random_bits_of_states_change_nothing_where_none_is_rounded(forced: str, kind: str) -> None:
    """fp32 numbers alone are updated in place, however many at once: there is no room for random bits."""
    options = OPTIONS["AdamW"] if kind == "AdamW" else {**OPTIONS["SGD"], "momentum": 0.0, "nesterov": False}
    rule = rule_for(kind.split()[0], options | {"weight_decay": 0.0}, 2)
    flats = {name: drawn(LONG, torch.float32, i) for i, name in enumerate(("weight", "gradient", *rule.states))}
    flats |= {name: flat.abs() for name, flat in flats.items() if name == "exp_avg_sq"}
    others = {name: flat.clone() for name, flat in flats.items()}
    calls.update(flats, Spans.whole(LONG), rule, state_noise=Noise(1, 2))
    calls.update(others, Spans.whole(LONG), rule)
    assert all(torch.equal(flat.view(torch.int32), others[name].view(torch.int32)) for name, flat in flats.items())


def test_what_lies_outside_of_the_spans_is_untouched(forced: str) -> None:
    case = some_case(3, 5000, "AdamW")
    before = {name: flat.clone() for name, flat in case.flats.items()}
    spans = Spans([(1, 2), (17, 17), (18, 1500), (1501, 4999)])
    check_update(case._replace(spans=spans, options={}))
    outside = torch.ones(5000, dtype=torch.bool)
    for span in spans:
        outside[span.start : span.end] = False
    assert outside.sum() == 1 + 16 + 1 + 1
    for name, flat in case.flats.items():
        assert same(flat[outside], before[name][outside])
    assert not same(case.flats["weight"], before["weight"])


def test_one_update_of_many_spans_is_that_of_each(forced: str) -> None:
    case = some_case(8, 3000, "Adam")
    alone = {name: flat.clone() for name, flat in case.flats.items()}
    spans = Spans((start, start + 30, 7 * start) for start in range(0, 3000, 50))
    native.update(case.flats, spans, case.rule)
    for span in spans:
        cut = {name: flat[span.start : span.end] for name, flat in alone.items()}
        native.update(cut, Spans([(0, 30, span.first)]), case.rule)
    assert all(same(case.flats[name], alone[name]) for name in alone)


def test_random_bits_go_on_beyond_two_to_the_32(forced: str) -> None:
    for first in (2**32 - 1, 2**32 - 1000, 2**32, 2**33 - 5, 2**62):
        seed = next(seed for seed in range(1000) if "noise" in some_case(seed, 1).options)
        check_update(some_case(seed, 3000)._replace(spans=Spans([Span(0, 3000, first)])))


@pytest.mark.parametrize("kind", OPTIONS)
def test_threads_change_no_bit_of_an_update(forced: str, threads: Any, kind: str) -> None:
    spans = Spans([(3, LONG // 3, 3), (LONG // 3 + 5, LONG - 1, 2**33)])
    results = []
    for count in (1, 2, 4):
        threads(count)
        case = some_case(5, LONG, kind)._replace(spans=spans, options={})
        native.update(case.flats, case.spans, case.rule)
        results.append(case.flats)
    expected = referred(some_case(5, LONG, kind)._replace(spans=spans, options={}))
    assert all(same(result[name], flat) for name, flat in expected.items() for result in results)


def halves() -> Tensor:
    """Every 16-bit pattern."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_widening_is_torchs_for_every_number(forced: str, dtype: torch.dtype) -> None:
    term, out = halves().view(dtype), torch.empty(2**16)
    native.ordered_sum([term], out)
    assert same(out, term.float())
    for length in range(1, 20):  # the tail, by other instructions
        native.ordered_sum([term[:length]], out[:length])
        native.ordered_sum([term[-length:]], out[-length:])
    assert same(out, term.float())


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_narrowing_is_torchs_around_every_number(forced: str, dtype: torch.dtype) -> None:
    near = halves().view(dtype).float().view(torch.int32)
    half = 1 << (15 if dtype is torch.bfloat16 else 12)
    steps = (0, 1, -1, half, half - 1, half + 1, -half, -half - 1, -half + 1)
    values = torch.cat([near + step for step in steps]).view(torch.float32)
    values = torch.cat([values, torch.linspace(-1e-7, 1e-7, 5000), torch.tensor(SPECIAL_BITS).int().view(values.dtype)])
    for length in (values.numel(), 7, 3):
        for start in range(0, values.numel() if length < 10 else 1, 4099):
            term = values[start : start + length]
            out = torch.empty(term.shape, dtype=dtype)
            native.ordered_sum([term], out)
            assert same(out, term.to(dtype))


def some_sum(seed: int, length: int) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """Terms, out and options; ``out`` is sometimes the total or a term."""
    chance = random.Random(seed)
    special, count = chance.random() < 0.4, chance.choice([1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 13, 40])
    dtypes = [chance.choice(FLOATS)] * count if chance.random() < 0.7 else [chance.choice(FLOATS) for _ in range(count)]
    terms = [
        drawn(length, dtype, 100 * seed + i, special=special, offset=chance.randrange(8))
        for i, dtype in enumerate(dtypes)
    ]
    out = torch.full((length + 3,), 7.0, dtype=chance.choice(FLOATS))[chance.randrange(3) :][:length]
    options: dict[str, Any] = {
        "divisor": chance.choice([1, 1, 2, 3, 7]),
        "rounded": chance.choice(FLOATS),
        "reduce_dtype": chance.choice([torch.float32, *FLOATS]),
    }
    if chance.random() < 0.5:
        options["total"] = drawn(length, chance.choice(FLOATS), 100 * seed + 99, special=special)
        out = options["total"] if chance.random() < 0.5 else out
    elif chance.random() < 0.5:
        out = chance.choice(terms)
    if chance.random() < 0.7:
        options["nonfinite"] = torch.tensor(chance.random() < 0.1)
    return terms, out, options


def check_sum(seed: int, length: int) -> None:
    terms, out, options = some_sum(seed, length)
    reference.ordered_sum(terms, out, **options)
    flag = options.get("nonfinite")
    terms, again, options = some_sum(seed, length)
    native.ordered_sum(terms, again, **options)
    assert same(again, out), (seed, length, options)
    assert flag is None or bool(flag) == bool(options["nonfinite"])


def test_an_ordered_sum_has_the_bits_of_the_reference(forced: str) -> None:
    for seed in range(500):
        check_sum(seed, 1100 + seed % 41)
    for length in SIZES[:80]:
        check_sum(1000 + length, length)


def test_threads_change_no_bit_of_an_ordered_sum(forced: str, threads: Any) -> None:
    for count, seed in ((1, 1), (2, 3), (2, 9), (3, 11)):
        threads(count)
        check_sum(seed, LONG)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_beyond_the_largest_number_is_seen_by_the_last_element_alone(forced: str, dtype: torch.dtype) -> None:
    for place in (0, 511, 512, 999):
        terms, flag = [torch.zeros(1000, dtype=dtype), torch.zeros(1000, dtype=dtype)], torch.tensor(False)
        native.ordered_sum(terms, torch.empty(1000, dtype=dtype), nonfinite=flag)
        assert not flag
        for term in terms:
            term[place] = torch.finfo(dtype).max
        native.ordered_sum(terms, torch.empty(1000, dtype=dtype), nonfinite=flag)
        assert flag


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_of_squares_has_the_bits_of_the_reference(forced: str, threads: Any, dtype: torch.dtype) -> None:
    lengths = [*SIZES[::3], 65_535, 65_536, 65_537, 3 * 65_536, 3 * 65_536 + 4097, LONG]
    for number, length in enumerate(lengths):
        threads(1 + number % 3)
        values = drawn(length, dtype, length, offset=number % 8)
        assert same(native.sum_of_squares(values).view(1), reference.sum_of_squares(values).view(1)), length


def test_a_sum_of_squares_of_more_blocks_than_lanes(forced: str, threads: Any) -> None:
    values = drawn(2**20, torch.float32, 1).bfloat16().repeat(258)  # 4128 blocks
    threads(2)
    parts = [reference.sum_of_squares(values[: 2**20][i : i + 65_536]) for i in range(0, 2**20, 65_536)]
    assert same(native.sum_of_squares(values).view(1), reference._lanes(torch.stack(parts * 258)).view(1))


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
def test_a_sum_of_squares_is_not_finite_where_one_element_is_not(forced: str, bad: float) -> None:
    for length, place in ((1, 0), (5000, 4999), (200_001, 131_072), (200_001, 200_000)):
        values = torch.full((length,), 3e38)
        assert native.sum_of_squares(values).isfinite()
        values[place] = bad
        assert not native.sum_of_squares(values).isfinite()


def test_what_the_library_has_no_body_for_goes_to_the_reference() -> None:
    values = torch.arange(24.0).view(4, 6).t()
    assert native.sum_of_squares(values.reshape(-1)[::2]) == (values.reshape(-1)[::2] ** 2).sum()
    out = torch.zeros(5, dtype=torch.float64)
    native.ordered_sum([torch.ones(5, dtype=torch.float64)], out)
    assert out.tolist() == [1.0] * 5
    native.flatten([torch.ones(2, dtype=torch.float64)], [3], out)
    assert out.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    made = native.compress(values.reshape(-1)[::2], "int8", block=4)
    native.decompress(made, out[:0].new_empty(12))
    back = torch.empty(24)[::2]
    native.decompress(made, back)
    assert torch.equal(back.round(), values.reshape(-1)[::2])
    native.residual(values.reshape(-1)[::2], made, back)
    assert (back.abs() < 0.1).all()
    case = some_case(1, 64, "Adam")
    flats = {name: flat.float().repeat_interleave(2)[::2] for name, flat in case.flats.items()}
    native.update(flats, Spans([(0, 64)]), case.rule)
    expected = referred(case._replace(flats={n: f.float() for n, f in case.flats.items()}, spans=Spans([(0, 64)]),
                                      options={}))  # fmt: skip
    assert all(same(flats[name], expected[name]) for name in flats)


def test_spans_beyond_the_tensors_never_reach_the_library() -> None:
    case = some_case(1, 64, "Adam")
    backing = {name: torch.cat([flat.float(), torch.full((64,), 5.0)]) for name, flat in case.flats.items()}
    native.update({name: flat[:64] for name, flat in backing.items()}, Spans([(0, 128)]), case.rule)
    assert all((flat[64:] == 5.0).all() for flat in backing.values())


def test_a_crc32_is_zlibs(forced: str) -> None:
    """Of any length, from any byte on, after any other bytes: by the table and by carry-less products."""
    loaded, chance = calls._library(), random.Random(0)
    data = memoryview(bytearray(chance.randbytes(70_000)))
    for count in [*range(1, 300), 4095, 4096, 4097, 65_537]:
        start, value = chance.randrange(64), chance.getrandbits(32)
        part = data[start : start + count]
        address = ctypes.addressof(ctypes.c_char.from_buffer(part))
        expected = zlib.crc32(part, value)
        assert loaded.crc32(loaded.instruction_set, value, address, count) == expected, count
        assert calls.crc32(part, value) == checksums.crc32(part, value) == operations.crc32(part, value) == expected


def test_a_crc32_of_what_has_no_address() -> None:
    for data, expected in ((b"", 7), (b"123456789", zlib.crc32(b"123456789", 7))):
        for view in (memoryview(data), memoryview(bytearray(data))):
            assert operations.crc32(view, 7) == expected
    assert operations.crc32(memoryview(b"123456789")) == 0xCBF43926


@pytest.mark.parametrize("isal", [True, False])
def test_who_takes_a_crc32(monkeypatch: pytest.MonkeyPatch, isal: bool) -> None:
    """isal where it is installed, because it is the fastest, the library where it is not."""
    asked: list[str] = []

    def noting(name: str) -> Any:
        def crc32(data: memoryview, value: int) -> int:
            asked.append(name)
            return zlib.crc32(data, value)

        return crc32

    monkeypatch.setattr(checksums, "FASTEST", isal)
    monkeypatch.setattr(checksums, "crc32", noting("isal"))
    monkeypatch.setattr(native, "crc32", noting("library"))
    assert operations.crc32(memoryview(bytearray(b"123456789"))) == 0xCBF43926
    assert asked == ["isal" if isal else "library"]
