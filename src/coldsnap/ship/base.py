"""The interface of every store, whole. ``coldsnap.testing.ship_suite`` is its contract as tests.

Objects are named by an ``Item``: what it is, and the SHA-256 of its bytes. Where a store keeps it follows from the
item alone. Any number of threads may use a store at a time.

Postconditions. ``stat`` and ``list`` show only whole objects. ``read`` gives exactly the bytes that were asked for or
raises; what arrived before is good as far as it goes, but proved by nobody: the reader hashes. ``write`` returns when
every object is there, whole; what is there already is not sent again, so a repetition moves nothing. After a failed
or killed ``write`` any of its objects may be there and none is there in part.

Errors are ``RemoteError`` with a reason of ``faults.REASONS`` (a store elsewhere), ``HostError`` (a disk here), and
``PayloadRejected`` for a local file that is not what its item says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from coldsnap.core.digest import Digest
from coldsnap.ship.faults import remote_error

__all__ = ["PIECE_BYTES", "Item", "Kind", "Outgoing", "Progress", "Sink", "Source", "Stored", "Tally", "Written"]

PIECE_BYTES = 1 << 20
"""The largest piece that ``read`` yields, and what a transfer holds in memory a stream."""

Progress = Callable[[int], None]
"""Called with the number of bytes done since the last call; may be negative when some are sent again."""


class Kind(StrEnum):
    """What an object is: a pack, or a blob or the manifest of an image."""

    PACK = "pack"
    BLOB = "blob"
    MANIFEST = "manifest"


@dataclass(frozen=True, slots=True, order=True)
class Item:
    """The name of an object."""

    kind: Kind
    digest: Digest

    def __str__(self) -> str:
        return f"{self.kind} {self.digest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """An object of a store and its size."""

    item: Item
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """A local file to be written as ``item``; ``bytes`` is its size."""

    item: Item
    bytes: int
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a ``write`` did. ``sent`` were not there before; ``mounted`` were linked from beside, without their bytes.

    ``sent_bytes`` is their size; ``revision`` pins the state of the store that holds them all, empty for stores
    without revisions.
    """

    sent: tuple[Item, ...] = ()
    mounted: tuple[Item, ...] = ()
    present: tuple[Item, ...] = ()
    sent_bytes: int = 0
    revision: str = ""


class Source(Protocol):
    """A place to read from. See the module's head."""

    @property
    def name(self) -> str:
        """The place for people, without credentials."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """What it can hold; everything else it does not have."""

    def list(self) -> Iterator[Stored]:
        """Every object it is known to hold, each once, in any order."""

    def stat(self, item: Item) -> Stored | None:
        """The object, or None when it is not there."""

    def read(self, item: Item, offset: int, size: int) -> Iterator[memoryview]:
        """``size`` bytes from ``offset`` in pieces of at most ``PIECE_BYTES``, each good until the next is asked for.

        One attempt: who reads tries again, from where it came to.
        """


class Sink(Source, Protocol):
    """A place to write to as well."""

    def write(
        self,
        objects: Sequence[Outgoing],
        *,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> Written:
        """Make every object be there. Their order is kept: a manifest comes after the blobs that it names."""


@dataclass(slots=True)
class Tally:
    """Collects what a ``write`` does, for its ``Written``."""

    sent: list[Outgoing] = field(default_factory=list)
    mounted: list[Item] = field(default_factory=list)
    present: list[Item] = field(default_factory=list)

    def is_there(self, one: Outgoing, found: Stored | None, progress: Progress, *, place: str, where: str = "") -> bool:
        """Whether the store has ``one`` already, which is noted then; ``found`` is what its ``stat`` said.

        Raises RemoteError when it has something of another size there. ``where`` is closer than ``place``, for people.
        """
        if found is None:
            return False
        if found.bytes != one.bytes:
            message = f"{where or place} has {one.item} with {found.bytes} bytes instead of {one.bytes}"
            raise remote_error("wrong_length", message, place=place)
        self.present.append(one.item)
        progress(one.bytes)
        return True

    def written(self, revision: str = "") -> Written:
        """The result."""
        return Written(
            sent=tuple(one.item for one in self.sent),
            mounted=tuple(self.mounted),
            present=tuple(self.present),
            sent_bytes=sum(one.bytes for one in self.sent),
            revision=revision,
        )
