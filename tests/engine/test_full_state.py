"""full_grads and full_optimizer_state show what the oracle has, and what rank 0 writes is what training goes on with.

The oracle is told to write the same: its functions are wrapped here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import oracle
from tests.parity import test_backwards
from tests.support import cases, special_losses
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 3
STAGES = list(cases.STAGES)
DTYPES = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
STATES = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",), "Lion": ("exp_avg",)}

MODELS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "mlp": (cases.make_mlp, cases.loss_of),
    **{
        name: (case.make, case.loss)
        for name, case in (
            ("tied", special_losses.CASES["tied: embedding and head"]),
            ("frozen", special_losses.CASES["frozen: a block in the middle"]),
            ("adapters", special_losses.CASES["frozen: adapters over bf16"]),
            ("unused", special_losses.CASES["unused: on all ranks"]),
            ("odd", special_losses.CASES["odd sizes"]),
            ("strides", test_backwards.CASES["strides: channels_last and transposed"]),
            ("dtypes", test_backwards.CASES["dtypes: bf16 and fp32, both trained"]),
        )
    },
}


def out(tensor: Tensor) -> Any:
    """A copy for the parent: fp32, which holds every value of a narrower dtype."""
    return tensor.detach().float().clone().contiguous().numpy()


def make(model: str, stage: str, kind: str, micros: int, bucket: int, **options: Any) -> Any:
    config = cases.config_of(stage, micros, zero={"reduce_bucket_size": bucket}, **options)
    return cases.make_engine(MODELS[model][0](), config, kind)


def backward(engine: Any, model: str, step: int) -> None:
    """Every backward of the step; ``step()`` between them."""
    micros = engine.gradient_accumulation_steps()
    for micro in range(micros):
        engine.backward(MODELS[model][1](engine, step, engine.rank, micro))
        if micro + 1 < micros:
            engine.step()


def truths(model: str, ranks: int, micros: int, kind: str, low: Any = None) -> dict[str, oracle.Trace]:
    """By stage; those that add up in one order share one."""
    orders = {stage: cases.LETTER[stage] if micros > 1 else "full" for stage in STAGES}
    made = {order: truth(model, ranks, micros, order, kind, low) for order in sorted(set(orders.values()))}
    return {stage: made[order] for stage, order in orders.items()}


def truth(model: str, ranks: int, micros: int, order: str, kind: str, low: Any = None) -> oracle.Trace:
    network = MODELS[model][0]()
    return oracle.train(
        network, MODELS[model][1], ranks=ranks, micros=micros, steps=STEPS, kind=kind,
        groups=cases.groups_of(network, kind), order=order, clip=cases.CLIP, low=low,
    )  # fmt: skip


def equal(ours: Any, expected: Tensor, what: str) -> None:
    value = torch.from_numpy(ours)
    assert value.shape == expected.shape, what
    assert torch.equal(value, expected.float()), f"{what}: {(value != expected.float()).sum()} of {value.numel()}"


# Reading


def reads(model: str, kind: str, micros: int, bucket: int, options: dict[str, Any]) -> dict[str, Any]:
    """Per stage: gradients before the last step and states after it, as shown; and what was true of the tensors."""
    found = {}
    for stage in STAGES:
        engine = make(model, stage, kind, micros, bucket, **options)
        named = dict(engine.module.named_parameters(remove_duplicate=False))
        for step in range(STEPS):
            backward(engine, model, step)
            if step + 1 == STEPS:
                with engine.full_grads() as gradients:
                    shown = {name: None if g is None else out(g) for name, g in gradients.items()}
                    strides = {name: g.stride() for name, g in gradients.items() if g is not None}
                    ids = {name: id(g) for name, g in gradients.items() if g is not None}
            engine.step()
        with engine.full_optimizer_state() as states:
            whole = {
                name: None if entry is None else {k: v if k == "step" else out(v) for k, v in entry.items()}
                for name, entry in states.items()
            }
        cut = [name for b in engine._core.layout.buckets for name in b.names]
        found[stage] = {
            "gradients": shown, "states": whole, "strides": strides, "ids": ids, "names": list(named),
            "cut": len(cut) > len(set(cut)),
        }  # fmt: skip
        engine.close()
    return found


def assert_reads(pools: Pools, ranks: int, model: str, kind: str, micros: int, bucket: int, dtype: str = "fp32") -> Any:
    results = pools(ranks).run(reads, model, kind, micros, bucket, DTYPES[dtype])
    low = torch.bfloat16 if dtype == "bf16" else None
    traces = truths(model, ranks, micros, kind, low)
    for result in results:
        for stage in STAGES:
            trace, found = traces[stage], result[stage]
            tied = {name: first for first, others in names_of(MODELS[model][0]()).items() for name in others}
            assert list(found["gradients"]) == found["names"] == list(found["states"])
            made = dict(MODELS[model][0]().named_parameters(remove_duplicate=False))
            assert found["strides"] == {name: made[name].stride() for name in found["strides"]}
            for name, gradient in found["gradients"].items():
                where = f"stage {stage}, gradient of {name}"
                expected = tied[name] in trace.gradients and made[name].numel() > 0
                assert (gradient is not None) == expected, where
                if gradient is not None:
                    equal(gradient, trace.gradients[tied[name]], where)
                    assert found["ids"][name] == found["ids"][tied[name]]
            assert_states(found["states"], trace, tied, kind, stage)
    return results


def names_of(model: nn.Module) -> dict[str, list[str]]:
    """First name → all names of each parameter."""
    first = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(first[id(parameter)], []).append(name)
    return found


def assert_states(shown: dict[str, Any], trace: oracle.Trace, tied: dict[str, str], kind: str, stage: str) -> None:
    for name, entry in shown.items():
        states, where = trace.states.get(tied[name], {}), f"stage {stage}, {name}"
        if entry is None:
            assert not states or not trace.parameters[tied[name]].numel(), where
            continue
        assert list(entry) == ["weight", *STATES[kind], "step"]
        assert entry["step"] == (STEPS if tied[name] in trace.gradients else 0), where
        equal(entry["weight"], states.get("master", trace.parameters[tied[name]]), where)
        for key in STATES[kind]:
            equal(entry[key], states.get(key, torch.zeros_like(trace.parameters[tied[name]])), f"{where}: {key}")


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("micros", "kind"), [(1, "AdamW"), (3, "SGD")])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shows_the_truth_on_every_rank(pools: Pools, ranks: int, micros: int, kind: str, dtype: str) -> None:
    results = assert_reads(pools, ranks, "mlp", kind, micros, 200, dtype)
    assert all(found["cut"] for found in results[0].values()), "no parameter lies in two buckets"


@pytest.mark.parametrize("model", [name for name in MODELS if name != "mlp"])
def test_shows_special_models(pools: Pools, model: str) -> None:
    """Tied, frozen, unused, without elements, several dtypes; strides are the parameter's."""
    assert_reads(pools, 3 if model in ("odd", "strides") else 2, model, "AdamW", 1, 300)


def dtypes_and_tied() -> list[Any]:
    engine = make("dtypes", "3", "AdamW", 3, 300)
    backward(engine, "dtypes", 0)
    with engine.full_grads() as gradients:
        found = [str(gradients[name].dtype) for name in ("blocks.0.up.weight", "blocks.2.up.weight")]
    with engine.full_optimizer_state("blocks.0.up.weight") as states:
        found.append(str(states["blocks.0.up.weight"]["weight"].dtype))
    engine.close()
    return found


def test_gradients_have_the_wires_dtype(pools: Pools) -> None:
    assert pools(2).run(dtypes_and_tied) == [["torch.bfloat16", "torch.float32", "torch.float32"]] * 2


# Collectives


@contextmanager
def broadcasts() -> Iterator[list[int]]:
    """Bytes of every broadcast; on gloo an all-gather is one broadcast by each rank."""
    found: list[int] = []
    original = dist.broadcast

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", counting)
        yield found


def counts(stage: str) -> dict[str, Any]:
    """Broadcasts of reading and of writing back one parameter, and all; the buckets that hold it; the step's bytes."""
    engine = make("mlp", stage, "AdamW", 1, 200)
    name = "blocks.1.0.weight"
    layout = engine._core.layout
    found: dict[str, Any] = {
        "buckets": sum(name in bucket.names for bucket in layout.buckets), "all": len(layout.buckets),
    }  # fmt: skip
    backward(engine, "mlp", 0)
    for key, open_it in (("gradient", engine.full_grads), ("state", engine.full_optimizer_state)):
        for chosen in (name, None):
            with broadcasts() as sent:
                context = open_it(chosen, writable=chosen is not None)
                context.__enter__()
                found[f"{key} read {chosen}"] = len(sent)
                sent.clear()
                context.__exit__(None, None, None)
                found[f"{key} written {chosen}"] = list(sent)
    found["element"] = engine.module.blocks[1][0].weight.numel()
    engine.step()
    said = engine.traffic()
    found["formula"] = said["measured_bytes_last_step"] == said["formula_bytes_per_step"]
    engine.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_one_collective_per_bucket(pools: Pools, stage: str, ranks: int) -> None:
    name = "blocks.1.0.weight"
    for found in pools(ranks).run(counts, stage):
        assert 1 < found["buckets"] < found["all"]
        for key, kinds in (("gradient", 1), ("state", 3)):
            gathers = 0 if stage == "0" else ranks
            assert found[f"{key} read {name}"] == gathers * found["buckets"]
            assert found[f"{key} read None"] == gathers * found["all"]
            assert len(found[f"{key} written {name}"]) == found["buckets"]
            assert sum(found[f"{key} written {name}"]) == 4 * kinds * found["element"], "only what was asked for"
            assert found[f"{key} written None"] == []
        assert found["formula"], "they are not part of the step's formula"


def test_whole_tensors_lie_with_the_weights_wherever_their_slices_rest() -> None:
    """The weights are told to be on another device than what the optimizer steps."""
    engine = make("mlp", "2", "AdamW", 1, 200)
    loss_of = MODELS["mlp"][1]
    engine.backward(loss_of(engine, 0, 0, 0))
    buckets = [state.bucket for state in engine._core.reducer.buckets]
    plain = [bucket.full for bucket in buckets]
    for bucket in buckets:
        bucket.full = bucket.full.to("meta")
    with engine.full_grads() as gradients:
        assert {gradient.device.type for gradient in gradients.values()} == {"meta"}
    with engine.full_optimizer_state() as states:
        found = {
            value.device.type for entry in states.values() for value in entry.values() if isinstance(value, Tensor)
        }
        assert found == {"meta"}
    for bucket, full in zip(buckets, plain, strict=True):
        bucket.full = full
    engine.step()
    engine.close()
