"""Own models that no rank ever has whole: made inside of ``meta_init``, filled from files and by their own code.

Owns: equality with ``Net()`` and ``load_state_dict`` on the CPU, random states, what a rank reads and holds, refusals.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.errors import MismatchError, UsageError
from shardengine.loading import SafetensorsFiles
from shardengine.offload import direct_io
from tests.support import HANG_S, cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
save_file, load_file = (
    pytest.importorskip("safetensors.torch").save_file,
    pytest.importorskip("safetensors.torch").load_file,
)
WIDTH, MIB = 16, 1 << 20


class Net(nn.Module):
    """Whatever code may do to make weights: draw into views, seed, copy, cast, compute, tie, ask for a value."""

    has_data = False
    inverse: Tensor
    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8, bias=False)
        nn.init.trunc_normal_(self.up.weight, std=0.02)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2))
        nn.init.orthogonal_(self.blocks[1].get_submodule("0").get_parameter("weight"))
        self.tied = nn.Linear(WIDTH, 8, bias=False)
        self.tied.weight = self.down.weight
        self.words = nn.Embedding(11, WIDTH, padding_idx=3)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        own = torch.Generator().manual_seed(3)
        self.scale = nn.Parameter(torch.randn(WIDTH, generator=own) * torch.arange(WIDTH) / 3)
        self.frozen = nn.Parameter(torch.Tensor(WIDTH).uniform_(-1, 1), requires_grad=False)
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        if self.has_data:
            self.given = nn.Parameter(torch.tensor([1.5]))
        nn.init.sparse_(self.blocks[0].get_submodule("0").get_parameter("weight"), 0.2)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.register_buffer("inverse", 1 / 10 ** (torch.arange(WIDTH) / 8), persistent=False)
        self.register_buffer("kept", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x) * self.scale * self.frozen + self.words(torch.tensor([1, 3])).sum(0)
        for block in self.blocks:
            hidden = torch.relu(block(hidden))
        hidden = (hidden[:, self.order] + self.inverse * self.kept).to(x.dtype)
        dropped = nn.functional.dropout(self.down(hidden) + self.tied(hidden), 0.3)  # says whether the states agree
        return dropped + self.convolution.weight.sum()


class WithData(Net):
    """A parameter that is real at once, which makes the bucket that it is in rank 0's."""

    has_data = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.given


def make(lazily: bool, rank: int, kind: type[Net]) -> Net:
    torch.manual_seed(7 + rank)  # weights begin with rank 0's, dropout with each one's own
    if not lazily:
        return kind()
    with shardengine.meta_init():
        return kind()


def write(folder: str) -> None:
    """Two files and an index, in other dtypes than the model's, without some of its weights."""
    torch.manual_seed(1)
    state = {name: value.clone() for name, value in Net().state_dict().items()}
    for name in ("down.weight", "words.weight", "blocks.1.1.bias", "frozen"):
        del state[name]
    state["up.weight"] = state["up.weight"].bfloat16()
    state["kept"] = state["kept"].half()
    names = sorted(state)
    table: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: state[name].contiguous() for name in part}, f"{folder}/{file}")
        table |= dict.fromkeys(part, file)
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}), encoding="utf-8")
    save_file({"stray": torch.ones(1)}, f"{folder}/not-in-the-index.safetensors")


def train(
    stage: str, options: dict[str, Any], folder: str | None, lazily: bool, kind: type[Net] = Net
) -> dict[str, Any]:
    """What it begins with and becomes in one step, and the random state in between."""
    mesh = cases.mesh_of_this_process()
    model = make(lazily, mesh.rank, kind)
    if folder is not None and not lazily:
        files = SafetensorsFiles.of(Path(folder))
        state = {}
        for name, entry in files.tensors.items():
            flat = torch.empty(entry.shape, dtype=entry.dtype).reshape(-1)
            files.read(name, 0, flat)
            state[name] = flat.view(entry.shape)
        model.load_state_dict(state, strict=False)
        torch.manual_seed(5)
    elif folder is not None:
        torch.manual_seed(5)  # somebody draws between the two: that stays as it is
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    weights = folder if lazily else None
    config = cases.config_of(stage, **options)
    engine = shardengine.initialize(model, config, optimizer=optimizer, mesh=mesh, weights=weights)
    said: dict[str, Any] = {"rates": model.rates, "random": torch.get_rng_state()}
    before = {f"begins {name}": value.clone() for name, value in engine.state_dict().items()}
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(mesh.rank))
    loss = engine(x.bfloat16() if "bf16" in options else x).float().square().mean()
    engine.backward(loss)
    engine.step()
    after = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    assert model.down.weight is model.tied.weight
    assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    return {**said, **before, **after, "loss": loss.detach(), "inverse": model.inverse.clone()}


CPU = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}


def both(stage: str, options: dict[str, Any], folder: str | None) -> list[str]:
    """The names of what differs from a plain load."""
    kind = WithData if options.pop("data", False) else Net
    expected, got = (train(stage, options, folder, lazily, kind) for lazily in (False, True))
    assert expected.keys() == got.keys()
    return [
        name
        for name, want in expected.items()
        if not (torch.equal(got[name], want) if isinstance(want, Tensor) else got[name] == want)
    ]


def several(cases_of: list[tuple[str, dict[str, Any]]], folder: str | None) -> list[list[str]]:
    return [both(stage, options, folder) for stage, options in cases_of]


@pytest.mark.core
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("from_files", [True, False], ids=["files", "drawn"])
def test_weights_and_a_step_are_those_of_a_plain_load(
    pools: Pools, tmp_path: Path, from_files: bool, ranks: int
) -> None:
    write(str(tmp_path))
    place = str(tmp_path / "nvme")
    nvme = {key: {"device": "nvme", "nvme_path": place} for key in ("offload_param", "offload_optimizer")}
    runs: list[tuple[str, dict[str, Any]]] = [(stage, {}) for stage in ("0", "1", "2", "3k", "3")]
    runs += [(stage, BF16) for stage in ("0", "1", "3")] + [("3", {"zero": CPU}), ("3", {"zero": nvme, **BF16})]
    runs += [(stage, {"data": True, "zero": {"reduce_bucket_size": 256}}) for stage in ("1", "3")]
    for rank, said in enumerate(pools(ranks).run(several, runs, str(tmp_path) if from_files else None)):
        for (stage, options), different in zip(runs, said, strict=True):
            assert not different, (rank, stage, options, different)


# What a rank reads and holds


def _anonymous() -> int:
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return sum(1024 * int(line.split()[1]) for line in file if line.startswith("Anonymous"))


@contextmanager
def watched() -> Iterator[dict[str, int]]:
    """Bytes that are read, and the most memory that is held at a read, above what is held now."""
    found, before, ordinary = {"read": 0, "peak": 0}, _anonymous(), direct_io.preadv

    def preadv(*args: Any) -> int:
        count = ordinary(*args)
        found["read"] += count
        found["peak"] = max(found["peak"], _anonymous() - before)
        return count

    def set_state(state: Tensor) -> None:  # before and after whatever is drawn
        found["peak"] = max(found["peak"], _anonymous() - before)
        set_ordinarily(state)

    patch, set_ordinarily = pytest.MonkeyPatch(), torch.set_rng_state
    patch.setattr(direct_io, "preadv", preadv)
    patch.setattr(torch, "set_rng_state", set_state)
    try:
        yield found
    finally:
        patch.undo()
        found["peak"] = max(found["peak"], _anonymous() - before)


class Tower(nn.Module):
    """Blocks of 4 MiB."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(blocks))


def resident(stage: str, folder: str | None) -> dict[str, int]:
    """Of a model of 64 MiB."""
    mesh = cases.mesh_of_this_process()
    config = cases.config_of(stage, zero={"units": ["Linear"], "reduce_bucket_size": 1 << 20})
    for blocks in (1, 16):  # the first has what a process needs once
        with watched() as found:
            with shardengine.meta_init():
                model = Tower(blocks)
            sgd = torch.optim.SGD(model.parameters(), 0.1)
            place = None if folder is None else f"{folder}/{blocks}"
            engine = shardengine.initialize(model, config, optimizer=sgd, mesh=mesh, weights=place)
        engine.close(restore=False)
        del engine, model, sgd
    return found


def test_a_rank_reads_its_part_and_never_has_more_than_that_and_a_unit(tmp_path: Path) -> None:
    """In processes of their own: what earlier tests have left in a process's heap would be counted, or taken again."""
    for blocks in (1, 16):
        (tmp_path / str(blocks)).mkdir()
        names = [f"blocks.{number}.weight" for number in range(blocks)]
        save_file({name: torch.randn(1024, 1024) for name in names}, tmp_path / str(blocks) / "model.safetensors")
    for place in (str(tmp_path), None):
        ranks = RankPool(2)
        for found in ranks.run(resident, "3", place):
            assert found["peak"] <= (32 + 4 + 16) * MIB, found
            assert found["read"] <= 33 * MIB if place else not found["read"]
        for found in ranks.run(resident, "2", place) if place else ():
            assert found["read"] <= 33 * MIB  # the other half comes from the other rank
        ranks.stop()


# Refusals


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def refused(weights: Any, how: str = "meta_init") -> str:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    if how == "meta_init":
        with shardengine.meta_init():
            model = Small()
    else:
        with torch.device(how):
            model = Small()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError) as raised:
        shardengine.initialize(model, config, optimizer=sgd, weights=weights)
    return str(raised.value)


def test_each_refusal_is_a_sentence(tmp_path: Path) -> None:
    def saved(name: str, **changes: Any) -> Path:
        (tmp_path / name).mkdir()
        state = {key: value for key, value in {**Small().state_dict(), **changes}.items() if value is not None}
        save_file(state, tmp_path / name / "model.safetensors")
        return tmp_path / name

    assert "No such file" in refused(tmp_path / "nothing")
    assert "'b.weight' has shape (4, 5) in the weights and (4, 4)" in refused(
        saved("shape", **{"b.weight": torch.ones(4, 5)})
    )
    said = refused(saved("unknown", **{"b.wieght": torch.ones(4, 4)}))
    assert "'b.wieght', which the model does not have" in said and "'b.weight'" in said.replace(
        "b.weight", "'b.weight'"
    )
    cut = saved("cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-8])
    assert "was cut off" in refused(cut.parent)
    cut.write_bytes(b"not safetensors at all")
    assert "no length of a head" in refused(cut.parent)
    (tmp_path / "pickle").mkdir()
    torch.save(Small().state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    assert "pytorch_model.bin, a pickle" in refused(tmp_path / "pickle")
    (tmp_path / "index").mkdir()
    index = tmp_path / "index" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a.weight": "model-1.safetensors"}}', encoding="utf-8")
    assert "model-1.safetensors: cannot be read: No such file" in refused(index.parent)
    index.write_text("{}", encoding="utf-8")
    assert "expected an index with 'weight_map'" in refused(index.parent)
    assert "'a.weight' has some" in refused(saved("whole"), how="cpu")
    assert "'a.weight' is on the meta device and has no values" in refused(
        saved("missing", **{"a.weight": None}), how="meta"
    )
    assert "expected weights to be a folder of safetensors files" in refused({"a": 1})
    twice = saved("twice")
    save_file({"a.bias": torch.ones(4)}, twice / "other.safetensors")
    assert "it has 'a.bias', and so has model.safetensors" in refused(twice)


def test_what_the_weights_do_not_have_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"a.bias": torch.ones(4)}, tmp_path / "model.safetensors")
    with shardengine.meta_init():
        model = Small()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    shardengine.initialize(model, config, weights=tmp_path).close()
    assert "not in the weights" in caplog.text and "a.weight, b.weight, b.bias (3 in all)" in caplog.text


def test_what_cannot_be_put_off_is_refused() -> None:
    with raises("meta-init-draws-into-data"), shardengine.meta_init():
        nn.init.normal_(torch.tensor([0.0, 1.0]))
    with raises("meta-init-nested"), shardengine.meta_init(), shardengine.meta_init():
        pass


class Own:
    """A reader of a user's own."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.tensors = state
        self.is_open = True

    def read(self, name: str, first: int, target: Tensor) -> None:
        target.copy_(self.tensors[name].reshape(-1)[first : first + target.numel()])

    def close(self) -> None:
        self.is_open = False


def test_a_reader_of_ones_own_is_asked_and_closed() -> None:
    state = {name: value.clone() for name, value in Small().state_dict().items()}
    with torch.device("meta"):
        model = Small()
    reader = Own(state)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine = shardengine.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), 0.1), weights=reader)
    assert not reader.is_open
    for name, value in engine.state_dict().items():
        assert torch.equal(value, state[name])
    engine.close()


class Forgetful(Own):
    """Fills a part of its targets. Its values have the bytes that targets are given with."""

    def __init__(self, state: dict[str, Tensor], part: str) -> None:
        super().__init__(state)
        self.part = part

    def read(self, name: str, first: int, target: Tensor) -> None:
        if self.part == "all":
            super().read(name, first, target)
        elif self.part == "another tensor":
            target = self.tensors[name].reshape(-1)[first : first + target.numel()]
        elif self.part == "beginning":
            super().read(name, first, target[:-1])
        elif self.part == "end":
            super().read(name, first + 1, target[1:])


def forgetful(part: str, stage: str) -> str:
    with torch.device("meta"):
        model = Small()
    state = {name: value.view(torch.uint8).fill_(0xA5).view(value.dtype) for name, value in plain_state().items()}
    mesh = cases.mesh_of_this_process()
    reader = Forgetful(state, part if mesh.rank == mesh.ranks - 1 else "all")
    engine = shardengine.initialize(model, cases.config_of(stage), mesh=mesh, weights=reader)
    shown = engine.state_dict()
    engine.close()
    return "" if all(torch.equal(value, state[name]) for name, value in shown.items()) else "other values"


def plain_state() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in Small().state_dict().items()}


LEFT = r"weights=: read\('[ab].\w+', \d+, target\) did not fill the whole target \(rank %d\): exp"


@pytest.mark.parametrize("stage", ["3", "0"])
@pytest.mark.parametrize("part", ["nothing", "another tensor", "beginning", "end"])
def test_a_reader_that_leaves_something_out_is_found_out(part: str, stage: str) -> None:
    with pytest.raises(UsageError, match=LEFT % 0):
        forgetful(part, stage)


def test_a_reader_of_one_rank_that_leaves_something_out(pools: Pools) -> None:
    errors = pools(2).run_expecting_errors(forgetful, "nothing", "3")
    assert re.search(LEFT % 1, errors[1]), errors


def test_a_reader_whose_values_are_as_targets_were_is_believed(pools: Pools) -> None:
    assert pools(2).run(forgetful, "all", "3") == ["", ""]


def one_rank_alone(folder: str, what: str) -> str:
    mesh = cases.mesh_of_this_process()
    with shardengine.meta_init():
        model = Small()
        if what == "code" and mesh.rank == 1:
            nn.init.ones_(model.a.weight)
    place = f"{folder}/{what}" if what in ("nothing", "other") and mesh.rank == 1 else folder
    with pytest.raises((UsageError, MismatchError)) as raised:
        shardengine.initialize(model, cases.config_of("3"), mesh=mesh, weights=None if what == "code" else place)
    return str(raised.value)


def test_a_failure_of_one_rank_is_one_of_all(pools: Pools, tmp_path: Path) -> None:
    save_file(Small().state_dict(), tmp_path / "model.safetensors")
    first, second = pools(2).run(one_rank_alone, str(tmp_path), "nothing")
    assert "failed on rank 1" in first and "No such file" in first and "No such file" in second
    for said in pools(2).run(one_rank_alone, str(tmp_path), "code"):
        assert "way in which weights get values" in said and "[1]" in said
    (tmp_path / "other").mkdir()
    save_file({name: value + 1 for name, value in Small().state_dict().items()}, tmp_path / "other/model.safetensors")
    for said in pools(2).run(one_rank_alone, str(tmp_path), "other"):
        assert "way in which weights get values" in said and "model.safetensors: " in said


def test_reads_that_were_begun_are_there_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held up until everything was asked for, from more files than are open at one time; what is missing, or cannot be
    read, is said at the end."""
    state = {f"{number}.{name}": torch.randn(700) for number in range(70) for name in "ab"}
    for number in range(70):
        part = {key: value for key, value in state.items() if key.startswith(f"{number}.")}
        save_file(part, tmp_path / f"{number}.safetensors")
    files, go_on, ordinarily = SafetensorsFiles.of(tmp_path), threading.Event(), direct_io.read_cached

    def held_up(*args: Any) -> int:
        assert go_on.wait(HANG_S)
        return ordinarily(*args)

    monkeypatch.setattr(direct_io, "read_cached", held_up)
    found = {name: torch.full((600,), torch.nan) for name in list(state)[:40]}
    for name, target in found.items():
        files.begin_read(name, 50, target)
    assert all(target.isnan().all() for target in found.values())
    go_on.set()
    more = {name: torch.full((600,), torch.nan) for name in list(state)[40:]}
    for name, target in more.items():
        files.begin_read(name, 50, target)
    files.finish()
    for name, target in (found | more).items():
        assert torch.equal(target, state[name][50:650]), name
    last = tmp_path / "69.safetensors"
    os.truncate(last, last.stat().st_size - 400)
    for name in ("69.a", "69.b"):
        files.begin_read(name, 0, torch.empty(700))
    with raises("weights-file-cut-off", "69.safetensors"):
        files.finish()
    files.finish()
    files.close()


def begun_late(folder: str, zero: dict[str, Any], low: dict[str, Any]) -> bool:
    """Whether all weights are there when ``initialize`` returns; reads are held up until somebody waits for them."""
    go_on, cached, finish, patch = (
        threading.Event(),
        direct_io.read_cached,
        SafetensorsFiles.finish,
        pytest.MonkeyPatch(),
    )

    def held_up(*args: Any) -> int:
        assert go_on.wait(HANG_S)
        return cached(*args)

    def awaited(files: SafetensorsFiles) -> None:
        go_on.set()
        finish(files)

    patch.setattr(direct_io, "read_cached", held_up)
    patch.setattr(SafetensorsFiles, "finish", awaited)
    with shardengine.meta_init():
        model = Small()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    config: dict[str, Any] = {**cases.config_of("3", zero=zero), **low}
    engine = shardengine.initialize(model, config, optimizer=sgd, weights=folder, mesh=cases.mesh_of_this_process())
    patch.undo()
    state, same = load_file(f"{folder}/model.safetensors"), True
    with engine.full_optimizer_state() as whole:
        for name, value in state.items() if engine.rank == 0 else ():
            same &= torch.equal((whole[name] or {})["weight"], value)
    for name, value in engine.state_dict().items():
        same &= torch.equal(value, state[name].to(value.dtype))
    engine.close()
    return same


@pytest.mark.parametrize("low", [{}, {"bf16": {"enabled": True}}])
@pytest.mark.parametrize(("ranks", "tier"), [(2, "none"), (1, "cpu"), (2, "cpu")])
def test_an_engine_begins_when_all_is_read(
    pools: Pools, tmp_path: Path, low: dict[str, Any], tier: str, ranks: int
) -> None:
    save_file(Small().state_dict(), tmp_path / "model.safetensors")
    zero = {} if tier == "none" else {"offload_param": {"device": tier}, "offload_optimizer": {"device": tier}}
    assert all(pools(ranks).run(begun_late, str(tmp_path), zero, low))
