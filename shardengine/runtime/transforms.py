"""Transforms of torch.func around or inside a model's forward. Must not know: units, hooks.

[Note: Outside] Inside a transform (``grad``, ``vmap``, ``jvp``) every operation of torch is transformed, and an
operation that writes to memory from outside raises an error. The engine's own operations there, such as gathers of
weights, are not part of the transformed function, so they run outside of all transforms.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

innermost = torch._C._functorch.peek_interpreter_stack
"""Returns the innermost active transform, or None."""


def outside() -> AbstractContextManager[object]:
    """Return a context that hides its operations from all transforms ([Note: Outside])."""
    return nullcontext() if innermost() is None else torch._C._DisableFuncTorch()


def inside() -> bool:
    """Whether this runs in a transform."""
    return innermost() is not None


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor, with memory, that transforms have wrapped as ``tensor``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
