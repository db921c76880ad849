"""``offload_optimizer.ratio`` and ``device_memory``: what fits together, and the words where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.test_reader import BATCH, load, problems


def test_auto_is_a_value_of_ratio() -> None:
    given = {"device": "cpu", "ratio": "auto", "device_memory": 2e9}
    found = load(zero_optimization={"offload_optimizer": given}).zero_optimization.offload_optimizer
    assert (found.ratio, found.device_memory) == ("auto", 2_000_000_000)
    given["device_memory"] = "auto"
    found = load(zero_optimization={"offload_optimizer": given}).zero_optimization.offload_optimizer
    assert (found.ratio, found.device_memory) == ("auto", None)
    del given["device_memory"]
    found = load(zero_optimization={"offload_optimizer": given}).zero_optimization.offload_optimizer
    assert (found.ratio, found.device_memory) == ("auto", None)


@pytest.mark.parametrize(
    ("written", "place", "came"),
    [
        ({"ratio": "auto"}, "ratio", 'device "cpu" or "nvme" beside "auto", got "none"'),
        ({"ratio": "most", "device": "cpu"}, "ratio", 'a number from 0 to 1, or "auto", got the string "most"'),
        ({"ratio": 1.5, "device": "cpu"}, "ratio", 'a number from 0 to 1, or "auto", got the number 1.5'),
        ({"device_memory": 1e9, "device": "cpu"}, "device_memory", '"ratio": "auto" beside it, got ratio 1,'),
        ({"device_memory": 1.5, "ratio": "auto", "device": "cpu"}, "device_memory", "an integer >= 1, or null"),
        ({"device_memory": 0, "ratio": "auto", "device": "cpu"}, "device_memory", "got the number 0"),
        ({"device_memory": "2GB", "ratio": "auto", "device": "cpu"}, "device_memory", 'got the string "2GB"'),
    ],
)
def test_a_ratio_that_is_chosen_needs_a_tier_and_bytes(written: dict[str, Any], place: str, came: str) -> None:
    (message,) = problems({**BATCH, "zero_optimization": {"offload_optimizer": written}})
    assert message.startswith(f"zero_optimization.offload_optimizer.{place}: ") and came in message
