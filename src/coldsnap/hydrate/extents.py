"""Extents that arrive in parts, from one file or from several: each is proved once all of it is there.

A pack holds every extent in one piece. A checkpoint may hold one in several: slices of a shard, tensors that
alias each other, a tensor that a loader put together from two files. ``ExtentsProof`` carries what is known of
each extent from one transfer to the next, and its ``with`` block ends with the verdict, so nobody can forget it:

    with ExtentsProof([(ptr, size, digest), ...]) as proof:
        for file in files:
            hydrate_file(ExtentsSource(fd=file.fd, bytes=file.bytes, proof=proof), file.segments, memory)

A SHA-256 wants its bytes in order. So each extent has a frontier: bytes before it are hashed, parts behind it may
have arrived. Every byte of an extent is filled by exactly one segment; a second one is refused before anything is
read, because it would overwrite what is hashed already.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

from coldsnap.core.digest import Digest
from coldsnap.errors import IntegrityError, Problem, UsageError

__all__ = ["ExtentFault", "ExtentsProof", "Frontier"]

_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtentFault:
    """An extent whose bytes are not the promised ones; ``found`` is None when not all of it arrived."""

    ptr: int
    size: int
    expected: Digest
    found: Digest | None

    def document(self) -> dict[str, object]:
        """As facts of an error."""
        found = None if self.found is None else str(self.found)
        return {"ptr": self.ptr, "size": self.size, "expected_sha256": str(self.expected), "found_sha256": found}

    def __str__(self) -> str:
        what = "did not arrive in full" if self.found is None else f"have {self.found}"
        return f"{self.size} bytes at {self.ptr:#x} {what}, and {self.expected} was promised"


class Frontier:
    """Where the hashing of one extent stands; ``at`` is the address of its first byte that is not hashed."""

    __slots__ = ("arrived", "at", "busy", "state")

    def __init__(self, ptr: int) -> None:
        self.at = ptr
        self.arrived: dict[int, int] = {}  # address -> bytes of parts that are read and not hashed
        self.busy = False
        self.state = hashlib.sha256()

    def ready(self) -> bool:
        """Whether the next bytes to hash are there."""
        return self.at in self.arrived


class ExtentsProof:
    """The extents ``(ptr, size, sha256)`` of one or more transfers, none overlapping another. See the module.

    Leaving the block raises IntegrityError when an extent is not what was promised, unless another error ends it;
    ``faults`` has all of them then. For one attempt: after a failed transfer, make a new one. Thread-safe.
    """

    def __init__(self, extents: Sequence[tuple[int, int, Digest]]) -> None:
        self._extents = sorted(extents, key=lambda one: one[0])
        self._ptrs = [ptr for ptr, _, _ in self._extents]
        self._frontiers: dict[int, Frontier] = {}
        self._claimed: dict[int, list[tuple[int, int]]] = {}
        self._wrong: dict[int, Digest] = {}
        self._missing = {number for number, (_, size, _) in enumerate(self._extents) if size}
        self._open = False
        self.lock = threading.Lock()

    def __enter__(self) -> Self:
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        if error is None and (faults := self.faults):
            named = "; ".join(str(fault) for fault in faults[:_NAMED])
            more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
            raise IntegrityError(
                f"{len(faults)} of {len(self._extents)} extents are not what was promised: {named}{more}",
                cure="the files are damaged or belong to another manifest: fetch or write them again",
                facts={"extents": [fault.document() for fault in faults]},
            )

    @property
    def faults(self) -> tuple[ExtentFault, ...]:
        """Every extent that is wrong or did not arrive in full, by address."""
        return tuple(
            ExtentFault(ptr=ptr, size=size, expected=digest, found=self._wrong.get(number))
            for number, (ptr, size, digest) in enumerate(self._extents)
            if number in self._wrong or number in self._missing
        )

    def claim(self, parts: Sequence[tuple[int, int]]) -> Iterator[Problem]:
        """Take note of the segments ``(ptr, size)`` of a transfer; why one may not fill what it wants to fill.

        Raises UsageError outside the ``with`` block.
        """
        if not self._open:
            raise UsageError(
                "extents can be filled only inside the block that ends with their proof",
                cure="with ExtentsProof(...) as proof: hydrate_file(...)",
            )
        touched = set()
        for index, (ptr, size) in enumerate(parts):
            number = self.number(ptr, size)
            if number is None:
                yield Problem(
                    field=f"segments[{index}].ptr",
                    message="is not inside one of the extents to prove",
                    value=f"{size} bytes at {ptr:#x}",
                    cure="give every byte that is read an extent with a digest",
                )
                continue
            touched.add(number)
            self._claimed.setdefault(number, []).append((ptr, ptr + size))
        for number in touched:
            claims = sorted(self._claimed[number])
            for (_, end), (ptr, _) in pairwise(claims):
                if ptr < end:
                    yield Problem(
                        field="segments",
                        message="fill a byte that another segment fills as well",
                        value=f"{ptr:#x}",
                        cure="cut segments so that they tile their extent",
                    )

    def number(self, ptr: int, size: int) -> int | None:
        """The number of the extent that holds all ``size`` bytes at ``ptr``."""
        number = bisect_right(self._ptrs, ptr) - 1
        if number < 0:
            return None
        start, length, _ = self._extents[number]
        return number if ptr + size <= start + length else None

    def extent(self, number: int) -> tuple[int, int]:
        """Address and size of an extent."""
        ptr, size, _ = self._extents[number]
        return ptr, size

    def comes_in_parts(self, number: int) -> bool:
        """Whether :meth:`frontier` was called for this extent. Call with ``lock`` held."""
        return number in self._frontiers

    def frontier(self, number: int) -> Frontier:
        """The frontier of an extent that comes in parts. Call with ``lock`` held."""
        found = self._frontiers.get(number)
        if found is None:
            found = self._frontiers[number] = Frontier(self._extents[number][0])
        return found

    def found(self, number: int, digest: Digest) -> None:
        """All of an extent arrived, and this is its digest."""
        with self.lock:
            self._missing.discard(number)
            if digest != self._extents[number][2]:
                self._wrong[number] = digest
