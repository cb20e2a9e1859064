"""A capsule out into a folder, every byte proved on the way.

Nothing is parsed on the way in: the index, which the capsule's digest binds, says which bytes stand where in
each layer. The caller's thread reads a layer from front to back, hashes it, and compares headers and padding
with what they must be; workers decompress chunks and write them; one more thread hashes files in order. A
layer whose digest is wrong, a chunk that is not one frame of its size, a file whose digest is wrong: each
ends it, and nothing is left.

The folder is made aside and renamed when everything was proved and is on disk. Chunks in flight are bounded,
so memory does not grow with the capsule. Blocks of zeros become holes: they take no disk, and are not read from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from coldsnap.capsule.aside import folder_aside, num_cores
from coldsnap.capsule.frames import BadFrame, decompress_chunk
from coldsnap.capsule.index import CapsuleIndex, Encoding, IndexedFile, Member, plan_layers
from coldsnap.capsule.layers import Progress
from coldsnap.capsule.layout import blob_path, open_blob
from coldsnap.capsule.opened import OpenedCapsule, open_capsule
from coldsnap.capsule.tarlayer import END_OF_LAYER, describe_header, padding
from coldsnap.core.digest import Digest
from coldsnap.errors import OperationInterrupted, OutOfSpace, PayloadRejected, Problem, Refused
from coldsnap.store.faults import translated
from coldsnap.store.staging import sync_folder, write_around_zeros

__all__ = ["check_expected", "unpack_capsule", "unpack_into"]

Expected = Mapping[str, tuple[int, Digest]]

_PLAIN_PIECE_BYTES = 8 * 1024 * 1024
_SPARE_BYTES = 16 * 1024 * 1024
_CURE = "the capsule is damaged; fetch it again or capture again"


def unpack_capsule(
    layout_dir: Path,
    digest: Digest,
    dest: Path,
    *,
    expected: Expected | None,
    num_threads: int = 0,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> Path:
    """Unpack every file of the capsule ``digest`` into the new folder ``dest``, and return ``dest``.

    ``expected`` are (bytes, SHA-256) of all its files, by path, or None when nobody said what they are; every
    file is proved against the index in any case. Raises PayloadRejected naming the damaged file, Refused when the
    capsule is whole but not the one that ``expected`` describes, OutOfSpace before a byte is written when the disk
    cannot hold it, ResourceBusy when ``dest`` exists, InvalidDocument, HostError, OperationInterrupted.
    """
    capsule = open_capsule(layout_dir, digest)
    if expected is not None:
        check_expected(capsule.index, digest, expected)
    with folder_aside(dest) as aside:
        unpack_into(layout_dir, capsule, aside, num_threads=num_threads, progress=progress, cancel=cancel)
    return dest


def check_expected(index: CapsuleIndex, digest: Digest, expected: Expected) -> None:
    """Raise Refused with every difference between ``expected`` and the files that the capsule has.

    A file that the artifact does not name is one: who needs it finds that it is missing only when the service that
    ran before is gone.
    """
    files = {file.path: file for file in index.files}
    problems = []
    cure = "the artifact and the capsule do not belong together; fetch both again"
    for path, (size, sha256) in expected.items():
        file = files.get(path)
        if file is None:
            problems.append(Problem(field=path, message="is not in the capsule", cure=cure))
        elif (file.bytes, file.sha256) != (size, sha256):
            message = f"should have {size} bytes and digest {sha256}"
            value = f"{file.bytes} bytes, {file.sha256}"
            problems.append(Problem(field=path, message=message, value=value, cure=cure))
    problems += [
        Problem(field=path, message="is in the capsule and not named by the artifact", cure=cure)
        for path in sorted(files.keys() - expected.keys())
    ]
    if problems:
        raise Refused(f"capsule {digest}", problems)


def unpack_into(
    layout_dir: Path,
    capsule: OpenedCapsule,
    folder: Path,
    *,
    num_threads: int = 0,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> None:
    """Unpack all files below the existing, empty ``folder`` and sync them. On failure the caller removes it."""
    _check_space(capsule, folder)
    _make_folders(capsule.index, folder)
    with _Unpacker(folder, num_threads or num_cores(), progress, cancel) as unpacker:
        for layer, members in plan_layers(capsule.index).items():
            layer_digest, size = capsule.layers[layer]
            what = f"the {layer.value} layer"
            fd, _ = open_blob(layout_dir, layer_digest, size=size, what=what)
            with open(fd, "rb", buffering=0) as blob:
                reader = _Reader(blob.fileno(), blob_path(layout_dir, layer_digest), what)
                unpacker.layer(reader, members)
            unpacker.finish()  # a damaged file is named for itself before its layer is
            reader.finish(layer_digest)
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        sync_folder(path)


def _check_space(capsule: OpenedCapsule, folder: Path) -> None:
    free = os.statvfs(folder)
    free_bytes = free.f_bavail * free.f_frsize
    needed = sum(file.bytes + 4096 for file in capsule.index.files) + _SPARE_BYTES
    if needed > free_bytes:
        raise OutOfSpace(
            f"unpacking capsule {capsule.digest} needs {needed} bytes and {folder.parent} has {free_bytes} free",
            cure=f"free {needed - free_bytes} bytes there",
            facts={"path": str(folder.parent), "needed_bytes": needed, "free_bytes": free_bytes},
        )


def _make_folders(index: CapsuleIndex, folder: Path) -> None:
    for path in sorted({parent for file in index.files for parent in Path(file.path).parents}):
        (folder / path).mkdir(mode=0o700, exist_ok=True)


class _Reader:
    """Reads a layer from front to back and hashes all of it."""

    def __init__(self, fd: int, path: Path, what: str) -> None:
        self._fd = fd
        self._path = path
        self._what = what
        self._state = hashlib.sha256()
        self._offset = 0

    def take(self, size: int) -> bytes:
        data = os.read(self._fd, size)
        while len(data) < size:
            more = os.read(self._fd, size - len(data))
            if not more:
                raise self._rejected("size_mismatch", f"ends after {self._offset + len(data)} bytes")
            data += more
        self._state.update(data)
        self._offset += size
        return data

    def expect(self, expected: bytes, name: str) -> None:
        """Take exactly ``expected``. Raises PayloadRejected saying what stands there instead."""
        offset = self._offset
        found = self.take(len(expected))
        if found != expected:
            block = next(at for at in range(0, len(expected), 512) if found[at : at + 512] != expected[at : at + 512])
            what = describe_header(found[block : block + 512])
            raise self._rejected("digest_mismatch", f"holds {what} at byte {offset + block}, where {name} must be")

    def finish(self, digest: Digest) -> None:
        """Nothing may follow, and the digest of everything taken must be ``digest``."""
        if (found := Digest.from_hash(self._state)) != digest:
            raise self._rejected("digest_mismatch", f"has digest {found}, not {digest}")

    def _rejected(self, reason: str, what: str) -> PayloadRejected:
        message = f"{self._what} of the capsule at {self._path} {what}"
        return PayloadRejected(reason, message, cure=_CURE, facts={"path": str(self._path)})


@dataclass(kw_only=True, slots=True)
class _Out:
    """A file being written."""

    what: IndexedFile
    fd: int
    state: hashlib._Hash = field(default_factory=hashlib.sha256)


class _Unpacker:
    """Decompresses, writes and proves files. A context manager: threads and descriptors end with it."""

    def __init__(
        self, folder: Path, num_threads: int, progress: Progress | None, cancel: threading.Event | None
    ) -> None:
        self._folder = folder
        self._limit = 2 * num_threads + 1
        self._progress = progress
        self._cancel = cancel
        self._workers = ThreadPoolExecutor(num_threads, thread_name_prefix="capsule-unpack")
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="capsule-hash")
        self._writing: deque[tuple[_Out, bool, Future[bytes]]] = deque()
        self._proving: deque[Future[None]] = deque()
        self._open_fds: set[int] = set()

    def __enter__(self) -> _Unpacker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.shutdown(cancel_futures=True)
        self._hasher.shutdown(cancel_futures=True)
        for fd in self._open_fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    def layer(self, reader: _Reader, members: tuple[Member, ...]) -> None:
        """Take a whole layer from ``reader`` and hand its chunks to the workers."""
        out: _Out | None = None
        for member in members:
            if member.raw_offset == 0 or out is None:
                out = self._create(member.file)
            reader.expect(member.header(), f"the header of {member.name!r}")
            for offset, raw, last, work in self._pieces(reader, member):
                self._stop_if_cancelled()
                self._writing.append((out, last, self._workers.submit(_write, out, offset, raw, work)))
                self._settle(self._limit)
            reader.expect(padding(member.size), f"the end of {member.name!r}")
        reader.expect(END_OF_LAYER, "the end of the layer")

    def finish(self) -> None:
        """Wait for everything handed out. Raises what any of it raised."""
        self._settle(0)
        while self._proving:
            self._proving.popleft().result()

    def _pieces(self, reader: _Reader, member: Member) -> Iterator[tuple[int, int, bool, Callable[[], bytes]]]:
        if member.file.encoding is Encoding.ZSTD:
            frame = reader.take(member.size)
            yield member.raw_offset, member.raw_bytes, member.last, lambda: decompress_chunk(frame, member.raw_bytes)
            return
        offset = 0
        while True:
            data = reader.take(min(_PLAIN_PIECE_BYTES, member.size - offset))
            last = offset + len(data) == member.size
            yield offset, len(data), last, lambda data=data: data  # type: ignore[misc]
            offset += len(data)
            if last:
                return

    def _create(self, file: IndexedFile) -> _Out:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._folder / file.path, flags, 0o600)
        self._open_fds.add(fd)
        os.ftruncate(fd, file.bytes)  # where it ends with zeros, nothing is written there
        return _Out(what=file, fd=fd)

    def _settle(self, limit: int) -> None:
        """Let at most ``limit`` chunks stay in flight; what is written goes to be hashed, in order."""
        while len(self._writing) > limit:
            out, last, written = self._writing.popleft()
            raw = written.result()
            self._proving.append(self._hasher.submit(self._prove, out, raw, last))
            while len(self._proving) > self._limit:
                self._proving.popleft().result()
            if self._progress is not None:
                self._progress(len(raw))

    def _prove(self, out: _Out, raw: bytes, last: bool) -> None:
        out.state.update(raw)
        if not last:
            return
        if (found := Digest.from_hash(out.state)) != out.what.sha256:
            raise _damaged(out.what, f"has digest {found}, not {out.what.sha256}")
        if out.what.mtime_ns:
            os.utime(out.fd, ns=(out.what.mtime_ns, out.what.mtime_ns))
        os.fsync(out.fd)
        self._open_fds.discard(out.fd)
        os.close(out.fd)

    def _stop_if_cancelled(self) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise OperationInterrupted("unpacking the capsule was stopped; nothing of it was left behind")


def _write(out: _Out, offset: int, size: int, work: Callable[[], bytes]) -> bytes:
    try:
        raw = work()
    except BadFrame as error:
        raise _damaged(out.what, f"is damaged from byte {offset}: {error}") from error
    with translated("write", f"{out.what.path} of the capsule"):
        write_around_zeros(out.fd, raw, offset)
    return raw


def _damaged(file: IndexedFile, what: str) -> PayloadRejected:
    message = f"the capsule's file {file.path!r} {what}"
    return PayloadRejected("digest_mismatch", message, cure=_CURE, facts={"file": file.path})
