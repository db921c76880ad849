"""Transforms of torch.func around or inside of a model's forward. Must not know: units, hooks.

[Note: Outside] Inside of a transform (``grad``, ``vmap``, ``jvp``) every operation of torch is transformed, and one
that writes to memory from outside is refused. What the engine does there, gathering weights for instance, is no part of
the function that is transformed, so it runs outside of all transforms.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

innermost = torch._C._functorch.peek_interpreter_stack
"""The transform in which this runs, or None."""


def outside() -> AbstractContextManager[object]:
    """Inside of this no transform sees what is done ([Note: Outside])."""
    return nullcontext() if innermost() is None else torch._C._DisableFuncTorch()


def inside() -> bool:
    """Whether this runs in a transform."""
    return innermost() is not None


def unwrapped(tensor: Tensor) -> Tensor:
    """What transforms have wrapped as ``tensor``, which has memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
