"""The pack's bytes, derived here from the rules of docs/format.md and never from what the code printed."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.core.extents import semantic_id
from coldsnap.errors import HostError, IntegrityError, OperationInterrupted, PayloadRejected, UsageError
from coldsnap.store import assembly
from coldsnap.store.pack import PackedExtent, PackSource, WrittenPack, hash_sources, write_hashed, write_pack
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.proof import FileExtent
from coldsnap.store.sources import Buffer

DATA = Path(__file__).parent / "data"
MakeSource = Callable[[int, bytes, str], PackSource]

# The golden pack: four extents, one of them longer than a page, two of them with equal bytes.
PARTS = {
    "norm": b"coldsnap",
    "embed": bytes(range(256)) * 17,  # 4352 bytes: two pages
    "bias": b"\x01" * 4096,  # exactly a page: no padding
    "copy": b"coldsnap",
}


def pack_by_the_rules(parts: dict[str, bytes]) -> bytes:
    """Sorted by (SHA-256 hex, size, semantic id), each padded with zeros to a multiple of 4096."""

    def key(item: tuple[str, bytes]) -> tuple[str, int, str]:
        name, data = item
        row = f'[["{name}",0,{len(data)}]]'.encode()
        return hashlib.sha256(data).hexdigest(), len(data), hashlib.sha256(row).hexdigest()

    return b"".join(data + bytes(-len(data) % 4096) for _, data in sorted(parts.items(), key=key))


def sources(make_source: MakeSource, names: list[str], base: int = 0x1000) -> list[PackSource]:
    return [make_source(base + 0x2000 * n, PARTS[name], name) for n, name in enumerate(names)]


def file_extents(pack: WrittenPack) -> list[FileExtent]:
    return [FileExtent(offset=one.offset, size=one.size, sha256=one.sha256) for one in pack.extents]


class TestGolden:
    def test_the_file_in_the_data_folder_follows_the_rules(self) -> None:
        assert (DATA / "tiny.pack").read_bytes() == pack_by_the_rules(PARTS)

    def test_its_layout_by_hand(self) -> None:
        # digests as sha256sum prints them: 3431... the page of ones, 4043... the embed rows, ac10... "coldsnap"
        data = (DATA / "tiny.pack").read_bytes()
        assert len(data) == 0x5000
        assert data[0x0000:0x1000] == b"\x01" * 4096
        assert data[0x1000:0x2100] == bytes(range(256)) * 17
        assert data[0x2100:0x3000] == bytes(0xF00)
        assert data[0x3000:0x4000] == b"coldsnap" + bytes(4088)
        assert data[0x4000:0x5000] == b"coldsnap" + bytes(4088)

    def test_the_writer_makes_exactly_these_bytes(self, store: PayloadStore, make_source: MakeSource) -> None:
        pack = write_pack(store, sources(make_source, ["norm", "embed", "bias", "copy"]))
        golden = (DATA / "tiny.pack").read_bytes()
        assert pack.path.read_bytes() == golden
        assert pack.digest == Digest.of(golden)
        assert pack.bytes == len(golden)
        assert pack.path.name == f"{pack.digest.hex}.pack"
        assert not pack.shared

    def test_each_extent_says_where_its_bytes_are(self, store: PayloadStore, make_source: MakeSource) -> None:
        pack = write_pack(store, sources(make_source, ["norm", "embed", "bias", "copy"]))
        golden = (DATA / "tiny.pack").read_bytes()
        names = {0x1000: "norm", 0x3000: "embed", 0x5000: "bias", 0x7000: "copy"}
        assert {one.ptr for one in pack.extents} == set(names)
        for one in pack.extents:
            data = PARTS[names[one.ptr]]
            assert golden[one.offset : one.offset + one.size] == data
            assert one.sha256 == Digest.of(data)
            assert one.crc32 == zlib.crc32(data)
            assert one.semantic_id == semantic_id([(names[one.ptr], 0, len(data))])
        assert [one.offset for one in pack.extents] == sorted(one.offset for one in pack.extents)

    def test_extents_with_equal_bytes_are_each_stored_in_the_order_of_their_identity(
        self, store: PayloadStore, make_source: MakeSource
    ) -> None:
        pack = write_pack(store, sources(make_source, ["copy", "norm"]))
        assert pack.bytes == 2 * 4096
        first, second = pack.extents
        assert first.sha256 == second.sha256
        assert first.semantic_id < second.semantic_id

    def test_an_extent_becomes_a_row_of_the_manifest(self) -> None:
        one = PackedExtent(ptr=5, size=6, semantic_id="a" * 64, sha256=Digest.of(b""), offset=7, crc32=8)
        row = one.in_allocation(4)
        assert (row.ptr, row.size, row.allocation_ptr, row.offset, row.crc32) == (5, 6, 4, 7, 8)
        assert (row.semantic_id, row.sha256) == (one.semantic_id, one.sha256)


class TestIdentity:
    @given(order=st.permutations(list(PARTS)), base=st.integers(1, 1 << 40), threads=st.integers(1, 3))
    @settings(max_examples=15)
    def test_neither_order_nor_addresses_nor_threads_change_the_digest(
        self, store: PayloadStore, make_source: MakeSource, order: list[str], base: int, threads: int
    ) -> None:
        pack = write_pack(store, sources(make_source, order, base), num_threads=threads)
        assert pack.digest == Digest.of((DATA / "tiny.pack").read_bytes())

    @given(st.dictionaries(st.text("abc", min_size=1, max_size=3), st.binary(min_size=1, max_size=9000), min_size=1))
    @settings(max_examples=20)
    def test_any_parts_make_the_pack_of_the_rules(
        self, store: PayloadStore, make_source: MakeSource, parts: dict[str, bytes]
    ) -> None:
        pack = write_pack(store, [make_source(n, data, name) for n, (name, data) in enumerate(parts.items())])
        assert pack.path.read_bytes() == pack_by_the_rules(parts)

    def test_a_second_capture_shares_the_object(self, store: PayloadStore, make_source: MakeSource) -> None:
        first = write_pack(store, sources(make_source, ["norm", "embed"]))
        inode = first.path.stat().st_ino
        second = write_pack(store, sources(make_source, ["embed", "norm"], base=0x900000))
        assert second.shared
        assert second.digest == first.digest
        assert second.path.stat().st_ino == inode
        assert list(store.state_root.staging.iterdir()) == []

    def test_an_extent_larger_than_a_block_is_whole(self, store: PayloadStore) -> None:
        data = os.urandom(9_000_001)

        def read() -> Iterator[Buffer]:
            yield memoryview(data)[:5_000_000]
            yield bytearray(data[5_000_000:])

        pack = write_pack(store, [PackSource(ptr=1, size=len(data), semantic_id="0" * 64, read=read)])
        assert pack.path.read_bytes() == data + bytes(-len(data) % 4096)
        assert pack.extents[0].crc32 == zlib.crc32(data)

    def test_a_buffer_is_only_read_before_the_next_is_asked_for(self, store: PayloadStore) -> None:
        def read() -> Iterator[Buffer]:
            staging = bytearray(1000)
            for n in range(5):
                staging[:] = bytes([n]) * 1000
                yield staging
            staging[:] = b"\xff" * 1000

        wanted = b"".join(bytes([n]) * 1000 for n in range(5))
        pack = write_pack(store, [PackSource(ptr=1, size=5000, semantic_id="0" * 64, read=read)])
        assert pack.path.read_bytes() == wanted + bytes(8192 - 5000)


class TestTwoPasses:
    def test_hashed_sources_keep_the_order_they_came_in(self, make_source: MakeSource) -> None:
        parts = [bytes([n]) * size for n, size in enumerate((5, 9_000_000, 300, 4096, 8_500_000))]
        listed = [make_source(0x1000 * n, data, str(n)) for n, data in enumerate(parts)]
        hashed = hash_sources(listed, num_threads=3)
        assert [one.source for one in hashed] == listed
        assert [one.sha256 for one in hashed] == [Digest.of(data) for data in parts]
        assert [one.crc32 for one in hashed] == [zlib.crc32(data) for data in parts]

    def test_the_second_pass_alone_writes_the_same_pack(self, store: PayloadStore, make_source: MakeSource) -> None:
        listed = sources(make_source, ["norm", "embed", "bias", "copy"])
        once = write_hashed(store, hash_sources(listed))
        again = write_pack(store, listed)
        assert (once.digest, once.extents) == (again.digest, again.extents)
        assert again.shared

    def test_each_source_is_read_twice(self, store: PayloadStore) -> None:
        reads: list[int] = []

        def read() -> Iterator[bytes]:
            reads.append(1)
            return iter([b"x" * 5000])

        write_pack(store, [PackSource(ptr=1, size=5000, semantic_id="0" * 64, read=read)])
        assert len(reads) == 2


class TestRefusals:
    def leaves_nothing(self, store: PayloadStore) -> bool:
        return not list(store.state_root.staging.iterdir()) and not list(store.state_root.payloads.iterdir())

    def test_no_source(self, store: PayloadStore) -> None:
        with pytest.raises(UsageError, match="at least one extent"):
            write_pack(store, [])

    def test_an_empty_source(self, store: PayloadStore, make_source: MakeSource) -> None:
        with pytest.raises(UsageError, match="0x10 has 0 bytes"):
            write_pack(store, [make_source(0x10, b"", "empty")])

    @pytest.mark.parametrize("given_bytes", [b"short", b"far too long"])
    def test_a_source_that_gives_another_number_of_bytes(self, store: PayloadStore, given_bytes: bytes) -> None:
        source = PackSource(ptr=0x40, size=8, semantic_id="0" * 64, read=lambda: iter([given_bytes]))
        with pytest.raises(IntegrityError, match="0x40 gave"):
            write_pack(store, [source])
        assert self.leaves_nothing(store)

    def test_a_source_that_shrinks_before_the_second_pass(self, store: PayloadStore) -> None:
        answers = iter([b"12345678", b"1234"])
        source = PackSource(ptr=0x40, size=8, semantic_id="0" * 64, read=lambda: iter([next(answers)]))
        with pytest.raises(IntegrityError, match="gave 4 bytes instead of 8"):
            write_pack(store, [source])
        assert self.leaves_nothing(store)

    @pytest.mark.parametrize("size", [8, 9_000_000])
    def test_bytes_that_change_between_hashing_and_writing(self, store: PayloadStore, size: int) -> None:
        calls = iter(range(2))

        def read() -> Iterator[Buffer]:
            yield b"\0" * (size - 1)
            yield bytes([next(calls)])

        source = PackSource(ptr=0xAB000, size=size, semantic_id="0" * 64, read=read)
        with pytest.raises(IntegrityError, match=f"0xab000 \\({size} bytes\\) changed while") as caught:
            write_pack(store, [source])
        assert caught.value.facts["before"] == str(Digest.of(b"\0" * size))
        assert caught.value.facts["after"] == str(Digest.of(b"\0" * (size - 1) + b"\1"))
        assert self.leaves_nothing(store)

    def test_an_error_of_a_source_is_passed_on(self, store: PayloadStore, make_source: MakeSource) -> None:
        def read() -> Iterator[Buffer]:
            yield b"1234"
            raise PayloadRejected("unusable_path", "the memory went away")

        source = PackSource(ptr=1, size=8, semantic_id="0" * 64, read=read)
        with pytest.raises(PayloadRejected, match="went away"):
            write_pack(store, [source, make_source(2, b"x", "x")], num_threads=2)
        assert self.leaves_nothing(store)

    @pytest.mark.parametrize("when", ["hash", "write"])
    def test_cancel_removes_what_was_written(self, store: PayloadStore, make_source: MakeSource, when: str) -> None:
        cancel = threading.Event()
        total = 3000
        seen = 0

        def progress(num_bytes: int) -> None:
            nonlocal seen
            seen += num_bytes
            if seen > (0 if when == "hash" else total):
                cancel.set()

        with pytest.raises(OperationInterrupted, match=r"the unfinished pack was removed|no pack was written"):
            write_pack(store, [make_source(1, b"a" * total, "a")], num_threads=1, progress=progress, cancel=cancel)
        assert self.leaves_nothing(store)

    @pytest.mark.parametrize("call", ["pwrite", "fdatasync"])
    def test_a_write_that_the_disk_lost_is_an_error(
        self, store: PayloadStore, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        def lost(fd: int, *_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(assembly, "_FLUSH_BYTES", 4096)
        monkeypatch.setattr(os, call, lost)
        with pytest.raises(HostError, match=r"cannot write .*partial: Input/output error"):
            write_pack(store, [make_source(0, b"a" * 9_000_000, "a")])
        monkeypatch.undo()
        assert self.leaves_nothing(store)

    def test_no_thread_is_left(self, store: PayloadStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def read() -> Iterator[Buffer]:
            yield b"1234"

        before = threading.active_count()
        source = PackSource(ptr=1, size=4, semantic_id="0" * 64, read=read)
        write_pack(store, [source])
        real = threading.Thread.start

        def no_more_threads(thread: threading.Thread) -> None:
            if threading.active_count() > before + 1:
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(RuntimeError, match="can't start"):
            write_pack(store, [source], num_threads=1)
        assert threading.active_count() == before
        assert list(store.state_root.staging.iterdir()) == []

    def test_progress_counts_every_byte_twice(self, store: PayloadStore, make_source: MakeSource) -> None:
        counts: list[int] = []
        write_pack(store, sources(make_source, ["norm", "embed"]), progress=counts.append)
        assert sum(counts) == 2 * (len(PARTS["norm"]) + len(PARTS["embed"]))


class TestProof:
    """Any damage to a pack is found, whichever way it is proved."""

    @pytest.fixture
    def pack(self, store: PayloadStore, make_source: MakeSource) -> WrittenPack:
        return write_pack(store, sources(make_source, ["norm", "embed", "bias", "copy"]))

    def test_both_ways_prove_the_golden_pack(self, store: PayloadStore, pack: WrittenPack) -> None:
        for extents, evidence in ((None, "full-sha256"), (file_extents(pack), "extents-sha256")):
            (pack.path.parent / f"{pack.path.name}.coldsnap-validation.json").unlink()
            with store.admit(pack.digest, pack.bytes, extents=extents) as admitted:
                assert admitted.evidence == evidence
                assert not admitted.from_record

    @given(place=st.integers(0, 5 * 4096 - 1), bit=st.integers(0, 7))
    @settings(max_examples=50)
    def test_one_flipped_bit_anywhere_is_found(
        self, store: PayloadStore, pack: WrittenPack, place: int, bit: int
    ) -> None:
        golden = (DATA / "tiny.pack").read_bytes()
        damaged = bytearray(golden)
        damaged[place] ^= 1 << bit
        pack.path.unlink()
        pack.path.write_bytes(bytes(damaged))
        pack.path.chmod(0o400)
        for extents in (None, file_extents(pack)):
            with pytest.raises(PayloadRejected) as caught, store.admit(pack.digest, pack.bytes, extents=extents):
                pass
            assert caught.value.reason == "digest_mismatch"

    @pytest.mark.parametrize(
        ("name", "reason", "words"),
        [
            ("tiny-flipped.pack", "digest_mismatch", r"extents\[\d\]: \d+ bytes at offset"),
            ("tiny-padding.pack", "digest_mismatch", "padding after byte .* is not zero"),
            ("tiny-truncated.pack", "size_mismatch", "holds 20479 bytes, not 20480"),
            ("tiny-grown.pack", "size_mismatch", "holds 20481 bytes, not 20480"),
        ],
    )
    def test_damaged_files_are_refused_with_the_place(
        self, store: PayloadStore, pack: WrittenPack, name: str, reason: str, words: str
    ) -> None:
        pack.path.unlink()
        pack.path.write_bytes((DATA / name).read_bytes())
        pack.path.chmod(0o400)
        with (
            pytest.raises(PayloadRejected, match=words) as caught,
            store.admit(pack.digest, pack.bytes, extents=file_extents(pack)),
        ):
            pass
        assert caught.value.reason == reason
