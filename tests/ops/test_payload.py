"""The one verifier: what it admits, each reason for a refusal, and its answer as a contract."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coldsnap.cli.commands import payload as command
from coldsnap.core.digest import Digest
from coldsnap.errors import PayloadRejected, UsageError
from coldsnap.ops.payload import PayloadVerdict, verify_payload
from coldsnap.ops.report import Advance, Silent
from coldsnap.store.admission import record_path

REASONS = {
    "invalid_expected_digest",
    "unusable_path",
    "size_mismatch",
    "changed_during_validation",
    "digest_mismatch",
}
DATA = bytes(range(256)) * 64
DIGEST = Digest.of(DATA)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / f"{DIGEST.hex}.pack"
    path.write_bytes(DATA)
    path.chmod(0o400)
    return path


def verified(path: Path, **changes: object) -> PayloadVerdict:
    wanted: dict[str, object] = {"expected_sha256": str(DIGEST), "expected_bytes": len(DATA), **changes}
    return verify_payload(path, reporter=Silent(), **wanted)  # type: ignore[arg-type]


def test_a_good_pack_is_admitted_and_the_second_time_from_its_record(pack: Path) -> None:
    first, second = verified(pack, worker="w0"), verified(pack)
    assert [one.from_record for one in (first, second)] == [False, True]
    assert record_path(pack).exists()
    document = first.document()
    assert document.pop("seconds") >= 0
    assert document == {
        "format": 1,
        "kind": "coldsnap-payload-verification",
        "admitted": True,
        "reason": None,
        "message": None,
        "cure": None,
        "worker": "w0",
        "path": str(pack),
        "expected": {"bytes": len(DATA), "sha256": str(DIGEST)},
        "content_evidence": "full-sha256",
        "from_record": False,
        "recorded": True,
    }


def another_name(pack: Path) -> Path:
    return pack.rename(pack.with_name("model-weights.pack"))


def name_of_another_digest(pack: Path) -> Path:
    return pack.rename(pack.with_name(f"{Digest.of(b'x').hex}.pack"))


def damaged(pack: Path) -> Path:
    pack.chmod(0o600)
    pack.write_bytes(b"\xff" + DATA[1:])
    return pack


def shorter(pack: Path) -> Path:
    pack.chmod(0o600)
    pack.write_bytes(DATA[:-1])
    return pack


def a_link(pack: Path) -> Path:
    real = pack.rename(pack.with_name("real"))
    pack.symlink_to(real)
    return pack


def gone(pack: Path) -> Path:
    pack.unlink()
    return pack


def a_pipe(pack: Path) -> Path:
    pack.unlink()
    os.mkfifo(pack)
    return pack


def a_folder(pack: Path) -> Path:
    pack.unlink()
    pack.mkdir()
    return pack


def of_somebody_else(pack: Path) -> Path:
    if os.geteuid() != 0:
        pytest.skip("giving a file away needs root")
    os.chown(pack, 12345, 12345)
    return pack


def for_everybody_to_write(pack: Path) -> Path:
    pack.chmod(0o666)
    return pack


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_name, "unusable_path"),
        (name_of_another_digest, "unusable_path"),
        (damaged, "digest_mismatch"),
        (shorter, "size_mismatch"),
        (a_link, "unusable_path"),
        (gone, "unusable_path"),
        (a_pipe, "unusable_path"),
        (a_folder, "unusable_path"),
        (of_somebody_else, "unusable_path"),
        (for_everybody_to_write, "unusable_path"),
    ],
)
def test_each_refusal_has_its_reason(pack: Path, change: Callable[[Path], Path], reason: str) -> None:
    path = change(pack)
    document = verified(path).document()
    assert (document["admitted"], document["reason"], document["content_evidence"]) == (False, reason, None)
    assert document["message"]
    assert document["cure"]
    assert not record_path(path).exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"expected_sha256": DIGEST.hex},
        {"expected_sha256": str(DIGEST).upper()},
        {"expected_sha256": ""},
        {"expected_bytes": -1},
    ],
)
def test_an_expectation_that_is_none(pack: Path, changes: dict[str, object]) -> None:
    assert verified(pack, **changes).document()["reason"] == "invalid_expected_digest"


def test_a_record_of_other_bytes_is_not_believed(pack: Path) -> None:
    assert verified(pack).rejection is None
    damaged(pack)
    assert verified(pack).document()["reason"] == "digest_mismatch"


class Meddling(Silent):
    """Changes the file while it is proved."""

    def __init__(self, change: Callable[[], None]) -> None:
        self._change = change

    @contextmanager
    def phase(self, title: str, *, total_bytes: int | None = None) -> Iterator[Advance]:
        yield lambda num_bytes, /: self._change()


@pytest.mark.parametrize("what", ["touched", "rewritten", "exchanged"])
def test_a_file_that_changes_while_it_is_proved(pack: Path, what: str) -> None:
    def change() -> None:
        if what == "touched":
            os.utime(pack, ns=(1, 1))
        elif what == "rewritten":
            pack.chmod(0o600)
            pack.write_bytes(DATA[::-1])
        elif not pack.with_name("old").exists():
            pack.rename(pack.with_name("old"))
            pack.write_bytes(DATA)

    document = verify_payload(pack, str(DIGEST), len(DATA), reporter=Meddling(change)).document()
    assert (document["admitted"], document["reason"]) == (False, "changed_during_validation")
    assert document["cure"]
    assert not record_path(pack).exists()


def test_the_reasons_are_those_that_the_format_names(pack: Path) -> None:
    """And `errors.py`, and the help of the command."""
    for text in (PayloadRejected.__doc__, inspect.getdoc(command.verify)):
        assert text is not None
        assert sorted(set(re.findall(r"[a-z]+_[a-z_]+", text)) & REASONS) == sorted(REASONS)


def test_a_worker_is_an_id(pack: Path) -> None:
    with pytest.raises(UsageError):
        verified(pack, worker="../w0")
