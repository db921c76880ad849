"""transformers' Trainer with a DeepSpeed config; without the door and --stage, the same under DistributedDataParallel:

    torchrun --nproc-per-node 2 -m shardengine.run --as-deepspeed examples/hf_trainer.py --stage 3
    torchrun --nproc-per-node 2 examples/hf_trainer.py

Both print the same losses. A checkpoint of either stage is resumed at any other one and with other ranks:
``trainer.train(resume_from_checkpoint=True)``.
"""

from __future__ import annotations

import torch
from hf_tiny import ds_config, make_model, make_tokenizer, parse, questions, show
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments


def main(stage: int | None, steps: int) -> None:
    arguments = TrainingArguments(  # before the model, as transformers asks for with DeepSpeed
        output_dir="runs/hf_trainer",
        deepspeed=ds_config(stage),  # or the name of a JSON file
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=max(steps // 2, 1),
        save_steps=max(steps // 2, 1),
        logging_steps=max(steps // 10, 1),
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
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
    trainer.train()
    trainer.save_model()  # on every rank: whole weights, for from_pretrained
    show(trainer.state.log_history)


if __name__ == "__main__":
    options = parse()
    main(options.stage, options.steps)
