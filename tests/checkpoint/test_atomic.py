"""Several writers at the same time: each text is whole, each directory is one program's, and nobody fails by chance."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardengine.checkpoint import atomic, new_directory, write_text
from tests.support.raising import raises


def once(function: Callable[..., Any], before: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, of: Any) -> None:
    """The next call of ``function`` (of the module ``of``) happens after ``before``."""

    def replaced(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(of, function.__name__, function)
        before()
        return function(*arguments, **options)

    monkeypatch.setattr(of, function.__name__, replaced)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_text_that_two_write_at_the_same_time_is_the_last_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "latest"
    once(getattr(os, moment), lambda: write_text(path, "step-00000002\n"), monkeypatch, os)
    write_text(path, "step-1\n")
    assert path.read_text() == "step-1\n" and names(tmp_path) == ["latest"]


def test_a_text_is_whole_whoever_writes_it(tmp_path: Path) -> None:
    path, texts = tmp_path / "latest", {str(number) * 4000 * number for number in range(1, 5)}
    failures: list[BaseException] = []
    write_text(path, min(texts))

    def write(text: str) -> None:
        try:
            for _ in range(20):
                write_text(path, text)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_text() in texts
    assert not failures and names(tmp_path) == ["latest"]


@pytest.mark.parametrize("locks", [True, False])
def test_a_text_that_a_killed_program_began_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """At once where the file system has locks, and nobody holds one; else when it is old."""
    old, new, held, other = (
        tmp_path / f".{name}" for name in ("a[1].partial-01", "a[1].partial-45", "a[1].partial-67", "b.partial-89ab")
    )
    for left in (old, new, held, other):
        left.write_text("half")
    for left in (old, other):
        os.utime(left, (0, time.time() - 2 * atomic._STALE_S))

    def refuse(_number: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not locks:
            monkeypatch.setattr(fcntl, "flock", refuse)
        write_text(tmp_path / "a[1]", "text")
    assert names(tmp_path) == sorted([*([] if locks else [new.name]), held.name, other.name, "a[1]"])


def test_a_text_that_was_taken_for_a_killed_programs_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_away() -> None:
        next(tmp_path.glob(".latest.partial*")).unlink()

    once(os.fsync, take_away, monkeypatch, os)
    write_text(tmp_path / "latest", "step-1\n")
    assert (tmp_path / "latest").read_text() == "step-1\n" and names(tmp_path) == ["latest"]
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "gone" / "latest", "step-1\n")


def test_directories_above_are_on_the_disk_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(atomic, "sync", synced.append)
    atomic.make_directory(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    atomic.make_directory(tmp_path / "a" / "b" / "c")
    assert len(synced) == 3


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_a_directory_whose_writer_ends_just_then_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    outer = tmp_path / ".out.partial"
    module = os if moment == "open" else fcntl
    once(getattr(module, moment), outer.rmdir, monkeypatch, module)
    with new_directory(tmp_path / "out") as work:
        (work / "file").write_text("text")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["file"]


def test_a_lock_on_what_was_removed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, held = tmp_path / ".out.partial", []

    def another_begins() -> None:
        outer.rmdir()
        outer.mkdir()
        (outer / "out").mkdir()
        held.append(os.open(outer, os.O_RDONLY | os.O_DIRECTORY))
        fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)

    once(fcntl.flock, another_begins, monkeypatch, fcntl)
    with raises("output-written-by-another"), new_directory(tmp_path / "out"):
        pass
    assert (outer / "out").is_dir()  # what the other one writes
    os.close(held[0])


def test_a_place_that_was_taken_meanwhile_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken() -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("of another program")

    once(fcntl.flock, taken, monkeypatch, fcntl)
    with raises("output-not-empty"), new_directory(tmp_path / "out"):
        raise AssertionError("nothing may be written")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["file"]
