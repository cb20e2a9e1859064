"""Packs in memory with real units and a real memory file system: what was thawed sees them, and nothing is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coldsnap.capsule.memoryfs import LinuxMemoryFs
from coldsnap.errors import AcceptanceFailed
from coldsnap.ops.live import stop_service
from coldsnap.ops.tidy import plan_tidy, run_tidy
from coldsnap.store.copies import MemoryCopies
from coldsnap.testing.checkpoint import write_checkpoint
from coldsnap.testing.stand import UNSEEN, Stand

pytestmark = pytest.mark.criu


class ColdCache(LinuxMemoryFs):
    """As if nothing of any pack were in the page cache, whatever this machine's temporary folder lies on."""

    def cached_fraction(self, path: Path) -> float | None:
        return 0.0


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Stand]:
    """A capture whose recipe stages."""
    one = Stand(folder=tmp_path, model=write_checkpoint(tmp_path / "model"))
    one.tools = replace(one.tools, memory_fs=ColdCache())
    try:
        one.capture(stage=True)
        yield one
    finally:
        one.stop_all()
        run_tidy(one.tools, plan_tidy(one.tools))


def test_a_restored_tree_reads_the_copy_that_was_made_beside_it(staged: Stand) -> None:
    result = staged.restore("restore-1")
    (report,) = result.wake.values()
    assert report.transfer_path["pack"].endswith("out of the copy in memory")
    assert staged.ask(UNSEEN) == staged.cold(UNSEEN)
    (pack,) = staged.loaded.packs().values()
    folder = MemoryCopies(staged.tools.state).folder(pack.sha256)
    assert os.path.ismount(folder)
    staged.sleep("sleep-1")
    staged.wake("wake-1")
    assert staged.ask(UNSEEN) == staged.cold(UNSEEN)
    stop_service(staged.tools, "svc")
    assert not folder.exists()
    staged.assert_nothing_left()


def test_a_negative_control_is_caught_with_a_copy_too(staged: Stand) -> None:
    staged.prepare("prepare-1")
    with pytest.raises(AcceptanceFailed):
        staged.restore("restore-1", negative_control=True)
