"""Make ``import deepspeed`` find this package, in one process. Owns: the finder, the metadata of the distribution.

Must not know: the names (table).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from shardengine.compat.deepspeed import hosts, table
from shardengine.errors import UsageError

_NAME = "deepspeed"


class _Distribution(importlib.metadata.Distribution):
    """The distribution deepspeed for ``importlib.metadata``: its name and version."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of METADATA; None for other files."""
        return f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {table.VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """Return ``path`` unchanged: no file belongs to the distribution."""
        return Path(path)


class _StandInNames(importlib.abc.Loader):
    """Loads a module of the table."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Return None: an ordinary module is created."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module from the table."""
        dotted = module.__name__.partition(".")[2]
        table.fill(module, dotted)
        if not dotted:
            vars(module)["__version__"] = table.VERSION
            table.install_below(_NAME)


class _Changed(importlib.abc.Loader):
    """Loads a framework's module ordinarily, then patches it (``hosts.CHANGES``)."""

    def __init__(self, ordinary: importlib.abc.Loader) -> None:
        self._ordinary = ordinary

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Let the ordinary loader create the module."""
        return self._ordinary.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Let the ordinary loader execute the module, then patch it."""
        self._ordinary.exec_module(module)
        hosts.CHANGES[module.__name__](module)


class _Finder(importlib.metadata.DistributionFinder):
    """Answers before every other finder, for deepspeed and the modules in ``hosts.CHANGES``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find ``deepspeed`` and its submodules; ModuleNotFoundError for one that is not in the table."""
        if fullname in hosts.CHANGES:
            return self._change(fullname, path)
        root, _, dotted = fullname.partition(".")
        if root != _NAME:
            return None
        if dotted and dotted not in table.MODULES:
            raise ModuleNotFoundError(table.missing(dotted), name=fullname)
        return importlib.machinery.ModuleSpec(fullname, _StandInNames(), is_package=True)

    def _change(self, fullname: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changed(spec.loader)
        return spec

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Return our distribution if deepspeed is requested, else none."""
        return [_Distribution()] if context is not None and context.name == _NAME else []


def install() -> None:
    """Make ``import deepspeed`` and its metadata use this package in this process. A second call has no effect.

    UsageError if another deepspeed was imported before.
    """
    there = sys.modules.get(_NAME)
    if there is not None and not str(getattr(there, "__version__", "")).endswith(table.VERSION.partition("+")[2]):
        raise UsageError(
            f"deepspeed {getattr(there, '__version__', '')} was imported before: expected the script to be run with "
            "`shardengine run --as-deepspeed`, or install() before that import",
            code="deepspeed-imported-before",
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name, change in hosts.CHANGES.items():
            if name in sys.modules:
                change(sys.modules[name])
