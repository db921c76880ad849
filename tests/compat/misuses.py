"""What users of the name deepspeed do wrong, and what they are told; of Trainer as well.

Importing this file takes seconds and changes the process: only processes that fork runs do it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.compat.trainers import Rows, Run, Trainer, arguments_of, ds_config, load, make_model
from tests.support.tiny_llama import Say

import deepspeed  # type: ignore[import-not-found]  # isort: skip  # what trainers has put there

__all__ = ["Run", "make_model"]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def said_by(act: Callable[[], Any]) -> str:
    """The error of ``act``."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def initialize(config: dict[str, Any], **more: Any) -> Any:
    """Over a layer of its own."""
    model = torch.nn.Linear(4, 4)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config={**CONFIG, **config}, **more)


def optimizer(kind: str) -> dict[str, Any]:
    """A config that names ``kind``."""
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3}}}


def ulysses() -> None:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # type: ignore[import-not-found]
        UlyssesSPAttentionHF,
    )

    UlyssesSPAttentionHF.register_with_transformers(sequence_parallel_size=2)


def attention() -> None:
    from deepspeed.sequence.layer import DistributedAttention  # type: ignore[import-not-found]

    DistributedAttention(None, None)


def scripts(say: Say, _rank: int, _folder: str, run: Run) -> None:
    """Of scripts with a loop of their own; says a dict of sentences."""
    zero = {"zero_optimization": {"stage": run.stage}}
    sections: dict[str, Any] = {
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 2,
        "elasticity": {"enabled": True},
        "pipeline": {"stages": 2},
        "zero_optimisation": {"stage": run.stage},
    }
    kinds = ["OneBitAdam", "Lamb", "SOAP", "AdamWW"]
    acts: dict[str, Callable[[], Any]] = {
        **{name: partial(initialize, {**zero, name: value}) for name, value in sections.items()},
        **{kind: partial(initialize, {**zero, **optimizer(kind)}) for kind in kinds},
        "mpu": lambda: initialize(zero, mpu=object()),
        "mesh_param": lambda: initialize(zero, mesh_param=(1, 2)),
        "unknown argument": lambda: initialize(zero, optimiser=None),
        "unknown name": lambda: deepspeed.initialise,
        "unknown module": lambda: __import__("deepspeed.ops.transformer"),
        "Ulysses": ulysses,
        "DistributedAttention": attention,
        "PipelineModule": lambda: deepspeed.PipelineModule(layers=[], num_stages=2),
        "MoE": lambda: deepspeed.moe.layer.MoE(hidden_size=4, expert=None),
        "init_inference": lambda: deepspeed.init_inference(torch.nn.Linear(4, 4)),
        "LBFGS": lambda: initialize(zero, optimizer=lambda parameters: torch.optim.LBFGS(parameters)),
    }
    deepspeed.init_distributed()
    found = {name: said_by(act) for name, act in acts.items()}
    engine = initialize(zero)[0]
    found["unknown attribute"] = said_by(lambda: engine.get_lrs())
    found["lr_kwargs"] = said_by(lambda: engine.step(lr_kwargs={"lr": 1}))
    found["to"] = said_by(lambda: engine.to("cpu"))
    engine.destroy()
    found["destroyed"] = said_by(lambda: engine(torch.zeros(1, 4)))
    say(found)


def make_trainer(folder: str, run: Run, **options: Any) -> Any:
    """Stock Trainer with ``run.stage``."""
    arguments = arguments_of(run, deepspeed=ds_config(run.stage or 0, run.config), max_steps=2, **options)
    return Trainer(model=load(folder), args=arguments, train_dataset=Rows(), eval_dataset=Rows())


def of_trainer(say: Say, rank: int, folder: str, run: Run) -> None:
    """What users do with Trainer; says a dict of sentences."""
    found = {"adafactor": said_by(lambda: make_trainer(folder, run, optim="adafactor").train())}
    trainer = make_trainer(folder, run)
    trainer.train()
    place = Path(run.output, f"by-{rank}")
    alone = [
        ("save_pretrained on rank 0", lambda: trainer.model.save_pretrained(place)),
        ("torch.save on rank 0", lambda: torch.save(trainer.model.state_dict(), f"{place}.pt")),
    ]
    for name, act in alone:
        found[name] = said_by(act) if rank == 0 else "nothing"
        found[name.replace("rank 0", "every rank")] = said_by(act)
    trainer.save_model(f"{run.output}/after")
    found["train twice"] = said_by(trainer.train)
    found["evaluate after"] = said_by(trainer.evaluate)
    fresh = make_trainer(folder, run)
    found["evaluate before"] = said_by(fresh.evaluate)
    found["train after that"] = said_by(fresh.train)
    say(found)


class Listening(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def words_of_trainer(say: Say, rank: int, folder: str, run: Run) -> None:
    """What stock Trainer does without a word, or says in another library's words; a dict of sentences."""
    listening = Listening()
    logging.getLogger("shardengine").addHandler(listening)
    model = load(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    arguments = arguments_of(run, deepspeed=ds_config(run.stage or 0, run.config), max_steps=1, eval_strategy="no")
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train()
    found = {"optimizers": "; ".join(line for line in listening.lines if "Trainer(optimizers=...)" in line)}
    weight = next(parameter for parameter in trainer.model.parameters() if parameter.dim() == 2)
    found["a read"] = said_by(lambda: weight.sum().item())

    def fail(*_: Any, **__: Any) -> None:  # which every rank calls, and rank 0 writes in
        if rank == 0:
            raise OSError(28, "No space left on device")

    trainer._save = fail
    found["a save that fails on rank 0"] = said_by(lambda: trainer.save_model(f"{run.output}/full"))
    del trainer._save
    trainer.deepspeed.reset()
    trainer.save_model(f"{run.output}/after")
    torch.distributed.barrier()
    listening.lines.clear()
    again = make_trainer(folder, run)
    again.train()
    found["none given"] = "; ".join(line for line in listening.lines if "Trainer(optimizers=...)" in line)
    say(found)
