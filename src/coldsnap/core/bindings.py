"""What coldsnap adds to an artifact beyond the format: typed views of ``runtime.bindings``.

A binding is any JSON object with a ``kind``. Kinds of others pass through untouched; a kind of ours is checked when
the artifact is parsed and read through the functions here, never by key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal, TypeVar

from pydantic import Field

from coldsnap.core.digest import Digest
from coldsnap.core.execution import repeated
from coldsnap.core.launch import Runtime
from coldsnap.core.names import AbsolutePath, Choice, Count, Id, Items, Line, RelativePath, Table
from coldsnap.core.parsing import Record, at, check_part, parsed, rule
from coldsnap.core.paths import show
from coldsnap.errors import InvalidDocument, Problem

__all__ = [
    "OWN_BINDINGS",
    "AcceptanceAnswer",
    "AcceptanceBinding",
    "Binding",
    "ContainerBinding",
    "CpuBinding",
    "CudaHolder",
    "CudaStateBinding",
    "FallbackBinding",
    "HostFile",
    "HostFilesBinding",
    "HygieneBinding",
    "HygieneFinding",
    "ProcessImage",
    "ProcessImagesBinding",
    "ServiceBinding",
    "Severity",
    "WorkerExportBinding",
    "acceptance_of",
    "binding_problems",
    "cold_start_of",
    "containers_of",
    "cpu_of",
    "cuda_states_of",
    "host_files_of",
    "hygiene_of",
    "process_images_of",
    "runtime_said",
    "service_name_of",
    "staging_of",
    "worker_exports_of",
]

Binding = Mapping[str, Any]


class Severity(StrEnum):
    """How much a hygiene finding matters: it stops the capture, warns, or informs."""

    STOP = "stop"
    WARN = "warn"
    INFO = "info"


class ProcessImage(Record):
    """A process-image file of a capsule, unpacked."""

    path: RelativePath
    bytes: Count
    sha256: Digest


class ProcessImagesBinding(Record):
    """The identity of every process-image file of one unit."""

    kind: Literal["coldsnap-process-images"] = "coldsnap-process-images"
    unit: Id
    files: Items[ProcessImage]

    @rule
    def _paths_once(self) -> Iterator[Problem]:
        yield from _paths_once(self.files)


class AcceptanceAnswer(Record):
    """A prompt of the capture and the exact answer that every restore must give."""

    prompt: str
    max_tokens: int = Field(ge=1, le=4096)
    token_ids: Items[Count]
    text: str


class AcceptanceBinding(Record):
    """The acceptance record of a capture."""

    kind: Literal["coldsnap-acceptance"] = "coldsnap-acceptance"
    answers: Items[AcceptanceAnswer]


class HygieneFinding(Record):
    """One thing that hygiene found in a process tree or its image. Secrets are named, never shown."""

    kind: Line
    severity: Choice[Severity]
    subject: str
    message: str
    cure: str = ""


class HygieneBinding(Record):
    """The hygiene report of one unit. ``allowed_secrets`` are in the image because the recipe said so."""

    kind: Literal["coldsnap-hygiene"] = "coldsnap-hygiene"
    unit: Id
    findings: Items[HygieneFinding]
    allowed_secrets: Items[Line]
    publishable: bool

    @rule
    def _secrets_are_not_publishable(self) -> Iterator[Problem]:
        if self.publishable and self.allowed_secrets:
            yield Problem(
                field="publishable",
                message="is true for an image that holds allowed secrets",
                value=f"true, with {', '.join(self.allowed_secrets[:4])}",
                cure="write false",
            )


class WorkerExportBinding(Record):
    """How a worker's preserved bytes were divided. ``residual_reasons``: reason -> bytes kept out of the pack."""

    kind: Literal["coldsnap-worker-export"] = "coldsnap-worker-export"
    worker: Id
    model_bytes: Count
    residual_bytes: Count
    residual_reasons: Table[str, Count] = Field(default_factory=dict)
    num_model_extents: Count | None = None
    pack_shared: bool | None = None


class HostFile(Record):
    """A file of the host that the process tree maps and a destination must also have."""

    path: AbsolutePath
    bytes: Count
    sha256: Digest | None = None


class HostFilesBinding(Record):
    """The host files that one unit's processes map."""

    kind: Literal["coldsnap-host-files"] = "coldsnap-host-files"
    unit: Id
    files: Items[HostFile]

    @rule
    def _paths_once(self) -> Iterator[Problem]:
        yield from _paths_once(self.files)


class CpuBinding(Record):
    """The CPU features that one unit's processes may have chosen code by."""

    kind: Literal["coldsnap-cpu"] = "coldsnap-cpu"
    unit: Id
    flags: Items[Line]


class CudaHolder(Record):
    """A process that had CUDA state. ``pid`` as its unit sees it, before and after; ``command`` is for people."""

    pid: int = Field(gt=0)
    command: str


class CudaStateBinding(Record):
    """The CUDA state that is inside one unit's processes: who has it, and the UUID of the device in each slot."""

    kind: Literal["coldsnap-cuda-state"] = "coldsnap-cuda-state"
    unit: Id
    devices: Items[Line]
    holders: Items[CudaHolder]

    @rule
    def _holders_once(self) -> Iterator[Problem]:
        for index, pid in repeated((i, holder.pid) for i, holder in parsed(self.holders, "pid")):
            yield Problem(
                field=f"holders[{index}].pid", message="stands twice", value=str(pid), cure="name each process once"
            )


class ServiceBinding(Record):
    """What a restored service is called unless its caller says otherwise."""

    kind: Literal["coldsnap-service"] = "coldsnap-service"
    name: Id


class FallbackBinding(Record):
    """What the recipe allows when no restore succeeds."""

    kind: Literal["coldsnap-fallback"] = "coldsnap-fallback"
    cold_start: bool


class StagingBinding(Record):
    """Whether the recipe wants packs copied into memory before they are read."""

    kind: Literal["coldsnap-staging"] = "coldsnap-staging"
    stage: bool


class ContainerBinding(Record):
    """Which runtime made the container that a unit was captured in."""

    kind: Literal["coldsnap-container"] = "coldsnap-container"
    unit: Id
    runtime: Choice[Runtime]


OWN_BINDINGS: Mapping[str, type[Record]] = {
    "coldsnap-process-images": ProcessImagesBinding,
    "coldsnap-acceptance": AcceptanceBinding,
    "coldsnap-hygiene": HygieneBinding,
    "coldsnap-worker-export": WorkerExportBinding,
    "coldsnap-host-files": HostFilesBinding,
    "coldsnap-cpu": CpuBinding,
    "coldsnap-cuda-state": CudaStateBinding,
    "coldsnap-service": ServiceBinding,
    "coldsnap-fallback": FallbackBinding,
    "coldsnap-staging": StagingBinding,
    "coldsnap-container": ContainerBinding,
}
_SUBJECT = "runtime.bindings"
B = TypeVar("B", bound=Record)


def process_images_of(bindings: Iterable[Binding]) -> tuple[ProcessImagesBinding, ...]:
    """One record a unit, in document order. Raises InvalidDocument, as all functions here, for a broken binding."""
    return _of(bindings, "coldsnap-process-images", ProcessImagesBinding)


def acceptance_of(bindings: Iterable[Binding]) -> AcceptanceBinding | None:
    """The acceptance record, or None for an artifact that carries none."""
    return next(iter(_of(bindings, "coldsnap-acceptance", AcceptanceBinding)), None)


def hygiene_of(bindings: Iterable[Binding]) -> tuple[HygieneBinding, ...]:
    """One report a unit."""
    return _of(bindings, "coldsnap-hygiene", HygieneBinding)


def worker_exports_of(bindings: Iterable[Binding]) -> tuple[WorkerExportBinding, ...]:
    """One record a worker."""
    return _of(bindings, "coldsnap-worker-export", WorkerExportBinding)


def host_files_of(bindings: Iterable[Binding]) -> tuple[HostFilesBinding, ...]:
    """One record a unit."""
    return _of(bindings, "coldsnap-host-files", HostFilesBinding)


def cpu_of(bindings: Iterable[Binding]) -> tuple[CpuBinding, ...]:
    """One record a unit."""
    return _of(bindings, "coldsnap-cpu", CpuBinding)


def cuda_states_of(bindings: Iterable[Binding]) -> tuple[CudaStateBinding, ...]:
    """One record a unit, of a driver that keeps CUDA state."""
    return _of(bindings, "coldsnap-cuda-state", CudaStateBinding)


def service_name_of(bindings: Iterable[Binding]) -> str | None:
    """The captured service's name, or None for an artifact that carries none."""
    found = _of(bindings, "coldsnap-service", ServiceBinding)
    return found[0].name if found else None


def cold_start_of(bindings: Iterable[Binding]) -> bool:
    """Whether the captured recipe allows a cold start when no restore succeeds."""
    return any(one.cold_start for one in _of(bindings, "coldsnap-fallback", FallbackBinding))


def staging_of(bindings: Iterable[Binding]) -> bool:
    """Whether the captured recipe wants packs copied into memory before they are read."""
    return any(one.stage for one in _of(bindings, "coldsnap-staging", StagingBinding))


def containers_of(bindings: Iterable[Binding]) -> dict[str, Runtime]:
    """Unit -> the runtime of its container; units on coldsnap's own are left out."""
    return {one.unit: one.runtime for one in _of(bindings, "coldsnap-container", ContainerBinding)}


def runtime_said(bindings: Iterable[Binding]) -> dict[str, str]:
    """The captured runtime as a request's extension says it; nothing for coldsnap's own namespaces."""
    return next(({"runtime": one.value} for one in containers_of(bindings).values()), {})


def binding_problems(bindings: Iterable[Binding], *, units: set[str], workers: set[str]) -> Iterator[Problem]:
    """Everything wrong with the bindings of an artifact with these units and workers; paths begin with an index.

    Of each kind of ours there is at most one for a unit or worker, and one acceptance record.
    """
    seen: set[tuple[str, Any]] = set()
    for index, binding in enumerate(bindings):
        kind = binding.get("kind")
        if not isinstance(kind, str) or kind not in OWN_BINDINGS:
            continue
        try:
            check_part(OWN_BINDINGS[kind], binding, subject=_SUBJECT)
        except InvalidDocument as error:
            yield from (at(f"[{index}]", problem) for problem in error.problems)
        name = "worker" if kind == "coldsnap-worker-export" else "unit"
        subject = binding.get(name)
        known = workers if name == "worker" else units
        if isinstance(subject, str) and subject not in known:
            yield Problem(
                field=f"[{index}].{name}",
                message=f"names no {name} of the launch",
                value=show(subject),
                cure=f"name one of its {name}s",
            )
        if isinstance(subject, str | None):
            if (kind, subject) in seen:
                yield Problem(
                    field=f"[{index}].kind",
                    message=f"stands twice for {subject}" if subject else "stands twice",
                    value=show(kind),
                    cure="keep one of them",
                )
            seen.add((kind, subject))


def _of(bindings: Iterable[Binding], kind: str, model: type[B]) -> tuple[B, ...]:
    return tuple(
        check_part(model, binding, subject=f"{_SUBJECT} of kind {kind}")
        for binding in bindings
        if binding.get("kind") == kind
    )


def _paths_once(files: Iterable[ProcessImage | HostFile]) -> Iterator[Problem]:
    for index, path in repeated((i, file.path) for i, file in parsed(files, "path")):
        yield Problem(
            field=f"files[{index}].path",
            message="is the path of an earlier file",
            value=show(path),
            cure="name each file once",
        )
