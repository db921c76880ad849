"""Patches of frameworks that they need to work with an engine other than DeepSpeed's, each with its reason.

No framework is imported here: ``stand_in`` patches the modules in ``CHANGES`` when they are loaded.

[Note: Ordinary loading] Under stage 3 transformers loads a model on rank 0 and writes it into parameters that DeepSpeed
has sharded before. We use its ordinary loader instead. That maps the files into memory, so that the ranks of a machine
share their pages, and it converts and renames weights, which the other loader does not. ``initialize`` then shards the
model. Under transformers' stage 3, a model made from a configuration would have its random weights on rank 0 alone, in
another order than without stage 3.

[Note: Ranks on a CPU] Without an accelerator, accelerate knows no backend for DeepSpeed and treats every process as the
only one, so that batches and ranks do not match. The patch uses gloo.

[Note: Given optimizers] Under DeepSpeed transformers silently ignores ``Trainer(optimizers=...)`` and makes its own.

[Note: Saving on one rank] Trainer writes files on rank 0. If that fails, the other ranks would wait in a barrier of
torch, and report a closed connection.

[Note: Rows of tokens] Under stage 3 peft reads the initial rows of trainable tokens on rank 0 and sends them from GPU
to GPU. A model that was loaded by the ordinary loader has these rows on every rank, usually in host memory.
"""

from __future__ import annotations

import functools
import logging
import os
from contextlib import nullcontext
from typing import Any

from shardengine.compat.deepspeed.facade import DeepSpeedEngine
from shardengine.core import telling_all

_log = logging.getLogger(__name__)


def load_ordinarily(loader: Any) -> None:
    """Make transformers' module ``loader`` load ordinarily ([Note: Ordinary loading]); other modules see stage 3."""
    vars(loader)["is_deepspeed_zero3_enabled"] = _no


def _no() -> bool:
    return False


def know_ranks_on_cpus(state: Any) -> None:
    """Make accelerate's module ``state`` use gloo if it finds no backend ([Note: Ranks on a CPU])."""
    kind = state.PartialState
    ordinary = kind._prepare_backend

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, distributed_type = ordinary(self, *args, **kwargs)
        launched = "LOCAL_RANK" in os.environ
        if backend is None and launched and os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
            backend = "gloo"
        return backend, distributed_type

    if not hasattr(ordinary, "__wrapped__"):
        vars(prepare)["__wrapped__"] = ordinary
        kind._prepare_backend = prepare


def speak_for_trainer(trainer: Any) -> None:
    """Make transformers' module ``trainer`` warn of ignored optimizers, and raise rank 0's save errors on every rank.

    See [Note: Given optimizers] and [Note: Saving on one rank].
    """
    begin, save = trainer.deepspeed_init, trainer.Trainer.save_model
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def deepspeed_init(own: Any, *args: Any, **kwargs: Any) -> Any:
        given = [
            name
            for name in ("optimizer", "lr_scheduler")
            if (found := getattr(own, name, None)) is not None and type(found).__module__.split(".")[0] != "accelerate"
        ]
        if given and own.is_world_process_zero():
            _log.warning(
                "Trainer(optimizers=...): transformers leaves out the %s that it was given where the engine is "
                "DeepSpeed's, and makes its own from TrainingArguments or the config. Say it there (optim=, "
                'learning_rate=, lr_scheduler_type=, or "optimizer" in the config), override create_optimizer, or take '
                "shardengine.integrations.transformers.ShardTrainer, which keeps it",
                " and the ".join(given),
            )
        return begin(own, *args, **kwargs)

    @functools.wraps(save)
    def save_model(own: Any, *args: Any, **kwargs: Any) -> None:
        engine = getattr(own, "deepspeed", None)
        is_open = isinstance(engine, DeepSpeedEngine) and engine.is_open
        with telling_all(engine._live, "saving the model") if engine is not None and is_open else nullcontext():
            save(own, *args, **kwargs)

    trainer.deepspeed_init, trainer.Trainer.save_model = deepspeed_init, save_model


def begin_with_own_rows(layer: Any) -> None:
    """Make peft's module ``layer`` of trainable tokens work as without stage 3 ([Note: Rows of tokens])."""
    vars(layer)["check_deepspeed_zero3_enabled"] = _no


CHANGES = {
    "accelerate.state": know_ranks_on_cpus,
    "peft.tuners.trainable_tokens.layer": begin_with_own_rows,
    "transformers.modeling_utils": load_ordinarily,
    "transformers.trainer": speak_for_trainer,
}
"""Module name → function that patches it."""
