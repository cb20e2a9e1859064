"""Every gate, open and closed, all reasons at once, each with the one who must act."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.core.drivers import FeatureResult
from coldsnap.core.request import Execution, OperationRequest, request_document, request_from
from coldsnap.errors import Problem, Refused
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.assembly import capsule_folder
from coldsnap.ops.choosing import choose_driver
from coldsnap.ops.gates import Actor, Gate, check_capture, refuse_unless_open, restore_gates
from coldsnap.ops.tools import Tools
from coldsnap.testing.desk import Desk, plan
from coldsnap.testing.engine import PLUGIN, FakePlugin
from coldsnap.testing.engine_harness import free_port

from .conftest import HOST, Shop  # isort: skip

NAMES = (
    "engine",
    "launch",
    "machine",
    "host files",
    "container",
    "capsule",
    "quarantine",
    "acceptance",
    "weights",
    "materialize",
    "port",
    "space",
)


def ask(shop: Shop, request: OperationRequest | None = None, **changes: Any) -> dict[str, Gate]:
    loaded = changes.pop("loaded", shop.loaded)
    address = changes.pop("address", (HOST, shop.port))
    tools = changes.pop("tools", shop.tools)
    return {gate.name: gate for gate in restore_gates(tools, loaded, request or shop.request(), address=address)}


def closed(gates: dict[str, Gate]) -> dict[str, tuple[Problem, ...]]:
    return {name: gate.problems for name, gate in gates.items() if gate.problems}


def rewritten(shop: Shop, tmp_path: Path, change: Any) -> LoadedArtifact:
    """The artifact with ``change`` made to its document, under another name."""
    document = artifact_document(shop.loaded.artifact)
    change(document)
    path = tmp_path / "changed.json"
    path.write_bytes(artifact_bytes(artifact_from(document)))
    return load_artifact(path)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as server:
        yield server


def test_all_gates_are_open_after_a_capture(shop: Shop) -> None:
    gates = ask(shop)
    assert tuple(gates) == NAMES
    assert closed(gates) == {}
    refuse_unless_open("anything", tuple(gates.values()))


def test_an_engine_that_is_not_installed(shop: Shop) -> None:
    without = replace(shop.tools, engines={})
    found = closed(ask(shop, tools=without))
    assert set(found) == {"engine"}
    assert "no engine is called 'fake'" in found["engine"][0].message
    assert ask(shop, tools=without)["engine"].actor is Actor.HOST


def test_a_launch_that_may_not_differ(shop: Shop) -> None:
    document = request_document(shop.request())
    document["launch"]["units"][0]["environment"]["LANG"] = "de_DE.UTF-8"
    document["launch"]["units"][0]["command"] += ["--shuffle", "9"]
    gates = ask(shop, request_from(document))
    found = closed(gates)
    assert set(found) == {"launch"}
    assert [p.field for p in found["launch"]] == ["launch.units[0].command", "launch.units[0].environment.LANG"]
    assert gates["launch"].actor is Actor.CALLER


def test_placement_may_differ(shop: Shop, tmp_path: Path) -> None:
    document = request_document(shop.request(port=free_port()))
    document["launch"]["units"][0]["environment"]["NCCL_DEBUG"] = "INFO"
    assert closed(ask(shop, request_from(document))) == {}


def test_a_unit_of_another_host_is_not_started_here(shop: Shop) -> None:
    document = request_document(shop.request(port=free_port()))
    document["launch"]["units"][0]["host"] = "another-host"
    gates = ask(shop, request_from(document))
    found = closed(gates)
    assert [(p.field, p.value) for p in found["launch"]] == [("launch.units[0].host", "another-host")]
    assert "write local" in str(found["launch"][0])
    assert gates["launch"].actor is Actor.CALLER


def test_a_machine_that_differs_in_everything(shop: Shop) -> None:
    shop.kit.facts.append(replace(shop.kit.facts[0], architecture="riscv64", cpu_flags=frozenset({"fma"})))
    shop.kit.failed["criu-process-tree"] = "no CRIU here"
    gates = ask(shop)
    found = closed(gates)
    assert set(found) == {"machine"}
    fields = [p.field.rpartition(".")[2] for p in found["machine"]]
    assert "architecture" in fields
    assert "cpu_flags" in fields
    assert any("no CRIU here" in str(p) for p in found["machine"])
    assert any("avx2" in p.message for p in found["machine"])
    assert gates["machine"].actor is Actor.HOST
    assert "CRIU 4.2.1" in gates["machine"].detail


def test_the_kernel_matters_only_when_the_policy_says_so(shop: Shop) -> None:
    shop.kit.facts.append(replace(shop.kit.facts[0], kernel="9.9.9"))
    assert closed(ask(shop)) == {}
    document = request_document(shop.request())
    document["policy"]["compatibility"]["kernel"] = "exact"
    found = closed(ask(shop, request_from(document)))
    assert set(found) == {"machine"}
    assert "9.9.9" in str(found["machine"][0])


def test_a_library_that_is_another_one_here(shop: Shop, tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(b"of this machine")

    def bind(document: dict[str, Any]) -> None:
        for binding in document["runtime"]["bindings"]:
            if binding["kind"] == "coldsnap-host-files":
                binding["files"] = [
                    {"path": str(library), "bytes": 99},
                    {"path": str(tmp_path / "absent.so"), "bytes": 1},
                ]

    found = closed(ask(shop, loaded=rewritten(shop, tmp_path, bind)))
    assert set(found) == {"host files"}
    text = "\n".join(map(str, found["host files"]))
    assert str(library) in text
    assert "absent.so" in text


def test_a_capsule_that_is_not_here(shop: Shop) -> None:
    folder = capsule_folder(shop.tools, shop.loaded.capsule_digest("u0"))
    folder.rename(folder.with_name("moved"))
    gates = ask(shop)
    found = closed(gates)
    assert set(found) == {"capsule"}
    assert found["capsule"][0].field == "capsule.images[u0]"
    assert str(folder) in str(found["capsule"][0].cure)
    assert gates["capsule"].actor is Actor.ARTIFACT


def test_a_prepared_capsule_needs_no_layout(shop: Shop) -> None:
    shop.restore()
    folder = capsule_folder(shop.tools, shop.loaded.capsule_digest("u0"))
    folder.rename(folder.with_name("moved"))
    assert closed(ask(shop)) == {}


def test_answers_that_are_missing_or_not_those_shown_are_refused_before_anything_moves(
    shop: Shop, tmp_path: Path
) -> None:
    def forget(document: dict[str, Any]) -> None:
        (record,) = (one for one in document["runtime"]["bindings"] if one["kind"] == "coldsnap-acceptance")
        record["answers"] = []

    found = closed(ask(shop, loaded=rewritten(shop, tmp_path, forget)))
    assert [problem.field for problem in found["acceptance"]] == ["runtime.bindings"]

    lies = {"prompt": "another question", "expected": "another answer"}
    found = closed(ask(shop, loaded=rewritten(shop, tmp_path, lambda document: document["acceptance"].update(lies))))
    assert [problem.field for problem in found["acceptance"]] == ["acceptance.prompt", "acceptance.expected"]
    assert set(found) == {"acceptance"}


@pytest.mark.parametrize(
    ("mode", "is_closed"), [("native", True), ("auto", False), ("recovery", False), ("cache-only-auto", False)]
)
def test_a_missing_pack_closes_only_what_insists_on_it(shop: Shop, mode: str, is_closed: bool) -> None:
    shop.tools.store.path(shop.result.pack_digests[0]).unlink()
    gates = ask(shop, shop.request(weights=mode))
    assert set(closed(gates)) == ({"weights"} if is_closed else set())
    if is_closed:
        assert "packs are missing for worker/w0" in str(gates["weights"].problems[0])


def test_a_port_of_somebody_else_names_its_owner(shop: Shop, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    gates = ask(shop, shop.request(port=port), address=(HOST, port))
    (problem,) = closed(gates)["port"]
    assert (problem.field, problem.value) == ("port", str(port))
    assert f"process {os.getpid()}" in problem.message
    assert gates["port"].actor is Actor.HOST


def test_a_port_of_another_service_names_it_and_ones_own_is_free(shop: Shop) -> None:
    shop.restore()
    assert "port" not in closed(ask(shop)), "a restore of the same name replaces the owner"
    (problem,) = closed(ask(shop, shop.request(name="other")))["port"]
    assert "service svc" in problem.message


def test_without_an_address_no_port_is_looked_at(shop: Shop, listener: socket.socket) -> None:
    assert closed(ask(shop, address=None)) == {}


def test_a_full_disk(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    needed = sum(size for size, _ in shop.loaded.expected_files("u0").values()) + 64 * 1024 * 1024
    (problem,) = closed(ask(shop))["space"]
    assert f"needs {needed} bytes and 1000 are free" in problem.message
    monkeypatch.undo()
    shop.restore()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage)
    assert "space" not in closed(ask(shop)), "what is unpacked needs no more room"


def test_all_reasons_of_all_gates_are_refused_together(shop: Shop, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    shop.kit.failed["criu-process-tree"] = "no CRIU here"
    shop.tools.store.path(shop.result.pack_digests[0]).unlink()
    gates = ask(shop, shop.request(port=port, weights="native"), address=(HOST, port))
    with pytest.raises(Refused) as caught:
        refuse_unless_open("the artifact", tuple(gates.values()))
    assert caught.value.facts == {"gates": ["machine", "weights", "port"]}
    assert len(caught.value.problems) == 3


def test_a_gate_as_json_says_who_must_act() -> None:
    gate = Gate(
        name="port", actor=Actor.HOST, problems=(Problem(field="port", message="is taken", value="80"),), detail="d"
    )
    assert gate.document() == {
        "name": "port",
        "open": False,
        "who_must_act": "whoever keeps this machine",
        "detail": "d",
        "problems": [{"field": "port", "message": "is taken", "value": "80", "cure": None}],
    }


# -- capture ------------------------------------------------------------------------------------------


def capture_problems(kit: Desk, request: OperationRequest) -> dict[str, Problem]:
    try:
        check_capture(kit.tools, request)
    except Refused as error:
        return {problem.field: problem for problem in error.problems}
    return {}


def with_output(kit: Desk, model: Path, output: str) -> OperationRequest:
    planned = plan(model, Path("/nowhere/a.json"))
    return request_from({**request_document(planned.request), "output": output})


def test_a_capture_with_nothing_wrong(kit: Desk, model: Path, tmp_path: Path) -> None:
    assert capture_problems(kit, plan(model, tmp_path / "a.json").request) == {}


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_an_output_that_exists(kit: Desk, model: Path, tmp_path: Path, kind: str) -> None:
    output = tmp_path / "a.json"
    if kind == "file":
        output.write_text("{}")
    else:
        output.symlink_to(tmp_path / "nowhere")
    assert "never overwritten" in capture_problems(kit, plan(model, output).request)["output"].message


def test_a_container_is_not_started_as_a_plain_process(kit: Desk, model: Path, tmp_path: Path) -> None:
    document = request_document(plan(model, tmp_path / "a.json").request)
    digest = f"sha256:{'a' * 64}"
    document["launch"]["units"][0] |= {"image": f"registry.example/engine@{digest}", "image_digest": digest}
    assert list(capture_problems(kit, request_from(document))) == ["launch.units[0].image"]


def test_an_output_in_no_folder(kit: Desk, model: Path, tmp_path: Path) -> None:
    problem = capture_problems(kit, plan(model, tmp_path / "absent" / "a.json").request)["output"]
    assert problem.cure == f"mkdir -p {tmp_path / 'absent'}"


def test_an_output_that_is_not_absolute(kit: Desk, model: Path) -> None:
    found = capture_problems(kit, with_output(kit, model, "a.json"))
    assert set(found) == {"output"}
    assert "not absolute" in found["output"].message


class NoWriter(FakePlugin):
    """An engine whose integration cannot write packs beside its service."""

    supports = replace(FakePlugin.supports, materialize=frozenset({"off"}))


def without_writer(tools: Tools) -> Tools:
    return replace(tools, engines={PLUGIN.name: NoWriter()})


@pytest.mark.parametrize("materialize", ["async", "required"])
def test_an_engine_without_the_writer_refuses_to_materialize(shop: Shop, materialize: str) -> None:
    request = shop.request(materialize=materialize)
    assert closed(ask(shop, request)) == {}
    gates = ask(shop, request, tools=without_writer(shop.tools))
    (problem,) = closed(gates)["materialize"]
    assert (problem.field, problem.value, problem.cure) == (
        "policy.weights.native.materialize",
        materialize,
        "use off",
    )
    assert gates["materialize"].actor is Actor.CALLER
    assert closed(ask(shop, shop.request(materialize="off"), tools=without_writer(shop.tools))) == {}


def test_everything_wrong_with_a_capture_at_once(kit: Desk, model: Path, tmp_path: Path) -> None:
    document = request_document(plan(model, tmp_path / "absent" / "a.json").request)
    document["policy"]["weights"]["native"] |= {"materialize": "async"}
    kit.failed["criu-process-tree"] = "criu check failed"
    kit.tools = without_writer(kit.tools)
    found = capture_problems(kit, request_from(document))
    assert set(found) == {"output", "policy.weights.native.materialize", "features.criu-process-tree"}
    assert "criu check failed" in str(found["features.criu-process-tree"])


class Reluctant(FakePlugin):
    """An engine with reasons of its own."""

    def capture_problems(self, request: OperationRequest) -> tuple[Problem, ...]:
        return (Problem(field="launch.units[0].command.--x", message="is not for freezing", value=request.id),)


def test_the_engines_own_reasons_are_among_them(kit: Desk, model: Path) -> None:
    kit.tools = replace(kit.tools, engines={PLUGIN.name: Reluctant()})
    found = capture_problems(kit, with_output(kit, model, "a.json"))
    assert set(found) == {"output", "launch.units[0].command.--x"}
    assert found["launch.units[0].command.--x"].value == "capture-1"


class OnDevices(FakePlugin):
    """A fake engine that says it computes on two GPUs."""

    supports = replace(FakePlugin.supports, drivers=frozenset({"host", "n580", "n610"}))

    def execution(self, options: Mapping[str, object], *, unit: str = "u0") -> Execution:
        found = super().execution(options, unit=unit)
        workers = tuple(worker.model_copy(update={"device_slots": (0, 1)}) for worker in found.workers)
        return found.model_copy(update={"workers": workers})


def test_auto_picks_host_for_an_engine_on_the_processor(kit: Desk) -> None:
    plugin = OnDevices()
    assert choose_driver(kit.tools, plugin, PLUGIN.execution({})).value == "host"


def test_auto_refuses_when_none_works_and_says_why(kit: Desk) -> None:
    kit.failed["criu-process-tree"] = "no CRIU here"
    with pytest.raises(Refused, match="no snapshot driver works here") as caught:
        choose_driver(kit.tools, PLUGIN, PLUGIN.execution({}))
    assert any("no CRIU here" in str(problem) for problem in caught.value.problems)


def test_auto_picks_the_newest_driver_that_works_on_a_gpu(kit: Desk) -> None:
    plugin = OnDevices()
    execution = plugin.execution({})
    assert choose_driver(kit.tools, plugin, execution).value == "n610"
    kit.failed["cuda-initialized-state"] = "it does not come back"
    assert choose_driver(kit.tools, plugin, execution).value == "n580"
    kit.failed["cuda-fresh-state"] = "no GPU"
    with pytest.raises(Refused) as caught:
        choose_driver(kit.tools, plugin, execution)
    assert [problem.field for problem in caught.value.problems] == [
        "features.cuda-initialized-state",
        "features.cuda-fresh-state",
    ]


def test_auto_says_each_reason_once_and_proves_each_feature_once(kit: Desk) -> None:
    """Drivers share features."""
    plugin = OnDevices()
    kit.failed |= dict.fromkeys(("cuda-checkpoint-api", "cuda-fresh-state", "cuda-vmm-exact-address"), "no GPU")
    asked: list[str] = []

    def probe(features: tuple[str, ...]) -> tuple[FeatureResult, ...]:
        asked.extend(features)
        return kit.tools.probe(features)

    with pytest.raises(Refused) as caught:
        choose_driver(replace(kit.tools, probe=probe), plugin, plugin.execution({}))
    told = [problem.field for problem in caught.value.problems]
    assert sorted(told) == sorted(f"features.{name}" for name in kit.failed)
    assert len(asked) == len(set(asked))


def test_auto_never_picks_what_the_engine_cannot(kit: Desk) -> None:
    execution = OnDevices().execution({})
    with pytest.raises(Refused, match="no snapshot driver fits") as caught:
        choose_driver(kit.tools, replace_drivers("host"), execution)
    assert caught.value.problems[0].value == "host"
    assert choose_driver(kit.tools, replace_drivers("host", "n580"), execution).value == "n580"


def replace_drivers(*drivers: str) -> FakePlugin:
    class Limited(OnDevices):
        supports = replace(FakePlugin.supports, drivers=frozenset(drivers))

    return Limited()
