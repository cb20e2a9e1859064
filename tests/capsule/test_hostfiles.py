"""Files of the host that a tree maps: which they are, and whether they are still the same."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coldsnap.capsule.hostfiles import check_host_files, host_files
from coldsnap.capsule.tree import MapFacts, ProcessFacts, TreeFacts, read_tree
from coldsnap.core.bindings import HostFile, HostFilesBinding
from coldsnap.core.digest import Digest
from coldsnap.errors import HostError


def mapped(*paths: str | Path, perms: str = "r-xp") -> TreeFacts:
    maps = tuple(MapFacts(start=0, end=4096, perms=perms, offset=0, inode=1, path=str(path)) for path in paths)
    facts = ProcessFacts(pid=os.getpid(), ppid=1, cmdline=("x",), environ={}, fds=(), maps=maps, num_threads=1)
    return TreeFacts(processes=(facts,))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "lib.so"
    path.write_bytes(b"code" * 1000)
    return path


def binding(*files: HostFile) -> HostFilesBinding:
    return HostFilesBinding(unit="u0", files=files)


def test_a_real_process_names_what_it_maps_and_has_open(library: Path, tmp_path: Path) -> None:
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ);"
        "f.close(); o = open(sys.argv[2], 'rb'); w = open(sys.argv[3], 'a'); print('ready', flush=True);"
        "sys.stdin.read()"
    )
    opened, log = tmp_path / "opened", tmp_path / "log"
    opened.write_bytes(b"opened")
    argv = [sys.executable, "-c", code, str(library), str(opened), str(log)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        files = {file.path: file for file in host_files(read_tree([child.pid]))}
        child.kill()
    assert files[str(library)] == HostFile(path=str(library), bytes=4000, sha256=Digest.of(b"code" * 1000))
    assert files[str(opened)] == HostFile(path=str(opened), bytes=6, sha256=Digest.of(b"opened"))
    assert files[str(log)] == HostFile(path=str(log), bytes=0, sha256=None)  # somebody writes to it: no digest
    executable = str(Path(sys.executable).resolve())
    assert executable in files
    assert "[heap]" not in files
    assert list(files) == sorted(files)
    del files[str(log)]
    assert check_host_files(binding(*files.values())) == ()


def test_only_what_both_see_counts(library: Path, tmp_path: Path) -> None:
    tree = mapped(library, library, tmp_path / "not-here", "[vdso]", tmp_path, "/dev/null")
    assert [file.path for file in host_files(tree)] == [str(library)]
    gone = TreeFacts(
        processes=(
            ProcessFacts(
                pid=2**22 + 1,
                ppid=1,
                cmdline=(),
                environ={},
                fds=(),
                maps=mapped(library).processes[0].maps,
                num_threads=1,
            ),
        )
    )
    assert host_files(gone) == ()


def test_every_difference_is_named(library: Path, tmp_path: Path) -> None:
    same = HostFile(path=str(library), bytes=4000, sha256=Digest.of(b"code" * 1000))
    longer = tmp_path / "longer"
    longer.write_bytes(b"12345")
    other = tmp_path / "other"
    other.write_bytes(b"abc")
    unhashed = tmp_path / "unhashed"
    unhashed.write_bytes(b"xyz")
    folder = tmp_path / "folder"
    folder.mkdir()
    files = [
        same,
        HostFile(path=str(longer), bytes=4, sha256=Digest.of(b"1234")),
        HostFile(path=str(other), bytes=3, sha256=Digest.of(b"abd")),
        HostFile(path=str(tmp_path / "missing"), bytes=3),
        HostFile(path=str(unhashed), bytes=3),
        HostFile(path=str(folder), bytes=folder.stat().st_size),
    ]
    problems = check_host_files(binding(*files))
    assert [problem.field for problem in problems] == [str(longer), str(other), str(tmp_path / "missing"), str(folder)]
    assert problems[0].value == "5 bytes"
    assert problems[1].value == str(Digest.of(b"abc"))
    assert "No such file" in problems[2].message
    assert all(problem.cure for problem in problems)


def test_proofs_save_the_second_look_and_are_believed_only_for_the_same_file(library: Path, tmp_path: Path) -> None:
    proofs = tmp_path / "proofs.json"
    (file,) = host_files(mapped(library), proofs=proofs)
    assert proofs.stat().st_mode & 0o777 == 0o600
    before = proofs.read_bytes()
    assert check_host_files(binding(file), proofs=proofs) == ()
    assert proofs.read_bytes() == before

    # The same size and modification time, but other bytes: ctime cannot be set back.
    status = library.stat()
    library.write_bytes(b"evil" * 1000)
    os.utime(library, ns=(status.st_atime_ns, status.st_mtime_ns))
    (problem,) = check_host_files(binding(file), proofs=proofs)
    assert problem.value == str(Digest.of(b"evil" * 1000))
    assert proofs.read_bytes() != before


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"format":2}'])
def test_proofs_that_cannot_be_believed_are_made_again(damage: bytes, library: Path, tmp_path: Path) -> None:
    proofs = tmp_path / "proofs.json"
    proofs.write_bytes(damage)
    proofs.chmod(0o600)
    assert [file.path for file in host_files(mapped(library), proofs=proofs)] == [str(library)]
    assert proofs.read_bytes().startswith(b'{"files":[')


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_in_the_place_of_the_proofs_refuses_nothing(library: Path, tmp_path: Path, full: bool) -> None:
    """One with nothing in it goes; what somebody put into one stays, and files are hashed again each time."""
    proofs = tmp_path / "proofs.json"
    (proofs / "of-somebody" if full else proofs).mkdir(parents=True)
    (file,) = host_files(mapped(library), proofs=proofs)
    assert check_host_files(binding(file), proofs=proofs) == ()
    assert proofs.is_dir() == full


def test_proofs_that_others_may_write_are_not_believed(library: Path, tmp_path: Path) -> None:
    proofs = tmp_path / "proofs.json"
    host_files(mapped(library), proofs=proofs)
    proofs.write_bytes(proofs.read_bytes().replace(Digest.of(b"code" * 1000).hex.encode(), b"0" * 64))
    (file,) = host_files(mapped(library), proofs=proofs)
    assert file.sha256 == Digest.from_hex("0" * 64)  # ours alone: believed
    proofs.chmod(0o646)
    (file,) = host_files(mapped(library), proofs=proofs)
    assert file.sha256 == Digest.of(b"code" * 1000)


def test_a_file_that_is_shared_for_writing_has_no_digest(library: Path) -> None:
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0:4] = b"more"
        (found,) = host_files(mapped(library, perms="rw-s"))
    assert found.sha256 is None  # a shared writable mapping: its content is nobody's promise


def test_what_cannot_be_read_is_a_host_error(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if path == str(library):
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(HostError, match=r"lib\.so"):
        host_files(mapped(library))
    problems = check_host_files(binding(HostFile(path=str(library), bytes=4000, sha256=Digest.of(b"x"))))
    assert len(problems) == 1
    assert "lib.so" in problems[0].message
