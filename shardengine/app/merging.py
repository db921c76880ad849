"""Merges adapters of a checkpoint, or of a directory of peft's, into their base model.

Owns: finding that model, and checking that it is the right one. Must not know: the command line. peft does the
arithmetic, on the whole model in fp32 in this process's memory. Each weight is rounded once, at the end.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.checkpoint import left_out
from shardengine.errors import UsageError
from shardengine.interchange import adapters, hugging_face
from shardengine.interchange.stored import MODEL, StoredCheckpoint
from shardengine.interchange.weight_files import rounded
from shardengine.sharding import WEIGHT, FlatSlice

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files in an adapter's directory."""
_BESIDE = ".quant_state."
"""Part of the names of the tensors that bitsandbytes keeps beside a packed weight."""
_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification", "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoModel",
}  # fmt: skip
"""The adapter's task → the class of its base model."""


def write(
    stored: StoredCheckpoint,
    out: Path,
    *,
    dtype: torch.dtype | None,
    largest: int,
    adapter: str | None,
    base: str | None,
) -> list[str]:
    """Write the base model with the adapters merged, as a Hugging Face model; return sentences for the user.

    dtype: None: the dtype that the adapters were trained in · adapter: its name, if there are several · base: a
    directory or name; None: the one that the adapter names. UsageError if it is not the model that they were trained
    with.
    """
    found = adapters.configs(stored, adapter)
    if len(found) != 1:
        raise UsageError(
            f"--merge: {stored.place} has {len(found)} adapters ({', '.join(found)}); choose one with --adapter NAME",
            code="export-merge-several-adapters",
        )
    ((name, config),) = found.items()
    place = base or config.get("base_model_name_or_path")
    if not place:
        raise UsageError(
            f"--merge: {stored.place} does not say which base model its adapters belong to; name --base DIR",
            code="export-merge-base-unknown",
        )
    with tempfile.TemporaryDirectory() as folder:
        hugging_face.write_adapters(stored, Path(folder), dtype=torch.float32, adapter=name)
        model = _adapted(Path(folder), str(stored.model.get("class")), str(place), name)
    _require_same(stored, model, str(place))
    trained = next(row["dtype"] for row in stored.parameters if row["trainable"])
    _write(model, out, dtype or getattr(torch, trained), largest)
    return [f"the adapters are merged into {place}"]


def saved_in(place: Path, adapter: str | None) -> Path | None:
    """Return the directory of an adapter: ``place``, or its model/ if ``place`` is the output of a run; None otherwise.

    adapter: its name. An adapter not called "default" has a subdirectory of its own.
    """
    named = "" if adapter in (None, "default") else str(adapter)
    return next((each for each in (place / named, place / MODEL / named) if (each / CONFIG).is_file()), None)


def write_saved(
    folder: Path, out: Path, *, dtype: torch.dtype | None, largest: int, base: str | None
) -> tuple[str, list[str]]:
    """Write as ``write`` does, from the adapter that peft's ``save_pretrained`` wrote into ``folder``.

    Returns the base model's place as well. The adapter's files have no checksums of the base model's weights, so only
    names and shapes are compared.
    """
    config, weights = _config(folder), _read(folder)
    place = str(base or config.get("base_model_name_or_path") or "")
    if not place:
        raise UsageError(
            f"--merge: {folder} does not say which base model its adapter belongs to; name --base DIR",
            code="export-merge-base-unknown",
        )
    named = (config.get("auto_mapping") or {}).get("base_model_class")
    revision = None if base else config.get("revision")
    chosen = named or _CLASSES.get(str(config.get("task_type")), "AutoModelForCausalLM")
    model = _adapted(folder, chosen, place, "default", revision=revision)
    trained = next((value.dtype for value in weights.values() if value.is_floating_point()), torch.float32)
    _write(model, out, dtype or trained, largest)
    return place, [f"the adapter of {folder} is merged into {place}, whose weights it has no checksums of"]


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--merge: {folder / CONFIG} cannot be read: {error}", code="export-merge-adapter-config-unreadable"
        ) from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise UsageError(
            f"--merge: {folder}: its adapter is of type {kind}, expected LORA", code="export-adapter-not-lora"
        )
    return dict(config)


def _read(folder: Path) -> dict[str, Tensor]:
    """Return the adapter's tensors, under peft's names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"--merge: {folder}: expected the adapter's weights in {WEIGHTS}, which cannot be read: {error}",
            code="export-merge-adapter-weights-unreadable",
        ) from None


def _write(model: Any, out: Path, chosen: torch.dtype, largest: int) -> None:
    with torch.no_grad():
        merged = model.merge_and_unload(safe_merge=True)
        state = {
            key: rounded(value, chosen, key) if value.is_floating_point() else value
            for key, value in merged.state_dict().items()
        }
    merged.to(chosen).save_pretrained(out, state_dict=state, max_shard_size=largest)


def _adapted(folder: Path, class_name: str, base: str, name: str, *, revision: str | None = None) -> Any:
    """Return the base model in fp32 with the adapter in ``folder`` under ``name``, unmerged, resized to its vocabulary.

    UsageError if they do not fit each other.
    """
    import peft
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = getattr(transformers, class_name, transformers.AutoModelForCausalLM)
    try:
        model = kind.from_pretrained(base, dtype=torch.float32, **({"revision": revision} if revision else {}))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--merge: the base model {base} cannot be loaded: {error}; name it with --base DIR",
            code="export-merge-base-not-loadable",
        ) from None
    weights = _read(folder)
    tables = {name: module for name, module in model.named_modules() if any(module is each for each in _tables(model))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message="Found missing adapter keys")  # an error below
        try:
            _resize(model, tables, weights)
            adapted = peft.PeftModel.from_pretrained(model, folder, adapter_name=name)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(
                f"--merge: the adapters do not fit the base model {base}: {reason[:400]}",
                code="export-merge-adapter-unlike-base",
            ) from None
        expected = peft.get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=False)
    more = [
        key for key in weights.keys() - expected.keys() if "lora_" in key or not any(_of(key, each) for each in tables)
    ]
    if other := sorted(
        [*(expected.keys() - weights.keys()), *(key for key in more if key not in adapted.state_dict())]
    ):
        raise UsageError(
            f"--merge: the adapters do not fit the base model {base}: {len(other)} of their tensors, {other[0]} among "
            "them, are in one of the two alone; name the right base with --base DIR",
            code="export-merge-adapter-unlike-base",
        )
    return adapted


def _tables(model: Any) -> list[Any]:
    """Return the modules with a row for each word."""
    return [table for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table is not None]


def _of(key: str, module: str) -> bool:
    """Whether a tensor of the adapter belongs to ``module`` of the base model."""
    return key.startswith(f"{adapters.PREFIX}{module}.")


def _resize(model: Any, tables: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Resize ``model`` to the words of the whole embeddings in the adapter; ValueError if the adapter lacks some."""
    rows: dict[int, int] = {}
    for name, table in tables.items():
        for key, value in weights.items():
            if _of(key, name) and "lora_" not in key and key.endswith(".weight") and value.dim() == 2:
                rows[id(table.weight)] = len(value)
    words = {len(table.weight) for table in tables.values()}
    wanted = set(rows.values())
    if not wanted or wanted == words:
        return
    if len(wanted) > 1 or any(id(table.weight) not in rows for table in tables.values()):
        raise ValueError(
            f"it has {min(words)} words, the adapter {max(wanted)}, and not the new rows of all embeddings"
        )
    model.resize_token_embeddings(wanted.pop(), mean_resizing=False)


def _require_same(stored: StoredCheckpoint, model: Any, base: str) -> None:
    """UsageError unless the frozen weights are those that the adapters were trained with, in the dtype of that time.

    Packed weights are not compared, because a GPU and a CPU may round them differently. Embeddings, norms and the
    output layer are compared.
    """
    there: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    prints = stored.index.get("left_out", {})
    other = []
    for row in stored.parameters:
        name = row["names"][0]
        whole, _, _ = name.partition(_BESIDE)
        if row["trainable"] or (row["dtype"] == "uint8" and name in there) or whole != name:
            continue
        values = there.get(name)
        if values is None or values.shape != stored.shape(name):
            other.append(name)
            continue
        values = values.detach().to(getattr(torch, row["dtype"]))
        if name in prints:
            part = FlatSlice(name, WEIGHT, 0, values.reshape(-1))
            same = left_out.together([left_out.sums([part], {name: values.numel()})]).get(name, 0) == prints[name]
        else:
            same = torch.equal(values, stored.whole(name, WEIGHT))
        if not same:
            other.append(name)
    if other:
        more = f" and {len(other) - 4} more" if len(other) > 4 else ""
        raise UsageError(
            f"--merge: {base} is not the base model that the adapters were trained with: {', '.join(other[:4])}{more} "
            "are other weights; name the right one with --base DIR",
            code="export-merge-wrong-base",
        )
