"""``coldsnap payload verify`` on the command line: exit codes, and the object for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


@pytest.mark.parametrize("name", [b"u\xff", b"t\xe2\x80\xaetxt", b"e\x1b[31m", b"n\nl"])
@pytest.mark.parametrize("good", [True, False])
def test_a_folder_with_an_odd_name(tmp_path: Path, name: bytes, good: bool) -> None:
    """JSON holds no half surrogates, which is what Python makes of a byte that is no UTF-8; a terminal no escapes."""
    folder = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name)))  # noqa: PTH118 - bytes
    folder.mkdir()
    path = folder / f"{Digest.of(DATA).hex}.pack"
    path.write_bytes(DATA)
    path.chmod(0o400)
    words: list[str] = [
        "--path",
        str(path),
        "--expected-sha256",
        str(Digest.of(DATA)),
        "--expected-bytes",
        str(len(DATA) + (not good)),
    ]
    shown = {b"u\xff": "u\\xff", b"t\xe2\x80\xaetxt": "t\u202etxt", b"e\x1b[31m": "e\x1b[31m", b"n\nl": "n\nl"}[name]
    for as_json in (True, False):
        ran = subprocess.run(
            [sys.executable, "-m", "coldsnap.cli", "payload", "verify", *words, *(["--json"] if as_json else [])],
            capture_output=True,
            check=False,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        )
        assert ran.returncode == (0 if good else 5), ran.stderr
        text = (ran.stdout + ran.stderr).decode()
        if as_json:
            assert json.loads(ran.stdout)["path"] == str(tmp_path / shown / path.name)
        else:
            assert not set(text) & set("\x1b\u202e")
            assert str(tmp_path) in text


def test_a_wrong_flag_is_no_verdict(coldsnap: Coldsnap, words: list[object]) -> None:
    ran = coldsnap(*words, "many", "--json")
    assert ran.code == 2
    assert "admitted" not in ran.said


def test_the_help_of_the_command_below_teaches(coldsnap: Coldsnap) -> None:
    ran = coldsnap("payload", "verify", "--help")
    assert ran.code == 0
    assert "Example: coldsnap payload verify" in " ".join(ran.out.split())
