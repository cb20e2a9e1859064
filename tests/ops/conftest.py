"""What the tests of the verbs share: a model of a few kilobytes, tools made of the shipped fakes, one capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.request import OperationRequest
from coldsnap.ops.activating import activation_request, live_request
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.capture import CaptureResult, capture
from coldsnap.ops.restore import RestoreResult, restore
from coldsnap.ops.tools import Tools
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.desk import Desk, desk, plan
from coldsnap.testing.engine_harness import free_port

HOST = "127.0.0.1"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that nobody changes."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Desk]:
    """Tools with a state root of this test's own."""
    with desk(tmp_path / "state") as one:
        yield one
    assert one.units.running() == ()


@pytest.fixture
def tools(kit: Desk) -> Tools:
    """The tools alone."""
    return kit.tools


@dataclass(frozen=True, kw_only=True)
class Shop:
    """A desk with one committed artifact, and the verbs with fewer words."""

    kit: Desk
    result: CaptureResult
    loaded: LoadedArtifact
    port: int

    @property
    def tools(self) -> Tools:
        return self.kit.tools

    @property
    def pack(self) -> Path:
        """Where the capture's pack is in the store."""
        return self.tools.store.path(self.result.pack_digests[0])

    def request(self, operation_id: str = "restore-1", **changes: Any) -> OperationRequest:
        return activation_request(self.loaded, operation_id=operation_id, **{"port": self.port, **changes})

    def restore(self, operation_id: str = "restore-1", **changes: Any) -> RestoreResult:
        control = changes.pop("negative_control", False)
        request = self.request(operation_id, **changes)
        port = changes.get("port", self.port)
        return restore(self.tools, self.loaded, request, host=HOST, port=port, negative_control=control)

    def live(self, verb: str, operation_id: str | None = None, name: str = "svc") -> OperationRequest:
        return live_request(self.loaded, verb, operation_id=operation_id or f"{verb}-1", name=name)


@pytest.fixture
def shop(kit: Desk, model: Path, tmp_path: Path) -> Shop:
    """A capture of the model as service ``svc``, nothing of it running; calls of the capture are forgotten."""
    planned = plan(model, tmp_path / "artifact.json")
    result = capture(kit.tools, planned.request, planned.model)
    kit.units.calls.clear()
    return Shop(kit=kit, result=result, loaded=load_artifact(result.artifact_path), port=free_port())


@pytest.fixture
def files_below(tmp_path: Path) -> Callable[[], dict[str, bytes]]:
    """Every file below the test's folder but locks, logs and receipts, with its bytes."""

    def look() -> dict[str, bytes]:
        return {
            str(path.relative_to(tmp_path)): path.read_bytes()
            for path in sorted(tmp_path.rglob("*"))
            if path.is_file() and not {"locks", "receipts"} & set(path.parts) and path.suffix not in (".log", "")
        }

    return look
