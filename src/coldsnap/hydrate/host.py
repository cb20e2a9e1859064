"""Stable memory on the host: anonymous pages at fixed addresses.

Mapped, an allocation is ordinary zero-filled private memory. Unmapped, it is a ``PROT_NONE`` reservation
in the same place: it holds no page (so a dump of the process saves none), costs no memory, and keeps
the kernel from giving the range to anybody else. Going from one to the other is a single ``mmap`` over
our own range, so there is no moment at which the address is free.

``MAP_FIXED`` over a range that is not ours would destroy somebody's memory in silence. So the kernel's
own list of mappings is read before every change, and the change is made only where that list shows what
this object believes is there. That is also what makes the object trustworthy after a process was
dumped and restored: it does not remember being right, it looks again.

Huge pages: the first write to a page costs a fault and a clearing. On a 2-core Xeon VM (Linux 6.18), 1 GiB
read from a warm page cache into fresh memory by 2 threads ran at 4.3 GB/s with 4 KiB pages, 4.6 with
``MADV_POPULATE_WRITE`` before each read, 7.1 with ``MADV_HUGEPAGE`` and 6.8 with both. Hence huge pages,
every allocation at a multiple of 2 MiB, and no populating.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from types import TracebackType
from typing import Self

from coldsnap.core.extents import PAGE_BYTES, Allocation
from coldsnap.errors import OutOfSpace, ResourceBusy, UsageError
from coldsnap.hydrate import libc
from coldsnap.hydrate.maps import MapEntry, holes, overlapping, read_maps
from coldsnap.hydrate.memory import allocation_around

__all__ = ["DEFAULT_BASE", "HUGE_PAGE_BYTES", "HostMemory"]

DEFAULT_BASE = 0x5000_0000_0000
"""Below every place where Linux puts programs (from 2/3 of the 47-bit space) and libraries (its top)."""

HUGE_PAGE_BYTES = 2 * 1024 * 1024

_MAPPED = "rw-p"
_RESERVED = "---p"


class HostMemory:
    """``StableMemory`` in host memory; a context manager that releases at the end.

    ``base``: where the first allocation without an address goes, a multiple of 2 MiB. Two objects in one
    process need two bases. ``huge_pages``: ask for them; a kernel without them ignores it.
    """

    def __init__(self, *, base: int = DEFAULT_BASE, huge_pages: bool = True) -> None:
        if base <= 0 or base % HUGE_PAGE_BYTES:
            raise UsageError(
                f"base must be a positive multiple of {HUGE_PAGE_BYTES}, not 0x{base:x}", facts={"base": base}
            )
        self._base = base
        self._huge_pages = huge_pages
        self._lock = threading.RLock()
        self._allocations: tuple[Allocation, ...] = ()
        self._views: dict[int, memoryview] = {}  # by ptr; empty when unmapped
        self._mapped = True

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """Every allocation, by address."""
        return self._allocations

    @property
    def mapped(self) -> bool:
        """True when views can be had."""
        return self._mapped

    def reserve(self, size: int, *, tag: str, address: int | None = None) -> Allocation:
        """See ``StableMemory.reserve``. Without an address: the next multiple of 2 MiB above the others."""
        _require_pages("size", size)
        if address is not None:
            _require_pages("address", address)
        with self._lock:
            if not self._mapped:
                raise UsageError("memory is unmapped: nothing can be reserved now", cure="remap it first")
            ptr = self._next_address() if address is None else address
            allocation = Allocation(ptr=ptr, size=size, tag=tag)
            try:
                libc.map_anonymous(ptr, size, writable=True, replace=False)
            except OSError as error:
                raise _mapping_failed(error, allocation) from error
            self._make_usable(allocation)
            self._allocations = tuple(sorted((*self._allocations, allocation), key=lambda a: a.ptr))
            return allocation

    def view(self, ptr: int, size: int) -> memoryview:
        """See ``StableMemory.view``."""
        with self._lock:
            if not self._mapped:
                raise UsageError(f"memory is unmapped: no view of 0x{ptr:x}", cure="remap it first")
            allocation = allocation_around(self._allocations, ptr, size)
            start = ptr - allocation.ptr
            return self._views[allocation.ptr][start : start + size]

    def unmap(self) -> None:
        """See ``StableMemory.unmap``."""
        with self._lock:
            if not self._mapped or not self._allocations:
                return
            entries = read_maps()
            for allocation in self._allocations:
                _require_ours(entries, allocation, (_MAPPED, _RESERVED))
            for allocation in self._allocations:
                self._reserve_in_place(entries, allocation)
            self._views = {}
            self._mapped = False

    def remap(self) -> None:
        """See ``StableMemory.remap``."""
        with self._lock:
            if self._mapped:
                return
            entries = read_maps()
            for allocation in self._allocations:
                _require_ours(entries, allocation, (_RESERVED,))
            with contextlib.ExitStack() as undo:
                undo.callback(self._views.clear)
                for allocation in self._allocations:
                    self._reserve_in_place(entries, allocation)
                    undo.callback(_replace, allocation, writable=False)
                    _replace(allocation, writable=True)
                    self._make_usable(allocation)
                undo.pop_all()
            self._mapped = True

    def release(self) -> None:
        """See ``StableMemory.release``. Leaves alone what is not ours in the kernel's list."""
        with self._lock:
            entries = read_maps() if self._allocations else ()
            for allocation in self._allocations:
                end = allocation.ptr + allocation.size
                for entry in overlapping(entries, allocation.ptr, end):
                    if _looks_ours(entry, (_MAPPED, _RESERVED)):
                        start = max(entry.start, allocation.ptr)
                        libc.unmap(start, min(entry.end, end) - start)
            self._allocations, self._views = (), {}
            self._mapped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _next_address(self) -> int:
        ends = [a.ptr + a.size for a in self._allocations if a.ptr >= self._base]
        if not ends:
            return self._base
        # One huge page of nothing between neighbours: an overrun faults instead of spoiling the next.
        return -(-max(ends) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES

    def _make_usable(self, allocation: Allocation) -> None:
        if self._huge_pages:
            # EINVAL from a kernel built without huge pages: slower, and nothing else.
            with contextlib.suppress(OSError):
                libc.advise(allocation.ptr, allocation.size, libc.ADVICE_HUGE_PAGES)
        self._views[allocation.ptr] = libc.view_at(allocation.ptr, allocation.size)

    def _reserve_in_place(self, entries: tuple[MapEntry, ...], allocation: Allocation) -> None:
        """Turn our range into a reservation; holes in it are taken only if they are still holes."""
        for start, end in holes(entries, allocation.ptr, allocation.ptr + allocation.size):
            try:
                libc.map_anonymous(start, end - start, writable=False, replace=False)
            except OSError as error:
                raise _mapping_failed(error, allocation) from error
        _replace(allocation, writable=False)


def _replace(allocation: Allocation, *, writable: bool) -> None:
    try:
        libc.map_anonymous(allocation.ptr, allocation.size, writable=writable, replace=True)
    except OSError as error:
        raise _mapping_failed(error, allocation) from error


def _looks_ours(entry: MapEntry, rights: tuple[str, ...]) -> bool:
    return entry.anonymous and entry.rights in rights


def _require_ours(entries: tuple[MapEntry, ...], allocation: Allocation, rights: tuple[str, ...]) -> None:
    for entry in overlapping(entries, allocation.ptr, allocation.ptr + allocation.size):
        if not _looks_ours(entry, rights):
            raise _busy(allocation, entry)


def _busy(allocation: Allocation, entry: MapEntry | None) -> ResourceBusy:
    return ResourceBusy(
        f"0x{allocation.ptr:x}-0x{allocation.ptr + allocation.size:x} (allocation {allocation.tag!r}) is taken by "
        f"{entry or 'a mapping that has gone since'}",
        cure="free that range, or reserve at another address; an allocation never moves",
        facts={"ptr": allocation.ptr, "size": allocation.size, "tag": allocation.tag, "mapping": str(entry or "")},
    )


def _mapping_failed(error: OSError, allocation: Allocation) -> ResourceBusy | OutOfSpace | UsageError:
    facts = {"ptr": allocation.ptr, "size": allocation.size, "tag": allocation.tag, "errno": error.errno}
    what = f"{allocation.size} bytes at 0x{allocation.ptr:x} (allocation {allocation.tag!r})"
    if isinstance(error, FileExistsError):
        there = overlapping(read_maps(), allocation.ptr, allocation.ptr + allocation.size)
        return _busy(allocation, there[0] if there else None)
    if error.errno == errno.ENOMEM:
        return OutOfSpace(
            f"the kernel would not map {what}: out of memory, or of mappings",
            cure="free memory, or raise vm.overcommit_ratio or vm.max_map_count",
            facts=facts,
        )
    return UsageError(f"the kernel would not map {what}: {error.strerror}", cure="use another address", facts=facts)


def _require_pages(name: str, value: int) -> None:
    if value <= 0 or value % PAGE_BYTES:
        raise UsageError(
            f"{name} must be a positive multiple of {PAGE_BYTES}, not {value}",
            cure=f"round it to a multiple of {PAGE_BYTES}",
            facts={name: value},
        )
