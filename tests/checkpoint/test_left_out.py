"""Checkpoints without frozen parameters: adapters alone, onto the same base model and no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine.checkpoint import index, left_out
from shardengine.errors import ConfigError, UsageError
from shardengine.interchange.stored import StoredCheckpoint
from shardengine.sharding import WEIGHT, FlatSlice
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
BASE = {"base.weight", "base.bias", "scale"}


class Adapted(nn.Module):
    """A frozen base with an adapter, frozen single numbers, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(60, 60)
        torch.manual_seed(9)
        self.down, self.up = nn.Linear(60, 3, bias=False), nn.Linear(3, 60, bias=False)
        self.scale = nn.Parameter(torch.randn(1, 3).t(), requires_grad=False)
        self.register_buffer("seen", torch.zeros(4))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 60] → []"""
        return (self.base(x) + self.up(self.down(x) * self.scale.view(3))).square().mean()


def engine_of(stage: str, seed: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return cases.make_engine(Adapted(seed).to(dtype), cases.config_of(stage, **options), "AdamW")


def take_steps(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        torch.manual_seed(step)
        loss = engine(torch.randn(2, 60).to(next(engine.module.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights_of(engine: Any) -> dict[str, Any]:
    return {name: value.float().numpy() for name, value in engine.state_dict().items()}


def saved(stage: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(stage, **options)
    take_steps(engine, 0, 2)
    engine.save_checkpoint(folder, "adapters", frozen=False)
    engine.save_checkpoint(folder, "all")
    losses = take_steps(engine, 2, 2)
    found = {"losses": losses, "weights": weights_of(engine)}
    engine.close()
    return found


def loaded(stage: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(stage, **options)
    found = engine.load_checkpoint(folder, "adapters")
    assert (found.missing, found.unexpected, found.global_steps) == ((), (), 2)
    losses = take_steps(engine, 2, 2)
    result = {"losses": losses, "weights": weights_of(engine)}
    engine.close()
    return result


@pytest.mark.parametrize("async_save", [False, True], ids=["at once", "behind"])
@pytest.mark.parametrize(("before", "after"), [((1, "0"), (1, "3")), ((2, "3"), (2, "2")), ((3, "2"), (3, "3k"))])
def test_training_goes_on_from_adapters_alone(
    pools: Pools, tmp_path: Path, before: tuple[int, str], after: tuple[int, str], async_save: bool
) -> None:
    options = {"checkpoint": {"async_save": async_save}}
    expected = pools(before[0]).run(saved, before[1], str(tmp_path), options)
    found = pools(after[0]).run(loaded, after[1], str(tmp_path), options)
    for one, other in zip(found, expected, strict=True):
        assert one["losses"] == other["losses"]
        assert all((one["weights"][name] == other["weights"][name]).all() for name in other["weights"])
    facts = index.read(tmp_path / "adapters")
    assert set(facts["left_out"]) == BASE and not BASE & set(facts["tensors"])
    sizes = [sum(path.stat().st_size for path in (tmp_path / tag).glob("*.safetensors")) for tag in ("adapters", "all")]
    assert sizes[1] - sizes[0] >= 4 * (60 * 60 + 60), "the base is in none of its files"


@pytest.mark.parametrize(("before", "after"), [((1, "2"), (3, "3")), ((3, "3"), (2, "0"))])
def test_fingerprints_do_not_depend_on_who_holds_what(
    pools: Pools, tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    pools(before[0]).run(saved, before[1], str(tmp_path), {})
    pools(after[0]).run(loaded, after[1], str(tmp_path), {})


def onto_another(stage: str, folder: str) -> list[Any]:
    engine = engine_of(stage, seed=2)
    before = engine.state_dict()
    with pytest.raises(UsageError) as caught:
        engine.load_checkpoint(folder, "adapters")
    with pytest.warns(UserWarning, match="other ones than it was saved with") if engine.rank == 0 else nullcontext():
        engine.load_checkpoint(folder, "adapters", strict=False)
    after = engine.state_dict()
    same = sorted(name for name in after if torch.equal(after[name], before[name]))
    engine.close()
    return [str(caught.value), same]


@pytest.mark.parametrize("stage", ["0", "3"])
def test_another_base_model_is_refused_by_name_on_every_rank(pools: Pools, tmp_path: Path, stage: str) -> None:
    pools(2).run(saved, "2", str(tmp_path), {})
    results = pools(2).run(onto_another, stage, str(tmp_path))
    for text, _ in results:
        assert "this engine's are other ones than it was saved with: base.weight, base.bias. Expected the same" in text
    assert results[0][1] == sorted([*BASE, "seen"]), "the base stays, the adapters are taken"


def test_another_dtype_of_the_base_is_no_other_base(tmp_path: Path) -> None:
    saved("2", str(tmp_path), {})
    engine = engine_of("3", bf16={"enabled": True})
    with pytest.warns(UserWarning) as told:
        engine.load_checkpoint(tmp_path, "adapters")
    said = "\n".join(str(each.message) for each in told)
    assert "dtypes were converted: down.weight" in said
    assert "nobody has compared them: expected those of the same base model: scale (float32 to bfloat16), base" in said
    engine.close()


def test_what_is_trained_here_cannot_come_from_it(tmp_path: Path) -> None:
    saved("2", str(tmp_path), {})
    model = Adapted(1)
    model.base.requires_grad_(True)
    engine = cases.make_engine(model, cases.config_of("2"), "AdamW")
    with pytest.raises(UsageError, match=r"base.weight: frozen in the checkpoint, trained here"):
        engine.load_checkpoint(tmp_path, "adapters")
    engine.close()


def test_an_export_says_what_is_missing(tmp_path: Path) -> None:
    saved("2", str(tmp_path), {})
    with (
        StoredCheckpoint(tmp_path / "adapters") as stored,
        raises("export-frozen-left-out"),
    ):
        stored.whole("base.weight", WEIGHT)


def test_an_index_may_not_say_more(tmp_path: Path) -> None:
    saved("2", str(tmp_path), {})
    facts = json.loads((tmp_path / "adapters" / "index.json").read_text())["index"]
    for wrong in ({"nobody": 1}, {"down.weight": 1}, {"base.bias": -1}, {"base.bias": "x"}):
        with pytest.raises((ValueError, ConfigError), match="left_out"):
            index._check({**facts, "left_out": wrong})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_shares_of_a_fingerprint_add_up(size: int, dtype: torch.dtype) -> None:
    values = torch.randint(-100, 100, (size,)).to(dtype)
    whole = left_out.sums([FlatSlice("a", WEIGHT, 0, values)], {"a": size})
    for cut in (0, size // 3, size):
        shares = [
            left_out.sums([FlatSlice("a", WEIGHT, first, values[first:end])], {"a": size})
            for first, end in ((0, cut), (cut, size))
        ]
        assert left_out.together(shares) == dict(whole)
    if size:
        other = values.clone()
        other[size // 2 if size < 64 else 0] += 1
        assert left_out.sums([FlatSlice("a", WEIGHT, 0, other)], {"a": size}) != whole
