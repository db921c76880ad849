"""QLoRA: adapters on a base model of 4 bits, which bitsandbytes packs while it is read; it runs on CPUs, too:

    torchrun --nproc-per-node 2 -m shardengine.run --as-deepspeed examples/hf_qlora.py --stage 3
    torchrun --nproc-per-node 2 examples/hf_qlora.py     # the same under DistributedDataParallel
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

import torch
from datasets import Dataset
from hf_tiny import ds_config, make_model, make_tokenizer, parse, questions, show
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

BASE = "runs/hf_qlora/base"  # or a model's name on the hub


def main(stage: int | None, steps: int) -> None:
    cuda = torch.cuda.is_available()
    arguments = SFTConfig(
        output_dir="runs/hf_qlora",
        deepspeed=ds_config(stage),
        max_length=64,
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=2e-2,
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=steps,
        disable_tqdm=True,
        report_to=[],
        bf16=cuda,
        use_cpu=not cuda,
    )
    dtype = torch.bfloat16 if cuda else torch.float32
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    with arguments.main_process_first():
        make_model().save_pretrained(BASE)
    model = AutoModelForCausalLM.from_pretrained(BASE, quantization_config=packing, dtype=dtype)
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(questions()),  # prompt, completion: the loss is the completion's
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()
    show(trainer.state.log_history)


if __name__ == "__main__":
    options = parse()
    if find_spec("bitsandbytes") is None:
        print("hf_qlora.py packs the base model with bitsandbytes: pip install bitsandbytes", file=sys.stderr)
        sys.exit(2)
    main(options.stage, options.steps)
