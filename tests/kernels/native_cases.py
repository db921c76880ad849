"""What the tests of the native kernels step and compare: drawn cases, the reference's answer, equality of bits."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardengine.kernels import Noise, Rule, Spans, moments, reference_update, rule_for

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": ADAM,
    "AdamW": ADAM,
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.25, "nesterov": False, "weight_decay": 0.1},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1},
}
SPECIAL_BITS = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x3F800000, 0xBF800000,
    0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x477FE000, 0x477FEFFF,
    0x477FF000, 0x47800000, 0x38800000, 0x387FFFFF, 0x33000000, 0x33000001, 0x33800000, 0x7F7F7FFF, 0x7F7F8000,
)  # fmt: skip


class Case(NamedTuple):
    """One call of ``update``."""

    flats: dict[str, Tensor]
    spans: Spans
    rule: Rule
    options: dict[str, Any]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, where 0.0 is not -0.0 and any NaN equals any other: torch's own differ within one tensor."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}[a.element_size()]
    return a.dtype is b.dtype and bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())


def drawn(length: int, dtype: torch.dtype, seed: int, *, special: bool = False, offset: int = 0) -> Tensor:
    """Normal numbers, or any bits with many special ones; ``offset`` elements off the start of its memory."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(offset + length, generator=generator)
    if special:
        bits = torch.randint(-(2**31), 2**31, values.shape, dtype=torch.int64, generator=generator)
        picks = torch.randint(0, len(SPECIAL_BITS), values.shape, generator=generator)
        listed = torch.tensor(SPECIAL_BITS)[picks]
        chosen = torch.where(torch.rand(values.shape, generator=generator) < 0.5, listed, bits).to(torch.int32)
        values = torch.where(torch.rand(values.shape, generator=generator) < 0.6, chosen.view(torch.float32), values)
    return values.to(dtype)[offset:]


def some_rule(kind: str, chance: random.Random) -> Rule:
    """A kind's rule with drawn options."""
    options = {**OPTIONS[kind], "maximize": chance.random() < 0.3, "weight_decay": chance.choice([0.0, 0.1])}
    if kind == "SGD":
        options |= {"momentum": chance.choice([0.0, 0.9, 0.9]), "nesterov": chance.random() < 0.5}
    return rule_for(kind, options, chance.choice([1, 1, 2, 7]))


def some_case(seed: int, length: int, kind: str | None = None) -> Case:
    """Any kind, dtypes, options, spans and alignment, drawn from ``seed``."""
    chance = random.Random(seed)
    rule = some_rule(kind or chance.choice(list(OPTIONS)), chance)
    special = chance.random() < 0.4
    dtypes = {"weight": chance.choice([torch.float32, *FLOATS]), "gradient": chance.choice(FLOATS)}
    dtypes |= dict.fromkeys(rule.states, torch.float32)
    if chance.random() < 0.6:
        dtypes["low"] = chance.choice(FLOATS)
    flats = {
        name: drawn(length, dtype, 10 * seed + number, special=special, offset=chance.randrange(8))
        for number, (name, dtype) in enumerate(dtypes.items())
    }
    if "exp_avg_sq" in flats:
        flats["exp_avg_sq"].abs_()
    options: dict[str, Any] = {}
    if chance.random() < 0.5:
        options["factor"] = torch.tensor(chance.choice([0.37, 1.0, 1 / 65536, 0.0]))
    if chance.random() < 0.3:
        options["skip"] = torch.tensor(chance.random() < 0.3)
    if dtypes["weight"] is torch.bfloat16 and chance.random() < 0.6:
        options["noise"] = Noise(chance.randrange(2**63), chance.randrange(2**40))
    return Case(flats, some_spans(chance, length), rule, options)


def narrowed(case: Case, dtype: torch.dtype, *, at_random: bool) -> Case:
    """The same with states in ``dtype``, bf16 or uint8, and spans that begin where blocks do."""
    flats = dict(case.flats)
    length = flats["weight"].numel()
    for name in case.rule.states:
        values, flats[name] = flats[name], torch.empty(length, dtype=dtype)
        if dtype is torch.uint8:
            flats[name + moments.SCALE] = torch.empty(-(-length // moments.BLOCK))
        moments.narrow_state(values, flats, name)
    edges = sorted({edge - edge % moments.BLOCK for span in case.spans for edge in span[:2]} | {length})
    first = case.spans[0].first - case.spans[0].start if case.spans else 0
    spans = Spans((start, end, first + start) for start, end in itertools.pairwise(edges))
    if case.flats["weight"].dtype is torch.bfloat16 and at_random:
        flats.pop("low", None)
        flats[moments.REMAINDER] = (drawn(length, torch.float32, 99) * 40).clamp(-128, 127).to(torch.int8)
    noise = {"state_noise": Noise(11, 3)} if at_random else {}
    return Case(flats, spans if dtype is torch.uint8 else case.spans, case.rule, case.options | noise)


def plain_case(kind: str, length: int) -> Case:
    """Normal numbers of fp32 from a bf16 gradient to a bf16 weight beside its master, at odd addresses."""
    rule = rule_for(kind, OPTIONS[kind], 2)
    dtypes = dict.fromkeys(("weight", *rule.states), torch.float32)
    dtypes |= dict.fromkeys(("gradient", "low"), torch.bfloat16)
    flats = {name: drawn(length, dtype, i, offset=2 * i + 1) for i, (name, dtype) in enumerate(dtypes.items())}
    if "exp_avg_sq" in flats:
        flats["exp_avg_sq"].abs_()
    return Case(flats, Spans.whole(length), rule, {})


def some_spans(chance: random.Random, length: int) -> Spans:
    """Ascending, with gaps and empty ones; numbered from 0, around 2^32, or far beyond it."""
    cuts = sorted(chance.randrange(length + 1) for _ in range(2 * chance.randrange(1, 6)))
    if chance.random() < 0.4:
        cuts = [0, length]
    first = chance.choice([0, 2**32 - length // 2, 2**40 + 12345])
    return Spans((start, end, first + start) for start, end in zip(cuts[::2], cuts[1::2], strict=True))


def referred(case: Case) -> dict[str, Tensor]:
    """What the reference makes of copies of the case's tensors."""
    flats = {name: flat.clone() for name, flat in case.flats.items()}
    reference_update.update(flats, case.spans, case.rule, **case.options)
    return flats
