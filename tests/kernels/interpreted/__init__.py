"""Tests of the Triton kernels under Triton's interpreter; ``tests/kernels/test_triton.py`` runs them.

Triton 3.6 interprets a loop over ``range(n)``, n known at run time, by ``int`` of an array with one element, which
numpy has refused since 2.4. Later versions do what ``index_of`` does.
"""

from __future__ import annotations

import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    patched = vars(interpreter)["_patch_lang_tensor"]

    def index_of(value: Any) -> int:
        """The number that a tensor of one element holds."""
        return int(value.handle.data.item())

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """Triton's own, and then the index."""
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", index_of)

    vars(interpreter)["_patch_lang_tensor"] = patch_lang_tensor
