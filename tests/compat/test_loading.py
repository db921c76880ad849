"""Memory while transformers loads a model for stage 3: files are mapped, and a rank never has more than its share.

And bytes on the disk: a checkpoint of adapters has them, and next to nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def save_adapters(say: Callable[[Any], None], rank: int, folder: str, port: int) -> None:
    """Says the bytes of the adapters, and of all that ``save_checkpoint`` has written."""
    import deepspeed
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    join(rank, RANKS, port)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    deepspeed.init_distributed()
    base = LlamaForCausalLM.from_pretrained(f"{folder}/small", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=64, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapters = sum(parameter.nbytes for parameter in trained)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained), config=config)
    tokens = torch.arange(rank, rank + 8)[None]
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(f"{folder}/adapters", exclude_frozen_parameters=True)
    engine.destroy()
    say((adapters, sum(path.stat().st_size for path in Path(folder, "adapters").rglob("*") if path.is_file())))


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks(_import)
    yield forks
    forks.end()


@pytest.fixture(scope="module")
def made(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Where the models are, and the bytes of the large one's weights."""
    folder = tmp_path_factory.mktemp("models")
    ((size,),) = forks.live(make, str(folder))
    return folder, size


def test_a_rank_maps_the_files_and_then_has_its_share(made: tuple[Path, int], forks: Forks) -> None:
    folder, size = made
    said = forks.live(load, str(folder), free_port(), ranks=RANKS)
    for ((loaded, placed),) in said:
        assert loaded <= 16 * MIB < size // 3, f"{loaded / MIB:.0f} MiB"
        unit = size // LAYERS
        assert placed <= size // RANKS + unit, f"{placed / MIB:.0f} of {size / MIB:.0f} MiB"


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_a_checkpoint_of_adapters_is_5_percent_larger_than_they_and_their_states(
    made: tuple[Path, int], forks: Forks
) -> None:
    """All files of the folder: weights and two moments of each, in fp32, and the index, random states and so on."""
    for ((adapters, written),) in forks.live(save_adapters, str(made[0]), free_port(), ranks=RANKS):
        assert 3 * adapters < written <= 1.05 * 3 * adapters, (adapters, written)
