"""A digest has one text form, and everything else is refused rather than repaired."""

from __future__ import annotations

import hashlib

import pytest
from pydantic import TypeAdapter, ValidationError

from coldsnap.core.digest import Digest

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # SHA-256 of nothing, FIPS 180-4


def test_every_way_to_make_one_agrees() -> None:
    made = [
        Digest.of(b""),
        Digest.of(bytearray()),
        Digest.of(memoryview(b"")),
        Digest.from_hash(hashlib.sha256()),
        Digest.from_hex(EMPTY),
        Digest.parse(f"sha256:{EMPTY}"),
        TypeAdapter(Digest).validate_python(f"sha256:{EMPTY}"),
    ]
    assert set(made) == {Digest(EMPTY)}
    assert {str(digest) for digest in made} == {f"sha256:{EMPTY}"}
    assert TypeAdapter(Digest).dump_python(made[0]) == f"sha256:{EMPTY}"
    assert TypeAdapter(Digest).validate_python(made[0]) is made[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        EMPTY,
        f"sha256:{EMPTY.upper()}",
        f"SHA256:{EMPTY}",
        f"sha256:{EMPTY[:-1]}",
        f"sha256:{EMPTY}0",
        f"sha256:{EMPTY}\n",
        f" sha256:{EMPTY}",
        f"sha512:{EMPTY}",
        "sha256:" + "g" * 64,
        "sha256:" + "\uff10" * 64,
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        Digest.parse(text)
    with pytest.raises(ValidationError):
        TypeAdapter(Digest).validate_python(text)


@pytest.mark.parametrize("value", [5, None, b"x", ["sha256"], EMPTY.encode()])
def test_what_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Digest).validate_python(value)
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        Digest(value)  # type: ignore[arg-type] # that is the point


def test_digests_sort_and_do_not_change() -> None:
    low, high = Digest("0" * 64), Digest("f" * 64)
    assert sorted([high, low]) == [low, high]
    with pytest.raises(AttributeError):
        low.hex = "1" * 64  # type: ignore[misc] # that is the point
