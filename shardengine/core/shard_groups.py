"""Determines the ranks of an engine and its shard groups, from the config and the arguments of ``initialize``.

Must not know: the state that is sharded over them.
"""

from __future__ import annotations

import logging
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardengine import stages
from shardengine.comm import Collectives, Mesh, compare, meeting
from shardengine.comm import mesh as mesh_module
from shardengine.config import STEPPING_APART, Config
from shardengine.errors import ConfigError, UsageError
from shardengine.sharding import precision

_log = logging.getLogger(__name__)
_BY_HAND = (
    "clip with the norm of the whole model by hand, between backward and step: parameter.grad.norm() has all "
    "data-parallel ranks in it, add the squares over the other dimension (once for a parameter that the parts share), "
    "and call parameter.grad.mul_(factor)"
)
_AT_ONCE = {"power_sgd": "it brings the sum of all ranks at once", "noop": "it leaves every rank its own gradient"}


def mesh_of(given: Mesh | DeviceMesh | ProcessGroup | None, timeout_s: float) -> Mesh:
    """Return the mesh that ``initialize(mesh=given)`` requests; collective.

    It has process groups of its own, unless ``given`` is a Mesh already.
    """
    if isinstance(given, Mesh):
        return given
    options: Any = {"timeout_s": timeout_s, "owned": True, "meet": meeting.meet_before_groups}
    return mesh_module.build(**options) if given is None else mesh_module.of_ranks(given, **options)


def check_beside(config: Config, mesh: Mesh) -> None:
    """Raise ``ConfigError`` if ranks along other dimensions of the mesh would decide alone what every rank must decide.

    Those ranks hold other parts of the same model. Each would clip by the norm of its own part and skip steps alone, so
    the weights that the parts share would drift.
    """
    if not mesh.beside:
        return
    skips = config.fp16.enabled or precision.nonfinite(config) == "skip"
    skips |= config.torch_autocast.enabled and config.torch_autocast.dtype == "float16"
    asked = [f"gradient_clipping {config.gradient_clipping:g}"] if config.gradient_clipping else []
    asked += ["steps that are skipped where gradients are not finite"] if skips else []
    if asked:
        raise ConfigError(
            f"initialize(mesh=): the mesh is a part of one with the dimension {mesh.beside}, and the config has "
            f"{' and '.join(asked)}: ranks of that dimension would decide it each for its own part of the model, and "
            'what the parts share would drift apart. Expected "gradient_clipping": 0, "nonfinite_gradients": "raise" '
            f"and no fp16; {_BY_HAND}. Where the ranks of that dimension train models of their own, give mesh= a "
            "process group"
        )


def check_clips(mesh: Mesh) -> None:
    """Raise ``UsageError`` for ``engine.clip_grad_norm_`` on such a mesh."""
    if mesh.beside:
        raise UsageError(
            f"engine.clip_grad_norm_ on a part of a mesh with the dimension {mesh.beside} (rank {mesh.rank}) would "
            f"clip by the norm of this part of the model alone: {_BY_HAND}",
            code="clip-on-part-of-mesh",
        )


def group_size(config: Config, mesh: Mesh) -> int:
    """Return the number of ranks in a shard group: all ranks if the mesh is not hybrid.

    Raises ``ConfigError`` if the requested size is not possible.
    """
    zero = config.zero_optimization
    hpz = zero.zero_hpz_partition_size != 1
    name = f"zero_optimization.{'zero_hpz_partition_size' if hpz else 'shard_group_size'}"
    asked = zero.zero_hpz_partition_size if hpz else zero.shard_group_size
    given = mesh.ranks // mesh.replicas
    if asked == "all":
        if config.comm_hook.name in STEPPING_APART and mesh.ranks > mesh.replicas == 1:
            raise ConfigError(
                f"{name}: expected several shard groups beside comm_hook {config.comm_hook.name}, which lets them step "
                'apart, got "all" ranks in one; 1 makes a group of each rank, "node" of each node'
            )
        if mesh.replicas > 1 and stages.select(config).state.sharded_over is None:
            raise ConfigError(
                f"zero_optimization.stage: expected 1, 2 or 3 on a mesh of {mesh.replicas} replicas, got 0, which "
                "shards nothing; take a mesh of one dimension"
            )
        return given
    size = asked if isinstance(asked, int) else mesh.nodes.size
    if not size:
        why = mesh.nodes.unlike or "it is not known which ranks share a node"
        raise ConfigError(f'{name}: "node" expects nodes of equally many consecutive ranks, but {why}; write a number')
    if mesh.ranks % size:
        raise ConfigError(f"{name}: expected a divisor of the number of ranks, {mesh.ranks}, got {size}")
    if mesh.replicas > 1 and size != given:
        raise ConfigError(
            f"{name}: expected the shard group of the mesh that initialize was given, {given} ranks, got {size}; leave "
            "it out"
        )
    return size


def in_shard_groups(config: Config, mesh: Mesh, start: Collectives) -> Mesh:
    """Return ``mesh`` split into shard groups of the size in ``config``; collective.

    Raises ``MismatchError`` if the size differs between ranks.
    """
    size = group_size(config, mesh)
    hook = config.comm_hook.name
    if size < mesh.ranks and hook in _AT_ONCE:
        raise ConfigError(
            f"comm_hook.name: expected one shard group of all ranks beside {hook}, got groups of {size}: "
            f"{_AT_ONCE[hook]}, and here gradients are added up inside of the groups first; take int8 or int4, or "
            "leave out shard_group_size and zero_hpz_partition_size"
        )
    if hook in STEPPING_APART and size == mesh.ranks > 1 and mesh.rank == 0:
        _log.warning("comm_hook %s does nothing here: all %d ranks are one shard group", hook, mesh.ranks)
    topic = "number of ranks in a shard group (mesh=, shard_group_size, zero_hpz_partition_size)"
    compare(start, {topic: [str(size)]})
    return mesh.in_shard_groups_of(size)
