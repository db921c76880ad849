"""``import deepspeed`` finds this package, in one process. Owns: how a name is found, the metadata of the distribution.

Must not know: which names there are (table).
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
    """What ``importlib.metadata`` tells of deepspeed: its name and version."""

    def read_text(self, filename: str) -> str | None:
        """METADATA alone."""
        return f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {table.VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        """No file belongs to it."""
        return Path(path)


class _Names(importlib.abc.Loader):
    """Makes a module of the table."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """An ordinary one."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """With what the table has for it."""
        dotted = module.__name__.partition(".")[2]
        table.fill(module, dotted)
        if not dotted:
            vars(module)["__version__"] = table.VERSION
            table.install_below(_NAME)


class _Changed(importlib.abc.Loader):
    """Loads a framework's module as ever, then changes what has to be."""

    def __init__(self, ordinary: importlib.abc.Loader) -> None:
        self._ordinary = ordinary

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The ordinary one's."""
        return self._ordinary.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """And the change."""
        self._ordinary.exec_module(module)
        hosts.CHANGES[module.__name__](module)


class _Finder(importlib.metadata.DistributionFinder):
    """Answers before every other finder, for deepspeed alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Of ``deepspeed`` and what is below it; ModuleNotFoundError for what the table has not."""
        if fullname in hosts.CHANGES:
            return self._change(fullname, path)
        root, _, dotted = fullname.partition(".")
        if root != _NAME:
            return None
        if dotted and dotted not in table.MODULES:
            raise ModuleNotFoundError(table.missing(dotted), name=fullname)
        return importlib.machinery.ModuleSpec(fullname, _Names(), is_package=True)

    def _change(self, fullname: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changed(spec.loader)
        return spec

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Ours, where deepspeed is asked for."""
        return [_Distribution()] if context is not None and context.name == _NAME else []


def install() -> None:
    """From now on ``import deepspeed`` and its metadata answer from here, in this process. Once is enough.

    UsageError where another deepspeed was imported before.
    """
    there = sys.modules.get(_NAME)
    if there is not None and not str(getattr(there, "__version__", "")).endswith(table.VERSION.partition("+")[2]):
        raise UsageError(
            f"deepspeed {getattr(there, '__version__', '')} was imported before: expected the script to be run with "
            "`shardengine run --as-deepspeed`, or install() before that import"
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name, change in hosts.CHANGES.items():
            if name in sys.modules:
                change(sys.modules[name])
