"""The code in the README and in docs runs: scripts whole, other blocks and configs on a small model, on two ranks.

A block that begins with imports is a script of its own. Other Python blocks of a page find ``engine``, ``batch`` and
``loss`` as a reader would have them, and are the middle of a step: the engine trains before and after them.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from shardengine.config import load_config
from tests.support import HANG_S, scripts
from tests.support.forks import Forks
from tests.support.ranks import RankPool

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "getting-started",
    "choosing-a-stage",
    "training-loop",
    "offload",
    "precision",
    "checkpoints",
    "migrating",
    "huggingface",
    "lightning",
)
PAGES = ["README.md", *(f"docs/{name}.md" for name in NAMES)]
RANKS = 2
GIVEN = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def blocks(page: str, kind: str) -> list[str]:
    """The fenced blocks of one language."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{kind}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [dedent(block) for _, block in found]


def is_script(block: str) -> bool:
    """Whether it stands alone."""
    return "import shardengine\n" in block or is_of_framework(block)


def is_of_framework(block: str) -> bool:
    """Whether a framework starts the engine, and needs a launcher's variables for that."""
    return "shardengine.integrations" in block


def is_without(block: str) -> bool:
    """Whether it is what a script was before."""
    return "init_process_group" in block


WITHOUT = [block for block in blocks("docs/migrating.md", "python") if is_without(block)]
SCRIPTS = [(page, block) for page in PAGES for block in blocks(page, "python") if is_script(block)]
PARTS = [
    (page, block)
    for page in PAGES
    for block in blocks(page, "python")
    if not is_script(block) and not is_without(block)
]
CONFIGS = [(page, block) for page in PAGES for block in blocks(page, "json")]


class GPT2Block(nn.Module):
    """Named as the block that the pages list in ``units``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual."""
        return x + self.linear(x).relu()


class Output(dict[str, Any]):
    """With a ``loss``, as Hugging Face models return it."""

    @property
    def loss(self) -> Any:
        """The entry."""
        return self["loss"]


class Model(nn.Module):
    """Called as a Hugging Face model is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([GPT2Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> Output:
        """The mean of the squares."""
        for block in self.blocks:
            x = block(x)
        return Output(loss=x.square().mean())


def as_config(block: str) -> dict[str, Any]:
    """With what a fragment leaves to the reader."""
    return GIVEN | json.loads(block)


def run_script(block: str, folder: str) -> str:
    """As ``torchrun`` would; what it printed."""
    torch.manual_seed(0)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(block, "script", "exec"), {"__name__": "__main__"})
    return said.getvalue()


def run_part(block: str, config: dict[str, Any], folder: str) -> float:
    """A step, the block after a backward of its own, a step; the last loss."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(None):
        torch.manual_seed(0)
        engine = shardengine.initialize(Model(), config)
        batch = {"x": torch.randn(4, 16)}
        engine.backward(engine(**batch).loss)
        engine.step()
        given: dict[str, Any] = {"engine": engine, "batch": batch, "torch": torch, "Path": Path}
        given["batches"] = [batch] * (1 + engine.rank)
        if "engine.backward(loss)" in block:
            given["loss"] = engine(**batch).loss
        exec(compile(block, "part", "exec"), given)
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        engine.close()
        return float(loss)


def write(block: str, folder: Path) -> Path:
    """A script."""
    script = folder / "train.py"
    script.write_text(block, encoding="utf-8")
    return script


def start(block: str, folder: Path) -> str:
    """What a program of its own printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(write(block, folder))]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_pages_have_code() -> None:
    assert len(SCRIPTS) >= 4 and len(PARTS) >= 5 and len(CONFIGS) >= 5
    assert SCRIPTS[0][0] == "README.md"


@pytest.mark.parametrize("index", range(len(SCRIPTS)), ids=lambda index: f"{SCRIPTS[index][0]}-{index}")
def test_scripts_run(pools: Callable[[int], RankPool], forks: Forks, tmp_path: Path, index: int) -> None:
    page, block = SCRIPTS[index]
    if "shardengine.launch" not in block and not is_of_framework(block):
        said, other = pools(RANKS).run(run_script, block, str(tmp_path))
        if page == "docs/getting-started.md":
            losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
            assert len(losses) == 6 and losses == sorted(losses, reverse=True) and losses[-1] < 0.5 * losses[0], said
            assert other == "", "rank 0 prints for all"
        assert "save_pretrained" not in block or list(tmp_path.rglob("model.safetensors"))
        return
    if is_of_framework(block):
        environment = {"ACCELERATE_USE_CPU": "true"}
        scripts.printed(forks, RANKS, write(block, tmp_path), where=tmp_path, environment=environment)
        saved = "*.ckpt.shards" if "lightning" in block else "trained/model.safetensors"
        assert list(tmp_path.rglob(saved))
        return
    norms = json.loads(start(block, tmp_path))
    assert len(norms) == RANKS and norms[0] == norms[1]


@pytest.mark.parametrize("before", WITHOUT, ids=["DDP", "FSDP"])
def test_a_script_prints_what_it_printed_before(forks: Forks, tmp_path: Path, before: str) -> None:
    both = blocks("docs/migrating.md", "python")
    pair = (before, both[both.index(before) + 1])
    printed = [scripts.printed(forks, RANKS, write(block, tmp_path), where=tmp_path).split() for block in pair]
    old, new = ([float(word) for word in words] for words in printed)
    assert len(old) >= 10 and new == pytest.approx(old, abs=1e-6)


def test_what_the_tables_of_migrating_put_into_the_config_is_accepted() -> None:
    """Under zero_optimization what the page says to be a key of that."""
    text = (ROOT / "docs/migrating.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| (?:DDP|FSDP) \| shardengine \|\n((?:\|.*\n)+)", text, re.MULTILINE)
    found = re.findall(r"`(\"\w+\": [^`]*)`", "".join(tables))
    assert len(tables) == 2 and len(found) >= 15
    for each in found:
        entry = json.loads("{" + each.replace(": k", ": 2") + "}")
        if all(key in ("stage", "units") or key.startswith(("stage3_", "offload_", "shard_group_")) for key in entry):
            entry = {"zero_optimization": {"stage": 3, **entry}}
        load_config(GIVEN | entry)


@pytest.mark.parametrize("index", range(len(PARTS)), ids=lambda index: f"{PARTS[index][0]}-{index}")
def test_parts_run(pools: Callable[[int], RankPool], tmp_path: Path, index: int) -> None:
    config = GIVEN | {"zero_optimization": {"stage": 3}}
    first, second = pools(RANKS).run(run_part, PARTS[index][1], config, str(tmp_path))
    assert first == second


@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=lambda index: f"{CONFIGS[index][0]}-{index}")
def test_configs_train(pools: Callable[[int], RankPool], tmp_path: Path, index: int) -> None:
    first, second = pools(RANKS).run(run_part, "", as_config(CONFIGS[index][1]), str(tmp_path))
    assert first == second
