"""Whole documents: golden files that must be read and written back the same, damaged ones that must be refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.artifact import artifact_bytes, artifact_digest, parse_artifact
from coldsnap.core.overlay import overlay_bytes, parse_overlay
from coldsnap.core.receipt import parse_receipt, receipt_bytes
from coldsnap.core.request import parse_request, request_bytes
from coldsnap.core.timing import parse_timing, timing_bytes
from coldsnap.errors import InvalidDocument

DATA = Path(__file__).parent / "data"
PARSERS: dict[str, Callable[[bytes], Any]] = {
    "request": parse_request,
    "artifact": parse_artifact,
    "receipt": parse_receipt,
    "timing": parse_timing,
    "overlay": parse_overlay,
}
WRITERS: dict[str, Callable[[Any], bytes]] = {
    "request": request_bytes,
    "artifact": artifact_bytes,
    "receipt": receipt_bytes,
    "timing": timing_bytes,
    "overlay": overlay_bytes,
}
EXPECTED: dict[str, list[str]] = json.loads((DATA / "damaged/expected.json").read_text())
GOLDEN = sorted(
    (kind, path) for kind in PARSERS for path in (DATA / f"{kind}s").glob("*.json") if "resolved" not in path.name
)


def test_every_damaged_file_is_expected_and_every_kind_has_golden_files() -> None:
    assert {path.name for path in (DATA / "damaged").iterdir()} == {*EXPECTED, "expected.json"}
    assert {kind for kind, _ in GOLDEN} == set(PARSERS)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_damaged_document_reports_every_problem_in_order(name: str) -> None:
    data = (DATA / "damaged" / name).read_bytes()
    for _ in range(2):  # deterministic
        with pytest.raises(InvalidDocument) as caught:
            PARSERS[name.split(".")[0]](data)
        assert [problem.field for problem in caught.value.problems] == EXPECTED[name]
        assert all(problem.cure for problem in caught.value.problems)
        assert str(caught.value).isprintable() or "\n" in str(caught.value)
        assert str(caught.value).isascii()


@pytest.mark.parametrize(("kind", "path"), GOLDEN, ids=lambda value: getattr(value, "name", value))
def test_golden_document_is_read_and_written_back(kind: str, path: Path) -> None:
    record = PARSERS[kind](path.read_bytes())
    written = WRITERS[kind](record)
    assert PARSERS[kind](written) == record
    assert WRITERS[kind](PARSERS[kind](written)) == written
    assert written.endswith(b"\n")
    assert written.count(b"\n") == 1


@pytest.mark.parametrize("kind", ["artifact", "receipt", "timing", "overlay"])
def test_canonical_golden_files_are_written_back_byte_for_byte(kind: str) -> None:
    for path in (DATA / f"{kind}s").glob("*.json"):
        assert WRITERS[kind](PARSERS[kind](path.read_bytes())) == path.read_bytes()


def test_an_artifacts_digest_is_that_of_its_file() -> None:
    for path in (DATA / "artifacts").glob("*.json"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert artifact_digest(parse_artifact(path.read_bytes())).hex == digest


def must_parse_or_refuse(parse: Callable[[bytes], Any], data: bytes) -> None:
    refusal: InvalidDocument | None = None
    try:
        parse(data)
    except InvalidDocument as error:
        refusal = error
    if refusal is not None:
        assert refusal.problems
        assert str(refusal).startswith(refusal.subject)


@pytest.mark.parametrize("kind", sorted(PARSERS))
@settings(max_examples=60)
@given(data=st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_arbitrary_bytes_are_refused_and_nothing_else(kind: str, data: bytes) -> None:
    with pytest.raises(InvalidDocument) as caught:
        PARSERS[kind](data)
    assert caught.value.problems


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=10**30, max_value=10**60)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["", "auto", "w0", "u0", "host", "sha256:" + "0" * 64, "/", "..", "a:world", "2026-11-29T14:37:00Z"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def places(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here]
    if isinstance(tree, dict):
        for key, value in tree.items():
            found.extend(places(value, (*here, key)))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            found.extend(places(value, (*here, index)))
    return found


def changed(tree: Any, place: tuple[Any, ...], action: str, value: Any) -> Any:
    if not place:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    key, rest = place[0], place[1:]
    if rest or action == "replace":
        copy[key] = changed(tree[key], rest, action, value)
    elif action == "remove":
        del copy[key]
    elif isinstance(copy, list):
        copy.insert(key, tree[key])
    else:
        copy["extra"] = value
    return copy


@pytest.mark.parametrize("kind", sorted(PARSERS))
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_mutated_golden_documents_parse_or_are_refused(kind: str, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([path for other, path in GOLDEN if other == kind]))
    tree = json.loads(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.sampled_from(places(tree)))
        tree = changed(tree, place, data.draw(st.sampled_from(["replace", "remove", "add"])), data.draw(junk))
    must_parse_or_refuse(PARSERS[kind], json.dumps(tree).encode())


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_golden_documents_with_damaged_bytes_parse_or_are_refused(data: st.DataObject) -> None:
    kind, path = data.draw(st.sampled_from(GOLDEN))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    must_parse_or_refuse(PARSERS[kind], bytes(raw))
