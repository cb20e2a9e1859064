"""Extents that come in parts, from several files: proved when the last part is there, and not one byte before."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.errors import IntegrityError, InvalidDocument, OperationInterrupted, UsageError
from coldsnap.hydrate import ExtentsProof, ExtentsSource, Segment, hydrate_file
from coldsnap.testing.memory import FakeMemory

CONTENT = random.Random(11).randbytes(20_000)
OpenFile = Callable[[bytes], int]


def filled(
    open_file: OpenFile,
    sizes: Sequence[int],
    cuts: Sequence[int],
    num_files: int,
    order: random.Random,
    *,
    spoil: int | None = None,
) -> tuple[ExtentsProof, bytes, list[int]]:
    """Extents of ``sizes`` one after the other, cut at ``cuts`` and dealt out to files; byte ``spoil`` is wrong."""
    memory = FakeMemory()
    total = sum(sizes)
    base = memory.reserve(-(-total // 4096) * 4096, tag="a").ptr
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    extents = [
        (base + start, size, Digest.of(CONTENT[start : start + size]))
        for start, size in zip(starts, sizes, strict=True)
    ]
    edges = sorted({*starts, *(cut for cut in cuts if cut < total), total})
    parts = [(begin, end - begin) for begin, end in pairwise(edges)]
    order.shuffle(parts)
    content = bytearray(CONTENT[:total])
    if spoil is not None:
        content[spoil] ^= 0x10
    proof = ExtentsProof(extents)
    files: list[tuple[bytearray, list[Segment]]] = [(bytearray(order.randbytes(7)), []) for _ in range(num_files)]
    for begin, size in parts:
        data, segments = order.choice(files)
        segments.append(Segment(ptr=base + begin, size=size, file_offset=len(data)))
        data += content[begin : begin + size]
    with suppress(IntegrityError), proof:
        for data, segments in files:
            source = ExtentsSource(fd=open_file(bytes(data)), bytes=len(data), proof=proof)
            hydrate_file(source, segments, memory, num_threads=2, piece_bytes=4096)
    there = bytes(memory.view(base, total))
    return proof, there, [base + start for start in starts]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6000), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 18_000), max_size=8),
    num_files=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
    spoiled=st.none() | st.floats(0, 1, exclude_max=True),
)
def test_any_tiling_over_any_files_is_proved_and_one_wrong_byte_is_found(
    open_file: OpenFile,
    sizes: list[int],
    cuts: list[int],
    num_files: int,
    order: random.Random,
    spoiled: float | None,
) -> None:
    total = sum(sizes)
    spoil = None if spoiled is None else int(spoiled * total)
    proof, there, starts = filled(open_file, sizes, cuts, num_files, order, spoil=spoil)
    if spoil is None:
        assert proof.faults == ()
        assert there == CONTENT[:total]
        return
    (fault,) = proof.faults
    (wrong,) = (number for number, start in enumerate(starts) if 0 <= spoil - (start - starts[0]) < sizes[number])
    assert (fault.ptr, fault.size) == (starts[wrong], sizes[wrong])
    assert fault.found is not None
    assert fault.found != fault.expected


def one_extent(open_file: OpenFile) -> tuple[FakeMemory, int, int]:
    memory = FakeMemory()
    return memory, memory.reserve(8192, tag="a").ptr, open_file(CONTENT[:8192])


def test_every_wrong_extent_is_named_and_not_only_the_first(open_file: OpenFile) -> None:
    memory, base, fd = one_extent(open_file)
    extents = [
        (base + at, 1024, Digest.of(b"other" if at % 2048 else CONTENT[at : at + 1024])) for at in range(0, 8192, 1024)
    ]
    segments = [Segment(ptr=base + at, size=1024, file_offset=at) for at in range(0, 8192, 1024)]
    verified = 0

    def fill() -> None:
        nonlocal verified
        with ExtentsProof(extents) as proof:
            source = ExtentsSource(fd=fd, bytes=8192, proof=proof)
            verified = hydrate_file(source, segments, memory).verified_bytes

    with pytest.raises(IntegrityError, match="4 of 8 extents") as caught:
        fill()
    assert verified == 8192
    named = caught.value.facts["extents"]
    assert isinstance(named, list)
    assert [one["ptr"] for one in named] == [base + at for at in range(1024, 8192, 2048)]
    assert all(one["found_sha256"] == str(Digest.of(CONTENT[one["ptr"] - base :][:1024])) for one in named)


def test_an_extent_that_did_not_arrive_in_full_is_not_proved(open_file: OpenFile) -> None:
    memory, base, fd = one_extent(open_file)
    with (
        pytest.raises(IntegrityError, match="did not arrive in full"),
        ExtentsProof([(base, 8192, Digest.of(CONTENT[:8192]))]) as proof,
    ):
        hydrate_file(
            ExtentsSource(fd=fd, bytes=8192, proof=proof), [Segment(ptr=base, size=8191, file_offset=0)], memory
        )
    assert [fault.found for fault in proof.faults] == [None]


def test_a_byte_that_is_filled_twice_is_refused_before_anything_is_read(open_file: OpenFile) -> None:
    """Else the second filling could put other bytes over those that are hashed already."""
    memory, base, fd = one_extent(open_file)
    with suppress(IntegrityError), ExtentsProof([(base, 8192, Digest.of(CONTENT[:8192]))]) as proof:
        source = ExtentsSource(fd=fd, bytes=8192, proof=proof)
        hydrate_file(source, [Segment(ptr=base, size=4096, file_offset=0)], memory)
        with pytest.raises(InvalidDocument, match="another segment fills"):
            hydrate_file(source, [Segment(ptr=base + 4095, size=4097, file_offset=0)], memory)
    assert bytes(memory.view(base, 8192)) == CONTENT[:4096] + bytes(4096)


@pytest.mark.parametrize("ptr", [-1, 8, 4096])
def test_bytes_outside_every_extent_are_refused(open_file: OpenFile, ptr: int) -> None:
    memory, base, fd = one_extent(open_file)
    with (
        suppress(IntegrityError),
        ExtentsProof([(base + 4, 4000, Digest.of(b""))]) as proof,
        pytest.raises(InvalidDocument),
    ):
        hydrate_file(
            ExtentsSource(fd=fd, bytes=8192, proof=proof), [Segment(ptr=base + ptr, size=4000, file_offset=0)], memory
        )
    assert bytes(memory.view(base, 8192)) == bytes(8192)


def test_nothing_is_read_outside_the_block(open_file: OpenFile) -> None:
    memory, base, fd = one_extent(open_file)
    proof = ExtentsProof([(base, 8192, Digest.of(CONTENT[:8192]))])
    source = ExtentsSource(fd=fd, bytes=8192, proof=proof)
    segments = [Segment(ptr=base, size=8192, file_offset=0)]
    with pytest.raises(UsageError, match="inside the block"):
        hydrate_file(source, segments, memory)
    with proof:
        hydrate_file(source, segments, memory)
    with pytest.raises(UsageError, match="inside the block"):
        hydrate_file(source, segments, memory)


def test_another_error_is_not_hidden_by_the_verdict(open_file: OpenFile) -> None:
    memory, base, fd = one_extent(open_file)
    cancel = threading.Event()
    cancel.set()

    def fill() -> None:
        with ExtentsProof([(base, 8192, Digest.of(b"x"))]) as proof:
            source = ExtentsSource(fd=fd, bytes=8192, proof=proof)
            hydrate_file(source, [Segment(ptr=base, size=8192, file_offset=0)], memory, cancel=cancel)

    with pytest.raises(OperationInterrupted):
        fill()


def test_no_extent_at_all_is_proved() -> None:
    with ExtentsProof([]) as proof:
        assert proof.faults == ()
