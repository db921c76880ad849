"""A LightningModule on real text, sharded by the name of a strategy; Lightning starts the ranks, or torchrun does:

    python examples/lightning_loop.py                                      # 2 ranks
    python examples/lightning_loop.py --strategy ddp                       # as it was; the same losses
    torchrun --standalone --nproc-per-node 2 examples/lightning_loop.py

A second run goes on from the checkpoint of the first, also with another stage or number of ranks.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardengine.integrations.lightning  # noqa: F401  # from here on Lightning knows shardengine_stage_0 to 3

LENGTH, BATCH = 32, 16


class Reader(L.LightningModule):
    """Guesses the next byte."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.Sequential(nn.Embedding(256, 64), nn.TransformerEncoder(block, 3), nn.Linear(64, 256))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the byte after ``x``."""
        return self.layers(x)[:, -1]

    def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
        """The loss of a micro-batch; rank 0 prints that of every tenth step."""
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        if self.global_rank == 0 and self.global_step % 10 == 0:
            print(f"step {self.global_step}: loss {loss.item():.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        """As for any other strategy."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(steps: int, strategy: str, ranks: int) -> None:
    """Train until step ``steps``."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    L.seed_everything(0, verbose=False)
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.parent.glob("*.md")))
    data = torch.tensor(list(text.encode()))
    starts = torch.randint(0, len(data) - LENGTH - 1, (200 * ranks * BATCH,)).tolist()
    x = torch.stack([data[start : start + LENGTH] for start in starts])
    y = torch.stack([data[start + LENGTH] for start in starts])
    trainer = L.Trainer(
        strategy=strategy, devices=ranks, accelerator="auto", max_steps=steps, gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint("runs/lightning_loop", filename="{step}", every_n_train_steps=10, save_last="link")],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    last = Path("runs/lightning_loop/last.ckpt")
    trainer.fit(Reader(), DataLoader(TensorDataset(x, y), BATCH), ckpt_path=last if last.exists() else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--strategy", default="shardengine_stage_3")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    main(arguments.steps, arguments.strategy, arguments.ranks)
