"""Which device every rank uses: launchers as tables of what ranks see, and processes that really agree."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardengine.comm import devices, group_kind, mesh
from shardengine.comm.devices import Gpus, RankFacts, choose
from shardengine.errors import CommunicationError, UsageError
from tests.comm.test_rendezvous import MPI, ROOT, STEP, clean
from tests.support import HANG_S
from tests.support.raising import raises
from tests.support.ranks import RankPool

CPU = torch.device("cpu")
EIGHT = tuple(f"GPU-{number}" for number in range(8))


def host(name: str, ranks: int, *, numbered: bool = True, gpus: int = 8, own: int = 0) -> list[RankFacts]:
    """Ranks of one host that see all its GPUs, or ``own`` each."""

    def facts(rank: int) -> RankFacts:
        names = [f"GPU-{name}-{number}" for number in range(gpus)]
        seen = tuple(names[rank * own : (rank + 1) * own] if own else names)
        return RankFacts(name, Gpus(seen, nccl=True), local_rank=rank if numbered else None)

    return [facts(rank) for rank in range(ranks)]


def seeing(ranks: list[RankFacts], **changes: Any) -> list[RankFacts]:
    """``ranks`` with ``changes`` of what CUDA shows: a value for all, or a list with one for each."""
    every = [
        {key: value[r] if isinstance(value, list) else value for key, value in changes.items()}
        for r in range(len(ranks))
    ]
    return [replace(one, gpus=replace(one.gpus, **each)) for one, each in zip(ranks, every, strict=True)]


def told(ranks: list[RankFacts], **changes: Any) -> list[RankFacts]:
    """``ranks`` with ``changes`` of what they were told: a value for all, or a list with one for each."""
    return [
        replace(one, **{key: value[r] if isinstance(value, list) else value for key, value in changes.items()})
        for r, one in enumerate(ranks)
    ]


@dataclass
class Case:
    """group: whether the caller's process group has NCCL, None: there is none · expected: the GPU of every rank."""

    ranks: list[RankFacts]
    expected: list[int | str]
    backend: str = "nccl"
    group: bool | None = None
    why: str = ""
    unused: str = ""


BLIND = [RankFacts("a"), RankFacts("a", local_rank=1)]
CASES = {
    "torchrun, one node": Case(host("a", 8), list(range(8)), why="local rank is 0"),
    "torchrun, two nodes": Case(host("a", 8) + host("b", 8), [*range(8), *range(8)]),
    "torchrun, fewer ranks than GPUs": Case(host("a", 2), [0, 1]),
    "srun --gpus-per-task=1": Case(host("a", 4, gpus=4, own=1), [0, 0, 0, 0], why="no other is visible"),
    "srun --gpus-per-task=2": Case(host("a", 4, own=2), [0, 1, 0, 1]),
    "pods with a GPU each": Case([host(f"pod{n}", 1, numbered=False, gpus=1)[0] for n in range(16)], [0] * 16),
    "2 x 8 GPUs, nothing said": Case(
        host("a", 8, numbered=False) + host("b", 8, numbered=False), [*range(8), *range(8)], why="place 0"
    ),
    "ranks of two hosts by turns": Case(
        [one for pair in zip(host("a", 2, numbered=False), host("b", 2, numbered=False), strict=True) for one in pair],
        [0, 0, 1, 1],
    ),
    "mp.spawn in a batch script": Case(told(host("a", 4), local_rank=0), [0, 1, 2, 3], group=True),
    "mp.spawn, set_device": Case(
        seeing(host("a", 4, numbered=False), current=[3, 2, 1, 0]), [3, 2, 1, 0], group=True, why="the current one"
    ),
    "set_device against LOCAL_RANK": Case(seeing(host("a", 2), current=[1, 0]), [1, 0], why="the current one"),
    "set_device on one host alone": Case(
        seeing(host("a", 2), current=[5, 4]) + host("b", 2), [5, 4, 0, 1], why="the current one"
    ),
    "CUDA in use, nothing set": Case(host("a", 2), [0, 1], group=True, why="local rank"),
    "init_process_group(device_id=)": Case(told(host("a", 2), bound=[6, 7]), [6, 7], group=True, why="bound to it"),
    "bound against set_device": Case(seeing(told(host("a", 2), bound=[6, 7]), current=1), [6, 7], group=True),
    "asked for": Case(told(host("a", 2), wish=["cuda:4", "cuda:2"]), [4, 2], why="asked for"),
    "asked for against set_device": Case(
        seeing(told(host("a", 2), wish=["cuda:4", "cuda:2"]), current=1), [4, 2], why="asked for"
    ),
    "one process": Case(host("a", 1, numbered=False), [0]),
    "one process, set_device": Case(seeing(host("a", 1, numbered=False), current=3), [3]),
    "one process, torch without NCCL": Case(seeing(host("a", 1), nccl=False), [0], "gloo"),
    "one process, no GPU": Case([RankFacts("a")], ["cpu"], "gloo", why="no GPU is visible"),
    "torchrun, no GPU": Case(BLIND, ["cpu", "cpu"], "gloo", why="no GPU is visible"),
    "a group of gloo, no GPU": Case(BLIND, ["cpu", "cpu"], "gloo", group=False),
    "SHARDENGINE_DEVICE=cpu": Case(told(host("a", 2), wish="cpu"), ["cpu", "cpu"], "gloo", why="asked for"),
    "a group with NCCL, the CPU asked for": Case(told(host("a", 2), wish="cpu"), ["cpu", "cpu"], "gloo", group=True),
    "SHARDENGINE_DEVICE=cuda": Case(told(host("a", 2), wish="cuda"), [0, 1]),
    "a group of gloo": Case(host("a", 2), ["cpu", "cpu"], "gloo", group=False, unused="8 GPU.*with backend nccl"),
    "torch without NCCL": Case(seeing(host("a", 2), nccl=False), ["cpu", "cpu"], "gloo", unused="8 GPU.*has no NCCL"),
    "a group of gloo, one GPU asked for": Case(
        told(host("a", 2, gpus=1), wish="cuda:0"), [0, 0], "gloo", group=False, why="asked for"
    ),
    "names unknown": Case(seeing(host("a", 2), names=("", "")), [0, 1]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_choice(case: Case):
    found = [choose(case.ranks, rank, case.group) for rank in range(len(case.ranks))]
    assert [each.device for each in found] == [
        torch.device(*(("cuda", n) if n != "cpu" else ("cpu",))) for n in case.expected
    ]
    assert {each.backend for each in found} == {case.backend}
    assert case.why in found[0].why
    assert re.search(case.unused, found[0].unused)
    assert bool(found[0].unused) == bool(case.unused)


REFUSED = {
    "a GPU asked for by one rank, none there": (
        told(host("a", 2, gpus=0), wish=["", "cuda"]),
        None,
        r"none is visible to rank 0 \(a\), rank 1",
    ),
    "two ranks, one GPU": (host("a", 2, gpus=1), None, r"GPU-a-0 of rank 0 \(a, cuda:0\), rank 1 \(a, cuda:0\)"),
    "more ranks than GPUs": (host("a", 3, gpus=2), None, r"1 GPU\(s\) belong to several: GPU-a-0 of rank 0 .*, rank 2"),
    "every rank set the same": (seeing(host("a", 2), current=1), True, "GPU-a-1 of rank 0 .*set_device before"),
    "bound to the same": (told(host("a", 2), bound=0), True, "GPU-a-0 of rank 0"),
    "containers of one host": (
        [*host("a", 1, gpus=1), *(replace(one, host="b") for one in host("a", 1, gpus=1))],
        None,
        r"rank 0 \(a, cuda:0\), rank 1 \(b, cuda:0\)",
    ),
    "one node without its driver": (host("a", 2) + host("b", 2, gpus=0), None, r"rank 2 \(b\), rank 3 \(b\), and the"),
    "a GPU wanted, none there": (
        told(BLIND, wish="cuda"),
        None,
        r"none is visible to rank 0 \(a\), rank 1 \(a\): look",
    ),
    "the CPU on one rank": (told(host("a", 2), wish=["", "cpu"]), None, r"asked for on rank 1 \(a\) of 2 alone"),
    "beyond the last": (
        told(host("a", 2, gpus=2), wish="cuda:2"),
        None,
        r"rank 0 on a: expected one of its 2 GPU.*cuda:2",
    ),
    "bound to another": (
        told(host("a", 2), wish="cuda:0", bound=[0, 1]),
        True,
        "rank 1: .* bound to cuda:1, and cuda:0",
    ),
    "another kind": (
        told(host("a", 2), wish=["", "gpu"]),
        None,
        "rank 1: expected cpu or cuda .*SHARDENGINE_DEVICE, got",
    ),
}


@pytest.mark.parametrize(("ranks", "group", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_refused_on_every_rank(ranks: list[RankFacts], group: bool | None, message: str):
    for rank in range(len(ranks)):
        with pytest.raises(UsageError, match=message):
            choose(ranks, rank, group)


def test_an_error_of_many_ranks_is_short():
    ranks = [one for n in range(64) for one in host(f"node{n}", 16)]
    with raises("device-shared-by-ranks", "512") as caught:
        choose(ranks, 0)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({"LOCAL_RANK": "3"}, 3),
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "1"}, 3),
        ({**STEP, "SLURM_LOCALID": "5"}, 5),
        (MPI, 1),
        ({"MV2_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({"MPI_LOCALRANKID": "2"}, 2),
        ({"PALS_LOCAL_RANKID": "2"}, 2),
        ({"FLUX_TASK_LOCAL_ID": "2"}, 2),
        ({"LOCAL_RANK": ""}, None),
        ({}, None),
    ],
)
def test_every_launchers_number(environment: dict[str, str], number: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", clean(**environment))
    assert devices.facts().local_rank == number


@pytest.mark.parametrize(
    ("uuids", "names"),
    [(["a", "b"], ("GPU-a", "GPU-b")), (["a", "a"], ("", "")), (["00-00"], ("",)), ([None], ("",)), ([], ())],
)
def test_what_cuda_shows(uuids: list[str | None], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    shown = [SimpleNamespace(uuid=uuid) if uuid else SimpleNamespace() for uuid in uuids]
    played = {
        "is_available": lambda: bool(uuids),
        "is_initialized": lambda: False,
        "current_device": lambda: pytest.fail("this would begin to use CUDA"),
        "device_count": lambda: len(uuids),
        "get_device_properties": shown.__getitem__,
    }
    for name, function in played.items():
        monkeypatch.setattr(torch.cuda, name, function)
    assert (devices.gpus().names, devices.gpus().current) == (names, 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert devices.gpus().current == (1 if uuids else 0)


@dataclass
class Bound:
    """A process group that was made with ``device_id``."""

    bound_device_id: torch.device = field(default_factory=lambda: torch.device("cuda", 5))


def test_one_process_beside_several_gpus(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    for name in ("RANK", "WORLD_SIZE", *MPI):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(devices, "count", lambda: 4)

    def told(device: torch.device | None, gpus: int) -> str:
        caplog.clear()
        seen = Gpus(EIGHT[:gpus], nccl=True)
        monkeypatch.setattr(devices, "gpus", lambda: seen)
        monkeypatch.setattr(devices, "count", lambda: gpus)
        mesh.build(device)
        return caplog.text

    text = told(None, 4)
    assert "4 GPUs are visible and 1 is used: no launcher has started this process" in text
    assert "torchrun --standalone --nproc-per-node 4" in text
    assert told(None, 1) == "" and told(None, 0) == ""
    assert told(torch.device("cuda", 2), 4) == "", "who names one means it"


def test_facts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "gpus", lambda: Gpus(EIGHT, 2, nccl=True))
    monkeypatch.setattr(os, "environ", clean(LOCAL_RANK="1"))
    mine = devices.facts()
    assert (mine.gpus.names, mine.wish, mine.bound, mine.local_rank) == (EIGHT, "", None, 1)
    assert RankFacts.from_text(mine.to_text()) == mine
    assert devices.facts(torch.device("cuda")).wish == "cuda:2"  # the current one
    assert devices.facts(torch.device("cuda", 7)).wish == "cuda:7"
    assert devices.facts(group=Bound()).bound == 5  # type: ignore[arg-type]
    os.environ[devices.WISH] = "cpu"
    assert devices.facts().wish == "cpu"
    assert devices.facts(torch.device("cuda", 7)).wish == "cuda:7"  # the argument comes before the variable


@pytest.mark.parametrize(
    ("backends", "has"),
    [("cuda:nccl", True), ("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False), ("cpu:gloo,cuda:gloo", False)],
)
def test_whether_a_group_has_nccl(backends: str, has: bool):
    assert devices.has_nccl(backends) is has


def test_torch_says_so_of_its_backends():
    config = dist.distributed_c10d.BackendConfig
    assert devices.has_nccl(repr(config(dist.Backend("nccl"))))
    assert not devices.has_nccl(repr(config(dist.Backend("gloo"))))
    assert not devices.has_nccl(repr(config(dist.Backend("cpu:gloo"))))


# Processes that agree over a store


def built(seen: list[Gpus], wishes: list[str] | None = None, device: str | None = None) -> tuple[str, str, list[str]]:
    """Device and backend of ``mesh.build`` on a rank that sees ``seen``, or its error; what it logged."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("shardengine")
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "gpus", lambda: seen[rank])
        patch.setattr(torch.cuda, "set_device", lambda device: logged.append(f"set {device}"))
        if wishes:
            patch.setenv(devices.WISH, wishes[rank])
        log.addHandler(handler)
        try:
            made = mesh.build(torch.device(device) if device else None, 30)
            found = str(made.device), made.backend
            made.destroy()
        except UsageError as error:
            found = "refused", str(error)
        finally:
            log.removeHandler(handler)
    return *found, logged


def test_ranks_agree_over_the_store(pools):
    pool: RankPool = pools(2)
    one, other = Gpus(("GPU-a",), nccl=True), Gpus(("GPU-b",), nccl=True)
    first, second = pool.run(built, [one, other])
    assert first[:2] == second[:2] == ("cpu", "gloo")  # the pool's group is one of gloo
    assert "1 GPU(s) are visible and not used" in first[2][0]
    assert second[2] == []  # rank 0 says it once
    assert pool.run(built, [one, other], ["cpu", "cpu"]) == [("cpu", "gloo", [])] * 2
    assert pool.run(built, [one, one], None, "cuda:0") == [("cuda:0", "gloo", ["set cuda:0"])] * 2
    for found in (pool.run(built, [one, other], ["cpu", "cuda"]), pool.run(built, [one, Gpus()], ["cuda", "cuda"])):
        assert found[0] == found[1]
        assert found[0][0] == "refused"


SHARED = """
from shardengine.comm import devices, group_kind, mesh
devices.gpus = lambda: devices.Gpus(("GPU-a",), nccl=True)
mesh.build(timeout_s=60)
"""


def test_ranks_that_would_share_a_gpu_are_refused_before_there_is_a_group():
    port = str(27000 + os.getpid() % 5000)
    numbers = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARED],
            env=clean(PYTHONPATH=str(ROOT), RANK=str(rank), **numbers),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        assert "UsageError: expected a GPU of its own for every rank" in process.communicate(timeout=HANG_S)[1]


# A group of NCCL, of which torch's part is played


class Played:
    """torch.distributed of rank 0, whose groups of NCCL are only noted; the other ranks have said ``others``."""

    def __init__(self, *others: RankFacts, backends: str = "cuda:nccl") -> None:
        self.events: list[tuple[Any, ...]] = []
        self.distributed_c10d, self._backends, self._ranks = self, backends, 1 + len(others)
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        said = dist.PrefixStore("shardengine/devices/1", self._store)  # type: ignore[attr-defined]
        for rank, other in enumerate(others, start=1):
            said.set(str(rank), other.to_text())
        said.set("all have read", "")
        self.ProcessGroupNCCL = self

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def is_initialized(self) -> bool:
        return True

    def get_rank(self) -> int:
        return 0

    def get_world_size(self) -> int:
        return self._ranks

    def get_backend_config(self) -> str:
        return self._backends

    def _get_default_store(self) -> Any:
        return self._store

    class Options:
        def __init__(self, *, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta()

    def new_group(self, ranks: list[int] | None = None, **options: Any) -> str:
        self.events.append(("new", options, ranks))
        return f"group {len(self.events)}"

    def barrier(self, group: Any, device_ids: list[int] | None = None) -> None:
        self.events.append(("barrier", group, device_ids))

    def destroy_process_group(self, group: Any) -> None:
        self.events.append(("end", group))


@pytest.mark.parametrize("backends", ["cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_groups_of_nccl(backends: str, monkeypatch: pytest.MonkeyPatch):
    current: list[torch.device] = []
    played = Played(host("a", 2)[1], backends=backends)
    for module in (mesh, group_kind):
        monkeypatch.setattr(module, "dist", played)
    monkeypatch.setattr(devices, "facts", lambda *_: host("a", 2)[0])
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(os, "environ", clean(MASTER_ADDR="localhost"))
    made = mesh.build(timeout_s=30)
    gpu = torch.device("cuda", 0)
    assert (made.device, made.backend, current) == (gpu, "nccl", [gpu])
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"  # for the control group
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    groups, rest = [each[1] for each in played.events[:3]], played.events[3:]
    assert [each["backend"] for each in groups] == ["nccl", "nccl", "gloo"]
    assert [each["timeout"].total_seconds() for each in groups] == [150, 150, 30]
    assert [each.get("device_id") for each in groups] == [gpu, gpu, None]
    assert [each["pg_options"].is_high_priority_stream for each in groups[:2]] == [True, False]
    assert [each["pg_options"]._timeout for each in groups[:2]] == [each["timeout"] for each in groups[:2]]
    assert rest == [("barrier", "group 1", [0]), ("barrier", "group 2", [0])]  # each has sent once
    played.events.clear()
    monkeypatch.setattr(mesh.Mesh, "store", lambda self: played._store)
    monkeypatch.setattr(mesh, "await_all", lambda *args: played.events.append(("all", *args[1:])))
    replace(made, made_default_group=True).destroy()
    assert played.events == [("all", 0, 2, 30), *(("end", f"group {number}") for number in (1, 2, 3))]  # no barrier


def test_groups_of_nodes(monkeypatch: pytest.MonkeyPatch):
    """Made by every rank in one order, and warmed up like the others."""
    first, *others = [replace(each, local_ranks=2) for name in "ab" for each in host(name, 2)]
    played = Played(*others)
    for module in (mesh, group_kind):
        monkeypatch.setattr(module, "dist", played)
    monkeypatch.setattr(devices, "facts", lambda *_: first)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(os, "environ", clean(MASTER_ADDR="localhost"))
    made: Any = mesh.build(timeout_s=30)
    made.make_node_groups()
    assert made.nodes.number == 2 and [*made.node_groups.values()] == ["group 6", "group 8"]
    news = [each for each in played.events if each[0] == "new"][3:]
    assert [ranks for _, _, ranks in news] == [[0, 1], [2, 3], [0, 2], [1, 3]]
    assert all(each["backend"] == "nccl" and each["device_id"] == made.device for _, each, _ in news)
    warmed = [each[1] for each in played.events if each[0] == "barrier"]
    assert warmed == ["group 1", "group 2", "group 6", "group 8"]
    played.events.clear()
    made.destroy()
    assert [each[1] for each in played.events] == ["group 1", "group 2", "group 3", "group 6", "group 8"]


def test_a_group_without_nccl_is_one_of_gloo(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    played = Played(host("a", 2)[1], backends="cpu:gloo")
    for module in (mesh, group_kind):
        monkeypatch.setattr(module, "dist", played)
    monkeypatch.setattr(devices, "facts", lambda *_: host("a", 2)[0])
    monkeypatch.setattr(os, "environ", clean(TORCH_NCCL_DUMP_ON_TIMEOUT="1"))
    made = mesh.build(timeout_s=30)
    assert (made.device, made.backend) == (CPU, "gloo")
    assert [(each[1]["backend"], each[1]["timeout"].total_seconds()) for each in played.events] == [("gloo", 30)] * 4
    assert "8 GPU(s) are visible and not used" in caplog.text
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # the caller's group works already
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_a_rank_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch):
    played = Played(RankFacts("a"))
    played._store = dist.HashStore()  # type: ignore[attr-defined]
    played._store.set_timeout(timedelta(milliseconds=10))
    monkeypatch.setattr(mesh, "dist", played)
    with raises("initialize-ranks-missing", "rank 1 does not answer"):
        mesh.build(CPU, 30)


def say_who_is_missing(store: Any, rank: int, ranks: int) -> str:
    with pytest.raises(CommunicationError) as raised:
        mesh._exchange("joining", RankFacts("a"), rank, ranks, store)
    return str(raised.value).removeprefix(f"initialize on rank {rank}: ").partition(" where ranks say")[0]


def test_every_rank_names_those_that_are_missing():
    """Not whom it waits for itself: rank 0, which waits for them."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(milliseconds=10))
    assert say_who_is_missing(store, 1, 4) == "ranks 0, 2, 3 do not answer"
    assert say_who_is_missing(store, 0, 4) == "ranks 2, 3 do not answer"
    assert say_who_is_missing(store, 3, 4) == "rank 2 does not answer"
    assert say_who_is_missing(store, 2, 4) == "rank 0 does not answer"  # all have said what they see, and it is gone
    assert say_who_is_missing(store, 0, 4) == "a rank does not answer, it is not known which,"  # one has not read


def test_a_store_that_is_gone_is_no_rank():
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    assert mesh._missing(Gone(), 2) == "the store over which ranks meet does not answer"


def test_ranks_end_together_without_a_collective():
    store = dist.HashStore()  # type: ignore[attr-defined]
    gone: list[int] = []

    def end(rank: int) -> None:
        mesh.await_all(store, rank, 3, HANG_S)
        gone.append(rank)

    threads = [threading.Thread(target=end, args=(rank,)) for rank in range(3)]
    for thread in threads[:2]:
        thread.start()
    threads[1].join(0.2)
    assert not gone
    threads[2].start()
    for thread in threads:
        thread.join(HANG_S)
    assert sorted(gone) == [0, 1, 2]


def test_the_rank_that_hosts_the_store_leaves_last():
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.add("here", 1)  # rank 1 is here and does not know yet that rank 0 is, too
    host = threading.Thread(target=mesh.await_all, args=(store, 0, 2, HANG_S))
    host.start()
    store.wait(["all here"], timedelta(seconds=HANG_S))
    host.join(0.2)
    assert host.is_alive()
    store.add("seen", 1)
    store.set("all seen", "")
    host.join(HANG_S)
    assert not host.is_alive()


def test_the_rank_that_hosts_the_store_says_nothing_more_before_all_have_read():
    store = dist.HashStore()  # type: ignore[attr-defined]
    said = dist.PrefixStore("shardengine/devices/key", store)  # type: ignore[attr-defined]
    said.set("1", RankFacts("b").to_text())
    host = threading.Thread(target=mesh._exchange, args=("key", RankFacts("a"), 0, 2, store))
    host.start()
    said.wait(["all"], timedelta(seconds=HANG_S))
    host.join(0.2)
    assert host.is_alive()
    assert mesh._exchange("key", RankFacts("b"), 1, 2, store) == [RankFacts("a"), RankFacts("b")]
    host.join(HANG_S)
    assert not host.is_alive()
