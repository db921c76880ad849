"""Adapters of a checkpoint merged into their base model. Owns: finding that model, and that it is the right one.

Must not know: the command line. peft does the arithmetic, on the whole model in fp32 in the memory of this process;
each weight is rounded once, at the end.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardengine.checkpoint import left_out
from shardengine.errors import UsageError
from shardengine.interchange import adapters, hugging_face
from shardengine.interchange.stored import Stored
from shardengine.interchange.weight_files import rounded
from shardengine.sharding import WEIGHT, FlatSlice


def write(
    stored: Stored, out: Path, *, dtype: torch.dtype | None, largest: int, adapter: str | None, base: str | None
) -> list[str]:
    """A Hugging Face model: the base with the adapters in its weights; sentences on what a user may miss.

    dtype: None for what the adapters were trained in · adapter: which one, if there are several · base: a directory or
    name, None for what the adapter itself names. UsageError where it is not the model that they were trained with.
    """
    found = adapters.configs(stored, adapter)
    if len(found) != 1:
        raise UsageError(
            f"--merge: {stored.place} has {len(found)} adapters ({', '.join(found)}); choose one with --adapter NAME"
        )
    ((name, config),) = found.items()
    place = base or config.get("base_model_name_or_path")
    if not place:
        raise UsageError(
            f"--merge: {stored.place} does not say which base model its adapters belong to; name --base DIR"
        )
    model = _adapted(stored, str(place), name)
    _require_same(stored, model, str(place))
    trained = next(row["dtype"] for row in stored.parameters if row["trainable"])
    chosen = dtype or getattr(torch, trained)
    with torch.no_grad():
        merged = model.merge_and_unload(safe_merge=True)
        state = {
            key: rounded(value, chosen, key) if value.is_floating_point() else value
            for key, value in merged.state_dict().items()
        }
    merged.to(chosen).save_pretrained(out, state_dict=state, max_shard_size=largest)
    return [f"the adapters are merged into {place}"]


def _adapted(stored: Stored, base: str, name: str) -> Any:
    """The base model in fp32 with the adapter ``name`` of the checkpoint, unmerged."""
    import peft
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = getattr(transformers, str(stored.model.get("class")), transformers.AutoModelForCausalLM)
    try:
        model = kind.from_pretrained(base, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise UsageError(f"--merge: the base model {base} cannot be loaded: {error}; name it with --base DIR") from None
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        hugging_face.write_adapters(stored, Path(folder), dtype=torch.float32, adapter=name)
        try:
            return peft.PeftModel.from_pretrained(model, folder, adapter_name=name)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"--merge: the adapters do not fit the base model {base}: {error}") from None


def _require_same(stored: Stored, model: Any, base: str) -> None:
    """UsageError unless the frozen weights are those that the adapters were trained with, in the dtype of then."""
    there: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    prints = stored.index.get("left_out", {})
    other = []
    for row in stored.parameters:
        name = row["names"][0]
        if row["trainable"]:
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
            "are other weights; name the right one with --base DIR"
        )
