"""Whose files lie in a directory: those of the living stay, those of the dead go, and nobody else's are touched."""

from __future__ import annotations

import errno
import fcntl
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardengine.errors import UsageError
from shardengine.offload import direct_io
from shardengine.offload.host_memory import staging
from shardengine.offload.nvme import disk, lease
from shardengine.offload.nvme.extent_file import Aio, ExtentFile
from shardengine.offload.nvme.lease import DATA, LOCK, PREFIX, Lease, remove_abandoned
from tests.offload.test_extents import random_bytes, read
from tests.support import HANG_S
from tests.support.raising import raises

ROOT = Path(__file__).resolve().parents[2]
SMALL = Aio(block_size=8192, queue_depth=3)


def abandoned(directory: Path) -> Path:
    """A sub-directory as a killed process leaves it."""
    lease = Lease(directory, "rank 0")
    (lease.path / DATA).write_bytes(b"states")
    lease.forget()
    return lease.path


def test_what_the_dead_left_goes_and_nothing_else(tmp_path: Path) -> None:
    living = ExtentFile(tmp_path, "rank 0", SMALL)
    extent = living.allocate(9000)
    living.write(extent, random_bytes(9000)).wait()
    dead = abandoned(tmp_path)
    (tmp_path / (PREFIX + "young")).mkdir()  # killed before it had a lock
    (tmp_path / (PREFIX + "file")).write_text("no directory")
    (tmp_path / "other").mkdir()
    (tmp_path / (PREFIX + "link")).symlink_to(tmp_path / "other")
    filled = abandoned(tmp_path)
    (filled / "notes.txt").write_text("the user's")
    left = {living.path.parent.name, filled.name, "other", PREFIX + "file", PREFIX + "link"}
    with ExtentFileOf(tmp_path) as second:
        assert {path.name for path in tmp_path.iterdir()} == left | {second.path.parent.name}
        assert not dead.exists() and [path.name for path in filled.iterdir()] == ["notes.txt"]
    assert read(living, extent).equal(random_bytes(9000))
    living.close()
    assert {path.name for path in tmp_path.iterdir()} == left - {living.path.parent.name}


class ExtentFileOf:
    """An ExtentFile in a ``with``."""

    def __init__(self, directory: Path) -> None:
        self.file = ExtentFile(directory, "rank 3", SMALL)

    def __enter__(self) -> ExtentFile:
        return self.file

    def __exit__(self, *_: object) -> None:
        self.file.close()


@pytest.mark.parametrize("when", ["no lock yet", "locked by another", "lock is gone"])
def test_a_new_directory_that_is_taken_for_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Between its making and its lock somebody else may find it: the owner begins again, with another."""
    system_open, system_lock, tries = os.open, fcntl.flock, list[Path]()

    def other(path: Path) -> None:
        if path not in tries:
            tries.append(path)
            if len(tries) < 3:
                with monkeypatch.context() as patch:
                    patch.setattr(os, "open", system_open)
                    patch.setattr(fcntl, "flock", system_lock)
                    remove_abandoned(tmp_path)

    def open_later(path: Any, *rest: Any, **more: Any) -> int:
        if when == "no lock yet" and str(path).endswith(LOCK):
            other(Path(path).parent)
        return system_open(path, *rest, **more)

    def lock_later(number: int, flags: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{number}")).parent
        if when == "lock is gone":
            other(path)
        elif when == "locked by another" and len(tries) < 2:
            tries.append(path)
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        system_lock(number, flags)

    monkeypatch.setattr(os, "open", open_later)
    monkeypatch.setattr(fcntl, "flock", lock_later)
    lease = Lease(tmp_path, "rank 3")
    monkeypatch.undo()
    assert len(tries) >= 2 and lease.path not in tries[:2] and (lease.path / LOCK).exists()
    lease.release()
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def takes_a_lease_and_dies(directory: Path, seed: int) -> int:
    """Many lives in one, of which some end without tidying up. How many were not whole until their end?"""
    signal.alarm(int(HANG_S))  # no life is longer
    chance, lost = random.Random(seed), 0
    until = time.monotonic() + 1.0
    while time.monotonic() < until:
        lease = Lease(directory, "rank 3")
        (lease.path / DATA).write_bytes(b"states")
        for _ in range(chance.randrange(3)):
            os.sched_yield()
        lost += not ((lease.path / LOCK).exists() and (lease.path / DATA).exists())
        lease.forget() if chance.random() < 0.5 else lease.release()
    return lost


def test_many_that_start_and_die_at_once(tmp_path: Path) -> None:
    children = []
    for seed in range(5):
        children.append(os.fork())
        if children[-1] == 0:
            code = 100
            try:
                code = min(takes_a_lease_and_dies(tmp_path, seed), 99)
            finally:
                os._exit(code)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == 5 * [0]
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def writes_for_ever(directory: Path, pipe: int) -> None:
    signal.alarm(int(HANG_S))  # no life is longer
    file, memory = ExtentFile(directory, "rank 3", SMALL), staging(300_000)
    extents = [file.allocate(300_000) for _ in range(4)]
    for number in itertools.count():
        for transfer in [file.write(extent, memory) for extent in extents]:
            transfer.wait()
        if number == 0:
            os.write(pipe, bytes(file.path.parent))


def test_killed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            writes_for_ever(tmp_path, writer)
        finally:
            os._exit(1)
    os.close(writer)
    left = Path(os.read(reader, 4096).decode())
    os.close(reader)
    with ExtentFileOf(tmp_path) as file:
        assert set(tmp_path.iterdir()) == {left, file.path.parent}, "it lives"
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == [left] and (left / DATA).stat().st_size > 4 * 300_000
    with ExtentFileOf(tmp_path) as file:
        assert list(tmp_path.iterdir()) == [file.path.parent]
        assert not read(file, file.allocate(300_000)).any()


def test_a_forked_child(tmp_path: Path) -> None:
    """It has no part in the parent's file: neither its end nor its life does anything to it."""
    file = ExtentFile(tmp_path, "rank 3", SMALL)
    extent = file.allocate(50_000)
    file.write(extent, random_bytes(50_000)).wait()
    ask, answer = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for call in (lambda: file.allocate(1), lambda: file.look(extent), lambda: read(file, extent)):
                with raises("nvme-file-closed"):
                    call()
            file.close()
            file._end()
            with ExtentFileOf(tmp_path) as own:
                assert not read(own, own.allocate(5000)).any() and file.path.exists()
            code = 0
        finally:
            os.write(answer[1], bytes([code]))
            os.read(ask[0], 1)
            os._exit(code)
    assert os.read(answer[0], 1) == b"\0"
    assert read(file, extent).equal(random_bytes(50_000))
    file._lease.forget()  # as if the parent had died: the child, which lives, holds nothing
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []
    os.write(ask[1], b"1")
    assert os.waitpid(child, 0)[1] == 0
    for number in (*ask, *answer):
        os.close(number)


def test_a_fork_after_a_close_closes_nobodys_files(tmp_path: Path) -> None:
    file = ExtentFile(tmp_path, "rank 3", SMALL)
    file.close()
    numbers = [os.open(tmp_path / f"{name}.txt", os.O_CREAT | os.O_WRONLY) for name in "abcd"]  # those it had
    child = os.fork()
    if child == 0:
        try:
            for number in numbers:
                os.write(number, b"word")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert all((tmp_path / f"{name}.txt").read_text() == "word" for name in "abcd")
    for number in numbers:
        os.close(number)
    assert not file._lease.held
    with raises("nvme-file-closed"):
        file.allocate(1)


def test_a_fork_with_a_transfer_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, go_on = ExtentFile(tmp_path, "rank 3", SMALL), threading.Event()

    def slow(number: int, parts: Any, offset: int) -> int:
        assert go_on.wait(20)
        return os.pwritev(number, parts, offset)

    monkeypatch.setattr(direct_io, "pwritev", slow)
    extent, memory = file.allocate(50_000), random_bytes(50_000)
    transfer = file.write(extent, memory)
    child = os.fork()
    if child == 0:
        try:
            transfer.wait()
        except UsageError as error:
            os._exit("only the parent can wait" not in str(error))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    transfer.wait()
    assert read(file, extent).equal(memory)
    file.close()


def test_collected_in_one_of_its_own_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs wherever it likes."""
    holder, go_on, closed = list[ExtentFile](), threading.Event(), threading.Event()
    system_close = disk.DiskFile.close

    def last(number: int, parts: Any, offset: int) -> int:
        assert go_on.wait(20)
        holder.clear()
        gc.collect()
        assert not closed.wait(0.05), "its file is closed before its transfers are done"
        return os.preadv(number, parts, offset)

    def close(disk: disk.DiskFile) -> None:
        system_close(disk)
        closed.set()

    holder.append(ExtentFile(tmp_path, "rank 3", SMALL))
    monkeypatch.setattr(direct_io, "preadv", last)
    monkeypatch.setattr(disk.DiskFile, "close", close)
    memory = staging(8192).fill_(1)
    transfer = holder[0].read(holder[0].allocate(8192), memory)
    go_on.set()
    transfer.wait()
    assert not memory.any() and closed.wait(20)
    until = time.monotonic() + HANG_S
    while list(tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


LIVES = """
import os, sys
from pathlib import Path
from shardengine.offload import staging
from shardengine.offload.nvme.extent_file import Aio, ExtentFile
for name, end in {ends!r}.items():
    if life := os.fork():
        print(name, os.waitstatus_to_exitcode(os.waitpid(life, 0)[1]), flush=True)
        continue
    file = ExtentFile(Path({directory!r}) / name, "rank 3", Aio(block_size=65536, queue_depth=4))
    extents = [file.allocate(4 << 20) for _ in range(8)]
    sources = [staging(4 << 20) for _ in range(8)]
    transfers = [call(*pair) for pair in zip(extents, sources) for call in (file.write, file.read)]
    child = os.fork()
    if child == 0:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0 and file.path.exists(), "the child's exit removed the parent's file"
    exec(end)
    break
"""
ENDS = {"return": "", "exit": "sys.exit(5)", "exception": "raise ValueError('mine')", "reference": "del file"}


def test_the_end_of_an_interpreter(tmp_path: Path) -> None:
    """With transfers under way, at whatever end: it neither hangs nor crashes, and nothing is left."""
    script = LIVES.format(ends=ENDS, directory=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.splitlines() == ["return 0", "exit 5", "exception 1", "reference 0"], done.stderr
    assert done.stderr.count("Error") == 1 and done.stderr.strip().endswith("ValueError: mine"), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(ENDS)
    assert all(not list((tmp_path / name).iterdir()) for name in ENDS)


def test_an_end_by_a_signal_leaves_it_to_the_next(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        Lease(tmp_path, "rank 3")
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    lease.remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []
