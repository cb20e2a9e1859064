"""Where a worker's files are inside its unit's capsule, and a unit's on its host. Imports next to nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Protocol

from coldsnap.capsule.roles import RESIDUAL

__all__ = ["NATIVE_MANIFEST", "RECOVERY_MANIFEST", "MountLike", "object_path", "outside"]


class MountLike(Protocol):
    """A mount of a request or of a recipe."""

    @property
    def source(self) -> str:
        """The place on the host."""

    @property
    def target(self) -> str:
        """The place in the unit."""


NATIVE_MANIFEST = "native-manifest"
RECOVERY_MANIFEST = "recovery-manifest"
_FILE_NAMES = {
    RESIDUAL: "weights.blob",
    NATIVE_MANIFEST: "native-manifest.json",
    RECOVERY_MANIFEST: "manifest.json",
}


def object_path(worker: str, role: str) -> str:
    """Where a worker's file of ``role`` is inside its unit's capsule."""
    return f"workers/{worker}/{_FILE_NAMES[role]}"


def outside(path: Path, mounts: Iterable[MountLike]) -> Path:
    """Where on this machine the unit's ``path`` is: below the source of its longest mount, or where it says."""
    best: tuple[int, Path] | None = None
    for mount in mounts:
        target = PurePosixPath(mount.target)
        if path.is_relative_to(target) and (best is None or len(target.parts) > best[0]):
            best = len(target.parts), Path(mount.source) / path.relative_to(target)
    return path if best is None else best[1]
