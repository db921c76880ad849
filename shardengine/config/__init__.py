"""The JSON config: the keys that a user may write, checked, with the reason for every rejection.

load          Config and load_config
schema        every key, on the dataclass field that holds its value
reader        a JSON tree to checked values, all problems at once
conflicts     combinations of keys that are rejected
json_schema   the JSON Schema of a file
kinds         kinds of values and tables of them: parse, describe, nearest name
foreign       keys of other engines' files: old names, keys that are rejected or have no effect

Must not know: torch, devices, process groups; the number of ranks comes in as an integer.
"""

from __future__ import annotations

from shardengine.config import kinds
from shardengine.config.foreign import ALIASES
from shardengine.config.json_schema import json_schema
from shardengine.config.kinds import nearest, plain
from shardengine.config.load import (
    MICRO,
    NOT_CLIPPED,
    STAGE,
    Config,
    fitting_ranks,
    load_config,
    load_or_default,
    provisional,
    undecided,
    whole_number,
)
from shardengine.config.reader import NO_EFFECT_BECAUSE, READ_AS, ConfigTree, Source, is_comment, read_tree
from shardengine.config.schema import (
    KEYS,
    SECTIONS,
    STAGES,
    STEPPING_APART,
    TRIPLE,
    AioConfig,
    CometConfig,
    CommHookConfig,
    MlflowConfig,
    MonitorConfig,
    OffloadOptimizerConfig,
    OffloadParamConfig,
    OptimizerConfig,
    SchedulerConfig,
    SinkConfig,
    WandbConfig,
    ZeroConfig,
)

__all__ = [
    "ALIASES",
    "KEYS",
    "MICRO",
    "NOT_CLIPPED",
    "NO_EFFECT_BECAUSE",
    "READ_AS",
    "SECTIONS",
    "STAGE",
    "STAGES",
    "STEPPING_APART",
    "TRIPLE",
    "AioConfig",
    "CometConfig",
    "CommHookConfig",
    "Config",
    "ConfigTree",
    "MlflowConfig",
    "MonitorConfig",
    "OffloadOptimizerConfig",
    "OffloadParamConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "SinkConfig",
    "Source",
    "WandbConfig",
    "ZeroConfig",
    "fitting_ranks",
    "is_comment",
    "json_schema",
    "kinds",
    "load_config",
    "load_or_default",
    "nearest",
    "plain",
    "provisional",
    "read_tree",
    "undecided",
    "whole_number",
]
