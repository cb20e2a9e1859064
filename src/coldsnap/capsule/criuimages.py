"""Some of CRIU's image files: which pages are where, what kind of memory they belong to, and who forked whom.

An image is eight bytes of magic and then records, each a 32-bit length and a protocol buffer. Only what a decision
here needs is decoded, by a reader of the wire format that is small enough to be read in one sitting:

    pagemap-<pid>.img   head {1: pages id}, then entries {1: address, 2 or 5: pages, 4: flags}
    mm-<pid>.img        one record; 14: mappings {1: start, 2: end, 5: protection, 6: flags, 7: status}
    core-<tid>.img      one record; 3: task {1: state}, 5: thread {15: restartable sequence {1: address, 2: size}}
    pstree.img          one record a process {1: pid, 2: parent's pid}
    pages-<id>.img      the pages of a pagemap's entries, one after the other, without any header

A pagemap is read strictly, because it is written again: an unknown field, a flag we do not know, entries out of order.
The others are read for a few of their fields, and newer fields pass. ``BadImage`` is for all that is not what it
should be; what that means is the caller's to say.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = [
    "PAGE_BYTES",
    "BadImage",
    "Core",
    "Mapping",
    "PageMap",
    "PageRun",
    "pagemap_image",
    "read_core",
    "read_mappings",
    "read_pagemap",
    "read_parents",
]

PAGE_BYTES: Final = 4096
_COMMON_MAGIC: Final = 0x54564319
_PAGEMAP_MAGIC: Final = 0x56084025
_MM_MAGIC: Final = 0x57492820
_CORE_MAGIC: Final = 0x55053847
_PSTREE_MAGIC: Final = 0x50273030
_PRESENT: Final = frozenset({4, 6})  # with or without "may be restored lazily"; anything else lies in another image
_LIMIT: Final = 1 << 64
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_OLD_LIMIT: Final = 0xFFFF_FFFF
_STOPPED: Final = 3
_GUARD: Final = 1 << 16


class BadImage(ValueError):
    """The bytes are not an image of that kind, or not one that is understood."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRun:
    """Present pages without a hole: ``num_pages`` from ``address`` on."""

    address: int
    num_pages: int
    flags: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.num_pages * PAGE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class PageMap:
    """A whole pagemap; its pages are in ``pages-<pages_id>.img`` in this order."""

    pages_id: int
    runs: tuple[PageRun, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapping:
    """One mapping of a process: ``[start, end)``, protection and flags as in mmap(2), CRIU's own status bits."""

    start: int
    end: int
    protection: int
    flags: int
    status: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Core:
    """What a thread's image says that matters here.

    ``start`` and ``size`` are the memory that it shares with the kernel for restartable sequences (size 0: none).
    ``stopped``: the task stood still, by a signal, when it was dumped.
    """

    start: int
    size: int
    stopped: bool


def read_pagemap(data: bytes) -> PageMap:
    """Decode ``pagemap-<pid>.img``. Raises BadImage."""
    records = _records(data, _PAGEMAP_MAGIC)
    head = _numbers(next(records, b""), required=frozenset({1}), optional=frozenset())
    runs: list[PageRun] = []
    end = 0
    for record in records:
        found = _numbers(record, required=frozenset({1, 2}), optional=frozenset({3, 4, 5}))
        address, num_pages, flags = found[1], found.get(5, found[2]), found.get(4, 0)
        if found[2] not in (0, num_pages & _OLD_LIMIT):
            raise BadImage(f"an entry at {address:#x} has {found[2]} pages and {num_pages}")
        if found.get(3) or flags not in _PRESENT:
            raise BadImage(f"an entry at {address:#x} has flags {flags:#x}, which are not understood")
        run = PageRun(address=address, num_pages=num_pages, flags=flags)
        if address % PAGE_BYTES or not num_pages or address < end or address + run.size > _LIMIT:
            raise BadImage(f"an entry at {address:#x} with {num_pages} pages is out of place")
        end = address + run.size
        runs.append(run)
    return PageMap(pages_id=head[1], runs=tuple(runs))


def pagemap_image(pagemap: PageMap) -> bytes:
    """Encode a pagemap as CRIU does; every CRIU since 4.1 reads it."""
    parts = [struct.pack("<II", _COMMON_MAGIC, _PAGEMAP_MAGIC), _framed(_field(1, pagemap.pages_id))]
    for run in pagemap.runs:
        fields = [(1, run.address), (2, run.num_pages & _OLD_LIMIT), (4, run.flags)]
        if run.num_pages > _OLD_LIMIT:
            fields.append((5, run.num_pages))
        parts.append(_framed(b"".join(_field(number, value) for number, value in fields)))
    return b"".join(parts)


def read_mappings(data: bytes) -> tuple[Mapping, ...]:
    """The mappings in ``mm-<pid>.img``, by address, without guard areas in them. Raises BadImage."""
    found = []
    end = 0
    for number, value in _fields(_only(data, _MM_MAGIC)):
        if number == 14:
            words = dict(_fields(_inner(value)))
            try:
                start, stop, protection, flags, status = (_number(words[key]) for key in (1, 2, 5, 6, 7))
            except KeyError as error:
                raise BadImage(f"a mapping has no field {error}") from None
            if status & _GUARD:  # says what of another mapping is closed; these stand last, in an order of their own
                continue
            if not end <= start < stop <= _LIMIT:
                raise BadImage(f"a mapping {start:#x}-{stop:#x} is out of place")
            end = stop
            found.append(Mapping(start=start, end=stop, protection=protection, flags=flags, status=status))
    return tuple(found)


def read_core(data: bytes) -> Core:
    """Decode what matters of ``core-<tid>.img``. Raises BadImage."""
    fields = dict(_fields(_only(data, _CORE_MAGIC)))
    stopped = False
    if 3 in fields:
        task = dict(_fields(_inner(fields[3])))
        stopped = _number(task.get(1, 0)) == _STOPPED
    thread = dict(_fields(_inner(fields.get(5, b""))))
    if 15 not in thread:
        return Core(start=0, size=0, stopped=stopped)
    words = dict(_fields(_inner(thread[15])))
    return Core(start=_number(words.get(1, 0)), size=_number(words.get(2, 0)), stopped=stopped)


def read_parents(data: bytes) -> dict[int, int]:
    """Which process is whose child, by PID, from ``pstree.img``; the root's parent is 0. Raises BadImage."""
    parents = {}
    for record in _records(data, _PSTREE_MAGIC):
        words = dict(_fields(record))
        if 1 not in words or 2 not in words:
            raise BadImage("a process has no PID or no parent")
        parents[_number(words[1])] = _number(words[2])
    return parents


# -- the wire ---------------------------------------------------------------------------------------


def _records(data: bytes, magic: int) -> Iterator[bytes]:
    if data[:8] != struct.pack("<II", _COMMON_MAGIC, magic):
        raise BadImage("it does not begin as such an image does")
    at = 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        at += 4 + size
        if at > len(data):
            raise BadImage("a record ends after the file")
        yield data[at - size : at]


def _only(data: bytes, magic: int) -> bytes:
    records = list(_records(data, magic))
    if len(records) != 1:
        raise BadImage(f"it has {len(records)} records instead of one")
    return records[0]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of every field: an integer, or the bytes of what has a length or a fixed size."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if not number:
            raise BadImage("a field has no number")
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise BadImage(f"field {number} has the wire type {kind}")
        if at + size > len(data):
            raise BadImage(f"field {number} ends after its record")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise BadImage("a number ends after its record")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    if value >= _LIMIT:
        raise BadImage("a number has more than 64 bits")
    return value, at


def _numbers(record: bytes, *, required: frozenset[int], optional: frozenset[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for number, value in _fields(record):
        if number not in required | optional or number in found:
            raise BadImage(f"field {number} is not understood there")
        found[number] = _number(value)
    if missing := required - found.keys():
        raise BadImage(f"field {min(missing)} is missing")
    return found


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise BadImage("a field that should be a number is none")
    return value


def _inner(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise BadImage("a field that should be a record is a number")
    return value


def _framed(record: bytes) -> bytes:
    return len(record).to_bytes(4, "little") + record


def _field(number: int, value: int) -> bytes:
    out = bytearray([number << 3])
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
