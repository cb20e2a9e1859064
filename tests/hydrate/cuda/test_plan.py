"""How a transfer to a device is cut."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.hydrate import Segment
from coldsnap.hydrate.cuda.plan import Row, blocks_of, piece_of, plan_chains, plan_windows
from coldsnap.hydrate.cuda.work import Work

MIB = 1 << 20
NOTHING = Digest.of(b"")


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    sizes = draw(st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=12))
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 4095, 70_000, 5 * MIB]), min_size=len(sizes), max_size=len(sizes)))
    ptrs, ptr = [], 0x5000_0000_0000
    for size in sizes:
        ptrs.append(ptr)
        ptr += size + 64
    random.Random(draw(st.integers(0, 9))).shuffle(ptrs)
    segments, offset = [], 0
    for size, gap, at in zip(sizes, gaps, sorted(ptrs), strict=True):
        segments.append(Segment(ptr=at, size=size, file_offset=offset, sha256=NOTHING))
        offset += size + gap
        if draw(st.booleans()) and draw(st.booleans()):  # tied: the same file bytes elsewhere
            segments.append(Segment(ptr=ptr, size=size, file_offset=segments[-1].file_offset, sha256=NOTHING))
            ptr += size
    return segments


def image(rows: Iterable[Row], segments: list[Segment]) -> Counter[int]:
    """Bytes moved per segment; every row is where its segment says."""
    moved: Counter[int] = Counter()
    for row in rows:
        segment = segments[row.segment]
        assert row.size > 0
        assert row.ptr - segment.ptr == row.file_offset - segment.file_offset
        assert segment.ptr <= row.ptr
        assert row.ptr + row.size <= segment.ptr + segment.size
        moved[row.segment] += row.size
    return moved


def whole(segments: list[Segment]) -> Counter[int]:
    return Counter({number: segment.size for number, segment in enumerate(segments)})


@settings(max_examples=60, deadline=None)
@given(segment_lists(), st.sampled_from([64 * 1024, MIB, 4 * MIB]))
def test_blocks_hold_every_byte_once_at_its_place(segments: list[Segment], block_bytes: int) -> None:
    windows = plan_windows(segments, window_bytes=4 * MIB)
    blocks = [block for window in windows for block in blocks_of(window.rows, block_bytes=block_bytes)]
    for block in blocks:
        assert block.size > 0
        assert block.file_offset // block_bytes == (block.file_offset + block.size - 1) // block_bytes
        assert min(row.file_offset for row in block.rows) == block.file_offset
        assert max(row.file_offset + row.size for row in block.rows) == block.file_offset + block.size
        piece = piece_of(block)
        assert [part.skip + block.file_offset for part in piece.parts] == [row.file_offset for row in block.rows]
    assert image([row for block in blocks for row in block.rows], segments) == whole(segments)
    assert [block.file_offset for block in blocks] == sorted(block.file_offset for block in blocks)


def test_a_long_gap_is_not_read() -> None:
    segments = [
        Segment(ptr=0x1000, size=10, file_offset=0),
        Segment(ptr=0x2000, size=10, file_offset=1000),
        Segment(ptr=0x3000, size=10, file_offset=MIB),
    ]
    (window,) = plan_windows(segments, window_bytes=4 * MIB)
    found = blocks_of(window.rows, block_bytes=4 * MIB)
    assert [(block.file_offset, block.size, len(block.rows)) for block in found] == [(0, 1010, 2), (MIB, 10, 1)]


@settings(max_examples=60, deadline=None)
@given(segment_lists())
def test_windows_share_no_page_and_hold_every_byte_once(segments: list[Segment]) -> None:
    windows = plan_windows(segments, window_bytes=256 * 1024)
    end = 0
    for window in windows:
        assert window.file_offset % 4096 == 0
        assert window.size % 4096 == 0
        assert window.size <= 256 * 1024
        assert window.file_offset >= end
        end = window.file_offset + window.size
        assert all(window.file_offset <= row.file_offset and row.file_offset + row.size <= end for row in window.rows)
    assert image([row for window in windows for row in window.rows], segments) == whole(segments)


def test_the_worked_example() -> None:
    segments = [
        Segment(ptr=0x7000_0000, size=6 * MIB, file_offset=0),
        Segment(ptr=0x1000, size=8192, file_offset=6 * MIB),
    ]
    (window,) = plan_windows(segments, window_bytes=128 * MIB)
    assert window.rows == (Row(0, 0x7000_0000, 6 * MIB, 0), Row(6 * MIB, 0x1000, 8192, 1))
    one, two = blocks_of(window.rows, block_bytes=4 * MIB)
    assert (one.file_offset, one.size, one.rows) == (0, 4 * MIB, (Row(0, 0x7000_0000, 4 * MIB, 0),))
    assert (two.file_offset, two.size) == (4 * MIB, 2 * MIB + 8192)
    assert two.rows == (Row(4 * MIB, 0x7000_0000 + 4 * MIB, 2 * MIB, 0), Row(6 * MIB, 0x1000, 8192, 1))


@settings(max_examples=40, deadline=None)
@given(segment_lists())
def test_chains_keep_a_segment_in_order_in_one_hand(segments: list[Segment]) -> None:
    chains = plan_chains(segments, block_bytes=512 * 1024)
    seen: set[int] = set()
    for chain in chains:
        here = {row.segment for block in chain for row in block.rows}
        assert not here & seen
        seen |= here
        reach = {number: segments[number].ptr for number in here}
        for block in chain:
            for row in block.rows:
                assert row.ptr == reach[row.segment]
                reach[row.segment] += row.size
        assert all(reach[number] == segments[number].ptr + segments[number].size for number in here)
    assert seen == set(range(len(segments)))
    sizes = [sum(block.payload_bytes for block in chain) for chain in chains]
    assert sizes == sorted(sizes, reverse=True)


def test_small_neighbours_share_a_chain_and_hash_one_after_the_other() -> None:
    segments = [Segment(ptr=0x1000 * n, size=100, file_offset=4096 * n) for n in range(1, 6)]
    ((block,),) = plan_chains(segments, block_bytes=MIB)
    assert [row.segment for row in block.rows] == [0, 1, 2, 3, 4]


def test_work_is_taken_from_both_ends_and_each_byte_once() -> None:
    segments = [Segment(ptr=0x10_0000 * n, size=MIB, file_offset=MIB * n) for n in range(16)]
    work = Work(plan_windows(segments, window_bytes=4 * MIB), block_bytes=MIB)
    first, block = work.take_window(), work.take_block()
    assert first is not None
    assert block is not None
    assert (first.file_offset, block.file_offset) == (0, 12 * MIB)
    work.put_back(first)
    assert work.registered_bytes == 0
    taken = [block.file_offset]
    while (following := work.take_block()) is not None:
        taken.append(following.file_offset)
    assert sorted(taken) == [MIB * n for n in range(16)]
    assert work.is_done
    assert work.take_window() is None
    assert work.ring_bytes == 16 * MIB
