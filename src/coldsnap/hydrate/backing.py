"""What lies behind an open file: a disk, or memory, and then in pages of which size.

The kernel tells nobody through a descriptor whether a tmpfs hands out huge pages; the mount's options do. A file
on a mount that this process cannot see (a memfd, another namespace) counts as one on a disk: every path works for
it, only the best may not be chosen. Pure but for ``backing_of``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Backing", "MountEntry", "backing_of", "parse_mountinfo"]

_MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Backing:
    """``in_memory``: the file's home is memory, and no disk is behind it. ``huge_pages``: in large pages."""

    in_memory: bool
    huge_pages: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MountEntry:
    """One line of a mountinfo file: the device number files on it have, its type, its file system's options."""

    major: int
    minor: int
    type: str
    options: frozenset[str]

    @property
    def backing(self) -> Backing:
        """What files on this mount lie in."""
        in_memory = self.type in _MEMORY_TYPES
        asked = {"huge=always", "huge=within_size"} & self.options
        return Backing(in_memory=in_memory, huge_pages=in_memory and (self.type == "hugetlbfs" or bool(asked)))


def parse_mountinfo(text: str) -> Iterator[MountEntry]:
    """The mounts of a ``/proc/<pid>/mountinfo``. Lines of another shape are left out."""
    # 36 35 98:0 / /mnt rw,noatime shared:1 - tmpfs tmpfs rw,size=65536k,huge=always
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if not separator or len(left) < 6 or len(right) < 3:
            continue
        major, _, minor = left[2].partition(":")
        if major.isdecimal() and minor.isdecimal():
            yield MountEntry(major=int(major), minor=int(minor), type=right[0], options=frozenset(right[2].split(",")))


def backing_of(fd: int) -> Backing:
    """What lies behind an open file."""
    device = os.fstat(fd).st_dev
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # no /proc: every path works, only the best may not be chosen
        text = ""
    for mount in parse_mountinfo(text):
        if os.makedev(mount.major, mount.minor) == device:
            return mount.backing
    return Backing(in_memory=False, huge_pages=False)
