"""Admission: only proved bytes, only the file that was proved, and which records are believed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coldsnap.core.digest import Digest
from coldsnap.core.validation import Evidence, parse_validation_record
from coldsnap.errors import HostError, InvalidDocument, OperationInterrupted, PayloadRejected
from coldsnap.store import admission, proof
from coldsnap.store.admission import admit_file, is_proved, record_path, remember
from coldsnap.store.proof import CHUNK_BYTES, FileExtent

DATA = b"coldsnap" * 1500  # 12,000 bytes; as extents: 5000, padding, 4096, 2904 would not fit its size
FILE = DATA[:5000] + bytes(3192) + DATA[5000:9096] + DATA[9096:] + bytes(1192)
EXTENTS = [
    FileExtent(0, 5000, Digest.of(DATA[:5000])),
    FileExtent(8192, 4096, Digest.of(DATA[5000:9096])),
    FileExtent(12288, 2904, Digest.of(DATA[9096:])),
]
DIGEST = Digest.of(FILE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "x.pack"
    file.write_bytes(FILE)
    file.chmod(0o600)
    return file


def reason(path: Path, digest: Digest = DIGEST, size_bytes: int = len(FILE), **options: object) -> str:
    with (
        pytest.raises(PayloadRejected) as caught,
        admit_file(path, digest, size_bytes, **options),  # type: ignore[arg-type] # options of admit_file
    ):
        pass
    return caught.value.reason


def test_the_file_of_these_tests_is_three_extents() -> None:
    assert len(FILE) == 16384


class TestProof:
    def test_full(self, path: Path) -> None:
        with admit_file(path, DIGEST, len(FILE)) as admitted:
            assert admitted.evidence is Evidence.FULL_SHA256
            assert (admitted.path, admitted.digest, admitted.bytes) == (path, DIGEST, len(FILE))
            assert (admitted.from_record, admitted.recorded) == (False, True)
            assert os.pread(admitted.fd, 8, 0) == b"coldsnap"

    @pytest.mark.parametrize("num_threads", [0, 1, 3])
    def test_extents(self, path: Path, num_threads: int) -> None:
        with admit_file(path, DIGEST, len(FILE), extents=EXTENTS, num_threads=num_threads) as admitted:
            assert admitted.evidence is Evidence.EXTENTS_SHA256

    def test_plain_tuples_are_extents_too(self, path: Path) -> None:
        with admit_file(path, DIGEST, len(FILE), extents=[(*one,) for one in EXTENTS]) as admitted:
            assert admitted.evidence is Evidence.EXTENTS_SHA256

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "empty").write_bytes(b"")
        (tmp_path / "empty").chmod(0o600)
        no_extents: list[FileExtent] = []
        for extents in (None, no_extents):
            with admit_file(tmp_path / "empty", Digest.of(b""), 0, extents=extents, record=False):
                pass

    def test_a_file_of_many_chunks(self, tmp_path: Path) -> None:
        data = os.urandom(CHUNK_BYTES * 2 + 8192)
        (tmp_path / "big").write_bytes(data)
        (tmp_path / "big").chmod(0o600)
        cut = CHUNK_BYTES + 4096
        extents = [(0, cut, Digest.of(data[:cut])), (cut, len(data) - cut, Digest.of(data[cut:]))]
        counts: list[int] = []
        for form in (None, extents):
            with admit_file(
                tmp_path / "big", Digest.of(data), len(data), extents=form, record=False, progress=counts.append
            ):
                pass
        assert sum(counts) == 2 * len(data)

    def test_many_extents_are_proved_in_several_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(proof, "_TASK_BYTES", 8192)
        with_runs = list(proof._runs(EXTENTS))
        assert with_runs == [(0, 2), (2, 3)]
        (tmp_path / "x").write_bytes(FILE)
        (tmp_path / "x").chmod(0o600)
        with admit_file(tmp_path / "x", DIGEST, len(FILE), extents=EXTENTS, num_threads=2):
            pass

    def test_every_damaged_extent_is_named(self, path: Path) -> None:
        damaged = bytearray(FILE)
        damaged[0] ^= 1
        damaged[16000] = 1
        path.write_bytes(damaged)
        with (
            pytest.raises(PayloadRejected, match="2 of its 3 extents are damaged") as caught,
            admit_file(path, DIGEST, len(FILE), extents=EXTENTS),
        ):
            pass
        assert caught.value.facts["extents"] == ["extents[0]", "extents[2]"]

    @pytest.mark.parametrize(
        "extents",
        [
            EXTENTS[1:],
            EXTENTS[:2],
            [],
            [EXTENTS[0], EXTENTS[2], EXTENTS[1]],
            [*EXTENTS, FileExtent(16384, 1, DIGEST)],
            [FileExtent(0, 0, DIGEST), *EXTENTS],
            [FileExtent(0, 4096, DIGEST), *EXTENTS[1:]],
        ],
    )
    def test_extents_that_leave_bytes_open_are_no_proof(self, path: Path, extents: list[FileExtent]) -> None:
        with pytest.raises(InvalidDocument), admit_file(path, DIGEST, len(FILE), extents=extents):
            pass
        assert not record_path(path).exists()

    def test_cancel(self, path: Path) -> None:
        cancel = threading.Event()
        cancel.set()
        for extents in (None, EXTENTS):
            with (
                pytest.raises(OperationInterrupted, match="was not proved"),
                admit_file(path, DIGEST, len(FILE), extents=extents, cancel=cancel),
            ):
                pass
        assert not record_path(path).exists()


class TestReasons:
    def test_invalid_expected_digest(self, path: Path) -> None:
        assert reason(path, digest="sha256:" + "0" * 64) == "invalid_expected_digest"  # type: ignore[arg-type] # on purpose
        assert reason(path, size_bytes=-1) == "invalid_expected_digest"
        assert reason(path, size_bytes=True) == "invalid_expected_digest"

    def test_unusable_path(self, path: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(path)
        os.mkfifo(tmp_path / "fifo")
        for place in ("missing", "link", "fifo", "."):
            assert reason(tmp_path / place) == "unusable_path"

    @pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
    def test_a_file_that_others_may_change_is_unusable(self, path: Path, mode: int) -> None:
        path.chmod(mode)
        assert reason(path) == "unusable_path"

    def test_a_file_of_another_user_is_unusable(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        other = os.stat_result((*os.stat_result(path.stat())[:4], 12345, *path.stat()[5:]))
        monkeypatch.setattr(os, "fstat", lambda fd: other)
        assert reason(path) == "unusable_path"

    def test_size_mismatch_before_any_hashing(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(admission, "digest_of_file", lambda *_: pytest.fail("hashed"))
        assert reason(path, size_bytes=len(FILE) - 4096) == "size_mismatch"

    def test_digest_mismatch(self, path: Path) -> None:
        assert reason(path, digest=Digest.of(b"other")) == "digest_mismatch"

    @pytest.mark.parametrize("change", ["append", "rewrite", "replace", "remove", "truncate"])
    @pytest.mark.parametrize("extents", [None, EXTENTS], ids=["full", "extents"])
    def test_changed_during_validation(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, change: str, extents: list[FileExtent] | None
    ) -> None:
        def meddle(num_bytes: int) -> None:
            if change == "append":
                with open(path, "ab") as file:
                    file.write(b"x")
            elif change == "rewrite":
                os.utime(path, ns=(1, 1))
            elif change == "replace":
                path.with_name("new").write_bytes(FILE)
                path.with_name("new").rename(path)
            elif change == "remove":
                path.unlink(missing_ok=True)

        if change == "truncate":
            real = os.preadv
            monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, buffers, offset + len(FILE)))
        assert reason(path, extents=extents, progress=meddle) == "changed_during_validation"
        assert not record_path(path).exists()

    def test_a_disk_that_fails_is_no_wrong_digest(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(HostError, match=r"cannot read .*: Input/output error"), admit_file(path, DIGEST, len(FILE)):
            pass


class TestRecord:
    @pytest.fixture
    def proved(self, path: Path) -> Path:
        with admit_file(path, DIGEST, len(FILE), extents=EXTENTS):
            pass
        return path

    def from_record(self, path: Path, digest: Digest = DIGEST) -> bool:
        with admit_file(path, digest, len(FILE)) as admitted:
            return admitted.from_record

    def test_says_what_was_proved_and_how(self, proved: Path) -> None:
        record = parse_validation_record(record_path(proved).read_bytes())
        found = proved.stat()
        assert (record.blob, record.bytes, record.sha256, record.provider) == ("x.pack", len(FILE), DIGEST, "native")
        assert record.content_evidence is Evidence.EXTENTS_SHA256
        identity = record.content_identity
        assert (identity.device, identity.inode) == (found.st_dev, found.st_ino)
        assert (identity.size, identity.mtime_ns) == (found.st_size, found.st_mtime_ns)
        assert record_path(proved).stat().st_mode & 0o777 == 0o600
        assert record_path(proved).name == "x.pack.coldsnap-validation.json"

    def test_is_believed_for_the_same_file(self, proved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(admission, "_prove", lambda *_: pytest.fail("proved again"))
        with admit_file(proved, DIGEST, len(FILE)) as admitted:
            assert (admitted.from_record, admitted.recorded) == (True, True)
            assert admitted.evidence is Evidence.EXTENTS_SHA256

    def test_is_neither_believed_nor_written_when_not_wanted(self, path: Path) -> None:
        with admit_file(path, DIGEST, len(FILE), record=False) as admitted:
            assert not admitted.recorded
        assert not record_path(path).exists()
        with admit_file(path, DIGEST, len(FILE)):
            pass
        with admit_file(path, DIGEST, len(FILE), record=False) as admitted:
            assert not admitted.from_record

    def test_a_touched_file_is_proved_again(self, proved: Path) -> None:
        os.utime(proved, ns=(1, 1))
        assert not self.from_record(proved)
        assert self.from_record(proved)

    def test_a_copy_in_its_place_is_proved_again(self, proved: Path) -> None:
        times = proved.stat()
        copy = proved.with_name("copy")
        copy.write_bytes(FILE)
        os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
        copy.chmod(0o600)
        copy.rename(proved)
        assert not self.from_record(proved)

    def test_a_changed_file_is_refused_and_the_old_record_is_worth_nothing(self, proved: Path) -> None:
        with open(proved, "r+b") as file:
            file.write(b"C")
        assert reason(proved) == "digest_mismatch"

    def test_a_record_of_another_digest_is_not_believed(self, proved: Path) -> None:
        assert reason(proved, digest=Digest.of(b"other")) == "digest_mismatch"

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
    def test_a_record_that_others_may_read_or_write_is_not_believed(self, proved: Path, mode: int) -> None:
        record_path(proved).chmod(mode)
        assert not self.from_record(proved)
        assert self.from_record(proved)  # it was replaced by a private one

    def test_a_record_that_is_a_link_is_not_believed(self, proved: Path, tmp_path: Path) -> None:
        real = tmp_path / "record"
        record_path(proved).rename(real)
        record_path(proved).symlink_to(real)
        assert not self.from_record(proved)
        assert not record_path(proved).is_symlink()

    @pytest.mark.parametrize("data", [b"", b"{}", b"\xff"])
    def test_a_damaged_record_is_not_believed(self, proved: Path, data: bytes) -> None:
        record_path(proved).write_bytes(data)
        assert not self.from_record(proved)

    def test_a_place_that_takes_no_record_is_no_obstacle(self, path: Path) -> None:
        (record_path(path) / "something").mkdir(parents=True)
        with admit_file(path, DIGEST, len(FILE)) as admitted:
            assert not admitted.recorded

    def test_a_file_written_this_very_moment_is_proved_a_tick_later(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited = stopped_clock(monkeypatch, path.stat().st_mtime_ns + 5_000_000)
        with admit_file(path, DIGEST, len(FILE)):
            pass
        assert waited == [pytest.approx(0.015, rel=0.01)]
        with admit_file(path, DIGEST, len(FILE), record=False):
            pass
        assert len(waited) == 1

    def test_what_was_proved_while_it_was_written_is_remembered_a_tick_later(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        waited = stopped_clock(monkeypatch, path.stat().st_mtime_ns + 5_000_000)
        with path.open("rb") as file:
            assert remember(path, file.fileno(), DIGEST, Evidence.FULL_SHA256, provider="native")
        assert waited == [pytest.approx(0.015, rel=0.01)]
        assert is_proved(path, DIGEST, len(FILE))


def stopped_clock(monkeypatch: pytest.MonkeyPatch, now_ns: int) -> list[float]:
    """A wall clock that only sleeping moves; how long was slept."""
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(time, "time_ns", lambda: now_ns + round(1e9 * sum(waited)))
    monkeypatch.setattr(time, "sleep", sleep)
    return waited


class TestTurn:
    def test_is_taken_only_for_a_proof(self, path: Path) -> None:
        taken: list[str] = []

        @contextmanager
        def turn() -> Iterator[None]:
            taken.append("in")
            yield
            taken.append("out")

        with admit_file(path, DIGEST, len(FILE), turn=turn()):
            assert taken == ["in", "out"]  # held while proving, not while using
        with admit_file(path, DIGEST, len(FILE), turn=turn()):
            pass
        assert taken == ["in", "out"]

    def test_a_proof_made_while_waiting_is_believed(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        @contextmanager
        def turn() -> Iterator[None]:
            with admit_file(path, DIGEST, len(FILE)):  # what another process does while we wait
                pass
            monkeypatch.setattr(admission, "_prove", lambda *_: pytest.fail("proved twice"))
            yield

        with admit_file(path, DIGEST, len(FILE), turn=turn()) as admitted:
            assert admitted.from_record


def test_no_descriptor_is_left_open(path: Path) -> None:
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    with admit_file(path, DIGEST, len(FILE)):
        pass
    reason(path, digest=Digest.of(b"other"))
    reason(path.parent)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
