"""Long lists are checked column by column; what comes out must be what row by row gives, for any oddity anywhere."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coldsnap.core import rows
from coldsnap.core.digest import Digest
from coldsnap.core.extents import ModelExtent
from coldsnap.core.manifest_fields import MODEL_EXTENT
from coldsnap.errors import InternalError, Problem

LENGTH = 40
PIECE = rows.Table(
    file=rows.clean_path, tensor=rows.line, size=rows.integer(0, 99), sha256=rows.digest, semantic_id=rows.hex64
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    file: str
    tensor: str
    size: int
    sha256: Digest
    semantic_id: str


def good(index: int) -> dict[str, Any]:
    """A row that nothing is wrong with."""
    return {
        "file": f"shard-{index % 3}.safetensors",
        "tensor": f"layer.{index}",
        "size": index,
        "sha256": f"sha256:{index:064x}",
        "semantic_id": f"{index:064x}",
    }


ODD: st.SearchStrategy[Any] = st.sampled_from(
    [
        None, True, 1.0, -1, 100, "", "x", "a\nb", "/a", "a//b", "../a", "\ud800", [], {}, 1 << 70,
        f"sha256:{'A' * 64}", f"sha256:{'0' * 63}", f"{'g' * 64}", "0" * 64, f"{'0' * 63}\n", "sha256:" + "0" * 64,
    ]
)  # fmt: skip
CHANGES = st.one_of(
    st.tuples(st.sampled_from(["set"]), st.sampled_from(sorted(good(0))), ODD),
    st.tuples(st.sampled_from(["drop", "add"]), st.sampled_from(sorted(good(0))), st.none()),
    st.tuples(st.sampled_from(["replace"]), st.just(""), ODD),
)


def one_by_one(value: list[Any]) -> tuple[list[Piece] | None, list[Problem]]:
    problems: list[Problem] = []
    found = [PIECE.row(item, f"pieces[{index}]", problems) for index, item in enumerate(value)]
    return (None if problems else [Piece(**row) for row in found if row is not None]), problems


@settings(max_examples=100)
@given(index=st.integers(0, LENGTH - 1), change=CHANGES)
def test_columns_take_exactly_what_rows_take(index: int, change: tuple[str, str, Any]) -> None:
    value: list[Any] = [good(number) for number in range(LENGTH)]
    kind, name, odd = change
    if kind == "set":
        value[index][name] = odd
    elif kind == "drop":
        del value[index][name]
    elif kind == "add":
        value[index][f"{name}2"] = value[index].pop(name)
    else:
        value[index] = odd
    problems: list[Problem] = []
    assert (PIECE.rows(value, "pieces", problems, Piece), problems) == one_by_one(value)


def test_a_good_long_list_is_read_by_columns_and_makes_real_records() -> None:
    value: list[Any] = [good(number) for number in range(LENGTH)]
    assert PIECE.columns(value) is not None
    made = PIECE.rows(value, "pieces", [], Piece)
    assert made == [Piece(**{**row, "sha256": Digest.parse(row["sha256"])}) for row in value]
    assert made is not None
    assert hash(made[3]) == hash(Piece(**{**value[3], "sha256": Digest.parse(value[3]["sha256"])}))
    with pytest.raises(AttributeError):
        made[0].size = 5  # type: ignore[misc]


def test_a_class_of_another_kind_is_made_by_calling_it() -> None:
    made: list[dict[str, int]] = rows.records(dict, {"a": [1, 2], "b": [3, 4]})
    assert made == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]


def test_rows_of_other_fields_than_the_record_are_a_fault_of_ours() -> None:
    with pytest.raises(InternalError, match="Piece has the fields"):
        rows.records(Piece, {"a": [1]})


def test_no_record_that_is_filled_by_columns_does_anything_when_it_is_made() -> None:
    assert not hasattr(ModelExtent, "__post_init__")
    assert [field.name for field in fields(ModelExtent)] == list(MODEL_EXTENT.schema()["required"])  # type: ignore[call-overload]


def test_known_digests_are_digests() -> None:
    texts = [f"{number:064x}" for number in range(3)]
    assert Digest.known(texts) == [Digest.from_hex(text) for text in texts]
    assert str(Digest.known(texts)[2]) == f"sha256:{2:064x}"
