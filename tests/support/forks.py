"""Processes that may die: forked from one that has imported everything, so that a life costs milliseconds.

A life is a module-level function ``f(say, rank, *args)``; what it says is kept until its last moment. It may be killed
after some time, or kill itself before any chosen operation on files, and may have a small file system to itself, or a
network.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import math
import multiprocessing
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardengine.offload import direct_io
from tests.support import HANG_S
from tests.support.ranks import fork_context

NO_FILE_SYSTEM, NO_NETWORK = "no file system of its own", "no network of its own"
"""What a life says where it may not have one."""


class Forks:
    """One process that forks others; not itself a thread, a group or an engine."""

    def __init__(self, prepare: Callable[[], None] | None = None, *, fresh: bool = True) -> None:
        """prepare: imports what the lives need; None: what most tests need is imported. fresh: prepare, if there, finds
        nothing imported before."""
        context: Any = multiprocessing.get_context("spawn") if fresh and prepare is not None else fork_context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, prepare))
        self._process.start()
        assert self._pipe.poll(HANG_S), "the process that forks did not start"
        self._pipe.recv()

    def live(
        self,
        life: Callable[..., Any],
        *args: Any,
        ranks: int = 1,
        kill_at: tuple[int, float] | None = None,
        disk: tuple[str, int] | None = None,
        network: bool = False,
    ) -> list[list[Any]]:
        """What each of ``ranks`` lives said; a traceback among it is raised here.

        kill_at: (n, share): all are killed after the n-th word of rank 0 (from 1 on), when the next one is this share
        of the way: as long as the one before took · disk: (mount point, bytes) · network: a loopback interface of
        their own.
        """
        self._pipe.send((life, args, ranks, kill_at, disk, network))
        assert self._pipe.poll(2 * HANG_S), "no answer: a hang"
        said: list[list[Any]] = self._pipe.recv()
        for rank, words in enumerate(said):
            for word in words:
                assert not isinstance(word, Raised), f"rank {rank}:\n{word.text}"
        return said

    def end(self) -> None:
        """No more lives."""
        self._pipe.send(None)
        self._process.join(20)


class Raised:
    """The traceback of a life that ended in an exception."""

    def __init__(self, text: str) -> None:
        self.text = text


def _serve(pipe: Connection, prepare: Callable[[], None] | None) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if prepare is not None:
        prepare()
    import torch

    import shardengine.checkpoint  # noqa: F401  # nobody has to import it again, nor what the first optimizer imports
    from tests.support import cases

    cases.make_optimizer(cases.make_mlp(), "AdamW")

    torch.set_num_threads(1)
    gc.freeze()  # a collection of a life looks at what it made itself
    pipe.send("ready")
    while (job := pipe.recv()) is not None:
        pipe.send(_lives(*job))


def _lives(
    life: Callable[..., Any], args: Any, ranks: int, kill_at: tuple[int, float] | None, disk: tuple[str, int] | None,
    network: bool,
) -> list[list[Any]]:  # fmt: skip
    ends = [os.pipe() for _ in range(ranks)]
    leader = os.fork()
    if leader == 0:
        os.setpgid(0, 0)
        if disk is not None and not _mount(*disk):
            life, args = _without, (NO_FILE_SYSTEM,)
        elif network and not _own_network():
            life, args = _without, (NO_NETWORK,)
        for rank, (_, write) in enumerate(ends):
            if os.fork() == 0:
                _live(life, write, rank, args)
        for _, write in ends:
            os.close(write)
        with suppress(ChildProcessError):
            while True:
                os.wait()
        os._exit(0)
    for _, write in ends:
        os.close(write)
    said = _listen([read for read, _ in ends], leader, kill_at)
    os.waitpid(leader, 0)
    return said


def _live(life: Callable[..., Any], write: int, rank: int, args: Any) -> None:
    def say(word: Any) -> None:
        data = pickle.dumps(word)
        os.write(write, struct.pack("<I", len(data)) + data)

    code = 1
    try:
        life(say, rank, *args)
        code = 0
    except BaseException:
        say(Raised(traceback.format_exc()))
    os._exit(code)


def _without(say: Callable[[Any], None], _rank: int, what: str) -> None:
    say(what)


def _listen(reads: list[int], leader: int, kill_at: tuple[int, float] | None) -> list[list[Any]]:
    data = dict.fromkeys(reads, b"")
    kill, end = math.inf, time.monotonic() + HANG_S
    heard = [time.monotonic()]
    left = set(reads)
    while left:
        until = min(end, kill)
        ready = select.select(list(left), [], [], max(until - time.monotonic(), 0))[0]
        for read in ready:
            chunk = os.read(read, 1 << 16)
            data[read] += chunk
            if not chunk:
                left.discard(read)
                os.close(read)
        said = len(list(_words(data[reads[0]])))
        heard += [time.monotonic()] * (said + 1 - len(heard))
        if kill_at is not None and kill == math.inf and said >= kill_at[0]:
            number, share = kill_at
            kill = heard[number] + share * (heard[number] - heard[number - 1])
        if time.monotonic() >= until:
            with suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
            kill, end, kill_at = math.inf, time.monotonic() + HANG_S, None
    return [list(_words(data[read])) for read in reads]


def _words(data: bytes) -> Iterator[Any]:
    while len(data) >= 4:
        (size,) = struct.unpack("<I", data[:4])
        if len(data) >= 4 + size:
            yield pickle.loads(data[4 : 4 + size])
        data = data[4 + size :]


def _mount(place: str, size: int) -> bool:
    """A file system of ``size`` bytes for this process and its children alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not _unshare(0x00020000):  # CLONE_NEWNS
        return False
    if libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None):  # MS_REC | MS_PRIVATE
        return False
    return not libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, f"size={size}".encode())


def _own_network() -> bool:
    """A loopback interface for this process and its children alone."""
    if not _unshare(0x40000000):  # CLONE_NEWNET
        return False
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS: IFF_UP, IFF_RUNNING
        return True
    return False


def _unshare(space: int) -> bool:
    uid = os.getuid()
    if ctypes.CDLL(None, use_errno=True).unshare(space | (0x10000000 if uid else 0)):  # CLONE_NEWUSER
        return False
    if uid:
        with suppress(OSError):
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1", encoding="ascii")
    return True


def make_read_only(place: str) -> None:
    """The file system at ``place``, which was mounted for this life, takes no more writes."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.mount(b"none", place.encode(), None, 0x20 | 0x1, None), os.strerror(ctypes.get_errno())


# Dying at a chosen operation

_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime", "os.scandir")


@contextmanager
def operations(folder: str, last: int | None = None) -> Iterator[list[str]]:
    """What is done to files in ``folder`` inside the ``with``; this process is killed before number ``last``."""
    done: list[str] = []
    active = True

    def count(name: str) -> bool:
        if len(done) == last:
            return True
        done.append(name)
        return False

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if active and event in _EVENTS and folder in str(values[0]) and count(event):
            os.kill(os.getpid(), signal.SIGKILL)

    def pwritev(file: int, parts: Any, offset: int) -> int:
        if count("pwritev"):
            original[0](file, [part[: len(part) // 2] for part in parts], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return int(original[0](file, parts, offset))

    def fsync(file: Any) -> None:
        if count("fsync"):
            os.kill(os.getpid(), signal.SIGKILL)
        original[1](file)

    system: Any = os
    moving: Any = direct_io
    original: tuple[Any, Any] = (moving.pwritev, system.fsync)
    sys.addaudithook(hook)
    moving.pwritev, system.fsync = pwritev, fsync
    try:
        yield done
    finally:
        active = False
        moving.pwritev, system.fsync = original
