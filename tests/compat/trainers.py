"""Runs of transformers' own Trainer on a tiny model; deepspeed is answered by shardengine in the process that forks.

Owns: the program, which is the same under DDP and with a DeepSpeed config. Importing this file takes seconds and
changes the process (``stand_in``): only processes that fork runs do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardengine.compat.deepspeed import stand_in

stand_in.install()

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

ROWS, LENGTH = 20, 12


@dataclass(frozen=True)
class Run:
    """One training. stage: None: under DDP · k: accumulation steps · resume: a checkpoint's folder · config: joined to
    ``ds_config`` · options: further arguments of TrainingArguments."""

    stage: int | None
    output: str
    k: int = 2
    ranks: int = 2
    resume: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    lora: bool = False


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens; the ends of some are not learnt."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 64, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[LENGTH - index % 4 :] = -100
        return {"input_ids": tokens, "labels": labels}


def make_model(say: Callable[[Any], None], _rank: int, folder: str) -> None:
    """Save a tiny Llama, with random weights, to ``folder``."""
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **shape)).save_pretrained(folder)
    say("made")


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


def train(say: Callable[[Any], None], rank: int, folder: str, port: int, run: Run) -> None:
    """Train the model of ``folder``; says the log history."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(run.ranks), "LOCAL_WORLD_SIZE": str(run.ranks)}
    arguments = TrainingArguments(
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
            **({"use_cpu": True} if run.stage is None else {"deepspeed": ds_config(run.stage, run.config)}),
            **run.options,
        }
    )
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if run.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(2)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train(resume_from_checkpoint=run.resume)
    trainer.save_model(str(Path(run.output) / "final"))
    kept = ("loss", "eval_loss", "grad_norm", "learning_rate", "step", "epoch", "total_flos")
    say([{key: value for key, value in row.items() if key in kept} for row in trainer.state.log_history])
