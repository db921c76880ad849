"""QLoRA: adapters on a base model of 4 bits, which bitsandbytes packs while it is read; CPUs can do it, too.

torchrun --nproc-per-node 2 examples/hf_qlora.py --stage 3
torchrun --nproc-per-node 2 examples/hf_qlora.py     # the same under DistributedDataParallel
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib.util import find_spec

import torch
from hf_tiny import make_model, make_tokenizer, questions
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from shardengine.integrations.transformers import ShardTrainer

BASE = "runs/hf_qlora/base"  # or a model's name on the hub


def main(stage: int | None, steps: int) -> None:
    arguments = TrainingArguments(
        output_dir="runs/hf_qlora",
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=2e-2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=5,
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    with arguments.main_process_first():
        if arguments.process_index == 0:
            make_model().save_pretrained(BASE)
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(BASE, quantization_config=packing, dtype=torch.float32)
    model = prepare_model_for_kbit_training(model)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    tokenizer = make_tokenizer()
    make = Trainer if stage is None else partial(ShardTrainer, engine_config={"zero_optimization": {"stage": stage}})
    trainer = make(
        model=model,
        args=arguments,
        train_dataset=[tokenizer(row["prompt"] + row["completion"] + "</s>") for row in questions()],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()  # adapter_model.safetensors


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], help="without it DistributedDataParallel")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if find_spec("bitsandbytes") is None:
        print("hf_qlora.py packs the base model with bitsandbytes: pip install bitsandbytes", file=sys.stderr)
        sys.exit(2)
    main(options.stage, options.steps)
