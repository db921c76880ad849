"""Makes a micro-batch for a model of transformers from the arguments of its forward.

Users pass a micro-batch for any other model. Must not know: architectures by name, engines.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.errors import UsageError

LENGTH = 512
"""Default number of tokens."""
_CHOICES = "ForMultipleChoice"
_ONE_LABEL = ("ForSequenceClassification", "ForImageClassification", _CHOICES, "ForAudioClassification",
              "ForNextSentencePrediction")  # fmt: skip
_ENDS = ("start_positions", "end_positions")
"""The labels of models that mark an answer in a text."""


def example(model: nn.Module, samples: int, length: int | None) -> dict[str, Tensor]:
    """Return zeros for ``model``: tokens [samples, length] or images, and labels.

    ``UsageError`` if it takes neither.
    """
    wrapped = getattr(model, "get_base_model", None)  # peft's: its forward passes on all arguments
    inner = wrapped() if callable(wrapped) else model
    config = getattr(inner, "config", None)
    takes = inspect.signature(inner.forward).parameters
    main = getattr(inner, "main_input_name", None) or next(iter(takes), "")
    batch: dict[str, Tensor] = {}
    if main == "input_ids":
        choices = (2,) if type(inner).__name__.endswith(_CHOICES) else ()
        batch[main] = torch.zeros(samples, *choices, _tokens(config, length), dtype=torch.int64)
    elif main == "pixel_values" and config is not None:
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        batch[main] = torch.zeros(samples, getattr(config, "num_channels", 3), height, width)
    ends = [name for name in _ENDS if name in takes]
    if not batch or not ("labels" in takes or ends):
        raise UsageError(
            f"plan: expected batch=, a mapping of what {type(model).__name__}.forward takes, and loss=, a function of "
            "what it returns: one is made for models of transformers that take input_ids or pixel_values, and labels",
            code="plan-batch-missing",
        )
    if "labels" not in takes:
        return batch | {name: torch.zeros(samples, dtype=torch.int64) for name in ends}
    one_each = type(inner).__name__.endswith(_ONE_LABEL)
    batch["labels"] = _label(samples, config) if one_each else batch[main].long()
    return batch


def _label(samples: int, config: Any) -> Tensor:
    """Return one label per sample: a class, a number, or several classes at once."""
    kind, classes = getattr(config, "problem_type", None), getattr(config, "num_labels", 2)
    if kind == "multi_label_classification" or (kind == "regression" and classes > 1):
        return torch.zeros(samples, classes)
    return torch.zeros(samples, dtype=torch.float32 if kind == "regression" or classes == 1 else torch.int64)


def on_host(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``batch`` with tensors on a device replaced by zeros on the host. ``UsageError`` if it is no mapping."""
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"plan: expected batch= to be a mapping of what forward takes, by name, got {type(batch).__name__}",
            code="plan-batch-not-a-mapping",
        )
    return {
        name: torch.zeros(each.shape, dtype=each.dtype) if isinstance(each, Tensor) and not each.is_cpu else each
        for name, each in batch.items()
    }


def resized(batch: Mapping[str, Any], samples: int, wanted: int) -> dict[str, Any]:
    """Return ``batch``, which has ``samples`` samples, with ``wanted`` of them: the first ones, or all in turn.

    Entries with another first size stay as they are.
    """
    if wanted == samples:
        return dict(batch)
    order = torch.arange(wanted) % samples
    return {
        name: each[order] if isinstance(each, Tensor) and each.dim() and each.shape[0] == samples else each
        for name, each in batch.items()
    }


def samples_of(batch: Mapping[str, Any]) -> int:
    """Return the most frequent first size of the tensors; 1 if none has a dimension.

    If any tensor has two or more dimensions, only those count. If several sizes are equally frequent, the largest wins.
    """
    shapes = [each.shape for each in batch.values() if isinstance(each, Tensor) and each.dim()]
    sizes = Counter(shape[0] for shape in ([each for each in shapes if len(each) > 1] or shapes))
    return max(sizes, key=lambda size: (sizes[size], size), default=1)


def shorter(batch: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a ``batch`` of tokens [samples, length] at half the length; None for any other batch."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] < 2:
        return None
    half = ids.shape[1] // 2
    of_tokens = lambda each: isinstance(each, Tensor) and each.shape[:2] == ids.shape  # noqa: E731
    return {name: each[:, :half].contiguous() if of_tokens(each) else each for name, each in batch.items()}


def _tokens(config: Any, length: int | None) -> int:
    """Return ``length``; by default ``LENGTH``, or the model's positions if it has fewer.

    ``UsageError`` if ``length`` exceeds the positions of a model that learns them.
    """
    if length is not None and length < 1:
        raise UsageError(f"plan: expected length to be 1 token or more, got {length}", code="length-invalid")
    names = ("n_positions", "max_position_embeddings")
    positions = next((found for name in names if isinstance(found := getattr(config, name, None), int)), None)
    rotates = any(hasattr(config, name) for name in ("rope_theta", "rope_parameters", "rope_scaling"))
    if length is None:
        return LENGTH if positions is None else min(LENGTH, positions)
    if positions is not None and length > positions and not rotates:
        raise UsageError(
            f"plan: expected length to be at most the {positions} positions that the model has, got {length}",
            code="length-beyond-positions",
        )
    return length


def _shown(returned: Any) -> str:
    shape = " × ".join(map(str, returned.shape)) if isinstance(returned, Tensor) else ""
    return f"a tensor of {shape}" if shape else type(returned).__name__


def loss_of(returned: Any) -> Tensor:
    """Return ``returned.loss``, ``returned["loss"]``, or ``returned`` if it is a scalar; ``UsageError`` otherwise."""
    loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", returned)
    if not isinstance(loss, Tensor) or loss.dim():
        raise UsageError(
            f"plan: expected forward to return a loss, or something that has one, got {_shown(returned)}: "
            "loss=, a function of what it returns, says how to come to a scalar",
            code="plan-without-loss",
        )
    return loss
