"""The files of an image's layer, and its bytes: a gzipped tar that depends on the files alone.

Files are values here and never laid out on a disk, so that owners and modes need no root, and no link of a package
is ever followed. Members stand in the order of their names, with folders nobody named made up; owners are numbers.
The gzip is one member whose pieces are compressed side by side, so its bytes do not depend on how many cores there are.
"""

import hashlib
import io
import itertools
import os
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from house.say import Trouble

WHEN = 315532800  # 1980-01-01, the first day that every archive format knows
Progress = Callable[[int, int], None]
_PIECE_BYTES = 4 << 20
_LEVEL = 5
_GZIP_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\x03"  # deflate, no name, no time, unix


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One file of a root, at `path` without a leading slash.

    `kind` is of tarfile: REGTYPE, DIRTYPE or SYMTYPE. `target` is a link's, `data` opens a regular file's `bytes`.
    """

    path: str
    mode: int
    kind: bytes = tarfile.REGTYPE
    uid: int = 0
    gid: int = 0
    mtime: int = WHEN
    target: str = ""
    data: Callable[[], IO[bytes]] | None = None
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A written layer: digest and size of its file, of the tar inside, and what it is made of."""

    digest: str
    bytes: int
    diff_id: str
    unpacked_bytes: int


def folder(path: str, mode: int = 0o755) -> Entry:
    return Entry(path=path, mode=mode, kind=tarfile.DIRTYPE)


def link(path: str, target: str) -> Entry:
    return Entry(path=path, mode=0o777, kind=tarfile.SYMTYPE, target=target)


def text(path: str, content: str | bytes, mode: int = 0o644) -> Entry:
    held = content.encode() if isinstance(content, str) else content
    return Entry(path=path, mode=mode, bytes=len(held), data=lambda: io.BytesIO(held))


def write_layer(entries: Iterable[Entry], out: Path, *, progress: Progress = lambda done, total: None) -> Layer:
    """Write `out`, which must not exist. Raises Trouble for two files of one name or a file inside a file.

    `progress` hears of bytes of files that are packed and that will be.
    """
    ordered = _ordered(entries)
    total, done = sum(entry.bytes for entry in ordered), 0
    with out.open("xb") as file, ThreadPoolExecutor(os.cpu_count()) as pool:
        packed = _Packed(file, pool)
        for piece in _pieces(_tar(ordered)):
            packed.add(piece)
            done = min(total, done + len(piece))
            progress(done, total)
        return packed.finish()


def _ordered(entries: Iterable[Entry]) -> list[Entry]:
    """Parents first, each folder once."""
    found: dict[str, Entry] = {}
    for entry in entries:
        other = found.setdefault(entry.path, entry)
        if other is not entry and not entry.kind == other.kind == tarfile.DIRTYPE:
            raise Trouble(f"two files of the layer are called {entry.path}")
    for path in list(found):
        for end in range(1, path.count("/") + 1):
            parent = "/".join(path.split("/")[:end])
            if found.setdefault(parent, folder(parent)).kind != tarfile.DIRTYPE:
                raise Trouble(f"{path} of the layer lies inside {parent}, which is no folder")
    return [found[path] for path in sorted(found, key=lambda path: path.split("/"))]


def _tar(entries: Iterable[Entry]) -> Iterator[bytes]:
    size = 0
    for entry in entries:
        info = tarfile.TarInfo(entry.path)
        info.mode, info.type, info.uid, info.gid = entry.mode, entry.kind, entry.uid, entry.gid
        info.mtime, info.linkname, info.size = entry.mtime, entry.target, entry.bytes
        head = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        yield head
        if entry.data is not None:
            yield from _whole(entry, entry.data)
        size += len(head) + entry.bytes + -entry.bytes % tarfile.BLOCKSIZE
    yield bytes(2 * tarfile.BLOCKSIZE + -(size + 2 * tarfile.BLOCKSIZE) % tarfile.RECORDSIZE)


def _whole(entry: Entry, opened: Callable[[], IO[bytes]]) -> Iterator[bytes]:
    left = entry.bytes
    with opened() as file:
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            left -= len(piece)
            yield piece
        if left or file.read(1):
            raise Trouble(f"{entry.path} has other than its {entry.bytes} bytes", "try again")
    yield bytes(-entry.bytes % tarfile.BLOCKSIZE)


def _pieces(stream: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of one size."""
    held = bytearray()
    for piece in stream:
        held += piece
        while len(held) >= _PIECE_BYTES:
            yield bytes(held[:_PIECE_BYTES])
            del held[:_PIECE_BYTES]
    yield bytes(held)


class _Packed:
    """A gzip file of pieces: each a run of deflate blocks that ends on a byte, as a flush leaves it."""

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor) -> None:
        self._file = file
        self._plain, self._packed = hashlib.sha256(), hashlib.sha256()
        self._crc = self._plain_bytes = self._packed_bytes = 0
        self._pool = pool
        self._open: deque[Future[bytes]] = deque()
        self._write(_GZIP_HEAD)

    def add(self, piece: bytes) -> None:
        self._plain.update(piece)
        self._crc = zlib.crc32(piece, self._crc)
        self._plain_bytes += len(piece)
        self._open.append(self._pool.submit(_deflate, piece))
        while len(self._open) > 2 * (os.cpu_count() or 1):
            self._write(self._open.popleft().result())

    def finish(self) -> Layer:
        for one in self._open:
            self._write(one.result())
        self._write(zlib.compressobj(_LEVEL, zlib.DEFLATED, -15).flush())
        self._write(self._crc.to_bytes(4, "little") + (self._plain_bytes % (1 << 32)).to_bytes(4, "little"))
        self._file.flush()
        os.fsync(self._file.fileno())
        return Layer(
            digest=f"sha256:{self._packed.hexdigest()}",
            bytes=self._packed_bytes,
            diff_id=f"sha256:{self._plain.hexdigest()}",
            unpacked_bytes=self._plain_bytes,
        )

    def _write(self, data: bytes) -> None:
        self._packed.update(data)
        self._packed_bytes += len(data)
        self._file.write(data)


def _deflate(piece: bytes) -> bytes:
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -15)
    return packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH)


def tree(source: Path, place: str, *, wanted: Callable[[Path], bool] = lambda path: True) -> Iterator[Entry]:
    """The regular files of a folder on disk that are `wanted`, below `place`; their times do not count."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and wanted(path):
            status = path.stat()
            where = "/".join(itertools.chain([place], path.relative_to(source).parts))
            yield Entry(
                path=where,
                mode=0o755 if status.st_mode & 0o100 else 0o644,
                bytes=status.st_size,
                data=lambda path=path: path.open("rb"),  # type: ignore[misc]
            )
