"""SIGKILL at every boundary where something reaches the disk: nothing false is ever eligible, a rerun works.

A forked child runs the real writer with the system calls counted, and kills itself right before, or right
after, call number k; k grows until the child gets through alive. So every boundary is visited, also those that a
later change adds.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coldsnap.core.digest import Digest
from coldsnap.core.validation import parse_validation_record
from coldsnap.store.documents import replace, write_new
from coldsnap.store.pack import PackSource, write_pack
from coldsnap.store.payloads import PayloadStore
from coldsnap.store.residual import write_residual
from coldsnap.store.stateroot import StateRoot
from coldsnap.store.sweep import plan_gc, run_gc

Fork = Callable[[Callable[[], object]], Any]
MakeSource = Callable[[int, bytes, str], PackSource]
CALLS = ("open", "posix_fallocate", "pwrite", "truncate", "fsync", "fchmod", "link", "rename", "unlink")
MOST_CALLS = 200


def kill_at(number: int, *, after: bool) -> None:
    """From now on, in this process, call ``number`` of those in CALLS is the last; flock counts too.

    An ``open`` counts when it may create a file.
    """
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            nonlocal count
            if real.__name__ == "open" and not args[1] & os.O_CREAT:
                return real(*args, **keywords)
            count += 1
            mine = count
            if mine == number and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*args, **keywords)
            finally:
                if mine == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    fcntl.flock = counted(fcntl.flock)


def visit_boundaries(fork: Fork, work: Callable[[], object], check: Callable[[], None], *, after: bool) -> int:
    """Kill ``work`` at each boundary in turn and ``check`` what it left. The number of boundaries."""
    for number in range(1, MOST_CALLS):

        def child(number: int = number) -> None:
            kill_at(number, after=after)
            work()

        code = fork(child).wait()
        assert code in (0, -signal.SIGKILL)
        check()
        if code == 0:
            return number - 1
    raise AssertionError("the work never ends")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_killed_pack_writer_leaves_nothing_eligible(
    tmp_path: Path, make_source: MakeSource, fork: Fork, after: bool
) -> None:
    sources = [make_source(0, b"a" * 5000, "a"), make_source(1 << 20, b"b" * 10, "b")]
    wanted = write_pack(PayloadStore(StateRoot.open(tmp_path / "reference")), sources)
    golden = wanted.path.read_bytes()
    path = tmp_path / "state"

    def work() -> None:
        write_pack(PayloadStore(StateRoot.open(path)), sources)

    def check() -> None:
        root = StateRoot.open(path)
        store = PayloadStore(root)
        object_path = store.path(wanted.digest)
        if object_path.exists():  # whole, or not there
            assert object_path.read_bytes() == golden
            with store.admit(wanted.digest, wanted.bytes):
                pass
        record = object_path.with_name(object_path.name + ".coldsnap-validation.json")
        if record.exists():  # never before its pack, and never half
            assert object_path.exists()
            parse_validation_record(record.read_bytes())
        # nobody lives, so everything on its way is garbage, and then nothing is left but whole objects
        run_gc(plan_gc(root, list))
        assert [one for one in root.path.rglob("*") if one.is_file() and one.name != "in-use.lock"] == []
        # and the next try works
        again = write_pack(store, sources)
        assert again.path.read_bytes() == golden
        assert again.digest == wanted.digest
        run_gc(plan_gc(root, list))

    assert visit_boundaries(fork, work, check, after=after) > 15


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_killed_residual_writer_leaves_no_residual_or_a_whole_one(
    tmp_path: Path, make_source: MakeSource, fork: Fork, after: bool
) -> None:
    path = tmp_path / "weights.blob"
    wanted = b"r" * 5000 + bytes(3192)

    def check() -> None:
        if path.exists():
            assert path.read_bytes() == wanted
            path.unlink()
        for leftover in tmp_path.iterdir():
            assert leftover.name.endswith(".partial")
            leftover.unlink()

    def work() -> None:
        write_residual(path, [make_source(0, b"r" * 5000, "r")])

    assert visit_boundaries(fork, work, check, after=after) > 5


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_killed_document_writer_leaves_the_old_or_the_new(tmp_path: Path, fork: Fork, after: bool) -> None:
    new, kept = tmp_path / "new.json", tmp_path / "kept.json"
    write_new(kept, b"old" * 1000)

    def check() -> None:
        if new.exists():
            assert new.read_bytes() == b"new" * 1000
            new.unlink()
        assert kept.read_bytes() in (b"old" * 1000, b"other" * 1000)
        write_new(new, b"new" * 1000)  # a rerun works, and clears what the dead writer left
        replace(kept, b"old" * 1000)
        assert sorted(one.name for one in tmp_path.iterdir()) == ["kept.json", "new.json"]
        new.unlink()

    def work() -> None:
        write_new(new, b"new" * 1000)
        replace(kept, b"other" * 1000)

    assert visit_boundaries(fork, work, check, after=after) > 10


def test_a_killed_sweep_removes_no_record_after_its_pack(tmp_path: Path, make_source: MakeSource, fork: Fork) -> None:
    root = StateRoot.open(tmp_path / "state")
    store = PayloadStore(root)
    pack = write_pack(store, [make_source(0, b"a" * 5000, "a")])
    digest: Digest = pack.digest

    def check() -> None:
        names = {one.name for one in root.payloads.iterdir()}
        assert names in (
            set(),
            {f"{digest.hex}.pack"},
            {f"{digest.hex}.pack", f"{digest.hex}.pack.coldsnap-validation.json"},
        )
        write_pack(store, [make_source(0, b"a" * 5000, "a")])
        with store.admit(digest, pack.bytes):
            pass

    assert visit_boundaries(fork, lambda: run_gc(plan_gc(root, list)), check, after=False) > 5
