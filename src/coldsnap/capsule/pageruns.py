"""Which pages leave CRIU's images, and where they go: decisions only, over numbers.

CRIU restores memory in one thread, at 1.3 to 1.5 GB/s. So the large runs of a process's private memory are taken out of
``pages-<id>.img`` into a file of ours, ``runs-<pid>.bin``, and are put back by many threads (`pagerefill`). What goes:

- Ordinary private mappings that the process may write, anonymous or of a file, and of these every run of present
  pages of ``RUN_BYTES`` or more. Memory that is read-only comes back by CRIU, which writes before it protects; so do
  stacks that grow, huge-page mappings, and whatever has a status we do not know.
- No page that a thread shares with the kernel for restartable sequences: CRIU and the kernel write there last.

Pages that a child has in common with its parent since the fork go too, from both. CRIU would make the two share them
again, at its slowest: it reads the child's one page a call, to compare it with the parent's. We cannot, so each
restored tree costs that memory once more. Measured, with 512 MiB that two processes have in common: CRIU's one thread
works 1.01 s for the restore when they stay, less than 0.01 when they go, and all the threads of the refill together
0.6 and 1.6 s (medians, n = 6, two busy cores). So two cores win nothing, and many most of a second. It makes no
difference to CRIU which of the two has a page in its images: before it fills a child it takes away what the child
inherited and its pagemap does not name. Both have them in their files, as both had them in CRIU's images; to store them
once, with pieces of the child in its parent's file, would save disk and digests, but no time of a restore whose files
are proved.

Pages of zeros are nothing at all in an anonymous mapping: whole blocks of ``ZERO_BYTES`` of them are dropped. (In a
private mapping of a file a dropped page would show the file, so there they are pages like any other.)

No page of a process is stored twice and little is copied. The pages file itself becomes ``runs-<pid>.bin``: what stays
is copied out, in order, to a new pages file, the gaps are filled from the end, and the rest is cut off. An example, in
pages, with A to D moved, s staying and 0 dropped:

    before    s s A A A s B B 0 0 C C C D      14 pages
    staying   s s s                            the new pages file
    moved     C C A A A C B B D                every page once, in whatever order

Measured, with 295 MB of 306 MB moved: 0.03 to 0.04 s to look for zeros, 0.01 to 0.02 s for the copies, and 0.2 s of
one core for the digests, which therefore is what a dump takes longer.

``RUN_BYTES`` by measurement, on the image of a Transformers engine (306 MB in 637 runs): of its bytes are in runs of
1 MiB or more 74 %, 512 KiB 93 %, 256 KiB 97 % (119 runs), 64 KiB 97 % (128), 4 KiB 98 % (545). On that of a served vLLM
(1.45 GB, four processes), 46 MB stay: 29 of them in mappings of libraries that became read-only when they were
relocated, 17 in shorter runs, of which half are below 32 KiB; stacks have 0.4.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from coldsnap.capsule.criuimages import PAGE_BYTES, Mapping, PageMap, PageRun

__all__ = [
    "RUN_BYTES",
    "ZERO_BYTES",
    "Copy",
    "Layout",
    "Part",
    "Span",
    "lay_out",
    "private_parts",
    "remaining",
    "split_zeros",
    "without",
]

RUN_BYTES: Final = 256 * 1024
ZERO_BYTES: Final = 64 * 1024

Span: TypeAlias = tuple[int, int]
"""Addresses ``[start, end)``."""

_WRITE = 0x2
_PRIVATE, _GROWS_DOWN, _HUGE = 0x2, 0x100, 0x40000
_REGULAR, _HEAP, _OF_FILE, _ANONYMOUS = 0x1, 0x20, 0x40, 0x200


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Present pages without a hole, of one mapping: at ``address``, and at ``offset`` of the pages file."""

    address: int
    size: int
    offset: int
    anonymous: bool

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.address + self.size

    def cut(self, start: int, end: int) -> Part:
        """What lies in ``[start, end)``, which must be inside."""
        return replace(self, address=start, size=end - start, offset=self.offset + start - self.address)


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """``size`` bytes of the pages file, from one offset to another."""

    source: int
    target: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a pages file becomes a runs file of ``size`` bytes.

    ``staying``: (offset, size) to be copied out first; ``copies``: then, in any order; ``pieces``: (address, size) of
    what the runs file holds from its beginning on.
    """

    staying: tuple[tuple[int, int], ...]
    copies: tuple[Copy, ...]
    pieces: tuple[tuple[int, int], ...]
    size: int


def private_parts(pagemap: PageMap, mappings: Sequence[Mapping], kept: Iterable[Span] = ()) -> tuple[Part, ...]:
    """Every part of memory that may be moved, whatever its size, by address, but for the pages of ``kept``."""
    starts = [mapping.start for mapping in mappings]
    parts: list[Part] = []
    owner: Mapping | None = None
    offset = 0
    for run in pagemap.runs:
        address, end = run.address, run.address + run.size
        while address < end:
            mapping = mappings[max(0, bisect_right(starts, address) - 1)] if mappings else None
            inside = mapping is not None and mapping.start <= address < mapping.end
            stop = min(end, mapping.end) if mapping is not None and inside else end
            if mapping is not None and inside and _is_movable(mapping):
                if parts and owner is mapping and parts[-1].end == address:
                    parts[-1] = replace(parts[-1], size=parts[-1].size + stop - address)
                else:
                    anonymous = bool(mapping.status & _ANONYMOUS)
                    parts.append(Part(address=address, size=stop - address, offset=offset, anonymous=anonymous))
                owner = mapping
            offset += stop - address
            address = stop
    return without(parts, kept)


def _is_movable(mapping: Mapping) -> bool:
    status = mapping.status & ~_HEAP
    return (
        status in (_REGULAR | _ANONYMOUS, _REGULAR | _OF_FILE)
        and bool(mapping.protection & _WRITE)
        and bool(mapping.flags & _PRIVATE)
        and not mapping.flags & (_GROWS_DOWN | _HUGE)
        and mapping.start % PAGE_BYTES == mapping.end % PAGE_BYTES == 0
    )


def without(parts: Iterable[Part], spans: Iterable[Span]) -> tuple[Part, ...]:
    """The parts, less every page that any of the spans touches."""
    holes = _joined((start - start % PAGE_BYTES, end + -end % PAGE_BYTES) for start, end in spans if start < end)
    ends = [end for _, end in holes]
    left: list[Part] = []
    for part in parts:
        at = part.address
        for start, end in holes[bisect_right(ends, at) :]:
            if start >= part.end:
                break
            if at < start:
                left.append(part.cut(at, start))
            at = max(at, end)
        if at < part.end:
            left.append(part.cut(at, part.end))
    return tuple(left)


def _joined(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def split_zeros(part: Part, is_zero: Callable[[int, int], bool]) -> tuple[list[Part], list[Part]]:
    """(What holds something, what is dropped) of a part. ``is_zero`` is asked for (offset, size) of the pages file."""
    if not part.anonymous:
        return [part], []
    held: list[Part] = []
    zeros: list[Part] = []
    at = part.address
    for block in range(part.address + -part.address % ZERO_BYTES, part.end - ZERO_BYTES + 1, ZERO_BYTES):
        if is_zero(part.offset + block - part.address, ZERO_BYTES):
            if at < block:
                held.append(part.cut(at, block))
            zeros.append(part.cut(block, block + ZERO_BYTES))
            at = block + ZERO_BYTES
    if at < part.end:
        held.append(part.cut(at, part.end))
    return held, zeros


def remaining(pagemap: PageMap, gone: Iterable[Part]) -> PageMap:
    """The pagemap without the pages of ``gone``, which are some of its own."""
    left: list[PageRun] = []
    offset = 0
    leaving = sorted((part.offset, part.offset + part.size) for part in gone)
    ends = [end for _, end in leaving]
    for run in pagemap.runs:
        at, stop = offset, offset + run.size
        for start, end in [*leaving[bisect_right(ends, offset) :], (stop, stop)]:
            start, end = min(start, stop), min(end, stop)
            if at < start:
                address = run.address + at - offset
                left.append(replace(run, address=address, num_pages=(start - at) // PAGE_BYTES))
            at = max(at, end)
            if at >= stop:
                break
        offset = stop
    return PageMap(pages_id=pagemap.pages_id, runs=tuple(left))


def lay_out(num_bytes: int, moved: Sequence[Part], dropped: Sequence[Part]) -> Layout:
    """Make a runs file of a pages file of ``num_bytes``; every page of it is moved, dropped, or stays."""
    used = sorted((part.offset, part.size, part.address) for part in moved)
    size = sum(part.size for part in moved)
    gone = _joined((part.offset, part.offset + part.size) for part in (*moved, *dropped))
    staying = tuple((start, end - start) for start, end in _gaps(gone, num_bytes))
    gaps = _gaps(_joined((offset, offset + length) for offset, length, _ in used), size)
    placed = [(offset, min(length, size - offset), address) for offset, length, address in used if offset < size]
    copies: list[Copy] = []
    tail = deque(
        (max(offset, size), length - max(0, size - offset), address + max(0, size - offset))
        for offset, length, address in used
        if offset + length > size
    )
    for start, end in gaps:
        while start < end:
            source, length, address = tail.popleft()
            take = min(length, end - start)
            copies.append(Copy(source=source, target=start, size=take))
            placed.append((start, take, address))
            if take < length:
                tail.appendleft((source + take, length - take, address + take))
            start += take
    pieces = tuple((address, length) for _, length, address in sorted(placed))
    return Layout(staying=staying, copies=tuple(copies), pieces=pieces, size=size)


def _gaps(spans: Iterable[Span], end: int) -> list[Span]:
    """What of ``[0, end)`` is in none of the spans, which are by offset and joined."""
    gaps: list[Span] = []
    at = 0
    for start, stop in spans:
        if at < min(start, end):
            gaps.append((at, min(start, end)))
        at = max(at, stop)
    if at < end:
        gaps.append((at, end))
    return gaps
