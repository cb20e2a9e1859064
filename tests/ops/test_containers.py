"""Units in containers, as the verbs see them: planned, refused, captured, identified, swept; by the stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.capsule.containers.commands import OWNER_LABEL, UNIT_LABEL, ContainerPlan
from coldsnap.capsule.containers.runtime import ContainerRuntime
from coldsnap.capsule.driver import ContainerMark, ContainerRoot, UnitRecord
from coldsnap.capsule.unit import LinuxUnits
from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.artifactdiff import compare_artifacts
from coldsnap.core.bindings import containers_of
from coldsnap.core.launch import Runtime
from coldsnap.core.request import OperationRequest, request_document, request_from
from coldsnap.errors import InvalidDocument, OutOfSpace, Problem, Refused, UserError
from coldsnap.ops.activating import activation_request, live_request
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.capture import capture
from coldsnap.ops.containers import container_problems, container_roots
from coldsnap.ops.doctor import examine
from coldsnap.ops.gates import restore_gates
from coldsnap.ops.live import stop_service
from coldsnap.ops.restore import restore
from coldsnap.ops.services import ServiceRecord, ServiceUnit
from coldsnap.ops.tidy import plan_delete, plan_tidy, run_delete, run_tidy
from coldsnap.ops.tools import Tools
from coldsnap.ship.remotes import OFFLINE
from coldsnap.testing.containers import FakeContainers
from coldsnap.testing.desk import Desk, plan
from coldsnap.testing.engine_harness import free_port

DIGEST = "sha256:" + "0" * 64
IMAGE = f"registry.example.com/org/root@{DIGEST}"
DEAD = "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?"


@pytest.fixture(params=list(Runtime))
def fake(request: pytest.FixtureRequest, tmp_path: Path) -> FakeContainers:
    return FakeContainers(tmp_path / "runtime", request.param)


@pytest.fixture
def tools(kit: Desk, fake: FakeContainers) -> Tools:
    return replace(kit.tools, runtimes={fake.kind: fake.runtime})


Planned = Callable[..., Any]


@pytest.fixture
def planned(fake: FakeContainers, model: Path, tmp_path: Path) -> Planned:
    """A capture of a unit with an image under the runtime; its model is seen where it is."""
    alias = tmp_path / "models"
    alias.symlink_to(model.parent)

    def make(**changes: Any) -> Any:
        mount = {"source": str(alias), "target": str(model.parent)}
        recipe: dict[str, Any] = {"image": IMAGE, "runtime": fake.kind.value, "mounts": [mount], **changes}
        return plan(model, tmp_path / "artifact.json", **recipe_fields(recipe))

    return make


def recipe_fields(recipe: dict[str, Any]) -> dict[str, Any]:
    from coldsnap.ops.recipe import RecipeMount

    return {**recipe, "mounts": tuple(RecipeMount(**one) for one in recipe["mounts"])}


@pytest.fixture
def captured(tools: Tools, fake: FakeContainers, planned: Planned, tmp_path: Path) -> LoadedArtifact:
    fake.offers(IMAGE, tmp_path)
    one = planned()
    online = replace(tools, remotes=replace(OFFLINE, offline=""))
    return load_artifact(capture(online, one.request, one.model).artifact_path)


def fields(problems: Any) -> list[str]:
    return [problem.field for problem in problems]


# -- what a recipe and a request say ---------------------------------------------------------------------


def test_a_recipe_names_its_runtime(planned: Planned, fake: FakeContainers) -> None:
    request: OperationRequest = planned().request
    assert request.runtime is fake.kind
    assert request_document(request)["extension"]["runtime"] == fake.kind.value


def test_native_is_what_nothing_says(planned: Planned) -> None:
    request: OperationRequest = planned(runtime="native").request
    assert request.runtime is None
    assert "runtime" not in request_document(request)["extension"], "and so older requests keep their identity"


def test_a_runtime_needs_an_image(planned: Planned) -> None:
    with pytest.raises(InvalidDocument) as caught:
        planned(image="host")
    assert fields(caught.value.problems) == ["extension.runtime"]
    assert "launch.units[0] has none" in caught.value.problems[0].message


# -- why it cannot run here ------------------------------------------------------------------------------


def problems_of(tools: Tools, request: OperationRequest) -> list[Problem]:
    return list(container_problems(tools, request.launch, request.runtime))


def test_a_runtime_that_is_not_here_is_a_refusal(kit: Desk, planned: Planned, fake: FakeContainers) -> None:
    request = planned().request
    missing = {fake.kind: ContainerRuntime(runtime=fake.kind, program=None)}
    for tools in (kit.tools, replace(kit.tools, runtimes=missing)):
        (problem,) = problems_of(tools, request)
        assert problem.field == "extension.runtime"
        assert f"{fake.kind} is not on this machine" in problem.message
        assert f"install {fake.kind}" in (problem.cure or "")


def test_a_daemon_that_does_not_run_is_a_refusal(tools: Tools, planned: Planned, fake: FakeContainers) -> None:
    fake.fails("version", DEAD)
    (problem,) = problems_of(tools, planned().request)
    assert "Cannot connect" in problem.message
    assert "start its daemon" in (problem.cure or "")


def test_an_image_that_is_absent_offline_is_a_refusal(
    tools: Tools, planned: Planned, fake: FakeContainers, tmp_path: Path
) -> None:
    request = planned().request
    assert tools.remotes.offline
    (problem,) = problems_of(tools, request)
    assert problem.field == "launch.units[0].image"
    assert f"is not in the store of {fake.kind}" in problem.message
    assert problems_of(replace(tools, remotes=replace(OFFLINE, offline="")), request) == []
    fake.has(IMAGE, tmp_path)
    assert problems_of(tools, request) == []
    with pytest.raises(InvalidDocument, match="a tag can move"):
        planned(image="registry.example.com/org/root:latest")


def test_an_image_by_a_bare_digest_is_no_image_of_theirs(tools: Tools, planned: Planned) -> None:
    (problem,) = problems_of(tools, planned(image=DIGEST).request)
    assert "names no registry" in problem.message


def test_mounts_that_no_container_can_have(
    tools: Tools, planned: Planned, fake: FakeContainers, model: Path, tmp_path: Path
) -> None:
    fake.has(IMAGE, model)
    mounts = [
        {"source": str(tmp_path / "models"), "target": str(model.parent)},
        {"source": "/a,b", "target": "/c"},
        {"source": "/a", "target": "/dev/shm/c"},
    ]
    found = problems_of(tools, planned(mounts=mounts).request)
    assert fields(found) == ["launch.units[0].mounts[1].source", "launch.units[0].mounts[2].target"]


def test_units_of_other_hosts_and_on_their_host_ask_for_nothing(tools: Tools, planned: Planned) -> None:
    document = request_document(planned().request)
    document["launch"]["units"][0]["host"] = "another"
    assert problems_of(tools, request_from(document)) == []
    native = planned(runtime="native").request
    assert list(container_problems(tools, native.launch, native.runtime)) == []


# -- capture and restore ---------------------------------------------------------------------------------


@pytest.mark.criu
def test_a_capture_pulls_once_and_says_what_it_was_in(
    tools: Tools, captured: LoadedArtifact, fake: FakeContainers
) -> None:
    assert containers_of(captured.artifact.runtime.bindings) == {"u0": fake.kind}
    assert [call[-1] for call in fake.calls if call[0] == "pull"] == [IMAGE]
    for request in (
        activation_request(captured, operation_id="r", port=8000),
        live_request(captured, "wake", operation_id="w", name="svc"),
    ):
        assert request.runtime is fake.kind
    (root,) = container_roots(tools, captured.artifact.launch, fake.kind, service="svc").values()
    assert isinstance(root, ContainerRoot)
    assert root.image == IMAGE
    assert root.python == captured.artifact.launch.units[0].command[0] == "/usr/bin/python3"
    assert (tools.state.path, False) in root.visible
    assert root.labels[OWNER_LABEL] == str(tools.state.path)


@pytest.mark.criu
def test_a_pull_that_fails_starts_nothing(tools: Tools, kit: Desk, planned: Planned, fake: FakeContainers) -> None:
    one = planned()
    online = replace(tools, remotes=replace(OFFLINE, offline=""))
    for said, kind in (("", UserError), ("no space left on device", OutOfSpace)):
        fake.fails("pull", said)
        with pytest.raises(kind):
            capture(online, one.request, one.model)
    assert kit.units.calls == []


@pytest.mark.criu
def test_another_runtime_is_another_identity(
    tools: Tools, captured: LoadedArtifact, fake: FakeContainers, tmp_path: Path
) -> None:
    other = next(kind for kind in Runtime if kind is not fake.kind)
    both = {**tools.runtimes, other: FakeContainers(tmp_path / "other", other).runtime}
    FakeContainers(tmp_path / "other", other).has(IMAGE, tmp_path)
    tools = replace(tools, runtimes=both)
    request = activation_request(captured, operation_id="r", port=free_port())
    gate = {one.name: one for one in restore_gates(tools, captured, request, address=None)}["container"]
    assert gate.problems == ()
    assert gate.detail == fake.kind.value
    for wanted in (other.value, None):
        document = request_document(request)
        document["extension"].pop("runtime")
        if wanted is not None:
            document["extension"]["runtime"] = wanted
        asked = request_from(document)
        gate = {one.name: one for one in restore_gates(tools, captured, asked, address=None)}["container"]
        assert fields(gate.problems) == ["extension.runtime"]
        assert f"was {fake.kind} when launch.units[0] was captured" in gate.problems[0].message
        assert gate.problems[0].value == (wanted or "native")
        with pytest.raises(Refused):
            restore(tools, captured, asked, host="127.0.0.1", port=free_port())


@pytest.mark.criu
def test_a_runtime_that_went_away_is_seen_before_anything_moves(
    tools: Tools, kit: Desk, captured: LoadedArtifact, fake: FakeContainers
) -> None:
    fake.fails("version", DEAD)
    kit.units.calls.clear()
    request = activation_request(captured, operation_id="r", port=free_port())
    with pytest.raises(Refused, match="Cannot connect"):
        restore(tools, captured, request, host="127.0.0.1", port=free_port())
    assert kit.units.calls == []


@pytest.mark.criu
def test_a_captured_runtime_that_nobody_knows_is_refused(captured: LoadedArtifact, tmp_path: Path) -> None:
    document = artifact_document(captured.artifact)
    for binding in document["runtime"]["bindings"]:
        if binding["kind"] == "coldsnap-container":
            binding["runtime"] = "rocket"
    with pytest.raises(InvalidDocument, match="runtime"):
        artifact_bytes(artifact_from(document))


# -- what is left ----------------------------------------------------------------------------------------


def made(tools: Tools, fake: FakeContainers, name: str, owner: str | None = None) -> str:
    labels = {OWNER_LABEL: owner or str(tools.state.path), UNIT_LABEL: "u0"}
    fake.has(IMAGE, tools.state.path)
    return fake.runtime.create(ContainerPlan(name=name, image=IMAGE, command=("p",), labels=labels))


def test_gc_takes_ended_containers_of_this_state_root(tools: Tools, fake: FakeContainers) -> None:
    ours, other = made(tools, fake, "ours"), made(tools, fake, "other", owner="/another")
    planned = plan_tidy(tools)
    (item,) = (item for item in planned.items if item.kind == "container")
    assert str(item.path) == f"{fake.kind}:ours"
    assert set(fake.containers) == {ours, other}, "a plan changes nothing"
    assert item in run_tidy(tools, planned).removed
    assert fake.containers == (other,)


def test_gc_says_what_it_could_not_remove(tools: Tools, fake: FakeContainers) -> None:
    ours = made(tools, fake, "ours")
    fake.fails("rm", "device or resource busy")
    assert [item.kind for item in run_tidy(tools, plan_tidy(tools)).removed if item.kind == "container"] == []
    assert fake.containers == (ours,)


def test_gc_does_not_mind_a_runtime_that_is_gone(tools: Tools, fake: FakeContainers) -> None:
    fake.fails("ps", DEAD)
    assert plan_tidy(tools).containers == ()
    assert plan_tidy(replace(tools, runtimes={fake.kind: replace(fake.runtime, program=None)})).containers == ()


@pytest.mark.criu
def test_delete_takes_them_too(tools: Tools, captured: LoadedArtifact, fake: FakeContainers) -> None:
    made(tools, fake, "ours")
    run_delete(tools, plan_delete(tools, captured.path))
    assert fake.containers == ()
    assert not captured.path.exists()


def test_stopping_a_service_clears_the_units_that_are_gone(
    tools: Tools, kit: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = UnitRecord(
        unit="u0", init_pid=1 << 29, init_start_ticks=1, boot_id="gone", root_pid=1001, log_pipe=1, log_path="/l",
        container=ContainerMark(runtime=Runtime.DOCKER, id="abc"),
    )  # fmt: skip
    cleared: list[UnitRecord] = []
    monkeypatch.setattr(kit.units, "clear", cleared.append)
    units = (ServiceUnit(unit="u0", record=record.model_dump(mode="json")),)
    tools.services.save(ServiceRecord(name="svc", engine="fake", state="ready", operation_id="r", units=units))
    assert stop_service(tools, "svc") == 0
    assert cleared == [record]


def test_a_service_ends_though_its_runtime_is_gone(tools: Tools, kit: Desk) -> None:
    record = UnitRecord(
        unit="u0", init_pid=1 << 29, init_start_ticks=1, boot_id="gone", root_pid=1001, log_pipe=1, log_path="/l",
        container=ContainerMark(runtime=Runtime.DOCKER, id="abc"),
    )  # fmt: skip
    units = (ServiceUnit(unit="u0", record=record.model_dump(mode="json")),)
    tools.services.save(ServiceRecord(name="svc", engine="fake", state="ready", operation_id="r", units=units))
    assert stop_service(replace(tools, units=LinuxUnits()), "svc") == 0
    assert tools.services.load("svc") is None


@pytest.mark.criu
def test_two_artifacts_of_two_runtimes_differ(captured: LoadedArtifact) -> None:
    document = artifact_document(captured.artifact)
    bindings = document["runtime"]["bindings"]
    document["runtime"]["bindings"] = [one for one in bindings if one["kind"] != "coldsnap-container"]
    sections = {one.name: one for one in compare_artifacts(captured.artifact, artifact_from(document))}
    assert [(one.field, one.after) for one in sections["launch"].changes] == [("container.u0", "absent")]


# -- the doctor ------------------------------------------------------------------------------------------


def test_the_doctor_tells_of_runtimes_and_needs_none(tools: Tools, fake: FakeContainers) -> None:
    def look(runtime: ContainerRuntime) -> Any:
        needs = examine(tools.state.path, {}, runtimes={fake.kind: runtime})
        return {need.name: need for need in needs}[fake.kind.value]

    assert (look(fake.runtime).state, look(fake.runtime).blocking) == ("ok", False)
    missing = look(replace(fake.runtime, program=None))
    assert (missing.state, missing.blocking) == ("note", False)
    assert f"`runtime: {fake.kind}`" in missing.found
    fake.fails("version", DEAD)
    silent = look(fake.runtime)
    assert (silent.state, silent.blocking) == ("note", False)
    assert "start its daemon" in silent.cure
