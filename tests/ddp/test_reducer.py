"""ddp/reducer.py: gradients handed in by hand, in any order, become the mean over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardengine.ddp import Phase, Reducer, Rules, StepState, Window, reducer
from shardengine.sharding import layout
from shardengine.stages import Placement
from tests.support.parts import PARTIAL, REPLICATED, SHARDED, collectives, make_flat_buffers, spec, trainable_buckets
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
# 2 ranks, 32 elements a bucket; it holds d [0, 32) · c [32, 64) · b [64, 96) and a bit of a · a [80, 128)
SPECS = [spec("a", 40), spec("b", 7), spec("c", 32), spec("d", 4, 5)]
BUCKET_NAMES = [("d",), ("c",), ("b", "a"), ("a",)]


@pytest.mark.parametrize("count", [1, 8, 9, 300])
def test_ranks_agree_on_the_union_of_what_they_used(count: int) -> None:
    used = torch.rand(5, count) < 0.2
    packed = torch.stack([reducer._pack(row) for row in used])
    assert packed.shape == (5, -(-count // 8))
    assert reducer._union(packed, count) == used.any(dim=0).nonzero().view(-1).tolist()


def gradient(rank: int, micro: int, parameter: int) -> Tensor:
    """Small integers, so that sums and halves are exact in any order."""
    torch.manual_seed(1000 * rank + 100 * micro + parameter)
    return torch.randint(-50, 50, SPECS[parameter].shape).float() * 2


class Bench:
    """A reducer over hand-made buckets, with the order of its reductions written down."""

    def __init__(self, *, sharded: bool = False, gathers: bool = False, divisor: int | None = None) -> None:
        self.link = collectives()
        self.rank, self.ranks = self.link.mesh.rank, self.link.mesh.ranks
        self.plan = layout.build(SPECS, self.ranks, 32)
        self.flat_buffers = make_flat_buffers(self.plan, self.rank)
        buckets = trainable_buckets(self.flat_buffers)
        self.launched: list[tuple[str, ...]] = []
        move = self.link.move

        for bucket in buckets:
            bucket.state_placement = REPLICATED if gathers else SHARDED

        def noted(full: Tensor, source: Placement, target: Placement, what: Any, *rest: Any, **more: Any) -> Any:
            if source is PARTIAL:
                self.launched.append(what.names)
            return move(full, source, target, what, *rest, **more)

        self.link.move = noted  # type: ignore[method-assign]
        self.reducer = Reducer(
            self.plan, buckets, self.link, self.link._pool,
            Rules(SHARDED if sharded else PARTIAL, REPLICATED if gathers else SHARDED, divisor or self.ranks),
            StepState(Window(1)),
        )  # fmt: skip

    def backward(self, order: list[int], micro: int = 0, *, final: bool = True, synchronise: bool = True) -> None:
        self.reducer.begin_backward(synchronise=synchronise, final=final)
        for parameter in order:
            self.reducer.on_gradient(parameter, gradient(self.rank, micro, parameter))
        self.reducer.finalize_backward()

    def flat(self, of: Callable[[int], Tensor]) -> Tensor:
        """A tensor as long as the flat buffer, with ``of(parameter)`` in the parameters' places, zeros between."""
        found = torch.zeros(self.flat_buffers[0].layout.length)
        for slot in self.flat_buffers[0].layout.slots:
            found[slot.start : slot.end] = of(slot.parameter).reshape(-1)
        return found

    def slices_hold(self, of: Callable[[int], Tensor]) -> bool:
        """Whether this rank's slices of the complete gradients are those of ``of``."""
        expected = self.flat(of)
        for state in self.reducer.buckets:
            first, last = state.bucket.layout.interval_of_rank(SHARDED, self.rank)
            if state.complete is None or not torch.equal(state.complete, expected[first:last]):
                return False
        return True

    def mean(self, parameter: int, micros: int = 1, skipped: dict[int, set[int]] | None = None) -> Tensor:
        """The mean over ranks of the sums over micro-batches; ``skipped[rank]``: parameters not used there."""
        total = torch.zeros(SPECS[parameter].shape)
        for rank in range(self.ranks):
            for micro in range(micros) if parameter not in (skipped or {}).get(rank, set()) else ():
                total += gradient(rank, micro, parameter)
        return total / self.ranks


def test_the_hand_made_buckets_are_those_that_the_tests_speak_of() -> None:
    plan = layout.build(SPECS, 2, 32)
    assert [bucket.names for bucket in plan.buckets] == BUCKET_NAMES


def arrivals_in_different_orders(sharded: bool) -> list[bool]:
    bench = Bench(sharded=sharded)
    orders = ([3, 2, 1, 0], [0, 1, 2, 3])
    right = []
    for _ in range(2):
        bench.backward(orders[bench.rank])
        right.append(bench.slices_hold(bench.mean))
        bench.reducer.discard()
    return right


@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_may_arrive_in_another_order_on_every_rank(pools: Pools, sharded: bool) -> None:
    assert pools(2).run(arrivals_in_different_orders, sharded) == [[True, True]] * 2


def unused_on_one_rank(sharded: bool) -> list[Any]:
    bench = Bench(sharded=sharded)
    skipped = {0: {1}, 1: {0, 3}}
    bench.backward([p for p in (3, 2, 1, 0) if p not in skipped[bench.rank]])
    return [bench.slices_hold(lambda p: bench.mean(p, skipped=skipped)), sorted(bench.reducer.used)]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_that_did_not_use_a_parameter_adds_zeros(pools: Pools, sharded: bool) -> None:
    assert pools(2).run(unused_on_one_rank, sharded) == [[True, [0, 2, 3]], [True, [1, 2]]]


def launch_orders() -> list[list[tuple[str, ...]]]:
    bench = Bench()
    orders = ([0, 1, 2, 3], [3, 2, 1, 0])
    found = []
    for _ in range(2):
        bench.launched.clear()
        bench.backward(orders[bench.rank])
        found.append(list(bench.launched))
        bench.reducer.discard()
    return found


def test_the_first_backward_launches_in_layout_order_and_later_ones_as_rank_0_became_ready(pools: Pools) -> None:
    adopted = [("a",), ("b", "a"), ("c",), ("d",)]
    assert pools(2).run(launch_orders) == [[BUCKET_NAMES, adopted]] * 2


def launches_before_the_end() -> list[int]:
    """How many reductions have started after each gradient, in layout order."""
    bench = Bench()
    bench.reducer.begin_backward(synchronise=True, final=True)
    counts = []
    for parameter in (2, 3, 1, 0):
        bench.reducer.on_gradient(parameter, gradient(bench.rank, 0, parameter))
        counts.append(len(bench.launched))
    bench.reducer.finalize_backward()
    return counts


def test_a_bucket_starts_as_soon_as_it_and_those_before_it_are_ready(pools: Pools) -> None:
    assert pools(2).run(launches_before_the_end) == [[0, 2, 2, 4]] * 2


def windows_of_three(sharded: bool) -> list[Any]:
    bench = Bench(sharded=sharded)
    found: list[Any] = []
    for _ in range(2):
        bench.launched.clear()
        for micro in range(3):
            bench.backward([3, 2, 1, 0], micro, final=micro == 2, synchronise=sharded or micro == 2)
        found += [bench.slices_hold(lambda p: bench.mean(p, micros=3)), len(bench.launched)]
        bench.reducer.discard()
    return found


def test_the_letter_p_reduces_once_in_a_window(pools: Pools) -> None:
    assert pools(2).run(windows_of_three, False) == [[True, 4, True, 4]] * 2


def test_the_letter_s_reduces_every_micro_batch(pools: Pools) -> None:
    assert pools(2).run(windows_of_three, True) == [[True, 12, True, 12]] * 2


def sums_of_the_ranks() -> bool:
    bench = Bench(divisor=1)
    bench.backward([3, 2, 1, 0])
    return bench.slices_hold(lambda p: bench.mean(p) * bench.ranks)


def test_a_divisor_of_one_leaves_the_sum(pools: Pools) -> None:
    assert pools(2).run(sums_of_the_ranks) == [True, True]


def gathered_wholes(sharded: bool) -> bool:
    bench = Bench(sharded=sharded, gathers=True)
    for micro in range(2):
        bench.backward([3, 2, 1, 0], micro, final=micro == 1, synchronise=sharded or micro == 1)
    expected = bench.flat(lambda p: bench.mean(p, micros=2))
    wholes = [s.whole for s in bench.reducer.buckets if s.whole is not None]
    return len(wholes) == len(bench.reducer.buckets) and torch.equal(torch.cat(wholes), expected)


@pytest.mark.parametrize("sharded", [False, True])
def test_where_every_rank_steps_everything_the_whole_gradient_is_gathered(pools: Pools, sharded: bool) -> None:
    assert pools(2).run(gathered_wholes, sharded) == [True, True]


def no_sync_then_flush(sharded: bool) -> list[Any]:
    bench = Bench(sharded=sharded)
    bench.backward([3, 2, 1, 0], 0, final=False, synchronise=False)
    silent = len(bench.launched)
    bench.backward([2, 3, 0, 1], 1, final=False, synchronise=False)
    before = bench.reducer.step_state.phase
    bench.reducer.flush()
    return [silent, before, bench.reducer.step_state.phase, bench.slices_hold(lambda p: bench.mean(p, micros=2))]


@pytest.mark.parametrize("sharded", [False, True])
def test_unsent_micro_batches_are_summed_silently_and_sent_by_flush(pools: Pools, sharded: bool) -> None:
    assert pools(2).run(no_sync_then_flush, sharded) == [[0, Phase.ACCUMULATED, Phase.REDUCED, True]] * 2


def another_backward(sharded: bool, gathers: bool) -> list[Any]:
    """After a complete one, a second that uses other parameters on each rank."""
    bench = Bench(sharded=sharded, gathers=gathers)
    bench.backward([3, 2, 1])
    bench.reducer.finish_gradients()
    bench.backward([0, 2] if bench.rank else [2], micro=1)
    bench.reducer.finish_gradients()

    def expected(p: int) -> Tensor:
        first = bench.mean(p, skipped={0: {0}, 1: {0}})
        of_rank = [gradient(rank, 1, p) if p == 2 or (p == 0 and rank) else torch.zeros(()) for rank in range(2)]
        return first + (of_rank[0] + of_rank[1]) / 2

    wholes = [state.whole for state in bench.reducer.buckets if state.whole is not None]
    right = not gathers or torch.equal(torch.cat(wholes), bench.flat(expected))
    return [bench.slices_hold(expected), right, sorted(bench.reducer.touched)]


@pytest.mark.parametrize(("sharded", "gathers"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_backward_after_the_final_one_is_completed_on_its_own_and_added(
    pools: Pools, sharded: bool, gathers: bool
) -> None:
    assert pools(2).run(another_backward, sharded, gathers) == [[True, True, [0, 1, 2, 3]]] * 2


def late_gradients(sharded: bool, gathers: bool) -> list[Any]:
    """Rank 1 delivers c twice and a three times in the second micro-batch, before and after their buckets are sent."""
    bench = Bench(sharded=sharded, gathers=gathers)
    bench.backward([3, 2, 1, 0], final=False, synchronise=sharded)
    bench.reducer.begin_backward(synchronise=True, final=True)
    for parameter in (2, 3, 2, 1, 0, 0, 0) if bench.rank else (3, 2, 1, 0):
        bench.reducer.on_gradient(parameter, gradient(bench.rank, 1, parameter))
    bench.reducer.finalize_backward()
    bench.reducer.finish_gradients()

    def expected(p: int) -> Tensor:
        return bench.mean(p, micros=2) + {2: 1, 0: 2}.get(p, 0) * gradient(1, 1, p) / 2

    wholes = [state.whole for state in bench.reducer.buckets if state.whole is not None]
    right = bench.slices_hold(expected) and (not gathers or torch.equal(torch.cat(wholes), bench.flat(expected)))
    bench.reducer.discard()
    bench.backward([2, 3, 1, 0])
    return [right, bench.slices_hold(bench.mean)]


@pytest.mark.parametrize(("sharded", "gathers"), [(False, False), (True, False), (False, True), (True, True)])
def test_later_gradients_of_a_parameter_in_one_backward_are_added(pools: Pools, sharded: bool, gathers: bool) -> None:
    assert pools(2).run(late_gradients, sharded, gathers) == [[True, True]] * 2


def test_a_backward_that_raised_midway_is_forgotten_by_release() -> None:
    bench = Bench()
    bench.reducer.begin_backward(synchronise=True, final=True)
    bench.reducer.on_gradient(3, gradient(0, 1, 3))
    bench.reducer.on_gradient(1, gradient(0, 1, 1))
    bench.reducer.discard()
    bench.backward([3, 2, 1, 0])
    assert bench.slices_hold(bench.mean)


@pytest.mark.parametrize("sharded", [False, True])
def test_release_forgets_the_gradients_of_an_open_window(sharded: bool) -> None:
    bench = Bench(sharded=sharded)
    bench.backward([3, 2, 1, 0], 1, final=False, synchronise=sharded)
    bench.reducer.discard()
    assert not bench.reducer.used and bench.reducer.step_state.phase is Phase.EMPTY
    bench.backward([3, 2], 0)
    assert bench.slices_hold(lambda p: bench.mean(p, skipped={0: {0, 1}}))


@pytest.mark.parametrize(("sharded", "expected"), [(False, 2 * 4 * 128), (True, 4 * 128)])
def test_gradient_bytes_are_what_rests_between_micro_batches(pools: Pools, sharded: bool, expected: int) -> None:
    assert pools(2).run(resting_bytes, sharded) == [expected // 2] * 2


def resting_bytes(sharded: bool) -> int:
    bench = Bench(sharded=sharded)
    bench.backward([3, 2, 1, 0], final=False, synchronise=sharded)
    return bench.reducer.gradient_bytes().total()


def test_padding_of_a_complete_gradient_is_zero_in_a_reused_buffer() -> None:
    bench = Bench()
    pool = bench.link._pool
    for bucket in bench.plan.buckets:
        dirty = pool.acquire(bucket.length, torch.float32)
        dirty.fill_(float("nan"))
        pool.release(dirty)
    bench.backward([3, 2, 1, 0])
    assert bench.slices_hold(bench.mean)
