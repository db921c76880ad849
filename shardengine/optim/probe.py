"""A trial at ``initialize`` that decides whether an optimizer's class may be stepped on slices; there is no list.

Owns: the trial and the messages of a rejection. Must not know: the model, ranks.

[Note: The trial] For each group, with its options and on numbers of its own, eight steps of a matrix and a vector are
made in four ways:

    whole     as they are, twice
    flat      the matrix as one row
    sliced    two workers, as two ranks: one with the matrix's first elements, one with the rest and the vector
    renewed   the same with new workers for every step, as ``Elementwise`` does it

Then all groups are stepped together. Weights, states, facts and the options of groups must be equal, bit for bit, after
every step. A matrix is cut at a multiple of 16 elements, as layouts cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardengine.errors import UsageError
from shardengine.optim.arithmetic import RESERVED
from shardengine.optim.elementwise import Elementwise, Learnt, Slice, Workers, options_of, same

_SHAPE, _CUT, _FEW = (65, 33), 1040, 16
_STEPS = 8
"""Some classes change no weight before their sixth step (rectified Adam)."""
_LARGE = 2.0**20
"""Factor of the last step's gradients: some classes clip by a norm that small gradients never reach."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of states that fp32 can hold."""
_REFUSED_OPTIONS = {
    "differentiable": "its steps would be parts of a graph",
    "capturable": "it is for CUDA graphs, which the engine does not make",
}


def elementwise(optimizer: torch.optim.Optimizer, name: str, advice: str = "") -> Elementwise:
    """Return the arithmetic that steps slices with the class and options of ``optimizer``, which is not changed.

    advice: about this class, for the message. Raises ``UsageError`` if the class cannot be stepped on slices.
    """
    _check_attributes(optimizer, name, advice)
    workers = Workers(optimizer, name)
    _check_unused(optimizer, workers)
    return Elementwise(workers, functools.partial(_learn, workers, advice), optimizer.param_groups)


def _check_attributes(optimizer: torch.optim.Optimizer, name: str, advice: str) -> None:
    """Reject a class that holds another optimizer, or parameters, outside its groups: it would step those."""
    for key, value in vars(optimizer).items():
        if key in ("param_groups", "state", "defaults"):
            continue
        inside = list(value.values() if isinstance(value, Mapping) else value) \
            if isinstance(value, Mapping | list | tuple | set) else [value]  # fmt: skip
        for each in inside:
            if isinstance(each, torch.optim.Optimizer | nn.Parameter):
                what = "another optimizer" if isinstance(each, torch.optim.Optimizer) else "parameters"
                raise UsageError(
                    f"optimizer {name}: it holds {what} in its attribute {key!r}, which would be stepped whole, beside "
                    f"the shards{advice and f' ({advice})'}: expected a class that steps what is in its param_groups; "
                    "give the inner optimizer to initialize, or use AdamW",
                    code="optimizer-holds-parameters-elsewhere",
                )


def already_stepped(name: str) -> UsageError:
    """Return the error for an optimizer that is not new."""
    return UsageError(
        f"optimizer {name} has already taken steps: expected a new one, because its state would be lost; pass it to "
        "shardengine.initialize before its first step",
        code="optimizer-already-stepped",
    )


def _check_unused(optimizer: torch.optim.Optimizer, workers: Workers) -> None:
    """Raise if ``optimizer`` has states that differ from a new optimizer's."""
    used = already_stepped(workers.name)
    for parameter, state in optimizer.state.items():
        shape, few = parameter.shape, parameter.detach().reshape(-1)[:_FEW]
        try:
            begun = workers.begun(nn.Parameter(torch.zeros_like(few, device="cpu") if few.is_meta else few.clone()))
        except Exception:
            raise used from None
        for key in (*state, *begun):
            found = state.get(key)
            if isinstance(found, Tensor) and found.shape == shape and shape:
                found = begun.get(key) if found.is_meta else found.reshape(-1)[:_FEW]
            expected = begun.get(key)
            if isinstance(found, Tensor) and isinstance(expected, Tensor):
                expected = expected.reshape(found.shape) if found.numel() == expected.numel() else None
            if not same(found, expected):
                raise used


def _numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return fp32 numbers from -1.5 to 1.5, the same on every machine, without torch's generators."""
    count = 1
    for size in shape:
        count *= size
    ticks = torch.arange(count, dtype=torch.int64, device="cpu") * 7919 + 104_729 * seed
    return (((ticks * ticks + 13 * ticks) % 2003).float() / 667.0 - 1.5).view(shape)


_Cut = Callable[[Tensor, Tensor], list[Tensor]]


def _whole(matrix: Tensor, vector: Tensor) -> list[Tensor]:
    return [matrix, vector]


def _flat(matrix: Tensor, vector: Tensor) -> list[Tensor]:
    return [matrix.reshape(-1), vector]


def _sliced(matrix: Tensor, vector: Tensor) -> list[Tensor]:
    flat = matrix.reshape(-1)
    return [flat[:_CUT], flat[_CUT:], vector]


def _tensors(cut: _Cut, seed: int) -> list[Tensor]:
    """Return weights (``seed`` 0) or gradients.

    Slices differ much in magnitude: a norm or mean of one is then far from that of all, and visible even if the class
    gives it little weight.
    """
    matrix, vector = _numbers(_SHAPE, seed), _numbers((_FEW + 5,), seed + 50)
    flat = matrix.view(-1)
    flat[:_CUT] *= 16
    flat[_CUT:] /= 16
    return [part.clone() for part in cut(matrix, vector / 64)]


def _gradients(cut: _Cut, number: int) -> list[Tensor]:
    """Return the gradients of step ``number``, from 1."""
    return [each * _LARGE if number == _STEPS else each for each in _tensors(cut, number)]


class _Trial:
    """One way to make the steps of one group.

    Its workers live for all steps, or are renewed in each step. Each slice has a worker; the last slice shares that of
    the slice before it.
    """

    def __init__(self, workers: Workers, options: Mapping[str, Any], cut: _Cut, *, anew: bool = False) -> None:
        self._workers, self._cut, self._anew = workers, cut, anew
        self.slices = [Slice(each, None, None) for each in _tensors(cut, 0)]
        self._parts = [self.slices] if len(self.slices) == 2 else [self.slices[:1], self.slices[1:]]
        self._lasting = [workers.make([(options, part)]) for part in self._parts]
        self.options = [dict(options) for _ in self._parts]
        self.late = ""  # a state that first appeared after the first step
        if callable(getattr(workers.made_by, "train", None)):
            self._call("train")

    def step(self, number: int) -> None:
        """Make step number ``number``, from 1."""
        for each, gradient in zip(self.slices, _gradients(self._cut, number), strict=True):
            each.give(gradient)
        for worker, part in zip(self._lasting, self._parts, strict=True):
            for parameter, each in zip(worker.param_groups[0]["params"], part, strict=True):
                parameter.grad = each.gradient
        kept = self.slices[0].states or {}, self.slices[0].facts
        self._call("step")
        now = {*(self.slices[0].states or {}), *self.slices[0].facts}
        self.late = self.late or next(iter(sorted(now.difference(*kept)) if number > 1 else ()), "")

    def _call(self, method: str) -> None:
        for number, (worker, part) in enumerate(zip(self._lasting, self._parts, strict=True)):
            if self._anew:
                self.options[number] = self._workers.run(self.options[number], part, method)
            else:
                self._workers.call(worker, method)
                self._workers.take(worker, [part])
                self.options[number] = options_of(worker.param_groups[0])

    def difference(self, other: _Trial) -> str:
        """Return the name of a value that differs from ``other``; "" if all are equal."""
        for one, two in zip(self._joined(), other._joined(), strict=True):
            if what := _difference(one, two):
                return "weights" if what == "weight" else f"state {what!r}"
        what = _difference(self.slices[0].facts, other.slices[0].facts)
        option = _difference(self.options[0], other.options[0])
        return f"state {what!r}" if what else f"option {option!r} of the group" if option else ""

    def unevenness(self) -> str:
        """Return the name of a value that should be the same for all slices and is not; "" if all are."""
        for each in self.slices:
            if what := _difference(self.slices[0].facts, each.facts):
                return f"state {what!r}"
        for options in self.options:
            if what := _difference(self.options[0], options):
                return f"option {what!r} of the group"
        return ""

    def _joined(self) -> list[dict[str, Any]]:
        """Return weight and states, flat, of the matrix and of the vector."""
        rows = [{"weight": each.weight, **(each.states or {})} for each in self.slices]
        rows = [{key: value.reshape(-1) for key, value in row.items()} for row in rows]
        if len(rows) == 2:
            return rows
        first, rest, vector = rows
        return [{key: torch.cat([first[key], rest[key]]) for key in first if key in rest}, vector]


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first name whose value is not the same in both; "" if all are."""
    for key in (*one, *other):
        if key not in one or key not in other or not same(one[key], other[key]):
            return key
    return ""


def _compared(one: _Trial, other: _Trial, *, evenly: bool = False) -> str:
    """Return the name of a value that differed after some step. evenly: or that differed between slices and should
    not."""
    for number in range(1, _STEPS + 1):
        one.step(number)
        other.step(number)
        if what := one.difference(other) or (other.unevenness() if evenly else ""):
            return what
    return ""


def _learn(workers: Workers, advice: str, groups: Sequence[Mapping[str, Any]]) -> Learnt:
    """Make the trial with the options of ``groups`` ([Note: The trial])."""
    name = workers.name
    for number, group in enumerate(groups):
        for option, why in _REFUSED_OPTIONS.items():
            if group.get(option):
                raise UsageError(
                    f"optimizer {name}: option {option}=True in group {number} is refused, because {why}",
                    code="optimizer-option-refused",
                )
    options = [_for_trial(group) for group in groups]
    known = workers.states, workers.facts
    workers.know(None)
    try:
        found = [_learn_group(workers, each, advice) for each in options]
        _try_together(workers, options)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"optimizer {name}: a trial of its step() raised {type(error).__name__}: {str(error)[:300]}; expected a "
            f"class whose step() needs no arguments and works on dense fp32 parameters{advice and f' ({advice})'}",
            code="optimizer-trial-failed",
        ) from error
    finally:
        workers.know(*known)
    kept = [sorted((*each.states, *each.facts)) for each in found]
    if any(each != kept[0] for each in kept):
        other = next(each for each in kept if each != kept[0])
        raise UsageError(
            f"optimizer {name}: it keeps {kept[0]} with the options of one group and {other} with those of another; "
            "expected options with which it keeps the same states in all groups",
            code="optimizer-groups-differ",
        )
    first = found[0]
    return Learnt(first.states, first.facts, any(each.changes_options for each in found), first.pilot)


def _for_trial(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group's options; a learning rate that is too small to change anything becomes 1e-3."""
    options = options_of(group)
    rate = options.get("lr")
    if isinstance(rate, int | float) and not rate > 1e-5:
        options["lr"] = 1e-3
    return options


def _learn_group(workers: Workers, options: dict[str, Any], advice: str) -> Learnt:
    name, whole = workers.name, _Trial(workers, options, _whole)
    if what := _compared(whole, _Trial(workers, options, _whole)):
        raise UsageError(
            f"optimizer {name}: two trials with the same numbers gave two results ({what}); expected a class without "
            "random numbers",
            code="optimizer-uses-random-numbers",
        )
    if all(torch.equal(each.weight, old) for each, old in zip(whole.slices, _tensors(_whole, 0), strict=True)):
        raise UsageError(
            f"optimizer {name}: a trial of its step() changed nothing; expected a class that steps what is in its "
            "param_groups",
            code="optimizer-changes-nothing",
        )
    for cut in (_flat, _sliced):
        if what := _compared(_Trial(workers, options, _whole), _Trial(workers, options, cut), evenly=True):
            raise UsageError(
                f"optimizer {name}: it looks at whole tensors (a trial on slices of one gave other {what})"
                f"{advice and f': {advice}'}; shards are slices of parameters: expected a class that steps each "
                "element from that element alone, as most of torch.optim do, or AdamW with offload_optimizer",
                code="optimizer-looks-at-whole-tensors",
            )
    if what := _compared(_Trial(workers, options, _sliced), _Trial(workers, options, _sliced, anew=True)):
        raise UsageError(
            f"optimizer {name}: it keeps hidden state outside of optimizer.state and param_groups ({what} changed when "
            "that was lost), so it can be neither sharded nor saved: expected all of it in "
            "optimizer.state[parameter] and optimizer.param_groups",
            code="optimizer-keeps-hidden-state",
        )
    return _learnt(workers, options, whole)


def _learnt(workers: Workers, options: dict[str, Any], whole: _Trial) -> Learnt:
    """Return the result of a trial whose steps were made."""
    name, matrix = workers.name, whole.slices[0]
    if whole.late:
        raise UsageError(
            f"optimizer {name}: its state {whole.late!r} is begun later than in a parameter's first step; expected all "
            "that it keeps of a parameter to be there after that",
            code="optimizer-state-begun-late",
        )
    states = matrix.states or {}
    for key, value in states.items():
        if key in RESERVED:
            raise UsageError(
                f"optimizer {name}: its state is called {key!r}, which is the engine's own name for something else "
                f"(as are {', '.join(repr(each) for each in RESERVED if each != key)}): expected another name",
                code="optimizer-state-reserved-name",
            )
        if value.dtype not in _DTYPES:
            raise UsageError(
                f"optimizer {name}: its state {key!r} is {value.dtype}, expected fp32, bf16 or fp16, which are kept in "
                "fp32 without loss",
                code="optimizer-state-dtype-unsupported",
            )
    for key, value in matrix.facts.items():
        number = isinstance(value, bool | int | float | None) or (isinstance(value, Tensor) and value.numel() == 1)
        if not number:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"optimizer {name}: its state {key!r} is {what}; expected tensors of the parameter's shape and single "
                "numbers, which can be sharded and saved",
                code="optimizer-state-shape-unsupported",
            )
    few = {key: value.reshape(-1)[:_FEW].clone() for key, value in states.items()}
    gradient = _numbers((_FEW,), 1)
    pilot = Slice(matrix.weight.reshape(-1)[:_FEW].clone(), gradient, few, {})
    changes = bool(_difference(options, whole.options[0]))
    return Learnt({k: v.dtype for k, v in states.items()}, dict(matrix.facts), changes, pilot)


def _try_together(workers: Workers, options: Sequence[dict[str, Any]]) -> None:
    """Raise unless all groups in one instance give the same results as each group alone."""
    if len(options) < 2:
        return
    alone = [_Trial(workers, each, _whole) for each in options]
    slices = [[Slice(each, None, None) for each in _tensors(_whole, 0)] for _ in options]
    worker = workers.make(list(zip(options, slices, strict=True)))
    if callable(getattr(workers.made_by, "train", None)):
        workers.call(worker, "train")
    for number in range(1, _STEPS + 1):
        for group in worker.param_groups:
            for parameter, gradient in zip(group["params"], _gradients(_whole, number), strict=True):
                parameter.grad = gradient
        workers.call(worker, "step")
        workers.take(worker, slices)
        for way, together in zip(alone, slices, strict=True):
            way.step(number)
            for one, two in zip(way.slices, together, strict=True):
                if what := _difference({"weight": one.weight, **(one.states or {})},
                                       {"weight": two.weight, **(two.states or {})}):  # fmt: skip
                    raise UsageError(
                        f"optimizer {workers.name}: a group is stepped differently beside other groups ({what!r} came "
                        "out different): expected a class that looks at one group at a time, or all parameters in one",
                        code="optimizer-groups-depend",
                    )
