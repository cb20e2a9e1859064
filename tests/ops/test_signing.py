"""Signatures of artifacts: made, insisted on, and each way in which one is not what was asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coldsnap.core.artifact import artifact_bytes, artifact_document, artifact_from
from coldsnap.errors import ColdsnapError, ResourceBusy, SignatureRejected, UnsafePath, UserError
from coldsnap.ops.artifacts import LoadedArtifact, load_artifact
from coldsnap.ops.signing import NewKey, new_key, require_signature, sign_artifact, signature_path
from coldsnap.testing.documents import artifact_example

GOLDEN = Path(__file__).parents[1] / "core" / "data" / "signatures"


@pytest.fixture
def key(tmp_path: Path) -> NewKey:
    return new_key(tmp_path / "key.pem")


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedArtifact:
    path = tmp_path / "a.json"
    path.write_bytes(artifact_bytes(artifact_from(artifact_example())))
    return load_artifact(path)


def test_signed_and_required(loaded: LoadedArtifact, key: NewKey) -> None:
    signed = sign_artifact(loaded, key.private)
    assert signed.path == loaded.path.with_name("a.json.sig")
    assert require_signature(loaded, key.public) == signed
    assert (signed.key, signed.artifact) == (key.key, loaded.digest)
    assert sign_artifact(loaded, key.private) == signed, "the same signature again is the same file"


def test_a_new_key_is_private_and_overwrites_nothing(key: NewKey) -> None:
    assert key.private.stat().st_mode & 0o777 == 0o600
    assert b"PRIVATE" not in key.public.read_bytes()
    for there, path in ((key.private, key.private), (key.public, key.private)):
        before = there.read_bytes()
        with pytest.raises(ResourceBusy):
            new_key(path)
        assert there.read_bytes() == before


def test_a_golden_signature_is_made_again_to_the_byte(tmp_path: Path) -> None:
    """The key is the first of RFC 8032; openssl makes and verifies the same signature of the same two lines."""
    private = tmp_path / "key.pem"
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    made = Ed25519PrivateKey.from_private_bytes(seed)
    private.write_bytes(made.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    private.chmod(0o600)
    path = tmp_path / "artifact.json"
    path.write_bytes((GOLDEN.parent / "artifacts" / "host-one-worker.json").read_bytes())
    signed = sign_artifact(load_artifact(path), private)
    assert signed.path.read_bytes() == (GOLDEN / "host-one-worker.json.sig").read_bytes()
    public = tmp_path / "key.pub"
    public.write_bytes((GOLDEN / "key.pem.pub").read_bytes())
    assert require_signature(load_artifact(path), public).key == signed.key


def reason(loaded: LoadedArtifact, key: Path) -> str:
    with pytest.raises(SignatureRejected) as caught:
        require_signature(loaded, key)
    assert caught.value.cure
    assert caught.value.facts["reason"] == caught.value.reason
    return caught.value.reason


def test_missing(loaded: LoadedArtifact, key: NewKey) -> None:
    assert reason(loaded, key.public) == "missing_signature"


def test_foreign(loaded: LoadedArtifact, key: NewKey, tmp_path: Path) -> None:
    sign_artifact(loaded, key.private)
    assert reason(loaded, new_key(tmp_path / "other.pem").public) == "foreign_signature"


def test_of_another_artifact(loaded: LoadedArtifact, key: NewKey) -> None:
    sign_artifact(loaded, key.private)
    document = artifact_document(loaded.artifact)
    document["capture_id"] = "another"
    loaded.path.write_bytes(artifact_bytes(artifact_from(document)))
    assert reason(load_artifact(loaded.path), key.public) == "other_artifact"


def test_a_signature_that_claims_another_artifact_does_not_hold(loaded: LoadedArtifact, key: NewKey) -> None:
    path = sign_artifact(loaded, key.private).path
    document = artifact_document(loaded.artifact)
    document["capture_id"] = "another"
    loaded.path.write_bytes(artifact_bytes(artifact_from(document)))
    other = load_artifact(loaded.path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "artifact": str(other.digest)}))
    assert reason(other, key.public) == "damaged_signature"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-20],
        lambda data: data.replace(b'"ed25519"', b'"none"'),
        lambda data: data.replace(b'"format":1', b'"format":2'),
        lambda data: data.replace(b"{", b'{"more":1,', 1),
        lambda data: data[:-4] + (b"0" if data[-4:-3] != b"0" else b"1") + data[-3:],
        lambda data: data + b"{}",
        lambda data: data * 2000,
    ],
    ids=["empty", "cut", "algorithm", "format", "field", "bit", "trailing", "long"],
)
def test_damaged(loaded: LoadedArtifact, key: NewKey, damage: object) -> None:
    path = sign_artifact(loaded, key.private).path
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert reason(loaded, key.public) == "damaged_signature"


def test_what_is_damaged_is_told_with_field_value_and_cure(loaded: LoadedArtifact, key: NewKey) -> None:
    path = sign_artifact(loaded, key.private).path
    path.write_bytes(path.read_bytes().replace(b'"ed25519"', b'"none"').replace(b'"format":1', b'"format":"1"'))
    with pytest.raises(SignatureRejected) as caught:
        require_signature(loaded, key.public)
    assert "algorithm: is not one of the known values (got \"none\"); use 'ed25519'" in caught.value.message
    assert "format: " in caught.value.message


def test_what_is_no_file_is_damaged(loaded: LoadedArtifact, key: NewKey) -> None:
    signature_path(loaded.path).mkdir()
    assert reason(loaded, key.public) == "damaged_signature"


def test_keys_that_are_none(loaded: LoadedArtifact, key: NewKey, tmp_path: Path) -> None:
    other = tmp_path / "p256.pem"
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    curve = generate_private_key(SECP256R1())
    other.write_bytes(curve.private_bytes(pem, serialization.PrivateFormat.PKCS8, none))
    other.chmod(0o600)
    public = tmp_path / "p256.pub"
    public.write_bytes(curve.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    text = tmp_path / "text"
    text.write_text("secret words")
    text.chmod(0o600)
    for path in (other, text, key.public):
        path.chmod(0o600)
        with pytest.raises(UserError) as caught:
            sign_artifact(loaded, path)
        assert "secret words" not in str(caught.value)
    sign_artifact(loaded, key.private)
    for path in (public, text, key.private):
        with pytest.raises(UserError):
            require_signature(loaded, path)
    with pytest.raises(ColdsnapError):
        require_signature(loaded, tmp_path / "gone")


@pytest.mark.parametrize("form", ["raw", "DER", "ssh", "two keys", "link", "pipe", "for everybody to write"])
def test_public_keys_in_other_forms_and_places(loaded: LoadedArtifact, key: NewKey, tmp_path: Path, form: str) -> None:
    sign_artifact(loaded, key.private)
    public = serialization.load_pem_public_key(key.public.read_bytes())
    path = tmp_path / "other"
    if form in ("raw", "DER", "ssh"):
        encoding, shape = {
            "raw": (serialization.Encoding.Raw, serialization.PublicFormat.Raw),
            "DER": (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo),
            "ssh": (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH),
        }[form]
        path.write_bytes(public.public_bytes(encoding, shape))
    elif form == "two keys":
        path.write_bytes(key.public.read_bytes() + new_key(tmp_path / "more.pem").public.read_bytes())
    elif form == "link":
        path.symlink_to(key.public)
    elif form == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(key.public.read_bytes())
        path.chmod(0o666)
    with pytest.raises(UserError if form in ("raw", "DER", "ssh", "two keys") else UnsafePath) as caught:
        require_signature(loaded, path)
    assert caught.value.cure


def test_a_private_key_that_others_can_read_signs_nothing(loaded: LoadedArtifact, key: NewKey) -> None:
    key.private.chmod(0o640)
    with pytest.raises(UnsafePath):
        sign_artifact(loaded, key.private)
    assert not signature_path(loaded.path).exists()


def test_another_file_in_the_place_of_a_signature_stays(loaded: LoadedArtifact, key: NewKey) -> None:
    signature_path(loaded.path).write_text("notes")
    signature_path(loaded.path).chmod(0o600)
    with pytest.raises(ResourceBusy):
        sign_artifact(loaded, key.private)
    assert signature_path(loaded.path).read_text() == "notes"
