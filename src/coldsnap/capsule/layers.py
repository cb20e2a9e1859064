"""Writing layers: sources in, one tar blob a layer out, with a fixed number of chunks in flight.

Workers read and compress chunks; one more thread hashes sources in order; the caller's thread hashes and
writes the layer. Everything is consumed in the order of submission, so threads change the speed and never
the bytes, and memory does not grow with the size of a file.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from coldsnap.capsule.frames import CHUNK_BYTES, compress_chunk
from coldsnap.capsule.index import Encoding, IndexedFile, Layer, chunk_sizes, member_names
from coldsnap.capsule.layout import blob_path
from coldsnap.capsule.tarlayer import END_OF_LAYER, member_header, padding
from coldsnap.core.digest import Digest
from coldsnap.core.owners import Owner
from coldsnap.core.points import reached
from coldsnap.errors import OperationInterrupted, PayloadRejected

__all__ = ["LayerWriter", "Progress", "Source"]

Progress = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file to store, and what it is expected to hold (None: whatever it holds)."""

    path: str
    role: str
    owner: str
    layer: Layer
    encoding: Encoding
    source: Path
    bytes: int | None
    sha256: Digest | None


@dataclass(kw_only=True, slots=True)
class _Open:
    """A source being read."""

    what: Source
    fd: int
    status: os.stat_result
    state: hashlib._Hash = field(default_factory=hashlib.sha256)
    stored: list[int] = field(default_factory=list)

    @property
    def mtime_ns(self) -> int:
        return self.status.st_mtime_ns if self.what.layer is Layer.CACHE else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Some bytes of a source on their way; ``work`` gives (raw, stored).

    ``begins`` names the member that starts here, ``ends_*`` say what is complete after it.
    """

    file: _Open
    begins: str | None
    ends_member: bool
    ends_file: bool
    work: Future[tuple[bytes, bytes]]


class LayerWriter:
    """Writes layers into a layout folder. A context manager: threads and descriptors end with it."""

    def __init__(
        self, layout_dir: Path, *, num_threads: int, progress: Progress | None, cancel: threading.Event | None
    ) -> None:
        self._layout_dir = layout_dir
        self._in_flight = 2 * num_threads + 1
        self._progress = progress
        self._cancel = cancel
        self._workers = ThreadPoolExecutor(num_threads, thread_name_prefix="capsule-compress")
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="capsule-hash")
        self._hashing: deque[Future[None]] = deque()
        self._open_fds: set[int] = set()

    def __enter__(self) -> LayerWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.shutdown(cancel_futures=True)
        self._hasher.shutdown(cancel_futures=True)
        for fd in self._open_fds:
            os.close(fd)

    def write(self, sources: Sequence[Source]) -> tuple[Digest, int, list[IndexedFile]]:
        """One layer of ``sources`` in the order given: its digest, its bytes, and its files.

        Raises PayloadRejected for a source that is no regular file, is not what was expected of it, or
        changes while it is read; OperationInterrupted when cancelled.
        """
        aside = self._layout_dir / "blobs" / "sha256" / ".layer"
        state = hashlib.sha256()
        size = 0
        done: list[tuple[_Open, Future[str]]] = []
        with open(aside, "xb", buffering=0, opener=_private) as blob:

            def put(data: bytes) -> None:
                nonlocal size
                state.update(data)
                view = memoryview(data)
                while view:
                    view = view[blob.write(view) :]
                size += len(data)

            for piece in self._ordered(sources):
                raw, stored = piece.work.result()
                self._hash(piece.file, raw)
                if piece.begins is not None:
                    whole = piece.file.status.st_size if piece.file.what.encoding is Encoding.PLAIN else len(stored)
                    put(member_header(piece.begins, whole, mtime_ns=piece.file.mtime_ns))
                    piece.file.stored.append(whole)
                put(stored)
                if piece.ends_member:
                    put(padding(piece.file.stored[-1]))
                if piece.ends_file:
                    self._close_unchanged(piece.file)
                    done.append((piece.file, self._hasher.submit(piece.file.state.hexdigest)))
                if self._progress is not None:
                    self._progress(len(raw))
            put(END_OF_LAYER)
            os.fsync(blob.fileno())
        digest = Digest.from_hash(state)
        aside.rename(blob_path(self._layout_dir, digest))
        reached("capsule.layer")
        return digest, size, [_indexed(file, Digest.from_hex(hexed.result())) for file, hexed in done]

    def _ordered(self, sources: Sequence[Source]) -> Iterator[_Piece]:
        waiting: deque[_Piece] = deque()
        for piece in self._pieces(sources):
            waiting.append(piece)
            if len(waiting) > self._in_flight:
                yield waiting.popleft()
        yield from waiting

    def _pieces(self, sources: Sequence[Source]) -> Iterator[_Piece]:
        for source in sources:
            file = self._open(source)
            sizes = chunk_sizes(file.status.st_size)
            zstd = source.encoding is Encoding.ZSTD
            names = member_names(source.path, source.encoding, len(sizes))
            for number, size in enumerate(sizes):
                if self._cancel is not None and self._cancel.is_set():
                    raise OperationInterrupted("writing the capsule was stopped; nothing of it was left behind")
                last = number == len(sizes) - 1
                yield _Piece(
                    file=file,
                    begins=names[number] if zstd or number == 0 else None,
                    ends_member=zstd or last,
                    ends_file=last,
                    work=self._workers.submit(_read, file, number * CHUNK_BYTES, size, zstd),
                )

    def _open(self, source: Source) -> _Open:
        try:
            fd = os.open(source.source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise _rejected("unusable_path", source, f"cannot be opened: {error.strerror}") from error
        self._open_fds.add(fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _rejected("unusable_path", source, "is not a regular file")
        if source.bytes is not None and status.st_size != source.bytes:
            raise _rejected("size_mismatch", source, f"has {status.st_size} bytes, not {source.bytes}")
        return _Open(what=source, fd=fd, status=status)

    def _close_unchanged(self, file: _Open) -> None:
        now = os.fstat(file.fd)
        self._open_fds.discard(file.fd)
        os.close(file.fd)
        if (now.st_size, now.st_mtime_ns) != (file.status.st_size, file.status.st_mtime_ns):
            raise _rejected("changed_during_validation", file.what, "changed while it was read")

    def _hash(self, file: _Open, raw: bytes) -> None:
        self._hashing.append(self._hasher.submit(file.state.update, raw))
        if len(self._hashing) > self._in_flight:
            self._hashing.popleft().result()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _read(file: _Open, offset: int, size: int, zstd: bool) -> tuple[bytes, bytes]:
    raw = os.pread(file.fd, size, offset)
    while len(raw) < size:
        more = os.pread(file.fd, size - len(raw), offset + len(raw))
        if not more:
            raise _rejected("changed_during_validation", file.what, "became shorter while it was read")
        raw += more
    return raw, compress_chunk(raw) if zstd else raw


def _indexed(file: _Open, sha256: Digest) -> IndexedFile:
    if file.what.sha256 is not None and sha256 != file.what.sha256:
        raise _rejected("digest_mismatch", file.what, f"has digest {sha256}, not {file.what.sha256}")
    return IndexedFile(
        path=file.what.path,
        role=file.what.role,
        owner=Owner.parse(file.what.owner),
        layer=file.what.layer,
        encoding=file.what.encoding,
        bytes=file.status.st_size,
        sha256=sha256,
        mtime_ns=file.mtime_ns,
        stored_bytes=tuple(file.stored),
    )


def _rejected(reason: str, source: Source, what: str) -> PayloadRejected:
    return PayloadRejected(
        reason,
        f"{source.source}, to be stored as {source.path!r}, {what}",
        cure="leave the files alone until the capsule is written, and capture again",
        facts={"path": str(source.source)},
    )
