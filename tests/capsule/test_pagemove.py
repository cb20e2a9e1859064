"""Moving memory out of images, on images made here: what is judged, and that what is not understood stays whole."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from coldsnap.capsule.criuimages import PAGE_BYTES, PageMap, PageRun, pagemap_image, read_pagemap
from coldsnap.capsule.dumped import PROVED_BYTES
from coldsnap.capsule.pagemove import move_pages
from coldsnap.capsule.pageruns import RUN_BYTES, ZERO_BYTES

_P = PAGE_BYTES
_MIB = 1 << 20
_BASE = 0x7F00_0000_0000


def _varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _record(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _image(magic: int, *records: bytes) -> bytes:
    framed = b"".join(struct.pack("<I", len(record)) + record for record in records)
    return struct.pack("<II", 0x54564319, magic) + framed


@dataclass
class _Process:
    """A process with one large mapping of present pages, unless told otherwise."""

    pid: int
    memory: bytes
    parent: int = 0
    status: int = 0x201
    sequence: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)

    def write(self, folder: Path, pages_id: int) -> None:
        runs = self.runs or [(_BASE, len(self.memory))]
        pagemap = PageMap(
            pages_id=pages_id,
            runs=tuple(PageRun(address=address, num_pages=size // _P, flags=4) for address, size in runs),
        )
        (folder / f"pagemap-{self.pid}.img").write_bytes(pagemap_image(pagemap))
        (folder / f"pages-{pages_id}.img").write_bytes(self.memory)
        numbers = {1: _BASE, 2: _BASE + 64 * _MIB, 3: 0, 4: 0, 5: 3, 6: 0x22, 7: self.status}
        mapping = b"".join(_number(number, value) for number, value in numbers.items())
        (folder / f"mm-{self.pid}.img").write_bytes(_image(0x57492820, _number(1, 0) + _record(14, mapping)))
        sequence = _record(15, _number(1, self.sequence) + _number(2, 32) + _number(3, 0)) if self.sequence else b""
        thread = _record(5, _number(1, 0) + sequence)
        core = _image(0x55053847, _number(1, 1) + _record(3, _number(1, 1)) + thread)
        (folder / f"core-{self.pid}.img").write_bytes(core)


def _write(folder: Path, *processes: _Process) -> None:
    tree = [_number(1, one.pid) + _number(2, one.parent) for one in processes]
    (folder / "pstree.img").write_bytes(_image(0x50273030, *tree))
    for pages_id, one in enumerate(processes, start=1):
        one.write(folder, pages_id)


def _noise(size: int, seed: int) -> bytes:
    data = bytearray(hashlib.shake_128(bytes([seed])).digest(size))
    for at in range(0, size, _P):  # no two pages are equal
        data[at : at + 4] = (at // _P << 8 | seed).to_bytes(4, "little")
    return bytes(data)


def _staying(folder: Path, pid: int) -> dict[int, bytes]:
    pagemap = read_pagemap((folder / f"pagemap-{pid}.img").read_bytes())
    with (folder / f"pages-{pagemap.pages_id}.img").open("rb") as file:
        return {run.address + at: file.read(_P) for run in pagemap.runs for at in range(0, run.size, _P)}


def test_a_large_run_goes_and_its_digests_are_right(tmp_path: Path) -> None:
    memory = _noise(PROVED_BYTES + 3 * _P, 1)
    _write(tmp_path, _Process(pid=5, memory=memory))
    moved = move_pages(tmp_path)
    assert moved.left == {}
    assert [(one.pid, one.pieces) for one in moved.memory] == [(5, ((_BASE, len(memory)),))]
    assert (tmp_path / "runs-5.bin").read_bytes() == memory
    digests = tuple(hashlib.sha256(part).hexdigest() for part in (memory[:PROVED_BYTES], memory[PROVED_BYTES:]))
    assert moved.memory[0].sha256 == digests
    assert (tmp_path / "pages-1.img").read_bytes() == b""
    assert _staying(tmp_path, 5) == {}
    assert not list(tmp_path.glob("*.new"))


def test_small_runs_stay_and_nothing_is_rewritten(tmp_path: Path) -> None:
    size = RUN_BYTES - _P
    _write(tmp_path, _Process(pid=5, memory=_noise(2 * size, 1), runs=[(_BASE, size), (_BASE + size + _P, size)]))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert move_pages(tmp_path).memory == ()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_zeros_go_even_where_nothing_else_does(tmp_path: Path) -> None:
    memory = _noise(_P, 1) + bytes(2 * ZERO_BYTES) + _noise(_P, 2)
    _write(tmp_path, _Process(pid=5, memory=memory, runs=[(_BASE + ZERO_BYTES - _P, len(memory))]))
    assert move_pages(tmp_path).memory == ()
    assert not (tmp_path / "runs-5.bin").exists()
    assert _staying(tmp_path, 5) == {
        _BASE + ZERO_BYTES - _P: memory[:_P],
        _BASE + 3 * ZERO_BYTES: memory[-_P:],
    }


def test_zeros_of_a_mapped_file_are_pages_like_any_other(tmp_path: Path) -> None:
    memory = _noise(_MIB, 1) + bytes(_MIB)
    _write(tmp_path, _Process(pid=5, memory=memory, status=0x41))
    assert move_pages(tmp_path).memory[0].bytes == len(memory)
    assert (tmp_path / "runs-5.bin").read_bytes() == memory


def test_the_page_of_a_restartable_sequence_stays(tmp_path: Path) -> None:
    memory = _noise(_MIB, 1)
    _write(tmp_path, _Process(pid=5, memory=memory, sequence=_BASE + 100 * _P + 64))
    assert move_pages(tmp_path).memory[0].bytes == _MIB - _P
    assert _staying(tmp_path, 5) == {_BASE + 100 * _P: memory[100 * _P : 101 * _P]}


def test_what_a_child_has_of_its_parent_goes_from_both(tmp_path: Path) -> None:
    ours = _noise(2 * _MIB, 1)
    theirs = ours[:_MIB] + bytes(_MIB)
    _write(tmp_path, _Process(pid=5, memory=ours), _Process(pid=6, memory=theirs, parent=5))
    moved = {one.pid: one.pieces for one in move_pages(tmp_path).memory}
    assert moved == {5: ((_BASE, 2 * _MIB),), 6: ((_BASE, _MIB),)}
    assert (tmp_path / "runs-5.bin").read_bytes() == ours
    assert (tmp_path / "runs-6.bin").read_bytes() == ours[:_MIB]
    assert _staying(tmp_path, 5) == _staying(tmp_path, 6) == {}


def _without_tree(folder: Path) -> None:
    (folder / "pstree.img").write_bytes(b"no tree")


def _without_mappings(folder: Path) -> None:
    (folder / "mm-5.img").unlink()


def _with_strange_mappings(folder: Path) -> None:
    (folder / "mm-5.img").write_bytes(b"strange")


def _with_strange_pagemap(folder: Path) -> None:
    path = folder / "pagemap-5.img"
    path.write_bytes(path.read_bytes() + b"\1")


def _with_a_page_more(folder: Path) -> None:
    path = folder / "pages-1.img"
    path.write_bytes(path.read_bytes() + bytes(_P))


@pytest.mark.parametrize(
    ("harm", "left"),
    [
        (_without_tree, {0: "does not begin"}),
        (_without_mappings, {5: "there is no"}),
        (_with_strange_mappings, {5: "does not begin"}),
        (_with_strange_pagemap, {5: "ends after the file"}),
        (_with_a_page_more, {5: "has not the"}),
    ],
)
def test_what_is_not_understood_stays_as_it_is(
    tmp_path: Path, harm: Callable[[Path], None], left: dict[int, str]
) -> None:
    _write(tmp_path, _Process(pid=5, memory=_noise(_MIB, 1)))
    harm(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    moved = move_pages(tmp_path)
    assert moved.memory == ()
    assert {pid: part in moved.left[pid] for pid, part in left.items()} == dict.fromkeys(left, True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_it_can_be_stopped_at_any_moment(tmp_path: Path) -> None:
    _write(tmp_path, _Process(pid=5, memory=_noise(2 * PROVED_BYTES, 1)))
    turns = iter(range(3))

    def pace() -> None:
        if next(turns, None) is None:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        move_pages(tmp_path, pace=pace)
