"""The signature document: golden bytes are read and written back the same, anything else is refused by its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.core.signature import parse_signature, signature_bytes, statement
from coldsnap.errors import InvalidDocument

GOLDEN = Path(__file__).parent / "data" / "signatures" / "host-one-worker.json.sig"


def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_bytes())
    return found


def test_golden_bytes() -> None:
    signature = parse_signature(GOLDEN.read_bytes())
    assert signature_bytes(signature) == GOLDEN.read_bytes()


def test_the_statement_is_two_lines_of_text() -> None:
    digest = Digest.of(b"x")
    assert statement(digest) == f"coldsnap artifact signature 1\nsha256:{digest.hex}\n".encode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 2),
        ("kind", "coldsnap-snapshot-artifact"),
        ("algorithm", "rsa"),
        ("artifact", "sha256:0"),
        ("key", None),
        ("signature", "00"),
        ("signature", "A" * 128),
        ("signature", "0" * 130),
        ("extra", 1),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidDocument) as caught:
        parse_signature(json.dumps({**document(), field: value}).encode())
    assert [problem.field for problem in caught.value.problems] == [field]


@given(st.binary(max_size=200), st.integers(0, 400))
def test_bytes_are_read_or_refused(noise: bytes, at: int) -> None:
    data = GOLDEN.read_bytes()
    for candidate in (noise, data[:at] + noise + data[at:]):
        try:
            found = parse_signature(candidate)
        except InvalidDocument:
            continue
        else:
            assert parse_signature(signature_bytes(found)) == found
