"""The payload store: names from digests alone, commit under a lock, and what becomes of damaged objects."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.digest import Digest
from coldsnap.errors import PayloadRejected, ResourceBusy, UnsafePath
from coldsnap.store.admission import record_path
from coldsnap.store.pack import PackSource, write_pack
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.staging import StagedFile, write_all

Fork = Callable[[Callable[[], object]], Any]
MakeSource = Callable[[int, bytes, str], PackSource]
DATA = b"\x07" * 8192
DIGEST = Digest.of(DATA)


def put(store: PayloadStore, data: bytes = DATA, digest: Digest | None = None, written: Digest | None = None) -> Path:
    with store.stage(len(data)) as staged:
        write_all(staged.fd, data, 0)
        return store.commit(staged, digest or Digest.of(data), written=written)


def empty(folder: Path) -> bool:
    return list(folder.iterdir()) == []


class TestPath:
    def test_derives_from_the_digest_alone(self, store: PayloadStore) -> None:
        relative = store.path(DIGEST).relative_to(store.state_root.path)
        assert str(relative) == f"model-payloads/sha256/{DIGEST.hex}.pack"

    def test_exists(self, store: PayloadStore) -> None:
        assert not store.exists(DIGEST)
        put(store)
        assert store.exists(DIGEST)


class TestCommit:
    def test_gives_the_name_and_the_record(self, store: PayloadStore) -> None:
        path = put(store)
        assert path == store.path(DIGEST)
        assert path.read_bytes() == DATA
        assert path.stat().st_mode & 0o777 == 0o400
        assert empty(store.state_root.staging)
        with store.admit(DIGEST, len(DATA)) as admitted:
            assert admitted.from_record

    def test_without_commit_nothing_stays(self, store: PayloadStore) -> None:
        with store.stage(100):
            pass
        with pytest.raises(KeyError), store.stage(100):
            raise KeyError
        assert empty(store.state_root.staging)
        assert empty(store.state_root.payloads)

    @pytest.mark.parametrize("written", [None, Digest.of(b"other")])
    def test_a_wrong_digest_is_fatal_and_the_file_is_gone(self, store: PayloadStore, written: Digest | None) -> None:
        wanted = DIGEST if written else Digest.of(b"other")
        with pytest.raises(PayloadRejected) as caught:
            put(store, digest=wanted, written=written)
        assert caught.value.reason == "digest_mismatch"
        assert empty(store.state_root.staging)
        assert empty(store.state_root.payloads)

    def test_the_staged_file_is_gone_at_once(self, store: PayloadStore) -> None:
        with store.stage(len(DATA)) as staged:
            write_all(staged.fd, DATA, 0)
            with pytest.raises(PayloadRejected):
                store.commit(staged, Digest.of(b"other"))
            assert not staged.path.exists()

    @pytest.mark.parametrize("data", [DATA[:-1], DATA + b"x"])
    def test_another_number_of_bytes_than_announced(self, store: PayloadStore, data: bytes) -> None:
        with store.stage(len(DATA)) as staged:
            os.ftruncate(staged.fd, len(data))
            write_all(staged.fd, data, 0)
            with pytest.raises(PayloadRejected) as caught:
                store.commit(staged, Digest.of(data))
        assert caught.value.reason == "size_mismatch"
        assert empty(store.state_root.payloads)

    def test_an_identical_object_wins(self, store: PayloadStore) -> None:
        inode = put(store).stat().st_ino
        assert put(store).stat().st_ino == inode
        assert empty(store.state_root.staging)
        assert empty(store.state_root.quarantine)

    def test_an_identical_object_without_record_is_proved_and_wins(self, store: PayloadStore) -> None:
        path = put(store)
        inode = path.stat().st_ino
        record_path(path).unlink()
        assert put(store).stat().st_ino == inode

    @pytest.mark.parametrize("kind", ["flipped", "shorter", "link", "writable", "fifo"])
    def test_a_damaged_object_goes_to_the_quarantine(self, store: PayloadStore, tmp_path: Path, kind: str) -> None:
        path = store.path(DIGEST)
        if kind == "link":
            (tmp_path / "elsewhere").write_bytes(DATA)
            path.symlink_to(tmp_path / "elsewhere")
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.write_bytes(DATA[:-1] + (b"" if kind == "shorter" else b"\0" if kind == "flipped" else b"\x07"))
            path.chmod(0o666 if kind == "writable" else 0o400)
        put(store)
        put(store)
        assert path.read_bytes() == DATA
        assert not path.is_symlink()
        assert [one.name for one in store.state_root.quarantine.iterdir()] == [f"{DIGEST.hex}.pack.0"]

    def test_a_second_damaged_object_gets_the_next_number(self, store: PayloadStore) -> None:
        for _ in range(2):
            store.path(DIGEST).unlink(missing_ok=True)
            store.path(DIGEST).write_bytes(b"junk")
            put(store)
        names = sorted(one.name for one in store.state_root.quarantine.iterdir())
        assert names == [f"{DIGEST.hex}.pack.0", f"{DIGEST.hex}.pack.1"]

    def test_a_folder_in_the_way_is_not_touched(self, store: PayloadStore) -> None:
        (store.path(DIGEST) / "inside").mkdir(parents=True)
        with pytest.raises(UnsafePath, match="is a folder where a pack should be"):
            put(store)
        assert (store.path(DIGEST) / "inside").is_dir()
        assert empty(store.state_root.staging)

    def test_commit_waits_for_the_lock_of_its_digest_only(self, store: PayloadStore) -> None:
        with store.lock(Digest.of(b"another pack")):
            put(store)
        with store.lock(DIGEST), pytest.raises(ResourceBusy, match=DIGEST.hex), store.lock(DIGEST, deadline_s=0.0):
            pass


class TestAdmit:
    def test_a_pack_that_is_not_there(self, store: PayloadStore) -> None:
        with pytest.raises(PayloadRejected) as caught, store.admit(DIGEST, 1):
            pass
        assert caught.value.reason == "unusable_path"

    def test_a_linked_pack_is_refused(self, store: PayloadStore, tmp_path: Path) -> None:
        put(store).rename(tmp_path / "elsewhere")
        store.path(DIGEST).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(PayloadRejected) as caught, store.admit(DIGEST, len(DATA)):
            pass
        assert caught.value.reason == "unusable_path"

    @pytest.mark.parametrize("folder", ["", "model-payloads", "model-payloads/sha256"])
    def test_a_folder_opened_to_others_meanwhile(self, store: PayloadStore, folder: str) -> None:
        put(store)
        (store.state_root.path / folder).chmod(0o777)
        with pytest.raises(UnsafePath), store.admit(DIGEST, len(DATA)):
            pass
        with pytest.raises(UnsafePath):
            put(store)

    def test_a_linked_folder_is_refused(self, store: PayloadStore, tmp_path: Path) -> None:
        put(store)
        store.state_root.payloads.rename(tmp_path / "elsewhere")
        store.state_root.payloads.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UnsafePath, match="is a link"), store.admit(DIGEST, len(DATA)):
            pass

    def test_a_temporary_name_is_never_eligible(self, store: PayloadStore) -> None:
        (store.state_root.payloads / f"{DIGEST.hex}.pack.0123456789abcdef.partial").write_bytes(DATA)
        (store.state_root.staging / f"{DIGEST.hex}.pack").write_bytes(DATA)
        assert not store.exists(DIGEST)

    def test_somebody_else_proving_is_waited_for(self, store: PayloadStore) -> None:
        record_path(put(store)).unlink()
        with (
            store.lock(DIGEST),
            pytest.raises(ResourceBusy, match=f"work on the pack {DIGEST}"),
            store.admit(DIGEST, len(DATA), deadline_s=0.0),
        ):
            pass

    def test_what_was_proved_stays_readable_whatever_happens_to_the_name(self, store: PayloadStore) -> None:
        path = put(store)
        with store.admit(DIGEST, len(DATA)) as admitted:
            path.unlink()
            assert os.pread(admitted.fd, len(DATA), 0) == DATA


class TestProcesses:
    """Several processes of one host, real ones."""

    def test_two_writers_converge_on_one_object(self, store: PayloadStore, make_source: MakeSource, fork: Fork) -> None:
        gate, open_gate = os.pipe()
        data = [os.urandom(3_000_000), b"norm" * 100]

        def write() -> object:
            os.read(gate, 1)
            pack = write_pack(store, [make_source(n << 32, part, f"t{n}") for n, part in enumerate(data)])
            return pack.digest.hex, pack.shared, pack.path.stat().st_ino

        children = [fork(write) for _ in range(3)]
        os.write(open_gate, b"xxx")
        assert [one.wait() for one in children] == [0, 0, 0]
        answers = [eval(one.answer) for one in children]  # noqa: S307 # our own child's repr
        assert len({(digest, inode) for digest, _, inode in answers}) == 1
        assert sorted(shared for _, shared, _ in answers) == [False, True, True]
        names = sorted(one.name for one in store.state_root.payloads.iterdir())
        hex_digest = answers[0][0]
        assert names == [f"{hex_digest}.pack", f"{hex_digest}.pack.coldsnap-validation.json"]
        assert empty(store.state_root.staging)
        for fd in (gate, open_gate):
            os.close(fd)

    def test_of_two_that_admit_one_proves_and_one_believes(self, store: PayloadStore, fork: Fork) -> None:
        record_path(put(store)).unlink()
        gate, open_gate = os.pipe()

        def admit() -> object:
            os.read(gate, 1)
            with store.admit(DIGEST, len(DATA)) as admitted:
                return admitted.from_record

        children = [fork(admit) for _ in range(4)]
        os.write(open_gate, b"xxxx")
        assert [one.wait() for one in children] == [0] * 4
        assert sorted(one.answer for one in children) == ["False", "True", "True", "True"]
        for fd in (gate, open_gate):
            os.close(fd)


def test_a_staged_file_knows_what_was_announced(store: PayloadStore) -> None:
    with store.stage(5) as staged:
        assert isinstance(staged, StagedFile)
        assert staged.expected_bytes == 5
