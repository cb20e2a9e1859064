"""The operation request, format 4: one document that says everything an operation may need to know.

Defaults are laid first and the document over them, so an explicit ``false`` survives. ``request_sha256`` is taken of
the result: neither whitespace nor key order nor an omitted default changes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from coldsnap.core.canonical import canonical_json
from coldsnap.core.defaults import defaults_for, with_defaults
from coldsnap.core.digest import Digest
from coldsnap.core.drivers import DRIVERS, DriverId, GraphPolicy, ProcessBackend
from coldsnap.core.execution import Adapter, Execution, Group, Service, Worker
from coldsnap.core.launch import HOST_IMAGE, Launch, ModelRef, ModelSource, Mount, Runtime, Unit, device_problems
from coldsnap.core.names import Choice, Id, Items, Line, Text, Unfit, check_id
from coldsnap.core.parsing import Record, at, check_document, parse_document, plain_document, rule
from coldsnap.core.paths import join, show
from coldsnap.core.policy import (
    ArtifactScope,
    CachePolicy,
    CapsulePolicy,
    CompatibilityPolicy,
    KernelPolicy,
    LoaderBackend,
    Materialize,
    NativeWeights,
    Policy,
    ProcessPolicy,
    RecoveryWeights,
    StagedPayload,
    WeightsMode,
    WeightsPolicy,
)
from coldsnap.errors import Problem

__all__ = [
    "EXTENSION_SCHEMA",
    "HOST_IMAGE",
    "MAX_REQUEST_BYTES",
    "ActivationState",
    "Adapter",
    "ArtifactScope",
    "CachePolicy",
    "CapsulePolicy",
    "CompatibilityPolicy",
    "DriverId",
    "Execution",
    "Extension",
    "ExtensionPrompt",
    "GraphPolicy",
    "Group",
    "KernelPolicy",
    "Launch",
    "Lifecycle",
    "LoaderBackend",
    "Materialize",
    "ModelRef",
    "ModelSource",
    "Mount",
    "NativeWeights",
    "Operation",
    "OperationRequest",
    "Policy",
    "ProcessBackend",
    "ProcessPolicy",
    "RecoveryWeights",
    "Runtime",
    "Service",
    "SnapshotDriverRef",
    "StagedPayload",
    "TransferPath",
    "Unit",
    "Validation",
    "WeightsMode",
    "WeightsPolicy",
    "Worker",
    "Workload",
    "defaults_for",
    "parse_request",
    "request_bytes",
    "request_document",
    "request_from",
    "request_sha256",
]

MAX_REQUEST_BYTES = 16 * 1024 * 1024
EXTENSION_SCHEMA: Literal["coldsnap-extension-1"] = "coldsnap-extension-1"
_SUBJECT = "operation request"


class Operation(StrEnum):
    """What a request asks for."""

    CAPTURE = "capture"
    PUBLISH = "publish"
    PUBLISH_NATIVE = "publish-native"
    RESTORE = "restore"
    SLEEP = "sleep"
    WAKE = "wake"
    STATUS = "status"


class ActivationState(StrEnum):
    """Where a restore stops: ready to serve, or ``warm``, just before hydration."""

    READY = ""
    WARM = "warm"


class TransferPath(StrEnum):
    """Which I/O path moves the bytes; ``auto`` measures none and follows a rule. The last three are a device's."""

    AUTO = "auto"
    DIRECT = "direct"
    BUFFERED = "buffered"
    MAPPED = "mapped"
    REGISTERED = "registered"
    MIXED = "mixed"


class SnapshotDriverRef(Record):
    """The snapshot driver, by name. Never empty and never ``auto``."""

    id: Choice[DriverId]


class Validation(Record):
    """How a restored engine is asked whether it is the one that was captured."""

    health_path: Line = "/health"
    prompt: Text = ""
    expected: Text = ""

    @rule
    def _health_path_is_absolute(self) -> Iterator[Problem]:
        yield from health_path_problems(self.health_path)


class Workload(Record):
    """The live service that the operation is about; empty when there is none yet."""

    cluster_id: Text = ""

    @rule
    def _cluster_id_is_a_name(self) -> Iterator[Problem]:
        if self.cluster_id:
            yield from _id_problems("cluster_id", self.cluster_id)


class Lifecycle(Record):
    """How far a restore goes."""

    activation_state: Choice[ActivationState] = ActivationState.READY


class ExtensionPrompt(Record):
    """A prompt that is completed greedily at capture and again at every restore."""

    text: Text
    max_tokens: int = Field(ge=1, le=4096)


class Extension(Record):
    """The one place for what is coldsnap's own beyond the format."""

    schema_: Literal["coldsnap-extension-1"] = Field(default=EXTENSION_SCHEMA, alias="schema")
    prompts: Items[ExtensionPrompt] = ()
    allow_secrets: Items[Line] = ()
    cold_start: bool = False
    stage: bool = False
    transfer_path: Choice[TransferPath] = TransferPath.AUTO
    port: int | None = Field(default=None, ge=1, le=65535)
    runtime: Choice[Runtime] | None = None
    """What makes the containers of units with an image; absent: coldsnap itself."""


class OperationRequest(Record):
    """Everything an operation may need to know; omitted fields take the driver's and the format's defaults."""

    format: Literal[4] = 4
    kind: Literal["coldsnap-operation-request"] = "coldsnap-operation-request"
    operation: Choice[Operation]
    id: Id
    snapshot_driver: SnapshotDriverRef
    artifact: Text = ""
    output: Text = ""
    launch: Launch
    policy: Policy = Policy()
    validation: Validation = Validation()
    workload: Workload = Workload()
    lifecycle: Lifecycle = Lifecycle()
    extension: Extension | None = None

    @property
    def runtime(self) -> Runtime | None:
        """What makes the containers of its units; None: coldsnap itself."""
        return self.extension.runtime if self.extension is not None else None

    @rule
    def _a_runtime_has_images(self) -> Iterator[Problem]:
        for index, unit in enumerate(self.launch.units if self.runtime is not None else ()):
            if unit.image == HOST_IMAGE:
                yield Problem(
                    field="extension.runtime",
                    message=f"makes containers of images, and launch.units[{index}] has none",
                    value=show(str(self.runtime)),
                    cure="name the unit's image, or leave the runtime out",
                )

    @rule
    def _operation_has_an_artifact(self) -> Iterator[Problem]:
        if self.operation is not Operation.CAPTURE and not self.artifact:
            yield self._needed("artifact", "the artifact to work on")

    @rule
    def _operation_has_an_output(self) -> Iterator[Problem]:
        writes = (Operation.CAPTURE, Operation.PUBLISH, Operation.PUBLISH_NATIVE)
        if self.operation in writes and not self.output:
            yield self._needed("output", "where to write the artifact")

    @rule
    def _publish_has_a_repository(self) -> Iterator[Problem]:
        if self.operation is Operation.PUBLISH and not self.policy.capsule.repository:
            yield self._needed("policy.capsule.repository", "where the capsule images go")

    @rule
    def _publish_native_has_a_repository(self) -> Iterator[Problem]:
        if self.operation is Operation.PUBLISH_NATIVE and not self.policy.weights.native.repository:
            yield self._needed("policy.weights.native.repository", "where the packs go")

    @rule
    def _live_operation_names_its_service(self) -> Iterator[Problem]:
        live = (Operation.SLEEP, Operation.WAKE, Operation.STATUS)
        if self.operation in live and not self.workload.cluster_id:
            yield self._needed("workload.cluster_id", "the service that is live")

    def _needed(self, field: str, what: str) -> Problem:
        return Problem(field=field, message=f"is needed by {self.operation}", value='""', cure=f"name {what}")

    @rule
    def _workers_fit_the_driver(self) -> Iterator[Problem]:
        for problem in device_problems(self.launch, self.snapshot_driver.id):
            yield at("launch", problem)

    @rule
    def _backend_fits_the_driver(self) -> Iterator[Problem]:
        backend, contract = self.policy.process.backend, DRIVERS[self.snapshot_driver.id]
        if backend is not contract.backend:
            yield Problem(
                field="policy.process.backend",
                message=f"does not go with driver {contract.id}",
                value=show(backend.value),
                cure=f"use {contract.backend.value}, or leave it out",
            )

    @rule
    def _graph_policy_fits_the_driver(self) -> Iterator[Problem]:
        graphs, contract = self.policy.process.graph_policy, DRIVERS[self.snapshot_driver.id]
        if graphs not in contract.graph_policies:
            yield Problem(
                field="policy.process.graph_policy",
                message=f"cannot be kept by driver {contract.id}",
                value=show(graphs.value),
                cure=f"use {' or '.join(contract.graph_policies)}, or leave it out",
            )

    @rule
    def _engine_can_materialize(self) -> Iterator[Problem]:
        materialize = self.policy.weights.native.materialize
        if self.launch.engine == "sglang" and materialize is not Materialize.OFF:
            yield Problem(
                field="policy.weights.native.materialize",
                message="is refused for engine sglang",
                value=show(materialize.value),
                cure="use off",
            )

    @rule
    def _warm_is_a_restore(self) -> Iterator[Problem]:
        if self.lifecycle.activation_state is ActivationState.WARM and self.operation is not Operation.RESTORE:
            yield _warm(f"is for restore, not {self.operation}", "leave it empty, or restore")

    @rule
    def _warm_fits_the_driver(self) -> Iterator[Problem]:
        contract = DRIVERS[self.snapshot_driver.id]
        if self.lifecycle.activation_state is ActivationState.WARM and not contract.allows_warm:
            yield _warm(f"is impossible with driver {contract.id}", "use driver n610 or host, or leave it empty")

    @rule
    def _warm_does_not_wait_for_a_pack(self) -> Iterator[Problem]:
        required = self.policy.weights.native.materialize is Materialize.REQUIRED
        if self.lifecycle.activation_state is ActivationState.WARM and required:
            yield _warm("stops before the pack that materialize `required` waits for", "use materialize off or async")

    @rule
    def _staged_packs_cover_the_workers(self) -> Iterator[Problem]:
        staged = {entry.worker for entry in self.policy.weights.native.staged}
        missing = [worker.id for worker in self.launch.execution.workers if worker.id not in staged]
        if staged and missing:
            yield Problem(
                field="policy.weights.native.staged",
                message=f"covers some workers and not {', '.join(missing[:8])}",
                value=f"{len(staged)} of {len(staged) + len(missing)} workers",
                cure="stage a pack for every worker, or for none",
            )

    @rule
    def _staged_workers_exist(self) -> Iterator[Problem]:
        known = {worker.id for worker in self.launch.execution.workers}
        for index, entry in enumerate(self.policy.weights.native.staged):
            if entry.worker not in known:
                yield _no_worker(f"policy.weights.native.staged[{index}].worker", entry.worker)

    @rule
    def _named_files_have_workers(self) -> Iterator[Problem]:
        known = {worker.id for worker in self.launch.execution.workers}
        for worker in self.policy.weights.native.files_by_worker:
            if worker not in known:
                yield _no_worker(join("policy.weights.native.files_by_worker", worker), worker)


def health_path_problems(path: str) -> Iterator[Problem]:
    """A health path is a path of the engine's own HTTP server."""
    if not path.startswith("/"):
        yield Problem(
            field="health_path", message="does not begin with /", value=show(path), cure="write a path such as /health"
        )


def _warm(message: str, cure: str) -> Problem:
    return Problem(field="lifecycle.activation_state", message=message, value='"warm"', cure=cure)


def _no_worker(field: str, worker: str) -> Problem:
    return Problem(
        field=field,
        message="names no worker of the launch",
        value=show(worker),
        cure="name a worker of launch.execution",
    )


def parse_request(data: bytes) -> OperationRequest:
    """Parse a request. Raises InvalidDocument with every problem."""
    return parse_document(
        OperationRequest, data, subject=_SUBJECT, limit_bytes=MAX_REQUEST_BYTES, prepare=with_defaults
    )


def request_from(document: object) -> OperationRequest:
    """As ``parse_request``, from plain values in memory."""
    return check_document(OperationRequest, document, subject=_SUBJECT, prepare=with_defaults)


def request_document(request: OperationRequest) -> dict[str, Any]:
    """The request as plain values with every default resolved; optional parts that are absent stay absent."""
    return plain_document(request)


def request_bytes(request: OperationRequest) -> bytes:
    """The request as a file: canonical JSON and a newline."""
    return canonical_json(request_document(request)) + b"\n"


def request_sha256(request: OperationRequest) -> Digest:
    """The request's identity: SHA-256 of its canonical JSON, without a newline."""
    return Digest.of(canonical_json(request_document(request)))


def _id_problems(field: str, text: str) -> Iterator[Problem]:
    try:
        check_id(text)
    except Unfit as fault:
        yield Problem(field=field, message=str(fault), value=show(text), cure=fault.cure)
