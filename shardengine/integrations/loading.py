"""Loading a pretrained model of transformers on rank 0 alone, for what plain ``from_pretrained`` copies on every rank.

In the files' own dtype, which is transformers' default, ``from_pretrained`` maps the files into memory, of which the
ranks of a machine share the pages: a rank has a few MiB of its own, and nothing here is needed. A cast (``dtype=``),
weights that are joined or quantised while they are loaded, and files that are no safetensors are copies of each rank.
``initialize`` and ``prepare`` take rank 0's values, so that the others need none.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from shardengine.errors import UsageError


def load_pretrained(model_class: Any, *args: Any, **kwargs: Any) -> Any:
    """``model_class.from_pretrained(*args, **kwargs)`` on rank 0; on the others the same model on the meta device.

    model_class: a model or an Auto class of transformers. The rank is that of the process group, or of the launcher.
    Until an engine holds it, the model cannot be run or moved on ranks other than 0. UsageError for ``device_map``.
    """
    given = kwargs.pop("device_map", None)
    if given is not None:
        raise UsageError(f"load_pretrained: expected no device_map, got {given!r}; the engine places the weights")
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    elsewhere = {} if rank == 0 else {"device_map": "meta"}
    return model_class.from_pretrained(*args, **kwargs, **elsewhere)
