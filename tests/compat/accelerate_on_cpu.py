"""A plugin of pytest: accelerate's own tests of DeepSpeed, on processes without an accelerator, with shardengine.

For `pytest -p tests.compat.accelerate_on_cpu` in a process of its own. What those tests require of a device is left
out, since what they test is the same on a CPU.
"""

from __future__ import annotations

from typing import Any

from shardengine.compat.deepspeed import stand_in

stand_in.install()

from accelerate.test_utils import testing  # noqa: E402


def _as_it_is(test: Any) -> Any:
    return test


for _requirement in ("require_non_cpu", "require_fp16"):
    vars(testing)[_requirement] = _as_it_is
