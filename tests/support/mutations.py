"""Breaking the engine on purpose: one expression of one function is replaced, in this process, for a while.

Must not know: what is broken and why.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from shardengine.offload import Done

PACKAGE = "shardengine"


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module by name, and the methods of its classes as "Class.method"."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef))


def calls(path: Path, names: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(function, text) of every call of a method, or of a function, with one of these names in a file."""
    for function, node in functions(ast.parse(path.read_text())):
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and _name(each.func) in names:
                yield function, ast.unparse(each)


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


@contextmanager
def mutated(file: str, function: str, old: str, new: str) -> Iterator[None]:
    """Inside, ``old`` in ``function`` of ``file`` (of the package) is ``new``; both as ``ast.unparse`` writes them.

    new: may also use ``nullcontext`` and ``Done``.
    """
    module = importlib.import_module(f"{PACKAGE}.{file.removesuffix('.py').replace('/', '.')}")
    owner, _, name = function.rpartition(".")
    holder: Any = getattr(module, owner) if owner else module
    found = inspect.unwrap(inspect.getattr_static(holder, name))
    source = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(getattr(found, "fget", None) or found))))
    if old not in source:  # no AssertionError, which is what a mutation makes of a run
        raise LookupError(f"{file}, {function}: expected {old!r} in\n{source}")
    made: dict[str, Any] = {}
    importers = [each for path, each in list(sys.modules.items()) if path.startswith(PACKAGE) and not owner]
    with pytest.MonkeyPatch.context() as patch:
        for each in (nullcontext, Done):
            patch.setattr(module, each.__name__, each, raising=False)
        exec(compile(source.replace(old, new), file, "exec"), vars(module), made)
        for each in (holder, *(each for each in importers if vars(each).get(name) is getattr(module, name))):
            patch.setattr(each, name, made[name])
        yield
