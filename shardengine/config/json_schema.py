"""The JSON Schema of a config file. Owns: the form of keys and sections in it.

Must not know: how a file is checked.
"""

from __future__ import annotations

import re
from typing import Any

from shardengine.config.foreign import ALIASES, OPTIMIZER_FIXED, OPTIMIZER_NO_EFFECT
from shardengine.config.kinds import REMARKS, plain
from shardengine.config.schema import KEYS, OPTIMIZERS, TRIPLE, Key, Status


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a config file, made from the same table that files are checked with.

    It describes shapes and ranges. Only `load_config` checks conflicts between keys, and which features are available.
    """
    root: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "shardengine config",
        **_object_schema(optional=False),
        "anyOf": [{"required": [TRIPLE[0]]}, {"required": [TRIPLE[1]]}],
    }
    for key in KEYS.values():
        _section_schema(root, key.name)[key.name.rpartition(".")[2]] = _key_schema(key)
    for old, new in ALIASES.items():
        _section_schema(root, old)[old.rpartition(".")[2]] = {"description": f"Old name of {new}.", "deprecated": True}
    sections = root["properties"]
    for name in ("optimizer", "scheduler"):
        sections[name]["type"], sections[name]["required"] = ["object", "null"], ["type"]
    sections["zero_optimization"]["type"] = "object"
    hyper = {name: _or_auto(kind.schema) for table in OPTIMIZERS.values() for name, (kind, _) in table.items()}
    other = {name: {"type": "boolean"} for name in ("adam_w_mode", *OPTIMIZER_FIXED)}
    ignored: dict[str, Any] = {name: {"deprecated": True} for name in OPTIMIZER_NO_EFFECT}
    sections["optimizer"]["properties"]["params"] |= {
        "properties": {**hyper, **other, **ignored},
        "patternProperties": {_REMARK: {}},
        "additionalProperties": False,
    }
    return root


_REMARK = f"^({'|'.join(map(re.escape, REMARKS))})"


def _object_schema(*, optional: bool) -> dict[str, Any]:
    # A switched-off section may be an object, null or false.
    kinds: str | list[str] = ["object", "null", "boolean"] if optional else "object"
    return {"type": kinds, "properties": {}, "patternProperties": {_REMARK: {}}, "additionalProperties": False}


def _section_schema(root: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the properties of the section that holds ``name``; it is made if it is missing."""
    properties: dict[str, Any] = root["properties"]
    for part in name.split(".")[:-1]:
        properties = properties.setdefault(part, _object_schema(optional=True))["properties"]
    return properties


def _or_auto(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*schema.get("anyOf", [schema]), {"const": "auto"}]}


def _key_schema(key: Key) -> dict[str, Any]:
    if key.status is Status.ACTIVE:
        return {**_or_auto(key.kind.schema), "default": plain(key.default), "description": key.note}
    if key.status is Status.LATER:
        schemas = [key.kind.schema, {"enum": [None, False, "auto"]}]
        return {"anyOf": schemas, "description": "Not available yet: only switched off."}
    if key.status is Status.REFUSED:
        return {"description": f"Only switched off: {key.note}."}
    return {"deprecated": True, "description": f"Accepted, has no effect, because {key.note}."}
