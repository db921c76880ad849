"""Direct preference optimization with trl; the reference model is sharded like the one that learns:

    torchrun --nproc-per-node 2 -m shardengine.run --as-deepspeed examples/hf_dpo.py --stage 3
    torchrun --nproc-per-node 2 examples/hf_dpo.py     # the same under DistributedDataParallel
"""

from __future__ import annotations

import torch
from datasets import Dataset
from hf_tiny import ds_config, make_model, make_tokenizer, parse, questions, show
from trl import DPOConfig, DPOTrainer


def main(stage: int | None, steps: int) -> None:
    arguments = DPOConfig(
        output_dir="runs/hf_dpo",
        deepspeed=ds_config(stage),
        beta=0.1,
        max_length=64,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=steps,
        disable_tqdm=True,
        report_to=[],
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
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
    show(trainer.state.log_history)


if __name__ == "__main__":
    options = parse()
    main(options.stage, options.steps)
