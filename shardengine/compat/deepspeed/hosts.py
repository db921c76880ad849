"""What has to be changed in frameworks so that they work with an engine that is not DeepSpeed's, each with its reason.

Nothing of them is imported: ``stand_in`` changes the modules in ``CHANGES`` when they are loaded.

[Note: Ordinary loading] Under stage 3 transformers loads a model on rank 0 and writes it into parameters that
DeepSpeed has sharded before. Its ordinary loader maps the files into memory, of which the ranks of a machine share the
pages, and converts and renames weights, which the other does not. ``initialize`` shards from there. A model that is
made from a configuration would have its random weights on rank 0 alone, in another order than without stage 3.

[Note: Ranks on a CPU] Without an accelerator accelerate knows no backend for DeepSpeed and takes every process for the
only one, so that batches and ranks do not fit. gloo works there.
"""

from __future__ import annotations

import os
from typing import Any


def load_ordinarily(loader: Any) -> None:
    """transformers' ``loader`` takes its ordinary way ([Note: Ordinary loading]); the rest of it sees stage 3."""
    vars(loader)["is_deepspeed_zero3_enabled"] = _no


def _no() -> bool:
    return False


def know_ranks_on_cpus(state: Any) -> None:
    """accelerate's module ``state`` finds gloo where it would find no backend ([Note: Ranks on a CPU])."""
    kind = state.PartialState
    ordinary = kind._prepare_backend

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, distributed_type = ordinary(self, *args, **kwargs)
        launched = "LOCAL_RANK" in os.environ
        if backend is None and launched and os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
            backend = "gloo"
        return backend, distributed_type

    if not hasattr(ordinary, "__wrapped__"):
        vars(prepare)["__wrapped__"] = ordinary
        kind._prepare_backend = prepare


CHANGES = {"accelerate.state": know_ranks_on_cpus, "transformers.modeling_utils": load_ordinarily}
"""A module's name -> what changes it."""
