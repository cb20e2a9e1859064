"""When another stream joins a download, and what a hint to the disk does to a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldsnap.core.digest import Digest
from coldsnap.ship.attempt import wants_stream
from coldsnap.ship.base import Item, Kind, Stored
from coldsnap.ship.limits import Limits
from coldsnap.ship.pull import pulled
from coldsnap.store.writeback import begin_writeback

KIB = 1 << 10
DATA = bytes(range(256)) * 64
LIMITS = Limits(range_bytes=KIB, request_bytes=KIB, num_streams=3)


@pytest.mark.parametrize(
    ("waited_s", "elapsed_s", "wanted"),
    [
        (0.0, 10.0, False),  # bytes come as fast as they are hashed
        (4.9, 10.0, False),
        (5.1, 10.0, True),
        (0.1, 0.1, False),  # too early to tell
        (0.3, 0.3, True),
    ],
)
def test_a_stream_is_added_when_the_hash_waits_most_of_the_time(
    waited_s: float, elapsed_s: float, wanted: bool
) -> None:
    assert wants_stream(waited_s=waited_s, elapsed_s=elapsed_s) is wanted


class Shy:
    """A source whose every reader waits until ``together`` of them are there, and at most a minute."""

    name = "shy"
    kinds = frozenset({Kind.PACK})

    def __init__(self, together: int) -> None:
        self.together = threading.Barrier(together, timeout=60)
        self.met = False
        self.reading = 0
        self.most = 0
        self.lock = threading.Lock()

    def list(self) -> Iterator[Stored]:
        yield from ()

    def stat(self, item: Item) -> Stored | None:
        return Stored(item=item, bytes=len(DATA))

    def read(self, item: Item, offset: int, size: int) -> Iterator[memoryview]:
        with self.lock:
            self.reading += 1
            self.most = max(self.most, self.reading)
        if not self.met:
            self.together.wait()
            self.met = True
        yield memoryview(DATA)[offset : offset + size]
        with self.lock:
            self.reading -= 1


def test_a_slow_source_is_read_by_as_many_streams_as_may_be(tmp_path: Path) -> None:
    source = Shy(LIMITS.num_streams)
    with pulled(source, Item(Kind.PACK, Digest.of(DATA)), len(DATA), tmp_path, limits=LIMITS) as staged:
        assert staged.path.read_bytes() == DATA
    assert source.most == LIMITS.num_streams


def test_a_fast_source_is_read_by_one_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldsnap.ship.attempt.time.monotonic", lambda: 7.0)  # nobody waits
    source = Shy(1)
    with pulled(source, Item(Kind.PACK, Digest.of(DATA)), len(DATA), tmp_path, limits=LIMITS) as staged:
        assert staged.path.read_bytes() == DATA
    assert source.most == 1


def test_the_hint_changes_no_byte_and_never_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w+b", buffering=0) as file:
        file.write(DATA)
        begin_writeback(file.fileno(), 0, len(DATA))
        begin_writeback(file.fileno(), len(DATA), len(DATA))
    assert path.read_bytes() == DATA
    begin_writeback(-1, 0, 1)
