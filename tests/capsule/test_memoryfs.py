"""File systems in memory: the contract, for the fake and the real one, and what is read of a machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coldsnap.capsule.memoryfs import LinuxMemoryFs, parse_meminfo, shares_memory
from coldsnap.errors import HostError
from coldsnap.hydrate.backing import backing_of
from coldsnap.store.staging import write_all
from coldsnap.testing.memoryfs import FakeMemoryFs
from coldsnap.testing.memoryfs_suite import check_memory_fs

MEMINFO = "MemTotal:       32871288 kB\nMemFree:        24154804 kB\nMemAvailable:   31058272 kB\n"


def test_the_fake_keeps_the_contract(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir(mode=0o700)
    check_memory_fs(FakeMemoryFs(), tmp_path / "one")


@pytest.mark.criu
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_the_real_one_keeps_the_contract(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir(mode=0o700)
    check_memory_fs(LinuxMemoryFs(), tmp_path / "one")


@pytest.mark.criu
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_files_lie_in_memory_with_huge_pages_and_no_more_than_asked(tmp_path: Path) -> None:
    folder, fs = tmp_path / "one", LinuxMemoryFs()
    folder.mkdir(mode=0o700)
    fs.mount(folder, num_bytes=3 << 20)
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        with (folder / "file").open("wb") as file:
            file.write(bytes(3 << 20))
            backing = backing_of(file.fileno())
            assert (backing.in_memory, backing.huge_pages) == (True, True)
            with pytest.raises(OSError, match="No space"):
                write_all(file.fileno(), bytes(16 << 20), 3 << 20)
    finally:
        fs.unmount(folder)


def test_meminfo_is_read_in_bytes() -> None:
    assert parse_meminfo(MEMINFO) == (32871288 * 1024, 31058272 * 1024)
    with pytest.raises(HostError, match="MemAvailable"):
        parse_meminfo("MemTotal: 1 kB\n")


@pytest.mark.parametrize(
    ("model", "shared"),
    [("NVIDIA H200", False), ("NVIDIA GH200 480GB", False), ("NVIDIA GB10", True), ("NVIDIA Thor", True), ("", False)],
)
def test_devices_without_memory_of_their_own_are_known_by_name(tmp_path: Path, model: str, shared: bool) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0/information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 64\nGPU UUID: GB10-x\n")
    assert shares_memory(tmp_path) is shared
