"""Shard groups that step apart (post-local SGD, gossip): the bits of the oracle, bytes by axis, and what is refused
while groups differ."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardengine
from shardengine.core import replicas
from shardengine.errors import CommunicationError, ConfigError, UsageError
from tests import oracle
from tests.engine.test_recovery import stop_after_buckets
from tests.parity.test_hybrid import LETTER, STAGES, counted
from tests.support import cases, special_models
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS, START, PERIOD = 6, 1, 2
HOOKS = {"post_local_sgd": "local", "gossip": "gossip"}
Hook = tuple[str, int, int]
"""As the oracle's ``apart``, with the name in the config."""


def config_of(stage: str, size: int, micros: int, hook: Hook | None, options: dict[str, Any]) -> dict[str, Any]:
    """Of ``stage`` in shard groups of ``size``."""
    others = dict(options)
    zero = {"reduce_bucket_size": 600, **STAGES[stage], "shard_group_size": size, **others.pop("zero", {})}
    if hook is not None:
        others["comm_hook"] = {"name": hook[0], "params": {"start_step": hook[1], "period": hook[2]}}
    return cases.config_of("3", micros, zero=zero, **others)


def train(
    stages: list[str], size: int, micros: int, kind: str, hook: Hook, options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Per stage what ``cases.run_steps`` gives; the bytes of each step are those of the formula."""
    found = {}
    for stage in stages:
        engine = cases.make_engine(cases.make_mlp(), config_of(stage, size, micros, hook, options), kind)

        def check(step: int, engine: Any = engine, stage: str = stage) -> None:
            traffic = engine.traffic()
            assert not step or traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"], (stage, step)
            memory = engine.memory()
            assert memory["measured_model_state_bytes"] <= memory["predicted_model_state_bytes"], (stage, step)

        found[stage] = cases.run_steps(engine, STEPS, before=check, after=engine.average_replicas)
        engine.close()
    return found


def compare(results: list[dict[str, Any]], size: int, micros: int, kind: str, hook: Hook, **told: Any) -> None:
    apart = (HOOKS[hook[0]], *hook[1:])
    for stage in results[0]:
        truth = cases.truth("mlp", kind, len(results), micros, LETTER[stage], STEPS, inside=size, apart=apart, **told)
        assert any(len(set(norm)) > 1 for norm in truth.norms if isinstance(norm, list)) or apart[0] == "gossip"
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


@pytest.mark.parametrize(
    ("ranks", "size", "kind", "micros"), [(2, 1, "AdamW", 1), (3, 1, "SGD", 2), (4, 2, "AdamW", 2), (4, 2, "SGD", 1)]
)
@pytest.mark.parametrize("name", HOOKS)
def test_bits(pools: Pools, name: str, ranks: int, size: int, kind: str, micros: int) -> None:
    hook = (name, START, PERIOD)
    compare(pools(ranks).run(train, list(STAGES), size, micros, kind, hook, {}), size, micros, kind, hook)


@pytest.mark.parametrize("hook", [("gossip", 0, 0), ("gossip", 2, 3), ("post_local_sgd", 0, 1)])
def test_four_groups(pools: Pools, hook: Hook) -> None:
    """Of two groups each has the other as partner in every step; of four it is the next one, then the next but one."""
    compare(pools(4).run(train, ["1", "3"], 1, 1, "AdamW", hook, {}), 1, 1, "AdamW", hook)


LOW: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16, added in bf16": {
        "bf16": {"enabled": True},
        "data_types": {"reduce_dtype": "bf16", "grad_accum_dtype": "bf16"},
    },
}


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("name", HOOKS)
def test_masters(pools: Pools, name: str, precision: str) -> None:
    """Masters are averaged, and the weights are these rounded."""
    hook = (name, START, PERIOD)
    told: dict[str, Any] = {"low": torch.bfloat16}
    if precision != "bf16":
        told |= {"reduce": torch.bfloat16, "accumulate": torch.bfloat16}
    results = pools(3).run(train, ["1", "2", "3"], 1, 2, "AdamW", hook, LOW[precision])
    compare(results, 1, 2, "AdamW", hook, **told)


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_tiers(pools: Pools, device: str, tmp_path: Path) -> None:
    tier = {"device": device, "nvme_path": str(tmp_path)} if device == "nvme" else {"device": device}
    options = {"zero": {"offload_optimizer": tier, "offload_param": tier}}
    hook = ("post_local_sgd", START, PERIOD)
    compare(pools(2).run(train, ["3"], 1, 2, "AdamW", hook, options), 1, 2, "AdamW", hook)


@pytest.mark.parametrize("options", [{"debug": True}, {"overlap_comm": False}, {"overlap_param_gather": True}])
def test_switches(pools: Pools, options: dict[str, Any]) -> None:
    hook = ("gossip", START, PERIOD)
    compare(pools(3).run(train, ["1", "3"], 1, 2, "AdamW", hook, options), 1, 2, "AdamW", hook)


def twice(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """Gradients of one block come twice in a backward."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    block = getattr(model, "module", model).blocks[0]
    x = torch.randn(5, 13, requires_grad=True)
    once = checkpoint(block, x, use_reentrant=True)
    loss: Tensor = checkpoint(block, once, use_reentrant=True).square().mean()
    return loss


def two_of_three(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
    """The window ends before its third micro-batch."""
    if micro < 2:
        return cases.run_micro_batch(engine, loss_of, step, micro)
    engine.step(flush=True)
    return 0.0


def train_specially(what: str, stages: list[str], hook: Hook) -> dict[str, dict[str, Any]]:
    found = {}
    for stage in stages:
        micros = 3 if what == "flush" else 2
        engine = cases.make_engine(cases.make_mlp(), config_of(stage, 1, micros, hook, {}))
        how: dict[str, Any] = {"run": two_of_three} if what == "flush" else {"loss_of": twice}
        found[stage] = cases.run_steps(engine, STEPS, after=engine.average_replicas, **how)
        engine.close()
    return found


@pytest.mark.parametrize("what", ["flush", "late"])
@pytest.mark.parametrize("name", HOOKS)
def test_special_windows(pools: Pools, name: str, what: str) -> None:
    results = pools(3).run(train_specially, what, ["1", "2"], (name, START, PERIOD))
    for stage in results[0]:
        model = cases.make_mlp()
        truth = oracle.train(
            model, twice if what == "late" else cases.loss_of, ranks=3, micros=3 if what == "flush" else 2,
            steps=STEPS, kind="AdamW", groups=cases.groups_of(model, "AdamW"), clip=cases.CLIP, order=LETTER[stage],
            inside=1, apart=(HOOKS[name], START, PERIOD), has=lambda step, rank, micro: what == "late" or micro < 2,
        )  # fmt: skip
        assert_equal_to_truth([result[stage] for result in results], truth, f"stage {stage}")


# Bytes, by axis


def traffic(stage: str, hook: Hook, micros: int) -> tuple[list[Counter[str]], list[Any], int]:
    """Of each of four steps: bytes by axis, the formula's; elements of the layout."""
    engine = cases.make_engine(cases.make_mlp(), config_of(stage, 2, micros, hook, {}))
    sent, said = [], []
    for step in range(4):
        with counted() as bytes_by_axis:
            for micro in range(micros):
                cases.run_micro_batch(engine, cases.loss_of, step, micro)
        sent.append(bytes_by_axis)
        said.append(engine.traffic()["formula_bytes_by_axis"])
    for step in (4, 5):  # what is asked for between two steps belongs to none
        for micro in range(micros):
            cases.run_micro_batch(engine, cases.loss_of, step, micro)
        traffic = engine.traffic()
        assert traffic["measured_bytes_last_step"] == traffic["formula_bytes_per_step"]
        engine.average_replicas()
    every = sum(each.length for each in engine._core.layout.flat_buffers)
    engine.close()
    return sent, said, every


@pytest.mark.parametrize(("stage", "micros"), [("1", 1), ("3k", 3)])
@pytest.mark.parametrize("name", HOOKS)
def test_bytes_across(pools: Pools, name: str, stage: str, micros: int) -> None:
    """Two groups of two. A rank has half of every element; AdamW keeps three numbers of each."""
    for sent, said, every in pools(4).run(traffic, stage, (name, 2, 2), micros):
        summed = 4 * every / 4 + 4 * every / 4  # sums go across, the complete gradient comes back
        alone = 4 * every / 2 if name == "gossip" else 0
        average = 3 * (4 * every / 4 + 4 * every / 4)
        assert [step["across"] for step in sent] == [summed, summed, alone, alone + average]
        assert len({step["inside"] for step in sent}) == 1 and sent[0]["inside"] > 0
        for counts, formula in zip(sent, said, strict=True):
            assert {axis: counts[axis] for axis in formula} == formula


# What one group alone has


def uneven_loss(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """Rank 0 alone uses the last layer; overflow: in step 3 rank 1's loss is none."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    bare: Any = getattr(model, "module", model)
    x = torch.randn(5, 7)
    if rank:
        loss: Tensor = model.inp(x).square().mean() if bare is model else bare.inp(x).square().mean()
    else:
        loss = model(x).square().mean()
    return loss * (torch.nan if (step, rank) == (3, 1) else 1.0)


def uneven() -> dict[str, Any]:
    config = config_of("1", 1, 1, ("post_local_sgd", START, PERIOD), {})
    engine = cases.make_engine(cases.make_mlp(), config, "AdamW")
    result = cases.run_steps(engine, STEPS, uneven_loss, after=engine.average_replicas)
    engine.close()
    return result


def test_what_one_group_uses_is_stepped_and_what_one_cannot_step_is_skipped_everywhere(pools: Pools) -> None:
    model = cases.make_mlp()
    truth = oracle.train(
        model, uneven_loss, ranks=2, steps=STEPS, kind="AdamW", groups=cases.groups_of(model, "AdamW"),
        clip=cases.CLIP, inside=1, apart=("local", START, PERIOD),
    )  # fmt: skip
    assert truth.skipped == [3]
    assert_equal_to_truth(pools(2).run(uneven), truth)


def adagrad() -> tuple[list[float], list[float]]:
    """The weights and states of a class of torch's after an average, which is that of what was there before."""
    model = cases.make_mlp()
    config = config_of("2", 1, 1, ("post_local_sgd", 0, 100), {})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    engine = shardengine.initialize(model, config, optimizer=optimizer, mesh=cases.mesh_of_this_process())
    for step in range(3):
        cases.run_micro_batch(engine, cases.loss_of, step, 0)
    before = [values.tolist() for *_, values in cases.local_state(engine)]
    engine.average_replicas()
    after = [values.tolist() for *_, values in cases.local_state(engine)]
    engine.average_replicas()
    assert after == [values.tolist() for *_, values in cases.local_state(engine)]
    engine.close()
    return list(itertools.chain(*before)), list(itertools.chain(*after))


def test_states_of_other_classes(pools: Pools) -> None:
    (one, mean), (other, same) = pools(2).run(adagrad)
    assert one != other and mean == same
    assert mean == ((torch.tensor(one) + torch.tensor(other)) / 2).tolist()


# Between two averages


def resumed(folder: str, stage: str) -> dict[str, Any]:
    """Saved after a step that ends with an average; another engine goes on, in the middle of the schedule."""
    config = config_of(stage, 2, 1, ("post_local_sgd", START, PERIOD), {})
    first = cases.make_engine(cases.make_mlp(), config)
    before = cases.run_steps(first, 3)
    first.save_checkpoint(folder)
    for step in range(3, 4):  # which is forgotten
        cases.run_micro_batch(first, cases.loss_of, step, 0)
    first.load_checkpoint(folder)
    first.save_checkpoint(folder, "again")
    first.close()
    second = cases.make_engine(cases.make_mlp(), config)
    second.load_checkpoint(folder, "again")

    def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
        return cases.loss_of(model, step + 3, rank, micro)

    after = cases.run_steps(second, STEPS - 3, loss_of, after=second.average_replicas)
    second.close()
    return {**after, **{key: before[key] + after[key] for key in ("losses", "norms")}}


def test_a_checkpoint_is_exact(pools: Pools, tmp_path: Path) -> None:
    results = [{"3": result} for result in pools(4).run(resumed, str(tmp_path), "3")]
    compare(results, 2, 1, "AdamW", ("post_local_sgd", START, PERIOD))


class Boom(RuntimeError):
    pass


def failing(folder: str) -> tuple[list[str], bool]:
    """Rank 1 fails in the middle of an average: what is said, and whether a checkpoint leads on from there."""
    model, config = cases.make_mlp(), config_of("2", 1, 1, ("post_local_sgd", 0, 2), {"timeout_s": 60})
    engine = shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"))  # groups of its own
    engine.save_checkpoint(folder)
    losses = [cases.run_micro_batch(engine, cases.loss_of, 0, 0)]
    take, calls, said = replicas._take_means, [], []

    def take_some(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2 and engine.rank == 1:
            raise Boom("in the middle of an average")
        take(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_take_means", take_some)
        for call in (lambda: cases.run_micro_batch(engine, cases.loss_of, 1, 0), engine.reset, engine.zero_grad):
            try:
                call()
            except (Boom, CommunicationError, UsageError) as error:
                said.append(str(error))
    engine.load_checkpoint(folder)
    again = [cases.run_micro_batch(engine, cases.loss_of, 0, 0)]
    engine.close()
    return said, losses == again


def recovered(stage: str, hook: Hook) -> dict[str, Any]:
    """Rank 0 stops after a bucket of a step in which groups step apart; all go on from there."""
    model, config, failing = cases.make_mlp(), config_of(stage, 1, 1, hook, {"timeout_s": 60}), START + PERIOD
    engine = shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"))  # groups of its own

    def run(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        if step == failing and engine.rank == 0:
            stop_after_buckets(engine.optimizer, 1)
        loss = loss_of(engine, step, engine.rank, micro)
        engine.backward(loss)
        if step == failing:
            with suppress(special_models.Boom, CommunicationError):
                engine.step()
            engine.reset()
            assert engine.global_steps == failing + 1
        else:
            engine.step()
        return float(loss.item())

    result = cases.run_steps(engine, STEPS, run=run, after=engine.average_replicas)
    engine.close()
    return result


@pytest.mark.parametrize(("stage", "name"), [("1", "gossip"), ("3", "post_local_sgd")])
def test_a_step_apart_is_finished_by_a_reset(pools: Pools, stage: str, name: str) -> None:
    hook = (name, START, PERIOD)
    compare([{stage: result} for result in pools(2).run(recovered, stage, hook)], 1, 1, "AdamW", hook)


def test_a_failure_in_an_average_loses_the_step(pools: Pools, tmp_path: Path) -> None:
    for said, same in pools(2).run(failing, str(tmp_path)):
        assert "in the middle of an average" in said[0]
        assert "Call engine.load_checkpoint() on every rank" in said[1] and "load_checkpoint" in said[2]
        assert same


CALLS: dict[str, Callable[[Any, str], Any]] = {
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "state_dict": lambda engine, folder: engine.state_dict(),
    "save_pretrained": lambda engine, folder: engine.save_pretrained(folder),
    "load_state_dict": lambda engine, folder: engine.load_state_dict({}),
    "full_params": lambda engine, folder: engine.full_params(writable=True).__enter__(),
    "full_optimizer_state": lambda engine, folder: engine.full_optimizer_state().__enter__(),
    "optimizer.state_dict": lambda engine, folder: engine.optimizer.state_dict(),
    "ema": lambda engine, folder: engine.ema().__enter__(),
    "close": lambda engine, folder: engine.close(restore=False),
}


def apart(folder: str) -> dict[str, str]:
    """What each call says while groups differ, and of gradients; then all is allowed."""
    options = {"ema": {"decay": 0.9}}
    engine = cases.make_engine(cases.make_mlp(), config_of("3", 1, 1, ("post_local_sgd", 0, 100), options))
    said = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except UsageError as error:
            said[name] = str(error)

    engine.backward(cases.loss_of(engine, 0, engine.rank, 0))
    note("grads", lambda: engine.full_grads(writable=True).__enter__())
    with engine.full_grads() as grads:
        norm = torch.stack([g.double().square().sum() for g in grads.values() if g is not None]).sum().sqrt().float()
    assert norm.item() == engine.get_global_grad_norm()
    note("clip", lambda: torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3))
    engine.clip_grad_norm_(0.5)
    engine.step()
    for name, call in CALLS.items():
        note(name, functools.partial(call, engine, folder))
    note("join", lambda: engine.join().__enter__())
    note("factor", lambda: engine.set_gradient_divide_factor(3.0))
    engine.average_replicas()
    engine.save_checkpoint(folder)
    weights = engine.state_dict()
    with engine.ema(), engine.full_params():
        pass
    engine.close()
    assert all(torch.equal(value, weights[name]) for name, value in engine.module.state_dict().items() if weights)
    return said


def test_what_is_refused_while_groups_differ(pools: Pools, tmp_path: Path) -> None:
    for said in pools(2).run(apart, str(tmp_path)):
        for name in CALLS:
            assert "engine.average_replicas() on every rank first" in said.get(name, ""), name
        assert "each with its own gradient" in said["grads"]
        assert "shard groups step apart, each with its own gradient" in said["clip"]
        assert "as many batches on every rank" in said["join"]
        assert "which takes means" in said["factor"]
    assert len(set(said.values())) == len(said)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stage 0": ({"zero_optimization": {"stage": 0}}, "expected 1, 2 or 3 beside comm_hook post_local_sgd"),
    "one group": ({"zero_optimization": {"stage": 2}}, "expected several shard groups beside comm_hook"),
    "sums": ({"gradient_divide_factor": 3.0}, "takes means, over the ranks of a group"),
    "order": ({"gradient_accumulation": "sharded"}, 'expected "full", or none'),
    "period": ({"comm_hook": {"name": "post_local_sgd", "params": {"period": 0}}}, "comm_hook.params.period: expected"),
    "a word": ({"comm_hook": {"name": "gossip", "params": {"periods": 4}}}, "did you mean 'period'?"),
    "no masters": ({"bf16": {"enabled": True, "master_weights": False}}, "with weights or states in bfloat16"),
    "8 bits": ({"data_types": {"optimizer_state_dtype": "8bit"}}, "with weights or states in uint8"),
}


def refused(options: dict[str, Any]) -> str:
    base = config_of("2", 1, 1, ("post_local_sgd", 0, 4), {})
    try:
        cases.make_engine(cases.make_mlp(), {**base, **options}).close()
    except (ConfigError, UsageError) as error:
        return str(error)
    return ""


def test_what_is_refused(pools: Pools) -> None:
    for what, (options, sentence) in REFUSED.items():
        for text in pools(2).run(refused, options):
            assert sentence in text, (what, text)


def test_one_rank_has_no_other(pools: Pools) -> None:
    """A script for many ranks runs on one."""
    for text in pools(1).run(refused, {}):
        assert not text
