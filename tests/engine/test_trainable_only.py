"""What is trained, without what is frozen: state dicts and saved models of adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shardengine.errors import MismatchError
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


class Adapted(nn.Module):
    """A frozen base in two blocks, an adapter beside each, a head tied to one of the adapters, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(2))
        self.adapters = nn.ModuleList(nn.Linear(40, 40, bias=False) for _ in range(2))
        self.head = nn.Linear(40, 40, bias=False)
        self.head.weight = self.adapters[0].weight  # type: ignore[assignment]
        self.late = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.register_buffer("calls", torch.zeros(()))
        self.blocks.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 40] → []"""
        self.get_buffer("calls").add_(1)
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            x = block(x) + adapter(x)
        return self.head(x).square().mean()


TRAINED = {"adapters.0.weight", "adapters.1.weight", "head.weight"}


def make() -> nn.Module:
    torch.manual_seed(4)
    return Adapted()


def trained(stage: str, folder: str | None, options: dict[str, Any]) -> dict[str, Any]:
    config = cases.config_of(stage, zero={"reduce_bucket_size": 2000, "units": ["Linear"]}, **options)
    engine = cases.make_engine(make(), config)
    for step in range(2):
        torch.manual_seed(100 * step + engine.rank)
        engine.backward(engine(torch.randn(2, 40)))
        engine.step()
    moved = []
    for trainable_only in (False, True):
        before = engine.traffic()["by_purpose_total"].get("full_params and state_dict", 0)
        state = engine.state_dict(trainable_only=trainable_only)
        moved.append((engine.traffic()["by_purpose_total"].get("full_params and state_dict", 0) - before, state))
    if folder is not None:
        engine.save_pretrained(folder, trainable_only=True)
    engine.close()
    return {"every": moved[0][1], "trained": moved[1][1], "bytes": [count for count, _ in moved]}


@pytest.mark.parametrize("options", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_frozen_parameters_are_left_out_and_not_gathered(
    pools: Pools, tmp_path: Path, stage: str, options: dict[str, Any]
) -> None:
    first, second = pools(2).run(trained, stage, str(tmp_path / "saved"), options)
    assert second["every"] == {} and second["trained"] == {}
    every, found = first["every"], first["trained"]
    assert set(every) == set(make().state_dict()) and set(found) == TRAINED | {"calls"}
    assert all(torch.equal(found[name], every[name]) for name in found)
    assert found["head.weight"].data_ptr() == found["adapters.0.weight"].data_ptr(), "tied as in the module"
    whole, part = first["bytes"]
    size = 2 if options else 4
    assert part == (2 * 40 * 40 * size // 2 if stage in ("3", "3k") else 0) and part <= whole
    file = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(file) | {"head.weight"} == set(found) | {"head.weight"}
    assert all(torch.equal(file[name], found[name]) for name in file)


def of_one_mind(stage: str) -> str:
    engine = cases.make_engine(make(), cases.config_of(stage))
    with pytest.raises(MismatchError) as caught:
        engine.state_dict(trainable_only=engine.rank == 0)
    engine.close()
    return str(caught.value)


def test_ranks_that_want_different_ones_are_told(pools: Pools) -> None:
    assert all("trainable_only" in text for text in pools(2).run(of_one_mind, "3"))


def test_what_was_unfrozen_counts() -> None:
    engine = cases.make_engine(make(), cases.config_of("2"))
    engine.module.late.requires_grad_(True)
    assert engine.optimizer is not None
    engine.optimizer.add_param_group({"params": [engine.module.late]})
    assert set(engine.state_dict(trainable_only=True)) == TRAINED | {"calls", "late"}
    engine.close()


def test_what_is_frozen_now_is_left_out() -> None:
    engine = cases.make_engine(make(), cases.config_of("3"))
    engine.module.get_parameter("adapters.1.weight").requires_grad_(False)
    engine.module.late.requires_grad_(True)
    assert set(engine.state_dict(trainable_only=True)) == TRAINED - {"adapters.1.weight"} | {"calls", "late"}
    engine.close()


def test_a_hugging_face_model_is_not_saved_in_parts(tmp_path: Path) -> None:
    engine = cases.make_engine(cases.make_gpt2(), cases.config_of("2"))
    with raises("save-pretrained-without-adapters"):
        engine.save_pretrained(tmp_path / "part", trainable_only=True)
    assert not (tmp_path / "part").exists()
    engine.close()
