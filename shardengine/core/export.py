"""The whole model in forms for other programs: its state dict on rank 0, and Hugging Face directories on disk.

Must not know: steps, gradients, the optimizer.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardengine.comm import Purpose, compare, run_on_all_ranks
from shardengine.core import adapters
from shardengine.core.gathering import gathered
from shardengine.core.parts import Core
from shardengine.errors import CheckpointError, UsageError
from shardengine.offload import HOST
from shardengine.sharding import WEIGHT, FullTensors, inner, join, shaped


def full_state_dict(core: Core, module: nn.Module, *, trainable_only: bool = False) -> dict[str, Any]:
    """Return the whole state dict on rank 0 (CPU), {} elsewhere; collective, bucket by bucket.

    See ``Engine.state_dict``.
    """
    core.step_state.require("state_dict")
    left_out = _begin(core, module, "state_dict", trainable_only=trainable_only)
    values = _whole_values(core, left_out)
    state = run_on_all_ranks(core.collectives, "state_dict()", lambda: _assemble(core, module, values, left_out))
    adapters.show(core, module, state)
    core.attachments.whole.update(values)  # the module's own state dict shows them while they live
    return state


def _begin(core: Core, module: nn.Module, call: str, *, trainable_only: bool) -> set[int]:
    """Check that all ranks make the same ``call``, and return ids of the parameters that are left out; collective."""
    compare(core.collectives, {"call": [f"{call} with trainable_only={trainable_only}"]})
    if not trainable_only:
        adapters.compute(core, module)
        return set()
    kept, partition = adapters.saved(core, module), core.partition
    shared, own = [*partition.names.items(), *partition.around.items()], [*partition.ignored.items()]
    spared = {id(p) for name, p in [*shared, *own] if name in kept}
    frozen = {id(p) for _, p in shared if not p.requires_grad} - spared
    known = partition.first_names()
    compare(core.collectives, {f"list of frozen parameters in {call}": sorted(known[each] for each in frozen)})
    return frozen | ({id(p) for _, p in own if not p.requires_grad} - spared)


def _whole_values(core: Core, left_out: set[int]) -> dict[int, Tensor]:
    """id(parameter) → whole values on rank 0's CPU, {} elsewhere, gathered bucket by bucket; collective."""
    core.await_weights()
    inside = list(zip(core.partition.inside, core.layout.parameters, strict=True))
    specs = {spec.name: spec for p, spec in inside if id(p) not in left_out}
    whole: FullTensors = {}
    for bucket in (bucket for unit in core.units for bucket in unit.buckets()):
        if specs.keys().isdisjoint(bucket.layout.names):
            continue
        weights, place = {WEIGHT: bucket.weights()}, bucket.placement
        with gathered(core, bucket, weights, place, Purpose.WHOLE_WEIGHTS, bucket.full.dtype) as slices:
            mine = (part for part in slices if part.name in specs) if core.mesh.rank == 0 else ()
            join(mine, whole, specs, HOST)
    return {id(p): shaped(whole[spec.name][WEIGHT], spec) for p, spec in inside if spec.name in whole}


def _assemble(core: Core, module: nn.Module, values: dict[int, Tensor], left_out: set[int]) -> dict[str, Any]:
    """The module's state dict with ``values`` instead of its parameters on rank 0, {} elsewhere; local."""
    if core.mesh.rank != 0:
        return {}
    every = module.state_dict(keep_vars=True)
    shown = {name: value for name, value in every.items() if id(value) not in left_out}
    copies: dict[int, Any] = {}
    for value in shown.values():
        if isinstance(value, Tensor) and id(value) not in copies:
            copies[id(value)] = _copy(value, values)
    return {name: copies.get(id(value), value) for name, value in shown.items()}


def _copy(value: Tensor, values: dict[int, Tensor]) -> Tensor:
    """``value`` on the CPU, or its replacement in ``values``."""
    if id(value) in values:
        return values[id(value)]
    if not inner.is_outer(value):
        return value.detach().cpu().clone()
    return inner.made_of(value, {id(leaf): _copy(leaf, values) for leaf in inner.leaves_of(value)})


def save_pretrained(core: Core, module: nn.Module, directory: str | Path, *, trainable_only: bool = False) -> None:
    """Write ``module`` with whole weights into ``directory`` (safetensors) on rank 0; collective.

    The files are first written beside it, and moved in one by one when all are complete: a full disk leaves an existing
    directory unchanged. A failure raises ``CheckpointError`` on every rank.
    """
    core.step_state.require("save_pretrained")
    if trainable_only and hasattr(module, "save_pretrained") and not _has_adapters(module):
        raise UsageError(
            f"save_pretrained(trainable_only=True) of {type(module).__name__}: from_pretrained would fill what is left "
            "out with random values; expected a model with PEFT adapters, or a plain module. Save the whole model, or "
            "engine.state_dict(trainable_only=True)",
            code="save-pretrained-without-adapters",
        )
    left_out = _begin(core, module, "save_pretrained", trainable_only=trainable_only)
    values = _whole_values(core, left_out)

    def write() -> None:
        from safetensors import SafetensorError

        try:
            state = _assemble(core, module, values, left_out)
            adapters.show(core, module, state)
            _replace(module, state, Path(directory))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the model could not be written to {directory}: {error}; what was there before is intact",
                code="save-pretrained-not-written",
            ) from error

    what = f"saving to {directory}"
    run_on_all_ranks(core.collectives, what, write if core.mesh.rank == 0 else lambda: None)


def _replace(module: nn.Module, state: dict[str, Any], target: Path) -> None:
    """Write into a temporary directory beside ``target``, then move the files in."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(module, state, work)
        target.mkdir(exist_ok=True)
        for path in work.iterdir():
            os.replace(path, target / path.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _has_adapters(module: nn.Module) -> bool:
    """Whether peft has wrapped the model or added adapters to it; its files hold only these."""
    return hasattr(module, "peft_config") or bool(getattr(module, "_hf_peft_config_loaded", False))


def _write(module: nn.Module, state: dict[str, Any], directory: Path) -> None:
    save = getattr(module, "save_pretrained", None)  # Hugging Face models have it, plain modules do not
    if save is not None:
        save(directory, state_dict=state)
        return

    from safetensors.torch import save_file

    for name, value in state.items():
        if isinstance(value, Tensor) and inner.is_outer(value):
            raise UsageError(
                f"save_pretrained: parameter {name!r} is a {type(value).__name__}, which model.safetensors cannot "
                "hold: expected trainable_only=True, engine.state_dict() with torch.save, or engine.save_checkpoint",
                code="save-pretrained-quantised-parameter",
            )
    first_name: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and first_name.setdefault(value.data_ptr(), name) != name and value.numel():
            tied[name] = first_name[value.data_ptr()]
    tensors = {n: v.contiguous() for n, v in state.items() if isinstance(v, Tensor) and n not in tied}
    metadata = {"format": "pt"} | ({"tied": json.dumps(tied)} if tied else {})  # two keys have no order in safetensors
    save_file(tensors, str(directory / "model.safetensors"), metadata=metadata)
