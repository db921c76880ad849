"""From a module to units: the modules that are units, the unit of each parameter, and the facts that ranks compare.

Must not know: hooks, the optimizer's arithmetic, the order of units at run time.

[Note: Unit modules] If weights are kept replicated there is one unit, the root. If weights are sharded, units are the
modules of the classes that the config names. Without names they are the modules of Hugging Face's
``_no_split_modules``, and those that the walk of ``sharding/wrapping.py`` finds beside them. The outermost match wins.
``torch.compile(block)`` is a module around the block and counts as one of the block's class. So it is the unit, and
hooks run outside the graph. A parameter that is used in two units, or inside and outside of one, belongs to the root,
which is gathered whenever anything runs. Parameters without elements stay outside the flat buffers, and so do frozen
ones if weights are kept replicated.

Only the repeated blocks are recomputed in backward (``runtime/activation_checkpointing.py``) and wait for stepped
weights. They are the modules of those classes, else the children of ModuleLists with two or more children of one class.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.comm import describe
from shardengine.config import nearest
from shardengine.errors import UsageError
from shardengine.loading import Source
from shardengine.offload import HOST
from shardengine.sharding import inner, shared_memory
from shardengine.sharding.layout import ParameterSpec
from shardengine.sharding.left_shards import LeftShards
from shardengine.sharding.precision import Precision
from shardengine.sharding.wrapping import automatic_units, class_of

_IN_FP32 = "_shardengine_in_fp32"
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


@dataclass(frozen=True)
class Partition:
    """The parameters and units of a model, before anything is moved.

    - names: every parameter name → parameter (tied ones several times), with inner parameters instead of outer ones
    - around: the names of these outer parameters → them (``inner``, [Note: Inner parameters])
    - inside: parameters in flat buffers, in registration order; ``specs`` has their specs; outside: the others
    - units: unit modules with their names, without the root
    - ignored: names → parameters that the user alone handles (``ignored_by``); no other field has them
    - left: the state that an engine closed without gathering has left on the model
    - source: provides values of parameters and buffers that have none on any rank
    - sparse: names of parameters whose gradients are sparse, or are treated so (``with_sparse``)
    - shared: names of frozen parameters that came in the memory of another tensor → its name (``shared_memory``)
    - modules, places: every module, and (name, a module's dict, key in it, parameter or child): to find replaced ones
    """

    names: dict[str, nn.Parameter]
    inside: list[nn.Parameter]
    specs: list[ParameterSpec]
    outside: list[nn.Parameter]
    units: list[tuple[str, nn.Module]]
    modules: list[nn.Module]
    places: list[tuple[str, Mapping[str, Any], str, Any]]
    left: LeftShards | None = None
    source: Source | None = None
    around: Mapping[str, nn.Parameter] = field(default_factory=dict)
    ignored: Mapping[str, nn.Parameter] = field(default_factory=dict)
    sparse: frozenset[str] = frozenset()
    shared: Mapping[str, str] = field(default_factory=dict)

    def named_outside(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters outside the flat buffers, with their first names."""
        first = self.first_names()
        return [(first[id(parameter)], parameter) for parameter in self.outside]

    def first_names(self) -> dict[int, str]:
        """id(parameter) → its first registered name."""
        rows = [*self.names.items(), *self.around.items()]
        return {id(parameter): name for name, parameter in reversed(rows)}

    def expanded(self, names: Iterable[str]) -> list[str]:
        """``names``, with the names of inner parameters instead of those of their outer parameter."""
        return [
            part
            for name in names
            for part in (
                [name + path for path, _ in inner.parts_of(self.around[name])] if name in self.around else [name]
            )
        ]


def analyse(
    model: nn.Module,
    setting: str | tuple[str, ...],
    group_of: dict[int, int],
    *,
    shards_weights: bool,
    which: Precision = Precision(),  # noqa: B008  (frozen)
    device: torch.device = HOST,
    ignored: Sequence[str] = (),
) -> Partition:
    """Determine the partition of ``model``, or raise ``UsageError``.

    setting: the config's ``units`` · group_of: id(parameter) → optimizer group · which: the future dtypes of parameters
    · device: their future device · ignored: as in ``ignored_by``.
    """
    left_alone = ignored_by(model, ignored)
    _check_ignored(left_alone, device)
    inner.split(model, device)
    names, around = _names(model, {id(parameter) for parameter in left_alone.values()})
    all_names: dict[int, list[str]] = {}
    for name, parameter in names.items():
        all_names.setdefault(id(parameter), []).append(name)
    parameters = list({id(parameter): parameter for parameter in names.values()}.values())
    _mark_norms(model)
    dtypes = {id(p): dtype_of(p, which) for p in parameters}
    left = LeftShards.on(model)
    _check(parameters, all_names, dtypes, left, scaled=which.trains_fp16)
    _check_wrappers(model)
    shown = {all_names[id(p)][0]: p for p in parameters if left is None or not left.hides(p)}
    shared = shared_memory.check(shown, dict(model.named_buffers()), left_alone)
    _check_scripted(model, {id(p) for p in parameters if p.numel() and (p.requires_grad or shards_weights)})
    counted = {id(parameter) for parameter in parameters}
    units, unit_of = _assign(model, sharded_units(model, setting), counted) if shards_weights else ([], {})
    inside = [p for p in parameters if p.numel() and (p.requires_grad or shards_weights) and not inner.is_beside(p)]
    numbers = _numbers(list(model.parameters()))
    specs = [
        _assigned(_spec(p, all_names[id(p)], dtypes[id(p)], unit_of.get(id(p), 0), numbers.get(id(p), 0)), p, group_of)
        for p in inside
    ]
    if left is not None:
        specs = [replace(s, order=left.order_of(p)) if left.hides(p) else s for s, p in zip(specs, inside, strict=True)]
    chosen = {id(p) for p in inside}
    outside = [p for p in parameters if id(p) not in chosen]
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    found = Partition(names, inside, specs, outside, units, modules, places_of(model), left)
    return replace(found, around=around, ignored=left_alone, shared=shared)


def ignored_by(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Parameter]:
    """Return the parameters with a name that matches one of ``patterns`` (file patterns), under all of their names.

    Raises ``UsageError`` for a pattern that matches none.
    """
    named = dict(model.named_parameters(remove_duplicate=False)) if patterns else {}
    chosen = set()
    for pattern in patterns:
        found = {id(parameter) for name, parameter in named.items() if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            raise UsageError(
                f"ignored_parameters: expected patterns that match names of parameters, got {pattern!r}, which matches "
                f"none" + (f"; the nearest name is {nearest(pattern, named)!r}" if named else ""),
                code="ignored-parameters-without-match",
            )
        chosen |= found
    return {name: parameter for name, parameter in named.items() if id(parameter) in chosen}


def left_behind(model: nn.Module, found: Partition) -> dict[str, str]:
    """``shared_memory.left_behind`` for the parameters that move."""
    moved = {id(parameter) for parameter in found.inside if found.left is None or not found.left.hides(parameter)}
    return shared_memory.left_behind(model, {name: p for name, p in found.names.items() if id(p) in moved})


def _names(model: nn.Module, ignored: Collection[int]) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """``Partition.names`` and ``Partition.around``. ignored: ids of parameters that neither of them has."""
    own = {n: p for n, p in model.named_parameters(remove_duplicate=False) if id(p) not in ignored}
    names = {name + path: part for name, parameter in own.items() for path, part in inner.parts_of(parameter)}
    names.update(inner.beside(model))
    return names, {name: parameter for name, parameter in own.items() if inner.is_outer(parameter)}


def places_of(model: nn.Module) -> list[tuple[str, Mapping[str, Any], str, Any]]:
    """The current ``Partition.places``."""
    return [
        (f"{prefix}.{key}" if prefix else key, holder, key, value)
        for prefix, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for holder in (module._parameters, module._modules)
        for key, value in holder.items()
    ]


def renew(model: nn.Module, old: Partition, group_of: dict[int, int], *, scaled: bool) -> Partition:
    """Return ``old`` with the parameters that were unfrozen since, and with the current optimizer groups.

    A trainable parameter stays trainable when it is frozen; it is unused then. Units stay. scaled: the loss is scaled.
    """
    known = {id(p): spec for p, spec in zip(old.inside, old.specs, strict=True)}
    names: dict[int, list[str]] = {}
    for name, parameter in old.names.items():
        names.setdefault(id(parameter), []).append(name)
    for name, outer in old.around.items():
        if outer.requires_grad:
            inner.check(name, outer)
    parameters = list({id(parameter): parameter for parameter in old.names.values()}.values())
    inside, specs, numbers = [], [], _numbers(list(model.parameters()))
    for p in parameters:
        spec = known.get(id(p))
        if p.requires_grad and (spec is None or not spec.trainable):
            _check_trainable(names[id(p)][0], p.dtype, scaled=scaled)
            shared_memory.check_unfrozen(names[id(p)][0], old.shared)
        if spec is None and p.requires_grad and p.numel():
            # it was outside: weights are kept replicated, the root is the only unit
            spec = _spec(p, names[id(p)], p.dtype, 0, numbers.get(id(p), 0))
            spec = replace(spec, sparse=spec.name in old.sparse)
        if spec is not None:
            inside.append(p)
            specs.append(_assigned(spec, p, group_of))
    chosen = {id(p) for p in inside}
    return replace(old, inside=inside, specs=specs, outside=[p for p in old.outside if id(p) not in chosen])


def dtype_of(parameter: nn.Parameter, which: Precision) -> torch.dtype:
    """The dtype that ``parameter`` is trained in."""
    if which.cast is None or not parameter.is_floating_point():
        return parameter.dtype
    if _IN_FP32 in vars(parameter):
        return torch.float32
    scaled = parameter.dtype.itemsize == 1 and not parameter.requires_grad  # float8; its scales are elsewhere
    return parameter.dtype if scaled or inner.is_inner(parameter) or inner.is_packed(parameter) else which.cast


def _mark_norms(model: nn.Module) -> None:
    """Mark parameters of a norm with fp32 running statistics, which stay in fp32.

    torch's norms then take inputs in bf16 and fp16 and return the same dtype. They do not take weights of another dtype
    than the statistics.
    """
    for parameter in model.parameters():
        vars(parameter).pop(_IN_FP32, None)
    for module in model.modules():
        statistics = [b for name, b in module._buffers.items() if b is not None and name.startswith("running_")]
        if any(each.dtype is torch.float32 for each in statistics):
            for parameter in module.parameters(recurse=False):
                vars(parameter)[_IN_FP32] = True


def _numbers(parameters: Sequence[nn.Parameter]) -> dict[int, int]:
    """id(parameter) → the number of its first element among the elements of all parameters of the model."""
    starts = itertools.accumulate((parameter.numel() for parameter in parameters), initial=0)
    return {id(parameter): start for parameter, start in zip(parameters, starts, strict=False)}


def _spec(parameter: nn.Parameter, names: list[str], dtype: torch.dtype, unit: int, number: int) -> ParameterSpec:
    return ParameterSpec(
        names=tuple(names),
        shape=tuple(parameter.shape),
        dtype=str(dtype).removeprefix("torch."),
        itemsize=dtype.itemsize,
        trainable=False,
        group=-1,
        unit=unit,
        order=memory_order(parameter),
        number=number,
    )


def _assigned(spec: ParameterSpec, parameter: nn.Parameter, group_of: dict[int, int]) -> ParameterSpec:
    """``spec`` with the optimizer group of ``parameter`` if that is or was trainable."""
    trainable = spec.trainable or parameter.requires_grad
    return replace(spec, trainable=trainable, group=group_of.get(id(parameter), -1) if trainable else -1)


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the outermost in memory to the innermost; () for the ordinary order."""
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension]))
    return () if tensor.is_contiguous() or not tensor.permute(order).is_contiguous() else order


def find_blocks(
    model: nn.Module, setting: str | tuple[str, ...], counted: Collection[int]
) -> tuple[list[tuple[str, nn.Module]], dict[int, int]]:
    """Return the unit modules that own parameters, and id(parameter) → its unit, from 1, if it is used in exactly one.

    counted: ids of the parameters to consider.
    """
    return _assign(model, find_units(model, setting), counted)


def find_units(model: nn.Module, setting: str | tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks, or the modules of the classes that ``setting`` names ([Note: Unit modules]).

    The outermost match wins.
    """
    classes = set(setting) if not isinstance(setting, str) else _no_split_classes(model)
    present = {class_of(module).__name__ for module in model.modules()}
    if not isinstance(setting, str) and (missing := sorted(classes - present)):
        raise UsageError(
            f"zero_optimization.units names {', '.join(missing)}, but the model has no module of that class; "
            f"the nearest one that it has is {nearest(missing[0], present)}",
            code="units-unknown-class",
        )
    repeated = set() if classes & present else _repeated_children(model)
    return _outermost(model, lambda module: class_of(module).__name__ in classes or id(module) in repeated)


def sharded_units(model: nn.Module, setting: str | tuple[str, ...]) -> list[tuple[str, nn.Module]]:
    """Return the modules that are gathered as one, with their names, in registration order ([Note: Unit modules])."""
    if not isinstance(setting, str):
        return find_units(model, setting)
    chosen = automatic_units(model, _no_split_classes(model))
    return _outermost(model, lambda module: id(module) in chosen)


def _outermost(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    """The ``wanted`` modules below ``model`` with their names, except those inside another one."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if name and not any(name.startswith(f"{outer}.") for outer in found) and wanted(module):
            found[name] = module
    return list(found.items())


def _no_split_classes(model: nn.Module) -> set[str]:
    found: set[str] = set()
    for module in model.modules():
        found.update(getattr(module, "_no_split_modules", None) or ())
    return found


def _repeated_children(model: nn.Module) -> set[int]:
    chosen: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            counts = Counter(class_of(child) for child in module)
            chosen.update(id(child) for child in module if counts[class_of(child)] > 1)
    return chosen


def _assign(
    model: nn.Module, units: list[tuple[str, nn.Module]], counted: Collection[int]
) -> tuple[list[tuple[str, nn.Module]], dict[int, int]]:
    """Units that own parameters, and id(parameter) → 1-based unit for those used in exactly one unit."""
    owners: dict[int, set[int]] = {}
    numbers = {id(unit): number for number, (_, unit) in enumerate(units)}
    visited: set[tuple[int, int]] = set()

    def visit(module: nn.Module, unit: int) -> None:
        """Visit ``module`` on every path to it, because several units may share it."""
        unit = numbers.get(id(module), -1) if unit == -1 else unit
        if (id(module), unit) in visited:
            return
        visited.add((id(module), unit))
        for parameter in module.parameters(recurse=False):
            for _, part in inner.parts_of(parameter):
                if id(part) in counted:
                    owners.setdefault(id(part), set()).add(unit)
        for child in module.children():
            visit(child, unit)

    visit(model, -1)
    single = {key: next(iter(where)) for key, where in owners.items() if len(where) == 1 and -1 not in where}
    kept = sorted(set(single.values()))
    renumber = {old: new for new, old in enumerate(kept, start=1)}
    return [units[old] for old in kept], {key: renumber[old] for key, old in single.items()}


def _check(
    parameters: Sequence[nn.Parameter],
    names: dict[int, list[str]],
    dtypes: Mapping[int, torch.dtype],
    left: LeftShards | None,
    *,
    scaled: bool,
) -> None:
    for parameter in parameters:
        name = names[id(parameter)][0]
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet (a lazy module): run one forward before initialize",
                code="model-lazy-parameter",
            )
        hidden = (left is not None and left.hides(parameter)) or inner.is_inner(parameter)
        if parameter.numel() > 1 and not any(parameter.stride()) and not hidden:
            raise UsageError(
                f"parameter {name!r} has no memory of its own: expected a model of its own; is it sharded by another "
                "engine? Call that engine's close() first, without restore=False unless this is the same model",
                code="model-parameter-without-memory",
            )
        if parameter.requires_grad:
            _check_trainable(name, dtypes[id(parameter)], scaled=scaled)


def _check_ignored(ignored: Mapping[str, nn.Parameter], device: torch.device) -> None:
    for name, parameter in ignored.items():
        if parameter.is_meta and device.type != "meta":
            raise UsageError(
                f"parameter {name!r} is in ignored_parameters and on the meta device: expected one with values, on "
                "this rank's device, because the engine gives it none",
                code="ignored-parameters-without-values",
            )
        if inner.is_outer(parameter):
            raise UsageError(
                f"parameter {name!r} is in ignored_parameters and a {type(parameter).__name__}, whose tensors the "
                "engine holds one by one: expected an ordinary parameter",
                code="ignored-parameters-tensor-subclass",
            )


def check_values(model: nn.Module, ignored: Sequence[str] = ()) -> None:
    """Raise ``UsageError`` for a parameter without values on the rank whose values all ranks take.

    ignored: as in ``ignored_by``; ``analyse`` checks these.
    """
    others = ignored_by(model, ignored)
    for name, parameter in model.named_parameters():
        if parameter.is_meta and name not in others:
            raise UsageError(
                f"parameter {name!r} is on the meta device, it has no values: expected a model with weights on rank 0 "
                "(from_pretrained, or to_empty and an initialisation); other ranks take its values",
                code="model-weights-without-values",
            )


def _check_trainable(name: str, dtype: torch.dtype, *, scaled: bool) -> None:
    if dtype is torch.float16 and not scaled:
        raise UsageError(
            f"parameter {name!r} is {dtype}, whose gradients vanish or overflow unless the loss is scaled: expected "
            '"fp16": {"enabled": true} in the config, or model.float(), model.bfloat16(), or a frozen parameter',
            code="model-fp16-without-loss-scale",
        )
    if dtype.is_complex:
        raise UsageError(
            f"parameter {name!r} is {dtype}: expected trainable parameters in torch.float32, torch.bfloat16 or "
            "torch.float16; keep nn.Parameter(torch.view_as_real(...)), whose last dimension holds the real and the "
            "imaginary part, use torch.view_as_complex(it) in forward, and call torch.view_as_complex on it to read "
            "it; or freeze it",
            code="model-dtype-not-trainable",
        )
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UsageError(
            f"parameter {name!r} is {dtype}: expected trainable parameters in torch.float32, torch.bfloat16 or "
            'torch.float16; use model.float(), model.bfloat16() or "bf16": {"enabled": true}, or freeze it',
            code="model-dtype-not-trainable",
        )


def with_sparse(found: Partition, *, every: bool) -> Partition:
    """Return ``found`` with the weights that have sparse gradients marked.

    These are the weights of embeddings with sparse=True, or with ``every`` those of all embeddings. A weight that
    another module shares gets dense gradients from that module, so it is not marked.
    """
    rows, others = set[int](), set[int]()
    for module in found.modules:
        looks_up = has_sparse_gradient(module) or (every and isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
        for key, parameter in module._parameters.items():
            (rows if looks_up and key == "weight" else others).add(id(parameter))
    names = found.first_names()
    sparse = frozenset(names[number] for number in rows - others if number in names)
    return replace(found, sparse=sparse, specs=[replace(s, sparse=s.name in sparse) for s in found.specs])


def has_sparse_gradient(module: nn.Module) -> bool:
    """Whether ``module`` has sparse=True and a weight."""
    return getattr(module, "sparse", False) is True and module._parameters.get("weight") is not None


def check_dense(model: nn.Module, found: Partition, stage: str) -> None:
    """Raise ``UsageError`` for a weight with sparse gradients. stage: the name of the stage, for the message."""
    trained = {id(parameter) for parameter in found.inside if parameter.requires_grad}
    for name, module in model.named_modules():
        if has_sparse_gradient(module) and id(module._parameters["weight"]) in trained:
            raise UsageError(
                f"module {name!r} has sparse=True, so the gradient of {name + '.weight'!r} is sparse: expected dense "
                f"gradients at stage {stage}, which shards what belongs to them; set sparse=False, freeze it, or take "
                "stage 0",
                code="grad-sparse-beyond-stage-0",
            )


def check_split(found: Partition) -> None:
    """Raise ``UsageError`` for a trained weight that is not bf16, if masters are kept as the bits that bf16 lacks."""
    for spec in found.specs:
        if spec.trainable and spec.dtype != "bfloat16":
            raise UsageError(
                f"bf16.split_masters keeps beside a bf16 weight what it lacks of fp32, and parameter {spec.name!r} "
                f"stays in torch.{spec.dtype}, as the running statistics of its norm are: expected split_masters to be "
                "false, that norm frozen, or its statistics in bf16",
                code="split-masters-beside-fp32-weight",
            )


def check_max_norm(model: nn.Module, ranks: int) -> None:
    """Raise ``UsageError`` for an embedding that writes its weight in forward.

    Each of ``ranks`` would write other rows.
    """
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None or ranks == 1:
            continue
        if module.weight.requires_grad:
            raise UsageError(
                f"module {name!r} has max_norm={module.max_norm:g}, which renormalises the rows that a rank looks up, "
                "so "
                f"the weights of the {ranks} ranks would diverge: set max_norm=None, and renormalise between steps "
                "inside `with engine.full_params(writable=True):`",
                code="model-embedding-max-norm",
            )


def check_sync_batch_norm(model: nn.Module, device: torch.device, ranks: int, served: Callable[[Any], int]) -> None:
    """Raise ``UsageError`` for a SyncBatchNorm that would not use the statistics of all ``ranks``.

    Call it if there is a default process group. device: the future device of the model · served: the number of ranks of
    a process group, None: of the default one.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.SyncBatchNorm) or not module.training:
            continue  # in evaluation it is a BatchNorm, on any device
        if device.type == "cpu":
            raise UsageError(
                f"module {name!r} is a SyncBatchNorm, which torch computes on GPUs alone, and the engine's device "
                "is a CPU: expected BatchNorm, where each rank normalizes by its own samples and rank 0's running "
                "statistics are everybody's, a norm without statistics over samples (LayerNorm, GroupNorm), or "
                "module.eval() before initialize",
                code="model-sync-batch-norm-cpu",
            )
        if (found := served(module.process_group)) != ranks:
            raise UsageError(
                f"module {name!r} is a SyncBatchNorm over {found} ranks, and the engine has {ranks}: expected "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group) with the engine's ranks",
                code="model-sync-batch-norm-ranks",
            )


def _check_scripted(model: nn.Module, inside: Collection[int]) -> None:
    """Raise ``UsageError`` for TorchScript that cannot stay: it takes no hooks, and it owns its parameters.

    inside: ids of the parameters that the engine moves.
    """
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            continue
        held = [key for key, parameter in module.named_parameters() if id(parameter) in inside]
        if name and not held:
            continue
        whole = "a model of Python modules, of which a frozen part may be TorchScript"
        if name:
            whole = f'"ignored_parameters": ["{name}.*"] in the config where it is frozen'
        raise UsageError(
            f"{f'module {name!r}' if name else 'the model'} is TorchScript (torch.jit.script or torch.jit.trace)"
            + (f" with the parameter {held[0]!r}" if held else "")
            + ", which takes no hooks and holds its parameters itself: expected the Python module that it was made "
            f"from (torch.compile makes that one fast; torch.jit.script again after training), or {whole}",
            code="model-torchscript",
        )


def _check_wrappers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                raise UsageError(
                    f"{f'module {name!r}' if name else 'the model'} is in {kind.__name__}, which averages or shards "
                    "gradients itself: expected the plain model, which DistributedDataParallel and DataParallel have "
                    "as `.module`",
                    code="model-already-data-parallel",
                )


def facts(
    model: nn.Module, found: Partition, config: Mapping[str, Any], groups: list[dict[str, Any]]
) -> dict[str, list[str]]:
    """The facts that ranks must agree on at start, for ``compare``: config, model, optimizer groups, torch."""
    outside = {id(p) for p in found.outside}
    orders = {id(p): memory_order(p) for p in found.outside}
    orders |= {id(p): spec.order for p, spec in zip(found.inside, found.specs, strict=True)}
    parameters = [
        f"{name}: shape {tuple(p.shape)}, {p.dtype}, {'trainable' if p.requires_grad else 'frozen'}"
        + (", outside" if id(p) in outside else "")
        + (f", dimensions in memory {orders[id(p)]}" if orders[id(p)] else "")
        for name, p in found.names.items()
    ]
    buffers = [f"{name}: shape {tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()]
    name_of = found.first_names()
    members = [f"group {number}: {name_of[id(p)]}" for number, group in enumerate(groups) for p in group["params"]]
    settings = [f"{key} = {describe(value)}" for key, value in sorted(config.items())]
    return {
        "config": settings,
        "model (parameters)": parameters,
        "model (buffers)": buffers,
        "model (quantised parameters)": inner.facts(model),
        "parameters left by a closed engine": [] if found.left is None else found.left.names,
        **plan_facts(found, groups),
        "parameters in optimizer groups": members,
        "version of torch": [str(torch.__version__)],
    }


def plan_facts(found: Partition, groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The facts that ranks must agree on before ``found`` is laid out, for ``compare``."""
    return {
        "optimizer": [describe({key: value for key, value in group.items() if key != "params"}) for group in groups],
        "model (units and optimizer groups)": [
            f"{spec.name}: optimizer group {spec.group}, unit {spec.unit}" + (", sparse" if spec.sparse else "")
            for spec in found.specs
        ],
    }
