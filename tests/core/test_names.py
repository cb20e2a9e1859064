"""Ids, names, paths, owners and versions."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from coldsnap.core.names import (
    AbsolutePath,
    EnvironmentName,
    Id,
    Line,
    QualifiedName,
    RelativePath,
    Text,
    Unfit,
    check_id,
    is_id,
    path_fault,
)
from coldsnap.core.owners import Owner, OwnerKind
from coldsnap.core.versions import version_fault, version_of

GOOD: list[tuple[Any, str]] = [
    (Id, "a"),
    (Id, "A9._-z"),
    (Id, "9" * 128),
    (QualifiedName, "vllm:world"),
    (QualifiedName, "a.b:c-d"),
    (EnvironmentName, "_A9"),
    (EnvironmentName, "PATH"),
    (AbsolutePath, "/"),
    (AbsolutePath, "/a/b.c/..d"),
    (RelativePath, "a"),
    (RelativePath, "a/b/.hidden"),
    (Line, "any text: ünïcode"),
    (Text, ""),
    (Text, "two\nlines"),
]
BAD: list[tuple[Any, str]] = [
    (Id, ""),
    (Id, "-a"),
    (Id, ".a"),
    (Id, "a b"),
    (Id, "a/b"),
    (Id, "é"),
    (Id, "a\n"),
    (Id, "9" * 129),
    (QualifiedName, "world"),
    (QualifiedName, ":world"),
    (QualifiedName, "vllm:"),
    (QualifiedName, "vllm:a:b"),
    (QualifiedName, "vllm:world\n"),
    (EnvironmentName, "9A"),
    (EnvironmentName, "A-B"),
    (EnvironmentName, ""),
    (EnvironmentName, "A\n"),
    (EnvironmentName, "É"),
    (AbsolutePath, ""),
    (AbsolutePath, "a"),
    (AbsolutePath, "/a/"),
    (AbsolutePath, "//a"),
    (AbsolutePath, "/a/./b"),
    (AbsolutePath, "/a/../b"),
    (AbsolutePath, "/a\0"),
    (RelativePath, ""),
    (RelativePath, "/a"),
    (RelativePath, ".."),
    (RelativePath, "a/.."),
    (RelativePath, "./a"),
    (RelativePath, "a//b"),
    (RelativePath, "a/"),
    (RelativePath, "a\0b"),
    (Line, ""),
    (Line, "two\nlines"),
    (Line, "a\x7f"),
    (Text, "a\0"),
]


@pytest.mark.parametrize(("kind", "text"), GOOD)
def test_good_words(kind: Any, text: str) -> None:
    assert TypeAdapter(kind).validate_python(text) == text


@pytest.mark.parametrize(("kind", "text"), BAD)
def test_bad_words_say_the_way_out(kind: Any, text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(kind).validate_python(text)
    (fault,) = caught.value.errors()
    assert isinstance(fault["ctx"]["error"], Unfit)
    assert fault["ctx"]["error"].cure


def test_ids_alone() -> None:
    assert is_id("w0")
    assert not is_id("w 0")
    assert check_id("w0") == "w0"
    with pytest.raises(Unfit):
        check_id("")


def test_path_faults_are_said() -> None:
    assert path_fault("a/b", absolute=False) is None
    assert path_fault("/a/b", absolute=True) is None
    assert path_fault("/a", absolute=False) == "is not a relative path"
    assert path_fault("a", absolute=True) == "is not an absolute path"
    assert path_fault("a/../b", absolute=False) == "is not a clean path"


@pytest.mark.parametrize("text", ["unit/u0", "worker/w-0.1", "service/s", "group/vllm"])
def test_owners_have_one_text_form(text: str) -> None:
    owner = Owner.parse(text)
    assert str(owner) == text
    assert owner.kind == text.split("/")[0]
    assert owner.id == text.split("/")[1]
    assert TypeAdapter(Owner).validate_python(text) == owner
    assert TypeAdapter(Owner).validate_python(owner) is owner
    assert TypeAdapter(Owner).dump_python(owner) == text


def test_owners_are_made_by_kind() -> None:
    assert Owner.unit("u0") == Owner(OwnerKind.UNIT, "u0")
    assert Owner.worker("w0") == Owner.parse("worker/w0")
    with pytest.raises(ValueError, match="is not an owner"):
        Owner.worker("../w0")


@pytest.mark.parametrize(
    "value", ["", "w0", "worker/", "/w0", "worker/a/b", "Worker/w0", "host/h", "worker/-", 5, None]
)
def test_what_is_no_owner_is_refused(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Owner).validate_python(value)


def test_versions_compare_as_numbers() -> None:
    ordered = ["0", "580", "580.9", "580.82", "580.159.04", "580.159.10", "610"]
    assert sorted(["610", *ordered[:-1]], key=version_of) == ordered
    assert version_of("580.159.04") == version_of("580.159.4") == version_of("580.159.4.0")
    assert version_of("580") == version_of("580.0")


@pytest.mark.parametrize("text", ["", "580.", ".580", "580-1", "v580", "580.x", "1" * 10, "1.2\n", "-1", "\uff11"])
def test_what_is_no_version_is_refused(text: str) -> None:
    assert version_fault(text) == "is not a dotted version"
    with pytest.raises(ValueError, match="dotted version"):
        version_of(text)
