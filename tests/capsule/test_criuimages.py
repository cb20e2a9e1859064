"""CRIU's image files: golden bytes as CRIU 4.1.1 wrote them, damaged ones, and whatever hypothesis finds."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.capsule.criuimages import (
    BadImage,
    Core,
    Mapping,
    PageMap,
    PageRun,
    pagemap_image,
    read_core,
    read_mappings,
    read_pagemap,
    read_parents,
)

# The first three entries of a process's pagemap; 180 pages need a number of two bytes.
_PAGEMAP = bytes.fromhex(
    "19435654 25400856 02000000 0801"
    "0c000000 088080fcc7f5c815 1001 2004"
    "0c000000 0880c0fcc7f5c815 1002 2004"
    "0d000000 0880e08a95f9c815 10b401 2006"
)
_RUNS = (
    PageRun(address=0x564758FF0000, num_pages=1, flags=4),
    PageRun(address=0x564758FF2000, num_pages=2, flags=4),
    PageRun(address=0x564792A2B000, num_pages=180, flags=6),
)


def _image(magic: int, *records: bytes) -> bytes:
    framed = b"".join(struct.pack("<I", len(record)) + record for record in records)
    return struct.pack("<II", 0x54564319, magic) + framed


def _mapping(start: int, end: int, *, protection: int = 3, flags: int = 0x22, status: int = 0x201) -> bytes:
    numbers = {1: start, 2: end, 3: 0, 4: 0, 5: protection, 6: flags, 7: status, 8: 1, 10: 0}
    record = b"".join(_field(number, value) for number, value in numbers.items())
    return _length(14) + _varint(len(record)) + record


def _varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _length(number: int) -> bytes:
    return _varint(number << 3 | 2)


def test_a_pagemap_is_read_and_written_as_criu_does() -> None:
    pagemap = read_pagemap(_PAGEMAP)
    assert pagemap == PageMap(pages_id=1, runs=_RUNS)
    assert pagemap_image(pagemap) == _PAGEMAP


def test_a_process_without_pages_has_a_pagemap_too() -> None:
    assert read_pagemap(_PAGEMAP[:14]) == PageMap(pages_id=1, runs=())


def test_the_number_of_pages_may_stand_in_the_newer_field() -> None:
    record = b"".join((_field(1, 0x1000), _field(2, 7), _field(4, 6), _field(5, 7)))
    assert read_pagemap(_image(0x56084025, _field(1, 3), record)).runs == (
        PageRun(address=0x1000, num_pages=7, flags=6),
    )
    many = PageMap(pages_id=3, runs=(PageRun(address=0x1000, num_pages=(1 << 32) + 1, flags=4),))
    assert read_pagemap(pagemap_image(many)) == many


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (_field(1, 0x1001) + _field(2, 1) + _field(4, 4), "out of place"),
        (_field(1, 0x1000) + _field(2, 0) + _field(4, 4), "out of place"),
        (_field(1, (1 << 64) - 4096) + _field(2, 2) + _field(4, 4), "out of place"),
        (_field(1, 0x1000) + _field(2, 1) + _field(4, 1), "flags 0x1,"),
        (_field(1, 0x1000) + _field(2, 1), "flags 0x0,"),
        (_field(1, 0x1000) + _field(2, 1) + _field(3, 1) + _field(4, 4), "flags 0x4,"),
        (_field(1, 0x1000) + _field(2, 1) + _field(4, 4) + _field(6, 1), "field 6 is not understood"),
        (_field(1, 0x1000) + _field(1, 0x2000) + _field(2, 1) + _field(4, 4), "field 1 is not understood"),
        (_field(1, 0x1000) + _field(4, 4), "field 2 is missing"),
        (_field(1, 0x1000) + _field(2, 1) + _field(4, 4) + _field(5, 2), "has 1 pages and 2"),
        (_length(1) + b"\x01x" + _field(2, 1) + _field(4, 4), "is none"),
        (_field(1, 0x1000) + b"\x10", "number ends after"),
        (_field(1, 0x1000) + b"\x10" + b"\xff" * 10 + b"\x01", "more than 64 bits"),
        (b"\x00\x00", "no number"),
        (b"\x0b", "wire type 3"),
        (_length(1) + b"\x09x", "ends after its record"),
    ],
)
def test_an_entry_that_is_not_understood_is_refused(record: bytes, fault: str) -> None:
    with pytest.raises(BadImage, match=fault):
        read_pagemap(_image(0x56084025, _field(1, 1), record))


@pytest.mark.parametrize(
    "data", [b"", _PAGEMAP[:7], _PAGEMAP[:8], _PAGEMAP[:-1], b"\0" + _PAGEMAP[1:], _PAGEMAP + b"\1\0\0\0"]
)
def test_a_pagemap_of_another_length_or_kind_is_refused(data: bytes) -> None:
    with pytest.raises(BadImage):
        read_pagemap(data)


def test_entries_stand_in_order() -> None:
    first, second = (_field(1, at) + _field(2, 2) + _field(4, 4) for at in (0x3000, 0x2000))
    with pytest.raises(BadImage, match="out of place"):
        read_pagemap(_image(0x56084025, _field(1, 1), first, second))


def test_mappings_are_read_and_what_is_new_in_them_passes() -> None:
    new = _field(99, 5) + _length(98) + b"\x02ab"
    record = (
        _field(1, 7) + _mapping(0x1000, 0x3000) + _mapping(0x3000, 0x4000, protection=1, flags=2, status=0x41) + new
    )
    assert read_mappings(_image(0x57492820, record)) == (
        Mapping(start=0x1000, end=0x3000, protection=3, flags=0x22, status=0x201),
        Mapping(start=0x3000, end=0x4000, protection=1, flags=2, status=0x41),
    )


def test_a_guard_area_is_no_mapping_of_its_own() -> None:
    record = _mapping(0x1000, 0x9000) + _mapping(0x2000, 0x3000, protection=0, status=0x10001)
    assert [(one.start, one.end) for one in read_mappings(_image(0x57492820, record))] == [(0x1000, 0x9000)]


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (_mapping(0x2000, 0x2000), "out of place"),
        (_mapping(0x2000, 0x4000) + _mapping(0x3000, 0x5000), "out of place"),
        (_length(14) + b"\x02\x08\x01", "no field 2"),
        (_field(14, 1), "is a number"),
    ],
)
def test_mappings_that_make_no_sense_are_refused(record: bytes, fault: str) -> None:
    with pytest.raises(BadImage, match=fault):
        read_mappings(_image(0x57492820, record))


def test_there_is_one_record_of_mappings() -> None:
    with pytest.raises(BadImage, match="2 records"):
        read_mappings(_image(0x57492820, b"", b""))


def test_a_thread_says_what_it_shares_with_the_kernel_and_whether_it_stood_still() -> None:
    shared = _field(1, 0x7000) + _field(2, 32) + _field(3, 9)
    thread = _field(1, 0) + _length(15) + _varint(len(shared)) + shared
    task = _field(1, 3) + _length(6) + b"\x01x"
    record = _field(1, 1) + _length(3) + _varint(len(task)) + task + _length(5) + _varint(len(thread)) + thread
    assert read_core(_image(0x55053847, record)) == Core(start=0x7000, size=32, stopped=True)
    alive = _field(1, 1)
    assert read_core(_image(0x55053847, _length(3) + _varint(len(alive)) + alive)) == Core(
        start=0, size=0, stopped=False
    )


def test_a_tree_says_whose_child_is_who() -> None:
    records = [_field(1, pid) + _field(2, parent) + _field(3, 1) for pid, parent in ((1001, 0), (1002, 1001))]
    assert read_parents(_image(0x50273030, *records)) == {1001: 0, 1002: 1001}
    with pytest.raises(BadImage, match="no PID"):
        read_parents(_image(0x50273030, _field(1, 5)))


@given(
    pages_id=st.integers(1, 1 << 32 - 1),
    gaps=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 1 << 33), st.sampled_from((4, 6))), max_size=20),
)
def test_every_pagemap_comes_back(pages_id: int, gaps: list[tuple[int, int, int]]) -> None:
    runs, at = [], 0
    for gap, num_pages, flags in gaps:
        at += gap * 4096
        runs.append(PageRun(address=at, num_pages=num_pages, flags=flags))
        at += num_pages * 4096
    pagemap = PageMap(pages_id=pages_id, runs=tuple(runs))
    assert read_pagemap(pagemap_image(pagemap)) == pagemap


@given(st.binary(max_size=200), st.sampled_from(((0x56084025), (0x57492820), (0x55053847), (0x50273030))))
def test_any_bytes_are_read_or_refused(tail: bytes, magic: int) -> None:
    data = struct.pack("<II", 0x54564319, magic) + tail
    for read in (read_pagemap, read_mappings, read_core, read_parents):
        try:
            read(data)
        except BadImage:
            continue
