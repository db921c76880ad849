"""No sentence of an error changes unnoticed (see sentences)."""

from __future__ import annotations

import json
from collections import Counter

from tests.project import sentences


def test_the_sentences_of_errors_are_those_of_the_recording() -> None:
    recorded = Counter(json.loads(sentences.FILE.read_text(encoding="utf-8")))
    found = Counter(sentences.sentences())
    assert found == recorded, (
        f"new: {[*(found - recorded)]}\ngone: {[*(recorded - found)]}\n"
        "if that is meant: python -m tests.project.sentences"
    )


def test_values_are_left_out() -> None:
    source = (
        'raise UsageError(f"{name}: expected " + ("a" if one else "b") + f", got {found!r}")\nraise ValueError("x")'
    )
    assert [*sentences.of_source(source)] == ["UsageError: {}: expected [a|b], got {}"]
