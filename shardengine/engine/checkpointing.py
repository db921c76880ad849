"""The engine's surface for checkpoints. Nothing is read or written here; `checkpoint/` is loaded at the first call.

Must not know: forward, backward, the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardengine.engine.inspection import Inspection
from shardengine.engine.recovery import reports_failure

if TYPE_CHECKING:
    from shardengine.checkpoint import Checkpoint


class Checkpointing(Inspection):
    """The part of the engine that saves and loads."""

    @reports_failure("save_checkpoint")
    def save_checkpoint(
        self, directory: str | Path, tag: str | None = None, client_state: dict[str, Any] | None = None
    ) -> Path:
        """Write weights, optimizer, scheduler, counters and random states to ``directory/tag``; collective.

        Between steps only. tag: default ``step-<global_steps>``; one that is there is replaced once the new one is
        whole. client_state: JSON, rank 0's is kept. A failure raises on every rank and leaves the previous one intact.
        With ``"checkpoint": {"async_save": true}`` it returns when weights and buffers are copied to host memory, and
        the next step waits until the optimizer's states are; a failure is then raised by the next call that saves (when
        its own is under way), loads or waits, or by ``close()``.
        """
        from shardengine import checkpoint

        self._need_core()
        return checkpoint.save(self, directory, tag, client_state)

    @reports_failure("wait_for_checkpoint")
    def wait_for_checkpoint(self) -> None:
        """Return when everything that was saved is on disk; CheckpointError if it is not; collective."""
        if self._saves is not None:
            from shardengine import checkpoint

            self._need_core()
            checkpoint.finish(self)

    @reports_failure("load_checkpoint")
    def load_checkpoint(
        self, directory: str | Path, tag: str | None = None, *, strict: bool = True, weights_only: bool = False
    ) -> Checkpoint:
        """Go on from a checkpoint of any number of ranks, stage and precision; collective.

        tag: default what ``latest`` names; where that one is damaged, the newest that is whole, with a warning.
        At the same number of ranks training goes on bit for bit; at another one weights and states are the same bits.
        strict: UsageError lists everything that the model and the checkpoint do not have in common. False takes what
        fits, the rest keeps its values, and states of what was not stepped before begin at zero; another shape, kind of
        dtype or optimizer is refused all the same. weights_only: no optimizer, scheduler, counters and random states.

        CheckpointError: damaged. An engine that has trained is not changed by either; one that has not may be partly
        loaded by a damaged checkpoint, and refuses to train until a whole one is. Also the way on where ``reset()``
        says that it has none.
        """
        from shardengine import checkpoint

        self._need_core()
        return checkpoint.load(self, directory, tag, strict=strict, weights_only=weights_only)
