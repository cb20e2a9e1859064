"""Real trees: launched, dumped, killed, restored, and nothing left when any of it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from coldsnap.capsule import linux
from coldsnap.capsule.criu import Criu
from coldsnap.capsule.driver import BindMount, RunningUnit, UnitRecord
from coldsnap.capsule.dump import dump
from coldsnap.capsule.restore import restore
from coldsnap.capsule.running import attach, launch
from coldsnap.capsule.tree import outside_peers, read_tree
from coldsnap.errors import (
    CriuError,
    DeadlineExceeded,
    EngineError,
    IntegrityError,
    InvalidDocument,
    OutOfSpace,
    PeerError,
    ResourceBusy,
)
from coldsnap.testing.yard import PATIENCE_S, Yard, wait_for_writer, wait_until_gone

from .conftest import Clock, at  # isort: skip

pytestmark = pytest.mark.criu

# A CRIU that says where it is and then hangs, before or after the real one has done its work.
_HANG_BEFORE = "#!/bin/sh\necho here > {fifo}\nexec sleep 1000\n"
_HANG_AFTER = '#!/bin/sh\n{criu} "$@" || exit\necho here > {fifo}\nexec sleep 1000\n'

_CONTROLLER = """
import sys
from pathlib import Path
from coldsnap.capsule import linux
from coldsnap.capsule.criu import Criu
from coldsnap.capsule.driver import UnitSpec
from coldsnap.capsule.restore import restore
spec = UnitSpec(unit=sys.argv[1], log_path=Path(sys.argv[2]))
restore(spec, Path(sys.argv[3]), criu=Criu(path=Path(sys.argv[4]), version=(4, 1, 1)), deadline_s=60)
"""

_DUMPING_CONTROLLER = """
import sys
from pathlib import Path
from coldsnap.capsule import linux
from coldsnap.capsule.criu import Criu
from coldsnap.capsule.driver import UnitRecord
from coldsnap.capsule.dump import dump
from coldsnap.capsule.running import attach
unit = attach(UnitRecord.model_validate_json(sys.argv[1]))
dump(unit, Path(sys.argv[2]), criu=Criu(path=Path(sys.argv[3]), version=(4, 1, 1)), deadline_s=60)
"""

_TIED_CONTROLLER = """
import sys
from pathlib import Path
from coldsnap.capsule.driver import UnitSpec
from coldsnap.capsule.running import launch
spec = UnitSpec(unit=sys.argv[1], log_path=Path(sys.argv[2]), command=("/bin/sleep", "1000"))
unit = launch(spec, deadline_s=60, tied=True)
if sys.argv[3] == "release":
    unit.release()
print(unit.record().model_dump_json(), flush=True)
sys.stdin.read()
"""


def _dump(yard: Yard, unit: RunningUnit, criu: Criu) -> Path:
    images = yard.folder / "images"
    dump(unit, images, criu=criu, deadline_s=PATIENCE_S)
    return images


def _restore(yard: Yard, images: Path, criu: Criu, name: str = "u0") -> RunningUnit:
    return yard.keep(restore(yard.spec(name), images, criu=criu, deadline_s=PATIENCE_S))


def _hanging_criu(yard: Yard, criu: Criu, script: str) -> tuple[Criu, Path]:
    fifo, path = yard.folder / "hangs.fifo", yard.folder / "hanging-criu"
    os.mkfifo(fifo)
    path.write_text(script.format(fifo=fifo, criu=criu.path))
    path.chmod(0o700)
    return replace(criu, path=path), fifo


def test_a_killed_tree_continues_where_it_was(yard: Yard, criu: Criu) -> None:
    unit = yard.launch(megabytes=4)
    before = yard.ask(unit)
    assert (before["pids"], before["session"], before["shared"]) == ([1001, 1002], 1001, ["named", "ghost"])
    report = dump(unit, yard.folder / "images", criu=criu, deadline_s=PATIENCE_S)
    assert not unit.alive()
    assert unit.pids() == ()
    assert yard.processes() == []
    assert report.bytes == sum(path.stat().st_size for path in (yard.folder / "images").iterdir()) > 4 << 20
    assert {"unit.json", "inventory.img", "pages-1.img"} <= {file.name for file in report.files}
    assert (yard.folder / "images").stat().st_mode & 0o777 == 0o700

    back = _restore(yard, yard.folder / "images", criu)
    after = yard.ask(back)
    assert len(back.pids()) == 2
    assert after["questions"] == before["questions"] + 1
    assert after["thread"] == before["thread"] + 1
    assert after["child"] == before["child"] + 1
    assert {
        key: after[key] for key in ("pids", "session", "memory", "shared", "arguments", "settings", "lock", "fds")
    } == {key: before[key] for key in ("pids", "session", "memory", "shared", "arguments", "settings", "lock", "fds")}


def test_the_timer_goes_on(yard: Yard, criu: Criu) -> None:
    unit = yard.launch()
    back = _restore(yard, _dump(yard, unit, criu), criu)
    first = yard.ask(back)["ticks"]
    assert any(yard.ask(back)["ticks"] > first for _ in range(100_000))


def test_its_clock_stands_still_while_it_is_frozen(yard: Yard, criu: Criu) -> None:
    unit = yard.launch()
    behind_at_first = time.monotonic() - yard.ask(unit)["clock"]
    images = _dump(yard, unit, criu)
    frozen_at = time.monotonic()
    other = yard.launch("other")  # something to do meanwhile
    other.kill()
    frozen_s = time.monotonic() - frozen_at
    back = _restore(yard, images, criu, "back")
    behind = time.monotonic() - yard.ask(back)["clock"]
    assert behind - behind_at_first > frozen_s > 0


def test_a_tree_starts_with_clean_descriptors_and_its_own_variables_only(yard: Yard) -> None:
    leaked = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        unit = yard.launch()
    finally:
        os.close(leaked)
    tree = read_tree(unit.pids())
    assert [fd.target for _, fd in tree.descriptors() if fd.target == "/dev/zero"] == []
    root = tree.processes[0]
    assert dict(root.environ) == {"GREETING": "hello"}
    assert [fd.target for fd in root.fds[:3]] == ["/dev/null", *[f"pipe:[{unit.record().log_pipe}]"] * 2]
    assert outside_peers(tree, known_pipes=[unit.record().log_pipe]) == ()


def test_what_it_prints_reaches_the_log_of_the_unit_it_is_in(yard: Yard, criu: Criu) -> None:
    unit = yard.launch()
    assert yard.ask(unit, "say before the dump") == "ok"
    images = _dump(yard, unit, criu)
    assert unit.log_tail(2) == ("the tree is ready", "before the dump")
    one, two = (_restore(yard, images, criu, name) for name in ("one", "two"))
    yard.ask(one, "say I am one")
    yard.ask(two, "say I am two")
    yard.ask(one, "end 3")
    wait_until_gone(one.record().init_pid)
    two.kill()
    assert one.log_tail(9) == ("I am one", "coldsnap: the unit's root process ended with exit status 3")
    assert two.log_tail(9) == ("I am two",)


def test_a_log_that_cannot_be_written_stops_nothing(yard: Yard) -> None:
    ready = yard.folder / "ready"
    os.mkfifo(ready)
    script = f"for i in 1 2 3 4 5 6 7 8; do printf %100000s x; done; echo > {ready}; exec sleep 1000"
    spec = replace(yard.spec(command=("/bin/sh", "-c", script)), log_path=Path("/dev/full"))
    unit = yard.keep(launch(spec, deadline_s=PATIENCE_S))
    wait_for_writer(ready)  # it printed far more than a pipe holds
    assert unit.alive()


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_words_before_a_kill_are_kept(yard: Yard, tied: bool) -> None:
    ready = yard.folder / "ready"
    os.mkfifo(ready)
    script = f"echo one; echo last words; echo > {ready}; exec sleep 1000"
    unit = yard.keep(launch(yard.spec(command=("/bin/sh", "-c", script)), deadline_s=PATIENCE_S, tied=tied))
    wait_for_writer(ready)
    unit.kill()
    assert unit.log_tail(2) == ("one", "last words")


def test_two_restores_of_one_image_live_side_by_side_and_apart(yard: Yard, criu: Criu) -> None:
    images = _dump(yard, yard.launch(), criu)
    one, two = (_restore(yard, images, criu, name) for name in ("one", "two"))
    for asked in range(1, 4):
        assert yard.ask(one)["questions"] == asked
    assert yard.ask(two)["questions"] == 1
    one.kill()
    assert yard.ask(two)["questions"] == 2


def test_a_restored_tree_can_be_dumped_and_restored_again(yard: Yard, criu: Criu) -> None:
    first = _restore(yard, _dump(yard, yard.launch(), criu), criu)
    grandchild = yard.ask(first, "fork")
    # Above the tree's own, so that the next restore's CRIU, which gets low PIDs, cannot take it.
    assert grandchild > 1002
    second = yard.folder / "again"
    dump(first, second, criu=criu, deadline_s=PATIENCE_S)
    back = _restore(yard, second, criu, "again")
    assert yard.ask(back)["questions"] == 2
    assert len(back.pids()) == 3


def test_old_pids_may_be_taken_on_the_host(yard: Yard, criu: Criu) -> None:
    images = _dump(yard, yard.launch(), criu)
    takers = []
    try:
        while not {1001, 1002} <= {int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()}:
            Path("/proc/sys/kernel/ns_last_pid").write_text("1000")
            takers.append(subprocess.Popen(["/bin/sleep", "1000"]))
        back = _restore(yard, images, criu)
        assert yard.ask(back)["pids"] == [1001, 1002]
    finally:
        for taker in takers:
            taker.kill()
            taker.wait()


def test_leave_running_leaves_it_running_and_the_image_good(yard: Yard, criu: Criu) -> None:
    unit = yard.launch()
    dump(unit, yard.folder / "images", criu=criu, deadline_s=PATIENCE_S, leave_running=True)
    assert yard.ask(unit)["questions"] == 1
    back = _restore(yard, yard.folder / "images", criu, "copy")
    assert yard.ask(back)["questions"] == 1
    assert yard.ask(unit)["questions"] == 2


@pytest.mark.parametrize(("trick", "cause"), [("tcp", "open TCP connection"), ("io_uring", "io_uring")])
def test_a_failed_dump_says_why_and_leaves_the_tree_usable(yard: Yard, criu: Criu, trick: str, cause: str) -> None:
    unit = yard.launch()
    if trick == "io_uring" and Path("/proc/sys/kernel/io_uring_disabled").read_text().strip() == "2":
        assert yard.ask(unit, "trick io_uring") == "Operation not permitted"
        return
    assert yard.ask(unit, f"trick {trick}") == "ok"
    with pytest.raises(CriuError, match=cause) as caught:
        _dump(yard, unit, criu)
    assert caught.value.facts["log"]
    assert not (yard.folder / "images").exists()
    assert yard.ask(unit)["questions"] == 2
    assert yard.ask(unit, "untrick") == "ok"
    back = _restore(yard, _dump(yard, unit, criu), criu)
    assert yard.ask(back)["questions"] == 4


def test_a_dump_that_hangs_is_stopped_and_leaves_the_tree_usable(yard: Yard, criu: Criu) -> None:
    unit = yard.launch()
    hanging, _ = _hanging_criu(yard, criu, "#!/bin/sh\nexec sleep 1000\n")
    with pytest.raises(DeadlineExceeded, match="phase 'criu'"):
        dump(unit, yard.folder / "images", criu=hanging, deadline_s=0.3)
    assert not (yard.folder / "images").exists()
    assert yard.ask(unit)["questions"] == 1
    assert len(unit.pids()) == 2


@pytest.mark.parametrize("script", [_HANG_BEFORE, _HANG_AFTER], ids=["before", "after"])
def test_a_controller_killed_in_the_middle_of_a_dump_leaves_the_tree_running(
    yard: Yard, criu: Criu, script: str
) -> None:
    unit = yard.launch()
    hanging, fifo = _hanging_criu(yard, criu, script)
    arguments = [unit.record().model_dump_json(), str(yard.folder / "images"), str(hanging.path)]
    before = set(unit.pids())
    with subprocess.Popen([sys.executable, "-c", _DUMPING_CONTROLLER, *arguments]) as controller:
        wait_for_writer(fifo)
        helpers = [pid for pid in yard.processes() if pid not in (unit.record().init_pid, *before)]
        assert helpers
        controller.send_signal(signal.SIGKILL)
    for pid in helpers:
        wait_until_gone(pid)
    assert set(unit.pids()) == before
    assert yard.ask(unit)["questions"] == 1
    assert not (yard.folder / "images" / "unit.json").exists()


def test_a_full_disk_is_told_and_the_tree_runs_on(yard: Yard, criu: Criu) -> None:
    unit = yard.launch(megabytes=8)
    small = yard.folder / "small"
    small.mkdir()
    linux.mount_tmpfs(str(small), size_bytes=4 << 20, mode=0o700)
    try:
        with pytest.raises(OutOfSpace):
            dump(unit, small / "images", criu=criu, deadline_s=PATIENCE_S)
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert yard.ask(unit)["questions"] == 1
    back = _restore(yard, _dump(yard, unit, criu), criu)
    assert yard.ask(back)["questions"] == 2


def test_a_dump_never_touches_a_folder_that_exists(yard: Yard, criu: Criu) -> None:
    unit = yard.launch()
    (yard.folder / "images").mkdir()
    (yard.folder / "images" / "mine").touch()
    with pytest.raises(ResourceBusy, match="exists"):
        _dump(yard, unit, criu)
    assert [path.name for path in (yard.folder / "images").iterdir()] == ["mine"]
    assert unit.alive()


def test_a_unit_that_is_gone_cannot_be_dumped(yard: Yard, criu: Criu) -> None:
    unit = yard.launch()
    unit.kill()
    unit.kill()
    with pytest.raises(PeerError, match="is gone"):
        _dump(yard, unit, criu)
    assert not (yard.folder / "images").exists()


@pytest.mark.parametrize("damage", ["pages-1.img", "files.img", "core-1001.img", "inventory.img"])
def test_a_short_or_missing_image_is_named_before_anything_starts(yard: Yard, criu: Criu, damage: str) -> None:
    images = _dump(yard, yard.launch(), criu)
    path = images / damage
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=f"{damage} has {size - 1} bytes instead of {size}"):
        restore(yard.spec(), images, criu=criu, deadline_s=PATIENCE_S)
    path.unlink()
    with pytest.raises(IntegrityError, match=f"{damage} is missing"):
        restore(yard.spec(), images, criu=criu, deadline_s=PATIENCE_S)


@pytest.mark.parametrize("damage", ["files.img", "core-1001.img", "pstree.img", "inventory.img", "mm-1002.img"])
def test_a_damaged_image_is_an_error_and_leaves_nothing(yard: Yard, criu: Criu, damage: str) -> None:
    images = _dump(yard, yard.launch(), criu)
    path = images / damage
    path.write_bytes(path.read_bytes()[:8] + bytes(path.stat().st_size - 8))
    with pytest.raises(CriuError) as caught:
        restore(yard.spec(), images, criu=criu, deadline_s=PATIENCE_S)
    assert caught.value.facts["log"]
    assert yard.processes() == []


def test_a_dump_that_did_not_finish_is_no_image(yard: Yard, criu: Criu) -> None:
    images = _dump(yard, yard.launch(), criu)
    (images / "unit.json").unlink()
    with pytest.raises(IntegrityError, match=r"unit\.json"):
        restore(yard.spec(), images, criu=criu, deadline_s=PATIENCE_S)


def test_a_restore_only_reads_the_folder(yard: Yard, criu: Criu) -> None:
    images = _dump(yard, yard.launch(), criu)
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in images.iterdir()}
    _restore(yard, images, criu)
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in images.iterdir()} == before


def test_new_settings_win_over_the_saved_ones(yard: Yard, criu: Criu) -> None:
    images = _dump(yard, yard.launch(), criu)
    spec = yard.spec(files={"settings.json": b'{"port": 1}'})
    back = yard.keep(restore(spec, images, criu=criu, deadline_s=PATIENCE_S))
    assert yard.ask(back)["settings"] == '{"port": 1}'


def test_a_changed_file_is_named(yard: Yard, criu: Criu) -> None:
    library = yard.folder / "library.bin"
    library.write_bytes(b"x" * 100)
    command = ("/bin/sh", "-c", f"exec 7<{library}; exec sleep 1000")
    fds = yard.keep(launch(yard.spec(command=command), deadline_s=PATIENCE_S))
    while str(library) not in [fd.target for _, fd in read_tree(fds.pids()).descriptors()]:
        assert fds.alive()
    images = _dump(yard, fds, criu)
    library.write_bytes(b"x" * 99)
    with pytest.raises(CriuError, match=r"library\.bin has 99 bytes here and had 100"):
        restore(yard.spec(), images, criu=criu, deadline_s=PATIENCE_S)
    library.unlink()
    with pytest.raises(CriuError, match=r"library\.bin.* does not exist here"):
        restore(yard.spec(), images, criu=criu, deadline_s=PATIENCE_S)


@pytest.mark.parametrize("script", [_HANG_BEFORE, _HANG_AFTER], ids=["before", "after"])
def test_a_controller_killed_in_the_middle_of_a_restore_leaves_nothing(yard: Yard, criu: Criu, script: str) -> None:
    images = _dump(yard, yard.launch(), criu)
    hanging, fifo = _hanging_criu(yard, criu, script)
    spec = yard.spec()
    arguments = [spec.unit, str(spec.log_path), str(images), str(hanging.path)]
    with subprocess.Popen([sys.executable, "-c", _CONTROLLER, *arguments]) as controller:
        wait_for_writer(fifo)
        assert len(yard.processes()) > 1
        controller.send_signal(signal.SIGKILL)
    yard.wait_until_empty()


def test_an_interrupted_restore_leaves_nothing(yard: Yard, criu: Criu) -> None:
    images = _dump(yard, yard.launch(), criu)
    hanging, fifo = _hanging_criu(yard, criu, _HANG_BEFORE)
    spec = yard.spec()
    arguments = [spec.unit, str(spec.log_path), str(images), str(hanging.path)]
    with subprocess.Popen([sys.executable, "-c", _CONTROLLER, *arguments], stderr=subprocess.PIPE) as controller:
        wait_for_writer(fifo)
        controller.send_signal(signal.SIGINT)
        said = controller.communicate(timeout=PATIENCE_S)[1]
    assert b"KeyboardInterrupt" in said
    assert yard.processes() == []  # it did not return before they were gone


def test_a_restore_that_hangs_is_stopped_and_leaves_nothing(yard: Yard, criu: Criu, clock: Clock) -> None:
    images = _dump(yard, yard.launch(), criu)
    hanging, _ = _hanging_criu(yard, criu, "#!/bin/sh\nexec sleep 1000\n")
    with (
        at("unit.criu", lambda: clock.skip(PATIENCE_S)),
        pytest.raises(DeadlineExceeded, match="phase 'criu'") as caught,
    ):
        restore(yard.spec(), images, criu=hanging, deadline_s=PATIENCE_S)
    assert caught.value.facts["deadline_s"] == PATIENCE_S
    assert yard.processes() == []


@pytest.mark.parametrize("released", [False, True])
def test_a_tied_unit_ends_with_its_controller_until_it_is_released(yard: Yard, released: bool) -> None:
    spec = yard.spec()
    arguments = [spec.unit, str(spec.log_path), "release" if released else "hold"]
    command = [sys.executable, "-c", _TIED_CONTROLLER, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        record = UnitRecord.model_validate_json(controller.stdout.readline())
        unit = attach(record)
        assert unit is not None
        yard.keep(unit)
        controller.send_signal(signal.SIGKILL)
    if released:
        assert unit.alive()
    else:
        wait_until_gone(record.init_pid)
        assert not unit.alive()


def test_a_unit_is_found_again_but_never_mistaken(yard: Yard) -> None:
    unit = yard.launch()
    record = UnitRecord.model_validate_json(unit.record().model_dump_json())
    found = attach(record)
    assert found is not None
    assert found.pids() == unit.pids()
    assert yard.ask(found)["questions"] == 1
    later = record.model_copy(update={"init_start_ticks": record.init_start_ticks + 1})
    assert attach(later) is None
    assert attach(record.model_copy(update={"boot_id": "another"})) is None
    ours = record.model_copy(update={"init_pid": os.getpid()})
    assert attach(ours) is None
    found.kill()
    assert attach(record) is None
    assert not unit.alive()


def test_killing_takes_every_process_also_one_that_left_its_session(yard: Yard) -> None:
    fifo = yard.folder / "ready"
    os.mkfifo(fifo)
    script = f"setsid sleep 1000 & (setsid sleep 1000 &) ; echo > {fifo}; exec sleep 1000"
    unit = yard.keep(launch(yard.spec(command=("/bin/bash", "-c", script)), deadline_s=PATIENCE_S))
    wait_for_writer(fifo)
    pids = unit.pids()
    assert len(pids) == 3
    unit.kill()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_zombies_are_reaped(yard: Yard) -> None:
    fifo = yard.folder / "ready"
    os.mkfifo(fifo)
    script = f"for i in 1 2 3; do (true & exec true) & done; wait; echo > {fifo}; exec sleep 1000"
    unit = yard.keep(launch(yard.spec(command=("/bin/bash", "-c", script)), deadline_s=PATIENCE_S))
    wait_for_writer(fifo)
    patience = time.monotonic() + PATIENCE_S
    while len(unit.pids()) > 1:
        assert time.monotonic() < patience
        os.sched_yield()
    assert unit.alive()


def test_mounts_are_seen_inside_only_and_can_be_read_only(yard: Yard) -> None:
    source, target = yard.folder / "source", yard.folder / "target"
    source.mkdir()
    target.mkdir()
    (source / "weights").write_text("real")
    script = f"cat {target}/weights; touch {target}/new || echo refused; exec true"
    mounts = (BindMount(source=source, target=target, read_only=True),)
    spec = yard.spec(command=("/bin/bash", "-c", script), mounts=mounts)
    unit = yard.keep(launch(spec, deadline_s=PATIENCE_S))
    wait_until_gone(unit.record().init_pid)
    assert list(target.iterdir()) == []
    assert [path.name for path in source.iterdir()] == ["weights"]
    text = "\n".join(unit.log_tail(9))
    assert "real" in text
    assert "refused" in text


def test_what_lies_in_the_hosts_shm_can_be_mounted_and_is_not_saved(yard: Yard, criu: Criu) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        weights = Path(folder) / "weights"
        weights.write_bytes(b"w" * 12288)
        mounts = (BindMount(source=Path(folder), target=Path(folder)), BindMount(source=weights, target=weights))
        unit = yard.launch(mounts=mounts)
        inside = Path(f"/proc/{unit.record().init_pid}/root{weights}")
        assert inside.samefile(weights)
        report = dump(unit, yard.folder / "images", criu=criu, deadline_s=PATIENCE_S)
        private = {path.name for path in (yard.folder / "images").glob("private-*")}
        # settings.json, the lock and the named shared memory; neither the folder nor the file of the host
        assert len(private) == 3
        assert 12288 not in {file.bytes for file in report.files if file.name in private}
        back = yard.keep(restore(yard.spec(mounts=mounts), yard.folder / "images", criu=criu, deadline_s=PATIENCE_S))
        assert yard.ask(back)["questions"] == 1
        back.kill()


def test_a_command_that_does_not_exist_is_named(yard: Yard) -> None:
    with pytest.raises(EngineError, match="/no/such/program"):
        launch(yard.spec(command=("/no/such/program",)), deadline_s=PATIENCE_S)
    with pytest.raises(EngineError, match="/no/such/folder"):
        launch(yard.spec(command=("/bin/true",), cwd=Path("/no/such/folder")), deadline_s=PATIENCE_S)


def test_every_problem_of_a_spec_is_told_at_once(yard: Yard) -> None:
    mounts = (
        BindMount(source=Path("/no/such/source"), target=Path("/mnt")),
        BindMount(source=Path("/mnt"), target=Path("/run/coldsnap/x")),
    )
    spec = yard.spec(command=(), mounts=mounts, files={"../x": b""}, cwd=Path("here"))
    with pytest.raises(InvalidDocument) as caught:
        launch(spec, deadline_s=PATIENCE_S)
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["command", "cwd", "files[../x]", "mounts[0].source", "mounts[1].target", "mounts[1].target"]


def test_a_full_run_folder_is_told_from_other_failures(yard: Yard) -> None:
    spec = yard.spec(command=("/bin/true",), files={"big": bytes(1 << 20)}, run_dir_bytes=65536)
    with pytest.raises(OutOfSpace, match="run_dir_bytes"):
        launch(spec, deadline_s=PATIENCE_S)
