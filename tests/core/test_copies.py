"""May a pack be copied into memory? The rule, at its edges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.core.copies import HostMemory, may_copy, reserve_bytes, worth_copying

GIB = 1 << 30


@pytest.mark.parametrize(("total_gib", "reserve_gib"), [(1, 4), (64, 4), (80, 5), (1600, 100)])
def test_a_sixteenth_and_at_least_four_gib_are_left_to_others(total_gib: int, reserve_gib: int) -> None:
    assert reserve_bytes(HostMemory(total_bytes=total_gib * GIB, available_bytes=0)) == reserve_gib * GIB


def test_the_last_byte_that_fits_is_allowed_and_the_next_is_not() -> None:
    memory = HostMemory(total_bytes=32 * GIB, available_bytes=20 * GIB)
    assert may_copy(16 * GIB, memory).allowed
    refused = may_copy(16 * GIB + 1, memory)
    assert not refused.allowed
    assert "would leave less than 4.0 GiB" in refused.reason
    assert "20.0 GiB available" in refused.reason


@given(st.integers(1, 1 << 45), st.integers(0, 1 << 45), st.integers(0, 1 << 45))
def test_memory_that_a_device_shares_never_holds_the_bytes_twice(size: int, total: int, available: int) -> None:
    verdict = may_copy(size, HostMemory(total_bytes=total, available_bytes=available, unified=True))
    assert not verdict.allowed
    assert "twice" in verdict.reason


@given(st.integers(1, 1 << 45), st.integers(0, 1 << 45), st.integers(0, 1 << 45))
def test_an_allowed_copy_leaves_the_reserve(size: int, total: int, available: int) -> None:
    memory = HostMemory(total_bytes=total, available_bytes=available)
    assert may_copy(size, memory).allowed == (available - size >= reserve_bytes(memory))


@pytest.mark.parametrize(("cached", "worth"), [(None, True), (0.0, True), (0.49, True), (0.5, False), (1.0, False)])
def test_what_the_page_cache_has_is_not_copied_beside_a_restore(cached: float | None, worth: bool) -> None:
    verdict = worth_copying(cached)
    assert verdict.allowed is worth
    assert "page cache" in verdict.reason
