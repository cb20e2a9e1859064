"""Headers of safetensors files: what is read, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.canonical import canonical_sha256
from coldsnap.core.digest import Digest
from coldsnap.engines.safetensors import metadata_sha256, read_header
from coldsnap.errors import ColdsnapError, InvalidDocument, UserError
from coldsnap.testing.checkpoint import write_safetensors


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_tensors_come_in_file_order_with_absolute_offsets(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("BF16", [2, 3], 4, 16),
        "a": entry("F32", [], 0, 4),
        "e": entry("U8", [0], 16, 16),
    }
    text = json.dumps(header).encode()
    found = read_header(write(tmp_path / "m.safetensors", header, bytes(16)))
    start = 8 + len(text)
    assert [(t.name, t.dtype, t.shape, t.offset, t.size) for t in found.tensors] == [
        ("a", "F32", (), start, 4),
        ("b", "BF16", (2, 3), start + 4, 12),
        ("e", "U8", (0,), start + 16, 0),
    ]
    assert (found.name, found.bytes) == ("m.safetensors", start + 16)
    assert found.header_sha256 == Digest.of(text)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (entry("F32", [2], 0, 7), "holds 7 bytes, its shape and dtype need 8"),
        (entry("F32", [2], 8, 0), "holds -8 bytes"),
        (entry("F33", [2], 0, 8), "of known kinds"),
        (entry("F32", [-2], 0, 8), "of known kinds"),
        (entry("F32", [True], 0, 4), "of known kinds"),
        ({"dtype": "F32", "shape": [1]}, "of known kinds"),
        ([1], "of known kinds"),
        (entry("U8", [99], 0, 99), "of a file of"),
    ],
)
def test_a_wrong_tensor_is_named(tmp_path: Path, value: object, says: str) -> None:
    path = write(tmp_path / "m.safetensors", {"good": entry("U8", [1], 0, 1), "bad": value}, bytes(8))
    with pytest.raises(InvalidDocument, match=says) as caught:
        read_header(path)
    assert "bad" in {problem.field for problem in caught.value.problems}


def test_two_tensors_may_not_share_bytes(tmp_path: Path) -> None:
    header = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 3, 7)}
    with pytest.raises(InvalidDocument, match="overlaps"):
        read_header(write(tmp_path / "m.safetensors", header, bytes(8)))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "does not fit"),
        (b"\1\0\0", "does not fit"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "does not fit"),
        ((2).to_bytes(8, "little") + b"{", "does not fit"),
        ((2).to_bytes(8, "little") + b"[]", "not an object"),
        ((2).to_bytes(8, "little") + b"{{", "not JSON"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(InvalidDocument, match=says):
        read_header(path)


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    row = json.dumps(entry("U8", [1], 0, 1))
    with pytest.raises(InvalidDocument, match="twice"):
        read_header(write(tmp_path / "m.safetensors", f'{{"a":{row},"a":{row}}}'.encode(), bytes(2)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.safetensors"):
        read_header(tmp_path / "gone.safetensors")


@given(damage=st.binary(min_size=1, max_size=40), at=st.integers(0, 120))
@settings(max_examples=100)
def test_no_damage_escapes_the_error_tree(tmp_path: Path, damage: bytes, at: int) -> None:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"a": bytes(16), "b": bytes(3)})
    data = bytearray(path.read_bytes())
    data[at : at + len(damage)] = damage
    path.write_bytes(data)
    try:
        found = read_header(path)
    except ColdsnapError:
        return
    assert all(tensor.offset + tensor.size <= len(data) for tensor in found.tensors)


def test_the_metadata_digest_is_of_the_sorted_header_digests(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_safetensors(tmp_path / f"{name}.safetensors", {name: b"xy"})
    files = [read_header(tmp_path / f"{name}.safetensors") for name in ("b", "a")]
    rows = [["a.safetensors", str(files[1].header_sha256)], ["b.safetensors", str(files[0].header_sha256)]]
    assert metadata_sha256(files) == canonical_sha256(rows)
