"""Runs of transformers' own Trainer on a tiny model; deepspeed is answered by shardengine in the process that forks.

Owns: the program, which is the same under DDP and with a DeepSpeed config. Importing this file takes seconds and
changes the process (``stand_in``): only processes that fork runs do.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardengine.compat.deepspeed import stand_in

stand_in.install()

from transformers import Trainer  # noqa: E402

from tests.support.forks import operations  # noqa: E402
from tests.support.tiny_llama import (  # noqa: E402
    Rows,
    Run,
    Say,
    arguments_of,
    ds_config,
    load,
    logged,
    make_model,
    make_whole,
)

__all__ = ["Rows", "Run", "Trainer", "arguments_of", "ds_config", "load", "make_model", "train"]


def how_sharded(run: Run) -> dict[str, Any]:
    """The arguments of TrainingArguments that differ between DDP and a stage."""
    return {"use_cpu": True} if run.stage is None else {"deepspeed": ds_config(run.stage, run.config)}


def make_trainer(run: Run, model: Callable[[], Any], **options: Any) -> Any:
    """model: a function, since transformers wants the arguments to be made first."""
    arguments = arguments_of(run, **how_sharded(run), **options)
    return Trainer(model=model(), args=arguments, train_dataset=Rows(), eval_dataset=Rows())


def train(say: Say, _rank: int, folder: str, run: Run) -> None:
    """Train the model of ``folder``; says the log history. begins with resume: of the checkpoint's shape."""

    def model() -> Any:
        return make_whole(run.resume or folder, lora=run.lora) if run.begins else load(folder, lora=run.lora)

    trainer = make_trainer(run, model)
    trainer.train(resume_from_checkpoint=run.resume)
    trainer.save_model(str(Path(run.output) / "final"))
    say(logged(trainer.state.log_history))


def die_while_saving(say: Say, rank: int, folder: str, run: Run) -> None:
    """A training in which a rank is killed; the others say how theirs ended. Without ``dies``: what the second save
    does to files."""
    trainer = make_trainer(run, lambda: load(folder))
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
    trainer = make_trainer(run, lambda: load(folder))
    try:
        trainer.train(resume_from_checkpoint=True)
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
    else:
        say("nothing")


def resume_over_another_base(say: Say, _rank: int, folder: str, run: Run) -> None:
    """What a user is told whose script now loads another base model; and the two ways on, which it names.

    Says the sentence, what a load of the weights alone gives, the steps of a new training of the adapters.
    """
    from peft import PeftModel

    def adapters_over_another_base() -> Any:
        return PeftModel.from_pretrained(make_whole(folder), run.resume, is_trainable=True)

    assert run.resume is not None
    trainer = make_trainer(run, lambda: make_whole(folder, lora=True))
    try:
        trainer.train(resume_from_checkpoint=run.resume)
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
    say(trainer.model_wrapped.load_checkpoint(run.resume, load_module_strict=False, load_module_only=True)[0])
    trainer = make_trainer(run, adapters_over_another_base, max_steps=1)
    trainer.train()
    say(trainer.state.global_step)
