"""What a dry run says of memory is what a run takes: to the byte beside the same engine with values, and within 3% of
what torch's allocator gave out on real ranks over gloo (``benchmarks.plan`` has the whole matrix)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from benchmarks.plan import loss_of, measured, planned, rank_of
from benchmarks.plan_cases import BOTH, DISK, STATES, Architecture, Case, Text, words
from shardengine.errors import UsageError
from shardengine.kernels import Spans
from shardengine.planner import DryRun, ModelPlace, dry_run, without_weights
from shardengine.planner.dry_engine import FORWARD, INITIALIZE, STEP, bytes_by_kind
from shardengine.planner.ledger import Watch
from tests.support.forks import Forks
from tests.support.raising import raises

WORDS, TOKENS, WIDTH, BUCKET = 256, 256, 64, 20_000
_SMALL = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 176, "num_hidden_layers": 2, "use_cache": False,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TOKENS,
}  # fmt: skip
_words = partial(words, 4, TOKENS, WORDS)
SMALL = {
    "Llama": Architecture(Text("LlamaForCausalLM", "LlamaConfig", _SMALL), _words),
    "GPT-2": Architecture(Text("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": WORDS, "n_positions": TOKENS, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "use_cache": False,
        "bos_token_id": 0, "eos_token_id": 0}), _words),
}  # fmt: skip
"""A bucket is less than 1% of a run, so that one that waits a step earlier or later for other ranks is no matter."""


@contextmanager
def with_values() -> Iterator[Callable[[], int]]:
    """A dry run inside has values. Gives the bytes of what kernels write down of their spans, which others do not."""
    tables: dict[int, int] = {}
    table = Spans.table

    def seen(self: Spans, *args: Any) -> tuple[Tensor, Tensor]:
        made = table(self, *args)
        tables.update({id(each): each.nbytes for each in made})
        return made

    running = sys.modules["shardengine.planner.dry_engine"]
    with patch.object(running, "without_values", lambda *seen, **_: Watch(*seen)), patch.object(Spans, "table", seen):
        yield lambda: sum(tables.values())


EXACT = {
    "stage 0": Case("Llama", 2, "0", bucket=BUCKET),
    "stage 2": Case("Llama", 3, "2", "bf16", bucket=BUCKET),
    "stage 3": Case("Llama", 4, "3", "bf16", micros=2, bucket=BUCKET),
    "stage 3, on the host": Case("GPT-2", 2, "3", "fp32", BOTH, bucket=BUCKET),
    "activations on the host": Case("Llama", 2, "2", checkpointed=True, bucket=BUCKET),
}


@pytest.mark.parametrize("name", list(EXACT))
def test_a_dry_run_has_every_byte_and_message_of_the_engine_with_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = EXACT[name]
    if name == "activations on the host":
        offloaded = case.config() | {"activation_checkpointing": {"enabled": True, "cpu_offload": True}}
        monkeypatch.setattr(Case, "config", lambda _: offloaded)
    dry = planned(case, SMALL[case.model])
    with with_values() as kept_beside:
        real = planned(case, SMALL[case.model])
    assert dry.issued == real.issued
    assert dry.peak.phase == real.peak.phase and dry.peak.bytes > 5e6
    assert dry.peak_in(INITIALIZE) == real.peak_in(INITIALIZE)
    beside = kept_beside()
    assert beside < 1e-3 * dry.peak.bytes
    pairs = ((dry.peak, real.peak), (dry.peak_in(FORWARD), real.peak_in(FORWARD)), (dry.at_rest, real.at_rest))
    for mine, other in pairs:
        assert other.bytes - mine.bytes == beside
        difference = bytes_by_kind(other) - bytes_by_kind(mine)
        assert set(difference) <= {"gradients and buffers"}, difference
    assert 0 <= real.peak_in(STEP).bytes - dry.peak_in(STEP).bytes <= 2 * beside


REAL = {
    "stage 0": Case("GPT-2", 2, "0", bucket=BUCKET),
    "stage 1, bf16": Case("Llama", 2, "1", "bf16", bucket=BUCKET),
    "stage 2, accumulated": Case("Llama", 2, "2", micros=2, bucket=BUCKET),
    "stage 3, bf16": Case("Llama", 4, "3", "bf16", bucket=BUCKET),
    "stage 3, states on the host": Case("GPT-2", 2, "3", "bf16", STATES, bucket=BUCKET),
    "stage 3, states on a disk": Case("Llama", 2, "3", "bf16", DISK, bucket=BUCKET),
    "stage 3, checkpointed": Case("Llama", 2, "3", checkpointed=True, bucket=BUCKET),
}


@pytest.mark.parametrize("name", list(REAL))
def test_real_ranks_take_what_a_dry_run_says(forks: Forks, name: str) -> None:
    case = REAL[name]
    plan = planned(case, SMALL[case.model])
    own = measured(forks, case, SMALL[case.model], steps=3)[rank_of(case)]
    assert own["bytes"] > 3e6
    assert plan.peak.bytes == pytest.approx(own["bytes"], rel=0.03), (plan.peak, own)
    assert plan.peak.phase == own["at"]


# Models


def run(make: Callable[[Any], nn.Module], case: Case) -> DryRun:
    return dry_run(make, _words, case.config(), ModelPlace(2, 1, apart=False), loss_of)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_that_is_there_already_is_no_memory_of_the_run(device: str) -> None:
    make, case = SMALL["Llama"].make, Case("Llama", 2, "2", bucket=BUCKET)
    with torch.device(device):
        whole = make()
    first = next(whole.parameters())
    given = run(lambda mode: without_weights(whole, mode), case)
    assert given.peak == run(lambda _: make(), case).peak
    assert first is next(whole.parameters()) and type(first) is nn.Parameter and first.device.type == device


def mixtral(experts: str) -> nn.Module:
    values = _SMALL | {"num_local_experts": 4, "num_hidden_layers": 1, "experts_implementation": experts}
    return Text("MixtralForCausalLM", "MixtralConfig", values)()


def test_experts_that_are_multiplied_in_groups_are_planned_in_every_dtype() -> None:
    """Torch's own rule knows bf16 alone."""
    bytes_ = {}
    for precision in ("fp32", "bf16"):
        case = Case("Mixtral", 2, "2", precision, bucket=BUCKET)
        bytes_[precision] = run(lambda _: mixtral("grouped_mm"), case).peak.bytes
        with with_values() as kept_beside:
            assert run(lambda _: mixtral("grouped_mm"), case).peak.bytes == bytes_[precision] + kept_beside()
    assert bytes_["fp32"] > bytes_["bf16"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loop_over_the_experts_that_data_chose_is_refused_in_a_sentence(precision: str) -> None:
    told = r'shapes depend on data \(aten.nonzero.default\), .* experts_implementation="grouped_mm"'
    with pytest.raises(UsageError, match=told):
        run(lambda _: mixtral("eager"), Case("Mixtral", 2, "2", precision, bucket=BUCKET))


def test_an_operation_that_does_not_say_its_shape_is_refused_in_a_sentence() -> None:
    @torch.library.custom_op("shardengine_tests::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return twice(self.layer(x).detach()).sum() + self.layer(x).sum()

    def plan(make: Callable[[], nn.Module]) -> DryRun:
        case = Case("", 2, "2")
        return dry_run(
            lambda _: make(), lambda: {"x": torch.ones(2, 4)}, case.config(), ModelPlace(2, 1), lambda loss: loss
        )

    with raises("plan-model-needs-values", "RuntimeError", "twice", "register_fake"):
        plan(Twice)
    twice.register_fake(torch.empty_like)
    assert plan(Twice).peak.bytes > 0
