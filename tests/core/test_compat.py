"""Compatibility: what may change at restore may, what may not is refused with the field named."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.artifact import SnapshotArtifact, artifact_from
from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.compat import DeviceFacts, HostFacts, compatibility_problems, destination_problems
from coldsnap.core.drivers import DriverId, FeatureResult, FeatureState, admit_features
from coldsnap.core.launch import Launch
from coldsnap.core.launchdiff import is_placement_variable, launch_problems
from coldsnap.core.parsing import check_document, plain_document
from coldsnap.core.policy import CompatibilityPolicy, KernelPolicy
from coldsnap.errors import Problem
from coldsnap.testing.documents import artifact_example, digest_of, launch_example

Document = dict[str, Any]


def launch(change: Callable[[Document], object] = lambda _: None, **example: Any) -> Launch:
    document = copy.deepcopy(launch_example(**example))
    change(document)
    return check_document(Launch, document, subject="launch")


def launch_fields(change: Callable[[Document], object], **example: Any) -> list[str]:
    return fields(launch_problems(launch(**example), launch(change, **example)))


def fields(problems: Any) -> list[str]:
    found: list[Problem] = list(problems)
    assert all(problem.cure and problem.value is not None for problem in found), found
    return [problem.field for problem in found]


def unit(document: Document, index: int = 0) -> Document:
    return document["units"][index]  # type: ignore[no-any-return] # plain values


# ---- the launch ------------------------------------------------------------------------------------------------

MAY_CHANGE: list[tuple[str, Callable[[Document], object]]] = [
    ("nothing", lambda _: None),
    ("host", lambda d: unit(d).update(host="node-9")),
    ("device selectors", lambda d: unit(d).update(devices=["GPU-7", "GPU-8"])),
    ("mount source", lambda d: unit(d)["mounts"][0].update(source="/elsewhere")),
    ("base image", lambda d: unit(d).update(image=f"other@{digest_of('o')}", image_digest=digest_of("o"))),
    ("port", lambda d: unit(d).update(command=["python", "-m", "engine", "--port", "9000"])),
    ("port, other form", lambda d: unit(d).update(command=["python", "-m", "engine", "--port=9000"])),
    *(
        (f"variable {name}", lambda d, name=name: unit(d).update(environment={"LANG": "C.UTF-8", name: "x"}))
        for name in (
            "NCCL_SOCKET_IFNAME",
            "NCCL_X",
            "UCX_NET_DEVICES",
            "OMPI_MCA_btl",
            "GLOO_SOCKET_IFNAME",
            "TP_SOCKET_IFNAME",
            "MN_IF_NAME",
            "NODE_IP",
            "VLLM_HOST_IP",
        )
    ),
]


@pytest.mark.parametrize("change", [case[1] for case in MAY_CHANGE], ids=[case[0] for case in MAY_CHANGE])
def test_placement_may_change(change: Callable[[Document], object]) -> None:
    assert launch_fields(change, driver="n610", workers_per_unit=2) == []


def payload(value: Any) -> Document:
    return {"schema": "example-1", "digest": str(canonical_sha256(value)), "payload": value}


MUST_MATCH: list[tuple[str, Callable[[Document], object], list[str]]] = [
    ("engine", lambda d: d.update(engine="other"), ["launch.engine"]),
    ("model", lambda d: d["model"].update(id="other"), ["launch.model.id"]),
    ("revision", lambda d: d["model"].update(revision=digest_of("other")), ["launch.model.revision"]),
    (
        "unit id",
        lambda d: unit(d).update(id="x") or [w.update(unit="x") for w in d["execution"]["workers"]],
        ["launch.units[0].id", "launch.execution.workers[0].unit", "launch.execution.workers[1].unit"],
    ),
    ("device count", lambda d: unit(d).update(devices=["GPU-0", "GPU-1", "GPU-2"]), ["launch.units[0].devices"]),
    ("mount target", lambda d: unit(d)["mounts"][0].update(target="/m"), ["launch.units[0].mounts[0].target"]),
    ("mount mode", lambda d: unit(d)["mounts"][0].update(read_only=False), ["launch.units[0].mounts[0].read_only"]),
    ("no mount", lambda d: unit(d).update(mounts=[]), ["launch.units[0].mounts"]),
    ("variable", lambda d: unit(d).update(environment={"LANG": "C"}), ["launch.units[0].environment.LANG"]),
    ("variable gone", lambda d: unit(d).update(environment={}), ["launch.units[0].environment.LANG"]),
    ("variable more", lambda d: unit(d)["environment"].update(X="1"), ["launch.units[0].environment.X"]),
    ("a name near NCCL", lambda d: unit(d)["environment"].update(NCCLX="1"), ["launch.units[0].environment.NCCLX"]),
    (
        "a name near NODE_IP",
        lambda d: unit(d)["environment"].update(NODE_IPS="1"),
        ["launch.units[0].environment.NODE_IPS"],
    ),
    (
        "device slots",
        lambda d: [w.update(device_slots=[1 - i]) for i, w in enumerate(d["execution"]["workers"])],
        ["launch.execution.workers[0].device_slots[0]", "launch.execution.workers[1].device_slots[0]"],
    ),
    (
        "rank order",
        lambda d: d["execution"]["groups"][0].update(members=["w1", "w0"]),
        ["launch.execution.groups[0].members[0]", "launch.execution.groups[0].members[1]"],
    ),
    (
        "a group more",
        lambda d: d["execution"]["groups"].append({"id": "t", "kind": "e:t", "members": ["w0"]}),
        ["launch.execution.groups"],
    ),
    ("group service", lambda d: d["execution"]["groups"][0].pop("service"), ["launch.execution.groups[0].service"]),
    (
        "adapter payload",
        lambda d: d["execution"].update(adapter=payload({"world_size": 2.0})),
        ["launch.execution.adapter.digest", "launch.execution.adapter.payload.world_size"],
    ),
    (
        "adapter key",
        lambda d: d["execution"].update(adapter=payload({"world_size": 2, "x": None})),
        ["launch.execution.adapter.digest", "launch.execution.adapter.payload.x"],
    ),
]


@pytest.mark.parametrize(("change", "expected"), [c[1:] for c in MUST_MATCH], ids=[c[0] for c in MUST_MATCH])
def test_identity_must_match_and_is_named(change: Callable[[Document], object], expected: list[str]) -> None:
    assert launch_fields(change, driver="n610", workers_per_unit=2) == expected


def test_the_number_of_units_must_match() -> None:
    found = fields(launch_problems(launch(num_units=2), launch()))
    assert found[0] == "launch.units"
    assert "launch.execution.workers" in found


def command_fields(captured: list[str], wanted: list[str]) -> list[str]:
    before = launch(lambda d: unit(d).update(command=captured))
    return fields(launch_problems(before, launch(lambda d: unit(d).update(command=wanted))))


FLAGS = ["--port", "--master-addr", "--master-address", "--master-port", "--dist-init-addr"]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("joined_before", [True, False])
@pytest.mark.parametrize("joined_after", [True, False])
def test_values_of_network_flags_may_change_in_both_forms(flag: str, joined_before: bool, joined_after: bool) -> None:
    def words(value: str, joined: bool) -> list[str]:
        return ["run", *([f"{flag}={value}"] if joined else [flag, value]), "--tp", "2"]

    assert command_fields(words("1", joined_before), words("2", joined_after)) == []
    assert command_fields(words("1", joined_before), [*words("2", joined_after)[:-1], "4"]) == [
        f"launch.units[0].command[{4 - joined_after}]"
    ]


@pytest.mark.parametrize("flag", ["--ports", "--host", "--master", "-port", "--Port", "port", "--dist-init-addr-x"])
def test_values_of_other_flags_must_match(flag: str) -> None:
    assert command_fields(["run", flag, "1"], ["run", flag, "2"]) == ["launch.units[0].command[2]"]
    assert command_fields(["run", f"{flag}=1"], ["run", f"{flag}=2"]) == ["launch.units[0].command[1]"]


def test_a_flag_may_not_come_or_go() -> None:
    assert command_fields(["run", "--port", "1"], ["run"]) == ["launch.units[0].command"]
    assert command_fields(["run"], ["run", "--port=1"]) == ["launch.units[0].command"]
    assert command_fields(["run", "--port"], ["run", "--port", "1"]) == ["launch.units[0].command"]
    assert command_fields(["a", "b"], ["a", "c", "d"]) == ["launch.units[0].command[1]", "launch.units[0].command"]


def test_a_flag_after_a_flag_is_its_value() -> None:
    assert command_fields(["run", "--port", "--tp", "2"], ["run", "--port", "1", "2"]) == []
    assert command_fields(["run", "--port", "--tp", "2"], ["run", "--port", "1", "4"]) == ["launch.units[0].command[3]"]


def test_a_command_difference_shows_both_words() -> None:
    before, now = launch(lambda d: unit(d).update(command=["a"])), launch(lambda d: unit(d).update(command=["b"]))
    (problem,) = launch_problems(before, now)
    assert problem.value == '"b"'
    assert '"a"' in problem.message


def test_a_value_that_may_change_is_still_no_other_word() -> None:
    before = launch(lambda d: unit(d).update(command=["run", "--port", "1"]))
    now = launch(lambda d: unit(d).update(command=["run", "--ports", "2"]))
    found = [(p.field, p.message, p.value) for p in launch_problems(before, now)]
    assert found == [
        ("launch.units[0].command[1]", 'was "--port" at capture', '"--ports"'),
        ("launch.units[0].command[2]", 'was "1" at capture', '"2"'),
    ]


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password", "X_AUTH"])
def test_values_that_look_secret_are_not_shown(name: str) -> None:
    before = launch(lambda d: unit(d).update(environment={name: "hunter1"}))
    for now in (launch(lambda d: unit(d).update(environment={name: "hunter2"})), launch()):
        text = "\n".join(map(str, launch_problems(before, now)))
        assert f"environment.{name}" in text
        assert "hunter" not in text


@settings(max_examples=50)
@given(st.text("ABCDEFGHIJKLMNOPQRSTUVWXYZ_", min_size=1, max_size=20))
def test_only_the_listed_variables_are_placement(name: str) -> None:
    exact = {"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "MN_IF_NAME", "NODE_IP", "VLLM_HOST_IP"}
    assert is_placement_variable(name) is (name in exact or name.startswith(("NCCL_", "UCX_", "OMPI_MCA_")))


@pytest.mark.parametrize(
    ("captured", "wanted"),
    [
        (["run", "--api-key", "hunter1"], ["run", "--api-key", "hunter2"]),
        (["run", "--hf-token=hunter1"], ["run", "--hf-token=hunter2"]),
        (["run"], ["run", "--api-key", "hunter2"]),
        (["hunter1", "--api-key", "hunter1"], ["run", "--api-key", "a=hunter2"]),
        (["run", "--password=hunter1", "x"], ["run"]),
        (["run", "x"], ["run", "--secret=hunter2"]),
    ],
)
def test_values_of_flags_that_sound_secret_are_not_shown(captured: list[str], wanted: list[str]) -> None:
    before = launch(lambda d: unit(d).update(command=captured))
    problems = list(launch_problems(before, launch(lambda d: unit(d).update(command=wanted))))
    assert problems
    assert "hunter" not in "\n".join(map(str, problems))


def test_a_launch_is_compatible_with_itself_in_any_layout() -> None:
    for driver in ("host", "n580", "n610"):
        one = launch(driver=driver, num_units=2, workers_per_unit=2)
        assert list(launch_problems(one, check_document(Launch, plain_document(one), subject="l"))) == []


# ---- the destination -------------------------------------------------------------------------------------------

HOST = HostFacts(architecture="x86_64", kernel="6.12.0", cpu_flags=frozenset({"avx2", "fma", "sse2"}))
GPU = replace(
    HOST,
    nvidia_driver="580.159.04",
    cuda_userspace="13.0",
    devices=(DeviceFacts(slot=0, gpu_name="NVIDIA H200", compute_capability="9.0"),),
)


def artifact(change: Callable[[Document], object] = lambda _: None, **example: Any) -> SnapshotArtifact:
    document = copy.deepcopy(artifact_example(**example))
    change(document)
    return artifact_from(document)


def passed(of: SnapshotArtifact) -> dict[str, tuple[FeatureResult, ...]]:
    results = tuple(
        FeatureResult(feature=name, state=FeatureState.PASSED, reason="probed") for name in of.requires.features
    )
    return {entry.id: results for entry in of.launch.units}


def destination_fields(
    of: SnapshotArtifact, facts: HostFacts | Mapping[str, HostFacts], policy: CompatibilityPolicy | None = None
) -> list[str]:
    hosts = facts if isinstance(facts, Mapping) else {entry.id: facts for entry in of.launch.units}
    found = fields(destination_problems(of, hosts=hosts, features=passed(of), policy=policy))
    return [field.removeprefix("compatibility.units[0].") for field in found]


def test_the_same_machine_is_compatible() -> None:
    assert destination_fields(artifact(), HOST) == []
    assert destination_fields(artifact(driver="n610"), GPU) == []
    assert destination_fields(artifact(driver="n580"), GPU) == []


def test_a_host_capture_runs_on_a_machine_with_gpus() -> None:
    assert destination_fields(artifact(), replace(GPU, devices=())) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architecture": "aarch64"}, ["architecture"]),
        ({"kernel": "6.18.0"}, []),
        ({"nvidia_driver": "580.159.4"}, []),
        ({"nvidia_driver": "610.10"}, []),
        ({"nvidia_driver": "580.159.03"}, ["nvidia_driver_captured"]),
        ({"nvidia_driver": "579.99"}, ["nvidia_driver_min", "nvidia_driver_captured"]),
        ({"nvidia_driver": None}, ["nvidia_driver_min"]),
        ({"nvidia_driver": "unknown"}, ["nvidia_driver_min"]),
        ({"cuda_userspace": "12.9"}, ["cuda_userspace"]),
        ({"cuda_userspace": None}, ["cuda_userspace"]),
        ({"devices": ()}, ["devices", "devices[0]"]),
        (
            {"devices": (DeviceFacts(slot=0, gpu_name="NVIDIA H100", compute_capability="9.0"),)},
            ["devices[0].gpu_name"],
        ),
        (
            {"devices": (DeviceFacts(slot=0, gpu_name="NVIDIA H200", compute_capability="10.0"),)},
            ["devices[0].compute_capability"],
        ),
        ({"devices": (*GPU.devices, replace(GPU.devices[0], slot=1))}, ["devices"]),
        ({"devices": (replace(GPU.devices[0], slot=1),)}, ["devices[0]"]),
        ({"cpu_flags": frozenset({"sse2"})}, ["cpu_flags"]),
    ],
)
def test_each_fact_that_must_match(change: dict[str, Any], expected: list[str]) -> None:
    assert destination_fields(artifact(driver="n610"), replace(GPU, **change)) == expected


def test_missing_cpu_flags_are_named() -> None:
    problems = destination_problems(
        artifact(), hosts={"u0": replace(HOST, cpu_flags=frozenset({"fma"}))}, features=passed(artifact())
    )
    (problem,) = problems
    assert "avx2" in problem.message
    assert "fma" not in problem.message


def test_no_flags_are_demanded_without_a_record_of_them() -> None:
    bare = artifact(lambda d: d["runtime"].update(bindings=[]))
    assert destination_fields(bare, replace(HOST, cpu_flags=frozenset())) == []


def test_the_captured_driver_floor_is_a_policy_and_the_minimum_is_not() -> None:
    older = replace(GPU, nvidia_driver="580.82")
    relaxed = CompatibilityPolicy(enforce_captured_driver_floor=False)
    assert destination_fields(artifact(driver="n610"), older) == ["nvidia_driver_captured"]
    assert destination_fields(artifact(driver="n610"), older, relaxed) == []
    assert destination_fields(artifact(driver="n610"), replace(GPU, nvidia_driver="575.5"), relaxed) == [
        "nvidia_driver_min"
    ]
    demanding = artifact(lambda d: d["compatibility"]["units"][0].update(nvidia_driver_min="580.100"), driver="n610")
    assert destination_fields(demanding, older, relaxed) == ["nvidia_driver_min"]


def test_the_kernel_is_compared_only_when_the_policy_is_exact() -> None:
    exact = CompatibilityPolicy(kernel=KernelPolicy.EXACT)
    other = replace(HOST, kernel="6.12.1")
    assert destination_fields(artifact(), other) == []
    assert destination_fields(artifact(), other, exact) == ["kernel"]
    assert destination_fields(artifact(), HOST, exact) == []


def test_a_host_that_was_not_inspected_is_a_mismatch() -> None:
    of = artifact(num_units=2)
    assert destination_fields(of, {"u0": HOST}) == ["compatibility.units[1]"]
    assert destination_fields(of, {}) == ["compatibility.units[0]", "compatibility.units[1]"]


@pytest.mark.parametrize("state", [s for s in FeatureState if s is not FeatureState.PASSED])
def test_only_passed_admits(state: FeatureState) -> None:
    results = (FeatureResult(feature="criu-process-tree", state=state, reason="because"),)
    (problem,) = destination_problems(artifact(), hosts={"u0": HOST}, features={"u0": results})
    assert problem.field == "compatibility.units[0].features.criu-process-tree"
    assert problem.value == state.value
    assert "because" in problem.message


def test_a_feature_that_was_not_probed_is_unqualified() -> None:
    (problem,) = destination_problems(artifact(), hosts={"u0": HOST}, features={})
    assert (problem.field, problem.value) == ("compatibility.units[0].features.criu-process-tree", "unqualified")


def test_features_are_admitted_in_the_order_required_and_one_failure_counts() -> None:
    ok = FeatureResult(feature="a", state=FeatureState.PASSED, reason="")
    bad = FeatureResult(feature="a", state=FeatureState.FAILED, reason="broken")
    assert admit_features(["a"], [ok]) == ()
    assert [p.field for p in admit_features(["b", "a"], [ok, bad])] == ["features.b", "features.a"]
    assert [p.field for p in admit_features(["a"], [bad, ok])] == ["features.a"]
    assert admit_features([], [bad]) == ()


def test_everything_is_reported_at_once() -> None:
    of = artifact(driver="n610", num_units=2)
    wanted = launch(lambda d: d.update(engine="other") or unit(d, 1).update(command=["x"]), driver="n610", num_units=2)
    poor = HostFacts(architecture="aarch64", kernel="5.4")
    found = fields(
        compatibility_problems(
            of,
            launch=wanted,
            hosts={"u0": GPU, "u1": poor},
            features={"u0": passed(of)["u0"], "u1": ()},
            policy=CompatibilityPolicy(kernel=KernelPolicy.EXACT),
            driver=DriverId.HOST,
        )
    )
    one = "compatibility.units[1]."
    assert found == [
        "snapshot_driver.id",
        "launch.engine",
        "launch.units[1].command[0]",
        "launch.units[1].command",
        f"{one}architecture",
        f"{one}kernel",
        f"{one}cuda_userspace",
        f"{one}nvidia_driver_min",
        f"{one}devices",
        f"{one}devices[0]",
        f"{one}cpu_flags",
        *(f"{one}features.{name}" for name in of.requires.features),
    ]


def test_compatible_means_no_problem() -> None:
    of = artifact()
    assert (
        compatibility_problems(of, launch=of.launch, hosts={"u0": HOST}, features=passed(of), driver=DriverId.HOST)
        == ()
    )
