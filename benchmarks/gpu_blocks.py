"""The blocks of ``benchmarks.gpu``: what is run on one GPU, in which part, for how long, and what it says in numbers.

Owns: the table ``BLOCKS``, the commands, and the reading of their output. Starts nothing, and imports no torch, so that
what is broken there ends a block and not the report.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Found = dict[str, Any]
GPU = "cuda"

HOW = r"(?P<how>PASSED|FAILED|ERROR|SKIPPED|XFAIL)"
ALONE = re.compile(rf"^(?P<test>\S+::.+?) {HOW}\b")
BY_WORKER = re.compile(rf"^\[gw\d+\] \[ *\d+%\] {HOW} (?P<test>\S+::.+?)\s*$")
SUMMARY = re.compile(r"(ERROR|RACECHECK|SYNCCHECK) SUMMARY: (.*)")
ENVIRONMENT = re.compile(r"^([\w ]+): (.+)$", re.MULTILINE)


def facts(stdout: str) -> Found:
    """The lines ``name: value`` of a text."""
    return dict(ENVIRONMENT.findall(stdout))


def outcomes(stdout: str) -> Found:
    """How many tests of ``pytest -v`` passed, were skipped, and which ones failed; complete or not."""
    matches = (ALONE.match(line) or BY_WORKER.match(line) for line in stdout.splitlines())
    results = [match.groupdict() for match in matches if match]
    count = {how: sum(each["how"] == how.upper() for each in results) for how in ("passed", "skipped")}
    failed = [each["test"] for each in results if each["how"] in ("FAILED", "ERROR")]
    return {**count, "failed": len(failed), "failed_tests": failed}


def sanitized(stdout: str) -> Found:
    """What ``outcomes`` says, and the sanitizer's own summaries."""
    return {**outcomes(stdout), "summaries": [" ".join(found) for found in SUMMARY.findall(stdout)]}


def lines(stdout: str) -> Found:
    """A JSON object per line, together; other lines are left out."""
    found: Found = {}
    for line in stdout.splitlines():
        if line.startswith("{"):
            found |= json.loads(line)
    return found


def document(stdout: str) -> Found:
    """One JSON document, after whatever libraries have printed."""
    found: Found = json.loads(stdout[re.search(r"^\{", stdout, re.MULTILINE).start() :])  # type: ignore[union-attr]
    return found


def kernels(stdout: str) -> Found:
    """Of ``benchmarks.kernels``: a row per operation."""
    whole = document(stdout)
    rows = {
        f"{row['work']}: {row['operation']}": {
            **{key: row[key] for key in ("gb_per_s", "copy_gb_per_s", "median_s", "rounds")},
            "fraction_of_copy": row["fraction"]["median"],
            "launches": row["launches"],
            "waits": row["synchronisations"],
            "faster_than": {name: peer["speedup"]["median"] for name, peer in row["peers"].items()},
            **{key: row[key] for key in ("target", "verdict", "launch_verdict") if key in row},
        }
        for row in whole["rows"]
    }
    return {"rows": rows, **{key: whole[key] for key in ("implementation", "failed", "why_smaller", "why_not_counted")}}


STEP_KEYS = (
    "median_ms", "tokens_per_s", "mfu", "peak_allocated_bytes", "peak_reserved_bytes", "state_formula_bytes", "kernels",
    "waits", "loss", "loss_differs", "ratio", "ratio_apart", "target", "verdict", "waits_verdict",
)  # fmt: skip
OFFLOAD_KEYS = (
    "median_s", "tokens_per_s", "mfu", "fraction_of_bound", "ratio", "peak_allocated", "peak_host", "peak_pinned",
    "build_s", "loss_differs",
)  # fmt: skip


def _of(row: Mapping[str, Any], keys: tuple[str, ...]) -> Found:
    return {key: row[key] for key in keys if key in row}


def steps(stdout: str) -> Found:
    """Of ``benchmarks.gpu_step``: a row per model and competitor."""
    found: Found = {}
    for name, model in document(stdout)["models"].items():
        rows = {key: _of(row, STEP_KEYS) for key, row in model.get("variants", {}).items()}
        peaks = [each["peak_flops"] for each in model.get("references", [])]
        found[name] = {"variants": rows, "peak_flops": peaks, **_of(model, ("setting", "failed", "left_out"))}
    return found


def offload(stdout: str) -> Found:
    """Of ``benchmarks.offload_gpu``: a row per part and competitor, with rates and bounds."""
    found: Found = {}
    for name, part in document(stdout)["parts"].items():
        rows = {key: _of(row, OFFLOAD_KEYS) for key, row in part.get("variants", {}).items()}
        found[name] = {"variants": rows, **_of(part, ("setting", "rates", "bounds_s", "failed", "left_out"))}
    return found


@dataclass(frozen=True)
class Block:
    """One command. seconds: that it may take; what others leave of theirs is added.

    command: after the interpreter · tiny: the same where there is no GPU, None if there is nothing to try · read: its
    standard output in numbers · environment: variables of its own · under: the program that runs the interpreter ·
    package: what must be installed.
    """

    name: str
    part: int
    seconds: float
    command: tuple[str, ...]
    read: Callable[[str], Found]
    tiny: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    under: tuple[str, ...] = ()
    package: str | None = None

    def why_not(self, device: str) -> str | None:
        """Why it cannot run here, None if it can."""
        if device != GPU and self.tiny is None:
            return "needs a GPU"
        if self.under and device == GPU and shutil.which(self.under[0]) is None:
            return f"needs {self.under[0]}, which is not on the path"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"needs {self.package}, which is not installed"
        return None

    def arguments(self, device: str, folder: str, python: str = sys.executable) -> list[str]:
        """The whole command. folder: for files beside the report."""
        own = self.command if device == GPU else self.tiny
        if own is None:
            raise ValueError(f"{self.name} {self.why_not(device)}: expected to be asked for a command on a GPU only")
        words = [python, *(word.replace("FOLDER", folder) for word in own)]
        return [*self.under, *words] if device == GPU else words

    def shown(self, device: str) -> str:
        """The same for readers, without names of one machine; that on a GPU where it cannot run without."""
        there = device if self.tiny else GPU
        variables = [f"{key}={value}" for key, value in self.environment.items()]
        return shlex.join([*variables, *self.arguments(there, "build/gpu", "python")])


def _pytest(file: str, chosen: str = "", *, workers: int = 1) -> tuple[str, ...]:
    """Its tests with a line for each, so that what was done counts when the time is over.

    workers: processes that share the GPU, as most of the time compiling or one step after the other is on the CPU; half
    as many as there are cores, and one where pytest-xdist is not installed.
    """
    options = ("-v", "--tb=short", "-p", "no:cacheprovider", "--durations=5", "-m", "gpu")
    workers = min(workers, (os.cpu_count() or 1) // 2) if importlib.util.find_spec("xdist") else 1
    more = [*(("-n", str(workers)) if workers > 1 else ()), *(("-k", chosen) if chosen else ())]
    return "-m", "pytest", *options, *more, f"tests/gpu/{file}"


def _module(name: str, *options: str) -> tuple[str, ...]:
    return "-m", f"benchmarks.{name}", *options


def _benchmark(name: str, *options: str) -> tuple[str, ...]:
    return _module(name, "--json", "--no-write", *options)


_CPU = ("--device", "cpu", "--tiny")
_FEW = ("--rounds", "1")
_SMALL = ("--elements", "4000", "--tensors", "5", "--small-tensors", "5", *_FEW, "--budget", "1")
_SANITIZER = ("compute-sanitizer", "--error-exitcode", "3", "--tool")
_UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor has an allocation of its own, so that what lies beside it is nobody's."""
_RACES = {"TORCH_CUDA_SANITIZER": "1"}
_ENV = ("-m", "shardengine", "env")
_CHECKED = _pytest("test_gpu.py", "squares or Lion or (sums and 3)")
_OURS = ("--variants", "compute", "ours-2", "ours-3")

BLOCKS = (
    Block("environment", 1, 20, _ENV, facts, _ENV),
    Block("bits of kernels", 1, 170, _pytest("test_gpu.py", "bits or launched or longer", workers=7), outcomes),
    Block("every stage", 1, 130, _pytest("test_gpu.py", "every_stage_on_cuda", workers=4), outcomes),
    Block("NCCL with one rank", 1, 75, _module("nccl_alone"), lines, _module("nccl_alone", "--device", "cpu")),
    Block("ranks that share a GPU", 1, 165, _pytest("test_gpu.py", "share_a_gpu", workers=3), outcomes),
    Block("tiers", 2, 180, _pytest("test_gpu_tiers.py", workers=5), outcomes),
    Block("bits of CPU and GPU", 2, 160, _pytest("test_same_bits.py", workers=5), outcomes),
    Block("stream races: stages", 2, 50, _pytest("test_gpu.py", "every_stage_on_cuda and fp32 and mlp"), outcomes,
          environment=_RACES),
    Block("stream races: tiers", 2, 50, _pytest("test_gpu_tiers.py", "mlp and bf16"), outcomes, environment=_RACES),
    Block("memcheck", 2, 60, _CHECKED, sanitized, environment=_UNCACHED, under=(*_SANITIZER, "memcheck")),
    Block("racecheck", 2, 60, _CHECKED, sanitized, under=(*_SANITIZER, "racecheck")),
    Block("ratio auto", 2, 35, _module("ratio_auto", "--budget", "20"), lines, _module("ratio_auto", *_CPU)),
    Block("profile", 3, 110, _module("gpu_profile", "--traces", "FOLDER"), lines,
          _module("gpu_profile", *_CPU, "--traces", "FOLDER")),
    Block("step, 124M", 3, 110, _benchmark("gpu_step", "--models", "124M", "--budget", "80"), steps,
          _benchmark("gpu_step", *_CPU, *_FEW, "--own-model", "--variants", "ours-2")),
    Block("offload", 3, 120, _benchmark("offload_gpu", "--parts", "1.5B", "--minutes", "1.7", *_OURS), offload,
          _benchmark("offload_gpu", *_CPU, *_FEW, "--parts", "1.5B", "--variants", "ours-2")),
    Block("kernels", 3, 90, _benchmark("kernels", "--budget", "60"), kernels,
          _benchmark("kernels", "--device", "cpu", *_SMALL)),
    Block("step, 1.5B", 3, 100,
          _benchmark("gpu_step", "--models", "1.5B", "--batch", "2", "--budget", "70", *_OURS, "ours-2-50M", "fsdp2"),
          steps,
          _benchmark("gpu_step", *_CPU, *_FEW, "--own-model", "--batch", "1", "--variants", "ours-3")),
    Block("Llama, 1B", 3, 50, _module("finetune", "--budget", "25"), lines,
          _module("finetune", *_CPU, "--steps", "3"), package="transformers"),
)  # fmt: skip
"""Within a part in order of what they tell."""
PARTS = {1: "works at all", 2: "tiers and races", 3: "speed"}
