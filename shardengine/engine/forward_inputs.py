"""What forward was given, told where the model raised: the usual causes in a sentence. Nothing depends on what is here.

Must not know: how anything is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_POSITIONS, _TOKENS = "max_position_embeddings", "input_ids"


def named_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments of a forward, with a name for each."""
    for place, value in enumerate(args):
        yield from ((f"argument {place + 1}", value),) if isinstance(value, Tensor) else ()
    for name, value in kwargs.items():
        yield from ((name, value),) if isinstance(value, Tensor) else ()


def about_length(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """That a sample has more tokens than ``module`` has positions, by its transformers configuration; "" if not."""
    limit = getattr(getattr(module, "config", None), _POSITIONS, None)
    ids = kwargs.get(_TOKENS, args[0] if args else None)
    if not isinstance(limit, int) or not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2:
        return ""
    if "position_ids" in kwargs or ids.shape[1] <= limit:
        return ""
    return (
        f"{_TOKENS} has {ids.shape[1]} tokens in a row, and {type(module).__name__} has {limit} positions ("
        f"config.{_POSITIONS}): expected rows of at most {limit}"
    )


def explain(
    error: BaseException, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device,
    rank: int,
) -> None:  # fmt: skip
    """Add to what the model raised a note for each usual cause that is seen: an input on another device, tokens that
    the model does not know, more tokens than positions."""
    given = list(named_tensors(args, kwargs))
    for name, tensor in given:
        if tensor.device != device and tensor.dim():
            error.add_note(
                f"shardengine: {name} is on {tensor.device}, and rank {rank} computes on {device}: expected inputs on "
                f"engine.device, as {name if name.isidentifier() else 'tensor'}.to(engine.device)"
            )
    if isinstance(error, IndexError) and (text := about_length(module, args, kwargs)):
        error.add_note(f"shardengine: on rank {rank} {text}")
    if isinstance(error, IndexError) and (text := _about_words(module, given)):
        error.add_note(f"shardengine: on rank {rank} {text}")


def _about_words(module: nn.Module, given: Sequence[tuple[str, Tensor]]) -> str:
    """That a token has no row of the embedding."""
    words = getattr(getattr(module, "config", None), "vocab_size", None)
    ids = dict(given).get(_TOKENS)
    if not isinstance(words, int) or ids is None or ids.is_floating_point() or not ids.numel() or not ids.is_cpu:
        return ""
    largest = int(ids.max())
    if largest < words:
        return ""
    return (
        f"{_TOKENS} has the token {largest}, and {type(module).__name__} knows {words} (config.vocab_size): expected "
        "the tokenizer of this model, or model.resize_token_embeddings(len(tokenizer)) before initialize"
    )
