"""A stand for each module: one model, one capture, the answers of a separate cold process; no test leaves anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from coldsnap.core.messages import Answer
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.gpu import GpuRack
from coldsnap.testing.stand import UNSEEN, Stand

TENSORS: Mapping[str, int] = {"embed": 2_000_000, "layers.0": 450_001, "layers.1": 450_001, "norm": 3000, "empty": 0}


@pytest.fixture(scope="module")
def stand(criu: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A captured fake engine."""
    folder = tmp_path_factory.mktemp("stand")
    one = Stand(folder=folder, model=write_checkpoint(folder / "model", tensors=TENSORS))
    one.capture()
    yield one
    one.stop_all()
    one.tools.host.close()


@pytest.fixture
def rack(stand: Stand) -> GpuRack:
    """The fake GPUs of a stand that has some."""
    assert stand.gpus is not None
    return stand.gpus


@pytest.fixture(scope="module")
def expected(stand: Stand) -> tuple[Answer, ...]:
    """What a cold process that nobody captured answers to ``UNSEEN``."""
    return stand.cold(UNSEEN)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test its services are stopped, and nothing of the stand is left on the machine."""
    yield
    if "stand" in request.fixturenames:
        stand: Stand = request.getfixturevalue("stand")
        stand.stop_all()
        stand.assert_nothing_left()


@pytest.fixture
def folder(stand: Stand, request: pytest.FixtureRequest) -> Path:
    """A folder of this test's own, below the stand."""
    path: Path = stand.folder / str(request.node.name).replace("/", "-")[:80]
    path.mkdir()
    return path
