"""Which device each rank computes on, and which backend carries its traffic. Owns: the rules, and asking CUDA.

Every rank collects its settings and the devices that it sees (``facts``). From the facts of all ranks each rank
computes the same choice, or raises the same error (``choose``). Must not know: how ranks meet, engines.

[Note: Which GPU a rank uses] The first of these that applies, for every rank:

1. the requested device: ``build(device=...)`` (``"cuda"`` is the current GPU), then SHARDENGINE_DEVICE=cpu;
2. the device to which the caller's process group is bound (``init_process_group(device_id=...)``);
3. the current GPU, on a host on which some rank has made a GPU other than its first one current (``set_device``);
4. the only GPU that is visible;
5. the number of the rank on its host (LOCAL_RANK, SLURM_LOCALID, ...), if all ranks of the host have different ones;
6. its place among the ranks of its host.

A number that is too large starts again at 0, because a task of SLURM may see only its own GPUs and still have a number
that counts all tasks of the host. If two ranks end up on one GPU, ``choose`` raises UsageError, because NCCL cannot
serve them. Ranks compute on the CPU if that was requested or if no rank sees a GPU. Unless a GPU was requested, they
also do if torch has no NCCL, or if the caller's process group serves GPUs by gloo or not at all. Then rank 0 logs that
GPUs are not used.

[Note: Other backends] torch reports which types of device a backend serves, for a group and for a backend's name. The
caller's process group may serve the chosen device by a backend other than gloo and NCCL (ucc, mpi, one that a package
has registered). Then the engine's groups for data use that backend, beside a group of gloo for decisions. Only a
backend that was registered by a test, with gloo behind its name, has been run.
"""

from __future__ import annotations

import json
import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from shardengine.errors import UsageError

WISH = "SHARDENGINE_DEVICE"
"""The variable with "cpu" or "cuda" (a GPU, or an error), for ``initialize``, ``launch`` and the command line."""
LOCAL_RANKS = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
)
"""Variables that hold the number of a rank on its host, one per launcher."""
LOCAL_SIZE = "LOCAL_WORLD_SIZE"
"""The variable with the number of ranks on this rank's node; rendezvous sets it from those of other launchers."""
_KINDS = ("", "cpu", "cuda")
_CPU = torch.device("cpu")
_CURE = f"{WISH}=cpu trains on the CPU"
_NAMED = 8
"""An error names at most this many GPUs or ranks."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs that CUDA shows to this process.

    names: of the physical GPUs, "" if unknown · current: the number of the current one.
    """

    names: tuple[str, ...] = ()
    current: int = 0
    nccl: bool = False


def gpus() -> Gpus:
    """Return the GPUs of this process; the only place that asks CUDA for them."""
    if not torch.cuda.is_available():
        return Gpus()
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    uuids = [str(getattr(each, "uuid", "")) for each in every]
    telling = len(set(uuids)) == len(uuids)  # some drivers have none, or one for all
    names = tuple(f"GPU-{uuid}" if telling and uuid.strip("0-") else "" for uuid in uuids)
    return Gpus(names, current, dist.is_nccl_available())


@dataclass(frozen=True)
class RankFacts:
    """The settings of one rank and the devices that it sees.

    wish: "", "cpu", "cuda" or "cuda:1" · bound: the GPU to which the caller's process group is bound · local_rank,
    local_ranks: its number on its node and the number of ranks there, from the launcher.
    """

    host: str
    gpus: Gpus = Gpus()
    wish: str = ""
    bound: int | None = None
    local_rank: int | None = None
    local_ranks: int | None = None

    def to_text(self) -> str:
        """Return a text for ``from_text``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RankFacts:
        """The inverse of ``to_text``."""
        values = json.loads(text)
        seen = values.pop("gpus")
        return cls(gpus=Gpus(tuple(seen["names"]), seen["current"], seen["nccl"]), **values)


@dataclass(frozen=True)
class DeviceChoice:
    """The choice for one rank.

    why: the reason for the device · unused: why visible GPUs are not used, and what to do; "" if none.
    """

    device: torch.device
    backend: str
    why: str
    unused: str = ""


def wish() -> str:
    """Return the value of SHARDENGINE_DEVICE: "", "cpu" or "cuda"."""
    found = os.environ.get(WISH, "")
    if found not in _KINDS:
        raise UsageError(
            f"{WISH}: expected cpu, or cuda (a GPU, or an error), or no value, got {found!r}", code="device-unknown"
        )
    return found


def count() -> int:
    """Return the number of GPUs that this process may use: 0 if SHARDENGINE_DEVICE is cpu."""
    return 0 if wish() == "cpu" else torch.cuda.device_count()


def too_few(ranks: int) -> str:
    """Return a text if ``ranks`` processes of this machine would share GPUs, which NCCL cannot serve, else ""."""
    visible = count()
    return f"{visible} GPU(s) are visible for {ranks} ranks" if visible < ranks else ""


def only_one(visible: int) -> str:
    """Return a warning if one process that no launcher has started would use only one of ``visible`` GPUs, else ""."""
    if visible < 2:
        return ""
    return (
        f"{visible} GPUs are visible and 1 is used: no launcher has started this process, so that it is the only rank. "
        f"To use all, start it with torchrun --standalone --nproc-per-node {visible}; where one is meant, set "
        "CUDA_VISIBLE_DEVICES to it"
    )


def facts(device: torch.device | None = None, group: dist.ProcessGroup | None = None) -> RankFacts:
    """Return the facts of this rank. device: the requested one · group: the process group that the caller made."""
    seen = gpus()
    asked = os.environ.get(WISH, "")  # checked where every rank hears of it
    if device is not None:
        index = seen.current if device.index is None else device.index
        asked = f"cuda:{index}" if device.type == "cuda" else device.type
    bound = getattr(group, "bound_device_id", None)
    number = bound.index if bound is not None and bound.type == "cuda" else None
    return RankFacts(socket.gethostname(), seen, asked, number, _number(*LOCAL_RANKS), _number(LOCAL_SIZE))


def _number(*names: str) -> int | None:
    said = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in said if text.isdecimal()), None)


def backend_for(backends: str, device_type: str) -> str:
    """Return the backend that serves a type of device in a process group, or "".

    backends: the group's own, such as ``cpu:gloo,cuda:nccl``. A name alone serves the types that torch knows for it.
    """
    for part in backends.split(","):
        said, _, name = part.rpartition(":")
        if device_type in ([said] if said else dist.Backend.backend_capability.get(name, ())):
            return name
    return ""


def has_nccl(backends: str) -> bool:
    """Return whether a process group serves tensors on GPUs by NCCL. backends: as in ``backend_for``."""
    return backend_for(backends, "cuda") == "nccl"


def choose(
    ranks: Sequence[RankFacts], rank: int, group_has_nccl: bool | None = None, backends: str = ""
) -> DeviceChoice:
    """Return the choice for ``rank`` from the facts of all ranks; all compute the same ([Note: Which GPU a rank uses]).

    group_has_nccl: of a process group that exists already; None: it is made as the choice says · backends: the group's
    own, as in ``backend_for``. If it serves GPUs by another backend than gloo and NCCL, data uses that one. UsageError,
    the same on every rank, if ranks disagree, have no GPU or share one.
    """
    _check_wishes(ranks)
    on_cpu, other = backend_for(backends, "cpu") or "gloo", backend_for(backends, "cuda")
    other = "" if other in ("gloo", "nccl") else other
    if all(each.wish == "cpu" for each in ranks):
        return DeviceChoice(_CPU, on_cpu, "asked for")
    most = max(len(each.gpus.names) for each in ranks)
    told = any(each.wish.startswith("cuda") for each in ranks)
    if most == 0 and not told:
        return DeviceChoice(_CPU, on_cpu, "no GPU is visible")
    nccl = all(each.gpus.nccl for each in ranks) if group_has_nccl is None else group_has_nccl
    if not (nccl or other or told or (len(ranks) == 1 and group_has_nccl is None)):
        reason, cure = "torch has no NCCL", "install a torch that has it"
        if group_has_nccl is False:
            reason = "the process group's backend for them is not NCCL"
            cure = "make it with backend nccl, or with none named"
        what = (
            f"{most} GPU(s) are visible and not used: {reason}. To use them, {cure}; {WISH}=cpu says that it is meant"
        )
        return DeviceChoice(_CPU, on_cpu, reason, what)
    if blind := [each for each in range(len(ranks)) if not ranks[each].gpus.names]:
        others = "" if len(blind) == len(ranks) else ", and the others do"
        raise UsageError(
            f"expected a GPU on every rank, but none is visible to {_listed(blind, ranks)}{others}: look at the driver "
            f"and at CUDA_VISIBLE_DEVICES there (nvidia-smi, `shardengine env`); {_CURE}",
            code="device-gpu-not-visible",
        )
    numbers = _numbers(ranks)
    if nccl:
        _refuse_shared(ranks, [index for index, _ in numbers])
    index, why = numbers[rank]
    return DeviceChoice(torch.device("cuda", index), "nccl" if nccl else other or "gloo", why)


def _check_wishes(ranks: Sequence[RankFacts]) -> None:
    cpu = [each for each, one in enumerate(ranks) if one.wish == "cpu"]
    if 0 < len(cpu) < len(ranks):
        raise UsageError(
            f"expected the same kind of device on every rank, but the CPU is asked for on {_listed(cpu, ranks)} of "
            f"{len(ranks)} alone: set {WISH} on every rank or on none, and give every rank's mesh such a device",
            code="device-differs-between-ranks",
        )
    for each, one in enumerate(ranks):
        kind, _, index = one.wish.partition(":")
        if kind not in _KINDS:
            raise UsageError(
                f"rank {each}: expected cpu or cuda as device, and of {WISH}, got {one.wish!r}", code="device-unknown"
            )
        if index and one.gpus.names and int(index) >= len(one.gpus.names):
            raise UsageError(
                f"rank {each} on {one.host}: expected one of its {len(one.gpus.names)} GPU(s), got {one.wish}",
                code="device-not-there",
            )
        if index and one.bound not in (None, int(index)):
            raise UsageError(
                f"rank {each}: the process group is bound to cuda:{one.bound}, and {one.wish} is asked for: leave the "
                "device out, or name the same one",
                code="device-not-of-group",
            )


def _numbers(ranks: Sequence[RankFacts]) -> list[tuple[int, str]]:
    """Return the number of every rank's GPU, with the reason; every rank sees at least one."""
    hosts: dict[str, list[int]] = defaultdict(list)
    for each, one in enumerate(ranks):
        hosts[one.host].append(each)
    found: dict[int, tuple[int, str]] = {}
    for members in hosts.values():
        local_ranks = [ranks[each].local_rank for each in members]
        numbered = None not in local_ranks and len(set(local_ranks)) == len(members)
        one_was_set = any(ranks[each].gpus.current for each in members)
        for place, each in enumerate(members):
            one = ranks[each]
            visible = len(one.gpus.names)
            if ":" in one.wish:
                found[each] = int(one.wish.partition(":")[2]), "asked for"
            elif one.bound is not None:
                found[each] = one.bound, "the process group is bound to it"
            elif one_was_set:
                found[each] = one.gpus.current, "it is the current one"
            elif visible == 1:
                found[each] = 0, "no other is visible"
            elif numbered:
                found[each] = (one.local_rank or 0) % visible, f"the launcher's local rank is {one.local_rank}"
            else:
                found[each] = place % visible, f"place {place} among the ranks of this host"
    return [found[each] for each in range(len(ranks))]


def _refuse_shared(ranks: Sequence[RankFacts], numbers: Sequence[int]) -> None:
    holders: dict[str, list[int]] = defaultdict(list)
    for each, (one, number) in enumerate(zip(ranks, numbers, strict=True)):
        if one.gpus.names[number]:
            holders[one.gpus.names[number]].append(each)
    shared = {name: members for name, members in holders.items() if len(members) > 1}
    if not shared:
        return
    named = [
        f"{name} of "
        + ", ".join(f"rank {each} ({ranks[each].host}, cuda:{numbers[each]})" for each in members[:_NAMED])
        for name, members in list(shared.items())[:_NAMED]
    ]
    more = "; ..." if len(shared) > _NAMED else ""
    raise UsageError(
        f"expected a GPU of its own for every rank, as NCCL does, but {len(shared)} GPU(s) belong to several: "
        f"{'; '.join(named)}{more}. Start no more ranks on a host than it has GPUs, and show each rank another one "
        f"(CUDA_VISIBLE_DEVICES, or LOCAL_RANK, or torch.cuda.set_device before initialize); {_CURE}",
        code="device-shared-by-ranks",
    )


def _listed(numbers: Sequence[int], ranks: Sequence[RankFacts]) -> str:
    """``rank 3 (node1), rank 4 (node1)``."""
    named = [f"rank {each} ({ranks[each].host})" for each in numbers[:_NAMED]]
    return ", ".join(named) + (f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else "")
