"""A pack that is written again from memory: the very same file, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from coldsnap.core.digest import Digest
from coldsnap.core.extents import ModelExtent
from coldsnap.errors import IntegrityError, OperationInterrupted, PayloadRejected, ResourceBusy, UsageError
from coldsnap.store.admission import record_path
from coldsnap.store.pack import PackSource, WrittenPack, rewrite_pack, write_pack
from coldsnap.store.payloads import PayloadStore

MakeSource = Callable[[int, bytes, str], PackSource]
PARTS = {"norm": b"coldsnap", "embed": bytes(range(256)) * 17, "bias": b"\x01" * 4096, "copy": b"coldsnap"}


class Written:
    """A pack that was written once and is gone, and the memory that still holds its bytes."""

    def __init__(self, store: PayloadStore, make_source: MakeSource) -> None:
        self.memory = {0x1000 + 0x2000 * n: bytearray(data) for n, data in enumerate(PARTS.values())}
        sources = [make_source(0x1000 + 0x2000 * n, data, name) for n, (name, data) in enumerate(PARTS.items())]
        self.store = store
        self.first: WrittenPack = write_pack(store, sources)
        self.content = self.first.path.read_bytes()
        self.extents = tuple(one.in_allocation(0x1000) for one in self.first.extents)
        self.first.path.unlink()
        record_path(self.first.path).unlink()

    def read(self, extent: ModelExtent) -> Iterator[bytes]:
        data = self.memory[extent.ptr]
        for start in range(0, len(data), 999):
            yield bytes(data[start : start + 999])

    def again(self, **changes: object) -> WrittenPack:
        arguments: dict[str, object] = {"digest": self.first.digest, **changes}
        return rewrite_pack(self.store, self.extents, self.read, **arguments)  # type: ignore[arg-type]

    def assert_no_file(self) -> None:
        root = self.store.state_root
        assert list(root.payloads.iterdir()) == []
        assert list(root.staging.iterdir()) == []
        assert list(root.quarantine.iterdir()) == []


@pytest.fixture
def written(store: PayloadStore, make_source: MakeSource) -> Written:
    return Written(store, make_source)


def test_the_same_file_with_its_record(written: Written) -> None:
    told: list[int] = []
    again = written.again(progress=told.append)
    assert (again.digest, again.bytes, again.shared) == (written.first.digest, len(written.content), False)
    assert again.path.read_bytes() == written.content
    assert again.extents == written.first.extents
    assert sum(told) == sum(len(data) for data in PARTS.values())
    with written.store.admit(again.digest, again.bytes) as admitted:
        assert admitted.from_record


@pytest.mark.parametrize("name", PARTS)
def test_one_wrong_byte_in_memory_leaves_no_file(written: Written, name: str) -> None:
    ptr = 0x1000 + 0x2000 * list(PARTS).index(name)
    written.memory[ptr][-1] ^= 1
    with pytest.raises(IntegrityError, match=f"{ptr:#x}"):
        written.again()
    written.assert_no_file()
    written.memory[ptr][-1] ^= 1
    assert written.again().path.read_bytes() == written.content


def test_right_extents_of_another_pack_leave_no_file(written: Written) -> None:
    with pytest.raises(PayloadRejected, match="thrown away"):
        written.again(digest=Digest.of(b"another pack"))
    written.assert_no_file()


def test_a_pack_that_is_there_is_not_written_again(written: Written) -> None:
    written.again()
    written.memory.clear()  # reading anything would fail
    assert written.again().shared


def test_a_damaged_one_is_set_aside_and_replaced(written: Written) -> None:
    path = written.store.path(written.first.digest)
    path.write_bytes(bytes(len(written.content)))
    path.chmod(0o600)
    again = written.again()
    assert not again.shared
    assert path.read_bytes() == written.content
    assert len(list(written.store.state_root.quarantine.iterdir())) == 1


def test_of_several_at_once_one_writes(written: Written) -> None:
    barrier, reads, results = threading.Barrier(4), [], []
    read = written.read

    def counted(extent: ModelExtent) -> Iterator[bytes]:
        reads.append(extent.ptr)
        yield from read(extent)

    written.read = counted  # type: ignore[method-assign]

    def work() -> None:
        barrier.wait(60)
        results.append(written.again())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(one.shared for one in results) == [False, True, True, True]
    assert sorted(reads) == sorted(one.ptr for one in written.extents)
    assert written.store.path(written.first.digest).read_bytes() == written.content


def test_waiting_for_another_writer_ends_with_its_pack_its_deadline_or_a_cancel(written: Written) -> None:
    cancel = threading.Event()
    cancel.set()
    with written.store.writing(written.first.digest):
        with pytest.raises(ResourceBusy, match="writing the pack"):
            written.again(deadline_s=0.0)
        with pytest.raises(OperationInterrupted):
            written.again(cancel=cancel)
    written.assert_no_file()


def test_a_capture_of_the_same_bytes_does_not_wait_for_a_slow_writer(written: Written, make_source: MakeSource) -> None:
    sources = [make_source(0x9000 + 0x2000 * n, data, name) for n, (name, data) in enumerate(PARTS.items())]
    with written.store.writing(written.first.digest):
        assert not write_pack(written.store, sources).shared


def test_cancelled_in_the_middle(written: Written) -> None:
    cancel = threading.Event()
    with pytest.raises(OperationInterrupted, match="removed"):
        written.again(progress=lambda _: cancel.set(), cancel=cancel)
    written.assert_no_file()


def test_no_extent_at_all(written: Written) -> None:
    with pytest.raises(UsageError, match="at least one"):
        rewrite_pack(written.store, (), written.read, digest=written.first.digest)


def test_memory_that_gives_too_little(written: Written) -> None:
    short = replace(written.extents[0], size=written.extents[0].size + 1)
    written.extents = (short, *written.extents[1:])
    with pytest.raises(IntegrityError, match="gave"):
        written.again()
    written.assert_no_file()
