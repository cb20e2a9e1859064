"""``coldsnap payload verify`` on the command line: exit codes, and the object for programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from coldsnap.core.digest import Digest

from .conftest import Coldsnap  # isort: skip

DATA = b"a pack" * 1000


@pytest.fixture
def words(tmp_path: Path) -> list[object]:
    digest = Digest.of(DATA)
    path = tmp_path / f"{digest.hex}.pack"
    path.write_bytes(DATA)
    path.chmod(0o400)
    return ["payload", "verify", "--path", path, "--expected-sha256", digest, "--expected-bytes"]


def test_admitted(coldsnap: Coldsnap, words: list[object]) -> None:
    ran = coldsnap(*words, len(DATA), "--worker", "w0", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert (ran.said["admitted"], ran.said["worker"]) == (True, "w0")
    assert "proved by an earlier proof" in coldsnap(*words, len(DATA)).out


def test_rejected(coldsnap: Coldsnap, words: list[object]) -> None:
    ran = coldsnap(*words, len(DATA) + 1, "--json")
    assert ran.code == 5
    assert (ran.said["admitted"], ran.said["reason"]) == (False, "size_mismatch")
    plain = coldsnap(*words, len(DATA) + 1)
    assert (plain.code, plain.out) == (5, "")
    assert "holds 6000 bytes, not 6001" in plain.err


def test_a_wrong_flag_is_no_verdict(coldsnap: Coldsnap, words: list[object]) -> None:
    ran = coldsnap(*words, "many", "--json")
    assert ran.code == 2
    assert "admitted" not in ran.said


def test_the_help_of_the_command_below_teaches(coldsnap: Coldsnap) -> None:
    ran = coldsnap("payload", "verify", "--help")
    assert ran.code == 0
    assert "Example: coldsnap payload verify" in " ".join(ran.out.split())
