"""Checkpoints: resuming is bit-exact, a damaged or foreign one is refused before anything changes."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardengine.checkpoint import directory, tensor_file
from shardengine.errors import ShardEngineError, UsageError
from shardengine.offload import Platform
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


def schedule(optimizer: Any) -> Any:
    """Schedules in schedules in a schedule; the rate drops before the fifth step, and after it."""
    rates = torch.optim.lr_scheduler
    parts = [rates.LinearLR(optimizer, total_iters=2), rates.MultiStepLR(optimizer, [1, 6], gamma=0.5)]
    return rates.ChainedScheduler(
        [rates.SequentialLR(optimizer, parts, [2]), rates.ConstantLR(optimizer, 0.9, total_iters=7)], optimizer
    )


def make(model: str, kind: str, stage: str, micros: int = 1, low: bool = False, **zero: Any) -> Any:
    options: dict[str, Any] = {"bf16": {"enabled": True}, "overlap_param_gather": True} if low else {}
    return cases.make_engine(
        cases.MODELS[model](), cases.config_of(stage, micros, zero=zero, **options), kind,
        lr_scheduler=schedule if kind == "SGD"
        else lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 8], gamma=0.5),
    )  # fmt: skip


def steps(engine: Any, first: int, last: int) -> list[Any]:
    """Steps whose dropout and data go on from the random state, which is never seeded here."""
    rows: list[Any] = []
    for _ in range(first, last):
        for _ in range(engine.gradient_accumulation_steps()):
            ids = torch.randint(0, cases.VOCAB, (2, cases.LENGTH))
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            rows.append(loss.item())
        rows.append((engine.get_global_grad_norm(), engine.get_lr()))
    return rows


def outcome(engine: Any, rows: list[Any]) -> dict[str, Any]:
    weights = {name: cases.copy_out(value).float().numpy() for name, value in engine.state_dict().items()}
    counters = (engine.global_steps, engine.global_samples, engine.micro_steps, list(engine.optimizer.steps))
    state = cases.local_state(engine)
    engine.close()
    return {"rows": rows, "weights": weights, "state": state, "counters": counters}


def unbroken(folder: str, kind: str, stage: str, micros: int, low: bool) -> dict[str, Any]:
    """Ten steps that save after the fifth."""
    engine = make("gpt2", kind, stage, micros, low)
    torch.manual_seed(5 + engine.rank)
    steps(engine, 0, 5)
    engine.save_checkpoint(folder, client_state={"position": 5})
    return outcome(engine, steps(engine, 5, 10))


def resumed(folder: str, kind: str, stage: str, micros: int, low: bool) -> dict[str, Any]:
    """The last five in an engine of its own, after other steps, with other buckets and another device's alignment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Platform, "alignment", 256)
        engine = make("gpt2", kind, stage, micros, low, reduce_bucket_size=1000)
    torch.manual_seed(77)
    steps(engine, 0, 1)
    loaded = engine.load_checkpoint(folder)
    assert (loaded.tag, loaded.global_steps, loaded.client_state) == ("step-00000005", 5, {"position": 5})
    return outcome(engine, steps(engine, 5, 10))


@pytest.mark.parametrize("stage", list(cases.STAGES))
@pytest.mark.parametrize(
    ("ranks", "kind", "micros", "low"),
    [(1, "SGD", 1, False), (2, "AdamW", 3, False), (3, "AdamW", 1, False), (2, "SGD", 1, True)],
)
def test_resuming_is_bit_exact(
    pools: Pools, tmp_path: Path, ranks: int, kind: str, micros: int, low: bool, stage: str
) -> None:
    """low: bf16 with master weights, and the gathers of the last step in flight while it is saved."""
    before = pools(ranks).run(unbroken, str(tmp_path), kind, stage, micros, low)
    after = pools(ranks).run(resumed, str(tmp_path), kind, stage, micros, low)
    rates = [row[1] for row in before[0]["rows"] if isinstance(row, tuple)]
    assert rates[-1] < rates[0], "the schedule changes nothing after the checkpoint"
    for one, two in zip(before, after, strict=True):
        assert one["rows"] == two["rows"] and one["counters"] == two["counters"]
        for name, value in one["weights"].items():
            assert value.tobytes() == two["weights"][name].tobytes(), name
    whole = [cases.assemble([result["state"] for result in results]) for results in (before, after)]
    assert whole[0].keys() == whole[1].keys()
    assert all(flat.tobytes() == whole[1][at].tobytes() for at, flat in whole[0].items())


def own_statistics(folder: str) -> dict[str, list[Any]]:
    """Without broadcast_buffers: the buffers as saved, after two more steps, as loaded, after the two steps again."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3))
    engine = cases.make_engine(model, cases.config_of("2", broadcast_buffers=False))
    found = {}

    def train(name: str, first: int, last: int) -> None:
        for step in range(first, last):
            torch.manual_seed(cases.seed_of(step, engine.rank, 0))
            engine.backward(engine(torch.randn(5, 7)).square().mean())
            engine.step()
        found[name] = [cases.copy_out(buffer).numpy() for buffer in model.buffers()]

    train("saved", 0, 2)
    engine.save_checkpoint(folder)
    train("after", 2, 4)
    engine.load_checkpoint(folder)
    train("loaded", 2, 2)
    train("again", 2, 4)
    engine.close()
    return found


def test_buffers_that_are_not_broadcast_are_every_ranks_own(pools: Pools, tmp_path: Path) -> None:
    results = pools(2).run(own_statistics, str(tmp_path))
    assert results[0]["saved"][0].tobytes() != results[1]["saved"][0].tobytes()
    for found in results:
        for one, two in (("saved", "loaded"), ("after", "again")):
            assert [b.tobytes() for b in found[one]] == [b.tobytes() for b in found[two]], one


def saves(folder: str, stage: str = "3", count: int = 1) -> None:
    engine = make("mlp", "AdamW", stage)
    engine.global_steps = count
    engine.save_checkpoint(folder)
    engine.close()


def refusal(folder: str, stage: str = "3", model: str = "mlp", kind: str = "AdamW") -> tuple[str, bool]:
    """The message of a load that fails, and whether the engine was left as it was."""
    engine = make(model, kind, stage)
    before = [part.values.clone() for part in engine.optimizer.parameter_state()]
    try:
        engine.load_checkpoint(folder)
        text = "no error"
    except ShardEngineError as error:
        text = str(error)
    same = all(torch.equal(a, b.values) for a, b in zip(before, engine.optimizer.parameter_state(), strict=True))
    engine.close()
    return text, same


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "index", "index gone"])
def test_a_damaged_checkpoint_is_refused_on_every_rank(pools: Pools, tmp_path: Path, damage: str) -> None:
    pools(2).run(saves, str(tmp_path))
    place = tmp_path / "step-00000001"
    file = place / ("index.json" if damage.startswith("index") else "rank-00001.safetensors")
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    if damage in ("delete", "index gone"):
        file.unlink()
    else:
        file.write_bytes(data if damage == "flip" else data[:-9])
    for text, same in pools(2).run(refusal, str(tmp_path)):
        assert file.name in text and same
        assert damage.startswith("index") or "it holds" in text


def test_what_does_not_fit_is_listed_on_every_rank(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(saves, str(tmp_path))
    for text, same in pools(2).run(refusal, str(tmp_path), "2", "mlp", "SGD"):
        assert same and "optimizer: the checkpoint has AdamW, the engine SGD" in text and "weights_only=True" in text
    for text, same in pools(2).run(refusal, str(tmp_path), "3", "llama"):
        assert same and "only in the checkpoint" in text and "inp.weight" in text and "not in the checkpoint" in text


def fails_on_one(folder: str, where: str) -> str:
    """A save in which rank 1 finds the disk full, or rank 0 does at the end."""
    engine = make("mlp", "AdamW", "3")
    engine.global_steps = 2
    names: dict[str, tuple[Any, str, int]] = {"write": (tensor_file, "write", 1), "rename": (directory, "finish", 0)}
    module, name, rank = names[where]
    original = getattr(module, name)

    def full(*args: Any, **options: Any) -> None:
        original(*args) if where == "write" else None
        raise OSError(errno.ENOSPC, "No space left on device")

    if engine.rank == rank:
        setattr(module, name, full)
    try:
        engine.save_checkpoint(folder)
        text = "no error"
    except ShardEngineError as error:
        text = str(error)
    finally:
        setattr(module, name, original)
    assert engine._core.collectives.failures._reported is None, "every rank raised: nothing is reported besides"
    engine.load_checkpoint(folder)
    text += f" {engine.global_steps}"
    engine.close()
    return text


@pytest.mark.parametrize("where", ["write", "rename"])
def test_a_full_disk_raises_everywhere_and_harms_nothing(pools: Pools, tmp_path: Path, where: str) -> None:
    pools(2).run(saves, str(tmp_path))
    for text in pools(2).run(fails_on_one, str(tmp_path), where):
        assert "No space left" in text and text.endswith(" 1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_a_killed_save_is_never_picked_up(tmp_path: Path) -> None:
    saves(str(tmp_path), "0")
    left = tmp_path / ".tmp-step-00000002"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    assert refusal(str(tmp_path), "0")[0] == "no error"
    (tmp_path / "step-00000001").rename(tmp_path / ".old-step-00000001")  # killed while it was replaced
    assert refusal(str(tmp_path), "0")[0] == "no error"
    saves(str(tmp_path), "0")  # replaces
    saves(str(tmp_path), "0", 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]
    assert (tmp_path / "latest").read_text(encoding="utf-8") == "step-00000002\n"


def test_wrong_calls_are_refused_by_name(tmp_path: Path) -> None:
    engine = make("mlp", "AdamW", "3", micros=2)
    for tag in ("../up", "latest", "", ".hidden"):
        with raises("checkpoint-tag-invalid"):
            engine.save_checkpoint(tmp_path, tag)
    for value, path in (({"a": {"b": torch.ones(1)}}, "client_state.a.b is Tensor"), ({1: 2}, "key 1 is int"),
                        ({"a": [float("nan")]}, r"client_state.a\[0\] is nan")):  # fmt: skip
        with pytest.raises(UsageError, match=path):
            engine.save_checkpoint(tmp_path, client_state=value)
    with engine.full_params(), pytest.raises(UsageError, match="full_params"):
        engine.save_checkpoint(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with raises("checkpoint-not-found"):
        engine.load_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path)
    engine.backward(cases.loss_of(engine, 0, 0, 0))
    with pytest.raises(UsageError, match="middle of a step"):
        engine.load_checkpoint(tmp_path)
    engine.close()


def test_files_are_ordinary_safetensors_and_json(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    saves(str(tmp_path), "2")
    place = tmp_path / "step-00000001"
    tensors = load_file(place / "rank-00000.safetensors")
    assert tensors["scale/weight[0:1]"].item() == 1.25
    index = json.loads((place / "index.json").read_text(encoding="utf-8"))["index"]
    stored = index["tensors"]["scale"]["exp_avg"]
    assert stored["dtype"] == "float32" and stored["pieces"][0][:3] == ["rank-00000.safetensors", 0, 1]
    assert sorted(path.name for path in place.iterdir()) == ["index.json", "rank-00000.safetensors"]
