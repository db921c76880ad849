"""``engine.load_state_dict``: a whole state dict of the model into weights that may be sharded.

Owns: which keys the model has, the order of modules. Must not know: how weights are gathered and written back
(``full_access``), the optimizer.

Module after module is loaded as torch does it, with the hooks of each; those whose weights are gathered together come
together, so that no more is whole at a time than one unit. Rank 0's values are everybody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys

from shardengine.comm import compare, run_on_all_ranks
from shardengine.engine.core import Core
from shardengine.engine.full_access import full_params
from shardengine.errors import UsageError
from shardengine.sharding import inner

_Module = tuple[str, nn.Module]


def load(core: Core, module: nn.Module, given: Any, *, strict: bool, assign: bool) -> _IncompatibleKeys:
    """See ``Engine.load_state_dict``; collective."""
    core.schedule.finish_open_backward()
    core.step_state.require("load_state_dict")
    compare(core.collectives, {"call": [f"load_state_dict(strict={strict})"]})
    has = run_on_all_ranks(
        core.collectives, "load_state_dict()", lambda: _check(core, module, given, strict=strict, assign=assign)
    )
    state = dict(given)
    found = _Found(state, getattr(given, "_metadata", None))
    with _kept(core.partition.ignored.values()):
        for names, modules in _runs(core, module):
            if not names:
                found.load_all(modules if core.mesh.rank == 0 else ())
                continue
            with full_params(core, names, writable=True):
                found.load_all(modules if core.mesh.rank == 0 else ())
    if core.mesh.rank != 0 and has:
        found.set_extra_states(module)
    run_on_all_ranks(core.collectives, "load_state_dict()", found.raise_if_failed)
    core.buffers.broadcast(persistent_only=True)
    told = [found.missing, found.unexpected]
    missing, unexpected = core.collectives.exchange_objects(told, "load_state_dict()")[0]
    keys = _IncompatibleKeys(missing, unexpected)

    def end() -> None:
        if core.mesh.rank == 0:
            found.run_post_hooks(module, keys)
            if strict and (missing or unexpected):
                raise UsageError(_unfit(missing, unexpected) + "; the rest was loaded")

    run_on_all_ranks(core.collectives, "load_state_dict()", end)
    return keys


@contextmanager
def _kept(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters that are the user's alone keep their values, on rank 0 as on others."""
    before = [(parameter, parameter.detach().clone()) for parameter in parameters]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in before:
                parameter.copy_(values)


def _check(core: Core, module: nn.Module, given: Any, *, strict: bool, assign: bool) -> bool:
    """Whether this rank has a dict, which fits as far as can be known before it is loaded."""
    where = f"load_state_dict (rank {core.mesh.rank})"
    if assign:
        raise UsageError(f"{where}: expected assign=False, the engine's buckets hold the weights; values are copied")
    if not isinstance(given, Mapping):
        raise UsageError(f"{where}: expected a model's state dict, got {type(given).__name__}")
    if not given:
        if core.mesh.rank == 0:
            raise UsageError(f"{where}: expected the whole state dict on rank 0, or on every rank, got {{}}")
        extra = [name for name in _names(core, module) if name.endswith(_EXTRA_STATE_KEY_SUFFIX)]
        if extra:
            raise UsageError(f"{where}: expected the whole dict on every rank, because it has {extra[0]!r}; got {{}}")
        return False
    expected = _names(core, module)
    for name in expected.keys() & given.keys():
        ours, value = expected[name], given[name]
        if not isinstance(ours, Tensor) or name.endswith(_EXTRA_STATE_KEY_SUFFIX):
            continue
        if not isinstance(value, Tensor) or (value.shape != ours.shape and (ours.dim() or value.numel() != 1)):
            came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(f"{where}: {name!r}: expected shape {tuple(ours.shape)}, got {came}; nothing was loaded")
    if strict and not _translates(module):
        missing, unexpected = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        if missing or unexpected:
            raise UsageError(f"{where}: {_unfit(missing, unexpected)}; nothing was loaded")
    return True


def _unfit(missing: list[str], unexpected: list[str]) -> str:
    texts = [
        f"{what} {', '.join(map(repr, names[:4]))}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for what, names in (("it lacks", missing), ("the model has not", unexpected))
        if names
    ]
    way = "strict=False loads what fits"
    for prefix in ("module.", "_orig_mod.") if unexpected else ():
        if all(name.startswith(prefix) for name in unexpected):
            way = f"take {prefix!r} off the keys, which DistributedDataParallel or torch.compile has put before them"
    return f"the state dict does not fit the model: {'; '.join(texts)} ({way})"


def _names(core: Core, module: nn.Module) -> dict[str, Any]:
    """The keys of the model's state dict, with what stands for their values."""
    with core.attachments.state_dict_allowed():
        return dict(module.state_dict(keep_vars=True))


def _translates(module: nn.Module) -> bool:
    """Whether some module changes the keys that it is given, so that only loading tells which are missing."""
    return any(
        type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
        or any(not _is_ours(hook) for hook in part._load_state_dict_pre_hooks.values())
        for part in module.modules()
    )


def _is_ours(hook: Any) -> bool:
    return type(getattr(hook, "hook", hook)).__module__.startswith("shardengine.")


def _runs(core: Core, module: nn.Module) -> list[tuple[list[str], list[_Module]]]:
    """Modules in torch's order, in runs whose parameters lie in the same units, with the names of these."""
    unit_of = {id(m.parameter): unit.index for unit in core.units for m in unit.members}
    runs: list[tuple[frozenset[int], list[str], list[_Module]]] = []
    first = core.partition.first_names()
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = [each for p in part._parameters.values() if p is not None for _, each in inner.parts_of(p)]
        units = frozenset(unit_of.get(id(p), -1) for p in own)
        if not runs or (own and runs[-1][0] != units):
            runs.append((units, [], []))
        names = runs[-1][1]
        names += [first[id(p)] for p in own if id(p) in first and first[id(p)] not in names]
        runs[-1][2].append((prefix, part))
    return [(names, modules) for _, names, modules in runs]


class _Found:
    """What loading modules of ``state`` has found; an error of one ends it."""

    def __init__(self, state: dict[str, Any], metadata: Any) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._state = state
        self._metadata = metadata
        self._problems: list[str] = []
        self._failure: Exception | None = None

    def load_all(self, modules: Any) -> None:
        """Torch's own way for each module."""
        for prefix, part in modules:
            if self._failure is not None or self._problems:
                return
            before = f"{prefix}." if prefix else ""
            metadata = {} if self._metadata is None else self._metadata.get(prefix, {})
            try:
                own = {name: value for name, value in self._state.items() if name.startswith(before)}
                part._load_from_state_dict(own, before, metadata, True, self.missing, self.unexpected, self._problems)
            except Exception as error:
                self._failure = error

    def set_extra_states(self, module: nn.Module) -> None:
        """On other ranks than 0."""
        for prefix, part in module.named_modules():
            name = f"{prefix}.{_EXTRA_STATE_KEY_SUFFIX}" if prefix else _EXTRA_STATE_KEY_SUFFIX
            if name in self._state:
                part.set_extra_state(self._state[name])

    def run_post_hooks(self, module: nn.Module, keys: _IncompatibleKeys) -> None:
        """Those that were registered on modules."""
        for part in module.modules():
            for hook in part._load_state_dict_post_hooks.values():
                hook(part, keys)

    def raise_if_failed(self) -> None:
        """What a module said."""
        if self._failure is not None:
            raise self._failure
        if self._problems:
            raise UsageError(f"load_state_dict: {'; '.join(self._problems)}")
