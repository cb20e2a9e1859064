"""A detached signature of an artifact: the statement that is signed, and the document that carries it.

What is signed is text, so that any tool can make the same statement:

    coldsnap artifact signature 1\n
    sha256:<digest of the artifact, which is that of its committed file>\n

Everything an artifact names is bound by digests, so the one signature covers capsules, packs and manifests too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from coldsnap.core.canonical import canonical_json
from coldsnap.core.digest import Digest
from coldsnap.core.parsing import Record, parse_document, plain_document, rule
from coldsnap.core.paths import show
from coldsnap.errors import Problem

__all__ = [
    "SIGNATURE_LIMIT_BYTES",
    "SIGNATURE_SUFFIX",
    "ArtifactSignature",
    "parse_signature",
    "signature_bytes",
    "statement",
]

SIGNATURE_LIMIT_BYTES = 64 * 1024
SIGNATURE_SUFFIX = ".sig"
_SIGNATURE_DIGITS = 128


class ArtifactSignature(Record):
    """``signature`` is that of ``statement(artifact)``, by the key whose 32 public bytes have the SHA-256 ``key``."""

    format: Literal[1]
    kind: Literal["coldsnap-artifact-signature"]
    algorithm: Literal["ed25519"]
    artifact: Digest
    key: Digest
    signature: str

    @rule
    def _signature_is_64_bytes(self) -> Iterator[Problem]:
        if len(self.signature) != _SIGNATURE_DIGITS or not set(self.signature) <= set("0123456789abcdef"):
            yield Problem(
                field="signature",
                message=f"is not {_SIGNATURE_DIGITS} lower-case hex digits",
                value=show(self.signature),
                cure="sign the artifact again",
            )


def statement(artifact: Digest) -> bytes:
    """What a signature of the artifact with this digest signs."""
    return f"coldsnap artifact signature 1\n{artifact}\n".encode()


def signature_bytes(signature: ArtifactSignature) -> bytes:
    """The signature as a file: canonical JSON and a newline."""
    return canonical_json(plain_document(signature)) + b"\n"


def parse_signature(data: bytes) -> ArtifactSignature:
    """Read a signature's file. Raises InvalidDocument with every problem."""
    return parse_document(ArtifactSignature, data, subject="artifact signature", limit_bytes=SIGNATURE_LIMIT_BYTES)
