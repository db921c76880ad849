"""The operations of ``kernels.py``: their tensors, the least bytes that they move, and who else does the same.

Owns: sizes and layout of the tensors, the byte counts (docs/limits.md: each array read once, written once), the peers.
Knows nothing of timing and reports. A case holds its tensors until it is dropped; make one at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.peers import import_deepspeed
from shardengine import kernels

Call = Callable[[], object]

ALIGNMENT = 32
"""Elements: every tensor starts at a multiple of 64 bytes in fp32 and bf16, as in the engine's layout."""
BYTES_PER_ELEMENT = 48
"""The most that a case holds with its peers and the copy: ten fp32 arrays for the sum of eight, and some room."""
COPY, OURS = "device copy", "ours"
FOREACH_COPY = "torch._foreach_copy_"
TARGET_COPY = 0.90
"""× the bandwidth of the copy at least, for flatten, ordered_sum and update on large tensors."""
TARGET_SMALL = 2.0
"""× the speed of ``torch._foreach_copy_`` at least, on many small tensors."""
TERMS = (2, 4, 8)
MANY_TERMS = (64, 256)
"""So much shorter that all of them together take the bytes of eight."""
STEP = 10
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01},
    "SGD": {"lr": 1e-4, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.01},
    "Lion": {"lr": 1e-5, "betas": (0.9, 0.99), "weight_decay": 0.01},
}


@dataclass(frozen=True)
class Work:
    """Tensors of ``sizes`` elements and the flat buffer that they share."""

    name: str
    sizes: tuple[int, ...]
    device: torch.device

    @property
    def starts(self) -> list[int]:
        """Where each tensor begins in the buffer."""
        found, end = [], 0
        for size in self.sizes:
            found.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        return found

    @property
    def length(self) -> int:
        """Elements of the buffer, gaps included."""
        return self.starts[-1] + -(-self.sizes[-1] // ALIGNMENT) * ALIGNMENT

    def flat(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers, as long as the buffer (zeros would move faster)."""
        return torch.randn(self.length, dtype=dtype, device=self.device)

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Random numbers, each tensor in memory of its own."""
        return [torch.randn(size, dtype=dtype, device=self.device) for size in self.sizes]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors inside of a buffer."""
        return [flat[start : start + size] for start, size in zip(self.starts, self.sizes, strict=True)]


def large(elements: int, count: int, device: torch.device) -> Work:
    """``elements`` (about) in ``count`` tensors, a matrix and its vector in turn, as models have them."""
    matrix = max(1, elements // ((count + 1) // 2))
    sizes = [max(1, math.isqrt(matrix)) if number % 2 else matrix for number in range(count)]
    return Work("large", tuple(sizes), device)


def small(count: int, device: torch.device) -> Work:
    """``count`` tensors of 1000 to 5000 elements."""
    generator = torch.Generator().manual_seed(0)
    return Work("small", tuple(torch.randint(1000, 5001, (count,), generator=generator).tolist()), device)


@dataclass(frozen=True)
class Case:
    """One operation on one work. calls: ours first, then the peers by name; ready to run again and again.

    fraction: target for the share of the copy's bandwidth · speedups: by peer, how many times as fast at least ·
    one_launch: whether the device is to see one kernel.
    """

    work: str
    operation: str
    minimum_bytes: int
    calls: Mapping[str, Call]
    fraction: float | None = None
    speedups: Mapping[str, float] = field(default_factory=dict)
    one_launch: bool = False


def nbytes(*tensors: Tensor | Sequence[Tensor]) -> int:
    """Bytes of all of them together: what reading or writing each once moves."""
    return sum(each.nbytes if isinstance(each, Tensor) else nbytes(*each) for each in tensors)


def copy_call(work: Work) -> tuple[Call, int]:
    """A plain copy of the buffer in fp32 and the bytes that it moves: read once, written once."""
    source, out = work.flat(), work.flat()
    return lambda: out.copy_(source), nbytes(source, out)


def flatten_case(work: Work, dtype: torch.dtype = torch.float32) -> Case:
    """Tensors into the buffer of their dtype; the gaps are written, too."""
    tensors, out, starts = work.tensors(dtype), work.flat(dtype), work.starts
    views = work.views(out)
    packed = torch.empty(sum(work.sizes), dtype=dtype, device=work.device)
    calls: dict[str, Call] = {
        OURS: lambda: kernels.flatten(tensors, starts, out),
        FOREACH_COPY: lambda: torch._foreach_copy_(views, tensors),
        "torch._utils._flatten_dense_tensors": lambda: torch._utils._flatten_dense_tensors(tensors),
        "torch.cat": lambda: torch.cat(tensors, out=packed),
    }
    return _layout_case(work, f"flatten {_short(dtype)}", nbytes(tensors, out), calls)


def unflatten_case(work: Work) -> Case:
    """The buffer into tensors; the gaps are not read."""
    outs, flat, starts = work.tensors(), work.flat(), work.starts
    views = work.views(flat)
    calls: dict[str, Call] = {
        OURS: lambda: kernels.unflatten(flat, starts, outs),
        FOREACH_COPY: lambda: torch._foreach_copy_(outs, views),
    }
    return _layout_case(work, "unflatten fp32", nbytes(views, outs), calls)


def _layout_case(work: Work, operation: str, least: int, calls: Mapping[str, Call]) -> Case:
    fraction = TARGET_COPY if work.name == "large" and operation.startswith("flatten") else None
    speedups = {FOREACH_COPY: TARGET_SMALL} if work.name == "small" else {}
    return Case(work.name, operation, least, calls, fraction, speedups, one_launch=True)


def sum_case(work: Work, count: int) -> Case:
    """``count`` fp32 terms into a buffer, divided; torch adds them one by one into it. Up to eight are buffers of their
    own, more are slices of one, as what a rank receives."""
    if count <= max(TERMS):
        terms = [work.flat() for _ in range(count)]
    else:
        length = max(1, work.length * max(TERMS) // count // ALIGNMENT) * ALIGNMENT
        terms = list(torch.randn(count, length, device=work.device))
    out = torch.randn_like(terms[0])

    def one_by_one() -> None:
        torch.add(terms[0], terms[1], out=out)
        for term in terms[2:]:
            out.add_(term)
        out.div_(count)

    calls: dict[str, Call] = {
        OURS: lambda: kernels.ordered_sum(terms, out, divisor=count),
        "torch.add_ and div_": one_by_one,
    }
    return Case(work.name, f"ordered_sum of {count}", nbytes(terms, out), calls, TARGET_COPY, one_launch=True)


def norm_case(work: Work) -> Case:
    """The sum of squares of the buffer; the others take the norm of the tensors in it."""
    flat = work.flat()
    views = work.views(flat)
    calls: dict[str, Call] = {
        OURS: lambda: kernels.sum_of_squares(flat),
        "torch._foreach_norm": lambda: torch._foreach_norm(views, 2.0),
        "torch.nn.utils.get_total_norm": lambda: get_total_norm(views, 2.0),
    }
    if deepspeed_here(work.device):
        norm = getattr(importlib.import_module("deepspeed.runtime.utils"), "get_global_norm_of_tensors", None)
        calls |= {"deepspeed global norm": lambda: norm(views)} if norm else {}
    return Case(work.name, "sum_of_squares", nbytes(flat), calls)


def update_case(work: Work, kind: str, *, mixed: bool = False) -> Case:
    """One optimizer step of the buffer. mixed: bf16 gradients, fp32 masters, the weights in bf16 out."""
    rule = kernels.rule_for(kind, OPTIONS[kind], STEP)
    flats = {"weight": work.flat(), "gradient": work.flat(torch.bfloat16 if mixed else torch.float32)}
    flats |= {name: work.flat().square_() for name in rule.states}
    flats |= {"low": work.flat(torch.bfloat16)} if mixed else {}
    least = nbytes(flats["gradient"], flats.get("low", []))
    least += 2 * nbytes(flats["weight"], [flats[name] for name in rule.states])
    whole = work.name == "large"
    spans = [(0, work.length)] if whole else [(s, s + n) for s, n in zip(work.starts, work.sizes, strict=True)]
    at, factor = kernels.Spans(spans), torch.ones((), device=work.device)
    calls: dict[str, Call] = {OURS: lambda: kernels.update(flats, at, rule, factor=factor)}
    for name, make in _optimizers(kind, work.device).items():
        peer = _peer_step(make, work, flats)
        calls |= {name: peer} if peer else {}
    name = f"update {kind}" + (" bf16 → fp32 → bf16" if mixed else " fp32")
    return Case(work.name, name, least, calls, TARGET_COPY if whole else None, one_launch=True)


def _optimizers(kind: str, device: torch.device) -> dict[str, Callable[[list[nn.Parameter]], Optimizer]]:
    """Who else takes such a step on ``device``."""
    options = OPTIONS[kind]
    if kind == "SGD":
        return {"torch.optim.SGD(fused=True)": lambda weights: SGD(weights, fused=True, **options)}
    if kind != "AdamW":
        return {}
    found: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
        "torch.optim.AdamW(fused=True)": lambda weights: AdamW(weights, fused=True, **options)
    }
    if deepspeed_here(device):
        adam = importlib.import_module("deepspeed.ops.adam").FusedAdam
        found["deepspeed FusedAdam"] = lambda weights: adam(weights, adam_w_mode=True, **options)
    return found


def _peer_step(make: Callable[[list[nn.Parameter]], Optimizer], work: Work, flats: Mapping[str, Tensor]) -> Call | None:
    """The same step with an optimizer that knows fp32 tensors only, on the memory of ours; None if it cannot be built.

    Where the gradient has another dtype it is cast before, and weights are copied to "low" after, as loops do it.
    """
    weights = [nn.Parameter(view) for view in work.views(flats["weight"])]
    stepped: list[Tensor] = [*weights]
    gradients, low = work.views(flats["gradient"]), work.views(flats["low"]) if "low" in flats else []
    try:
        optimizer = make(weights)
    except Exception as error:  # DeepSpeed compiles its kernels here
        print(f"left out: {type(error).__name__} while building a peer: {str(error)[:200]}", file=sys.stderr)
        return None

    @torch.no_grad()
    def step() -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.float()
        optimizer.step()
        if low:
            torch._foreach_copy_(low, stepped)

    return step


def compress_case(work: Work, kind: str) -> Case:
    """fp32 into fewer bits with the scales of their blocks, in new memory."""
    values = work.flat()
    calls: dict[str, Call] = {OURS: lambda: kernels.compress(values, kind)}
    if kind == "fp16":
        calls["torch .half()"] = lambda: values.half()
    return Case(work.name, f"compress {kind}", nbytes(values) + _held(kernels.compress(values, kind)), calls)


def decompress_case(work: Work, kind: str) -> Case:
    """And back."""
    out = work.flat()
    compressed = kernels.compress(out, kind)
    calls: dict[str, Call] = {OURS: lambda: kernels.decompress(compressed, out)}
    if kind == "fp16":
        calls["torch .copy_()"] = lambda: out.copy_(compressed.values)
    return Case(work.name, f"decompress {kind}", nbytes(out) + _held(compressed), calls)


def _held(compressed: kernels.Compressed) -> int:
    return nbytes(compressed.values, [] if compressed.scales is None else compressed.scales)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def cases(large_work: Work, small_work: Work) -> list[Callable[[], Case]]:
    """All of them in order, to be made one after the other."""
    found: list[Callable[[], Case]] = []
    for work in (large_work, small_work):
        found += [partial(flatten_case, work), partial(flatten_case, work, torch.bfloat16)]
        found += [partial(unflatten_case, work)]
        found += [partial(sum_case, work, count) for count in TERMS + MANY_TERMS if work is large_work]
        found += [partial(norm_case, work)]
        found += [partial(update_case, work, "AdamW"), partial(update_case, work, "AdamW", mixed=True)]
    found += [partial(update_case, large_work, kind) for kind in ("SGD", "Lion")]
    for kind in ("int8", "int4", "fp16"):
        found += [partial(compress_case, large_work, kind), partial(decompress_case, large_work, kind)]
    return found


def deepspeed_here(device: torch.device) -> bool:
    """Whether DeepSpeed's kernels can take part: it is installed, and the device is a GPU."""
    if device.type != "cuda" or importlib.util.find_spec("deepspeed") is None:
        return False
    import_deepspeed("cuda")
    return True
