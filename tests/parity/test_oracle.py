"""The oracle itself: equal to plain torch on the whole batch."""

from __future__ import annotations

import pytest
import torch

from tests import cases, oracle


@pytest.mark.parametrize("model", ["mlp", "gpt2", "llama"])
def test_equals_plain_torch_on_the_whole_batch(model: str) -> None:
    """SGD, 5 steps; rtol 1e-5: plain torch adds the micro-batches' gradients in another order."""
    ranks, micros = 3, 2
    network, plain = cases.MODELS[model](), cases.MODELS[model]()
    trace = oracle.train(
        network, cases.loss_of, ranks=ranks, micros=micros, steps=5, kind="SGD",
        groups=cases.groups_of(network, "SGD"), order="full", clip=cases.CLIP,
    )  # fmt: skip
    optimizer = cases.make_optimizer(plain, "SGD")
    for step in range(5):
        for rank in range(ranks):
            for micro in range(micros):
                loss = cases.loss_of(plain, step, rank, micro)
                assert loss.item() == pytest.approx(trace.losses[step][rank][micro], rel=1e-5)
                (loss / (ranks * micros)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), cases.CLIP)
        assert norm.item() == pytest.approx(trace.norms[step], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trace.parameters[name], parameter.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
def test_adam_equals_torch_optim(kind: str) -> None:
    """One rank, one micro-batch, 5 steps; rtol 1e-5: torch.optim's own kernels round in another order."""
    network, plain = cases.make_mlp(), cases.make_mlp()
    trace = oracle.train(network, cases.loss_of, ranks=1, steps=5, kind=kind, groups=cases.groups_of(network, kind))
    optimizer = cases.make_optimizer(plain, kind)
    for step in range(5):
        cases.loss_of(plain, step, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trace.parameters[name], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_sum_over_ranks_is_a_balanced_tree() -> None:
    terms = [torch.tensor(value) for value in (1e8, 1.0, -1e8, 1.0, 3.0)]
    assert oracle.tree_sum(list(terms)) == ((terms[0] + terms[1]) + (terms[2] + terms[3])) + terms[4]
    assert oracle.tree_sum(list(terms[:3])) == (terms[0] + terms[1]) + terms[2]


def test_orders_differ_for_three_micro_batches() -> None:
    """If they did not, the test of the third letter would prove nothing."""
    full, sharded = (cases.truth("mlp", "SGD", 2, 3, order) for order in ("full", "sharded"))
    assert any(not torch.equal(full.parameters[n], sharded.parameters[n]) for n in full.parameters)
