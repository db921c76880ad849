"""What a user is told once of a run that works, and may not be the one that was meant.

Must not know: how anything is done. Nothing depends on what is here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardengine.comm import Mesh
from shardengine.config import NOT_CLIPPED, Config

_log = logging.getLogger(__name__)
_NAMED = 4
"""As many shapes are named."""


def tell(config: Config, of_optimizer: str, optimizer: Any, lr_scheduler: Any, mesh: Mesh) -> None:
    """Rank 0 warns of all that is known at the start. of_optimizer: a sentence about it; "" for none."""
    if mesh.rank:
        return
    told = [notice for notice in config.notices if notice != NOT_CLIPPED]
    of_config = f"of the config: {'; '.join(told)}" if told else ""
    given = beside_the_config(config, optimizer, lr_scheduler)
    for notice in filter(None, (of_config, of_optimizer, *given, about_ranks(config, mesh))):
        _log.warning("%s", notice)


def beside_the_config(config: Config, optimizer: Any, lr_scheduler: Any) -> list[str]:
    """What ``initialize`` was given that the config says as well: the argument counts."""
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
    """That some ranks of several clip alone; "" where they do not, or another check knows more."""
    if not mesh.global_ranks or mesh.beside or not config.gradient_clipping:
        return ""
    return (
        f"gradients are clipped by the norm over the {mesh.ranks} rank(s) that initialize was given. Where other ranks "
        "hold other parts of the same model, they clip by another norm, and what the parts share drifts apart: give "
        'mesh= a part of a DeviceMesh, as mesh["dp"] of one with ("dp", "tp"), which says what to do'
    )


def about_batch(micro_batch: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """That what forward was given has not ``micro_batch`` samples; "" where it may have, and for 1, which is also what
    is written where nobody counts samples."""
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


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        for each in given.values():
            yield from _tensors(each)
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _tensors(each)
