"""A driver that keeps books, and memory on it that must give everything back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coldsnap.hydrate.cuda import CudaMemory
from coldsnap.testing.cuda import FakeDriver


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver) -> Iterator[CudaMemory]:
    """Memory on the fake; afterwards nothing is left of it, and nothing happened that a GPU would not survive."""
    with CudaMemory(driver) as memory:
        yield memory
    assert driver.leftovers() == {}
    assert driver.violations == []
