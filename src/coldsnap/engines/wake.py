"""`wake`: every byte of a worker's memory comes back, from a pack or from the checkpoint, or is left zero.

Before a page is mapped, the manifest's allocations are compared with this process's own, and files are opened
and proved. In a process whose model was built again elsewhere, a `Relocation` first gives the manifest its addresses.
A pack and a residual are admitted whole, or by a validation record of that very file, which a first proof leaves. A
checkpoint is bound by its pinned identity, and each extent is verified against the capture's digest as it arrives
(`recovery`).
Whoever calls this unmaps when it raises; then it can be called again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TypeVar

from coldsnap.core.digest import Digest
from coldsnap.core.extents import Allocation, ResidualExtent
from coldsnap.core.manifest import (
    MANIFEST_LIMIT_BYTES,
    Blob,
    ModelSource,
    NativeManifest,
    RecoveryManifest,
    parse_native_manifest,
    parse_recovery_manifest,
)
from coldsnap.core.messages import PackSource, WakeBody, WakeReport
from coldsnap.core.points import reached
from coldsnap.engines.control import Call
from coldsnap.engines.materialize import allocation_problems
from coldsnap.engines.recovery import OpenFiles, check_checkpoint, check_identity, open_checkpoint, replay
from coldsnap.engines.relocation import Relocation
from coldsnap.engines.safetensors import SafetensorsFile
from coldsnap.engines.timing import timed
from coldsnap.errors import IntegrityError, Refused, UsageError
from coldsnap.hydrate.memory import DeviceMemory, StableMemory
from coldsnap.hydrate.transfer import ProvedSource, Segment, Source, TransferPath, hydrate_file
from coldsnap.store.admission import AdmittedFile, admit_file, is_proved
from coldsnap.store.documents import read_private
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.stateroot import StateRoot

__all__ = ["fill_memory"]

T = TypeVar("T")


def fill_memory(
    body: WakeBody,
    *,
    memory: StableMemory,
    call: Call,
    started_with: ModelSource,
    known: Sequence[SafetensorsFile] = (),
    relocation: Relocation | None = None,
) -> WakeReport:
    """Remap `memory` and fill it as `body` says.

    `started_with` is the pinned model of this process, `known` its headers as they were at capture, if they are.
    `relocation` says where everything is in a process whose allocations are not the captured ones.
    Raises Refused naming every allocation that the manifest and this process see differently, PayloadRejected
    or IntegrityError for bytes that are not the captured ones, UsageError for a body that lacks something,
    ResourceBusy when an address is taken, OperationInterrupted when the caller went away.
    """
    return _Wake(body, memory, call, started_with, known, relocation).run()


class _Wake:
    def __init__(
        self,
        body: WakeBody,
        memory: StableMemory,
        call: Call,
        started_with: ModelSource,
        known: Sequence[SafetensorsFile],
        relocation: Relocation | None,
    ) -> None:
        self._relocation = relocation
        self._started_with = started_with
        self._known = known
        self._body = body
        self._memory = memory
        self._call = call
        self._seconds: dict[str, float] = {}
        self._paths: dict[str, str] = {}
        self._zeroed = False

    def run(self) -> WakeReport:
        try:
            model_bytes, residual_bytes = self._fill()
        finally:
            if isinstance(self._memory, DeviceMemory):
                with timed(self._seconds, "trim"):
                    self._memory.trim()  # kept from the pack for the residual
        return WakeReport(
            source=self._body.source,
            model_bytes=model_bytes,
            residual_bytes=residual_bytes,
            seconds=self._seconds,
            transfer_path=self._paths,
        )

    def _fill(self) -> tuple[int, int]:
        """Everything; the bytes of the model, and of the residual."""
        model_bytes = residual_bytes = 0
        if self._body.source is PackSource.NATIVE:
            native = self._manifest(self._body.native_manifest, parse_native_manifest)
            if self._relocation is not None:
                native = self._relocation.native(native)
            self._check_allocations(native.entries)
            with ExitStack() as files:
                pack = self._admit_pack(files, native)
                residual = self._admit_residual(files, native.residual)
                self._remap()
                model_bytes = self._native(pack, native)
                residual_bytes = self._residual(residual, native.residual_extents)
        elif self._body.source is PackSource.RECOVERY:
            recovery = self._manifest(self._body.recovery_manifest, parse_recovery_manifest)
            if self._relocation is not None:
                recovery = self._relocation.recovery(recovery)
            self._check_allocations(recovery.entries)
            check_identity(recovery.model_source, self._started_with)
            with ExitStack() as files:
                with timed(self._seconds, "open_checkpoint"):
                    check_checkpoint(recovery, self._folder(), known=self._known)
                    sources = open_checkpoint(files, recovery, self._folder())
                residual = self._admit_residual(files, recovery.residual)
                self._remap()
                model_bytes = self._recover(sources, recovery)
                residual_bytes = self._residual(residual, recovery.residual_extents)
        else:
            self._remap()
        return model_bytes, residual_bytes

    def _manifest(self, path: str, parse: Callable[[bytes], T]) -> T:
        with timed(self._seconds, "manifest_read"):
            data = read_private(Path(path), MANIFEST_LIMIT_BYTES)
        with timed(self._seconds, "manifest_parse"):
            return parse(data)

    def _check_allocations(self, wanted: Sequence[Allocation]) -> None:
        if problems := allocation_problems(self._memory.allocations, wanted):
            raise Refused("wake", problems)

    def _folder(self) -> Path:
        return Path(_given(self._body.model_path, "model_path"))

    def _admit_pack(self, files: ExitStack, manifest: NativeManifest) -> AdmittedFile | None:
        if manifest.model_weights is None:
            return None
        path = Path(_given(self._body.pack, "pack"))
        digest = _given(self._body.pack_sha256, "pack_sha256")
        if digest != manifest.model_weights.sha256:
            raise IntegrityError(
                f"the pack to wake from is {digest}, and this worker's is {manifest.model_weights.sha256}",
                cure="use the pack that the artifact names for this worker",
                facts={"given": str(digest), "expected": str(manifest.model_weights.sha256)},
            )
        size_bytes = manifest.model_weights.bytes
        extents = [(one.offset, one.size, one.sha256) for one in manifest.model_weight_extents]
        advance, cancel = self._call.phase("admit", size_bytes), self._call.cancelled
        with timed(self._seconds, "admit"):
            if (staged := self._staged_copy(digest, size_bytes)) is not None:
                return files.enter_context(staged)
            if self._body.state_root is not None:
                store = PayloadStore(StateRoot.open(Path(self._body.state_root), create=False))
                if store.path(digest) == path:
                    admitted = store.admit(
                        digest,
                        size_bytes,
                        extents=extents,
                        num_threads=self._body.num_threads,
                        progress=advance,
                        cancel=cancel,
                    )
                    return files.enter_context(admitted)
            return files.enter_context(
                admit_file(
                    path,
                    digest,
                    size_bytes,
                    extents=extents,
                    num_threads=self._body.num_threads,
                    progress=advance,
                    cancel=cancel,
                )
            )

    def _staged_copy(self, digest: Digest, size_bytes: int) -> AbstractContextManager[AdmittedFile] | None:
        """The copy of the pack in memory, if its record vouches for it."""
        if self._body.staged_pack is None:
            return None
        path = Path(self._body.staged_pack)
        return admit_file(path, digest, size_bytes) if is_proved(path, digest, size_bytes) else None

    def _admit_residual(self, files: ExitStack, blob: Blob | None) -> AdmittedFile | None:
        if blob is None:
            return None
        path = Path(_given(self._body.residual, "residual"))
        digest = _given(self._body.residual_sha256, "residual_sha256")
        if digest != blob.sha256:
            raise IntegrityError(
                f"the residual to wake from is {digest}, and this capture's is {blob.sha256}",
                cure="use the residual of this very capture",
                facts={"given": str(digest), "expected": str(blob.sha256)},
            )
        with timed(self._seconds, "admit_residual"):
            return files.enter_context(admit_file(path, digest, blob.bytes, cancel=self._call.cancelled))

    def _remap(self) -> None:
        reached("worker.admitted")
        with timed(self._seconds, "remap"):
            asleep = not self._memory.mapped
            self._memory.remap()
        self._zeroed = asleep  # memory that was mapped before keeps its bytes
        reached("worker.mapped")

    def _native(self, pack: AdmittedFile | None, manifest: NativeManifest) -> int:
        if pack is None:
            return 0
        segments = [
            Segment(ptr=one.ptr, size=one.size, file_offset=one.offset, sha256=one.sha256)
            for one in manifest.model_weight_extents
        ]
        count = self._transfer("pack", _proved(pack), segments)
        if str(pack.path) == self._body.staged_pack:
            self._paths["pack"] += ", out of the copy in memory"
        return count

    def _recover(self, sources: OpenFiles, manifest: RecoveryManifest) -> int:
        return replay(manifest, sources, self._folder(), self._transfer)

    def _residual(self, residual: AdmittedFile | None, extents: Sequence[ResidualExtent]) -> int:
        reached("worker.model")
        if residual is None:
            return 0
        segments = [Segment(ptr=one.ptr, size=one.size, file_offset=one.offset) for one in extents]
        return self._transfer("residual", _proved(residual), segments)

    def _transfer(self, name: str, source: Source, segments: Sequence[Segment]) -> int:
        with timed(self._seconds, name):
            report = hydrate_file(
                source,
                segments,
                self._memory,
                num_threads=self._body.num_threads,
                path=None if self._body.transfer_path == "auto" else TransferPath(self._body.transfer_path),
                progress=self._call.phase(name, sum(segment.size for segment in segments)),
                cancel=self._call.cancelled,
                zeroed=self._zeroed,
            )
        holes = f", {report.hole_bytes} bytes were left zero" if report.hole_bytes else ""
        self._paths[name] = f"{report.path}: {report.reason}{holes}"
        return report.bytes


def _proved(file: AdmittedFile) -> ProvedSource:
    return ProvedSource(fd=file.fd, bytes=file.bytes, evidence=str(file.evidence))


def _given(value: T | None, name: str) -> T:
    if value is None:
        raise UsageError(f"wake needs {name!r} for this source", cure="give it in the body")
    return value
