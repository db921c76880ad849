"""What must be refused, and how: one sentence that names the thing, on every rank, and the processes go on working."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.errors import ConfigError, ShardEngineError, UsageError
from shardengine.offload import Done, Fetched, Platform
from tests import oracle
from tests.support import cases
from tests.support.parts import is_hidden
from tests.support.raising import raises
from tests.support.ranks import RankPool
from tests.support.special_losses import CASES, net
from tests.support.special_models import Block

Pools = Callable[[int], RankPool]
CASE = CASES["two forwards, one backward"]
BOTH = pytest.mark.parametrize("stage", ["0", "3"])
ALL = pytest.mark.parametrize("stage", list(cases.STAGES))


def attempt(call: Callable[[], Any]) -> str:
    """The class and text of the library's own error; any other error goes on."""
    try:
        call()
    except ShardEngineError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def step_of(engine: Any, step: int) -> float:
    loss = CASE.loss(engine, step, engine.rank, 0)
    engine.backward(loss)
    engine.step()
    return loss.item()


def truth(ranks: int, steps: int) -> oracle.Trace:
    model = CASE.make()
    return oracle.train(
        model,
        CASE.loss,
        ranks=ranks,
        steps=steps,
        kind="AdamW",
        groups=cases.groups_of(model, "AdamW"),
        clip=cases.CLIP,
    )


def engine_of(stage: str, model: nn.Module | None = None, **options: Any) -> Any:
    return cases.make_engine(model or CASE.make(), cases.config_of(stage, zero={"reduce_bucket_size": 600}, **options))


# The config


def test_unknown_keys_get_the_nearest_name_and_all_problems_come_together() -> None:
    config = {"train_batch_size": 4, "gradient_cliping": 1.0, "zero_optimization": {"stage": 3, "reduce_bucket": 7}}
    with pytest.raises(ConfigError) as caught:
        shardengine.initialize(CASE.make(), config)
    text = str(caught.value)
    for part in ("gradient_cliping", "gradient_clipping", "reduce_bucket", "zero_optimization", "reduce_bucket_size"):
        assert part in text
    assert len(caught.value.problems) == 2


def triple(micro: int, accumulation: int, total: int) -> str:
    config = {
        "train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation
    }  # fmt: skip
    return attempt(lambda: shardengine.initialize(CASE.make(), config, mesh=cases.mesh_of_this_process()))


def test_inconsistent_batch_sizes_show_the_equation(pools: Pools) -> None:
    """13 fits no number of ranks, which the file alone shows; 18 would fit three."""
    for text in pools(2).run(triple, 2, 3, 13):
        assert text.startswith("ConfigError") and "train_batch_size" in text and "13 = 2 * 3 * ?" in text
    for text in pools(2).run(triple, 2, 3, 18):
        assert text.startswith("ConfigError") and "train_batch_size" in text and "18" in text and "2 * 3 * 2" in text


# Optimizers


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_other_optimizers_are_refused_by_name(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=name):
        shardengine.initialize(model, {"train_batch_size": 1}, optimizer=optimizer)


@pytest.mark.parametrize("option", [{"capturable": True}, {"differentiable": True}])
def test_options_that_are_not_possible_are_refused_by_name(option: dict[str, bool]) -> None:
    model = CASE.make()
    optimizer = torch.optim.AdamW(model.parameters(), **option)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=next(iter(option))):
        shardengine.initialize(model, {"train_batch_size": 1}, optimizer=optimizer)


def test_an_optimizer_over_other_parameters_is_refused() -> None:
    model, other = CASE.make(), CASE.make()
    optimizer = torch.optim.SGD([*model.inp.parameters(), *other.out.parameters()], lr=0.1)
    with raises("optimizer-of-another-model", "group 0", "parameter 2", "(3, 12)"):
        shardengine.initialize(model, {"train_batch_size": 1}, optimizer=optimizer)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = CASE.make()
    optimizer = cases.make_optimizer(model, "AdamW")
    CASE.loss(model, 0, 0, 0).backward()
    optimizer.step()
    with raises("optimizer-already-stepped"):
        shardengine.initialize(model, {"train_batch_size": 1}, optimizer=optimizer)


# Models


@BOTH
def test_half_precision_and_meta_parameters_are_refused_by_name(stage: str) -> None:
    model = CASE.make()
    model.blocks[1].up.half()
    with raises("model-fp16-without-loss-scale", "'blocks.1.up.weight'", "torch.float16"):
        engine_of(stage, model)
    with torch.device("meta"):
        empty = Block()
    with raises("model-weights-without-values", "'up.weight'"):
        engine_of(stage, empty)
    model = CASE.make()
    model.blocks[1].register_buffer("angles", torch.ones(3, device="meta"), persistent=False)
    with raises("model-buffer-without-values", "'blocks.1.angles'"):
        engine_of(stage, model)


@BOTH
def test_variables_that_are_no_number_are_refused_also_without_offload(stage: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("SHARDENGINE_THREADS", "all")
    with raises("launch-threads-invalid", "SHARDENGINE_THREADS", "'all'"):
        engine_of(stage, CASE.make())


@ALL
def test_a_model_has_one_engine(stage: str) -> None:
    model = CASE.make()
    engine = engine_of(stage, model)
    with raises("model-already-in-engine"):
        engine_of(stage, model)
    engine.close()
    assert step_of(engine_of(stage, model), 0) == truth(1, 1).losses[0][0][0]


@ALL
@pytest.mark.parametrize("other", [lambda model: nn.Sequential(model), lambda model: next(model.children())])
def test_a_trained_parameter_has_one_engine(other: Callable[[nn.Module], nn.Module], stage: str) -> None:
    model = CASE.make()
    engine = engine_of(stage, model)
    kind = type(model).__name__
    with pytest.raises(UsageError, match=rf"parameter '.*' already belongs to an engine, that of a {kind}.*close\(\)"):
        engine_of(stage, other(model))
    assert step_of(engine, 0) == truth(1, 1).losses[0][0][0]  # which goes on


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_a_shared_parameter_that_is_unfrozen_is_refused(stage: str) -> None:
    """Frozen, several engines may hold it (below stage 3); a step of one takes its memory from the other."""
    shared = nn.Linear(4, 4).requires_grad_(False)
    models = [nn.Sequential(shared, nn.Linear(4, 1)) for _ in range(2)]
    config = cases.config_of(stage)
    engines = [
        shardengine.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) for model in models
    ]

    def step(engine: Any) -> None:
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()

    for engine in engines:
        step(engine)
    shared.requires_grad_(True)
    with raises("weights-moved-after-initialize", "0"):
        for engine in engines * 2:
            step(engine)
    for engine in engines:
        engine.close()


FSDP2 = type("FSDPModule", (nn.Module,), {"__module__": "torch.distributed.fsdp"})


@ALL
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", [nn.parallel.DistributedDataParallel, nn.DataParallel, FSDP2])
def test_a_model_that_something_else_keeps_in_step_is_refused(kind: type[nn.Module], inside: bool, stage: str) -> None:
    wrapped = kind.__new__(kind)  # without the process group that its constructor asks for
    nn.Module.__init__(wrapped)
    wrapped.add_module("module", CASE.make())
    model = nn.Sequential(wrapped) if inside else wrapped
    with pytest.raises(UsageError, match=rf"({'module .0.' if inside else 'the model'}) is in {kind.__name__}, which"):
        engine_of(stage, model)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "half": (lambda model: model.half(), "'(inp|out).weight' .*torch.float16"),
    "double": (lambda model: model.double(), "'(inp|out).weight' .*torch.float64"),
    "to": (lambda model: model.to(torch.float64), "'(inp|out).weight' .*torch.float64"),
    "a part": (lambda model: model.blocks[2].down.bfloat16(), "'blocks.2.down.weight' .*torch.bfloat16"),
    "other memory": (lambda model: setattr(model.out.bias, "data", torch.zeros(3)), "'out.bias' was moved"),
    "replaced": (lambda model: setattr(model.out, "bias", nn.Parameter(torch.zeros(3))), "'out.bias' was replaced"),
}


@ALL
@pytest.mark.parametrize("change", list(CHANGES))
def test_changes_after_initialize_are_found_by_the_next_forward(stage: str, change: str) -> None:
    engine = engine_of(stage)
    step_of(engine, 0)
    alter, message = CHANGES[change]
    if stage.startswith("3") and change in ("half", "double", "to", "a part"):  # values would be read
        refusal = rf"{message.split(' ', 1)[0]} \(rank 0\) was moved or cast by .*before initialize"
        with pytest.raises(UsageError, match=refusal):
            alter(engine.module)
        step_of(engine, 1)
        return
    if stage.startswith("3") and change == "other memory":
        with pytest.raises(UsageError, match=r"'out.bias' .*by an assignment to .data while its weights"):
            alter(engine.module)
        step_of(engine, 1)
        return
    alter(engine.module)
    if stage in ("0", "1", "2") and change == "other memory":  # it is kept, as other writes are
        step_of(engine, 1)
        assert engine.module.out.bias.abs().max() < 0.1
        return
    with pytest.raises(UsageError, match=message):
        step_of(engine, 1)


@BOTH
@pytest.mark.parametrize("name", ["to", "half", "double", "bfloat16", "cuda", "cpu", "float"])
def test_the_engine_cannot_be_moved_or_cast(stage: str, name: str) -> None:
    with raises("weights-moved-after-initialize"):
        getattr(engine_of(stage), name)()


@BOTH
def test_the_engine_is_neither_copied_nor_unpacked(stage: str) -> None:
    engine = engine_of(stage)
    for copies in (copy.deepcopy, pickle.dumps):
        with raises("engine-copied"):
            copies(engine)
    with pytest.raises(TypeError, match="initialize returns the engine alone"):
        _engine, _optimizer, _loader, _scheduler = engine


# Calls in the wrong order


@ALL
def test_calls_in_the_wrong_order_are_refused_and_change_nothing(stage: str) -> None:
    engine = engine_of(stage, gradient_accumulation_steps=1)
    expected = truth(1, 3)
    with pytest.raises(UsageError, match=r"step\(\) without a backward"):
        engine.step()
    with pytest.raises(UsageError, match=r"step\(\) without a backward"):
        engine.optimizer.step()
    losses = [step_of(engine, 0)]
    with pytest.raises(UsageError, match=r"step\(\) without a backward"):
        engine.step()

    loss = CASE.loss(engine, 1, 0, 0)
    with pytest.raises(UsageError, match="clip_grad_norm_"):
        engine.clip_grad_norm_(1.0)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())

    with engine.no_sync():
        engine.backward(CASE.loss(engine, 7, 0, 0))
        with pytest.raises(UsageError, match=r"step\(\) inside no_sync\(\)"):
            engine.step()
    engine.zero_grad()
    losses.append(step_of(engine, 2))
    assert losses == [row[0][0] for row in expected.losses]
    for name, value in engine.state_dict().items():
        assert torch.equal(value, expected.parameters[name]), name
    assert engine.global_steps == 3
    engine.close()


@BOTH
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: out, r"scalar loss.*\(5, 3\)"),
        (lambda out: out.mean().detach(), "without requires_grad"),
        (lambda out: out.mean().item(), "float"),
    ],
)
def test_losses_without_a_graph_or_not_scalar_are_refused(
    stage: str, loss: Callable[[Tensor], Any], message: str
) -> None:
    engine = engine_of(stage)
    with pytest.raises(UsageError, match=message):
        engine.backward(loss(engine(torch.ones(5, 7), at=None)))
    assert step_of(engine, 0) == truth(1, 1).losses[0][0][0]


# Two engines


def two_engines(stages: tuple[str, str]) -> list[Any]:
    engines = [engine_of(stage) for stage in stages]
    losses: list[list[float]] = [[], []]
    for step in range(3):
        results = [CASE.loss(engine, step, engine.rank, 0) for engine in engines]
        for engine, loss, row in zip(engines, results, losses, strict=True):
            engine.backward(loss)
            row.append(loss.item())
        for engine in reversed(engines):
            engine.step()
    weights = [{n: cases.copy_out(v) for n, v in engine.state_dict().items()} for engine in engines]
    for engine in engines:
        engine.close()
    return [losses, weights]


@pytest.mark.parametrize("stages", [("0", "0"), ("3", "3"), ("1", "3"), ("2", "3k")])
def test_two_engines_train_interleaved(pools: Pools, stages: tuple[str, str]) -> None:
    expected = truth(2, 3)
    results = pools(2).run(two_engines, stages)
    for rank, (losses, weights) in enumerate(results):
        for row, whole in zip(losses, weights, strict=True):
            assert row == [values[rank][0] for values in expected.losses]
            for name, value in expected.parameters.items() if rank == 0 else ():
                assert torch.equal(whole[name], value), name


# Ranks that differ


def renamed(model: Any) -> None:
    model.last = model.out
    del model.out


DIFFERENCES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "names": (renamed, "last.weight"),
    "one more": (lambda model: setattr(model, "extra", nn.Linear(2, 2)), "extra.weight"),
    "shapes": (lambda model: setattr(model, "out", nn.Linear(12, 4)), r"(4, 12)"),
    "dtypes": (lambda model: model.inp.bfloat16().requires_grad_(False), "torch.bfloat16"),
    "requires_grad": (lambda model: model.inp.bias.requires_grad_(False), "frozen"),
    "buffers": (lambda model: model.register_buffer("table", torch.zeros(3)), "table"),
    "trainable bf16": (lambda model: model.inp.bfloat16(), "torch.bfloat16"),
}


RAISE_THERE = ("trainable bf16", "bad config", "bad batch size", "optimizer raises", "scheduler raises")
"""These raise on the odd rank itself; the others hear of it."""


def differing(kind: str, stage: str, odd: int) -> tuple[str, float, float]:
    """(error, seconds until it came, loss of a normal step afterwards); rank ``odd`` is unlike the others."""
    mesh = cases.mesh_of_this_process()
    is_odd = mesh.rank == odd
    model: Any = net()
    config = cases.config_of(stage)
    options: dict[str, Any] = {"mesh": mesh, "optimizer": lambda ps: torch.optim.AdamW(ps, lr=0.01)}

    def fails(*_: Any) -> Any:
        raise ValueError("only here")

    if kind in DIFFERENCES and is_odd:
        DIFFERENCES[kind][0](model)
    elif kind == "config" and is_odd:
        config["gradient_clipping"] = 0.5
    elif kind == "stage" and is_odd:
        config["zero_optimization"]["stage"] = 2 if stage == "0" else 1
    elif kind == "bad config" and is_odd:
        config["gradient_cliping"] = 0.5
    elif kind == "bad batch size" and is_odd:
        config["train_batch_size"] = 1000
    elif kind == "learning rate" and is_odd:
        options["optimizer"] = lambda ps: torch.optim.AdamW(ps, lr=0.02)
    elif kind == "no optimizer" and is_odd:
        options["optimizer"] = None
    elif kind == "optimizer raises" and is_odd:
        options["optimizer"] = fails
    elif kind == "scheduler raises":
        options["lr_scheduler"] = fails if is_odd else lambda o: torch.optim.lr_scheduler.ConstantLR(o)
    torch.optim.AdamW(net().parameters())  # its first use imports the compiler, which takes seconds
    began = time.monotonic()
    try:
        shardengine.initialize(model, config, **options)
        text = "no error"
    except (ShardEngineError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    engine = engine_of(stage)
    loss = step_of(engine, 0)
    engine.close()
    return text, seconds, loss


@BOTH
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *((kind, part) for kind, (_, part) in DIFFERENCES.items()),
        ("config", "gradient_clipping"), ("stage", "stage"), ("learning rate", "0.02"), ("no optimizer", "optimizer"),
        ("bad config", "gradient_cliping"), ("bad batch size", "1000"), ("optimizer raises", "only here"),
        ("scheduler raises", "only here"),
    ],
)  # fmt: skip
def test_ranks_that_differ_get_one_clear_error(pools: Pools, kind: str, part: str, stage: str) -> None:
    results = pools(3).run(differing, kind, stage, 2)
    for rank, (text, seconds, loss) in enumerate(results):
        assert "no error" not in text and part in text, f"rank {rank}: {text}"
        if not (rank == 2 and kind in RAISE_THERE):
            assert text.startswith("MismatchError") and "rank 2" in text, f"rank {rank}: {text}"
        assert seconds < 50
        assert loss == truth(3, 1).losses[0][rank][0], "the processes are usable afterwards"


@pytest.mark.parametrize("late", [False, True], ids=["host", "a device that runs behind it"])
def test_an_initialisation_of_weights_that_are_elsewhere_is_told(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """A fill reaches the one element that all hidden parameters show; no step is computed with it."""
    asked: list[bool] = []

    class Asked(Done):
        @property
        def reached(self) -> bool:
            asked.append(True)
            return len(asked) > 1

    if late:
        monkeypatch.setattr(Platform, "fetch", lambda _platform, values: Fetched(values, Asked()))
    engine: Any = shardengine.initialize(cases.make_mlp(), cases.config_of("3"), optimizer=None)
    x = torch.ones(2, 7)
    with torch._C.DisableTorchFunctionSubclass():  # as code does that is not torch's Python
        nn.init.zeros_(engine.module.out.weight)
    if late:
        assert torch.isfinite(engine(x)).all(), "what is gathered is not what was written"
        assert is_hidden(engine.module.blocks[0][0].weight)
    with raises("weights-written-while-sharded", "rank 0"):
        engine(x)
    assert is_hidden(engine.module.blocks[0][0].weight)
    engine(x)
    engine.close()
