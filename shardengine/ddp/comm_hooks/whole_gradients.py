"""Hooks of the user's, in the form of torch's DDP: a function that gets a bucket's gradient of this rank, and returns
that of all ranks.

Must not know: where the result is kept.

[Note: Work begun by a hook] A hook's own collectives are matched by their order, and nobody here knows them. They are
in step if every rank has made as many calls of the hook, and all of these have ended well. If a call has raised, it is
not known which collectives it had begun before. A step that all ranks have completed shows that they were in step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.ddp.comm_hooks.hook import CommHook
from shardengine.errors import UsageError


class GradBucket:
    """The argument of such a hook, with the methods of ``torch.distributed.GradBucket``.

    A parameter may lie in several buckets: if it is cut, ``gradients`` has a flat part of it.
    """

    def __init__(
        self, index: int, last: bool, buffer: Tensor, gradients: Sequence[Tensor], parameters: Sequence[nn.Parameter]
    ) -> None:
        self._index, self._last, self._buffer = index, last, buffer
        self._gradients, self._parameters = list(gradients), list(parameters)

    def index(self) -> int:
        """Return the bucket's number, the same in every step, until parameters are frozen or unfrozen.

        The first backward reduces buckets from 0 on; later ones use the order of their readiness in the first.
        """
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last one that is reduced in this backward."""
        return self._last

    def buffer(self) -> Tensor:
        """Return the whole bucket, flat: gradients, with zeros between them.

        It is the sum over the micro-batches that were not reduced.
        """
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer by ``buffer``, which the engine does not read."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer, in the order of ``parameters``."""
        return self._gradients

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the gradients."""
        return self._parameters


class WholeGradients(CommHook):
    """A hook ``function(state, bucket)`` that returns the mean over ranks of the bucket's buffer, or a future of it.

    torch's hooks have this form: ``torch.distributed.algorithms.ddp_comm_hooks``.
    """

    name = "a function"

    def __init__(self, state: Any, function: Callable[[Any, Any], Any]) -> None:
        self._state, self._function = state, function
        self._step, self._calls, self._failed = 0, 0, False
        self._under_way: list[torch.futures.Future[Any]] = []

    @property
    def makes_messages(self) -> bool:
        """It makes none."""
        return False

    def bytes_of(self, elements: int) -> int:
        """Return 0: the bytes are not known, and not counted."""
        return 0

    def begin_step(self, number: int) -> None:
        """Note the number of completed updates; a new one shows that the hook's collectives were in step."""
        if number > self._step:
            self._step, self._failed = number, False
            self._under_way.clear()

    def start_again(self) -> None:
        """Stop waiting for calls in flight."""
        self._under_way.clear()

    def calls(self, wait_s: float) -> int | None:
        """Return the number of calls; None if one has failed, or does not end within ``wait_s``."""
        deadline = time.monotonic() + wait_s
        for future in self._under_way:
            while not future.done() and time.monotonic() < deadline:
                time.sleep(0.01)
            self._failed |= not future.done() or FutureWork(future).error is not None
        return None if self._failed else self._calls

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    def begin(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Call the function; return its future."""
        self._calls += 1
        with self._noting():
            future = self._future_of(self._function(self._state, bucket))
        self._under_way.append(future)
        return future

    def _future_of(self, given: Any) -> torch.futures.Future[Any]:
        if isinstance(given, Tensor):
            ready: torch.futures.Future[Any] = torch.futures.Future()
            ready.set_result(given)
            return ready
        if not (hasattr(given, "add_done_callback") and hasattr(given, "wait")):
            cure = " (of a collective that is under way: .get_future())" if hasattr(given, "get_future") else ""
            raise UsageError(
                f"the communication hook {self.label} returned {type(given).__name__}: expected a tensor, or a future "
                f"of one{cure}",
                code="hook-returned-no-tensor",
            )
        future: torch.futures.Future[Any] = given
        return future

    def require_whole(self, full: Tensor, elements: int) -> None:
        """Raise ``UsageError`` if the hook has resized its buffer."""
        if full.numel() != elements:
            self._failed = True
            raise UsageError(
                f"the communication hook {self.label} has resized the bucket's buffer to {full.numel()} elements: "
                f"expected it to keep its {elements}, and to return another tensor",
                code="hook-resized-bucket",
            )

    def result(self, future: torch.futures.Future[Any], like: Tensor) -> Tensor:
        """Return the result of ``begin``: as long as ``like``, flat."""
        with self._noting():
            given = self._result(future, like)
        self._under_way.remove(future)
        return given

    def _result(self, future: torch.futures.Future[Any], like: Tensor) -> Tensor:
        given = future.wait()
        if isinstance(given, (list, tuple)) and len(given) == 1:
            given = given[0]
        fits = isinstance(given, Tensor) and given.numel() == like.numel()
        if not fits or given.device != like.device or not given.dtype.is_floating_point:
            came = type(given).__name__
            if isinstance(given, Tensor):
                came = f"{given.numel()} elements of {given.dtype} on {given.device}"
            raise UsageError(
                f"the communication hook {self.label} gave {came}: expected a tensor of the bucket's {like.numel()}, "
                f"of a floating dtype on {like.device}",
                code="hook-result-does-not-fit",
            )
        return given.detach().reshape(-1)

    @property
    def label(self) -> str:
        """The name of the function."""
        return getattr(self._function, "__name__", type(self._function).__name__)


class FutureWork:
    """A future with the interface of torch's Work, including a timeout. ``WholeGradients.result`` raises its error."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self._future = future
        self._is_there = threading.Event()
        future.add_done_callback(lambda _: self._is_there.set())

    def is_completed(self) -> bool:
        """Return whether the future is done."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """The error of the future, once it is done."""
        try:
            self._future.value()
        except Exception as error:
            return error
        return None

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future."""
        return self._future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the future is done; RuntimeError after ``timeout``."""
        if not self._is_there.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("the future is not there yet")
        return True
