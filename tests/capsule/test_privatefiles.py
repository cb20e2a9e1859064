"""Files of a unit's private tmpfs on their way out and back: every byte and every hole."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from coldsnap.capsule.criu import Criu
from coldsnap.capsule.dump import dump
from coldsnap.capsule.dumped import read_dumped_unit
from coldsnap.capsule.privatefiles import load_private, save_private
from coldsnap.capsule.restore import restore
from coldsnap.testing.yard import PATIENCE_S, Yard

_KIB, _MIB = 1 << 10, 1 << 20

# A queue as vLLM makes them: large, mapped by two, of which little was ever written.
_QUEUE = f"""
import hashlib, json, mmap, os, socket, sys
descriptor = os.open("/dev/shm/queue", os.O_CREAT | os.O_RDWR, 0o640)
os.ftruncate(descriptor, {64 * _MIB})
queue = mmap.mmap(descriptor, {64 * _MIB})
for at, size in ((0, 100), ({20 * _MIB} + 5, 3 * {_MIB}), ({64 * _MIB} - 1, 1)):
    queue[at : at + size] = b"q" * size
requests, answers = os.pipe(), os.pipe()
if os.fork() == 0:
    while os.read(requests[0], 1):
        queue[{40 * _MIB}] += 1
        os.write(answers[1], b".")
server = socket.socket(socket.AF_UNIX)
server.bind("/run/coldsnap/control.sock")
server.listen()
os.close(os.open(sys.argv[1], os.O_WRONLY))
while True:
    client, _ = server.accept()
    with client, client.makefile("rw") as stream:
        if stream.readline() == "write\\n":
            os.write(requests[1], b".")
            os.read(answers[0], 1)
            stream.write(json.dumps(queue[{40 * _MIB}]) + "\\n")
        else:
            found = os.stat("/dev/shm/queue")
            digest = hashlib.sha256(os.pread(descriptor, {64 * _MIB}, 0)).hexdigest()
            stream.write(json.dumps([found.st_size, found.st_blocks, oct(found.st_mode), digest]) + "\\n")
"""


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of ``/run/coldsnap``, which is the only root here."""
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr("coldsnap.capsule.privatefiles.PRIVATE_ROOTS", {"run": str(run)})
    return run


def _save(images: Path) -> list[dict[str, Any]]:
    images.mkdir()
    descriptor = os.open(images, os.O_RDONLY)
    try:
        return save_private(descriptor)
    finally:
        os.close(descriptor)


def _load(entries: list[dict[str, Any]], images: Path) -> None:
    descriptor = os.open(images, os.O_RDONLY)
    try:
        load_private(entries, descriptor, skip=frozenset())
    finally:
        os.close(descriptor)


def _write(path: Path, size: int, *pieces: tuple[int, bytes]) -> None:
    with path.open("wb") as file:
        file.truncate(size)
        for at, data in pieces:
            file.seek(at)
            file.write(data)


def test_what_is_in_a_file_is_saved_and_its_holes_are_not(roots: Path, tmp_path: Path) -> None:
    _write(roots / "holes", 8 * _MIB + 10, (_MIB, b"a" * 4096), (_MIB + 128 * _KIB, b"b" * 8192), (8 * _MIB, b"end"))
    entries = _save(tmp_path / "images")
    assert [(one["path"], one["bytes"], one["pieces"], one["content"]) for one in entries] == [
        (
            "holes",
            8 * _MIB + 10,
            [(_MIB, 4096), (_MIB + 128 * _KIB, 8192), (8 * _MIB, 10)],
            "private-0.bin",
        )
    ]
    saved = (tmp_path / "images/private-0.bin").read_bytes()
    assert saved == b"a" * 4096 + b"b" * 8192 + b"end" + bytes(7)


def test_small_holes_are_saved_with_what_is_around_them(roots: Path, tmp_path: Path) -> None:
    _write(roots / "one", 64 * _KIB, *((at, b"x" * 4096) for at in range(0, 64 * _KIB, 8 * _KIB)))
    _write(roots / "two", 136 * _KIB, (0, b"x" * 4096), (68 * _KIB, b"y" * 4096), (132 * _KIB - 4096, b"z" * 4096))
    one, two = _save(tmp_path / "images")
    assert one["pieces"] == [(0, 60 * _KIB)]
    assert two["pieces"] == [(0, 4096), (68 * _KIB, 64 * _KIB)]


def test_a_file_of_nothing_but_holes_has_no_content(roots: Path, tmp_path: Path) -> None:
    _write(roots / "empty", 0)
    _write(roots / "hollow", _MIB)
    for entry in _save(tmp_path / "images"):
        assert (entry["pieces"], entry["content"]) == ([], None)
    assert list((tmp_path / "images").iterdir()) == []


def test_files_and_folders_come_back_as_they_were(roots: Path, tmp_path: Path) -> None:
    (roots / "inner").mkdir(mode=0o750)
    _write(roots / "inner/holes", 4 * _MIB, (0, b"a"), (2 * _MIB + 1, b"b" * _MIB))
    _write(roots / "inner/hollow", 2 * _MIB)
    _write(roots / "plain", 5, (0, b"plain"))
    (roots / "plain").chmod(0o640)
    before = {path.name: path.read_bytes() for path in roots.rglob("*") if path.is_file()}
    modes = {path.name: path.stat().st_mode for path in roots.rglob("*")}
    blocks = {path.name: path.stat().st_blocks for path in roots.rglob("*") if path.is_file()}
    entries = _save(tmp_path / "images")
    roots.rename(tmp_path / "old")
    roots.mkdir()
    _load(entries, tmp_path / "images")
    assert {path.name: path.read_bytes() for path in roots.rglob("*") if path.is_file()} == before
    assert {path.name: path.stat().st_mode for path in roots.rglob("*")} == modes
    assert (roots / "inner/hollow").stat().st_blocks == 0
    assert (roots / "inner/holes").stat().st_blocks <= blocks["holes"] + 64 * _KIB // 512


def test_content_that_ends_early_is_an_error(roots: Path, tmp_path: Path) -> None:
    _write(roots / "plain", 5000, (0, b"x" * 5000))
    entries = _save(tmp_path / "images")
    os.truncate(tmp_path / "images/private-0.bin", 4999)
    (roots / "plain").unlink()
    with pytest.raises(OSError, match="ends too early"):
        _load(entries, tmp_path / "images")


@pytest.mark.criu
def test_shared_memory_of_which_little_was_written_takes_little(yard: Yard, criu: Criu) -> None:
    program = yard.folder / "queue.py"
    program.write_text(_QUEUE)
    command = (sys.executable, "-I", "-S", str(program), str(yard.folder / "u0.fifo"))
    unit = yard.launch(command=command, files={})
    before = yard.ask(unit)
    data = bytearray(64 * _MIB)
    for at, size in ((0, 100), (20 * _MIB + 5, 3 * _MIB), (64 * _MIB - 1, 1)):
        data[at : at + size] = b"q" * size
    assert before[0] == len(data)
    assert before[3] == hashlib.sha256(data).hexdigest()
    dump(unit, yard.folder / "images", criu=criu, deadline_s=PATIENCE_S)
    (entry,) = [one for one in read_dumped_unit(yard.folder / "images").private if one.path == "queue"]
    assert entry.bytes == len(data)
    assert entry.saved_bytes < 4 * _MIB
    back = yard.keep(restore(yard.spec("back"), yard.folder / "images", criu=criu, deadline_s=PATIENCE_S))
    assert yard.ask(back) == before
    assert yard.ask(back, "write") == 1, "its child has the same memory still"
