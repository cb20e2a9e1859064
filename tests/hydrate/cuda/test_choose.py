"""Which way is taken, and what is said about it."""

from __future__ import annotations

import pytest

from coldsnap.hydrate import TransferPath, libc
from coldsnap.hydrate.backing import Backing
from coldsnap.hydrate.choose import FileFacts
from coldsnap.hydrate.cuda.choose import UNIFIED_BUDGET_BYTES, RingShape, choose_device_path, ring_shape

DISK = Backing(in_memory=False, huge_pages=False)
SMALL_PAGES = Backing(in_memory=True, huge_pages=False)
HUGE_PAGES = Backing(in_memory=True, huge_pages=True)
ALIGNMENT = libc.DirectAlignment(memory=512, offset=512)
GIB = 1 << 30


def facts(*, wanted: int = GIB, cached: float | None = 0.0, direct: bool = True) -> FileFacts:
    return FileFacts(wanted_bytes=wanted, cached_fraction=cached, direct=ALIGNMENT if direct else None)


@pytest.mark.parametrize(
    ("file", "backing", "unified", "path", "says"),
    [
        (facts(), HUGE_PAGES, False, TransferPath.MAPPED, "16 cores"),
        (facts(), HUGE_PAGES, True, TransferPath.REGISTERED, "huge pages"),
        (facts(direct=False), SMALL_PAGES, False, TransferPath.BUFFERED, "no O_DIRECT"),
        (facts(cached=0.49), DISK, False, TransferPath.DIRECT, "49%"),
        (facts(cached=0.5), DISK, False, TransferPath.BUFFERED, "50%"),
        (facts(cached=0.1), DISK, True, TransferPath.DIRECT, "hold it twice"),
        (facts(cached=None), DISK, False, TransferPath.DIRECT, "does not tell"),
        (facts(wanted=1000), DISK, False, TransferPath.BUFFERED, "only 1000 bytes"),
    ],
)
def test_the_rule(file: FileFacts, backing: Backing, unified: bool, path: TransferPath, says: str) -> None:
    choice = choose_device_path(file, backing, proved=True, unified=unified, num_cores=16)
    assert choice.path is path
    assert says in choice.reason


@pytest.mark.parametrize(
    ("cores", "path"), [(4, TransferPath.MIXED), (9, TransferPath.MIXED), (10, TransferPath.MAPPED)]
)
def test_few_cores_lock_pages_many_copy_them(cores: int, path: TransferPath) -> None:
    choice = choose_device_path(facts(), HUGE_PAGES, proved=True, unified=False, num_cores=cores)
    assert choice.path is path
    assert f"{cores} cores" in choice.reason


@pytest.mark.parametrize("wanted", list(TransferPath))
def test_a_wish_is_granted(wanted: TransferPath) -> None:
    choice = choose_device_path(facts(), DISK, proved=True, unified=False, num_cores=16, wanted=wanted)
    assert (choice.path, choice.reason) == (wanted, "asked for")


def test_direct_is_a_wish_that_the_file_system_may_refuse() -> None:
    choice = choose_device_path(
        facts(direct=False), DISK, proved=True, unified=False, num_cores=16, wanted=TransferPath.DIRECT
    )
    assert choice.path is TransferPath.BUFFERED
    assert "no O_DIRECT" in choice.reason


@pytest.mark.parametrize("wanted", [None, *TransferPath])
@pytest.mark.parametrize("backing", [DISK, SMALL_PAGES, HUGE_PAGES])
def test_what_nobody_proved_never_skips_the_hash(wanted: TransferPath | None, backing: Backing) -> None:
    choice = choose_device_path(facts(), backing, proved=False, unified=False, num_cores=16, wanted=wanted)
    assert choice.path in (TransferPath.BUFFERED, TransferPath.DIRECT)
    if wanted in (TransferPath.BUFFERED, TransferPath.DIRECT):
        assert choice.path is wanted


def test_shared_memory_bounds_the_buffers() -> None:
    for asked in (0, 1, 100):
        shape = ring_shape(
            TransferPath.BUFFERED, num_cores=64, unified=True, hashing=False, block_bytes=4 << 20, asked=asked
        )
        assert shape.num_slots * (4 << 20) <= UNIFIED_BUDGET_BYTES
        assert 1 <= shape.num_threads <= shape.num_slots // 2


def test_threads_asked_for_are_given_each_with_a_slot_and_some_on_their_way() -> None:
    for path in TransferPath:
        for asked in (1, 5, 64):
            shape = ring_shape(path, num_cores=2, unified=False, hashing=False, block_bytes=4 << 20, asked=asked)
            assert shape.num_threads == asked
            assert shape.num_slots > asked


def test_the_thread_that_talks_to_the_driver_keeps_a_core() -> None:
    for cores, readers in ((1, 1), (2, 1), (4, 3), (16, 8), (64, 8)):
        for path in (TransferPath.BUFFERED, TransferPath.MIXED):
            shape = ring_shape(path, num_cores=cores, unified=False, hashing=False, block_bytes=8 << 20)
            assert shape.num_threads == readers


def test_hashing_takes_every_core() -> None:
    assert ring_shape(
        TransferPath.MAPPED, num_cores=16, unified=False, hashing=False, block_bytes=8 << 20
    ) == RingShape(num_threads=14, num_slots=28)
    shape = ring_shape(TransferPath.BUFFERED, num_cores=24, unified=False, hashing=True, block_bytes=8 << 20)
    assert shape.num_threads == 24
