"""Prepared capsules: unpacked once, ready to be restored any number of times.

    <state root>/prepared/<capsule hex>/prepared.json    what every file was when it was proved
    <state root>/prepared/<capsule hex>/process/...      process images, as CRIU reads them
    <state root>/prepared/<capsule hex>/...              residual, manifests, acceptance, cache seeds

Unpacking proves every byte and costs about a second a gigabyte; `prepared.json` remembers the device, inode, size
and modification time of each file then, and is part of the folder that is renamed into place at the end. While all
of them are still what they were, a restore starts at once, at the price of one lstat a file. Anything
else, a missing or a touched file, an exchanged folder, an unreadable record, and the folder is thrown away and
unpacked again. Nothing may write below it but validation records.

A residual is read by the engine's process, which knows nothing of capsules. So it gets a validation record too, as a
pack has one, and a wake need not hash it.

One process unpacks a capsule at a time; what a killed one left is removed by the next.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from coldsnap.capsule.aside import folder_aside, remove_asides, throw_away, write_file
from coldsnap.capsule.index import CapsuleIndex, path_fault
from coldsnap.capsule.layers import Progress
from coldsnap.capsule.layout import DOCUMENT_LIMIT_BYTES
from coldsnap.capsule.opened import open_capsule
from coldsnap.capsule.roles import RESIDUAL
from coldsnap.capsule.unpack import Expected, check_expected, unpack_into
from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.names import Items
from coldsnap.core.parsing import Record, parse_document
from coldsnap.core.points import reached
from coldsnap.core.validation import Evidence
from coldsnap.errors import HostError, InvalidDocument
from coldsnap.store.admission import remember
from coldsnap.store.documents import read_private
from coldsnap.store.locks import hold
from coldsnap.store.stateroot import StateRoot

__all__ = [
    "PROCESS_FOLDER",
    "RECORD_NAME",
    "Prepared",
    "PreparedFile",
    "PreparedRecord",
    "are_proved",
    "ensure_prepared",
    "is_prepared",
]

RECORD_NAME = "prepared.json"
PROCESS_FOLDER = "process"
LOCK_DEADLINE_S = 3600.0

_CLOCK_TICK_NS = 20_000_000  # file times advance in steps of up to 10 ms


class PreparedFile(Record):
    """One file and its identity when it was proved."""

    path: str
    bytes: int = Field(ge=0)
    sha256: Digest
    device: int
    inode: int
    mtime_ns: int


class PreparedRecord(Record):
    """The document ``prepared.json``."""

    format: Literal[1] = 1
    kind: Literal["coldsnap-prepared-capsule"] = "coldsnap-prepared-capsule"
    capsule: Digest
    files: Items[PreparedFile]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A capsule ready to be restored. ``from_record``: it was there already and its record was believed."""

    path: Path
    files: tuple[PreparedFile, ...]
    from_record: bool

    @property
    def images_dir(self) -> Path:
        """The folder of process images, for CRIU."""
        return self.path / PROCESS_FOLDER

    @property
    def image_bytes(self) -> int:
        """The size of the process images."""
        return sum(file.bytes for file in self.files if file.path.startswith(f"{PROCESS_FOLDER}/"))


def ensure_prepared(
    state_root: StateRoot,
    layout_dir: Path,
    digest: Digest,
    expected: Expected,
    *,
    num_threads: int = 0,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
    deadline_s: float = LOCK_DEADLINE_S,
) -> Prepared:
    """The prepared folder of the capsule ``digest``, unpacked from ``layout_dir`` unless it is there and untouched.

    ``expected`` are (bytes, SHA-256) of all its files, by path. ``layout_dir`` is not read when the record
    is believed. Raises as `unpack_capsule`, and ResourceBusy when another process prepares the same capsule
    for longer than ``deadline_s`` seconds.
    """
    state_root.check(state_root.prepared)
    folder = state_root.prepared / digest.hex
    if (known := _believed(folder, digest, expected)) is not None:
        return known
    state_root.check(state_root.locks)
    lock = state_root.locks / f"prepared-{digest.hex}.lock"
    with hold(lock, deadline_s=deadline_s, purpose=f"preparing capsule {digest}"):
        if (known := _believed(folder, digest, expected)) is not None:
            return known
        remove_asides(folder)
        capsule = open_capsule(layout_dir, digest)
        check_expected(capsule.index, digest, expected)
        throw_away(folder)
        reached("prepare.cleared")
        with folder_aside(folder) as aside:
            unpack_into(layout_dir, capsule, aside, num_threads=num_threads, progress=progress, cancel=cancel)
            reached("prepare.unpacked")
            record = PreparedRecord(capsule=digest, files=_identities(aside, capsule.index))
            _wait_for_the_clock(record.files)
            _remember_residuals(aside, capsule.index)
            write_file(aside / RECORD_NAME, canonical_json(record.model_dump(mode="json")) + b"\n")
            reached("prepare.recorded")
    return Prepared(path=folder, files=record.files, from_record=False)


def is_prepared(state_root: StateRoot, digest: Digest, expected: Expected) -> bool:
    """Whether a restore could start at once: the folder is there and its record is believed."""
    return _believed(state_root.prepared / digest.hex, digest, expected) is not None


def are_proved(images_dir: Path, names: Iterable[str]) -> bool:
    """Whether every one of these process images is, untouched, what was proved when its capsule was prepared.

    False for a folder that no capsule was unpacked into, as a dump's own.
    """
    folder = images_dir.parent
    try:
        data = read_private(folder / RECORD_NAME, DOCUMENT_LIMIT_BYTES, only_ours=True)
        record = parse_document(PreparedRecord, data, subject=RECORD_NAME, limit_bytes=DOCUMENT_LIMIT_BYTES)
        files = {file.path: file for file in record.files}
        return all(
            path in files and _untouched(folder, files[path])
            for path in (f"{images_dir.name}/{name}" for name in names)
        )
    except (HostError, InvalidDocument, OSError):
        return False


def _believed(folder: Path, digest: Digest, expected: Expected) -> Prepared | None:
    """The folder, when everything about it is as recorded; None when it must be unpacked (again)."""
    try:
        data = read_private(folder / RECORD_NAME, DOCUMENT_LIMIT_BYTES, only_ours=True)
        record = parse_document(PreparedRecord, data, subject=RECORD_NAME, limit_bytes=DOCUMENT_LIMIT_BYTES)
        files = {file.path: (file.bytes, file.sha256) for file in record.files}
        if record.capsule != digest or files != expected:
            return None
        if not all(_untouched(folder, file) for file in record.files):
            return None
        if not all(_is_private_folder(folder / parent) for parent in _parents(record.files)):
            return None
    except (HostError, InvalidDocument, OSError):
        return None
    return Prepared(path=folder, files=record.files, from_record=True)


def _untouched(folder: Path, file: PreparedFile) -> bool:
    if path_fault(file.path) is not None:
        return False
    found = os.lstat(folder / file.path)
    now = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    return stat.S_ISREG(found.st_mode) and now == (file.device, file.inode, file.bytes, file.mtime_ns)


def _is_private_folder(folder: Path) -> bool:
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _parents(files: Iterable[PreparedFile]) -> set[str]:
    return {"", *(str(parent) for file in files for parent in Path(file.path).parents)}


def _identities(folder: Path, index: CapsuleIndex) -> tuple[PreparedFile, ...]:
    files = []
    for file in index.files:
        found = os.lstat(folder / file.path)
        files.append(
            PreparedFile(
                path=file.path,
                bytes=found.st_size,
                sha256=file.sha256,
                device=found.st_dev,
                inode=found.st_ino,
                mtime_ns=found.st_mtime_ns,
            )
        )
    return tuple(files)


def _remember_residuals(folder: Path, index: CapsuleIndex) -> None:
    """Leave the records that the workers believe. The caller has proved every file, and let the clock tick."""
    for file in index.files:
        if file.role == RESIDUAL:
            path = folder / file.path
            with path.open("rb", buffering=0) as residual:
                remember(path, residual.fileno(), file.sha256, Evidence.FULL_SHA256, provider="native")


def _wait_for_the_clock(files: Iterable[PreparedFile]) -> None:
    """A write in the same tick as our own last one would leave the time as it was; let the tick pass."""
    age_ns = time.time_ns() - max((file.mtime_ns for file in files), default=0)
    if 0 <= age_ns < _CLOCK_TICK_NS:
        time.sleep((_CLOCK_TICK_NS - age_ns) / 1e9)
