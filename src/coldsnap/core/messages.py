"""The protocol between the controller and the half of coldsnap that lives inside an engine process.

One private Unix socket per worker. Each frame is one line of canonical JSON ending in ``\\n``, at most
``MAX_FRAME_BYTES``. The controller sends a request ``{"id", "verb", "body"}``; the worker answers with
any number of ``{"id", "progress"}`` frames and then exactly one ``{"id", "result"}`` or
``{"id", "error"}``. One request at a time; ``status`` alone is allowed while another is running.

Which verb a worker takes when is said by the table in ``workerlife``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coldsnap.core.digest import Digest
from coldsnap.core.names import EnvironmentName, Text
from coldsnap.core.policy import Materialize
from coldsnap.core.request import TransferPath
from coldsnap.core.workerlife import TRANSITIONS, Verb, WorkerState

__all__ = [
    "MAX_FRAME_BYTES",
    "TRANSITIONS",
    "Answer",
    "AnswerBody",
    "Answers",
    "ErrorFrame",
    "ExportBody",
    "Exported",
    "ExportedFile",
    "Materialization",
    "MaterializationState",
    "MaterializeBody",
    "Materialized",
    "PackSource",
    "PlaceBody",
    "Placed",
    "Prompt",
    "Request",
    "ServeBody",
    "Serving",
    "SleepBody",
    "SleepReport",
    "Verb",
    "WakeBody",
    "WakeReport",
    "WorkerSettings",
    "WorkerState",
    "WorkerStatus",
    "worker_socket_name",
]

MAX_FRAME_BYTES = 16 * 1024 * 1024


def worker_socket_name(worker: str) -> str:
    """File name of a worker's socket in the unit's private run folder.

    A socket address holds 107 bytes and a worker id may have 128, so the name is derived from the id.
    """
    return f"w-{Digest.of(worker.encode()).hex[:16]}.sock"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WorkerSettings(_Record):
    """The settings record an engine process reads at start, from the path in its one variable.

    ``options`` is the engine plugin's own record (parsed by that plugin), ``socket`` the path to listen
    on inside the unit's private run folder, ``port`` the HTTP port to serve on once loaded (None: wait
    for ``serve``). ``template``: import everything, touch no device, load nothing, and wait for ``place``; such a
    worker has no ``port``.
    """

    format: Literal[1] = 1
    kind: Literal["coldsnap-worker-settings"] = "coldsnap-worker-settings"
    worker: str
    unit: str
    rank: int = Field(ge=0)
    socket: str
    host: str = "127.0.0.1"
    port: int | None = Field(default=None, ge=1, le=65535)
    template: bool = False
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _template_waits(self) -> WorkerSettings:
        if self.template and self.port is not None:
            raise ValueError("a template has no port: tell it to serve after it was placed")
        return self


class Request(_Record):
    """One frame from the controller."""

    id: int = Field(ge=1)
    verb: Verb
    body: dict[str, Any] = Field(default_factory=dict)


class ErrorFrame(_Record):
    """Why a request failed. ``kind`` is the name of a class in ``coldsnap.errors``."""

    kind: str
    message: str
    cure: str | None = None
    facts: dict[str, Any] = Field(default_factory=dict)


class Prompt(_Record):
    """Raw text to complete greedily; no chat template is applied."""

    text: str
    max_tokens: int = Field(ge=1, le=4096)


class AnswerBody(_Record):
    """``answer``: complete each prompt greedily, one at a time, in order."""

    prompts: tuple[Prompt, ...] = Field(strict=False)


class Answer(_Record):
    """The tokens an engine produced for one prompt, and their text."""

    token_ids: tuple[int, ...] = Field(strict=False)
    text: str


class Answers(_Record):
    """Reply to ``answer``, in the order of the prompts."""

    answers: tuple[Answer, ...] = Field(strict=False)


class ExportBody(_Record):
    """``export``: write the pack into the store and the worker's other files into ``out_dir``.

    ``capture_id`` goes into the manifests. ``out_dir`` exists, is private, and is empty.
    """

    state_root: str
    out_dir: str
    capture_id: str
    num_threads: int = Field(default=0, ge=0, description="0: one per core")


class ExportedFile(_Record):
    """A file the worker wrote: ``path`` absolute, size in bytes, its SHA-256."""

    path: str
    bytes: int = Field(ge=0)
    sha256: Digest


class Exported(_Record):
    """Reply to ``export``. ``residual`` is None when there are no residual bytes.

    ``pack_shared`` says that the store already held this pack. ``residual_reasons`` maps a reason to the
    number of bytes that stayed out of the pack because of it.
    """

    pack: ExportedFile | None
    pack_shared: bool
    residual: ExportedFile | None
    native_manifest: ExportedFile
    recovery_manifest: ExportedFile
    model_bytes: int = Field(ge=0)
    residual_bytes: int = Field(ge=0)
    num_model_extents: int = Field(ge=0)
    residual_reasons: dict[str, int]
    seconds: dict[str, float]


class ServeBody(_Record):
    """``serve``: open the HTTP listener. Loopback unless the recipe says otherwise."""

    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)


class Serving(_Record):
    """Reply to ``serve`` and ``stop_serving``."""

    host: str | None
    port: int | None


class SleepBody(_Record):
    """``sleep``: a pack that is being materialized is finished first, for at most ``settle_s`` seconds."""

    settle_s: float = Field(default=60.0, ge=0)


class SleepReport(_Record):
    """Reply to ``sleep``: what was let go.

    ``held_device_bytes`` were not: memory of captured graphs and workspaces, which a frozen process carries along.
    """

    unmapped_bytes: int = Field(ge=0)
    drained_requests: int = Field(ge=0)
    held_device_bytes: int = Field(default=0, ge=0)
    seconds: float


class PackSource(StrEnum):
    """Where ``wake`` takes model bytes from.

    ``none`` is the negative control: allocations are remapped as zeros and nothing is read. A worker
    woken this way must fail its acceptance, which proves that the acceptance check can fail.
    """

    NATIVE = "native"
    RECOVERY = "recovery"
    NONE = "none"


class WakeBody(_Record):
    """``wake``: remap the allocations at their addresses and fill every byte of them.

    ``native``: model extents from ``pack`` (an admitted object), residual extents from ``residual``. ``staged_pack`` is
    a copy of the pack in memory: read instead of it while its record vouches for it, and passed by otherwise.
    ``recovery``: model extents from the safetensors files under ``model_path``.
    The manifests and the residual are the verified copies of this operation's capsule.
    ``materialize`` says whether a recovery also writes the pack ``pack_sha256`` into the store below ``state_root``:
    not, in the background once the service is ready, or before the reply.
    """

    source: PackSource
    native_manifest: str
    recovery_manifest: str
    pack: str | None = None
    pack_sha256: Digest | None = None
    pack_bytes: int | None = None
    staged_pack: str | None = None
    residual: str | None = None
    residual_sha256: Digest | None = None
    model_path: str | None = None
    state_root: str | None = None
    num_threads: int = Field(default=0, ge=0, description="0: one per core")
    transfer_path: TransferPath = TransferPath.AUTO
    materialize: Materialize = Materialize.OFF


class MaterializationState(StrEnum):
    """Where the writing of a pack from resident model bytes is.

    ``idle``: nobody asked for one. ``waiting``: it begins when the service has answered and has nothing to do.
    """

    IDLE = "idle"
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Materialization(_Record):
    """The state of the last one, and why. ``shared``: the store held the pack already, and nothing was written."""

    state: MaterializationState
    reason: str
    pack_sha256: Digest | None = None
    done_bytes: int = Field(default=0, ge=0)
    total_bytes: int = Field(default=0, ge=0)
    shared: bool = False
    seconds: float | None = None


class WakeReport(_Record):
    """Reply to ``wake``. ``transfer_path`` names the I/O path used per file, with the reason."""

    source: PackSource
    model_bytes: int = Field(ge=0)
    residual_bytes: int = Field(ge=0)
    seconds: dict[str, float]
    transfer_path: dict[str, str]
    materialization: Materialization | None = None


class PlaceBody(_Record):
    """``place``: a template becomes a worker on this very host.

    ``environment`` is set before a device is touched. Without ``wake`` the model is loaded from the checkpoint, as in
    any start. With it the model is built from its configuration and the checkpoint's metadata alone, wherever its
    allocations land, and every byte comes as ``wake`` says.
    """

    environment: dict[EnvironmentName, Text] = Field(default_factory=dict)
    wake: WakeBody | None = None


class Placed(_Record):
    """Reply to ``place``; ``wake`` is None when the model was loaded."""

    seconds: dict[str, float]
    wake: WakeReport | None = None


class MaterializeBody(_Record):
    """``materialize``: write the pack of ``native_manifest`` from this worker's memory into the store, and prove it.

    ``pack_sha256`` and ``pack_bytes`` are the artifact's; bytes that are not those leave no file.
    """

    state_root: str
    native_manifest: str
    pack_sha256: Digest
    pack_bytes: int = Field(ge=1)


class Materialized(_Record):
    """Reply to ``materialize``. ``shared`` says that the store already held this pack."""

    pack: ExportedFile
    shared: bool
    seconds: float


class WorkerStatus(_Record):
    """Reply to ``status``; ``error`` is set in state ``failed``."""

    worker: str
    unit: str
    rank: int
    pid: int
    state: WorkerState
    engine: str
    engine_versions: dict[str, str]
    host: str | None
    port: int | None
    in_flight: int = Field(ge=0)
    mapped_bytes: int = Field(ge=0)
    error: ErrorFrame | None = None
    loaded_seconds: float | None = None
    materialization: Materialization | None = None
