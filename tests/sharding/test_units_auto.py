"""``"units": "auto"``: which modules are gathered as one in models of every shape, and that it changes no bit.

Owns: the models, the units that are expected of them, and stage 3's live window counted from outside. Must not know how
the walk decides.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardengine.budget import memory
from shardengine.errors import UsageError
from shardengine.runtime.unit import UnshardState
from shardengine.sharding.partition import sharded_units
from tests import oracle
from tests.stages.test_memory import live_storages, only_new_tensors, spare_bytes
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.parts import is_hidden
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
WIDTH, VOCAB, STEPS = 16, 301, 3

# The models; each takes [rows, WIDTH] or, where it has an ``embed``, [rows, tokens] of ids


def plain(depth: int = 24) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))


def nested() -> nn.Module:
    def stage() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(stage(), nn.Sequential(stage(), stage())), stage())


class Attributes(nn.Module):
    """Blocks as attributes, and nothing that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.block3, self.block4 = (
            nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH)) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.block1, self.block2, self.block3, self.block4):
            x = x + block(x) * self.scale
        return x


class Dictionary(nn.Module):
    """Blocks in a ModuleDict, called in another order than registered."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abcdef"})

    def forward(self, x: Tensor) -> Tensor:
        for name in "fbacde":
            x = torch.tanh(self.parts[name](x))
        return x


class Residual(nn.Module):
    """A block of a convolutional network."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.down = None if before == after else nn.Conv2d(before, after, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.down is None else self.down(x)))


WIDTHS = ((4, 4), (4, 8), (8, 16))


class Convolutional(nn.Module):
    """Stages of two blocks each, that grow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(Residual(before, after), Residual(after, after)) for before, after in WIDTHS
        )
        self.fc = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x.view(-1, 1, 4, 4))))
        for stage in (self.layer1, self.layer2, self.layer3):
            x = stage(x)
        return self.fc(x.mean((2, 3)))


class Language(nn.Module):
    """An embedding and a head that are most of the model, over a small body."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.hidden(ids))


class HeadRead(Language):
    """A fused loss would do so: the head is never called. The embedding is called, and read once more."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.hidden(ids).to(self.lm_head.weight.dtype)
        return functional.linear(x, self.lm_head.weight) + functional.linear(x, self.embed.weight)


class ReadFirst(Language):
    """A head's weight is used before the head is called, so that its backward is over before the weight's."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.hidden(ids)
        x = x + torch.tanh(x @ self.lm_head.weight.t()) @ self.lm_head.weight / VOCAB
        return self.lm_head(x)


class ReadAndRecomputed(Language):
    """The read is repeated in backward."""

    def forward(self, ids: Tensor) -> Tensor:
        return checkpoint(lambda x: functional.linear(x, self.lm_head.weight), self.hidden(ids), use_reentrant=False)


class Uncalled(nn.Module):
    """Runs a unit's method instead of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(part.forward(x))
        return x


class Attention(nn.Module):
    """torch's own layers, which read weights of children that they do not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :].repeat(1, 3, 1) * torch.tensor([[1.0], [0.5], [-0.5]])
        x = x + self.first(x, x, x, need_weights=False)[0]
        return self.recurrent(self.encoder(x))[0][:, -1]


class Expert(nn.Module):
    """Twelve experts, of which a micro-batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.route = 0
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.experts[self.route](x))


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "24 equal layers": (plain, [str(number) for number in range(24)]),
    "nested": (nested, ["0", "1.0", "1.1", "2.0", "2.2"]),
    "attributes": (Attributes, [f"block{number}" for number in range(1, 5)]),
    "dictionary": (Dictionary, [f"parts.{name}" for name in "abcdef"]),
    "convolutional": (Convolutional, ["layer2.0", "layer2.1", "layer3.0", "layer3.1"]),
    "untied": (lambda: Language(tied=False), ["embed", "layers.0", "layers.1", "layers.2", "lm_head"]),
    "tied": (lambda: Language(tied=True), ["layers.0", "layers.1", "layers.2"]),
    "read, not called": (lambda: HeadRead(tied=False), ["embed", "layers.0", "layers.1", "layers.2", "lm_head"]),
    "read before called": (lambda: ReadFirst(tied=False), ["embed", "layers.0", "layers.1", "layers.2", "lm_head"]),
    "read again": (lambda: ReadAndRecomputed(tied=False), ["embed", "layers.0", "layers.1", "layers.2", "lm_head"]),
    "methods": (Uncalled, [f"parts.{number}" for number in range(6)]),
    "attention": (Attention, ["first", *(f"encoder.layers.{number}" for number in range(3)), "recurrent"]),
    "experts": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Expert(), Expert()), ["1", "2"]),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(31)
    return MODELS[name][0]()


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """Data by (step, rank, micro); ids where the model has an embedding."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    bare = getattr(model, "module", model)
    if isinstance(bare, Language):
        ids = torch.randint(0, VOCAB, (2, 5))
        return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    return (model(torch.randn(4, WIDTH)) - torch.randn(4, WIDTH)).square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_the_units_are_what_is_worth_a_gather(name: str) -> None:
    assert [found for found, _ in sharded_units(make(name), "auto")] == MODELS[name][1]


@pytest.mark.parametrize("name", MODELS)
def test_listed_classes_are_not_split_further(name: str) -> None:
    model = make(name)
    kind = next(type(m).__name__ for m in model.modules() if not list(m.children()) and list(m.parameters()))
    found = sharded_units(model, (kind,))
    assert found and all(type(module).__name__ == kind for _, module in found)


# The same bits


def train(name: str, stages: list[str], micros: int) -> list[dict[str, Any]]:
    results = []
    for stage in stages:
        # one unit ahead at most, so that units come and go
        config = cases.config_of(stage, micros, zero={"reduce_bucket_size": 600, "stage3_prefetch_bucket_size": 1})
        engine = cases.make_engine(make(name), config)
        results.append(cases.run_steps(engine, STEPS, loss_of))
        assert all(unit.state is UnshardState.SHARDED for unit in engine._core.units) or stage in ("0", "1", "2")
        engine.close()
    return results


@functools.lru_cache(maxsize=200)
def truth(name: str, ranks: int, micros: int, order: str) -> oracle.Trace:
    model = make(name)
    return oracle.train(
        model, loss_of, ranks=ranks, micros=micros, steps=STEPS, kind="AdamW",
        groups=cases.groups_of(model, "AdamW"), order=order, clip=cases.CLIP,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_oracle_at_every_stage(pools: Pools, name: str, ranks: int) -> None:
    micros = 2 if ranks == 2 else 1
    results = pools(ranks).run(train, name, list(cases.STAGES), micros)
    for number, stage in enumerate(cases.STAGES):
        order = cases.LETTER[stage] if micros > 1 else "full"
        assert_equal_to_truth([rank[number] for rank in results], truth(name, ranks, micros, order), f"stage {stage}")


def evaluate(name: str) -> list[bool]:
    """Whether an evaluation, with torch's fast path, gives what the plain model gives; before and after training."""
    reference = make(name).eval()
    engine = cases.make_engine(make(name), cases.config_of("3"))
    same = []
    for _ in range(2):
        engine.module.eval()
        with torch.no_grad():
            found, expected = loss_of(engine, 0, 0, 0), loss_of(reference, 0, 0, 0)
        same.append(torch.equal(found, expected))
    engine.close()
    return same


@pytest.mark.parametrize("name", ["attention", "read, not called", "methods", "untied"])
def test_evaluates_as_the_plain_model(pools: Pools, name: str) -> None:
    assert pools(2).run(evaluate, name) == [[True, True]] * 2


def read_outside(name: str) -> dict[str, Any]:
    """A head's weight in a loss of the script's own, outside of any forward."""
    engine = cases.make_engine(make(name), cases.config_of("3"))
    module: Any = engine.module
    said = ""
    try:
        ids = torch.arange(10).view(2, 5)
        hidden = module.hidden(ids)
        engine.backward(functional.linear(hidden, module.lm_head.weight).square().mean())
    except UsageError as error:
        said = str(error)
    shape, dtype = tuple(module.lm_head.weight.shape), module.lm_head.weight.dtype
    state = next(unit.state for unit in engine._core.units if unit.name == "lm_head")
    engine.close()
    after = type(module.lm_head._parameters) is dict and not is_hidden(module.lm_head.weight)
    return {"said": said, "shape": shape, "dtype": dtype, "state": state, "after": bool(after)}


def test_a_read_outside_of_any_forward_is_refused_by_name(pools: Pools) -> None:
    for found in pools(2).run(read_outside, "untied"):
        assert "parameter 'lm_head.weight' (rank" in found["said"] and "was read by linear while" in found["said"]
        assert "engine.full_params()" in found["said"]
        assert found["shape"] == (VOCAB, WIDTH) and found["dtype"] is torch.float32
        assert found["state"] is UnshardState.SHARDED, "metadata is read without a gather"
        assert found["after"]


class Listening(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def heard(name: str, zero: dict[str, Any], least: int = 0) -> list[str]:
    """What is logged. least: bytes of weights of which something is said."""
    listening, log = Listening(), logging.getLogger("shardengine")
    log.addHandler(listening)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "_WORTH_TELLING", least)
            engine = cases.make_engine(make(name), cases.config_of("3", zero=zero))
        cases.run_steps(engine, 2, loss_of)
        engine.close()
    finally:
        log.removeHandler(listening)
    return listening.lines


def test_what_is_kept_because_it_is_read_is_said_once(pools: Pools) -> None:
    first, second = pools(2).run(heard, "read, not called", {"stage3_prefetch_bucket_size": 0})
    said = [line for line in first if "is read outside" in line]
    assert len(said) == 2 and not second
    assert "'lm_head.weight'" in said[0] and "'embed.weight'" in said[1] and "zero_optimization.units" in said[0]


@pytest.mark.parametrize(
    ("name", "zero", "said"),
    [
        ("24 equal layers", {"stage3_prefetch_bucket_size": 0}, None),
        ("24 equal layers", {}, "set zero_optimization.stage3_prefetch_bucket_size to 3"),
        ("24 equal layers", {"units": ["Sequential"]}, None),
        ("tied", {"stage3_prefetch_bucket_size": 0}, "stays in the root: embed.weight (Embedding)"),
    ],
)
def test_a_live_window_of_more_than_half_is_announced(
    pools: Pools, name: str, zero: dict[str, Any], said: str | None
) -> None:
    if zero.get("units"):
        name = "nested"
        said = "list the classes of smaller modules in zero_optimization.units"
    first, second = pools(2).run(heard, name, zero)
    window = [line for line in first if "is more than half" in line]
    assert not second and len(window) == (said is not None)
    assert said is None or said in window[0]


def test_of_a_small_model_it_is_not(pools: Pools) -> None:
    least = memory._WORTH_TELLING
    assert least >= 1 << 20
    first, _ = pools(2).run(heard, "24 equal layers", {}, least)
    assert not [line for line in first if "is more than half" in line]


# What is whole, counted from outside


class Wide(nn.Module):
    """An embedding and a head that dwarf everything, six layers between them."""

    def __init__(self, width: int = 64, vocabulary: int = 1024) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = nn.Sequential(*(nn.Linear(width, 4 * width) if n % 2 else nn.Linear(4 * width, width)
                                    for n in (1, 2, 3, 4, 5, 6)))  # fmt: skip
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.body(self.embed(ids)))


def count_peak() -> dict[str, Any]:
    """Bytes of weights that are alive as each module runs, and who is whole then."""
    rows: list[tuple[str, int, tuple[str, ...]]] = []
    with only_new_tensors():
        torch.manual_seed(5)
        model = Wide()
        engine = cases.make_engine(model, cases.config_of("3", zero={"stage3_prefetch_bucket_size": 0}), None)
        gc.collect()
        rest = sum(live_storages().values())
        units = engine._core.units

        def note(name: str) -> None:
            whole = tuple(unit.name for unit in units[1:] if unit.state is not UnshardState.SHARDED)
            weights = sum(
                flat_buffer.flat.untyped_storage().nbytes() for unit in units for flat_buffer in unit.flat_buffers
            )
            alive = sum(live_storages().values()) - rest - spare_bytes(engine)
            rows.append((name, weights, (str(alive >= weights), *whole)))

        def after(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
                assert output.grad_fn is not None
                output.grad_fn.register_prehook(lambda _gradients: note(f"backward of {name}"))

            return hook

        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_pre_hook(lambda _module, _args, name=name: note(name))
                module.register_forward_hook(after(name))
        ids = torch.zeros(1, 1, dtype=torch.long)
        engine.backward(engine(ids).square().mean())
        memory = engine.memory()
        engine.close()
    return {"rows": rows, "memory": memory, "names": [unit.name for unit in units]}


def test_the_live_window_is_the_formula(pools: Pools) -> None:
    large, layer = 1024 * 64, 4 * 64 * 64
    for found in pools(2).run(count_peak):
        memory, rows = found["memory"], found["rows"]
        assert found["names"] == ["the root", "embed", *(f"body.{n}" for n in range(6)), "lm_head"]
        assert memory["units"] == 8 and memory["root_bytes"] == 0
        assert memory["largest_unit_bytes"] == 4 * large and 4 * layer < memory["smallest_unit_bytes"] < 4.1 * layer
        assert max(weights for _, weights, _ in rows) == memory["live_window_bytes"] == 4 * large
        for name, _, (alive, *whole) in rows:
            assert alive == "True"
            expected = [] if name == "backward of embed" else [name.removeprefix("backward of ")]
            assert whole == expected, f"{name}: {whole}"


def count_gathers(micros: int) -> list[list[str]]:
    """The units that are gathered in each of two steps, in order."""
    engine = cases.make_engine(make("untied"), cases.config_of("3", micros, zero={"stage3_prefetch_bucket_size": 0}))
    steps: list[list[str]] = []
    for unit in engine._core.units:
        original = unit.unshard

        def gather(*args: Any, original: Any = original, name: str = unit.name) -> None:
            steps[-1].append(name)
            original(*args)

        unit.unshard = gather  # type: ignore
    for step in range(2):
        steps.append([])
        for micro in range(micros):
            engine.backward(loss_of(engine, step, dist.get_rank(), micro))
            engine.step()
    found = [list(row) for row in steps]  # closing gathers everything once more
    engine.close()
    return found


def test_the_embedding_is_gathered_for_forward_only_and_the_head_once(pools: Pools) -> None:
    layers = ["layers.0", "layers.1", "layers.2"]
    once = ["the root", "embed", *layers, "lm_head", *layers[::-1]]
    for steps in pools(2).run(count_gathers, 2):
        assert steps == [once * 2] * 2
