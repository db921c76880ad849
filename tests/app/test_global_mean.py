"""The loss of the training loop is the mean over the valid tokens of the global batch, whatever the masks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import shardengine
from shardengine.app import data, evaluation, global_mean, loop
from shardengine.app.data import Batch, Rows
from shardengine.app.rank_sums import RankSums
from shardengine.comm import mesh as mesh_module
from shardengine.errors import UsageError
from tests.support.cases import LENGTH, STAGES, VOCAB, make_llama, mesh_of_this_process

STEPS, SEED = 3, 5
# AdamW divides a gradient by its own size: eps is above the rounding of gradients, which would move weights otherwise
OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.5}, "AdamW": {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}}
# Both sides add the same fp32 terms, in another order: over tokens at once here, over micro-batches and ranks there,
# with batches of another size in every matrix product. Three steps move that rounding into the weights.
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}


def unequal_rows(count: int = 24) -> Rows:
    """Examples of which one token is learnt, or nearly all, with padding."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCAB, (count, LENGTH), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row in range(count):
        end = LENGTH - row % 4
        first = end - 1 if row % 3 else 1  # two rows of three hold one valid token, the third has all it can
        labels[row, :first] = data.IGNORED
        labels[row, end:], mask[row, end:], ids[row, end:] = data.IGNORED, 0, 0
    return Rows(ids, labels, mask)


def one_without_valid_tokens(rank: int) -> Iterator[Batch]:
    """Micro-batches of which rank 0's first ones hold no valid token."""
    for number, batch in enumerate(data.training_batches(unequal_rows(), 2, rank, 2, SEED)):
        if rank == 0 and number < 2:
            batch["labels"] = torch.full_like(batch["labels"], data.IGNORED)
            batch["labels"][:, 0] = 7  # nothing predicts a row's first token
        yield batch


def naive_fetch(batches: Iterator[Batch], count: int, rank_sums: RankSums) -> global_mean.GlobalBatch:
    """A mean of means: what a loop does that leaves masks to the model."""
    mine = list(itertools.islice(batches, count))
    return global_mean.GlobalBatch(mine, [1.0] * count, 1)


def engine_of_case(rank_sums: RankSums, stage: str, k: int, kind: str = "SGD") -> shardengine.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": k,
        "optimizer": {"type": kind, "params": OPTIMIZERS[kind]},
        "zero_optimization": {**STAGES[stage], "reduce_bucket_size": 4000},
    }
    return shardengine.initialize(make_llama(), config, mesh=rank_sums.mesh)


Run = tuple[list[float], list[float], dict[str, Tensor], float]
"""Losses, gradient norms, weights of rank 0 at the end, validation loss."""


def run_case(stage: str, k: int, how: str = "", kind: str = "SGD") -> Run:
    """A few steps of the loop."""
    rank_sums = RankSums(mesh_of_this_process())
    engine = engine_of_case(rank_sums, stage, k, kind)
    batches = data.training_batches(unequal_rows(), 2, engine.rank, engine.world_size, SEED)
    if how == "one without":
        batches = one_without_valid_tokens(engine.rank)
    kept = global_mean.fetch
    if how == "naive":
        global_mean.fetch = naive_fetch
    losses, norms = [], []
    try:
        for progress in loop.steps(engine, batches, STEPS, rank_sums, cast(Any, False)):
            losses.append(progress.loss)
            norms.append(engine.get_global_grad_norm() or 0.0)
    finally:
        global_mean.fetch = kept
    weights = engine.state_dict()
    validation = evaluation.validate(engine, unequal_rows(7), rank_sums)
    engine.close()
    return losses, norms, weights, validation


def mean_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """The mean over all valid tokens, by torch alone."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none"
    )
    return losses.sum() / (labels != -100).sum()


def plain(streams: list[Iterator[Batch]], k: int, kind: str = "SGD") -> Run:
    """As ``run_case``, by one process of plain torch that sees each global batch whole."""
    model = make_llama()
    classes: dict[str, Any] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
    optimizer = classes[kind](model.parameters(), **OPTIMIZERS[kind])
    losses, norms = [], []
    for _ in range(STEPS):
        parts = [next(stream) for stream in streams for _ in range(k)]
        loss = mean_loss(model, {name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item())
        optimizer.step()
    with torch.no_grad():
        validation = mean_loss(model.eval(), unequal_rows(7).batch(slice(None))).item()
    return losses, norms, model.state_dict(), validation


def assert_equal_runs(found: Any, expected: Any) -> None:
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), **CLOSE)
    assert found[2].keys() == expected[2].keys()
    for name, weight in found[2].items():
        torch.testing.assert_close(weight, expected[2][name], **CLOSE)
    assert found[3] == pytest.approx(expected[3], rel=2e-5)


@pytest.mark.parametrize(("kind", "stages"), [("SGD", ("0", "2", "3")), ("AdamW", ("1", "3k"))])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_unequal_masks_equal_one_process_that_sees_the_global_batch(pools, ranks: int, k: int, kind: str, stages):
    streams = [data.training_batches(unequal_rows(), 2, rank, ranks, SEED) for rank in range(ranks)]
    expected = plain(streams, k, kind)
    for stage in stages:
        results = pools(ranks).run(run_case, stage, k, "", kind)
        assert_equal_runs(results[0], expected)
        assert [result[0] for result in results] == [results[0][0]] * ranks  # every rank reports the same loss


@pytest.mark.parametrize(("ranks", "k"), [(2, 1), (1, 2), (3, 2)])
def test_a_mean_of_means_is_something_else(pools, ranks: int, k: int):
    expected = plain([data.training_batches(unequal_rows(), 2, rank, ranks, SEED) for rank in range(ranks)], k)
    found = pools(ranks).run(run_case, "0", k, "naive")[0]
    with pytest.raises(AssertionError):
        assert_equal_runs(found, expected)
    assert abs(found[0][0] - expected[0][0]) > 1e-3
    assert abs(found[1][0] - expected[1][0]) > 1e-2


@pytest.mark.parametrize("k", [1, 2])
def test_a_micro_batch_without_valid_tokens_weighs_nothing(pools, k: int):
    expected = plain([one_without_valid_tokens(rank) for rank in range(2)], k)
    for stage in ("1", "3"):
        assert_equal_runs(pools(2).run(run_case, stage, k, "one without")[0], expected)


def nothing_valid_case() -> str:
    rank_sums = RankSums(mesh_of_this_process())
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.full((2, 4), data.IGNORED)}
    with pytest.raises(UsageError, match="no token of this optimizer step is to be learnt") as caught:
        global_mean.fetch(iter([batch, batch]), 2, rank_sums)
    return str(caught.value)


def test_a_global_batch_without_any_valid_token_is_an_error_on_every_rank(pools):
    assert len(pools(2).run(nothing_valid_case)) == 2


def unmasked_case(k: int) -> tuple[list[float], int]:
    rank_sums = RankSums(mesh_of_this_process())
    ids = torch.arange(40 * LENGTH).view(40, LENGTH) % VOCAB
    window = global_mean.fetch(
        data.training_batches(Rows(ids, ids), 2, rank_sums.rank, rank_sums.mesh.ranks, SEED), k, rank_sums
    )
    return window.weights, window.tokens


@pytest.mark.parametrize(("ranks", "k"), [(1, 1), (2, 3), (3, 7)])
def test_without_masks_the_factor_is_exactly_one(pools, ranks: int, k: int):
    assert pools(ranks).run(unmasked_case, k) == [([1.0] * k, 2 * k * ranks * LENGTH)] * ranks


def test_the_loss_of_a_step_without_masks_keeps_its_bits():
    """As the loop was before masks: no factor at all."""
    rank_sums = RankSums(mesh_module.build(torch.device("cpu")))
    ids = torch.arange(40 * LENGTH).view(40, LENGTH) % VOCAB
    results = []
    for fetch in (global_mean.fetch, naive_fetch):
        engine = engine_of_case(rank_sums, "2", 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(global_mean, "fetch", fetch)
            batches = data.training_batches(Rows(ids, ids), 2, 0, 1, SEED)
            losses = [step.loss for step in loop.steps(engine, batches, STEPS, rank_sums, cast(Any, False))]
        results.append((losses, engine.state_dict()))
        engine.close()
    assert results[0][0] == results[1][0]
    assert all(torch.equal(weight, results[1][1][name]) for name, weight in results[0][1].items())
