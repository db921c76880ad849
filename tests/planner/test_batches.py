"""A micro-batch that is made for a model of transformers is one with which it trains; and which models cannot be copied
for a plan, and are planned all the same."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardengine
from shardengine.planner import batches
from tests.support.raising import raises

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
    with raises("plan-batch-missing", "Linear"):
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


def test_samples_are_repeated_and_keep_their_values() -> None:
    batch = {"mask": torch.tensor([[1, 0], [1, 1]]), "labels": torch.tensor([3, 4]), "scale": torch.ones(5), "use": 1}
    assert batches.samples_of(batch) == 2 and batches.resized(batch, 2, 2)["mask"] is batch["mask"]
    more, less = (batches.resized(batch, 2, wanted) for wanted in (3, 1))
    assert more["mask"].tolist() == [[1, 0], [1, 1], [1, 0]] and more["labels"].tolist() == [3, 4, 3]
    assert less["mask"].tolist() == [[1, 0]] and more["use"] == 1 and more["scale"] is batch["scale"]


@pytest.mark.parametrize(
    ("shapes", "samples"),
    [
        ([(1, 128), (8, 128, 4)], 8),  # positions of all samples
        ([(5,), (2, 16)], 2),
        ([(3,), (3, 2), (4, 2), (3, 7)], 3),
        ([(6,)], 6),
        ([], 1),
    ],
)
def test_samples_of_a_batch(shapes: list[tuple[int, ...]], samples: int) -> None:
    for order in (shapes, shapes[::-1]):
        assert batches.samples_of({str(place): torch.zeros(each) for place, each in enumerate(order)}) == samples


class Packs(nn.Module):
    """Computes on what a mask lets through: the values of a batch say how much it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 512)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x[mask.bool()]).square().mean()


def test_the_values_of_a_batch_count_in_a_choice() -> None:
    batch = {"x": torch.zeros(2, 64, 16), "mask": torch.ones(2, 64, dtype=torch.int64)}
    config = {"optimizer": OPTIMIZER, "train_batch_size": 2}
    alone = shardengine.plan(Packs(), config, "24GB", batch=batch)
    found = shardengine.choose(Packs(), config, "24GB", batch=batch)
    assert found.plan is not None and found.rows[0].samples == 2 and found.rows[0].candidate.stage == 0
    assert found.plan.device.peak == alone.device.peak


class Normalises(Holds):
    """Over a batch, of which one sample is not enough; its train() does more than set a flag."""

    def __init__(self) -> None:
        super().__init__(odd=False)
        self.norm = nn.BatchNorm1d(16)
        self.seen: list[int] = []
        self.first.weight.seen = []  # type: ignore[attr-defined]

    def train(self, mode: bool = True) -> Normalises:
        self.norm.requires_grad_(mode)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.seen.append(1)  # type: ignore[attr-defined]
        return super().forward(self.norm(x))


def test_a_model_stays_as_it_is_and_begins_with_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Normalises().eval()
    config = {"optimizer": OPTIMIZER, "train_batch_size": 4, "train_micro_batch_size_per_gpu": "auto"}
    with torch.no_grad():
        engine = shardengine.initialize(model, config, batch={"x": torch.zeros(1, 16)})
    assert engine.config.train_micro_batch_size_per_gpu in (2, 4)
    assert not model.norm.weight.requires_grad and not model.training and model.first.weight.seen == []  # type: ignore[attr-defined]
    assert model.norm.num_batches_tracked.item() == 0  # type: ignore[union-attr]
    engine.close()


def test_ctrl_c_counts_behind_a_plan() -> None:
    came: list[str] = []
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts tests may ignore it

    def loss(returned: Tensor) -> Tensor:
        if not came:
            came.append("asked")
            signal.raise_signal(signal.SIGINT)
            came.append("went on")
        return returned

    config = {"optimizer": OPTIMIZER, "train_batch_size": 4}
    try:
        with pytest.raises(KeyboardInterrupt):
            shardengine.plan(Holds(odd=False), config, "24GB", batch={"x": torch.zeros(4, 16)}, loss=loss)
        assert came == ["asked", "went on"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outside)
