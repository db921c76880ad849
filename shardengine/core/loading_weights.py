"""``engine.load_state_dict``: loads a whole state dict of the model into weights that may be sharded.

Owns: the writes of a load, the time when they may happen, the order of modules. Must not know: how weights are gathered
and written back (``full_access``), the optimizer.

[Note: Read, then written] torch loads one module after another. A module's hooks and its ``_load_from_state_dict`` may
rename and change the rest of the dict for it and its children, and fitting values are copied at once. So torch knows
whether a dict fits only when half of it is loaded.

Here every rank that has the dict first lets each module load into stand-ins, which record the writes. A module's code
runs once. When all ranks agree that the dict fits, the recorded writes are done:

- weights on rank 0, whose values every rank gets. Weights that are gathered together are written together, so that no
  more than one unit is whole at a time.
- buffers and extra states on each rank.

A module that reads the weight which it overwrites needs it whole, so this raises ``UsageError``. Modules with quantised
weights, which are objects around other tensors, load directly, on rank 0, after all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, _IncompatibleKeys

from shardengine.comm import compare, run_on_all_ranks
from shardengine.core.full_access import full_params
from shardengine.core.parts import Core
from shardengine.errors import UsageError
from shardengine.sharding import inner

_Module = tuple[str, nn.Module]


def load(core: Core, module: nn.Module, given: Any, *, strict: bool, assign: bool) -> _IncompatibleKeys:
    """See ``Engine.load_state_dict``; collective."""
    core.schedule.finish_open_backward()
    core.step_state.require("load_state_dict")
    compare(core.collectives, {"call": [f"load_state_dict(strict={strict})"]})
    runs, is_first = _runs(core, module), core.mesh.rank == 0

    def read() -> _StateDictReading | None:
        if not _check(core, module, given, assign=assign):
            return None
        found = _StateDictReading(
            dict(given), getattr(given, "_metadata", None), f"load_state_dict (rank {core.mesh.rank})"
        )
        with core.attachments.loading():
            found.read(module)
        found.settle(module, strict=strict)
        return found

    reading = run_on_all_ranks(core.collectives, "load_state_dict()", read)
    ignored = {id(parameter) for parameter in core.partition.ignored.values()}
    for names, modules in runs:
        with full_params(core, names, writable=True) if names else nullcontext():
            if is_first and reading is not None:
                reading.write(modules, ignored)

    def end() -> tuple[list[str], list[str]]:
        if reading is None:
            return [], []
        reading.end(module)
        return reading.missing, reading.unexpected

    told = run_on_all_ranks(core.collectives, "load_state_dict()", end)
    core.buffers.broadcast(persistent_only=True)
    return _IncompatibleKeys(*core.collectives.exchange_objects(told, "load_state_dict()")[0])


def _check(core: Core, module: nn.Module, given: Any, *, assign: bool) -> bool:
    """Check the arguments. Returns whether this rank has a dict."""
    where = f"load_state_dict (rank {core.mesh.rank})"
    if assign:
        raise UsageError(
            f"{where}: expected assign=False, the engine's buckets hold the weights; values are copied",
            code="state-dict-with-assign",
        )
    if not isinstance(given, Mapping):
        raise UsageError(
            f"{where}: expected a model's state dict, got {type(given).__name__}", code="state-dict-not-a-dict"
        )
    if not given and core.mesh.rank == 0:
        raise UsageError(
            f"{where}: expected the whole state dict on rank 0, or on every rank, got {{}}", code="state-dict-empty"
        )
    if not given:
        for prefix, part in module.named_modules():
            if type(part).set_extra_state is not nn.Module.set_extra_state:
                name = f"{prefix}.{_EXTRA_STATE_KEY_SUFFIX}" if prefix else _EXTRA_STATE_KEY_SUFFIX
                raise UsageError(
                    f"{where}: expected the whole dict on every rank, because it has {name!r}; got {{}}",
                    code="state-dict-extra-state-missing",
                )
    return bool(given)


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


def _runs(core: Core, module: nn.Module) -> list[tuple[list[str], list[_Module]]]:
    """The modules in torch's order, split into runs whose parameters lie in the same units.

    Each run comes with the names of its parameters.
    """
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


class _LoadTarget(nn.Parameter):
    """Stands for a parameter while a dict is read: has its shape, and records the writes to it."""

    writes: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]
    device_of: torch.device

    @staticmethod
    def of(parameter: nn.Parameter) -> _LoadTarget:
        """Return a stand-in for ``parameter``."""
        slot = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").as_subclass(_LoadTarget)
        slot.writes, slot.device_of = [], parameter.device
        return slot

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record writes, and answer operations that need no value; all others raise."""
        options = kwargs or {}
        slot, name = args[0] if args else None, getattr(function, "__name__", "")
        if not isinstance(slot, _LoadTarget):
            raise _ReadsWeight(name)
        if function == _DEVICE:
            return slot.device_of
        if function == _IS_META:
            return slot.device_of.type == "meta"
        if function in _ITSELF:
            return slot
        if function == _ASSIGNS_DATA:
            slot.writes.append((Tensor.copy_, args[1:], {}))
            return None
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            if any(isinstance(each, _LoadTarget) for each in (*args[1:], *options.values())):
                raise _ReadsWeight(name)
            slot.writes.append((function, args[1:], options))
            return slot
        if name not in _OF_SHAPE:
            raise _ReadsWeight(name)
        with torch._C.DisableTorchFunctionSubclass():
            answer = function(*args, **options)
        if isinstance(answer, Tensor):
            raise _ReadsWeight(name)
        return answer


class _ReadsWeight(Exception):
    """Raised when an operation needs the values of a stand-in."""


_DEVICE, _IS_META = Tensor.device.__get__, Tensor.is_meta.__get__  # type: ignore[attr-defined]
_ASSIGNS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_ITSELF = (Tensor.data.__get__, Tensor.detach, Tensor.requires_grad_)  # type: ignore[attr-defined]
_OF_SHAPE = {"__get__", "dim", "numel", "size", "stride", "element_size", "is_floating_point", "is_complex", "__len__"}


@dataclass
class _Read:
    """The writes of one module: the stand-ins of its parameters, values of its buffers, extra states."""

    slots: dict[str, _LoadTarget]
    buffers: dict[str, tuple[Tensor, Tensor]]
    extra: list[Any]


class _StateDictReading:
    """The writes that loading ``state`` consists of ([Note: Read, then written])."""

    def __init__(self, state: dict[str, Any], metadata: Any, where: str) -> None:
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._metadata, self._where = metadata, where
        self._problems: list[str] = []
        self._read: dict[int, _Read] = {}
        self._left: dict[str, dict[str, Any]] = {"": state}  # for each module, from the module around it
        self._strict = self._told = False

    def read(self, module: nn.Module) -> None:
        """Let each module read its part, in torch's order, with its hooks. Children get the rest of the dict."""
        for prefix, part in module.named_modules(remove_duplicate=False):
            if prefix:
                above = self._left[prefix.rpartition(".")[0]]
                self._left[prefix] = {key: value for key, value in above.items() if key.startswith(f"{prefix}.")}
            owns = map(inner.own_class, part.parameters(recurse=False))
            if isinstance(part, torch.jit.ScriptModule) or any(own is not nn.Parameter for own in owns):
                continue
            self._read_one(prefix, part)

    def _read_one(self, prefix: str, part: nn.Module) -> None:
        parameters, buffers = dict(part._parameters), dict(part._buffers)
        if (done := self._read.get(id(part))) is None:  # else it has several names
            slots = {name: _LoadTarget.of(p) for name, p in parameters.items() if p is not None}
            copies = {name: (b, b.clone()) for name, b in buffers.items() if b is not None}
            done = self._read[id(part)] = _Read(slots, copies, [])
        kept = vars(part).get("set_extra_state", done)
        part._parameters.update(done.slots)
        part._buffers.update({name: copy for name, (_, copy) in done.buffers.items()})
        vars(part)["set_extra_state"] = done.extra.append
        try:
            self._load(prefix, part)
            self._check_kept(prefix, part, done)
        except _ReadsWeight as error:
            raise UsageError(
                f"{self._where}: module {prefix!r} ({type(part).__name__}) reads a weight while it loads it ({error}): "
                "expected that inside `with engine.full_params(writable=True):`, on every rank, with "
                "engine.module.load_state_dict(...); nothing was loaded",
                code="state-dict-module-reads-weight",
            ) from error
        finally:
            for name, (buffer, copy) in done.buffers.items():
                done.buffers[name] = buffer, copy if (loaded := part._buffers[name]) is None else loaded
            part._parameters.update(parameters)
            part._buffers.update(buffers)
            vars(part).pop("set_extra_state")
            if kept is not done:
                vars(part)["set_extra_state"] = kept

    def _check_kept(self, prefix: str, part: nn.Module, read: _Read) -> None:
        """Raise ``UsageError`` if the module has replaced one of its parameters."""
        for name, slot in read.slots.items():
            if part._parameters.get(name) is not slot:
                raise UsageError(
                    f"{self._where}: module {prefix!r} ({type(part).__name__}) replaces its parameter {name!r} while "
                    f"it loads: expected a copy into it, self.{name}.copy_(value); nothing was loaded",
                    code="state-dict-module-replaces-parameter",
                )

    def _load(self, prefix: str, part: nn.Module) -> None:
        before = f"{prefix}." if prefix else ""
        metadata = {} if self._metadata is None else self._metadata.get(prefix, {})
        found = self.missing, self.unexpected, self._problems
        part._load_from_state_dict(self._left[prefix], before, metadata, True, *found)

    def settle(self, module: nn.Module, *, strict: bool) -> None:
        """Raise ``UsageError`` if the dict does not fit.

        Hooks that run after a load may remove keys from the lists of missing and unexpected keys, as in torch.
        """
        self._strict = strict
        if self._problems:
            told = "; ".join(problem.rstrip(".") for problem in self._problems)
            raise UsageError(f"{self._where}: {told}; nothing was loaded", code="state-dict-refused-by-module")
        if strict and (self.missing or self.unexpected):
            self._run_post_hooks(module)
            if self.missing or self.unexpected:
                raise UsageError(
                    f"{self._where}: {_unfit(self.missing, self.unexpected)}; nothing was loaded",
                    code="state-dict-keys-differ",
                )

    def write(self, modules: Iterable[_Module], ignored: Collection[int]) -> None:
        """Write the parameters of ``modules``, which are whole, on rank 0, except ``ignored`` ones."""
        for prefix, part in modules:
            if (read := self._read.get(id(part))) is None:
                self._load(prefix, part)
                continue
            with torch.no_grad():
                for name, slot in read.slots.items():
                    parameter: Any = part._parameters.get(name)
                    if id(parameter) not in ignored:
                        for function, args, options in slot.writes:
                            function(parameter, *args, **options)

    def end(self, module: nn.Module) -> None:
        """Write this rank's buffers and extra states, and run the hooks that run after a load. Local."""
        for part in module.modules():
            read = self._read.get(id(part), _Read({}, {}, []))
            for name, (buffer, loaded) in read.buffers.items():
                if (loaded.shape, loaded.dtype) == (buffer.shape, buffer.dtype):
                    buffer.copy_(loaded)
                else:
                    part._buffers[name] = loaded
            for state in read.extra:
                part.set_extra_state(state)
        self._run_post_hooks(module)
        unfit = [_unfit(self.missing, self.unexpected)] if self._strict and (self.missing or self.unexpected) else []
        if problems := [*self._problems, *unfit]:
            raise UsageError(
                f"{self._where}: {'; '.join(problems)}; the rest was loaded", code="state-dict-partly-loaded"
            )

    def _run_post_hooks(self, module: nn.Module) -> None:
        """Run these hooks once, in torch's order: children before the modules around them."""
        if self._told:
            return
        self._told = True
        keys = _IncompatibleKeys(self.missing, self.unexpected)

        def run(part: nn.Module) -> None:
            for child in part._modules.values():
                if child is not None:
                    run(child)
            for hook in part._load_state_dict_post_hooks.values():
                hook(part, keys)

        run(module)
