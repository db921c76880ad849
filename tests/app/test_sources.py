"""Where a config is from: recipes by name, --set, --lr and --epochs; recipes fit by plan; init writes one that does."""

from __future__ import annotations

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from shardengine.app import init, sources
from shardengine.app.cli import main
from shardengine.app.settings import Settings
from shardengine.config import load_config
from shardengine.errors import ConfigError, UsageError
from tests.support import hub_models
from tests.support.raising import raises

RECIPES = {name: path for name, path in sources.recipes().items() if name != "demo"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}', encoding="utf-8")
    return path


def test_a_recipe_is_found_by_name_and_a_file_by_path(file: Path) -> None:
    assert sources.find("demo").name == "demo.json" and sources.find(str(file)) == file
    with raises("config-not-found", "lora-4x25", "lora-4x24"):
        sources.find("lora-4x25")
    assert sources.find("missing.json") == Path("missing.json")  # whoever reads it says so


def test_changes_are_json_or_texts_and_leave_the_rest(file: Path) -> None:
    assert sources.changed(file, ()) == file
    changes = ["zero_optimization.stage=3", "bf16.enabled=true", "optimizer.type=SGD", 'optimizer.params={"lr": 0.5}']
    config = load_config(sources.changed(file, changes))
    assert config.zero_optimization.stage == 3 and config.bf16.enabled and config.train_micro_batch_size_per_gpu == 2
    assert config.optimizer is not None and config.optimizer.type == "SGD" and config.optimizer.params["lr"] == 0.5


def test_lr_goes_into_the_optimizer_that_a_run_has(file: Path) -> None:
    config = load_config(sources.changed(file, sources.changes_of(None, 3e-4)))
    assert config.optimizer is not None and config.optimizer.type == "AdamW"
    assert {**config.optimizer.params, **sources.DEFAULT_OPTIMIZER.params, "lr": 3e-4} == config.optimizer.params


def test_log_switches_monitors_on_which_write_into_the_folder_of_the_run(file: Path, tmp_path: Path) -> None:
    changes = (*sources.monitors(["csv, wandb", "jsonl"]), f'monitor.jsonl.output_path="{tmp_path}"')
    config = sources.in_folder(load_config(sources.changed(file, changes)), tmp_path / "run")
    monitor = config.monitor
    assert monitor.csv.enabled and monitor.jsonl.enabled and monitor.wandb.enabled and not monitor.tensorboard.enabled
    assert (monitor.csv.output_path, monitor.jsonl.output_path) == (str(tmp_path / "run"), str(tmp_path))
    with raises("train-log-unknown", "tensorbord", "tensorboard"):
        sources.monitors(["csv", "tensorbord"])


def test_a_section_is_changed_by_the_name_that_the_file_has_for_it(file: Path) -> None:
    file.write_text('{"train_micro_batch_size_per_gpu": 2, "wandb": {"enabled": false, "project": "p"}}', "utf-8")
    config = load_config(sources.changed(file, [*sources.monitors(["wandb"]), "monitor.wandb.team=us"]))
    assert config.monitor.wandb.enabled and (config.monitor.wandb.project, config.monitor.wandb.team) == ("p", "us")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("zero_optimization", "--set zero_optimization: expected KEY=VALUE"),
        ("=3", "--set =3: expected KEY=VALUE"),
        ("a..b=3", "expected KEY=VALUE"),
        ("train_micro_batch_size_per_gpu.x=3", "expected train_micro_batch_size_per_gpu to be an object in the config"),
    ],
)
def test_what_cannot_be_changed(file: Path, change: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        sources.changed(file, [change])


def test_a_wrong_key_is_named_with_the_file_and_the_change(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(sources.changed(file, ["zero_optimization.stag=3"]))
    assert str(caught.value).startswith(f"{file} with --set zero_optimization.stag=3: 1 problem")
    assert 'the nearest valid key is "zero_optimization.stage"' in str(caught.value)


def test_a_peak_that_is_left_to_the_optimizer_leaves_its_rate(file: Path) -> None:
    tree = json.loads(file.read_text(encoding="utf-8"))
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": None}}
    file.write_text(json.dumps({**tree, "scheduler": scheduler}), encoding="utf-8")
    assert load_config(sources.changed(file, sources.changes_of(None, 0.5))).optimizer is not None


def test_a_rate_that_a_scheduler_would_overwrite_is_refused(file: Path) -> None:
    tree = json.loads(file.read_text(encoding="utf-8"))
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}
    file.write_text(json.dumps({**tree, "scheduler": scheduler}), encoding="utf-8")
    with raises("config-lr-set-by-scheduler", "scheduler.params.warmup_max_lr", "0.5"):
        sources.changed(file, sources.changes_of(None, 0.5))


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 4), (3.0, 11), (0.5, 2), (0.01, 1), (None, 7)])
def test_epochs_are_steps_of_the_data(epochs: float | None, steps: int) -> None:
    settings = Settings(Path("c"), None, "d", 7, Path(), Path(), planned_steps=7, epochs=epochs).with_steps(14, 4)
    assert (settings.steps, settings.planned_steps) == (steps, steps)


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_what_it_is_named_after(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    tree = json.loads(RECIPES[name].read_text(encoding="utf-8"))
    command, train = shlex.split(tree["_plan"]), shlex.split(tree["_train"])
    given = {word: value for word, value in pairwise(command) if word.startswith("--")}
    assert given["--config"] == name and given["--gpus"] == f"{name.split('-')[1]}GB"
    assert ("--lora" in given) == (not name.startswith("full"))
    if (packed := "bits=4" in given.get("--lora", "")) or name.startswith("qlora"):
        assert packed and name.startswith("qlora")
        pytest.importorskip("bitsandbytes")
    for option in ("--config", "--model", "--length", "--lora"):
        assert (option in given) == (option in train)
        assert option not in given or train[train.index(option) + 1] == given[option]
    command[command.index("--model") + 1] = hub_models.folder_of(given["--model"], tmp_path)
    assert main(command[1:]) == 0, capsys.readouterr().out
    assert "GPU: fits, " in capsys.readouterr().out
    assert load_config(RECIPES[name]).notices == ()


def test_init_writes_a_config_that_fits_with_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    model = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2,
             "vocab_size": 500, "n_positions": 64}  # fmt: skip
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text(json.dumps(model), encoding="utf-8")
    (tmp_path / "gpt").rename(tmp_path / "my gpt")
    command = ["init", "--model", "my gpt", "--method", "full", "--length", "32"]
    assert main(command) == 2
    assert "expected --gpus: GPUs, as 4x24GB" in capsys.readouterr().err  # nobody is there to be asked
    command += ["--gpus", "2x2 GB"]
    assert main([*command, "--output", "no/where.json"]) == 2
    assert "expected the name of a new file in a directory that is there" in capsys.readouterr().err
    assert main(command) == 0
    said = capsys.readouterr().out
    tree = json.loads(Path("my-full-2x2.json").read_text(encoding="utf-8"))
    assert tree["_train"] in said and tree["train_batch_size"] == 16
    assert load_config("my-full-2x2.json").resolve_batch(2).train_batch_size == 16
    assert main(shlex.split(tree["_plan"])[1:]) == 0
    assert main(command) == 2
    assert "my-full-2x2.json: expected the name of a new file" in capsys.readouterr().err


def test_init_asks_at_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def answer(text: str) -> str:
        asked.append(text)
        return "" if asked[1:] else "somewhere/far/away"

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", answer)
    assert main(["init", "--gpus", "4x24GB"]) == 2
    assert [text.split()[0] for text in asked] == ["model", "method", "tokens"]
    assert "--model somewhere/far/away: expected a Hugging Face model" in capsys.readouterr().err


def test_init_has_a_remark_for_what_people_change() -> None:
    found = init._with_remarks(init.base_config("lora", 4, nvme=True))
    names = list(found)
    assert names.index("_optimizer") == names.index("optimizer") - 1
