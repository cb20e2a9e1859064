"""The validation record and when it is to be believed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldsnap.core.digest import Digest
from coldsnap.core.validation import (
    ContentIdentity,
    Evidence,
    ValidationRecord,
    parse_validation_record,
    validation_record_bytes,
    validation_record_schema,
)
from coldsnap.errors import InvalidDocument

IDENTITY = ContentIdentity(device=2, inode=3, size=4096, mtime_ns=1_700_000_000_123_456_789)
RECORD = ValidationRecord(
    provider="native",
    blob="0.pack",
    bytes=4096,
    sha256=Digest.from_hex("0" * 64),
    content_identity=IDENTITY,
    content_evidence=Evidence.EXTENTS_SHA256,
    validated_unix_ns=1_700_000_001_000_000_000,
)
GOLDEN = (
    b'{"blob":"0.pack","content_evidence":"extents-sha256",'
    b'"content_identity":{"device":2,"inode":3,"mtime_ns":1700000000123456789,"size":4096},'
    b'"expected":{"bytes":4096,"sha256":"sha256:' + b"0" * 64 + b'"},'
    b'"format":1,"kind":"coldsnap-payload-validation","provider":"native","validated_unix_ns":1700000001000000000}\n'
)


def test_golden_bytes() -> None:
    assert validation_record_bytes(RECORD) == GOLDEN
    assert parse_validation_record(GOLDEN) == RECORD


def test_vouches_only_for_the_same_digest_size_and_identity() -> None:
    def vouches(**changes: Any) -> bool:
        wanted = {"sha256": RECORD.sha256, "size_bytes": RECORD.bytes, "identity": IDENTITY, **changes}
        return RECORD.vouches_for(**wanted)

    assert vouches()
    assert not vouches(sha256=Digest.from_hex("1" * 64))
    assert not vouches(size_bytes=4097)
    for name in ("device", "inode", "size", "mtime_ns"):
        assert not vouches(identity=replace(IDENTITY, **{name: getattr(IDENTITY, name) + 1}))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("format",), 2, "format"),
        (("kind",), "x", "kind"),
        (("provider",), "", "provider"),
        (("blob",), "", "blob"),
        (("content_evidence",), "none", "content_evidence"),
        (("content_evidence",), None, "content_evidence"),
        (("expected", "sha256"), "0" * 64, "expected.sha256"),
        (("expected", "bytes"), -1, "expected.bytes"),
        (("content_identity", "inode"), "3", "content_identity.inode"),
        (("content_identity",), None, "content_identity"),
        (("validated_unix_ns",), 1.5, "validated_unix_ns"),
        (("extra",), 1, "extra"),
    ],
)
def test_wrong_members_are_named(path: tuple[str, ...], value: object, field: str) -> None:
    document = json.loads(GOLDEN)
    here = document
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value
    with pytest.raises(InvalidDocument) as caught:
        parse_validation_record(json.dumps(document).encode())
    assert [one.field for one in caught.value.problems] == [field]


@pytest.mark.parametrize("data", [b"", b"{}{}", b"[]", GOLDEN + b"x", b" " * ((1 << 20) + 1)])
def test_text_that_is_no_record(data: bytes) -> None:
    with pytest.raises(InvalidDocument):
        parse_validation_record(data)


@given(st.data())
def test_one_changed_byte_never_crashes_the_reader(data: st.DataObject) -> None:
    damaged = bytearray(GOLDEN)
    damaged[data.draw(st.integers(0, len(GOLDEN) - 1))] = data.draw(st.integers(0, 255))
    try:
        record = parse_validation_record(bytes(damaged))
    except InvalidDocument:
        return
    assert json.loads(validation_record_bytes(record)) == json.loads(bytes(damaged))


def test_schema_lists_every_member() -> None:
    assert set(json.loads(GOLDEN)) == set(validation_record_schema()["required"])  # type: ignore[call-overload] # a JSON value
