"""A loop with accelerate: accumulation, clipping, checkpoints; a run with more steps goes on from the newest.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --stage 3
    torchrun --nproc-per-node 2 examples/accelerate_loop.py     # the same under DistributedDataParallel

Or as it was, with accelerate's own Accelerator and the name deepspeed:

    shardengine run --as-deepspeed --children accelerate launch --use_deepspeed --zero_stage 3 --num_processes 2 \\
        examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from hf_tiny import make_model, make_tokenizer, questions
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

from shardengine.integrations.accelerate import ShardAccelerator

CHECKPOINTS = Path("runs/accelerate_loop")


def main(stage: int | None, steps: int) -> None:
    given = {"gradient_accumulation_steps": 2, "cpu": not torch.cuda.is_available()}
    if stage is None:
        accelerator = Accelerator(**given)
    else:
        accelerator = ShardAccelerator(engine_config={"zero_optimization": {"stage": stage}}, **given)
    tokenizer, model = make_tokenizer(), make_model()
    rows = [tokenizer(row["prompt"] + row["completion"] + "</s>") for row in questions()]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader = DataLoader(rows, batch_size=2, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step = max((int(folder.name) for folder in CHECKPOINTS.glob("[0-9]*")), default=0)
    if step:
        accelerator.load_state(str(CHECKPOINTS / str(step)))  # weights, optimizer, scheduler, random numbers
    while step < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                mean = accelerator.gather(loss.detach()).mean()
                accelerator.print(f"step {step}: loss {mean.item():.7f}")
            if step == steps:
                break
    accelerator.save_state(str(CHECKPOINTS / str(step)))  # on every rank
    accelerator.save_model(model, str(CHECKPOINTS / "model"))
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], help="without it accelerate's own Accelerator")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    main(options.stage, options.steps)
