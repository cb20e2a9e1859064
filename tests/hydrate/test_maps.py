from __future__ import annotations

import pytest

from coldsnap.hydrate.maps import MapEntry, holes, overlapping, parse_maps, read_maps

TEXT = """\
1000-3000 rw-p 00000000 00:00 0
3000-4000 ---p 00000000 00:00 0
6000-7000 r-xp 00002000 fe:00 1311                       /usr/lib/a b/libx.so (deleted)
8000-9000 rw-p 00000000 00:00 0                          [heap]
a000-b000 rw-s 00000000 00:01 77                         /dev/zero (deleted)
c000-d000 rw-p 00000000 00:00 0                          [anon:allocator]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
"""


def test_lines_become_entries() -> None:
    entries = parse_maps(TEXT)
    assert len(entries) == 7
    assert entries[2] == MapEntry(
        start=0x6000, end=0x7000, rights="r-xp", inode=1311, name="/usr/lib/a b/libx.so (deleted)"
    )
    assert [entry.anonymous for entry in entries] == [True, True, False, False, False, True, False]
    assert str(entries[0]) == "0x1000-0x3000 rw-p (anonymous)"


@pytest.mark.parametrize(
    ("start", "end", "starts"),
    [
        (0x0, 0x1000, []),
        (0x0, 0x1001, [0x1000]),
        (0x2FFF, 0x3001, [0x1000, 0x3000]),
        (0x4000, 0x6000, []),
        (0x1000, 0xB000, [0x1000, 0x3000, 0x6000, 0x8000, 0xA000]),
    ],
)
def test_overlap_shares_at_least_a_byte(start: int, end: int, starts: list[int]) -> None:
    assert [entry.start for entry in overlapping(parse_maps(TEXT), start, end)] == starts


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0x1000, 0x4000, []),
        (0x1800, 0x3800, []),
        (0x0, 0x1000, [(0x0, 0x1000)]),
        (0x3000, 0x9800, [(0x4000, 0x6000), (0x7000, 0x8000), (0x9000, 0x9800)]),
    ],
)
def test_holes_are_what_nobody_maps(start: int, end: int, expected: list[tuple[int, int]]) -> None:
    assert list(holes(parse_maps(TEXT), start, end)) == expected


def test_this_process_has_a_stack_and_sorted_entries() -> None:
    entries = read_maps()
    assert any(entry.name == "[stack]" for entry in entries)
    assert [e.start for e in entries] == sorted(e.start for e in entries)
