"""Engines of large models without memory: what Python does around a step that computes and sends nothing.

Everything is on the meta device, which has shapes and no values, as one of ranks that are not there (the dry run of the
tests). Kernels do nothing, and the time inside of them and of collectives is taken off. The model touches its
parameters: its forward and backward hand out tensors, and the same model without an engine is measured beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardengine
from shardengine.comm.mesh import Mesh
from shardengine.kernels import meta
from tests.support.dry_run import META, SilentWire, dry_mesh

RANKS = 8
PHASES = ("forward", "backward", "step")
STAGES: Mapping[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3k": {"stage": 3, "stage3_reshard_after_forward": False},
    "3": {"stage": 3},
}

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Shape:
    """The parameters of a model: of ``layers`` equal blocks, and of what comes before and after them."""

    layers: int
    block: Shapes
    first: Shapes
    last: Shapes


def _llama(layers: int, hidden: int, inner: int, vocabulary: int = 128_256, kept: int = 1024) -> Shape:
    wide = {"q": (hidden, hidden), "k": (kept, hidden), "v": (kept, hidden), "o": (hidden, hidden)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    block: Shapes = {"norm_1": (hidden,), **wide, "norm_2": (hidden,), **mlp}
    return Shape(layers, block, {"embedding": (vocabulary, hidden)}, {"norm": (hidden,), "head": (vocabulary, hidden)})


def _gpt2(layers: int, hidden: int, vocabulary: int = 50_257, positions: int = 1024) -> Shape:
    block: Shapes = {}
    for name, rows, columns in (("qkv", 3, 1), ("o", 1, 1), ("up", 4, 1), ("down", 1, 4)):
        block |= {f"{name}_weight": (rows * hidden, columns * hidden), f"{name}_bias": (rows * hidden,)}
    block |= {f"norm_{number}": (hidden,) for number in range(4)}  # two norms, each with a bias
    first: Shapes = {"embedding": (vocabulary, hidden), "positions": (positions, hidden)}
    return Shape(layers, block, first, {"norm": (hidden,), "bias": (hidden,)})


LAYOUTS = {
    "GPT-2 1.5B": _gpt2(48, 1600),
    "Llama 8B": _llama(32, 4096, 14_336),
    "Llama 70B": _llama(80, 8192, 28_672),
}


class _Touch(torch.autograd.Function):
    """Stands for a module's computation: a gradient for each of its parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (gradients[0], *(torch.empty_like(parameter) for parameter in ctx.parameters))


class _Part(nn.Module):
    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=META)))

    def forward(self, x: Tensor) -> Tensor:
        touched: Tensor = _Touch.apply(x, *self.parameters())
        return touched


class Model(nn.Module):
    """A model of ``shape`` that computes nothing."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.first = _Part(shape.first)
        self.blocks = nn.ModuleList(_Part(shape.block) for _ in range(shape.layers))
        self.last = _Part(shape.last)

    def forward(self, x: Tensor) -> Tensor:
        """A scalar."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.last(x)
        return loss


def carry_nothing(device: torch.device) -> Mesh:
    """This process as rank 0 of ``RANKS``, over groups of torch's own tests that carry nothing; used as NCCL's are."""
    if not dist.is_initialized():
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

        dist.init_process_group("fake", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=RANKS)
    gather, reduce, control = (dist.new_group(backend="fake") for _ in range(3))
    return Mesh(0, RANKS, device, gather, reduce, control, "nccl")


class Stopwatch:
    """Seconds that were spent inside of what it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, with its time counted."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed


def silent_wire(watch: Stopwatch) -> SilentWire:
    """A wire whose time ``watch`` counts."""
    wire = SilentWire(RANKS)
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        setattr(wire, name, watch.around(getattr(wire, name)))
    return wire


@contextmanager
def kernels_counted(watch: Stopwatch) -> Iterator[None]:
    """Inside, ``watch`` counts what the meta device's kernels take, which only look at their tensors."""
    with ExitStack() as patches:
        for name in ("flatten", "unflatten", "ordered_sum", "sum_of_squares", "update"):
            patches.enter_context(mock.patch.object(meta, name, watch.around(getattr(meta, name))))
        yield


def engine_of(shape: Shape, stage: str, bucket: int, mesh: Mesh) -> shardengine.Engine:
    """An engine whose buckets have at most ``bucket`` elements."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {**STAGES[stage], "reduce_bucket_size": bucket},
    }
    return shardengine.initialize(Model(shape), config, mesh=mesh)


def run(engine: shardengine.Engine, watch: Stopwatch) -> list[float]:
    """CPU seconds of one step's phases, outside of collectives."""
    x = torch.zeros((), device=META, requires_grad=True)
    times, spent = [time.process_time()], [watch.seconds]

    def note() -> None:
        times.append(time.process_time())
        spent.append(watch.seconds)

    loss = engine(x)
    note()
    engine.backward(loss)
    note()
    engine.step()
    note()
    return [times[i + 1] - times[i] - (spent[i + 1] - spent[i]) for i in range(3)]


def run_plain(model: Model) -> list[float]:
    """As ``run``, of the model alone."""
    x = torch.zeros((), device=META, requires_grad=True)
    start = time.process_time()
    loss = model(x)
    middle = time.process_time()
    loss.backward()
    end = time.process_time()
    for parameter in model.parameters():
        parameter.grad = None
    return [middle - start, end - middle, 0.0]


def measure(shape: Shape, bucket: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Stage → buckets, and seconds of each phase and round over those of the model alone; all take turns."""
    watch = Stopwatch()
    mesh = dry_mesh(RANKS, wire=silent_wire(watch))
    with kernels_counted(watch):
        plain = Model(shape)
        engines = {stage: engine_of(shape, stage, bucket, mesh) for stage in STAGES}
        found: dict[str, list[list[float]]] = {stage: [] for stage in STAGES}
        for number in range(rounds + 2):
            base = run_plain(plain)
            for stage, engine in engines.items():
                taken = run(engine, watch)
                if number >= 2:
                    found[stage].append([own - less for own, less in zip(taken, base, strict=True)])
        rows = {
            stage: {
                "buckets": len(engines[stage]._core.layout.buckets),
                "seconds": {name: [row[i] for row in found[stage]] for i, name in enumerate(PHASES)},
            }
            for stage in STAGES
        }
        for engine in engines.values():
            engine.close()
    return rows
