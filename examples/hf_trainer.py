"""transformers' Trainer, and nothing of shardengine in the file: with the name deepspeed it runs as it is.

    torchrun --nproc-per-node 2 -m shardengine.run --as-deepspeed \\
        examples/hf_trainer.py --deepspeed examples/ds_zero3.json
    torchrun --nproc-per-node 2 examples/hf_trainer.py     # the same under DistributedDataParallel

Both log the same losses. A second run with ``--resume`` and more ``--steps`` goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse

import torch
from hf_tiny import make_model, make_tokenizer, questions
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments


def main(deepspeed: str | None, steps: int, resume: bool) -> None:
    arguments = TrainingArguments(  # before the model, as transformers asks for with DeepSpeed
        output_dir="runs/hf_trainer",
        deepspeed=deepspeed,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    tokenizer, model = make_tokenizer(), make_model()
    rows = [tokenizer(row["prompt"] + row["completion"] + "</s>") for row in questions()]
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows[8:],
        eval_dataset=rows[:8],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()  # on every rank: whole weights, for from_pretrained


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed", help="a DeepSpeed config; without it DistributedDataParallel")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    main(options.deepspeed, options.steps, options.resume)
