"""Pieces: every byte once, in order, of a size that a thread can take."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.hydrate.segments import Segment, plan_pieces

KIB = 1024


def test_a_large_segment_is_cut_at_piece_boundaries_of_memory() -> None:
    ptr = 0x5000_0010_0000  # one MiB past a boundary
    pieces = plan_pieces([Segment(ptr=ptr, size=9 * KIB * KIB, file_offset=4096)], piece_bytes=4 * KIB * KIB)
    assert [piece.size for piece in pieces] == [3 * KIB * KIB, 4 * KIB * KIB, 2 * KIB * KIB]
    assert [piece.file_offset for piece in pieces] == [4096, 4096 + 3 * KIB * KIB, 4096 + 7 * KIB * KIB]
    assert [piece.parts[0].ptr for piece in pieces] == [ptr, ptr + 3 * KIB * KIB, ptr + 7 * KIB * KIB]


def test_small_neighbours_share_a_read() -> None:
    segments = [Segment(ptr=0x10000 * n, size=5000, file_offset=8192 * n) for n in range(10)]
    (piece,) = plan_pieces(segments)
    assert (piece.file_offset, piece.size) == (0, 9 * 8192 + 5000)
    assert [(part.segment, part.skip, part.size) for part in piece.parts] == [(n, 8192 * n, 5000) for n in range(10)]


def test_small_segments_far_apart_do_not() -> None:
    segments = [Segment(ptr=0x10000 * n, size=100, file_offset=1_000_000 * n) for n in range(3)]
    assert [piece.size for piece in plan_pieces(segments)] == [100, 100, 100]


def test_segments_that_share_file_bytes_do_not() -> None:
    segments = [Segment(ptr=0x10000 * n, size=100, file_offset=50 * n) for n in range(3)]
    assert [(piece.file_offset, piece.size) for piece in plan_pieces(segments)] == [(0, 100), (50, 100), (100, 100)]


def test_a_gathered_piece_fits_one_system_call() -> None:
    segments = [Segment(ptr=0x10000 * n, size=1, file_offset=2 * n) for n in range(2000)]
    pieces = plan_pieces(segments)
    # A part and the gap before it are two buffers, and preadv takes 1024.
    assert all(2 * len(piece.parts) <= 1024 for piece in pieces)
    assert len(pieces) == 8


@settings(max_examples=100)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 900_000), st.integers(0, 20_000), st.integers(0, 5000)), max_size=12),
    piece_bytes=st.sampled_from([4096, 64 * KIB, 1024 * KIB]),
    shuffled=st.randoms(use_true_random=False),
)
def test_every_byte_is_in_one_part(
    sizes: list[tuple[int, int, int]], piece_bytes: int, shuffled: random.Random
) -> None:
    segments, ptr, offset = [], 0x1000, 0
    for size, file_gap, memory_gap in sizes:
        ptr, offset = ptr + memory_gap, offset + file_gap
        segments.append(Segment(ptr=ptr, size=size, file_offset=offset))
        ptr, offset = ptr + size, offset + size
    shuffled.shuffle(segments)
    pieces = plan_pieces(segments, piece_bytes=piece_bytes)
    assert [piece.file_offset for piece in pieces] == sorted(piece.file_offset for piece in pieces)
    filled = dict.fromkeys(range(len(segments)), 0)
    for piece in pieces:
        assert 0 < piece.size <= piece_bytes
        assert piece.parts[0].skip == 0
        assert piece.parts[-1].skip + piece.parts[-1].size == piece.size
        for part in piece.parts:
            segment = segments[part.segment]
            done = filled[part.segment]
            assert part.ptr == segment.ptr + done
            assert piece.file_offset + part.skip == segment.file_offset + done
            filled[part.segment] += part.size
    assert filled == {n: segment.size for n, segment in enumerate(segments)}
