"""Detached Ed25519 signatures of artifacts: making keys, signing, and insisting on a signature.

Keys are PEM files as ``openssl genpkey -algorithm ed25519`` and ``openssl pkey -pubout`` write them. A private key is
read only when nobody else can read it, and is neither copied nor told anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldsnap.core.digest import Digest
from coldsnap.core.signature import (
    SIGNATURE_LIMIT_BYTES,
    SIGNATURE_SUFFIX,
    ArtifactSignature,
    parse_signature,
    signature_bytes,
    statement,
)
from coldsnap.errors import (
    HostError,
    InvalidDocument,
    MissingCapability,
    ResourceBusy,
    SignatureRejected,
    UserError,
    reason_of,
)
from coldsnap.ops.artifacts import LoadedArtifact
from coldsnap.store.documents import read_private, write_new
from coldsnap.store.faults import translated

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

__all__ = ["NewKey", "Signed", "new_key", "require_signature", "sign_artifact", "signature_of", "signature_path"]

_KEY_LIMIT_BYTES = 16 * 1024
_MAKE = "make one with `coldsnap sign --new-key FILE`, or `openssl genpkey -algorithm ed25519 -out FILE`"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewKey:
    """A key pair as two new files. ``key`` names it: the SHA-256 of its 32 public bytes."""

    private: Path
    public: Path
    key: Digest

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"private_key": str(self.private), "public_key": str(self.public), "key": str(self.key)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Signed:
    """A signature that holds: of which artifact, by which key, and where it lies."""

    path: Path
    artifact: Digest
    key: Digest

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"signature": str(self.path), "artifact": str(self.artifact), "key": str(self.key)}


def signature_path(artifact: Path) -> Path:
    """Where the signature of the artifact at this path is looked for: beside it."""
    return artifact.with_name(artifact.name + SIGNATURE_SUFFIX)


def signature_of(loaded: LoadedArtifact) -> Path | None:
    """The signature beside an artifact, whosever key made it; None when what lies there is none of this artifact."""
    path = signature_path(loaded.path)
    try:
        ours = path.is_file() and not path.is_symlink() and parse_signature(_read(path)).artifact == loaded.digest
    except (InvalidDocument, HostError):
        ours = False
    return path if ours else None


def new_key(path: Path) -> NewKey:
    """Make a key: ``path``, mode 0600, and ``path`` with ``.pub``. Raises ResourceBusy when either is there."""
    with _library():
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    private = Ed25519PrivateKey.generate()
    public = path.with_name(path.name + ".pub")
    if os.path.lexists(public):
        raise ResourceBusy(f"{public} exists already, and is never overwritten", cure="choose another name")
    pem = serialization.Encoding.PEM
    write_new(path, private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    write_new(public, private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    with translated("open to readers", public):
        public.chmod(0o644)
    return NewKey(private=path, public=public, key=_name_of(private.public_key()))


def sign_artifact(loaded: LoadedArtifact, key: Path, output: Path | None = None) -> Signed:
    """Sign an artifact. Writing the same signature again is content with it.

    Raises UserError for a file that is no such key, UnsafePath for one that others can read, ResourceBusy when
    something else is at ``output``.
    """
    private = _private_key(key)
    signature = ArtifactSignature(
        format=1,
        kind="coldsnap-artifact-signature",
        algorithm="ed25519",
        artifact=loaded.digest,
        key=_name_of(private.public_key()),
        signature=private.sign(statement(loaded.digest)).hex(),
    )
    path = output or signature_path(loaded.path)
    data = signature_bytes(signature)
    try:
        write_new(path, data)
    except ResourceBusy:
        if read_private(path, SIGNATURE_LIMIT_BYTES) != data:
            raise
    return Signed(path=path, artifact=loaded.digest, key=signature.key)


def require_signature(loaded: LoadedArtifact, key: Path) -> Signed:
    """The signature beside the artifact, which must be by this public key and of this very artifact.

    Raises SignatureRejected with a reason: ``missing_signature``, ``damaged_signature``, ``foreign_signature`` (another
    key's), ``other_artifact`` (of another descriptor); UserError for a file that is no public key.
    """
    public = _public_key(key)
    path, name = signature_path(loaded.path), _name_of(public)
    if not os.path.lexists(path):
        message = f"{loaded.path} is not signed: there is no {path.name} beside it"
        raise _rejected("missing_signature", message, path, cure="get its signature from who published it")
    try:
        signature = parse_signature(_read(path))
    except (InvalidDocument, HostError) as error:
        message = f"{path} is no signature: {reason_of(error)}"
        raise _rejected("damaged_signature", message, path, cure="get it again from who signed the artifact") from error
    if signature.key != name:
        message = f"{path} is by another key, {signature.key}"
        cure = f"require the key of who signed it, if you trust them; {key} is {name}"
        raise _rejected("foreign_signature", message, path, cure=cure)
    if signature.artifact != loaded.digest:
        message = f"{path} is of another artifact, {signature.artifact}; {loaded.path} is {loaded.digest}"
        cure = "take descriptor and signature from one place; a published descriptor is a new one, signed anew"
        raise _rejected("other_artifact", message, path, cure=cure)
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(bytes.fromhex(signature.signature), statement(loaded.digest))
    except InvalidSignature as error:
        message = f"{path} does not hold: its bytes are not what {name} signed"
        raise _rejected("damaged_signature", message, path, cure="get it again from who signed the artifact") from error
    return Signed(path=path, artifact=loaded.digest, key=name)


def _rejected(reason: str, message: str, path: Path, *, cure: str) -> SignatureRejected:
    return SignatureRejected(reason, message, cure=cure, facts={"path": str(path)})


def _name_of(public: Ed25519PublicKey) -> Digest:
    return Digest.of(public.public_bytes_raw())


def _private_key(path: Path) -> Ed25519PrivateKey:
    with _library():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    data = read_private(path, _KEY_LIMIT_BYTES, only_ours=True)
    try:
        found = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        # Its words could repeat what the file holds.
        raise UserError(f"{path} holds no private key in PEM, or a locked one", cure=_MAKE) from error
    if not isinstance(found, Ed25519PrivateKey):
        raise UserError(f"{path} holds a private key of another kind than Ed25519", cure=_MAKE)
    return found


def _public_key(path: Path) -> Ed25519PublicKey:
    with _library():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    cure = "write it with `openssl pkey -in PRIVATE -pubout -out PUBLIC`"
    data = read_private(path, _KEY_LIMIT_BYTES)
    if data.count(b"-----BEGIN ") > 1:
        raise UserError(f"{path} holds more than one key, and the first alone would count", cure="one key a file")
    try:
        found = load_pem_public_key(data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path} holds no public key in PEM", cure=cure) from error
    if not isinstance(found, Ed25519PublicKey):
        raise UserError(f"{path} holds a public key of another kind than Ed25519", cure=cure)
    return found


def _read(path: Path) -> bytes:
    """A signature proves itself, so whoever owns the file: any regular one, to its limit and a byte more."""
    with translated("read", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            return file.read(SIGNATURE_LIMIT_BYTES + 1)


@contextmanager
def _library() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        message = "signatures need the package cryptography, which is not installed"
        raise MissingCapability(message, cure="pip install 'coldsnap[sign]'") from error
