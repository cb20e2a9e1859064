"""A unit sees its model at a place of its own; where that is on a host may change at a restore."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coldsnap.capsule.driver import BindMount
from coldsnap.cli.activation import mount_sources
from coldsnap.core.drivers import DriverId
from coldsnap.errors import UsageError
from coldsnap.ops.activating import activation_request
from coldsnap.ops.artifacts import load_artifact
from coldsnap.ops.explain import explain
from coldsnap.ops.planning import plan_capture, resolve_launch
from coldsnap.ops.recipe import Recipe
from coldsnap.ops.starting import restored_specs
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.engine import PLUGIN

from .conftest import Shop  # isort: skip

INSIDE = "/models/m"


def recipe(source: Path, target: str = "/models") -> Recipe:
    mounts = [{"source": str(source), "target": target}]
    return Recipe.model_validate({"name": "svc", "engine": "fake", "model": INSIDE, "mounts": mounts})


def test_a_model_is_pinned_outside_and_named_inside(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "here" / "m")
    planned = plan_capture(
        recipe(tmp_path / "here"), PLUGIN, operation_id="c", output=tmp_path / "a.json", driver=DriverId.HOST
    )
    plain = PLUGIN.resolve_model(str(tmp_path / "here" / "m"))
    launch = planned.request.launch
    assert PLUGIN.read_command(launch.units[0].command).model == Path(INSIDE)
    assert launch.model.revision == plain.revision
    assert str(tmp_path / "here" / "m") not in launch.units[0].command
    found = resolve_launch(PLUGIN, launch)
    assert (found.path, found.revision) == (Path(INSIDE), plain.revision)


def mounted(shop: Shop, source: Path) -> Shop:
    """The shop's artifact, as if it had been captured with a mount."""
    document = json.loads(shop.loaded.path.read_text())
    document["launch"]["units"][0]["mounts"] = [{"source": str(source), "target": "/mnt", "read_only": True}]
    shop.loaded.path.write_text(json.dumps(document))
    return Shop(kit=shop.kit, result=shop.result, loaded=load_artifact(shop.loaded.path), port=shop.port)


def test_another_source_is_what_the_unit_gets(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    moved = mounted(shop, tmp_path / "gone")
    request = moved.request(mounts={"/mnt": str(tmp_path / "there")})
    spec = restored_specs(request.launch, tmp_path)["u0"]
    assert spec.mounts == (BindMount(source=tmp_path / "there", target=Path("/mnt"), read_only=True),)
    assert moved.restore(mounts={"/mnt": str(tmp_path / "there")}).source == "native"


def test_a_source_that_is_not_here_is_said_before_a_byte_moves(shop: Shop, tmp_path: Path) -> None:
    moved = mounted(shop, tmp_path / "gone")
    found = explain(moved.tools, moved.loaded, moved.request())
    (problem,) = [problem for gate in found.gates for problem in gate.problems]
    assert (found.rung, problem.value) == (None, str(tmp_path / "gone"))
    assert problem.field == "launch.units[0].mounts[0].source"
    assert "--mount /mnt=" in str(problem.cure)


def test_a_target_that_no_unit_has(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="captured without mounts"):
        activation_request(shop.loaded, operation_id="x", mounts={"/models": "/there"})
    with pytest.raises(UsageError, match="name one of /mnt"):
        activation_request(mounted(shop, tmp_path).loaded, operation_id="x", mounts={"/other": "/there"})


def test_words_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert mount_sources(["/a=/b", "/c=d"]) == {"/a": "/b", "/c": str(tmp_path / "d")}
    for words in (["a=/b"], ["/a"], ["/a="], [""], ["/a=/b", "/a/=/c"], ["/a=/\udcff"]):
        with pytest.raises(UsageError) as caught:
            mount_sources(words)
        assert caught.value.cure
    (tmp_path / "elsewhere" / "models").mkdir(parents=True)
    (tmp_path / "there").symlink_to("elsewhere/models")
    assert mount_sources(["/a/=there/../models"]) == {"/a": str(tmp_path / "elsewhere" / "models")}
