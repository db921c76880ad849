"""An encoder and a decoder: ShardTrainerMixin before Seq2SeqTrainer; evaluation generates with the sharded model.

torchrun --nproc-per-node 2 examples/hf_seq2seq.py --stage 3
torchrun --nproc-per-node 2 examples/hf_seq2seq.py     # the same under DistributedDataParallel
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np
import torch
from hf_tiny import make_tokenizer, questions
from transformers import (
    DataCollatorForSeq2Seq,
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

from shardengine.integrations.transformers import ShardTrainerMixin


class ShardSeq2SeqTrainer(ShardTrainerMixin, Seq2SeqTrainer):
    """Any class that is derived from Trainer is sharded like this."""


def main(stage: int | None, steps: int) -> None:
    arguments = Seq2SeqTrainingArguments(
        output_dir="runs/hf_seq2seq",
        predict_with_generate=True,
        generation_max_length=12,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=5e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    set_seed(0)
    tokenizer = make_tokenizer()
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **shape)
    model = T5ForConditionalGeneration(config)  # from_pretrained(name)

    def compute_metrics(found: EvalPrediction) -> dict[str, float]:
        def texts(tokens: np.ndarray) -> list[str]:
            return tokenizer.batch_decode(np.where(tokens < 0, 0, tokens), skip_special_tokens=True)

        answers, expected = texts(found.predictions), texts(found.label_ids)
        return {"exact": sum(map(str.__eq__, answers, expected)) / len(expected)}

    rows = [tokenizer(row["prompt"], text_target=row["completion"] + "</s>") for row in questions()]
    make = Seq2SeqTrainer
    if stage is not None:
        make = partial(ShardSeq2SeqTrainer, engine_config={"zero_optimization": {"stage": stage}})
    trainer = make(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
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
