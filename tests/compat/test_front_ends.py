"""LLaMA-Factory, ms-swift and axolotl: toy runs that log with shards what they log under DDP, and how they start ranks.

Their requirements exclude each other, so each has an environment of its own: SHARDENGINE_FRONT_ENDS names a folder with
`llamafactory`, `swift` and `axolotl`, each an environment of venv. Without that an installed one is run by this
interpreter. Everything runs offline, on CPUs, with inputs made on the spot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shardengine.compat.deepspeed import table
from tests.compat.scan import names_used
from tests.support import HANG_S
from tests.support.program_runs import Log, free_port

FRONT_ENDS = os.environ.get("SHARDENGINE_FRONT_ENDS", "")
ROOT = Path(__file__).parents[2]
RANKS, STEPS = 2, 4
UNDER_THE_NAME = ("-m", "shardengine.run", "--as-deepspeed", "--children")

# Environments


def interpreter(name: str) -> Path:
    """The Python that has the front-end; the test is skipped where none has."""
    own = Path(FRONT_ENDS, name, "bin", "python")
    if FRONT_ENDS and own.exists():
        return own
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed, and SHARDENGINE_FRONT_ENDS names no folder with an environment for it")
    return Path(sys.executable)


def environment(python: Path, **more: object) -> dict[str, str]:
    """Offline, one thread for each rank; the environment's commands come first."""
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1"}
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    given = {key: str(value) for key, value in more.items()}
    return {**os.environ, **offline, **threads, "PATH": path, "PYTHONPATH": modules, **given}


def run(folder: Path, told: dict[str, str], *command: object) -> str:
    """What the command printed; it ended well."""
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=told, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout + done.stderr


# How each starts its ranks, without it

RANK = """
import importlib.metadata, os, sys
import deepspeed
from deepspeed.utils import set_z3_leaf_modules
from deepspeed.zero import GatheredParameters
print("rank", os.environ["RANK"], importlib.metadata.version("deepspeed") == deepspeed.__version__, sys.argv[1:])
"""
BY_NAME = """
import os, subprocess, sys
command = ["torchrun", "--nnodes", "1", "--node_rank", "0", "--nproc_per_node", os.environ["NPROC_PER_NODE"]]
command += ["--master_addr", "127.0.0.1", "--master_port", os.environ["MASTER_PORT"], *sys.argv[1:]]
sys.exit(subprocess.run(command, env=dict(os.environ), check=True).returncode)
"""
BY_INTERPRETER = """
import os, subprocess, sys
command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", os.environ["NPROC_PER_NODE"]]
sys.exit(subprocess.run([*command, "--master_port", os.environ["MASTER_PORT"], *sys.argv[1:]]).returncode)
"""
BY_REPLACING_ITSELF = """
import os, sys
command = ["torchrun", "--nproc_per_node", os.environ["NPROC_PER_NODE"], "--master_port", os.environ["MASTER_PORT"]]
os.execvpe("torchrun", [*command, "-m", "rank", *sys.argv[2:]], os.environ)
"""
STARTS = {"llamafactory": BY_NAME, "swift": BY_INTERPRETER, "axolotl": BY_REPLACING_ITSELF}


@pytest.mark.parametrize("name", STARTS)
def test_ranks_that_are_started_as_the_front_end_does_find_the_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
    (tmp_path / "start.py").write_text(STARTS[name], encoding="utf-8")
    python = Path(sys.executable)
    told = environment(python, NPROC_PER_NODE=RANKS, MASTER_PORT=free_port())
    told["PYTHONPATH"] = os.pathsep.join([str(tmp_path), told["PYTHONPATH"]])
    said = run(tmp_path, told, python, *UNDER_THE_NAME, "start.py", "rank.py", "config.yaml")
    for rank in range(RANKS):
        assert f"rank {rank} True ['config.yaml']" in said


# Names

NAMES = ("llamafactory", "swift", "axolotl")


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_the_names_that_the_front_end_uses(name: str) -> None:
    python = interpreter(name)
    where = f"import importlib.util; print(importlib.util.find_spec({name!r}).origin)"
    package = Path(subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
    known = {"", "__version__", *table.MODULES, *table.PROVIDED}
    of_these = tuple(f"{each}." for each in table.PROVIDED)
    used = dict(names_used(package.parent))
    assert used
    unknown = {each for each in used if each not in known and not each.startswith(of_these)}
    assert not unknown, {each: used[each] for each in unknown}


# Toy runs

MAKE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import hf_tiny
hf_tiny.make_tokenizer().save_pretrained("llama")
hf_tiny.make_model().save_pretrained("llama")
rows = [{"instruction": row["prompt"], "input": "", "output": row["completion"]} for row in hf_tiny.questions()]
roles = [("user", "instruction"), ("assistant", "output")]
talks = [{"messages": [{"role": role, "content": row[key]} for role, key in roles]} for row in rows]
json.dump(rows, open("rows.json", "w"))
json.dump({"rows": {"file_name": "rows.json"}}, open("dataset_info.json", "w"))
json.dump(talks, open("talks.json", "w"))
"""


def llamafactory(python: Path, folder: Path, output: Path, config: Path | None) -> tuple[list[object], dict[str, str]]:
    """Its command and what it is told."""
    options: dict[str, Any] = {
        "model_name_or_path": "llama",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
    }
    options |= {"dataset_dir": ".", "dataset": "rows", "template": "empty", "cutoff_len": 128, "report_to": "none"}
    options |= {"max_steps": STEPS, "save_steps": STEPS, "logging_steps": 1, "seed": 1, "learning_rate": 1e-3}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "use_cpu": True, "fp16": False}
    options |= {"output_dir": str(output), "preprocessing_num_workers": 1}
    options |= {"deepspeed": str(config)} if config else {}
    place = folder / f"{output.name}.yaml"
    place.write_text(json.dumps(options), encoding="utf-8")  # JSON is YAML
    told = environment(python, FORCE_TORCHRUN=1, NPROC_PER_NODE=RANKS, MASTER_PORT=free_port())
    return [python.parent / "llamafactory-cli", "train", place], told


def swift(python: Path, folder: Path, output: Path, config: Path | None) -> tuple[list[object], dict[str, str]]:
    """Its command and what it is told."""
    command: list[object] = [python.parent / "swift", "sft", "--model", "llama", "--model_type", "llama"]
    command += ["--template", "chatml", "--use_hf", "true", "--dataset", "talks.json", "--split_dataset_ratio", 0]
    command += ["--torch_dtype", "float32", "--bf16", "false", "--fp16", "false", "--use_cpu", "true", "--seed", 1]
    command += ["--max_steps", STEPS, "--save_steps", STEPS, "--logging_steps", 1, "--learning_rate", 1e-3]
    command += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 1, "--report_to", "none"]
    command += ["--tuner_type", "full", "--output_dir", output, "--add_version", "false"]
    command += ["--deepspeed", config] if config else []
    own = {"NPROC_PER_NODE": RANKS, "MASTER_PORT": free_port(), "MODELSCOPE_CACHE": folder / "cache"}
    return command, environment(python, **own)


def axolotl(python: Path, folder: Path, output: Path, config: Path | None) -> tuple[list[object], dict[str, str]]:
    """Its command and what it is told. CPUs: max_memory places the model there, and accelerate's variable the ranks."""
    options: dict[str, Any] = {
        "base_model": "llama",
        "datasets": [{"path": "rows.json", "ds_type": "json", "type": "alpaca"}],
    }
    options |= {
        "dataset_prepared_path": "prepared",
        "val_set_size": 0,
        "sequence_len": 512,
        "max_memory": {"cpu": "4GiB"},
    }
    options |= {"max_steps": STEPS, "save_steps": STEPS, "logging_steps": 1, "num_epochs": 2, "seed": 1}
    options |= {"micro_batch_size": 2, "gradient_accumulation_steps": 1, "optimizer": "adamw_torch", "bf16": False}
    options |= {"lr_scheduler": "cosine", "learning_rate": 1e-3, "fp16": False, "tf32": False, "sdp_attention": True}
    options |= {"special_tokens": {"pad_token": "<pad>", "eos_token": "</s>"}, "output_dir": str(output)}
    options |= {"deepspeed": str(config)} if config else {}
    place = folder / f"{output.name}.yaml"
    place.write_text(json.dumps(options), encoding="utf-8")
    ranks = ["--nproc_per_node", RANKS, "--master_port", free_port()]
    command = [python.parent / "axolotl", "train", place, "--launcher", "torchrun", "--", *ranks]
    return command, environment(python, **({} if config else {"ACCELERATE_USE_CPU": "true"}))


COMMANDS = {"llamafactory": llamafactory, "swift": swift, "axolotl": axolotl}


def log(name: str, folder: Path, stage: int | None) -> Log:
    """Losses, norms and learning rates of its toy run. stage: None: under DDP."""
    python = interpreter(name)
    output, config = folder / f"stage-{stage}", None
    if stage is not None:
        config = folder / f"stage-{stage}.json"
        sizes = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
        said = {"zero_optimization": {"stage": stage}, **dict.fromkeys((*sizes, "gradient_clipping"), "auto")}
        config.write_text(json.dumps(said), encoding="utf-8")
    command, told = COMMANDS[name](python, folder, output, config)
    run(folder, told, python, *(UNDER_THE_NAME if config else ()), *command)
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text(encoding="utf-8"))
    kept = ("loss", "grad_norm", "learning_rate", "epoch", "step")
    return [{key: row[key] for key in kept} for row in state["log_history"] if "loss" in row]


@pytest.mark.full
@pytest.mark.parametrize("name", COMMANDS)
def test_a_front_end_logs_with_shards_what_it_logs_under_ddp(name: str, tmp_path: Path) -> None:
    python = interpreter(name)
    run(tmp_path, environment(python), python, "-c", MAKE, ROOT / "examples")
    expected = log(name, tmp_path, None)
    assert len(expected) == STEPS and expected[-1]["loss"] < expected[0]["loss"]
    assert expected[-1]["epoch"] == pytest.approx(STEPS * 2 * RANKS / 12)  # that these were two ranks
    for stage in (2, 3):
        for row, other in zip(log(name, tmp_path, stage), expected, strict=True):
            assert row == pytest.approx(other, rel=1e-4, abs=2e-6), (stage, row, other)
