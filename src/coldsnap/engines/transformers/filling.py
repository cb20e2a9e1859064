"""Bytes into their places in the arena, and the truth about each of them to the observer.

Nothing of the checkpoint goes through the heap on its way: files are read straight into place, or into a mapping
that is given back. A freed heap block would keep model bytes in the process, and they would land in its image.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

from coldsnap.engines.observer import Observer
from coldsnap.engines.transformers.arena import PADDING, Arena, Place, Tensors, bytes_at, over_memory
from coldsnap.engines.transformers.names import DTYPES, Assignment, Match
from coldsnap.errors import UserError
from coldsnap.hydrate.memory import DeviceMemory, StableMemory, host_addressable
from coldsnap.hydrate.transfer import ProvedSource, Segment, hydrate_file, read_chunks

__all__ = ["COMPUTED", "DERIVED", "Filling", "same_stored_bytes"]

COMPUTED = "computed when the model was built"
DERIVED = "derived from the checkpoint by the engine"
_MAX_THREADS = 8
_PROBE_BYTES = 64

S = TypeVar("S")
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Filling:
    """One model's way into the arena: `read`, `adopt` or `expect`, then `finish`."""

    def __init__(self, tensors: Tensors, arena: Arena, memory: StableMemory, observer: Observer) -> None:
        self._tensors = tensors
        self._arena = arena
        self._memory = memory
        self._observer = observer
        self._probes: dict[tuple[int, int], dict[bytes, list[int]]] = {}
        self._number = {name: index for index, names in enumerate(tensors.names) for name in names}

    def read(self, match: Match) -> None:
        """The short way: every saved tensor comes from its file, the others from the model as it was built."""
        left = set(self._arena.places)
        copies = [(one, place) for one in match.copies if (place := self._place(one)) is not None]
        with _opened(match.copies) as fds:
            if isinstance(self._memory, DeviceMemory):
                self._transfer(copies, fds, self._memory)
            else:
                host = host_addressable(self._memory)

                def copy(one: tuple[Assignment, Place]) -> None:
                    with host.view(one[1].ptr, one[1].size) as view:
                        _read_into(view, fds[one[0].file.name], one[0])

                _in_threads(copy, copies)
        for assignment, place in copies:
            left.discard(place.index)
            self._wrote(place.ptr, assignment, place)
        for assignment in match.casts:
            place = self._place(assignment)
            if place is not None:
                left.discard(place.index)
                self._over(place).copy_(_stored(assignment))
                reason = f"cast from {assignment.stored.dtype} to another number type"
                self._observer.unreplayable(place.ptr, place.size, reason)
        for index in sorted(left):
            self._copy_from_model(index)

    def expect(self, match: Match) -> None:
        """Tell the observer what `read` would do, and do none of it: the bytes come from elsewhere."""
        left = set(self._arena.places)
        for assignment in match.copies:
            place = self._place(assignment)
            if place is not None:
                left.discard(place.index)
                self._wrote(place.ptr, assignment, place)
        for index in sorted(left):
            place = self._arena.places[index]
            self._observer.unreplayable(place.ptr, place.size, DERIVED if index in self._tensors.saved else COMPUTED)

    def adopt(self, match: Match) -> None:
        """The long way: everything comes from the model that Transformers loaded, and is compared with the files."""
        for index in self._arena.places:
            self._over(self._arena.places[index]).copy_(self._tensors.tensors[index])
        pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for assignment, exact in zip(match.copies, _in_threads(self._is_copy, match.copies), strict=True):
            place = self._place(assignment)
            if place is not None and exact:
                pieces[place.index].append((place.ptr, place.size))
                self._wrote(place.ptr, assignment, place)
        for assignment in match.parts:
            place = self._place(assignment)
            if place is not None and (ptr := self._find_part(assignment, place, pieces[place.index])) is not None:
                pieces[place.index].append((ptr, assignment.stored.size))
                self._wrote(ptr, assignment, place)
        for index, place in self._arena.places.items():
            for ptr, size in _gaps(place, pieces[index]):
                self._observer.unreplayable(ptr, size, DERIVED if index in self._tensors.saved else COMPUTED)

    def finish(self) -> None:
        """Let the model's own tensor objects, tied ones with all their names, look at the arena from now on."""
        for index, place in self._arena.places.items():
            self._tensors.tensors[index].data = self._over(place)
        for ptr, size in self._arena.gaps:
            self._observer.unreplayable(ptr, size, PADDING)

    @staticmethod
    def _transfer(copies: Sequence[tuple[Assignment, Place]], fds: Mapping[str, int], memory: DeviceMemory) -> None:
        """Whole files onto a device, by the way that a wake takes: through a few locked buffers, and never the heap."""
        by_file: dict[str, list[Segment]] = defaultdict(list)
        for assignment, place in copies:
            segment = Segment(ptr=place.ptr, size=place.size, file_offset=assignment.stored.offset)
            by_file[assignment.file.name].append(segment)
        for name, segments in by_file.items():
            # The folder was pinned before this process began, and is not hashed again, as no engine does.
            source = ProvedSource(fd=fds[name], bytes=os.fstat(fds[name]).st_size, evidence="pinned checkpoint")
            report = hydrate_file(source, segments, memory)
            _log.info("%s: %d bytes in %.2f s, %s", name, report.bytes, report.seconds, report.path)
        memory.trim()

    def _place(self, assignment: Assignment) -> Place | None:
        """None for a tensor without bytes."""
        return self._arena.places.get(self._number[assignment.target])

    def _over(self, place: Place) -> torch.Tensor:
        return over_memory(self._memory, place, self._tensors.tensors[place.index])

    def _wrote(self, ptr: int, assignment: Assignment, place: Place) -> None:
        stored, within = assignment.stored, (place.ptr, place.size)
        self._observer.wrote(
            ptr, stored.size, tensor=stored.name, file=assignment.file.name, file_offset=stored.offset, within=within
        )

    def _copy_from_model(self, index: int) -> None:
        place = self._arena.places[index]
        self._over(place).copy_(self._tensors.tensors[index])
        self._observer.unreplayable(place.ptr, place.size, DERIVED if index in self._tensors.saved else COMPUTED)

    def _is_copy(self, assignment: Assignment) -> bool:
        place = self._place(assignment)
        if place is None:
            return False
        return _same_bytes(_stored(assignment), self._over(place))

    def _find_part(self, assignment: Assignment, place: Place, taken: Sequence[tuple[int, int]]) -> int | None:
        """Where in the tensor at `place` the stored bytes lie, at a multiple of their size, not yet taken.

        Fusing puts whole stored tensors one after the other (experts, or gate and up of each), so that is where
        to look; a fusion that interleaves them is not found, and stays derived.
        """
        size = assignment.stored.size
        if size == 0 or place.size % size:
            return None
        flat = _stored(assignment).reshape(-1).view(torch.uint8)
        for ptr in self._slots(place, size).get(bytes(flat[:_PROBE_BYTES].numpy()), ()):
            there = bytes_at(self._memory, ptr, size)
            if (ptr, size) not in taken and torch.equal(there.cpu(), flat):
                return ptr
        return None

    def _slots(self, place: Place, size: int) -> Mapping[bytes, Sequence[int]]:
        """The addresses in `place` at multiples of `size`, by the first bytes that lie there."""
        known = self._probes.get((place.index, size))
        if known is None:
            known = defaultdict(list)
            for ptr in range(place.ptr, place.ptr + place.size, size):
                known[b"".join(read_chunks(self._memory, ptr, min(size, _PROBE_BYTES)))].append(ptr)
            self._probes[place.index, size] = known
        return known


def same_stored_bytes(one: Assignment, other: Assignment) -> bool:
    """Whether two stored tensors hold the same bytes."""
    if one.stored.size != other.stored.size or one.stored.dtype != other.stored.dtype:
        return False
    return _same_bytes(_stored(one), _stored(other))


def _in_threads(act: Callable[[S], T], items: Sequence[S]) -> list[T]:
    with ThreadPoolExecutor(max_workers=min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return list(threads.map(act, items))


@contextmanager
def _opened(assignments: Sequence[Assignment]) -> Iterator[Mapping[str, int]]:
    with ExitStack() as stack:
        fds: dict[str, int] = {}
        for name, file in {one.file.name: one.file for one in assignments}.items():
            fds[name] = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fds[name])
        yield fds


def _stored(assignment: Assignment) -> torch.Tensor:
    """The stored tensor, in a mapping of its own that goes when the tensor goes."""
    stored = assignment.stored
    dtype = DTYPES[stored.dtype]
    if stored.size == 0:
        return torch.empty(stored.shape, dtype=dtype)
    buffer = mmap.mmap(-1, stored.size)
    with _opened([assignment]) as fds, memoryview(buffer) as view:
        _read_into(view, fds[assignment.file.name], assignment)
    return torch.frombuffer(buffer, dtype=dtype).reshape(stored.shape)


def _read_into(view: memoryview, fd: int, assignment: Assignment) -> None:
    done = 0
    while done < len(view):
        with view[done:] as rest:
            count = os.preadv(fd, [rest], assignment.stored.offset + done)
        if count == 0:
            raise UserError(
                f"{assignment.file.path} ends inside tensor {assignment.stored.name}",
                cure="the checkpoint changed while it was read: keep writers away and try again",
            )
        done += count


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one.reshape(-1).view(torch.uint8).cpu(), other.reshape(-1).view(torch.uint8).cpu()))


def _gaps(place: Place, pieces: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    reach = place.ptr
    for ptr, size in sorted(pieces):
        if ptr > reach:
            yield reach, ptr - reach
        reach = ptr + size
    if reach < place.ptr + place.size:
        yield reach, place.ptr + place.size - reach
