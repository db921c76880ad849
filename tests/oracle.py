"""The truth: what every stage on every number of ranks must compute, bit for bit.

One process, plain torch, nothing from shardengine. It plays all ranks and all micro-batches one after the other on one
set of parameters and adds their gradients up in the declared order:

- order over ranks: balanced tree over rank numbers, ((0+1)+(2+3)), in fp32 (or ``reduce``: each sum is rounded to it);
  a rank that did not use it adds zeros
- order over micro-batches: first to last; the first contribution is a copy
- roundings: what is sent has the wire's dtype (the parameter's, unless told), all sums are fp32, the complete gradient
  is rounded once to the wire's dtype. Parameters that are not fp32 have an fp32 master weight, which is what is stepped
  (or none: ``masters``). What waits for later micro-batches is kept in ``accumulate``, where that is not fp32
- a communication hook ("coding"): what a rank sends is put into fewer bits and taken out again, ``coded``; on a hybrid
  mesh the sums of the groups once more. With error feedback what was lost of a rank's gradient is added to its
  next one of that parameter; late gradients have none. On other ranks than before, see ``taken_over``
- PowerSGD ("low_rank"): the sum over ranks of a matrix is an approximation of it, see ``LowRank``; what a rank's share
  of it lacks is added to the next. All else, and the first steps, as ever, but that sums are sent in fp32
- quantised weights ("coded_weights"): forward and backward see all parameters as ``coded`` leaves them
- a sparse gradient is dense from its arrival on, with zeros in other rows; what it has of a row several times is added
  up by torch's ``coalesce``
- late gradients: autograd may deliver a parameter's gradient several times in one backward (re-entrant checkpointing).
  What comes after the first, in a backward that communicates, is summed apart, completed on its own and added. Several
  backwards in the window's last micro-batch: each is completed on its own and added, first to last; several in another
  one are one backward
- "full": micro-batches first, then ranks. "sharded": ranks first, then micro-batches. Equal for one micro-batch
- on a hybrid mesh (``inside``) groups of so many consecutive ranks are added first, each by its tree, then their sums
  by a tree; that is the tree of all ranks where the groups have 2^k. "inside": the ranks of a group, then
  micro-batches, then the groups
- the loss is divided by the number of micro-batches before backward, the complete sum by the number of ranks (mean), or
  by a divisor that is given, in fp32
- norm: squares added in fp64, the root (over the loss scale) rounded once to fp32. Another order p: powers of
  magnitudes instead of squares; infinity: the largest magnitude
- the update multiplies gradients with min(1, max_norm / (norm + 1e-6)) / loss scale
- a parameter that no rank used in the window is not touched by the optimizer, or has a gradient of zeros
  ("steps_unused")
- the optimizer's arithmetic: see ``new_values``; every operation is rounded on its own, correctly (fp32 roots of torch
  on a CPU are not). Any other class: what it does itself to whole tensors (``made``)
- a step whose norm is not finite is skipped (``skips``); with ``scaler`` such a norm is inf
- loss scale: the loss, in fp32, times the scale; a step that is skipped may halve the scale
- torch's clipping: each complete gradient's norm is rounded once to fp32, torch's function makes one of them all and
  multiplies the gradients, in the wire's dtype, before the step
- clipping by value: each element of the complete gradient (times the loss scale), in the wire's dtype, before the step;
  the norm is that of before
- averages of weights ("ema"): of what is stepped, begun with its value before the parameter's first step; after each
  step that is applied, e = e + (w - e) · (1 - decay), of every parameter that was ever stepped
- stochastic rounding: 16 random bits are added to the fp32 bits of the weight, the upper half is kept. The bits depend
  on the seed, the parameter's step and the element's number among all elements of all parameters (in memory order)
- states in bf16 or 8 bits ("kept_in"): rounded stochastically after each step, the first state with the lower, the
  second with the upper half of a random word of each element, see ``kept``
- buffers: before the first micro-batch of a step every rank has rank 0's (or keeps its own, where told)
- groups that step apart ("apart"): from a step on each shard group has weights and states of its own. Its gradient is
  that of its ranks alone, or with "gossip" that of its own and of the group 1, 2, 4, … (in turn) before it, as if there
  were these two. A parameter that another group alone used has a gradient of zeros. Each group clips by its own norm;
  all skip a step where the norm of all groups together is not finite, which is everybody's then. After every so many
  such steps, and after the last one, weights that are stepped and states are the sum over groups, a tree, over their
  number
- uneven inputs: a rank without a micro-batch adds zeros to it. By default the sum is divided by the number of ranks all
  the same; else by how many had a micro-batch in the step: the gradient is what it was, and counts as one whose loss
  was multiplied with that number over the number of ranks, so that norm and update divide by it, as by a loss scale.
  Buffers are then the first rank's of those that had a micro-batch in the step before
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn


def tree_sum(terms: list[Tensor], reduce: torch.dtype = torch.float32) -> Tensor:
    """Sum in the order ((0+1)+(2+3))+...; an odd one out moves up a level unchanged."""
    while len(terms) > 1:
        pairs = [(a + b).to(reduce).float() for a, b in zip(terms[0::2], terms[1::2], strict=False)]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def ordered_sum(terms: list[Tensor], kept: torch.dtype = torch.float32) -> Tensor:
    """Sum in fp32, first to last; the sum so far is kept in dtype ``kept``."""
    total = terms[0].to(kept).float()
    for term in terms[1:]:
        total = (total + term.float()).to(kept).float()
    return total


Fires = list[Tensor]
"""The gradients of one parameter in one backward, in the order in which autograd delivered them (nearly always one)."""


@dataclass(frozen=True)
class Sums:
    """How gradients are summed. ``wire`` None: the parameter's dtype; order: "full", "sharded" or "inside"."""

    order: str = "full"
    divisor: float = 1
    wire: torch.dtype | None = None
    reduce: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32
    inside: int = 0
    coding: str = ""


def coded(x: Tensor, coding: str) -> Tensor:
    """What is left of fp32 on the wire: fp16 and bf16 that do not overflow, or integers in blocks of 256 elements."""
    if coding in ("fp16", "bf16"):
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[coding]
        limit = torch.finfo(dtype).max
        return torch.where(x.isfinite(), x.clamp(-limit, limit), x).to(dtype).float()
    levels, left = {"int8": 127, "int4": 7}[coding], torch.empty_like(x)
    blocks = []
    for block in in_memory(x).split(256):
        scale = block.abs().max() / levels
        safe = scale if scale.isfinite() and scale else torch.tensor(1.0)
        blocks.append((block / safe).round().clamp(-levels, levels) * scale if scale.isfinite() else block * torch.nan)
    in_memory(left).copy_(torch.cat(blocks))
    return left


class LowRank:
    """PowerSGD of one parameter with ``rank`` columns, over all ranks. start: steps before it · warm: Q goes on, or is
    drawn in each step · feeds: errors are fed back · rate: by which a matrix becomes smaller, or is not approximated ·
    square: a matrix is all elements, with zeros behind them · seed: of Q."""

    def __init__(
        self, like: Tensor, ranks: int, number: int, told: tuple[int, int, bool, bool, float, bool, int]
    ) -> None:
        self.rank, self.start, self.warm, self.feeds, rate, square, seed = told
        self.count, self.seed, self.scale = like.numel(), seed + number, 1.0
        self.rows = like.shape[0] if like.dim() > 1 else 1
        self.columns = self.count // self.rows
        if square:
            self.rows = self.columns = math.ceil(math.sqrt(self.count))
        self.fits = (self.rows + self.columns) * self.rank * rate < self.count
        self.errors = [torch.zeros(self.count) for _ in range(ranks)]
        self.q = self.drawn(0)

    def drawn(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + (step << 40))
        return torch.randn(self.columns, self.rank, generator=generator)

    def sum(self, terms: list[Tensor], has: list[bool], step: int) -> Tensor:
        """The ranks' ``terms``, as large as the parameter. has: which ranks have a gradient: errors of others wait."""
        if not self.fits:
            return tree_sum(terms)
        errors = [e * self.scale for e in self.errors]
        flat = [in_memory(x) + e if h else in_memory(x) for x, e, h in zip(terms, errors, has, strict=True)]
        zeros = torch.zeros(self.rows * self.columns - self.count)
        matrices = [torch.cat([x, zeros]).view(self.rows, self.columns) for x in flat]
        q = self.q if self.warm else self.drawn(step)
        p, _ = torch.linalg.qr(tree_sum([m @ q for m in matrices]))
        q = tree_sum([m.t() @ p for m in matrices])
        self.q = q if q.isfinite().all() and q.any() else self.q
        said = (p @ q.t()).view(-1)[: self.count]
        if self.feeds:
            due = [x if h else e for x, e, h in zip(flat, errors, has, strict=True)]
            self.errors = [(x - said / len(due)).nan_to_num(0.0, 0.0, 0.0) / self.scale for x in due]
        total = torch.empty_like(terms[0])
        in_memory(total).copy_(said)
        return total


def taken_over(errors: list[Tensor], ranks: int) -> list[Tensor]:
    """Each rank's, of those that there were: every so manieth, added up in order, so that their mean stays."""
    zeros, share = torch.zeros_like(errors[0]), ranks / len(errors)
    return [ordered_sum(errors[rank::ranks]) * share if errors[rank::ranks] else zeros for rank in range(ranks)]


def complete_gradient(
    grads: list[list[Fires]],
    like: Tensor,
    sums: Sums,
    errors: list[Tensor] | None = None,
    approximated: Callable[[list[Tensor], list[bool]], Tensor] | None = None,
) -> Tensor | None:
    """``grads[rank][micro]`` of one parameter → the complete gradient (fp32), or None where no rank used it. errors:
    what each rank's messages have not said yet; new ones take their places, where the rank has a gradient.
    approximated: in the place of sums over ranks, of terms, and of which ranks have one.
    """
    if not any(fires for row in grads for fires in row):
        return None
    zeros, wire = torch.zeros_like(like, dtype=torch.float32), sums.wire or like.dtype
    micros = len(grads[0])
    kept = sums.accumulate if micros > 1 else torch.float32

    def message(rank: int, x: Tensor, keeps: bool) -> Tensor:
        if not sums.coding:
            return x.to(wire).float()
        whole = x + errors[rank] if errors is not None and keeps else x
        said = coded(whole, sums.coding)
        if errors is not None and keeps:
            errors[rank] = (whole - said).nan_to_num(0.0, 0.0, 0.0)
        return said

    def across(groups: list[Tensor]) -> Tensor:
        """The sums of groups, which alone are sent where each is of one rank."""
        groups = [group.to(sums.reduce).float() for group in groups]
        again = sums.coding and sums.inside > 1 and len(groups) > 1
        return tree_sum([coded(group, sums.coding) if again else group for group in groups], sums.reduce)

    def over_ranks(rows: list[Fires], kept: torch.dtype = torch.float32, first: int = 0, late: bool = False) -> Tensor:
        terms = [ordered_sum(row, kept) if row else zeros for row in rows]
        if approximated is not None and not late:
            return approximated(terms, [bool(row) for row in rows])
        sent = [message(first + n, x, bool(rows[n]) and not late) for n, x in enumerate(terms)]
        size = sums.inside or len(sent)
        groups = [tree_sum(sent[i : i + size], sums.reduce) for i in range(0, len(sent), size)]
        return across(groups) if len(groups) > 1 else groups[0]

    if sums.order == "inside":
        groups = []
        for first in range(0, len(grads), sums.inside):
            rows = grads[first : first + sums.inside]
            each = [over_ranks([row[m][:1] for row in rows], first=first) for m in range(micros)]  # of one group
            total = each[0] if micros == 1 else ordered_sum(each[:-1], kept) + each[-1]
            groups.append(total)
        total = across(groups)
        late = [[g for fires in row for g in fires[1:]] for row in grads]
    elif sums.order == "full":
        total = over_ranks([[g for fires in row[:-1] for g in fires] + row[-1][:1] for row in grads], kept)
        late = [row[-1][1:] for row in grads]
    else:
        each = [over_ranks([row[m][:1] for row in grads]) for m in range(micros)]
        total = each[0] if micros == 1 else ordered_sum(each[:-1], kept) + each[-1]
        late = [[g for fires in row for g in fires[1:]] for row in grads]
    divisor = torch.tensor(sums.divisor, dtype=torch.float32)
    complete = (total / divisor).to(wire).float()
    return add_late(complete, (over_ranks(late, late=True) / divisor).to(wire).float(), wire) if any(late) else complete


def add_late(complete: Tensor, late: Tensor, wire: torch.dtype) -> Tensor:
    """A gradient that was completed on its own joins the ones before it."""
    return (complete + late).to(wire).float()


def norm_of(gradients: list[Tensor], order: float = 2.0) -> Tensor:
    """fp64, of all their elements together."""
    zero = torch.zeros((), dtype=torch.float64)
    if order == math.inf:
        return torch.stack([zero, *(g.double().abs().max() for g in gradients)]).max()
    return sum((g.double().abs().pow(order).sum() for g in gradients), zero).pow(1 / order)


def clipped_by_torch(
    complete: dict[Tensor, Tensor], max_norm: float, wire: torch.dtype | None, order: float = 2.0
) -> dict[Tensor, Tensor]:
    """What ``torch.nn.utils.clip_grad_norm_`` makes of complete gradients whose norms are rounded once."""
    norms = torch.stack([norm_of([g], order).float() for g in complete.values()])
    factor = (max_norm / (torch.linalg.vector_norm(norms, order) + 1e-6)).clamp(max=1.0)
    return {p: g.to(wire or p.dtype, copy=True).mul_(factor).float() for p, g in complete.items()}


class Groups:
    """Shard groups of so many consecutive ranks: each one's weights and states, in turn in the model."""

    def __init__(self, optimizer: Optimizer, parameters: list[Tensor], ranks: int, size: int) -> None:
        self.optimizer, self.parameters, self.size, self.count = optimizer, parameters, size, ranks // size
        self.apart, self.inside = False, 0

    def begin(self) -> None:
        if not self.apart:
            self.apart, self.held = True, [self.now()] * self.count

    def now(self) -> tuple[dict[Tensor, Tensor], dict[Tensor, dict[str, Any]]]:
        states = {p: dict(state) for p, state in self.optimizer.state.items()}
        return {p: p.detach().clone() for p in self.parameters}, states

    def enter(self, group: int) -> None:
        """The model and the optimizer are those of ``group``, until another one is entered or all are averaged."""
        self.held[self.inside], self.inside = self.now(), group
        weights, states = self.held[group]
        for p, values in weights.items():
            p.detach().copy_(values)
        self.optimizer.state.clear()
        self.optimizer.state.update({p: dict(state) for p, state in states.items()})

    def average(self) -> None:
        self.enter(0)
        mean: dict[Tensor, dict[str, Any]] = {}
        for p in self.parameters:
            of_all = [{"weight": weights[p], **states.get(p, {})} for weights, states in self.held]
            mean[p] = {key: value if key == "step" else tree_sum([each[key].float() for each in of_all]) / self.count
                       for key, value in of_all[0].items()}  # fmt: skip
            weight = mean[p].pop("weight")
            p.detach().copy_(mean[p].get("master", weight))
        self.optimizer.state.update({p: state for p, state in mean.items() if state})
        self.apart = False


def gossip(group: int, count: int, step: int) -> list[int]:
    """The groups whose gradient ``group`` of ``count`` steps with."""
    return [group, (group - 2 ** (step % math.ceil(math.log2(count)))) % count]


@dataclass
class Trace:
    """What the engine is compared with. ``losses[step][rank][micro]``; norms per step, of each rank where groups step
    apart; the rest after the last step.

    shown: rank 0's state dict, so with tied names and buffers. trained: what the optimizer steps, used or not. scales:
    the loss scale after each step; skipped: the steps that were skipped; kept: the names of each parameter's states.
    """

    losses: list[list[list[float]]] = field(default_factory=list)
    norms: list[Any] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    shown: dict[str, Tensor] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    optimizer: Optimizer | None = None
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[Tensor, list[Tensor]] = field(default_factory=dict)
    thin: dict[Tensor, LowRank] = field(default_factory=dict)


def new_values(
    kind: str, w: Tensor, g: Tensor, state: dict[str, Tensor], group: dict[str, Any], step: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weight and the states after step number ``step``, all fp32, of the gradient ``g`` (scaled and clipped)."""

    def f(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32)

    lr, decay = group["lr"], group["weight_decay"]
    if kind == "SGD":
        momentum = f(group["momentum"])
        if decay:
            g = g + w * f(decay)
        if not group["momentum"]:
            return w - g * f(lr), {}
        m = g if step == 1 else state["momentum_buffer"] * momentum + g * f(1 - group["dampening"])
        return w - (g + m * momentum if group["nesterov"] else m) * f(lr), {"momentum_buffer": m}
    b1, b2 = group["betas"]
    if kind in ("AdamW", "Lion"):
        w = w * f(1 - lr * decay)
    elif decay:
        g = g + w * f(decay)
    m = state["exp_avg"] * f(b1) + g * f(1 - b1)
    if kind == "Lion":
        return w - m.sign() * f(lr), {"exp_avg": state["exp_avg"] * f(b2) + g * f(1 - b2)}
    v = state["exp_avg_sq"] * f(b2) + (g * f(1 - b2)) * g
    root = (1 - b2**step) ** 0.5
    w = w - (m / (v.double().sqrt().float() + f(group["eps"] * root))) * f(lr * root / (1 - b1**step))
    return w, {"exp_avg": m, "exp_avg_sq": v}


def mix(x: Any) -> Any:
    """A hash of 32-bit words (MurmurHash3's finaliser); of Python integers or int64 tensors."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


GOLDEN = 0x9E3779B9


def random_words(number: Tensor, seed: int, step: int) -> Tensor:
    """32 random bits for each element with these numbers."""
    k0 = mix(mix(mix((seed & 0xFFFFFFFF) + GOLDEN) ^ (seed >> 32)) ^ mix(step + GOLDEN))
    return mix(mix((number & 0xFFFFFFFF) ^ k0) + (number >> 32) * GOLDEN + mix(k0 + GOLDEN))


def in_memory(tensor: Tensor) -> Tensor:
    """The elements in the order in which they lie in memory, a view that can be written to."""
    strides = tensor.stride()
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])).view(-1)


def to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 → bf16 (as fp32): 16 random bits are added, the upper half is kept."""
    return ((x.view(torch.int32).long() + bits) & 0xFFFF0000).to(torch.int32).view(torch.float32)


def round_stochastically(w: Tensor, seed: int, step: int, first: int) -> Tensor:
    """fp32 → bf16. ``first``: the number of the first element."""
    new = torch.empty_like(w)
    words = random_words(torch.arange(first, first + w.numel()), seed, step)
    in_memory(new).copy_(to_bf16(in_memory(w), words & 0xFFFF))
    return new.bfloat16()


def to_8_bits(x: Tensor, bits: Tensor, *, signed: bool) -> Tensor:
    """What is left of fp32 in 8 bits, blocks of 256 with their largest magnitude as scale: per block and element a
    multiple of it from a table of 128 sizes and a sign, or of 256 sizes without one."""
    cut, count, least = (2.0**-8, 128, 0) if signed else (2.0**-16, 256, 1)
    base = torch.tensor(cut).view(torch.int32) + (least << 19)
    number = (base + (torch.arange(count, dtype=torch.int32) << 19)).view(torch.float32) - cut
    table = number * (1 / number[-1])  # from 0, or the least step, to 1
    left = []
    for block, noise in zip(x.split(256), bits.split(256), strict=True):
        scale = block.abs().max()
        if scale < 2.0**-100:
            left.append(torch.zeros_like(block))
            continue
        place = (block.abs() * (number[-1] / scale) + cut).view(torch.int32) + 8 * noise.int() + 4 - base
        left.append(table[(place >> 19).clamp(0, count - 1)] * scale * (block.sign() if signed else 1))
    return torch.cat(left)


def to_24_bits(w: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 → a bf16 weight and its remainder of 8 bits: 8 random bits are added, the upper 24 are kept, of which the
    weight is the upper 16, rounded to nearest even."""
    upper = (w.view(torch.int32).long() + bits) >> 8
    weight = (upper << 8).to(torch.int32).view(torch.float32).bfloat16()
    remainder = (upper - (weight.view(torch.int16).long() << 8) + 2**23) % 2**24 - 2**23  # signs aside
    return weight, remainder.clamp(max=127)


def from_24_bits(weight: Tensor, remainder: Tensor) -> Tensor:
    """The opposite."""
    return (((weight.view(torch.int16).int() << 8) + remainder.int()) << 8).view(torch.float32)


def words_in_rows(count: int, noise: tuple[int, int], step: int) -> Tensor:
    """Random bits of elements from number noise[1] on: a word is drawn for a row of 256 and mixed with the place."""
    number = torch.arange(noise[1], noise[1] + count)
    return mix(random_words(number >> 8, noise[0] ^ 0x57415445, step) + (number & 255) * GOLDEN)


def kept(states: dict[str, Tensor], kept_in: str, noise: tuple[int, int], step: int) -> dict[str, Tensor]:
    """What is left of ``states`` after step ``step``. noise: a seed, and the number of the first element."""
    left = {name: torch.empty_like(state) for name, state in states.items()}
    for index, (name, state) in enumerate(states.items()):
        bits = (words_in_rows(state.numel(), noise, step) >> (16 * index)) & 0xFFFF
        flat = in_memory(state)
        signed = name != "exp_avg_sq"
        in_memory(left[name]).copy_(to_bf16(flat, bits) if kept_in == "bf16" else to_8_bits(flat, bits, signed=signed))
    return left


class Optimizer:
    """AdamW, Adam, SGD or Lion over fp32 tensors; ``masters`` are the weights of parameters that are not fp32.

    noise: (seed, number of each parameter's first element) where weights without master are rounded stochastically.
    narrow: ("bf16" or "8bit", seed, these numbers) where states are not kept in fp32, ("… split", …) where bf16 weights
    have remainders.
    """

    def __init__(
        self,
        kind: str,
        groups: list[dict[str, Any]],
        masters: dict[Tensor, Tensor],
        noise: Any = None,
        narrow: Any = None,
    ) -> None:
        self.kind, self.groups, self.noise, self.narrow = kind, groups, noise, narrow
        self.splits = narrow is not None and narrow[0].endswith(" split")
        if self.splits:
            self.narrow = (narrow[0].removesuffix(" split"), *narrow[1:])
        self.state: dict[Tensor, dict[str, Any]] = {p: {"step": 0, "master": m} for p, m in masters.items()}
        self.state_names: tuple[str, ...] = {"SGD": ("momentum_buffer",), "Lion": ("exp_avg",)}.get(
            kind, ("exp_avg", "exp_avg_sq")
        )
        self.moments = self.state_names
        self.state_names += ("remainder",) if self.splits else ()

    def names_of(self, p: Tensor) -> tuple[str, ...]:
        """What is kept of each element of ``p``."""
        return self.state_names

    def step(self, grads: dict[Tensor, Tensor], factor: Tensor) -> None:
        for group in self.groups:
            for p in group["params"]:
                if p in grads:
                    self._step_one(p, grads[p] * factor, group)

    def _step_one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state.setdefault(p, {"step": 0})
        old = state.get("master", p.detach()).float()
        if self.splits:
            joined = torch.empty_like(old)
            in_memory(joined).copy_(
                from_24_bits(in_memory(p.detach()), in_memory(state.get("remainder", torch.zeros_like(old))))
            )
            old = joined
        tensors = {name: state.get(name, torch.zeros_like(old)) for name in self.moments}
        state["step"] += 1
        new, tensors = new_values(self.kind, old, g, tensors, group, state["step"])
        if self.narrow is not None and self.narrow[0] != "fp32":
            tensors = kept(tensors, self.narrow[0], (self.narrow[1], self.narrow[2][p]), state["step"])
        state |= tensors
        if self.splits:
            words = words_in_rows(new.numel(), (self.narrow[1], self.narrow[2][p]), state["step"])
            weight, remainder = to_24_bits(in_memory(new), mix(words + GOLDEN) & 0xFF)
            state["remainder"] = torch.empty_like(new)
            in_memory(state["remainder"]).copy_(remainder)
            in_memory(p.detach()).copy_(weight)
            return
        if "master" in state:
            state["master"] = new
        if self.noise is not None and p.dtype is torch.bfloat16 and "master" not in state:
            new = round_stochastically(new, self.noise[0], state["step"], self.noise[1][p])
        p.detach().copy_(new)


Made = tuple[Callable[[list[Any]], Any], tuple[str, ...] | Callable[[Tensor], tuple[str, ...]]]
"""Makes an optimizer over groups, and the names of what it keeps, of each element or of a parameter as a whole."""


class MadeOptimizer(Optimizer):
    """Any class of torch's or of others, over whole fp32 tensors."""

    def __init__(self, made: Made, groups: list[Any], masters: Any) -> None:
        make, names = made
        self.groups, self.state, self.masters = groups, {}, masters
        self.named = (lambda p: names) if isinstance(names, tuple) else names
        self.whole = {p: nn.Parameter(masters.get(p, p).detach().clone()) for group in groups for p in group["params"]}
        self.made = make([{**group, "params": [self.whole[p] for p in group["params"]]} for group in groups])
        self.state = {p: {n: self.made.state[w][n] for n in self.names_of(p) if n in self.made.state[w]}
                      for p, w in self.whole.items() if self.made.state[w]}  # fmt: skip

    def names_of(self, p: Tensor) -> tuple[str, ...]:
        return self.named(p)

    def step(self, grads: dict[Tensor, Tensor], factor: Tensor) -> None:
        for p, whole in self.whole.items():
            whole.grad = grads[p] * factor if p in grads else None
        self.made.step()
        for p in grads:
            whole, state = self.whole[p], self.made.state[self.whole[p]]
            self.state[p] = {name: state[name].clone() for name in self.names_of(p) if name in state}
            self.state[p] |= {"master": whole.detach().clone()} if p in self.masters else {}
            p.detach().copy_(whole.detach())


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor, or transformers' class where groups have its options, with exact sums, fp64 between them,
    and what is kept, directions and weights rounded once to fp32 per operation."""

    def __init__(self, groups: list[Any], names: tuple[str, str, str]) -> None:
        super().__init__(groups, {})
        self.names = names
        for p in (p for group in self.param_groups for p in group["params"]):
            rows, columns, single = names
            ends = ((1,), (1,)) if rows == "row_var" else ((), ())  # only torch's keep the dimension that is summed
            shapes = {rows: (*p.shape[:-1], *ends[0]), columns: (*p.shape[:-2], *ends[1], p.shape[-1])} \
                if p.dim() > 1 else {single: p.shape}  # fmt: skip
            self.state[p] = {name: torch.zeros(shape) for name, shape in shapes.items()} | {"step": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group, self.state[p])

    def _step(self, p: Tensor, g: Tensor, group: Any, state: Any) -> None:
        torchs = "beta2_decay" in group
        t = state["step"] = state["step"] + 1
        size = math.sqrt(exact_sum(p.double().square().flatten(), 0).item() / p.numel())
        take = t ** (group["beta2_decay"] if torchs else group["decay_rate"])
        first = torch.finfo(torch.float32).eps if group["eps"][0] is None else group["eps"][0]
        squares, added = g.double().square(), 0.0 if torchs else first

        def kept(name: str, sums: Tensor, count: int) -> Tensor:
            before = state[name].double()
            state[name] = (before + (sums.view(before.shape) / count + added - before) * take).float()
            return state[name].double()

        rows, columns, single = self.names
        if p.dim() > 1:
            of_rows = kept(rows, exact_sum(squares, -1), p.shape[-1]).view(*p.shape[:-1], 1)
            of_columns = kept(columns, exact_sum(squares, -2), p.shape[-2]).view(*p.shape[:-2], 1, p.shape[-1])
            mean = exact_sum(of_rows, -2).unsqueeze(-2) / p.shape[-2]
            root = (
                of_rows / mean.clamp(min=first if torchs else 0)
            ).sqrt().reciprocal() * of_columns.sqrt().reciprocal()
        else:
            root = kept(single, squares, 1).sqrt().reciprocal()
        direction = (root.clamp(max=1 / first if torchs and first else math.inf) * g).float()
        long = math.sqrt(exact_sum(direction.double().square().flatten(), 0).item() / p.numel())
        rate, relative = group["lr"], 1 / math.sqrt(t)
        if torchs:
            decay, rate = group["lr"] * group["weight_decay"], max(group["eps"][1], size) * min(rate, relative)
        else:
            if group["relative_step"]:
                rate = min(1e-6 * t if group["warmup_init"] else 1e-2, relative)
            rate *= max(group["eps"][1], size) if group["scale_parameter"] else 1.0
            decay = rate * group["weight_decay"]
        rate /= max(1.0, long / group["d" if torchs else "clip_threshold"])
        update = direction * (-rate if torchs and group["maximize"] else rate)
        if group.get("beta1") is not None:
            old = state.setdefault("exp_avg", torch.zeros_like(p)) * group["beta1"]
            update = state["exp_avg"] = old + update * (1 - group["beta1"])
        p.copy_(p * (1 - decay) - update)


def exact_sum(values: Tensor, dimension: int) -> Tensor:
    """fp64 sums over a dimension, each rounded once."""
    rows = values.movedim(dimension, -1)
    sums = [math.fsum(row) for row in rows.reshape(-1, rows.shape[-1]).tolist()]
    return torch.tensor(sums, dtype=torch.float64).view(rows.shape[:-1])


class SeveralOptimizers(Optimizer):
    """One optimizer per group, in order; a string is the kind of a declared one."""

    def __init__(
        self, made: list[Made | str], groups: list[Any], masters: dict[Tensor, Tensor], narrow: Any = None
    ) -> None:
        self.groups, self.state = groups, {}
        self.parts: list[Optimizer] = []
        self.part_of: dict[Tensor, Optimizer] = {}
        for each, group in zip(made, groups, strict=True):
            own = {p: masters[p] for p in group["params"] if p in masters}
            if isinstance(each, str):
                part = Optimizer(each, [group], own, None, narrow)
            else:
                part = MadeOptimizer(each, [group], own)
            self.parts.append(part)
            self.part_of |= dict.fromkeys(group["params"], part)
            self.state |= part.state

    def step(self, grads: dict[Tensor, Tensor], factor: Tensor) -> None:
        for part in self.parts:
            part.step({p: g for p, g in grads.items() if self.part_of[p] is part}, factor)
            self.state |= part.state

    def names_of(self, p: Tensor) -> tuple[str, ...]:
        return self.part_of[p].names_of(p)


@dataclass
class Scaler:
    """The dynamic loss scale: halved when the tolerance (hysteresis) is used up, doubled after ``window`` good ones."""

    scale: float
    window: int
    hysteresis: int
    minimum: float
    good: int = 0
    left: int = 0

    def update(self, overflow: bool) -> None:
        self.left = self.left or self.hysteresis
        if overflow:
            if self.left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            self.left, self.good = max(self.left - 1, 1), 0
        else:
            self.good += 1
            if self.good % self.window == 0:
                self.scale, self.left = self.scale * 2, self.hysteresis


def kept_exact(model: nn.Module) -> set[Tensor]:
    """Parameters of norms with running statistics in fp32, which stay in fp32 where others are cast."""
    return {
        p
        for module in model.modules()
        if any(b.dtype is torch.float32 for name, b in module.named_buffers(recurse=False) if "running_" in name)
        for p in module.parameters(recurse=False)
    }


def clip_factor(limit: float, norm: Tensor) -> Tensor:
    """What a gradient of this norm is multiplied with."""
    return (torch.tensor(limit) / (norm + 1e-6)).clamp(max=1.0)


def follow_weight(state: dict[str, Any], weight: Tensor) -> None:
    """Where a weight was written, so that it is not its master rounded, the master becomes the weight."""
    if (master := state.get("master")) is not None:
        state["master"] = torch.where(master.to(weight.dtype) == weight, master, weight.float())


def step_apart(
    groups: Groups, window: Any, sums: Sums, exchanges: bool, step: int, trace: Trace, clips: Callable[..., Tensor]
) -> None:
    """One step of groups that step apart. window: (rank, micro-batch) → the gradients of each parameter."""
    groups.begin()
    size, used = groups.size, {p for row in window for micro in row for p in micro}
    of_group: list[dict[Tensor, Tensor]] = []
    for group in range(groups.count):
        with_whom = gossip(group, groups.count, step) if exchanges else [group]
        rows = [row for each in with_whom for row in window[each * size : (each + 1) * size]]
        order = sums.order if exchanges or sums.order == "full" else "sharded"
        how = replace(sums, order=order, divisor=len(rows), inside=size if exchanges else 0)
        complete: dict[Tensor, Tensor] = {}
        for p in (p for p in groups.parameters if p in used):
            found = complete_gradient([[micro.get(p, []) for micro in row] for row in rows], p.detach(), how)
            complete[p] = torch.zeros_like(p, dtype=torch.float32) if found is None else found
        of_group.append(complete)
    norms = [norm_of(list(complete.values())).float() for complete in of_group]
    of_all = norm_of([g for complete in of_group for g in complete.values()]).float()
    trace.norms.append([(norm if of_all.isfinite() else of_all).item() for norm in norms for _ in range(size)])
    if not of_all.isfinite():
        trace.skipped.append(step)
        return
    for group, complete in enumerate(of_group):
        groups.enter(group)
        groups.optimizer.step(complete, clips(norms[group]))


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int, int, int], Tensor | Iterable[Tensor]],
    *,
    ranks: int,
    micros: int = 1,
    steps: int = 10,
    kind: str = "AdamW",
    groups: list[dict[str, Any]],
    made: Made | list[Made | str] | None = None,
    order: str = "full",
    clip: float = 0.0,
    mean: bool = True,
    divisor: float | None = None,
    wire: torch.dtype | None = None,
    reduce: torch.dtype = torch.float32,
    accumulate: torch.dtype = torch.float32,
    low: torch.dtype | None = None,
    keeps_masters: bool = True,
    seed: int | None = None,
    kept_in: tuple[str, int] | None = None,
    scaler: Scaler | None = None,
    own_buffers: bool = False,
    skips: bool = True,
    ema: float | None = None,
    torch_clip: float = 0.0,
    norm_type: float = 2.0,
    clip_value: float = 0.0,
    inside: int = 0,
    coding: tuple[str, bool] | None = None,
    low_rank: tuple[int, int, bool, bool, float, bool, int] | None = None,
    coded_weights: str = "",
    earlier: Trace | None = None,
    has: Callable[[int, int, int], bool] = lambda step, rank, micro: True,
    by_active: bool = False,
    apart: tuple[str, int, int] | None = None,
    steps_unused: bool = False,
) -> Trace:
    """Train ``model`` in place as ``ranks`` data-parallel ranks would.

    ``loss_of(model, step, rank, micro)`` seeds its own randomness and returns a scalar loss, or several: a backward
    each, before the next one is asked for. divisor: of sums over ranks, instead of what mean says. wire: what is sent,
    by default each parameter's dtype. low: parameters are cast to it and the given values become their master weights,
    or are forgotten where not keeps_masters; then ``seed`` rounds the weights stochastically (None: to nearest).
    scaler: multiplies the loss. own_buffers: rank 0's are not sent. kept_in: "bf16" or "8bit" states, and the seed of
    their rounding.
    made: makes the optimizer, of any class, over groups, and the names of what it keeps; instead of ``kind``. A list:
    one for each group, of which the declared ones are said by their kind.
    skips: steps that are not finite are skipped without ``scaler``, too. ema: the decay of
    averages. torch_clip: the norm to which the user clips. norm_type: the order of all norms. clip_value: of each
    element. inside: ranks of a shard group of a hybrid mesh.
    coding: the communication hook, and whether errors are fed back. low_rank: PowerSGD, see there. coded_weights: how
    weights travel, "" as they are.
    earlier: training goes on from there up to ``steps``, with ``groups`` and trainable parameters as they are now;
    masters of those that join are the weights.
    has: (step, rank, micro) → whether there is such a micro-batch; by_active: the mean is over ranks that have any.
    apart: "local" or "gossip", the steps before that, and steps from one average to the next (0: none).
    steps_unused: what no rank used is stepped, too.
    """
    stepped = {p for group in groups for p in group["params"]}
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad and p in stepped]
    exact_ones = kept_exact(model) if low else set()
    low_of: dict[Tensor, torch.dtype] = {
        p: torch.float32 if p in exact_ones else low or p.dtype for p in model.parameters()
    }
    masters = {p: p.detach().float().clone() for p in trained if keeps_masters and low_of[p] != torch.float32}
    if coding is not None and coding[0] in ("fp16", "bf16"):
        wire = {"fp16": torch.float16, "bf16": torch.bfloat16}[coding[0]]
    said = "" if coding is None or ranks == 1 else coding[0]
    sums = Sums(order, divisor or (ranks if mean else 1), wire, reduce, accumulate, inside, said)
    errors = {p: [torch.zeros_like(p, dtype=torch.float32) for _ in range(ranks)] for p in trained}
    errors |= {p: taken_over(rows, ranks) for p, rows in (earlier.errors if earlier else {}).items()}
    fed_back = errors if said and coding is not None and coding[1] else {}
    scale_before = 1.0
    sizes = [p.numel() for p in model.parameters()]
    numbers: dict[Tensor, int] = {p: sum(sizes[:index]) for index, p in enumerate(model.parameters())}
    told = low_rank if ranks > 1 else None
    thin = {} if told is None else {p: LowRank(p, ranks, numbers[p], told) for p in trained}
    for p, before in (earlier.thin if earlier and thin else {}).items():
        thin[p].errors, thin[p].q = taken_over(before.errors, ranks), before.q
    for parameter in model.parameters() if low else ():
        parameter.data = parameter.data.to(low_of[parameter])
    trace = earlier or Trace()
    narrow = None if kept_in is None else (*kept_in, numbers)
    optimizer = Optimizer(kind, groups, masters, None if seed is None else (seed, numbers), narrow)
    if isinstance(made, list):
        optimizer = SeveralOptimizers(made, groups, masters, narrow)
    elif made is not None:
        optimizer = MadeOptimizer(made, groups, masters)
    if trace.optimizer is not None:
        optimizer.state |= trace.optimizer.state
    trace.optimizer = optimizer
    buffers = list(model.buffers())
    held = [[b.clone() for b in buffers] for _ in range(ranks)]
    fires: dict[Tensor, Fires] = {}
    averages: dict[Tensor, Tensor] = {}
    first = 0  # whose buffers all ranks have

    def collect(p: Tensor) -> None:
        assert p.grad is not None  # it was just accumulated
        fires.setdefault(p, []).append(p.grad.coalesce().to_dense() if p.grad.is_sparse else p.grad)
        p.grad = None

    groups_of_ranks = Groups(optimizer, trained, ranks, inside or ranks)

    model.zero_grad()
    handles = [p.register_post_accumulate_grad_hook(collect) for p in trained]
    for step in range(len(trace.losses), steps):
        if scaler is not None:  # errors are those of gradients that are multiplied with it
            fed_back = {q: [e * (scaler.scale / scale_before) for e in rows] for q, rows in fed_back.items()}
            scale_before = scaler.scale
        exact = {q: q.data for q in model.parameters() if coded_weights and ranks > 1}
        for q in exact:
            q.data = coded(q.detach().float(), coded_weights).to(q.dtype)
        windows: list[list[list[dict[Tensor, Fires]]]] = []  # backward of the micro-batch, rank, micro-batch
        losses = [[0.0] * micros for _ in range(ranks)]
        source = held[first]
        given = {q: q.detach().clone() for q in model.parameters()}
        active = [rank for rank in range(ranks) if any(has(step, rank, micro) for micro in range(micros))]
        for rank in range(ranks):
            for b, old in zip(buffers, held[rank] if own_buffers else source, strict=True):
                b.copy_(old)
            alike = rank in active and not groups_of_ranks.apart
            for q, values in given.items() if alike else ():  # a forward may write; every rank writes the same
                q.data.copy_(values)
            if groups_of_ranks.apart:
                groups_of_ranks.enter(rank // inside)
            for micro in (micro for micro in range(micros) if has(step, rank, micro)):
                found = loss_of(model, step, rank, micro)
                for number, loss in enumerate([found] if isinstance(found, Tensor) else found):
                    number = number if micro == micros - 1 else 0
                    scaled = loss if micros == 1 else loss / micros
                    (scaled if scaler is None else scaled.float() * scaler.scale).backward()
                    losses[rank][micro] += loss.item()
                    if len(windows) == number:
                        windows.append([[{} for _ in range(micros)] for _ in range(ranks)])
                    for p, fired in fires.items():
                        windows[number][rank][micro].setdefault(p, []).extend(fired)
                    fires.clear()
            held[rank] = [b.clone() for b in buffers]
        first = 0 if own_buffers else active[0]
        for b, new in zip(buffers, held[first], strict=True):
            b.copy_(new)
        for q, values in exact.items():
            q.data = values
        for p in masters if apart is None else ():
            follow_weight(optimizer.state.get(p, {}), p.detach())
        if apart is not None and step >= apart[1]:
            clips = functools.partial(clip_factor, clip) if clip else lambda norm: torch.tensor(1.0)
            trace.losses.append(losses)
            step_apart(groups_of_ranks, windows[0], sums, apart[0] == "gossip", step, trace, clips)
            if (apart[2] and (step + 1 - apart[1]) % apart[2] == 0) or step == steps - 1:
                groups_of_ranks.average()
            continue
        complete: dict[Tensor, Tensor] = {}
        for p, window in itertools.product(trained, windows):
            sent = [[by_parameter.get(p, []) for by_parameter in row] for row in window]
            approximated = None
            if p in thin and step >= thin[p].start:
                thin[p].scale = 1.0 if scaler is None else scaler.scale
                approximated = functools.partial(thin[p].sum, step=step)
            g = complete_gradient(sent, p.detach(), sums, fed_back.get(p), approximated)
            if g is not None:
                complete[p] = add_late(complete[p], g, wire or p.dtype) if p in complete else g
        for p in trained if steps_unused else ():
            complete.setdefault(p, torch.zeros_like(p, dtype=torch.float32))
        scale = 1.0 if scaler is None else scaler.scale
        scale *= len(active) / ranks if by_active and mean else 1.0
        norm = (norm_of(list(complete.values()), norm_type) / scale).float()
        if scaler is not None and norm.isnan():
            norm = torch.tensor(float("inf"))  # an overflow: inf - inf
        trace.losses.append(losses)
        trace.norms.append(norm.item())
        overflow = (skips or scaler is not None) and not norm.isfinite()
        if torch_clip:
            complete = clipped_by_torch(complete, torch_clip, wire, norm_type)
        if clip_value:
            bound = {p: torch.tensor(clip_value * scale).to(wire or p.dtype).float() for p in complete}
            complete = {p: g.clamp(-bound[p], bound[p]) for p, g in complete.items()}
        if overflow:
            trace.skipped.append(step)
        else:
            factor = clip_factor(clip, norm) if clip else torch.tensor(1.0)
            for p in complete if ema is not None else ():
                averages.setdefault(p, masters.get(p, p.detach()).clone())
            optimizer.step(complete, factor / scale)
            for p, average in averages.items():
                new = optimizer.state[p].get("master", p.detach())
                averages[p] = average + (new - average) * torch.tensor(1 - (ema or 0.0), dtype=torch.float32)
        if scaler is not None:
            scaler.update(overflow)
            trace.scales.append(scaler.scale)
    for handle in handles:
        handle.remove()
    trace.errors, trace.thin = {p: [e / scale_before for e in rows] for p, rows in fed_back.items()}, thin
    trace.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace.shown = {name: value.detach().clone() for name, value in model.state_dict().items()}
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    trace.trained = [names[p] for p in trained]
    trace.gradients = {names[p]: g for p, g in complete.items()} if steps and apart is None else {}
    for p, average in averages.items():
        optimizer.state[p]["ema"] = average
    trace.kept = {names[p]: (*optimizer.names_of(p), *(["ema"] if ema is not None else [])) for p in trained}
    for p, state in optimizer.state.items():
        trace.states[names[p]] = {key: tensor for key, tensor in state.items() if key != "step"}
    return trace
