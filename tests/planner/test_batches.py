"""A micro-batch that is made for a model of transformers is one with which it trains; and which models cannot be copied
for a plan, and are planned all the same."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.errors import UsageError
from shardengine.planner import batches

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3}}
BERT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
        "max_position_embeddings": 32}  # fmt: skip
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "image_size": 16,
       "patch_size": 8}  # fmt: skip
HEADS: list[tuple[str, dict[str, Any]]] = [
    ("BertForMaskedLM", {}),
    ("BertForTokenClassification", {}),
    ("BertForSequenceClassification", {}),
    ("BertForSequenceClassification", {"num_labels": 1}),
    ("BertForSequenceClassification", {"num_labels": 5, "problem_type": "multi_label_classification"}),
    ("BertForSequenceClassification", {"num_labels": 3, "problem_type": "regression"}),
    ("BertForMultipleChoice", {}),
    ("BertForNextSentencePrediction", {}),
    ("BertForQuestionAnswering", {}),
    ("ViTForImageClassification", {}),
]


@pytest.mark.parametrize(("name", "more"), HEADS, ids=lambda each: each if isinstance(each, str) else str(each))
def test_a_batch_of_a_head_trains_it(name: str, more: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    made = transformers.ViTConfig(**VIT) if name.startswith("ViT") else transformers.BertConfig(**BERT, **more)
    model = getattr(transformers, name)(made)
    batch = batches.example(model, 3, 8)
    assert {len(each) for each in batch.values()} == {3}
    batches.loss_of(model(**batch)).backward()
    found = shardengine.plan(model, {"optimizer": OPTIMIZER, "train_batch_size": 3}, "24GB", length=8)
    assert found.fits and found.shape == next(iter(batch.values())).shape


def test_a_model_of_which_nobody_knows_what_it_takes() -> None:
    with pytest.raises(UsageError, match=r"expected batch=, a mapping of what Linear\.forward takes"):
        batches.example(nn.Linear(2, 2), 1, None)


def test_a_batch_of_another_size_than_the_config_says(caplog: pytest.LogCaptureFixture) -> None:
    config = {"optimizer": OPTIMIZER, "train_batch_size": 4}
    for samples in (4, 3):
        found = shardengine.plan(Holds(odd=False), config, "24GB", batch={"x": torch.zeros(samples, 16)})
        assert found.shape == (samples, 16)
    assert [each.getMessage() for each in caplog.records if "micro-batch of" in each.getMessage()] == [
        "a micro-batch of 3 is planned, as batch= has it; the config says 4 samples"
    ]


class Uncopied:
    """Says so itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise KeyError("there is one of these")


class Holds(nn.Module):
    """What ``copy.deepcopy`` refuses, and what it would copy."""

    def __init__(self, *, odd: bool) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.last = nn.Linear(32, 16)
        self.last.copied = [1]  # type: ignore[assignment]
        if odd:
            self.lock, self.numbers, self.only = threading.Lock(), (i for i in range(3)), Uncopied()
            self.first.many = {"lock": [threading.Lock()]}  # type: ignore[assignment]
            self.scale = self.first.weight.sum().exp()  # a result that autograd knows

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "lock"):
            with self.lock:
                x = x * self.scale.detach()
        self.last.copied.append(2)  # type: ignore[operator, union-attr]
        y: Tensor = self.last(self.first(x).relu()).square().mean()
        return y


@pytest.mark.parametrize("own", [False, True])
def test_what_cannot_be_copied_is_shared(own: bool) -> None:
    plain, odd = Holds(odd=False), Holds(odd=True)
    found = []
    for model in (plain, odd):
        optimizer: Any = {"optimizer": torch.optim.AdamW(model.parameters())} if own else {}
        config = {"train_batch_size": 4} if own else {"train_batch_size": 4, "optimizer": OPTIMIZER}
        found.append(shardengine.plan(model, config, "24GB", batch={"x": torch.zeros(4, 16)}, **optimizer))
        assert model.last.copied == [1], "what can be copied is the copy's own"
    assert found[0].device.at_rest == {**found[1].device.at_rest, "model": found[0].device.at_rest["model"]}
    assert odd.lock.acquire(blocking=False)
