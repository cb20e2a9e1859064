"""What may go from a state root: found by name and by who refers to it. Nothing is changed here.

Names that coldsnap does not make are told to the caller and are never garbage. What is looked at may vanish meanwhile:
a plan is made while others work, and another sweep may be one.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from coldsnap.core.validation import VALIDATION_SUFFIX
from coldsnap.store.faults import translated
from coldsnap.store.locks import try_hold
from coldsnap.store.payloads import PACK_SUFFIX
from coldsnap.store.staging import PARTIAL_SUFFIX, leftovers
from coldsnap.store.stateroot import FOLDERS, StateRoot

__all__ = ["GcItem", "find_garbage"]

_PACK_NAME = re.compile(r"([0-9a-f]{64})" + re.escape(PACK_SUFFIX))
_RECORD_NAME = re.compile(r"([0-9a-f]{64})" + re.escape(PACK_SUFFIX + VALIDATION_SUFFIX))
_LOCK_NAME = re.compile(r"([a-z]+-|)([0-9a-f]{32}|[0-9a-f]{64})(?:\.writer)?\.lock")
_UPLOAD_NAME = re.compile(r"upload-[0-9a-f]{32}\.json")
_HEX64 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class GcItem:
    """Something that may go: a file or folder, the bytes it frees, and why nobody needs it."""

    kind: str
    path: Path
    bytes: int
    reason: str


def find_garbage(
    root: StateRoot,
    *,
    packs: Collection[str],
    capsules: Collection[str],
    roots: Collection[str],
    unknown: list[Path],
    quiet: bool,
) -> Iterator[GcItem]:
    """Everything that may go, where ``packs``, ``capsules`` and ``roots`` are the digests in hex that somebody needs.

    ``unknown`` gets the names that are not ours. ``quiet``: no operation runs, so what looks left over is that.
    """
    yield from _payload_garbage(root, packs, unknown)
    yield from _capsule_garbage("capsule", root.capsules, capsules, unknown, quiet=quiet)
    yield from _capsule_garbage("prepared", root.prepared, capsules, unknown, quiet=quiet)
    if root.roots.is_dir():
        yield from _capsule_garbage("root", root.roots, roots, unknown, quiet=quiet)
    yield from _partial_files(root)
    if quiet:
        yield from _uploads(root)
    yield from _quarantined(root)
    yield from _lock_files(root)


def _payload_garbage(root: StateRoot, packs: Collection[str], unknown: list[Path]) -> Iterator[GcItem]:
    names = _names(root.payloads)
    for name in names:
        path = root.payloads / name
        if (match := _PACK_NAME.fullmatch(name)) is not None:
            if match[1] not in packs:
                yield GcItem(kind="pack", path=path, bytes=_file_bytes(path), reason="no artifact or service names it")
        elif (match := _RECORD_NAME.fullmatch(name)) is not None:
            if f"{match[1]}{PACK_SUFFIX}" not in names:
                yield GcItem(kind="record", path=path, bytes=_file_bytes(path), reason="its pack is gone")
        elif not name.endswith(PARTIAL_SUFFIX):
            unknown.append(path)


def _capsule_garbage(
    kind: str, folder: Path, capsules: Collection[str], unknown: list[Path], *, quiet: bool
) -> Iterator[GcItem]:
    """Folders named by a capsule's digest that nobody refers to: image layouts, or unpacked ones."""
    for name in _names(folder):
        path = folder / name
        if not stat.S_ISDIR(_mode(path)):
            continue
        if name.endswith(PARTIAL_SUFFIX):
            if quiet:
                yield GcItem(kind="partial", path=path, bytes=_tree_bytes(path), reason="its writer is gone")
        elif _HEX64.fullmatch(name) is None:
            unknown.append(path)
        elif name not in capsules:
            reason = f"no artifact or service names its {'image' if kind == 'root' else 'capsule'}"
            yield GcItem(kind=kind, path=path, bytes=_tree_bytes(path), reason=reason)


def _partial_files(root: StateRoot) -> Iterator[GcItem]:
    for folder in (root.path, *(root.path / name for name in FOLDERS)):
        for path in leftovers(folder):
            if not stat.S_ISREG(_mode(path)):
                continue
            with try_hold(path) as free:
                if free:
                    yield GcItem(kind="partial", path=path, bytes=_file_bytes(path), reason="its writer is gone")


def _quarantined(root: StateRoot) -> Iterator[GcItem]:
    for name in _names(root.quarantine):
        if not name.endswith(PARTIAL_SUFFIX):
            path = root.quarantine / name
            yield GcItem(kind="quarantine", path=path, bytes=_file_bytes(path), reason="it was found damaged")


def _uploads(root: StateRoot) -> Iterator[GcItem]:
    """Where publications that ended early would go on."""
    for name in _names(root.staging):
        path = root.staging / name
        if _UPLOAD_NAME.fullmatch(name) is not None and stat.S_ISREG(_mode(path)):
            yield GcItem(kind="upload", path=path, bytes=_file_bytes(path), reason="its publication ended early")


def _lock_files(root: StateRoot) -> Iterator[GcItem]:
    """Locks that nobody holds, of what is not here (any more); what somebody publishes is not here."""
    for name in _names(root.locks):
        match, path = _LOCK_NAME.fullmatch(name), root.locks / name
        if match is None or not stat.S_ISREG(_mode(path)):
            continue
        guarded = {
            "": root.payloads / f"{match[2]}{PACK_SUFFIX}",
            "capsule-": root.capsules / match[2],
            "prepared-": root.prepared / match[2],
            "root-": root.roots / match[2],
            "failures-": root.failures / f"{match[2]}.json",
            "publish-": None,
            "fetch-": None,
        }
        if match[1] not in guarded or ((there := guarded[match[1]]) is not None and os.path.lexists(there)):
            continue
        with try_hold(path) as free:
            if free:
                reason = "nobody holds it, and what it guards is not here"
                yield GcItem(kind="lock", path=path, bytes=_file_bytes(path), reason=reason)


def _names(folder: Path) -> list[str]:
    with translated("list", folder):
        return sorted(one.name for one in folder.iterdir())


def _file_bytes(path: Path) -> int:
    """The space a file takes, which for a staged file is what was reserved for it."""
    found = _look(path)
    return found.st_blocks * 512 if found is not None else 0


def _tree_bytes(folder: Path) -> int:
    return sum(_file_bytes(Path(base) / name) for base, _, names in os.walk(folder) for name in names)


def _mode(path: Path) -> int:
    found = _look(path)
    return found.st_mode if found is not None else 0


def _look(path: Path) -> os.stat_result | None:
    """What is at ``path``; None when it is gone."""
    with translated("look at", path):
        try:
            return path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
