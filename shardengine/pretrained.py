"""``load_pretrained``: a pretrained model of transformers, sharded while it is loaded. Nothing is read or placed here.

Every rank makes the model inside of ``meta_init``, where ``from_pretrained`` reads only the heads of the files, and
``initialize`` gives each rank its own slices. The mesh is built before, so that a failure of one rank to read the files
raises on all.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardengine.comm import Collectives, run_on_all_ranks
from shardengine.config import Config, load_or_default
from shardengine.core import mesh_of
from shardengine.engine import Engine
from shardengine.errors import UsageError
from shardengine.loading import meta_init
from shardengine.offload import BufferPool
from shardengine.start import initialize

_OF_INITIALIZE = [name for name in inspect.signature(initialize).parameters if name not in ("model", "config")]
_NOT_HERE = {
    "model_parameters": "put the choice into optimizer=, a function from parameters to an optimizer",
    "weights": "the first argument says where they are",
    "device_map": "the engine places the weights",
}


def load_pretrained(
    name: str | Path,
    config: Mapping[str, Any] | str | Path | Config,
    *,
    model_class: Any = None,
    dtype: Any = None,
    **options: Any,
) -> Engine:
    """Return an engine that trains a pretrained model of transformers; no rank ever holds more of it than its part.

    Collective. name: a folder, or an id of the hub, as for ``from_pretrained``; its files are safetensors ·
    model_class: a model or an Auto class of transformers, default the class that the model's own configuration names ·
    dtype: of the weights, default ``from_pretrained``'s · options: those of ``initialize`` (optimizer, lr_scheduler,
    mesh, monitors); any other goes to ``from_pretrained``. The weights are, to the bit, those of ``from_pretrained``
    and ``initialize``. The model is ``engine.module``, in evaluation mode, as ``from_pretrained`` leaves it. To add
    adapters or frozen layers to it, call ``from_pretrained`` inside of ``meta_init``, and then ``initialize``.

    Raises UsageError for files that are cut off, or of another kind or shape; on other ranks MismatchError. The error
    of ``from_pretrained`` for a place without a model is raised unchanged.
    """
    for each in options.keys() & _NOT_HERE.keys():
        raise UsageError(
            f"load_pretrained: expected no {each}=: {_NOT_HERE[each]}", code="load-pretrained-option-unsupported"
        )
    given = {key: options.pop(key) for key in _OF_INITIALIZE if key in options}
    if dtype is not None:
        options["dtype"] = dtype
    mesh = mesh_of(given.pop("mesh", None), load_or_default(config).timeout_s)
    try:
        collectives = Collectives(mesh, BufferPool(mesh.platform))
        model = run_on_all_ranks(collectives, f"loading {name}", lambda: _make(name, model_class, options))
    except BaseException:
        mesh.abandon()
        raise
    return initialize(model, config, mesh=mesh, **given)


def _make(name: str | Path, model_class: Any, options: dict[str, Any]) -> Any:
    """Return the model, without values."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"load_pretrained: expected transformers to be installed: {error}", code="package-not-installed"
        ) from None
    if model_class is None:
        found = transformers.AutoConfig.from_pretrained(name, **_for_config(options))
        classes = getattr(found, "architectures", None) or ["nothing"]
        model_class = getattr(transformers, classes[0], None)
        if model_class is None:
            raise UsageError(
                f"load_pretrained: expected model_class=, the configuration of {name} names {classes[0]}, which is no "
                "class of transformers",
                code="load-pretrained-class-unknown",
            )
    if not hasattr(model_class, "from_pretrained"):
        raise UsageError(
            f"load_pretrained: expected model_class= with from_pretrained, got {model_class!r}",
            code="load-pretrained-class-invalid",
        )
    with meta_init():
        return model_class.from_pretrained(name, **options)


def _for_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``from_pretrained``'s options that find the files."""
    wanted = "cache_dir force_download local_files_only token revision subfolder trust_remote_code".split()
    return {key: options[key] for key in wanted if key in options}
