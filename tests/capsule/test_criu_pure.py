"""CRIU's command lines, its version, and what its log means: no root, no CRIU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coldsnap.capsule.criu import MINIMUM_VERSION, Criu, dump_command, find_criu, parse_version, restore_command
from coldsnap.capsule.criulog import criu_error, explain, explained, telling_lines
from coldsnap.capsule.tree import FdFacts, FdKind, ProcessFacts, TreeFacts
from coldsnap.errors import CriuError, MissingCapability, OutOfSpace

CRIU = Path("/opt/criu")


def test_the_dump_command_leaves_the_tree_stopped_and_names_no_host_path() -> None:
    command = dump_command(CRIU, root_pid=1001, timeout_s=7.9)
    assert command[:4] == ("/opt/criu", "dump", "--tree", "1001")
    assert "--leave-stopped" in command
    assert "--leave-running" not in command
    assert command[command.index("--timeout") + 1] == "7"
    assert command[command.index("--images-dir") + 1] == "/proc/self/fd/10"
    assert command[command.index("--external") + 1] == "mnt[]"
    assert command[command.index("--work-dir") + 1] == command[command.index("--libdir") + 1] == "/run/coldsnap/.criu"
    wanted = {
        "--link-remap",
        "--tcp-established",
        "--file-locks",
        "--ext-unix-sk",
        "--manage-cgroups=ignore",
        "--no-default-config",
        "-v2",
    }
    assert wanted <= set(command)


def test_leave_running_replaces_leave_stopped() -> None:
    command = dump_command(CRIU, root_pid=5, timeout_s=0.2, leave_running=True)
    assert "--leave-running" in command
    assert "--leave-stopped" not in command
    assert command[command.index("--timeout") + 1] == "1"  # 0 would mean "for ever"


def test_the_restore_command_swaps_the_old_stdout_for_the_new() -> None:
    command = restore_command(CRIU, log_pipe=4711)
    assert command[:3] == ("/opt/criu", "restore", "--restore-detached")
    assert command[-2:] == ("--inherit-fd", "fd[11]:pipe:[4711]")
    assert "--network-lock" not in command


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Version: 4.1.1\n", (4, 1, 1)),
        ("Version: 4.2\nGitID: v4.2\n", (4, 2)),
        ("Version: 3.17.1-dirty\n", (3, 17, 1)),
        ("criu 4.2\n", None),
        ("", None),
    ],
)
def test_versions(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


def test_newer_versions_with_fewer_parts_are_newer() -> None:
    assert sorted([(4, 2), MINIMUM_VERSION, (4, 1)]) == [(4, 1), MINIMUM_VERSION, (4, 2)]


def _program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o700)
    return path


def test_the_first_usable_criu_is_taken(tmp_path: Path) -> None:
    old = _program(tmp_path / "old", "#!/bin/sh\necho Version: 3.17.1\n")
    mute = _program(tmp_path / "mute", "#!/bin/sh\nexit 3\n")
    good = _program(tmp_path / "good", "#!/bin/sh\necho Version: 4.2.1\n")
    found = find_criu([tmp_path / "none", old, mute, good])
    assert found == Criu(path=good, version=(4, 2, 1))
    assert found.version_text == "4.2.1"


def test_every_unusable_criu_is_told(tmp_path: Path) -> None:
    old = _program(tmp_path / "old", "#!/bin/sh\necho Version: 3.17.1\n")
    mute = _program(tmp_path / "mute", "#!/bin/sh\nexit 3\n")
    script = tmp_path / "plain"
    script.write_text("no program")
    with pytest.raises(MissingCapability) as caught:
        find_criu([tmp_path / "none", old, mute, script])
    text = str(caught.value)
    for told in (
        "none: does not exist",
        "3.17.1 is older than 4.1.1",
        "no version (exit status 3)",
        "Permission denied",
    ):
        assert told in text
    assert "install-criu" in text


def test_a_replaced_criu_is_asked_again(tmp_path: Path) -> None:
    path = _program(tmp_path / "criu", "#!/bin/sh\necho Version: 4.2.1\n")
    assert find_criu([path]).version == (4, 2, 1)
    _program(path, "#!/bin/sh\necho Version: 4.3.0.1\n")
    assert find_criu([path]).version == (4, 3, 0, 1)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("Error (criu/files-reg.c:1): File usr/lib/libx.so has bad size 5 (expect 6)", "usr/lib/libx.so has 5 bytes"),
        (
            "Error (criu/files-reg.c:1): File usr/lib/libx.so has bad build-ID ab (expect cd)",
            "is not the library it was",
        ),
        ("Error (criu/files-reg.c:2): Can't open file root/x on restore: No such file or directory", "root/x"),
        ("Error (criu/sk-inet.c:9): Can't bind inet socket (id 3): Address already in use", "port"),
        ("Error (criu/cr-restore.c:1): Can't fork for 1001: File exists", "PID 1001"),
        (
            "Error (criu/sk-inet.c:1): inet: Connected TCP socket, consider using --tcp-established option.",
            "TCP connection",
        ),
        ("Error (criu/sk-unix.c:1): unix: External socket is used. Consider using --ext-unix-sk", "Unix socket"),
        (
            "Error (criu/files-ext.c:98): Can't dump file 5 of that type [20666] (chr 195:255 /dev/nvidiactl)",
            "/dev/nvidiactl",
        ),
        (
            "Error (criu/files-ext.c:98): Can't dump file 9 of that type [600] (unknown anon_inode:[perf_event])",
            "perf_event",
        ),
        ("Error (criu/protobuf.c:72): Unexpected EOF on (empty-image)", "image file is missing or damaged"),
        ("Error (criu/cr-dump.c:1): The task is already traced by 44", "debugger"),
        ("criu: error while loading shared libraries: libnl-3.so", "does not start"),
        ("Error (criu/cpu.c:1): cpu: FPU feature required by image is not supported on host", "processor"),
    ],
)
def test_frequent_causes_are_told_in_plain_language(line: str, cause: str) -> None:
    error = criu_error("restore of unit u0", "criu restore ended with 1", f"(00.1) Info\n{line}\nError: FAILED.\n")
    assert cause in error.message
    assert error.message.startswith("restore of unit u0 failed: ")
    assert error.cure
    log = error.facts["log"]
    assert isinstance(log, list)
    assert line in log


@pytest.mark.parametrize(("said", "cause"), [("No space left on device", "full"), ("Cannot allocate memory", "memory")])
def test_a_full_machine_is_the_machines_fault(said: str, cause: str) -> None:
    error = criu_error("dump of unit u0", "criu dump ended with 1", f"Error (criu/image.c:3): Unable to write: {said}")
    assert type(error) is OutOfSpace
    assert cause in error.message


def test_an_unknown_cause_is_not_guessed() -> None:
    log = "Error (criu/new.c:1): Something nobody has seen\n"
    assert explain(log) is None
    error = criu_error("dump of unit u0", "criu dump ended with 1", log)
    assert "criu dump ended with 1" in error.message
    assert error.facts["log"] == [log.strip()]


def test_telling_lines_are_errors_and_the_end_without_noise() -> None:
    noise = "Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted"
    log = "\n".join([noise, "first", "Error one", *["chatter"] * 50, "Error two", "", "a", "b", "c"])
    assert telling_lines(log) == ("Error one", "Error two", "a", "b", "c")
    assert telling_lines("") == ()
    assert len(telling_lines("Error\n" * 100)) == 30


def test_a_ring_in_the_tree_explains_a_failed_dump() -> None:
    ring = FdFacts(number=7, target="anon_inode:[io_uring]", kind=FdKind.IO_URING, flags=2)
    process = ProcessFacts(pid=9, ppid=1, cmdline=("serve", "x"), environ={}, fds=(ring,), maps=(), num_threads=1)
    failed = criu_error("dump of unit u0", "criu dump ended with 1", "Error: send_fds failed (-22)")
    assert isinstance(failed, CriuError)
    told = explained(failed, "dump of unit u0", TreeFacts(processes=(process,)))
    assert re.search(r"process 9 \(serve x\) uses io_uring \(descriptor 7\)", told.message)
    assert told.facts["log"] == failed.facts["log"]
    assert explained(failed, "dump of unit u0", TreeFacts(processes=())) is failed
