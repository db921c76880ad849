"""kernels/meta.py: each operation on meta tensors has the results of a real one, without their values; and errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardengine import kernels
from shardengine.kernels import (
    Compressed,
    Rule,
    Spans,
    compression,
    factored,
    meta,
    operations,
    reference,
    reference_update,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
META = torch.device("meta")
ADAM = Rule("AdamW", 0.1, 0.9, keep=0.9, take=0.1, keep_square=0.9, take_square=0.1, epsilon=1e-8)
MOMENTUM = Rule("SGD", 0.1, keep=0.9, take=0.1)


def flats(*names: str, weight: torch.dtype = FP32, length: int = 40) -> dict[str, Tensor]:
    dtypes = {"weight": weight, "gradient": BF16, "low": BF16}
    return {name: torch.ones(length, dtype=dtypes.get(name, FP32)) for name in ("weight", "gradient", *names)}


STATES = ("exp_avg", "exp_avg_sq")
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("flatten", ([torch.ones(3, 4), torch.ones(5)], [0, 16], torch.ones(30, dtype=BF16)), {"scale": 0.5}),
    ("flatten", ([torch.ones(7, dtype=FP16)], [3], torch.ones(12)), {"add": True}),
    ("flatten", ([], [], torch.ones(4)), {}),
    ("unflatten", (torch.ones(30), [0, 16], [torch.ones(3, 4), torch.ones(5, dtype=BF16)]), {}),
    ("ordered_sum", ([torch.ones(8)] * 3, torch.ones(8, dtype=BF16)), {"divisor": 3, "rounded": BF16}),
    (
        "ordered_sum",
        ([torch.ones(8, dtype=BF16)], torch.ones(8)),
        {"total": torch.ones(8), "nonfinite": torch.tensor(False), "reduce_dtype": BF16},
    ),
    ("sum_of_squares", (torch.ones(70_000, dtype=BF16),), {}),
    ("sum_of_squares", (torch.ones(0),), {}),
    ("update", (flats(*STATES), Spans([(0, 40)]), ADAM), {"factor": torch.tensor(0.5), "skip": torch.tensor(False)}),
    ("update", (flats(*STATES, "low"), Spans([(3, 7), (8, 9, 100)]), ADAM), {}),
    ("update", (flats("momentum_buffer", weight=BF16), Spans([]), MOMENTUM), {"noise": kernels.Noise(1, 2)}),
    ("update", (flats(), Spans([(0, 40)]), Rule("SGD", 0.1)), {}),
    ("squares_of_slice", (kernels.Factored((4, 6)), torch.ones(20), 2), {}),
    ("exact_sum_of_squares", (torch.ones(20),), {}),
    *[
        (name, (kernels.Factored((4, 6)), torch.ones(20), 2, torch.ones(10, dtype=torch.float64), 1.0), {})
        for name in ("direction_of_slice", "squares_of_direction")
    ],
    (
        "step_along",
        (
            torch.ones(20),
            kernels.Factored((4, 6)),
            torch.ones(20),
            2,
            torch.ones(10, dtype=torch.float64),
            1.0,
            (1.0, 0.1),
        ),
        {},
    ),
    *[
        ("compress", (torch.ones(length, dtype=dtype), kind), {"block": 16, "saturated": torch.tensor(0)})
        for kind in ("fp16", "bf16", "int8", "int4")
        for length, dtype in ((0, FP32), (33, BF16), (64, FP32))
    ],
    *[
        (name, (*values, compression.compress(torch.ones(33), kind, block=16), torch.ones(33, dtype=dtype)), {})
        for name, values, dtype in (("decompress", (), BF16), ("residual", (torch.ones(33),), FP32))
        for kind in ("fp16", "bf16", "int8", "int4")
    ],
    *[
        ("compress", (torch.ones(33), kind), {"out": compression.compress(torch.ones(33), kind)})
        for kind in ("fp16", "int4")
    ],
]


def moved(value: Any) -> Any:
    """The same on meta, in containers, too."""
    if isinstance(value, Tensor):
        return value.to(META)
    if isinstance(value, Compressed):
        return Compressed(*(moved(each) for each in value))
    if isinstance(value, list):
        return [moved(each) for each in value]
    return {name: moved(each) for name, each in value.items()} if isinstance(value, dict) else value


def form(value: Any) -> Any:
    """All but devices and values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.stride()
    return [form(each) for each in value] if isinstance(value, Compressed) else value


def real(name: str) -> Callable[..., Any]:
    module = next(each for each in (reference, reference_update, compression, factored) if name in vars(each))
    return getattr(module, name)


def test_every_operation_on_tensors_is_here() -> None:
    def public(module: Any) -> dict[str, inspect.Signature]:
        made = inspect.getmembers(module, inspect.isfunction)
        return {name: inspect.signature(each) for name, each in made
                if each.__module__ == module.__name__ and not name.startswith("_")}  # fmt: skip

    declared = public(operations)
    others = {"implementation", "offer", "withdraw", "has_values", "without_values", "crc32"}  # the last: of the host
    assert set(public(meta)) == set(declared) - others == {name for name, _, _ in CALLS}
    for name, signature in public(meta).items():
        assert signature == declared[name], name


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_a_call_on_meta_has_the_results_of_a_real_one(number: int) -> None:
    name, arguments, options = CALLS[number]
    expected = real(name)(*arguments, **options)
    found = getattr(kernels, name)(*moved(list(arguments)), **moved(options))
    assert form(found) == form(expected)
    for tensor in (*found[3:], None) if isinstance(found, Compressed) else (found,):
        assert tensor is None or tensor.device == META


X, Y, SHORT = torch.ones(8), torch.ones(8, device=META), torch.ones(4, device=META)
ALL = {name: torch.ones(8, device=META) for name in ("weight", "gradient", *STATES)}
CODED = ALL | {"exp_avg": Y.byte(), "exp_avg_scale": Y[:1].clone()}
WHOLE = Spans([(0, 8)])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kernels.flatten([Y, torch.ones(4, device=META).bfloat16()], [0, 8], Y.repeat(2)), "of one dtype"),
        (lambda: kernels.flatten([Y.long()], [0], Y), "tensor 0 to be floating"),
        (lambda: kernels.flatten([Y], [0], Y.view(2, 4)), "out to be a flat, contiguous tensor"),
        (lambda: kernels.unflatten(Y, [0], [torch.ones(2, 4, device=META).t()]), "out 0 to be a contiguous tensor"),
        (lambda: kernels.ordered_sum([], Y), "at least one term"),
        (lambda: kernels.ordered_sum([Y, SHORT], Y), "tensors of one length"),
        (lambda: kernels.ordered_sum([Y], Y, total=SHORT), "tensors of one length"),
        (lambda: kernels.ordered_sum([Y], Y, nonfinite=SHORT), "nonfinite to be 0-dim"),
        (lambda: kernels.sum_of_squares(Y.view(2, 4)), "tensor to be a flat"),
        (lambda: kernels.update({"weight": Y, "gradient": Y}, WHOLE, ADAM), "expected exp_avg, exp_avg_sq among"),
        (lambda: kernels.update(ALL | {"gradient": SHORT}, WHOLE, ADAM), "tensors of one length"),
        (lambda: kernels.update(ALL | {"exp_avg": Y.half()}, WHOLE, ADAM), "exp_avg in fp32, bf16 or uint8"),
        (lambda: kernels.update(ALL | {"exp_avg": Y.byte()}, WHOLE, ADAM), "expected exp_avg_scale among"),
        (lambda: kernels.update(CODED | {"exp_avg_scale": Y}, WHOLE, ADAM), "exp_avg_scale to have 1 elements"),
        (
            lambda: kernels.update(ALL | {"remainder": Y.char()}, WHOLE, ADAM),
            "a weight in bf16 and its remainder in int8",
        ),
        (lambda: kernels.update(CODED, Spans([(1, 8)]), ADAM), "begin at multiples of 256"),
        (lambda: kernels.update(ALL, Spans([(4, 9)]), ADAM), "spans inside of 8 elements"),
        (lambda: kernels.update(ALL, WHOLE, ADAM, skip=Y), "skip to be 0-dim"),
        (lambda: kernels.compress(Y, "int8", saturated=torch.ones((), device=META)), "saturated to be 0-dim"),
        (lambda: kernels.compress(Y, "int8", out=kernels.compress(SHORT, "int8")), "out as it would come back"),
        (lambda: kernels.decompress(kernels.compress(Y, "int8"), SHORT), "out to have 8 elements"),
        (lambda: kernels.residual(SHORT, kernels.compress(Y, "int8"), SHORT.clone()), "out to have 8 elements"),
        (lambda: kernels.residual(Y, kernels.compress(Y, "int8"), SHORT), "tensors of one length"),
        (lambda: kernels.residual(Y, kernels.compress(Y, "int8"), Y.half()), "values and out in fp32"),
    ],
)
def test_what_a_real_call_could_not_do_is_an_error(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.flatten([X, Y], [0, 8], torch.ones(16)),
        lambda: kernels.unflatten(X, [0], [Y]),
        lambda: kernels.ordered_sum([X, Y], X),
        lambda: kernels.ordered_sum([X], X, total=Y),
        lambda: kernels.ordered_sum([X], Y),
        lambda: kernels.update({**ALL, "weight": X}, WHOLE, ADAM),
        lambda: kernels.update(dict.fromkeys(ALL, X), WHOLE, ADAM, factor=torch.ones((), device=META)),
        lambda: kernels.compress(X, "fp16", saturated=torch.zeros((), dtype=torch.int64, device=META)),
        lambda: kernels.compress(X, "int8", out=kernels.compress(Y, "int8")),
        lambda: kernels.decompress(kernels.compress(Y, "int8"), X),
        lambda: kernels.residual(Y, kernels.compress(X, "int8"), X),
    ],
)
def test_tensors_of_several_devices_are_refused_before_an_address_is_read(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="expected all tensors on one device"):
        call()


def test_a_tensor_beyond_the_first_few_is_found_on_meta() -> None:
    with pytest.raises(ValueError, match="one device, meta, got term 20 on cpu"):
        kernels.ordered_sum([Y] * 20 + [X], Y)
