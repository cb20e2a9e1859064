"""The rule that picks an I/O path, and the facts it asks the kernel for."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from coldsnap.hydrate import libc
from coldsnap.hydrate.choose import FileFacts, TransferPath, choose_path, file_facts, num_threads_for

GIB = 1 << 30
ALIGNMENT = libc.DirectAlignment(memory=512, offset=512)
DIRECT, BUFFERED = TransferPath.DIRECT, TransferPath.BUFFERED


def facts(*, size: int = GIB, cached: float | None = 0.0, direct: libc.DirectAlignment | None = ALIGNMENT) -> FileFacts:
    return FileFacts(wanted_bytes=size, cached_fraction=cached, direct=direct)


@pytest.mark.parametrize(
    ("given", "wanted", "path", "reason"),
    [
        (facts(), None, DIRECT, "0%"),
        (facts(cached=0.49), None, DIRECT, "49%"),
        (facts(cached=0.5), None, BUFFERED, "50%"),
        (facts(cached=1.0), None, BUFFERED, "100%"),
        (facts(cached=None), None, DIRECT, "does not tell"),
        (facts(size=16 * 1024 * 1024 - 1), None, BUFFERED, "16777215 bytes"),
        (facts(direct=None), None, BUFFERED, "no O_DIRECT"),
        (facts(cached=1.0), DIRECT, DIRECT, "asked for"),
        (facts(direct=None), DIRECT, BUFFERED, "asked for direct, but"),
        (facts(), BUFFERED, BUFFERED, "asked for"),
    ],
)
def test_the_rule(given: FileFacts, wanted: TransferPath | None, path: TransferPath, reason: str) -> None:
    choice = choose_path(given, wanted=wanted)
    assert choice.path is path
    assert reason in choice.reason


def test_threads() -> None:
    assert num_threads_for(DIRECT, num_cores=2) == 8
    assert num_threads_for(DIRECT, num_cores=12) == 12
    assert num_threads_for(DIRECT, num_cores=96) == 16
    assert num_threads_for(BUFFERED, num_cores=2) == 2
    assert num_threads_for(BUFFERED, num_cores=96) == 16
    assert num_threads_for(BUFFERED, num_cores=96, asked=3) == 3


def test_a_file_just_written_is_in_the_page_cache(open_file: Callable[[bytes], int]) -> None:
    fd = open_file(bytes(1024 * 1024))
    found = file_facts(fd, [(4096, 1024 * 1024)], wanted_bytes=7)
    assert found.cached_fraction == 1.0
    assert found.wanted_bytes == 7


def test_kernels_that_do_not_tell(open_file: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(libc, "cache_stat", refuse)
    monkeypatch.setattr(libc, "direct_alignment", refuse)
    found = file_facts(open_file(b"x"), [(0, 1)], wanted_bytes=1)
    assert found.cached_fraction is None
    assert found.direct == libc.DirectAlignment(memory=4096, offset=4096)


def test_a_file_system_that_says_no(open_file: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "direct_alignment", lambda _: None)
    assert file_facts(open_file(b"x"), [(0, 1)], wanted_bytes=1).direct is None


def test_alignments_are_powers_of_two(open_file: Callable[[bytes], int]) -> None:
    found = file_facts(open_file(b"x"), [(0, 1)], wanted_bytes=1).direct
    assert found is not None
    for value in (found.memory, found.offset):
        assert value > 0
        assert value & (value - 1) == 0
