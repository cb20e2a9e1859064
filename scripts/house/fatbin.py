"""GPU code for other chips inside a compiled CUDA extension, overwritten with zeros.

A fat binary is a header and then entries, one a target: machine code (SASS) or PTX. The bytes of entries that the
wanted chip never loads become zeros in place: no size, offset or header changes, and zeros compress to nothing. What is
kept, of each fat binary: machine code of the wanted target; if there is none, of the highest lower minor of the same
major; if there is none either, the highest PTX not above the wanted target, from which the driver compiles.

Layout, little-endian. Header: magic u32, version u16 = 1, header bytes u16 = 16, bytes of the entries u64. Entry: kind
u16 (1 PTX, 2 SASS), version u16, header bytes u32, payload bytes u64, and at 28 the target u32, such as 90.
Worked example: 75, 80, 90 as SASS and 90 as PTX, wanted 90: the SASS for 90 stays, the other three are blanked.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from house.say import Trouble

_MAGIC = b"\x50\xed\x55\xba"
_HEAD = struct.Struct("<4sHHQ")
_ENTRY = struct.Struct("<HHIQ")
_TARGET_AT = 28
_LEAST_ENTRY_HEAD, _MOST_ENTRY_HEAD = 48, 256
_PTX, _SASS = 1, 2


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """Bytes of GPU code that were kept and that were overwritten."""

    kept_bytes: int
    blanked_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Code:
    kind: int
    target: int
    start: int
    bytes: int


def prune(data: bytearray, *, target: int, name: str) -> Pruned:
    """Blank the code in `data` that a GPU of compute capability `target`, such as 90, never loads.

    Raises Trouble, naming the file `name`, for an entry of a kind unknown here: nothing is guessed.
    """
    kept = blanked = 0
    for entries in _binaries(data, name):
        wanted = _wanted(entries, target)
        for entry in entries:
            if entry in wanted:
                kept += entry.bytes
            else:
                data[entry.start : entry.start + entry.bytes] = bytes(entry.bytes)
                blanked += entry.bytes
    return Pruned(kept_bytes=kept, blanked_bytes=blanked)


def _wanted(entries: Sequence[_Code], target: int) -> list[_Code]:
    sass = [one for one in entries if one.kind == _SASS and one.target <= target and one.target // 10 == target // 10]
    ptx = [one for one in entries if one.kind == _PTX and one.target <= target]
    usable = sass or ptx
    best = max((one.target for one in usable), default=None)
    return [one for one in usable if one.target == best]


def _binaries(data: bytearray, name: str) -> Iterator[list[_Code]]:
    """The entries of each fat binary. A magic number without a whole header behind it is data that looks like one."""
    at = 0
    while (at := data.find(_MAGIC, at)) >= 0:
        if at + _HEAD.size > len(data):
            return
        _, version, head_bytes, size = _HEAD.unpack_from(data, at)
        end = at + head_bytes + size
        if (version, head_bytes) != (1, _HEAD.size) or end > len(data):
            at += len(_MAGIC)
            continue
        yield list(_entries(data, at + head_bytes, end, name))
        at = end


def _entries(data: bytearray, at: int, end: int, name: str) -> Iterator[_Code]:
    while at + _LEAST_ENTRY_HEAD <= end:
        kind, _, head_bytes, size = _ENTRY.unpack_from(data, at)
        known = kind in (_PTX, _SASS) and _LEAST_ENTRY_HEAD <= head_bytes <= _MOST_ENTRY_HEAD
        if not known or at + head_bytes + size > end:
            raise Trouble(f"{name} has GPU code of an unknown form at {at:#x}", "leave it whole, or teach house/fatbin")
        (target,) = struct.unpack_from("<I", data, at + _TARGET_AT)
        yield _Code(kind=kind, target=target, start=at + head_bytes, bytes=size)
        at += head_bytes + size
