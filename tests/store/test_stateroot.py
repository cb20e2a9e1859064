"""The state root: what is made, and which roots are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from coldsnap.errors import HostError, ResourceBusy, UnsafePath, UsageError
from coldsnap.store.stateroot import FOLDERS, StateRoot


def test_makes_private_folders(tmp_path: Path) -> None:
    root = StateRoot.open(tmp_path / "a" / "state")
    found = {str(one.relative_to(root.path)) for one in root.path.rglob("*")}
    assert found == set(FOLDERS)
    assert {stat.S_IMODE(one.stat().st_mode) for one in (root.path, *root.path.rglob("*"))} == {0o700}


def test_every_folder_has_its_attribute(tmp_path: Path) -> None:
    root = StateRoot.open(tmp_path / "state")
    assert root.payloads == root.path / "model-payloads" / "sha256"
    for name in ("artifacts", "capsules", "prepared", "services", "receipts", "locks", "staging", "quarantine"):
        assert getattr(root, name) == root.path / name


def test_opening_again_changes_nothing(tmp_path: Path) -> None:
    StateRoot.open(tmp_path / "state")
    (tmp_path / "state" / "services" / "x").write_bytes(b"kept")
    root = StateRoot.open(tmp_path / "state")
    assert (root.services / "x").read_bytes() == b"kept"


def test_without_create_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        StateRoot.open(tmp_path / "state", create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "state").mkdir(mode=0o700)
    with pytest.raises(UsageError, match="model-payloads does not exist"):
        StateRoot.open(tmp_path / "state", create=False)
    StateRoot.open(tmp_path / "state")
    assert StateRoot.open(tmp_path / "state", create=False).path == tmp_path / "state"


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert StateRoot.open(Path("state")).path == tmp_path / "state"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o720])
def test_a_root_that_others_may_write_to(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(UnsafePath, match="can be changed by other users") as caught:
        StateRoot.open(path)
    assert "chmod go-w" in str(caught.value)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_that_others_may_write_to(tmp_path: Path, folder: str) -> None:
    root = StateRoot.open(tmp_path / "state")
    (root.path / folder).chmod(0o777)
    with pytest.raises(UnsafePath, match="other users"):
        StateRoot.open(root.path)


def test_a_root_that_is_a_link(tmp_path: Path) -> None:
    StateRoot.open(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UnsafePath, match="is a link"):
        StateRoot.open(tmp_path / "link")


def test_a_link_above_the_root_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert StateRoot.open(tmp_path / "link" / "state").path == tmp_path / "real" / "state"


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_a_folder_that_is_a_link(tmp_path: Path, folder: str) -> None:
    root = StateRoot.open(tmp_path / "state")
    (root.path / folder).rmdir()
    (tmp_path / "elsewhere").mkdir()
    (root.path / folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath, match="is a link"):
        StateRoot.open(root.path)


@pytest.mark.parametrize("place", ["state", "state/locks"])
def test_a_file_where_a_folder_should_be(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True, mode=0o700)
    (tmp_path / place).write_bytes(b"")
    with pytest.raises(UnsafePath, match="is not a folder"):
        StateRoot.open(tmp_path / "state")


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(HostError, match="cannot create"):
        StateRoot.open(tmp_path / "file" / "state")


def test_a_root_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = StateRoot.open(tmp_path / "state").path
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(UnsafePath, match=f"belongs to user {me}, not to us"):
        StateRoot.open(path)


def test_a_parent_in_which_everybody_may_rename(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(UnsafePath, match="lets every user rename"):
        StateRoot.open(parent / "state")
    parent.chmod(0o1777)  # the sticky bit, as on /tmp
    StateRoot.open(parent / "state")


def test_check_looks_at_every_folder_on_the_way(tmp_path: Path) -> None:
    root = StateRoot.open(tmp_path / "state")
    root.check(root.payloads)
    root.payloads.parent.chmod(0o777)
    with pytest.raises(UnsafePath, match="model-payloads can be changed"):
        root.check(root.payloads)
    root.payloads.parent.chmod(0o700)
    root.path.chmod(0o777)
    with pytest.raises(UnsafePath, match="state can be changed"):
        root.check(root.locks)


def test_operations_and_gc_exclude_each_other(tmp_path: Path) -> None:
    root = StateRoot.open(tmp_path / "state")
    busy = pytest.raises(ResourceBusy, match="an operation on this state root")
    with root.in_use(), root.in_use(), busy, root.not_in_use():
        pass
    with root.not_in_use():
        pass
    with root.in_use():
        pass
