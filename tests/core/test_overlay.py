"""Overlay descriptors: what binds them, what makes them stale, and which are worth nothing."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from coldsnap.core.artifact import artifact_digest, artifact_document, artifact_from
from coldsnap.core.compat import DeviceFacts, HostFacts
from coldsnap.core.digest import Digest
from coldsnap.core.overlay import (
    OverlayDescriptor,
    make_overlay,
    overlay_bytes,
    overlay_target,
    parse_overlay,
    same_capture,
    stale_problems,
)
from coldsnap.core.parsing import check_document
from coldsnap.errors import InvalidDocument
from coldsnap.testing.documents import artifact_example, digest_of, overlay_example

SHAPE: dict[str, Any] = {"driver": "n610", "num_units": 2, "workers_per_unit": 2}
PORTABLE = artifact_from(artifact_example(**SHAPE))
HOSTS = {unit: Digest.parse(digest_of(f"machine of {unit}")) for unit in ("u0", "u1")}
FACTS = HostFacts(
    architecture="x86_64",
    kernel="6.12.0",
    nvidia_driver="580.159.04",
    cuda_userspace="13.0",
    devices=tuple(DeviceFacts(slot=slot, gpu_name="NVIDIA H200", compute_capability="9.0") for slot in range(2)),
    criu_version="4.2.1",
)


def overlay(change: Any = lambda document: None) -> OverlayDescriptor:
    document = overlay_example(**SHAPE)
    change(document)
    return check_document(OverlayDescriptor, document, subject="overlay")


def problems_of(change: Any) -> list[str]:
    with pytest.raises(InvalidDocument) as caught:
        overlay(change)
    assert all(problem.cure for problem in caught.value.problems)
    return [problem.field for problem in caught.value.problems]


def stale(one: OverlayDescriptor, **changes: Any) -> list[str]:
    facts = {**dict.fromkeys(HOSTS, FACTS), **changes.pop("facts", {})}
    target = overlay_target(PORTABLE, hosts={**HOSTS, **changes.pop("hosts", {})}, facts=facts)
    found = stale_problems(
        one, digest=changes.pop("digest", artifact_digest(PORTABLE)), portable=PORTABLE, target=target
    )
    assert not changes
    assert all(problem.value and problem.cure and "coldsnap materialize --overlay" in problem.cure for problem in found)
    return [problem.field for problem in found]


def test_made_written_and_read_back() -> None:
    local = overlay().artifact
    target = overlay_target(PORTABLE, hosts=HOSTS, facts=dict.fromkeys(HOSTS, FACTS))
    made = make_overlay(artifact_digest(PORTABLE), local, target)
    assert made == overlay()
    assert parse_overlay(overlay_bytes(made)) == made


def test_hosts_are_in_rank_order_whatever_the_order_of_the_workers() -> None:
    document = artifact_document(PORTABLE)
    document["launch"]["execution"]["groups"][0]["members"].reverse()
    reversed_ranks = artifact_from(document)
    target = overlay_target(reversed_ranks, hosts=HOSTS, facts=dict.fromkeys(HOSTS, FACTS))
    assert [(one.rank, one.worker, one.unit) for one in target.hosts] == [
        (0, "w3", "u1"),
        (1, "w2", "u1"),
        (2, "w1", "u0"),
        (3, "w0", "u0"),
    ]


def test_on_its_own_target_nothing_is_stale() -> None:
    assert stale(overlay()) == []


@pytest.mark.parametrize(
    ("fact", "value", "field"),
    [
        ("kernel", "6.12.1", "kernel"),
        ("architecture", "aarch64", "architecture"),
        ("criu_version", "4.2.2", "criu"),
        ("criu_version", None, "criu"),
        ("nvidia_driver", "580.159.05", "nvidia_driver"),
        ("cuda_userspace", "13.1", "cuda_userspace"),
        ("devices", FACTS.devices[:1], "devices"),
        ("devices", tuple(reversed(FACTS.devices)), None),
    ],
)
def test_exact_versions_and_devices_of_each_machine(fact: str, value: Any, field: str | None) -> None:
    changed = dataclasses.replace(FACTS, **{fact: value})
    assert stale(overlay(), facts={"u1": changed}) == ([f"target.machines[1].{field}"] if field else [])


@pytest.mark.parametrize(("frozen_by", "fields"), [("n610", []), ("n580", ["snapshot_driver"])])
def test_what_a_template_became_is_frozen_with_its_devices_state(frozen_by: str, fields: list[str]) -> None:
    portable = artifact_from(artifact_example(**{**SHAPE, "driver": "n580"}))
    target = overlay_target(portable, hosts=HOSTS, facts=dict.fromkeys(HOSTS, FACTS))
    local = artifact_from(artifact_example(**{**SHAPE, "driver": frozen_by}))
    made = make_overlay(artifact_digest(portable), local, target)
    found = stale_problems(made, digest=artifact_digest(portable), portable=portable, target=target)
    assert [problem.field for problem in found] == fields


def test_another_host_is_named_for_each_of_its_ranks() -> None:
    assert stale(overlay(), hosts={"u1": Digest.of(b"x")}) == ["target.hosts[2]", "target.hosts[3]"]


def test_another_portable_artifact() -> None:
    assert stale(overlay(), digest=Digest.of(b"x")) == ["portable"]


def artifact_changed(change: Any) -> Any:
    def apply(document: dict[str, Any]) -> None:
        change(document["artifact"])
        local = artifact_from(document["artifact"])
        document["artifact_sha256"] = str(artifact_digest(local))
        document["model_payloads"] = document["artifact"]["weights"]["model_payloads"]["objects"]

    return apply


def other_pack(document: dict[str, Any]) -> None:
    for entry in document["weights"]["model_payloads"]["objects"]:
        entry |= {"sha256": digest_of("other"), "path": f"model-payloads/sha256/{digest_of('other')[7:]}.pack"}


def other_command(document: dict[str, Any]) -> None:
    document["launch"]["units"][0]["command"].append("--eager")


def other_answers(document: dict[str, Any]) -> None:
    document["acceptance"]["expected"] = " Lyon"


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (other_pack, [f"model_payloads[{index}]" for index in range(4)]),
        (other_command, ["artifact.launch"]),
        (other_answers, ["artifact.acceptance"]),
    ],
)
def test_what_its_own_artifact_may_not_change(change: Any, fields: list[str]) -> None:
    assert stale(overlay(artifact_changed(change))) == fields


def test_a_document_that_contradicts_itself_names_every_contradiction() -> None:
    def damage(document: dict[str, Any]) -> None:
        document["snapshot_driver"] = "n580"
        document["target"]["hosts"].pop()
        document["target"]["machines"].reverse()
        document["model_payloads"] = []
        document["artifact_sha256"] = digest_of("another")

    assert problems_of(damage) == [
        "snapshot_driver",
        "target.hosts",
        "target.machines",
        "model_payloads",
        "artifact_sha256",
    ]


def test_one_changed_character_of_the_artifact_is_seen() -> None:
    def damage(document: dict[str, Any]) -> None:
        document["artifact"]["capsule"]["objects"][0]["bytes"] += 1
        document["artifact"]["weights"]["recovery"]["replay_plan"][0]["bytes"] += 1

    assert problems_of(damage) == ["artifact_sha256"]


def test_a_broken_graph_is_reported_by_its_own_rules() -> None:
    def damage(document: dict[str, Any]) -> None:
        document["artifact"]["launch"]["execution"]["groups"] = []

    fields = problems_of(damage)
    assert "target.hosts" not in fields
    assert any(field.startswith("artifact.launch.execution") for field in fields)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": 2}, "format"),
        ({"kind": "coldsnap-snapshot-artifact"}, "kind"),
        ({"state": "draft"}, "state"),
        ({"later": True}, "later"),
        ({"portable": "sha256:0"}, "portable"),
    ],
)
def test_the_head_is_strict(change: dict[str, Any], field: str) -> None:
    assert problems_of(lambda document: document.update(change)) == [field]


def test_an_overlay_is_worth_nothing_only_when_capsules_and_replay_objects_are_the_same() -> None:
    assert same_capture(PORTABLE, PORTABLE)
    assert not same_capture(PORTABLE, overlay().artifact)
    document = copy.deepcopy(artifact_document(PORTABLE))
    for entry in (document["capsule"]["objects"][0], document["weights"]["recovery"]["replay_plan"][0]):
        entry["sha256"] = digest_of("another plan")
    assert not same_capture(PORTABLE, artifact_from(document))
