"""deepspeed.utils: leaf modules, which a script marks as gathered as one. Owns: the mark. Must not know: engines.

The mark has no effect other than that frameworks can read it. The engine gathers each repeated block as one anyway, and
ranks may use different parts of a block. ``zero_optimization.units`` names the classes of other such modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

_MARK = "_z3_leaf"
DEFAULT_CLASSES = [
    f"transformers.models.{name}"
    for name in (
        "mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
    )
]
"""Classes that DeepSpeed marks by default."""


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether the module itself is marked."""
    return bool(getattr(model, _MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the marked modules of ``model``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark the module itself, or remove the mark."""
    vars(model)[_MARK] = flag


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes and return them.

    A class includes its subclasses; a name, also a fully qualified one, does not. ValueError if no module is found,
    unless ``raise_if_not_found`` is False.
    """
    return _mark_classes(model, leaf_module_classes, True, raises=raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks that ``set_z3_leaf_modules`` sets; return the modules."""
    return _mark_classes(model, leaf_module_classes, False, raises=raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules at these paths; return (the modules, the paths without a module).

    ValueError if there is such a path, unless ``raise_if_not_found`` is False.
    """
    known = dict(model.named_modules())
    return _mark_named(
        model, {name: [name] if name in known else [] for name in module_names}, flag, raise_if_not_found
    )


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Do the same as ``set_z3_leaf_modules_by_name`` for every path that ends with one of the suffixes."""
    paths = [path for path, _ in model.named_modules()]
    found = {suffix: [path for path in paths if path.endswith(suffix)] for suffix in module_name_suffixes}
    return _mark_named(model, found, flag, raise_if_not_found)


def _mark_named(
    model: nn.Module, found: dict[str, list[str]], flag: bool, raises: bool
) -> tuple[list[nn.Module], list[str]]:
    missing = [given for given, paths in found.items() if not paths]
    if missing and raises:
        raise ValueError(f"expected paths of modules of {type(model).__name__}, got {', '.join(map(repr, missing))}")
    known = dict(model.named_modules())
    modules = [known[path] for path in dict.fromkeys(path for paths in found.values() for path in paths)]
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules, missing


def _mark_classes(model: nn.Module, classes: Iterable[Any], flag: bool, *, raises: bool) -> list[nn.Module]:
    given = list(classes)
    if wrong := [each for each in given if not isinstance(each, type | str)]:
        raise TypeError(f"expected classes of modules or their names, got {wrong[0]!r}")
    kinds = tuple(each for each in given if isinstance(each, type))
    names = {each for each in given if isinstance(each, str)}
    found = [module for module in model.modules() if isinstance(module, kinds) or names & _names_of(type(module))]
    if not found and raises:
        said = ", ".join(each if isinstance(each, str) else each.__name__ for each in given)
        raise ValueError(f"expected a class of which {type(model).__name__} has modules, got {said}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _names_of(kind: type) -> set[str]:
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def mark_as_configured(model: nn.Module, section: Any) -> None:
    """Mark the modules that a config's ``zero_optimization.leaf_module`` names, or the default ones.

    Names that the model does not have are ignored.
    """
    section = {"classes": DEFAULT_CLASSES, **(section if isinstance(section, Mapping) else {})}
    classes, names, suffixes = (_listed(section.get(key)) for key in ("classes", "names", "name_suffixes"))
    set_z3_leaf_modules(model, classes, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, names, raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, suffixes, raise_if_not_found=False)


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


NAMES: dict[str, Any] = {
    f"utils.{each.__name__}": each
    for each in (
        *(set_z3_leaf_modules, unset_z3_leaf_modules, get_z3_leaf_modules, z3_leaf_module, set_z3_leaf_module),
        *(set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix),
    )
}
NAMES |= {
    f"runtime.zero.leaf_module_config.DEFAULT_LEAF_MODULE_{name}": value
    for name, value in {"CLASSES": DEFAULT_CLASSES, "NAMES": [], "NAME_SUFFIXES": []}.items()
}
"""Dotted name → the object."""
