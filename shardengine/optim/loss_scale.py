"""The loss scale of fp16, and the steps that are skipped because gradients are not finite. Integers and floats only.

Gradients in fp16 vanish below 6e-8 and overflow above 65504. A scaled loss moves them between the two. A step whose
gradients overflowed is skipped. Must not know: tensors, the step, who finds the overflow.
"""

from __future__ import annotations

from typing import Any

from shardengine.sharding import ScalePolicy

_FACTOR = 2.0
_LARGEST = 2.0**127
"""fp32 has no larger power of two."""


class LossScaler:
    """``scale`` is the factor of the loss in the next accumulation window; ``skipped`` counts the skipped steps."""

    def __init__(self, policy: ScalePolicy) -> None:
        self.policy = policy
        self.scale = policy.initial
        self.skipped = 0
        self._in_a_row = 0
        self._good = 0
        self._tolerated = policy.hysteresis

    @property
    def is_exhausted(self) -> bool:
        """Whether another skipped step is an error.

        It is if a dynamic scale cannot be halved and no further overflow is tolerated, or if it would be one too many
        in a row.
        """
        if self.policy.dynamic:
            return self._tolerated <= 1 and self.scale <= self.policy.minimum
        return 0 < self.policy.limit <= self._in_a_row + 1

    def update(self, overflow: bool) -> None:
        """Record that a step was taken, or that it was skipped because of an ``overflow``."""
        self.skipped += overflow
        self._in_a_row = self._in_a_row + 1 if overflow else 0
        if not self.policy.dynamic:
            return
        if overflow:
            if self._tolerated <= 1:
                self.scale = max(self.scale / _FACTOR, self.policy.minimum)
            self._tolerated, self._good = max(self._tolerated - 1, 1), 0
            return
        self._good += 1
        if self.policy.consecutive:
            self._tolerated = self.policy.hysteresis
        counted = self._good - self.policy.delay
        if counted > 0 and counted % self.policy.window == 0:
            self.scale, self._tolerated = min(self.scale * _FACTOR, _LARGEST), self.policy.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: JSON values."""
        return {
            "scale": self.scale,
            "good": self._good,
            "tolerated": self._tolerated,
            "skipped": self.skipped,
            "in_a_row": self._in_a_row,
            "dynamic": self.policy.dynamic,
        }

    def count_on(self, skipped: int) -> None:
        """Continue the count from ``skipped`` steps that were skipped before this scale began."""
        self.skipped = skipped

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of ``state_dict``. A fixed scale stays as configured; a dynamic one does not go on from a
        fixed one."""
        self.skipped, self._in_a_row = int(state["skipped"]), int(state.get("in_a_row", 0))
        if self.policy.dynamic and state.get("dynamic", True):
            self.scale, self._good = max(float(state["scale"]), self.policy.minimum), int(state["good"])
            self._tolerated = max(1, min(int(state["tolerated"]), self.policy.hysteresis))
