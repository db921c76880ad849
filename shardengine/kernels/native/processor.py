"""The features of this processor as py-cpuinfo reports them, cached on disk, and the library's own test beside them.

Owns: the second opinion, for people (`shardengine env`). The compiler's builtin chooses the instruction set that
computes: it asks the running processor, in a microsecond. Must not know: tensors, how a library is built.

[Note: The answer on disk] py-cpuinfo takes a second. Its answer is cached under a hash of the system's description of
the processor and of py-cpuinfo's version, so machines with different processors that share a cache do not read each
other's. A file that is damaged or cannot be written costs the second again, no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from shardengine.kernels.native import build
from shardengine.kernels.native.library import INSTRUCTION_SETS, Library

NEEDS = {
    "scalar": frozenset[str](),
    "avx2": frozenset({"avx2", "f16c"}),
    "avx512": frozenset({"avx2", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    "neon": frozenset({"asimd"}),
}
"""The flags, as the system names them, that each instruction set of the library needs."""
_TOLD = (
    "vendor_id",
    "model name",
    "cpu family",
    "model",
    "stepping",
    "flags",
    "Features",
    "CPU implementer",
    "CPU part",
)


class Processor(NamedTuple):
    """brand: its name, for people · flags: its features, as the system names them."""

    brand: str
    flags: frozenset[str]


def processor() -> Processor:
    """Return py-cpuinfo's answer, from the cache if it is there."""
    try:
        path: Path | None = build.cache_folder() / f"processor-{_key()}.json"
    except (OSError, RuntimeError):  # no home
        path = None
    found = None if path is None else _read(path)
    if found is None:
        told = importlib.import_module("cpuinfo").get_cpu_info()
        found = Processor(str(told.get("brand_raw") or platform.machine()), frozenset(told.get("flags", ())))
        if path is not None:
            _write(path, found)
    return found


def disagreements(library: Library, told: Processor) -> list[str]:
    """Return a sentence for each instruction set that only one of the compiler's builtin and py-cpuinfo finds."""
    found = []
    for name in INSTRUCTION_SETS:
        number = library.number_of(name.encode())
        if number == -1:  # of another processor family
            continue
        missing = sorted(NEEDS[name] - told.flags)
        if (number >= 0) == bool(missing):
            says = f"misses {', '.join(missing)}" if missing else "finds all that it needs"
            found.append(f"{name}: the library {'uses' if number >= 0 else 'does not find'} it, py-cpuinfo {says}")
    return found


def name_of(library: Library) -> str:
    """Return the instruction set that the library uses."""
    return next(name for name in INSTRUCTION_SETS if library.number_of(name.encode()) == library.instruction_set)


def _key(told: Path = Path("/proc/cpuinfo")) -> str:
    lines = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):  # another system
        block = told.read_text(encoding="utf-8").split("\n\n")[0]
        lines += [line for line in block.splitlines() if line.split(":")[0].strip() in _TOLD]
    with contextlib.suppress(PackageNotFoundError):
        lines.append(version("py-cpuinfo"))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _read(path: Path) -> Processor | None:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return Processor(str(told["brand"]), frozenset(map(str, told["flags"])))
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged
        return None


def _write(path: Path, found: Processor) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        build.store(json.dumps({"brand": found.brand, "flags": sorted(found.flags)}).encode(), path)
