"""Images of units: brought once, proved on the way, refused by name when they cannot be had, kept while named."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.drivers import DriverId
from coldsnap.core.request import OperationRequest
from coldsnap.errors import ColdsnapError, InvalidDocument, PayloadRejected, Refused, RemoteError
from coldsnap.ops.operation import operation
from coldsnap.ops.planning import plan_capture
from coldsnap.ops.recipe import Recipe
from coldsnap.ops.roots import bring_roots, root_problems
from coldsnap.ops.tools import Tools
from coldsnap.ship.http import Http
from coldsnap.ship.limits import Limits
from coldsnap.ship.names import parse_registry
from coldsnap.ship.registry import Registry
from coldsnap.ship.remotes import OFFLINE, Remotes
from coldsnap.store.sweep import plan_gc
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.desk import Desk
from coldsnap.testing.engine import PLUGIN
from coldsnap.testing.registry import RegistryServer
from coldsnap.testing.rootimage import publish_root
from coldsnap.testing.web import Lie

LIMITS = Limits(attempts=2, first_pause_s=0.01, longest_pause_s=0.02)


@dataclass(frozen=True, kw_only=True)
class Pier:
    """A registry with a small image, tools that reach it, and a request for a unit on the image."""

    server: RegistryServer
    tools: Tools
    request: OperationRequest

    def bring(self, tools: Tools | None = None, operation_id: str = "c") -> None:
        tools = tools or self.tools
        request = self.request.model_copy(update={"id": operation_id})
        with operation(tools, request) as op:
            bring_roots(tools, op, request.launch)

    @property
    def folder(self) -> Path:
        digest = self.request.launch.units[0].image_digest
        assert digest is not None
        return self.tools.state.roots / digest.hex


@pytest.fixture
def pier(kit: Desk, tmp_path: Path) -> Iterator[Pier]:
    (tmp_path / "image" / "etc").mkdir(parents=True)
    (tmp_path / "image" / "etc" / "name").write_text("small")
    write_checkpoint(tmp_path / "models" / "m")
    with RegistryServer(tmp_path / "registry") as server:
        name = parse_registry(f"oci://{server.host}/org/root")
        with Http(LIMITS) as http:
            reference = publish_root(tmp_path / "image", Registry(name, http), name, tmp_path / "work")
        server.reset()
        recipe = Recipe.model_validate(
            {
                "name": "svc",
                "engine": "fake",
                "model": "/models/m",
                "image": reference,
                "mounts": [{"source": str(tmp_path / "models"), "target": "/models"}],
            }
        )
        output = tmp_path / "a.json"
        planned = plan_capture(recipe, PLUGIN, operation_id="c", output=output, driver=DriverId.HOST)
        remotes = Remotes(limits=LIMITS)
        with contextlib.closing(remotes.http):
            yield Pier(server=server, tools=replace(kit.tools, remotes=remotes), request=planned.request)


def left(pier: Pier) -> list[str]:
    state = pier.tools.state
    return [path.name for place in (state.staging, state.roots) if place.is_dir() for path in place.iterdir()]


def test_a_plan_names_the_image_and_its_python(pier: Pier) -> None:
    unit = pier.request.launch.units[0]
    assert unit.command[0] == "/usr/bin/python3"
    assert unit.image.endswith(str(unit.image_digest))


@pytest.mark.criu
def test_an_image_is_brought_once(pier: Pier) -> None:
    assert os.geteuid() == 0
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda number: pier.bring(operation_id=f"c{number}"), range(2)))
    assert (pier.folder / "etc" / "name").read_text() == "small"
    blobs = [line for line in pier.server.asked if line.startswith("GET") and "/blobs/" in line]
    assert len(blobs) == 1
    pier.server.reset()
    pier.bring(operation_id="again")
    assert pier.server.asked == []
    assert list(root_problems(replace(pier.tools, remotes=OFFLINE), pier.request.launch)) == []
    assert left(pier) == [pier.folder.name]


@pytest.mark.criu
@pytest.mark.parametrize(
    ("lie", "kind"),
    [
        (Lie(what="wrong-bytes", to="GET .*/manifests/"), PayloadRejected),
        (Lie(what="wrong-bytes", to="GET .*/blobs/"), PayloadRejected),
        (Lie(what="status", to="GET .*/blobs/", status=404), RemoteError),
        (Lie(what="redirect-loop", to="GET .*/blobs/"), RemoteError),
    ],
    ids=lambda one: f"{one.what} {one.to}" if isinstance(one, Lie) else "",
)
def test_a_registry_that_lies_leaves_no_root(pier: Pier, lie: Lie, kind: type[ColdsnapError]) -> None:
    pier.server.lies.append(lie)
    with pytest.raises(kind):
        pier.bring()
    assert not pier.folder.exists()
    pier.server.reset()
    pier.bring(operation_id="again")
    assert (pier.folder / "etc" / "name").exists()
    assert left(pier) == [pier.folder.name]


def test_nothing_is_asked_offline(pier: Pier) -> None:
    with pytest.raises(Refused, match="is not on this machine"):
        pier.bring(replace(pier.tools, remotes=OFFLINE))
    assert pier.server.asked == []


@pytest.mark.parametrize("image", ["sha256:" + "0" * 64, "root@sha256:" + "0" * 64])
def test_an_image_without_a_registry_must_be_here(pier: Pier, image: str) -> None:
    unit = pier.request.launch.units[0].model_copy(update={"image": image})
    launch = pier.request.launch.model_copy(update={"units": (unit,)})
    (problem,) = root_problems(pier.tools, launch)
    assert "names no registry" in problem.message
    assert problem.field == "launch.units[0].image"


def test_units_of_other_hosts_bring_nothing_here(pier: Pier) -> None:
    unit = pier.request.launch.units[0].model_copy(update={"host": "another"})
    launch = pier.request.launch.model_copy(update={"units": (unit,)})
    assert list(root_problems(replace(pier.tools, remotes=OFFLINE), launch)) == []


@pytest.mark.criu
def test_a_root_that_nobody_names_goes(pier: Pier) -> None:
    pier.bring()
    items = plan_gc(pier.tools.state, lambda: ()).items
    assert [(item.kind, item.path) for item in items if item.kind == "root"] == [("root", pier.folder)]


def test_a_recipe_whose_image_is_not_pinned_is_refused(pier: Pier, tmp_path: Path) -> None:
    recipe: dict[str, Any] = {
        "name": "svc", "engine": "fake", "model": "/models/m", "image": "registry.example.com/root:latest",
        "mounts": [{"source": str(tmp_path / "models"), "target": "/models"}],
    }  # fmt: skip
    with pytest.raises(InvalidDocument, match="a tag can move"):
        plan_capture(
            Recipe.model_validate(recipe), PLUGIN, operation_id="c", output=tmp_path / "b.json", driver=DriverId.HOST
        )
