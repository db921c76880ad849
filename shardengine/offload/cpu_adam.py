"""``CPUAdam``: Adam and AdamW for parameters on a CPU, in any training loop, with the library's kernels.

Owns: the state of each parameter, laid out in memory as the parameter is; the checks of parameters and options. Must
not know: the engine, shards, the arithmetic (``kernels.update``).

[Note: Masters follow their weights] A bf16 or fp16 parameter is the rounding of fp32 master weights in the state. If
other code writes into the parameter (``load_state_dict`` of a model, a tied or averaged weight), it means the weight.
So a step that finds such a write replaces each master that no longer rounds to its weight by that weight; the others
keep their bits. torch counts every in-place write of a tensor, so a write is noticed at no cost. A write through
``.data`` is not counted and not noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from shardengine.errors import UsageError
from shardengine.kernels import STATE_NAMES, Rule, Spans, rule_for, update

MASTER = "master"
"""The state that holds the fp32 master weights of a bf16 or fp16 parameter."""
_MOMENTS = STATE_NAMES["Adam"]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DECOUPLED = "decoupled_weight_decay"
_NOT_AVAILABLE = ("amsgrad", "differentiable")


class CPUAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba, 2015) or AdamW (Loshchilov & Hutter, 2019), one pass over memory per parameter and step.

    Parameters are dense, on the CPU, fp32, bf16 or fp16, with gradients in any of these dtypes. The arithmetic is fp32
    and gives the same bits with and without the native library. Low-precision parameters have fp32 master weights in
    the state: [Note: Masters follow their weights]. Everything else is as in ``torch.optim.AdamW``: groups, closures
    and schedulers. For fp32 parameters the state dict is the same as well (``step``, ``exp_avg``, ``exp_avg_sq``), so
    each of the two loads the other's. Raises UsageError, which names the parameter that cannot be stepped and what to
    do; a step that raises has changed nothing.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        adamw: bool = True,
        maximize: bool = False,
    ) -> None:
        """params: parameters, named ones or groups, as for any torch optimizer · lr: a number or a 0-dim tensor.

        adamw: weight decay is decoupled from the gradient · weight_decay: None for 0.01 with ``adamw``, else 0.
        """
        if weight_decay is None:
            weight_decay = 1e-2 if adamw else 0.0
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        self._seen: dict[Tensor, tuple[int, int]] = {}
        super().__init__(params, {**defaults, _DECOUPLED: adamw})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch. Raises UsageError for a parameter that cannot be stepped and for an option out of its range."""
        super().add_param_group(param_group)
        try:
            number = len(self.param_groups) - 1
            _check_options(self.param_groups[number], number)
            for position, parameter in enumerate(self.param_groups[number]["params"]):
                _check(parameter, _place(self.param_groups, number, position))
        except UsageError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient, and return the result of ``closure``.

        Gradients are not changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rules: dict[tuple[int, int], Rule] = {}
        for number, parameter in self._due():
            state, group = self._prepared(parameter), self.param_groups[number]
            state["step"] += 1
            step = int(state["step"].item())
            if (number, step) not in rules:
                rules[number, step] = rule_for("AdamW" if group[_DECOUPLED] else "Adam", group, step)
            if parameter.numel():
                _update(parameter, state, rules[number, step])
            torch.autograd.graph.increment_version(parameter)
            self._seen[parameter] = _mark(parameter)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the states bit for bit; they stay fp32 whatever the dtype of the parameters.

        A state dict of ``torch.optim.AdamW`` or ``Adam`` fits as well; its groups say whether weight decay is
        decoupled. Raises UsageError for the state of another optimizer, for other shapes and for options that are not
        available; then nothing is changed.
        """
        loaded: dict[Tensor, dict[str, Tensor]] = {}

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            # After the user's own hooks, which may have changed it; torch would round the states to the weights' dtype.
            loaded.update(self._converted(given))
            return {**given, "state": {}}

        def put(_: torch.optim.Optimizer) -> None:
            self.state.update(loaded)

        hooks = (
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore after unpickling, copying or loading. The last writer of the weights is unknown then."""
        super().__setstate__(state)
        self._seen = {}
        for group in self.param_groups:
            group.setdefault("maximize", False)
            group.setdefault(_DECOUPLED, self.defaults[_DECOUPLED])

    def _due(self) -> list[tuple[int, Tensor]]:
        """Return (group, parameter) of all parameters that the step updates. Checks each of them and its gradient."""
        found = []
        for number, group in enumerate(self.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    place = _place(self.param_groups, number, position)
                    _check(parameter, place)
                    _check_gradient(parameter.grad, place)
                    found.append((number, parameter))
        return found

    def _prepared(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the parameter's state: created at its first step, and laid out as the parameter lies in memory now."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state |= {name: torch.zeros_like(parameter, dtype=torch.float32) for name in _MOMENTS}
        if parameter.dtype is torch.float32:
            state.pop(MASTER, None)  # from a time when it was narrower
        elif MASTER not in state:
            state[MASTER] = parameter.float()
        for name in state.keys() - {"step"}:
            if state[name].stride() != parameter.stride():
                state[name] = _laid_out(state[name], parameter)
        if MASTER in state and self._seen.get(parameter) != _mark(parameter):
            master = state[MASTER]
            master.copy_(torch.where(parameter != master.to(parameter.dtype), parameter.float(), master))
        return state

    def _converted(self, given: Mapping[str, Any]) -> dict[Tensor, dict[str, Tensor]]:
        """Return the states of a state dict by parameter, in the form of this optimizer."""
        found = {}
        for number, (group, saved) in enumerate(zip(self.param_groups, given["param_groups"], strict=False)):
            _check_options({**group, **saved}, number)
            for position, (parameter, key) in enumerate(zip(group["params"], saved["params"], strict=False)):
                if state := given["state"].get(key):
                    place = _place(self.param_groups, number, position)
                    found[parameter] = _converted_state(parameter, state, place)
        return found


def _update(parameter: Tensor, state: Mapping[str, Tensor], rule: Rule) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.stride() != parameter.stride():
        gradient = _laid_out(gradient, parameter)
    flats = {"weight": _flat(parameter), "gradient": _flat(gradient)}
    flats |= {name: _flat(state[name]) for name in rule.states}
    if MASTER in state:
        flats |= {"weight": _flat(state[MASTER]), "low": flats["weight"]}
    update(flats, Spans.whole(parameter.numel()), rule)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _laid_out(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a copy that lies in memory as ``parameter`` does."""
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _mark(parameter: Tensor) -> tuple[int, int]:
    """Return a value that changes when anybody writes into the parameter or gives it other memory."""
    return parameter._version, parameter.data_ptr()


def _converted_state(parameter: Tensor, state: Mapping[str, Any], place: str) -> dict[str, Tensor]:
    missing = [name for name in ("step", *_MOMENTS) if name not in state]
    if missing or any(name in state for name in ("max_exp_avg_sq",)):
        raise UsageError(
            f"CPUAdam.load_state_dict: {place}: expected the states step, exp_avg and exp_avg_sq of Adam without "
            f"amsgrad, got {', '.join(map(str, state))}; load what CPUAdam or torch.optim.AdamW has saved",
            code="cpu-adam-foreign-state",
        )
    found = {"step": torch.tensor(float(state["step"]), dtype=torch.float32)}
    for name in (*_MOMENTS, MASTER):
        if name in state:
            value = state[name]
            if value.shape != parameter.shape:
                raise UsageError(
                    f"CPUAdam.load_state_dict: {place}: {name} has shape {tuple(value.shape)}, expected the "
                    "parameter's; pass the parameters in the order in which they were saved",
                    code="cpu-adam-state-shape-differs",
                )
            found[name] = _laid_out(value.detach().to("cpu", torch.float32), parameter.detach())
    return found


def _place(groups: list[dict[str, Any]], number: int, position: int) -> str:
    """Return the group, position, name and shape of a parameter, for messages."""
    parameter, names = groups[number]["params"][position], groups[number].get("param_names")
    shape = "no shape yet" if is_lazy(parameter) else f"shape {tuple(parameter.shape)}"
    name = f" {names[position]!r}" if names else ""
    return f"group {number}, parameter {position}{name} ({shape})"


def _check(parameter: Tensor, place: str) -> None:
    """Raise UsageError if the kernels cannot step this parameter."""
    if is_lazy(parameter):
        came, advice = "a lazy one", "run one forward before you make the optimizer"
    elif parameter.layout is not torch.strided:
        came, advice = f"layout {parameter.layout}", "make it dense (.to_dense())"
    elif parameter.device.type != "cpu":
        came = f"one on {parameter.device}"
        advice = "move the model to the CPU before you make the optimizer, or use torch.optim.AdamW for it"
    elif parameter.dtype not in _DTYPES:
        came = str(parameter.dtype)
        real = "give its real and imaginary part (torch.view_as_real)" if parameter.is_complex() else "cast the model"
        advice = f"{real}, or use torch.optim.AdamW for it"
    elif type(parameter).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        came, advice = f"a {type(parameter).__name__}, which has no memory of its own", "pass its local tensor"
    elif parameter.numel() and torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        came, advice = f"strides {parameter.stride()} with gaps or overlaps", "make it from .contiguous()"
    else:
        return
    raise UsageError(
        f"CPUAdam: {place}: expected a dense fp32, bf16 or fp16 parameter on the CPU, got {came}; {advice}",
        code="cpu-adam-parameter-unsupported",
    )


def _check_gradient(gradient: Tensor, place: str) -> None:
    if gradient.layout is not torch.strided or gradient.dtype not in _DTYPES or gradient.device.type != "cpu":
        raise UsageError(
            f"CPUAdam: {place}: expected a dense gradient in fp32, bf16 or fp16 on the CPU, got {gradient.dtype} of "
            f"layout {gradient.layout} on {gradient.device}; for an embedding with sparse=True switch that off, or use "
            "torch.optim.SparseAdam for it",
            code="cpu-adam-gradient-unsupported",
        )


def _check_options(group: Mapping[str, Any], number: int) -> None:
    for name in _NOT_AVAILABLE:
        if group.get(name):
            raise UsageError(
                f"CPUAdam: group {number}: option {name}=True is not available; leave it out",
                code="cpu-adam-option-unavailable",
            )
    lr, betas = group["lr"], tuple(group["betas"])
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise UsageError(
            f"CPUAdam: group {number}: lr: expected a number or a tensor of one, got {tuple(lr.shape)}",
            code="cpu-adam-option-invalid",
        )
    for name in ("lr", "eps", "weight_decay"):
        if not float(group[name]) >= 0:
            raise UsageError(
                f"CPUAdam: group {number}: {name}: expected a number of at least 0, got {group[name]}",
                code="cpu-adam-option-invalid",
            )
    if len(betas) != 2 or not all(0 <= float(beta) < 1 for beta in betas):
        raise UsageError(
            f"CPUAdam: group {number}: betas: expected two numbers in [0, 1), got {group['betas']}",
            code="cpu-adam-option-invalid",
        )
