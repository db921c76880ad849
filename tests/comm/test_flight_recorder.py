"""flight_recorder.py: what is remembered of the collectives that were issued, and where two ranks differ."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from shardengine.comm import flight_recorder
from shardengine.comm.flight_recorder import FlightRecorder, first_difference

GROUPS = ("gather", "reduce")


def of(*notes: str) -> FlightRecorder:
    """A recorder of notes "group text"."""
    found = FlightRecorder(GROUPS)
    for note in notes:
        group, text = note.split(" ", 1)
        found.add(SimpleNamespace(counts_as=group, summary=text))  # type: ignore[arg-type]
    return found


def difference(*ranks: FlightRecorder) -> tuple[int, str, str] | None:
    """As the ranks find it: what each remembers has travelled as JSON."""
    return first_difference([json.loads(json.dumps(rank.texts())) for rank in ranks])


def test_the_digest_follows_every_text_and_the_order_within_a_group_alone() -> None:
    one = of("gather a", "reduce b", "gather c")
    assert one.digest().dtype is torch.uint8 and one.digest().shape == (8,)
    assert torch.equal(one.digest(), of("reduce b", "gather a", "gather c").digest())
    assert torch.equal(one.digest(), of("gather a", "control x", "reduce b", "gather c").digest())
    for other in (of("gather c", "reduce b", "gather a"), of("gather a", "gather b", "gather c"), of("gather a")):
        assert not torch.equal(one.digest(), other.digest())


def test_the_first_difference_from_rank_0_is_found() -> None:
    one = of("gather a", "reduce x", "gather b", "reduce y")
    assert difference(one, of("reduce x", "gather a", "reduce y", "gather b")) is None
    assert difference(one, one, of("gather a", "gather c", "reduce x", "reduce z")) == (2, "number 2: b", "number 2: c")
    assert difference(one, of("gather a", "gather b", "reduce z", "reduce y")) == (1, "number 1: x", "number 1: z")
    assert difference(one, of("gather a", "reduce x", "reduce y")) == (1, "number 2: b", "nothing")
    assert difference(of("gather a"), one) == (1, "nothing", "number 2: b")


def numbered(count: int, **other: str) -> FlightRecorder:
    """A recorder of so many gathers; other: what some of them are instead, as ``number_7="another"``."""
    return of(*(f"gather {other.get(f'number_{number}', number)}" for number in range(1, count + 1)))


def test_what_is_forgotten_shifts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that issued different numbers of collectives have forgotten different numbers of them."""
    monkeypatch.setattr(flight_recorder, "MAX_TEXTS", 4)
    assert numbered(9).texts() == {"gather": (5, ["6", "7", "8", "9"]), "reduce": (0, [])}
    assert difference(numbered(9), numbered(8)) == (1, "number 9: 9", "nothing")
    assert difference(numbered(8), numbered(9)) == (1, "nothing", "number 9: 9")
    assert difference(numbered(9), numbered(8, number_7="another")) == (1, "number 7: 7", "number 7: another")
    assert difference(numbered(9), numbered(3)) == (1, "number 6: 6", "nothing"), "nothing left to compare but the end"
    assert difference(numbered(9), numbered(9, number_5="another")) is None, "too long ago"
