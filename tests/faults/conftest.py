"""What the tests of the fault harness share: a captured state root without root, and a pen with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.preparing import prepare
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.desk import desk, plan
from coldsnap.testing.faults.base import make_base
from coldsnap.testing.faults.lane import Lane
from coldsnap.testing.faults.pen import Lines, Pen
from coldsnap.testing.faults.plugin import StruckPlugin


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A state root with one captured and prepared artifact, made of the shipped fakes, and the artifact."""
    folder = tmp_path_factory.mktemp("captured")
    with desk(folder / "state") as kit:
        planned = plan(write_checkpoint(folder / "model"), folder / "artifact.json")
        capture(kit.tools, planned.request, planned.model)
        loaded = load_artifact(folder / "artifact.json")
        prepare(kit.tools, loaded, activation_request(loaded, operation_id="prepare-1", name="svc", port=8000))
    return folder / "state", folder / "artifact.json"


WORKS: dict[str, Callable[[Lane], Any]] = {}


def in_pen(work: Callable[[Lane], Any]) -> Callable[[Lane], Any]:
    """Have ``work`` be one that ``ask`` can run; it must exist before the pen does."""
    WORKS[work.__name__] = work
    return work


@pytest.fixture(scope="session")
def ask(criu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """``ask(name)``: what the work of that name returns, run in a pen on a lane that is as new."""
    folder = tmp_path_factory.mktemp("pen")

    def live(lines: Lines) -> None:
        lane = Lane(folder, StruckPlugin)
        make_base(lane, None)
        while (name := lines.hear()) is not None:
            lane.reset()
            lines.say(WORKS[name](lane))

    log = folder / "pen.log"
    with Pen(live, log) as pen:

        def run(name: str) -> Any:
            pen.lines.say(name)
            answer = pen.lines.hear()
            assert answer is not None, log.read_text()
            return answer

        yield run
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
