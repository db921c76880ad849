"""Classifying texts: ShardTrainer in the place of Trainer, and nothing else; metrics, the best model loaded at the end.

torchrun --nproc-per-node 2 examples/hf_classification.py --stage 3
torchrun --nproc-per-node 2 examples/hf_classification.py     # the same under DistributedDataParallel
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from hf_tiny import SHAPE, make_tokenizer, questions
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    set_seed,
)

from shardengine.integrations.transformers import ShardTrainer


def compute_metrics(found: EvalPrediction) -> dict[str, float]:
    """Of all rows, gathered from the ranks."""
    return {"accuracy": float((np.argmax(found.predictions, axis=-1) == found.label_ids).mean())}


def main(stage: int | None, steps: int) -> None:
    arguments = TrainingArguments(
        output_dir="runs/hf_classification",
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=2e-3,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    set_seed(0)
    tokenizer = make_tokenizer()
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, num_labels=2, **SHAPE)
    model = AutoModelForSequenceClassification.from_config(config)  # from_pretrained(name, num_labels=2)
    rows = [{**tokenizer(row[kind]), "label": label} for row in questions() for label, kind in enumerate(row)]
    make = Trainer if stage is None else partial(ShardTrainer, engine_config={"zero_optimization": {"stage": stage}})
    trainer = make(
        model=model,
        args=arguments,
        train_dataset=rows[:16],
        eval_dataset=rows[16:],
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()  # on every rank: whole weights, for from_pretrained


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], help="without it DistributedDataParallel")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    main(options.stage, options.steps)
