"""Which rank this process is and where the ranks meet, from its launcher. Owns: reading the launchers' variables.

Must not know: torch, process groups, the work of a rank. Every launcher's variables become those that torch reads:
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. torchrun and accelerate set them; SLURM's srun
and MPI's mpirun use other names.

[Note: Is this a rank] An allocation is not a launch. In a shell of salloc, in a batch script and in `srun --pty bash`
SLURM's variables describe the request (SLURM_NTASKS=8, SLURM_PROCID=0), and nobody started seven others. A rank is a
task of a *step*: SLURM_STEP_ID is the number of an ordinary step (salloc's own shell and the batch script are special
ones), the step has at least two tasks, and the process does not sit at srun's terminal. A step of one task is an
ordinary process, so `srun -n 1 shardengine train --ranks 4` starts its own ranks. mpirun under SLURM starts its daemons
as a step, so MPI's variables come first.

[Note: The interface of gloo] Decisions between ranks use gloo even if data uses NCCL. gloo resolves the host's own
name, which on many clusters is 127.0.1.1, and then no other host can connect. So if the user has not set
GLOO_SOCKET_IFNAME, it becomes the interface over which this host reaches the meeting place of the ranks. On the host
that is the meeting place it becomes the interface of the default route. Ranks of one machine use the loopback
interface.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

from shardengine.errors import UsageError

_SPECIAL_STEPS = 0xFFFFFFF0
"""SLURM's step numbers from here on mean a batch script, an interactive shell and the like."""
_FIRST_PORT, _PORTS = 12000, 20000  # below 32768, where systems take the ports of outgoing connections from
LAUNCHED = "SHARDENGINE_LAUNCHED_RANK"
"""Set in the processes that ``shardengine.launch`` starts."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_ELSEWHERE = "203.0.113.1"
"""An address of no host, reserved for examples: the route to it is the default route."""
_SIOCGIFCONF, _MOST_INTERFACES = 0x8912, 256
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)


def join() -> bool:
    """Return whether a launcher started this process as one of its ranks ([Note: Is this a rank]); may set os.environ.

    Then RANK and WORLD_SIZE are set, and under srun and mpirun the others that torch reads. Variables that are set
    already stay unchanged. UsageError if a launcher's variables contradict each other or do not give the meeting place.
    """
    environment = os.environ
    if "RANK" in environment:
        if "WORLD_SIZE" not in environment:
            return False
    else:
        found = mpi_rank(environment) or slurm_rank(environment)
        if found is None:
            return False
        if environment.get("WORLD_SIZE", found["WORLD_SIZE"]) != found["WORLD_SIZE"]:
            raise UsageError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']}, but the launcher started {found['WORLD_SIZE']} processes: "
                "leave WORLD_SIZE unset, or set RANK as well",
                code="launcher-world-size-differs",
            )
        environment.update({name: value for name, value in found.items() if name not in environment})
    if environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]:  # one machine
        for name, value in loopback().items():
            environment.setdefault(name, value)
    settle_gloo_interface(environment.get("MASTER_ADDR", ""))
    return True


def hosts_store() -> bool:
    """Return whether the launcher (torchrun, ``launch``), and so no rank, hosts the store of the ranks."""
    return agent_store() or LAUNCHED in os.environ


def agent_store() -> bool:
    """Return whether torchrun's agent hosts that store, which then survives a restart of the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def loopback() -> dict[str, str]:
    """Return GLOO_SOCKET_IFNAME for ranks of one machine.

    Without it gloo resolves the host's name, which often fails.
    """
    found = sorted({"lo", "lo0"}.intersection(name for _, name in socket.if_nameindex()))
    return {"GLOO_SOCKET_IFNAME": found[0]} if found else {}


def settle_gloo_interface(meeting_place: str) -> None:
    """Set GLOO_SOCKET_IFNAME if it is not set ([Note: The interface of gloo]).

    meeting_place: a host; "": unknown.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not meeting_place:
        return
    if meeting_place in _LOOPBACK:
        os.environ.update(loopback())
        return
    mine = local_address(meeting_place)
    if mine and ipaddress.ip_address(mine).is_loopback:
        mine = local_address(_ELSEWHERE)
    if name := interfaces().get(mine):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def local_address(host: str) -> str:
    """Return this machine's address on the route to ``host``; "" without a route. Nothing is sent."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), closing(socket.socket(family, kind, protocol)) as probe:
                probe.connect(address)  # of a datagram socket: chooses the route
                return str(ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]))
    return ""


def interfaces() -> dict[str, str]:
    """Return address → interface for all interfaces that are up; IPv6 from Linux's list."""
    found: dict[str, str] = {}
    size = struct.calcsize("16sHH4s16x") if struct.calcsize("P") == 8 else 32  # of struct ifreq
    room = array.array("B", bytes(_MOST_INTERFACES * size))
    with suppress(OSError), closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        used, _ = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, request))
        for start in range(0, used, size):
            name = room[start : start + 16].tobytes().partition(b"\0")[0].decode()
            address = ipaddress.IPv4Address(room[start + 20 : start + 24].tobytes())
            found[str(address)] = name.partition(":")[0]  # eth0:1 is another address of eth0
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            found[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return found


def mpi_rank(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return torch's variables from those of Open MPI's or MPICH's mpirun; None if it started no ranks."""
    for names in _MPI:
        if set(names) <= set(environment) and int(environment[names[1]]) > 1:
            rank, ranks, local_rank, local_ranks = (environment[name] for name in names)
            if not {"MASTER_ADDR", "MASTER_PORT"} <= set(environment):
                raise UsageError(
                    f"mpirun started this process as rank {rank} of {ranks}, but not where the ranks meet: expected "
                    "MASTER_ADDR (the host of rank 0) and MASTER_PORT in the environment of every rank",
                    code="launcher-without-master-addr",
                )
            return _variables(rank, ranks, local_rank, local_ranks)
    return None


def slurm_rank(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return torch's variables from those of a SLURM step; None if this process is no rank ([Note: Is this a rank])."""
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _SPECIAL_STEPS:
        return None
    if "SLURM_PTY_PORT" in environment and os.isatty(0):  # a step that this shell starts inherits only the variable
        return None
    ranks = environment.get("SLURM_STEP_NUM_TASKS") or _need(environment, "SLURM_NTASKS")
    rank = _need(environment, "SLURM_PROCID")
    if int(ranks) < 2:
        return None
    if int(rank) >= int(ranks):
        raise UsageError(
            f"SLURM says that this is task {rank} of a step of {ranks} tasks: expected a smaller number",
            code="slurm-rank-beyond-tasks",
        )
    found = _variables(rank, ranks, _need(environment, "SLURM_LOCALID"), _slurm_local_ranks(environment))
    if "MASTER_ADDR" not in environment:
        found["MASTER_ADDR"] = first_host(_need(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    if "MASTER_PORT" not in environment:  # one for all ranks; two steps of one job, or two jobs of one node, differ
        number = int(_need(environment, "SLURM_JOB_ID")) * 31 + int(step)
        found["MASTER_PORT"] = str(_FIRST_PORT + number % _PORTS)
    return found


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: ``node[01-03,07],gpu5`` → ``node01``, ``r[2-3]n[0-7]`` → ``r2n0``."""
    first = re.match(r"((?:[^,\[\]\s]|\[[^,\[\]-]+[^\[\]]*\])+)(?:,|$)", nodes)
    if first is None:
        raise UsageError(
            f"expected a SLURM node list such as node[01-03,07],gpu5, got {nodes!r}; set MASTER_ADDR",
            code="slurm-node-list-unreadable",
        )
    return re.sub(r"\[([^,\[\]-]+)[^\[\]]*\]", r"\1", first[1])


def tasks_on(node: int, tasks: str) -> str:
    """Return the number of tasks on a node of a SLURM step: node 1 of ``2(x3),1`` has ``2``, node 3 has ``1``."""
    counts: list[str] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UsageError(
                f"expected SLURM's tasks per node such as 2(x3),1, got {tasks!r}; set LOCAL_WORLD_SIZE",
                code="slurm-tasks-unreadable",
            )
        counts += [match[1]] * int(match[2] or 1)
    if node >= len(counts):
        raise UsageError(
            f"SLURM_NODEID is {node}, but {tasks!r} are the tasks of {len(counts)} nodes",
            code="slurm-node-beyond-tasks",
        )
    return counts[node]


def _slurm_local_ranks(environment: Mapping[str, str]) -> str | None:
    """Return the number of ranks on this node; None if SLURM does not provide it."""
    if "LOCAL_WORLD_SIZE" in environment:
        return environment["LOCAL_WORLD_SIZE"]
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    if tasks and "SLURM_NODEID" in environment:
        return tasks_on(int(environment["SLURM_NODEID"]), tasks)
    return environment.get("SLURM_NTASKS_PER_NODE")


def _variables(rank: str, ranks: str, local_rank: str, local_ranks: str | None) -> dict[str, str]:
    found = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank}
    return found if local_ranks is None else {**found, "LOCAL_WORLD_SIZE": local_ranks}


def _need(environment: Mapping[str, str], *names: str) -> str:
    """Return the value of the first of ``names`` that is set."""
    for name in names:
        if environment.get(name):
            return environment[name]
    raise UsageError(
        f"SLURM_STEP_ID says that this process is a task of a step, but {' and '.join(names)} is not set: expected "
        "srun's own environment; start it with srun, or with torchrun, or unset SLURM_STEP_ID",
        code="slurm-step-incomplete",
    )
