"""Training runs under late streams (tests/support/late_streams.py), for the tests that expect the oracle's bits of them
and for those that break the engine on purpose."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import shardengine
from tests import oracle
from tests.parity import test_sparse_gradients as sparse
from tests.runtime.test_compile import make_chain
from tests.support import cases, special_losses, special_models
from tests.support.late_streams import DEFAULT, Adversary, adversary

USER, LEAVES = "the user's stream", "the stream of the leaves"
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}},
        {"low": torch.float16, "scaling": (2.0**17, 2, 1, 1.0)},
    ),
    "bf16 stepped itself": (
        {"bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True}, "seed": 5},
        {"low": torch.bfloat16, "keeps_masters": False, "seed": 5},
    ),
}
"""What the config says → what the oracle is told."""
_CPU: dict[str, Any] = {"device": "cpu"}
_DISK: dict[str, Any] = {"device": "nvme", "nvme_path": "", "buffer_count": 2}
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "states on the host": {"offload_optimizer": _CPU},
    "a part on the host": {"offload_optimizer": {**_CPU, "ratio": 0.5}},
    "states page-locked": {"offload_optimizer": {**_CPU, "pin_memory": True}},
    "stepped in backward": {"offload_optimizer": {**_CPU, "step_in_backward": True}},
    "states on disk": {"offload_optimizer": _DISK},
}
PLACES_OF_WEIGHTS: dict[str, dict[str, Any]] = {
    "weights on the host": {"offload_param": _CPU},
    "all on the host": {"offload_param": _CPU, "offload_optimizer": _CPU},
    "weights on the host, not page-locked": {"offload_param": {**_CPU, "pin_memory": False}},
    "weights on disk": {"offload_param": _DISK},
    "all on disk": {"offload_param": _DISK, "offload_optimizer": _DISK},
    "weights on disk, states on the host": {"offload_param": _DISK, "offload_optimizer": _CPU},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights later": {"overlap_param_gather": True},
    "blocks computed again": {"activation_checkpointing": {"enabled": True, "cpu_offload": True}},
    "no overlap": {"overlap_comm": False},
}
APART = {"groups step apart": ("local", 0, 2), "groups gossip": ("gossip", 0, 2)}
"""On hybrid meshes: what the oracle is told."""
OPTIONS |= {
    option: {"comm_hook": {"name": name, "params": {"start_step": 0, "period": 2}}}
    for option, name in zip(APART, ("post_local_sgd", "gossip"), strict=True)
}


@dataclass(frozen=True)
class Case:
    """One run. stream: the user's · around: what else the user does between steps, "evaluation" or by name in
    ``_BETWEEN`` · compiled: what torch.compile is given, "blocks" or "root", and its backend."""

    stage: str
    micros: int = 1
    precision: str = "bf16"
    place: str = "device"
    options: str = "plain"
    stream: str = DEFAULT
    around: tuple[str, ...] = ()
    model: str = "mlp"
    compiled: tuple[str, str] | None = None

    def config(self, folder: str) -> dict[str, Any]:
        """The engine's. folder: for tiers on disk."""
        place = {
            key: {**tier, "nvme_path": folder} if "nvme_path" in tier else tier
            for key, tier in {**PLACES, **PLACES_OF_WEIGHTS}[self.place].items()
        }
        said, zero = PRECISIONS[self.precision][0], {"reduce_bucket_size": 600, **self.special.zero, **place}
        behind = {"checkpoint": {"async_save": True}} if "saved behind" in self.around else {}
        options = {"reproducible": True, **said, **OPTIONS[self.options], **behind}
        options["gradient_clipping"] = self.clip
        return cases.config_of(self.stage, self.micros, zero=zero, **options)

    @property
    def special(self) -> special_losses.Case:
        """The model with its loss."""
        made = special_losses.CASES | _MODELS
        return made.get(self.model) or special_losses.Case(cases.MODELS[self.model], cases.loss_of)

    def truth(self, ranks: int, steps: int) -> oracle.Trace:
        """The oracle's answer."""
        options = self.options if self.options in APART else "plain"
        alike = replace(self, place="device", options=options, stream=DEFAULT, around=(), compiled=None)
        return _truth(alike, ranks, steps, self.clip)

    @property
    def clip(self) -> float:
        """What the norm is clipped to."""
        return 0.0 if self.place == _EARLY else cases.CLIP


@functools.lru_cache(maxsize=200)
def _truth(case: Case, ranks: int, steps: int, clip: float) -> oracle.Trace:
    model, told = case.special.make(), {**PRECISIONS[case.precision][1]}
    if (scaling := told.pop("scaling", None)) is not None:
        told["scaler"] = oracle.Scaler(*scaling)
    order = cases.LETTER[case.stage] if case.micros > 1 else "full"
    told |= {"inside": 2, "apart": APART[case.options]} if case.options in APART else cases.groups_told(order)
    return oracle.train(
        model, case.special.loss, ranks=ranks, micros=case.micros, steps=steps, kind="AdamW",
        groups=cases.groups_of(model, "AdamW"), order=order, clip=clip, **told,
    )  # fmt: skip


_EARLY = "stepped in backward"


def run(chosen: list[Case], steps: int, folder: str) -> list[dict[str, Any]]:
    """On one rank: what ``cases.train_engine`` gives for each case, "issued": the order of its collectives, and
    "counts". folder: for tiers on disk and checkpoints."""
    return [run_one(case, steps, f"{folder}/{number}") for number, case in enumerate(chosen)]


def run_one(case: Case, steps: int, folder: str) -> dict[str, Any]:
    """As ``run``, of one case. What is read of losses and norms, the host does not wait for: a user may read none, nor
    ask whether a step was applied."""
    counters.clear()
    with adversary(_mesh()) as foe, ExitStack() as stack:
        if case.stream == LEAVES:
            stack.enter_context(_hooks_of_leaves_elsewhere(foe))
        model = case.special.make()
        if case.compiled is not None:
            _compile(model, *case.compiled)
        engine = shardengine.initialize(
            model, case.config(folder), optimizer=cases.make_optimizer(model, "AdamW"), mesh=foe.mesh
        )
        if case.stream == USER:
            foe.wait_stream(USER, DEFAULT)
            stack.enter_context(foe.on(USER))
        between: dict[str, Callable[..., None]] = {
            **_BETWEEN,
            "evaluation": functools.partial(_evaluate, case.special.loss),
        }
        saved: dict[str, str] = {}

        def before(step: int) -> None:
            for name in case.around:
                if name.startswith("saved"):
                    with foe.unseen():
                        saved[f"step{step}"] = cases.digest([cases.local_state(engine)])
                between[name](engine, folder, step)

        def micro_batch(_engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
            loss = loss_of(engine, step, engine.rank, micro)
            engine.backward(loss)
            engine.step()
            with foe.unseen():
                return float(loss.item())

        norm, verdicts = engine.get_global_grad_norm, list[Any]()

        def norm_unseen() -> float | None:
            with foe.unseen():
                return norm()

        def not_asked() -> bool:
            verdicts.append(engine._verdict)
            return True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "get_global_grad_norm", norm_unseen)
            patch.setattr(engine, "was_step_applied", not_asked)
            result = cases.run_steps(
                engine, steps, case.special.loss, micro_batch, before, after=engine.average_replicas
            )
        result["skipped"] = [step for step, verdict in enumerate(verdicts) if not verdict.applied]
        for tag, digest in saved.items():
            engine.load_checkpoint(folder, tag)
            assert cases.digest([cases.local_state(engine)]) == digest, f"{tag} has other states than were saved"
        foe.wait_stream(LEAVES, foe.judge.current)
        engine.close()
        foe.check()
        assert (case.compiled is not None) is bool(counters["stats"]["unique_graphs"]), "compiled, or not"
        return {**result, "issued": foe.wire.issued, "counts": dict(foe.judge.counts)}


def _compile(model: Any, what: str, backend: str) -> None:
    torch._dynamo.reset()
    for module in model.blocks if what == "blocks" else [model]:
        module.compile(backend=backend)


def _mesh() -> Any:
    return cases.mesh_of_this_process() if torch.distributed.is_initialized() else _ALONE


class _Twice(nn.Module):
    """One block that is called twice, checkpointed by autograd inside of autograd: its gradients come twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(7, 12), nn.Linear(12, 3)
        self.blocks = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12)])

    def forward(self, x: torch.Tensor, at: Any) -> torch.Tensor:
        x = self.inp(x)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.blocks[0], x, use_reentrant=True))
        return self.out(self.blocks[1](x))


def _twice() -> nn.Module:
    torch.manual_seed(3)
    return _Twice()


def _at_times() -> nn.Module:
    return special_losses.net(route=special_models.skipping(lambda number, at: number == at.step % 2))


def _nan_in_the_middle(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
    loss = cases.loss_of(model, step, rank, micro)
    return loss * float("nan") if (step, rank, micro) == (1, 0, 0) else loss


def _first_at_times() -> nn.Module:
    """Two blocks alone are trained, the first one in the second step alone: it is stepped last."""
    route = special_models.skipping(lambda number, at: number == 0 and at.step != 1)
    model = special_losses.net(route=route, count=2)
    model.requires_grad_(False)
    model.blocks.requires_grad_(True)
    return model


def _loss_of_chain(model: Any, step: int, rank: int, micro: int) -> torch.Tensor:
    x, y, _ = special_losses.start(step, rank, micro)
    return (model(x.to(special_losses.bare(model).inp.weight.dtype))[:, :3] - y).square().mean()


_MODELS = {
    "a step skipped": special_losses.Case(cases.make_mlp, _nan_in_the_middle),
    "gradients twice": special_losses.Case(_twice),
    "chain": special_losses.Case(make_chain, _loss_of_chain),
    "sparse": special_losses.Case(sparse.make, sparse.loss_of),
    "a block at times": special_losses.Case(_at_times, zero={"reduce_bucket_size": 64}),
    "the first block at times": special_losses.Case(
        _first_at_times, zero={"reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 0}
    ),
}
_ALONE = shardengine.comm.Mesh(0, 1, torch.device("cpu"))


@contextmanager
def _hooks_of_leaves_elsewhere(foe: Adversary) -> Iterator[None]:
    """Hooks of accumulated gradients are called on another stream, which has waited for the one that computed them, as
    autograd does where the node that accumulates was made on another stream: it has the allocator guard what passes
    from one to the other, and joins both at the end."""
    register = torch.Tensor.register_post_accumulate_grad_hook
    backward = torch.autograd.backward

    def registered(parameter: torch.Tensor, hook: Callable[[Any], None]) -> Any:
        def elsewhere(leaf: torch.Tensor) -> None:
            foe.wait_stream(LEAVES, foe.judge.current)
            if leaf.grad is not None:
                foe.record_stream(leaf.grad)
            with foe.on(LEAVES):
                hook(leaf)

        return register(parameter, elsewhere)

    def joined(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        foe.wait_stream(foe.judge.current, LEAVES)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "register_post_accumulate_grad_hook", registered)
        patch.setattr(torch.autograd, "backward", joined)
        yield


def _evaluate(loss_of: cases.LossOf, engine: Any, _folder: str, step: int) -> None:
    state = torch.random.get_rng_state()
    with torch.no_grad():
        loss_of(engine, 50 + step, engine.rank, 0)
    torch.random.set_rng_state(state)


def _load(engine: Any, folder: str, step: int) -> None:
    engine.save_checkpoint(folder, f"now{step}")
    engine.load_checkpoint(folder, f"now{step}")


def _save(engine: Any, folder: str, step: int) -> None:
    engine.save_checkpoint(folder, f"step{step}")


def _show(engine: Any, _folder: str, _step: int) -> None:
    with engine.full_params():
        for parameter in engine.module.parameters():
            assert parameter.isfinite().all()
    with engine.full_optimizer_state() as states:
        held = [value for kinds in states.values() for value in kinds.values() if isinstance(value, torch.Tensor)]
        assert held and all(value.isfinite().all() for value in held)


def _show_states(engine: Any, _folder: str, _step: int) -> None:
    with engine.full_optimizer_state(writable=True) as states, torch.no_grad():
        for kinds in states.values():
            for value in kinds.values():
                if isinstance(value, torch.Tensor):
                    value.mul_(1.0)


def _write(engine: Any, _folder: str, _step: int) -> None:
    with engine.full_params(writable=True), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.0)


def _reset(engine: Any, _folder: str, _step: int) -> None:
    """As after a failure that all ranks have had."""
    engine.reset()


def _free(engine: Any, _folder: str, _step: int) -> None:
    engine.offload_states()
    engine.reload_states()


_BETWEEN = {
    "saved": _save,
    "saved behind": _save,
    "whole weights": _show,
    "states written": _show_states,
    "written": _write,
    "freed": _free,
    "reset": _reset,
    "loaded": _load,
}
