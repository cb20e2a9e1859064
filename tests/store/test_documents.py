"""Documents: whole or absent, never overwritten by accident, read only when private."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from coldsnap.errors import HostError, ResourceBusy, UnsafePath
from coldsnap.store.documents import read_private, replace, try_replace, write_new


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


class TestWriteNew:
    @pytest.mark.parametrize("data", [b"", b"{}\n", b"x" * 3_000_000])
    def test_writes_exactly_this_mode_0600(self, tmp_path: Path, data: bytes) -> None:
        old = os.umask(0)
        try:
            write_new(tmp_path / "a.json", data)
        finally:
            os.umask(old)
        assert (tmp_path / "a.json").read_bytes() == data
        assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o600
        assert (tmp_path / "a.json").stat().st_nlink == 1
        assert names(tmp_path) == ["a.json"]

    @pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling"])
    def test_a_taken_name_is_never_overwritten(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "a.json"
        if kind == "file":
            path.write_bytes(b"precious")
        elif kind == "folder":
            path.mkdir()
        else:
            (tmp_path / "target").write_bytes(b"precious")
            path.symlink_to("target" if kind == "link" else "nowhere")
        before = names(tmp_path)
        with pytest.raises(ResourceBusy, match="exists already"):
            write_new(path, b"new")
        assert names(tmp_path) == before
        if kind in ("file", "link"):
            assert path.read_bytes() == b"precious"

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(HostError, match="cannot list"):
            write_new(tmp_path / "no" / "a.json", b"")

    def test_leftovers_of_a_dead_writer_go(self, tmp_path: Path) -> None:
        (tmp_path / ".a.json.0123456789abcdef.partial").write_bytes(b"half a doc")
        (tmp_path / ".b.json.0123456789abcdef.partial").write_bytes(b"not mine to remove")
        write_new(tmp_path / "a.json", b"whole")
        assert names(tmp_path) == [".b.json.0123456789abcdef.partial", "a.json"]


class TestReplace:
    def test_makes_and_replaces(self, tmp_path: Path) -> None:
        replace(tmp_path / "a.json", b"one")
        with open(tmp_path / "a.json", "rb") as reader:
            replace(tmp_path / "a.json", b"two")
            assert reader.read() == b"one"  # who was reading goes on with the old document
        assert (tmp_path / "a.json").read_bytes() == b"two"
        assert names(tmp_path) == ["a.json"]
        assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == 0o600

    def test_replaces_a_link_and_not_its_target(self, tmp_path: Path) -> None:
        (tmp_path / "target").write_bytes(b"precious")
        (tmp_path / "a.json").symlink_to("target")
        replace(tmp_path / "a.json", b"new")
        assert not (tmp_path / "a.json").is_symlink()
        assert (tmp_path / "target").read_bytes() == b"precious"

    def test_an_empty_folder_in_the_way_goes(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").mkdir()
        replace(tmp_path / "a.json", b"new")
        assert (tmp_path / "a.json").read_bytes() == b"new"
        assert names(tmp_path) == ["a.json"]

    def test_a_folder_with_something_in_it_stays(self, tmp_path: Path) -> None:
        place = tmp_path / "a.json"
        place.mkdir()
        (place / "precious").write_bytes(b"1")
        with pytest.raises(UnsafePath, match="is a folder with something in it") as caught:
            replace(place, b"new")
        assert caught.value.cure == f"move {place} away"
        assert not try_replace(place, b"new")
        assert names(tmp_path) == ["a.json"]
        assert (place / "precious").read_bytes() == b"1"


class TestReadPrivate:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        write_new(tmp_path / "a.json", b"0123456789")
        return tmp_path / "a.json"

    def test_reads_up_to_the_limit(self, path: Path) -> None:
        assert read_private(path, 10) == b"0123456789"
        with pytest.raises(HostError, match="holds 10 bytes, more than the 9"):
            read_private(path, 9)

    def test_reads_more_than_one_piece(self, tmp_path: Path) -> None:
        data = os.urandom(3_000_000)
        write_new(tmp_path / "b", data)
        assert read_private(tmp_path / "b", 1 << 30) == data

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(HostError, match=r"cannot open .*missing"):
            read_private(tmp_path / "missing", 1)

    def test_follows_no_link(self, path: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(path)
        with pytest.raises(UnsafePath, match="it is a link"):
            read_private(tmp_path / "link", 100)

    def test_does_not_hang_on_a_fifo(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo", 0o600)
        with pytest.raises(UnsafePath, match="not a regular file"):
            read_private(tmp_path / "fifo", 100)

    def test_refuses_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UnsafePath, match="not a regular file"):
            read_private(tmp_path, 100)

    @pytest.mark.parametrize(
        ("mode", "plain", "ours"),
        [(0o644, True, False), (0o640, True, False), (0o620, False, False), (0o602, False, False), (0o400, True, True)],
    )
    def test_modes(self, path: Path, mode: int, plain: bool, ours: bool) -> None:
        path.chmod(mode)
        for allowed, only_ours in ((plain, False), (ours, True)):
            if allowed:
                assert read_private(path, 100, only_ours=only_ours) == b"0123456789"
            else:
                with pytest.raises(UnsafePath, match="changed by other users"):
                    read_private(path, 100, only_ours=only_ours)

    def test_a_file_of_another_user(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        owner = path.stat().st_uid
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(UnsafePath, match=f"belongs to user {owner}"):
            read_private(path, 100, only_ours=True)

    def test_a_file_that_grows_while_it_is_read(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.read

        def growing(fd: int, count: int) -> bytes:
            with open(path, "ab") as more:
                more.write(b"x")
            return real(fd, count)

        monkeypatch.setattr(os, "read", growing)
        with pytest.raises(HostError, match="grew past 10 bytes"):
            read_private(path, 10)
