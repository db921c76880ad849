"""The update of one bucket, on the device that its states are stepped on. Owns: which buckets an update has done, and
which elements are stepped together.

Must not know: param_groups, the norm, the order of buckets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardengine.config import Config
from shardengine.ddp import GradientBucket
from shardengine.errors import InternalError
from shardengine.kernels import Span, Spans
from shardengine.offload import HOST, NOW, CopyQueue, Done, Fetched
from shardengine.optim.arithmetic import UPDATE, Action
from shardengine.optim.loss_scale import LossScaler
from shardengine.sharding import MASTER, Bucket, Layout, Precision

_UNDER_WAY = 2
"""Buckets whose weights may be in flight while the next one is stepped."""


@dataclass(frozen=True)
class StepSettings:
    """The settings of the config about steps.

    max_norm: 0 for no clipping · norm_type: the order of that norm · max_value: of an element's magnitude, 0 for no
    clipping · seed: of stochastic rounding, None for none · scaler: of the loss; it decides which steps are skipped;
    None: none is · fp16: whether training is in fp16; a NaN norm then counts as an overflow · in_backward: offloaded
    buckets are stepped as soon as their gradients are complete · decay: of moving averages of the weights; None: there
    are none.
    """

    max_norm: float = 0.0
    seed: int | None = None
    scaler: LossScaler | None = None
    fp16: bool = False
    in_backward: bool = False
    decay: float | None = None
    norm_type: float = 2.0
    max_value: float = 0.0

    @classmethod
    def of(cls, config: Config, which: Precision) -> StepSettings:
        """Return the settings of ``config``. which: its precision."""
        in_backward = config.zero_optimization.offload_optimizer.step_in_backward
        scaler = None if which.scaling is None else LossScaler(which.scaling)
        return cls(
            max_norm=config.gradient_clipping,
            seed=which.seed,
            scaler=scaler,
            fp16=which.trains_fp16,
            in_backward=in_backward,
            decay=config.ema.decay,
            norm_type=float(config.gradient_clipping_norm_type),
            max_value=config.gradient_clipping_value,
        )


Part = tuple[Action, Spans]
"""The spans of a bucket that have one group and step count."""


class Verdict:
    """Whether a step was applied. The device decides it in the update; the host knows it when it asks.

    squares: of the norm of each parameter's gradient, fp64 [parameters] on the device; None: not known · is_late:
    whether the host would have to wait for the verdict, which is the same on every rank.
    """

    def __init__(self, skipped: Fetched | None, squares: Tensor | None, *, is_late: bool = False) -> None:
        """skipped: a flag on its way to the host; None: the step was applied."""
        self._skipped = skipped
        self.squares = squares
        self.is_late = is_late

    @functools.cached_property
    def applied(self) -> bool:
        """Whether it was applied; the host waits only for the device's work that precedes the update."""
        return self._skipped is None or not bool(self._skipped.get())


@dataclass
class Update:
    """The update of the window's step: its inputs and its progress, so that ``reset()`` can finish it.

    max_norm: to clip this one to, None for the configured value · norm_type: the order of its norm, likewise · scalars,
    on the device: "factor" of the gradients (None: 1), and "skip", whether the step is skipped because the norm is not
    finite (None: no) · verdict: on "skip", for the host · touched: the parameters whose step counts have advanced ·
    stepped: the number of buckets that are done, weights included · settled: whether the host has acted on the verdict
    · returned: results from the owners of whole matrices, by bucket; None: they have not been requested
    """

    max_norm: float | None = None
    norm_type: float | None = None
    scalars: dict[str, Tensor | None] = field(default_factory=lambda: {"factor": None, "skip": None})
    verdict: Verdict = field(default_factory=lambda: Verdict(None, None))
    touched: frozenset[int] = frozenset()
    stepped: int = 0
    settled: bool = False
    returned: dict[int, Tensor] | None = None
    _moved: dict[torch.device, dict[str, Tensor | None]] = field(default_factory=dict)

    def begin(self, touched: frozenset[int], *, factor: Tensor | None, skip: Tensor | None, verdict: Verdict) -> None:
        """Begin the step."""
        self.touched = touched
        self.scalars = {"factor": factor, "skip": skip}
        self.verdict = verdict
        self._moved.clear()

    def take_returned(self, returned: dict[int, Tensor]) -> None:
        """Store all results from the owners of matrices: nothing else of this update depends on another rank."""
        self.returned = returned

    def given(self, bucket: int) -> dict[str, Tensor]:
        """Return the part of those results for the actions of bucket number ``bucket``."""
        found = (self.returned or {}).get(bucket)
        return {} if found is None else {UPDATE: found}

    def bucket_stepped(self) -> None:
        """Record that one more bucket is done, weights included."""
        if self.returned is not None:
            self.returned.pop(self.stepped, None)
        self.stepped += 1

    def settle(self) -> bool:
        """Return whether the step was applied, and record that the host acts on it."""
        applied = self.verdict.applied
        self.settled = True
        return applied

    def clip_by(self, norm_type: float) -> None:
        """Use a norm of another order for this step."""
        self.norm_type = norm_type

    def clip_to(self, max_norm: float) -> None:
        """Clip this step to ``max_norm``; results computed from the gradient before are dropped."""
        self.max_norm = max_norm
        self.returned = None

    def scalars_on(self, device: torch.device) -> dict[str, Tensor | None]:
        """Return the scalars on ``device``. They are moved once, because a move waits for the other device."""
        if device not in self._moved:
            moved = {name: None if value is None else value.to(device) for name, value in self.scalars.items()}
            self._moved[device] = moved
        return self._moved[device]


@dataclass(frozen=True)
class BucketWork:
    """The actions of a step on a bucket. parts: on weights and states · before, after: on states alone · given: other
    tensors that the actions read, by name."""

    parts: Sequence[Part]
    before: Sequence[Part] = ()
    after: Sequence[Part] = ()
    given: Mapping[str, Tensor] = field(default_factory=dict)


def step_bucket(
    bucket_grad: GradientBucket, work: BucketWork, update: Update, way: CopyQueue, tear: Callable[[], None]
) -> None:
    """Step this rank's part of a bucket, part by part, on the device of its states; then copy the weights back.

    way: copies weights that are kept on another device than the states · tear: called just before the first element is
    written.
    """
    with bucket_grad.gradient_to_step() as gradient:
        rewrite_bucket(bucket_grad.bucket, work, {"gradient": gradient, **work.given}, update.scalars_on, way, tear)


def rewrite_bucket(
    bucket: Bucket,
    work: BucketWork,
    given: Mapping[str, Tensor],
    scalars_on: Callable[[torch.device], dict[str, Tensor | None]],
    way: CopyQueue,
    tear: Callable[[], None] = lambda: None,
) -> None:
    """Do ``work`` on a bucket. given: tensors in addition to the weights and states: a gradient, or none. See
    ``step_bucket``."""
    store = bucket.state_store
    with store.checkout() as held:
        flats, apart, low, has_master = {**held, **given}, bucket.steps_elsewhere, None, MASTER in held
        weights = near = bucket.begin_weights(blank=has_master)
        if apart:
            near = way.buffer(weights.numel(), weights.dtype, on_host=store.away)
        if has_master:
            flats["weight"], low = flats.pop(MASTER), near
            if bucket.writes_file:
                near.copy_(flats["weight"])  # elements that no group steps keep their values
        else:
            flats["weight"] = near
            if apart and store.away:
                raise InternalError(f"weights without masters are stepped where they rest: {bucket.layout.names}")
            if apart:
                bucket.flat_buffer.platform.loads.copy(weights, near).wait()
        if work.parts:
            tear()
        compute(flats, work, low, scalars_on(store.device))
        changed, end = True, NOW
        if low is not None and (apart or bucket.writes_file):
            changed = not is_set(scalars_on(HOST)["skip"])
        if apart:
            whole = low is None or bucket.writes_file
            pairs = [(near, weights)] if whole else written(near, weights, work.parts)
            end = send(pairs if changed else (), near, way, from_host=store.away)
        bucket.end_weights(changed=changed, after=end)


def compute(flats: dict[str, Tensor], work: BucketWork, low: Tensor | None, scalars: dict[str, Tensor | None]) -> None:
    """Run the actions of a bucket on the device of ``flats`` (as in ``kernels.update``). low: receives the weights."""
    copied = low is not None and flats["weight"].dtype is not torch.float32
    if low is not None and not copied:
        flats["low"] = low
    for action, spans in (*work.before, *work.parts, *work.after):
        action(flats, spans, **scalars)
    if low is not None and copied:  # weights that were rounded at random must not be rounded again
        low.copy_(flats["weight"])


def written(low: Tensor, target: Tensor, parts: Sequence[Part]) -> list[tuple[Tensor, Tensor]]:
    """Return the slices of ``low`` that ``parts`` have written, each with its place in ``target``."""
    return [(low[s.start : s.end], target[s.start : s.end]) for _, spans in parts for s in spans]


def send(pairs: Sequence[tuple[Tensor, Tensor]], low: Tensor, way: CopyQueue, *, from_host: bool) -> Done:
    """Copy the first of each pair, a part of ``low``, to the second; then return ``low`` to the pool.

    Return the end of the copies. If ``from_host``, the device's later work waits for them.
    """
    ends = way.send(pairs, low)
    for end in ends if from_host else ():
        end.wait()
    way.settle(_UNDER_WAY)
    return ends[-1] if ends else NOW


def is_set(flag: Tensor | None) -> bool:
    """Whether a flag on a device is set; None: no."""
    return flag is not None and bool(flag)


Label = tuple[int, int]
"""A parameter group and a step count."""
_PATTERNS = 4
"""Patterns that are cached: of the last step, of a step of everything (``step_in_backward``), of the averaged
parameters, and of those whose average begins."""


class Segments:
    """Cuts this rank's part of ``buckets`` into spans that have one label. numbered: each element has a number of its
    own, so spans lie in single parameters."""

    def __init__(self, layout: Layout, buckets: Sequence[Bucket], *, numbered: bool) -> None:
        self._layout = layout
        self._buckets = buckets
        self._numbered = numbered
        self._made: dict[tuple[Label | None, ...], list[dict[Label, Spans]]] = {}

    def of(self, labels: Sequence[Label | None]) -> list[dict[Label, Spans]]:
        """Return the spans by label, per bucket. labels: per parameter of the layout; None for one that is not stepped.

        Labels change with every step, but the differences between their counts, and so the spans, almost never.
        """
        base = min((label[1] for label in labels if label is not None), default=0)
        pattern = tuple(None if label is None else (label[0], label[1] - base) for label in labels)
        if pattern not in self._made:
            if len(self._made) == _PATTERNS:
                self._made.clear()
            self._made[pattern] = [self._cut(bucket, pattern) for bucket in self._buckets]
        return [{(group, lag + base): spans for (group, lag), spans in cut.items()} for cut in self._made[pattern]]

    def _cut(self, bucket: Bucket, pattern: Sequence[Label | None]) -> dict[Label, Spans]:
        layout, (first, last) = bucket.layout, bucket.state_interval
        found: dict[Any, list[Span]] = {}
        if self._numbered:
            for piece in self._layout.pieces_within(layout, (first, last)):
                if (own := pattern[piece.parameter]) is not None:
                    number = self._layout.parameters[piece.parameter].number + piece.offset
                    found.setdefault(own, []).append(Span(piece.start - first, piece.end - first, number))
        else:
            for label, start, end in self._layout.segments(layout, (first, last), pattern.__getitem__):
                found.setdefault(label, []).append(Span(start - first, end - first))
        return {label: Spans(spans) for label, spans in found.items()}
