"""A training loop of your own: ``torchrun --standalone --nproc-per-node 2 examples/own_loop.py [steps]``.

Trains a small GPT-2 on this repository's documentation, byte by byte; every line that is shardengine's is marked. A
second run with more steps goes on from the newest good checkpoint. So do ranks that torchrun starts again after one
died (``--max-restarts 3``), also on fewer ranks: the global batch stays, gradient accumulation follows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardengine

ROOT = Path(__file__).parent.parent
CHECKPOINTS = Path("runs/own_loop")
LENGTH, SAVE_EVERY = 128, 10
CONFIG = {
    "train_batch_size": 16,  # of all ranks together; accumulation steps = 16 / (4 * ranks): for 1, 2 or 4 ranks
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "zero_optimization": {"stage": 2},
    "checkpoint": {"keep_last": 2},
}


def main(steps: int) -> None:
    torch.manual_seed(0)
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.md")))
    data = torch.tensor(list(text.encode()))
    size = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(size)

    engine = shardengine.initialize(model, CONFIG)  # shards the model, from here on
    torch.manual_seed(engine.rank)  # other dropout on every rank
    if any(CHECKPOINTS.glob("[!.]*")):  # a killed save leaves nothing but names with a dot
        engine.load_checkpoint(CHECKPOINTS)  # on every rank: the newest that is whole, from any number of ranks
    device = engine.device
    for step in range(engine.global_steps, steps):
        generator = torch.Generator().manual_seed(step)  # the global batch, the same at any number of ranks
        starts = torch.randint(0, len(data) - LENGTH, (engine.train_batch_size(),), generator=generator)
        mine = starts[engine.rank :: engine.world_size]
        for part in mine.split(engine.train_micro_batch_size_per_gpu()):
            batch = torch.stack([data[start : start + LENGTH] for start in part]).to(device)
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)  # instead of loss.backward()
            engine.step()  # instead of clipping, optimizer.step(), scheduler.step(), zero_grad(); counts until the last
        if engine.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {engine.get_global_grad_norm():.3f}", flush=True)
        if engine.global_steps % SAVE_EVERY == 0 or engine.global_steps == steps:
            engine.save_checkpoint(CHECKPOINTS)  # on every rank

    engine.save_pretrained(CHECKPOINTS / "model")  # for GPT2LMHeadModel.from_pretrained
    if engine.rank == 0:
        memory = engine.memory()
        print(
            f"model state of a rank: {memory['measured_model_state_bytes'] / 1e6:.1f} MB, "
            f"by the formula {memory['predicted_model_state_bytes'] / 1e6:.1f} MB"
        )
    engine.close()  # the model is an ordinary one again, and the process group ends


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
