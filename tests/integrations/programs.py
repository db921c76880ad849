"""Programs of Trainer and of accelerate on a tiny model, each the same under DDP and over our engine.

Importing this file takes seconds: processes that fork runs do it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardengine.integrations.accelerate import ShardAccelerator
from shardengine.integrations.transformers import ShardTrainer

ROWS, LENGTH = 20, 12
Say = Callable[[Any], None]


@dataclass(frozen=True)
class Run:
    """One training. stage: None: under DDP · k: accumulation steps · resume: a checkpoint's folder · config: joined to
    the engine's · options: further arguments of TrainingArguments · tour: also what only some programs do."""

    stage: int | None
    output: str
    k: int = 2
    ranks: int = 2
    resume: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    tour: bool = False


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens; the ends of some are not learnt."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[LENGTH - index % 4 :] = -100
        return {"input_ids": tokens, "labels": labels}


def make_model(say: Say, _rank: int, folder: str) -> None:
    """Save a tiny Llama, with random weights, to ``folder``."""
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **shape)).save_pretrained(folder)
    say("made")


def join(rank: int, ranks: int, port: int) -> None:
    """As torchrun would start this rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}


def load(folder: str, *, lora: bool = False) -> Any:
    """The model of ``folder``; lora: with adapters."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def config_of(run: Run) -> dict[str, Any]:
    """What a user writes."""
    zero = {"stage": run.stage, **run.config.get("zero_optimization", {})}
    return {**run.config, "zero_optimization": zero}


def arguments_of(run: Run) -> TrainingArguments:
    """With everything that the log shows."""
    return TrainingArguments(
        **{
            "output_dir": run.output,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": run.k,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 1,
            "weight_decay": 0.1,
            "max_grad_norm": 0.7,
            "logging_steps": 1,
            "eval_strategy": "epoch",
            "save_strategy": "steps",
            "save_steps": 2,
            "report_to": [],
            "disable_tqdm": True,
            "seed": 5,
            "use_cpu": True,
            **run.options,
        }
    )


def make_trainer(run: Run, model: Any) -> Any:
    """Stock Trainer, or ours."""
    given = {"model": model, "args": arguments_of(run), "train_dataset": Rows(), "eval_dataset": Rows()}
    return Trainer(**given) if run.stage is None else ShardTrainer(**given, engine_config=config_of(run))


def train(say: Say, rank: int, folder: str, port: int, run: Run) -> None:
    """Train the model of ``folder``; says the log history. tour: evaluates before, generates, trains again."""
    join(rank, run.ranks, port)
    trainer = make_trainer(run, load(folder, lora=run.lora))
    logs: list[dict[str, Any]] = []
    if run.tour:  # transformers 5.23 leaves a model that it has evaluated out of DDP: there another one is evaluated
        first = make_trainer(run, load(folder)) if run.stage is None else trainer
        first.evaluate()
        logs += first.state.log_history
    trainer.train(resume_from_checkpoint=run.resume)
    logs += trainer.state.log_history
    if run.tour:
        prompt = torch.tensor([[1, 2 + rank]])
        made = trainer.model.generate(prompt, max_new_tokens=2 + 3 * rank, do_sample=False, pad_token_id=0)
        predicted = trainer.predict(Rows())
        logs.append({"loss": predicted.metrics["test_loss"], "step": int(predicted.predictions.argmax(-1).sum())})
        trainer.train()
        logs += trainer.state.log_history
        assert made.shape[1] == 4 + 3 * rank
    trainer.save_model(str(Path(run.output) / "final"))
    kept = ("loss", "eval_loss", "grad_norm", "learning_rate", "step", "epoch", "total_flos")
    say([{key: value for key, value in row.items() if key in kept} for row in logs])
