"""What else training consists of, on hybrid meshes: optimizers, precisions, windows, changed models, whole weights and
states, meshes one after the other. Bit-equal to the oracle, on four ranks in shard groups of two.

``test_hybrid.py`` has the stages themselves, their bytes, tiers and switches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardengine
from tests import oracle
from tests.engine import test_ema, test_meta_init
from tests.parity import (
    test_any_optimizer,
    test_backwards,
    test_changed_models,
    test_precision,
    test_special_cases,
    test_states_in_fewer_bytes,
    test_unsynchronised,
)
from tests.support import adafactor_cases, cases, muon_cases, special_losses
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STAGES = list(cases.HYBRID)
RANKS, STEPS = 4, 4
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def each_stage(train: Callable[..., dict[str, Any]], *told: Any) -> dict[str, dict[str, Any]]:
    """On one rank: what ``train`` gives at each stage of a hybrid mesh."""
    return {stage: train(stage, *told) for stage in STAGES}


def assert_right(
    pools: Pools, train: Callable[..., dict[str, Any]], told: tuple[Any, ...], truth: Callable[[str], oracle.Trace]
) -> list[dict[str, dict[str, Any]]]:
    """truth: of the order of sums."""
    results = pools(RANKS).run(each_stage, train, *told)
    for stage in STAGES:
        found = [result[stage] for result in results]
        assert_equal_to_truth(found, truth(cases.LETTER[stage]), f"stage {stage}")
    return results


# Optimizers and precisions


class Kind(NamedTuple):
    """engine: of a config · truth: of micro-batches and the order of sums, after ``steps`` · options: of the config."""

    engine: Callable[[dict[str, Any]], shardengine.Engine]
    truth: Callable[[int, str], oracle.Trace]
    options: dict[str, Any]
    steps: int = STEPS


def mlp(config: dict[str, Any]) -> shardengine.Engine:
    return cases.make_engine(cases.make_mlp(), config)


def of_class(name: str, **told: Any) -> Kind:
    def truth(micros: int, order: str) -> oracle.Trace:
        return test_any_optimizer.truth(name, RANKS, micros, order, **told)

    return Kind(
        functools.partial(test_any_optimizer.engine_of, name), truth, BF16 if told else {}, test_any_optimizer.STEPS
    )


def of_precision(said: dict[str, Any], **told: Any) -> Kind:
    def truth(micros: int, order: str) -> oracle.Trace:
        return cases.truth("mlp", "AdamW", RANKS, micros, order, STEPS, **told)

    return Kind(mlp, truth, said)


def of_states(kept_in: str, precision: str) -> Kind:
    said, told = test_states_in_fewer_bytes.PRECISIONS[precision]
    seed, split = test_states_in_fewer_bytes.SEED, " split" * (precision == "split")
    options = {"seed": seed, "data_types": {"optimizer_state_dtype": kept_in}, **said}
    return of_precision(options, kept_in=(kept_in + split, seed), **told)


KINDS: dict[str, Kind] = {
    "Muon": Kind(
        functools.partial(muon_cases.engine_of, "both"),
        lambda micros, order: muon_cases.truth("both", RANKS, micros, order, STEPS),
        {},
    ),
    "Muon in bf16": Kind(
        functools.partial(muon_cases.engine_of, "both"),
        lambda micros, order: muon_cases.truth("both", RANKS, micros, order, STEPS, low=torch.bfloat16),
        BF16,
    ),
    "Adafactor": Kind(
        functools.partial(adafactor_cases.engine_of, "torch"),
        lambda micros, order: adafactor_cases.truth("torch", RANKS, micros, order, STEPS),
        {},
    ),
    "Adafactor of transformers in bf16": Kind(
        functools.partial(adafactor_cases.engine_of, "transformers"),
        lambda micros, order: adafactor_cases.truth("transformers", RANKS, micros, order, STEPS, low=torch.bfloat16),
        BF16,
    ),
    "schedule-free": of_class("ScheduleFree"),
    "a class of a user's in bf16": of_class("Plain", low=torch.bfloat16),
    "states in 8 bits": of_states("8bit", "fp32"),
    "states in bf16, masters split": of_states("bf16", "split"),
    "fp16": of_precision(test_precision.PRECISIONS["fp16"][0], **test_precision.PRECISIONS["fp16"][1]),
    "bf16 without masters": of_precision(
        test_precision.PRECISIONS["bf16, no masters, stochastic"][0],
        **test_precision.PRECISIONS["bf16, no masters, stochastic"][1],
    ),
    "bf16 on the wire, fp16 between": of_precision(
        {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "fp16"}},
        wire=torch.bfloat16,
        accumulate=torch.float16,
    ),
    "sums in bf16": of_precision({"data_types": {"reduce_dtype": "bf16"}}, reduce=torch.bfloat16),
}


def train_kind(stage: str, name: str, micros: int) -> dict[str, Any]:
    config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 600}, **KINDS[name].options)
    engine = KINDS[name].engine(config)
    result = cases.run_steps(engine, KINDS[name].steps)
    engine.close()
    return result


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_optimizers_and_precisions(pools: Pools, name: str, micros: int) -> None:
    results = assert_right(pools, train_kind, (name, micros), functools.partial(KINDS[name].truth, micros))
    skipped = results[0]["3 hybrid"]["skipped"]
    assert bool(skipped) is (name == "fp16")


def train_averaged(stage: str, micros: int) -> dict[str, Any]:
    return test_ema.train("AdamW", cases.config_of(stage, micros, **test_ema.EMA))


@pytest.mark.parametrize("micros", [1, 3])
def test_averages(pools: Pools, micros: int) -> None:
    def truth(order: str) -> oracle.Trace:
        return test_ema.truth("AdamW", RANKS, micros, order, None)

    results = assert_right(pools, train_averaged, (micros,), truth)
    for stage in STAGES:
        for name, states in truth(cases.LETTER[stage]).states.items():
            assert torch.equal(torch.from_numpy(results[0][stage]["averages"][name]), states["ema"]), (stage, name)


# Models, and what changes about them


MODELS = [
    "tied: embedding and head",
    "tied: one weight in two blocks",
    "frozen: a block in the middle",
    "frozen: adapters over bf16",
    "unused: in some micro-batches of some ranks",
    "unused: a block in some steps",
    "called twice",
    "buffers",
    "checkpointing: each block",
    "two forwards, one backward",
    "a forward without backward",
    "generate under inference_mode",
    "evaluation under no_grad",
    "evaluation under inference_mode",
    "a view of a weight is returned",
    "the head's weight is read, the head not called",
    "exceptions in forward",
]
SMALL = "AdamW, buckets of 600 elements"


@pytest.mark.parametrize("name", MODELS)
def test_models(pools: Pools, name: str) -> None:
    micros = special_losses.CASES[name].micros

    def truth(order: str) -> oracle.Trace:
        return test_special_cases.truth(name, "AdamW", RANKS, order if micros > 1 else "full", 3)

    assert_right(pools, train_model, (name,), truth)


def train_model(stage: str, name: str) -> dict[str, Any]:
    return test_special_cases.train_case(name, stage, SMALL)


BACKWARDS = [
    "re-entrant: each block",
    "re-entrant: blocks called several times, three micro-batches",
    "losses that reach different parameters",
    "three backwards, blocks called several times",
    "without the engine: the bare module",
    "frozen and unfrozen between steps",
    "dtypes: bf16 and fp32, both trained",
]


@pytest.mark.parametrize("name", BACKWARDS)
def test_ways_to_run_backward(pools: Pools, name: str) -> None:
    micros = test_backwards.CASES[name].micros

    def truth(order: str) -> oracle.Trace:
        return test_backwards.truth(name, "AdamW", RANKS, order if micros > 1 else "full", 3, False)

    assert_right(pools, train_backwards, (name,), truth)


def train_backwards(stage: str, name: str) -> dict[str, Any]:
    return test_backwards.train_case(name, stage, SMALL)


def tell(stage: str, kind: str, micros: int, low: bool) -> dict[str, Any]:
    config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 700}, **(BF16 if low else {}))
    return test_changed_models.tell("mlp", kind, config)


@pytest.mark.parametrize(("kind", "micros", "low"), [("AdamW", 1, False), ("AdamW", 3, True), ("SGD", 3, False)])
def test_changed_models_are_laid_out_anew(pools: Pools, kind: str, micros: int, low: bool) -> None:
    def truth(order: str) -> oracle.Trace:
        told = (RANKS, micros, order if micros > 1 else "full", torch.bfloat16 if low else None)
        return test_changed_models.truth("mlp", kind, *told)

    assert_right(pools, tell, (kind, micros, low), truth)


# Windows


def train_unsynchronised(stage: str) -> dict[str, Any]:
    return test_unsynchronised.train(stage, "AdamW", 600)


def test_no_sync_and_whole_gradients(pools: Pools) -> None:
    truths = test_unsynchronised.truths(RANKS, "AdamW")
    results = assert_right(pools, train_unsynchronised, (), lambda order: truths[-1])
    for stage in STAGES:
        for step, truth in enumerate(truths):
            found = results[1][stage]["gradients"][step]
            assert found.keys() == truth.gradients.keys()
            for name, gradient in truth.gradients.items():
                assert torch.equal(torch.from_numpy(found[name]), gradient), (stage, step, name)


def flushed_loss(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """In even steps the last micro-batch is missing: the oracle is told that nothing depends on the model there."""
    return torch.zeros((), requires_grad=True) if is_missing(step, micro) else cases.loss_of(model, step, rank, micro)


def is_missing(step: int, micro: int) -> bool:
    return micro == 2 and step % 2 == 0


def train_flushed(stage: str, synchronise: bool, options: dict[str, Any]) -> dict[str, Any]:
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, 3, zero={"reduce_bucket_size": 600}, **options))

    def run_micro_batch(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        if is_missing(step, micro):
            return 0.0
        last = is_missing(step, micro + 1)
        with nullcontext() if synchronise or step % 2 else engine.no_sync():
            loss = loss_of(engine, step, engine.rank, micro)
            engine.backward(loss)
        engine.step(flush=last)
        return float(loss.item())

    result = cases.run_steps(engine, STEPS, flushed_loss, run_micro_batch)
    engine.close()
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "sums and gradients in bf16"])
@pytest.mark.parametrize("synchronise", [True, False])
def test_a_window_is_ended_early(pools: Pools, synchronise: bool, precision: str) -> None:
    """What shard groups have summed of earlier micro-batches goes across without a backward of its own."""
    said, told = {
        "fp32": ({}, {}),
        "bf16": (BF16, {"low": torch.bfloat16}),
        "fp16": test_precision.PRECISIONS["fp16"],
        "sums and gradients in bf16": (
            {**BF16, "data_types": {"reduce_dtype": "bf16", "grad_accum_dtype": "bf16"}},
            {"low": torch.bfloat16, "reduce": torch.bfloat16, "accumulate": torch.bfloat16},
        ),
    }[precision]
    if not synchronise:
        said = {**said, "gradient_accumulation": "full"}

    def truth(order: str) -> oracle.Trace:
        network, options = cases.make_mlp(), dict(told)
        if (scaling := options.pop("scaling", None)) is not None:
            options["scaler"] = oracle.Scaler(*scaling)
        order = order if synchronise else "full"
        return oracle.train(
            network, flushed_loss, ranks=RANKS, micros=3, steps=STEPS, groups=cases.groups_of(network, "AdamW"),
            order=order, clip=cases.CLIP, **cases.groups_told(order), **options,
        )  # fmt: skip

    assert_right(pools, train_flushed, (synchronise, said), truth)


def train_and_reset(stage: str) -> dict[str, Any]:
    """A window that is given up: after its forward, in its middle, and with its gradients complete."""
    engine = cases.make_engine(cases.make_mlp(), cases.config_of(stage, 3, zero={"reduce_bucket_size": 600}))

    def give_up(step: int) -> None:
        for micro in range(step):
            loss = cases.loss_of(engine, 90, engine.rank, micro)
            if micro < 2 or step > 2:
                engine.backward(loss)
            if micro < 2:
                engine.step()
        engine.reset()

    result = cases.run_steps(engine, STEPS, before=give_up)
    engine.close()
    return result


def test_reset_gives_a_window_up(pools: Pools) -> None:
    assert_right(pools, train_and_reset, (), lambda order: cases.truth("mlp", "AdamW", RANKS, 3, order, STEPS))


# Whole weights, gradients and states


def look(stage: str, micros: int) -> dict[str, Any]:
    """Reads what there is to be read in every step, and clips as torch does."""
    config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 600})
    engine = cases.make_engine(cases.make_mlp(), {**config, "gradient_clipping": 0.0})
    seen: dict[str, Any] = {}

    def run_micro_batch(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        loss = loss_of(engine, step, engine.rank, micro)
        engine.backward(loss)
        if micro + 1 == micros:
            with engine.full_params(), engine.full_grads() as gradients:
                seen["gradients"] = {name: g.clone().numpy() for name, g in gradients.items() if g is not None}
            seen["norm"] = engine.clip_grad_norm_(cases.CLIP)
        engine.step()
        return float(loss.item())

    result = cases.run_steps(engine, STEPS, cases.loss_of, run_micro_batch)
    with engine.full_params():
        seen["weights"] = {name: cases.copy_out(p).numpy() for name, p in engine.module.named_parameters()}
    with engine.full_optimizer_state() as states:
        seen["states"] = {name: {k: cases.copy_out(v).numpy() for k, v in kinds.items() if isinstance(v, Tensor)}
                          for name, kinds in states.items() if kinds}  # fmt: skip
    engine.close()
    return {**result, "seen": seen}


@pytest.mark.parametrize("micros", [1, 3])
def test_what_is_shown_whole(pools: Pools, micros: int) -> None:
    def truth(order: str) -> oracle.Trace:
        return cases.truth("mlp", "AdamW", RANKS, micros, order, STEPS)

    results = assert_right(pools, look, (micros,), truth)
    for stage in STAGES:
        expected = truth(cases.LETTER[stage])
        for seen in (result[stage]["seen"] for result in results):
            assert seen["norm"] == expected.norms[-1]
            for name, weight in expected.parameters.items():
                assert torch.equal(torch.from_numpy(seen["gradients"][name]), expected.gradients[name]), (stage, name)
                assert torch.equal(torch.from_numpy(seen["weights"][name]), weight), (stage, name)
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(torch.from_numpy(seen["states"][name][key]), expected.states[name][key]), key


# What a forward keeps inside of the shard group (hpZ) is never older than the weights


def forward(engine: Any, number: int = 70) -> Tensor:
    return cases.loss_of(engine, number, engine.rank, 0)


def halve(engine: Any) -> None:
    with engine.full_params(writable=True), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(0.5)


def written(engine: Any, folder: str) -> None:
    forward(engine)
    halve(engine)


def written_twice(engine: Any, folder: str) -> None:
    """Whole weights are held while a forward passes, and written when they are given back."""
    with engine.full_params(writable=True), torch.no_grad():
        with torch.enable_grad():
            forward(engine)
        for parameter in engine.module.parameters():
            parameter.mul_(0.5)


def loaded(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder, "here")
    halve(engine)
    forward(engine)
    engine.load_checkpoint(folder, "here")


def given(engine: Any, folder: str) -> None:
    state = {name: value * 0.5 for name, value in engine.state_dict().items()}
    forward(engine)
    engine.load_state_dict(state)


def stepped(engine: Any, folder: str) -> None:
    """Two graphs, of which one never sees its backward."""
    kept = forward(engine, 71)
    engine.backward(forward(engine))
    engine.step()
    del kept


def states_written(engine: Any, folder: str) -> None:
    forward(engine)
    with engine.full_optimizer_state(writable=True) as states:
        for state in states.values():
            state["weight"].mul_(0.5)


def reset(engine: Any, folder: str) -> None:
    forward(engine)
    engine.reset()
    halve(engine)


def moved(engine: Any, folder: str) -> None:
    forward(engine)
    engine.offload_states()
    engine.reload_states()
    halve(engine)


def refused(engine: Any, folder: str) -> None:
    """A backward through weights that were written since is an error, which does not spoil the next one."""
    loss = forward(engine)
    halve(engine)
    with pytest.raises(RuntimeError):
        engine.backward(loss)
    engine.reset()


def evaluated(engine: Any, folder: str) -> None:
    loss = forward(engine)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert forward(engine, 72) > 0
    engine.backward(loss)
    engine.step()


def averaged(engine: Any, folder: str) -> None:
    forward(engine)
    with engine.ema(), torch.no_grad():
        forward(engine, 72)


BETWEEN: dict[str, Callable[[Any, str], None]] = {
    each.__name__: each
    for each in (
        written,
        written_twice,
        states_written,
        loaded,
        given,
        stepped,
        reset,
        moved,
        refused,
        evaluated,
        averaged,
    )
}


def interrupted(stage: str, name: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    config = {**cases.config_of(stage, zero={"reduce_bucket_size": 600}), "ema": {"decay": 0.9}, **options}
    engine = cases.make_engine(cases.make_mlp(), config)
    result = cases.run_steps(
        engine, STEPS, before=lambda step: BETWEEN[name](engine, f"{folder}/{stage}/{step}") if step else None
    )
    left = sum(bucket.kept_inside is not None for unit in engine._core.units for bucket in unit.buckets())
    engine.close()
    return {**result, "left": left}


def at_both(name: str, options: dict[str, Any], folder: str) -> dict[str, dict[str, Any]]:
    return {stage: interrupted(stage, name, options, folder) for stage in ("0", "3", "3 hybrid", "3 hpZ")}


@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", BETWEEN)
def test_nothing_is_computed_with_old_weights(pools: Pools, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    results = pools(RANKS).run(at_both, name, options, str(tmp_path))
    for result in results:
        expected = result["0"]
        for stage in ("3", "3 hybrid", "3 hpZ"):
            assert result[stage]["left"] == 0
            for key in ("losses", "norms", "skipped"):
                assert result[stage][key] == expected[key], (stage, key)
            for each, weight in expected["weights"].items():
                assert (result[stage]["weights"][each] == weight).all(), (stage, each)
    digests = {stage: cases.digest([result[stage]["state"] for result in results]) for stage in results[0]}
    assert len(set(digests.values())) == 1, digests


# One engine after the other, and how weights come in


def one_after_the_other(stages: list[str], options: dict[str, Any]) -> list[Any]:
    """A step of each; SGD without momentum keeps no state, so what is handed on is all there is."""
    model: nn.Module = cases.make_mlp()
    losses = []
    for step, stage in enumerate(stages):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        config = cases.config_of(stage, zero={"reduce_bucket_size": 600}, **options)
        engine = shardengine.initialize(model, config, optimizer=optimizer, mesh=cases.mesh_of_this_process())
        losses.append(cases.run_micro_batch(engine, cases.loss_of, step, 0))
        forward(engine)
        if step + 1 < len(stages):
            engine.close(restore=False)
    pieces = cases.local_state(engine)
    engine.close()
    return [losses, pieces]


@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
def test_an_engine_hands_on_to_one_on_another_mesh(pools: Pools, options: dict[str, Any]) -> None:
    chains = [
        ["3", "3 hybrid", "2 hybrid", "3 hpZ", "3 hybrid"],
        ["1 hybrid", "3 hpZ", "0", "3k hybrid", "3"],
        ["3"] * 5,
    ]
    found = [pools(RANKS).run(one_after_the_other, chain, options) for chain in chains]
    digests = {cases.digest([pieces for _, pieces in results]) for results in found}
    assert len(digests) == 1
    assert all([losses for losses, _ in results] == [losses for losses, _ in found[-1]] for results in found)


@pytest.mark.parametrize("from_files", [True, False], ids=["files", "drawn"])
def test_weights_of_files_and_code(pools: Pools, tmp_path: Path, from_files: bool) -> None:
    test_meta_init.write(str(tmp_path))
    cpu = {"zero": test_meta_init.CPU}
    runs: list[tuple[str, dict[str, Any]]] = [(stage, dict(options)) for stage in STAGES for options in ({}, BF16)]
    runs += [("3 hybrid", {**cpu, **BF16}), ("3 hpZ", dict(cpu))]
    runs += [(stage, {"data": True, "zero": {"reduce_bucket_size": 256}}) for stage in ("2 hybrid", "3 hpZ")]
    folder = str(tmp_path) if from_files else None
    for rank, said in enumerate(pools(RANKS).run(test_meta_init.several, runs, folder)):
        for (stage, options), different in zip(runs, said, strict=True):
            assert not different, (rank, stage, options, different)
