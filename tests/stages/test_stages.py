"""stages/: the five records, and the formulas that follow from their letters."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest

from shardengine import stages
from shardengine.config import Config, ZeroConfig
from shardengine.errors import ConfigError, InternalError
from shardengine.stages import STAGES, Stage, Volume
from shardengine.stages.placement import Placement

LETTERS = ("weights_after_forward", "weights_after_backward", "gradients", "state")


def letters(stage: Stage) -> tuple[str, ...]:
    placements = (stage.weights_after_forward, stage.weights_after_backward, stage.gradients, stage.state)
    return tuple(placement.value for placement in placements)


def test_the_docstring_table_equals_the_records() -> None:
    rows = re.findall(r"^    (\S+) +([RSP]) +([RSP]) +([RSP]) +([RSP])$", stages.__doc__ or "", flags=re.MULTILINE)
    assert {name: tuple(row) for name, *row in rows} == {name: letters(stage) for name, stage in STAGES.items()}
    assert [name for name, *_ in rows] == ["0", "1", "2", "3k", "3"] == list(STAGES)


def test_from_row_to_row_exactly_one_letter_falls_to_sharded() -> None:
    rows = [letters(stage) for stage in STAGES.values()]
    for upper, lower in itertools.pairwise(rows):
        changed = [(a, b) for a, b in zip(upper, lower, strict=True) if a != b]
        assert len(changed) == 1
        assert changed[0][0] in "RP" and changed[0][1] == "S"


def test_a_stage_is_its_name_and_four_placements() -> None:
    assert [field.name for field in dataclasses.fields(Stage)] == ["name", *LETTERS]
    assert all(stage.name == name for name, stage in STAGES.items())


@pytest.mark.parametrize(
    ("name", "moves", "reshards", "every_micro_batch", "gathers_gradients", "publishes"),
    [
        ("0", False, False, False, True, False),
        ("1", False, False, False, False, True),
        ("2", False, False, True, False, True),
        ("3k", True, False, True, False, False),
        ("3", True, True, True, False, False),
    ],
)
def test_what_a_stage_does_follows_from_its_letters(
    name: str, moves: bool, reshards: bool, every_micro_batch: bool, gathers_gradients: bool, publishes: bool
) -> None:
    stage = STAGES[name]
    assert stage.moves_weights is moves
    assert stage.reshards_after_forward is reshards
    assert stage.reduces_every_micro_batch is every_micro_batch
    assert stage.gathers_gradients is gathers_gradients
    assert stage.publishes_after_step is publishes


# Gigabytes per device of models of 7.5, 128 and 1000 billion parameters, mixed-precision Adam, as the paper prints them
# (ZeRO, arXiv 1910.02054, table 1; it sometimes truncates, so that the last printed digit may be off by one).
PAPER = [
    ("1", 64, ("31.4", "536", "4187")),
    ("2", 64, ("16.6", "284", "2218")),
    ("3", 64, ("1.88", "32", "250")),
    ("1", 1024, ("30.1", "513", "4011")),
    ("2", 1024, ("15.1", "257", "2013")),
    ("3", 1024, ("0.12", "2", "15.6")),
    ("1", 4, ("52.5",)),
    ("2", 4, ("41.3",)),
    ("3", 4, ("30",)),
]


@pytest.mark.parametrize(("name", "ranks", "printed"), PAPER)
def test_memory_reproduces_the_table_of_the_zero_paper(name: str, ranks: int, printed: tuple[str, ...]) -> None:
    for billions, figure in zip((7.5, 128, 1000), printed, strict=False):
        gigabytes = STAGES[name].model_state_bytes(billions * 1e9, ranks, weight=2, gradient=2, state=12) / 1e9
        last_digit = 10.0 ** -len(figure.partition(".")[2])
        assert abs(gigabytes - float(figure)) <= 1.0001 * last_digit


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_memory_in_fp32_is_four_plus_four_plus_eight_with_the_same_letters(ranks: int) -> None:
    expected = {
        "0": 16.0,
        "1": 8 + 8 / ranks,
        "2": 4 + 12 / ranks,
        "3k": 16 / ranks,
        "3": 16 / ranks,
    }
    for name, stage in STAGES.items():
        assert stage.model_state_bytes(1000, ranks) == pytest.approx(1000 * expected[name])


def test_frozen_parameters_cost_their_weights_only() -> None:
    assert STAGES["1"].model_state_bytes(0, 4, frozen=100) == 400
    assert STAGES["3"].model_state_bytes(0, 4, frozen=100) == 100


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("k", [1, 3])
def test_bytes_sent_are_the_formulas_of_the_limits(ranks: int, k: int) -> None:
    psi, twice, once, gradient, weight = 10_000, 9_000, 1_500, 4, 2  # twice + once > psi: 500 are frozen
    ring = (ranks - 1) / ranks
    expected = {
        "0": 2 * ring * gradient * psi,
        "1": ring * (gradient + weight) * psi,
        "2": ring * (k * gradient + weight) * psi,
        "3k": ring * k * (1 * weight * twice + weight * once + gradient * psi),
        "3": ring * k * (2 * weight * twice + weight * once + gradient * psi),
    }
    volume = Volume(trainable=psi, twice=twice, once=once)
    for name, stage in STAGES.items():
        sent = stage.bytes_sent(volume, ranks, micro_batches=k, weight=weight, gradient=gradient)
        assert sent == pytest.approx(expected[name])


@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (24, 3), (64, 8)])
@pytest.mark.parametrize(("gradient", "partial"), [(4, 4), (2, 4), (2, 2)])
def test_bytes_of_gradients_that_are_added_node_by_node(ranks: int, nodes: int, gradient: int, partial: int) -> None:
    psi, k = 10_000, 3
    volume = Volume(trainable=psi)
    inside, between = gradient * psi * (ranks - nodes) / ranks, partial * psi * (nodes - 1) / ranks
    plain = {"micro_batches": k, "weight": 0, "gradient": gradient}
    sent = STAGES["2"].bytes_sent(volume, ranks, nodes=nodes, partial=partial, **plain)
    assert sent == pytest.approx(k * (inside + between))
    more = (partial - gradient) * psi * (nodes - 1) / ranks  # docs/limits.md
    assert sent == pytest.approx(STAGES["2"].bytes_sent(volume, ranks, **plain) + k * more)


def select(number: int, reshard: bool = True, **options: Any) -> Stage:
    """What a config with this stage asks for."""
    zero = ZeroConfig(stage=number, stage3_reshard_after_forward=reshard)
    return stages.select(Config(zero_optimization=zero, **options))


@pytest.mark.parametrize("letters", list(itertools.product("RSP", repeat=4)))
def test_letters_that_do_not_go_together_are_refused(letters: tuple[str, ...]) -> None:
    forward, backward, gradients, state = letters
    legal = (forward + backward + state) in ("RRR", "RRS", "RSS", "SSS") and gradients in "PS"
    placements = [Placement(letter) for letter in letters]
    if legal:
        assert Stage("own", *placements).state is placements[3]
    else:
        with pytest.raises(InternalError, match=r"stage 'own'.*expected"):
            Stage("own", *placements)


def test_full_accumulation_sends_gradients_once_and_sharded_once_per_micro_batch() -> None:
    psi, k, ranks, ring = 1000, 3, 2, 0.5
    volume = Volume(trainable=psi, twice=psi)
    two_full = select(2, gradient_accumulation="full")
    assert two_full.bytes_sent(volume, ranks, micro_batches=k) == ring * 8 * psi
    three_full = select(3, gradient_accumulation="full")
    assert three_full.bytes_sent(volume, ranks, micro_batches=k) == ring * (k * 8 + 4) * psi
    zero_sharded = select(0, gradient_accumulation="sharded")
    assert zero_sharded.bytes_sent(volume, ranks, micro_batches=k) == ring * (4 * k + 4) * psi
    one_sharded = select(1, gradient_accumulation="sharded")
    assert one_sharded.bytes_sent(volume, ranks, micro_batches=k) == ring * (4 * k + 4) * psi


def test_select_finds_the_record_of_a_number() -> None:
    assert [select(number).name for number in (0, 1, 2, 3)] == ["0", "1", "2", "3"]
    assert select(3, False).name == "3k"
    assert select(2, False).name == "2"


def test_select_overrides_the_third_letter_alone() -> None:
    for number in (0, 1, 2, 3):
        plain = select(number)
        for word, placement in (("full", Placement.PARTIAL), ("sharded", Placement.SHARDED)):
            chosen = select(number, gradient_accumulation=word)
            assert chosen == dataclasses.replace(plain, gradients=placement)


@pytest.mark.parametrize("number", [-1, 4, 33])
def test_select_refuses_a_stage_that_does_not_exist(number: int) -> None:
    with pytest.raises(ConfigError, match=rf"0, 1, 2, 3, got {number}"):
        select(number)
