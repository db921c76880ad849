"""One update of every optimizer, element by element, against the same formula in float64: bounds in ulp of fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardengine.kernels import Spans, native, rule_for
from tests.kernels.native_cases import OPTIONS, drawn
from tests.kernels.test_native import pytestmark

__all__ = ["pytestmark"]  # the skip without a compiler
Exact = dict[str, tuple[Tensor, Tensor]]
"""Per result its value in float64 and the size of what is added up in it, which an ulp is taken of."""
LENGTH = 20_000
WEIGHT_ULP, STATE_ULP = 3.0, 2.0
"""What the roundings of one update may add up to, in ulp (2^-23) of the size of the addends; each costs at most half a
one, an inexact constant as much."""


def exact_adam(kind: str, flats: dict[str, Tensor], options: dict[str, Any], step: int) -> Exact:
    """Kingma & Ba, 2015, algorithm 1; with AdamW as Loshchilov & Hutter, 2019, algorithm 2."""
    w, g, m, v = flats.values()
    beta1, beta2 = options["betas"]
    lr, decay = options["lr"], options["weight_decay"]
    size_g = g.abs()
    if kind == "Adam":
        g, size_g = g + decay * w, size_g + decay * w.abs()
    else:
        w = w - lr * decay * w
    size_m, size_v = beta1 * m.abs() + (1 - beta1) * size_g, beta2 * v + (1 - beta2) * size_g**2
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    reach = lr / ((v / (1 - beta2**step)).sqrt() + options["eps"]) / (1 - beta1**step)
    size_w = w.abs() + reach * (size_m + m.abs() * size_v / v)
    return {"weight": (w - reach * m, size_w), "exp_avg": (m, size_m), "exp_avg_sq": (v, size_v)}


def exact_sgd(flats: dict[str, Tensor], options: dict[str, Any], step: int) -> Exact:
    """As the manual of torch.optim.SGD has it."""
    w, g, m = flats.values()
    momentum, lr, decay = options["momentum"], options["lr"], options["weight_decay"]
    take = 1 - options["dampening"]
    g, size_g = g + decay * w, g.abs() + decay * w.abs()
    m, size_m = (g, size_g) if step == 1 else (momentum * m + take * g, momentum * m.abs() + take * size_g)
    direction, size = (g + momentum * m, size_g + momentum * size_m) if options["nesterov"] else (m, size_m)
    return {"weight": (w - lr * direction, w.abs() + lr * size), "momentum_buffer": (m, size_m)}


def exact_lion(flats: dict[str, Tensor], options: dict[str, Any]) -> Exact:
    """Chen et al., 2023, algorithm 2. Where the sign hangs on a rounding the weight is NaN: nobody knows it."""
    w, g, m = flats.values()
    beta1, beta2 = options["betas"]
    lr = options["lr"]
    mixed, size = beta1 * m + (1 - beta1) * g, beta1 * m.abs() + (1 - beta1) * g.abs()
    w = w - lr * options["weight_decay"] * w
    known = torch.where(mixed.abs() > 2 * 2.0**-23 * size, w - lr * mixed.sign(), torch.nan)
    m, size_m = beta2 * m + (1 - beta2) * g, beta2 * m.abs() + (1 - beta2) * g.abs()
    return {"weight": (known, w.abs() + lr), "exp_avg": (m, size_m)}


def exact(kind: str, flats: dict[str, Tensor], options: dict[str, Any], step: int) -> Exact:
    wide = {name: flat.double() for name, flat in flats.items()}
    if kind == "SGD":
        return exact_sgd(wide, options, step)
    return exact_lion(wide, options) if kind == "Lion" else exact_adam(kind, wide, options, step)


@pytest.mark.parametrize("step", [1, 2, 10, 1000])
@pytest.mark.parametrize("change", [{}, {"nesterov": True, "eps": 1e-3}, {"weight_decay": 0.0}])
@pytest.mark.parametrize("kind", OPTIONS)
def test_an_update_is_that_of_float64(forced: str, kind: str, change: dict[str, Any], step: int) -> None:
    options = {name: change.get(name, value) for name, value in OPTIONS[kind].items()}
    rule = rule_for(kind, options, step)
    flats = {
        name: drawn(LENGTH, torch.float32, number) for number, name in enumerate(("weight", "gradient", *rule.states))
    }
    if "exp_avg_sq" in flats:
        flats["exp_avg_sq"].square_()
    expected = exact(kind, flats, options, step)
    assert set(expected) == {"weight", *rule.states}
    native.update(flats, Spans.whole(LENGTH), rule)
    for name, (value, size) in expected.items():
        ulp = ((flats[name].double() - value) / (size * 2.0**-23)).abs().nan_to_num()
        assert value.isnan().sum() <= 3 and (kind == "Lion" or not value.isnan().any())
        assert ulp.max() <= (WEIGHT_ULP if name == "weight" else STATE_ULP), (name, ulp.max())
