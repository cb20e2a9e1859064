"""The content-addressed store: ``model-payloads/sha256/<hex>.pack``, each written once and never edited.

A pack gets its name in this order, under the lock of its digest: bytes in a temporary file, digest compared,
fsync of the file, rename, fsync of the folder, validation record. A crash before the rename leaves a
temporary file that nothing takes for a pack; a crash after it leaves a whole pack without a record, which
the next admission proves in full.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.points import reached
from coldsnap.core.validation import Evidence
from coldsnap.errors import PayloadRejected, UnsafePath
from coldsnap.store.admission import AdmittedFile, admit_file, record_path, remember
from coldsnap.store.faults import translated
from coldsnap.store.locks import hold
from coldsnap.store.meter import Meter
from coldsnap.store.proof import digest_of_file
from coldsnap.store.staging import StagedFile, stage_file, sync_folder
from coldsnap.store.stateroot import StateRoot

__all__ = ["LOCK_DEADLINE_S", "PACK_SUFFIX", "WRITER_LOCK_SUFFIX", "AdmittedFile", "PayloadStore", "admit_file"]

PACK_SUFFIX = ".pack"
WRITER_LOCK_SUFFIX = ".writer.lock"
LOCK_DEADLINE_S = 3600.0  # another process may be writing or proving hundreds of gigabytes
_PACK_MODE = 0o400


class PayloadStore:
    """The packs of one state root. Any number of processes and threads may use it at a time."""

    def __init__(self, state_root: StateRoot) -> None:
        self.state_root = state_root

    def path(self, digest: Digest) -> Path:
        """Where the pack of this digest is or would be. Nothing else has a say in it."""
        return self.state_root.payloads / f"{digest.hex}{PACK_SUFFIX}"

    def exists(self, digest: Digest) -> bool:
        """Whether there is something at the pack's path; only :meth:`admit` says that it is the pack."""
        return os.path.lexists(self.path(digest))

    @contextmanager
    def lock(self, digest: Digest, *, deadline_s: float = LOCK_DEADLINE_S) -> Iterator[None]:
        """Hold this digest on this host. Raises ResourceBusy after ``deadline_s`` seconds. Not reentrant."""
        self.state_root.check(self.state_root.locks)
        purpose = f"work on the pack {digest}"
        with hold(self.lock_path(digest), deadline_s=deadline_s, purpose=purpose):
            yield

    def lock_path(self, digest: Digest) -> Path:
        """The file that :meth:`lock` locks."""
        return self.state_root.locks / f"{digest.hex}.lock"

    @contextmanager
    def writing(self, digest: Digest, *, deadline_s: float = LOCK_DEADLINE_S) -> Iterator[None]:
        """Be the one on this host who writes the pack of this known digest. Raises ResourceBusy after ``deadline_s``.

        It keeps the others from doing the same work and is not :meth:`lock`, which is held only around the rename: a
        capture that finds out its digest by writing never waits for a slow writer.
        """
        self.state_root.check(self.state_root.locks)
        path = self.state_root.locks / f"{digest.hex}{WRITER_LOCK_SUFFIX}"
        with hold(path, deadline_s=deadline_s, purpose=f"writing the pack {digest}"):
            yield

    @contextmanager
    def stage(self, expected_bytes: int) -> Iterator[StagedFile]:
        """An empty temporary file with ``expected_bytes`` reserved; removed at the end unless it was committed.

        Raises OutOfSpace, with nothing left behind, when the bytes do not fit.
        """
        self.state_root.check(self.state_root.staging)
        with stage_file(self.state_root.staging, expected_bytes, stem="pack") as staged:
            yield staged

    def commit(self, staged: StagedFile, digest: Digest, *, written: Digest | None = None) -> Path:
        """Make a staged file the pack of ``digest``, durably, unless a proved one is there already, which wins.

        ``written`` is the digest of the bytes as their writer counted them while writing; without it the file is read
        back. Raises PayloadRejected when the digest or size is another; the staged file is gone then.
        A damaged object at the path is moved to the quarantine.
        """
        with self.lock(digest):
            return self.commit_locked(staged, digest, written=written)[0]

    def commit_locked(self, staged: StagedFile, digest: Digest, *, written: Digest | None = None) -> tuple[Path, bool]:
        """:meth:`commit` for who already holds the digest's lock. Also says whether the pack was there already."""
        path = self.path(digest)
        self.state_root.check(self.state_root.payloads)
        with translated("read back", staged.path):
            size_bytes = os.fstat(staged.fd).st_size
            if size_bytes != staged.expected_bytes:
                _discard(staged)
                message = f"{size_bytes} bytes were written for {digest}, not the {staged.expected_bytes} announced"
                raise PayloadRejected("size_mismatch", message, cure="start again")
            meter = Meter(None, None, undone="nothing was committed")
            found = written or digest_of_file(staged.fd, size_bytes, meter)
        if found != digest:
            _discard(staged)
            message = f"the bytes written have the digest {found}, not {digest}; they were thrown away"
            raise PayloadRejected("digest_mismatch", message, cure="fetch or write the pack again")
        if self._holds(digest, size_bytes):
            _discard(staged)
            return path, True
        with translated("commit", path):
            os.fchmod(staged.fd, _PACK_MODE)
            os.fsync(staged.fd)
            reached("pack.synced")
            staged.path.rename(path)
        reached("pack.named")
        sync_folder(self.state_root.payloads)
        remember(path, staged.fd, digest, Evidence.FULL_SHA256, provider="native")
        reached("pack.recorded")
        return path, False

    @contextmanager
    def admit(
        self,
        digest: Digest,
        size_bytes: int,
        *,
        extents: Sequence[tuple[int, int, Digest]] | None = None,
        num_threads: int = 0,
        progress: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        deadline_s: float = LOCK_DEADLINE_S,
        provider: str = "native",
    ) -> Iterator[AdmittedFile]:
        """The proved pack, open for reading. See :func:`coldsnap.store.admission.admit_file`."""
        self.state_root.check(self.state_root.payloads)
        with admit_file(
            self.path(digest),
            digest,
            size_bytes,
            extents=extents,
            num_threads=num_threads,
            progress=progress,
            cancel=cancel,
            provider=provider,
            turn=self.lock(digest, deadline_s=deadline_s),
        ) as admitted:
            yield admitted

    def set_aside(self, digest: Digest, size_bytes: int) -> Path | None:
        """Move a damaged object away from its name, into the quarantine; returns where it is now.

        Only what a proof under the digest's lock finds to be other bytes is moved, so that no read error and no good
        object that took the name meanwhile is. None, and nothing changed, otherwise.
        """
        with self.lock(digest):
            path = self.path(digest)
            if not self.exists(digest):
                return None
            try:
                with admit_file(path, digest, size_bytes, record=False):
                    return None
            except PayloadRejected as error:
                if error.reason not in ("size_mismatch", "digest_mismatch"):
                    return None
            aside = self._quarantine(digest)
            if aside is None:
                return None
            with translated("set aside", path):
                record_path(path).unlink(missing_ok=True)
                path.unlink()
            sync_folder(self.state_root.payloads)
            return aside

    def _holds(self, digest: Digest, size_bytes: int) -> bool:
        """Whether the pack is there and proved. A damaged one is put into the quarantine, keeping its name free."""
        if not self.exists(digest):
            return False
        try:
            with admit_file(self.path(digest), digest, size_bytes):
                return True
        except PayloadRejected:
            self._quarantine(digest)
            return False

    def _quarantine(self, digest: Digest) -> Path | None:
        path = self.path(digest)
        if path.is_dir() and not path.is_symlink():
            message = f"{path} is a folder where a pack should be"
            raise UnsafePath(message, cure="move it away", facts={"path": str(path)})
        with translated("set aside", path):
            for number in range(1000):
                aside = self.state_root.quarantine / f"{path.name}.{number}"
                with suppress(FileExistsError):
                    # the damaged object keeps its own name until the good one takes it
                    os.link(path, aside, follow_symlinks=False)
                    return aside
        return None


def _discard(staged: StagedFile) -> None:
    with translated("remove", staged.path):
        staged.path.unlink()
