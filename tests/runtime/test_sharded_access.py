"""Touching parameters at stage 3 outside of a gather: one sentence for whoever needs values; no crash and no harm."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.parts import is_hidden
from tests.support.ranks import RankPool
from tests.support.special_losses import CASES

Pools = Callable[[int], RankPool]
CASE = CASES["two forwards, one backward"]


def saved(value: Any) -> None:
    torch.save(value, io.BytesIO())


READS: dict[str, Callable[[Tensor], Any]] = {
    "repr": repr,
    "print to text": lambda p: f"{p} {p.data}",
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.detach().mean(),
    "max": lambda p: p.max(),
    "norm": lambda p: p.norm(),
    "add": lambda p: p + 1,
    "clone": lambda p: p.clone(),
    "detach and copy": lambda p: p.detach().clone().mul_(2),
    "double": lambda p: p.double(),
    "half": lambda p: p.to("cpu", torch.float16),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "list": lambda p: torch.tensor(p.tolist()),
    "index": lambda p: p[0],
    "flat index": lambda p: p.flatten()[-1],
    "slice": lambda p: p[1:],
    "mask": lambda p: p[torch.ones_like(p, dtype=torch.bool)],
    "transposed product": lambda p: p.t() @ p,
    "linear": lambda p: functional.linear(torch.ones(2, p.shape[-1]), p),
    "embedding": lambda p: functional.embedding(torch.tensor([0, 1]), p.view(p.shape[0], -1)),
    "layer norm": lambda p: functional.layer_norm(torch.ones(2, p.numel()), (p.numel(),), p.flatten()),
    "concatenate": lambda p: torch.cat([p.flatten(), p.flatten()]),
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "into a buffer": lambda p: torch.empty(p.shape).copy_(p),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda p: p.add_(1),
    "copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "mul_": lambda p: p.data.mul_(2),
    "normal_": nn.init.normal_,
}
MODEL: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "state_dict": lambda model: model.state_dict(),
    "save its state": lambda model: saved(model.state_dict()),
    "save it": saved,
    "to a vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "norm of all": lambda model: sum(p.square().sum() for p in model.parameters()),
    "part's state": lambda model: model.blocks[1].state_dict(),
    "print": repr,
    "load": lambda model: model.load_state_dict(CASE.make().state_dict()),
}


def outcome(call: Callable[[Any], Any], subject: Any, shape: torch.Size | None = None) -> str:
    """What ``call(subject)`` gave: "hidden" (tensors whose values are refused, too), "fine" (no tensor came), the class
    and text of an error, or what was wrong."""
    try:
        value = call(subject)
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError, pickle.PicklingError) as error:
        return f"{type(error).__name__}: {error}"
    tensors = [value] if isinstance(value, Tensor) else []
    if isinstance(value, nn.Module):
        tensors = [p.detach() for p in value.parameters()]
    if isinstance(value, dict):
        tensors = list(value.values())
    if shape is not None and any(tensor.shape != shape for tensor in tensors):
        return f"shape {[tuple(tensor.shape) for tensor in tensors]} instead of {tuple(shape)}"
    if not all(is_hidden(tensor) for tensor in tensors):
        return "numbers"
    return "hidden" if tensors else "fine"


def touch(stage: str) -> dict[str, Any]:
    """Outcomes of everything above on sharded weights, then two ordinary steps."""
    engine = cases.make_engine(CASE.make(), cases.config_of(stage, zero={"reduce_bucket_size": 600}))
    found: dict[str, str] = {}
    losses = []
    for step in range(2):
        for name, parameter in list(engine.module.named_parameters()) if step else ():
            for what, read in READS.items():
                if not (parameter.dim() == 1 and what in ("transposed product", "linear", "embedding")):
                    same = what in ("add", "clone", "deepcopy", "double", "pickle", "numpy", "into a buffer")
                    found[f"read {what} {name}"] = outcome(read, parameter, parameter.shape if same else None)
            with torch.no_grad():
                for what, write in WRITES.items():
                    found[f"write {what} {name}"] = outcome(write, parameter)
                found[f"after writes {name}"] = outcome(torch.clone, parameter, parameter.shape)
        for what, use in MODEL.items() if step else ():
            found[f"model {what}"] = outcome(use, engine.module)
        loss = CASE.loss(engine, step, engine.rank, 0)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = {name: cases.copy_out(value) for name, value in engine.state_dict().items()}
    engine.close()
    return {"found": found, "losses": losses, "weights": weights}


def test_touching_sharded_weights_never_crashes_or_lies(pools: Pools) -> None:
    model = CASE.make()
    truth = oracle.train(
        model, CASE.loss, ranks=2, steps=2, kind="AdamW", groups=cases.groups_of(model, "AdamW"), clip=cases.CLIP
    )
    results = pools(2).run(touch, "3")
    wrong = {}
    for rank, result in enumerate(results):
        assert len(result["found"]) > 200
        for what, answer in result["found"].items():
            fine = answer == ("fine" if "repr" in what or "print" in what else "hidden")
            # torch itself refuses to write to a tensor whose elements share memory
            refused = "Error" in answer and (what.startswith("write") or what == "model load")
            if not (fine or refused or "engine.full_params" in answer):
                wrong[f"rank {rank}, {what}"] = answer
        assert result["losses"] == [row[rank][0] for row in truth.losses], "the weights were harmed"
    assert not wrong, "\n".join(f"{what}: {answer}" for what, answer in wrong.items())
    for name, value in truth.parameters.items():
        assert torch.equal(results[0]["weights"][name], value), name


def state_dicts(stage: str) -> None:
    """Where weights are and where they are not; no memory of a gathered unit is handed out."""
    engine = cases.make_engine(CASE.make(), cases.config_of(stage, zero={"reduce_bucket_size": 600}))
    module, whole = engine.module, CASE.make().state_dict()
    CASE.loss(engine, 0, engine.rank, 0)  # some units may stay gathered for the backward
    for prefix, name in (("", ""), ("blocks.1.", "blocks.1")):
        part = module.get_submodule(name)
        found = part.state_dict()
        assert {prefix + n: (v.shape, v.dtype) for n, v in found.items()} == {
            n: (v.shape, v.dtype) for n, v in whole.items() if n.startswith(prefix)
        }
        for name, value in found.items():
            assert is_hidden(value) and f"parameter {prefix + name!r}" in outcome(torch.sum, value), name
        for save in (saved, lambda state: [each.untyped_storage() for each in state.values()], copy.deepcopy):
            assert "engine.save_pretrained(dir)" in outcome(save, found)
    engine.zero_grad()
    first = next(iter(dict(module.named_parameters())))
    with engine.full_params([first]):
        given = module.state_dict()
        assert torch.equal(given.pop(first), whole[first]) and any(map(is_hidden, given.values()))
    state = engine.state_dict()
    assert all(is_hidden(v) == (engine.rank > 0) for v in module.state_dict().values())
    assert all(torch.equal(module.state_dict()[name], value) for name, value in state.items())
    engine.zero_grad()  # what is called next ends that
    assert all(map(is_hidden, module.state_dict().values()))
    engine.close()
    assert all(torch.equal(value, whole[name]) for name, value in module.state_dict().items())
    assert not any(part._state_dict_hooks for part in module.modules())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", ["3", "3k"])
def test_a_state_dict_of_sharded_weights_has_names_and_shapes(stage: str, ranks: int, pools: Pools) -> None:
    pools(ranks).run(state_dicts, stage)


LOST: dict[str, Callable[[Any], Tensor]] = {
    "zero_": lambda model: model.out.weight.zero_(),
    "zero_ of data": lambda model: model.out.weight.data.zero_(),
    "init": lambda model: nn.init.constant_(model.blocks[1].up.bias, 1.0),
    "index": lambda model: model.inp.bias.__setitem__(0, 1.0),
    "single element": lambda model: model.single.copy_(torch.ones(1)),
    "0-dim": lambda model: model.scale.fill_(1.0),
}
"""Writes that torch does not refuse although the elements share memory."""


def lose_writes(stage: str) -> dict[str, str]:
    """What each write said."""
    found = {}
    for what, write in LOST.items():
        case = CASES["odd sizes" if what in ("single element", "0-dim") else "two forwards, one backward"]
        engine = cases.make_engine(case.make(), cases.config_of(stage))
        with torch.no_grad():
            found[what] = outcome(write, engine.module)
        engine.close()
    return found


def test_a_lost_write_is_not_silent(pools: Pools) -> None:
    for found in pools(2).run(lose_writes, "3"):
        assert not [what for what, text in found.items() if "engine.full_params(writable=True)" not in text], found


def copies(stage: str) -> list[tuple[float, float]]:
    """Loss of the model and of a deep copy of it, where weights rest whole."""
    engine = cases.make_engine(CASE.make(), cases.config_of(stage))
    twin = copy.deepcopy(engine.module)
    twin_loss = CASE.loss(twin, 0, engine.rank, 0)
    twin_loss.backward()
    assert all(p.grad is not None for p in twin.parameters())
    rows = []
    for step in range(2):
        loss = CASE.loss(engine, step, engine.rank, 0)
        rows.append((loss.item(), CASE.loss(twin, 0, engine.rank, 0).item()))
        engine.backward(loss)
        engine.step()
    engine.close()
    return rows


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_a_deep_copy_of_whole_weights_is_an_ordinary_model(pools: Pools, stage: str) -> None:
    for (first, twin), (second, again) in pools(2).run(copies, stage):
        assert first == twin == again != second


def reads_in_forward(stage: str) -> dict[str, Any]:
    """A forward that reaches into another unit, at every step."""
    engine = cases.make_engine(CASE.make(), cases.config_of(stage, zero={"stage3_prefetch_bucket_size": 0}))
    reach_into_a_later_block(engine.module)
    result = cases.run_steps(engine, 2, CASE.loss)
    engine.close()
    return result


def reach_into_a_later_block(model: Any) -> None:
    model.blocks[0].register_forward_hook(lambda _m, _a, out: out + model.blocks[2].down.bias)


@pytest.mark.parametrize("stage", cases.STAGES)
def test_a_forward_that_reaches_into_another_unit_reads_its_weights(pools: Pools, stage: str) -> None:
    model = CASE.make()
    reach_into_a_later_block(model)
    truth = oracle.train(
        model, CASE.loss, ranks=2, steps=2, kind="AdamW", groups=cases.groups_of(model, "AdamW"), clip=cases.CLIP
    )
    assert_equal_to_truth(pools(2).run(reads_in_forward, stage), truth, f"stage {stage}")
