"""A full disk: OutOfSpace with the way out, and nothing left behind."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coldsnap.errors import HostError, OutOfSpace, UnsafePath
from coldsnap.store.documents import replace, write_new
from coldsnap.store.faults import host_error, translated
from coldsnap.store.pack import PackSource, write_pack
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.residual import write_residual
from coldsnap.store.stateroot import StateRoot
from coldsnap.store.sweep import plan_gc, run_gc
from coldsnap.testing import disks

Fork = Callable[[Callable[[], object]], Any]
MakeSource = Callable[[int, bytes, str], PackSource]


def files(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.rglob("*") if one.is_file() and not one.name.endswith(".lock"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB. Needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    with disks.small_disk(tmp_path / "small", 256 << 10) as folder:
        yield folder


def test_a_pack_that_does_not_fit(small_disk: Path, make_source: MakeSource) -> None:
    store = PayloadStore(StateRoot.open(small_disk / "state"))
    small = write_pack(store, [make_source(0, b"s" * 100_000, "s")])
    with pytest.raises(OutOfSpace, match="the disk is full") as caught:
        write_pack(store, [make_source(0, b"b" * 200_000, "b")])
    assert "gc" in str(caught.value)
    assert files(small_disk) == [small.path.name, f"{small.path.name}.coldsnap-validation.json"]
    with store.admit(small.digest, small.bytes):
        pass


def test_a_residual_or_document_that_does_not_fit(small_disk: Path, make_source: MakeSource) -> None:
    with pytest.raises(OutOfSpace):
        write_residual(small_disk / "weights.blob", [make_source(0, b"b" * 300_000, "b")])
    replace(small_disk / "a.json", b"old")
    for write in (write_new, replace):
        with pytest.raises(OutOfSpace):
            write(small_disk / ("a.json" if write is replace else "b.json"), b"x" * 300_000)
    assert files(small_disk) == ["a.json"]
    assert (small_disk / "a.json").read_bytes() == b"old"


def test_a_sweep_works_on_a_full_disk(small_disk: Path, make_source: MakeSource) -> None:
    root = StateRoot.open(small_disk / "state")
    pack = write_pack(PayloadStore(root), [make_source(0, b"s" * 100_000, "s")])
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize))
    assert os.statvfs(small_disk).f_bavail == 0
    report = run_gc(plan_gc(root, list))
    assert [item.path for item in report.removed] == [pack.path]
    write_pack(PayloadStore(root), [make_source(0, b"s" * 100_000, "s")])


def test_a_folder_on_another_file_system(small_disk: Path, tmp_path: Path) -> None:
    root = StateRoot.open(tmp_path / "state")
    subprocess.run(["mount", "--bind", small_disk, root.staging], check=True)
    try:
        with pytest.raises(UnsafePath, match="staging is on another file system"):
            StateRoot.open(root.path)
    finally:
        subprocess.run(["umount", root.staging], check=True)


def test_a_file_size_limit(store: PayloadStore, make_source: MakeSource, fork: Fork) -> None:
    def child() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            write_pack(store, [make_source(0, b"b" * 100_000, "b")])
        except OutOfSpace as error:
            return str(error)
        return "written"

    one = fork(child)
    assert one.wait() == 0
    assert "larger than allowed" in one.answer
    assert files(store.state_root.path) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "rename"])
def test_a_disk_that_fills_up_at_any_call(
    store: PayloadStore, make_source: MakeSource, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sources = [make_source(0, b"b" * 100_000, "b")]
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        # the holder's name in the lock is no payload, so pwrite is let through for it
        if call == "pwrite":
            real = os.pwrite
            patch.undo()
            patch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data, at) if len(data) < 20 else full())
        with pytest.raises(OutOfSpace):
            write_pack(store, sources)
    assert files(store.state_root.path) == []
    write_pack(store, sources)


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, OutOfSpace, "the disk is full"),
        (errno.EDQUOT, OutOfSpace, "the quota is used up"),
        (errno.EFBIG, OutOfSpace, "larger than allowed"),
        (errno.ENOMEM, OutOfSpace, "out of memory"),
        (errno.ELOOP, UnsafePath, "it is a link"),
        (errno.ENOTDIR, UnsafePath, "not the kind of file"),
        (errno.EACCES, HostError, "Permission denied"),
        (errno.EROFS, HostError, "Read-only file system"),
        (errno.EIO, HostError, "Input/output error"),
    ],
)
def test_every_fault_says_what_path_why_and_the_way_out(number: int, kind: type[HostError], words: str) -> None:
    cause = OSError(number, "whatever")
    with pytest.raises(kind, match=words) as caught, translated("write", "/some/path"):
        raise cause
    assert type(caught.value) is kind
    assert caught.value.message.startswith("cannot write /some/path: ")
    assert caught.value.cure
    assert caught.value.__cause__ is cause
    assert caught.value.facts == {"path": "/some/path", "errno": errno.errorcode[number]}


def test_a_fault_without_number() -> None:
    assert "strange" in str(host_error(OSError("strange"), "read", "/p"))
