"""One store made of several: a near one that remembers, and a row of them that stand in for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from coldsnap.errors import ColdsnapError, HostError, RemoteError
from coldsnap.ship.base import Item, Kind, Outgoing, Sink, Source, Stored
from coldsnap.ship.faults import remote_error
from coldsnap.ship.limits import Limits, retried
from coldsnap.ship.pull import pulled

__all__ = ["Caching", "FallOver"]


class FallOver:
    """Sources, nearest first. The first that has an object gives it; one that fails is left aside for the next.

    ``on_fault`` hears of each that failed. When none has the object the first fault comes out, and only when nobody
    failed is it simply not there. A range that fails in the middle is not continued from another source here: who
    reads asks again, and is served by the next one then.
    """

    def __init__(
        self, sources: Sequence[Source], *, on_fault: Callable[[Source, ColdsnapError], None] | None = None
    ) -> None:
        self._sources = tuple(sources)
        self._failed: dict[tuple[str, Item], int] = {}
        self._on_fault = on_fault or (lambda source, error: None)

    @property
    def name(self) -> str:
        """All of them."""
        return ", else ".join(source.name for source in self._sources)

    @property
    def kinds(self) -> frozenset[Kind]:
        """What any of them can hold."""
        return frozenset().union(*(source.kinds for source in self._sources))

    def list(self) -> Iterator[Stored]:
        """The objects of all, each once."""
        seen: set[Item] = set()
        for source in self._sources:
            for stored in source.list():
                if stored.item not in seen:
                    seen.add(stored.item)
                    yield stored

    def stat(self, item: Item) -> Stored | None:
        """As the nearest that has it says."""
        first: ColdsnapError | None = None
        for source in self._sources:
            try:
                if (found := source.stat(item)) is not None:
                    return found
            except (RemoteError, HostError) as error:
                self._on_fault(source, error)
                first = first or error
        if first is not None:
            raise first
        return None

    def read(self, item: Item, offset: int, size: int) -> Iterator[memoryview]:
        """From the nearest that has it and has failed least with this object."""
        tried: ColdsnapError | None = None
        order = sorted(self._sources, key=lambda one: self._failed.get((one.name, item), 0))
        for source in order:
            begun = False
            try:
                if source.stat(item) is None:
                    continue
                for piece in source.read(item, offset, size):
                    begun = True
                    yield piece
            except (RemoteError, HostError) as error:
                self._failed[source.name, item] = self._failed.get((source.name, item), 0) + 1
                self._on_fault(source, error)
                tried = tried or error
                if begun:
                    raise
            else:
                return
        if tried is not None:
            raise tried
        raise remote_error("not_found", f"no {item} in {self.name}", place=self.name)


class Caching:
    """A far source, and a near sink that keeps what was read from it.

    The first read of an object brings all of it to the near store, proved, and every read is then the near store's.
    So several hosts that share a directory fetch a pack from a hub once. ``scratch`` is a folder on this host for
    objects on their way.
    """

    def __init__(self, far: Source, near: Sink, scratch: Path, *, limits: Limits | None = None) -> None:
        self._far = far
        self._near = near
        self._scratch = scratch
        self._limits = limits or Limits()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Both of them."""
        return f"{self._near.name}, kept from {self._far.name}"

    @property
    def kinds(self) -> frozenset[Kind]:
        """What both can hold."""
        return self._far.kinds & self._near.kinds

    def list(self) -> Iterator[Stored]:
        """What the far source has: what may be read."""
        return (stored for stored in self._far.list() if stored.item.kind in self.kinds)

    def stat(self, item: Item) -> Stored | None:
        """As the near store says, else the far source."""
        return self._near.stat(item) or self._far.stat(item)

    def read(self, item: Item, offset: int, size: int) -> Iterator[memoryview]:
        """From the near store, after the object was brought there."""
        with self._lock:
            if self._near.stat(item) is None:
                self._bring(item)
        yield from self._near.read(item, offset, size)

    def _bring(self, item: Item) -> None:
        found = retried(self._limits, lambda: self._far.stat(item))
        if found is None:
            raise remote_error("not_found", f"no {item} in {self.name}", place=self.name)
        with pulled(self._far, item, found.bytes, self._scratch, limits=self._limits) as staged:
            self._near.write([Outgoing(item=item, bytes=found.bytes, path=staged.path)])
