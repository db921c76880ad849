"""The facts about a model that Hugging Face and peft need besides its weights, as JSON. Owns: finding them in a module.

Must not know: those libraries. A module is described by the attributes that their modules have, if it has them.
"""

from __future__ import annotations

import enum
import json
from typing import Any

from torch import nn


def describe(module: nn.Module) -> dict[str, Any]:
    """Return {"class", "config", "generation_config", "peft"}; a value is None if the module has no such thing.

    A wrapper that only passes on the config of the model inside it has other parameter names than that model. So its
    config is None.
    """
    adapters = getattr(module, "peft_config", None)
    inside: Any = getattr(module, "get_base_model", None)
    base = inside() if adapters is not None and callable(inside) else module
    return {
        "class": type(base).__name__,
        "config": _config_of(base, "config"),
        "generation_config": _config_of(base, "generation_config"),
        "peft": {str(name): _plain(config.to_dict()) for name, config in adapters.items()}
        if isinstance(adapters, dict) and all(hasattr(config, "to_dict") for config in adapters.values())
        else None,
    }


def _config_of(module: nn.Module, name: str) -> dict[str, Any] | None:
    config = getattr(module, name, None)
    if not callable(getattr(type(module), "save_pretrained", None)):  # of the class: wrappers forward attributes
        return None
    if not callable(getattr(config, "to_json_string", None)):
        return None
    value = json.loads(config.to_json_string())  # type: ignore[union-attr]
    return value if isinstance(value, dict) else None


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON: sets become sorted lists, enumerations their values, other objects texts."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)
