"""Python runs this file when it starts, if its folder is in PYTHONPATH: `shardengine run --as-deepspeed --children`.

Owns: child processes find shardengine as deepspeed. It imports nothing of shardengine until the process imports
deepspeed, or a module that has to be patched. If the path has another sitecustomize, that one runs as well.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys

_CHANGED = (
    "accelerate.state",
    "peft.tuners.trainable_tokens.layer",
    "transformers.modeling_utils",
    "transformers.trainer",
)


class _ImportLater(importlib.metadata.DistributionFinder):
    """A finder that replaces itself by that of ``stand_in`` when it is needed."""

    def _make_way(self):  # type: ignore[no-untyped-def]
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            from shardengine.compat.deepspeed import stand_in

            stand_in.install()
        return sys.meta_path[0]

    def find_spec(self, fullname, path, target=None):  # type: ignore[no-untyped-def]
        """Find ``deepspeed`` and the modules in ``hosts.CHANGES``; None for others."""
        if fullname.partition(".")[0] == "deepspeed" or fullname in _CHANGED:
            return self._make_way().find_spec(fullname, path, target)
        return None

    def find_distributions(self, context=None):  # type: ignore[no-untyped-def]
        """Find the distribution of deepspeed; none for other names."""
        if context is None or context.name != "deepspeed":
            return []
        return self._make_way().find_distributions(context)


sys.meta_path.insert(0, _ImportLater())

_here = os.path.dirname(os.path.abspath(__file__))
_others = [folder for folder in sys.path if os.path.abspath(folder) != _here]
if (_spec := importlib.machinery.PathFinder.find_spec("sitecustomize", _others)) and _spec.loader:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
