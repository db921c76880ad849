"""What a config leaves to "auto" is what a plan says is fastest and fits, the same on every rank, and nothing else
changes: an engine of what was decided has the bits of one whose config says so."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardengine
from shardengine import Hardware, Plan, choose
from shardengine.config import MICRO, STAGE, load_or_default, provisional
from shardengine.errors import MismatchError, UsageError
from shardengine.planner import Rates, automatic
from tests.support.raising import raises
from tests.support.ranks import RankPool

WIDTH = 64
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3}}


class Net(nn.Module):
    """Whose activations are larger than its weights. Returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))
                                    for _ in range(2))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


BATCH = {"x": torch.zeros(1, 32, WIDTH)}
RATES = Rates(dict.fromkeys(("fp32", "bf16", "fp16", "fp64"), 1e10), 1e9)


def square(returned: Tensor) -> Tensor:
    return returned.square().mean()


def plan_of(config: Any, has: int) -> Plan:
    micro = config[MICRO]
    where = Hardware(1, has, is_gpu=False)
    return shardengine.plan(Net(), config, where, batch={"x": torch.zeros(micro, 32, WIDTH)}, loss=square, rates=RATES)


def made(config: Any, *, has: int = 1 << 33, least: int | None = None, **more: Any) -> shardengine.Engine:
    """An engine of ``config`` on ranks with ``has`` bytes each, rank 1 with ``least``."""

    def machine(device: torch.device, ranks: int, config: Any) -> Hardware:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return Hardware(ranks, least if least and rank == 1 else has, is_gpu=False)

    given: Any = {"batch": BATCH, "loss": square, **more}
    torch.manual_seed(0)
    with patch.object(automatic, "this_machine", machine), patch.object(automatic, "measured", lambda **_: RATES):
        return shardengine.initialize(given.pop("model", None) or Net(), config, **given)


def sizes_of(engine: shardengine.Engine) -> tuple[int, int | None, int | None]:
    config = engine.config
    return config.zero_optimization.stage, config.train_micro_batch_size_per_gpu, config.train_batch_size


def test_it_is_the_fastest_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    base = {"optimizer": OPTIMIZER, "train_batch_size": 8, "zero_optimization": {"stage": "auto"}, MICRO: "auto"}
    has = 3_500_000
    plans = [plan_of({**base, "zero_optimization": {"stage": 0}, MICRO: micro}, has) for micro in (1, 2, 4, 8)]
    assert plans[1].fits and not plans[-1].fits, "neither the least nor all"
    best = min(filter(lambda each: each.fits, plans), key=lambda each: each.time.seconds if each.time else 0.0).config
    with caplog.at_level(logging.WARNING, "shardengine"):
        engine = made(base, has=has)
    assert sizes_of(engine) == (0, best.train_micro_batch_size_per_gpu, 8)
    assert [engine.config.sources[name] for name in (STAGE, MICRO)] == ["auto", "auto"]
    said = [record.getMessage() for record in caplog.records if '"auto" in the config' in record.getMessage()]
    assert len(said) == 1 and f"{STAGE} is 0, {MICRO} is {sizes_of(engine)[1]}; by " in said[0]
    assert "memory: fits, " in said[0] and f"micro-batches of {sizes_of(engine)[1]} × 32 × {WIDTH}" in said[0]
    engine.close()


def test_what_the_config_says_stays() -> None:
    base = {"optimizer": OPTIMIZER, "gradient_accumulation_steps": 3, MICRO: "auto", "activation_checkpointing":
            {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}  # fmt: skip
    engine = made(base)
    assert sizes_of(engine) == (2, 64, 3 * 64)
    zero = engine.config.zero_optimization
    assert zero.offload_optimizer.device == "cpu" and engine.config.activation_checkpointing.enabled
    engine.close()


@pytest.mark.parametrize("key", ["zero_optimization", "zero_optimization.stage"])
def test_a_stage_goes_with_the_rest(key: str) -> None:
    """With weights on the host there is one stage that does, wherever "auto" is written."""
    base: dict[str, Any] = {"optimizer": OPTIMIZER, "train_batch_size": 2}
    base["zero_optimization"] = {"offload_param": {"device": "cpu"}}
    base |= {key: "auto"} if "." in key else {key: {**base[key], "stage": "auto"}}
    engine = made(base)
    assert sizes_of(engine) == (3, 2, 2)
    engine.close()


@pytest.mark.parametrize("steps", [2, 2.0])
def test_sizes_that_follow_are_not_planned(steps: float) -> None:
    base = {"optimizer": OPTIMIZER, MICRO: "auto", "train_batch_size": 8, "gradient_accumulation_steps": steps}
    with patch.object(automatic, "search", None):
        engine = made(base)
    assert sizes_of(engine) == (0, 4, 8)
    engine.close()


def test_a_file_and_an_optimizer_of_the_users(tmp_path: Path) -> None:
    path, model = tmp_path / "config.json", Net()
    tree = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "train_batch_size": 4, MICRO: "auto"}
    path.write_text(json.dumps(tree), encoding="utf-8")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = made(path, model=model.eval(), optimizer=torch.optim.AdamW(model.parameters(), lr=0.25))
    assert engine.get_lr() == [0.25] and not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    engine.close()


class Draws(Net):
    """Random numbers, of three generators."""

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + random.random() + float(numpy.random.rand())
        return nn.functional.dropout(super().forward(x), 0.5) * torch.rand(1) * scale


def test_random_numbers_are_those_of_a_run_that_says_the_same() -> None:
    base = {"optimizer": OPTIMIZER, "train_batch_size": 2}
    drawn = []
    for stage in ("auto", 0):
        random.seed(3)
        numpy.random.seed(3)
        made({**base, "zero_optimization": {"stage": stage}}, model=Draws()).close()
        drawn.append([*torch.rand(3).tolist(), random.random(), numpy.random.rand()])
    assert drawn[0] == drawn[1]


def test_nothing_fits() -> None:
    base = {"optimizer": OPTIMIZER, "train_batch_size": 1, "zero_optimization": {"stage": "auto"}}
    with pytest.raises(UsageError, match=r'^zero_optimization.stage: "auto", but nothing fits; the') as raised:
        made(base, has=2_300_000)
    assert "it would fit with states of 8 bits" in str(raised.value), raised.value
    with pytest.raises(UsageError, match=r"it would fit with activation_checkpointing.enabled") as raised:
        made(base, has=4_250_000, batch={"x": torch.zeros(1, 256, WIDTH)})


class Asks(Net):
    """For values."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y[y > 0]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"batch": None}, "expected batch=, a mapping of what Net.forward takes"),
        ({"loss": None}, "expected forward to return a loss"),
        ({"model": Asks()}, "the model's shapes depend on data"),
        ({"batch": {"y": torch.zeros(1, 2)}}, "unexpected keyword argument 'y'"),
        ({"batch": {"x": 3.0}}, "expected batch= of tensors"),
    ],
)
def test_no_plan_can_be_made(more: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture) -> None:
    base = {"optimizer": OPTIMIZER, "train_batch_size": 4}
    with pytest.raises(UsageError, match=rf'^{STAGE}: "auto" cannot be decided: .*{why}.*write a value'):
        made({**base, "zero_optimization": {"stage": "auto"}}, **more)
    with caplog.at_level(logging.WARNING, "shardengine"):
        engine = made({**base, MICRO: "auto"}, **more)
    assert sizes_of(engine) == (0, 4, 4)
    told = [each.getMessage() for each in caplog.records if "no plan was made" in each.getMessage()]
    assert len(told) == 1 and why in told[0]
    engine.close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"batch": [1]}, "expected batch to be a mapping of what the model's forward takes"),
        ({"loss": 3}, "expected loss to be a function of what the model's forward returns"),
    ],
)
def test_arguments_of_another_kind(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made({"optimizer": OPTIMIZER, "train_batch_size": 4}, **more)


def test_a_model_that_belongs_to_an_engine() -> None:
    base = {"optimizer": OPTIMIZER, "train_batch_size": 4, "zero_optimization": {"stage": "auto"}}
    engine = made(base)
    with raises("model-already-in-engine"):
        made(base, model=engine.module)
    engine.close()


def test_there_is_nothing_to_plan_without_an_optimizer() -> None:
    with raises("auto-without-optimizer"):
        made({"train_batch_size": 2, "zero_optimization": {"stage": "auto"}})


def test_other_mistakes_of_a_config_are_told_as_always() -> None:
    with pytest.raises(shardengine.ConfigError, match="unknown key") as raised:
        made({"optimizer": OPTIMIZER, "zero_optimization": {"stage": "auto", "overlap_com": True}, MICRO: 1})
    assert len(raised.value.problems) == 1, raised.value.problems


def test_adapters_and_no_batch() -> None:
    """peft's wrapper says nothing of what its forward takes."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    whole = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    model = peft.get_peft_model(whole, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    engine = made({"optimizer": OPTIMIZER, MICRO: "auto"}, model=model, batch=None, loss=None)
    assert sizes_of(engine)[0] == 0
    engine.close()


def test_what_stands_there_until_it_is_decided() -> None:
    open_ = {"zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}}}
    assert provisional({**open_, MICRO: "auto"}) == {STAGE: 3, MICRO: 1}
    assert provisional({**open_, MICRO: 1}) == {STAGE: 3}
    assert provisional({MICRO: 1}) == {} == provisional({"tpyo": 1})
    assert load_or_default({**open_, MICRO: "auto", "timeout_s": 7}).timeout_s == 7
    assert load_or_default({MICRO: "auto", "timeout_s": 7}).timeout_s == 7
    assert shardengine.load_config({MICRO: 1, "zero_optimization": {"stage": 1}}).zero_optimization.stage == 1


# On ranks


def on_ranks(least: int | None) -> tuple[int, int | None, int | None]:
    tree = {"optimizer": OPTIMIZER, MICRO: "auto", "zero_optimization": {"stage": "auto"}}
    engine = made(tree, has=1 << 33, least=least)
    found = sizes_of(engine)
    engine.close()
    return found


def test_the_rank_with_the_least_memory_counts(pools: Callable[[int], RankPool]) -> None:
    rich, poor = (pools(2).run(on_ranks, least) for least in (None, 3_000_000))
    assert rich[0] == rich[1] and poor[0] == poor[1]
    assert rich[0][1] == 64 and 0 < poor[0][1] < 16


def trained(stage: Any, micro: Any) -> list[Tensor]:
    """Losses and weights of three steps of four samples of each rank."""
    base = {"optimizer": OPTIMIZER, "train_batch_size": 8, "zero_optimization": {"stage": stage}, MICRO: micro}
    engine = made(base, has=3_500_000)
    size, steps, said = sizes_of(engine)[1] or 0, engine.gradient_accumulation_steps(), []
    numbers = torch.Generator().manual_seed(engine.rank)
    for _ in range(3):
        samples = torch.randn(4, 32, WIDTH, generator=numbers)
        for place in range(steps):
            loss = square(engine(samples[place * size : (place + 1) * size]))
            engine.backward(loss)
            engine.step()
            said.append(loss.detach())
    said += [torch.tensor([sizes_of(engine)[0], size]), *(value.clone() for value in engine.state_dict().values())]
    engine.close()
    return said


def test_the_bits_are_those_of_a_run_whose_config_says_the_same(pools: Callable[[int], RankPool]) -> None:
    auto = pools(2).run(trained, "auto", "auto")
    stage, micro = next(each for each in auto[0] if each.dtype == torch.int64).tolist()
    said = pools(2).run(trained, stage, micro)
    assert micro in (1, 2) and len(auto[0]) == len(said[0]) > 10
    for one, other in zip(auto, said, strict=True):
        assert all(map(torch.equal, one, other))


def no_batch_on(rank: int) -> str:
    given: dict[str, Any] = {} if torch.distributed.get_rank() != rank else {"batch": None}
    try:
        made({"optimizer": OPTIMIZER, "train_batch_size": 2, "zero_optimization": {"stage": "auto"}}, **given)
    except (UsageError, MismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_cannot_plan_is_an_error_on_all(pools: Callable[[int], RankPool]) -> None:
    first, second = pools(2).run(no_batch_on, 0)
    assert first.startswith('UsageError: zero_optimization.stage: "auto" cannot be decided: ')
    assert second.startswith("MismatchError: ") and "failed on rank 0: UsageError: zero_optimization.stage: " in second
    assert pools(2).run(no_batch_on, 1) == ["", ""]


def on_a_device_mesh() -> tuple[str, int]:
    base = {"optimizer": OPTIMIZER, "train_batch_size": 4, "zero_optimization": {"stage": "auto"}}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    engine = made(base, mesh=mesh)
    found = engine._core.stage.name, engine.config.zero_optimization.stage
    engine.close()
    return found


def test_a_hybrid_mesh(pools: Callable[[int], RankPool]) -> None:
    found = pools(4).run(on_a_device_mesh)
    assert len(set(found)) == 1 and found[0][1] > 0 and "hybrid" in found[0][0]


def decided_on_rank(stages: list[Any], clipping: list[float]) -> str:
    """Ranks whose files say something else."""
    rank = torch.distributed.get_rank()
    base = {"optimizer": OPTIMIZER, "train_batch_size": 2, "gradient_clipping": clipping[rank]}
    try:
        with patch.object(automatic, "search", None):  # nothing is planned
            made({**base, "zero_optimization": {"stage": stages[rank]}})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_that_do_not_all_leave_it_open(pools: Callable[[int], RankPool]) -> None:
    told = pools(2).run(decided_on_rank, ["auto", 1], [1.0, 1.0])
    assert all("MismatchError" in each for each in told), told
    told = pools(2).run(decided_on_rank, ["auto", "auto"], [1.0, 2.0])
    assert all("MismatchError: the config differs between ranks: rank 0 has " in each for each in told), told


def test_choose_tries_what_it_did() -> None:
    """That a part can be fixed changes nothing where all is open."""
    base = {"optimizer": OPTIMIZER, "train_batch_size": 4}
    found = choose(Net(), base, "2x24GB", batch=BATCH, loss=square)
    assert {row.candidate.stage for row in found.rows} == {0, 1, 2, 3}
    assert {row.candidate.again for row in found.rows} == {True, False}


def test_no_plan_writes_what_a_monitor_would(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of one rank, which is the first: a run's own file may be there. Nor are notices of the config told by plans."""
    file = {"enabled": True, "output_path": str(tmp_path / "logs"), "job_name": "run"}
    base = {"optimizer": OPTIMIZER, "train_batch_size": 4, "csv_monitor": file, "zero_optimization": {"stage": "auto"}}
    said = {**base, "zero_optimization": {"stage": 1}}
    with caplog.at_level(logging.INFO, "shardengine"):
        shardengine.plan(Net(), said, "24GB", batch={"x": torch.zeros(4, 32, WIDTH)}, loss=square)
        choose(Net(), said, "24GB", batch=BATCH, loss=square)
    assert not list(tmp_path.iterdir()) and "csv_monitor" not in caplog.text
    made(base).close()
    assert [path.name for path in (tmp_path / "logs").rglob("*.csv")] == ["metrics.csv"]


def test_it_ends_in_time() -> None:
    """Of rank 0 the others wait for no longer than a part of their patience."""
    base = {"optimizer": OPTIMIZER, "train_batch_size": 2, "zero_optimization": {"stage": "auto"}, "timeout_s": 1e-3}
    with raises("auto-not-decided", "it takes more than 0.0008 s"):
        made(base)


def heard() -> tuple[Any, Any]:
    """Where and how fast is what a plan is asked for, on nodes of one rank each with other memory."""
    asked: list[Any] = []

    def listen(question: Any, where: Hardware, rates: Rates) -> Any:
        asked.extend((where, rates))
        raise UsageError("enough")

    def machine(device: torch.device, ranks: int, config: Any) -> Hardware:
        rank = torch.distributed.get_rank()
        return Hardware(ranks, (8 + rank) << 30, (64 - rank) << 30, None if rank else 1 << 40, 1)

    with patch.object(automatic, "this_machine", machine), patch.object(automatic, "search", listen):
        engine = shardengine.initialize(Net(), {"optimizer": OPTIMIZER, MICRO: "auto", "train_batch_size": 2})
    engine.close()
    if not asked:
        return None, None
    return asked[0], {name: speed._asdict() for name, speed in asked[1].groups.items()}


def test_a_plan_is_for_the_least_of_each_tier_and_links_as_they_are(pools: Callable[[int], RankPool]) -> None:
    (where, groups), other = pools(2).run(heard)
    assert other == (None, None), "rank 0 plans"
    assert (where.device_bytes, where.host_bytes, where.node_ranks) == (8 << 30, 63 << 30, 1)
    assert groups.keys() == {"gather", "reduce"} and all(each["s_per_byte"] > 0 for each in groups.values())
