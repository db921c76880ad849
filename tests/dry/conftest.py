"""The kernels of the meta device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import dry_kernels


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with dry_kernels.served():
        yield
