"""Training runs under late streams (tests/support/late_streams.py), for the tests that expect the oracle's bits of them
and for those that break the engine on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import shardengine
from tests.support import cases
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


@dataclass(frozen=True)
class Case:
    """One run. stream: the user's · around: what else the user does between steps, by name in ``_BETWEEN``."""

    stage: str
    micros: int = 1
    precision: str = "bf16"
    place: str = "device"
    options: str = "plain"
    stream: str = DEFAULT
    around: tuple[str, ...] = ()
    model: str = "mlp"

    def config(self, folder: str) -> dict[str, Any]:
        """The engine's. folder: for tiers on disk."""
        place = {
            key: {**tier, "nvme_path": folder} if "nvme_path" in tier else tier
            for key, tier in {**PLACES, **PLACES_OF_WEIGHTS}[self.place].items()
        }
        said, clip = PRECISIONS[self.precision][0], {"gradient_clipping": 0.0} if self.place == _EARLY else {}
        zero = {"reduce_bucket_size": 600, **place}
        behind = {"checkpoint": {"async_save": True}} if "saved behind" in self.around else {}
        options = {"reproducible": True, **said, **OPTIONS[self.options], **clip, **behind}
        return cases.config_of(self.stage, self.micros, zero=zero, **options)

    def truth(self, ranks: int, steps: int) -> Any:
        """The oracle's answer."""
        told, clip = PRECISIONS[self.precision][1], 0.0 if self.place == _EARLY else cases.CLIP
        return cases.truth(self.model, "AdamW", ranks, self.micros, cases.LETTER[self.stage], steps, clip, **told)


_EARLY = "stepped in backward"


def run(chosen: list[Case], steps: int, folder: str) -> list[dict[str, Any]]:
    """On one rank: what ``cases.train_engine`` gives for each case, "issued": the order of its collectives, and
    "counts". folder: for tiers on disk and checkpoints."""
    return [run_one(case, steps, f"{folder}/{number}") for number, case in enumerate(chosen)]


def run_one(case: Case, steps: int, folder: str) -> dict[str, Any]:
    """As ``run``, of one case."""
    between = [_BETWEEN[name] for name in case.around]
    with adversary(_mesh()) as foe, ExitStack() as stack:
        if case.stream == LEAVES:
            stack.enter_context(_hooks_of_leaves_elsewhere(foe))
        model = cases.MODELS[case.model]()
        engine = shardengine.initialize(
            model, case.config(folder), optimizer=cases.make_optimizer(model, "AdamW"), mesh=foe.mesh
        )
        if case.stream == USER:
            foe.wait_stream(USER, DEFAULT)
            stack.enter_context(foe.on(USER))

        def before(step: int) -> None:
            for each in between:
                each(engine, folder, step)

        result = cases.run_steps(engine, steps, before=before)
        foe.wait_stream(LEAVES, foe.judge.current)
        engine.close()
        foe.check()
        return {**result, "issued": foe.wire.issued, "counts": dict(foe.judge.counts)}


def _mesh() -> Any:
    return cases.mesh_of_this_process() if torch.distributed.is_initialized() else _ALONE


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


def _evaluate(engine: Any, _folder: str, step: int) -> None:
    state = torch.random.get_rng_state()
    with torch.no_grad():
        cases.loss_of(engine, 50 + step, engine.rank, 0)
    torch.random.set_rng_state(state)


def _save(engine: Any, folder: str, step: int) -> None:
    engine.save_checkpoint(folder, f"step{step}")


def _show(engine: Any, _folder: str, _step: int) -> None:
    with engine.full_params():
        for parameter in engine.module.parameters():
            assert parameter.isfinite().all()
    with engine.full_optimizer_state() as states:
        assert states


def _write(engine: Any, _folder: str, _step: int) -> None:
    with engine.full_params(writable=True), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.0)


def _free(engine: Any, _folder: str, _step: int) -> None:
    engine.offload_states()
    engine.reload_states()


_BETWEEN = {
    "evaluation": _evaluate,
    "saved": _save,
    "saved behind": _save,
    "whole weights": _show,
    "written": _write,
    "freed": _free,
}
