"""Memory while transformers loads a model for stage 3: files are mapped, and a rank never has more than its share."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forks import Forks
from tests.support.program_runs import free_port, join

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
RANKS, MIB = 2, 1 << 20
LAYERS, WIDTH = 16, 512
BUCKET = 1 << 18


def _import() -> None:
    import tests.compat.trainers  # noqa: F401


def anonymous() -> int:
    """Bytes of memory that are no file's. Pages that a fork shares with others count before it has written, too."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return sum(1024 * int(line.split()[1]) for line in file if line.startswith("Anonymous"))


def make(say: Callable[[Any], None], _rank: int, folder: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    for name, layers in (("small", 1), ("model", LAYERS)):
        config = LlamaConfig(
            vocab_size=128, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=layers, num_attention_heads=4
        )
        model = LlamaForCausalLM(config)
        model.save_pretrained(f"{folder}/{name}")
    say(sum(p.nbytes for p in model.parameters()))


def load(say: Callable[[Any], None], rank: int, folder: str, port: int) -> None:
    import deepspeed  # type: ignore[import-not-found]  # shardengine, in a process that forks
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    join(rank, RANKS, port)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": BUCKET, "stage3_prefetch_bucket_size": 0},
    }
    deepspeed.init_distributed()
    kept = HfDeepSpeedConfig(config)  # transformers asks it whether weights are sharded, while it lives
    LlamaForCausalLM.from_pretrained(f"{folder}/small", dtype=torch.float32)  # what the first load imports
    before = anonymous()
    model = LlamaForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    loaded = anonymous() - before
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    say((loaded, anonymous() - before))
    engine.destroy()
    del kept


def test_a_rank_maps_the_files_and_then_has_its_share(tmp_path: Path) -> None:
    forks = Forks(_import)
    ((size,),) = forks.live(make, str(tmp_path))
    said = forks.live(load, str(tmp_path), free_port(), ranks=RANKS)
    forks.end()
    for ((loaded, placed),) in said:
        assert loaded <= 16 * MIB < size // 3, f"{loaded / MIB:.0f} MiB"
        unit = size // LAYERS
        assert placed <= size // RANKS + unit + 16 * MIB < 0.9 * size, f"{placed / MIB:.0f} of {size / MIB:.0f} MiB"
