"""Chooses the modules that are gathered as one if the config names none: a walk from the model down to a good size.

Must not know: the places of parameters, hooks, stages. It does not change the model.

[Note: Granularity] A unit costs a collective for each gather, and its weights are whole while it runs. The walk starts
at the model and stops at modules that are worth a unit:

- Blocks are units: several modules of one class and about one size in the same container. In other modules, blocks
  are attributes whose names differ in a number, as block1 and block2. A block is not a unit if it is more than a
  quarter of the model and can be split (two towers, a stage of a convolutional network).
- Other modules are units if they are at most an eighth of the model and have at most ``_LARGEST`` elements. Larger ones
  are split into their children. A module that cannot be split is a unit as it is: mostly embeddings and heads.
- A small module or model without repetition is left whole. It may choose among its parts by its data, and all ranks
  must gather the same parts.
- Tiny modules stay in the unit around them, or in the root.

A module whose own forward is not called cannot be a unit. These are containers, and children of torch's own modules,
which read their weights (``nn.MultiheadAttention``, the fast path of ``nn.TransformerEncoderLayer``). For the same
reason containers of experts are not split: ranks route to different experts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

_PARTS = 8
"""A module without repetition is split while it is more than this part of the model."""
_BLOCK_PARTS = 4
"""A repeated module is split while it is more than this part of the model, and more than ``_LEAST_SPLIT``."""
_LARGEST = 1 << 24
"""Elements above which a module without repetition is split in a model of any size: about the prefetch's default."""
_LEAST_SPLIT = 1 << 20
"""Elements up to which a repeated module, or a module without repetition, is left whole."""
_TINY = 1 << 16
"""Elements below which a single module, or all of a group of repeated ones, is no unit in a large model."""
_TINY_PARTS, _TINY_GROUP_PARTS = 10, 64
"""The same for small models: below this part of the model."""
_TINY_BLOCK_PARTS, _TINY_BLOCK = 256, 1 << 14
"""The same for each one of a group, in small and in large models."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SPLIT_OF_TORCH = (nn.Sequential, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)
"""torch's modules that call their children."""


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of ``module``; if ``torch.compile`` wrapped it, the class of the module inside."""
    if isinstance(module, torch.jit.ScriptModule):
        return type(module)
    inner = module._modules.get("_orig_mod")
    return type(module) if inner is None else class_of(inner)


def automatic_units(model: nn.Module, classes: Collection[str]) -> set[int]:
    """Return the id() of each module that is a unit ([Note: Granularity]).

    classes: names of classes that are never split.
    """
    return _Walk(model, classes).chosen


class _Walk:
    """One walk. ``chosen``: id() of the units; ``_sizes``: id(module) → elements that no other module has."""

    def __init__(self, model: nn.Module, classes: Collection[str]) -> None:
        self._classes = classes
        self._sizes = _sizes(model)
        total = self._sizes[id(model)]
        self._largest = min(total // _PARTS, _LARGEST)
        self._largest_block = max(total // _BLOCK_PARTS, _LEAST_SPLIT)
        self._tiny = min(total // _TINY_PARTS, _TINY)
        self._tiny_group = min(total // _TINY_GROUP_PARTS, _TINY)
        self._tiny_block = min(total // _TINY_BLOCK_PARTS, _TINY_BLOCK)
        self._seen = {id(model)}
        self.chosen: set[int] = set()
        if not self._may_choose(model):
            self._split(model)

    def _split(self, module: nn.Module) -> None:
        """Decide on the children of ``module``, which is no unit."""
        for group in self._groups(module):
            total = sum(self._sizes[id(child)] for child in group)
            for child in group:
                if id(child) not in self._seen:
                    self._seen.add(id(child))
                    alike = self._has_like(child, group)
                    if alike or not isinstance(module, nn.ModuleDict):  # else it holds alternatives, mostly
                        self._decide(child, alike=alike, group=total)

    def _groups(self, module: nn.Module) -> Collection[list[nn.Module]]:
        """The children of ``module`` that have weights, in groups that may be repeated blocks."""
        groups: dict[tuple[type[nn.Module], str], list[nn.Module]] = {}
        holds = isinstance(module, _CONTAINERS)
        for name, child in module.named_children():
            if _is_of_experts(name, child):
                continue
            if self._sizes[id(child)] or class_of(child).__name__ in self._classes:
                stem = "" if holds else name.strip("_0123456789")
                groups.setdefault((class_of(child), stem), []).append(child)
        return groups.values()

    def _has_like(self, module: nn.Module, group: Sequence[nn.Module]) -> bool:
        """Whether another one of ``group`` has between half and twice the elements of ``module``."""
        size = self._sizes[id(module)]
        others = (self._sizes[id(other)] for other in group if other is not module)
        return any(size <= 2 * other and other <= 2 * size for other in others)

    def _decide(self, module: nn.Module, *, alike: bool, group: int) -> None:
        """Make ``module`` a unit, or split it, or leave it to the unit around it.

        group: elements of this module and those like it.
        """
        size, largest = self._sizes[id(module)], self._largest_block if alike else self._largest
        if class_of(module).__name__ in self._classes:
            self.chosen.add(id(module))
        elif not is_called(module) or (size > largest and self._splits(module)):
            self._split(module)
        elif (group >= self._tiny_group and size >= self._tiny_block) if alike else size >= self._tiny:
            self.chosen.add(id(module))

    def _splits(self, module: nn.Module) -> bool:
        """Whether ``module`` calls its children, and most of its weights are theirs."""
        maker = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
        if maker.__module__.split(".")[0] == "torch" and maker not in _SPLIT_OF_TORCH:
            return "_orig_mod" in module._modules
        if "parametrizations" in module._modules or isinstance(module, torch.jit.ScriptModule):
            return False
        if any(_is_of_experts(name, child) for name, child in module.named_children()):
            return False
        if self._may_choose(module):
            return False
        below = sum(self._sizes[id(child)] for child in module.children())
        return 2 * below > self._sizes[id(module)]

    def _may_choose(self, module: nn.Module) -> bool:
        """Whether ``module`` is small and has no repetition, so that its data may select which parts it calls."""
        if type(module) in _SPLIT_OF_TORCH:
            return False
        return self._sizes[id(module)] <= _LEAST_SPLIT and not any(self._repeats(part) for part in module.modules())

    def _repeats(self, module: nn.Module) -> bool:
        """Whether ``module`` has several children of a kind: two in a ModuleList, elsewhere three.

        Two children elsewhere may be alternatives.
        """
        least = 2 if isinstance(module, nn.ModuleList) else 3
        named = class_of(module).__name__ in self._classes
        return named or any(len(group) >= least for group in self._groups(module))


def is_called(module: nn.Module) -> bool:
    """Whether ``module`` has a forward. ModuleList, ModuleDict and the like only hold others."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_lookup(module: nn.Module) -> bool:
    """Whether ``module`` is an unchanged torch embedding, whose backward needs the ids but not the weights."""
    changed = module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module)
    return type(module) is nn.Embedding and module.max_norm is None and not changed


def _is_of_experts(name: str, module: nn.Module) -> bool:
    """Whether ``module``, registered as ``name``, holds experts: each rank may call other ones."""
    return "expert" in name.lower() and isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _sizes(model: nn.Module) -> dict[int, int]:
    """id(module) → elements of its parameters, without those that several modules have."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in {id(p): p for p in module._parameters.values() if p is not None}:
            owners[parameter] = owners.get(parameter, 0) + 1
    return {id(module): sum(p.numel() for p in module.parameters() if owners[id(p)] == 1) for module in model.modules()}
