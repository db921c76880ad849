"""``benchmarks.convergence``: verdicts and refusals on made-up curves, and a tiny training in three precisions."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import convergence
from benchmarks.convergence import (
    BOUNDS,
    CONTROLS,
    EXPECTED,
    GROUPS,
    REFERENCE,
    check,
    draw,
    jobs_of,
    main,
    parse,
    smooth,
    summarise,
    within,
    write,
)
from benchmarks.convergence_ranks import (
    ALTERED,
    BASE,
    BASES,
    PRECISIONS,
    SLOW,
    Run,
    altered,
    base_of,
    config_of,
    read_blocks,
    unigram_loss,
)
from benchmarks.reporting import RESULTS
from shardengine import kernels
from shardengine.app.data import Rows, TokenBlocks
from shardengine.config.load import load_config

STOCHASTIC = "bf16-pure-stochastic"


def made_up(
    precision: str, seed: int = 1, *, training: float = 0.0, validation: float = 0.0, start: float = 6.0
) -> Run:
    """A run that ends at 4.0 and 4.1 + seed / 100, and above by so much."""
    weights, computed, state = EXPECTED[precision]
    losses = [5.0] * 5 + [4.0 + training] * 10
    finals = [(0, start), (15, 4.1 + seed / 100 + validation)]
    return Run(precision, seed, losses, finals, [(0, 1.0)], 0, [weights], computed, state + 0.02)


def verdict_of(name: str, *gaps: tuple[float, float]) -> str:
    """Of a precision whose seeds end (training, validation) above fp32."""
    runs = [made_up(base, seed) for base in {BASE, base_of(name)} for seed in range(1, len(gaps) + 1)]
    runs += [made_up(name, seed, training=a, validation=b) for seed, (a, b) in enumerate(gaps, 1)]
    return str(summarise(runs)["precisions"][name]["verdict"])


@pytest.mark.parametrize("name", list(BOUNDS))
def test_every_precision_can_reach_and_miss_its_bound(name: str) -> None:
    inside, outside = 0.9 * BOUNDS[name], 1.1 * BOUNDS[name]
    assert verdict_of(name, (inside, -inside), (0.0, 0.0)) == "reached"
    assert verdict_of(name, (outside, 0.0), (outside, 0.0)) == "missed"
    assert verdict_of(name, (0.0, outside), (0.0, outside)) == "missed"
    assert verdict_of(name, (0.0, -outside), (0.0, -outside)) == "missed"
    assert verdict_of(name, (0.0, outside), (0.0, 0.0)) == "not decided"
    assert verdict_of(name, (math.nan, math.nan), (0.0, 0.0)) == "missed"


def test_differences_are_taken_between_runs_of_one_seed() -> None:
    runs = [made_up(BASE, 1), made_up(BASE, 2), made_up(BASE, 5), made_up("fp16", 2, training=0.25, validation=-0.5)]
    found = summarise(runs)
    row = found["precisions"]["fp16"]
    assert row["differences"]["training"] == pytest.approx([0.25])
    assert row["differences"]["validation"] == pytest.approx([-0.5])
    assert row["training_loss"] == pytest.approx(4.25) and row["validation_loss"] == pytest.approx(3.62)
    assert found["spread"]["seeds"] == 3 and found["spread"]["range"] == pytest.approx(0.04)
    deviation = math.sqrt((0.0167**2 + 0.0067**2 + 0.0233**2) / 2)
    assert found["spread"]["deviation"] == pytest.approx(deviation, rel=0.01)
    assert found["spread"]["between_two"] == pytest.approx(1.414 * deviation, rel=0.01)
    assert found["control_misses"] is None


def test_slow_betas_are_compared_with_slow_betas() -> None:
    runs = [made_up(BASE), made_up("fp32-slow", training=0.5), made_up("slow-states-8bit", training=0.51)]
    rows = summarise(runs)["precisions"]
    assert rows["slow-states-8bit"]["differences"]["training"] == pytest.approx([0.01])
    assert "differences" not in rows["fp32-slow"]


@pytest.mark.parametrize("control", list(CONTROLS))
def test_the_control_must_miss(control: str) -> None:
    inside, outside = 0.9 * BOUNDS[control], 1.1 * BOUNDS[control]
    assert summarise([made_up(BASE), made_up(control, training=outside)])["control_misses"] is True
    found = summarise([made_up(BASE), made_up(control, training=inside)])
    assert found["control_misses"] is False


def test_a_mean_within_and_a_seed_outside_decide_nothing() -> None:
    assert within({"training": [0.03, -0.03], "validation": [0.0, 0.0]}, 0.02) == "not decided"


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("parameter_dtypes", ["float32"], "expected weights in bfloat16"),
        ("parameter_dtypes", ["bfloat16", "float32"], "got bfloat16, float32"),
        ("computed_in", "float32", "layers in bfloat16"),
        ("state_bytes", 12.02, "8 bytes of states and masters"),
        ("validation", [(0, 6.1), (15, 4.0)], "not the same weights"),
        ("validation", [(0, math.nan), (15, 4.0)], "not the same weights"),
    ],
)
def test_a_run_in_another_precision_or_from_other_weights_is_refused(field: str, value: Any, complaint: str) -> None:
    run = made_up(STOCHASTIC)
    check([made_up(BASE), run])
    vars(run)[field] = value
    with pytest.raises(SystemExit, match=complaint):
        summarise([made_up(BASE), run])


def test_what_the_precisions_say_is_what_their_names_say() -> None:
    configs = {name: load_config(config_of(REFERENCE, name, 7)) for name in PRECISIONS}
    assert [name for name, config in configs.items() if config.fp16.enabled] == ["fp16"]
    bf16 = {name: config.bf16 for name, config in configs.items() if config.bf16.enabled}
    assert {name: (each.master_weights, each.stochastic_rounding) for name, each in bf16.items()} == {
        "bf16": (True, False), STOCHASTIC: (False, True), "bf16-pure": (False, False),
        "bf16-states-bf16": (True, False), "bf16-states-8bit": (True, False),
        "bf16-split-states-8bit": (True, False),
    }  # fmt: skip
    states = {name: config.data_types.optimizer_state_dtype for name, config in configs.items()}
    assert {name for name, dtype in states.items() if dtype == "bf16"} == {"states-bf16", "bf16-states-bf16"}
    eight = {name for name in configs if "8bit" in name} - {"states-8bit-zero"}
    assert {name for name, dtype in states.items() if dtype == "8bit"} == eight
    betas = {name: config_of(REFERENCE, name, 7)["optimizer"]["params"]["betas"] for name in PRECISIONS}
    assert {name for name, (_, second) in betas.items() if second == 0.999} == SLOW
    assert {name for group in GROUPS.values() for name in group} == set(PRECISIONS)
    assert [name for name, config in configs.items() if config.torch_autocast.enabled] == ["bf16-autocast"]
    assert all(config.seed == 7 and config.gradient_clipping == 1.0 for config in configs.values())
    assert set(configs) == set(EXPECTED) == {*BASES, *BOUNDS}


def test_fp32_runs_first_with_every_seed() -> None:
    assert jobs_of(["fp16", BASE, "bf16"], 1, 3) == [(BASE, 1), ("fp16", 1), ("bf16", 1), (BASE, 2), (BASE, 3)]
    assert jobs_of(["slow-states-8bit"], 1, 1) == [(BASE, 1), ("fp32-slow", 1), ("slow-states-8bit", 1)]


def test_what_is_altered_rounds_as_it_says() -> None:
    """With the kernels' own update the same steps end elsewhere, and afterwards that is back."""

    def stepped(precision: str, kept_in: str) -> dict[str, torch.Tensor]:
        names = kernels.STATE_NAMES["AdamW"]
        forms = kernels.state_forms(names, kept_in)
        flats = {name: torch.zeros(form.length(512), dtype=form.dtype) for name, form in forms.items()}
        generator = torch.Generator().manual_seed(1)
        flats["weight"], gradient = torch.zeros(512), torch.randn(512, generator=generator)
        flats["gradient"] = gradient * torch.logspace(-3, 0, 512)
        options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        with altered(precision):
            for step in range(1, 4):
                rule = kernels.rule_for("AdamW", options, step)
                kernels.update(flats, kernels.Spans([(0, 512)]), rule, state_noise=kernels.Noise(3, step))
        return {name: kernels.widened_state(flats, name) for name in names}

    own, update = stepped(BASE, "8bit"), kernels.update
    nearest = stepped("states-8bit-nearest", "8bit")
    assert not torch.equal(own["exp_avg"], nearest["exp_avg"])
    exact, zero = stepped(BASE, "fp32"), stepped("states-8bit-zero", "fp32")
    assert bool((exact["exp_avg_sq"] > 0).all()) and bool((zero["exp_avg_sq"] == 0).any())
    steps = zero["exp_avg_sq"].view(2, 256)
    steps = steps / steps.amax(dim=1, keepdim=True) * 255
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
    assert kernels.update is update and set(ALTERED) <= set(BOUNDS)


def test_windows_are_means_of_ten_steps() -> None:
    assert smooth([float(step) for step in range(12)]) == [4.5, 5.5, 6.5]


def test_the_text_is_the_commands_and_its_frequencies_cost_less_than_nothing_known() -> None:
    blocks = read_blocks(300, 16)
    tokens = blocks.training.input_ids
    assert tokens.shape[1] == 16 and 0 <= int(tokens.min()) < int(tokens.max()) < 300 and len(tokens) > 10_000
    assert torch.equal(tokens, read_blocks(300, 16).training.input_ids)
    counts = torch.bincount(tokens.flatten(), minlength=300).double() + 1
    by_hand = sum(math.log(float(counts.sum() / counts[token])) for token in blocks.validation.input_ids[0, 1:]) / 15
    row = blocks.validation.input_ids[:1]
    one = TokenBlocks(blocks.training, Rows(row, row))
    assert unigram_loss(one, 300) == pytest.approx(by_hand)
    assert 3.0 < unigram_loss(blocks, 300) < math.log(300)


def few_blocks(vocabulary: int, length: int) -> TokenBlocks:
    """The text with few rows to validate on."""
    blocks = read_blocks(vocabulary, length)
    few = blocks.validation.input_ids[:8]
    return TokenBlocks(blocks.training, Rows(few, few))


@pytest.mark.usefixtures("forked_ranks")
def test_a_tiny_training_in_three_precisions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(convergence, "read_blocks", few_blocks)
    monkeypatch.setattr(convergence, "machine", lambda: {"name": "x", "processor": "x", "torch": "x"})
    size = ["--layers", "1", "--hidden", "64", "--vocabulary", "257", "--batch", "2", "--sequence", "8"]
    length = ["--steps", "20", "--learning-rate", "4e-3", "--seeds", "1", "--base-seeds", "1"]
    assert main([*size, *length, "--precisions", "fp16", STOCHASTIC, "--json"]) == 0
    captured = capsys.readouterr()
    assert "not written" in captured.err
    result = json.loads(captured.out)
    rows = result["precisions"]
    assert list(rows) == [BASE, "fp16", STOCHASTIC] and result["seeds"] == dict.fromkeys(rows, 1)
    assert result["training"]["steps"] == 20 and result["training"]["work"]["ranks"] == 2
    for name, row in rows.items():
        (run,) = row["runs"]
        assert len(run["losses"]) == 20 and [step for step, _ in run["validation"]] == [0, 5, 10, 15, 20]
        assert run["losses"][0] - row["training_loss"] > 0.2 and run["validation"][0][1] - row["validation_loss"] > 0.2
        assert ([row["weights"]], row["computed_in"]) == (run["parameter_dtypes"], run["computed_in"])
        assert ("verdict" in row) is ("difference" in row) is (name != BASE)
    assert [rows[name]["weights"] for name in rows] == ["float32", "float16", "bfloat16"]
    assert [round(row["state_bytes_per_parameter"]) for row in rows.values()] == [8, 12, 8]
    assert [row["runs"][0]["loss_scales"][0] for row in rows.values()] == [[0, 1.0], [0, 65536.0], [0, 1.0]]
    fp16 = rows["fp16"]
    assert (fp16["loss_scale"] == [65536.0]) or fp16["skipped_steps"][0] > 0
    first, *others = (row["runs"][0]["losses"] for row in rows.values())
    assert all(losses != first and losses[0] == pytest.approx(first[0], abs=0.01) for losses in others)
    convergence.print_report(result)
    draw(result, tmp_path / "x.svg")
    assert "less fp32" in (tmp_path / "x.svg").read_text(encoding="utf-8")
    assert "token frequencies alone" in capsys.readouterr().out


def test_only_the_whole_reference_run_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(convergence, "write_result", lambda name, result: tmp_path / "x.json")
    monkeypatch.setattr(convergence, "draw", lambda result, path: None)
    seeds, states = (dict.fromkeys(GROUPS[name], 3) for name in ("precisions", "states"))
    seeds |= {BASE: 10}
    assert [write({"seeds": seeds}, REFERENCE)[:7], write({"seeds": states}, REFERENCE)[:7]] == 2 * ["written"]
    long = {"seeds": dict.fromkeys(GROUPS["long"], 1)}
    assert write(long, dataclasses.replace(REFERENCE, steps=1000)).startswith("written to")
    assert write(long, REFERENCE).startswith("not written")
    assert write({"seeds": seeds}, REFERENCE).startswith("written to")
    assert write({"seeds": seeds | {BASE: 4}}, REFERENCE).startswith("not written")
    assert write({"seeds": {BASE: 10}}, REFERENCE).startswith("not written")
    assert write({"seeds": seeds}, type(REFERENCE)(REFERENCE.work, 199, 1e-3)).startswith("not written")


@pytest.mark.parametrize(
    "bad",
    [["--hidden", "100"], ["--steps", "9"], ["--vocabulary", "256"], ["--seeds", "0"], ["--learning-rate", "nan"]],
)
def test_bad_usage_is_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(bad)
    assert stopped.value.code == 2 and bad[0] in capsys.readouterr().err


def test_the_kept_results_hold_what_is_said_of_them() -> None:
    """The kept curves give the kept verdicts; the model learnt, and the control tells precisions apart."""
    paths = sorted(RESULTS.glob("convergence*.json"))
    assert paths
    for path in paths:
        result = json.loads(path.read_text(encoding="utf-8"))
        runs = [Run(**run) for row in result["precisions"].values() for run in row["runs"]]
        assert json.loads(json.dumps(summarise(runs))) == {
            key: result[key] for key in ("spread", "precisions", "control_misses")
        }
        controlled = bool(set(result["precisions"]) & set(CONTROLS))
        assert result["control_misses"] is (True if controlled else None)
        assert controlled or path.name.startswith(("convergence_states_bf16", "convergence_long"))
        assert result["precisions"][BASE]["validation_loss"] < result["data"]["unigram_loss"] - 1.0
