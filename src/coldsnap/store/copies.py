"""Copies of packs in memory: ``in-memory/<hex>/<hex>.pack``, each folder a file system of its own.

A copy is only ever that: the pack stays in the store, whoever reads a copy can do without it, and it is gone after a
reboot. Every byte is hashed on its way, and a validation record says so, so a reader believes it as it believes the
store's. Until the record is there, nobody takes the file for the pack. Making and removing the file system is the
caller's; this fills, looks and empties.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from coldsnap.core.digest import Digest
from coldsnap.core.validation import Evidence
from coldsnap.errors import InvalidDocument, PayloadRejected
from coldsnap.store.admission import is_proved, record_path, remember
from coldsnap.store.faults import translated
from coldsnap.store.meter import Meter
from coldsnap.store.payloads import PACK_SUFFIX
from coldsnap.store.proof import extent_faults, layout_faults
from coldsnap.store.staging import PARTIAL_SUFFIX, write_all
from coldsnap.store.stateroot import StateRoot

__all__ = ["MemoryCopies"]

_HEX64 = re.compile(r"[0-9a-f]{64}")
_COPY_MODE = 0o400


class MemoryCopies:
    """The copies of one state root."""

    def __init__(self, state_root: StateRoot) -> None:
        self._root = state_root.in_memory

    def folder(self, digest: Digest) -> Path:
        """Where the copy's own file system is, or would be."""
        return self._root / digest.hex

    def path(self, digest: Digest) -> Path:
        """Where the copy is, or would be."""
        return self.folder(digest) / f"{digest.hex}{PACK_SUFFIX}"

    def is_there(self, digest: Digest, size_bytes: int) -> bool:
        """Whether a whole copy is there, by its record. Reads no byte of it."""
        return is_proved(self.path(digest), digest, size_bytes)

    def digests(self) -> tuple[Digest, ...]:
        """Every pack that has a folder here, whatever is in it."""
        if not self._root.exists():
            return ()
        with translated("list", self._root):
            names = sorted(one.name for one in self._root.iterdir())
        return tuple(Digest.from_hex(name) for name in names if _HEX64.fullmatch(name))

    def bytes(self, digest: Digest) -> int:
        """The memory that a copy takes, whole or not."""
        return sum(one.lstat().st_blocks * 512 for one in self._files(digest) if one.exists())

    def fill(
        self,
        digest: Digest,
        size_bytes: int,
        source_fd: int,
        *,
        extents: Sequence[tuple[int, int, Digest]],
        drop_behind: bool = False,
        num_threads: int = 0,
        progress: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> Path:
        """Copy the pack open as ``source_fd`` into its folder, which exists, and prove every byte on the way.

        ``extents`` are all of the pack's (offset, size, sha256). ``drop_behind``: what was read leaves the page cache,
        so that memory does not hold it twice. One caller at a time.

        Raises PayloadRejected when the source is not the pack, OutOfSpace, OperationInterrupted; no copy is left then.
        """
        if faults := layout_faults(extents, size_bytes):
            raise InvalidDocument(f"extents of {digest}", faults)
        path = self.path(digest)
        partial = path.with_name(f"{digest.hex}{PARTIAL_SUFFIX}")
        self.empty(digest)
        meter = Meter(progress, cancel, undone="no copy was made in memory")
        with translated("write", partial):
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, size_bytes)

                def keep(data: memoryview, offset: int) -> None:
                    write_all(fd, data, offset)
                    if drop_behind:
                        os.posix_fadvise(source_fd, offset, len(data), os.POSIX_FADV_DONTNEED)

                damaged = extent_faults(source_fd, extents, num_threads=num_threads, meter=meter, sink=keep)
                if damaged:
                    message = f"{len(damaged)} extents of the pack {digest} are damaged, first {damaged[0]}"
                    cure = "`coldsnap verify` says where; restore from elsewhere, or capture again"
                    raise PayloadRejected("digest_mismatch", message, cure=cure)
                os.fchmod(fd, _COPY_MODE)
                partial.rename(path)
                remember(path, fd, digest, Evidence.EXTENTS_SHA256, provider="native")
            except BaseException:
                self.empty(digest)
                raise
            finally:
                os.close(fd)
        return path

    def empty(self, digest: Digest) -> int:
        """Remove the copy and what is left of an unfinished one; the bytes that frees. Idempotent.

        The record goes first: a copy without one is nobody's.
        """
        freed = 0
        for one in self._files(digest):
            with translated("remove", one), suppress(FileNotFoundError):
                size = one.lstat().st_blocks * 512
                one.unlink()
                freed += size
        return freed

    def _files(self, digest: Digest) -> tuple[Path, ...]:
        path = self.path(digest)
        return record_path(path), path, path.with_name(f"{digest.hex}{PARTIAL_SUFFIX}")
