"""What py-cpuinfo says of this processor, kept on disk, and whether the library's own test says the same.

Owns: the second opinion, for people (`shardengine env`). The instruction set that computes is chosen by the compiler's
builtin, which asks the processor that it runs on, in a microsecond. Must not know: tensors, how a library is built.

[Note: The answer on disk] py-cpuinfo takes a second. Its answer lies in the cache under a hash of what the system says
of the processor and of py-cpuinfo's version, so machines with different processors that share a cache do not read each
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
"""Per instruction set of the library the flags that the system shows for it."""
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
    """brand: its name, for people · flags: what it can do, as the system names it."""

    brand: str
    flags: frozenset[str]


def processor() -> Processor:
    """py-cpuinfo's answer, from the cache if it is there."""
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
    """A sentence per instruction set that the compiler's builtin and py-cpuinfo do not both find or both miss."""
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
    """The instruction set that the library uses."""
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
