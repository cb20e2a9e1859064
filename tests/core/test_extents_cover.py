"""The cover proof: what it lets pass is complete, and what it names is exactly what is wrong."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.cover import RangeGroup, complement, cover_problems
from coldsnap.core.digest import Digest
from coldsnap.core.extents import (
    Allocation,
    ModelExtent,
    ResidualExtent,
    file_layout,
    prove_cover,
    residual_ranges,
)
from coldsnap.errors import InvalidDocument, Problem

BASE = 0x5000_0000_0000
Split = tuple[list[Allocation], list[ModelExtent], list[ResidualExtent]]


def split(allocations: list[tuple[int, int]], model: list[tuple[int, int]]) -> Split:
    """A correct split: allocations and model ranges are (ptr, size)."""
    entries = [Allocation(ptr=ptr, size=size, tag="weights") for ptr, size in allocations]
    holder = {ptr: next(a for a, size in allocations if a <= ptr < a + size) for ptr, _ in model}
    ordered = sorted((Digest.of(str(ptr).encode()), size, ptr) for ptr, size in model)
    extents = [
        ModelExtent(
            ptr=ptr,
            size=size,
            allocation_ptr=holder[ptr],
            semantic_id="5" * 64,
            sha256=digest,
            offset=offset,
            crc32=0,
        )
        for (digest, size, ptr), offset in zip(
            ordered, file_layout(size for _, size, _ in ordered).offsets, strict=True
        )
    ]
    left = residual_ranges(entries, model)
    residual = [
        ResidualExtent(ptr=ptr, size=size, allocation_ptr=holder_ptr, offset=offset, crc32=0)
        for (ptr, size, holder_ptr), offset in zip(left, file_layout(s for _, s, _ in left).offsets, strict=True)
    ]
    return entries, extents, residual


def small() -> Split:
    return split(
        [(BASE, 8192), (BASE + 0x100000, 4096)], [(BASE + 16, 100), (BASE + 4096, 200), (BASE + 0x100000, 4096)]
    )


def problems_of(parts: Split) -> tuple[Problem, ...]:
    with pytest.raises(InvalidDocument) as caught:
        prove_cover(*parts)
    return caught.value.problems


class TestProof:
    def test_counts_what_it_proved(self) -> None:
        proof = prove_cover(*small())
        assert proof.preserved_bytes == 8192 + 4096
        assert proof.model_bytes == 100 + 200 + 4096
        assert proof.residual_bytes == proof.preserved_bytes - proof.model_bytes
        assert proof.pack_file_bytes == 3 * 4096
        # 16 bytes, 4096 - 116 bytes, 4096 - 200 bytes: one page each
        assert proof.residual_file_bytes == 3 * 4096
        assert (proof.num_allocations, proof.num_model_extents, proof.num_residual_extents) == (2, 3, 3)

    def test_nothing_is_covered_by_nothing(self) -> None:
        assert prove_cover([], [], []).preserved_bytes == 0

    def test_an_empty_residual_is_legal(self) -> None:
        assert prove_cover(*split([(BASE, 4096)], [(BASE, 4096)])).num_residual_extents == 0

    def test_ten_thousand_extents_take_well_under_half_a_second(self) -> None:
        model = [(BASE + n * 8192, 5000) for n in range(5000)]
        parts = split([(BASE + n * 81920, 81920) for n in range(500)], model)
        assert len(parts[1]) + len(parts[2]) == 10_000
        best = min(_seconds(parts) for _ in range(3))
        assert best < (0.15 if sys.gettrace() is None else 1.0)  # seconds of this thread; coverage traces every line


def _seconds(parts: Split) -> float:
    start = time.thread_time()
    prove_cover(*parts)
    return time.thread_time() - start


class TestNaming:
    def test_a_gap_is_named_by_its_addresses(self) -> None:
        entries, model, residual = small()
        gone = residual.pop(0)
        residual[0] = replace(residual[0], offset=0)
        residual[1] = replace(residual[1], offset=4096)
        (problem,) = problems_of((entries, model, residual))
        assert problem.field == "entries[0]"
        assert problem.message == "16 bytes belong to no extent"
        assert problem.value == "0x500000000000..0x500000000010"
        assert gone.size == 16

    def test_a_byte_in_two_extents_names_both_and_the_bytes(self) -> None:
        entries, model, residual = small()
        index = next(n for n, one in enumerate(model) if one.ptr == BASE + 16)
        model[index] = replace(model[index], size=101)
        (problem,) = problems_of((entries, model, residual))
        assert problem.field == "residual_extents[1]"
        assert problem.message == f"overlaps model_weight_extents[{index}]"
        assert problem.value == "0x500000000074..0x500000000075"

    def test_the_same_extent_twice_overlaps(self) -> None:
        entries, model, residual = split([(BASE, 4096)], [(BASE, 4096)])
        model.append(replace(model[0], offset=4096))
        (problem,) = problems_of((entries, model, residual))
        assert problem.message == "overlaps model_weight_extents[0]"
        assert problem.value == "0x500000000000..0x500000001000"

    def test_two_allocations_that_overlap(self) -> None:
        problems = cover_problems(
            [(0x1000, 0x2000), (0x2000, 0x1000)],
            [RangeGroup(field="all", rows=[(0x1000, 0x2000, 0x1000)])],
            page_bytes=4096,
        )
        assert [(one.field, one.message, one.value) for one in problems] == [
            ("entries[1]", "overlaps entries[0]", "0x2000..0x3000")
        ]

    @pytest.mark.parametrize(("ptr", "size"), [(BASE + 1, 4096), (BASE, 4095), (BASE, 0)])
    def test_an_allocation_is_whole_pages(self, ptr: int, size: int) -> None:
        entries = [Allocation(ptr=ptr, size=size, tag="")]
        residual = [ResidualExtent(ptr=ptr, size=size, allocation_ptr=ptr, offset=0, crc32=0)] if size else []
        (problem,) = problems_of((entries, [], residual))
        assert problem.field == "entries[0]"
        assert "whole pages" in problem.message

    def test_an_allocation_past_the_address_space(self) -> None:
        start = (1 << 64) - 4096
        entries = [Allocation(ptr=start, size=8192, tag="")]
        residual = [ResidualExtent(ptr=start, size=8192, allocation_ptr=start, offset=0, crc32=0)]
        (problem,) = problems_of((entries, [], residual))
        assert "64-bit" in problem.message
        assert problem.value == "0xfffffffffffff000..0x10000000000001000"

    def test_an_extent_that_names_an_allocation_that_is_not_there(self) -> None:
        entries, model, residual = small()
        residual[0] = replace(residual[0], allocation_ptr=0xABC000)
        (problem,) = problems_of((entries, model, residual))
        assert problem.field == "residual_extents[0].allocation_ptr"
        assert problem.value == "0xabc000"

    def test_an_extent_in_another_allocation_than_it_names(self) -> None:
        entries, model, residual = small()
        index = next(n for n, one in enumerate(model) if one.ptr == BASE + 0x100000)
        model[index] = replace(model[index], allocation_ptr=BASE)
        (problem,) = problems_of((entries, model, residual))
        assert problem.field == f"model_weight_extents[{index}]"
        assert problem.message == "reaches outside its allocation 0x500000000000..0x500000002000"
        assert problem.value == "0x500000100000..0x500000101000"

    def test_an_extent_across_the_end_of_its_allocation(self) -> None:
        entries, model, residual = split([(BASE, 4096)], [(BASE, 4096)])
        model[0] = replace(model[0], size=4097)
        (problem,) = problems_of((entries, model, residual))
        assert problem.value == "0x500000000000..0x500000001001"

    def test_an_extent_without_bytes(self) -> None:
        entries, model, residual = split([(BASE, 4096)], [(BASE, 4096)])
        residual.append(ResidualExtent(ptr=BASE, size=0, allocation_ptr=BASE, offset=0, crc32=0))
        (problem,) = problems_of((entries, model, residual))
        assert problem.field == "residual_extents[0].size"

    def test_model_extents_out_of_canonical_order(self) -> None:
        entries, model, residual = small()
        model[0], model[1] = replace(model[1], offset=0), replace(model[0], offset=4096)
        (problem,) = problems_of((entries, model, residual))
        assert problem.field == "model_weight_extents[1]"
        assert "canonical order" in problem.message

    def test_residual_extents_out_of_address_order(self) -> None:
        entries, model, residual = small()
        residual[0], residual[1] = replace(residual[1], offset=0), replace(residual[0], offset=4096)
        (problem,) = problems_of((entries, model, residual))
        assert problem.field == "residual_extents[1]"
        assert problem.value == "0x500000000000"

    @pytest.mark.parametrize("offset", [0, 4095, 4097, 8192])
    def test_an_offset_that_is_not_where_the_padding_ends(self, offset: int) -> None:
        entries, model, residual = small()
        model[1] = replace(model[1], offset=offset)
        first, *_ = problems_of((entries, model, residual))
        assert first.field == "model_weight_extents[1].offset"
        assert first.value == str(offset)
        assert "must be 4096" in first.message

    def test_everything_wrong_is_reported_at_once(self) -> None:
        entries, model, residual = small()
        model[0] = replace(model[0], offset=8)
        residual[0] = replace(residual[0], size=8)
        residual[2] = replace(residual[2], allocation_ptr=1)
        fields = {problem.field for problem in problems_of((entries, model, residual))}
        assert {"model_weight_extents[0].offset", "entries[0]", "residual_extents[2].allocation_ptr"} <= fields

    def test_a_range_whose_allocation_is_found_by_address(self) -> None:
        rows: list[tuple[int, int, int | None]] = [(0x800, 16, None), (0x1000, 4096, None), (0x2000, 1, None)]
        problems = cover_problems([(0x1000, 0x1000)], [RangeGroup(field="plan", rows=rows)], page_bytes=4096)
        assert [(one.field, one.value) for one in problems] == [
            ("plan[0]", "0x800..0x810"),
            ("plan[2]", "0x2000..0x2001"),
        ]


def test_equal_ranges_of_two_lists_overlap() -> None:
    groups = [RangeGroup(field="plan", rows=[(0, 4096, None)]), RangeGroup(field="residual", rows=[(0, 4096, 0)])]
    (problem,) = cover_problems([(0, 4096)], groups, page_bytes=4096)
    assert (problem.field, problem.message, problem.value) == ("residual[0]", "overlaps plan[0]", "0x0..0x1000")


SPACE = 64
rows = st.lists(st.tuples(st.integers(0, SPACE), st.integers(-1, 16)), max_size=10)


@given(rows, st.sets(st.integers(0, 15), max_size=6))
@settings(max_examples=100)
def test_names_exactly_the_bytes_a_bitmap_finds(ranges: list[tuple[int, int]], pages: set[int]) -> None:
    allocations = [(page * 4, 4) for page in sorted(pages)]  # pages of 4 bytes
    group = RangeGroup(field="extents", rows=[(ptr, size, None) for ptr, size in ranges])
    problems = cover_problems(allocations, [group], page_bytes=4)
    counts = [0] * (SPACE + 32)
    for ptr, size in ranges:
        for byte in range(ptr, ptr + max(size, 0)):
            counts[byte] += 1
    held = {byte for ptr, size in allocations for byte in range(ptr, ptr + size)}
    assert _bytes_of(problems, "overlaps ") == {byte for byte, count in enumerate(counts) if count > 1}
    assert _bytes_of(problems, "belong to no extent") == {byte for byte in held if counts[byte] == 0}
    stray = {one.field for one in problems if "is in no allocation" in one.message or "reaches outside" in one.message}
    wanted = {
        f"extents[{index}]"
        for index, (ptr, size) in enumerate(ranges)
        if size > 0 and not any(start <= ptr and ptr + size <= start + length for start, length in allocations)
    }
    assert stray == wanted
    complete = all(counts[byte] == (1 if byte in held else 0) for byte in range(len(counts)))
    assert bool(problems) != (complete and all(size > 0 for _, size in ranges))


def _bytes_of(problems: list[Problem], message: str) -> set[int]:
    named: set[int] = set()
    for problem in problems:
        if message in problem.message:
            assert problem.value is not None
            match = re.fullmatch(r"0x([0-9a-f]+)\.\.0x([0-9a-f]+)", problem.value)
            assert match is not None
            named.update(range(int(match[1], 16), int(match[2], 16)))
    return named


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=8))
def test_the_complement_of_the_complement_is_the_covered_part(ranges: list[tuple[int, int]]) -> None:
    whole = [(0, 50)]
    left = [(ptr, size) for ptr, size, _ in complement(whole, ranges)]
    back = {b for ptr, size, _ in complement(whole, left) for b in range(ptr, ptr + size)}
    assert back == {b for ptr, size in ranges for b in range(ptr, min(ptr + size, 50))}
