"""File systems in memory for copies of packs, how much memory this machine has for them, and what is in its cache.

A contract: ``mount`` gives a private folder a tmpfs of huge pages, ``unmount`` takes it away with what it
holds, and both may be called again for what is done already. A unit sees only what was mounted before it came to be.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Protocol

from coldsnap.capsule import linux
from coldsnap.core.copies import HostMemory
from coldsnap.errors import HostError
from coldsnap.hydrate.choose import file_facts

__all__ = ["LinuxMemoryFs", "MemoryFs", "parse_meminfo", "shares_memory"]

_HUGE_PAGE_BYTES = 2 << 20
_RECORDS_BYTES = 8 << 20  # the last huge page, and the record beside the file
_MEMINFO = Path("/proc/meminfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_CGROUP = Path("/sys/fs/cgroup")
_UNIFIED = re.compile(r"^Model:.*\b(?:GB10|N1X?|Thor|Orin|Xavier|Tegra)\b", re.MULTILINE)


class MemoryFs(Protocol):
    """See the module's head. Calls may come from any thread."""

    def memory(self) -> HostMemory:
        """What there is now."""

    def cached_fraction(self, path: Path) -> float | None:
        """How much of a file is in the page cache, None when the kernel does not tell. Raises HostError."""

    def is_mounted(self, folder: Path) -> bool:
        """Whether ``folder`` is a file system of its own."""

    def mount(self, folder: Path, *, num_bytes: int) -> None:
        """Give the existing empty ``folder`` room for a file of ``num_bytes``. Raises HostError."""

    def unmount(self, folder: Path) -> None:
        """Undo ``mount``, and remove the folder. Raises HostError."""


class LinuxMemoryFs:
    """tmpfs with ``huge=always``. Needs root."""

    def memory(self) -> HostMemory:
        """From ``/proc/meminfo``, and no more than this process's cgroup allows."""
        total, available = parse_meminfo(_MEMINFO.read_text(encoding="ascii"))
        limit = _cgroup_room()
        if limit is not None:
            total, available = min(total, limit[0]), min(available, limit[1])
        return HostMemory(total_bytes=total, available_bytes=available, unified=shares_memory(_GPUS))

    def cached_fraction(self, path: Path) -> float | None:
        """As the kernel says (``cachestat``, Linux 6.5)."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                return file_facts(file.fileno(), [(0, size)], wanted_bytes=size).cached_fraction
        except OSError as error:
            raise HostError(f"{path} cannot be read: {error.strerror}", cure="look what became of it") from error

    def is_mounted(self, folder: Path) -> bool:
        """Whether ``folder`` is a file system of its own."""
        return os.path.ismount(folder)

    def mount(self, folder: Path, *, num_bytes: int) -> None:
        """A private tmpfs that holds ``num_bytes`` and a record. Raises HostError."""
        if self.is_mounted(folder):
            return
        size = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES + _RECORDS_BYTES
        try:
            linux.mount_tmpfs(str(folder), size_bytes=size, mode=0o700, huge=True)
        except OSError as error:
            raise HostError(
                f"no memory file system with huge pages at {folder}: {error.strerror}",
                cure="run as root on a kernel with transparent huge pages, or restore without --stage",
                facts={"path": str(folder), "errno": error.errno},
            ) from error

    def unmount(self, folder: Path) -> None:
        """Take it away; running units keep an empty one until they end. Raises HostError."""
        try:
            if self.is_mounted(folder):
                linux.unmount(str(folder))
            folder.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            raise HostError(f"{folder} could not be taken away: {error.strerror}", cure="look what uses it") from error


def parse_meminfo(text: str) -> tuple[int, int]:
    """(total, available) bytes of a ``/proc/meminfo``. Raises HostError for another text."""
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", text, re.MULTILINE))
    if found.keys() != {"MemTotal", "MemAvailable"}:
        raise HostError("/proc/meminfo says neither MemTotal nor MemAvailable", cure="restore without --stage")
    return int(found["MemTotal"]) * 1024, int(found["MemAvailable"]) * 1024


def shares_memory(gpus: Path) -> bool:
    """Whether an NVIDIA device here has no memory of its own, by the model names below ``/proc/driver/nvidia/gpus``."""
    for information in gpus.glob("*/information"):
        try:
            if _UNIFIED.search(information.read_text(encoding="utf-8", errors="replace")):
                return True
        except OSError:
            continue
    return False


def _cgroup_room() -> tuple[int, int] | None:
    """(limit, what is left of it) of the nearest cgroup that has one, None without."""
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="ascii")
        place = next(line.split("::", 1)[1] for line in own.splitlines() if line.startswith("0::"))
        for folder in (one := _CGROUP / place.lstrip("/"), *one.parents):
            if folder == _CGROUP.parent:
                return None
            limit = folder / "memory.max"
            if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
                used = int((folder / "memory.current").read_text(encoding="ascii"))
                kept = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                free = int(text) - used + (int(kept[1]) if kept else 0)
                return int(text), max(0, free)
    except (OSError, StopIteration, ValueError):
        return None
    return None
