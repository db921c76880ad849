"""The tensors that ``parameter.grad`` shows, from the end of a window's last backward to its step.

"Window" is the accumulation window. Must not know: how gradients came to be complete, the step, modules.

[Note: Shown gradients] A rank keeps a slice of each complete gradient, in flat buckets. The operations of torch's users
on ``parameter.grad`` still work, because it shows a tensor of the parameter's shape and dtype without memory:

    its 2-norm                  of the whole gradient, on every rank, without communication: ranks have exchanged each
                                parameter's square with the norm. So ``torch.nn.utils.clip_grad_norm_``, and loggers
                                of norms, are right at every stage and on any rank
    a norm of another order     the same, but on every rank: the first request exchanges all of them
    times or by a number        done to the slices (``clip_grad_norm_``), and to the known norms
    other in-place operations   element by element with numbers and tensors of its shape (``clip_grad_value_``,
                                ``nan_to_num_``, ``add_``): done to the slices; the next request for a norm, or the
                                step, exchanges the norms again, on every rank. Under a loss scale only clamping, whose
                                bounds are multiplied with it
    GradScaler.unscale_         finds values that are not finite from the squares, then multiplies with a number
    reading values              if every rank holds all of them (one rank, stage 0); otherwise ``UsageError`` names
                                the way, on every rank
    a copy, in any dtype        of this rank's slices: for operations on gradients of the same parameter, also later
    replacing it                with a tensor of its shape, or a copy: the step takes it over; None raises an error
                                there

If a change of a gradient raises on one rank, that is reported to the other ranks, also outside of any call of the
engine. A read that raises is not reported, since one rank alone may read, and catch the error.

If nothing announces the end of a backward (a ``loss.backward()`` whose output the engine did not see), every parameter
shows its gradient from the first one on, and the first use of one ends that backward (``expect``).
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardengine.ddp.gradient_bucket import GradientBucket
from shardengine.errors import InternalError, UsageError
from shardengine.kernels import norm_from_powers
from shardengine.sharding import Layout, in_memory_order, shaped

_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default}
_COPIES = {_aten.clone.default, _aten._to_copy.default}
_NORMS = {_aten.linalg_vector_norm.default, _aten.norm.Scalar, _aten.norm.ScalarOpt_dtype}
_FACTORS = {_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar}
_ELEMENTWISE = _FACTORS | {
    *(_aten.add_.Tensor, _aten.add_.Scalar, _aten.sub_.Tensor, _aten.sub_.Scalar, _aten.neg_.default),
    *(_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default, _aten.nan_to_num_.default),
    *(_aten.clamp_.default, _aten.clamp_.Tensor, _aten.clamp_min_.default, _aten.clamp_max_.default),
    *(_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor, _aten.sign_.default, _aten.lerp_.Scalar),
}
_BOUNDS = {
    _aten.clamp_.default: ("min", "max"),
    _aten.clamp_min_.default: ("min",),
    _aten.clamp_max_.default: ("max",),
}
"""Operations that clamp between numbers, with the names of their arguments."""
_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones",
         "new_empty", "new_full")  # fmt: skip
_EACH = {
    _aten._foreach_norm.Scalar: _aten.linalg_vector_norm.default,
    **dict.fromkeys((_aten._foreach_mul_.Scalar, _aten._foreach_mul_.Tensor), _aten.mul_.Tensor),
    **dict.fromkeys((_aten._foreach_div_.Scalar, _aten._foreach_div_.Tensor), _aten.div_.Tensor),
    _aten._foreach_mul_.ScalarList: _aten.mul_.Tensor,
    _aten._foreach_div_.ScalarList: _aten.div_.Tensor,
    _aten._foreach_clamp_min_.Scalar: _aten.clamp_min_.default,
    _aten._foreach_clamp_max_.Scalar: _aten.clamp_max_.default,
}
"""Operations on a list of tensors, as used by ``foreach=True``, with the operation on one tensor."""
_REFERENCES = 3
"""The references to an object that nobody else has: from a dict, a local name, and the call that counts."""
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default


@dataclass(frozen=True)
class _Copied:
    """The contents of a copy of a gradient, which nobody may write to.

    parts: this rank's elements, and the number of the first among the parameter's · scale: the loss scale that they are
    multiplied with · square: of the norm, with the scale; None: not known · state: of the gradient when it was copied;
    None: values were rounded, so they differ from the gradient's.
    """

    parts: list[tuple[Tensor, int]]
    scale: float
    square: Tensor | None
    state: tuple[int, int] | None


class ShardedGradient(Tensor):
    """One parameter's complete gradient, as ``parameter.grad`` ([Note: Shown gradients]). It has no memory."""

    views: GradientViews
    number: int
    incoming: Tensor | None
    copied: _Copied | None

    @staticmethod
    def __new__(
        cls,
        views: GradientViews,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
        copied: _Copied | None = None,
    ) -> ShardedGradient:
        """Return the gradient of parameter ``index``. copied: it is a copy with these values."""
        shape = views.layout.parameters[index].shape
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, storage_size=0
        )
        made.views, made.number, made.incoming, made.copied = views, index, None, copied
        return made

    def __repr__(self, **_options: Any) -> str:  # type: ignore[override]
        """Describe the shape and the place of the gradient, not its values: reading them may need communication."""
        return f"ShardedGradient({self.views.describe(self.number)})"

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        self.views.refuse(self.number, "a copy or pickle")

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        self.views.refuse(self.number, "a copy")

    def numpy(self, **_options: Any) -> NoReturn:
        """Raise ``UsageError``: a rank's part is no array."""
        self.views.refuse(self.number, "numpy()")

    def tolist(self) -> NoReturn:
        """Raise ``UsageError``, as ``numpy`` does."""
        self.views.refuse(self.number, "tolist()")

    def __dlpack__(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise ``UsageError``: there is no memory to export."""
        self.views.refuse(self.number, "dlpack")

    def apply_(self, *_args: Any) -> NoReturn:
        """Raise ``UsageError``: torch's implementation uses the memory."""
        with self.views.telling(self.number):
            self.views.refuse(self.number, "apply_, map_ or map2_")

    map_ = map2_ = apply_  # type: ignore[assignment]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Carry out ``operation`` as [Note: Shown gradients] describes."""
        return _carry_out(operation, args, kwargs or {})


def _carry_out(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if operation is _UNSCALE:
        return _unscale(*args)
    if operation in _EACH:
        return _one_by_one(operation, args, kwargs)
    if operation.namespace == "c10d":
        _refuse_collective(args, kwargs)
    own = args[0] if args and isinstance(args[0], ShardedGradient) else None
    if own is None:
        return _with_values(operation, args, kwargs)
    views, index = own.views, own.number
    if own.copied is None:
        views.require_current(own)
    if operation in (_aten.add_.Tensor, _aten.add.Tensor) and _is_accumulation(args):
        own.incoming = args[1]  # autograd brings the next gradient; the hook takes it from here
        return own if operation is _aten.add_.Tensor else args[1]
    if operation in _SAME:
        return own
    if operation in _COPIES:
        dtype = kwargs.get("dtype") or own.dtype
        return ShardedGradient(views, index, dtype, own.device, views.copied(own, dtype))
    if operation in _NORMS and (order := _order(args, kwargs)) is not None:
        found = views.norm(index, order) if own.copied is None else views.norm_of_copy(own, order)
        if found is not None:
            return found
    if operation in _ELEMENTWISE and own.copied is None:
        views.change(index, operation, args[1:], kwargs)
        return own
    return _with_values(operation, args, kwargs)


def _refuse_collective(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise for an operation of torch.distributed: its result could not reach the step."""
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, ShardedGradient):
            with each.views.telling(each.number):
                each.views.refuse(each.number, "a collective of torch.distributed")


def _is_accumulation(args: Sequence[Any]) -> bool:
    plain = isinstance(args[1], Tensor) and not isinstance(args[1], ShardedGradient)
    return plain and torch._C._current_graph_task_id() >= 0 and args[1].shape == args[0].shape


def _order(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """Return the order of a requested norm of all elements; None for any other request."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    known = isinstance(order, int | float) and order > 0
    return float(order) if known and len(args) <= 2 and kwargs.get("dim") is None else None


def _with_values(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operation`` on copies of the values, if this rank holds them; nothing may be written, or be a view."""
    name = operation._schema.name.split("::")[-1]

    def value_of(argument: Any) -> Any:
        if not isinstance(argument, ShardedGradient):
            return argument
        if name in _LIKE:
            return torch.zeros((), dtype=argument.dtype, device=argument.device).expand(argument.shape)
        if operation._schema.is_mutable:
            with argument.views.telling(argument.number):
                argument.views.refuse(argument.number, name)
        if operation.is_view:
            argument.views.refuse(argument.number, name)
        return argument.views.values(argument, name).to(argument.dtype)

    return operation(*tree_map(value_of, tuple(args)), **tree_map(value_of, dict(kwargs)))


def _one_by_one(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Run an ``operation`` of `_EACH` tensor by tensor; None if it is in place."""
    tensors, *others = args
    rows = [
        [row[number] if isinstance(row, (list, tuple)) else row for row in others] for number in range(len(tensors))
    ]
    done = [_EACH[operation](tensor, *row, **kwargs) for tensor, row in zip(tensors, rows, strict=True)]
    return done if operation is _aten._foreach_norm.Scalar else None


def _unscale(gradients: Sequence[Any], found: Tensor, inverse_scale: Tensor) -> None:
    """``torch.amp.GradScaler.unscale_``: set ``found`` if a value is not finite, then multiply all gradients."""
    for gradient in gradients:
        if not isinstance(gradient, ShardedGradient):
            _UNSCALE([gradient], found, inverse_scale)
            continue
        if not gradient.views.is_finite(gradient.number):
            found.fill_(1.0)
        gradient.views.change(gradient.number, _aten.mul_.Tensor, [inverse_scale], {})


class GradientViews:
    """Shows ``parameters`` (of ``layout``) the gradients in ``buckets``.

    changed: whether anything but a multiplication has changed them, so the norm is not known · multiplied: whether they
    were multiplied, so the norm differs from the exchanged one · digest: of all changes so far, equal on ranks that
    have made the same ones.
    """

    def __init__(
        self,
        layout: Layout,
        buckets: Sequence[GradientBucket],
        parameters: Sequence[nn.Parameter],
        rank: int,
        tell: Callable[[BaseException, str], None] = lambda error, what: None,
    ) -> None:
        self.layout = layout
        self.changed = self.multiplied = False
        self.digest = 0
        self._rank = rank
        self._parameters = parameters
        self._tell = tell
        """Reports to the other ranks the error of a rejected change, and which change it was."""
        self._shown: dict[int, ShardedGradient] = {}
        self._made: dict[int, ShardedGradient] = {}
        self._squares: Tensor | None = None
        self._powers: dict[float, Tensor] = {}
        self._exchange_powers: Callable[[float], Tensor] | None = None
        self._by_squares = True
        self._scale = 1.0
        self._fixed = ""
        self._complete: Callable[[], None] | None = None
        self._again: Callable[[], object] | None = None
        self._unused: set[int] = set()
        self._window = 0
        self._changes: dict[int, int] = {}
        self._of: dict[int, list[GradientBucket]] = {}
        for bucket_grad in buckets:
            for index in bucket_grad.pieces:
                self._of.setdefault(index, []).append(bucket_grad)

    def expect(self, complete: Callable[[], None]) -> None:
        """Show all gradients of a backward that has begun and whose end nobody will announce.

        The first use of one calls ``complete``.
        """
        self.hide()
        self._complete = complete
        for index in self._of if self._parameters else ():
            self.expect_more(index)

    def expect_more(self, index: int) -> None:
        """Show parameter ``index`` again after its gradient was taken: more gradients, or the first use, may come."""
        if self._complete is not None:
            self._show(index)

    def take_digest(self) -> int:
        """Return ``digest`` and reset it. Every rank calls this; the digests may differ."""
        digest, self.digest = self.digest, 0
        return digest

    def show(
        self,
        touched: frozenset[int],
        squares: Tensor | None,
        again: Callable[[], object] | None = None,
        *,
        powers: Callable[[float], Tensor] | None = None,
        scale: float = 1.0,
        by_squares: bool = True,
        fixed: str = "",
    ) -> None:
        """Show the gradients of the parameters ``touched``, which are complete.

        squares: fp64 [parameters], the square of each one's norm; None: not known · again: exchanges them again after
        changes, and shows them · powers: of all parameters, for norms of an order; collective · scale: the factor that
        all are multiplied with · by_squares: whether the norm of the step follows from squares, so it is known after a
        multiplication · fixed: why they may not be changed any more.
        """
        if not self._parameters:
            return
        self.hide()
        self._squares, self._again, self._scale, self._fixed = squares, again, scale, fixed
        self._exchange_powers, self._by_squares = powers, by_squares
        for index in touched:
            self._show(index)

    def fix(self, why: str) -> None:
        """Forbid changes of the shown gradients, with the reason ``why``; "" allows them."""
        self._fixed = why

    def _show(self, index: int) -> None:
        parameter, view = self._parameters[index], self._shown.get(index) or self._kept(index)
        with torch._C.DisableTorchFunctionSubclass():  # poison is asked as fast as any other tensor
            if view is None or view.device != parameter.device:
                view = ShardedGradient(self, index, parameter.dtype, parameter.device)
                self._made[index] = view
            self._shown[index] = view
            parameter.grad = view

    def _kept(self, index: int) -> ShardedGradient | None:
        """Return the object that parameter ``index`` has shown before, if nobody else has kept it.

        For a caller that has kept it, it is the gradient of that earlier time.
        """
        view = self._made.get(index)
        return view if sys.getrefcount(view) <= _REFERENCES else None

    def require_current(self, view: ShardedGradient) -> None:
        """Raise ``UsageError`` if ``view`` was shown in an earlier accumulation window."""
        if self._made.get(view.number) is not view:
            raise self._over(view.number)

    def _over(self, index: int) -> UsageError:
        return UsageError(
            f"this gradient of {self.layout.parameters[index].name!r} is of a step that is over (rank {self._rank}): "
            "expected parameter.grad between the window's last backward and step(), or a copy of it, grad.clone()",
            code="grad-of-past-step",
        )

    def require_complete(self, index: int) -> None:
        """End the backward before a gradient is used; ``UsageError`` if it still runs, or the step is over."""
        complete = self._complete
        if complete is not None and torch._C._current_graph_task_id() >= 0:
            raise UsageError(
                f"{self.layout.parameters[index].name!r}.grad was used during backward (rank {self._rank}), before the "
                "gradients are reduced: use it after backward(), or Tensor.register_hook for this rank's gradient",
                code="grad-used-during-backward",
            )
        self._complete = None
        if complete is not None:
            expected = set(self._shown)
            complete()
            self._unused = expected - self._shown.keys()  # on all ranks: zeros
        if index not in self._shown and index not in self._unused:
            raise self._over(index)

    def hide(self) -> None:
        """Set ``grad`` to None: gradients are stepped with, dropped, or another backward begins."""
        with torch._C.DisableTorchFunctionSubclass():  # poison is written as fast as any other tensor
            for index in self._shown:
                self._parameters[index].grad = None
        self._shown.clear()
        self._unused = set()
        self._squares, self.changed, self.multiplied, self._complete, self._again = None, False, False, None, None
        self._powers.clear()
        self._changes.clear()
        self._window += 1

    def adopt(self, *, but: int | None = None) -> None:
        """Before the step, or another backward: take over the user's replacements of gradients, or reject them.

        but: a parameter that autograd accumulates into now.
        """
        with torch._C.DisableTorchFunctionSubclass():  # poison is asked as fast as any other tensor
            grads = {index: self._parameters[index].grad for index in self._shown}
        for index, view in self._shown.items():
            current = grads[index]
            if current is view or index == but:
                continue
            taken_over = isinstance(current, Tensor) and not isinstance(current, ShardedGradient)
            if not taken_over and not (isinstance(current, ShardedGradient) and current.copied is not None):
                with self.telling(index):
                    self._refuse_in_its_place(index, current)
            self.change(index, _aten.copy_.default, [current], {})
            self._parameters[index].grad = view

    @contextmanager
    def telling(self, index: int) -> Iterator[None]:
        """Report an exception inside to the other ranks, as a change of parameter ``index``'s gradient."""
        try:
            yield
        except Exception as error:
            self._tell(error, f"a change of {self.layout.parameters[index].name!r}.grad")
            raise

    def exchange_again(self) -> None:
        """Exchange the norms again, after changes; collective."""
        self.adopt()
        if self._again is not None:
            self._again()

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters of the layout, in its order."""
        return self._parameters

    @property
    def squares(self) -> Tensor | None:
        """The square of each parameter's norm, with changes so far: fp64 [parameters] on the device; None: unknown."""
        return self._squares

    def square(self, indices: Sequence[int]) -> Tensor:
        """Return the square of the norm of the gradients of ``indices`` together, with changes so far: fp64 [1]."""
        if self._squares is None:
            raise InternalError("the norm of gradients is asked for that were changed and not exchanged again")
        return self._squares[list(indices)].sum().view(1)

    def norm(self, index: int, order: float = 2.0) -> Tensor:
        """Return a norm of a whole gradient, without the loss scale: 0-dim fp32.

        The first request for an order other than 2 is collective.
        """
        if order == 2:
            return (self._square_of(index).sqrt() / self._scale).float()
        self.require_complete(index)
        if self._exchange_powers is None:
            self.refuse(index, f"the {order:g}-norm")
        if order not in self._powers:
            self._powers[order] = self._exchange_powers(order)
        return norm_from_powers(self._powers[order][index], order, self._scale)

    def norm_of_copy(self, copy: ShardedGradient, order: float) -> Tensor | None:
        """As ``norm``, of a copy; None if only its values determine it."""
        copied = copy.copied
        if copied is not None and copied.state is not None:
            if copied.state == self._state(copy.number):
                return self.norm(copy.number, order)
            if order == 2 and copied.square is not None:
                return (copied.square.sqrt() / copied.scale).float()
        return None

    def _state(self, index: int) -> tuple[int, int]:
        """Return a value that differs after each change of the gradient, and in each accumulation window."""
        return self._window, self._changes.get(index, 0)

    def is_finite(self, index: int) -> bool:
        """Return whether every element of the gradient is finite."""
        return math.isfinite(self._square_of(index).item())

    def _square_of(self, index: int) -> Tensor:
        self.require_complete(index)
        if self.changed:
            self.exchange_again()
        if self._squares is None:
            self.refuse(index, "the norm, which is known only where the engine has an optimizer,")
        return self._squares[index]

    def change(self, index: int, operation: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Run ``operation(gradient, *arguments)``, in place and element by element, on this rank's elements."""
        with self.telling(index):
            self._change(index, operation, arguments, options)

    def _change(self, index: int, operation: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        self.require_complete(index)
        name = self.layout.parameters[index].name
        if self._fixed:
            raise UsageError(
                f"{name!r}.grad cannot be changed (rank {self._rank}): {self._fixed}", code="grad-cannot-change-now"
            )
        factor = _factor(operation, arguments, options)
        if self._scale != 1 and factor is None:
            scaled = _scaled_bounds(operation, arguments, options, self._scale)
            if scaled is None:
                raise UsageError(
                    f"{name!r}.grad is still multiplied by the loss scale {self._scale:g} (rank {self._rank}): it "
                    "supports only multiplication and clamp() between numbers. For other changes use "
                    "`with engine.full_grads(writable=True):`, which shows it unscaled",
                    code="grad-change-while-scaled",
                )
            operation, arguments, options = _clamp_finite, scaled, {}
        self._note(index, operation, arguments)
        with torch.no_grad():
            for part, offset, wire in self._parts(index):
                near = [self._local(each, index, offset, part) for each in arguments]
                target = part if part.dtype is wire else part.to(wire)
                operation(target, *near, **options)
                if target is not part:
                    part.copy_(target)
            self._powers.clear()
            self._changes[index] = self._changes.get(index, 0) + 1
            if factor is not None and self._squares is not None and self._by_squares:
                self._squares[index] *= factor.to(self._squares.device) ** 2
                self.multiplied = True
            else:
                self._squares, self.changed = None, True

    def _note(self, index: int, operation: Any, arguments: Sequence[Any]) -> None:
        """Add a change to the digest, without waiting for numbers on a device other than the CPU."""
        told = []
        for each in arguments:
            number = type(each) is Tensor and each.numel() == 1 and each.device.type == "cpu"
            told.append(each.tolist() if number else type(each).__name__ if isinstance(each, Tensor) else each)
        self.note(index, str(operation), told)

    def note(self, *told: Any) -> None:
        """Add a change of gradients to the digest."""
        self.digest = zlib.crc32(repr(told).encode(), self.digest)

    def copied(self, view: ShardedGradient, dtype: torch.dtype) -> _Copied:
        """Return the contents of a copy of ``view`` in ``dtype``."""
        index, earlier = view.number, view.copied
        if earlier is None:
            self.require_complete(index)
            square = None if self._squares is None or self.changed else self._squares[index].clone()
            parts = [(part.to(wire, copy=True), offset) for part, offset, wire in self._parts(index)]
            earlier = _Copied(parts, self._scale, square, self._state(index))
        if dtype == view.dtype:
            return earlier  # nobody writes into it
        parts = [(part.to(dtype), offset) for part, offset in earlier.parts]
        rounded = any(torch.promote_types(part.dtype, dtype) != dtype for part, _ in earlier.parts)
        rounded |= torch.promote_types(view.dtype, dtype) != dtype
        return _Copied(parts, earlier.scale, None if rounded else earlier.square, None if rounded else earlier.state)

    def values(self, view: ShardedGradient, what: str) -> Tensor:
        """Return a copy of the whole gradient if every rank holds it, else raise ``UsageError`` on every rank.

        If only some ranks raised, the others would continue and wait for them. what: the operation that reads it.
        """
        index, copied = view.number, view.copied
        if copied is None:
            self.require_current(view)
            self.require_complete(index)
        spec, scale = self.layout.parameters[index], self._scale if copied is None else copied.scale
        parts = [part.to(wire) for part, _, wire in self._parts(index)] if copied is None else [
            part for part, _ in copied.parts
        ]  # fmt: skip
        everywhere = all(state.gradient_interval == state.bucket.layout.whole_interval for state in self._of[index])
        if not everywhere or sum(part.numel() for part in parts) < spec.numel:
            self.refuse(index, what)
        flat = torch.cat(parts).to(self._parameters[index].device)
        return shaped(flat if scale == 1 else (flat.float() / scale).to(flat.dtype), spec)

    def describe(self, index: int) -> str:
        """Return a text: name, shape, how many elements this rank holds."""
        spec = self.layout.parameters[index]
        held = sum(part.numel() for part, *_ in self._parts(index)) if index in self._shown else 0
        return f"{spec.name!r}, shape {spec.shape}, rank {self._rank} holds {held} of {spec.numel} elements"

    def refuse(self, index: int, what: str) -> NoReturn:
        """Raise ``UsageError``: ``what`` needs values that this rank does not have."""
        name = self.layout.parameters[index].name
        raise UsageError(
            f"{what} of {name!r}.grad is not possible (rank {self._rank}): this .grad is a placeholder, because the "
            "gradient is sharded over the ranks. It supports its 2-norm, and in place multiplication, grad.mul_(2), "
            "and "
            "other elementwise operations; for a part of it use a mask of the whole shape, grad.mul_(mask) or "
            f"grad.masked_fill_(mask, 0.0). To read its values, use `with engine.full_grads([{name!r}]) as grads:` on "
            "every rank. The optimizer that steps with it is engine.optimizer",
            code="grad-operation-refused",
        )

    def _refuse_in_its_place(self, index: int, current: object) -> NoReturn:
        if isinstance(current, ShardedGradient):
            raise UsageError(
                f"{self.layout.parameters[index].name!r}.grad was replaced by {current!r} (rank {self._rank}), which "
                "shows what is in the engine's bucket at the time: expected a copy of its own gradient, grad.clone(), "
                f"or a plain tensor, as `with engine.full_grads() as grads:` has them",
                code="grad-replaced-by-another",
            )
        raise UsageError(
            f"{self.layout.parameters[index].name!r}.grad was set to None between backward and step() (rank "
            f"{self._rank}), but the engine still has its gradient. To discard this accumulation window call "
            "engine.zero_grad() on every rank (not model.zero_grad()); to zero one gradient use .grad.zero_()",
            code="grad-set-to-none",
        )

    def _parts(self, index: int) -> Iterator[tuple[Tensor, int, torch.dtype]]:
        """Yield this rank's parts: (view of the elements, number of the first in the parameter, the values' dtype)."""
        for state in self._of[index]:
            piece, flat = state.pieces[index], state.gradient
            if flat is None:
                continue
            first, last = state.gradient_interval
            start, end = max(piece.start, first), min(piece.end, last)
            if start < end:
                yield flat[start - first : end - first], piece.offset + start - piece.start, state.wire

    def _local(self, argument: Any, index: int, offset: int, part: Tensor) -> Any:
        """Return ``argument`` of an operation, for the elements from ``offset`` on that ``part`` holds."""
        if not isinstance(argument, Tensor):
            return argument
        spec = self.layout.parameters[index]
        if isinstance(argument, ShardedGradient):
            if argument.views is self and argument.number == index:
                return self._same_elements(argument, offset, part)
            argument = argument.views.values(argument, "an operation with the values")
        if argument.dim() == 0 or argument.numel() == 1:
            return argument.reshape(()).to(part.device)
        flat = in_memory_order(argument.expand(spec.shape), spec).reshape(-1)
        return flat[offset : offset + part.numel()].to(part.device)

    def _same_elements(self, argument: ShardedGradient, offset: int, part: Tensor) -> Tensor:
        """Return the elements of ``part``, from number ``offset`` on, of a copy of the same gradient or of itself."""
        if argument.copied is None:
            self.require_current(argument)
            return part.clone()
        scale = self._scale / argument.copied.scale
        for values, first in argument.copied.parts:
            if first <= offset and offset + part.numel() <= first + values.numel():
                near = values[offset - first : offset - first + part.numel()].to(part.device)
                return near if scale == 1 else near * scale
        raise UsageError(
            f"a copy of {self.layout.parameters[argument.number].name!r}.grad is of a time when rank {self._rank} held "
            'other elements of it: expected "recut_buckets": false in zero_optimization, where copies are kept',
            code="grad-copy-after-recut",
        )


def _factor(operation: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> Tensor | None:
    """Return the factor of a multiplication or division: 0-dim fp64; None for any other ``operation``."""
    if operation not in _FACTORS or options or isinstance(arguments[0], ShardedGradient):
        return None
    if isinstance(arguments[0], Tensor) and arguments[0].numel() != 1:
        return None
    value = torch.as_tensor(arguments[0], dtype=torch.float64).reshape(())
    return value if operation in (_aten.mul_.Tensor, _aten.mul_.Scalar) else 1 / value


def _scaled_bounds(
    operation: Any, arguments: Sequence[Any], options: Mapping[str, Any], scale: float
) -> list[float] | None:
    """Return the bounds of a clamp between numbers, times ``scale``; None for any other ``operation``."""
    if operation not in _BOUNDS:
        return None
    given = dict(zip(_BOUNDS[operation], arguments, strict=False)) | dict(options)
    if any(isinstance(each, Tensor) for each in given.values()):
        return None
    low, high = given.get("min"), given.get("max")
    return [-math.inf if low is None else low * scale, math.inf if high is None else high * scale]


def _clamp_finite(target: Tensor, low: float, high: float) -> None:
    """Clamp a gradient that is multiplied with the loss scale. An overflow is kept, so the step is still skipped."""
    bounds = torch.tensor([low, high], dtype=torch.float64).to(target.dtype).to(target.device)
    target.copy_(torch.where(target.isfinite(), target.clamp(bounds[0], bounds[1]), target))


def taken(parameter: Tensor) -> tuple[ShardedGradient | None, Tensor | None]:
    """Return the gradient that ``parameter`` showed and the one just accumulated by autograd; clear ``grad``."""
    shown, parameter.grad = parameter.grad, None
    if not isinstance(shown, ShardedGradient):
        return None, shown
    gradient, shown.incoming = shown.incoming, None
    return shown, gradient
