"""One file out of a capsule, without unpacking the rest.

A capsule's index says where in which layer each file stands, and the capsule's digest binds the index. So one file
is found by arithmetic, read with a few ``pread`` calls, and proved by its own SHA-256 from the index; that the
rest of its layer is whole is not looked at, and not claimed.

    opened = open_capsule(layout_dir, digest)
    place = find_member(layout_dir, opened, "workers/w0/manifest.json")
    data = read_member(place, limit_bytes=MANIFEST_LIMIT_BYTES)

``FilePlace`` says the same of an unpacked file, so that readers need not care which of the two there is.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from coldsnap.capsule.frames import BadFrame, decompress_chunk
from coldsnap.capsule.index import Encoding, Layer, plan_layers
from coldsnap.capsule.layout import blob_path
from coldsnap.capsule.opened import OpenedCapsule
from coldsnap.capsule.tarlayer import BLOCK_BYTES
from coldsnap.core.digest import Digest
from coldsnap.errors import PayloadRejected, UsageError

__all__ = ["FilePlace", "find_member", "find_members", "read_member"]

_CURE = "the capsule is damaged; fetch it again or capture again"


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePlace:
    """Where the bytes of a file are: ``pieces`` are (offset, stored bytes, bytes) in ``path``, one after the other.

    ``zstd`` says that each piece is one frame. ``bytes`` and ``sha256`` are what the file must turn out to be.
    """

    path: Path
    name: str
    pieces: tuple[tuple[int, int, int], ...]
    zstd: bool
    bytes: int
    sha256: Digest

    @classmethod
    def plain(cls, path: Path, *, name: str, size: int, sha256: Digest) -> FilePlace:
        """A file that lies unpacked at ``path``."""
        return cls(path=path, name=name, pieces=((0, size, size),), zstd=False, bytes=size, sha256=sha256)


def find_members(layout_dir: Path, capsule: OpenedCapsule) -> dict[str, FilePlace]:
    """Where every file of the capsule is, by path."""
    places = {}
    for layer, members in plan_layers(capsule.index).items():
        pieces: dict[str, list[tuple[int, int, int]]] = {}
        offset = 0
        for member in members:
            offset += len(member.header())
            pieces.setdefault(member.file.path, []).append((offset, member.size, member.raw_bytes))
            offset += member.size + -member.size % BLOCK_BYTES
        for file in capsule.index.files:
            if file.layer is layer:
                places[file.path] = FilePlace(
                    path=blob_path(layout_dir, capsule.layers[Layer(layer)][0]),
                    name=file.path,
                    pieces=tuple(pieces[file.path]),
                    zstd=file.encoding is Encoding.ZSTD,
                    bytes=file.bytes,
                    sha256=file.sha256,
                )
    return places


def find_member(layout_dir: Path, capsule: OpenedCapsule, path: str) -> FilePlace:
    """Where one file of the capsule is. Raises UsageError when it has none of that path."""
    found = find_members(layout_dir, capsule).get(path)
    if found is None:
        raise UsageError(
            f"capsule {capsule.digest} has no file {path!r}", cure="`coldsnap inspect` lists what an artifact holds"
        )
    return found


def read_member(place: FilePlace, *, limit_bytes: int) -> bytes:
    """The file's bytes, proved by its digest.

    Raises PayloadRejected when the file that holds it is missing, no regular file, too short, or holds other
    bytes, and when it is longer than ``limit_bytes``.
    """
    if place.bytes > limit_bytes:
        raise _rejected("size_mismatch", place, f"has {place.bytes} bytes, more than the {limit_bytes} it may have")
    try:
        fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _rejected("unusable_path", place, f"cannot be read from {place.path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _rejected("unusable_path", place, f"is in {place.path}, which is no regular file")
        data = b"".join(_piece(fd, place, piece) for piece in place.pieces)
    except OSError as error:
        raise _rejected("unusable_path", place, f"cannot be read from {place.path}: {error.strerror}") from error
    finally:
        os.close(fd)
    if (found := Digest.of(data)) != place.sha256:
        raise _rejected("digest_mismatch", place, f"has digest {found}, not {place.sha256}")
    return data


def _piece(fd: int, place: FilePlace, piece: tuple[int, int, int]) -> bytes:
    offset, stored, size = piece
    data = os.pread(fd, stored, offset)
    while len(data) < stored:
        more = os.pread(fd, stored - len(data), offset + len(data))
        if not more:
            raise _rejected("size_mismatch", place, f"ends early, at byte {offset + len(data)} of {place.path}")
        data += more
    if not place.zstd:
        return data
    try:
        return decompress_chunk(data, size)
    except BadFrame as error:
        raise _rejected("digest_mismatch", place, f"is damaged: {error}") from error


def _rejected(reason: str, place: FilePlace, what: str) -> PayloadRejected:
    facts = {"path": str(place.path), "file": place.name}
    return PayloadRejected(reason, f"{place.name!r} {what}", cure=_CURE, facts=facts)
