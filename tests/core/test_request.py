"""The operation request: defaults by driver, identity under rewriting, and every rule of the contract."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.defaults import defaults_for, with_defaults
from coldsnap.core.drivers import DriverId
from coldsnap.core.request import (
    MAX_REQUEST_BYTES,
    ActivationState,
    GraphPolicy,
    Materialize,
    Operation,
    OperationRequest,
    ProcessBackend,
    parse_request,
    request_bytes,
    request_document,
    request_from,
    request_sha256,
)
from coldsnap.errors import InvalidDocument
from coldsnap.testing.documents import digest_of, request_example

REQUESTS = Path(__file__).parent / "data/requests"
Document = dict[str, Any]


def fields(document: Document) -> list[str]:
    try:
        request_from(document)
    except InvalidDocument as error:
        found = error.problems
    else:
        return []
    assert all(problem.cure for problem in found), found
    return [problem.field for problem in found]


def put(document: Document, path: str, value: Any) -> Document:
    changed = copy.deepcopy(document)
    here = changed
    *parents, last = path.split(".")
    for name in parents:
        here = here[int(name)] if isinstance(here, list) else here.setdefault(name, {})
    here[int(last) if isinstance(here, list) else last] = value
    return changed


# ---- identity --------------------------------------------------------------------------------------------------


def test_the_digest_is_that_of_the_fully_resolved_document_written_by_hand() -> None:
    resolved = json.loads((REQUESTS / "host-one-worker.resolved.json").read_text())
    text = json.dumps(resolved, sort_keys=True, separators=(",", ":"))
    request = parse_request((REQUESTS / "host-one-worker.json").read_bytes())
    assert request_document(request) == resolved
    assert request_bytes(request) == text.encode() + b"\n"
    assert str(request_sha256(request)) == "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    assert request_sha256(parse_request(json.dumps(resolved).encode())) == request_sha256(request)


def shuffled(value: Any, source: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        source.shuffle(keys)
        return {key: shuffled(value[key], source) for key in keys}
    return [shuffled(item, source) for item in value] if isinstance(value, list) else value


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), indent=st.none() | st.integers(0, 4), escaped=st.booleans(), name=st.data())
def test_whitespace_key_order_and_escapes_do_not_change_the_digest(
    seed: int, indent: int | None, escaped: bool, name: st.DataObject
) -> None:
    path = name.draw(st.sampled_from(sorted(REQUESTS.glob("*.json"))))
    tree = json.loads(path.read_bytes())
    text = json.dumps(shuffled(tree, random.Random(seed)), indent=indent, ensure_ascii=escaped)
    assert request_sha256(parse_request(text.encode())) == request_sha256(parse_request(path.read_bytes()))


def without_defaults(tree: Document, resolved: Document, source: random.Random) -> Document:
    """``tree`` with some of the members that only repeat a default removed."""
    kept = copy.deepcopy(tree)
    for name in ("format", "kind", "artifact", "workload", "lifecycle", "validation"):
        if source.random() < 0.5:
            kept.pop(name)
    policy = kept["policy"]
    for name in list(policy):
        if name != "process" and source.random() < 0.5:
            policy.pop(name)
    for name in list(policy["process"]):
        if name != "async_graphs" and source.random() < 0.5:
            policy["process"].pop(name)
    assert resolved == tree
    return kept


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_omitted_defaults_do_not_change_the_digest(seed: int) -> None:
    resolved = json.loads((REQUESTS / "host-one-worker.resolved.json").read_text())
    short = without_defaults(resolved, copy.deepcopy(resolved), random.Random(seed))
    assert request_sha256(request_from(short)) == request_sha256(request_from(resolved))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", "op-2"),
        ("launch.units.0.host", "node-9"),
        ("launch.units.0.command.0", "python3"),
        ("policy.process.async_graphs", False),
        ("policy.weights.mode", "recovery"),
        ("validation.prompt", "x"),
        ("workload.cluster_id", "x"),
        ("extension.port", 8001),
        ("extension.allow_secrets", ["HF_TOKEN"]),
    ],
)
def test_anything_else_changes_the_digest(path: str, value: Any) -> None:
    base = request_example()
    changed = put(base, path, value)
    assert request_sha256(request_from(changed)) != request_sha256(request_from(base))


def test_an_absent_extension_is_not_an_empty_one() -> None:
    base = request_from(request_example())
    assert "extension" not in request_document(base)
    empty = request_from({**request_example(), "extension": {}})
    assert request_document(empty)["extension"] == {
        "schema": "coldsnap-extension-1",
        "prompts": [],
        "allow_secrets": [],
        "cold_start": False,
        "stage": False,
        "transfer_path": "auto",
    }
    assert request_sha256(base) != request_sha256(empty)


def test_null_is_an_omitted_optional_part() -> None:
    base = request_example()
    assert request_sha256(request_from({**base, "extension": None})) == request_sha256(request_from(base))


# ---- defaults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "workers", "backend", "graphs"),
    [
        ("host", 1, "criu", "disabled"),
        ("host", 2, "criu", "disabled"),
        ("n580", 1, "cuda-criu", "recreate-from-plan"),
        ("n580", 2, "cuda-criu", "recreate-from-plan"),
        ("n610", 1, "cuda-criu", "preserve-exec"),
        ("n610", 2, "cuda-criu", "preserve-nccl-exec"),
    ],
)
def test_defaults_come_from_the_driver(driver: str, workers: int, backend: str, graphs: str) -> None:
    process = request_from(request_example(driver=driver, workers_per_unit=workers)).policy.process
    assert process.backend is ProcessBackend(backend)
    assert process.graph_policy is GraphPolicy(graphs)
    assert process.async_graphs is True
    assert process.kv_discard is True


def test_an_explicit_false_survives() -> None:
    document = put(request_example(driver="n610"), "policy.process.async_graphs", False)
    request = request_from(document)
    assert request.policy.process.async_graphs is False
    assert request.policy.process.graph_policy is GraphPolicy.PRESERVE_EXEC
    assert request_document(parse_request(request_bytes(request)))["policy"]["process"]["async_graphs"] is False


def test_explicit_values_stand_over_the_drivers() -> None:
    document = put(request_example(driver="n610"), "policy.process.graph_policy", "disabled")
    assert request_from(document).policy.process.graph_policy is GraphPolicy.DISABLED


@pytest.mark.parametrize(("engine", "materialize"), [("vllm", "async"), ("sglang", "off"), ("transformers", "off")])
def test_materialize_defaults_by_engine(engine: str, materialize: str) -> None:
    document = put(request_example(), "launch.engine", engine)
    assert request_from(document).policy.weights.native.materialize is Materialize(materialize)
    stated = put(document, "policy.weights.native.materialize", "off")
    assert request_from(stated).policy.weights.native.materialize is Materialize.OFF


def test_defaults_leave_what_is_no_object_to_the_checks() -> None:
    assert with_defaults([1]) == [1]
    assert with_defaults({"snapshot_driver": "host"}) == {"snapshot_driver": "host"}
    assert with_defaults({"snapshot_driver": {"id": "host"}, "policy": 5, "launch": []})["policy"] == 5
    assert fields({**request_example(), "policy": {"process": []}}) == ["policy.process"]
    assert fields({**request_example(), "policy": []}) == ["policy"]
    assert defaults_for(DriverId.HOST, num_workers=1, engine="")["process"]["backend"] == "criu"


# ---- operations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("driver", ["host", "n580", "n610"])
def test_each_operation_with_what_it_needs(operation: Operation, driver: str) -> None:
    request = request_from(request_example(operation, driver=driver))
    assert request.operation is operation
    assert request.snapshot_driver.id == driver


@pytest.mark.parametrize(
    ("operation", "needed"),
    [
        ("capture", ["output"]),
        ("publish", ["artifact", "output", "policy.capsule.repository"]),
        ("publish-native", ["artifact", "output", "policy.weights.native.repository"]),
        ("restore", ["artifact"]),
        ("sleep", ["artifact", "workload.cluster_id"]),
        ("wake", ["artifact", "workload.cluster_id"]),
        ("status", ["artifact", "workload.cluster_id"]),
    ],
)
def test_each_operation_names_all_it_lacks(operation: str, needed: list[str]) -> None:
    bare = {**request_example("capture"), "operation": operation}
    del bare["output"]
    assert sorted(fields(bare)) == sorted(needed)


def test_an_operation_may_carry_more_than_it_needs() -> None:
    document = {**request_example("restore"), "output": "/x", "workload": {"cluster_id": "demo"}}
    assert fields(document) == []


@pytest.mark.parametrize("driver", ["host", "n610"])
def test_warm_is_a_restore_with_host_or_n610(driver: str) -> None:
    document = put(request_example("restore", driver=driver), "lifecycle.activation_state", "warm")
    assert request_from(document).lifecycle.activation_state is ActivationState.WARM


def test_warm_is_refused_elsewhere_with_every_reason() -> None:
    document = put(request_example("capture", driver="n580"), "lifecycle.activation_state", "warm")
    document = put(document, "policy.weights.native.materialize", "required")
    assert fields(document) == ["lifecycle.activation_state"] * 3


# ---- rules -----------------------------------------------------------------------------------------------------

UNIT = "launch.units.0"
BAD: list[tuple[str, Any, list[str]]] = [
    ("format", 5, ["format"]),
    ("format", "4", ["format"]),
    ("kind", "coldsnap-snapshot-artifact", ["kind"]),
    ("operation", "Capture", ["operation"]),
    ("id", "", ["id"]),
    ("snapshot_driver", {}, ["snapshot_driver.id"]),
    ("snapshot_driver.id", "", ["snapshot_driver.id"]),
    ("snapshot_driver.id", "auto", ["snapshot_driver.id"]),
    ("snapshot_driver.id", None, ["snapshot_driver.id"]),
    ("output", 5, ["output"]),
    ("launch.engine", "", ["launch.engine"]),
    ("launch.model.id", "", ["launch.model.id"]),
    ("launch.model.revision", "main", ["launch.model.revision"]),
    ("launch.units", [], ["launch.units"]),
    (f"{UNIT}.index", 1, ["launch.units[0].index"]),
    (f"{UNIT}.host", "", ["launch.units[0].host"]),
    (f"{UNIT}.image", "registry.example/engine:1.2", ["launch.units[0].image", "launch.units[0].image_digest"]),
    (f"{UNIT}.image", f"@{digest_of('x')}", ["launch.units[0].image", "launch.units[0].image_digest"]),
    (f"{UNIT}.image", digest_of("x"), ["launch.units[0].image_digest"]),
    (f"{UNIT}.image_digest", digest_of("x"), ["launch.units[0].image_digest"]),
    (f"{UNIT}.command", [], ["launch.units[0].command"]),
    (f"{UNIT}.command", [""], ["launch.units[0].command[0]"]),
    (f"{UNIT}.command", "python -m engine", ["launch.units[0].command"]),
    (f"{UNIT}.command.1", "a\0b", ["launch.units[0].command[1]"]),
    (f"{UNIT}.environment", {"A=B": "x"}, ['launch.units[0].environment["A=B"]']),
    (f"{UNIT}.environment", {"A": "x\0"}, ["launch.units[0].environment.A"]),
    (f"{UNIT}.mounts.0.source", "srv", ["launch.units[0].mounts[0].source"]),
    (f"{UNIT}.mounts.0.target", "/a/../b", ["launch.units[0].mounts[0].target"]),
    ("policy.process.backend", "cuda-criu", ["policy.process.backend"]),
    ("policy.process.graph_policy", "preserve-exec", ["policy.process.graph_policy"]),
    ("policy.process.artifact_scope", "mine", ["policy.process.artifact_scope"]),
    ("policy.weights.mode", "fast", ["policy.weights.mode"]),
    ("policy.weights.native", {"repository": "a/b"}, ["policy.weights.native.revision"]),
    ("policy.weights.native", {"revision": "main"}, ["policy.weights.native.repository"]),
    ("policy.weights.native.files_by_worker", {"w0": "/a"}, ["policy.weights.native.files_by_worker.w0"]),
    ("policy.weights.native.files_by_worker", {"w0": "a", "w7": "a"}, ["policy.weights.native.files_by_worker.w7"]),
    ("policy.weights.recovery.source", "torch", ["policy.weights.recovery.source"]),
    ("policy.weights.recovery.loader_backend", "fast", ["policy.weights.recovery.loader_backend"]),
    ("policy.cache.paths", ["cache"], ["policy.cache.paths[0]"]),
    ("policy.compatibility.kernel", "any", ["policy.compatibility.kernel"]),
    ("validation.health_path", "health", ["validation.health_path"]),
    ("validation.health_path", "", ["validation.health_path"]),
    ("workload.cluster_id", "a b", ["workload.cluster_id"]),
    ("workload.name", "a", ["workload.name"]),
    ("lifecycle.activation_state", "hot", ["lifecycle.activation_state"]),
    ("extension.schema", "coldsnap-extension-2", ["extension.schema"]),
    ("extension.schema_", "coldsnap-extension-1", ["extension.schema_"]),
    ("extension.port", 0, ["extension.port"]),
    ("extension.port", 65536, ["extension.port"]),
    ("extension.port", True, ["extension.port"]),
    ("extension.prompts", [{"text": "x", "max_tokens": 0}], ["extension.prompts[0].max_tokens"]),
    ("extension.prompts", [{"text": "x"}], ["extension.prompts[0].max_tokens"]),
    ("extension.transfer_path", "fast", ["extension.transfer_path"]),
]


@pytest.mark.parametrize(("path", "value", "expected"), BAD)
def test_a_bad_value_is_refused_at_its_path(path: str, value: Any, expected: list[str]) -> None:
    assert fields(put(request_example(), path, value)) == expected


@pytest.mark.parametrize("name", ["id", "operation", "snapshot_driver", "launch"])
def test_what_must_be_there(name: str) -> None:
    document = request_example("restore")
    del document[name]
    assert fields(document) == [name]


@pytest.mark.parametrize("name", ["format", "kind", "policy", "validation", "workload", "lifecycle", "extension"])
def test_what_may_be_omitted(name: str) -> None:
    document = request_document(request_from({**request_example(), "extension": {"port": 8000}}))
    del document[name]
    assert fields(document) == []


@pytest.mark.parametrize(
    "image",
    [f"registry.example/engine@{digest_of('i')}", digest_of("i"), f"registry.example:5000/a/b:1.2@{digest_of('i')}"],
)
def test_an_image_is_pinned_by_reference_or_alone(image: str) -> None:
    document = put(put(request_example(driver="n610"), f"{UNIT}.image", image), f"{UNIT}.image_digest", digest_of("i"))
    assert fields(document) == []
    other = put(document, f"{UNIT}.image_digest", digest_of("other"))
    assert fields(other) == ["launch.units[0].image"]


def test_a_hub_revision_is_a_commit_and_other_sources_pin_as_they_like() -> None:
    document = put(request_example(), "launch.model.source", "huggingface")
    assert fields(document) == ["launch.model.revision"]
    assert fields(put(document, "launch.model.revision", "0" * 40)) == []
    assert fields(put(put(document, "launch.model.source", "bucket"), "launch.model.revision", "v1")) == []


def test_units_are_distinct_and_all_are_used() -> None:
    document = request_example(num_units=2)
    assert fields(put(document, "launch.units.1.id", "u0")) == [
        "launch.units[1].id",
        "launch.execution.workers[1].unit",
    ]
    assert fields(put(document, "launch.execution.workers.1.unit", "u0")) == [
        "launch.units[1].id",
        "launch.execution.workers[1].process_slot",
    ]
    assert fields(put(document, "launch.units.1.index", 0)) == ["launch.units[1].index"]


def test_devices_are_unique_on_a_host_and_slots_in_range() -> None:
    document = request_example(driver="n610", num_units=2)
    assert fields(document) == []  # the same selectors on two hosts
    assert fields(put(document, "launch.units.1.host", "node-0")) == ["launch.units[1].devices[0]"]
    assert fields(put(document, "launch.units.0.devices", ["GPU-0", "GPU-0"])) == ["launch.units[0].devices[1]"]
    assert fields(put(document, "launch.execution.workers.0.device_slots", [1])) == [
        "launch.execution.workers[0].device_slots[0]"
    ]


@pytest.mark.parametrize("driver", ["n580", "n610"])
def test_a_worker_owns_devices_exactly_when_the_driver_is_not_host(driver: str) -> None:
    on_gpu = put(request_example(driver=driver), "launch.execution.workers.0.device_slots", [])
    assert fields(on_gpu) == ["launch.execution.workers[0].device_slots"]
    on_host = request_example()
    on_host["launch"]["units"][0]["devices"] = ["GPU-0"]
    assert fields(on_host) == []
    assert fields(put(on_host, "launch.execution.workers.0.device_slots", [0])) == [
        "launch.execution.workers[0].device_slots"
    ]


@pytest.mark.parametrize(
    ("driver", "allowed"),
    [
        ("host", {"disabled"}),
        ("n580", {"disabled", "recreate-from-plan"}),
        ("n610", {"disabled", "recreate-from-plan", "preserve-exec", "preserve-nccl-exec"}),
    ],
)
def test_graph_policies_by_driver(driver: str, allowed: set[str]) -> None:
    for policy in GraphPolicy:
        found = fields(put(request_example(driver=driver), "policy.process.graph_policy", policy.value))
        assert found == ([] if policy.value in allowed else ["policy.process.graph_policy"])


@pytest.mark.parametrize("materialize", ["async", "required"])
def test_sglang_cannot_materialize(materialize: str) -> None:
    document = put(request_example(), "policy.weights.native.materialize", materialize)
    assert fields(document) == []
    assert fields(put(document, "launch.engine", "sglang")) == ["policy.weights.native.materialize"]


def staged(*workers: str) -> list[Document]:
    return [{"worker": w, "path": f"/packs/{w}", "bytes": 4096, "sha256": digest_of("p")} for w in workers]


def test_staged_packs_cover_every_worker_or_none() -> None:
    document = request_example("restore", workers_per_unit=3)

    def with_packs(*workers: str) -> list[str]:
        return fields(put(document, "policy.weights.native.staged", staged(*workers)))

    assert with_packs() == []
    assert with_packs("w0", "w1", "w2") == []
    assert with_packs("w0", "w2") == ["policy.weights.native.staged"]
    assert with_packs("w0", "w1", "w2", "w9") == ["policy.weights.native.staged[3].worker"]
    assert with_packs("w0", "w1", "w2", "w1") == ["policy.weights.native.staged[3].worker"]


def test_recovery_mode_needs_recovery() -> None:
    document = put(request_example("restore"), "policy.weights", {"mode": "recovery", "recovery": {"enabled": False}})
    assert fields(document) == ["policy.weights.recovery.enabled"]


def test_a_request_has_a_size_limit() -> None:
    data = json.dumps(request_example()).encode()
    assert parse_request(data + b" " * (MAX_REQUEST_BYTES - len(data))).id == "op-1"
    with pytest.raises(InvalidDocument, match="too large"):
        parse_request(data + b" " * (MAX_REQUEST_BYTES + 1 - len(data)))


BREAKS: list[Callable[[Document], Document]] = [
    lambda d: put(d, "launch.units.0.index", "0"),
    lambda d: put(d, "launch.units.0.mounts.0.target", "rel"),
    lambda d: put(d, "launch.execution.adapter.payload", {"changed": 1}),
    lambda d: put(d, "policy.process.backend", "cuda-criu"),
    lambda d: put(d, "unknown", 1),
    lambda d: put(d, "output", ""),
]


@settings(max_examples=40)
@given(st.sets(st.sampled_from(range(len(BREAKS)))))
def test_problems_add_up(chosen: set[int]) -> None:
    document = request_example()
    alone = [fields(BREAKS[index](document)) for index in sorted(chosen)]
    for index in sorted(chosen):
        document = BREAKS[index](document)
    assert sorted(fields(document)) == sorted(field for found in alone for field in found)


def test_records_are_frozen_and_equal_by_value() -> None:
    first, second = request_from(request_example()), request_from(request_example())
    assert first == second
    with pytest.raises(ValueError, match="frozen"):
        first.id = "x"  # type: ignore[misc] # that is the point
    assert isinstance(first, OperationRequest)
