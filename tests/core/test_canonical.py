"""Canonical JSON against vectors written by hand from its rules, and against any value at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core.canonical import MAX_DEPTH, canonical_json, canonical_sha256
from coldsnap.errors import InvalidDocument

VECTORS = json.loads((Path(__file__).parent / "data/canonical/vectors.json").read_text(encoding="utf-8"))

text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=20
)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["why"])
def test_vector(vector: dict[str, str]) -> None:
    expected = vector["canonical"].encode("ascii")
    assert canonical_json(json.loads(vector["json"])) == expected
    assert str(canonical_sha256(json.loads(vector["json"]))) == "sha256:" + hashlib.sha256(expected).hexdigest()


def test_a_vector_is_its_own_canonical_form() -> None:
    for vector in VECTORS:
        assert canonical_json(json.loads(vector["canonical"])) == vector["canonical"].encode("ascii")


@settings(max_examples=100)
@given(values)
def test_reading_back_gives_the_same_value_and_the_same_bytes(value: Any) -> None:
    data = canonical_json(value)
    again = json.loads(data)
    assert again == value
    assert canonical_json(again) == data
    assert all(0x20 <= byte <= 0x7E for byte in data)


@settings(max_examples=100)
@given(st.dictionaries(text, scalars, min_size=2))
def test_key_order_does_not_matter(value: dict[str, Any]) -> None:
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


def test_tuples_are_lists_and_text_subclasses_are_text() -> None:
    class Word(str):
        __slots__ = ()

    assert canonical_json({"a": (1, (2,)), "b": Word("x")}) == b'{"a":[1,[2]],"b":"x"}'


def fields(value: object) -> list[str]:
    with pytest.raises(InvalidDocument) as caught:
        canonical_json(value)
    assert all(problem.cure for problem in caught.value.problems)
    return [problem.field for problem in caught.value.problems]


def test_everything_without_a_canonical_form_is_named() -> None:
    refused = {
        "nan": float("nan"),
        "deep": {"list": [0, float("inf"), -float("inf")]},
        "half": "a\ud800",
        "half\udfff": 1,
        "bytes": b"x",
        "set": {1},
        "number": 10**4301,
        "keys": {1: "a", None: "b", "ok": float("nan")},
    }
    assert sorted(fields(refused)) == sorted(
        [
            "nan",
            "deep.list[1]",
            "deep.list[2]",
            "half",
            '["half\\udfff"]',
            "bytes",
            "set",
            "number",
            "keys",
            "keys",
            "keys.ok",
        ]
    )


def test_a_key_that_is_no_text_is_refused_although_json_would_write_it() -> None:
    assert fields({"a": [{1: 2}]}) == ["a[0]"]
    assert fields([{True: 2}]) == ["[0]"]


def test_scalars_alone_are_named_as_the_document() -> None:
    assert fields(float("nan")) == ["(document)"]
    assert fields("\udc00") == ["(document)"]
    assert fields(object()) == ["(document)"]


def nested(depth: int) -> Any:
    value: Any = []
    for level in range(depth - 1):
        value = [value] if level % 2 else {"a": value}
    return value


def test_nesting_has_a_limit_and_never_recurses() -> None:
    assert json.loads(canonical_json(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    assert len(fields(nested(MAX_DEPTH + 1))) == 1
    assert len(fields(nested(100_000))) == 1
    circle: list[Any] = []
    circle.append(circle)
    assert len(fields(circle)) == 1


def test_a_whole_pair_of_surrogates_is_a_character() -> None:
    assert canonical_json("\U0001f600") == b'"\\ud83d\\ude00"'
    assert canonical_json("\\ud800") == b'"\\\\ud800"'
