"""Makes the checkpoints of Trainer over DeepSpeed beside it, and the log of the training that wrote each.

Run from the repository with an interpreter that has DeepSpeed, transformers, accelerate and peft (no GPU is needed):

    DS_ACCELERATOR=cpu python -m tests.data.make_trainer_deepspeed [NAME …]

Each directory ``tests/data/trainer-deepspeed-NAME`` then holds ``checkpoint-2`` as Trainer left it (but for
``training_args.bin``, which knows the machine) and ``log.json``: the whole log history. The program is the one of
``tests/compat/trainers.py``; the model has dropout, so that random states count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

HERE = Path(__file__).resolve().parent
RANKS, STEP = 2, 2
CASES: dict[str, dict[str, Any]] = {
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "stage2-lora": {"stage": 2, "lora": True},
    "stage3-lora": {"stage": 3, "lora": True},
}
SHAPE = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def place_of(name: str) -> Path:
    """Where a case lies."""
    return HERE / f"trainer-deepspeed-{name}"


def _train(rank: int, port: int, name: str, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    import accelerate.state
    from transformers import LlamaConfig, Trainer

    from shardengine.compat.deepspeed import hosts
    from tests.support.tiny_llama import Rows, Run, arguments_of, ds_config, load, logged, make_whole

    hosts.know_ranks_on_cpus(accelerate.state)
    options = CASES[name]
    shape = LlamaConfig(vocab_size=64, max_position_embeddings=32, attention_dropout=0.1, **SHAPE)
    if rank == 0:
        shape.save_pretrained(folder)
        make_whole(folder).save_pretrained(folder)  # now, since inside of zero.Init it would get other values
    config = {"zero_allow_untested_optimizer": True}
    run = Run(options["stage"], str(Path(folder, "run")), options={"save_steps": STEP})
    arguments = arguments_of(run, deepspeed=ds_config(options["stage"], config))
    torch.distributed.barrier()
    model = load(folder, lora=options.get("lora", False))
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    if rank == 0:
        place = place_of(name)
        shutil.copytree(Path(folder, "run", f"checkpoint-{STEP}"), place / f"checkpoint-{STEP}")
        for path in [*place.rglob("*.py"), *place.rglob("training_args.bin"), *place.rglob("README.md")]:
            path.unlink()
        shape.save_pretrained(place / f"checkpoint-{STEP}")
        for path in place.rglob("adapter_config.json"):
            path.write_text(path.read_text(encoding="utf-8").replace(folder, "base"), encoding="utf-8")
        text = json.dumps(logged(trainer.state.log_history), indent=1)
        (place / "log.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Make the named checkpoints, or all."""
    parser = argparse.ArgumentParser(description="Make the checkpoints of Trainer over DeepSpeed that tests read.")
    parser.add_argument("names", nargs="*", choices=[[], *CASES], metavar="NAME", default=[])
    for name in parser.parse_args().names or CASES:
        shutil.rmtree(place_of(name), ignore_errors=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            spawn(_train, args=(port, name, folder), nprocs=RANKS)


if __name__ == "__main__":
    main()
