"""Optimizers of other libraries, played by classes of their names: what they compute is what is stepped, or refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import shardengine
from shardengine.errors import UsageError
from shardengine.lion import Lion
from tests.support import cases


def made(place: str, model: Any, **options: Any) -> torch.optim.Optimizer:
    """An optimizer whose class is called ``place``, with the options that such a class has; it never steps."""
    module, _, name = place.rpartition(".")

    class Foreign(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(
                parameters, {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, **options}
            )

        def step(self, closure: Any = None) -> Any:
            raise AssertionError("the engine steps")

    Foreign.__module__, Foreign.__qualname__, Foreign.__name__ = module, name, name
    return Foreign(model.parameters())


def trained(optimizer: Any, kept_in: str = "fp32") -> list[Any]:
    model = cases.make_mlp()
    config = cases.config_of("2", data_types={"optimizer_state_dtype": kept_in})
    engine = shardengine.initialize(model, config, optimizer=optimizer(model))
    kind = engine.optimizer.kind if engine.optimizer is not None else ""
    for step in range(2):
        engine.backward(cases.loss_of(engine, step, 0, 0))
        engine.step()
    found = [kind, engine.state_dict()]
    engine.close()
    return found


@pytest.mark.parametrize(
    ("place", "options", "kind"),
    [
        ("bitsandbytes.optim.adamw.AdamW8bit", {}, "AdamW"),
        ("bitsandbytes.optim.adamw.PagedAdamW32bit", {"alpha": 0.0}, "AdamW"),
        ("bitsandbytes.optim.adam.Adam8bit", {"weight_decay": 0.0}, "Adam"),
        ("torchao.optim.adam.AdamW4bit", {"lr": torch.tensor(1e-2)}, "AdamW"),
        ("apex.optimizers.fused_adam.FusedAdam", {"bias_correction": True}, "AdamW"),
        ("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam", {"adam_w_mode": False}, "Adam"),
        ("bitsandbytes.optim.lion.PagedLion8bit", {}, "Lion"),
    ],
)
def test_it_is_stepped_as_what_it_computes(
    place: str, options: dict[str, Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    mode = options.pop("adam_w_mode", None)

    def foreign(model: Any) -> torch.optim.Optimizer:
        optimizer = made(place, model, **options)
        if mode is not None:
            optimizer.adam_w_mode = mode  # type: ignore[attr-defined]
        return optimizer

    def own(model: Any) -> torch.optim.Optimizer:
        decay, rate = options.get("weight_decay", 0.1), float(options.get("lr", 1e-2))
        if kind == "Lion":
            return Lion(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=decay)
        of_torch = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[kind]
        return of_torch(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=decay)

    with caplog.at_level(logging.WARNING, logger="shardengine"):
        kept_in = "8bit" if place.endswith("8bit") else "fp32"
        found, expected = trained(foreign), trained(own, kept_in)
    assert found[0] == expected[0] == kind
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    told = [record.getMessage() for record in caplog.records if "is stepped as" in record.getMessage()]
    name = f"{place.split('.')[0]}.{place.rpartition('.')[2]}"
    assert len(told) == 1 and told[0].startswith(f"optimizer {name} is stepped as {kind}")
    assert kept_in.replace("b", " b") in told[0]


@pytest.mark.parametrize(
    ("place", "options", "said"),
    [
        ("timm.optim.adafactor.Adafactor", {}, "it looks at whole matrices, .*: use torch.optim.Adafactor, or transf"),
        ("muon.Muon", {}, "it looks at whole matrices, .*: use torch.optim.Muon"),
        ("galore_torch.adamw.GaLoreAdamW", {}, "it looks at whole matrices"),
        ("lomo_optim.lomo.LOMO", {}, "it steps while backward runs"),
        ("bitsandbytes.optim.adam.Adam8bit", {}, "expected torch.optim.AdamW"),
        ("apex.optimizers.fused_adam.FusedAdam", {"bias_correction": False}, "expected torch.optim.AdamW"),
        ("deepspeed.runtime.fp16.onebit.OnebitAdam", {"weight_decay": 0.0}, "expected torch.optim.AdamW"),
        ("mine.AdamW8bit", {}, "a trial of its step.. raised AssertionError: the engine steps"),
    ],
)
def test_others_are_refused_with_the_reason(place: str, options: dict[str, Any], said: str) -> None:
    model = cases.make_mlp()
    with pytest.raises(UsageError, match=said) as caught:
        shardengine.initialize(model, cases.config_of("2"), optimizer=made(place, model, **options))
    assert str(caught.value).startswith(f"optimizer {place}: ")
