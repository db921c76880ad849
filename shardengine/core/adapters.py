"""What peft saves of a model: which parameters, and what it computes from weights for that. Owns: asking peft.

Must not know: files. peft is imported where a model has its adapters; without this file these would be saved as any
other part of a model.

[Note: What peft saves] That is more than what is trained: embeddings and output layer of a vocabulary that was resized,
adapters that are not the active one, halves of adapters that were frozen. Which, depends on files of the base model, so
rank 0 asks and tells the others. peft is shown names and shapes.

[Note: Prompts] What prompt and prefix tuning save is the output of a small module. Frameworks let rank 0 alone save;
where weights are sharded no rank can run a module alone. So every rank runs it when it gives whole weights away, and
peft finds the result, until the engine is called the next time.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.comm import run_on_all_ranks
from shardengine.core.parts import Core

_log = logging.getLogger(__name__)
_PROMPT = "get_prompt_embedding_to_save"


def saved(core: Core, module: nn.Module) -> frozenset[str]:
    """The names of the parameters of ``module`` that peft saves, trained or not ([Note: What peft saves]); collective
    where it has adapters."""
    adapted = dict(_adapted(module))
    if not adapted:
        return frozenset()
    compute(core, module)

    def ask() -> list[str]:
        asked = adapted.items() if core.mesh.rank == 0 else ()
        return [prefix + name for prefix, part in asked for name in _asked(part)]

    told = run_on_all_ranks(core.collectives, "asking peft what it saves", ask)
    told = core.collectives.exchange_objects(told, "what peft saves")[0]
    return frozenset([*told, *core.partition.expanded(told)])


def compute(core: Core, module: nn.Module) -> None:
    """Where weights are sharded, what peft computes when it saves ``module``; collective there ([Note: Prompts])."""
    if not core.stage.moves_weights:
        return
    for _, part in _adapted(module):
        learned = [name for name, config in part.peft_config.items() if getattr(config, "is_prompt_learning", False)]
        if learned and hasattr(part, _PROMPT):
            with torch.no_grad():
                prompts = {name: getattr(part, _PROMPT)(name) for name in learned}
            vars(part)[_PROMPT] = prompts.__getitem__
            core.attachments.passing.append(_Computed(part))


def show(core: Core, module: nn.Module, state: dict[str, Any]) -> None:
    """Where weights are sharded, the parameters of prompts show the values that ``state`` has, until the engine is
    called the next time: some methods save these themselves, whatever state dict they are given."""
    if not core.stage.moves_weights or not state:
        return
    for prefix, part in _adapted(module):
        for name, encoder in getattr(part, "prompt_encoder", {}).items():
            for inside, child in encoder.named_modules(prefix=f"{prefix}prompt_encoder.{name}"):
                for attribute in child._parameters:
                    if isinstance(value := state.get(f"{inside}.{attribute}"), Tensor):
                        vars(child)[attribute] = value  # found before the parameter
                        core.attachments.passing.append(_Shown(child, attribute))


def for_every_rank(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """``state``, a whole state dict on rank 0 and {} elsewhere. There, where ``module`` has adapters, names and shapes:
    frameworks let every rank ask peft what to save, which looks for them."""
    return state if state or not dict(_adapted(module)) else _shapes(module)


class _Computed:
    """A handle of what ``part`` answers peft."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part

    def remove(self) -> None:
        """It computes again."""
        vars(self._part).pop(_PROMPT, None)


class _Shown:
    """A handle of what ``module`` shows in the place of a parameter."""

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = module
        self._attribute = attribute

    def remove(self) -> None:
        """It shows the parameter."""
        vars(self._module).pop(self._attribute, None)


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost parts of ``module`` that have adapters, each with what stands before its names."""
    found: list[str] = []
    for name, part in module.named_modules():
        prefix = name and f"{name}."
        if not prefix.startswith(tuple(found)) and isinstance(getattr(part, "peft_config", None), dict):
            found.append(prefix)
            yield prefix, part


def _asked(part: Any) -> list[str]:
    """The names in the state dict of ``part`` that are in its adapters' files."""
    import peft

    shown = _shapes(part)
    name_of = {id(value): name for name, value in shown.items()}
    found: list[str] = []
    for adapter in part.peft_config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft says it again when it saves
            try:
                kept = peft.get_peft_model_state_dict(part, state_dict=shown, adapter_name=adapter)
            except Exception as error:  # of a method that computes what cannot be computed from shapes
                _log.warning("what peft saves of %r cannot be asked (%s): what is trained is saved", adapter, error)
                continue
        found += [name_of[id(value)] for value in kept.values() if id(value) in name_of]
    return list(dict.fromkeys(found))


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
        for name, value in module.state_dict(keep_vars=True).items()
    }
