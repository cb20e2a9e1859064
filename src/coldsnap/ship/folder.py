"""Stores that are folders of files: what a plain directory and an image layout have in common.

A file is written under a temporary name of its own folder, hashed, synced and renamed; so no name ever leads to half
an object, on any POSIX file system, a network one included.
"""

from __future__ import annotations

import os
import stat
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

from coldsnap.ship.base import PIECE_BYTES, Item, Kind, Outgoing, Progress, Stored, Tally, Written
from coldsnap.ship.faults import remote_error
from coldsnap.ship.limits import stop_if_cancelled
from coldsnap.ship.local import LocalFile
from coldsnap.store.faults import host_error, translated
from coldsnap.store.staging import remove_leftovers, stage_file, sync_folder, write_all

__all__ = ["FolderStore"]


class FolderStore:
    """Reads and writes objects at the paths that ``path`` gives."""

    kinds: frozenset[Kind]

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.folder)

    @abstractmethod
    def path(self, item: Item) -> Path:
        """Where an object is or would be; follows from the item alone."""

    def stat(self, item: Item) -> Stored | None:
        """A regular file at the item's path."""
        if item.kind not in self.kinds:
            return None
        try:
            found = self.path(item).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise host_error(error, "look up", self.path(item)) from error
        return Stored(item=item, bytes=found.st_size) if stat.S_ISREG(found.st_mode) else None

    def read(self, item: Item, offset: int, size: int) -> Iterator[memoryview]:
        """From the file, opened without following a link."""
        path = self.path(item)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise remote_error("not_found", f"{self.name} has no {item}", place=self.name) from error
        except OSError as error:
            raise host_error(error, "open", path) from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise remote_error("not_found", f"{path} is no regular file", place=self.name)
            yield from self._pieces(fd, item, offset, size)
        finally:
            os.close(fd)

    def _pieces(self, fd: int, item: Item, offset: int, size: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(PIECE_BYTES, max(size, 1))))
        end = offset + size
        while offset < end:
            with translated("read", self.path(item)):
                count = os.preadv(fd, [buffer[: end - offset]], offset)
            if count == 0:
                message = f"{self.path(item)} ends at byte {offset}, and {end} were expected"
                raise remote_error("wrong_length", message, place=self.name)
            offset += count
            yield buffer[:count]

    def write(
        self,
        objects: Sequence[Outgoing],
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> Written:
        """See ``base.py``."""
        tally = Tally()
        advance = progress or (lambda num_bytes: None)
        for one in objects:
            stop_if_cancelled(cancel)
            if not tally.is_there(one, self.stat(one.item), advance, place=self.name, where=str(self.path(one.item))):
                self._copy(one, advance, cancel)
                tally.sent.append(one)
            self._written(one)
        return tally.written()

    def _copy(self, one: Outgoing, progress: Progress, cancel: threading.Event | None) -> None:
        path = self.path(one.item)
        with translated("create", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent, stem=f".{path.name}")
        with LocalFile(one) as file, stage_file(path.parent, one.bytes, stem=f".{path.name}") as staged:
            offset = 0
            for piece in file.pieces(0, one.bytes):
                stop_if_cancelled(cancel)
                with translated("write", staged.path):
                    write_all(staged.fd, piece, offset)
                offset += len(piece)
                progress(len(piece))
            file.prove()
            with translated("write", path):
                os.fsync(staged.fd)
                staged.path.rename(path)
        sync_folder(path.parent)

    def _written(self, one: Outgoing) -> None:
        """What else is to be done when an object is there."""

    def _files(self, folder: Path) -> Iterator[Path]:
        """Regular files of a folder, temporary ones aside; none when there is no folder."""
        try:
            names = sorted(folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from (
            one for one in names if not one.name.endswith(".partial") and one.is_file() and not one.is_symlink()
        )
