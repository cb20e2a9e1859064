"""A worker's manifests without restoring anything: from the prepared folder, else straight out of the capsule.

Whatever place they come from, they are proved by the digest that the artifact binds; so a prepared folder need not
be believed, and a damaged copy there only sends the reader to the capsule. For the same reason the state root is a mere
path here: it may be somebody else's, read-only, or a copy of two of its folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from coldsnap.capsule.member import FilePlace, find_members, read_member
from coldsnap.capsule.opened import open_capsule
from coldsnap.core.digest import Digest
from coldsnap.core.manifest import MANIFEST_LIMIT_BYTES
from coldsnap.errors import HostError, IntegrityError, PayloadRejected
from coldsnap.ops.artifacts import LoadedArtifact

__all__ = ["ManifestShelf"]

PREPARED, CAPSULES = "prepared", "capsules"


class ManifestShelf:
    """The manifests of one artifact in one state root. Nothing is opened before it is asked for."""

    def __init__(self, state_root: Path, loaded: LoadedArtifact) -> None:
        self._root = state_root
        self._loaded = loaded
        self._members: dict[Digest, Mapping[str, FilePlace]] = {}
        self._units = {worker.id: worker.unit for worker in loaded.artifact.launch.execution.workers}

    def places(self, worker: str, role: str) -> Iterator[FilePlace]:
        """Where the manifest of ``role`` may be read, the quickest first; none when this machine does not have it.

        Raises IntegrityError when the artifact names none or the capsule's is another, PayloadRejected or
        InvalidDocument for a damaged capsule.
        """
        entry = self._loaded.worker_object(worker, role)
        if entry is None:
            raise IntegrityError(
                f"the artifact names no {role} for worker {worker}",
                cure="it was not written by this version of coldsnap: capture again",
                facts={"worker": worker, "role": role},
            )
        capsule = self._loaded.capsule_digest(self._units[worker])
        prepared = self._root / PREPARED / capsule.hex / entry.path
        if prepared.is_file():
            yield FilePlace.plain(prepared, name=entry.path, size=entry.bytes, sha256=entry.sha256)
        found = self._in_capsule(capsule).get(entry.path)
        if found is not None and (found.bytes, found.sha256) != (entry.bytes, entry.sha256):
            raise IntegrityError(
                f"{entry.path} of capsule {capsule} is {found.sha256}, and the artifact says {entry.sha256}",
                cure="the artifact and the capsule do not belong together; fetch both again",
                facts={"worker": worker, "role": role},
            )
        if found is not None:
            yield found

    def first_place(self, worker: str, role: str) -> FilePlace:
        """The quickest of ``places``, not looked into yet. Raises HostError when there is none."""
        for place in self.places(worker, role):
            return place
        raise self._missing(worker)

    def read(self, worker: str, role: str) -> bytes:
        """The manifest of ``role``, proved. Raises HostError when it is nowhere here, PayloadRejected when damaged."""
        damaged: PayloadRejected | None = None
        for place in self.places(worker, role):
            try:
                return read_member(place, limit_bytes=MANIFEST_LIMIT_BYTES)
            except PayloadRejected as error:
                damaged = error
        raise damaged or self._missing(worker)

    def _missing(self, worker: str) -> HostError:
        capsule = self._loaded.capsule_digest(self._units[worker])
        return HostError(
            f"the capsule {capsule} of worker {worker} is not in {self._root}",
            cure=f"copy its image layout to {self._root / CAPSULES / capsule.hex}, or name another --state-root",
            facts={"worker": worker, "capsule": str(capsule)},
        )

    def _in_capsule(self, digest: Digest) -> Mapping[str, FilePlace]:
        if digest not in self._members:
            folder = self._root / CAPSULES / digest.hex
            self._members[digest] = find_members(folder, open_capsule(folder, digest)) if folder.is_dir() else {}
        return self._members[digest]
