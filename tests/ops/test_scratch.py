"""Scratch folders go with their operation, and what a killed one left is told from what a running one needs."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from coldsnap.errors import UnsafePath
from coldsnap.ops.scratch import dead_scratch, remove_scratch, scratch_folder
from coldsnap.ops.tools import Tools

CHILD = """
import sys
from pathlib import Path
from coldsnap.ops.scratch import scratch_folder
from coldsnap.store.stateroot import StateRoot
with scratch_folder(StateRoot.open(Path(sys.argv[1])), "op-1") as folder:
    (folder / "half").write_bytes(b"x" * 100)
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_folder_is_private_and_goes_with_the_operation(tools: Tools) -> None:
    with scratch_folder(tools.state, "op-1") as folder:
        assert folder.parent == tools.state.staging
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_bytes(b"x")
        assert list(dead_scratch(tools.state)) == [], "a running operation's folder is not garbage"
        assert not remove_scratch(folder)
        assert (folder / "sub" / "file").exists()
    assert not folder.exists()


def test_it_goes_when_the_operation_fails(tools: Tools) -> None:
    seen: list[Path] = []

    def fail() -> None:
        with scratch_folder(tools.state, "op-1") as folder:
            seen.append(folder)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert not seen[0].exists()


def test_two_of_one_operation_do_not_collide(tools: Tools) -> None:
    with scratch_folder(tools.state, "op-1") as one, scratch_folder(tools.state, "op-1") as other:
        assert one != other


def test_a_long_operation_id_still_makes_a_file_name(tools: Tools) -> None:
    with scratch_folder(tools.state, "x" * 128) as folder:
        assert len(folder.name) < 128


def test_what_a_killed_operation_left_is_found_and_removed(tools: Tools) -> None:
    command = [sys.executable, "-c", CHILD, str(tools.state.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        folder = Path(child.stdout.readline().strip())
        assert list(dead_scratch(tools.state)) == []
        child.kill()
    (item,) = dead_scratch(tools.state)
    assert (item.kind, item.path, item.bytes) == ("scratch", folder, 100)
    assert remove_scratch(folder)
    assert not folder.exists()
    assert not remove_scratch(folder), "gone already"


def test_other_names_and_links_are_left_alone(tools: Tools, tmp_path: Path) -> None:
    (tools.state.staging / "mine").mkdir()
    (tmp_path / "elsewhere.partial").mkdir()
    (tools.state.staging / "link.partial").symlink_to(tmp_path / "elsewhere.partial")
    assert list(dead_scratch(tools.state)) == []


def test_a_staging_folder_open_to_others_is_refused(tools: Tools) -> None:
    tools.state.staging.chmod(0o777)
    with pytest.raises(UnsafePath, match="can be changed by other users"), scratch_folder(tools.state, "op-1"):
        pytest.fail("the body ran")
