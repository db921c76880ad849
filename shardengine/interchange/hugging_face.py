"""Export a checkpoint as a directory that ``from_pretrained`` loads. Owns: the files of that directory.

Must not know: engines. Neither transformers nor peft is imported; the facts that they need are in the checkpoint.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardengine.checkpoint import write_text
from shardengine.errors import UsageError
from shardengine.interchange import adapters, weight_files
from shardengine.interchange.stored import StoredCheckpoint
from shardengine.interchange.weight_files import Output

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tokenizer.tiktoken", "tiktoken.model", "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
_METADATA = {"format": "pt"}


def has_adapters(stored: StoredCheckpoint) -> bool:
    """Return whether the model was wrapped by peft."""
    return bool(stored.model.get("peft"))


def read_model(place: Path) -> dict[str, Any]:
    """Return the model facts of a Hugging Face directory, as ``StoredCheckpoint.model``, or raise UsageError."""
    expected = f"--config {place}: expected a directory with config.json that names one class in 'architectures'"
    found: dict[str, Any] = {}
    try:
        for name in ("config", "generation_config"):
            path = place / f"{name}.json"
            found[name] = json.loads(path.read_text(encoding="utf-8")) if name == "config" or path.is_file() else None
    except (OSError, ValueError) as error:
        raise UsageError(f"{expected}: {error}", code="export-config-unreadable") from None
    classes = found["config"].get("architectures") if isinstance(found["config"], dict) else None
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
        raise UsageError(f"{expected}, got {classes!r}", code="export-config-without-class")
    return {**found, "class": classes[0]}


def write(
    stored: StoredCheckpoint,
    directory: Path,
    *,
    dtype: torch.dtype | None,
    largest: int,
    model: dict[str, Any] | None = None,
) -> list[str]:
    """Write config, generation config and weights of a model; return notes on anything missing from the output.

    model: facts to use instead of those in the checkpoint. UsageError if there is no config.
    """
    model = stored.model if model is None else model
    config = model.get("config")
    if not isinstance(config, dict) or not isinstance(model.get("class"), str):
        kind = model.get("class")
        reason = "imported checkpoints have none" if kind is None else f"its model was a {kind}"
        raise UsageError(
            f"{stored.place}: no Hugging Face config in it ({reason}), so there is no config.json to write: --config "
            "DIR takes that of a model of the same kind, --format safetensors writes the weights under their own "
            "names, --format dcp weights and optimizer",
            code="export-without-config",
        )
    if config.get("quantization_config") is not None:
        raise UsageError(
            f"{stored.place}: the model was quantized by another library, whose own form of the weights is not in a "
            "checkpoint; --format safetensors writes what is there",
            code="export-quantised-by-another",
        )
    outputs, notes = _with_aliases(stored, weight_files.weights(stored, dtype), config)
    kept = {key: value for key, value in config.items() if key not in ("torch_dtype", "architectures", "dtype")}
    named = next((output.dtype for output in outputs if output.dtype.is_floating_point), torch.float32)
    kept |= {"architectures": [model["class"]], "dtype": str(named).removeprefix("torch.")}
    _write_json(directory / "config.json", kept)
    if isinstance(model.get("generation_config"), dict):
        _write_json(directory / "generation_config.json", model["generation_config"])
    weight_files.write(stored, outputs, directory, stem="model", largest=largest, metadata=_METADATA)
    if "auto_map" in config:
        notes.append("the model's own code (auto_map in config.json) is not in a checkpoint; copy its .py files")
    return notes


def _with_aliases(
    stored: StoredCheckpoint, outputs: list[Output], config: dict[str, Any]
) -> tuple[list[Output], list[str]]:
    """Return ``outputs``, plus tied tensors under their other names if from_pretrained does not tie them; and notes.

    from_pretrained ties embeddings (one row per word) if the config enables it.
    """
    four = str(config.get("transformers_version", "")).startswith("4.")  # which did not write its default
    ties = config.get("tie_word_embeddings", four) is True
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    words = {part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)}
    aliases = {row["names"][0]: row["names"][1:] for row in stored.parameters if len(row["names"]) > 1}
    written, notes = [], []
    for output in outputs:
        written.append(output)
        if output.origin in aliases and not (ties and output.shape and output.shape[0] in words):
            names = aliases[output.origin]
            written += [replace(output, name=name) for name in names]
            notes.append(f"{output.origin} is written under {', '.join(names)} too: the config does not tie them")
    return written, notes


def write_adapters(
    stored: StoredCheckpoint, directory: Path, *, dtype: torch.dtype | None, adapter: str | None
) -> list[str]:
    """Write only the adapters: "default", or the one requested, into ``directory``, others into subdirectories; notes.

    A subdirectory has the name of its adapter.
    """
    found = adapters.configs(stored, adapter)
    notes = ["adapters alone; the base model's weights are not in the output"]
    everything = weight_files.weights(stored, dtype)
    for name, config in found.items():
        place = directory if name == "default" or adapter is not None else directory / name
        place.mkdir(exist_ok=True)
        outputs = adapters.outputs(stored, everything, name, config)
        weight_files.write(stored, outputs, place, stem="adapter_model", largest=1 << 62, metadata=_METADATA)
        _write_json(place / "adapter_config.json", adapters.config_file(config))
        if (base := config.get("base_model_name_or_path")) and adapters.base_config(config) is None:
            notes.append(
                f"the base model {base} is not here, so it cannot be seen whether "
                "the vocabulary was resized: embeddings are not in the output"
            )
    return list(dict.fromkeys(notes))  # adapters share a base


def write_plain(stored: StoredCheckpoint, directory: Path, *, dtype: torch.dtype | None, largest: int) -> list[str]:
    """Write all weights and buffers under their own names; tied names go to the metadata, as in `save_pretrained`."""
    tied = {alias: row["names"][0] for row in stored.parameters for alias in row["names"][1:]}
    metadata = _METADATA | ({"tied": json.dumps(tied)} if tied else {})  # two keys have no order in safetensors
    outputs = weight_files.weights(stored, dtype)
    weight_files.write(stored, outputs, directory, stem="model", largest=largest, metadata=metadata)
    return []


def tokenizer_files(source: Path) -> list[Path]:
    """Return the tokenizer files in ``source``; none if it is no directory."""
    return [source / name for name in TOKENIZER_FILES if (source / name).is_file()]


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy the tokenizer files of ``source`` to ``directory``."""
    for path in tokenizer_files(source):
        shutil.copyfile(path, directory / path.name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
