"""The overlay descriptor: a capture of one artifact's residual and capsule, good on the one target it was made on.

A portable artifact must fit every host like its own. On one host more can be frozen in: caches that the engine filled
there, code paths it chose there. An overlay is such a capture, bound to everything it depends on. It stands for the
portable artifact only while all of that is still so; otherwise the portable artifact is used, and why is kept.

What it is bound to, and what a difference would mean:

    portable           digest of the artifact it overlays         it overlays another capture
    snapshot_driver    who froze it                               another driver cannot bring it back
    target.hosts       machine of each worker, in rank order      it was moved, or its ranks were
    target.machines    kernel, CRIU, NVIDIA driver, devices       what it froze in was chosen for others
    model_payloads     packs: owner, role, size, digest           its residual belongs to other model bytes
    artifact_sha256    its own artifact document                  it is damaged

It holds a whole artifact document of its own, whose capture id is the portable one's: an overlay is the same capture
made local, and equal bytes must give an equal capsule (``same_capture``), which is not worth keeping. That of a
template (``n580``) is frozen by ``n610``, with the devices' state: a host that has its features need not build the
model again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from coldsnap.core.artifact import MAX_ARTIFACT_BYTES, ObjectRecord, SnapshotArtifact, artifact_digest
from coldsnap.core.bindings import acceptance_of
from coldsnap.core.canonical import canonical_json
from coldsnap.core.compat import HostFacts
from coldsnap.core.destination import DeviceCompatibility
from coldsnap.core.digest import Digest
from coldsnap.core.drivers import DriverId, overlay_driver
from coldsnap.core.execution import Execution, worker_identity
from coldsnap.core.names import Choice, Id, Index, Items, Line, SomeItems
from coldsnap.core.parsing import Record, parse_document, plain_document, rule
from coldsnap.core.paths import show
from coldsnap.errors import InvalidDocument, Problem

__all__ = [
    "MAX_OVERLAY_BYTES",
    "OverlayDescriptor",
    "OverlayHost",
    "OverlayMachine",
    "OverlayTarget",
    "make_overlay",
    "overlay_bytes",
    "overlay_target",
    "parse_overlay",
    "same_capture",
    "stale_problems",
]

MAX_OVERLAY_BYTES = MAX_ARTIFACT_BYTES + 16 * 1024 * 1024
_SUBJECT = "overlay descriptor"
_AGAIN = "the portable artifact is used; `coldsnap materialize --overlay` makes a new overlay here"


class OverlayHost(Record):
    """The machine that a worker ran on, as a digest of its identity."""

    group: Id
    rank: Index
    worker: Id
    unit: Id
    host: Digest


class OverlayMachine(Record):
    """What one unit's machine was, exactly. ``devices`` by slot."""

    unit: Id
    architecture: Line
    kernel: Line
    criu: Line | None = None
    nvidia_driver: Line | None = None
    cuda_userspace: Line | None = None
    devices: Items[DeviceCompatibility] = ()


class OverlayTarget(Record):
    """Where an overlay is good: hosts by world group and rank, machines by unit in the launch's order."""

    hosts: SomeItems[OverlayHost]
    machines: SomeItems[OverlayMachine]


class OverlayDescriptor(Record):
    """A target-local capture and what it is bound to."""

    format: Literal[1]
    kind: Literal["coldsnap-overlay"]
    state: Literal["committed"]
    portable: Digest
    snapshot_driver: Choice[DriverId]
    target: OverlayTarget
    model_payloads: Items[ObjectRecord]
    artifact_sha256: Digest
    artifact: SnapshotArtifact

    @rule
    def _artifact_is_whole(self) -> Iterator[Problem]:
        found = artifact_digest(self.artifact)
        if self.artifact_sha256 != found:
            yield Problem(
                field="artifact_sha256",
                message="is not the digest of the artifact in it, so one of the two is damaged",
                value=str(self.artifact_sha256),
                cure=f"that artifact has {found}; make the overlay again",
            )

    @rule
    def _driver_is_the_artifacts(self) -> Iterator[Problem]:
        if self.snapshot_driver is not self.artifact.snapshot_driver.id:
            yield Problem(
                field="snapshot_driver",
                message="is not the driver of the overlay's own artifact",
                value=show(self.snapshot_driver.value),
                cure=f"write {self.artifact.snapshot_driver.id.value}",
            )

    @rule
    def _packs_are_the_artifacts(self) -> Iterator[Problem]:
        if self.model_payloads != _packs(self.artifact):
            yield Problem(
                field="model_payloads",
                message="are not the packs of the overlay's own artifact",
                value=f"{len(self.model_payloads)} objects",
                cure="list the objects of artifact.weights.model_payloads, in their order",
            )

    @rule
    def _hosts_are_in_rank_order(self) -> Iterator[Problem]:
        found = tuple((one.group, one.rank, one.worker, one.unit) for one in self.target.hosts)
        try:
            expected = _ranks(self.artifact.launch.execution)
        except InvalidDocument:
            return  # the graph's own rules say what is wrong with it
        if found != expected:
            yield Problem(
                field="target.hosts",
                message="are not the workers of the launch, by world group and rank",
                value=", ".join(f"{group}:{rank} {worker}" for group, rank, worker, _ in found[:8]),
                cure="write " + ", ".join(f"{group}:{rank} {worker}" for group, rank, worker, _ in expected[:8]),
            )

    @rule
    def _one_machine_a_unit(self) -> Iterator[Problem]:
        found = [one.unit for one in self.target.machines]
        expected = [unit.id for unit in self.artifact.launch.units]
        if found != expected:
            yield Problem(
                field="target.machines",
                message="are not the units of the launch, in their order",
                value=", ".join(found[:8]),
                cure=f"write one entry each for {', '.join(expected[:8])}",
            )


def parse_overlay(data: bytes) -> OverlayDescriptor:
    """Parse a descriptor. Raises InvalidDocument with every problem."""
    return parse_document(OverlayDescriptor, data, subject=_SUBJECT, limit_bytes=MAX_OVERLAY_BYTES)


def overlay_bytes(overlay: OverlayDescriptor) -> bytes:
    """The descriptor as a file: canonical JSON and a newline."""
    return canonical_json(plain_document(overlay)) + b"\n"


def make_overlay(portable: Digest, artifact: SnapshotArtifact, target: OverlayTarget) -> OverlayDescriptor:
    """The descriptor of a capture that was just made on ``target``."""
    return OverlayDescriptor(
        format=1,
        kind="coldsnap-overlay",
        state="committed",
        portable=portable,
        snapshot_driver=artifact.snapshot_driver.id,
        target=target,
        model_payloads=_packs(artifact),
        artifact_sha256=artifact_digest(artifact),
        artifact=artifact,
    )


def overlay_target(
    artifact: SnapshotArtifact, *, hosts: Mapping[str, Digest], facts: Mapping[str, HostFacts]
) -> OverlayTarget:
    """The target as it is now: ``hosts`` are machine identities and ``facts`` what they are, by unit."""
    return OverlayTarget(
        hosts=tuple(
            OverlayHost(group=group, rank=rank, worker=worker, unit=unit, host=hosts[unit])
            for group, rank, worker, unit in _ranks(artifact.launch.execution)
        ),
        machines=tuple(_machine(unit.id, facts[unit.id]) for unit in artifact.launch.units),
    )


def same_capture(portable: SnapshotArtifact, overlay: SnapshotArtifact) -> bool:
    """Whether an overlay's capsules and replay objects are the portable's own: then it is worth nothing."""
    return {image.unit: image.digest for image in portable.capsule.images} == {
        image.unit: image.digest for image in overlay.capsule.images
    } and portable.weights.recovery.replay_plan == overlay.weights.recovery.replay_plan


def stale_problems(
    overlay: OverlayDescriptor, *, digest: Digest, portable: SnapshotArtifact, target: OverlayTarget
) -> tuple[Problem, ...]:
    """Every reason why ``overlay`` may not stand for ``portable`` (with ``digest``) on ``target``, as that is now.

    It must be held to the same answers: an overlay decides where bytes come from, never what is right.
    """
    own = overlay.artifact
    return tuple(
        Problem(field=field, message=message, value=show(found)[:200], cure=f"{expected[:200]} now; {_AGAIN}")
        for field, message, found, expected in (
            ("portable", "is another artifact than this one", str(overlay.portable), str(digest)),
            (
                "snapshot_driver",
                "is not the one that freezes such an artifact again",
                overlay.snapshot_driver.value,
                overlay_driver(portable.snapshot_driver.id).value,
            ),
            *_rows("model_payloads", "is another pack", overlay.model_payloads, _packs(portable)),
            *_rows("target.hosts", "is another machine", overlay.target.hosts, target.hosts),
            *_machine_rows(overlay.target.machines, target.machines),
            ("artifact.launch", "is not the artifact's", _digest(own.launch), _digest(portable.launch)),
            ("artifact.acceptance", "holds other answers", _answers(own), _answers(portable)),
        )
        if found != expected
    )


def _rows(
    field: str, message: str, found: tuple[Record, ...], expected: tuple[Record, ...]
) -> Iterator[tuple[str, str, str, str]]:
    if len(found) != len(expected):
        yield field, "are of another number", str(len(found)), str(len(expected))
    for index, (one, other) in enumerate(zip(found, expected, strict=False)):
        yield f"{field}[{index}]", message, _text(one), _text(other)


def _machine_rows(
    found: tuple[OverlayMachine, ...], expected: tuple[OverlayMachine, ...]
) -> Iterator[tuple[str, str, str, str]]:
    if len(found) != len(expected):
        yield "target.machines", "are of another number", str(len(found)), str(len(expected))
    for index, (one, other) in enumerate(zip(found, expected, strict=False)):
        for name in OverlayMachine.model_fields:
            was, now = _text(getattr(one, name)), _text(getattr(other, name))
            yield f"target.machines[{index}].{name}", "was another when the overlay was made", was, now


def _machine(unit: str, facts: HostFacts) -> OverlayMachine:
    return OverlayMachine(
        unit=unit,
        architecture=facts.architecture,
        kernel=facts.kernel,
        criu=facts.criu_version,
        nvidia_driver=facts.nvidia_driver,
        cuda_userspace=facts.cuda_userspace,
        devices=tuple(
            DeviceCompatibility(slot=one.slot, gpu_name=one.gpu_name, compute_capability=one.compute_capability)
            for one in sorted(facts.devices, key=lambda device: device.slot)
        ),
    )


def _ranks(execution: Execution) -> tuple[tuple[str, int, str, str], ...]:
    found = (worker_identity(execution, worker.id) for worker in execution.workers)
    return tuple(sorted((one.world_group, one.rank, one.worker, one.unit) for one in found))


def _packs(artifact: SnapshotArtifact) -> tuple[ObjectRecord, ...]:
    payloads = artifact.weights.model_payloads
    return payloads.objects if payloads is not None else ()


def _answers(artifact: SnapshotArtifact) -> str:
    return _digest(acceptance_of(artifact.runtime.bindings)) + _digest(artifact.acceptance)


def _digest(record: Record | None) -> str:
    return str(Digest.of(canonical_json(plain_document(record)))) if record is not None else "none"


def _text(value: object) -> str:
    if isinstance(value, Record):
        return canonical_json(plain_document(value)).decode()
    if isinstance(value, tuple):
        return "[" + ", ".join(_text(one) for one in value) + "]"
    return "none" if value is None else str(value)
