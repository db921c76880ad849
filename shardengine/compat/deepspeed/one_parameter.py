"""deepspeed.utils.safe_*: weights, gradients and states of one parameter, whole or this rank's part. All collective.

Owns: the mapping to the engine's calls, the parts. Must not know: how an engine gathers.

[Note: Parts] A rank's part of a parameter at stage 3 is defined as in DeepSpeed: the flat values are cut into equal
parts, one per rank, and the last is padded with zeros. The engine's own shards are different, so every rank must make
these calls as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.compat.deepspeed import gathering, processes
from shardengine.engine import Engine
from shardengine.errors import UsageError

_WEIGHT = "weight"
"""The engine's key of the stepped weight, beside the optimizer's states."""


# Whole


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole weight that the optimizer steps for ``param``, in fp32; None if it steps none."""
    return _state(param, _WEIGHT, "safe_get_full_fp32_param")


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return an optimizer state of ``param``, whole; None if there is none of this name."""
    return _state(param, optim_state_key, "safe_get_full_optimizer_state")


def _state(param: nn.Parameter, optim_state_key: str, call: str) -> Tensor | None:
    engine, name = gathering.holder(param, f"utils.{call}")
    with engine.full_optimizer_state([name]) as states:
        found = None if states[name] is None else states[name].get(optim_state_key)  # type: ignore[union-attr]
        return found.clone() if isinstance(found, Tensor) else found


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient of the step; None if there is none.

    Available between the backward on the accumulation boundary and the step.
    """
    engine, name = gathering.holder(param, "utils.safe_get_full_grad")
    with engine.full_grads([name]) as grads:
        return None if grads[name] is None else torch.clone(grads[name])  # type: ignore[arg-type]


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set the weight that the optimizer steps for ``param``, and the model's weight, to rank 0's whole ``value``."""
    _set_state(param, value, _WEIGHT, "safe_set_full_fp32_param")


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set an optimizer state of ``param`` to rank 0's whole ``value``."""
    _set_state(param, value, optim_state_key, "safe_set_full_optimizer_state")


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the gradient of the step to rank 0's whole ``value``; allowed when ``safe_get_full_grad`` is."""
    engine, name = gathering.holder(param, "utils.safe_set_full_grad")
    _write_grads(engine, {name: lambda _: value})


def safe_update_full_grad_vectorized(param_list: Iterable[nn.Parameter], update_func: Callable[..., Tensor]) -> None:
    """Set the gradient of each parameter that has one to ``update_func(gradient, parameter)``, both whole.

    Every rank calls the function; rank 0's results are used.
    """
    by_engine: dict[int, tuple[Engine, dict[str, Callable[[Tensor], Tensor]]]] = {}
    for param in param_list:
        if param.requires_grad:
            engine, name = gathering.holder(param, "utils.safe_update_full_grad_vectorized")
            made = by_engine.setdefault(id(engine), (engine, {}))[1]
            made[name] = lambda gradient, param=param: update_func(gradient, param)  # type: ignore[misc]
    for engine, changes in by_engine.values():
        _write_grads(engine, changes, skips=True)


def _write_grads(engine: Engine, changes: dict[str, Callable[[Tensor], Tensor]], *, skips: bool = False) -> None:
    """Change whole gradients, by name. skips: ignore parameters without a gradient; otherwise they raise UsageError."""
    with engine.full_grads(list(changes), writable=True) as grads:
        for name, change in changes.items():
            found = grads[name]
            if found is None and not skips:
                raise UsageError(
                    f"safe_set_full_grad: {name!r} has no gradient in this step, so the step leaves it alone; expected "
                    "a parameter that this step's forward has used",
                    code="deepspeed-parameter-without-grad",
                )
            if found is not None:
                found.copy_(_of_shape(change(found), found, name))


def _set_state(param: nn.Parameter, value: Tensor, key: str, call: str) -> None:
    engine, name = gathering.holder(param, f"utils.{call}")
    with engine.full_optimizer_state([name], writable=True) as states:
        entry = states[name]
        found = None if entry is None else entry.get(key)
        if not isinstance(found, Tensor):
            has = "the optimizer does not step it" if entry is None else f"it has {', '.join(map(repr, entry))}"
            raise UsageError(f"{call}: {name!r} has no {key!r}: {has}", code="deepspeed-optimizer-state-unknown")
        found.copy_(_of_shape(value, found, name))


def _of_shape(value: Tensor, found: Tensor, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != found.numel():
        came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(
            f"{name!r}: expected a tensor of shape {tuple(found.shape)}, got {came}", code="full-values-wrong-shape"
        )
    return value.detach().view(found.shape)


# This rank's part ([Note: Parts])


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of ``safe_get_full_fp32_param``; stage 3 only."""
    return _part(param, safe_get_full_fp32_param(_sharded(param, "safe_get_local_fp32_param")))


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of ``safe_get_full_grad``; stage 3 only."""
    return _part(param, safe_get_full_grad(_sharded(param, "safe_get_local_grad")))


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of ``safe_get_full_optimizer_state``; stage 3 only."""
    _sharded(param, "safe_get_local_optimizer_state")
    return _part(param, safe_get_full_optimizer_state(param, optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Do the same as ``safe_set_full_fp32_param``, from each rank's part; stage 3 only."""
    safe_set_full_fp32_param(param, _whole(_sharded(param, "safe_set_local_fp32_param"), value))


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Do the same as ``safe_set_full_grad``, from each rank's part; stage 3 only."""
    safe_set_full_grad(param, _whole(_sharded(param, "safe_set_local_grad"), value))


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Do the same as ``safe_set_full_optimizer_state``, from each rank's part; stage 3 only."""
    whole = _whole(_sharded(param, "safe_set_local_optimizer_state"), value)
    safe_set_full_optimizer_state(param, whole, optim_state_key)


def _sharded(param: nn.Parameter, call: str) -> nn.Parameter:
    engine, name = gathering.holder(param, f"utils.{call}")
    if not hasattr(param, "ds_id"):
        raise UsageError(
            f"{call}: expected stage 3, where a rank has a part of {name!r}, got stage "
            f"{engine.zero_optimization_stage()}; safe_get_full_* and safe_set_full_* are available at every stage",
            code="deepspeed-local-below-stage-3",
        )
    return param


def _part(param: nn.Parameter, whole: Tensor | None) -> Tensor | None:
    if whole is None:
        return None
    engine, _ = gathering.holder(param, "utils.safe_get_local_*")
    size = gathering.part_size(whole.numel(), engine.world_size)
    part = whole.flatten()[engine.rank * size :][:size]
    return torch.cat([part, part.new_zeros(size - part.numel())])


def _whole(param: nn.Parameter, part: Tensor) -> Tensor:
    engine, name = gathering.holder(param, "utils.safe_set_local_*")
    size = gathering.part_size(param.ds_numel, engine.world_size)  # type: ignore[attr-defined]
    if not isinstance(part, Tensor) or part.numel() != size:
        came = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
        raise UsageError(
            f"{name!r}: expected this rank's part, a tensor of {size} elements, got {came}",
            code="deepspeed-part-wrong-size",
        )
    part = part.to(engine.device)
    parts = [torch.empty_like(part) for _ in range(engine.world_size)]
    if engine.world_size == 1:
        parts = [part]
    else:
        processes.OF_TORCH["all_gather"](parts, part.detach().contiguous())
    return torch.cat([each.flatten() for each in parts])[: param.ds_numel].view(param.ds_shape)  # type: ignore[attr-defined]


NAMES: dict[str, Any] = {
    f"utils.{each.__name__}": each
    for each in (
        *(safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state),
        *(safe_set_full_fp32_param, safe_set_full_grad, safe_set_full_optimizer_state),
        *(safe_get_local_fp32_param, safe_get_local_grad, safe_get_local_optimizer_state),
        *(safe_set_local_fp32_param, safe_set_local_grad, safe_set_local_optimizer_state),
        safe_update_full_grad_vectorized,
    )
}
"""Dotted name → the object."""
