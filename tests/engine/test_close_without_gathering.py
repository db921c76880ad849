"""close(restore=False): nothing is gathered, the module refuses to be used, and the next engine has the same bits."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine.comm import Purpose
from shardengine.errors import ShardEngineError
from shardengine.offload import Platform
from shardengine.runtime import placing
from shardengine.sharding import LeftShards
from tests.support import cases
from tests.support.parts import is_hidden
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
MIXED: dict[str, Any] = {"bf16": {"enabled": True}}
CLOSED = "engine was closed with restore=False"


def make(frozen: bool = False) -> Any:
    model: Any = cases.make_mlp()
    if frozen:
        model.blocks[1].requires_grad_(False)
        model.inp.bias.requires_grad_(False)
    model.register_buffer("mean", torch.arange(3.0))
    return model


def engine_of(model: nn.Module, stage: str, options: dict[str, Any]) -> Any:
    zero = {"reduce_bucket_size": 256, **options.get("zero", {})}
    rest = {key: value for key, value in options.items() if key != "zero"}
    return cases.make_engine(model, cases.config_of(stage, zero=zero, **rest))


def weights_of(engine: Any) -> dict[str, Tensor]:
    """All weights, and beside them what is stepped of those that are, in fp32."""
    with engine.full_params():
        found = {name: cases.copy_out(parameter) for name, parameter in engine.module.named_parameters()}
    with engine.full_optimizer_state() as states:
        found |= {f"{n} stepped": cases.copy_out(of["weight"]) for n, of in states.items() if of is not None}
    return found


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype is value.dtype and ours[name].stride() == value.stride(), name
        assert torch.equal(ours[name], value), name


def hand_over(first: tuple[str, dict[str, Any]], then: tuple[str, dict[str, Any]], folder: str, frozen: bool) -> str:
    """ "" or what differs between a model that was taken over and one that was loaded from a checkpoint."""
    model = make(frozen)
    engine = engine_of(model, *first)
    parameters = list(model.parameters())
    cases.run_steps(engine, 2)
    engine.save_checkpoint(folder)
    core, hides = engine._core, engine._core.stage.moves_weights
    sent = core.sent()
    engine.close(restore=False)
    assert {purpose for purpose, count in core.sent().items() if count != sent[purpose]} <= {Purpose.CONTROL}
    assert [is_hidden(p) for p in model.parameters()] == [hides and (p.numel() > 0) for p in parameters]
    assert torch.equal(model.mean, torch.arange(3.0))
    engine = engine_of(model, *then)
    assert LeftShards.on(model) is None and all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    loaded = engine_of(make(frozen), *then)
    loaded.load_checkpoint(folder, weights_only=True)
    for step in (None, 3, 4):
        if step is not None:
            ours, theirs = (cases.run_micro_batch(e, cases.loss_of, step, 0) for e in (engine, loaded))
            assert ours == theirs
        assert_same(weights_of(engine), weights_of(loaded))
    loaded.close()
    engine.close()
    assert not any(is_hidden(p) for p in model.parameters())
    cases.loss_of(model, 0, 0, 0)
    return ""


HOST: dict[str, Any] = {"zero": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}
HALF: dict[str, Any] = {"zero": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
ONE_UNIT: dict[str, Any] = {"zero": {"units": ["Linear"], "reduce_bucket_size": 1000}}
WITHOUT: dict[str, Any] = {"bf16": {"enabled": True, "master_weights": False}}
CASES: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "the same": (("3", {}), ("3", {})),
    "the same, with masters": (("3", MIXED), ("3", MIXED)),
    "other units and buckets": (("3", MIXED), ("3", {**MIXED, **ONE_UNIT})),
    "whole afterwards": (("3", MIXED), ("1", MIXED)),
    "kept after forward": (("3k", {}), ("2", {})),
    "whole before": (("2", MIXED), ("3", MIXED)),
    "replicated masters": (("0", MIXED), ("3", MIXED)),
    "never sharded": (("1", MIXED), ("0", MIXED)),
    "masters forgotten": (("3", MIXED), ("3", WITHOUT)),
    "to the host": (("3", MIXED), ("3", {**MIXED, **HOST})),
    "from the host": (("3", {**MIXED, **HOST}), ("3", MIXED)),
    "from the host in fp32": (("3", HOST), ("3", {})),
    "a part of it there": (("2", {**MIXED, **HALF}), ("3", {**MIXED, **HALF})),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_next_engine_begins_as_from_a_checkpoint(pools: Pools, tmp_path: Path, name: str) -> None:
    assert pools(2).run(hand_over, *CASES[name], str(tmp_path), False) == ["", ""]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("then", ["2", "3"])
def test_frozen_weights_are_taken_over_at_any_number_of_ranks(
    pools: Pools, tmp_path: Path, ranks: int, then: str
) -> None:
    found = pools(ranks).run(hand_over, ("3", MIXED), (then, MIXED), str(tmp_path), True)
    assert found == [""] * ranks


def test_weights_in_files_are_taken_over_from_there(pools: Pools, tmp_path: Path) -> None:
    tier = {"device": "nvme", "nvme_path": str(tmp_path / "disk"), "buffer_count": 3}
    disk = ("3", {**MIXED, "zero": {"offload_param": tier, "offload_optimizer": tier}})
    assert pools(2).run(hand_over, disk, disk, str(tmp_path / "saved"), False) == ["", ""]
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file()], "the files are gone"


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ShardEngineError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def closed(stage: str = "3", options: dict[str, Any] = MIXED) -> tuple[Any, dict[str, Tensor]]:
    model = make()
    engine = engine_of(model, stage, options)
    cases.run_steps(engine, 1)
    before = weights_of(engine)
    engine.close(restore=False)
    return model, before


USES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: cases.loss_of(model, 0, 0, 0),
    "forward of a part": lambda model: model.blocks[1](torch.ones(1, 13)),
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict(make().state_dict()),
    "deepcopy": copy.deepcopy,
    "save": lambda model: torch.save(model, io.BytesIO()),
}


def test_what_cannot_be_done_meanwhile_is_told() -> None:
    model, before = closed()
    for what, use in USES.items():
        text = told(partial(use, model))
        assert text.startswith("UsageError") and CLOSED in text and "shardengine.initialize(model" in text, (what, text)
    engine = engine_of(model, "3", MIXED)
    assert_same(weights_of(engine), before)
    engine.close()
    model.load_state_dict(copy.deepcopy(model).state_dict())


def cast(model: Any) -> None:
    assert "parameter 'inp.weight' (rank 0) was moved or cast by float" in told(model.float)
    with torch._C.DisableTorchFunctionSubclass():
        model.float()


def write(model: Any) -> None:
    with torch.no_grad():
        assert "parameter 'scale' (rank 0) was written by fill_" in told(lambda: model.scale.fill_(3.0))
        with torch._C.DisableTorchFunctionSubclass():  # as code does that is not torch's Python
            model.scale.fill_(3.0)


def write_data(model: Any) -> None:
    model.out.bias.data = torch.ones(3, dtype=torch.bfloat16)


def replace(model: Any) -> None:
    model.out = nn.Linear(13, 3)


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "cast": (cast, "'scale' was moved, cast or written"),
    "written": (write, "a parameter was written after close(restore=False)"),
    "given other values": (write_data, "'out.bias' was moved, cast or written"),
    "replaced": (replace, "'out.weight' is gone"),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_module_that_was_changed_meanwhile_is_refused(name: str) -> None:
    change, expected = CHANGES[name]
    model, _ = closed()
    change(model)
    text = told(lambda: engine_of(model, "3", MIXED))
    assert expected in text and CLOSED in text


def test_other_ranks_are_refused() -> None:
    model, _ = closed()
    left = LeftShards.on(model)
    assert left is not None
    text = told(partial(left.check, model, 0, 2, Platform(torch.device("cpu"))))
    assert "spread over 1 ranks" in text and "got rank 0 of 2" in text and "engine.load_checkpoint(dir)" in text
    whole, _ = closed("2")
    left = LeftShards.on(whole)
    assert left is not None
    left.check(whole, 0, 2, Platform(torch.device("cpu")))
    assert LeftShards.on(whole) is None, "its weights are there, its masters are of no use"


def test_new_parameters_beside_those_that_are_left_are_ordinary() -> None:
    model, before = closed()
    model.extra = nn.Parameter(torch.full((5,), 0.3))
    engine = engine_of(nn.Sequential(model), "3", MIXED)
    after = weights_of(engine)
    assert torch.equal(after.pop("0.extra"), torch.full((5,), 0.3).bfloat16())
    assert torch.equal(after.pop("0.extra stepped"), torch.full((5,), 0.3))
    assert_same({name.removeprefix("0."): value for name, value in sorted(after.items())}, dict(sorted(before.items())))
    engine.close()


def test_whole_weights_that_were_written_meanwhile_count() -> None:
    model, before = closed("1")
    with torch.no_grad():
        model.scale.fill_(3.0)
    cases.loss_of(model, 0, 0, 0)
    engine = engine_of(model, "1", MIXED)
    assert not torch.equal(before["inp.weight stepped"], before["inp.weight"].float()), "masters have more bits"
    assert_same(
        weights_of(engine), before | {"scale": torch.tensor(3.0).bfloat16(), "scale stepped": torch.tensor(3.0)}
    )
    engine.close()


def test_a_start_that_took_over_a_part_of_the_masters_leaves_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = closed("1")

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(placing, "begin_master", fail)
        assert "no memory" in told(lambda: engine_of(model, "1", MIXED))
    engine = engine_of(model, "1", MIXED)
    after = weights_of(engine)
    for name, _ in model.named_parameters():
        assert torch.equal(after[name], before[name])
        assert torch.equal(after[f"{name} stepped"], before[name].float()), "masters are gone"
    engine.close()


def test_what_is_left_goes_with_the_module(tmp_path: Path) -> None:
    tier = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 3}
    model, _ = closed("3", {**MIXED, "zero": {"offload_param": tier, "offload_optimizer": tier}})
    left = LeftShards.on(model)
    watched = [weakref.ref(model), weakref.ref(left), weakref.ref(model.out.weight)]
    del model, left
    gc.collect()
    assert [each() for each in watched] == [None] * 3
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def starts_fail(late: bool) -> tuple[str, str, str]:
    """A start that fails before anything is taken over, or after all of it: the next one has the same bits."""
    model, before = closed()
    first = told(lambda: engine_of(model, "3", {**MIXED, "no_such_key": 1}))
    used = told(lambda: cases.loss_of(model, 0, 0, 0))
    second = ""
    if late:
        second = told(lambda: cases.make_engine(model, cases.config_of("3", **MIXED), lr_scheduler="nonsense"))
        assert CLOSED in told(lambda: cases.loss_of(model, 0, 0, 0))
    engine = engine_of(model, "3", MIXED)
    assert_same(weights_of(engine), before)
    engine.close()
    return first, used, second


@pytest.mark.parametrize("late", [False, True])
def test_a_start_that_fails_loses_nothing(pools: Pools, late: bool) -> None:
    for first, used, second in pools(2).run(starts_fail, late):
        assert "no_such_key" in first and CLOSED in used and ("Error" in second) == late


def closes_alone(flags: tuple[bool, bool]) -> tuple[str, str]:
    """Ranks that do not mean the same: one closes otherwise, or one alone."""
    model = make()
    engine = engine_of(model, "3", {})
    cases.run_steps(engine, 1)
    engine.close(restore=flags[engine.rank])
    return told(lambda: cases.loss_of(model, 0, 0, 0)), str(any(is_hidden(p) for p in model.parameters()))


def test_where_some_ranks_restore_all_do(pools: Pools) -> None:
    assert pools(2).run(closes_alone, (True, False)) == [("no error", "False")] * 2
    for text, hidden in pools(2).run(closes_alone, (False, False)):
        assert CLOSED in text and hidden == "True"


def peak() -> dict[str, int]:
    """Bytes of distinct storages of tensors at their most while weights are taken over, beside those before."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)))
    config = cases.config_of("3", zero={"reduce_bucket_size": 4096, "units": ["Sequential"]}, **MIXED)
    engine = cases.make_engine(model, config, None)
    engine.close(restore=False)
    gc.collect()

    def total() -> int:
        gc.collect()
        tensors = [each for each in gc.get_objects() if isinstance(each, Tensor) and each.layout is torch.strided]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    before, most = total(), 0
    with pytest.MonkeyPatch.context() as patch:
        plain = placing.begin_master

        def begin(*args: Any) -> None:
            nonlocal most
            plain(*args)
            most = max(most, total())

        patch.setattr(placing, "begin_master", begin)
        engine = cases.make_engine(model, config, None)
    found = {"more": most - before, "whole": sum(p.numel() for p in model.parameters()) * 2}
    engine.close()
    return found


def test_never_is_more_than_a_unit_whole(pools: Pools) -> None:
    for found in pools(2).run(peak):
        assert 0 < found["more"] < found["whole"] / 2, found
