"""A unit in a container: captured, killed, restored, by the stand-in always and by each real runtime that answers."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from coldsnap.capsule.containers.commands import OWNER_LABEL
from coldsnap.capsule.containers.runtime import ContainerRuntime
from coldsnap.capsule.unit import LinuxUnits
from coldsnap.core.bindings import host_files_of
from coldsnap.core.messages import Answer
from coldsnap.errors import EngineError
from coldsnap.ops.explain import explain
from coldsnap.ops.tidy import plan_tidy, run_tidy
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.containers import Image, open_runtime, published_image, runtime_names, with_image
from coldsnap.testing.stand import UNSEEN, Stand, wait_for

pytestmark = pytest.mark.criu

INSIDE = "/models/m"
NAMES = [name for name in runtime_names() if name != "fake-podman"]
"""Both stand-ins make the same container."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """A captured unit in a container, and what a cold process without any answers."""

    stand: Stand
    runtime: ContainerRuntime
    expected: tuple[Answer, ...]

    def containers(self) -> list[str]:
        """Those of this stand, whatever they do."""
        return [found.name for found in self.runtime.find({OWNER_LABEL: str(self.stand.tools.state.path)})]

    def init_pid(self) -> int:
        (unit,) = self.stand.tools.services.must_load("svc").units
        return int(str(unit.record["init_pid"]))


@pytest.fixture(scope="module")
def image(criu: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with published_image(tmp_path_factory.mktemp("image")) as found:
        yield found


@pytest.fixture(scope="module", params=NAMES)
def ground(request: pytest.FixtureRequest, image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("containers")
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(request.param, folder))
        stack.enter_context(with_image(runtime, image))
        model = write_checkpoint(folder / "models" / "m")
        (folder / "stand").mkdir()
        stand = Stand(folder=folder / "stand", model=model)
        runtimes = {runtime.runtime: runtime}
        stand.tools = replace(stand.tools, runtimes=runtimes, units=LinuxUnits(runtimes=runtimes))
        stack.callback(stand.tools.host.close)
        stack.callback(stand.tools.remotes.http.close)
        stack.callback(stand.stop_all)
        stand.planned = stand.plan("cold", "none.json")
        expected = stand.cold(UNSEEN)
        stand.capture(
            image=image.reference,
            python=str(image.python),
            runtime=runtime.runtime.value,
            model=INSIDE,
            mounts=[{"source": str(model.parent), "target": str(Path(INSIDE).parent)}],
        )
        yield Ground(stand=stand, runtime=runtime, expected=expected)
    shutil.rmtree(folder, ignore_errors=True)


def test_captured_killed_and_restored_in_a_container(ground: Ground) -> None:
    stand = ground.stand
    assert ground.containers() == [], "a capture leaves none"
    for number in range(2):
        result = stand.restore(f"container-{number}")
        assert result.source == "native"
        assert stand.ask(UNSEEN) == ground.expected
        assert len(ground.containers()) == 1
        inside = Path(f"/proc/{ground.init_pid()}/root")
        assert not (inside / Path(__file__).relative_to("/")).exists(), "the host's files are out of sight"
        stand.stop_all()
        assert ground.containers() == []
    stand.assert_nothing_left()


def test_it_sleeps_and_wakes(ground: Ground) -> None:
    stand = ground.stand
    stand.restore("sleeper")
    stand.sleep("sleep-1")
    stand.wake("wake-1")
    assert stand.ask(UNSEEN) == ground.expected
    stand.stop_all()


def test_a_restore_takes_the_place_of_the_last_one(ground: Ground) -> None:
    stand = ground.stand
    stand.restore("first")
    (first,) = ground.containers()
    stand.restore("second")
    (second,) = ground.containers()
    assert first != second
    assert stand.ask(UNSEEN) == ground.expected
    stand.stop_all()


def test_a_unit_that_died_leaves_its_container_to_be_looked_at(ground: Ground) -> None:
    stand = ground.stand
    for number, clear in enumerate(("stop", "gc")):
        stand.restore(f"dies-{number}")
        (name,) = ground.containers()
        os.kill(ground.init_pid(), signal.SIGKILL)
        wait_for("the container to have ended", lambda name=name: not _alive(ground.runtime, name))
        with pytest.raises(EngineError, match="no running process"):
            stand.sleep(f"sleep-dead-{number}")
        assert ground.containers() == [name]
        if clear == "gc":
            planned = plan_tidy(stand.tools)
            assert [str(item.path) for item in planned.items if item.kind == "container"] == [
                f"{ground.runtime.runtime}:{name}"
            ]
            run_tidy(stand.tools, planned)
            assert ground.containers() == []
        stand.stop_all()
        assert ground.containers() == []


def _alive(runtime: ContainerRuntime, name: str) -> bool:
    state = runtime.state(name)
    return state is not None and state.is_alive


def test_the_image_stands_for_its_files(ground: Ground) -> None:
    files = [
        one.path for binding in host_files_of(ground.stand.loaded.artifact.runtime.bindings) for one in binding.files
    ]
    assert [path for path in files if path.endswith((".so", ".6")) or "python" in path] == []


def test_explain_names_the_runtime(ground: Ground) -> None:
    stand = ground.stand
    request = stand.request("explain-1")
    found = explain(stand.tools, stand.loaded, request)
    assert found.rung is not None
    without = replace(stand.tools, runtimes={})
    refused = explain(without, stand.loaded, request)
    assert refused.rung is None
    (gate,) = (gate for gate in refused.gates if gate.problems)
    assert gate.name == "container"
    assert f"{ground.runtime.runtime} is not on this machine" in gate.problems[0].message
