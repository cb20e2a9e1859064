"""``coldsnap sign`` and ``--require-signature`` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Coldsnap, Ran  # isort: skip


def signed(coldsnap: Coldsnap, artifact: Path) -> tuple[Path, Path]:
    """(private, public) of the key that signed the artifact."""
    made = coldsnap("sign", "--new-key", artifact.with_name("key.pem"), "--json")
    assert made.code == 0, made.err
    ran = coldsnap("sign", artifact, "--key", made.said["private_key"], "--json")
    assert ran.code == 0, ran.err
    assert ran.said["key"] == made.said["key"]
    return Path(made.said["private_key"]), Path(made.said["public_key"])


def words(verb: str, artifact: Path, key: Path) -> list[object]:
    return [verb, artifact, "--require-signature", key, "--json", "--quiet"]


@pytest.mark.parametrize("verb", ["verify", "prepare", "warm", "restore"])
def test_every_verb_that_trusts_an_artifact_can_insist(coldsnap: Coldsnap, artifact: Path, verb: str) -> None:
    _, public = signed(coldsnap, artifact)
    ran = coldsnap(*words(verb, artifact, public))
    assert ran.code == 0, ran.err
    artifact.with_name(f"{artifact.name}.sig").unlink()
    assert refused(coldsnap(*words(verb, artifact, public))) == "missing_signature"


def refused(ran: Ran) -> str:
    assert ran.code == 5
    assert ran.said["error"] == "SignatureRejected"
    return str(ran.said["facts"]["reason"])


def test_a_service_is_not_touched_by_a_refusal(coldsnap: Coldsnap, artifact: Path) -> None:
    assert coldsnap("restore", artifact, "--quiet").code == 0
    _, public = signed(coldsnap, artifact)
    other = coldsnap("sign", "--new-key", artifact.with_name("other.pem"), "--json").said["public_key"]
    before = coldsnap("status", "--json").said
    assert refused(coldsnap(*words("restore", artifact, Path(other)))) == "foreign_signature"
    assert coldsnap("status", "--json").said == before
    assert coldsnap(*words("verify", artifact, public)).said["signed_by"].startswith("sha256:")


@pytest.mark.parametrize(
    "flags", [[], ["a.json"], ["--key", "k"], ["a.json", "--new-key", "k"], ["--new-key", "k", "--key", "k"]]
)
def test_flags_that_make_no_sense_together(coldsnap: Coldsnap, flags: list[str]) -> None:
    assert coldsnap("sign", *flags).code == 2
