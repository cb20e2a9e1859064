"""The snapshot artifact, format 9: the descriptor that is committed last and never changed.

It binds everything a restore trusts: the request, the launch, what the destination must be, every capsule and every
object by digest. What it says about one thing in two places must agree; the rules below are those agreements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from coldsnap.core.bindings import binding_problems
from coldsnap.core.canonical import canonical_json
from coldsnap.core.destination import (
    ArtifactDriver,
    Compatibility,
    DeviceCompatibility,
    Requires,
    UnitCompatibility,
)
from coldsnap.core.digest import Digest
from coldsnap.core.drivers import DRIVERS, DriverId, GraphPolicy, required_features
from coldsnap.core.execution import repeated
from coldsnap.core.launch import Launch, device_problems
from coldsnap.core.names import Choice, Id, Items, is_id
from coldsnap.core.objects import (
    MODEL_PAYLOAD_ROLE,
    Capsule,
    CapsuleImageRecord,
    ModelPayloads,
    NativeProvider,
    ObjectRecord,
    RecoveryProvider,
    Weights,
    payload_path,
)
from coldsnap.core.owners import OwnerKind
from coldsnap.core.parsing import Record, at, check_document, parse_document, parsed, plain_document, rule
from coldsnap.core.paths import show
from coldsnap.core.request import Validation
from coldsnap.core.versions import version_fault, version_of
from coldsnap.errors import Problem

__all__ = [
    "MAX_ARTIFACT_BYTES",
    "MODEL_PAYLOAD_ROLE",
    "ArtifactDriver",
    "Capsule",
    "CapsuleImageRecord",
    "Compatibility",
    "DeviceCompatibility",
    "Graph",
    "ModelPayloads",
    "NativeProvider",
    "ObjectRecord",
    "RecoveryProvider",
    "Requires",
    "Runtime",
    "SnapshotArtifact",
    "UnitCompatibility",
    "Weights",
    "artifact_bytes",
    "artifact_digest",
    "artifact_document",
    "artifact_from",
    "parse_artifact",
    "payload_path",
]

MAX_ARTIFACT_BYTES = 64 * 1024 * 1024
_SUBJECT = "snapshot artifact"


class Runtime(Record):
    """Facts bound to the artifact beyond the format; each has a ``kind``. See ``bindings.py``."""

    bindings: Items[Mapping[str, Any]] = ()

    @rule
    def _kinds_are_named(self) -> Iterator[Problem]:
        for index, binding in enumerate(self.bindings):
            kind = binding.get("kind")
            if not isinstance(kind, str) or not is_id(kind):
                yield Problem(
                    field=f"bindings[{index}].kind",
                    message="is missing" if kind is None else "is not an id",
                    value=None if kind is None else show(kind),
                    cure="give the binding a kind such as coldsnap-acceptance",
                )


class Graph(Record):
    """What became of the captured CUDA graphs."""

    policy: Choice[GraphPolicy]


class SnapshotArtifact(Record):
    """The committed descriptor of a capture: what it is, what it needs, and every byte of it by digest."""

    format: Literal[9]
    kind: Literal["coldsnap-snapshot-artifact"]
    state: Literal["committed"]
    capture_id: Id
    request_sha256: Digest
    snapshot_driver: ArtifactDriver
    requires: Requires
    launch: Launch
    compatibility: Compatibility
    capsule: Capsule
    runtime: Runtime
    graph: Graph
    weights: Weights
    acceptance: Validation

    @rule
    def _requires_what_the_driver_does(self) -> Iterator[Problem]:
        needed = required_features(self.snapshot_driver.id, self.launch.execution)
        missing = [feature for feature in needed if feature not in self.requires.features]
        if missing:
            yield Problem(
                field="requires.features",
                message=f"lacks {', '.join(missing)}",
                value=f"{len(self.requires.features)} features",
                cure=f"driver {self.snapshot_driver.id} and this launch need them",
            )

    @rule
    def _workers_fit_the_driver(self) -> Iterator[Problem]:
        for problem in device_problems(self.launch, self.snapshot_driver.id):
            yield at("launch", problem)

    @rule
    def _graph_policy_fits_the_driver(self) -> Iterator[Problem]:
        allowed = DRIVERS[self.snapshot_driver.id].graph_policies
        if self.graph.policy not in allowed:
            yield Problem(
                field="graph.policy",
                message=f"cannot be kept by driver {self.snapshot_driver.id}",
                value=show(self.graph.policy.value),
                cure=f"use {' or '.join(allowed)}",
            )

    @rule
    def _one_compatibility_entry_a_unit(self) -> Iterator[Problem]:
        named = [entry.unit for entry in self.compatibility.units]
        yield from _one_each("compatibility.units", "unit", named, [unit.id for unit in self.launch.units])

    @rule
    def _devices_match_the_unit(self) -> Iterator[Problem]:
        counts = {unit.id: len(unit.devices) for _, unit in parsed(self.launch.units, "id", "devices")}
        for index, entry in parsed(self.compatibility.units, "unit", "devices"):
            expected = counts.get(entry.unit, len(entry.devices))
            if len(entry.devices) != expected:
                yield Problem(
                    field=f"compatibility.units[{index}].devices",
                    message=f"does not describe the {expected} devices of unit {entry.unit}",
                    value=f"{len(entry.devices)} entries",
                    cure="write one entry a device",
                )

    @rule
    def _nvidia_facts_go_with_the_driver(self) -> Iterator[Problem]:
        driver = self.snapshot_driver.id
        for index, entry in enumerate(self.compatibility.units):
            for field in ("nvidia_driver_captured", "nvidia_driver_min", "cuda_userspace"):
                value = getattr(entry, field)
                place = f"compatibility.units[{index}].{field}"
                if driver is DriverId.HOST and value is not None:
                    yield Problem(
                        field=place, message="is given for driver host", value=show(value), cure="leave it out"
                    )
                if driver is not DriverId.HOST and value is None:
                    yield Problem(field=place, message=f"is missing for driver {driver}", cure="add it")

    @rule
    def _minimum_is_the_drivers(self) -> Iterator[Problem]:
        major = DRIVERS[self.snapshot_driver.id].minimum_nvidia_driver_major
        for index, entry in parsed(self.compatibility.units, "nvidia_driver_min"):
            least = entry.nvidia_driver_min
            if least is not None and not version_fault(least) and version_of(least) < (major,):
                yield Problem(
                    field=f"compatibility.units[{index}].nvidia_driver_min",
                    message=f"is below what driver {self.snapshot_driver.id} needs anywhere",
                    value=show(least),
                    cure=f"write {major} or newer",
                )

    @rule
    def _one_image_a_unit(self) -> Iterator[Problem]:
        named = [image.unit for image in self.capsule.images]
        yield from _one_each("capsule.images", "unit", named, [unit.id for unit in self.launch.units])

    @rule
    def _images_have_the_driver(self) -> Iterator[Problem]:
        for index, image in parsed(self.capsule.images, "snapshot_driver"):
            yield from self._other_driver(f"capsule.images[{index}].snapshot_driver", image.snapshot_driver)

    @rule
    def _native_has_the_driver(self) -> Iterator[Problem]:
        if self.weights.native is not None:
            yield from self._other_driver("weights.native.snapshot_driver", self.weights.native.snapshot_driver)

    @rule
    def _recovery_has_the_driver(self) -> Iterator[Problem]:
        yield from self._other_driver("weights.recovery.snapshot_driver", self.weights.recovery.snapshot_driver)

    def _other_driver(self, field: str, driver: DriverId) -> Iterator[Problem]:
        if driver is not self.snapshot_driver.id:
            yield Problem(
                field=field,
                message="is another driver than the artifact's",
                value=driver.value,
                cure=f"write {self.snapshot_driver.id.value}",
            )

    @rule
    def _owners_exist(self) -> Iterator[Problem]:
        execution = self.launch.execution
        known = {
            OwnerKind.UNIT: {unit.id for unit in self.launch.units},
            OwnerKind.WORKER: {worker.id for worker in execution.workers},
            OwnerKind.SERVICE: {service.id for service in execution.services},
            OwnerKind.GROUP: {group.id for group in execution.groups},
        }
        for index, entry in parsed(self.capsule.objects, "owner"):
            if entry.owner.id not in known[entry.owner.kind]:
                yield Problem(
                    field=f"capsule.objects[{index}].owner",
                    message=f"names no {entry.owner.kind} of the launch",
                    value=str(entry.owner),
                    cure="name an owner that exists",
                )

    @rule
    def _packs_are_not_capsule_objects(self) -> Iterator[Problem]:
        for index, entry in parsed(self.capsule.objects, "role", "path"):
            if entry.role == MODEL_PAYLOAD_ROLE or entry.path.startswith("model-payloads/"):
                yield Problem(
                    field=f"capsule.objects[{index}]",
                    message="is a pack inside the capsule",
                    value=show(entry.path),
                    cure="packs are named by weights.model_payloads and live outside",
                )

    @rule
    def _one_pack_a_worker(self) -> Iterator[Problem]:
        if self.weights.model_payloads is not None:
            yield from self._worker_objects("weights.model_payloads.objects", self.weights.model_payloads.objects)

    @rule
    def _one_replay_plan_a_worker(self) -> Iterator[Problem]:
        yield from self._worker_objects("weights.recovery.replay_plan", self.weights.recovery.replay_plan)

    def _worker_objects(self, field: str, objects: tuple[ObjectRecord, ...]) -> Iterator[Problem]:
        for index, entry in enumerate(objects):
            if entry.owner.kind is not OwnerKind.WORKER:
                yield Problem(
                    field=f"{field}[{index}].owner",
                    message="is not a worker",
                    value=str(entry.owner),
                    cure="write worker/ and its id",
                )
        named = [entry.owner.id if entry.owner.kind is OwnerKind.WORKER else None for entry in objects]
        yield from _one_each(field, "owner", named, [worker.id for worker in self.launch.execution.workers])

    @rule
    def _replay_plans_are_in_the_capsule(self) -> Iterator[Problem]:
        inside: dict[str, list[ObjectRecord]] = {}
        for entry in self.capsule.objects:
            inside.setdefault(entry.path, []).append(entry)
        for index, plan in enumerate(self.weights.recovery.replay_plan):
            if plan not in inside.get(plan.path, []):
                yield Problem(
                    field=f"weights.recovery.replay_plan[{index}]",
                    message="is not an object of the capsule",
                    value=show(plan.path),
                    cure="list it in capsule.objects with the same role, owner, size and digest",
                )

    @rule
    def _recovery_model_is_the_launch_model(self) -> Iterator[Problem]:
        recovery, model = self.weights.recovery, self.launch.model
        for field, found, expected in (
            ("model_id", recovery.model_id, model.id),
            ("revision", recovery.revision, model.revision),
        ):
            if found != expected:
                yield Problem(
                    field=f"weights.recovery.{field}",
                    message="is not the launch's model",
                    value=show(found),
                    cure=f"write {show(expected)}",
                )

    @rule
    def _bindings_hold(self) -> Iterator[Problem]:
        units = {unit.id for unit in self.launch.units}
        workers = {worker.id for worker in self.launch.execution.workers}
        for problem in binding_problems(self.runtime.bindings, units=units, workers=workers):
            yield at("runtime.bindings", problem)


def _one_each(field: str, noun: str, named: list[str | None] | list[str], wanted: list[str]) -> Iterator[Problem]:
    counts = Counter(named)
    for index, name in enumerate(named):
        if name is not None and name not in wanted:
            yield Problem(
                field=f"{field}[{index}].{noun}",
                message="is not of the launch",
                value=show(name),
                cure=f"name one of {', '.join(wanted[:8])}",
            )
    for index, name in repeated((i, name) for i, name in enumerate(named) if name is not None):
        yield Problem(
            field=f"{field}[{index}].{noun}", message="has an earlier entry", value=show(name), cure="keep one of them"
        )
    missing = [name for name in wanted if not counts[name]]
    if missing:
        yield Problem(
            field=field,
            message=f"has no entry for {', '.join(missing[:8])}",
            value=f"{len(named)} entries",
            cure="write one entry each",
        )


def parse_artifact(data: bytes) -> SnapshotArtifact:
    """Parse an artifact. Raises InvalidDocument with every problem."""
    return parse_document(SnapshotArtifact, data, subject=_SUBJECT, limit_bytes=MAX_ARTIFACT_BYTES)


def artifact_from(document: object) -> SnapshotArtifact:
    """As ``parse_artifact``, from plain values in memory."""
    return check_document(SnapshotArtifact, document, subject=_SUBJECT)


def artifact_document(artifact: SnapshotArtifact) -> dict[str, Any]:
    """The artifact as plain values."""
    return plain_document(artifact)


def artifact_bytes(artifact: SnapshotArtifact) -> bytes:
    """The artifact as a file: canonical JSON and a newline."""
    return canonical_json(artifact_document(artifact)) + b"\n"


def artifact_digest(artifact: SnapshotArtifact) -> Digest:
    """SHA-256 of ``artifact_bytes``: what ``sha256sum`` prints for the committed file."""
    return Digest.of(artifact_bytes(artifact))
