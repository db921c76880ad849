"""Match an unsharded optimizer of DeepSpeed's stage 0, whose state has no parameter names, with the model's parameters.

Owns: that assignment. An optimizer's state dict numbers its parameters. It has names only if the optimizer was made
from named parameters. Otherwise each group is assumed to follow the order of the model. Shapes (and, in half precision,
master weights, which must round to the model's) then determine the assignment; it is used only if exactly one is
possible. It is right if the optimizer was made in the model's order, as from ``model.parameters()``. Parameters that
only the order distinguishes are noted. Must not know: files.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardengine.interchange.foreign import digest
from shardengine.interchange.shards import ShardRow, steps_of
from shardengine.sharding import WEIGHT

_MOST_WAYS = 50_000


@dataclass(frozen=True)
class _Group:
    """One optimizer group: its states as a list of dicts, and master weights; flat: all in one vector each."""

    states: list[Mapping[str, Any]]
    masters: list[Tensor] | None
    options: Mapping[str, Any]
    flat: bool

    @property
    def end(self) -> int:
        """The end position of its last parameter, in elements if flat, else in parameters."""
        return self.masters[0].numel() if self.flat and self.masters else len(self.states)

    def after(self, position: int, weight: Tensor) -> int | None:
        """Return the position after ``weight`` if it can be the parameter at ``position``, else None."""
        if position >= self.end:
            return None
        if self.masters is None:
            state = self.states[position]
            fits = {tuple(state[name].shape) for name in _tensors(state)} <= {tuple(weight.shape)}
        elif self.flat:
            part = self.masters[0][position : position + weight.numel()]
            fits = part.numel() == weight.numel() and _rounds_to(part, weight)
        else:
            fits = self.masters[position].shape == weight.shape and _rounds_to(self.masters[position], weight)
        if not fits:
            return None
        return position + (weight.numel() if self.flat else 1)


def rows_of(
    optimizer: Mapping[str, Any], weights: Mapping[str, Tensor], default_steps: int, notes: list[str]
) -> dict[str, ShardRow] | None:
    """Return parameter name → its row in the optimizer; None if no assignment fits, or several do.

    optimizer: the state dict of a torch optimizer, or of DeepSpeed's for half precision · weights: the model's
    parameters by first name, in order · notes: assumptions are added to it
    """
    groups = _groups(optimizer)
    if groups is None:
        return None
    named = [group.options.get("param_names") for group in groups]
    if all(isinstance(names, list) for names in named):
        found = [[(name, index) for index, name in enumerate(names or []) if name in weights] for names in named]
        if any(len(rows) != len(group.states) for rows, group in zip(found, groups, strict=True)):
            return None
    else:
        assigned = _assign(groups, weights)
        if assigned is None:
            return None
        found = assigned
        _note_order(groups, {name for rows in assigned for name, _ in rows}, weights, notes)
    return {
        name: _row(number, group, position, weights[name], default_steps)
        for number, (group, rows) in enumerate(zip(groups, found, strict=True))
        for name, position in rows
    }


def _groups(optimizer: Mapping[str, Any]) -> list[_Group] | None:
    inner = optimizer.get("optimizer_state_dict", optimizer)
    state, options = inner.get("state"), inner.get("param_groups")
    flats, lists = optimizer.get("fp32_groups_flat"), optimizer.get("fp32_groups")
    if not isinstance(state, Mapping) or not isinstance(options, list):
        return None
    groups = []
    for number, group in enumerate(options):
        states = [state.get(index, {}) for index in group["params"]]
        masters = [flats[number].detach()] if flats is not None else None
        if lists is not None:
            masters = [master.detach() for master in lists[number]]
        if masters is not None and len(masters) != len(states):
            return None
        groups.append(_Group(states, masters, group, flats is not None))
    return groups


def _assign(groups: Sequence[_Group], weights: Mapping[str, Tensor]) -> list[list[tuple[str, int]]] | None:
    """Return the (name, position) pairs of each group; None unless exactly one assignment in model order fills all."""
    ways: dict[tuple[int, ...], tuple[int, Any]] = {tuple(0 for _ in groups): (1, None)}
    in_elements, end = any(group.flat for group in groups), tuple(group.end for group in groups)
    left = sum(weight.numel() if in_elements else 1 for weight in weights.values())
    for name, weight in weights.items():
        left -= weight.numel() if in_elements else 1
        following: dict[tuple[int, ...], tuple[int, Any]] = {}
        for positions, (count, path) in ways.items():
            choices: list[tuple[tuple[int, ...], Any]] = [(positions, path)]  # it is frozen
            for number, group in enumerate(groups):
                behind = group.after(positions[number], weight)
                if behind is not None:
                    moved = (*positions[:number], behind, *positions[number + 1 :])
                    choices.append((moved, (path, number, name, positions[number])))
            for key, trail in choices:
                if sum(end) - sum(key) <= left:  # the remaining parameters can fill the rest of the groups
                    before = following.get(key, (0, trail))
                    following[key] = (before[0] + count, before[1])
        if len(following) > _MOST_WAYS:
            return None
        ways = following
    count, path = ways.get(end, (0, None))
    if count != 1:
        return None
    found: list[list[tuple[str, int]]] = [[] for _ in groups]
    while path is not None:
        path, number, name, position = path
        found[number].insert(0, (name, position))
    return found


def _note_order(groups: Sequence[_Group], taken: set[str], weights: Mapping[str, Tensor], notes: list[str]) -> None:
    """Note sets of parameters that fit in each other's place, if at least one of a set was ``taken``."""
    flat = any(group.flat for group in groups)
    alike = _alike(weights, lambda weight: weight.numel() if flat else tuple(weight.shape))
    if any(group.masters is not None for group in groups):  # a master weight fits a weight that it rounds to
        alike = [names for row in alike for names in _alike({name: weights[name] for name in row}, digest)]
    doubtful = [" and ".join(_some(names, 4)) for names in alike if taken.intersection(names)]
    if doubtful:
        notes.append(
            "optimizer state: at stage 0 it does not say which parameters it steps. Assumed is the order of the model; "
            f"nothing else tells apart {'; '.join(_some(doubtful, 4))}. If the optimizer was made from parameters in "
            "another order, these are mixed up: save from stage 1 instead"
        )


def _alike(weights: Mapping[str, Tensor], form: Callable[[Tensor], Hashable]) -> list[list[str]]:
    """Return the names of weights with equal ``form``, as lists of at least two."""
    found: dict[Hashable, list[str]] = {}
    for name, weight in weights.items():
        found.setdefault(form(weight), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _some(texts: list[str], count: int) -> list[str]:
    return [*texts[:count], *([f"{len(texts) - count} more"] if len(texts) > count else [])]


def _rounds_to(master: Tensor, weight: Tensor) -> bool:
    return torch.equal(master.reshape(-1).to(weight.dtype), weight.reshape(-1))


def _tensors(state: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, value in state.items() if isinstance(value, Tensor) and name != "step")


def _row(number: int, group: _Group, position: int, weight: Tensor, default_steps: int) -> ShardRow:
    state, shape = group.states[0 if group.flat else position], tuple(weight.shape)

    def read(name: str) -> Tensor:
        if name != WEIGHT:
            whole = state[name]
        else:
            whole = weight if group.masters is None else group.masters[0 if group.flat else position]
        if group.flat:
            whole = whole.reshape(-1)[position : position + prod(shape)]
        return whole.detach().to(torch.float32).reshape(shape)

    steps = steps_of(state, group.options, default_steps, "optimizer state of stage 0")
    return ShardRow(shape, number, steps, _tensors(state), read)
