"""Warnings, logged once, about a run that works but may not be the intended one, and notes about a forward that raised.

Must not know: how anything is done. Nothing depends on this file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.comm import Mesh
from shardengine.config import NOT_CLIPPED, Config

_log = logging.getLogger(__name__)
_POSITIONS, _TOKENS = "max_position_embeddings", "input_ids"
_NAMED = 4
"""The number of shapes that a warning names."""


def tell(config: Config, of_optimizer: str, optimizer: Any, lr_scheduler: Any, mesh: Mesh) -> None:
    """On rank 0, warn of everything known at the start. of_optimizer: a sentence about it, "" for none."""
    if mesh.rank:
        return
    told = [notice for notice in config.notices if notice != NOT_CLIPPED]
    of_config = f"of the config: {'; '.join(told)}" if told else ""
    given = beside_the_config(config, optimizer, lr_scheduler)
    for notice in filter(None, (of_config, of_optimizer, *given, about_ranks(config, mesh))):
        _log.warning("%s", notice)


def beside_the_config(config: Config, optimizer: Any, lr_scheduler: Any) -> list[str]:
    """Sentences about arguments of ``initialize`` that the config has as well; the argument is used."""
    found = []
    for key, section, given in (
        ("optimizer", config.optimizer, optimizer),
        ("lr_scheduler", config.scheduler, lr_scheduler),
    ):
        if section is not None and given is not None:
            of_config = "optimizer" if key == "optimizer" else "scheduler"
            found.append(
                f'initialize was given {key}=, and the config has "{of_config}" ({section.type}) as well: the argument '
                "counts, with its own options; leave one of them out"
            )
    return found


def about_ranks(config: Config, mesh: Mesh) -> str:
    """A sentence if the engine has only some of all ranks, and clips gradients by the norm over these alone; "" if not.

    "" also if another check covers the case.
    """
    if not mesh.global_ranks or mesh.beside or not config.gradient_clipping:
        return ""
    return (
        f"gradients are clipped by the norm over the {mesh.ranks} rank(s) that initialize was given. Where other ranks "
        "hold other parts of the same model, they clip by another norm, and what the parts share drifts apart: give "
        'mesh= a part of a DeviceMesh, as mesh["dp"] of one with ("dp", "tp"), which says what to do'
    )


def about_batch(micro_batch: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A sentence if no tensor of forward's arguments has a dimension of ``micro_batch``; "" otherwise.

    "" also for 1, which is the value if nobody counts samples.
    """
    shapes = [tuple(tensor.shape) for tensor in _tensors([args, kwargs]) if tensor.dim()]
    if micro_batch == 1 or not shapes or any(micro_batch in shape for shape in shapes):
        return ""
    shown = ", ".join(map(str, dict.fromkeys(shapes[:_NAMED])))
    return (
        f"train_micro_batch_size_per_gpu is {micro_batch}, and no tensor of the first batch has a dimension of that "
        f"size (shapes: {shown}). Samples are counted with the config's number, and gradient_accumulation_steps "
        "follows from it where it is not given: expected the number of samples that forward is given at once on one "
        "rank"
    )


def about_length(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A sentence if a sample has more tokens than ``module`` has positions; "" if not.

    The number of positions comes from the module's transformers configuration.
    """
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
    """Add a note to the model's ``error`` for each usual cause that is found.

    The causes are an input on another device, tokens that the model does not know, and more tokens than positions.
    """
    given = {f"argument {place + 1}": each for place, each in enumerate(args)} | dict(kwargs)
    for name, tensor in given.items():
        if isinstance(tensor, Tensor) and tensor.device != device and tensor.dim():
            error.add_note(
                f"shardengine: {name} is on {tensor.device}, and rank {rank} computes on {device}: expected inputs on "
                f"engine.device, as {name if name.isidentifier() else 'tensor'}.to(engine.device)"
            )
    if isinstance(error, IndexError) and (text := about_length(module, args, kwargs)):
        error.add_note(f"shardengine: on rank {rank} {text}")
    if isinstance(error, IndexError) and (text := _about_words(module, given)):
        error.add_note(f"shardengine: on rank {rank} {text}")


def _about_words(module: nn.Module, given: Mapping[str, Any]) -> str:
    """A sentence if a token has no row in the embedding; "" if not."""
    words = getattr(getattr(module, "config", None), "vocab_size", None)
    ids = given.get(_TOKENS)
    if (
        not isinstance(words, int)
        or not isinstance(ids, Tensor)
        or ids.is_floating_point()
        or not ids.numel()
        or not ids.is_cpu
    ):
        return ""
    largest = int(ids.max())
    if largest < words:
        return ""
    return (
        f"{_TOKENS} has the token {largest}, and {type(module).__name__} knows {words} (config.vocab_size): expected "
        "the tokenizer of this model, or model.resize_token_embeddings(len(tokenizer)) before initialize"
    )


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        for each in given.values():
            yield from _tensors(each)
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _tensors(each)
