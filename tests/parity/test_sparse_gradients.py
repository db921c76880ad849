"""Sparse gradients of embeddings at stage 0: the oracle's bits, rows that are zero do not travel, refused elsewhere.

The formula of bytes is written down once more from the data's own indices, and counted around torch.distributed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardengine
from shardengine import load_config
from shardengine.comm import Purpose
from shardengine.core import rebuild
from shardengine.ddp.sparse_rows import SparseRows
from shardengine.errors import ConfigError, MismatchError, UsageError
from tests import oracle
from tests.parity.test_delays import delayed
from tests.stages.test_traffic import counted
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth, assert_same, expected_state
from tests.support.covering import covering
from tests.support.ranks import RankPool
from tests.support.sizes import padded

Pools = Callable[[int], RankPool]
STEPS = 4
WORDS, WIDTH = 200, 16


class Lookup(nn.Module):
    """Embeddings that are cut into several buckets, that are too small for rows at four ranks, and one whose matrix is
    that of a linear layer, too. Of 16 bits torch adds up no two gradients of which one is sparse."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.bags = nn.EmbeddingBag(100, 10, mode="sum", sparse=sparse)
        self.tied = nn.Embedding(20, WIDTH, sparse=sparse)
        self.mix = nn.Linear(WIDTH + 10, WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, ids: Tensor, *, uses_words: bool = True) -> Tensor:
        twice = self.words.weight.dtype is torch.float32
        x = self.tied(ids % 20) if twice else self.tied.weight.new_zeros(())
        if uses_words:
            x = x + self.words(ids) + (self.words(ids // 2) if twice else 0)
        x = x.expand(*ids.shape, WIDTH)
        x = torch.cat([x, self.bags(ids % 100).unsqueeze(1).expand(-1, ids.shape[1], -1)], dim=-1)
        return self.head(torch.tanh(self.mix(x)))


def make(*, sparse: bool = True) -> nn.Module:
    torch.manual_seed(23)
    return Lookup(sparse=sparse)


def ids_of(step: int, rank: int, micro: int) -> Tensor:
    """Several times the same, most never."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    return torch.randint(0, 2 + 9 * rank, (3, 7)) * 17 % WORDS


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """The last of several ranks uses no word in the second step."""
    out = model(ids_of(step, rank, micro), uses_words=rank != 2 or step != 1)
    return out.float().square().mean()


def truth_of(
    ranks: int, micros: int, kind: str, sparse: bool = True, steps: int = STEPS, **options: Any
) -> oracle.Trace:
    model = make(sparse=sparse)
    options = {"order": "full", "clip": cases.CLIP, **options}
    groups = cases.groups_of(model, kind)
    return oracle.train(model, loss_of, ranks=ranks, micros=micros, steps=steps, kind=kind, groups=groups, **options)


def config_of(micros: int, **options: Any) -> dict[str, Any]:
    zero = {"reduce_bucket_size": 600, **options.pop("zero", {})}
    return cases.config_of("0", micros, zero=zero, **options)


def rows_sent(engine: Any) -> int:
    return int(engine._core.sent()[Purpose.ROWS])


def train(
    kind: str,
    config: dict[str, Any],
    *,
    sparse: bool = True,
    delays: bool = False,
    quiet: bool = False,
    recuts: bool = False,
) -> Any:
    engine = cases.make_engine(make(sparse=sparse), config, kind)

    def run(engine: Any, loss_of: cases.LossOf, step: int, micro: int) -> float:
        last = micro + 1 == engine.gradient_accumulation_steps()
        with engine.no_sync() if quiet and not last else nullcontext():
            loss = loss_of(engine, step, engine.rank, micro)
            engine.backward(loss)
        if last or not quiet:
            engine.step()
        return float(loss.item())

    moved = mock.patch.object(rebuild, "is_worth_moving", lambda *_: True) if recuts else nullcontext()
    with delayed(engine.rank) if delays else nullcontext(), moved:
        result = cases.run_steps(engine, STEPS, loss_of, run)
    assert not recuts or engine._core.is_recut
    result["rows"] = rows_sent(engine)
    engine.close()
    return result


def assert_true(results: list[dict[str, Any]], truth: oracle.Trace, *, rows: bool = True) -> None:
    assert_equal_to_truth(results, truth)
    assert all((result["rows"] > 0) == (rows and len(results) > 1) for result in results)


ALL = itertools.product((1, 2, 3, 4), (1, 3), ("AdamW", "SGD"), (600, 4096), (True, False), (True, False))


@pytest.mark.parametrize(("ranks", "micros", "kind", "bucket", "overlap", "delays"), covering(ALL, 2))
def test_the_bits_are_the_oracles(
    pools: Pools, ranks: int, micros: int, kind: str, bucket: int, overlap: bool, delays: bool
) -> None:
    config = config_of(micros, zero={"reduce_bucket_size": bucket}, overlap_comm=overlap)
    results = pools(ranks).run(train, kind, config, delays=delays)
    assert_true(results, truth_of(ranks, micros, kind))


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"bf16": {"enabled": True}}, {"low": torch.bfloat16}, {}),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}},
        {"low": torch.float16, "scaler": (2.0**20, 2, 2, 1.0)},
        {},
    ),
    "bf16 on the wire": ({"communication_data_type": "bf16"}, {"wire": torch.bfloat16}, {}),
    "sums in bf16": ({"data_types": {"reduce_dtype": "bf16"}}, {"reduce": torch.bfloat16}, {}),
    "reduced every time": ({"gradient_accumulation": "sharded"}, {"order": "sharded"}, {}),
    "no_sync": ({}, {}, {"quiet": True}),
    "of every embedding": ({"sparse_gradients": True}, {"sparse": False}, {"sparse": False}),
    "debug": ({"debug": True}, {}, {}),
    "the same buckets": ({"zero": {"recut_buckets": False}}, {}, {}),
    "buckets cut anew": ({}, {}, {"recuts": True}),
    "static graph": ({"static_graph": True}, {}, {}),
    "sums of the backend": ({"reproducible": False}, {}, {}),
    "offloaded states": ({"zero": {"offload_optimizer": {"device": "cpu"}}}, {}, {}),
    "8-bit states": ({"data_types": {"optimizer_state_dtype": "8bit"}}, {"kept_in": ("8bit", 42)}, {}),
}
"""The config's, the oracle's, and those of the run."""


@pytest.mark.parametrize("name", OPTIONS)
def test_with_everything_else(pools: Pools, name: str) -> None:
    config, precision, how = OPTIONS[name]
    precision = dict(precision)
    if (scaling := precision.pop("scaler", None)) is not None:
        precision["scaler"] = oracle.Scaler(*scaling)
    # the backend's order of sums is the declared one at two, and a third uses no word in one step
    ranks = 2 if name in ("sums of the backend", "static graph") else 3
    results = pools(ranks).run(train, "AdamW", config_of(2, **config), **how)
    assert_true(results, truth_of(ranks, 2, "AdamW", **precision))


@pytest.mark.parametrize("hook", ["fp16", "int8"])
def test_a_communication_hook_is_given_all_of_it(pools: Pools, hook: str) -> None:
    config = config_of(1, comm_hook={"name": hook})
    results = pools(2).run(train, "SGD", config)
    assert_true(results, truth_of(2, 1, "SGD", coding=(hook, hook == "int8")), rows=False)


def test_one_process_comes_close_to_dense_gradients() -> None:
    """torch's ``coalesce`` adds up in another order than what it makes of dense gradients."""
    one, other = (truth_of(2, 2, "SGD", sparse=sparse) for sparse in (True, False))
    for name, value in one.shown.items():
        torch.testing.assert_close(value, other.shown[name], rtol=1e-4, atol=1e-6)


# What travels


ROWS, ROW = 160, 12
ROW_STEP = 48
"""Slices are cut at multiples of so many elements: between rows, and where things are aligned."""


def rows_of(step: int, rank: int) -> set[int]:
    ids = ids_of(step, rank, 0)
    return {*(ids % ROWS).flatten().tolist(), *(ids // 2).flatten().tolist()}


def rows_loss(model: Any, step: int, rank: int, _micro: int) -> Tensor:
    ids = ids_of(step, rank, 0)
    return model(ids % ROWS).sum() + model(ids // 2).sum()


def count(kind: str) -> list[tuple[int, int, Any]]:
    """Bytes of data, messages of bytes, and what the engine says, per step."""
    made: Any = nn.Sequential(nn.Embedding(ROWS, ROW, sparse=True), nn.Linear(ROW, 3))
    engine = cases.make_engine(made, config_of(1, zero={"reduce_bucket_size": 4096}), kind)
    found = []
    with counted() as counter:
        for step in range(3):
            cases.run_micro_batch(engine, rows_loss, step, 0)
            data, control = counter.take()
            found.append((data, len(control), engine.traffic()))
    engine.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_are_not_zero_travel_and_no_other(pools: Pools, ranks: int) -> None:
    results = pools(ranks).run(count, "AdamW")
    per_rank = -(-ROWS * ROW // (ROW_STEP * ranks)) * ROW_STEP // ROW
    dense = 2 * (ranks - 1) * padded([ROW * 3, 3], ranks) * 4 // ranks
    whole = 2 * (ranks - 1) * per_rank * ROW * 4
    for step, rank in itertools.product(range(3), range(ranks)):
        used = [rows_of(step, each) for each in range(ranks)]
        sent = sum(row // per_rank != rank for row in used[rank])
        told = sum(row // per_rank == rank for row in set().union(*used)) * (ranks - 1)
        data, messages, said = results[rank][step]
        rows = (4 + 4 * ROW) * (sent + told)
        assert data == dense + rows and rows < whole / 2
        assert said["measured_bytes_last_step"] == data and said["formula_bytes_per_step"] == dense
        assert said["by_purpose_last_step"]["gradients: rows that are not zero"] == rows
        order = step == 0
        assert messages == 3 + order, "how many rows go to each rank, how many to all, and the step's own"


# What else a loop does


def join(counts: tuple[int, ...]) -> dict[str, Any]:
    engine: Any = cases.make_engine(make(), config_of(1), "AdamW")
    with engine.join():
        for step in range(counts[engine.rank]):
            cases.run_micro_batch(engine, loss_of, step, 0)
    weights = {name: cases.copy_out(value).numpy() for name, value in engine.state_dict().items()}
    found = {"weights": weights, "state": cases.local_state(engine)}
    engine.close()
    return found


def test_a_rank_without_data_has_no_rows(pools: Pools) -> None:
    counts = (2, 4, 3)
    results = pools(3).run(join, counts)
    truth = truth_of(3, 1, "AdamW", has=lambda step, rank, micro: step < counts[rank])
    assert_same(results[0]["weights"], truth.shown)
    assert_same(cases.assemble([found["state"] for found in results]), expected_state(truth))


def show() -> Any:
    engine: Any = cases.make_engine(make(), config_of(1), "AdamW")
    loss_of(engine, 0, engine.rank, 0).backward()
    shown = engine.module.words.weight.grad
    assert shown.layout is torch.strided and shown.shape == (WORDS, WIDTH)
    norm = shown.norm().item()
    assert engine._core.partition.sparse == {"words.weight", "bags.weight"}, "the third has dense gradients, too"
    with engine.full_grads() as whole:
        found = cases.copy_out(whole["words.weight"]).numpy()
    engine.close()
    return found, norm


def test_what_is_shown_is_dense(pools: Pools) -> None:
    first = truth_of(2, 1, "AdamW", steps=1).gradients["words.weight"]
    for found, norm in pools(2).run(show):
        assert torch.equal(torch.from_numpy(found), first) and norm == pytest.approx(first.norm().item())


def resumed(folder: str) -> dict[str, Any]:
    engine: Any = cases.make_engine(make(), config_of(1), "AdamW")
    cases.run_steps(engine, 2, loss_of)
    engine.save_checkpoint(folder)
    engine.close()
    torch.manual_seed(99)
    engine = cases.make_engine(Lookup(), config_of(1, zero={"reduce_bucket_size": 4096}), "AdamW")
    engine.load_checkpoint(folder)
    result = cases.run_steps(engine, 2, lambda model, step, rank, micro: loss_of(model, step + 2, rank, micro))
    engine.close()
    result["rows"] = 1
    dense: Any = cases.make_engine(make(sparse=False), cases.config_of("2"), "AdamW")
    dense.load_checkpoint(folder)
    dense.close()
    return result


def test_checkpoints_know_nothing_of_it(pools: Pools, tmp_path: Path) -> None:
    results = pools(2).run(resumed, str(tmp_path))
    truth = truth_of(2, 1, "AdamW")
    for result in results:
        result["losses"] = [row[int(result is not results[0])] for row in truth.losses[:2]] + result["losses"]
        result["norms"] = truth.norms[:2] + result["norms"]
    assert_true(results, truth)


def signs() -> list[float]:
    """A row whose elements are all negative, one that is NaN, and one that two ranks make zero together."""
    made: Any = nn.Embedding(40, 16, sparse=True)
    engine: Any = cases.make_engine(made, cases.config_of("0", gradient_clipping=0.0), "SGD")
    other = engine.rank == 1
    out = engine(torch.tensor([3, 30, 35]))
    engine.backward(
        ((out[0] * -2).sum() + (out[1] * (torch.nan if other else 1)).sum()) + (out[2] * (-1) ** other).sum()
    )
    with engine.full_grads() as whole:
        found = whole["weight"]
        assert torch.count_nonzero(found) == 2 * 16 and found[30].isnan().all() and (found[3] == -2).all()
    sent = rows_sent(engine)
    engine.zero_grad()
    engine.close()
    return [sent / (4 + 4 * 16)]


def test_a_row_is_left_out_only_where_all_of_it_is_zero(pools: Pools) -> None:
    """Rank 0 has rows 0 to 19: it sends two to rank 1, which sends one to it; then each sends one of its own."""
    assert pools(2).run(signs) == [[3.0], [2.0]]


def pending() -> list[int]:
    engine: Any = cases.make_engine(make(), config_of(1, zero={"recut_buckets": False}), "SGD")
    found = []

    def noting(rows: SparseRows, *given: Any) -> Any:
        found.append(len(engine._core.reducer._in_flight))
        return whole(rows, *given)

    whole = SparseRows.reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseRows, "reduce", noting)
        for step in range(3):
            cases.run_micro_batch(engine, loss_of, step, 0)
    engine.close()
    return found


def test_a_rank_that_tells_how_many_rows_it_has_has_begun_nothing_else(pools: Pools) -> None:
    for found in pools(2).run(pending):
        assert len(found) > 9 and not any(found)


def unfrozen(kind: str) -> list[int]:
    """An embedding that is frozen at first."""
    model: Any = make()
    model.words.weight.requires_grad_(False)
    engine: Any = cases.make_engine(model, config_of(1), kind)
    cases.run_micro_batch(engine, loss_of, 0, 0)
    before = rows_sent(engine)
    model.words.weight.requires_grad_(True)
    engine.optimizer.add_param_group({"params": [model.words.weight], "lr": 0.1})
    cases.run_micro_batch(engine, loss_of, 1, 0)
    after = rows_sent(engine)
    engine.close()
    return [before, after]


def test_what_is_unfrozen_later_travels_so_as_well(pools: Pools) -> None:
    assert all(0 < 2 * before < after for before, after in pools(2).run(unfrozen, "SGD"))


# What is refused


class Plain(nn.Module):
    """Says nothing of its gradient, which is sparse all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(40, 16))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table, sparse=True)


def elsewhere(stage: str) -> int:
    with pytest.raises(UsageError, match=rf"'words' has sparse=True.*'words.weight' is sparse.*stage {stage}.*stage 0"):
        cases.make_engine(make(), cases.config_of(stage), "SGD")
    engine: Any = cases.make_engine(Plain(), cases.config_of(stage), "SGD")
    loss = engine(torch.tensor([3, 3, 5])).square().sum()
    with ExitStack() as refused:
        if stage != "0":
            refused.enter_context(pytest.raises(UsageError, match="'table' has a sparse gradient: expected a dense"))
        engine.backward(loss)
    engine.zero_grad()
    engine.close()
    model: Any = make()
    ignored = {**cases.config_of(stage), "ignored_parameters": ["words.*", "bags.*", "tied.*", "head.*"]}
    optimizer = torch.optim.SGD(model.mix.parameters(), lr=0.1)
    shardengine.initialize(model, ignored, optimizer=optimizer, mesh=cases.mesh_of_this_process()).close()
    return 1


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_other_stages_say_no_by_name(pools: Pools, stage: str) -> None:
    assert pools(2).run(elsewhere, stage) == [1, 1]


def unnamed() -> None:
    engine: Any = cases.make_engine(Plain(), cases.config_of("0", gradient_clipping=0.0), "SGD")
    engine.backward(engine(torch.tensor([3, 3, 5])).square().sum())
    with engine.full_grads() as whole:
        expected = torch.zeros(40, 16)
        expected[3], expected[5] = 4.0, 2.0
        assert torch.equal(whole["table"], expected) and rows_sent(engine) == 0
    engine.close()


def test_a_sparse_gradient_that_nobody_announced_is_dense_at_stage_0(pools: Pools) -> None:
    pools(2).run(unnamed)


def different() -> None:
    rank = torch.distributed.get_rank()
    with pytest.raises(MismatchError, match=r"words\.weight: optimizer group 0, unit 0(, sparse)?"):
        cases.make_engine(make(sparse=rank == 0), config_of(1), "SGD")


def test_ranks_must_agree_on_it(pools: Pools) -> None:
    pools(2).run(different)


def test_the_key_is_for_stage_0_without_a_hook() -> None:
    base = {"train_micro_batch_size_per_gpu": 1, "sparse_gradients": True}
    assert load_config(base).sparse_gradients
    hook = r"sparse_gradients: cannot be combined with comm_hook"
    for more, text in (
        ({"zero_optimization": {"stage": 2}}, r"sparse_gradients: expected stage 0, .* got stage 2"),
        ({"comm_hook": {"name": "int8"}}, hook),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, hook),
    ):
        with pytest.raises(ConfigError, match=text):
            load_config({**base, **more})


class Words(nn.Module):
    """Of an odd width."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(2000, 33, sparse=True, **options)
        self.head = nn.Linear(33, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids)).square().mean()


def one_word_each(low: str) -> list[bool]:
    """One row of a rank is a message, whose elements lie at no multiple of 4 bytes."""
    torch.manual_seed(3)
    config: dict[str, Any] = cases.config_of("0") | {low: {"enabled": True}}
    engine = cases.make_engine(Words(), config, "SGD")
    before = engine.module.get_parameter("words.weight").detach().clone()
    engine.backward(engine(torch.tensor([7 + engine.rank])))
    engine.step()
    moved = (engine.module.get_parameter("words.weight") != before).any(dim=1)
    engine.close()
    return [bool(moved[7]), bool(moved[8])]


@pytest.mark.parametrize("low", ["bf16"])
def test_one_row_of_odd_width_in_16_bits(pools: Pools, low: str) -> None:
    assert pools(2).run(one_word_each, low) == [[True, True]] * 2


def with_max_norm() -> str:
    try:
        cases.make_engine(Words(max_norm=1.0), cases.config_of("0"), "SGD")
    except UsageError as error:
        return str(error)
    return ""


def test_an_embedding_that_writes_its_weight_in_forward_is_refused(pools: Pools) -> None:
    assert all("'words' has max_norm=1" in said for said in pools(2).run(with_max_norm))
