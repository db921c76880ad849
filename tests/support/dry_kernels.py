"""Kernels of the meta device, which compute nothing: what each is given has to lie there, all of it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardengine.kernels import operations


def _require_meta(*tensors: Tensor | None) -> None:
    places = {tensor.device.type for tensor in tensors if tensor is not None}
    if places != {"meta"}:
        raise AssertionError(f"a kernel was given tensors on {', '.join(sorted(places))}: expected all on meta")


def _flatten(tensors: Any, starts: Any, out: Tensor, **_: Any) -> None:
    _require_meta(*tensors, out)


def _unflatten(flat: Tensor, starts: Any, outs: Any) -> None:
    _require_meta(flat, *outs)


def _ordered_sum(
    terms: Any, out: Tensor, *, total: Tensor | None = None, nonfinite: Tensor | None = None, **_: Any
) -> None:
    _require_meta(*terms, out, total, nonfinite)


def _sum_of_squares(tensor: Tensor) -> Tensor:
    _require_meta(tensor)
    return torch.zeros((), dtype=torch.float64, device=tensor.device)


def _update(
    flats: Any, spans: Any, rule: Any, *, factor: Tensor | None = None, skip: Tensor | None = None, noise: Any = None
) -> None:
    _require_meta(*flats.values(), factor, skip)


_KERNELS: Any = types.SimpleNamespace(
    flatten=_flatten, unflatten=_unflatten, ordered_sum=_ordered_sum, sum_of_squares=_sum_of_squares, update=_update
)


@contextmanager
def served() -> Iterator[None]:
    """Inside they serve the meta device; other devices have their own kernels, as before."""
    others = operations.implementation
    with mock.patch.object(
        operations, "implementation", lambda device: _KERNELS if device.type == "meta" else others(device)
    ):
        yield
