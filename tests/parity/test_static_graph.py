"""``static_graph``: the bits of the oracle with unused parameters, buckets that wait for nothing, and changes named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardengine.comm import Collectives
from shardengine.ddp.reducer import Reducer
from shardengine.errors import UsageError
from tests import oracle
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.covering import covering
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STATIC: dict[str, Any] = {"static_graph": True}


class Sides(nn.Module):
    """Both sides are always called; a rank's loss may be of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(3))
        self.never = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [side(x) for side in self.sides]


def make() -> nn.Module:
    torch.manual_seed(17)
    return Sides()


def loss_of(model: Any, step: int, rank: int, micro: int, chosen: tuple[int, ...] | None = None) -> Tensor:
    """Of all sides but the rank's, in the second micro-batch of one alone."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    outputs = model(torch.randn(4, 5))
    default = [n for n in range(3) if n != rank % 3 and not (micro and n == 1)]
    return sum((outputs[n].square().mean() for n in (default if chosen is None else chosen)), torch.zeros(()))


def train(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = cases.make_engine(make(), config, kind)
    result = cases.run_steps(engine, 4, loss_of)
    engine.close()
    return result


ALL = itertools.product((2, 3), cases.STAGES, (1, 2), ("AdamW", "SGD"), (60, 4096), (True, False))


@pytest.mark.parametrize(("ranks", "stage", "micros", "kind", "bucket", "overlap"), covering(ALL, 2))
def test_equals_the_oracle(
    pools: Pools, ranks: int, stage: str, micros: int, kind: str, bucket: int, overlap: bool
) -> None:
    config = cases.config_of(stage, micros, zero={"reduce_bucket_size": bucket}, overlap_comm=overlap, **STATIC)
    results = pools(ranks).run(train, kind, config)
    model = make()
    truth = oracle.train(
        model, loss_of, ranks=ranks, micros=micros, steps=4, kind=kind, groups=cases.groups_of(model, kind),
        order=cases.LETTER[stage] if micros > 1 else "full", clip=cases.CLIP,
    )  # fmt: skip
    assert_equal_to_truth(results, truth, stage)


@pytest.mark.parametrize("stage", cases.HYBRID)
def test_on_hybrid_meshes(pools: Pools, stage: str) -> None:
    results = pools(4).run(train, "AdamW", cases.config_of(stage, 2, **STATIC))
    model = make()
    order = cases.LETTER[stage]
    truth = oracle.train(
        model, loss_of, ranks=4, micros=2, steps=4, kind="AdamW", groups=cases.groups_of(model, "AdamW"), order=order,
        clip=cases.CLIP, inside=2 if order == "inside" else 0,
    )  # fmt: skip
    assert_equal_to_truth(results, truth, stage)


def launches(stage: str, static: bool) -> tuple[list[int], int]:
    """How many buckets are launched while autograd runs, per step, and the bytes of the last step's messages."""
    config = cases.config_of(stage, zero={"reduce_bucket_size": 60}, static_graph=static)
    engine: Any = cases.make_engine(make(), config, "SGD")
    counts: list[int] = []
    launch, exchange, lengths = Reducer._launch, Collectives.exchange, list[int]()
    with pytest.MonkeyPatch.context() as patch:

        def counted(self: Reducer, state: Any) -> None:
            counts[-1] += torch._C._current_graph_task_id() >= 0
            launch(self, state)

        def measured(link: Collectives, payload: torch.Tensor, *what: Any) -> torch.Tensor:
            lengths.append(payload.numel())
            return exchange(link, payload, *what)

        patch.setattr(Reducer, "_launch", counted)
        patch.setattr(Collectives, "exchange", measured)
        for step in range(3):
            counts.append(0)
            cases.run_micro_batch(engine, loss_of, step, 0)
    engine.close()
    return counts, lengths[-1]


@pytest.mark.parametrize("stage", ["0", "1", "2"])
def test_buckets_do_not_wait_for_what_never_comes(pools: Pools, stage: str) -> None:
    for (waits, told), (static, less) in zip(*(pools(2).run(launches, stage, each) for each in (False, True)),
                                             strict=True):  # fmt: skip
        assert static[0] == waits[0] and static[1:] > waits[1:] and static[1] == static[2]
        assert less < told, "which parameters were used is not sent"


def changed(stage: str, which: str, micros: int) -> list[str]:
    engine: Any = cases.make_engine(make(), cases.config_of(stage, micros, **STATIC), "SGD")

    def window(step: int, chosen: tuple[int, ...] | None = None) -> None:
        for micro in range(micros):
            loss = loss_of(engine, step, engine.rank, micro, chosen)
            engine.backward(loss)
            engine.step()

    window(0)
    window(1)
    with engine.full_params():
        before = [p.detach().clone() for p in engine.module.parameters()]
    on = engine.rank == 1 if which != "every rank" else True
    usual = tuple(n for n in range(3) if n != engine.rank)
    more = (0, 1, 2) if which != "gone" else usual[:1]
    with pytest.raises(UsageError) as raised:
        window(2, more if on else None)
    engine.zero_grad()
    with engine.full_params():
        assert all(torch.equal(p, old) for p, old in zip(engine.module.parameters(), before, strict=True))
    window(3)
    window(4)
    engine.close()
    return [str(raised.value)]


@pytest.mark.parametrize("which", ["new", "gone", "every rank"])
@pytest.mark.parametrize(("stage", "micros"), [(stage, 1 + n % 2) for n, stage in enumerate(cases.STAGES)])
def test_a_change_is_an_error_on_every_rank(pools: Pools, stage: str, micros: int, which: str) -> None:
    texts = [text for (text,) in pools(2).run(changed, stage, which, micros)]
    for rank, text in enumerate(texts):
        assert f"(this is rank {rank})" in text and "zero_grad() on every rank" in text
        if which == "new":
            assert "parameter 'sides.1.0.weight' has a gradient on rank 1, and had none in the first window" in text
        if which == "gone":
            assert "parameter 'sides.2." in text and "has no gradient on rank 1, and had one in the first" in text
        if which == "every rank":
            assert "parameter 'sides.0.0.weight' has a gradient on rank 0" in text


def other_ends(stage: str) -> list[float]:
    """Late gradients, several backwards and an early end do not end the rule."""
    engine: Any = cases.make_engine(make(), cases.config_of(stage, 2, **STATIC), "SGD")
    for step in range(3):
        for micro in range(2):
            engine.backward(loss_of(engine, step, engine.rank, 0))
            if micro:
                engine.backward(loss_of(engine, step + 20, engine.rank, 0))  # another one, agreed on as ever
            engine.step()
    engine.backward(loss_of(engine, 9, engine.rank, 0))
    engine.step(flush=True)
    engine.set_train_batch_size(engine.world_size)
    cases.run_micro_batch(engine, loss_of, 10, 0)
    norm = engine.get_global_grad_norm()
    engine.reset()
    cases.run_micro_batch(engine, loss_of, 11, 0)
    with pytest.raises(UsageError, match="static_graph: parameter"):
        engine.backward(loss_of(engine, 12, engine.rank, 0, (0, 1, 2)))
    engine.zero_grad()
    engine.close()
    return [norm]


@pytest.mark.parametrize("stage", cases.STAGES)
def test_other_ends_of_windows(pools: Pools, stage: str) -> None:
    first, second = pools(2).run(other_ends, stage)
    assert first == second


def in_two_epochs() -> list[int]:
    """Rank 0 has no data in the first one, and uses then what others use."""
    engine = cases.make_engine(make(), cases.config_of("2", static_graph=True))
    steps = []
    for epoch in range(2):
        with engine.join():
            for step in range(3 if engine.rank or epoch else 0):
                engine.backward(loss_of(engine, step, 1, 0))
                engine.step()
        steps.append(engine.global_steps)
    engine.close()
    return steps


def test_a_rank_that_had_no_data_in_the_first_window_tells_in_its_own_first(pools: Pools) -> None:
    assert pools(2).run(in_two_epochs) == [[3, 6]] * 2
