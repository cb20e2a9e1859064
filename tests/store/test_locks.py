"""Locks and temporary files between processes: one holder, none after death, none removed under a writer."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coldsnap.errors import HostError, ResourceBusy, UnsafePath
from coldsnap.store import locks, staging
from coldsnap.store.locks import hold, is_named, try_hold
from coldsnap.store.staging import remove_leftovers, stage_file, write_all

Fork = Callable[[Callable[[], object]], Any]


class TestHold:
    def test_excludes_another_thread_and_says_who_holds_it(self, tmp_path: Path) -> None:
        caught: list[ResourceBusy] = []

        def second() -> None:
            try:
                with hold(tmp_path / "a.lock", deadline_s=0.0, purpose="the same work"):
                    pass
            except ResourceBusy as error:
                caught.append(error)

        with hold(tmp_path / "a.lock", deadline_s=0.0, purpose="the work"):
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()
        assert caught[0].message == "the same work is being done by another process"
        assert caught[0].facts["holder"] == str(os.getpid())

    def test_is_free_again_after_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(KeyError), hold(tmp_path / "a.lock", deadline_s=0.0, purpose="work"):
            raise KeyError
        with hold(tmp_path / "a.lock", deadline_s=0.0, purpose="work"):
            pass

    def test_a_killed_holder_holds_nothing(self, tmp_path: Path, fork: Fork) -> None:
        ready, tell = os.pipe()
        forever, _keep = os.pipe()

        def child() -> None:
            with hold(tmp_path / "a.lock", deadline_s=0.0, purpose="work"):
                os.write(tell, b"x")
                os.read(forever, 1)

        one = fork(child)
        assert os.read(ready, 1) == b"x"
        with pytest.raises(ResourceBusy), hold(tmp_path / "a.lock", deadline_s=0.0, purpose="work"):
            pass
        one.kill()
        assert one.wait() == -9
        with hold(tmp_path / "a.lock", deadline_s=0.0, purpose="work"):
            pass
        for fd in (ready, tell, forever, _keep):
            os.close(fd)

    def test_a_waiter_gets_the_lock_when_it_is_let_go(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        waiting, let_go = threading.Event(), threading.Event()
        got: list[bool] = []

        def wait(seconds: float) -> None:
            assert 0 < seconds <= 0.05
            waiting.set()
            let_go.wait(60)

        def second() -> None:
            with hold(tmp_path / "a.lock", deadline_s=30.0, purpose="work"):
                got.append(let_go.is_set())

        monkeypatch.setattr(time, "sleep", wait)
        with hold(tmp_path / "a.lock", deadline_s=0.0, purpose="work"):
            thread = threading.Thread(target=second)
            thread.start()
            assert waiting.wait(60)
        let_go.set()
        thread.join(60)
        assert got == [True]

    def test_a_forked_child_does_not_keep_it(self, tmp_path: Path, fork: Fork) -> None:
        forever, keep = os.pipe()
        with hold(tmp_path / "a.lock", deadline_s=0.0, purpose="work"):
            one = fork(lambda: os.read(forever, 1))  # inherits the descriptor
        with hold(tmp_path / "a.lock", deadline_s=0.0, purpose="work"):
            pass
        os.write(keep, b"x")
        assert one.wait() == 0
        os.close(forever)
        os.close(keep)

    def test_a_lock_file_removed_meanwhile_is_not_the_lock(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.lock"
        real = fcntl.flock
        removed: list[int] = []

        def sweep_comes_first(fd: int, operation: int) -> None:
            if not removed:
                removed.append(os.fstat(fd).st_ino)
                path.unlink()
            real(fd, operation)

        monkeypatch.setattr(fcntl, "flock", sweep_comes_first)
        with hold(path, deadline_s=0.0, purpose="work"):
            assert removed
            with try_hold(path) as free:  # the file that stands there now is the one that is held
                assert not free
            assert path.exists()

    def test_a_link_is_no_lock(self, tmp_path: Path) -> None:
        (tmp_path / "a.lock").symlink_to("elsewhere")
        with pytest.raises(UnsafePath, match="it is a link"), hold(tmp_path / "a.lock", deadline_s=0, purpose="work"):
            pass
        assert not (tmp_path / "elsewhere").exists()

    def test_a_fifo_is_no_lock(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "a.lock", 0o600)
        with pytest.raises(UnsafePath, match="not a regular"), hold(tmp_path / "a.lock", deadline_s=0, purpose="work"):
            pass

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(HostError, match="cannot lock"), hold(tmp_path / "no" / "l", deadline_s=0, purpose="work"):
            pass

    def test_a_lock_that_nobody_signed(self, tmp_path: Path) -> None:
        path = tmp_path / "a.lock"
        with hold(path, deadline_s=0, purpose="work", shared=True):
            with pytest.raises(ResourceBusy) as caught, hold(path, deadline_s=0, purpose="work"):
                pass
            path.write_bytes(b"\xff")
            with pytest.raises(ResourceBusy) as again, hold(path, deadline_s=0, purpose="work"):
                pass
        assert caught.value.facts["holder"] == again.value.facts["holder"] == "unknown"


class TestTryHold:
    def test_a_file_that_is_gone_is_not_free(self, tmp_path: Path) -> None:
        with try_hold(tmp_path / "gone") as free:
            assert not free

    def test_a_file_exchanged_while_locking_is_not_free(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "a"
        path.write_bytes(b"")
        monkeypatch.setattr(locks, "is_named", lambda fd, path: False)
        with try_hold(path) as free:
            assert not free


class TestStaging:
    def test_is_reserved_private_locked_and_gone_afterwards(self, tmp_path: Path) -> None:
        with stage_file(tmp_path, 10_000, stem="pack") as staged:
            assert staged.path.parent == tmp_path
            assert staged.path.name.startswith("pack.")
            assert staged.path.name.endswith(".partial")
            found = staged.path.stat()
            assert (found.st_size, found.st_mode & 0o777) == (10_000, 0o600)
            assert found.st_blocks * 512 >= 10_000
            assert remove_leftovers(tmp_path) == ()
        assert list(tmp_path.iterdir()) == []

    def test_whoever_renames_it_away_keeps_it(self, tmp_path: Path) -> None:
        with stage_file(tmp_path, 0) as staged:
            write_all(staged.fd, b"abc", 0)
            staged.path.rename(tmp_path / "final")
        assert (tmp_path / "final").read_bytes() == b"abc"

    def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(self, tmp_path: Path, fork: Fork) -> None:
        ready, tell = os.pipe()
        forever, keep = os.pipe()

        def child() -> None:
            with stage_file(tmp_path, 100):
                os.write(tell, b"x")
                os.read(forever, 1)

        dead, living = fork(child), fork(child)
        assert os.read(ready, 1) == b"x"
        assert os.read(ready, 1) == b"x"
        assert len(list(tmp_path.iterdir())) == 2
        dead.kill()
        assert dead.wait() == -9
        assert len(remove_leftovers(tmp_path)) == 1
        assert len(list(tmp_path.iterdir())) == 1
        os.write(keep, b"x")
        assert living.wait() == 0
        assert list(tmp_path.iterdir()) == []
        for fd in (ready, tell, forever, keep):
            os.close(fd)

    def test_a_sweep_between_creating_and_locking_costs_a_retry(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = fcntl.flock
        swept: list[Path] = []

        def sweep_comes_first(fd: int, operation: int) -> None:
            if not swept:
                (path,) = tmp_path.iterdir()
                path.unlink()
                swept.append(path)
            real(fd, operation)

        monkeypatch.setattr(fcntl, "flock", sweep_comes_first)
        with stage_file(tmp_path, 10) as staged:
            assert staged.path != swept[0]
            assert is_named(staged.fd, staged.path)

    def test_gives_up_when_every_file_is_swept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staging, "is_named", lambda fd, path: False)
        with pytest.raises(HostError, match="removed as fast as they are made"), stage_file(tmp_path, 10):
            pass

    def test_an_error_while_locking_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_locks(fd: int, operation: int) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(HostError, match="No locks available"), stage_file(tmp_path, 10):
            pass
        assert list(tmp_path.iterdir()) == []

    def test_short_writes_are_continued(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
        with stage_file(tmp_path, 0) as staged:
            write_all(staged.fd, b"0123456789", 5)
            assert staged.path.read_bytes() == bytes(5) + b"0123456789"
