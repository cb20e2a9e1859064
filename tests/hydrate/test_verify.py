"""Hashing while parts arrive, driven by hand: every order, every moment, and nothing hashed twice or never."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.errors import IntegrityError, OperationInterrupted
from coldsnap.hydrate.segments import Part, Piece, Segment
from coldsnap.hydrate.verify import Verifier
from coldsnap.hydrate.workers import Stop, run_together
from coldsnap.testing.memory import FakeMemory

CONTENT = random.Random(3).randbytes(8192)


def fixture_of(cuts: Sequence[int], digest: Digest | None = None) -> tuple[FakeMemory, list[Segment], list[Piece]]:
    """One segment of 8192 bytes that is there already, in pieces that end at ``cuts`` and at its end."""
    memory = FakeMemory()
    ptr = memory.reserve(len(CONTENT), tag="a").ptr
    memory.view(ptr, len(CONTENT))[:] = CONTENT
    segment = Segment(ptr=ptr, size=len(CONTENT), file_offset=0, sha256=digest or Digest.of(CONTENT))
    edges = [0, *sorted(set(cuts)), len(CONTENT)]
    pieces = [
        Piece(file_offset=a, size=b - a, parts=(Part(segment=0, ptr=ptr + a, size=b - a, skip=0),))
        for a, b in pairwise(edges)
    ]
    return memory, [segment], pieces


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(1, 8191), max_size=6), order=st.randoms(use_true_random=False))
def test_parts_may_arrive_in_any_order(cuts: list[int], order: random.Random) -> None:
    memory, segments, pieces = fixture_of(cuts)
    verifier = Verifier(segments, pieces, memory, num_readers=1, num_hashers=1)
    order.shuffle(pieces)
    for piece in pieces:
        verifier.arrived(piece)
    verifier.reader_done()
    verifier.hash_arrived(Stop(None))
    assert verifier.verified_bytes == len(CONTENT)


def test_a_segment_whose_last_part_never_came_is_not_verified() -> None:
    memory, segments, pieces = fixture_of([100])
    verifier = Verifier(segments, pieces, memory, num_readers=1, num_hashers=1)
    verifier.arrived(pieces[0])
    verifier.reader_done()
    verifier.hash_arrived(Stop(None))
    assert verifier.verified_bytes == 0


@pytest.mark.parametrize("cuts", [[], [1], [4096, 8191]])
def test_wrong_bytes_are_told(cuts: list[int]) -> None:
    memory, segments, pieces = fixture_of(cuts, Digest.of(b"other bytes"))
    verifier = Verifier(segments, pieces, memory, num_readers=1, num_hashers=1)
    for piece in pieces:
        verifier.arrived(piece)
    verifier.reader_done()
    with pytest.raises(IntegrityError, match=str(Digest.of(CONTENT))):
        verifier.hash_arrived(Stop(None))
    assert verifier.verified_bytes == 0


@pytest.mark.parametrize("cuts", [[], [1]])
def test_hashing_is_cancelled(cuts: list[int]) -> None:
    memory, segments, pieces = fixture_of(cuts)
    verifier = Verifier(segments, pieces, memory, num_readers=1, num_hashers=1)
    for piece in pieces:
        verifier.arrived(piece)
    verifier.reader_done()
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(OperationInterrupted):
        verifier.hash_arrived(Stop(cancel))
    stop = Stop(None)
    stop.set()
    verifier.arrived(pieces[0])
    verifier.hash_arrived(stop)
    assert verifier.verified_bytes == 0


class EventfulLock:
    """A lock after whose ``nth`` release something happens before its holder goes on."""

    def __init__(self, nth: int) -> None:
        self._lock = threading.Lock()
        self._countdown = nth
        self.happens: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._countdown -= 1
        if self._countdown == 0:
            self.happens()


@pytest.mark.parametrize("nth", range(2, 5))
def test_a_part_that_arrives_at_any_moment(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Releases: 1 the first part arrives, 2 it is taken, 3 its segment is given back, 4 the tally. Whenever the
    # second part comes, the segment is hashed to its end, and not compared before.
    memory, segments, pieces = fixture_of([4096])
    lock = EventfulLock(nth)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Lock", lambda: lock)
        verifier = Verifier(segments, pieces, memory, num_readers=1, num_hashers=1)

    def second_part() -> None:
        verifier.arrived(pieces[1])
        verifier.reader_done()

    lock.happens = second_part
    verifier.arrived(pieces[0])
    verifier.hash_arrived(Stop(None))
    assert verifier.verified_bytes == len(CONTENT)


def test_many_hashers_that_run_dry_again_and_again() -> None:
    memory, segments, pieces = fixture_of(range(4, 8192, 4))
    verifier = Verifier(segments, pieces, memory, num_readers=1, num_hashers=3)
    stop = Stop(None)

    def read() -> None:
        for piece in pieces:
            verifier.arrived(piece)
        verifier.reader_done()

    def check() -> None:
        verifier.hash_arrived(stop)

    run_together([read, check, check, check], stop=stop, name="verify")
    assert verifier.verified_bytes == len(CONTENT)
