"""What vLLM's books and torch's pools say about each allocation, in both forms of the books."""

from __future__ import annotations

from typing import get_args

from coldsnap.engines.vllm.pools import Place, Row, backup_problems, discarded, graphs, layout_tag, rows_of, weights
from coldsnap.testing.cuda import FakeDriver
from coldsnap.testing.cumem import FakeCuMem, Form

from .conftest import MIB, LoadedVllm  # isort: skip


def test_rows_are_what_the_driver_maps(vllm: LoadedVllm) -> None:
    rows = rows_of(vllm.allocator)
    assert [row.ptr for row in rows] == sorted(vllm.allocator.pointer_to_data)
    assert {row.tag for row in rows} == {"weights", "kv_cache", "workspace", "runtime"}
    assert sum(row.size for row in rows) == vllm.allocator.get_current_usage()
    assert not any(row.asleep or row.backup_bytes for row in rows)


def test_an_allocation_that_is_given_back_when_the_context_ends_is_no_row(vllm: LoadedVllm) -> None:
    chosen = weights(rows_of(vllm.allocator))
    assert sorted(row.size for row in chosen) == [2 * MIB, 20 * MIB, 24 * MIB]
    holding = {
        name: [row for row in chosen if row.ptr <= ptr < row.ptr + row.size] for name, (ptr, _) in vllm.tensors.items()
    }
    assert [len(holding[name]) for name in ("norm", "embed", "qkv")] == [1, 1, 1]
    assert all(vllm.really_mapped()[row.ptr] for row in chosen)


def test_free_blocks_and_tensors_make_up_an_allocation(vllm: LoadedVllm) -> None:
    chosen = weights(rows_of(vllm.allocator))
    small = next(row for row in chosen if row.size == 2 * MIB)
    assert small.free == ((small.ptr + 3072, 2 * MIB - 3072),)  # the bias's block and the rest are one
    large = next(row for row in chosen if row.size == 24 * MIB)
    assert large.free == ()


def test_weights_that_are_no_more_are_discarded_with_keys_and_values(vllm: LoadedVllm) -> None:
    before = {row.ptr for row in discarded(rows_of(vllm.allocator))}
    vllm.free("qkv")
    rows = rows_of(vllm.allocator)
    assert sorted(row.size for row in weights(rows)) == [2 * MIB, 24 * MIB]
    gone = [row for row in discarded(rows) if row.ptr not in before]
    assert [(row.tag, row.live, row.size) for row in gone] == [("weights", False, 20 * MIB)]


def test_every_pool_of_a_tag_is_read_where_vllm_keeps_them_and_lives_where_it_does_not() -> None:
    free = {}
    for form in get_args(Form):
        driver = FakeDriver()
        vllm = LoadedVllm(driver, FakeCuMem(driver, form=form))
        for name in ("first", "second"):
            with vllm.allocator.use_memory_pool("weights"):
                vllm.allocate(name, MIB)
        rows = rows_of(vllm.allocator)
        assert [row.live for row in rows] == [True, True]
        free[form] = [row.free for row in rows]
    assert free["0.33"] == [((row.ptr + MIB, MIB),) for row in rows]
    assert [bool(blocks) for blocks in free["0.26"]] == [False, True]


def test_what_graphs_use_is_told_by_its_pool_and_has_no_free_blocks(vllm: LoadedVllm) -> None:
    vllm.cumem.lend_to_graphs()
    with vllm.cumem.capturing():
        vllm.allocate("between", 3 * MIB)
    vllm.free("between")  # the capture is over, and its graph goes on writing there
    rows = rows_of(vllm.allocator)
    (used,) = graphs(rows)
    assert (used.size, used.free, used.asleep) == (20 * MIB, (), False)
    assert {data.tag for data in vllm.allocator.pointer_to_data.values()} == {
        "weights",
        "kv_cache",
        "workspace",
        "runtime",
        "default",
    }
    assert used not in weights(rows)
    assert used not in discarded(rows)


def test_a_backup_is_told_by_address_tag_and_size() -> None:
    row = Row(ptr=0x7000, size=4096, tag="weights", asleep=True, live=True, backup_bytes=4096)
    (problem,) = backup_problems([row, Row(ptr=0x9000, size=4096, tag="weights", asleep=True, live=True)])
    assert problem.field == "cumem[0x7000].cpu_backup_tensor"
    assert "level-1 backup" in problem.message
    assert problem.value == "4096 bytes"
    assert problem.cure is not None


def test_the_backup_of_a_sleep_by_hand_is_counted(vllm: LoadedVllm) -> None:
    vllm.allocator.sleep(("weights",))
    assert [row.backup_bytes for row in weights(rows_of(vllm.allocator))] == [
        row.size for row in weights(rows_of(vllm.allocator))
    ]
    copied = {one.tag for one in vllm.allocator.pointer_to_data.values() if one.cpu_backup_tensor is not None}
    assert copied == {"weights"}


def test_a_layout_is_its_tensors_and_not_its_address() -> None:
    def tag(ptr: int, *places: tuple[int, int, str], size: int = 0x3000) -> str:
        row = Row(ptr=ptr, size=size, tag="weights", asleep=False, live=True)
        outside = Place(ptr=ptr + size, size=8, name="elsewhere")
        return layout_tag(row, [outside, *(Place(ptr=ptr + at, size=n, name=name) for at, n, name in places)])

    one = tag(0x10000, (0, 64, "a"), (64, 32, "b"))
    assert one == tag(0x90000, (64, 32, "b"), (0, 64, "a"))
    assert one.startswith("weights:")
    assert len(one) == len("weights:") + 12
    others = [
        tag(0x10000, (0, 64, "a"), (64, 32, "c")),
        tag(0x10000, (0, 64, "a"), (128, 32, "b")),
        tag(0x10000, (0, 64, "a"), (64, 16, "b")),
        tag(0x10000, (0, 64, "a")),
        tag(0x10000, (0, 64, "a"), (64, 32, "b"), size=0x4000),
    ]
    assert len({one, *others}) == 6
