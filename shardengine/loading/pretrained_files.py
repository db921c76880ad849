"""transformers' ``from_pretrained`` during a recording: it finds files, renames, converts, ties and reads no values.

Owns: the call that gives its loader tensors that stand for those in the files. Must not know: models, ranks.

``from_pretrained`` makes the model on the meta device and hands its loader the files. The loader is called as usual,
with tensors without values in place of mapped ones, in one thread, since a recording belongs to a thread. Everything
else is transformers' own: conversions are steps of the recording, and its initialisers draw missing weights, in its
order, when their values are needed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardengine.errors import UsageError
from shardengine.loading.recording import Recording
from shardengine.loading.safetensors_files import SafetensorsFiles

_LOADER = "_load_pretrained_model"
_IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"


class NotInSlices(UsageError):
    """A model whose weights ranks cannot read in parts: it has to be loaded as usual, whole on each rank."""


@contextmanager
def found_by_transformers(record: Recording) -> Iterator[None]:
    """Make ``record`` know the tensors that ``from_pretrained`` loads inside.

    Does nothing if transformers is not imported.
    """
    if "transformers" not in sys.modules:
        yield
        if "transformers" in sys.modules:
            raise UsageError(
                "meta_init: transformers was imported inside of the `with` block, where its loader cannot be exchanged "
                "any more: expected `import transformers` before it",
                code="meta-init-transformers-imported-inside",
            )
        return
    module: Any = importlib.import_module("transformers.modeling_utils")  # a lazy package
    kind = module.PreTrainedModel
    ordinary = getattr(kind, _LOADER, None)
    if ordinary is None:
        raise UsageError(
            f"meta_init: transformers has no PreTrainedModel.{_LOADER}; expected release 5",
            code="meta-init-transformers-release",
        )

    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        if state_dict is None:
            _check(checkpoint_files, load_config)
            files = SafetensorsFiles(Path(file) for file in checkpoint_files)
            state_dict = {name: record.add_source(files, name) for name in files.tensors}
        result = ordinary(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        _check_fit(result[0], load_config)
        return result

    own, before = vars(kind)[_LOADER], os.environ.get(_IN_ORDER)
    setattr(kind, _LOADER, staticmethod(load))
    os.environ[_IN_ORDER] = "1"
    try:
        yield
    finally:
        setattr(kind, _LOADER, own)
        del os.environ[_IN_ORDER]
        os.environ.update({} if before is None else {_IN_ORDER: before})


def _check(files: Any, load_config: Any) -> None:
    if load_config.hf_quantizer is not None:
        raise NotInSlices(
            "from_pretrained inside of meta_init: expected weights that are not quantised, whose own form another "
            "library makes; load such a model as usual, with values on every rank",
            code="meta-init-quantised-weights",
        )
    if load_config.device_map is not None and {str(place) for place in load_config.device_map.values()} != {"cpu"}:
        raise NotInSlices(
            f"from_pretrained inside of meta_init: expected no device_map, got {load_config.device_map!r}; the engine "
            "places the weights",
            code="meta-init-device-map",
        )
    others = [str(file) for file in files or () if not str(file).endswith(".safetensors")]
    if not files or others:
        raise NotInSlices(
            f"from_pretrained inside of meta_init: expected safetensors files, got {others[0] if others else 'none'}, "
            "which cannot be read in slices; load it once as usual and save_pretrained it",
            code="meta-init-weights-not-safetensors",
        )


def _check_fit(found: Any, load_config: Any) -> None:
    """Raise UsageError if transformers reports weights that it could not take."""
    if found.mismatched_keys and not load_config.ignore_mismatched_sizes:
        name, there, here = min(found.mismatched_keys)
        raise UsageError(
            f"{name!r} has shape {tuple(there)} in the weights and {tuple(here)} in the model: expected weights of "
            "this model, or ignore_mismatched_sizes=True, which initialises it anew",
            code="weights-shape-differs",
        )
    if found.conversion_errors:
        name, text = next(iter(found.conversion_errors.items()))
        raise UsageError(
            f"{name!r} cannot be converted as transformers does it: {text.strip().splitlines()[-1]}",
            code="weights-not-convertible",
        )
