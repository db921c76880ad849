"""Weights begin where the device's libraries take them for equally aligned, at every stage and after a change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardengine.offload import Platform
from tests.support import cases


def starts(engine: Any) -> list[int]:
    """Bytes from the start of its storage to each parameter, once a forward has gathered them."""
    with engine.full_params():
        return [p.storage_offset() * p.element_size() for p in engine.module.parameters() if p.numel()]


@pytest.mark.parametrize("stage", ["0", "2", "3"])
@pytest.mark.parametrize(("apart", "align"), [(False, 64), (True, 256)])
def test_every_parameter_is_aligned_for_the_device(
    monkeypatch: pytest.MonkeyPatch, stage: str, apart: bool, align: int
) -> None:
    """mlp has parameters of one, three and more elements, and some are unfrozen after the first layout."""
    monkeypatch.setattr(Platform, "has_own_memory", apart)
    both: tuple[dict[str, Any], ...] = ({}, {"bf16": {"enabled": True}})
    for options in both:
        model: Any = cases.make_mlp()
        model.blocks[0].requires_grad_(False)
        engine: Any = cases.make_engine(model, cases.config_of(stage, **options))
        before = starts(engine)
        assert not any(start % align for start in before) and len(set(before)) > 1
        assert any(start % (2 * align) for start in before), "it is aligned for more than that"
        model.blocks[0].requires_grad_(True)
        engine.optimizer.add_param_group({"params": list(model.blocks[0].parameters())})
        after = starts(engine)
        assert not any(start % align for start in after)
        assert torch.isfinite(engine(torch.randn(2, 7))).all()
        engine.close()
