"""No sentence of an error changes unnoticed, and every error has a code (see sentences)."""

from __future__ import annotations

import json
import re
from collections import Counter

from tests.project import sentences


def test_the_sentences_of_errors_are_those_of_the_recording() -> None:
    recorded = Counter(json.loads(sentences.FILE.read_text(encoding="utf-8")))
    found = Counter(sentences.sentences())
    assert found == recorded, (
        f"new: {[*(found - recorded)]}\ngone: {[*(recorded - found)]}\n"
        "if that is meant: python -m tests.project.sentences"
    )


def test_every_error_has_a_code() -> None:
    without, odd = [], []
    for path in sorted((sentences.ROOT / "shardengine").rglob("*.py")):
        for name, code, _, line in sentences.raised(path.read_text(encoding="utf-8")):
            place = f"{path.relative_to(sentences.ROOT)}:{line} {name} {code}"
            if not code and name not in sentences.WITHOUT_CODE:
                without.append(place)
            if code and not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", code):
                odd.append(place)
    assert not without, "\n".join(['code="area-what-is-wrong" is missing:', *without])
    assert not odd, "\n".join(["expected lower-case words with dashes:", *odd])


def test_values_are_left_out() -> None:
    source = (
        'raise UsageError(f"{name}: expected " + ("a" if one else "b") + f", got {found!r}")\nraise ValueError("x")'
    )
    assert [*sentences.of_source(source)] == ["UsageError: {}: expected [a|b], got {}"]
    assert [*sentences.of_source('MismatchError("x", code="ranks-differ")')] == ["MismatchError ranks-differ: x"]
