"""Bytes on the wire are at the lower bound, counted from outside of the engine.

Owns: the formulas of docs/limits.md, written down once more from the model's own sizes, a counter around
torch.distributed's functions, and the loopback interface's counter. Must not know how the engine cuts buckets.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardengine.comm import wire
from shardengine.comm.frames import FRAME
from tests.support import cases
from tests.support.forks import NO_NETWORK, Forks
from tests.support.ranks import RankPool
from tests.support.sizes import padded

Pools = Callable[[int], RankPool]

UNIT = re.compile(r"(?:transformer\.h|blocks|model\.layers)\.\d+(?=\.)|model\.embed_tokens|lm_head(?=\.)")
LOOKUP = "model.embed_tokens"
"""The unit whose backward reads no weights."""
DEVICES = Path("/proc/net/dev")
WIDE, DEEP = 320, 6


class Wide(nn.Module):
    """About 1.5 million parameters, nearly all in blocks."""

    def __init__(self, width: int = WIDE, depth: int = DEEP, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.inp = nn.Linear(7, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width, bias=False)) for _ in range(depth)
        )
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.out(x)


def make_model(name: str) -> nn.Module:
    """A model of ``cases``, or: frozen (an MLP with frozen parts), recomputing (checkpointed blocks), wide."""
    if name == "frozen":
        model = cases.make_mlp()
        for parameter in (*model.get_submodule("blocks.0").parameters(), model.get_parameter("inp.weight")):
            parameter.requires_grad_(False)
        return model
    if name == "mixed":
        return make_mixed()
    if name in ("wide", "recomputing"):
        torch.manual_seed(14)
        return Wide() if name == "wide" else Wide(13, 6, recompute=True)
    return cases.MODELS[name]()


class Wider(nn.Sequential):
    """Computes in its own dtype, whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(next(self.parameters()).dtype)).float()


def make_mixed() -> nn.Module:
    """An MLP in fp32 with blocks in bf16 (one of them frozen), in fp32, and in both: adapters over a frozen matrix."""
    model: Any = cases.make_mlp()
    model.blocks = nn.ModuleList(Wider(nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 13)) for _ in range(3))
    model.blocks.append(Wider(nn.Linear(13, 13), nn.Linear(13, 13).bfloat16().requires_grad_(False)))
    model.blocks[3].forward = lambda x: model.blocks[3][1](torch.tanh(model.blocks[3][0](x)).bfloat16()).float()
    model.blocks[0].bfloat16()
    model.blocks[1].bfloat16().requires_grad_(False)
    return model


def loss_of(model: Any, name: str, step: int, micro: int) -> Tensor:
    if name in cases.MODELS:
        return cases.loss_of(model, step, dist.get_rank(), micro)
    return model(torch.randn(4, 7)).square().mean()


# The formulas


@dataclass(frozen=True)
class Sizes:
    """Bytes with padding. Where weights are sharded a block has a storage of its own, frozen ones too.

    sent: of all gradients, in the dtype of the wire; trained: of the weights that have one. twice: of units that
    forward and backward gather; once: of the root, of embeddings and of the last unit, which is there when backward
    begins.
    """

    sent: int
    trained: int
    twice: int
    once: int

    @staticmethod
    def of(model: nn.Module, ranks: int, case: Case) -> Sizes:
        found: dict[tuple[str, bool, int], list[int]] = {}
        for name, parameter in model.named_parameters():
            unit = UNIT.match(name) if case.stage.startswith("3") else None
            itemsize = 2 if case.low else parameter.itemsize
            key = (unit.group() if unit else "", parameter.requires_grad, itemsize)
            found.setdefault(key, []).append(parameter.numel())
        lengths = {key: padded(counts, ranks, key[2]) for key, counts in found.items()}
        wire = {None: 0, "fp32": 4, "bf16": 2, "fp16": 2}[case.wire]
        last = max(unit for unit, _, _ in found if unit != LOOKUP) if case.model != "llama" else "lm_head"
        return Sizes(
            sent=sum(length * (wire or size) for (_, trainable, size), length in lengths.items() if trainable),
            trained=sum(length * size for (_, trainable, size), length in lengths.items() if trainable),
            twice=sum(length * size for (unit, _, size), length in lengths.items() if unit not in ("", LOOKUP, last)),
            once=sum(length * size for (unit, _, size), length in lengths.items() if unit in ("", LOOKUP, last)),
        )


def bytes_per_step(stage: str, sizes: Sizes, ranks: int, micros: int, reductions: int, letter: str) -> int:
    """docs/limits.md, "Bytes sent per rank and optimizer step"; reductions: how often a step reduces its gradients;
    letter: the third."""
    if stage in cases.HYBRID:
        return _hybrid_bytes_per_step(stage, sizes, micros, reductions, letter)
    weights = {
        "0": sizes.sent,  # here it is the complete gradient that is gathered
        "1": sizes.trained,
        "2": sizes.trained,
        "3k": micros * (sizes.twice + sizes.once),
        "3": micros * (2 * sizes.twice + sizes.once),
    }[stage]
    total = (ranks - 1) * (sizes.sent * reductions + weights)
    assert total % ranks == 0
    return total // ranks


def _hybrid_bytes_per_step(stage: str, sizes: Sizes, micros: int, reductions: int, letter: str) -> int:
    """The same on two shard groups of two ranks, in fp32: a half inside, a quarter across."""
    every, twice, once = sizes.sent, sizes.twice, sizes.once
    if stage == "3 hpZ":
        return (reductions * every * 3 + micros * ((2 * twice + once) * 2 + twice + once)) // 4
    weights = {"1": sizes.trained, "2": sizes.trained, "3k": micros * (twice + once), "3": micros * (2 * twice + once)}
    across = every * (reductions if letter == "sharded" else 1) + every  # sums, and what is complete
    return (reductions * every * 2 + across + weights[stage.removesuffix(" hybrid")] * 2) // 4


# The counter


@dataclass
class Counter:
    """Bytes that this rank sends at the algorithm's minimum. ``control``: payloads of control messages, as their
    frames say."""

    data: int = 0
    control: list[int] = field(default_factory=list)

    def take(self) -> tuple[int, list[int]]:
        """What was counted since the last call."""
        found = self.data, self.control
        self.data, self.control = 0, []
        return found

    def add(self, tensor: Tensor, sent: int) -> None:
        if tensor.dtype is torch.uint8:
            assert tensor.nbytes == FRAME, "a message of this length fits into one frame"
            self.control.append(int(tensor[:4].view(torch.int32)))
        else:
            self.data += sent


def _all_gather(counter: Counter, a: Mapping[str, Any], ranks: int) -> None:
    tensor = next(a[name] for name in ("input_tensor", "input", "tensor") if name in a)
    counter.add(tensor, tensor.nbytes * (ranks - 1))


def _reduce_scatter(counter: Counter, a: Mapping[str, Any], ranks: int) -> None:
    counter.add(a["input"], a["input"].nbytes * (ranks - 1) // ranks)


def _all_to_all(counter: Counter, a: Mapping[str, Any], ranks: int) -> None:
    sizes, sent = a.get("input_split_sizes"), a["input"]
    if sizes is None:
        counter.data += sent.nbytes * (ranks - 1) // ranks
    else:  # bf16 travels as bytes
        counter.data += (sum(sizes) - sizes[dist.get_rank(a["group"])]) * sent.element_size()


def _all_reduce(counter: Counter, a: Mapping[str, Any], ranks: int) -> None:
    counter.add(a["tensor"], 2 * a["tensor"].nbytes * (ranks - 1) // ranks)


def _broadcast(counter: Counter, a: Mapping[str, Any], ranks: int) -> None:
    if a["group_src"] != dist.get_rank(a["group"]):
        return
    counter.data += a["tensor"].nbytes * (ranks - 1)  # bf16 travels as bytes: uint8 is no sign of control data here


RULES: dict[str, Callable[[Counter, Mapping[str, Any], int], None]] = {
    "broadcast": _broadcast,
    "all_to_all_single": _all_to_all,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_gather_into_tensor": _all_gather,
    "all_gather_single": _all_gather,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
}
NOT_IN_A_STEP = (
    "send recv isend irecv batch_isend_irecv reduce gather scatter all_to_all reduce_scatter all_gather_coalesced "
    "all_reduce_coalesced all_gather_object broadcast_object_list gather_object scatter_object_list"
).split()


@contextmanager
def counted() -> Iterator[Counter]:
    """Every function of torch.distributed that sends is wrapped, also under the names that wire.py gives them."""
    counter = Counter()

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            if name not in RULES:
                raise AssertionError(f"torch.distributed.{name} was called in a step")
            bound = inspect.signature(original).bind(*args, **kwargs)
            bound.apply_defaults()
            RULES[name](counter, bound.arguments, dist.get_world_size(bound.arguments["group"]))
            return original(*args, **kwargs)

        return counting

    with pytest.MonkeyPatch.context() as patch:
        for name in (*RULES, *NOT_IN_A_STEP):
            original = getattr(dist, name, None)
            if original is None:
                continue
            wrapped = wrap(name, original)
            patch.setattr(dist, name, wrapped)
            for alias in ("_all_gather", "_reduce_scatter"):
                if getattr(wire, alias) is original:
                    patch.setattr(wire, alias, wrapped)
        yield counter


# The runs


@dataclass(frozen=True)
class Case:
    """A run of three steps. letter: gradient_accumulation; quiet: all but the last micro-batch inside no_sync.

    low: the config's bf16 or fp16; wire: its communication_data_type.
    """

    stage: str
    micros: int
    letter: str | None
    model: str = "mlp"
    quiet: bool = False
    bucket: int = 600
    low: str = ""
    wire: str | None = None

    @property
    def reductions(self) -> int:
        letter = self.letter or cases.LETTER[self.stage]
        return 1 if self.quiet or letter == "full" else self.micros

    def config(self) -> dict[str, Any]:
        zero = {"reduce_bucket_size": self.bucket}
        override: dict[str, Any] = {} if self.letter is None else {"gradient_accumulation": self.letter}
        override |= {self.low: {"enabled": True}} if self.low else {}
        override |= {"communication_data_type": self.wire} if self.wire else {}
        return cases.config_of(self.stage, self.micros, zero=zero, **override)

    def expected(self, ranks: int) -> int:
        sizes = Sizes.of(make_model(self.model), ranks, self)
        letter = self.letter or cases.LETTER[self.stage]
        return bytes_per_step(self.stage, sizes, ranks, self.micros, self.reductions, letter)


def run_step(engine: Any, case: Case, step: int) -> None:
    for micro in range(case.micros):
        last = micro + 1 == case.micros
        with engine.no_sync() if case.quiet and not last else nullcontext():
            engine.backward(loss_of(engine, case.model, step, micro))
        if last or not case.quiet:
            engine.step()


def count_steps(chosen: list[Case]) -> list[list[tuple[int, list[int], dict[str, Any]]]]:
    """Per case and step: bytes of data, payloads of control messages, and what the engine says."""
    found = []
    for case in chosen:
        engine = cases.make_engine(make_model(case.model), case.config())
        with counted() as counter:
            rows = []
            for step in range(3):
                run_step(engine, case, step)
                rows.append((*counter.take(), engine.traffic()))
        found.append(rows)
        engine.close()
    return found


def assert_counts(pools: Pools, ranks: int, chosen: list[Case]) -> None:
    by_rank = pools(ranks).run(count_steps, chosen)
    for number, case in enumerate(chosen):
        expected = case.expected(ranks)
        assert expected > 0
        parameters = len(list(make_model(case.model).parameters()))
        for rank, found in enumerate(by_rank):
            for step, (data, control, said) in enumerate(found[number]):
                where = f"{case}, rank {rank}, step {step}"
                assert data == expected, f"{where}: {data} bytes counted, the formula says {expected}"
                assert said["measured_bytes_last_step"] == expected, where
                if case.quiet:  # the engine's formula is the letters', no_sync can only send less
                    assert said["formula_bytes_per_step"] >= expected, where
                else:
                    assert said["formula_bytes_per_step"] == expected, where
                if step > 0:  # in the first one the ranks also agree about the order of buckets and of gathers
                    # the norm and each parameter's, digests of collectives and options, a bit per parameter, one more,
                    # a byte that says whether this rank has data
                    most = 8 + 8 * parameters + 8 + 4 + parameters // 8 + 1 + 1
                    assert len(control) == 1 and control[0] <= most, f"{where}: {control}"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("letter", [None, "full", "sharded"])
def test_bytes_per_step_are_the_formula(pools: Pools, letter: str | None, ranks: int) -> None:
    chosen = [Case(stage, micros, letter) for stage in cases.STAGES for micros in (1, 3)]
    assert_counts(pools, ranks, chosen)


@pytest.mark.parametrize("letter", [None, "full", "sharded"])
def test_hybrid_meshes(pools: Pools, letter: str | None) -> None:
    chosen = [Case(stage, micros, letter) for stage in cases.HYBRID for micros in (1, 3)]
    assert_counts(pools, 4, chosen)


@pytest.mark.parametrize(("model", "ranks"), [("gpt2", 2), ("llama", 2), ("frozen", 3), ("recomputing", 2)])
def test_tied_frozen_and_recomputed(pools: Pools, model: str, ranks: int) -> None:
    """Tied weights travel once, frozen ones only where they are sharded, and a recomputation gathers nothing.

    Llama's embedding and head are units: the former is gathered for its forward alone, the latter once for both.
    """
    assert_counts(pools, ranks, [Case(stage, 2, None, model) for stage in cases.STAGES])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("model", "low", "wire"),
    [
        ("mlp", "", "bf16"),
        ("mlp", "bf16", None),
        ("mlp", "bf16", "fp32"),
        ("mlp", "fp16", None),
        ("mixed", "", None),
        ("mixed", "", "fp16"),
        ("mixed", "", "fp32"),
    ],
)
def test_every_dtype(pools: Pools, model: str, low: str, wire: str | None, ranks: int) -> None:
    """bf16 halves everything, models of several dtypes are counted storage by storage, the wire's dtype gradients."""
    chosen = [Case(stage, micros, None, model, low=low, wire=wire) for stage in cases.STAGES for micros in (1, 3)]
    assert_counts(pools, ranks, chosen)


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_sync_reduces_once(pools: Pools, ranks: int) -> None:
    assert_counts(pools, ranks, [Case(stage, 3, None, quiet=True) for stage in cases.STAGES])


# The interface


def loopback_bytes() -> int:
    """Bytes that the loopback interface has sent since it came up, headers included."""
    for line in DEVICES.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise AssertionError(f"{DEVICES} has no loopback interface")


def watch_interface(chosen: list[Case], *, steps: int, windows: int) -> list[float]:
    """Per case the interface's bytes per step: the smallest of ``windows``, because other programs can only add."""
    found = []
    for case in chosen:
        engine = cases.make_engine(make_model(case.model), case.config())
        run_step(engine, case, 0)
        readings = []
        for _ in range(windows):
            dist.barrier()
            before = loopback_bytes()
            dist.barrier()
            for step in range(steps):
                run_step(engine, case, step)
            dist.barrier()
            readings.append((loopback_bytes() - before) / steps)
        found.append(min(readings))
        engine.close()
    return found


def watch_alone(say: Callable[[Any], None], rank: int, store: str, ranks: int, *chosen: Case) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    say(watch_interface([*chosen], steps=2, windows=3))


@pytest.mark.skipif(not DEVICES.exists(), reason="needs Linux: the interface's counters are in /proc/net/dev")
@pytest.mark.parametrize("ranks", [2, 3])
def test_loopback_interface_agrees(pools: Pools, forks: Forks, tmp_path: Path, ranks: int) -> None:
    """Once per stage, on an interface of their own where it may be had; nothing else that these ranks do goes over it.

    5 %: the interface also counts headers, acknowledgements and control messages. One block of the model sent once more
    than needed is 6 % of stage 3's bytes and more of the other stages'.
    """
    chosen = [Case(stage, 1, None, "wide", bucket=500_000) for stage in cases.STAGES]
    (measured, *_), *_ = forks.live(watch_alone, str(tmp_path / "store"), ranks, *chosen, ranks=ranks, network=True)
    if measured == NO_NETWORK:
        measured = pools(ranks).run(watch_interface, chosen, steps=2, windows=3)[0]
    for case, found in zip(chosen, measured, strict=True):
        assert found == pytest.approx(case.expected(ranks) * ranks, rel=0.05), case
