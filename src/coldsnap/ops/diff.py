"""What differs between two captures, by meaning, and which bytes they share. Needs neither root nor a GPU.

The descriptors alone answer most of it, because they name every file by digest. Extent manifests are the large part
(megabytes a worker), so they come last and only where they must:

1. manifests of a worker with equal digests are equal and are not opened;
2. manifests that differ in the capture's id alone (two captures of one state) are compared as bytes, not parsed;
3. only what is left is parsed, and what changed is named by tensor.

Manifests come from the prepared folder or straight out of the capsule. On a machine that has neither, everything
else is still said, and the worker's state is ``unknown`` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from coldsnap.core.artifact import SnapshotArtifact
from coldsnap.core.artifactdiff import Section, compare_artifacts
from coldsnap.core.bindings import process_images_of
from coldsnap.core.digest import Digest
from coldsnap.core.extentdiff import MemoryDifference, compare_memory, memory_of, same_but_capture
from coldsnap.core.manifest import parse_native_manifest, parse_recovery_manifest
from coldsnap.errors import ColdsnapError, InvalidDocument, PayloadRejected
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.ops.manifests import ManifestShelf
from coldsnap.ops.places import NATIVE_MANIFEST, RECOVERY_MANIFEST

__all__ = ["ArtifactDifference", "SharedBytes", "WorkerDifference", "WorkerState", "compare"]


class WorkerState(StrEnum):
    """How much is known of a worker's memory on the two sides."""

    SAME_MANIFESTS = "same manifests"
    SAME_BUT_CAPTURE = "same but for the capture's id"
    SAME_BYTES = "same bytes at other addresses"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerDifference:
    """One worker that both captures have. ``memory`` is there only when manifests had to be parsed."""

    worker: str
    state: WorkerState
    reason: str
    memory: MemoryDifference | None = None

    @property
    def same(self) -> bool:
        """Whether the two memories hold the same bytes at the same addresses."""
        return self.state in (WorkerState.SAME_MANIFESTS, WorkerState.SAME_BUT_CAPTURE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBytes:
    """Bytes of the files that the captures name, each digest counted once: in both, or in one alone.

    ``stored_once_bytes`` are those of shared packs, which a state root really keeps once; files inside capsules are
    equal but stored in each.
    """

    shared_bytes: int
    only_a_bytes: int
    only_b_bytes: int
    stored_once_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactDifference:
    """The whole comparison. ``same``: nothing differs but what names the capture and where it was placed."""

    sections: tuple[Section, ...]
    workers: tuple[WorkerDifference, ...]
    bytes: SharedBytes

    @property
    def same(self) -> bool:
        """See the class."""
        return all(one.same for one in self.sections if one.counts) and all(one.same for one in self.workers)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "same": self.same,
            "sections": [_section_document(one) for one in self.sections],
            "workers": [_worker_document(one) for one in self.workers],
            "bytes": {
                "shared": self.bytes.shared_bytes,
                "only_a": self.bytes.only_a_bytes,
                "only_b": self.bytes.only_b_bytes,
                "stored_once": self.bytes.stored_once_bytes,
            },
        }


def compare(
    a: LoadedArtifact,
    b: LoadedArtifact,
    *,
    state_root: Path,
) -> ArtifactDifference:
    """Compare two captures. ``state_root`` is where manifests lie; it is looked at only when some must be read.

    Raises nothing for a manifest that is missing or damaged: its worker's state is then unknown, with the reason.
    """
    workers = _Workers(a, b, state_root)
    theirs = {worker.id for worker in b.artifact.launch.execution.workers}
    return ArtifactDifference(
        sections=compare_artifacts(a.artifact, b.artifact),
        workers=tuple(
            workers.compare(worker.id) for worker in a.artifact.launch.execution.workers if worker.id in theirs
        ),
        bytes=_shared(a.artifact, b.artifact),
    )


class _Workers:
    def __init__(self, a: LoadedArtifact, b: LoadedArtifact, state_root: Path) -> None:
        self._sides = (a, b)
        self._shelves = (ManifestShelf(state_root, a), ManifestShelf(state_root, b))

    def compare(self, worker: str) -> WorkerDifference:
        if all(self._same_digest(worker, role) for role in (NATIVE_MANIFEST, RECOVERY_MANIFEST)):
            return WorkerDifference(
                worker=worker, state=WorkerState.SAME_MANIFESTS, reason="their digests are equal; none was opened"
            )
        try:
            return self._by_manifests(worker)
        except ColdsnapError as error:
            return WorkerDifference(worker=worker, state=WorkerState.UNKNOWN, reason=str(error))

    def _by_manifests(self, worker: str) -> WorkerDifference:
        try:
            before, after = (shelf.read(worker, RECOVERY_MANIFEST) for shelf in self._shelves)
            if same_but_capture(before, after) and self._same_pack(worker):
                # A recovery manifest and the pack's digest say everything that a native manifest says.
                reason = "the manifests are equal after their capture_id; none was parsed"
                return WorkerDifference(worker=worker, state=WorkerState.SAME_BUT_CAPTURE, reason=reason)
            memory = compare_memory(*(memory_of(parse_recovery_manifest(data)) for data in (before, after)))
        except (InvalidDocument, PayloadRejected) as error:
            return self._without_names(worker, error)
        state = WorkerState.DIFFERS
        if memory.same and self._same_pack(worker):
            state = WorkerState.SAME_BUT_CAPTURE
        elif not memory.changes and memory.residual.same:
            state = WorkerState.SAME_BYTES
        return WorkerDifference(
            worker=worker, state=state, reason="compared extent by extent, from the recovery manifests", memory=memory
        )

    def _without_names(self, worker: str, error: ColdsnapError) -> WorkerDifference:
        """The native manifests say which extents differ, though not whose tensors they are."""
        before, after = (shelf.read(worker, NATIVE_MANIFEST) for shelf in self._shelves)
        memory = compare_memory(*(memory_of(parse_native_manifest(data)) for data in (before, after)))
        return WorkerDifference(
            worker=worker,
            state=WorkerState.UNKNOWN if memory.same else WorkerState.DIFFERS,
            reason=f"tensors cannot be named, because a recovery manifest cannot be read: {error.message}",
            memory=memory,
        )

    def _same_digest(self, worker: str, role: str) -> bool:
        before, after = (side.worker_object(worker, role) for side in self._sides)
        return before is not None and after is not None and before.sha256 == after.sha256

    def _same_pack(self, worker: str) -> bool:
        before, after = (side.packs().get(worker) for side in self._sides)
        return (before.sha256 if before else None) == (after.sha256 if after else None)


def _shared(a: SnapshotArtifact, b: SnapshotArtifact) -> SharedBytes:
    old, new = _contents(a), _contents(b)
    packs = _packs(a).keys() & _packs(b).keys()
    return SharedBytes(
        shared_bytes=sum(old[digest] for digest in old.keys() & new.keys()),
        only_a_bytes=sum(old[digest] for digest in old.keys() - new.keys()),
        only_b_bytes=sum(new[digest] for digest in new.keys() - old.keys()),
        stored_once_bytes=sum(old[digest] for digest in packs),
    )


def _packs(artifact: SnapshotArtifact) -> Mapping[Digest, int]:
    payloads = artifact.weights.model_payloads
    return {entry.sha256: entry.bytes for entry in payloads.objects} if payloads is not None else {}


def _contents(artifact: SnapshotArtifact) -> dict[Digest, int]:
    """Every file that the artifact names: digest -> bytes."""
    contents = dict(_packs(artifact))
    contents |= {entry.sha256: entry.bytes for entry in artifact.capsule.objects}
    for binding in process_images_of(artifact.runtime.bindings):
        contents |= {file.sha256: file.bytes for file in binding.files}
    return contents


def _section_document(section: Section) -> dict[str, Any]:
    return {
        "name": section.name,
        "same": section.same,
        "counts": section.counts,
        "detail": section.detail,
        "shared_bytes": section.shared_bytes,
        "changes": [{"field": one.field, "a": one.before, "b": one.after} for one in section.changes],
    }


def _worker_document(worker: WorkerDifference) -> dict[str, Any]:
    document: dict[str, Any] = {
        "worker": worker.worker,
        "same": worker.same,
        "state": worker.state.value,
        "reason": worker.reason,
    }
    if (memory := worker.memory) is not None:
        document |= {
            "equal_bytes": memory.equal_bytes,
            "equal_extents": memory.num_equal,
            "moved_bytes": memory.moved_bytes,
            "moved_extents": memory.num_moved,
            "same_allocations": memory.same_allocations,
            "changes": [
                {
                    "kind": one.kind.value,
                    "tensors": list(one.tensors),
                    "semantic_id": one.semantic_id,
                    "bytes_a": one.bytes_before,
                    "bytes_b": one.bytes_after,
                }
                for one in memory.changes
            ],
            "residual": {
                "same": memory.residual.same,
                "changed_bytes": memory.residual.changed_bytes,
                "changed_extents": memory.residual.num_changed,
                "only_a_bytes": memory.residual.only_before_bytes,
                "only_b_bytes": memory.residual.only_after_bytes,
            },
        }
    return document
