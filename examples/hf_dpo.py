"""Direct preference optimization with trl; the reference model is sharded like the one that learns.

    torchrun --nproc-per-node 2 -m shardengine.run --as-deepspeed \\
        examples/hf_dpo.py --deepspeed examples/ds_zero3.json
    torchrun --nproc-per-node 2 examples/hf_dpo.py     # the same under DistributedDataParallel
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from hf_tiny import make_model, make_tokenizer, questions
from trl import DPOConfig, DPOTrainer


def main(deepspeed: str | None, steps: int) -> None:
    arguments = DPOConfig(
        output_dir="runs/hf_dpo",
        deepspeed=deepspeed,
        beta=0.1,
        max_length=64,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=5,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,  # trl's default is True where there is a GPU; with it shards compute in bf16, DDP under autocast
        ddp_find_unused_parameters=False,
    )
    rows = questions()
    pairs = {
        "prompt": [row["prompt"] for row in rows],
        "chosen": [row["completion"] for row in rows],
        "rejected": [row["completion"] for row in rows[1:] + rows[:1]],  # another country's
    }
    trainer = DPOTrainer(
        model=make_model(),
        ref_model=make_model(),  # None where the model comes from a folder or the hub: trl reads it from there again
        args=arguments,
        train_dataset=Dataset.from_dict(pairs),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", help="a DeepSpeed config; without it DistributedDataParallel")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    main(options.deepspeed, options.steps)
