"""``shardengine.plan``: what it takes, what it says, what it leaves alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardengine
from shardengine import Hardware, Plan, plan
from shardengine.errors import UsageError
from shardengine.planner import MemoryLedger, ModelPlace, SilentWire, dry_run, without_values, without_weights
from tests.dry.runs import TIERS, Case, Net
from tests.dry.test_ratio_auto import Alive
from tests.support.dry_run import META, Border, DryPlatform, Log, dry_mesh
from tests.support.raising import raises

GB = 10**9


@pytest.mark.parametrize(
    ("text", "ranks", "size"),
    [
        ("4x24GB", 4, 24 * GB),
        ("24GB", 1, 24 * GB),
        ("8 × 80 GiB", 8, 80 << 30),
        ("16*1.5tb", 16, 1500 * GB),
        ("2x2560MiB", 2, 2560 << 20),
    ],
)
def test_hardware_is_read_as_people_write_it(text: str, ranks: int, size: int) -> None:
    found = Hardware.parse(text, host_memory="128GB", node_ranks=1)
    assert (found.ranks, found.device_bytes, found.per_rank(found.host_bytes)) == (ranks, size, 128 * GB)


@pytest.mark.parametrize(
    "text", ["4x", "4x24", "8", "2x200Gb", "2x512MiB", "x24GB", "fourx24GB", "4x24XB", "0x24GB", "4x0GB", "", "-1x24GB"]
)
def test_what_is_no_hardware_is_told(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected .*, got"):
        Hardware.parse(text)


def test_ranks_are_in_whole_nodes() -> None:
    with raises("hardware-ranks-not-whole-nodes", "got 4", "and 3"):
        Hardware.parse("4x24GB", node_ranks=3)
    assert Hardware.parse("8x24GB", node_ranks=4).per_rank(100 * GB) == 25 * GB


class Tied(nn.Module):
    """Two layers with one weight, a buffer that is shared, and an attribute of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.ones(64))
        self.note: dict[str, Any] = {"what": ["of the user's"]}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu()) - self.mean
        return y.square().mean()


CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}
}  # fmt: skip


def plan_of(model: nn.Module, hardware: str = "2x24GB", config: Mapping[str, Any] = CONFIG, **more: Any) -> Plan:
    return plan(model, config, hardware, batch={"x": torch.zeros(4, 64)}, **more)


def test_the_model_stays_as_it_is() -> None:
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    found = plan_of(model)
    assert found.parameters == 64 * 64 + 2 * 64, "a weight that is used twice counts once"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.second.weight is model.first.weight and type(model.first.weight) is nn.Parameter
    assert not model._forward_hooks and model.first.weight.grad is None
    engine = shardengine.initialize(model, CONFIG)  # and an engine takes it
    engine.backward(engine(torch.randn(4, 64)))
    engine.step()
    engine.close()
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_a_copy_without_weights_shares_what_the_model_shares() -> None:
    model = Tied()
    with without_values() as mode:
        found: Any = without_weights(model, mode)
    assert found.second.weight is found.first.weight
    assert found.note == model.note
    assert found.mean.shape == (64,)


def test_engines_with_values_live_beside_a_plan() -> None:
    """Poison, kernels and addresses are those of values again afterwards, at stage 3, too."""
    config = {**CONFIG, "zero_optimization": {"stage": 3}}
    model = Tied()
    engine = shardengine.initialize(model, config)
    losses = []
    for _ in range(2):
        plan_of(Tied(), config=config)
        loss = engine(torch.ones(4, 64))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    assert losses[1] < losses[0]


def test_it_says_whether_it_fits() -> None:
    large = nn.Sequential(*(nn.Linear(1024, 1024, device="meta") for _ in range(8)))
    batch = {"input": torch.zeros(4, 1024)}

    def planned(hardware: str | Hardware, stage: int) -> Plan:
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        return plan(large, config, hardware, batch=batch, loss=lambda y: y.sum())

    fits, misses = planned("4x2GB", 3), planned(Hardware(4, (1 << 30) + 100 * 10**6), 0)
    assert fits.fits and fits.sentences()[0].startswith("GPU: fits, ")
    assert not misses.fits and "GPU: does not fit, " in misses.sentences()[0] and "more than" in misses.sentences()[0]
    elements = 8 * (1024 * 1024 + 1024)
    assert misses.device.rests >= 12 * elements and fits.device.rests < misses.device.rests / 2
    assert fits.as_dict()["tiers"]["GPU"]["peak_bytes"] == fits.device.peak == sum(fits.device.at_peak.values())
    assert planned(Hardware(1, GB, is_gpu=False), 0).device.name == "memory"


def test_the_rest_is_the_formula() -> None:
    config = {
        **CONFIG,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    }
    model = nn.Sequential(*(nn.Linear(512, 512, device="meta") for _ in range(4)))
    found = plan(model, config, "2x24GB", batch={"input": torch.zeros(4, 512)}, loss=lambda y: y.sum())
    elements = 4 * (512 * 512 + 512)
    assert found.host is not None
    assert found.host.at_peak["states"] == pytest.approx(12 * elements / 2, rel=0.01)
    assert found.device.at_peak["weights"] >= 2 * elements / 2
    assert "states" not in found.device.at_peak
    crowded = Hardware(2, 24 * GB, host_bytes=elements)
    short = plan(model, config, crowded, batch={"input": torch.zeros(4, 512)}, loss=lambda y: y.sum())
    assert short.device.fits and not short.fits and "host: does not fit" in short.sentences()[1]


def test_states_on_a_disk(tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "disk")}}
    model = nn.Sequential(*(nn.Linear(512, 512, device="meta") for _ in range(4)))
    for size, fits in ((1 << 40, True), (1 << 20, False)):
        where = Hardware(2, 24 * GB, disk_bytes=size)
        config = {**CONFIG, "zero_optimization": zero}
        found = plan(model, config, where, batch={"input": torch.zeros(4, 512)}, loss=lambda y: y.sum())
        assert found.disk is not None and found.fits is fits
        assert found.disk.peak == pytest.approx(12 * 4 * (512 * 512 + 512) / 2, rel=0.01)
        assert found.host is not None and found.host.at_peak["gradients and buffers"] > 0
    assert not (tmp_path / "disk").exists(), "nothing is written"


def test_optimizers_of_the_user(tmp_path: Path) -> None:
    """Instances over the model's parameters, with a scheduler, and functions; a batch of another device."""
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    batch = {"x": torch.zeros(4, 64, device="meta")}
    found = plan(model, config, "2x24GB", batch=batch, optimizer=optimizer, lr_scheduler=scheduler)
    other = plan(model, config, "2x24GB", batch=batch, optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    assert found.device.at_peak["states"] == other.device.at_peak["states"]
    assert found.device.at_peak["states"] == pytest.approx(4 * (64 * 64 + 2 * 64) / 2, abs=512)
    assert optimizer.param_groups[0]["params"][0] is model.first.weight and not optimizer.state


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[y > 0].sum()


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y


def test_what_cannot_be_planned_is_told() -> None:
    with raises("plan-model-needs-data"):
        plan_of(Picks())
    with raises("plan-without-loss", "tuple"):
        plan_of(Pairs())
    with raises("plan-batch-missing", "Tied"):
        plan(Tied(), CONFIG, "24GB")
    for model, came in ((nn.Linear, "the class Linear"), ("gpt2", "a str"), (lambda: None, "a NoneType")):
        with pytest.raises(UsageError, match=f"plan: expected model to be a torch module, .* got {came}"):
            plan_of(model)  # type: ignore[arg-type]
    with raises("plan-batch-not-a-mapping", "Tensor"):
        plan(Tied(), CONFIG, "24GB", batch=torch.zeros(4, 64))  # type: ignore[arg-type]
    with raises("plan-hardware-wrong-type"):
        plan(Tied(), CONFIG, 24)  # type: ignore[arg-type]
    with pytest.raises(shardengine.ConfigError, match="gradient_accumulation_step"):
        plan_of(Tied(), config={**CONFIG, "gradient_accumulation_step": 1})


def saved_bytes(on_gpu: bool, use: Any) -> int:
    with without_values(on_gpu=on_gpu), MemoryLedger() as ledger:
        x = torch.empty(2, 4, 64, 32, requires_grad=True)
        before = sum(event[-1] for event in ledger._events)
        y = use(x)
        found = sum(event[-1] for event in ledger._events) - before
        del y
    return found


def test_what_a_gpu_keeps_for_backward() -> None:
    """By hand: dropout a byte of mask for each element and its result; attention without probabilities."""
    elements = 2 * 4 * 64 * 32

    def attention(x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1, is_causal=True)

    assert saved_bytes(True, lambda x: nn.functional.dropout(x, 0.1)) == elements * (4 + 1)
    assert saved_bytes(True, lambda x: nn.functional.dropout(x, p=0.1, training=True)) == elements * (4 + 1)
    assert saved_bytes(True, lambda x: nn.functional.dropout(x, 0.1, training=False)) == 0
    assert saved_bytes(True, attention) == elements * 4 + 2 * 4 * 64 * 4
    assert saved_bytes(False, attention) > 2 * 4 * 64 * 64 * 4


def test_what_a_gpu_computes_again_is_what_it_kept() -> None:
    """Attention with dropout keeps something else on a CPU, also in the second run, or torch refuses the two."""

    def block(x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, nn.functional.dropout(x, 0.1), dropout_p=0.1)

    with without_values(on_gpu=True):
        x = torch.empty(2, 4, 64, 32, requires_grad=True)
        y: Any = checkpoint(block, x, use_reentrant=False)
        y.sum().backward()
        assert x.grad is not None


class Dropping(nn.Module):
    """Layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.float().square().mean()


def test_dropout_that_is_computed_again_in_backward_is_that_of_a_gpu() -> None:
    forward = {}
    for checkpointed in (False, True):
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "activation_checkpointing": {"enabled": checkpointed},
        }  # fmt: skip
        found = plan(Dropping(), config, "2x24GB", batch={"x": torch.zeros(512, 64)}, loss=lambda loss: loss)
        forward[checkpointed] = max(each.alive["activations"] for each in found.timeline if each.phase == "forward")
    result = 512 * 64 * 4
    assert forward[False] > forward[True] + 2 * (result + result // 4), "a result and a mask of two layers"


def test_numbers_that_ranks_gather_are_what_this_one_has() -> None:
    wire = SilentWire(3)
    with without_values():
        own, out = torch.full((2,), 7, dtype=torch.int64), torch.empty(6, dtype=torch.int64)
        wire.all_gather(out, own, "gather")
    assert out.tolist() == [7] * 6


ONE_BUFFER = 135_000
"""Bytes of the largest bucket's slice: one run in thirty has one less of them at its peak, on neither side for a reason
that was found."""


@pytest.mark.parametrize("tier", list(TIERS))
@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_a_device_apart_has_what_the_meta_device_has(stage: str, tier: str, tmp_path: Path) -> None:
    """There host and device are two devices, so that nothing of one is taken for the other's."""
    case = Case(stage, tier, precision="bf16")
    if not case.is_possible:
        pytest.skip("the engine takes no such config")
    config = {**case.config(tmp_path), "activation_checkpointing": {"enabled": True, "cpu_offload": True}}
    log = Log()
    with Border(log), Alive(1) as alive:
        with META:
            net = Net()
        mesh = dry_mesh(4, 3, platform=lambda device: DryPlatform(device, log))
        engine = shardengine.initialize(net, config, mesh=mesh)
        for _ in range(4):
            alive.peak = 0
            engine.backward(engine(torch.empty(5, 8, device=META)).float().square().mean())
            engine.step()
        on_meta, rests = alive.peak, alive.bytes_now()
        engine.close()
    found = dry_run(
        lambda mode: without_weights(Net(), mode), lambda: {"x": torch.zeros(5, 8)}, config, ModelPlace(4, 3, grain=1),
        lambda y: y.float().square().mean(),
    )  # fmt: skip
    assert found.at_rest.bytes == pytest.approx(rests, rel=0.002)
    assert found.peak.bytes == pytest.approx(on_meta, abs=ONE_BUFFER)
    assert TIERS[tier] == {} or found.host_peak.bytes > 0


def test_a_plan_beside_a_training_in_another_thread_is_none_of_its_business() -> None:
    def losses(beside: bool) -> list[float]:
        torch.manual_seed(0)
        engine = shardengine.initialize(Tied(), CONFIG)
        found, ends = [], threading.Event()

        def planning() -> None:
            while not ends.is_set():
                plan_of(Tied())

        others = [threading.Thread(target=planning) for _ in range(2 * beside)]
        for other in others:
            other.start()
        x = torch.ones(4, 64)
        for _ in range(30):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        ends.set()
        for other in others:
            other.join()
        engine.close()
        return found

    alone = losses(beside=False)
    assert losses(beside=True) == alone and alone[-1] < alone[0]


def test_random_numbers_and_modes_of_the_user_stay() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with torch.no_grad(), torch.device("meta"):
        assert plan(Tied(), CONFIG, "2x24GB", batch={"x": torch.zeros(4, 64, device="cpu")}).device.peak > 0
        assert not torch.is_grad_enabled() and torch.empty(1).is_meta
    assert torch.equal(torch.rand(3), expected)
