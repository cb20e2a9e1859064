"""vLLM's weights adopted, its cache gone and back, and its books true whatever failed."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from coldsnap.engines.vllm.cumem import PINNED_SLACK_BYTES, CuMemMemory
from coldsnap.engines.vllm.pages import CuMem, CuMemPages, pinned_cached_bytes, segment_bytes
from coldsnap.engines.vllm.pools import Handle, rows_of
from coldsnap.errors import ColdsnapError, EngineError, HostError, OutOfSpace, Refused, ResourceBusy
from coldsnap.hydrate import ProvedSource, Segment, hydrate_file
from coldsnap.testing.cuda import GARBAGE, FakeDriver
from coldsnap.testing.cumem import FakeCuMem

from .conftest import MIB, LoadedVllm  # isort: skip

KV_BYTES = 3 * 16 * MIB + 2 * MIB
"""Keys and values of three layers, and scratch."""
WEIGHT_BYTES = (2 + 20 + 24) * MIB


def bytes_of(vllm: LoadedVllm, name: str) -> bytes:
    return vllm.driver.peek(*vllm.tensors[name])


def test_weights_are_adopted_where_they_are_and_as_they_are(vllm: LoadedVllm, empty_memory: CuMemMemory) -> None:
    before = list(vllm.driver.calls)
    adopted = empty_memory.adopt_weights()
    assert empty_memory.allocations == adopted
    assert sum(one.size for one in adopted) == WEIGHT_BYTES
    for name in ("norm", "embed", "qkv"):
        ptr, size = vllm.tensors[name]
        assert any(one.ptr <= ptr and ptr + size <= one.ptr + one.size for one in adopted)
    assert [one for one in vllm.driver.calls if one not in before] == []
    assert empty_memory.adopt_weights() == ()


def test_what_came_to_the_weights_later_is_adopted_by_the_next_call(vllm: LoadedVllm, memory: CuMemMemory) -> None:
    with vllm.allocator.use_memory_pool("weights"):
        draft = vllm.allocate("draft", 12 * MIB)
    assert [(one.ptr, one.size) for one in memory.adopt_weights()] == [(draft, 12 * MIB)]


def test_what_graphs_use_sleeps_and_wakes_as_weights_do_if_it_is_to_be_kept(
    vllm: LoadedVllm, empty_memory: CuMemMemory
) -> None:
    empty_memory.keep_graphs()
    empty_memory.settle(Module(), None)
    with vllm.cumem.capturing():
        ptr = vllm.allocate("between", 3 * MIB)
    vllm.free("between")
    (late,) = empty_memory.complete()
    assert (late.ptr, late.size, late.tag.partition(":")[0]) == (ptr, 20 * MIB, "cudagraph")
    assert vllm.driver.peek(ptr, 9) == bytes([GARBAGE]) * 9, "free blocks of weights become zero, these do not"
    empty_memory.discard_kv()
    empty_memory.unmap()
    assert vllm.books_are_true()
    assert not vllm.really_mapped()[ptr]
    assert empty_memory.held_bytes() == 2 * MIB, "what is left is of the tag runtime"
    empty_memory.remap()
    empty_memory.restore_kv()
    assert vllm.driver.peek(ptr, 3 * MIB) == bytes(3 * MIB)
    assert vllm.books_are_true()


def test_what_graphs_use_stays_where_nobody_asked(vllm: LoadedVllm, empty_memory: CuMemMemory) -> None:
    vllm.cumem.lend_to_graphs()
    empty_memory.settle(Module(), None)
    with vllm.cumem.capturing():
        ptr = vllm.allocate("between", 3 * MIB)
    assert empty_memory.complete() == ()
    empty_memory.unmap()
    assert vllm.really_mapped()[ptr]
    assert empty_memory.held_bytes() == 22 * MIB


def free_among(memory: CuMemMemory, vllm: LoadedVllm) -> dict[int, tuple[tuple[int, int], ...]]:
    return {row.ptr: row.spare for row in rows_of(vllm.allocator) if row.ptr in {one.ptr for one in memory.allocations}}


SEALED = {"seed": 512, "table": MIB, "state": 3 * MIB, "states": 64 * MIB}


@pytest.mark.parametrize("form", ["0.26", "0.33"])
def test_sealed_weights_have_no_room_for_what_is_made_later(form: Literal["0.26", "0.33"]) -> None:
    driver = FakeDriver()
    vllm = LoadedVllm(driver, FakeCuMem(driver, form=form))
    with vllm.allocator.use_memory_pool("weights"), CuMemMemory(driver, ordinal=0, cumem=vllm.lent()) as memory:
        for name, size in (("w0", 3000), ("gone", 100_000), ("w1", 512), ("w2", 9 * MIB), ("w3", 4 * MIB)):
            vllm.allocate(name, size)
        vllm.free("gone")
        memory.settle(Module(w0=Tensor(*vllm.tensors["w0"])), None)
        spare = [size for blocks in free_among(memory, vllm).values() for _, size in blocks]
        assert sorted(spare) == [100_352, 2 * MIB - 3072 - 100_352 - 512, 7 * MIB]
        memory.seal()
        assert set(free_among(memory, vllm).values()) == {()}
        later = {name: vllm.allocate(name, size) for name, size in SEALED.items()}
        adopted = memory.allocations
        assert [one for one in later.values() if any(a.ptr <= one < a.ptr + a.size for a in adopted)] == []
        assert (memory.complete(), memory.allocations) == ((), adopted)
        memory.discard_kv()
        memory.unmap()
        assert [vllm.really_mapped()[one.ptr] for one in adopted] == [False] * 2
        for name, ptr in later.items():
            assert driver.peek(ptr, SEALED[name]) == bytes([GARBAGE]) * SEALED[name], "it is left alone"
        memory.remap()
        memory.restore_kv()
    assert vllm.books_are_true()


def test_a_seal_that_does_not_hold_is_told_when_something_was_made_there(
    vllm: LoadedVllm, empty_memory: CuMemMemory
) -> None:
    """Nothing can be taken: the pool of weights is not the one that is in use."""
    taken: list[int] = []
    with vllm.allocator.use_memory_pool("weights"):
        ptr = vllm.allocate("w", 3 * MIB)
        with CuMemMemory(vllm.driver, ordinal=0, cumem=replace(vllm.lent(), take=taken.append)) as memory:
            memory.settle(Module(w=Tensor(ptr, 3 * MIB)), None)
            memory.seal()
            assert taken
            assert vllm.driver.peek(ptr + 3 * MIB, 17 * MIB) == bytes(17 * MIB)
            assert memory.complete() == ()
            inside = vllm.allocate("late", 2 * MIB)
            with pytest.raises(EngineError, match="among the weights") as caught:
                memory.complete()
            assert caught.value.facts == {"ptr": inside, "size": 17 * MIB}


def test_weights_that_vllm_gave_up_are_told(vllm: LoadedVllm, memory: CuMemMemory) -> None:
    ptr, _ = vllm.tensors["embed"]
    vllm.free("embed")
    with pytest.raises(Refused) as caught:
        memory.adopt_weights()
    assert [one.field for one in caught.value.problems] == [f"cumem[0x{ptr:x}]"]


def test_sleeping_weights_are_not_adopted(vllm: LoadedVllm, empty_memory: CuMemMemory) -> None:
    vllm.allocator.sleep(())
    with pytest.raises(Refused, match="asleep already"):
        empty_memory.adopt_weights()
    assert empty_memory.allocations == ()


class Tensor:
    """As much of a torch tensor as a layout asks for."""

    def __init__(self, ptr: int, size: int) -> None:
        self._ptr, self._size = ptr, size

    def data_ptr(self) -> int:
        return self._ptr

    def numel(self) -> int:
        return self._size // 2

    def element_size(self) -> int:
        return 2


class Module:
    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors

    def named_parameters(self, *, remove_duplicate: bool) -> list[tuple[str, Tensor]]:
        return list(self._tensors.items())

    def named_buffers(self, *, remove_duplicate: bool) -> list[tuple[str, Tensor]]:
        return [("empty", Tensor(0, 0))]


def test_the_loader_s_tags_tell_one_layout_from_another() -> None:
    tags: list[list[str]] = []
    for names in (("norm", "embed"), ("norm", "embed"), ("embed", "norm")):
        driver = FakeDriver()
        vllm = LoadedVllm(driver, FakeCuMem(driver, form="0.33"))
        with vllm.allocator.use_memory_pool("weights"):
            model = Module(**{name: Tensor(vllm.allocate(name, 4096), 4096) for name in names})
        with CuMemMemory(driver, ordinal=0, cumem=vllm.lent()) as memory:
            memory.prepare(model, None)
            assert list(memory.allocations) == []
            memory.settle(model, None)
            tags.append([one.tag for one in memory.allocations])
    assert tags[0] == tags[1] != tags[2]


def test_a_night_keeps_every_address_and_handle_and_brings_zero_back(vllm: LoadedVllm, memory: CuMemMemory) -> None:
    handles = {ptr: data.handle for ptr, data in vllm.allocator.pointer_to_data.items()}
    kept = bytes_of(vllm, "tables")
    memory.copy_in(vllm.tensors["embed"][0], memoryview(b"embed"))
    for _ in range(3):
        assert memory.discard_kv() == KV_BYTES
        assert vllm.asleep()["weights"] == [False] * 3
        assert memory.discard_kv() == 0
        memory.unmap()
        assert vllm.books_are_true()
        assert vllm.asleep() == {
            "weights": [True] * 3,
            "kv_cache": [True] * 3,
            "workspace": [True],
            "runtime": [False],
        }
        assert memory.held_bytes() == 2 * MIB
        memory.remap()
        memory.restore_kv()
        assert not any(flag for flags in vllm.asleep().values() for flag in flags)
        assert vllm.books_are_true()
        for name in ("norm", "embed", "qkv", "kv0", "kv1", "kv2", "scratch"):
            assert bytes_of(vllm, name) == bytes(vllm.tensors[name][1])
        assert bytes_of(vllm, "tables") == kept == bytes([GARBAGE]) * MIB
        assert {ptr: data.handle for ptr, data in vllm.allocator.pointer_to_data.items()} == handles
    memory.restore_kv()


def test_keys_and_values_come_back_beside_who_fills_the_weights(vllm: LoadedVllm, empty_memory: CuMemMemory) -> None:
    """Mapping waits here until the weights are filled: so neither waits for the other."""
    filled, begun = threading.Event(), threading.Event()
    kv = {vllm.tensors[name][0] for name in ("kv0", "kv1", "kv2", "scratch")}

    def map_late(handle: Handle) -> None:
        if handle[2] in kv:
            begun.set()
            assert filled.wait(60)
        vllm.cumem.create_and_map(handle)

    lent = vllm.lent()
    slow = CuMem(
        allocator=lent.allocator,
        create_and_map=map_late,
        unmap_and_release=lent.unmap_and_release,
        pinned_bytes=lent.pinned_bytes,
    )
    with CuMemMemory(vllm.driver, ordinal=0, cumem=slow) as memory:
        memory.adopt_weights()
        memory.discard_kv()
        memory.unmap()
        memory.remap()
        assert begun.wait(60)
        memory.copy_in(vllm.tensors["qkv"][0], memoryview(b"weights"))
        assert vllm.asleep()["kv_cache"] == [True] * 3
        filled.set()
        memory.restore_kv()
        assert vllm.asleep()["kv_cache"] == [False] * 3
        assert vllm.driver.peek(vllm.tensors["qkv"][0], 7) == b"weights"


def test_a_pack_arrives_in_adopted_weights(vllm: LoadedVllm, memory: CuMemMemory, tmp_path: Path) -> None:
    pack = os.urandom(27 * MIB)
    (tmp_path / "model.pack").write_bytes(pack)
    memory.discard_kv()
    memory.unmap()
    memory.remap()
    with (tmp_path / "model.pack").open("rb") as file:
        source = ProvedSource(fd=file.fileno(), bytes=len(pack), evidence="test")
        segments = [
            Segment(file_offset=0, ptr=vllm.tensors["embed"][0], size=24 * MIB),
            Segment(file_offset=24 * MIB, ptr=vllm.tensors["qkv"][0], size=3 * MIB),
        ]
        hydrate_file(source, segments, memory)
    memory.restore_kv()
    assert bytes_of(vllm, "embed") + bytes_of(vllm, "qkv") == pack
    assert bytes_of(vllm, "kv1") == bytes(16 * MIB)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemSetAccess", "cuMemsetD8Async", "cuStreamSynchronize"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_remap_that_fails_leaves_everything_unmapped(
    vllm: LoadedVllm, memory: CuMemMemory, call: str, after: int
) -> None:
    memory.discard_kv()
    memory.unmap()
    resting = vllm.driver.leftovers()
    if call == "cuStreamSynchronize":
        after = 0
    vllm.driver.fail(call, after=after)
    with pytest.raises(ColdsnapError):
        memory.remap()
    assert not memory.mapped
    assert vllm.books_are_true()
    assert vllm.driver.leftovers() == resting
    memory.remap()
    memory.restore_kv()
    assert vllm.books_are_true()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemSetAccess", "cuMemsetD8Async"])
@pytest.mark.parametrize("after", [3, 4])
def test_a_cache_that_cannot_come_back_is_told_by_who_waits_and_can_be_tried_again(
    vllm: LoadedVllm, memory: CuMemMemory, call: str, after: int
) -> None:
    """Three calls are the weights'."""
    memory.discard_kv()
    memory.unmap()
    vllm.driver.fail(call, "CUDA_ERROR_OUT_OF_MEMORY", after=after)
    memory.remap()
    with pytest.raises(OutOfSpace, match=r"out of memory|OUT_OF_MEMORY"):
        memory.restore_kv()
    assert vllm.asleep()["kv_cache"] == [True] * 3
    assert vllm.asleep()["weights"] == [False] * 3
    assert vllm.books_are_true()
    memory.restore_kv()
    assert bytes_of(vllm, "kv2") == bytes(16 * MIB)


def test_a_wake_that_is_given_up_takes_the_cache_along(vllm: LoadedVllm, memory: CuMemMemory) -> None:
    memory.discard_kv()
    memory.unmap()
    memory.remap()
    memory.unmap()
    assert vllm.asleep()["kv_cache"] == [True] * 3
    memory.remap()
    memory.restore_kv()
    memory.unmap()
    assert vllm.asleep()["kv_cache"] == [True] * 3
    assert memory.held_bytes() == 2 * MIB


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_discard_that_fails_in_the_middle_can_go_on_or_be_undone(
    vllm: LoadedVllm, memory: CuMemMemory, after: int
) -> None:
    vllm.driver.fail("cuMemUnmap", after=after)
    with pytest.raises(HostError, match="unmapping vLLM's"):
        memory.discard_kv()
    assert sum(vllm.asleep()["kv_cache"]) == after
    assert vllm.books_are_true()
    if after == 1:
        memory.restore_kv()
        assert not any(vllm.asleep()["kv_cache"])
    else:
        assert memory.discard_kv() == KV_BYTES - after * 16 * MIB


def test_an_address_that_somebody_took_is_told_and_nothing_is_mapped(vllm: LoadedVllm, memory: CuMemMemory) -> None:
    memory.discard_kv()
    memory.unmap()
    ptr, size = vllm.tensors["embed"]
    with vllm.driver.occupied(ptr, size), pytest.raises(ResourceBusy, match=f"0x{ptr:x}"):
        memory.remap()
    assert vllm.asleep()["weights"] == [True] * 3
    assert vllm.books_are_true()
    memory.remap()
    memory.restore_kv()


def test_backups_of_a_sleep_by_hand_are_refused_by_name_and_nothing_is_given_back(
    vllm: LoadedVllm, memory: CuMemMemory
) -> None:
    vllm.allocator.sleep(("weights", "kv_cache"))
    backups = [row for row in rows_of(vllm.allocator) if row.tag in ("weights", "kv_cache")]
    with pytest.raises(Refused) as caught:
        memory.discard_kv()
    fields = [one.field for one in caught.value.problems]
    assert fields == [f"cumem[0x{row.ptr:x}].cpu_backup_tensor" for row in backups]
    assert all("level-1 backup" in one.message and one.cure for one in caught.value.problems)


def test_pinned_memory_that_is_kept_is_refused_by_name(vllm: LoadedVllm, memory: CuMemMemory) -> None:
    vllm.pinned_bytes = PINNED_SLACK_BYTES
    assert memory.leftovers() == ()
    vllm.pinned_bytes += 4096
    with pytest.raises(Refused) as caught:
        memory.discard_kv()
    (problem,) = caught.value.problems
    assert (problem.field, problem.value) == ("torch.cuda.host_memory_stats", f"{PINNED_SLACK_BYTES + 4096} bytes")
    assert not any(vllm.asleep()["kv_cache"])
    vllm.pinned_bytes = 0
    assert memory.leftovers() == ()
    assert memory.discard_kv() == KV_BYTES


def test_pinned_memory_is_counted_once_the_device_is_done(vllm: LoadedVllm, memory: CuMemMemory) -> None:
    vllm.driver.fail("cuCtxSynchronize")
    with pytest.raises(HostError, match="waiting for the device"):
        memory.leftovers()
    assert memory.leftovers() == ()


def test_free_blocks_of_adopted_allocations_become_zero_and_tensors_stay(vllm: LoadedVllm, memory: CuMemMemory) -> None:
    for name in ("norm", "qkv"):
        ptr, size = vllm.tensors[name]
        memory.copy_in(ptr, memoryview(bytes([7]) * size))
    free = [part for row in rows_of(vllm.allocator) if row.tag == "weights" for part in row.free]
    assert memory.clear_free() == sum(size for _, size in free) > 0
    assert all(vllm.driver.peek(ptr, size) == bytes(size) for ptr, size in free)
    for name in ("norm", "qkv"):
        assert bytes_of(vllm, name) == bytes([7]) * vllm.tensors[name][1]
    assert bytes_of(vllm, "kv0") == bytes([GARBAGE]) * 16 * MIB


def test_weights_that_are_no_more_go_with_the_cache(vllm: LoadedVllm, empty_memory: CuMemMemory) -> None:
    vllm.free("qkv")
    empty_memory.adopt_weights()
    assert empty_memory.discard_kv() == KV_BYTES + 20 * MIB
    empty_memory.unmap()
    empty_memory.remap()
    empty_memory.restore_kv()
    assert vllm.asleep()["weights"] == [False] * 3


def test_an_allocation_that_vllm_freed_is_told(vllm: LoadedVllm) -> None:
    with pytest.raises(EngineError, match="0x1234000"):
        CuMemPages(vllm.lent()).map(0x1234000)


def test_what_is_so_already_asks_nothing_of_vllm(vllm: LoadedVllm) -> None:
    def never(handle: Handle) -> None:
        raise AssertionError(handle)

    ptr, _ = vllm.tensors["embed"]
    pages = CuMemPages(
        CuMem(allocator=vllm.allocator, create_and_map=never, unmap_and_release=never, pinned_bytes=lambda: 0)
    )
    pages.map(ptr)
    vllm.allocator.sleep(())
    pages.unmap(ptr)


def test_closing_leaves_all_to_vllm(vllm: LoadedVllm) -> None:
    with CuMemMemory(vllm.driver, ordinal=0, cumem=vllm.lent()) as memory:
        memory.adopt_weights()
        memory.discard_kv()
        memory.unmap()
        memory.remap()
    assert vllm.books_are_true()
    assert memory.allocations == ()
    assert vllm.driver.leftovers()["contexts"] == 1


def test_vllm_frees_an_adopted_tensor_as_ever(vllm: LoadedVllm, memory: CuMemMemory) -> None:
    memory.discard_kv()
    memory.unmap()
    memory.remap()
    memory.restore_kv()
    ptr, _ = vllm.tensors["embed"]
    vllm.cumem._my_free(ptr)
    assert ptr not in vllm.allocator.pointer_to_data
    with pytest.raises(KeyError):
        vllm.driver.peek(ptr, 1)
    with pytest.raises(EngineError, match=f"0x{ptr:x}"):
        memory.unmap()


@pytest.mark.parametrize(
    ("stats", "cached"),
    [
        ({}, 0),
        ({"allocated_bytes.current": 96, "active_bytes.current": 64}, 32),
        ({"reserved_bytes.current": 96, "allocated_bytes.current": 96}, 0),
        ({"reserved_bytes.current": 96, "allocated_bytes.current": 32}, 64),
    ],
)
def test_pinned_bytes_by_either_form_of_torch_s_statistics(stats: dict[str, int], cached: int) -> None:
    assert pinned_cached_bytes(stats) == cached


def test_unknown_statistics_are_refused() -> None:
    with pytest.raises(EngineError, match="pinned memory"):
        pinned_cached_bytes({"bytes": 3})


def test_what_torch_has_beside_vllm_s_pools_is_held(vllm: LoadedVllm, memory: CuMemMemory) -> None:
    lent = vllm.lent()
    counted = CuMem(
        allocator=lent.allocator,
        create_and_map=lent.create_and_map,
        unmap_and_release=lent.unmap_and_release,
        pinned_bytes=lent.pinned_bytes,
        reserved_bytes=lambda: 5 * MIB,
    )
    with CuMemMemory(vllm.driver, ordinal=0, cumem=counted) as other:
        other.adopt_weights()
        memory.discard_kv()
        assert (memory.held_bytes(), other.held_bytes()) == (2 * MIB, 7 * MIB), "the tables, and graphs"
        memory.restore_kv()


def test_segments_are_counted_by_the_pool_they_are_in() -> None:
    segments = [
        {"segment_pool_id": pool, "total_size": size} for pool, size in (((0, 0), 2), ((0, 3), 5), ((0, 4), 11))
    ]
    assert segment_bytes(segments, {(0, 3)}) == 13
    assert segment_bytes(segments, ()) == 18
