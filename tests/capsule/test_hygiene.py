"""What is judged of a process tree: each rule on hand-made facts, and the whole on real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from coldsnap.capsule.hygiene import Finding, HygieneReport, inspect_tree
from coldsnap.capsule.tree import FdFacts, FdKind, MapFacts, ProcessFacts, TreeFacts, read_tree
from coldsnap.core.bindings import HygieneFinding, Severity, hygiene_of


def fd(kind: FdKind, target: str, number: int = 5, *, flags: int = os.O_RDONLY, deleted: bool = False) -> FdFacts:
    inode = int(target.split("[")[1].rstrip("]")) if kind in (FdKind.PIPE, FdKind.SOCKET) else None
    return FdFacts(number=number, target=target, kind=kind, flags=flags, inode=inode, deleted=deleted)


def mapping(path: str | None, perms: str = "r--p", *, deleted: bool = False) -> MapFacts:
    return MapFacts(start=4096, end=8192, perms=perms, offset=0, inode=7, path=path, deleted=deleted)


def process(*parts: FdFacts | MapFacts, pid: int = 12, dumpable: bool = True) -> ProcessFacts:
    return ProcessFacts(
        pid=pid,
        ppid=1,
        cmdline=("/opt/venv/bin/python", "-m", "engine"),
        environ={},
        fds=tuple(part for part in parts if isinstance(part, FdFacts)),
        maps=tuple(part for part in parts if isinstance(part, MapFacts)),
        num_threads=1,
        dumpable=dumpable,
    )


def judge(*parts: FdFacts | MapFacts) -> list[tuple[str, str]]:
    findings = inspect_tree(TreeFacts(processes=(process(*parts),), unix_peers={}))
    assert all(finding.cure for finding in findings)
    assert all("process 12 (python)" in finding.subject for finding in findings)
    return [(finding.kind, finding.severity.value) for finding in findings]


CLEAN: list[FdFacts | MapFacts] = [
    fd(FdKind.CHARACTER, "/dev/null", flags=os.O_RDWR),
    fd(FdKind.CHARACTER, "/dev/urandom"),
    fd(FdKind.REGULAR, "/opt/model/config.json"),
    fd(FdKind.REGULAR, "/run/coldsnap/state", flags=os.O_RDWR),
    fd(FdKind.REGULAR, "/dev/shm/sem.x", flags=os.O_RDWR),
    fd(FdKind.DIRECTORY, "/opt"),
    fd(FdKind.EVENTFD, "anon_inode:[eventfd]", flags=os.O_RDWR),
    fd(FdKind.EPOLL, "anon_inode:[eventpoll]", flags=os.O_RDWR),
    fd(FdKind.MEMFD, "/memfd:x", flags=os.O_RDWR, deleted=True),
    mapping(None, "rw-p"),
    mapping("[heap]", "rw-p"),
    mapping("/usr/lib/libc.so.6", "r-xp"),
    mapping("/memfd:x", "rw-s", deleted=True),
    mapping("/dev/zero", "rw-s", deleted=True),
    mapping("/dev/shm/psm_1", "rw-s", deleted=True),
    mapping("/SYSV00000000", "rw-s", deleted=True),
    mapping("/run/coldsnap/shared", "rw-s"),
]


def test_a_clean_process_gives_no_finding() -> None:
    assert judge(*CLEAN) == []


@pytest.mark.parametrize(
    ("part", "kind", "severity"),
    [
        (fd(FdKind.IO_URING, "anon_inode:[io_uring]"), "io-uring", "stop"),
        (fd(FdKind.CHARACTER, "/dev/nvidia0"), "device-file", "stop"),
        (fd(FdKind.CHARACTER, "/dev/infiniband/uverbs0"), "device-file", "stop"),
        (fd(FdKind.BLOCK, "/dev/sda"), "device-file", "stop"),
        (fd(FdKind.CHARACTER, "/dev/pts/3"), "terminal", "stop"),
        (fd(FdKind.CHARACTER, "/dev/tty"), "terminal", "stop"),
        (fd(FdKind.OTHER, "anon_inode:[perf_event]"), "unknown-descriptor", "warn"),
        (fd(FdKind.REGULAR, "/tmp/gone", deleted=True), "deleted-file", "warn"),
        (fd(FdKind.REGULAR, "/var/log/engine.log", flags=os.O_WRONLY), "open-for-writing", "warn"),
        (fd(FdKind.REGULAR, "/var/log/engine.log", flags=os.O_RDWR), "open-for-writing", "warn"),
        (fd(FdKind.REGULAR, "/run/coldsnap2/x", flags=os.O_RDWR), "open-for-writing", "warn"),
        (fd(FdKind.SOCKET, "socket:[9]"), "unknown-socket", "warn"),
        (mapping("/dev/nvidia-uvm", "rw-s"), "device-mapping", "stop"),
        (mapping("/usr/lib/libtorch.so", "r-xp", deleted=True), "deleted-mapping", "stop"),
        (mapping("/tmp/data", "r--p", deleted=True), "deleted-mapping", "warn"),
        (mapping("/var/cache/db", "rw-s"), "shared-writable-mapping", "warn"),
    ],
)
def test_each_rule(part: FdFacts | MapFacts, kind: str, severity: str) -> None:
    assert judge(*CLEAN, part) == [(kind, severity)]


def test_many_descriptors_of_one_target_are_one_finding() -> None:
    rings = [fd(FdKind.IO_URING, "anon_inode:[io_uring]", number) for number in (7, 8, 9)]
    devices = [fd(FdKind.CHARACTER, "/dev/nvidia0", 10), fd(FdKind.CHARACTER, "/dev/nvidia1", 11)]
    findings = inspect_tree(TreeFacts(processes=(process(*rings, *devices),), unix_peers={}))
    assert [finding.subject for finding in findings] == [
        "process 12 (python) fd 7 anon_inode:[io_uring]",
        "process 12 (python) fd 10 /dev/nvidia0",
        "process 12 (python) fd 11 /dev/nvidia1",
    ]
    assert "2 more" in findings[0].message


def test_a_pipe_must_have_both_ends_inside_unless_it_is_known() -> None:
    inside = [fd(FdKind.PIPE, "pipe:[1]", 3), fd(FdKind.PIPE, "pipe:[1]", 4, flags=os.O_WRONLY)]
    out = fd(FdKind.PIPE, "pipe:[2]", 1, flags=os.O_WRONLY)
    tree = TreeFacts(processes=(process(*inside, out),), unix_peers={})
    findings = inspect_tree(tree)
    assert [(finding.kind, finding.severity) for finding in findings] == [("outside-peer", Severity.STOP)]
    assert "pipe 2" in findings[0].message
    assert inspect_tree(tree, known_pipes=[2]) == ()


def test_a_process_that_cannot_be_read_is_said() -> None:
    findings = inspect_tree(TreeFacts(processes=(process(dumpable=False),)))
    assert [(finding.kind, finding.severity) for finding in findings] == [("unreadable-process", Severity.WARN)]


def test_a_report_goes_into_the_artifact_and_comes_back() -> None:
    findings = inspect_tree(TreeFacts(processes=(process(fd(FdKind.IO_URING, "anon_inode:[io_uring]")),)))
    report = HygieneReport(findings=findings, allowed_secrets=("HF_TOKEN",), publishable=False)
    assert [problem.field for problem in report.stop_problems()] == [findings[0].subject]
    tree = report.binding("u0").model_dump(mode="json")
    (again,) = hygiene_of([tree])
    assert (again.findings, again.allowed_secrets, again.publishable) == (findings, ("HF_TOKEN",), False)
    assert Finding is HygieneFinding


CONNECTED = """
import os, socket, sys, tempfile
out = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
listener = socket.create_server(("127.0.0.1", 0))
mine = socket.create_connection(listener.getsockname())
accepted, _ = listener.accept()
left, right = socket.socketpair()
outer = socket.fromfd(int(sys.argv[2]), socket.AF_UNIX, socket.SOCK_STREAM)
os.close(int(sys.argv[2]))
deleted = tempfile.TemporaryFile()
inner_pipe = os.pipe()
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_connections_of_a_real_process_are_told_apart(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours, theirs:
        port = server.getsockname()[1]
        argv = [sys.executable, "-c", CONNECTED, str(port), str(theirs.fileno())]
        with subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={"TMPDIR": str(tmp_path), "PATH": os.environ["PATH"]},
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            stranger, _ = server.accept()
            tree = read_tree([child.pid])
            pipes = [one.inode for one in tree.processes[0].fds if one.number in (0, 1) and one.inode is not None]
            findings = inspect_tree(tree, known_pipes=pipes)
            both = inspect_tree(read_tree([child.pid, os.getpid()]), known_pipes=pipes)
            child.kill()
            stranger.close()
    found = sorted((finding.kind, finding.severity.value) for finding in findings)
    assert found == [("deleted-file", "warn"), ("outside-peer", "stop"), ("outside-peer", "stop")]
    messages = " ".join(finding.message for finding in findings)
    assert f"127.0.0.1 port {port}" in messages
    assert "unix" in messages
    # Seen together with the process at the other ends, nothing of the child leads out.
    assert not [one for one in both if one.kind == "outside-peer" and f"process {child.pid} " in one.subject]
