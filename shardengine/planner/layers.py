"""Finds the layers that a model repeats, copies it with fewer of them, and extrapolates moments to all of them.

Owns: which modules are alike, the extrapolation. Must not know: engines, how storages are counted.

[Note: Fewer layers] With each further layer, the storages of a step grow by the same bytes. The moment with the peak
may differ between a shallow and a deep model. So each moment is followed by itself: of the first layers, of the last
ones, and of the modules before and after them, in each phase. Its bytes are a line through two depths. A third depth
checks that line, and one forward of the whole model checks that it keeps as many bytes as predicted. If a check fails,
the whole model runs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from shardengine.planner.ledger import MemoryMoment

AFTER = "after "
"""Prefix of the unit that follows a block."""
NEAR = 1
"""Periods of layers at either end of a model that are followed one by one."""
TOLERANCE = 0.005
"""The error that is allowed for the third depth, carried on to all layers, as a part of the whole model's bytes."""
_LONGEST_PERIOD = 12


def lists_of_blocks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """Yield the outermost lists of two modules or more, by name: a model's layers, or its stages."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(not outer or name.startswith(outer + ".") for outer in inside):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            inside.append(name)
            yield name, module


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in these lists, by name."""
    for path, blocks in lists_of_blocks(model):
        for place, block in enumerate(blocks):
            yield f"{path}.{place}" if path else str(place), block


@dataclass(frozen=True)
class Layers:
    """``count`` layers that are alike, in each of the lists ``paths``, from number ``first`` on.

    period: the layers after which they repeat, for example if some of them have local attention · parameters: of one
    layer, on average.
    """

    paths: tuple[str, ...]
    first: int
    count: int
    period: int
    parameters: int = field(default=0, compare=False)

    def depths(self) -> tuple[int, int, int] | None:
        """Return the depths of three shorter models; None if running these is as much work as running the whole one."""
        least = self.period * 2 * NEAR
        return (least, 2 * least, 3 * least) if 6 * least < self.count else None


def layers_of(model: nn.Module) -> Layers | None:
    """Return the layers that hold most of the model's parameters; None if no layers repeat."""
    found: dict[tuple[int, int, int], list[str]] = {}
    held: dict[tuple[int, int, int], int] = {}
    for path, blocks in lists_of_blocks(model):
        run = _longest_run(_signatures(list(blocks)))
        found.setdefault(run, []).append(path)
        held[run] = held.get(run, 0) + sum(parameter.numel() for parameter in blocks.parameters())
    if not found:
        return None
    first, count, period = most = max(held, key=lambda run: held[run])
    if 2 * held[most] < sum(parameter.numel() for parameter in model.parameters()):
        return None
    number = sum(len(model.get_submodule(path)._modules) for path in found[most])
    return Layers(tuple(found[most]), first, count, period, held[most] // number)


def _signatures(blocks: Sequence[nn.Module]) -> list[Any]:
    """Return values that are equal for layers that compute alike.

    They hold classes, tensors, which tensors are trained, and the attributes that are words, numbers or flags. A number
    that is the layer's own position is left out.
    """
    plain = [list(_attributes(block)) for block in blocks]
    away: set[tuple[str, str]] = set()  # attributes that are not the layer's own position
    for place, told in enumerate(plain):
        away |= {each[:2] for each in told if type(each[2]) is not int or each[2] != place}
    return [
        (tuple(each for each in told if each[:2] in away), _parts(block))
        for told, block in zip(plain, blocks, strict=True)
    ]


def _parts(block: nn.Module) -> tuple[Any, ...]:
    def tensors(module: nn.Module) -> tuple[Any, ...]:
        own = (*module.named_parameters("", False), *module.named_buffers("", False))
        return tuple((key, each.shape, each.dtype, each.requires_grad) for key, each in own)

    return tuple((name, type(module), tensors(module)) for name, module in block.named_modules())


def _attributes(block: nn.Module) -> Iterator[tuple[str, str, Any]]:
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            if (told := _plain(value)) is not None:
                yield name, key, told


def _plain(value: Any) -> Any:
    """Return a value that can be compared, or None if ``value`` does not distinguish layers."""
    if isinstance(value, (bool, int, float, str, BuiltinFunctionType)):
        return value
    if isinstance(value, FunctionType):
        return value.__code__
    if isinstance(value, functools.partial):
        return _plain(value.func), *map(_plain, value.args), *map(_plain, value.keywords.values())
    return tuple(map(_plain, value)) if isinstance(value, tuple) else None


def _longest_run(signatures: Sequence[Any]) -> tuple[int, int, int]:
    """Return (first, count, period) of the longest part that repeats; among equal ones, that of the shortest period."""
    best = (0, 1, 1)
    known: dict[Any, int] = {}
    numbers = [known.setdefault(each, len(known)) for each in signatures]
    for period in range(1, min(_LONGEST_PERIOD, len(numbers) // 2) + 1):
        first = 0
        for place in range(period, len(numbers) + 1):
            if place < len(numbers) and numbers[place] == numbers[place - period]:
                continue
            count = place - first
            if count >= 2 * period and count > best[1]:
                best = (first, count, period)
            first = place - period + 1
    first, count, period = best
    return first, count - count % period, period


def shorter(
    model: nn.Module, layers: Layers, depth: int, copied: Callable[[Mapping[nn.Module, Any]], nn.Module]
) -> nn.Module:
    """Copy the model with the first ``depth`` of its layers.

    copied: copies the model with replacements for some modules.
    """
    gone = nn.Identity()
    cut = range(layers.first + depth, layers.first + layers.count)
    lists = [list(model.get_submodule(path).children()) for path in layers.paths]
    found = copied({blocks[place]: gone for blocks in lists for place in cut})
    for path in layers.paths:
        blocks = found.get_submodule(path)
        assert isinstance(blocks, (nn.ModuleList, nn.Sequential))
        for place in reversed(cut):
            del blocks[place]
    _tell_config(found, layers.count, depth)
    return found


def _tell_config(model: nn.Module, count: int, depth: int) -> None:
    """Set the number of layers in the copy's configs, which models of transformers read."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "num_hidden_layers", None) == count:
            config = copy.copy(config)
            config.num_hidden_layers = depth
            vars(module)["config"] = config


# Extrapolation from shorter models to the whole one

_Spot = tuple[str, str, int]
"""Phase · list and side, or the unit · number from that side."""


def _places(moments: Sequence[MemoryMoment], layers: Layers, depth: int) -> dict[_Spot, MemoryMoment]:
    """Return the moment with the most bytes for each place; of the layers, only those near an end have places."""
    found: dict[_Spot, MemoryMoment] = {}
    for each in moments:
        place = _place(each, layers, depth)
        if place is not None and (place not in found or each.bytes > found[place].bytes):
            found[place] = each
    return found


def _place(moment: MemoryMoment, layers: Layers, depth: int) -> _Spot | None:
    after = AFTER if moment.unit.startswith(AFTER) else ""
    path, _, number = moment.unit.removeprefix(after).rpartition(".")
    if path not in layers.paths or not number.isdecimal():
        return moment.phase, moment.unit, 0
    place = int(number) - layers.first
    near = NEAR * layers.period
    if place < near:
        return moment.phase, f"{after}{path}/", int(number)
    if place >= depth - near:
        return moment.phase, f"{after}{path}/-", depth - place
    return None


def _named(place: _Spot, layers: Layers) -> str:
    """Return the unit's name in the whole model."""
    _, unit, number = place
    if unit.endswith(("/", "/-")):
        path = unit.rstrip("-/")
        at = layers.first + layers.count - number if unit.endswith("-") else number
        return f"{path}{'.' if path.removeprefix(AFTER) else ''}{at}"
    return unit


def line(at: tuple[int, int], values: tuple[float, float], where: int) -> float:
    """Return the value at ``where`` on the line through ``values`` at the depths ``at``."""
    return values[1] + (values[1] - values[0]) * (where - at[1]) / (at[1] - at[0])


def carried_on(
    runs: tuple[Sequence[MemoryMoment], Sequence[MemoryMoment]], at: tuple[int, int], layers: Layers, depth: int
) -> list[MemoryMoment]:
    """Return the moments of a run with ``depth`` layers, from those of two shorter runs (of the last step of each).

    Layers in the middle are left out: their bytes lie between those of the first and the last ones.
    """
    first, second = (_places(each, layers, of) for each, of in zip(runs, at, strict=True))
    found = []
    for place, late in second.items():
        early = first.get(place, late)
        kinds = dict.fromkeys([*late.alive, *early.alive])
        alive = {
            kind: max(0, round(line(at, (early.alive.get(kind, 0), late.alive.get(kind, 0)), depth))) for kind in kinds
        }
        unit = _named(place, replace(layers, count=depth))
        found.append(MemoryMoment(late.phase, alive, unit))
    return found
