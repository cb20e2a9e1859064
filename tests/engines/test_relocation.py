"""Where captured bytes go in a model that was built again, and every drift that is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.core.extents import Allocation, MergedRange, ModelExtent, ResidualExtent, residual_ranges
from coldsnap.core.manifest import ModelSource, NativeManifest, RecoveryManifest
from coldsnap.core.replay import ReplayEntry
from coldsnap.engines.relocation import Relocation
from coldsnap.errors import Refused

PAGE = 4096


def allocation(ptr: int, pages: int, tag: str = "weights") -> Allocation:
    return Allocation(ptr=ptr, size=pages * PAGE, tag=tag)


def tensor(name: str, ptr: int, size: int) -> MergedRange:
    return MergedRange(ptr=ptr, size=size, tensors=((name, 0, size),))


def captured(allocations: list[Allocation], ranges: list[MergedRange]) -> NativeManifest:
    """The manifest of a capture in which the loader filled `ranges`; files and digests are of no matter here."""

    def holding(ptr: int) -> int:
        return max(one.ptr for one in allocations if one.ptr <= ptr)

    return NativeManifest(
        capture_id="c",
        worker="w0",
        rank=0,
        entries=tuple(allocations),
        model_weight_extents=tuple(
            ModelExtent(
                ptr=one.ptr,
                size=one.size,
                allocation_ptr=holding(one.ptr),
                semantic_id=one.semantic_id,
                sha256=Digest.of(one.tensors[0][0].encode()),
                offset=number * PAGE,
                crc32=0,
            )
            for number, one in enumerate(ranges)
        ),
        residual_extents=tuple(
            ResidualExtent(ptr=ptr, size=size, allocation_ptr=start, offset=number * PAGE, crc32=0)
            for number, (ptr, size, start) in enumerate(
                residual_ranges(allocations, [(one.ptr, one.size) for one in ranges])
            )
        ),
        model_weights=None,
        residual=None,
    )


def recovery(manifest: NativeManifest) -> RecoveryManifest:
    return RecoveryManifest(
        capture_id="c",
        worker="w0",
        rank=0,
        model_source=ModelSource(model_id="m", revision="r", metadata_sha256=Digest.of(b"")),
        entries=manifest.entries,
        replay_plan=tuple(
            ReplayEntry(semantic_id=one.semantic_id, sha256=one.sha256, ptr=one.ptr, size=one.size, pieces=())
            for one in manifest.model_weight_extents
        ),
        residual_extents=manifest.residual_extents,
        residual=None,
    )


THERE = [allocation(0x10000, 2), allocation(0x20000, 1, "tables")]
RANGES = [tensor("a", 0x10000, 100), tensor("b", 0x11000, 4096), tensor("c", 0x20010, 16)]
MANIFEST = captured(THERE, RANGES)
HERE = (allocation(0x50000, 2), allocation(0x90000, 1, "tables"))
LIVE = (tensor("a", 0x50000, 100), tensor("b", 0x51000, 4096), tensor("c", 0x90010, 16))


def test_every_extent_finds_its_live_address() -> None:
    relocation = Relocation(allocations=HERE, ranges=LIVE)
    moved = relocation.native(MANIFEST)
    assert moved.entries == HERE
    assert [(one.ptr, one.allocation_ptr) for one in moved.model_weight_extents] == [
        (0x50000, 0x50000),
        (0x51000, 0x50000),
        (0x90010, 0x90000),
    ]
    assert [(one.ptr, one.size) for one in moved.residual_extents] == [
        (0x50064, 0x1000 - 100),
        (0x90000, 0x10),
        (0x90020, 0x1000 - 0x20),
    ]
    assert [one.ptr for one in relocation.recovery(recovery(MANIFEST)).replay_plan] == [0x50000, 0x51000, 0x90010]
    for was, now in zip(MANIFEST.model_weight_extents, moved.model_weight_extents, strict=True):
        assert replace(was, ptr=now.ptr, allocation_ptr=now.allocation_ptr) == now


def test_at_home_nothing_moves() -> None:
    relocation = Relocation(allocations=tuple(THERE), ranges=tuple(RANGES))
    assert relocation.native(MANIFEST) == MANIFEST
    assert relocation.recovery(recovery(MANIFEST)) == recovery(MANIFEST)


def test_equal_sizes_in_another_order_move_by_name() -> None:
    there, here = [allocation(0x10000, 2)], (allocation(0x50000, 2),)
    manifest = captured(there, [tensor("a", 0x10000, 4096), tensor("b", 0x11000, 4096)])
    swapped = (tensor("b", 0x50000, 4096), tensor("a", 0x51000, 4096))
    moved = Relocation(allocations=here, ranges=swapped).native(manifest)
    assert [one.ptr for one in moved.model_weight_extents] == [0x51000, 0x50000]


def test_a_tensor_that_was_copied_to_two_places_goes_to_both() -> None:
    twice = [tensor("a", 0x10000, 4096), tensor("a", 0x11000, 4096)]
    here = (tensor("a", 0x50000, 4096), tensor("a", 0x51000, 4096))
    moved = Relocation(allocations=(allocation(0x50000, 2),), ranges=here).native(
        captured([allocation(0x10000, 2)], twice)
    )
    assert [one.ptr for one in moved.model_weight_extents] == [0x50000, 0x51000]


def test_an_extent_that_the_capture_kept_as_residual_stays_residual() -> None:
    """One of two copies was changed before the capture, which noticed: its place is home to the residual."""
    manifest = captured([allocation(0x10000, 2)], [tensor("a", 0x11000, 4096)])
    here = (tensor("a", 0x50000, 4096), tensor("a", 0x51000, 4096))
    moved = Relocation(allocations=(allocation(0x50000, 2),), ranges=here).native(manifest)
    assert [one.ptr for one in moved.model_weight_extents] == [0x51000]
    assert [(one.ptr, one.size) for one in moved.residual_extents] == [(0x50000, 4096)]


@pytest.mark.parametrize(
    ("allocations", "ranges", "named"),
    [
        ((HERE[0],), LIVE[:2], ["entries[1]: was 4096 bytes of 'tables' at capture", "no such allocation"]),
        ((*HERE, allocation(0xA0000, 1)), LIVE, ["entries[2]: was no such allocation", "4096 bytes of 'weights'"]),
        ((allocation(0x50000, 3), HERE[1]), LIVE, ["entries[0]: was 8192 bytes", "12288 bytes"]),
        ((HERE[0], allocation(0x90000, 1, "other")), LIVE, ["entries[1]", "'tables'", "'other'"]),
        ((HERE[1], allocation(0xA0000, 2)), LIVE, ["entries[0]", "entries[1]"]),
        (HERE, LIVE[1:], ["model_weight_extents[0]: has no place", RANGES[0].semantic_id]),
        (HERE, (tensor("z", 0x50000, 100), *LIVE[1:]), ["model_weight_extents[0]", "for z were no model extent"]),
        (HERE, (tensor("a", 0x50000, 96), *LIVE[1:]), ["model_weight_extents[0]", "100 bytes", "96 bytes for a"]),
        (HERE, (tensor("a", 0x50040, 100), *LIVE[1:]), ["overlaps", "64 bytes belong to no extent"]),
    ],
)
def test_drift_is_refused_and_named(
    allocations: tuple[Allocation, ...], ranges: tuple[MergedRange, ...], named: list[str]
) -> None:
    relocation = Relocation(allocations=allocations, ranges=ranges)
    with pytest.raises(Refused) as native:
        relocation.native(MANIFEST)
    with pytest.raises(Refused) as other:
        relocation.recovery(recovery(MANIFEST))
    text = " ".join(str(problem) for problem in native.value.problems)
    assert [part for part in named if part not in text] == []
    assert len(other.value.problems) == len(native.value.problems)
    assert all(problem.cure for problem in native.value.problems)


@given(st.data())
def test_any_layout_moves_as_a_whole(data: st.DataObject) -> None:
    """Extents keep their offsets, cover what they covered, and a second move brings them home."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    there = [allocation(0x1000000 * (n + 1), pages) for n, pages in enumerate(sizes)]
    ranges = []
    for number, one in enumerate(there):
        cuts = sorted(data.draw(st.sets(st.integers(0, one.size), max_size=6)))
        for start, end in zip(cuts[::2], cuts[1::2], strict=False):
            ranges.append(tensor(f"t{number}.{start}", one.ptr + start, end - start))
    bases = sorted(data.draw(st.sets(st.integers(1, 1000), min_size=len(there), max_size=len(there))))
    here = [replace(one, ptr=base * 0x100000) for one, base in zip(there, bases, strict=True)]
    shift = {was.ptr: now.ptr - was.ptr for was, now in zip(there, here, strict=True)}

    def move(ptr: int) -> int:
        return ptr + shift[max(one.ptr for one in there if one.ptr <= ptr)]

    live = [replace(one, ptr=move(one.ptr)) for one in ranges]
    manifest = captured(there, ranges)
    moved = Relocation(allocations=tuple(here), ranges=tuple(live)).native(manifest)
    assert [one.ptr for one in moved.model_weight_extents] == [move(one.ptr) for one in manifest.model_weight_extents]
    assert [one.ptr for one in moved.residual_extents] == [move(one.ptr) for one in manifest.residual_extents]
    assert Relocation(allocations=tuple(there), ranges=tuple(ranges)).native(moved) == manifest
