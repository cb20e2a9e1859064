"""Reading documents: every problem at once, in document order, and never another kind of error."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from coldsnap.core.canonical import MAX_PROBLEMS, canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.names import Choice, EnvironmentName, Id, Index, Items, SomeItems
from coldsnap.core.parsing import (
    Record,
    Unparsed,
    at,
    check_document,
    head_problems,
    parse_document,
    parsed,
    plain_document,
    rule,
)
from coldsnap.core.paths import Positions, join, path_of, show, split
from coldsnap.errors import InvalidDocument, Problem

LIMIT = 1_000_000


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Part(Record):
    id: Id
    index: Index
    environment: Mapping[EnvironmentName, str] = Field(default_factory=dict)
    colour: Choice[Colour] = Colour.RED
    schema_: Id = Field(default="x", alias="schema")

    @rule
    def _not_reserved(self) -> Iterator[Problem]:
        if self.id == "reserved":
            yield Problem(field="id", message="is reserved")


class Whole(Record):
    format: Literal[1] = 1
    parts: SomeItems[Part]
    named: Mapping[str, Part] = Field(default_factory=dict)
    ratio: float = 1.0
    exact: bool = False
    digest: Digest | None = None
    spare: Part | None = None
    tags: Items[Id] = ()
    anything: Any = None

    @rule
    def _ids_once(self) -> Iterator[Problem]:
        seen: set[str] = set()
        for index, part in parsed(self.parts, "id"):
            if part.id in seen:
                yield Problem(field=f"parts[{index}].id", message="stands twice")
            seen.add(part.id)

    @rule
    def _index_is_position(self) -> Iterator[Problem]:
        for position, part in parsed(self.parts, "index"):
            if part.index != position:
                yield Problem(field=f"parts[{position}].index", message="is not its position")

    @rule
    def _exact_has_ratio_one(self) -> Iterator[Problem]:
        if self.exact and self.ratio != 1.0:
            yield Problem(field="ratio", message="must be 1.0 when exact")


def read(data: bytes | str | Mapping[str, Any]) -> Whole:
    raw = json.dumps(data).encode() if isinstance(data, Mapping) else data.encode() if isinstance(data, str) else data
    return parse_document(Whole, raw, subject="whole", limit_bytes=LIMIT)


def problems(data: bytes | str | Mapping[str, Any]) -> tuple[Problem, ...]:
    with pytest.raises(InvalidDocument) as caught:
        read(data)
    assert caught.value.subject == "whole"
    return caught.value.problems


def fields(data: bytes | str | Mapping[str, Any]) -> list[str]:
    return [problem.field for problem in problems(data)]


GOOD: dict[str, Any] = {"parts": [{"id": "a", "index": 0}, {"id": "b", "index": 1, "colour": "blue", "schema": "y"}]}


def test_a_good_document_becomes_a_frozen_record() -> None:
    whole = read({**GOOD, "ratio": 2, "digest": "sha256:" + "0" * 64, "tags": ["t"]})
    assert whole.parts[1] == Part(id="b", index=1, colour=Colour.BLUE, schema="y")
    assert whole.parts[1].colour is Colour.BLUE
    assert whole.tags == ("t",)
    assert whole.digest == Digest.from_hex("0" * 64)
    assert isinstance(whole.ratio, float)
    with pytest.raises(ValueError, match="frozen"):
        whole.ratio = 3.0  # type: ignore[misc] # that is the point


def test_shape_and_rules_are_reported_together_in_document_order() -> None:
    document = {
        "exact": True,
        "parts": [
            {"index": "0", "id": "a", "environment": {"1": "x", "OK": 5}},
            {"index": 7, "id": "a", "idx": 1},
            5,
            {"index": 9, "colour": "green"},
            {"id": "reserved", "index": 4},
        ],
        "ratio": 2.0,
        "unknown": {},
    }
    assert fields(document) == [
        "parts[0].index",
        'parts[0].environment["1"]',
        "parts[0].environment.OK",
        "parts[1].index",
        "parts[1].id",
        "parts[1].idx",
        "parts[2]",
        "parts[3].index",
        "parts[3].colour",
        "parts[3].id",
        "parts[4].id",
        "ratio",
        "unknown",
    ]


def test_a_rule_that_needs_what_failed_is_silent_and_the_others_run() -> None:
    assert fields({**GOOD, "exact": True, "ratio": "2"}) == ["ratio"]
    assert fields({**GOOD, "exact": "yes", "ratio": 2.0}) == ["exact"]
    assert fields({"parts": 5, "exact": True, "ratio": 2.0}) == ["parts", "ratio"]
    assert fields({"exact": True, "ratio": 2.0}) == ["ratio", "parts"]


def test_a_failed_optional_field_does_not_fall_back_to_its_default() -> None:
    assert fields({**GOOD, "exact": True, "ratio": []}) == ["ratio"]
    assert fields({**GOOD, "spare": 5, "digest": "sha256:x"}) == ["spare", "digest"]


def test_records_in_maps_and_optional_records_are_salvaged() -> None:
    bad = {"id": "reserved", "index": "x"}
    good = {"id": "reserved", "index": 0}
    assert fields({**GOOD, "named": {"a b": bad, "c": good}, "spare": bad}) == [
        'named["a b"].id',
        'named["a b"].index',
        "named.c.id",
        "spare.id",
        "spare.index",
    ]
    assert fields({**GOOD, "named": [], "spare": []}) == ["named", "spare"]


def test_a_newer_document_is_told_as_that_alone() -> None:
    """What it holds beside, and what it lacks, follows rules that are not known here."""
    (problem,) = problems({**GOOD, "format": 2, "later": True, "ratio": "x"})
    assert (problem.field, problem.message, problem.value) == ("format", "is newer than any known here", "2")
    assert problem.cure == "use a newer coldsnap; this one reads 1"


@pytest.mark.parametrize(
    ("field", "value", "cure"),
    [
        ("ratio", "1", "a number"),
        ("exact", 1, "true or false"),
        ("exact", None, "true or false"),
        ("digest", "sha256:" + "A" * 64, "64 lower-case hex digits"),
        ("digest", 5, "64 lower-case hex digits"),
        ("tags", {"a": 1}, "a list"),
        ("tags", ["-"], "letters, digits"),
        ("named", [], "an object"),
        ("format", 0, "use 1"),
        ("format", "1", "use 1"),
        ("parts", [], "at least one"),
    ],
)
def test_wrong_types_are_refused_strictly(field: str, value: object, cure: str) -> None:
    (problem,) = problems({**GOOD, field: value})
    assert problem.field.startswith(field)
    assert problem.value is not None
    assert problem.cure is not None
    assert cure in problem.cure


@pytest.mark.parametrize("value", [True, 1.0, "1", -1, None, [], 0.5])
def test_an_index_is_a_whole_number_and_nothing_like_one(value: object) -> None:
    assert fields({"parts": [{"id": "a", "index": value}]}) == ["parts[0].index"]


def test_bounds_are_in_the_cure() -> None:
    (problem,) = problems({"parts": [{"id": "a", "index": -1}]})
    assert str(problem) == "parts[0].index: is too small (got -1); write 0 or more"


def test_unknown_fields_suggest_near_names() -> None:
    found = {p.field: p.cure for p in problems({**GOOD, "rato": 1, "parts": [{"id": "a", "index": 0, "color": "red"}]})}
    assert found == {"rato": "did you mean 'ratio'?", "parts[0].color": "did you mean 'colour'?"}
    (far,) = problems({**GOOD, "zzzzzz": 1})
    assert far.cure == "remove it"
    (inside,) = problems({**GOOD, "named": {"k": {"id": "a", "index": 0, "indx": 1}}})
    assert (inside.field, inside.cure) == ("named.k.indx", "did you mean 'index'?")


def test_environment_values_are_never_shown() -> None:
    document = {"parts": [{"id": "a", "index": 0, "environment": {"TOKEN": ["hunter2"], "x y": "hunter2"}}]}
    text = "\n".join(map(str, problems(document)))
    assert "environment.TOKEN" in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"parts": [}', "not JSON"),
        (b"{} {}", "more text"),
        (b"\xff\xfe", "UTF-8 at byte 0"),
        (b'{"a": "\xc3"}', "UTF-8 at byte 7"),
        (b"\xed\xa0\x80", "UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"[" * 500_000, "too deep"),
        (b'{"a":' * 100_000, "too deep"),
        (b"nul", "not JSON"),
        (b"'a'", "not JSON"),
        (b'{"a": 01}', "not JSON"),
        (b'"\x01"', "not JSON"),
    ],
)
def test_bytes_that_are_no_json(data: bytes, words: str) -> None:
    (problem,) = problems(data)
    assert problem.field == "(document)"
    assert words in problem.message
    assert problem.cure


def test_a_document_has_a_size_limit_in_bytes() -> None:
    exact = b" " * (LIMIT - 2) + b"{}"
    assert fields(exact) == ["parts"]
    (problem,) = problems(exact + b" ")
    assert str(problem) == f"(document): is too large (got {LIMIT + 1} bytes); keep it within {LIMIT} bytes"


def test_doubled_keys_are_named_wherever_they_are() -> None:
    text = (
        '{"parts": [{"id": "a", "id": "b", "index": 0, "id": "c"}], "anything": {"x": {"y": 1, "y": 1}}, "parts": []}'
    )
    assert fields(text) == ["parts", "parts", "anything.x.y"]
    assert fields('{"parts": [{"id": "a", "id": 5, "index": 0}]}') == ["parts[0].id", "parts[0].id"]


def test_numbers_that_are_none_are_named() -> None:
    text = '{"parts": [{"id": "a", "index": 0}], "ratio": NaN, "anything": [Infinity, {"a": -Infinity}, 1e999, -1e999]}'
    assert fields(text) == ["ratio", "anything[0]", "anything[1].a", "anything[2]", "anything[3]"]


def test_integers_longer_than_python_converts_are_named() -> None:
    long, longer = "1" * 4301, "2" * 9000
    text = f'{{"parts": [{{"id": "a", "index": -{long}}}], "anything": [1, {longer}], "ratio": 1.5}}'
    found = problems(text)
    assert [(p.field, p.value) for p in found] == [("parts[0].index", "4301 digits"), ("anything[1]", "9000 digits")]
    exact = "1" * 4300
    assert read(f'{{"parts": [{{"id": "a", "index": 0}}], "anything": {exact}}}').anything == int(exact)


def test_half_surrogates_are_named_and_whole_pairs_are_text() -> None:
    part = '{"parts": [{"id": "a", "index": 0}], '
    assert fields(part + '"anything": ["\\ud800", "\\udc00x", {"\\ud83d": 1}]}') == [
        "anything[0]",
        "anything[1]",
        'anything[2]["\\ud83d"]',
    ]
    assert read(part + '"anything": "\\ud83d\\ude00"}').anything == "\U0001f600"
    assert read(part + '"anything": "\\\\ud800"}').anything == "\\ud800"


def test_depth_is_named_where_it_becomes_too_much() -> None:
    def text(depth: int) -> str:
        return '{"parts": [{"id": "a", "index": 0}], "anything": ' + "[" * depth + "]" * depth + "}"

    assert read(text(99)).anything is not None
    assert fields(text(100)) == ["anything" + "[0]" * 99]


def test_problems_of_the_text_do_not_hide_those_of_the_rules() -> None:
    text = '{"parts": [{"id": "a", "index": 5, "index": 5}, {"id": "a", "index": 1}], "anything": NaN, "spare": 7}'
    assert fields(text) == ["parts[0].index", "parts[0].index", "parts[1].id", "anything", "spare"]


def test_a_stand_in_is_not_judged() -> None:
    assert fields('{"parts": [{"id": "\\ud800", "index": 1e999}], "exact": true, "ratio": NaN}') == [
        "parts[0].id",
        "parts[0].index",
        "ratio",
    ]


def test_a_list_that_is_too_long_is_one_problem() -> None:
    assert fields({**GOOD, "tags": [5] * 65537}) == ["tags"]


def test_a_flood_of_problems_ends_soon_and_says_so() -> None:
    found = problems(json.dumps({**GOOD, **{f"field-{n}": n for n in range(20_000)}}))
    assert len(found) == MAX_PROBLEMS + 1
    assert found[0].field == "field-0"
    assert found[MAX_PROBLEMS - 1].field == f"field-{MAX_PROBLEMS - 1}"
    assert str(MAX_PROBLEMS) in found[-1].message
    found = problems('{"parts": 5, "anything": [' + ", ".join(["NaN"] * 20_000) + "]}")
    assert len(found) == MAX_PROBLEMS + 1
    assert found[0].field == "anything[0]"
    bad_parts = [{"id": "same", "index": 0}] * 20_000
    assert len(problems(json.dumps({"parts": bad_parts}))) == MAX_PROBLEMS + 1


def test_a_value_in_memory_that_holds_itself_many_times_ends_soon() -> None:
    circle: list[Any] = []
    circle.extend([circle, circle])
    with pytest.raises(InvalidDocument):
        canonical_json(circle)


def test_plain_values_are_checked_like_bytes() -> None:
    good = check_document(Whole, {"parts": ({"id": "a", "index": 0},)}, subject="whole")
    assert good.parts == (Part(id="a", index=0),)
    with pytest.raises(InvalidDocument) as caught:
        check_document(
            Whole,
            {"parts": [{"id": "a", "index": 1, 5: 1}], "ratio": float("nan"), "anything": {"x": b"y", "z": {1}}},
            subject="whole",
        )
    assert [problem.field for problem in caught.value.problems] == [
        "parts[0]",
        "parts[0].index",
        "ratio",
        "anything.x",
        "anything.z",
    ]
    circle: dict[str, Any] = {}
    circle["anything"] = circle
    with pytest.raises(InvalidDocument, match="too deep"):
        check_document(Whole, circle, subject="whole")


def test_plain_values_are_copied() -> None:
    inside = {"a": [1]}
    whole = check_document(Whole, {**GOOD, "anything": inside}, subject="whole")
    inside["a"].append(2)
    assert whole.anything == {"a": [1]}


def test_prepare_sees_the_tree_and_its_result_is_checked() -> None:
    def prepare(tree: Any) -> Any:
        return {**GOOD, **tree}

    assert parse_document(Whole, b"{}", subject="s", limit_bytes=9, prepare=prepare).parts[0].id == "a"


def test_a_record_writes_itself_out_with_defaults_and_without_absent_parts() -> None:
    whole = read({"parts": [{"id": "a", "index": 0}], "anything": {"kept": None, "n": [1.5, None]}})
    assert plain_document(whole) == {
        "format": 1,
        "parts": [{"id": "a", "index": 0, "environment": {}, "colour": "red", "schema": "x"}],
        "named": {},
        "ratio": 1.0,
        "exact": False,
        "tags": [],
        "anything": {"kept": None, "n": [1.5, None]},
    }
    assert read(plain_document(whole)) == whole
    with_digest = read({**GOOD, "digest": "sha256:" + "1" * 64})
    assert plain_document(with_digest)["digest"] == "sha256:" + "1" * 64


class Headed(Record):
    format: Literal[1] = 1
    kind: Literal["k"] = "k"

    @rule
    def _head(self) -> Iterator[Problem]:
        yield from head_problems(self)


def test_a_head_has_a_default_for_writers_only() -> None:
    assert plain_document(Headed()) == {"format": 1, "kind": "k"}
    with pytest.raises(InvalidDocument) as caught:
        check_document(Headed, {"format": 1}, subject="s")
    assert [str(problem) for problem in caught.value.problems] == ["kind: is missing; write 'k'"]
    with pytest.raises(InvalidDocument) as caught:
        check_document(Headed, {"format": 2}, subject="s")
    assert [problem.field for problem in caught.value.problems] == ["format", "kind"]


def test_rules_are_inherited_and_can_be_replaced() -> None:
    class Stricter(Part):
        @rule
        def _not_reserved(self) -> Iterator[Problem]:
            yield Problem(field="id", message="is refused")

        @rule
        def _more(self) -> Iterator[Problem]:
            yield Problem(field="index", message="is refused too")

    found = list(Stricter(id="a", index=0).problems())
    assert [(p.field, p.message) for p in found] == [("id", "is refused"), ("index", "is refused too")]
    assert list(Part(id="a", index=0).problems()) == []


def test_reading_an_unparsed_field_never_leaves_a_rule() -> None:
    broken = Part.model_construct(id="a")  # type: ignore[call-arg] # as salvage does
    with pytest.raises(Unparsed):
        _ = broken.index
    with pytest.raises(AttributeError):
        _ = broken.no_such_field  # type: ignore[attr-defined] # that is the point


class Foreign(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    text: str


class WithForeign(Record):
    foreign: Items[Foreign] = ()
    either: Foreign | Part | None = None
    word: str = Field(default="a", pattern="^a+$")
    parts: Mapping[str, Part] = Field(default_factory=dict)
    pair: tuple[int, str] = Field(default=(1, "a"), strict=False)


def test_records_of_others_and_odd_shapes_are_checked_too() -> None:
    with pytest.raises(InvalidDocument) as caught:
        check_document(
            WithForeign,
            {
                "foreign": [{"text": 1}, {"text": "a", "more": 1}],
                "pair": [1],
                "either": {"id": 5},
                "word": "b",
                "parts": {"x": 5, "y": {"id": "reserved", "index": 0}},
            },
            subject="s",
        )
    found = {problem.field for problem in caught.value.problems}
    assert {"foreign[0].text", "foreign[1].more", "pair[1]", "word", "parts.x", "parts.y.id"} <= found
    assert check_document(WithForeign, {"foreign": [{"text": "a"}]}, subject="s").foreign[0].text == "a"


def test_problem_paths_are_put_below_a_prefix() -> None:
    problem = Problem(field="(document)", message="m", value="v", cure="c")
    assert at("a.b", problem) == Problem(field="a.b", message="m", value="v", cure="c")
    assert at("a", Problem(field="[0].x", message="m")).field == "a[0].x"
    assert at("a", Problem(field="x", message="m")).field == "a.x"
    assert at("", Problem(field="x", message="m")).field == "x"


@pytest.mark.parametrize(
    "parts",
    [(), ("a",), ("a", 0, "b"), ("a b", "c.d", 'e"f', "[g]", 12), ("", "é"), ("\ud800",), (0, 0), ("x-y", "_z9")],
)
def test_paths_come_apart_as_they_were_put_together(parts: tuple[str | int, ...]) -> None:
    path = path_of(parts)
    assert tuple(split(path)) == parts
    assert path.isascii()


def test_paths_read_as_people_write_them() -> None:
    assert path_of(("launch", "units", 1, "environment", "a b")) == 'launch.units[1].environment["a b"]'
    assert join("", "a") == "a"
    assert join("a", "9") == 'a["9"]'


def test_positions_follow_the_document() -> None:
    positions = Positions({"b": [1, {"x": 1}], "a": 2})
    paths = ["a", "b[1].missing", "b[1].x", "b", "b[0]", "zz", "b[9]", "b[0].deeper"]
    assert sorted(paths, key=positions.of) == ["b", "b[9]", "b[0]", "b[0].deeper", "b[1].x", "b[1].missing", "a", "zz"]


def test_values_are_shown_short_and_in_ascii() -> None:
    assert show("é\n") == '"\\u00e9\\n"'
    assert show([1, 2]) == "a list of 2 items"
    assert show({"a": 1}) == "an object of 1 members"
    assert show([]) == "an empty list"
    assert show({}) == "an empty object"
    assert show(None) == "null"
    assert show(b"x") == "bytes"
    assert show("x" * 500) == '"' + "x" * 119 + "... (502 characters)"
