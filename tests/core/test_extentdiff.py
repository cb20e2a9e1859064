"""Comparing two memories: matched by what extents are, named by tensor, whatever the addresses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.core.extentdiff import (
    ChangeKind,
    ExtentChange,
    MemoryMap,
    NamedExtent,
    compare_memory,
    memory_of,
    same_but_capture,
)
from coldsnap.core.extents import ResidualExtent, semantic_id
from coldsnap.core.manifest import parse_native_manifest, parse_recovery_manifest
from coldsnap.testing.synthetic import SyntheticSpec, tensor_name, worker_manifests

BASE = 0x1000


def extent(name: str, content: str, *, ptr: int, size: int = 64) -> NamedExtent:
    return NamedExtent(
        semantic_id=semantic_id([(name, 0, size)]),
        sha256=Digest.of(content.encode()),
        ptr=ptr,
        size=size,
        tensors=(name,),
    )


def memory(*extents: NamedExtent, residual: tuple[ResidualExtent, ...] = (), blob: str | None = None) -> MemoryMap:
    return MemoryMap(
        allocations=((BASE, 4096, "weights"),),
        extents=extents,
        residual=residual,
        residual_sha256=Digest.of(blob.encode()) if blob is not None else None,
    )


def rest(ptr: int, size: int, crc32: int) -> ResidualExtent:
    return ResidualExtent(ptr=ptr, size=size, allocation_ptr=BASE, offset=0, crc32=crc32)


A, B = extent("a", "1", ptr=BASE), extent("b", "2", ptr=BASE + 64)


def test_a_memory_is_the_same_as_itself() -> None:
    found = compare_memory(memory(A, B, blob="r"), memory(A, B, blob="r"))
    assert found.same
    assert (found.changes, found.num_equal, found.equal_bytes, found.num_moved) == ((), 2, 128, 0)


def test_a_tensor_with_other_bytes_is_named() -> None:
    found = compare_memory(memory(A, B), memory(A, replace(B, sha256=Digest.of(b"3"))))
    assert not found.same
    assert found.changes == (
        ExtentChange(
            kind=ChangeKind.CHANGED, tensors=("b",), semantic_id=B.semantic_id, bytes_before=64, bytes_after=64
        ),
    )
    assert (found.num_equal, found.equal_bytes) == (1, 64)


def test_another_order_in_memory_changes_no_tensor() -> None:
    found = compare_memory(memory(A, B), memory(replace(B, ptr=BASE), replace(A, ptr=BASE + 64)))
    assert found.changes == ()
    assert (found.num_equal, found.num_moved, found.moved_bytes) == (2, 2, 128)
    assert not found.same, "it is not the same memory, though it is the same model"


def test_new_and_lost_tensors() -> None:
    found = compare_memory(memory(A), memory(B))
    assert [(one.kind, one.tensors, one.bytes_before, one.bytes_after) for one in found.changes] == [
        (ChangeKind.REMOVED, ("a",), 64, None),
        (ChangeKind.ADDED, ("b",), None, 64),
    ]


def test_a_tensor_of_another_size_is_one_change() -> None:
    found = compare_memory(memory(A, B), memory(extent("a", "1", ptr=BASE, size=128), B))
    assert [(one.kind, one.tensors, one.bytes_before, one.bytes_after) for one in found.changes] == [
        (ChangeKind.RESIZED, ("a",), 64, 128)
    ]


def test_twins_of_one_name_are_paired_by_their_bytes_first() -> None:
    first, second = extent("t", "1", ptr=BASE), extent("t", "2", ptr=BASE + 64)
    swapped = memory(replace(second, ptr=BASE), replace(first, ptr=BASE + 64))
    found = compare_memory(memory(first, second), swapped)
    assert found.changes == ()
    assert found.num_moved == 2
    other = extent("t", "3", ptr=BASE + 64)
    found = compare_memory(memory(first, second), memory(first, other))
    assert [one.kind for one in found.changes] == [ChangeKind.CHANGED]
    assert found.num_equal == 1


def test_a_memory_without_names_takes_those_of_the_other_side() -> None:
    nameless = replace(B, tensors=(), sha256=Digest.of(b"3"))
    found = compare_memory(memory(nameless), memory(B))
    assert found.changes[0].tensors == ("b",)
    both = compare_memory(memory(nameless), memory(replace(B, tensors=())))
    assert both.changes[0].tensors == ()
    assert both.changes[0].semantic_id == B.semantic_id


def test_residual_bytes_are_compared_where_they_lie() -> None:
    before = memory(residual=(rest(BASE, 100, 1), rest(BASE + 200, 50, 2), rest(BASE + 300, 7, 3)), blob="x")
    after = memory(residual=(rest(BASE, 100, 9), rest(BASE + 200, 50, 2), rest(BASE + 400, 11, 3)), blob="y")
    found = compare_memory(before, after).residual
    assert not found.same
    assert (found.num_changed, found.changed_bytes) == (1, 100)
    assert (found.only_before_bytes, found.only_after_bytes) == (7, 11)


def test_equal_checksums_do_not_prove_residual_bytes_equal() -> None:
    same_crc = (rest(BASE, 100, 1),)
    found = compare_memory(memory(residual=same_crc, blob="x"), memory(residual=same_crc, blob="y"))
    assert not found.residual.same
    assert not found.same


@settings(max_examples=60, deadline=None)
@given(
    changed=st.sets(st.integers(0, 39), max_size=6),
    order=st.permutations(range(40)),
)
def test_exactly_the_changed_tensors_are_named_in_any_order(changed: set[int], order: list[int]) -> None:
    before = [extent(f"t{number}", f"{number}", ptr=BASE + 64 * number) for number in range(40)]
    after = [
        extent(f"t{number}", f"{number}" + ("x" if number in changed else ""), ptr=BASE + 64 * place)
        for place, number in enumerate(order)
    ]
    found = compare_memory(memory(*before), memory(*after))
    assert {one.tensors for one in found.changes} == {(f"t{number}",) for number in changed}
    assert {one.kind for one in found.changes} <= {ChangeKind.CHANGED}
    assert found.num_equal == 40 - len(changed)
    moved = [number for place, number in enumerate(order) if place != number and number not in changed]
    assert found.num_moved == len(moved)
    back = compare_memory(memory(*after), memory(*before))
    assert {one.tensors for one in back.changes} == {one.tensors for one in found.changes}


def test_manifests_of_a_twin() -> None:
    spec = SyntheticSpec(num_extents=60)
    base = worker_manifests(spec, "w0")
    twin = worker_manifests(replace(spec, changed={"w0": frozenset({3, 41})}), "w0")
    maps = [memory_of(parse_recovery_manifest(made.recovery)) for made in (base, twin)]
    found = compare_memory(maps[0], maps[1])
    assert [one.tensors for one in found.changes] == [(tensor_name(3),), (tensor_name(41),)]
    assert found.residual.same
    nameless = compare_memory(*(memory_of(parse_native_manifest(made.native)) for made in (base, twin)))
    assert {one.semantic_id for one in nameless.changes} == {one.semantic_id for one in found.changes}
    assert {one.tensors for one in nameless.changes} == {()}


@pytest.mark.parametrize("role", ["native", "recovery"])
def test_manifests_that_differ_in_the_captures_id(role: str) -> None:
    spec = SyntheticSpec(num_extents=30)
    data = [
        getattr(worker_manifests(one, "w0"), role)
        for one in (spec, replace(spec, capture_id="another"), replace(spec, changed={"w0": frozenset({1})}))
    ]
    assert same_but_capture(data[0], data[1])
    assert same_but_capture(data[0], data[0])
    assert not same_but_capture(data[0], data[2])
    assert not same_but_capture(data[0], data[1].replace(b'"rank":0', b'"rank":1'))


@pytest.mark.parametrize("odd", [b"", b"{}", b'{"capture_id":"', b'{"capture_id": "a"}', b"[1]"])
def test_what_is_not_written_as_here_must_be_parsed(odd: bytes) -> None:
    assert not same_but_capture(odd, odd)
