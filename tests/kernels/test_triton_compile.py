"""Every Triton kernel, compiled ahead of time for three GPUs that need not be here, and what became of it.

- nothing is spilled, and ``benchmarks/results/registers.json`` lists exactly what is compiled
- PTX has no fused multiply-add, flushes no denormal, divides and takes roots correctly rounded
- what the memory-bound kernels of aligned tensors read and write goes 16 bytes at a time
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest

pytest.importorskip("triton")

from benchmarks import compile_kernels
from benchmarks.compile_kernels import TARGETS, Compiled, Variant
from benchmarks.reporting import RESULTS

pytestmark = pytest.mark.full  # what all of them share takes half a minute, and is recorded with the first

FUSED = re.compile(r"\bfma\.\w+(?:\.\w+)*\.f(?:32|64)\b")
INEXACT = re.compile(r"\.ftz\b|\bdiv\.(?:full|approx)|\bsqrt\.approx|\brsqrt\b|\brcp\.approx")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing compiled before is used, and nothing is left behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture(scope="module")
def compiled(cache: None) -> list[Compiled]:
    """All of it, on all cores."""
    return compile_kernels.compile_all(len(os.sched_getaffinity(0)))


def variant(name: str) -> Variant:
    return next(each for each in compile_kernels.variants() if each.name == name)


def test_every_kernel_is_compiled_for_every_target(compiled: list[Compiled]) -> None:
    kernels = compile_kernels.kernels()
    assert len(kernels) == 9 and len(compiled) == len(TARGETS) * len(compile_kernels.variants())
    assert {(one.kernel, one.target) for one in compiled} == {(name, target) for name in kernels for target in TARGETS}


def test_nothing_is_spilled(compiled: list[Compiled]) -> None:
    assert not [row for row in compile_kernels.rows_of(compiled) if row["spills"]]


def test_one_compilation_does_for_many_terms() -> None:
    """From 9 terms on nothing of what is compiled depends on their number."""
    for name in ("64 fp32 terms", "64 bf16 terms apart"):
        few, many = variant(name), variant(name.replace("64", "256"))
        assert few._replace(name="") == many._replace(name="")


def test_a_spill_is_seen() -> None:
    one = compile_kernels.compile_variant(variant("64 fp32 terms"), "sm_90", num_warps=1)
    assert one.spills > 0


def test_the_committed_table_lists_what_is_compiled(compiled: list[Compiled]) -> None:
    committed = json.loads((RESULTS / "registers.json").read_text(encoding="utf-8"))
    listed = [(row["kernel"], row["variant"], row["target"]) for row in committed["kernels"]]
    assert listed == [(one.kernel, one.variant, one.target) for one in compiled]
    assert not any(row["spills"] for row in committed["kernels"])


def test_the_arithmetic_is_rounded_as_declared(compiled: list[Compiled]) -> None:
    for one in compiled:
        if one.target.startswith("sm"):
            assert not FUSED.search(one.assembly), f"{one[:3]} fuses a product and a sum"
            assert not INEXACT.search(one.assembly), f"{one[:3]} is not correctly rounded"
        else:
            # divisions and roots are made of these, so that only kernels without them can be asked
            exact = one.kernel in ("_flatten_kernel", "_squares_kernel") or (
                one.variant.startswith("SGD") and "8bit" not in one.variant
            )
            assert not exact or not re.search(r"\bv_(?:pk_)?(?:fma|mac|fmac|mad)_f(?:32|64)", one.assembly), one[:3]
        if one.kernel == "_update_kernel" and one.variant.startswith("Adam") and one.target.startswith("sm"):
            assert "sqrt.rn.f32" in one.assembly and "div.rn.f32" in one.assembly


def test_fusion_would_be_seen() -> None:
    fused = compile_kernels.compile_variant(variant("AdamW fp32"), "sm_90", enable_fp_fusion=True)
    assert FUSED.search(fused.assembly)
    amd = compile_kernels.compile_variant(variant("SGD fp32"), "gfx942", enable_fp_fusion=True)
    assert re.search(r"\bv_(?:pk_)?(?:fma|mac|fmac|mad)_f32", amd.assembly)


def test_memory_is_read_and_written_16_bytes_at_a_time(compiled: list[Compiled]) -> None:
    wide = {"flatten fp32 to fp32", "flatten bf16 to bf16", "two terms, everything", "two bf16 terms to bf16",
            "eight terms apart", "AdamW fp32", "SGD fp32", "squares fp32"}  # fmt: skip
    seen = set()
    for one in compiled:
        if one.variant in wide and one.target == "sm_90" and one.kernel != "_lanes_kernel":
            seen.add(one.variant)
            assert "ld.global.v4.b32" in one.assembly, one[:3]
            assert "st.global.v4.b32" in one.assembly or one.kernel == "_squares_kernel", one[:3]
    assert seen == wide
