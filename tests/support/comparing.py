"""The one comparison of a training with the oracle: losses, norms, weights, buffers, optimizer states, bit for bit.

Strict both ways: nothing may differ, nothing may be missing, and nothing may be there that the oracle does not have.
Must not know: how a run came to be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests import oracle
from tests.support import cases


def assert_equal_to_truth(results: list[dict[str, Any]], truth: oracle.Trace, where: object = "") -> None:
    """results: of all ranks, each as ``cases.run_steps`` gives it. where: which run it is, for the message."""
    for rank, result in enumerate(results):
        wanted = {
            "losses": [row[rank] for row in truth.losses],
            "norms": [norm[rank] if isinstance(norm, list) else norm for norm in truth.norms],
        }
        wanted |= {"skipped": truth.skipped} | ({"scales": truth.scales} if truth.scales else {})
        for key, expected in wanted.items():
            same = result[key] == expected or repr(result[key]) == repr(expected)  # NaN is not equal to itself
            assert same, f"{where} {key} of rank {rank}: {result[key]}, expected {expected}"
    assert_same(results[0]["weights"], truth.shown, where)
    assert_same(cases.assemble([result["state"] for result in results]), expected_state(truth), where)


def expected_state(truth: oracle.Trace) -> dict[tuple[str, str], Tensor]:
    """What all ranks' optimizers hold together: of each trained parameter the weight that is stepped and its states.

    Flat, in memory order; a state that was never stepped is zero.
    """
    assert truth.optimizer is not None and truth.states.keys() <= set(truth.trained)
    expected = {}
    for name in truth.trained:
        weight, states = truth.parameters[name], truth.states.get(name, {})
        if weight.numel():
            expected[name, "weight"] = in_memory_order(states.get("master", weight))
            for key in truth.kept[name]:
                expected[name, key] = in_memory_order(states.get(key, torch.zeros_like(weight, dtype=torch.float32)))
    return expected


def assert_same(ours: dict[Any, Any], expected: dict[Any, Tensor], where: object = "") -> None:
    """Arrays and tensors by name. Weights that are not fp32 come as fp32, which holds every value of theirs."""
    assert ours.keys() == expected.keys(), f"{where} only on one side: {sorted(ours.keys() ^ expected.keys())}"
    for name, value in expected.items():
        found, wanted = torch.from_numpy(ours[name]), value.float()
        assert found.shape == wanted.shape, f"{where} {name}: {tuple(found.shape)}, expected {tuple(wanted.shape)}"
        assert torch.equal(found, wanted), f"{where} {name}: {(found != wanted).sum()} of {wanted.numel()} differ"


def in_memory_order(tensor: Tensor) -> Tensor:
    """Flat, as it lies in memory: states of a channels_last weight lie as the weight does."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])
    return tensor.permute(order).reshape(-1)
