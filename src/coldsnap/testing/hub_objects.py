"""The test hub's LFS objects: files of a folder, each named by its SHA-256 once that is proved and not before.

Parts of one object are written where they belong in one file, and hashed on the way when they come in order, as those
of one client do: completing such an upload moves no byte. Otherwise the file is read once more.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldsnap.store.staging import write_all

__all__ = ["Objects"]


@dataclass
class _Parts:
    """An object that comes in parts. ``state`` is the hash of its first ``hashed`` bytes, None when nobody knows."""

    writers: int = 0
    entries: int = 0
    hashed: int = 0
    state: Any = None


class Objects:
    """Any number of threads may put the same object; the bytes of its name win."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._parts: dict[str, _Parts] = {}
        self._completing: dict[str, threading.Lock] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, oid: str) -> Path:
        """Where a whole object is."""
        return self.folder / oid

    def put(self, oid: str, pieces: Iterable[bytes | memoryview]) -> bool:
        """A whole object; False, and nothing kept, when its bytes are others."""
        aside = self._aside(oid)
        state = hashlib.sha256()
        with aside.open("wb", buffering=0) as out:
            for piece in pieces:
                state.update(piece)
                out.write(piece)
        return self._name(aside, oid, state.hexdigest())

    def put_part(self, oid: str, offset: int, pieces: Iterable[bytes | memoryview]) -> None:
        """Bytes of an object from ``offset`` on."""
        with self._writing(oid) as (fd, parts):
            with self._lock:
                alone, entry = parts.writers == 1, parts.entries
                state = hashlib.sha256() if offset == 0 else None
                if parts.state is not None and parts.hashed == offset:
                    state = parts.state.copy()
                if not alone or offset < parts.hashed:
                    parts.state = None
            for piece in pieces:
                if state is not None:
                    state.update(piece)
                write_all(fd, piece, offset)
                offset += len(piece)
            with self._lock:
                if state is not None and alone and parts.entries == entry:
                    parts.state, parts.hashed = state, offset

    def complete(self, oid: str) -> bool:
        """All parts are there: name the object; False when its bytes are others.

        One at a time for each object: while one is hashed, and has no name yet, a second writer may have put only its
        last parts into a new file, which is not the object.
        """
        with self._lock:
            turn = self._completing.setdefault(oid, threading.Lock())
        with turn:
            return self._complete(oid)

    def _complete(self, oid: str) -> bool:
        source, aside = self.folder / f"{oid}.parts", self._aside(oid)
        with self._lock:
            if self.path(oid).exists():
                source.unlink(missing_ok=True)
                return True
            if not source.exists():
                return False
            parts = self._parts.pop(oid, _Parts())
            if parts.writers:
                self._parts[oid] = parts
                shutil.copyfile(source, aside)
                parts = _Parts()
            else:
                source.rename(aside)
        if parts.state is not None and parts.hashed == aside.stat().st_size:
            return self._name(aside, oid, parts.state.hexdigest())
        with aside.open("rb") as file:
            return self._name(aside, oid, hashlib.file_digest(file, "sha256").hexdigest())

    @contextmanager
    def _writing(self, oid: str) -> Iterator[tuple[int, _Parts]]:
        with self._lock:
            parts = self._parts.setdefault(oid, _Parts())
            parts.writers += 1
            parts.entries += 1
            fd = os.open(self.folder / f"{oid}.parts", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield fd, parts
        finally:
            with self._lock:
                parts.writers -= 1
            os.close(fd)

    def _aside(self, oid: str) -> Path:
        return self.folder / f"{oid}.{threading.get_ident()}.partial"

    def _name(self, aside: Path, oid: str, found: str) -> bool:
        if found != oid:
            aside.unlink()
            return False
        aside.rename(self.path(oid))
        return True
