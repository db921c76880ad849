"""Classifying texts with transformers' Trainer and metrics of your own:

    torchrun --nproc-per-node 2 -m shardengine.run --as-deepspeed examples/hf_classification.py --stage 3
    torchrun --nproc-per-node 2 examples/hf_classification.py     # the same under DistributedDataParallel
"""

from __future__ import annotations

import numpy as np
import torch
from hf_tiny import ds_config, make_tokenizer, parse, questions, show
from transformers import AutoModelForSequenceClassification, BertConfig, EvalPrediction, Trainer, TrainingArguments
from transformers import DataCollatorWithPadding, set_seed


def compute_metrics(found: EvalPrediction) -> dict[str, float]:
    """Of all rows, gathered from the ranks."""
    return {"accuracy": float((np.argmax(found.predictions, axis=-1) == found.label_ids).mean())}


def main(stage: int | None, steps: int) -> None:
    arguments = TrainingArguments(
        output_dir="runs/hf_classification",
        deepspeed=ds_config(stage),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=2e-3,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=max(steps // 2, 1),
        save_steps=max(steps // 2, 1),
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        average_tokens_across_devices=False,  # where the loss is a mean over the batch, not over counted tokens
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    set_seed(0)
    tokenizer = make_tokenizer()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=0, num_labels=2, **shape)
    model = AutoModelForSequenceClassification.from_config(config)  # from_pretrained(name, num_labels=2)
    rows = [{**tokenizer(row[kind]), "label": label} for row in questions() for label, kind in enumerate(row)]
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows[:16],
        eval_dataset=rows[16:],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    show(trainer.state.log_history)


if __name__ == "__main__":
    options = parse()
    main(options.stage, options.steps)
