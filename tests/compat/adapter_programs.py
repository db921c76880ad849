"""Kinds of adapters, trained by Trainer under DDP, with a DeepSpeed config, and over our engine; saved in every way.

Owns: the program. Importing this file takes seconds and changes the process (``stand_in``): only processes that fork
runs do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardengine.compat.deepspeed import stand_in

stand_in.install()

import peft  # noqa: E402
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, Trainer  # noqa: E402

from shardengine.integrations.transformers import ShardTrainer  # noqa: E402
from tests.support.tiny_llama import Rows, Run, Say, arguments_of, ds_config, make_model  # noqa: E402

__all__ = ["Run", "make_model"]

_LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
_LEARNED: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
CONFIGS: dict[str, Callable[[], Any]] = {
    "a classifier": lambda: peft.LoraConfig(task_type="SEQ_CLS", **_LORA),
    "modules to save": lambda: peft.LoraConfig(modules_to_save=["lm_head"], use_dora=True, **_LORA),
    "prompt tuning": lambda: peft.PromptTuningConfig(**_LEARNED),
    "prefix tuning": lambda: peft.PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=8, **_LEARNED),
    "a resized vocabulary": lambda: peft.LoraConfig(**_LORA),
    "tokens of a resized vocabulary": lambda: peft.LoraConfig(trainable_token_indices=[1, 66], **_LORA),
    "a second adapter and frozen halves": lambda: peft.LoraConfig(**_LORA),
}


class Classes(Rows):
    """One label a row."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "labels": torch.tensor(index % 2)}


def adapted(folder: str, kind: str, seed: int) -> Any:
    """The model of ``folder``; seed: of what a script makes at random each time it is run."""
    torch.manual_seed(seed)
    if kind == "a classifier":
        model = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32, pad_token_id=0)
        torch.nn.init.constant_(model.score.weight, 0.1)
    else:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if "resized" in kind:
        model.resize_token_embeddings(70, mean_resizing=False)
    torch.manual_seed(2)
    model = peft.get_peft_model(model, CONFIGS[kind]())
    if "second" in kind:
        model.add_adapter("frozen", peft.LoraConfig(**_LORA))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_B.default" in name)
    return model


def trainer_of(run: Run, folder: str, kind: str, place: Path, seed: int) -> Any:
    """config: {} for our classes, else of DeepSpeed's."""
    how: dict[str, Any] = {"use_cpu": True}
    if run.stage is not None and run.config:
        how = {"deepspeed": ds_config(run.stage, {})}
    arguments = arguments_of(run, output_dir=str(place), eval_strategy="no", max_steps=3, **how)
    rows = Classes() if kind == "a classifier" else Rows()
    given = {"model": adapted(folder, kind, seed), "args": arguments, "train_dataset": rows}
    if run.stage is None or run.config:
        return Trainer(**given)
    return ShardTrainer(**given, engine_config={"zero_optimization": {"stage": run.stage}})


def adapters(say: Say, rank: int, folder: str, run: Run) -> None:
    """Each kind of ``options`` is trained and saved by Trainer, and as accelerate's users save: every rank asks peft,
    or rank 0 alone; then resumed from the middle by a script that is started anew. Says the losses of both."""
    kinds, run = run.options["kinds"], Run(run.stage, run.output, k=1, ranks=run.ranks, config=run.config)
    for kind in kinds:
        place = Path(run.output) / kind
        trainer = trainer_of(run, folder, kind, place, seed=1)
        trainer.train()
        trainer.save_model(str(place / "final"))
        if run.stage is not None:
            accelerator, engine = trainer.accelerator, trainer.model_wrapped
            state = accelerator.get_state_dict(engine)
            model = accelerator.unwrap_model(engine)
            model.save_pretrained(place / "every", state_dict=state, is_main_process=rank == 0)
            if rank == 0:
                model.save_pretrained(place / "alone", state_dict=state)
            torch.distributed.barrier()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        say(losses)
        del trainer
        gc.collect()
        if run.stage is None:
            continue
        resumed = trainer_of(run, folder, kind, place, seed=5)
        resumed.train(resume_from_checkpoint=str(place / "checkpoint-2"))
        resumed.save_model(str(place / "resumed"))
        say([row["loss"] for row in resumed.state.log_history if "loss" in row])
