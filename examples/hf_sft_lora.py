"""Supervised fine-tuning with trl: chats, a loss on what the assistant says, LoRA adapters by peft.

    torchrun --nproc-per-node 2 -m shardengine.run --as-deepspeed \\
        examples/hf_sft_lora.py --deepspeed examples/ds_zero3.json
    torchrun --nproc-per-node 2 examples/hf_sft_lora.py     # the same under DistributedDataParallel

The base model is sharded and stays as it is; optimizer states, checkpoints and what is saved are the adapters' alone.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from hf_tiny import make_model, make_tokenizer, questions
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer


def main(deepspeed: str | None, steps: int) -> None:
    arguments = SFTConfig(
        output_dir="runs/hf_sft_lora",
        deepspeed=deepspeed,
        assistant_only_loss=True,  # the chat template marks the assistant's tokens with {% generation %}
        max_length=64,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=2e-2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=5,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,  # trl's default is True where there is a GPU; with it shards compute in bf16, DDP under autocast
        ddp_find_unused_parameters=False,
    )
    chats = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        for row in questions()
    ]
    trainer = SFTTrainer(
        model=make_model(),
        args=arguments,
        train_dataset=Dataset.from_dict({"messages": chats}),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()  # adapter_model.safetensors


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", help="a DeepSpeed config; without it DistributedDataParallel")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    main(options.deepspeed, options.steps)
