"""shardengine under Ray Train: ``python ray_train.py --storage /shared/run1 --workers 2``; ``--gpu``: one GPU each.

Every line that is shardengine's is marked. A second run with the same storage goes on from the newest checkpoint, also
with another number of workers: the global batch stays, gradient accumulation follows. So do workers that Ray starts
again after one died. The storage is a folder that all nodes see.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn

import shardengine

SAVE_EVERY = 5
CONFIG = {
    "train_batch_size": 24,  # of all workers together; accumulation steps = 24 / (4 * workers): for 1, 2, 3 or 6
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
    "checkpoint": {"keep_last": 2},
}


def train(settings: dict[str, Any]) -> None:
    """What each worker does. Ray has made the process group; it is the engine's, and Ray ends it."""
    storage = Path(settings["storage"])
    log = {"jsonl": {"enabled": True, "output_path": str(storage), "job_name": "log"}}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1))

    engine = shardengine.initialize(model, {**CONFIG, "monitor": log})  # shards the model over Ray's workers
    checkpoints = storage / "checkpoints"
    if any(checkpoints.glob("[!.]*")):  # a killed save leaves nothing but names with a dot
        engine.load_checkpoint(checkpoints)  # on every worker: the newest that is whole, from any number of workers
    for step in range(engine.global_steps, settings["steps"]):
        generator = torch.Generator().manual_seed(step)  # the global batch, the same at any number of workers
        x = torch.randn(engine.train_batch_size(), 32, generator=generator)
        for part in x[engine.rank :: engine.world_size].split(engine.train_micro_batch_size_per_gpu()):
            batch = part.to(engine.device)
            loss = (engine(batch) - batch.sum(1, keepdim=True)).square().mean()
            engine.backward(loss)  # instead of loss.backward()
            engine.step()  # instead of clipping, optimizer.step(), zero_grad(); counts until the last part
        if engine.global_steps % SAVE_EVERY == 0 or engine.global_steps == settings["steps"]:
            engine.save_checkpoint(checkpoints)  # on every worker, straight to the storage: Ray copies nothing
        ray.train.report({"step": engine.global_steps, "loss": loss.item(), "workers": engine.world_size})

    engine.save_pretrained(storage / "model")  # the full model as safetensors; on every worker
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True, help="a folder that all nodes see")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpu", action="store_true", help="one GPU per worker, over NCCL")
    options = parser.parse_args()
    storage = Path(options.storage).resolve()

    trainer = TorchTrainer(
        train,
        train_loop_config={"storage": str(storage), "steps": options.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=ray.train.RunConfig(
            storage_path=str(storage / "ray"),  # what Ray itself keeps
            failure_config=ray.train.FailureConfig(max_failures=3),  # workers that died are started again
        ),
    )
    trainer.fit()
    print(f"the model is in {storage / 'model'}")


if __name__ == "__main__":
    main()
