"""From source to a library file: compiler, cache, locks. Imports nothing of the package: a build can run it.

Must not know: the functions of the library, torch, the fallback without a library.

[Note: The cached library] A file's name depends on everything that it was made from: a hash of source, flags and
processor family, the C library, a hash of the compiler. So nothing in the cache is ever out of date. The file ends with
a hash of its other bytes, so a truncated or damaged one is detected before it is loaded, and built again. It is written
to a temporary file in the same folder and renamed: a reader sees a whole file or none. A lock lets the first of several
processes build while the others wait. If the cache cannot be locked or written, each process builds for itself in a
temporary folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parent / "source"
PREBUILT = Path(__file__).parent / "prebuilt"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    "-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
    "-ffp-contract=off",  # every operation is rounded on its own
    "-fno-math-errno", "-fno-trapping-math",  # change no value, but let roots and selections become vectors
)  # fmt: skip
BASELINE = {"x86_64": ("-march=x86-64",), "aarch64": ("-march=armv8-a",)}
"""The instructions that every processor of a family has. Only the bodies that are chosen at run time use more, whatever
the compiler's own default is: a cache or a wheel may go to a machine with an older processor."""
_MARK = b"shardengine library, sha256 of all before:"
_TRAILER = len(_MARK) + hashlib.sha256().digest_size
_LOCK_SECONDS, _COMPILE_SECONDS = 60.0, 300.0


class Built(NamedTuple):
    """The result of building or finding the library.

    path: the library, None if there is none; ``problem`` then gives the reason · temporary: its folder is to be
    removed.
    """

    path: Path | None
    problem: str = ""
    temporary: bool = False


class Compiler(NamedTuple):
    """command: the words that call it · version: the output of its --version."""

    command: tuple[str, ...]
    version: str


def flags() -> tuple[str, ...]:
    """Return the compiler's flags for this processor family."""
    return FLAGS + BASELINE.get(platform.machine(), ())


def source_key() -> str:
    """Return a hash of source, flags and processor family: 16 hexadecimal digits.

    The library itself contains it as well.
    """
    parts = [*flags(), platform.machine()]
    for file in sorted(SOURCE.iterdir()):
        parts += [file.name, file.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def library(*, shipped: bool = True) -> Built:
    """Return the library for this machine: shipped with the package (if ``shipped``), cached, or built now."""
    try:
        key = source_key()
        beside = PREBUILT / f"{key}.so"
        return Built(beside) if shipped and is_whole(beside) else _library(key)
    except (
        OSError,
        RuntimeError,
        ValueError,
        subprocess.SubprocessError,
    ) as error:  # no home; a CXX that is no command
        return Built(None, f"{type(error).__name__}: {error}")


def compile_library(compiler: Compiler, key: str) -> bytes:
    """Return the library's bytes with their hash at the end. Raises OSError with the compiler's output if it fails."""
    with tempfile.TemporaryDirectory(prefix="shardengine-") as folder:
        out = Path(folder) / "library.so"
        define = f'-DSHARDENGINE_KEY="{key}"'
        command = [*compiler.command, *flags(), define, str(SOURCE / "library.cpp"), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
        if done.returncode or not out.is_file():
            raise OSError(f"`{shlex.join(command)}` returned {done.returncode}: {done.stderr.strip()[-600:]}")
        code = out.read_bytes()
    return code + _MARK + hashlib.sha256(code).digest()


def find_compiler() -> Compiler | str:
    """Return $CXX or the first of COMPILERS on the path, or a sentence for people if none of them runs."""
    named = os.environ.get("CXX", "").strip()
    candidates = [tuple(shlex.split(named))] if named else [(name,) for name in COMPILERS]
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            return Compiler(command, done.stdout)
    return f"no compiler: neither of {', '.join(' '.join(each) for each in candidates)} was found and ran"


def is_whole(path: Path) -> bool:
    """Return whether a file is a library as ``compile_library`` made it, byte for byte."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    code, trailer = data[:-_TRAILER], data[-_TRAILER:]
    return trailer == _MARK + hashlib.sha256(code).digest()


def cache_folder() -> Path:
    """Return $SHARDENGINE_CACHE, else shardengine in $XDG_CACHE_HOME or ~/.cache.

    Raises RuntimeError without a home.
    """
    named = os.environ.get("SHARDENGINE_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardengine"


def store(data: bytes, path: Path) -> None:
    """Write ``data`` to the file ``path``, whole or not at all."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _library(key: str) -> Built:
    folder, name = cache_folder(), f"kernels-{key}-{_c_library()}"
    compiler = find_compiler()
    if isinstance(compiler, str):
        made = [path for path in sorted(folder.glob(f"{name}-*.so")) if is_whole(path)]
        return Built(made[0]) if made else Built(None, compiler)
    version = hashlib.sha256("\0".join([*compiler.command, compiler.version]).encode()).hexdigest()[:16]
    path = folder / f"{name}-{version}.so"
    if is_whole(path):
        return Built(path)
    with _locked(path.with_suffix(".lock")):
        if is_whole(path):  # another process has built it meanwhile
            return Built(path)
        data = compile_library(compiler, key)
        try:
            store(data, path)
            return Built(path)
        except OSError:  # read-only, full or not a folder
            pass
    path = Path(tempfile.mkdtemp(prefix="shardengine-")) / path.name
    store(data, path)
    return Built(path, temporary=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, or go on without it after a time limit: that costs a second compilation, no more."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, number)
            until = time.monotonic() + _LOCK_SECONDS
            while not _try_lock(number) and time.monotonic() < until:
                time.sleep(0.02)
        yield


def _try_lock(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _c_library() -> str:
    """Return the name and version of the C library. A library that was linked with another one may not load."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "libc").replace(" ", "-")
    except (ValueError, OSError):  # not the GNU C library
        return "libc"
