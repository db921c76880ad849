"""Names of other engines: each has an answer, every answer names what exists, and nothing else is answered so."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import pkgutil
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import shardengine
from shardengine.app import cli
from shardengine.config.schema import KEYS, SECTIONS
from shardengine.core.inspection import Inspection
from shardengine.errors import UsageError
from shardengine.other_engines import ARGUMENTS, ENGINE, OPTIMIZER, PACKAGE
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

TABLES: dict[str, Mapping[str, str]] = {
    "engine": ENGINE,
    "optimizer": OPTIMIZER,
    "package": PACKAGE,
    **ARGUMENTS,
}
SCRIPTS = """
    save_16bit_model save_fp16_model destroy module_state_dict load_module_state_dict allreduce_gradients loss_scale
    cur_scale empty_partition_cache managed_gradient_accumulation global_rank set_requires_gradient_sync reshard unshard
    set_reshard_after_forward summon_full_params full_optim_state_dict sharded_state_dict
    unwrap_model gather_full_optim_state_dict get_mom gradient_clipping fp16_enabled bfloat16_enabled
    get_data_parallel_rank get_batch_info overflow wait_for_everyone is_main_process train_batch
"""
"""What scripts that were written for other engines call, and this engine has not."""


class Net(nn.Module):
    """Has one name that is in the table, and properties that raise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.embed_dim = 3

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def destroy(self) -> str:
        return "the model's own"

    @property
    def broken(self) -> Any:
        return self.linear.nothing_of_the_kind

    @property
    def misspelt(self) -> Any:
        return [].lenght  # type: ignore[attr-defined]


@pytest.fixture
def engine() -> Iterator[Any]:
    made = cases.make_engine(Net(), cases.config_of("0"), "SGD")
    yield made
    made.close()


# The table


def test_names_that_exist_here_are_in_no_table(engine: Any) -> None:
    assert not ENGINE.keys() & {*dir(shardengine.Engine), *vars(engine)}
    assert not OPTIMIZER.keys() & {*dir(type(engine.optimizer)), *vars(engine.optimizer)}
    modules = {module.name for module in pkgutil.iter_modules(shardengine.__path__)}
    assert not PACKAGE.keys() & {*vars(shardengine), *shardengine.__all__, *modules}


def test_names_that_every_module_has_are_in_no_table() -> None:
    """They would never be looked up in it."""
    assert not ENGINE.keys() & set(dir(nn.Module()))
    assert not OPTIMIZER.keys() & set(dir(torch.optim.Optimizer))


@pytest.mark.parametrize("other", [DistributedDataParallel, FullyShardedDataParallel, FSDPModule])
def test_every_public_method_of_torchs_engines_has_an_answer(other: type, engine: Any) -> None:
    theirs = {name for name in dir(other) if not name.startswith("_")}
    inner = {"to_kwargs"}
    assert theirs - inner <= ENGINE.keys() | set(dir(engine)) | set(dir(nn.Module())) | vars(engine).keys()


def test_every_public_method_of_torchs_sharded_optimizer_has_an_answer(engine: Any) -> None:
    theirs = {name for name in dir(ZeroRedundancyOptimizer) if not name.startswith("_")}
    assert theirs <= OPTIMIZER.keys() | set(dir(engine.optimizer))


def test_what_scripts_call_has_an_answer() -> None:
    assert set(SCRIPTS.split()) <= ENGINE.keys()


ATTRIBUTES = {"module", "optimizer", "lr_scheduler", "config", "global_steps", "global_samples"}
"""What an engine has from its start on, beside what its class has."""


def resolve(path: list[str]) -> Any:
    """What ``engine.a.b`` or ``shardengine.a`` is, on the classes; AttributeError where it is not there."""
    if path[0] == "shardengine":
        return getattr(shardengine, path[1])
    assert path[0] == "engine"
    if path[1] == "config":
        value: Any = shardengine.Config()
        for part in path[2:]:
            value = getattr(value, part)
        return value
    if path[1] == "optimizer" and len(path) > 2:
        return path[2] == "param_groups" or getattr(torch.optim.Optimizer, path[2])
    assert len(path) == 2, path
    if path[1] in ATTRIBUTES:
        return None
    return getattr(shardengine.Engine, path[1], None) or getattr(nn.Module, path[1])


def check_code(code: str) -> None:
    """That a call or an attribute exists, and takes the keyword arguments that are shown."""
    for node in ast.walk(ast.parse(code + (" pass" if code.startswith("with ") else ""))):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Store):
            found = resolve(ast.unparse(node).split("."))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found = resolve(ast.unparse(node.func).split("."))
            assert callable(found)
            takes = inspect.signature(found).parameters
            assert {keyword.arg for keyword in node.keywords} <= takes.keys()
            assert len(node.args) <= len(takes)


SENTENCES = [(table, name, text) for table, rows in TABLES.items() for name, text in rows.items()]


def test_every_answer_names_only_what_exists() -> None:
    for table, name, text in SENTENCES:
        for quoted in re.findall("`([^`]+)`", text):
            where = f"{table}: {name}: {quoted}"
            if quoted.startswith("shardengine "):
                assert all(f'"{option}"' in inspect.getsource(cli) for option in quoted.split() if option[0] == "-"), (
                    where
                )
            elif "engine" in quoted.partition("(")[0]:
                if quoted == "engine(...)":
                    continue
                try:
                    check_code(quoted)
                except (AssertionError, AttributeError, KeyError, SyntaxError) as error:
                    raise AssertionError(where) from error
            else:
                assert quoted in KEYS or quoted in SECTIONS or quoted == "loss.backward()", where
        for call in re.findall(r"(?<![\w`.])engine\.(\w+)", re.sub("`[^`]*`", "", text)):
            resolve(["engine", call])
        assert not text.endswith(".") and len(text) > 10 and text.count("`") % 2 == 0, name


def test_the_check_of_answers_can_fail() -> None:
    for code in ("engine.clse()", "engine.step(flsh=True)", "engine.config.fp61", "with engine.full_param():"):
        with pytest.raises((AssertionError, AttributeError, KeyError)):
            check_code(code)


# The engine


def test_the_engine_answers(engine: Any) -> None:
    for name in ENGINE.keys() - {"destroy"}:
        with pytest.raises(AttributeError) as caught:
            getattr(engine, name)
        text = str(caught.value)
        assert text == f"the engine has no {name!r}, and neither has the model Net: {ENGINE[name]}"
        assert not hasattr(engine, name) and getattr(engine, name, 5) == 5
        assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_what_the_model_has_is_the_models(engine: Any) -> None:
    assert engine.destroy() == "the model's own"
    assert engine.embed_dim == 3 and engine.linear is engine.module.linear


def test_an_unknown_name_gets_near_ones_of_both(engine: Any) -> None:
    def said(name: str) -> str:
        with pytest.raises(AttributeError) as caught:
            getattr(engine, name)
        return str(caught.value)

    start = "the engine has no {!r}, and neither has the model Net"
    assert said("save_pretraned") == start.format("save_pretraned") + "; did you mean engine.save_pretrained?"
    assert said("embed_dmi") == start.format("embed_dmi") + "; did you mean 'embed_dim' of the model?"
    assert said("qqqq") == start.format("qqqq")
    assert said("global_step").endswith("; did you mean engine.global_steps?")
    assert said("_private") == "Engine has no attribute '_private'"


def test_an_error_inside_of_a_property_stays_what_it_is(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_engine: Any) -> Any:
        return engine.config.no_such_key

    monkeypatch.setattr(Inspection, "rank", property(fails))
    with pytest.raises(AttributeError, match="'Config' object has no attribute 'no_such_key'"):
        _ = engine.rank
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'broken'"):
        _ = engine.broken
    with pytest.raises(AttributeError) as caught:
        _ = engine.misspelt
    assert "the engine has no" not in str(caught.value)


class Around(nn.Module):
    """Reads what it has not from another module, as wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "outer":
                raise AttributeError("the wrapper is not ready") from None
            return getattr(self.inner, name)


def test_a_wrapper_reads_through_and_keeps_its_own_errors() -> None:
    made: Any = cases.make_engine(Around(), cases.config_of("0"), "SGD")
    assert made.embed_dim == 3 and made.destroy() == "the model's own"
    with pytest.raises(AttributeError, match="the wrapper is not ready"):
        _ = made.outer
    with pytest.raises(AttributeError, match=r"neither has the model Around: call `engine\.save_pretrained"):
        _ = made.save_16bit_model
    made.close()


def ask(stage: str) -> list[str]:
    made: Any = cases.make_engine(Net(), cases.config_of(stage), "SGD")
    said = []
    for holder, name in ((made, "save_16bit_model"), (made.optimizer, "cur_scale")):
        try:
            getattr(holder, name)
        except AttributeError as error:
            said.append(str(error))
    made(torch.ones(1, 2)).sum().backward()  # the engine goes on
    made.step()
    made.close()
    try:
        _ = made.module_state_dict
    except AttributeError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_every_stage_answers_also_after_close(pools: Callable[[int], RankPool], stage: str) -> None:
    for said in pools(2).run(ask, stage):
        assert [text.partition("`")[2].partition("(")[0] for text in said] == [
            "engine.save_pretrained", "engine.get_loss_scale", "engine.state_dict",
        ]  # fmt: skip


KEYWORDS = [(call, keyword) for call, rows in ARGUMENTS.items() if call != "initialize" for keyword in rows]


@pytest.mark.parametrize(("method", "keyword"), KEYWORDS)
def test_a_keyword_of_another_engine_is_explained(engine: Any, method: str, keyword: str) -> None:
    assert keyword not in inspect.signature(getattr(engine, method)).parameters
    with pytest.raises(TypeError) as caught:
        getattr(engine, method)(**{keyword: True})
    assert str(caught.value) == f"engine.{method} has no argument '{keyword}': {ARGUMENTS[method][keyword]}"


@pytest.mark.parametrize("keyword", [*ARGUMENTS["initialize"], "gradient_clipping", "bf16"])
def test_an_argument_of_another_initialize_is_explained(keyword: str) -> None:
    assert keyword not in inspect.signature(shardengine.initialize).parameters
    call: Any = shardengine.initialize
    with pytest.raises(TypeError, match=rf"^shardengine.initialize has no argument '{keyword}': [`\w]"):
        call(model=Net(), **{keyword: True})


def test_an_argument_that_is_spelt_wrong_gets_the_near_one() -> None:
    call: Any = shardengine.initialize
    with pytest.raises(TypeError, match=r"no argument 'lr_schedular': .* did you mean lr_scheduler=\?$"):
        call(Net(), {}, lr_schedular=None)
    with pytest.raises(TypeError, match=r"no argument 'qqq': it takes model, config, .*, weights, batch, loss$"):
        call(Net(), {}, qqq=None)


MODEL = Net()
OTHER_KINDS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "namespace first": (
        (Namespace(), MODEL),
        {},
        "expected model to be a torch.nn.Module, got one of type Namespace: the model",
    ),
    "name of a model": (("gpt2", {}), {}, "got the string 'gpt2': load it first"),
    "no model": ((None, {}), {}, "expected model to be a torch.nn.Module, got None"),
    "parameters": ((MODEL.parameters(), {}), {}, "got one of type generator"),
    "class": ((Net, {}), {}, "got the class Net: make one of it"),
    "optimizer second": (
        (MODEL, torch.optim.SGD(MODEL.parameters())),
        {},
        "got one of type SGD: it is passed as optimizer=",
    ),
    "three": ((MODEL, torch.optim.SGD(MODEL.parameters()), {}), {}, "got 3 without a name: Net, SGD, dict"),
    "no config": ((), {"model": MODEL}, "got nothing for config"),
    "config None": ((MODEL, None), {}, "or a Config, got None"),
    "JSON": ((MODEL, '{"a": 1}'), {}, "json.loads(text)"),
    "name of an optimizer": ((MODEL, {}), {"optimizer": "adamw"}, "belongs in the config"),
    "list of optimizers": ((MODEL, {}), {"optimizer": [1]}, "one engine has one optimizer"),
    "table of an optimizer": ((MODEL, {}), {"optimizer": {"type": "Adam"}}, "belongs in the config"),
    "name of a scheduler": ((MODEL, {}), {"lr_scheduler": "cosine"}, "belongs in the config"),
    "JSON list": ((MODEL, "[1]"), {}, "json.loads(text)"),
    "module as optimizer": ((MODEL, {}), {"optimizer": MODEL}, "or None, got one of type Net"),
    "dict of parameters": ((MODEL, {}), {"model_parameters": dict(MODEL.named_parameters())}, "put it into a list"),
    "one parameter": ((MODEL, {}), {"model_parameters": MODEL.linear.weight}, "put it into a list"),
    "mesh": ((MODEL, {}), {"mesh": "cpu"}, "expected mesh to be a DeviceMesh, a process group or None"),
    "monitors": ((MODEL, {}), {"monitors": 1}, "expected monitors to be a list"),
    "number of parameters": ((MODEL, {}), {"model_parameters": 5}, "or None, got one of type int"),
}


@pytest.mark.parametrize("case", OTHER_KINDS)
def test_an_argument_of_another_kind_is_named(case: str) -> None:
    args, kwargs, text = OTHER_KINDS[case]
    call: Any = shardengine.initialize
    with pytest.raises((UsageError, TypeError)) as caught:
        call(*args, **kwargs)
    assert str(caught.value).startswith("shardengine.initialize: expected ") and text in str(caught.value)


def test_initialize_in_inference_mode_is_refused() -> None:
    with torch.inference_mode(), raises("initialize-in-inference-mode"):
        shardengine.initialize(Net(), {})


def test_no_sync_may_decorate_a_function(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    @engine.no_sync()
    def micro_batch() -> None:
        engine.backward(engine(torch.ones(1, 2)).sum())
        assert not engine._window.synchronises

    micro_batch()
    micro_batch()
    assert engine._window.synchronises and not caplog.records


@pytest.mark.parametrize("call", ["trace", "no_sync", "full_params", "full_grads", "full_optimizer_state"])
def test_what_belongs_in_a_with_says_so_elsewhere(engine: Any, caplog: pytest.LogCaptureFixture, call: str) -> None:
    getattr(engine, call)(*["x.json"] * (call == "trace"))
    said = f"engine.{call}(...) did nothing: expected it in `with engine.{call}(...):`"
    assert [record.getMessage() for record in caplog.records] == [said]
    caplog.clear()
    engine.backward(engine(torch.ones(1, 2)).sum())
    with engine.no_sync(), engine.full_params(), engine.full_grads():
        pass
    assert not caplog.records


def test_other_type_errors_are_not_explained(engine: Any) -> None:
    for call in (lambda: engine.step(no_such=1), lambda: engine(torch.ones(1, 2), scale_wrt_gas=True)):
        with pytest.raises(TypeError, match="unexpected keyword argument") as caught:
            call()
        assert not getattr(caught.value, "__notes__", [])


def write_as_advised(stage: str) -> tuple[bool, bool]:
    """What the answer to ``load_module_state_dict`` says, done."""
    made: Any = cases.make_engine(Net(), cases.config_of(stage, bf16={"enabled": True}), "AdamW")
    new = {"linear.weight": torch.full((2, 2), 2.5), "linear.bias": torch.tensor([3.0, -1.0])}
    with made.full_params(writable=True):
        made.module.load_state_dict(new)
    masters, weights = {}, made.state_dict()
    with made.full_optimizer_state() as states:
        masters = {name: state["weight"].clone() for name, state in states.items()}
    made.close()
    same = all(torch.equal(masters[name], new[name]) for name in new)
    return same, not weights or all(torch.equal(weights[name].float(), new[name]) for name in new)


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_the_advice_on_loading_a_state_dict_works(pools: Callable[[int], RankPool], stage: str) -> None:
    assert pools(2).run(write_as_advised, stage) == [(True, True)] * 2


# The optimizer


def test_the_optimizer_answers(engine: Any) -> None:
    for name, sentence in OPTIMIZER.items():
        with pytest.raises(AttributeError) as caught:
            getattr(engine.optimizer, name)
        assert str(caught.value) == f"engine.optimizer has no {name!r}: {sentence}"
        assert not hasattr(engine.optimizer, name)


def test_an_unknown_name_of_the_optimizer(engine: Any) -> None:
    with pytest.raises(AttributeError, match=r"^engine\.optimizer has no 'zero_grads'; did you mean zero_grad\?$"):
        _ = engine.optimizer.zero_grads
    with pytest.raises(AttributeError, match=r"^engine\.optimizer has no '_zero_grads'$"):
        _ = engine.optimizer._zero_grads


def test_an_error_inside_of_a_property_of_the_optimizer_stays(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(engine.optimizer), "loss_scale", property(lambda optimizer: optimizer.settings.no_such))
    with pytest.raises(AttributeError, match="no_such"):
        _ = engine.optimizer.loss_scale


# What others do with objects


def test_probes_copies_and_pickles_meet_no_surprise(engine: Any) -> None:
    for holder in (engine, engine.optimizer):
        assert not hasattr(holder, "__wrapped__") and not hasattr(holder, "_no_such")
        assert type(copy.copy(holder)) is type(holder)
        inspect.unwrap(holder)
        repr(holder)
    blank = object.__new__(shardengine.Engine)
    assert not hasattr(blank, "module_state_dict") and not hasattr(blank, "module")
    with pytest.raises(AttributeError) as caught:
        _ = engine.unwrap_model
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_compiled_function_may_ask(engine: Any) -> None:
    def asks(x: Tensor) -> Tensor:
        return x + 1 if hasattr(engine, "save_16bit_model") else x + 2

    assert torch.compile(asks, backend="eager")(torch.ones(1)).item() == 3


def test_forward_by_name_is_the_call_of_the_engine() -> None:
    """Not the module's own forward, which no cast and no region of autocast surrounds."""
    x = torch.randn(3, 2)
    made = cases.make_engine(Net(), cases.config_of("0", torch_autocast={"enabled": True}), "SGD")
    assert made.forward(x).dtype is torch.bfloat16 and torch.equal(made.forward(x), made(x))
    made.close()


# The package


def test_the_package_answers() -> None:
    for name, sentence in PACKAGE.items():
        with pytest.raises(AttributeError) as caught:
            getattr(shardengine, name)
        assert str(caught.value) == f"module 'shardengine' has no attribute {name!r}: {sentence}"
        assert not hasattr(shardengine, name)


def test_unknown_names_of_the_package() -> None:
    with pytest.raises(AttributeError, match=r"'initialise'; did you mean shardengine\.initialize\?$"):
        _ = shardengine.initialise  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"^module 'shardengine' has no attribute '__no_such__'$"):
        _ = shardengine.__no_such__  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'zero'"):
        exec("from shardengine import zero")
    scope: dict[str, Any] = {}
    exec("from shardengine import *\nfrom shardengine import checkpoint", scope)
    assert set(shardengine.__all__) <= scope.keys() and scope["checkpoint"].__name__ == "shardengine.checkpoint"
