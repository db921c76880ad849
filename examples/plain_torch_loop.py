"""A script for DistributedDataParallel, before and after; the one line that wraps the model is the difference:

    torchrun --standalone --nproc-per-node 2 examples/plain_torch_loop.py          # sharded
    torchrun --standalone --nproc-per-node 2 examples/plain_torch_loop.py --ddp    # as it was

Everything else is plain torch: ``loss.backward()``, torch's clipping, the optimizer and the scheduler that were made
before. Both print the same losses (DDP adds the ranks' gradients up in another order, which shows in later digits).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import shardengine

LENGTH, BATCH = 32, 16
CONFIG = {"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 3}}


def main(steps: int, ddp: bool) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.parent.glob("*.md")))
    data = torch.tensor(list(text.encode()))

    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(256, 64), nn.TransformerEncoder(block, 3), nn.Linear(64, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = CosineAnnealingLR(optimizer, steps)
    if ddp:
        model = DistributedDataParallel(model)
    else:
        model = shardengine.initialize(model, CONFIG, optimizer=optimizer)

    torch.manual_seed(rank)
    for step in range(steps):
        starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH,))
        x = torch.stack([data[start : start + LENGTH] for start in starts]).to(device)
        y = torch.stack([data[start + LENGTH] for start in starts]).to(device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x)[:, -1], y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}", flush=True)

    if not ddp:
        model.save_pretrained("runs/plain_torch_loop")  # on every rank, instead of torch.save(model.state_dict())
        model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ddp", action="store_true", help="as the script was before")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.ddp)
