"""Memory that images hold in several places is searched as the process has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.capsule.criuimages import PageMap, PageRun, pagemap_image
from coldsnap.capsule.dumped import DumpedUnit, ImageFile, MovedMemory, list_images, write_dumped_unit
from coldsnap.capsule.seams import AROUND_BYTES, Segment, cuts, memory_seams
from coldsnap.capsule.secrets import scan_secrets
from coldsnap.errors import IntegrityError

_P = 4096
_TOKEN = b"hf_" + b"aB3dE5gH7jK9mN1pQ3sT5vX7zA2cD4fG6h"


def _segment(address: int, size: int, name: str, offset: int) -> Segment:
    return Segment(address=address, size=size, name=name, offset=offset)


def test_only_what_lies_together_and_stands_apart_is_a_cut() -> None:
    whole = [_segment(0, 8, "a", 0), _segment(8, 8, "a", 8), _segment(20, 4, "a", 16)]
    assert list(cuts(whole)) == []
    assert list(cuts([_segment(0, 8, "a", 0), _segment(8, 8, "a", 16)])) == [[("a", 0, 8), ("a", 16, 8)]]
    assert list(cuts([_segment(8, 8, "b", 8), _segment(0, 8, "a", 0)])) == [[("a", 0, 8), ("b", 8, 8)]]


def test_a_cut_is_seen_from_as_far_as_needed_and_over_small_pieces() -> None:
    far = 3 * AROUND_BYTES
    segments = [
        _segment(0, far, "a", 0),
        _segment(far, 10, "b", 0),
        _segment(far + 10, far, "a", far),
        _segment(2 * far + 11, 10, "b", 10),
    ]
    first, second = cuts(segments)
    assert first == [("a", far - AROUND_BYTES, AROUND_BYTES), ("b", 0, 10), ("a", far, AROUND_BYTES - 10)]
    assert second == [("a", far - AROUND_BYTES + 10, AROUND_BYTES - 10), ("b", 0, 10), ("a", far, AROUND_BYTES)]


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.booleans()), min_size=1, max_size=10), st.data())
def test_whatever_lies_across_a_cut_can_be_read(shapes: list[tuple[int, bool, bool]], data: st.DataObject) -> None:
    memory = bytes(range(1, 256)) * (sum(size for size, _, _ in shapes) * 40 // 255 + 1)
    files = {"a": bytearray(), "b": bytearray()}
    segments, at = [], 0
    for size, other, junk in shapes:
        name = "b" if other else "a"
        files[name] += b"\0" * (7 if junk else 0)
        segments.append(_segment(at, size * 40, name, len(files[name])))
        files[name] += memory[at : at + size * 40]
        at += size * 40
    text = b"\0".join(b"".join(bytes(files[name][o : o + n]) for name, o, n in cut) for cut in cuts(segments))
    start = data.draw(st.integers(0, at - 1))
    wanted = memory[start : min(at, start + 12)]
    assert any(wanted in where for where in (text, bytes(files["a"]), bytes(files["b"])))


def _folder(path: Path, memory: dict[int, bytes], moved: list[int]) -> Path:
    """Images of a process with these pages, of which some are moved, in this order."""
    path.mkdir()
    staying = [address for address in sorted(memory) if address not in moved]
    runs = tuple(PageRun(address=address, num_pages=1, flags=4) for address in staying)
    (path / "pagemap-7.img").write_bytes(pagemap_image(PageMap(pages_id=1, runs=runs)))
    (path / "pages-1.img").write_bytes(b"".join(memory[address] for address in staying))
    (path / "runs-7.bin").write_bytes(b"".join(memory[address] for address in moved))
    one = MovedMemory(pid=7, pieces=tuple((address, _P) for address in moved), sha256=("0" * 64,))
    files = tuple(ImageFile(name=file.name, bytes=file.bytes) for file in list_images(path))
    dumped = DumpedUnit(unit="u0", root_pid=7, log_pipe=9, criu_version="4.2.1", files=files, memory=(one,))
    write_dumped_unit(path, dumped)
    return path


def test_a_secret_across_two_files_is_found(tmp_path: Path) -> None:
    memory = {0x1000 * number: bytes(_P) for number in range(1, 6)}
    text = bytes(_P - 20) + _TOKEN + bytes(_P)
    memory[0x2000], memory[0x3000] = text[:_P], text[_P : 2 * _P]
    for name, moved in {"reversed": [0x3000, 0x2000], "one": [0x3000, 0x5000], "other": [0x1000, 0x2000]}.items():
        images = _folder(tmp_path / name, memory, moved)
        assert all(_TOKEN not in path.read_bytes() for path in images.iterdir())
        assert _TOKEN in memory_seams(images)
        report = scan_secrets(images, [])
        assert [finding.kind for finding in report.findings] == ["secret"]
        assert "memory across files at byte" in report.findings[0].message
        assert [problem.field for problem in report.stop_problems()] == [report.findings[0].subject]
    images = _folder(tmp_path / "together", memory, [0x2000, 0x3000])
    assert "runs-7.bin at byte" in scan_secrets(images, []).findings[0].message


def test_a_damaged_pagemap_is_told(tmp_path: Path) -> None:
    images = _folder(tmp_path / "images", {0x1000: bytes(_P), 0x2000: bytes(_P)}, [0x2000])
    path = images / "pagemap-7.img"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(IntegrityError, match=r"pagemap-7\.img is damaged"):
        memory_seams(images)


def test_images_of_which_nothing_was_moved_have_no_cuts(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(_TOKEN)
    assert memory_seams(tmp_path) == b""
