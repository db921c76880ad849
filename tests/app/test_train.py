"""`shardengine train`: its parts one by one, then the whole command on a tiny model and a tiny corpus."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardengine
from shardengine.app import corpus, data, evaluation, loop, planning, reading, report, settings, stopping
from shardengine.app.cli import main
from shardengine.app.rank_sums import RankSums
from shardengine.comm import RankFailure, mesh
from shardengine.errors import ConfigError, UsageError
from shardengine.loading import is_in_slices
from shardengine.planner import show_bytes
from tests.support import HANG_S
from tests.support.raising import raises

ROOT = Path(__file__).parents[2]
# losses of about 5 in fp32, from matrix products of other sizes and summed in another order: some 30 roundings
CLOSE = 2e-5
CORPUS = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 250


# Corpus and data


def numbered(count: int, length: int) -> data.Rows:
    """Rows whose tokens are all the row's number."""
    tokens = torch.arange(count).unsqueeze(1).expand(count, length)
    return data.Rows(tokens, tokens)


def test_the_split_is_contiguous_and_loses_nothing():
    text = corpus.read_text(settings.BUILTIN)
    training, validation = corpus.split(text)
    assert training + validation == text
    assert training.endswith("\n")
    assert 0.04 < len(validation) / len(text) < 0.07
    assert corpus.split("x" * 100) == ("x" * 95, "x" * 5)  # no line end to cut at


def test_pack_leaves_out_what_does_not_fill_a_block():
    assert reading.pack(list(range(11)), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert reading.pack([1, 2], 4).shape == (0, 4)


def test_too_little_text_is_an_error_that_names_the_part(tmp_path: Path):
    path = tmp_path / "short.txt"
    path.write_text("word " * 40, encoding="utf-8")
    with raises("data-too-short", "validation part", "one block of 32"):
        reading.load_blocks(str(path), lambda text: list(text.encode()), 32)


@pytest.mark.parametrize(("count", "ranks", "micro"), [(7, 3, 2), (12, 2, 4), (1, 4, 2), (9, 1, 4)])
def test_validation_counts_each_block_once_with_equally_many_forwards(count: int, ranks: int, micro: int):
    blocks = numbered(count, 5)
    seen, forwards = [], set()
    for rank in range(ranks):
        batches = list(evaluation.validation_batches(blocks, micro, rank, ranks))
        forwards.add(len(batches))
        for batch, counted in batches:
            assert len(batch["input_ids"]) > 0
            if counted:
                assert counted == len(batch["input_ids"]) * 4
                seen += batch["input_ids"][:, 0].tolist()
    assert sorted(seen) == list(range(count))
    assert len(forwards) == 1


def test_training_batches_cut_each_epoch_over_the_ranks():
    blocks = numbered(12, 3)

    def epochs(seed: int) -> list[list[int]]:
        streams = [data.training_batches(blocks, 2, rank, 2, seed) for rank in range(2)]
        return [
            [int(row) for stream in streams for _ in range(3) for row in next(stream)["labels"][:, 0]] for _ in "ab"
        ]

    first, second = epochs(1)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second  # shuffled anew
    assert epochs(1) == [first, second]
    assert epochs(2)[0] != first


@pytest.mark.parametrize("start", [0, 1, 2, 3, 7])
def test_training_batches_start_where_an_earlier_run_ended(start: int):
    blocks = numbered(13, 3)
    whole = data.training_batches(blocks, 2, 1, 2, 5)
    for _ in range(start):
        next(whole)
    later = data.training_batches(blocks, 2, 1, 2, 5, start * 4)
    for _ in range(5):
        assert torch.equal(next(whole)["labels"], next(later)["labels"])


def test_a_corpus_smaller_than_one_step_is_repeated():
    streams = [data.training_batches(numbered(3, 3), 3, rank, 2, 0) for rank in range(2)]
    assert sorted(int(row) for stream in streams for row in next(stream)["labels"][:, 0]) == [0, 0, 1, 1, 2, 2]


def test_the_default_model_is_built_once_and_is_an_ordinary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers")
    recipe = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    monkeypatch.setattr(corpus, "_RECIPE", recipe)
    monkeypatch.setattr(corpus, "read_text", lambda name: CORPUS)
    before = torch.get_rng_state()
    directory = corpus.default_model(tmp_path / "cache")
    assert torch.equal(before, torch.get_rng_state())
    made = (directory / "model.safetensors").stat().st_mtime_ns
    assert corpus.default_model(tmp_path / "cache") == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [directory.name]  # nothing half-built is left
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert model.lm_head.weight is model.transformer.wte.weight
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode(tokenizer("The quick döner")["input_ids"]) == "The quick döner"
    monkeypatch.setattr(corpus, "_RECIPE", {**recipe, "n_embd": 32})
    assert corpus.default_model(tmp_path / "cache") != directory
    (tmp_path / "file").touch()
    with raises("train-model-cache-unwritable"):
        corpus.default_model(tmp_path / "file")


# Settings


def test_outputs_are_never_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = Path("some/zero2.json")
    taken = [settings.reserve_output(None, config) for _ in range(3)]
    assert taken == [Path("runs/zero2"), Path("runs/zero2-2"), Path("runs/zero2-3")]
    asked = settings.reserve_output("mine", config)
    assert settings.reserve_output("mine", config) == asked  # new or empty
    (asked / "metrics.jsonl").touch()
    with raises("output-not-empty"):
        settings.reserve_output("mine", config)
    with raises("output-not-made"):
        settings.reserve_output(str(asked / "metrics.jsonl" / "below"), config)


def test_data_must_be_text(tmp_path: Path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with raises("data-not-utf8", "byte 3"):
        settings.check_data(str(tmp_path / "latin.txt"))
    (tmp_path / "good.txt").write_text("café", encoding="utf-8")
    settings.check_data(str(tmp_path / "good.txt"))
    settings.check_data(settings.BUILTIN)


def test_a_missing_package_names_its_extra():
    with raises("package-not-installed", "hf"):
        settings.require("torch", "no_such_package_here", extra="hf")
    settings.require("torch", extra="hf")


# Loop and report


def test_vectors_are_not_decayed():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    model[2].weight.requires_grad_(False)
    matrices, vectors = loop.decay_groups(model)
    assert [tuple(p.shape) for p in matrices["params"]] == [(4, 3)]
    assert "weight_decay" not in matrices
    assert [tuple(p.shape) for p in vectors["params"]] == [(4,), (4,), (4,)]
    assert vectors["weight_decay"] == 0.0
    assert len(loop.decay_groups(nn.Linear(2, 2, bias=False))) == 1


def test_warmup_then_cosine():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = loop.warmup_cosine(optimizer, 100)
    rates = []
    for _ in range(101):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[10] == pytest.approx(2.0)
    assert rates[55] == pytest.approx(2.0 * 0.55)
    assert rates[100] == pytest.approx(0.2)


def test_sums_at_one_rank():
    rank_sums = RankSums(mesh.build(torch.device("cpu")))
    assert rank_sums.sums([1.5, 2.0]) == [1.5, 2.0]
    assert rank_sums.from_first("here") == "here"


def test_sizes_and_durations_for_people():
    assert [show_bytes(n) for n in (0, 999, 1000, 42_400_000, 5e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "42.4 MB",
        "5000.0 TB",
    ]
    assert [report.duration(s) for s in (0, 59.6, 112, 7290)] == ["0:00", "1:00", "1:52", "2:01:30"]


# Stopping


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_or_the_parents_file_asks_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers):
    monkeypatch.setenv(stopping.CONTROL, str(tmp_path))
    assert not stopping.StopRequest()
    stop = stopping.StopRequest()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop
    stop = stopping.StopRequest()
    assert not stop
    (tmp_path / "stop").touch()
    assert stop


def test_the_earliest_failure_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert not stopping.failures(tmp_path)
    monkeypatch.setenv(stopping.CONTROL, str(tmp_path))
    for rank, error in ((2, ValueError("the cause")), (0, RuntimeError("peer lost")), (1, ConfigError("also"))):
        monkeypatch.setenv("RANK", str(rank))
        try:
            raise error
        except Exception as caught:
            stopping.report_failure(caught)
    first = RankFailure.first(stopping.failures(tmp_path))
    assert first is not None
    assert (first.rank, first.is_usage) == (2, False)
    assert "the cause" in first.text
    assert "Traceback" in first.text


# The whole command


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model, a tiny corpus and a stage-3 config with two micro-batches."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text(CORPUS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            corpus, "_RECIPE", {"vocab_size": 300, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
        )
        patch.setattr(corpus, "read_text", lambda name: CORPUS)
        corpus.default_model(folder).rename(folder / "model")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "zero_optimization": {"stage": 3},
        "steps_per_print": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def start(tiny: Path, *options: object, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the command from the source tree."""
    command = ["train", "--config", tiny / "config.json", "--model", tiny / "model", *options]
    path = os.pathsep.join([*filter(None, [(environment or {}).get("PYTHONPATH")]), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-m", "shardengine", *map(str, command)],
        env={**os.environ, **(environment or {}), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def validation_loss(directory: Path, text: Path) -> float:
    """The loss of a saved model, by transformers alone: no engine, one process, all validation blocks in one batch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    blocks = reading.load_blocks(str(text), lambda part: tokenizer(part)["input_ids"], 32).validation
    with torch.no_grad():
        return float(AutoModelForCausalLM.from_pretrained(directory).eval()(**blocks.batch(slice(None))).loss)


def test_train_end_to_end(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "run"
    traced = tmp_path / "trace.json"
    process = start(
        tiny, "--data", tiny / "text.txt", "--ranks", 2, "--steps", 6, "--output", output, "--trace", traced
    )  # fmt: skip
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    assert "Traceback" not in err

    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "loss" in row]
    validations = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(row["grad_norm"] > 0 and row["lr"] > 0 and row["tokens_per_s"] > 0 for row in steps)
    assert validations[6] < validations[0] - 0.3
    assert validations[0] == pytest.approx(validation_loss(tiny / "model", tiny / "text.txt"), abs=CLOSE)
    assert validations[6] == pytest.approx(validation_loss(output / "model", tiny / "text.txt"), abs=CLOSE)

    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    resolved = json.loads((output / "shardengine.json").read_text(encoding="utf-8"))
    assert resolved["train_batch_size"] == 16
    assert (output / "model" / "model.safetensors").is_file()
    for words in (
        "stage:       3",
        "2 on",
        "per rank, predicted",
        "finished at: step 6 of 6",
        "lower bound",
        "sample after",
    ):
        assert words in out
    assert re.search(r"\nplan: +memory [\d.]+ [kM]B of [\d.]+ GB at most per rank\n", out), out
    plan = re.search(
        r"\nplan: +([\d.]+) ([kM]B) planned, ([\d.]+) \2 measured at most \(.*%\) on rank 0, in step 6\n", out
    )
    assert plan is not None, out
    assert float(plan[3]) == pytest.approx(float(plan[1]), rel=0.1)  # a bucket is a part of so small a run
    waited = re.search(r"waiting: +([\d.]+) ms of a step \(([\d.]+)%\) for communication", out)
    assert waited is not None, out
    milliseconds, percent = map(float, waited.groups())
    per_step = sum(16 * 32 / row["tokens_per_s"] for row in steps) / len(steps) * 1e3
    assert 0 < milliseconds < per_step
    # either was rounded to one digit
    assert milliseconds == pytest.approx(per_step * percent / 100, abs=0.051 + per_step * 0.0005)
    assert "step     2/6  loss" in out
    events = [event for event in json.loads(traced.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [sum(e["name"] == "step" and e["pid"] == rank for e in events) for rank in (0, 1)] == [
        12,
        12,
    ]  # two micro-batches a step

    again = ["--config", tiny / "config.json", "--model", tiny / "model", "--data", tiny / "text.txt"]
    assert main(["train", *map(str, again), "--output", str(output)]) == 2
    assert "never overwrites" in capsys.readouterr().err


@pytest.fixture
def alone(tiny: Path, tmp_path: Path, handlers: None) -> Callable[..., Path]:
    """``alone(name, plan=…, config=…)``: one rank trains in this process; where it has written to."""

    def train(name: str, config: Path = tiny / "config.json", **more: Any) -> Path:
        output = tmp_path / name
        output.mkdir()
        chosen = settings.Settings(
            config, str(tiny / "model"), str(tiny / "text.txt"), 3, output, tmp_path, 32, planned_steps=3,
            **more,
        )  # fmt: skip
        rank_sums = RankSums(mesh.build(torch.device("cpu")))
        loop.train(chosen, chosen.read_config(1), rank_sums)
        return output

    return train


def test_a_plan_changes_no_bit_and_may_be_left_out(
    alone: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with_plan = alone("with")
    assert re.findall(r"^plan: .*", said := capsys.readouterr().out, re.MULTILINE), said
    assert re.search(
        r"^plan: +(\S+ \S+) planned, \1 measured at most \(\+0.\d%\) on rank 0, in step 3$", said, re.MULTILINE
    )
    assert "exceeded" not in said
    without = alone("without", plan=False)
    assert not re.findall(r"^plan: .*", capsys.readouterr().out, re.MULTILINE)
    files = [(path / "model" / "model.safetensors").read_bytes() for path in (with_plan, without)]
    assert files[0] == files[1]
    losses = [re.findall(r'"loss": ([^,]+)', (path / "metrics.jsonl").read_text()) for path in (with_plan, without)]
    assert losses[0] == losses[1] and len(losses[0]) == 3


def test_no_rank_holds_the_model_while_it_is_loaded(tiny: Path, tmp_path: Path) -> None:
    """But where its files cannot be read in slices. Random weights are drawn in slices as well."""
    transformers = pytest.importorskip("transformers")
    chosen = settings.Settings(tiny / "config.json", str(tiny / "model"), str(tiny / "text.txt"), 1, tmp_path, tmp_path)
    for init in (settings.FROM_WEIGHTS, settings.FROM_CONFIG):
        _, model = loop.load_model(dataclasses.replace(chosen, init=init), 1)
        assert is_in_slices(model)
        with pytest.raises(RuntimeError):
            model.lm_head.weight.sum().item()
    whole = transformers.AutoModelForCausalLM.from_pretrained(tiny / "model")
    shutil.copytree(tiny / "model", tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").unlink()
    torch.save(whole.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    _, model = loop.load_model(dataclasses.replace(chosen, model=str(tmp_path / "old")), 1)
    assert not is_in_slices(model) and torch.equal(model.lm_head.weight, whole.lm_head.weight)


@pytest.mark.parametrize("init", [settings.FROM_WEIGHTS, settings.FROM_CONFIG])
def test_slices_have_the_bits_of_the_whole_model(
    init: str, alone: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_slices = alone("in_slices", init=init)
    monkeypatch.setattr(shardengine, "meta_init", contextlib.nullcontext)
    whole = alone("whole", init=init)
    files = [(path / "model" / "model.safetensors").read_bytes() for path in (in_slices, whole)]
    assert files[0] == files[1]


def test_rows_beyond_the_models_positions_are_refused(tiny: Path, tmp_path: Path) -> None:
    chosen = settings.Settings(tiny / "config.json", str(tiny / "model"), str(tiny / "text.txt"), 1, tmp_path, tmp_path)
    tokenizer, model = loop.load_model(chosen, 1)
    assert loop.load_data(chosen, tokenizer, model).length == 32  # nobody has asked for more
    with raises("length-beyond-positions", "length 33", "GPT2LMHeadModel", "has 32"):
        loop.load_data(dataclasses.replace(chosen, length=33), tokenizer, model)


def test_what_is_auto_is_decided_before_the_engine_is_made(
    alone: Callable[..., Path], tiny: Path, tmp_path: Path
) -> None:
    tree = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    auto = {**tree, "zero_optimization": {"stage": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    del auto["gradient_accumulation_steps"]
    (tmp_path / "auto.json").write_text(json.dumps({**auto, "train_batch_size": 8}), encoding="utf-8")
    decided = alone("decided", config=tmp_path / "auto.json")
    found = json.loads((decided / "shardengine.json").read_text(encoding="utf-8"))
    assert found["train_batch_size"] == 8 and found["train_micro_batch_size_per_gpu"] in (1, 2, 4, 8)
    said = alone("said", config=decided / "shardengine.json")
    one, other = ((path / "model" / "model.safetensors").read_bytes() for path in (decided, said))
    assert one == other


@pytest.mark.parametrize(
    ("sizes", "decided", "expected"),
    [
        ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 8}, 4, (8, 4, 1)),
        ({"train_micro_batch_size_per_gpu": "auto"}, 4, (8, 4, 1)),
        ({"train_micro_batch_size_per_gpu": 2}, None, (8, 2, 2)),
    ],
)
def test_a_run_that_begins_again_on_fewer_ranks(
    tiny: Path, tmp_path: Path, sizes: dict[str, Any], decided: int | None, expected: tuple[int, ...]
) -> None:
    """It keeps the batch that its config says of the ranks at first; what is decided is decided for those of now."""
    path = tmp_path / "auto.json"
    path.write_text(json.dumps({**sizes, "zero_optimization": {"stage": "auto"}}), encoding="utf-8")
    again = settings.Settings(
        path, str(tiny / "model"), "", 3, tmp_path, tmp_path, 32, planned_steps=3, again=True, first_ranks=4
    )
    again.read_config(2)
    values = {"zero_optimization.stage": 2, **({} if decided is None else {"train_micro_batch_size_per_gpu": decided})}
    found = again.read_config(2, values)
    sizes_now = found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps
    assert sizes_now == expected and found.zero_optimization.stage == 2


def test_a_run_that_exceeds_its_plan_says_which_part(
    alone: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = planning.first_batch
    shorter = lambda *given: {k: v[:, :8] if k != "use_cache" else v for k, v in whole(*given).items()}  # noqa: E731
    monkeypatch.setattr(planning, "first_batch", shorter)
    alone("run")
    told = (
        r"note: the plan was exceeded by \S+ [kM]B \(\d+%\): activations have (\S+) ([kM]B) more than planned; .*shape"
    )
    assert re.search(told, capsys.readouterr().out)


def test_a_model_that_cannot_be_planned_is_trained(
    alone: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> Any:
        raise UsageError("plan: the model asks for values: expected one that does not")

    monkeypatch.setattr(planning, "first_batch", fails)
    alone("run")
    said = capsys.readouterr().out
    assert re.findall(r"^plan: .*", said, re.MULTILINE) == ["plan:        none: the model asks for values"]
    assert "finished at: step 3 of 3" in said


def test_sigterm_stops_all_ranks_after_a_step_and_saves(tiny: Path, tmp_path: Path):
    output = tmp_path / "run"
    asked = ["--data", tiny / "text.txt", "--ranks", 2, "--steps", 100_000, "--output", output]
    process = start(tiny, *asked, "--save-every", 100_000)
    deadline = time.monotonic() + HANG_S
    while not (output / "metrics.jsonl").exists() or '"loss"' not in (output / "metrics.jsonl").read_text("utf-8"):
        assert process.poll() is None and time.monotonic() < deadline, "no step was made"
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    assert "stopped at:  step" in out
    assert "of 100000" in out
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[-1]["validation_loss"] == pytest.approx(validation_loss(output / "model", tiny / "text.txt"), abs=CLOSE)
    assert (output / "checkpoints" / f"step-{rows[-1]['step']:08}" / "index.json").exists()


def test_the_failing_ranks_own_traceback_is_shown_once(tiny: Path, tmp_path: Path):
    package = tmp_path / "pydoc_data"  # takes the place of the standard library's, and fails on rank 1
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "topics.py").write_text(
        "import os\nif os.environ.get('RANK') == '1':\n    raise LookupError('rank one has no text')\n"
        f"topics = {{'all': {CORPUS!r}}}\n",
        encoding="utf-8",
    )
    output = tmp_path / "run"
    process = start(tiny, "--ranks", 2, "--steps", 5, "--output", output, environment={"PYTHONPATH": str(tmp_path)})
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert err.count("Traceback") == 1
    assert "rank 1 failed" in err
    assert "LookupError: rank one has no text" in err
    assert "ChildFailedError" not in err
    assert not output.exists()  # nothing was written: the name is free again
