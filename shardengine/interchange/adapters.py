"""LoRA adapters as peft writes them. Owns: which tensors belong to an adapter, their names in ``adapter_model``.

Must not know: files of weights. Names follow ``PeftModel.save_pretrained`` of peft 0.21; peft itself is not imported.

[Note: A resized vocabulary] If the base model has another vocabulary size, peft saves embeddings and output layer with
the adapter. peft asks the model for these layers. A checkpoint has no model, so here they are the weights with one row
per word.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardengine.errors import UsageError
from shardengine.interchange.stored import StoredCheckpoint
from shardengine.interchange.weight_files import Output

PREFIX = "base_model.model."
_EMBEDDINGS = ("embed_tokens", "lm_head")


def configs(stored: StoredCheckpoint, chosen: str | None) -> dict[str, dict[str, Any]]:
    """Return adapter name → config, for all adapters or the ``chosen`` one; UsageError for other types than LoRA."""
    there = stored.model.get("peft") or {}
    if chosen is not None and chosen not in there:
        known = f"it has {', '.join(map(repr, there))}" if there else "its model was no peft model"
        raise UsageError(
            f"--adapter {chosen}: no such adapter in {stored.place}; {known}", code="export-adapter-unknown"
        )
    found = {chosen: there[chosen]} if chosen is not None else dict(there)
    for name, config in found.items():
        kind = config.get("peft_type") if isinstance(config, dict) else None
        if kind != "LORA":
            raise UsageError(
                f"{stored.place}: adapter {name!r} is of type {kind}, expected LORA; --format safetensors writes all "
                "weights under their own names",
                code="export-adapter-not-lora",
            )
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UsageError(
                f"{stored.place}: adapter name {name[:80]!r}: expected letters, digits and _ . -",
                code="export-adapter-name-invalid",
            )
    return found


def config_file(config: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of ``adapter_config.json``: the config with ``inference_mode`` set."""
    return {**dict(sorted(config.items())), "inference_mode": True}


def outputs(stored: StoredCheckpoint, weights: list[Output], adapter: str, config: dict[str, Any]) -> list[Output]:
    """Return the tensors of ``adapter`` among ``weights``, under the names that peft gives them."""
    found: dict[str, Output] = {}
    words, before = words_of(stored.model.get("config")), words_of(base_config(config))
    resized = words is not None and before is not None and words != before
    aliases = {row["names"][0]: row["names"] for row in stored.parameters}
    for output in weights:
        for name in aliases.get(output.origin, [output.origin]):
            kept = _name_of(name, adapter, config, first=resized or name == output.origin)
            if resized and not kept and _is_of_words(name, output, words):
                kept = name
            if kept:
                kept = kept if kept.startswith(PREFIX) else PREFIX + kept
                found[kept] = replace(output, name=kept)
    if not any("lora_" in name for name in found):
        raise UsageError(
            f"{stored.place}: adapter {adapter!r} has no LoRA weights in it", code="export-adapter-without-weights"
        )
    return list(found.values())


def _name_of(name: str, adapter: str, config: dict[str, Any], *, first: bool) -> str:
    """Return a parameter's name in the adapter's file; "" if it is not part of the adapter."""
    own = re.escape(adapter)
    if match := re.fullmatch(rf"(.+\.lora_magnitude_vector)\.{own}(?:\.weight)?", name):
        return match[1]
    if match := re.fullmatch(rf"(.+\.lora_\w+)\.{own}(\.\w+)?", name):
        return match[1] + (match[2] or "")
    if match := re.fullmatch(rf"(.+)\.modules_to_save\.{own}\.(.+)", name):
        return f"{match[1]}.{match[2]}"
    if match := re.fullmatch(rf"(.+\.token_adapter\.trainable_tokens_delta)\.{own}", name):
        return match[1] if first else ""  # a tied layer has the same delta
    endings = {"all": ".bias", "lora_only": ".base_layer.bias"}
    if (ending := endings.get(str(config.get("bias")))) is not None and name.endswith(ending):
        return name
    tokens = config.get("trainable_token_indices") is not None  # then only the rows of these tokens are saved
    return name if not tokens and _is_targeted_embedding(name, config.get("target_modules")) else ""


def words_of(config: Any) -> int | None:
    """Return the vocabulary size in a model's config; None if it has none."""
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    sizes = [part.get("vocab_size") for part in parts if isinstance(part, dict)]
    return next((size for size in sizes if isinstance(size, int)), None)


def base_config(config: dict[str, Any]) -> Any:
    """Return the config of the base model from its directory or the hub's cache; None if it is in neither."""
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return None
    place: Any = Path(name) / "config.json"
    if not place.is_file() and find_spec("huggingface_hub") is not None:
        from huggingface_hub import try_to_load_from_cache

        try:
            place = try_to_load_from_cache(name, "config.json")
        except ValueError:  # the name of a directory that is gone
            return None
    try:
        return json.loads(Path(place).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError):
        return None


def _is_of_words(name: str, output: Output, words: int | None) -> bool:
    """Return whether ``output`` has one row per word and belongs to no other adapter."""
    other = re.search(r"\.(?:lora_\w+|modules_to_save|original_module|trainable_tokens_\w+)\b", name)
    return not other and output.shape[:1] == (words,) and name.endswith((".weight", ".bias"))


def _is_targeted_embedding(name: str, targets: Any) -> bool:
    """Return whether ``name`` is the weight of an embedding that LoRA wraps: peft saves it with the adapter."""
    match = re.fullmatch(rf"(?:.+\.)?({'|'.join(_EMBEDDINGS)})\.base_layer\.\w+", name)
    if match is None:
        return False
    if isinstance(targets, str):
        module = name.removeprefix(PREFIX).rsplit(".base_layer.", 1)[0]
        return targets != "all-linear" and re.fullmatch(targets, module) is not None
    return isinstance(targets, list) and any(each in targets for each in _EMBEDDINGS)
