"""The cover proof of one worker, as a process of its own does it. Imports little, because each process pays for it."""

from __future__ import annotations

from dataclasses import dataclass

from coldsnap.capsule.member import FilePlace, read_member
from coldsnap.core.manifest import MANIFEST_LIMIT_BYTES
from coldsnap.core.workerproof import ExpectedWorker, WorkerProof, prove_worker
from coldsnap.errors import PayloadRejected

__all__ = ["CoverTask", "prove_cover"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CoverTask:
    """A worker's manifests, and what the artifact says of the worker."""

    expected: ExpectedWorker
    native: FilePlace
    recovery: FilePlace

    @property
    def bytes(self) -> int:
        """What is read."""
        return self.native.bytes + self.recovery.bytes


def prove_cover(task: CoverTask) -> WorkerProof | None:
    """The proof; None when the bytes at these places are not what they should be."""
    try:
        native, recovery = (
            read_member(place, limit_bytes=MANIFEST_LIMIT_BYTES) for place in (task.native, task.recovery)
        )
    except PayloadRejected:
        return None
    return prove_worker(native, recovery, task.expected)
