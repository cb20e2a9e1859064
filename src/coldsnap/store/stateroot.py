"""The state root: one private folder that holds everything coldsnap keeps on a host.

    <state root>/
      model-payloads/sha256/<hex>.pack                           packs, named by their digest
      model-payloads/sha256/<hex>.pack.coldsnap-validation.json  proofs of them
      artifacts/ capsules/ prepared/ overlays/ services/ receipts/ failures/ kept by the rooms that write them
      locks/ staging/ quarantine/                                lock files, files on their way, damaged objects
      in-memory/<hex>/<hex>.pack                                 copies of packs, each on a memory file system
      roots/<hex>/                                               unpacked images, which units with one have as root

Whoever can write here can put bytes into a running engine. So the root and its own folders must be real
folders, ours, and closed to other users; that is checked when the root is opened and again when a payload is.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coldsnap.errors import UnsafePath, UsageError
from coldsnap.store.faults import translated
from coldsnap.store.locks import hold
from coldsnap.store.staging import sync_folder

__all__ = ["FOLDERS", "StateRoot"]

FOLDERS = (
    "model-payloads",
    "model-payloads/sha256",
    "artifacts",
    "capsules",
    "prepared",
    "overlays",
    "services",
    "receipts",
    "failures",
    "locks",
    "staging",
    "quarantine",
)
_USE_LOCK = "in-use.lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRoot:
    """A checked state root. Get one with :meth:`open`."""

    path: Path

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> StateRoot:
        """Check the root and its folders, and make what is missing when ``create``.

        Raises UnsafePath for a root or folder that is a link, not ours, open to other users, or on another file
        system than the root; UsageError when something is missing and ``create`` is false.
        """
        path = path.parent.resolve() / path.name  # a link on the way is fine, the root itself must be none
        if create:
            with translated("create", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                _make(path)
        root = cls(path=path)
        device = _check(path).st_dev
        _check_ancestors(path)
        for name in FOLDERS:
            folder = path / name
            if create:
                with translated("create", folder):
                    _make(folder)
            if _check(folder).st_dev != device:
                message = f"{folder} is on another file system than {path}: a file could not be renamed into it"
                cure = "mount one file system for the whole state root"
                raise UnsafePath(message, cure=cure, facts={"path": str(folder)})
        return root

    @property
    def payloads(self) -> Path:
        """Packs by digest."""
        return self.path / "model-payloads" / "sha256"

    @property
    def artifacts(self) -> Path:
        """Records of the artifacts that this host keeps files for."""
        return self.path / "artifacts"

    @property
    def capsules(self) -> Path:
        """Capsules kept on this host."""
        return self.path / "capsules"

    @property
    def prepared(self) -> Path:
        """Capsules unpacked and ready to restore, by digest."""
        return self.path / "prepared"

    @property
    def overlays(self) -> Path:
        """Overlays of artifacts, made on this machine for this machine."""
        return self.path / "overlays"

    @property
    def failures(self) -> Path:
        """Records of artifacts whose restores failed here."""
        return self.path / "failures"

    @property
    def services(self) -> Path:
        """Records of live services."""
        return self.path / "services"

    @property
    def receipts(self) -> Path:
        """Receipts of operations."""
        return self.path / "receipts"

    @property
    def locks(self) -> Path:
        """Lock files."""
        return self.path / "locks"

    @property
    def staging(self) -> Path:
        """Files on their way."""
        return self.path / "staging"

    @property
    def in_memory(self) -> Path:
        """Copies of packs in memory; missing until one is made."""
        return self.path / "in-memory"

    def make_in_memory(self, name: str) -> Path:
        """The private folder ``name`` below :attr:`in_memory`, made when missing. Raises UnsafePath."""
        for folder in (self.in_memory, self.in_memory / name):
            with translated("create", folder):
                _make(folder)
            _check(folder)
        return self.in_memory / name

    @property
    def roots(self) -> Path:
        """Unpacked images by the digest of their manifest; missing until one is made."""
        return self.path / "roots"

    def make_roots(self) -> None:
        """Make :attr:`roots` when it is missing. Raises UnsafePath."""
        with translated("create", self.roots):
            _make(self.roots)
        _check(self.roots)

    @property
    def quarantine(self) -> Path:
        """Damaged objects, moved out of the way."""
        return self.path / "quarantine"

    def check(self, folder: Path) -> None:
        """Check ``folder``, one of the root's own, and everything between it and the root again. Raises UnsafePath."""
        for place in (self.path, *reversed(folder.relative_to(self.path).parents[:-1])):
            _check(self.path / place)
        _check(folder)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep gc from removing anything while an operation runs. Any number of operations at a time.

        Raises ResourceBusy when gc is running.
        """
        with hold(self.locks / _USE_LOCK, deadline_s=60.0, purpose="a sweep of the state root", shared=True):
            yield

    @contextmanager
    def not_in_use(self, *, deadline_s: float = 0.0) -> Iterator[None]:
        """Keep every operation out while gc runs. Raises ResourceBusy when one still runs after ``deadline_s``."""
        with hold(self.locks / _USE_LOCK, deadline_s=deadline_s, purpose="an operation on this state root"):
            yield


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    sync_folder(folder.parent)


def _check(folder: Path) -> os.stat_result:
    try:
        found = folder.lstat()
    except FileNotFoundError as error:
        message = f"{folder} does not exist, so this is no state root"
        raise UsageError(message, cure="check --state-root", facts={"path": str(folder)}) from error
    facts = {"path": str(folder), "mode": f"{stat.S_IMODE(found.st_mode):#o}", "owner": found.st_uid}
    if stat.S_ISLNK(found.st_mode):
        cure = "name the folder the link leads to, or put a real folder there"
        raise UnsafePath(f"{folder} is a link", cure=cure, facts=facts)
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafePath(f"{folder} is not a folder", cure="move it away, or choose another --state-root", facts=facts)
    if found.st_uid != os.geteuid():
        cure = f"run as user {found.st_uid}, or choose another --state-root"
        raise UnsafePath(f"{folder} belongs to user {found.st_uid}, not to us", cure=cure, facts=facts)
    if found.st_mode & 0o022:
        message = f"{folder} can be changed by other users (mode {facts['mode']}), who could replace weights"
        cure = f"chmod go-w {folder}, if you trust what it holds now"
        raise UnsafePath(message, cure=cure, facts=facts)
    return found


def _check_ancestors(path: Path) -> None:
    for folder in path.parents:
        mode = folder.stat().st_mode
        if mode & 0o002 and not mode & stat.S_ISVTX:
            message = f"{folder} lets every user rename what it holds, so {path} could be exchanged"
            cure = f"chmod o-w {folder} (or chmod +t), or choose another --state-root"
            raise UnsafePath(message, cure=cure, facts={"path": str(folder)})
