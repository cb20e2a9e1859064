"""The small parts under a unit: specs, channel, deadline, identity, images folder, private files."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from coldsnap.capsule import inside
from coldsnap.capsule.channel import Channel, Closed
from coldsnap.capsule.checks import spec_problems
from coldsnap.capsule.deadline import Deadline
from coldsnap.capsule.driver import BindMount, UnitSpec
from coldsnap.capsule.dumped import (
    PROVED_BYTES,
    DumpedUnit,
    ImageFile,
    MovedMemory,
    PrivateEntry,
    read_dumped_unit,
    write_dumped_unit,
)
from coldsnap.capsule.identity import end_process, is_running, start_ticks
from coldsnap.capsule.memlog import memory_log
from coldsnap.capsule.pagerefill import tasks_of
from coldsnap.capsule.privatefiles import private_path
from coldsnap.capsule.starting import init_error
from coldsnap.capsule.unit import LinuxUnits
from coldsnap.errors import (
    DeadlineExceeded,
    EngineError,
    HostError,
    IntegrityError,
    MissingCapability,
    OutOfSpace,
    PeerError,
)


def _channels() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def test_a_channel_carries_messages_and_its_end() -> None:
    ours, theirs = _channels()
    ours.send({"a": 1})
    ours.send({"text": "lines\nand é"})
    assert theirs.receive(timeout_s=60) == {"a": 1}
    assert theirs.receive(timeout_s=60) == {"text": "lines\nand é"}
    with pytest.raises(TimeoutError):
        theirs.receive(timeout_s=0.01)
    ours.close()
    with pytest.raises(Closed):
        theirs.receive(timeout_s=60)
    with pytest.raises(Closed):
        theirs.send({"late": True})
    theirs.close()


def test_a_message_larger_than_any_buffer_arrives() -> None:
    ours, theirs = _channels()
    message = {"data": "x" * (4 << 20)}
    sender = threading.Thread(target=ours.send, args=(message,))
    sender.start()
    assert theirs.receive(timeout_s=60) == message
    sender.join()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("line", [b"[1]\n", b"no json\n"])
def test_what_is_no_message_is_refused(line: bytes) -> None:
    raw, theirs = socket.socketpair()
    channel = Channel(theirs)
    with raw:
        raw.sendall(line)
        with pytest.raises(ValueError, match=r".+"):
            channel.receive(timeout_s=60)
    channel.close()


def test_a_deadline_is_shared_by_its_phases() -> None:
    assert 0 < Deadline("work", 100).remaining("one") <= 100
    with pytest.raises(DeadlineExceeded, match="work took longer than 0 s, in its phase 'two'") as caught:
        Deadline("work", 0).remaining("two")
    assert caught.value.facts == {"phase": "two", "deadline_s": 0}


def test_a_process_is_its_pid_and_its_start() -> None:
    with subprocess.Popen(["/bin/sleep", "1000"]) as process:
        ticks = start_ticks(process.pid)
        assert ticks is not None
        assert is_running(process.pid, ticks)
        assert not is_running(process.pid, ticks + 1)
        # Somebody else's process is not killed for having the number.
        assert end_process(process.pid, ticks + 1, timeout_s=60)
        assert is_running(process.pid, ticks)
        assert end_process(process.pid, ticks, timeout_s=60)
        assert start_ticks(process.pid) is None  # a zombie counts as gone
    assert end_process(process.pid, ticks, timeout_s=60)


def test_a_memory_log_takes_several_writers_and_keeps_the_end() -> None:
    with memory_log() as log:
        for _ in range(2):
            subprocess.run(["/bin/sh", "-c", "echo one; echo two >&2"], stdout=log.fd, stderr=log.fd, check=True)
        assert log.text() == "one\ntwo\n" * 2
        os.truncate(log.fd, 0)
        os.write(log.fd, b"lost" + b"x" * (4 << 20))
        assert log.text() == "x" * (4 << 20)


def _spec(**changes: object) -> UnitSpec:
    return UnitSpec(**{"unit": "u0", "log_path": Path("/tmp/log"), "command": ("/bin/true",), **changes})  # type: ignore[arg-type]


def _fields(spec: UnitSpec) -> list[str]:
    return [problem.field for problem in spec_problems(spec, needs_command=True)]


def test_without_root_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingCapability, match="runs as user 1000") as caught:
        LinuxUnits().launch(_spec(log_path=tmp_path / "log"), deadline_s=1)
    assert "sudo" in str(caught.value)
    assert not (tmp_path / "log").exists()


def test_a_good_spec_has_no_problems(tmp_path: Path) -> None:
    mounts = (
        BindMount(source=tmp_path, target=Path("/mnt"), read_only=True),
        BindMount(source=tmp_path, target=Path("/dev/shm/made")),
    )
    assert _fields(_spec(mounts=mounts, files={"settings.json": b""}, environment={"A": "="})) == []
    assert list(spec_problems(_spec(command=()), needs_command=False)) == []


def test_problems_of_a_spec_name_their_field(tmp_path: Path) -> None:
    assert _fields(_spec(command=())) == ["command"]
    assert _fields(_spec(command=("a", "b\0"))) == ["command[1]"]
    assert _fields(_spec(environment={"A=B": "x", "C": "\0"})) == ["environment.C", "environment.A=B"]
    assert _fields(_spec(files={"": b"", ".x": b"", "a/b": b""})) == ["files[]", "files[.x]", "files[a/b]"]
    here = BindMount(source=tmp_path, target=tmp_path)
    assert _fields(_spec(mounts=(here, here))) == ["mounts[1].target"]
    for reserved in ("/", "/proc", "/proc/sys", "/run/coldsnap", "/dev/shm"):
        mount = BindMount(source=tmp_path, target=Path(reserved))
        assert "mounts[0].target" in _fields(_spec(mounts=(mount,)))
    relative = BindMount(source=Path("x"), target=Path("/mnt/../etc"))
    assert _fields(_spec(mounts=(relative,))) == ["mounts[0].source", "mounts[0].target"]


@pytest.mark.parametrize(
    ("phase", "number", "kind"),
    [
        ("exec", errno.ENOENT, EngineError),
        ("namespaces", errno.EPERM, MissingCapability),
        ("pids", errno.EACCES, MissingCapability),
        ("clock", errno.EINVAL, MissingCapability),
        ("mounts", errno.ENOENT, HostError),
        ("files", errno.ENOSPC, OutOfSpace),
        ("mounts", errno.ENOMEM, OutOfSpace),
        ("criu", None, PeerError),
    ],
)
def test_what_an_init_complains_about_says_who_must_act(phase: str, number: int | None, kind: type[Exception]) -> None:
    error = init_error("u0", "start", {"event": "error", "phase": phase, "errno": number, "message": "it broke"})
    assert type(error) is kind
    assert "it broke" in str(error)
    assert error.facts == {"unit": "u0", "phase": phase}


def test_a_root_that_ends_early_is_told() -> None:
    assert "ended with 7" in str(init_error("u0", "exec", {"event": "ended", "code": 7}))


def _dumped(**changes: object) -> DumpedUnit:
    facts = {"unit": "u0", "root_pid": 1001, "log_pipe": 5, "criu_version": "4.1.1", "files": ()}
    return DumpedUnit(**{**facts, **changes})  # type: ignore[arg-type]


def test_the_folders_record_round_trips_and_is_private(tmp_path: Path) -> None:
    (tmp_path / "core.img").write_bytes(b"123")
    (tmp_path / "private-1.bin").write_bytes(b"12")
    entries = (
        PrivateEntry(root="run", path="a", mode=0o700),
        PrivateEntry(root="shm", path="a/b c", mode=0o600, bytes=9, pieces=((0, 1), (8, 1)), content="private-1.bin"),
        PrivateEntry(root="shm", path="hollow", mode=0o600, bytes=9),
    )
    files = (ImageFile(name="core.img", bytes=3), ImageFile(name="private-1.bin", bytes=2))
    dumped = _dumped(files=files, private=entries)
    write_dumped_unit(tmp_path, dumped)
    assert (tmp_path / "unit.json").stat().st_mode & 0o777 == 0o600
    assert read_dumped_unit(tmp_path) == dumped


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"format": 3}',
        _dumped().model_dump_json().replace('"format":3', '"format":2'),
        _dumped().model_dump_json().replace('"files":[]', '"files":[{"name":"../x","bytes":1}]'),
        _dumped().model_dump_json().replace('"private":[]', '"private":[{"root":"run","path":"../x","mode":384}]'),
        _dumped().model_dump_json().replace('"private":[]', '"private":[{"root":"etc","path":"x","mode":384}]'),
        _dumped().model_dump_json()[:-1],
        _dumped().model_dump_json().replace('"unit"', '"extra":1,"unit"'),
    ],
)
def test_a_damaged_record_is_no_dump(tmp_path: Path, text: str) -> None:
    (tmp_path / "unit.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"unit\.json is missing or damaged"):
        read_dumped_unit(tmp_path)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"pieces": ((0, 4), (3, 4))}, "is out of order"),
        ({"pieces": ((4, 4), (0, 4))}, "is out of order"),
        ({"pieces": ((0, 0),)}, "is out of order"),
        ({"pieces": ((-1, 4),)}, "is not in the file"),
        ({"pieces": ((8, 2),)}, "is not in the file"),
        ({"bytes": None}, "is not in the file"),
        ({"pieces": ()}, r"has 0 pieces and its content in private-1\.bin"),
        ({"content": None}, "has 1 pieces and its content in None"),
        ({"content": "../private-1.bin"}, "should match pattern"),
    ],
    ids=str,
)
def test_a_private_file_that_cannot_be_is_refused(changes: dict[str, object], fault: str) -> None:
    sound = {"root": "shm", "path": "a", "mode": 0o600, "bytes": 9, "pieces": ((1, 8),), "content": "private-1.bin"}
    entry = PrivateEntry(**sound)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=fault):
        PrivateEntry(**{**sound, **changes})  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"private-1\.bin is no file of 8 bytes"):
        _dumped(files=(ImageFile(name="private-1.bin", bytes=9),), private=(entry,))


_HEX = "0" * 64
_MOVED = MovedMemory(pid=1001, pieces=((0x9000, 8192), (0x1000, 4096)), sha256=(_HEX,))


def test_moved_memory_round_trips_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "runs-1001.bin").write_bytes(bytes(3 * 4096))
    files = (ImageFile(name="runs-1001.bin", bytes=3 * 4096),)
    write_dumped_unit(tmp_path, _dumped(files=files, memory=(_MOVED,), stopped=(1002,)))
    assert read_dumped_unit(tmp_path).memory == (_MOVED,)
    assert (_MOVED.name, _MOVED.bytes) == ("runs-1001.bin", 3 * 4096)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"pieces": ()}, "at least 1 item"),
        ({"pieces": ((0x1000, 4096), (0x1000, 8192))}, "is there twice"),
        ({"pieces": ((0x1000, 8192), (0x2000, 4096))}, "is there twice"),
        ({"pieces": ((0x1000, 0),)}, "is no memory"),
        ({"pieces": ((0x1000, -4096),)}, "is no memory"),
        ({"pieces": ((0x1001, 4096),)}, "is no memory"),
        ({"pieces": ((0x1000, 100),)}, "is no memory"),
        ({"pieces": (((1 << 64) - 4096, 8192),)}, "is no memory"),
        ({"sha256": ()}, "0 digests are not those of 12288 bytes"),
        ({"sha256": (_HEX, _HEX)}, "2 digests are not those"),
        ({"sha256": (_HEX.replace("0", "A"),)}, "should match pattern"),
        ({"pid": 1}, "greater than 1"),
    ],
    ids=str,
)
def test_moved_memory_that_cannot_be_is_refused(changes: dict[str, object], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        MovedMemory(**{**_MOVED.model_dump(), **changes})


def test_a_record_that_nobody_would_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldsnap.capsule.dumped._LIMIT_BYTES", 300)
    files = (ImageFile(name="runs-1001.bin", bytes=3 * 4096),)
    with pytest.raises(HostError, match="unit u0 lies in 2 pieces"):
        write_dumped_unit(tmp_path, _dumped(files=files, memory=(_MOVED,)))
    assert list(tmp_path.iterdir()) == []


def test_moved_memory_is_one_of_the_folders_files() -> None:
    with pytest.raises(ValidationError, match=r"runs-1001\.bin is no file of 12288 bytes"):
        _dumped(memory=(_MOVED,))
    with pytest.raises(ValidationError, match="there twice"):
        _dumped(files=(ImageFile(name="runs-1001.bin", bytes=12288),), memory=(_MOVED, _MOVED))


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12))
def test_the_work_of_a_refill_is_every_piece_once(sizes: list[int]) -> None:
    pieces = [(number << 32, size * 4096) for number, size in enumerate(sizes, start=1)]
    total = sum(size for _, size in pieces)
    digests = [f"{number:064x}" for number in range(-(-total // PROVED_BYTES))]
    tasks = tasks_of({"pid": 7, "name": "runs-7.bin", "pieces": pieces, "sha256": digests})
    assert [task.sha256 for task in tasks] == digests
    assert [task.offset for task in tasks] == [number * PROVED_BYTES for number in range(len(tasks))]
    assert [task.size for task in tasks] == [sum(size for _, size in task.pieces) for task in tasks]
    assert all(task.size == PROVED_BYTES for task in tasks[:-1])
    joined: list[list[int]] = []
    for address, size in [piece for task in tasks for piece in task.pieces]:
        if joined and sum(joined[-1]) == address:
            joined[-1][1] += size
        else:
            joined.append([address, size])
    assert joined == [list(piece) for piece in pieces]


@pytest.mark.parametrize("path", ["", "/etc/x", "a/../../x", "..", "a//b", "./a"])
def test_a_private_path_never_leaves_its_root(path: str) -> None:
    with pytest.raises(ValueError, match="not clean"):
        private_path({"root": "run", "path": path})
    with pytest.raises(ValueError, match=r".+"):
        PrivateEntry(root="run", path=path, mode=0)


def test_what_runs_inside_a_unit_needs_the_standard_library_only() -> None:
    source = Path(inside.__file__).parents[2]
    script = (
        "import sys; sys.path.append(sys.argv[1]); from coldsnap.capsule import enter, init\n"
        "print(*sorted(name for name in sys.modules if name.startswith('coldsnap')), 'pathlib' in sys.modules)"
    )
    command = [sys.executable, "-I", "-S", "-c", script, str(source)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    parts = ["channel", "copying", "enter", "init", "inside", "linux", "pagerefill", "privatefiles", "rootfs", "thaw"]
    assert said == ["coldsnap", "coldsnap.capsule", *(f"coldsnap.capsule.{part}" for part in parts), "False"]


def test_a_childs_descriptors_are_exactly_those_wanted(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    extra = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(extra, True)
    output = os.open(path, os.O_CREAT | os.O_WRONLY)
    null = os.open("/dev/null", os.O_RDONLY)
    child = os.fork()
    if child == 0:
        try:
            # Wanted numbers that collide with held ones, on purpose.
            inside.become_child({0: null, 1: output, 2: output, null: output, output: null})
            os.execv("/bin/ls", ["ls", "-l", "/proc/self/fd"])  # noqa: S606
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for fd in (extra, output, null):
        os.close(fd)
    links = dict(line.split()[-3::2] for line in path.read_text().splitlines() if "->" in line)
    assert {int(number): target for number, target in links.items() if not target.startswith("/proc/")} == {
        0: "/dev/null",
        1: str(path),
        2: str(path),
        null: str(path),
        output: "/dev/null",
    }
