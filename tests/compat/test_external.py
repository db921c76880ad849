"""Programs of others, unmodified: they log with shards what they log under DDP, and their own tests pass.

Checkouts are found in the folder that SHARDENGINE_CLIENTS names: accelerate, DeepSpeedExamples, and transformers for
its examples. What they import beside transformers (evaluate, parameterized, nltk, fire, ...) has to be installed, or
lie in PYTHONPATH. Without one of them a test is skipped. Every program runs in processes of its own, offline, with
inputs made on the spot.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import HANG_S
from tests.support.program_runs import Log, free_port

CLIENTS = os.environ.get("SHARDENGINE_CLIENTS", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not CLIENTS, reason="SHARDENGINE_CLIENTS names no folder of checkouts"),
]
ROOT = Path(__file__).parents[2]
RANKS, STEPS = 2, 4
TIMES = ("runtime", "per_second", "preparation_time", "step_time", "time")
TRAINING = (
    *("--max_steps", STEPS, "--save_steps", STEPS, "--logging_steps", 1, "--report_to", "none", "--use_cpu"),
    *("--per_device_train_batch_size", 2, "--learning_rate", 1e-3, "--seed", 1),
)


def environment(folder: Path, modules: Path | None) -> dict[str, str]:
    """Offline, one thread for each rank; modules: a folder of those that take the place of what the program imports."""
    path = os.pathsep.join(filter(None, [str(modules or ""), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    places = {"PYTHONPATH": path, "NLTK_DATA": str(folder / "nltk_data")}
    return {**os.environ, **offline, **places, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(folder: Path, *command: object, modules: Path | None = None, may_hang: bool = False) -> str:
    """What the command printed; it ended well.

    may_hang: at its end, when all is done. In torch 2.13 the destructor of DDP's reducer joins a thread of gloo's while
    it has Python's lock, and that thread may want it.
    """
    given = [sys.executable, *map(str, command)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(given, cwd=folder, env=environment(folder, modules), **pipes)
    hung = False
    try:
        printed, errors = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        hung = True
        process.terminate()  # a launcher ends its ranks then
        printed, errors = process.communicate()
    assert process.returncode == 0 or (hung and may_hang), f"hung: {hung}\n{printed[-3000:]}\n{errors[-6000:]}"
    return printed + errors


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data sets."""
    folder = tmp_path_factory.mktemp("inputs")
    run(folder, "-m", "tests.compat.external_inputs")
    return folder


def client(*parts: str, needs: tuple[str, ...] = ()) -> Path:
    """A file or folder of a checkout; the test is skipped where it, or a module that it needs, is missing."""
    place = Path(CLIENTS, *parts)
    if not place.exists():
        pytest.skip(f"there is no {place}")
    for name in needs:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    return place


def launch() -> list[object]:
    return ["-m", "torch.distributed.run", "--nproc_per_node", RANKS, "--master_port", free_port()]


DEEPSPEED = ("-m", "shardengine.run", "--as-deepspeed")


def log(inputs: Path, name: str, stage: int | None, *program: object) -> Log:
    """Of a Trainer in a program: a file, or "-m" and a module, and its options. stage: None: under DDP."""
    output = inputs / f"{name}-{stage}"
    launcher = launch()
    options: list[object] = ["--output_dir", output]
    if stage is not None:
        launcher += DEEPSPEED
        config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"}
        config |= {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
        place = inputs / f"stage-{stage}.json"
        place.write_text(json.dumps(config), encoding="utf-8")
        options += ["--deepspeed", place]
    run(inputs, *launcher, *program, *TRAINING, *options, may_hang=stage is None)
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text(encoding="utf-8"))
    return [
        {key: value for key, value in row.items() if not key.endswith(TIMES)}
        for row in state["log_history"]
        if "loss" in row
    ]


def assert_same(found: Log, expected: Log) -> None:
    """Within fp32's rounding."""
    assert len(found) == len(expected) == STEPS
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5), (row, other)


# trl's scripts, which are installed with it

SCRIPTS: dict[str, tuple[object, ...]] = {
    "sft": ("llama", "sft"),
    "sft --use_peft": ("llama", "sft", "--use_peft", "--lora_r", 4, "--lora_target_modules", "q_proj", "v_proj"),
    "dpo": ("llama", "preference"),
    "kto": ("llama", "kto"),
    "reward": ("reward", "preference"),
    "grpo": ("llama", "prompts", "--num_generations", 2, "--max_completion_length", 8, "--reward_model", "reward"),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_trl_logs_what_it_logs_under_ddp(name: str, stage: int, inputs: Path) -> None:
    if find_spec("trl") is None:
        pytest.skip("trl is not installed")
    model, rows, *more = SCRIPTS[name]
    given = ("-m", f"trl.scripts.{name.split()[0]}", "--model_name_or_path", model, "--dataset_name", rows, *more)
    given = (*given, "--bf16", "False", "--dtype", "float32")
    assert_same(log(inputs, name, stage, *given), log(inputs, name, None, *given))


# transformers' examples

EXAMPLES: dict[str, tuple[object, ...]] = {
    "language-modeling/run_clm.py": (
        *("--model_name_or_path", "llama", "--train_file", "text.txt", "--validation_file", "text.txt"),
        *("--do_train", "--do_eval", "--block_size", 64),
    ),
    "text-classification/run_glue.py": (
        *("--model_name_or_path", "bert", "--train_file", "labels.json", "--validation_file", "labels.json"),
        *("--do_train", "--do_eval", "--max_seq_length", 32),
    ),
    "summarization/run_summarization.py": (
        *("--model_name_or_path", "t5", "--train_file", "summaries.json", "--do_train"),
        *("--text_column", "text", "--summary_column", "summary"),
    ),
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_transformers_logs_what_it_logs_under_ddp(name: str, stage: int, inputs: Path) -> None:
    needs = ("evaluate", "nltk", "filelock") if "summarization" in name else ("evaluate", "sklearn")
    program = client("transformers", "examples", "pytorch", name, needs=needs)
    given = (program, *EXAMPLES[name])
    assert_same(log(inputs, Path(name).stem, stage, *given), log(inputs, Path(name).stem, None, *given))


# DeepSpeed's examples


def test_cifar_has_the_same_losses_at_every_stage(inputs: Path) -> None:
    program = client("DeepSpeedExamples", "training", "cifar", "cifar10_deepspeed.py")
    options = ("--dtype", "fp32", "--epochs", 20, "--log-interval", 10, "--deepspeed", "--stage")
    losses = {}
    for stage in range(4):
        printed = run(inputs, *launch(), *DEEPSPEED, program, *options, stage, modules=inputs / "with torchvision")
        losses[stage] = re.findall(r"\] loss: +([\d.]+)", printed)
        assert "Accuracy of the network on the 160 test images" in printed
    assert len(losses[0]) == 20
    assert float(losses[0][-1]) < float(losses[0][0])
    assert losses[0] == losses[1] == losses[2] == losses[3]


def test_hello_deepspeed_trains_saves_and_resumes(inputs: Path) -> None:
    needs = ("fire", "sh", "loguru", "tensorboard")
    program = client("DeepSpeedExamples", "training", "HelloDeepSpeed", "train_bert_ds.py", needs=needs)
    shape = ("--h_dim", 32, "--num_heads", 2, "--ff_dim", 64, "--num_layers", 2, "--max_seq_length", 64)
    options = (program, *shape, "--log_every", 1)
    kept, modules = inputs / "hello", inputs / "with pytz"
    run(inputs, *launch(), *DEEPSPEED, *options, "--num_iterations", 6, "--checkpoint_dir", kept, modules=modules)
    (made,) = kept.iterdir()
    assert (made / "latest").read_text(encoding="utf-8").strip() == "global_step5"
    resumed = (*options, "--num_iterations", 10, "--load_checkpoint_dir", made)
    again = run(inputs, *launch(), *DEEPSPEED, *resumed, modules=modules)
    assert (made / "latest").read_text(encoding="utf-8").strip() == "global_step8"
    assert len(re.findall(r"Loss: [\d.]+", again)) == 3


# accelerate's example for DeepSpeed, and its own tests


def test_accelerates_example_logs_the_same_with_each_of_its_templates(inputs: Path) -> None:
    """Stages 1, 2, 3, two of them on CPU memory; in fp32, since the loss is compared."""
    program = client("accelerate", "examples", "by_feature", "deepspeed_with_config_support.py")
    templates = client("accelerate", "examples", "deepspeed_config_templates")
    given = (
        *("--train_file", "text.txt", "--validation_file", "text.txt", "--model_name_or_path", "llama"),
        *("--block_size", "64", "--seed", "1", "--learning_rate", "1e-3", "--num_train_epochs", "2"),
    )
    printed = set()
    for template in sorted(templates.glob("*.json")):
        config = json.loads(template.read_text(encoding="utf-8"))
        config["fp16"] = {"enabled": False}
        if config["zero_optimization"]["stage"] == 3:  # accelerate wants it said for the save at the end
            config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        place = inputs / template.name
        place.write_text(json.dumps(config), encoding="utf-8")
        started = {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(place),
        }
        output = ("--output_dir", inputs / template.stem)
        with pytest.MonkeyPatch.context() as patched:
            for key, value in started.items():
                patched.setenv(key, value)
            said = run(inputs, *launch(), *DEEPSPEED, program, *given, *output)
        printed.add(tuple(re.findall(r"eval_loss: ([\d.]+)", said)))
    (losses,) = printed
    assert len(losses) == 3


BY_FEATURE = {
    "nlp_example.py": (),
    "complete_nlp_example.py": ("--checkpointing_steps", "epoch", "--with_tracking"),
    "by_feature/automatic_gradient_accumulation.py": (),
    "by_feature/checkpointing.py": ("--checkpointing_steps", "epoch"),
    "by_feature/cross_validation.py": ("--num_folds", 2),
    "by_feature/early_stopping.py": (),
    "by_feature/gradient_accumulation.py": ("--gradient_accumulation_steps", 3),
    "by_feature/memory.py": (),
    "by_feature/multi_process_metrics.py": (),
    "by_feature/tracking.py": ("--with_tracking",),
}


@pytest.mark.parametrize("name", BY_FEATURE)
def test_an_example_of_accelerate_prints_what_it_prints_under_ddp(name: str, inputs: Path) -> None:
    program = client("accelerate", "examples", name, needs=("evaluate", "sklearn"))
    config = {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto"}
    config |= {"train_micro_batch_size_per_gpu": "auto"}
    place = inputs / "for accelerate.json"
    place.write_text(json.dumps(config), encoding="utf-8")
    sharded = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(place)}
    printed = []
    for door, variables in ((), {}), (DEEPSPEED, sharded):
        with pytest.MonkeyPatch.context() as patched:
            for key, value in {"ACCELERATE_USE_CPU": "true", **variables}.items():
                patched.setenv(key, value)
            said = run(inputs, *launch(), *door, program, *BY_FEATURE[name])
        printed.append(re.findall(r"^(?:epoch \d+:|Average).*", said, re.MULTILINE))
    assert len(printed[0]) > 0 and printed[0] == printed[1]


def test_accelerate_passes_its_own_tests_of_deepspeed(inputs: Path) -> None:
    """Those that need neither the network nor several GPUs."""
    place = client("accelerate", "tests", "deepspeed", needs=("parameterized",))
    files = ["test_deepspeed.py", "test_deepspeed_multiple_model.py", "test_deepspeed_gradient_accumulation.py"]
    options: tuple[object, ...] = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.compat.accelerate_on_cpu",
        "--rootdir",
        place,
    )
    options = (*options, "-k", "not test_basic_run")  # it starts processes, which do not answer the name
    printed = run(inputs, "-m", "pytest", *options, *(place / file for file in files))
    found = re.search(r"(\d+) passed", printed)
    assert found and int(found[1]) >= 31, printed[-2000:]
