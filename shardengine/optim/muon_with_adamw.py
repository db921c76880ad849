"""Muon for hidden matrices and AdamW for the rest, as one torch optimizer: the result of ``"type": "Muon"``.

Owns: which parameters are hidden matrices, the options of either kind of group, the step in plain torch. Must not know:
shards, the engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardengine.errors import UsageError
from shardengine.optim.muon import USES_MUON, check_matrices, complete, uses_muon

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon and torch.optim.AdamW in one: each group says with ``use_muon`` which of the two steps it.

    params: groups with that option and the options of that class; ``hidden_matrices`` finds the parameters for Muon. It
    steps plain parameters as those classes do. If it is passed to ``shardengine.initialize``, the engine steps it on
    shards.
    """

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch; its options must include ``use_muon``."""
        if not isinstance(param_group, dict) or not isinstance(param_group.get(USES_MUON), bool):
            raise UsageError(
                f"MuonWithAdamW: expected groups with {USES_MUON!r}, true or false, got "
                f"{sorted(param_group) if isinstance(param_group, dict) else type(param_group).__name__}",
                code="optimizer-muon-group-unmarked",
            )
        complete(param_group, None, None)
        super().add_param_group(param_group)
        check_matrices(self.param_groups[-1], "MuonWithAdamW")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient once; return the value of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for made_by, wanted in ((torch.optim.Muon, True), (torch.optim.AdamW, False)):
            groups = [group for group in self.param_groups if uses_muon(group) is wanted]
            if groups:
                worker = made_by([dict(group) for group in groups])
                vars(worker).update(param_groups=groups, state=self.state)
                worker.step()
        return loss


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters for Muon: matrices, but neither embeddings nor the output layer.

    The output layer is the result of ``get_output_embeddings()``, and every nn.Linear with the shape of an embedding,
    tied or not. If a parameter has the attribute ``use_muon``, that decides.
    """
    lookups = [module.weight for module in model.modules() if isinstance(module, _LOOKUPS)]
    shapes = {tuple(weight.shape) for weight in lookups}
    excluded = {id(weight) for weight in (*lookups, *_outputs(model))}
    for module in model.modules():
        if isinstance(module, nn.Linear) and tuple(module.weight.shape) in shapes:
            excluded.add(id(module.weight))
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and _is_chosen(parameter, is_hidden=id(parameter) not in excluded)
    ]


def _is_chosen(parameter: nn.Parameter, *, is_hidden: bool) -> bool:
    said = getattr(parameter, USES_MUON, None)
    return parameter.dim() == 2 and bool(is_hidden if said is None else said)


def _outputs(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of the output layers that a Hugging Face model reports."""
    for module in model.modules():
        find = getattr(module, "get_output_embeddings", None)
        if callable(find) and not inspect.signature(find).parameters:
            try:
                found = find()
            except Exception:
                continue  # it has none
            weight = getattr(found, "weight", None)
            if isinstance(weight, nn.Parameter):
                yield weight


_OF_MUON = {"momentum": "momentum", "nesterov": "nesterov", "ns_coefficients": "ns_coefficients",
            "ns_steps": "ns_steps", "ns_eps": "eps", "adjust_lr_fn": "adjust_lr_fn"}  # fmt: skip
_OF_ADAMW = {"betas": "betas", "eps": "eps"}


def from_config(model: nn.Module, chosen: Iterable[Any], params: Mapping[str, Any]) -> MuonWithAdamW:
    """Return the optimizer of the config's ``params`` over ``chosen``.

    chosen: parameters, or groups that may have ``use_muon``.
    """
    options: dict[bool, dict[str, Any]] = {}
    for muon, names, own in ((True, _OF_MUON, "muon"), (False, _OF_ADAMW, "adam")):
        options[muon] = {name: params[key] for key, name in names.items()}
        for name in ("lr", "weight_decay"):
            said = params.get(f"{own}_{name}")
            options[muon][name] = params[name] if said is None else said
    hidden = {id(parameter) for parameter in hidden_matrices(model)}
    groups = []
    for given in _as_groups(chosen):
        said = given.get(USES_MUON)
        for muon in (True, False):
            part = [p for p in given["params"] if (id(_tensor(p)) in hidden if said is None else said) is muon]
            if part:
                groups.append({**options[muon], **given, "params": part, USES_MUON: muon})
    if not any(group[USES_MUON] for group in groups):
        raise UsageError(
            'optimizer "Muon": expected a model with trainable matrices that are neither embeddings nor the output '
            'layer, got none; use "AdamW", or set parameter.use_muon = True where Muon is wanted',
            code="optimizer-muon-no-matrices",
        )
    return MuonWithAdamW(groups)


def _as_groups(chosen: Iterable[Any]) -> list[dict[str, Any]]:
    """Return ``chosen`` as groups, as torch's optimizers read it."""
    given = list(chosen)
    if not given or not isinstance(given[0], dict):
        return [{"params": given}]
    groups = []
    for group in given:
        found = group["params"]
        groups.append({**group, "params": [found] if isinstance(found, torch.Tensor) else list(found)})
    return groups


def _tensor(given: Any) -> Any:
    """Return the parameter itself if it comes as (name, parameter)."""
    return given[1] if isinstance(given, tuple) else given
