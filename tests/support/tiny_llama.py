"""A tiny Llama, rows that it learns and Trainer's arguments: the same for every program that trains it.

Importing this file takes seconds: processes that fork runs do it. With the name deepspeed ``stand_in`` comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

with suppress(ImportError):  # a table that takes most of the time of the first load: forks have it then
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")

ROWS, LENGTH = 20, 12
_LOGGED = ("loss", "eval_loss", "grad_norm", "learning_rate", "step", "epoch", "total_flos")
Say = Callable[[Any], None]


@dataclass(frozen=True)
class Run:
    """One training. stage: None: under DDP · k: accumulation steps · resume: a checkpoint's folder · config: joined to
    the engine's · options: further arguments of TrainingArguments, or of Accelerator · begins: from random weights ·
    tour: also what only some programs do · dies: (rank, before which operation on files of its second save)."""

    stage: int | None
    output: str
    k: int = 2
    ranks: int = 2
    resume: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    begins: bool = False
    tour: bool = False
    dies: tuple[int, int] | None = None


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
    """Save one, with random weights, to ``folder``."""
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **shape)).save_pretrained(folder)
    say("made")


def load(folder: str, *, lora: bool = False) -> Any:
    """The model of ``folder``; lora: with adapters, which change it from the start."""
    return _adapted(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), lora=lora)


def _adapted(model: Any, *, lora: bool) -> Any:
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def make_whole(folder: str, *, lora: bool = False) -> Any:
    """With random weights, of the shape that ``folder`` says."""
    torch.manual_seed(3)
    return _adapted(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), lora=lora)


def ds_config(stage: int, config: dict[str, Any]) -> dict[str, Any]:
    """What Trainer's users write for DeepSpeed."""
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


def arguments_of(run: Run, *, kind: Any = TrainingArguments, **more: Any) -> Any:
    """Of class ``kind``, with everything that the log shows."""
    return kind(
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
            **more,
            **run.options,
        }
    )


def logged(history: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A Trainer's log without its times."""
    return [{key: value for key, value in row.items() if key in _LOGGED} for row in history]
