"""Model state per rank is the stage's formula, counted by walking all live tensors.

Owns: the formulas once more, from the model's own sizes, and the count: unique storages of every tensor that Python's
garbage collector knows. The engine's own counters are compared with the count, never used for it. Flat buffers and the
pool are looked at only to tell what a storage is for.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine import Engine
from shardengine.ddp.gradient_views import ShardedGradient
from tests.support import cases
from tests.support.ranks import RankPool
from tests.support.sizes import padded

Pools = Callable[[int], RankPool]

FLOAT = 4
WIDTH, BLOCKS = 96, 5
BUCKET = (
    1152  # an eighth of a matrix: larger ones would be in buckets as large as they are (layout: [Note: Tiny buckets])
)
MICROS = 3
SMALLEST_SLICE_BYTES = 64
# In buckets: one being filled, one that the root keeps open, three in flight with what they receive and their sums
# (half a bucket each): 9.5, and as often the short last buckets of a block and of the root, together a quarter: 12.
TRANSIENT_BYTES = 13 * BUCKET * FLOAT
# what the test itself keeps alive inside a forward: inputs and outputs of a block
ACTIVATION_BYTES = 8192
# a gradient waits for its bucket, and a matrix that lies in several buckets for the last of them
WAITING_BYTES = WIDTH * WIDTH * FLOAT


class Tower(nn.Module):
    """Five equal blocks that dwarf the transient buffers, and a small root."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)
        )
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def make_tower() -> Tower:
    torch.manual_seed(15)
    return Tower()


# The formulas


BLOCK_PARAMETERS = [WIDTH * WIDTH, WIDTH, WIDTH * WIDTH, WIDTH]
ROOT_PARAMETERS = [7 * WIDTH, WIDTH, 3 * WIDTH, 3]


def elements_of(stage: str, ranks: int, itemsize: int = FLOAT) -> int:
    """All elements with padding; where weights are sharded every block has a storage of its own."""
    if stage.startswith("3"):
        return BLOCKS * padded(BLOCK_PARAMETERS, ranks, itemsize) + padded(ROOT_PARAMETERS, ranks, itemsize)
    return padded(BLOCKS * BLOCK_PARAMETERS + ROOT_PARAMETERS, ranks, itemsize)


@dataclass(frozen=True)
class Formula:
    """Bytes per rank at rest (docs/limits.md, fp32 training: 4 + 4 + 8 bytes, each whole or 1/N)."""

    weights: int
    gradients: int
    states: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.states

    @staticmethod
    def of(stage: str, letter: str | None, ranks: int) -> Formula:
        whole = elements_of(stage, ranks) * FLOAT
        share = whole // ranks
        if stage in cases.HYBRID and stage != "3 hpZ":
            of_group = whole // 2
            return Formula(
                weights=of_group if stage.startswith("3") else whole,
                gradients={"full": whole, "inside": of_group, "sharded": share}[letter or cases.LETTER[stage]],
                states=2 * of_group,
            )
        return Formula(
            weights=share if stage.startswith("3") else whole,
            gradients=share if (letter or cases.LETTER[stage]) == "sharded" else whole,
            states=2 * (whole if stage == "0" else share),
        )


# The count


@contextmanager
def only_new_tensors() -> Iterator[None]:
    """``live_storages`` sees only tensors that were made inside.

    Nothing is thawed before the process ends: every later collection would go through all that libraries imported.
    """
    atexit.register(gc.unfreeze)
    gc.collect()
    gc.freeze()  # what exists now is not listed by gc.get_objects() any more
    yield


def live_storages() -> dict[int, int]:
    """Identity → bytes of every storage that some live tensor uses.

    Left out: storages smaller than any shard; messages of control data (integers), which a communication thread may
    hold on to for a moment; and fp64, in which nothing rests but the square of each parameter's gradient.
    """
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not isinstance(thing, ShardedGradient):  # which have no memory
            storage = thing.untyped_storage()
            rests = thing.is_floating_point() and thing.dtype is not torch.float64
            if rests and storage.nbytes() >= SMALLEST_SLICE_BYTES:
                found[storage._cdata] = storage.nbytes()
    return found


def spare_bytes(engine: Engine) -> int:
    """Bytes of declared buffers that wait in the pool for their next use."""
    free = engine._core.pool._free.values()
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for row in free for t in row}.values())


def full_blocks(engine: Engine) -> tuple[int, ...]:
    """Units whose whole weights have memory now, filled or being filled; 0 is the root."""
    return tuple(
        unit.index
        for unit in engine._core.units
        if any(flat_buffer.flat.untyped_storage().nbytes() for flat_buffer in unit.flat_buffers)
    )


@dataclass
class Event:
    """What was alive when a block was about to run. ``step`` counts optimizer steps."""

    kind: str
    block: int
    step: int
    live: int
    full: tuple[int, ...]


@dataclass
class Count:
    """What a rank's run showed. Bytes, per step, ``waiting``: free in the pool; ``between``: micro-batches."""

    before: list[int] = field(default_factory=list)
    before_waiting: list[int] = field(default_factory=list)
    between: list[int] = field(default_factory=list)
    between_waiting: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    after_waiting: list[int] = field(default_factory=list)
    said: list[dict[str, float]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    start: int = 0


def observe(engine: Engine, model: Tower, count: Count) -> None:
    """Ordinary module hooks and node hooks, registered after the engine's, so they see what a block's own code sees."""

    def note(kind: str, block: int) -> None:
        live = sum(live_storages().values())
        count.events.append(Event(kind, block, engine.global_steps, live, full_blocks(engine)))

    def before_forward(number: int) -> Callable[..., None]:
        return lambda _module, _args: note("forward", number)

    def after_forward(number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            if output.grad_fn is not None:
                output.grad_fn.register_prehook(lambda _gradients: note("backward", number))

        return hook

    for number, block in enumerate(model.blocks, start=1):
        block.register_forward_pre_hook(before_forward(number))
        block.register_forward_hook(after_forward(number))


def train_and_count(chosen: list[dict[str, Any]], watched: bool, steps: int) -> list[Count]:
    """Per config: counts of ``steps`` steps, with the events of every block if ``watched``."""
    counts = []
    for config in chosen:
        count = Count()
        with only_new_tensors():
            model = make_tower()
            engine = cases.make_engine(model, config)
            gc.collect()
            count.start = sum(live_storages().values())
            if watched:
                observe(engine, model, count)
            for _ in range(steps):
                count_step(engine, count)
            engine.close()
            del engine, model
            gc.collect()
        counts.append(count)
    return counts


def count_step(engine: Engine, count: Count) -> None:
    micros = engine.gradient_accumulation_steps()
    for micro in range(micros):
        engine.backward(engine(torch.randn(2, 7)).square().mean())
        live, waiting = sum(live_storages().values()), spare_bytes(engine)
        if micro + 1 < micros:
            count.between.append(live)
            count.between_waiting.append(waiting)
        else:
            count.before.append(live)
            count.before_waiting.append(waiting)
        engine.step()
    count.after.append(sum(live_storages().values()))
    count.after_waiting.append(spare_bytes(engine))
    count.said.append(engine.memory())


def config_of(stage: str, letter: str | None = None, micros: int = 1, blocks_ahead: int = 1) -> dict[str, Any]:
    """Buckets of BUCKET elements; prefetch of so many blocks."""
    ahead = blocks_ahead * padded(BLOCK_PARAMETERS, 4)
    zero = {"reduce_bucket_size": BUCKET, "stage3_prefetch_bucket_size": ahead}
    override = {} if letter is None else {"gradient_accumulation": letter}
    return cases.config_of(stage, micros, zero=zero, **override)


# The tests


def assert_formula(count: Count, formula: Formula, whole_gradient: int) -> None:
    """whole_gradient: bytes of the complete gradient where the stage gathers one that rested sharded, in its place."""
    assert count.start == formula.weights + formula.states
    moved = formula.gradients if whole_gradient else 0
    for live, waiting in zip(count.before, count.before_waiting, strict=True):
        assert live == formula.total + waiting + whole_gradient - moved
        assert waiting <= TRANSIENT_BYTES + moved
    for live, waiting in zip(count.between, count.between_waiting, strict=True):
        assert live == formula.total + waiting
        assert waiting <= TRANSIENT_BYTES + whole_gradient
    for live, waiting, before in zip(count.after, count.after_waiting, count.before, strict=True):
        assert live == formula.weights + formula.states + waiting, "gradients wait in the pool for the next window"
        assert live == before, "a step must neither allocate nor leak"
        assert live <= formula.total + whole_gradient + TRANSIENT_BYTES
    for said, live, waiting in zip(count.said, count.before, count.before_waiting, strict=True):
        assert said["predicted_model_state_bytes"] == formula.total
        assert said["measured_model_state_bytes"] == live - waiting
        assert said["live_weight_bytes"] == formula.weights
        assert said["live_state_bytes"] == formula.states


@pytest.mark.core
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("letter", [None, "full", "sharded"])
def test_model_state_is_the_formula(pools: Pools, letter: str | None, ranks: int) -> None:
    """Between micro-batches, before step() and after it, at each stage and with each third letter."""
    micros = 1 if letter is None else MICROS
    stages = list(cases.STAGES)
    chosen = [config_of(stage, letter, micros) for stage in stages]
    for counts in pools(ranks).run(train_and_count, chosen, False, 2):
        for stage, count in zip(stages, counts, strict=True):
            chosen_letter = letter or cases.LETTER[stage]
            # stage 0 steps all weights on every rank: a gradient that rests sharded is gathered for that
            whole = elements_of(stage, ranks) * FLOAT if stage == "0" and chosen_letter == "sharded" else 0
            assert_formula(count, Formula.of(stage, letter, ranks), whole)


@pytest.mark.parametrize("letter", [None, "full", "sharded"])
def test_model_state_on_hybrid_meshes_is_the_formula(pools: Pools, letter: str | None) -> None:
    micros = 1 if letter is None else MICROS
    stages = list(cases.HYBRID)
    chosen = [config_of(stage, letter, micros) for stage in stages]
    for counts in pools(4).run(train_and_count, chosen, False, 2):
        for stage, count in zip(stages, counts, strict=True):
            # what is complete is gathered for the group's slice that is stepped
            gathered = letter == "sharded" and stage != "3 hpZ"
            whole = elements_of(stage, 4) * FLOAT // 2 if gathered else 0
            assert_formula(count, Formula.of(stage, letter, 4), whole)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("blocks_ahead", [0, 1, 2])
def test_stage3_has_prefetch_and_one_units_and_the_root(pools: Pools, blocks_ahead: int, ranks: int) -> None:
    formula = Formula.of("3", None, ranks)
    block, root = padded(BLOCK_PARAMETERS, ranks) * FLOAT, padded(ROOT_PARAMETERS, ranks) * FLOAT
    window = 1 + blocks_ahead
    limit = formula.total + root + window * block + TRANSIENT_BYTES + ACTIVATION_BYTES
    assert block > TRANSIENT_BYTES + ACTIVATION_BYTES, "one block too many would not be noticed"
    for (count,) in pools(ranks).run(train_and_count, [config_of("3", blocks_ahead=blocks_ahead)], True, 3):
        assert len(count.events) == 2 * 3 * BLOCKS
        most = dict.fromkeys(("forward", "backward"), 0)
        for event in count.events:
            assert 0 in event.full, f"the root is not there: {event}"
            assert event.block in event.full, f"the block itself is not there: {event}"
            assert len(event.full) - 1 <= window, f"more than {window} blocks: {event}"
            assert event.live <= limit, f"more than {limit} bytes: {event}"
            if event.step > 0:
                most[event.kind] = max(most[event.kind], len(event.full) - 1)
        assert most == {"forward": window, "backward": window}, "prefetch does not use its budget"


@pytest.mark.parametrize("ranks", [2, 3])
def test_kept_after_forward_drops_one_by_one(pools: Pools, ranks: int) -> None:
    formula = Formula.of("3k", None, ranks)
    block, root = padded(BLOCK_PARAMETERS, ranks) * FLOAT, padded(ROOT_PARAMETERS, ranks) * FLOAT
    for (count,) in pools(ranks).run(train_and_count, [config_of("3k", blocks_ahead=0)], True, 2):
        assert len(count.events) == 2 * 2 * BLOCKS
        for event in count.events:
            # forward gathers one after the other, backward lets go of them from the last to the first
            assert event.full == tuple(range(event.block + 1)), event
            held = formula.total + root + event.block * block
            assert event.live <= held + TRANSIENT_BYTES + ACTIVATION_BYTES, event


@pytest.mark.parametrize("ranks", [2, 3])
def test_replicated_weights_need_no_more_inside_a_pass(pools: Pools, ranks: int) -> None:
    stages = ["0", "1", "2"]
    for counts in pools(ranks).run(train_and_count, [config_of(stage) for stage in stages], True, 2):
        for stage, count in zip(stages, counts, strict=True):
            assert len(count.events) == 2 * 2 * BLOCKS
            limit = Formula.of(stage, None, ranks).total + TRANSIENT_BYTES + ACTIVATION_BYTES + WAITING_BYTES
            for event in count.events:
                assert event.live <= limit, f"stage {stage}: more than {limit} bytes: {event}"
