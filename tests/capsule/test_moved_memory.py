"""Memory that is not in CRIU's images: what is moved, what stays, and that nothing is left when it cannot come back."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from coldsnap.capsule import dump as dump_module
from coldsnap.capsule.criu import Criu
from coldsnap.capsule.criuimages import PAGE_BYTES, read_pagemap
from coldsnap.capsule.driver import RunningUnit
from coldsnap.capsule.dump import dump
from coldsnap.capsule.dumped import PROVED_BYTES, read_dumped_unit
from coldsnap.capsule.pagemove import MovedPages
from coldsnap.capsule.pageruns import RUN_BYTES
from coldsnap.capsule.prepared import PROCESS_FOLDER, RECORD_NAME, PreparedFile, PreparedRecord, are_proved
from coldsnap.capsule.restore import restore
from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.errors import ColdsnapError, DeadlineExceeded, IntegrityError, OutOfSpace, PeerError
from coldsnap.testing.yard import PATIENCE_S, Yard

from .conftest import Clock, at, newer_criu  # isort: skip

pytestmark = pytest.mark.criu

_MIB = 1 << 20

_CONTROLLER = """
import os, signal, sys
from pathlib import Path
from coldsnap.capsule.criu import Criu
from coldsnap.capsule.driver import UnitSpec
from coldsnap.capsule.restore import restore
from coldsnap.core.points import install
install(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == "unit.memory" else None)
spec = UnitSpec(unit=sys.argv[1], log_path=Path(sys.argv[2]))
restore(spec, Path(sys.argv[3]), criu=Criu(path=Path(sys.argv[4]), version=(4, 1, 1)), deadline_s=60)
"""


def _dump(yard: Yard, unit: RunningUnit, criu: Criu, name: str = "images") -> Path:
    dump(unit, yard.folder / name, criu=criu, deadline_s=PATIENCE_S)
    return yard.folder / name


def _restore(yard: Yard, images: Path, criu: Criu, *, deadline_s: float = PATIENCE_S) -> RunningUnit:
    return yard.keep(restore(yard.spec("back"), images, criu=criu, deadline_s=deadline_s))


def _pages(images: Path, pid: int) -> dict[int, bytes]:
    """What CRIU's images of a process hold, by address."""
    pagemap = read_pagemap((images / f"pagemap-{pid}.img").read_bytes())
    data = (images / f"pages-{pagemap.pages_id}.img").read_bytes()
    addresses = [run.address + page * PAGE_BYTES for run in pagemap.runs for page in range(run.num_pages)]
    assert len(data) == len(addresses) * PAGE_BYTES
    return {address: data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] for number, address in enumerate(addresses)}


def _moved(images: Path, pid: int) -> dict[int, bytes]:
    """The same of what coldsnap took out."""
    found = {}
    for one in read_dumped_unit(images).memory:
        if one.pid == pid:
            with (images / one.name).open("rb") as file:
                for address, size in one.pieces:
                    for page in range(address, address + size, PAGE_BYTES):
                        found[page] = file.read(PAGE_BYTES)
                assert file.read() == b""
    return found


def _memory_bytes(unit: RunningUnit, field: str) -> int:
    """The sum of a field of ``smaps_rollup`` over the tree."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in unit.pids()]
    found = [re.findall(rf"^{field}:\s+(\d+)", text, re.MULTILINE) for text in texts]
    return sum(1024 * int(number) for numbers in found for number in numbers)


def test_the_image_is_criu_s_own_in_two_files(yard: Yard, criu: Criu, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = yard.launch_memory()
    with monkeypatch.context() as patched:
        nothing = MovedPages(memory=(), stopped=(), left={})
        patched.setattr(dump_module, "move_pages", lambda *_, **__: nothing)
        dump(unit, yard.folder / "whole", criu=criu, deadline_s=PATIENCE_S, leave_running=True)
    images = _dump(yard, unit, criu)
    for pid in (1001, 1002, 1003):
        whole, staying, moved = _pages(yard.folder / "whole", pid), _pages(images, pid), _moved(images, pid)
        assert staying.keys().isdisjoint(moved)
        both = staying | moved
        dropped = {address: page for address, page in whole.items() if address not in both}
        assert set(dropped.values()) == {bytes(PAGE_BYTES)}
        assert len(dropped) * PAGE_BYTES > 12 * _MIB
        # The one process ran on for a moment between the two dumps; what changed is a page or two of its stack.
        assert len(both.keys() - whole.keys()) < 32
        assert sum(whole.get(address) != page for address, page in moved.items()) < 32
    dumped = read_dumped_unit(images)
    for one in dumped.memory:
        data = (images / one.name).read_bytes()
        assert one.sha256 == tuple(
            hashlib.sha256(data[at : at + PROVED_BYTES]).hexdigest() for at in range(0, len(data), PROVED_BYTES)
        )
        assert (images / one.name).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in images.iterdir()) == sorted(
        [*(file.name for file in dumped.files), "unit.json"]
    )


def test_large_runs_go_and_small_ones_stay(yard: Yard, criu: Criu) -> None:
    images = _dump(yard, yard.launch(megabytes=8), criu)
    moved = {one.pid: one.bytes for one in read_dumped_unit(images).memory}
    assert set(moved) == {1001, 1002}
    assert all(size > 8 * _MIB for size in moved.values()), "the child has its parent's memory, too"
    assert _pages(images, 1001).keys() & _pages(images, 1002).keys()
    assert all(size % PAGE_BYTES == 0 for one in read_dumped_unit(images).memory for _, size in one.pieces)
    assert RUN_BYTES == 256 * 1024


def test_a_restored_child_has_what_it_shared_for_itself(yard: Yard, criu: Criu) -> None:
    unit = yard.launch(megabytes=32)
    yard.ask(unit)
    before = _memory_bytes(unit, "Pss")
    back = _restore(yard, _dump(yard, unit, criu), criu)
    yard.ask(back)
    assert 32 * _MIB < before < 60 * _MIB
    assert before + 24 * _MIB < _memory_bytes(back, "Pss") < before + 44 * _MIB


def test_written_zeros_cost_no_memory_after_a_restore(yard: Yard, criu: Criu) -> None:
    unit = yard.launch_memory()
    before = _memory_bytes(unit, "Rss")
    back = _restore(yard, _dump(yard, unit, criu), criu)
    assert _memory_bytes(back, "Rss") < before - 36 * _MIB  # 16 MiB a process of ``zeros`` alone


def test_a_process_that_stood_still_stands_still_again(yard: Yard, criu: Criu) -> None:
    unit = yard.launch()
    _, child = unit.pids()
    os.kill(child, signal.SIGSTOP)
    back = _restore(yard, _dump(yard, unit, criu), criu)
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in back.pids()]
    assert states[1] == "T"
    assert states[0] != "T"
    os.kill(back.pids()[1], signal.SIGCONT)
    assert yard.ask(back)["child"] == 1


def test_images_that_are_not_understood_are_left_as_they_are(yard: Yard, criu: Criu) -> None:
    unit = yard.launch(megabytes=8)
    report = dump(unit, yard.folder / "images", criu=newer_criu(yard.folder, criu, {1001}), deadline_s=PATIENCE_S)
    assert [note for note in report.notes if "process 1001" in note and "field 15" in note] == list(report.notes)
    assert len(report.notes) == 1
    assert [one.pid for one in read_dumped_unit(yard.folder / "images").memory if one.pid == 1001] == []


def test_a_full_disk_while_memory_is_moved_lets_the_tree_run_on(
    yard: Yard, criu: Criu, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = yard.launch_memory()

    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(yard.folder / "images"))

    monkeypatch.setattr(dump_module, "move_pages", no_space)
    with pytest.raises(OutOfSpace):
        dump(unit, yard.folder / "images", criu=criu, deadline_s=PATIENCE_S)
    assert not (yard.folder / "images").exists()
    assert set(yard.ask(unit)) == {"root", "child", "grandchild"}


def test_no_time_left_while_memory_is_moved_lets_the_tree_run_on(yard: Yard, criu: Criu, clock: Clock) -> None:
    unit = yard.launch_memory()
    with at("dump.saved", lambda: clock.skip(PATIENCE_S)), pytest.raises(DeadlineExceeded, match="phase 'memory'"):
        dump(unit, yard.folder / "images", criu=criu, deadline_s=PATIENCE_S)
    assert not (yard.folder / "images").exists()
    assert set(yard.ask(unit)) == {"root", "child", "grandchild"}


def test_a_controller_killed_while_memory_comes_back_leaves_nothing(yard: Yard, criu: Criu) -> None:
    images = _dump(yard, yard.launch_memory(), criu)
    spec = yard.spec("back")
    arguments = [spec.unit, str(spec.log_path), str(images), str(criu.path)]
    done = subprocess.run([sys.executable, "-c", _CONTROLLER, *arguments], check=False)
    assert done.returncode == -signal.SIGKILL
    yard.wait_until_empty()


def _kill_named(yard: Yard, name: str) -> Callable[[], None]:
    def act() -> None:
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends:
            for pid in yard.processes():
                with suppress(OSError):
                    if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                        os.kill(pid, signal.SIGSTOP)
                        os.kill(pid, signal.SIGKILL)
                        return
        raise AssertionError(f"no process is called {name}")

    return act


@pytest.mark.parametrize("name", ["coldsnap-refill", "coldsnap-init"])
def test_a_helper_killed_while_memory_comes_back_leaves_nothing(yard: Yard, criu: Criu, name: str) -> None:
    images = _dump(yard, yard.launch_memory(), criu)
    with at("unit.memory", _kill_named(yard, name)), pytest.raises(ColdsnapError) as caught:
        restore(yard.spec("back"), images, criu=criu, deadline_s=PATIENCE_S)
    assert isinstance(caught.value, PeerError)
    yard.wait_until_empty()


def test_no_time_left_while_memory_comes_back_leaves_nothing(yard: Yard, criu: Criu, clock: Clock) -> None:
    images = _dump(yard, yard.launch_memory(), criu)
    with at("unit.memory", lambda: clock.skip(PATIENCE_S)), pytest.raises(DeadlineExceeded):
        restore(yard.spec("back"), images, criu=criu, deadline_s=PATIENCE_S)
    yard.wait_until_empty()


def test_memory_that_is_not_there_is_told_and_leaves_nothing(yard: Yard, criu: Criu) -> None:
    images = _dump(yard, yard.launch_memory(), criu)
    text = (images / "unit.json").read_text()
    address, size = next(one for one in read_dumped_unit(images).memory if one.pid == 1001).pieces[0]
    (images / "unit.json").write_text(text.replace(f"[{address},{size}]", f"[4096,{size}]", 1))
    with pytest.raises(PeerError, match="process 1001 has no memory to write at 0x1000"):
        restore(yard.spec("back"), images, criu=criu, deadline_s=PATIENCE_S)
    yard.wait_until_empty()


def _prove(images: Path) -> None:
    """What `prepare` writes when it has proved every byte."""
    files = tuple(
        PreparedFile(
            path=f"{PROCESS_FOLDER}/{path.name}",
            bytes=path.stat().st_size,
            sha256=Digest.of(path.read_bytes()),
            device=path.stat().st_dev,
            inode=path.stat().st_ino,
            mtime_ns=path.stat().st_mtime_ns,
        )
        for path in images.iterdir()
    )
    record = PreparedRecord(capsule=Digest.of(b"x"), files=files)
    descriptor = os.open(images.parent / RECORD_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(descriptor, canonical_json(record.model_dump(mode="json")))
    os.close(descriptor)


def test_memory_is_proved_once_and_again_when_it_was_touched(yard: Yard, criu: Criu) -> None:
    images = _dump(yard, yard.launch_memory(), criu, PROCESS_FOLDER)
    names = [one.name for one in read_dumped_unit(images).memory]
    assert not are_proved(images, names)
    _prove(images)
    assert are_proved(images, names)
    assert not are_proved(images, [*names, "another.bin"])
    path = images / names[0]
    with path.open("r+b") as file:
        file.seek(_MIB)
        byte = file.read(1)[0]
        file.seek(_MIB)
        file.write(bytes([byte ^ 1]))
    assert not are_proved(images, names)
    with pytest.raises(IntegrityError, match=names[0]):
        restore(yard.spec("back"), images, criu=criu, deadline_s=PATIENCE_S)
    yard.wait_until_empty()
