"""An encoder and a decoder with Seq2SeqTrainer; evaluation generates, with the sharded model, on all ranks:

    torchrun --nproc-per-node 2 -m shardengine.run --as-deepspeed examples/hf_seq2seq.py --stage 3
    torchrun --nproc-per-node 2 examples/hf_seq2seq.py     # the same under DistributedDataParallel
"""

from __future__ import annotations

import numpy as np
import torch
from hf_tiny import ds_config, make_tokenizer, parse, questions, show
from transformers import DataCollatorForSeq2Seq, EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers import T5Config, T5ForConditionalGeneration, set_seed


def main(stage: int | None, steps: int) -> None:
    arguments = Seq2SeqTrainingArguments(
        output_dir="runs/hf_seq2seq",
        deepspeed=ds_config(stage),
        predict_with_generate=True,
        generation_max_length=12,
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=5e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=steps,
        save_steps=steps,
        average_tokens_across_devices=False,  # where the loss is a mean over the batch, not over counted tokens
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    set_seed(0)
    tokenizer = make_tokenizer()
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, **shape)
    model = T5ForConditionalGeneration(config)

    def compute_metrics(found: EvalPrediction) -> dict[str, float]:
        def texts(tokens: np.ndarray) -> list[str]:
            return tokenizer.batch_decode(np.where(tokens < 0, 0, tokens), skip_special_tokens=True)

        answers, expected = texts(found.predictions), texts(found.label_ids)
        return {"exact": sum(map(str.__eq__, answers, expected)) / len(expected)}

    rows = [tokenizer(row["prompt"], text_target=row["completion"] + "</s>") for row in questions()]
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    show(trainer.state.log_history)


if __name__ == "__main__":
    options = parse()
    main(options.stage, options.steps)
