"""The parameters that peft saves of a model, and the values that it computes from weights to save them.

Owns: the questions to peft. Must not know: files. peft is imported only if a model has its adapters.

[Note: What peft saves] peft saves more than the trained parameters: the embeddings and the output layer of a resized
vocabulary, adapters that are not active, and frozen halves of adapters. The choice depends on files of the base model.
So rank 0 asks peft and sends the answer to the others. peft gets names and shapes only.

[Note: Prompts] Prompt and prefix tuning save the output of a small module. Frameworks let rank 0 alone save, but if
weights are sharded no rank can run a module alone. So every rank runs that module when the engine returns whole
weights. peft finds the result until the next call of the engine.
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
    """Return the names of the parameters of ``module`` that peft saves, trained or not ([Note: What peft saves]).

    Collective if ``module`` has adapters.
    """
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
    """Compute the values that peft saves of ``module`` ([Note: Prompts]).

    Does nothing unless weights are sharded. Collective if they are.
    """
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
    """Let the parameters of prompts show their values in ``state`` until the engine's next call.

    Does nothing unless weights are sharded. Some methods save these parameters directly and ignore the state dict that
    they are passed.
    """
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
    """Return ``state`` on rank 0; elsewhere a dict of names and shapes if ``module`` has adapters, else {}.

    state: a whole state dict on rank 0, {} elsewhere. Frameworks let every rank ask peft for the names to save, and
    peft looks them up in this dict.
    """
    return state if state or not dict(_adapted(module)) else _shapes(module)


class _Computed:
    """A handle that removes the computed prompts of ``part``."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part

    def remove(self) -> None:
        """``part`` computes its prompts again."""
        vars(self._part).pop(_PROMPT, None)


class _Shown:
    """A handle that removes the value which ``module`` shows instead of a parameter."""

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self._module = module
        self._attribute = attribute

    def remove(self) -> None:
        """``module`` shows the parameter again."""
        vars(self._module).pop(self._attribute, None)


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost parts of ``module`` that have adapters, each with the prefix of its names."""
    found: list[str] = []
    for name, part in module.named_modules():
        prefix = name and f"{name}."
        if not prefix.startswith(tuple(found)) and isinstance(getattr(part, "peft_config", None), dict):
            found.append(prefix)
            yield prefix, part


def _asked(part: Any) -> list[str]:
    """The names in the state dict of ``part`` that the files of its adapters contain."""
    import peft

    shown = _shapes(part)
    name_of = {id(value): name for name, value in shown.items()}
    found: list[str] = []
    for adapter in part.peft_config:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft repeats these warnings when it saves
            try:
                kept = peft.get_peft_model_state_dict(part, state_dict=shown, adapter_name=adapter)
            except Exception as error:  # a method that needs values, not only shapes
                _log.warning("what peft saves of %r cannot be asked (%s): what is trained is saved", adapter, error)
                continue
        found += [name_of[id(value)] for value in kept.values() if id(value) in name_of]
    return list(dict.fromkeys(found))


def _shapes(module: nn.Module) -> dict[str, Any]:
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value
        for name, value in module.state_dict(keep_vars=True).items()
    }
