"""Hand-made parts of an engine for the unit tests: specs, collectives, flat buffers, a unit; without a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardengine.comm.collectives import Collectives
from shardengine.comm.mesh import Mesh
from shardengine.errors import UsageError
from shardengine.offload import BufferPool, Platform
from shardengine.runtime.unit import Member, Unit
from shardengine.sharding import layout
from shardengine.sharding.bucket import Bucket, FlatBuffer
from shardengine.sharding.layout import Layout, ParameterSpec
from shardengine.stages import Placement
from tests.support.cases import mesh_of_this_process

REPLICATED, SHARDED, PARTIAL = Placement.REPLICATED, Placement.SHARDED, Placement.PARTIAL
CPU = torch.device("cpu")
ITEMSIZES = {"float32": 4, "float64": 8, "bfloat16": 2, "int8": 1}


def spec(
    name: str, *shape: int, group: int = 0, unit: int = 0, trainable: bool = True, dtype: str = "float32"
) -> ParameterSpec:
    """A parameter that has one name."""
    return ParameterSpec((name,), shape, dtype, ITEMSIZES[dtype], trainable, group, unit)


def collectives(mesh: Mesh | None = None, **options: Any) -> Collectives:
    """Over ``mesh``, the mesh of this rank process, or one rank where there is no process group."""
    if mesh is None:
        mesh = mesh_of_this_process() if dist.is_initialized() else Mesh(0, 1, CPU)
    return Collectives(mesh, BufferPool(mesh.platform), **options)


def make_flat_buffers(plan: Layout, rank: int = 0) -> list[FlatBuffer]:
    flat_buffers = []
    for flat_buffer in plan.flat_buffers:
        specs = [plan.parameters[slot.parameter] for slot in flat_buffer.slots]
        flat_buffers.append(FlatBuffer(flat_buffer, specs, getattr(torch, flat_buffer.dtype), Platform(CPU), rank))
    return flat_buffers


def trainable_buckets(flat_buffers: list[FlatBuffer]) -> list[Bucket]:
    found = {b.layout.index: b for flat_buffer in flat_buffers for b in flat_buffer.buckets if b.layout.index >= 0}
    return [found[index] for index in range(len(found))]


def make_unit(specs: list[ParameterSpec], ranks: int = 1, rank: int = 0) -> tuple[Unit, list[nn.Parameter]]:
    """A unit whose parameter number i is filled with 1, 2, 3, … plus 100·i, resting full; and its parameters."""
    plan = layout.build(specs, ranks, 32)
    flat_buffers = make_flat_buffers(plan, rank)
    parameters = [nn.Parameter(torch.empty(s.shape), requires_grad=s.trainable) for s in specs]
    members = []
    for flat_buffer in flat_buffers:
        for number, slot in enumerate(flat_buffer.layout.slots):
            member = Member(slot.parameter, parameters[slot.parameter], flat_buffer, number)
            member.view.copy_(contents(specs[slot.parameter], slot.parameter))
            member.show(member.view)
            members.append(member)
    return Unit(1, "block", flat_buffers, members, plan), parameters


def is_hidden(parameter: torch.Tensor) -> bool:
    """Whether asking for its values is refused because they are elsewhere."""
    try:
        parameter.sum()
    except UsageError as error:
        assert "was read by sum while its " in str(error), error
        return True
    return False


def contents(of: ParameterSpec, index: int) -> torch.Tensor:
    """What ``make_unit`` puts into parameter ``index``."""
    return (torch.arange(1, of.numel + 1, dtype=torch.float32) + 100 * index).view(of.shape)
