"""A training loop of your own: ``torchrun --standalone --nproc-per-node 2 examples/own_loop.py [steps]``.

Trains a small GPT-2 on this repository's documentation, byte by byte; every line that is shardengine's is marked.
A second run goes on from the checkpoint that the first one wrote.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardengine

ROOT = Path(__file__).parent.parent
CHECKPOINTS = Path("runs/own_loop")
LENGTH, BATCH = 128, 8


def main(steps: int) -> None:
    torch.manual_seed(0)
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.md")))
    data = torch.tensor(list(text.encode()))
    size = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(size)

    engine = shardengine.initialize(model, str(ROOT / "configs" / "zero2.json"))  # shards the model, from here on
    if (CHECKPOINTS / "latest").exists():
        engine.load_checkpoint(CHECKPOINTS)  # on every rank
    device = engine.device
    for step in range(engine.global_steps, engine.global_steps + steps):
        generator = torch.Generator().manual_seed(step * engine.world_size + engine.rank)  # other data on every rank
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=generator)
        batch = torch.stack([data[start : start + LENGTH] for start in starts]).to(device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)  # instead of loss.backward()
        engine.step()  # instead of clipping, optimizer.step(), scheduler.step() and zero_grad()
        if engine.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {engine.get_global_grad_norm():.3f}")

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
