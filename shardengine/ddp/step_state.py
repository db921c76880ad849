"""How far the accumulation window's step is on this rank, and which calls that allows.

Owns: the phases, the moves between them, the needs of each call of the user, and the error if one is missing.

Must not know: gradients, weights, how an update is done.

    EMPTY ──▶ BACKWARD ──▶ ACCUMULATED ──▶ BACKWARD ──▶ REDUCED ──▶ AGREED ──▶ UPDATING ◀──▶ TORN
                 └──▶ BROKEN                             │   ▲────────┘ │
                                                   BROKEN ◀──┘ changed  └──▶ SPOILED, or BACKWARD once more

A window that is stepped or dropped leads from every phase to EMPTY, but ``drop_gradients`` does not move an update that
has begun. An update that nothing can finish leads to LOST.

State of one step is reset with the phase. The state of blocks and calls that users hold open around steps
(``full_params``, ``offload_states``) is kept beside it; ``no_sync`` is the window's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from shardengine.ddp.joining import Join
from shardengine.ddp.replicas import Replicas
from shardengine.ddp.window import Window
from shardengine.ddp.writes import Writes
from shardengine.errors import InternalError, UsageError


class Phase(enum.Enum):
    """How far the accumulation window's step is on this rank."""

    EMPTY = "the window has no gradients"
    BACKWARD = "a backward runs"
    BROKEN = "a backward has raised"
    ACCUMULATED = "more micro-batches may come"
    REDUCED = "this rank's part of the gradients is complete"
    AGREED = "the ranks have agreed on the gradients"
    SPOILED = "gradients are not finite, and buckets may have been stepped in backward"
    UPDATING = "the update has begun: buckets are stepped one by one"
    TORN = "inside of the kernels of a bucket"
    LOST = "the update cannot be finished: a checkpoint must be loaded"


_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.EMPTY: frozenset({Phase.BACKWARD}),
    Phase.BACKWARD: frozenset({Phase.BROKEN, Phase.ACCUMULATED, Phase.REDUCED}),
    Phase.BROKEN: frozenset(),
    Phase.ACCUMULATED: frozenset({Phase.BACKWARD}),
    Phase.REDUCED: frozenset({Phase.BROKEN, Phase.AGREED}),
    Phase.AGREED: frozenset({Phase.BACKWARD, Phase.REDUCED, Phase.SPOILED, Phase.UPDATING}),
    Phase.SPOILED: frozenset(),
    Phase.UPDATING: frozenset({Phase.TORN}),
    Phase.TORN: frozenset({Phase.UPDATING}),
    Phase.LOST: frozenset(),
}
_BEGUN = {Phase.UPDATING, Phase.TORN, Phase.LOST}


class EarlySteps(enum.IntEnum):
    """Whether buckets are stepped in the accumulation window's last backward ([Note: Final gradients])."""

    NONE = 0
    """They are not."""
    POSSIBLE = 1
    """That backward has begun: they may be, so the window can only be stepped."""
    BEGUN = 2
    """Some on this rank have been, or are about to be."""
    TORN = 3
    """One of them failed inside of its kernels."""


class StepState:
    """How far the step of ``window`` is on this rank.

    quiet: ``engine.reset()`` could not finish the update; no collective is in flight, so another reset or a load may
    follow · summoned: the number of open ``full_params`` · edited: the number of open ``full_optimizer_state`` that
    allow writes · averaged: whether the weights are their averages now · offloaded: the state that ``offload_states``
    has moved to host memory · join: whether ranks may run out of data, and which have · replicas: whether replicas
    diverge · writes: of weights, by the user's code · hook_refused: why the registered communication hook is not called
    any more.
    """

    def __init__(self, window: Window, rank: int = 0, ranks: int = 1, replicas: Replicas | None = None) -> None:
        self.window = window
        self.rank = rank
        self.ranks = ranks
        self.phase = Phase.EMPTY
        self._early = EarlySteps.NONE
        self._early_torn = False  # by the thread that steps
        self.quiet = False
        self.summoned = self.edited = 0
        self.averaged = False
        self._hook_runs = False
        self.hook_refused = ""
        self.offloaded: set[str] = set()
        self.join = Join(rank, ranks)
        self.replicas = replicas or Replicas()
        self.writes = Writes()

    @property
    def early(self) -> EarlySteps:
        """Whether buckets are stepped in the window's last backward."""
        return EarlySteps.TORN if self._early_torn else self._early

    @property
    def is_agreed(self) -> bool:
        """Whether the ranks have agreed on the window's gradients, which are not dropped."""
        return self.phase in {Phase.AGREED, Phase.SPOILED, Phase.UPDATING, Phase.TORN}

    @property
    def must_be_stepped(self) -> bool:
        """Whether a bucket may have been stepped in backward already."""
        return self.early >= EarlySteps.POSSIBLE

    @property
    def has_begun(self) -> bool:
        """Whether a bucket on this rank has taken the window's step, or is about to."""
        return self.phase in _BEGUN or self.early >= EarlySteps.BEGUN

    @property
    def can_be_finished(self) -> bool:
        """Whether this rank can carry out the step, or the rest of it."""
        return self.phase in {Phase.AGREED, Phase.UPDATING} and self.early is not EarlySteps.TORN

    def move(self, phase: Phase) -> None:
        """Move the step to ``phase``; ``InternalError`` if that phase cannot follow."""
        if phase is not self.phase and phase not in _MOVES[self.phase]:
            raise InternalError(f"a step cannot go from {self.phase.name} to {phase.name} (rank {self.rank})")
        self.phase, self.quiet = phase, False

    def begin_backward(self, *, steps_early: bool) -> None:
        """Begin a backward. steps_early: buckets may be stepped in it."""
        self.require("another backward")
        self.move(Phase.BACKWARD)
        self._early = EarlySteps.POSSIBLE if steps_early else EarlySteps.NONE

    def backward_failed(self) -> None:
        """Note that the backward, or the completion of its gradients, raised."""
        self.window.backward_failed()
        if self.phase in {Phase.BACKWARD, Phase.REDUCED}:
            self.move(Phase.BROKEN)

    def note_early(self, *, torn: bool = False) -> None:
        """Note that a bucket is stepped in backward.

        torn: that failed inside of its kernels; any thread may call this.
        """
        if torn:
            self._early_torn = True
        else:
            self._early = EarlySteps.BEGUN

    def note_unfinished(self) -> None:
        """Note that ``reset()`` could not finish the update."""
        self.quiet = True

    def drop_gradients(self) -> None:
        """Drop the gradients; buckets that were stepped already stay stepped."""
        if self.phase not in _BEGUN:
            self.phase = Phase.EMPTY
        if self.early < EarlySteps.BEGUN:
            self._early = EarlySteps.NONE

    def lose(self) -> None:
        """Note that the update cannot be finished."""
        self._reset(Phase.LOST)

    def restart(self, total: int | None = None) -> None:
        """Drop the accumulation window, also one that was lost. total: as in ``Window.restart``."""
        self._reset()
        self.window.restart(total)

    def close(self) -> int:
        """Begin a new window after an applied or skipped step; return the micro-batches of the old one."""
        self._reset()
        self.writes.end_window()
        return self.window.close()

    def _reset(self, phase: Phase = Phase.EMPTY) -> None:
        self.join.end_window()
        self.phase, self.quiet = phase, False
        self._early, self._early_torn = EarlySteps.NONE, False

    @contextmanager
    def summoning(self) -> Iterator[None]:
        """A block with an open ``full_params``."""
        self.summoned += 1
        try:
            yield
        finally:
            self.summoned -= 1

    @contextmanager
    def editing(self) -> Iterator[None]:
        """A block that allows the user to write master weights and states."""
        self.edited += 1
        try:
            yield
        finally:
            self.edited -= 1

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """A block with averages as weights."""
        self.averaged = True
        try:
            yield
        finally:
            self.averaged = False

    def note_offloaded(self, what: set[str]) -> None:
        """Note that ``what`` is in host memory."""
        self.offloaded |= what

    def note_reloaded(self) -> None:
        """Note that everything is back on the device."""
        self.offloaded.clear()

    @contextmanager
    def in_hook(self) -> Iterator[None]:
        """A block that runs a function of the user's, which may not call the engine."""
        self._hook_runs = True
        try:
            yield
        finally:
            self._hook_runs = False

    def refuse_hook(self, why: str) -> None:
        """Stop calling the communication hook, because its collectives are out of step between the ranks, for good."""
        self.hook_refused = why

    def require(self, call: Call, shown: str = "") -> None:
        """Raise ``UsageError`` if ``call``, one of ``NEEDS``, is not allowed now. shown: its name in the error."""
        if self._hook_runs:
            raise UsageError(
                f"{shown or call} inside of a communication hook (rank {self.rank}), which runs in the middle of "
                "backward: expected it after backward, or after the step",
                code="hook-calls-engine",
            )
        for need in NEEDS[call]:
            if (sentence := need(self, shown or call)) is not None:
                raise UsageError(sentence, code="call-at-wrong-time")


# The needs of calls: each returns the error if it is missing, else None.

_Need = Callable[[StepState, str], str | None]


def _reloaded(state: StepState, _call: str) -> str | None:
    if not state.offloaded:
        return None
    return (
        f"the engine's {' and '.join(sorted(state.offloaded))} are in host memory since offload_states() "
        f"(rank {state.rank}): expected engine.reload_states() before anything else"
    )


def _hook_in_step(state: StepState, _call: str) -> str | None:
    return state.hook_refused or None


def _outside_full_params(state: StepState, call: str) -> str | None:
    if not state.summoned:
        return None
    return f"{call} inside full_params() (rank {state.rank}): expected it after the `with` block"


def _outside_editing(state: StepState, call: str) -> str | None:
    if not state.edited:
        return None
    return f"{call} inside full_optimizer_state() (rank {state.rank}): expected it after the `with` block"


def _outside_ema(state: StepState, call: str) -> str | None:
    if not state.averaged:
        return None
    return (
        f"{call} inside engine.ema() (rank {state.rank}), where the weights are averages: expected it after the `with` "
        "block"
    )


def _replicas_alike(state: StepState, call: str) -> str | None:
    if not state.replicas.since:
        return None
    return (
        f"{call} while shard groups have different weights (rank {state.rank}): comm_hook {state.replicas.name} has "
        f"let them step apart {state.replicas.since} times since they were averaged; expected "
        "engine.average_replicas() on every rank first"
    )


def _one_gradient(state: StepState, call: str) -> str | None:
    if not state.replicas.apart:
        return None
    return (
        f"{call} in a step in which shard groups step apart (rank {state.rank}; comm_hook {state.replicas.name}), each "
        "with its own gradient, which rank 0's would replace: expected full_grads() without writable, which shows each "
        "rank its group's"
    )


def _never_apart(state: StepState, call: str) -> str | None:
    if not state.replicas.name:
        return None
    return (
        f"{call} with comm_hook {state.replicas.name} (rank {state.rank}), which takes means over the ranks of a group "
        "and not over those that have data: expected as many batches on every rank, or another comm_hook"
    )


def _outside_no_sync(state: StepState, call: str) -> str | None:
    if state.window.synchronises:
        return None
    return f"{call} inside no_sync() (rank {state.rank}): expected it after the `with` block"


def _outside_join(state: StepState, call: str) -> str | None:
    if not state.join.is_open or state.join.serves:
        return None
    return (
        f"{call} inside engine.join() (rank {state.rank}), where ranks that have run out of data would not make that "
        "call: expected it after the `with` block"
    )


def _nobody_gone(state: StepState, call: str) -> str | None:
    if not state.join.gone:
        return None
    return (
        f"{call} inside engine.join() (rank {state.rank}) after ranks {state.join.gone} have run out of data, which "
        "do not make that call: expected it after the `with` block"
    )


def _one_backward_per_micro_batch(state: StepState, _call: str) -> str | None:
    if state.phase is not Phase.AGREED or _outside_join(state, "") is None:
        return None
    return (
        f"a second backward in the last micro-batch of a step inside engine.join() (rank {state.rank}), which ranks "
        "that have run out of data would not know of: expected the losses of a forward to be added, and one backward"
    )


def _joined_window_whole(state: StepState, call: str) -> str | None:
    return None if state.window.is_first else _outside_join(state, call)


def _clipped_by_config(state: StepState, call: str) -> str | None:
    if _outside_join(state, call) is None:
        return None
    return (
        f"{call} inside engine.join() (rank {state.rank}): ranks that have run out of data would not clip; expected "
        '"gradient_clipping" in the config, which every rank does'
    )


def _between_steps(state: StepState, call: str) -> str | None:
    if state.window.is_first:
        return None
    return (
        f"{call} in the middle of a step (rank {state.rank}; {state.window.micro_batches} of {state.window.size} "
        "micro-batches had their backward, the weights are not stepped): expected it between two steps; call "
        "engine.step(), or engine.zero_grad(), first"
    )


def _backward_before(state: StepState, _call: str) -> str | None:
    if state.window.micro_batches:
        return None
    return (
        f"step() without a backward since the last step (rank {state.rank}): call engine.backward(loss) first. A loop "
        "that calls optimizer.step() calls no engine.step(), because either makes the whole step"
    )


def _settled(state: StepState, _call: str) -> str | None:
    if state.phase is not Phase.REDUCED:
        return None
    return (
        f"the ranks have not agreed on the gradients of the last backward (rank {state.rank}), which raised then: "
        "expected engine.zero_grad() on every rank before another backward"
    )


def _unbroken(state: StepState, call: str) -> str | None:
    if state.phase not in {Phase.BACKWARD, Phase.BROKEN}:
        return None
    return _not_stepping_early(state, call) or (
        "the last backward raised, its gradients are incomplete: call engine.zero_grad() on every rank and begin the "
        "window anew"
    )


def _complete(state: StepState, call: str) -> str | None:
    if state.is_agreed:
        return None
    return (
        f"{call}: the window's gradients are not complete (rank {state.rank}; {state.window.micro_batches} of "
        f"{state.window.size} micro-batches had their backward): call it between the backward on the boundary and "
        "step()"
    )


def _not_stepping_early(state: StepState, call: str) -> str | None:
    if not state.must_be_stepped:
        return None
    return (
        f"{call} after the window's last backward, in which buckets are stepped "
        "(offload_optimizer.step_in_backward): expected engine.step() first, or, where that backward raised, "
        "engine.reset() on every rank; or set that key to false"
    )


def _not_updating(state: StepState, _call: str) -> str | None:
    if state.phase not in _BEGUN:
        return None
    finish = "engine.reset() on every rank, which finishes it or says that a checkpoint must be loaded"
    way = "engine.load_checkpoint() on every rank" if state.phase is Phase.LOST else finish
    return (
        "the last step() or load was interrupted during its update, so its accumulation window can be neither "
        f"discarded nor continued: call {way}"
    )


def _resumable(state: StepState, _call: str) -> str | None:
    """One rank may continue its update by itself.

    With several ranks it is not known which buckets have been gathered; ``reset()`` gathers all of them.
    """
    if state.phase not in _BEGUN or (state.ranks == 1 and state.phase is not Phase.LOST):
        return None
    return _not_updating(state, "")


def _untorn(state: StepState, _call: str) -> str | None:
    if state.phase not in {Phase.TORN, Phase.LOST} and state.early is not EarlySteps.TORN:
        return None
    return (
        "the last step() was interrupted inside of the update of a bucket, some of whose weights were stepped: load a "
        "checkpoint"
    )


_NOTHING_STEPPED = (_not_updating, _not_stepping_early)
_ALONE = (_outside_join, _outside_full_params, _outside_editing, _outside_ema)
"""Not inside of a block that other ranks may have open as well."""
_WHOLE = (*_ALONE, *_NOTHING_STEPPED, _replicas_alike)
_AT_REST = (*_ALONE, *_NOTHING_STEPPED, _between_steps)

Call = Literal[
    "any", "backward", "another backward", "agreement", "step()", "update", "zero_grad()", "clip_grad_norm_",
    "full_params(writable=True)", "full_grads", "full_grads(writable=True)", "full_optimizer_state", "state_dict",
    "save_pretrained", "optimizer.state_dict()", "optimizer.load_state_dict()", "load_state_dict", "save_checkpoint",
    "load_checkpoint", "load_checkpoint after an interrupted step", "reset()",
    "add_param_group()", "unfreezing", "offload_states", "close()", "close(restore=False)",
    "optimizer.train() or eval()", "engine.ema()", "engine.join()", "a call of every rank", "saving",
    "step(flush=True)", "another setting", "average_replicas()",
]  # fmt: skip
"""The calls of the user, with "any" for all of them, and steps of the engine inside a call: begin "another backward",
reach the ranks' "agreement" on gradients, and "update" buckets. Needs are checked before a call's first collective.
"""

NEEDS: dict[Call, tuple[_Need, ...]] = {
    "any": (_reloaded,),
    "backward": (_outside_ema, *_NOTHING_STEPPED),
    "another backward": (
        _reloaded,
        _hook_in_step,
        _outside_ema,
        *_NOTHING_STEPPED,
        _unbroken,
        _settled,
        _one_backward_per_micro_batch,
    ),
    "agreement": (_not_updating,),
    "step()": (_outside_ema, _resumable, _unbroken, _backward_before, _outside_full_params, _outside_no_sync),
    "update": (_untorn,),
    "zero_grad()": (_joined_window_whole, *_NOTHING_STEPPED),
    "clip_grad_norm_": (_clipped_by_config, _complete, _not_updating),
    "full_params(writable=True)": _WHOLE,
    "full_grads": (_complete,),
    "full_grads(writable=True)": (_complete, _not_updating, _one_gradient),
    "full_optimizer_state": _WHOLE,
    "state_dict": (
        _outside_join,
        _not_updating,
        _replicas_alike,
    ),
    "save_pretrained": (
        _outside_join,
        _not_updating,
        _replicas_alike,
    ),
    "optimizer.state_dict()": _WHOLE,
    "optimizer.load_state_dict()": (*_AT_REST, _replicas_alike),
    "load_state_dict": _WHOLE,
    "save_checkpoint": (_outside_ema, *_NOTHING_STEPPED, _outside_full_params, _replicas_alike),
    "load_checkpoint": (*_ALONE, _not_stepping_early, _between_steps),
    "load_checkpoint after an interrupted step": _ALONE,
    "reset()": (*_ALONE, _hook_in_step),
    "add_param_group()": (*_AT_REST, _outside_no_sync),
    "unfreezing": (*_AT_REST, _outside_no_sync),
    "optimizer.train() or eval()": (*_AT_REST, _outside_no_sync),
    "engine.ema()": (*_AT_REST, _outside_no_sync, _replicas_alike),
    "average_replicas()": (*_AT_REST, _outside_no_sync),
    "another setting": (*_AT_REST, _hook_in_step),
    "offload_states": _AT_REST,
    "engine.join()": (*_AT_REST, _outside_no_sync, _never_apart),
    "a call of every rank": (_outside_join,),
    "saving": (_nobody_gone,),
    "step(flush=True)": (_outside_join,),
    "close()": (_outside_ema, _outside_full_params),
    "close(restore=False)": _WHOLE,
}
"""The needs of each call; the first one that is missing provides the error."""
