"""Compiles every Triton kernel ahead of time, for GPUs that this machine need not have, and counts registers.

``python -m benchmarks.compile_kernels`` prints a table and writes ``benchmarks/results/registers.json``: a row per
kernel, variant and target with registers per thread, spilled bytes (NVIDIA) or registers (AMD) and shared memory. A
variant is a call of a declared operation in the dtypes of the engine; what it would launch is compiled as it would be
launched: the same constants, options and alignments.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.reporting import RESULTS, table
from shardengine.kernels import REMAINDER, STATE_NAMES, Compressed, Noise, Rule, Spans, state_forms
from shardengine.kernels import triton as operations
from shardengine.kernels.triton import compressing, copies, launching, sums, updating

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
LENGTH = 1 << 17
"""Elements of a variant's tensors: two blocks of squares. Nothing is computed with them."""

Call = Callable[[], object]


class Variant(NamedTuple):
    """A kernel with everything that its compiled code depends on; ``arguments`` by position, None where constant."""

    kernel: str
    name: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]


class Compiled(NamedTuple):
    """What came out. assembly: PTX or AMD's."""

    kernel: str
    variant: str
    target: str
    registers: int
    spills: int
    shared_bytes: int
    assembly: str


def _flat(dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(LENGTH, dtype=dtype)


def _copies() -> Iterator[tuple[str, Call]]:
    for source, out in (*itertools.product((FP32, BF16), repeat=2), (FP16, FP16), (FP32, FP16)):
        name = f"{NAMES[source]} to {NAMES[out]}"
        flatten = partial(operations.flatten, [_flat(source)], [0], _flat(out))
        yield f"flatten {name}", flatten
        yield f"flatten {name} scaled", partial(flatten, scale=0.5)
        yield f"flatten {name} added", partial(flatten, add=True)
        yield f"unflatten {name}", partial(operations.unflatten, _flat(source), [0], [_flat(out)])


def _sums() -> Iterator[tuple[str, Call]]:
    def ordered(count: int, dtype: torch.dtype = FP32, out: torch.dtype = FP32, apart: bool = False,
                more: bool = False, **options: Any) -> None:  # fmt: skip
        terms = list(torch.empty(count + 1, LENGTH, dtype=dtype))
        if more:
            options |= {"total": _flat(), "nonfinite": torch.zeros((), dtype=torch.bool), "divisor": count}
        operations.ordered_sum(terms[1:-1] + terms[:1] if apart else terms[:-1], _flat(out), **options)

    yield "one term", partial(ordered, 1, more=True)
    yield "two terms", partial(ordered, 2)
    yield "two terms, everything", partial(ordered, 2, more=True)
    yield "two bf16 terms, everything", partial(ordered, 2, BF16, more=True, rounded=BF16)
    yield "two bf16 terms to bf16", partial(ordered, 2, BF16, BF16, more=True, rounded=BF16, reduce_dtype=BF16)
    yield "two fp16 terms to fp16", partial(ordered, 2, FP16, FP16, rounded=FP16)
    yield "eight bf16 terms, everything", partial(ordered, 8, BF16, more=True, rounded=BF16)
    yield "eight terms apart", partial(ordered, 8, apart=True, more=True)
    for count, dtype in itertools.product((64, 256), NAMES):
        yield f"{count} {NAMES[dtype]} terms", partial(ordered, count, dtype)
        yield f"{count} {NAMES[dtype]} terms apart", partial(ordered, count, dtype, dtype, apart=True, more=True)
    for dtype in (FP32, BF16):
        yield f"squares {NAMES[dtype]}", partial(operations.sum_of_squares, _flat(dtype))


def _updates() -> Iterator[tuple[str, Call]]:
    def step(rule: Rule, weight: torch.dtype = FP32, gradient: torch.dtype = FP32, low: torch.dtype | None = None,
             noise: bool = False, start: int = 0, kept_in: str = "fp32",
             split: bool = False) -> None:  # fmt: skip
        forms = state_forms(rule.states, kept_in)
        flats = {name: torch.empty(form.length(LENGTH), dtype=form.dtype) for name, form in forms.items()}
        flats |= {"weight": _flat(weight), "gradient": _flat(gradient)}
        if low is not None:
            flats["low"] = _flat(low)
        if split:
            flats[REMAINDER] = _flat(torch.int8)
        operations.update(flats, Spans([(start, LENGTH)]), rule, factor=torch.ones(()),
                          skip=torch.zeros((), dtype=torch.bool), noise=Noise(0, 0) if noise else None,
                          state_noise=None if kept_in == "fp32" else Noise(0, 0))  # fmt: skip

    for kind in STATE_NAMES:
        adam_like = kind != "Adam"
        rule = Rule(kind, 0.5, decay=0.5 if kind in ("AdamW", "Lion") else 1.0, l2=0.0 if adam_like else 0.5, keep=0.5,
                    take=0.5, keep_square=0.5, take_square=0.5, epsilon=0.5)  # fmt: skip
        yield f"{kind} fp32", partial(step, rule)
        yield f"{kind} fp32, low bf16, gradient bf16", partial(step, rule, gradient=BF16, low=BF16)
        yield f"{kind} bf16, noise", partial(step, rule, BF16, BF16, noise=True)
        yield f"{kind} states 8bit", partial(step, rule, gradient=BF16, low=BF16, kept_in="8bit")
        yield f"{kind} states bf16", partial(step, rule, gradient=BF16, low=BF16, kept_in="bf16")
    plain = Rule("AdamW", 0.5, 0.5, keep=0.5, take=0.5, keep_square=0.5, take_square=0.5, epsilon=0.5)
    yield "AdamW fp32, low bf16", partial(step, plain, low=BF16)
    yield "AdamW fp32, low fp16, gradient fp16", partial(step, plain, gradient=FP16, low=FP16)
    yield "AdamW bf16", partial(step, plain, BF16, BF16)
    yield "AdamW states 8bit, remainders", partial(step, plain, BF16, BF16, kept_in="8bit", split=True)
    yield "AdamW fp32, unaligned", partial(step, plain, start=1)
    yield "SGD without momentum", partial(step, Rule("SGD", 0.5, l2=0.5, maximize=True))
    yield "SGD nesterov", partial(step, Rule("SGD", 0.5, keep=0.5, take=0.5, nesterov=True))
    yield "SGD first", partial(step, Rule("SGD", 0.5, keep=0.5, take=0.5, first=True))


def _compressions() -> Iterator[tuple[str, Call]]:
    counter = torch.zeros((), dtype=torch.int64)
    for kind, made in (("fp16", FP16), ("bf16", BF16)):
        yield f"{kind}", partial(operations.compress, _flat(), kind, saturated=counter)
        whole = Compressed(kind, LENGTH, 256, _flat(made))
        yield f"{kind} back", partial(operations.decompress, whole, _flat())
    for kind, noise, dtype in itertools.product(("int8", "int4"), (None, Noise(0, 0)), (FP32, BF16)):
        name = f"{kind} of {NAMES[dtype]}" + ", noise" * (noise is not None)
        yield name, partial(operations.compress, _flat(dtype), kind, noise=noise)
    for kind, dtype in itertools.product(("int8", "int4"), (FP32, BF16)):
        values = torch.empty(LENGTH // 2, dtype=torch.uint8) if kind == "int4" else _flat(torch.int8)
        whole = Compressed(kind, LENGTH, 256, values, torch.empty(LENGTH // 256))
        yield (
            f"{kind} back to {NAMES[dtype]}",
            partial(operations.decompress, whole, _flat(dtype)),
        )


def variants() -> list[Variant]:
    """Everything that is compiled: the launches of the calls above."""
    found: list[Variant] = []
    for name, call in itertools.chain(_copies(), _sums(), _updates(), _compressions()):

        def record(kernel: Any, programs: int, on: Tensor, *arguments: Any, name: str = name, **constants: Any) -> None:
            found.append(_variant(kernel, name, arguments, constants))

        with mock.patch.multiple(copies, launch=record), mock.patch.multiple(sums, launch=record), \
             mock.patch.multiple(updating, launch=record), mock.patch.multiple(compressing, launch=record):  # fmt: skip
            call()
    return found


def _variant(kernel: Any, name: str, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Variant:
    """Types, constants and alignments as Triton's launcher takes them from the arguments."""
    options = dict(launching.OPTIONS, num_warps=constants.pop("num_warps"))
    signature: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for parameter in kernel.params:
        at = (parameter.num,)
        value = constants[parameter.name] if parameter.is_constexpr else arguments[parameter.num]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            signature[parameter.name], fixed[at] = "constexpr", value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            address = value.data_ptr() if isinstance(value, Tensor) else value
            if isinstance(value, Tensor):
                signature[parameter.name] = "*" + _POINTERS[value.dtype]
            else:
                signature[parameter.name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            if specialised and address % 16 == 0:
                attributes[at] = [["tt.divisibility", 16]]
    return Variant(kernel.__name__, name, signature, fixed, attributes, options)


_POINTERS = {
    FP32: "fp32", BF16: "bf16", FP16: "fp16", torch.float64: "fp64", torch.int64: "i64", torch.int32: "i32",
    torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


def kernels() -> dict[str, Any]:
    """All that can be launched, by name."""
    modules = (copies, sums, updating, compressing)
    return {name: vars(module)[name] for module in modules for name in vars(module) if name.endswith("_kernel")}


def compile_variant(variant: Variant, target: str, **options: Any) -> Compiled:
    """Compile one; ``options`` go over those of the launch."""
    source = ASTSource(kernels()[variant.kernel], variant.signature, variant.constants, variant.attributes)
    made = triton.compile(source, target=TARGETS[target], options=variant.options | options)
    if target.startswith("sm"):
        registers, spills, assembly = *_nvidia(made.asm["cubin"]), made.asm["ptx"]
    else:
        registers, spills, assembly = *_amd(made.asm["amdgcn"]), made.asm["amdgcn"]
    return Compiled(variant.kernel, variant.name, target, registers, spills, made.metadata.shared, assembly)


def _nvidia(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory: what does not fit into registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _amd(assembly: str) -> tuple[int, int]:
    """Vector registers, and spilled registers of both kinds, from the metadata of the code object."""
    found = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s+(\d+)", assembly)}
    return found["vgpr_count"], found["vgpr_spill_count"] + found["sgpr_spill_count"]


def compile_all(processes: int) -> list[Compiled]:
    """Every variant for every target, in fresh processes."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, context) as pool:
        jobs = [(variant, target) for target in TARGETS for variant in variants()]
        return list(pool.map(compile_variant, *zip(*jobs, strict=True), chunksize=4))


def rows_of(compiled: list[Compiled]) -> list[dict[str, Any]]:
    """The rows of ``registers.json``."""
    return [{key: value for key, value in one._asdict().items() if key != "assembly"} for one in compiled]


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_kernels", description=__doc__)
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count(), help="at once (default: cores)")
    rows = rows_of(compile_all(parser.parse_args(argv).processes))
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    path = RESULTS / "registers.json"
    text = json.dumps({"triton": triton.__version__, "kernels": rows}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
