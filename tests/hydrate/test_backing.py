"""What lies behind a file."""

from __future__ import annotations

import os
from pathlib import Path

from coldsnap.hydrate.backing import Backing, backing_of, parse_mountinfo

TEXT = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
30 22 0:26 / /dev/shm rw,nosuid - tmpfs tmpfs rw,inode64
31 22 0:27 / /staged rw shared:9 master:3 - tmpfs staged rw,size=1048576k,huge=always
32 22 0:28 / /within\\040size rw - tmpfs tmpfs rw,huge=within_size
33 22 0:29 / /advise rw - tmpfs tmpfs rw,huge=advise
34 22 0:30 / /dev/hugepages rw - hugetlbfs hugetlbfs rw,pagesize=2M
a line that is none
"""


def test_mounts_are_told_apart() -> None:
    found = {(one.major, one.minor): one.backing for one in parse_mountinfo(TEXT)}
    assert found == {
        (254, 1): Backing(in_memory=False, huge_pages=False),
        (0, 26): Backing(in_memory=True, huge_pages=False),
        (0, 27): Backing(in_memory=True, huge_pages=True),
        (0, 28): Backing(in_memory=True, huge_pages=True),
        (0, 29): Backing(in_memory=True, huge_pages=False),
        (0, 30): Backing(in_memory=True, huge_pages=True),
    }


def test_a_file_in_shared_memory() -> None:
    path = Path("/dev/shm") / f"coldsnap-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()
        assert backing_of(fd).in_memory
    finally:
        os.close(fd)


def test_what_no_mount_shows_counts_as_a_disk() -> None:
    fd = os.memfd_create("test")
    try:
        assert backing_of(fd) == Backing(in_memory=False, huge_pages=False)
    finally:
        os.close(fd)
