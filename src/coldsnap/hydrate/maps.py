"""What is mapped where in this process: ``/proc/self/maps`` as records, and questions about ranges.

Pure but for ``read_maps``. Neighbouring anonymous mappings with equal rights are merged by the kernel,
so a range of ours may be a part of one entry, or several: never compare entries, ask about coverage.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MapEntry", "holes", "overlapping", "parse_maps", "read_maps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MapEntry:
    """One line: ``[start, end)``, rights such as ``rw-p``, and the file or label behind it ("" if none)."""

    start: int
    end: int
    rights: str
    inode: int
    name: str

    @property
    def anonymous(self) -> bool:
        """Private memory with no file behind it."""
        return self.inode == 0 and self.rights.endswith("p") and (not self.name or self.name.startswith("[anon:"))

    def __str__(self) -> str:
        return f"0x{self.start:x}-0x{self.end:x} {self.rights} {self.name or '(anonymous)'}"


def parse_maps(text: str) -> tuple[MapEntry, ...]:
    """Parse the text of a ``/proc/<pid>/maps``, in address order."""
    return tuple(_parse_line(line) for line in text.splitlines())


def _parse_line(line: str) -> MapEntry:
    # 7f0c8000-7f0d0000 rw-p 00000000 00:00 0      [heap]
    parts = line.split(maxsplit=5)
    start, _, end = parts[0].partition("-")
    return MapEntry(
        start=int(start, 16),
        end=int(end, 16),
        rights=parts[1],
        inode=int(parts[4]),
        name=parts[5] if len(parts) > 5 else "",
    )


def read_maps() -> tuple[MapEntry, ...]:
    """The mappings of this process, now."""
    return parse_maps(Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape"))


def overlapping(entries: Sequence[MapEntry], start: int, end: int) -> tuple[MapEntry, ...]:
    """The entries that share a byte with ``[start, end)``. ``entries`` in address order."""
    first = bisect_right(entries, start, key=lambda entry: entry.end)
    return tuple(entries[first : bisect_left(entries, end, key=lambda entry: entry.start)])


def holes(entries: Sequence[MapEntry], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts ``[a, b)`` of ``[start, end)`` where nothing is mapped. ``entries`` in address order."""
    for entry in overlapping(entries, start, end):
        if start < entry.start:
            yield start, entry.start
        start = entry.end
    if start < end:
        yield start, end
