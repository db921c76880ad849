"""The loss as the mean over the valid tokens of the global batch. Owns: the weight of each micro-batch's loss.

Must not know: the engine, where batches come from.

[Note: Global mean] A causal LM returns the mean over the valid tokens of its own micro-batch. The engine then takes the
mean over micro-batches and ranks. In that mean of means, a token weighs more if more of the tokens beside it are
masked. So the loss of micro-batch i, with v_i valid tokens, is multiplied by v_i · N · k / V. V counts the valid tokens
of the optimizer step over all N ranks and their k micro-batches. The engine then computes the sum of all tokens' losses
divided by V. Without masks the factor is exactly 1.0, and no bit changes. V must be known before the first backward, so
a step's micro-batches are fetched together, and one small message adds their counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from shardengine.app.data import Batch, tokens, valid_tokens
from shardengine.app.rank_sums import RankSums
from shardengine.errors import UsageError


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of one optimizer step, with the factor of each one's loss.

    tokens: over all ranks, without padding.
    """

    batches: list[Batch]
    weights: list[float]
    tokens: int


def fetch(batches: Iterator[Batch], count: int, rank_sums: RankSums) -> GlobalBatch:
    """Fetch the next ``count`` micro-batches as one step ([Note: Global mean]); collective.

    A micro-batch without a valid token weighs 0. UsageError on every rank if the whole global batch has none.
    """
    mine = list(islice(batches, count))
    valid = [valid_tokens(batch) for batch in mine]
    total, all_tokens = rank_sums.sums([float(sum(valid)), float(sum(map(tokens, mine)))])
    if not total:
        raise UsageError(
            "no token of this optimizer step is to be learnt, on any rank: every label is masked (-100) or the first "
            "of its row; expected at least one. Leave such rows out of the data",
            code="train-step-without-labels",
        )
    weights = [each * rank_sums.mesh.ranks * count / total for each in valid]
    return GlobalBatch([_predictable(batch) for batch in mine], weights, int(all_tokens))


def _predictable(batch: Batch) -> Batch:
    """Return a batch whose mean exists.

    If no token is valid (0 / 0), one label stands in, and the batch's loss weighs 0. The batch cannot be skipped:
    forward and backward are collective.
    """
    if valid_tokens(batch):
        return batch
    labels = batch["labels"].clone()
    labels[0, 1] = batch["input_ids"][0, 1]
    return {**batch, "labels": labels}
