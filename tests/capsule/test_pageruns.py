"""Which pages leave CRIU's images: the rules one by one, and that no page is ever lost or doubled."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.capsule.criuimages import PAGE_BYTES, Mapping, PageMap, PageRun
from coldsnap.capsule.pageruns import (
    ZERO_BYTES,
    Part,
    lay_out,
    private_parts,
    remaining,
    split_zeros,
    without,
)

_P = PAGE_BYTES


def _mapping(start: int, end: int, *, protection: int = 3, flags: int = 0x22, status: int = 0x201) -> Mapping:
    return Mapping(start=start * _P, end=end * _P, protection=protection, flags=flags, status=status)


def _run(address: int, num_pages: int) -> PageRun:
    return PageRun(address=address * _P, num_pages=num_pages, flags=4)


def _part(address: int, size: int, offset: int = 0, *, anonymous: bool = True) -> Part:
    return Part(address=address * _P, size=size * _P, offset=offset * _P, anonymous=anonymous)


def _map(*runs: PageRun) -> PageMap:
    return PageMap(pages_id=1, runs=runs)


def test_runs_that_touch_are_one_part_and_a_mapping_ends_it() -> None:
    pagemap = _map(_run(10, 2), _run(12, 3), _run(20, 4))
    mappings = [_mapping(10, 13), _mapping(13, 22, flags=2, status=0x41), _mapping(22, 30)]
    assert private_parts(pagemap, mappings) == (
        _part(10, 3),
        _part(13, 2, 3, anonymous=False),
        _part(20, 2, 5, anonymous=False),
        _part(22, 2, 7),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"protection": 1},
        {"protection": 5},
        {"flags": 0x21, "status": 0x101},
        {"flags": 0x1, "status": 0x81},
        {"flags": 0x122},
        {"flags": 0x40022},
        {"status": 0x1201},
        {"status": 0x209},
        {"status": 0x200},
        {"status": 0x10201},
        {"status": 0x1},
    ],
    ids=str,
)
def test_memory_that_is_not_ordinary_stays(changes: dict[str, int]) -> None:
    mapping = _mapping(10, 20)
    assert private_parts(_map(_run(10, 10)), [mapping]) == (_part(10, 10),)
    assert private_parts(_map(_run(10, 10)), [replace(mapping, **changes)]) == ()


def test_the_heap_is_ordinary() -> None:
    assert private_parts(_map(_run(10, 1)), [_mapping(10, 20, status=0x221)]) == (_part(10, 1),)


def test_pages_outside_every_mapping_stay_and_count() -> None:
    pagemap = _map(_run(1, 2), _run(10, 1), _run(40, 3))
    assert private_parts(pagemap, [_mapping(10, 20)]) == (_part(10, 1, 2),)
    assert private_parts(pagemap, []) == ()


def test_a_page_that_the_kernel_writes_to_stays() -> None:
    kept = [(12 * _P + 100, 12 * _P + 132), (14 * _P - 1, 14 * _P + 1), (0, 0)]
    assert private_parts(_map(_run(10, 8)), [_mapping(10, 20)], kept) == (_part(10, 2), _part(15, 3, 5))


def test_blocks_of_zeros_are_dropped_where_nothing_is_under_them() -> None:
    block = ZERO_BYTES // _P
    part = _part(block - 1, 3 * block)
    asked: list[int] = []

    def second(offset: int, size: int) -> bool:
        assert size == ZERO_BYTES
        asked.append(offset)
        return len(asked) == 2

    held, zeros = split_zeros(part, second)
    assert asked == [_P, _P + ZERO_BYTES]  # whole blocks by address
    assert zeros == [_part(2 * block, block, block + 1)]
    assert held == [_part(block - 1, block + 1), _part(3 * block, block - 1, 2 * block + 1)]
    assert split_zeros(replace(part, anonymous=False), second) == ([replace(part, anonymous=False)], [])


def test_a_part_of_zeros_alone_leaves_nothing() -> None:
    part = _part(16, 32)
    assert split_zeros(part, lambda *_: True) == ([], [_part(16, 16), _part(32, 16, 16)])


def test_the_example_at_the_head_of_the_module() -> None:
    # s s A A A s B B 0 0 C C C D
    moved = [_part(100, 3, 2), _part(200, 2, 6), _part(300, 3, 10), _part(400, 1, 13)]
    plan = lay_out(14 * _P, moved, [_part(500, 2, 8)])
    assert plan.size == 9 * _P
    assert plan.staying == ((0, 2 * _P), (5 * _P, _P))
    file = bytearray(b"ssAAAsBB00CCCD")
    for copy in plan.copies:
        source, target, size = (number // _P for number in (copy.source, copy.target, copy.size))
        file[target : target + size] = file[source : source + size]
    assert file[:9] == b"CCAAACBBD"


_PLANS = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from(("stay", "moved", "dropped")), st.integers(0, 2)), max_size=24
)


@given(_PLANS)
def test_every_page_ends_in_one_place(plan: list[tuple[int, str, int]]) -> None:
    runs: list[PageRun] = []
    moved: list[Part] = []
    dropped: list[Part] = []
    address, offset = 10, 0
    where: dict[int, int] = {}  # page -> what it holds
    for size, fate, gap in plan:
        address += gap
        runs.append(_run(address, size))
        part = _part(address, size, offset)
        if fate != "stay":
            (moved if fate == "moved" else dropped).append(part)
        where |= {address + page: offset + page for page in range(size)}
        address, offset = address + size, offset + size
    pagemap = _map(*runs)
    gone = {page for part in (*moved, *dropped) for page in range(part.address // _P, part.end // _P)}

    layout = lay_out(offset * _P, moved, dropped)
    file = list(range(offset))
    kept = [file[at // _P + page] for at, size in layout.staying for page in range(size // _P)]
    for copy in layout.copies:
        source, target = copy.source // _P, copy.target // _P
        for page in range(copy.size // _P):
            file[target + page] = file[source + page]
    file = file[: layout.size // _P]

    left = remaining(pagemap, [*moved, *dropped])
    pages = [run.address // _P + page for run in left.runs for page in range(run.num_pages)]
    assert pages == [page for page in where if page not in gone]
    assert kept == [where[page] for page in pages]
    back = [address // _P + page for address, size in layout.pieces for page in range(size // _P)]
    assert sorted(back) == sorted(page for part in moved for page in range(part.address // _P, part.end // _P))
    assert file == [where[page] for page in back]
    assert sum(copy.size for copy in layout.copies) <= sum(run.size for run in runs) - layout.size


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=12),
    st.lists(st.tuples(st.integers(0, 120 * _P), st.integers(0, 5 * _P)), max_size=8),
)
def test_what_is_without_a_span_has_no_page_of_it(shapes: list[tuple[int, int]], holes: list[tuple[int, int]]) -> None:
    parts, at = [], 0
    for gap, size in shapes:
        parts.append(_part(at + gap, size, 1000 + at))
        at += gap + size
    spans = [(start, start + size) for start, size in holes]
    touched = {page for start, end in spans if start < end for page in range(start // _P, -(-end // _P))}
    left = without(parts, spans)
    assert [page for part in left for page in range(part.address // _P, part.end // _P)] == [
        page for part in parts for page in range(part.address // _P, part.end // _P) if page not in touched
    ]
    for part in left:
        whole = next(one for one in parts if one.address <= part.address < one.end)
        assert part.offset - whole.offset == part.address - whole.address
