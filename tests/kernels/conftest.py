"""Fixtures of the native kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardengine.kernels.native import calls, library


class _Forbidden:
    """Stands for the reference where the library has to answer itself."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the native kernels went to the reference for {name}")


@pytest.fixture(params=library.INSTRUCTION_SETS)
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set in turn, without a way out to the reference."""
    loaded = library.load()
    assert loaded is not None
    number = loaded.number_of(request.param.encode())
    if number < 0:
        pytest.skip(f"{request.param}: this processor or library lacks it")
    monkeypatch.setattr(calls, "load", lambda: loaded._replace(instruction_set=number))
    for name in ("reference", "reference_update", "compression"):
        monkeypatch.setattr(calls, name, _Forbidden())
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[Any]:
    """``torch.set_num_threads``, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
