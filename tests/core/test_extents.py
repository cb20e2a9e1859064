"""The extents algebra against a model that keeps one flag per byte."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.core.extents import (
    PAGE_BYTES,
    Allocation,
    AllocationIndex,
    MergedRange,
    ModelExtent,
    ObservedRange,
    file_layout,
    merge_aliases,
    pack_order,
    padded,
    residual_ranges,
    semantic_id,
)

SPACE = 96  # bytes of the model's address space; small, so that random ranges often meet

ranges = st.tuples(st.integers(0, SPACE - 1), st.integers(0, 24)).map(lambda r: (r[0], min(r[1], SPACE - r[0])))


@st.composite
def disjoint_allocations(draw: st.DrawFn) -> list[Allocation]:
    cuts = sorted(draw(st.sets(st.integers(0, SPACE), max_size=8)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    found = [Allocation(ptr=start, size=end - start, tag="t") for start, end in spans if end > start]
    return draw(st.permutations(found))


def observed(*rows: tuple[str, int, int]) -> list[ObservedRange]:
    return [ObservedRange(name=name, ptr=ptr, size=size) for name, ptr, size in rows]


class TestPadding:
    @pytest.mark.parametrize(("size", "whole"), [(0, 0), (1, 4096), (4095, 4096), (4096, 4096), (4097, 8192)])
    def test_rounds_up_to_a_page(self, size: int, whole: int) -> None:
        assert padded(size) == whole

    def test_layout_of_no_extent_is_empty(self) -> None:
        assert file_layout([]).offsets == ()
        assert file_layout([]).bytes == 0

    def test_layout_places_each_extent_after_the_padding_of_the_one_before(self) -> None:
        layout = file_layout([1, 4096, 4097, 5])
        assert layout.offsets == (0, 4096, 8192, 16384)
        assert layout.bytes == 20480

    @pytest.mark.parametrize("size", [0, -1])
    def test_layout_refuses_an_extent_without_bytes(self, size: int) -> None:
        with pytest.raises(ValueError, match="at least one byte"):
            file_layout([1, size])


class TestSemanticId:
    def test_is_the_digest_of_the_sorted_compact_rows(self) -> None:
        rows = b'[["a",0,2],["b",2,4]]'
        assert semantic_id([("b", 2, 4), ("a", 0, 2)]) == hashlib.sha256(rows).hexdigest()

    def test_escapes_what_is_not_ascii(self) -> None:
        assert semantic_id([("\u00e9", 0, 1)]) == hashlib.sha256(rb'[["\u00e9",0,1]]').hexdigest()

    def test_tells_names_offsets_and_sizes_apart(self) -> None:
        ids = {semantic_id([row]) for row in (("a", 0, 1), ("b", 0, 1), ("a", 1, 1), ("a", 0, 2))}
        assert len(ids) == 4

    def test_refuses_an_extent_without_tensors(self) -> None:
        with pytest.raises(ValueError, match="at least one tensor"):
            semantic_id([])


class TestPackOrder:
    def extent(self, digest: str, size: int, name: str, ptr: int) -> ModelExtent:
        return ModelExtent(
            ptr=ptr,
            size=size,
            allocation_ptr=0,
            semantic_id=name * 64,
            sha256=Digest.from_hex(digest * 64),
            offset=0,
            crc32=0,
        )

    def test_orders_by_digest_then_size_then_semantic_id_then_address(self) -> None:
        wanted = [
            self.extent("0", 9, "f", 900),
            self.extent("1", 1, "f", 800),
            self.extent("1", 2, "a", 700),
            self.extent("1", 2, "b", 500),
            self.extent("1", 2, "b", 600),
        ]
        assert pack_order(reversed(wanted)) == wanted

    @given(st.permutations(range(6)))
    def test_does_not_depend_on_the_order_of_observation(self, order: list[int]) -> None:
        extents = [self.extent("0a5"[n % 3], 1 + n // 3, "c", n) for n in range(6)]
        assert pack_order([extents[n] for n in order]) == pack_order(extents)


class TestMergeAliases:
    def test_neighbours_stay_apart(self) -> None:
        merged = merge_aliases(observed(("b", 110, 5), ("a", 100, 10)))
        assert merged == [
            MergedRange(ptr=100, size=10, tensors=(("a", 0, 10),)),
            MergedRange(ptr=110, size=5, tensors=(("b", 0, 5),)),
        ]

    def test_a_neighbour_does_not_change_the_identity(self) -> None:
        alone = merge_aliases(observed(("a", 100, 10)))
        beside = merge_aliases(observed(("a", 500, 10), ("z", 490, 10), ("y", 510, 1)))
        assert alone[0].semantic_id in {one.semantic_id for one in beside}

    def test_ranges_that_share_bytes_through_a_third_are_one(self) -> None:
        merged = merge_aliases(observed(("a", 100, 10), ("c", 118, 4), ("b", 105, 14)))
        assert merged == [MergedRange(ptr=100, size=22, tensors=(("a", 0, 10), ("b", 5, 14), ("c", 18, 4)))]

    def test_a_range_inside_another_does_not_shorten_it(self) -> None:
        merged = merge_aliases(observed(("whole", 0, 100), ("part", 10, 5), ("late", 99, 2)))
        assert [(one.ptr, one.size) for one in merged] == [(0, 101)]

    def test_a_write_seen_twice_counts_once(self) -> None:
        assert merge_aliases(observed(("a", 1, 2), ("a", 1, 2))) == merge_aliases(observed(("a", 1, 2)))

    def test_two_names_of_one_range_are_both_kept(self) -> None:
        merged = merge_aliases(observed(("lm_head", 8, 4), ("embed", 8, 4)))
        assert merged == [MergedRange(ptr=8, size=4, tensors=(("embed", 0, 4), ("lm_head", 0, 4)))]

    def test_empty_ranges_vanish(self) -> None:
        assert merge_aliases(observed(("nothing", 5, 0))) == []

    def test_an_empty_range_does_not_join_its_neighbours(self) -> None:
        merged = merge_aliases(observed(("a", 0, 5), ("nothing", 4, 0), ("b", 5, 5)))
        assert [(one.ptr, one.size) for one in merged] == [(0, 5), (5, 5)]

    def test_refuses_a_negative_size(self) -> None:
        with pytest.raises(ValueError, match="negative size"):
            merge_aliases(observed(("a", 5, -1)))

    @given(st.lists(ranges, max_size=12), st.randoms(use_true_random=False))
    @settings(max_examples=100)
    def test_agrees_with_a_bitmap(self, rows: list[tuple[int, int]], random: object) -> None:
        seen = [ObservedRange(name=f"t{n}", ptr=ptr, size=size) for n, (ptr, size) in enumerate(rows)]
        merged = merge_aliases(seen)
        # bytes: the union is kept, and no byte is in two results
        flags = [0] * SPACE
        for one in merged:
            for byte in range(one.ptr, one.ptr + one.size):
                flags[byte] += 1
        wanted = [int(any(ptr <= byte < ptr + size for ptr, size in rows)) for byte in range(SPACE)]
        assert flags == wanted
        # joints: byte n and n + 1 are in one result exactly when some chain of writes ties them
        for byte in range(SPACE - 1):
            tied = any(ptr <= byte and byte + 1 < ptr + size for ptr, size in rows)
            joined = any(one.ptr <= byte and byte + 1 < one.ptr + one.size for one in merged)
            assert tied == joined
        # names: every tensor is in exactly one result, at its place
        places = [(name, one.ptr + offset, size) for one in merged for name, offset, size in one.tensors]
        assert sorted(places) == sorted((one.name, one.ptr, one.size) for one in seen if one.size)
        assert merge_aliases(reversed(seen)) == merged


class TestResidualRanges:
    def test_without_model_ranges_everything_is_residual(self) -> None:
        allocations = [Allocation(ptr=8192, size=4096, tag=""), Allocation(ptr=4096, size=4096, tag="")]
        assert residual_ranges(allocations, []) == [(4096, 4096, 4096), (8192, 4096, 8192)]

    def test_worked_example_of_the_module(self) -> None:
        allocations = [Allocation(ptr=0x10000, size=0x3000, tag="w")]
        left = residual_ranges(allocations, [(0x10200, 128), (0x10100, 256)])
        assert left == [(0x10000, 0x100, 0x10000), (0x10280, 0x2D80, 0x10000)]

    @given(disjoint_allocations(), st.lists(ranges, max_size=12))
    @settings(max_examples=100)
    def test_agrees_with_a_bitmap(self, allocations: list[Allocation], model: list[tuple[int, int]]) -> None:
        left = residual_ranges(allocations, model)
        owner: list[int | None] = [None] * SPACE
        for ptr, size, start in left:
            assert size > 0
            for byte in range(ptr, ptr + size):
                assert owner[byte] is None
                owner[byte] = start
        for byte in range(SPACE):
            held = next((one.ptr for one in allocations if one.ptr <= byte < one.ptr + one.size), None)
            covered = any(ptr <= byte < ptr + size for ptr, size in model)
            assert owner[byte] == (None if covered else held)
        assert left == sorted(left)
        # as few ranges as possible: two of one allocation never touch
        for (ptr, size, start), (after, _, next_start) in pairwise(left):
            assert start != next_start or ptr + size < after


class TestAllocationIndex:
    INDEX = AllocationIndex([Allocation(ptr=200, size=50, tag="b"), Allocation(ptr=100, size=50, tag="a")])

    @pytest.mark.parametrize(
        ("ptr", "size", "tag"),
        [(100, 50, "a"), (149, 1, "a"), (200, 1, "b"), (249, 1, "b")],
    )
    def test_finds_the_allocation_that_holds_all_bytes(self, ptr: int, size: int, tag: str) -> None:
        found = self.INDEX.holding(ptr, size)
        assert found is not None
        assert found.tag == tag

    @pytest.mark.parametrize(("ptr", "size"), [(99, 1), (149, 2), (150, 1), (250, 1), (199, 2)])
    def test_finds_none_for_a_byte_outside(self, ptr: int, size: int) -> None:
        assert self.INDEX.holding(ptr, size) is None


def test_a_page_is_what_the_formats_say() -> None:
    assert PAGE_BYTES == 4096
