"""Checks the types of the arguments of ``initialize`` before anything else. Owns: one error message for each.

Must not know: the use of the arguments.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardengine.comm import Mesh
from shardengine.config import KEYS, SECTIONS, Config
from shardengine.errors import UsageError
from shardengine.other_engines import about_argument

_P = ParamSpec("_P")
_T = TypeVar("_T")
OptimizerLike = (
    torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    | None
)
_NO_MEMBER = dist.GroupMember.NON_GROUP_MEMBER
"""The object that torch returns to a rank outside a new group."""
_ORDER = "expected initialize(model, config, optimizer=..., lr_scheduler=...)"


def checked(initialize: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return ``initialize`` with checks of its arguments.

    Wrong names or numbers of arguments raise TypeError, wrong types UsageError.
    """
    signature = inspect.signature(initialize)
    known = list(signature.parameters)

    @functools.wraps(initialize)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for name in kwargs:
            if name not in known and (name in KEYS or name in SECTIONS):
                raise TypeError(f"shardengine.initialize has no argument {name!r}: it belongs in the config")
            if name not in known:
                raise TypeError(about_argument("initialize", name, known))
        if len(args) > 2:
            kinds = ", ".join(type(each).__name__ for each in args)
            raise TypeError(f"shardengine.initialize: {_ORDER}, got {len(args)} without a name: {kinds}")
        given = signature.bind_partial(*args, **kwargs).arguments
        if missing := [name for name in ("model", "config") if name not in given]:
            raise TypeError(f"shardengine.initialize: {_ORDER}, got nothing for {' and '.join(missing)}")
        _check(**given)
        return initialize(*args, **kwargs)

    return call


def _check(
    model: Any,
    config: Any,
    optimizer: Any = None,
    model_parameters: Any = None,
    lr_scheduler: Any = None,
    mesh: Any = None,
    monitors: Any = (),
    weights: Any = None,
    batch: Any = None,
    loss: Any = None,
) -> None:
    """Raise ``UsageError`` for the first argument of a wrong type."""
    if torch.is_inference_mode_enabled():
        raise UsageError(
            "shardengine.initialize: expected a call outside of torch.inference_mode(): nothing trains in it",
            code="initialize-in-inference-mode",
        )
    if not isinstance(model, nn.Module):
        raise _no_module(model, config)
    if not isinstance(config, (Config, Mapping, str, Path)):
        cure = ": it is passed as optimizer=" if isinstance(config, torch.optim.Optimizer) else ""
        raise _refused("config", "a dict, the path of a JSON file or a Config", config, cure)
    if isinstance(config, str) and config.lstrip().startswith(("{", "[")):
        raise _refused("config", "a dict or the path of a JSON file", config, ": json.loads(text) makes a dict of it")
    makes = callable(optimizer) and not isinstance(optimizer, nn.Module)
    several = isinstance(optimizer, list | tuple) and all(isinstance(o, torch.optim.Optimizer) for o in optimizer)
    if not (optimizer is None or isinstance(optimizer, torch.optim.Optimizer) or makes or several):
        cure = ""
        if isinstance(optimizer, (str, Mapping)):
            example = '{"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}'
            cure = f": an optimizer by its name belongs in the config, {example}"
        elif isinstance(optimizer, (list, tuple)):
            cure = ": one engine has one optimizer, with several groups where that is wanted"
        raise _refused("optimizer", "a torch optimizer, a function from parameters to one, or None", optimizer, cure)
    if isinstance(model_parameters, (str, torch.Tensor, Mapping)) or not isinstance(model_parameters or (), Iterable):
        cure = ": put it into a list" if isinstance(model_parameters, (torch.Tensor, Mapping)) else ""
        raise _refused("model_parameters", "a list of parameters or of groups, or None", model_parameters, cure)
    if not (lr_scheduler is None or callable(lr_scheduler) or hasattr(lr_scheduler, "step")):
        cure = ': by its name it belongs in the config, under "scheduler"'
        raise _refused("lr_scheduler", "a scheduler, a function from the optimizer to one, or None", lr_scheduler, cure)
    if not (mesh is None or isinstance(mesh, Mesh | DeviceMesh | ProcessGroup)):
        cure = ": this rank is in none, and does not call initialize" if mesh is _NO_MEMBER else ""
        raise _refused("mesh", "a DeviceMesh, a process group or None", mesh, cure)
    if not isinstance(monitors, Iterable):
        raise _refused("monitors", "a list", monitors, "")
    if not (weights is None or isinstance(weights, (str, Path)) or hasattr(weights, "read")):
        cure = ": model.load_state_dict does that, before initialize" if isinstance(weights, Mapping) else ""
        raise _refused("weights", "a folder of safetensors files, a reader (loading.Reader) or None", weights, cure)
    if not (batch is None or isinstance(batch, Mapping)):
        cure = ": engine(**batch) has to work, and dict(name=...) makes one"
        raise _refused("batch", "a mapping of what the model's forward takes, by name, or None", batch, cure)
    if not (loss is None or callable(loss)):
        raise _refused("loss", "a function of what the model's forward returns, or None", loss, "")


def _no_module(model: Any, config: Any) -> UsageError:
    cure = ""
    if isinstance(config, nn.Module):
        cure = ": the model comes first"
    elif isinstance(model, (str, Path)):
        cure = ": load it first, for example with transformers' AutoModelForCausalLM.from_pretrained(...)"
    elif isinstance(model, type):
        cure = ": make one of it"
    elif hasattr(model, "module") and hasattr(model, "backward"):
        cure = ": it is an engine already; call it in the place of the model, which is its .module"
    return _refused("model", "a torch.nn.Module", model, cure)


def said_by(optimizer: OptimizerLike) -> dict[str, Any]:
    """The values that an optimizer object provides for keys that are "auto" in the config."""
    if not isinstance(optimizer, torch.optim.Optimizer) or optimizer.defaults.get("lr") is None:
        return {}
    return {"optimizer.params.lr": float(optimizer.defaults["lr"])}


def _refused(name: str, expected: str, value: Any, cure: str) -> UsageError:
    return UsageError(
        f"shardengine.initialize: expected {name} to be {expected}, got {_kind(value)}{cure}",
        code="initialize-wrong-type",
    )


def _kind(value: Any) -> str:
    """A description of ``value`` for errors."""
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"the string {value if len(value) < 40 else value[:40] + '…'!r}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"one of type {type(value).__name__}"
