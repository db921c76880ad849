"""Load a pretrained model of transformers on rank 0 alone, if ``from_pretrained`` would make a copy on every rank.

In the dtype of the files, which is transformers' default, ``from_pretrained`` maps the files into memory, and the ranks
of a machine share these pages. A rank then needs only a few MiB of its own, and this module is not needed. But each
rank has its own copy after a cast (``dtype=``), if weights are merged or quantized while they are loaded, and if the
files are no safetensors. ``initialize`` and ``prepare`` take rank 0's values, so the other ranks need none.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from shardengine.errors import UsageError


def load_pretrained(model_class: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``model_class.from_pretrained(*args, **kwargs)`` on rank 0, the same model on the meta device elsewhere.

    model_class: a model or Auto class of transformers. The rank is that of the process group; without a process group,
    the launcher's RANK. Until an engine holds the model, it cannot be run or moved on ranks other than 0. UsageError
    for ``device_map``.
    """
    given = kwargs.pop("device_map", None)
    if given is not None:
        raise UsageError(
            f"load_pretrained: expected no device_map, got {given!r}; the engine places the weights",
            code="load-pretrained-device-map",
        )
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    elsewhere = {} if rank == 0 else {"device_map": "meta"}
    return model_class.from_pretrained(*args, **kwargs, **elsewhere)
