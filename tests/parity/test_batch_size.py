"""Other batch sizes between two steps: equal to the oracle, which is told the same story, bit for bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from shardengine.errors import ConfigError, MismatchError, UsageError
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STORY = (1, 3, 2, 1)
"""Micro-batches of a step, for ``EACH`` steps each."""
EACH = 2
LOW: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 that waits in bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
}


@functools.lru_cache(maxsize=32)
def truth(kind: str, ranks: int, order: str, precision: str) -> oracle.Trace:
    model = cases.make_mlp()
    low: dict[str, Any] = {"low": torch.bfloat16, "accumulate": torch.bfloat16} if LOW[precision] else {}
    low |= {"inside": 2} if order == "inside" else {}
    trace, groups = None, cases.groups_of(model, kind)
    for number, micros in enumerate(STORY, start=1):
        trace = oracle.train(
            model, cases.loss_of, ranks=ranks, micros=micros, steps=EACH * number, kind=kind, groups=groups,
            order=order if micros > 1 else "full", clip=cases.CLIP, earlier=trace, **low,
        )  # fmt: skip
        low.pop("low", None)  # it is cast
    assert trace is not None
    return trace


def tell(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = cases.make_engine(cases.make_mlp(), config, kind)

    def change(step: int) -> None:
        if step % EACH == 0:
            engine.set_train_batch_size(STORY[step // EACH] * engine.world_size)
            assert engine.train_batch_size() == STORY[step // EACH] * engine.world_size
            assert engine.train_micro_batch_size_per_gpu() == 1
            memory = engine.memory()
            assert memory["buffer_bytes"] <= memory["predicted_buffer_bytes"]

    result = cases.run_steps(engine, EACH * len(STORY), before=change)
    traffic = engine.traffic()
    assert traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"]
    assert engine.micro_steps == EACH * sum(STORY)
    assert engine.global_samples == EACH * sum(STORY) * engine.world_size
    engine.close()
    return result


ALL = list(itertools.product((2, 3), cases.STAGES, ("AdamW", "SGD"), LOW))


@pytest.mark.parametrize(("ranks", "stage", "kind", "precision"), covering(ALL, 3))
def test_other_batches_equal_the_oracle(pools: Pools, ranks: int, stage: str, kind: str, precision: str) -> None:
    results = pools(ranks).run(tell, kind, {**cases.config_of(stage), **LOW[precision]})
    assert_equal_to_truth(results, truth(kind, ranks, cases.LETTER[stage], precision))


@pytest.mark.parametrize("stage", cases.HYBRID)
def test_on_hybrid_meshes(pools: Pools, stage: str) -> None:
    results = pools(4).run(tell, "AdamW", cases.config_of(stage))
    assert_equal_to_truth(results, truth("AdamW", 4, cases.LETTER[stage], "fp32"))


def memory_of(config: dict[str, Any], micros: int) -> tuple[list[tuple[str, float]], list[list[float]]]:
    """What a window of ``micros`` holds and computes, where the engine began with 1; and one that began so."""
    found, losses, predicted = [], [], []
    for begins in (1, micros):
        engine = cases.make_engine(cases.make_mlp(), {**config, "gradient_accumulation_steps": begins}, "SGD")
        if begins == 1:
            engine.set_train_batch_size(micros * engine.world_size)
        losses.append([cases.run_micro_batch(engine, cases.loss_of, 0, micro) for micro in range(2 * micros)])
        # how many buffers are in flight at one moment depends on time
        found.append(sorted((key, value) for key, value in engine.memory().items() if "buffer" not in key))
        predicted.append(engine.memory()["predicted_buffer_bytes"])
        engine.close()
    assert found[0] == found[1] and predicted[0] == predicted[1]
    return found[0], losses


@pytest.mark.parametrize("stage", cases.STAGES)
def test_memory_is_that_of_an_engine_that_began_so(pools: Pools, stage: str) -> None:
    config = {**cases.config_of(stage), **LOW["bf16 that waits in bf16"]}
    for _, (first, second) in pools(2).run(memory_of, config, 3):
        assert first == second


def with_a_hook(config: dict[str, Any]) -> list[float | None]:
    """Norms of three steps, the batch of which is set before the second; a hook of the user's makes the mean."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    engine = cases.make_engine(cases.make_mlp(), config, "SGD")
    engine.register_comm_hook(None, allreduce_hook)
    norms = []
    for step in range(3):
        if step == 1:
            engine.set_train_batch_size(engine.world_size)
        cases.run_micro_batch(engine, cases.loss_of, step, 0)
        norms.append(engine.get_global_grad_norm())
    engine.close()
    return norms


def test_a_hook_that_makes_the_mean_goes_on_doing_it(pools: Pools) -> None:
    for norms in pools(2).run(with_a_hook, cases.config_of("2")):
        assert norms == pytest.approx(cases.truth("mlp", "SGD", 2, 1, "full", 3).norms, rel=1e-5)


def refuse(config: dict[str, Any]) -> list[str]:
    engine = cases.make_engine(cases.make_mlp(), config, "SGD")
    texts = []

    def said(error: type[Exception], size: Any, method: str = "set_train_batch_size") -> None:
        with pytest.raises(error) as raised:
            getattr(engine, method)(size)
        texts.append(str(raised.value))
        assert engine.gradient_accumulation_steps() == 2 and engine._window.size == 2

    ranks = engine.world_size
    for size in (2 * ranks + 1, 0, -ranks, True, 2.0 * ranks, "8"):
        said(UsageError, size)
    said(UsageError, 0, "set_train_micro_batch_size")
    said(MismatchError, 2 * ranks * (1 + engine.rank))  # ranks disagree
    said(UsageError if engine.rank == 1 else MismatchError, 2 * ranks + (engine.rank == 1))
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    said(UsageError, 4 * ranks)
    engine.backward(cases.loss_of(engine, 0, engine.rank, 1))
    said(UsageError, 4 * ranks)  # the last backward is over, the step is not
    engine.step()
    engine.set_train_micro_batch_size(5)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (10 * ranks, 2)
    sources = {name: str(source) for name, source in engine.config.sources.items()}
    assert sources["gradient_accumulation_steps"] == "file"
    engine.set_train_batch_size(5 * ranks)
    assert dict(engine.config.sources)["gradient_accumulation_steps"] == "derived"
    cases.run_micro_batch(engine, cases.loss_of, 1, 0)
    assert engine.global_steps == 2 and engine.global_samples == 2 * ranks + 5 * ranks
    engine.close()
    return texts


@pytest.mark.parametrize("stage", ["0", "3"])
def test_what_does_not_fit_is_refused_on_all_ranks(pools: Pools, stage: str) -> None:
    for rank, texts in enumerate(pools(2).run(refuse, cases.config_of(stage, 2))):
        assert texts[0] == (
            "set_train_batch_size: expected a number of samples above 0 that 2 divides (2 ranks with micro-batches of "
            f"1, which stay), got 5 (rank {rank}); nothing has changed"
        )
        assert "differs between ranks: rank 0 has [4], rank 1 has [8]" in texts[7]
        assert texts[8].startswith("set_train_batch_size" if rank == 1 else "set_train_batch_size failed on rank 1")
        assert texts[9].startswith("set_train_batch_size in the middle of a step") and "1 of 2" in texts[9]
        assert texts[10].startswith("set_train_batch_size in the middle of a step") and "2 of 2" in texts[10]


def save_and_load(folder: str) -> tuple[list[float], list[float]]:
    """The losses after a checkpoint that was saved between windows of other sizes, going on and loaded."""
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("2", 1), "AdamW")
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    engine.set_train_batch_size(3 * engine.world_size)
    cases.run_steps(engine, 1)
    engine.save_checkpoint(folder)
    on = [loss for row in cases.run_steps(engine, 2)["losses"] for loss in row]
    engine.close()
    engine = cases.make_engine(cases.make_mlp(), cases.config_of("3", 1), "AdamW")
    said = f"the global batch was {3 * engine.world_size} samples, now it is"
    with pytest.warns(UserWarning, match=said) if engine.rank == 0 else nullcontext():
        engine.load_checkpoint(folder)
    engine.set_train_batch_size(3 * engine.world_size)
    assert engine.global_samples == 4 * engine.world_size and engine.micro_steps == 4
    again = [loss for row in cases.run_steps(engine, 2)["losses"] for loss in row]
    engine.close()
    return on, again


def test_a_checkpoint_is_gone_on_from_with_the_batch_that_is_set_again(pools: Pools, tmp_path: Path) -> None:
    for on, again in pools(2).run(save_and_load, str(tmp_path)):
        assert on == again and len(on) == 6


def test_a_config_for_other_batches_shows_the_equation() -> None:
    from shardengine import load_config

    config = load_config({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}).resolve_batch(3)
    assert config.with_batch(3, total=24).gradient_accumulation_steps == 4
    assert config.with_batch(3, micro=4).train_batch_size == 24
    with pytest.raises(ConfigError, match=r"13 != 2 \* \? \* 3"):
        config.with_batch(3, total=13)
