"""``"ratio": "auto"`` without ``device_memory``, on devices of several sizes: what the engine needs stays within its
share, and what a step has alive, activations included, within the device. Every storage is counted, and none is there.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import shardengine
from benchmarks.workload import Setting, make_model
from shardengine.offload.tiers import SHARE
from tests.support.cases import STAGES
from tests.support.dry_run import META, Border, DryPlatform, Log, dry_mesh

SETTING = Setting(ranks=1, layers=12, hidden=768, vocabulary=50257, batch=2, sequence=512)
LEAST = 1 << 16
"""Bytes of a tensor whose making is a moment at which all are counted."""


class Alive(TorchDispatchMode):
    """Counts the bytes of all storages on the device, whenever one of ``least`` is made. peak: the most so far."""

    def __init__(self, least: int = LEAST) -> None:
        super().__init__()
        self._least = least
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = (each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_meta)
        if sum(self._note(each.untyped_storage()) for each in made):
            self.peak = max(self.peak, self.bytes_now())
        return result

    def _note(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is new and large."""
        known = self._known.get(storage._cdata)
        if known is not None and known() is storage:
            return False
        self._known[storage._cdata] = weakref.ref(storage)
        return storage.nbytes() >= self._least

    def bytes_now(self) -> int:
        """Those that are alive."""
        alive = {key: each for key, known in self._known.items() if (each := known()) is not None}
        self._known = {key: self._known[key] for key in alive}
        return sum(each.nbytes() for each in alive.values())


class Sized(DryPlatform):
    """A device with so many bytes in all, of which ``held`` are the model's."""

    def __init__(self, device: torch.device, total: int, held: int) -> None:
        super().__init__(device)
        self._free = total - held

    def free_bytes(self) -> int:
        return self._free


@contextmanager
def made(log: Log) -> Iterator[tuple[nn.Module, Tensor, Alive]]:
    """The model, a batch, and what counts them."""
    with Border(log), Alive() as alive:
        with META:
            model = make_model(SETTING, own=True).bfloat16()
        yield model, torch.zeros(SETTING.batch, SETTING.sequence, dtype=torch.int64, device=META), alive


def activation_bytes() -> int:
    """What forward and backward have alive at most beside the weights, without an engine; gradients are dropped."""
    with made(Log()) as (model, tokens, alive):
        for block in model.get_submodule("transformer.h").children():
            vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
        weights = alive.bytes_now()

        def drop(parameter: Tensor) -> None:
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(drop)
        model(input_ids=tokens, labels=tokens).loss.backward()
        return alive.peak - weights


def trained(stage: str, ranks: int, total: int) -> tuple[dict[str, float], int]:
    """What the engine says of its memory after two steps on a device of ``total`` bytes, and the peak."""
    with made(Log()) as (model, tokens, alive):
        held = sum(parameter.nbytes for parameter in model.parameters())
        mesh = dry_mesh(ranks, ranks - 1, platform=lambda device: Sized(device, total, held))
        config = {
            "train_micro_batch_size_per_gpu": SETTING.batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "activation_checkpointing": {"enabled": True},
            "zero_optimization": {**STAGES[stage], "offload_optimizer": {"device": "cpu", "ratio": "auto"}},
        }
        engine = shardengine.initialize(model, config, mesh=mesh)
        alive.peak = 0
        for _ in range(2):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        memory = engine.memory()
        engine.close()
    return memory, alive.peak


@pytest.fixture(scope="module")
def activations() -> int:
    return activation_bytes()


@pytest.mark.parametrize(
    ("stage", "ranks", "total"), [("1", 4, 1.6e9), ("2", 1, 1.6e9), ("2", 1, 2.4e9), ("3", 4, 1.6e9), ("3", 4, 2.4e9)]
)
def test_a_step_fits_beside_the_share(
    stage: str, ranks: int, total: float, activations: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    memory, peak = trained(stage, ranks, round(total))
    need = memory["predicted_model_state_bytes"] + memory["predicted_buffer_bytes"]
    assert need <= SHARE * total
    assert need < peak <= need + activations, "what it needs is counted, and nothing else is alive"
    assert peak <= total
    assert (0 < memory["offload_ratio"] < 1) == (need > 0.9 * SHARE * total)
