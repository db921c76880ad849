"""Layers that a model repeats, a copy with fewer of them, and what a run with all of them needs.

Owns: which modules are alike, how needs follow from those of shorter models. Must not know: engines, how is counted.

[Note: Fewer layers] What a step keeps grows with each layer by the same bytes, and who needs most may be another moment
in a deep model than in a shallow one. So each moment is followed by itself: the first layers, the last ones, what is
before and after them, in each phase. Its bytes are a line through two depths. A third depth shows whether that holds,
and one forward of the whole model whether it keeps as much as is said; where not, the whole model runs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

from shardengine.planner.ledger import Moment

AFTER = "after "
"""Begins the unit of what comes behind a block."""
NEAR = 1
"""Periods of layers at either end of a model that are followed each by itself."""
TOLERANCE = 0.005
"""Of the whole model's bytes: by so much the third depth may be off the line, carried on to all layers."""
_LONGEST_PERIOD = 12


def lists_of_blocks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    """The outermost lists of two modules or more, by name: a model's layers, or stages."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(not outer or name.startswith(outer + ".") for outer in inside):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            inside.append(name)
            yield name, module


def blocks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those in these lists, by name."""
    for path, blocks in lists_of_blocks(model):
        for place, block in enumerate(blocks):
            yield f"{path}.{place}" if path else str(place), block


@dataclass(frozen=True)
class Layers:
    """``count`` layers that are alike, in each of the lists ``paths``, from number ``first`` on. period: layers after
    which they repeat, as where attention is local in some of them · parameters: of one, on average."""

    paths: tuple[str, ...]
    first: int
    count: int
    period: int
    parameters: int = field(default=0, compare=False)

    def depths(self) -> tuple[int, int, int] | None:
        """Of three shorter models; None where they are not less work together than the whole one."""
        least = self.period * 2 * NEAR
        return (least, 2 * least, 3 * least) if 6 * least < self.count else None


def layers_of(model: nn.Module) -> Layers | None:
    """Those that hold most of the model's parameters; None where nothing repeats."""
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
    """Equal for layers that compute alike: classes, tensors, what of these is trained, and what of their attributes is
    a word, a number or a flag; numbers that are the layers' own places are none."""
    plain = [list(_attributes(block)) for block in blocks]
    away: set[tuple[str, str]] = set()  # which are another's than its place
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
    """What tells it from others, by value; None: it says nothing."""
    if isinstance(value, (bool, int, float, str, BuiltinFunctionType)):
        return value
    if isinstance(value, FunctionType):
        return value.__code__
    if isinstance(value, functools.partial):
        return _plain(value.func), *map(_plain, value.args), *map(_plain, value.keywords.values())
    return tuple(map(_plain, value)) if isinstance(value, tuple) else None


def _longest_run(signatures: Sequence[Any]) -> tuple[int, int, int]:
    """(first, count, period) of the longest part that repeats itself; the shortest period of such."""
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
    """A copy with the first ``depth`` of its layers. copied: copies the model with what is given in the place of some
    modules."""
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
    """A model of transformers reads its number of layers."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "num_hidden_layers", None) == count:
            config = copy.copy(config)
            config.num_hidden_layers = depth
            vars(module)["config"] = config


# From shorter models to the whole one

_Spot = tuple[str, str, int]
"""Phase · list and side, or the unit · number from that side."""


def _places(moments: Sequence[Moment], layers: Layers, depth: int) -> dict[_Spot, Moment]:
    """Of each place the moment with most bytes; of the layers those near an end."""
    found: dict[_Spot, Moment] = {}
    for each in moments:
        place = _place(each, layers, depth)
        if place is not None and (place not in found or each.bytes > found[place].bytes):
            found[place] = each
    return found


def _place(moment: Moment, layers: Layers, depth: int) -> _Spot | None:
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
    """The unit in the whole model."""
    _, unit, number = place
    if unit.endswith(("/", "/-")):
        path = unit.rstrip("-/")
        at = layers.first + layers.count - number if unit.endswith("-") else number
        return f"{path}{'.' if path.removeprefix(AFTER) else ''}{at}"
    return unit


def line(at: tuple[int, int], values: tuple[float, float], where: int) -> float:
    """The value at ``where`` of what is ``values`` at the depths ``at``."""
    return values[1] + (values[1] - values[0]) * (where - at[1]) / (at[1] - at[0])


def carried_on(
    runs: tuple[Sequence[Moment], Sequence[Moment]], at: tuple[int, int], layers: Layers, depth: int
) -> list[Moment]:
    """The moments of a run with ``depth`` layers, by those of two shorter ones (of the last step of each). Layers in
    the middle are not in it: they lie between the first ones and the last ones."""
    first, second = (_places(each, layers, of) for each, of in zip(runs, at, strict=True))
    found = []
    for place, late in second.items():
        early = first.get(place, late)
        kinds = dict.fromkeys([*late.alive, *early.alive])
        alive = {
            kind: max(0, round(line(at, (early.alive.get(kind, 0), late.alive.get(kind, 0)), depth))) for kind in kinds
        }
        unit = _named(place, replace(layers, count=depth))
        found.append(Moment(late.phase, alive, unit))
    return found
