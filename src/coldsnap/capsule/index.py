"""What a capsule holds: one record a file, and from it every member of every layer.

`coldsnap/index.json` is the first layer's only member. It binds each file's size and SHA-256 and says how
it is stored; the image manifest binds the index. Names, order, offsets and headers of all tar members are
derived from it (`plan_layers`), by the writer and the reader alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field

from coldsnap.capsule.frames import CHUNK_BYTES, max_frame_bytes
from coldsnap.capsule.tarlayer import BLOCK_BYTES, END_OF_LAYER, member_header
from coldsnap.core.digest import Digest
from coldsnap.core.names import Choice, Id, Items
from coldsnap.core.names import path_fault as clean_path_fault
from coldsnap.core.owners import Owner
from coldsnap.core.parsing import Record, parsed, rule
from coldsnap.core.paths import show
from coldsnap.core.validation import VALIDATION_SUFFIX
from coldsnap.errors import Problem

__all__ = [
    "INDEX_MEMBER",
    "RESERVED_PATHS",
    "ROOT",
    "CapsuleIndex",
    "Encoding",
    "IndexedFile",
    "Layer",
    "Member",
    "chunk_sizes",
    "layer_bytes",
    "member_names",
    "path_fault",
    "plan_layers",
]

ROOT = "coldsnap"
INDEX_MEMBER = f"{ROOT}/index.json"
RESERVED_PATHS = frozenset({"index.json", "prepared.json"})

_MAX_PATH_BYTES = 1024
_MAX_NAME_BYTES = 240  # leaves room for `.zst.00000` in a file name of 255 bytes
_MAX_FILE_BYTES = 1 << 48
_CURE = "the index was not written by coldsnap, or was changed; capture again"


class Layer(StrEnum):
    """Which layer a file is in. The index has a layer of its own, before these."""

    PROCESS = "process"
    PAYLOAD = "payload"
    CACHE = "cache"


class Encoding(StrEnum):
    """How a file is stored: one zstd frame a chunk, or as it is in one member."""

    ZSTD = "zstd"
    PLAIN = "plain"


class IndexedFile(Record):
    """One file. ``stored_bytes`` is the size of each tar member that holds it, in order."""

    path: str
    role: Id
    owner: Owner
    layer: Choice[Layer]
    encoding: Choice[Encoding]
    bytes: int = Field(ge=0, le=_MAX_FILE_BYTES)
    sha256: Digest
    mtime_ns: int = Field(default=0, ge=-(1 << 62), le=1 << 62)
    stored_bytes: Items[int]

    @rule
    def _path(self) -> Iterator[Problem]:
        if (fault := path_fault(self.path)) is not None:
            yield Problem(field="path", message=fault, value=show(self.path), cure=_CURE)

    @rule
    def _mtime(self) -> Iterator[Problem]:
        if self.mtime_ns and self.layer is not Layer.CACHE:
            message = "only cache seeds keep their modification time"
            yield Problem(field="mtime_ns", message=message, value=str(self.mtime_ns), cure=_CURE)

    @rule
    def _stored(self) -> Iterator[Problem]:
        num_members = max(1, -(-self.bytes // CHUNK_BYTES)) if self.encoding is Encoding.ZSTD else 1
        if len(self.stored_bytes) != num_members:  # counted before any list of that length is made
            message = f"{self.bytes} bytes are stored in {num_members} members"
            yield Problem(field="stored_bytes", message=message, value=str(len(self.stored_bytes)), cure=_CURE)
            return
        raw_sizes = chunk_sizes(self.bytes) if self.encoding is Encoding.ZSTD else (self.bytes,)
        for place, (raw, stored) in enumerate(zip(raw_sizes, self.stored_bytes, strict=True)):
            low, high = (raw, raw) if self.encoding is Encoding.PLAIN else (1, max_frame_bytes(raw))
            if not low <= stored <= high:
                message = f"must be from {low} to {high}"
                yield Problem(field=f"stored_bytes[{place}]", message=message, value=str(stored), cure=_CURE)


class CapsuleIndex(Record):
    """The document ``coldsnap/index.json``. Files stand in the order of their UTF-8 paths."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-capsule-index"] = "coldsnap-capsule-index"
    unit: Id
    chunk_bytes: Literal[8388608] = CHUNK_BYTES
    files: Items[IndexedFile]

    def file(self, path: str) -> IndexedFile | None:
        """The file at ``path``, or None."""
        return next((file for file in self.files if file.path == path), None)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files, unpacked."""
        return sum(file.bytes for file in self.files)

    @rule
    def _order(self) -> Iterator[Problem]:
        previous = b""
        for number, file in parsed(self.files, "path"):
            raw = file.path.encode("utf-8", "surrogatepass")
            if raw <= previous:
                message = "files must stand in the order of their paths, each once"
                yield Problem(field=f"files[{number}].path", message=message, value=show(file.path), cure=_CURE)
            previous = max(raw, previous)

    @rule
    def _names(self) -> Iterator[Problem]:
        taken: dict[str, int] = {}
        for number, file in parsed(self.files, "path", "encoding", "stored_bytes"):
            for name in (file.path, *member_names(file.path, file.encoding, len(file.stored_bytes))):
                if taken.setdefault(name, number) != number:
                    message = f"is stored under the same name as files[{taken[name]}]"
                    yield Problem(field=f"files[{number}].path", message=message, value=show(name), cure=_CURE)
        for number, file in parsed(self.files, "path"):
            parts = file.path.split("/")
            for depth in range(1, len(parts)):
                folder = "/".join(parts[:depth])
                if folder in taken or f"{ROOT}/{folder}" in taken:
                    message = f"needs the folder {show(folder)}, which is a file"
                    yield Problem(field=f"files[{number}].path", message=message, value=show(file.path), cure=_CURE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One member of a layer: ``size`` stored bytes that give ``raw_bytes`` of ``file`` from ``raw_offset``."""

    file: IndexedFile
    name: str
    size: int
    raw_offset: int
    raw_bytes: int
    last: bool

    def header(self) -> bytes:
        """Its tar header blocks."""
        return member_header(self.name, self.size, mtime_ns=self.file.mtime_ns)


def chunk_sizes(size: int) -> tuple[int, ...]:
    """How a file of ``size`` bytes is cut: whole chunks and a shorter last one; an empty file is one empty chunk."""
    whole, rest = divmod(size, CHUNK_BYTES)
    return (CHUNK_BYTES,) * whole + ((rest,) if rest or not whole else ())


def member_names(path: str, encoding: Encoding, num_chunks: int) -> tuple[str, ...]:
    """The names of the members that hold the file at ``path``."""
    if encoding is Encoding.PLAIN:
        return (f"{ROOT}/{path}",)
    if num_chunks == 1:
        return (f"{ROOT}/{path}.zst",)
    return tuple(f"{ROOT}/{path}.zst.{number:05d}" for number in range(num_chunks))


def members_of(file: IndexedFile) -> Iterator[Member]:
    """The members of one file, in order."""
    raw_sizes = chunk_sizes(file.bytes) if file.encoding is Encoding.ZSTD else (file.bytes,)
    offset = 0
    names = member_names(file.path, file.encoding, len(raw_sizes))
    for number, (name, raw, stored) in enumerate(zip(names, raw_sizes, file.stored_bytes, strict=True)):
        last = number == len(raw_sizes) - 1
        yield Member(file=file, name=name, size=stored, raw_offset=offset, raw_bytes=raw, last=last)
        offset += raw


def plan_layers(index: CapsuleIndex) -> Mapping[Layer, tuple[Member, ...]]:
    """The members of each layer that has any, layers in the order of `Layer`, members in the order of paths."""
    plan = {
        layer: tuple(member for file in index.files if file.layer is layer for member in members_of(file))
        for layer in Layer
    }
    return {layer: members for layer, members in plan.items() if members}


def layer_bytes(members: Iterable[Member]) -> int:
    """The size of a layer's tar."""
    blocks = sum(len(member.header()) + member.size + -member.size % BLOCK_BYTES for member in members)
    return blocks + len(END_OF_LAYER)


def path_fault(path: str) -> str | None:
    """Why ``path`` cannot be a file's place in a capsule, or None when it can."""
    if (fault := clean_path_fault(path, absolute=False)) is not None:
        return fault
    try:
        raw = path.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if len(raw) > _MAX_PATH_BYTES or any(len(part) > _MAX_NAME_BYTES for part in raw.split(b"/")):
        return f"is longer than {_MAX_PATH_BYTES} bytes, or a part of it than {_MAX_NAME_BYTES}"
    if any(letter < 32 or letter == 127 for letter in raw):
        return "holds control characters"
    ours = path in RESERVED_PATHS or path.endswith(VALIDATION_SUFFIX)
    return "is a name that coldsnap keeps for itself" if ours else None
