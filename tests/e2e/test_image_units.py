"""A unit on the root of an OCI image: pulled by digest, captured, killed, restored, also by a host that had neither."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from coldsnap.core.bindings import host_files_of
from coldsnap.core.messages import Answer
from coldsnap.errors import Refused
from coldsnap.ops.explain import explain
from coldsnap.ops.tidy import plan_delete, plan_tidy, run_delete
from coldsnap.ship.http import Http
from coldsnap.ship.limits import Limits
from coldsnap.ship.names import parse_registry
from coldsnap.ship.registry import Registry
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.mapped import foreign_files
from coldsnap.testing.registry import real_registry
from coldsnap.testing.rootimage import build_root, publish_root
from coldsnap.testing.stand import UNSEEN, Stand, children

pytestmark = pytest.mark.criu

INSIDE = "/models/m"


@dataclass(frozen=True, kw_only=True)
class Ground:
    """A captured unit with an image, and what a cold process without any image answers."""

    stand: Stand
    expected: tuple[Answer, ...]
    stack: ExitStack


@pytest.fixture(scope="module")
def ground(criu: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("image")
    with ExitStack() as stack:
        server = stack.enter_context(real_registry(folder / "registry"))
        name = parse_registry(f"oci://{server.host}/org/root")
        python = build_root(folder / "root")
        with Http(Limits()) as http:
            reference = publish_root(folder / "root", Registry(name, http), name, folder / "work")
        shutil.rmtree(folder / "root")
        model = write_checkpoint(folder / "models" / "m")
        (folder / "stand").mkdir()
        stand = Stand(folder=folder / "stand", model=model)
        stack.callback(stand.tools.host.close)
        stack.callback(stand.tools.remotes.http.close)
        stack.callback(stand.stop_all)
        stand.planned = stand.plan("cold", "none.json")
        expected = stand.cold(UNSEEN)
        stand.capture(
            image=reference,
            python=str(python),
            model=INSIDE,
            mounts=[{"source": str(model.parent), "target": str(Path(INSIDE).parent)}],
        )
        yield Ground(stand=stand, expected=expected, stack=stack)


def root_of(stand: Stand, name: str = "svc") -> Path:
    (unit,) = stand.tools.services.must_load(name).units
    return Path(f"/proc/{unit.record['init_pid']}/root")


def test_captured_killed_and_restored_on_its_image(ground: Ground) -> None:
    stand = ground.stand
    result = stand.restore("image-1")
    assert result.source == "native"
    assert stand.ask(UNSEEN) == ground.expected
    assert not (root_of(stand) / Path(__file__).relative_to("/")).exists(), "the host's files are out of sight"
    stand.stop_all()
    stand.assert_nothing_left()


def test_nothing_of_the_host_is_mapped(ground: Ground) -> None:
    stand = ground.stand
    stand.restore("mapped-1")
    (unit,) = stand.tools.services.must_load("svc").units
    (image,) = stand.tools.state.roots.iterdir()
    tree = list(children(unit.record["init_pid"]))
    assert tree
    given = [Path(INSIDE).parent, stand.tools.state.path, Path("/run/coldsnap"), Path("/dev")]
    assert {pid: foreign_files(pid, image=image, given=given) for pid in tree} == {pid: [] for pid in tree}
    # The image's interpreter lies where the host's does: only the file itself tells them apart.
    interpreter = os.path.realpath(sys.executable)
    assert interpreter in foreign_files(os.getpid(), image=image, given=given)
    assert f" {interpreter}\n" in Path(f"/proc/{tree[0]}/maps").read_text()
    stand.stop_all()


def test_what_a_unit_writes_goes_with_it(ground: Ground) -> None:
    stand = ground.stand
    for number in range(2):
        stand.restore(f"written-{number}")
        assert not (root_of(stand) / "etc" / "written").exists()
        (root_of(stand) / "etc" / "written").write_text("by a unit")
        stand.stop_all()
    digest = stand.loaded.artifact.launch.units[0].image_digest
    assert digest is not None
    assert not (stand.tools.state.roots / digest.hex / "etc" / "written").exists()


def test_the_image_stands_for_its_files(ground: Ground) -> None:
    files = [
        one.path for binding in host_files_of(ground.stand.loaded.artifact.runtime.bindings) for one in binding.files
    ]
    assert [path for path in files if path.endswith((".so", ".6")) or "python" in path] == []


def test_two_units_of_one_image_side_by_side(ground: Ground) -> None:
    from coldsnap.testing.engine_harness import free_port

    stand = ground.stand
    ports = {"left": free_port(), "right": free_port()}
    for name, port in ports.items():
        stand.restore(f"side-{name}", name=name, port=port)
    assert [stand.ask(UNSEEN, port) for port in ports.values()] == [ground.expected] * 2
    assert os.stat(root_of(stand, "left")).st_dev != os.stat(root_of(stand, "right")).st_dev  # noqa: PTH116
    stand.stop_all()


def test_a_host_that_has_nothing_brings_the_image_too(ground: Ground, tmp_path: Path) -> None:
    home = ground.stand
    away = Stand(folder=tmp_path / "away", model=home.model, state_root=tmp_path / "away" / "state")
    ground.stack.callback(away.tools.host.close)
    ground.stack.callback(away.tools.remotes.http.close)
    for name in ("capsules", "model-payloads"):
        shutil.copytree(home.tools.state.path / name, away.tools.state.path / name, dirs_exist_ok=True)
    for path in away.tools.state.path.rglob("*.pack"):
        path.with_name(f"{path.name}.coldsnap-validation.json").unlink(missing_ok=True)
    away.loaded = home.loaded
    moved = tmp_path / "of-another" / "models"
    shutil.copytree(home.model.parent, moved)
    mounts = {str(Path(INSIDE).parent): str(moved)}
    found = explain(away.tools, away.loaded, away.request("explain-1", mounts=mounts))
    assert found.rung is not None
    assert not away.tools.state.roots.exists(), "explain brings nothing"
    try:
        away.prepare("prepare-1", mounts=mounts)
        assert away.restore("away-1", mounts=mounts).prepared_from_record
        assert away.ask(UNSEEN) == ground.expected
    finally:
        away.stop_all()
    away.assert_nothing_left()


def test_nobody_sweeps_a_root_that_an_artifact_names(ground: Ground, tmp_path: Path) -> None:
    stand = ground.stand
    assert [item for item in plan_tidy(stand.tools).items if item.kind == "root"] == []
    result = stand.capture(
        "capture-2",
        "second.json",
        image=stand.loaded.artifact.launch.units[0].image,
        python=str(stand.planned.request.launch.units[0].command[0]),
        model=INSIDE,
        mounts=[{"source": str(stand.model.parent), "target": str(Path(INSIDE).parent)}],
    )
    run_delete(stand.tools, plan_delete(stand.tools, result.artifact_path))
    assert len(list(stand.tools.state.roots.iterdir())) == 1


def test_a_model_that_the_unit_would_not_see_is_refused(ground: Ground) -> None:
    from coldsnap.errors import InvalidDocument

    image = ground.stand.loaded.artifact.launch.units[0].image
    with pytest.raises(InvalidDocument, match="1 problem") as caught:
        ground.stand.plan("unseen", "unseen.json", image=image)
    assert caught.value.problems[0].field == "model"


def test_an_image_that_cannot_be_had_is_refused_before_anything_starts(ground: Ground) -> None:
    from dataclasses import replace

    from coldsnap.ops.capture import capture
    from coldsnap.ship.remotes import OFFLINE

    stand = ground.stand
    digest = f"sha256:{'0' * 64}"
    planned = stand.plan(
        "offline",
        "offline.json",
        image=f"127.0.0.1:1/org/root@{digest}",
        model=INSIDE,
        mounts=[{"source": str(stand.model.parent), "target": str(Path(INSIDE).parent)}],
    )
    with pytest.raises(Refused) as caught:
        capture(replace(stand.tools, remotes=OFFLINE), planned.request, planned.model)
    assert "is not on this machine" in str(caught.value)
