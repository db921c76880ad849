"""The command line: what each command prints, and exit code 2 with the message only for wrong usage."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardengine.app import cli, environment, inspect_checkpoint
from shardengine.app.cli import main
from shardengine.comm import devices
from shardengine.config import json_schema, load_config
from tests.support import HANG_S

CONFIGS = Path(__file__).parents[2] / "configs"


def test_schema(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(json_schema()))


def config_rows(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, list[str]]:
    """key → the rest of its line."""
    assert main(["config", *options]) == 0
    return {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}


def test_resolved_prints_every_value_with_its_source(capsys: pytest.CaptureFixture[str]):
    rows = config_rows(capsys, str(CONFIGS / "demo.json"), "--resolved", "--ranks", "3")
    assert rows["zero_optimization.stage"] == ["2", "file"]
    assert rows["overlap_comm"] == ["true", "default"]
    assert rows["train_batch_size"] == ["24", "derived"]
    assert set(rows) == {key for key, _, _ in load_config(CONFIGS / "demo.json").resolve_batch(3).resolved()}


def test_without_resolved_only_what_the_file_sets_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "small.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}', encoding="utf-8")
    given = {"train_micro_batch_size_per_gpu": ["4", "file"], "zero_optimization.stage": ["2", "file"]}
    assert config_rows(capsys, str(path)) == given
    derived = {"train_batch_size": ["12", "derived"], "gradient_accumulation_steps": ["1", "derived"]}
    assert config_rows(capsys, str(path), "--ranks", "3") == given | derived
    assert main(["config", str(path)]) == 0
    assert "gradients are not clipped" in capsys.readouterr().err


def test_a_config_error_lists_all_problems_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "bad.json"
    path.write_text('{"train_batch_sice": 8, "gradient_clipping": "much"}', encoding="utf-8")
    for command in (["config", str(path)], ["train", "--config", str(path)]):
        assert main(command) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "train_batch_sice" in captured.err
        assert "train_batch_size" in captured.err  # the nearest key
        assert "gradient_clipping" in captured.err
        assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--data", "nowhere.txt"], "nothing there"),
        (["--data", "builtin:other"], "builtin:pydoc"),
        (["--model", "./nowhere"], "config.json"),
    ],
)
def test_wrong_paths_are_found_before_ranks_start(options: list[str], text: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(CONFIGS / "demo.json"), *options]) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_more_ranks_than_gpus_are_refused_before_they_start(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr("shardengine.app.command.require", lambda *packages, extra: None)
    monkeypatch.setattr(devices, "count", lambda: 2)
    assert main(["train", "--config", str(CONFIGS / "demo.json"), "--ranks", "3"]) == 2
    assert "--ranks 3: expected a GPU for each, but 2 GPU(s) are visible for 3 ranks" in capsys.readouterr().err


def test_a_batch_that_does_not_fit_the_ranks_shows_the_equation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "batch.json"
    path.write_text('{"train_batch_size": 8}', encoding="utf-8")
    assert main(["train", "--config", str(path), "--ranks", "3"]) == 2
    assert "8 != ? * 1 * 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--steps", "0"], ["--ranks", "two"], ["--steps", "-3"], ["--length", "1"], ["--unknown"]]
)
def test_wrong_options_exit_with_2(options: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--config", "x.json", *options])
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_config_without_a_file(capsys: pytest.CaptureFixture[str]):
    assert main(["config"]) == 2
    assert "--schema" in capsys.readouterr().err


def test_env_names_the_versions(capsys: pytest.CaptureFixture[str]):
    import torch

    assert main(["env"]) == 0
    rows = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["torch"].startswith(torch.__version__.split("+")[0])
    assert {"shardengine", "python", "triton", "transformers", "distributed", "CUDA", "CPU", "memory"} <= set(rows)
    assert "cores usable" in rows["CPU"] and "PYTORCH_ALLOC_CONF" in rows


@pytest.mark.parametrize(
    ("gpus", "variables", "device"),
    [
        ((), {}, "cpu (no GPU is visible), gloo between ranks; `train` starts 2 rank(s)"),
        (("a", "b"), {"LOCAL_RANK": "1"}, "cuda:1 (the launcher's local rank is 1), nccl between ranks; `train`"),
        (("a",), {"SLURM_LOCALID": "3"}, "cuda:0 (no other is visible), nccl between ranks"),
        (("a",), {"SHARDENGINE_DEVICE": "cpu"}, "cpu (asked for), gloo between ranks; `train` starts 2 rank(s)"),
        ((), {"SHARDENGINE_DEVICE": "cuda"}, "expected a GPU on every rank, but none is visible"),
        ((), {"TORCH_NCCL_BLOCKING_WAIT": "1"}, "cpu (no GPU is visible)"),
        ((), {"SHARDENGINE_KERNELS": "native", "SHARDENGINE_ISA": "scalar"}, "cpu (no GPU is visible)"),
    ],
)
def test_env_says_which_device_and_why(gpus, variables: dict[str, str], device: str, capsys, monkeypatch):
    for name in (*devices.LOCAL_RANKS, devices.WISH):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "gpus", lambda: devices.Gpus(gpus, nccl=True))
    assert main(["env"]) == 0
    rows = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["device"].startswith(device)
    assert variables.items() <= rows.items()


VARIABLE = re.compile(
    "CXX|RANK|WORLD_SIZE|(CUDA|GLOO|GROUP|LOCAL|MASTER|MPI|MV2|NCCL|OMP|OMPI|PALS|FLUX|PMI|PYTORCH|SHARDENGINE|SLURM|"
    "TORCH_NCCL|TORCHELASTIC|TRITON|XDG)_[A-Z0-9_]+"
)


def read_variables() -> set[str]:
    """Whatever the source names that looks like a variable of the environment, or is looked up there."""
    found: set[str] = set()
    for path in (Path(__file__).parents[2] / "shardengine").rglob("*.py"):
        if path.name == "environment.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            texts = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            found |= {text for text in texts if VARIABLE.fullmatch(text)}
            looked_up = ast.unparse(node) if isinstance(node, ast.Call | ast.Subscript) else ""
            found |= set(re.findall(r"^(?:os\.)?environ(?:\.get\(|\.setdefault\(|\[)'(\w+)'", looked_up))
    return found


def test_env_tells_every_variable_that_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    read = read_variables()
    assert {"SHARDENGINE_KERNELS", "SHARDENGINE_CACHE", "MASTER_ADDR", "SLURM_PROCID", "CXX", "XDG_CACHE_HOME"} <= read
    monkeypatch.setattr(environment, "_kernels", lambda: "")  # would be built where SHARDENGINE_CACHE says
    for name in environment.PRIVATE:
        monkeypatch.setenv(name, str(tmp_path / "a name"))
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    rows = dict(line.split(": ", 1) for line in text.splitlines())
    assert all(rows[name] == "set" for name in environment.PRIVATE) and "a name" not in text
    told = {*environment.ALWAYS, *environment.WHERE_SET, *environment.PRIVATE}
    assert not {name for name in read - told if not name.startswith("TORCH_NCCL_")}


@pytest.mark.parametrize("command", [["config", "GOOD"], ["train", "--config", "BAD"], ["train", "--help"]])
def test_what_needs_no_torch_does_not_import_it(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"train_batch_sice": 8}', encoding="utf-8")
    files = {"GOOD": str(CONFIGS / "demo.json"), "BAD": str(tmp_path / "bad.json")}
    code = (
        "import atexit, sys; from shardengine.app.cli import main; "
        "atexit.register(lambda: print([*{'torch', 'transformers', 'matplotlib', 'numpy'} & {*sys.modules}])); "
        "main(sys.argv[1:])"
    )
    arguments = [files.get(word, word) for word in command]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=root, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_one_process_of_a_launcher_prints_what_is_wrong_with_a_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.json").write_text('{"train_batch_sice": 8}', encoding="utf-8")
    monkeypatch.setattr(cli, "OTHERS_WAIT_S", 0.0)
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main(["train", "--config", str(tmp_path / "bad.json")]) == 2
        assert ("train_batch_sice" in capsys.readouterr().err) == (rank == "0")


def test_a_reader_that_has_gone_is_no_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """`shardengine config --schema | head`: no traceback, also when the interpreter ends."""
    for command in (["config", "--schema"], ["config", str(CONFIGS / "demo.json")]):  # more than a buffer, and less
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "w", encoding="utf-8") as gone:
            monkeypatch.setattr(sys, "stdout", gone)
            assert main(command) == 141
            gone.flush()
    assert "Errno" not in capsys.readouterr().err


def test_what_the_system_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert main(["inspect", "y" * 300]) == 2
    assert "File name too long" in capsys.readouterr().err

    def refused(_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "that/file")

    monkeypatch.setattr(inspect_checkpoint, "run", refused)
    assert main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "shardengine inspect: [Errno 13] Permission denied: 'that/file'\n"
