"""Runs of transformers' own Trainer on a tiny model; deepspeed is answered by shardengine in the process that forks.

Owns: the program, which is the same under DDP and with a DeepSpeed config. Importing this file takes seconds and
changes the process (``stand_in``): only processes that fork runs do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardengine.compat.deepspeed import stand_in

stand_in.install()

from transformers import AutoConfig, AutoModelForCausalLM, Trainer  # noqa: E402

from tests.support.forks import operations  # noqa: E402
from tests.support.tiny_llama import Rows, Run, Say, arguments_of, load, logged, make_model  # noqa: E402

__all__ = ["Rows", "Run", "Trainer", "arguments_of", "load", "make_model", "train"]


def ds_config(stage: int, config: dict[str, Any]) -> dict[str, Any]:
    """What Trainer's users write."""
    zero = {
        "stage": stage,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
        **config.get("zero_optimization", {}),
    }
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": float("inf"),
        **config,
        "zero_optimization": zero,
    }


def make_whole(folder: str) -> Any:
    """With random weights, of the shape that ``folder`` says."""
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def train(say: Say, _rank: int, folder: str, run: Run) -> None:
    """Train the model of ``folder``; says the log history."""
    sharded = {"use_cpu": True} if run.stage is None else {"deepspeed": ds_config(run.stage, run.config)}
    arguments = arguments_of(run, **sharded)  # before the model, as transformers wants it
    model = make_whole(folder) if run.begins else load(folder, lora=run.lora)
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train(resume_from_checkpoint=run.resume)
    trainer.save_model(str(Path(run.output) / "final"))
    say(logged(trainer.state.log_history))


def die_while_saving(say: Say, rank: int, folder: str, run: Run) -> None:
    """A training in which a rank is killed; the others say how theirs ended. Without ``dies``: what the second save
    does to files."""
    arguments = arguments_of(run, deepspeed=ds_config(run.stage or 0, run.config))
    trainer = Trainer(model=load(folder), args=arguments, train_dataset=Rows(), eval_dataset=Rows())
    save = trainer._save_checkpoint

    def save_and_die(*given: Any) -> None:
        if trainer.state.global_step != 4:
            save(*given)
            return
        last = run.dies[1] if run.dies is not None and run.dies[0] == rank else None
        with operations("checkpoint-4", last) as done:
            save(*given)
        if run.dies is None:
            say(done)

    vars(trainer)["_save_checkpoint"] = save_and_die
    try:
        trainer.train()
    except Exception as error:
        say(f"{type(error).__name__}: {error}")


def resume_from_newest(say: Say, rank: int, folder: str, run: Run) -> None:
    """What a user is told who goes on after that; "nothing" if it can be done."""
    arguments = arguments_of(run, deepspeed=ds_config(run.stage or 0, run.config))
    trainer = Trainer(model=load(folder), args=arguments, train_dataset=Rows(), eval_dataset=Rows())
    try:
        trainer.train(resume_from_checkpoint=True)
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
    else:
        say("nothing")
