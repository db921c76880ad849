"""Models on a frozen base that stays quantised: by a tensor subclass, by plain tensors, by what a parameter keeps.

Owns: ``Int8`` (int8 values with fp32 scales), which stands for what torchao makes, and ``Codes`` with ``Table``, which
stand for the parameters of bitsandbytes. Must not know: engines.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, RANK = 20, 3


class Int8(Tensor):
    """A matrix of int8 with one fp32 scale per row. It has no memory of its own."""

    def __new__(cls, values: Tensor, scale: Tensor, dtype: torch.dtype) -> Int8:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=dtype, device=values.device)

    def __init__(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.values_of_it = values
        self.scale = scale
        self.computes_in = dtype

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        """``weight``, rounded."""
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale, weight.dtype)

    def dequantise(self) -> Tensor:
        """In fp32 or what it was made from."""
        return (self.values_of_it.to(torch.float32) * self.scale).to(self.computes_in)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["values_of_it", "scale"], {"dtype": self.computes_in}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: dict[str, Any], _size: Any, _stride: Any) -> Int8:
        return Int8(inner["values_of_it"], inner["scale"], context["dtype"])

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            one = args[0]
            return cls(one.values_of_it.detach(), one.scale.detach(), one.computes_in)
        if func is torch.ops.aten.copy_.default and isinstance(args[1], Int8):
            args[0].values_of_it.copy_(args[1].values_of_it)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        plain = [each.dequantise() if isinstance(each, Int8) else each for each in args]
        return func(*plain, **(kwargs or {}))


class Twice(Tensor):
    """An ``Int8`` inside of another object, which adds a row to it."""

    def __new__(cls, matrix: Tensor, row: Tensor) -> Twice:
        return Tensor._make_wrapper_subclass(cls, matrix.shape, dtype=matrix.dtype, device=row.device)

    def __init__(self, matrix: Tensor, row: Tensor) -> None:
        self.matrix = matrix
        self.row = row

    def dequantise(self) -> Tensor:
        """The sum."""
        matrix: Any = self.matrix
        return matrix.dequantise() + self.row

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["matrix", "row"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _context: Any, _size: Any, _stride: Any) -> Twice:
        return Twice(inner["matrix"], inner["row"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].matrix.detach(), args[0].row.detach())
        if func is torch.ops.aten.copy_.default and isinstance(args[1], Twice):
            args[0].matrix.copy_(args[1].matrix)
            args[0].row.copy_(args[1].row)
            return args[0]
        plain = [each.dequantise() if isinstance(each, Twice) else each for each in args]
        return func(*plain, **(kwargs or {}))


class Table:
    """How the codes of a matrix are read, as bitsandbytes keeps it in ``quant_state``."""

    def __init__(self, absmax: Tensor, blocksize: int) -> None:
        self.absmax = absmax
        self.blocksize = blocksize


class Codes(nn.Parameter):
    """uint8 codes with memory of their own. table: what they mean · CB: the same memory once more."""

    table: Table
    CB: Tensor | None

    @staticmethod
    def of(weight: Tensor) -> Codes:
        """``weight``, rounded."""
        absmax = weight.abs().amax(1, keepdim=True)
        codes = (weight / absmax * 127 + 128).round().to(torch.uint8)
        made = Tensor._make_subclass(Codes, codes, False)
        made.table = Table(absmax, weight.shape[1])
        made.CB = made.data
        return made


class State:
    """What a module of ``Codes`` computes with."""

    CB: Any = None


class CodesLinear(nn.Module):
    """As Linear8bitLt: its first forward moves ``CB`` away from the parameter, later ones show that to it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = Codes.of(weight)
        self.state = State()

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.weight.CB = self.weight.CB, None
        result = _Product.apply(x, self.state, self.weight.table)
        self.weight.data = self.state.CB
        return result


class _Product(torch.autograd.Function):
    """Saves nothing: backward reads the codes where they are."""

    @staticmethod
    def _matrix(state: Any, table: Any) -> Tensor:
        return (state.CB.float() - 128) / 127 * table.absmax

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Any, table: Any) -> Tensor:
        ctx.held = state, table
        return x @ _Product._matrix(state, table).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0] @ _Product._matrix(*ctx.held), None, None


class Scaled(nn.Module):
    """A plain frozen parameter of ``dtype`` with scales in a buffer of another dtype."""

    scale: Tensor
    offset: Tensor

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 100
        rounded = (weight / scale).round() if not dtype.is_floating_point else weight / scale
        self.weight = nn.Parameter(rounded.to(dtype), requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_buffer("offset", torch.zeros(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.float() * self.scale + self.offset.float().sum()).T


def of_torchao(weight: Tensor) -> nn.Module:
    """int8 as torchao makes it."""
    library = import_module("torchao.quantization")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight)
    library.quantize_(layer.requires_grad_(False), library.Int8WeightOnlyConfig())
    return layer


def of_bitsandbytes(weight: Tensor) -> nn.Module:
    """8 bits as bitsandbytes has them."""
    library = import_module("bitsandbytes.nn")
    layer: Any = library.Linear8bitLt(weight.shape[1], weight.shape[0], bias=False, has_fp16_weights=False)
    layer.weight = library.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    layer.weight._quantize("cpu")
    made: nn.Module = layer.requires_grad_(False)
    return made


LIBRARIES = {"torchao": of_torchao, "bitsandbytes": of_bitsandbytes}


class Adapted(nn.Module):
    """A linear layer whose base is quantised in one of several ways, with an adapter beside it."""

    def __init__(self, kind: str, dtype: torch.dtype, width: int) -> None:
        super().__init__()
        weight = nn.Linear(width, width).weight.detach()
        if kind == "codes":
            self.base: Any = CodesLinear(weight)
        elif kind in LIBRARIES:
            self.base = LIBRARIES[kind](weight)
        elif kind in ("int8", "twice"):
            self.base = nn.Linear(width, width, bias=False)
            made = Int8.of(weight) if kind == "int8" else Twice(Int8.of(weight), torch.ones(1, width))
            self.base.weight = nn.Parameter(made, requires_grad=False)
        else:
            self.base = Scaled(weight, getattr(torch, kind))
        self.down = nn.Parameter(torch.randn(RANK, width).to(dtype))
        self.up = nn.Parameter(torch.randn(width, RANK).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x.to(self.down.dtype), self.down), self.up).float()


class Quantised(nn.Module):
    """As cases.Mlp: 7 numbers in, 3 out."""

    def __init__(self, kinds: tuple[str, ...], dtype: torch.dtype, width: int) -> None:
        super().__init__()
        self.inp = nn.Linear(7, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted(kind, dtype, width) for kind in kinds)
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


KINDS = ("int8", "codes", "twice", "float8_e4m3fn", "int16", "bool")


def make(
    kinds: tuple[str, ...] = KINDS, dtype: torch.dtype = torch.float32, seed: int = 31, width: int = WIDTH
) -> Quantised:
    """A model with a block of each kind; adapters in ``dtype``."""
    torch.manual_seed(seed)
    return Quantised(kinds, dtype, width)


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """As cases.loss_of."""
    torch.manual_seed(1 + micro + 100 * rank + 10_000 * step)
    x, y = torch.randn(5, 7), torch.randn(5, 3)
    return (model(x) - y).square().mean()
