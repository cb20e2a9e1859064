"""Memory that lies together in a process and apart in its images: put together again, for whoever searches it.

A run of pages that is moved out of CRIU's images may be cut, and its parts stand far from each other and from the
pages that stay. Something that is looked for byte by byte, a secret, could lie across such a cut and be in no file.
So what is on both sides of every cut is read out, ``AROUND_BYTES`` each way, longer than any token or key.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from coldsnap.capsule.criuimages import BadImage, PageMap, read_pagemap
from coldsnap.capsule.dumped import read_dumped_unit
from coldsnap.errors import IntegrityError

__all__ = ["AROUND_BYTES", "Segment", "cuts", "memory_seams"]

AROUND_BYTES: Final = 16 * 1024
_BETWEEN: Final = bytes(64)  # no token or key goes on over it


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Memory at ``address`` that lies at ``offset`` of the file ``name``."""

    address: int
    size: int
    name: str
    offset: int

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.address + self.size


def memory_seams(images_dir: Path) -> bytes:
    """What lies around every cut of the dumped memory in a folder, one after the other, with zeros between.

    Empty when no memory was moved. Raises IntegrityError for a folder that is no whole dump, OSError.
    """
    if not any(images_dir.glob("runs-*.bin")):
        return b""
    parts: list[bytes] = []
    with ExitStack() as stack:
        files: dict[str, int] = {}

        def read(name: str, offset: int, size: int) -> bytes:
            if name not in files:
                files[name] = stack.enter_context((images_dir / name).open("rb")).fileno()
            return os.pread(files[name], size, offset)

        for moved in read_dumped_unit(images_dir).memory:
            pagemap = _pagemap(images_dir / f"pagemap-{moved.pid}.img")
            staying = ((run.address, run.size) for run in pagemap.runs)
            segments = [
                *_segments(f"pages-{pagemap.pages_id}.img", staying),
                *_segments(moved.name, moved.pieces),
            ]
            for cut in cuts(segments):
                parts.extend(read(*piece) for piece in cut)
                parts.append(_BETWEEN)
    return b"".join(parts)


def _pagemap(path: Path) -> PageMap:
    try:
        return read_pagemap(path.read_bytes())
    except BadImage as error:
        raise IntegrityError(f"the process image {path} is damaged: {error}", cure="capture again") from error


def cuts(segments: Iterable[Segment]) -> Iterator[list[tuple[str, int, int]]]:
    """For every cut, what to read: (file, offset, size), in the order of memory."""
    ordered = sorted(segments, key=lambda segment: segment.address)
    for number, (left, right) in enumerate(pairwise(ordered)):
        if left.end != right.address or (left.name, left.offset + left.size) == (right.name, right.offset):
            continue
        yield [*_before(ordered, number), *_after(ordered, number + 1)]


def _before(ordered: Sequence[Segment], number: int) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    wanted = AROUND_BYTES
    while wanted:
        segment = ordered[number]
        size = min(wanted, segment.size)
        found.insert(0, (segment.name, segment.offset + segment.size - size, size))
        wanted -= size
        if not number or ordered[number - 1].end != segment.address:
            break
        number -= 1
    return found


def _after(ordered: Sequence[Segment], number: int) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    wanted = AROUND_BYTES
    while wanted:
        segment = ordered[number]
        size = min(wanted, segment.size)
        found.append((segment.name, segment.offset, size))
        wanted -= size
        number += 1
        if number == len(ordered) or ordered[number].address != segment.end:
            break
    return found


def _segments(name: str, pieces: Iterable[tuple[int, int]]) -> Iterator[Segment]:
    offset = 0
    for address, size in pieces:
        yield Segment(address=address, size=size, name=name, offset=offset)
        offset += size
