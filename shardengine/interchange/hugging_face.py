"""A checkpoint as a directory that ``from_pretrained`` loads. Owns: which files that directory has.

Must not know: engines. Neither transformers nor peft is imported; what they need was saved with the checkpoint.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from shardengine.checkpoint.directory import write_text
from shardengine.errors import UsageError
from shardengine.interchange import adapters, weight_files
from shardengine.interchange.stored import Stored

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tokenizer.tiktoken", "tiktoken.model", "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
_METADATA = {"format": "pt"}


def has_adapters(stored: Stored) -> bool:
    """Whether the model was wrapped by peft."""
    return bool(stored.model.get("peft"))


def write(stored: Stored, directory: Path, *, dtype: torch.dtype | None, largest: int) -> list[str]:
    """A model: config, generation config, weights; sentences on what a user may miss. UsageError without a config."""
    model = stored.model
    config = model.get("config")
    if not isinstance(config, dict) or not isinstance(model.get("class"), str):
        raise UsageError(
            f"{stored.place}: no Hugging Face config in it (its model was a {model.get('class')}), so there is no "
            "config.json to write: --format safetensors writes the weights under their own names, --format dcp weights "
            "and optimizer"
        )
    if config.get("quantization_config") is not None:
        raise UsageError(
            f"{stored.place}: the model was quantized by another library, whose own form of the weights is not in a "
            "checkpoint; --format safetensors writes what is there"
        )
    outputs = weight_files.weights(stored, dtype)
    kept = {key: value for key, value in config.items() if key not in ("torch_dtype", "architectures", "dtype")}
    named = next((output.dtype for output in outputs if output.dtype.is_floating_point), torch.float32)
    kept |= {"architectures": [model["class"]], "dtype": str(named).removeprefix("torch.")}
    _write_json(directory / "config.json", kept)
    if isinstance(model.get("generation_config"), dict):
        _write_json(directory / "generation_config.json", model["generation_config"])
    weight_files.write(stored, outputs, directory, stem="model", largest=largest, metadata=_METADATA)
    if "auto_map" in config:
        return ["the model's own code (auto_map in config.json) is not in a checkpoint; copy its .py files"]
    return []


def write_adapters(stored: Stored, directory: Path, *, dtype: torch.dtype | None, adapter: str | None) -> list[str]:
    """The adapters alone: "default", or the only one asked for, into ``directory``, others into one of their name."""
    found = adapters.configs(stored, adapter)
    everything = weight_files.weights(stored, dtype)
    for name, config in found.items():
        place = directory if name == "default" or adapter is not None else directory / name
        place.mkdir(exist_ok=True)
        outputs = adapters.outputs(stored, everything, name, config)
        weight_files.write(stored, outputs, place, stem="adapter_model", largest=1 << 62, metadata=_METADATA)
        _write_json(place / "adapter_config.json", adapters.config_file(config))
    return ["adapters alone; the base model's weights are not in the output"]


def write_plain(stored: Stored, directory: Path, *, dtype: torch.dtype | None, largest: int) -> list[str]:
    """All weights and buffers under their own names; tied names are in the metadata, as `save_pretrained` has them."""
    tied = {alias: row["names"][0] for row in stored.parameters for alias in row["names"][1:]}
    metadata = {**_METADATA, "tied": json.dumps(tied)}
    outputs = weight_files.weights(stored, dtype)
    weight_files.write(stored, outputs, directory, stem="model", largest=largest, metadata=metadata)
    return []


def tokenizer_files(source: Path) -> list[Path]:
    """The files of a tokenizer in ``source``; none where it is no directory."""
    return [source / name for name in TOKENIZER_FILES if (source / name).is_file()]


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Put the tokenizer beside the model."""
    for path in tokenizer_files(source):
        shutil.copyfile(path, directory / path.name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
