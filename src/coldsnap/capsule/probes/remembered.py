"""Passes proved before, and everything each depends on. Failures are not kept: the cure is often an install."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from coldsnap.capsule.criu import Criu
from coldsnap.capsule.identity import boot_id
from coldsnap.errors import HostError
from coldsnap.store.documents import read_private, try_replace

__all__ = ["CACHE_NAME", "Ground", "Passes", "ground_of"]

CACHE_NAME = "feature-probes.json"
_LIMIT_BYTES = 1 << 20


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Ground(_Record):
    """What a pass stands on: this boot, this CRIU, and (for a feature of GPUs) this driver and these devices."""

    boot_id: str
    criu_path: str = ""
    criu_version: str = ""
    criu_identity: tuple[int, int, int, int] = (0, 0, 0, 0)
    nvidia_driver: str | None = None
    gpus: tuple[str, ...] = ()


class _Pass(_Record):
    feature: str
    ground: Ground
    reason: str


class _Document(_Record):
    format: Literal[2] = 2
    kind: Literal["coldsnap-feature-passes"] = "coldsnap-feature-passes"
    passes: tuple[_Pass, ...] = ()


def ground_of(criu: Criu | None, *, nvidia_driver: str | None = None, gpus: tuple[str, ...] = ()) -> Ground:
    """This machine now, as far as a feature depends on it."""
    if criu is None:
        return Ground(boot_id=boot_id(), nvidia_driver=nvidia_driver, gpus=gpus)
    found = criu.path.stat()
    return Ground(
        boot_id=boot_id(),
        criu_path=str(criu.path),
        criu_version=criu.version_text,
        criu_identity=(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns),
        nvidia_driver=nvidia_driver,
        gpus=gpus,
    )


class Passes:
    """The file of passes in a private folder; without one nothing is remembered."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / CACHE_NAME if folder is not None else None

    def reason(self, feature: str, ground: Ground) -> str | None:
        """Why the feature passed on this ground, None when it was not proved on it."""
        found = next((one for one in self._read() if one.feature == feature and one.ground == ground), None)
        return found.reason if found is not None else None

    def remember(self, feature: str, ground: Ground, reason: str) -> None:
        """Keep a pass, in place of any earlier one of the feature."""
        if self._path is None:
            return
        others = tuple(one for one in self._read() if one.feature != feature and one.ground.boot_id == ground.boot_id)
        document = _Document(passes=(*others, _Pass(feature=feature, ground=ground, reason=reason)))
        try_replace(self._path, document.model_dump_json().encode())

    def _read(self) -> tuple[_Pass, ...]:
        if self._path is None:
            return ()
        try:
            return _Document.model_validate_json(read_private(self._path, _LIMIT_BYTES)).passes
        except (HostError, ValidationError):
            return ()
