"""Reading local files that are to be sent: opened once, hashed on the way, refused when they are other bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from types import TracebackType

from coldsnap.core.digest import Digest
from coldsnap.errors import PayloadRejected
from coldsnap.ship.base import PIECE_BYTES, Outgoing
from coldsnap.store.documents import open_regular
from coldsnap.store.faults import translated

__all__ = ["LocalFile"]

_CURE = "the file here is damaged or was exchanged: `coldsnap verify` the artifact, then capture or fetch it again"


class LocalFile:
    """An ``Outgoing`` being read. A context manager.

    Pieces may be read more than once and from any offset; bytes are hashed the first time the reading comes to them,
    in order. ``prove`` hashes what is left and compares.
    """

    def __init__(self, outgoing: Outgoing) -> None:
        self.outgoing = outgoing
        self._state = hashlib.sha256()
        self._hashed = 0
        self.fd, found = open_regular(outgoing.path)
        self._identity = _identity(found)
        if found.st_size != outgoing.bytes:
            os.close(self.fd)
            message = f"{outgoing.path} has {found.st_size} bytes, and {outgoing.item} has {outgoing.bytes}"
            raise PayloadRejected("size_mismatch", message, cure=_CURE, facts={"path": str(outgoing.path)})

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.fd)

    def pieces(self, offset: int, size: int) -> Iterator[memoryview]:
        """``size`` bytes from ``offset``; a piece is good until the next one is asked for."""
        buffer = memoryview(bytearray(min(PIECE_BYTES, max(size, 1))))
        end = offset + size
        while offset < end:
            with translated("read", self.outgoing.path):
                count = os.preadv(self.fd, [buffer[: end - offset]], offset)
            if count == 0:
                raise self._shorter()
            piece = buffer[:count]
            self._note(piece, offset)
            offset += count
            yield piece

    def read(self, offset: int, size: int) -> bytes:
        """At most ``size`` bytes from ``offset``, and some."""
        with translated("read", self.outgoing.path):
            data = os.pread(self.fd, size, offset)
        if size and not data:
            raise self._shorter()
        self._note(memoryview(data), offset)
        return data

    def _shorter(self) -> PayloadRejected:
        message = f"{self.outgoing.path} became shorter while it was sent"
        return PayloadRejected("changed_during_validation", message, cure=_CURE)

    def _note(self, piece: memoryview, offset: int) -> None:
        if offset <= self._hashed < offset + len(piece):
            self._state.update(piece[self._hashed - offset :])
            self._hashed = offset + len(piece)

    def prove(self) -> None:
        """Raise PayloadRejected unless the whole file is its item, and stayed the same meanwhile."""
        for _ in self.pieces(self._hashed, self.outgoing.bytes - self._hashed):
            pass
        digest = self.outgoing.item.digest
        if (found := Digest.from_hash(self._state)) != digest:
            message = f"{self.outgoing.path} has the digest {found}, not {digest}; it is not sent"
            raise PayloadRejected("digest_mismatch", message, cure=_CURE, facts={"path": str(self.outgoing.path)})
        if _identity(os.fstat(self.fd)) != self._identity:
            message = f"{self.outgoing.path} changed while it was sent"
            raise PayloadRejected("changed_during_validation", message, cure=_CURE)


def _identity(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
