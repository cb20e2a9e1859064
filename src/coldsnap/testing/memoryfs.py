"""A ``MemoryFs`` of plain folders."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from coldsnap.core.copies import HostMemory
from coldsnap.errors import HostError

__all__ = ["FakeMemoryFs"]

GIB = 1 << 30


@dataclass(kw_only=True)
class FakeMemoryFs:
    """Remembers what is mounted. ``found`` is what it says of memory; ``cached``: of every file;
    ``refuse`` makes every mount fail.
    """

    found: HostMemory = field(default_factory=lambda: HostMemory(total_bytes=64 * GIB, available_bytes=48 * GIB))
    cached: float | None = 0.0
    refuse: str = ""
    mounted: dict[Path, int] = field(default_factory=dict)

    def memory(self) -> HostMemory:
        """What the test says."""
        return self.found

    def cached_fraction(self, path: Path) -> float | None:
        """What the test says."""
        return self.cached

    def is_mounted(self, folder: Path) -> bool:
        """Whether ``mount`` was called and ``unmount`` was not."""
        return folder in self.mounted

    def mount(self, folder: Path, *, num_bytes: int) -> None:
        """Note it. Raises HostError when told to, or when there is no folder."""
        if self.refuse:
            raise HostError(self.refuse, cure="the test says so")
        if not folder.is_dir():
            raise HostError(f"there is no {folder}", cure="make it first")
        self.mounted.setdefault(folder, num_bytes)

    def unmount(self, folder: Path) -> None:
        """Forget it, and remove the folder with what is in it."""
        self.mounted.pop(folder, None)
        shutil.rmtree(folder, ignore_errors=True)
