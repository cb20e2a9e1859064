"""The quick way to read a manifest gives what the careful one gives, or leaves the document to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core import manifest_fields, rows
from coldsnap.core.manifest import parse_native_manifest, parse_recovery_manifest
from coldsnap.errors import InvalidDocument
from coldsnap.testing.synthetic import SyntheticSpec, worker_manifests

MADE = worker_manifests(SyntheticSpec(num_extents=120), "w0")
PARSERS: tuple[tuple[bytes, Callable[[bytes], Any]], ...] = (
    (MADE.native, parse_native_manifest),
    (MADE.recovery, parse_recovery_manifest),
)


def outcome(parse: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return parse(data)
    except InvalidDocument as error:
        return [str(problem) for problem in error.problems]


def carefully(monkeypatch: pytest.MonkeyPatch, parse: Callable[[bytes], Any], data: bytes) -> Any:
    """The outcome when the fast JSON reader is not there."""

    def no_reader(*_: Any, **__: Any) -> Any:
        raise ValueError("no fast reader")

    with monkeypatch.context() as patch:
        patch.setattr(manifest_fields, "from_json", no_reader)
        return outcome(parse, data)


def careful_runs(monkeypatch: pytest.MonkeyPatch, parse: Callable[[bytes], Any], data: bytes) -> int:
    """How often the careful reader is asked."""
    asked: list[int] = []
    load = rows.load

    def counted(data: bytes, *, limit_bytes: int) -> Any:
        asked.append(len(data))
        return load(data, limit_bytes=limit_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(rows, "load", counted)
        outcome(parse, data)
    return len(asked)


@pytest.mark.parametrize(("data", "parse"), PARSERS)
def test_a_manifest_as_written_here_needs_no_careful_reader(
    monkeypatch: pytest.MonkeyPatch, data: bytes, parse: Callable[[bytes], Any]
) -> None:
    assert careful_runs(monkeypatch, parse, data) == 0
    assert outcome(parse, data) == carefully(monkeypatch, parse, data)
    assert outcome(parse, data).worker == "w0"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"tag":"weights"', '"tag":":weights"'),
        lambda text: text.replace('"tag":"weights"', '"tag":"all weights"'),
        lambda text: text.replace('"tag":"weights"', '"tag":"\\u0077eights"'),
        lambda text: text.replace(",", ", "),
        lambda text: json.dumps(json.loads(text), indent=1),
        lambda text: text + "\n\n",
        lambda text: text.rstrip("\n"),
    ],
)
@pytest.mark.parametrize(("data", "parse"), PARSERS)
def test_another_spelling_is_read_all_the_same(
    monkeypatch: pytest.MonkeyPatch, data: bytes, parse: Callable[[bytes], Any], change: Callable[[str], str]
) -> None:
    changed = change(data.decode()).encode()
    assert changed != data
    found = outcome(parse, changed)
    assert not isinstance(found, list)
    assert found == carefully(monkeypatch, parse, changed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"capture_id":', '"capture_id":"x","capture_id":'),
        ('"size":', '"size":1,"size":'),
        ('"crc32":', '"crc32":1e999,"crc32":'),
        ('"rank":0', '"rank":1e999'),
        ('"rank":0', '"rank":NaN'),
        ('"rank":0', '"rank":00'),
        ('"rank":0', '"rank":0.0'),
        ('"tag":"weights"', '"tag":"a","tag":":"'),
        ('"tag":"weights"', '"tag":"\\ud800"'),
        ('"tag":"weights"', '"tag":"a\tb"'),
        ('"format":1', '"format":1,"more":[[[]]]'),
    ],
)
@pytest.mark.parametrize(("data", "parse"), PARSERS)
def test_what_is_wrong_is_said_as_the_careful_reader_says_it(
    monkeypatch: pytest.MonkeyPatch, data: bytes, parse: Callable[[bytes], Any], old: str, new: str
) -> None:
    assert old.encode() in data
    damaged = data.replace(old.encode(), new.encode(), 1)
    found = outcome(parse, damaged)
    assert isinstance(found, list)
    assert found == carefully(monkeypatch, parse, damaged)


@settings(max_examples=60, deadline=None)
@given(
    which=st.sampled_from([0, 1]),
    place=st.floats(0, 1, exclude_max=True),
    length=st.integers(0, 30),
    new=st.sampled_from(
        [b"", b'"', b":", b",", b"{", b"}", b"0", b"1", b"a", b" ", b"\\", b'"size":7,', b"\xff", b"\n"]
    ),
)
def test_any_damage_has_one_outcome(which: int, place: float, length: int, new: bytes) -> None:
    data, parse = PARSERS[which]
    start = int(place * len(data))
    damaged = data[:start] + new + data[start + length :]
    with pytest.MonkeyPatch.context() as patch:
        assert outcome(parse, damaged) == carefully(patch, parse, damaged)
